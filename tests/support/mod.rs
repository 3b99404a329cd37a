//! Daemons for tests: each its own process in its own directory, ended with the test, and held to a log without complaints.
//!
//! `STITCHD_TEST_DEVICE` says on which driver: `host`, or `cuda` and `hip` on a pretended machine with GPUs (tests/standin-driver).

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use stitchd::driver::gpu::GpuKind;
use stitchd::driver::{Driver, LibraryPlace};
use stitchd::runtime::{Runtime, RuntimeConfig};
use stitchd::session::{Session, SessionConfig};
use stitchd::units::Bytes;
use tempfile::TempDir;

use crate::standin::Machine;

/// How long anything may take that should take a moment: the one number of patience in the tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The binary under test.
pub(crate) fn stitchd() -> Command {
    Command::new(env!("CARGO_BIN_EXE_stitchd"))
}

/// Runs the binary, and says how it ended.
pub(crate) fn run(args: &[&str]) -> Output {
    stitchd().args(args).stdin(Stdio::null()).output().unwrap()
}

/// Runs the binary and reads the one JSON object that it prints.
pub(crate) fn run_json(args: &[&str]) -> Value {
    let output = run(args);
    assert!(output.status.success(), "{args:?} ended with {}: {}", output.status, stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Polls until `done` gives something.
pub(crate) fn eventually<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    eventually_or_says(what, || done().ok_or("nothing more is known"))
}

/// Polls until `done` gives something; where it never does, the last of what it says instead is what there is to look at.
pub(crate) fn eventually_or_says<T, E: Display>(what: &str, mut done: impl FnMut() -> Result<T, E>) -> T {
    const STEP: Duration = Duration::from_millis(5);
    let mut waited = Duration::ZERO;
    loop {
        match done() {
            Ok(value) => return value,
            Err(instead) => assert!(waited < PATIENCE, "{what} did not happen in {PATIENCE:?}: {instead}"),
        }
        std::thread::sleep(STEP);
        waited += STEP;
    }
}

/// The driver under test, and the pretended machine's vendor where it is one of a GPU.
pub(crate) fn vendor() -> Option<GpuKind> {
    match variable("STITCHD_TEST_DEVICE").as_deref().map(|name| name.to_str().unwrap_or_default()) {
        None | Some("" | "host") => None,
        Some("cuda") => Some(GpuKind::Cuda),
        Some("hip") => Some(GpuKind::Hip),
        Some(other) => panic!("STITCHD_TEST_DEVICE is '{other}', and can be host, cuda or hip"),
    }
}

/// What whoever started the tests, or a test that starts itself again, has to say.
#[expect(clippy::disallowed_methods, reason = "the place of these tests that reads the environment")]
pub(crate) fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// The name of the driver under test.
pub(crate) fn driver_name() -> &'static str {
    match vendor() {
        None => "host",
        Some(GpuKind::Cuda) => "cuda",
        Some(GpuKind::Hip) => "hip",
    }
}

/// True where this test cannot run on the driver under test; says so.
pub(crate) fn needs_host(why: &str) -> bool {
    let cannot = vendor().is_some();
    if cannot {
        println!("SKIP: only on the host driver: {why}");
    }
    cannot
}

impl Machine {
    /// The name of its driver.
    fn driver(&self) -> &'static str {
        if self.library().ends_with("libstandin_hip.so") { "hip" } else { "cuda" }
    }

    /// Tells its libraries something, whoever has loaded them.
    fn tell(&self, file: &str, words: &str) {
        std::fs::write(self.library().with_file_name(file), words).unwrap();
    }

    /// A device goes away, for every process.
    pub(crate) fn lose(&self, device: u32) {
        self.tell("lost", &device.to_string());
    }

    /// These calls do not come back from now on; none for none.
    pub(crate) fn hang(&self, calls: &str) {
        self.tell("hang", calls);
    }
}

/// A daemon on the driver under test.
pub(crate) struct TestDaemon {
    child: Child,
    dir: TempDir,
    machine: Option<Machine>,
    http: Option<String>,
    /// Log lines with these words are what the test is about.
    expected: Vec<&'static str>,
    is_over: bool,
}

