//! Processes that die in the middle of their work.

use std::io::{BufRead as _, BufReader, Write as _};

use stitchd::pool::Request;
use stitchd::units::Bytes;

use crate::support::{PATIENCE, TestDaemon, eventually, hear, needs_host, python};

const MIB: u64 = 1 << 20;

#[test]
fn a_killed_clients_bytes_can_be_leased_again_and_exactly_once() {
    let daemon = TestDaemon::start(64);
    let script = "\
while True:
    blocks = [(malloc(n * MIB), n * MIB) for n in (3, 7, 20)]
    say('working')
    for p, n in blocks: free(p, n)
";
    for round in 1..=5 {
        let Some(mut client) = python(&daemon, script) else { return };
        let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
        for _ in 0..50 {
            hear(&mut lines);
        }
        let leased = daemon.device("leased_bytes");
        assert!(leased >= 30 * MIB);
        client.kill().unwrap();
        client.wait().unwrap();
        daemon.wait_for_device("available_bytes", 64 * MIB);
        let returned = daemon.status()["returned_by_death_bytes"].as_u64().unwrap();
        assert_eq!(returned, leased * round);
        // All of it, and not a byte more.
        let next = daemon.runtime("next");
        next.alloc(&Request::of(Bytes::mib(64))).unwrap();
        next.alloc(&Request::of(Bytes::mib(2))).unwrap_err();
        drop(next);
        daemon.wait_for_device("available_bytes", 64 * MIB);
    }
}

#[test]
fn a_forked_child_that_keeps_the_sockets_open_does_not_delay_the_return() {
    let daemon = TestDaemon::start(64);
    let script = "\
p = malloc(40 * MIB)
if os.fork() == 0:
    # The child has copies of every descriptor: close the chunks', keep the sockets.
    for fd in os.listdir('/proc/self/fd'):
        try:
            if 'chunk' in os.readlink('/proc/self/fd/' + fd): os.close(int(fd))
        except OSError: pass
    say('child', os.getpid(), 0)
    time.sleep(60)
    os._exit(0)
say('parent')
sys.stdin.read()
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    let child = Orphan::of(&[hear(&mut lines), hear(&mut lines)]);
    client.kill().unwrap();
    client.wait().unwrap();
    daemon.wait_for_device("available_bytes", 64 * MIB);
    assert!(child.is_alive(), "the child should still be there, with the sockets open");
}

#[test]
fn a_forked_child_that_keeps_writing_to_its_parents_memory_disturbs_no_later_holder() {
    if needs_host("a forked child cannot use its parent's GPU") {
        return;
    }
    let daemon = TestDaemon::start(64);
    let script = "\
p = malloc(30 * MIB)
if os.fork() == 0:
    # Not inherited: the mapping itself. So a hostile child maps again what it has as descriptors.
    def is_chunk(fd):
        try: return 'stitchd-chunk' in os.readlink('/proc/self/fd/' + fd)
        except OSError: return False
    maps = [mmap.mmap(int(fd), 2 * MIB) for fd in list(filter(is_chunk, os.listdir('/proc/self/fd')))]
    say('child', os.getpid(), len(maps))
    while True:
        for m in maps: m[0:8] = b'HOSTILE!'
say('parent')
sys.stdin.read()
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    let child = Orphan::of(&[hear(&mut lines), hear(&mut lines)]);
    assert_eq!(child.maps, 15);
    client.kill().unwrap();
    client.wait().unwrap();
    eventually("the dead parent's session ends", || (daemon.status()["sessions"] == 0).then_some(()));
    // What the child holds is nobody's to lease; the rest is.
    let next = daemon.runtime("next");
    next.alloc(&Request::of(Bytes::mib(40))).unwrap_err();
    let address = next.alloc(&Request::of(Bytes::mib(34))).unwrap();
    let mut bytes = vec![9; 34 << 20];
    for _ in 0..5 {
        next.device().driver().read(address, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "the child of a dead process writes into another's memory");
    }
    assert_eq!(daemon.device("foreign_bytes"), 30 * MIB);
    drop(child);
    daemon.wait_for_device("foreign_bytes", 0);
    next.alloc(&Request::of(Bytes::mib(30))).unwrap();
}

