//! The part of the C border that PyTorch's pluggable allocator calls, by C++ programs that stand for it.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::Stdio;

use crate::compiled::{Language, command, compiled, run};
use crate::support::{TestDaemon, hear, needs_host};

/// A library that stands for PyTorch's, in the daemon's directory.
fn standin_c10(daemon: &TestDaemon, flags: &[&str]) -> Option<PathBuf> {
    let words = [&["-shared", "-fPIC", "-Wl,-soname,libc10.so"], flags].concat();
    compiled(Language::Cpp, "tests/e2e/torch/standin_c10.cc", daemon.path().join("libc10.so"), &words)
}

fn raises(daemon: &TestDaemon) -> Option<PathBuf> {
    // What it catches is defined by the library that it is shown at run time, or is never there.
    let words = ["-Wl,--unresolved-symbols=ignore-all"];
    compiled(Language::Cpp, "tests/e2e/torch/raises.cc", daemon.path().join("raises"), &words)
}

#[test]
fn want_of_memory_is_raised_as_the_error_that_pytorch_has_for_it() {
    let daemon = TestDaemon::start(64);
    let Some(c10) = standin_c10(&daemon, &["-DHAS_TYPES"]) else { return };
    let output = run(&raises(&daemon).unwrap(), &daemon, &[c10.to_str().unwrap()], &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    let caught = "caught as out of memory: CUDA out of memory. stitchd: out of memory: 1000.0 MiB asked for";
    assert_eq!(said.lines().filter(|line| line.starts_with(caught)).count(), 3, "{output:?}");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn want_of_memory_is_raised_as_pytorchs_own_error() {
    let daemon = TestDaemon::start(64);
    let Some(c10) = standin_c10(&daemon, &[]) else { return };
    let program = raises(&daemon).unwrap();
    let output = run(&program, &daemon, &[c10.to_str().unwrap()], &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert!(output.status.success() && lines.len() == 7, "{output:?}");
    assert_eq!([lines[0], lines[1], lines[5]], ["NULL", "served", "served"]);
    for line in &lines[2..5] {
        assert!(line.starts_with("caught: CUDA out of memory. stitchd: out of memory: 1000.0 MiB asked for"), "{line}");
    }
    // Nothing is printed beside what the program says.
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn without_a_daemon_the_error_says_that_there_is_none() {
    let daemon = TestDaemon::start(64);
    let Some(c10) = standin_c10(&daemon, &[]) else { return };
    let program = raises(&daemon).unwrap();
    let output = run(&program, &daemon, &[c10.to_str().unwrap()], &[("STITCHD_SOCKET", "/nowhere/stitchd.sock")]);
    let said = String::from_utf8_lossy(&output.stdout);
    let caught = "caught: CUDA memory cannot be had. stitchd: no stitchd daemon answers at /nowhere/stitchd.sock";
    assert_eq!(said.lines().filter(|line| line.starts_with(caught)).count(), 5, "{output:?}");
}

#[test]
fn without_pytorch_there_is_null_and_the_last_error() {
    let daemon = TestDaemon::start(64);
    let Some(program) = raises(&daemon) else { return };
    let output = run(&program, &daemon, &[], &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines[..6], ["NULL", "served", "NULL", "NULL", "NULL", "served"]);
    assert!(lines[6].starts_with("last error: out of memory: 1000.0 MiB asked for"), "{}", lines[6]);
}

#[test]
fn the_hooks_of_pytorch_do_what_they_are_for() {
    if needs_host("the program writes with the CPU") {
        return;
    }
    let daemon = TestDaemon::start(64);
    let target = daemon.path().join("hooks");
    let Some(program) = compiled(Language::Cpp, "tests/e2e/torch/hooks.cc", target, &[]) else { return };
    let mut client = command(&program, &daemon).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(hear(&mut lines), "caught: no such stream");
    assert_eq!(hear(&mut lines), "reset");
    // What was released, and what was idle, is the daemon's again. One allocation in the graph's pool is still live, by plain C.
    daemon.wait_for_device("leased_bytes", 8 << 20);
    drop(client.stdin.take());
    assert_eq!(hear(&mut lines), "fine");
    assert!(client.wait().unwrap().success());
}
