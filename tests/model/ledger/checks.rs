//! What must be true after every step: the ledger says what the lists say, and nobody waits for nothing.

use std::collections::{BTreeMap, BTreeSet};

use stitchd::ids::{DeviceId, PlanId};
use stitchd::ledger::{Command, DeviceBytes, Holder, RangeView, SessionView};
use stitchd::units::Bytes;

use super::reference::{Chunk, Device, Is, Range, Session, World};

impl World {
    pub(super) fn check(&self, command: &Command) {
        if let Err(wrong) = self.ledger.invariants() {
            panic!("after {command:?}: {wrong}");
        }
        for device in &self.devices {
            self.check_books(device);
            self.check_queue(device.id, command);
        }
        self.check_ranges(command);
        let view = |session: &Session| SessionView {
            session: session.id,
            terms: session.terms,
            revision: session.revision,
            guarantees: session.guarantees.iter().map(|(device, bytes)| (*device, *bytes)).collect(),
            is_evicted: session.is_evicted,
            held: self
                .devices
                .iter()
                .map(|device| (device.id, self.held(session.id, device.id)))
                .filter(|(_, held)| !held.is_zero())
                .collect(),
            shared: self
                .devices
                .iter()
                .map(|device| (device.id, self.shared(session.id, device.id)))
                .filter(|(_, shared)| !shared.is_zero())
                .collect(),
            chunks: self.chunks.iter().filter(|chunk| chunk.is == Is::Leased(session.id)).count(),
            is_attached: session.is_attached,
        };
        let mut sessions: Vec<_> = self.sessions.iter().map(view).collect();
        sessions.sort_by_key(|session| session.session);
        assert_eq!(self.ledger.sessions(), sessions, "after {command:?}");
        assert_eq!(self.ledger.request_count(), self.requests.len(), "after {command:?}");
        assert_eq!(self.ledger.returned(), self.returned, "after {command:?}");
        let mut reserved: BTreeMap<PlanId, Bytes> = BTreeMap::new();
        for chunk in &self.chunks {
            if let Is::Reserved(plan) = chunk.is {
                *reserved.entry(plan).or_default() += chunk.len;
            }
        }
        assert_eq!(self.ledger.reserved(), reserved.into_iter().collect::<Vec<_>>(), "after {command:?}");
    }

    /// Every shared range is as it should be, and none is there whose time is up.
    fn check_ranges(&self, command: &Command) {
        let view = |range: &Range| RangeView {
            range: range.id,
            device: range.device,
            chunks: range.chunks.iter().map(|chunk| (*chunk, self.chunk(*chunk).unwrap().len)).collect(),
            holders: range.holders.iter().copied().collect::<BTreeSet<_>>().into_iter().collect(),
            linger_ms: range.linger_ms,
            left_ms: range.due_ms.map(|due_ms| due_ms - self.now_ms),
            is_withdrawn: range.is_withdrawn,
        };
        assert_eq!(self.ledger.ranges(), self.ranges.iter().map(view).collect::<Vec<_>>(), "after {command:?}");
        for range in &self.ranges {
            for chunk in &range.chunks {
                assert_eq!(self.chunk(*chunk).unwrap().is, Is::Shared(range.id));
            }
            let device = self.device(range.device);
            let is_over = range.is_withdrawn || device.is_lost || device.is_draining;
            assert!(!range.holders.is_empty() || !is_over, "{range:?} stays after {command:?}");
            assert!(range.due_ms.is_none_or(|due_ms| due_ms > self.now_ms), "{range:?} stays after {command:?}");
            let is_wanted = self.destroying(range.device).is_zero()
                && self.creating(range.device).is_zero()
                && self.is_short_of_guaranteed(range.device);
            assert!(
                !range.holders.is_empty() || !is_wanted,
                "{range:?} is kept from whom it is guaranteed after {command:?}"
            );
        }
    }

