//! What must be true after every step: the ledger says what the lists say, and nobody waits for nothing.

use std::collections::BTreeMap;

use stitchd::ids::{DeviceId, PlanId};
use stitchd::ledger::{Command, DeviceBytes, SessionView};
use stitchd::units::Bytes;

use super::reference::{Chunk, Device, Is, Session, World};

impl World {
    pub(super) fn check(&self, command: &Command) {
        if let Err(wrong) = self.ledger.invariants() {
            panic!("after {command:?}: {wrong}");
        }
        for device in &self.devices {
            self.check_books(device);
            self.check_queue(device.id, command);
        }
        let view = |session: &Session| SessionView {
            session: session.id,
            limit: session.limit,
            priority: session.priority,
            held: self
                .devices
                .iter()
                .map(|device| (device.id, self.held(session.id, device.id)))
                .filter(|(_, held)| !held.is_zero())
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

    pub(super) fn check_books(&self, device: &Device) {
        let view = self.ledger.device(device.id).unwrap();
        let bytes = |matches: fn(Is) -> bool| self.bytes(device.id, |chunk| matches(chunk.is));
        let expected = DeviceBytes {
            creating: self.creating(device.id),
            claimed: bytes(|is| matches!(is, Is::Claimed(..))),
            idle: bytes(|is| is == Is::Idle),
            reserved: bytes(|is| matches!(is, Is::Reserved(_))),
            leased: bytes(|is| matches!(is, Is::Leased(_))),
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
        assert_eq!(view.waiting, self.queue(device.id).len());
    }

    /// Nobody waits for nothing.
    pub(super) fn check_queue(&self, device: DeviceId, command: &Command) {
        let queue = self.queue(device);
        if self.device(device).is_lost {
            let is_kept = |chunk: &Chunk| matches!(chunk.is, Is::Idle | Is::Reserved(_));
            let kept = self.count(device, is_kept);
            assert_eq!((queue.len(), kept), (0, 0), "{device} is lost, and somebody hopes, after {command:?}");
        }
        let Some(first) = queue.first() else { return };
        assert!(!self.has_room(first), "{first:?} could be served after {command:?}");
        // What a session is granted on one device can take it to its limit on another; that shows when the other one moves.
        let is_hopeless = self.devices.len() == 1 && self.is_over_limit(first);
        assert!(!is_hopeless, "{first:?} waits for more than its session may hold after {command:?}");
        if self.destroying(device).is_zero() {
            let (bytes, chunks) = self.in_its_way(first);
            let has_room = self.to_create(first) <= self.room(device) + bytes
                && self.chunks_to_create(first) <= self.chunk_room(device) + chunks;
            assert!(!has_room, "{first:?} could be served by giving idle chunks up after {command:?}");
            let overdue = queue.iter().find(|request| request.deadline_ms <= self.now_ms);
            assert!(overdue.is_none(), "the time of {overdue:?} is up after {command:?}");
        }
        let circle = self.youngest_in_circle(device);
        assert_eq!(circle, None, "all who hold memory on {device} wait for more after {command:?}");
    }
}
