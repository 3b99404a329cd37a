//! Reads trace CSV files, plain or compressed with zstd or gzip (told by their first bytes, not their names).
//!
//! Strict: whatever is not as CONTRACT says is refused with the line, the column and what was found there, and nothing is returned. A compressed file may
//! not grow out of all proportion: a few kilobytes could fill any memory.

use std::cell::Cell;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

use super::{Context, Event, EventKind, Phase, Trace};
use crate::error::ErrorKind;
use crate::ids::StreamId;
use crate::limits;
use crate::units::{Bytes, Tick};

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
    /// The header lacks a column.
    #[error("line 1: there is no column '{column}'; a trace begins with tick,event,id,bytes")]
    NoColumn {
        /// Which.
        column: &'static str,
    },
    /// The header names a column twice.
    #[error("line 1: column '{column}' is there twice")]
    TwiceColumn {
        /// Which.
        column: String,
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
    /// There is no event.
    #[error("there is no event in it")]
    Empty,
    /// More than a trace can have.
    #[error("it has more than {} events", limits::TRACE_EVENTS_MAX)]
    TooLong,
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

/// Reads the trace in a file.
pub fn read_file(path: &Path) -> Result<Trace, TraceError> {
    let file = std::fs::File::open(path).map_err(TraceError::Open)?;
    if file.metadata().map_err(TraceError::Open)?.is_dir() {
        return Err(TraceError::Open(std::io::ErrorKind::IsADirectory.into()));
    }
    read(file)
}

/// Reads a trace from a stream of bytes.
pub fn read(bytes: impl Read) -> Result<Trace, TraceError> {
    let taken = Rc::new(Cell::new(0));
    let mut bytes = BufReader::new(Counted { bytes, taken: Rc::clone(&taken) });
    let grown = |bytes| Grown { bytes, taken, given: 0 };
    let read = |source| TraceError::Read { line: 1, source };
    let head = bytes.fill_buf().map_err(read)?;
    if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        read_plain(grown(Box::new(zstd::stream::read::Decoder::with_buffer(bytes).map_err(read)?)))
    } else if head.starts_with(&[0x1f, 0x8b]) {
        read_plain(grown(Box::new(flate2::bufread::MultiGzDecoder::new(bytes))))
    } else {
        read_plain(bytes)
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

/// What a compressed file grows to, up to [`GROWTH_FREE`] and [`GROWTH_MAX`] times what was taken of it.
struct Grown<'a> {
    bytes: Box<dyn Read + 'a>,
    taken: Rc<Cell<u64>>,
    given: u64,
}

/// Traces of real jobs shrink to a tenth or so.
const GROWTH_MAX: u64 = 100;
const GROWTH_FREE: u64 = 16 << 20;

impl Read for Grown<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = self.bytes.read(into)?;
        self.given += len as u64;
        if self.given > GROWTH_FREE + GROWTH_MAX * self.taken.get() {
            let text = format!("it grows to more than {GROWTH_MAX} times its size; unpack it first if that is right");
            return Err(std::io::Error::other(text));
        }
        Ok(len)
    }
}

const COLUMNS: [&str; 13] = [
    "tick",
    "event",
    "id",
    "bytes",
    "stream",
    "iteration",
    "phase",
    "microbatch",
    "chunk",
    "module",
    "dynamic",
    "device",
    "thread",
];
const REQUIRED: usize = 4;

fn read_plain(bytes: impl Read) -> Result<Trace, TraceError> {
    let mut reader = ::csv::ReaderBuilder::new().flexible(true).from_reader(bytes);
    let columns = Columns::find(reader.byte_headers().map_err(|error| broken(1, error))?)?;
    let mut builder = Builder::default();
    let mut record = ::csv::ByteRecord::new();
    let mut line = 1;
    while reader.read_byte_record(&mut record).map_err(|error| broken(line + 1, error))? {
        line = record.position().map_or(line + 1, ::csv::Position::line);
        if record.len() != columns.count {
            return Err(TraceError::Fields { line, found: record.len(), expected: columns.count });
        }
        builder.push(&Row { columns: &columns, record: &record, line })?;
    }
    if builder.trace.events.is_empty() {
        return Err(TraceError::Empty);
    }
    Ok(builder.trace)
}

