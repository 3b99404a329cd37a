//! A service manager that listens for the daemon, starts it for the first client, and wants to hear that it is well.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;

use crate::support::{eventually, hear, needs_host, stitchd};

/// As much of systemd as matters: it listens (sd_listen_fds(3)), starts the daemon when somebody comes and whenever it is told to, and counts how often that says that it is well
/// (sd_watchdog_enabled(3)). Written without a line of ours.
const MANAGER: &str = "
import fcntl, os, select, signal, socket, sys, threading
directory, command = sys.argv[1], sys.argv[2:]
def listen(kind, name):
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(os.path.join(directory, name))
    sock.listen(64)
    return sock
http = socket.socket()
http.bind(('127.0.0.1', 0))
http.listen(64)
sockets = [listen(socket.SOCK_STREAM, 'stitchd.sock'), listen(socket.SOCK_SEQPACKET, 'chunks.sock'), http]
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.bind(os.path.join(directory, 'notify'))
alive = 0
def count():
    global alive
    while True:
        said = notify.recv(65536).decode().splitlines()
        alive += 'WATCHDOG=1' in said
        if 'READY=1' in said: print('ready', pid, flush=True)
threading.Thread(target=count, daemon=True).start()
def start():
    pid = os.fork()
    if pid == 0:
        high = [fcntl.fcntl(sock, fcntl.F_DUPFD, 3000) for sock in sockets]
        for number, fd in enumerate(high): os.dup2(fd, 3 + number, inheritable=True)
        os.closerange(6, 9000)
        os.dup2(os.open('/dev/null', os.O_RDWR), 1)
        env = dict(os.environ, NOTIFY_SOCKET=os.path.join(directory, 'notify'), WATCHDOG_PID=str(os.getpid()), WATCHDOG_USEC='400000',
                   LISTEN_PID=str(os.getpid()), LISTEN_FDS='3', LISTEN_FDNAMES='stitchd.socket:stitchd.socket:stitchd.socket')
        os.execve(command[0], command, env)
    return pid
print('listens', http.getsockname()[1], flush=True)
select.select([sockets[0]], [], [])
pid = start()
for line in sys.stdin:
    word = line.strip()
    if word == 'alive': print('alive', alive, flush=True)
    elif word in ('KILL', 'TERM'):
        os.kill(pid, getattr(signal, 'SIG' + word))
        os.waitpid(pid, 0)
        print('ended', flush=True)
        if word == 'KILL': pid = start()
";

struct Manager {
    process: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    dir: tempfile::TempDir,
    /// Where it listens for HTTP.
    port: u16,
}

impl Manager {
    fn start() -> Manager {
        let dir = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new("python3");
        command.args(["-c", MANAGER]).arg(dir.path()).arg(env!("CARGO_BIN_EXE_stitchd"));
        command.args(["serve", "--driver", "host", "--device=0=64MiB", "--runtime-dir"]).arg(dir.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = hear(&mut lines).strip_prefix("listens ").unwrap().parse().unwrap();
        Manager { process, lines, dir, port }
    }

    fn hear(&mut self, word: &str) -> String {
        let line = hear(&mut self.lines);
        let said = line.strip_prefix(word).unwrap_or_else(|| panic!("{line} for {word}\n{}", self.log()));
        said.trim().to_owned()
    }

    fn say(&mut self, word: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{word}").unwrap();
    }

    /// How often the daemon has said that it is well.
    fn alive(&mut self) -> u64 {
        self.say("alive");
        self.hear("alive").parse().unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn status(&self) -> Value {
        let socket = self.dir.path().join("stitchd.sock");
        let output = stitchd().args(["status", "--json", "--socket"]).arg(socket).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    fn is_ready(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).is_ok() && said.starts_with("HTTP/1.1 200")
    }

    /// Which files its sockets are.
    fn sockets(&self) -> [u64; 2] {
        ["stitchd.sock", "chunks.sock"].map(|name| std::fs::symlink_metadata(self.dir.path().join(name)).unwrap().ino())
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

#[test]
fn a_daemon_that_is_started_for_its_first_client_serves_on_the_sockets_that_are_there_and_leaves_them() {
    if needs_host("the daemon is started by another") {
        return;
    }
    let mut manager = Manager::start();
    let sockets = manager.sockets();
    // Nobody is there yet, and whoever comes does not notice.
    let config = SessionConfig::new(manager.dir.path().join("stitchd.sock"), "first");
    let session = Session::connect(&SessionConfig { patience: Duration::from_secs(30), ..config }).unwrap();
    let first = manager.hear("ready");
    let patient = RuntimeConfig { wait: Duration::from_secs(10), ..RuntimeConfig::default() };
    let one = session.runtime(0, patient).unwrap();
    let kept = one.alloc(&Request::of(Bytes::mib(20))).unwrap();
    one.device().driver().write(kept, &[0x5a; 4096]).unwrap();
    assert!(manager.is_ready(), "HTTP is on the port that is passed: {}", manager.log());
    // Whoever comes while it is gone waits at the same sockets.
    manager.say("KILL");
    manager.hear("ended");
    assert_ne!(manager.hear("ready"), first);
    eventually("that the session is there again", || session.is_attached().then_some(()));
    assert_eq!((manager.sockets(), manager.is_ready()), (sockets, true));
    assert_eq!(manager.status()["devices"][0]["leased_bytes"], 20_u64 << 20);
    let mut bytes = [0; 4096];
    one.device().driver().read(kept, &mut bytes).unwrap();
    assert_eq!(bytes, [0x5a; 4096]);
    drop((one, session));
    eventually("that the session is over", || (manager.status()["sessions"] == 0).then_some(()));
    // They are the manager's: one that ends leaves them.
    manager.say("TERM");
    manager.hear("ended");
    assert_eq!(manager.sockets(), sockets);
}

#[test]
fn a_daemon_says_that_it_is_well_as_often_as_its_manager_wants_and_does_not_while_it_hangs() {
    if needs_host("the daemon is started by another") {
        return;
    }
    let mut manager = Manager::start();
    // Somebody comes.
    manager.status();
    let pid = rustix::process::Pid::from_raw(manager.hear("ready").parse().unwrap()).unwrap();
    eventually("that it is well five times", || (manager.alive() >= 5).then_some(()));
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    // What it has said before that is heard.
    std::thread::sleep(Duration::from_millis(200));
    let before = manager.alive();
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(manager.alive(), before);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    eventually("that it is well again", || (manager.alive() > before).then_some(()));
    manager.say("TERM");
    manager.hear("ended");
}
