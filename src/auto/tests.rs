//! A job over a simulated device, and somebody who looks after its plans.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::*;
use crate::clock::ManualClock;
use crate::context::{self, Pushed};
use crate::driver::sim::{SimDriver, SimOptions};
use crate::ids::{DeviceId, StreamId};
use crate::ladder::Ladder;
use crate::memory::Device;
use crate::pool::Request;
use crate::runtime::{Counters, RuntimeConfig, RuntimeStats};
use crate::session::PrivateSource;
use crate::store::Store;
use crate::trace::Phase;
use crate::units::DeviceAddress;

const STREAM: StreamId = StreamId(0);

/// One plan, and how often it was asked for.
#[derive(Debug, Default)]
struct OneShelf(RefCell<(Option<Plan>, Vec<Fingerprint>)>);

impl Shelf for OneShelf {
    fn find(&self, job: Fingerprint) -> Option<Plan> {
        let (plan, asked) = &mut *self.0.borrow_mut();
        asked.push(job);
        plan.clone().filter(|plan| plan.job.fingerprint == job)
    }

    fn keep(&self, plan: &Plan) {
        self.0.borrow_mut().0 = Some(plan.clone());
    }
}

struct Job {
    runtime: Runtime,
    planner: AutoPlanner,
    shelf: Rc<OneShelf>,
    has_marks: bool,
    /// Kept for good, and by the iteration to the next.
    weights: Vec<DeviceAddress>,
    carried: Vec<DeviceAddress>,
}

impl Job {
    fn new(has_marks: bool) -> Job {
        Job::beside(has_marks, Rc::default())
    }

    fn beside(has_marks: bool, shelf: Rc<OneShelf>) -> Job {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(8)])));
        let device = Device::open(sim, DeviceId(0)).unwrap();
        let store = Arc::new(Store::new(vec![Arc::clone(&device)]));
        let source = Arc::new(PrivateSource::new(store, DeviceId(0), Ladder::standard()));
        let clock = Arc::new(ManualClock::default());
        let runtime = Runtime::new(device, source, clock, RuntimeConfig::default(), Counters::private());
        let planner = AutoPlanner::begin(&runtime);
        let mut job = Job { runtime, planner, shelf, has_marks, weights: Vec::new(), carried: Vec::new() };
        job.weights = (0..40).map(|n| job.alloc(3 << 20 | n << 12)).collect();
        job
    }

    fn alloc(&mut self, bytes: u64) -> DeviceAddress {
        let context = context::here().key;
        let request = Request { stream: STREAM, context, ..Request::of(Bytes::new(bytes)) };
        let address = self.runtime.alloc(&request).unwrap();
        if self.has_marks {
            self.planner.look(&self.runtime, &*self.shelf);
        }
        address
    }

    fn free(&mut self, address: DeviceAddress) {
        self.runtime.free(address, STREAM).unwrap();
    }

    fn iteration(&mut self, layers: u64, scale: u64) {
        self.layers(layers, scale);
        self.end_iteration();
    }

    /// Layers up and down again, a gradient each that the next iteration frees.
    fn layers(&mut self, layers: u64, scale: u64) {
        std::mem::take(&mut self.carried).into_iter().for_each(|address| self.free(address));
        let mut kept = Vec::new();
        for layer in 0..layers {
            let work = self.alloc(scale * (5 << 20) + (layer << 14));
            kept.push(self.alloc(scale * (2 << 20) + (layer << 10)));
            self.free(work);
        }
        for (layer, address) in kept.into_iter().enumerate().rev() {
            let gradient = self.alloc(scale * (1 << 20) + ((layer as u64) << 9));
            self.carried.push(gradient);
            self.free(address);
        }
    }

    /// Something of each layer at one time, before the layers of an iteration.
    fn behind_evaluations(&mut self, rounds: u64, layers: u64, scale: u64) {
        for _ in 0..rounds {
            let all: Vec<DeviceAddress> = (0..layers).map(|n| self.alloc(scale * (3 << 20) + (n << 11))).collect();
            all.into_iter().for_each(|address| self.free(address));
        }
        self.iteration(layers, 1);
    }

    fn end_iteration(&mut self) {
        if self.has_marks {
            self.runtime.mark_iteration();
        }
        self.planner.look(&self.runtime, &*self.shelf);
        self.runtime.invariants().unwrap();
    }

    fn stats(&self) -> RuntimeStats {
        self.runtime.stats()
    }
}

