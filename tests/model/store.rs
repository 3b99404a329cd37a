//! The store against a list of chunks, over a driver that fails now and then and one that runs out early, host and sim: every answer is foretold, a
//! failure changes nothing, bytes are those of what somebody still has, and so is the number of open descriptors of every chunk.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::layers::faulty::{Faults, Faulty};
use stitchd::driver::layers::limited::{Limiter, Limits};
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::driver::{Cause, Driver};
use stitchd::error::ErrorKind;
use stitchd::ids::{ChunkId, DeviceId};
use stitchd::memory::{Chunk, Device, Quarantine};
use stitchd::rng::Rng;
use stitchd::store::{Store, StoreError};
use stitchd::units::Bytes;

use crate::{At, alone};

const SEEDS: [u64; 4] = [1, 2, 3, 4];
const STEPS: u64 = 100_000;
/// Steps after which everything is let go of and begins anew.
const EPISODE: u64 = 1_000;
/// Steps between two counts of all descriptors.
const COUNT_EVERY: u64 = 20;

const DEVICES: [Bytes; 2] = [Bytes::mib(24), Bytes::mib(12)];
const LIMITS: Limits = Limits { created: Bytes::mib(30), handles: 9, exported: 5, mappings: u64::MAX };

/// How an operation ends, as far as the reference says it.
#[derive(Clone, PartialEq, Debug)]
enum Answer {
    Fine,
    Store(StoreError),
    /// The driver, for this kind of reason; and whether the ledger is to take it for a lack of memory.
    Driver {
        kind: ErrorKind,
        is_injected: bool,
        is_exhaustion: bool,
    },
}

const EXHAUSTED: Answer = Answer::Driver { kind: ErrorKind::Exhausted, is_injected: false, is_exhaustion: true };
const INVALID: Answer = Answer::Driver { kind: ErrorKind::Invalid, is_injected: false, is_exhaustion: false };
const INJECTED: Answer = Answer::Driver { kind: ErrorKind::Broken, is_injected: true, is_exhaustion: false };

fn answer<T>(outcome: &Result<T, StoreError>) -> Answer {
    match outcome {
        Ok(_) => Answer::Fine,
        Err(error @ StoreError::Memory(memory)) => Answer::Driver {
            kind: error.kind(),
            is_injected: matches!(memory.cause(), Some(Cause::Injected(_))),
            is_exhaustion: Store::is_exhaustion(error),
        },
        Err(error) => Answer::Store(error.clone()),
    }
}

/// A chunk that was created, for ever.
#[derive(Debug)]
struct Piece {
    id: ChunkId,
    device: usize,
    len: Bytes,
    is_stored: bool,
    /// The driver was asked to export it.
    is_exported: bool,
    /// The driver did not take it back, and the store will ask again: in this order.
    kept: Option<u64>,
    /// The driver did not take it back, and nobody can ask again.
    is_lost: bool,
    /// Taken out of the store, to be used here.
    in_use: Vec<Arc<Chunk>>,
    /// Descriptors that somebody was given.
    fds: Vec<OwnedFd>,
    inode: Option<(u64, u64)>,
}

impl Piece {
    fn has_handle(&self) -> bool {
        self.is_stored || self.kept.is_some() || self.is_lost || !self.in_use.is_empty()
    }

    fn is_alive(&self) -> bool {
        self.has_handle() || !self.fds.is_empty()
    }

    /// Those of whoever was given one, the one that the store keeps, and the driver's own.
    fn open_fds(&self) -> usize {
        self.fds.len() + usize::from(self.is_stored && self.is_exported) + usize::from(self.is_alive())
    }
}

fn inode_of(fd: impl AsFd) -> (u64, u64) {
    let stat = rustix::fs::fstat(fd).unwrap();
    (stat.st_dev, stat.st_ino)
}

/// The inodes behind all descriptors of this process.
fn open_inodes() -> Vec<(u64, u64)> {
    let inode = |entry: std::io::Result<std::fs::DirEntry>| {
        let stat = rustix::fs::stat(entry.ok()?.path()).ok()?;
        Some((stat.st_dev, stat.st_ino))
    };
    std::fs::read_dir("/proc/self/fd").unwrap().filter_map(inode).collect()
}

struct World {
    rng: Rng,
    faulty: Arc<Faulty>,
    devices: Vec<Arc<Device>>,
    store: Store,
    pieces: Vec<Piece>,
    /// Counts releases that failed.
    kept: u64,
    quarantine: [Quarantine; 2],
}

