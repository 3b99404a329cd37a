//! `stitchd trace`: what it says, what it writes, and what it leaves as it was.

use std::path::Path;

use serde_json::Value;
use stitchd::rng::Rng;

use crate::support::{run, run_json, stderr};

/// A directory of its own with these files, and the way to a name in it.
struct Place(tempfile::TempDir);

impl Place {
    fn with(files: &[(&str, &[u8])]) -> Place {
        let dir = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, bytes)| std::fs::write(dir.path().join(name), bytes).unwrap());
        Place(dir)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn names(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<String> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn real(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(format!("{name}.csv.zst"));
    path.to_str().unwrap().to_owned()
}

const RMM: &[u8] = b"Thread,Time,Action,Pointer,Size,Stream\n\
    1,10:00:00.1,allocate,0xa0,1024,0x0\n1,10:00:00.2,allocate failure,(nil),99,0\n1,10:00:00.3,free,0xb0,64,0x0\n";

#[test]
fn info_says_what_a_real_trace_is() {
    let info = run_json(&["trace", "info", &real("resnet50-olla"), "--layers", "--json"]);
    assert_eq!(
        (&info["requests"], &info["iterations"], &info["iterations_from"]),
        (&2165.into(), &3.into(), &"column".into())
    );
    assert_eq!(info["peak_live_bytes"], 22_417_856_144_u64);
    let sum = |list: &str, key: &str| {
        info[list].as_array().unwrap().iter().map(|one| one[key].as_u64().unwrap()).sum::<u64>()
    };
    for list in ["sizes", "per_iteration", "phases", "layers"] {
        assert_eq!(sum(list, "requests"), 2165, "{list}");
        assert_eq!(sum(list, "asked_bytes"), info["asked_bytes"].as_u64().unwrap(), "{list}");
    }
    for list in ["phases", "layers"] {
        assert_eq!(sum(list, "at_peak_bytes"), 22_417_856_144, "{list}");
    }
    let output = run(&["trace", "info", &real("resnet50-olla")]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for words in ["20.88 GiB", "3, as the trace numbers them", "m.conv1", "backward", "persistent"] {
        assert!(text.contains(words), "{words} is not in {text}");
    }
}

#[test]
fn a_trace_without_iterations_is_given_those_that_it_had() {
    let place = Place::with(&[]);
    let plain = place.path("plain.csv");
    run_json(&["trace", "convert", &real("resnet50-olla"), "-o", &plain, "--json"]);
    let text = std::fs::read_to_string(&plain).unwrap();
    let erased: Vec<String> = text
        .lines()
        .map(|line| {
            line.split(',').enumerate().filter(|(at, _)| *at != 5).map(|(_, field)| field).collect::<Vec<_>>().join(",")
        })
        .collect();
    std::fs::write(place.path("erased.csv"), erased.join("\n")).unwrap();
    let made = run_json(&["trace", "import", &place.path("erased.csv"), "-o", &place.path("made.csv"), "--json"]);
    assert_eq!((&made["iterations"], &made["iterations_from"]), (&3.into(), &"period".into()));
    assert!(made["notes"][0].as_str().unwrap().contains("100.0 % of requests are equal"), "{made}");
    assert_eq!(std::fs::read_to_string(place.path("made.csv")).unwrap(), text);
}

#[test]
fn every_form_converts_to_every_other_without_loss() {
    let place = Place::with(&[]);
    let mut from = real("resnet50-olla");
    let first = place.path("first.csv");
    run_json(&["trace", "convert", &from, "-o", &first, "--json"]);
    for ending in ["stitchtrace", "csv.gz", "stitchtrace.zst", "csv.zst", "stitchtrace.gz", "csv"] {
        let to = place.path(&format!("next.{ending}"));
        let made = run_json(&["trace", "convert", &from, "-o", &to, "--json"]);
        assert_eq!(made["written_bytes"], std::fs::metadata(&to).unwrap().len());
        from = to;
    }
    assert!(std::fs::read(&from).unwrap() == std::fs::read(&first).unwrap());
    assert_eq!(place.names().iter().filter(|name| name.starts_with('.')).count(), 0);
}

#[test]
fn other_peoples_records_are_imported_with_what_they_lack() {
    let problem = b"upper,lower,size,id,offset\n5,2,8,3,0\n2,0,4,9,0\n";
    let place = Place::with(&[("log.csv", RMM), ("problem.csv", problem)]);
    let log = run_json(&["trace", "import", &place.path("log.csv"), "-o", &place.path("log.stitchtrace"), "--json"]);
    assert_eq!(
        (&log["events"], &log["requests"], &log["iterations_from"]),
        (&3.into(), &2.into(), &serde_json::Value::Null)
    );
    let notes = log["notes"].to_string();
    for words in
        ["blocks older than the log: 1;", "allocations that failed: 1;", "no phases", "no iterations are found"]
    {
        assert!(notes.contains(words), "{words} is not in {notes}");
    }
    let output = run(&["trace", "import", &place.path("problem.csv")]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("4 events, 2 requests, 8 B at the peak") && text.contains("not written; -o FILE"), "{text}");
    assert!(text.contains("the offsets are left out"), "{text}");
    // A plan takes them as they are.
    assert_eq!(run_json(&["plan", &place.path("problem.csv"), "--json"])["buffers"], 2);
    assert_eq!(run_json(&["plan", &place.path("log.stitchtrace"), "--json"])["buffers"], 2);
}

#[test]
fn what_fails_says_why_and_leaves_everything_as_it_was() {
    let good = b"tick,event,id,bytes\n1,alloc,1,100\n";
    let long = [b"tick,event,id,bytes,module\n1,alloc,1,100,".as_slice(), &b"x".repeat(70_000), b"\n"].concat();
    let place = Place::with(&[
        ("good.csv", good),
        ("broken.csv", b"tick,event,id,bytes\n1,alloc,1,100\n2,free,7,\n"),
        ("cut.stitchtrace", b"STTRAC\x01\x00\x01\x05"),
        ("newer.stitchtrace", b"STTRAC\x03\x00"),
        ("long.csv", &long),
        ("kept.csv", b"precious"),
        ("kept.stitchtrace", b"precious"),
    ]);
    std::os::unix::fs::symlink(place.path("good.csv"), place.path("same.csv")).unwrap();
    let before = place.names();
    let cases = [
        ("good.csv", "good.csv", "good.csv is the file that is read; write to another"),
        ("good.csv", "same.csv", "same.csv is the file that is read; write to another"),
        ("good.csv", "kept.txt", "a trace is written to .csv, .csv.zst"),
        ("good.csv", "none/kept.csv", "No such file"),
        ("broken.csv", "kept.csv", "broken.csv: line 3, column 'id': 7 was never allocated"),
        ("cut.stitchtrace", "kept.csv", "cut.stitchtrace: block 0, byte 9 of the trace: the file ends here"),
        ("newer.stitchtrace", "kept.csv", "the trace is of version 3, and this build reads versions 1 and 2"),
        ("missing.csv", "kept.csv", "missing.csv: cannot open it: No such file"),
        ("long.csv", "kept.stitchtrace", "the name of a module has 70000 bytes"),
    ];
    for (from, to, words) in cases {
        for command in ["convert", "import"] {
            let output = run(&["trace", command, &place.path(from), "-o", &place.path(to)]);
            assert_eq!(output.status.code(), Some(2), "{from} to {to}: {}", stderr(&output));
            assert!(stderr(&output).contains(words), "{from} to {to} says {:?}, not {words:?}", stderr(&output));
            assert!(output.stdout.is_empty());
        }
    }
    assert_eq!(place.names(), before);
    for (name, bytes) in [("good.csv", &good[..]), ("kept.csv", b"precious"), ("kept.stitchtrace", b"precious")] {
        assert_eq!(std::fs::read(place.path(name)).unwrap(), bytes, "{name}");
    }
}

#[test]
fn every_command_of_traces_has_help_with_an_example() {
    for command in [&["trace"][..], &["trace", "info"], &["trace", "import"], &["trace", "convert"]] {
        let output = run(&[command, &["--help"]].concat());
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("Example") && text.contains(&format!("stitchd {}", command.join(" "))), "{text}");
    }
}

#[test]
fn a_problem_of_placement_is_answered_to_the_byte_with_an_offset_for_each_row() {
    // A pinwheel: no order of sizes meets the bound, and every byte is needed.
    let rows = "a,0,3,2\nb,3,5,3\nc,2,5,2\nd,0,2,3\ne,2,3,1\n";
    let place = Place::with(&[("pinwheel.csv", format!("id,lower,upper,size\n{rows}").as_bytes())]);
    let (problem, answer) = (place.path("pinwheel.csv"), place.path("answer.csv"));
    let made = run_json(&["plan", &problem, "-o", &answer, "--json"]);
    let wanted = serde_json::json!([5, 5, 0.0, true]);
    let of = |made: &Value| json_of(made, ["lower_bound_bytes", "peak_bytes", "gap", "proven_optimal"]);
    assert_eq!(of(&made), wanted, "{made}");
    // Again in the order of time, with what was asked for.
    let text = std::fs::read_to_string(&answer).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("id,lower,upper,size,offset"));
    let (names, rows): (Vec<&str>, Vec<&str>) = lines.map(|line| line.split_once(',').unwrap()).unzip();
    assert_eq!(names, ["a", "b", "c", "d", "e"]);
    let figures = |row: &str| row.split(',').map(|number| number.parse().unwrap()).collect();
    let rows: Vec<Vec<u64>> = rows.into_iter().map(figures).collect();
    for (at, one) in rows.iter().enumerate() {
        assert!(one[3] + one[2] <= 5);
        for other in &rows[..at] {
            let live_together = one[0] < other[1] && other[0] < one[1];
            assert!(!live_together || one[3] + one[2] <= other[3] || other[3] + other[2] <= one[3], "{text}");
        }
    }
    // The same work is the same answer; a plan has sizes as pools serve them.
    let again = run_json(&["plan", &problem, "--work", "100000", "--json"]);
    assert_eq!((of(&again), &again["work_units"]), (wanted, &made["work_units"]));
    assert_eq!(of(&run_json(&["plan", &problem, "--time-limit", "5s", "--json"]))[1], 5);
    let plan = run_json(&["plan", &problem, "-o", &place.path("answer.plan"), "--json"]);
    assert_eq!(plan["static_pool_bytes"].as_u64().unwrap() % 512, 0, "{plan}");
}