impl TestDaemon {
    /// A daemon with one device of `mib` MiB.
    pub(crate) fn start(mib: u64) -> TestDaemon {
        TestDaemon::with(&[&format!("--device=0={mib}MiB")])
    }

    /// A daemon with these flags.
    pub(crate) fn with(flags: &[&str]) -> TestDaemon {
        TestDaemon::in_dir(tempfile::tempdir().unwrap(), flags)
    }

    /// A daemon in a directory that is there already.
    pub(crate) fn in_dir(dir: TempDir, flags: &[&str]) -> TestDaemon {
        let machine = vendor().map(|kind| Machine::new(kind, &machine_like(flags)));
        TestDaemon::launch(dir, machine, flags)
    }

    /// A daemon on a pretended machine with GPUs, whatever driver is under test.
    pub(crate) fn on(machine: Machine, flags: &[&str]) -> TestDaemon {
        TestDaemon::launch(tempfile::tempdir().unwrap(), Some(machine), flags)
    }

    /// A daemon that may have so many open files, on a pretended machine or the host.
    pub(crate) fn with_open_files(max: u32, machine: Option<Machine>, flags: &[&str]) -> TestDaemon {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {max}; exec \"$0\" \"$@\"");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_stitchd")]);
        TestDaemon::run(command, tempfile::tempdir().unwrap(), machine, flags)
    }

    fn launch(dir: TempDir, machine: Option<Machine>, flags: &[&str]) -> TestDaemon {
        TestDaemon::run(stitchd(), dir, machine, flags)
    }

    /// A daemon that dies, or whose keeper does, at a moment that is said as `STITCHD_TEST_DIE_AT` has it; nothing where it dies before it serves.
    pub(crate) fn mortal(dir: TempDir, wish: &str, flags: &[&str]) -> Result<TestDaemon, TempDir> {
        let machine = vendor().map(|kind| Machine::new(kind, &machine_like(flags)));
        let mut command = stitchd();
        command.env("STITCHD_TEST_DIE_AT", wish);
        TestDaemon::try_run(command, dir, machine, flags).map_err(|(dir, ..)| dir)
    }

    /// It has ended by itself.
    pub(crate) fn has_died(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    fn run(command: Command, dir: TempDir, machine: Option<Machine>, flags: &[&str]) -> TestDaemon {
        TestDaemon::try_run(command, dir, machine, flags)
            .unwrap_or_else(|(.., log)| panic!("the daemon did not start: {log}"))
    }

    fn try_run(
        mut command: Command,
        dir: TempDir,
        machine: Option<Machine>,
        flags: &[&str],
    ) -> Result<TestDaemon, (TempDir, Option<Machine>, String)> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(dir.path().join("log")).unwrap();
        let driver = machine.as_ref().map_or("host", Machine::driver);
        if let Some(machine) = &machine {
            command.env("STITCHD_DRIVER_LIBRARY", machine.library());
        }
        let mut child = command
            .args(["serve", "--json", "--driver", driver, "--log", "debug"])
            .arg("--runtime-dir")
            .arg(dir.path())
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        let Ok(ready) = serde_json::from_str::<Value>(&ready) else {
            child.wait().unwrap();
            let log = std::fs::read_to_string(dir.path().join("log")).unwrap_or_default();
            return Err((dir, machine, log));
        };
        let http = ready["http"].as_str().map(str::to_owned);
        Ok(TestDaemon { child, dir, machine, http, expected: Vec::new(), is_over: false })
    }

    /// The pretended machine that it is on.
    pub(crate) fn machine(&self) -> &Machine {
        self.machine.as_ref().expect("the daemon is on a pretended machine")
    }

    /// How sessions are opened with this daemon.
    pub(crate) fn session_config(&self, name: &str) -> SessionConfig {
        SessionConfig { library: self.library(), ..SessionConfig::new(self.socket(), name) }
    }

    /// A driver of its own over the daemon's devices, as a process without manners would open one.
    pub(crate) fn driver(&self) -> Arc<dyn Driver> {
        let name = self.status()["driver"].as_str().unwrap().parse().unwrap();
        let total = Bytes::new(self.device("total_bytes"));
        stitchd::driver::open(name, &[total], &self.library()).unwrap()
    }

    /// What a process needs in its environment to use this daemon.
    pub(crate) fn environment(&self) -> Vec<(&'static str, PathBuf)> {
        let library = self.machine.as_ref().map(|machine| ("STITCHD_DRIVER_LIBRARY", machine.library().to_path_buf()));
        [("STITCHD_SOCKET", self.socket())].into_iter().chain(library).collect()
    }

    fn library(&self) -> LibraryPlace {
        self.machine.as_ref().map_or_else(LibraryPlace::default, |machine| LibraryPlace::at(machine.library()))
    }

    /// The test makes the daemon say something with these words.
    pub(crate) fn expect_complaint(&mut self, words: &'static str) {
        self.expected.push(words);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("stitchd.sock")
    }

    pub(crate) fn chunk_socket(&self) -> PathBuf {
        self.dir.path().join("chunks.sock")
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// Runs a command of the binary against this daemon.
    pub(crate) fn cli(&self, args: &[&str]) -> Output {
        let socket = self.socket();
        run(&[args, &["--socket", socket.to_str().unwrap()]].concat())
    }

    /// The same, with its JSON.
    pub(crate) fn cli_json(&self, args: &[&str]) -> Value {
        let socket = self.socket();
        run_json(&[args, &["--json", "--socket", socket.to_str().unwrap()]].concat())
    }

    pub(crate) fn status(&self) -> Value {
        self.cli_json(&["status"])
    }

    /// A figure of the first device.
    pub(crate) fn device(&self, figure: &str) -> u64 {
        self.status()["devices"][0][figure].as_u64().unwrap()
    }

    /// The first device's name.
    pub(crate) fn uuid(&self) -> String {
        self.status()["devices"][0]["uuid"].as_str().unwrap().to_owned()
    }

    /// Waits until a figure of the first device is this.
    pub(crate) fn wait_for_device(&self, figure: &str, expected: u64) {
        eventually(&format!("{figure} = {expected}"), || (self.device(figure) == expected).then_some(()));
    }

    pub(crate) fn session(&self, name: &str) -> Arc<Session> {
        Session::connect(&self.session_config(name)).unwrap()
    }

    pub(crate) fn runtime(&self, name: &str) -> Runtime {
        self.session(name).runtime(0, RuntimeConfig::default()).unwrap()
    }

    pub(crate) fn session_with_limit(&self, name: &str, limit: Bytes) -> Arc<Session> {
        let config = SessionConfig { limit: Some(limit), ..self.session_config(name) };
        Session::connect(&config).unwrap()
    }

    pub(crate) fn http_address(&self) -> &str {
        self.http.as_ref().expect("the daemon was started with --http")
    }

    /// A page over HTTP: its status line and its body.
    pub(crate) fn http(&self, path: &str) -> (String, String) {
        let (head, body) = self.http_with(path, "");
        (head.lines().next().unwrap_or_default().to_owned(), body)
    }

    /// The same, asked for with more headers, and with all of its own.
    pub(crate) fn http_with(&self, path: &str, headers: &str) -> (String, String) {
        let address = self.http_address();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    /// Ends the daemon as a service manager would.
    pub(crate) fn terminate(&mut self) -> std::process::ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.is_over = true;
        self.child.wait().unwrap()
    }

    /// Ends the daemon without warning, and gives its directory back.
    pub(crate) fn kill(mut self) -> TempDir {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.is_over = true;
        self.check_log();
        std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap())
    }

    /// Ends the daemon without warning, and starts one that follows it, in the same directory and on the same machine.
    pub(crate) fn follow(mut self, flags: &[&str]) -> TestDaemon {
        if !self.is_over {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
        self.is_over = true;
        self.check_log();
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        let (machine, expected) = (self.machine.take(), std::mem::take(&mut self.expected));
        let mut next = TestDaemon::launch(dir, machine, flags);
        next.expected = expected;
        next
    }

    /// The same with one that dies at a moment ([`TestDaemon::mortal`]), perhaps before it serves.
    pub(crate) fn follow_mortal(mut self, wish: &str, flags: &[&str]) -> TestDaemon {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.is_over = true;
        self.check_log();
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        let path = dir.path().to_owned();
        let (machine, expected) = (self.machine.take(), std::mem::take(&mut self.expected));
        let mut command = stitchd();
        command.env("STITCHD_TEST_DIE_AT", wish);
        let mut next = match TestDaemon::try_run(command, dir, machine, flags) {
            Ok(daemon) => daemon,
            Err((dir, machine, _)) => {
                assert_eq!(dir.path(), path);
                TestDaemon::launch(dir, machine, flags)
            }
        };
        next.expected = expected;
        next
    }

    /// Any complaint that the test did not announce is a failure of the test.
    fn check_log(&self) {
        let log = self.log();
        let is_complaint = |line: &&str| {
            (line.contains(" WARN ") || line.contains(" ERROR ") || line.contains("panicked"))
                && !self.expected.iter().any(|words| line.contains(words))
        };
        let complaints: Vec<_> = log.lines().filter(is_complaint).collect();
        assert!(complaints.is_empty(), "the daemon complained:\n{}", complaints.join("\n"));
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        if !self.is_over {
            let _ = self.child.kill();
            let _ = self.child.wait();
            if !std::thread::panicking() {
                self.check_log();
            }
        }
    }
}

