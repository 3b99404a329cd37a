//! One behaviour each; random runs with moves, trims and failing drivers are in `tests/model`.

use super::*;
use crate::driver::sim::{SimDriver, SimOptions};
use crate::ids::{ChunkId, DeviceId};
use crate::units::Place as _;

const ONE: StreamId = StreamId(0);
const OTHER: StreamId = StreamId(7);

struct Bench {
    device: Arc<Device>,
    pool: PagePool,
    next: u64,
}

impl Bench {
    fn new() -> Bench {
        let sim = SimDriver::new(SimOptions::with_devices(&[Bytes::gib(64)]));
        let device = Device::open(Arc::new(sim), DeviceId(0)).unwrap();
        let policy = PagePolicy { piece_min: Bytes::mib(1), ..PagePolicy::default() };
        Bench { pool: PagePool::new(Arc::clone(&device), policy), device, next: 0 }
    }

    /// Four chunks of 4 MiB with an allocation each, of which the first and the third were freed.
    fn with_gaps() -> (Bench, Vec<DeviceAddress>) {
        let mut bench = Bench::new();
        bench.extend(&[4, 4, 4, 4], ONE);
        let blocks: Vec<DeviceAddress> = (0..4).map(|_| bench.mib(4)).collect();
        bench.free(blocks[0]);
        bench.free(blocks[2]);
        (bench, blocks)
    }

    fn chunk(&mut self, mib: u64) -> Arc<Chunk> {
        self.next += 1;
        Arc::new(Chunk::create(&self.device, ChunkId(self.next), Bytes::mib(mib)).unwrap())
    }

    fn extend(&mut self, mib: &[u64], stream: StreamId) {
        let chunks: Vec<Arc<Chunk>> = mib.iter().map(|mib| self.chunk(*mib)).collect();
        self.pool.extend(&chunks, stream).unwrap();
        self.pool.invariants(None).unwrap();
    }

    fn alloc(&mut self, bytes: Bytes) -> Option<DeviceAddress> {
        let served = self.pool.alloc(bytes, ONE);
        self.pool.invariants(None).unwrap();
        served
    }

    fn mib(&mut self, mib: u64) -> DeviceAddress {
        self.alloc(Bytes::mib(mib)).unwrap()
    }

    fn free(&mut self, address: DeviceAddress) {
        self.pool.free(address).unwrap();
        self.pool.invariants(None).unwrap();
    }

    /// Stitches a request, with one new chunk for what lacks; says where and how much that was.
    fn stitch(&mut self, bytes: Bytes) -> (DeviceAddress, u64) {
        let shortage = self.pool.shortage(bytes, ONE, false).expect("something is idle");
        let lacks = shortage.lacks.get() >> 20;
        let chunks: Vec<Arc<Chunk>> = (lacks > 0).then(|| self.chunk(lacks)).into_iter().collect();
        let served = self.pool.stitch(&shortage.pieces, &chunks, bytes, ONE).unwrap();
        self.pool.invariants(None).unwrap();
        (served.expect("the pieces are free"), lacks)
    }
}

#[test]
fn requests_lie_side_by_side_across_chunks() {
    let mut bench = Bench::new();
    bench.extend(&[4, 2, 8], ONE);
    let first = bench.mib(3);
    let second = bench.alloc(Bytes::mib(5) - Bytes::new(100)).unwrap();
    assert_eq!(second, first.checked_add(Bytes::mib(3)).unwrap());
    assert_eq!((bench.pool.len_of(second), bench.pool.chunks_at(second).len()), (Some(Bytes::mib(5)), 3));
    assert_eq!(bench.pool.free_bytes(), Bytes::mib(6));
    assert_eq!(bench.pool.free(first), Some(Bytes::mib(3)));
    assert_eq!(bench.pool.free(first), None);
}

#[test]
fn the_shortest_run_is_taken_and_lowest_first() {
    let mut bench = Bench::new();
    bench.extend(&[32], ONE);
    let held: Vec<DeviceAddress> = [4, 1, 2, 1, 4, 1].map(|mib| bench.mib(mib)).to_vec();
    [0, 2, 4].into_iter().for_each(|at| bench.free(held[at]));
    assert_eq!(bench.mib(2), held[2]);
    assert_eq!(bench.mib(3), held[0]);
    assert_eq!(bench.mib(4), held[4]);
}

#[test]
fn new_chunks_continue_the_free_end() {
    let mut bench = Bench::new();
    bench.extend(&[4], ONE);
    let first = bench.mib(3);
    assert_eq!(bench.pool.lacks_at_end(Bytes::mib(6), ONE), Some(Bytes::mib(6)), "5, rounded up to chunks");
    bench.extend(&[6], ONE);
    assert_eq!(bench.mib(6), first.checked_add(Bytes::mib(3)).unwrap());
    assert_eq!(bench.pool.lacks_at_end(Bytes::MAX, ONE), None);
}

#[test]
fn idle_chunks_are_shown_side_by_side() {
    let (mut bench, _) = Bench::with_gaps();
    assert_eq!(bench.alloc(Bytes::mib(8)), None);
    let (place, lacks) = bench.stitch(Bytes::mib(8));
    assert_eq!((lacks, bench.device.mapped().0), (0, 6));
    assert_eq!(bench.alloc(Bytes::mib(4)), None, "their homes are taken meanwhile");
    assert_eq!(bench.pool.chunks_at(place).len(), 2);
    let inside = place.checked_add(Bytes::mib(5)).unwrap();
    assert_eq!(bench.pool.find(inside).unwrap().span.start(), place);
    bench.free(place);
    // The same place serves again, without a call; a shorter request may use its beginning.
    assert_eq!(bench.mib(8), place);
    bench.free(place);
    assert_eq!(bench.alloc(Bytes::mib(7)), Some(place));
    assert_eq!(bench.device.mapped().0, 6);
    assert_eq!(bench.pool.counts().reused_places, 2);
}