#[test]
fn a_forked_child_is_inert_and_its_parent_unharmed() {
    let daemon = TestDaemon::start(64);
    let script = "\
p = malloc(8 * MIB)
poke(p, b'A' * 8)
pid = os.fork()
if pid == 0:
    q = lib.stitch_malloc(MIB, 0, None)
    why = lib.stitch_last_error().decode()
    free(p, 8 * MIB)
    os._exit(0 if q is None and 'forked' in why else 1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert peek(p, 8) == b'A' * 8
q = malloc(20 * MIB)
free(q, 20 * MIB)
free(p, 8 * MIB)
say('fine')
sys.stdin.read()
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "fine");
    drop(client.stdin.take());
    assert!(client.wait().unwrap().success());
}

#[test]
fn a_client_goes_on_with_what_it_has_when_the_daemon_dies() {
    let daemon = TestDaemon::start(64);
    let script = "\
p = malloc(20 * MIB)
free(p, 20 * MIB)
say('leased')
sys.stdin.readline()
for _ in range(100):
    a = malloc(12 * MIB); b = malloc(8 * MIB)
    poke(a + 12 * MIB - 8, b'A' * 8)
    free(a, 12 * MIB); free(b, 8 * MIB)
start = time.time()
q = lib.stitch_malloc(40 * MIB, 0, None)
assert q is None
assert time.time() - start < 10
why = lib.stitch_last_error().decode()
assert 'daemon went away' in why, why
say('went on')
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "leased");
    drop(daemon.kill());
    writeln!(client.stdin.take().unwrap(), "go").unwrap();
    assert_eq!(hear(&mut lines), "went on");
    assert!(client.wait().unwrap().success());
}

#[test]
fn a_daemon_that_is_stopped_is_an_error_in_bounded_time_whatever_signals_come() {
    let daemon = TestDaemon::start(64);
    let script = "\
import signal
p = malloc(2 * MIB)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
say('ready')
sys.stdin.readline()
start = time.time()
q = lib.stitch_malloc(40 * MIB, 0, None)
say(q, round(time.time() - start, 1))
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "ready");
    let daemon_pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
    rustix::process::kill_process(daemon_pid, rustix::process::Signal::STOP).unwrap();
    // Threads stop one by one, some after the signal was sent.
    eventually("that every thread of the daemon stops", || are_stopped(daemon.pid()).then_some(()));
    writeln!(client.stdin.take().unwrap(), "go").unwrap();
    let said = hear(&mut lines);
    rustix::process::kill_process(daemon_pid, rustix::process::Signal::CONT).unwrap();
    client.wait().unwrap();
    let seconds: f64 = said.strip_prefix("None ").unwrap_or_else(|| panic!("{said}")).parse().unwrap();
    assert!(seconds < PATIENCE.as_secs_f64(), "{said}");
}

/// Every thread of the process is stopped.
fn are_stopped(pid: u32) -> bool {
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(|task| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        // The state follows the name, which may hold anything.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    })
}

/// A child that outlives its parent, and not the test.
struct Orphan {
    pid: i32,
    maps: u64,
}

impl Orphan {
    /// From what parent and child said, in whatever order: one of the lines is "child", its pid, and how many chunks it has mapped.
    fn of(said: &[String]) -> Orphan {
        let words: Vec<_> = said.iter().filter_map(|line| line.strip_prefix("child ")).collect();
        let (pid, maps) = words.first().unwrap_or_else(|| panic!("{said:?}")).split_once(' ').unwrap();
        Orphan { pid: pid.parse().unwrap(), maps: maps.parse().unwrap() }
    }

    fn is_alive(&self) -> bool {
        std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).is_ok_and(|stat| !stat.contains(") Z"))
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.pid).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}