/// A machine whose devices are as large as the flags say.
fn machine_like(flags: &[&str]) -> String {
    const UNNAMED: Bytes = Bytes::gib(16);
    let flag = |flag: &&str| flag.strip_prefix("--device=").map(str::to_owned);
    let sizes: Vec<_> = flags.iter().filter_map(flag).collect();
    let size = |text: &String| match text.split_once('=') {
        Some((_, bytes)) => bytes.parse().unwrap(),
        None => UNNAMED,
    };
    let mut sizes: Vec<Bytes> = sizes.iter().map(size).collect();
    if sizes.is_empty() {
        sizes.push(UNNAMED);
    }
    let bytes: Vec<String> = sizes.iter().map(|bytes| bytes.get().to_string()).collect();
    format!("devices = {}", bytes.join(", "))
}

/// The client library, the newest there is: `cargo build` leaves it beside the binary, `cargo test` in `deps`. `None` when only a part of the workspace was
/// built.
pub(crate) fn client_library() -> Option<PathBuf> {
    client_library_for(vendor().is_some())
}

/// The same, for a pretended machine with GPUs or for the host.
pub(crate) fn client_library_for(is_pretended_gpu: bool) -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_BIN_EXE_stitchd")).parent().unwrap();
    let places = [beside.join("libstitchd_client.so"), beside.join("deps/libstitchd_client.so")];
    let built = |path: &PathBuf| path.metadata().and_then(|metadata| metadata.modified()).ok();
    // Only a build with test hooks takes a driver's library from elsewhere.
    let fits = |path: &PathBuf| {
        let hook = b"STITCHD_DRIVER_LIBRARY";
        let has_hook = |bytes: Vec<u8>| bytes.windows(hook.len()).any(|window| window == hook);
        path.exists() && (!is_pretended_gpu || std::fs::read(path).is_ok_and(has_hook))
    };
    places.into_iter().filter(fits).max_by_key(built)
}

