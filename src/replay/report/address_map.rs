//! The addresses of a pool over time: which allocations a page shows as themselves, and what becomes of the others.
//!
//! Not for: drawing, which `map.js` does.
//!
//! Invariant: bytes × time of what is shown and of what is left out are together those of all allocations.

use std::cmp::Reverse;
use std::io;

use super::columns::Columns;
use crate::replay::record::Placed;
use crate::rng::mix;

/// At most so many unused ranges of addresses are cut out.
const CUTS_MAX: usize = 4000;
/// What is not cut out of them is at most this part of the addresses that are used.
const UNUSED_MAX: u64 = 50;
/// Cells of the haze: along time and along addresses.
const HAZE_COLUMNS: u64 = 1024;
const HAZE_ROWS: u64 = 256;
/// A cell of the haze that is full.
const FULL: f64 = 65535.0;

/// Addresses that follow each other, and where a map shows them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range {
    /// The first address.
    pub(super) start: u64,
    /// Bytes.
    pub(super) len: u64,
    /// Bytes of all ranges before it.
    pub(super) offset: u64,
}

/// An allocation as a map shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rectangle {
    /// The event that asked for it, at most the end of the map.
    pub(super) from: u32,
    /// Events that it lived, up to the end of the map.
    pub(super) events: u32,
    /// It is freed before the end of the map.
    pub(super) is_freed: bool,
    /// Its first byte, in [`AddressMap::ranges`] one after another.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) bytes: u64,
    /// Its event in the trace.
    pub(super) event: u32,
}

impl Rectangle {
    /// Bytes × events.
    pub(super) fn area(&self) -> u128 {
        u128::from(self.bytes) * u128::from(self.events)
    }
}

/// Allocations that are not shown as themselves.
#[derive(Clone, Debug, Default)]
pub(super) struct LeftOut {
    /// How many.
    pub(super) count: usize,
    /// Bytes × events of them all.
    pub(super) area: u128,
    /// Bytes of the largest.
    pub(super) largest: u64,
    /// How full of them each cell is, row after row; empty if nothing is left out.
    pub(super) haze: Vec<f64>,
}

/// A pool's map.
#[derive(Clone, Debug, Default)]
pub(super) struct AddressMap {
    /// Addresses that are used at any time, unused ones between them where they are short.
    pub(super) ranges: Vec<Range>,
    /// What is shown, in the order in which it was asked for.
    pub(super) shown: Vec<Rectangle>,
    /// What is not.
    pub(super) left_out: LeftOut,
}

impl AddressMap {
    /// The map of what was placed in the time up to `events`; where memory ran out at `end`, nothing is there after it. At most `shown_max` allocations are shown: half of them the largest, half of
    /// them those that, of the others, hold the most bytes × time.
    pub(super) fn new(placed: &[Placed], events: u32, end: u32, shown_max: usize) -> AddressMap {
        let ranges = used_ranges(placed);
        let rectangle = |placed: &Placed| {
            let from = placed.from.min(end);
            let until = placed.until.clamp(from, end);
            Rectangle {
                from,
                events: until - from,
                is_freed: placed.until < end,
                offset: offset_of(&ranges, placed.address.get()),
                bytes: placed.bytes.get(),
                event: placed.event,
            }
        };
        let mut shown: Vec<Rectangle> = placed.iter().map(rectangle).collect();
        let mut rest = Vec::new();
        if shown.len() > shown_max {
            let half = shown_max / 2;
            // Ties go to any, the same in every run: were it the earlier, equal iterations would look as if something changed among them.
            let any = |rectangle: &Rectangle| mix(u64::from(rectangle.from));
            shown.sort_by_key(|rectangle| Reverse((rectangle.bytes, rectangle.events, any(rectangle))));
            shown[half..].sort_by_key(|rectangle| Reverse((rectangle.area(), any(rectangle))));
            rest = shown.split_off(shown_max);
            shown.sort_by_key(|rectangle| (rectangle.from, rectangle.offset));
        }
        let left_out = LeftOut {
            count: rest.len(),
            area: rest.iter().map(Rectangle::area).sum(),
            largest: rest.iter().map(|rectangle| rectangle.bytes).max().unwrap_or(0),
            haze: haze(&rest, events, height(&ranges)),
        };
        AddressMap { ranges, shown, left_out }
    }

