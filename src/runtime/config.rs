//! How a runtime is set.

use std::time::Duration;

use crate::ladder::Ladder;
use crate::pool::pages::PagePolicy;
use crate::units::Bytes;

/// How a runtime behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RuntimeConfig {
    /// How the page pool grows and stitches.
    pub pages: PagePolicy,
    /// Up to this many bytes the runtime leases memory rather than stitches what it has.
    pub soft_budget: Bytes,
    /// How long a request for memory may wait for other processes.
    pub wait: Duration,
    /// With a plan: dynamic requests may be served where the plan leaves bytes idle.
    pub reuses: bool,
}

impl Default for RuntimeConfig {
    fn default() -> RuntimeConfig {
        RuntimeConfig { pages: PagePolicy::default(), soft_budget: Bytes::ZERO, wait: Duration::ZERO, reuses: true }
    }
}

impl RuntimeConfig {
    /// The same with chunks of one granule only.
    #[must_use]
    pub fn with_uniform_chunks(self) -> RuntimeConfig {
        RuntimeConfig { pages: self.pages.with_uniform_chunks(), ..self }
    }

    /// The same with a granule that the ladder has.
    #[must_use]
    pub fn on(self, ladder: &Ladder) -> RuntimeConfig {
        let granule = ladder.step_at_least(self.pages.granule);
        RuntimeConfig { pages: PagePolicy { granule, ..self.pages }, ..self }
    }

    /// The smallest chunk.
    pub(super) fn granule(&self) -> Bytes {
        self.pages.granule
    }
}
