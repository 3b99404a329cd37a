//! What served last time. A job that repeats itself asks for the same again, so the block that served this request in the last iteration is tried before any
//! search. It is a guess and nothing more: whoever asks looks whether the block is there still, has the right size, and is idle.
//!
//! The tape holds the last blocks that served, in their order. The job is taken to be at a fixed distance behind where it was once before, the
//! *lag*: one iteration where iterations are marked, else what the last sizes say.
//!
//! By place in the iteration, and not by what served just before, because that is what lets a job settle: up to the first request that no block of its size is
//! idle for, an iteration is served as the last one was, so the block that was made for that request is idle when its turn comes again.

use std::collections::HashMap;

use super::cards::CardId;
use crate::rng::mix;

/// Steps that are remembered, 16 bytes each and about 24 more for those that were searched for: iterations up to so many requests are followed.
const STEPS: usize = 1 << 17;
/// How far ahead a size is looked for that is not the expected one: so many requests may be missing.
const WINDOW: u64 = 16;
/// How many requests in a row may be too many before the job is taken to be elsewhere.
const STRAYS_MAX: u32 = 16;
/// How many sizes tell where the job is.
const RUN: u64 = 8;

/// Somebody was served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// Number of the block.
    pub(super) birth: u64,
    pub(super) card: CardId,
    pub(super) granules: u32,
}

#[derive(Debug)]
pub(super) struct Tape {
    /// The last steps, each at its number modulo [`STEPS`], packed: zeros take no memory until they are written to.
    steps: Box<[[u64; 2]; STEPS]>,
    /// Steps so far: the number of the next.
    head: u64,
    /// How many steps ago the job was where it is now; 0 where nobody knows.
    lag: u64,
    /// Requests in a row that were not expected.
    strays: u32,
    /// `head` when the last iteration ended.
    marked: u64,
    /// The number of the step that followed a run of sizes, last time.
    followers: HashMap<u64, u64>,
}

impl Default for Tape {
    fn default() -> Tape {
        let steps = vec![[0; 2]; STEPS].into_boxed_slice().try_into().expect("there are so many");
        Tape { steps, head: 0, lag: 0, strays: 0, marked: 0, followers: HashMap::new() }
    }
}

impl Tape {
    /// Requests that were served.
    pub(super) fn served(&self) -> u64 {
        self.head
    }

    /// Who should serve next.
    #[inline]
    pub(super) fn expected(&self) -> Option<Step> {
        (self.lag != 0).then(|| self.step(self.head.wrapping_sub(self.lag)))
    }

    #[inline]
    fn step(&self, number: u64) -> Step {
        let [birth, what] = self.steps[number as usize % STEPS];
        Step { birth, card: (what >> 32) as CardId, granules: what as u32 }
    }

    /// The expected block, or another one of its size where that could not, serves.
    #[inline]
    pub(super) fn push(&mut self, step: Step) {
        let what = u64::from(step.card) << 32 | u64::from(step.granules);
        self.steps[self.head as usize % STEPS] = [step.birth, what];
        self.head += 1;
    }

    /// The expected block could not serve a request of this size. True when another is expected now.
    pub(super) fn realign(&mut self, granules: u32) -> bool {
        if self.expected().is_some_and(|step| step.granules == granules) {
            // The job is where it seems to be; only the block is not idle.
            self.strays = 0;
            return false;
        }
        let is_at = |tape: &Tape, lag: u64| tape.step(tape.head - lag).granules == granules;
        if let Some(skipped) = (1..WINDOW.min(self.lag)).find(|skipped| is_at(self, self.lag - skipped)) {
            self.lag -= skipped;
            return true;
        }
        self.strays += 1;
        let found = self.run().and_then(|run| self.followers.get(&run)).map(|found| self.head - found);
        match found {
            Some(lag) if lag != self.lag && lag < STEPS as u64 && is_at(self, lag) => {
                self.lag = lag;
                true
            }
            _ => false,
        }
    }

