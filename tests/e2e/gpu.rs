//! What only a daemon on GPUs meets: memory that is not cleared, contexts, devices that go away, libraries that hang, few descriptors. On pretended machines
//! (tests/standin-driver), whatever driver the other tests are about.

use std::io::{BufRead as _, BufReader, Write as _};
use std::time::Duration;

use stitchd::clock::{Clock as _, SystemClock};
use stitchd::driver::Driver as _;
use stitchd::driver::gpu::GpuDriver;
use stitchd::driver::gpu::GpuKind;
use stitchd::error::{ErrorKind, chain};
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;
use stitchd::wire::v1::{self, client_frame, daemon_frame};

use crate::raw::{self, Grpc};
use crate::standin::Machine;
use crate::support::{TestDaemon, client_library_for, config_file, eventually, hear, python, run_on, stderr};

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
fn where_nobody_tells_what_is_free_a_refused_create_lowers_the_budget_and_who_can_wait_waits() {
    const HALF: u64 = 64 * MIB;
    let machine = Machine::new(GpuKind::Cuda, "devices = 134217728\nnvml = 0");
    let neighbour = GpuDriver::open_library(GpuKind::Cuda, machine.library()).unwrap();
    let id = neighbour.devices()[0].id;
    // What a session had is promised to others before the driver has it back.
    let take = || eventually("the neighbour has it", || neighbour.create(id, Bytes::new(HALF)).ok());
    let taken = take();
    let daemon = TestDaemon::on(machine, &[]);
    assert_eq!(daemon.device("budget_bytes"), 2 * HALF, "nobody told");
    let patient = RuntimeConfig { wait: Duration::from_secs(60), ..RuntimeConfig::default() };
    let session = daemon.session("patient");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| session.runtime(0, patient).unwrap().alloc(&Request::of(Bytes::mib(100))));
        // It is tried more than three times.
        eventually("it is tried", || (daemon.device("refused_creates") > 0).then_some(()));
        let mut tries = std::collections::BTreeSet::new();
        eventually("it is tried again and again", || {
            assert!(!waiting.is_finished(), "{:?}", daemon.status());
            tries.insert(daemon.device("refused_creates"));
            (tries.len() > 4).then_some(())
        });
        neighbour.release(taken).unwrap();
        waiting.join().unwrap().unwrap();
    });
    drop(session);
    daemon.wait_for_device("available_bytes", 2 * HALF);
    // Who cannot wait is refused, and the budget stays low although nobody asks, until somebody does after a while.
    let taken = take();
    let hasty = daemon.runtime("hasty");
    hasty.alloc(&Request::of(Bytes::mib(100))).unwrap_err();
    let is_low = || daemon.device("budget_bytes") <= HALF;
    std::thread::sleep(Duration::from_millis(300));
    assert!(is_low(), "{:?}", daemon.status());
    std::thread::sleep(Duration::from_millis(1_200));
    assert!(is_low(), "{:?}", daemon.status());
    neighbour.release(taken).unwrap();
    eventually("it is had", || hasty.alloc(&Request::of(Bytes::mib(100))).ok());
}

#[test]
fn a_library_that_hangs_is_an_error_in_time_and_the_other_device_goes_on() {
    let machine = Machine::new(GpuKind::Cuda, "devices = 67108864, 67108864");
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("stitchd.toml");
    std::fs::write(&config, "driver_deadline = '1500ms'\n").unwrap();
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
fn what_could_not_be_released_while_the_library_hung_comes_back_when_it_answers_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("stitchd.toml");
    std::fs::write(&config, "driver_deadline = '1s'\n").unwrap();
    // Another call hangs, so that releases are refused at once; or the releases themselves do.
    for call in ["create", "release"] {
        let machine = Machine::new(GpuKind::Cuda, "devices = 268435456");
        let mut daemon = TestDaemon::on(machine, &["--config", config.to_str().unwrap()]);
        for words in ["overdue", "cannot create a chunk", "cannot destroy a chunk", "that nobody can use"] {
            daemon.expect_complaint(words);
        }
        let grpc = Grpc::connect(&daemon);
        let (session, channel) = raw::link(&daemon, &grpc, "the one that ends");
        drop(raw::acquire(&channel, 1, raw::want(&session, 128)).unwrap());
        let other = daemon.runtime("the other");
        daemon.machine().hang(call);
        if call == "create" {
            other.alloc(&Request::of(Bytes::mib(4))).unwrap_err();
        }
        drop(channel);
        grpc.close(&session).unwrap();
        daemon.wait_for_device("quarantined_bytes", 128 * MIB);
        // They are nobody's, and are not promised to anybody.
        assert_eq!(daemon.device("available_bytes"), 128 * MIB, "{call}");
        other.alloc(&Request::of(Bytes::mib(140))).unwrap_err();
        daemon.machine().hang("");
        daemon.wait_for_device("quarantined_bytes", 0);
        eventually("all of it serves again", || other.alloc(&Request::of(Bytes::mib(256))).ok());
        drop(other);
        daemon.wait_for_device("available_bytes", 256 * MIB);
    }
}

