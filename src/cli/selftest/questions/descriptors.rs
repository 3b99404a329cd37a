//! Open files of the process, and what can be passed on.

use serde_json::json;

use super::{Answer, Found, Subject, figures, memory};
use crate::cli::selftest::helper::Helper;
use crate::cli::selftest::probe::{self, Role, memory_in_words};
use crate::error::chain;

/// Chunks of each kind: a descriptor that the driver opens once for all shows as an eighth.
const CHUNKS: usize = 8;

/// Descriptors that this process has open; the one that looks is among them each time.
fn open_files() -> Result<usize, String> {
    Ok(std::fs::read_dir("/proc/self/fd").map_err(|error| error.to_string())?.count())
}

pub(super) fn count(subject: &Subject) -> Found {
    let len = subject.granularity();
    // What is opened once, with the first of each, is not a chunk's.
    let first = subject.chunk(len)?;
    let export = first.export().map_err(memory_in_words)?;
    drop(memory::import(subject, export, len)?);
    let none = open_files()?;
    let chunks = (0..CHUNKS).map(|_| subject.chunk(len)).collect::<Result<Vec<_>, _>>()?;
    let with_chunks = open_files()?;
    let exports = chunks.iter().map(|chunk| chunk.export().map_err(memory_in_words)).collect::<Result<Vec<_>, _>>()?;
    let with_exports = open_files()?;
    // Each import takes the place of a descriptor, which is closed with it.
    let imports = exports.into_iter().map(|fd| memory::import(subject, fd, len)).collect::<Result<Vec<_>, _>>()?;
    let with_imports = open_files()?;
    drop(imports);
    let each = |many: usize, few: usize| (many as f64 - few as f64) / CHUNKS as f64;
    Ok((
        Answer::Figures,
        figures([
            ("per_handle", json!(each(with_chunks, none))),
            ("per_export", json!(each(with_exports, with_chunks))),
            ("per_import", json!(each(with_imports, with_chunks))),
        ]),
    ))
}

pub(super) fn reexport(subject: &Subject) -> Found {
    subject.needs_contents()?;
    let len = subject.granularity();
    let made = subject.chunk(len)?;
    let imported = memory::import(subject, made.export().map_err(memory_in_words)?, len)?;
    probe::mark(&subject.device, subject.stitch(&[made])?.span())?;
    let again = match imported.export() {
        Ok(fd) => memory::import(subject, fd, len)?,
        Err(error) => return Ok((Answer::No, figures([("export", json!(chain(&error)))]))),
    };
    let mapping = subject.stitch(&[again])?;
    let seen = probe::look(&subject.device, mapping.span())?;
    Ok((Answer::of(seen.whole == seen.places), figures([("is_the_same_memory", json!(seen.whole == seen.places))])))
}

/// By a process of its own, whose end gives all of them back. Whoever else exports on the machine meanwhile is refused.
pub(super) fn full_table(subject: &Subject) -> Found {
    let helper = Helper::start(subject.name, subject.device.id(), Role::Exports, subject.granularity())?;
    let (said, _) = helper.hear()?;
    let exports = &said["exports"];
    match (said["is_full"] == true, said["refused"].as_str()) {
        (true, Some(refused)) => {
            Ok((Answer::Figures, figures([("exports", exports.clone()), ("then", json!(refused))])))
        }
        (_, Some(refused)) => Err(format!("{exports} exports, and then: {refused}")),
        (_, None) => Err(format!("{exports} exports, and no end")),
    }
}
