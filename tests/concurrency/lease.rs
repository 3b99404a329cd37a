//! A lease that is pending while its session, or who it waits for, ends: the steward is asked, gives up, and works in threads of its own.
//!
//! Of the daemon's shutdown this is the part where threads race: the sockets' threads ask, cancel and end sessions, who shuts down closes the ledger, the workers create and destroy,
//! all at one ledger. What is left of it, the order in which tasks of one thread end, is the e2e tests'.

use std::sync::{Arc, Mutex, PoisonError};

use shuttle::thread::{self, JoinHandle};
use stitchd::clock::ManualClock;
use stitchd::driver::cost_table::CostTable;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::{ChunkId, DeviceId, SessionId};
use stitchd::ladder::Part;
use stitchd::ledger::{EndReason, Holder, LedgerError, Terms};
use stitchd::memory::Device;
use stitchd::steward::{Answer, Ask, Spawn, Steward};
use stitchd::store::Store;
use stitchd::units::Bytes;

use crate::in_many_orders;

const DEVICE: DeviceId = DeviceId(0);
const TOTAL: Bytes = Bytes::mib(4);
const CHUNK: Bytes = Bytes::mib(2);

/// Answers, by who asked.
type Answers = Arc<Mutex<Vec<Answer>>>;

struct Node {
    sim: Arc<SimDriver>,
    steward: Arc<Steward>,
    workers: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Node {
    fn new() -> Node {
        let options = SimOptions { costs: CostTable::FREE, ..SimOptions::with_devices(&[TOTAL]) };
        let sim = Arc::new(SimDriver::new(options));
        let device = Device::open(sim.clone(), DEVICE).unwrap();
        let workers: Arc<Mutex<Vec<JoinHandle<()>>>> = Arc::default();
        let started = Arc::clone(&workers);
        let spawn: Spawn = Box::new(move |work| {
            let worker = thread::spawn(work);
            started.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
        });
        let steward = Steward::new(Store::new(vec![device]), Arc::new(ManualClock::default()), spawn).unwrap();
        Node { sim, steward, workers }
    }

    fn session(&self) -> SessionId {
        self.steward.open(Terms::new(TOTAL, 0)).unwrap()
    }

    fn ask(session: SessionId) -> Ask {
        let parts = vec![Part { len: CHUNK, count: 2 }];
        Ask { holder: Holder::Session(session), device: DEVICE, parts, plan: None, wait_ms: 1000, waited_ms: 0 }
    }

    /// Waits for all work that is under way, and for what comes of it.
    fn settle(&self) {
        loop {
            let worker = self.workers.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match worker {
                Some(worker) => worker.join().unwrap(),
                None => return,
            }
        }
    }

    /// A session with all memory.
    fn holder(&self) -> SessionId {
        let session = self.session();
        let answers = Answers::default();
        self.steward.acquire(Node::ask(session), note(&answers)).unwrap();
        self.settle();
        assert!(matches!(answers.lock().unwrap()[..], [Answer::Granted(_)]));
        session
    }

    /// In a thread of its own.
    fn dies(&self, session: SessionId) -> JoinHandle<Bytes> {
        let steward = Arc::clone(&self.steward);
        thread::spawn(move || steward.end(session, EndReason::Died).unwrap())
    }

    fn check_what_exists_is_idle(&self, available: Bytes) {
        let view = self.steward.devices().remove(0);
        assert_eq!(Bytes::new(self.sim.counts().0 as u64 * CHUNK.get()), view.bytes.idle);
        assert_eq!(view.available(), available);
    }

    /// Everybody has ended: nothing is asked for, nothing is leased, and what exists is idle. The next one can have it all.
    fn check_nothing_is_left(&self) {
        self.settle();
        self.steward.tick();
        self.settle();
        assert_eq!((self.steward.request_count(), self.steward.sessions().len()), (0, 0));
        self.check_what_exists_is_idle(TOTAL);
        let next = self.holder();
        self.steward.end(next, EndReason::Died).unwrap();
        self.settle();
        assert_eq!(self.sim.counts(), (0, 0, 0));
    }
}

fn note(answers: &Answers) -> impl FnOnce(Answer) + Send + 'static {
    let answers = Arc::clone(answers);
    move |answer| answers.lock().unwrap().push(answer)
}

