//! Iterations that come while a plan is followed: kinds that the plan does not have, and that came twice, have places from then on.
//!
//! Twice, as what came once may be anything, and a job whose sizes change at every step would get a new plan at each. And once the job goes by its plan again: one that has changed for good wants another.
//!
//! Not for: where the iterations come from ([`crate::auto`]).

use std::collections::{BTreeSet, HashSet};

use super::kinds::{Cycle, KINDS_MAX, Kind, Parting, PartingKey};
use super::vary::Asked;
use super::{Detour, Entry, Lane, Plan, timeline};
use crate::ids::StreamId;
use crate::trace::{ContextKey, Trace};

/// Looks at the iterations of a job that goes by a plan.
#[derive(Debug)]
pub struct Watch {
    cycle: Cycle,
    /// Streams of which each thread is a lane.
    raced: BTreeSet<StreamId>,
    known: HashSet<PartingKey>,
    /// What the plan has, and from where it expects what varies: nothing is to be learned of that.
    planned: HashSet<Asked>,
    varying: HashSet<(Lane, ContextKey)>,
    /// Kinds that the plan does not have, each with how often it came; the one that came first is the first.
    seen: Vec<(Kind, u32)>,
}

/// What came so often comes again, once the job goes by its plan; and so often, whatever the job does.
const TIMES: u32 = 2;
const TIMES_MAX: u32 = 8;

impl Watch {
    /// Of a job that goes by `plan`.
    pub fn of(plan: &Plan) -> Watch {
        let asked = |entry: &Entry| Asked { bytes: entry.bytes, lane: entry.lane, context: entry.context };
        let requests = plan.entries.iter().enumerate().skip(plan.cycle_start);
        let again = |number: usize, entry: &Entry| Some(number).filter(|_| entry.again.is_some());
        let requests: Vec<_> = requests.map(|(number, entry)| (asked(entry), again(number, entry))).collect();
        let varying = plan.dynamic.iter().filter(|entry| !entry.context.is_unknown());
        let lanes = plan.entries.iter().map(|entry| entry.lane).filter(|lane| lane.role > 0);
        Watch {
            cycle: Cycle::of(&requests, plan.entries.len()),
            raced: lanes.map(|lane| lane.stream).collect(),
            known: plan.detours.iter().map(Detour::key).collect(),
            planned: plan.entries.iter().map(asked).collect(),
            varying: varying.map(|entry| (entry.lane, entry.context)).collect(),
            seen: Vec::new(),
        }
    }

    /// Looks at a whole iteration, which is all that the trace has. Returns the kinds that the plan should
    /// have ([`Plan::with_kinds`]): those that came twice, if this iteration goes by the plan, or one that
    /// came again and again.
    pub fn look(&mut self, iteration: &Trace) -> Vec<Kind> {
        let (len, mut requests) = timeline::only_iteration(iteration, &self.raced);
        let varies = |asked: &Asked| self.varying.contains(&(asked.lane, asked.context));
        requests.retain(|(asked, ..)| !varies(asked) || self.planned.contains(asked));
        let mut kind = self.cycle.beside(len, &requests);
        // A plan of another process may have other names for its streams and threads.
        let came: HashSet<Lane> = requests.iter().map(|(asked, ..)| asked.lane).collect();
        kind.partings.retain(|parting| parting.lane == Lane::on(StreamId::DEFAULT) || came.contains(&parting.lane));
        if kind.lacks {
            return Vec::new();
        }
        let is_known = kind.partings.iter().map(Parting::key).all(|key| self.known.contains(&key));
        let wanted = if is_known { TIMES } else { TIMES_MAX };
        if !is_known {
            self.note(kind);
        }
        self.seen.extract_if(.., |(_, times)| *times >= wanted).map(|(kind, _)| kind).collect()
    }

    fn note(&mut self, kind: Kind) {
        if let Some((_, times)) = self.seen.iter_mut().find(|(seen, _)| seen.is_like(&kind)) {
            *times += 1;
            return;
        }
        if self.seen.len() == KINDS_MAX {
            self.seen.remove(0);
        }
        self.seen.push((kind, 1));
    }
}
