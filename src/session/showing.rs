//! Where a job's memory lies, for people who look at it: small enough to be sent now and then, whatever there is.
//!
//! Not for: snapshots, which have every block ([`crate::runtime::Runtime::segments`]).

use crate::runtime::{Block, BlockState, Segment, SegmentPool};
use crate::wire::v1::{AddressMap, AddressRange, address_range::Kind};

/// So many ranges are told apart; of more there is the sum.
const RANGES_MAX: usize = 48;
/// So many cells they have together.
const CELLS_MAX: usize = 1_536;
/// No cell is smaller.
const CELL_MIN: u64 = 512 << 10;

/// What of a cell is in use, as it is sent: 0 only where nothing is, and 255 only where all is.
const FULL: u64 = 255;

fn kind_of(segment: &Segment) -> Kind {
    match segment.pool {
        SegmentPool::Planned => Kind::Planned,
        SegmentPool::Pool => Kind::Pool,
        SegmentPool::Stitched => Kind::Stitched,
        SegmentPool::Private(_) => Kind::Private,
    }
}

fn start_of(segment: &Segment) -> u64 {
    segment.span.start().get()
}

fn len_of(segment: &Segment) -> u64 {
    segment.span.len().get()
}

/// One that waits for streams is not free yet, and memory that is shown elsewhere is in use.
fn is_free(block: &Block) -> bool {
    block.state == BlockState::Free
}

/// Segments of one kind, one behind the other.
struct Run<'a> {
    kind: Kind,
    segments: &'a [&'a Segment],
}

impl Run<'_> {
    fn start(&self) -> u64 {
        self.segments.first().map_or(0, |first| start_of(first))
    }

    fn len(&self) -> u64 {
        self.segments.iter().map(|segment| len_of(segment)).sum()
    }

    fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.segments.iter().flat_map(|segment| &segment.blocks)
    }

    fn live(&self) -> u64 {
        self.blocks().filter(|block| !is_free(block)).map(|block| block.span.len().get()).sum()
    }

    fn range(&self, cell: u64) -> AddressRange {
        let (start, len) = (self.start(), self.len());
        let mut used = vec![0_u64; usize::try_from(len.div_ceil(cell)).unwrap_or(0)];
        for block in self.blocks().filter(|block| !is_free(block)) {
            let (mut at, end) = (block.span.start().get() - start, block.span.end().get() - start);
            while at < end {
                let until = end.min((at / cell + 1) * cell);
                if let Some(used) = used.get_mut(usize::try_from(at / cell).unwrap_or(usize::MAX)) {
                    *used += until - at;
                }
                at = until;
            }
        }
        let whole = |at: usize| cell.min(len - at as u64 * cell);
        let byte = |(at, used): (usize, u64)| {
            let share = used.saturating_mul(FULL) / whole(at).max(1);
            let least = u64::from(used > 0);
            u8::try_from(share.max(least).min(FULL)).unwrap_or(u8::MAX)
        };
        let free = self.blocks().filter(|block| is_free(block)).map(|block| block.span.len().get());
        AddressRange {
            kind: self.kind.into(),
            address: start,
            len_bytes: len,
            live_bytes: self.live(),
            largest_free_bytes: free.max().unwrap_or(0),
            used: used.into_iter().enumerate().map(byte).collect(),
        }
    }
}

