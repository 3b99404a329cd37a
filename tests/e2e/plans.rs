//! Plans: made from real traces, stored, reserved, served.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use stitchd::ids::PlanId;
use stitchd::limits;
use stitchd::plan::{Fingerprint, Plan, Position};
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::units::Bytes;

use crate::support::{TestDaemon, hear, python, run, run_json, stderr, stitchd};

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
    daemon.cli_json(&["plans", "put", text(&plan_file), "--name", "of my own"]);
    let reserved = daemon.cli_json(&["reserve", "--plan", text(&plan_file)]);
    assert_eq!(daemon.cli_json(&["plans"])["plans"][0]["name"], "of my own");
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
    let sessions = daemon.cli_json(&["sessions"]);
    let of = |name: &str| {
        let sessions = sessions["sessions"].as_array().unwrap();
        sessions.iter().find(|session| session["name"] == name).unwrap()["plan"].clone()
    };
    assert_eq!((of("job"), of("other")), (id.to_hex().into(), serde_json::Value::Null));
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
fn a_directory_of_plans_that_cannot_be_used_is_said_before_the_program_begins() {
    let daemon = TestDaemon::start(64);
    let plans = daemon.path().join("of-jobs");
    std::fs::create_dir(&plans).unwrap();
    let socket = format!("--socket={}", daemon.socket().display());
    let said = || {
        let ran = stitchd().args(["run", &socket, "--plan", text(&plans), "--", "true"]).output().unwrap();
        assert_eq!(ran.status.code(), Some(0), "{ran:?}");
        String::from_utf8(ran.stderr).unwrap()
    };
    let nothing = "has no file *.plan that can be used: the program goes on without a plan";
    assert!(said().contains(nothing));
    std::fs::write(plans.join("torn.plan"), "no plan at all").unwrap();
    let both = said();
    assert!(both.contains("torn.plan is no plan that can be used: ") && both.contains(nothing), "{both}");
    run_json(&["plan", text(&small_trace(daemon.path())), "-o", text(&plans.join("job.plan")), "--json"]);
    let one = said();
    assert!(one.contains("torn.plan is no plan that can be used: ") && !one.contains(nothing), "{one}");
}

#[test]
fn plans_are_listed_deleted_and_there_again_after_a_restart() {
    let daemon = TestDaemon::start(64);
    let trace = small_trace(daemon.path());
    let plan_file = daemon.path().join("small.plan");
    run_json(&["plan", text(&trace), "-o", text(&plan_file), "--json"]);
    daemon.cli_json(&["reserve", "--plan", text(&plan_file)]);
    // Whoever wants to work on the device is told that something of it is there, and how it goes.
    let drained = daemon.cli(&["drain", "0"]);
    let said = String::from_utf8(drained.stdout).unwrap();
    assert!(drained.status.code() == Some(1) && said.contains("24.0 MiB is reserved for plans"), "{said}");
    let undone = daemon.cli_json(&["drain", "0", "--undo"]);
    assert_eq!(undone["reserved_bytes"].as_u64(), Some(24 * MIB));
    let again = daemon.cli_json(&["reserve", "--plan", text(&plan_file), "--release"]);
    assert_eq!(again["reserved_bytes"], 0);
    assert_eq!(daemon.cli(&["reserve", "--plan", text(&plan_file), "--release"]).status.code(), Some(2));
    daemon.cli_json(&["reserve", "--plan", text(&plan_file)]);
    let listed = daemon.cli_json(&["plans"]);
    assert_eq!(
        (listed["plans"][0]["name"].as_str(), listed["plans"][0]["reserved_bytes"].as_u64()),
        (Some("small"), Some(24 * MIB))
    );

    // What is reserved for one stays reserved.
    let mut daemon = daemon.follow(&["--device=0=64MiB"]);
    let listed = daemon.cli_json(&["plans"]);
    assert_eq!(
        (listed["plans"][0]["name"].as_str(), listed["plans"][0]["reserved_bytes"].as_u64()),
        (Some("small"), Some(24 * MIB))
    );
    assert_eq!(daemon.device("reserved_bytes"), 24 * MIB);
    let id = listed["plans"][0]["plan"].as_str().unwrap().to_owned();
    daemon.cli_json(&["plans", "delete", &id]);
    assert_eq!(daemon.cli_json(&["plans"])["plans"].as_array().unwrap().len(), 0);
    assert_eq!(daemon.cli(&["plans", "delete", &id]).status.code(), Some(2));
    assert_eq!(daemon.device("reserved_bytes"), 0);
    daemon.terminate();
}

