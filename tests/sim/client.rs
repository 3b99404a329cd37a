//! A client: what it does by itself, and what it makes of what it hears. What it holds, says that it holds and calls what it holds is the product's ([`Holdings`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use stitchd::driver::Handle;
use stitchd::ids::{ChunkId, DeviceUuid, RangeId, SessionId};
use stitchd::rng::Rng;
use stitchd::session::holdings::{Holding, Holdings, Leased, RangeHold};
use stitchd::units::Bytes;
use stitchd::wire::v1;

use crate::world::{Counts, Plant};

/// A session as its process knows it.
pub(crate) type Me = (SessionId, [u8; 16]);

/// What a client says.
#[derive(Debug)]
pub(crate) enum ToDaemon {
    Open,
    Acquire {
        session: SessionId,
        mib: u64,
    },
    Release {
        session: SessionId,
        chunks: Vec<ChunkId>,
    },
    Reattach {
        me: Me,
        told: Vec<v1::ReattachRequest>,
    },
    Publish {
        session: SessionId,
        chunk: ChunkId,
    },
    /// Some range that there is.
    Attach {
        session: SessionId,
        pick: usize,
    },
    Leave {
        session: SessionId,
        range: RangeId,
    },
    Admit {
        session: SessionId,
        guarantee: Bytes,
    },
}

/// What a daemon says.
#[derive(Debug)]
pub(crate) enum ToClient {
    Opened {
        me: Me,
    },
    /// With the inode of each chunk.
    Granted {
        chunks: Vec<(ChunkId, Bytes, u64)>,
    },
    Refused,
    Reattached {
        attempt: u64,
        reply: v1::ReattachReply,
    },
    /// It knows no such session.
    Unknown {
        attempt: u64,
    },
    Published {
        range: RangeId,
    },
    NotPublished,
    Attached {
        range: RangeId,
        len: Bytes,
        inode: u64,
    },
    NotAttached,
    Guaranteed {
        is_given: bool,
        guarantee: Bytes,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// It has no session.
    New,
    /// Waits for an answer to what opens or reattaches it.
    Asks,
    Attached,
    /// The daemon is gone.
    Away,
}

/// A shared range that it has mapped.
#[derive(Debug)]
pub(crate) struct Range {
    pub(crate) hold: Arc<RangeHold>,
    pub(crate) len: Bytes,
    pub(crate) inode: u64,
}

/// A chunk on its way to being a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Publishing {
    /// The daemon has been asked.
    Asked(ChunkId),
    /// It has died before it answered: nobody wants the chunk any more.
    Failed(ChunkId),
}

#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) me: Option<Me>,
    pub(crate) state: State,
    holdings: Holdings,
    holding: Arc<Holding>,
    pub(crate) ranges: Vec<Range>,
    pub(crate) publishing: Option<Publishing>,
    is_attaching: bool,
    /// What it is guaranteed; nothing where it does not know.
    pub(crate) guaranteed: Option<Bytes>,
    /// What it asks to be guaranteed.
    wanted: Option<Bytes>,
    /// It waits for memory.
    is_asking: bool,
    /// The last of its attempts to be there again: answers to others are nothing to it.
    attempt: u64,
    /// Which connection it has.
    epoch: u64,
    /// The daemon that it was connected to is gone: it notices when it has read all that came.
    pub(crate) is_cut: bool,
    /// What is on its way over the chunk socket, in order.
    pub(crate) link_up: VecDeque<ToDaemon>,
    pub(crate) link_down: VecDeque<ToClient>,
    /// Calls and their answers: each is by itself.
    pub(crate) calls: Vec<ToDaemon>,
    pub(crate) answers: Vec<ToClient>,
}

impl Client {
    pub(crate) fn new(device: DeviceUuid) -> Client {
        let holdings = Holdings::default();
        let holding = holdings.hold(device);
        Client {
            me: None,
            state: State::New,
            holdings,
            holding,
            ranges: Vec::new(),
            publishing: None,
            is_attaching: false,
            guaranteed: Some(Bytes::ZERO),
            wanted: None,
            is_asking: false,
            attempt: 0,
            epoch: 1,
            is_cut: false,
            link_up: VecDeque::new(),
            link_down: VecDeque::new(),
            calls: Vec::new(),
            answers: Vec::new(),
        }
    }

    /// The inodes that it has mapped by itself, and not as a shared range.
    pub(crate) fn inodes(&self) -> Vec<u64> {
        self.holding.held().values().map(|leased| leased.handle.0).collect()
    }

