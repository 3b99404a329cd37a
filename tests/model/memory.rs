//! Chunks, reservations and mappings over a driver that fails once. First a scenario whose every driver call fails in turn: after each failure the
//! state is the one before, and the same action works when tried again. Then random operations against lists of who holds what, which foretell
//! what is left when the n-th call of an operation fails, also inside a drop.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::layers::faulty::{Faults, Faulty};
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::driver::{Cause, Driver, Handle};
use stitchd::error::ErrorKind;
use stitchd::ids::{ChunkId, DeviceId};
use stitchd::memory::{Chunk, Device, Mapping, MemoryError, Quarantine, Reservation};
use stitchd::rng::Rng;
use stitchd::units::{AddressSpan, Bytes, Place as _, Span};

use crate::{At, alone};

const SEEDS: [u64; 4] = [1, 2, 3, 4];
const STEPS: u64 = 100_000;
const EPISODE: u64 = 500;

const DEVICE: DeviceId = DeviceId(0);
const TOTAL: Bytes = Bytes::mib(64);

/// Chunks, mappings and reservations of a driver.
type Counts = (usize, usize, usize);

struct Bench {
    counts: Box<dyn Fn() -> Counts>,
    faulty: Arc<Faulty>,
    device: Arc<Device>,
}

impl Bench {
    fn new(driver: Arc<dyn Driver>, counts: Box<dyn Fn() -> Counts>) -> Bench {
        let faulty = Faults::around(driver);
        let device = Device::open(Arc::clone(&faulty) as Arc<dyn Driver>, DEVICE).unwrap();
        Bench { counts, faulty, device }
    }

    fn sim() -> Bench {
        let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[TOTAL])));
        Bench::new(sim.clone(), Box::new(move || sim.counts()))
    }

    fn host() -> Bench {
        let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[TOTAL])));
        Bench::new(host.clone(), Box::new(move || host.counts()))
    }

    fn state(&self) -> (Counts, Bytes, Quarantine) {
        let used = TOTAL - self.device.driver().memory(DEVICE).unwrap().free;
        ((self.counts)(), used, self.device.quarantine())
    }

    /// An action that happens whole or leaves no trace; then it works the second time.
    fn whole<T>(&self, mut action: impl FnMut() -> Result<T, MemoryError>) -> T {
        let before = self.state();
        action().unwrap_or_else(|error| {
            assert!(matches!(error.cause(), Some(Cause::Injected(_))), "{error:?}");
            assert_eq!(self.state(), before, "after {error:?}");
            action().unwrap()
        })
    }

    fn create(&self, id: u64, len: Bytes) -> Arc<Chunk> {
        Arc::new(self.whole(|| Chunk::create(&self.device, ChunkId(id), len)))
    }
}

// === Every call of a scenario fails in turn

/// Where each chunk of a mapping is.
fn spans_of(mapping: &Mapping) -> Vec<AddressSpan> {
    mapping.chunks().map(|(start, chunk)| Span::new(start, chunk.len()).unwrap()).collect()
}

/// From the start of the first to the end of the last.
fn over(spans: &[AddressSpan]) -> AddressSpan {
    let (first, last) = (spans[0], spans[spans.len() - 1]);
    Span::new(first.start(), last.end().checked_distance(first.start()).unwrap()).unwrap()
}

/// Makes and lets go of one of everything, and of some things more than once.
fn scenario(bench: &Bench) {
    let chunks = [bench.create(1, Bytes::mib(2)), bench.create(2, Bytes::mib(4)), bench.create(3, Bytes::mib(2))];
    let fd = bench.whole(|| chunks[1].export());
    let import = || Chunk::import(&bench.device, ChunkId(4), fd.try_clone().unwrap(), Bytes::mib(4));
    let imported = Arc::new(bench.whole(import));
    let reservation = bench.whole(|| Reservation::new(&bench.device, Bytes::mib(6)));
    let row = [&chunks[0], &chunks[1], &imported, &chunks[2], &chunks[0]].map(Arc::clone);
    let mut mapping = bench.whole(|| Mapping::stitch(&row));
    assert_eq!((mapping.span().len(), mapping.chunk_count()), (Bytes::mib(14), 5));
    let spans = spans_of(&mapping);
    let again = bench.whole(|| Mapping::stitch(&row[1..]));
    let taken = bench.whole(|| mapping.take(over(&spans[1..3])));
    assert!(taken.iter().zip(&row[1..3]).all(|(taken, chunk)| Arc::ptr_eq(taken, chunk)));
    assert!(spans[1..3].iter().all(|gone| mapping.chunk(gone.start()).is_none()) && !mapping.is_empty());
    let last = bench.whole(|| mapping.take(spans[4]));
    drop((fd, reservation, again, mapping, taken, last, row, imported));
    for chunk in chunks {
        // A release that fails can be tried again; what a drop fails to let go of is in quarantine.
        let before = bench.device.quarantine().count;
        if let Ok(chunk) = Arc::try_unwrap(chunk) {
            chunk.release().or_else(|(chunk, _)| chunk.release()).unwrap();
            assert_eq!(bench.device.quarantine().count, before);
        }
    }
}