#[test]
fn a_job_goes_by_its_plan_from_the_fourth_iteration_on() {
    let mut job = Job::new(true);
    for _ in 0..3 {
        job.iteration(20, 1);
    }
    let before = job.stats();
    assert_eq!((before.served.planned, job.planner.made()), (0, 1));
    for _ in 0..5 {
        job.iteration(20, 1);
        let stats = job.stats();
        assert!(stats.held <= before.peak_held, "{stats:?}");
    }
    let stats = job.stats();
    assert_eq!(stats.served.planned - before.served.planned, 5 * 60);
    assert_eq!((stats.planned.deviations(), stats.planned.hits), (0, 5 * 60));
    assert!(stats.static_pool > Bytes::mib(40) && stats.peak_held == before.peak_held, "{stats:?}");
}

#[test]
fn what_the_planned_iteration_leaves_for_good_is_in_no_place_of_the_plan() {
    let mut job = Job::new(true);
    job.iteration(20, 1);
    job.layers(20, 1);
    let statistics = job.alloc(30 << 20);
    job.weights.push(statistics);
    job.end_iteration();
    job.iteration(20, 1);
    let before = job.stats();
    (0..5).for_each(|_| job.iteration(20, 1));
    let stats = job.stats();
    assert_eq!(stats.served.planned - before.served.planned, 5 * 60);
    assert_eq!((stats.planned.deviations(), stats.peak_held), (0, before.peak_held));
}

#[test]
fn a_first_iteration_that_differs_delays_the_plan_by_one() {
    let mut job = Job::new(true);
    job.iteration(20, 3);
    for made in [0, 1, 1] {
        job.iteration(20, 1);
        assert_eq!(job.planner.made(), made);
    }
    let before = job.stats();
    job.iteration(20, 1);
    assert_eq!(job.stats().served.planned - before.served.planned, 60);
}

#[test]
fn a_job_that_differs_a_little_in_every_iteration_has_no_plan() {
    let mut job = Job::new(true);
    for n in 0..10 {
        job.layers(20, 1);
        let [one, other] = [2 * n, 2 * n + 1].map(|n| job.alloc((7 << 20) + (n << 12)));
        job.free(one);
        job.free(other);
        job.end_iteration();
    }
    assert!(matches!(job.planner.over(), Some(Over::Unlike)), "{:?}", job.planner.over());
    assert_eq!(job.planner.made(), 0);
}

#[test]
fn where_iterations_differed_half_as_many_in_a_row_have_to_be_alike() {
    let mut job = Job::new(true);
    for scale in [1, 2, 3, 1, 1, 4, 4] {
        job.iteration(20, scale);
    }
    assert_eq!(job.planner.made(), 0, "two of three lengths were alike, by chance");
    (0..3).for_each(|_| job.iteration(20, 4));
    assert_eq!(job.planner.made(), 1);
}

#[test]
fn what_differed_before_a_plan_says_nothing_of_the_job_behind_it() {
    let mut job = Job::new(true);
    for scale in [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7] {
        job.iteration(20, scale);
    }
    assert_eq!(job.planner.made(), 1);
    (0..14).for_each(|_| job.iteration(26, 2));
    assert_eq!(job.planner.made(), 2);
}

#[test]
fn what_is_idle_once_the_plan_is_there_is_given_back() {
    let mut job = Job::new(true);
    // A first iteration that takes much more than the others.
    job.iteration(20, 3);
    for _ in 0..9 {
        job.iteration(20, 1);
    }
    // What was live at one time may be needed again, and stays while nothing else wants it.
    let stats = job.stats();
    let granule = Bytes::mib(2);
    assert!(stats.static_pool > Bytes::ZERO, "{stats:?}");
    assert!(stats.held <= stats.peak_live + granule, "{} held, {} live at most", stats.held, stats.peak_live);
    job.runtime.give_back_idle(Bytes::MAX);
    let stats = job.stats();
    let needed = Bytes::mib(40 * 4) + stats.static_pool;
    assert!(stats.held <= needed, "{} held, {needed} needed", stats.held);
}

