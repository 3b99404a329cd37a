//! `STITCHD_PLAN=auto`: a process makes its own plan while it runs, goes by it, and leaves it to the next.

use std::io::{BufRead as _, BufReader, Write as _};

use serde_json::Value;

use stitchd::driver::gpu::GpuKind;

use crate::plans::small_trace;
use crate::support::{TestDaemon, eventually_or_says, hear, python, run_json, vendor};

/// Iterations of ten tensors each, with a gradient that the next iteration frees, until somebody writes a line.
const JOB: &str = "\
weights = [malloc(3 * MIB + (n << 12)) for n in range(4)]
poke(weights[0], b'weights')
gradient, number = None, 0
while not select.select([sys.stdin], [], [], 0)[0]:
    number += 1
    kept = []
    for layer in range(10):
        size = (layer % 4 + 1) * MIB
        p = malloc(size)
        poke(p, b'%d %d' % (number, layer))
        kept.append((p, size))
    if gradient:
        free(gradient, 2 * MIB)
    gradient = malloc(2 * MIB)
    poke(gradient, b'gradient')
    for layer, (p, size) in reversed(list(enumerate(kept))):
        words = b'%d %d' % (number, layer)
        assert peek(p, len(words)) == words
        free(p, size)
    assert peek(gradient, 8) == b'gradient' and peek(weights[0], 7) == b'weights'
    lib.stitch_iteration_mark(-1)
    time.sleep(0.02)
say('fine')
";

/// Iterations of 40,010 requests: 200 micro-batches of 40 layers that keep an activation each, and what
/// only an optimizer takes. Some 110 MiB live at most.
const LARGE_JOB: &str = "\
weights = [malloc(1 * MIB) for _ in range(40)]
for weight in weights: poke(weight, b'weights')
while not select.select([sys.stdin], [], [], 0)[0]:
    for batch in range(200):
        kept = []
        for layer in range(40):
            lib.stitch_context_push(1, batch, -1, b'layer', 0)
            size = MIB + 8192 * (layer % 3)
            through = [malloc(512 * 1024 + 4096 * layer), malloc(2 * MIB)]
            kept.append((malloc(size), size))
            free(through[0], 512 * 1024 + 4096 * layer)
            free(through[1], 2 * MIB)
            lib.stitch_context_pop()
        poke(kept[batch % 40][0], b'kept')
        for layer, (p, size) in reversed(list(enumerate(kept))):
            lib.stitch_context_push(2, batch, -1, b'layer', 0)
            through = [malloc(3 * MIB), malloc(256 * 1024 + 4096 * layer)]
            assert layer != batch % 40 or peek(p, 4) == b'kept'
            free(p, size)
            free(through[1], 256 * 1024 + 4096 * layer)
            free(through[0], 3 * MIB)
            lib.stitch_context_pop()
    steps = [malloc((2 + k) * MIB) for k in range(10)]
    for k, p in enumerate(steps): free(p, (2 + k) * MIB)
    assert all(peek(weight, 7) == b'weights' for weight in weights)
    lib.stitch_iteration_mark(-1)
say('fine')
";

fn sessions(daemon: &TestDaemon) -> Vec<Value> {
    daemon.cli_json(&["sessions"])["sessions"].as_array().unwrap().clone()
}

/// Runs the job until its counters are what is waited for, and gives them.
fn run(daemon: &TestDaemon, what: &str, is_it: impl Fn(&Value) -> bool) -> Option<Value> {
    run_with(AUTO, daemon, what, is_it)
}

const AUTO: &str = "os.environ['STITCHD_PLAN'] = 'auto'";

/// The same in this environment.
fn run_with(environment: &str, daemon: &TestDaemon, what: &str, is_it: impl Fn(&Value) -> bool) -> Option<Value> {
    run_job(JOB, environment, daemon, what, is_it)
}

fn run_job(
    job: &str,
    environment: &str,
    daemon: &TestDaemon,
    what: &str,
    is_it: impl Fn(&Value) -> bool,
) -> Option<Value> {
    let mut client = python(daemon, &format!("import select\n{environment}\n{job}"))?;
    let counters = eventually_or_says(what, || {
        let sessions = sessions(daemon);
        let session = sessions.iter().find(|session| session["pid"] == client.id());
        let counters = session.map_or(Value::Null, |session| session["counters"].clone());
        let is_it = is_it(&counters);
        is_it.then_some(counters).ok_or_else(|| format!("sessions {sessions:?}, job {:?}", client.try_wait()))
    });
    client.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(hear(&mut BufReader::new(client.stdout.take().unwrap()).lines()), "fine");
    assert!(client.wait().unwrap().success());
    Some(counters)
}

fn plans(daemon: &TestDaemon) -> Vec<Value> {
    daemon.cli_json(&["plans"])["plans"].as_array().unwrap().clone()
}

