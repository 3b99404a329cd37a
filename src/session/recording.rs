//! The thread of a recording: takes from a runtime's ring what has come, and writes it down, while the job goes on.
//!
//! Not for: what is written ([`crate::record`]), and which file it is ([`super::locate`]).
//!
//! Invariant: nobody waits for this thread but who ends the recording, and that no longer than it says. Where it cannot go on it stops, and the job does not.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::background::Background;
use crate::clock::{Clock as _, SystemClock};
use crate::limits;
use crate::record::{self, Collected, Recorder, Sink, Stop, Written};
use crate::runtime::Runtime;

/// The shortest and the longest pause between two looks: a job that fills an eighth of the ring in between is looked at more often.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);
/// What a process that is killed loses at most, beside a pause.
const FLUSH: Duration = Duration::from_millis(200);

/// A recording under way. It ends with the runtime, or when it is ended.
#[derive(Debug)]
pub struct Recording<S>(Background<(S, Option<Stop>)>);

/// One into a file.
pub type FileRecording = Recording<Written<BufWriter<File>>>;

impl FileRecording {
    /// Records what `runtime` does from now on into a file, as a binary trace of so many bytes at most. A file that is there is written anew.
    ///
    /// # Errors
    ///
    /// What the system says of the file, or of one more thread.
    pub fn to_file(runtime: &Runtime, path: &Path, len_max: u64) -> std::io::Result<FileRecording> {
        Recording::begin(runtime, Written::up_to(len_max, BufWriter::new(File::create(path)?))?)
    }
}

impl Recording<Collected> {
    /// Records what `runtime` does from now on in memory, up to so many events.
    ///
    /// # Errors
    ///
    /// What the system says of one more thread.
    pub fn to_memory(runtime: &Runtime, events_max: usize) -> std::io::Result<Recording<Collected>> {
        Recording::begin(runtime, Collected::up_to(events_max))
    }
}

impl<S: Sink + Send + 'static> Recording<S> {
    /// Records what `runtime` does from now on into `sink`.
    ///
    /// # Errors
    ///
    /// What the system says of one more thread.
    pub fn begin(runtime: &Runtime, sink: S) -> std::io::Result<Recording<S>> {
        let (tap, recorder) = record::begin(runtime.device().id().0, sink, limits::RECORD_AHEAD_MAX);
        let thread = Background::begin("stitchd-record", move |is_over| write_down(recorder, is_over))?;
        runtime.record_into(tap);
        Ok(Recording(thread))
    }

    /// Ends it with what has come until now, in `patience` at most. The sink, and why it took no more before this if it did not; `None` where the file does not get on.
    pub fn end(self, patience: Duration) -> Option<(S, Option<Stop>)> {
        self.0.end(patience)
    }
}

fn write_down<S: Sink>(mut recorder: Recorder<S>, is_over: &AtomicBool) -> (S, Option<Stop>) {
    let clock = SystemClock::new();
    let (mut pause, mut flushed, mut has_news) = (PAUSE_MAX, clock.now(), false);
    loop {
        // Before the last look: what came before the end is taken.
        let is_last = is_over.load(Ordering::Acquire);
        let drained = recorder.drain(limits::RECORD_AHEAD_MAX);
        has_news |= drained.records > 0;
        if is_last || !drained.goes_on {
            return recorder.finish();
        }
        if has_news && clock.now() >= flushed + FLUSH {
            recorder.flush();
            (flushed, has_news) = (clock.now(), false);
        }
        let is_busy = drained.records >= limits::RECORD_AHEAD_MAX / 8;
        pause = if is_busy { pause / 2 } else { pause * 2 }.clamp(PAUSE_MIN, PAUSE_MAX);
        std::thread::park_timeout(pause);
    }
}
