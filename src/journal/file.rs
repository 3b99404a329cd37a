//! How a journal lies in its file, and how far it can be trusted when it is read.
//!
//! ```text
//!   header   0   "STITCHJ\0"   8 bytes
//!            8   version       u32
//!            12  boot          16 bytes: which start of the machine, as the kernel says
//!            28  journal       16 bytes: which journal, as whoever began it says
//!            44  first         u64, the number of its first frame
//!            52  checksum      u32, of what is before
//!   frame    0   length        u32, of the step
//!            4   checksum      u32, of the journal's sixteen bytes, the number, and the step
//!            8   number        u64, one after the other
//!            16  step          protobuf
//! ```
//!
//! Numbers are little-endian. Numbers of frames go on where a journal is written anew: whoever remembers the last one that was written (the witness, [`super::Journal::with_witness`]) knows whether a journal lacks its end, or is an older one. A frame of another journal has another checksum, one that is there twice or in another place another number than is expected there. What comes after the first frame that is not as it should be is not looked at.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::book::Book;
use super::record::{self, Record};
use super::{JournalError, Mark};
use crate::limits;

const MAGIC: [u8; 8] = *b"STITCHJ\0";
/// What this build writes.
pub(super) const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER_LEN: usize = 56;
const FRAME_HEADER_LEN: usize = 16;
/// The number of the first frame.
pub(super) const FIRST: u64 = 1;

/// What a journal is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Which start of the machine.
    pub boot: Mark,
    /// Which journal.
    pub journal: Mark,
}

impl Header {
    pub(super) fn bytes(&self, first: u64) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..28].copy_from_slice(&self.boot);
        bytes[28..44].copy_from_slice(&self.journal);
        bytes[44..52].copy_from_slice(&first.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..52]);
        bytes[52..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }
}

/// Where a journal that was read ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ended {
    /// Behind a whole frame.
    Whole,
    /// In the middle of one: whoever wrote it was killed while he did, and told nobody of that step.
    Torn {
        /// Where it begins.
        at: u64,
    },
    /// At something that nobody has written there. What was known before it may have changed since.
    Damaged {
        /// Where it begins.
        at: u64,
        /// What is wrong with it.
        why: String,
    },
}

/// What a journal says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recovered {
    /// What it is of.
    pub header: Header,
    /// The facts, up to where it ends.
    pub book: Book,
    /// Frames read.
    pub frames: u64,
    /// The number of the last of them; of the one before the first where there is none.
    pub last: u64,
    /// And there.
    pub ended: Ended,
}

fn checksum_of(header: &Header, number: u64, step: &[u8]) -> u32 {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&header.journal);
    checksum.update(&number.to_le_bytes());
    checksum.update(step);
    checksum.finalize()
}

/// A step as a frame.
pub(super) fn frame(header: &Header, number: u64, step: &[Record]) -> Vec<u8> {
    let step = record::write(step);
    let len = u32::try_from(step.len()).expect("a step has so many records at most as fit");
    let mut bytes = Vec::with_capacity(FRAME_HEADER_LEN + step.len());
    bytes.extend(len.to_le_bytes());
    bytes.extend(checksum_of(header, number, &step).to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(step);
    bytes
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Reads a journal as far as it is as it was written.
///
/// # Errors
///
/// It is none, of a version that is not known, or of another start of the machine than `boot`.
pub fn read(path: &Path, boot: &Mark) -> Result<Recovered, JournalError> {
    let system = |source| JournalError::System { action: "read", path: path.to_owned(), source };
    let mut file = File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(path).map_err(system)?;
    // What it says is believed: nobody else may have written it.
    let metadata = file.metadata().map_err(system)?;
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        let text = format!("it is user {}'s and of mode {:o}", metadata.uid(), metadata.mode() & 0o7777);
        return Err(system(std::io::Error::new(std::io::ErrorKind::PermissionDenied, text)));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(system)?;
    read_bytes(&bytes, path, boot)
}

/// The same of what is in the file at `path`.
///
/// # Errors
///
/// As [`read`].
pub fn read_bytes(bytes: &[u8], path: &Path, boot: &Mark) -> Result<Recovered, JournalError> {
    let none = || JournalError::NotAJournal { path: path.to_owned() };
    let (head, frames) = bytes.split_first_chunk::<HEADER_LEN>().ok_or_else(none)?;
    if head[..8] != MAGIC || u32_at(head, 52) != Some(crc32fast::hash(&head[..52])) {
        return Err(none());
    }
    let version = u32_at(head, 8).ok_or_else(none)?;
    if version == 0 || version > VERSION {
        return Err(JournalError::Version { path: path.to_owned(), found: version, known: VERSION });
    }
    let mark = |from: usize| head.get(from..from + 16).and_then(|bytes| Mark::try_from(bytes).ok()).ok_or_else(none);
    let header = Header { boot: mark(12)?, journal: mark(28)? };
    if header.boot != *boot {
        return Err(JournalError::Foreign { path: path.to_owned() });
    }
    let first = u64_at(head, 44).filter(|first| *first >= FIRST).ok_or_else(none)?;
    let (mut book, mut read, mut rest) = (Book::default(), 0, frames);
    let ended = loop {
        let at = (bytes.len() - rest.len()) as u64;
        if rest.is_empty() {
            break Ended::Whole;
        }
        match next(&header, first.wrapping_add(read), rest) {
            Next::Torn => break Ended::Torn { at },
            Next::Damaged(why) => break Ended::Damaged { at, why },
            Next::Step(step, behind) => match record::read(step).and_then(|step| book.apply_all(&step)) {
                Ok(()) => (read, rest) = (read + 1, behind),
                Err(why) => break Ended::Damaged { at, why: why.to_string() },
            },
        }
    };
    Ok(Recovered { header, book, frames: read, last: first.wrapping_add(read).wrapping_sub(1), ended })
}

enum Next<'a> {
    /// A step, and what is behind it.
    Step(&'a [u8], &'a [u8]),
    Torn,
    Damaged(String),
}

fn next<'a>(header: &Header, expected: u64, bytes: &'a [u8]) -> Next<'a> {
    let Some((head, behind)) = bytes.split_first_chunk::<FRAME_HEADER_LEN>() else { return Next::Torn };
    let [Some(len), Some(checksum)] = [0, 4].map(|at| u32_at(head, at)) else { return Next::Torn };
    let number = u64_at(head, 8).unwrap_or(0);
    // Before its length is believed: one that is damaged there would look torn.
    if number != expected {
        return Next::Damaged(format!("the step with the number {number} is where {expected} should be"));
    }
    if len > limits::JOURNAL_FRAME_LEN_MAX {
        return Next::Damaged(format!(
            "a step of {len} bytes, and none has more than {}",
            limits::JOURNAL_FRAME_LEN_MAX
        ));
    }
    let Some((step, behind)) = behind.split_at_checked(len as usize) else { return Next::Torn };
    let found = checksum_of(header, number, step);
    if found != checksum {
        return Next::Damaged(format!("step {number} has the checksum {found:08x} and should have {checksum:08x}"));
    }
    Next::Step(step, behind)
}
