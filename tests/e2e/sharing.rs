//! One node, many processes: who is guaranteed what, and memory that goes from one to another while both live.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::sync::Arc;
use std::time::Duration;

use stitchd::error::{ErrorKind, chain};
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::giving::GiverThread;
use stitchd::session::{Session, SessionConfig, SessionError};
use stitchd::units::{Bytes, DeviceAddress};
use stitchd::wire::v1;

use crate::raw::{self, Grpc};
use crate::support::{PATIENCE, TestDaemon, config_file, eventually, hear, python, stderr, stitchd};

const MIB: u64 = 1 << 20;

/// A process of a job: a session, a runtime that waits for others, and the thread that gives back.
struct Job {
    session: Arc<Session>,
    runtime: Arc<Runtime>,
    _giver: GiverThread,
}

impl Job {
    fn start(daemon: &TestDaemon, name: &str) -> Job {
        Job::open(&daemon.session_config(name), Duration::from_secs(10)).unwrap()
    }

    fn open(config: &SessionConfig, wait: Duration) -> Result<Job, SessionError> {
        let session = Session::connect(config)?;
        let runtime = Arc::new(session.runtime(0, RuntimeConfig { wait, ..RuntimeConfig::default() })?);
        let giver = GiverThread::begin(&session, Arc::clone(&runtime)).unwrap();
        Ok(Job { session, runtime, _giver: giver })
    }

    fn alloc(&self, mib: u64) -> DeviceAddress {
        self.runtime.alloc(&Request::of(Bytes::mib(mib))).unwrap()
    }

    fn free(&self, address: DeviceAddress) {
        self.runtime.free(address, StreamId::DEFAULT).unwrap();
    }

    fn write(&self, address: DeviceAddress, mib: u64, byte: u8) {
        self.runtime.device().driver().write(address, &vec![byte; (mib << 20) as usize]).unwrap();
    }

    fn holds_only(&self, address: DeviceAddress, mib: u64, byte: u8) -> bool {
        let mut bytes = vec![!byte; (mib << 20) as usize];
        self.runtime.device().driver().read(address, &mut bytes).unwrap();
        bytes.iter().all(|found| *found == byte)
    }
}

/// A daemon with this configuration.
fn configured(mib: u64, config: &str) -> TestDaemon {
    let (_dir, flag) = config_file(config);
    TestDaemon::with(&[&flag, &format!("--device=0={mib}MiB")])
}

#[test]
fn what_lies_idle_in_one_process_goes_to_another_that_waits_and_back() {
    let daemon = TestDaemon::start(64);
    let (one, two) = (Job::start(&daemon, "one"), Job::start(&daemon, "two"));
    let kept = one.alloc(8);
    one.write(kept, 8, 0x11);
    let idle = one.alloc(48);
    one.write(idle, 48, 0x22);
    one.free(idle);
    assert_eq!(daemon.device("leased_bytes"), 56 * MIB);
    // Both want most of the device, one after the other, again and again: together more than there is.
    for round in 0..4 {
        let got = two.alloc(48);
        assert!(round > 0 || two.holds_only(got, 48, 0), "another session's bytes were handed on");
        two.write(got, 48, 0x33);
        assert!(one.holds_only(kept, 8, 0x11));
        two.free(got);
        let back = one.alloc(40);
        one.write(back, 40, 0x44);
        one.free(back);
    }
    one.runtime.invariants().unwrap();
    two.runtime.invariants().unwrap();
    let moved = daemon.cli_json(&["revocations"]);
    let moved = moved["revocations"].as_array().unwrap();
    let is_from =
        |name: &str| moved.iter().filter(|one| one["from"] == name && one["given_bytes"].as_u64() > Some(0)).count();
    assert!(is_from("one") >= 4 && is_from("two") >= 4, "{moved:?}");
    assert!(moved.iter().all(|one| one["for"] != one["from"] && one["unanswered"] == false), "{moved:?}");
    let table = String::from_utf8(daemon.cli(&["revocations"]).stdout).unwrap();
    assert!(table.contains("one (1)") && table.contains("two (2)"), "{table}");
    assert!(daemon.status()["returned_by_revocation_bytes"].as_u64().unwrap() >= 8 * 32 * MIB);
    drop((one, two));
    daemon.wait_for_device("available_bytes", 64 * MIB);
}

