//! Plans that are made while a replayed job runs: a thread beside the job would look after them, and
//! here the replay does so between two requests. How long that took is known, and may delay the plan.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use super::beside::Beside;
use crate::auto::{AutoPlanner, Shelf};
use crate::error::chain;
use crate::plan::{Fingerprint, Plan};
use crate::runtime::{Offer, Runtime};

/// How plans that are made while a job runs are replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AutoOptions {
    /// How long an iteration of the job takes: a plan comes so many iterations later as making it took.
    /// `None`: it is there at once.
    pub step: Option<Duration>,
    /// Once a plan has been installed the job says no more where it asks from, nor what varies.
    pub contexts_end: bool,
}

/// The last plan that was kept: that of an earlier run, until this one keeps another.
#[derive(Debug, Default)]
struct LastPlan(RefCell<Option<Plan>>);

impl Shelf for LastPlan {
    fn find(&self, job: Fingerprint) -> Option<Plan> {
        self.0.borrow().clone().filter(|plan| plan.job.fingerprint == job)
    }

    fn keep(&self, plan: &Plan) {
        self.0.replace(Some(plan.clone()));
    }
}

/// The planner of a replayed job.
#[derive(Debug)]
pub(super) struct Planning {
    planner: AutoPlanner,
    shelf: LastPlan,
    step: Option<Duration>,
    /// Time spent until now.
    spent: Duration,
    /// A plan that a thread would still be making.
    late: Option<Late>,
}

#[derive(Debug)]
struct Late {
    offer: Offer,
    /// Iterations that end before it is made.
    iterations: u32,
}

impl Planning {
    /// For a job whose earlier run has kept `known`.
    pub(super) fn begin(runtime: &Runtime, step: Option<Duration>, known: Option<Plan>) -> Planning {
        let shelf = LastPlan(RefCell::new(known));
        Planning { planner: AutoPlanner::begin(runtime), shelf, step, spent: Duration::ZERO, late: None }
    }

    /// The plan for the next run.
    pub(super) fn kept(self) -> Option<Plan> {
        self.shelf.0.into_inner()
    }

    /// What the thread beside the job does now and then.
    pub(super) fn look(&mut self, runtime: &Runtime, beside: &Arc<Beside>) {
        if self.late.is_some() {
            return;
        }
        let (before, had_offer) = (beside.time(), runtime.has_offer());
        beside.run(|| {
            self.planner.look(runtime, &self.shelf);
            // Without a step's length planning takes no time.
            if self.step.is_none() && runtime.install_at_beginning() {
                self.planner.look(runtime, &self.shelf);
            }
        });
        let took = beside.time() - before;
        self.spent += took;
        let iterations = self.step.map_or(0, |step| iterations_in(took, step));
        if iterations > 0 && !had_offer {
            self.late = runtime.withdraw().map(|offer| Late { offer, iterations });
        }
    }

    /// An iteration has ended.
    pub(super) fn mark(&mut self, runtime: &Runtime) {
        let Some(mut late) = self.late.take() else { return };
        late.iterations -= 1;
        match late.iterations {
            0 => runtime.offer(Some(late.offer)),
            _ => self.late = Some(late),
        }
    }

    /// Time spent until now, where it delays plans.
    pub(super) fn spent(&self) -> Option<Duration> {
        self.step.map(|_| self.spent)
    }

    pub(super) fn made(&self) -> u32 {
        self.planner.made()
    }

    /// Why no more plans are made, if none are.
    pub(super) fn over(&self) -> Option<String> {
        self.planner.over().map(|over| chain(over))
    }
}

/// Iterations that end before something is done that takes so long. An offer waits for the end of one
/// in any case.
fn iterations_in(took: Duration, step: Duration) -> u32 {
    let steps = took.as_nanos() / step.as_nanos().max(1);
    u32::try_from(steps).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_as_late_as_making_it_took() {
        let late = |took, step| iterations_in(Duration::from_millis(took), Duration::from_millis(step));
        assert_eq!(
            [(99, 100), (100, 100), (250, 100), (7, 0)].map(|(took, step)| late(took, step)),
            [0, 1, 2, 7_000_000]
        );
    }
}
