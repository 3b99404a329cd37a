//! Memory that several processes share: who may have it, how long it lasts, and what becomes of it when they die.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout};
use std::sync::Arc;
use std::time::Duration;

use stitchd::error::ErrorKind;
use stitchd::session::shared::{Attaching, Publishing, SharedRange};
use stitchd::session::{Session, SessionError};
use stitchd::units::Bytes;

use crate::support::{SHARES, TestDaemon, driver_name, eventually, needs_host, python};

const MIB: u64 = 1 << 20;

fn connect(daemon: &TestDaemon, name: &str) -> Arc<Session> {
    Session::connect(&daemon.session_config(name)).unwrap()
}

fn how(name: &str, linger: Duration) -> Publishing {
    Publishing { name: name.into(), content: Bytes::mib(8), linger, ..Publishing::default() }
}

fn wanted(name: &str) -> Attaching {
    Attaching { name: name.into(), ..Attaching::default() }
}

fn publish(session: &Arc<Session>, how: &Publishing, byte: u8) -> SharedRange {
    let draft = session.draft(0, Bytes::mib(8)).unwrap();
    session.driver().write(draft.span().start(), &vec![byte; 8 << 20]).unwrap();
    let at = draft.span();
    let range = draft.publish(how).unwrap();
    assert_eq!(range.span(), at, "it stays where it was written");
    range
}

fn holds_only(session: &Session, range: &SharedRange, byte: u8) -> bool {
    let mut bytes = vec![!byte; 8 << 20];
    session.driver().read(range.span().start(), &mut bytes).unwrap();
    bytes.iter().all(|found| *found == byte)
}

fn kind(error: &SessionError) -> ErrorKind {
    error.kind()
}

#[test]
fn a_published_range_is_one_memory_for_all_who_attach_it_and_nobody_writes_it() {
    let daemon = TestDaemon::start(64);
    let (one, two) = (connect(&daemon, "one"), connect(&daemon, "two"));
    let range = publish(&one, &how("weights", Duration::ZERO), 0x5a);
    assert_eq!(daemon.device("shared_bytes"), 8 * MIB);
    assert_eq!(daemon.device("leased_bytes"), 0, "it is counted once");
    let there = two.attach(&wanted("weights")).unwrap();
    assert!(holds_only(&one, &range, 0x5a) && holds_only(&two, &there, 0x5a));
    assert_eq!((there.content(), there.version()), (Bytes::mib(8), 1));
    assert_eq!(daemon.device("shared_bytes"), 8 * MIB);
    // By the driver's own word on every driver, and by the kernel's where the driver can.
    let is_host = driver_name() == "host";
    assert_eq!((range.is_sealed(), there.is_sealed()), (is_host, is_host));
    for (session, range) in [(&one, &range), (&two, &there)] {
        assert!(session.driver().write(range.span().start(), &[1]).is_err());
    }
    let listed = daemon.cli_json(&["shared"]);
    let listed = &listed["ranges"][0];
    assert_eq!(listed["read_only"], if is_host { "enforced" } else { "cooperative" });
    assert_eq!((&listed["name"], listed["holders"].as_array().unwrap().len()), (&"weights".into(), 2));
    let table = String::from_utf8(daemon.cli(&["shared"]).stdout).unwrap();
    assert!(table.contains("weights") && table.contains(if is_host { "enforced" } else { "by agreement" }), "{table}");
    // Its publisher goes, and it stays while somebody holds it.
    drop((range, one));
    assert!(holds_only(&two, &there, 0x5a));
    drop(there);
    daemon.wait_for_device("shared_bytes", 0);
    daemon.wait_for_device("available_bytes", 64 * MIB);
    assert_eq!(kind(&two.attach(&wanted("weights")).unwrap_err()), ErrorKind::NotFound);
}

