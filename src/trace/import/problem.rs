//! Problems of placement, and as traces: `id,lower,upper,size`, a buffer a row, live from `lower` until before `upper`.
//!
//! At a tick frees come before allocations, and otherwise the order of the file decides. Offsets and other columns are left out: a trace has no addresses.

use std::io::Read;

use foldhash::HashSet;

use super::Imported;
use crate::ids::StreamId;
use crate::lifetimes::{Change, changes};
use crate::limits;
use crate::trace::csv::table::{self, Layout, Table};
use crate::trace::{Context, Event, EventKind, TraceError};
use crate::units::{Bytes, Lifetime};

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

/// A problem of placement: its rows in the order of the file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rows {
    buffers: Vec<Row>,
    /// Their ids, one behind the other, and where each ends.
    ids: Vec<u8>,
    id_ends: Vec<usize>,
    /// All are numbers as one writes them.
    are_numbers: bool,
    /// What is left out.
    notes: Vec<String>,
}

/// A buffer that is to be placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// From when until before when it is live, in the problem's own time.
    pub lifetime: Lifetime,
    /// As many as it says: nothing, too.
    pub bytes: Bytes,
}

impl Rows {
    /// Reads a problem that is not compressed.
    pub(super) fn read(bytes: impl Read) -> Result<Rows, TraceError> {
        let mut table = Table::open(bytes, &LAYOUT)?;
        let has_offset = table.has(OFFSET);
        let mut rows = Rows { are_numbers: true, ..Rows::default() };
        let (mut numbers, mut names) = (HashSet::default(), HashSet::default());
        while let Some(row) = table.row()? {
            if rows.buffers.len() >= limits::TRACE_EVENTS_MAX / 2 {
                return Err(TraceError::TooLong);
            }
            let id = row.field(ID);
            // "1" and "01" are two names and one number.
            let number = number_of(id);
            rows.are_numbers &= number.is_some();
            let is_new = number.map_or_else(|| names.insert(id.to_vec()), |number| numbers.insert(number));
            if !is_new {
                return Err(row.order(ID, "it is there twice".into()));
            }
            rows.buffers.push(buffer(&row)?);
            rows.ids.extend_from_slice(id);
            rows.id_ends.push(rows.ids.len());
        }
        if rows.buffers.is_empty() {
            return Err(TraceError::Empty);
        }
        if has_offset {
            rows.notes.push("the offsets are left out: a trace has no addresses".into());
        }
        Ok(rows)
    }

    /// In the order of the file.
    pub fn buffers(&self) -> &[Row] {
        &self.buffers
    }

    /// What the file calls each, in its order.
    pub fn ids(&self) -> impl Iterator<Item = &[u8]> {
        let begins = [0].into_iter().chain(self.id_ends.iter().copied());
        begins.zip(&self.id_ends).map(|(from, to)| &self.ids[from..*to])
    }

    /// What was left out of the file, a sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Who comes and who goes, in the order of time: at a tick whoever goes is first, and else the order of the file decides.
    pub(crate) fn changes(&self) -> Vec<Change> {
        changes(&self.buffers.iter().map(|row| row.lifetime).collect::<Vec<_>>())
    }

    /// The trace of a job that would ask for these.
    pub(super) fn into_imported(self) -> Result<Imported, TraceError> {
        let mut notes = vec!["a problem has no streams, phases, modules and iterations".to_owned()];
        if !self.are_numbers {
            notes.push(
                "the ids are not all numbers, or have zeros before them: buffers are numbered in the order of the file"
                    .into(),
            );
        }
        let ids: Vec<u64> =
            self.ids().zip(0..).map(|(id, at)| number_of(id).filter(|_| self.are_numbers).unwrap_or(at)).collect();
        notes.extend(self.notes.iter().cloned());
        let event = |Change { tick, comes, of }: Change| Event {
            tick,
            kind: if comes { EventKind::Alloc } else { EventKind::Free },
            id: ids[of as usize],
            bytes: if comes { self.buffers[of as usize].bytes } else { Bytes::ZERO },
            stream: StreamId(0),
            iteration: 0,
            context: Context::default(),
            is_dynamic: false,
            device: 0,
            thread: 0,
        };
        let trace = super::build(self.changes().into_iter().map(event))?;
        Ok(Imported { trace, notes, is_one_iteration: true, is_problem: true, ..Imported::default() })
    }
}

/// The number that an id is, where it is written as numbers are.
fn number_of(id: &[u8]) -> Option<u64> {
    let is_plain = id.iter().all(u8::is_ascii_digit) && (id.len() == 1 || !id.starts_with(b"0"));
    std::str::from_utf8(id).ok().filter(|_| is_plain)?.parse().ok()
}

fn buffer(row: &table::Row<'_>) -> Result<Row, TraceError> {
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
    Ok(Row { lifetime: Lifetime::new(lower, upper), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Imported, TraceError> {
        Rows::read(text)?.into_imported()
    }

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
