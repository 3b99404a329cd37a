//! Sleep and wake: all memory goes back to whoever owns it, addresses stay, and on demand every live byte comes back where it was.
//!
//! Whoever puts a runtime to sleep sees to it that nobody uses its memory: what is queued is waited for, and what is touched meanwhile is not there. What is freed meanwhile is free; what is asked for is refused.
//!
//! Bytes are kept in the memory of this process: those of live allocations, and everything of private pools, as a captured graph replays what its program has freed. What is not kept is undefined after the sleep: what this process
//! had there itself, or memory that nobody had.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::Duration;

use super::kept::Kept;
use super::{BlockState, Pools, Runtime, SegmentPool, SourceError};
use crate::driver::DriverError;
use crate::error::ErrorKind;
use crate::units::{AddressSpan, Bytes};

/// What was put to sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Slept {
    /// Bytes of device memory that went back, those that lay idle among them.
    pub freed: Bytes,
    /// Bytes that are kept in this process's memory.
    pub kept: Bytes,
    /// Of these, what lies in memory that the driver has locked: all of it, unless the driver has none of that or the system locks no more.
    pub locked: Bytes,
}

/// Why a runtime does not go to sleep, or does not wake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SleepError {
    /// It sleeps already.
    #[error("its memory is asleep already")]
    Asleep,
    /// Somebody else wakes it.
    #[error("its memory is being woken already")]
    Waking,
    /// It does not sleep.
    #[error("its memory is awake")]
    Awake,
    /// A capture is going on, which unmapping would break.
    #[error("a private pool is open: memory cannot be put to sleep while something is captured")]
    Capturing,
    /// The device's memory cannot go without its addresses.
    #[error("memory of this device returns with its addresses only: it cannot be put to sleep, as these are to stay")]
    Addresses,
    /// What was to be kept does not fit.
    #[error("this process cannot get the {0} of its own memory in which the contents would be kept")]
    Host(Bytes),
    /// The device fails.
    #[error("the driver failed")]
    Driver(#[from] DriverError),
    /// Whoever owns the memory does not take it, or has none.
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl SleepError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            SleepError::Asleep | SleepError::Waking | SleepError::Awake | SleepError::Capturing => ErrorKind::Conflict,
            SleepError::Addresses => ErrorKind::Unsupported,
            SleepError::Host(_) => ErrorKind::Exhausted,
            SleepError::Driver(error) => error.kind(),
            SleepError::Source(error) => error.kind,
        }
    }
}

/// A runtime that sleeps.
#[derive(Debug)]
pub(super) struct Asleep {
    /// Bytes of chunks whose memory is gone.
    bytes: Bytes,
    kept: Kept,
    /// Somebody waits for its memory.
    is_waking: bool,
}

impl Runtime {
    /// Gives all memory back, and keeps what is live of it in this process if `keeps` says so. Waits for what is queued on the device.
    ///
    /// # Errors
    ///
    /// Nothing has changed then, but that idle memory may have gone back.
    pub fn sleep(&self, keeps: bool) -> Result<Slept, SleepError> {
        if self.device.capabilities().memory_stays_with_addresses {
            return Err(SleepError::Addresses);
        }
        // Nobody gives memory back meanwhile, and no capture begins.
        let _giving = self.giving.lock().unwrap_or_else(PoisonError::into_inner);
        let may = |pools: &Pools| match (&pools.asleep, pools.private.is_open()) {
            (Some(_), _) => Err(SleepError::Asleep),
            (None, true) => Err(SleepError::Capturing),
            (None, false) => Ok(()),
        };
        may(&self.lock())?;
        self.synchronize()?;
        let trimmed = self.trim(Bytes::MAX);
        let mut pools = self.lock();
        may(&pools)?;
        // Another thread may have queued something since.
        self.device.driver().synchronize(self.device.id())?;
        let missed = if keeps { pools.missed() } else { Vec::new() };
        let kept = Kept::of(self.device.driver(), self.device.id(), missed)?;
        let bytes = self.source.sleep()?;
        let slept = Slept { freed: trimmed + bytes, kept: kept.len(), locked: kept.locked() };
        pools.asleep = Some(Asleep { bytes, kept, is_waking: false });
        self.note_held(&mut pools);
        Ok(slept)
    }

    /// Gets as much memory again and puts it where it was, with what was kept of its contents. Waits its turn for memory that others have, for `wait` at most. Says how many bytes it got.
    ///
    /// # Errors
    ///
    /// It sleeps on, and can be woken later.
    pub fn wake(&self, wait: Duration) -> Result<Bytes, SleepError> {
        match &mut self.lock().asleep {
            None => return Err(SleepError::Awake),
            Some(asleep) if asleep.is_waking => return Err(SleepError::Waking),
            Some(asleep) => asleep.is_waking = true,
        }
        // Not under the pools' lock: others may free meanwhile, and the daemon may ask for memory and is to hear that there is none.
        let woken = self.source.wake(wait);
        let mut pools = self.lock();
        let asleep = pools.asleep.take().expect("only whoever wakes it takes that");
        let asleep = Asleep { is_waking: false, ..asleep };
        let bytes = match woken {
            Ok(bytes) => bytes,
            Err(error) => {
                pools.asleep = Some(asleep);
                return Err(error.into());
            }
        };
        // What was freed meanwhile is missed by nobody, and may not be there.
        let missed: BTreeSet<_> = pools.missed().into_iter().collect();
        if let Err(error) = asleep.kept.put_back(self.device.driver(), &missed) {
            // Memory that is there without its contents is worth nothing: it sleeps on, with them.
            let gone = self.source.sleep();
            pools.asleep = Some(Asleep { bytes: gone.unwrap_or(bytes), ..asleep });
            return Err(error.into());
        }
        self.note_held(&mut pools);
        drop(pools);
        self.give_back_spent();
        Ok(bytes)
    }

    /// Its memory is gone until it is woken.
    pub fn is_asleep(&self) -> bool {
        self.lock().asleep.is_some()
    }
}

impl Pools {
    /// Where somebody would miss what lies there: live allocations, and private pools whole.
    fn missed(&self) -> Vec<AddressSpan> {
        let mut spans = Vec::new();
        for segment in self.segments() {
            match segment.pool {
                SegmentPool::Private(_) => spans.push(segment.span),
                _ => {
                    let live = segment.blocks.iter().filter(|block| block.state == BlockState::Live);
                    spans.extend(live.map(|block| block.span));
                }
            }
        }
        spans
    }

    /// Bytes of chunks that are held in name only.
    pub(super) fn slept(&self) -> Bytes {
        self.asleep.as_ref().map_or(Bytes::ZERO, |asleep| asleep.bytes)
    }
}
