//! Memory that goes back while its addresses stay: with its contents or without, by tag, while others use it, and in graphs' pools.

use std::sync::Arc;
use std::time::Duration;

use stitchd::driver::gpu::GpuKind;
use stitchd::error::ErrorKind;
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::rng::Rng;
use stitchd::runtime::{AllocError, PrivatePoolId, Runtime, RuntimeConfig, SleepError};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::{Bytes, DeviceAddress};

use crate::standin::Machine;
use crate::support::{TestDaemon, driver_name, hear, python};

const MIB: u64 = 1 << 20;

/// True where memory cannot sleep; says so, and sees to it that whoever tries is told.
fn cannot_sleep(daemon: &TestDaemon) -> bool {
    let cannot = driver_name() == "hip";
    if cannot {
        let refused = Job::start(daemon, "one").runtime.sleep(true).unwrap_err();
        assert_eq!((refused.kind(), refused), (ErrorKind::Unsupported, SleepError::Addresses));
        println!("SKIP: memory of this driver returns with its addresses only");
    }
    cannot
}

struct Job {
    session: Arc<Session>,
    runtime: Runtime,
    live: Vec<(DeviceAddress, usize, u8)>,
}

impl Job {
    fn start(daemon: &TestDaemon, name: &str) -> Job {
        Job::with(&daemon.session_config(name))
    }

    fn with(config: &SessionConfig) -> Job {
        let session = Session::connect(config).unwrap();
        let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
        Job { session, runtime, live: Vec::new() }
    }

    fn take(&mut self, bytes: usize, byte: u8) -> DeviceAddress {
        let address = self.runtime.alloc(&Request::of(Bytes::new(bytes as u64))).unwrap();
        self.session.driver().write(address, &vec![byte; bytes]).unwrap();
        self.live.push((address, bytes, byte));
        address
    }

    fn drop_at(&mut self, at: usize) {
        let (address, ..) = self.live.swap_remove(at);
        self.runtime.free(address, StreamId::DEFAULT).unwrap();
    }

    /// Every byte is what was written to it.
    fn is_whole(&self) -> bool {
        self.live.iter().all(|(address, bytes, byte)| {
            let mut found = vec![!byte; *bytes];
            self.session.driver().read(*address, &mut found).unwrap();
            found.iter().all(|found| found == byte)
        })
    }
}

#[test]
fn every_byte_comes_back_at_its_address_and_others_have_the_memory_meanwhile() {
    let daemon = TestDaemon::start(64);
    if cannot_sleep(&daemon) {
        return;
    }
    let mut job = Job::start(&daemon, "one");
    let mut rng = Rng::new(3);
    // Blocks that are packed, stitched from pieces, in slabs; some freed between, so that others lie around them.
    for round in 0..60_u8 {
        let bytes = [700, 40_000, 1 << 20, 3 << 20, 5 << 20][rng.index(5)];
        job.take(bytes, round + 1);
        while job.live.iter().map(|(_, bytes, _)| bytes).sum::<usize>() > 40 << 20 {
            job.drop_at(rng.index(job.live.len()));
        }
    }
    for round in 0..3 {
        let live: u64 = job.live.iter().map(|(_, bytes, _)| *bytes as u64).sum();
        let held = daemon.device("leased_bytes");
        let slept = job.runtime.sleep(true).unwrap();
        assert_eq!(slept.freed, Bytes::new(held), "round {round}");
        assert!(slept.kept >= Bytes::new(live));
        daemon.wait_for_device("available_bytes", 64 * MIB);
        assert_eq!((daemon.device("leased_bytes"), job.runtime.stats().held), (0, Bytes::ZERO));
        // Somebody else has all of it, and leaves his marks.
        let mut other = Job::start(&daemon, "two");
        other.take(60 << 20, 0xee);
        let refused = job.runtime.wake(Duration::ZERO).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Exhausted);
        assert!(refused.to_string().contains("'two'"), "{refused}");
        assert!(job.runtime.is_asleep());
        drop(other);
        daemon.wait_for_device("available_bytes", 64 * MIB);
        job.runtime.wake(Duration::from_secs(5)).unwrap();
        assert!(job.is_whole(), "round {round}");
        job.runtime.invariants().unwrap();
        // It goes on as before.
        for _ in 0..10 {
            job.drop_at(rng.index(job.live.len()));
            job.take(1 << 20, 0x77);
        }
        assert!(job.is_whole());
    }
}

