//! The gRPC side of a session: a background thread that opens it, watches it, carries small requests, finds the next daemon where one has gone ([`returning`]), and closes it.
//!
//! The thread has a runtime of its own with no other thread, sleeps unless something comes, and ends with the session.

use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::mpsc as tokio_mpsc;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use super::giving::{Givers, Question, Wish};
use super::holdings::RangeHold;
use super::line::Line;
use super::quiet_stream::QuietStream;
use super::returning::{self, Returned};
use super::{RemoteDevice, SessionConfig, SessionError, signals};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::layers::metered::Metered;
use crate::error::root;
use crate::ids::{DeviceUuid, PlanId, SessionId};
use crate::ladder::Ladder;
use crate::limits;
use crate::runtime::{Counters, Room};
use crate::units::Bytes;
use crate::wire::convert::{self, Token, malformed};
use crate::wire::v1::plans_client::PlansClient;
use crate::wire::v1::ranges_client::RangesClient;
use crate::wire::v1::sessions_client::SessionsClient;
use crate::wire::{PROTOCOL, status, v1};

/// What the daemon said when the session was opened.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) session: SessionId,
    pub(super) secret: Token,
    pub(super) ticket: Token,
    pub(super) devices: Vec<RemoteDevice>,
    pub(super) driver: String,
    pub(super) limit: Bytes,
    pub(super) tenant: String,
    pub(super) wait: Duration,
    pub(super) guarantee: Bytes,
    pub(super) guarantee_max: Bytes,
    pub(super) ladder: Ladder,
    pub(super) chunk_socket: String,
}

/// The background thread, as the session sees it.
#[derive(Debug)]
pub(super) struct Control {
    commands: Option<tokio_mpsc::UnboundedSender<Command>>,
    thread: Option<JoinHandle<()>>,
    /// Whether the daemon has heard that the session is over.
    is_closed: Mutex<mpsc::Receiver<bool>>,
    lost: Lost,
    givers: Arc<Givers>,
    patience: Duration,
}

/// What the thread looks at beside the daemon, once the session has it.
pub(super) type Watched = Arc<OnceLock<Seen>>;

/// See [`Watched`].
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) driver: Arc<Metered>,
    /// Where driver calls that hang are counted.
    pub(super) counters: Counters,
    /// The session's, whose end is not to wait for this thread.
    pub(super) line: Weak<Line>,
}

/// How often it looks.
const LOOK: Duration = Duration::from_secs(5);
/// How long a driver call may take before it is said to hang.
const DRIVER_DEADLINE: Duration = Duration::from_secs(30);

/// Devices that the daemon says are gone.
type Lost = Arc<Mutex<Vec<DeviceUuid>>>;

type Answer<T> = mpsc::Sender<Result<T, SessionError>>;

enum Command {
    GetPlan(v1::GetPlanRequest, Answer<v1::GetPlanReply>),
    PutPlan(Vec<u8>, String, Answer<PlanId>),
    Room(DeviceUuid, Answer<Room>),
    Admit(DeviceUuid, Bytes, Duration, Answer<()>),
    Publish(v1::PublishRequest, Answer<v1::PublishReply>),
    Attach(v1::AttachRequest, Answer<v1::AttachReply>),
    Detach(Arc<RangeHold>, Answer<()>),
}

impl Control {
    /// Starts the thread and opens the session.
    pub(super) fn open(config: &SessionConfig, watched: Watched) -> Result<(Control, Opened), SessionError> {
        let (send, opened) = mpsc::channel();
        let (commands, receive) = tokio_mpsc::unbounded_channel();
        let (is_closed, hears_closed) = mpsc::channel();
        let (lost, givers) = (Lost::default(), Arc::new(Givers::default()));
        let worker = Worker {
            config: config.clone(),
            is_closed,
            lost: Arc::clone(&lost),
            givers: Arc::clone(&givers),
            watched,
            commands: receive,
        };
        let no_thread = |error: std::io::Error| SessionError::no_daemon(&config.socket, error.to_string());
        let thread = signals::begin("stitchd-control", move || worker.run(&send)).map_err(no_thread)?;
        let patience = config.patience;
        // The thread gives up after its own patience; twice that only if it is starved.
        let answer = opened.recv_timeout(patience * 2);
        let opened = answer.unwrap_or_else(|_| Err(SessionError::no_answer(&config.socket)))?;
        let (commands, thread, is_closed) = (Some(commands), Some(thread), Mutex::new(hears_closed));
        Ok((Control { commands, thread, is_closed, lost, givers, patience }, opened))
    }

