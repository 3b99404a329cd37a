//! From the record of a snapshot and the blocks at its end to the events of a trace.
//!
//! The order of the file is time: stamps have ties. Records of several devices are put together by their stamps. A block is known by its device and address
//! from its `alloc` to its `free_completed`; one that is freed or live without an `alloc` is older than the record and comes first, in phase `init`.
//!
//! `snapshot` entries cut nothing: a dump takes the record first and the blocks right behind it, so that blocks are as the whole record left them, and
//! such an entry tells of an earlier dump.
//!
//! Invariant: what is live at the end of the trace is what the file says is live, or a note says by how much they differ.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use super::error::{Place, SnapshotError, SnapshotFault};
use super::fields::{Action, BlockState, Entry, Fields, Ranges};
use super::reserved::Curves;
use crate::ids::StreamId;
use crate::trace::builder::Builder;
use crate::trace::import::Imported;
use crate::trace::{Context, Ending, Event, EventKind, Phase};
use crate::units::{Bytes, Tick};

/// What `fields` say happened.
pub(super) fn import(fields: Fields) -> Result<Imported, SnapshotError> {
    let mut history = History::new(&fields)?;
    for (device, index) in Order::of(&fields) {
        let Some(entry) = fields.records.get(device as usize).and_then(|record| record.get(index)) else { continue };
        history.entry(Place::Entry(device as usize, index), device, entry)?;
    }
    history.blocks()?;
    history.finish()
}

/// The entries of all devices in order of time, those of a device in order of the file.
struct Order<'f> {
    records: &'f [Vec<Entry>],
    /// Of each device that has more: when its next entry came, and which it is.
    next: BinaryHeap<Reverse<(i64, u32, usize)>>,
}

impl<'f> Order<'f> {
    fn of(fields: &'f Fields) -> Order<'f> {
        let mut order = Order { records: &fields.records, next: BinaryHeap::new() };
        for device in 0..fields.records.len() {
            order.push(i64::MIN, device as u32, 0);
        }
        order
    }

    fn push(&mut self, last: i64, device: u32, index: usize) {
        if let Some(entry) = self.records.get(device as usize).and_then(|record| record.get(index)) {
            self.next.push(Reverse((entry.time.unwrap_or(last).max(last), device, index)));
        }
    }
}

impl Iterator for Order<'_> {
    type Item = (u32, usize);

    fn next(&mut self) -> Option<(u32, usize)> {
        let Reverse((time, device, index)) = self.next.pop()?;
        self.push(time, device, index + 1);
        Some((device, index))
    }
}

/// A block from `alloc` to `free`.
#[derive(Clone, Copy)]
struct Record {
    device: u32,
    address: u64,
    bytes: Bytes,
    stream: StreamId,
    origin: Origin,
}

/// Where a block comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The record has its `alloc`.
    Recorded,
    /// It is older than the record.
    Older,
    /// It is older, and so is its `free`: only streams still used it.
    OlderFreed,
}

/// What is at an address now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Now {
    Live,
    Freed,
    Gone,
}

/// An event to be, before ids are known.
#[derive(Clone, Copy)]
struct Step {
    kind: EventKind,
    /// Index of the block; meaningless for a mark.
    record: u32,
    iteration: u32,
    phase: Phase,
}

/// What is to be said about an import.
#[derive(Default)]
pub(super) struct Findings {
    /// Blocks allocated again while they were live.
    pub(super) reused: u64,
    /// Blocks seen again after they were freed, without an `alloc`.
    pub(super) unseen: u64,
    /// Frees of what was freed.
    pub(super) strays: u64,
    /// Entries of private pools.
    pub(super) private_entries: u64,
    /// Blocks of private pools that are live at the end.
    pub(super) private_blocks: u64,
    /// Entries around allocations at a wished address.
    pub(super) padding: u64,
    /// Requests that were refused, each with what the device had free.
    pub(super) refused: Vec<(Bytes, Option<Bytes>)>,
    /// Blocks older than the record, and their bytes.
    pub(super) older: (u64, Bytes),
    /// How many of them the record frees.
    pub(super) older_freed: u64,
    /// By device, what is live at the end in the trace and in the file, where that is not the same.
    pub(super) differing: Vec<(u32, Bytes, Bytes)>,
}

