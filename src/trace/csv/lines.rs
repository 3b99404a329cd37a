//! The lines of a text on their way to who takes them apart: none is without end, none ends inside quotes, and each ends in the same way.
//!
//! A parser gives what stands in an open quote as the last field of the last row, and a cut file, or one quote too many, would be a shorter trace. One that is
//! at the end of a row has not seen the second half of a CRLF yet, and its count of lines would be one too low.

use std::io::{Error, ErrorKind, Read};

use crate::limits;

/// A text that is passed on up to where it is no text of rows, as it is but for what ends its lines: a line feed behind each, the last one, too.
pub(super) struct Lines<R> {
    bytes: R,
    place: Place,
    /// The line that is being read, and that on which its row begins.
    line: u64,
    row_line: u64,
    /// The last byte was a carriage return that ends a line, with what comes next if that is a line feed.
    is_after_return: bool,
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
        Lines {
            bytes,
            place,
            line: 1,
            row_line: 1,
            is_after_return: false,
            row_len: 0,
            quote_line: 0,
            wrong_line: None,
        }
    }

    /// The line to name if reading has failed.
    pub(super) fn wrong_line(&self) -> Option<u64> {
        self.wrong_line
    }

    /// What is passed on for a byte.
    fn follow(&mut self, byte: u8) -> Option<u8> {
        if std::mem::take(&mut self.is_after_return) && byte == b'\n' {
            return None;
        }
        self.row_len += 1;
        self.place = match (self.place, byte) {
            (Place::Quoted, b'"') => Place::Quote,
            (Place::Quoted, _) | (Place::Quote, b'"') => {
                self.line += u64::from(byte == b'\n');
                Place::Quoted
            }
            (Place::FieldStart, b'"') => {
                self.quote_line = self.line;
                Place::Quoted
            }
            (_, b'\n' | b'\r') => {
                self.line += 1;
                (self.row_line, self.row_len) = (self.line, 0);
                self.is_after_return = byte == b'\r';
                self.place = Place::FieldStart;
                return Some(b'\n');
            }
            (_, b',') => Place::FieldStart,
            _ => Place::Field,
        };
        Some(byte)
    }

    /// Makes the bytes what is passed on for them, and says how many that are.
    fn pass_on(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let mut passed = 0;
        for at in 0..bytes.len() {
            if let Some(byte) = self.follow(bytes[at]) {
                bytes[passed] = byte;
                passed += 1;
            }
            if self.row_len > limits::TEXT_LINE_LEN_MAX {
                let what = format!("it is longer than {} bytes", limits::TEXT_LINE_LEN_MAX);
                return Err(self.refuse(self.row_line, what));
            }
        }
        Ok(passed)
    }

    fn refuse(&mut self, line: u64, what: String) -> Error {
        self.wrong_line = Some(line);
        Error::new(ErrorKind::InvalidData, what)
    }
}

impl<R: Read> Read for Lines<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            let len = self.bytes.read(into)?;
            if len > 0 {
                let passed = self.pass_on(&mut into[..len])?;
                if passed > 0 {
                    return Ok(passed);
                }
            } else if self.place == Place::Quoted {
                return Err(self.refuse(self.quote_line, "a quote that is opened there is never closed".to_owned()));
            } else if std::mem::take(&mut self.row_len) > 0 {
                into[0] = b'\n';
                return Ok(1);
            } else {
                return Ok(0);
            }
        }
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
        for text in ["a", "\"a\"", "a,\"b\"\"c\"", "a\"b", "\"a\"b\"", "\"a\nb\"", "a,\"\"", "\"\"\"\""] {
            assert_eq!(through(text.as_bytes()), (format!("{text}\n").into_bytes(), None), "{text:?}");
        }
        for (text, line) in [("\"", 1), ("a\nb,\"c\nd\ne", 2), ("\"a\nb\"\n\n\"\"\"", 4), ("a,\"b\"\",\n", 1)] {
            assert_eq!(through(text.as_bytes()).1, Some(line), "{text:?}");
        }
    }

    #[test]
    fn lines_end_in_a_line_feed_whatever_they_end_in() {
        for (text, passed) in [
            ("", ""),
            ("a\n", "a\n"),
            ("a\r\nb\r\n\r\nc", "a\nb\n\nc\n"),
            ("a\rb\r\rc\r", "a\nb\n\nc\n"),
            ("\"a\r\nb\r\"\r\n", "\"a\r\nb\r\"\n"),
        ] {
            assert_eq!(through(text.as_bytes()), (passed.as_bytes().to_vec(), None), "{text:?}");
            // A byte at a time: nothing to pass on is not the end.
            let mut lines = Lines::new(text.as_bytes());
            let (mut one, mut all) = ([0], Vec::new());
            while lines.read(&mut one).unwrap() > 0 {
                all.push(one[0]);
            }
            assert_eq!(all, passed.as_bytes(), "{text:?}");
        }
        assert_eq!(through(b"a\rb\r\n\"c\r\nd\"\r\n\"").1, Some(5), "a quote that is open");
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
