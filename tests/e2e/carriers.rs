//! What carries what outlives the daemon, beside the keeper that it starts: a service manager with a store for descriptors, and a keeper that somebody else has started.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use stitchd::driver::LibraryPlace;
use stitchd::driver::gpu::GpuKind;
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;

use crate::standin::Machine;
use crate::support::{TestDaemon, eventually, hear, needs_host, stitchd};

const MIB: u64 = 1 << 20;

/// As much of systemd as matters: it starts the daemon again whenever that ends, keeps what it is told to (sd_notify(3)), and passes it on (sd_listen_fds(3)). Written without a line of ours.
const MANAGER: &str = "
import array, fcntl, os, select, signal, socket, sys
path, command = sys.argv[1], sys.argv[2:]
sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sock.bind(path)
store = []                                  # (name, descriptor), the oldest first
def read():
    data, control, _, _ = sock.recvmsg(65536, 65536)
    fds = array.array('i')
    for level, kind, some in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(some[:len(some) - len(some) % fds.itemsize])
    said = dict(line.split('=', 1) for line in data.decode().splitlines())
    name = said.get('FDNAME', 'stored')
    if said.get('FDSTORE') == '1':
        assert said.get('FDPOLL') == '0'
        store.extend((name, os.dup(fd)) for fd in fds)
        assert len(store) <= 4096
    if said.get('FDSTOREREMOVE') == '1':
        for known in [known for known in store if known[0] == name]:
            store.remove(known)
            os.close(known[1])
    for fd in fds: os.close(fd)
    # As Type=notify has it.
    if said.get('READY') == '1': print('serves', pid, len(store), flush=True)
def start():
    out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(out[1], 1)
        # Out of the way first, then to where they belong.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 3000) for _, fd in store]
        for number, fd in enumerate(high): os.dup2(fd, 3 + number, inheritable=True)
        os.closerange(3 + len(high), 9000)
        env = dict(os.environ, NOTIFY_SOCKET=path)
        if high:
            env.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(high)), LISTEN_FDNAMES=':'.join(name for name, _ in store))
        os.execve(command[0], command, env)
    os.close(out[1])
    return pid, out[0]
pid, out = start()
while True:
    ready, _, _ = select.select([sock, out, sys.stdin], [], [])
    if sock in ready: read()
    elif out in ready:
        if not os.read(out, 65536):
            # It has ended: whatever it had said was said.
            os.close(out)
            os.waitpid(pid, 0)
            while select.select([sock], [], [], 0)[0]: read()
            pid, out = start()
    elif sys.stdin in ready:
        if sys.stdin.readline().strip() == 'store':
            while select.select([sock], [], [], 0)[0]: read()
            print('store', ' '.join(sorted(name for name, _ in store)), flush=True)
        else:
            os.kill(pid, signal.SIGKILL)
            break
";

/// A daemon that such a manager looks after.
struct Managed {
    manager: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    dir: tempfile::TempDir,
}

impl Managed {
    fn start() -> Managed {
        Managed::start_with(|command| {
            command.args(["--driver", "host", "--device=0=64MiB"]);
        })
    }

    /// With these arguments too.
    fn start_with(more: impl FnOnce(&mut Command)) -> Managed {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("stitchd.toml");
        std::fs::write(&config, "keeper = \"systemd\"\n").unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new("python3");
        command
            .args(["-c", MANAGER])
            .arg(dir.path().join("notify"))
            .arg(env!("CARGO_BIN_EXE_stitchd"))
            .args(["serve", "--json", "--log", "debug", "--config"])
            .arg(&config)
            .arg("--runtime-dir")
            .arg(dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log);
        more(&mut command);
        let mut manager = command.spawn().unwrap();
        let lines = BufReader::new(manager.stdout.take().unwrap()).lines();
        Managed { manager, lines, dir }
    }

    /// The daemon's process, once it serves, and how many descriptors were in the store then.
    fn serves(&mut self) -> (i32, u64) {
        let line = hear(&mut self.lines);
        let words: Vec<_> = line.split(' ').collect();
        assert_eq!(words[0], "serves", "{line}\n{}", self.log());
        (words[1].parse().unwrap(), words[2].parse().unwrap())
    }

