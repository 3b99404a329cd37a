//! Computation phases: in which one a buffer is asked for, and in which one it is freed.
//!
//! A computation phase is a pass over one micro-batch by one chunk of the model: phase, micro-batch and chunk of an event's context, as STAlloc has them (sections 2.3 and 4). They
//! are numbered in the order in which they first appear in the time of a problem; the prologue's and the cycle's are different ones.
//!
//! A trace may say nothing of them. Then an iteration is cut into stretches, and each is taken for a phase:
//!
//! * at its marks, if it has any: where an outermost module is entered or left, or a mark stands;
//! * else where its live bytes turn. A forward pass leaves activations behind and a backward pass frees them, so the curve of live bytes rises and falls with them. A turn counts
//!   when the bytes go back by a share of the curve's height ([`TURN_SHARE`]): what an operation takes and gives back at once is none.
//!
//! Not for: correctness. A plan is right whatever the phases are; they only say who is likely to come and go together.
//!
//! Invariant: every buffer has phases, and the same trace gives the same ones.

use std::collections::HashMap;

use super::seen::{iterations, takes_tick};
use crate::trace::{Context, EventKind, Phase, Trace};
use crate::units::Lifetime;

/// One part in so many of the height of the live curve is a turn. Of 4 to 128, 4 comes nearest to the true phases of the shared traces: from 8 on each layer that is computed again
/// is a wave of its own (gpt2-345m has 193 stretches, 384 are found at 4 and 1,152 at 8). It cannot tell a forward pass from the next one where nothing is freed between them.
const TURN_SHARE: u64 = 4;

/// The computation phases in which a buffer is asked for and freed, by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PhasePair {
    /// The one in which it is asked for.
    pub asked: u32,
    /// The one in which it is freed; for what outlives the cycle's first pass, the last.
    pub freed: u32,
}

/// The number of the computation phase at each tick of a problem's prologue and first pass.
pub(super) struct Phases {
    of_ticks: Vec<u32>,
    last: u32,
}

/// What a context says of the computation phase.
type Label = (Phase, Option<u32>, Option<u32>);

/// One of the two iterations that a problem is made of.
#[derive(Default)]
struct Pass {
    /// One for each tick.
    labels: Vec<Label>,
    /// Ticks at which a mark stands.
    marks: Vec<usize>,
    /// Live bytes after each tick; empty where nobody asked.
    live: Vec<u64>,
}

impl Phases {
    /// Those of the first iteration and of `last`, which are told apart as [`iterations`] does.
    pub(super) fn of(trace: &Trace, last: u32, is_first: bool) -> Phases {
        let mut passes = Pass::both(trace, last, is_first);
        if passes.iter().any(|pass| pass.says_nothing() && pass.marks.is_empty()) {
            Pass::see_live(&mut passes, trace, last, is_first);
        }
        let mut numbers: HashMap<(usize, Label, usize), u32> = HashMap::new();
        let mut of_ticks = Vec::with_capacity(passes.iter().map(|pass| pass.labels.len()).sum());
        // Of most ticks it is that of the one before.
        let mut last_seen = None;
        for (nth, pass) in passes.iter().enumerate() {
            let borders = if pass.says_nothing() { pass.inferred() } else { Vec::new() };
            let mut stretch = 0;
            for (tick, label) in pass.labels.iter().enumerate() {
                stretch += borders[stretch..].iter().take_while(|border| **border <= tick).count();
                let key = (nth, *label, stretch);
                let next = numbers.len() as u32;
                let number = match last_seen {
                    Some((last, number)) if last == key => number,
                    _ => *numbers.entry(key).or_insert(next),
                };
                last_seen = Some((key, number));
                of_ticks.push(number);
            }
        }
        Phases { last: (numbers.len() as u32).saturating_sub(1), of_ticks }
    }

