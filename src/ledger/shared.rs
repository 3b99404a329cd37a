//! Shared ranges: chunks that several sessions hold at once.
//!
//! A range is counted once against its device, and against the limit of each of its holders. Against a guarantee it counts only for its publisher, as long as that session lives and somebody holds the range: whether the publisher
//! does or not. So what is promised and what is kept for guarantees are the same sum, whoever attaches and whoever leaves. A range that nobody holds outlives its last holder for the time that it was published with, and no
//! longer than nobody needs its memory who is guaranteed it. Its chunks are never leased again: they go back to the driver.

use std::collections::{BTreeMap, BTreeSet};

use super::facts::{FactsError, RangeFact};
use super::session::Place;
use super::{Effect, Holder, Ledger, LedgerError, Refusal, State};
use crate::ids::{ChunkId, DeviceId, RangeId, SessionId};
use crate::limits;
use crate::units::Bytes;

/// All shared ranges.
#[derive(Debug, Default)]
pub(super) struct Shared {
    ranges: BTreeMap<RangeId, Range>,
    /// Ranges that nobody holds, and when each goes.
    unheld: BTreeSet<(u64, RangeId)>,
}

#[derive(Debug)]
struct Range {
    device: DeviceId,
    /// In the order of its addresses.
    chunks: Vec<ChunkId>,
    bytes: Bytes,
    /// Who holds it, and how often.
    holders: BTreeMap<SessionId, u32>,
    /// Who published it: it counts against his guarantee as long as he lives and somebody holds it.
    publisher: SessionId,
    linger_ms: u64,
    /// When it goes, while nobody holds it.
    due_ms: Option<u64>,
    is_withdrawn: bool,
}

/// A shared range as the ledger sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RangeView {
    /// Which.
    pub range: RangeId,
    /// Where.
    pub device: DeviceId,
    /// Its chunks with their sizes, in the order of its addresses.
    pub chunks: Vec<(ChunkId, Bytes)>,
    /// Who holds it.
    pub holders: Vec<SessionId>,
    /// How long it outlives its last holder, in milliseconds.
    pub linger_ms: u64,
    /// In how many milliseconds it goes, while nobody holds it.
    pub left_ms: Option<u64>,
    /// Nobody more may hold it.
    pub is_withdrawn: bool,
}

impl RangeView {
    /// Its bytes.
    pub fn bytes(&self) -> Bytes {
        self.chunks.iter().map(|(_, len)| *len).sum()
    }
}

impl Ledger {
    pub(super) fn publish(
        &mut self,
        range: RangeId,
        session: SessionId,
        chunks: Vec<ChunkId>,
        linger_ms: u64,
    ) -> Result<(), LedgerError> {
        let holder = self.sessions.get(&session).ok_or(LedgerError::NoSession(session))?;
        if self.shared.ranges.contains_key(&range) {
            return Err(LedgerError::RangeExists(range));
        }
        if !holder.is_attached {
            return Err(LedgerError::Detached(session));
        }
        if self.shared.ranges.len() >= limits::RANGES_MAX {
            return Err(LedgerError::TooMany { what: "shared ranges", limit: limits::RANGES_MAX });
        }
        self.check_ranges_of(session)?;
        let mut named = BTreeSet::new();
        for chunk in &chunks {
            if !holder.leased.contains(chunk) || !named.insert(*chunk) {
                return Err(LedgerError::NotHeld { session, chunk: *chunk });
            }
        }
        let devices: BTreeSet<_> = chunks.iter().map(|chunk| self.chunks[chunk].device).collect();
        let [device] = devices.into_iter().collect::<Vec<_>>()[..] else { return Err(LedgerError::NoRun) };
        if let Some(refusal) = self.barred(Holder::Session(session), device) {
            return Err(refusal.into());
        }
        let bytes: Bytes = chunks.iter().map(|chunk| self.chunks[chunk].len).sum();
        for chunk in &chunks {
            self.set_state(*chunk, State::Shared { range });
        }
        let holder = self.sessions.get_mut(&session).expect("looked up above");
        chunks.iter().for_each(|chunk| assert!(holder.leased.remove(chunk), "looked up above"));
        holder.ranges.insert(range);
        let place = holder.place_mut(device);
        place.shared += bytes;
        place.bears += bytes;
        place.parked = place.parked.map(|parked| parked.min(place.own()));
        let published = Range {
            device,
            chunks,
            bytes,
            holders: BTreeMap::from([(session, 1)]),
            publisher: session,
            linger_ms: linger_ms.min(limits::LINGER_MS_MAX),
            due_ms: None,
            is_withdrawn: false,
        };
        self.shared.ranges.insert(range, published);
        Ok(())
    }

