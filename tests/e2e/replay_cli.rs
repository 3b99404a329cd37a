//! `stitchd replay`: the figures that checks read, the answers to bad questions, and the picture.

mod pools;
#[path = "../../src/trace/import/written.rs"]
mod written;

use std::fmt::Write as _;
use std::path::Path;

use crate::support::{run, run_json, stderr};
use written::{annotation, entry, pickle, segment, snapshot};

fn real(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(format!("{name}.csv.zst"));
    path.to_str().unwrap().to_owned()
}

fn pool<'a>(shown: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    shown["pools"].as_array().unwrap().iter().find(|pool| pool["name"] == name).unwrap()
}

#[test]
fn every_pool_is_replayed_and_the_plan_is_judged_by_what_it_was_not_made_from() {
    let pools = "native,caching,expandable,gmlake,stalloc,stitchd";
    let planned = ["--plan-from-iteration", "1", "--pool", pools, "--json"];
    let shown = run_json(&[&["replay", &real("resnet50-olla")], &planned[..]].concat());
    assert_eq!(shown["trace"]["requests"], 2165);
    assert_eq!(shown["trace"]["iterations"], 3);
    assert_eq!(shown["trace"]["peak_live_bytes"], 22_417_856_144_u64);
    for name in ["native", "caching", "expandable", "gmlake", "stalloc", "stitchd"] {
        let pool = pool(&shown, name);
        let (live, reserved) =
            (pool["peak_live_bytes"].as_u64().unwrap(), pool["peak_reserved_bytes"].as_u64().unwrap());
        assert!(live <= reserved && pool["out_of_memory"].is_null(), "{pool}");
        let efficiency = pool["efficiency"].as_f64().unwrap();
        assert!((efficiency - live as f64 / reserved as f64).abs() < 1e-9, "{pool}");
        assert!(pool["efficiency_after_plan"].as_f64().unwrap() >= efficiency - 1e-9, "{pool}");
        assert!(pool["ns_per_operation"].is_null() && pool["driver_calls"]["create"].is_u64(), "{pool}");
    }
    assert_eq!(pool(&shown, "caching")["peak_reserved_bytes"], 26_724_007_936_u64);
    assert_eq!(pool(&shown, "caching")["driver_calls"]["malloc"], 137);
    let ours = pool(&shown, "stitchd");
    assert!(ours["efficiency"].as_f64().unwrap() > 0.99, "{ours}");
    assert_eq!(ours["served_bytes"]["pool"], 0, "all is planned: {ours}");
    assert_eq!(ours["steady_driver_calls_per_iteration"], 0);
    assert!(ours["lease_rpcs"].as_u64().unwrap() >= 1 && ours["deviations"] == 0, "{ours}");
    assert!(shown["verdict"].as_str().unwrap().starts_with("fits in "), "{}", shown["verdict"]);
}