fn broken(line: u64, error: ::csv::Error) -> TraceError {
    let line = error.position().map_or(line, ::csv::Position::line);
    TraceError::Read { line, source: std::io::Error::from(error) }
}

/// Where each known column stands.
struct Columns {
    at: [Option<usize>; COLUMNS.len()],
    count: usize,
}

impl Columns {
    fn find(header: &::csv::ByteRecord) -> Result<Columns, TraceError> {
        let mut at = [None; COLUMNS.len()];
        for (place, name) in header.iter().enumerate() {
            // Unknown columns are somebody else's.
            if let Some(known) = COLUMNS.iter().position(|column| column.as_bytes() == name.trim_ascii())
                && at[known].replace(place).is_some()
            {
                return Err(TraceError::TwiceColumn { column: COLUMNS[known].to_owned() });
            }
        }
        match COLUMNS.iter().zip(at).take(REQUIRED).find(|(_, at)| at.is_none()) {
            Some((column, _)) => Err(TraceError::NoColumn { column }),
            None => Ok(Columns { at, count: header.len() }),
        }
    }
}

struct Row<'a> {
    columns: &'a Columns,
    record: &'a ::csv::ByteRecord,
    line: u64,
}

impl Row<'_> {
    /// The field, empty where the file has no such column.
    fn field(&self, column: &'static str) -> &[u8] {
        let known = COLUMNS.iter().position(|known| *known == column).expect("columns are asked for by their names");
        self.columns.at[known].and_then(|at| self.record.get(at)).unwrap_or_default().trim_ascii()
    }

    fn error(&self, column: &'static str, expected: &'static str) -> TraceError {
        const SHOWN: usize = 40;
        let mut found = String::from_utf8_lossy(self.field(column)).into_owned();
        if let Some((cut, _)) = found.char_indices().nth(SHOWN) {
            found.truncate(cut);
            found.push('…');
        }
        TraceError::Field { line: self.line, column, found, expected }
    }

    fn number<T: std::str::FromStr>(&self, column: &'static str, expected: &'static str) -> Result<T, TraceError> {
        let text = std::str::from_utf8(self.field(column)).unwrap_or("?");
        // FromStr takes a leading plus; the format does not.
        text.parse().ok().filter(|_| !text.starts_with('+')).ok_or_else(|| self.error(column, expected))
    }

    fn optional<T: std::str::FromStr>(&self, column: &'static str) -> Result<Option<T>, TraceError> {
        if self.field(column).is_empty() {
            return Ok(None);
        }
        self.number(column, "a number or nothing").map(Some)
    }

    fn name<T: Copy>(
        &self,
        column: &'static str,
        names: &[(&'static str, T)],
        expected: &'static str,
    ) -> Result<T, TraceError> {
        let field = self.field(column);
        let found = names.iter().find(|(name, _)| name.as_bytes() == field);
        found.map(|(_, value)| *value).ok_or_else(|| self.error(column, expected))
    }

    fn order(&self, column: &'static str, what: String) -> TraceError {
        TraceError::Order { line: self.line, column, what }
    }
}

/// What an id is at some point of the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Live,
    Freed,
    Completed,
}

#[derive(Default)]
struct Builder {
    trace: Trace,
    modules: HashMap<Vec<u8>, u32>,
    lives: HashMap<u64, Life>,
    /// Bytes ever asked for: what is live can only be less.
    asked: Bytes,
}

