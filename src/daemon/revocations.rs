//! Memory that is asked back: who is told, who gave what to whom, and whose process is ended.
//!
//! The ledger decides whom to ask. Here its questions reach the sessions ([`Entry::questions`], told by `Watch`), and what becomes of them is kept for people.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Daemon;
use super::registry::Entry;
use crate::ids::{DeviceId, SessionId};
use crate::ledger::{Effect, Holder};
use crate::runtime::Counter;
use crate::units::Bytes;
use crate::wire::v1;

/// Of so many questions it is remembered what became of them.
const REMEMBERED: usize = 1024;

/// A question that a session has not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Question {
    pub(super) device: DeviceId,
    pub(super) ask: u64,
    pub(super) bytes: Bytes,
}

/// The questions of a session that it was not told yet, or has not answered: one for each device, the newest.
pub(super) type Questions = tokio::sync::watch::Sender<BTreeMap<DeviceId, Question>>;

/// What became of questions.
#[derive(Debug, Default)]
pub(super) struct Revocations {
    log: Mutex<VecDeque<v1::Revocation>>,
    asked: AtomicU64,
    unanswered: AtomicU64,
    /// When it was last looked what lies idle in sessions, by device.
    looked: Mutex<BTreeMap<DeviceId, Duration>>,
}

/// What was seen of sessions holds so long: a flood of requests is not a flood of looks.
const LOOK_HOLDS: Duration = Duration::from_millis(2);

impl Revocations {
    pub(super) fn log(&self) -> Vec<v1::Revocation> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn note(&self, revocation: v1::Revocation) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.len() == REMEMBERED {
            log.pop_front();
        }
        log.push_back(revocation);
    }

    pub(super) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    pub(super) fn unanswered(&self) -> u64 {
        self.unanswered.load(Ordering::Relaxed)
    }
}

