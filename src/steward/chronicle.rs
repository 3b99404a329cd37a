//! What a step of the ledger is to the journal: the facts that changed by it, written before anybody hears of the step.
//!
//! Not for: what is in a journal, and how it lies in a file ([`crate::journal`]).
//!
//! Invariant: the journal says of each chunk what the ledger says ([`Ledger::known_chunks`]); with debug assertions that is looked at after every step.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::chain;
use crate::ids::{ChunkId, DeviceId, DeviceUuid, PlanId, RangeId, SessionId};
use crate::journal::{Book, Journal, JournalError, Record, Whose};
use crate::ledger::{ChunkFact, Command, Effect, Facts, Holder, Ledger, Owner, RangeFact, SessionFact};

/// The journal of a steward.
#[derive(Debug)]
pub(super) struct Chronicle {
    /// Nothing where it and the ledger differ: then nobody can follow.
    journal: Option<Journal>,
    uuids: BTreeMap<DeviceId, DeviceUuid>,
    /// The last step could not be written.
    is_failing: bool,
    /// When it was tried last to write it all the same.
    tried_ms: u64,
}

/// What of a command is a fact by itself, beside what its effects are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    Created(ChunkId),
    Ended(SessionId),
    Attached(RangeId, SessionId),
    Left(RangeId, SessionId),
    Withdrawn(RangeId),
    Unreserved(PlanId),
    /// The terms of a session may be others.
    Termed(SessionId),
    Drained(DeviceId, bool),
    Other,
}

impl Cause {
    pub(super) fn of(command: &Command) -> Cause {
        match command {
            Command::Created { chunk } => Cause::Created(*chunk),
            Command::End { session, .. } => Cause::Ended(*session),
            Command::Attach { range, session } => Cause::Attached(*range, *session),
            Command::Leave { range, session } => Cause::Left(*range, *session),
            Command::Withdraw { range } => Cause::Withdrawn(*range),
            Command::Unreserve { plan } => Cause::Unreserved(*plan),
            Command::Drain { device, is_draining } => Cause::Drained(*device, *is_draining),
            Command::Change { session, .. } | Command::Evict { session } | Command::Admit { session, .. } => {
                Cause::Termed(*session)
            }
            _ => Cause::Other,
        }
    }
}

/// So long between two attempts.
const MEND_MS: u64 = 500;

impl Chronicle {
    pub(super) fn new(journal: Journal, uuids: BTreeMap<DeviceId, DeviceUuid>) -> Chronicle {
        Chronicle { journal: Some(journal), uuids, is_failing: false, tried_ms: 0 }
    }

    /// What the journal says, where there is one.
    pub(super) fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    /// Writes down what `cause` and its effects have changed, with what only the caller knows of it (`own`).
    pub(super) fn note(&mut self, ledger: &Ledger, cause: Cause, own: Option<Record>, effects: &[Effect]) {
        let Some(journal) = &mut self.journal else { return };
        let step = records(journal.book(), &self.uuids, ledger, cause, own, effects);
        if !step.is_empty() {
            let written = journal.append(&step);
            self.note_written(written);
        }
        #[cfg(debug_assertions)]
        if let Some(journal) = &self.journal
            && let Err(wrong) = agrees(journal.book(), &self.uuids, ledger)
        {
            panic!("the journal and the ledger differ: {wrong}");
        }
    }

    /// Writes down what no step of the ledger is.
    pub(super) fn add(&mut self, record: Record) {
        if let Some(journal) = &mut self.journal {
            let written = journal.append(&[record]);
            self.note_written(written);
        }
    }

    /// Where a step could not be written, or the file was removed: tries again, now and then. Nobody may lease anything for hours, and there may be room by now.
    pub(super) fn mend(&mut self, now_ms: u64) {
        if now_ms.saturating_sub(self.tried_ms) < MEND_MS {
            return;
        }
        self.tried_ms = now_ms;
        match &mut self.journal {
            Some(journal) if !self.is_failing && journal.is_displaced() => {
                tracing::warn!("the journal was removed under this daemon: it is written anew");
                let written = journal.write_anew();
                self.note_written(written);
            }
            _ => self.mend_now(),
        }
    }

    /// The same, at once: somebody follows.
    pub(super) fn mend_now(&mut self) {
        if let (true, Some(journal)) = (self.is_failing, &mut self.journal) {
            let written = journal.mend();
            self.note_written(written);
        }
    }