#[test]
fn what_is_live_is_not_given_and_who_waits_is_told_who_has_it() {
    let daemon = TestDaemon::start(64);
    let one = Job::start(&daemon, "one");
    let live = one.alloc(48);
    one.write(live, 48, 0x55);
    let two = Job::open(&daemon.session_config("two"), Duration::from_millis(200)).unwrap();
    let error = two.runtime.alloc(&Request::of(Bytes::mib(32))).unwrap_err();
    let text = chain(&error);
    assert!(error.kind() == ErrorKind::Exhausted && text.contains("'one'"), "{text}");
    assert!(one.holds_only(live, 48, 0x55));
}

#[test]
fn terms_change_while_a_session_runs_and_what_it_has_idle_comes_back() {
    let daemon = TestDaemon::start(64);
    let job = Job::start(&daemon, "job");
    let live = job.alloc(8);
    job.write(live, 8, 0x66);
    let idle = job.alloc(32);
    job.free(idle);
    let session = job.session.id().0.to_string();
    let changed = daemon.cli_json(&["limit", &session, "16MiB", "--revision", "0"]);
    assert_eq!((&changed["revision"], &changed["limit_bytes"]), (&1.into(), &(16 * MIB).into()));
    eventually("it holds no more than it may", || {
        let leased = daemon.cli_json(&["sessions"])["sessions"][0]["leased_bytes"].as_u64().unwrap();
        (leased <= 16 * MIB).then_some(())
    });
    let error = job.runtime.alloc(&Request::of(Bytes::mib(24))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverLimit, "{}", chain(&error));
    let stale = daemon.cli(&["limit", "job", "32MiB", "--revision", "0"]);
    assert!(stale.status.code() == Some(2) && stderr(&stale).contains("at revision 1"), "{}", stderr(&stale));
    let deferred = daemon.cli_json(&["limit", "job", "4MiB"]);
    assert_eq!((deferred["outcome"].as_str(), deferred["revision"].as_u64()), (Some("deferred"), Some(2)));
    daemon.cli_json(&["limit", "job", "64MiB", "--priority", "3"]);
    job.alloc(24);
    let shown = &daemon.cli_json(&["sessions"])["sessions"][0];
    assert_eq!((shown["priority"].as_u64(), shown["revision"].as_u64()), (Some(3), Some(3)));
    assert!(job.holds_only(live, 8, 0x66));
    let nobody = daemon.cli(&["limit", "nobody", "4MiB"]);
    assert!(nobody.status.code() == Some(2) && stderr(&nobody).contains("no session 'nobody'"), "{}", stderr(&nobody));
}

#[test]
fn idle_memory_goes_back_to_the_driver_on_demand() {
    let daemon = TestDaemon::start(64);
    let (one, two) = (Job::start(&daemon, "one"), Job::start(&daemon, "two"));
    for job in [&one, &two] {
        let (live, idle) = (job.alloc(4), job.alloc(16));
        job.write(live, 4, 0x77);
        job.free(idle);
    }
    assert_eq!(daemon.device("leased_bytes"), 40 * MIB);
    let trimmed = daemon.cli_json(&["trim", "--session", "one"]);
    assert_eq!((trimmed["returned_bytes"].as_u64(), trimmed["asked"].as_u64()), (Some(16 * MIB), Some(1)));
    assert_eq!(daemon.device("leased_bytes"), 24 * MIB);
    let trimmed = daemon.cli_json(&["trim"]);
    assert_eq!((trimmed["returned_bytes"].as_u64(), trimmed["unanswered"].as_u64()), (Some(16 * MIB), Some(0)));
    assert_eq!((daemon.device("leased_bytes"), daemon.device("available_bytes")), (8 * MIB, 56 * MIB));
}

