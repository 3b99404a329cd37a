//! Who comes and who goes, in the order of time.

use crate::units::{Bytes, Lifetime, Tick};

/// One of a set of lifetimes begins or ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Change {
    /// When.
    pub(crate) tick: Tick,
    /// It begins.
    pub(crate) comes: bool,
    /// Which: its place among the lifetimes.
    pub(crate) of: u32,
}

/// All that happens. At one tick whoever leaves goes first, as lifetimes are half-open; otherwise the order of the lifetimes decides.
pub(crate) fn changes(lifetimes: &[Lifetime]) -> Vec<Change> {
    let all = || lifetimes.iter().zip(0_u32..);
    let comes = all().map(|(lifetime, of)| Change { tick: lifetime.start, comes: true, of });
    let goes = all().map(|(lifetime, of)| Change { tick: lifetime.end, comes: false, of });
    let unsorted = comes.chain(goes);
    let first = lifetimes.iter().map(|lifetime| lifetime.start.0).min().unwrap_or(0);
    let last = lifetimes.iter().map(|lifetime| lifetime.end.0).max().unwrap_or(0);
    let Some(kinds) = is_dense(last - first, lifetimes.len()) else {
        let mut changes: Vec<Change> = unsorted.collect();
        changes.sort_unstable();
        return changes;
    };
    // Sorted by counting: the time of a problem has a tick for each event.
    let kind = |change: &Change| (change.tick.0 - first) as usize * 2 + usize::from(change.comes);
    let mut begins = vec![0_u32; kinds + 1];
    unsorted.clone().for_each(|change| begins[kind(&change) + 1] += 1);
    let mut sum = 0;
    for count in &mut begins {
        sum += *count;
        *count = sum;
    }
    let mut changes = vec![Change::default(); 2 * lifetimes.len()];
    for change in unsorted {
        let next = &mut begins[kind(&change)];
        changes[*next as usize] = change;
        *next += 1;
    }
    changes
}

/// The most bytes that are live at one time.
pub(crate) fn most_live(lifetimes: &[Lifetime], lens: &[Bytes]) -> Bytes {
    let mut live = 0_i128;
    let most = changes(lifetimes).into_iter().map(|change| {
        let len = i128::from(lens[change.of as usize].get());
        live += if change.comes { len } else { -len };
        live
    });
    let most = u64::try_from(most.max().unwrap_or(0)).unwrap_or(u64::MAX);
    Bytes::new(most.min(Bytes::MAX.get()))
}

/// How many kinds of changes there can be, if that is in proportion to the lifetimes.
fn is_dense(ticks: u64, lifetimes: usize) -> Option<usize> {
    const SPARSE: u64 = 4;
    let is_so = ticks <= SPARSE * lifetimes as u64 && lifetimes <= u32::MAX as usize / 2;
    is_so.then(|| (ticks as usize + 1) * 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn changes_come_in_the_order_of_time_whether_ticks_are_many_or_few() {
        assert_eq!(changes(&[]), []);
        let of = |change: Change| (change.tick.0, change.comes, change.of);
        let all_of_time = [Lifetime::new(0, u64::MAX), Lifetime::new(u64::MAX - 1, u64::MAX)];
        let expected = [(0, true, 0), (u64::MAX - 1, true, 1), (u64::MAX, false, 0), (u64::MAX, false, 1)];
        assert!(changes(&all_of_time).into_iter().map(of).eq(expected));
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let (count, ticks) = (1 + rng.below(40), 1 + rng.below(400));
            let lifetimes: Vec<Lifetime> = (0..count)
                .map(|_| {
                    let start = 1000 + rng.below(ticks);
                    Lifetime::new(start, start + 1 + rng.below(ticks))
                })
                .collect();
            let found = changes(&lifetimes);
            assert!(found.is_sorted(), "seed {seed}");
            for (of, lifetime) in (0..).zip(&lifetimes) {
                let own: Vec<_> = found.iter().filter(|change| change.of == of).map(|change| change.tick).collect();
                assert_eq!(own, [lifetime.start, lifetime.end], "seed {seed}");
            }
        }
    }
}
