//! What those may do who run the daemon: look at all sessions, and act on them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tonic::{Request, Response, Status};

use super::refusals::Refused;
use super::service::{Service, daemon_driver, device_message, from_ledger};
use super::{Daemon, NodeDevice};
use crate::error::ErrorKind;
use crate::ids::{DeviceId, SessionId};
use crate::ledger::{AccountView, Change, LedgerError, SessionView};
use crate::limits;
use crate::runtime::Counter;
use crate::units::{Bytes, counted};
use crate::wire::status::status;
use crate::wire::v1::admin_server::Admin;
use crate::wire::{convert, v1};

/// A process that is to end may take so long for it.
const END_MAX: Duration = Duration::from_secs(10);

/// Something that the daemon is asked to do, in words for its log.
trait Act {
    fn words(&self) -> String;
}

fn device_of(uuid: &[u8]) -> String {
    convert::device_uuid("device_uuid", uuid).map_or_else(|_| "every device".to_owned(), |uuid| uuid.to_string())
}

fn session_of(id: u64) -> String {
    if id == 0 { "every session".to_owned() } else { format!("session {id}") }
}

impl Act for v1::LimitRequest {
    fn words(&self) -> String {
        let terms = [
            self.limit_bytes.map(|limit| format!("limit {}", Bytes::new(limit))),
            self.priority.map(|priority| format!("priority {priority}")),
            self.lends.map(|lends| (if lends { "lends" } else { "does not lend" }).to_owned()),
        ];
        let terms: Vec<String> = terms.into_iter().flatten().collect();
        format!("give {} these terms: {}", session_of(self.session_id), terms.join(", "))
    }
}

impl Act for v1::TrimRequest {
    fn words(&self) -> String {
        let most =
            if self.len_bytes == 0 { "all".to_owned() } else { format!("{} at most", Bytes::new(self.len_bytes)) };
        let (session, device) = (session_of(self.session_id), device_of(&self.device_uuid));
        format!("have {session} give back what lies idle on {device}, {most}")
    }
}

impl Act for v1::EvictRequest {
    fn words(&self) -> String {
        let session = session_of(self.session_id);
        match self.end_after_ms {
            None => format!("evict {session}"),
            Some(ms) => format!("evict {session}, and end its process after {ms} ms"),
        }
    }
}

impl Act for v1::DrainRequest {
    fn words(&self) -> String {
        let device = device_of(&self.device_uuid);
        if self.undo { format!("undo the drain of {device}") } else { format!("drain {device}") }
    }
}

/// What came of it, in words for the log.
trait Came {
    fn words(&self) -> String;
}

impl Came for v1::LimitReply {
    fn words(&self) -> String {
        let (limit, held) = (Bytes::new(self.limit_bytes), Bytes::new(self.held_bytes));
        format!("limit {limit}, priority {}, lends {}, holds {held}", self.priority, self.lends)
    }
}

impl Came for v1::TrimReply {
    fn words(&self) -> String {
        let returned = Bytes::new(self.returned_bytes);
        format!("{returned} went back; {} asked, {} did not answer", self.asked, self.unanswered)
    }
}

impl Came for v1::EvictReply {
    fn words(&self) -> String {
        let (returned, held) = (Bytes::new(self.returned_bytes), Bytes::new(self.held_bytes));
        let ended = if self.is_ended { "; its process was ended" } else { "" };
        format!("{returned} went back, {held} still held{ended}")
    }
}

impl Came for v1::DrainReply {
    fn words(&self) -> String {
        let (leased, reserved) = (Bytes::new(self.leased_bytes), Bytes::new(self.reserved_bytes));
        let sessions = counted(self.session_ids.len() as u64, "session");
        format!("{leased} still leased, to {sessions}, and {reserved} reserved for plans")
    }
}

