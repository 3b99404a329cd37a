//! What served, and what was live then. Which block serves a request follows from its size and from which blocks are live (S1 takes the oldest that is idle):
//! so when the same blocks are live as once before, the same block serves the same size, and need not be searched for. A job that repeats itself
//! goes through the same states, one after the other.
//!
//! The tape holds the last blocks that served, in their order, each with the state that it was found in. The job is taken to be at a fixed distance behind where it
//! was once before, the *lag*; where that is wrong the state tells where else it was.
//!
//! So the tape never changes what is served, only how fast it is found. (Foretelling by place in the iteration alone does: qwen-moe, whose iterations differ,
//! never settles then.) Whoever asks looks again whether the block has the right size and is idle; and where blocks go away or change all is forgotten. With several
//! streams it is looked at who may use the block, and an older one may have become free for it meanwhile: safe, and not the same as a search.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use super::cards::CardId;
use crate::pool::address_map::AddressHasher;
use crate::rng::mix;

/// Steps that are remembered, 8 bytes each and about 40 more for those that were searched for: iterations up to so many requests are followed.
const STEPS: usize = 1 << 17;

/// Which blocks are live, as one number: two sets have the same one hardly ever.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub(super) struct State(u64);

impl State {
    /// The block with this mark has become live, or is no longer.
    #[inline]
    pub(super) fn toggle(&mut self, mark: u64) {
        self.0 ^= mark;
    }
}

/// What the block with this number adds to a state. Well mixed: with a mere product, numbers that follow each other make the same sets too often.
pub(super) fn mark(birth: u64) -> u64 {
    mix(birth)
}

/// The block that served, and half of the state before it.
#[derive(Clone, Copy, Debug)]
struct Step(u64);

impl Step {
    #[inline]
    fn new(card: CardId, state: State) -> Step {
        Step(u64::from(card) << 32 | state.0 & u64::from(u32::MAX))
    }

    #[inline]
    fn card(self) -> CardId {
        (self.0 >> 32) as CardId
    }

    /// The state was this one, or one of few others.
    #[inline]
    fn is_in(self, state: State) -> bool {
        self.0 as u32 == state.0 as u32
    }
}

#[derive(Debug)]
pub(super) struct Tape {
    /// The last steps, each at its number modulo [`STEPS`]: zeros take no memory until they are written to.
    steps: Box<[u64; STEPS]>,
    /// Steps so far: the number of the next.
    head: u64,
    /// How many steps ago the job was where it is now; 0 where nobody knows.
    lag: u64,
    state: State,
    /// Steps before this one are of blocks that may be gone.
    valid_from: u64,
    /// The step that served so many granules in a state, last time that it was searched for. The keys are mixed well, so the cheapest hasher will do.
    found: HashMap<u64, u64, BuildHasherDefault<AddressHasher>>,
}

impl Default for Tape {
    fn default() -> Tape {
        let steps = vec![0; STEPS].into_boxed_slice().try_into().expect("there are so many");
        Tape { steps, head: 0, lag: 0, state: State::default(), valid_from: 0, found: HashMap::default() }
    }
}

impl Tape {
    /// Requests that were served.
    pub(super) fn served(&self) -> u64 {
        self.head
    }

    /// Which blocks are live.
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Who serves next, if the job is where it seems to be.
    #[inline]
    pub(super) fn expected(&self) -> Option<CardId> {
        let step = Step(self.steps[self.head.wrapping_sub(self.lag) as usize % STEPS]);
        (self.lag != 0 && step.is_in(self.state)).then(|| step.card())
    }

    /// The block of this card, with this mark, serves.
    #[inline]
    pub(super) fn push(&mut self, card: CardId, mark: u64) {
        self.steps[self.head as usize % STEPS] = Step::new(card, self.state).0;
        self.head += 1;
        self.state.toggle(mark);
    }

    /// The block with this mark serves no longer.
    #[inline]
    pub(super) fn retire(&mut self, mark: u64) {
        self.state.toggle(mark);
    }

    /// The job is not where it seems to be. True when it has asked for so many granules in this state before, and that is what is expected now.
    pub(super) fn realign(&mut self, granules: u32) -> bool {
        let found = self.found.get(&self.place(granules)).filter(|found| **found >= self.valid_from);
        let lag = found.map(|found| self.head - found).filter(|lag| *lag != self.lag && *lag < STEPS as u64);
        self.lag = lag.unwrap_or(self.lag);
        lag.is_some()
    }

