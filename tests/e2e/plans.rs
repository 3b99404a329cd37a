//! Plans: made from real traces, stored, reserved, served.

use std::path::{Path, PathBuf};

use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::units::Bytes;

use crate::support::{TestDaemon, run, run_json, stderr};

const MIB: u64 = 1 << 20;

fn trace(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(format!("{name}.csv.zst"))
}

/// A job of two iterations, 24 MiB at most.
pub(crate) fn small_trace(dir: &Path) -> PathBuf {
    let mut text = String::from("tick,event,id,bytes,stream,iteration,phase\n");
    let mut tick = 0;
    let mut row = |line: String| {
        tick += 1;
        text.push_str(&format!("{tick},{line}\n"));
    };
    row("alloc,1,4194304,0,0,init".into());
    for iteration in 0..2 {
        let id = 10 * (iteration + 1);
        row(format!("alloc,{id},10485760,0,{iteration},forward"));
        row(format!("alloc,{},10485760,0,{iteration},forward", id + 1));
        row(format!("free,{id},,0,{iteration},backward"));
        row(format!("alloc,{},8388608,0,{iteration},backward", id + 2));
        row(format!("free,{},,0,{iteration},backward", id + 1));
        row(format!("free,{},,0,{iteration},backward", id + 2));
    }
    let path = dir.join("small.csv");
    std::fs::write(&path, text).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn every_shipped_trace_gets_a_plan_that_is_right_and_within_a_millionth_of_the_bound() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["gpt2-345m-VR", "gpt2-medium-hf", "opt-13b-Z3-RO", "qwen-moe-V-last", "resnet50-olla"] {
        let (trace, plan) = (trace(name), dir.path().join("job.plan"));
        let made = run_json(&["plan", text(&trace), "-o", text(&plan), "--json"]);
        let (peak, bound) = (made["peak_bytes"].as_u64().unwrap(), made["lower_bound_bytes"].as_u64().unwrap());
        assert!(bound <= peak && peak - bound <= bound / 1_000_000, "{name}: {made}");
        assert_eq!(made["proven_optimal"], peak == bound, "{name}: {made}");
        let checked = run_json(&["plan", "check", text(&plan), text(&trace), "--json"]);
        assert_eq!(checked["valid"], true, "{name}");
        let shown = run_json(&["plan", "show", text(&plan), "--json"]);
        assert_eq!(shown["entries"].as_array().unwrap().len() as u64, made["buffers"].as_u64().unwrap());
    }
}

#[test]
fn a_reserved_pool_waits_for_its_job_and_serves_it_from_the_plan() {
    let daemon = TestDaemon::start(64);
    let trace = small_trace(daemon.path());
    let plan_file = daemon.path().join("small.plan");
    run_json(&["plan", text(&trace), "-o", text(&plan_file), "--json"]);
    let reserved = daemon.cli_json(&["reserve", "--plan", text(&plan_file)]);
    assert_eq!((reserved["reserved_bytes"].as_u64(), reserved["chunks"].as_u64()), (Some(24 * MIB), Some(12)));
    assert_eq!(daemon.device("reserved_bytes"), 24 * MIB);
    // Nobody else gets it.
    let other = daemon.runtime("other");
    other.alloc(&Request::of(Bytes::mib(42))).unwrap_err();
    other.alloc(&Request::of(Bytes::mib(40))).unwrap();

    let session = daemon.session("job");
    let plans = daemon.cli_json(&["plans"]);
    let id = stitchd::ids::PlanId::from_hex(plans["plans"][0]["plan"].as_str().unwrap()).unwrap();
    let plan = session.plan(id).unwrap();
    let runtime = session.runtime(0, RuntimeConfig::default()).unwrap();
    runtime.install_plan(&plan).unwrap();
    assert_eq!((daemon.device("reserved_bytes"), daemon.device("leased_bytes")), (0, 64 * MIB));
    runtime.alloc(&Request::of(Bytes::mib(4))).unwrap();
    for _ in 0..5 {
        let [a, b] = [10, 10].map(|mib| runtime.alloc(&Request::of(Bytes::mib(mib))).unwrap());
        runtime.free(a, stitchd::ids::StreamId::DEFAULT).unwrap();
        let c = runtime.alloc(&Request::of(Bytes::mib(8))).unwrap();
        runtime.free(b, stitchd::ids::StreamId::DEFAULT).unwrap();
        runtime.free(c, stitchd::ids::StreamId::DEFAULT).unwrap();
        runtime.mark_iteration();
    }
    let stats = runtime.stats();
    assert_eq!((stats.served.planned, stats.planned.deviations()), (16, 0));
}

