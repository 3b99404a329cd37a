//! Who has which bytes: the reference that every pool is held against.
//!
//! Live allocations by address, the physical bytes behind each, and who used those bytes last.

use std::collections::BTreeMap;

use stitchd::driver::Handle;
use stitchd::ids::StreamId;

use crate::watch::Piece;

/// Disjoint spans of some space, each with what belongs to it.
#[derive(Debug)]
pub(crate) struct Spans<T>(BTreeMap<u64, (u64, T)>);

impl<T> Default for Spans<T> {
    fn default() -> Spans<T> {
        Spans(BTreeMap::new())
    }
}

impl<T> Spans<T> {
    /// True when nobody has a byte of it.
    pub(crate) fn is_free(&self, start: u64, len: u64) -> bool {
        // The spans are disjoint, so only the last one that begins before the end can reach in.
        self.0.range(..start + len).next_back().is_none_or(|(at, (other, _))| at + other <= start)
    }

    /// Takes a span up; panics if somebody has a byte of it.
    pub(crate) fn insert(&mut self, start: u64, len: u64, what: T) {
        assert!(len > 0, "an allocation has bytes");
        assert!(self.is_free(start, len), "[{start:#x} + {len:#x}) overlaps a live allocation");
        self.0.insert(start, (len, what));
    }

    /// Takes out the span that begins at `start`.
    pub(crate) fn remove(&mut self, start: u64) -> Option<(u64, T)> {
        self.0.remove(&start)
    }

    pub(crate) fn get(&self, start: u64) -> Option<(u64, &T)> {
        self.0.get(&start).map(|(len, what)| (*len, what))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Bytes of all spans.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.values().map(|(len, _)| len).sum()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64, &T)> {
        self.0.iter().map(|(start, (len, what))| (*start, *len, what))
    }
}

/// Physical bytes: who has them, and who had them last.
#[derive(Debug, Default)]
pub(crate) struct Physical {
    taken: BTreeMap<Handle, Spans<()>>,
    /// For each chunk the frees in it: from where, to where, on which stream, when.
    used: BTreeMap<Handle, Vec<(u64, u64, StreamId, u64)>>,
}

impl Physical {
    /// Panics if somebody has a byte of `pieces`, or had it last on another stream than `stream` that has not passed that.
    pub(crate) fn take(&mut self, pieces: &[Piece], stream: StreamId, passed: impl Fn(StreamId) -> u64) {
        for (chunk, from, to) in pieces {
            self.taken.entry(*chunk).or_default().insert(*from, to - from, ());
            for (start, end, last, at) in self.used.get(chunk).into_iter().flatten() {
                let may = last == &stream || passed(*last) >= *at || end <= from || to <= start;
                assert!(may, "{stream} gets bytes of {chunk:?} that {last} gave up at {at} and may still use");
            }
        }
    }

    /// The bytes are free, and `streams` used them until `now`.
    pub(crate) fn give(&mut self, pieces: &[Piece], streams: &[StreamId], now: u64) {
        for (chunk, from, to) in pieces {
            self.taken.get_mut(chunk).unwrap().remove(*from).unwrap();
            let used = self.used.entry(*chunk).or_default();
            // Who had these bytes before and let somebody else have them has passed, or is the same.
            used.retain(|(start, end, ..)| start < from || to < end);
            used.extend(streams.iter().map(|stream| (*from, *to, *stream, now)));
        }
    }

    /// True when nobody has a byte of the chunk.
    pub(crate) fn is_idle(&self, chunk: Handle) -> bool {
        self.taken.get(&chunk).is_none_or(|taken| taken.len() == 0)
    }

    /// The chunk is another's now.
    pub(crate) fn forget(&mut self, chunk: Handle) {
        assert!(self.is_idle(chunk), "a chunk leaves while somebody has bytes of it");
        self.taken.remove(&chunk);
        self.used.remove(&chunk);
    }
}

/// Says which run it was, when it fails.
pub(crate) struct Trail {
    pub(crate) what: String,
    pub(crate) seed: u64,
    pub(crate) step: u64,
}

impl Trail {
    pub(crate) fn new(what: impl std::fmt::Debug, seed: u64) -> Trail {
        Trail { what: format!("{what:?}"), seed, step: 0 }
    }
}

impl Drop for Trail {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed in {} with seed {} at step {}", self.what, self.seed, self.step);
        }
    }
}
