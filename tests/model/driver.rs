//! The host and the sim driver, and the drivers for GPUs on the stand-in, against lists of chunks, handles, reservations and mappings, on the same list of operations: the reference
//! foretells every verdict, all drivers give the same ones, bytes in use are the reference's, and what is read is what was written.
//!
//! Not for: streams that stall (the conformance suite has them). Addresses are the drivers' own, so the reference is asked once for each.

use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use stitchd::driver::gpu::{GpuDriver, GpuKind};
use stitchd::driver::host::{HostDriver, HostOptions};
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::driver::{Access, Cause, Driver, DriverError, EventId, Handle};
use stitchd::ids::{DeviceId, StreamId};
use stitchd::rng::Rng;
use stitchd::units::{AddressSpan, Bytes, DeviceAddress, Span};

use crate::standin::Machine;
use crate::{At, alone};

const SEEDS: [u64; 4] = [1, 2, 3, 4];
const STEPS: u64 = 125_000;
const DEVICES: [Bytes; 2] = [Bytes::mib(24), Bytes::mib(10)];

const UNIT: u64 = 2 << 20;
const NOWHERE: DeviceAddress = DeviceAddress::new(16 * UNIT);

/// What is asked of a driver; things go by their place in the reference's lists, which never shrink.
#[derive(Clone, Debug)]
enum Operation {
    Create { device: u32, len: u64 },
    Release { handle: usize },
    Export { handle: usize },
    CloseFd { fd: usize },
    Import { device: u32, fd: usize, len: u64 },
    ImportNonsense { device: u32 },
    Reserve { device: u32, len: u64, alignment: u64 },
    Unreserve { reservation: usize, offset: u64, len: u64 },
    Map { reservation: usize, offset: u64, handle: usize },
    Unmap { reservation: usize, offset: u64, len: u64 },
    SetAccess { reservation: usize, offset: u64, len: u64, device: u32, access: Access },
    Write { reservation: usize, offset: u64, len: u64, value: u8 },
    Read { reservation: usize, offset: u64, len: u64 },
    Fill { reservation: usize, offset: u64, len: u64, value: u8, device: u32 },
    CreateStream { device: u32 },
    DestroyStream { stream: usize },
    Record { device: u32, stream: usize },
    Query { event: usize },
    Wait { stream: usize, event: usize },
    DestroyEvent { event: usize },
}

#[derive(Clone, PartialEq, Debug)]
enum Verdict {
    Fine,
    Bytes(Vec<u8>),
    Refused(Refused),
}

/// A cause without the addresses and handles in it, which differ from driver to driver.
#[derive(Clone, PartialEq, Debug)]
enum Refused {
    Numbers(Cause),
    Kind(Discriminant<Cause>),
}

fn verdict(outcome: Result<(), DriverError>) -> Verdict {
    match outcome.map_err(|error| error.cause) {
        Ok(()) => Verdict::Fine,
        Err(cause @ (Cause::Exhausted { .. } | Cause::NoDevice { .. } | Cause::TooMany { .. })) => {
            Verdict::Refused(Refused::Numbers(cause))
        }
        Err(cause) => Verdict::Refused(Refused::Kind(discriminant(&cause))),
    }
}

// === A driver with what it gave

struct Subject {
    driver: Arc<dyn Driver>,
    /// By the reference's places; `None` where the reference foretold a refusal, or the thing is gone.
    handles: Vec<Handle>,
    fds: Vec<Option<OwnedFd>>,
    bases: Vec<DeviceAddress>,
    streams: Vec<StreamId>,
    events: Vec<EventId>,
    nonsense: OwnedFd,
}

impl Subject {
    fn new(driver: Arc<dyn Driver>) -> Subject {
        let nonsense = std::fs::File::open("/dev/null").unwrap().into();
        Subject {
            driver,
            handles: Vec::new(),
            fds: Vec::new(),
            bases: Vec::new(),
            streams: vec![StreamId::DEFAULT],
            events: Vec::new(),
            nonsense,
        }
    }

    fn at(&self, reservation: usize, offset: u64) -> DeviceAddress {
        DeviceAddress::new(self.bases[reservation].get() + offset)
    }