#[test]
fn a_capacity_that_is_too_small_is_the_answer_no_with_the_place() {
    let output = run(&["replay", &real("gpt2-medium-hf"), "--pool", "caching", "--capacity", "29301407744", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let half = pool(&shown, "caching");
    assert!(half["efficiency"].is_null() && half["steady_driver_calls_per_iteration"].is_null(), "{half}");
    let refused = &half["out_of_memory"];
    assert_eq!(refused["served_requests"], 2_868);
    assert!(refused["tick"].as_u64().unwrap() > 0 && refused["requested_bytes"].as_u64().unwrap() > 0, "{refused}");
    let output = run(&["replay", &real("gpt2-medium-hf"), "--pool", "caching", "--capacity", "29301407744"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("caching: out of memory at tick "), "{text}");
}

#[test]
fn the_least_capacity_is_enough_and_a_step_less_is_not() {
    let file = real("resnet50-olla");
    let shown = run_json(&["replay", &file, "--pool", "caching,expandable", "--min-capacity", "--json"]);
    for name in ["caching", "expandable"] {
        let least = pool(&shown, name)["min_capacity_bytes"].as_u64().unwrap();
        for (capacity, code) in [(least, 0), (least + 16 * (1 << 20), 0), (least - (2 << 20), 1)] {
            let output = run(&["replay", &file, "--pool", name, "--capacity", &capacity.to_string()]);
            assert_eq!(output.status.code(), Some(code), "{name} in {capacity}");
        }
    }
}

#[test]
fn a_setting_is_swept_and_wrong_ones_are_named() {
    let file = real("resnet50-olla");
    let swept = run_json(&["replay", &file, "--pool", "gmlake", "--sweep", "gmlake.frag_limit=2MiB,512MiB", "--json"]);
    let reserved: Vec<u64> = swept["sweep"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["pools"][0]["peak_reserved_bytes"].as_u64().unwrap())
        .collect();
    assert!(reserved.len() == 2 && reserved[0] < reserved[1], "stitching small blocks saves memory: {reserved:?}");
    let set = run_json(&["replay", &file, "--pool", "gmlake", "--set", "gmlake.frag_limit=2MiB", "--json"]);
    assert_eq!(pool(&set, "gmlake")["peak_reserved_bytes"], reserved[0]);
    // Keys of the pools before: read for one version.
    let by = |setting: &str| run_json(&["replay", &file, "--pool", "stitchd", "--set", setting, "--json"]);
    let [old, new, gone] =
        ["stitchd.fragmentation_limit=64MiB", "stitchd.stitch_min=64MiB", "stitchd.packed_below=8MiB"].map(by);
    assert_eq!(pool(&old, "stitchd")["driver_calls"], pool(&new, "stitchd")["driver_calls"]);
    assert!(old["notes"].to_string().contains("is called stitchd.stitch_min now"), "{old}");
    assert!(gone["notes"].to_string().contains("stitchd.packed_below changes nothing"), "{gone}");
    for (arguments, expected) in [
        (&["--pool", "jemalloc"][..], "there is no pool 'jemalloc'; there are native"),
        (&["--set", "capacity"], "--set takes KEY=VALUE, not 'capacity'"),
        (&["--set", "stitchd.granule=red"], "stitchd.granule=red: "),
        (&["--set", "stitchd.packed_below=red"], "stitchd.packed_below=red: "),
        (&["--sweep", "colour=red"], "there is no setting 'colour'"),
        (&["--sweep", "capacity"], "--sweep takes KEY=A,B,C"),
        (&["--costs", "b300"], "there is no cost table 'b300'; there are a100"),
        (&["--conf", "colour:red"], "--conf: PyTorch 2.15 has no option \"colour\""),
        (&["--disable", "magic"], "--disable takes plan, reuse and stitch, not 'magic'"),
        (&["--device", "3"], "nothing is allocated on device 3"),
        (&["--plan-from-iteration", "9"], "there is no iteration 9"),
    ] {
        let output = run(&[&["replay", file.as_str()], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn a_disturbed_job_is_served_and_what_is_not_planned_is_counted() {
    let arguments = ["--repeat", "2", "--perturb", "5", "--plan-from-iteration", "1", "--pool", "stitchd,stalloc"];
    let shown = run_json(&[&["replay", &real("resnet50-olla"), "--json"], &arguments[..]].concat());
    assert_eq!(shown["trace"]["iterations"], 5);
    let ours = pool(&shown, "stitchd");
    assert!(ours["deviations"].as_u64().unwrap() > 0 && ours["overlapped_bytes"] == 0, "{ours}");
    // What makes the difference: an unguarded plan hands out bytes that are live.
    assert!(pool(&shown, "stalloc")["overlapped_bytes"].as_u64().unwrap() > 0, "{shown}");
}

/// A snapshot of a job of three steps. It rounded 300 MiB up to 320, as its settings say.
fn recorded_job() -> Vec<u8> {
    const BASE: u64 = 0x7f00_0000_0000;
    const ASKED: i64 = 300 << 20;
    const TAKEN: i64 = 320 << 20;
    let mut entries = vec![entry("segment_alloc", BASE, TAKEN, 0, 0)];
    for step in 0..3 {
        let time = step * 10;
        let kinds = [("alloc", 1), ("free_requested", 2), ("free_completed", 3)];
        entries.extend(kinds.map(|(kind, later)| entry(kind, BASE, ASKED, 0, time + later)));
    }
    let steps = (0..3).map(|step| annotation(&format!("ProfilerStep#{step}"), "START", step * 10)).collect();
    pickle(&snapshot(vec![segment(0, BASE, 0, 0, &[(TAKEN, 0, "inactive")])], vec![entries], steps), 4)
}

#[test]
fn a_recorded_job_is_replayed_as_it_was_set_and_held_against_what_it_reserved() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("job.pickle");
    std::fs::write(&file, recorded_job()).unwrap();
    let page = dir.path().join("report.html");
    let file = file.to_str().unwrap();
    let shown = run_json(&["replay", file, "--pool", "caching", "--report", page.to_str().unwrap(), "--json"]);
    assert_eq!(shown["trace"]["iterations"], 3);
    let notes = shown["notes"].to_string();
    for said in [
        "had expandable segments",
        "roundup_power2_divisions:[1:0,2:0,256:4]",
        "garbage_collection_threshold:0.8",
        "garbage_collection_threshold does nothing without a limit",
        // In what the environment said alone.
        "large_segment_size_mb:40",
        "a setting of the recorded job is not followed: PyTorch 2.15 has no option",
    ] {
        assert!(notes.contains(said), "{said} is not in {notes}");
    }
    assert_eq!(shown["recorded"]["peak_reserved_bytes"], 320 << 20);
    assert_eq!(pool(&shown, "caching")["peak_reserved_bytes"], 320 << 20);
    assert!(std::fs::read_to_string(&page).unwrap().contains("<th scope=\"col\">recorded</th>"));
    let output = run(&["replay", file, "--pool", "caching"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("(recorded)"), "{text}");

    let otherwise = run_json(&["replay", file, "--pool", "caching", "--conf", "", "--json"]);
    assert_eq!(pool(&otherwise, "caching")["peak_reserved_bytes"], 300 << 20);
    // What was repeated or disturbed is not what was recorded.
    let repeated = run_json(&["replay", file, "--pool", "caching", "--repeat", "2", "--json"]);
    assert!(repeated["recorded"].is_null() && repeated["trace"]["iterations"] == 5, "{repeated}");
}

#[test]
fn iterations_that_nobody_numbered_are_numbered_for_replays_and_plans() {
    let mut marked = "tick,event,id,bytes\n".to_owned();
    for step in 0..3 {
        let (tick, id) = (step * 10, step * 2);
        for line in [
            format!("{tick},alloc,{id},1048576"),
            format!("{},alloc,{},4194304", tick + 1, id + 1),
            format!("{},free,{id},", tick + 2),
            format!("{},free,{},", tick + 3, id + 1),
            format!("{},mark,,", tick + 4),
        ] {
            writeln!(marked, "{line}").unwrap();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("marked.csv");
    std::fs::write(&file, marked).unwrap();
    let file = file.to_str().unwrap();
    let said = "3 iterations, numbered by the marks between them";
    let shown = run_json(&["replay", file, "--plan-from-iteration", "1", "--pool", "stitchd", "--json"]);
    assert_eq!((&shown["trace"]["iterations"], &shown["notes"][0]), (&3.into(), &said.into()), "{shown}");
    let plan = dir.path().join("marked.plan");
    let plan = plan.to_str().unwrap();
    let made = run_json(&["plan", file, "-o", plan, "--json"]);
    assert_eq!((&made["notes"][0], &made["static_requests"]), (&said.into(), &4.into()), "{made}");
    assert_eq!(run(&["plan", "check", plan, file]).status.code(), Some(0));
    let served = run_json(&["replay", file, "--plan", plan, "--pool", "stitchd", "--json"]);
    let ours = pool(&served, "stitchd");
    assert_eq!((&ours["deviations"], &ours["served_bytes"]["pool"]), (&0.into(), &0.into()), "{ours}");
}

/// A trace of two jobs on two devices at once. Each repeats itself, on the second with one request more between; of each device 12 MiB are live at the most.
fn two_devices() -> String {
    let mut text = "tick,event,id,bytes,device\n".to_owned();
    let mut tick = 0;
    for step in 0..8 {
        for device in [1, 0] {
            for (event, id, bytes) in
                [("alloc", 0, "4194304"), ("alloc", 1, "8388608"), ("free", 0, ""), ("free", 1, "")]
            {
                tick += 1;
                writeln!(text, "{tick},{event},{},{bytes},{device}", step * 4 + device * 2 + id).unwrap();
            }
        }
    }
    text
}

#[test]
fn a_job_of_several_devices_is_looked_at_device_by_device() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("two.csv");
    std::fs::write(&file, two_devices()).unwrap();
    let file = file.to_str().unwrap();
    let note = "32 events of other devices than 1 left out; --device chooses another";
    let shown = run_json(&["replay", file, "--pool", "stalloc,stitchd", "--plan-from-iteration", "0", "--json"]);
    assert_eq!(shown["trace"]["requests"], 16);
    assert!(shown["notes"].to_string().contains(note), "{}", shown["notes"]);
    for name in ["stalloc", "stitchd"] {
        assert!(pool(&shown, name)["peak_reserved_bytes"].as_u64().unwrap() <= 128 << 20, "{shown}");
    }
    let made = run_json(&["plan", file, "--device", "0", "--from-iteration", "0", "--json"]);
    assert_eq!((&made["static_requests"], &made["peak_bytes"]), (&16.into(), &(12 << 20).into()), "{made}");
    let output = run(&["plan", file, "--device", "7"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("nothing is allocated on device 7"), "{}", stderr(&output));
}

#[test]
fn a_pool_that_cannot_have_a_job_is_left_out_and_the_others_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("varies.csv");
    std::fs::write(&file, "tick,event,id,bytes,dynamic\n1,alloc,1,5120,1\n2,alloc,2,2560,1\n3,free,1,,\n4,free,2,,\n")
        .unwrap();
    let shown = run_json(&["replay", file.to_str().unwrap(), "--pool", "all", "--json"]);
    let names: Vec<&str> =
        shown["pools"].as_array().unwrap().iter().map(|pool| pool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["native", "caching", "expandable", "gmlake", "stitchd", "stitchd-auto"]);
    assert!(shown["notes"].to_string().contains("stalloc is left out, it has no plan: "), "{}", shown["notes"]);
    assert_eq!(run(&["replay", file.to_str().unwrap(), "--pool", "stalloc"]).status.code(), Some(2));
}

#[test]
fn what_cannot_be_done_is_refused_and_no_file_is_written_over_its_own_input() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("job.csv");
    std::fs::write(&file, two_devices()).unwrap();
    let file = file.to_str().unwrap();
    for (arguments, expected) in [
        (&["replay", file, "--report", file][..], "is the file that is read"),
        (&["plan", file, "-o", file], "is the file that is read"),
        (&["replay", file, "--repeat", "4000000000"], "--repeat 4000000000 makes "),
        (&["replay", file, "--plan-from-iteration", "0", "--perturb", "1"], "--repeat adds some"),
        (&["replay", file, "--min-capacity", "--capacity", "1GiB"], "cannot be used with"),
        (&["replay", file, "--set", "stitchd.granule=3MiB"], "chunk size 3.0 MiB is not a power of two"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
    assert_eq!(std::fs::read_to_string(file).unwrap(), two_devices());
    let never = ["--conf", "per_process_memory_fraction:0", "--pool", "caching", "--min-capacity", "--json"];
    let shown = run_json(&[&["replay", file], &never[..]].concat());
    assert!(pool(&shown, "caching")["min_capacity_bytes"].is_null(), "{shown}");
}

#[test]
fn a_sweep_says_where_memory_runs_out_and_what_each_value_needs() {
    let sweep = ["replay", &real("resnet50-olla"), "--pool", "caching", "--sweep", "capacity=1GiB,64GiB"];
    let output = run(&sweep);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("1GiB") && text.contains("out of memory") && text.contains("modelled"), "{text}");
    let least = ["replay", &real("resnet50-olla"), "--pool", "caching", "--sweep", "caching.max_split_size_mb=64,512"];
    let output = run(&[&least[..], &["--min-capacity"]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("needs"), "{text}");
    let help = run(&["replay", "any", "--sweep", "help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("gmlake.frag_limit"));
}

#[test]
fn a_plan_of_another_job_is_said_to_be_that_and_time_and_seconds_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("other.plan");
    let plan = plan.to_str().unwrap();
    assert!(run(&["plan", &real("gpt2-medium-hf"), "-o", plan]).status.success());
    let shown =
        run_json(&["replay", &real("resnet50-olla"), "--plan", plan, "--pool", "stitchd,native", "--timing", "--json"]);
    assert!(shown["floor_ns_per_operation"].as_f64().unwrap() > 0.0, "{shown}");
    assert!(shown["notes"].to_string().contains("the plan was not made for this job: "), "{}", shown["notes"]);
    for name in ["stitchd", "native"] {
        let pool = pool(&shown, name);
        assert!(pool["ns_per_operation"].as_f64().unwrap() > 0.0, "{pool}");
        assert!(pool["modelled_driver_seconds"].as_f64().unwrap() > 0.0, "{pool}");
    }
}

#[test]
fn the_picture_is_one_file_that_names_every_pool() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("report.html");
    let output = run(&["replay", &real("resnet50-olla"), "--pool", "all", "--report", out.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = std::fs::read_to_string(&out).unwrap();
    let names = ["native", "caching", "expandable", "gmlake", "stalloc", "stitchd", "stitchd-auto", "stitchd-plan"];
    for name in names {
        assert!(page.contains(&format!("<th scope=\"col\">{name}</th>")), "{name}");
    }
    assert!(!page.contains("http://") && !page.contains("https://"), "it needs no network");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    let output = run(&["replay", &real("resnet50-olla"), "--pool", "native", "--report", "/nowhere/report.html"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[test]
fn what_is_asked_for_and_changes_nothing_is_said_to_do_that() {
    let file = &real("resnet50-olla");
    for (arguments, expected) in [
        (&["--pool", "caching", "--disable", "stitch"][..], "--disable changes nothing in a replay without stitchd"),
        (
            &["--pool", "caching", "--set", "stitchd.granule=32MiB"],
            "a setting stitchd.… changes nothing in a replay without stitchd",
        ),
        (
            &["--pool", "caching", "--sweep", "gmlake.frag_limit=2MiB"],
            "a setting gmlake.… changes nothing in a replay without gmlake",
        ),
        (
            &["--pool", "native", "--conf", "max_split_size_mb:128"],
            "--conf changes nothing in a replay without caching or expandable",
        ),
        (&["--pool", "native", "--set", "caching.max_split_size_mb=128"], "a setting caching.… changes nothing"),
        (&["--pool", "caching", "--set", "caching.expandable_segments=True"], "--pool chooses"),
        (&["--pool", "caching", "--conf", "garbage_collection_threshold:0.8"], "does nothing without a limit"),
        (&["--pool", "stalloc,stitchd", "--disable", "plan"], "stitchd has none"),
        (&["--pool", "caching", "--sweep", "caching.garbage_collection_threshold=0.5,0.8"], "does nothing without"),
    ] {
        let shown = run_json(&[&["replay", file, "--json"], arguments].concat());
        let notes = shown["notes"].to_string();
        assert!(notes.contains(expected), "{arguments:?}: {notes}");
        assert!(!notes.contains("(--plan-from-iteration gives it one)"), "{arguments:?}: {notes}");
    }
    // A share of the device means something where its size is tried.
    for arguments in [["--sweep", "capacity=24GiB"], ["--min-capacity", "--pool=caching"]] {
        let conf = ["replay", file, "--pool", "caching", "--conf", "per_process_memory_fraction:0.9", "--json"];
        let notes = run(&[&conf[..], &arguments].concat()).stdout;
        assert!(!String::from_utf8_lossy(&notes).contains("mean nothing"), "{arguments:?}");
    }
    for twice in [
        &["--capacity", "1GiB", "--set", "capacity=2GiB"][..],
        &["--min-capacity", "--sweep", "capacity=1GiB,2GiB"],
        &["--set", "capacity=1GiB", "--sweep", "capacity=1GiB"],
    ] {
        let output = run(&[&["replay", file], twice].concat());
        assert_eq!(output.status.code(), Some(2), "{twice:?}");
        assert!(stderr(&output).contains("only one of --capacity"), "{twice:?}: {}", stderr(&output));
    }
    assert_eq!(run_json(&["replay", file, "--pool", "native,native", "--json"])["pools"].as_array().unwrap().len(), 1);
}

#[test]
fn a_pool_that_runs_out_says_of_what() {
    let output = run(&["replay", &real("resnet50-olla"), "--pool", "stitchd", "--capacity", "1GiB"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with("stitchd: out of memory at tick ")).unwrap();
    assert!(line.contains(" requests: ") && line.contains("asked for on device 0, "), "{line}");
}

#[test]
fn a_plan_of_one_iteration_is_said_to_be_for_the_next_one_too() {
    let dir = tempfile::tempdir().unwrap();
    let (file, plan) = (dir.path().join("once.csv"), dir.path().join("once.plan"));
    let rows = "tick,event,id,bytes\n1,alloc,1,4194304\n2,free,1,\n3,alloc,2,4194304\n";
    std::fs::write(&file, rows).unwrap();
    let (file, plan) = (file.to_str().unwrap(), plan.to_str().unwrap());
    let said = "with what it leaves behind 8.0 MiB are live in the next one, and 4.0 MiB in this one";
    assert!(run_json(&["plan", file, "-o", plan, "--json"])["notes"].to_string().contains(said));
    let planned = ["--plan-from-iteration", "0", "--pool", "stitchd"];
    let shown = run_json(&[&["replay", file, "--json"], &planned[..]].concat());
    assert!(shown["notes"].to_string().contains(said), "{shown}");
    let repeated = run_json(&["replay", file, "--pool", "caching", "--repeat", "1", "--json"]);
    assert_eq!(repeated["trace"]["peak_live_bytes"], 8 << 20);
    assert!(repeated["notes"].to_string().contains("stays beside each repetition"), "{repeated}");
    // Where less than the plan's pool is there the plan is not used, and who hears of the least hears that.
    let least = run_json(&[&["replay", file, "--min-capacity", "--json"], &planned[..]].concat());
    let ours = pool(&least, "stitchd");
    assert_eq!(ours["min_capacity_bytes"], 4 << 20, "{least}");
    assert!(ours["at_min_capacity"]["driver_calls"].as_u64().unwrap() > 0, "{ours}");
    assert!(least["notes"].to_string().contains("needs 4.0 MiB because in that the plan is not used: "), "{least}");
}

#[test]
fn bytes_that_are_handed_out_twice_are_told_where_shares_would_stand() {
    let page = tempfile::tempdir().unwrap();
    let page = page.path().join("it's.html");
    let arguments = ["--repeat", "2", "--perturb", "5", "--plan-from-iteration", "1", "--pool", "stalloc"];
    let output =
        run(&[&["replay", &real("resnet50-olla"), "--report", page.to_str().unwrap()], &arguments[..]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    let row = text.lines().find(|line| line.starts_with("stalloc  ")).unwrap();
    assert!(row.contains("  -  ") && row.contains("overwrites ") && !row.contains('%'), "{text}");
    let shown = run_json(&[&["replay", &real("resnet50-olla"), "--json"], &arguments[..]].concat());
    let overwrites = pool(&shown, "stalloc");
    assert!(overwrites["efficiency"].is_null() && overwrites["efficiency_after_plan"].is_null(), "{overwrites}");
    // The page says how it was made, so that it can be made again.
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains("--repeat 2 --perturb 5 --plan-from-iteration 1 --pool stalloc"), "no command");
    assert!(page.contains(concat!("made by stitchd ", env!("CARGO_PKG_VERSION"))), "no version");
}

#[test]
fn what_is_said_to_be_enough_is_enough() {
    for arguments in [&["--plan-from-iteration", "1"][..], &[]] {
        let file = real("gpt2-medium-hf");
        let replay = [&["replay", &file, "--pool", "stitchd"], arguments].concat();
        let verdict = run_json(&[&replay[..], &["--json"]].concat())["verdict"].as_str().unwrap().to_owned();
        let words: Vec<&str> = verdict.split(' ').collect();
        assert_eq!((words[3], words[4], words[5]), ("GiB", "with", "stitchd"), "{verdict}");
        assert!(verdict.ends_with(" in the last iteration)"), "{verdict}");
        let capacity = format!("{}GiB", words[2]);
        let output = run(&[&replay[..], &["--capacity", &capacity]].concat());
        assert!(output.status.success(), "{verdict}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn what_a_plan_costs_and_what_a_disturbance_lacks_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("job.csv");
    // No phases and no micro-batches; the last two of four blocks fit under nothing.
    let rows: String = (0..4)
        .map(|n| format!("{},alloc,{n},{},0,{}\n{},free,{n},,0,{}\n", 2 * n, 600 + n, n / 2, 2 * n + 1, n / 2))
        .collect();
    std::fs::write(&file, format!("tick,event,id,bytes,stream,iteration\n{rows}")).unwrap();
    let file = file.to_str().unwrap();
    let shown = run_json(&["replay", file, "--perturb", "1", "--pool", "caching", "--json"]);
    assert!(shown["notes"].to_string().contains("adds no micro-batch and no evaluation here"), "{shown}");
    // Requests of at most 512 bytes alone are nothing to plan for stalloc, and are served.
    let small = dir.path().join("small.csv");
    std::fs::write(&small, "tick,event,id,bytes\n0,alloc,9,0\n1,alloc,1,5\n2,free,1,\n").unwrap();
    let small = small.to_str().unwrap();
    let pools = "native,caching,expandable,gmlake,stalloc,stitchd";
    let text = String::from_utf8(run(&["replay", small, "--pool", pools]).stdout).unwrap();
    assert!(text.starts_with("1 request in 1 iteration, ") && !text.contains("left out"), "{text}");
    assert!(text.contains("stalloc serves from a plan of iteration 0"), "{text}");
    assert!(text.contains("1 request of no bytes"), "{text}");
    let planned = run_json(&["plan", small, "--json"])["notes"].to_string();
    assert!(planned.contains("rounded up to 512 B") && !planned.contains("leaves behind"), "{planned}");
}