    fn note_written(&mut self, written: Result<(), JournalError>) {
        match written {
            Ok(()) if std::mem::take(&mut self.is_failing) => tracing::info!("the journal can be written again"),
            Ok(()) => {}
            Err(error @ JournalError::Nonsense(_)) => {
                tracing::error!(error = %chain(&error), "the journal and the ledger differ: no daemon can follow this one");
                debug_assert!(false, "{}", chain(&error));
                self.end();
            }
            Err(error) if !self.is_failing => {
                self.is_failing = true;
                tracing::error!(error = %chain(&error), "the journal cannot be written: what is leased from here on a daemon that follows this one does not know, before it can be again");
            }
            Err(_) => {}
        }
    }

    /// There is no journal any more.
    pub(super) fn end(&mut self) {
        if let Some(journal) = self.journal.take()
            && let Err(error) = journal.remove()
        {
            tracing::warn!(error = %chain(&error), "a journal that says nothing any more stays");
        }
    }
}

/// The facts that are others after a step.
fn records(
    book: &Book,
    uuids: &BTreeMap<DeviceId, DeviceUuid>,
    ledger: &Ledger,
    cause: Cause,
    own: Option<Record>,
    effects: &[Effect],
) -> Vec<Record> {
    let mut step: Vec<Record> = own.into_iter().collect();
    let mut created = None;
    let mut termed = None;
    let new = |chunk: ChunkId| {
        let (device, len) = ledger.known_chunk(chunk)?;
        Some(Record::Created { chunk, device: *uuids.get(&device)?, len })
    };
    match cause {
        Cause::Created(chunk) => {
            created = Some(chunk);
            step.extend(new(chunk));
        }
        Cause::Ended(session) if book.sessions().contains_key(&session) => step.push(Record::Ended { session }),
        Cause::Attached(range, session) => step.push(Record::Attached { range, session }),
        Cause::Left(range, session) => step.push(Record::Left { range, session }),
        Cause::Withdrawn(range) => step.push(Record::Withdrawn { range }),
        Cause::Unreserved(plan) => {
            let reserved = book.chunks().iter().filter(|(_, known)| known.whose == Whose::Plan(plan));
            step.extend(reserved.map(|(chunk, _)| Record::Granted { chunk: *chunk, whose: Whose::Nobodys }));
        }
        Cause::Termed(session) => termed = Some(session),
        Cause::Drained(device, is_draining) => {
            step.extend(uuids.get(&device).map(|device| Record::Drained { device: *device, is_draining }));
        }
        Cause::Ended(_) | Cause::Other => {}
    }
    let gone = |effect: &Effect| if let Effect::RangeGone { range } = effect { Some(*range) } else { None };
    let gone: BTreeSet<RangeId> = effects.iter().filter_map(gone).collect();
    step.extend(gone.iter().map(|range| Record::RangeGone { range: *range }));
    // Goes with its session or its range.
    let goes_along = |whose: Whose| match whose {
        Whose::Session(session) => cause == Cause::Ended(session),
        Whose::Range(range) => gone.contains(&range),
        Whose::Nobodys | Whose::Plan(_) => false,
    };
    for effect in effects {
        match effect {
            Effect::Destroy { chunk } => {
                let is_known = book.chunks().get(chunk).map(|known| !goes_along(known.whose));
                if is_known.unwrap_or(created == Some(*chunk)) {
                    step.push(Record::Gone { chunk: *chunk });
                }
            }
            Effect::Grant { holder, chunks, .. } => {
                let whose = match holder {
                    Holder::Session(session) => Whose::Session(*session),
                    Holder::Plan(plan) => Whose::Plan(*plan),
                };
                if let (Holder::Session(session), true) = (holder, chunks.is_empty()) {
                    // A guarantee: perhaps of one that has waited for it, and has caused nothing now.
                    step.extend(terms(book, uuids, ledger, *session));
                }
                let is_other = |chunk: &ChunkId| book.chunks().get(chunk).is_none_or(|known| known.whose != whose);
                let others = chunks.iter().map(|(chunk, _)| *chunk).filter(is_other);
                step.extend(others.map(|chunk| Record::Granted { chunk, whose }));
            }
            Effect::Registered { session, chunk, .. } => {
                step.extend(new(*chunk));
                step.push(Record::Granted { chunk: *chunk, whose: Whose::Session(*session) });
            }
            Effect::Create { .. }
            | Effect::AskBack { .. }
            | Effect::Gave { .. }
            | Effect::Unanswered { .. }
            | Effect::EndBorrower { .. }
            | Effect::RangeGone { .. }
            | Effect::Refuse { .. } => {}
        }
    }
    step.extend(termed.into_iter().flat_map(|session| terms(book, uuids, ledger, session)));
    step
}