#[test]
fn a_plan_is_found_by_its_job_and_its_process_and_fetched_as_it_was() {
    let daemon = TestDaemon::start(64);
    let trace = small_trace(daemon.path());
    let file = |rank: Option<u32>| daemon.path().join(format!("of-{}.plan", rank.map_or(9, |rank| rank)));
    for rank in [None, Some(0), Some(1)] {
        let (plan, number) = (file(rank), rank.unwrap_or(0).to_string());
        let mut args = vec!["plan", text(&trace), "-o", text(&plan), "--json"];
        rank.iter().for_each(|_| args.extend(["--rank", &number, "--world-size", "2"]));
        let made = run_json(&args);
        assert_eq!((made["rank"].as_u64(), made["world_size"].as_u64()), (rank.map(u64::from), rank.map(|_| 2)));
        let shown = run_json(&["plan", "show", text(&plan), "--json"]);
        assert_eq!((&shown["fingerprint"], &shown["rank"]), (&made["fingerprint"], &made["rank"]));
        let stored = daemon.cli_json(&["plans", "put", text(&plan)]);
        assert_eq!((&stored["plan"], &stored["fingerprint"]), (&made["plan"], &made["fingerprint"]));
    }
    let said = String::from_utf8(run(&["plan", "show", text(&file(Some(1)))]).stdout).unwrap();
    assert!(said.contains(", rank 1 of 2: 7 requests"), "{said}");
    let listed = daemon.cli_json(&["plans"]);
    let names: Vec<_> = listed["plans"].as_array().unwrap().iter().map(|plan| plan["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["of-1", "of-0", "of-9"], "the newest first");
    let fingerprint = listed["plans"][0]["fingerprint"].as_str().unwrap().to_owned();
    let out = daemon.path().join("fetched.plan");
    let fetch = |which: &[&str], expected: Option<u32>| {
        daemon.cli_json(&[&["plans", "get", "-o", text(&out)], which].concat());
        assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(file(expected)).unwrap(), "{which:?}");
    };
    fetch(&["--fingerprint", &fingerprint], Some(1));
    fetch(&["--fingerprint", &fingerprint, "--rank", "0"], Some(0));
    // Made for nobody in particular, it is for every process that has none of its own.
    fetch(&["--fingerprint", &fingerprint, "--rank", "1", "--world-size", "4"], None);
    fetch(&[listed["plans"][2]["plan"].as_str().unwrap()], None);

    let session = daemon.session("job");
    let trace = stitchd::trace::import::read_file(&trace).unwrap().trace;
    let job = Fingerprint::of(&trace);
    assert_eq!(job.to_hex(), fingerprint);
    let plan = session.plan_for(job, Position::new(0, 2)).unwrap().unwrap();
    assert_eq!(plan.job.position, Position::new(0, 2));
    assert_eq!(session.plan_for(job, Position::new(5, 6)).unwrap().unwrap().job.position, None);
    assert_eq!(session.plan_for(Fingerprint(1), None).unwrap(), None);

    for (args, code, words) in [
        (&["get", "-o", "x", "--fingerprint", "0000000000000001"][..], 2, "there is no plan for this job"),
        (&["get", "-o", "x", "--fingerprint", "1"], 2, "not the fingerprint of a job"),
        (&["get", "-o", "x", "--fingerprint", &fingerprint, "--rank", "2", "--world-size", "2"], 2, "2 of 2"),
        (&["get", "-o", "x", "0000000000000001"], 2, "there is no plan 0000000000000001"),
        (&["get", "-o", "x"], 2, "<ID>"),
        (&["--fingerprint", "0000000000000001", "delete", "0000000000000001"], 2, "behind the subcommand"),
        (&["put", "no.plan"], 2, "no.plan"),
    ] {
        let refused = daemon.cli(&[&["plans"], args].concat());
        assert_eq!(refused.status.code(), Some(code), "{args:?}");
        assert!(stderr(&refused).contains(words), "{args:?}: {}", stderr(&refused));
    }
    let many = ["plan", "x.csv", "--rank", "2", "--world-size", "2"];
    assert!(stderr(&run(&many)).contains("there is no rank 2 of 2"));
}

#[test]
fn what_put_has_answered_is_there_after_the_daemon_is_killed() {
    const ROUNDS: usize = 4;
    let mut daemon = TestDaemon::start(64);
    let trace = stitchd::trace::import::read_file(&small_trace(daemon.path())).unwrap().trace;
    let mut plan = Plan::from_trace(&trace, 1).unwrap();
    let mut answered: Vec<(PlanId, String)> = Vec::new();
    for round in 0..ROUNDS {
        let session = daemon.session("job");
        let pid = daemon.pid();
        // Whatever it is doing just then: the next plan is on its way.
        let killer = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20 + 25 * round as u64));
            rustix::process::kill_process(
                rustix::process::Pid::from_raw(pid as i32).unwrap(),
                rustix::process::Signal::KILL,
            )
        });
        for _ in 0..limits::PLANS_MAX / ROUNDS {
            let rank = answered.len() as u32;
            plan.job.position = Position::new(rank, 5000);
            let name = format!("number {rank}");
            match session.put_plan(&plan, &name) {
                Ok(id) => answered.push((id, name)),
                Err(_) => break,
            }
        }
        killer.join().unwrap().unwrap();
        drop(session);
        daemon = TestDaemon::in_dir(daemon.kill(), &["--device=0=64MiB"]);
        let listed = daemon.cli_json(&["plans"]);
        let listed = listed["plans"].as_array().unwrap();
        for (id, name) in &answered {
            let is_it = |plan: &&serde_json::Value| plan["plan"] == id.to_hex();
            let found = listed.iter().find(is_it).unwrap_or_else(|| panic!("{name} is gone in round {round}"));
            assert_eq!(found["name"].as_str(), Some(name.as_str()));
        }
        // One may have been stored whose answer did not come.
        assert!(listed.len() <= answered.len() + 1, "{} and {}", listed.len(), answered.len());
        let files = std::fs::read_dir(daemon.path().join("plans")).unwrap();
        let names: Vec<_> = files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(names.len(), 2 * listed.len(), "{names:?}");
    }
    assert!(answered.len() > ROUNDS, "{}", answered.len());
    let newest = daemon.session("job").plan_for(plan.job.fingerprint, None).unwrap().unwrap();
    let newest = newest.job.position.unwrap().rank() as usize;
    assert!(newest + 1 >= answered.len(), "{newest} of {}", answered.len());
}

