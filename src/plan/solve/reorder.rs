//! First fit in order after order, each a small change to the last that was no worse: whoever ends highest is placed sooner. For buffers that live in both passes in another way than once around,
//! of which a search that knows one stretch of time for each makes more than they are.
//!
//! A unit of work is a step of first fit.

use super::first_fit::Ground;
use super::one_pass::OnePass;
use super::{Buffer, Effort, Order};
use crate::rng::Rng;
use crate::work::{Budget, Work};

/// Units of a buffer that is placed, beside its steps.
const EACH: u64 = 16;
/// Of a thousand changes so many are of whoever ends highest, and the others of anybody.
const OF_HIGHEST: u64 = 750;

/// Offsets that end below `top`, where some are found.
pub(super) fn search(buffers: &[&Buffer], one_pass: &OnePass, top: u64, work: &mut Work) -> Option<Vec<u64>> {
    if work.is_over() {
        return None;
    }
    let ground = Ground::of(buffers, one_pass);
    let ends =
        |offsets: &[u64]| offsets.iter().zip(buffers).map(|(offset, buffer)| offset + buffer.len.get()).collect();
    let mut best: Option<Placed> = None;
    for order in Order::ALL {
        let below = best.as_ref().map_or(u64::MAX, |best| best.top);
        let order = order.sorted(buffers);
        if let Some(offsets) = attempt(&ground, &order, below, work) {
            best = Some(Placed::of(order, ends(&offsets), offsets));
        }
        if work.is_over() {
            break;
        }
    }
    let (mut best, bound, mut rng) = (best?, ground.bound(), Rng::new(work.seed()));
    while best.top > bound && !work.is_over() {
        let highest: Vec<usize> = (0..buffers.len()).filter(|at| best.ends[*at] == best.top).collect();
        let from = match rng.chance(OF_HIGHEST) {
            true => {
                let one = highest[rng.index(highest.len())];
                best.order.iter().position(|at| *at == one).expect("each has a place in the order")
            }
            false => rng.index(buffers.len()),
        };
        if from == 0 {
            // Looking is work, too, or this would not end.
            work.take(1);
            continue;
        }
        let to = rng.index(from);
        best.order[to..=from].rotate_right(1);
        match attempt(&ground, &best.order, best.top + 1, work) {
            Some(offsets) => best = Placed::of(best.order, ends(&offsets), offsets),
            None => best.order[to..=from].rotate_left(1),
        }
    }
    Some(best.offsets).filter(|_| best.top < top)
}

/// An order, and what came of it.
struct Placed {
    order: Vec<usize>,
    ends: Vec<u64>,
    offsets: Vec<u64>,
    top: u64,
}

impl Placed {
    fn of(order: Vec<usize>, ends: Vec<u64>, offsets: Vec<u64>) -> Placed {
        let top = ends.iter().copied().max().unwrap_or(0);
        Placed { order, ends, offsets, top }
    }
}

fn attempt(ground: &Ground<'_>, order: &[usize], below: u64, work: &mut Work) -> Option<Vec<u64>> {
    let steps = work.left();
    let mut effort = Effort::of(steps, below, &Budget { stop: work.stop(), ..Budget::default() });
    let found = ground.place(order, &mut effort);
    work.take(steps - effort.steps + EACH * effort.placed);
    found.ok()
}
