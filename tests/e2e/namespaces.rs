//! Containers, as the kernel knows them: processes that end with their namespace, several at once, and a number that another process has after them.
//!
//! Each test needs user and pid namespaces, which a system may keep from its users: then it says so, and is skipped.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use crate::support::{PRELUDE, SHARES, TestDaemon, client_library, eventually, hear, needs_host};

const MIB: u64 = 1 << 20;

/// A process that is the first of a pid namespace of its own, where it sees itself as root; its script is Python with the client library. Nothing where the system has no such thing for us.
fn container(daemon: Option<&TestDaemon>, script: &str, arguments: &[&str]) -> Option<Child> {
    let unshare = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let probe = Command::new("unshare").args(unshare).args(["python3", "-c", "pass"]).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        println!("SKIP: this system makes no user and pid namespaces for us (unshare --user --pid), or has no python3");
        return None;
    }
    let Some(library) = client_library() else {
        println!("SKIP: libstitchd_client.so was not built; build the whole workspace with its tests");
        return None;
    };
    let child = Command::new("unshare")
        .args(unshare)
        .args(["python3", "-c", &format!("{PRELUDE}{SHARES}{script}")])
        .arg(library)
        .args(arguments)
        .envs(daemon.map(TestDaemon::environment).unwrap_or_default())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    Some(child.unwrap())
}

fn lines(child: &mut Child) -> impl Iterator<Item = std::io::Result<String>> + use<> {
    BufReader::new(child.stdout.take().unwrap()).lines()
}

/// Three processes of a container, each with a child that keeps what it maps; the first waits for ever, and ends with the container.
const WORKERS: &str = "
import signal
for number in range(3):
    if os.fork() == 0:
        p = malloc(8 * MIB)
        poke(p, bytes([number + 1]) * (8 * MIB))
        if os.fork() == 0:
            signal.pause()
        say('ready')
        while True:
            q = lib.stitch_malloc(4 * MIB, 0, None)
            if q: free(q, 4 * MIB)
signal.pause()
";

#[test]
fn a_container_that_goes_takes_its_sessions_with_it_and_harms_nobody_beside_it() {
    let daemon = TestDaemon::start(64);
    let beside = daemon.session("beside").runtime(0, stitchd::runtime::RuntimeConfig::default()).unwrap();
    let kept = beside.alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(8))).unwrap();
    beside.device().driver().write(kept, &vec![0x77; 8 << 20]).unwrap();
    let Some(mut gone) = container(Some(&daemon), WORKERS, &[]) else { return };
    let mut said = lines(&mut gone);
    for _ in 0..3 {
        assert_eq!(hear(&mut said), "ready");
    }
    assert_eq!(daemon.status()["sessions"], 4);
    // Its first process dies with it (--kill-child), and the kernel ends all others at once.
    gone.kill().unwrap();
    gone.wait().unwrap();
    eventually("its sessions end", || (daemon.status()["sessions"] == 1).then_some(()));
    daemon.wait_for_device("available_bytes", 56 * MIB);
    let mut found = vec![0; 8 << 20];
    beside.device().driver().read(kept, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0x77));
    let all = beside.alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(56))).unwrap();
    let mut found = vec![1; 56 << 20];
    beside.device().driver().read(all, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "bytes of the container are there still");
}

#[test]
fn a_pod_that_goes_as_a_whole_leaves_what_it_shared_for_as_long_as_it_said() {
    let daemon = TestDaemon::start(64);
    let publishes =
        "publish(draft(16, 0x5e), b'weights', 60000)\nmalloc(8 * MIB)\nsay('ready')\nsys.stdin.readline()\n";
    let attaches =
        "r = attach(b'weights')\nassert holds(r, 0x5e)\nmalloc(8 * MIB)\nsay('ready')\nsys.stdin.readline()\n";
    let Some(mut one) = container(Some(&daemon), publishes, &[]) else { return };
    assert_eq!(hear(&mut lines(&mut one)), "ready");
    let mut two = container(Some(&daemon), attaches, &[]).unwrap();
    assert_eq!(hear(&mut lines(&mut two)), "ready");
    assert_eq!(daemon.device("shared_bytes"), 16 * MIB);
    for gone in [&mut one, &mut two] {
        gone.kill().unwrap();
    }
    for gone in [&mut one, &mut two] {
        gone.wait().unwrap();
    }
    eventually("all its sessions end", || (daemon.status()["sessions"] == 0).then_some(()));
    daemon.wait_for_device("leased_bytes", 0);
    // The next of its kind finds the weights, and then they are withdrawn.
    let mut next = container(Some(&daemon), attaches, &[]).unwrap();
    assert_eq!(hear(&mut lines(&mut next)), "ready");
    let range = daemon.cli_json(&["shared"])["ranges"][0]["range"].to_string();
    assert!(daemon.cli(&["shared", "--withdraw", &range]).status.success());
    next.kill().unwrap();
    next.wait().unwrap();
    daemon.wait_for_device("available_bytes", 64 * MIB);
}

/// The daemon and its clients in one namespace, whose next number can be chosen: a client dies while the daemon does not look, and the next one has its number.
const SAME_NUMBER: &str = "
import json, signal, subprocess
binary, directory = sys.argv[2], sys.argv[3]
def status():
    return json.loads(subprocess.run([binary, 'status', '--json'], capture_output=True, check=True).stdout)
def start(script):
    child = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True)
    return child
