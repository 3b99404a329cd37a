//! Why a file is not the trace that it should be: the one error of all readers, each variant with the place.

use super::builder::RuleError;
#[cfg(feature = "daemon")]
use super::import::pickle::PickleError;
#[cfg(feature = "daemon")]
use super::import::snapshot::SnapshotError;
use crate::error::ErrorKind;
use crate::limits;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("cannot open it")]
    Open(#[source] std::io::Error),
    /// The file ends early or its compression is broken.
    #[error("cannot read line {line}")]
    Read {
        /// Where.
        line: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The bytes are nothing that is read as a trace.
    #[error(
        "{found}; what can be read: a trace (CSV that begins with tick,event,id,bytes), a PyTorch memory snapshot, a log of RMM, a problem (CSV with id,lower,upper,size), \
             and what `stitchd trace convert` writes, each also compressed with zstd or gzip"
    )]
    Unknown {
        /// What they are, as far as that can be told.
        found: &'static str,
    },
    /// A pickle cannot be read to its end, or has none.
    #[error("cannot read the pickle")]
    Cut(#[source] std::io::Error),
    /// The header lacks a column.
    #[error("line 1: there is no column '{column}'; {needs}")]
    NoColumn {
        /// Which.
        column: &'static str,
        /// How such a file begins.
        needs: &'static str,
    },
    /// The header names a column twice.
    #[error("line 1: column '{column}' is there twice")]
    TwiceColumn {
        /// Which.
        column: &'static str,
    },
    /// A field is not what its column needs.
    #[error("line {line}, column '{column}': {found:?} is not {expected}")]
    Field {
        /// Where.
        line: u64,
        /// In which column.
        column: &'static str,
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// The events do not fit together.
    #[error("line {line}, column '{column}': {what}")]
    Order {
        /// Where.
        line: u64,
        /// In which column.
        column: &'static str,
        /// What is wrong.
        what: String,
    },
    /// A row has another number of fields than the header.
    #[error("line {line}: {found} fields, and the header has {expected}")]
    Fields {
        /// Where.
        line: u64,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// A binary trace is wrong.
    #[error("block {block}, byte {at} of the trace")]
    Block {
        /// In which block, counted from 0.
        block: u64,
        /// At which byte of the unpacked file.
        at: u64,
        /// What is wrong there.
        #[source]
        flaw: Flaw,
    },
    /// The events of an imported file make no trace.
    #[error("event {event} of what was made of it: {rule}")]
    Made {
        /// Which, counted from 0.
        event: usize,
        /// Why not.
        rule: RuleError,
    },
    /// There is no event.
    #[error("there is no event in it")]
    Empty,
    /// There were some, and none is left; says why.
    #[error("there is no event in it that a trace can have: {why}")]
    NoneLeft {
        /// What became of them.
        why: String,
    },
    /// More than a trace can have.
    #[error("it has more than {} events", limits::TRACE_EVENTS_MAX)]
    TooLong,
    /// The bytes are no pickle that is read; says at which byte.
    #[cfg(feature = "daemon")]
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// The pickle is no snapshot, or not a sound one; says where in it.
    #[cfg(feature = "daemon")]
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
}

/// What is wrong at a place of a binary trace.
#[derive(Debug, thiserror::Error)]
pub enum Flaw {
    /// The bytes before have an end, or their compression is broken.
    #[error("cannot read on")]
    Read(#[source] std::io::Error),
    /// It does not begin as a binary trace does.
    #[error("this is not a binary trace, as `stitchd trace convert` writes them")]
    NotATrace,
    /// Another version wrote it.
    #[error(
        "the trace is of version {found}, and this build reads versions {} and {}",
        super::binary::VERSION,
        super::binary::RECORDING
    )]
    Version {
        /// Its version.
        found: u16,
    },
    /// The file ends inside it.
    #[error("the file ends here, before the trace does")]
    Cut,
    /// Something comes after the end.
    #[error("the trace ends here, and the file goes on")]
    Trailing,
    /// The block has a kind that there is not.
    #[error("there is no block of kind {found}")]
    Kind {
        /// Its kind.
        found: u8,
    },
    /// The block is longer than any.
    #[error("a block of {found} bytes, and none has more than {}", limits::TRACE_BLOCK_LEN_MAX)]
    Length {
        /// Its length.
        found: u32,
    },
    /// Its contents were changed.
    #[error("its checksum is {found:08x} and should be {expected:08x}: the file is damaged")]
    Checksum {
        /// As computed from the contents.
        expected: u32,
        /// As written.
        found: u32,
    },
    /// A number or a text is impossible where it stands.
    #[error("{what}")]
    Value {
        /// What is wrong with it.
        what: &'static str,
    },
    /// The end counts other things than there are.
    #[error("the trace has {found} {what}, and its end counts {expected}")]
    Count {
        /// Of what.
        what: &'static str,
        /// How many the end names.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// The event cannot come next.
    #[error("{0}")]
    Rule(RuleError),
}

impl TraceError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            TraceError::Open(_) => ErrorKind::NotFound,
            _ => ErrorKind::Invalid,
        }
    }
}
