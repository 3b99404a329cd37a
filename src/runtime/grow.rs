//! The slow path: a request that no pool can serve as it is.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::{AllocError, Counter, OutOfPlan, Pools, Runtime, SourceError, Want};
use crate::error::ErrorKind;
use crate::ids::StreamId;
use crate::ladder::Shape;
use crate::limits;
use crate::memory::Chunk;
use crate::pool::Request;
use crate::pool::small::SmallPool;
use crate::pool::stitching::{Effort, StitchAllocation, Stitched};
use crate::units::{Bytes, DeviceAddress, Span};

/// After a refusal the source is left alone for so long: a job under pressure stitches what it has instead of asking again and again.
const REFUSAL_HOLDS: Duration = Duration::from_millis(20);

/// Rounds of growing and trying again. Another thread may take what was just brought, but not for ever.
pub(super) const ROUNDS_MAX: usize = 64;

/// Why a request failed, where that is not simply for want of memory.
fn reason_of(error: &AllocError) -> Option<Counter> {
    match error {
        AllocError::OutOfMemory { requested, stitchable, .. } if stitchable >= requested => {
            Some(Counter::FailuresFragmented)
        }
        AllocError::OutOfMemory { source, .. } => match source.kind {
            ErrorKind::Exhausted => None,
            ErrorKind::OverLimit => Some(Counter::FailuresLimit),
            // A session that is being attached anew, say.
            ErrorKind::Unavailable | ErrorKind::Conflict => Some(Counter::FailuresUnavailable),
            _ => Some(Counter::FailuresDriver),
        },
        AllocError::Asleep { .. } => Some(Counter::FailuresUnavailable),
        AllocError::TooLarge { .. } => None,
        AllocError::Memory { .. } => Some(Counter::FailuresDriver),
    }
}

impl Runtime {
    #[cold]
    pub(super) fn alloc_slow(&self, request: &Request) -> Result<DeviceAddress, AllocError> {
        if self.lock().asleep.is_some() {
            return Err(AllocError::Asleep { requested: request.bytes });
        }
        let served = {
            // What comes for the first of a thousand threads is enough for the others; a chunk for each could be more than there is.
            let is_small = request.bytes < self.config.granule;
            let _growing = is_small.then(|| self.growing.lock().unwrap_or_else(PoisonError::into_inner));
            self.serve_beside_plan(request)
        };
        if let Err(error) = &served {
            // Under the lock, as every figure: of two threads that fail at once one would go uncounted.
            let mut pools = self.lock();
            self.count_failure(&mut pools, error);
            if matches!(error, AllocError::OutOfMemory { .. }) {
                pools.note(|tap| tap.refused(request));
            }
        }
        served
    }

    pub(super) fn count_failure(&self, pools: &mut Pools, error: &AllocError) {
        // Before their sum: whoever reads the page meanwhile takes what has no reason yet for want of memory.
        if let Some(counter) = reason_of(error) {
            self.counters.add(counter, 1);
        }
        self.counters.add(Counter::Failures, 1);
        if matches!(error, AllocError::OutOfMemory { .. }) {
            pools.marks.note_out_of_memory();
        }
    }

    /// With a plan what it does not serve is packed, and without one what is too small to be stitched; where there is no memory for that, and for all else, blocks are stitched.
    fn serve_beside_plan(&self, request: &Request) -> Result<DeviceAddress, AllocError> {
        let is_small = SmallPool::serves(request.bytes);
        let (has_plan, is_packed) = {
            let pools = self.lock();
            let has_plan = pools.planned.is_some();
            (has_plan, has_plan || !is_small && pools.stitching.leaves_to_packing(request.bytes, request.stream))
        };
        if has_plan {
            if let Some(address) = self.serve_unbacked(request)? {
                return Ok(address);
            }
            if let Some(address) = self.serve_lent(request)? {
                return Ok(address);
            }
        }
        if is_packed && let Some(address) = self.serve_packed(request, None)? {
            return Ok(address);
        }
        let served = if is_small { self.serve_small(request) } else { self.serve_block(request) };
        // Streams were waited for: what they have passed may be enough.
        if is_packed
            && served.is_err()
            && let Some(address) = self.serve_packed(request, (!has_plan).then_some(Bytes::ZERO))?
        {
            return Ok(address);
        }
        if !matches!(served, Err(AllocError::OutOfMemory { .. })) {
            return served;
        }
        if let Some(address) = self.serve_in_the_way(request) {
            return Ok(address);
        }
        if self.give_up_plan(request.stream) { self.serve_beside_plan(request) } else { served }
    }