    /// A range that was there before this ledger; its chunks are.
    pub(super) fn begin_with_range(&mut self, known: &RangeFact) -> Result<(), FactsError> {
        let RangeFact { range, publisher, linger_ms, is_withdrawn, .. } = *known;
        let wrong = || FactsError::Range { range };
        let first = known.chunks.first().and_then(|chunk| self.chunks.get(chunk)).ok_or_else(wrong)?;
        let (device, mut bytes, mut named) = (first.device, Bytes::ZERO, BTreeSet::new());
        for chunk in &known.chunks {
            let is_its = |record: &&super::Record| record.state == State::Shared { range } && record.device == device;
            let record = self.chunks.get(chunk).filter(is_its).ok_or_else(wrong)?;
            if !named.insert(*chunk) {
                return Err(wrong());
            }
            bytes += record.len;
        }
        if self.shared.ranges.contains_key(&range) {
            return Err(wrong());
        }
        let holders: BTreeMap<SessionId, u32> = known.holders.iter().copied().filter(|(_, times)| *times > 0).collect();
        for session in holders.keys() {
            let unowned = || FactsError::Unowned { what: range.to_string(), whose: session.to_string() };
            let holder = self.sessions.get_mut(session).ok_or_else(unowned)?;
            holder.has_already(device, bytes);
            holder.ranges.insert(range);
            holder.place_mut(device).shared += bytes;
        }
        let due_ms = match (holders.is_empty(), is_withdrawn) {
            (false, _) => None,
            (true, true) => Some(self.now_ms),
            (true, false) => Some(self.now_ms.saturating_add(linger_ms)),
        };
        match due_ms {
            Some(due_ms) => drop(self.shared.unheld.insert((due_ms, range))),
            None => self.bear(publisher, device, |place| place.bears += bytes),
        }
        let chunks = known.chunks.clone();
        self.shared
            .ranges
            .insert(range, Range { device, chunks, bytes, holders, publisher, linger_ms, due_ms, is_withdrawn });
        Ok(())
    }

    /// The same as facts, for tests.
    #[cfg(test)]
    pub(super) fn range_facts(&self) -> Vec<RangeFact> {
        let fact = |(range, known): (&RangeId, &Range)| RangeFact {
            range: *range,
            chunks: known.chunks.clone(),
            holders: known.holders.iter().map(|(session, times)| (*session, *times)).collect(),
            publisher: known.publisher,
            linger_ms: known.linger_ms,
            is_withdrawn: known.is_withdrawn,
        };
        self.shared.ranges.iter().map(fact).collect()
    }

    pub(super) fn attach(
        &mut self,
        range: RangeId,
        session: SessionId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        let known = self.sessions.get(&session).ok_or(LedgerError::NoSession(session))?;
        // Who holds a withdrawn one may hold it again: nobody comes to it.
        let may = |wanted: &&Range| !wanted.is_withdrawn || wanted.holders.contains_key(&session);
        let wanted = self.shared.ranges.get(&range).filter(may);
        let wanted = wanted.ok_or(LedgerError::NoRange(range))?;
        let (device, bytes) = (wanted.device, wanted.bytes);
        if !known.is_attached {
            return Err(LedgerError::Detached(session));
        }
        if let Some(refusal) = self.barred(Holder::Session(session), device) {
            return Err(refusal.into());
        }
        if wanted.holders.get(&session).is_some_and(|times| *times >= limits::HOLDS_MAX) {
            return Err(LedgerError::TooMany { what: "holds of a shared range", limit: limits::HOLDS_MAX as usize });
        }
        if !wanted.holders.contains_key(&session) {
            self.check_ranges_of(session)?;
            let (held, limit) = (known.held, known.terms.limit);
            if held.checked_add(bytes).is_none_or(|sum| sum > limit) {
                return Err(Refusal::OverLimit { requested: bytes, held, limit }.into());
            }
            let holder = self.sessions.get_mut(&session).expect("looked up above");
            holder.take(device, bytes);
            holder.ranges.insert(range);
            holder.place_mut(device).shared += bytes;
        }
        let wanted = self.shared.ranges.get_mut(&range).expect("looked up above");
        let publisher = wanted.publisher;
        *wanted.holders.entry(session).or_default() += 1;
        if let Some(due_ms) = wanted.due_ms.take() {
            self.shared.unheld.remove(&(due_ms, range));
            self.bear(publisher, device, |place| place.bears += bytes);
        }
        self.rekey(session, device);
        // What was kept for its guarantee may be less now.
        self.serve(device, effects);
        Ok(())
    }

