//! The chunk sizes that a device is cut into, and how a range of bytes is covered with them.
//!
//! A driver handle can never be cut after it was created, so its size is the unit in which memory changes hands and is stitched; each handle
//! costs a create, an export, an import and a map. Hence a ladder: large chunks where a range is made once and kept (the static
//! pool), small ones where ranges are stitched anew.
//!
//! ## Which ladder follows from what calls cost
//!
//! Every step more is one more kind of chunk that can lie idle while somebody waits for another kind, so a step must earn its place. [`Ladder::following`]:
//!
//! * The smallest step is the device's granularity, and at least [`limits::CHUNK_LEN_MIN`]: nothing smaller can be made, and what is stitched should fit as
//!   closely as it can.
//! * The next step is the first size at which a byte costs at most a [`WORTH`]th of what it costs at the step below. Where a call takes the same time for any
//!   size, that is eight times the size; where it takes as long as its bytes are many (a driver that clears them, say), larger chunks save nothing and there is
//!   no further step. About eight, because a range is covered with fewer than eight chunks of a step before the next one takes over: less would add steps whose
//!   savings nobody sees, more would make ranges of hundreds of chunks. A sixth and not an eighth, because sizes are powers of two: what costs the same at eight
//!   times the size, give or take what a measurement errs by, must not lie on the edge. A larger chunk is taken to cost no less than any smaller one: where it seems to,
//!   the smaller one's figure was disturbed.
//! * The largest step is a [`SHARE`]th of the device at most, and at most [`limits::CHUNK_LEN_MAX`]. A chunk changes hands whole, so of every kind that is in use
//!   one may be idle for want of somebody who needs all of it.

use std::collections::BTreeMap;

use crate::limits;
use crate::units::Bytes;

/// How much cheaper a byte must be for another step.
pub const WORTH: u64 = 6;
/// The largest chunk is such a part of the device.
pub const SHARE: u64 = 64;
/// A new chunk of the page pool is at most this part of what its session can get. Filling an empty
/// device of 141 GiB takes 4,150 chunks at least.
const ROOM_SHARE: u64 = 512;
/// A session that wants chunks of more than this part of what it can get holds about as much already.
/// Then new chunks are half as long as otherwise.
const NEAR_END_SHARE: u64 = 64;

/// What one chunk of a size costs: everything that is called for it from its creation to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkCost {
    /// Its size.
    pub len: Bytes,
    /// Nanoseconds.
    pub nanos: u64,
}

impl ChunkCost {
    /// A byte costs at most a [`WORTH`]th of what it costs in a chunk of `other`.
    fn is_worth_more_than(self, other: ChunkCost) -> bool {
        // Without division: nanos / len * WORTH <= other.nanos / other.len.
        let (here, there) = (u128::from(self.nanos), u128::from(other.nanos));
        here * u128::from(other.len.get()) * u128::from(WORTH) <= there * u128::from(self.len.get())
    }
}

/// Some chunks of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Size of each.
    pub len: Bytes,
    /// How many.
    pub count: u64,
}

impl Part {
    /// Bytes of all of them.
    pub fn bytes(self) -> Option<Bytes> {
        self.len.checked_mul(self.count)
    }
}

/// Which chunks shall cover a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// As few as possible: the largest first.
    Largest,
    /// As few as possible that are not larger than this, if there is a size of an eighth of it or more: the largest first.
    AtMost(Bytes),
    /// All of one size, rounded up to the next step of the ladder.
    Uniform(Bytes),
    /// All of this size, whether the ladder has it or not, but for a last one that is as long as what is left; in
    /// multiples of the smallest step. Idle chunks of other sizes come first.
    Fitted(Bytes),
    /// The same without idle chunks of other sizes.
    Exactly(Bytes),
}

/// Memory that a session can lease on a device, beside what it holds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stock {
    /// Idle chunks that it may have as they are: how many there are of each length.
    pub idle: BTreeMap<Bytes, u64>,
    /// Bytes that it can get at most.
    pub room: Bytes,
    /// Chunks that can still be made.
    pub chunks_left: u64,
}

