//! The fallbacks that a plan adds: memory behind a request's own place, and idle parts of the static
//! pool, mapped side by side for a request that cannot have its place.

use std::sync::Arc;
use std::time::Duration;

use super::fallback::ROUNDS_MAX;
use super::lent::Lent;
use super::{AllocError, Counter, Pools, Runtime, SourceError};
use crate::memory::Chunk;
use crate::pool::Request;
use crate::units::{Bytes, DeviceAddress, PlanSpan};

/// A smaller request takes less in the page pool than stitching it is worth.
const LENT_MIN: Bytes = Bytes::mib(8);

impl Runtime {
    /// Serves a request whose place is taken, or that is not in the plan, from idle parts of the static pool, stitched at
    /// addresses of its own. Nothing where that would take as much new memory as the page pool does, or cannot be.
    pub(super) fn serve_lent(&self, request: &Request) -> Result<Option<DeviceAddress>, AllocError> {
        // What varies varies in when it goes, too: it would be in the plan's way.
        if request.bytes < LENT_MIN || request.is_dynamic || !self.may_stitch() {
            return Ok(None);
        }
        let mut is_refused = false;
        for _ in 0..ROUNDS_MAX {
            let lacks = {
                let mut pools = match self.pages_now(request) {
                    Ok(address) => return Ok(Some(address)),
                    Err(pools) => pools,
                };
                is_refused |= self.was_refused(&pools);
                match self.lend(&mut pools, request, is_refused) {
                    Some(Lent::At(address)) => return Ok(Some(address)),
                    Some(Lent::Lacks(lacks)) => lacks,
                    None => return Ok(None),
                }
            };
            // Outside the lock: others go on.
            let Ok(chunks) = self.acquire(lacks, Duration::ZERO) else {
                self.note_refused(&mut self.lock());
                is_refused = true;
                continue;
            };
            let mut pools = self.lock();
            let installed = pools.planned.as_mut();
            let grown = installed.map(|installed| installed.grow_tail(&chunks, request.stream));
            if matches!(grown, Some(Ok(true))) {
                self.note_held(&mut pools);
                // Under the lock: another thread may give them back at once, and gives up handles that are its alone.
                drop(chunks);
            } else {
                // Another thread was faster, or the driver fails.
                drop(pools);
                self.give_back(chunks);
                is_refused = true;
            }
        }
        Ok(None)
    }

    /// Serves it from what the plan leaves alone, and a little memory more; where that is not enough,
    /// from all that is idle, and as much more as that lacks. Nothing where the page pool should serve
    /// it.
    fn lend(&self, pools: &mut Pools, request: &Request, is_refused: bool) -> Option<Lent> {
        let may_unmap = !pools.private.is_open();
        let idle = pools.planned.as_ref()?.lendable(request)?;
        for all in [false, true] {
            let installed = pools.planned.as_mut()?;
            // Whom the others are in the way of goes elsewhere in turn.
            let may_have = idle.iter().copied().filter(|one| all || one.is_left_alone).collect();
            // What cannot be stitched here the page pool may serve; if not, that says why.
            let lent = installed.serve_lent(request, may_have, may_unmap).unwrap_or(None);
            match lent {
                Some(Lent::At(address)) => {
                    self.note_served(pools, request, address, Counter::REUSED);
                    self.note_held(pools);
                    return lent;
                }
                Some(Lent::Lacks(lacks)) if !is_refused => {
                    let is_little = installed.may_have_tail(lacks);
                    if all || is_little && self.may_grow(pools, request.bytes, lacks) {
                        let pages = pools.lacks_of_pages(request);
                        return lent.filter(|_| pages.is_none_or(|pages| lacks < pages));
                    }
                }
                Some(Lent::Lacks(_)) | None => {}
            }
        }
        None
    }

    /// There is no memory left: serves a request where the static pool is free now, or from its idle
    /// parts, whichever of the plan's later requests lose their places by that.
    pub(super) fn serve_in_the_way(&self, request: &Request) -> Option<DeviceAddress> {
        let mut pools = self.lock();
        if let Some(address) = pools.planned.as_mut()?.pool.alloc_anywhere(request) {
            self.note_served(&mut pools, request, address, Counter::REUSED);
            return Some(address);
        }
        let lent = if self.may_stitch() { self.lend(&mut pools, request, true) } else { None };
        match lent? {
            Lent::At(address) => Some(address),
            Lent::Lacks(_) => None,
        }
    }

