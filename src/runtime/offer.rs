//! A plan that comes while the job runs: made ready by another thread, installed between two iterations, with the memory that is there.
//!
//! What is live stays where it is, in the pools that served it. What is idle goes behind the addresses of the static pool; what lacks there comes as it is freed ([`super::installed`]). So the process never
//! holds more for the plan's entries than it held before, or than was live at one time and a 64th: where that could not be, the plan is not installed, and this is counted. What only its detours need comes when one does, as the
//! memory for any request.
//!
//! Not for: making plans ([`crate::auto`]).
//!
//! Invariant: the job waits for memory to be mapped, and for nothing else: neither for a planner nor for the daemon.

use super::installed::Installed;
use super::{Counter, Pools, Runtime};
use crate::ids::StreamId;
use crate::plan::Plan;
use crate::units::Bytes;

/// A job may hold so many chunks more with a plan than without: tiny jobs have no plan otherwise.
const SHARED_CHUNKS: u64 = 4;

/// A plan ready to be served from, without memory.
#[derive(Debug)]
pub struct Offer {
    installed: Installed,
    /// Bytes that are live where an iteration begins, beside what lives for good.
    carried: Bytes,
    /// Without marks an iteration begins where so few bytes are live.
    begins_at: Bytes,
}

impl Runtime {
    /// Makes a plan ready that begins with the cycle: what its job allocated once is there already. `begins_at` bytes are live where an iteration begins. Takes milliseconds, and nobody waits.
    ///
    /// # Errors
    ///
    /// There are no addresses for it, or it cannot be served.
    pub fn prepare(&self, plan: &Plan, begins_at: Bytes) -> Result<Offer, super::PlanInstallError> {
        let installed = Installed::hollow(plan, &self.device, &self.config)?;
        let begins_at = Bytes::new(begins_at.get().saturating_add(begins_at.get() / 64));
        Ok(Offer { installed, carried: plan.carried(), begins_at })
    }

    /// Offers a plan: it is installed where the next iteration begins, in place of the one that is there. Where no iterations are marked that is where `begins_at` bytes are live, or fewer. An offer that
    /// was not taken yet is withdrawn.
    pub fn offer(&self, offer: Option<Offer>) {
        let mut pools = self.lock();
        // It is looked with the next operation whether this is the moment.
        pools.until_look = 1;
        let before = std::mem::replace(&mut pools.offered, offer);
        drop(pools);
        drop(before);
    }

    /// A plan that was to be there before the job could not be had, and the job goes on without.
    pub fn note_plan_refused(&self) {
        let _pools = self.lock();
        self.counters.add(Counter::PlansRefused, 1);
    }

    /// Bytes of the plan's pool that its entries have and that have no memory behind them yet.
    pub fn lacks_behind_plan(&self) -> Bytes {
        self.lock().planned.as_ref().map_or(Bytes::ZERO, Installed::lacks)
    }

    /// An offer waits for an iteration to begin.
    pub fn has_offer(&self) -> bool {
        self.lock().offered.is_some()
    }

    /// Where nobody marks iterations the offer is taken where one seems to begin; that is looked for with every operation, as so little may be live for a moment only. Says when to look again.
    #[cold]
    pub(super) fn look_for_beginning(&self, pools: &mut Pools) -> u32 {
        if self.counters.get(Counter::Iterations) > 0 {
            return super::OPERATIONS_PER_LOOK;
        }
        let live = Bytes::new(self.counters.get(Counter::LiveBytes));
        if pools.offered.as_ref().is_some_and(|offer| live <= offer.begins_at) {
            self.install_offered(pools);
        }
        if pools.offered.is_some() { 1 } else { super::OPERATIONS_PER_LOOK }
    }

    /// There is no memory left: a plan that came while the job ran, and those before it, give up what they have idle, and the job is served as it was before; one that was there before the job gives up its tail. Says whether that was anything.
    #[cold]
    pub(super) fn give_up_plan(&self, stream: StreamId) -> bool {
        let mut pools = self.lock();
        if pools.private.is_open() {
            return false;
        }
        let most = pools.held();
        let mut chunks = Vec::new();
        let had_late_plan = pools.planned.as_ref().is_some_and(Installed::is_late);
        if pools.planned.is_some() && !had_late_plan {
            // A plan that was there before the job keeps its own.
            chunks.extend(pools.take_tail(most));
        } else {
            pools.retire_plan();
            chunks.extend(pools.take_retired(most));
        }
        if chunks.is_empty() {
            return had_late_plan;
        }
        // After a failing driver they go back, and are asked for.
        if pools.pages.extend(&chunks, stream).is_err() {
            self.give_back(chunks);
        }
        self.note_held(&mut pools);
        true
    }

    /// Installs the plan that was offered, if there is one and memory for it.
    #[cold]
    pub(super) fn install_offered(&self, pools: &mut Pools) {
        // Moving memory waits for the device, which would break a capture: the next iteration will do.
        if pools.private.is_open() {
            return;
        }
        let Some(Offer { mut installed, carried, .. }) = pools.offered.take() else { return };
        // Elsewhere they may be gone already.
        let carried = if self.counters.get(Counter::Iterations) > 0 { carried } else { Bytes::ZERO };
        self.finish_deferred(pools);
        let len = installed.cycle_len();
        // The plan that is there gives up what nobody uses.
        let replaced = pools.planned.as_ref().map_or(Bytes::ZERO, Installed::idle).saturating_sub(pools.tail_idle());
        let in_use = pools.held().saturating_sub(pools.idle_chunks() + replaced);
        let after = in_use.saturating_sub(carried).checked_add(len);
        // Streams that do not wait for each other have parts that each are as large as theirs needs to be, and seldom were all at once.
        let live = self.counters.get(Counter::PeakLiveBytes);
        let most = Bytes::new(self.counters.get(Counter::PeakHeldBytes).max(live.saturating_add(live / 64)));
        // What lives from iteration to iteration shares chunks with what does not.
        let shared = self.config.granule().checked_mul(SHARED_CHUNKS).unwrap_or(Bytes::ZERO);
        let most = most.checked_add(shared).unwrap_or(most);
        // Where memory stays with its addresses nothing moves.
        let stays = self.device.capabilities().memory_stays_with_addresses;
        if stays || after.is_none_or(|after| after > most) {
            self.counters.add(Counter::PlansRefused, 1);
            return;
        }
        pools.retire_plan();
        let chunks = pools.take_idle(len);
        // Where a chunk cannot be mapped the plan is served from all the same: what it has no memory for goes elsewhere. The rest is none, or that of a failing driver.
        let rest = installed.fill(&[], chunks).unwrap_or_else(|(rest, _)| rest);
        pools.planned = Some(installed);
        self.counters.add(Counter::PlansInstalled, 1);
        self.give_back(rest);
        self.note_held(pools);
    }
}
