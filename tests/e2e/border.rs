//! The C border: a C program built against the header, and Python through ctypes.

use std::io::{BufRead as _, BufReader};
use std::process::Command;

use rustix::process::Pid;

use crate::compiled::{Language, compiled, run};
use crate::support::{TestDaemon, client_library, hear, needs_host, python};

/// Runs a script that says `fine` when all of it held.
pub(crate) fn ends_fine(daemon: &TestDaemon, script: &str) {
    let Some(mut client) = python(daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "fine");
    assert!(client.wait().unwrap().success());
}

#[test]
fn the_c_example_builds_and_runs() {
    if needs_host("the example writes with the CPU") {
        return;
    }
    let daemon = TestDaemon::start(128);
    let target = daemon.path().join("hello");
    let Some(program) = compiled(Language::C, "client/examples/hello.c", target, &[]) else { return };
    let output = run(&program, &daemon, &[], &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "67108864 bytes at a multiple of 512: yes\n");
    let output = run(&program, &daemon, &[], &[("STITCHD_SOCKET", "/nowhere/stitchd.sock")]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("no stitchd daemon answers at /nowhere/stitchd.sock"), "{text}");
}

#[test]
fn frees_of_what_is_not_live_change_nothing_and_are_told() {
    let daemon = TestDaemon::start(64);
    let script = "\
p = malloc(1000)
free(p, 1000)
free(p, 1000)
why = lib.stitch_last_error().decode()
assert 'is not a live allocation' in why, why
free(0x1000, 1)
q = malloc(2000)
lib.stitch_free(q, 2000, 5, None)
why = lib.stitch_last_error().decode()
assert f'{q:x}' in why and 'is not a live allocation' in why, why
free(q, 2000)
free(None, 0)
assert lib.stitch_malloc(0, 0, None) is None
assert lib.stitch_malloc(MIB, 77, None) is None
assert lib.stitch_malloc(1 << 62, 0, None) is None
q = malloc(1000)
assert q == p
say('fine')
";
    ends_fine(&daemon, script);
}

#[test]
fn a_device_that_is_not_there_keeps_nobody_from_one_that_is() {
    let daemon = TestDaemon::start(64);
    let script = "\
assert lib.stitch_malloc(MIB, 5, None) is None
p = malloc(MIB)
assert lib.stitch_malloc(MIB, 5, None) is None
say('fine')
";
    ends_fine(&daemon, script);
}

#[test]
fn a_plan_that_could_not_be_read_does_not_cost_the_process_its_figures() {
    let daemon = TestDaemon::start(64);
    let script = "\
os.environ['STITCHD_PLAN'] = '/nowhere/a.plan'
assert lib.stitch_malloc(MIB, 0, None) is None
assert '/nowhere/a.plan' in lib.stitch_last_error().decode()
del os.environ['STITCHD_PLAN']
while not lib.stitch_malloc(5 * MIB, 0, None): time.sleep(0.1)
say('fine')
sys.stdin.read()
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "fine");
    assert_eq!(daemon.cli_json(&["sessions"])["sessions"][0]["counters"]["live_bytes"], 5_u64 << 20);
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
}

#[test]
fn the_manifest_of_an_allocation_names_its_chunks_piece_by_piece() {
    let daemon = TestDaemon::start(64);
    let script = "\
class Piece(ctypes.Structure):
    _fields_ = [('address', ctypes.c_void_p), ('size', ctypes.c_size_t), ('offset', ctypes.c_size_t), ('handle', ctypes.c_uint64)]
lib.stitch_range_manifest.restype = ctypes.c_size_t
lib.stitch_range_manifest.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Piece), ctypes.c_size_t]
def manifest(p):
    count = lib.stitch_range_manifest(p, 0, None, 0)
    assert count, lib.stitch_last_error()
    pieces = (Piece * (count + 1))()
    assert lib.stitch_range_manifest(p, 0, pieces, count + 1) == count
    assert pieces[count].size == 0
    return pieces[:count]
