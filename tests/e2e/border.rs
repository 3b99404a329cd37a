//! The C border: a C program built against the header, and Python through ctypes.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Command;

use crate::support::{TestDaemon, client_library, hear, needs_host, python};

#[test]
fn the_c_example_builds_and_runs() {
    if needs_host("the example writes with the CPU") {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let Some(library) = client_library() else { return println!("SKIP: libstitchd_client.so was not built") };
    if Command::new("cc").arg("--version").output().is_err() {
        return println!("SKIP: there is no C compiler");
    }
    let daemon = TestDaemon::start(128);
    let program = daemon.path().join("hello");
    let built = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-std=c99", "-pedantic"])
        .arg("-I")
        .arg(root.join("client/include"))
        .arg(root.join("client/examples/hello.c"))
        .arg(&library)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let run = |socket: &Path| {
        Command::new(&program)
            .envs(daemon.environment())
            .env("STITCHD_SOCKET", socket)
            .env("LD_LIBRARY_PATH", library.parent().unwrap())
            .output()
            .unwrap()
    };
    let output = run(&daemon.socket());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "67108864 bytes at a multiple of 512: yes\n");
    let output = run(Path::new("/nowhere/stitchd.sock"));
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("no stitchd daemon answers at /nowhere/stitchd.sock"), "{text}");
}

#[test]
fn frees_of_what_is_not_live_change_nothing_and_are_told() {
    let daemon = TestDaemon::start(64);
    let script = "\
p = malloc(1000)
free(p, 1000)
free(p, 1000)
why = lib.stitch_last_error().decode()
assert 'is not a live allocation' in why, why
free(0x1000, 1)
free(None, 0)
assert lib.stitch_malloc(0, 0, None) is None
assert lib.stitch_malloc(MIB, 77, None) is None
assert lib.stitch_malloc(1 << 62, 0, None) is None
q = malloc(1000)
assert q == p
say('fine')
";
    let Some(mut client) = python(&daemon, script) else { return };
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "fine");
    assert!(client.wait().unwrap().success());
}

#[test]
fn the_library_says_nothing_on_its_own_and_needs_no_driver() {
    let Some(library) = client_library() else { return println!("SKIP: libstitchd_client.so was not built") };
    let script = "\
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.stitch_malloc.restype = ctypes.c_void_p
lib.stitch_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
for _ in range(1000):
    assert lib.stitch_malloc(100, 0, None) is None
";
    let output = Command::new("python3")
        .args(["-c", script])
        .arg(&library)
        .env("STITCHD_SOCKET", "/nowhere/stitchd.sock")
        .output();
    let Ok(output) = output else { return println!("SKIP: python3 cannot be started") };
    assert!(output.status.success());
    assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
