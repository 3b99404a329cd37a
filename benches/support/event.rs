//! Events of jobs that are made up.

use stitchd::ids::StreamId;
use stitchd::trace::{Context, Event, EventKind};
use stitchd::units::{Bytes, Tick};

/// An event on the default stream.
pub(crate) fn event(tick: usize, kind: EventKind, id: u64, bytes: Bytes, iteration: u32) -> Event {
    Event {
        tick: Tick(tick as u64),
        kind,
        id,
        bytes,
        stream: StreamId::DEFAULT,
        iteration,
        context: Context::default(),
        is_dynamic: false,
        device: 0,
        thread: 0,
    }
}