impl Service {
    /// Does what is asked if who asks may act on the daemon; that, and what came of it, is in the log.
    async fn acted<T: Act, R: Came>(
        &self,
        request: Request<T>,
        act: impl AsyncFnOnce(T) -> Result<R, Status>,
    ) -> Result<Response<R>, Status> {
        let (peer, what) = (Service::peer(&request)?, request.get_ref().words());
        if !self.0.config.is_admin(&peer) {
            self.0.refusals.note(Refused::Admin, &peer, &what);
            let text = format!(
                "user {} may not act on this daemon: root may and the user that runs it, from outside of containers or from the daemon's own pod, and those in `admins` of its configuration",
                peer.uid
            );
            return Err(status(ErrorKind::OverLimit, text));
        }
        tracing::info!(target: "audit", uid = peer.uid, pid = peer.pid, what, "asked to act");
        let done = act(request.into_inner()).await;
        match &done {
            Ok(reply) => {
                let outcome = reply.words();
                tracing::info!(target: "audit", uid = peer.uid, pid = peer.pid, what, outcome, "acted");
                self.0.note_event(v1::event::Kind::Operator, format!("user {}: {what}; {outcome}", peer.uid));
                // Who looks now sees what has become of it.
                self.0.forget_live();
            }
            Err(error) => {
                let why = error.message();
                tracing::info!(target: "audit", uid = peer.uid, pid = peer.pid, what, why, "did not act");
            }
        }
        done.map(Response::new)
    }

    fn known_session(&self, id: u64) -> Result<SessionView, Status> {
        let session = SessionId(id);
        self.0.steward.session(session).ok_or_else(|| from_ledger(&LedgerError::NoSession(session)))
    }

    /// What lies idle in sessions is looked at anew.
    fn look_everywhere(&self) {
        self.0.devices.iter().for_each(|device| self.0.look_for_parked(device.id));
    }

    /// Bytes that exist on these devices.
    fn promised(&self, devices: &[DeviceId]) -> Bytes {
        devices.iter().filter_map(|device| self.0.steward.device(*device)).map(|view| view.bytes.promised()).sum()
    }
}

#[tonic::async_trait]
impl Admin for Service {
    async fn status(&self, _request: Request<v1::StatusRequest>) -> Result<Response<v1::StatusReply>, Status> {
        Ok(Response::new(status_reply(&self.0)))
    }

    async fn limit(&self, request: Request<v1::LimitRequest>) -> Result<Response<v1::LimitReply>, Status> {
        self.acted(request, async |wanted: v1::LimitRequest| {
            let change =
                Change { limit: wanted.limit_bytes.map(Bytes::new), priority: wanted.priority, lends: wanted.lends };
            if change == Change::default() {
                return Err(status(
                    ErrorKind::Invalid,
                    "nothing is to be otherwise: name a limit, a priority, or whether it lends",
                ));
            }
            self.look_everywhere();
            let changed = self.0.steward.change(SessionId(wanted.session_id), change, wanted.revision);
            let view = changed.map_err(|error| from_ledger(&error))?;
            let held = view.held_bytes();
            let outcome = match held <= view.terms.limit {
                true => v1::limit_reply::Outcome::Applied,
                false => v1::limit_reply::Outcome::Deferred,
            };
            Ok(v1::LimitReply {
                outcome: outcome.into(),
                revision: view.revision,
                limit_bytes: view.terms.limit.get(),
                priority: view.terms.priority,
                lends: view.terms.lends,
                held_bytes: held.get(),
            })
        })
        .await
    }

    async fn trim(&self, request: Request<v1::TrimRequest>) -> Result<Response<v1::TrimReply>, Status> {
        self.acted(request, async |wanted: v1::TrimRequest| {
            let devices: Vec<DeviceId> = match wanted.device_uuid.is_empty() {
                true => self.0.devices.iter().map(|device| device.id).collect(),
                false => vec![self.known_device(&wanted.device_uuid)?.id],
            };
            let session = match wanted.session_id {
                0 => None,
                id => Some(self.known_session(id)?.session),
            };
            let most = if wanted.len_bytes == 0 { Bytes::MAX } else { Bytes::new(wanted.len_bytes) };
            let before = self.promised(&devices);
            let (asked_before, unanswered_before) = (self.0.revocations.asked(), self.0.revocations.unanswered());
            for device in &devices {
                self.0.look_for_parked(*device);
                self.0.steward.trim(*device, session, most).map_err(|error| from_ledger(&error))?;
            }
            let asked = self.0.revocations.asked() - asked_before;
            self.0.until_answered(&devices).await;
            let unanswered = self.0.revocations.unanswered() - unanswered_before;
            // What lay with the daemon already; what sessions gave back went at once.
            if session.is_none() {
                for device in &devices {
                    self.0.steward.trim_idle(*device, most).map_err(|error| from_ledger(&error))?;
                }
                self.0.until_answered(&devices).await;
            }
            let count = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
            Ok(v1::TrimReply {
                returned_bytes: before.saturating_sub(self.promised(&devices)).get(),
                asked: count(asked),
                unanswered: count(unanswered),
            })
        })
        .await
    }

