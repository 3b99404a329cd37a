//! Traces from whatever people have: told by its first bytes, never by its name.

mod answer;
mod device;
pub mod pickle;
mod problem;
mod rmm;
pub mod snapshot;
#[cfg(test)]
mod written;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::builder::{Builder, RuleError};
use super::period::{self, Numbering};
use super::unpack::{Growth, Unpacked};
use super::{Cut, Ending, Event, Trace, TraceError, binary, csv};
use crate::units::Bytes;
pub use answer::{Placed, read_answer};
pub use problem::{Row, Rows};

/// What came out of a file.
#[derive(Clone, Debug, Default)]
pub struct Imported {
    /// The events.
    pub trace: Trace,
    /// What is missing from the file or was made up to fill it, a sentence each.
    pub notes: Vec<String>,
    /// What the allocator that was recorded reserved, where the file says so: after the event at `index`, this many bytes of `device`.
    pub reserved: Vec<Reserved>,
    /// How that allocator was set, where the file says so.
    pub settings: Option<snapshot::AllocatorSettings>,
    /// The file is one iteration by what it is, and whatever repeats in it is a part of that: nobody should number it.
    pub is_one_iteration: bool,
    /// The file is a problem of placement: its sizes are what they are, and nothing of it repeats.
    pub is_problem: bool,
    /// What the file says of its end.
    pub ending: Ending,
}

impl Imported {
    /// Numbers the iterations of the trace, if the file does not and has any.
    pub fn number(&mut self) -> Numbering {
        if self.is_one_iteration { Numbering::None } else { period::number(&mut self.trace) }
    }

    /// Where the last iteration is cut, once iterations are numbered.
    pub fn cut(&self) -> Option<Cut> {
        self.trace.cut(self.ending)
    }
}

/// A point of a real reserved curve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reserved {
    /// How many events of the trace came before.
    pub events: usize,
    /// On which device of the job.
    pub device: u32,
    /// Bytes reserved from then on.
    pub bytes: Bytes,
}

/// Reads whatever is in a file.
pub fn read_file(path: &Path) -> Result<Imported, TraceError> {
    read(open(path)?)
}

/// Opens a file to read a trace from: any but a directory.
pub fn open(path: &Path) -> Result<File, TraceError> {
    let file = File::open(path).map_err(TraceError::Open)?;
    if file.metadata().map_err(TraceError::Open)?.is_dir() {
        return Err(TraceError::Open(std::io::ErrorKind::IsADirectory.into()));
    }
    Ok(file)
}

/// Bytes as they were before they were compressed, if they were, with zstd or gzip: whatever is in them.
///
/// # Errors
///
/// Nothing can be read.
pub fn unpacked<'a>(bytes: impl Read + 'a) -> std::io::Result<impl Read + 'a> {
    Unpacked::open(bytes)
}

/// A pickle is read whole: its values refer to each other.
const PICKLE_LEN_MAX: u64 = 4 << 30;

/// What a file has.
#[derive(Debug)]
pub enum Contents {
    /// A job, from whatever it was recorded with.
    Job(Imported),
    /// A problem of placement.
    Problem(Rows),
}

impl Contents {
    /// As a job: of a problem, one that would ask for these buffers.
    pub fn into_imported(self) -> Result<Imported, TraceError> {
        match self {
            Contents::Job(imported) => Ok(imported),
            Contents::Problem(rows) => rows.into_imported(),
        }
    }
}

/// Reads whatever these bytes are, as a job.
pub fn read(bytes: impl Read) -> Result<Imported, TraceError> {
    read_contents(bytes)?.into_imported()
}

/// Reads whatever these bytes are.
pub fn read_contents(bytes: impl Read) -> Result<Contents, TraceError> {
    let unpacked = Unpacked::open(bytes).map_err(|source| TraceError::Read { line: 1, source })?;
    let head = unpacked.head();
    if head.starts_with(binary::MAGIC) {
        unpacked.hold_to(Growth::CODES);
        let binary::Recorded { trace, remarks } = binary::read_recorded(unpacked)?;
        let (notes, ending) = (remarks.sentences(), remarks.ending());
        return Ok(Contents::Job(Imported { trace, notes, ending, ..Imported::default() }));
    }
    if pickle::Pickle::begins_with(head) {
        unpacked.hold_to(Growth::PICKLE);
        let mut whole = Vec::new();
        unpacked.take(PICKLE_LEN_MAX + 1).read_to_end(&mut whole).map_err(TraceError::Cut)?;
        if whole.len() as u64 > PICKLE_LEN_MAX {
            let text = format!("it has more than {}", Bytes::new(PICKLE_LEN_MAX));
            return Err(TraceError::Cut(std::io::Error::other(text)));
        }
        return snapshot::read(&whole).map(Contents::Job);
    }
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let columns: Vec<&[u8]> = line.split(|byte| *byte == b',').map(name).collect();
    if rmm::is_header(&columns) {
        rmm::read(unpacked).map(Contents::Job)
    } else if problem::is_header(&columns) {
        Rows::read(unpacked).map(Contents::Problem)
    } else if csv::is_header(&columns) {
        Ok(Contents::Job(Imported { trace: csv::read_plain(unpacked)?, ..Imported::default() }))
    } else {
        let found = unknown(head);
        // Compression that is broken is more than what came before it.
        Err(unpacked
            .into_failure()
            .map_or(TraceError::Unknown { found }, |source| TraceError::Read { line: 1, source }))
    }
}

