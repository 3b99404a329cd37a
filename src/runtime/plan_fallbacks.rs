//! The fallbacks that a plan adds: memory behind a request's own place, and parts of the planned pool
//! that are free for long enough, for a request that cannot have its place.

use std::sync::Arc;
use std::time::Duration;

use super::fallback::{Fallback, Outcome, ROUNDS_MAX};
use super::installed::Installed;
use super::{AllocError, Counter, Pools, Runtime};
use crate::limits;
use crate::memory::Chunk;
use crate::pool::Request;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, PlanSpan, Span};

/// Smaller requests take less in the page pool than looking for a free part is worth.
const LEND_MIN: Bytes = Bytes::kib(256);

/// What a request's own place lacks.
enum Lacks {
    /// Nothing: it can be served.
    Nothing,
    /// Memory, at these addresses.
    Memory(Vec<AddressSpan>),
    /// Another allocation is there, or the plan does not have the request now.
    Place,
}

impl Runtime {
    /// A request whose place is taken, or that is not in the plan: a free part of the planned pool that
    /// the plan leaves alone for as long as it lives is the page pool's from now on. Before the process
    /// holds much more than the plan needs, any free part is, that which is left alone for the longest,
    /// or several that are stitched.
    pub(super) fn lend(&self, request: &Request) -> Result<Outcome, AllocError> {
        if request.bytes < LEND_MIN {
            return Ok(Outcome::Nothing);
        }
        let mut pools = match self.pages_now(request) {
            Ok(address) => return Ok(Outcome::Served(address)),
            Err(pools) => pools,
        };
        let (held, is_refused) = (pools.held(), self.was_refused(&pools));
        let Pools { planned: Some(installed), pages, .. } = &mut *pools else { return Ok(Outcome::Nothing) };
        // When a dynamic request goes is dynamic, too: it would be in the plan's way, as long as the job
        // goes by that.
        let is_in_the_way = installed.pool.is_dynamic(request) && !installed.has_deviated();
        if installed.site.stream() != request.stream || is_in_the_way {
            return Ok(Outcome::Nothing);
        }
        let Some(len) = limits::allocation_len(request.bytes) else { return Ok(Outcome::Nothing) };
        let left_alone = installed.pool.left_alone(request, len);
        if let Some(part) = first_of_shortest(&left_alone, len) {
            installed.lend(part, pages);
            return Ok(Outcome::From(Fallback::Suspend));
        }
        let lacks = pages.lacks_at_end(request.bytes, request.stream).unwrap_or(Bytes::MAX);
        if !is_refused && held.checked_add(lacks).is_some_and(|after| after <= installed.usual) {
            return Ok(Outcome::Nothing);
        }
        // What other streams have freed is theirs before the device was waited for. A late plan of several
        // streams ends where memory lacks, and lends nothing before.
        let mut parts = match (installed.has_other_streams(), installed.is_late()) {
            (false, _) => installed.pool.idle_parts(),
            (true, false) => installed.pool.idle_parts_of(request.stream),
            (true, true) => Vec::new(),
        };
        if let Some(shortest) = first_of_shortest(&parts, len) {
            // A late plan is suspended instead where memory lacks: then what is free is to lie together.
            let longest = if installed.is_late() { None } else { installed.pool.left_alone_longest(request, len) };
            installed.lend(longest.unwrap_or(shortest), pages);
            return Ok(Outcome::From(Fallback::Suspend));
        }
        parts.retain(|part| part.len() >= self.config.granule());
        let all: Bytes = parts.iter().map(|part| part.len()).sum();
        if !self.may_stitch() || all + pages.free_bytes() < Bytes::new(len.get() / 2) {
            return Ok(Outcome::Nothing);
        }
        parts.sort_by_key(|part| std::cmp::Reverse(part.len()));
        let mut found = Bytes::ZERO;
        for part in parts {
            if found < len {
                installed.lend(part, pages);
                found += part.len();
            }
        }
        Ok(if found.is_zero() { Outcome::Nothing } else { Outcome::From(Fallback::Suspend) })
    }

