//! Giving idle memory back when others wait for it, and showing where memory lies when somebody looks: the daemon asks, a thread beside the job answers.
//!
//! Not for: what is given, and in which order ([`Runtime::give_back_idle`]), and what is shown ([`super::showing`]).
//!
//! Invariant: every question for memory is answered, by whoever looks after its device, or with nothing where nobody does. The job never waits for this thread but where both want a pool's lock.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

use super::Session;
use super::background::Background;
use super::line::Line;
use super::showing::map_of;
use crate::clock::{Clock as _, SystemClock};
use crate::error::chain;
use crate::ids::DeviceUuid;
use crate::runtime::Runtime;
use crate::runtime::Segment;
use crate::units::Bytes;
use crate::wire::v1::AddressMap;

/// A question of the daemon's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Question {
    pub(super) device: DeviceUuid,
    pub(super) ask: u64,
    pub(super) bytes: Bytes,
}

/// What the daemon wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wish {
    /// Memory, and an answer.
    Memory(Question),
    /// To see where everything lies, for the `n`th time.
    Look(DeviceUuid, u64),
}

impl Wish {
    fn device(&self) -> DeviceUuid {
        match self {
            Wish::Memory(question) => question.device,
            Wish::Look(device, _) => *device,
        }
    }
}

/// Who answers for which device.
#[derive(Debug, Default)]
pub(super) struct Givers(Mutex<HashMap<DeviceUuid, Arc<Inbox>>>);

/// What somebody is to answer.
#[derive(Debug)]
struct Inbox {
    wishes: Mutex<Vec<Wish>>,
    thread: Thread,
}

impl Inbox {
    fn take(&self) -> Vec<Wish> {
        std::mem::take(&mut *self.wishes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Givers {
    fn all(&self) -> std::sync::MutexGuard<'_, HashMap<DeviceUuid, Arc<Inbox>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a wish answered.
    pub(super) fn hand_over(&self, wish: Wish, line: &Weak<Line>) {
        if let Some(inbox) = self.all().get(&wish.device()) {
            inbox.wishes.lock().unwrap_or_else(PoisonError::into_inner).push(wish);
            inbox.thread.unpark();
            return;
        }
        if let Wish::Memory(question) = wish {
            answer(question, line);
        }
    }
}

fn answer(question: Question, line: &Weak<Line>) {
    let Some(line) = line.upgrade() else { return };
    if let Err(error) = line.answer(question) {
        tracing::debug!(error = %chain(&error), "the daemon cannot be answered");
    }
}

/// What was shown last, and when, and how long that took.
#[derive(Default)]
struct Shower {
    last: Option<(Duration, Duration, AddressMap)>,
}

impl Shower {
    /// The job waits while it is looked at: for a hundredth of the time at most, however often somebody looks.
    const SHARE: u32 = 100;
    /// It may have taken long as the job was at something itself, asleep, say.
    const AGE_MAX: Duration = Duration::from_secs(5);

    /// What there is to show, and how old that is.
    fn show(&mut self, clock: &SystemClock, segments: &impl Fn() -> Vec<Segment>) -> (AddressMap, Duration) {
        let now = clock.now();
        if let Some((at, took, map)) = &self.last {
            let age = now.saturating_sub(*at);
            if age < took.saturating_mul(Shower::SHARE).min(Shower::AGE_MAX) {
                return (map.clone(), age);
            }
        }
        let segments = segments();
        let took = clock.now().saturating_sub(now);
        let map = map_of(&segments);
        self.last = Some((clock.now(), took, map.clone()));
        (map, Duration::ZERO)
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
    pub fn begin(session: &Arc<Session>, runtime: Arc<Runtime>) -> std::io::Result<GiverThread> {
        let (device, shown) = (runtime.device().uuid(), Arc::clone(&runtime));
        let give = move |bytes| {
            runtime.give_back_idle(bytes);
        };
        GiverThread::with(session, device, give, move || shown.segments())
    }

    /// The same for a device on which several runtimes have memory of `session`: `give` has them give back so many bytes, `segments` says what they have.
    ///
    /// # Errors
    ///
    /// What the system says of one more thread.
    pub fn with(
        session: &Arc<Session>,
        device: DeviceUuid,
        give: impl Fn(Bytes) + Send + 'static,
        segments: impl Fn() -> Vec<Segment> + Send + 'static,
    ) -> std::io::Result<GiverThread> {
        let (givers, line) = (session.givers(), Arc::downgrade(&session.line));
        let thread = Background::begin("stitchd-give", move |is_over| {
            let inbox = Inbox { wishes: Mutex::default(), thread: std::thread::current() };
            let inbox = Arc::new(inbox);
            givers.all().insert(device, Arc::clone(&inbox));
            let (clock, mut shower) = (SystemClock::new(), Shower::default());
            while !is_over.load(Ordering::Acquire) {
                let wishes = inbox.take();
                if wishes.is_empty() {
                    std::thread::park();
                }
                for wish in wishes {
                    match wish {
                        Wish::Memory(question) => {
                            give(question.bytes);
                            answer(question, &line);
                        }
                        Wish::Look(_, look) => {
                            let Some(line) = line.upgrade() else { continue };
                            if let Err(error) = line.show(device, look, shower.show(&clock, &segments)) {
                                tracing::debug!(error = %chain(&error), "the daemon cannot be shown anything");
                            }
                        }
                    }
                }
            }
            // Another may have taken its place.
            let mut all = givers.all();
            if all.get(&device).is_some_and(|known| Arc::ptr_eq(known, &inbox)) {
                all.remove(&device);
            }
            drop(all);
            // What came in the last moment.
            for wish in inbox.take() {
                if let Wish::Memory(question) = wish {
                    answer(question, &line);
                }
            }
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