    /// Whether the session may hold one more range.
    fn check_ranges_of(&self, session: SessionId) -> Result<(), LedgerError> {
        if self.sessions[&session].ranges.len() >= limits::SESSION_RANGES_MAX {
            return Err(LedgerError::TooMany { what: "shared ranges of a session", limit: limits::SESSION_RANGES_MAX });
        }
        Ok(())
    }

    /// What a publisher bears has changed, if he is there still.
    fn bear(&mut self, publisher: SessionId, device: DeviceId, change: impl FnOnce(&mut Place)) {
        if let Some(known) = self.sessions.get_mut(&publisher) {
            change(known.place_mut(device));
            self.rekey(publisher, device);
        }
    }

    pub(super) fn leave(
        &mut self,
        range: RangeId,
        session: SessionId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), LedgerError> {
        if !self.sessions.contains_key(&session) {
            return Err(LedgerError::NoSession(session));
        }
        let held = self.shared.ranges.get_mut(&range).ok_or(LedgerError::NoRange(range))?;
        let times = held.holders.get_mut(&session).ok_or(LedgerError::NotHolding { session, range })?;
        *times -= 1;
        if *times > 0 {
            return Ok(());
        }
        let device = held.device;
        self.let_go(range, session, effects);
        self.rekey(session, device);
        self.serve(device, effects);
        Ok(())
    }

    /// A session holds a range no more.
    fn let_go(&mut self, range: RangeId, session: SessionId, effects: &mut Vec<Effect>) {
        let held = self.shared.ranges.get_mut(&range).expect("the caller has the range");
        let (device, bytes) = (held.device, held.bytes);
        held.holders.remove(&session);
        let (is_last, publisher) = (held.holders.is_empty(), held.publisher);
        let holder = self.sessions.get_mut(&session).expect("the caller has the session");
        holder.ranges.remove(&range);
        holder.place_mut(device).shared -= bytes;
        holder.untake(device, bytes);
        if !is_last {
            return;
        }
        self.bear(publisher, device, |place| place.bears -= bytes);
        let account = &self.devices[&device];
        let may_stay = !account.is_lost() && !account.is_draining() && !self.is_closed;
        let held = self.shared.ranges.get_mut(&range).expect("looked up above");
        if held.is_withdrawn || held.linger_ms == 0 || !may_stay {
            return self.destroy_range(range, effects);
        }
        let due_ms = self.now_ms.saturating_add(held.linger_ms);
        held.due_ms = Some(due_ms);
        self.shared.unheld.insert((due_ms, range));
    }

    /// A session is over: it holds nothing any more. What its process still has mapped stays the driver's to keep apart.
    pub(super) fn leave_all(&mut self, session: SessionId, effects: &mut Vec<Effect>) {
        for range in self.sessions[&session].ranges.clone() {
            self.let_go(range, session, effects);
        }
    }

    pub(super) fn withdraw(&mut self, range: RangeId, effects: &mut Vec<Effect>) -> Result<(), LedgerError> {
        let withdrawn = self.shared.ranges.get_mut(&range).ok_or(LedgerError::NoRange(range))?;
        withdrawn.is_withdrawn = true;
        let device = withdrawn.device;
        if withdrawn.holders.is_empty() {
            self.destroy_range(range, effects);
        }
        self.serve(device, effects);
        Ok(())
    }

    /// Nobody holds the range, and nobody is to.
    fn destroy_range(&mut self, range: RangeId, effects: &mut Vec<Effect>) {
        let gone = self.shared.ranges.remove(&range).expect("the caller has the range");
        assert!(gone.holders.is_empty(), "a range goes with its last holder");
        if let Some(due_ms) = gone.due_ms {
            self.shared.unheld.remove(&(due_ms, range));
        }
        for chunk in gone.chunks {
            self.destroy(chunk, effects);
        }
        effects.push(Effect::RangeGone { range });
    }

    /// Ranges that nobody held for as long as they were to last go. Their devices are served by the caller.
    pub(super) fn let_overdue_go(&mut self, effects: &mut Vec<Effect>) {
        while let Some((due_ms, range)) = self.shared.unheld.first().copied() {
            if due_ms > self.now_ms {
                return;
            }
            self.destroy_range(range, effects);
        }
    }