    pub(super) fn may_suspend(&self, request: &Request) -> bool {
        let pools = self.lock();
        let may = |plan: &Installed| {
            let is_for = plan.site.stream() == request.stream || plan.has_other_streams();
            plan.is_late() && !plan.is_suspended() && is_for
        };
        self.counters.get(Counter::Iterations) > 0 && pools.planned.as_ref().is_some_and(may)
    }

    /// Suspends the plan, or ends one of several streams, where a lease for the request would make the
    /// process hold more than it did without one: the page pool needs less once it has what the plan
    /// leaves idle.
    pub(super) fn suspend_plan(&self, request: &Request) -> Outcome {
        let mut pools = match self.pages_now(request) {
            Ok(address) => return Outcome::Served(address),
            Err(pools) => pools,
        };
        let lacks = self.lacks_of(&pools, request);
        let after = pools.pages.held().saturating_add(lacks);
        if lacks.is_zero() || after <= pools.most_held.with_plan {
            return Outcome::Nothing;
        }
        let Pools { planned: Some(installed), pages, .. } = &mut *pools else { return Outcome::Nothing };
        if !installed.has_other_streams() {
            return if installed.suspend(pages) { Outcome::From(Fallback::Extend) } else { Outcome::Nothing };
        }
        // What its streams have freed is each stream's until the device was waited for, which is not to be in
        // each iteration: the plan ends. What it had for others lies in the addresses of one stream, and goes
        // back, as the others get their own.
        let of_others = installed.pool.bytes_of_others(installed.site.stream());
        if !self.end_late_plan(&mut pools) {
            return Outcome::Nothing;
        }
        drop(pools);
        self.trim(of_others);
        Outcome::From(Fallback::Extend)
    }

    /// There is no memory left: serves a request where the planned pool is free now, or lends all that
    /// is free there, whichever of the plan's later requests lose their places by that.
    pub(super) fn lend_all(&self, request: &Request) -> Outcome {
        let mut pools = self.lock();
        let Some(installed) = &mut pools.planned else { return Outcome::Nothing };
        if let Some(address) = installed.pool.alloc_anywhere(request) {
            return Outcome::Served(self.note_served(&mut pools, request, address, Counter::REUSED));
        }
        if installed.has_other_streams() && !self.wait_for_device(&pools) {
            return Outcome::Nothing;
        }
        let Pools { planned: Some(installed), pages, .. } = &mut *pools else { return Outcome::Nothing };
        let parts = installed.pool.idle_parts();
        if parts.is_empty() {
            return Outcome::Nothing;
        }
        parts.into_iter().for_each(|part| installed.lend(part, pages));
        Outcome::From(Fallback::Extend)
    }

    /// Waits for the device, after which any stream may have what another has freed. False during a
    /// capture, which that would break, and where the driver fails.
    pub(super) fn wait_for_device(&self, pools: &Pools) -> bool {
        !pools.private.is_open() && self.device.driver().synchronize(self.device.id()).is_ok()
    }

    fn may_stitch(&self) -> bool {
        self.config.pages.stitches && self.device.capabilities().alias
    }

    /// Serves a request of whose place a part is lent: takes back what is free of it, and brings
    /// memory where there is none. Where another allocation is there, the plan goes on without it.
    pub(super) fn serve_unbacked(&self, request: &Request) -> Result<Option<DeviceAddress>, AllocError> {
        for _ in 0..ROUNDS_MAX {
            let holes = {
                let mut pools = self.lock();
                if pools.lacks_for(request).is_empty() {
                    return Ok(None);
                }
                self.finish_deferred(&mut pools);
                match self.take_place(&mut pools, request) {
                    Lacks::Nothing => return Ok(self.alloc_backed(&mut pools, request)),
                    Lacks::Memory(holes) if !self.was_refused(&pools) => holes,
                    Lacks::Memory(_) | Lacks::Place => return Ok(self.pass_over(&mut pools, request)),
                }
            };
            // Outside the lock: others go on.
            self.make_room(holes.iter().map(|hole| hole.len()).sum());
            for hole in holes {
                let leased = self.acquire(hole.len(), Duration::ZERO);
                let mut pools = self.lock();
                let is_filled = leased.is_ok_and(|chunks| self.fill(&mut pools, hole, chunks));
                self.note_held(&mut pools);
                if !is_filled {
                    self.note_refused(&mut pools);
                    return Ok(self.pass_over(&mut pools, request));
                }
            }
        }
        let mut pools = self.lock();
        Ok(self.pass_over(&mut pools, request))
    }

