//! Traces from memory snapshots of PyTorch: what `_dump_snapshot` writes, and the list of segments that `memory_snapshot` gives.
//!
//! Not for: what the allocator made of it. Sizes are those that were asked for; addresses tell blocks apart and are dropped. Call stacks are not read.
//!
//! ```text
//!  bytes ── pickle ──► values ── fields ──► segments, blocks, entries ── history ──► events
//!                                                                   └── reserved ──► the real curve
//! ```
//!
//! Invariant: the trace keeps to the file's own totals, or a note says that it does not. Memory stays below 64 bytes for each byte of a file, whatever is
//! in it: `tests/fuzz` tries the worst that anybody thought of.

mod error;
mod fields;
mod history;
mod notes;
mod reserved;
#[cfg(test)]
mod tests;

pub use error::{Place, SnapshotError, SnapshotFault};

use super::Imported;
use super::pickle::Pickle;
use crate::trace::{Event, EventKind, TraceError};
use crate::units::Bytes;

/// What a snapshot says about the settings of the allocator that was recorded: those that a model of it needs.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct AllocatorSettings {
    /// What the environment said, as it was written.
    pub text: String,
    /// Segments grow by mapping more pages behind them.
    pub expandable_segments: bool,
    /// Blocks of this size and more are not split; `None` for no limit.
    pub max_split_len: Option<Bytes>,
    /// Fraction of its limit above which the allocator gives idle segments back; `None` for never.
    pub garbage_collection_threshold: Option<f64>,
    /// Sizes from so many MiB on are rounded up to this part of a power of two, in order; 0 for no such rounding.
    pub roundup_divisions: Vec<(u64, u64)>,
}

impl AllocatorSettings {
    /// The same as PyTorch's options, such as `max_split_size_mb:128`; nothing where all is as without any. Whether segments are expandable is left out: who models both
    /// kinds asks for neither.
    pub fn options(&self) -> String {
        let mut options = Vec::new();
        if let Some(max) = self.max_split_len {
            options.push(format!("max_split_size_mb:{}", max.get() >> 20));
        }
        if let Some(threshold) = self.garbage_collection_threshold {
            options.push(format!("garbage_collection_threshold:{threshold}"));
        }
        if self.roundup_divisions.iter().any(|(_, parts)| *parts > 0) {
            let parts = self.roundup_divisions.iter().map(|(size, parts)| format!("{size}:{parts}"));
            options.push(format!("roundup_power2_divisions:[{}]", parts.collect::<Vec<_>>().join(",")));
        }
        options.join(",")
    }
}

/// Reads the snapshot in `bytes`.
pub fn read(bytes: &[u8]) -> Result<Imported, TraceError> {
    let fields = {
        let pickle = Pickle::read(bytes, &fields::PASSED_OVER)?;
        fields::read(&pickle)?
    };
    let mut imported = history::import(fields)?;
    if imported.trace.events.is_empty() {
        return Err(match &imported.notes[..] {
            [] => TraceError::Empty,
            notes => TraceError::NoneLeft { why: notes.join(" ") },
        });
    }
    // Blocks in the order of their addresses, without a record of how they came to be.
    let is_record = |event: &Event| matches!(event.kind, EventKind::Free | EventKind::Mark);
    imported.is_one_iteration = imported.trace.iterations() <= 1 && !imported.trace.events.iter().any(is_record);
    Ok(imported)
}