    fn may_stitch(&self) -> bool {
        self.config.pages.stitches && self.device.capabilities().alias
    }

    /// Serves a request whose place in the static pool has no memory yet: from chunks that lie idle, or
    /// new ones. Nothing where there are none, or where the plan does not have the request right now.
    pub(super) fn serve_unbacked(&self, request: &Request) -> Result<Option<DeviceAddress>, AllocError> {
        for _ in 0..ROUNDS_MAX {
            let lacks = {
                let mut pools = self.lock();
                let lacks = pools.lacks_for(request);
                if lacks.is_empty() {
                    return Ok(None);
                }
                self.finish_deferred(&mut pools);
                let is_mapped = self.back_with_idle(&mut pools, &lacks);
                let lacks = pools.lacks_for(request);
                if lacks.is_empty() {
                    return Ok(self.alloc_backed(&mut pools, request));
                }
                if self.was_refused(&pools) || !is_mapped {
                    return Ok(pools.pass_over(request));
                }
                lacks
            };
            // Outside the lock: others go on.
            let leased = self.lease_for(&lacks);
            let mut pools = self.lock();
            let Ok(chunks) = leased else {
                self.note_refused(&mut pools);
                return Ok(pools.pass_over(request));
            };
            let lacks = pools.lacks_for(request);
            let is_mapped = self.back(&mut pools, &lacks, chunks);
            if !lacks.is_empty() && pools.lacks_for(request).is_empty() {
                return Ok(self.alloc_backed(&mut pools, request));
            }
            if !is_mapped {
                return Ok(pools.pass_over(request));
            }
        }
        Ok(None)
    }

    /// New chunks that fill holes exactly.
    fn lease_for(&self, holes: &[PlanSpan]) -> Result<Vec<Arc<Chunk>>, SourceError> {
        let mut chunks = Vec::new();
        for hole in holes {
            match self.acquire(hole.len(), Duration::ZERO) {
                Ok(some) => chunks.extend(some),
                Err(error) => {
                    self.give_back(chunks);
                    return Err(error);
                }
            }
        }
        Ok(chunks)
    }

    /// Puts idle chunks behind the static pool, behind `lacks` first. False where a chunk could not be
    /// mapped.
    fn back_with_idle(&self, pools: &mut Pools, lacks: &[PlanSpan]) -> bool {
        // Moving waits for the device, which would break a capture.
        let Some(installed) = pools.planned.as_ref().filter(|_| !pools.private.is_open()) else { return true };
        let here: Bytes = lacks.iter().map(|part| part.len()).sum();
        let chunks = pools.take_idle(installed.lacks().max(here));
        self.back(pools, lacks, chunks)
    }

    /// Puts chunks behind the static pool, behind `lacks` first. False where one could not be mapped:
    /// then the page pool may serve the request.
    fn back(&self, pools: &mut Pools, lacks: &[PlanSpan], chunks: Vec<Arc<Chunk>>) -> bool {
        let filled = match &mut pools.planned {
            Some(installed) => installed.fill(lacks, chunks),
            None => Ok(chunks),
        };
        self.note_held(pools);
        let is_mapped = filled.is_ok();
        // Chunks that fit into no hole, and those of a failing driver.
        self.give_back(filled.unwrap_or_else(|(rest, _)| rest));
        is_mapped
    }

    fn alloc_backed(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        let address = self.alloc_now(pools, request)?;
        pools.note(|tap| tap.alloc(request, address));
        Some(address)
    }
}

impl Pools {
    fn lacks_for(&self, request: &Request) -> Vec<PlanSpan> {
        self.planned.as_ref().map_or_else(Vec::new, |installed| installed.lacks_for(request))
    }

    /// The plan goes on without a request for which it has no memory. Serves nothing.
    fn pass_over(&mut self, request: &Request) -> Option<DeviceAddress> {
        if let Some(installed) = &mut self.planned {
            installed.pool.pass_over(request);
        }
        None
    }

    /// New bytes that a request would take in the page pool.
    fn lacks_of_pages(&self, request: &Request) -> Option<Bytes> {
        let at_end = self.pages.lacks_at_end(request.bytes, request.stream)?;
        let stitched = self.pages.shortage(request.bytes, request.stream);
        Some(stitched.map_or(at_end, |shortage| shortage.lacks.min(at_end)))
    }
}