    /// The chunk that is to be a range: nothing is mapped of it.
    pub(crate) fn inode_of_publishing(&self) -> Option<u64> {
        let (Some(Publishing::Asked(id) | Publishing::Failed(id)), held) = (self.publishing, self.holding.held())
        else {
            return None;
        };
        held.get(&id).map(|leased| leased.handle.0)
    }

    /// Bytes that it believes to be counted as its own.
    pub(crate) fn held_bytes(&self) -> Bytes {
        self.holding.held().values().filter(|leased| leased.now.is_some()).map(|leased| leased.len).sum()
    }

    /// What it holds of ranges that the daemon knows of, with their bytes.
    pub(crate) fn known_ranges(&self) -> Vec<(RangeId, Bytes)> {
        let known = self.ranges.iter().filter(|range| range.hold.is_known.load(Ordering::Relaxed));
        let mut known: Vec<_> = known.map(|range| (range.hold.range, range.len)).collect();
        known.sort_unstable();
        known
    }

    /// Nothing is on its way any more.
    pub(crate) fn is_quiet(&self) -> bool {
        self.link_up.is_empty() && self.link_down.is_empty() && self.calls.is_empty() && self.answers.is_empty()
    }

    /// Everything over the link was read, and it is over, as calls are, with or without their answers.
    pub(crate) fn note_gone(&mut self) {
        (self.is_asking, self.is_cut, self.is_attaching) = (false, false, false);
        // What it has said since nobody hears, and what it was to hear over calls it does not.
        (self.link_up, self.calls, self.answers) = Default::default();
        if let Some(Publishing::Asked(id)) = self.publishing {
            self.publishing = Some(Publishing::Failed(id));
        }
        if self.wanted.take().is_some() {
            self.guaranteed = None;
        }
        self.state = if self.me.is_some() { State::Away } else { State::New };
    }

    /// What was to be published and is perhaps not: nobody wants it.
    pub(crate) fn give_up_publishing(&mut self) {
        if let Some(Publishing::Failed(id)) = self.publishing {
            self.publishing = None;
            self.give_back(id);
        }
    }

    fn give_back(&mut self, id: ChunkId) {
        self.holding.give_back([id], || {});
        self.send_unsent();
    }

    /// Says what it has given back, where there is somebody who hears it.
    fn send_unsent(&mut self) {
        // As `Line::enter`: while the connection is changed nobody sends.
        if let (State::Attached, Some((session, _))) = (self.state, self.me) {
            let up = &mut self.link_up;
            self.holding.send_unsent(|chunks| {
                up.push_back(ToDaemon::Release { session, chunks });
                Ok(())
            });
        }
    }

    /// Comes back to a daemon: says what it has.
    fn come_back(&mut self, me: Me, plant: Option<Plant>) {
        let mut told = self.holdings.tell();
        if plant == Some(Plant::Forgets) {
            for held in told.iter_mut().flat_map(|message| &mut message.held) {
                held.chunks.pop();
            }
        }
        if plant == Some(Plant::ForgetsRanges) {
            told.iter_mut().for_each(|message| message.ranges.clear());
        }
        self.state = State::Asks;
        self.attempt = told[0].attempt;
        self.calls.push(ToDaemon::Reattach { me, told });
    }