#[test]
fn a_device_that_is_drained_gets_empty_and_is_leased_again_when_that_ends() {
    let daemon = TestDaemon::start(64);
    let job = Job::start(&daemon, "job");
    let (live, idle) = (job.alloc(4), job.alloc(16));
    job.free(idle);
    let drained = daemon.cli(&["drain", "0"]);
    let text = String::from_utf8(drained.stdout).unwrap();
    assert!(drained.status.code() == Some(1) && text.contains("4.0 MiB still is") && text.contains("'job'"), "{text}");
    assert_eq!(daemon.status()["devices"][0]["state"], "draining");
    // Whoever looks at once sees it, and who did it.
    let seen = daemon.cli_json(&["top"]);
    let last = seen["events"].as_array().unwrap().last().unwrap();
    assert_eq!((&seen["devices"][0]["state"], &last["kind"]), (&"draining".into(), &"operator".into()), "{seen}");
    assert!(last["text"].as_str().unwrap().contains("drain GPU-"), "{last}");
    let error = job.runtime.alloc(&Request::of(Bytes::mib(8))).unwrap_err();
    assert!(chain(&error).contains("is being drained"), "{}", chain(&error));
    job.free(live);
    job.runtime.trim(Bytes::MAX);
    let uuid = daemon.status()["devices"][0]["uuid"].as_str().unwrap().to_owned();
    assert_eq!(daemon.cli(&["drain", &uuid]).status.code(), Some(0));
    assert!(daemon.log().contains("0 B still leased, to 0 sessions"), "{}", daemon.log());
    daemon.cli_json(&["drain", "--undo", "0"]);
    job.alloc(8);
    let nobody = daemon.cli(&["drain", "GPU-00000000-0000-0000-0000-000000000000"]);
    let error = String::from_utf8(nobody.stderr).unwrap();
    assert!(nobody.status.code() == Some(2) && error.contains("no device GPU-0"), "{error}");
}

const HOLDER: &str = "
p = malloc(24 * MIB)
poke(p, b'x' * MIB)
q = malloc(16 * MIB)
free(q, 16 * MIB)
say('ready')
sys.stdin.read()
";

#[test]
fn an_evicted_session_keeps_what_is_live_until_its_process_is_ended() {
    let daemon = TestDaemon::start(64);
    let Some(mut child) = python(&daemon, HOLDER) else { return };
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "ready");
    let id = daemon.cli_json(&["sessions"])["sessions"][0]["session"].to_string();
    let evicted = daemon.cli_json(&["evict", &id]);
    assert_eq!((evicted["returned_bytes"].as_u64(), evicted["held_bytes"].as_u64()), (Some(16 * MIB), Some(24 * MIB)));
    assert_eq!(evicted["ended"], false);
    assert_eq!(daemon.cli_json(&["sessions"])["sessions"][0]["is_evicted"], true);
    let evicted = daemon.cli_json(&["evict", &id, "--end-after", "0"]);
    assert_eq!((evicted["ended"].as_bool(), evicted["held_bytes"].as_u64()), (Some(true), Some(0)));
    assert!(!child.wait().unwrap().success());
    daemon.wait_for_device("available_bytes", 64 * MIB);
    assert_eq!(daemon.status()["returned_by_death_bytes"], 24 * MIB);
}

#[test]
fn what_a_tenant_is_guaranteed_comes_back_from_those_who_borrowed_it() {
    let uid = rustix::process::geteuid().as_raw();
    let config = format!(
        "[[tenant]]\nname = 'owner'\nuids = [{uid}]\nguarantee = '40MiB'\n[[tenant]]\nname = 'guest'\nuids = [{uid}]\n"
    );
    let daemon = configured(64, &config);
    let guest = SessionConfig { tenant: "guest".into(), ..daemon.session_config("guest") };
    let guest = Job::open(&guest, Duration::from_secs(10)).unwrap();
    let (live, idle) = (guest.alloc(8), guest.alloc(48));
    guest.write(live, 8, 0x11);
    guest.free(idle);
    let owner = Job::start(&daemon, "owner");
    assert_eq!((owner.session.tenant(), guest.session.tenant()), ("owner", "guest"));
    assert_eq!(daemon.device("guaranteed_bytes"), 40 * MIB);
    let mine = owner.alloc(40);
    owner.write(mine, 40, 0x22);
    assert!(guest.holds_only(live, 8, 0x11));
    // A second of the tenant would be guaranteed as much, and there is no room for that: it hears whose it is.
    let second = SessionConfig { admission_wait: Duration::from_millis(50), ..daemon.session_config("second") };
    let Err(error) = Job::open(&second, Duration::ZERO) else { panic!("it was admitted") };
    assert!(error.kind() == ErrorKind::Exhausted && chain(&error).contains("'owner'"), "{}", chain(&error));
    // It waits its turn: when the first ends it begins.
    let waits = SessionConfig { admission_wait: PATIENCE, ..daemon.session_config("third") };
    std::thread::scope(|scope| {
        let third = scope.spawn(|| Job::open(&waits, Duration::ZERO));
        eventually("it waits", || (daemon.device("waiting_requests") == 1).then_some(()));
        drop(owner);
        let third = third.join().unwrap().unwrap();
        third.alloc(32);
    });
    let stranger = SessionConfig { tenant: "nobody".into(), ..daemon.session_config("x") };
    let error = Session::connect(&stranger).unwrap_err();
    assert!(chain(&error).contains("no tenant 'nobody'"), "{}", chain(&error));
}

