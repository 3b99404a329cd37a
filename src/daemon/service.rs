//! The gRPC services: each call is checked, carried out, and answered; the ledger decides.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tokio::net::UnixListener;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;

use super::chunk_server::give_back;
use super::claims::OpenClaims;
use super::gate::Gate;
use super::listener::{AcceptFailures, CHUNK_SOCKET_NAME, PeerInfo, PeerStream};
use super::live::maps::Maps;
use super::plans::{PlanStore, PlanStoreError, Stored};
use super::reattach::process_of;
use super::refusals::Refused;
use super::registry::{Entry, Good, NotGood, random_token};
use super::tenants::{Wish, over_guarantee};
use super::{Daemon, DaemonError, NodeDevice};
use crate::clock::unix_seconds;
use crate::error::{ErrorKind, chain};
use crate::ids::{ChunkId, DeviceId, PlanId, RequestId, SessionId};
use crate::journal::SessionRecord;
use crate::keeper::Key;
use crate::ladder::{Part, Shape, Stock};
use crate::ledger::{EndReason, Holder, LedgerError, Refusal};
use crate::limits;
use crate::mortal::moment;
use crate::plan::Position;
use crate::steward::{Answer, Ask};
use crate::units::Bytes;
use crate::wire::convert::{self, Malformed, WantedChunks, WantedPlans};
use crate::wire::peer::{Identity, Peer};
use crate::wire::status::status;
use crate::wire::v1::admin_server::AdminServer;
use crate::wire::v1::leases_server::{Leases, LeasesServer};
use crate::wire::v1::plans_server::{Plans, PlansServer};
use crate::wire::v1::ranges_server::RangesServer;
use crate::wire::v1::sessions_server::{Sessions, SessionsServer};
use crate::wire::{DESCRIPTORS, PROTOCOL, stats_page, v1};

/// Serves gRPC until the daemon has ended.
pub(super) async fn run(daemon: Arc<Daemon>, listener: UnixListener) -> Result<(), DaemonError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<SessionsServer<Service>>().await;
    health.set_serving::<LeasesServer<Service>>().await;
    health.set_serving::<PlansServer<Service>>().await;
    health.set_serving::<RangesServer<Service>>().await;
    health.set_serving::<AdminServer<Service>>().await;
    let mut ending = daemon.ending.subscribe();
    tokio::spawn(async move {
        // A daemon that is gone without that answers nobody.
        if ending.wait_for(|ending| *ending).await.is_err() {
            return;
        }
        // The node as a whole, and what nothing more is asked of. Whoever looks at a daemon may until it is gone.
        health.set_service_status("", ServingStatus::NotServing).await;
        health.set_not_serving::<SessionsServer<Service>>().await;
        health.set_not_serving::<LeasesServer<Service>>().await;
        health.set_not_serving::<PlansServer<Service>>().await;
        health.set_not_serving::<RangesServer<Service>>().await;
    });
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .expect("the descriptors come from the compiler");
    let service = Service(Arc::clone(&daemon));
    let plans = |len_max| {
        PlansServer::new(service.clone())
            .max_decoding_message_size(len_max)
            .max_encoding_message_size(limits::GRPC_MESSAGE_LEN_MAX)
    };
    const SMALL: usize = limits::GRPC_SMALL_MESSAGE_LEN_MAX;
    let plans = Gate::new(plans(limits::GRPC_MESSAGE_LEN_MAX), plans(SMALL), Arc::clone(&daemon.connections));
    let admin = AdminServer::new(service.clone()).max_decoding_message_size(SMALL);
    let admin = Gate::of(admin, Arc::clone(&daemon.connections));
    let leases = LeasesServer::new(service.clone()).max_decoding_message_size(limits::GRPC_LEASE_MESSAGE_LEN_MAX);
    let leases = Gate::of(leases, Arc::clone(&daemon.connections));
    let ranges = RangesServer::new(service.clone()).max_decoding_message_size(limits::GRPC_LEASE_MESSAGE_LEN_MAX);
    let ranges = Gate::of(ranges, Arc::clone(&daemon.connections));
    let reflection = Gate::of(reflection.max_decoding_message_size(SMALL), Arc::clone(&daemon.connections));
    let incoming = accept(Arc::clone(&daemon), listener);
    tonic::transport::Server::builder()
        .max_concurrent_streams(limits::GRPC_STREAMS_MAX)
        .concurrency_limit_per_connection(limits::GRPC_CALLS_MAX)
        .initial_stream_window_size(limits::GRPC_WINDOW_LEN)
        .initial_connection_window_size(limits::GRPC_WINDOW_LEN * limits::GRPC_STREAMS_MAX)
        .add_service(health_service.max_decoding_message_size(SMALL))
        .add_service(reflection)
        .add_service(SessionsServer::new(service.clone()).max_decoding_message_size(SMALL))
        .add_service(leases)
        .add_service(ranges)
        .add_service(plans)
        .add_service(admin)
        .serve_with_incoming_shutdown(incoming, daemon.ended())
        .await?;
    Ok(())
}

