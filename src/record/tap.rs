//! The runtime's end of a recorder: says what happened in a record of six numbers.
//!
//! Not for: telling allocations of one address apart, or putting names to contexts: that takes time, and is done at the other end.
//!
//! Invariant: every event takes one tick and belongs to an iteration, whether there was room for its record or not. So a mark that was dropped shifts nobody.

use super::ring::{Inlet, WORDS, Words};
use crate::context;
use crate::ids::StreamId;
use crate::pool::Request;
use crate::trace::ContextKey;
use crate::units::{Bytes, DeviceAddress};

/// What a record is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Alloc,
    Free,
    /// A free that waits for other streams; its completion follows.
    FreeWaits,
    FreeCompleted,
    RecordStream,
    Mark,
    /// A request for which there was no memory.
    Refused,
    /// A request that a private pool served.
    Private,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Alloc,
        Kind::Free,
        Kind::FreeWaits,
        Kind::FreeCompleted,
        Kind::RecordStream,
        Kind::Mark,
        Kind::Refused,
        Kind::Private,
    ];
}

/// One thing that happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub(super) kind: Kind,
    pub(super) is_dynamic: bool,
    pub(super) thread: u32,
    pub(super) iteration: u32,
    pub(super) address: DeviceAddress,
    pub(super) bytes: Bytes,
    pub(super) stream: StreamId,
    pub(super) context: ContextKey,
    pub(super) tick: u64,
}

/// Bits of the first number: kind, dynamic, thread, iteration.
const DYNAMIC: u64 = 1 << 3;
const THREAD_SHIFT: u32 = 4;
const THREAD_MAX: u32 = (1 << 28) - 1;
const ITERATION_SHIFT: u32 = 32;

impl Record {
    #[inline]
    fn words(&self) -> Words {
        let first = self.kind as u64
            | if self.is_dynamic { DYNAMIC } else { 0 }
            | u64::from(self.thread.min(THREAD_MAX)) << THREAD_SHIFT
            | u64::from(self.iteration) << ITERATION_SHIFT;
        [first, self.address.get(), self.bytes.get(), self.stream.0, self.context.0, self.tick]
    }

    /// What the numbers say: every kind that three bits can name is one.
    pub(super) fn of(words: &Words) -> Record {
        const _: () = assert!(WORDS == 6 && Kind::ALL.len() == DYNAMIC as usize);
        let [first, address, bytes, stream, context, tick] = *words;
        Record {
            kind: Kind::ALL[(first & (DYNAMIC - 1)) as usize],
            is_dynamic: first & DYNAMIC != 0,
            thread: (first >> THREAD_SHIFT) as u32 & THREAD_MAX,
            iteration: (first >> ITERATION_SHIFT) as u32,
            address: DeviceAddress::new(address),
            bytes: Bytes::new(bytes),
            stream: StreamId(stream),
            context: ContextKey(context),
            tick,
        }
    }
}

/// The runtime's end. Whoever holds the lock of the pools writes; when it goes, the recording ends.
#[derive(Debug)]
pub struct Tap {
    inlet: Inlet,
    tick: u64,
    iteration: u32,
}

impl Tap {
    pub(super) fn new(inlet: Inlet) -> Tap {
        Tap { inlet, tick: 0, iteration: 0 }
    }

    /// A request was served.
    #[inline]
    pub fn alloc(&mut self, request: &Request, address: DeviceAddress) {
        self.request(Kind::Alloc, request, address);
    }

    /// There was no memory for a request.
    #[cold]
    pub fn refused(&mut self, request: &Request) {
        self.request(Kind::Refused, request, DeviceAddress::new(0));
    }

    /// A private pool has served a request, which is no part of what is recorded.
    #[cold]
    pub fn left_out(&mut self, request: &Request) {
        self.request(Kind::Private, request, DeviceAddress::new(0));
    }

    /// An allocation was given back. It `waits` if other streams use it: then [`Tap::free_completed`] follows.
    #[inline]
    pub fn free(&mut self, address: DeviceAddress, stream: StreamId, waits: bool) {
        self.event(if waits { Kind::FreeWaits } else { Kind::Free }, address, stream);
    }

    /// The streams that a free waited for have passed it.
    pub fn free_completed(&mut self, address: DeviceAddress, stream: StreamId) {
        self.event(Kind::FreeCompleted, address, stream);
    }

    /// Another stream uses the allocation.
    pub fn record_stream(&mut self, address: DeviceAddress, stream: StreamId) {
        self.event(Kind::RecordStream, address, stream);
    }

    /// An iteration ends, which is nowhere in it.
    pub fn mark(&mut self) {
        self.put(self.blank(Kind::Mark, DeviceAddress::new(0), StreamId::DEFAULT));
        // The highest number means that there is none.
        self.iteration = (self.iteration + 1).min(u32::MAX - 1);
    }

    #[inline]
    fn request(&mut self, kind: Kind, request: &Request, address: DeviceAddress) {
        let Request { bytes, stream, thread, context, is_dynamic } = *request;
        self.put(Record { is_dynamic, bytes, thread, context, ..self.blank(kind, address, stream) });
    }

    /// An event in the context of the thread that makes it.
    #[inline]
    fn event(&mut self, kind: Kind, address: DeviceAddress, stream: StreamId) {
        self.put(Record { context: context::here().key, ..self.blank(kind, address, stream) });
    }

    #[inline]
    fn blank(&self, kind: Kind, address: DeviceAddress, stream: StreamId) -> Record {
        Record {
            kind,
            is_dynamic: false,
            thread: context::thread(),
            iteration: self.iteration,
            address,
            bytes: Bytes::ZERO,
            stream,
            context: ContextKey::UNKNOWN,
            tick: self.tick,
        }
    }

    #[inline]
    fn put(&mut self, record: Record) {
        self.inlet.put(&record.words());
        self.tick += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_as_it_was_written() {
        for (at, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, at);
            let record = Record {
                kind,
                is_dynamic: at % 2 == 0,
                thread: THREAD_MAX - at as u32,
                iteration: u32::MAX - 1,
                address: DeviceAddress::new(u64::MAX - 511),
                bytes: Bytes::new(1 << 45),
                stream: StreamId(u64::MAX),
                context: ContextKey(u64::MAX),
                tick: u64::MAX,
            };
            assert_eq!(Record::of(&record.words()), record);
        }
    }
}
