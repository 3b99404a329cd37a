//! The policy of the page pool: when it grows, when it stitches, and how large new chunks are.
//!
//! A request that no free run serves has two ways. *Extending* takes new chunks for what the tail of
//! the stream's addresses lacks; other free memory stays idle. *Stitching* uses what is idle and
//! takes new chunks for the rest; it costs a map for each chunk that it shows. So:
//!
//! 1. While little of what the process holds is idle ([`PagePolicy::slack_per_mille`]), extend.
//! 2. Otherwise stitch, and extend only where that takes no more new memory.
//!
//! New chunks grow with what is held and with what is lacking ([`PagePolicy::chunk_len`]): large
//! chunks cost fewer calls, small ones leave less of themselves idle around a live allocation. The
//! last chunk of a large request is exactly as long as what is left. Small requests come in numbers,
//! so what they lack comes with some more ([`PagePolicy::chunk_least`]), and with much more while a
//! process grows and frees next to nothing: then 64 GiB take a thousand chunks and not two.
//!
//! The defaults come from a sweep over twenty traces (`src/DESIGN.md`, "One pool serves what no plan does").

use crate::units::Bytes;

/// How the page pool behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagePolicy {
    /// Smallest chunk, of which all others are multiples; a power of two.
    pub granule: Bytes,
    /// A chunk is at most this many thousandths of what the process holds, rounded down to a power
    /// of two, unless `request_chunks` or `chunk_least` allow more. 0: all chunks are of one granule.
    pub chunk_per_mille: u64,
    /// What one request lacks comes in about this many chunks at least.
    pub request_chunks: u64,
    /// Largest chunk.
    pub chunk_max: Bytes,
    /// In a process that holds 1 GiB and more new chunks have at least so many bytes, and before as
    /// the square root of what it holds, rounded down to a power of two; while it holds less than
    /// [`SMALL_PROCESS`], one granule. A small request brings as much, and what follows uses the rest;
    /// others bring what they lack, so that their last chunk may be shorter. Small are requests of
    /// less than [`LARGE_REQUEST`] times that.
    pub chunk_least: Bytes,
    /// Growing comes before stitching while at most this many thousandths of what is held are idle.
    pub slack_per_mille: u64,
    /// A run that begins or ends inside a chunk is stitched only if it saves this much new memory,
    /// or half a granule where memory is scarce.
    pub piece_min: Bytes,
    /// Smaller requests are stitched only if memory runs out.
    pub stitch_min: Bytes,
    /// Idle memory is stitched at all. Turned off to measure what that is worth.
    pub stitches: bool,
}

/// A request asks for larger chunks than others only if they are at least this long.
const REQUEST_CHUNK_MIN: Bytes = Bytes::mib(16);

/// Processes that hold less are many, or hold as little for good: what they need and no more.
const SMALL_PROCESS: Bytes = Bytes::mib(64);

/// A request of so many times the smallest chunk brings what it lacks, and no more.
const LARGE_REQUEST: u64 = 2;

/// A process that grows and frees next to nothing leases this part of its growth for a small request.
const GROWTH_PART: u64 = 192;

impl Default for PagePolicy {
    fn default() -> PagePolicy {
        PagePolicy {
            granule: Bytes::mib(2),
            chunk_per_mille: 17,
            request_chunks: 4,
            chunk_max: Bytes::mib(512),
            chunk_least: Bytes::mib(32),
            slack_per_mille: 2,
            piece_min: Bytes::mib(8),
            stitch_min: Bytes::mib(2),
            stitches: true,
        }
    }
}

impl PagePolicy {
    /// The same with chunks of one granule only.
    #[must_use]
    pub fn with_uniform_chunks(self) -> PagePolicy {
        PagePolicy { chunk_per_mille: 0, ..self }
    }

    /// The length of new chunks in a process that holds `held` bytes, for a request that lacks
    /// `lacks`; the last chunk may be shorter.
    pub fn chunk_len(&self, held: Bytes, lacks: Bytes) -> Bytes {
        if self.chunk_per_mille == 0 {
            return self.granule;
        }
        let of_request = lacks.get() / self.request_chunks.max(1);
        let of_request = if of_request < REQUEST_CHUNK_MIN.get() { 0 } else { of_request };
        let of_held = thousandths(held, self.chunk_per_mille).max(self.least(held).get());
        self.power_of_two(of_held.max(of_request))
    }

