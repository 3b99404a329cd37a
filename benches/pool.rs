//! The allocation path: one allocation and its free, in the order of real traces, through the whole runtime of a process.
//!
//! The floor does per call what an allocator behind a lock of the standard library cannot do without: taking and releasing it uncontended, a look-up of the address
//! in the same table, and a load of a guard, on the same addresses in the same order.
//!
//! What is recorded has the same run without a recorder for a floor. Between two rounds the recorder catches up: what is measured is what the job waits for.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

#[path = "support/iteration.rs"]
mod iteration;
#[path = "support/runtime.rs"]
mod subject;
mod support;

use std::hint::black_box;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use iteration::{Iteration, Step, run, trace};
use stitchd::clock::{Clock as _, SystemClock};
use stitchd::ids::StreamId;
use stitchd::limits::RECORD_AHEAD_MAX;
use stitchd::plan::Plan;
use stitchd::pool::AddressMap;
use stitchd::pool::Request;
use stitchd::record::{self, Written};
use stitchd::rng::Rng;
use stitchd::runtime::{Counter, Runtime, TapNumber};
use stitchd::trace::binary::Remarks;
use stitchd::units::{Bytes, DeviceAddress};
use subject::runtime;
use support::{compare, timed};

const ROUNDS: usize = 51;

/// Iterations until a job without a plan has found its blocks.
const WARM_UP: usize = 40;

/// What cannot be left out, for the addresses that the subject used.
struct Floor {
    table: Mutex<(AddressMap<usize>, Vec<u64>)>,
    calls: Vec<DeviceAddress>,
}

impl Floor {
    fn new(steps: &[Step], addresses: &[DeviceAddress]) -> Floor {
        let slot = |step: &Step| match step {
            Step::Alloc(slot, _) | Step::Free(slot) => *slot,
        };
        let calls: Vec<_> = steps.iter().map(|step| addresses[slot(step)]).collect();
        let mut table = AddressMap::default();
        for address in &calls {
            let next = table.len();
            table.entry(*address).or_insert(next);
        }
        let guards = vec![0; table.len()];
        Floor { table: Mutex::new((table, guards)), calls }
    }

    fn run(&self) -> u64 {
        let mut sum = 0;
        for address in &self.calls {
            let table = self.table.lock().unwrap();
            let (table, guards) = &*table;
            let at = black_box(table[address]);
            sum += guards[at];
        }
        sum
    }
}

fn measure(name: String, iteration: &Iteration, runtime: &Runtime, warm_up: usize) -> support::Compared {
    let mut addresses = vec![DeviceAddress::new(0); iteration.slots];
    run(runtime, &iteration.first, &mut addresses);
    runtime.mark_iteration();
    for _ in 0..warm_up {
        run(runtime, &iteration.steps, &mut addresses);
        runtime.mark_iteration();
    }
    let floor = Floor::new(&iteration.steps, &addresses);
    compare(
        name,
        ROUNDS,
        || {
            let time = timed(|| run(runtime, &iteration.steps, &mut addresses));
            runtime.mark_iteration();
            (time, iteration.pairs)
        },
        || {
            let time: Duration = timed(|| floor.run());
            (time, iteration.pairs)
        },
    )
}

/// Live blocks of 64 sizes; again and again some are freed, and as many of the same sizes allocated in another order. There is always an exact match, and the same
/// blocks are hardly ever live twice, so it is searched for each time.
fn at_random(name: String) -> support::Compared {
    const LIVE: usize = 512;
    const FREED: usize = 64;
    const GROUPS: usize = 64;
    fn request(slot: usize) -> Request {
        Request::of(Bytes::mib(2 + 2 * (slot as u64 % 64)))
    }
    let (runtime, mut rng) = (runtime(), Rng::new(1));
    let mut steps = move || -> Vec<Step> {
        let mut steps = Vec::new();
        let mut slots: Vec<usize> = (0..LIVE).collect();
        for _ in 0..GROUPS {
            for order in [Step::Free as fn(usize) -> Step, |slot| Step::Alloc(slot, request(slot))] {
                // Those that come first are the group; the second time in another order.
                let among = if steps.len() % (2 * FREED) == 0 { LIVE } else { FREED };
                for at in 0..FREED {
                    slots.swap(at, at + rng.index(among - at));
                    steps.push(order(slots[at]));
                }
            }
        }
        steps
    };
    let mut addresses: Vec<_> = (0..LIVE).map(|slot| runtime.alloc(&request(slot)).unwrap()).collect();
    for _ in 0..WARM_UP {
        run(&runtime, &steps(), &mut addresses);
    }
    let pairs = (GROUPS * FREED) as u64;
    let floor = Floor::new(&steps(), &addresses);
    let subject = || {
        let steps = steps();
        (timed(|| run(&runtime, &steps, &mut addresses)), pairs)
    };
    compare(name, ROUNDS, subject, || (timed(|| floor.run()), pairs))
}

