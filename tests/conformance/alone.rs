//! Tests that need a process of their own: they change what a process may have, or fork it.
#![expect(unsafe_code, reason = "forks")]

use std::process::Command;

/// Runs `test` in a process of its own: this program again, told to run only the test `name`, unless that is what this process was told.
pub(crate) fn alone(name: &str, test: impl FnOnce()) {
    let told: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    if told == [name] && std::env::args().any(|word| word == "--exact") {
        return test();
    }
    let mut program = Command::new(std::env::current_exe().unwrap());
    let output = program.args([name, "--exact", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// Runs `child` in a forked child, and says what it answered.
pub(crate) fn forked(child: impl FnOnce() -> u8) -> i32 {
    // SAFETY: the child is this thread alone; it calls `child`, which takes no lock that another thread of this process (one that has nothing to do: see `alone`) may hold, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let answer = child();
        // SAFETY: it ends the child at once, without anything that the parent has registered for its end.
        unsafe { libc::_exit(i32::from(answer)) };
    }
    let pid = rustix::process::Pid::from_raw(pid).expect("a child");
    let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap().unwrap();
    status.exit_status().expect("the child ended by itself")
}
