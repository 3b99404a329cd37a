//! Answers to problems of placement, of whatever solver: `id,offset`, and as much of the problem as stands beside.

use std::io::Read;
use std::path::Path;

use foldhash::HashMap;

use crate::trace::TraceError;
use crate::trace::csv::table::{Layout, Table};
use crate::trace::unpack::Unpacked;

const LAYOUT: Layout = Layout {
    columns: &["id", "offset", "lower", "upper", "size"],
    required: 2,
    needs: "an answer has a row for each buffer, with its id and its offset",
};
const ID: usize = 0;
const OFFSET: usize = 1;
/// `lower`, `upper`, `size`.
const FIGURES: [usize; 3] = [2, 3, 4];
const NUMBER: &str = "a number from 0 to 2^64";

/// Where a buffer is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// Its first byte.
    pub offset: u64,
    /// What the answer says of its `lower`, `upper` and `size`, where it does.
    pub figures: [Option<u64>; 3],
}

/// Reads an answer: what is placed, by its id. Compressed ones, too.
pub fn read_answer(path: &Path) -> Result<HashMap<Vec<u8>, Placed>, TraceError> {
    read(super::open(path)?)
}

fn read(bytes: impl Read) -> Result<HashMap<Vec<u8>, Placed>, TraceError> {
    let mut table =
        Table::open(Unpacked::open(bytes).map_err(|source| TraceError::Read { line: 1, source })?, &LAYOUT)?;
    let has = FIGURES.map(|column| table.has(column));
    let mut placed = HashMap::default();
    while let Some(row) = table.row()? {
        let mut figures = [None; 3];
        for ((figure, column), _) in figures.iter_mut().zip(FIGURES).zip(has).filter(|(_, has)| *has) {
            *figure = Some(row.number(column, NUMBER)?);
        }
        let found = Placed { offset: row.number(OFFSET, NUMBER)?, figures };
        if placed.insert(row.field(ID).to_vec(), found).is_some() {
            return Err(row.order(ID, format!("{:?} is there twice", String::from_utf8_lossy(row.field(ID)))));
        }
    }
    Ok(placed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_in_any_order_and_what_is_not_said_is_not_known() {
        let answer = read("offset,note,id,size\n0,x,a,5\n7,,\"b,\",6\n".as_bytes()).unwrap();
        assert_eq!(answer[&b"a"[..]], Placed { offset: 0, figures: [None, None, Some(5)] });
        assert_eq!(answer[&b"b,"[..]], Placed { offset: 7, figures: [None, None, Some(6)] });
        assert_eq!(answer.len(), 2);
        assert!(read("id,offset\n".as_bytes()).unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_is_named_with_line_and_column() {
        for (text, expected) in [
            ("id,place\na,0\n", "line 1: there is no column 'offset'; an answer has a row for each buffer"),
            ("id,offset\r\na,0\r\nb,-2\r\n", "line 3, column 'offset': \"-2\" is not a number"),
            ("id,offset\na,0\n\n\"a\",0\n", "line 4, column 'id': \"a\" is there twice"),
            ("id,offset,size\na,0,\n", "line 2, column 'size': \"\" is not a number"),
            ("id,offset\na\n", "line 2: 1 fields"),
        ] {
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
