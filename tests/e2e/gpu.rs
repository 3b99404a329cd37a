//! What only a daemon on GPUs meets: memory that is not cleared, contexts, devices that go away, libraries that hang, few descriptors. On pretended machines
//! (tests/standin-driver), whatever driver the other tests are about.

use std::time::Duration;

use stitchd::clock::{Clock as _, SystemClock};
use stitchd::driver::Driver as _;
use stitchd::driver::gpu::GpuKind;
use stitchd::error::{ErrorKind, chain};
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::units::Bytes;

use crate::raw::{self, Grpc};
use crate::standin::Machine;
use crate::support::{TestDaemon, eventually};

const MIB: u64 = 1 << 20;
const KINDS: [GpuKind; 2] = [GpuKind::Cuda, GpuKind::Hip];

#[test]
fn what_memory_held_before_is_cleared_before_anybody_gets_it() {
    for kind in KINDS {
        let daemon = TestDaemon::on(Machine::new(kind, "devices = 134217728\ndirty = 1"), &[]);
        // The spy shows that new memory of this machine is dirty: what follows would fail without the scrubbing.
        let spy = daemon.driver();
        let id = spy.devices()[0].id;
        let handle = spy.create(id, Bytes::mib(2)).unwrap();
        let at = spy.reserve(id, Bytes::mib(2), Bytes::mib(2)).unwrap();
        let span = stitchd::units::Span::new(at, Bytes::mib(2)).unwrap();
        spy.map(at, handle).unwrap();
        spy.set_access(span, id, stitchd::driver::Access::ReadWrite).unwrap();
        let mut bytes = [0; 64];
        spy.read(at, &mut bytes).unwrap();
        assert_eq!(bytes, [0xa5; 64]);
        spy.unmap(span).unwrap();
        spy.unreserve(span).unwrap();
        spy.release(handle).unwrap();
        let runtime = daemon.runtime("reader");
        let address = runtime.alloc(&Request::of(Bytes::mib(100))).unwrap();
        let mut bytes = vec![1; 100 << 20];
        runtime.device().driver().read(address, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "somebody's bytes were handed on");
    }
}

#[test]
fn the_process_that_clears_memory_is_in_the_budget_and_is_replaced_when_it_dies() {
    let machine = Machine::new(GpuKind::Cuda, "devices = 1073741824\ncontext_bytes = 104857600\ndirty = 1");
    let mut daemon = TestDaemon::on(machine, &[]);
    // One context: the helper's. The daemon has none.
    daemon.wait_for_device("foreign_bytes", 100 * MIB);
    assert_eq!(daemon.device("available_bytes"), 924 * MIB);
    let helper = scrubber_of(&daemon);
    rustix::process::kill_process(helper, rustix::process::Signal::KILL).unwrap();
    daemon.expect_complaint("new chunks are not used");
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = raw::link(&daemon, &grpc, "one");
    // Those that the dead one should have cleared are not used; for the next there is another.
    let refused = raw::acquire(&channel, 1, raw::want(&session, 4)).unwrap_err();
    assert!(refused.message.contains("cannot create chunks"), "{}", refused.message);
    let leased = raw::acquire(&channel, 2, raw::want(&session, 4)).unwrap();
    assert_eq!(leased.len(), 2);
    assert_ne!(scrubber_of(&daemon), helper);
    drop((channel, leased));
    grpc.close(&session).unwrap();
    daemon.wait_for_device("available_bytes", 924 * MIB);
    // It ends with its daemon, also where that is killed.
    let helper = scrubber_of(&daemon);
    drop(daemon.kill());
    eventually("the helper ends", || rustix::process::test_kill_process(helper).is_err().then_some(()));
}

/// The helper process of a daemon with one device.
fn scrubber_of(daemon: &TestDaemon) -> rustix::process::Pid {
    let log = daemon.log();
    let line = log.lines().rfind(|line| line.contains("a process clears new chunks")).expect("it is said in the log");
    let pid = line.split("pid=").nth(1).unwrap().split_whitespace().next().unwrap();
    rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap()
}

