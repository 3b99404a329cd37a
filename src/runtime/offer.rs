//! A plan that comes while the job runs: made ready by another thread, installed between two iterations.
//!
//! It is made around what lives longer than an iteration, at the addresses that the job has already
//! ([`super::installed`]). So nothing moves, and the process never holds more for the plan's entries
//! than it held before, or than was live at one time and a 64th, or than it will have live and a 512th
//! where an earlier run has shown that: where that could not be, the plan is not installed, and this is
//! counted. What only its detours need comes when one does, as the memory for any request.
//!
//! Not for: making plans ([`crate::auto`]).
//!
//! Invariant: the job waits neither for a planner nor for the daemon.

use super::installed::{self, Installed, Ready};
use super::{Counter, Pools, Runtime};
use crate::plan::Plan;
use crate::units::{AddressSpan, Bytes, DeviceAddress, PlanSpan};

/// A job may hold so many granules more with a plan than without: tiny jobs have no plan otherwise.
const SHARED_GRANULES: u64 = 4;

/// A plan ready to be served from.
#[derive(Debug)]
pub struct Offer {
    ready: Ready,
    /// Other streams than that in whose addresses it lies may come for it.
    has_streams: bool,
    /// Without marks an iteration begins where so few bytes are live.
    begins_at: Bytes,
    /// The next iteration is known to have so many bytes more live at its peak than where it begins.
    adds: Bytes,
}

impl Offer {
    /// The same where it is known that the next iteration has so many bytes more live at its peak than
    /// where it begins: the job will hold as much in any case.
    #[must_use]
    pub fn expecting(self, adds: Bytes) -> Offer {
        Offer { adds, ..self }
    }
}

impl Runtime {
    /// The addresses of live allocations with what they have of the addresses in which a plan may come to
    /// lie: the homes of their pieces, where they lie in a place of the page pool.
    pub fn live_spans(&self) -> Vec<(DeviceAddress, AddressSpan)> {
        let pools = self.lock();
        let planned = pools.planned.iter().flat_map(|installed| {
            let span = |of: PlanSpan| installed.pool.addresses_of(of);
            installed.pool.placed().into_iter().map(move |placed| (span(placed.span).start(), span(placed.span)))
        });
        planned.chain(pools.pages.live_homes()).collect()
    }

    /// The addresses in which a plan would lie, from the first one on.
    pub fn range_for(&self, plan: &Plan) -> Option<AddressSpan> {
        self.lock().pages.site_range(installed::main_stream(plan))
    }

    /// Makes a plan ready that begins with the cycle: what its job allocated once is there already.
    /// `begins_at` bytes are live where an iteration begins. Takes milliseconds, and nothing waits.
    ///
    /// # Errors
    ///
    /// There are no addresses for it, or it cannot be served.
    pub fn prepare(&self, plan: &Plan, begins_at: Bytes) -> Result<Offer, super::PlanInstallError> {
        let range = self.range_for(plan);
        let start = range.ok_or(super::PlanInstallError::NoAddresses(plan.pool_len))?.start();
        let ready = Ready::at(plan, start, &self.config)?;
        let begins_at = Bytes::new(begins_at.get().saturating_add(begins_at.get() / 64));
        let has_streams = ready.pool.has_other_streams(ready.stream);
        Ok(Offer { ready, has_streams, begins_at, adds: Bytes::ZERO })
    }

    /// Offers a plan: it is installed where the next iteration begins, in place of the one that is there. Where no iterations are marked that is where `begins_at` bytes are live, or fewer. An offer that
    /// was not taken yet is withdrawn.
    pub fn offer(&self, offer: Option<Offer>) {
        let mut pools = self.lock();
        // Without marks each operation from the next one on may be the moment.
        if self.counters.get(Counter::Iterations) == 0 {
            pools.until_look = 1;
        }
        let before = std::mem::replace(&mut pools.offered, offer);
        drop(pools);
        drop(before);
    }

    /// Installs the plan that was offered if an iteration has just begun: it was marked, and since then
    /// nothing was allocated or freed. Says whether an offer was taken, installed or refused.
    pub fn install_at_beginning(&self) -> bool {
        let mut pools = self.lock();
        let is_beginning = pools.has_begun && pools.until_look == super::OPERATIONS_PER_LOOK;
        if !is_beginning || pools.offered.is_none() {
            return false;
        }
        self.install_offered(&mut pools);
        pools.offered.is_none()
    }

