//! The chunk socket: acquire and release of sessions, one round trip each, and the descriptors of leases that were made over gRPC.
//!
//! One task serves one connection. It reads messages as they come, holds at most one acquire at the ledger and one batch that the client has not
//! acknowledged, and ends with the connection. Whatever breaks the protocol is answered once and ends the connection; the session's memory stays its own until
//! its process is gone.
//!
//! Descriptors that were sent and not read are in flight, and the kernel counts those of all processes against one limit. So no descriptors follow before those of the message before were read, which
//! is not what the client says (an ack) but what the kernel does; and a connection keeps its place until whatever was sent on it was read, or the other end is closed.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use super::Daemon;
use super::connections::Seat;
use super::listener::AcceptFailures;
use super::refusals::Refused;
use super::registry::{Entry, Good};
use super::watched::watch;
use crate::error::{ErrorKind, chain};
use crate::ids::{ChunkId, RequestId, SessionId};
use crate::ledger::Refusal;
use crate::limits;
use crate::mortal::moment;
use crate::steward::Answer;
use crate::units::Bytes;
use crate::wire::convert::{self, Token};
use crate::wire::fd_channel::{ChannelError, FdChannel};
use crate::wire::peer::{Peer, unread_bytes};
use crate::wire::status::kind_from_code;
use crate::wire::v1::{self, client_frame, daemon_frame};
use crate::wire::{PROTOCOL, STATS_PAGE_VERSION};

/// How long a peer may take for its first message, and for reading what it asked for.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a process that asks for more may take for reading descriptors on its other connections: whoever waits for them there reads them at once.
const PATIENCE_WITH_OTHERS: Duration = Duration::from_secs(2);

/// Serves the chunk socket on a thread of its own, until what it returns is dropped.
///
/// Its own, because a round trip is most of what growing costs: on the threads that everything else runs on, whoever is woken by a message hands it to another
/// one first.
pub(super) fn start(daemon: Arc<Daemon>, listener: OwnedFd) -> std::io::Result<oneshot::Sender<()>> {
    let (stop, stopped) = oneshot::channel();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Only one chunk socket is served.
    let _ = daemon.chunk_tasks.set(runtime.handle().clone());
    let serve = move || {
        runtime.block_on(async {
            let listener = match watch(listener, Interest::READABLE) {
                Ok(listener) => listener,
                Err(error) => return tracing::error!(%error, "the chunk socket cannot be served"),
            };
            tokio::select! {
                () = run(daemon, listener) => {}
                // Whichever way the other side goes.
                _ = stopped => {}
            }
        });
    };
    std::thread::Builder::new().name("stitchd-chunks".into()).spawn(serve)?;
    Ok(stop)
}

/// Accepts connections until the daemon drops it.
async fn run(daemon: Arc<Daemon>, listener: AsyncFd<OwnedFd>) {
    let mut connections = tokio::task::JoinSet::new();
    let mut failures = AcceptFailures::default();
    loop {
        while connections.try_join_next().is_some() {}
        match accept(&listener).await {
            Ok(socket) => {
                failures.reset();
                let peer = Peer::of(socket.as_fd());
                // One too many is closed again, and before the next is accepted: a task might close it later than a hundred others came.
                if let Some(seat) = daemon.connections.enter(&peer) {
                    connections.spawn(serve(Arc::clone(&daemon), socket, peer, seat));
                } else {
                    daemon.refusals.count(Refused::Connections);
                }
            }
            Err(error) => failures.note("the chunk socket", &listener, &error).await,
        }
    }
}

async fn accept(listener: &AsyncFd<OwnedFd>) -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    loop {
        let mut ready = listener.readable().await?;
        let accepted = ready.try_io(|listener| Ok(rustix::net::accept_with(listener.get_ref(), flags)?));
        if let Ok(accepted) = accepted {
            return accepted;
        }
    }
}

/// A connection that does not block threads.
struct Connection {
    socket: AsyncFd<OwnedFd>,
    seat: Seat,
    /// Something was sent after the last descriptors of chunks: that something is unread does not mean that they are.
    is_followed: bool,
}