#[test]
fn a_job_that_changes_gets_another_plan_and_one_that_always_changes_does_not_get_one_each_time() {
    let mut job = Job::new(true);
    for _ in 0..5 {
        job.iteration(20, 1);
    }
    assert_eq!(job.planner.made(), 1);
    for _ in 0..14 {
        job.iteration(26, 2);
    }
    assert_eq!(job.planner.made(), 2);
    let before = job.stats();
    job.iteration(26, 2);
    assert_eq!(job.stats().served.planned - before.served.planned, 3 * 26);
    assert_eq!(job.stats().planned.deviations(), before.planned.deviations());
    for n in 0..60 {
        job.iteration(10 + n * 7 % 13, 1 + n % 3);
    }
    assert!(job.planner.made() <= 7, "{} plans", job.planner.made());
}

#[test]
fn kinds_of_iterations_that_come_twice_are_learned_and_the_next_run_knows_them() {
    // Of what fits beside the plan, and of more than that.
    for scale in [1, 4] {
        let shelf = Rc::new(OneShelf::default());
        let mut job = Job::beside(true, Rc::clone(&shelf));
        (0..5).for_each(|_| job.iteration(20, 1));
        assert_eq!((job.planner.made(), job.stats().planned.deviations()), (1, 0));
        let (mut surprises, mut held) = (Vec::new(), Vec::new());
        for rounds in [3, 5, 4, 9, 1] {
            let before = job.stats();
            job.behind_evaluations(rounds, 20, scale);
            surprises.push(job.stats().planned.deviations() - before.planned.deviations());
            held.push(job.stats().peak_held);
            (0..3).for_each(|_| job.iteration(20, 1));
        }
        // Seen first, recorded twice, and known.
        assert!(surprises[..3].iter().all(|surprises| *surprises > 0), "{surprises:?}");
        assert_eq!((&surprises[3..], job.planner.made()), (&[0, 0][..], 2), "{scale}: {surprises:?}");
        // Places are whole granules.
        let most = held[2] + Bytes::mib(2);
        assert!(job.stats().peak_held <= most, "more is held than before places were known");
        let detours = shelf.0.borrow().0.clone().unwrap().detours;
        assert!(!detours.is_empty());

        let mut job = Job::beside(true, shelf);
        (0..3).for_each(|_| job.iteration(20, 1));
        let held = job.stats().peak_held;
        (0..3).for_each(|_| job.iteration(20, 1));
        // Nothing is held for evaluations before one comes.
        assert_eq!((job.planner.made(), job.stats().peak_held), (0, held));
        job.behind_evaluations(7, 20, scale);
        job.iteration(20, 1);
        let stats = job.stats();
        assert_eq!((stats.planned.deviations(), stats.planned.detoured), (0, 7 * 20), "{scale}: {stats:?}");
    }
}

#[test]
fn a_job_of_which_no_two_iterations_are_alike_gets_no_detours() {
    let mut job = Job::new(true);
    (0..5).for_each(|_| job.iteration(30, 1));
    for n in 0..60 {
        job.behind_evaluations(1, 17 + n % 13, 2 + n);
        job.iteration(30, 1);
    }
    assert!(job.planner.made() <= 5, "{} plans", job.planner.made());
    assert!(job.shelf.0.borrow().0.as_ref().is_some_and(|plan| plan.detours.is_empty()));
}

#[test]
fn iterations_that_nobody_marks_are_found() {
    let mut job = Job::new(false);
    // Some 130 events an iteration.
    for _ in 0..700 {
        job.iteration(20, 1);
    }
    assert_eq!((job.planner.made(), job.planner.over()), (1, None));
    let before = job.stats();
    assert!(before.served.planned > 0, "{before:?}");
    job.iteration(20, 1);
    let stats = job.stats();
    assert_eq!(stats.served.planned - before.served.planned, 60);
    assert_eq!(stats.planned.deviations(), before.planned.deviations());
}

