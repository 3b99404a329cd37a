//! What people look at: everything at one moment, for `stitchd top` and the page at `/`.
//!
//! However many look, it is worked out [`HOLDS`] apart; what takes its time (sorting chunks) is done without the ledger's lock.
//!
//! | part | what it does |
//! |---|---|
//! | [`events`] | the last things that happened |
//! | [`history`] | figures of the last minutes |
//! | [`maps`] | where sessions' memory lies, as they say |
//! | [`runs`] | chunks in a row that are the same to who looks |
//! | [`page`] | both over HTTP |
//! | [`json`] | all of it in JSON |

pub(super) mod events;
pub(super) mod history;
pub mod json;
pub(super) mod maps;
pub(super) mod page;
mod runs;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Daemon;
use super::admin::{node_status, session_statuses};
use super::metrics::{Free, SessionFigures};
use crate::ids::{DeviceId, SessionId};
use crate::ledger::{Holder, RequestView};
use crate::runtime::Counter;
use crate::wire::v1;
use events::Events;
use history::History;

/// What was worked out is good for so long.
const HOLDS: Duration = Duration::from_millis(250);
/// Requests are listed up to so many.
const WAITING_MAX: usize = 1_000;

/// What there is to look at that is not anywhere else.
#[derive(Debug, Default)]
pub(super) struct Live {
    pub(super) events: Events,
    pub(super) history: History,
    last: Mutex<Option<(Duration, Arc<v1::LiveReply>)>>,
}

impl Daemon {
    /// Milliseconds since the daemon began.
    pub(super) fn uptime_ms(&self) -> u64 {
        u64::try_from(self.uptime().as_millis()).unwrap_or(u64::MAX)
    }

    /// Something has happened that people want to see.
    pub(super) fn note_event(&self, kind: v1::event::Kind, text: String) {
        self.live.events.note(v1::Event { at_ms: self.uptime_ms(), kind: kind.into(), text });
    }

    /// What was worked out is not how it is any more.
    pub(super) fn forget_live(&self) {
        *self.live.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Notes figures, where it is time.
    pub(super) fn sample(&self) {
        let at_ms = self.uptime_ms();
        if !self.live.history.is_due(at_ms) {
            return;
        }
        self.forget_maps();
        self.live
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take_if(|(at, _)| self.clock.now() >= *at + HOLDS);
        let sessions = self.session_figures();
        let accounts = self.steward.devices();
        let sample = |account: &crate::ledger::AccountView| v1::DeviceSample {
            ordinal: account.device.0,
            leased_bytes: account.bytes.leased.get(),
            live_bytes: live_bytes(&sessions, account.device),
            available_bytes: account.available().get(),
        };
        self.live.history.note(v1::Sample { at_ms, devices: accounts.iter().map(sample).collect() });
    }

    /// Everything, as it is now or was a moment ago.
    pub(super) fn live(&self) -> Arc<v1::LiveReply> {
        let mut last = self.live.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.now();
        match &*last {
            Some((at, reply)) if now.saturating_sub(*at) < HOLDS => Arc::clone(reply),
            _ => {
                let mut reply = self.live_node();
                reply.status.get_or_insert_default().sessions = session_statuses(self).collect();
                let reply = Arc::new(reply);
                *last = Some((now, Arc::clone(&reply)));
                reply
            }
        }
    }

    /// Everything but the sessions.
    fn live_node(&self) -> v1::LiveReply {
        let sessions = self.session_figures();
        let totals = self.totals();
        let mut runs = runs::of(self.steward.chunks());
        let device = |account: &crate::ledger::AccountView| {
            let free = Free::of(account, &sessions);
            let total = |counter: Counter| totals.get(&account.device).map_or(0, |sum| sum[counter as usize]);
            v1::DeviceLive {
                ordinal: account.device.0,
                live_bytes: live_bytes(&sessions, account.device),
                stitchable_bytes: free.stitchable,
                contiguous_bytes: free.contiguous,
                external_fragmentation: free.external(),
                internal_fragmentation: free.internal(),
                rescued_bytes: total(Counter::RescuedBytes),
                failures: total(Counter::Failures),
                runs: runs.remove(&account.device).unwrap_or_default(),
            }
        };
        let devices = self.steward.devices().iter().map(device).collect();
        v1::LiveReply {
            status: Some(node_status(self)),
            devices,
            waiting: self.waiting(&self.steward.requests()),
            events: self.live.events.all(),
            samples: self.live.history.all(),
            span_ms: history::SPAN_MS,
        }
    }

    fn waiting(&self, requests: &[RequestView]) -> Vec<v1::WaitingRequest> {
        let mut names: HashMap<SessionId, String> = HashMap::new();
        let mut name_of = |session: SessionId| {
            let found = || self.registry.get(session).map_or_else(String::new, |entry| entry.name.clone());
            names.entry(session).or_insert_with(found).clone()
        };
        let waiting = |request: &RequestView| {
            let (session_id, name) = match request.holder {
                Holder::Session(session) => (session.0, name_of(session)),
                Holder::Plan(plan) => (0, format!("plan {}", plan.to_hex())),
            };
            v1::WaitingRequest {
                session_id,
                name,
                ordinal: request.device.0,
                len_bytes: request.bytes.get(),
                is_waiting: request.is_waiting,
                age_ms: request.age_ms,
            }
        };
        requests.iter().take(WAITING_MAX).map(waiting).collect()
    }
}

/// What sessions have allocated of a device.
fn live_bytes(sessions: &[SessionFigures], device: DeviceId) -> u64 {
    sessions.iter().map(|session| session.get(device, Counter::LiveBytes)).fold(0, u64::saturating_add)
}