    /// Every device of which the daemon has said so.
    pub(super) fn lost(&self) -> Vec<DeviceUuid> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True once the daemon has said that the device is gone.
    pub(super) fn is_lost(&self, device: DeviceUuid) -> bool {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).contains(&device)
    }

    pub(super) fn givers(&self) -> Arc<Givers> {
        Arc::clone(&self.givers)
    }

    pub(super) fn plan(&self, wanted: v1::GetPlanRequest) -> Result<v1::GetPlanReply, SessionError> {
        self.ask(|answer| Command::GetPlan(wanted, answer))
    }

    pub(super) fn put_plan(&self, plan: Vec<u8>, name: &str) -> Result<PlanId, SessionError> {
        self.ask(|answer| Command::PutPlan(plan, name.to_owned(), answer))
    }

    /// How much the session may have on a device.
    pub(super) fn room(&self, device: DeviceUuid) -> Result<Room, SessionError> {
        self.ask(|answer| Command::Room(device, answer))
    }

    /// Has the session guaranteed so much of a device.
    pub(super) fn admit(&self, device: DeviceUuid, guarantee: Bytes, wait: Duration) -> Result<(), SessionError> {
        self.ask_for(wait, |answer| Command::Admit(device, guarantee, wait, answer))
    }

    /// Publishes a range of the session.
    pub(super) fn publish(&self, wanted: v1::PublishRequest) -> Result<v1::PublishReply, SessionError> {
        self.ask(|answer| Command::Publish(wanted, answer))
    }

    /// Has the session hold a shared range.
    pub(super) fn attach(&self, wanted: v1::AttachRequest) -> Result<v1::AttachReply, SessionError> {
        self.ask(|answer| Command::Attach(wanted, answer))
    }

    /// Has the session hold a shared range once less.
    pub(super) fn detach(&self, hold: &Arc<RangeHold>) -> Result<(), SessionError> {
        self.ask(|answer| Command::Detach(Arc::clone(hold), answer))
    }

    fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, SessionError> {
        self.ask_for(Duration::ZERO, command)
    }

    /// The same of what may take so long.
    fn ask_for<T>(&self, wait: Duration, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, SessionError> {
        let (send, receive) = mpsc::channel();
        let sent = self.commands.as_ref().is_some_and(|commands| commands.send(command(send)).is_ok());
        if !sent {
            return Err(SessionError::DaemonGone);
        }
        receive.recv_timeout(wait.saturating_add(self.patience * 2)).unwrap_or(Err(SessionError::DaemonGone))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if super::fork::is_child() {
            // The thread is the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        // Without a sender the thread closes the session and ends, within twice its patience: it may have just begun to watch a daemon that says nothing.
        self.commands = None;
        // A daemon that is away is told later: nobody waits for that.
        let is_told = self.is_closed.get_mut().unwrap_or_else(PoisonError::into_inner).recv();
        if let (Some(thread), Ok(true) | Err(_)) = (self.thread.take(), is_told) {
            let _ = thread.join();
        }
    }
}

struct Worker {
    config: SessionConfig,
    is_closed: mpsc::Sender<bool>,
    lost: Lost,
    givers: Arc<Givers>,
    watched: Watched,
    commands: tokio_mpsc::UnboundedReceiver<Command>,
}

/// Which session, and what proves it.
pub(super) type Me = (SessionId, Token);

/// Commands that wait for the next daemon, and a clock that began when the first came.
type Backlog = Vec<(SystemClock, Command)>;

impl Worker {
    fn run(self, opened: &mpsc::Sender<Result<Opened, SessionError>>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        match runtime {
            Ok(runtime) => runtime.block_on(self.serve(opened)),
            // Whoever waits for the answer may have given up; nobody else cares.
            Err(error) => drop(opened.send(Err(SessionError::no_daemon(&self.config.socket, error.to_string())))),
        }
    }

    async fn serve(mut self, answer: &mpsc::Sender<Result<Opened, SessionError>>) {
        let patience = self.config.patience;
        let opening = tokio::time::timeout(patience, self.open());
        let (channel, opened) =
            match opening.await.unwrap_or_else(|_| Err(SessionError::no_answer(&self.config.socket))) {
                Ok(both) => both,
                Err(error) => return drop(answer.send(Err(error))),
            };
        let (mut channel, mut me) = (channel, (opened.session, opened.secret));
        if answer.send(Ok(opened)).is_ok() {
            while self.attend(channel.clone(), me).await == Then::Return {
                match self.come_back(&mut me).await {
                    Some(back) => channel = back,
                    None => break,
                }
            }
        }
        let is_told = returning::close(channel, me, patience).await;
        // Whoever waits for this thread may have gone.
        let _ = self.is_closed.send(is_told);
        if !is_told {
            returning::close_later(&self.config.socket, me, patience).await;
        }
    }

    fn line(&self) -> Option<Arc<Line>> {
        self.watched.get().and_then(|seen| seen.line.upgrade())
    }

    /// The daemon is away: looks for one that knows the session, until there is one or the session is dropped. What is asked meanwhile waits for it.
    async fn come_back(&mut self, me: &mut Me) -> Option<Channel> {
        let (mut pause, mut backlog, mut was_late) = (returning::PAUSE_MIN, Backlog::new(), false);
        let mut looks = tokio::time::interval(LOOK);
        let renamings = self.line()?.holdings.renamings();
        loop {
            // A session that is not whole yet has nothing that could be taken along.
            let line = self.line()?;
            let tried = {
                let trying = returning::try_to(&self.config, &line, me);
                tokio::pin!(trying);
                loop {
                    tokio::select! {
                        tried = &mut trying => break tried,
                        // Who drops the session does not wait for this.
                        command = self.commands.recv() => backlog.push((SystemClock::new(), command?)),
                    }
                }
            };
            match tried {
                Returned::Here(channel) => {
                    tracing::debug!(session = %me.0, "a daemon is there again");
                    for (since, command) in backlog {
                        let is_stale = match &command {
                            // The daemon was not told of it: it is none.
                            Command::Detach(hold, _) => !line.holdings.was_told(hold),
                            // It names chunks as another daemon did.
                            Command::Publish(..) => line.holdings.renamings() != renamings,
                            _ => false,
                        };
                        // Whoever has asked waits twice as long at least.
                        if !is_stale && since.now() < self.config.patience {
                            drop(tokio::spawn(carry_out(command, channel.clone(), *me, self.config.patience)));
                        }
                    }
                    return Some(channel);
                }
                Returned::NotYet(reason) => tracing::trace!(reason, "no daemon is there yet"),
                Returned::Never(reason) => {
                    tracing::debug!(reason, "no daemon will know this session again");
                    line.give_up();
                    break;
                }
            }
            drop(line);
            // Whoever has asked for those has gone.
            backlog.retain(|(since, _)| since.now() < self.config.patience * 2);
            let wait = tokio::time::sleep(pause);
            tokio::pin!(wait);
            loop {
                tokio::select! {
                    command = self.commands.recv() => backlog.push((SystemClock::new(), command?)),
                    _ = looks.tick() => was_late = look(&self.watched, was_late),
                    () = &mut wait => break,
                }
            }
            pause = (pause * 2).min(returning::PAUSE_MAX);
        }
        backlog.clear();
        // Whoever asks hears that nobody is there: his answer goes with the command.
        loop {
            tokio::select! {
                command = self.commands.recv() => drop(command?),
                _ = looks.tick() => was_late = look(&self.watched, was_late),
            }
        }
    }

    /// Serves commands until the session is dropped, or the daemon goes.
    async fn attend(&mut self, channel: Channel, me: Me) -> Then {
        let watch = v1::WatchRequest { session_id: me.0.0, secret: me.1.to_vec() };
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut was_late = false;
        // Beside the rest, and as long as it takes: whoever drops the session waits for this thread, and a daemon that was stopped after it had opened the session may go on later.
        let (lost, givers, watched) = (Arc::clone(&self.lost), Arc::clone(&self.givers), Arc::clone(&self.watched));
        let gone = watch_until_gone(channel.clone(), watch, &lost, &givers, &watched);
        tokio::pin!(gone);
        loop {
            tokio::select! {
                command = self.commands.recv() => match command {
                    // Beside the rest: one that waits must not keep questions from their answers.
                    Some(command) => drop(tokio::spawn(carry_out(command, channel.clone(), me, self.config.patience))),
                    None => return Then::End,
                },
                _ = looks.tick() => was_late = look(&self.watched, was_late),
                reason = &mut gone => {
                    tracing::debug!(reason, "the daemon went away");
                    return self.note_away().await;
                }
                () = broken(&self.watched) => {
                    tracing::debug!("the connection to the daemon is over, and its other one is not");
                    return self.note_away().await;
                }
            }
        }
    }

    async fn note_away(&self) -> Then {
        match self.line() {
            Some(line) => line.set_attached(false),
            // Whoever opens the session hears it on the way that he waits on.
            None => tokio::time::sleep(returning::PAUSE_MAX).await,
        }
        Then::Return
    }

    async fn open(&self) -> Result<(Channel, Opened), SessionError> {
        let channel = dial(&self.config.socket).await?;
        let opened = open_over(channel.clone(), &self.config).await?;
        Ok((channel, opened))
    }
}

/// What comes after a daemon was attended to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// The session is over.
    End,
    /// It has gone.
    Return,
}