    fn serve_block(&self, request: &Request) -> Result<DeviceAddress, AllocError> {
        self.block(request.bytes, request.stream, |pools, block| {
            self.counters.served(Counter::STITCHED, request.bytes, block.len);
            pools.note(|tap| tap.alloc(request, block.address));
            block.address
        })
    }

    fn serve_small(&self, request: &Request) -> Result<DeviceAddress, AllocError> {
        let slab_len = {
            let mut pools = self.lock();
            // Another thread may have been faster.
            if let Some(address) = self.alloc_small(&mut pools, request) {
                return Ok(address);
            }
            pools.small.slab_len(request.bytes)
        };
        for _ in 0..ROUNDS_MAX {
            let served = self.block(slab_len, request.stream, |pools, slab| {
                let span = Span::new(slab.address, slab_len).expect("the block is at least that long");
                pools.stitching.lend(slab.address);
                pools.small.add_slab(span, request.bytes, request.stream);
                self.alloc_small(pools, request)
            });
            // Nobody asked for the slab.
            if let Some(address) = served.map_err(|error| error.asked_for(request.bytes))? {
                return Ok(address);
            }
        }
        Err(self.out_of_memory(request.bytes, interrupted()))
    }

    fn alloc_small(&self, pools: &mut Pools, request: &Request) -> Option<DeviceAddress> {
        let address = pools.alloc_small(request, self.counters)?;
        pools.note(|tap| tap.alloc(request, address));
        Some(address)
    }

    /// A block of the stitching pool, by whatever way there is: S1 and S2, growing while little is idle, S3, growing by what is missing; then stitching every
    /// idle chunk and waiting for other processes; at last waiting for our own streams. `take` does the rest under the same lock: nobody else may know
    /// the block before it is what it is to be.
    fn block<T>(
        &self,
        bytes: Bytes,
        stream: StreamId,
        take: impl Fn(&mut Pools, StitchAllocation) -> T,
    ) -> Result<T, AllocError> {
        let mut pressure = Pressure::None;
        // A source that fails, rather than lacks memory, is not asked again for this request: it may take its patience to fail each time.
        let mut failed: Option<SourceError> = None;
        // What was said when others had been waited for is what is told: it has who has the memory, and how long that took.
        let mut said: Option<SourceError> = None;
        for _ in 0..ROUNDS_MAX {
            let missing = {
                let mut pools = self.lock();
                if pools.asleep.is_some() {
                    return Err(AllocError::Asleep { requested: bytes });
                }
                self.finish_deferred(&mut pools);
                let take = |pools: &mut Pools, served| {
                    let taken = take(pools, served);
                    // Not before: what was grown for this request is not idle.
                    self.note_held(pools);
                    Ok(taken)
                };
                if let Some(served) = self.try_idle(&mut pools, bytes, stream) {
                    return take(&mut pools, served);
                }
                let len = pools.stitching.block_len(bytes).ok_or(AllocError::TooLarge { requested: bytes })?;
                if pressure == Pressure::None && self.may_grow(&pools, len) {
                    len
                } else {
                    let effort = if pressure < Pressure::Last { Effort::Usual } else { Effort::Last };
                    match self.stitch(&mut pools, bytes, stream, effort, pressure)? {
                        Stitched::Served(served) => return take(&mut pools, served),
                        // Asking again would bring the same answer; first everything that is here.
                        Stitched::Lacks(_) if effort == Effort::Usual && self.was_refused(&pools) => {
                            pressure = Pressure::Last;
                            continue;
                        }
                        Stitched::Lacks(missing) => {
                            let may_grow = pressure == Pressure::None;
                            let unpacked = self.unpack_idle(&mut pools, missing, stream, may_grow);
                            if unpacked.map_err(|source| AllocError::Memory { requested: bytes, source })? {
                                continue;
                            }
                            missing
                        }
                    }
                }
            };
            // Outside the lock: others go on.
            // Once: where others had nothing to give, our own streams have been waited for since, and the rest is asked for as it is.
            let wait = if pressure == Pressure::Last { self.config.wait } else { Duration::ZERO };
            let grown = match failed.take() {
                None => self.grow(missing, stream, wait),
                Some(error) => Err(GrowError::Source(error)),
            };
            let error = match grown {
                Ok(()) => continue,
                Err(GrowError::Memory(source)) => return Err(AllocError::Memory { requested: bytes, source }),
                Err(GrowError::Source(error)) => error,
            };
            if pressure == Pressure::Last {
                said = Some(error.clone());
            }
            pressure = match pressure {
                Pressure::None if error.kind.is_lack() => Pressure::Usual,
                Pressure::None | Pressure::Usual => Pressure::Last,
                Pressure::Last if self.wait_for_streams(stream) => Pressure::Waited,
                Pressure::Last | Pressure::Waited => {
                    // A source that has failed since is what is wrong, and not who has the memory.
                    let told = said.filter(|_| error.kind.is_lack()).unwrap_or(error);
                    return Err(self.out_of_memory(bytes, told));
                }
            };
            // Who is away may be there again while he is waited for; what is broken is broken.
            failed = Some(error).filter(|error| !error.kind.is_lack() && error.kind != ErrorKind::Unavailable);
        }
        Err(self.out_of_memory(bytes, interrupted()))
    }

