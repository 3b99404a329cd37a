//! All facts that hold: what the records so far come to.

use std::collections::{BTreeMap, BTreeSet};

use super::record::{PublishedRange, Record, SessionRecord, Whose};
use crate::ids::{ChunkId, DeviceUuid, RangeId, SessionId};
use crate::limits;
use crate::units::Bytes;

/// A record that cannot be beside those before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Nonsense(pub(super) String);

/// A session, and what is known of it beside what it was opened with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KnownSession {
    /// What it was opened with, with its terms as they are now.
    pub of: SessionRecord,
    /// How often they were changed.
    pub revision: u64,
    /// It gets nothing more.
    pub is_evicted: bool,
    /// What it is guaranteed, by device.
    pub guarantees: BTreeMap<DeviceUuid, Bytes>,
}

/// A chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KnownChunk {
    /// Where.
    pub device: DeviceUuid,
    /// How large.
    pub len: Bytes,
    /// Whose.
    pub whose: Whose,
}

/// A shared range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KnownRange {
    /// What it was published as.
    pub of: PublishedRange,
    /// Nobody finds it any more.
    pub is_withdrawn: bool,
    /// How often each session holds it.
    pub holds: BTreeMap<SessionId, u32>,
}

/// The facts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Book {
    sessions: BTreeMap<SessionId, KnownSession>,
    chunks: BTreeMap<ChunkId, KnownChunk>,
    ranges: BTreeMap<RangeId, KnownRange>,
    /// Whose chunks are which, of those that sessions have leased.
    leased: BTreeSet<(SessionId, ChunkId)>,
    /// Devices of which nothing more is leased.
    draining: BTreeSet<DeviceUuid>,
    /// Sizes of chunks that sessions were told of.
    ladder: Vec<Bytes>,
    /// The largest numbers that were ever given.
    last_session: u64,
    last_chunk: u64,
    last_range: u64,
    last_version: u64,
}

/// Sessions of a journal: as many as a daemon may have, and as many again that are gone and have published something.
const SESSIONS_MAX: usize = 2 * limits::SESSIONS_MAX;

/// Devices of a node, many times over.
const DEVICES_MAX: usize = 4_096;
/// Powers of two.
const STEPS_MAX: usize = 64;

/// How something was before a step.
#[derive(Debug)]
enum Was {
    Session(SessionId, Option<KnownSession>),
    Chunk(ChunkId, Option<KnownChunk>),
    Range(RangeId, Option<KnownRange>),
    /// How often a session held a range.
    Hold(RangeId, SessionId, Option<u32>),
    /// The largest numbers of sessions, chunks, ranges and versions.
    Numbers([u64; 4]),
    Draining(DeviceUuid, bool),
    Ladder(Vec<Bytes>),
}

/// Puts something in a map, or takes it out; what was there before.
fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> Option<V> {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    }
}

/// Why a record is refused.
fn no(what: impl Into<String>) -> Nonsense {
    Nonsense(what.into())
}

impl Book {
    /// Nobody was ever there.
    pub fn is_empty(&self) -> bool {
        *self == Book::default()
    }

    /// The sessions.
    pub fn sessions(&self) -> &BTreeMap<SessionId, KnownSession> {
        &self.sessions
    }

    /// The chunks.
    pub fn chunks(&self) -> &BTreeMap<ChunkId, KnownChunk> {
        &self.chunks
    }

    /// The shared ranges.
    pub fn ranges(&self) -> &BTreeMap<RangeId, KnownRange> {
        &self.ranges
    }

    /// Devices of which nothing more is leased.
    pub fn draining(&self) -> &BTreeSet<DeviceUuid> {
        &self.draining
    }

    /// The sizes of chunks that sessions were told of, from small to large.
    pub fn ladder(&self) -> &[Bytes] {
        &self.ladder
    }

    /// The largest numbers that were ever given to a session, a chunk, a range and a range's version.
    pub fn last_numbers(&self) -> (u64, u64, u64, u64) {
        (self.last_session, self.last_chunk, self.last_range, self.last_version)
    }

    /// Takes a step: all of it or, on error, none.
    ///
    /// # Errors
    ///
    /// What in it cannot be.
    pub fn apply_all(&mut self, step: &[Record]) -> Result<(), Nonsense> {
        let mut was = Vec::new();
        let outcome = step.iter().try_for_each(|record| self.apply(record, &mut was));
        if outcome.is_err() {
            while let Some(was) = was.pop() {
                self.set_back(was);
            }
        }
        outcome
    }