impl Connection {
    fn channel(&self) -> FdChannel<BorrowedFd<'_>> {
        FdChannel::over(self.socket.get_ref().as_fd(), false)
    }

    /// Whether whatever was sent was read.
    fn is_read(&self) -> bool {
        unread_bytes(self.socket.get_ref().as_fd()).is_ok_and(|bytes| bytes == 0)
    }

    /// Notes it where whatever was sent was read.
    fn note_read(&mut self) {
        if self.seat.unread() > 0 && self.is_read() {
            self.seat.all_read();
        }
    }

    /// An ack came for the last descriptors of chunks. It is a lie where they were not read: nothing was sent since that could be what is unread.
    fn check_read(&mut self) -> Result<(), ChannelError> {
        self.note_read();
        if self.seat.unread() > 0 && !self.is_followed {
            return Err(ChannelError::Garbage("an ack for a batch that was not read".into()));
        }
        Ok(())
    }

    /// Waits until so many descriptors may be sent: those before were read, and the process has not left too many unread on other connections.
    async fn may_send(&mut self, fds: usize) -> Result<(), ChannelError> {
        const PAUSE: Duration = Duration::from_millis(5);
        let are_read = async {
            while self.seat.unread() > 0 {
                tokio::time::sleep(PAUSE).await;
                self.note_read();
            }
        };
        tokio::time::timeout(PATIENCE, are_read).await.map_err(|_| ChannelError::TimedOut)?;
        let has_room = async {
            while !self.seat.send(fds) {
                tokio::time::sleep(PAUSE).await;
            }
        };
        let outcome = tokio::time::timeout(PATIENCE_WITH_OTHERS, has_room).await;
        outcome.map_err(|_| ChannelError::System(Errno::TOOMANYREFS))
    }

    /// Ends the connection, and keeps its place as long as the other side leaves unread what it was sent.
    async fn end(self) {
        const PAUSE_MAX: Duration = Duration::from_secs(1);
        // It may be gone already.
        let _ = rustix::net::shutdown(self.socket.get_ref(), Shutdown::Both);
        let mut pause = Duration::from_millis(10);
        while !self.is_read() {
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    async fn receive(&self) -> Result<(v1::ClientFrame, Vec<OwnedFd>), ChannelError> {
        loop {
            let mut ready = self.socket.readable().await.map_err(|_| ChannelError::Closed)?;
            match self.channel().receive() {
                Err(ChannelError::WouldBlock) => ready.clear_ready(),
                outcome => return outcome,
            }
        }
    }

    async fn send(&mut self, what: daemon_frame::What, fds: &[Arc<OwnedFd>]) -> Result<(), ChannelError> {
        self.is_followed = true;
        let frame = v1::DaemonFrame { what: Some(what) };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let sending = async {
            loop {
                match self.channel().send(&frame, &fds) {
                    Err(ChannelError::WouldBlock) => self.has_room().await,
                    outcome => return outcome,
                }
            }
        };
        // A peer that does not read does not keep a task, nor descriptors in flight.
        tokio::time::timeout(PATIENCE, sending).await.unwrap_or(Err(ChannelError::TimedOut))
    }

    /// Sends a word that may as well not come. Where the client leaves unread what it was sent before it does not: the room is for answers (the kernel calls a socket writable while
    /// three quarters of its buffer are free).
    fn mention(&mut self, what: daemon_frame::What) -> Result<(), ChannelError> {
        self.is_followed = true;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(self.socket.get_ref(), PollFlags::OUT)];
        let has_room = poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0);
        match has_room.then(|| self.channel().send(&v1::DaemonFrame { what: Some(what) }, &[])) {
            None | Some(Err(ChannelError::WouldBlock)) => Ok(()),
            Some(outcome) => outcome,
        }
    }

    /// Waits until something can be sent again. Only then is that watched: each message that the client reads would wake this thread otherwise, to hear that
    /// there is room.
    async fn has_room(&self) {
        const PAUSE: Duration = Duration::from_millis(50);
        let socket = self.socket.get_ref().try_clone().and_then(|socket| watch(socket, Interest::WRITABLE));
        match &socket {
            Ok(socket) => drop(socket.writable().await),
            // Descriptors are short: it is tried again, as long as it may take.
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }

    async fn refuse(&mut self, request: u64, kind: ErrorKind, message: String) -> Result<(), ChannelError> {
        let kind = v1::ErrorKind::from(kind) as i32;
        self.send(daemon_frame::What::Refused(v1::Refused { request, kind, message }), &[]).await
    }
}

