//! Why no more plans are made for a job.

use crate::plan::PlanError;
use crate::runtime::PlanInstallError;

/// Why no more plans are made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Over {
    /// Nothing repeats in what was recorded.
    #[error("nothing repeats in the first {0} events of the job")]
    NoPeriod(usize),
    /// A plan would be of one iteration alone.
    #[error("no two iterations in a row ask for the same")]
    Unlike,
    /// Most of an iteration's peak are dynamic requests, which no plan has.
    #[error("most of what an iteration holds at its peak has other sizes in the next")]
    Dynamic,
    /// The recording lacked events, again and again.
    #[error("events were made faster than they could be recorded")]
    TooFast,
    /// No plan can be made.
    #[error("no plan can be made of what was recorded")]
    Plan(#[from] PlanError),
    /// It cannot be served from.
    #[error("the plan cannot be served from")]
    Install(#[from] PlanInstallError),
    /// Installing it would have taken more memory than the job ever held.
    #[error("the plan would take more memory than the job held without one")]
    NoMemory,
    /// Iterations are not marked, and none was seen to begin.
    #[error("no iteration was seen to begin since the plan was made")]
    NoMoment,
}