    fn set_back(&mut self, was: Was) {
        match was {
            Was::Session(session, known) => drop(put(&mut self.sessions, session, known)),
            Was::Chunk(chunk, known) => drop(self.put_chunk(chunk, known)),
            Was::Range(range, known) => drop(put(&mut self.ranges, range, known)),
            Was::Hold(range, session, count) => {
                if let Some(range) = self.ranges.get_mut(&range) {
                    put(&mut range.holds, session, count);
                }
            }
            Was::Draining(device, was) => drop(self.set_draining(device, was)),
            Was::Ladder(ladder) => self.ladder = ladder,
            Was::Numbers([session, chunk, range, version]) => {
                (self.last_session, self.last_chunk) = (session, chunk);
                (self.last_range, self.last_version) = (range, version);
            }
        }
    }

    /// Whether it was.
    fn set_draining(&mut self, device: DeviceUuid, is_draining: bool) -> bool {
        if is_draining { !self.draining.insert(device) } else { self.draining.remove(&device) }
    }

    fn put_chunk(&mut self, chunk: ChunkId, known: Option<KnownChunk>) -> Option<KnownChunk> {
        let before = put(&mut self.chunks, chunk, known);
        if let Some(KnownChunk { whose: Whose::Session(session), .. }) = before {
            self.leased.remove(&(session, chunk));
        }
        if let Some(KnownChunk { whose: Whose::Session(session), .. }) = known {
            self.leased.insert((session, chunk));
        }
        before
    }

    fn set_chunk(&mut self, chunk: ChunkId, known: Option<KnownChunk>, was: &mut Vec<Was>) {
        let before = self.put_chunk(chunk, known);
        was.push(Was::Chunk(chunk, before));
    }

    fn set_session(&mut self, session: SessionId, known: Option<KnownSession>, was: &mut Vec<Was>) {
        was.push(Was::Session(session, put(&mut self.sessions, session, known)));
    }

    fn set_range(&mut self, range: RangeId, known: Option<KnownRange>, was: &mut Vec<Was>) {
        was.push(Was::Range(range, put(&mut self.ranges, range, known)));
    }

    fn set_holds(&mut self, range: RangeId, session: SessionId, count: u32, was: &mut Vec<Was>) {
        let Some(known) = self.ranges.get_mut(&range) else { return };
        let before = put(&mut known.holds, session, (count > 0).then_some(count));
        was.push(Was::Hold(range, session, before));
    }

    /// These numbers are given.
    fn count(&mut self, [session, chunk, range, version]: [u64; 4], was: &mut Vec<Was>) {
        was.push(Was::Numbers([self.last_session, self.last_chunk, self.last_range, self.last_version]));
        (self.last_session, self.last_chunk) = (self.last_session.max(session), self.last_chunk.max(chunk));
        (self.last_range, self.last_version) = (self.last_range.max(range), self.last_version.max(version));
    }

    fn session(&self, session: SessionId) -> Result<&KnownSession, Nonsense> {
        self.sessions.get(&session).ok_or_else(|| no(format!("{session} is not there")))
    }

    fn range(&self, range: RangeId) -> Result<&KnownRange, Nonsense> {
        self.ranges.get(&range).ok_or_else(|| no(format!("{range} is not there")))
    }

