//! The script for machines with GPUs (tests/gpu/run), on a machine that only pretends: what it says there it would say of a real one.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use stitchd::driver::gpu::GpuKind;

use crate::standin::Machine;
use crate::support::{client_library_for, stderr};

/// Runs the script with these words; none where it cannot be run here.
fn script(library: &Path, words: &[&str]) -> Option<Output> {
    let client = client_library_for(true).or_else(|| {
        println!("SKIP: no libstitchd_client.so with test hooks was built; build the whole workspace with its tests");
        None
    })?;
    let ran = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/run"))
        .arg("--bin")
        .arg(Path::new(env!("CARGO_BIN_EXE_stitchd")).parent().unwrap())
        .arg("--client")
        .arg(client)
        .args(words)
        .env("STITCHD_DRIVER_LIBRARY", library)
        .output();
    ran.map_err(|error| println!("SKIP: python3 cannot be started: {error}")).ok()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_script_for_gpus_finds_nothing_wrong_with_a_pretended_machine() {
    for (kind, driver, skip) in [(GpuKind::Cuda, "cuda", "demo"), (GpuKind::Hip, "hip", "selftest")] {
        let machine = Machine::new(kind, "devices = 268435456\ncontext_bytes = 10485760\ndirty = 1");
        let json = machine.library().with_file_name("report.json");
        let words = ["--driver", driver, "--json", json.to_str().unwrap(), "--bytes", "64MiB", "--skip", skip];
        let Some(output) = script(machine.library(), &words) else { return };
        assert!(output.status.success(), "{}\n{}", stdout(&output), stderr(&output));
        let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let steps = report["steps"].as_array().unwrap();
        let step = |name: &str| steps.iter().find(|step| step["step"] == name).unwrap_or_else(|| panic!("{name}"));
        for name in ["serve", "lease", "bytes", "two_processes", "killed", "killed_with_child", "end"] {
            assert_eq!(step(name)["outcome"], "ok", "{}", step(name));
        }
        assert_eq!(step("selftest")["outcome"], if skip == "selftest" { "SKIP" } else { "ok" });
        for name in ["peers", "torch", "all_reduce", "demo"] {
            assert_eq!(step(name)["outcome"], "SKIP", "{}", step(name));
        }
        assert_eq!(step("lease")["figures"]["lease_bytes"], 64 << 20);
        // A mark at both sides of each border, and the first and the last bytes.
        assert_eq!(step("bytes")["figures"]["marks"], 33);
        assert!(step("killed")["figures"]["returned_ms"].is_number());
    }
}

#[test]
fn the_script_for_gpus_says_what_fails_and_skips_a_machine_without_one() {
    // A driver that cannot set the access of a run: there is no use in going on.
    let broken = Machine::new(GpuKind::Cuda, "devices = 268435456\nquirks = access_run_fails");
    let Some(output) = script(broken.library(), &["--skip", "selftest"]) else { return };
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}\n{}", stderr(&output));
    assert!(text.contains("cuMemSetAccess answers 999"), "{text}");
    // A client library that is none: the steps that need it fail, and the others are done.
    let machine = Machine::new(GpuKind::Cuda, "devices = 268435456");
    let library = machine.library().to_str().unwrap();
    let output = script(machine.library(), &["--skip", "lunch"]).unwrap();
    assert!(output.status.code() == Some(1) && stdout(&output).contains("no step lunch"), "{}", stdout(&output));
    let output = script(machine.library(), &["--skip", "selftest", "--client", library]).unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("FAIL lease:") && text.contains("ok   end:") && text.contains("5 failed"), "{text}");
    let output = script(Path::new("/nowhere.so"), &[]).unwrap();
    let text = stdout(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(0), 1), "{text}");
    assert!(text.starts_with("SKIP: there is no cuda driver on this machine"), "{text}");
}