    /// Waits for everything that is queued on the device, as cudaFree would: then all idle bytes are for any stream. False if the device does not
    /// answer.
    fn wait_for_streams(&self, stream: StreamId) -> bool {
        // A capture would break.
        if self.lock().private.is_open() {
            return false;
        }
        let synchronize = || self.device.driver().synchronize(self.device.id()).is_ok();
        // Once for the events that frees wait for.
        if !synchronize() {
            return false;
        }
        let moment = {
            let mut pools = self.lock();
            pools.marks.note_retry();
            self.finish_deferred(&mut pools);
            pools.empty_small_slabs();
            pools.stitching.moment()
        };
        // And once for all that was freed up to that moment. What another thread frees from here on has not been waited for.
        if !synchronize() {
            return false;
        }
        let mut pools = self.lock();
        for other in pools.stitching.unpassed_streams(stream) {
            pools.stitching.note_passed(other, moment);
        }
        true
    }

    fn try_idle(&self, pools: &mut Pools, bytes: Bytes, stream: StreamId) -> Option<StitchAllocation> {
        if let Some(served) = pools.stitching.alloc(bytes, stream) {
            return Some(served);
        }
        if !self.pass_streams(pools, stream) {
            return None;
        }
        pools.stitching.alloc(bytes, stream)
    }

    /// Growing comes before stitching within the soft budget and while little is idle, unless the source has just refused.
    pub(super) fn may_grow(&self, pools: &Pools, len: Bytes) -> bool {
        let Some(after) = pools.held().checked_add(len) else { return false };
        let slack = u128::from(after.get()) * u128::from(self.config.slack_per_mille) / 1000;
        let is_wanted = after <= self.config.soft_budget || u128::from(pools.idle().get()) <= slack;
        is_wanted && !self.was_refused(pools)
    }

    /// The source refuses: it is left alone for a moment.
    pub(super) fn note_refused(&self, pools: &mut Pools) {
        pools.refused_until = self.clock.now() + REFUSAL_HOLDS;
        pools.between.note_refused();
    }

    /// The source has refused a moment ago.
    pub(super) fn was_refused(&self, pools: &Pools) -> bool {
        self.clock.now() < pools.refused_until
    }

    fn stitch(
        &self,
        pools: &mut Pools,
        bytes: Bytes,
        stream: StreamId,
        effort: Effort,
        pressure: Pressure,
    ) -> Result<Stitched, AllocError> {
        let before = pools.stitching.counts().stitched_bytes;
        let stitched = pools.stitching.stitch(bytes, stream, effort);
        // Where more might have been had the request was in no need.
        if pressure > Pressure::None || self.was_refused(pools) {
            let rescued = pools.stitching.counts().stitched_bytes - before;
            self.counters.add(Counter::RescuedBytes, rescued.get());
        }
        let orphans = pools.stitching.orphans();
        if !orphans.is_empty() {
            // Only after a failing driver; a round trip under the lock is the least of it.
            self.give_back(orphans);
        }
        if !matches!(stitched, Ok(Stitched::Served(_))) {
            self.note_held(pools);
        }
        stitched.map_err(|source| AllocError::Memory { requested: bytes, source })
    }