    /// What a reader must know of what is not there to be seen.
    pub(super) fn words(&self) -> String {
        let (shown, left_out) = (self.shown.len(), &self.left_out);
        if left_out.count == 0 {
            return format!("All {} allocations are shown.", grouped(shown as u64));
        }
        let area: u128 = self.shown.iter().map(Rectangle::area).sum();
        format!(
            "{} of {} allocations are shown as themselves: half of them the largest, half of them those that hold the most bytes × time of \
             the others; together {:.1} % of all bytes × time. The other {}, of {} at most, are the grey haze: the denser, the \
             fuller of them is that place.",
            grouped(shown as u64),
            grouped((shown + left_out.count) as u64),
            100.0 * area as f64 / ((area + left_out.area) as f64).max(1.0),
            grouped(left_out.count as u64),
            crate::units::Bytes::new(left_out.largest),
        )
    }

    /// Writes it, as `readMap` of `plot.js` reads it. `request` says which row of the page's table of requests an event has.
    pub(super) fn write(&self, columns: &mut Columns, request: impl Fn(u32) -> u64) -> io::Result<()> {
        let shown = || self.shown.iter();
        columns.number(self.shown.len() as u64)?;
        columns.differences(shown().map(|rectangle| u64::from(rectangle.from)))?;
        columns.numbers(shown().map(|rectangle| u64::from(rectangle.events) << 1 | u64::from(rectangle.is_freed)))?;
        columns.differences(shown().map(|rectangle| rectangle.offset))?;
        columns.numbers(shown().map(|rectangle| rectangle.bytes))?;
        columns.differences(shown().map(|rectangle| request(rectangle.event)))?;
        let haze = &self.left_out.haze;
        let (wide, high) = if haze.is_empty() { (0, 0) } else { (HAZE_COLUMNS, HAZE_ROWS) };
        columns.numbers([wide, high])?;
        columns.numbers(haze.iter().map(|part| (part.min(1.0) * FULL).round() as u64))
    }
}

/// 1234567 as 1,234,567.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The used addresses in ranges, the longest unused ones between them cut out.
fn used_ranges(placed: &[Placed]) -> Vec<Range> {
    let mut spans: Vec<(u64, u64)> = placed
        .iter()
        .filter(|placed| !placed.bytes.is_zero())
        .map(|placed| (placed.address.get(), placed.address.get().saturating_add(placed.bytes.get())))
        .collect();
    spans.sort_unstable();
    let mut used: Vec<(u64, u64)> = Vec::new();
    for (start, end) in spans {
        match used.last_mut().filter(|last| start <= last.1) {
            Some(last) => last.1 = last.1.max(end),
            None => used.push((start, end)),
        }
    }
    let gap = |at: usize| used[at + 1].0 - used[at].1;
    let mut gaps: Vec<usize> = (0..used.len().saturating_sub(1)).collect();
    gaps.sort_by_key(|at| Reverse(gap(*at)));
    let used_bytes: u64 = used.iter().map(|(start, end)| end - start).sum();
    let mut unused: u64 = gaps.iter().map(|at| gap(*at)).sum();
    let mut cuts = 0;
    while cuts < gaps.len().min(CUTS_MAX) && unused > used_bytes / UNUSED_MAX {
        unused -= gap(gaps[cuts]);
        cuts += 1;
    }
    gaps.truncate(cuts);
    gaps.sort_unstable();
    let mut ranges = Vec::new();
    let (mut first, mut offset) = (0, 0);
    for last in gaps.into_iter().chain(used.len().checked_sub(1)) {
        let range = Range { start: used[first].0, len: used[last].1 - used[first].0, offset };
        offset += range.len;
        first = last + 1;
        ranges.push(range);
    }
    ranges
}

/// Bytes of all ranges.
fn height(ranges: &[Range]) -> u64 {
    ranges.last().map_or(0, |range| range.offset + range.len)
}

/// Where in the ranges an address lies. One in none of them, as one of no bytes may be, is shown at the end of the range before it.
fn offset_of(ranges: &[Range], address: u64) -> u64 {
    let behind = ranges.partition_point(|range| range.start <= address);
    let range = behind.checked_sub(1).and_then(|at| ranges.get(at));
    range.map_or(0, |range| range.offset + (address - range.start).min(range.len))
}