    /// The names in the store.
    fn store(&mut self) -> Vec<String> {
        writeln!(self.manager.stdin.as_mut().unwrap(), "store").unwrap();
        hear(&mut self.lines).split(' ').skip(1).map(str::to_owned).collect()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn status(&self) -> Value {
        status(self.dir.path())
    }

    fn session(&self, name: &str) -> Arc<Session> {
        Session::connect(&SessionConfig::new(self.dir.path().join("stitchd.sock"), name)).unwrap()
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        drop(self.manager.stdin.take());
        let _ = self.manager.wait();
    }
}

fn status(dir: &Path) -> Value {
    let output = stitchd().args(["status", "--json", "--socket"]).arg(dir.join("stitchd.sock")).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

fn runtime(session: &Arc<Session>) -> Runtime {
    let patient = RuntimeConfig { wait: Duration::from_secs(10), ..RuntimeConfig::default() };
    session.runtime(0, patient).unwrap()
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_service_manager_holds_what_outlives_the_daemon_that_it_starts_again() {
    if needs_host("the daemon is started by another") {
        return;
    }
    let mut managed = Managed::start();
    let (mut pid, _) = managed.serves();
    assert_eq!(managed.store(), ["w"]);
    let session = managed.session("stays");
    let one = runtime(&session);
    let kept = one.alloc(&Request::of(Bytes::mib(20))).unwrap();
    one.device().driver().write(kept, &vec![0x5a; 20 << 20]).unwrap();
    for round in 1..=5 {
        // What is leased and given back in between is in the store, and not.
        let more = one.alloc(&Request::of(Bytes::mib(2 * round))).unwrap();
        let names = managed.store();
        let chunks = managed.status()["exports"].as_u64().unwrap();
        assert_eq!(names.iter().filter(|name| name.starts_with('c')).count() as u64, chunks, "{names:?}");
        assert_eq!(names.iter().filter(|name| *name == "w").count(), 1, "{names:?}");
        kill(pid);
        let (next, passed) = managed.serves();
        assert!(next != pid && passed >= chunks, "{passed} of {chunks}");
        pid = next;
        eventually("that the session is there again", || session.is_attached().then_some(()));
        let mut bytes = vec![0; 20 << 20];
        one.device().driver().read(kept, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0x5a));
        eventually("that both say the same", || {
            (managed.status()["devices"][0]["leased_bytes"] == one.stats().held.get()).then_some(())
        });
        one.free(more, StreamId(0)).unwrap();
    }
    let log = managed.log();
    assert!(log.contains("registered=0") && !log.contains("ERROR"), "{log}");
    // Nobody is left: neither is anything in the store.
    drop((one, session));
    eventually("that all is back", || (managed.status()["sessions"] == 0).then_some(()));
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    managed.serves();
    assert_eq!(managed.store(), ["w"], "of the one that has begun since");
}

#[test]
fn a_keeper_that_somebody_else_has_started_is_used_and_outlives_the_daemon_and_its_children() {
    let dir = tempfile::tempdir().unwrap();
    let mut keeper = stitchd()
        .args(["keep", "--runtime-dir"])
        .arg(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("its socket", || dir.path().join("keeper.sock").exists().then_some(()));
    let daemon = TestDaemon::in_dir(dir, &["--device=0=64MiB"]);
    assert_eq!(daemon.status()["keeper"]["pid"], keeper.id());
    let session = Session::connect(&daemon.session_config("stays")).unwrap();
    let one = runtime(&session);
    one.alloc(&Request::of(Bytes::mib(20))).unwrap();
    let mut daemon = daemon.follow(&["--device=0=64MiB"]);
    eventually("that the session is there again", || {
        (session.is_attached() && daemon.device("leased_bytes") == 20 * MIB).then_some(())
    });
    assert_eq!(daemon.status()["keeper"]["pid"], keeper.id());
    assert!(daemon.log().contains("registered=0"));
    drop((one, session));
    daemon.wait_for_device("leased_bytes", 0);
    // It is not the daemon's to end: whoever has started it wants it for the next.
    assert!(daemon.terminate().success());
    let ended = keeper.try_wait().unwrap();
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    assert_eq!(ended, None, "it stays");
}

#[test]
fn what_a_service_manager_passes_is_for_the_daemon_alone() {
    let machine = Machine::new(GpuKind::Cuda, "devices = 134217728\ndirty = 1");
    let library = LibraryPlace::at(machine.library());
    let place = machine.library().to_owned();
    let mut managed = Managed::start_with(|command| {
        command.args(["--driver", "cuda"]).env("STITCHD_DRIVER_LIBRARY", place);
    });
    let (pid, _) = managed.serves();
    let socket = managed.dir.path().join("stitchd.sock");
    let session = Session::connect(&SessionConfig { library, ..SessionConfig::new(socket.clone(), "stays") }).unwrap();
    // In small chunks, so that there are many descriptors.
    let patient = RuntimeConfig { wait: Duration::from_secs(10), ..RuntimeConfig::default().with_uniform_chunks() };
    let one = session.runtime(0, patient).unwrap();
    let kept = one.alloc(&Request::of(Bytes::mib(100))).unwrap();
    kill(pid);
    let (_, passed) = managed.serves();
    assert!(passed > 40, "{passed} descriptors");
    eventually("that it is there again", || session.is_attached().then_some(()));
    one.free(kept, StreamId(0)).unwrap();
    one.trim(Bytes::mib(256));
    drop((one, session));
    eventually("that all was given back", || (managed.status()["devices"][0]["leased_bytes"] == 0).then_some(()));
    // Whoever clears memory was started by the second daemon, and has none of it.
    assert!(stitchd().args(["trim", "--socket"]).arg(&socket).output().unwrap().status.success());
    eventually("that no chunk is left", || (machine.chunk_files() == 0).then_some(()));
    assert_eq!(managed.status()["devices"][0]["foreign_bytes"], 0);
}

/// A keeper and a daemon, each in a pod of its own.
struct Pods {
    sockets: tempfile::TempDir,
    state: tempfile::TempDir,
    keeper: Child,
}

/// A pid namespace ends as a pod does: all at once. The users are the same, as of pods that run as the same user on one node.
fn unshare(what: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).args(what);
    command.stdin(Stdio::null());
    command
}

impl Pods {
    /// With a keeper; nothing where that cannot be.
    fn new() -> Option<Pods> {
        Pods::with_keeper("exec \"$@\"")
    }

    /// The keeper is started by this script.
    fn with_keeper(script: &str) -> Option<Pods> {
        if !unshare(&["true"]).stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            println!("SKIP: this process may not make pid namespaces (unshare --pid)");
            return None;
        }
        if needs_host("the daemon is started by hand") {
            return None;
        }
        let (sockets, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let state_dir = state.path().to_str().unwrap();
        let keep = ["sh", "-c", script, "sh", env!("CARGO_BIN_EXE_stitchd"), "keep", "--state-dir", state_dir];
        let keeper = unshare(&keep).spawn().unwrap();
        eventually("its socket", || state.path().join("keeper.sock").exists().then_some(()));
        Some(Pods { sockets, state, keeper })
    }

    /// A daemon of 64 MiB, which says `what` it must.
    fn serve(&self) -> Child {
        let [sockets, state] = [&self.sockets, &self.state].map(|dir| dir.path().to_str().unwrap());
        let what = ["serve", "--driver", "host", "--device=0=64MiB", "--runtime-dir", sockets, "--state-dir", state];
        // Who waits for `unshare` may hear of its end before the process in it has ended.
        eventually("a daemon", || {
            let mut command = unshare(&[&[env!("CARGO_BIN_EXE_stitchd")], &what[..]].concat());
            let mut daemon = command.stdout(Stdio::piped()).spawn().unwrap();
            let line = BufReader::new(daemon.stdout.take().unwrap()).lines().next();
            if line.is_none() {
                daemon.wait().unwrap();
            }
            line.map(|_| daemon)
        })
    }

    fn session(&self) -> Arc<Session> {
        Session::connect(&SessionConfig::new(self.sockets.path().join("stitchd.sock"), "trainer")).unwrap()
    }

    fn device(&self, what: &str) -> u64 {
        status(self.sockets.path())["devices"][0][what].as_u64().unwrap()
    }

    fn end(mut self, mut daemon: Child) {
        for child in [&mut daemon, &mut self.keeper] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

#[test]
fn a_keeper_in_a_pod_of_its_own_outlives_the_pod_of_the_daemon() {
    let Some(pods) = Pods::new() else { return };
    let mut first = pods.serve();
    let session = pods.session();
    let one = runtime(&session);
    let kept = one.alloc(&Request::of(Bytes::mib(20))).unwrap();
    one.device().driver().write(kept, &vec![0x5a; 20 << 20]).unwrap();
    first.kill().unwrap();
    first.wait().unwrap();
    let second = pods.serve();
    eventually("that it is there again", || session.is_attached().then_some(()));
    assert_eq!((pods.device("leased_bytes"), pods.device("quarantined_bytes")), (20 * MIB, 0));
    // Also what only the keeper can hand on: somebody else gets what is given back.
    let mut found = vec![0; 20 << 20];
    one.device().driver().read(kept, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0x5a));
    one.free(kept, StreamId(0)).unwrap();
    one.trim(Bytes::mib(64));
    eventually("its memory back", || (pods.device("available_bytes") == 64 * MIB).then_some(()));
    pods.end(second);
}

#[test]
fn what_a_keeper_that_cannot_be_ended_holds_is_not_called_free() {
    let Some(pods) = Pods::new() else { return };
    let daemon = pods.serve();
    let keeper = || status(pods.sockets.path())["keeper"]["pid"].as_i64().filter(|pid| *pid > 0);
    let job = |mib: u64| {
        let session = pods.session();
        let one = runtime(&session);
        one.alloc(&Request::of(Bytes::mib(mib))).map(|kept| (kept, one, session))
    };
    // What a session has goes to the driver when it is over.
    let (stays, goes) = (job(12).unwrap(), job(20).unwrap());
    let outer = pods.keeper.id();
    let children = std::fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap();
    let process = rustix::process::Pid::from_raw(children.trim().parse().unwrap()).unwrap();
    let signal = |signal| rustix::process::kill_process(process, signal).unwrap();
    signal(rustix::process::Signal::STOP);
    drop(goes);
    eventually("that it does not answer", || (pods.device("quarantined_bytes") == 20 * MIB).then_some(()));
    assert_eq!(pods.device("available_bytes"), 32 * MIB);
    // One of the daemon's own is there meanwhile, and what comes and goes since is free at once.
    eventually("another keeper", || keeper().filter(|pid| *pid != 1));
    let since = job(30).unwrap();
    assert!(job(20).is_err(), "there is no room for it");
    drop(since);
    eventually("what came since", || (pods.device("available_bytes") == 32 * MIB).then_some(()));
    assert_eq!((pods.device("quarantined_bytes"), pods.device("idle_bytes")), (20 * MIB, 0));
    signal(rustix::process::Signal::CONT);
    eventually("all of it", || (pods.device("available_bytes") == 52 * MIB).then_some(()));
    assert_eq!((pods.device("quarantined_bytes"), pods.device("leased_bytes")), (0, 12 * MIB));
    drop(stays);
    // It was told to let go of everything, and is there to stay: it is told all that there is, and the daemon's own ends.
    eventually("the first", || keeper().filter(|pid| *pid == 1));
    pods.end(daemon);
}

#[test]
fn a_keeper_that_refuses_and_cannot_be_ended_is_told_to_let_go_where_it_stands_by() {
    // Fewer than the job's chunks are.
    let Some(pods) = Pods::with_keeper("ulimit -n 30; exec \"$@\"") else { return };
    let daemon = pods.serve();
    let keeper = || status(pods.sockets.path())["keeper"]["pid"].as_i64().filter(|pid| *pid > 0);
    let session = pods.session();
    let one = runtime(&session);
    let kept = one.alloc(&Request::of(Bytes::mib(60))).unwrap();
    eventually("another keeper", || keeper().filter(|pid| *pid != 1));
    // Who may hold it is not in this daemon's reach, and has hung up.
    one.free(kept, StreamId(0)).unwrap();
    one.trim(Bytes::mib(64));
    eventually("its memory back", || (pods.device("available_bytes") == 64 * MIB).then_some(()));
    assert_eq!(pods.device("quarantined_bytes"), 0);
    pods.end(daemon);
}

#[test]
fn what_a_service_manager_has_not_heard_it_is_to_let_go_of_is_not_called_free_and_is_told_again() {
    if needs_host("the daemon is started by another") {
        return;
    }
    let mut managed = Managed::start();
    managed.serves();
    let session = managed.session("comes and goes");
    let one = runtime(&session);
    let kept = one.alloc(&Request::of(Bytes::mib(60))).unwrap();
    let chunks = |managed: &mut Managed| managed.store().iter().filter(|name| name.starts_with('c')).count();
    let held = chunks(&mut managed);
    assert!(held > 0);
    let manager = rustix::process::Pid::from_child(&managed.manager);
    rustix::process::kill_process(manager, rustix::process::Signal::STOP).unwrap();
    one.free(kept, StreamId(0)).unwrap();
    one.trim(Bytes::mib(64));
    drop((one, session));
    eventually("that it is known", || (managed.status()["devices"][0]["quarantined_bytes"] == 60 * MIB).then_some(()));
    rustix::process::kill_process(manager, rustix::process::Signal::CONT).unwrap();
    eventually("all of it", || (managed.status()["devices"][0]["available_bytes"] == 64 * MIB).then_some(()));
    assert_eq!((chunks(&mut managed), managed.status()["devices"][0]["foreign_bytes"].clone()), (0, 0.into()));
}
