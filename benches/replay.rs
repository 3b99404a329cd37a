//! A replay: the operations of a whole job through each pool, on traces that ship with the project.
//!
//! The floor is the replay itself: the same steps through an allocator that hands out the next address and keeps nothing. What is above it is the pool's. For `caching` there is
//! a peer to hold it against: PyTorch's own allocator takes 150 to 240 ns per operation.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

mod support;

use std::path::Path;

use stitchd::clock::SystemClock;
use stitchd::plan::Plan;
use stitchd::replay::allocator::{Allocator, OutOfMemory, Reserved};
use stitchd::replay::calls::CallSum;
use stitchd::replay::script::{Asked, Script, Step};
use stitchd::replay::{Job, PoolName, Setup, Watch, repeat, replay, run};
use stitchd::trace::Trace;
use stitchd::units::DeviceAddress;
use support::{compare, timed};

const ROUNDS: usize = 5;

/// Hands out the next address.
#[derive(Default)]
struct Counter(u64);

impl Allocator for Counter {
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        self.0 += asked.bytes.get();
        Ok(DeviceAddress::new(self.0))
    }

    fn free(&mut self, _slot: u32) {}

    fn completed(&mut self, _slot: u32) {}

    fn record_stream(&mut self, _slot: u32, _stream: stitchd::ids::StreamId) {}

    fn reserved(&self) -> Reserved {
        Reserved::default()
    }

    fn calls(&self) -> CallSum {
        CallSum::default()
    }
}

fn trace(name: &str, times: u32) -> Trace {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let trace = stitchd::trace::import::read_file(&folder.join(format!("{name}.csv.zst"))).unwrap().trace;
    if times == 0 { trace } else { repeat(&trace, times) }
}

fn main() {
    let setup = Setup { planned_iteration: Some(1), ..Setup::default() };
    let clock = SystemClock::new();
    let mut compared = Vec::new();
    // The last is a job of 865,000 requests.
    for (job, times) in [("gpt2-medium-hf", 0), ("qwen-moe-V-last", 0), ("gpt2-345m-VR", 0), ("gpt2-345m-VR", 47)] {
        let label = |pool: &str| match times {
            0 => format!("{job}, {pool}"),
            _ => format!("{job} --repeat {times}, {pool}"),
        };
        let mut rows: Vec<(String, PoolName)> =
            PoolName::ALL.into_iter().map(|(name, pool)| (label(name), pool)).collect();
        rows.retain(|(name, ..)| support::is_wanted(name));
        if rows.is_empty() {
            continue;
        }
        let trace = trace(job, times);
        let script = Script::of(&trace, 0);
        let is_operation = |step: &&Step| matches!(step, Step::Alloc(_) | Step::Free { .. });
        let operations = script.steps.iter().filter(is_operation).count() as u64;
        let plan = Plan::from_trace(&trace, 1).unwrap();
        for (name, pool) in rows {
            let has_plan = pool == PoolName::StitchdPlan;
            let job =
                Job { trace: &trace, profile: &trace, script: &script, plan: has_plan.then_some(&plan), left: None };
            compared.push(compare(
                name,
                ROUNDS,
                || {
                    let done = replay(pool, job, &setup, Watch::default(), &clock, &|_| ()).unwrap();
                    (done.run.time, operations)
                },
                || {
                    let mut counter = Counter::default();
                    (timed(|| run(&script, &mut counter, Watch::default(), &clock, &|_| ())), operations)
                },
            ));
        }
    }
    support::print(("ns/operation", 1.0), &compared);
}
