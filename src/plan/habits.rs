//! When requests are freed whose end a trace does not show, told by the same requests of another
//! iteration: by their names ([`Habits`]), and between which requests of their lane ([`Turns`]).
//!
//! Not for: what is freed in the iteration that is planned, which needs no guess.

use foldhash::HashMap;

use super::Lane;
use super::seen::Allocation;
use super::vary::Asked;

/// Allocations of one iteration in their order, each with the name that [`Allocation::name`] would give
/// it if the last were the first.
pub(super) fn named_from_the_end(mut allocations: Vec<&Allocation>) -> Vec<((Asked, u32), &Allocation)> {
    let mut nth = Nth::default();
    allocations.reverse();
    let mut named: Vec<_> = allocations.into_iter().map(|one| (one.name(&mut nth), one)).collect();
    named.reverse();
    named
}

/// Where the requests of an iteration were freed, for those of the next that were not yet.
pub(super) struct Habits {
    freed: HashMap<(Asked, u32), Option<(u32, u64)>>,
    pub(super) counts: Nth,
}

/// How many requests for as much from the same place came before.
pub(super) type Nth = HashMap<Asked, u32>;

impl Allocation {
    /// Its name in its iteration: size, lane, context, and the how-manieth of them it is. Other requests
    /// that come or go do not change it.
    fn name(&self, nth: &mut Nth) -> (Asked, u32) {
        let count = nth.entry(self.asked()).or_default();
        *count += 1;
        (self.asked(), *count)
    }
}

impl Habits {
    pub(super) fn of<'a>(allocations: impl Iterator<Item = &'a Allocation>) -> Habits {
        let mut nth = Nth::default();
        let freed = allocations.map(|one| (one.name(&mut nth), one.freed)).collect();
        Habits { freed, counts: nth }
    }

    pub(super) fn freed(&self, one: &Allocation, nth: &mut Nth) -> Option<(u32, u64)> {
        self.freed.get(&one.name(nth)).copied().flatten()
    }

    /// As many of this name were asked for as in another iteration: the how-manieth is the same request.
    pub(super) fn has_as_many(&self, one: &Allocation, other: &Nth) -> bool {
        self.counts.get(&one.asked()) == other.get(&one.asked())
    }
}

/// At which places of an iteration each lane asks, where there are several: what a lane's request is
/// freed between is told by its own requests, as in time others come anywhere.
pub(super) struct Turns(HashMap<(u32, Lane), Vec<u64>>);

impl Turns {
    pub(super) fn of(allocations: &[Allocation]) -> Turns {
        let mut turns = Turns(HashMap::default());
        if allocations.windows(2).any(|pair| pair[0].lane != pair[1].lane) {
            for one in allocations {
                turns.0.entry((one.iteration, one.lane)).or_default().push(one.at);
            }
        }
        turns
    }

    pub(super) fn has_several(&self) -> bool {
        !self.0.is_empty()
    }

    /// The place in iteration `to` behind which as many requests of a lane come as behind `place` in
    /// iteration `from`; the first has more before them than others.
    pub(super) fn carry(&self, lane: Lane, from: u32, place: u64, to: u32) -> u64 {
        let turns = |iteration: u32| self.0.get(&(iteration, lane)).filter(|_| from != to);
        let (Some(there), Some(here)) = (turns(from), turns(to)) else { return place };
        let left = there.len() - there.partition_point(|at| *at < place);
        if left == 0 { u64::MAX } else { here[here.len().saturating_sub(left)] }
    }
}