    fn span(&self, reservation: usize, offset: u64, len: u64) -> AddressSpan {
        Span::new(self.at(reservation, offset), Bytes::new(len)).unwrap()
    }

    fn take(&mut self, operation: &Operation) -> Verdict {
        let driver = Arc::clone(&self.driver);
        let outcome = match *operation {
            Operation::Create { device, len } => {
                driver.create(DeviceId(device), Bytes::new(len)).map(|handle| self.handles.push(handle))
            }
            Operation::Release { handle } => driver.release(self.handles[handle]),
            Operation::Export { handle } => driver.export(self.handles[handle]).map(|fd| self.fds.push(Some(fd))),
            Operation::CloseFd { fd } => {
                self.fds[fd] = None;
                Ok(())
            }
            Operation::Import { device, fd, len } => {
                let fd = self.fds[fd].as_ref().unwrap().try_clone().unwrap();
                driver.import(DeviceId(device), fd, Bytes::new(len)).map(|handle| self.handles.push(handle))
            }
            Operation::ImportNonsense { device } => {
                driver.import(DeviceId(device), self.nonsense.try_clone().unwrap(), Bytes::new(UNIT)).map(|_| ())
            }
            Operation::Reserve { device, len, alignment } => {
                driver.reserve(DeviceId(device), Bytes::new(len), Bytes::new(alignment)).map(|base| {
                    assert!(base.get().is_multiple_of(alignment), "{base} is not aligned to {alignment}");
                    self.bases.push(base);
                })
            }
            Operation::Unreserve { reservation, offset, len } => {
                // What was given back may be somebody else's next: from now on its place is one that nobody gets.
                let span = self.span(reservation, offset, len);
                driver.unreserve(span).map(|()| self.bases[reservation] = NOWHERE)
            }
            Operation::Map { reservation, offset, handle } => {
                driver.map(self.at(reservation, offset), self.handles[handle])
            }
            Operation::Unmap { reservation, offset, len } => driver.unmap(self.span(reservation, offset, len)),
            Operation::SetAccess { reservation, offset, len, device, access } => {
                driver.set_access(self.span(reservation, offset, len), DeviceId(device), access)
            }
            Operation::Write { reservation, offset, len, value } => {
                driver.write(self.at(reservation, offset), &vec![value; len as usize])
            }
            Operation::Read { reservation, offset, len } => {
                let mut bytes = vec![0; len as usize];
                match driver.read(self.at(reservation, offset), &mut bytes) {
                    Ok(()) => return Verdict::Bytes(bytes),
                    Err(error) => Err(error),
                }
            }
            Operation::Fill { reservation, offset, len, value, device } => {
                let span = self.span(reservation, offset, len);
                driver
                    .fill(DeviceId(device), StreamId::DEFAULT, span, value)
                    .and_then(|()| driver.synchronize(DeviceId(device)))
            }
            Operation::CreateStream { device } => {
                driver.create_stream(DeviceId(device)).map(|stream| self.streams.push(stream))
            }
            Operation::DestroyStream { stream } => driver.destroy_stream(self.streams[stream]),
            Operation::Record { device, stream } => {
                driver.record_event(DeviceId(device), self.streams[stream]).map(|event| self.events.push(event))
            }
            Operation::Query { event } => driver
                .query_event(self.events[event])
                .map(|is_complete| assert!(is_complete, "nothing stalls, and an event is not complete")),
            Operation::Wait { stream, event } => {
                driver.wait_event(DeviceId(0), self.streams[stream], self.events[event])
            }
            Operation::DestroyEvent { event } => driver.destroy_event(self.events[event]),
        };
        verdict(outcome)
    }
}

// === The reference

#[derive(Debug)]
struct Chunk {
    device: u32,
    len: u64,
    /// What was written, by offset; zero elsewhere.
    contents: BTreeMap<u64, u8>,
}

#[derive(Debug)]
struct Mapping {
    reservation: usize,
    offset: u64,
    chunk: usize,
    access: Access,
}

