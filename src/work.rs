//! Work that is counted: a search that may do so much of it finds the same on every machine, and one that is stopped says how much it did.
//!
//! Not for: what a unit is. Whoever works says so, and takes as many as it does.
//!
//! Invariant: unless somebody says stop, what is found depends on the units and the seed alone, however many cores there are ([`Work::race`]).

use std::fmt;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Whether somebody wants an answer now.
pub type Stop = Arc<dyn Fn() -> bool + Send + Sync>;
/// Hears of each better answer: what it is worth, and the units that were done until then.
pub type Told = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What a search may do.
#[derive(Clone, Default)]
pub struct Budget {
    /// Units of work.
    pub units: u64,
    /// Where chance begins: another number is another search.
    pub seed: u64,
    /// Asked many times a second: whether to stop with what there is. What is found then depends on when.
    pub stop: Option<Stop>,
    /// Hears how it goes.
    pub told: Option<Told>,
}

impl Budget {
    /// So much, whatever comes.
    pub const fn of(units: u64) -> Budget {
        Budget { units, seed: 0, stop: None, told: None }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget").field("units", &self.units).field("seed", &self.seed).finish_non_exhaustive()
    }
}

/// Units that may yet be done.
pub(crate) struct Work {
    left: u64,
    done: u64,
    /// What was done before this part of it began.
    before: u64,
    budget: Budget,
    /// `stop` is asked again when so many are done.
    asked_at: u64,
    /// Of a race: the units in which another has come in.
    in_after: Option<Arc<AtomicU64>>,
}

/// `stop` is asked each time that so many units are done.
pub(crate) const ASKED_EVERY: u64 = 1 << 16;
/// How many race. It does not depend on the machine, and most have two cores.
const LANES: usize = 2;

impl Work {
    pub(crate) fn of(budget: &Budget) -> Work {
        Work { left: budget.units, done: 0, before: 0, budget: budget.clone(), asked_at: ASKED_EVERY, in_after: None }
    }

    /// Does so much of it; says whether to go on.
    pub(crate) fn take(&mut self, units: u64) -> bool {
        self.done += units;
        let is_there = self.left >= units;
        self.left = self.left.saturating_sub(units);
        if self.done >= self.asked_at {
            self.asked_at = self.done + ASKED_EVERY;
            if self.is_stopped() || self.is_beaten() {
                self.left = 0;
            }
        }
        is_there && self.left > 0
    }

    pub(crate) fn is_over(&self) -> bool {
        self.left == 0
    }

    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// Asked whether to stop, for work that is counted elsewhere.
    pub(crate) fn stop(&self) -> Option<Stop> {
        self.budget.stop.clone()
    }

    /// Where chance begins.
    pub(crate) fn seed(&self) -> u64 {
        self.budget.seed
    }

    /// There is a better answer, worth so much.
    pub(crate) fn tell(&self, worth: u64) {
        if let Some(told) = &self.budget.told {
            told(worth, self.before + self.done);
        }
    }

    /// Does something with so much of it at most.
    pub(crate) fn with<T>(&mut self, units: u64, does: impl FnOnce(&mut Work) -> T) -> T {
        let mut part = self.part(units.min(self.left));
        let answer = does(&mut part);
        self.done += part.done;
        self.left = self.left.saturating_sub(part.done);
        if part.left == 0 && (self.is_stopped() || self.is_beaten()) {
            self.left = 0;
        }
        answer
    }

    /// Does something twice at the same time, with half of the work each and another seed, until one of them says that nothing can be better. Whoever comes in with less work done is alone in the answer:
    /// the other's is what it had when it was told so, and of no use.
    pub(crate) fn race<T: Send>(&mut self, does: impl Fn(usize, &mut Work) -> (T, bool) + Sync) -> Vec<T> {
        let in_after = Arc::new(AtomicU64::new(u64::MAX));
        let run = |lane: usize| {
            let seed = self.budget.seed.wrapping_mul(LANES as u64).wrapping_add(lane as u64);
            let budget = Budget { seed, ..self.budget.clone() };
            let in_after = Some(Arc::clone(&in_after));
            let mut work = Work { budget, in_after, ..self.part(self.left / LANES as u64) };
            let (answer, is_in) = does(lane, &mut work);
            if is_in {
                work.in_after.iter().for_each(|at| {
                    at.fetch_min(work.before + work.done, Ordering::Relaxed);
                });
            }
            (answer, is_in, work.done)
        };
        let ran: Vec<(T, bool, u64)> = thread::scope(|scope| {
            let others: Vec<_> = (1..LANES).map(|lane| scope.spawn(move || run(lane))).collect();
            let others = others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            [run(0)].into_iter().chain(others.collect::<Vec<_>>()).collect()
        });
        let first = ran.iter().filter(|(_, is_in, _)| *is_in).map(|(.., done)| *done).min();
        let done = first.map_or(ran.iter().map(|(.., done)| done).sum(), |first| LANES as u64 * first);
        self.done += done;
        self.left = self.left.saturating_sub(done);
        if self.is_stopped() || self.is_beaten() {
            self.left = 0;
        }
        let mut ran = ran.into_iter();
        match first {
            Some(first) => {
                ran.find(|(_, is_in, done)| *is_in && *done == first).map(|(answer, ..)| answer).into_iter().collect()
            }
            None => ran.map(|(answer, ..)| answer).collect(),
        }
    }