/// Completes when somebody finds that the connection for chunks is over.
async fn broken(watched: &Watched) {
    loop {
        if let Some(line) = watched.get().and_then(|seen| seen.line.upgrade()) {
            line.broken.notified().await;
            return;
        }
        // The session is not whole yet.
        tokio::time::sleep(returning::PAUSE_MAX).await;
    }
}

/// Opens a session.
pub(super) async fn open_over(channel: Channel, config: &SessionConfig) -> Result<Opened, SessionError> {
    let request = v1::OpenRequest {
        protocol: PROTOCOL,
        name: config.name.clone(),
        limit_bytes: config.limit.map_or(0, Bytes::get),
        priority: config.priority,
        client_version: env!("CARGO_PKG_VERSION").to_owned(),
        tenant: config.tenant.clone(),
        answers: true,
        guarantee_bytes: config.guarantee.map(Bytes::get),
        pod: config.pod.clone(),
    };
    let reply = SessionsClient::new(channel).open(request).await.map_err(|status| refused(&status))?;
    opened(reply.into_inner())
}

/// Looks for what came for requests that were given up, and gives it back. Looks for driver calls that do not come back, and says so once. A call into the driver's library cannot be ended; but
/// people who look at sessions shall see why a job stands still.
fn look(watched: &Watched, was_late: bool) -> bool {
    let Some(Seen { driver, counters, line }) = watched.get() else { return false };
    if let Some(line) = line.upgrade() {
        line.settle();
    }
    let (count, oldest) = driver.layer().overdue(DRIVER_DEADLINE);
    counters.set_overdue(count);
    if let (Some((call, age)), false) = (oldest, was_late) {
        tracing::warn!(%call, seconds = age.as_secs(), "a driver call does not come back");
    }
    count > 0
}

