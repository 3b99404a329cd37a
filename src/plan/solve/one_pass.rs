//! One stretch of time for every buffer.
//!
//! The time of a problem has the cycle twice ([`super::super::problem`]), and mostly the second pass says nothing new: who is live there was live at the same place of the first,
//! and so was everybody else. Then the first pass alone has the same pairs in each other's way. What does not come back like that (a gradient that lives into
//! the next iteration) counts as live for the whole cycle, which may put it in the way of more than it is, and never of less.

use super::Buffer;
use crate::units::Lifetime;

/// The time of a problem without its second pass.
pub(super) struct OnePass {
    /// In the order of the buffers. They overlap wherever two buffers are live together.
    pub(super) lifetimes: Vec<Lifetime>,
    /// They overlap nowhere else.
    pub(super) is_exact: bool,
}

impl OnePass {
    pub(super) fn of(buffers: &[&Buffer]) -> OnePass {
        let cycles = buffers.iter().filter_map(|buffer| Some((buffer.again?.start.0, buffer.lifetime.start.0)));
        // Where the second pass begins, and what it repeats.
        let Some((second, first)) = cycles.min() else {
            return OnePass { lifetimes: buffers.iter().map(|buffer| buffer.lifetime).collect(), is_exact: true };
        };
        let end = buffers.iter().flat_map(|buffer| buffer.lifetimes()).map(|lifetime| lifetime.end.0).max();
        let (mut throughout, mut once, mut is_guessed) = (false, false, false);
        let lifetimes = buffers.iter().map(|buffer| {
            let (start, stop) = (buffer.lifetime.start.0, buffer.lifetime.end.0);
            let is_as_before = match buffer.again {
                Some(again) => {
                    stop <= second && again == Lifetime::new(start + (second - first), stop + (second - first))
                }
                None => stop <= second || start <= first,
            };
            if is_as_before {
                once |= buffer.again.is_none() && first < stop && stop <= second;
                Lifetime::new(start, stop.min(second))
            } else {
                throughout = true;
                // Not a guess where it is in the way of the whole second pass.
                is_guessed |= buffer.again.is_some() || start > second || Some(stop) != end;
                Lifetime::new(start.min(first), second)
            }
        });
        let lifetimes = lifetimes.collect();
        OnePass { lifetimes, is_exact: !(is_guessed || throughout && once) }
    }
}
