//! `stitchd selftest`: drivers of this machine, and of pretended ones.

use std::sync::Arc;

use stitchd::daemon::config::{Config, Flags};
use stitchd::daemon::{Daemon, DaemonError};
use stitchd::driver::Driver as _;
use stitchd::driver::gpu::{GpuDriver, GpuKind};
use stitchd::error::ErrorKind;

use crate::standin::Machine;
use crate::support::{TestDaemon, run_json, run_on, stderr, stitchd};

const MIB: u64 = 1 << 20;

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
    let sizes: Vec<_> = costs.iter().map(|cost| cost["chunk_bytes"].as_u64().unwrap() >> 20).collect();
    assert_eq!(sizes, [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
    for call in ["create", "export", "import", "map", "set_access", "unmap", "release"] {
        assert!(costs.iter().all(|cost| cost["nanoseconds"][call].as_u64().unwrap() > 0), "{call}: {costs:?}");
    }
    assert_eq!(device["run"]["chunks"], 512);
    assert_eq!(device["ladder_bytes"][0], 2 * MIB);
    assert!(device["questions"].is_null(), "nobody asked");
}

/// A machine on which a chunk costs the same, whatever its size: then each step is eight times the last, as far as the device is large enough. What else runs on the machine of the test is little beside it.
const CONSTANT: &str = "devices = 1073741824\nlatency_us = 5000";

#[test]
fn the_ladder_that_follows_from_costs_can_be_pasted_into_a_configuration() {
    let machine = Machine::new(GpuKind::Cuda, CONSTANT);
    let output = run_on(&machine, &["selftest", "--driver", "cuda", "--only-costs"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with("ladder = ")).expect("a line for the configuration");
    assert_eq!(line, r#"ladder = ["2MiB", "16MiB"]"#, "{text}");
    let output = run_on(&machine, &["selftest", "--driver", "cuda", "--only-costs", "--json"]);
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let run = &shown["devices"][0]["run"]["nanoseconds"];
    assert!(run["set_access_each"].as_u64() > run["set_access_once"].as_u64(), "{run}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), line).unwrap();
    let config = Config::load(Some(file.path()), &Flags::default()).unwrap();
    assert_eq!(config.ladder.steps().iter().map(|step| step.get() / MIB).collect::<Vec<_>>(), [2, 16]);
}

#[test]
fn a_daemon_that_is_told_to_measure_takes_the_ladder_that_follows() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("stitchd.toml");
    std::fs::write(&config, "ladder = 'measured'\n").unwrap();
    // Few rounds are made at start: calls so slow that what else runs on this machine is little beside them.
    let slow = "devices = 1073741824\nlatency_us = 6000";
    let machine = Machine::new(GpuKind::Cuda, &format!("{slow}\ncontext_bytes = 104857600"));
    let daemon = TestDaemon::on(machine, &["--config", config.to_str().unwrap()]);
    let session = daemon.session("looks at the ladder");
    assert_eq!(session.ladder().steps().iter().map(|step| step.get() / MIB).collect::<Vec<_>>(), [2, 16]);
    let log = daemon.log();
    assert!(log.contains("measured what a chunk costs by size") && log.contains("2.0 MiB: "), "{log}");
    // Whoever measured has ended, with its context: what is left is that of the process that clears memory.
    daemon.wait_for_device("foreign_bytes", 100 * MIB);
    assert_eq!(daemon.device("available_bytes"), 924 * MIB);
}

/// What the selftest of a machine answers to its questions, on its first device.
fn answers(kind: GpuKind, conf: &str) -> std::collections::BTreeMap<String, serde_json::Value> {
    let driver = if kind == GpuKind::Cuda { "cuda" } else { "hip" };
    let machine = Machine::new(kind, conf);
    let output = run_on(&machine, &["selftest", "--driver", driver, "--device", "0", "--questions", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let driver = GpuDriver::open_library(kind, machine.library()).unwrap();
    let id = driver.devices()[0].id;
    let memory = driver.memory(id).unwrap();
    assert_eq!(memory.free, memory.total, "something was left behind");
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let questions = shown["devices"][0]["questions"].as_array().unwrap();
    questions.iter().map(|answered| (answered["question"].as_str().unwrap().to_owned(), answered.clone())).collect()
}

#[test]
fn questions_are_answered_as_the_machine_foretells() {
    for kind in [GpuKind::Cuda, GpuKind::Hip] {
        let conf = "devices = 201326592, 67108864\ncontext_bytes = 10485760\ndirty = 1\nquirks = fd_per_handle";
        let found = answers(kind, conf);
        let answer = |question: &str| found[question]["answer"].as_str().unwrap().to_owned();
        let figure = |question: &str, name: &str| found[question]["figures"][name].clone();
        let has = "what_does_the_device_have";
        assert_eq!(
            (figure(has, "granularity_bytes"), figure(has, "total_bytes")),
            ((2 * MIB).into(), (192 * MIB).into())
        );
        let overhead = "does_a_chunk_take_more_than_its_bytes";
        assert_eq!((answer(overhead), figure(overhead, "opening_the_driver_bytes")), ("no".into(), 0.into()));
        assert_eq!(figure(overhead, "taken_bytes"), figure(overhead, "chunk_bytes"));
        // HIP has devices where CUDA has contexts.
        assert_eq!(figure(overhead, "context_bytes"), if kind == GpuKind::Cuda { 10 * MIB } else { 0 });
        let clearing = "is_new_memory_cleared";
        assert_eq!(answer(clearing), "no");
        for after in ["dirty_at_first", "dirty_after_own_release", "dirty_after_a_killed_process"] {
            assert!(figure(clearing, after).as_u64().unwrap() > 60, "{after}: {}", found[clearing]);
        }
        let descriptors = "how_many_descriptors_do_chunks_take";
        let per = |what: &str| figure(descriptors, what).as_f64().unwrap();
        assert_eq!((per("per_handle"), per("per_export"), per("per_import")), (1.0, 1.0, 1.0));
        for yes in [
            "does_a_write_show_through_a_second_address",
            "can_an_import_be_exported_again",
            "does_a_descriptor_keep_memory_after_its_exporter_is_gone",
            "does_a_descriptor_keep_memory_while_nobody_has_the_driver_open",
            "does_released_memory_live_while_another_process_maps_it",
            "do_bytes_of_a_process_killed_in_its_work_return",
            "does_a_peer_reach_a_stitched_range",
            "do_stitched_tensors_go_through_nccl",
        ] {
            assert_eq!(answer(yes), "yes", "{}", found[yes]);
        }
        assert_eq!(answer("can_less_than_a_chunk_be_mapped"), "no");
        let exporter = "does_a_descriptor_keep_memory_after_its_exporter_is_gone";
        assert_eq!(figure(exporter, "kept_bytes"), figure(exporter, "chunk_bytes"));
        assert!(figure(exporter, "returned_after_the_last_descriptor_ms").is_f64());
        assert_eq!(figure("does_released_memory_live_while_another_process_maps_it", "returned_at_release_bytes"), 0);
        let killed = "do_bytes_of_a_process_killed_in_its_work_return";
        assert!(figure(killed, "all_returned_after_that_ms").is_f64(), "{}", found[killed]);
        // A forked child has the open files of its parent, and so what is behind them.
        let with_child = "do_they_return_while_a_forked_child_lives";
        assert_eq!(answer(with_child), "no", "{}", found[with_child]);
        assert!(figure(with_child, "all_returned_after_the_child_ms").is_f64(), "{}", found[with_child]);
        // The socket of a process ends with it; not while its child has it, too.
        assert!(figure(killed, "socket_ended_after_kill_ms").is_f64(), "{}", found[killed]);
        assert!(figure(with_child, "socket_ended_after_kill_ms").is_null(), "{}", found[with_child]);
        // Work is the process's own here, and ends with it.
        for work in ["does_work_of_a_killed_process_go_on", "does_it_while_a_forked_child_lives"] {
            assert_eq!(answer(work), "no", "{}", found[work]);
            assert!(figure(work, "changes_before_the_kill").as_u64().unwrap() > 0, "{}", found[work]);
        }
        assert!(!found.contains_key("what_does_a_full_table_of_exports_answer"), "it takes what is the machine's");
        let misuse = &found["what_does_misuse_answer"]["figures"];
        assert!(misuse["create_of_more_than_there_is"].as_str().unwrap().contains("of 192.0 MiB left"), "{misuse}");
        // CUDA's answers are an H200's: a handle that is none is a value like any other, holes are stepped over, and a part is nothing that can be mapped.
        let is_cuda = kind == GpuKind::Cuda;
        let refused = format!("ImportFromShareableHandle answers {}", if is_cuda { 999 } else { 1 });
        assert!(misuse["import_of_dev_null"].as_str().unwrap().contains(&refused), "{misuse}");
        assert_eq!((misuse["map_of_a_chunk_twice"].as_str(), misuse.as_object().unwrap().len()), (Some("done"), 17));
        let library = &found["what_does_the_library_answer_to_misuse"]["figures"];
        assert_eq!(library.as_object().unwrap().len(), 15, "{library}");
        assert_eq!(library["create_of_half_a_granule"], "1 (invalid value)");
        let answers = [
            ("release_twice", "1 (invalid value)", "400 (invalid handle)"),
            ("map_of_half_a_chunk", "801 (not supported)", "1 (invalid value)"),
            ("unmap_over_a_hole", "done", "1 (invalid value)"),
            ("unmap_of_half_a_mapping", "1 (invalid value)", "1 (invalid value)"),
            ("unmap_of_what_is_not_mapped", "1 (invalid value)", "1 (invalid value)"),
            ("unreserve_of_what_is_mapped", "1 (invalid value)", "1 (invalid value)"),
        ];
        for (misuse, cuda, hip) in answers {
            assert_eq!(library[misuse], if is_cuda { cuda } else { hip }, "{misuse}: {library}");
        }
        // Work is done at once here: there is no queue that unmapping could wait for.
        for unknown in ["does_unmap_wait_for_queued_work", "may_memory_be_unmapped_under_queued_work"] {
            assert_eq!(found[unknown]["why"], "the work was over before there was a queue");
        }
    }
}

#[test]
fn a_full_table_of_exports_is_asked_for_where_everything_is() {
    let machine = Machine::new(GpuKind::Cuda, "devices = 33554432\nexport_slots = 40");
    let output = run_on(&machine, &["selftest", "--driver", "cuda", "--all", "--json"]);
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let questions = shown["devices"][0]["questions"].as_array().unwrap();
    let asked = questions.iter().find(|asked| asked["question"] == "what_does_a_full_table_of_exports_answer").unwrap();
    assert_eq!(asked["figures"]["exports"], 40, "{asked}");
    assert!(asked["figures"]["then"].as_str().unwrap().contains("exports of this machine"), "{asked}");
}

#[test]
fn a_library_that_ends_who_misuses_it_costs_the_selftest_nothing() {
    let found = answers(GpuKind::Hip, "devices = 67108864\nquirks = map_lies");
    let library = &found["what_does_the_library_answer_to_misuse"]["figures"];
    assert!(library["what_comes_next"].as_str().unwrap().starts_with("the other process"), "{library}");
    assert_eq!(found["does_a_peer_reach_a_stitched_range"]["why"], "one device");
}

#[test]
fn another_machine_has_other_answers() {
    let found = answers(GpuKind::Cuda, "devices = 67108864, 67108864\npeers = none\nmps = 1");
    let answer = |question: &str| found[question]["answer"].as_str().unwrap();
    assert_eq!(answer("is_new_memory_cleared"), "yes");
    assert_eq!(answer("does_a_peer_reach_a_stitched_range"), "no", "{}", found["does_a_peer_reach_a_stitched_range"]);
    assert_eq!(found["does_a_chunk_take_more_than_its_bytes"]["figures"]["context_bytes"], 0);
    assert_eq!(found["how_many_descriptors_do_chunks_take"]["figures"]["per_handle"], 1.0);
    let why = found["may_memory_be_unmapped_under_queued_work"]["why"].as_str().unwrap();
    assert!(why.contains("MPS"), "{why}");
    assert_eq!(answers(GpuKind::Cuda, "")["does_a_peer_reach_a_stitched_range"]["why"], "one device");
}

const COLLECTIVES: &str = "do_stitched_tensors_go_through_nccl";

/// What is answered about the library for collectives, on three devices, where it does this.
fn collectives(kind: GpuKind, behaviour: &str) -> serde_json::Value {
    let machine = format!("devices = 67108864, 67108864, 67108864\ncollectives = {behaviour}");
    answers(kind, &machine)[COLLECTIVES].clone()
}

#[test]
fn what_the_library_for_collectives_does_with_stitched_ranges_is_seen() {
    // A range has two chunks of 8 MiB: on each of the three ranks four places lie behind the first.
    let behind = 3 * 4;
    for (kind, behaviour, wrong, answer) in [
        (GpuKind::Cuda, "work", 0, "yes"),
        (GpuKind::Cuda, "first_chunk", behind, "no"),
        (GpuKind::Hip, "first_chunk_again", behind, "no"),
    ] {
        let found = collectives(kind, behaviour);
        let figures = &found["figures"];
        assert_eq!((&found["answer"], &figures["wrong_places"]), (&answer.into(), &wrong.into()), "{found}");
        assert_eq!((&figures["ranks"], &figures["library_version"]), (&3.into(), &22_703.into()), "{found}");
    }
    for (kind, behaviour, said) in
        [(GpuKind::Hip, "refused", "ncclGroupEnd answers 1"), (GpuKind::Cuda, "ends", "the other process: ")]
    {
        let found = collectives(kind, behaviour);
        let figures = &found["figures"];
        assert_eq!((&found["answer"], &figures["ranks"]), (&"no".into(), &3.into()), "{found}");
        assert!(figures["refused"].as_str().is_some_and(|refused| refused.contains(said)), "{found}");
    }
    // Of one rank it is a copy, which says nothing.
    let alone = &answers(GpuKind::Cuda, "")[COLLECTIVES];
    assert_eq!((&alone["answer"], &alone["figures"]["ranks"]), (&"unknown".into(), &1.into()), "{alone}");
    assert!(alone["why"].as_str().unwrap().starts_with("one device"), "{alone}");
}

#[test]
fn a_library_for_collectives_that_fails_without_stitching_too_says_nothing_of_stitching() {
    for (kind, behaviour, said) in [
        (GpuKind::Cuda, "broken", "ncclGroupEnd answers 2"),
        (GpuKind::Hip, "nothing", "of whole chunks 24 of 24 places are wrong"),
    ] {
        let found = collectives(kind, behaviour);
        assert_eq!(found["answer"], "unknown", "{found}");
        assert!(found["why"].as_str().unwrap().contains(said), "{found}");
    }
}

#[test]
fn what_is_of_the_whole_machine_is_asked_with_the_first_device_alone() {
    let machine = Machine::new(GpuKind::Cuda, "devices = 67108864, 67108864");
    let output = run_on(&machine, &["selftest", "--driver", "cuda", "--questions", "--json"]);
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let times = |question: &str| {
        let asked = shown["devices"].as_array().unwrap().iter().map(|device| device["questions"].as_array().unwrap());
        asked.map(|asked| asked.iter().filter(|asked| asked["question"] == question).count()).collect::<Vec<_>>()
    };
    assert_eq!(times("is_new_memory_cleared"), [1, 1]);
    assert_eq!(times("does_a_descriptor_keep_memory_while_nobody_has_the_driver_open"), [1, 0]);
    assert_eq!(times(COLLECTIVES), [1, 0]);
}

#[test]
fn every_question_has_an_answer_on_the_host_too() {
    let shown = run_json(&["selftest", "--driver", "host", "--questions", "--json"]);
    let questions = shown["devices"][0]["questions"].as_array().unwrap();
    assert!(questions.len() >= 15, "{questions:?}");
    for answered in questions {
        let is_unknown = answered["answer"] == "unknown";
        assert_eq!(is_unknown, answered["why"].as_str().is_some_and(|why| !why.is_empty()), "{answered}");
    }
    let text = String::from_utf8(stitchd().args(["selftest", "--driver=host", "--questions"]).output().unwrap().stdout);
    assert!(text.unwrap().contains("is new memory cleared"));
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
fn a_call_that_hangs_is_named_and_ends_the_test() {
    for (hangs, said) in [
        ("map", "device 0: a map in the checks has not come back for"),
        ("init", "the cuda driver has not started within 4s"),
    ] {
        let machine = Machine::new(GpuKind::Cuda, "devices = 268435456");
        machine.hang(hangs);
        let output = run_on(&machine, &["selftest", "--driver", "cuda", "--all", "--call-limit", "1"]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
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