/// A Python process that can call the client library: `lib` is loaded, `main` is what the script does.
pub(crate) fn python(daemon: &TestDaemon, script: &str) -> Option<Child> {
    let Some(library) = client_library() else {
        println!("SKIP: libstitchd_client.so was not built; build the whole workspace with its tests");
        return None;
    };
    let child = Command::new("python3")
        .args(["-c", &format!("{PRELUDE}{script}")])
        .arg(library)
        .envs(daemon.environment())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    match child {
        Ok(child) => Some(child),
        Err(error) => {
            println!("SKIP: python3 cannot be started: {error}");
            None
        }
    }
}

/// A configuration for a daemon, and the flag that names it.
pub(crate) fn config_file(text: &str) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stitchd.toml");
    std::fs::write(&path, text).unwrap();
    let flag = format!("--config={}", path.display());
    (dir, flag)
}

/// What stands before the script of every such process.
pub(crate) const PRELUDE: &str = "\
import ctypes, os, sys, mmap, time
lib = ctypes.CDLL(sys.argv[1])
lib.stitch_malloc.restype = ctypes.c_void_p
lib.stitch_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
lib.stitch_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
lib.stitch_last_error.restype = ctypes.c_char_p
def malloc(size):
    p = lib.stitch_malloc(size, 0, None)
    assert p, lib.stitch_last_error()
    return p
