//! The daemon's books: one acquire and its release while so many chunks are held by so many sessions, on the simulated driver.
//!
//! The floor is what any ordered record of who holds what costs: one removal from and one insertion into a `BTreeMap` of as many entries. So a ratio that
//! does not grow with the number of chunks is logarithmic, as the floor is.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

mod support;

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;

use stitchd::clock::SystemClock;
use stitchd::driver::Driver;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::{ChunkId, DeviceId, SessionId};
use stitchd::ladder::Part;
use stitchd::ledger::{Holder, Terms};
use stitchd::limits::ACQUIRE_CHUNKS_MAX;
use stitchd::memory::Device;
use stitchd::rng::Rng;
use stitchd::steward::{Answer, Ask, Steward};
use stitchd::store::Store;
use stitchd::units::Bytes;
use support::{compare, timed};

const DEVICE: DeviceId = DeviceId(0);
const CHUNK: Bytes = Bytes::mib(2);
const ROUNDS: usize = 11;
const PAIRS: u64 = 2000;

/// A node whose sessions hold `chunks` chunks together.
struct Node {
    steward: Arc<Steward>,
    sessions: Vec<SessionId>,
}

impl Node {
    fn new(chunks: u64, sessions: u64) -> Node {
        let driver = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(400)])));
        let device = Device::open(driver as Arc<dyn Driver>, DEVICE).unwrap();
        let steward = Steward::inline(Store::new(vec![device]), Arc::new(SystemClock::new())).unwrap();
        let opened = (0..sessions).map(|_| steward.open(Terms::new(Bytes::gib(400), 0)).unwrap()).collect();
        let node = Node { steward, sessions: opened };
        for n in 0..sessions {
            let mut left = (n + 1) * chunks / sessions - n * chunks / sessions;
            while left > 0 {
                let count = left.min(ACQUIRE_CHUNKS_MAX);
                node.acquire(node.sessions[n as usize], count);
                left -= count;
            }
        }
        node
    }

    fn acquire(&self, session: SessionId, count: u64) -> Vec<(ChunkId, Bytes)> {
        let parts = vec![Part { len: CHUNK, count }];
        let ask = Ask { holder: Holder::Session(session), device: DEVICE, parts, plan: None, wait_ms: 0, waited_ms: 0 };
        let Answer::Granted(chunks) = self.steward.acquire_now(ask).unwrap() else { panic!("there is room") };
        chunks
    }

    /// Of a chunk that lies idle for the session, as after its own release.
    fn pairs(&self, rng: &mut Rng) {
        for _ in 0..PAIRS {
            let session = self.sessions[rng.below(self.sessions.len() as u64) as usize];
            let chunks = self.acquire(session, 1);
            self.steward.release(session, vec![chunks[0].0]).unwrap();
        }
    }
}

fn main() {
    let mut compared = Vec::new();
    for sessions in [1, 100, 1000] {
        for chunks in [100, 10_000, 100_000] {
            let name = format!("acquire and release, {chunks} chunks, {sessions} sessions");
            if !support::is_wanted(&name) {
                continue;
            }
            let node = Node::new(chunks, sessions);
            let mut rng = Rng::new(1);
            // Every session has its idle chunk.
            for session in &node.sessions {
                let chunks = node.acquire(*session, 1);
                node.steward.release(*session, vec![chunks[0].0]).unwrap();
            }
            let mut floor: BTreeMap<ChunkId, SessionId> = (0..chunks).map(|n| (ChunkId(n), SessionId(n))).collect();
            let mut floor_rng = Rng::new(1);
            compared.push(compare(
                name,
                ROUNDS,
                || (timed(|| node.pairs(&mut rng)), PAIRS),
                || {
                    let time = timed(|| {
                        for _ in 0..PAIRS {
                            let chunk = ChunkId(floor_rng.below(chunks));
                            let session = floor.remove(&chunk).unwrap();
                            floor.insert(black_box(chunk), session);
                        }
                    });
                    (time, PAIRS)
                },
            ));
        }
    }
    support::print(("ns/pair", 1.0), &compared);
}
