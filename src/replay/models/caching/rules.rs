//! PyTorch's sizes: what a request is rounded to, and how large a segment it takes.
//!
//! Constants are those of c10's CUDA allocator from 2.5 to 2.15.

use super::conf::Conf;

/// Requests are rounded up to this; no smaller rest is split off.
pub const MIN_BLOCK: u64 = 512;
/// Rounded requests up to this come from the small pool.
pub const SMALL: u64 = 1 << 20;
/// Segments of the small pool.
pub const SMALL_BUFFER: u64 = 2 << 20;
/// Rounded requests from this up have segments of their own.
pub const MIN_LARGE_ALLOC: u64 = 10 << 20;
/// Segments of the large pool below that, unless an option says otherwise.
pub const LARGE_BUFFER: u64 = 20 << 20;
/// Larger segments are rounded up to this.
pub const ROUND_LARGE: u64 = 2 << 20;

/// What a request of `bytes` is rounded to.
pub(super) fn round(conf: &Conf, bytes: u64) -> u64 {
    if bytes < MIN_BLOCK {
        return MIN_BLOCK;
    }
    // From 1 MiB, a place for each power of two.
    let slot = (bytes.ilog2() as usize).saturating_sub(20).min(15);
    let divisions = conf.divisions[slot];
    if divisions > 1 && bytes > MIN_BLOCK * divisions {
        divided(bytes, divisions)
    } else {
        bytes.next_multiple_of(MIN_BLOCK)
    }
}

fn divided(bytes: u64, divisions: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let floor = 1_u64 << bytes.ilog2();
    match floor >> divisions.ilog2() {
        0 => floor << 1,
        step => bytes.next_multiple_of(step),
    }
}

/// How large a segment a rounded request takes when nothing cached fits.
pub(super) fn segment(conf: &Conf, rounded: u64) -> u64 {
    if rounded <= SMALL {
        SMALL_BUFFER
    } else if rounded < MIN_LARGE_ALLOC {
        conf.large_segment
    } else {
        rounded.next_multiple_of(ROUND_LARGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::models::caching::conf::Version;

    #[test]
    fn requests_are_rounded_to_512_or_to_parts_of_a_power_of_two() {
        let plain = Conf::of(Version::NEWEST);
        let rounded = |bytes| round(&plain, bytes);
        assert_eq!([1, 511, 512, 513, 1_000_000].map(rounded), [512, 512, 512, 1024, 1_000_448]);
        let divided = Conf::parse("roundup_power2_divisions:4", Version::NEWEST).unwrap();
        let rounded = |mib: u64| round(&divided, mib << 20) >> 20;
        assert_eq!([1024, 1200, 1280, 1281, 2047].map(rounded), [1024, 1280, 1280, 1536, 2048]);
        // At most 512 times the divisions: as without.
        assert_eq!([round(&divided, 2048), round(&divided, 2049)], [2048, 2560]);
    }

    #[test]
    fn segments_are_of_three_kinds() {
        let conf = Conf::of(Version::NEWEST);
        let mib = |bytes| segment(&conf, bytes) as f64 / f64::from(1 << 20);
        assert_eq!([512, SMALL, SMALL + 512, MIN_LARGE_ALLOC - 512].map(mib), [2.0, 2.0, 20.0, 20.0]);
        assert_eq!([MIN_LARGE_ALLOC, MIN_LARGE_ALLOC + 512].map(mib), [10.0, 12.0]);
    }
}