/// How full of these rectangles each cell is, row after row.
fn haze(rectangles: &[Rectangle], events: u32, height: u64) -> Vec<f64> {
    if rectangles.is_empty() || events == 0 || height == 0 {
        return Vec::new();
    }
    let wide = f64::from(events) / HAZE_COLUMNS as f64;
    let high = height as f64 / HAZE_ROWS as f64;
    let mut cells = vec![0.0; (HAZE_COLUMNS * HAZE_ROWS) as usize];
    for rectangle in rectangles {
        let left = f64::from(rectangle.from) / wide;
        let right = f64::from(rectangle.from + rectangle.events) / wide;
        let low = rectangle.offset as f64 / high;
        let top = rectangle.offset.saturating_add(rectangle.bytes) as f64 / high;
        for (row, part_of_row) in parts(low, top, HAZE_ROWS) {
            for (column, part_of_column) in parts(left, right, HAZE_COLUMNS) {
                cells[row * HAZE_COLUMNS as usize + column] += part_of_row * part_of_column;
            }
        }
    }
    cells
}

/// Cells of unit length that `from..until` crosses, of `count`, and how much of each it covers.
fn parts(from: f64, until: f64, count: u64) -> impl Iterator<Item = (usize, f64)> {
    let last = (until.ceil() as usize).min(count as usize);
    (from as usize..last).map(move |cell| (cell, (until.min(cell as f64 + 1.0) - from.max(cell as f64)).max(0.0)))
}

#[cfg(test)]
mod tests {
    use super::super::columns::decoder::Decoder;
    use super::*;
    use crate::units::{Bytes, DeviceAddress};

    fn placed(from: u32, until: u32, address: u64, bytes: u64) -> Placed {
        Placed { from, until, event: from, address: DeviceAddress::new(address), bytes: Bytes::new(bytes) }
    }

    /// Many, none over another.
    fn many(count: u32) -> Vec<Placed> {
        let one = |n: u32| {
            let seed = mix(u64::from(n));
            let lane = u64::from(n % 40);
            let from = n / 40 * 50;
            let until = from + 1 + (seed % 49) as u32;
            placed(from, until, (lane / 10) << 40 | (lane % 10) << 20, 1 + (seed >> 8) % (1 << (seed % 21)))
        };
        (0..count).map(one).collect()
    }

    fn area_of(placed: &[Placed], events: u32) -> u128 {
        let area = |p: &Placed| u128::from(p.bytes.get()) * u128::from(p.until.min(events) - p.from);
        placed.iter().map(area).sum()
    }

    #[test]
    fn what_is_shown_and_what_is_left_out_are_the_whole() {
        let placed = many(4000);
        for shown_max in [0, 1, 10, 999, 4000, 5000] {
            let map = AddressMap::new(&placed, 5000, 5000, shown_max);
            assert_eq!(map.shown.len(), shown_max.min(4000));
            assert_eq!(map.shown.len() + map.left_out.count, 4000);
            let shown: u128 = map.shown.iter().map(Rectangle::area).sum();
            assert_eq!(shown + map.left_out.area, area_of(&placed, 5000));
            assert!(map.shown.windows(2).all(|pair| pair[0].from <= pair[1].from));

            let cell = 5000.0 / HAZE_COLUMNS as f64 * height(&map.ranges) as f64 / HAZE_ROWS as f64;
            let haze = map.left_out.haze.iter().sum::<f64>() * cell;
            assert!((haze - map.left_out.area as f64).abs() <= 1e-6 * haze, "{haze} and {}", map.left_out.area);
            assert!(map.left_out.haze.iter().all(|part| (0.0..=1.0 + 1e-6).contains(part)));
        }
        let map = AddressMap::new(&placed, 5000, 5000, 1000);
        let largest = placed.iter().map(|placed| placed.bytes.get()).max().unwrap();
        assert!(map.shown.iter().any(|rectangle| rectangle.bytes == largest));
        assert!(map.left_out.largest < largest);
        assert!(map.words().starts_with("1,000 of 4,000 allocations are shown as themselves"), "{}", map.words());
    }