async fn serve(daemon: Arc<Daemon>, socket: OwnedFd, peer: Peer, seat: Seat) {
    let mut connection = match watch(socket, Interest::READABLE) {
        Ok(socket) => Connection { socket, seat, is_followed: false },
        Err(error) => return tracing::warn!(%error, "a connection cannot be served"),
    };
    let first = tokio::time::timeout(PATIENCE, connection.receive()).await;
    let outcome = match first.unwrap_or(Err(ChannelError::TimedOut)) {
        Ok((frame, fds)) => greet(&daemon, &mut connection, &peer, frame, &fds).await,
        Err(error) => Err(error),
    };
    match outcome {
        Ok(()) | Err(ChannelError::Closed) => {}
        Err(ChannelError::System(errno)) => {
            let error = ChannelError::System(errno);
            tracing::warn!(pid = peer.pid, error = %chain(&error), "a connection on the chunk socket cannot be served");
            let _ = connection.refuse(0, error.kind(), why_not_sent(&daemon, &error)).await;
        }
        Err(error) => {
            daemon.refusals.note(Refused::Protocol, &peer, &chain(&error));
            // It may be gone already.
            let _ = connection.refuse(0, error.kind(), chain(&error)).await;
        }
    }
    // By itself, so that what it was about does not stay as long as its place.
    drop(daemon);
    connection.end().await;
}

/// Why the operating system did not let a message go, and what to do about it.
fn why_not_sent(daemon: &Daemon, error: &ChannelError) -> String {
    match error {
        ChannelError::System(Errno::MFILE | Errno::NFILE) => {
            "the daemon has no descriptors left; raise its limit of open files (LimitNOFILE)".into()
        }
        ChannelError::System(Errno::TOOMANYREFS) => {
            let most = daemon.connections.most_unread();
            let who = most.map_or_else(String::new, |(pid, fds)| format!(": process {pid} has {fds} of them"));
            format!(
                "too many descriptors were sent and not read{who}; it is to read them, or to end; a daemon with CAP_SYS_RESOURCE, or a higher limit of open files (LimitNOFILE), has room for more"
            )
        }
        ChannelError::TimedOut => format!("the descriptors that were sent before were not read within {PATIENCE:?}"),
        error => chain(error),
    }
}

