//! The journal: what a daemon that follows one that was killed has to know, in a file that is only appended to.
//!
//! It says which sessions there are and what proves them, which chunks exist and who has them, and which ranges are shared. It is no log of what happened: each record is a fact that holds from then on ([`Record`]), and a
//! [`Book`] is all that hold. What waits, what was asked for and how much lies idle is not in it: clients ask again.
//!
//! A step of the daemon is one frame ([`mod@file`]), written with one call before anybody hears of the step. What the kernel has taken is there after the daemon was killed; nothing is synchronised with a disk, as chunks do not
//! outlive the machine either. A journal of an earlier boot is a foreign one.
//!
//! Not for: descriptors (the keeper has them), or what to do about a record (the daemon).
//!
//! Invariant: the file says what the writer's own book says. Where it cannot be written to any more the writer says so with every step, until it could be written anew.

mod book;
mod file;
mod record;

pub use book::{Book, KnownChunk, KnownRange, KnownSession, Nonsense};
pub use file::{Ended, HEADER_LEN, Header, Recovered, read, read_bytes};
pub use record::{Process, PublishedRange, Record, SessionRecord, Whose};

use std::fs::File;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::error::ErrorKind;
use crate::limits;
use crate::mortal::moment;

/// Sixteen bytes that tell one thing from all others of its kind.
pub type Mark = [u8; 16];

/// Which start of the machine this is, by the kernel's word: nothing where it says none, and then one start cannot be told from another.
///
/// # Errors
///
/// The kernel's word cannot be heard just now.
pub fn boot_mark() -> std::io::Result<Mark> {
    let text = match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text?,
    };
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    Ok(u128::from_str_radix(&digits, 16).map_or([0; 16], u128::to_be_bytes))
}

/// What is wrong with a journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The system refuses.
    #[error("cannot {action} the journal {path}")]
    System {
        /// What.
        action: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is something else, or its beginning is damaged.
    #[error("{path} is no journal of stitchd, or its first {HEADER_LEN} bytes are damaged")]
    NotAJournal {
        /// Which.
        path: PathBuf,
    },
    /// A newer daemon has written it.
    #[error(
        "the journal {path} is of version {found}, and this daemon knows {known} and older: start the daemon that wrote it, or a newer one"
    )]
    Version {
        /// Which.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// The machine was started since: what it tells of is gone.
    #[error("the journal {path} was written before the machine was started: what it tells of is gone")]
    Foreign {
        /// Which.
        path: PathBuf,
    },
    /// A step does not fit what is known.
    #[error("a step that cannot be is not written to the journal")]
    Nonsense(#[from] Nonsense),
}

impl JournalError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            JournalError::System { .. } => ErrorKind::Unavailable,
            JournalError::NotAJournal { .. } => ErrorKind::Invalid,
            JournalError::Version { .. } => ErrorKind::Unsupported,
            JournalError::Foreign { .. } => ErrorKind::NotFound,
            JournalError::Nonsense(_) => ErrorKind::Broken,
        }
    }
}

/// A journal that is written to.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    header: Header,
    file: File,
    /// What it says.
    book: Book,
    /// The number of the next frame.
    next: u64,
    len: u64,
    /// How long it was when it held nothing but what there was.
    written_anew_len: u64,
    /// Its last frame may be a part of one: nothing more is appended before it was written anew.
    is_torn: bool,
    /// Where the number of the last frame stands.
    witness: Option<OwnedFd>,
}

/// Makes a place for the number of a journal's last frame and for the journal's mark, which somebody else keeps: without a name in any file system.
///
/// # Errors
///
/// The system's.
pub fn new_witness() -> Result<OwnedFd, rustix::io::Errno> {
    rustix::fs::memfd_create("stitchd-witness", rustix::fs::MemfdFlags::CLOEXEC)
}

/// What a witness says while the file lacks a step that somebody may have heard of: no journal has so many.
pub const DOUBT: u64 = u64::MAX;

const WITNESS_LEN: usize = 24;

/// What a witness says.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Witnessed {
    /// The number of the last frame: a journal that ends before it is not whole, and none is where this is [`DOUBT`]. 0 where nothing was written yet.
    pub last: u64,
    /// Of which journal: another's numbers mean nothing here.
    pub journal: Option<Mark>,
}

/// Looks at a witness: the number, eight bytes, and the mark of the journal.
///
/// # Errors
///
/// The system's.
pub fn witnessed(witness: &OwnedFd) -> Result<Witnessed, rustix::io::Errno> {
    let mut bytes = [0; WITNESS_LEN];
    let read = rustix::io::pread(witness, &mut bytes, 0)?;
    let [number, mark] = [bytes.get(..8), bytes.get(8..).filter(|_| read == WITNESS_LEN)];
    let last = number.filter(|_| read >= 8).and_then(|number| number.try_into().ok()).map_or(0, u64::from_le_bytes);
    Ok(Witnessed { last, journal: mark.and_then(|mark| mark.try_into().ok()) })
}

impl Journal {
    /// Begins one that says what `book` says, in place of any that is there.
    ///
    /// # Errors
    ///
    /// The system's; a journal that was there before is there still.
    pub fn begin(path: &Path, header: Header, book: Book) -> Result<Journal, JournalError> {
        Journal::begin_at(path, header, book, 0)
    }

    /// The same behind one whose last frame has the number `last`.
    ///
    /// # Errors
    ///
    /// As of [`Journal::begin`].
    pub fn begin_at(path: &Path, header: Header, book: Book, last: u64) -> Result<Journal, JournalError> {
        let (file, next, len) = write_anew(path, &header, &book, last.saturating_add(1))?;
        let path = path.to_owned();
        Ok(Journal { path, header, file, book, next, len, written_anew_len: len, is_torn: false, witness: None })
    }

