//! One session in the ledger: its terms, and what it has on each device.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{ChunkId, DeviceId, RangeId, SessionId};
use crate::units::Bytes;

/// What a session may have, and what it gives others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Bytes that it may never pass, on all devices together.
    pub limit: Bytes,
    /// Higher is served first.
    pub priority: u32,
    /// What it is guaranteed and does not use is lent to others until it asks; else it is kept for it, and there at once.
    pub lends: bool,
    /// It answers when it is asked to give idle memory back; others are never asked.
    pub answers: bool,
}

impl Terms {
    /// Terms without a wish: what is guaranteed is lent, and nobody asks it.
    pub fn new(limit: Bytes, priority: u32) -> Terms {
        Terms { limit, priority, lends: true, answers: false }
    }
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) terms: Terms,
    /// How often its terms were changed.
    pub(super) revision: u64,
    pub(super) is_attached: bool,
    /// It gets nothing more.
    pub(super) is_evicted: bool,
    /// Its process is being ended.
    pub(super) is_ending: bool,
    /// Its process could not be ended.
    pub(super) is_spared: bool,
    /// Leased, promised to requests that are being created, and held of shared ranges.
    pub(super) held: Bytes,
    /// The most that it may hold: its limit, or what it held when that was set lower, less what it has given back since.
    most: Bytes,
    pub(super) leased: BTreeSet<ChunkId>,
    /// Shared ranges that it holds.
    pub(super) ranges: BTreeSet<RangeId>,
    places: BTreeMap<DeviceId, Place>,
}

/// What a session has on a device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    /// Leased there, promised, and held of shared ranges.
    pub(super) held: Bytes,
    /// Of that, what is of shared ranges.
    pub(super) shared: Bytes,
    /// Ranges that it has published and that somebody holds: they count against its guarantee, whether it holds them or not.
    pub(super) bears: Bytes,
    /// What it is to have whenever it asks.
    pub(super) guarantee: Bytes,
    /// What of its memory lies idle, as far as anybody knows. Where nobody does it may be all.
    pub(super) parked: Option<Bytes>,
    /// It was asked and gave less than that: not asked again until more is parked than was then, or the moment has come.
    pub(super) dry: Option<Dry>,
    /// What it got by asking others stays with it until then.
    pub(super) settled_until_ms: u64,
    /// And for how long that is: longer if it goes to and fro.
    pub(super) settle_ms: u64,
    /// Chunks that it had returned were given up for so many bytes more than were created for it.
    pub(super) exchanged: Bytes,
}

/// See [`Place::dry`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Dry {
    pub(super) parked: Bytes,
    pub(super) until_ms: u64,
}

impl Place {
    /// What it could give back by itself.
    pub(super) fn own(&self) -> Bytes {
        self.held - self.shared
    }

    /// What counts against its guarantee.
    pub(super) fn borne(&self) -> Bytes {
        self.held - self.shared + self.bears
    }

    /// Bytes of its guarantee that it has not.
    pub(super) fn unfilled(&self) -> Bytes {
        self.guarantee.saturating_sub(self.borne())
    }

    /// What lies idle there, or may.
    pub(super) fn parked(&self) -> Bytes {
        self.parked.map_or(self.own(), |parked| parked.min(self.own()))
    }
}

/// A session as the ledger sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionView {
    /// Which.
    pub session: SessionId,
    /// What it may have.
    pub terms: Terms,
    /// How often that was changed.
    pub revision: u64,
    /// Bytes leased, promised, and held of shared ranges, by device.
    pub held: Vec<(DeviceId, Bytes)>,
    /// Of those, what is of shared ranges, by device.
    pub shared: Vec<(DeviceId, Bytes)>,
    /// Bytes that it is to have whenever it asks, by device.
    pub guarantees: Vec<(DeviceId, Bytes)>,
    /// Chunks leased.
    pub chunks: usize,
    /// Its connection is there.
    pub is_attached: bool,
    /// It gets nothing more.
    pub is_evicted: bool,
}

impl SessionView {
    /// Bytes leased, promised, and held of shared ranges, on all devices.
    pub fn held_bytes(&self) -> Bytes {
        self.held.iter().map(|(_, held)| *held).sum()
    }
}

impl Session {
    pub(super) fn new(terms: Terms) -> Session {
        Session {
            terms,
            revision: 0,
            is_attached: true,
            is_evicted: false,
            is_ending: false,
            is_spared: false,
            held: Bytes::ZERO,
            most: terms.limit,
            leased: BTreeSet::new(),
            ranges: BTreeSet::new(),
            places: BTreeMap::new(),
        }
    }

    pub(super) fn view(&self, session: SessionId) -> SessionView {
        let by_device = |of: fn(&Place) -> Bytes| {
            let places = self.places.iter().map(|(device, place)| (*device, of(place)));
            places.filter(|(_, bytes)| !bytes.is_zero()).collect()
        };
        SessionView {
            session,
            terms: self.terms,
            revision: self.revision,
            held: by_device(|place| place.held),
            shared: by_device(|place| place.shared),
            guarantees: by_device(|place| place.guarantee),
            chunks: self.leased.len(),
            is_attached: self.is_attached,
            is_evicted: self.is_evicted || self.is_ending,
        }
    }

    pub(super) fn place(&self, device: DeviceId) -> Place {
        self.places.get(&device).copied().unwrap_or_default()
    }

    pub(super) fn place_mut(&mut self, device: DeviceId) -> &mut Place {
        self.places.entry(device).or_default()
    }

    pub(super) fn places(&self) -> impl Iterator<Item = (DeviceId, &Place)> {
        self.places.iter().map(|(device, place)| (*device, place))
    }

    pub(super) fn take(&mut self, device: DeviceId, len: Bytes) {
        self.held += len;
        assert!(self.held <= self.terms.limit, "a session never gets beyond its limit");
        self.place_mut(device).held += len;
    }

    pub(super) fn untake(&mut self, device: DeviceId, len: Bytes) {
        self.held -= len;
        self.most = self.most.min(self.held).max(self.terms.limit);
        self.place_mut(device).held -= len;
    }

    pub(super) fn give_back(&mut self, device: DeviceId, chunk: ChunkId, len: Bytes) {
        assert!(self.leased.remove(&chunk), "the caller looked the chunk up");
        self.untake(device, len);
        let place = self.place_mut(device);
        place.parked = place.parked.map(|parked| parked.saturating_sub(len));
    }

    /// What it holds above a new limit it keeps until it gives it back.
    pub(super) fn set_limit(&mut self, limit: Bytes) {
        self.terms.limit = limit;
        self.most = limit.max(self.held);
    }

    /// What it holds and is not to: above its limit, and all where it was evicted.
    pub(super) fn excess(&self) -> Bytes {
        if self.is_evicted { self.held } else { self.held.saturating_sub(self.terms.limit) }
    }

    /// The most that it may hold now.
    pub(super) fn most(&self) -> Bytes {
        self.most
    }

    pub(super) fn held_on(&self, device: DeviceId) -> Bytes {
        self.place(device).held
    }

    pub(super) fn holds_on(&self, device: DeviceId) -> bool {
        !self.held_on(device).is_zero()
    }
}