#[test]
fn what_is_shared_counts_against_each_holders_limit_and_goes_with_its_last_holder() {
    let daemon = TestDaemon::start(64);
    let one = connect(&daemon, "one");
    let range = publish(&one, &how("weights", Duration::ZERO), 1);
    let small = stitchd::session::SessionConfig { limit: Some(Bytes::mib(6)), ..daemon.session_config("small") };
    let small = Session::connect(&small).unwrap();
    assert_eq!(kind(&small.attach(&wanted("weights")).unwrap_err()), ErrorKind::OverLimit);
    let config = stitchd::session::SessionConfig { limit: Some(Bytes::mib(10)), ..daemon.session_config("two") };
    let two = Session::connect(&config).unwrap();
    let there = two.attach(&wanted("weights")).unwrap();
    // Twice is once.
    let again = two.attach(&wanted("weights")).unwrap();
    assert_eq!(kind(&two.draft(0, Bytes::mib(4)).unwrap_err()), ErrorKind::OverLimit);
    let sessions = daemon.cli_json(&["sessions"]);
    let held = |name: &str| {
        let all = sessions["sessions"].as_array().unwrap();
        all.iter().find(|session| session["name"] == name).unwrap()["devices"][0]["shared_bytes"].as_u64().unwrap()
    };
    assert_eq!((held("one"), held("two")), (8 * MIB, 8 * MIB));
    drop(again);
    assert!(holds_only(&two, &there, 1));
    drop((range, there));
    daemon.wait_for_device("available_bytes", 64 * MIB);
    drop(two.draft(0, Bytes::mib(8)).unwrap());
}

#[test]
fn a_range_outlives_its_publisher_for_its_time_and_a_later_version_takes_its_place() {
    let daemon = TestDaemon::start(64);
    let one = connect(&daemon, "one");
    drop(publish(&one, &how("weights", Duration::from_secs(60)), 1));
    drop(one);
    let two = connect(&daemon, "two");
    let first = two.attach(&wanted("weights")).unwrap();
    assert!(holds_only(&two, &first, 1));
    let second = publish(&two, &how("weights", Duration::from_millis(300)), 2);
    assert!(second.version() > first.version());
    // Who has the first keeps it; nobody new gets it.
    let exact = |version| Attaching { version, ..wanted("weights") };
    assert_eq!(kind(&two.attach(&exact(first.version())).unwrap_err()), ErrorKind::NotFound);
    let newest = two.attach(&wanted("weights")).unwrap();
    assert_eq!(newest.version(), second.version());
    assert!(holds_only(&two, &first, 1) && holds_only(&two, &newest, 2));
    assert!(two.attach(&exact(second.version())).is_ok());
    drop(first);
    daemon.wait_for_device("shared_bytes", 8 * MIB);
    drop((second, newest));
    daemon.wait_for_device("shared_bytes", 0);
    daemon.wait_for_device("available_bytes", 64 * MIB);
    assert_eq!(daemon.cli_json(&["shared"])["ranges"].as_array().unwrap().len(), 0);
}

#[test]
fn a_range_is_for_its_tenant_or_for_whoever_has_its_key_and_names_tell_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stitchd.toml");
    std::fs::write(&path, "linger_max = '2s'\n[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'b'\n").unwrap();
    let flags = [format!("--config={}", path.display()), "--device=0=64MiB".to_owned()];
    let daemon = TestDaemon::in_dir(dir, &[&flags[0], &flags[1]]);
    let of = |tenant: &str| {
        let config = stitchd::session::SessionConfig { tenant: tenant.into(), ..daemon.session_config(tenant) };
        Session::connect(&config).unwrap()
    };
    let (a, b) = (of("a"), of("b"));
    let _open = publish(&a, &how("weights", Duration::from_secs(100)), 1);
    let linger = daemon.cli_json(&["shared"])["ranges"][0]["linger_seconds"].as_f64();
    assert_eq!(linger, Some(2.0), "no longer than the daemon lets it");
    let none = b.attach(&wanted("weights")).unwrap_err().to_string();
    let other = b.attach(&wanted("nothing")).unwrap_err().to_string();
    assert_eq!(none.replace("weights", "nothing"), other, "a name that is another's is as one that is not");
    let with_key = |byte: u8| Attaching { key: vec![byte; 16], ..wanted("secret") };
    let key = Publishing { key: vec![7; 16], ..how("secret", Duration::ZERO) };
    let _closed = publish(&a, &key, 2);
    assert_eq!(
        kind(&a.attach(&wanted("secret")).unwrap_err()),
        ErrorKind::NotFound,
        "its own tenant needs the key, too"
    );
    assert_eq!(kind(&b.attach(&with_key(8)).unwrap_err()), ErrorKind::NotFound);
    let there = b.attach(&with_key(7)).unwrap();
    assert!(holds_only(&b, &there, 2));
    // What is refused leaves the draft as it was.
    let draft = a.draft(0, Bytes::mib(8)).unwrap();
    for wrong in [
        Publishing { name: String::new(), ..how("x", Duration::ZERO) },
        Publishing { key: vec![1; 15], ..how("x", Duration::ZERO) },
        Publishing { content: Bytes::mib(9), ..how("x", Duration::ZERO) },
        how("secret", Duration::ZERO),
    ] {
        let draft = a.draft(0, Bytes::mib(8)).unwrap();
        let unpublished = draft.publish(&wrong).unwrap_err();
        let draft = unpublished.draft.expect("it is there still");
        a.driver().write(draft.span().start(), &[1]).unwrap();
    }
    drop(draft);
    drop(there);
}