    /// Takes one record, and keeps how it was before.
    fn apply(&mut self, record: &Record, was: &mut Vec<Was>) -> Result<(), Nonsense> {
        match record {
            Record::Opened(of) => {
                if self.sessions.contains_key(&of.session) {
                    return Err(no(format!("{} is opened twice", of.session)));
                }
                if self.sessions.len() >= SESSIONS_MAX {
                    return Err(no(format!("more than {SESSIONS_MAX} sessions")));
                }
                self.count([of.session.0, 0, 0, 0], was);
                let known =
                    KnownSession { of: of.clone(), revision: 0, is_evicted: false, guarantees: BTreeMap::new() };
                self.set_session(of.session, Some(known), was);
            }
            Record::Termed { session, terms, revision, is_evicted } => {
                let mut known = self.session(*session)?.clone();
                (known.of.terms, known.revision, known.is_evicted) = (*terms, *revision, *is_evicted);
                self.set_session(*session, Some(known), was);
            }
            Record::Guaranteed { session, device, bytes } => {
                let mut known = self.session(*session)?.clone();
                put(&mut known.guarantees, *device, Some(*bytes).filter(|bytes| !bytes.is_zero()));
                self.set_session(*session, Some(known), was);
            }
            Record::Ended { session } => self.end(*session, was)?,
            Record::Created { chunk, device, len } => {
                if self.chunks.contains_key(chunk) {
                    return Err(no(format!("{chunk} is created twice")));
                }
                if len.is_zero() || *len > limits::CHUNK_LEN_MAX || self.chunks.len() >= limits::CHUNKS_MAX {
                    return Err(no(format!("{chunk} of {len} beside {} others", self.chunks.len())));
                }
                self.count([0, chunk.0, 0, 0], was);
                let known = KnownChunk { device: *device, len: *len, whose: Whose::Nobodys };
                self.set_chunk(*chunk, Some(known), was);
            }
            Record::Granted { chunk, whose } => self.grant(*chunk, *whose, was)?,
            Record::Gone { chunk } => match self.chunks.get(chunk) {
                None => return Err(no(format!("{chunk} goes and is not there"))),
                Some(KnownChunk { whose: Whose::Range(range), .. }) => {
                    return Err(no(format!("{chunk} goes without {range}")));
                }
                Some(_) => self.set_chunk(*chunk, None, was),
            },
            Record::Published(of) => self.publish(of, was)?,
            Record::Attached { range, session } => {
                self.session(*session)?;
                let count = self.range(*range)?.holds.get(session).copied().unwrap_or(0) + 1;
                if count > limits::HOLDS_MAX {
                    return Err(no(format!("{session} holds {range} more than {} times", limits::HOLDS_MAX)));
                }
                self.set_holds(*range, *session, count, was);
            }
            Record::Left { range, session } => {
                let count = self.range(*range)?.holds.get(session);
                let count = *count.ok_or_else(|| no(format!("{session} does not hold {range}")))?;
                self.set_holds(*range, *session, count - 1, was);
            }
            Record::Withdrawn { range } => {
                let known = KnownRange { is_withdrawn: true, ..self.range(*range)?.clone() };
                self.set_range(*range, Some(known), was);
            }
            Record::Sealed { range } => {
                let mut known = self.range(*range)?.clone();
                known.of.is_sealed = true;
                self.set_range(*range, Some(known), was);
            }
            Record::RangeGone { range } => {
                let known = self.range(*range)?.clone();
                if !known.holds.is_empty() {
                    return Err(no(format!("{range} goes while somebody holds it")));
                }
                self.set_range(*range, None, was);
                known.of.chunks.into_iter().for_each(|chunk| self.set_chunk(chunk, None, was));
            }
            Record::Drained { device, is_draining } => {
                if *is_draining && self.draining.len() >= DEVICES_MAX {
                    return Err(no(format!("more than {DEVICES_MAX} devices")));
                }
                let was_draining = self.set_draining(*device, *is_draining);
                was.push(Was::Draining(*device, was_draining));
            }
            Record::Dealt { ladder } => {
                if ladder.len() > STEPS_MAX {
                    return Err(no(format!("a ladder of {} steps", ladder.len())));
                }
                was.push(Was::Ladder(std::mem::replace(&mut self.ladder, ladder.clone())));
            }
            Record::Counted { sessions, chunks, ranges, versions } => {
                self.count([*sessions, *chunks, *ranges, *versions], was);
            }
        }
        Ok(())
    }

    /// A session is over: its chunks are no more, and it holds nothing.
    fn end(&mut self, session: SessionId, was: &mut Vec<Was>) -> Result<(), Nonsense> {
        self.session(session)?;
        let its = (session, ChunkId(0))..=(session, ChunkId(u64::MAX));
        let its: Vec<ChunkId> = self.leased.range(its).map(|(_, chunk)| *chunk).collect();
        its.into_iter().for_each(|chunk| self.set_chunk(chunk, None, was));
        let held = self.ranges.iter().filter(|(_, range)| range.holds.contains_key(&session));
        let held: Vec<RangeId> = held.map(|(range, _)| *range).collect();
        held.into_iter().for_each(|range| self.set_holds(range, session, 0, was));
        self.set_session(session, None, was);
        Ok(())
    }

    fn grant(&mut self, chunk: ChunkId, whose: Whose, was: &mut Vec<Was>) -> Result<(), Nonsense> {
        match whose {
            Whose::Session(session) => drop(self.session(session)?),
            Whose::Range(range) => return Err(no(format!("{chunk} becomes {range}'s without being published"))),
            Whose::Nobodys | Whose::Plan(_) => {}
        }
        let known = *self.chunks.get(&chunk).ok_or_else(|| no(format!("{chunk} is granted and is not there")))?;
        // What a session could have imported goes to nobody else.
        if matches!(known.whose, Whose::Session(_) | Whose::Range(_)) {
            return Err(no(format!("{chunk} goes from one holder to another")));
        }
        self.set_chunk(chunk, Some(KnownChunk { whose, ..known }), was);
        Ok(())
    }