/// The first message says what the connection is.
async fn greet(
    daemon: &Arc<Daemon>,
    connection: &mut Connection,
    peer: &Peer,
    frame: v1::ClientFrame,
    fds: &[OwnedFd],
) -> Result<(), ChannelError> {
    // A session that is there again brings its page.
    let page = match (&frame.what, fds) {
        (Some(client_frame::What::Hello(_)), [page]) => Some(page.try_clone()),
        (_, fds) => check_no_descriptors(fds).map(|()| None)?,
    };
    let page = page.transpose().map_err(|_| ChannelError::System(Errno::MFILE))?;
    let (protocol, ticket, patience_ms) = match &frame.what {
        Some(client_frame::What::Hello(hello)) => (hello.protocol, &hello.ticket, hello.patience_ms),
        Some(client_frame::What::Claim(claim)) => (claim.protocol, &claim.ticket, 0),
        _ => return Err(ChannelError::Garbage("the first message is neither a hello nor a claim".into())),
    };
    if protocol != PROTOCOL {
        let text =
            format!("the client speaks protocol {protocol}, this daemon {PROTOCOL}; install the same version of both");
        return connection.refuse(0, ErrorKind::Unsupported, text).await;
    }
    let token: Token = match convert::token("ticket", ticket) {
        Ok(token) => token,
        Err(error) => return connection.refuse(0, ErrorKind::Invalid, error.to_string()).await,
    };
    match (daemon.registry.redeem(&token, peer, daemon.clock.now()), frame.what) {
        (Ok(Good::Link(session)), Some(client_frame::What::Hello(_))) => match daemon.registry.get(session) {
            Some(entry) => {
                daemon.take_page_of(&entry, page).map_err(|error| ChannelError::Garbage(chain(&error)))?;
                Served::new(daemon, connection, entry, word_every(patience_ms)).run().await
            }
            None => connection.refuse(0, ErrorKind::NotFound, format!("{session} is over")).await,
        },
        (Ok(Good::Claim(claim)), Some(client_frame::What::Claim(_))) => {
            let Some(entry) = daemon.registry.get(claim.session) else {
                return connection.refuse(0, ErrorKind::NotFound, format!("{} is over", claim.session)).await;
            };
            let (chunks, gone) = match claim.range {
                None => (entry.claims.lease(&claim), "the session has released what this ticket was for"),
                Some(range) => {
                    let view = daemon.steward.range(range).filter(|view| view.holders.contains(&claim.session));
                    (
                        view.map_or_else(Vec::new, |view| view.chunks),
                        "the session does not hold this shared range any more",
                    )
                }
            };
            if chunks.is_empty() {
                return connection.refuse(0, ErrorKind::NotFound, gone.into()).await;
            }
            let handed_over = hand_over(daemon, connection, chunks).await;
            match &handed_over {
                Ok(()) => entry.claims.close(&claim),
                // What is not surely with the process is the daemon's again; what is may be imported, and is
                // never another's.
                Err(_) => daemon.take_back(&claim),
            }
            handed_over
        }
        (Ok(Good::Claim(claim)), _) => {
            daemon.take_back(&claim);
            connection.refuse(0, ErrorKind::Invalid, "this ticket is for a claim".into()).await
        }
        (Ok(Good::Link(_)), _) => connection.refuse(0, ErrorKind::Invalid, "this ticket is for a hello".into()).await,
        (Err(error), _) => {
            daemon.refusals.note(Refused::Ticket, peer, &error.to_string());
            connection.refuse(0, ErrorKind::NotFound, error.to_string()).await
        }
    }
}

/// How often a client of this patience hears that its request is still worked on: four times in it, so that one word may be late. `None` for one that does not know such words.
fn word_every(patience_ms: u64) -> Option<Duration> {
    let every = (patience_ms / 4).clamp(limits::WORD_MS_MIN, limits::WORD_MS_MAX);
    (patience_ms > 0).then(|| Duration::from_millis(every))
}

fn check_no_descriptors(fds: &[OwnedFd]) -> Result<(), ChannelError> {
    if fds.is_empty() {
        return Ok(());
    }
    Err(ChannelError::Garbage(format!("{} descriptors came with a message that has none", fds.len())))
}

/// Releases what of `chunks` the session still has.
pub(super) fn give_back(daemon: &Daemon, session: SessionId, chunks: &[(ChunkId, Bytes)]) {
    let all = chunks.iter().map(|(chunk, _)| *chunk).collect();
    if daemon.steward.release(session, all).is_ok() {
        return;
    }
    // All or none: it has released some of them itself, or it is over. One by one, then.
    for (chunk, _) in chunks {
        if let Err(error) = daemon.steward.release(session, vec![*chunk]) {
            tracing::debug!(%session, error = %chain(&error), "a chunk is gone already");
        }
    }
}

