//! What an import says about itself: what the file lacks, and what was made up for it, a sentence each.

use super::fields::{Action, Fields};
use super::history::Findings;
use crate::units::{Bytes, counted};

/// All there is to say; nothing for a record that begins with the job and lacks nothing.
pub(super) fn all(fields: &Fields, findings: &Findings, without_curve: &[u32]) -> Vec<String> {
    let mut notes = Vec::new();
    record(&mut notes, fields, findings);
    gaps(&mut notes, findings);
    left_out(&mut notes, fields, findings);
    for device in without_curve {
        notes.push(format!(
            "The record of device {device} does not have all of its segments: what was reserved cannot be told."
        ));
    }
    for (device, in_trace, in_file) in &findings.differing {
        notes.push(format!(
            "On device {device} {in_trace} are live at the end of the trace, and {in_file} in the file."
        ));
    }
    notes
}

/// How much of the job the record covers.
fn record(notes: &mut Vec<String>, fields: &Fields, findings: &Findings) {
    let is_block = |action| matches!(action, Action::Alloc | Action::FreeRequested | Action::FreeCompleted);
    let has_history = fields.records.iter().flatten().any(|entry| is_block(entry.action));
    let (older, bytes) = findings.older;
    if !has_history {
        let blocks = counted(older, "block");
        notes.push(format!(
            "There is no history, only what is live at the end: {blocks} ({bytes}), in order of address."
        ));
    } else if older > 0 {
        let (blocks, freed) = (counted(older, "block"), findings.older_freed);
        notes.push(format!("The record does not begin with the job: {blocks} ({bytes}) came before it, {freed} of them freed in it; they stand first, in order of address."));
    }
    for (device, record) in fields.records.iter().enumerate() {
        if record.len() >= ROUND && record.len().is_multiple_of(ROUND) {
            let len = record.len();
            notes.push(format!("The record of device {device} has exactly {len} entries, which looks like its limit: what came before may be lost."));
        }
    }
    let recorded = fields.records.iter().filter(|record| !record.is_empty()).count();
    if recorded > 1 && fields.records.iter().flatten().any(|entry| entry.time.is_none()) {
        notes.push(format!("Entries of {recorded} devices have no times: how they lie between each other is made up."));
    }
}

/// People set limits to multiples of this.
const ROUND: usize = 1000;

/// Entries that must have been there.
fn gaps(notes: &mut Vec<String>, findings: &Findings) {
    if findings.reused > 0 {
        let blocks = counted(findings.reused, "block");
        notes.push(format!("{blocks} without an entry for the end: it is where the address is allocated again."));
    }
    if findings.unseen > 0 {
        let blocks = counted(findings.unseen, "block");
        notes.push(format!("{blocks} without an entry for the allocation: it is where the address is next seen."));
    }
    if findings.strays > 0 {
        let entries = counted(findings.strays, "entry");
        notes.push(format!("{entries} left out that would free what is free already."));
    }
}

/// What is in the file and not in the trace.
fn left_out(notes: &mut Vec<String>, fields: &Fields, findings: &Findings) {
    if findings.private_entries + findings.private_blocks > 0 {
        let entries = counted(findings.private_entries, "entry");
        let blocks = counted(findings.private_blocks, "block");
        let segments = fields.segments.iter().filter(|segment| segment.is_private).map(|segment| segment.bytes);
        let reserved = segments.fold(Bytes::ZERO, |sum, bytes| sum.checked_add(bytes).unwrap_or(Bytes::MAX));
        notes.push(format!("Private pools of graphs or of the job are left out: {entries}, {blocks} live at the end, {reserved} reserved."));
    }
    if !findings.refused.is_empty() {
        const SHOWN: usize = 4;
        let shown = |(bytes, free): &(Bytes, Option<Bytes>)| match free {
            Some(free) => format!("{bytes} with {free} of the device free"),
            None => bytes.to_string(),
        };
        let sizes: Vec<String> = findings.refused.iter().take(SHOWN).map(shown).collect();
        let more = if findings.refused.len() > SHOWN { " and more" } else { "" };
        let requests = counted(findings.refused.len() as u64, "request");
        notes.push(format!(
            "Memory ran out: {requests} refused, of {}{more}; in the trace as if served, and given back at once.",
            sizes.join(", ")
        ));
    }
    if findings.padding > 0 {
        let entries = counted(findings.padding, "entry");
        notes.push(format!("{entries} left out that PyTorch makes for itself around allocations at wished addresses."));
    }
    if let Some((name, count)) = &fields.labels {
        let annotations = counted(*count, "annotation");
        notes.push(format!("{annotations} left out that no step of a profiler begins with, such as {name}."));
    }
    if let Some((name, count)) = &fields.unknown {
        let entries = counted(*count, "entry");
        notes.push(format!("{entries} left out of kinds that are not known, such as {name}."));
    }
}