/// Connections, each with its peer. An accept that fails is tried again after a moment: descriptors may have run out.
fn accept(daemon: Arc<Daemon>, listener: UnixListener) -> impl Stream<Item = Result<PeerStream, std::io::Error>> {
    let (send, receive) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut failures = AcceptFailures::default();
        loop {
            tokio::select! {
                () = send.closed() => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        failures.reset();
                        // One too many is closed again.
                        let Some(stream) = PeerStream::new(stream, &daemon.connections) else {
                            daemon.refusals.count(Refused::Connections);
                            continue;
                        };
                        if send.send(Ok(stream)).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => failures.note("the gRPC socket", &listener, &error).await,
                }
            }
        }
    });
    ReceiverStream::new(receive)
}

/// Of the chunks that a device may have a static pool takes such a part at most, if there are larger ones.
const CHUNKS_SHARE: u64 = 16;

/// All services over one daemon.
#[derive(Clone)]
pub(super) struct Service(pub(super) Arc<Daemon>);

pub(super) fn refused(malformed: &Malformed) -> Status {
    status(ErrorKind::Invalid, malformed.to_string())
}

/// Which plans are wanted: any where nobody says.
fn wanted_plans(job: Option<v1::PlanFor>) -> Result<WantedPlans, Status> {
    WantedPlans::try_from(job.unwrap_or_default()).map_err(|error| refused(&error))
}

fn not_good(error: NotGood) -> Status {
    status(ErrorKind::NotFound, error.to_string())
}

pub(super) fn from_ledger(error: &LedgerError) -> Status {
    status(error.kind(), error.to_string())
}

impl Daemon {
    /// What a session wants, as a request to the steward.
    pub(super) fn ask_for(&self, session: SessionId, want: v1::Want) -> Result<Ask, Status> {
        // What a process says of itself.
        let waited_ms = want.waited_ms.min(limits::WAIT_MS_MAX);
        let wanted = WantedChunks::try_from(want).map_err(|error| refused(&error))?;
        let device = self.device(wanted.device).ok_or_else(|| {
            let known: Vec<_> = self.devices.iter().map(|device| device.uuid.to_string()).collect();
            status(ErrorKind::NotFound, format!("there is no device {}; there are {}", wanted.device, known.join(", ")))
        })?;
        let stock = || self.steward.stock(session, device.id);
        let parts = self.cover(device.id, wanted.len, wanted.shape, stock).ok_or_else(|| {
            status(
                ErrorKind::Invalid,
                format!("{} in {:?} are more chunks than one lease can have", wanted.len, wanted.shape),
            )
        })?;
        if wanted.wait_ms > 0 && self.steward.room(session, device.id).is_some_and(|room| room < wanted.len) {
            self.look_for_parked(device.id);
        }
        if let (Some(plan), Some(entry)) = (wanted.plan, self.registry.get(session)) {
            entry.plan.store(plan.0, Ordering::Relaxed);
        }
        let holder = Holder::Session(session);
        Ok(Ask { holder, device: device.id, parts, plan: wanted.plan, wait_ms: wanted.wait_ms, waited_ms })
    }