/// Micro-batches repeat for longer than a search waits, before the first mark.
fn long_iterations(has_contexts: bool) -> (AutoPlanner, RuntimeStats) {
    const MICRO_BATCHES: u64 = 5000;
    let mut job = Job::new(false);
    for _ in 0..5 {
        for micro_batch in 0..MICRO_BATCHES {
            let number = has_contexts.then_some(micro_batch as u32);
            let (phase, chunk) = (Phase::Other, None);
            let pushed = Pushed { phase, microbatch: number, chunk, module: "", is_dynamic: false };
            context::push(&pushed).unwrap();
            let kept: Vec<DeviceAddress> = (0..8).map(|n| job.alloc((2 << 20) + (n << 14))).collect();
            context::pop().unwrap();
            kept.into_iter().for_each(|address| job.free(address));
            if micro_batch % 50 == 0 {
                job.planner.look(&job.runtime, &*job.shelf);
            }
        }
        let step = job.alloc(40 << 20);
        job.free(step);
        job.runtime.mark_iteration();
        job.end_iteration();
    }
    let stats = job.stats();
    (job.planner, stats)
}

#[test]
fn marked_iterations_are_believed_however_long_they_are() {
    for has_contexts in [false, true] {
        let (planner, stats) = long_iterations(has_contexts);
        let requests = 8 * 5000 + 1;
        assert!(stats.served.planned >= 2 * requests, "{has_contexts}: {stats:?}");
        // What repeats is planned first where no context says that marks will come.
        assert_eq!(planner.made(), if has_contexts { 1 } else { 2 });
        assert!(planner.over().is_none());
    }
}

#[test]
fn where_nothing_repeats_the_job_is_served_as_before_and_it_is_said_why() {
    const ROOM: usize = 1 << 17;
    let mut job = Job::new(false);
    job.planner = AutoPlanner::with_room(&job.runtime, ROOM);
    let mut rng = crate::rng::Rng::new(1);
    while job.planner.over().is_none() {
        for _ in 0..1000 {
            let address = job.alloc(1 + rng.below(1 << 14));
            job.free(address);
        }
        job.planner.look(&job.runtime, &*job.shelf);
    }
    assert!(matches!(job.planner.over(), Some(Over::NoPeriod(events)) if *events == ROOM));
    assert_eq!(job.stats().served.planned, 0);
}

#[test]
fn a_plan_of_a_job_that_only_begins_alike_is_replaced_by_ones_own() {
    let shelf = Rc::new(OneShelf::default());
    let run = |scale| {
        let mut job = Job::beside(true, Rc::clone(&shelf));
        job.iteration(20, 1);
        (0..12).for_each(|_| job.iteration(20, scale));
        (job.planner.made(), job.stats(), job.runtime.counters().get(Counter::PlansRefused))
    };
    let large = run(4);
    let large_len = shelf.0.borrow().0.as_ref().unwrap().pool_len;
    let small = run(1);
    let small_len = shelf.0.borrow().0.as_ref().unwrap().pool_len;
    assert_eq!((large.0, large.2, small.0, small.2), (1, 0, 1, u64::from(TRIES_MAX)));
    assert!(small.1.served.planned >= 5 * 60 && small_len.get() * 3 < large_len.get(), "{small:?} {small_len}");
    // The next finds that.
    let again = run(1);
    assert_eq!((again.0, again.2, again.1.planned.deviations()), (0, 0, 0));
}

#[test]
fn a_job_that_ran_before_goes_by_its_plan_from_the_second_iteration_on() {
    let shelf = Rc::new(OneShelf::default());
    let run = |layers| {
        let mut job = Job::beside(true, Rc::clone(&shelf));
        (0..6).for_each(|_| job.iteration(layers, 1));
        (job.planner.made(), job.stats())
    };
    let (first, second, other) = (run(20), run(20), run(21));
    assert_eq!((first.0, second.0, other.0), (1, 0, 1));
    assert_eq!((first.1.served.planned, second.1.served.planned), (3 * 60, 4 * 60));
    assert_eq!(second.1.planned.deviations(), 0);
    assert!(second.1.peak_held <= first.1.peak_held, "{:?}", second.1);
    let asked = &shelf.0.borrow().1;
    assert!(asked.len() == 3 && asked[0] == asked[1] && asked[1] != asked[2], "{asked:?}");
}