#[test]
fn what_is_not_kept_is_memory_at_the_same_addresses_and_never_anothers() {
    let daemon = TestDaemon::start(64);
    if cannot_sleep(&daemon) {
        return;
    }
    let mut job = Job::start(&daemon, "one");
    let address = job.take(8 << 20, 5);
    let slept = job.runtime.sleep(false).unwrap();
    assert_eq!((slept.freed.get() >= 8 * MIB, slept.kept), (true, Bytes::ZERO));
    // Somebody else has it meanwhile, and leaves his marks.
    let mut other = Job::start(&daemon, "two");
    other.take(60 << 20, 0xee);
    drop(other);
    daemon.wait_for_device("available_bytes", 64 * MIB);
    job.runtime.wake(Duration::ZERO).unwrap();
    let mut found = vec![1; 8 << 20];
    job.session.driver().read(address, &mut found).unwrap();
    assert!(found.iter().all(|byte| matches!(byte, 0 | 5)), "it is another's old memory");
    job.session.driver().write(address, &[6; 16]).unwrap();
}

#[test]
fn what_sleeps_serves_nobody_and_what_is_freed_meanwhile_is_free() {
    let daemon = TestDaemon::start(64);
    if cannot_sleep(&daemon) {
        return;
    }
    let mut job = Job::start(&daemon, "one");
    job.take(8 << 20, 1);
    job.take(3 << 20, 2);
    assert_eq!(job.runtime.wake(Duration::ZERO).unwrap_err(), SleepError::Awake);
    job.runtime.sleep(true).unwrap();
    assert_eq!(job.runtime.sleep(true).unwrap_err(), SleepError::Asleep);
    let refused = job.runtime.alloc(&Request::of(Bytes::mib(1))).unwrap_err();
    assert_eq!(refused, AllocError::Asleep { requested: Bytes::mib(1) });
    assert!(!refused.is_lack(), "a smaller one would not be served");
    let private = job.runtime.alloc_private(PrivatePoolId(1, 1), &Request::of(Bytes::mib(1))).unwrap_err();
    assert_eq!(private, AllocError::Asleep { requested: Bytes::mib(1) });
    assert_eq!(job.runtime.trim(Bytes::LARGEST), Bytes::ZERO);
    assert_eq!(job.runtime.give_back_idle(Bytes::LARGEST), Bytes::ZERO);
    job.drop_at(0);
    job.runtime.wake(Duration::ZERO).unwrap();
    assert!(job.is_whole());
    job.runtime.trim(Bytes::LARGEST);
    job.take(8 << 20, 3);
    assert!(job.is_whole());
    drop(job);
    daemon.wait_for_device("available_bytes", 64 * MIB);
}

#[test]
fn one_that_ends_in_its_sleep_leaves_nothing_behind() {
    let daemon = TestDaemon::start(64);
    if cannot_sleep(&daemon) {
        return;
    }
    let mut job = Job::start(&daemon, "one");
    job.take(8 << 20, 1);
    job.runtime.sleep(true).unwrap();
    drop(job);
    daemon.wait_for_device("available_bytes", 64 * MIB);
    assert_eq!(daemon.cli_json(&["sessions"])["sessions"].as_array().unwrap().len(), 0);
}

#[test]
fn what_a_graph_replays_comes_back_whole_and_nothing_sleeps_while_it_is_captured() {
    let daemon = TestDaemon::start(64);
    if cannot_sleep(&daemon) {
        return;
    }
    let mut job = Job::start(&daemon, "one");
    let pool = PrivatePoolId(7, 1);
    job.runtime.begin_private(pool);
    let scratch = job.runtime.alloc_private(pool, &Request::of(Bytes::mib(2))).unwrap();
    job.session.driver().write(scratch, &[9; 1 << 20]).unwrap();
    // Freed by its program, and used by every replay.
    job.runtime.free(scratch, StreamId::DEFAULT).unwrap();
    assert_eq!(job.runtime.sleep(true).unwrap_err(), SleepError::Capturing);
    assert!(job.runtime.end_private(pool));
    job.take(4 << 20, 3);
    job.runtime.sleep(true).unwrap();
    job.runtime.wake(Duration::ZERO).unwrap();
    let mut found = vec![0; 1 << 20];
    job.session.driver().read(scratch, &mut found).unwrap();
    assert!(job.is_whole() && found.iter().all(|byte| *byte == 9));
}

