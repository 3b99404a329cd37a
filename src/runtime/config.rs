//! How a runtime is set.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::ids::StreamId;
use crate::ladder::Ladder;
use crate::memory::Device;
use crate::plan::Plan;
use crate::pool::stitching::StitchConfig;
use crate::units::Bytes;

/// How a runtime behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RuntimeConfig {
    /// Size of the chunks that the pools grow by.
    pub granule: Bytes,
    /// The same of the packed pool, where it is another ([`RuntimeConfig::beside`]).
    pub packed_granule: Option<Bytes>,
    /// Up to this many bytes the runtime rather asks for more than stitches what it has.
    pub soft_budget: Bytes,
    /// Above the soft budget it still does while what is idle is at most so many thousandths of what it holds: stitching costs driver calls, and a
    /// little slack saves most of them.
    pub slack_per_mille: u64,
    /// How long a request for memory may wait for other processes.
    pub wait: Duration,
    /// How much the stitching pool may do.
    pub stitch: StitchConfig,
    /// With a plan: what varies may be served where the plan leaves bytes idle.
    pub reuses: bool,
}

impl Default for RuntimeConfig {
    fn default() -> RuntimeConfig {
        RuntimeConfig {
            granule: Bytes::mib(2),
            packed_granule: None,
            soft_budget: Bytes::ZERO,
            slack_per_mille: 20,
            wait: Duration::ZERO,
            stitch: StitchConfig::default(),
            reuses: true,
        }
    }
}

/// Beside a plan whose pool has at least so many of them for each of its streams, what the plan does not serve comes in chunks of [`PACKED_GRANULE`]: each stream has some of its own.
const PACKED_SHARE: u64 = 1024;
const PACKED_GRANULE: Bytes = Bytes::mib(32);

impl RuntimeConfig {
    /// The same for a runtime that goes by `plan` from the beginning: what that does not serve is packed, whole chunks matter at the edges alone, and each takes calls and a descriptor. Where no more of
    /// the large ones can be had, what is stitched goes on with small ones.
    #[must_use]
    pub fn beside(self, plan: &Plan) -> RuntimeConfig {
        let streams: BTreeSet<StreamId> = plan.entries.iter().map(|entry| entry.lane.stream).collect();
        let share = plan.pool_len.get() / PACKED_SHARE / (streams.len() as u64).max(1);
        let is_large = share >= PACKED_GRANULE.get();
        RuntimeConfig { packed_granule: self.packed_granule.or(is_large.then_some(PACKED_GRANULE)), ..self }
    }

    /// The same for a runtime whose plan is made while the job runs: what would leave much of a block over is packed whatever its size. What that moves and stitches ends with the plan, and what lives for good stays where it is.
    #[must_use]
    pub fn planning(self) -> RuntimeConfig {
        RuntimeConfig { stitch: StitchConfig { packed_below: Some(Bytes::MAX), ..self.stitch }, ..self }
    }

    /// The same with sizes of chunks that there are.
    #[must_use]
    pub fn on(self, ladder: &Ladder) -> RuntimeConfig {
        let granule = ladder.step_at_least(self.granule);
        let packed = self.packed_granule.map(|most| ladder.step_at_most(most).max(granule));
        RuntimeConfig { granule, packed_granule: packed, ..self }
    }

    /// How the stitching pool is set on a device. Where chunks cannot leave their addresses, or those of the packed pool are of another size, the two could take nothing from each other, and nothing is packed without a plan.
    pub(super) fn stitching_on(&self, device: &Device) -> StitchConfig {
        let may_move = !device.capabilities().memory_stays_with_addresses && self.packed() == self.granule;
        let packed_below = if may_move { self.stitch.packed_below } else { Some(Bytes::ZERO) };
        StitchConfig { packed_below, ..self.stitch }
    }

    /// Size of the packed pool's chunks.
    pub(super) fn packed(&self) -> Bytes {
        self.packed_granule.unwrap_or(self.granule)
    }
}