/// The planner comes when it may: what the job has live then is gone when the plan is there.
#[test]
fn a_known_plan_lies_around_what_lasts_and_not_around_what_the_iteration_that_goes_on_has() {
    let shelf = Rc::new(OneShelf::default());
    let mut first = Job::beside(true, Rc::clone(&shelf));
    (0..6).for_each(|_| first.iteration(20, 1));
    // It looks only when it is told to.
    let mut second = Job::beside(false, Rc::clone(&shelf));
    second.layers(20, 1);
    second.runtime.mark_iteration();
    let begun: Vec<DeviceAddress> = (0..12).map(|n| second.alloc((7 << 20) + (n << 12))).collect();
    second.planner.look(&second.runtime, &*shelf);
    begun.into_iter().for_each(|address| second.free(address));
    second.layers(20, 1);
    let before = second.stats();
    for _ in 0..3 {
        second.runtime.mark_iteration();
        second.planner.look(&second.runtime, &*shelf);
        second.layers(20, 1);
        second.runtime.invariants().unwrap();
    }
    let stats = second.stats();
    assert_eq!(second.runtime.counters().get(Counter::PlansRefused), 0);
    assert_eq!((stats.served.planned, stats.planned.deviations()), (3 * 60, 0), "{stats:?}");
    assert_eq!(stats.peak_held, before.peak_held, "{stats:?}");
}

/// A layer of attention and eight experts, which get other numbers of tokens in every iteration, and most
/// of the requests; nothing says that they do but the paths.
fn routed_iteration(job: &mut Job, rng: &mut crate::rng::Rng, scale: u64) {
    let within = |module: &str| {
        let pushed = Pushed { phase: Phase::Forward, microbatch: None, chunk: None, module, is_dynamic: false };
        context::push(&pushed).unwrap();
    };
    for layer in 0..6 {
        for (part, bytes) in [("q", 4 << 20), ("k", 2 << 20), ("v", 3 << 20), ("out", 5 << 20), ("norm", 1 << 20)] {
            within(&format!("layers.{layer}.{part}"));
            let kept = job.alloc(bytes);
            job.free(kept);
            context::pop().unwrap();
        }
        for expert in 0..8 {
            within(&format!("layers.{layer}.experts.{expert}"));
            let kept = [10, 11].map(|bits| job.alloc((scale * (1 + rng.below(1000))) << bits));
            kept.into_iter().for_each(|address| job.free(address));
            context::pop().unwrap();
        }
    }
    job.end_iteration();
}

#[test]
fn dynamic_modules_of_a_running_job_are_found() {
    let shelf = Rc::new(OneShelf::default());
    let run = |seed| {
        let mut rng = crate::rng::Rng::new(seed);
        let mut job = Job::beside(true, Rc::clone(&shelf));
        (0..8).for_each(|_| routed_iteration(&mut job, &mut rng, 1));
        (job.planner.made(), job.stats())
    };
    let (first, second) = (run(1), run(2));
    assert_eq!((first.0, first.1.planned.deviations()), (1, 0), "{:?}", first.1);
    assert_eq!(first.1.served.planned, 5 * 30, "{:?}", first.1);
    // Another run is routed in another way, and is the same job.
    assert_eq!((second.0, second.1.planned.deviations()), (0, 0), "{:?}", second.1);
    assert_eq!(second.1.served.planned, 6 * 30, "{:?}", second.1);
}

#[test]
fn a_job_of_which_most_is_dynamic_has_no_plan() {
    let mut rng = crate::rng::Rng::new(1);
    let mut job = Job::new(true);
    (0..16).for_each(|_| routed_iteration(&mut job, &mut rng, 20));
    assert!(matches!(job.planner.over(), Some(Over::Dynamic)), "{:?}", job.planner.over());
    assert_eq!((job.planner.made(), job.stats().served.planned), (0, 0));
}