/// What segments look like from afar: a few kilobytes at most.
pub(super) fn map_of(segments: &[Segment]) -> AddressMap {
    let mut sorted: Vec<&Segment> = segments.iter().collect();
    sorted.sort_by_key(|segment| (segment.is_stitched, start_of(segment)));
    let is_next = |one: &&Segment, next: &&Segment| {
        kind_of(one) == kind_of(next) && start_of(one) + len_of(one) == start_of(next)
    };
    let mut runs: Vec<Run<'_>> =
        sorted.chunk_by(is_next).map(|segments| Run { kind: kind_of(segments[0]), segments }).collect();
    // The largest come first, and stay.
    runs.sort_by_key(|run| std::cmp::Reverse(run.len()));
    let others = runs.split_off(runs.len().min(RANGES_MAX));
    let cells = |cell: u64| runs.iter().map(|run| run.len().div_ceil(cell)).sum::<u64>();
    let mut cell = CELL_MIN;
    while cells(cell) > CELLS_MAX as u64 {
        cell *= 2;
    }
    runs.sort_by_key(Run::start);
    let own = || others.iter().filter(|run| run.kind != Kind::Stitched);
    AddressMap {
        ranges: runs.iter().map(|run| run.range(cell)).collect(),
        cell_bytes: cell,
        other_ranges: others.len() as u64,
        other_bytes: own().map(Run::len).sum(),
        other_live_bytes: own().map(Run::live).sum(),
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::ids::StreamId;
    use crate::units::{AddressSpan, Bytes, DeviceAddress};

    const MIB: u64 = 1 << 20;

    fn span(start: u64, len: u64) -> AddressSpan {
        AddressSpan::new(DeviceAddress::new(start), Bytes::new(len)).unwrap()
    }

    fn segment(pool: SegmentPool, start: u64, blocks: &[(u64, bool)]) -> Segment {
        let mut at = start;
        let block = |&(len, is_live): &(u64, bool)| {
            let state = if is_live { BlockState::Live } else { BlockState::Free };
            at += len;
            Block { span: span(at - len, len), requested: Bytes::ZERO, state }
        };
        let blocks: Vec<Block> = blocks.iter().map(block).collect();
        let len = blocks.iter().map(|block| block.span.len().get()).sum();
        let is_stitched = pool == SegmentPool::Stitched;
        Segment { span: span(start, len), pool, is_stitched, stream: StreamId(0), blocks }
    }

    #[test]
    fn cells_say_how_much_of_them_is_in_use_and_ranges_that_touch_are_one() {
        let one = segment(SegmentPool::Pool, 1 << 40, &[(MIB, true), (MIB + 1, false), (MIB - 1, true)]);
        let next = segment(SegmentPool::Pool, (1 << 40) + 3 * MIB, &[(MIB / 2 - 1, false), (1, true)]);
        let other = segment(SegmentPool::Planned, 2 << 40, &[(MIB, false)]);
        let map = map_of(&[next, other, one]);
        assert_eq!((map.cell_bytes, map.other_ranges), (512 << 10, 0));
        let [first, second] = &map.ranges[..] else { panic!("{map:?}") };
        assert_eq!((first.kind(), first.address, first.len_bytes), (Kind::Pool, 1 << 40, 3 * MIB + MIB / 2));
        assert_eq!((first.live_bytes, first.largest_free_bytes), (2 * MIB, MIB + 1));
        // Almost full is not full, and one byte is not nothing.
        assert_eq!(first.used, [255, 255, 0, 0, 254, 255, 1]);
        assert_eq!((second.kind(), second.used.as_slice()), (Kind::Planned, [0, 0].as_slice()));
    }

    #[test]
    fn however_much_there_is_the_sums_are_right_and_it_fits() {
        for (count, mib) in [(1, 1), (1, 200_000), (47, 3_000), (48, 1), (5_000, 2), (3_000, 700)] {
            let of = |number: u64| {
                let (len, live) = ((mib + number % 7) * MIB, number % 3 * MIB / 2);
                segment(SegmentPool::Pool, number << 40, &[(live, true), (len - live, false)])
            };
            let segments: Vec<Segment> = (1..=count).map(of).collect();
            let map = map_of(&segments);
            let sum = |of: fn(&AddressRange) -> u64| map.ranges.iter().map(of).sum::<u64>();
            let all: u64 = segments.iter().map(len_of).sum();
            assert_eq!(sum(|range| range.len_bytes) + map.other_bytes, all);
            let live: u64 = (1..=count).map(|number| number % 3 * MIB / 2).sum();
            assert_eq!(sum(|range| range.live_bytes) + map.other_live_bytes, live);
            assert_eq!(map.ranges.len() as u64 + map.other_ranges, count);
            let is_whole = |range: &AddressRange| range.used.len() as u64 == range.len_bytes.div_ceil(map.cell_bytes);
            assert!(map.ranges.iter().all(is_whole));
            assert!(map.encoded_len() < 4_096, "{} bytes", map.encoded_len());
        }
    }
}
