//! Sessions that are there again: after their daemon was killed and another has taken over, or after their connection broke.
//!
//! A session proves that it is the one that was opened, by its secret and its process, and says what it holds. What it does not name is released: it was on its way to it, or on its way back. What nobody here knows of it registers, as far as its terms and the device reach.
//!
//! Not for: what is known when a daemon begins ([`super::takeover`]).

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tonic::Status;

use super::Daemon;
use super::claims::OpenClaims;
use super::live::maps::Maps;
use super::registry::{Entry, Good};
use super::service::{Service, from_ledger, refused};
use crate::clock::unix_seconds;
use crate::error::{ErrorKind, chain};
use crate::ids::{ChunkId, DeviceUuid, RangeId};
use crate::journal::{KnownSession, Process};
use crate::keeper::Key;
use crate::ledger::EndReason;
use crate::limits;
use crate::steward;
use crate::units::Bytes;
use crate::wire::convert;
use crate::wire::peer::{self, Identity, Peer, UID_UNKNOWN};
use crate::wire::stats_page::{self, StatsPageError};
use crate::wire::status::status;
use crate::wire::v1;

/// How long the last connection may take to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a session may take to say what it holds, where others have no room to.
const TELLING_MAX: Duration = Duration::from_secs(10);
/// How long a session may take to be there again that has nothing.
const AWAY_MAX: Duration = Duration::from_secs(2);
/// The same of one whose process the kernel cannot watch.
const UNWATCHED_AWAY_MAX: Duration = Duration::from_secs(30);

/// What a session has said that it holds.
#[derive(Debug, Default)]
pub(super) struct Told {
    chunks: Vec<(DeviceUuid, ChunkId, Bytes)>,
    ranges: Vec<(RangeId, u32)>,
    /// Which attempt has begun to say it; nothing where none has, or it was forgotten: what comes then is not all.
    open: Option<u64>,
    /// When the first of it was said.
    since: Duration,
    /// Where what is said here is counted, of all sessions.
    of_all: Option<Arc<AtomicUsize>>,
}

impl Drop for Told {
    fn drop(&mut self) {
        if let Some(of_all) = &self.of_all {
            of_all.fetch_sub(self.chunks.len(), Ordering::Relaxed);
        }
    }
}

/// What tells the process of a peer from all others, for the journal.
pub(super) fn process_of(peer: &Peer) -> Process {
    match peer.identity {
        Identity::Pidfs(pidfs) => Process { pid: peer.pid, pidfs, start: 0 },
        Identity::Process { pid, start } => Process { pid, pidfs: 0, start },
        Identity::Unknown | Identity::Unproven => Process { pid: peer.pid, pidfs: 0, start: 0 },
    }
}

/// The same, back.
fn identity_of(process: &Process) -> Identity {
    match *process {
        Process { pidfs: 0, start: 0, .. } => Identity::Unknown,
        Process { pidfs: 0, pid, start } => Identity::Process { pid, start },
        Process { pidfs, .. } => Identity::Pidfs(pidfs),
    }
}

impl Entry {
    /// The page that its process has brought, or a new one, where there is none yet.
    pub(super) fn take_page(&self, brought: Option<OwnedFd>) -> Result<(), StatsPageError> {
        if let Some(brought) = &brought {
            stats_page::check(brought.as_fd())?;
        }
        let mut page = self.page.lock().unwrap_or_else(PoisonError::into_inner);
        // Its process counts there, also where it was opened anew since.
        if brought.is_some() {
            *page = brought;
        } else if page.is_none() {
            *page = Some(stats_page::create(self.id)?);
        }
        Ok(())
    }

    /// A copy of its page.
    pub(super) fn page(&self) -> std::io::Result<OwnedFd> {
        let page = self.page.lock().unwrap_or_else(PoisonError::into_inner);
        page.as_ref().ok_or(std::io::ErrorKind::NotFound)?.try_clone()
    }

