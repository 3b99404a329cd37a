//! Reads binary traces, strictly: whatever no writer gives is refused, with the block and the byte.

use std::io::{BufRead, BufReader, Read};

use super::book::{Book, Line};
use super::{
    CHUNK, DYNAMIC, END, EVENTS, FORETOLD, KNOWN, MAGIC, MICROBATCH, MODULE, NAME, NEW, RARE, RARE_BYTES, RARE_DEVICE,
    RARE_ITERATION, RARE_THREAD, RECORDING, REMARKS, Remarks, SAME_CONTEXT, SAME_ID, STREAM, TICK_FOLLOWS, TICK_SHIFT,
    VERSION, checksum, unzigzag,
};
use crate::limits;
use crate::trace::builder::{Builder, RuleError};
use crate::trace::{Context, EventKind, Flaw, Phase, Trace, TraceError};

/// What is in a file.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The events.
    pub trace: Trace,
    /// What is missing from a recording.
    pub remarks: Remarks,
}

/// Reads a binary trace that is not compressed, without what it says of itself.
///
/// # Errors
///
/// As [`read_recorded`].
pub fn read(bytes: impl Read) -> Result<Trace, TraceError> {
    Ok(read_recorded(bytes)?.trace)
}

/// Reads a binary trace that is not compressed.
///
/// # Errors
///
/// [`TraceError::Block`] with the place and what is wrong there, [`TraceError::TooLong`], [`TraceError::Empty`].
pub fn read_recorded(bytes: impl Read) -> Result<Recorded, TraceError> {
    let mut source = Source { bytes: BufReader::new(bytes), at: 0, block: 0 };
    let is_recording = source.header()? == RECORDING;
    let (book, remarks) = (Book::default(), Remarks::default());
    let mut text = Text { builder: Builder::default(), book, events: 0, modules: 0, remarks };
    let mut payload = Vec::new();
    loop {
        let whole = source.at;
        let kind = match source.block(&mut payload) {
            Err(TraceError::Block { flaw: Flaw::Cut, .. }) if is_recording => {
                text.remarks.cut = Some(whole);
                break;
            }
            kind => kind?,
        };
        let mut cursor = Cursor { bytes: &payload, at: 0 };
        // Where in the payload an error is: at the beginning of what could not be read.
        let mut begin = 0;
        let read = match kind {
            EVENTS => text.codes(&mut cursor, &mut begin),
            REMARKS if is_recording => text.remarks(&mut cursor, &mut begin),
            END => text.end(&mut cursor),
            found => Err(Flaw::Kind { found }),
        };
        read.map_err(|flaw| match flaw {
            Flaw::Rule(RuleError::TooLong) => TraceError::TooLong,
            flaw => source.wrong(source.at - CHECKSUM_LEN - payload.len() as u64 + begin as u64, flaw),
        })?;
        if kind == END {
            source.nothing_more()?;
            break;
        }
        source.block += 1;
    }
    let trace = text.builder.finish().ok_or(TraceError::Empty)?;
    Ok(Recorded { trace, remarks: text.remarks })
}

const CHECKSUM_LEN: u64 = 4;

/// The blocks of a file.
struct Source<R> {
    bytes: BufReader<R>,
    at: u64,
    block: u64,
}

impl<R: Read> Source<R> {
    fn wrong(&self, at: u64, flaw: Flaw) -> TraceError {
        TraceError::Block { block: self.block, at, flaw }
    }

