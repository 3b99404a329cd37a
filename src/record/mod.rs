//! A trace of a running job: what a runtime serves, as it serves it.
//!
//! ```text
//!  under the lock of the pools                 whenever the recorder is asked to
//!  Tap: six numbers ──► ring, bounded ──► Recorder: Transcript ──► Sink
//!                       full: counted               address → id    memory, or a file
//!                                                   key → context
//! ```
//!
//! The runtime's side ([`Tap`]) takes some nanoseconds: it stores six numbers in memory that is there, and neither waits nor allocates. Everything else is the other side's, in a thread or at a
//! moment that somebody else chooses ([`crate::session::recording`] has one).
//!
//! Not for: deciding what is recorded for what; opening files; threads.
//!
//! Invariant: whatever is dropped, stopped at a limit or cut, what was recorded is a trace, and it says what it lacks ([`Remarks`]).

pub mod ring;
mod sink;
mod tap;
mod transcript;

pub use sink::{Collected, Sink, Stop, Written};
pub use tap::Tap;

use crate::trace::binary::{Remarks, Stopped};
use crate::units::DeviceAddress;
use ring::Outlet;
use tap::Record;
use transcript::Transcript;

/// The other end of a [`Tap`].
#[derive(Debug)]
pub struct Recorder<S> {
    outlet: Outlet,
    transcript: Transcript,
    sink: S,
    /// Why nothing more goes to the sink.
    stopped: Option<Stop>,
}

/// Begins a recording of what happens on `device`. The runtime may be `ahead` by so many events, a power of two.
pub fn begin<S: Sink>(device: u32, sink: S, ahead: usize) -> (Tap, Recorder<S>) {
    let (inlet, outlet) = ring::ring(ahead);
    (Tap::new(inlet), Recorder { outlet, transcript: Transcript::new(device), sink, stopped: None })
}

/// What a look at the ring came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drained {
    /// Records that were there.
    pub records: usize,
    /// More may come.
    pub goes_on: bool,
}

impl<S: Sink> Recorder<S> {
    /// The addresses of live allocations that it has seen come, and their ids.
    pub fn live(&self) -> impl Iterator<Item = (DeviceAddress, u64)> + '_ {
        self.transcript.live()
    }

    /// Takes what has come, at most `most` of it: a job that makes events faster than they are taken must not keep anybody here.
    pub fn drain(&mut self, most: usize) -> Drained {
        // Before the last look: what was put in before the end is seen.
        let is_ended = self.outlet.is_ended();
        let mut records = 0;
        while records < most && self.stopped.is_none() {
            let Some(words) = self.outlet.take() else {
                return Drained { records, goes_on: !is_ended };
            };
            records += 1;
            if let Err(stop) = self.transcript.take(&Record::of(&words), &mut self.sink) {
                self.stop(stop);
            }
        }
        Drained { records, goes_on: self.stopped.is_none() }
    }

    fn stop(&mut self, stop: Stop) {
        self.outlet.close();
        self.stopped = Some(stop);
    }

    /// What is missing from the recording so far.
    pub fn remarks(&self) -> Remarks {
        let stopped = match &self.stopped {
            None => None,
            Some(Stop::Limit(limit)) => Some(*limit),
            Some(Stop::File(_)) => Some(Stopped::File),
        };
        Remarks { dropped: self.outlet.dropped(), stopped, ..self.transcript.remarks() }
    }

    /// Where the events go.
    pub fn sink(&self) -> &S {
        &self.sink
    }

    /// The same, to take from.
    pub fn sink_mut(&mut self) -> &mut S {
        &mut self.sink
    }

    /// Puts what has come where it outlives the process.
    pub fn flush(&mut self) {
        let remarks = self.remarks();
        if self.stopped.is_none()
            && let Err(stop) = self.sink.flush(&remarks)
        {
            self.stop(stop);
        }
    }

    /// Ends the recording: nothing more is taken. The sink, and why it stopped before, if it did.
    pub fn finish(mut self) -> (S, Option<Stop>) {
        let remarks = self.remarks();
        let finished = self.sink.finish(self.transcript.modules(), &remarks);
        (self.sink, self.stopped.or(finished.err()))
    }
}

#[cfg(test)]
mod tests;