/// Ends when the daemon says that it ends, or is gone. Notes what else it says.
async fn watch_until_gone(
    channel: Channel,
    watch: v1::WatchRequest,
    lost: &Lost,
    givers: &Givers,
    watched: &Watched,
) -> &'static str {
    let Ok(notices) = SessionsClient::new(channel).watch(watch).await else { return "it could not be watched" };
    let mut notices = notices.into_inner();
    loop {
        match notices.message().await {
            Ok(Some(v1::Notice { what: Some(v1::notice::What::ShuttingDown(_)) })) => return "it is shutting down",
            Ok(Some(v1::Notice { what: Some(v1::notice::What::DeviceLost(device)) })) => {
                if let Ok(uuid) = convert::device_uuid("device_uuid", &device.device_uuid) {
                    tracing::warn!(device = %uuid, "the daemon says that the device is lost");
                    lost.lock().unwrap_or_else(PoisonError::into_inner).push(uuid);
                }
            }
            Ok(Some(v1::Notice { what: Some(v1::notice::What::AskBack(asked)) })) => {
                let Ok(device) = convert::device_uuid("device_uuid", &asked.device_uuid) else { continue };
                let question = Question { device, ask: asked.ask, bytes: Bytes::new(asked.len_bytes) };
                // Before the session is whole it has nothing.
                let line = watched.get().map(|seen| seen.line.clone()).unwrap_or_default();
                givers.hand_over(Wish::Memory(question), &line);
            }
            Ok(Some(v1::Notice { what: Some(v1::notice::What::Look(look)) })) => {
                let Ok(device) = convert::device_uuid("device_uuid", &look.device_uuid) else { continue };
                let line = watched.get().map(|seen| seen.line.clone()).unwrap_or_default();
                givers.hand_over(Wish::Look(device, look.look), &line);
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return "the connection broke",
        }
    }
}