/// The largest new chunk while a session can get `room` bytes at most, rounded down to a power of two.
/// The nearer memory is to its end, the less of it may lie unused in a chunk that is used in part.
pub fn chunk_len_max(room: Bytes) -> Bytes {
    let share = (room.get() / ROOM_SHARE).checked_ilog2();
    Bytes::new(share.map_or(0, |power| 1 << power))
}

/// The same where chunks of `wanted` would do, but long enough that half of the chunks that can still
/// be made hold all of the room.
fn chunk_len_for(room: Bytes, chunks_left: u64, wanted: Bytes) -> Bytes {
    let is_near_end = wanted.get() > room.get() / NEAR_END_SHARE;
    let part = if is_near_end { Bytes::new(room.get() / 2) } else { room };
    let least = room.get().saturating_mul(2).checked_div(chunks_left).and_then(u64::checked_next_power_of_two);
    chunk_len_max(part).max(least.map_or(Bytes::LARGEST, Bytes::new))
}

impl Shape {
    /// The chunks of a static pool: as few as can be, and none larger than what a request that has lost its place is put together from.
    pub const STATIC: Shape = Shape::AtMost(Bytes::mib(32));
}

/// Chunk sizes, from small to large: powers of two, so that each is a multiple of the one below.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ladder {
    steps: Vec<Bytes>,
}

/// Steps that do not make a ladder.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LadderError {
    /// There is no step.
    #[error("a chunk ladder needs at least one size")]
    Empty,
    /// A step is not a power of two above the one below it (or at least the smallest chunk).
    #[error(
        "chunk size {step} is not a power of two, or not at least {below}: sizes go from small to large, each there once"
    )]
    NotAStep {
        /// The step.
        step: Bytes,
        /// The one below.
        below: Bytes,
    },
    /// A step is larger than a chunk can be.
    #[error("chunk size {0} is above the largest, {max}", max = limits::CHUNK_LEN_MAX)]
    TooLarge(Bytes),
}

impl Ladder {
    /// 2 MiB, 32 MiB, 256 MiB: what the host driver and today's GPUs start from.
    pub fn standard() -> Ladder {
        Ladder { steps: vec![Bytes::mib(2), Bytes::mib(32), Bytes::mib(256)] }
    }

    /// The ladder of `steps`, given from small to large.
    pub fn new(steps: Vec<Bytes>) -> Result<Ladder, LadderError> {
        let mut below = limits::CHUNK_LEN_MIN;
        for (at, step) in steps.iter().enumerate() {
            if *step > limits::CHUNK_LEN_MAX {
                return Err(LadderError::TooLarge(*step));
            }
            if !step.get().is_power_of_two() || *step < below || (at > 0 && *step == below) {
                return Err(LadderError::NotAStep { step: *step, below });
            }
            below = *step;
        }
        if steps.is_empty() { Err(LadderError::Empty) } else { Ok(Ladder { steps }) }
    }

    /// The ladder of a device of `total` bytes with this granularity, on which chunks cost this much. Costs are given from small to large; sizes that are no
    /// power of two are left out. See the header for the rule.
    pub fn following(costs: &[ChunkCost], granularity: Bytes, total: Bytes) -> Ladder {
        let smallest = granularity.max(limits::CHUNK_LEN_MIN);
        let largest = Bytes::new(total.get() / SHARE).min(limits::CHUNK_LEN_MAX);
        let mut steps = vec![smallest];
        let Some(mut below) = costs.iter().find(|cost| cost.len == smallest).copied() else { return Ladder { steps } };
        let mut nanos = below.nanos;
        let larger = costs.iter().filter(|cost| cost.len > smallest && cost.len <= largest);
        for cost in larger.filter(|cost| cost.len.get().is_power_of_two()) {
            nanos = nanos.max(cost.nanos);
            let cost = ChunkCost { len: cost.len, nanos };
            if cost.is_worth_more_than(below) {
                steps.push(cost.len);
                below = cost;
            }
        }
        Ladder::new(steps).unwrap_or_else(|_| Ladder::standard())
    }