#[test]
fn a_device_that_is_lost_harms_no_other_and_its_sessions_are_told() {
    for kind in KINDS {
        let machine = Machine::new(kind, "devices = 67108864, 67108864");
        let mut daemon = TestDaemon::on(machine, &[]);
        for words in ["device lost", "cannot destroy a chunk", "quarantined", "cannot create a chunk"] {
            daemon.expect_complaint(words);
        }
        let session = daemon.session("a job on both");
        let patient = RuntimeConfig { wait: Duration::from_secs(60), ..RuntimeConfig::default() };
        let (first, second) = (session.runtime(0, patient).unwrap(), session.runtime(1, patient).unwrap());
        first.alloc(&Request::of(Bytes::mib(40))).unwrap();
        second.alloc(&Request::of(Bytes::mib(40))).unwrap();
        let uuid = first.device().uuid();
        std::thread::scope(|scope| {
            // Somebody waits for memory of the device when it goes.
            let waiting = scope.spawn(|| {
                let other = daemon.session("another").runtime(0, patient).unwrap();
                other.alloc(&Request::of(Bytes::mib(40))).unwrap_err()
            });
            eventually("somebody waits", || (daemon.device("waiting_requests") == 1).then_some(()));
            daemon.machine().lose(0);
            let error = waiting.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", chain(&error));
            assert!(chain(&error).contains("is lost"), "{}", chain(&error));
        });
        eventually("the session is told", || session.is_lost(uuid).then_some(()));
        let error = first.alloc(&Request::of(Bytes::mib(8))).unwrap_err();
        assert!(chain(&error).contains("is lost"), "{}", chain(&error));
        let status = daemon.status();
        assert_eq!((&status["devices"][0]["state"], &status["devices"][1]["state"]), (&"lost".into(), &"ready".into()));
        // The other one goes on: it grows, and a new session finds room there.
        second.alloc(&Request::of(Bytes::mib(8))).unwrap();
        let newcomer = daemon.session("newcomer");
        eventually("it is told, too", || newcomer.is_lost(uuid).then_some(()));
        let error = newcomer.runtime(0, RuntimeConfig::default()).unwrap_err();
        assert!(chain(&error).contains("is lost"), "{}", chain(&error));
        newcomer.runtime(1, RuntimeConfig::default()).unwrap().alloc(&Request::of(Bytes::mib(2))).unwrap();
        drop((first, second, session, newcomer));
        eventually("all sessions end", || (daemon.status()["sessions"] == 0).then_some(()));
        assert_eq!(daemon.status()["devices"][1]["available_bytes"], 64 * MIB);
        assert!(daemon.terminate().success());
    }
}

#[test]
fn a_library_that_hangs_is_an_error_in_time_and_the_other_device_goes_on() {
    let machine = Machine::new(GpuKind::Cuda, "devices = 67108864, 67108864");
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("stitchd.toml");
    std::fs::write(&config, "driver_deadline = '300ms'\n").unwrap();
    let mut daemon = TestDaemon::on(machine, &["--config", config.to_str().unwrap()]);
    for words in ["overdue", "cannot create a chunk"] {
        daemon.expect_complaint(words);
    }
    let session = daemon.session("a job on both");
    let config = RuntimeConfig::default();
    let (first, second) = (session.runtime(0, config).unwrap(), session.runtime(1, config).unwrap());
    daemon.machine().hang("create@0");
    let error = first.alloc(&Request::of(Bytes::mib(4))).unwrap_err();
    assert!(chain(&error).contains("cannot create chunks on device 0"), "{}", chain(&error));
    second.alloc(&Request::of(Bytes::mib(4))).unwrap();
    daemon.machine().hang("");
    // What came too late is given back, and the device is as before.
    eventually("the device serves again", || first.alloc(&Request::of(Bytes::mib(62))).ok());
    drop((first, second, session));
    daemon.wait_for_device("available_bytes", 64 * MIB);
}

