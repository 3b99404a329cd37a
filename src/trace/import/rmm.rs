//! Logs of RMM's `logging_resource_adaptor`: `Thread,Time,Action,Pointer,Size,Stream`, one row for each call, in the order of their logging.
//!
//! Of all versions since 0.14. Pointers are hexadecimal with or without `0x`, or `(nil)`; so are streams. Time is the time of day, which goes back at midnight, or
//! something else: rows are in order without it, and ticks are their numbers. Such a log knows nothing of phases, modules and iterations.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io::Read;

use super::Imported;
use crate::ids::StreamId;
use crate::trace::csv::table::{Layout, Row, Table};
use crate::trace::{Context, Event, EventKind, Phase, TraceError};
use crate::units::{Bytes, Tick};

const LAYOUT: Layout = Layout {
    columns: &["Thread", "Action", "Pointer", "Size", "Stream", "Time"],
    required: 5,
    needs: "a log of RMM begins with Thread,Time,Action,Pointer,Size,Stream",
};
const THREAD: usize = 0;
const ACTION: usize = 1;
const POINTER: usize = 2;
const SIZE: usize = 3;
const STREAM: usize = 4;

/// The header is that of such a log.
pub(super) fn is_header(columns: &[&[u8]]) -> bool {
    ["Action", "Pointer"].iter().all(|column| columns.contains(&column.as_bytes()))
}

/// Reads a log that is not compressed.
pub(super) fn read(bytes: impl Read) -> Result<Imported, TraceError> {
    let mut table = Table::open(bytes, &LAYOUT)?;
    let mut log = Log::default();
    let mut tick = 0;
    while let Some(row) = table.row()? {
        tick += 1;
        log.row(Tick(tick), &row)?;
    }
    log.finish()
}

#[derive(Clone, Copy)]
enum Action {
    Allocate,
    Free,
    Failure,
}

/// `deallocate` is what RMM's documentation calls it.
const ACTIONS: [(&str, Action); 4] = [
    ("allocate", Action::Allocate),
    ("free", Action::Free),
    ("deallocate", Action::Free),
    ("allocate failure", Action::Failure),
];

/// A log that is being read.
#[derive(Default)]
struct Log {
    /// Events of what the log saw allocated, with their ids, and frees of what it did not.
    events: Vec<Event>,
    /// Allocations from before the log began. Their frees in `events` have ids from the top down.
    older: Vec<Event>,
    live: HashMap<u64, (u64, Bytes)>,
    /// Pointers that the log saw allocated at any time.
    seen: HashSet<u64>,
    threads: HashMap<u64, u32>,
    next: u64,
    failures: u64,
    failed: u64,
    reused: u64,
    again: u64,
    nothing: u64,
    differ: u64,
}

impl Log {
    fn row(&mut self, tick: Tick, row: &Row<'_>) -> Result<(), TraceError> {
        let action = row.name(ACTION, &ACTIONS, "allocate, free or allocate failure")?;
        let thread = row.number(THREAD, "the number of a thread")?;
        let bytes = Bytes::new(row.number(SIZE, "a number of bytes")?);
        let pointer = hexadecimal(row, POINTER)?;
        let stream = StreamId(hexadecimal(row, STREAM)?);
        if bytes > Bytes::LARGEST {
            return Err(row.error(SIZE, "a size that any machine could have"));
        }
        let threads = self.threads.len() as u32;
        let thread = *self.threads.entry(thread).or_insert(threads);
        let event = Event {
            tick,
            kind: EventKind::Alloc,
            id: self.next,
            bytes,
            stream,
            iteration: 0,
            context: Context::default(),
            is_dynamic: false,
            device: 0,
            thread,
        };
        match action {
            Action::Failure => {
                self.failures += 1;
                self.failed = self.failed.max(bytes.get());
            }
            // Nothing is at no place: a request for no bytes, and its free.
            _ if pointer == 0 => self.nothing += 1,
            Action::Allocate => {
                self.next += 1;
                self.seen.insert(pointer);
                if let Some((old, _)) = self.live.insert(pointer, (event.id, bytes)) {
                    self.reused += 1;
                    self.events.push(Event { kind: EventKind::Free, id: old, bytes: Bytes::ZERO, ..event });
                }
                self.events.push(event);
            }
            Action::Free => self.free(pointer, event),
        }
        Ok(())
    }

    fn free(&mut self, pointer: u64, event: Event) {
        let bytes = event.bytes;
        let free = Event { kind: EventKind::Free, bytes: Bytes::ZERO, ..event };
        match self.live.entry(pointer) {
            Entry::Occupied(live) => {
                let (id, asked) = live.remove();
                self.differ += u64::from(asked != bytes);
                self.events.push(Event { id, ..free });
            }
            // It was allocated and freed, or another has its place: two threads, logged in another order than they came.
            Entry::Vacant(_) if !self.seen.insert(pointer) => self.again += 1,
            Entry::Vacant(_) => {
                let id = u64::MAX - self.older.len() as u64;
                let context = Context { phase: Phase::Init, ..Context::default() };
                self.older.push(Event { tick: Tick(0), id, context, ..event });
                self.events.push(Event { id, ..free });
            }
        }
    }

