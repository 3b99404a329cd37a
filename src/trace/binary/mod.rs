//! The project's own binary trace (`.stitchtrace`): a tenth of the CSV and less, written and read event by event, and the same trace whichever way it went.
//!
//! ```text
//!   "STTRAC"  2 bytes version  blocks
//!   block: 1 byte kind  4 bytes length  that many bytes  4 bytes CRC-32 of the block's number (8 bytes), kind, length and bytes
//! ```
//!
//! Fixed numbers are little-endian, all others unsigned LEB128 in their shortest form. A block of kind 1 holds whole codes; the last block, of kind 2,
//! holds the numbers of events and of modules (without the empty name, which is always there and first), and nothing comes after it.
//!
//! # Recordings
//!
//! A recording of a running job is a trace of version 2. It may have blocks of kind 3 anywhere before the last ([`Remarks`]: pairs of a code and a number, what the recording says of itself, counted from
//! its beginning), and it may end behind any block: a job that is killed leaves what it wrote. What is left of a block that is not whole is passed by, and the reader says that the trace was cut. What
//! is written of a trace that is all there is of version 1.
//!
//! # Codes
//!
//! An event is first made relative to the one before it ([`book::Line`]): ticks and iterations by their difference, an allocation's id by its distance from
//! the id that follows the last allocation's, another's by how far back from the last allocation's it lies. So the events of one iteration look like those of
//! the iteration before. Both sides keep the same [`book::Book`] of all different lines, in the order of their coming, and of which line came last after the
//! same three lines. A code is
//!
//! | code | means |
//! |---|---|
//! | 0 | the event that the book foretells |
//! | 1 | an event whose line is new; the line follows |
//! | 2 | no event: the name of the next module follows, length and UTF-8 |
//! | 3 and more | the line that is this code less 3 from the newest in the book |
//!
//! A new line begins with a byte: kind (3 bits, in the order of [`super::EventKind::ALL`]), tick difference (2 bits; 3: it follows), same context as the event before,
//! id distance 0, something rare. Rare things have a byte of flags: iteration difference, bytes of an event that is no allocation, device, thread. The context has a byte: phase (3
//! bits, in the order of [`super::Phase::ALL`]), dynamic, and whether stream, module, micro-batch and model chunk differ from the event before. Then come the numbers, in this order: tick difference, id
//! distance, bytes (of an allocation always), stream, module, micro-batch and model chunk (0 for none, else one more), iteration difference, device, thread. Signed distances are zigzag.
//!
//! A book that is full is begun anew. An event costs one byte at least, so that a reader's memory is in proportion to its file.
//!
//! Not for: compression of the bytes. zstd around it is read as well, and pays: iterations that repeat are rows of zeros here.

mod book;
mod read;
mod remarks;
mod write;

pub use read::{Recorded, read, read_recorded};
pub use remarks::{Remarks, Stopped};
pub use write::{Writer, write};

/// How every binary trace begins.
pub const MAGIC: &[u8; 6] = b"STTRAC";
/// The version of a trace that is all there.
pub const VERSION: u16 = 1;
/// The version of a recording. This build reads both, and no other.
pub const RECORDING: u16 = 2;

/// Kinds of blocks.
const EVENTS: u8 = 1;
const END: u8 = 2;
const REMARKS: u8 = 3;

/// Codes.
const FORETOLD: u64 = 0;
const NEW: u64 = 1;
const NAME: u64 = 2;
const KNOWN: u64 = 3;

/// Bits of a new line's first byte, above the kind.
const TICK_SHIFT: u32 = 3;
const TICK_FOLLOWS: u8 = 3;
const SAME_CONTEXT: u8 = 1 << 5;
const SAME_ID: u8 = 1 << 6;
const RARE: u8 = 1 << 7;
/// Bits of the rare things.
const RARE_ITERATION: u8 = 1;
const RARE_BYTES: u8 = 1 << 1;
const RARE_DEVICE: u8 = 1 << 2;
const RARE_THREAD: u8 = 1 << 3;
/// Bits of the context, above the phase.
const DYNAMIC: u8 = 1 << 3;
const STREAM: u8 = 1 << 4;
const MODULE: u8 = 1 << 5;
const MICROBATCH: u8 = 1 << 6;
const CHUNK: u8 = 1 << 7;

/// The checksum of a block.
fn checksum(block: u64, kind: u8, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&block.to_le_bytes());
    hasher.update(&[kind]);
    hasher.update(&(bytes.len() as u32).to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

fn zigzag(n: u64) -> u64 {
    (n << 1) ^ (((n as i64) >> 63) as u64)
}

fn unzigzag(n: u64) -> u64 {
    (n >> 1) ^ (n & 1).wrapping_neg()
}

#[cfg(test)]
mod tests;