/// What varies, where a plan leaves room: of an iteration of a job of which half does, these requests alone, each timed by itself, less what reading the clock twice takes. The floor is half of the other benches' pair, on the same addresses.
fn reused(label: String, name: &str) -> support::Compared {
    let trace = trace(name);
    let iteration = Iteration::of(&trace, Bytes::ZERO);
    let runtime = runtime();
    runtime.install_plan(&Plan::from_trace(&trace, 1).unwrap()).unwrap();
    let mut addresses = vec![DeviceAddress::new(0); iteration.slots];
    run(&runtime, &iteration.first, &mut addresses);
    runtime.mark_iteration();
    run(&runtime, &iteration.steps, &mut addresses);
    runtime.mark_iteration();
    let varying = iteration.steps.iter().filter(|step| matches!(step, Step::Alloc(_, request) if request.is_dynamic));
    let floor = Floor::new(&varying.copied().collect::<Vec<Step>>(), &addresses);
    let clock = SystemClock::new();
    let counts = || [Counter::RequestsReuse, Counter::RequestsPlanned].map(|counter| runtime.counters().get(counter));
    let before = counts();
    let compared = compare(
        label,
        ROUNDS,
        || {
            let (mut time, mut count) = (Duration::ZERO, 0);
            for step in &iteration.steps {
                match step {
                    Step::Alloc(slot, request) if request.is_dynamic => {
                        let reused = runtime.counters().get(Counter::RequestsReuse);
                        let began = clock.now();
                        let address = black_box(runtime.alloc(request).unwrap());
                        let ended = clock.now();
                        let empty = clock.now() - ended;
                        addresses[*slot] = address;
                        if runtime.counters().get(Counter::RequestsReuse) > reused {
                            time += (ended - began).saturating_sub(empty);
                            count += 1;
                        }
                    }
                    other => run(&runtime, std::slice::from_ref(other), &mut addresses),
                }
            }
            runtime.mark_iteration();
            (time, count)
        },
        || (timed(|| floor.run()), floor.calls.len() as u64),
    );
    let [reused, planned] = std::array::from_fn(|at| counts()[at] - before[at]);
    assert!(reused * 4 > planned && reused > 1000, "{name}: much of it is served so, or this measures something else");
    compared
}

/// A recorder in a thread of its own, as a process has one, that says when it has caught up.
struct Behind {
    tap: TapNumber,
    /// Looks that found nothing.
    idle: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<Remarks>,
}

