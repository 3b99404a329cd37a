//! Tests that need a process of their own: they change what a process may have, or fork it.
#![expect(unsafe_code, reason = "forks")]

use std::process::Command;

/// Names the test to a process that was started for it alone.
const VARIABLE: &str = "STITCHD_TEST_ALONE";

/// Runs `test` in a process of its own, which is this program again, told to run only the test `name`.
pub(crate) fn alone(name: &str, test: impl FnOnce()) {
    if std::env::var(VARIABLE).as_deref() == Ok(name) {
        return test();
    }
    let mut program = Command::new(std::env::current_exe().unwrap());
    let output = program.args([name, "--exact", "--nocapture"]).env(VARIABLE, name).output().unwrap();
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