#[derive(Debug, Default)]
struct Reference {
    has_contents: bool,
    chunks: Vec<Chunk>,
    /// The chunk of every handle, while it lives.
    handles: Vec<Option<usize>>,
    fds: Vec<Option<usize>>,
    /// The length of every reservation, while it lives.
    reservations: Vec<Option<u64>>,
    lens: Vec<u64>,
    mappings: Vec<Mapping>,
    streams: Vec<bool>,
    events: Vec<bool>,
}

impl Reference {
    fn new(has_contents: bool) -> Reference {
        Reference { has_contents, streams: vec![false], ..Reference::default() }
    }

    fn is_alive(&self, chunk: usize) -> bool {
        self.handles.contains(&Some(chunk))
            || self.fds.contains(&Some(chunk))
            || self.mappings.iter().any(|mapping| mapping.chunk == chunk)
    }

    fn used(&self, device: u32) -> u64 {
        let is_there = |at: &usize| self.chunks[*at].device == device && self.is_alive(*at);
        (0..self.chunks.len()).filter(is_there).map(|at| self.chunks[at].len).sum()
    }

    fn end_of(&self, mapping: &Mapping) -> u64 {
        mapping.offset + self.chunks[mapping.chunk].len
    }

    /// Mappings in part of a reservation, from the first to the last.
    fn mappings_in(&self, reservation: usize, offset: u64, end: u64) -> Vec<usize> {
        let touches = |at: &usize| {
            let mapping = &self.mappings[*at];
            mapping.reservation == reservation && mapping.offset < end && offset < self.end_of(mapping)
        };
        let mut found: Vec<_> = (0..self.mappings.len()).filter(touches).collect();
        found.sort_by_key(|at| self.mappings[*at].offset);
        found
    }

    /// The mappings that cover part of a reservation without a hole; they may stick out at both ends.
    fn cover(&self, reservation: usize, offset: u64, end: u64) -> Option<Vec<usize>> {
        let found = self.mappings_in(reservation, offset, end);
        let mut at = offset;
        for mapping in &found {
            if self.mappings[*mapping].offset > at {
                return None;
            }
            at = self.end_of(&self.mappings[*mapping]);
        }
        (at >= end).then_some(found)
    }

    fn whole_cover(&self, reservation: usize, offset: u64, end: u64) -> Result<Vec<usize>, Cause> {
        let found = self.cover(reservation, offset, end).filter(|found| !found.is_empty());
        let is_whole = |found: &Vec<usize>| {
            self.mappings[found[0]].offset == offset && self.end_of(&self.mappings[found[found.len() - 1]]) == end
        };
        found.filter(is_whole).ok_or(Cause::NotMapped(nowhere()))
    }

    fn usable(&self, reservation: usize, offset: u64, end: u64, writes: bool) -> Result<(), Cause> {
        // Bytes are looked at from the first to the last, so a forbidden one before a hole is what is said.
        let mut at = offset;
        while at < end {
            let Some(found) = self.mappings_in(reservation, at, at + 1).first().copied() else {
                return Err(Cause::NotMapped(nowhere()));
            };
            let mapping = &self.mappings[found];
            if mapping.access == Access::None || (writes && mapping.access == Access::Read) {
                return Err(Cause::NoAccess(nowhere()));
            }
            at = self.end_of(mapping);
        }
        Ok(())
    }

    fn place(&self, reservation: usize, at: u64) -> (usize, u64) {
        let found = self.mappings_in(reservation, at, at + 1)[0];
        (self.mappings[found].chunk, at - self.mappings[found].offset)
    }

    fn take(&mut self, operation: &Operation) -> Verdict {
        match self.outcome(operation) {
            Ok(Some(bytes)) => Verdict::Bytes(bytes),
            Ok(None) => Verdict::Fine,
            Err(cause) => verdict(Err(DriverError::new(stitchd::driver::Call::Query, cause))),
        }
    }

