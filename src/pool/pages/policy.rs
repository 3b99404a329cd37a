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
//! last chunk of a request is exactly as long as what is left.
//!
//! The defaults come from a sweep over twelve traces (`src/DESIGN.md`, "The page pool").

use crate::units::Bytes;

/// How the page pool behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagePolicy {
    /// Smallest chunk, of which all others are multiples; a power of two.
    pub granule: Bytes,
    /// A chunk is at most this many thousandths of what the process holds, rounded down to a power
    /// of two, unless `request_chunks` allows more. 0: all chunks are of one granule.
    pub chunk_per_mille: u64,
    /// What one request lacks comes in about this many chunks at least.
    pub request_chunks: u64,
    /// Largest chunk.
    pub chunk_max: Bytes,
    /// The last chunk for a request has at least this many thousandths of what the process holds,
    /// rounded down to a power of two: what follows uses the rest.
    pub ahead_per_mille: u64,
    /// Growing comes before stitching while at most this many thousandths of what is held are idle.
    pub slack_per_mille: u64,
    /// A run that begins or ends inside a chunk is stitched only if it saves this much new memory.
    pub piece_min: Bytes,
    /// Smaller requests are stitched only if memory runs out.
    pub stitch_min: Bytes,
    /// Idle memory is stitched at all. Turned off to measure what that is worth.
    pub stitches: bool,
}

/// A request asks for larger chunks than others only if they are at least this long.
const REQUEST_CHUNK_MIN: Bytes = Bytes::mib(16);

impl Default for PagePolicy {
    fn default() -> PagePolicy {
        PagePolicy {
            granule: Bytes::mib(2),
            chunk_per_mille: 15,
            request_chunks: 4,
            chunk_max: Bytes::mib(512),
            ahead_per_mille: 1,
            slack_per_mille: 3,
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
        self.power_of_two(thousandths(held, self.chunk_per_mille).max(of_request))
    }

    /// What is leased for a request that lacks `lacks`, in chunks of [`PagePolicy::chunk_len`]: a
    /// little more where the last chunk would be very short.
    pub fn lease_len(&self, held: Bytes, lacks: Bytes) -> Bytes {
        if self.chunk_per_mille == 0 {
            return lacks;
        }
        let rest = lacks.get() % self.chunk_len(held, lacks).get();
        let least = self.power_of_two(thousandths(held, self.ahead_per_mille)).get();
        let more = if rest == 0 { 0 } else { least.saturating_sub(rest) };
        lacks.checked_add(Bytes::new(more)).unwrap_or(lacks)
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
        assert_eq!(mib(0, 2), 2);
        assert_eq!(mib(1000, 2), 8, "a hundredth, rounded down to a power of two");
        assert_eq!((mib(0, 64), mib(0, 60)), (16, 2), "a quarter of what is lacking, if that is much");
        assert_eq!(mib(1 << 20, 2), 512, "the largest chunk");
        assert_eq!(policy.with_uniform_chunks().chunk_len(Bytes::gib(64), Bytes::gib(1)), Bytes::mib(2));
    }

    #[test]
    fn a_lease_has_no_very_short_chunk() {
        let policy = PagePolicy { chunk_per_mille: 10, ahead_per_mille: 1, ..PagePolicy::default() };
        let mib = |held, lacks| policy.lease_len(Bytes::mib(held), Bytes::mib(lacks)).get() >> 20;
        assert_eq!(mib(0, 6), 6);
        assert_eq!(mib(17_000, 4), 16, "a thousandth of what is held");
        assert_eq!(mib(17_000, 128 + 2), 128 + 16);
        assert_eq!(mib(17_000, 128), 128);
        assert_eq!(mib(17_000, 40), 40);
    }

    #[test]
    fn slack_is_a_share_of_what_is_held() {
        let policy = PagePolicy { slack_per_mille: 10, ..PagePolicy::default() };
        assert!(policy.is_slack(Bytes::mib(10), Bytes::mib(1000)));
        assert!(!policy.is_slack(Bytes::mib(11), Bytes::mib(1000)));
    }
}