    fn part(&self, units: u64) -> Work {
        Work {
            left: units,
            done: 0,
            before: self.before + self.done,
            budget: self.budget.clone(),
            asked_at: ASKED_EVERY,
            in_after: self.in_after.clone(),
        }
    }

    /// Somebody wants an answer now.
    pub(crate) fn is_stopped(&self) -> bool {
        self.budget.stop.as_ref().is_some_and(|stop| stop())
    }

    fn is_beaten(&self) -> bool {
        self.in_after.as_ref().is_some_and(|at| at.load(Ordering::Relaxed) < self.before + self.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_says_stop_is_heard_also_in_parts_of_it() {
        let asked = Arc::new(AtomicU64::new(0));
        let ask = Arc::clone(&asked);
        let stop: Stop = Arc::new(move || ask.fetch_add(1, Ordering::Relaxed) >= 2);
        let mut stopped = Work::of(&Budget { units: u64::MAX / 16, stop: Some(stop), ..Budget::default() });
        while !stopped.is_over() {
            stopped.with(10_000, |share| while share.take(100) {});
            stopped.with(100 * ASKED_EVERY, |share| while share.take(100) {});
        }
        assert!(asked.load(Ordering::Relaxed) >= 3 && stopped.done() < 200 * ASKED_EVERY, "{}", stopped.done());
    }

    #[test]
    fn a_part_has_no_more_than_the_whole_and_the_whole_counts_it() {
        let mut work = Work::of(&Budget::of(1_000));
        let units = |work: &mut Work| (0..).take_while(|_| work.take(10)).count();
        assert_eq!(work.with(300, units), 29);
        assert_eq!((work.done(), work.left()), (300, 700));
        assert_eq!(work.with(5_000, units), 69);
        assert_eq!((work.done(), work.is_over()), (1_000, true));
    }

    /// Works in steps of ten until it is in.
    fn runs(until: u64) -> impl Fn(&mut Work) -> bool {
        move |work| {
            while work.done() < until {
                if !work.take(10) {
                    return false;
                }
            }
            true
        }
    }

    #[test]
    fn of_two_that_race_the_one_with_less_work_is_the_answer_whoever_is_quicker() {
        const MUCH: u64 = 100 * ASKED_EVERY;
        for (ends, winner) in
            [([500, 900], 0), ([MUCH, 700], 1), ([700, MUCH], 0), ([MUCH / 4, MUCH / 5], 1), ([800, 800], 0)]
        {
            for late in [None, Some(0), Some(1)] {
                let mut work = Work::of(&Budget { units: 10 * MUCH, seed: 21, ..Budget::default() });
                let answers = work.race(|lane, work| {
                    if late == Some(lane) {
                        thread::sleep(std::time::Duration::from_millis(20));
                    }
                    let is_in = runs(ends[lane])(work);
                    ((lane, work.seed()), is_in)
                });
                assert_eq!(answers, [(winner, 42 + winner as u64)], "{ends:?}");
                assert_eq!(work.done(), 2 * ends[winner], "{ends:?}");
            }
        }
        // Where none comes in there are two, of all of the work.
        let mut work = Work::of(&Budget::of(4_000));
        assert_eq!(work.race(|lane, work| (lane, runs(MUCH)(work))), [0, 1]);
        assert_eq!((work.done(), work.is_over()), (4_000, true));
    }

    #[test]
    fn better_answers_are_told_with_the_work_until_then() {
        let heard = Arc::new(std::sync::Mutex::new(Vec::new()));
        let told: Told = {
            let heard = Arc::clone(&heard);
            Arc::new(move |worth, units| heard.lock().unwrap().push((worth, units)))
        };
        let mut work = Work::of(&Budget { units: 1_000, told: Some(told), ..Budget::default() });
        work.take(100);
        work.tell(9);
        work.with(500, |part| {
            part.take(50);
            part.tell(8);
        });
        assert_eq!(*heard.lock().unwrap(), [(9, 100), (8, 150)]);
    }
}
