//! The lines of a text on their way to who takes them apart: none is without end, and none ends inside quotes.
//!
//! A parser gives what stands in an open quote as the last field of the last row, and a cut file, or one quote too many, would be a shorter trace.

use std::io::{Error, ErrorKind, Read};

use crate::limits;

/// A text that is passed on as it is, up to where it is no text of rows.
pub(super) struct Lines<R> {
    bytes: R,
    place: Place,
    /// The line that is being read, and that on which its row begins.
    line: u64,
    row_line: u64,
    /// Bytes of the row so far.
    row_len: usize,
    /// On which line the open quote stands.
    quote_line: u64,
    /// What was refused stands on this line.
    wrong_line: Option<u64>,
}

/// Where in a row the next byte stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    FieldStart,
    Field,
    Quoted,
    /// Behind a quote that closes, or is the first of two that stand for one.
    Quote,
}

impl<R> Lines<R> {
    pub(super) fn new(bytes: R) -> Lines<R> {
        let place = Place::FieldStart;
        Lines { bytes, place, line: 1, row_line: 1, row_len: 0, quote_line: 0, wrong_line: None }
    }

    /// The line to name if reading has failed.
    pub(super) fn wrong_line(&self) -> Option<u64> {
        self.wrong_line
    }

    fn follow(&mut self, byte: u8) {
        self.row_len += 1;
        self.line += u64::from(byte == b'\n');
        self.place = match (self.place, byte) {
            (Place::Quoted, b'"') => Place::Quote,
            (Place::Quoted, _) | (Place::Quote, b'"') => Place::Quoted,
            (Place::FieldStart, b'"') => {
                self.quote_line = self.line;
                Place::Quoted
            }
            (_, b'\n' | b'\r') => {
                (self.row_line, self.row_len) = (self.line, 0);
                Place::FieldStart
            }
            (_, b',') => Place::FieldStart,
            _ => Place::Field,
        };
    }

    fn refuse(&mut self, line: u64, what: String) -> Error {
        self.wrong_line = Some(line);
        Error::new(ErrorKind::InvalidData, what)
    }
}

impl<R: Read> Read for Lines<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = self.bytes.read(into)?;
        if len == 0 && !into.is_empty() && self.place == Place::Quoted {
            return Err(self.refuse(self.quote_line, "a quote that is opened there is never closed".to_owned()));
        }
        for byte in into.iter().take(len) {
            self.follow(*byte);
            if self.row_len > limits::TEXT_LINE_LEN_MAX {
                let what = format!("it is longer than {} bytes", limits::TEXT_LINE_LEN_MAX);
                return Err(self.refuse(self.row_line, what));
            }
        }
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes through, and the line that is refused.
    fn through(text: &[u8]) -> (Vec<u8>, Option<u64>) {
        let mut lines = Lines::new(text);
        let mut read = Vec::new();
        let failed = lines.read_to_end(&mut read).is_err();
        assert_eq!(failed, lines.wrong_line().is_some());
        (read, lines.wrong_line())
    }

    #[test]
    fn a_quote_that_is_not_closed_is_refused_where_it_is_opened() {
        for text in ["", "a", "\"a\"", "a,\"b\"\"c\"\n", "a\"b", "\"a\"b\"", "\"a\nb\"\r\n", "a,\"\"", "\"\"\"\""] {
            assert_eq!(through(text.as_bytes()), (text.as_bytes().to_vec(), None), "{text:?}");
        }
        for (text, line) in [("\"", 1), ("a\nb,\"c\nd\ne", 2), ("\"a\nb\"\n\n\"\"\"", 4), ("a,\"b\"\",\n", 1)] {
            assert_eq!(through(text.as_bytes()).1, Some(line), "{text:?}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused_where_it_begins() {
        let most = limits::TEXT_LINE_LEN_MAX;
        for (before, fill) in [("", 'x'), ("a\nb\n", '\0'), ("a\n\"", '\n'), ("a\r\nb,\"", 'x')] {
            let line = 1 + before.matches('\n').count() as u64;
            let text = format!("{before}{}", fill.to_string().repeat(most + 1));
            assert_eq!(through(text.as_bytes()).1, Some(line), "{before:?} and then {fill:?}");
        }
        let long = format!("{}\n", "x".repeat(most - 1)).repeat(2);
        assert_eq!(through(long.as_bytes()).1, None);
    }
}
