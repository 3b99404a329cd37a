//! Where recorded events go: into memory up to a bound, or into a file as a binary trace.
//!
//! Not for: when they go there ([`super::Recorder`]), and not for opening files.

use std::io::Write;

use crate::limits;
use crate::trace::binary::{Remarks, Stopped, Writer};
use crate::trace::{Event, Trace};

/// Why a recording goes no further.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// A limit is reached.
    #[error("{}", .0.words())]
    Limit(Stopped),
    /// The file takes no more.
    #[error("cannot write the recording")]
    File(#[from] std::io::Error),
}

/// Takes events one by one.
pub trait Sink {
    /// Takes the next. `modules` are the names so far; later calls may have more.
    ///
    /// # Errors
    ///
    /// Why it takes no more: then it has what it took before.
    fn push(&mut self, event: &Event, modules: &[String]) -> Result<(), Stop>;

    /// Puts what it has where it outlives the process, with what there is to say of it so far.
    ///
    /// # Errors
    ///
    /// As [`Sink::push`].
    fn flush(&mut self, remarks: &Remarks) -> Result<(), Stop>;

    /// Nothing more comes.
    ///
    /// # Errors
    ///
    /// As [`Sink::push`].
    fn finish(&mut self, modules: &[String], remarks: &Remarks) -> Result<(), Stop>;
}

/// Events in memory, up to a bound.
#[derive(Debug)]
pub struct Collected {
    trace: Trace,
    events_max: usize,
}

impl Collected {
    /// Room for so many events, of some ninety bytes each, which are taken as they come.
    pub fn up_to(events_max: usize) -> Collected {
        Collected { trace: Trace { events: Vec::new(), modules: vec![String::new()] }, events_max }
    }

    /// What came.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Takes out the first events, so many: there is room for others.
    pub fn take_first(&mut self, count: usize) -> Trace {
        let left = self.trace.events.split_off(count.min(self.trace.events.len()));
        let events = std::mem::replace(&mut self.trace.events, left);
        Trace { events, modules: self.trace.modules.clone() }
    }

    /// The same, to keep.
    pub fn into_trace(self) -> Trace {
        self.trace
    }
}

impl Sink for Collected {
    fn push(&mut self, event: &Event, modules: &[String]) -> Result<(), Stop> {
        if self.trace.events.len() >= self.events_max {
            return Err(Stop::Limit(Stopped::Events));
        }
        let known = self.trace.modules.len();
        self.trace.modules.extend_from_slice(modules.get(known..).unwrap_or_default());
        self.trace.events.push(*event);
        Ok(())
    }

    fn flush(&mut self, _: &Remarks) -> Result<(), Stop> {
        Ok(())
    }

    fn finish(&mut self, _: &[String], _: &Remarks) -> Result<(), Stop> {
        Ok(())
    }
}

/// A binary trace that others can read at any time, as far as it goes.
#[derive(Debug)]
pub struct Written<W: Write> {
    /// Until it is finished.
    writer: Option<Writer<W>>,
    said: Remarks,
    len_max: u64,
}

impl<W: Write> Written<W> {
    /// Begins a trace.
    ///
    /// # Errors
    ///
    /// What `out` says.
    pub fn new(out: W) -> std::io::Result<Written<W>> {
        Written::up_to(limits::RECORD_FILE_LEN_MAX, out)
    }

    /// One that ends with the block in which it passes so many bytes.
    ///
    /// # Errors
    ///
    /// What `out` says.
    pub fn up_to(len_max: u64, out: W) -> std::io::Result<Written<W>> {
        let mut writer = Writer::recording(out)?;
        writer.flush(&Remarks::default())?;
        Ok(Written { writer: Some(writer), said: Remarks::default(), len_max })
    }
}

impl<W: Write> Sink for Written<W> {
    fn push(&mut self, event: &Event, modules: &[String]) -> Result<(), Stop> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        if writer.written() >= self.len_max {
            return Err(Stop::Limit(Stopped::Length));
        }
        Ok(writer.push(event, modules)?)
    }

    fn flush(&mut self, remarks: &Remarks) -> Result<(), Stop> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        // Said again only where it has changed.
        let news = if self.said == *remarks { Remarks::default() } else { *remarks };
        self.said = *remarks;
        Ok(writer.flush(&news)?)
    }

    fn finish(&mut self, modules: &[String], remarks: &Remarks) -> Result<(), Stop> {
        self.flush(remarks)?;
        let Some(writer) = self.writer.take() else { return Ok(()) };
        writer.finish(modules)?;
        Ok(())
    }
}