/// What of a session's terms the journal says otherwise.
fn terms(book: &Book, uuids: &BTreeMap<DeviceId, DeviceUuid>, ledger: &Ledger, session: SessionId) -> Vec<Record> {
    let (Some(known), Some(view)) = (book.sessions().get(&session), ledger.session(session)) else {
        return Vec::new();
    };
    let mut step = Vec::new();
    let is_evicted = ledger.is_evicted(session);
    if (known.of.terms, known.revision, known.is_evicted) != (view.terms, view.revision, is_evicted) {
        let (terms, revision) = (view.terms, view.revision);
        step.push(Record::Termed { session, terms, revision, is_evicted });
    }
    let guarantees = ledger.lasting_guarantees(session);
    for (device, uuid) in uuids {
        let bytes = guarantees.get(device).copied().unwrap_or_default();
        if known.guarantees.get(uuid).copied().unwrap_or_default() != bytes {
            step.push(Record::Guaranteed { session, device: *uuid, bytes });
        }
    }
    step
}

/// Checks that both say the same of each chunk.
#[cfg(debug_assertions)]
fn agrees(book: &Book, uuids: &BTreeMap<DeviceId, DeviceUuid>, ledger: &Ledger) -> Result<(), String> {
    book.invariants()?;
    let mut count = 0;
    for fact in ledger.known_chunks() {
        count += 1;
        let whose = match fact.owner {
            Owner::Nobody => Whose::Nobodys,
            Owner::Session(session) => Whose::Session(session),
            Owner::Plan(plan) => Whose::Plan(plan),
            Owner::Range(range) => Whose::Range(range),
        };
        let known = book.chunks().get(&fact.chunk).map(|known| (Some(known.device), known.len, known.whose));
        if known != Some((uuids.get(&fact.device).copied(), fact.len, whose)) {
            return Err(format!("{fact:?}, and the journal has {known:?}"));
        }
    }
    for view in ledger.sessions() {
        let others = terms(book, uuids, ledger, view.session);
        if !others.is_empty() || !book.sessions().contains_key(&view.session) {
            return Err(format!("{} is known otherwise: {others:?}", view.session));
        }
    }
    if count != book.chunks().len() {
        return Err(format!("{} chunks, and {count} there are", book.chunks().len()));
    }
    Ok(())
}

/// What a book says, for a ledger whose devices are called so. Nothing of a device that is not among them. `is_bare` says which chunks nobody can hand on.
pub fn facts(book: &Book, devices: &BTreeMap<DeviceUuid, DeviceId>, is_bare: impl Fn(ChunkId) -> bool) -> Facts {
    let sessions = book.sessions().iter().map(|(session, known)| SessionFact {
        session: *session,
        terms: known.of.terms,
        revision: known.revision,
        is_evicted: known.is_evicted,
        guarantees: known.guarantees.iter().filter_map(|(uuid, bytes)| Some((*devices.get(uuid)?, *bytes))).collect(),
    });
    let chunks = book.chunks().iter().filter_map(|(chunk, known)| {
        let owner = match known.whose {
            Whose::Nobodys => Owner::Nobody,
            Whose::Session(session) => Owner::Session(session),
            Whose::Plan(plan) => Owner::Plan(plan),
            Whose::Range(range) => Owner::Range(range),
        };
        let (device, is_bare) = (*devices.get(&known.device)?, is_bare(*chunk));
        Some(ChunkFact { chunk: *chunk, device, len: known.len, owner, is_bare })
    });
    let ranges = book.ranges().iter().map(|(range, known)| RangeFact {
        range: *range,
        chunks: known.of.chunks.clone(),
        holders: known.holds.iter().map(|(session, count)| (*session, *count)).collect(),
        publisher: known.of.publisher,
        linger_ms: known.of.linger_ms,
        is_withdrawn: known.is_withdrawn,
    });
    Facts {
        sessions: sessions.collect(),
        chunks: chunks.collect(),
        ranges: ranges.collect(),
        draining: book.draining().iter().filter_map(|uuid| devices.get(uuid).copied()).collect(),
        last_chunk: book.last_numbers().1,
    }
}
