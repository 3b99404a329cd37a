//! Which requests vary: two iterations compared, one beside the other.
//!
//! Where both ask for the same in the same order nothing varies. Where they do not, the next place at which they agree again is looked for; if as many requests lie before it on both sides,
//! asked for from the same places of the job on the same streams, those are the same requests with other sizes. What came or did not come is not taken for varying: the next iteration may be like either.
//!
//! Not for: requests of dynamic modules ([`super::modules`]), which are left out before.

use super::Lane;
use crate::trace::ContextKey;
use crate::units::Bytes;

/// How far the two may be apart before they agree again.
const APART_MAX: usize = 64;
/// So many requests tell where a step begins.
const IN_A_ROW: usize = 4;

/// A request as it is compared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Asked {
    pub(super) bytes: Bytes,
    pub(super) lane: Lane,
    pub(super) context: ContextKey,
}

impl Asked {
    fn is_same_place(&self, other: &Asked) -> bool {
        self.lane == other.lane && self.context == other.context
    }
}

/// Pairs of requests, by their places in the two iterations or in what both have of one lane, that are the same with another size.
pub(super) fn pairs(one: &[Asked], other: &[Asked]) -> Vec<(usize, usize)> {
    // With contexts a first step that is not like the others would be paired with them.
    let says_nothing = other.iter().take(IN_A_ROW).all(|asked| asked.context.is_unknown());
    let (mut at, mut beside) = (if says_nothing { before_first_step(one, other) } else { 0 }, 0);
    let (mut pairs, mut has_agreed) = (Vec::new(), false);
    while at < one.len() && beside < other.len() {
        if one[at] == other[beside] {
            has_agreed = true;
            (at, beside) = (at + 1, beside + 1);
            continue;
        }
        let Some((skip, skip_beside)) = next_agreement(&one[at..], &other[beside..]) else {
            // Hardly anything is the same near here, as where a length is another at every step: then order says which request is which, as long as it can be the right one. Without contexts it can from the
            // beginning or the end; in between one of the two does what the other does not.
            let is_known = match one[at].context {
                ContextKey::UNKNOWN => false,
                ContextKey::NONE => !has_agreed,
                _ => true,
            };
            let is_known = is_known || one.len() - at == other.len() - beside;
            let run = one[at..].iter().zip(&other[beside..]);
            let run = run.take_while(|(one, other)| is_known && one != other && one.is_same_place(other)).count();
            if run == 0 {
                break;
            }
            pairs.extend(
                (0..run).filter(|n| one[at + n].bytes != other[beside + n].bytes).map(|n| (at + n, beside + n)),
            );
            (at, beside) = (at + run, beside + run);
            continue;
        };
        has_agreed = true;
        let lies_before = one[at..at + skip].iter().zip(&other[beside..beside + skip_beside]);
        if skip == skip_beside && lies_before.clone().all(|(one, other)| one.is_same_place(other)) {
            let other_sizes = lies_before.enumerate().filter(|(_, (one, other))| one.bytes != other.bytes);
            pairs.extend(other_sizes.map(|(offset, _)| (at + offset, beside + offset)));
        }
        (at, beside) = (at + skip, beside + skip_beside);
    }
    pairs
}

/// How many requests of `one` come before it does what `other` begins with: a job that has not begun its first step loads what it needs.
fn before_first_step(one: &[Asked], other: &[Asked]) -> usize {
    let Some(begins) = other.get(..IN_A_ROW) else { return 0 };
    one.windows(IN_A_ROW).position(|run| run == begins).unwrap_or(0)
}

/// How many requests of each lie before they agree on two in a row, as few as can be; of as many, those that are evenly spread. At their ends both agree.
fn next_agreement(one: &[Asked], other: &[Asked]) -> Option<(usize, usize)> {
    let agree = |at: usize, beside: usize| match (one.get(at), other.get(beside)) {
        (Some(one), Some(other)) => one == other,
        (None, None) => true,
        _ => false,
    };
    (1..=2 * APART_MAX).find_map(|sum| {
        let splits = (0..=sum).map(|at| (at, sum - at)).filter(|(at, beside)| *at.max(beside) <= APART_MAX);
        let mut splits: Vec<(usize, usize)> = splits.collect();
        splits.sort_by_key(|(at, beside)| at.abs_diff(*beside));
        let is_end = |at: usize, beside: usize| at >= one.len() && beside >= other.len();
        splits
            .into_iter()
            .find(|(at, beside)| agree(*at, *beside) && (is_end(*at, *beside) || agree(*at + 1, *beside + 1)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::StreamId;

    fn asked(row: &[(u64, u64)]) -> Vec<Asked> {
        let one = |(bytes, context): &(u64, u64)| Asked {
            bytes: Bytes::new(*bytes),
            lane: Lane::on(StreamId::DEFAULT),
            context: ContextKey(*context),
        };
        row.iter().map(one).collect()
    }

    fn check(one: &[(u64, u64)], other: &[(u64, u64)], expected: &[(usize, usize)]) {
        assert_eq!(pairs(&asked(one), &asked(other)), expected);
        let swapped: Vec<(usize, usize)> = expected.iter().map(|(one, other)| (*other, *one)).collect();
        assert_eq!(pairs(&asked(other), &asked(one)), swapped);
    }

    #[test]
    fn what_has_another_size_at_the_same_place_varies() {
        let plain = [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3)];
        check(&plain, &plain, &[]);
        let mut other = plain;
        (other[1].0, other[2].0) = (20, 30);
        check(&plain, &other, &[(1, 1), (2, 2)]);
        other[5].0 = 60;
        check(&plain, &other, &[(1, 1), (2, 2), (5, 5)]);
    }

    #[test]
    fn what_came_or_did_not_come_does_not_vary() {
        let plain = [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3)];
        let missing = [(1, 1), (3, 2), (4, 2), (5, 3), (6, 3)];
        check(&plain, &missing, &[]);
        let and_other = [(1, 1), (3, 2), (4, 2), (50, 3), (6, 3)];
        check(&plain, &and_other, &[(4, 3)]);
        // At another place of the job it is another request.
        let elsewhere = [(1, 1), (2, 1), (3, 2), (40, 7), (5, 3), (6, 3)];
        check(&plain, &elsewhere, &[]);
    }

    #[test]
    fn where_all_sizes_are_others_order_says_which_is_which() {
        let one: Vec<(u64, u64)> = (0..400).map(|n| (n + 1, 1)).collect();
        let other: Vec<(u64, u64)> = (0..400).map(|n| (n + 1000, 1)).collect();
        let all: Vec<(usize, usize)> = (0..400).map(|n| (n, n)).collect();
        check(&one, &other, &all);
        check(&one, &other[..300], &all[..300]);
        // Where nobody says from where, as many must come.
        let nowhere = |row: &[(u64, u64)]| row.iter().map(|(bytes, _)| (*bytes, 0)).collect::<Vec<_>>();
        check(&nowhere(&one), &nowhere(&other), &all);
        check(&nowhere(&one), &nowhere(&other[..300]), &[]);
        check(&one, &[], &[]);
        // As far apart as they may be.
        let short: Vec<(u64, u64)> = (0..64).map(|n| (n + 1000, 1)).chain([(7, 1), (8, 1)]).collect();
        let like: Vec<(u64, u64)> = (0..64).map(|n| (n + 2000, 1)).chain([(7, 1), (8, 1)]).collect();
        check(&short, &like, &(0..64).map(|n| (n, n)).collect::<Vec<_>>());
    }
}
