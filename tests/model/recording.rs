//! Random runs of a runtime that is recorded: what is read back is what was done, in memory and out of a file.

use std::sync::Arc;

use stitchd::clock::ManualClock;
use stitchd::context::{self, Pushed};
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::{DeviceId, StreamId};
use stitchd::ladder::Ladder;
use stitchd::memory::Device;
use stitchd::pool::Request;
use stitchd::record::{self, Collected, Recorder, Sink, Written};
use stitchd::rng::Rng;
use stitchd::runtime::{AllocError, Counters, Runtime, RuntimeConfig};
use stitchd::session::PrivateSource;
use stitchd::store::Store;
use stitchd::trace::{Event, EventKind, Phase, Trace, binary};
use stitchd::units::{Bytes, DeviceAddress};

use crate::At;

const SEEDS: [u64; 6] = [71, 72, 73, 74, 75, 76];
const STEPS: u64 = 4_000;
const MIB: u64 = 1 << 20;
const MODULES: [&str; 4] = ["", "a", "a.b", "c.\u{e4}"];

/// What was done, as it is to be read back: kind, id, bytes, stream, iteration, module, dynamic.
type Line = (EventKind, u64, u64, StreamId, u32, &'static str, bool);

struct Live {
    id: u64,
    address: DeviceAddress,
    stream: StreamId,
    is_shared: bool,
}

/// A random job, and the list of what it did.
struct Job {
    runtime: Runtime,
    rng: Rng,
    module: &'static str,
    live: Vec<Live>,
    next: u64,
    iteration: u32,
    done: Vec<Line>,
    /// Those whose free waits for other streams.
    shared: Vec<u64>,
    refused: u64,
}

impl Job {
    fn new(seed: u64) -> Job {
        let driver = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(96)])));
        let device = Device::open(driver, DeviceId(0)).unwrap();
        let store = Arc::new(Store::new(vec![Arc::clone(&device)]));
        let source = Arc::new(PrivateSource::new(store, DeviceId(0), Ladder::standard()));
        let config = RuntimeConfig::default();
        let runtime = Runtime::new(device, source, Arc::new(ManualClock::default()), config, Counters::private());
        Job {
            runtime,
            rng: Rng::new(seed),
            module: "",
            live: Vec::new(),
            next: 0,
            iteration: 0,
            done: Vec::new(),
            shared: Vec::new(),
            refused: 0,
        }
    }

    fn note(&mut self, kind: EventKind, id: u64, bytes: u64, stream: StreamId, is_dynamic: bool) {
        self.done.push((kind, id, bytes, stream, self.iteration, self.module, is_dynamic));
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..48 => self.alloc(),
            48..90 => self.free(),
            90..96 => self.share(),
            96..98 => {
                self.module = MODULES[self.rng.index(MODULES.len())];
                let _ = context::pop();
                let pushed =
                    Pushed { phase: Phase::Forward, microbatch: Some(1), module: self.module, ..Pushed::default() };
                context::push(&pushed).unwrap();
            }
            98 => self.runtime.synchronize().unwrap(),
            _ => {
                self.runtime.mark_iteration();
                let module = std::mem::take(&mut self.module);
                self.note(EventKind::Mark, 0, 0, StreamId::DEFAULT, false);
                self.module = module;
                self.iteration += 1;
            }
        }
    }

    fn alloc(&mut self) {
        let most = if self.rng.chance(500) { MIB } else { 16 * MIB };
        let bytes = 1 + self.rng.below(most);
        let (stream, is_dynamic) = (StreamId(self.rng.below(3)), self.rng.chance(100));
        let request = Request {
            bytes: Bytes::new(bytes),
            stream,
            thread: context::thread(),
            context: context::here().key,
            is_dynamic,
        };
        let (id, answer) = (self.next, self.runtime.alloc(&request));
        self.next += 1;
        self.note(EventKind::Alloc, id, bytes, stream, is_dynamic);
        match answer {
            Ok(address) => self.live.push(Live { id, address, stream, is_shared: false }),
            Err(AllocError::OutOfMemory { .. }) => {
                self.refused += 1;
                self.note(EventKind::Free, id, 0, stream, false);
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    fn free(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.rng.index(self.live.len());
        let Live { id, address, stream, is_shared } = self.live.swap_remove(at);
        self.runtime.free(address, stream).unwrap();
        // What is freed a second time is nobody's, and nothing that happened.
        let _ = self.rng.chance(50) && self.runtime.free(address, stream).is_ok();
        self.note(EventKind::Free, id, 0, stream, false);
        if is_shared {
            self.shared.push(id);
        }
    }

    fn share(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let (at, stream) = (self.rng.index(self.live.len()), StreamId(7 + self.rng.below(2)));
        self.live[at].is_shared = true;
        self.runtime.record_stream(self.live[at].address, stream);
        self.note(EventKind::RecordStream, self.live[at].id, 0, stream, false);
    }
}

/// Runs a job and gives it with where its recording went.
fn run<S: Sink>(seed: u64, sink: S) -> (Job, S) {
    let mut job = Job::new(seed);
    let (tap, mut recorder): (_, Recorder<S>) = record::begin(0, sink, 1 << 8);
    let number = job.runtime.record_into(tap);
    let at = At::new("a recorded run", seed);
    for step in 0..STEPS {
        at.step.set(step);
        job.step();
        if step % 50 == 0 {
            recorder.drain(usize::MAX);
        }
        if step % 333 == 0 {
            recorder.flush();
        }
    }
    let _ = context::pop();
    job.runtime.synchronize().unwrap();
    assert!(job.runtime.stop_recording(number) && !job.runtime.stop_recording(number));
    while recorder.drain(usize::MAX).goes_on {}
    let remarks = recorder.remarks();
    assert_eq!((remarks.dropped, remarks.unknown, remarks.nameless, remarks.refused), (0, 0, 0, job.refused));
    let (sink, stop) = recorder.finish();
    assert!(stop.is_none());
    (job, sink)
}

fn check(job: &Job, trace: &Trace) {
    let line = |event: &Event| {
        let module = trace.modules[event.context.module as usize].as_str();
        let module = MODULES.into_iter().find(|known| *known == module).unwrap();
        (event.kind, event.id, event.bytes.get(), event.stream, event.iteration, module, event.is_dynamic)
    };
    let is_completion = |event: &&Event| event.kind == EventKind::FreeCompleted;
    let found: Vec<Line> = trace.events.iter().filter(|event| !is_completion(event)).map(line).collect();
    for (at, (found, done)) in found.iter().zip(&job.done).enumerate() {
        assert_eq!(found, done, "event {at}");
    }
    assert_eq!(found.len(), job.done.len());
    let mut completed: Vec<u64> = trace.events.iter().filter(is_completion).map(|event| event.id).collect();
    let mut shared = job.shared.clone();
    completed.sort_unstable();
    shared.sort_unstable();
    assert_eq!(completed, shared, "what waited for other streams has passed them");
    assert!(job.refused > 5 && shared.len() > 50, "{} refused, {} shared", job.refused, shared.len());
}

#[test]
fn what_was_recorded_is_what_was_done() {
    for seed in crate::times(SEEDS) {
        let (job, collected) = run(seed, Collected::up_to(usize::MAX));
        check(&job, collected.trace());
        let mut bytes = Vec::new();
        let (again, written) = run(seed, Written::new(&mut bytes).unwrap());
        drop(written);
        let read = binary::read(&bytes[..]).unwrap();
        check(&again, &read);
        assert_eq!((&read.events, &read.modules), (&collected.trace().events, &collected.trace().modules));
    }
}