    fn outcome(&mut self, operation: &Operation) -> Result<Option<Vec<u8>>, Cause> {
        match *operation {
            Operation::Create { device, len } => {
                no_device(device)?;
                misaligned(len == 0 || len % UNIT != 0)?;
                let total = DEVICES[device as usize];
                let available = Bytes::new(total.get() - self.used(device));
                let requested = Bytes::new(len);
                if requested > available {
                    return Err(Cause::Exhausted { device: DeviceId(device), requested, available, total });
                }
                self.handles.push(Some(self.chunks.len()));
                self.chunks.push(Chunk { device, len, contents: BTreeMap::new() });
            }
            Operation::Release { handle } => {
                self.handles[handle].take().ok_or(Cause::UnknownHandle(Handle(0)))?;
            }
            Operation::Export { handle } => {
                let chunk = self.handles[handle].ok_or(Cause::UnknownHandle(Handle(0)))?;
                self.fds.push(Some(chunk));
            }
            Operation::CloseFd { fd } => self.fds[fd] = None,
            Operation::Import { device, fd, len } => {
                no_device(device)?;
                misaligned(len == 0 || len % UNIT != 0)?;
                let chunk = self.fds[fd].unwrap();
                if self.chunks[chunk].len != len {
                    return Err(not_a_chunk());
                }
                self.handles.push(Some(chunk));
            }
            Operation::ImportNonsense { device } => {
                no_device(device)?;
                return Err(not_a_chunk());
            }
            Operation::Reserve { device, len, alignment } => {
                no_device(device)?;
                misaligned(len == 0 || len % UNIT != 0)?;
                misaligned(!alignment.is_power_of_two() || alignment < UNIT)?;
                self.reservations.push(Some(len));
                self.lens.push(len);
            }
            Operation::Unreserve { reservation, offset, len } => {
                if offset != 0 || self.reservations[reservation] != Some(len) {
                    return Err(Cause::NotAReservation(nowhere()));
                }
                if !self.mappings_in(reservation, 0, len).is_empty() {
                    return Err(Cause::AlreadyMapped(nowhere()));
                }
                self.reservations[reservation] = None;
            }
            Operation::Map { reservation, offset, handle } => {
                let chunk = self.handles[handle].ok_or(Cause::UnknownHandle(Handle(0)))?;
                misaligned(offset % UNIT != 0)?;
                let end = offset + self.chunks[chunk].len;
                if self.reservations[reservation].is_none_or(|len| end > len) {
                    return Err(Cause::NotReserved(nowhere()));
                }
                if !self.mappings_in(reservation, offset, end).is_empty() {
                    return Err(Cause::AlreadyMapped(nowhere()));
                }
                self.mappings.push(Mapping { reservation, offset, chunk, access: Access::None });
            }
            Operation::Unmap { reservation, offset, len } => {
                let mut gone = self.whole_cover(reservation, offset, offset + len)?;
                gone.sort();
                for at in gone.into_iter().rev() {
                    self.mappings.remove(at);
                }
            }
            Operation::SetAccess { reservation, offset, len, device, access } => {
                no_device(device)?;
                for at in self.whole_cover(reservation, offset, offset + len)? {
                    self.mappings[at].access = access;
                }
            }
            Operation::Write { .. } | Operation::Read { .. } | Operation::Fill { .. } if !self.has_contents => {
                return Err(Cause::Unsupported { driver: "" });
            }
            Operation::Write { reservation, offset, len, value } => {
                self.usable(reservation, offset, offset + len, true)?;
                self.set(reservation, offset, len, value);
            }
            Operation::Read { reservation, offset, len } => {
                self.usable(reservation, offset, offset + len, false)?;
                let byte = |at| {
                    let (chunk, place) = self.place(reservation, at);
                    self.chunks[chunk].contents.get(&place).copied().unwrap_or(0)
                };
                return Ok(Some((offset..offset + len).map(byte).collect()));
            }
            Operation::Fill { reservation, offset, len, value, device } => {
                no_device(device)?;
                self.usable(reservation, offset, offset + len, true)?;
                self.set(reservation, offset, len, value);
            }
            Operation::CreateStream { device } => {
                no_device(device)?;
                self.streams.push(true);
            }
            Operation::DestroyStream { stream } => {
                if !std::mem::take(&mut self.streams[stream]) {
                    return Err(Cause::UnknownStream(StreamId::DEFAULT));
                }
            }
            Operation::Record { device, .. } => {
                no_device(device)?;
                self.events.push(true);
            }
            Operation::Query { event } | Operation::Wait { event, .. } => {
                if !self.events[event] {
                    return Err(Cause::UnknownEvent(EventId(0)));
                }
            }
            Operation::DestroyEvent { event } => {
                if !std::mem::take(&mut self.events[event]) {
                    return Err(Cause::UnknownEvent(EventId(0)));
                }
            }
        }
        Ok(None)
    }