    fn finish(self) -> Result<Imported, TraceError> {
        let older = self.older.len() as u64;
        let id = |id: u64| if u64::MAX - id < older { u64::MAX - id } else { id + older };
        let events = self.older.iter().chain(&self.events).map(|event| Event { id: id(event.id), ..*event });
        let trace = super::build(events)?;
        let mut notes = vec!["the log has no phases, modules and iterations".to_owned()];
        let mut note = |what: &str, count: u64, meaning: &str| {
            if count > 0 {
                notes.push(format!("{what}: {count}; {meaning}"));
            }
        };
        note("blocks older than the log", older, "they are allocated at its beginning");
        note("blocks live at the end of the log", self.live.len() as u64, "nothing frees them");
        note("addresses given out again before their free was logged", self.reused, "they are freed then");
        note("frees of what was not live", self.again, "left out");
        note("rows without an address", self.nothing, "left out");
        note("frees that name another size than the allocation", self.differ, "the allocation's counts");
        let largest = format!("left out, the largest of {} bytes", self.failed);
        note("allocations that failed", self.failures, &largest);
        Ok(Imported { trace, notes, ..Imported::default() })
    }
}

fn hexadecimal(row: &Row<'_>, column: usize) -> Result<u64, TraceError> {
    let text = std::str::from_utf8(row.field(column)).unwrap_or("?");
    if ["(nil)", "(null)", "nullptr"].contains(&text) {
        return Ok(0);
    }
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    let number = u64::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'));
    number.ok_or_else(|| row.error(column, "a hexadecimal address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

    fn read_rows(rows: &str) -> Result<Imported, TraceError> {
        read(format!("{HEADER}{rows}").as_bytes())
    }

    fn events(imported: &Imported) -> Vec<(u64, EventKind, u64, u64)> {
        imported.trace.events.iter().map(|e| (e.tick.0, e.kind, e.id, e.bytes.get())).collect()
    }

    use EventKind::{Alloc, Free};

    #[test]
    fn every_spelling_of_every_version_is_read() {
        let imported = read_rows(
            "7,10:52:35.123456,allocate,0x7f8a40000000,1024,0x0\n\
             9,10:52:35:123,allocate,7F8A40000400,2048,0x7f8a38001020\n\
             7,1634567890.2,free,0x7f8a40000000,1024,0\n\
             9,17,deallocate,7f8a40000400,2048,7f8a38001020\n\
             9,,allocate failure,(nil),999999,2\n\
             9,,allocate failure,0x0,5,2\n",
        )
        .unwrap();
        assert_eq!(events(&imported), [(1, Alloc, 0, 1024), (2, Alloc, 1, 2048), (3, Free, 0, 0), (4, Free, 1, 0)]);
        let event = imported.trace.events[3];
        assert_eq!((event.stream.0, event.thread), (0x7f8a_3800_1020, 1));
        assert!(
            imported
                .notes
                .iter()
                .any(|note| note.starts_with("allocations that failed: 2;") && note.contains("999999"))
        );
    }

    #[test]
    fn frees_of_what_the_log_never_saw_are_of_blocks_older_than_it() {
        let imported = read_rows("1,,allocate,a0,1,0\n1,,free,b0,70,3\n1,,free,c0,80,0\n1,,free,a0,1,0\n").unwrap();
        let expected =
            [(0, Alloc, 0, 70), (0, Alloc, 1, 80), (1, Alloc, 2, 1), (2, Free, 0, 0), (3, Free, 1, 0), (4, Free, 2, 0)];
        assert_eq!(events(&imported), expected);
        assert_eq!(imported.trace.events[0].context.phase, Phase::Init);
        assert_eq!(imported.trace.events[0].stream.0, 3);
        assert!(imported.notes.iter().any(|note| note.starts_with("blocks older than the log: 2;")));
    }

    #[test]
    fn an_address_that_is_given_out_while_live_ends_what_was_there() {
        let imported = read_rows("1,,allocate,a0,1,0\n2,,allocate,a0,2,0\n1,,free,a0,1,0\n2,,free,a0,2,0\n").unwrap();
        assert_eq!(events(&imported), [(1, Alloc, 0, 1), (2, Free, 0, 0), (2, Alloc, 1, 2), (3, Free, 1, 0)]);
        let notes = imported.notes.join("\n");
        assert!(notes.contains("before their free was logged: 1;") && notes.contains("frees of what was not live: 1;"));
        assert!(notes.contains("name another size than the allocation: 1;"), "{notes}");
    }

    #[test]
    fn what_is_wrong_is_named_with_line_and_column() {
        let cases = [
            ("1,,grow,a0,1,0\n", "line 2, column 'Action': \"grow\" is not allocate, free"),
            ("x,,free,a0,1,0\n", "line 2, column 'Thread'"),
            ("1,,free,zz,1,0\n", "line 2, column 'Pointer': \"zz\" is not a hexadecimal address"),
            ("1,,free,,1,0\n", "line 2, column 'Pointer'"),
            ("1,,free,1ffffffffffffffff,1,0\n", "line 2, column 'Pointer'"),
            ("1,,free,a0,-1,0\n", "line 2, column 'Size'"),
            ("1,,allocate,a0,18446744073709551615,0\n", "line 2, column 'Size'"),
            ("1,,allocate,a0,1,q\n", "line 2, column 'Stream'"),
            ("1,,allocate,a0,1\n", "line 2: 5 fields"),
            ("", "there is no event"),
            ("1,,allocate failure,(nil),1,0\n", "there is no event"),
        ];
        for (rows, expected) in cases {
            let error = read_rows(rows).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{rows:?} gives {error:?}, not {expected:?}");
        }
        let error = read("Thread,Action,Pointer,Size\n".as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("line 1: there is no column 'Stream'; a log of RMM"), "{error}");
    }
}
