//! What sessions have counted under this daemon: sums that only go up, by device and by the names that are listed.
//!
//! A session's page says all that its process has ever counted, under daemons before this one too, and is gone with the session. So each look at a page adds what is more than at the last one, and the
//! first is of what was there when this daemon met it: Prometheus takes a sum that goes down for one that began anew, and would count all of it again.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use foldhash::HashMap;

use super::sessions::Who;
use super::{ByDevice, CounterSet, FAILURES, Sets, add};
use crate::ids::{DeviceId, SessionId};
use crate::limits::{self, COUNTERS_MAX};
use crate::runtime::Counter;

/// Whoever is not listed.
static OTHERS: LazyLock<Who> = LazyLock::new(Who::others);

/// See above.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Tally(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    sessions: HashMap<SessionId, Seen>,
    devices: ByDevice,
    /// Failures for want of memory, which no page counts: those that have no other reason.
    exhausted: BTreeMap<DeviceId, u64>,
    /// Those of sessions that are listed, and of all others together.
    names: HashMap<Who, Name>,
}

/// A session as it was at the last look.
#[derive(Debug, Default)]
struct Seen {
    /// What each set of its page said, up to the last one that said something.
    sets: Vec<Said>,
    /// By which name it is listed.
    listed: Option<Who>,
}

/// The most that a set has said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Said {
    counters: CounterSet,
    /// Failures without a reason, at any one look: a page is read while somebody counts on it, and a reason comes in the place of none.
    exhausted: u64,
}

impl Said {
    const NOTHING: Said = Said { counters: [0; COUNTERS_MAX], exhausted: 0 };

    fn of(counters: &CounterSet) -> Said {
        let reasons: u64 = FAILURES.iter().map(|(_, of)| counters[*of as usize]).fold(0, u64::saturating_add);
        let exhausted = counters[Counter::Failures as usize].saturating_sub(reasons);
        Said { counters: *counters, exhausted }
    }
}

#[derive(Debug, Default)]
struct Name {
    sums: ByDevice,
    sessions: u64,
}

impl Tally {
    /// Looks at a session: what its page says, if it can be read, and by which name it is listed, which is the one that it has while there is room. What is of no device that there is counts for
    /// `home`. A session that `is_over` is none to look at.
    pub(super) fn look(
        &self,
        session: SessionId,
        who: Who,
        home: DeviceId,
        is_over: impl Fn() -> bool,
        read: impl FnOnce() -> Option<Sets>,
    ) -> Option<(Who, ByDevice)> {
        let mut known = self.known();
        // Whoever ends a session takes it out of the registry first, and its counts after that.
        if is_over() {
            return None;
        }
        let listed = known.list(session, who);
        let sets = read();
        sets.as_ref().into_iter().for_each(|sets| known.count(session, sets, home));
        Some((listed, sets.map(|sets| by_device(&sets, home)).unwrap_or_default()))
    }

    /// A session counts on another page from now on, from where that is: `turn` makes it so, and says what the one before and the next one say. Nobody looks meanwhile. Nothing of one that is over.
    pub(super) fn rebase<E>(
        &self,
        session: SessionId,
        home: DeviceId,
        turn: impl FnOnce() -> Result<Option<[Option<Sets>; 2]>, E>,
    ) -> Result<(), E> {
        let mut known = self.known();
        let Some([before, next]) = turn()? else { return Ok(()) };
        // Of a session of the daemon before there is no page until its process brings it.
        before.iter().for_each(|before| known.count(session, before, home));
        known.sessions.entry(session).or_default().sets = next.as_ref().map(said).unwrap_or_default();
        Ok(())
    }

    /// A session is over: `read` says what its page does.
    pub(super) fn end(&self, session: SessionId, home: DeviceId, read: impl FnOnce() -> Option<Sets>) {
        let mut known = self.known();
        read().iter().for_each(|last| known.count(session, last, home));
        if let Some(seen) = known.sessions.remove(&session) {
            known.strike(seen.listed);
        }
    }

    /// The sums of each device.
    pub(super) fn devices(&self) -> ByDevice {
        self.known().devices.clone()
    }

    /// Failures on each device for want of memory.
    pub(super) fn exhausted(&self) -> BTreeMap<DeviceId, u64> {
        self.known().exhausted.clone()
    }

