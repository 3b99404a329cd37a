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
    /// Why, where more is known than that it did.
    pub refusal: Option<String>,
    /// Driver calls.
    pub calls: CallSum,
    /// Driver calls of the last iteration that was run to its end.
    pub last_iteration: CallSum,
    /// Driver calls of each iteration, in the order in which they begin. Their sum is that of
    /// `calls`: what comes before the first iteration counts to it, and where memory ran out the
    /// last entry ends there.
    pub calls_by_iteration: Vec<u64>,
    /// What only some allocators have to tell.
    pub more: More,
    /// Deviations of each iteration, in the order in which they begin.
    pub deviations: Vec<u64>,
    /// How long the steps took, the caller's part of it included, without `beside`.
    pub time: Duration,
    /// How long simulated drivers, daemons and planning took.
    pub beside: Duration,
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
    const OFTEN: usize = 1 << 12;
    let mut keeper = Keeper::new(script, watch);
    let mut run = Run::default();
    let (started, beside) = (clock.now(), allocator.beside());
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
                Step::Free { slot, event, waits } => {
                    allocator.free(slot);
                    if !waits {
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
    let time = clock.now() - started;
    run.beside = allocator.beside() - beside;
    run.time = time.saturating_sub(run.beside);
    progress(script.steps.len());
    run.refusal = run.out_of_memory.and_then(|_| allocator.refusal());
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
    /// Deviations at its beginning.
    deviated: Vec<u64>,
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
            deviated: Vec::new(),
        }
    }

    #[inline]
    fn alloc<A: Allocator + ?Sized>(&mut self, asked: &Asked, address: DeviceAddress, allocator: &A) {
        self.live = self.live.saturating_add(asked.bytes);
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
        self.live = self.live.saturating_sub(bytes);
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
        self.deviated.push(allocator.more().deviations);
    }

    fn finish<A: Allocator + ?Sized>(self, run: &mut Run, allocator: &A) {
        run.peak_live = self.peak_live;
        run.peak_reserved = allocator.reserved().peak;
        run.after = self.after;
        let deviated = self.deviated.iter().copied().chain([run.more.deviations]).collect::<Vec<_>>();
        run.deviations = deviated.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mut before = 0;
        let ends = self.began.iter().skip(1).chain([&run.calls]).map(CallSum::total);
        run.calls_by_iteration = ends.map(|end| end - std::mem::replace(&mut before, end)).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use crate::ids::StreamId;
    use crate::replay::allocator::{OutOfMemory, Reserved};

    /// Writes down what it is asked, and keeps what was not completed.
    #[derive(Default)]
    struct Noting {
        heard: Vec<(char, u32)>,
        sizes: Vec<Bytes>,
        reserved: Reserved,
        capacity: Option<Bytes>,
        calls: CallSum,
    }

    impl Allocator for Noting {
        fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
            if self.capacity.is_some_and(|capacity| self.reserved.now + asked.bytes > capacity) {
                return Err(OutOfMemory);
            }
            self.heard.push(('a', asked.slot));
            self.sizes.resize(self.sizes.len().max(asked.slot as usize + 1), Bytes::ZERO);
            self.sizes[asked.slot as usize] = asked.bytes;
            self.reserved.grow(asked.bytes);
            self.calls.malloc += 1;
            Ok(DeviceAddress::new(4096))
        }

        fn free(&mut self, slot: u32) {
            self.heard.push(('f', slot));
        }

        fn completed(&mut self, slot: u32) {
            self.heard.push(('c', slot));
            self.reserved.shrink(self.sizes[slot as usize]);
        }

        fn record_stream(&mut self, slot: u32, _stream: StreamId) {
            self.heard.push(('r', slot));
        }

        fn begin_iteration(&mut self, iteration: u32) {
            self.heard.push(('i', iteration));
        }

        fn reserved(&self) -> Reserved {
            self.reserved
        }

        fn calls(&self) -> CallSum {
            self.calls
        }
    }

    fn ran(rows: &str, device: u32, capacity: Option<u64>, watch: Watch) -> (Run, Vec<(char, u32)>) {
        let text = format!("tick,event,id,bytes,stream,iteration,device\n{rows}");
        let script = Script::of(&crate::trace::csv::read(text.as_bytes()).unwrap(), device);
        let mut noting = Noting { capacity: capacity.map(Bytes::new), ..Noting::default() };
        let run = run(&script, &mut noting, watch, &ManualClock::default(), &|_| ());
        (run, noting.heard)
    }

    /// Device 1 says when bytes can be used again, and device 0 does not.
    const TWO_DEVICES: &str = "0,alloc,1,100,0,0,0\n1,alloc,2,30,0,0,1\n2,free,1,,0,0,0\n3,alloc,3,50,0,1,0\n\
        4,free,2,,0,1,1\n5,alloc,4,40,0,1,1\n6,free_completed,2,,0,1,1\n";

    #[test]
    fn a_free_completes_at_once_where_its_device_says_no_more() {
        let (run, heard) = ran(TWO_DEVICES, 0, None, Watch::default());
        assert_eq!(heard, [('i', 0), ('a', 0), ('f', 0), ('c', 0), ('i', 1), ('a', 0)]);
        assert_eq!((run.served, run.peak_live, run.peak_reserved), (2, Bytes::new(100), Bytes::new(100)));
        assert_eq!((run.calls.malloc, run.last_iteration.malloc, run.efficiency()), (2, 1, 1.0));
        assert_eq!(run.calls_by_iteration, [1, 1]);
    }

    #[test]
    fn calls_before_the_first_iteration_count_to_it() {
        let trace =
            crate::trace::csv::read(format!("tick,event,id,bytes,stream,iteration,device\n{TWO_DEVICES}").as_bytes());
        let script = Script::of(&trace.unwrap(), 0);
        let mut noting = Noting::default();
        noting.calls.malloc = 5;
        let run = run(&script, &mut noting, Watch::default(), &ManualClock::default(), &|_| ());
        assert_eq!((run.calls_by_iteration, run.calls.total()), (vec![6, 1], 7));
    }

    #[test]
    fn a_free_completes_when_its_device_says_so() {
        let (run, heard) = ran(TWO_DEVICES, 1, None, Watch::default());
        assert_eq!(heard, [('i', 0), ('a', 0), ('i', 1), ('f', 0), ('a', 1), ('c', 0)]);
        // What is freed is not live, and its bytes are still kept.
        assert_eq!((run.peak_live, run.peak_reserved), (Bytes::new(40), Bytes::new(70)));
        let (refused, heard) = ran(TWO_DEVICES, 1, Some(60), Watch::default());
        assert_eq!(refused.out_of_memory, Some(Refused { event: 5, requested: Bytes::new(40) }));
        assert_eq!((refused.served, heard.last()), (1, Some(&('f', 0))));
        assert_eq!(refused.calls_by_iteration, [1, 0], "the second ends where memory does");
    }

    #[test]
    fn peaks_are_also_those_of_the_iterations_after_a_plan() {
        let (run, _) = ran(TWO_DEVICES, 0, None, Watch { after_iteration: Some(0), records: true });
        assert_eq!(run.after, Some((Bytes::new(50), Bytes::new(50))));
        let placed: Vec<_> = run.record.unwrap().placed.iter().map(|placed| (placed.from, placed.until)).collect();
        assert_eq!(placed, [(0, 2), (3, u32::MAX)]);
    }
}