impl World {
    fn new(driver: Arc<dyn Driver>, rng: Rng) -> World {
        let faulty = Faults::around(Limiter::around(driver, LIMITS));
        let open = |ordinal| Device::open(Arc::clone(&faulty) as Arc<dyn Driver>, DeviceId(ordinal)).unwrap();
        let devices: Vec<_> = (0..2).map(open).collect();
        let store = Store::new(devices.clone());
        World { rng, faulty, devices, store, pieces: Vec::new(), kept: 0, quarantine: Default::default() }
    }

    fn stored(&self, id: ChunkId) -> Option<usize> {
        self.pieces.iter().position(|piece| piece.id == id && piece.is_stored)
    }

    fn used(&self, device: usize) -> Bytes {
        self.pieces.iter().filter(|piece| piece.device == device && piece.is_alive()).map(|piece| piece.len).sum()
    }

    fn with_handle(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().filter(|piece| piece.has_handle())
    }

    fn some_id(&mut self) -> ChunkId {
        ChunkId(self.rng.below(14))
    }

    fn some_piece(&mut self, fits: impl Fn(&Piece) -> bool) -> Option<usize> {
        let found: Vec<_> = (0..self.pieces.len()).filter(|at| fits(&self.pieces[*at])).collect();
        (!found.is_empty()).then(|| found[self.rng.index(found.len())])
    }

    fn step(&mut self) {
        let fails = self.rng.chance(100);
        self.faulty.layer().fail_nth(u64::from(fails));
        match self.rng.below(100) {
            0..35 => self.create(fails),
            35..55 => self.destroy(fails),
            55..75 => self.descriptor(fails),
            75..87 => {
                if let Some(at) = self.some_piece(|piece| !piece.fds.is_empty()) {
                    let fds = &mut self.pieces[at].fds;
                    fds.swap_remove(self.rng.index(fds.len()));
                }
            }
            87..92 => {
                let id = self.some_id();
                let chunk = self.store.chunk(id);
                let Some(at) = self.stored(id) else {
                    assert_eq!(answer(&chunk), Answer::Store(StoreError::NoChunk(id)));
                    return;
                };
                self.pieces[at].in_use.push(chunk.unwrap());
            }
            92..96 => self.done_with(fails),
            96..98 => self.retry(fails),
            _ => {
                let error = self.store.memory(DeviceId(7)).unwrap_err();
                assert_eq!(error, StoreError::NoDevice(DeviceId(7)));
            }
        }
    }

    fn create(&mut self, fails: bool) {
        let (id, mut device) = (self.some_id(), DeviceId(self.rng.below(2) as u32));
        if self.rng.chance(10) {
            device = DeviceId(2);
        }
        let len = if self.rng.chance(20) { Bytes::mib(3) } else { Bytes::mib(2 << self.rng.below(3)) };
        let created: Bytes = self.with_handle().map(|piece| piece.len).sum();
        let foretold = if self.stored(id).is_some() {
            Answer::Store(StoreError::Exists(id))
        } else if device == DeviceId(2) {
            Answer::Store(StoreError::NoDevice(device))
        } else if fails {
            INJECTED
        } else if self.with_handle().count() as u64 >= LIMITS.handles || created + len > LIMITS.created {
            EXHAUSTED
        } else if len == Bytes::mib(3) {
            INVALID
        } else if self.used(device.0 as usize) + len > DEVICES[device.0 as usize] {
            EXHAUSTED
        } else {
            Answer::Fine
        };
        assert_eq!(answer(&self.store.create(id, device, len)), foretold, "create {id} of {len} on {device}");
        if foretold == Answer::Fine {
            self.pieces.push(Piece {
                id,
                device: device.0 as usize,
                len,
                is_stored: true,
                is_exported: false,
                kept: None,
                is_lost: false,
                in_use: Vec::new(),
                fds: Vec::new(),
                inode: None,
            });
        }
    }

    fn destroy(&mut self, fails: bool) {
        let id = self.some_id();
        let found = self.stored(id);
        let foretold = match found {
            None => Answer::Store(StoreError::NoChunk(id)),
            Some(at) if !self.pieces[at].in_use.is_empty() => Answer::Store(StoreError::InUse(id)),
            Some(_) if fails => INJECTED,
            Some(_) => Answer::Fine,
        };
        assert_eq!(answer(&self.store.destroy(id)), foretold, "destroy {id}");
        if let Some(at) = found {
            // Where somebody in this process still uses it, it stays.
            self.pieces[at].is_stored = foretold == Answer::Store(StoreError::InUse(id));
            if foretold == INJECTED {
                self.pieces[at].kept = Some(self.next_kept());
                self.store.settle(id);
            }
        }
    }

    fn next_kept(&mut self) -> u64 {
        self.kept += 1;
        self.kept
    }