def free(p, size):
    lib.stitch_free(p, size, 0, None)
# The CPU may touch the memory of a host device; of a GPU, copies do.
gpu = os.environ.get('STITCHD_DRIVER_LIBRARY')
if gpu:
    driver = ctypes.CDLL(gpu)
    def on_gpu(cuda, hip, *words):
        if 'cuda' in gpu:
            context = ctypes.c_void_p()
            assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
            assert driver.cuCtxSetCurrent(context) == 0
        else:
            assert driver.hipSetDevice(0) == 0
        code = getattr(driver, cuda if 'cuda' in gpu else hip)(*words)
        assert code == 0, code
def poke(p, data):
    if gpu: on_gpu('cuMemcpyHtoD_v2', 'hipMemcpyHtoD', ctypes.c_uint64(p), data, ctypes.c_size_t(len(data)))
    else: ctypes.memmove(p, data, len(data))
def peek(p, size):
    if not gpu: return ctypes.string_at(p, size)
    into = ctypes.create_string_buffer(size)
    on_gpu('cuMemcpyDtoH_v2', 'hipMemcpyDtoH', into, ctypes.c_uint64(p), ctypes.c_size_t(size))
    return into.raw
def say(*words):
    # In one piece: parent and child may speak at once.
    os.write(1, (' '.join(map(str, words)) + '\\n').encode())
MIB = 1 << 20
";

/// What Python processes know of shared ranges, where it stands before their script.
pub(crate) const SHARES: &str = "
class Range(ctypes.Structure):
    _fields_ = [('address', ctypes.c_void_p), ('size', ctypes.c_size_t), ('content', ctypes.c_size_t), ('version', ctypes.c_uint64),
                ('device', ctypes.c_int), ('writable', ctypes.c_int), ('sealed', ctypes.c_int)]
lib.stitch_share_publish.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
lib.stitch_share_attach.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
lib.stitch_share_create.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
lib.stitch_share_close.argtypes = [ctypes.c_void_p]
def draft(mib, byte):
    r = Range()
    assert lib.stitch_share_create(mib * MIB, 0, ctypes.byref(r)) == 0, lib.stitch_last_error()
    poke(r.address, bytes([byte]) * (mib * MIB))
    return r
def publish(r, name, linger_ms=60000, writable=0):
    assert lib.stitch_share_publish(r.address, name, r.size, linger_ms, writable, None, 0, ctypes.byref(r)) == 0, lib.stitch_last_error()
    return r
def attach(name):
    r = Range()
    assert lib.stitch_share_attach(name, 0, None, 0, ctypes.byref(r)) == 0, lib.stitch_last_error()
    return r
def holds(r, byte):
    return peek(r.address, r.content) == bytes([byte]) * r.content
";

/// The next line that a process says.
pub(crate) fn hear(lines: &mut impl Iterator<Item = std::io::Result<String>>) -> String {
    lines.next().expect("the process says something").unwrap()
}

/// Runs the binary on a pretended machine with GPUs.
pub(crate) fn run_on(machine: &Machine, args: &[&str]) -> Output {
    stitchd().args(args).env("STITCHD_DRIVER_LIBRARY", machine.library()).stdin(Stdio::null()).output().unwrap()
}