    #[test]
    fn a_map_is_decoded_as_it_was() {
        let map = AddressMap::new(&many(4000), 5000, 5000, 3000);
        let mut columns = Columns::new();
        map.write(&mut columns, |event| u64::from(event) + 7).unwrap();
        let mut decoder = Decoder::new(&columns.finish().unwrap());
        let count = decoder.number() as usize;
        let from = decoder.differences(count);
        let lives = decoder.numbers(count);
        let offsets = decoder.differences(count);
        let bytes = decoder.numbers(count);
        let requests = decoder.differences(count);
        let decoded: Vec<Rectangle> = (0..count)
            .map(|at| Rectangle {
                from: from[at] as u32,
                events: (lives[at] >> 1) as u32,
                is_freed: lives[at] & 1 == 1,
                offset: offsets[at],
                bytes: bytes[at],
                event: (requests[at] - 7) as u32,
            })
            .collect();
        assert_eq!(decoded, map.shown);
        assert_eq!(decoder.numbers(2), [HAZE_COLUMNS, HAZE_ROWS]);
        for part in &map.left_out.haze {
            assert!((decoder.number() as f64 / FULL - part).abs() < 1.0 / FULL);
        }
        assert!(decoder.is_at_end());
    }

    #[test]
    fn addresses_far_apart_are_shown_side_by_side_and_small_gaps_stay() {
        let map = AddressMap::new(
            &[placed(0, 9, 1 << 40, 1000), placed(1, 9, (1 << 40) + 1010, 990), placed(2, u32::MAX, 1 << 46, 500)],
            9,
            9,
            10,
        );
        let second = Range { start: 1 << 46, len: 500, offset: 2000 };
        assert_eq!(map.ranges, [Range { start: 1 << 40, len: 2000, offset: 0 }, second]);
        assert_eq!(map.shown.iter().map(|rectangle| rectangle.offset).collect::<Vec<_>>(), [0, 1010, 2000]);
        assert!(!map.shown[2].is_freed);
        assert_eq!(map.words(), "All 3 allocations are shown.");
    }

    #[test]
    fn nothing_one_and_impossible_ones_have_maps() {
        let map = AddressMap::new(&[], 0, 0, 10);
        assert!(map.ranges.is_empty() && map.shown.is_empty());
        let map = AddressMap::new(&[placed(0, u32::MAX, 4096, 1)], 1, 1, 10);
        assert_eq!(map.ranges, [Range { start: 4096, len: 1, offset: 0 }]);
        let at_the_end = placed(7, 3, u64::MAX - 1, 1 << 62);
        let map = AddressMap::new(&[placed(0, 1, 0, 0), at_the_end, placed(u32::MAX, u32::MAX, 5, 3)], 2, 2, 0);
        assert_eq!(map.left_out.count, 3);
        assert_eq!(map.left_out.area, 0);
    }

    #[test]
    fn where_memory_runs_out_every_allocation_ends() {
        let map = AddressMap::new(&[placed(0, u32::MAX, 4096, 64), placed(1, 3, 8192, 64)], 100, 10, 10);
        let ends: Vec<_> = map.shown.iter().map(|it| (it.from + it.events, it.is_freed)).collect();
        assert_eq!(ends, [(10, false), (3, true)]);
        let hazy = AddressMap::new(&[placed(0, u32::MAX, 4096, 64)], 100, 10, 0);
        let area: f64 = hazy.left_out.haze.iter().sum();
        let whole = (HAZE_COLUMNS * HAZE_ROWS) as f64;
        assert!((area / whole - 0.1).abs() < 0.01, "a tenth of the time: {area} of {whole}");
    }

    #[test]
    fn more_gaps_than_can_be_cut_are_cut_where_they_are_longest() {
        let apart: Vec<Placed> = (0..10_000_u64).map(|n| placed(n as u32, u32::MAX, n * n * 4096, 4096)).collect();
        let map = AddressMap::new(&apart, 10_000, 10_000, 20_000);
        assert_eq!(map.ranges.len(), CUTS_MAX + 1);
        let is_sorted = map.ranges.windows(2).all(|pair| pair[0].start + pair[0].len < pair[1].start);
        assert!(is_sorted && map.ranges[0].len > map.ranges[4000].len);
    }

    #[test]
    fn numbers_are_grouped_in_threes() {
        for (number, expected) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(number), expected);
        }
    }
}