    /// The same for devices of this granularity: what is smaller cannot be made, and the granularity itself takes its place.
    pub fn raised_to(self, granularity: Bytes) -> Result<Ladder, LadderError> {
        if self.smallest() >= granularity {
            return Ok(self);
        }
        let larger = self.steps.into_iter().filter(|step| *step > granularity);
        Ladder::new([granularity].into_iter().chain(larger).collect())
    }

    /// As the value of the configuration's key `ladder`.
    pub fn to_toml(&self) -> String {
        let steps: Vec<String> = self.steps.iter().map(|step| format!("\"{}\"", exact(*step))).collect();
        format!("[{}]", steps.join(", "))
    }

    /// The steps, from small to large.
    pub fn steps(&self) -> &[Bytes] {
        &self.steps
    }

    /// The smallest step: everything is a multiple of it.
    pub fn smallest(&self) -> Bytes {
        self.steps[0]
    }

    /// The step that `len` is, or the next one above; the largest where none is above.
    pub fn step_at_least(&self, len: Bytes) -> Bytes {
        *self.steps.iter().find(|step| **step >= len).unwrap_or(&self.steps[self.steps.len() - 1])
    }

    /// The largest step that is not above `len`; the smallest where all are.
    pub fn step_at_most(&self, len: Bytes) -> Bytes {
        *self.steps.iter().rfind(|step| **step <= len).unwrap_or(&self.steps[0])
    }

    /// [`Ladder::cover`], for a [`Shape::Fitted`] with idle chunks first: the largest that are not larger
    /// than what is left, unless that would be many more chunks. New ones get smaller as less is left.
    pub fn cover_with(&self, len: Bytes, shape: Shape, stock: impl FnOnce() -> Stock) -> Option<Vec<Part>> {
        let Shape::Fitted(each) = shape else { return self.cover(len, shape) };
        let Stock { idle, room, chunks_left } = stock();
        // A lease that waits is served from memory that comes, of which no amount is known yet.
        let short = || each.min(chunk_len_for(room, chunks_left, each)).max(self.smallest());
        let each = if room < len { each } else { short() };
        /// Each chunk is a mapping: above so many times what new ones would be, these are better.
        const MORE_MAX: u64 = 16;
        let mut left = len.round_up(self.smallest())?;
        let mut parts = BTreeMap::new();
        let usable = idle.iter().rev().filter(|(len, _)| len.is_multiple_of(self.smallest()));
        for (len, count) in usable {
            let count = (*count).min(left.get() / len.get());
            if count > 0 {
                left -= len.checked_mul(count)?;
                parts.insert(*len, count);
            }
        }
        let rest = if left.is_zero() { Vec::new() } else { self.cover(left, Shape::Fitted(each))? };
        rest.iter().for_each(|part| *parts.entry(part.len).or_insert(0) += part.count);
        let parts: Vec<Part> = parts.into_iter().rev().map(|(len, count)| Part { len, count }).collect();
        let new = self.cover(len, Shape::Fitted(each))?;
        let count = |parts: &[Part]| parts.iter().map(|part| part.count).sum::<u64>();
        let most = (count(&new) * MORE_MAX).min(limits::ACQUIRE_CHUNKS_MAX);
        Some(if count(&parts) <= most { parts } else { new })
    }