#[test]
fn a_scenario_whose_every_call_fails_once_leaves_what_it_found_or_counts_it() {
    let _alone = alone();
    for new in [Bench::sim, Bench::host] {
        let mut quarantines = 0;
        for n in 1.. {
            let at = At::new("memory scenario", n);
            let bench = new();
            bench.faulty.layer().fail_nth(n);
            scenario(&bench);
            if bench.faulty.layer().injected() == 0 {
                // create, release, export, import, reserve, unreserve, map, set-access, waiting and unmap in takes, waiting and unmap in drops
                assert_eq!(n - 1, 3 + 4 + 1 + 1 + 3 + 3 + 9 + 2 + 2 * 2 + 2 * 3);
                break;
            }
            let (counts, used, quarantine) = bench.state();
            quarantines += u64::from(quarantine != Quarantine::default());
            assert_eq!(counts == (0, 0, 0), quarantine == Quarantine::default(), "{counts:?}, {quarantine:?}");
            assert!(used <= quarantine.bytes, "{used} are gone and {quarantine:?} is counted");
            scenario(&bench);
            assert_eq!(bench.state(), (counts, used, quarantine), "the second time leaves more behind");
            drop(at);
        }
        // 3 runs of mappings, each for two calls, 3 ranges of addresses and an import.
        assert_eq!(quarantines, 10);
    }
}

// === Random operations

/// One handle that the driver gave.
#[derive(Debug)]
struct Owned {
    /// Chunks that are the same memory have the same number.
    memory: usize,
    len: Bytes,
    /// Who refers to it: this test, slots, and those that were forgotten in quarantine.
    refs: usize,
    has_handle: bool,
}

/// A mapping as the reference knows it: what each slot shows.
type Slots = Vec<Option<usize>>;

/// The calls that a drop makes, in order.
#[derive(Clone, PartialEq, Debug)]
enum Call {
    Unmap(Vec<usize>),
    Unreserve(Bytes),
    Release(usize),
}

struct World {
    rng: Rng,
    bench: Bench,
    owned: Vec<Owned>,
    loose: Vec<(usize, Arc<Chunk>)>,
    mappings: Vec<(Slots, Vec<AddressSpan>, Mapping)>,
    reservations: Vec<Reservation>,
    /// Mappings and reservations that nobody can undo.
    stuck: Vec<usize>,
    stuck_slots: Vec<AddressSpan>,
    stuck_reservations: usize,
    quarantine: Quarantine,
    failures: u64,
}

impl World {
    fn new(rng: Rng, bench: Bench) -> World {
        World {
            rng,
            bench,
            owned: Vec::new(),
            loose: Vec::new(),
            mappings: Vec::new(),
            reservations: Vec::new(),
            stuck: Vec::new(),
            stuck_slots: Vec::new(),
            stuck_reservations: 0,
            quarantine: Quarantine::default(),
            failures: 0,
        }
    }

    fn mapped(&self) -> impl Iterator<Item = usize> {
        let in_slots = self.mappings.iter().flat_map(|(slots, ..)| slots.iter().flatten());
        in_slots.chain(&self.stuck).copied()
    }

    /// Memory that a handle or a mapping keeps.
    fn alive(&self) -> Vec<(usize, Bytes)> {
        let with_handle = (0..self.owned.len()).filter(|at| self.owned[*at].has_handle);
        let mut alive: Vec<_> =
            with_handle.chain(self.mapped()).map(|at| (self.owned[at].memory, self.owned[at].len)).collect();
        alive.sort();
        alive.dedup();
        alive
    }

    fn used(&self) -> Bytes {
        self.alive().iter().map(|(_, len)| *len).sum()
    }

    /// What is called when some references to chunks are dropped.
    fn releases(&self, dropped: &[usize]) -> Vec<Call> {
        let mut left: Vec<_> = self.owned.iter().map(|owned| owned.refs).collect();
        let mut calls = Vec::new();
        for at in dropped {
            left[*at] -= 1;
            if left[*at] == 0 {
                calls.push(Call::Release(*at));
            }
        }
        calls
    }

    fn note_quarantined(&mut self, len: Bytes) {
        self.quarantine.count += 1;
        self.quarantine.bytes += len;
    }

    fn own(&mut self, memory: usize, chunk: Chunk) {
        self.owned.push(Owned { memory, len: chunk.len(), refs: 1, has_handle: true });
        self.loose.push((self.owned.len() - 1, Arc::new(chunk)));
    }

