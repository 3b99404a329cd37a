//! Who had a span before whom.
//!
//! The *predecessors* of an entry are the entries that last held its bytes before it, in the order of asking: over the prologue, the first pass of the
//! cycle, and every later pass. While one of them is live the entry's span is not free. Each byte has one last holder, so there are few (1.4
//! in the mean on real traces), and nobody before them needs to be looked at: they had to leave before the predecessors could come.

use std::collections::BTreeMap;

use super::Plan;

/// The predecessors of every entry, all in one list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReuseOrder {
    /// Where those of each entry begin; one more at the end.
    starts: Vec<u32>,
    entries: Vec<u32>,
}

impl ReuseOrder {
    /// Finds them for every entry of a plan.
    pub fn of(plan: &Plan) -> ReuseOrder {
        let mut holders = Holders::default();
        let mut pairs = Vec::new();
        let count = plan.entries.len();
        let passes = (0..plan.cycle_start).chain(plan.cycle_start..count).chain(plan.cycle_start..count);
        for entry in passes {
            let span = plan.entries[entry].span();
            holders.replace(span.start().get(), span.end().get(), entry as u32, |last| {
                if last != entry as u32 {
                    pairs.push((entry as u32, last));
                }
            });
        }
        pairs.sort_unstable();
        pairs.dedup();
        let mut starts = Vec::with_capacity(count + 1);
        let mut at = 0;
        for entry in 0..count as u32 {
            starts.push(at as u32);
            at += pairs[at..].iter().take_while(|(of, _)| *of == entry).count();
        }
        starts.push(at as u32);
        ReuseOrder { starts, entries: pairs.into_iter().map(|(_, last)| last).collect() }
    }

    /// The entries that last held bytes of this one.
    pub fn predecessors(&self, entry: u32) -> &[u32] {
        self.predecessors_in(self.predecessor_bounds(entry))
    }

    /// Where they begin and end in the list of all, for whoever keeps that with the entry.
    pub fn predecessor_bounds(&self, entry: u32) -> (u32, u32) {
        (self.starts[entry as usize], self.starts[entry as usize + 1])
    }

    /// The entries between such bounds.
    #[inline]
    pub fn predecessors_in(&self, (start, end): (u32, u32)) -> &[u32] {
        &self.entries[start as usize..end as usize]
    }
}

/// The last holder of every byte: disjoint stretches by their start.
#[derive(Default)]
struct Holders {
    stretches: BTreeMap<u64, (u64, u32)>,
}

impl Holders {
    /// `entry` takes `[start, end)`; `seen` is told who had some of it.
    fn replace(&mut self, start: u64, end: u64, entry: u32, mut seen: impl FnMut(u32)) {
        // Cut at both edges, so that only whole stretches lie inside.
        for edge in [start, end] {
            if let Some((from, (to, holder))) = self.stretches.range(..edge).next_back().map(|(at, of)| (*at, *of))
                && to > edge
            {
                self.stretches.insert(from, (edge, holder));
                self.stretches.insert(edge, (to, holder));
            }
        }
        let inside: Vec<_> = self.stretches.range(start..end).map(|(at, (_, holder))| (*at, *holder)).collect();
        for (at, holder) in inside {
            seen(holder);
            self.stretches.remove(&at);
        }
        self.stretches.insert(start, (end, entry));
    }
}
