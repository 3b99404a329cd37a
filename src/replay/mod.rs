//! Runs a trace through the production pools and through models of what people use today, and says what each made of it.

pub mod allocator;
mod beside;
pub mod calls;
mod extend;
mod floor;
mod fresh;
pub mod models;
mod perturb;
mod planning;
mod pools;
pub mod production;
mod record;
mod recorded;
mod report;
mod run;
pub mod script;

pub use extend::repeat;
pub use floor::Floor;
pub use perturb::{NoPerturbation, Perturbation, lacks, perturb};
pub use planning::AutoOptions;
pub use pools::{Job, Least, PoolName, PoolRun, Setup, left_plan, min_capacity, replay};
pub use record::{Placed, Point, Record};
pub use recorded::recorded;
pub use report::{PoolReport, Report, grouped};
pub use run::{Refused, Run, Watch, run};
