//! Giving idle memory back when others wait for it: the daemon asks, a thread beside the job answers.
//!
//! Not for: what is given, and in which order ([`Runtime::give_back_idle`]).
//!
//! Invariant: every question is answered, by whoever looks after its device, or with nothing where nobody does. The job never waits for this thread but where both want a pool's lock.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

use super::Session;
use super::background::Background;
use super::line::Line;
use crate::error::chain;
use crate::ids::DeviceUuid;
use crate::runtime::Runtime;
use crate::units::Bytes;

/// A question of the daemon's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Question {
    pub(super) device: DeviceUuid,
    pub(super) ask: u64,
    pub(super) bytes: Bytes,
}

/// Who answers for which device.
#[derive(Debug, Default)]
pub(super) struct Givers(Mutex<HashMap<DeviceUuid, Arc<Inbox>>>);

/// What somebody is to answer.
#[derive(Debug)]
struct Inbox {
    questions: Mutex<Vec<Question>>,
    thread: Thread,
}

impl Givers {
    fn all(&self) -> std::sync::MutexGuard<'_, HashMap<DeviceUuid, Arc<Inbox>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a question answered.
    pub(super) fn hand_over(&self, question: Question, line: &Weak<Line>) {
        if let Some(inbox) = self.all().get(&question.device) {
            inbox.questions.lock().unwrap_or_else(PoisonError::into_inner).push(question);
            inbox.thread.unpark();
            return;
        }
        answer(question, line);
    }
}

fn answer(question: Question, line: &Weak<Line>) {
    let Some(line) = line.upgrade() else { return };
    if let Err(error) = line.answer(question) {
        tracing::debug!(error = %chain(&error), "the daemon cannot be answered");
    }
}

/// Somebody answers for a device, until this goes.
#[derive(Debug)]
pub struct GiverThread(Background<()>);

impl GiverThread {
    /// Gives back what lies idle in `runtime`, whose memory is of `session`, when the daemon asks.
    ///
    /// # Errors
    ///
    /// What the system says of one more thread.
    pub fn begin<R>(session: &Arc<Session>, runtime: R) -> std::io::Result<GiverThread>
    where
        R: Deref<Target = Runtime> + Send + 'static,
    {
        GiverThread::with(session, runtime.device().uuid(), move |bytes| {
            runtime.give_back_idle(bytes);
        })
    }

    /// The same for a device on which several runtimes have memory of `session`: `give` has them give back so many bytes.
    ///
    /// # Errors
    ///
    /// What the system says of one more thread.
    pub fn with(
        session: &Arc<Session>,
        device: DeviceUuid,
        give: impl Fn(Bytes) + Send + 'static,
    ) -> std::io::Result<GiverThread> {
        let (givers, line) = (session.givers(), Arc::downgrade(&session.line));
        let thread = Background::begin("stitchd-give", move |is_over| {
            let inbox = Inbox { questions: Mutex::default(), thread: std::thread::current() };
            let inbox = Arc::new(inbox);
            givers.all().insert(device, Arc::clone(&inbox));
            while !is_over.load(Ordering::Acquire) {
                let questions = std::mem::take(&mut *inbox.questions.lock().unwrap_or_else(PoisonError::into_inner));
                if questions.is_empty() {
                    std::thread::park();
                }
                for question in questions {
                    give(question.bytes);
                    answer(question, &line);
                }
            }
            // Another may have taken its place.
            let mut all = givers.all();
            if all.get(&device).is_some_and(|known| Arc::ptr_eq(known, &inbox)) {
                all.remove(&device);
            }
            drop(all);
            // What came in the last moment.
            let left = std::mem::take(&mut *inbox.questions.lock().unwrap_or_else(PoisonError::into_inner));
            left.into_iter().for_each(|question| answer(question, &line));
        })?;
        Ok(GiverThread(thread))
    }

    /// Nobody gives any more when this comes back, in `patience` at most: a driver that is being unloaded should not be called.
    pub fn end(self, patience: Duration) {
        let _ = self.0.end(patience);
    }
}

impl Drop for GiverThread {
    fn drop(&mut self) {
        self.0.stop();
    }
}