impl Behind {
    fn of(runtime: &Runtime) -> Behind {
        let (tap, mut recorder) = record::begin(0, Written::new(std::io::sink()).unwrap(), RECORD_AHEAD_MAX);
        let tap = runtime.record_into(tap);
        let idle = Arc::new(AtomicU64::new(0));
        let looks = Arc::clone(&idle);
        let thread = std::thread::spawn(move || {
            loop {
                let drained = recorder.drain(usize::MAX);
                if !drained.goes_on {
                    return recorder.remarks();
                }
                looks.fetch_add(u64::from(drained.records == 0), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Behind { tap, idle, thread }
    }

    /// Waits until it has everything. The look that is under way may have begun before.
    fn catch_up(&self) {
        let before = self.idle.load(Ordering::Relaxed);
        while self.idle.load(Ordering::Relaxed) < before + 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A planned job that is recorded, beside the same job that is not.
fn recorded(label: String, name: &str) -> support::Compared {
    let trace = trace(name);
    let iteration = Iteration::of(&trace, Bytes::ZERO);
    let plan = Plan::from_trace(&trace, 1).unwrap();
    let begun = || {
        let runtime = runtime();
        runtime.install_plan(&plan).unwrap();
        let mut addresses = vec![DeviceAddress::new(0); iteration.slots];
        run(&runtime, &iteration.first, &mut addresses);
        runtime.mark_iteration();
        (runtime, addresses)
    };
    let (mut with, mut without) = (begun(), begun());
    let behind = Behind::of(&with.0);
    let round = |job: &mut (Runtime, Vec<DeviceAddress>)| {
        let time = timed(|| run(&job.0, &iteration.steps, &mut job.1));
        job.0.mark_iteration();
        behind.catch_up();
        (time, iteration.pairs)
    };
    let compared = compare(label, ROUNDS, || round(&mut with), || round(&mut without));
    with.0.stop_recording(behind.tap);
    let remarks = behind.thread.join().unwrap();
    assert_eq!(remarks.dropped, 0, "{name}: every event is recorded, or this measures something else");
    compared
}

/// What a recorder takes for an event, of ten million of a job that repeats itself, beside what its runtime takes to note it. Says how long the file is.
fn ten_million(label: String) -> support::Compared {
    const EVENTS: u64 = 10_000_000;
    const AT_ONCE: u64 = 50_000;
    let trace = trace("opt-13b-Z3-RO");
    let iteration = Iteration::of(&trace, Bytes::ZERO);
    let mut bytes = Vec::new();
    let (mut tap, mut recorder) = record::begin(0, Written::new(&mut bytes).unwrap(), RECORD_AHEAD_MAX);
    let (mut noting, mut writing, mut events) = (Duration::ZERO, Duration::ZERO, 0);
    let mut steps = iteration.steps.iter().cycle();
    while events < EVENTS {
        noting += timed(|| {
            for step in steps.by_ref().take(AT_ONCE as usize) {
                match step {
                    Step::Alloc(slot, request) => tap.alloc(request, DeviceAddress::new(512 * *slot as u64)),
                    Step::Free(slot) => tap.free(DeviceAddress::new(512 * *slot as u64), StreamId::DEFAULT, false),
                }
            }
        });
        writing += timed(|| recorder.drain(usize::MAX));
        events += AT_ONCE;
    }
    let remarks = recorder.remarks();
    drop(recorder.finish());
    eprintln!(
        "{events} events in {} bytes, {:.3} for each: {remarks:?}",
        bytes.len(),
        bytes.len() as f64 / events as f64
    );
    let per_event = |time: Duration| time.as_nanos() as f64 / events as f64;
    let (nanos, floor) = (per_event(writing), per_event(noting));
    // One round: there is no other.
    support::Compared { name: label, nanos, floor, p99: nanos, floor_p99: floor }
}

fn main() {
    let mut compared = Vec::new();
    for name in ["gpt2-345m-VR", "gpt2-medium-hf", "opt-13b-Z3-RO", "resnet50-olla"] {
        let label = format!("planned pair recorded, {name}");
        if support::is_wanted(&label) {
            compared.push(recorded(label, name));
        }
    }
    let label = "event in a file, of ten million";
    if support::is_wanted(label) {
        compared.push(ten_million(label.to_owned()));
    }
    for name in ["gpt2-345m-VR", "gpt2-medium-hf", "opt-13b-Z3-RO", "resnet50-olla"] {
        let label = format!("planned pair, {name}");
        if !support::is_wanted(&label) {
            continue;
        }
        let trace = trace(name);
        let runtime = runtime();
        runtime.install_plan(&Plan::from_trace(&trace, 1).unwrap()).unwrap();
        let before = runtime.stats().served;
        let iteration = Iteration::of(&trace, Bytes::ZERO);
        compared.push(measure(label, &iteration, &runtime, 3));
        let served = runtime.stats().served;
        let others = served.pool - before.pool;
        assert_eq!(others, 0, "{name}: every request is served from the plan, or this measures something else");
    }
    let label = "request that varies, qwen-moe-V-last";
    if support::is_wanted(label) {
        compared.push(reused(label.to_owned(), "qwen-moe-V-last"));
    }
    for name in ["gpt2-345m-VR", "gpt2-medium-hf", "opt-13b-Z3-RO", "resnet50-olla"] {
        let label = format!("unplanned pair, {name}");
        if !support::is_wanted(&label) {
            continue;
        }
        let iteration = Iteration::of(&trace(name), Bytes::ZERO);
        let runtime = runtime();
        compared.push(measure(label, &iteration, &runtime, WARM_UP));
        let settled = runtime.stats();
        run_once_more(&runtime, &iteration);
        let after = runtime.stats();
        assert_eq!(
            (settled.pages.new_places, settled.held),
            (after.pages.new_places, after.held),
            "{name}: the job makes no driver calls, or this measures something else"
        );
    }
    let label = "unplanned pair, at random";
    if support::is_wanted(label) {
        compared.push(at_random(label.to_owned()));
    }
    support::print(("ns", 1.0), &compared);
}

fn run_once_more(runtime: &Runtime, iteration: &Iteration) {
    run(runtime, &iteration.steps, &mut vec![DeviceAddress::new(0); iteration.slots]);
}
