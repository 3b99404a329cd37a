//! Rows of a CSV file, their fields by the names of the columns. Not for what the fields mean.

use std::io::Read;
use std::str::FromStr;

use super::lines::Lines;
use crate::trace::TraceError;

/// What the header of a kind of file has.
pub(in crate::trace) struct Layout {
    /// The columns that mean something; unknown ones are somebody else's.
    pub(in crate::trace) columns: &'static [&'static str],
    /// How many of them, from the first, must be there.
    pub(in crate::trace) required: usize,
    /// What to say where one is not.
    pub(in crate::trace) needs: &'static str,
}

/// A file that is being read.
pub(in crate::trace) struct Table<R> {
    reader: ::csv::Reader<Lines<R>>,
    layout: &'static Layout,
    /// Where each known column stands.
    places: Vec<Option<usize>>,
    count: usize,
    record: ::csv::ByteRecord,
    line: u64,
}

impl<R: Read> Table<R> {
    /// Reads the header.
    pub(in crate::trace) fn open(bytes: R, layout: &'static Layout) -> Result<Table<R>, TraceError> {
        let mut reader = ::csv::ReaderBuilder::new().flexible(true).from_reader(Lines::new(bytes));
        let header = reader.byte_headers().cloned();
        let header = header.map_err(|error| broken(reader.get_ref().wrong_line().unwrap_or(1), error))?;
        let mut places = vec![None; layout.columns.len()];
        for (at, name) in header.iter().enumerate() {
            let known =
                layout.columns.iter().zip(&mut places).find(|(column, _)| column.as_bytes() == name.trim_ascii());
            if let Some((column, place)) = known
                && place.replace(at).is_some()
            {
                return Err(TraceError::TwiceColumn { column });
            }
        }
        match layout.columns.iter().zip(&places).take(layout.required).find(|(_, place)| place.is_none()) {
            Some((column, _)) => Err(TraceError::NoColumn { column, needs: layout.needs }),
            None => {
                let count = header.len();
                Ok(Table { reader, layout, places, count, record: ::csv::ByteRecord::new(), line: 1 })
            }
        }
    }

    /// The next row; nothing at the end.
    pub(in crate::trace) fn row(&mut self) -> Result<Option<Row<'_>>, TraceError> {
        let line = self.line;
        match self.reader.read_byte_record(&mut self.record) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => return Err(broken(self.reader.get_ref().wrong_line().unwrap_or(line + 1), error)),
        }
        // The parser's own position of a record is before empty lines, and is now on the line behind it. Each ends in a line feed, and has those of its fields.
        let within = self.record.as_slice().iter().filter(|byte| **byte == b'\n').count() as u64;
        self.line = self.reader.position().line().saturating_sub(1 + within);
        if self.record.len() != self.count {
            return Err(TraceError::Fields { line: self.line, found: self.record.len(), expected: self.count });
        }
        Ok(Some(Row { layout: self.layout, places: &self.places, record: &self.record, line: self.line }))
    }

    /// The file has this column.
    pub(in crate::trace) fn has(&self, column: usize) -> bool {
        self.places.get(column).is_some_and(Option::is_some)
    }
}

fn broken(line: u64, error: ::csv::Error) -> TraceError {
    let line = error.position().map_or(line, ::csv::Position::line);
    TraceError::Read { line, source: std::io::Error::from(error) }
}

/// One row. Columns are asked for by their index in [`Layout::columns`].
pub(in crate::trace) struct Row<'a> {
    layout: &'static Layout,
    places: &'a [Option<usize>],
    record: &'a ::csv::ByteRecord,
    /// On which line of the file it begins.
    pub(in crate::trace) line: u64,
}

impl Row<'_> {
    /// The field without the space around it, empty where the file has no such column.
    pub(in crate::trace) fn field(&self, column: usize) -> &[u8] {
        self.whole(column).trim_ascii()
    }

    /// The field as it stands.
    pub(in crate::trace) fn whole(&self, column: usize) -> &[u8] {
        self.places.get(column).copied().flatten().and_then(|at| self.record.get(at)).unwrap_or_default()
    }

    pub(in crate::trace) fn error(&self, column: usize, expected: &'static str) -> TraceError {
        const SHOWN: usize = 40;
        let mut found = String::from_utf8_lossy(self.field(column)).into_owned();
        if let Some((cut, _)) = found.char_indices().nth(SHOWN) {
            found.truncate(cut);
            found.push('…');
        }
        TraceError::Field { line: self.line, column: self.name_of(column), found, expected }
    }

    pub(in crate::trace) fn order(&self, column: usize, what: String) -> TraceError {
        TraceError::Order { line: self.line, column: self.name_of(column), what }
    }

    fn name_of(&self, column: usize) -> &'static str {
        self.layout.columns.get(column).copied().unwrap_or_default()
    }

    pub(in crate::trace) fn number<T: FromStr>(&self, column: usize, expected: &'static str) -> Result<T, TraceError> {
        let text = std::str::from_utf8(self.field(column)).unwrap_or("?");
        // FromStr takes a leading plus; the format does not.
        text.parse().ok().filter(|_| !text.starts_with('+')).ok_or_else(|| self.error(column, expected))
    }

    pub(in crate::trace) fn optional<T: FromStr>(&self, column: usize) -> Result<Option<T>, TraceError> {
        if self.field(column).is_empty() {
            return Ok(None);
        }
        self.number(column, "a number or nothing").map(Some)
    }

    pub(in crate::trace) fn name<T: Copy>(
        &self,
        column: usize,
        names: &[(&'static str, T)],
        expected: &'static str,
    ) -> Result<T, TraceError> {
        let field = self.field(column);
        let found = names.iter().find(|(name, _)| name.as_bytes() == field);
        found.map(|(_, value)| *value).ok_or_else(|| self.error(column, expected))
    }
}
