//! Which commands the ledger does not take, and why.

use std::collections::BTreeSet;

use stitchd::ids::{ChunkId, DeviceId, RangeId, SessionId};
use stitchd::ladder::Part;
use stitchd::ledger::{Command, Holder, LedgerError, Refusal};
use stitchd::units::Bytes;

use super::UNIT;
use super::reference::{Chunk, Is, World};

impl World {
    pub(super) fn error_of(&self, command: &Command) -> Option<LedgerError> {
        let no_device = |device: DeviceId| {
            (!self.devices.iter().any(|known| known.id == device)).then_some(LedgerError::NoDevice(device))
        };
        let no_session =
            |session: SessionId| self.session(session).is_none().then_some(LedgerError::NoSession(session));
        let unasked = |chunk: ChunkId, is_asked: &dyn Fn(Is) -> bool| {
            (!self.chunk(chunk).is_some_and(|found| is_asked(found.is))).then_some(LedgerError::Unasked(chunk))
        };
        match command {
            Command::AddDevice { device, .. } => {
                no_device(*device).is_none().then_some(LedgerError::DeviceExists(*device))
            }
            Command::Observe { device, .. }
            | Command::Warm { device, .. }
            | Command::Lose { device }
            | Command::Drain { device, .. }
            | Command::TrimIdle { device, .. }
            | Command::Parked { device, .. } => no_device(*device),
            Command::Trim { device, session, .. } => no_device(*device).or_else(|| session.and_then(no_session)),
            Command::Answered { session, device, .. } => no_session(*session).or_else(|| no_device(*device)),
            Command::Evict { session } | Command::Spare { session } => no_session(*session),
            Command::Change { session, change, revision } => no_session(*session).or_else(|| {
                let known = self.session(*session).unwrap();
                let guaranteed = known.guarantees.values().copied().sum();
                match (revision, change.limit) {
                    (Some(meant), _) if *meant != known.revision => {
                        Some(LedgerError::Stale { session: *session, revision: known.revision, meant: *meant })
                    }
                    (_, Some(limit)) if limit < guaranteed => {
                        Some(LedgerError::BelowGuarantee { session: *session, guaranteed, limit })
                    }
                    _ => None,
                }
            }),
            Command::Admit { request, session, device, .. } => {
                if self.request(*request).is_some() {
                    return Some(LedgerError::RequestExists(*request));
                }
                no_device(*device).or_else(|| no_session(*session)).or_else(|| {
                    (!self.session(*session).unwrap().is_attached).then_some(LedgerError::Detached(*session))
                })
            }
            Command::Open { session, .. } => {
                self.session(*session).map(|session| LedgerError::SessionExists(session.id))
            }
            Command::Detach { session } | Command::Reattach { session } | Command::End { session, .. } => {
                no_session(*session)
            }
            Command::Register { .. } => panic!("nobody registers anything"),
            Command::Acquire { request, holder, device, parts, .. } => {
                let mut lens: Vec<_> = parts.iter().map(|part| part.len).collect();
                lens.sort();
                lens.dedup();
                let is_wrong = |part: &Part| part.len < UNIT || part.len > Bytes::gib(4) || part.count == 0;
                if parts.is_empty() || parts.iter().any(is_wrong) || lens.len() != parts.len() {
                    return Some(LedgerError::Parts);
                }
                if self.request(*request).is_some() {
                    return Some(LedgerError::RequestExists(*request));
                }
                no_device(*device).or_else(|| match holder {
                    Holder::Session(session) => no_session(*session).or_else(|| {
                        (!self.session(*session).unwrap().is_attached).then_some(LedgerError::Detached(*session))
                    }),
                    Holder::Plan(_) => None,
                })
            }
            Command::Cancel { .. } | Command::Close | Command::Tick { .. } => None,
            Command::Release { session, chunks } => no_session(*session).or_else(|| {
                let is_held =
                    |chunk: &ChunkId| self.chunk(*chunk).is_some_and(|found| found.is == Is::Leased(*session));
                let at = (0..chunks.len()).find(|at| !is_held(&chunks[*at]) || chunks[..*at].contains(&chunks[*at]))?;
                Some(LedgerError::NotHeld { session: *session, chunk: chunks[at] })
            }),
            Command::Publish { range, session, chunks, .. } => no_session(*session).or_else(|| {
                if self.range(*range).is_some() {
                    return Some(LedgerError::RangeExists(*range));
                }
                if !self.session(*session).unwrap().is_attached {
                    return Some(LedgerError::Detached(*session));
                }
                let is_held =
                    |chunk: &ChunkId| self.chunk(*chunk).is_some_and(|found| found.is == Is::Leased(*session));
                let at = (0..chunks.len()).find(|at| !is_held(&chunks[*at]) || chunks[..*at].contains(&chunks[*at]));
                if let Some(at) = at {
                    return Some(LedgerError::NotHeld { session: *session, chunk: chunks[at] });
                }
                let devices: BTreeSet<_> = chunks.iter().map(|chunk| self.chunk(*chunk).unwrap().device).collect();
                if devices.len() != 1 {
                    return Some(LedgerError::NoRun);
                }
                self.barred(*session, *devices.first().unwrap()).map(LedgerError::from)
            }),
            Command::Attach { range, session } => {
                no_session(*session).or_else(|| self.error_of_attach(*range, *session))
            }
            Command::Leave { range, session } => no_session(*session).or_else(|| match self.range(*range) {
                None => Some(LedgerError::NoRange(*range)),
                Some(held) if held.holders.contains(session) => None,
                Some(_) => Some(LedgerError::NotHolding { session: *session, range: *range }),
            }),
            Command::Withdraw { range } => self.range(*range).is_none().then_some(LedgerError::NoRange(*range)),
            Command::Unreserve { plan } => {
                let is_for_it = |chunk: &Chunk| {
                    chunk.is == Is::Reserved(*plan) || matches!(chunk.is, Is::Claimed(_, Some(from)) if from == *plan)
                };
                let is_asked_for = self.requests.iter().any(|request| request.holder == Holder::Plan(*plan));
                (!is_asked_for && !self.chunks.iter().any(is_for_it)).then_some(LedgerError::NoPlan(*plan))
            }
            Command::Created { chunk } | Command::CreateFailed { chunk, .. } => {
                unasked(*chunk, &|is| matches!(is, Is::Creating(_)))
            }
            Command::Destroyed { chunk } => unasked(*chunk, &|is| matches!(is, Is::Destroying | Is::Quarantined)),
            Command::DestroyFailed { chunk } => unasked(*chunk, &|is| is == Is::Destroying),
        }
    }