impl Daemon {
    /// Hears what the ledger wants told.
    pub(super) fn hear(&self, news: &Effect) {
        match *news {
            Effect::AskBack { session, device, ask, bytes, .. } => {
                self.revocations.asked.fetch_add(1, Ordering::Relaxed);
                let Some(entry) = self.registry.get(session) else { return };
                tracing::debug!(%session, %device, bytes = bytes.get(), "asked for idle memory");
                entry.questions.send_modify(|questions| {
                    questions.insert(device, Question { device, ask, bytes });
                });
            }
            Effect::Gave { session, device, waiting, asked, given, took_ms } => {
                self.note_revocation(session, device, waiting, asked, given, took_ms, false);
            }
            Effect::Unanswered { session, device, asked } => {
                self.revocations.unanswered.fetch_add(1, Ordering::Relaxed);
                let entry = self.registry.get(session);
                let name = entry.as_ref().map_or("", |entry| entry.name.as_str());
                tracing::warn!(%session, name, %device, asked_bytes = asked.get(), "a session does not answer when it is asked for idle memory: it is let be for a while");
                if let Some(entry) = &entry {
                    entry.unanswered.fetch_add(1, Ordering::Relaxed);
                }
                self.note_revocation(session, device, None, asked, Bytes::ZERO, crate::limits::ANSWER_MS_MAX, true);
            }
            Effect::EndBorrower { session, device, waiting } => {
                let Some(entry) = self.registry.get(session) else { return };
                let for_whom = self.registry.get(waiting).map_or_else(String::new, |entry| entry.name.clone());
                tracing::warn!(%session, name = entry.name, pid = entry.pid, %device, %waiting, for_whom, "ending the process: it uses memory that another is guaranteed, and has not given it back in time (borrowed = \"end\")");
                if entry.end_process() {
                    let text = format!(
                        "{} ({session}, process {}): it used what {for_whom} is guaranteed, and did not give it back in time",
                        entry.name, entry.pid
                    );
                    self.note_event(v1::event::Kind::Ended, text);
                } else {
                    self.steward.spare(session);
                }
            }
            Effect::RangeGone { range } => self.names.forget(range),
            Effect::Create { .. }
            | Effect::Destroy { .. }
            | Effect::Grant { .. }
            | Effect::Registered { .. }
            | Effect::Refuse { .. } => {}
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one line of a log")]
    fn note_revocation(
        &self,
        from: SessionId,
        device: DeviceId,
        waiting: Option<Holder>,
        asked: Bytes,
        given: Bytes,
        took_ms: u64,
        is_unanswered: bool,
    ) {
        self.latencies.note_revocation(Duration::from_millis(took_ms));
        let name = |session| self.registry.get(session).map_or_else(String::new, |entry| entry.name.clone());
        let (to_session_id, to) = match waiting {
            Some(Holder::Session(session)) => (session.0, name(session)),
            Some(Holder::Plan(plan)) => (0, format!("plan {}", plan.to_hex())),
            None => (0, String::new()),
        };
        let tenant = |session| self.registry.get(session).map(|entry| entry.tenant.clone());
        if let (Some(Holder::Session(to)), false) = (waiting, given.is_zero())
            && let (Some(of), Some(tenant)) = (tenant(from), tenant(to))
            && of != tenant
        {
            tracing::info!(target: "audit", session = %from, tenant = of, for_session = %to, for_tenant = tenant, bytes = given.get(), "gave idle memory back for another tenant");
        }
        let device = self.devices.iter().find(|known| known.id == device);
        let giver = name(from);
        let for_whom = if to.is_empty() { String::new() } else { format!(" for {to}") };
        if is_unanswered {
            self.note_event(v1::event::Kind::NoAnswer, format!("{giver} ({from}) was asked for {asked}{for_whom}"));
        } else if !given.is_zero() {
            self.note_event(v1::event::Kind::Gave, format!("{giver} ({from}) gave {given}{for_whom} in {took_ms} ms"));
        }
        self.revocations.note(v1::Revocation {
            at_ms: self.uptime_ms(),
            device_uuid: device.map_or_else(Vec::new, |device| device.uuid.0.to_vec()),
            from_session_id: from.0,
            from: giver,
            to_session_id,
            to,
            asked_bytes: asked.get(),
            given_bytes: given.get(),
            took_ms,
            is_unanswered,
        });
    }

    /// A session has answered.
    pub(super) fn answered(&self, entry: &Entry, device: DeviceId, ask: u64) {
        let mut is_open = false;
        entry.questions.send_if_modified(|questions| {
            is_open = questions.get(&device).is_some_and(|question| question.ask == ask);
            if is_open {
                questions.remove(&device);
            }
            // Nobody waits for fewer.
            false
        });
        if !is_open {
            return;
        }
        // One that has ended in the same moment has nothing to answer.
        let _ = self.steward.answered(entry.id, device, ask);
    }

    /// Tells the ledger what lies idle in sessions, where somebody waits for it or is about to.
    pub(super) fn look_for_parked(&self, device: DeviceId) {
        let now = self.clock.now();
        {
            let mut looked = self.revocations.looked.lock().unwrap_or_else(PoisonError::into_inner);
            if looked.get(&device).is_some_and(|at| now < *at + LOOK_HOLDS) {
                return;
            }
            looked.insert(device, now);
        }
        let mut parked = Vec::new();
        for view in self.steward.sessions() {
            let there = view.held.iter().find(|(of, _)| *of == device).filter(|_| view.terms.answers);
            let Some((_, leased)) = there else { continue };
            // What it holds of shared ranges is in no runtime.
            let shared = view.shared.iter().find(|(of, _)| *of == device).map_or(Bytes::ZERO, |(_, shared)| *shared);
            let Some(entry) = self.registry.get(view.session) else { continue };
            let counters = self.counters_by_device(&entry, device).remove(&device);
            let of = |counter: Counter| counters.as_ref().map_or(0, |counters| counters[counter as usize]);
            let (held, used) = (of(Counter::HeldBytes), of(Counter::OccupiedBytes));
            // Of one that has more runtimes than its page has room for the figures are not all.
            let is_known = (*leased - shared).get() == held;
            parked.push((view.session, is_known.then(|| Bytes::new(held.saturating_sub(used)))));
        }
        if !parked.is_empty() {
            self.steward.note_parked(device, parked);
        }
    }

    /// Waits until everybody has answered who was asked on these devices, or the time for that is up. Says how many have not.
    pub(super) async fn until_answered(self: &Arc<Daemon>, devices: &[DeviceId]) -> usize {
        let patience = Duration::from_millis(crate::limits::ANSWER_MS_MAX + 100);
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let views: Vec<_> = devices.iter().filter_map(|device| self.steward.device(*device)).collect();
            let left = views.iter().map(|view| view.asked).sum();
            let is_still = views.iter().all(|view| view.bytes.destroying.is_zero() && view.bytes.creating.is_zero());
            if left == 0 && is_still || tokio::time::Instant::now() >= deadline {
                return left;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