#[test]
fn a_search_that_is_interrupted_gives_the_best_until_then() {
    // So many that have nothing in common have no answer at the bound that anybody finds.
    let mut rng = Rng::new(1);
    let row = |id: u64| {
        let lower = rng.below(1000);
        format!("{id},{lower},{},{}\n", lower + 1 + rng.below(100), 1 + rng.below(1_000_000))
    };
    let rows: String = (0..2_000).map(row).collect();
    let place = Place::with(&[("random.csv", format!("id,lower,upper,size\n{rows}").as_bytes())]);
    let (problem, answer) = (place.path("random.csv"), place.path("answer.csv"));
    let search = std::process::Command::new(env!("CARGO_BIN_EXE_stitchd"))
        .args(["plan", &problem, "-o", &answer, "--work", "1000000000000", "--json"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Before it searches it ends, as everybody does.
    let is_heard = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", search.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << (libc::SIGINT - 1) != 0
    };
    while !is_heard() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&search), rustix::process::Signal::INT).unwrap();
    let output = search.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(made["interrupted"], true, "{made}");
    assert_eq!(made["notes"], serde_json::json!(["interrupted: the best that was found until then"]));
    let found = run_json(&["plan", "check", &answer, &problem, "--json"]);
    assert_eq!((&found["valid"], &found["peak_bytes"]), (&Value::Bool(true), &made["peak_bytes"]), "{found}");
    // Whoever is not interrupted says so.
    let made = run_json(&["plan", &problem, "--work", "1000", "--json"]);
    assert_eq!((&made["interrupted"], &made["notes"]), (&Value::Bool(false), &serde_json::json!([])));
}

