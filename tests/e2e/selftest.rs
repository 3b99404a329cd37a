//! `stitchd selftest`: drivers of this machine, and of pretended ones.

use std::sync::Arc;

use stitchd::daemon::config::{Config, Flags};
use stitchd::daemon::{Daemon, DaemonError};
use stitchd::driver::gpu::{GpuDriver, GpuKind};
use stitchd::error::ErrorKind;

use crate::standin::Machine;
use crate::support::{run_json, run_on, stderr, stitchd};

#[test]
fn selftest_shows_every_check_and_what_calls_cost() {
    let shown = run_json(&["selftest", "--driver", "host", "--costs", "--json"]);
    assert_eq!((shown["driver"].as_str(), shown["passed"].as_bool()), (Some("host"), Some(true)));
    let device = &shown["devices"][0];
    let checks = device["checks"].as_array().unwrap();
    assert_eq!(checks.len(), stitchd::driver::conformance::CHECKS.len());
    assert!(
        checks
            .iter()
            .all(|check| check["outcome"] == "passed" || check["why"] == "this driver cannot pretend a busy stream")
    );
    let costs = device["costs"].as_array().unwrap();
    assert_eq!(costs.iter().map(|cost| cost["chunk_bytes"].as_u64().unwrap() >> 20).collect::<Vec<_>>(), [2, 32, 256]);
    for call in ["create", "export", "import", "map", "set_access", "unmap", "release"] {
        assert!(costs.iter().all(|cost| cost["nanoseconds"][call].as_u64().unwrap() > 0), "{call}: {costs:?}");
    }
}

#[test]
fn a_gpu_driver_is_tested_on_the_stand_in_and_a_wrong_one_fails() {
    for (kind, name) in [(GpuKind::Cuda, "cuda"), (GpuKind::Hip, "hip")] {
        let machine = Machine::new(kind, "devices = 268435456, 134217728\n");
        let output = run_on(&machine, &["selftest", "--driver", name, "--json"]);
        let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((shown["driver"].as_str(), shown["devices"].as_array().unwrap().len()), (Some(name), 2));
        assert_eq!((shown["passed"].as_bool(), machine.chunk_files()), (Some(true), 0), "{shown}");
    }
    // A CUDA that cannot set the access of a run, as some HIP versions cannot.
    let broken = Machine::new(GpuKind::Cuda, "quirks = access_run_fails\n");
    let output = run_on(&broken, &["selftest", "--driver", "cuda"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("FAILED") && text.contains("cuMemSetAccess answers 999"), "{text}");
}

#[test]
fn a_machine_without_the_driver_or_the_device_is_told_so() {
    let machine = Machine::new(GpuKind::Cuda, "");
    let output = run_on(&machine, &["selftest", "--driver", "cuda", "--device", "7"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("there is no device 7; the cuda driver has 1"), "{}", stderr(&output));
    let mut nowhere = stitchd();
    nowhere.args(["selftest", "--driver", "hip"]).env("STITCHD_DRIVER_LIBRARY", "/nowhere.so");
    let output = nowhere.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("there is no hip driver on this machine"), "{}", stderr(&output));
}

#[test]
fn memory_that_may_hold_somebodys_bytes_is_not_served() {
    let machine = Machine::new(GpuKind::Cuda, "");
    let driver = GpuDriver::open_library(GpuKind::Cuda, machine.library()).unwrap();
    let config = Config::load(None, &Flags::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    let error = Daemon::build(config, Arc::new(driver)).err().expect("it says that it does not clear memory");
    // What would clear it is started from this very file, which is no stitchd here.
    assert!(matches!(error, DaemonError::Uncleared { device: 0, .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::Broken);
}