/// Sends what was leased or attached over gRPC, and ends.
async fn hand_over(
    daemon: &Daemon,
    connection: &mut Connection,
    chunks: Vec<(ChunkId, Bytes)>,
) -> Result<(), ChannelError> {
    let mut delivery = Delivery { request: 0, left: chunks.into(), is_acknowledged: true };
    while let Some(batch) = delivery.next_batch() {
        send_batch(daemon, connection, &delivery, &batch).await?;
        let acknowledged = tokio::time::timeout(PATIENCE, connection.receive()).await;
        let (frame, fds) = acknowledged.unwrap_or(Err(ChannelError::TimedOut))?;
        if !matches!(frame.what, Some(client_frame::What::Ack(_))) || !fds.is_empty() {
            return Err(ChannelError::Garbage("a batch was answered with something else than an ack".into()));
        }
        connection.check_read()?;
        delivery.is_acknowledged = true;
    }
    Ok(())
}

/// Chunks on their way to a client.
struct Delivery {
    request: u64,
    left: VecDeque<(ChunkId, Bytes)>,
    is_acknowledged: bool,
}

impl Delivery {
    /// The next batch, once the one before has arrived.
    fn next_batch(&mut self) -> Option<Vec<(ChunkId, Bytes)>> {
        if !self.is_acknowledged || self.left.is_empty() {
            return None;
        }
        self.is_acknowledged = false;
        let count = self.left.len().min(limits::FDS_PER_MESSAGE_MAX);
        Some(self.left.drain(..count).collect())
    }
}

async fn send_batch(
    daemon: &Daemon,
    connection: &mut Connection,
    delivery: &Delivery,
    chunks: &[(ChunkId, Bytes)],
) -> Result<(), ChannelError> {
    let descriptor = |(chunk, _): &(ChunkId, Bytes)| daemon.steward.descriptor(*chunk);
    let fds = chunks.iter().map(descriptor).collect::<Result<Vec<_>, _>>().map_err(|error| {
        tracing::warn!(error = %chain(&error), "a lease cannot be handed over");
        ChannelError::System(Errno::MFILE)
    })?;
    let batch = v1::Batch {
        request: delivery.request,
        chunks: convert::chunk_infos(chunks),
        is_last: delivery.left.is_empty(),
    };
    connection.may_send(fds.len()).await?;
    moment();
    let sent = connection.send(daemon_frame::What::Batch(batch), &fds).await;
    moment();
    match &sent {
        Ok(()) => connection.is_followed = false,
        Err(_) => connection.seat.all_read(),
    }
    if let Err(error @ ChannelError::System(Errno::TOOMANYREFS)) = &sent {
        tracing::warn!(error = why_not_sent(daemon, error), "a lease cannot be handed over");
    }
    sent
}

/// A session's connection.
struct Served<'a> {
    daemon: &'a Arc<Daemon>,
    connection: &'a mut Connection,
    entry: Arc<Entry>,
    /// How often the client is told that its request is still worked on.
    word_every: Option<Duration>,
    /// Acquires that wait for the one before.
    queued: VecDeque<v1::Acquire>,
    asked: Option<Asked>,
    delivery: Option<Delivery>,
}

/// An acquire that the ledger has not answered yet.
struct Asked {
    request: u64,
    ledger: RequestId,
    answer: oneshot::Receiver<Answer>,
    since: Duration,
    /// When the client is next told that it is still worked on.
    word_due: Option<tokio::time::Instant>,
}