#[test]
fn a_process_makes_its_plan_while_it_runs_and_leaves_it_to_the_next() {
    let daemon = TestDaemon::start(128);
    if vendor() == Some(GpuKind::Hip) {
        return where_nothing_moves_it_is_refused(&daemon);
    }
    let run = || {
        let is_on_plan = |counters: &Value| counters["requests_planned"].as_u64() > Some(100);
        run(&daemon, "the job goes by its plan", is_on_plan)
    };
    let Some(counters) = run() else { return };
    assert_eq!((&counters["plans_installed"], &counters["deviations_blocked"]), (&1.into(), &0.into()), "{counters}");
    assert!(counters["held_bytes"].as_u64() <= counters["peak_held_bytes"].as_u64(), "{counters}");
    let kept = plans(&daemon);
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert!(kept[0]["requests"].as_u64() == Some(11) && kept[0]["fingerprint"].is_string(), "{kept:?}");
    let counters = run().expect("it ran before");
    assert_eq!(counters["plans_installed"], 1, "{counters}");
    assert_eq!(plans(&daemon), kept);
}

#[test]
fn a_directory_with_plans_of_several_jobs_has_each_find_its_own_by_what_it_does_first() {
    let first = TestDaemon::start(128);
    if vendor() == Some(GpuKind::Hip) {
        println!("SKIP: on HIP memory stays with its addresses, and no plan comes while a job runs");
        return;
    }
    let is_on_plan = |counters: &Value| counters["requests_planned"].as_u64() > Some(100);
    let recorded = tempfile::tempdir().unwrap();
    let record = recorded.path().join("run.stitchtrace").display().to_string();
    let recording = format!("os.environ.update(STITCHD_PLAN='auto', STITCHD_RECORD='{record}')");
    if run_with(&recording, &first, "the job goes by its plan", is_on_plan).is_none() {
        return;
    }
    // Its plan, and one of a job that does something else, as a volume of a fleet has them.
    let mounted = tempfile::tempdir().unwrap();
    let mut stored = std::fs::read_dir(first.path().join("plans")).unwrap().map(|entry| entry.unwrap().path());
    let stored = stored.find(|path| path.extension().is_some_and(|ending| ending == "plan")).unwrap();
    std::fs::copy(stored, mounted.path().join("own.plan")).unwrap();
    let trace = small_trace(mounted.path());
    let other = mounted.path().join("other.plan");
    run_json(&["plan", trace.to_str().unwrap(), "-o", other.to_str().unwrap(), "--json"]);
    let finds_it = || {
        // A daemon that knows no plan.
        let second = TestDaemon::start(128);
        let directory = format!("os.environ['STITCHD_PLAN'] = '{}'", mounted.path().display());
        let counters = run_with(&directory, &second, "the job goes by the plan of the directory", is_on_plan).unwrap();
        let wanted = ["plans_installed", "plans_refused", "deviations_blocked"].map(|name| counters[name].as_u64());
        assert_eq!(wanted, [Some(1), Some(0), Some(0)], "{counters}");
        // One that it made itself would come after the fourth iteration, of some fourteen requests each.
        let stitched = counters["requests_pool"].as_u64();
        assert!(stitched < Some(3 * 14), "{counters}");
        assert!(plans(&second).is_empty(), "what it found is where it was");
    };
    finds_it();
    // One that people make of a recording has what comes once, too, which is there by then.
    let recording = std::fs::read_dir(recorded.path()).unwrap().next().unwrap().unwrap().path();
    let own = mounted.path().join("own.plan");
    let made = run_json(&["plan", recording.to_str().unwrap(), "-o", own.to_str().unwrap(), "--json"]);
    assert!(made["static_requests"].as_u64() > Some(11), "{made}");
    finds_it();
}

/// A recording keeps 65,536 events, and an iteration has 80,020: marks say where it ends.
#[test]
fn an_iteration_of_more_events_than_a_recording_keeps_is_planned_too() {
    if vendor() == Some(GpuKind::Hip) {
        println!("SKIP: on HIP memory stays with its addresses, and no plan comes while a job runs");
        return;
    }
    let daemon = TestDaemon::start(256);
    let goes_by_it = |counters: &Value| counters["requests_planned"].as_u64() > Some(2 * 40_000);
    let Some(counters) = run_job(LARGE_JOB, AUTO, &daemon, "the job goes by its plan", goes_by_it) else { return };
    assert_eq!((&counters["plans_installed"], &counters["deviations_blocked"]), (&1.into(), &0.into()), "{counters}");
    let kept = plans(&daemon);
    assert!(kept.len() == 1 && kept[0]["requests"].as_u64() == Some(40_010), "{kept:?}");
    // The next one finds it.
    let counters = run_job(LARGE_JOB, AUTO, &daemon, "the next goes by it", goes_by_it).expect("it ran before");
    assert!(counters["plans_installed"] == 1 && plans(&daemon) == kept, "{counters}");
}

/// Memory that stays with its addresses cannot go to a plan's while the job runs.
fn where_nothing_moves_it_is_refused(daemon: &TestDaemon) {
    let is_given_up = |counters: &Value| counters["plans_refused"] == 3;
    let Some(counters) = run(daemon, "the plan is given up", is_given_up) else { return };
    assert_eq!((&counters["plans_installed"], &counters["requests_planned"]), (&0.into(), &0.into()), "{counters}");
    assert_eq!(plans(daemon).len(), 1);
}