fn stdout(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn an_answer_of_whatever_solver_is_checked_against_its_problem() {
    let rows = "a,0,3,2\nb,3,5,3\nc,2,5,2\n\"d, 2\",0,2,3\ne,2,3,1\nnone,1,2,0\n";
    let place = Place::with(&[("pinwheel.csv", format!("id,lower,upper,size\n{rows}").as_bytes())]);
    let (problem, answer) = (place.path("pinwheel.csv"), place.path("answer.csv"));
    run_json(&["plan", &problem, "-o", &answer, "--json"]);
    let found = run_json(&["plan", "check", &answer, &problem, "--json"]);
    assert_eq!(
        json_of(&found, ["valid", "peak_bytes", "lower_bound_bytes", "gap"]),
        serde_json::json!([true, 5, 5, 0.0])
    );
    let output = run(&["plan", "check", &answer, &problem]);
    assert!(stdout(&output).contains("the answer is right: 6 buffers in 5 B (5 bytes)"), "{}", stdout(&output));
    assert!(stdout(&output).contains("gap 0.000 %: optimal"), "{}", stdout(&output));
    // Another solver's: columns in another order, others beside them; it ends higher than it must.
    let other = "offset,note,id\n0,x,a\n2,,b\n5,,c\n2,,\"d, 2\"\n2,,e\n9,,none\n";
    let said = |text: &str| {
        std::fs::write(place.path("other.csv"), text).unwrap();
        let output = run(&["plan", "check", &place.path("other.csv"), &problem]);
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    let (code, text) = said(other);
    assert!(code == Some(0) && text.contains("in 7 B") && text.contains("gap 40.000 %"), "{text}");
    let is = |text: &str, from: &str, to: &str, wanted: Option<i32>, what: &str| {
        assert!(text.contains(from), "{from}");
        let (code, said) = said(&text.replace(from, to));
        assert!(code == wanted && said.contains(what), "{code:?}: {said}");
    };
    is(other, "2,,e", "1,,e", Some(1), "a and e are both live at 2 and share the byte 1");
    is(other, "5,,c", "4,,c", Some(1), "b and c are both live at 3 and share the byte 4");
    is(other, "2,,b\n", "", Some(1), "b: the answer has no place for it");
    is(other, "0,x,a\n", "0,x,a\n7,,z\n", Some(1), "the answer has 1 buffer that the problem does not know");
    is(other, "5,,c", "18446744073709551615,,c", Some(1), "c: it would end behind 2^64");
    is(other, "2,,e", "2,,a", Some(2), "line 6, column 'id': \"a\" is there twice");
    is(other, "2,,e", "-2,,e", Some(2), "line 6, column 'offset': \"-2\" is not a number");
    is(other, "offset", "place", Some(2), "there is no column 'offset'");
    let whole = std::fs::read_to_string(&answer).unwrap();
    is(&whole, "c,2,5,2", "c,2,4,2", Some(1), "c: the answer has 4 for its upper, the problem 5");
    // With other ends of lines the line is the same.
    let (code, text) = said(&other.replace("2,,e", "-2,,e").replace('\n', "\r\n"));
    assert!(code == Some(2) && text.contains("line 6, column 'offset'"), "{text}");
    let output = run(&["plan", &problem, "--from-iteration", "0"]);
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("--from-iteration: a problem of placement has no"),
        "{}",
        stderr(&output)
    );
    let output = run(&["plan", "check", &answer, &problem, "--device", "1"]);
    assert!(stderr(&output).contains("nothing is allocated on device 1"), "{}", stderr(&output));
    // Names of all kinds come out as they went in.
    let rows = "\"two\nlines\",0,2,5\n\"a \"\"quote\"\"\",0,2,6\n\"a\rb\",1,3,7\n007,0,1,1\n,0,1,1\nü,0,1,1\n";
    let names = place.path("names.csv");
    std::fs::write(&names, format!("id,lower,upper,size\n{rows}")).unwrap();
    run_json(&["plan", &names, "-o", &answer, "--json"]);
    let found = run_json(&["plan", "check", &answer, &names, "--json"]);
    assert_eq!((&found["valid"], &found["buffers"]), (&Value::Bool(true), &6.into()), "{found}");
    // What has no bytes is nowhere.
    std::fs::write(place.path("none.csv"), "id,lower,upper,size,offset\nnone,1,2,0,7\n").unwrap();
    let found = run_json(&["plan", "check", &place.path("none.csv"), &place.path("none.csv"), "--json"]);
    assert_eq!(
        json_of(&found, ["valid", "peak_bytes", "lower_bound_bytes", "gap"]),
        serde_json::json!([true, 0, 0, 0.0])
    );
    let trace = real("resnet50-olla");
    let output = run(&["plan", "check", &answer, &trace]);
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("not a problem of placement"),
        "{}",
        stderr(&output)
    );
}