    fn take<const LEN: usize>(&mut self) -> Result<[u8; LEN], TraceError> {
        let mut taken = [0; LEN];
        let read = self.bytes.read_exact(&mut taken);
        read.map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => self.wrong(self.at, Flaw::Cut),
            _ => self.wrong(self.at, Flaw::Read(error)),
        })?;
        self.at += LEN as u64;
        Ok(taken)
    }

    /// The version.
    fn header(&mut self) -> Result<u16, TraceError> {
        if self.take()? != *MAGIC {
            return Err(self.wrong(0, Flaw::NotATrace));
        }
        match u16::from_le_bytes(self.take()?) {
            version @ (VERSION | RECORDING) => Ok(version),
            found => Err(self.wrong(MAGIC.len() as u64, Flaw::Version { found })),
        }
    }

    /// The next block's kind, and its bytes.
    fn block(&mut self, payload: &mut Vec<u8>) -> Result<u8, TraceError> {
        let begin = self.at;
        let [kind] = self.take()?;
        let len = u32::from_le_bytes(self.take()?);
        if len > limits::TRACE_BLOCK_LEN_MAX {
            return Err(self.wrong(begin, Flaw::Length { found: len }));
        }
        payload.clear();
        // Grows with what is there, whatever the length claims.
        let read = self.bytes.by_ref().take(u64::from(len)).read_to_end(payload);
        read.map_err(|error| self.wrong(self.at + payload.len() as u64, Flaw::Read(error)))?;
        self.at += payload.len() as u64;
        if payload.len() as u64 != u64::from(len) {
            return Err(self.wrong(self.at, Flaw::Cut));
        }
        let found = u32::from_le_bytes(self.take()?);
        match checksum(self.block, kind, payload) {
            expected if expected == found => Ok(kind),
            expected => Err(self.wrong(begin, Flaw::Checksum { expected, found })),
        }
    }

    fn nothing_more(&mut self) -> Result<(), TraceError> {
        match self.bytes.fill_buf() {
            Ok([]) => Ok(()),
            Ok(_) => Err(self.wrong(self.at, Flaw::Trailing)),
            Err(error) => Err(self.wrong(self.at, Flaw::Read(error))),
        }
    }
}

/// What a block still has.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

const SHORT: Flaw = Flaw::Value { what: "the block ends inside an event" };

fn value(what: &'static str) -> Flaw {
    Flaw::Value { what }
}

impl Cursor<'_> {
    fn is_empty(&self) -> bool {
        self.at >= self.bytes.len()
    }

    fn byte(&mut self) -> Result<u8, Flaw> {
        let byte = *self.bytes.get(self.at).ok_or(SHORT)?;
        self.at += 1;
        Ok(byte)
    }

    fn number(&mut self) -> Result<u64, Flaw> {
        let first = self.byte()?;
        let mut number = u64::from(first & 0x7f);
        let (mut byte, mut shift) = (first, 7);
        while byte & 0x80 != 0 {
            byte = self.byte()?;
            let part = u64::from(byte & 0x7f);
            if shift > 63 || (shift == 63 && part > 1) {
                return Err(value("a number is longer than any"));
            }
            if byte == 0 {
                return Err(value("a number is longer than it need be"));
            }
            number |= part << shift;
            shift += 7;
        }
        Ok(number)
    }

    fn short(&mut self) -> Result<u32, Flaw> {
        u32::try_from(self.number()?).map_err(|_| value("a number is too large for where it stands"))
    }

    /// 0 for nothing, else one more than the number.
    fn option(&mut self) -> Result<Option<u32>, Flaw> {
        match self.number()?.checked_sub(1) {
            None => Ok(None),
            Some(n) => Ok(Some(u32::try_from(n).map_err(|_| value("a number is too large for where it stands"))?)),
        }
    }

    fn text(&mut self, len: u64) -> Result<&str, Flaw> {
        let len = usize::try_from(len).ok().filter(|len| *len <= limits::TRACE_MODULE_LEN_MAX);
        let len = len.ok_or(value("the name of a module is too long"))?;
        let bytes = self.bytes.get(self.at..).and_then(|rest| rest.get(..len)).ok_or(SHORT)?;
        self.at += len;
        std::str::from_utf8(bytes).map_err(|_| value("the name of a module is not UTF-8"))
    }
}

/// What has been read.
struct Text {
    builder: Builder,
    book: Book,
    events: u64,
    modules: u32,
    remarks: Remarks,
}