    /// The outcome of an operation of `calls` calls that is whole or not at all; the `nth` fails.
    fn check_whole<T>(&mut self, outcome: Result<T, MemoryError>, nth: u64, calls: u64) -> Option<T> {
        let fails = (1..=calls).contains(&nth);
        self.failures += u64::from(fails);
        match outcome {
            Ok(done) => {
                assert!(!fails, "call {nth} of {calls} failed and nobody was told");
                Some(done)
            }
            Err(error) => {
                assert!(fails && matches!(error.cause(), Some(Cause::Injected(_))), "{error:?}, {nth} of {calls}");
                None
            }
        }
    }

    /// What is left after drops that made `calls`, of which the `nth` failed.
    fn after_drop(&mut self, dropped: &[usize], calls: &[Call], nth: u64) {
        for at in dropped {
            self.owned[*at].refs -= 1;
        }
        let mut forgotten = Vec::new();
        for (call, number) in calls.iter().zip(1..) {
            let fails = number == nth;
            self.failures += u64::from(fails);
            match call {
                Call::Unmap(run) if fails => {
                    self.note_quarantined(run.iter().map(|at| self.owned[*at].len).sum());
                    forgotten = run.clone();
                }
                // Where something is still mapped, addresses cannot be given back.
                Call::Unreserve(len) if fails || !forgotten.is_empty() => {
                    self.note_quarantined(*len);
                    self.stuck_reservations += 1;
                }
                Call::Release(at) if forgotten.contains(at) => {}
                Call::Release(at) if fails => self.note_quarantined(self.owned[*at].len),
                Call::Release(at) => self.owned[*at].has_handle = false,
                Call::Unmap(_) | Call::Unreserve(_) => {}
            }
        }
        for at in &forgotten {
            self.owned[*at].refs += 1;
        }
        self.stuck.extend(forgotten);
    }

    fn step(&mut self) {
        let nth = if self.rng.chance(300) { 1 + self.rng.below(6) } else { 0 };
        self.bench.faulty.layer().fail_nth(nth);
        match self.rng.below(100) {
            0..20 => self.create(nth),
            20..25 => self.import(nth),
            25..40 if !self.loose.is_empty() => {
                let (at, chunk) = self.loose.swap_remove(self.rng.index(self.loose.len()));
                let calls = self.releases(&[at]);
                drop(chunk);
                self.after_drop(&[at], &calls, nth);
            }
            40..45 => {
                let len = Bytes::mib(2 * (1 + self.rng.below(4)));
                let reservation = Reservation::new(&self.bench.device, len);
                let reservation = self.check_whole(reservation, nth, 1);
                self.reservations.extend(reservation);
            }
            45..50 if !self.reservations.is_empty() => {
                let gone = self.reservations.swap_remove(self.rng.index(self.reservations.len()));
                let calls = [Call::Unreserve(gone.span().len())];
                drop(gone);
                self.after_drop(&[], &calls, nth);
            }
            50..70 => self.stitch(nth),
            70..85 if !self.mappings.is_empty() => self.take(nth),
            85.. if !self.mappings.is_empty() => self.unstitch(nth),
            _ => {}
        }
    }

    fn create(&mut self, nth: u64) {
        let len = Bytes::mib(2 << self.rng.below(2));
        let chunk = Chunk::create(&self.bench.device, ChunkId(self.owned.len() as u64), len);
        if nth != 1 && self.used() + len > TOTAL {
            assert_eq!(chunk.unwrap_err().kind(), ErrorKind::Exhausted);
            return;
        }
        if let Some(chunk) = self.check_whole(chunk, nth, 1) {
            self.own(self.owned.len(), chunk);
        }
    }

    /// A second handle of memory that there is already.
    fn import(&mut self, nth: u64) {
        if self.loose.is_empty() {
            return;
        }
        let (at, chunk) = &self.loose[self.rng.index(self.loose.len())];
        let (memory, len) = (self.owned[*at].memory, chunk.len());
        let import = |fd: OwnedFd| Chunk::import(&self.bench.device, ChunkId(self.owned.len() as u64), fd, len);
        let imported = chunk.export().and_then(import);
        if let Some(imported) = self.check_whole(imported, nth, 2) {
            self.own(memory, imported);
        }
    }

