//! Writes binary traces, event by event; memory stays as it is however long the trace is, but for the names of its modules.

use std::collections::{HashMap, HashSet};
use std::io::{Error, ErrorKind, Write};

use super::book::{Book, Line};
use super::{
    CHUNK, DYNAMIC, END, EVENTS, FORETOLD, KNOWN, MAGIC, MICROBATCH, MODULE, NAME, NEW, RARE, RARE_BYTES, RARE_DEVICE,
    RARE_ITERATION, RARE_THREAD, RECORDING, REMARKS, Remarks, SAME_CONTEXT, SAME_ID, STREAM, TICK_FOLLOWS, TICK_SHIFT,
    VERSION, checksum, zigzag,
};
use crate::limits;
use crate::trace::{Event, EventKind, Phase, Trace};

/// A block is written once it is so long.
const BLOCK_LEN: usize = 32 << 10;

/// A binary trace that is being written.
pub struct Writer<W: Write> {
    out: W,
    book: Book,
    /// Where each line stands in the book.
    index: HashMap<Line, u32>,
    names: HashSet<String>,
    block: u64,
    bytes: Vec<u8>,
    events: u64,
    /// Bytes that were given to `out`.
    written: u64,
}

impl<W: Write> std::fmt::Debug for Writer<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("events", &self.events).field("block", &self.block).finish_non_exhaustive()
    }
}