#[test]
fn what_others_hold_is_withdrawn_by_its_tenant_and_stays_theirs() {
    let daemon = TestDaemon::start(64);
    let (one, two) = (connect(&daemon, "one"), connect(&daemon, "two"));
    let range = publish(&one, &how("weights", Duration::from_secs(60)), 3);
    let there = two.attach(&wanted("weights")).unwrap();
    let id = daemon.cli_json(&["shared"])["ranges"][0]["range"].as_u64().unwrap();
    let withdrawn = daemon.cli_json(&["shared", "--withdraw", &id.to_string()]);
    assert_eq!(withdrawn["holders"], 2);
    assert_eq!(kind(&two.attach(&wanted("weights")).unwrap_err()), ErrorKind::NotFound);
    assert!(holds_only(&two, &there, 3));
    drop((range, there));
    daemon.wait_for_device("available_bytes", 64 * MIB);
    let gone = daemon.cli(&["shared", "--withdraw", &id.to_string()]);
    assert_eq!(gone.status.code(), Some(2));
}

#[test]
fn whoever_writes_a_writable_range_is_read_by_the_others() {
    let daemon = TestDaemon::start(64);
    let (one, two) = (connect(&daemon, "one"), connect(&daemon, "two"));
    let range = publish(&one, &Publishing { is_writable: true, ..how("cache", Duration::ZERO) }, 1);
    let there = two.attach(&wanted("cache")).unwrap();
    two.driver().write(there.span().start(), &vec![9; 8 << 20]).unwrap();
    assert!(holds_only(&one, &range, 9));
    assert_eq!(daemon.cli_json(&["shared"])["ranges"][0]["read_only"], "no");
}