    /// What is leased for a request of `bytes` that lacks `lacks`, in chunks of
    /// [`PagePolicy::chunk_len`]: more where the request is small and the last chunk would be short.
    /// The process has `grown` by so much while it freed next to nothing.
    pub fn lease_len(&self, held: Bytes, grown: Bytes, lacks: Bytes, bytes: Bytes) -> Bytes {
        let least = self.least(held).max(self.power_of_two(grown.get() / GROWTH_PART)).get();
        if self.chunk_per_mille == 0 || bytes.get() / LARGE_REQUEST >= least {
            return lacks;
        }
        let rest = lacks.get() % self.chunk_len(held, lacks).get();
        let more = if rest == 0 { 0 } else { least.saturating_sub(rest) };
        lacks.checked_add(Bytes::new(more)).unwrap_or(lacks)
    }

    /// What a run has to save where memory is scarce.
    pub(super) fn scarce_piece_min(&self) -> Bytes {
        self.piece_min.min(Bytes::new(self.granule.get() / 2))
    }

    fn least(&self, held: Bytes) -> Bytes {
        if held < SMALL_PROCESS {
            return self.granule;
        }
        let gib = Bytes::gib(1);
        let least = self.chunk_least.get().saturating_mul(held.min(gib).get().isqrt()) / gib.get().isqrt();
        self.power_of_two(least)
    }

    fn power_of_two(&self, bytes: u64) -> Bytes {
        let power = bytes.min(self.chunk_max.get()).checked_ilog2().map_or(0, |power| 1 << power);
        Bytes::new(power).max(self.granule)
    }

    /// Whether a process may hold `after` bytes of which `idle` are idle without stitching first.
    pub fn is_slack(&self, idle: Bytes, after: Bytes) -> bool {
        u128::from(idle.get()) * 1000 <= u128::from(after.get()) * u128::from(self.slack_per_mille)
    }
}

fn thousandths(bytes: Bytes, count: u64) -> u64 {
    let share = u128::from(bytes.get()) * u128::from(count) / 1000;
    u64::try_from(share).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_grow_with_what_is_held_and_lacking() {
        let policy = PagePolicy { chunk_per_mille: 10, ..PagePolicy::default() };
        let mib = |held, lacks| policy.chunk_len(Bytes::mib(held), Bytes::mib(lacks)).get() >> 20;
        let small = |held| mib(held, 2);
        assert_eq!([0, 63, 64, 256, 1024, 4096].map(small), [2, 2, 8, 16, 32, 32], "as the root of what is held");
        assert_eq!(mib(10_000, 2), 64, "a hundredth, rounded down to a power of two");
        assert_eq!((mib(0, 64), mib(0, 60)), (16, 2), "a quarter of what is lacking, if that is much");
        assert_eq!(mib(1 << 20, 2), 512, "the largest chunk");
        assert_eq!(policy.with_uniform_chunks().chunk_len(Bytes::gib(64), Bytes::gib(1)), Bytes::mib(2));
    }

    #[test]
    fn a_small_request_brings_more_than_it_lacks() {
        let policy = PagePolicy { chunk_per_mille: 10, ..PagePolicy::default() };
        let mib = |held, lacks, of| {
            policy.lease_len(Bytes::mib(held), Bytes::ZERO, Bytes::mib(lacks), Bytes::mib(of)).get() >> 20
        };
        let small = |held| mib(held, 2, 1);
        assert_eq!([0, 63, 64, 1024, 65_000].map(small), [2, 2, 8, 32, 32], "the smallest chunk");
        assert_eq!(mib(17_000, 128 + 2, 63), 128 + 32);
        assert_eq!([128, 40].map(|lacks| mib(17_000, lacks, 63)), [128, 40], "no chunk is short");
        assert_eq!(mib(17_000, 2, 64), 2, "a large request brings what it lacks");
        let grown = |gib| policy.lease_len(Bytes::gib(64), Bytes::gib(gib), Bytes::mib(2), Bytes::mib(64)).get() >> 20;
        assert_eq!([0, 5, 12, 64].map(grown), [2, 2, 64, 256], "while the process grows and frees nothing");
    }

    #[test]
    fn slack_is_a_share_of_what_is_held() {
        let policy = PagePolicy { slack_per_mille: 10, ..PagePolicy::default() };
        assert!(policy.is_slack(Bytes::mib(10), Bytes::mib(1000)));
        assert!(!policy.is_slack(Bytes::mib(11), Bytes::mib(1000)));
    }
}
