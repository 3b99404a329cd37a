//! Threads that race on one stream, each with a lane of its own.

use super::{Bench, UNIT, plan};
use crate::ids::StreamId;
use crate::plan::Lane;
use crate::pool::Request;
use crate::pool::planned::Served;
use crate::trace::ContextKey;
use crate::units::Bytes;

/// Two threads that race, with a list each, in turns: each request goes at once. Both lists have an entry of 17 units at every place that `alike` says.
struct Race {
    bench: Bench,
    lists: [Vec<u64>; 2],
}

impl Race {
    fn new(alike: impl Fn(u64) -> bool) -> Race {
        let list =
            |of: u64| (0..50).map(|at| if alike(at) { 17 } else { 100 * of + at * 7 % 50 }).collect::<Vec<u64>>();
        let lists = [list(1), list(2)];
        let units: Vec<(u64, u64)> = (0..100).map(|at| (lists[at % 2][at / 2], 300 * (at % 2) as u64)).collect();
        let mut plan = plan(&units, 0);
        for (at, entry) in plan.entries.iter_mut().enumerate() {
            entry.lane = Lane { stream: StreamId::DEFAULT, role: 1 + at as u32 % 2 };
            entry.context = ContextKey::NONE;
        }
        Race { bench: Bench::of(&plan), lists }
    }

    /// Whether a request of a thread is served by the plan.
    fn ask(&mut self, thread: u32, units: u64) -> bool {
        let request = Request { thread, context: ContextKey::NONE, ..Request::of(Bytes::new(units * UNIT)) };
        let served = self.bench.pool.alloc(&request);
        self.bench.pool.invariants().unwrap();
        match served {
            Served::At(address) => self.bench.pool.free(address).is_some(),
            Served::Reused(address) => self.bench.pool.free(address).is_none(),
            _ => false,
        }
    }

    /// How many of an iteration's hundred are, where these threads have the lists; after each comes somebody else.
    fn iteration(&mut self, threads: [u32; 2], mut after: impl FnMut(&mut Race)) -> usize {
        let mut served = 0;
        for at in 0..50 {
            for (thread, list) in threads.into_iter().zip([1, 0]) {
                served += usize::from(self.ask(thread, self.lists[list][at]));
                after(self);
            }
        }
        self.bench.pool.mark_iteration();
        served
    }
}

#[test]
fn threads_whose_lists_begin_alike_each_find_their_own() {
    let mut race = Race::new(|at| at == 0);
    let first = race.iteration([40, 41], |_| ());
    assert!(first > 30, "{first}");
    assert_eq!([0; 3].map(|_| race.iteration([40, 41], |_| ())), [100; 3]);
}

#[test]
fn a_thread_that_nobody_knows_takes_nobodys_lane_and_one_that_ends_leaves_its_own() {
    let mut race = Race::new(|at| at % 2 == 0);
    race.iteration([1, 0], |_| ());
    assert_eq!(race.iteration([1, 0], |race| assert!(!race.ask(90, 17))), 100);
    // Somebody else does from now on what one of them did.
    assert_eq!(race.iteration([1, 50], |_| ()), 50);
    assert_eq!(race.iteration([1, 50], |_| ()), 100);
}

#[test]
fn a_thread_that_no_plan_knows_costs_the_others_no_lane_for_good() {
    for renewed_every in [1, 100] {
        let mut race = Race::new(|at| at % 10 == 0);
        let mut all = Vec::new();
        for iteration in 0..12_u32 {
            let threads = [1, if iteration < 3 { 0 } else { 50 + iteration / renewed_every }];
            all.push(race.iteration(threads, |race| {
                race.ask(90, 17);
                race.ask(90, 777);
            }));
        }
        // One that is made anew in each iteration may lose every other.
        let sum: usize = all[4..].iter().sum();
        assert!(sum >= 8 * 70 && all[4..].windows(2).all(|pair| pair[0] + pair[1] >= 140), "{all:?}");
    }
}

#[test]
fn what_a_thread_asks_for_beyond_its_iteration_and_behind_it_is_not_counted_together() {
    let mut race = Race::new(|at| at == 0);
    let mut all = Vec::new();
    for iteration in 0..8 {
        if iteration == 5 {
            race.ask(40, 3000);
        }
        let mut served = 0;
        for at in 0..50 {
            for (thread, list) in [40, 41].into_iter().zip([1, 0]) {
                served += usize::from(race.ask(thread, race.lists[list][at]));
            }
        }
        if iteration == 4 {
            for one in 0..10 {
                race.ask(40, 4000 + one);
            }
        }
        race.bench.pool.mark_iteration();
        all.push(served);
    }
    assert_eq!(all[5..], [100, 100, 100]);
}