impl Builder {
    fn push(&mut self, row: &Row<'_>) -> Result<(), TraceError> {
        if self.trace.events.len() >= limits::TRACE_EVENTS_MAX {
            return Err(TraceError::TooLong);
        }
        let kind =
            row.name("event", &EventKind::ALL, "alloc, free, free_completed, record_stream, enter, exit or mark")?;
        let tick = Tick(row.number("tick", "a number")?);
        if let Some(last) = self.trace.events.last().filter(|last| last.tick > tick) {
            return Err(row.order("tick", format!("{tick} comes after {}; ticks never go back", last.tick)));
        }
        let bytes = match kind {
            EventKind::Alloc => {
                let bytes = Bytes::new(row.number("bytes", "a number of bytes")?);
                let sum =
                    Some(bytes).filter(|bytes| *bytes <= Bytes::MAX).and_then(|bytes| self.asked.checked_add(bytes));
                self.asked = sum.ok_or_else(|| row.error("bytes", "a size that any machine could have"))?;
                bytes
            }
            _ => Bytes::ZERO,
        };
        let event = Event {
            tick,
            kind,
            id: self.live_id(row, kind)?,
            bytes,
            stream: StreamId(row.optional("stream")?.unwrap_or(0)),
            iteration: row.optional("iteration")?.unwrap_or(0),
            context: self.context(row)?,
            is_dynamic: match row.field("dynamic") {
                b"" | b"0" => false,
                b"1" => true,
                _ => return Err(row.error("dynamic", "0, 1 or nothing")),
            },
            device: row.optional("device")?.unwrap_or(0),
            thread: row.optional("thread")?.unwrap_or(0),
        };
        if event.iteration == u32::MAX {
            return Err(row.error("iteration", "a possible iteration"));
        }
        self.trace.events.push(event);
        Ok(())
    }

    /// The id of the row, which its event may be about.
    fn live_id(&mut self, row: &Row<'_>, kind: EventKind) -> Result<u64, TraceError> {
        if matches!(kind, EventKind::Enter | EventKind::Exit | EventKind::Mark) {
            return Ok(0);
        }
        let id = row.number("id", "a number")?;
        let next = match (kind, self.lives.get(&id)) {
            (EventKind::Alloc, None) => Life::Live,
            (EventKind::Free, Some(Life::Live)) => Life::Freed,
            (EventKind::FreeCompleted, Some(Life::Freed)) => Life::Completed,
            (EventKind::RecordStream, Some(Life::Live)) => Life::Live,
            (EventKind::Alloc, Some(_)) => return Err(row.order("id", format!("{id} was allocated before"))),
            (EventKind::FreeCompleted, Some(Life::Live)) => {
                return Err(row.order("id", format!("{id} is completed before it is freed")));
            }
            (_, None) => return Err(row.order("id", format!("{id} was never allocated"))),
            (_, Some(_)) => return Err(row.order("id", format!("{id} is freed already"))),
        };
        self.lives.insert(id, next);
        Ok(id)
    }