async fn carry_out(command: Command, channel: Channel, (session, secret): (SessionId, Token), patience: Duration) {
    let mut plans = PlansClient::new(channel.clone())
        .max_decoding_message_size(limits::GRPC_MESSAGE_LEN_MAX)
        .max_encoding_message_size(limits::GRPC_MESSAGE_LEN_MAX);
    // Whoever asked may have given up.
    match command {
        Command::GetPlan(wanted, answer) => {
            let _ = answer.send(in_time(patience, plans.get(wanted)).await);
        }
        Command::PutPlan(plan, name, answer) => {
            let request = plans.put(v1::PutPlanRequest { plan, name });
            let _ = answer.send(in_time(patience, request).await.map(|reply| PlanId(reply.plan_id)));
        }
        Command::Room(device, answer) => {
            let device_uuid = device.0.to_vec();
            let wanted = v1::RoomRequest { session_id: session.0, secret: secret.to_vec(), device_uuid };
            let mut sessions = SessionsClient::new(channel);
            let room =
                |reply: v1::RoomReply| Room { most: Bytes::new(reply.most_bytes), free: Bytes::new(reply.free_bytes) };
            let _ = answer.send(in_time(patience, sessions.room(wanted)).await.map(room));
        }
        Command::Admit(device, guarantee, wait, answer) => {
            let wanted = v1::AdmitRequest {
                session_id: session.0,
                secret: secret.to_vec(),
                device_uuid: device.0.to_vec(),
                guarantee_bytes: guarantee.get(),
                wait_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
            };
            let mut sessions = SessionsClient::new(channel);
            let admitted = in_time(patience.saturating_add(wait), sessions.admit(wanted)).await;
            let _ = answer.send(admitted.map(drop));
        }
        Command::Publish(wanted, answer) => {
            let wanted = v1::PublishRequest { session_id: session.0, secret: secret.to_vec(), ..wanted };
            let _ = answer.send(in_time(patience, RangesClient::new(channel).publish(wanted)).await);
        }
        Command::Attach(wanted, answer) => {
            let wanted = v1::AttachRequest { session_id: session.0, secret: secret.to_vec(), ..wanted };
            let reply = in_time(patience, RangesClient::new(channel.clone()).attach(wanted)).await;
            let held = reply.as_ref().ok().and_then(|reply| reply.range.as_ref()).map(|range| range.range_id);
            if let (Err(_), Some(range_id)) = (answer.send(reply), held) {
                // Nobody here knows that it is held.
                let wanted = v1::DetachRequest { session_id: session.0, secret: secret.to_vec(), range_id };
                let _ = in_time(patience, RangesClient::new(channel).detach(wanted)).await;
            }
        }
        Command::Detach(hold, answer) => {
            let range = hold.range;
            let wanted = v1::DetachRequest { session_id: session.0, secret: secret.to_vec(), range_id: range.0 };
            let _ = answer.send(in_time(patience, RangesClient::new(channel).detach(wanted)).await.map(drop));
        }
    }
}

async fn in_time<T>(
    patience: Duration,
    request: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, SessionError> {
    match tokio::time::timeout(patience, request).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(refused(&status)),
        Err(_) => Err(SessionError::DaemonGone),
    }
}

pub(super) fn refused(status: &Status) -> SessionError {
    SessionError::Refused { kind: status::kind_from_code(status.code()), message: status.message().to_owned() }
}

/// A gRPC connection over a Unix socket.
pub async fn dial(socket: &Path) -> Result<Channel, SessionError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(|stream| TokioIo::new(QuietStream(stream))) }
    });
    // The host is not used: the connector knows the socket. It must be one that every server accepts.
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connector).await.map_err(|error| {
        let root = root(&error);
        let kind = root.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        match kind {
            Some(std::io::ErrorKind::PermissionDenied) => SessionError::Forbidden { socket: socket.to_owned() },
            _ => SessionError::no_daemon(socket, root.to_string()),
        }
    })
}

