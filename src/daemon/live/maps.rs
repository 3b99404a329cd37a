//! Where sessions' memory lies: asked of them while somebody looks, and shown as they say.
//!
//! What a session says of itself is believed of itself only: nothing is worked out from it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::daemon::Daemon;
use crate::daemon::registry::Entry;
use crate::ids::{DeviceId, SessionId};
use crate::wire::v1;
use tokio::sync::watch;

/// A session is asked no more often, however many look.
const EVERY: Duration = Duration::from_millis(500);
/// It has so long to answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// No client says more.
const RANGES_MAX: usize = 64;
const CELLS_MAX: usize = 2_048;
/// What nobody has looked at for so long is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);

/// What a session has shown of a device.
#[derive(Clone, Debug)]
struct Shown {
    look: u64,
    at: Duration,
    map: v1::AddressMap,
}

/// Looks at a session, and what was seen.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Maps {
    /// How often it was asked, and when the last time was.
    asked: watch::Sender<(u64, Duration)>,
    shown: watch::Sender<BTreeMap<DeviceId, Shown>>,
}

impl Maps {
    /// Told whenever somebody looks: how often that was.
    pub(in crate::daemon) fn looks(&self) -> watch::Receiver<(u64, Duration)> {
        self.asked.subscribe()
    }

    /// The number of the look that is to be answered, which is a new one where the last is old.
    fn look(&self, now: Duration) -> u64 {
        let mut look = 0;
        self.asked.send_if_modified(|(number, at)| {
            let is_new = *number == 0 || now.saturating_sub(*at) >= EVERY;
            if is_new {
                (*number, *at) = (*number + 1, now);
            }
            look = *number;
            is_new
        });
        look
    }
}

/// It is as large as a client may say, and each range has as many cells as it should.
fn is_sound(map: &v1::AddressMap) -> bool {
    let cells: usize = map.ranges.iter().map(|range| range.used.len()).sum();
    let is_whole = |range: &v1::AddressRange| {
        map.cell_bytes > 0 && range.used.len() as u64 == range.len_bytes.div_ceil(map.cell_bytes)
    };
    map.ranges.len() <= RANGES_MAX && cells <= CELLS_MAX && map.ranges.iter().all(is_whole)
}

impl Daemon {
    /// A session has shown what it has of a device. What nobody has asked for, or makes no sense, is not heard.
    pub(in crate::daemon) fn note_map(&self, entry: &Entry, device: DeviceId, shown: v1::Shown) {
        let asked = entry.maps.asked.borrow().0;
        let (look, age) = (shown.look, Duration::from_millis(shown.age_ms));
        let Some(map) = shown.map.filter(|map| look > 0 && look <= asked && is_sound(map)) else { return };
        if !self.devices_of(entry.id).contains(&device) {
            return;
        }
        let shown = Shown { look, at: self.clock.now().saturating_sub(age), map };
        entry.maps.shown.send_modify(|all| drop(all.insert(device, shown)));
    }

    /// What nobody looks at any more is not kept.
    pub(in crate::daemon) fn forget_maps(&self) {
        let now = self.clock.now();
        for entry in self.registry.all() {
            let is_old = now.saturating_sub(entry.maps.asked.borrow().1) >= FORGOTTEN_AFTER;
            if is_old && !entry.maps.shown.borrow().is_empty() {
                entry.maps.shown.send_modify(BTreeMap::clear);
            }
        }
    }

    /// The devices of which a session holds anything.
    fn devices_of(&self, session: SessionId) -> Vec<DeviceId> {
        let held = self.steward.session(session).map(|view| view.held).unwrap_or_default();
        held.into_iter().map(|(device, _)| device).collect()
    }

    /// Where a session's memory lies, as it says within a second. Nothing where there is no such session.
    pub(in crate::daemon) async fn address_map(&self, session: SessionId) -> Option<v1::AddressMapReply> {
        let entry = self.registry.get(session)?;
        let on = self.devices_of(session);
        let look = entry.maps.look(self.clock.now());
        let mut shown = entry.maps.shown.subscribe();
        // Whoever does not answer has said before what he had, or nothing.
        let is_answered = |all: &BTreeMap<DeviceId, Shown>| {
            let has_answered = |device| all.get(device).is_some_and(|shown| shown.look >= look);
            !on.is_empty() && on.iter().all(has_answered)
        };
        let _ = tokio::time::timeout(PATIENCE, shown.wait_for(is_answered)).await;
        let now = self.clock.now();
        let map = |(device, shown): (&DeviceId, &Shown)| v1::DeviceMap {
            ordinal: device.0,
            age_ms: u64::try_from(now.saturating_sub(shown.at).as_millis()).unwrap_or(u64::MAX),
            map: Some(shown.map.clone()),
        };
        let devices = shown.borrow().iter().map(map).collect();
        Some(v1::AddressMapReply { devices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_look_a_session_is_asked_twice_a_second() {
        let maps = Maps::default();
        let ms = Duration::from_millis;
        assert_eq!([0, 100, 499, 500, 700, 999, 1_000].map(|at| maps.look(ms(at))), [1, 1, 1, 2, 2, 2, 3]);
    }

    #[test]
    fn a_map_that_makes_no_sense_is_none() {
        let map = |len_bytes, cells: usize, ranges: usize| v1::AddressMap {
            cell_bytes: 10,
            ranges: vec![v1::AddressRange { len_bytes, used: vec![1; cells], ..v1::AddressRange::default() }; ranges],
            ..v1::AddressMap::default()
        };
        assert!(is_sound(&map(25, 3, 2)) && is_sound(&map(0, 0, 0)));
        assert!(!is_sound(&map(25, 2, 1)) && !is_sound(&map(25, 4, 1)) && !is_sound(&map(u64::MAX, 3, 1)));
        assert!(!is_sound(&map(10, 1, RANGES_MAX + 1)) && !is_sound(&map(1_000, 100, 30)));
        assert!(!is_sound(&v1::AddressMap { cell_bytes: 0, ..map(25, 3, 1) }));
    }
}