#[test]
fn a_library_that_hangs_while_it_starts_is_an_error_that_says_what_to_do() {
    let machine = Machine::new(GpuKind::Cuda, "devices = 67108864");
    machine.hang("init");
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("stitchd.toml");
    std::fs::write(&config, "driver_deadline = '100ms'\n").unwrap();
    let (config, dir) = (config.to_str().unwrap(), dir.path().to_str().unwrap());
    let output = run_on(&machine, &["serve", "--driver", "cuda", "--config", config, "--runtime-dir", dir]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the cuda driver has not started within 400ms") && said.contains("dmesg"), "{said}");
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
        let (_dir, flag) = config_file("ladder = ['2MiB']\n");
        let mut daemon = TestDaemon::with_open_files(256, driver, &["--device=0=1GiB", &flag]);
        daemon.expect_complaint("too few open files");
        let limit = daemon.device("chunks_max");
        assert!((30..100).contains(&limit), "{limit} chunks of 256 open files");
        let grpc = Grpc::connect(&daemon);
        let (session, channel) = raw::link(&daemon, &grpc, "greedy");
        let refused = raw::acquire(&channel, 1, raw::want(&session, 2 * (limit + 1))).unwrap_err();
        assert!(refused.message.contains("LimitNOFILE"), "{}", refused.message);
        assert_eq!(daemon.device("available_bytes"), 2 * limit * MIB, "in as many chunks as there may be");
        let all = raw::acquire(&channel, 2, raw::want(&session, 2 * limit)).unwrap();
        let refused = raw::acquire(&channel, 3, raw::want(&session, 2)).unwrap_err();
        let text = format!("1 chunks asked for on device 0, 0 of {limit} can be had");
        assert!(refused.message.contains(&text), "{}", refused.message);
        assert_eq!(daemon.device("available_bytes"), 0, "no chunk is left, whatever memory is");
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
fn a_device_that_is_shared_through_mps_is_shown_to_be() {
    for (conf, is_shared) in [("mps = 1", true), ("mps = 0", false)] {
        let daemon = TestDaemon::on(Machine::new(GpuKind::Cuda, &format!("devices = 67108864\n{conf}")), &[]);
        assert_eq!(daemon.status()["devices"][0]["mps"], is_shared);
        assert_eq!(daemon.log().contains("share the device through MPS"), is_shared);
        let shown = String::from_utf8(daemon.cli(&["status"]).stdout).unwrap();
        assert_eq!(shown.contains("ready, MPS"), is_shared, "{shown}");
    }
}

#[test]
fn a_device_that_cannot_be_cleared_is_left_out_and_the_others_are_served() {
    // There is no room for a second context on the first device, which somebody else has taken.
    let machine = Machine::new(GpuKind::Cuda, "devices = 67108864, 268435456\ncontext_bytes = 52428800");
    let neighbour = GpuDriver::open_library(GpuKind::Cuda, machine.library()).unwrap();
    neighbour.synchronize(stitchd::ids::DeviceId(0)).unwrap();
    let mut daemon = TestDaemon::on(machine, &[]);
    daemon.expect_complaint("the device is left out");
    let status = daemon.status();
    assert_eq!((status["devices"].as_array().unwrap().len(), &status["devices"][0]["ordinal"]), (1, &1.into()));
    let session = daemon.session("on the other");
    session.runtime(1, RuntimeConfig::default()).unwrap().alloc(&Request::of(Bytes::mib(2))).unwrap();
}

#[test]
fn bytes_are_charged_to_the_device_that_the_process_means_in_whatever_order_it_sees_them() {
    if client_library_for(true).is_none() {
        return println!("SKIP: libstitchd_client.so was not built with test hooks");
    }
    for (kind, variable, name) in
        [(GpuKind::Cuda, "CUDA_VISIBLE_DEVICES", "cuda-"), (GpuKind::Hip, "HIP_VISIBLE_DEVICES", "hip--")]
    {
        let daemon = TestDaemon::on(Machine::new(kind, "devices = 67108864, 67108864"), &[]);
        let uuid = |number| {
            let bytes = format!("standin-{name}00{number}").into_bytes();
            stitchd::ids::DeviceUuid(bytes.try_into().unwrap()).to_string()
        };
        // What the process sees, and what the daemon's devices have lent once it has 4 MiB of its first and 8 MiB of its second.
        for (visible, lent) in [
            ("0,1".to_owned(), [4, 8]),
            ("1,0".to_owned(), [8, 4]),
            (format!("{},{}", uuid(1), uuid(0)), [8, 4]),
            ("1".to_owned(), [0, 4]),
            ("1,7,0".to_owned(), [0, 4]),
        ] {
            let script = format!(
                "\
os.environ['{variable}'] = '{visible}'
for device in (0, 1):
    p = lib.stitch_malloc((4 << device) * MIB, device, None)
    say('served' if p else lib.stitch_last_error().decode())
sys.stdin.readline()
"
            );
            let Some(mut client) = python(&daemon, &script) else { return };
            let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
            assert_eq!(hear(&mut lines), "served");
            let second = hear(&mut lines);
            let is_hidden = lent[0] + lent[1] == 4;
            assert_eq!(second == "served", !is_hidden, "{second}");
            assert!(!is_hidden || second.contains("has no device 1: its driver shows it 1"), "{second}");
            let status = daemon.status();
            let leased = [0, 1].map(|at| status["devices"][at]["leased_bytes"].as_u64().unwrap() / MIB);
            assert_eq!(leased, lent, "{variable}={visible}");
            client.stdin.take().unwrap().write_all(b"\n").unwrap();
            client.wait().unwrap();
            eventually("its session ends", || (daemon.status()["sessions"] == 0).then_some(()));
        }
    }
}

/// Every call that has to do with memory takes 20 ms: so many chunks take seconds.
const SLOW: &str = "devices = 1073741824\nlatency_us = 20000";

#[test]
fn a_lease_may_take_longer_than_a_client_would_wait_in_silence() {
    let daemon = TestDaemon::on(Machine::new(GpuKind::Cuda, SLOW), &[]);
    let patience = Duration::from_millis(1_500);
    let config = SessionConfig { patience, ..daemon.session_config("slow") };
    let runtime =
        Session::connect(&config).unwrap().runtime(0, RuntimeConfig::default().with_uniform_chunks()).unwrap();
    let started = SystemClock::new();
    runtime.alloc(&Request::of(Bytes::mib(96))).unwrap();
    assert!(started.now() > patience + patience, "{:?} are no proof", started.now());
    assert_eq!(daemon.device("leased_bytes"), 96 * MIB);
}

#[test]
fn who_knows_the_word_hears_how_far_a_request_has_come_and_nobody_else_does() {
    let daemon = TestDaemon::on(Machine::new(GpuKind::Cuda, SLOW), &[]);
    let grpc = Grpc::connect(&daemon);
    // One that does not know it would take it for nonsense.
    let (session, channel) = raw::link(&daemon, &grpc, "old");
    assert_eq!(raw::acquire(&channel, 1, raw::want(&session, 40)).unwrap().len(), 20);

    let session = grpc.open("new", 1).unwrap();
    let channel = raw::chunk_socket(&daemon);
    let hello = v1::Hello { protocol: 1, ticket: session.ticket.clone(), patience_ms: 400 };
    raw::send(&channel, client_frame::What::Hello(hello));
    let (daemon_frame::What::Welcome(welcome), _page) = raw::receive(&channel) else { panic!() };
    assert!(welcome.says_working);
    let want = Some(raw::want(&session, 40));
    raw::send(&channel, client_frame::What::Acquire(v1::Acquire { request: 5, want }));
    let mut words = 0;
    loop {
        match raw::receive(&channel).0 {
            daemon_frame::What::Working(v1::Working { request: 5, ready: 0, wanted: 20 }) => words += 1,
            daemon_frame::What::Batch(batch) => break assert_eq!((batch.request, batch.chunks.len()), (5, 20)),
            other => panic!("{other:?}"),
        }
    }
    // At least 0.8 s of creating and exporting, a word each tenth of a second.
    assert!((4..100).contains(&words), "{words}");
}

#[test]
fn a_daemon_that_is_silent_is_given_up_and_what_it_lent_meanwhile_comes_back() {
    let daemon = TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 67108864"), &[]);
    let patience = Duration::from_millis(700);
    let config = SessionConfig { patience, ..daemon.session_config("patient for a while") };
    let patient = RuntimeConfig { wait: Duration::from_secs(60), ..RuntimeConfig::default() };
    let runtime = Session::connect(&config).unwrap().runtime(0, patient).unwrap();
    let signal = |signal| {
        rustix::process::kill_process(rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap(), signal).unwrap();
    };
    signal(rustix::process::Signal::STOP);
    let started = SystemClock::new();
    let error = runtime.alloc(&Request::of(Bytes::mib(8))).unwrap_err();
    // Whoever waits for memory is told so: a minute of waiting is no minute of silence.
    assert!(chain(&error).contains("no answer in time"), "{}", chain(&error));
    assert!(started.now() < Duration::from_secs(20), "{:?}", started.now());
    signal(rustix::process::Signal::CONT);
    daemon.wait_for_device("peak_leased_bytes", 8 * MIB);
    // Nobody has asked for anything meanwhile, and perhaps nobody will.
    daemon.wait_for_device("leased_bytes", 0);
    runtime.alloc(&Request::of(Bytes::mib(64))).unwrap();
    assert_eq!(daemon.device("leased_bytes"), 64 * MIB);
}

#[test]
fn whichever_import_of_a_lease_fails_nothing_is_left_and_the_next_try_works() {
    for kind in KINDS {
        for n in 1.. {
            let conf = format!("devices = 67108864\nfail = {n} import {}", std::process::id());
            let machine = Machine::new(kind, &conf);
            let chunks = format!("{}/chunk-", machine.library().parent().unwrap().display());
            let daemon = TestDaemon::on(machine, &[]);
            let session = daemon.session("cannot import");
            let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
            let descriptors = || {
                let links = std::fs::read_dir("/proc/self/fd").unwrap();
                let links = links.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
                links.filter(|link| link.to_string_lossy().contains(&chunks)).count()
            };
            let outcome = runtime.alloc(&Request::of(Bytes::mib(8)));
            let has_failed = outcome.is_err();
            assert_eq!(has_failed, n <= 4, "{outcome:?}");
            if let Err(error) = outcome {
                assert!(chain(&error).contains("cannot import"), "{}", chain(&error));
                daemon.wait_for_device("leased_bytes", 0);
                assert_eq!((descriptors(), runtime.device().mapped()), (0, (0, Bytes::ZERO)), "import {n}");
                assert_eq!(runtime.stats().held, Bytes::ZERO);
                std::thread::sleep(Duration::from_millis(25));
                runtime.alloc(&Request::of(Bytes::mib(8))).unwrap();
            }
            assert_eq!((daemon.device("leased_bytes"), runtime.device().mapped().0), (8 * MIB, 4));
            drop((runtime, session));
            daemon.wait_for_device("available_bytes", 64 * MIB);
            assert_eq!(descriptors(), 0);
            if !has_failed {
                break;
            }
        }
    }
}

#[test]
fn where_devices_make_chunks_of_4_mib_nobody_deals_in_smaller_ones() {
    let machine = Machine::new(GpuKind::Cuda, "devices = 67108864, 67108864\ngranularity = 2097152, 4194304");
    let daemon = TestDaemon::on(machine, &[]);
    let session = daemon.session("coarse");
    let runtimes = [0, 1].map(|device| session.runtime(device, RuntimeConfig::default()).unwrap());
    for runtime in &runtimes {
        runtime.alloc(&Request::of(Bytes::mib(6))).unwrap();
        runtime.alloc(&Request::of(Bytes::new(1_000))).unwrap();
    }
    let status = daemon.status();
    // Two chunks for both.
    let figures = [0, 1].map(|at| (&status["devices"][at]["leased_bytes"], &status["devices"][at]["chunks"]));
    assert_eq!(figures, [(&(8 * MIB).into(), &2.into()), (&(8 * MIB).into(), &2.into())]);
}
