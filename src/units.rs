//! Sizes, addresses and half-open spans, with checked arithmetic only.
//!
//! Every address space has its own type ([`DeviceAddress`], [`PlanOffset`]), so adding an offset of one space to an
//! address of another does not compile. Raw `u64` appears only at the borders: drivers, the wire, files.
//!
//! Not for: anything that knows what the bytes are for.

use std::fmt;
use std::time::Duration;

/// A number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Bytes = Bytes(0);
    /// 2^63 − 1: more than any machine has, and still safe to add once.
    pub const MAX: Bytes = Bytes(i64::MAX as u64);
    /// 2^62: the largest size that is read from anywhere. No device comes near it, and sums of two still fit.
    pub const LARGEST: Bytes = Bytes(1 << 62);

    /// `n` bytes.
    pub const fn new(n: u64) -> Bytes {
        Bytes(n)
    }

    /// `n` × 1024 bytes.
    pub const fn kib(n: u64) -> Bytes {
        Bytes(n << 10)
    }

    /// `n` × 1024² bytes.
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n << 20)
    }

    /// `n` × 1024³ bytes.
    pub const fn gib(n: u64) -> Bytes {
        Bytes(n << 30)
    }

    /// The bare number, for borders and indices.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// True for zero bytes.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The sum, or `None` past [`Bytes::MAX`].
    pub fn checked_add(self, other: Bytes) -> Option<Bytes> {
        self.0.checked_add(other.0).map(Bytes).filter(|sum| *sum <= Bytes::MAX)
    }

    /// The sum, or [`Bytes::MAX`]: for figures that only have to be right where there is so much.
    pub fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0)).min(Bytes::MAX)
    }

    /// The difference, or `None` below zero.
    pub fn checked_sub(self, other: Bytes) -> Option<Bytes> {
        self.0.checked_sub(other.0).map(Bytes)
    }

    /// The difference, or zero.
    pub fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The product, or `None` past [`Bytes::MAX`].
    pub fn checked_mul(self, n: u64) -> Option<Bytes> {
        self.0.checked_mul(n).map(Bytes).filter(|product| *product <= Bytes::MAX)
    }

    /// The next multiple of `unit`, or `None` past [`Bytes::MAX`]. `unit` must not be zero.
    pub fn round_up(self, unit: Bytes) -> Option<Bytes> {
        assert!(!unit.is_zero(), "rounding to a multiple of zero bytes");
        self.0.checked_next_multiple_of(unit.0).map(Bytes).filter(|rounded| *rounded <= Bytes::MAX)
    }

    /// The largest multiple of `unit` that is not larger. `unit` must not be zero.
    pub fn round_down(self, unit: Bytes) -> Bytes {
        assert!(!unit.is_zero(), "rounding to a multiple of zero bytes");
        Bytes(self.0 - self.0 % unit.0)
    }

    /// True when this is a multiple of `unit`. `unit` must not be zero.
    pub fn is_multiple_of(self, unit: Bytes) -> bool {
        assert!(!unit.is_zero(), "multiple of zero bytes");
        self.0.is_multiple_of(unit.0)
    }
}

impl std::ops::Add for Bytes {
    type Output = Bytes;