    fn set(&mut self, reservation: usize, offset: u64, len: u64, value: u8) {
        for at in offset..offset + len {
            let (chunk, place) = self.place(reservation, at);
            self.chunks[chunk].contents.insert(place, value);
        }
    }
}

fn nowhere() -> AddressSpan {
    Span::new(DeviceAddress::new(0), Bytes::ZERO).unwrap()
}

fn no_device(device: u32) -> Result<(), Cause> {
    if (device as usize) < DEVICES.len() {
        return Ok(());
    }
    Err(Cause::NoDevice { device: DeviceId(device), count: DEVICES.len() })
}

fn misaligned(is_misaligned: bool) -> Result<(), Cause> {
    if is_misaligned { Err(Cause::Misaligned { what: "", value: 0, unit: Bytes::ZERO }) } else { Ok(()) }
}

fn not_a_chunk() -> Cause {
    Cause::NotAChunk { expected: Bytes::ZERO, found: String::new() }
}

// === Random operations

struct Random {
    rng: Rng,
    /// Nothing that only whoever asks can vouch for: streams that live, imports of the right size for the right device.
    vouches: bool,
}

impl Random {
    fn device(&mut self) -> u32 {
        if self.rng.chance(10) { 2 } else { self.rng.below(2) as u32 }
    }

    fn len(&mut self) -> u64 {
        if self.rng.chance(20) {
            return [0, 1, UNIT / 2, UNIT + 4096][self.rng.index(4)];
        }
        UNIT * (1 + self.rng.below(3))
    }

    /// The place of something that is there; now and then of something that may be gone.
    fn pick<T>(&mut self, all: &[T], is_there: impl Fn(&T) -> bool) -> Option<usize> {
        let there: Vec<_> = (0..all.len()).filter(|at| is_there(&all[*at])).collect();
        if there.is_empty() || self.rng.chance(15) {
            return (!all.is_empty()).then(|| self.rng.index(all.len()));
        }
        Some(there[self.rng.index(there.len())])
    }

    /// A stream: any number, or the default stream and those that live.
    fn stream(&mut self, reference: &Reference) -> Option<usize> {
        let stream = self.pick(&reference.streams, |_| true)?;
        Some(if self.vouches && !reference.streams[stream] { 0 } else { stream })
    }

    fn reservation(&mut self, reference: &Reference) -> Option<usize> {
        self.pick(&reference.reservations, Option::is_some)
    }

    /// Part of a reservation: mostly mappings, whole, one or more in a row.
    fn part(&mut self, reference: &Reference) -> Option<(usize, u64, u64)> {
        let reservation = self.reservation(reference)?;
        let len = reference.lens[reservation];
        let mapped = reference.mappings_in(reservation, 0, len);
        if mapped.is_empty() || self.rng.chance(50) {
            let offset = self.rng.below(len / UNIT) * UNIT + if self.rng.chance(100) { 4096 } else { 0 };
            return Some((reservation, offset, self.len().min(len - offset)));
        }
        let first = self.rng.index(mapped.len());
        let last = (first + self.rng.index(3)).min(mapped.len() - 1);
        let offset = reference.mappings[mapped[first]].offset;
        let end = reference.end_of(&reference.mappings[mapped[last]]);
        let cut = if self.rng.chance(30) { UNIT / 2 } else { 0 };
        Some((reservation, offset, end - offset - cut))
    }

    /// A few bytes somewhere in a reservation, often over the border of two chunks.
    fn bytes(&mut self, reference: &Reference) -> Option<(usize, u64, u64)> {
        let (reservation, offset, len) = self.part(reference)?;
        let count = self.rng.below(24);
        let near = match self.rng.below(3) {
            0 => offset,
            1 => (offset + UNIT).saturating_sub(8),
            _ => (offset + len).saturating_sub(count),
        };
        Some((reservation, near.min(reference.lens[reservation] - count), count))
    }