    /// The chunks that cover `len`, rounded up to the smallest step (`Uniform`: to its step), largest first. `None` where that passes
    /// what one acquire may ask for.
    pub fn cover(&self, len: Bytes, shape: Shape) -> Option<Vec<Part>> {
        let parts = match shape {
            Shape::Uniform(wanted) => {
                let step = self.step_at_least(wanted);
                vec![Part { len: step, count: len.round_up(step)?.get() / step.get() }]
            }
            Shape::Fitted(wanted) | Shape::Exactly(wanted) => {
                let len = len.round_up(self.smallest())?;
                let each = wanted.round_down(self.smallest()).max(self.smallest()).min(limits::CHUNK_LEN_MAX);
                let whole = Part { len: each, count: len.get() / each.get() };
                let rest = Part { len: Bytes::new(len.get() % each.get()), count: 1 };
                let parts = [whole, rest].into_iter();
                parts.filter(|part| part.count > 0 && !part.len.is_zero()).collect()
            }
            Shape::Largest | Shape::AtMost(_) => {
                let most = match shape {
                    // Hundreds of small chunks for one of these would be worse than one that is larger.
                    Shape::AtMost(most)
                        if self.steps.iter().any(|step| *step <= most && step.get() >= most.get() / 8) =>
                    {
                        most
                    }
                    _ => Bytes::LARGEST,
                };
                let mut left = len.round_up(self.smallest())?;
                let mut parts = Vec::new();
                for step in self.steps.iter().rev().filter(|step| **step <= most) {
                    let count = left.get() / step.get();
                    if count > 0 {
                        parts.push(Part { len: *step, count });
                    }
                    left = Bytes::new(left.get() % step.get());
                }
                parts
            }
        };
        let count = parts.iter().map(|part| part.count).sum::<u64>();
        (count > 0 && count <= limits::ACQUIRE_CHUNKS_MAX).then_some(parts)
    }
}