    /// Panics past [`Bytes::MAX`]: sums of sizes that were checked at the border cannot get there.
    fn add(self, other: Bytes) -> Bytes {
        self.checked_add(other).expect("a sum of checked sizes fits")
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl std::ops::Sub for Bytes {
    type Output = Bytes;

    /// Panics below zero: accounts never go negative.
    fn sub(self, other: Bytes) -> Bytes {
        self.checked_sub(other).expect("no account goes below zero")
    }
}

impl std::ops::SubAssign for Bytes {
    fn sub_assign(&mut self, other: Bytes) {
        *self = *self - other;
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(iter: I) -> Bytes {
        iter.fold(Bytes::ZERO, |total, n| total + n)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0;
        let text = if n < 1 << 10 {
            format!("{n} B")
        } else if n < 1 << 20 {
            format!("{:.1} KiB", n as f64 / (1u64 << 10) as f64)
        } else if n < 1 << 30 {
            format!("{:.1} MiB", n as f64 / (1u64 << 20) as f64)
        } else {
            format!("{:.2} GiB", n as f64 / (1u64 << 30) as f64)
        };
        f.pad(&text)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}B", self.0)
    }
}

/// A size that a person wrote: a plain number of bytes, or a number with `KiB`, `MiB`, `GiB`, `TiB` (`K`, `M`, `G`,
/// `T` for short).
impl std::str::FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Bytes, ParseBytesError> {
        let error = || ParseBytesError::NotASize(text.to_owned());
        let too_large = || ParseBytesError::TooLarge(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
        let shift = match trimmed[digits.len()..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            "t" | "tib" => 40,
            _ => return Err(error()),
        };
        if let Ok(whole) = digits.parse::<u64>() {
            let bytes = Bytes(whole).checked_mul(1 << shift);
            return bytes.filter(|bytes| *bytes <= Bytes::LARGEST).ok_or_else(too_large);
        }
        let fraction: f64 = digits.parse().map_err(|_| error())?;
        let bytes = fraction * (1u64 << shift) as f64;
        // A part of a byte is most likely another unit's.
        if bytes < 0.0 || shift == 0 {
            return Err(error());
        }
        if bytes > Bytes::LARGEST.0 as f64 {
            return Err(too_large());
        }
        Ok(Bytes(bytes as u64))
    }
}

/// A time that a person wrote: a number with `ms`, `s`, `m` or `h`, in whole milliseconds.
///
/// # Errors
///
/// What it is instead.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let expected = || format!("'{text}' is not a time such as 2s, 0.5s or 500ms");
    let (digits, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(expected)?);
    let each: u64 = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(expected()),
    };
    let (whole, fraction) = digits.trim().split_once('.').unwrap_or((digits.trim(), ""));
    let whole = whole.parse::<u64>().ok().and_then(|whole| whole.checked_mul(each));
    // In milliseconds it is written again.
    let parts = 10_u64.pow(u32::try_from(fraction.len()).ok().filter(|digits| *digits <= 9).ok_or_else(expected)?);
    let fraction: u64 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| expected())? };
    let rest = fraction.checked_mul(each).filter(|rest| rest.is_multiple_of(parts)).map(|rest| rest / parts);
    let millis = whole.zip(rest).and_then(|(whole, rest)| whole.checked_add(rest));
    millis.map(Duration::from_millis).ok_or_else(expected)
}

/// A size that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseBytesError {
    /// It is no number with a unit.
    #[error("'{0}' is not a size; write bytes or a number with KiB, MiB, GiB or TiB, such as 80GiB")]
    NotASize(String),
    /// It is more than 2⁶² bytes, 4 EiB.
    #[error("'{0}' is more than there can be")]
    TooLarge(String),
}

/// A place in some address space, measured in bytes from its origin.
pub trait Place: Copy + Ord + fmt::Debug {
    /// The place at `n` bytes from the origin.
    fn from_raw(n: u64) -> Self;
    /// Bytes from the origin.
    fn raw(self) -> u64;

    /// The place `len` further on, or `None` past the end of the space.
    fn checked_add(self, len: Bytes) -> Option<Self> {
        self.raw().checked_add(len.get()).map(Self::from_raw)
    }

    /// Bytes from `origin` to here, or `None` if `origin` lies behind.
    fn checked_distance(self, origin: Self) -> Option<Bytes> {
        self.raw().checked_sub(origin.raw()).map(Bytes::new)
    }
}

macro_rules! place {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// The place at `n` bytes from the origin.
            pub const fn new(n: u64) -> $name {
                $name(n)
            }

            /// Bytes from the origin.
            pub const fn get(self) -> u64 {
                self.0
            }
        }

        impl Place for $name {
            fn from_raw(n: u64) -> $name {
                $name(n)
            }

            fn raw(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

place! {
    /// An address that a device can use: a number, never a pointer that Rust code follows.
    DeviceAddress
}

place! {
    /// A place inside the address range that a plan lays out, from its first byte.
    PlanOffset
}

/// A half-open run of bytes, `[start, start + len)`.
///
/// Half-open because the closed form cannot express an empty span or the full space and makes every length +1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span<P> {
    start: P,
    len: Bytes,
}

/// A span of device addresses.
pub type AddressSpan = Span<DeviceAddress>;
/// A span of a plan.
pub type PlanSpan = Span<PlanOffset>;

/// Spans in ascending order of their starts, those that touch or overlap as one.
pub fn joined<P: Place>(spans: impl IntoIterator<Item = Span<P>>) -> Vec<Span<P>> {
    let mut joined: Vec<Span<P>> = Vec::new();
    for span in spans {
        match joined.last_mut().filter(|last| span.start() <= last.end()) {
            Some(last) => {
                let end = last.end().max(span.end());
                last.len = end.checked_distance(last.start).expect("it begins before it ends");
            }
            None => joined.push(span),
        }
    }
    joined
}

impl<P: Place> Span<P> {
    /// The span, or `None` if its end lies outside the address space.
    pub fn new(start: P, len: Bytes) -> Option<Span<P>> {
        start.checked_add(len).map(|_| Span { start, len })
    }

    /// First byte.
    pub fn start(self) -> P {
        self.start
    }

    /// Bytes.
    pub fn len(self) -> Bytes {
        self.len
    }

    /// First byte behind the span.
    pub fn end(self) -> P {
        P::from_raw(self.start.raw() + self.len.get())
    }

    /// True for no bytes at all.
    pub fn is_empty(self) -> bool {
        self.len.is_zero()
    }

    /// True when the two share at least one byte.
    pub fn overlaps(self, other: Span<P>) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// True when `other` lies wholly inside.
    pub fn contains_span(self, other: Span<P>) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }

    /// True when the byte at `place` belongs to the span.
    pub fn contains(self, place: P) -> bool {
        self.start <= place && place < self.end()
    }
}