    fn operation(&mut self, reference: &Reference) -> Option<Operation> {
        let alive = reference.handles.iter().flatten().count();
        let reservations = reference.reservations.iter().flatten().count();
        Some(match self.rng.below(100) {
            0..12 => Operation::Create { device: self.device(), len: self.len() },
            12..20 if alive > 4 => Operation::Release { handle: self.pick(&reference.handles, Option::is_some)? },
            20..24 => Operation::Export { handle: self.pick(&reference.handles, Option::is_some)? },
            24..29 => Operation::CloseFd { fd: self.pick(&reference.fds, Option::is_some)? },
            29..32 => {
                let fd = self.pick(&reference.fds, Option::is_some)?;
                let chunk = reference.fds[fd]?;
                let (device, len) = (reference.chunks[chunk].device, reference.chunks[chunk].len);
                let len = if self.rng.chance(100) && !self.vouches { self.len() } else { len };
                let device = if self.vouches { device } else { self.device() };
                Operation::Import { device, fd, len }
            }
            32 => Operation::ImportNonsense { device: self.device() },
            33..37 if reservations < 6 => {
                let alignment = if self.rng.chance(30) { self.len() } else { UNIT << self.rng.below(3) };
                let len = if self.rng.chance(30) { self.len() } else { UNIT * (1 + self.rng.below(8)) };
                Operation::Reserve { device: self.device(), len, alignment }
            }
            37..41 => {
                let reservation = self.reservation(reference)?;
                let len = reference.lens[reservation];
                let (offset, len) = match self.rng.below(10) {
                    0 => (UNIT, len),
                    1 => (0, len - UNIT),
                    _ => (0, len),
                };
                Operation::Unreserve { reservation, offset, len }
            }
            41..60 => {
                let reservation = self.reservation(reference)?;
                let odd = if self.rng.chance(20) { 4096 } else { 0 };
                let offset = self.rng.below(reference.lens[reservation] / UNIT) * UNIT + odd;
                Operation::Map { reservation, offset, handle: self.pick(&reference.handles, Option::is_some)? }
            }
            60..68 => {
                let (reservation, offset, len) = self.part(reference)?;
                Operation::Unmap { reservation, offset, len }
            }
            68..78 => {
                let (reservation, offset, len) = self.part(reference)?;
                let access = [Access::None, Access::Read, Access::ReadWrite, Access::ReadWrite][self.rng.index(4)];
                Operation::SetAccess { reservation, offset, len, device: self.device(), access }
            }
            78..85 => {
                let (reservation, offset, len) = self.bytes(reference)?;
                Operation::Write { reservation, offset, len, value: self.rng.below(256) as u8 }
            }
            85..91 => {
                let (reservation, offset, len) = self.bytes(reference)?;
                Operation::Read { reservation, offset, len }
            }
            91..93 => {
                let (reservation, offset, len) = self.bytes(reference)?;
                Operation::Fill { reservation, offset, len, value: self.rng.below(256) as u8, device: self.device() }
            }
            93 => Operation::CreateStream { device: self.device() },
            94 => Operation::DestroyStream { stream: self.pick(&reference.streams, |is_there| *is_there)? },
            95 => {
                let stream = self.stream(reference)?;
                Operation::Record { device: self.device(), stream }
            }
            96 => Operation::Query { event: self.pick(&reference.events, |is_there| *is_there)? },
            97 => {
                let stream = self.stream(reference)?;
                Operation::Wait { stream, event: self.pick(&reference.events, |is_there| *is_there)? }
            }
            98 => Operation::DestroyEvent { event: self.pick(&reference.events, |is_there| *is_there)? },
            _ => return None,
        })
    }
}

fn host(totals: &[Bytes]) -> Arc<HostDriver> {
    Arc::new(HostDriver::new(HostOptions::with_devices(totals)))
}

fn sim(totals: &[Bytes]) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(SimOptions::with_devices(totals)))
}