fn opened(reply: v1::OpenReply) -> Result<Opened, SessionError> {
    if reply.protocol != PROTOCOL {
        return Err(SessionError::Protocol { daemon: reply.protocol, client: PROTOCOL });
    }
    let device = |device: &v1::Device| {
        Ok::<_, convert::Malformed>(RemoteDevice {
            uuid: convert::device_uuid("device.uuid", &device.uuid)?,
            model: convert::name("device.model", &device.model)?,
            total: convert::size("device.total_bytes", device.total_bytes)?,
            ordinal: convert::ordinal("device.ordinal", device.ordinal)?,
        })
    };
    let is_plain = !reply.chunk_socket.is_empty() && !reply.chunk_socket.contains('/');
    if !is_plain {
        return Err(malformed("chunk_socket", "not a plain file name").into());
    }
    Ok(Opened {
        session: SessionId(reply.session_id),
        secret: convert::token("secret", &reply.secret)?,
        ticket: convert::token("ticket", &reply.ticket)?,
        devices: reply.devices.iter().map(device).collect::<Result<_, _>>()?,
        driver: reply.driver,
        limit: Bytes::new(reply.limit_bytes),
        guarantee_max: Bytes::new(reply.guarantee_max_bytes),
        tenant: convert::name("tenant", &reply.tenant)?,
        wait: Duration::from_millis(reply.wait_ms.min(limits::WAIT_MS_MAX)),
        guarantee: Bytes::new(reply.guarantee_bytes),
        ladder: Ladder::new(reply.ladder_bytes.into_iter().map(Bytes::new).collect())?,
        chunk_socket: reply.chunk_socket,
    })
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response};

    use super::*;
    use crate::wire::v1::sessions_server::{Sessions, SessionsServer};

    /// A daemon that opens sessions and then says nothing any more, as one that was stopped.
    struct Silent;

    #[tonic::async_trait]
    impl Sessions for Silent {
        type WatchStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<v1::Notice, Status>> + Send>>;

        async fn open(&self, _: Request<v1::OpenRequest>) -> Result<Response<v1::OpenReply>, Status> {
            Ok(Response::new(v1::OpenReply {
                protocol: PROTOCOL,
                secret: vec![1; 16],
                ticket: vec![2; 16],
                ladder_bytes: vec![2 << 20],
                chunk_socket: "chunks".into(),
                ..v1::OpenReply::default()
            }))
        }

        async fn close(&self, _: Request<v1::CloseRequest>) -> Result<Response<v1::CloseReply>, Status> {
            std::future::pending().await
        }

        async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
            std::future::pending().await
        }

        async fn room(&self, _: Request<v1::RoomRequest>) -> Result<Response<v1::RoomReply>, Status> {
            std::future::pending().await
        }

        async fn admit(&self, _: Request<v1::AdmitRequest>) -> Result<Response<v1::AdmitReply>, Status> {
            std::future::pending().await
        }

        async fn reattach(&self, _: Request<v1::ReattachRequest>) -> Result<Response<v1::ReattachReply>, Status> {
            std::future::pending().await
        }

        async fn answer(&self, _: Request<v1::AnswerRequest>) -> Result<Response<v1::AnswerReply>, Status> {
            std::future::pending().await
        }
    }

    #[test]
    fn a_daemon_that_falls_silent_once_a_session_is_open_is_left_in_time() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::bind(&socket).unwrap()
        };
        let serving = tonic::transport::Server::builder().add_service(SessionsServer::new(Silent));
        drop(runtime.spawn(serving.serve_with_incoming(UnixListenerStream::new(listener))));
        let patience = Duration::from_millis(200);
        let config = SessionConfig { patience, ..SessionConfig::new(socket, "x") };
        let (send, is_left) = mpsc::channel();
        std::thread::spawn(move || {
            let clock = SystemClock::new();
            let (control, _) = Control::open(&config, Watched::default()).unwrap();
            drop(control);
            // If it comes too late nobody listens any more.
            let _ = send.send(clock.now());
        });
        let took = is_left.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(took < Duration::from_secs(30), "{took:?}");
        runtime.shutdown_background();
    }
}