    /// The driver is asked again, and fails for the first if it fails at all.
    fn retry(&mut self, fails: bool) {
        let device = self.rng.below(2) as usize;
        let mut kept: Vec<usize> = (0..self.pieces.len()).collect();
        kept.retain(|at| self.pieces[*at].kept.is_some() && self.pieces[*at].device == device);
        kept.sort_unstable_by_key(|at| self.pieces[*at].kept);
        let mut gone = Vec::new();
        for (nth, at) in kept.into_iter().enumerate() {
            if fails && nth == 0 {
                self.pieces[at].kept = Some(self.next_kept());
            } else {
                self.pieces[at].kept = None;
                gone.push(self.pieces[at].id);
            }
        }
        let mut found = self.store.destroy_kept(DeviceId(device as u32));
        gone.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, gone, "chunks that the driver takes back after all");
    }

    fn lose(&mut self, at: usize) {
        let piece = &mut self.pieces[at];
        piece.is_lost = true;
        self.quarantine[piece.device].count += 1;
        self.quarantine[piece.device].bytes += piece.len;
    }

    fn descriptor(&mut self, fails: bool) {
        let id = self.some_id();
        let exported = self.with_handle().filter(|piece| piece.is_exported).count() as u64;
        let found = self.stored(id);
        let foretold = match found {
            None => Answer::Store(StoreError::NoChunk(id)),
            Some(at) if self.pieces[at].is_exported => Answer::Fine,
            Some(_) if fails => INJECTED,
            Some(_) if exported >= LIMITS.exported => EXHAUSTED,
            Some(_) => Answer::Fine,
        };
        let fd = self.store.descriptor(id);
        assert_eq!(answer(&fd), foretold, "descriptor of {id}");
        if let (Some(at), Ok(fd)) = (found, fd) {
            let piece = &mut self.pieces[at];
            piece.is_exported = true;
            let inode = inode_of(&fd);
            assert_eq!(*piece.inode.get_or_insert(inode), inode, "{id} was exported twice");
            piece.fds.push(fd.try_clone().unwrap());
        }
    }

    /// Somebody here is done with a chunk; if it is gone from the store and he was the last, it goes back to the driver.
    fn done_with(&mut self, fails: bool) {
        let Some(at) = self.some_piece(|piece| !piece.in_use.is_empty()) else { return };
        let piece = &mut self.pieces[at];
        piece.in_use.pop();
        if fails && piece.in_use.is_empty() && !piece.is_stored {
            self.lose(at);
        }
    }

    fn check(&self) {
        self.faulty.layer().fail_nth(0);
        let stored = self.pieces.iter().filter(|piece| piece.is_stored);
        let exported = stored.clone().filter(|piece| piece.is_exported).count() as u64;
        assert_eq!(self.store.counts(), (stored.count() as u64, exported));
        for (device, total) in DEVICES.into_iter().enumerate() {
            let memory = self.store.memory(DeviceId(device as u32)).unwrap();
            assert_eq!((memory.total, total - memory.free), (total, self.used(device)), "device {device}");
            assert_eq!(self.devices[device].quarantine(), self.quarantine[device]);
        }
    }

    fn check_descriptors(&self) {
        let open = open_inodes();
        for piece in &self.pieces {
            let Some(inode) = piece.inode else { continue };
            let count = open.iter().filter(|found| **found == inode).count();
            assert_eq!(count, piece.open_fds(), "descriptors of {piece:?}");
        }
    }

    fn finish(self) {
        let World { store, devices, mut pieces, .. } = self;
        for piece in &mut pieces {
            piece.in_use.clear();
            piece.fds.clear();
        }
        drop(store);
        for (device, total) in DEVICES.into_iter().enumerate() {
            let lost = pieces.iter().filter(|piece| piece.device == device && piece.is_lost);
            let free = devices[device].driver().memory(DeviceId(device as u32)).unwrap().free;
            assert_eq!(total - free, lost.map(|piece| piece.len).sum());
        }
    }
}

fn run(what: &'static str, driver: fn() -> Arc<dyn Driver>) {
    let _alone = alone();
    for seed in crate::times(SEEDS) {
        let at = At::new(what, seed);
        for episode in 0..STEPS / EPISODE {
            let mut world = World::new(driver(), Rng::new(seed * 1_000_003 + episode));
            for step in 0..EPISODE {
                at.step.set(episode * EPISODE + step);
                world.step();
                world.check();
                if step % COUNT_EVERY == 0 {
                    world.check_descriptors();
                }
            }
            world.finish();
        }
    }
}

#[test]
fn bytes_and_descriptors_are_those_of_the_chunks_over_sim() {
    run("store over sim", || Arc::new(SimDriver::new(SimOptions::with_devices(&DEVICES))));
}

#[test]
fn bytes_and_descriptors_are_those_of_the_chunks_over_host() {
    run("store over host", || Arc::new(HostDriver::new(HostOptions::with_devices(&DEVICES))));
}
