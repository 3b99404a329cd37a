//! What lies where in a pool, for whoever looks at all of it: snapshots, and who should make room.
//!
//! Not for: finding one allocation, which each pool does without a walk.

use crate::ids::StreamId;
use crate::units::{AddressSpan, Bytes, DeviceAddress};

/// A stretch of a pool's addresses with memory behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Laid {
    /// Where.
    pub span: AddressSpan,
    /// Whose stream it is or was; the default stream where a pool does not keep that.
    pub stream: StreamId,
    /// What it serves.
    pub state: LaidState,
}

/// What a stretch of addresses serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaidState {
    /// Nobody.
    Free,
    /// An allocation, for which so many bytes were asked.
    Live(Bytes),
    /// An allocation at other addresses: a place shows its chunks.
    Shown,
}

/// A live allocation, found by any address in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// All that it occupies.
    pub span: AddressSpan,
    /// Free bytes right before it, in the same range of addresses.
    pub before: Bytes,
    /// Free bytes right behind it.
    pub after: Bytes,
}

/// Stretches that lie side by side, of which some are live, and what is free between them: from `start` to `end`.
pub(super) fn fill_gaps(
    start: DeviceAddress,
    end: DeviceAddress,
    live: impl Iterator<Item = Laid>,
    free: impl Fn(DeviceAddress, DeviceAddress) -> Option<Laid>,
) -> Vec<Laid> {
    let (mut all, mut at) = (Vec::new(), start);
    for one in live {
        all.extend(free(at, one.span.start()));
        all.push(one);
        at = one.span.end();
    }
    all.extend(free(at, end));
    all
}