    /// The chunks that cover a range. Where small ones are wanted rather than needed, and would be a good part of all that a device may have, they are larger.
    fn cover(&self, device: DeviceId, len: Bytes, shape: Shape, stock: impl FnOnce() -> Stock) -> Option<Vec<Part>> {
        let most = self.steward.store().chunks_max(device) / CHUNKS_SHARE;
        let is_few = |parts: &Vec<Part>| parts.iter().map(|part| part.count).sum::<u64>() <= most;
        match shape {
            Shape::AtMost(_) => {
                let parts = self.ladder.cover(len, shape).filter(is_few);
                parts.or_else(|| self.ladder.cover(len, Shape::Largest))
            }
            _ => self.ladder.cover_with(len, shape, stock),
        }
    }

    /// The text of a refusal, with names where the ledger has numbers.
    pub(super) fn explain(&self, refusal: &Refusal) -> String {
        let mut text = refusal.to_string();
        if let Refusal::Exhausted { holders, .. }
        | Refusal::Guarantee { holders, .. }
        | Refusal::Deadlock { cycle: holders, .. } = refusal
        {
            let named = |held: &crate::ledger::Holding| {
                let entry = self.registry.get(held.session)?;
                Some(format!("{} is '{}' (pid {})", held.session, entry.name, entry.pid))
            };
            let names: Vec<_> = holders.iter().filter_map(named).collect();
            if !names.is_empty() {
                text = format!("{text}; {}", names.join(", "));
            }
        }
        text
    }
}

/// A place among the requests of a session that wait over gRPC.
fn place_to_wait(entry: &Entry) -> Result<SemaphorePermit<'_>, Status> {
    let too_many = |_| {
        let text = format!("{} acquires of this session wait already", limits::ACQUIRES_QUEUED_MAX);
        status(ErrorKind::Exhausted, text)
    };
    entry.acquires.try_acquire().map_err(too_many)
}

impl Service {
    /// The daemon's device of this name.
    pub(super) fn known_device(&self, uuid: &[u8]) -> Result<&NodeDevice, Status> {
        let uuid = convert::device_uuid("device_uuid", uuid).map_err(|error| refused(&error))?;
        self.0.device(uuid).ok_or_else(|| status(ErrorKind::NotFound, format!("there is no device {uuid}")))
    }

    /// Has something done with the plans: reading, checking and writing one takes milliseconds, not on a thread that others wait for.
    async fn with_plans<T: Send + 'static>(
        &self,
        work: impl FnOnce(&PlanStore) -> Result<T, PlanStoreError> + Send + 'static,
    ) -> Result<T, Status> {
        let daemon = Arc::clone(&self.0);
        let done = tokio::task::spawn_blocking(move || work(&daemon.plans)).await;
        let done = done.map_err(|error| status(ErrorKind::Broken, error.to_string()))?;
        done.map_err(|error| status(error.kind(), chain(&error)))
    }

    pub(super) fn peer<T>(request: &Request<T>) -> Result<Arc<Peer>, Status> {
        let info = request.extensions().get::<PeerInfo>();
        info.map(|info| Arc::clone(&info.0)).ok_or_else(|| status(ErrorKind::Broken, "the connection has no peer"))
    }

    pub(super) fn authorise<T>(&self, request: &Request<T>, session: u64, secret: &[u8]) -> Result<Arc<Entry>, Status> {
        let secret = convert::token("secret", secret).map_err(|error| refused(&error))?;
        let peer = Self::peer(request)?;
        self.0.registry.authorise(SessionId(session), &secret, &peer).map_err(|error| {
            self.0.refusals.note(Refused::Secret, &peer, &SessionId(session).to_string());
            not_good(error)
        })
    }

    pub(super) fn check_draining(&self) -> Result<(), Status> {
        if self.0.is_draining() { Err(status(ErrorKind::Unavailable, "the daemon is shutting down")) } else { Ok(()) }
    }

    /// Asks the steward and waits for its answer; gives the request up when the caller does.
    async fn acquire(&self, ask: Ask) -> Result<Vec<(ChunkId, Bytes)>, Status> {
        let daemon = &self.0;
        let started = daemon.clock.now();
        let answer = self.answer_to(ask.holder, |reply| daemon.steward.acquire(ask, reply)).await;
        daemon.latencies.note_acquire(daemon.clock.now().saturating_sub(started), answer.is_ok());
        answer
    }

    /// Waits for the answer to what `ask` asks for a holder.
    async fn answer_to(
        &self,
        holder: Holder,
        ask: impl FnOnce(Box<dyn FnOnce(Answer) + Send>) -> Result<RequestId, LedgerError>,
    ) -> Result<Vec<(ChunkId, Bytes)>, Status> {
        let daemon = &self.0;
        let (send, receive) = oneshot::channel();
        let (late, session) =
            (Arc::clone(daemon), if let Holder::Session(session) = holder { Some(session) } else { None });
        let request = ask(Box::new(move |answer| {
            // Nobody listens when the caller has given up.
            if let (Err(Answer::Granted(chunks)), Some(session)) = (send.send(answer), session) {
                give_back(&late, session, &chunks);
            }
        }))
        .map_err(|error| from_ledger(&error))?;
        daemon.stirrer.stir();
        let mut asked = Asked { daemon, request, session, receive };
        let answer = (&mut asked.receive).await.unwrap_or(Answer::Refused(Refusal::Cancelled));
        drop(asked);
        match answer {
            Answer::Granted(chunks) => Ok(chunks),
            Answer::Refused(refusal) => Err(status(refusal.kind(), daemon.explain(&refusal))),
        }
    }
}