fn json_of(made: &Value, names: [&str; 4]) -> Value {
    names.iter().map(|name| made[*name].clone()).collect()
}

#[expect(clippy::disallowed_methods, reason = "where other people's data is, if it is there")]
#[test]
fn shared_problems_are_stacked_at_the_bound() {
    let Some(directory) =
        std::env::var_os("STITCHD_TEST_DATA").map(|dir| std::path::PathBuf::from(dir).join("problems"))
    else {
        println!("SKIP: STITCHD_TEST_DATA is not set");
        return;
    };
    let mut at_bound = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        // Whether it is met is a matter of luck yet.
        if path.extension().is_none_or(|ending| ending != "zst") || path.to_str().unwrap().contains("minimalloc_D") {
            continue;
        }
        let text = zstd::decode_all(std::fs::File::open(&path).unwrap()).unwrap();
        let text = String::from_utf8(text).unwrap();
        // In whatever order its rows come.
        let (head, rows) = text.split_once('\n').unwrap();
        let mut rows: Vec<&str> = rows.lines().collect();
        let mut rng = Rng::new(rows.len() as u64);
        (1..rows.len()).rev().for_each(|at| rows.swap(at, rng.index(at + 1)));
        let place = Place::with(&[("shuffled.csv", format!("{head}\n{}\n", rows.join("\n")).as_bytes())]);
        for problem in [path.to_str().unwrap(), &place.path("shuffled.csv")] {
            let made = run_json(&["plan", problem, "--json"]);
            let found = (&made["gap"], &made["proven_optimal"]);
            assert_eq!(found, (&0.0.into(), &true.into()), "{} as {problem}: {made}", path.display());
        }
        at_bound += 1;
    }
    assert!(at_bound >= 17, "{at_bound}");
}