    /// The same, which has the number of its last frame, and its own mark, written to `witness` before anybody hears of the step. A journal that ends before that is known not to be whole.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn with_witness(mut self, witness: OwnedFd) -> Result<Journal, JournalError> {
        self.witness = Some(witness);
        self.witness()?;
        Ok(self)
    }

    fn witness(&self) -> Result<(), JournalError> {
        let Some(witness) = &self.witness else { return Ok(()) };
        let mut bytes = [0; WITNESS_LEN];
        bytes[..8].copy_from_slice(&(self.next - 1).to_le_bytes());
        bytes[8..].copy_from_slice(&self.header.journal);
        let written = rustix::io::pwrite(witness, &bytes, 0);
        let system = |errno: rustix::io::Errno| JournalError::System {
            action: "have a witness of",
            path: self.path.clone(),
            source: errno.into(),
        };
        written.map(drop).map_err(system)
    }

    /// What it says.
    pub fn book(&self) -> &Book {
        &self.book
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// It says nothing.
    pub fn is_empty(&self) -> bool {
        self.book.is_empty()
    }

    /// One step: all of these records or, on error, none. Written when this comes back.
    ///
    /// # Errors
    ///
    /// A step that does not fit what is known; then the file is as before. Or the system's: then the book knows of the step and the file may not, and the next step writes all of it anew.
    pub fn append(&mut self, step: &[Record]) -> Result<(), JournalError> {
        self.book.apply_all(step)?;
        let written = if self.is_torn || self.is_long() { self.write_anew() } else { self.append_frame(step) };
        if written.is_err() {
            self.is_torn = true;
            self.doubt();
        }
        written
    }

    /// The file lacks a step that somebody may hear of: until it was written anew it is known not to be whole.
    fn doubt(&self) {
        if let Some(witness) = &self.witness {
            // Where not even that can be written it is as if there were none.
            let _ = rustix::io::pwrite(witness, &DOUBT.to_le_bytes(), 0);
        }
    }

    fn append_frame(&mut self, step: &[Record]) -> Result<(), JournalError> {
        let frame = file::frame(&self.header, self.next, step);
        moment();
        let system = |source| JournalError::System { action: "write to", path: self.path.clone(), source };
        write_frame(&mut self.file, &frame).map_err(system)?;
        self.next += 1;
        self.len += frame.len() as u64;
        moment();
        self.witness()?;
        moment();
        Ok(())
    }

    /// Takes the file away: nobody is to follow.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn remove(self) -> Result<(), JournalError> {
        let system = |source| JournalError::System { action: "remove", path: self.path.clone(), source };
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(system(error)),
            _ => Ok(()),
        }
    }

    /// A step could not be written: tries again, with all that there is.
    ///
    /// # Errors
    ///
    /// As of [`Journal::write_anew`].
    pub fn mend(&mut self) -> Result<(), JournalError> {
        if self.is_torn { self.write_anew() } else { Ok(()) }
    }

    /// The file that the next daemon would find is another, or none: somebody has removed it.
    pub fn is_displaced(&self) -> bool {
        let ino = |metadata: std::io::Result<std::fs::Metadata>| metadata.map(|metadata| metadata.ino()).ok();
        ino(std::fs::symlink_metadata(&self.path)) != ino(self.file.metadata())
    }

    /// Most of it tells of what is no more.
    fn is_long(&self) -> bool {
        self.len > limits::JOURNAL_SLACK_LEN && self.len / 4 > self.written_anew_len
    }

    /// Writes a file that says what the book says, and nothing of how that came, in place of the one that is there.
    ///
    /// # Errors
    ///
    /// The system's; the file is as before.
    pub fn write_anew(&mut self) -> Result<(), JournalError> {
        let (file, next, len) = write_anew(&self.path, &self.header, &self.book, self.next)?;
        (self.file, self.next, self.len, self.written_anew_len, self.is_torn) = (file, next, len, len, false);
        self.witness()
    }
}

fn write_frame(file: &mut File, frame: &[u8]) -> std::io::Result<()> {
    // A system may write a part of it only; in tests it does.
    #[cfg(feature = "testing")]
    if crate::mortal::is_mortal() {
        let (begin, end) = frame.split_at(frame.len() / 2);
        file.write_all(begin)?;
        moment();
        return file.write_all(end);
    }
    file.write_all(frame)
}

/// Writes a whole journal beside the one that is there, and puts it in its place. The number of its next frame, and its bytes.
fn write_anew(path: &Path, header: &Header, book: &Book, first: u64) -> Result<(File, u64, u64), JournalError> {
    let error = |action| move |source| JournalError::System { action, path: path.to_owned(), source };
    let beside = path.with_extension("new");
    let mut bytes = header.bytes(first).to_vec();
    let mut next = first;
    // In frames of some thousand records, so that none is long.
    for some in book.records().chunks(limits::JOURNAL_FRAME_RECORDS_MAX) {
        bytes.extend(file::frame(header, next, some));
        next += 1;
    }
    // It says what proves sessions to be whose they are.
    let mut options = File::options();
    // Nor is what somebody else has put there written to.
    match std::fs::remove_file(&beside) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => return Err(error("make")(source)),
        _ => {}
    }
    let mut file = options.write(true).create_new(true).mode(0o600).open(&beside).map_err(error("make"))?;
    file.write_all(&bytes).map_err(error("write"))?;
    moment();
    std::fs::rename(&beside, path).map_err(error("replace"))?;
    moment();
    Ok((file, next, bytes.len() as u64))
}

#[cfg(test)]
mod tests;