/// A request whose caller waits. When that one goes away first, the request is cancelled, and what was granted in the same moment goes back.
struct Asked<'a> {
    daemon: &'a Daemon,
    request: RequestId,
    session: Option<SessionId>,
    receive: oneshot::Receiver<Answer>,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.daemon.steward.cancel(self.request);
        self.receive.close();
        if let (Ok(Answer::Granted(chunks)), Some(session)) = (self.receive.try_recv(), self.session) {
            give_back(self.daemon, session, &chunks);
        }
    }
}

#[tonic::async_trait]
impl Sessions for Service {
    async fn open(&self, request: Request<v1::OpenRequest>) -> Result<Response<v1::OpenReply>, Status> {
        self.check_draining()?;
        let peer = Self::peer(&request)?;
        let wanted = request.into_inner();
        if wanted.protocol != PROTOCOL {
            let text = format!(
                "the client speaks protocol {}, this daemon (version {}) {PROTOCOL}; install the same version of both",
                wanted.protocol,
                env!("CARGO_PKG_VERSION")
            );
            return Err(status(ErrorKind::Unsupported, text));
        }
        let name = convert::name("name", &wanted.name).map_err(|error| refused(&error))?;
        let daemon = &self.0;
        let all: Bytes = daemon.devices.iter().map(|device| device.total).sum();
        let tenant = convert::name("tenant", &wanted.tenant).map_err(|error| refused(&error))?;
        let (limit, priority, answers) = (Bytes::new(wanted.limit_bytes), wanted.priority, wanted.answers);
        let guarantee = wanted.guarantee_bytes.map(Bytes::new);
        let wish = Wish { tenant: &tenant, limit, priority, guarantee, answers };
        let seated = daemon.config.seat(&peer, &wish, all).map_err(|text| status(ErrorKind::OverLimit, text))?;
        if peer.identity == Identity::Unproven {
            let text =
                "the daemon cannot tell which process this is: it has no descriptors left, or the process is gone";
            return Err(status(ErrorKind::Exhausted, text));
        }
        if peer.identity != Identity::Unknown && daemon.registry.count_of(peer.identity) >= limits::PROCESS_SESSIONS_MAX
        {
            let text = format!("this process has {} sessions, as many as one may have", limits::PROCESS_SESSIONS_MAX);
            return Err(status(ErrorKind::Exhausted, text));
        }
        let seat = daemon.connections.enter(&peer).ok_or_else(|| {
            daemon.refusals.count(Refused::Connections);
            let text = "this process has as many connections and sessions as the daemon's open files allow; raise its limit (LimitNOFILE)";
            status(ErrorKind::Exhausted, text)
        })?;
        let short = |what: &str, error: &dyn std::error::Error| {
            let text =
                format!("the daemon cannot {what}: {}; raise its limit of open files (LimitNOFILE)", chain(error));
            status(ErrorKind::Exhausted, text)
        };
        // One that is there and cannot be copied is no kernel without it: then nothing would tell when the process ends.
        let pidfd = peer.pidfd.as_ref().map(|pidfd| pidfd.try_clone()).transpose();
        let pidfd = pidfd.map_err(|error| short("watch this process", &error))?;
        let broken = |error: &dyn std::error::Error| status(ErrorKind::Broken, chain(error));
        let secret = random_token().map_err(|error| broken(&error))?;
        let pidfd = pidfd.map(Arc::new);
        let record = |session| {
            let (name, tenant, terms) = (name.clone(), seated.tenant.clone(), seated.terms);
            let (process, guarantee_max) = (process_of(&peer), seated.guarantee_max);
            let opened_s = unix_seconds();
            Some(SessionRecord { session, secret, process, name, tenant, terms, guarantee_max, opened_s })
        };
        let id = daemon.steward.open_as(seated.terms, record).map_err(|error| from_ledger(&error))?;
        moment();
        let page = match stats_page::create(id) {
            Ok(page) => page,
            Err(error) => {
                // Nobody knows of it yet.
                let _ = daemon.steward.end(id, EndReason::Closed);
                return Err(short("make the page of this session's figures", &error));
            }
        };
        let entry = Arc::new(Entry {
            id,
            name,
            secret,
            identity: peer.identity,
            pid: peer.pid,
            has_pidfd: pidfd.is_some(),
            tenant: seated.tenant,
            pod: OnceLock::new(),
            guarantee_max: seated.guarantee_max,
            claims: OpenClaims::default(),
            questions: tokio::sync::watch::Sender::default(),
            maps: Maps::default(),
            unanswered: AtomicU64::new(0),
            plan: AtomicU64::new(0),
            ending: tokio::sync::watch::Sender::new(false),
            page: std::sync::Mutex::new(Some(page)),
            links: tokio::sync::watch::Sender::new(0),
            serving: tokio::sync::Mutex::default(),
            told: std::sync::Mutex::default(),
            attempt: AtomicU64::new(0),
            has_leased: AtomicBool::new(false),
            opened: daemon.clock.now(),
            age_before: std::time::Duration::ZERO,
            acquires: Semaphore::new(limits::ACQUIRES_QUEUED_MAX),
            watches: tokio::sync::watch::Sender::new(0),
            ended: tokio::sync::watch::Sender::new(false),
            _seat: Some(seat),
        });
        entry.note_pod(&peer, wanted.pod.as_ref());
        if let (Some(keeping), Some(pidfd)) = (&daemon.keeping, &pidfd) {
            keeping.keep_other(Key::Process(id), Arc::clone(pidfd));
        }
        daemon.registry.add(Arc::clone(&entry));
        daemon.session_counts.note_start();
        daemon.note_event(v1::event::Kind::Opened, format!("{} ({id}, process {})", entry.name, entry.pid));
        tracing::info!(session = %id, name = entry.name, pid = entry.pid, tenant = entry.tenant, limit_bytes = seated.terms.limit.get(), "session opened");
        match pidfd {
            Some(pidfd) => drop(tokio::spawn(Arc::clone(daemon).watch_process(Arc::clone(&entry), pidfd))),
            None => {
                tracing::warn!(session = %id, "the kernel cannot tell when this process ends; its connection stands for it")
            }
        }
        moment();
        let ticket = daemon.registry.issue(Good::Link(id), peer.identity, daemon.clock.now());
        let ticket = ticket.map_err(|error| broken(&error))?;
        Ok(Response::new(v1::OpenReply {
            protocol: PROTOCOL,
            session_id: id.0,
            secret: secret.to_vec(),
            ticket: ticket.to_vec(),
            devices: daemon.devices.iter().map(device_message).collect(),
            driver: daemon_driver(daemon),
            limit_bytes: seated.terms.limit.get(),
            ladder_bytes: daemon.ladder.steps().iter().map(|step| step.get()).collect(),
            daemon_version: env!("CARGO_PKG_VERSION").to_owned(),
            chunk_socket: CHUNK_SOCKET_NAME.to_owned(),
            wait_ms: u64::try_from(daemon.config.wait.as_millis()).unwrap_or(u64::MAX).min(limits::WAIT_MS_MAX),
            tenant: entry.tenant.clone(),
            guarantee_bytes: seated.guarantee.get(),
            guarantee_max_bytes: entry.guarantee_max.get(),
        }))
    }