    /// Takes an offer back that was not taken yet.
    pub fn withdraw(&self) -> Option<Offer> {
        self.lock().offered.take()
    }

    /// A plan that was to be there before the job could not be had, and the job goes on without.
    pub fn note_plan_refused(&self) {
        let _pools = self.lock();
        self.counters.add(Counter::PlansRefused, 1);
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

    /// There is no memory left: a plan that came while the job ran ends, and the job is served as it
    /// was before. One that was there before the job stays. Says whether one ended.
    #[cold]
    pub(super) fn give_up_plan(&self) -> bool {
        self.end_late_plan(&mut self.lock())
    }

    /// The same under the lock.
    pub(super) fn end_late_plan(&self, pools: &mut Pools) -> bool {
        let is_late = pools.planned.as_ref().is_some_and(Installed::is_late);
        is_late && !pools.private.is_open() && self.retire_plan(pools)
    }

    /// Serves from the plan no more: what it served stays where it is until it is freed. False where
    /// the device could not be waited for.
    pub(super) fn retire_plan(&self, pools: &mut Pools) -> bool {
        let has_streams = pools.planned.as_ref().is_some_and(Installed::has_other_streams);
        if has_streams && !self.wait_for_device(pools) {
            return false;
        }
        pools.counts_before = pools.planned_counts();
        if let Some(installed) = pools.planned.take() {
            // They lie among the site's memory from now on: who frees one on its stream has to wait for theirs.
            for (address, stream) in installed.live_of_others() {
                if !pools.deferred.has(address) {
                    pools.recorded.entry(address).or_default().insert(stream);
                }
            }
            installed.retire(&mut pools.pages);
        }
        self.note_held(pools);
        true
    }

    /// Installs the plan that was offered, if there is one and memory for it.
    #[cold]
    pub(super) fn install_offered(&self, pools: &mut Pools) {
        // Waiting for the device would break a capture: the next iteration will do.
        if pools.private.is_open() {
            return;
        }
        let Some(offer) = pools.offered.take() else { return };
        self.finish_deferred(pools);
        if !self.install(pools, offer) {
            self.counters.add(Counter::PlansRefused, 1);
        }
    }

    /// False where it cannot be: then the plan that is there stays, unless it had ended by then to make
    /// room for one whose addresses could not be had after all.
    fn install(&self, pools: &mut Pools, offer: Offer) -> bool {
        let Offer { ready, has_streams, adds, .. } = offer;
        let Some(need) = ready.need(&pools.pages) else { return false };
        // Of what is idle the plan keeps what lies where its entries do.
        let after = (pools.held() + need.idle).saturating_sub(pools.idle_chunks()).checked_add(need.lacks);
        // Streams that do not wait for each other have parts that each are as large as theirs needs to be, and seldom were all at once.
        let live = self.counters.get(Counter::PeakLiveBytes);
        // The plan of an earlier run knows of more than this one has had until now.
        let expected = self.counters.get(Counter::LiveBytes).saturating_add(adds.get());
        let most = live.saturating_add(live / 64).max(expected.saturating_add(expected / 512));
        let most = Bytes::new(most.max(self.counters.get(Counter::PeakHeldBytes)));
        let shared = self.config.granule().checked_mul(SHARED_GRANULES).unwrap_or(Bytes::ZERO);
        let Some(after) = after.filter(|after| *after <= most.saturating_add(shared)) else { return false };
        // Where memory stays with its addresses nothing that lacks could be brought.
        if self.device.capabilities().memory_stays_with_addresses {
            return false;
        }
        if has_streams && !self.wait_for_device(pools) || !self.retire_plan(pools) {
            return false;
        }
        let Some(mut installed) = Installed::open(ready, Some(pools.most_held.ever.max(after)), &mut pools.pages)
        else {
            return false;
        };
        installed.take_entries(&mut pools.pages);
        installed.note_usual(after);
        (pools.planned, pools.had_plan) = (Some(installed), true);
        self.counters.add(Counter::PlansInstalled, 1);
        self.note_held(pools);
        true
    }
}
