//! Time moves on: requests time out, tickets expire, drivers are asked what others hold, and the keeper and the locks are looked at.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::listener::{Ousted, RuntimeLock};
use super::{Daemon, or_abort};
use crate::error::chain;
use crate::keeper::manager;
use crate::ledger::AccountView;

/// Where somebody waits.
const TICK: Duration = Duration::from_millis(20);
/// Where nobody does, until somebody may.
const IDLE_TICK: Duration = Duration::from_secs(1);
const MEND_EVERY: Duration = Duration::from_millis(100);
/// How often drivers are asked where nobody waits: at each idle tick.
const ASK_EVERY: Duration = Duration::from_millis(900);
/// Where nobody scrapes what was recorded would pile up.
const SORT_EVERY: Duration = Duration::from_secs(5);
/// So long another daemon could come in where somebody removes the lock: at each idle tick.
const LOOK_EVERY: Duration = Duration::from_millis(900);
const CONTESTED_LOOK_EVERY: Duration = Duration::from_millis(100);

/// Wakes the thread on which time moves on.
#[derive(Debug, Default)]
pub(super) struct Stirrer {
    word: Mutex<Word>,
    said: Condvar,
}

/// What that thread is told.
#[derive(Debug, Default)]
struct Word {
    is_stirred: bool,
    is_over: bool,
}

impl Stirrer {
    /// Somebody may wait: time moves on in small steps.
    pub(super) fn stir(&self) {
        self.word().is_stirred = true;
        self.said.notify_one();
    }

    fn end(&self) {
        self.word().is_over = true;
        self.said.notify_one();
    }

    fn is_over(&self) -> bool {
        self.word().is_over
    }

    /// Waits until somebody may wait, or it is over, or so long. Returns whether somebody may.
    fn wait(&self, patience: Duration) -> bool {
        let is_quiet = |word: &mut Word| !word.is_stirred && !word.is_over;
        let waited = self.said.wait_timeout_while(self.word(), patience, is_quiet);
        let (mut word, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut word.is_stirred)
    }

    fn word(&self) -> MutexGuard<'_, Word> {
        self.word.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Time moves on until [`Ticking::stop`], or until this is dropped.
pub(super) struct Ticking {
    daemon: Arc<Daemon>,
    thread: Option<JoinHandle<()>>,
    locks: oneshot::Receiver<Vec<RuntimeLock>>,
}

impl Ticking {
    /// Until nothing more happens at any time of its own. Returns the locks: as long as they live a second daemon is kept away.
    pub(super) fn stop(mut self) -> Vec<RuntimeLock> {
        self.daemon.stirrer.end();
        if let Some(thread) = self.thread.take() {
            // It aborts, and does not panic.
            let _ = thread.join();
        }
        self.locks.try_recv().unwrap_or_default()
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        self.daemon.stirrer.end();
    }
}

/// Has time move on, with a look at `locks` now and then, of which the receiver hears if they are another's.
///
/// On a thread of its own, that waits for nothing but the time: a timer of the runtime wakes a worker three times for each tick, as it goes from wheel to wheel, and the worker another.
pub(super) fn start(
    daemon: Arc<Daemon>,
    locks: Vec<RuntimeLock>,
) -> std::io::Result<(Ticking, oneshot::Receiver<Ousted>)> {
    let (ousts, ousted) = oneshot::channel();
    let (returns, returned) = oneshot::channel();
    let mut ticks = Ticks::new(Arc::clone(&daemon), locks, ousts);
    let work = move || {
        ticks.run();
        // Where nobody wants them they are let go here.
        let _ = returns.send(ticks.locks);
    };
    let thread = std::thread::Builder::new().name("stitchd-clock".into()).spawn(|| or_abort(Box::new(work)))?;
    Ok((Ticking { daemon, thread: Some(thread), locks: returned }, ousted))
}

/// What happens at each tick, and when it happened last.
struct Ticks {
    daemon: Arc<Daemon>,
    runtime: Handle,
    locks: Vec<RuntimeLock>,
    /// Taken once it is said.
    ousts: Option<oneshot::Sender<Ousted>>,
    /// Beside the rest: a keeper that does not answer holds nobody up.
    mending: Option<tokio::task::JoinHandle<()>>,
    /// Creates ahead of need that failed, by device.
    failures: super::WarmFailures,
    /// How often the service manager is to hear that the daemon is well. Twice in its time is what sd_watchdog_enabled(3) advises; a third leaves room for one that is late.
    watched: Option<Duration>,
    mended: Duration,
    sorted: Duration,
    asked: Duration,
    looked: Duration,
    said_alive: Duration,
}

impl Ticks {
    fn new(daemon: Arc<Daemon>, locks: Vec<RuntimeLock>, ousts: oneshot::Sender<Ousted>) -> Ticks {
        let now = daemon.clock.now();
        Ticks {
            runtime: Handle::current(),
            locks,
            ousts: Some(ousts),
            mending: None,
            failures: BTreeMap::new(),
            watched: daemon.config.manager.watchdog.map(|every| every / 3),
            mended: Duration::ZERO,
            sorted: Duration::ZERO,
            asked: Duration::ZERO,
            looked: now,
            said_alive: Duration::ZERO,
            daemon,
        }
    }

