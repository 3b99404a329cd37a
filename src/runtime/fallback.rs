//! The order of fallbacks: what is tried for a request that no pool serves as it is.
//!
//! [`Fallback`] is the order, [`Runtime::serve`] walks it. A step either serves the request, brings
//! memory (then the request is tried again from that step, as another thread may have been faster),
//! or can do nothing, and the next one is tried.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::lock::Held;
use super::{AllocError, Counter, OutOfPlan, Pools, Runtime, SourceError};
use crate::error::ErrorKind;
use crate::ids::StreamId;
use crate::limits;
use crate::memory::Chunk;
use crate::pool::Request;
use crate::pool::pages::Shortage;
use crate::units::{Bytes, DeviceAddress};

/// Steps that one request may take. Another thread may take what was just brought, but not for ever.
pub(super) const ROUNDS_MAX: usize = 64;

/// What is tried, in this order. *Lease* stands for a round trip to the daemon; a *wait* may take as
/// long as it says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Fallback {
    /// With a plan: what the request's own place lacks. Free memory of the page pool, or a lease.
    Back,
    /// With a plan: parts of the planned pool that are free for long enough, for the page pool. No call.
    Lend,
    /// With a plan that came while the job ran: ends it until the next mark, where the process would
    /// hold more than it did without. No call. Skipped without marks, which say when to go on, and for
    /// other streams than the plan's, which have no use for what is idle there. A plan of several streams
    /// ends for good, for a request of any of them: waits for the device, and unmaps. Skipped during a capture.
    Suspend,
    /// New chunks at the end of the stream's addresses, while little is idle. A lease. Skipped after
    /// a refusal.
    Extend,
    /// A place over idle memory, and new chunks for what it lacks. Map calls, and a lease where
    /// something lacks: that is skipped after a refusal.
    Stitch,
    /// Idle chunks of other streams. Unmapping waits for the device. Skipped during a capture.
    Gather,
    /// The same as `Stitch`, and waits for other processes.
    Wait,
    /// Waits for all streams of the device, once. Skipped during a capture.
    Streams,
    /// With a plan: parts of the planned pool that later requests need.
    InTheWay,
    /// Ends a plan that was made while the job ran.
    GiveUpPlan,
}

impl Fallback {
    const ALL: [Fallback; 10] = [
        Fallback::Back,
        Fallback::Lend,
        Fallback::Suspend,
        Fallback::Extend,
        Fallback::Stitch,
        Fallback::Gather,
        Fallback::Wait,
        Fallback::Streams,
        Fallback::InTheWay,
        Fallback::GiveUpPlan,
    ];

    fn next(self) -> Option<Fallback> {
        Fallback::ALL.into_iter().find(|step| *step > self)
    }
}

/// What came of a step.
pub(super) enum Outcome {
    Served(DeviceAddress),
    /// Memory came: the request is tried again from this step.
    From(Fallback),
    Nothing,
}

/// What was tried for one request.
#[derive(Default)]
struct Tried {
    /// A source that fails, rather than lacks memory, is not asked again for this request: it may
    /// take its whole timeout to fail each time.
    is_source_broken: bool,
    /// The last refusal.
    refusal: Option<SourceError>,
    /// The refusal after other processes were waited for: it names who has the memory.
    after_wait: Option<SourceError>,
    has_waited_for_streams: bool,
}

impl Tried {
    fn reason(self) -> SourceError {
        let interrupted = || SourceError {
            kind: ErrorKind::Exhausted,
            message: "other threads took all memory as it came".to_owned(),
        };
        let last = self.refusal.unwrap_or_else(interrupted);
        self.after_wait.filter(|_| last.kind.is_lack()).unwrap_or(last)
    }
}

