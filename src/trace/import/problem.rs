//! Problems of placement as traces: `id,lower,upper,size`, a buffer a row, live from `lower` until before `upper`.
//!
//! At a tick frees come before allocations, and otherwise the order of the file decides. Offsets and other columns are left out: a trace has no addresses.

use foldhash::HashSet;
use std::io::Read;

use super::Imported;
use crate::ids::StreamId;
use crate::trace::csv::table::{Layout, Row, Table};
use crate::trace::{Context, Event, EventKind, TraceError};
use crate::units::{Bytes, Tick};

const LAYOUT: Layout = Layout {
    columns: &["id", "lower", "upper", "size", "offset", "alignment", "gaps"],
    required: 4,
    needs: "a problem begins with id,lower,upper,size",
};
const ID: usize = 0;
const LOWER: usize = 1;
const UPPER: usize = 2;
const SIZE: usize = 3;
const OFFSET: usize = 4;
/// What MiniMalloc lets a buffer ask for, and no plan of ours keeps, with the value that asks for nothing.
const DEMANDS: [(usize, &[u8]); 2] = [(5, b"1"), (6, b"")];

/// The header is that of a problem.
pub(super) fn is_header(columns: &[&[u8]]) -> bool {
    ["lower", "upper"].iter().all(|column| columns.contains(&column.as_bytes()))
}

/// Reads a problem that is not compressed.
pub(super) fn read(bytes: impl Read) -> Result<Imported, TraceError> {
    let mut table = Table::open(bytes, &LAYOUT)?;
    let has_offset = table.has(OFFSET);
    let (mut events, mut rows) = (Vec::new(), Vec::new());
    let mut names = HashSet::default();
    let mut are_numbers = true;
    while let Some(row) = table.row()? {
        let number: Result<u64, TraceError> = row.number(ID, "a number");
        are_numbers &= number.is_ok();
        let name = row.field(ID).to_vec();
        if !names.insert(name) {
            return Err(row.order(ID, "it is there twice".into()));
        }
        let number = number.unwrap_or(0);
        events.extend(buffer(&row, number)?);
        rows.push((number, row.field(ID).to_vec()));
    }
    let mut notes = vec!["a problem has no streams, phases, modules and iterations".to_owned()];
    // "1" and "01" are two names and one number.
    let numbers: HashSet<u64> = events.iter().map(|event| event.id).collect();
    if !are_numbers || numbers.len() * 2 != events.len() {
        for (at, event) in events.iter_mut().enumerate() {
            event.id = at as u64 / 2;
        }
        for (at, row) in rows.iter_mut().enumerate() {
            row.0 = at as u64;
        }
        notes.push(
            "the ids are not all numbers, or two are one number: buffers are numbered in the order of the file".into(),
        );
    }
    if has_offset {
        notes.push("the offsets are left out: a trace has no addresses".into());
    }
    // Stable, so that the order of the file decides what else is equal.
    events.sort_by_key(|event| (event.tick, event.kind != EventKind::Free));
    Ok(Imported {
        trace: super::build(events)?,
        notes,
        is_one_iteration: true,
        is_problem: true,
        rows,
        ..Imported::default()
    })
}

/// The two events of a buffer.
fn buffer(row: &Row<'_>, id: u64) -> Result<[Event; 2], TraceError> {
    for (column, nothing) in DEMANDS {
        let asked = row.field(column);
        if !asked.is_empty() && asked != nothing {
            return Err(row.order(
                column,
                "no plan keeps that: leave the column out, and round sizes up to the alignment".into(),
            ));
        }
    }
    let (lower, upper): (u64, u64) = (row.number(LOWER, "a time")?, row.number(UPPER, "a time")?);
    if lower >= upper {
        return Err(row.order(UPPER, format!("{upper} is not after {lower}, where the buffer begins")));
    }
    let bytes = Bytes::new(row.number(SIZE, "a number of bytes")?);
    if bytes > Bytes::LARGEST {
        return Err(row.error(SIZE, "a size that any machine could have"));
    }
    let alloc = Event {
        tick: Tick(lower),
        kind: EventKind::Alloc,
        id,
        bytes,
        stream: StreamId(0),
        iteration: 0,
        context: Context::default(),
        is_dynamic: false,
        device: 0,
        thread: 0,
    };
    Ok([alloc, Event { tick: Tick(upper), kind: EventKind::Free, bytes: Bytes::ZERO, ..alloc }])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(text: &str) -> Vec<(u64, EventKind, u64, u64)> {
        let imported = read(text.as_bytes()).unwrap();
        imported.trace.events.iter().map(|e| (e.tick.0, e.kind, e.id, e.bytes.get())).collect()
    }

    use EventKind::{Alloc, Free};

    #[test]
    fn buffers_become_events_in_the_order_of_time_frees_first() {
        let expected =
            [(0, Alloc, 9, 4), (2, Free, 9, 0), (2, Alloc, 3, 8), (2, Alloc, 1, 5), (5, Free, 3, 0), (6, Free, 1, 0)];
        assert_eq!(events("id,lower,upper,size\n3,2,5,8\n9,0,2,4\n1,2,6,5\n"), expected);
        assert_eq!(events("offset,size,colour,upper,lower,id\n0,8,x,5,2,3\n0,4,,2,0,9\n0,5,,6,2,1\n"), expected);
    }

    #[test]
    fn names_that_are_no_numbers_are_numbered() {
        let expected = [(0, Alloc, 0, 1), (0, Alloc, 1, 2), (1, Free, 0, 0), (1, Free, 1, 0)];
        assert_eq!(events("id,lower,upper,size\na,0,1,1\n1,0,1,2\n"), expected);
        assert_eq!(events("id,lower,upper,size\n01,0,1,1\n1,0,1,2\n"), expected);
    }

    #[test]
    fn what_is_wrong_is_named_with_line_and_column() {
        let cases = [
            ("1,5,5,1\n", "line 2, column 'upper': 5 is not after 5"),
            ("1,-1,5,1\n", "line 2, column 'lower': \"-1\" is not a time"),
            ("1,0,5,18446744073709551615\n", "line 2, column 'size'"),
            ("1,0,5,1\n1,0,5,1\n", "line 3, column 'id': it is there twice"),
            ("1,0,5\n", "line 2: 3 fields"),
            ("1,0,5,4611686018427387905\n", "line 2, column 'size'"),
            ("1,0,5,4611686018427387904\n2,0,5,4611686018427387904\n", "event 1 of what was made of it: no machine"),
            ("", "there is no event"),
        ];
        for (rows, expected) in cases {
            let error = read(format!("id,lower,upper,size\n{rows}").as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{rows:?} gives {error:?}, not {expected:?}");
        }
        let demands = "id,lower,upper,size,alignment,gaps\n";
        assert!(read(format!("{demands}1,0,5,1,1,\n2,0,5,1,,\n").as_bytes()).is_ok());
        for (row, column) in [("1,0,5,1,64,", "alignment"), ("1,0,5,1,1,2-3", "gaps")] {
            let error = read(format!("{demands}{row}\n").as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("line 2, column '{column}': no plan keeps that")), "{error}");
        }
        let error = read("id,lower,upper\n".as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "line 1: there is no column 'size'; a problem begins with id,lower,upper,size");
    }
}