#[test]
fn a_search_finds_the_same_on_one_core_as_on_all_and_a_seed_is_another_search() {
    let mut rng = Rng::new(15);
    let row = |id: u64| {
        let (lower, len, size) = (rng.below(900), 1 + rng.below(100), 1 + rng.below(1_000));
        format!("{id},{lower},{},{size}\n", lower + len)
    };
    let rows: String = (0..600).map(row).collect();
    let place = Place::with(&[("problem.csv", format!("id,lower,upper,size\n{rows}").as_bytes())]);
    let (problem, out) = (place.path("problem.csv"), place.path("answer.csv"));
    let answer = |within: &[&str], (work, seed): (&str, &str)| {
        let plan = ["plan", &problem, "--work", work, "--seed", seed, "--json", "-o", &out];
        let words = [within, &[env!("CARGO_BIN_EXE_stitchd")], &plan].concat();
        let output = std::process::Command::new(words[0]).args(&words[1..]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let mut said: Value = serde_json::from_slice(&output.stdout).unwrap();
        let said = said.as_object_mut().unwrap();
        said.remove("seconds");
        let better = said.remove("improvements").unwrap();
        let better: Vec<u64> =
            better.as_array().unwrap().iter().map(|one| one["peak_bytes"].as_u64().unwrap()).collect();
        assert!(better.is_sorted_by(|one, next| one > next), "{better:?}");
        assert_eq!(Some(*better.last().unwrap()), said["peak_bytes"].as_u64());
        (std::fs::read_to_string(&out).unwrap(), serde_json::to_string(said).unwrap())
    };
    // Too little to be at the bound, with three seeds; and enough, so that one of two that race ends the other.
    let runs = [("100000", "0"), ("100000", "7"), ("100000", "8"), ("3000000", "0")];
    let on_all = runs.map(|run| answer(&[], run));
    assert!(on_all[0].0 != on_all[1].0 && on_all[1].0 != on_all[2].0, "another seed is another search");
    let is_proven = on_all.each_ref().map(|(_, said)| said.contains("\"proven_optimal\":true"));
    assert_eq!(is_proven, [false, false, false, true]);
    let usual = std::fs::read_to_string("/proc/self/status").unwrap();
    let cpus = usual.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let first = cpus.split([',', '-']).next().unwrap();
    let on_one = ["taskset", "-c", first];
    if !std::process::Command::new("taskset").args(["-c", first, "true"]).status().is_ok_and(|done| done.success()) {
        println!("SKIP: there is no taskset, or it may not choose a core");
        return;
    }
    for (run, on_all) in runs.into_iter().zip(&on_all) {
        let alone = answer(&on_one, run);
        assert!(alone == *on_all, "{run:?}: on one core {}, on all {}", alone.1, on_all.1);
    }
}

#[test]
fn the_answer_to_a_problem_has_every_row_where_it_is_also_those_of_no_bytes() {
    let rows = "id,lower,upper,size\n0,0,9,0\n1,0,9,30\n5,3,4,0\n2,0,9,20\n3,0,9,10\n";
    let place = Place::with(&[("problem.csv", rows.as_bytes())]);
    let out = place.path("answer.csv");
    let made = run_json(&["plan", &place.path("problem.csv"), "--json", "-o", &out]);
    assert_eq!(made["peak_bytes"], 60);
    let text = std::fs::read_to_string(out).unwrap();
    let rows: Vec<Vec<u64>> =
        text.lines().skip(1).map(|line| line.split(',').map(|field| field.parse().unwrap()).collect()).collect();
    let ids: Vec<u64> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(ids, [0, 1, 5, 2, 3], "in the order of the file: {text}");
    let mut spans: Vec<(u64, u64)> =
        rows.iter().filter(|row| row[3] > 0).map(|row| (row[4], row[4] + row[3])).collect();
    spans.sort_unstable();
    assert!(spans.is_sorted_by(|one, next| one.1 <= next.0) && spans.last().unwrap().1 == 60, "{text}");
    assert!(rows.iter().filter(|row| row[3] == 0).all(|row| row[4] == 0), "{text}");
    // Names are what they are, also those that are no numbers.
    let rows = "id,lower,upper,size\nb,5,9,2\n\"a, 01\",0,4,1\n01,0,9,4\n1,0,9,8\n";
    let place = Place::with(&[("names.csv", rows.as_bytes())]);
    let out = place.path("answer.csv");
    run_json(&["plan", &place.path("names.csv"), "--json", "-o", &out]);
    let text = std::fs::read_to_string(out).unwrap();
    let rows: Vec<&str> = text.lines().map(|line| line.rsplit_once(',').unwrap().0).collect();
    assert_eq!(rows, ["id,lower,upper,size", "b,5,9,2", "\"a, 01\",0,4,1", "01,0,9,4", "1,0,9,8"], "{text}");
}