    /// S4: asks for `len` bytes and maps them.
    fn grow(&self, len: Bytes, stream: StreamId, wait: Duration) -> Result<(), GrowError> {
        let acquired = self.acquire(len, wait);
        let mut pools = self.lock();
        let chunks = match acquired {
            Ok(chunks) => chunks,
            Err(error) => {
                self.note_refused(&mut pools);
                return Err(GrowError::Source(error));
            }
        };
        let Err(error) = pools.stitching.grow(&chunks, stream) else {
            // Under the lock: another thread may trim them at once, and gives up handles that are its alone.
            drop(chunks);
            return Ok(());
        };
        self.note_held(&mut pools);
        drop(pools);
        self.give_back(chunks);
        Err(GrowError::Memory(error))
    }

    /// Chunks of at least `len` bytes together, in as many leases as that takes: all of them, or none and why.
    pub(super) fn acquire(&self, len: Bytes, wait: Duration) -> Result<Vec<Arc<Chunk>>, SourceError> {
        self.acquire_in(self.config.granule, len, wait)
    }

    /// The same in chunks of this size.
    pub(super) fn acquire_in(
        &self,
        granule: Bytes,
        len: Bytes,
        wait: Duration,
    ) -> Result<Vec<Arc<Chunk>>, SourceError> {
        // What is nobody's any more may be what is asked for.
        self.give_back_spent();
        self.check_limit(len)?;
        let most = granule.checked_mul(limits::ACQUIRE_CHUNKS_MAX).unwrap_or(Bytes::LARGEST);
        let (mut chunks, mut left) = (Vec::new(), len);
        while left > Bytes::ZERO {
            let part = left.min(most);
            match self.source.acquire(Want { len: part, shape: Shape::Uniform(granule), plan: None, wait }) {
                Ok(some) => chunks.extend(some),
                Err(error) => {
                    if !chunks.is_empty() {
                        self.give_back(chunks);
                    }
                    return Err(error);
                }
            }
            left -= part;
        }
        Ok(chunks)
    }

    /// Whether the process may hold so much more, by the limit that it has set itself. Threads that grow at the same moment may pass it by what each asks for.
    pub(super) fn check_limit(&self, more: Bytes) -> Result<(), SourceError> {
        let (held, limit) = {
            let pools = self.lock();
            (pools.held(), pools.limit)
        };
        let Some(limit) = limit.filter(|limit| held.checked_add(more).is_none_or(|after| after > *limit)) else {
            return Ok(());
        };
        let message = format!(
            "{more} more are not asked for: this process has set itself a limit of {limit} on this device, and holds {held}"
        );
        Err(SourceError { kind: ErrorKind::OverLimit, message })
    }

    pub(super) fn out_of_memory(&self, requested: Bytes, source: SourceError) -> AllocError {
        let pools = self.lock();
        let live = Bytes::new(self.counters.get(Counter::LiveBytes));
        let of_plan = pools.planned.as_ref().map(|installed| OutOfPlan {
            idle: installed.idle_of_plan(),
            deviations: pools.planned_counts().deviations(),
        });
        AllocError::OutOfMemory {
            requested,
            held: pools.held(),
            live,
            stitchable: pools.idle_chunks(),
            parked: pools.idle(),
            contiguous: pools.stitching.usage().largest_contiguous.max(pools.packed.usage().largest_contiguous),
            of_plan,
            source,
        }
    }
}

/// What has been tried and refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Pressure {
    /// Nothing.
    None,
    /// Growing by all that is wanted.
    Usual,
    /// Growing by what stitching within the limit lacks.
    Last,
    /// Everything but giving up, and our own streams are waited for.
    Waited,
}

enum GrowError {
    Source(SourceError),
    Memory(crate::memory::MemoryError),
}

fn interrupted() -> SourceError {
    SourceError { kind: ErrorKind::Exhausted, message: "other threads took all memory as it came".into() }
}