    /// In which phases a buffer comes and goes that is live so.
    pub(super) fn pair(&self, lifetime: Lifetime) -> PhasePair {
        let known = |tick: u64| usize::try_from(tick).ok().and_then(|tick| self.of_ticks.get(tick)).copied();
        let at = |tick: u64| known(tick).unwrap_or(self.last);
        PhasePair { asked: at(lifetime.start.0), freed: at(lifetime.end.0) }
    }
}

impl Pass {
    fn both(trace: &Trace, last: u32, is_first: bool) -> [Pass; 2] {
        let mut passes = [Pass::default(), Pass::default()];
        // How deep each thread is in modules.
        let mut depths: HashMap<u32, u32> = HashMap::new();
        for (iteration, event) in iterations(trace, last, is_first) {
            let depth = depths.entry(event.thread).or_default();
            let is_border = match event.kind {
                EventKind::Enter => {
                    *depth += 1;
                    *depth == 1
                }
                EventKind::Exit => {
                    *depth = depth.saturating_sub(1);
                    *depth == 0
                }
                kind => kind == EventKind::Mark,
            };
            let Some(pass) = which(iteration, last).map(|nth| &mut passes[nth]) else { continue };
            if takes_tick(event.kind) {
                let Context { phase, microbatch, chunk, .. } = event.context;
                pass.labels.push((phase, microbatch, chunk));
            } else if is_border {
                pass.marks.push(pass.labels.len());
            }
        }
        for pass in &mut passes {
            // Where a pass begins or ends there is no border in it.
            let len = pass.labels.len();
            pass.marks.retain(|mark| *mark > 0 && *mark < len);
        }
        passes
    }

    /// There is more than initialisation, and none of that says where it comes from.
    fn says_nothing(&self) -> bool {
        let mut steps = self.labels.iter().filter(|label| label.0 != Phase::Init).peekable();
        steps.peek().is_some() && steps.all(|label| *label == (Phase::Other, None, None))
    }

    fn see_live(passes: &mut [Pass; 2], trace: &Trace, last: u32, is_first: bool) {
        let (mut held, mut live) = (HashMap::new(), 0_u64);
        for (iteration, event) in iterations(trace, last, is_first) {
            match event.kind {
                EventKind::Alloc => {
                    held.insert(event.id, event.bytes.get());
                    live = live.saturating_add(event.bytes.get());
                }
                EventKind::Free | EventKind::FreeCompleted => {
                    live = live.saturating_sub(held.remove(&event.id).unwrap_or(0));
                }
                _ => continue,
            }
            if let Some(nth) = which(iteration, last) {
                passes[nth].live.push(live);
            }
        }
    }

    /// The ticks at which a stretch begins, but for the first.
    fn inferred(&self) -> Vec<usize> {
        if !self.marks.is_empty() {
            return self.marks.clone();
        }
        let (low, high) = (self.live.iter().min(), self.live.iter().max());
        let height = high.zip(low).map_or(0, |(high, low)| high - low);
        turns(&self.live, (height / TURN_SHARE).max(1))
    }
}

/// Which pass of a problem an iteration is.
fn which(iteration: u32, last: u32) -> Option<usize> {
    match iteration {
        0 => Some(0),
        iteration if iteration == last => Some(1),
        _ => None,
    }
}

/// The ticks after which a curve goes the other way by `least` or more: those right after its local maxima and minima.
fn turns(curve: &[u64], least: u64) -> Vec<usize> {
    let mut turns = Vec::new();
    let (mut is_rising, mut extreme) = (true, 0);
    for (tick, value) in curve.iter().enumerate() {
        let best = curve[extreme];
        let (is_further, back) = if is_rising {
            (*value >= best, best.saturating_sub(*value))
        } else {
            (*value <= best, value.saturating_sub(best))
        };
        if is_further {
            extreme = tick;
        } else if back >= least {
            turns.push(extreme + 1);
            (is_rising, extreme) = (!is_rising, tick);
        }
    }
    turns
}

#[cfg(test)]
mod tests;