    async fn evict(&self, request: Request<v1::EvictRequest>) -> Result<Response<v1::EvictReply>, Status> {
        self.acted(request, async |wanted: v1::EvictRequest| {
            let session = self.known_session(wanted.session_id)?.session;
            let entry = self.0.registry.get(session);
            let entry = entry.ok_or_else(|| from_ledger(&LedgerError::NoSession(session)))?;
            let held = || self.0.steward.session(session).map_or(Bytes::ZERO, |view| view.held_bytes());
            let before = held();
            self.look_everywhere();
            self.0.steward.evict(session).map_err(|error| from_ledger(&error))?;
            let devices: Vec<DeviceId> = self.0.devices.iter().map(|device| device.id).collect();
            self.0.until_answered(&devices).await;
            let mut is_ended = false;
            if let Some(patience) = wanted.end_after_ms.map(Duration::from_millis) {
                let gives_all = async {
                    while !held().is_zero() {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                };
                let is_in_time = tokio::time::timeout(patience, gives_all).await.is_ok();
                if !is_in_time {
                    if !entry.has_pidfd {
                        let text = "the kernel gives this daemon no hold of the process: end it yourself";
                        return Err(status(ErrorKind::Unsupported, text));
                    }
                    let _ = entry.end_process();
                    is_ended = tokio::time::timeout(END_MAX, entry.over()).await.is_ok();
                    if !is_ended {
                        let text = format!("process {} could not be ended: the daemon's log says why", entry.pid);
                        return Err(status(ErrorKind::Unsupported, text));
                    }
                }
            }
            let left = held();
            let returned = before.saturating_sub(left);
            Ok(v1::EvictReply { returned_bytes: returned.get(), held_bytes: left.get(), is_ended })
        })
        .await
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainReply>, Status> {
        self.acted(request, async |wanted: v1::DrainRequest| {
            let device = self.known_device(&wanted.device_uuid)?.id;
            self.0.look_for_parked(device);
            self.0.steward.drain(device, !wanted.undo).map_err(|error| from_ledger(&error))?;
            if !wanted.undo {
                self.0.until_answered(&[device]).await;
                self.0.steward.trim_idle(device, Bytes::MAX).map_err(|error| from_ledger(&error))?;
                self.0.until_answered(&[device]).await;
            }
            let holds = |view: &SessionView| view.held.iter().any(|(of, _)| *of == device);
            let sessions = self.0.steward.sessions();
            let left = self.0.steward.device(device);
            Ok(v1::DrainReply {
                leased_bytes: left.as_ref().map_or(0, |view| view.bytes.leased.get()),
                reserved_bytes: left.map_or(0, |view| view.bytes.reserved.get()),
                session_ids: sessions.iter().filter(|view| holds(view)).map(|view| view.session.0).collect(),
            })
        })
        .await
    }

    async fn revocations(
        &self,
        _request: Request<v1::RevocationsRequest>,
    ) -> Result<Response<v1::RevocationsReply>, Status> {
        Ok(Response::new(v1::RevocationsReply { revocations: self.0.revocations.log() }))
    }

    async fn live(&self, _request: Request<v1::LiveRequest>) -> Result<Response<v1::LiveReply>, Status> {
        Ok(Response::new(self.0.live().as_ref().clone()))
    }

    async fn address_map(
        &self,
        request: Request<v1::AddressMapRequest>,
    ) -> Result<Response<v1::AddressMapReply>, Status> {
        let session = SessionId(request.get_ref().session_id);
        let map = self.0.address_map(session).await;
        map.map(Response::new).ok_or_else(|| from_ledger(&LedgerError::NoSession(session)))
    }
}

fn status_reply(daemon: &Daemon) -> v1::StatusReply {
    v1::StatusReply { sessions: session_statuses(daemon).collect(), ..node_status(daemon) }
}

/// The same but for the sessions.
pub(super) fn node_status(daemon: &Daemon) -> v1::StatusReply {
    let returned = daemon.steward.returned();
    v1::StatusReply {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        driver: daemon_driver(daemon),
        uptime_ms: daemon.uptime_ms(),
        devices: device_statuses(daemon),
        sessions: Vec::new(),
        waiting_requests: daemon.steward.request_count() as u64,
        returned_by_release_bytes: returned.release.get(),
        returned_by_death_bytes: returned.death.get(),
        exports: daemon.steward.store().counts().1,
        exports_max: limits::EXPORTS_MAX,
        open_fds: Daemon::open_fds(),
        open_fds_max: Daemon::open_fds_max(),
        is_draining: daemon.is_draining(),
        asked: daemon.revocations.asked(),
        unanswered: daemon.revocations.unanswered(),
        returned_by_revocation_bytes: returned.revoke.get(),
        keeper: daemon.keeping.as_ref().map(|keeping| v1::Keeper {
            pid: keeping.pid().unwrap_or(0),
            restarts: keeping.restarts(),
            journal_bytes: daemon.steward.journal_len().unwrap_or(0),
        }),
    }
}

fn device_statuses(daemon: &Daemon) -> Vec<v1::DeviceStatus> {
    let accounts = daemon.steward.devices();
    let status = |account: &AccountView| {
        let device = daemon.devices.iter().find(|device| device.id == account.device)?;
        let bytes = &account.bytes;
        Some(v1::DeviceStatus {
            device: Some(device_message(device)),
            budget_bytes: account.budget.get(),
            creating_bytes: (bytes.creating + bytes.claimed).get(),
            idle_bytes: bytes.idle.get(),
            reserved_bytes: bytes.reserved.get(),
            leased_bytes: bytes.leased.get(),
            destroying_bytes: bytes.destroying.get(),
            quarantined_bytes: bytes.quarantined.get(),
            unkept_bytes: daemon.steward.store().unkept(account.device).get(),
            foreign_bytes: account.foreign.get(),
            available_bytes: account.available().get(),
            waiting_requests: account.waiting as u64,
            refused_creates: account.refused_creates,
            peak_leased_bytes: account.peak_leased.get(),
            chunks: account.chunks,
            chunks_max: account.chunks_max,
            is_lost: account.is_lost,
            is_mps: device.is_mps,
            is_draining: account.is_draining,
            guaranteed_bytes: account.guaranteed.get(),
            shared_bytes: bytes.shared.get(),
        })
    };
    accounts.iter().filter_map(status).collect()
}

/// Of each session, one after the other: a thousand at once are megabytes.
pub(super) fn session_statuses(daemon: &Daemon) -> impl Iterator<Item = v1::SessionStatus> + '_ {
    let views: std::collections::HashMap<SessionId, _> =
        daemon.steward.sessions().into_iter().map(|view| (view.session, view)).collect();
    let now = daemon.clock.now();
    let status = move |entry: Arc<super::registry::Entry>| {
        let view = views.get(&entry.id)?;
        let counters = daemon.counters_of(&entry, &view.held);
        let of = |list: &[(DeviceId, Bytes)], device| {
            list.iter().find(|(of, _)| *of == device).map_or(0, |(_, bytes)| bytes.get())
        };
        let on = |device: &NodeDevice| v1::HeldOn {
            ordinal: device.id.0,
            leased_bytes: of(&view.held, device.id),
            guarantee_bytes: of(&view.guarantees, device.id),
            shared_bytes: of(&view.shared, device.id),
        };
        let has_some = |on: &v1::HeldOn| on.leased_bytes > 0 || on.guarantee_bytes > 0;
        Some(v1::SessionStatus {
            session_id: entry.id.0,
            name: entry.name.clone(),
            pid: entry.pid,
            limit_bytes: view.terms.limit.get(),
            leased_bytes: view.held_bytes().get(),
            chunks: view.chunks as u64,
            is_attached: view.is_attached,
            age_ms: u64::try_from((now.saturating_sub(entry.opened) + entry.age_before).as_millis())
                .unwrap_or(u64::MAX),
            counters: Counter::ALL
                .iter()
                .map(|(name, counter)| ((*name).to_owned(), counters[*counter as usize]))
                .collect(),
            tenant: entry.tenant.clone(),
            priority: view.terms.priority,
            on: daemon.devices.iter().map(on).filter(has_some).collect(),
            revision: view.revision,
            is_evicted: view.is_evicted,
            lends: view.terms.lends,
            unanswered: entry.unanswered.load(Ordering::Relaxed),
            plan_id: entry.plan.load(Ordering::Relaxed),
        })
    };
    daemon.registry.all().into_iter().filter_map(status)
}