/// Why a request failed, where that is not simply for want of memory.
fn reason_of(error: &AllocError) -> Option<Counter> {
    match error {
        AllocError::OutOfMemory { requested, stitchable, .. } if stitchable >= requested => {
            Some(Counter::FailuresFragmented)
        }
        AllocError::OutOfMemory { source, .. } => match source.kind {
            ErrorKind::Exhausted => None,
            ErrorKind::OverLimit => Some(Counter::FailuresLimit),
            // A session that is reattaching, say.
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
        let served = {
            // A chunk that comes for the first of a thousand threads is enough for the others.
            let is_small = request.bytes < self.config.granule();
            let _growing = is_small.then(|| self.growing.lock().unwrap_or_else(PoisonError::into_inner));
            self.serve(request)
        };
        if let Err(error) = &served {
            // Under the lock, as every figure: of two threads that fail at once one would go uncounted.
            let mut pools = self.lock();
            self.count_failure(&mut pools, error);
            self.note_held(&mut pools);
            if matches!(error, AllocError::OutOfMemory { .. }) {
                pools.note(|tap| tap.refused(request));
            }
        }
        served
    }

    pub(super) fn count_failure(&self, pools: &mut Pools, error: &AllocError) {
        // Before their sum: a reader takes what has no reason yet for want of memory.
        if let Some(counter) = reason_of(error) {
            self.counters.add(counter, 1);
        }
        self.counters.add(Counter::Failures, 1);
        if matches!(error, AllocError::OutOfMemory { .. }) {
            pools.marks.note_out_of_memory();
        }
    }

    /// Walks the fallbacks until one serves the request.
    fn serve(&self, request: &Request) -> Result<DeviceAddress, AllocError> {
        let mut tried = Tried::default();
        let mut step = Fallback::Back;
        for _ in 0..ROUNDS_MAX {
            if self.lock().asleep.is_some() {
                return Err(AllocError::Asleep { requested: request.bytes });
            }
            step = match self.try_step(step, request, &mut tried)? {
                Outcome::Served(address) => return Ok(address),
                Outcome::From(step) => step,
                Outcome::Nothing => match step.next() {
                    Some(next) => next,
                    None => break,
                },
            };
        }
        Err(self.out_of_memory(request.bytes, tried.reason()))
    }

    fn try_step(&self, step: Fallback, request: &Request, tried: &mut Tried) -> Result<Outcome, AllocError> {
        let served = |served: Option<DeviceAddress>| Ok(served.map_or(Outcome::Nothing, Outcome::Served));
        match step {
            Fallback::Back if self.has_plan() => served(self.serve_unbacked(request)?),
            Fallback::Lend if self.has_plan() => self.lend(request),
            Fallback::Suspend if self.may_suspend(request) => Ok(self.suspend_plan(request)),
            Fallback::Extend => self.extend(request, tried),
            Fallback::Stitch => self.stitch(request, step, Duration::ZERO, tried),
            Fallback::Gather => self.gather(request),
            Fallback::Wait => self.stitch(request, step, self.wait_of(tried), tried),
            Fallback::Streams => Ok(self.wait_for_streams(tried)),
            Fallback::InTheWay if self.has_plan() => Ok(self.lend_all(request)),
            Fallback::GiveUpPlan if self.give_up_plan() => Ok(Outcome::From(Fallback::Extend)),
            Fallback::Back | Fallback::Lend | Fallback::Suspend | Fallback::InTheWay | Fallback::GiveUpPlan => {
                Ok(Outcome::Nothing)
            }
        }
    }

    fn has_plan(&self) -> bool {
        self.lock().planned.as_ref().is_some_and(|installed| !installed.is_suspended())
    }

    /// Serves a request from the page pool as it is, with what streams have passed meanwhile; or the
    /// pools, for more to be done.
    pub(super) fn pages_now(&self, request: &Request) -> Result<DeviceAddress, Held<'_, Pools>> {
        let mut pools = self.lock();
        self.finish_deferred(&mut pools);
        match pools.pages.alloc(request.bytes, request.stream) {
            Some(address) => Ok(self.note_served(&mut pools, request, address, Counter::POOL)),
            None => Err(pools),
        }
    }

    /// Counts a request that was served here, and records it.
    pub(super) fn note_served(
        &self,
        pools: &mut Pools,
        request: &Request,
        address: DeviceAddress,
        by: (Counter, Counter),
    ) -> DeviceAddress {
        self.counters.served(by, request.bytes, limits::occupied_len(request.bytes));
        pools.note(|tap| tap.alloc(request, address));
        self.note_held(pools);
        address
    }

    fn extend(&self, request: &Request, tried: &mut Tried) -> Result<Outcome, AllocError> {
        let Request { bytes, stream, .. } = *request;
        let lacks = {
            let pools = match self.pages_now(request) {
                Ok(address) => return Ok(Outcome::Served(address)),
                Err(pools) => pools,
            };
            let lacks = pools.pages.lacks_at_end(bytes, stream).ok_or(AllocError::TooLarge { requested: bytes })?;
            if !self.extends(&pools, bytes, lacks) {
                return Ok(Outcome::Nothing);
            }
            lacks
        };
        match self.lease(self.ahead(bytes, lacks), lacks, Duration::ZERO, tried) {
            Some(chunks) => self.put(request, None, chunks, Fallback::Extend),
            None => Ok(Outcome::Nothing),
        }
    }

    fn stitch(
        &self,
        request: &Request,
        step: Fallback,
        wait: Duration,
        tried: &mut Tried,
    ) -> Result<Outcome, AllocError> {
        let Request { bytes, stream, .. } = *request;
        let (lacks, shortage) = {
            let mut pools = match self.pages_now(request) {
                Ok(address) => return Ok(Outcome::Served(address)),
                Err(pools) => pools,
            };
            let at_end = pools.pages.lacks_at_end(bytes, stream).ok_or(AllocError::TooLarge { requested: bytes })?;
            let shortage = self.shortage_below(&pools, request, at_end);
            match shortage {
                Some(shortage) if shortage.lacks.is_zero() => {
                    return self.stitch_now(&mut pools, request, &shortage, Vec::new(), step);
                }
                _ if step == Fallback::Stitch && self.was_refused(&pools) => return Ok(Outcome::Nothing),
                Some(shortage) => (shortage.lacks, Some(shortage)),
                // What can move to the end is not leased.
                None => (at_end.saturating_sub(pools.movable(bytes, stream)), None),
            }
        };
        if lacks.is_zero() {
            return Ok(Outcome::Nothing);
        }
        let len = if step == Fallback::Stitch { self.ahead(bytes, lacks) } else { lacks };
        match self.lease(len, lacks, wait, tried) {
            // What is not stitched may still have idle chunks to move.
            Some(chunks) => {
                self.put(request, shortage.as_ref(), chunks, shortage.as_ref().map_or(Fallback::Gather, |_| step))
            }
            None => Ok(Outcome::Nothing),
        }
    }

    /// A request that lacks so much at the end gets it there, and is not stitched.
    fn extends(&self, pools: &Pools, bytes: Bytes, lacks: Bytes) -> bool {
        let is_small = bytes < self.config.pages.stitch_min;
        !self.was_refused(pools) && (is_small || self.may_grow(pools, bytes, lacks))
    }

    /// What is leased for a request that no free run serves, if no more is leased than it lacks.
    pub(super) fn lacks_of(&self, pools: &Pools, request: &Request) -> Bytes {
        let Request { bytes, stream, .. } = *request;
        let Some(at_end) = pools.pages.lacks_at_end(bytes, stream) else { return Bytes::ZERO };
        if self.extends(pools, bytes, at_end) {
            return at_end;
        }
        self.shortage_below(pools, request, at_end).map_or(at_end, |shortage| shortage.lacks)
    }

    /// What a request lacks that is stitched, where that is less than what it lacks at the end.
    fn shortage_below(&self, pools: &Pools, request: &Request, at_end: Bytes) -> Option<Shortage> {
        let shortage = pools.pages.shortage(request.bytes, request.stream, self.was_refused(pools));
        shortage.filter(|shortage| shortage.lacks < at_end)
    }

    /// Puts new chunks into the page pool, and serves the request if they are enough.
    fn put(
        &self,
        request: &Request,
        shortage: Option<&Shortage>,
        chunks: Vec<Arc<Chunk>>,
        step: Fallback,
    ) -> Result<Outcome, AllocError> {
        let mut pools = self.lock();
        if let Some(shortage) = shortage {
            return self.stitch_now(&mut pools, request, shortage, chunks, step);
        }
        if let Err(source) = pools.pages.extend(&chunks, request.stream) {
            drop(pools);
            self.give_back(chunks);
            return Err(AllocError::Memory { requested: request.bytes, source });
        }
        // Under the lock: another thread may trim them at once, and gives up handles that are its alone.
        drop(chunks);
        match pools.pages.alloc(request.bytes, request.stream) {
            Some(address) => Ok(Outcome::Served(self.note_served(&mut pools, request, address, Counter::POOL))),
            None => {
                self.note_held(&mut pools);
                Ok(Outcome::From(step))
            }
        }
    }

    fn stitch_now(
        &self,
        pools: &mut Pools,
        request: &Request,
        shortage: &Shortage,
        chunks: Vec<Arc<Chunk>>,
        step: Fallback,
    ) -> Result<Outcome, AllocError> {
        let Request { bytes, stream, .. } = *request;
        let before = pools.pages.counts().stitched_bytes;
        let stitched = pools.pages.stitch(&shortage.pieces, &chunks, bytes, stream);
        drop(chunks);
        // Where more could have been leased the request was in no need.
        if self.was_refused(pools) {
            let rescued = pools.pages.counts().stitched_bytes - before;
            self.counters.add(Counter::RescuedBytes, rescued.get());
        }
        match stitched {
            Ok(Some(address)) => {
                if !pools.private.is_open() {
                    pools.pages.drop_old_places();
                }
                Ok(Outcome::Served(self.note_served(pools, request, address, Counter::POOL)))
            }
            Ok(None) => {
                self.note_held(pools);
                Ok(Outcome::From(step))
            }
            Err((chunks, source)) => {
                // Only after a failing driver; a round trip under the lock is the least of it.
                self.give_back(chunks);
                self.note_held(pools);
                Err(AllocError::Memory { requested: bytes, source })
            }
        }
    }

    /// Moves idle chunks of other streams to the stream. Where chunks cannot be shown twice, the
    /// stream's own idle chunks move to its end.
    fn gather(&self, request: &Request) -> Result<Outcome, AllocError> {
        let Request { bytes, stream, .. } = *request;
        let mut pools = match self.pages_now(request) {
            Ok(address) => return Ok(Outcome::Served(address)),
            Err(pools) => pools,
        };
        if pools.private.is_open() {
            return Ok(Outcome::Nothing);
        }
        let at_end = pools.pages.lacks_at_end(bytes, stream).ok_or(AllocError::TooLarge { requested: bytes })?;
        let shortage = self.shortage_below(&pools, request, at_end);
        let lacks = shortage.as_ref().map_or(at_end, |shortage| shortage.lacks);
        let mut chunks = pools.pages.trim_others(stream, lacks);
        let found: Bytes = chunks.iter().map(|chunk| chunk.len()).sum();
        let is_enough = found + pools.movable(bytes, stream) >= lacks;
        if found < lacks && is_enough {
            chunks.extend(pools.pages.trim_before_end(bytes, stream, lacks - found));
        }
        if chunks.is_empty() {
            return Ok(Outcome::Nothing);
        }
        drop(pools);
        self.put(request, shortage.as_ref(), chunks, Fallback::Gather)
    }

    fn wait_of(&self, tried: &Tried) -> Duration {
        // Once: other processes had nothing to give, and since then only our own streams were waited for.
        if tried.has_waited_for_streams { Duration::ZERO } else { self.config.wait }
    }

    /// Waits for everything that is queued on the device, as cudaFree would.
    fn wait_for_streams(&self, tried: &mut Tried) -> Outcome {
        // A capture would break.
        if tried.has_waited_for_streams || self.lock().private.is_open() {
            return Outcome::Nothing;
        }
        tried.has_waited_for_streams = true;
        if self.device.driver().synchronize(self.device.id()).is_err() {
            return Outcome::Nothing;
        }
        let mut pools = self.lock();
        pools.marks.note_retry();
        self.finish_deferred(&mut pools);
        Outcome::From(Fallback::Extend)
    }

    /// Growing comes before stitching within the soft budget and while little is idle.
    pub(super) fn may_grow(&self, pools: &Pools, bytes: Bytes, lacks: Bytes) -> bool {
        let Some(after) = pools.held().checked_add(lacks) else { return false };
        let idle = (pools.idle() + lacks).saturating_sub(bytes);
        after <= self.config.soft_budget || self.config.pages.is_slack(idle, after)
    }

    /// New chunks of `len` bytes together, or of `least` where that is refused. Nothing where the source
    /// refuses both, or failed before.
    fn lease(&self, len: Bytes, least: Bytes, wait: Duration, tried: &mut Tried) -> Option<Vec<Arc<Chunk>>> {
        if tried.is_source_broken {
            return None;
        }
        let leased = self.acquire(len, wait);
        let is_too_much = leased.as_ref().is_err_and(|error| error.kind.is_lack()) && least < len;
        match if is_too_much { self.acquire(least, wait) } else { leased } {
            Ok(chunks) => Some(chunks),
            Err(error) => {
                self.note_refused(&mut self.lock());
                // A daemon that is away may come back while it is waited for.
                tried.is_source_broken = !error.kind.is_lack() && error.kind != ErrorKind::Unavailable;
                if !wait.is_zero() {
                    tried.after_wait = Some(error.clone());
                }
                tried.refusal = Some(error);
                None
            }
        }
    }

    pub(super) fn out_of_memory(&self, requested: Bytes, source: SourceError) -> AllocError {
        let pools = self.lock();
        let live = Bytes::new(self.counters.get(Counter::LiveBytes));
        let of_plan = pools
            .planned
            .as_ref()
            .map(|installed| OutOfPlan { idle: installed.idle(), deviations: pools.planned_counts().deviations() });
        AllocError::OutOfMemory {
            requested,
            held: pools.held(),
            live,
            stitchable: pools.idle_chunks(),
            parked: pools.idle(),
            contiguous: pools.pages.largest_contiguous(),
            of_plan,
            source,
        }
    }
}

impl Pools {
    /// Idle bytes of a stream that can move to its end, where chunks cannot be shown twice.
    fn movable(&self, bytes: Bytes, stream: StreamId) -> Bytes {
        if self.private.is_open() { Bytes::ZERO } else { self.pages.movable(bytes, stream) }
    }
}