    fn run(&mut self) {
        let daemon = Arc::clone(&self.daemon);
        let idle_tick = self.watched.map_or(IDLE_TICK, |every| IDLE_TICK.min(every / 2));
        let mut is_idle = false;
        while !daemon.stirrer.is_over() && self.ousts.is_some() {
            let next = daemon.clock.now() + TICK;
            if is_idle {
                // Somebody may wait, or nothing has happened for so long.
                let is_contested = self.locks.iter().any(RuntimeLock::is_contested);
                is_idle = !daemon.stirrer.wait(if is_contested { CONTESTED_LOOK_EVERY } else { idle_tick });
            }
            if !is_idle {
                std::thread::sleep(next.saturating_sub(daemon.clock.now()));
            }
            // Where nothing is this daemon's any more nothing else happens.
            if !daemon.stirrer.is_over() && self.look() {
                is_idle = self.tick(is_idle);
            }
        }
    }

    /// Returns whether nobody waits for anything.
    fn tick(&mut self, is_idle: bool) -> bool {
        let daemon = Arc::clone(&self.daemon);
        let now = daemon.clock.now();
        if now.saturating_sub(self.sorted) >= SORT_EVERY {
            self.sorted = now;
            daemon.latencies.sort();
        }
        daemon.sample();
        self.mend(now);
        if is_idle && now.saturating_sub(self.asked) < ASK_EVERY {
            daemon.steward.pass_time();
        } else {
            self.asked = now;
            daemon.steward.tick();
        }
        let accounts = daemon.steward.devices();
        daemon.note_lost(&accounts);
        daemon.keep_warm(&accounts, &mut self.failures);
        for account in accounts.iter().filter(|account| account.waiting > 0) {
            daemon.look_for_parked(account.device);
        }
        for expired in daemon.registry.expired_claims(daemon.clock.now()) {
            daemon.take_back(&expired);
        }
        // Behind the rest: whoever cannot take the ledger's lock any more is not well.
        if self.watched.is_some_and(|every| now.saturating_sub(self.said_alive) >= every) {
            self.said_alive = now;
            self.say_alive();
        }
        accounts.iter().all(is_idle_device)
    }

    /// Whether the directories are this daemon's still.
    fn look(&mut self) -> bool {
        let now = self.daemon.clock.now();
        let is_contested = self.locks.iter().any(RuntimeLock::is_contested);
        let every = if is_contested { CONTESTED_LOOK_EVERY } else { LOOK_EVERY };
        if now.saturating_sub(self.looked) < every {
            return true;
        }
        self.looked = now;
        if let Err(ousted) = self.locks.iter_mut().try_for_each(RuntimeLock::look)
            && let Some(ousts) = self.ousts.take()
        {
            // Whoever does not listen ends for another reason.
            let _ = ousts.send(ousted);
        }
        self.ousts.is_some()
    }

    fn mend(&mut self, now: Duration) {
        if let Some(keeping) = &self.daemon.keeping
            && now.saturating_sub(self.mended) >= MEND_EVERY
            && self.mending.as_ref().is_none_or(tokio::task::JoinHandle::is_finished)
            && !self.daemon.is_draining()
            && keeping.is_to_be_mended()
        {
            self.mended = now;
            let keeping = Arc::clone(keeping);
            self.mending = Some(self.runtime.spawn_blocking(move || keeping.mend()));
        }
    }

    /// By way of a worker: one whose workers are all stuck is not well either.
    fn say_alive(&self) {
        let passed = self.daemon.config.manager.clone();
        self.runtime.spawn(async move {
            tokio::task::spawn_blocking(move || {
                if let Err(error) = manager::say_alive(&passed) {
                    tracing::warn!(error = %chain(&error), "the service manager cannot be told that this daemon is well");
                }
            });
        });
    }
}

/// Nobody waits for anything of it, and nothing is on its way.
fn is_idle_device(account: &AccountView) -> bool {
    let bytes = &account.bytes;
    let moving = bytes.creating + bytes.claimed + bytes.destroying;
    account.waiting == 0 && account.asked == 0 && moving.is_zero()
}
