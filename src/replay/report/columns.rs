//! Numbers as they travel in a page: columns of variable-length integers, packed with zlib, written as base64.
//!
//! Not for: what the numbers mean. Who writes columns and who reads them (`plot.js`) agree on their order.
//!
//! Invariant: what `Columns` of `plot.js` reads is what was put in, as long as it is below 2^53, where its numbers stop being exact.

use std::io::{self, Write};

use flate2::Compression;
use flate2::write::ZlibEncoder;

/// Columns that are being filled.
#[derive(Debug)]
pub(super) struct Columns {
    packed: ZlibEncoder<Base64<Vec<u8>>>,
}

impl Columns {
    pub(super) fn new() -> Columns {
        let text = Base64 { to: Vec::new(), waiting: Vec::new() };
        Columns { packed: ZlibEncoder::new(text, Compression::new(7)) }
    }

    /// Seven bits a byte, low ones first; the high bit says that more come.
    pub(super) fn number(&mut self, mut number: u64) -> io::Result<()> {
        let mut bytes = [0; 10];
        let mut len = 0;
        for byte in &mut bytes {
            len += 1;
            *byte = (number & 0x7f) as u8;
            number >>= 7;
            if number == 0 {
                break;
            }
            *byte |= 0x80;
        }
        self.packed.write_all(&bytes[..len])
    }

    /// A column of numbers as they are.
    pub(super) fn numbers(&mut self, column: impl IntoIterator<Item = u64>) -> io::Result<()> {
        column.into_iter().try_for_each(|number| self.number(number))
    }

    /// A column as differences, from 0 on: for what goes up, or moves little. The sign is the lowest bit.
    pub(super) fn differences(&mut self, column: impl IntoIterator<Item = u64>) -> io::Result<()> {
        let mut last = 0_u64;
        for number in column {
            let difference = number.wrapping_sub(last) as i64;
            self.number(((difference << 1) ^ (difference >> 63)) as u64)?;
            last = number;
        }
        Ok(())
    }

    /// All of it as base64.
    pub(super) fn finish(self) -> io::Result<Vec<u8>> {
        self.packed.finish()?.finish()
    }
}

/// Writes base64 of whatever is written to it.
#[derive(Debug)]
struct Base64<W> {
    to: W,
    /// Fewer than three bytes that have no group yet.
    waiting: Vec<u8>,
}

impl<W: Write> Base64<W> {
    fn group(&mut self, group: &[u8]) -> io::Result<()> {
        const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let bits = (0..3).fold(0_usize, |bits, at| bits << 8 | usize::from(group.get(at).copied().unwrap_or(0)));
        let mut text = [18, 12, 6, 0].map(|shift| LETTERS[bits >> shift & 63]);
        text[group.len() + 1..].fill(b'=');
        self.to.write_all(&text)
    }

    fn finish(mut self) -> io::Result<W> {
        let rest = std::mem::take(&mut self.waiting);
        if !rest.is_empty() {
            self.group(&rest)?;
        }
        Ok(self.to)
    }
}

impl<W: Write> Write for Base64<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut all = std::mem::take(&mut self.waiting);
        all.extend_from_slice(bytes);
        let groups = all.chunks_exact(3);
        self.waiting = groups.remainder().to_vec();
        groups.into_iter().try_for_each(|group| self.group(group))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The way back, as `plot.js` goes it.
#[cfg(test)]
pub(super) mod decoder {
    use std::io::Read as _;

    /// Columns that are being read.
    pub(in crate::replay::report) struct Decoder {
        bytes: std::vec::IntoIter<u8>,
    }

    impl Decoder {
        pub(in crate::replay::report) fn new(base64: &[u8]) -> Decoder {
            assert!(base64.len().is_multiple_of(4), "base64 comes in fours");
            let value = |letter: u8| match letter {
                b'A'..=b'Z' => letter - b'A',
                b'a'..=b'z' => letter - b'a' + 26,
                b'0'..=b'9' => letter - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => panic!("{letter} is no letter of base64"),
            };
            let mut packed = Vec::new();
            for four in base64.chunks(4) {
                let letters = four.iter().filter(|letter| **letter != b'=').count();
                let bits =
                    (0..4).fold(0, |bits, at| bits << 6 | if at < letters { u32::from(value(four[at])) } else { 0 });
                packed.extend_from_slice(&bits.to_be_bytes()[1..letters]);
            }
            let mut bytes = Vec::new();
            flate2::read::ZlibDecoder::new(packed.as_slice()).read_to_end(&mut bytes).unwrap();
            Decoder { bytes: bytes.into_iter() }
        }

        pub(in crate::replay::report) fn number(&mut self) -> u64 {
            let mut number = 0;
            for shift in (0..).step_by(7) {
                let byte = self.bytes.next().unwrap();
                number |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    break;
                }
            }
            number
        }

        pub(in crate::replay::report) fn numbers(&mut self, count: usize) -> Vec<u64> {
            (0..count).map(|_| self.number()).collect()
        }

        pub(in crate::replay::report) fn differences(&mut self, count: usize) -> Vec<u64> {
            let mut last = 0_u64;
            let mut next = || {
                let number = self.number();
                last = last.wrapping_add((number >> 1) ^ (number & 1).wrapping_neg());
                last
            };
            (0..count).map(|_| next()).collect()
        }

        pub(in crate::replay::report) fn is_at_end(&self) -> bool {
            self.bytes.len() == 0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::decoder::Decoder;
    use super::*;
    use crate::rng::mix;

    #[test]
    fn what_is_decoded_is_what_went_in() {
        let mut column = vec![0, 1, 127, 128, 16_383, 16_384, 1 << 53, u64::MAX, 0, u64::MAX / 2 + 1, 5];
        column.extend((0..2000).map(|seed| mix(seed) >> (mix(seed + 7) % 64)));
        for count in [0, 1, 2, 3, 4, column.len()] {
            let column = &column[..count];
            let mut columns = Columns::new();
            columns.number(count as u64).unwrap();
            columns.numbers(column.iter().copied()).unwrap();
            columns.differences(column.iter().copied()).unwrap();
            let mut decoder = Decoder::new(&columns.finish().unwrap());
            assert_eq!(decoder.number(), count as u64);
            assert_eq!(decoder.numbers(count), column);
            assert_eq!(decoder.differences(count), column);
            assert!(decoder.is_at_end());
        }
    }

    #[test]
    fn base64_is_as_everybody_writes_it() {
        for (bytes, expected) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            let mut text = Base64 { to: Vec::new(), waiting: Vec::new() };
            bytes.bytes().for_each(|byte| text.write_all(&[byte]).unwrap());
            assert_eq!(text.finish().unwrap(), expected.as_bytes());
        }
    }
}