def check(p, size):
    at = p
    for number, piece in enumerate(manifest(p)):
        assert piece.address == at and 0 < piece.size and piece.offset + piece.size <= 2 * MIB and piece.handle
        mark = b'piece%03d' % number
        poke(piece.address + piece.size - 8, mark)
        # On the host driver a handle is a descriptor, and the chunk's bytes are what it reads.
        if not gpu: assert os.pread(piece.handle, 8, piece.offset + piece.size - 8) == mark
        at += piece.size
    # To the end of its block, which is whole chunks for large ones.
    assert p + size <= at < p + size + 2 * MIB, (at, p, size)
# Side by side, an allocation that begins and ends inside of chunks, and a stitched one: of every second 4 MiB.
small = malloc(1000 * 512), malloc(3 * MIB + 512)
check(small[0], 1000 * 512)
check(small[1], 3 * MIB + 512)
for p, size in zip(small, (1000 * 512, 3 * MIB + 512)): free(p, size)
blocks = [malloc(8 * MIB) for _ in range(7)]
for p in blocks[::2]: free(p, 8 * MIB)
stitched = malloc(30 * MIB)
check(stitched, 30 * MIB)
handles = [piece.handle for piece in manifest(stitched)]
assert len(set(handles)) == len(handles) == 15
one = (Piece * 2)()
assert lib.stitch_range_manifest(stitched, 0, one, 1) == 15 and one[0].size == 2 * MIB and one[1].size == 0
assert lib.stitch_range_manifest(stitched + 512, 0, None, 0) == 0
assert 'not a live allocation' in lib.stitch_last_error().decode()
say('fine')
";
    ends_fine(&daemon, script);
}

#[test]
fn the_library_says_nothing_on_its_own_and_needs_no_driver() {
    let Some(library) = client_library() else { return println!("SKIP: libstitchd_client.so was not built") };
    let script = "\
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.stitch_malloc.restype = ctypes.c_void_p
lib.stitch_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
for _ in range(1000):
    assert lib.stitch_malloc(100, 0, None) is None
";
    let output = Command::new("python3")
        .args(["-c", script])
        .arg(&library)
        .env("STITCHD_SOCKET", "/nowhere/stitchd.sock")
        .output();
    let Ok(output) = output else { return println!("SKIP: python3 cannot be started") };
    assert!(output.status.success());
    assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_process_without_open_files_hears_what_to_raise_and_goes_on_when_it_has_some() {
    let daemon = TestDaemon::start(1300);
    let script = "\
import os, resource, signal, time
first = malloc(1000)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
taken = []
try:
    while True: taken.append(os.open('/dev/null', os.O_RDONLY))
except OSError: pass
# Room for some of what comes, and for none; in one message, and in several.
for mib, left in ((48, 3), (48, 0), (1200, 3), (1200, 0)):
    for fd in taken[:left]: os.close(fd)
    began = time.monotonic()
    assert lib.stitch_malloc(mib * MIB, 0, None) is None
    why = lib.stitch_last_error().decode()
    assert 'ulimit -n' in why, why
    assert time.monotonic() - began < 4, time.monotonic() - began
    taken = taken[left:] + [os.open('/dev/null', os.O_RDONLY) for _ in range(left)]
# No thread of its own has to look after what came.
print('short', flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
began = time.monotonic()
for _ in range(20):
    free(malloc(48 * MIB), 48 * MIB)
assert time.monotonic() - began < 4, time.monotonic() - began
print('fine', flush=True)
import sys
sys.stdin.readline()
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "short");
    // What came and was not wanted is not leased to anybody.
    daemon.wait_for_device("leased_bytes", 2 << 20);
    rustix::process::kill_process(Pid::from_child(&client), rustix::process::Signal::CONT).unwrap();
    assert_eq!(hear(&mut lines), "fine");
    daemon.wait_for_device("leased_bytes", 50 << 20);
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
}