    /// Takes back what is free of a request's place.
    fn take_place(&self, pools: &mut Pools, request: &Request) -> Lacks {
        let may_wait = !pools.private.is_open();
        let lacks = pools.lacks_for(request);
        let waits = pools.planned.as_ref().is_some_and(|installed| request.stream != installed.site.stream());
        if waits && !self.wait_for_device(pools) {
            return Lacks::Place;
        }
        let Pools { planned: Some(installed), pages, .. } = &mut *pools else { return Lacks::Place };
        lacks.into_iter().for_each(|part| installed.take(part, pages));
        let lacks = installed.lacks_for(request);
        let holes = lacks.iter().flat_map(|part| pages.holes_in(installed.site, installed.pool.addresses_of(*part)));
        let holes: Vec<AddressSpan> = holes.collect();
        let bytes = |parts: &[PlanSpan]| parts.iter().map(|part| part.len()).sum::<Bytes>();
        if lacks.is_empty() {
            Lacks::Nothing
        } else if bytes(&lacks) == holes.iter().map(|hole| hole.len()).sum() && may_wait {
            let granule = self.config.granule();
            Lacks::Memory(
                holes.into_iter().filter_map(|hole| whole_granules(installed.site.span(), hole, granule)).collect(),
            )
        } else {
            Lacks::Place
        }
    }

    /// Gives back idle chunks, so that as much new memory leaves the process with what it held.
    fn make_room(&self, len: Bytes) {
        let chunks = {
            let mut pools = self.lock();
            if pools.private.is_open() || pools.asleep.is_some() {
                return;
            }
            pools.pages.trim(len)
        };
        self.give_back(chunks);
    }

    /// Maps chunks into a hole of the site. True where another thread was faster, too; false where that
    /// cannot be.
    pub(super) fn fill(&self, pools: &mut Pools, hole: AddressSpan, chunks: Vec<Arc<Chunk>>) -> bool {
        let Pools { planned, pages, .. } = pools;
        let len: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        let site = planned.as_ref().map(|installed| installed.site);
        let holes = site.map_or_else(Vec::new, |site| pages.holes_in(site, hole));
        if let Some(site) = site.filter(|_| len <= hole.len() && holes == [hole])
            && pages.fill_site(site, hole.start(), &chunks).is_ok()
        {
            return true;
        }
        self.give_back(chunks);
        holes.iter().map(|hole| hole.len()).sum::<Bytes>() < hole.len()
    }

    fn alloc_backed(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        let address = self.alloc_now(pools, request)?;
        pools.note(|tap| tap.alloc(request, address));
        Some(address)
    }

    /// The plan goes on without a request whose place cannot be had: it may have another.
    fn pass_over(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        // Another thread may have gone on meanwhile.
        if pools.lacks_for(request).is_empty() {
            return None;
        }
        let address = pools.planned.as_mut()?.pool.pass_over(request)?;
        Some(self.note_served(pools, request, address, Counter::REUSED))
    }
}

/// The start of the shortest part that is long enough.
fn first_of_shortest(parts: &[PlanSpan], len: Bytes) -> Option<PlanSpan> {
    let fitting = parts.iter().filter(|part| part.len() >= len);
    let shortest = fitting.min_by_key(|part| (part.len(), part.start()))?;
    Span::new(shortest.start(), len)
}

/// The whole granules of a site that a hole lies in.
fn whole_granules(site: AddressSpan, hole: AddressSpan, granule: Bytes) -> Option<AddressSpan> {
    let from = hole.start().checked_distance(site.start())?.round_down(granule);
    let to = hole.end().checked_distance(site.start())?.round_up(granule)?;
    Span::new(site.start().checked_add(from)?, to - from)
}

impl Pools {
    fn lacks_for(&self, request: &Request) -> Vec<PlanSpan> {
        let followed = self.planned.as_ref().filter(|installed| !installed.is_suspended());
        followed.map_or_else(Vec::new, |installed| installed.lacks_for(request))
    }
}
