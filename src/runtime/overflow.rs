//! The slow path beside a plan: a request that the plan does not serve, no idle space of its pool has room for, and the packed pool cannot serve as it is.
//!
//! The packed pool grows. While little of what the process holds is idle, or within the soft budget, by new chunks; else by chunks that lie idle in it, or in the stitching pool from
//! before the plan came. What still lacks is asked for.

use std::sync::Arc;
use std::time::Duration;

use super::grow::ROUNDS_MAX;
use super::lent::Lent;
use super::lock::Held;
use super::{AllocError, Counter, Pools, Runtime, fill_up};
use crate::ids::StreamId;
use crate::limits;
use crate::memory::{Chunk, MemoryError};
use crate::pool::Request;
use crate::pool::packed::Prefer;
use crate::units::{Bytes, DeviceAddress};

/// What is smaller takes less in the packed pool than stitching it is worth.
const LENT_MIN: Bytes = Bytes::mib(8);

impl Runtime {
    /// Serves a request whose place is taken, or that nobody planned, from what lies idle in the static pool, stitched at addresses of its own. Nothing where that would take as much new memory as the packed pool
    /// does, or cannot be.
    pub(super) fn serve_lent(&self, request: &Request) -> Result<Option<DeviceAddress>, AllocError> {
        // What varies varies in when it goes, too: it would be in the plan's way.
        if request.bytes < LENT_MIN || request.is_dynamic || !self.may_stitch() {
            return Ok(None);
        }
        let mut is_refused = false;
        for _ in 0..ROUNDS_MAX {
            let lacks = {
                let mut pools = match self.pack_now(request) {
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

    /// Serves it from what the plan leaves alone, and a little memory more; where that is not enough, from all that is idle, and as much more as that lacks. Nothing where it should be served elsewhere.
    fn lend(&self, pools: &mut Pools, request: &Request, is_refused: bool) -> Option<Lent> {
        let may_unmap = !pools.private.is_open();
        let idle = pools.planned.as_ref()?.lendable(request)?;
        for all in [false, true] {
            let installed = pools.planned.as_mut()?;
            // Whom the others are in the way of goes elsewhere in turn.
            let may_have = idle.iter().copied().filter(|one| all || one.is_left_alone).collect();
            // What cannot be stitched here may be packed; if not, that says why.
            let lent = installed.serve_lent(request, may_have, may_unmap).unwrap_or(None);
            match lent {
                Some(Lent::At(address)) => {
                    self.note_served(pools, request, address, Counter::REUSED);
                    self.note_held(pools);
                    return lent;
                }
                Some(Lent::Lacks(lacks)) if !is_refused => {
                    let is_little = installed.may_have_tail(lacks);
                    if all || is_little && self.may_grow(pools, lacks) {
                        let packed = pools.packed.lacks(request.bytes, request.stream, Prefer::FewChunks);
                        return lent.filter(|_| packed.is_none_or(|packed| lacks < packed));
                    }
                }
                Some(Lent::Lacks(_)) | None => {}
            }
        }
        None
    }

    /// There is no memory left: serves a request where the plan has nobody now, or puts it together from what is idle there, whoever it will be in the way of.
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

    /// Counts a request that was served beside the plan's order, and tells whoever records.
    fn note_served(&self, pools: &mut Pools, request: &Request, address: DeviceAddress, by: (Counter, Counter)) {
        self.counters.served(by, request.bytes, limits::occupied_len(request.bytes));
        pools.note(|tap| tap.alloc(request, address));
    }

    fn may_stitch(&self) -> bool {
        self.config.stitch.is_on && self.device.capabilities().alias
    }

    /// Serves a request from the packed pool as it is, with what streams have passed meanwhile; or the pools, for whoever has more to do.
    fn pack_now(&self, request: &Request) -> Result<DeviceAddress, Held<'_, Pools>> {
        let mut pools = self.lock();
        self.finish_deferred(&mut pools);
        self.alloc_packed(&mut pools, request).ok_or(pools)
    }

    /// Serves a request from the packed pool; nothing where there is no memory for it to grow by. So much was `refused` for it already.
    pub(super) fn serve_packed(
        &self,
        request: &Request,
        mut refused: Option<Bytes>,
    ) -> Result<Option<DeviceAddress>, AllocError> {
        let Request { bytes, stream, .. } = *request;
        // What was asked for in vain is not asked for again, less is.
        let mut least = Bytes::LARGEST;
        for _ in 0..ROUNDS_MAX {
            let lacks = {
                let mut pools = match self.pack_now(request) {
                    Ok(address) => return Ok(Some(address)),
                    Err(pools) => pools,
                };
                // Of large chunks there are none left: small ones serve, elsewhere, and nobody is asked again for a moment.
                if self.config.packed() != self.config.granule && self.was_refused(&pools) {
                    return Ok(None);
                }
                let too_large = || AllocError::TooLarge { requested: bytes };
                let lacks = pools.packed.lacks(bytes, stream, Prefer::FewChunks).ok_or_else(too_large)?;
                if refused.is_none() && self.may_grow(&pools, lacks) {
                    lacks
                } else {
                    let lacks = pools.packed.lacks(bytes, stream, Prefer::FewNew(0)).ok_or_else(too_large)?;
                    // Moving goes on while it helps.
                    if lacks < least && !(refused.is_none() && self.rather_grows(&mut pools, lacks)) {
                        least = lacks;
                        if self.gather(&mut pools, request)? {
                            continue;
                        }
                    }
                    lacks
                }
            };
            if refused.is_some_and(|refused| lacks >= refused) {
                return Ok(None);
            }
            // Outside the lock: others go on.
            match self.acquire_in(self.config.packed(), lacks, Duration::ZERO) {
                Ok(chunks) => self.pack(&mut self.lock(), chunks, request)?,
                Err(_) => {
                    self.note_refused(&mut self.lock());
                    refused = Some(lacks);
                }
            }
        }
        Ok(None)
    }

    /// Serves a request whose place in the static pool has no memory yet: from chunks that lie idle, or new ones. Nothing where there are none, or where the plan does not have it right now.
    pub(super) fn serve_unbacked(&self, request: &Request) -> Result<Option<DeviceAddress>, AllocError> {
        let mut is_refused = false;
        for _ in 0..ROUNDS_MAX {
            let lacks = {
                let mut pools = self.lock();
                let wanted = pools.planned.as_ref().map_or_else(Vec::new, |installed| installed.lacks_for(request));
                if wanted.is_empty() {
                    return Ok(None);
                }
                self.finish_deferred(&mut pools);
                pools.empty_small_slabs();
                // Moving waits for the device, which would break a capture.
                let may_move = !pools.private.is_open();
                let here = self.config.granule.checked_mul(wanted.len() as u64).unwrap_or(Bytes::MAX);
                let most = pools.planned.as_ref().filter(|_| may_move);
                let most = most.map_or(Bytes::ZERO, |installed| installed.lacks().max(here));
                let chunks = pools.take_idle(most);
                let is_mapped = self.back(&mut pools, &wanted, chunks);
                let was_refused = self.was_refused(&pools);
                let Some(installed) = &mut pools.planned else { return Ok(None) };
                let lacks = installed.lacks_for(request).len() as u64;
                if lacks == 0 {
                    return Ok(self.alloc_backed(&mut pools, request));
                }
                if is_refused || was_refused || !is_mapped {
                    installed.pool.pass_over(request);
                    return Ok(None);
                }
                self.config.granule.checked_mul(lacks).expect("they are slots of one mapping")
            };
            // Outside the lock: others go on.
            match self.acquire(lacks, Duration::ZERO) {
                Ok(chunks) => {
                    let mut pools = self.lock();
                    let wanted = pools.planned.as_ref().map_or_else(Vec::new, |installed| installed.lacks_for(request));
                    is_refused = !self.back(&mut pools, &wanted, chunks);
                    let lacks =
                        pools.planned.as_ref().is_some_and(|installed| !installed.lacks_for(request).is_empty());
                    if !is_refused && !wanted.is_empty() && !lacks {
                        return Ok(self.alloc_backed(&mut pools, request));
                    }
                }
                Err(_) => {
                    self.note_refused(&mut self.lock());
                    is_refused = true;
                }
            }
        }
        Ok(None)
    }

    /// Puts chunks behind the static pool, behind `wanted` first. False where one could not be mapped: what is not served there others may serve.
    fn back(&self, pools: &mut Pools, wanted: &[usize], chunks: Vec<Arc<Chunk>>) -> bool {
        let filled = match &mut pools.planned {
            Some(installed) => installed.fill(wanted, chunks),
            None => Ok(chunks),
        };
        self.note_held(pools);
        let is_mapped = filled.is_ok();
        // Only where another thread was faster, or after a failing driver.
        self.give_back(filled.unwrap_or_else(|(rest, _)| rest));
        is_mapped
    }

    fn alloc_backed(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        let address = self.alloc_now(pools, request)?;
        pools.note(|tap| tap.alloc(request, address));
        Some(address)
    }

    pub(super) fn alloc_packed(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        let address = pools.packed.alloc(request.bytes, request.stream)?;
        self.note_served(pools, request, address, Counter::STITCHED);
        self.note_held(pools);
        Some(address)
    }

    /// Without a plan: idle memory has gone to and fro between the pools for long enough, and so much more of it is better.
    pub(super) fn rather_grows(&self, pools: &mut Pools, lacks: Bytes) -> bool {
        let held = pools.held();
        pools.planned.is_none() && !self.was_refused(pools) && pools.between.rather_grow(lacks, held)
    }

    /// Takes chunks that lie idle in the packed pool into the stitching pool, and says whether there were any.
    pub(super) fn unpack_idle(
        &self,
        pools: &mut Pools,
        missing: Bytes,
        stream: StreamId,
        may_grow: bool,
    ) -> Result<bool, MemoryError> {
        // With a plan the packed pool serves first. Those of another size are of no use here, and moving waits for the device, which would break a capture.
        let may = pools.planned.is_none() && self.config.packed() == self.config.granule && !pools.private.is_open();
        if !may || !pools.packed.has_idle_chunks() || may_grow && self.rather_grows(pools, missing) {
            return Ok(false);
        }
        let chunks = pools.packed.trim(missing);
        let moved: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        pools.between.note_moved(moved);
        let grown = if chunks.is_empty() { Ok(()) } else { pools.stitching.grow(&chunks, stream) };
        self.note_held(pools);
        if grown.is_err() {
            // Only after a failing driver; a round trip under the lock is the least of it.
            self.give_back(chunks);
        }
        grown.map(|()| moved > Bytes::ZERO)
    }

    /// Moves idle chunks to where the packed pool grows, and says whether there were any.
    fn gather(&self, pools: &mut Pools, request: &Request) -> Result<bool, AllocError> {
        let Request { bytes, stream, .. } = *request;
        // Moving waits for the device, which would break a capture.
        if pools.private.is_open() {
            return Ok(false);
        }
        pools.empty_small_slabs();
        let mut chunks = Vec::new();
        // Those of another size are of no use there.
        if self.config.packed() == self.config.granule {
            let outside = (pools.stitching.idle_bytes() + pools.tail_idle()).get() / self.config.granule.get();
            let lacks = pools.packed.lacks(bytes, stream, Prefer::FewNew(outside)).unwrap_or(Bytes::ZERO);
            chunks = pools.take_outside(lacks);
            fill_up(&mut chunks, lacks, |rest| pools.take_tail(rest));
        }
        let moved = pools.packed.grow_by_moving(chunks, bytes, stream);
        if let Ok(count) = &moved {
            let bytes = self.config.packed().checked_mul(*count as u64);
            pools.between.note_moved(bytes.expect("they are slots of one mapping"));
        }
        self.note_held(pools);
        moved.map(|count| count > 0).map_err(|(chunks, source)| self.unpacked(chunks, source, bytes))
    }

    /// Chunks that cannot be mapped go back to whoever owns them.
    fn unpacked(&self, chunks: Vec<Arc<Chunk>>, source: MemoryError, requested: Bytes) -> AllocError {
        // Only after a failing driver; a round trip under the lock is the least of it.
        self.give_back(chunks);
        AllocError::Memory { requested, source }
    }

    /// Maps chunks into the packed pool.
    fn pack(&self, pools: &mut Pools, chunks: Vec<Arc<Chunk>>, request: &Request) -> Result<(), AllocError> {
        let Request { bytes, stream, .. } = *request;
        let grown = pools.packed.grow(&chunks, bytes, stream);
        self.note_held(pools);
        grown.map_err(|source| self.unpacked(chunks, source, bytes))
    }
}
