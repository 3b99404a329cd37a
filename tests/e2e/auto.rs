//! `STITCHD_PLAN=auto`: a process makes its own plan while it runs, goes by it, and leaves it to the next.

use std::io::{BufRead as _, BufReader, Write as _};

use serde_json::Value;

use crate::support::{TestDaemon, eventually, hear, python};

/// Iterations of ten tensors each, with a gradient that the next iteration frees, until somebody writes a line.
const JOB: &str = "\
import select
os.environ['STITCHD_PLAN'] = 'auto'
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

fn sessions(daemon: &TestDaemon) -> Vec<Value> {
    daemon.cli_json(&["sessions"])["sessions"].as_array().unwrap().clone()
}

/// Runs the job until it goes by a plan, and gives its counters then.
fn run(daemon: &TestDaemon) -> Option<Value> {
    let mut client = python(daemon, JOB)?;
    let counters = eventually("the job goes by its plan", || {
        let session = sessions(daemon).into_iter().find(|session| session["pid"] == client.id())?;
        let counters = session["counters"].clone();
        (counters["requests_planned"].as_u64()? > 100).then_some(counters)
    });
    client.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(hear(&mut BufReader::new(client.stdout.take().unwrap()).lines()), "fine");
    assert!(client.wait().unwrap().success());
    Some(counters)
}

#[test]
fn a_process_makes_its_plan_while_it_runs_and_leaves_it_to_the_next() {
    let daemon = TestDaemon::start(128);
    let plans = || daemon.cli_json(&["plans"])["plans"].as_array().unwrap().clone();
    let Some(counters) = run(&daemon) else { return };
    assert_eq!((&counters["plans_installed"], &counters["deviations_blocked"]), (&1.into(), &0.into()), "{counters}");
    assert!(counters["held_bytes"].as_u64() <= counters["peak_held_bytes"].as_u64(), "{counters}");
    let kept = plans();
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert!(kept[0]["requests"].as_u64() == Some(11) && kept[0]["fingerprint"].is_string(), "{kept:?}");
    let counters = run(&daemon).expect("it ran before");
    assert_eq!(counters["plans_installed"], 1, "{counters}");
    assert_eq!(plans(), kept);
}
