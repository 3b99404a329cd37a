//! Stretches of time that are like another: micro-batches, layers, recorded iterations. They are placed once.
//!
//! Between two moments at which exactly the same buffers are live, whatever else lives there begins and ends there. Where two such windows around the same buffers have the same inside, offsets that
//! do for one do for the other, and the best are the same: the second is left out and takes them from the first. Windows within windows are found too, the outermost first.
//!
//! Not for: what is handed on from one pass to the next, as activations are in a pipeline. Whoever lives there crosses the window, and is another each time.

use std::collections::HashMap;

use crate::lifetimes::changes;
use crate::rng::Rng;
use crate::units::Lifetime;

/// Which buffers are placed, and which take the offsets of those.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Repeats {
    /// Of each buffer, the one whose offset it has: itself, mostly.
    pub(super) like: Vec<u32>,
}

/// Counts for each moment that is looked at: few enough share one by chance.
const SEEN_EACH: usize = 4;

/// What happens from one moment to another, at both of which the same buffers are live: half-open, counted in births and deaths.
struct Window {
    from: u32,
    to: u32,
    /// Who is live.
    around: u128,
    /// What happens, for a first look.
    inside: u64,
}

impl Repeats {
    /// What repeats of these lifetimes with these lengths; nothing where nothing does.
    pub(super) fn of(lifetimes: &[Lifetime], lens: &[u64]) -> Option<Repeats> {
        let time = Time::of(lifetimes);
        let windows = time.windows(lens);
        let mut like: Vec<u32> = (0..lens.len() as u32).collect();
        let mut is_left_out = vec![false; time.changes.len()];
        let mut known: HashMap<(u32, u128, u64), &Window> = HashMap::new();
        for window in &windows {
            if is_left_out[window.from as usize] {
                continue;
            }
            let Some(first) = known.get(&(window.to - window.from, window.around, window.inside)) else {
                known.insert((window.to - window.from, window.around, window.inside), window);
                continue;
            };
            if time.are_alike(window, first, lens) {
                time.born_in(window).zip(time.born_in(first)).for_each(|(one, other)| like[one as usize] = other);
                is_left_out[window.from as usize..window.to as usize].fill(true);
            }
        }
        // The first may take its own from an inner one.
        for at in 0..like.len() {
            let mut last = like[at];
            while like[last as usize] != last {
                last = like[last as usize];
            }
            like[at] = last;
        }
        like.iter().zip(0..).any(|(like, at)| *like != at).then_some(Repeats { like })
    }
}

/// Births and deaths in their order.
struct Time {
    /// Whose, and whether it is born.
    changes: Vec<(u32, bool)>,
    /// Of each buffer, which change its birth is and which its death.
    lives: Vec<(u32, u32)>,
}

impl Time {
    fn of(lifetimes: &[Lifetime]) -> Time {
        let mut changes = changes(lifetimes);
        // Of two that leave at one tick the one that came first goes first.
        for leave in changes.chunk_by_mut(|one, next| (one.tick, one.comes) == (next.tick, next.comes)) {
            if leave.len() > 1 && !leave[0].comes {
                leave.sort_by_key(|change| lifetimes[change.of as usize].start);
            }
        }
        let mut lives = vec![(0, 0); lifetimes.len()];
        for (change, at) in changes.iter().zip(0..) {
            let of = &mut lives[change.of as usize];
            *(if change.comes { &mut of.0 } else { &mut of.1 }) = at;
        }
        Time { changes: changes.into_iter().map(|change| (change.of, change.comes)).collect(), lives }
    }

