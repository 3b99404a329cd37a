//! stitchd: the memory daemon for GPU nodes.
//!
//! One daemon per node owns the devices' physical memory. Training processes lease chunks of it over file descriptors, see them as contiguous
//! ("stitched") address ranges, and run their allocations inside those ranges without asking anyone.
//!

pub mod clock;
pub mod driver;
pub mod error;
pub mod ids;
pub mod ladder;
pub mod ledger;
pub mod limits;
pub mod memory;
pub mod plan;
pub mod pool;
pub mod rng;
pub mod runtime;
pub mod session;
pub mod steward;
pub mod store;
pub mod trace;
pub mod units;
pub mod wire;