impl<'a> Served<'a> {
    fn new(
        daemon: &'a Arc<Daemon>,
        connection: &'a mut Connection,
        entry: Arc<Entry>,
        word_every: Option<Duration>,
    ) -> Served<'a> {
        Served { daemon, connection, entry, word_every, queued: VecDeque::new(), asked: None, delivery: None }
    }

    async fn run(mut self) -> Result<(), ChannelError> {
        let entry = Arc::clone(&self.entry);
        // The one before is over first: what was on its way there is not to be given back behind the back of this one.
        let link = entry.next_link();
        let _serving =
            tokio::time::timeout(PATIENCE, entry.serving.lock()).await.map_err(|_| ChannelError::TimedOut)?;
        let welcome = v1::Welcome {
            session_id: self.entry.id.0,
            stats_page_version: STATS_PAGE_VERSION,
            says_working: self.word_every.is_some(),
        };
        moment();
        let page = self.entry.page().map_err(|_| ChannelError::System(Errno::MFILE))?;
        let outcome = match self.connection.send(daemon_frame::What::Welcome(welcome), &[Arc::new(page)]).await {
            Ok(()) => self.attend(link).await,
            Err(error) => Err(error),
        };
        if let Some(asked) = self.asked.take() {
            self.daemon.steward.cancel(asked.ledger);
        }
        self.daemon.detach_session(&self.entry, link);
        outcome
    }

    async fn attend(&mut self, link: u64) -> Result<(), ChannelError> {
        let mut links = self.entry.links.subscribe();
        loop {
            self.go_on().await?;
            let word_due = self.asked.as_ref().and_then(|asked| asked.word_due);
            let word = async {
                match word_due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            let answer = async {
                match &mut self.asked {
                    Some(asked) => (&mut asked.answer).await.unwrap_or(Answer::Refused(Refusal::Cancelled)),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // A session that was ended by other means is served no longer.
                () = self.entry.over() => return Ok(()),
                // Nor one that has another connection.
                () = async { drop(links.wait_for(|last| *last != link).await) } => return Ok(()),
                answer = answer => self.answered(answer).await?,
                () = word => self.say_working()?,
                frame = self.connection.receive() => {
                    let (frame, fds) = frame?;
                    check_no_descriptors(&fds)?;
                    self.take(frame).await?;
                }
            }
        }
    }

    /// Tells the client that its request is still worked on, or waits: only silence is to mean that nobody does.
    fn say_working(&mut self) -> Result<(), ChannelError> {
        let Some(asked) = &mut self.asked else { return Ok(()) };
        asked.word_due = self.word_every.map(|every| tokio::time::Instant::now() + every);
        // One that is answered already has nothing to be told but its answer, which is here or about to be.
        let Some((ready, wanted)) = self.daemon.steward.progress(asked.ledger) else { return Ok(()) };
        self.connection.mention(daemon_frame::What::Working(v1::Working { request: asked.request, ready, wanted }))
    }

    async fn take(&mut self, frame: v1::ClientFrame) -> Result<(), ChannelError> {
        match frame.what {
            Some(client_frame::What::Acquire(acquire)) => {
                if self.queued.len() >= limits::ACQUIRES_QUEUED_MAX {
                    let text = format!("{} acquires wait already", limits::ACQUIRES_QUEUED_MAX);
                    return self.connection.refuse(acquire.request, ErrorKind::Exhausted, text).await;
                }
                self.queued.push_back(acquire);
                Ok(())
            }
            Some(client_frame::What::Release(release)) => {
                moment();
                self.release(&release).await
            }
            Some(client_frame::What::Ack(ack)) => match &mut self.delivery {
                Some(delivery) if delivery.request == ack.request && !delivery.is_acknowledged => {
                    delivery.is_acknowledged = true;
                    self.connection.check_read()
                }
                _ => Err(ChannelError::Garbage("an ack for a batch that was not sent".into())),
            },
            Some(client_frame::What::Answer(answer)) => {
                let uuid = convert::device_uuid("device_uuid", &answer.device_uuid);
                // Of a device that there is not nothing was asked.
                if let Some(device) = uuid.ok().and_then(|uuid| self.daemon.device(uuid)) {
                    self.daemon.answered(&self.entry, device.id, answer.ask);
                }
                Ok(())
            }
            Some(client_frame::What::Shown(shown)) => {
                let uuid = convert::device_uuid("device_uuid", &shown.device_uuid);
                let device = uuid.ok().and_then(|uuid| self.daemon.device(uuid));
                if let Some(device) = device {
                    self.daemon.note_map(&self.entry, device.id, shown);
                }
                Ok(())
            }
            Some(client_frame::What::Hello(_) | client_frame::What::Claim(_)) => {
                Err(ChannelError::Garbage("a second first message".into()))
            }
            None => Err(ChannelError::Garbage("a message of a kind that this daemon does not know".into())),
        }
    }

    async fn release(&mut self, release: &v1::Release) -> Result<(), ChannelError> {
        let released = match convert::chunk_ids("chunk_ids", &release.chunk_ids) {
            Ok(chunks) => self.daemon.release(&self.entry, chunks).map_err(|error| (error.kind(), error.to_string())),
            Err(error) => Err((ErrorKind::Invalid, error.to_string())),
        };
        match released {
            // The client does not wait for an answer, and a socket buffer full of them would stop it.
            Ok(()) => Ok(()),
            Err((kind, text)) => self.connection.refuse(release.request, kind, text).await,
        }
    }

    /// Starts whatever can be started: the next batch, the next acquire.
    async fn go_on(&mut self) -> Result<(), ChannelError> {
        if let Some(delivery) = &mut self.delivery {
            if let Some(batch) = delivery.next_batch() {
                let sent = send_batch(self.daemon, self.connection, delivery, &batch).await;
                if let Err(error @ (ChannelError::System(_) | ChannelError::TimedOut)) = &sent {
                    let request = delivery.request;
                    // What it has acknowledged is the client's, to release like anything else: taken back here it could be granted again before that release comes.
                    let not_sent: Vec<_> = batch.into_iter().chain(delivery.left.drain(..)).collect();
                    self.delivery = None;
                    give_back(self.daemon, self.entry.id, &not_sent);
                    let text = why_not_sent(self.daemon, error);
                    return self.connection.refuse(request, ErrorKind::Exhausted, text).await;
                }
                return sent;
            }
            if delivery.is_acknowledged && delivery.left.is_empty() {
                self.delivery = None;
            }
        }
        if self.asked.is_none() && self.delivery.is_none() {
            while let Some(acquire) = self.queued.pop_front() {
                match self.ask(acquire) {
                    Ok(()) => break,
                    Err((request, kind, text)) => self.connection.refuse(request, kind, text).await?,
                }
            }
        }
        Ok(())
    }

    fn ask(&mut self, acquire: v1::Acquire) -> Result<(), (u64, ErrorKind, String)> {
        let request = acquire.request;
        let daemon = self.daemon;
        if daemon.is_draining() {
            return Err((request, ErrorKind::Unavailable, "the daemon is shutting down".into()));
        }
        let want = acquire.want.ok_or_else(|| (request, ErrorKind::Invalid, "want: missing".to_owned()))?;
        let ask = daemon
            .ask_for(self.entry.id, want)
            .map_err(|status| (request, kind_from_code(status.code()), status.message().to_owned()))?;
        let (send, answer) = oneshot::channel();
        let since = daemon.clock.now();
        let ledger = daemon
            .steward
            .acquire(ask, move |answer| {
                // Nobody listens when the connection is gone; then the session's end takes the chunks back.
                let _ = send.send(answer);
            })
            .map_err(|error| (request, error.kind(), error.to_string()))?;
        daemon.stirrer.stir();
        let word_due = self.word_every.map(|every| tokio::time::Instant::now() + every);
        self.asked = Some(Asked { request, ledger, answer, since, word_due });
        Ok(())
    }

    async fn answered(&mut self, answer: Answer) -> Result<(), ChannelError> {
        let asked = self.asked.take().expect("only what was asked is answered");
        let took = self.daemon.clock.now().saturating_sub(asked.since);
        self.daemon.latencies.note_acquire(took, matches!(answer, Answer::Granted(_)));
        match answer {
            Answer::Granted(chunks) => {
                self.entry.has_leased.store(true, Ordering::Relaxed);
                self.delivery = Some(Delivery { request: asked.request, left: chunks.into(), is_acknowledged: true });
                Ok(())
            }
            Answer::Refused(refusal) => {
                self.connection.refuse(asked.request, refusal.kind(), self.daemon.explain(&refusal)).await
            }
        }
    }
}