fn granted(answers: &Answers) -> Vec<ChunkId> {
    match &answers.lock().unwrap()[..] {
        [Answer::Granted(chunks)] => chunks.iter().map(|(chunk, _)| *chunk).collect(),
        [Answer::Refused(_)] => Vec::new(),
        other => panic!("one request has {} answers", other.len()),
    }
}

#[test]
fn a_session_that_ends_while_its_lease_is_made_is_answered_once_and_keeps_nothing() {
    in_many_orders(|| {
        let node = Node::new();
        let session = node.session();
        let answers = Answers::default();
        let asks = {
            let (steward, note) = (Arc::clone(&node.steward), note(&answers));
            thread::spawn(move || steward.acquire(Node::ask(session), note))
        };
        node.steward.end(session, EndReason::Died).unwrap();
        let is_asked = match asks.join().unwrap() {
            Ok(_) => true,
            Err(LedgerError::NoSession(_)) => false,
            Err(error) => panic!("{error:?}"),
        };
        node.check_nothing_is_left();
        assert_eq!(answers.lock().unwrap().len(), usize::from(is_asked));
    });
}

#[test]
fn a_lease_that_waits_for_one_who_ends_while_its_own_session_ends_is_answered_once() {
    in_many_orders(|| {
        let node = Node::new();
        let (holds, waits) = (node.holder(), node.session());
        let answers = Answers::default();
        node.steward.acquire(Node::ask(waits), note(&answers)).unwrap();
        let ends = node.dies(holds);
        node.steward.end(waits, EndReason::Closed).unwrap();
        ends.join().unwrap();
        node.check_nothing_is_left();
        granted(&answers);
    });
}

#[test]
fn a_lease_that_is_given_up_while_it_comes_is_whole_or_nothing() {
    in_many_orders(|| {
        let node = Node::new();
        let (holds, waits) = (node.holder(), node.session());
        let answers = Answers::default();
        let request = node.steward.acquire(Node::ask(waits), note(&answers)).unwrap();
        let ends = node.dies(holds);
        // As a connection does that breaks: nobody waits any more; what came is given back.
        node.steward.cancel(request);
        ends.join().unwrap();
        node.settle();
        let chunks = granted(&answers);
        assert_eq!(node.steward.devices()[0].bytes.leased.get(), chunks.len() as u64 * CHUNK.get());
        if !chunks.is_empty() {
            node.steward.release(waits, chunks).unwrap();
        }
        node.steward.end(waits, EndReason::Closed).unwrap();
        node.check_nothing_is_left();
    });
}

#[test]
fn a_lease_that_is_asked_for_or_waits_while_the_daemon_shuts_down_is_whole_or_refused() {
    in_many_orders(|| {
        let node = Node::new();
        let (holds, waits) = (node.holder(), node.session());
        let answers = Answers::default();
        let asks = {
            let (steward, note) = (Arc::clone(&node.steward), note(&answers));
            thread::spawn(move || steward.acquire(Node::ask(waits), note).unwrap())
        };
        let ends = node.dies(holds);
        node.steward.close();
        asks.join().unwrap();
        ends.join().unwrap();
        node.settle();
        assert_eq!((answers.lock().unwrap().len(), node.steward.request_count()), (1, 0), "nobody is left waiting");
        let chunks = granted(&answers);
        assert_eq!(node.steward.devices()[0].bytes.leased.get(), chunks.len() as u64 * CHUNK.get());
        let answers = Answers::default();
        node.steward.acquire(Node::ask(waits), note(&answers)).unwrap();
        assert_eq!(granted(&answers), [], "after that nobody is granted anything");
        node.steward.end(waits, EndReason::Closed).unwrap();
        node.settle();
        // Chunks that were made for a request that was refused lie idle, and are promised to nobody.
        node.check_what_exists_is_idle(Bytes::ZERO);
    });
}