/// A size as people write it, and exactly.
fn exact(len: Bytes) -> String {
    const MIB: u64 = 1 << 20;
    if len.get().is_multiple_of(MIB) { format!("{}MiB", len.get() / MIB) } else { len.get().to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [u64; 10] = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

    /// The steps in MiB that follow, on a device of so many GiB where a chunk of `mib` MiB takes so many microseconds.
    fn following(gib: u64, granularity: u64, micros: impl Fn(u64) -> u64) -> Vec<u64> {
        let cost = |mib: &u64| ChunkCost { len: Bytes::mib(*mib), nanos: 1000 * micros(*mib) };
        let costs: Vec<_> = SIZES.iter().map(cost).collect();
        let ladder = Ladder::following(&costs, Bytes::mib(granularity), Bytes::gib(gib));
        ladder.steps().iter().map(|step| step.get() >> 20).collect()
    }

    #[test]
    fn where_a_call_takes_as_long_for_any_size_each_step_is_eight_times_the_last() {
        assert_eq!(following(141, 2, |_| 100), [2, 16, 128, 1024]);
        assert_eq!(following(141, 4, |_| 100), [4, 32, 256]);
    }

    #[test]
    fn where_bytes_cost_the_same_in_any_chunk_one_size_does() {
        assert_eq!(following(141, 2, |mib| 50 * mib), [2]);
        // Almost the same: large chunks save a third.
        assert_eq!(following(141, 2, |mib| 100 + 50 * mib), [2]);
    }

    #[test]
    fn a_step_is_taken_where_it_pays_and_not_before() {
        // A MiB costs 51 in the smallest chunks, 7.25 in those of 16 MiB, 1.2 in those of 512 and 1.1 in those of 1024.
        assert_eq!(following(141, 2, |mib| 100 + mib), [2, 16, 512]);
        assert_eq!(following(141, 2, |mib| if mib < 64 { 10 * mib } else { 640 }), [2, 512]);
        // At a sixth it pays, a little above it does not.
        assert_eq!(following(141, 2, |mib| if mib < 16 { 100 } else { 133 * mib / 16 }), [2, 16]);
        assert_eq!(following(141, 2, |mib| if mib < 16 { 100 } else { 134 * mib / 16 }), [2]);
    }

    #[test]
    fn a_figure_that_is_too_high_does_not_make_the_next_size_look_cheap() {
        assert_eq!(following(141, 2, |mib| if mib == 2 { 900 } else { 100 }), [2, 16, 128, 1024]);
        assert_eq!(following(141, 2, |mib| if mib == 64 { 900 } else { 100 }), [2, 16, 1024]);
    }

    #[test]
    fn a_measurement_that_errs_by_a_quarter_changes_nothing() {
        assert_eq!(following(141, 2, |mib| 100 + mib.ilog2() as u64 * 23 % 26), [2, 16, 128, 1024]);
    }

    #[test]
    fn no_chunk_is_more_than_a_share_of_its_device() {
        assert_eq!(following(64, 2, |_| 100), [2, 16, 128, 1024]);
        assert_eq!(following(63, 2, |_| 100), [2, 16, 128]);
        assert_eq!(following(8, 2, |_| 100), [2, 16, 128]);
        assert_eq!(following(1, 2, |_| 100), [2, 16]);
    }

    #[test]
    fn without_figures_there_is_the_smallest_step() {
        assert_eq!(Ladder::following(&[], Bytes::mib(2), Bytes::gib(80)).steps(), [Bytes::mib(2)]);
        assert_eq!(Ladder::following(&[], Bytes::kib(4), Bytes::gib(80)).steps(), [limits::CHUNK_LEN_MIN]);
        // Figures for other sizes than the smallest say nothing about it.
        let other = [ChunkCost { len: Bytes::mib(64), nanos: 1 }, ChunkCost { len: Bytes::mib(512), nanos: 1 }];
        assert_eq!(Ladder::following(&other, Bytes::mib(2), Bytes::gib(80)).steps(), [Bytes::mib(2)]);
    }

    #[test]
    fn a_ladder_is_written_as_the_configuration_reads_it() {
        assert_eq!(Ladder::standard().to_toml(), r#"["2MiB", "32MiB", "256MiB"]"#);
        let gib = Ladder::new(vec![Bytes::mib(2), Bytes::gib(1)]).unwrap();
        assert_eq!(gib.to_toml(), r#"["2MiB", "1024MiB"]"#);
    }

    #[test]
    fn a_range_is_covered_with_the_fewest_chunks() {
        let ladder = Ladder::standard();
        let parts = ladder.cover(Bytes::mib(2 * 256 + 3 * 32 + 5), Shape::Largest).unwrap();
        let counts: Vec<_> = parts.iter().map(|part| (part.len.get() >> 20, part.count)).collect();
        assert_eq!(counts, [(256, 2), (32, 3), (2, 3)]);
        let parts = ladder.cover(Bytes::mib(5), Shape::Uniform(Bytes::mib(2))).unwrap();
        assert_eq!(parts, [Part { len: Bytes::mib(2), count: 3 }]);
        let parts = ladder.cover(Bytes::mib(5), Shape::Uniform(Bytes::mib(3))).unwrap();
        assert_eq!(parts, [Part { len: Bytes::mib(32), count: 1 }]);
    }

    #[test]
    fn fitted_chunks_leave_one_shorter_chunk_at_the_end() {
        let ladder = Ladder::standard();
        let counts = |len, each| {
            let parts = ladder.cover(Bytes::mib(len), Shape::Fitted(Bytes::mib(each))).unwrap();
            parts.iter().map(|part| (part.len.get() >> 20, part.count)).collect::<Vec<_>>()
        };
        assert_eq!(counts(50, 16), [(16, 3), (2, 1)]);
        assert_eq!(counts(49, 16), [(16, 3), (2, 1)], "rounded up to the smallest step");
        assert_eq!(counts(48, 17), [(16, 3)], "chunks are multiples of the smallest step");
        assert_eq!(counts(6, 64), [(6, 1)]);
        assert_eq!(ladder.cover(Bytes::ZERO, Shape::Fitted(Bytes::mib(2))), None);
    }

    #[test]
    fn nothing_and_too_much_are_not_covered() {
        let ladder = Ladder::standard();
        assert_eq!(ladder.cover(Bytes::ZERO, Shape::Largest), None);
        assert_eq!(ladder.cover(Bytes::MAX, Shape::Largest), None);
        assert_eq!(ladder.cover(Bytes::gib(1024), Shape::Uniform(Bytes::mib(2))), None);
    }

    #[test]
    fn steps_that_make_no_ladder_are_named() {
        let mib = |steps: &[u64]| Ladder::new(steps.iter().map(|n| Bytes::mib(*n)).collect());
        assert!(mib(&[2, 32, 256]).is_ok());
        assert_eq!(mib(&[]), Err(LadderError::Empty));
        assert!(matches!(mib(&[3]), Err(LadderError::NotAStep { .. })));
        assert!(matches!(mib(&[2, 2]), Err(LadderError::NotAStep { .. })));
        assert!(matches!(mib(&[32, 2]), Err(LadderError::NotAStep { .. })));
        assert!(matches!(mib(&[2, 8192]), Err(LadderError::TooLarge(_))));
    }

    #[test]
    fn steps_below_a_granularity_give_way_to_it() {
        let raised = |mib| Ladder::standard().raised_to(Bytes::mib(mib)).map(|ladder| ladder.steps);
        assert_eq!(raised(2), Ok([2, 32, 256].map(Bytes::mib).to_vec()));
        assert_eq!(raised(4), Ok([4, 32, 256].map(Bytes::mib).to_vec()));
        assert_eq!(raised(32), Ok([32, 256].map(Bytes::mib).to_vec()));
        assert_eq!(raised(1024), Ok(vec![Bytes::gib(1)]));
        assert!(matches!(raised(8192), Err(LadderError::TooLarge(_))));
    }

    #[test]
    fn idle_chunks_come_first_whatever_their_lengths() {
        let ladder = Ladder::standard();
        let idle = |lens: &[(u64, u64)]| lens.iter().map(|(len, count)| (Bytes::mib(*len), *count)).collect();
        let stock = |lens: &[(u64, u64)]| Stock { idle: idle(lens), room: Bytes::gib(4096), chunks_left: 1 << 20 };
        let cover = |len, each, lens: &[(u64, u64)]| {
            let parts = ladder.cover_with(Bytes::mib(len), Shape::Fitted(Bytes::mib(each)), || stock(lens)).unwrap();
            parts.iter().map(|part| (part.len.get() >> 20, part.count)).collect::<Vec<_>>()
        };
        assert_eq!(cover(100, 32, &[]), [(32, 3), (4, 1)]);
        assert_eq!(cover(100, 32, &[(66, 1), (10, 1), (200, 1)]), [(66, 1), (24, 1), (10, 1)]);
        assert_eq!(cover(100, 32, &[(32, 2)]), [(32, 3), (4, 1)], "two of the three are idle");
        // What is longer than what is left stays, and so does what would be very many.
        assert_eq!(cover(8, 8, &[(16, 4)]), [(8, 1)]);
        assert_eq!(cover(256, 256, &[(2, 500)]), [(256, 1)]);
    }

    #[test]
    fn chunks_get_smaller_as_less_is_left() {
        let cover = |len, each, room| {
            let stock = || Stock { room: Bytes::mib(room), chunks_left: 1 << 20, ..Stock::default() };
            let parts = Ladder::standard().cover_with(Bytes::mib(len), Shape::Fitted(Bytes::mib(each)), stock).unwrap();
            parts.iter().map(|part| (part.len.get() >> 20, part.count)).collect::<Vec<_>>()
        };
        assert_eq!(cover(256, 256, 140 << 10), [(256, 1)]);
        assert_eq!(cover(256, 256, 100 << 10), [(128, 2)]);
        assert_eq!(cover(256, 128, 10 << 10), [(16, 16)]);
        assert_eq!(cover(256, 256, 10 << 10), [(8, 32)], "the session holds more than is left");
        assert_eq!(cover(256, 8, 10 << 10), [(8, 32)], "as small as was wanted");
        assert_eq!(cover(7, 256, 100), [(2, 4)], "never smaller than the smallest");
        assert_eq!(cover(256, 64, 255), [(64, 4)], "what is waited for comes as it was wanted");
    }

    #[test]
    fn chunks_do_not_get_smaller_where_few_can_be_made() {
        let each = |gib, left| chunk_len_for(Bytes::gib(gib), left, Bytes::ZERO).get() >> 20;
        assert_eq!([each(10, 1 << 20), each(10, 1000), each(10, 20)], [16, 32, 1024]);
        assert_eq!(chunk_len_for(Bytes::gib(1), 0, Bytes::ZERO), Bytes::LARGEST);
    }
}