/// A process that shares; killed with the test.
struct Process {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Process {
    fn start(daemon: &TestDaemon, script: &str) -> Option<Process> {
        let mut child = python(daemon, &format!("{SHARES}{script}"))?;
        let said = BufReader::new(child.stdout.take().unwrap());
        Some(Process { child, said })
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

const PUBLISHER: &str = "
r = publish(draft(8, 0x31), b'weights')
say(r.sealed, holds(r, 0x31))
sys.stdin.readline()
";
const READER: &str = "
r = attach(b'weights')
say(r.sealed, holds(r, 0x31))
sys.stdin.readline()
";

#[test]
fn whoever_is_killed_leaves_the_range_to_the_others_and_no_trace() {
    let daemon = TestDaemon::start(64);
    let Some(mut publisher) = Process::start(&daemon, PUBLISHER) else { return };
    let sealed = u8::from(driver_name() == "host");
    assert_eq!(publisher.hear(), format!("{sealed} True"));
    let holders = || daemon.cli_json(&["shared"])["ranges"][0]["holders"].as_array().map_or(0, Vec::len);
    let mut reader = Process::start(&daemon, READER).unwrap();
    assert_eq!(reader.hear(), format!("{sealed} True"));
    assert_eq!(holders(), 2);
    drop(reader);
    eventually("a reader that was killed holds nothing", || (holders() == 1).then_some(()));
    drop(publisher);
    eventually("a publisher that was killed holds nothing", || (holders() == 0).then_some(()));
    let listed = daemon.cli_json(&["shared"]);
    assert!(listed["ranges"][0]["left_seconds"].as_f64() > Some(30.0), "{listed}");
    let mut heir = Process::start(&daemon, READER).unwrap();
    assert_eq!(heir.hear(), format!("{sealed} True"));
    let id = listed["ranges"][0]["range"].to_string();
    assert!(daemon.cli(&["shared", "--withdraw", &id]).status.success());
    drop(heir);
    daemon.wait_for_device("available_bytes", 64 * MIB);
    for figure in ["shared_bytes", "foreign_bytes", "quarantined_bytes"] {
        assert_eq!(daemon.device(figure), 0, "{figure}");
    }
}

#[test]
fn a_reader_that_means_to_write_is_kept_from_it_by_the_kernel() {
    if needs_host("vendors' drivers let an importer choose its access") {
        return;
    }
    let daemon = TestDaemon::start(64);
    let Some(mut publisher) = Process::start(&daemon, PUBLISHER) else { return };
    publisher.hear();
    let script = "
r = attach(b'weights')
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
say('mprotect', libc.mprotect(r.address, r.size, 3) == -1)
tried = 0
for fd in os.listdir('/proc/self/fd'):
    path = '/proc/self/fd/' + fd
    try:
        if 'stitchd-chunk' not in os.readlink(path):
            continue
        writer = os.open(path, os.O_RDWR)
    except OSError:
        continue
    tried += 1
    try:
        os.write(writer, b'x')
        say('written')
    except PermissionError:
        pass
    if libc.mmap(None, MIB, 3, 1, writer, 0) != ctypes.c_void_p(-1).value:
        say('mapped')
say('tried', tried > 0)
say(holds(r, 0x31))
";
    let mut reader = Process::start(&daemon, script).unwrap();
    assert_eq!([reader.hear(), reader.hear(), reader.hear()], ["mprotect True", "tried True", "True"]);
}

#[test]
fn a_publisher_that_keeps_a_way_to_write_is_told_of() {
    if needs_host("only there a driver enforces anything") {
        return;
    }
    let mut daemon = TestDaemon::start(64);
    daemon.expect_complaint("a shared range can be written");
    let script = "
r = draft(8, 0x31)
kept = []
for fd in os.listdir('/proc/self/fd'):
    try:
        if 'stitchd-chunk' in os.readlink('/proc/self/fd/' + fd):
            kept.append(mmap.mmap(os.open('/proc/self/fd/' + fd, os.O_RDWR), 2 * MIB))
    except OSError:
        pass
r = publish(r, b'weights')
say(len(kept) > 0, r.sealed)
kept[0][0] = 0x32
sys.stdin.readline()
";
    let Some(mut publisher) = Process::start(&daemon, script) else { return };
    assert_eq!(publisher.hear(), "True 0");
    assert_eq!(daemon.cli_json(&["shared"])["ranges"][0]["read_only"], "cooperative");
    let two = connect(&daemon, "two");
    assert!(!two.attach(&wanted("weights")).unwrap().is_sealed());
}

#[test]
fn what_the_c_border_is_asked_wrongly_is_told_and_changes_nothing() {
    let daemon = TestDaemon::start(64);
    let script = "
r = Range()
def refused(what):
    assert what == -1, what
    say(lib.stitch_last_error().decode())
refused(lib.stitch_share_close(4096))
refused(lib.stitch_share_create(MIB, -1, ctypes.byref(r)))
refused(lib.stitch_share_create(MIB, 7, ctypes.byref(r)))
refused(lib.stitch_share_attach(None, 0, None, 0, ctypes.byref(r)))
refused(lib.stitch_share_attach(b'x' * 200, 0, None, 0, ctypes.byref(r)))
refused(lib.stitch_share_attach(b'nothing', 0, None, 0, ctypes.byref(r)))
d = draft(8, 1)
refused(lib.stitch_share_publish(d.address, b'', d.size, 0, 0, None, 0, ctypes.byref(r)))
publish(d, b'weights', linger_ms=0)
refused(lib.stitch_share_publish(d.address, b'weights', d.size, 0, 0, None, 0, ctypes.byref(r)))
assert lib.stitch_share_close(d.address) == 0
assert lib.stitch_share_close(draft(8, 1).address) == 0
say('done')
sys.stdin.readline()
";
    let Some(mut process) = Process::start(&daemon, script) else { return };
    for expected in [
        "no shared range of this process begins at 0x1000",
        "device -1 is not one",
        "has no device 7",
        "a shared range has a name",
        "200 bytes; at most 128",
        "there is no shared range 'nothing'",
        "name: empty",
        "published already",
        "done",
    ] {
        let said = process.hear();
        assert!(said.contains(expected), "{said} is not {expected}");
    }
    daemon.wait_for_device("available_bytes", 64 * MIB);
}