    fn context(&mut self, row: &Row<'_>) -> Result<Context, TraceError> {
        let phase = match row.field("phase") {
            b"" => Phase::Other,
            _ => row.name("phase", &Phase::ALL, "init, forward, backward, recompute, optimizer, other or nothing")?,
        };
        if self.trace.modules.is_empty() {
            self.trace.modules.push(String::new());
            self.modules.insert(Vec::new(), 0);
        }
        let name = row.field("module");
        let module = match self.modules.get(name) {
            Some(module) => *module,
            None => {
                let text = std::str::from_utf8(name).map_err(|_| row.error("module", "UTF-8 text"))?;
                let module = self.trace.modules.len() as u32;
                self.trace.modules.push(text.to_owned());
                self.modules.insert(name.to_owned(), module);
                module
            }
        };
        Ok(Context { phase, microbatch: row.optional("microbatch")?, chunk: row.optional("chunk")?, module })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "tick,event,id,bytes,stream,iteration,phase,microbatch,chunk,module,dynamic\n";

    fn read_text(text: &str) -> Result<Trace, TraceError> {
        read(text.as_bytes())
    }

    #[test]
    fn every_column_is_read() {
        let text = format!(
            "{HEADER}1,alloc,7,100,3,2,forward,4,5,a.b,1\n1,record_stream,7,,9,2,forward,,,a.b,\n2,free,7,,3,2,backward,4,,,\n"
        );
        let trace = read_text(&text).unwrap();
        let first = trace.events[0];
        assert_eq!((first.tick, first.id, first.bytes, first.stream.0), (Tick(1), 7, Bytes::new(100), 3));
        assert_eq!((first.iteration, first.context.phase, first.is_dynamic), (2, Phase::Forward, true));
        assert_eq!((first.context.microbatch, first.context.chunk), (Some(4), Some(5)));
        assert_eq!(trace.modules, ["", "a.b"]);
        assert_eq!(trace.events[1].kind, EventKind::RecordStream);
        assert_eq!(trace.events[2].context.module, 0);
        assert_eq!(trace.iterations(), 3);
    }

    #[test]
    fn columns_may_stand_anywhere_be_missing_from_stream_on_and_be_unknown() {
        let trace = read_text("bytes,colour,event,tick,id,thread\n5,red,alloc,0,1,6\n").unwrap();
        assert_eq!((trace.events[0].bytes, trace.events[0].thread), (Bytes::new(5), 6));
    }

    #[test]
    fn compressed_traces_are_read_whatever_their_name() {
        let text = format!("{HEADER}1,alloc,7,100,,,,,,,\n");
        let zstd = zstd::encode_all(text.as_bytes(), 3).unwrap();
        let mut gzip = flate2::read::GzEncoder::new(text.as_bytes(), flate2::Compression::fast());
        let mut gzipped = Vec::new();
        gzip.read_to_end(&mut gzipped).unwrap();
        for bytes in [text.into_bytes(), zstd, gzipped] {
            assert_eq!(read(&bytes[..]).unwrap().events.len(), 1);
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_line_and_column() {
        let cases = [
            ("", "line 1: there is no column 'tick'"),
            ("tick,event,id\n", "line 1: there is no column 'bytes'"),
            ("tick,tick,event,id,bytes\n", "line 1: column 'tick' is there twice"),
            ("tick,event,id,bytes\n", "there is no event"),
            ("tick,event,id,bytes\n1,alloc,1\n", "line 2: 3 fields, and the header has 4"),
            ("tick,event,id,bytes\n1,alloc,1,5,6\n", "line 2: 5 fields, and the header has 4"),
            ("tick,event,id,bytes\nx,alloc,1,5\n", "line 2, column 'tick': \"x\" is not a number"),
            ("tick,event,id,bytes\n+1,alloc,1,5\n", "line 2, column 'tick'"),
            ("tick,event,id,bytes\n1,grow,1,5\n", "line 2, column 'event': \"grow\" is not alloc"),
            ("tick,event,id,bytes\n1,alloc,1,-5\n", "line 2, column 'bytes': \"-5\""),
            ("tick,event,id,bytes\n1,alloc,1,18446744073709551615\n", "line 2, column 'bytes'"),
            ("tick,event,id,bytes\n1,alloc,1,5\n2,alloc,1,5\n", "line 3, column 'id': 1 was allocated before"),
            ("tick,event,id,bytes\n1,free,1,\n", "line 2, column 'id': 1 was never allocated"),
            ("tick,event,id,bytes\n1,alloc,1,5\n2,free,1,\n3,free,1,\n", "line 4, column 'id': 1 is freed already"),
            ("tick,event,id,bytes\n1,alloc,1,5\n2,free_completed,1,\n", "line 3, column 'id': 1 is completed"),
            ("tick,event,id,bytes\n2,alloc,1,5\n1,free,1,\n", "line 3, column 'tick': 1 comes after 2"),
            ("tick,event,id,bytes,phase\n1,alloc,1,5,lunch\n", "line 2, column 'phase': \"lunch\""),
            ("tick,event,id,bytes,dynamic\n1,alloc,1,5,2\n", "line 2, column 'dynamic'"),
            ("tick,event,id,bytes,iteration\n1,alloc,1,5,4294967295\n", "line 2, column 'iteration'"),
        ];
        for (text, expected) in cases {
            let error = read_text(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text:?} gives {error:?}, not {expected:?}");
        }
    }

    #[test]
    fn a_file_cut_in_the_middle_is_an_error_not_a_shorter_trace() {
        let row = |n| format!("{n},alloc,{n},100,,,,,,,\n");
        let text: String = std::iter::once(HEADER.to_owned()).chain((1..5000).map(row)).collect();
        let zstd = zstd::encode_all(text.as_bytes(), 3).unwrap();
        assert!(matches!(read(&zstd[..zstd.len() / 2]), Err(TraceError::Read { .. })));
    }
}
