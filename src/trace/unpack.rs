//! Bytes of a file as they were before it was compressed with zstd or gzip, told by its first bytes. A file may not grow out of all proportion: a few
//! kilobytes could fill any memory.
//!
//! Invariant: of a compressed file never more is given than its [`Growth`] allows. What a reader makes of a byte differs, so each format has its own; with all
//! of them the reader of a compressed file takes less than 640 MiB and 8 KiB for each byte of it (`tests/fuzz` tries).

use std::cell::Cell;
use std::io::{BufRead, BufReader, Read};
use std::rc::Rc;

/// How far a compressed file may grow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    /// So many bytes anyway.
    pub(super) free: u64,
    /// And so many for each byte that was taken of it.
    pub(super) times: u64,
}

impl Growth {
    /// Rows: traces of real jobs shrink to a tenth or so, and an event takes ten times its row.
    pub(super) const ROWS: Growth = Growth { free: 16 << 20, times: 100 };
    /// Binary traces shrink to a fourth or so, and an event of ninety bytes can be one byte.
    pub(super) const CODES: Growth = Growth { free: 2 << 20, times: 24 };
    /// Snapshots of more than a megabyte shrink to a thirtieth or so, and a value of forty bytes can be one byte.
    pub(super) const PICKLE: Growth = Growth { free: 1 << 20, times: 40 };
}

/// As many bytes as tell any format from any other.
const HEAD_LEN: usize = 4096;

/// A file as it was before it was compressed, and its beginning to look at.
pub(super) struct Unpacked<'a> {
    head: Vec<u8>,
    /// How much of the head has been read.
    at: usize,
    /// What came after the head instead of more bytes; given once the head has been.
    failed: Option<std::io::Error>,
    rest: Box<dyn Read + 'a>,
    growth: Rc<Cell<Growth>>,
}

impl<'a> Unpacked<'a> {
    /// Looks at the first bytes and unpacks what follows. Bytes that cannot be read are an error here only if they are the very first.
    pub(super) fn open(bytes: impl Read + 'a) -> std::io::Result<Unpacked<'a>> {
        let taken = Rc::new(Cell::new(0));
        let growth = Rc::new(Cell::new(Growth::ROWS));
        let mut bytes = BufReader::new(Counted { bytes, taken: Rc::clone(&taken) });
        let most = Rc::clone(&growth);
        let grown = |bytes| Grown { bytes, taken, given: 0, most };
        let head = bytes.fill_buf()?;
        let rest: Box<dyn Read + 'a> = if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            Box::new(grown(Box::new(zstd::stream::read::Decoder::with_buffer(bytes)?)))
        } else if head.starts_with(&[0x1f, 0x8b]) {
            Box::new(grown(Box::new(flate2::bufread::MultiGzDecoder::new(bytes))))
        } else {
            Box::new(bytes)
        };
        let mut unpacked = Unpacked { head: Vec::new(), at: 0, failed: None, rest, growth };
        // `take` stops at its limit or the end; an error leaves what came before it.
        let read = unpacked.rest.by_ref().take(HEAD_LEN as u64).read_to_end(&mut unpacked.head);
        unpacked.failed = read.err();
        Ok(unpacked)
    }

    /// The first bytes, up to 4 KiB.
    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Why there are no bytes after the head, if they cannot be read.
    pub(super) fn into_failure(self) -> Option<std::io::Error> {
        self.failed
    }

    /// Lets a compressed file grow by this much: less for a format whose bytes are worth more.
    pub(super) fn hold_to(&self, growth: Growth) {
        self.growth.set(growth);
    }
}

impl Read for Unpacked<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let mut head = self.head.get(self.at..).unwrap_or_default();
        if !head.is_empty() {
            let len = head.read(into)?;
            self.at += len;
            return Ok(len);
        }
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.rest.read(into),
        }
    }
}

/// Counts what is taken from it.
struct Counted<R> {
    bytes: R,
    taken: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = self.bytes.read(into)?;
        self.taken.set(self.taken.get() + len as u64);
        Ok(len)
    }
}

/// What a compressed file grows to.
struct Grown<'a> {
    bytes: Box<dyn Read + 'a>,
    taken: Rc<Cell<u64>>,
    given: u64,
    most: Rc<Cell<Growth>>,
}

impl Read for Grown<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = self.bytes.read(into)?;
        self.given += len as u64;
        let Growth { free, times } = self.most.get();
        if self.given > free.saturating_add(times.saturating_mul(self.taken.get())) {
            let text = format!("it grows to more than {times} times its size; unpack it first if that is right");
            return Err(std::io::Error::other(text));
        }
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_gives_all_that_came_before_the_cut() {
        let text: Vec<u8> = (0..100_000_u32).flat_map(|n| (n * 7919).to_string().into_bytes()).collect();
        let packed = zstd::encode_all(&text[..], 3).unwrap();
        for cut in [packed.len() / 2, packed.len() - 1] {
            let mut unpacked = Unpacked::open(&packed[..cut]).unwrap();
            let mut read = Vec::new();
            assert!(unpacked.read_to_end(&mut read).is_err());
            assert!(text.starts_with(&read));
        }
        let mut read = Vec::new();
        Unpacked::open(&packed[..]).unwrap().read_to_end(&mut read).unwrap();
        assert_eq!(read, text);
    }
}