impl<P: Place> fmt::Debug for Span<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:?}, {:?})", self.start, self.end())
    }
}

impl<P: Place> fmt::Display for Span<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:#x}, {:#x})", self.start.raw(), self.end().raw())
    }
}

/// Logical time: the index of an event in a trace. Never seconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Tick(pub u64);

impl fmt::Display for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The half-open run of ticks in which a buffer is live.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lifetime {
    /// First tick at which it is live.
    pub start: Tick,
    /// First tick at which it no longer is.
    pub end: Tick,
}

impl Lifetime {
    /// The lifetime from `start` up to, not including, `end`.
    pub fn new(start: u64, end: u64) -> Lifetime {
        Lifetime { start: Tick(start), end: Tick(end) }
    }

    /// True when both are live at some tick.
    pub fn overlaps(self, other: Lifetime) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// Ticks.
    pub fn ticks(self) -> u64 {
        self.end.0 - self.start.0
    }
}

/// A number of things in words: "1 request", "2 requests", "2 entries".
pub fn counted(count: impl Into<u64>, what: &str) -> String {
    match (count.into(), what.strip_suffix('y')) {
        (1, _) => format!("1 {what}"),
        (count, Some(stem)) => format!("{count} {stem}ies"),
        (count, None) => format!("{count} {what}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_written_by_people_are_read() {
        for (text, expected) in [
            ("0", 0),
            ("512", 512),
            ("2MiB", 2 << 20),
            ("2 mib", 2 << 20),
            ("80G", 80 << 30),
            ("1.5GiB", 3 << 29),
            ("1T", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Bytes::new(expected)), "{text}");
        }
        for text in ["0.5", "1.5B", "", "GiB", "-1", "1XiB", "1e30", "99999999999TiB", "1 2", "NaN"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn times_written_by_people_are_read_in_milliseconds() {
        for (text, millis) in [("2s", 2000), ("500ms", 500), ("0.1s", 100), ("1.25m", 75_000), ("0.5h", 1_800_000)] {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "2", "s", ".5s", "0.5ms", "0.0001s", "-1s", "1e3s", "1.-5s", "2 parsecs", "1.0000000000s"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
        assert!(parse_time(&format!("{}h", u64::MAX)).is_err());
    }

    #[test]
    fn sizes_are_shown_in_the_largest_fitting_unit() {
        for (bytes, expected) in [(1, "1 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 29, "2.50 GiB")] {
            assert_eq!(Bytes::new(bytes).to_string(), expected);
        }
    }

    #[test]
    fn rounding_past_the_largest_size_is_none() {
        assert_eq!(Bytes::new(1).round_up(Bytes::mib(2)), Some(Bytes::mib(2)));
        assert_eq!(Bytes::mib(2).round_up(Bytes::mib(2)), Some(Bytes::mib(2)));
        assert_eq!(Bytes::MAX.round_up(Bytes::mib(2)), None);
        assert_eq!(Bytes::new(u64::MAX).round_up(Bytes::mib(2)), None);
        assert_eq!(Bytes::MAX.checked_add(Bytes::new(1)), None);
    }

    #[test]
    fn spans_that_only_touch_do_not_overlap() {
        let span = |start, len| Span::new(DeviceAddress::new(start), Bytes::new(len)).unwrap();
        assert!(!span(0, 4).overlaps(span(4, 4)));
        assert!(span(0, 5).overlaps(span(4, 4)));
        assert!(!span(4, 0).overlaps(span(0, 4)));
        assert!(span(0, 8).contains_span(span(4, 4)));
        assert!(!span(0, 8).contains_span(span(4, 5)));
        assert!(Span::new(DeviceAddress::new(u64::MAX), Bytes::new(1)).is_none());
    }
}
