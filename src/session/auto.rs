//! The thread that looks after the plans of a runtime while the job runs.
//!
//! Not for: what it does when it looks ([`crate::auto`]).
//!
//! Invariant: the job never waits for this thread. Where it cannot be begun, or ends, the job goes on without plans, or with the one that it has.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::aside::aside;
use super::background::Background;
use crate::auto::{AutoPlanner, Shelf};
use crate::error::chain;
use crate::plan::{Fingerprint, Plan, Position, directory};
use crate::runtime::Runtime;
use crate::session::Session;

/// The pause between two looks while the job is recorded: a busy one makes a tenth of what a tap has room for in it.
const PAUSE_RECORDING: Duration = Duration::from_millis(5);
/// The pause at other times.
const PAUSE: Duration = Duration::from_millis(100);

/// Somebody looks after the plans of a runtime, until this goes.
#[derive(Debug)]
pub struct PlannerThread(Background<()>);

impl PlannerThread {
    /// Looks after the plans of `runtime` with a planner that has begun to record it.
    ///
    /// # Errors
    ///
    /// What the system says of one more thread.
    pub fn begin<R>(
        planner: AutoPlanner,
        runtime: R,
        shelf: impl Shelf + Send + 'static,
    ) -> std::io::Result<PlannerThread>
    where
        R: Deref<Target = Runtime> + Send + 'static,
    {
        let mut planner = planner.with_run(aside);
        let thread = Background::begin("stitchd-auto", move |is_over| {
            while !is_over.load(Ordering::Acquire) && planner.over().is_none() {
                planner.look(&runtime, &shelf);
                std::thread::park_timeout(if planner.is_recording() { PAUSE_RECORDING } else { PAUSE });
            }
        })?;
        Ok(PlannerThread(thread))
    }

    /// Nobody looks any more when this comes back, in `patience` at most: a driver that is being unloaded should not be called.
    pub fn end(self, patience: Duration) {
        let _ = self.0.end(patience);
    }
}

/// The plans that the daemon stores, as one process of a job finds them.
#[derive(Debug)]
pub struct DaemonShelf {
    session: Arc<Session>,
    position: Option<Position>,
    name: String,
}

impl DaemonShelf {
    /// Of a process at `position` of its job, which calls its plans so.
    pub fn new(session: Arc<Session>, position: Option<Position>, name: String) -> DaemonShelf {
        DaemonShelf { session, position, name }
    }
}

impl Shelf for DaemonShelf {
    fn find(&self, job: Fingerprint) -> Option<Plan> {
        let found = self.session.plan_for(job, self.position);
        found.unwrap_or_else(|error| {
            tracing::debug!(error = %chain(&error), "no plan of an earlier run");
            None
        })
    }

    fn keep(&self, plan: &Plan) {
        let mut plan = plan.clone();
        plan.job.position = self.position;
        if let Err(error) = self.session.put_plan(&plan, &self.name) {
            tracing::debug!(error = %chain(&error), "the plan is not kept for the next run");
        }
    }
}

/// The plans of a directory, as one process of a job finds them ([`directory`]); those that it makes itself are its own.
#[derive(Debug)]
pub struct DirectoryShelf {
    path: PathBuf,
    position: Option<Position>,
}

impl DirectoryShelf {
    /// Of a process at `position` of its job.
    pub fn new(path: PathBuf, position: Option<Position>) -> DirectoryShelf {
        DirectoryShelf { path, position }
    }
}

impl Shelf for DirectoryShelf {
    fn find(&self, job: Fingerprint) -> Option<Plan> {
        let found = directory::find_of(&self.path, self.position, job);
        let found = found.inspect_err(|error| tracing::debug!(%error, "the directory of plans cannot be read"));
        found.ok()?.plan.map(|(_, plan)| plan)
    }

    fn keep(&self, _: &Plan) {}
}

impl Drop for PlannerThread {
    fn drop(&mut self) {
        self.0.stop();
    }
}
