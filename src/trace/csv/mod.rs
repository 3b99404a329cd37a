//! Reads and writes trace CSV files; plain ones, or compressed with zstd or gzip (told by their first bytes, not their names).
//!
//! Strict: whatever is not as the README says is refused with the line, the column and what was found there, and nothing is returned.

mod lines;
pub(super) mod table;
mod write;

use std::io::Read;
use std::path::Path;

pub use write::write;

use super::builder::{Builder, RuleError};
use super::unpack::Unpacked;
use super::{Context, Event, EventKind, Phase, Trace, TraceError};
use crate::ids::StreamId;
use crate::units::{Bytes, Tick};
use table::{Layout, Row, Table};

/// The header is that of a trace, or would be with a column more.
pub(super) fn is_header(columns: &[&[u8]]) -> bool {
    LAYOUT.columns[..LAYOUT.required].iter().any(|column| columns.contains(&column.as_bytes()))
}

/// Reads the trace in a file.
pub fn read_file(path: &Path) -> Result<Trace, TraceError> {
    read(super::import::open(path)?)
}

/// Reads a trace from a stream of bytes.
pub fn read(bytes: impl Read) -> Result<Trace, TraceError> {
    read_plain(Unpacked::open(bytes).map_err(|source| TraceError::Read { line: 1, source })?)
}

/// The columns that every trace written here has.
const HEADER: &str = "tick,event,id,bytes,stream,iteration,phase,microbatch,chunk,module,dynamic";

const LAYOUT: Layout = Layout {
    columns: &[
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
    ],
    required: 4,
    needs: "a trace begins with tick,event,id,bytes, a problem of placement with id,lower,upper,size",
};
const TICK: usize = 0;
const EVENT: usize = 1;
const ID: usize = 2;
const BYTES: usize = 3;
const STREAM: usize = 4;
const ITERATION: usize = 5;
const PHASE: usize = 6;
const MICROBATCH: usize = 7;
const CHUNK: usize = 8;
const MODULE: usize = 9;
const DYNAMIC: usize = 10;
const DEVICE: usize = 11;
const THREAD: usize = 12;

/// Reads a trace that is not compressed.
pub(super) fn read_plain(bytes: impl Read) -> Result<Trace, TraceError> {
    let mut table = Table::open(bytes, &LAYOUT)?;
    let mut builder = Builder::default();
    while let Some(row) = table.row()? {
        push(&mut builder, &row)?;
    }
    builder.finish().ok_or(TraceError::Empty)
}

fn push(builder: &mut Builder, row: &Row<'_>) -> Result<(), TraceError> {
    let kind = row.name(EVENT, &EventKind::ALL, "alloc, free, free_completed, record_stream, enter, exit or mark")?;
    let bytes = match kind {
        EventKind::Alloc => Bytes::new(row.number(BYTES, "a number of bytes")?),
        _ => Bytes::ZERO,
    };
    let event = Event {
        tick: Tick(row.number(TICK, "a number")?),
        kind,
        id: if kind.has_id() { row.number(ID, "a number")? } else { 0 },
        bytes,
        stream: StreamId(row.optional(STREAM)?.unwrap_or(0)),
        iteration: row.optional(ITERATION)?.unwrap_or(0),
        context: context(builder, row)?,
        is_dynamic: match row.field(DYNAMIC) {
            b"" | b"0" => false,
            b"1" => true,
            _ => return Err(row.error(DYNAMIC, "0, 1 or nothing")),
        },
        device: row.optional(DEVICE)?.unwrap_or(0),
        thread: row.optional(THREAD)?.unwrap_or(0),
    };
    builder.push(event).map_err(|error| match error {
        RuleError::TooLong => TraceError::TooLong,
        RuleError::Bytes => row.error(BYTES, "a size that any machine could have"),
        RuleError::Iteration => row.error(ITERATION, "a possible iteration"),
        RuleError::Module => row.error(MODULE, "one of at most four thousand million names"),
        RuleError::Tick { .. } => row.order(TICK, error.to_string()),
        RuleError::Id { .. } => row.order(ID, error.to_string()),
    })
}

