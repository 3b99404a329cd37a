//! Whether threads race on a stream: two iterations compared, one beside the other.
//!
//! Threads that take turns (a main thread that waits for the one that goes backward) ask in one order in every iteration, and share addresses as one thread does. Threads that do not wait for each other ask in
//! another order each time, and only what each asks for itself repeats. Which of the two it is shows in how many requests agree in all, and how many where each thread is looked at alone.
//!
//! Not for: which of a lane's requests vary ([`super::vary`]).

use std::collections::{BTreeMap, HashSet};

use super::vary::Asked;

/// So many requests in a row agree, or none of them does.
const IN_A_ROW: usize = 4;
/// What agrees thread by thread must be more than what agrees in all by one request in so many, and by [`MORE_MIN`].
const MORE_PART: usize = 50;
/// A request that two threads asked for in another order once, say, is no race.
const MORE_MIN: usize = 16;

/// The threads that ask on one stream do not keep one order over these two iterations, and each of them alone does. Requests with the thread that asks.
pub(super) fn is_on(one: &[(Asked, u32)], other: &[(Asked, u32)]) -> bool {
    let threads = |asked: &[(Asked, u32)]| asked.iter().map(|(_, thread)| *thread).collect::<Vec<u32>>();
    let is_one = |asked: &[(Asked, u32)]| asked.windows(2).all(|pair| pair[0].1 == pair[1].1);
    if is_one(one) && is_one(other) || one.len() == other.len() && threads(one) == threads(other) {
        return false;
    }
    let all = |asked: &[(Asked, u32)]| asked.iter().map(|(asked, _)| *asked).collect::<Vec<Asked>>();
    let together = agreed(&all(one), &all(other));
    let mut by_thread: BTreeMap<u32, [Vec<Asked>; 2]> = BTreeMap::new();
    for (nth, iteration) in [one, other].into_iter().enumerate() {
        for (asked, thread) in iteration {
            by_thread.entry(*thread).or_default()[nth].push(*asked);
        }
    }
    let apart: usize = by_thread.values().map(|[one, other]| agreed(one, other)).sum();
    apart >= together + (together / MORE_PART).max(MORE_MIN)
}

/// Requests of `other` that come with those before them as they do somewhere in `one`. What one of the two does beside that, however long, changes nothing for the rest.
fn agreed(one: &[Asked], other: &[Asked]) -> usize {
    let known: HashSet<&[Asked]> = one.windows(IN_A_ROW).collect();
    other.windows(IN_A_ROW).filter(|run| known.contains(run)).count()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::ids::StreamId;
    use crate::plan::Lane;
    use crate::rng::Rng;
    use crate::trace::ContextKey;
    use crate::units::Bytes;

    /// What two threads ask for, in turns of ten or in an order that `rng` draws.
    fn asked(mut rng: Option<&mut Rng>) -> Vec<(Asked, u32)> {
        let one = |thread: u32, at: u64| Asked {
            bytes: Bytes::new(1000 * u64::from(thread) + 7 * at % 90),
            lane: Lane::on(StreamId::DEFAULT),
            context: ContextKey::UNKNOWN,
        };
        let of_thread = |thread: u32| (0..200).map(|at| (one(thread, at), thread)).collect::<VecDeque<_>>();
        let mut threads = [of_thread(1), of_thread(2)];
        let mut order = Vec::new();
        while order.len() < 400 {
            let thread = rng.as_mut().map_or(order.len() / 10 % 2, |rng| rng.index(2));
            order.extend(threads[thread].pop_front());
        }
        order
    }

    #[test]
    fn threads_that_take_turns_do_not_race_and_those_that_do_not_do() {
        let turns = asked(None);
        assert!(!is_on(&turns, &turns));
        let mut rng = Rng::new(3);
        let races: Vec<_> = (0..4).map(|_| asked(Some(&mut rng))).collect();
        assert!(races.windows(2).all(|pair| is_on(&pair[0], &pair[1]) && !is_on(&pair[0], &pair[0])));
        // Something that comes or does not come is no race, nor does it hide one.
        let without = |order: &[(Asked, u32)]| [&order[..50], &order[51..]].concat();
        assert!(!is_on(&turns, &without(&turns)) && is_on(&races[0], &without(&races[1])));
        let more: Vec<_> = (0..100).map(|at| (Asked { bytes: Bytes::new(9000 + at), ..turns[0].0 }, 1)).collect();
        let with_more = |order: &[(Asked, u32)]| [&order[..205], &more, &order[205..]].concat();
        assert!(!is_on(&turns, &with_more(&turns)) && !is_on(&with_more(&turns), &turns));
        assert!(is_on(&races[0], &with_more(&races[1])));
        // What one thread asks for is in its order.
        let from_one = |race: &Vec<(Asked, u32)>| race.iter().map(|(asked, _)| (*asked, 1)).collect::<Vec<_>>();
        assert!(!is_on(&from_one(&races[0]), &from_one(&races[1])));
    }
}
