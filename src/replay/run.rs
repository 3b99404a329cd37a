//! Runs a script through an allocator and says what came of it.

use std::time::Duration;

use super::allocator::{Allocator, More};
use super::calls::CallSum;
use super::record::{Placed, Point, Record};
use super::script::{Asked, Script, Step};
use crate::clock::Clock;
use crate::units::{Bytes, DeviceAddress};

/// What an allocator made of a script.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Requests served.
    pub served: u64,
    /// Most bytes kept from others.
    pub peak_reserved: Bytes,
    /// Most bytes live.
    pub peak_live: Bytes,
    /// The same two, over the iterations from [`Watch::after_iteration`] on.
    pub after: Option<(Bytes, Bytes)>,
    /// Where memory ran out.
    pub out_of_memory: Option<Refused>,
    /// Driver calls.
    pub calls: CallSum,
    /// Driver calls of the last iteration that was run to its end.
    pub last_iteration: CallSum,
    /// What only some allocators have to tell.
    pub more: More,
    /// How long the steps took, the caller's part of it included.
    pub time: Duration,
    /// For pictures, if wanted.
    pub record: Option<Record>,
}

/// A request that was not served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused {
    /// Its event.
    pub event: u32,
    /// Bytes.
    pub requested: Bytes,
}

/// What to watch beside the totals.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watch {
    /// Peaks of the iterations after this one are wanted, too: those that a plan was not made from.
    pub after_iteration: Option<u32>,
    /// A record for pictures is wanted.
    pub records: bool,
}

impl Run {
    /// How much of what was reserved at the peak was live at the peak.
    pub fn efficiency(&self) -> f64 {
        share(self.peak_live, self.peak_reserved)
    }

    /// The same over the iterations that a plan was not made from.
    pub fn efficiency_after(&self) -> Option<f64> {
        self.after.map(|(live, reserved)| share(live, reserved))
    }
}

fn share(live: Bytes, reserved: Bytes) -> f64 {
    if reserved == Bytes::ZERO { 1.0 } else { live.get() as f64 / reserved.get() as f64 }
}

/// Runs all steps, or as many as there is memory for. `progress` hears now and then how many steps are done.
pub fn run<A: Allocator + ?Sized>(
    script: &Script,
    allocator: &mut A,
    watch: Watch,
    clock: &dyn Clock,
    progress: &dyn Fn(usize),
) -> Run {
    const OFTEN: usize = 1 << 16;
    let mut keeper = Keeper::new(script, watch);
    let mut run = Run::default();
    let started = clock.now();
    for (chunk, steps) in script.steps.chunks(OFTEN).enumerate() {
        progress(chunk * OFTEN);
        for step in steps {
            match *step {
                Step::Alloc(asked) => {
                    let Ok(address) = allocator.alloc(&asked) else {
                        run.out_of_memory = Some(Refused { event: asked.event, requested: asked.bytes });
                        break;
                    };
                    run.served += 1;
                    keeper.alloc(&asked, address, allocator);
                }
                Step::Free { slot, event } => {
                    allocator.free(slot);
                    if !script.has_completions {
                        allocator.completed(slot);
                    }
                    keeper.free(slot, event, allocator);
                }
                Step::Completed { slot } => allocator.completed(slot),
                Step::RecordStream { slot, stream } => allocator.record_stream(slot, stream),
                Step::Iteration(number) => {
                    allocator.begin_iteration(number);
                    keeper.begin_iteration(number, allocator);
                }
            }
        }
        if run.out_of_memory.is_some() {
            break;
        }
    }
    run.time = clock.now() - started;
    run.calls = allocator.calls();
    run.more = allocator.more();
    keeper.finish(&mut run, allocator);
    run
}

/// The replay's own books.
struct Keeper {
    watch: Watch,
    /// By slot: bytes, and the place in the record.
    sizes: Vec<(Bytes, u32)>,
    live: Bytes,
    peak_live: Bytes,
    /// Peaks since the iterations that are watched began.
    after: Option<(Bytes, Bytes)>,
    record: Record,
    /// Driver calls at the beginning of each iteration.
    began: Vec<CallSum>,
}

impl Keeper {
    fn new(script: &Script, watch: Watch) -> Keeper {
        Keeper {
            watch,
            sizes: vec![(Bytes::ZERO, 0); script.slots as usize],
            live: Bytes::ZERO,
            peak_live: Bytes::ZERO,
            after: None,
            record: Record::default(),
            began: Vec::new(),
        }
    }

    #[inline]
    fn alloc<A: Allocator + ?Sized>(&mut self, asked: &Asked, address: DeviceAddress, allocator: &A) {
        self.live += asked.bytes;
        self.peak_live = self.peak_live.max(self.live);
        self.sizes[asked.slot as usize] = (asked.bytes, self.record.placed.len() as u32);
        self.note(allocator);
        if self.watch.records {
            let (from, event) = (asked.event, asked.event);
            self.record.placed.push(Placed { from, until: u32::MAX, event, address, bytes: asked.bytes });
            self.point(asked.event, allocator);
        }
    }

    #[inline]
    fn free<A: Allocator + ?Sized>(&mut self, slot: u32, event: u32, allocator: &A) {
        let (bytes, placed) = self.sizes[slot as usize];
        self.live -= bytes;
        if self.watch.records {
            if let Some(placed) = self.record.placed.get_mut(placed as usize) {
                placed.until = event;
            }
            self.point(event, allocator);
        }
    }

    fn note<A: Allocator + ?Sized>(&mut self, allocator: &A) {
        if let Some((live, reserved)) = &mut self.after {
            *live = (*live).max(self.live);
            *reserved = (*reserved).max(allocator.reserved().now);
        }
    }

    fn point<A: Allocator + ?Sized>(&mut self, event: u32, allocator: &A) {
        self.record.curve.push(Point { event, live: self.live, reserved: allocator.reserved().now });
    }

    fn begin_iteration<A: Allocator + ?Sized>(&mut self, number: u32, allocator: &A) {
        if self.after.is_none() && self.watch.after_iteration.is_some_and(|last| number > last) {
            self.after = Some((Bytes::ZERO, Bytes::ZERO));
            self.note(allocator);
        }
        self.began.push(allocator.calls());
    }

    fn finish<A: Allocator + ?Sized>(self, run: &mut Run, allocator: &A) {
        run.peak_live = self.peak_live;
        run.peak_reserved = allocator.reserved().peak;
        run.after = self.after;
        // An iteration in which memory ran out has no end.
        let mut marks = self.began;
        if run.out_of_memory.is_none() {
            marks.push(run.calls);
        }
        if let [.., before, last] = marks.as_slice() {
            run.last_iteration = last.since(before);
        }
        run.record = self.watch.records.then_some(self.record);
    }
}