/// Both drivers and their references through one list of operations.
#[test]
fn host_and_sim_give_the_verdicts_that_the_rules_foretell() {
    /// Steps after which everything is given back and begins anew.
    const EPISODE: u64 = 1_000;
    let _alone = alone();
    for seed in crate::times(SEEDS) {
        let at = At::new("driver", seed);
        for episode in 0..STEPS / EPISODE {
            let (host, sim) = (host(&DEVICES), sim(&DEVICES));
            let mut pairs = [
                (Subject::new(host.clone()), Reference::new(true)),
                (Subject::new(sim.clone()), Reference::new(false)),
            ];
            let mut random = Random { rng: Rng::new(seed * 1_000_003 + episode), vouches: false };
            for step in 0..EPISODE {
                at.step.set(episode * EPISODE + step);
                let Some(operation) = random.operation(&pairs[0].1) else { continue };
                for (subject, reference) in &mut pairs {
                    let foretold = reference.take(&operation);
                    let given = subject.take(&operation);
                    assert_eq!(given, foretold, "{} on {operation:?}", subject.driver.name());
                    check_bytes(subject, reference);
                }
            }
            for (subject, reference) in pairs {
                give_everything_back(subject, &reference);
            }
            assert_eq!((host.counts(), sim.counts()), ((0, 0, 0), (0, 0, 0)));
        }
    }
}

/// The same for the drivers for GPUs, on pretended machines: two vendors, and one with everything that is known to be wrong with it.
#[test]
fn gpu_drivers_give_the_verdicts_that_the_rules_foretell_on_the_stand_in() {
    const STEPS: u64 = 3_000;
    let _alone = alone();
    let quirks = "version = 60443482\nquirks = unmap_run_breaks_free, access_run_fails, ignores_alignment, map_lies";
    for (seed, (kind, more)) in
        [(GpuKind::Cuda, ""), (GpuKind::Hip, ""), (GpuKind::Hip, quirks)].into_iter().enumerate()
    {
        let at = At::new("gpu driver", seed as u64);
        let machine = Machine::new(kind, &format!("devices = {}, {}\n{more}", DEVICES[0].get(), DEVICES[1].get()));
        let driver = Arc::new(GpuDriver::open_library(kind, machine.library()).unwrap());
        let (mut subject, mut reference) = (Subject::new(driver.clone()), Reference::new(true));
        let mut random = Random { rng: Rng::new(seed as u64), vouches: true };
        for step in 0..STEPS {
            at.step.set(step);
            let Some(operation) = random.operation(&reference) else { continue };
            let foretold = reference.take(&operation);
            assert_eq!(subject.take(&operation), foretold, "{kind:?} on {operation:?}");
            check_bytes(&subject, &reference);
        }
        give_everything_back(subject, &reference);
        assert_eq!((driver.counts(), machine.chunk_files()), ((0, 0, 0), 0));
    }
}

fn check_bytes(subject: &Subject, reference: &Reference) {
    for (device, total) in DEVICES.into_iter().enumerate() {
        let memory = subject.driver.memory(DeviceId(device as u32)).unwrap();
        let used = total - memory.free;
        assert_eq!(used.get(), reference.used(device as u32), "{} uses", subject.driver.name());
    }
}

fn give_everything_back(mut subject: Subject, reference: &Reference) {
    for mapping in &reference.mappings {
        let len = reference.chunks[mapping.chunk].len;
        subject.driver.unmap(subject.span(mapping.reservation, mapping.offset, len)).unwrap();
    }
    for (reservation, len) in reference.reservations.iter().enumerate() {
        if let Some(len) = len {
            subject.driver.unreserve(subject.span(reservation, 0, *len)).unwrap();
        }
    }
    for (handle, chunk) in reference.handles.iter().enumerate() {
        if chunk.is_some() {
            subject.driver.release(subject.handles[handle]).unwrap();
        }
    }
    subject.fds.clear();
    for (device, total) in DEVICES.into_iter().enumerate() {
        assert_eq!(subject.driver.memory(DeviceId(device as u32)).unwrap().free, total);
    }
}