#[test]
fn a_run_that_ended_in_the_middle_of_an_iteration_is_planned_and_that_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let (csv, short, plan) = (dir.path().join("job.csv"), dir.path().join("short.csv"), dir.path().join("job.plan"));
    run_json(&["trace", "convert", text(&trace("gpt2-medium-hf")), "-o", text(&csv), "--json"]);
    let rows = std::fs::read_to_string(&csv).unwrap();
    let column = rows.lines().next().unwrap().split(',').position(|name| name == "iteration").unwrap();
    let of = |wanted: &str| rows.lines().filter(move |row| row.split(',').nth(column) == Some(wanted)).count();
    let cut_in = |iteration: usize| {
        let whole: usize = ["0", "1"][..iteration].iter().map(|before| of(before)).sum();
        let kept = 1 + whole + of(&iteration.to_string()) / 2;
        std::fs::write(&short, rows.lines().take(kept).map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    };
    let made = |more: &[&str]| {
        let made = run_json(&[&["plan", text(&short), "-o", text(&plan), "--json"], more].concat());
        let checked = run_json(&["plan", "check", text(&plan), text(&short), "--json"]);
        assert_eq!(checked["valid"], true, "{more:?}: {checked}");
        let (peak, bound) = (made["peak_bytes"].as_u64().unwrap(), made["lower_bound_bytes"].as_u64().unwrap());
        assert!(bound <= peak && peak - bound <= bound / 1_000, "{more:?}: {made}");
        let shown = run_json(&["plan", "show", text(&plan), "--json"]);
        (made, shown)
    };
    let says = |made: &serde_json::Value, words: &str| {
        let notes = made["notes"].as_array().unwrap();
        assert!(notes.iter().any(|note| note.as_str().unwrap().contains(words)), "{notes:?}");
    };
    // Two whole ones before it.
    cut_in(2);
    let live = run_json(&["trace", "info", text(&short), "--json"])["persistent_bytes"].as_u64().unwrap();
    let (whole, shown) = made(&[]);
    assert_eq!((whole["iteration"].as_u64(), whole["cut"]["iteration"].as_u64()), (Some(1), Some(2)));
    assert_eq!((whole["cut"]["live_bytes"].as_u64(), shown["cut"].is_null()), (Some(live), true));
    says(&whole, "the plan is made from iterations 0 and 1, and --from-iteration 2 makes it from that");
    let (cut, shown) = made(&["--from-iteration", "2"]);
    assert_eq!(shown["cut"], cut["cut"]);
    assert!(cut["peak_bytes"].as_u64().unwrap() >= live);
    says(&cut, "as far as it goes");
    // The first is whole, and better than half of the second.
    cut_in(1);
    let (whole, _) = made(&[]);
    assert_eq!((whole["iteration"].as_u64(), whole["cut"]["iteration"].as_u64()), (Some(0), Some(1)));
    says(&whole, "the plan is made from iteration 0");
    let (cut, _) = made(&["--from-iteration", "1"]);
    let requests = cut["cut"]["requests"].as_u64().unwrap();
    let said = String::from_utf8(run(&["plan", "show", text(&plan)]).stdout).unwrap();
    assert!(said.contains(&format!("\niteration 1 was cut after {requests} requests, with ")), "{said:.300}");
    // A whole trace says nothing.
    assert!(run_json(&["plan", text(&csv), "--json"])["cut"].is_null());
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
    let swapped = run(&["plan", "check", text(&trace_file), text(&plan_file)]);
    assert_eq!(swapped.status.code(), Some(2));
    assert!(stderr(&swapped).contains("it comes first"), "{}", stderr(&swapped));

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

/// Two threads, each with a list of requests of its own that it repeats, six iterations of them. Which of them asks next is drawn, so that the order of both together differs each time however busy the machine is;
/// what is drawn asks when it gets to it.
const RACE: &str = "\
import random, threading
ends = threading.Barrier(3, timeout=60)
turn = threading.Condition()
order = []
def work(thread):
    for iteration in range(6):
        kept = []
        for n in range(60):
            with turn:
                assert turn.wait_for(lambda: order and order[-1] == thread, 60)
                order.pop()
                turn.notify_all()
            size = (n * 7 % 11 + 1) * 65536 + thread * 512
            kept.append((malloc(size), size))
            if n % 3: free(*kept.pop(n % 2 - 1))
        for p, size in kept: free(p, size)
        ends.wait()
        ends.wait()
def draw():
    with turn:
        order[:] = random.sample([0, 1] * 60, 120)
        turn.notify_all()
threads = [threading.Thread(target=work, args=[number]) for number in range(2)]
for thread in threads: thread.start()
for iteration in range(6):
    draw()
    ends.wait()
    lib.stitch_iteration_mark(-1)
    ends.wait()
for thread in threads: thread.join()
";

#[test]
fn threads_that_race_are_recorded_planned_and_served_from_that_plan() {
    let daemon = TestDaemon::start(256);
    let (record, plan) = (daemon.path().join("race.stitchtrace"), daemon.path().join("race.plan"));
    let setting = |name: &str, value: &Path| format!("os.environ['{name}'] = '{}'\n", text(value));
    let job = |before: String, after: &str| {
        let mut client = python(&daemon, &format!("{before}{RACE}{after}say('fine')\nsys.stdin.read()\n"))?;
        let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
        assert_eq!(hear(&mut lines), "fine");
        let counters = daemon.cli_json(&["sessions"])["sessions"][0]["counters"].clone();
        drop(client.stdin.take());
        assert!(client.wait().unwrap().success());
        Some((client.id(), counters))
    };
    let Some((pid, _)) = job(setting("STITCHD_RECORD", &record), "") else { return };
    let recorded = daemon.path().join(format!("race.{pid}.0.stitchtrace"));
    let made = run_json(&["plan", text(&recorded), "--from-iteration", "3", "-o", text(&plan), "--json"]);
    assert_eq!((&made["lanes"], &made["static_requests"]), (&2.into(), &240.into()), "{made}");
    // What does not fit says how often the job has left its plan: this once.
    let too_much = "\
assert lib.stitch_malloc(400 * MIB, 0, None) is None
assert '1 deviation from its plan' in lib.stitch_last_error().decode(), lib.stitch_last_error()
";
    // As every node has it mounted.
    let mounted = daemon.path().join("mounted");
    std::fs::create_dir(&mounted).unwrap();
    std::fs::copy(&plan, mounted.join("race.plan")).unwrap();
    for plan in [&plan, &mounted] {
        let (_, counters) = job(setting("STITCHD_PLAN", plan), too_much).expect("it ran before");
        assert_eq!(counters["requests_planned"], 720, "{counters}");
        for kind in ["late", "blocked", "unplanned", "skipped", "resized"] {
            let expected = u64::from(kind == "unplanned");
            assert!(counters[format!("deviations_{kind}")].as_u64() <= Some(expected), "{counters}");
        }
    }
    // One that has none for this process is no error.
    std::fs::remove_file(mounted.join("race.plan")).unwrap();
    let (_, counters) = job(setting("STITCHD_PLAN", &mounted), "").expect("it ran before");
    assert_eq!((&counters["requests_planned"], &counters["failures"]), (&0.into(), &0.into()), "{counters}");
}