impl Text {
    fn codes(&mut self, cursor: &mut Cursor<'_>, begin: &mut usize) -> Result<(), Flaw> {
        while !cursor.is_empty() {
            *begin = cursor.at;
            let (index, line) = match cursor.number()? {
                FORETOLD => {
                    let index = self.book.foretold().ok_or(value("nothing is foretold here"))?;
                    (index, self.book.line(index as usize).ok_or(value("nothing is foretold here"))?)
                }
                NEW => {
                    let line = self.line(cursor)?;
                    (self.book.add(line).0, line)
                }
                NAME => {
                    self.name(cursor)?;
                    continue;
                }
                known => {
                    let back = usize::try_from(known - KNOWN).unwrap_or(usize::MAX);
                    let index = self.book.len().checked_sub(1).and_then(|newest| newest.checked_sub(back));
                    let line = index.and_then(|index| Some((index as u32, self.book.line(index)?)));
                    line.ok_or(value("the book has no such line"))?
                }
            };
            let event = self.book.event(&line).ok_or(value("no tick is so late"))?;
            self.builder.push(event).map_err(Flaw::Rule)?;
            self.book.note(index, &line, &event);
            self.events += 1;
        }
        Ok(())
    }

    fn name(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Flaw> {
        let len = cursor.number()?;
        let name = cursor.text(len)?;
        let next = self.modules.checked_add(1).ok_or(value("there are too many modules"))?;
        if self.builder.module(name) != next {
            return Err(value("the name of a module is there twice"));
        }
        self.modules = next;
        Ok(())
    }

    fn line(&mut self, cursor: &mut Cursor<'_>) -> Result<Line, Flaw> {
        let last = *self.book.last();
        let first = cursor.byte()?;
        let kind = EventKind::ALL.get(usize::from(first & 7)).ok_or(value("there is no such kind of event"))?.1;
        let rare = if first & RARE != 0 { cursor.byte()? } else { 0 };
        if rare & !(RARE_ITERATION | RARE_BYTES | RARE_DEVICE | RARE_THREAD) != 0 || (first & RARE != 0 && rare == 0) {
            return Err(value("the flags of an event are none that there are"));
        }
        let (mut phase, mut is_dynamic, mut differs) = (last.context.phase, last.is_dynamic, 0);
        if first & SAME_CONTEXT == 0 {
            differs = cursor.byte()?;
            phase = Phase::ALL.get(usize::from(differs & 7)).ok_or(value("there is no such phase"))?.1;
            is_dynamic = differs & DYNAMIC != 0;
        }
        let ticks = (first >> TICK_SHIFT) & TICK_FOLLOWS;
        let has_bytes = kind == EventKind::Alloc || rare & RARE_BYTES != 0;
        let follows = |flags: u8, bit: u8| flags & bit != 0;
        let context = last.context;
        // In the order in which they are written.
        Ok(Line {
            ticks: if ticks == TICK_FOLLOWS { cursor.number()? } else { u64::from(ticks) },
            distance: if follows(first, SAME_ID) { 0 } else { unzigzag(cursor.number()?) },
            bytes: if has_bytes { cursor.number()? } else { 0 },
            stream: if follows(differs, STREAM) { cursor.number()? } else { last.stream },
            context: Context {
                phase,
                module: if follows(differs, MODULE) { cursor.short()? } else { context.module },
                microbatch: if follows(differs, MICROBATCH) { cursor.option()? } else { context.microbatch },
                chunk: if follows(differs, CHUNK) { cursor.option()? } else { context.chunk },
            },
            iterations: if follows(rare, RARE_ITERATION) { unzigzag(u64::from(cursor.short()?)) as u32 } else { 0 },
            device: if follows(rare, RARE_DEVICE) { cursor.short()? } else { last.device },
            thread: if follows(rare, RARE_THREAD) { cursor.short()? } else { last.thread },
            kind,
            is_dynamic,
        })
    }

    fn remarks(&mut self, cursor: &mut Cursor<'_>, begin: &mut usize) -> Result<(), Flaw> {
        while !cursor.is_empty() {
            *begin = cursor.at;
            let (code, number) = (cursor.number()?, cursor.number()?);
            self.remarks.note(code, number)?;
        }
        Ok(())
    }

    fn end(&self, cursor: &mut Cursor<'_>) -> Result<(), Flaw> {
        let counts = [("events", self.events), ("modules", u64::from(self.modules))];
        for (what, found) in counts {
            let expected = cursor.number()?;
            if expected != found {
                return Err(Flaw::Count { what, expected, found });
            }
        }
        if cursor.is_empty() { Ok(()) } else { Err(value("the end has more than two numbers")) }
    }
}