    /// Those that may be like others, the longest first.
    fn windows(&self, lens: &[u64]) -> Vec<Window> {
        // Who is live before each change, and behind the last.
        let mut live = 0_u128;
        let mut moments: Vec<(u128, u32)> = vec![(0, 0)];
        for ((one, _), at) in self.changes.iter().zip(1..) {
            live ^= u128::from(mixed(u64::from(*one))) << 64 | u128::from(mixed(!u64::from(*one)));
            moments.push((live, at));
        }
        // Most moments are like no other: those that may be are told by few bits, and sorted by all.
        let mut seen = vec![0_u8; moments.len().next_power_of_two() * SEEN_EACH];
        let last = seen.len() - 1;
        let place = |live: u128| live as usize & last;
        moments.iter().for_each(|(live, _)| seen[place(*live)] = seen[place(*live)].saturating_add(1));
        moments.retain(|(live, _)| seen[place(*live)] > 2);
        moments.sort_unstable();
        // Two windows have three moments between them.
        let same = moments.chunk_by(|one, next| one.0 == next.0).filter(|same| same.len() > 2);
        let pairs: Vec<(u128, u32, u32)> =
            same.flat_map(|same| same.windows(2).map(|pair| (pair[0].0, pair[0].1, pair[1].1))).collect();
        if pairs.is_empty() {
            return Vec::new();
        }
        let births = Rolling::of(self, lens);
        let window = |(around, from, to)| Window { from, to, around, inside: births.between(from, to) };
        let mut windows: Vec<Window> = pairs.into_iter().map(window).collect();
        windows.sort_unstable_by_key(|window| (std::cmp::Reverse(window.to - window.from), window.from));
        windows
    }

    fn born_in(&self, window: &Window) -> impl Iterator<Item = u32> {
        let changes = &self.changes[window.from as usize..window.to as usize];
        changes.iter().filter(|(_, is_born)| *is_born).map(|(one, _)| *one)
    }

    /// The same happens in both, and to nobody from outside.
    fn are_alike(&self, one: &Window, other: &Window, lens: &[u64]) -> bool {
        let shape = |window: &Window, at: u32| {
            let (born, dies) = self.lives[at as usize];
            (born - window.from, dies - window.from, lens[at as usize])
        };
        let is_inside = |window: &Window, at: u32| self.lives[at as usize].1 < window.to;
        let mut births = self.born_in(one).zip(self.born_in(other));
        let births_are = births.all(|(a, b)| shape(one, a) == shape(other, b) && is_inside(one, a));
        let count = |window: &Window| self.born_in(window).count();
        births_are && count(one) == count(other) && 2 * count(one) == (one.to - one.from) as usize
    }
}

/// A hash of who is born in any stretch of time, wherever that is: sums of a power for each change, modulo 2⁶¹ − 1.
struct Rolling {
    /// Of all changes before each.
    sums: Vec<u64>,
    powers: Vec<u64>,
}

const MODULUS: u64 = (1 << 61) - 1;

fn times(one: u64, other: u64) -> u64 {
    (u128::from(one) * u128::from(other) % u128::from(MODULUS)) as u64
}

impl Rolling {
    fn of(time: &Time, lens: &[u64]) -> Rolling {
        let base = mixed(7) % MODULUS;
        let (mut sums, mut powers) = (vec![0], vec![1]);
        for (at, (one, is_born)) in time.changes.iter().enumerate() {
            let (born, dies) = time.lives[*one as usize];
            let of = mixed(lens[*one as usize] ^ mixed(u64::from(dies - born))) % MODULUS;
            let power = powers[at];
            sums.push((sums[at] + if *is_born { times(of, power) } else { 0 }) % MODULUS);
            powers.push(times(power, base));
        }
        Rolling { sums, powers }
    }

    /// What is born from one change up to another, as if all stretches began at the end of time.
    fn between(&self, from: u32, to: u32) -> u64 {
        let sum = (self.sums[to as usize] + MODULUS - self.sums[from as usize]) % MODULUS;
        times(sum, self.powers[self.powers.len() - 1 - from as usize])
    }
}