    /// It does something by itself.
    pub(crate) fn act(&mut self, rng: &mut Rng, plant: Option<Plant>, counts: &mut Counts) {
        let (what, mib) = (rng.below(8), 2 * (1 + rng.below(6)));
        let (pick, chance) = (rng.next_u64() as usize, rng.below(2) == 0);
        if what == 7 {
            self.give_up_publishing();
        }
        match (self.state, self.me) {
            (State::New, _) if !self.is_cut => {
                self.state = State::Asks;
                self.calls.push(ToDaemon::Open);
            }
            // It has waited long enough, and tries again: what it has said may arrive all the same.
            (State::Asks, Some(me)) if !self.is_cut && what < 2 && self.calls.len() < 3 => {
                counts.retried += 1;
                self.come_back(me, plant);
            }
            // Whatever the one before had sent is read first.
            (State::Away, Some(me)) if self.link_down.is_empty() && self.answers.is_empty() => {
                self.come_back(me, plant);
            }
            (State::Attached, Some((session, _))) => match what {
                0..2 if !self.is_asking => {
                    self.is_asking = true;
                    self.link_up.push_back(ToDaemon::Acquire { session, mib });
                }
                2..4 if chance => {
                    if let Some(id) = self.some_chunk(pick) {
                        self.give_back(id);
                    }
                }
                4 if chance && self.publishing.is_none() => {
                    let Some(id) = self.some_chunk(pick) else { return };
                    let now = self.holding.held()[&id].now;
                    if let Some(chunk) = now {
                        self.publishing = Some(Publishing::Asked(id));
                        self.calls.push(ToDaemon::Publish { session, chunk });
                    }
                }
                5 if !self.is_attaching && self.ranges.len() < 4 => {
                    self.is_attaching = true;
                    self.calls.push(ToDaemon::Attach { session, pick });
                }
                6 if !self.ranges.is_empty() => {
                    let gone = self.ranges.swap_remove(pick % self.ranges.len());
                    // As `Session::detach`.
                    if gone.hold.is_known.swap(false, Ordering::Relaxed) {
                        self.calls.push(ToDaemon::Leave { session, range: gone.hold.range });
                    }
                }
                7 if chance && self.wanted.is_none() => {
                    let guarantee = Bytes::mib(mib - 2);
                    self.wanted = Some(guarantee);
                    self.calls.push(ToDaemon::Admit { session, guarantee });
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// One that is not being published.
    fn some_chunk(&self, pick: usize) -> Option<ChunkId> {
        let busy = match self.publishing {
            Some(Publishing::Asked(id) | Publishing::Failed(id)) => Some(id),
            None => None,
        };
        let held = self.holding.held();
        let ids: Vec<ChunkId> = held.keys().copied().filter(|id| Some(*id) != busy).collect();
        (!ids.is_empty()).then(|| ids[pick % ids.len()])
    }

    /// What it makes of what it hears.
    pub(crate) fn hear(&mut self, message: ToClient, counts: &mut Counts) {
        match message {
            ToClient::Granted { chunks } => {
                counts.grants += 1;
                self.is_asking = false;
                let mut held = self.holding.held();
                for (now, len, inode) in chunks {
                    // As `DaemonSource::lease_over`.
                    let here = if held.contains_key(&now) { self.holdings.next_chunk() } else { now };
                    let leased = Leased { handle: Handle(inode), len, now: Some(now), uncounted: None };
                    held.insert(here, leased);
                }
            }
            ToClient::Refused => {
                counts.refused += 1;
                self.is_asking = false;
            }
            ToClient::Opened { me } => {
                // Beside what it says to a daemon that did not know it: there it had a guarantee, and here it has none.
                let is_anew = self.me.is_some() || self.epoch > 1;
                self.me = Some(me);
                if self.guaranteed != Some(Bytes::ZERO) {
                    self.guaranteed = Some(Bytes::ZERO);
                }
                match is_anew {
                    true => self.come_back(me, None),
                    false => self.state = State::Attached,
                }
            }
            ToClient::Reattached { attempt, .. } | ToClient::Unknown { attempt } if attempt != self.attempt => {}
            ToClient::Reattached { reply, .. } => {
                self.holdings.hear(&reply);
                self.epoch += 1;
                self.state = State::Attached;
                // As `Line::open`.
                self.send_unsent();
            }
            ToClient::Unknown { .. } => {
                self.state = State::Asks;
                self.epoch += 1;
                self.me = None;
                self.calls.push(ToDaemon::Open);
            }
            ToClient::Published { range } => {
                let Some(Publishing::Asked(id)) = self.publishing.take() else { return };
                counts.published += 1;
                // As `Draft::publish`.
                if let Some(leased) = self.holding.held().remove(&id) {
                    let hold = self.holdings.hold_range(range, self.epoch);
                    self.ranges.push(Range { hold, len: leased.len, inode: leased.handle.0 });
                }
            }
            ToClient::NotPublished => self.publishing = None,
            ToClient::Attached { range, len, inode } => {
                counts.attached += 1;
                self.is_attaching = false;
                let hold = self.holdings.hold_range(range, self.epoch);
                self.ranges.push(Range { hold, len, inode });
            }
            ToClient::NotAttached => self.is_attaching = false,
            ToClient::Guaranteed { is_given, guarantee } => {
                if self.wanted.take().is_some() && is_given {
                    counts.guaranteed += 1;
                    self.guaranteed = Some(guarantee);
                }
            }
        }
    }
}