fn context(builder: &mut Builder, row: &Row<'_>) -> Result<Context, TraceError> {
    let phase = match row.field(PHASE) {
        b"" => Phase::Other,
        _ => row.name(PHASE, &Phase::ALL, "init, forward, backward, recompute, optimizer, other or nothing")?,
    };
    // With the space around it: a name is what its writer gave, and other files have it so, too.
    let module = std::str::from_utf8(row.whole(MODULE)).map_err(|_| row.error(MODULE, "UTF-8 text"))?;
    let module = builder.module(module);
    Ok(Context { phase, microbatch: row.optional(MICROBATCH)?, chunk: row.optional(CHUNK)?, module })
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
    fn an_open_quote_or_a_line_without_end_is_an_error_with_its_line() {
        let chain = |text: &[u8]| crate::error::chain(&read(text).unwrap_err());
        let text = "tick,event,id,bytes,module\n1,alloc,1,5,a\n2,free,1,,\"b\n3,alloc,2,5,c\n";
        assert_eq!(chain(text.as_bytes()), "cannot read line 3: a quote that is opened there is never closed");
        assert_eq!(chain(b"tick,event,id,\"bytes"), "cannot read line 1: a quote that is opened there is never closed");
        let text = format!("tick,event,id,bytes,module\n1,alloc,1,5,{}\n", "x".repeat(2 << 20));
        assert_eq!(chain(text.as_bytes()), "cannot read line 2: it is longer than 1048576 bytes");
        assert!(chain(&vec![0; 2 << 20]).starts_with("cannot read line 1: it is longer than"));
    }

    #[test]
    fn a_file_cut_in_the_middle_is_an_error_not_a_shorter_trace() {
        let row = |n| format!("{n},alloc,{n},100,,,,,,,\n");
        let text: String = std::iter::once(HEADER.to_owned()).chain((1..5000).map(row)).collect();
        let zstd = zstd::encode_all(text.as_bytes(), 3).unwrap();
        assert!(matches!(read(&zstd[..zstd.len() / 2]), Err(TraceError::Read { .. })));
    }

    #[test]
    fn what_is_written_reads_back_as_it_was() {
        let names = ["", "a.b", " a ", "a,b", "\"", "a\nb\r", "ä\"\"", " "];
        let mut rng = crate::rng::Rng::new(3);
        for round in 0..300 {
            let mut builder = Builder::default();
            let has_places = rng.chance(500);
            let (mut tick, mut live) = (0, Vec::new());
            for id in 0..1 + rng.below(60) {
                tick += rng.below(3) * rng.below(1 << 50);
                let kind = EventKind::ALL[rng.index(EventKind::ALL.len())].1;
                let id = match kind {
                    EventKind::Alloc => id.wrapping_mul(0x1234_5678_9abc_def1),
                    EventKind::Free if !live.is_empty() => live.swap_remove(rng.index(live.len())),
                    EventKind::RecordStream if !live.is_empty() => live[rng.index(live.len())],
                    kind if kind.has_id() => continue,
                    _ => 0,
                };
                let option = |rng: &mut crate::rng::Rng| rng.chance(500).then(|| rng.next_u64() as u32);
                let place = |rng: &mut crate::rng::Rng| if has_places { rng.below(3) as u32 } else { 0 };
                let context = Context {
                    phase: Phase::ALL[rng.index(Phase::ALL.len())].1,
                    microbatch: option(&mut rng),
                    chunk: option(&mut rng),
                    module: builder.module(names[rng.index(names.len())]),
                };
                let bytes = Bytes::new(if kind == EventKind::Alloc { rng.below(1 << 40) } else { 0 });
                let (stream, iteration) = (StreamId(rng.next_u64()), rng.next_u64() as u32 >> 1);
                let (is_dynamic, device, thread) = (rng.chance(500), place(&mut rng), place(&mut rng));
                let tick = Tick(tick);
                let event = Event { tick, kind, id, bytes, stream, iteration, context, is_dynamic, device, thread };
                builder.push(event).unwrap();
                if kind == EventKind::Alloc {
                    live.push(id);
                }
            }
            let Some(trace) = builder.finish() else { continue };
            let mut text = Vec::new();
            write(&mut text, &trace).unwrap();
            let again = read(&text[..]).unwrap();
            assert_eq!(again.events, trace.events, "round {round}");
            // Names that no event has are not in it.
            let used = |trace: &Trace| {
                trace.events.iter().map(|e| trace.modules[e.context.module as usize].clone()).collect::<Vec<_>>()
            };
            assert_eq!(used(&again), used(&trace), "round {round}");
            assert_eq!(
                String::from_utf8(text).unwrap().lines().next().unwrap().contains(",device,thread"),
                trace.events.iter().any(|e| e.device != 0 || e.thread != 0)
            );
        }
    }
}
