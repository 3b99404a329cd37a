//! What the C border says of a process's memory: statistics, snapshot, blocks, candidates.

use crate::border;
use crate::support::TestDaemon;

/// What every script here needs.
const PRELUDE: &str = "\
import json
class Block(ctypes.Structure):
    _fields_ = [('address', ctypes.c_void_p), ('size', ctypes.c_size_t), ('before', ctypes.c_size_t), ('after', ctypes.c_size_t)]
class Free(ctypes.Structure):
    _fields_ = [('before', ctypes.c_size_t), ('after', ctypes.c_size_t)]
lib.stitch_block_of.restype = Block
lib.stitch_block_of.argtypes = [ctypes.c_void_p]
lib.stitch_adjacent_free_bytes.restype = Free
lib.stitch_adjacent_free_bytes.argtypes = [ctypes.c_void_p]
lib.stitch_release_candidates.restype = ctypes.c_size_t
lib.stitch_release_candidates.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(Block), ctypes.c_size_t]
lib.stitch_memory_stat.restype = ctypes.c_int64
lib.stitch_record_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
for name in ('stitch_memory_stats', 'stitch_memory_snapshot'):
    getattr(lib, name).restype = ctypes.c_size_t
    getattr(lib, name).argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
def told(name, device=0):
    size = getattr(lib, name)(device, None, 0)
    text = ctypes.create_string_buffer(size + 1)
    assert getattr(lib, name)(device, text, size + 1) == size and len(text.value) == size
    cut = ctypes.create_string_buffer(b'x' * 9)
    assert getattr(lib, name)(device, cut, 3) == size and cut.value == text.value[:2] and cut.raw[3:9] == b'xxxxxx'
    return json.loads(text.value)
def stats(): return told('stitch_memory_stats')
def stat(name): return lib.stitch_memory_stat(0, name.encode())
def block(p):
    got = lib.stitch_block_of(p)
    free = lib.stitch_adjacent_free_bytes(p)
    assert (free.before, free.after) == (got.before, got.after)
    return got.address, got.size, got.before, got.after
";

fn ends_fine(daemon: &TestDaemon, script: &str) {
    border::ends_fine(daemon, &format!("{PRELUDE}{script}"));
}

#[test]
fn statistics_have_pytorchs_names_and_meanings() {
    let daemon = TestDaemon::start(64);
    let script = "\
assert told('stitch_memory_stats') == {} and told('stitch_memory_snapshot') == [] and stat('num_ooms') == 0
BIG = 4 * MIB - 65536
p, q = malloc(1000), malloc(BIG)
now = stats()
assert now['requested_bytes.all.current'] == 1000 + BIG, now
assert now['allocated_bytes.all.current'] == 1024 + BIG == now['active_bytes.all.peak'], now
assert now['allocated_bytes.small_pool.current'] == 0 and now['allocated_bytes.large_pool.current'] == 1024 + BIG
# Where memory stays with its addresses each growth has a range of its own.
ranges = now['segment.all.current']
reserved = {1: 4 * MIB, 2: 6 * MIB}[ranges]
assert now['reserved_bytes.all.current'] == reserved == now['reserved_bytes.all.peak'], now
assert now['allocation.all.current'] == 2 == now['allocation.all.allocated'], now
assert now['segment.small_pool.current'] == 0, now
assert now['inactive_split_bytes.all.current'] == reserved - 1024 - BIG and now['inactive_split.all.current'] == ranges, now
assert now['num_ooms'] == 0 and now['num_alloc_retries'] == 0
# What PyTorch's own table of them looks up.
parts = ('current', 'peak', 'allocated', 'freed')
figures = ('allocation', 'segment', 'active', 'inactive_split', 'allocated_bytes', 'reserved_bytes', 'active_bytes', 'inactive_split_bytes', 'requested_bytes')
names = {f'{f}.{pool}.{part}' for f in figures for pool in ('all', 'small_pool', 'large_pool') for part in parts}
names |= {f'oversize_{what}.{part}' for what in ('allocations', 'segments') for part in parts}
assert set(now) == names | {'num_alloc_retries', 'num_ooms', 'num_sync_all_streams', 'num_device_alloc', 'num_device_free', 'max_split_size'}, set(now) ^ names
for f in figures:
    assert now[f'{f}.all.current'] == now[f'{f}.small_pool.current'] + now[f'{f}.large_pool.current'], (f, now)
free(q, BIG)
free(malloc(500), 500)
now = stats()
assert now['allocated_bytes.all.current'] == 1024 and now['allocated_bytes.all.peak'] == 1024 + BIG, now
assert now['allocated_bytes.all.freed'] == BIG + 512 and now['allocation.all.freed'] == 2, now
assert now['reserved_bytes.all.current'] == reserved, now
assert now['allocation.large_pool.allocated'] == 3 and now['allocation.large_pool.peak'] == 2, now
assert now['requested_bytes.large_pool.peak'] == 1000 + BIG and now['requested_bytes.large_pool.freed'] == BIG + 500, now
assert now['allocation.small_pool.allocated'] == 0 == now['requested_bytes.small_pool.peak'], now
assert lib.stitch_malloc(100 * MIB, 0, None) is None
assert stat('num_ooms') == 1 and stat('num_alloc_retries') == 1
lib.stitch_reset_peak_memory_stats(0)
lib.stitch_reset_accumulated_memory_stats(0)
now = stats()
assert now['allocated_bytes.all.peak'] == 1024 and now['allocated_bytes.all.allocated'] == 0, now
assert now['num_ooms'] == 0 and now['allocation.all.peak'] == 1, now
assert now['active.large_pool.peak'] == 1 and now['allocation.large_pool.allocated'] == 0, now
assert now['allocated_bytes.large_pool.peak'] == 1024 and now['requested_bytes.large_pool.allocated'] == 0, now
assert all(stat(name) == value for name, value in now.items())
assert stat('no such figure') == -1 and 'no such figure' in lib.stitch_last_error().decode()
say('fine')
";
    ends_fine(&daemon, script);
}