    async fn reattach(&self, request: Request<v1::ReattachRequest>) -> Result<Response<v1::ReattachReply>, Status> {
        self.check_draining()?;
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let peer = Self::peer(&request)?;
        self.reattached(&entry, &peer, request.into_inner()).await.map(Response::new)
    }

    async fn close(&self, request: Request<v1::CloseRequest>) -> Result<Response<v1::CloseReply>, Status> {
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let returned = self.0.end_session(entry.id, EndReason::Closed).unwrap_or_default();
        moment();
        Ok(Response::new(v1::CloseReply { returned_bytes: returned.get() }))
    }

    async fn room(&self, request: Request<v1::RoomRequest>) -> Result<Response<v1::RoomReply>, Status> {
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let device = self.known_device(&request.get_ref().device_uuid)?.id;
        let (account, session) = (self.0.steward.device(device), self.0.steward.session(entry.id));
        // The device is the daemon's own; the session may have ended in this moment.
        let both = account.zip(session);
        let (account, session) = both.ok_or_else(|| from_ledger(&LedgerError::NoSession(entry.id)))?;
        Ok(Response::new(v1::RoomReply {
            most_bytes: account.budget.min(session.terms.limit).get(),
            free_bytes: self.0.steward.room(entry.id, device).unwrap_or(Bytes::ZERO).get(),
        }))
    }