    /// A block serves that was searched for.
    pub(super) fn record(&mut self, step: Step) {
        let was_expected = self.expected().is_some_and(|expected| expected.granules == step.granules);
        if let Some(run) = self.run() {
            if self.followers.len() >= STEPS {
                self.followers.clear();
            }
            self.followers.insert(run, self.head);
        }
        self.push(step);
        if self.lag == 0 || was_expected {
            return;
        }
        // One request too many: the next one is still expected where this one was.
        self.lag += 1;
        if self.strays > STRAYS_MAX || self.lag >= STEPS as u64 {
            (self.lag, self.strays) = (0, 0);
        }
    }

    /// An iteration ends: the next request is the first of the next one.
    pub(super) fn mark_iteration(&mut self) {
        let len = self.head - self.marked;
        self.marked = self.head;
        self.lag = if len < STEPS as u64 { len } else { 0 };
        self.strays = 0;
    }

    /// The last sizes, in their order.
    fn run(&self) -> Option<u64> {
        let first = self.head.checked_sub(RUN)?;
        Some((first..self.head).fold(0, |run, number| mix(run ^ u64::from(self.step(number).granules))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a list of sizes, each served by the block with its place in the list; says how many were guessed.
    fn play(tape: &mut Tape, sizes: &[u32]) -> usize {
        let mut guessed = 0;
        for (card, granules) in (0..).zip(sizes) {
            let guess = |tape: &Tape| tape.expected().filter(|step| step.granules == *granules && step.card == card);
            let step = guess(tape).or_else(|| tape.realign(*granules).then(|| guess(tape)).flatten());
            match step {
                Some(step) => {
                    tape.push(step);
                    guessed += 1;
                }
                None => tape.record(Step { birth: 1, card, granules: *granules }),
            }
        }
        guessed
    }

    /// Layers of the same sizes between a beginning and an end.
    fn job() -> Vec<u32> {
        let layers = (0..12).flat_map(|_| [4, 9, 9, 2, 7, 3, 3, 12, 1, 6, 5, 8, 8, 2]);
        (20..40).chain(layers).chain(50..70).collect()
    }

    #[test]
    fn a_marked_job_is_guessed_from_its_second_iteration_on() {
        let (mut tape, sizes) = (Tape::default(), job());
        play(&mut tape, &sizes);
        for _ in 0..3 {
            tape.mark_iteration();
            assert_eq!(play(&mut tape, &sizes), sizes.len());
        }
    }

    #[test]
    fn without_marks_the_sizes_tell_where_the_job_is() {
        let (mut tape, sizes) = (Tape::default(), job());
        play(&mut tape, &sizes);
        assert!(play(&mut tape, &sizes) >= sizes.len() - RUN as usize);
        assert_eq!(play(&mut tape, &sizes), sizes.len());
    }

    #[test]
    fn requests_too_many_or_too_few_cost_themselves_only() {
        let (mut tape, sizes) = (Tape::default(), job());
        play(&mut tape, &sizes);
        tape.mark_iteration();
        let with_more: Vec<u32> = sizes[..100].iter().copied().chain([99; 3]).collect();
        play(&mut tape, &with_more);
        let guesses = |tape: &Tape, at: usize| tape.expected().map(|step| step.card as usize) == Some(at);
        assert!(guesses(&tape, 100), "three too many");
        assert!(tape.realign(sizes[103]), "three too few");
        assert!(guesses(&tape, 103) || sizes[100..103].contains(&sizes[103]));
    }

    #[test]
    fn one_that_never_repeats_itself_takes_no_more_room_than_it_may() {
        let mut tape = Tape::default();
        let sizes: Vec<u32> = (0..STEPS as u32 + 100).map(|at| mix(u64::from(at)) as u32).collect();
        assert_eq!(play(&mut tape, &sizes), 0);
        assert!(tape.followers.len() <= STEPS);
        tape.mark_iteration();
        assert!(tape.expected().is_none(), "the iteration was too long to be followed");
    }
}