/// Bits of a number in a wild order.
fn mixed(n: u64) -> u64 {
    Rng::new(n).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Tick;

    fn life(start: u64, end: u64) -> Lifetime {
        Lifetime::new(start, end)
    }

    /// Lifetimes of so many passes that are alike, each `0..10` long, between something that lives throughout.
    fn passes(count: u64, inside: &[(u64, u64, u64)]) -> (Vec<Lifetime>, Vec<u64>) {
        let (mut lifetimes, mut lens) = (vec![life(0, 10 * count + 2)], vec![100]);
        for pass in 0..count {
            for (start, end, len) in inside {
                lifetimes.push(life(1 + 10 * pass + start, 1 + 10 * pass + end));
                lens.push(*len);
            }
        }
        (lifetimes, lens)
    }

    #[test]
    fn passes_that_are_alike_are_placed_once() {
        let (lifetimes, lens) = passes(5, &[(0, 3, 7), (1, 9, 8), (4, 8, 9)]);
        let like = Repeats::of(&lifetimes, &lens).unwrap().like;
        assert_eq!(like, [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3]);
        // One that is another length, or lives longer, is not like it.
        for (at, len, end) in [(5, 6, 0), (5, 8, 1)] {
            let (mut lifetimes, mut lens) = (lifetimes.clone(), lens.clone());
            lens[at] = len;
            lifetimes[at] = life(lifetimes[at].start.0, lifetimes[at].end.0 + end);
            let like = Repeats::of(&lifetimes, &lens).unwrap().like;
            assert_eq!(like[4..7], if end == 1 && len == 8 { [1, 2, 3] } else { [4, 5, 6] }, "{at}");
        }
    }

    #[test]
    fn what_lives_on_into_the_next_pass_is_in_the_way() {
        let (mut lifetimes, mut lens) = passes(4, &[(0, 3, 7), (2, 9, 8)]);
        // Something that lives from the second pass into the third.
        lifetimes.push(life(16, 26));
        lens.push(50);
        let like = Repeats::of(&lifetimes, &lens).unwrap().like;
        assert_eq!(like, [0, 1, 2, 3, 4, 5, 6, 1, 2, 9]);
    }

    /// Windows in windows with some luck, and whatever else.
    fn made(rng: &mut Rng, depth: u32, at: &mut u64, lifetimes: &mut Vec<Lifetime>, lens: &mut Vec<u64>) {
        let (times, kept) = (1 + rng.below(3), rng.below(3));
        let from = *at;
        *at += 1;
        let inside = (lifetimes.len(), *at);
        for _ in 0..1 + rng.below(3) {
            if depth > 0 && rng.chance(600) {
                made(rng, depth - 1, at, lifetimes, lens);
            } else {
                lifetimes.push(life(*at, *at + 1 + rng.below(3)));
                lens.push(1 + rng.below(5));
                *at += 1 + rng.below(3);
            }
        }
        let (behind, len) = (lifetimes.len(), *at + 3 - inside.1);
        for pass in 1..times {
            for one in inside.0..behind {
                let Lifetime { start: Tick(start), end: Tick(end) } = lifetimes[one];
                lifetimes.push(life(start + pass * len, end + pass * len));
                lens.push(lens[one]);
            }
        }
        *at = inside.1 + times * len + 1;
        for _ in 0..kept {
            lifetimes.push(life(from, *at));
            lens.push(1 + rng.below(5));
        }
    }

    #[test]
    fn whoever_takes_the_offset_of_another_is_in_nobodys_way() {
        let mut shared = 0;
        for seed in 0..400 {
            let mut rng = Rng::new(seed);
            let (mut lifetimes, mut lens) = (Vec::new(), Vec::new());
            made(&mut rng, 3, &mut 0, &mut lifetimes, &mut lens);
            let Some(Repeats { like }) = Repeats::of(&lifetimes, &lens) else { continue };
            shared += like.iter().zip(0..).filter(|(like, at)| **like != *at).count();
            let like: Vec<usize> = like.into_iter().map(|at| at as usize).collect();
            for one in 0..like.len() {
                assert_eq!((lens[like[one]], like[like[one]]), (lens[one], like[one]), "seed {seed}");
                for other in 0..one {
                    // Whatever offsets those have that are placed: two that are live together have theirs from two that are.
                    let is_kept = lifetimes[like[one]].overlaps(lifetimes[like[other]]) && like[one] != like[other];
                    assert!(!lifetimes[one].overlaps(lifetimes[other]) || is_kept, "seed {seed}: {one} and {other}");
                }
            }
        }
        assert!(shared > 3_000, "{shared}");
    }
}