#[test]
fn a_graph_that_goes_while_everything_sleeps_keeps_nothing_from_waking() {
    let daemon = TestDaemon::start(64);
    if cannot_sleep(&daemon) {
        return;
    }
    let mut job = Job::start(&daemon, "one");
    let pool = PrivatePoolId(7, 1);
    job.runtime.begin_private(pool);
    let captured = job.runtime.alloc_private(pool, &Request::of(Bytes::mib(2))).unwrap();
    assert!(job.runtime.end_private(pool));
    job.take(4 << 20, 3);
    job.runtime.sleep(true).unwrap();
    job.runtime.release_private(pool);
    job.runtime.free(captured, StreamId::DEFAULT).unwrap();
    job.runtime.wake(Duration::ZERO).unwrap();
    assert!(job.is_whole());
    assert_eq!(job.runtime.stats().private_use.held, Bytes::ZERO);
    job.runtime.invariants().unwrap();
}

#[test]
fn whoever_wakes_waits_for_its_turn() {
    let daemon = TestDaemon::start(64);
    if cannot_sleep(&daemon) {
        return;
    }
    let mut job = Job::start(&daemon, "one");
    job.take(40 << 20, 4);
    job.runtime.sleep(true).unwrap();
    let mut other = Job::start(&daemon, "two");
    other.take(40 << 20, 5);
    std::thread::scope(|scope| {
        let wakes = scope.spawn(|| job.runtime.wake(Duration::from_secs(20)));
        crate::support::eventually("it waits", || (daemon.device("waiting_requests") > 0).then_some(()));
        drop(other);
        wakes.join().unwrap().unwrap();
    });
    assert!(job.is_whole());
}

#[test]
fn what_is_kept_lies_in_memory_that_the_driver_has_locked_as_far_as_the_system_locks_some() {
    // In the second case there is room for one sleep, and for another only once the first has given it back.
    let cases = [("", true), ("\nlocked_bytes = 41943040", true), ("\nlocked_bytes = 1048576", false)];
    for (conf, is_locked) in cases {
        let machine = Machine::new(GpuKind::Cuda, &format!("devices = {}{conf}", 64 << 20));
        let daemon = TestDaemon::on(machine, &[]);
        let mut job = Job::start(&daemon, "one");
        for (at, bytes) in [700, 40_000, 3 << 20, 17 << 20, 5 << 20].into_iter().enumerate() {
            job.take(bytes, at as u8 + 1);
        }
        let live: u64 = job.live.iter().map(|(_, bytes, _)| *bytes as u64).sum();
        for _ in 0..2 {
            let slept = job.runtime.sleep(true).unwrap();
            assert!(slept.kept >= Bytes::new(live), "{slept:?}");
            assert_eq!(slept.locked, if is_locked { slept.kept } else { Bytes::ZERO }, "{slept:?}");
            job.runtime.wake(Duration::ZERO).unwrap();
            assert!(job.is_whole(), "{conf}");
        }
    }
}

