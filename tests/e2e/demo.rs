//! The demo, whole.

use std::process::Stdio;

use rustix::process::{Pid, Signal};

use crate::standin::Machine;
use crate::support::{driver_name, eventually, run, run_on, stderr, stitchd, vendor};

#[test]
fn the_demo_checks_every_byte_and_gets_all_of_them_back() {
    let (driver, machine) = (driver_name(), vendor().map(|kind| Machine::new(kind, "devices = 137438953472")));
    let args = ["demo", "--repeat", "8", "--json", "--driver", driver];
    let output = machine.as_ref().map_or_else(|| run(&args), |machine| run_on(machine, &args));
    assert!(output.status.success(), "{}", stderr(&output));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let processes = result["processes"].as_array().unwrap();
    assert!(processes.len() >= 4);
    assert_eq!(processes.iter().filter(|process| process["killed"] == true).count(), 1);
    assert_eq!(result["lost_bytes"], 0);
    assert!(result["bytes_returned_after_kill"].as_u64().unwrap() > 1 << 30);
    assert!(result["peak_leased_bytes"].as_u64() <= result["device_budget_bytes"].as_u64());
    assert!(result["resident_bytes"].as_u64().unwrap() < 4 << 30);
    for process in processes.iter().filter(|process| process["killed"] == false) {
        // Two and more of an allocation; on a GPU one of 32 is looked at.
        let (checked, all) = (&process["patterns_checked"], &process["allocations"]);
        let [checked, all] = [checked, all].map(|count| count.as_u64().unwrap());
        assert!(checked * if machine.is_some() { 32 } else { 1 } > all, "{process}");
        assert!(process["served"]["planned"].as_u64().unwrap() > 0, "{process}");
        assert!(process["peak_live_bytes"].as_u64().unwrap() > 10 << 30, "{process}");
        // A job settles: its last iterations make no driver call.
        let calls = process["driver_calls_by_iteration"].as_array().unwrap();
        assert!(calls.len() > 8 && calls[calls.len() - 4..].iter().all(|calls| *calls == 0), "{process}");
    }
}

/// Processes whose arguments name this directory.
fn processes_in(directory: &std::path::Path) -> usize {
    let directory = directory.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    // Who ends meanwhile has no arguments.
    let names_it = |process: &std::fs::DirEntry| {
        std::fs::read(process.path().join("cmdline"))
            .is_ok_and(|arguments| String::from_utf8_lossy(&arguments).contains(directory))
    };
    processes.filter(names_it).count()
}

#[test]
fn a_demo_that_is_ended_or_killed_leaves_no_process_behind() {
    for signal in [Signal::TERM, Signal::KILL] {
        let scratch = tempfile::tempdir().unwrap();
        let mut demo = stitchd()
            // Work for hours.
            .args(["demo", "--json", "--repeat", "20000"])
            .env("TMPDIR", scratch.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually("the daemon and three trainers are there", || (processes_in(scratch.path()) >= 4).then_some(()));
        rustix::process::kill_process(Pid::from_child(&demo), signal).unwrap();
        demo.wait().unwrap();
        eventually("every process has ended", || (processes_in(scratch.path()) == 0).then_some(()));
        let left = std::fs::read_dir(scratch.path()).unwrap().count();
        assert!(left == 0 || signal == Signal::KILL, "{left} directories are left");
    }
}

#[test]
fn a_demo_on_a_driver_that_is_not_there_or_not_shared_is_refused_before_it_begins() {
    let output = run(&["demo", "--driver", "sim"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot share the memory of the sim driver"), "{}", stderr(&output));
    let output = stitchd().args(["demo", "--driver", "hip"]).env("STITCHD_DRIVER_LIBRARY", "/nowhere.so").output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("there is no hip driver on this machine"), "{}", stderr(&output));
}