#[test]
fn a_snapshot_has_pytorchs_shape_and_shows_stitched_blocks_once() {
    let daemon = TestDaemon::start(64);
    let script = "\
small = malloc(1000)
blocks = [malloc(8 * MIB) for _ in range(7)]
for p in blocks[::2]: free(p, 8 * MIB)
stitched = malloc(30 * MIB)
segments = told('stitch_memory_snapshot')
keys = {'device', 'address', 'total_size', 'allocated_size', 'active_size', 'requested_size', 'stream', 'segment_type', 'segment_pool_id', 'is_expandable', 'frames', 'blocks'}
assert all(keys < set(segment) for segment in segments), segments
assert [s['address'] for s in segments] == sorted(s['address'] for s in segments)
for s in segments:
    at = s['address']
    for b in s['blocks']:
        assert b['address'] == at and set(b) >= {'address', 'size', 'requested_size', 'state', 'frames'}, b
        at += b['size']
    assert at == s['address'] + s['total_size'], s
home = [s for s in segments if not s['is_stitched']]
alias = [s for s in segments if s['is_stitched']]
now = stats()
assert sum(s['total_size'] for s in home) == now['reserved_bytes.all.current']
assert sum(s['allocated_size'] for s in segments) == now['allocated_bytes.all.current']
assert sum(s['requested_size'] for s in segments) == now['requested_bytes.all.current'] == 1000 + 54 * MIB
assert [(s['address'], s['total_size']) for s in alias] == [(stitched, 30 * MIB)], alias
shown = [b for s in home for b in s['blocks'] if b.get('shown')]
assert sum(b['size'] for b in shown) == 30 * MIB and all(b['state'] == 'inactive' for b in shown)
assert all(s['segment_type'] == 'large' for s in segments), segments
first, = [b for s in home for b in s['blocks'] if b['address'] == small]
assert first == {'address': small, 'size': 1024, 'requested_size': 1000, 'state': 'active_allocated', 'frames': []}
say('fine')
";
    ends_fine(&daemon, script);
}

#[test]
fn blocks_are_found_by_any_byte_and_ranked_by_the_room_that_they_would_make() {
    let daemon = TestDaemon::start(128);
    let script = "\
small = [malloc(1000) for _ in range(3)]
p = [malloc(4 * MIB) for _ in range(4)]
big = malloc(24 * MIB)
free(big, 24 * MIB)
cut = malloc(6 * MIB)
# The rest of its range: with the end of the range before it, unless each growth has a range of its own.
rest = block(cut)[3]
assert rest in (20 * MIB - 3072, 18 * MIB), rest
assert cut == big and block(cut + 5 * MIB) == (cut, 6 * MIB, 0, rest), block(cut)
other = malloc(4 * MIB)
assert block(cut) == (cut, 6 * MIB, 0, 0 if other == cut + 6 * MIB else rest)
free(small[1], 1000)
assert block(small[0] + 999) == (small[0], 1024, 0, 1024), block(small[0])
assert block(small[2])[2] == 1024
for nobody in (0, 4096, small[1], small[1] + 700, 1 << 60):
    assert block(nobody) == (None, 0, 0, 0), nobody
count = lib.stitch_release_candidates(8 * MIB, 0, None, 0)
assert count == 4 + 2 + 2
ranked = (Block * count)()
assert lib.stitch_release_candidates(8 * MIB, 0, ranked, count) == count
rooms = [b.before + b.size + b.after for b in ranked]
enough = [room for room in rooms if room >= 8 * MIB]
assert enough and rooms == sorted(enough) + sorted(rooms[len(enough):], reverse=True), rooms
assert lib.stitch_release_candidates(8 * MIB, 1, ranked, count) == 0
say('fine')
";
    ends_fine(&daemon, script);
}