    /// Ranges of a device that nobody holds go until that is enough, those that would go first in front. Says whether any did.
    pub(super) fn let_unheld_go(&mut self, device: DeviceId, wanted: Bytes, effects: &mut Vec<Effect>) -> bool {
        let on_device = |(_, range): &&(u64, RangeId)| self.shared.ranges[range].device == device;
        let unheld: Vec<_> = self.shared.unheld.iter().filter(on_device).map(|(_, range)| *range).collect();
        let mut left = wanted;
        let mut is_any = false;
        for range in unheld {
            if left.is_zero() {
                break;
            }
            left = left.saturating_sub(self.shared.ranges[&range].bytes);
            self.destroy_range(range, effects);
            is_any = true;
        }
        is_any
    }

    /// Some range of a device is held by nobody, and will go.
    pub(super) fn has_unheld(&self, device: DeviceId) -> bool {
        self.shared.unheld.iter().any(|(_, range)| self.shared.ranges[range].device == device)
    }

    /// The ranges that a session holds, and how often.
    pub fn holds_of(&self, session: SessionId) -> Vec<(RangeId, u32)> {
        let held = self.sessions.get(&session).map(|known| known.ranges.iter());
        let times = |range: &RangeId| Some((*range, *self.shared.ranges.get(range)?.holders.get(&session)?));
        held.into_iter().flatten().filter_map(times).collect()
    }

    /// Every shared range.
    pub fn ranges(&self) -> Vec<RangeView> {
        self.shared.ranges.keys().filter_map(|range| self.range(*range)).collect()
    }

    /// One shared range.
    pub fn range(&self, range: RangeId) -> Option<RangeView> {
        let known = self.shared.ranges.get(&range)?;
        Some(RangeView {
            range,
            device: known.device,
            chunks: known.chunks.iter().map(|chunk| (*chunk, self.chunks[chunk].len)).collect(),
            holders: known.holders.keys().copied().collect(),
            linger_ms: known.linger_ms,
            left_ms: known.due_ms.map(|due_ms| due_ms.saturating_sub(self.now_ms)),
            is_withdrawn: known.is_withdrawn,
        })
    }

    /// What sessions hold of shared ranges, for the audit: that they say so, and that the records do.
    pub(super) fn count_shared(&self, held: &mut BTreeMap<(SessionId, DeviceId), Bytes>) -> Result<(), String> {
        let mut shared: BTreeMap<(SessionId, DeviceId), Bytes> = BTreeMap::new();
        let mut bears: BTreeMap<(SessionId, DeviceId), Bytes> = BTreeMap::new();
        let mut of_session: BTreeMap<SessionId, BTreeSet<RangeId>> = BTreeMap::new();
        let mut named = 0;
        for (id, range) in &self.shared.ranges {
            for chunk in &range.chunks {
                let is_its = |record: &super::Record| {
                    record.state == State::Shared { range: *id } && record.device == range.device
                };
                if !self.chunks.get(chunk).is_some_and(is_its) {
                    return Err(format!("{chunk} is named by {id} and is not in it"));
                }
            }
            named += range.chunks.len();
            let bytes: Bytes = range.chunks.iter().map(|chunk| self.chunks[chunk].len).sum();
            let is_due = range.due_ms.is_some_and(|due_ms| self.shared.unheld.contains(&(due_ms, *id)));
            if bytes != range.bytes || range.holders.is_empty() != is_due {
                return Err(format!("{id} is wrong: {range:?}"));
            }
            if !range.holders.is_empty() && self.sessions.contains_key(&range.publisher) {
                *bears.entry((range.publisher, range.device)).or_default() += bytes;
            }
            for (session, times) in &range.holders {
                if *times == 0 {
                    return Err(format!("{session} holds {id} no times"));
                }
                *held.entry((*session, range.device)).or_default() += bytes;
                *shared.entry((*session, range.device)).or_default() += bytes;
                of_session.entry(*session).or_default().insert(*id);
            }
        }
        if self.chunks.values().filter(|record| matches!(record.state, State::Shared { .. })).count() != named {
            return Err("there are shared chunks that are in no range".to_owned());
        }
        for (session, known) in &self.sessions {
            if of_session.remove(session).unwrap_or_default() != known.ranges {
                return Err(format!("{session} says that it holds {:?}", known.ranges));
            }
            for (device, place) in known.places() {
                let here = (*session, device);
                let counted = (shared.remove(&here).unwrap_or_default(), bears.remove(&here).unwrap_or_default());
                if counted != (place.shared, place.bears) {
                    return Err(format!("{session} says {place:?} on {device}, and shares {counted:?}"));
                }
            }
        }
        if shared.is_empty() && bears.is_empty() && of_session.is_empty() {
            return Ok(());
        }
        Err(format!("sessions that are gone hold {of_session:?}"))
    }
}