struct History<'f> {
    fields: &'f Fields,
    private: Ranges,
    /// Without any such entry in the file, `free_requested` frees at once.
    has_completions: bool,
    records: Vec<Record>,
    places: HashMap<(u32, u64), (u32, Now)>,
    steps: Vec<Step>,
    streams: HashMap<i64, StreamId>,
    /// How many of the profiler's steps have begun.
    begun: usize,
    curves: Curves,
    findings: Findings,
}

impl<'f> History<'f> {
    fn new(fields: &'f Fields) -> Result<History<'f>, SnapshotError> {
        Ok(History {
            fields,
            private: Ranges::of(fields.segments.iter().filter(|segment| segment.is_private)),
            has_completions: fields.records.iter().flatten().any(|entry| entry.action == Action::FreeCompleted),
            records: Vec::new(),
            places: HashMap::new(),
            steps: Vec::new(),
            streams: HashMap::from([(0, StreamId::DEFAULT)]),
            begun: 0,
            curves: Curves::of(fields)?,
            findings: Findings::default(),
        })
    }

    fn entry(&mut self, place: Place, device: u32, entry: &Entry) -> Result<(), SnapshotError> {
        self.pass_time(entry);
        if entry.action == Action::Nothing {
            return Ok(());
        }
        if entry.is_padding {
            self.findings.padding += 1;
            return Ok(());
        }
        if entry.is_private.unwrap_or_else(|| self.private.hold(device, entry.address)) {
            self.findings.private_entries += 1;
            return Ok(());
        }
        match entry.action {
            Action::Alloc => self.alloc(device, entry),
            Action::FreeRequested => self.free_requested(device, entry),
            Action::FreeCompleted => self.free_completed(device, entry),
            Action::SegmentGrown | Action::SegmentShrunk => {
                let step = self.steps.len();
                return self.curves.change(device, step, entry).ok_or_else(|| place.fault(SnapshotFault::Bytes));
            }
            Action::OutOfMemory => self.refused(device, entry),
            Action::Nothing => {}
        }
        Ok(())
    }

    /// A request for which there was no memory. Whoever looks at such a job asks what it would have taken: it is in the trace as if it had been served, and given back at once.
    fn refused(&mut self, device: u32, entry: &Entry) {
        self.findings.refused.push((entry.bytes, entry.device_free));
        // There is nothing at an address.
        let here = self.places.remove(&(device, entry.address));
        let record = self.open_entry(device, entry, Origin::Recorded);
        self.places.remove(&(device, entry.address));
        self.places.extend(here.map(|here| ((device, entry.address), here)));
        self.step(EventKind::Alloc, record);
        self.end(record, Now::Live);
    }

    /// Steps of the profiler that have begun by now end the ones before them.
    fn pass_time(&mut self, entry: &Entry) {
        let Some(now) = entry.time else { return };
        while self.fields.steps.get(self.begun).is_some_and(|begin| *begin <= now) {
            if self.begun > 0 {
                self.step(EventKind::Mark, 0);
            }
            self.begun += 1;
        }
    }

    fn step(&mut self, kind: EventKind, record: u32) {
        let phase = if self.begun == 0 && !self.fields.steps.is_empty() { Phase::Init } else { Phase::Other };
        self.steps.push(Step { kind, record, iteration: self.begun.saturating_sub(1) as u32, phase });
    }

    /// A small number for a handle of the driver: they count up as they appear.
    fn stream(&mut self, handle: i64) -> StreamId {
        let next = StreamId(self.streams.len() as u64);
        *self.streams.entry(handle).or_insert(next)
    }

    fn at(&self, device: u32, address: u64) -> Option<(u32, Now)> {
        self.places.get(&(device, address)).copied()
    }

    /// A new block, and what is at its address from now on.
    fn open(&mut self, device: u32, address: u64, bytes: Bytes, stream: i64, origin: Origin) -> u32 {
        // More entries than that fill the memory of any machine first.
        let record =
            u32::try_from(self.records.len()).expect("fewer blocks than opcodes, which are counted in 32 bits");
        let stream = self.stream(stream);
        self.records.push(Record { device, address, bytes, stream, origin });
        self.places
            .insert((device, address), (record, if origin == Origin::OlderFreed { Now::Freed } else { Now::Live }));
        record
    }

    fn open_entry(&mut self, device: u32, entry: &Entry, origin: Origin) -> u32 {
        self.open(device, entry.address, entry.bytes, entry.stream, origin)
    }

    fn alloc(&mut self, device: u32, entry: &Entry) {
        self.curves.saw(device, entry.address);
        if let Some((old, now)) = self.at(device, entry.address)
            && now != Now::Gone
        {
            self.findings.reused += 1;
            self.end(old, now);
        }
        let record = self.open_entry(device, entry, Origin::Recorded);
        self.step(EventKind::Alloc, record);
    }

    fn end(&mut self, record: u32, now: Now) {
        if now == Now::Live {
            self.step(EventKind::Free, record);
        }
        if self.has_completions {
            self.step(EventKind::FreeCompleted, record);
        }
    }

    /// The block at an address that was freed before, which must have been allocated since.
    fn unseen(&mut self, device: u32, entry: &Entry) -> u32 {
        self.findings.unseen += 1;
        let record = self.open_entry(device, entry, Origin::Recorded);
        self.step(EventKind::Alloc, record);
        record
    }

    fn free_requested(&mut self, device: u32, entry: &Entry) {
        let record = match self.at(device, entry.address) {
            Some((record, Now::Live)) => record,
            Some((_, Now::Freed)) => return self.findings.strays += 1,
            Some((_, Now::Gone)) => self.unseen(device, entry),
            None => {
                self.findings.older_freed += 1;
                self.open_entry(device, entry, Origin::Older)
            }
        };
        self.step(EventKind::Free, record);
        let now = if self.has_completions { Now::Freed } else { Now::Gone };
        self.places.insert((device, entry.address), (record, now));
    }

    fn free_completed(&mut self, device: u32, entry: &Entry) {
        let (record, now) = match self.at(device, entry.address) {
            Some((_, Now::Gone)) => return self.findings.strays += 1,
            Some(found) => found,
            None => {
                self.findings.older_freed += 1;
                (self.open_entry(device, entry, Origin::OlderFreed), Now::Freed)
            }
        };
        self.end(record, now);
        self.places.insert((device, entry.address), (record, Now::Gone));
    }

    /// Blocks of the file that the record does not have; then both must agree.
    fn blocks(&mut self) -> Result<(), SnapshotError> {
        let mut in_file: BTreeMap<u32, Bytes> = BTreeMap::new();
        for block in &self.fields.blocks {
            let Some(segment) = self.fields.segments.get(block.segment) else { continue };
            if segment.is_private {
                self.findings.private_blocks += 1;
                continue;
            }
            if block.state == BlockState::Live {
                add(in_file.entry(segment.device).or_default(), block.bytes)?;
            }
            let origin = match block.state {
                BlockState::Pending => Origin::OlderFreed,
                _ => Origin::Older,
            };
            match self.at(segment.device, block.address) {
                None => drop(self.open(segment.device, block.address, block.bytes, segment.stream, origin)),
                Some((_, Now::Gone)) if block.state == BlockState::Live => {
                    self.findings.unseen += 1;
                    let record =
                        self.open(segment.device, block.address, block.bytes, segment.stream, Origin::Recorded);
                    self.step(EventKind::Alloc, record);
                }
                Some(_) => {}
            }
        }
        let mut in_trace: BTreeMap<u32, Bytes> = BTreeMap::new();
        for (record, _) in self.places.values().filter(|(_, now)| *now == Now::Live) {
            let Some(record) = self.records.get(*record as usize) else { continue };
            add(in_trace.entry(record.device).or_default(), record.bytes)?;
        }
        let mut devices: Vec<u32> = in_file.keys().chain(in_trace.keys()).copied().collect();
        devices.sort_unstable();
        devices.dedup();
        let of = |bytes: &BTreeMap<u32, Bytes>, device| bytes.get(&device).copied().unwrap_or_default();
        let both = devices.into_iter().map(|device| (device, of(&in_trace, device), of(&in_file, device)));
        self.findings.differing = both.filter(|(_, in_trace, in_file)| in_trace != in_file).collect();
        Ok(())
    }

    /// Ids are given, in order of time, and everything is put together.
    fn finish(mut self) -> Result<Imported, SnapshotError> {
        let is_older =
            |record: &&u32| self.records.get(**record as usize).is_some_and(|it| it.origin != Origin::Recorded);
        let numbers: Vec<u32> = (0..self.records.len() as u32).collect();
        let mut older: Vec<u32> = numbers.iter().filter(is_older).copied().collect();
        older.sort_by_key(|record| self.records.get(*record as usize).map(|it| (it.device, it.address)));

        let mut written = Written { builder: Builder::default(), ids: vec![0; self.records.len()], next: 0, events: 0 };
        let first = Step { kind: EventKind::Alloc, record: 0, iteration: 0, phase: Phase::Init };
        for record in older {
            let Some(it) = self.records.get(record as usize) else { continue };
            self.findings.older.0 += 1;
            add(&mut self.findings.older.1, it.bytes)?;
            written.push(it, Step { record, ..first })?;
            if it.origin == Origin::OlderFreed {
                written.push(it, Step { kind: EventKind::Free, record, ..first })?;
            }
        }
        let before = written.events as usize;
        for step in &self.steps {
            match (step.kind, self.records.get(step.record as usize)) {
                (EventKind::Mark, _) => written.mark(step)?,
                (_, Some(record)) => written.push(record, *step)?,
                (_, None) => {}
            }
        }
        let (reserved, incomplete) = self.curves.finish(before);
        let notes = super::notes::all(self.fields, &self.findings, &incomplete);
        let trace = written.builder.finish().unwrap_or_default();
        let refused = self.findings.refused.last().map(|(bytes, _)| *bytes);
        let settings = self.fields.settings.clone();
        Ok(Imported {
            trace,
            notes,
            reserved,
            settings,
            ending: Ending { refused, is_cut: false },
            ..Imported::default()
        })
    }
}

/// Adds to an account, if any machine could have so much.
fn add(account: &mut Bytes, bytes: Bytes) -> Result<(), SnapshotError> {
    *account = account.checked_add(bytes).ok_or_else(|| Place::Whole.fault(SnapshotFault::Bytes))?;
    Ok(())
}

/// The trace in the making.
struct Written {
    builder: Builder,
    /// Of each block.
    ids: Vec<u64>,
    next: u64,
    events: u64,
}

impl Written {
    fn push(&mut self, record: &Record, step: Step) -> Result<(), SnapshotError> {
        let Some(id) = self.ids.get_mut(step.record as usize) else { return Ok(()) };
        let is_alloc = step.kind == EventKind::Alloc;
        if is_alloc {
            *id = self.next;
            self.next += 1;
        }
        let (id, bytes) = (*id, if is_alloc { record.bytes } else { Bytes::ZERO });
        let event = Event { id, bytes, stream: record.stream, device: record.device, ..self.event(&step) };
        self.write(event)
    }

    fn mark(&mut self, step: &Step) -> Result<(), SnapshotError> {
        self.write(self.event(step))
    }

    fn event(&self, step: &Step) -> Event {
        Event {
            tick: Tick(self.events),
            kind: step.kind,
            id: 0,
            bytes: Bytes::ZERO,
            stream: StreamId::DEFAULT,
            iteration: step.iteration,
            context: Context { phase: step.phase, ..Context::default() },
            is_dynamic: false,
            device: 0,
            thread: 0,
        }
    }

    fn write(&mut self, event: Event) -> Result<(), SnapshotError> {
        self.builder.push(event).map_err(|rule| Place::Whole.fault(rule))?;
        self.events += 1;
        Ok(())
    }
}