    /// Another connection is its own from here on.
    pub(super) fn next_link(&self) -> u64 {
        let mut link = 0;
        self.links.send_modify(|last| {
            *last += 1;
            link = *last;
        });
        link
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chunks that it has said it holds, and has not said all.
    pub(super) fn told_count(&self) -> usize {
        self.told().chunks.len()
    }

    /// Forgets what it has begun to say before `since`, and has not said all.
    pub(super) fn forget_told_before(&self, since: Duration) {
        let mut told = self.told();
        if told.since < since {
            *told = Told::default();
        }
    }

    /// An attempt that is later than this was heard: what this says was true before that.
    fn check_attempt(&self, attempt: u64) -> Result<(), Status> {
        if self.attempt.load(Ordering::Relaxed) > attempt {
            return Err(status(ErrorKind::Unavailable, "the session has been there again since this was said"));
        }
        Ok(())
    }

    /// Adds what a message says; nothing where more is to come.
    fn take_told(
        &self,
        message: &v1::ReattachRequest,
        of_all: &Arc<AtomicUsize>,
        now: Duration,
    ) -> Result<Option<Told>, Status> {
        let mut told = self.told();
        self.check_attempt(message.attempt)?;
        self.attempt.store(message.attempt, Ordering::Relaxed);
        if message.is_first {
            *told = Told::default();
            (told.since, told.open) = (now, Some(message.attempt));
        } else if told.open != Some(message.attempt) {
            let text = "the first of what the session holds was not heard, or was forgotten: it is to be said anew";
            return Err(status(ErrorKind::Unavailable, text));
        }
        let chunks: usize = message.held.iter().map(|held| held.chunks.len()).sum();
        if chunks > limits::REATTACH_CHUNKS_MAX || message.ranges.len() > limits::REATTACH_CHUNKS_MAX {
            let text = format!("more than {} at once", limits::REATTACH_CHUNKS_MAX);
            return Err(refused(&convert::malformed("held", text)));
        }
        if told.chunks.len() + chunks > limits::REATTACH_TOLD_MAX || told.ranges.len() > limits::SESSION_RANGES_MAX {
            let text =
                format!("more than {} chunks or {} ranges", limits::REATTACH_TOLD_MAX, limits::SESSION_RANGES_MAX);
            return Err(refused(&convert::malformed("held", text)));
        }
        if let Some(held) = message.ranges.iter().find(|held| held.times == 0 || held.times > limits::HOLDS_MAX) {
            let text = format!("range {} held {} times; 1 to {}", held.range_id, held.times, limits::HOLDS_MAX);
            return Err(refused(&convert::malformed("ranges.times", text)));
        }
        if of_all.load(Ordering::Relaxed) + chunks > limits::REATTACH_TOLD_BY_ALL_MAX {
            let text = "too many sessions say what they hold at once: try again";
            return Err(status(ErrorKind::Unavailable, text));
        }
        told.of_all = Some(Arc::clone(of_all));
        for held in &message.held {
            let uuid = convert::device_uuid("held.device_uuid", &held.device_uuid).map_err(|error| refused(&error))?;
            let chunks = convert::chunks("held.chunks", &held.chunks).map_err(|error| refused(&error))?;
            of_all.fetch_add(chunks.len(), Ordering::Relaxed);
            told.chunks.extend(chunks.into_iter().map(|(chunk, len)| (uuid, chunk, len)));
        }
        told.ranges.extend(message.ranges.iter().map(|held| (RangeId(held.range_id), held.times)));
        Ok((!message.has_more).then(|| std::mem::take(&mut *told)))
    }
}

impl Service {
    /// A session is there again, with what it says.
    pub(super) async fn reattached(
        &self,
        entry: &Arc<Entry>,
        peer: &Peer,
        message: v1::ReattachRequest,
    ) -> Result<v1::ReattachReply, Status> {
        let daemon = &self.0;
        daemon.check_told(entry)?;
        let told = entry.take_told(&message, &daemon.told, daemon.clock.now())?;
        let Some(told) = told else { return Ok(v1::ReattachReply::default()) };
        // Whoever serves the connection before is over first, with what was on its way.
        entry.next_link();
        let serving = tokio::time::timeout(PATIENCE, entry.serving.lock()).await;
        let _serving =
            serving.map_err(|_| status(ErrorKind::Unavailable, "the session's last connection does not end"))?;
        entry.check_attempt(message.attempt)?;
        entry.note_pod(peer, message.pod.as_ref());
        daemon.registry.drop_tickets_of(entry.id);
        let at = |(uuid, chunk, len): &(DeviceUuid, ChunkId, Bytes)| {
            (daemon.device(*uuid).map(|device| device.id), *chunk, *len)
        };
        let held = steward::Told {
            chunks: told.chunks.iter().map(at).collect(),
            ranges: told.ranges.iter().copied().collect(),
        };
        // Who has leased something since it was there has nothing that nobody knows of.
        let may_register = !entry.has_leased.load(Ordering::Relaxed);
        let again = daemon.steward.reattach(entry.id, &held, may_register).map_err(|error| from_ledger(&error))?;
        if !again.uncounted.is_empty() {
            tracing::warn!(session = %entry.id, chunks = again.uncounted.len(), "a session has memory mapped that is not counted as its own");
        }
        let ticket = daemon.registry.issue(Good::Link(entry.id), peer.identity, daemon.clock.now());
        let ticket = ticket.map_err(|error| status(ErrorKind::Broken, chain(&error)))?;
        tracing::info!(session = %entry.id, name = entry.name, pid = entry.pid, chunks = held.chunks.len(), registered = again.renamed.len(), uncounted = again.uncounted.len(), "session is there again");
        let renamed = |(chunk, now): (ChunkId, ChunkId)| v1::RenamedChunk { chunk_id: chunk.0, now: now.0 };
        Ok(v1::ReattachReply {
            ticket: ticket.to_vec(),
            renamed: again.renamed.into_iter().map(renamed).collect(),
            unknown_chunk_ids: again.uncounted.iter().map(|chunk| chunk.0).collect(),
            unknown_range_ids: again.unknown_ranges.iter().map(|range| range.0).collect(),
            daemon_version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }
}

impl Daemon {
    /// Makes room for one more message of what a session holds: what others have begun to say long ago is forgotten. Nobody needs more than there are chunks.
    fn check_told(&self, entry: &Entry) -> Result<(), Status> {
        if self.told.load(Ordering::Relaxed) + limits::REATTACH_CHUNKS_MAX > limits::REATTACH_TOLD_BY_ALL_MAX {
            self.registry.forget_told_before(self.clock.now().saturating_sub(TELLING_MAX));
        }
        let store = self.steward.store();
        let chunks_max: u64 = store.devices().iter().map(|device| store.chunks_max(device.id())).sum();
        let most = usize::try_from(chunks_max).unwrap_or(usize::MAX).max(limits::REATTACH_TOLD_BY_PROCESS_MAX);
        if entry.identity != Identity::Unknown && self.registry.told_by(entry.identity) > most {
            entry.forget_told_before(Duration::MAX);
            let text = "the sessions of this process say at once that they hold more chunks than there can be";
            return Err(status(ErrorKind::Exhausted, text));
        }
        Ok(())
    }

    /// A session of the daemon before: its process is watched, and is to be there again.
    pub(super) fn resume_session(self: &Arc<Daemon>, known: &KnownSession, kept: Option<OwnedFd>) {
        let of = &known.of;
        let identity = identity_of(&of.process);
        // Kept, or asked for anew: then it could be another process by now.
        let kept = kept.filter(|pidfd| peer::identity_of(pidfd.as_fd(), of.process.pid).may_be(identity));
        let pidfd = kept.or_else(|| {
            peer::process_by_pid(of.process.pid).filter(|(_, found)| *found == identity).map(|(pidfd, _)| pidfd)
        });
        let peer = Peer { pidfd: None, identity, pid: of.process.pid, uid: UID_UNKNOWN };
        let entry = Arc::new(Entry {
            id: of.session,
            name: of.name.clone(),
            secret: of.secret,
            identity,
            pid: of.process.pid,
            has_pidfd: pidfd.is_some(),
            tenant: of.tenant.clone(),
            pod: OnceLock::new(),
            guarantee_max: of.guarantee_max,
            claims: OpenClaims::default(),
            questions: tokio::sync::watch::Sender::default(),
            maps: Maps::default(),
            unanswered: AtomicU64::new(0),
            plan: AtomicU64::new(0),
            ending: tokio::sync::watch::Sender::new(false),
            page: std::sync::Mutex::default(),
            links: tokio::sync::watch::Sender::new(0),
            serving: tokio::sync::Mutex::default(),
            told: std::sync::Mutex::default(),
            attempt: AtomicU64::new(0),
            has_leased: AtomicBool::new(false),
            opened: self.clock.now(),
            age_before: match of.opened_s {
                0 => Duration::ZERO,
                opened => Duration::from_secs(unix_seconds().saturating_sub(opened)),
            },
            acquires: Semaphore::new(limits::ACQUIRES_QUEUED_MAX),
            watches: tokio::sync::watch::Sender::new(0),
            ended: tokio::sync::watch::Sender::new(false),
            _seat: self.connections.enter(&peer),
        });
        self.registry.add(Arc::clone(&entry));
        match pidfd {
            Some(pidfd) => {
                let pidfd = Arc::new(pidfd);
                if let Some(keeping) = &self.keeping {
                    keeping.keep_other(Key::Process(entry.id), Arc::clone(&pidfd));
                }
                drop(tokio::spawn(Arc::clone(self).watch_process(Arc::clone(&entry), pidfd)));
                drop(tokio::spawn(Arc::clone(self).await_again(entry)));
            }
            // Where the kernel can tell processes apart it is gone.
            None if identity != Identity::Unknown => drop(self.end_session(entry.id, EndReason::Died)),
            None => drop(tokio::spawn(Arc::clone(self).await_again(entry))),
        }
    }

    /// A session that is not there again soon is over where nobody would be told of its end, and where it has nothing: perhaps nobody has heard that it was opened. Whoever has may open it anew.
    async fn await_again(self: Arc<Daemon>, entry: Arc<Entry>) {
        let mut links = entry.links.subscribe();
        let most = if entry.has_pidfd { AWAY_MAX } else { UNWATCHED_AWAY_MAX };
        let come = tokio::time::timeout(most, links.wait_for(|links| *links > 0)).await;
        if come.is_ok_and(|seen| seen.is_ok()) {
            if !entry.has_pidfd {
                self.watch_unwatched(&entry).await;
            }
            return;
        }
        let has_nothing = self.steward.session(entry.id).is_none_or(|view| {
            let is_guaranteed = view.guarantees.iter().any(|(_, bytes)| !bytes.is_zero());
            // What it is asleep with, or was told, is something, too.
            view.held_bytes().is_zero() && !is_guaranteed && view.revision == 0 && !view.is_evicted
        });
        if !entry.has_pidfd || has_nothing {
            self.end_session(entry.id, EndReason::Died);
        }
    }

    /// A session whose process the kernel cannot watch has said that it is there again, and is over where its connection does not come: nothing else would tell.
    async fn watch_unwatched(&self, entry: &Entry) {
        tokio::time::sleep(UNWATCHED_AWAY_MAX).await;
        if entry.serving.try_lock().is_ok() {
            self.end_session(entry.id, EndReason::Died);
        }
    }
}