#[test]
fn plans_are_listed_deleted_and_there_again_after_a_restart() {
    let daemon = TestDaemon::start(64);
    let trace = small_trace(daemon.path());
    let plan_file = daemon.path().join("small.plan");
    run_json(&["plan", text(&trace), "-o", text(&plan_file), "--json"]);
    daemon.cli_json(&["reserve", "--plan", text(&plan_file)]);
    let again = daemon.cli_json(&["reserve", "--plan", text(&plan_file), "--release"]);
    assert_eq!(again["reserved_bytes"], 0);
    assert_eq!(daemon.cli(&["reserve", "--plan", text(&plan_file), "--release"]).status.code(), Some(2));
    daemon.cli_json(&["reserve", "--plan", text(&plan_file)]);
    let listed = daemon.cli_json(&["plans"]);
    assert_eq!(
        (listed["plans"][0]["name"].as_str(), listed["plans"][0]["reserved_bytes"].as_u64()),
        (Some("small"), Some(24 * MIB))
    );

    let mut daemon = TestDaemon::in_dir(daemon.kill(), &["--device=0=64MiB"]);
    let listed = daemon.cli_json(&["plans"]);
    assert_eq!(
        (listed["plans"][0]["name"].as_str(), listed["plans"][0]["reserved_bytes"].as_u64()),
        (Some("small"), Some(0))
    );
    let id = listed["plans"][0]["plan"].as_str().unwrap().to_owned();
    daemon.cli_json(&["plans", "delete", &id]);
    assert_eq!(daemon.cli_json(&["plans"])["plans"].as_array().unwrap().len(), 0);
    assert_eq!(daemon.cli(&["plans", "delete", &id]).status.code(), Some(2));
    daemon.terminate();
}

#[test]
fn a_stored_file_that_is_no_plan_is_left_alone_and_said() {
    let dir = tempfile::tempdir().unwrap();
    let plans = dir.path().join("plans");
    std::fs::create_dir(&plans).unwrap();
    std::fs::write(plans.join("0123456789abcdef.plan"), "STPLAN, not really").unwrap();
    let mut daemon = TestDaemon::in_dir(dir, &["--device=0=64MiB"]);
    daemon.expect_complaint("no plan; left alone");
    assert_eq!(daemon.cli_json(&["plans"])["plans"].as_array().unwrap().len(), 0);
    assert!(daemon.path().join("plans/0123456789abcdef.plan").exists());
}

#[test]
fn a_broken_plan_and_one_for_another_job_are_refused_with_what_is_wrong() {
    let daemon = TestDaemon::start(64);
    let dir = daemon.path();
    let trace_file = small_trace(dir);
    let plan_file = dir.join("small.plan");
    run_json(&["plan", text(&trace_file), "-o", text(&plan_file), "--json"]);
    let other = run(&["plan", "check", text(&plan_file), text(&trace("resnet50-olla"))]);
    assert_eq!(other.status.code(), Some(1));
    let said = String::from_utf8_lossy(&other.stdout);
    assert!(said.contains("the plan has 7 requests"), "{said}");

    let mut bytes = std::fs::read(&plan_file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&plan_file, &bytes).unwrap();
    let broken = run(&["plan", "show", text(&plan_file)]);
    assert_eq!(broken.status.code(), Some(2));
    assert!(stderr(&broken).contains("the file is damaged"), "{}", stderr(&broken));
    let checked = run(&["plan", "check", text(&plan_file), text(&trace_file)]);
    assert_eq!(checked.status.code(), Some(1));
    assert_eq!(daemon.cli(&["reserve", "--plan", text(&plan_file)]).status.code(), Some(2));
}

#[test]
fn a_pool_that_does_not_fit_is_refused_with_numbers() {
    let daemon = TestDaemon::start(16);
    let trace = small_trace(daemon.path());
    let plan_file = daemon.path().join("small.plan");
    run_json(&["plan", text(&trace), "-o", text(&plan_file), "--json"]);
    let refused = daemon.cli(&["reserve", "--plan", text(&plan_file)]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("24.0 MiB asked for") && stderr(&refused).contains("16.0 MiB"),
        "{}",
        stderr(&refused)
    );
}