    pub(super) fn check_books(&self, device: &Device) {
        let view = self.ledger.device(device.id).unwrap();
        let bytes = |matches: fn(Is) -> bool| self.bytes(device.id, |chunk| matches(chunk.is));
        let expected = DeviceBytes {
            creating: self.creating(device.id),
            claimed: bytes(|is| matches!(is, Is::Claimed(..))),
            idle: bytes(|is| is == Is::Idle),
            reserved: bytes(|is| matches!(is, Is::Reserved(_))),
            leased: bytes(|is| matches!(is, Is::Leased(_))),
            shared: bytes(|is| matches!(is, Is::Shared(_))),
            destroying: self.destroying(device.id),
            quarantined: bytes(|is| is == Is::Quarantined),
        };
        assert_eq!(view.bytes, expected);
        assert_eq!(
            (view.total, view.budget, view.foreign),
            (device.total, self.budget(device.id), device.known_foreign)
        );
        let chunks = self.count(device.id, |_| true);
        assert_eq!((view.chunks, view.chunks_max, view.is_lost), (chunks, device.chunks_max, device.is_lost));
        assert_eq!((view.refused_creates, view.peak_leased), (device.refused_creates, device.peak_leased));
        assert_eq!(view.waiting, self.queue(device.id).len() + self.admissions(device.id).len());
        assert_eq!(view.is_draining, device.is_draining);
        let asked = self.asked.iter().filter(|((of, _), asked)| *of == device.id && !asked.is_late);
        assert_eq!(view.asked, asked.count());
        assert_eq!(
            view.guaranteed,
            self.sessions.iter().map(|session| self.guaranteed(session.id, device.id)).sum::<Bytes>()
        );
    }

    /// Nobody waits for nothing.
    pub(super) fn check_queue(&self, device: DeviceId, command: &Command) {
        let queue = self.queue(device);
        if self.device(device).is_lost {
            let is_kept = |chunk: &Chunk| matches!(chunk.is, Is::Idle | Is::Reserved(_));
            let kept = self.count(device, is_kept);
            assert_eq!((queue.len(), kept), (0, 0), "{device} is lost, and somebody hopes, after {command:?}");
        }
        let stuck = self.stuck();
        // What somebody got by asking stays with him for a while: until then others may hope.
        let is_settled = self.settled_ms.is_some_and(|at| self.now_ms < at + 2_000);
        assert!(stuck.is_empty() || is_settled, "{stuck:?} wait for each other after {command:?}");
        if let Some(first) = self.admissions(device).first() {
            assert!(!self.device(device).is_draining, "{first:?} waits for nothing after {command:?}");
            let overdue = self.admissions(device).into_iter().find(|request| self.is_overdue(request));
            assert!(overdue.is_none(), "the time of {overdue:?} is up after {command:?}");
            let (guarantee, Holder::Session(session)) = (first.bytes(), first.holder) else { panic!() };
            let others = self.sessions.iter().filter(|other| other.id != session);
            let promised: Bytes = others.map(|other| self.guaranteed(other.id, device)).sum();
            let is_kept = self.guaranteed(session, device) == guarantee;
            let lends = self.session(session).unwrap().terms.lends;
            let unfilled = guarantee.saturating_sub(self.borne(session, device));
            let is_there = lends || self.lacking(first.holder, device, unfilled, Bytes::ZERO).is_zero();
            let may_be_kept = is_there || first.deadline_ms > self.now_ms;
            let fits = promised + guarantee <= self.budget(device) && may_be_kept;
            // Whose ceiling has just been lifted by a create is looked at with the next.
            assert!(is_kept || !fits || !self.creating(device).is_zero(), "{first:?} fits after {command:?}");
            let is_moving = !self.creating(device).is_zero() || !self.destroying(device).is_zero();
            assert!(!is_kept || !is_there || is_moving, "{first:?} is there after {command:?}");
        }
        let Some(first) = queue.first() else { return };
        assert!(!self.device(device).is_draining, "{first:?} hopes for what is drained after {command:?}");
        assert!(!self.has_room(first), "{first:?} could be served after {command:?}");
        // What a session is granted on one device can take it to its limit on another; that shows when the other one moves.
        let is_hopeless = self.devices.len() == 1 && self.is_over_limit(first);
        assert!(!is_hopeless, "{first:?} waits for more than its session may hold after {command:?}");
        if self.destroying(device).is_zero() && self.leaves_what_is_kept(first) {
            let (bytes, chunks) = self.in_its_way(first);
            let has_room = self.to_create(first) <= self.room(device) + bytes
                && self.chunks_to_create(first) <= self.chunk_room(device) + chunks;
            assert!(!has_room, "{first:?} could be served by giving idle chunks up after {command:?}");
        }
        let overdue = queue.iter().find(|request| self.is_overdue(request));
        assert!(overdue.is_none(), "the time of {overdue:?} is up after {command:?}");
    }
}