    async fn admit(&self, request: Request<v1::AdmitRequest>) -> Result<Response<v1::AdmitReply>, Status> {
        self.check_draining()?;
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let wanted = request.into_inner();
        let device = self.known_device(&wanted.device_uuid)?.id;
        let guarantee = Bytes::new(wanted.guarantee_bytes);
        if guarantee > entry.guarantee_max {
            let text = over_guarantee(guarantee, &entry.tenant, entry.guarantee_max);
            return Err(status(ErrorKind::OverLimit, text));
        }
        let _place = place_to_wait(&entry)?;
        self.0.look_for_parked(device);
        let wait_ms = wanted.wait_ms.min(limits::WAIT_MS_MAX);
        self.answer_to(Holder::Session(entry.id), |reply| {
            self.0.steward.admit(entry.id, device, guarantee, wait_ms, reply)
        })
        .await?;
        Ok(Response::new(v1::AdmitReply { guarantee_bytes: guarantee.get() }))
    }

    async fn answer(&self, request: Request<v1::AnswerRequest>) -> Result<Response<v1::AnswerReply>, Status> {
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let v1::AnswerRequest { device_uuid, ask, .. } = request.into_inner();
        let device = self.known_device(&device_uuid)?.id;
        self.0.answered(&entry, device, ask);
        Ok(Response::new(v1::AnswerReply {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::Notice, Status>> + Send>>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        // The one before ends: a session hears once what happens, and whoever has lost a connection need not wait until the daemon has noticed.
        entry.watches.send_modify(|count| *count += 1);
        let mut watches = entry.watches.subscribe();
        let mut ending = self.0.ending.subscribe();
        let mut lost = self.0.lost.subscribe();
        let mut questions = entry.questions.subscribe();
        // One that was not answered over the connection before is not asked again.
        let mut looks = entry.maps.looks();
        let uuids: HashMap<DeviceId, Vec<u8>> =
            self.0.devices.iter().map(|device| (device.id, device.uuid.0.to_vec())).collect();
        let (send, receive) = mpsc::channel(2 + uuids.len());
        let notice = |what| Ok(v1::Notice { what: Some(what) });
        tokio::spawn(async move {
            // A receiver that is gone has heard enough.
            let _ = send.send(notice(v1::notice::What::Attached(v1::Attached {}))).await;
            let mut told = 0;
            let mut asked: HashMap<DeviceId, u64> = HashMap::new();
            loop {
                let open: Vec<_> = questions.borrow_and_update().values().copied().collect();
                for question in open {
                    // By device: the news of two come in any order.
                    let told = asked.insert(question.device, question.ask);
                    if told.is_some_and(|told| told >= question.ask) {
                        continue;
                    }
                    let device_uuid = uuids[&question.device].clone();
                    let ask_back = v1::AskBack { device_uuid, ask: question.ask, len_bytes: question.bytes.get() };
                    let _ = send.send(notice(v1::notice::What::AskBack(ask_back))).await;
                }
                let more: Vec<_> = lost.borrow_and_update()[told..].to_vec();
                told += more.len();
                for uuid in more {
                    let device_uuid = uuid.0.to_vec();
                    let _ = send.send(notice(v1::notice::What::DeviceLost(v1::DeviceLost { device_uuid }))).await;
                }
                tokio::select! {
                    () = entry.over() => return,
                    () = send.closed() => return,
                    _ = watches.changed() => return,
                    // The sender lives in the daemon, which outlives its services.
                    Ok(()) = lost.changed() => {}
                    Ok(()) = questions.changed() => {}
                    Ok(()) = looks.changed() => {
                        let look = looks.borrow_and_update().0;
                        for device_uuid in uuids.values().cloned() {
                            // Whoever does not read is asked again.
                            let _ = send.try_send(notice(v1::notice::What::Look(v1::Look { device_uuid, look })));
                        }
                    }
                    () = async { drop(ending.wait_for(|ending| *ending).await) } => {
                        let _ = send.send(notice(v1::notice::What::ShuttingDown(v1::ShuttingDown {}))).await;
                        return;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }
}

#[tonic::async_trait]
impl Leases for Service {
    async fn acquire(&self, request: Request<v1::AcquireRequest>) -> Result<Response<v1::AcquireReply>, Status> {
        self.check_draining()?;
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let peer = Self::peer(&request)?;
        let want = request.into_inner().want.ok_or_else(|| refused(&convert::malformed("want", "missing")))?;
        let _place = place_to_wait(&entry)?;
        let chunks = self.acquire(self.0.ask_for(entry.id, want)?).await?;
        entry.has_leased.store(true, Ordering::Relaxed);
        let infos = convert::chunk_infos(&chunks);
        let claim = Good::Claim(entry.claims.of_lease(&entry, chunks));
        let ticket = self.0.registry.issue(claim, peer.identity, self.0.clock.now());
        let ticket = ticket.map_err(|error| status(ErrorKind::Broken, chain(&error)))?;
        Ok(Response::new(v1::AcquireReply { ticket: ticket.to_vec(), chunks: infos }))
    }

    async fn release(&self, request: Request<v1::ReleaseRequest>) -> Result<Response<v1::ReleaseReply>, Status> {
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let chunks = convert::chunk_ids("chunk_ids", &request.get_ref().chunk_ids).map_err(|error| refused(&error))?;
        self.0.release(&entry, chunks).map_err(|error| from_ledger(&error))?;
        Ok(Response::new(v1::ReleaseReply {}))
    }
}

#[tonic::async_trait]
impl Plans for Service {
    async fn put(&self, request: Request<v1::PutPlanRequest>) -> Result<Response<v1::PutPlanReply>, Status> {
        let v1::PutPlanRequest { plan, name } = request.into_inner();
        let name = convert::name("name", &name).map_err(|error| refused(&error))?;
        let id = self.with_plans(move |plans| plans.put(&plan, name)).await?;
        tracing::info!(plan = id.to_hex(), "plan stored");
        Ok(Response::new(v1::PutPlanReply { plan_id: id.0 }))
    }

    async fn get(&self, request: Request<v1::GetPlanRequest>) -> Result<Response<v1::GetPlanReply>, Status> {
        let v1::GetPlanRequest { plan_id, job } = request.into_inner();
        let wanted = wanted_plans(job)?;
        if wanted.fingerprint.is_some() == (plan_id != 0) {
            let malformed =
                convert::malformed("plan_id", "it and the fingerprint of a job: exactly one is to be there");
            return Err(refused(&malformed));
        }
        let get = move |plans: &PlanStore| {
            let id = if plan_id == 0 { plans.best(&wanted)? } else { PlanId(plan_id) };
            Ok((id, plans.get(id)?))
        };
        let (id, plan) = self.with_plans(get).await?;
        Ok(Response::new(v1::GetPlanReply { plan, plan_id: id.0 }))
    }

    async fn list(&self, request: Request<v1::ListPlansRequest>) -> Result<Response<v1::ListPlansReply>, Status> {
        let wanted = wanted_plans(request.into_inner().job)?;
        let reserved = self.0.steward.reserved();
        let info = |(id, stored): (PlanId, Stored)| v1::PlanInfo {
            plan_id: id.0,
            name: stored.name,
            pool_bytes: stored.pool_len.get(),
            requests: stored.requests,
            reserved_bytes: reserved.iter().find(|(plan, _)| *plan == id).map_or(0, |(_, bytes)| bytes.get()),
            fingerprint: stored.job.fingerprint.0,
            rank: stored.job.position.map(Position::rank),
            world_size: stored.job.position.map(Position::world_size),
        };
        Ok(Response::new(v1::ListPlansReply { plans: self.0.plans.list(&wanted).into_iter().map(info).collect() }))
    }

    async fn delete(&self, request: Request<v1::DeletePlanRequest>) -> Result<Response<v1::DeletePlanReply>, Status> {
        let id = PlanId(request.get_ref().plan_id);
        self.with_plans(move |plans| plans.delete(id)).await?;
        // Whatever was kept for it is nobody's now; most plans have nothing.
        let _ = self.0.steward.unreserve(id);
        Ok(Response::new(v1::DeletePlanReply {}))
    }

    async fn reserve(
        &self,
        request: Request<v1::ReservePlanRequest>,
    ) -> Result<Response<v1::ReservePlanReply>, Status> {
        self.check_draining()?;
        let wanted = request.into_inner();
        let id = PlanId(wanted.plan_id);
        let stored = self.0.plans.stored(id).map_err(|error| status(error.kind(), chain(&error)))?;
        let device = self.known_device(&wanted.device_uuid)?.id;
        let len = stored.pool_len.max(Bytes::new(1));
        let too_large = || status(ErrorKind::Invalid, format!("a pool of {len} is more than one lease can be"));
        let parts = self.0.cover(device, len, Shape::STATIC, Stock::default).ok_or_else(too_large)?;
        let wait_ms = wanted.wait_ms.min(limits::WAIT_MS_MAX);
        let ask = Ask { holder: Holder::Plan(id), device, parts, plan: None, wait_ms, waited_ms: 0 };
        let chunks = self.acquire(ask).await?;
        let reserved: Bytes = chunks.iter().map(|(_, len)| *len).sum();
        Ok(Response::new(v1::ReservePlanReply { reserved_bytes: reserved.get(), chunks: chunks.len() as u64 }))
    }

    async fn unreserve(
        &self,
        request: Request<v1::UnreservePlanRequest>,
    ) -> Result<Response<v1::UnreservePlanReply>, Status> {
        let id = PlanId(request.get_ref().plan_id);
        self.0.steward.unreserve(id).map_err(|error| from_ledger(&error))?;
        Ok(Response::new(v1::UnreservePlanReply {}))
    }
}

pub(super) fn daemon_driver(daemon: &Daemon) -> String {
    use crate::driver::Driver as _;
    daemon.driver.name().to_owned()
}

pub(super) fn device_message(device: &NodeDevice) -> v1::Device {
    v1::Device {
        uuid: device.uuid.0.to_vec(),
        model: device.model.clone(),
        total_bytes: device.total.get(),
        ordinal: device.id.0,
    }
}