    /// State and size as one number.
    fn place(&self, granules: u32) -> u64 {
        // From other numbers than marks are: or {3} that asks for 5 would be {5} that asks for 3.
        self.state.0 ^ mix(!u64::from(granules))
    }

    /// The block of this card serves so many granules, and was searched for.
    pub(super) fn record(&mut self, card: CardId, mark: u64, granules: u32) {
        if self.found.len() >= STEPS {
            self.found.clear();
        }
        self.found.insert(self.place(granules), self.head);
        self.push(card, mark);
    }

    /// A block is gone: others may serve where it did.
    pub(super) fn forget(&mut self) {
        (self.valid_from, self.lag) = (self.head, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a list of sizes, each served by a block of its place in the list and its size, and live to the end; says how many had to be searched for.
    fn play(tape: &mut Tape, sizes: &[u32]) -> usize {
        let mut searched = 0;
        let card = |place: usize| (place as CardId) << 8 | sizes[place];
        for (place, granules) in sizes.iter().enumerate() {
            let (card, mark) = (card(place), mark(u64::from(card(place))));
            let is_expected = |tape: &Tape| tape.expected() == Some(card);
            if is_expected(tape) || tape.realign(*granules) && is_expected(tape) {
                tape.push(card, mark);
            } else {
                tape.record(card, mark, *granules);
                searched += 1;
            }
        }
        for place in 0..sizes.len() {
            tape.retire(mark(u64::from(card(place))));
        }
        searched
    }

    fn job() -> Vec<u32> {
        let layers = (0..12).flat_map(|_| [4, 9, 9, 2, 7, 3, 3, 12, 1, 6, 5, 8, 8, 2]);
        (20..40).chain(layers).chain(50..70).collect()
    }

    #[test]
    fn what_repeats_itself_is_searched_for_once() {
        let (mut tape, sizes) = (Tape::default(), job());
        assert_eq!(play(&mut tape, &sizes), sizes.len());
        for _ in 0..3 {
            assert_eq!(play(&mut tape, &sizes), 0);
        }
        assert_eq!(tape.served(), 4 * sizes.len() as u64);
    }

    #[test]
    fn iterations_that_differ_are_each_known_again() {
        let (mut tape, mut sizes) = (Tape::default(), job());
        play(&mut tape, &sizes);
        let first = sizes.clone();
        sizes[100] = 99;
        assert_eq!(play(&mut tape, &sizes), sizes.len() - 100, "up to the one that differs the same blocks are live");
        for _ in 0..3 {
            assert_eq!((play(&mut tape, &first), play(&mut tape, &sizes)), (0, 0));
        }
    }

    #[test]
    fn where_a_block_has_gone_everything_is_searched_for_again() {
        let (mut tape, sizes) = (Tape::default(), job());
        play(&mut tape, &sizes);
        tape.forget();
        assert_eq!((play(&mut tape, &sizes), play(&mut tape, &sizes)), (sizes.len(), 0));
    }

    #[test]
    fn one_that_never_repeats_itself_takes_no_more_room_than_it_may() {
        let mut tape = Tape::default();
        for birth in 1..STEPS as u64 + 100 {
            assert!(tape.expected().is_none() && !tape.realign(1));
            tape.record(0, mark(birth), 1);
        }
        assert!(tape.found.len() <= STEPS);
    }

    #[test]
    fn who_is_live_and_what_is_asked_for_are_not_mistaken_for_each_other() {
        let mut places = std::collections::HashSet::new();
        let mut tape = Tape::default();
        for birth in 1..=64 {
            tape.state.toggle(mark(birth));
            places.extend((1..=64).map(|granules| tape.place(granules)));
            tape.state.toggle(mark(birth));
        }
        assert_eq!(places.len(), 64 * 64);
    }

    #[test]
    fn states_are_told_apart_and_found_again() {
        let mut states = std::collections::HashSet::new();
        let mut state = State::default();
        for a in 0..300 {
            state.toggle(mark(a));
            for b in 300..600 {
                state.toggle(mark(b));
                states.insert(state);
                state.toggle(mark(b));
            }
            state.toggle(mark(a));
        }
        assert_eq!((states.len(), state), (300 * 300, State::default()));
        // Also by the half that a step keeps, and where numbers follow each other.
        for run in 1..=4 {
            let of = |first: u64| {
                let mut state = State::default();
                (first..first + run).for_each(|birth| state.toggle(mark(birth)));
                state.0 as u32
            };
            assert_eq!((1..=8192).map(of).collect::<std::collections::HashSet<_>>().len(), 8192);
        }
    }
}