    /// The sums of each name that is listed.
    pub(super) fn names(&self) -> BTreeMap<Who, ByDevice> {
        self.known().names.iter().map(|(who, name)| (who.clone(), name.sums.clone())).collect()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// The name by which a session is listed from now on.
    fn list(&mut self, session: SessionId, who: Who) -> Who {
        let seen = self.sessions.entry(session).or_default();
        // As it was at the last look, mostly.
        if seen.listed.as_ref() == Some(&who) {
            return who;
        }
        let listed = self.names.len() - usize::from(self.names.contains_key(&*OTHERS));
        let has_room = self.names.contains_key(&who) || listed < limits::SESSION_SERIES_MAX;
        let who = if has_room { who } else { OTHERS.clone() };
        if seen.listed.as_ref() != Some(&who) {
            let before = seen.listed.replace(who.clone());
            self.names.entry(who.clone()).or_default().sessions += 1;
            self.strike(before);
        }
        who
    }

    /// One session less has this name: with the last of them its sums go.
    fn strike(&mut self, who: Option<Who>) {
        let Some(who) = who else { return };
        if let Some(name) = self.names.get_mut(&who) {
            name.sessions -= 1;
            if name.sessions == 0 {
                self.names.remove(&who);
            }
        }
    }

    /// Adds what is more than at the last look.
    fn count(&mut self, session: SessionId, sets: &Sets, home: DeviceId) {
        let seen = self.sessions.entry(session).or_default();
        let is_news = |seen: &Seen, at: usize| sets[at].1 != seen.sets.get(at).unwrap_or(&Said::NOTHING).counters;
        if !(0..sets.len()).any(|at| is_news(seen, at)) {
            return;
        }
        let mut name = seen.listed.as_ref().and_then(|who| self.names.get_mut(who));
        for (at, (device, set)) in sets.iter().enumerate() {
            if !is_news(seen, at) {
                continue;
            }
            seen.sets.resize(seen.sets.len().max(at + 1), Said::NOTHING);
            let last = &mut seen.sets[at];
            // On one page nothing goes down, whatever somebody writes there in turns.
            let more = std::array::from_fn(|at| set[at].saturating_sub(last.counters[at]));
            if more == [0; COUNTERS_MAX] {
                continue;
            }
            let said = Said::of(&std::array::from_fn(|at| set[at].max(last.counters[at])));
            let exhausted = said.exhausted.saturating_sub(last.exhausted);
            *last = Said { exhausted: last.exhausted + exhausted, ..said };
            let device = device.unwrap_or(home);
            let sum = self.exhausted.entry(device).or_default();
            *sum = sum.saturating_add(exhausted);
            let sums = name.iter_mut().map(|name| &mut name.sums).chain([&mut self.devices]);
            sums.for_each(|sums| add(sums.entry(device).or_insert_with(nothing), &more));
        }
    }
}

/// Sets of counters, without those at the end that say nothing.
fn said(sets: &Sets) -> Vec<Said> {
    let len = sets.iter().rposition(|(_, set)| *set != [0; COUNTERS_MAX]).map_or(0, |last| last + 1);
    sets[..len].iter().map(|(_, set)| Said::of(set)).collect()
}

/// Of each device what the sets say together. What sleeps is held by nobody, and not in use.
pub(super) fn by_device(sets: &Sets, home: DeviceId) -> ByDevice {
    let mut by_device = ByDevice::new();
    for (device, counters) in sets.iter().filter(|(_, counters)| *counters != [0; COUNTERS_MAX]) {
        let (mut counters, held) = (*counters, counters[Counter::HeldBytes as usize]);
        cap(&mut counters, held);
        add(by_device.entry(device.unwrap_or(home)).or_insert_with(nothing), &counters);
    }
    by_device
}

fn nothing() -> Box<CounterSet> {
    Box::new([0; COUNTERS_MAX])
}

/// What is said to be in use is not more than what is held.
pub(super) fn cap(counters: &mut CounterSet, held: u64) {
    for counter in Counter::OF_HELD {
        let said = &mut counters[counter as usize];
        *said = held.min(*said);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::stats_page::SETS;

    const HOME: DeviceId = DeviceId(0);
    const FAILURES: usize = Counter::Failures as usize;

    /// A page on which one runtime has counted so many failures.
    fn page(failures: u64) -> Sets {
        let mut sets = [(None, [0; COUNTERS_MAX]); SETS];
        (sets[1].0, sets[1].1[FAILURES]) = (Some(DeviceId(1)), failures);
        sets
    }

    fn of(sums: &ByDevice) -> u64 {
        sums.get(&DeviceId(1)).map_or(0, |sums| sums[FAILURES])
    }

    fn look(tally: &Tally, session: u64, name: &str, failures: u64) -> Who {
        let read = || Some(page(failures));
        let looked = tally.look(SessionId(session), Who::of_session(name), HOME, || false, read);
        let (who, counters) = looked.unwrap();
        assert_eq!(of(&counters), failures);
        who
    }

    fn named(tally: &Tally, name: &str) -> Option<u64> {
        tally.names().get(&Who::of_session(name)).map(of)
    }

    #[test]
    fn what_was_counted_under_the_daemon_before_is_no_count_of_this_one() {
        let tally = Tally::default();
        let rebase = |before: Option<Sets>, next: Sets| {
            tally.rebase(SessionId(1), HOME, || Ok::<_, ()>(Some([before, Some(next)]))).unwrap();
        };
        rebase(None, page(1_000));
        look(&tally, 1, "old", 1_000);
        assert_eq!((of(&tally.devices()), named(&tally, "old")), (0, Some(0)));
        look(&tally, 1, "old", 1_007);
        look(&tally, 2, "new", 5);
        assert_eq!((of(&tally.devices()), named(&tally, "old"), named(&tally, "new")), (12, Some(7), Some(5)));
        // It was away for a moment and has counted on, on the same page.
        rebase(Some(page(1_010)), page(1_010));
        look(&tally, 1, "old", 1_011);
        assert_eq!(of(&tally.devices()), 16);
    }

    #[test]
    fn what_failed_for_want_of_memory_does_not_go_down_when_a_reason_is_known() {
        let tally = Tally::default();
        let look = |failures: u64, limit: u64| {
            let mut page = page(failures);
            page[1].1[Counter::FailuresLimit as usize] = limit;
            tally.look(SessionId(1), Who::of_session("one"), HOME, || false, || Some(page));
            let sums = tally.devices()[&DeviceId(1)].clone();
            (tally.exhausted()[&DeviceId(1)], sums[Counter::FailuresLimit as usize])
        };
        assert_eq!([look(10, 0), look(10, 4), look(12, 4), look(15, 4)], [(10, 0), (10, 4), (10, 4), (11, 4)]);
        // Whatever somebody writes there.
        assert_eq!([look(15, u64::MAX), look(16, 0)], [(11, u64::MAX), (11, u64::MAX)]);
        // What was so under the daemon before is no news.
        let mut before = page(100);
        before[1].1[Counter::FailuresLimit as usize] = 30;
        tally.rebase(SessionId(2), HOME, || Ok::<_, ()>(Some([None, Some(before)]))).unwrap();
        before[1].1[FAILURES] = 101;
        tally.look(SessionId(2), Who::of_session("two"), HOME, || false, || Some(before));
        assert_eq!(tally.exhausted()[&DeviceId(1)], 12);
    }

    #[test]
    fn the_sum_of_a_name_does_not_go_down_when_one_of_its_sessions_ends() {
        let tally = Tally::default();
        look(&tally, 1, "twin", 100);
        look(&tally, 2, "twin", 1);
        assert_eq!(named(&tally, "twin"), Some(101));
        tally.end(SessionId(1), HOME, || Some(page(103)));
        assert_eq!((named(&tally, "twin"), of(&tally.devices())), (Some(104), 104));
        // Nobody looks at one that is over, and counts it again.
        let looked = tally.look(SessionId(1), Who::of_session("twin"), HOME, || true, || Some(page(103)));
        assert!(looked.is_none());
        look(&tally, 2, "twin", 2);
        assert_eq!(named(&tally, "twin"), Some(105));
        tally.end(SessionId(2), HOME, || None);
        assert_eq!((named(&tally, "twin"), of(&tally.devices())), (None, 105));
    }

    #[test]
    fn who_finds_no_room_is_one_with_the_others_until_there_is_some() {
        let tally = Tally::default();
        let max = limits::SESSION_SERIES_MAX as u64;
        for session in 0..max {
            look(&tally, session, &format!("s{session}"), 1);
        }
        assert_eq!(look(&tally, max, "late", 10), Who::others());
        assert_eq!(look(&tally, max + 1, "later", 10), Who::others());
        assert_eq!(look(&tally, max + 2, "s7", 10), Who::of_session("s7"), "that name is listed");
        let others = |tally: &Tally| tally.names().get(&Who::others()).map(of);
        assert_eq!((others(&tally), named(&tally, "s7")), (Some(20), Some(11)));
        tally.end(SessionId(0), HOME, || None);
        // From here on it counts under its own name, and what the others have counted stays theirs.
        assert_eq!(look(&tally, max, "late", 12), Who::of_session("late"));
        assert_eq!((others(&tally), named(&tally, "late")), (Some(20), Some(2)));
        assert_eq!(tally.names().len(), limits::SESSION_SERIES_MAX + 1);
    }

    #[test]
    fn a_page_that_cannot_be_read_for_once_is_not_counted_twice() {
        let tally = Tally::default();
        look(&tally, 1, "one", 40);
        let looked = tally.look(SessionId(1), Who::of_session("one"), HOME, || false, || None);
        assert_eq!(looked.unwrap().1, ByDevice::new());
        look(&tally, 1, "one", 41);
        assert_eq!(of(&tally.devices()), 41);
        // Nor is one on which somebody writes now this and now that.
        for failures in [3, 41, 0, 44, 41, 44] {
            look(&tally, 1, "one", failures);
        }
        assert_eq!((of(&tally.devices()), named(&tally, "one")), (44, Some(44)));
    }
}