    fn publish(&mut self, of: &PublishedRange, was: &mut Vec<Was>) -> Result<(), Nonsense> {
        if self.ranges.contains_key(&of.range) || self.ranges.len() >= limits::RANGES_MAX {
            return Err(no(format!("{} is published twice, or is one of too many", of.range)));
        }
        self.session(of.publisher)?;
        if of.chunks.is_empty() {
            return Err(no(format!("{} has no chunk", of.range)));
        }
        for chunk in &of.chunks {
            // One that is there twice is the range's already.
            let known = self.chunks.get(chunk).filter(|known| known.whose == Whose::Session(of.publisher));
            let known = *known.ok_or_else(|| no(format!("{} has {chunk}, which is not its publisher's", of.range)))?;
            self.set_chunk(*chunk, Some(KnownChunk { whose: Whose::Range(of.range), ..known }), was);
        }
        self.count([0, 0, of.range.0, of.version], was);
        // Its publisher holds it from the beginning.
        let holds = BTreeMap::from([(of.publisher, 1)]);
        self.set_range(of.range, Some(KnownRange { of: of.clone(), is_withdrawn: false, holds }), was);
        Ok(())
    }

    /// Records that come to the same as this.
    pub fn records(&self) -> Vec<Record> {
        let mut records = vec![Record::Counted {
            sessions: self.last_session,
            chunks: self.last_chunk,
            ranges: self.last_range,
            versions: self.last_version,
        }];
        records.extend(self.draining.iter().map(|device| Record::Drained { device: *device, is_draining: true }));
        if !self.ladder.is_empty() {
            records.push(Record::Dealt { ladder: self.ladder.clone() });
        }
        // A publisher that is not there any more is for as long as it takes to say what it published.
        let gone: BTreeSet<SessionId> = self.ranges.values().map(|range| range.of.publisher).collect();
        let gone = gone.into_iter().filter(|publisher| !self.sessions.contains_key(publisher));
        let gone: Vec<SessionId> = gone.collect();
        records.extend(gone.iter().map(|session| Record::Opened(SessionRecord::nobody(*session))));
        for (session, known) in &self.sessions {
            records.push(Record::Opened(known.of.clone()));
            let (terms, revision, is_evicted) = (known.of.terms, known.revision, known.is_evicted);
            records.push(Record::Termed { session: *session, terms, revision, is_evicted });
            let guarantee = |(device, bytes): (&DeviceUuid, &Bytes)| Record::Guaranteed {
                session: *session,
                device: *device,
                bytes: *bytes,
            };
            records.extend(known.guarantees.iter().map(guarantee));
        }
        for (chunk, known) in &self.chunks {
            let (chunk, device, len) = (*chunk, known.device, known.len);
            records.push(Record::Created { chunk, device, len });
            match known.whose {
                Whose::Nobodys => {}
                Whose::Session(_) | Whose::Plan(_) => records.push(Record::Granted { chunk, whose: known.whose }),
                Whose::Range(range) => {
                    if let Some(range) = self.ranges.get(&range) {
                        records.push(Record::Granted { chunk, whose: Whose::Session(range.of.publisher) });
                    }
                }
            }
        }
        for (range, known) in &self.ranges {
            let (range, publisher) = (*range, known.of.publisher);
            records.push(Record::Published(known.of.clone()));
            for (session, count) in &known.holds {
                let already = u32::from(*session == publisher);
                records.extend((already..*count).map(|_| Record::Attached { range, session: *session }));
            }
            if !known.holds.contains_key(&publisher) {
                records.push(Record::Left { range, session: publisher });
            }
            if known.is_withdrawn {
                records.push(Record::Withdrawn { range });
            }
        }
        records.extend(gone.iter().map(|session| Record::Ended { session: *session }));
        records
    }

    /// Checks what always holds.
    ///
    /// # Errors
    ///
    /// What does not.
    pub fn invariants(&self) -> Result<(), String> {
        for (chunk, known) in &self.chunks {
            let is_right = match known.whose {
                Whose::Nobodys | Whose::Plan(_) => true,
                Whose::Session(session) => self.sessions.contains_key(&session),
                Whose::Range(range) => self
                    .ranges
                    .get(&range)
                    .is_some_and(|range| range.of.chunks.iter().filter(|of| *of == chunk).count() == 1),
            };
            if !is_right {
                return Err(format!("{chunk} is said to be {:?}'s, who knows nothing of it", known.whose));
            }
            if chunk.0 > self.last_chunk {
                return Err(format!("{chunk} has a number that was not given"));
            }
        }
        for (range, known) in &self.ranges {
            let is_its = |chunk| self.chunks.get(chunk).is_some_and(|known| known.whose == Whose::Range(*range));
            if !known.of.chunks.iter().all(is_its) {
                return Err(format!("{range} has a chunk that is another's"));
            }
            if let Some((session, _)) =
                known.holds.iter().find(|(holder, count)| **count == 0 || !self.sessions.contains_key(holder))
            {
                return Err(format!("{range} is held by {session}, which is not there"));
            }
        }
        Ok(())
    }
}
