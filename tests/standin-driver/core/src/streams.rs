//! Streams: queues of work that run in order, as far as they can, whenever somebody asks; a stall is something that runs until a test says so.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use crate::{Called, code};

/// Setting bytes, as it was queued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    /// Who does it.
    pub(crate) device: usize,
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) value: u8,
}

#[derive(Debug)]
enum Work {
    Fill(Fill),
    Complete(u64),
    Await(u64),
    Stall(u64),
}

/// What one process has queued.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Those that were made, with their device. The numbers 0 to 2 are default streams of every device.
    created: HashMap<u64, usize>,
    queues: BTreeMap<(usize, u64), VecDeque<Work>>,
    /// The device of each event, and what it stands for: the last record of it, if there was one.
    events: HashMap<u64, (usize, Option<u64>)>,
    /// Records whose work has not run.
    pending: HashSet<u64>,
    stalls: HashSet<u64>,
    next: u64,
}

impl Streams {
    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn create(&mut self, device: usize) -> u64 {
        let stream = 0x7b00_0000_0000 | self.next() << 8;
        self.created.insert(stream, device);
        stream
    }

    /// What is queued runs still.
    pub(crate) fn destroy(&mut self, stream: u64) -> Called<()> {
        self.created.remove(&stream).map(drop).ok_or(code::INVALID_HANDLE)
    }

    fn push(&mut self, device: usize, stream: u64, work: Work) -> Called<()> {
        let device = match self.created.get(&stream) {
            Some(device) => *device,
            None if stream <= 2 => device,
            None => return Err(code::INVALID_HANDLE),
        };
        self.queues.entry((device, stream)).or_default().push_back(work);
        Ok(())
    }

    pub(crate) fn fill(&mut self, stream: u64, fill: Fill) -> Called<()> {
        self.push(fill.device, stream, Work::Fill(fill))
    }

    /// Something that runs until it is told to end; its number.
    pub(crate) fn stall(&mut self, device: usize, stream: u64) -> Called<u64> {
        let stall = self.next();
        self.push(device, stream, Work::Stall(stall))?;
        self.stalls.insert(stall);
        Ok(stall)
    }

    pub(crate) fn resume(&mut self, stall: u64) -> Called<()> {
        if self.stalls.remove(&stall) { Ok(()) } else { Err(code::INVALID_HANDLE) }
    }

    pub(crate) fn create_event(&mut self, device: usize) -> u64 {
        let event = 0x7c00_0000_0000 | self.next() << 8;
        self.events.insert(event, (device, None));
        event
    }

    pub(crate) fn destroy_event(&mut self, event: u64) -> Called<()> {
        self.events.remove(&event).map(drop).ok_or(code::INVALID_HANDLE)
    }

    /// The device on which a stream or an event was made.
    pub(crate) fn device_of(&self, made: u64) -> Option<usize> {
        self.created.get(&made).or(self.events.get(&made).map(|(device, _)| device)).copied()
    }

    fn event(&self, event: u64) -> Called<(usize, Option<u64>)> {
        self.events.get(&event).copied().ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn record(&mut self, device: usize, event: u64, stream: u64) -> Called<()> {
        let (home, _) = self.event(event)?;
        let record = self.next();
        self.push(device, stream, Work::Complete(record))?;
        self.pending.insert(record);
        self.events.insert(event, (home, Some(record)));
        Ok(())
    }

    /// From now on the stream waits for what the event stands for now.
    pub(crate) fn wait(&mut self, device: usize, event: u64, stream: u64) -> Called<()> {
        match self.event(event)?.1 {
            Some(record) => self.push(device, stream, Work::Await(record)),
            None => Ok(()),
        }
    }

    pub(crate) fn query(&self, event: u64) -> Called<()> {
        let (_, record) = self.event(event)?;
        if record.is_some_and(|record| self.pending.contains(&record)) { Err(code::NOT_READY) } else { Ok(()) }
    }

    /// Runs what can run.
    pub(crate) fn pump(&mut self, mut run: impl FnMut(Fill)) {
        let Streams { queues, pending, stalls, .. } = self;
        // What completes may let another queue go on.
        while queues.values_mut().fold(false, |has_moved, queue| {
            let mut moved = false;
            while let Some(work) = queue.front() {
                match work {
                    Work::Await(record) if pending.contains(record) => break,
                    Work::Stall(stall) if stalls.contains(stall) => break,
                    Work::Await(_) | Work::Stall(_) => {}
                    Work::Fill(fill) => run(*fill),
                    Work::Complete(record) => {
                        pending.remove(record);
                    }
                }
                queue.pop_front();
                moved = true;
            }
            has_moved || moved
        }) {}
        queues.retain(|_, queue| !queue.is_empty());
    }

    /// Nothing is queued on the device.
    pub(crate) fn is_idle(&self, device: usize) -> bool {
        self.queues.range((device, 0)..=(device, u64::MAX)).next().is_none()
    }
}