os.environ['STITCHD_RUNTIME_DIR'] = directory
daemon = subprocess.Popen([binary, 'serve', '--json', '--driver', 'host', '--device', '0=64MiB', '--runtime-dir', directory],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
daemon.stdout.readline()
client = f'''
import ctypes, os, time
lib = ctypes.CDLL({sys.argv[1]!r})
lib.stitch_malloc.restype = ctypes.c_void_p
lib.stitch_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
p = lib.stitch_malloc(MIBS << 20, 0, None)
print(os.getpid(), bool(p), ctypes.string_at(p, MIBS << 20).count(0) == MIBS << 20, flush=True)
ctypes.memset(p, 0x33, MIBS << 20)
print('written', flush=True)
time.sleep(600)
'''
first = start(client.replace('MIBS', '24'))
said = [first.stdout.readline().strip(), first.stdout.readline().strip()]
daemon.send_signal(signal.SIGSTOP)
first.kill()
first.wait()
with open('/proc/sys/kernel/ns_last_pid', 'w') as last:
    last.write(str(first.pid - 1))
second = start(client.replace('MIBS', '32'))
is_same = second.pid == first.pid
time.sleep(0.2)
daemon.send_signal(signal.SIGCONT)
said.append(second.stdout.readline().strip())
while True:
    found = status()
    if found['devices'][0]['leased_bytes'] == 32 * MIB:
        break
    time.sleep(0.01)
say(json.dumps({'is_same': is_same, 'said': said, 'pid': second.pid, 'sessions': found['sessions'], 'by_death': found['returned_by_death_bytes']}))
sessions = json.loads(subprocess.run([binary, 'sessions', '--json'], capture_output=True, check=True).stdout)
say(json.dumps([session['pid'] for session in sessions['sessions']]))
second.kill()
daemon.kill()
";

#[test]
fn a_process_that_has_the_number_of_one_that_died_is_another() {
    if needs_host("its daemon is started inside of a namespace") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let binary = env!("CARGO_BIN_EXE_stitchd");
    let arguments = [binary, directory.path().to_str().unwrap()];
    let Some(mut child) = container(None, SAME_NUMBER, &arguments) else { return };
    let mut said = lines(&mut child);
    let found: serde_json::Value = serde_json::from_str(&hear(&mut said)).unwrap();
    let pid = found["pid"].as_u64().unwrap();
    assert_eq!(found["is_same"], true, "another process took the number in between: {found}");
    let each = [format!("{pid} True True"), "written".into(), format!("{pid} True True")];
    assert_eq!(found["said"], serde_json::json!(each), "the second may not see what the first has written");
    assert_eq!((&found["sessions"], &found["by_death"]), (&1.into(), &(24 * MIB).into()), "{found}");
    let sessions: serde_json::Value = serde_json::from_str(&hear(&mut said)).unwrap();
    assert_eq!(sessions, serde_json::json!([pid]));
    drop(child.stdin.take().map(|mut input| input.write_all(b"\n")));
    child.wait().unwrap();
}

#[test]
fn every_daemon_of_a_node_is_asked_and_one_that_is_silent_is_named_beside_the_others() {
    let daemons = [TestDaemon::start(64), TestDaemon::start(32), TestDaemon::start(16)];
    let [named, second, silent] = daemons.each_ref().map(|daemon| daemon.path().display().to_string());
    // The node's own places, as they would be: nothing is written outside of this namespace.
    let pod = "/var/lib/kubelet/pods/7f0c/volumes/kubernetes.io~empty-dir/sockets";
    let node = format!(
        "mount -t tmpfs none /run && mount -t tmpfs none /var/lib && mkdir -p {pod} \
         && ln -s {named} /run/stitchd && ln -s {silent} /run/stitchd-2 && ln -s {second} {pod}/own"
    );
    let within = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script]);
        command.env_remove("STITCHD_SOCKET").env("STITCHD_RUNTIME_DIR", "/nowhere").output()
    };
    if !within(&node).is_ok_and(|done| done.status.success()) {
        println!("SKIP: this system makes no mount namespaces for us (unshare --user --mount), or no tmpfs in them");
        return;
    }
    let pid = rustix::process::Pid::from_raw(daemons[2].pid().cast_signed()).unwrap();
    let ask = || {
        let said = within(&format!("{node} && exec {} status --all --json", env!("CARGO_BIN_EXE_stitchd"))).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
        (said.status.code(), json["daemons"].as_array().unwrap().clone())
    };
    let (code, all) = ask();
    let shown = |daemon: &serde_json::Value| {
        (
            daemon["socket"].as_str().unwrap().to_owned(),
            daemon["status"]["devices"][0]["total_bytes"].as_u64().map(|bytes| bytes >> 20),
        )
    };
    let expected = [
        ("/run/stitchd/stitchd.sock".to_owned(), Some(64)),
        ("/run/stitchd-2/stitchd.sock".to_owned(), Some(16)),
        (format!("{pod}/own/stitchd.sock"), Some(32)),
    ];
    assert_eq!((code, all.iter().map(shown).collect::<Vec<_>>()), (Some(0), expected.to_vec()), "{all:?}");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let (code, all) = ask();
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    let answers: Vec<Option<u64>> = all.iter().map(|daemon| shown(daemon).1).collect();
    assert_eq!((code, answers), (Some(1), vec![Some(64), None, Some(32)]), "{all:?}");
    assert!(all[1]["error"].as_str().unwrap().contains("stitchd-2"), "{all:?}");
}