/// What bytes are that are no trace.
fn unknown(head: &[u8]) -> &'static str {
    if head.trim_ascii().is_empty() {
        return "it is empty";
    }
    let known: [(&[u8], &str); 6] = [
        (b"STPLAN", "this is a plan, which `stitchd plan show` reads"),
        (b"PK\x03\x04", "this is a zip archive, as torch.save writes; a memory snapshot is what _dump_snapshot writes"),
        (b"(dp", "this is a pickle of protocol 0, and snapshots have 2 or a later one"),
        (b"(lp", "this is a pickle of protocol 0, and snapshots have 2 or a later one"),
        (
            b"{",
            "this is JSON, as graphs are, which `stitchd order` reads, and profiles, which `stitchd partition` does",
        ),
        (b"[", "this is JSON"),
    ];
    known.iter().find(|(start, _)| head.starts_with(start)).map_or("this is nothing known", |(_, what)| what)
}

/// The name of a column, whether it is quoted or not.
fn name(field: &[u8]) -> &[u8] {
    let field = field.trim_ascii();
    field.strip_prefix(b"\"").and_then(|field| field.strip_suffix(b"\"")).unwrap_or(field)
}

/// Events that were made of something as a trace.
fn build(events: impl IntoIterator<Item = Event>) -> Result<Trace, TraceError> {
    let mut builder = Builder::default();
    for (event, made) in events.into_iter().enumerate() {
        builder.push(made).map_err(|rule| match rule {
            RuleError::TooLong => TraceError::TooLong,
            rule => TraceError::Made { event, rule },
        })?;
    }
    builder.finish().ok_or(TraceError::Empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_repeats_in_a_problem_or_in_mere_blocks_is_no_iteration() {
        // As many buffers as three iterations would have, one after the other.
        let sizes: Vec<u64> = (0..90).map(|n| 512 * (1 + n % 30 * (n % 30))).collect();
        let rows: String = sizes.iter().enumerate().map(|(n, size)| format!("{n},{n},{},{size}\n", n + 1)).collect();
        let mut problem = read(format!("id,lower,upper,size\n{rows}").as_bytes()).unwrap();
        assert!(matches!(period::number(&mut problem.trace.clone()), Numbering::Period(_)));
        assert_eq!((problem.number(), problem.trace.iterations()), (Numbering::None, 1));
        let blocks: Vec<_> = sizes.iter().map(|size| (*size as i64, *size as i64, "active_allocated")).collect();
        let segment = written::segment(0, 4096, 0, 0, &blocks);
        let mut snapshot = read(&written::pickle(&written::Node::List(vec![segment]), 4)[..]).unwrap();
        assert!(snapshot.is_one_iteration && period::find(&snapshot.trace).is_some());
        assert_eq!(snapshot.number(), Numbering::None);
    }

    #[test]
    fn what_is_no_trace_is_told_what_it_is_and_what_could_be_read() {
        let cases = [
            (&b""[..], "it is empty; what can be read: a trace"),
            (b" \n\n", "it is empty"),
            (b"STPLAN\x01\0", "this is a plan, which `stitchd plan show` reads"),
            (b"PK\x03\x04archive", "this is a zip archive, as torch.save writes"),
            (b"{\"segments\": []}", "this is JSON"),
            (b"\x7fELF\x02", "this is nothing known"),
            (b"a,b,c\n1,2,3\n", "this is nothing known"),
        ];
        for (bytes, expected) in cases {
            let packed = zstd::encode_all(bytes, 3).unwrap();
            for bytes in [bytes, &packed] {
                let error = read(bytes).unwrap_err().to_string();
                assert!(error.starts_with(expected), "{error}");
                assert!(error.contains("a PyTorch memory snapshot"), "{error}");
            }
            let error = crate::error::chain(&read(&packed[..packed.len() - 1]).unwrap_err());
            assert!(error.starts_with("cannot read line 1: "), "{error}");
        }
    }

    #[test]
    fn a_pickle_that_cannot_be_unpacked_is_no_file_that_cannot_be_opened() {
        let mut pickle = b"\x80\x04".to_vec();
        pickle.resize(8 << 20, b'0');
        let packed = zstd::encode_all(&pickle[..], 3).unwrap();
        let error = crate::error::chain(&read(&packed[..]).unwrap_err());
        assert_eq!(
            error,
            "cannot read the pickle: it grows to more than 40 times its size; unpack it first if that is right"
        );
    }

    #[test]
    fn a_file_is_told_by_its_first_bytes_and_not_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let segment = written::segment(0, 4096, 0, 0, &[(512, 7, "active_allocated")]);
        let snapshot = written::pickle(&written::Node::List(vec![segment]), 4);
        let table = b"tick,event,id,bytes\n1,alloc,1,7\n".to_vec();
        for (name, bytes, notes) in [("a.csv", &snapshot, 1), ("a.pickle", &table, 0)] {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let imported = read_file(&path).unwrap();
            assert_eq!((imported.trace.events.len(), imported.notes.len()), (1, notes), "{name}");
        }
        for (bytes, expected) in
            [(&b""[..], "it is empty"), (b"\x80", "this is nothing known"), (b"\x80\x04", "byte 2: the file ends")]
        {
            let path = folder.path().join("short");
            std::fs::write(&path, bytes).unwrap();
            let error = read_file(&path).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error:?}, not {expected:?}");
        }
        assert!(matches!(read_file(folder.path()), Err(TraceError::Open(_))));
    }
}
