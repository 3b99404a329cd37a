//! Why a pickle is no snapshot, and where in it.
//!
//! Not for: bytes that are no pickle, which `pickle` refuses.

use std::fmt;

use crate::trace::builder::RuleError;

/// A snapshot that a file cannot hold, and where in it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{place}: {fault}")]
pub struct SnapshotError {
    /// Where.
    pub place: Place,
    /// What is wrong there.
    pub fault: SnapshotFault,
}

/// What is wrong at some place of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SnapshotFault {
    /// Every version has this key.
    #[error("'{0}' is missing")]
    Missing(&'static str),
    /// A key has a value of the wrong kind.
    #[error("'{key}' is {found}, not {expected}")]
    Field {
        /// Which.
        key: &'static str,
        /// What it is.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
    /// Something is there instead of a list or dictionary.
    #[error("{found} stands here, not {expected}")]
    Kind {
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// PyTorch writes every list, entry and block for itself.
    #[error("the same object as at an earlier place")]
    Again,
    /// A number of bytes, or a sum of them.
    #[error("no machine could have this many bytes")]
    Bytes,
    /// No trace can have such an event here.
    #[error(transparent)]
    Rule(#[from] RuleError),
}

/// A place in a snapshot; shown as Python would write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// All of it.
    Whole,
    /// What stands under a key of it.
    Under(&'static str),
    /// A segment.
    Segment(usize),
    /// A block of a segment.
    Block(usize, usize),
    /// The record of a device.
    Device(usize),
    /// An entry of it.
    Entry(usize, usize),
    /// An annotation.
    Annotation(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Whole => f.write_str("the snapshot"),
            Place::Under(key) => f.write_str(key),
            Place::Segment(segment) => write!(f, "segments[{segment}]"),
            Place::Block(segment, block) => write!(f, "segments[{segment}].blocks[{block}]"),
            Place::Device(device) => write!(f, "device_traces[{device}]"),
            Place::Entry(device, entry) => write!(f, "device_traces[{device}][{entry}]"),
            Place::Annotation(annotation) => write!(f, "external_annotations[{annotation}]"),
        }
    }
}

impl Place {
    pub(super) fn fault(self, fault: impl Into<SnapshotFault>) -> SnapshotError {
        SnapshotError { place: self, fault: fault.into() }
    }
}
