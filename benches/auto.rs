//! What plans that are made while the job runs cost it: its requests while it is recorded, and while a plan
//! is made beside it, each beside the same requests without; and the moment at which the plan is installed.
//!
//! The job runs without a plan from a simulated device. Between two rounds the planner catches up, as its
//! thread does in a process: what is measured is what the job waits for.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

#[path = "support/iteration.rs"]
mod iteration;
#[path = "support/runtime.rs"]
mod subject;
mod support;

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use iteration::{Iteration, Step, run, trace};
use stitchd::auto::{AutoPlanner, NoShelf};
use stitchd::plan::Plan;
use stitchd::runtime::{Counter, Runtime};
use stitchd::trace::Trace;
use stitchd::units::{Bytes, DeviceAddress};
use support::{Compared, compare, timed};

const TRACES: [&str; 5] = ["gpt2-345m-VR", "gpt2-medium-hf", "opt-13b-Z3-RO", "qwen-moe-V-last", "resnet50-olla"];
const ROUNDS: usize = 31;
/// Iterations until a job without a plan makes no driver call.
const WARM_UP: usize = 10;
/// The planner looks after so many steps before the job repeats itself: its recorder has room for more.
const STEPS_PER_LOOK: usize = 1 << 14;
/// Iterations until a plan has come.
const ITERATIONS_MAX: usize = 12;

/// A job without a plan from its file.
struct Job<'a> {
    runtime: Runtime,
    iteration: &'a Iteration,
    addresses: Vec<DeviceAddress>,
    planner: Option<AutoPlanner>,
}

impl<'a> Job<'a> {
    fn new(iteration: &'a Iteration, has_planner: bool) -> Job<'a> {
        let runtime = subject::runtime();
        let planner = has_planner.then(|| AutoPlanner::begin(&runtime));
        let mut job = Job { runtime, iteration, addresses: vec![DeviceAddress::new(0); iteration.slots], planner };
        for steps in iteration.first.chunks(STEPS_PER_LOOK) {
            job.run(steps);
            job.look();
        }
        job.end_iteration();
        job
    }

    fn run(&mut self, steps: &[Step]) -> Duration {
        timed(|| run(&self.runtime, steps, &mut self.addresses))
    }

    fn look(&mut self) {
        if let Some(planner) = &mut self.planner {
            planner.look(&self.runtime, &NoShelf);
        }
    }

    /// How long the mark takes.
    fn end_iteration(&mut self) -> Duration {
        let marked = timed(|| self.runtime.mark_iteration());
        self.look();
        marked
    }

    fn run_once(&mut self) -> (Duration, u64) {
        let time = self.run(&self.iteration.steps);
        (time, self.iteration.pairs)
    }

    fn warm_up(mut self) -> Job<'a> {
        for _ in 0..WARM_UP {
            self.run_once();
            self.end_iteration();
        }
        self
    }

    fn plans_installed(&self) -> u64 {
        self.runtime.counters().get(Counter::PlansInstalled)
    }
}

/// Requests of the second iteration of a job, which is recorded, beside one that is not.
fn recorded(label: &str, _: &Trace, iteration: &Iteration) -> Compared {
    let second = |has_planner| {
        move || {
            let mut job = Job::new(iteration, has_planner);
            let done = job.run_once();
            assert!(!has_planner || job.planner.is_some_and(|planner| planner.is_recording()), "{label}");
            done
        }
    };
    compare(label, ROUNDS, second(true), second(false))
}

struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Requests while another thread makes plans with the lowest priority, as in a process, beside requests
/// while none does.
fn beside_planning(label: &str, trace: &Trace, iteration: &Iteration) -> Compared {
    let (plans, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let (mut with, mut without) = (Job::new(iteration, false).warm_up(), Job::new(iteration, false).warm_up());
    let once = |job: &mut Job<'_>, is_planning: bool| {
        plans.store(is_planning, Ordering::Relaxed);
        // The planner has begun, or has ended, after that.
        thread::sleep(Duration::from_millis(if is_planning { 2 } else { 300 }));
        let done = job.run_once();
        job.end_iteration();
        done
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            rustix::process::setpriority_process(None, 19).unwrap();
            while !is_over.load(Ordering::Relaxed) {
                if plans.load(Ordering::Relaxed) {
                    black_box(Plan::of_cycle(trace, 1).unwrap());
                } else {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        // Also where a round fails: the scope waits for the thread.
        let _ends = SetWhenDropped(&is_over);
        compare(label, ROUNDS, || once(&mut with, true), || once(&mut without, false))
    })
}

/// The mark at which a plan is installed, beside a mark without.
fn installed(label: &str, _: &Trace, iteration: &Iteration) -> Compared {
    let installing = || {
        let mut job = Job::new(iteration, true);
        for _ in 0..ITERATIONS_MAX {
            job.run_once();
            let marked = job.end_iteration();
            if job.plans_installed() > 0 {
                return (marked, 1);
            }
        }
        panic!("{label}: no plan after {ITERATIONS_MAX} iterations");
    };
    let mut without = Job::new(iteration, false);
    let marking = || {
        without.run_once();
        (without.end_iteration(), 1)
    };
    compare(label, ROUNDS, installing, marking)
}

type Measure = fn(&str, &Trace, &Iteration) -> Compared;

const MEASURED: [(&str, Measure); 3] = [
    ("pair while recorded", recorded),
    ("pair beside planning", beside_planning),
    ("mark that installs a plan", installed),
];

fn main() {
    let mut compared = Vec::new();
    for name in TRACES {
        let trace = trace(name);
        let iteration = Iteration::of(&trace, Bytes::ZERO);
        for (what, measure) in MEASURED {
            let label = format!("{what}, {name}");
            if support::is_wanted(&label) {
                compared.push(measure(&label, &trace, &iteration));
            }
        }
    }
    support::print(("ns", 1.0), &compared);
}
