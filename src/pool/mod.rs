//! Policy: who gets which bytes of what this process holds.
//!
//! With a plan [`planned`] serves the requests that it foresaw; [`pages`] serves everything else.
//!
//! Not for: getting memory (the runtime does, and hands it over) or events and threads (the runtime again). Pools are plain data behind one
//! lock.
//!
//! Invariant of every pool, and of all together: two live allocations never share a byte.

mod address_map;
mod laid;
pub mod pages;
pub mod planned;

pub use address_map::AddressMap;
pub use laid::{Found, Laid, LaidState};

use crate::ids::StreamId;
use crate::trace::{ContextKey, Event};
use crate::units::Bytes;

/// What somebody asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Bytes, not zero.
    pub bytes: Bytes,
    /// The stream on which they are used first.
    pub stream: StreamId,
    /// Which thread asks, by its number in the process.
    pub thread: u32,
    /// From where in the job, or [`ContextKey::UNKNOWN`].
    pub context: ContextKey,
    /// The request varies from iteration to iteration: no plan has it.
    pub is_dynamic: bool,
}

impl Request {
    /// A request on the default stream by somebody who says nothing else.
    pub fn of(bytes: Bytes) -> Request {
        Request { bytes, stream: StreamId::DEFAULT, thread: 0, context: ContextKey::UNKNOWN, is_dynamic: false }
    }

    /// A request as it was recorded, from a context with this key.
    pub fn recorded(event: &Event, context: ContextKey) -> Request {
        let Event { bytes, stream, thread, is_dynamic, .. } = *event;
        Request { bytes, stream, thread, context, is_dynamic }
    }
}