#[test]
fn a_daemon_ends_when_it_is_told_also_while_its_library_hangs() {
    // As long as nobody says otherwise a call may take half a minute.
    let mut daemon = TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 67108864"), &[]);
    let runtime = daemon.runtime("a job");
    daemon.machine().hang("create");
    let started = SystemClock::new();
    std::thread::scope(|scope| {
        scope.spawn(|| runtime.alloc(&Request::of(Bytes::mib(4))).unwrap_err());
        daemon.wait_for_device("creating_bytes", 4 * MIB);
        daemon.terminate();
    });
    assert!(started.now() < Duration::from_secs(15), "it took {:?}", started.now());
}

#[test]
fn warm_chunks_that_cannot_be_created_are_not_asked_for_all_the_time() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("stitchd.toml");
    std::fs::write(&config, "warm = '32MiB'\ndriver_deadline = '100ms'\n").unwrap();
    let machine = Machine::new(GpuKind::Cuda, "devices = 67108864");
    machine.hang("create");
    let mut daemon = TestDaemon::on(machine, &["--config", config.to_str().unwrap()]);
    for words in ["overdue", "cannot create a chunk"] {
        daemon.expect_complaint(words);
    }
    let is_refused = || daemon.device("refused_creates") >= 16;
    eventually("it is tried once", || is_refused().then_some(()));
    std::thread::sleep(Duration::from_secs(1));
    let said = daemon.log().lines().filter(|line| line.contains("cannot create a chunk")).count();
    assert!((1..=4).contains(&said), "said {said} times of {} creates", daemon.device("refused_creates"));
    daemon.machine().hang("");
    daemon.wait_for_device("idle_bytes", 32 * MIB);
}

#[test]
fn with_few_open_files_chunks_are_refused_and_people_can_still_connect() {
    for driver in [None, Some(Machine::new(GpuKind::Hip, "devices = 1073741824\nquirks = fd_per_handle"))] {
        let mut daemon = TestDaemon::with_open_files(256, driver, &["--device=0=1GiB"]);
        daemon.expect_complaint("too few open files");
        let limit = daemon.device("chunks_max");
        assert!((30..100).contains(&limit), "{limit} chunks of 256 open files");
        let grpc = Grpc::connect(&daemon);
        let (session, channel) = raw::link(&daemon, &grpc, "greedy");
        let refused = raw::acquire(&channel, 1, raw::want(&session, 2 * (limit + 1))).unwrap_err();
        assert!(refused.message.contains("LimitNOFILE"), "{}", refused.message);
        let all = raw::acquire(&channel, 2, raw::want(&session, 2 * limit)).unwrap();
        let refused = raw::acquire(&channel, 3, raw::want(&session, 2)).unwrap_err();
        let text = format!("1 chunks asked for on device 0, 0 of {limit} can be had");
        assert!(refused.message.contains(&text), "{}", refused.message);
        // Whoever comes now is served, and told the same.
        let others: Vec<_> = (0..8).map(|n| daemon.session(&format!("other {n}"))).collect();
        let error = others[0].runtime(0, RuntimeConfig::default()).unwrap().alloc(&Request::of(Bytes::mib(2)));
        assert!(chain(&error.unwrap_err()).contains("LimitNOFILE"));
        drop((all, others));
        grpc.close(&session).unwrap();
        daemon.wait_for_device("chunks", 0);
    }
}

#[test]
fn a_device_that_cannot_be_cleared_is_left_out_and_the_others_are_served() {
    // There is no room for a second context on the first device, which somebody else has taken.
    let machine = Machine::new(GpuKind::Cuda, "devices = 67108864, 268435456\ncontext_bytes = 52428800");
    let neighbour = stitchd::driver::gpu::GpuDriver::open_library(GpuKind::Cuda, machine.library()).unwrap();
    neighbour.synchronize(stitchd::ids::DeviceId(0)).unwrap();
    let mut daemon = TestDaemon::on(machine, &[]);
    daemon.expect_complaint("the device is left out");
    let status = daemon.status();
    assert_eq!((status["devices"].as_array().unwrap().len(), &status["devices"][0]["ordinal"]), (1, &1.into()));
    let session = daemon.session("on the other");
    session.runtime(1, RuntimeConfig::default()).unwrap().alloc(&Request::of(Bytes::mib(2))).unwrap();
}