#[test]
fn borrowers_that_stay_are_ended_where_the_daemon_is_told_so() {
    let uid = rustix::process::geteuid().as_raw();
    let config = format!(
        "borrowed = 'end'\n[[tenant]]\nname = 'owner'\nuids = [{uid}]\nguarantee = '40MiB'\n[[tenant]]\nname = 'guest'\nuids = [{uid}]\n"
    );
    let mut daemon = configured(48, &config);
    daemon.expect_complaint("ending the process");
    let script = format!("os.environ['STITCHD_TENANT'] = 'guest'\n{HOLDER}");
    let Some(mut child) = python(&daemon, &script) else { return };
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "ready");
    let owner = Job::open(&daemon.session_config("owner"), Duration::from_millis(300)).unwrap();
    let mine = owner.alloc(40);
    assert!(owner.holds_only(mine, 40, 0), "bytes of the process that was ended were handed on");
    assert!(!child.wait().unwrap().success(), "it was killed");
}

#[test]
fn one_that_never_answers_is_counted_and_keeps_nobody_waiting_for_long() {
    let mut daemon = TestDaemon::start(64);
    daemon.expect_complaint("does not answer when it is asked for idle memory");
    let grpc = Grpc::connect(&daemon);
    let request = v1::OpenRequest { protocol: 1, name: "mute".into(), answers: true, ..v1::OpenRequest::default() };
    let opened = grpc.open_as(request).unwrap();
    let channel = raw::chunk_socket(&daemon);
    raw::send(&channel, raw::hello(&opened));
    raw::receive(&channel);
    raw::acquire(&channel, 1, raw::want(&opened, 48)).unwrap();
    let other = Job::open(&daemon.session_config("other"), Duration::from_secs(5)).unwrap();
    let error = other.runtime.alloc(&Request::of(Bytes::mib(32))).unwrap_err();
    assert!(chain(&error).contains("'mute'"), "{}", chain(&error));
    assert!(daemon.status()["unanswered"].as_u64().unwrap() >= 1);
    let sessions = daemon.cli_json(&["sessions"]);
    assert!(sessions["sessions"][0]["unanswered"].as_u64().unwrap() >= 1, "{sessions}");
    // Others are served as ever.
    other.alloc(16);
}

#[test]
fn only_those_who_run_the_daemon_act_on_it() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: only root can be somebody else");
        return;
    }
    let daemon = configured(64, "socket_mode = '666'\nadmins = [4321]\n");
    for place in [daemon.path().to_owned(), daemon.socket()] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(place, mode).unwrap();
    }
    let session = daemon.session("job");
    // From a place where anybody may look.
    let binary = daemon.path().join("stitchd");
    std::fs::copy(stitchd().get_program(), &binary).unwrap();
    let as_user = |uid: u32, args: &[&str]| {
        let mut command = std::process::Command::new(&binary);
        command.args(args).arg("--socket").arg(daemon.socket()).uid(uid).gid(uid).output().unwrap()
    };
    let id = session.id().0.to_string();
    for args in [&["limit", &id, "8MiB"][..], &["trim"], &["evict", &id], &["drain", "0"]] {
        let refused = as_user(65534, args);
        assert!(refused.status.code() == Some(1) && stderr(&refused).contains("may not act"), "{}", stderr(&refused));
    }
    assert!(as_user(65534, &["status"]).status.success(), "anybody may look");
    let allowed = as_user(4321, &["limit", &id, "8MiB"]);
    assert!(allowed.status.success(), "{}", stderr(&allowed));
}