/// Writes a whole trace.
///
/// # Errors
///
/// As [`Writer::push`].
pub fn write(out: impl Write, trace: &Trace) -> std::io::Result<()> {
    let mut writer = Writer::new(out)?;
    for event in &trace.events {
        writer.push(event, &trace.modules)?;
    }
    writer.finish(&trace.modules).map(drop)
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

impl<W: Write> Writer<W> {
    /// Begins a trace.
    ///
    /// # Errors
    ///
    /// What `out` says.
    pub fn new(out: W) -> std::io::Result<Writer<W>> {
        Writer::of(VERSION, out)
    }

    /// Begins a recording: a trace that can be read before it is finished, as far as it was flushed.
    ///
    /// # Errors
    ///
    /// What `out` says.
    pub fn recording(out: W) -> std::io::Result<Writer<W>> {
        Writer::of(RECORDING, out)
    }

    fn of(version: u16, mut out: W) -> std::io::Result<Writer<W>> {
        out.write_all(MAGIC)?;
        out.write_all(&version.to_le_bytes())?;
        let (book, index) = (Book::default(), HashMap::new());
        let written = (MAGIC.len() + size_of_val(&version)) as u64;
        Ok(Writer { out, book, index, names: HashSet::new(), block: 0, bytes: Vec::new(), events: 0, written })
    }

    /// Bytes of the file so far, without what is not flushed.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Gives all that came to `out`, behind it what there is to say, and has `out` pass it on. Of a recording: other traces have no place for remarks.
    ///
    /// # Errors
    ///
    /// What `out` says.
    pub fn flush(&mut self, remarks: &Remarks) -> std::io::Result<()> {
        if !self.bytes.is_empty() {
            self.block(EVENTS)?;
        }
        for (code, number) in remarks.numbers() {
            self.number(code);
            self.number(number);
        }
        if !self.bytes.is_empty() {
            self.block(REMARKS)?;
        }
        self.out.flush()
    }

    /// Adds an event. `modules` are the names so far, the empty one first; later calls may have more of them.
    ///
    /// # Errors
    ///
    /// What `out` says; [`ErrorKind::InvalidInput`] for what no reader would take: ticks that go back, a module without a name, names that are there twice.
    pub fn push(&mut self, event: &Event, modules: &[String]) -> std::io::Result<()> {
        let module = event.context.module as usize;
        if module >= modules.len() {
            return Err(invalid(format!("event {} is in module {module} of {}", self.events, modules.len())));
        }
        self.name_up_to(module, modules)?;
        let Some(line) = self.book.line_of(event) else {
            return Err(invalid(format!("event {}: tick {} comes after a later one", self.events, event.tick)));
        };
        let foretold = self.book.foretold().filter(|index| self.book.line(*index as usize) == Some(line));
        let index = if let Some(index) = foretold {
            self.number(FORETOLD);
            index
        } else if let Some(index) = self.index.get(&line).copied() {
            self.number(KNOWN + (self.book.len() as u64 - 1 - u64::from(index)));
            index
        } else {
            self.number(NEW);
            self.line(&line);
            let (index, is_new_book) = self.book.add(line);
            if is_new_book {
                self.index.clear();
            }
            self.index.insert(line, index);
            index
        };
        self.book.note(index, &line, event);
        self.events += 1;
        if self.bytes.len() >= BLOCK_LEN { self.block(EVENTS) } else { Ok(()) }
    }

    /// Ends the trace. `modules` are all names, whether an event was in them or not.
    ///
    /// # Errors
    ///
    /// As [`Writer::push`].
    pub fn finish(mut self, modules: &[String]) -> std::io::Result<W> {
        if let Some(last) = modules.len().checked_sub(1) {
            self.name_up_to(last, modules)?;
        }
        if !self.bytes.is_empty() {
            self.block(EVENTS)?;
        }
        self.number(self.events);
        self.number(self.names.len() as u64);
        self.block(END)?;
        self.out.flush()?;
        Ok(self.out)
    }

    /// Names all modules up to this one that have no name yet.
    fn name_up_to(&mut self, module: usize, modules: &[String]) -> std::io::Result<()> {
        for name in modules.iter().take(module + 1).skip(self.names.len() + 1) {
            if name.len() > limits::TRACE_MODULE_LEN_MAX {
                return Err(invalid(format!("the name of a module has {} bytes", name.len())));
            }
            if name.is_empty() || !self.names.insert(name.clone()) {
                return Err(invalid(format!("there are two modules called '{name}'")));
            }
            self.number(NAME);
            self.number(name.len() as u64);
            self.bytes.extend_from_slice(name.as_bytes());
            if self.bytes.len() >= BLOCK_LEN {
                self.block(EVENTS)?;
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &Line) {
        let last = *self.book.last();
        let kind = position(&EventKind::ALL, line.kind);
        let has_bytes = line.kind != EventKind::Alloc && line.bytes != 0;
        let rare = flag(RARE_ITERATION, line.iterations != 0)
            | flag(RARE_BYTES, has_bytes)
            | flag(RARE_DEVICE, line.device != last.device)
            | flag(RARE_THREAD, line.thread != last.thread);
        let context = line.context;
        let differs = flag(STREAM, line.stream != last.stream)
            | flag(MODULE, context.module != last.context.module)
            | flag(MICROBATCH, context.microbatch != last.context.microbatch)
            | flag(CHUNK, context.chunk != last.context.chunk);
        let is_same = differs == 0 && (context.phase, line.is_dynamic) == (last.context.phase, last.is_dynamic);
        let ticks = line.ticks.min(u64::from(TICK_FOLLOWS)) as u8;
        let first = kind
            | (ticks << TICK_SHIFT)
            | flag(SAME_CONTEXT, is_same)
            | flag(SAME_ID, line.distance == 0)
            | flag(RARE, rare != 0);
        self.bytes.push(first);
        if rare != 0 {
            self.bytes.push(rare);
        }
        if !is_same {
            self.bytes.push(position(&Phase::ALL, context.phase) | flag(DYNAMIC, line.is_dynamic) | differs);
        }
        let option = |n: Option<u32>| n.map_or(0, |n| u64::from(n) + 1);
        let numbers = [
            (ticks == TICK_FOLLOWS, line.ticks),
            (line.distance != 0, zigzag(line.distance)),
            (line.kind == EventKind::Alloc || has_bytes, line.bytes),
            (differs & STREAM != 0, line.stream),
            (differs & MODULE != 0, u64::from(context.module)),
            (differs & MICROBATCH != 0, option(context.microbatch)),
            (differs & CHUNK != 0, option(context.chunk)),
            (rare & RARE_ITERATION != 0, zigzag(i64::from(line.iterations as i32) as u64)),
            (rare & RARE_DEVICE != 0, u64::from(line.device)),
            (rare & RARE_THREAD != 0, u64::from(line.thread)),
        ];
        for (_, number) in numbers.into_iter().filter(|(is_there, _)| *is_there) {
            self.number(number);
        }
    }

    fn number(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.bytes.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.bytes.push(n as u8);
    }

    fn block(&mut self, kind: u8) -> std::io::Result<()> {
        self.out.write_all(&[kind])?;
        self.out.write_all(&(self.bytes.len() as u32).to_le_bytes())?;
        self.out.write_all(&self.bytes)?;
        self.out.write_all(&checksum(self.block, kind, &self.bytes).to_le_bytes())?;
        self.written += 9 + self.bytes.len() as u64;
        self.bytes.clear();
        self.block += 1;
        Ok(())
    }
}

fn flag(bit: u8, is_set: bool) -> u8 {
    if is_set { bit } else { 0 }
}

fn position<T: PartialEq + Copy>(all: &[(&'static str, T)], wanted: T) -> u8 {
    all.iter().position(|(_, one)| *one == wanted).expect("the list has every one") as u8
}