    fn error_of_attach(&self, range: RangeId, session: SessionId) -> Option<LedgerError> {
        // Who holds a withdrawn one may hold it again.
        let wanted = self.range(range);
        let Some(wanted) = wanted.filter(|wanted| !wanted.is_withdrawn || wanted.holders.contains(&session)) else {
            return Some(LedgerError::NoRange(range));
        };
        let known = self.session(session).unwrap();
        if !known.is_attached {
            return Some(LedgerError::Detached(session));
        }
        let (held, limit) = (self.held_everywhere(session), known.terms.limit);
        if let Some(refusal) = self.barred(session, wanted.device) {
            return Some(refusal.into());
        }
        let times = wanted.holders.iter().filter(|holder| **holder == session).count();
        if times >= 64 {
            return Some(LedgerError::TooMany { what: "holds of a shared range", limit: 64 });
        }
        let is_over = times == 0 && held + wanted.bytes > limit;
        is_over.then(|| Refusal::OverLimit { requested: wanted.bytes, held, limit }.into())
    }

    /// Nobody may have anything there, or this session may not.
    fn barred(&self, session: SessionId, device: DeviceId) -> Option<Refusal> {
        let device = self.device(device);
        if self.is_closed {
            Some(Refusal::Closed)
        } else if device.is_lost {
            Some(Refusal::Lost { device: device.id })
        } else if device.is_draining {
            Some(Refusal::Draining { device: device.id })
        } else if self.session(session).unwrap().is_evicted {
            Some(Refusal::Evicted)
        } else {
            None
        }
    }
}