#[test]
fn what_lies_behind_a_piece_of_a_place_is_found() {
    let (mut bench, blocks) = Bench::with_gaps();
    let (place, _) = bench.stitch(Bytes::mib(8));
    // The first and the third chunk are the place's: from the start on allocations do not lead to these.
    for block in [blocks[1], blocks[3]] {
        let inside = block.checked_add(Bytes::mib(1)).unwrap();
        assert_eq!(bench.pool.find(inside).map(|found| found.span.start()), Some(block));
    }
    let at_home = blocks[2].checked_add(Bytes::mib(1)).unwrap();
    assert_eq!(bench.pool.find(at_home), None, "it is live at the place alone");
    bench.free(place);
    assert_eq!(bench.pool.find(at_home), None);
}

#[test]
fn what_was_not_found_is_found_once_something_is_freed() {
    let (mut bench, blocks) = Bench::with_gaps();
    let (place, _) = bench.stitch(Bytes::mib(8));
    bench.free(place);
    let first = bench.mib(4);
    assert_eq!((bench.alloc(Bytes::mib(8)), bench.alloc(Bytes::mib(8))), (None, None));
    bench.free(first);
    assert_eq!(bench.alloc(Bytes::mib(8)), Some(place));
    bench.free(place);
    bench.free(blocks[3]);
    assert_eq!(bench.alloc(Bytes::mib(8)), Some(blocks[2]), "at home comes first");
}

#[test]
fn a_place_begins_and_ends_inside_chunks() {
    let mut bench = Bench::new();
    bench.extend(&[4, 4, 4], ONE);
    // Free: the last 3 MiB of the first chunk, and the first 2 MiB of the third.
    let parts: Vec<DeviceAddress> = [1, 3, 4, 2, 2].map(|mib| bench.mib(mib)).to_vec();
    bench.free(parts[1]);
    bench.free(parts[3]);
    let (place, lacks) = bench.stitch(Bytes::mib(9));
    assert_eq!(lacks, 4, "5 are used of what is idle");
    assert_eq!(bench.pool.free_bytes(), Bytes::ZERO);
    bench.free(place);
    assert_eq!(bench.mib(9), place);
}

#[test]
fn a_place_needs_all_of_its_bytes() {
    let (mut bench, _) = Bench::with_gaps();
    let (place, _) = bench.stitch(Bytes::mib(8));
    bench.free(place);
    let small = bench.alloc(Bytes::new(512)).unwrap();
    assert_eq!(bench.alloc(Bytes::mib(8)), None);
    bench.free(small);
    assert_eq!(bench.mib(8), place);
}

#[test]
fn each_stream_has_its_own_memory() {
    let mut bench = Bench::new();
    bench.extend(&[8], ONE);
    assert_eq!(bench.pool.alloc(Bytes::mib(1), OTHER), None);
    bench.extend(&[2], OTHER);
    let other = bench.pool.alloc(Bytes::mib(1), OTHER).unwrap();
    assert_eq!(bench.pool.stream_at(other), Some(OTHER));
    assert_eq!(bench.pool.idle_chunks_of_others(OTHER), Bytes::mib(8));
    let moved = bench.pool.trim_others(OTHER, Bytes::mib(8));
    bench.pool.extend(&moved, OTHER).unwrap();
    bench.pool.invariants(None).unwrap();
    assert!(bench.pool.alloc(Bytes::mib(9), OTHER).is_some(), "what is left of its own chunk and the other's");
}

#[test]
fn trimmed_chunks_leave_every_address() {
    let (mut bench, blocks) = Bench::with_gaps();
    let (place, _) = bench.stitch(Bytes::mib(8));
    bench.free(place);
    // The beginning of a place stays when the chunk behind it goes.
    let short = bench.alloc(Bytes::mib(3)).unwrap();
    let chunks = bench.pool.trim(Bytes::MAX);
    bench.pool.invariants(None).unwrap();
    assert_eq!(chunks.iter().map(|chunk| chunk.len()).sum::<Bytes>(), Bytes::mib(4));
    assert_eq!((short, bench.device.mapped().0), (blocks[0], 4));
    assert!(chunks.iter().all(|chunk| Arc::strong_count(chunk) == 1));
    bench.free(short);
    assert_eq!(bench.pool.trim(Bytes::MAX).len(), 1);
    assert_eq!((bench.pool.held(), bench.device.mapped().0), (Bytes::mib(8), 2));
}

#[test]
fn a_trim_gives_little_more_than_wanted() {
    let mut bench = Bench::new();
    bench.extend(&[64, 2, 16, 4], ONE);
    let given = |chunks: Vec<Arc<Chunk>>| chunks.iter().map(|chunk| chunk.len().get() >> 20).sum::<u64>();
    assert_eq!(given(bench.pool.trim(Bytes::mib(5))), 6);
    assert_eq!(given(bench.pool.trim(Bytes::mib(1))), 16);
    assert_eq!(given(bench.pool.trim(Bytes::mib(100))), 64);
    assert_eq!(bench.pool.range_count(), 0, "the range goes with its last chunk");
}

#[test]
fn thousands_of_streams_have_addresses_and_so_does_a_long_request_on_the_last() {
    let mut bench = Bench::new();
    for stream in 0..2000 {
        bench.extend(&[2], StreamId(stream));
    }
    let last = StreamId(2000);
    bench.extend(&[2; 5], last);
    bench.extend(&[20 << 10], last);
    assert!(bench.pool.alloc(Bytes::gib(20), last).is_some());
    assert_eq!(bench.pool.range_count(), 2002);
}