    fn stitch(&mut self, nth: u64) {
        if self.loose.is_empty() {
            return;
        }
        let count = 1 + self.rng.index(4);
        let picked: Vec<_> = (0..count).map(|_| self.rng.index(self.loose.len())).collect();
        let chunks: Vec<_> = picked.iter().map(|at| Arc::clone(&self.loose[*at].1)).collect();
        let slots: Vec<_> = picked.iter().map(|at| self.loose[*at].0).collect();
        let mapping = Mapping::stitch(&chunks);
        // Reserve, each map, one set-access.
        let Some(mapping) = self.check_whole(mapping, nth, count as u64 + 2) else { return };
        for at in &slots {
            self.owned[*at].refs += 1;
        }
        let spans = spans_of(&mapping);
        self.mappings.push((slots.into_iter().map(Some).collect(), spans, mapping));
    }

    fn take(&mut self, nth: u64) {
        let at = self.rng.index(self.mappings.len());
        let (slots, spans, mapping) = &mut self.mappings[at];
        let first = self.rng.index(slots.len());
        let end = first + 1 + self.rng.index(slots.len() - first);
        let taken = mapping.take(over(&spans[first..end]));
        if slots[first..end].contains(&None) {
            // Over a hole nothing is unmapped, whoever says so first.
            taken.unwrap_err();
            return;
        }
        let gone: Vec<_> = slots[first..end].iter().flatten().copied().collect();
        // Waiting for the device, unmap.
        if let Some(taken) = self.check_whole(taken, nth, 2) {
            assert_eq!(taken.len(), gone.len());
            self.loose.extend(gone.into_iter().zip(taken));
            self.mappings[at].0[first..end].fill(None);
        }
    }

    fn unstitch(&mut self, nth: u64) {
        let (slots, spans, mapping) = self.mappings.swap_remove(self.rng.index(self.mappings.len()));
        let runs = slots.split(Option::is_none).filter(|run| !run.is_empty());
        // Twice: a run of which the device cannot be waited for stays as one that cannot be unmapped.
        let calls = runs.map(|run| Call::Unmap(run.iter().flatten().copied().collect()));
        let mut calls: Vec<_> = calls.flat_map(|call| [call.clone(), call]).collect();
        calls.push(Call::Unreserve(mapping.span().len()));
        // A run that stays mapped keeps its chunks, so they are not among those that are let go of.
        let kept: &[usize] = match calls.get(nth.wrapping_sub(1) as usize) {
            Some(Call::Unmap(run)) => run,
            _ => &[],
        };
        if !kept.is_empty() {
            self.stuck_slots.extend(spans);
        }
        let mut kept = kept.to_vec();
        let mut dropped: Vec<_> = slots.iter().flatten().copied().collect();
        dropped.retain(|at| kept.iter().position(|kept| kept == at).map(|found| kept.swap_remove(found)).is_none());
        calls.extend(self.releases(&dropped));
        drop(mapping);
        let all: Vec<_> = slots.into_iter().flatten().collect();
        self.after_drop(&all, &calls, nth);
    }

    /// All that is left is what was quarantined, and the driver has it still: there it can be undone, which keeps this process small.
    fn finish(mut self) {
        self.bench.faulty.layer().fail_nth(0);
        self.mappings.clear();
        self.loose.clear();
        let driver = self.bench.device.driver();
        for slot in self.stuck_slots {
            // Some of them were in another run, which was unmapped.
            let _ = driver.unmap(slot);
        }
        for handle in 0..4 * EPISODE {
            // Most of them were released.
            let _ = driver.release(Handle(handle));
        }
        let ((chunks, mappings, _), used, quarantine) = self.bench.state();
        assert_eq!((chunks, mappings, used), (0, 0, Bytes::ZERO));
        assert_eq!(quarantine, self.quarantine);
    }

    fn check(&self) {
        self.bench.faulty.layer().fail_nth(0);
        let reservations = self.mappings.len() + self.reservations.len() + self.stuck_reservations;
        let counts = (self.alive().len(), self.mapped().count(), reservations);
        assert_eq!(self.bench.state(), (counts, self.used(), self.quarantine));
        for (slots, spans, mapping) in &self.mappings {
            let shown: Vec<_> = spans.iter().map(|span| mapping.chunk(span.start()).map(|chunk| chunk.id())).collect();
            let known: Vec<_> = slots.iter().map(|slot| slot.map(|at| ChunkId(at as u64))).collect();
            assert_eq!(shown, known);
        }
    }
}

#[test]
fn what_is_left_after_any_failure_is_what_the_lists_foretell() {
    let _alone = alone();
    for seed in crate::times(SEEDS) {
        let at = At::new("memory", seed);
        let mut failures = 0;
        for episode in 0..STEPS / EPISODE {
            let mut world = World::new(Rng::new(seed * 1_000_003 + episode), Bench::sim());
            for step in 0..EPISODE {
                at.step.set(episode * EPISODE + step);
                world.step();
                world.check();
            }
            failures += world.failures;
            world.finish();
        }
        assert!(failures > STEPS / 20, "only {failures} calls failed");
    }
}