#[test]
fn memory_under_a_tag_is_counted_and_described_and_what_lies_idle_in_it_goes_to_others() {
    let daemon = TestDaemon::start(64);
    let script = "
import json
lib.stitch_tag_push.argtypes = [ctypes.c_char_p, ctypes.c_int]
lib.stitch_range_manifest.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
lib.stitch_range_manifest.restype = ctypes.c_size_t
lib.stitch_memory_stat.argtypes = [ctypes.c_int, ctypes.c_char_p]
lib.stitch_memory_stat.restype = ctypes.c_int64
def text(function):
    room = ctypes.create_string_buffer(1 << 18)
    function.restype = ctypes.c_size_t
    assert function(0, room, len(room)) < len(room)
    return json.loads(room.value)
plain = malloc(8 * MIB)
assert lib.stitch_tag_push(b'cache', 1) == 0
tagged, idle = malloc(16 * MIB), malloc(32 * MIB)
lib.stitch_tag_pop()
free(idle, 32 * MIB)
live = sum(block['size'] for segment in text(lib.stitch_memory_snapshot) for block in segment['blocks'] if block['state'] == 'active_allocated')
say(lib.stitch_memory_stat(0, b'allocated_bytes.all.current') // MIB, lib.stitch_memory_stat(0, b'reserved_bytes.all.current') // MIB,
    text(lib.stitch_counters)['requests_pool'], live // MIB, lib.stitch_range_manifest(tagged, 0, None, 0) > 0)
sys.stdin.readline()
";
    let Some(mut child) = python(&daemon, script) else { return };
    let mut said = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert_eq!(hear(&mut said), "24 56 3 24 True");
    let sessions = daemon.cli_json(&["sessions"]);
    let counters = &sessions["sessions"][0]["counters"];
    assert_eq!(
        (&counters["live_bytes"], &counters["held_bytes"]),
        (&(24 * MIB).into(), &(56 * MIB).into()),
        "{sessions}"
    );
    assert_eq!(daemon.device("leased_bytes"), 56 * MIB);
    let config = RuntimeConfig { wait: Duration::from_secs(10), ..RuntimeConfig::default() };
    let runtime = daemon.session("other").runtime(0, config).unwrap();
    runtime.alloc(&Request::of(Bytes::mib(40))).unwrap();
    assert_eq!(daemon.device("leased_bytes"), 64 * MIB, "it has given the 32 that were idle");
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[test]
fn by_tag_from_c_as_trainers_and_servers_in_one_process_do() {
    let daemon = TestDaemon::start(64);
    if cannot_sleep(&daemon) {
        return;
    }
    let script = "
lib.stitch_tag_push.argtypes = [ctypes.c_char_p, ctypes.c_int]
lib.stitch_sleep.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t)]
lib.stitch_wake.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
def under(tag, keep, mib, byte):
    assert lib.stitch_tag_push(tag, keep) == 0
    p = malloc(mib * MIB)
    lib.stitch_tag_pop()
    poke(p, bytes([byte]) * (mib * MIB))
    return p
def is_all(p, mib, byte):
    return peek(p, mib * MIB) == bytes([byte]) * (mib * MIB)
def wait():
    sys.stdin.readline()
weights, cache, other = under(b'weights', 1, 8, 1), under(b'kv_cache', 0, 16, 2), malloc(4 * MIB)
poke(other, b'\\3' * (4 * MIB))
freed = ctypes.c_size_t()
assert lib.stitch_sleep(b'kv_cache', -1, ctypes.byref(freed)) == 0
say(freed.value // MIB, is_all(weights, 8, 1), is_all(other, 4, 3))
wait()
assert lib.stitch_tag_push(b'kv_cache', 0) == 0
assert not lib.stitch_malloc(MIB, 0, None)
say(lib.stitch_last_error().decode())
lib.stitch_tag_pop()
assert lib.stitch_sleep(None, -1, ctypes.byref(freed)) == 0
say(freed.value // MIB)
wait()
assert lib.stitch_wake(b'weights', 0) == 0
say(is_all(weights, 8, 1))
assert lib.stitch_wake(None, 0) == 0
poke(cache, b'\\5' * (16 * MIB))
say(is_all(other, 4, 3), is_all(cache, 16, 5))
assert lib.stitch_sleep(b'nothing', 0, None) == -1
say(lib.stitch_last_error().decode())
for p, mib in [(weights, 8), (cache, 16), (other, 4)]:
    free(p, mib * MIB)
lib.stitch_torch_reset()
say('done')
wait()
";
    let Some(mut child) = python(&daemon, script) else { return };
    let mut tell = child.stdin.take().unwrap();
    let mut go_on = || std::io::Write::write_all(&mut tell, b"\n").unwrap();
    let mut said = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert_eq!(hear(&mut said), "16 True True");
    daemon.wait_for_device("leased_bytes", 12 * MIB);
    go_on();
    assert!(hear(&mut said).contains("this memory is asleep"));
    assert_eq!(hear(&mut said), "12");
    daemon.wait_for_device("leased_bytes", 0);
    go_on();
    assert_eq!([hear(&mut said), hear(&mut said)], ["True", "True True"]);
    assert!(hear(&mut said).contains("under a tag 'nothing'"));
    assert_eq!(hear(&mut said), "done");
    daemon.wait_for_device("leased_bytes", 0);
    go_on();
    assert!(child.wait().unwrap().success());
}
