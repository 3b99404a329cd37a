//! From taps to traces: what was dropped, addresses that come again, contexts, limits, and files that end anywhere.

use super::*;
use crate::context::{self, Pushed};
use crate::ids::StreamId;
use crate::pool::Request;
use crate::trace::binary;
use crate::trace::builder::Builder;
use crate::trace::{Context, ContextKey, Phase, Trace};
use crate::units::{Bytes, DeviceAddress};

const ONE: StreamId = StreamId(1);

fn address(n: u64) -> DeviceAddress {
    DeviceAddress::new(0x7000_0000 + 512 * n)
}

fn request(bytes: u64) -> Request {
    Request { stream: ONE, ..Request::of(Bytes::new(bytes)) }
}

fn begun(ahead: usize) -> (Tap, Recorder<Collected>) {
    begin(3, Collected::up_to(1000), ahead)
}

/// All of it, as a trace that a reader would give.
fn ended(tap: Tap, mut recorder: Recorder<Collected>) -> (Trace, Remarks) {
    drop(tap);
    while recorder.drain(usize::MAX).goes_on {}
    let remarks = recorder.remarks();
    let (sink, stop) = recorder.finish();
    assert!(stop.is_none(), "{stop:?}");
    let trace = sink.into_trace();
    let mut builder = Builder::default();
    trace.modules.iter().for_each(|module| assert_eq!(trace.modules[builder.module(module) as usize], *module));
    trace.events.iter().for_each(|event| builder.push(*event).unwrap());
    (trace, remarks)
}

fn shape(trace: &Trace) -> Vec<(&'static str, u64, u64)> {
    trace.events.iter().map(|event| (event.kind.name(), event.id, event.bytes.get())).collect()
}

#[test]
fn an_address_that_comes_again_is_another_allocation() {
    let (mut tap, recorder) = begun(64);
    for bytes in [100, 200] {
        tap.alloc(&request(bytes), address(1));
        tap.free(address(1), ONE, false);
    }
    tap.mark();
    tap.alloc(&Request { is_dynamic: true, thread: 5, ..request(300) }, address(1));
    let (trace, remarks) = ended(tap, recorder);
    let expected =
        [("alloc", 0, 100), ("free", 0, 0), ("alloc", 1, 200), ("free", 1, 0), ("mark", 0, 0), ("alloc", 2, 300)];
    assert_eq!((shape(&trace), remarks), (expected.to_vec(), Remarks::default()));
    let ticks: Vec<u64> = trace.events.iter().map(|event| event.tick.0).collect();
    assert_eq!(ticks, [0, 1, 2, 3, 4, 5]);
    let last = trace.events.last().unwrap();
    assert_eq!((last.iteration, last.stream, last.device, last.thread, last.is_dynamic), (1, ONE, 3, 5, true));
    assert_eq!(trace.events[4].iteration, 0);
}

#[test]
fn frees_that_wait_for_streams_are_completed_later() {
    let (mut tap, recorder) = begun(64);
    tap.alloc(&request(100), address(1));
    tap.record_stream(address(1), StreamId(2));
    tap.free(address(1), ONE, true);
    tap.free_completed(address(1), ONE);
    tap.alloc(&request(200), address(1));
    let (trace, remarks) = ended(tap, recorder);
    let expected =
        [("alloc", 0, 100), ("record_stream", 0, 0), ("free", 0, 0), ("free_completed", 0, 0), ("alloc", 1, 200)];
    assert_eq!((shape(&trace), remarks), (expected.to_vec(), Remarks::default()));
    assert_eq!(trace.events[1].stream, StreamId(2));
}

#[test]
fn an_allocation_that_was_dropped_has_no_free_and_a_free_that_was_dropped_is_made_up() {
    // Room for four: everything else of the first five is dropped.
    let (mut tap, mut recorder) = begun(4);
    tap.alloc(&request(100), address(1));
    tap.alloc(&request(200), address(2));
    tap.alloc(&request(300), address(3));
    tap.free(address(3), ONE, false);
    // Dropped: the free of 2 and an allocation.
    tap.free(address(2), ONE, false);
    tap.alloc(&request(400), address(4));
    assert_eq!(recorder.drain(usize::MAX), Drained { records: 4, goes_on: true });
    tap.free(address(4), ONE, false);
    tap.record_stream(address(4), ONE);
    tap.alloc(&request(500), address(2));
    let (trace, remarks) = ended(tap, recorder);
    let expected =
        [("alloc", 0, 100), ("alloc", 1, 200), ("alloc", 2, 300), ("free", 2, 0), ("free", 1, 0), ("alloc", 3, 500)];
    assert_eq!(shape(&trace), expected);
    assert_eq!(remarks, Remarks { dropped: 2, lost_frees: 1, unknown: 2, ..Remarks::default() });
    // What was dropped has taken its ticks.
    assert_eq!(trace.events.last().unwrap().tick.0, 8);
}

#[test]
fn a_completion_that_was_dropped_keeps_nobody_from_its_address() {
    let (mut tap, mut recorder) = begun(2);
    tap.alloc(&request(100), address(1));
    tap.free(address(1), ONE, true);
    tap.free_completed(address(1), ONE);
    recorder.drain(usize::MAX);
    tap.alloc(&request(200), address(1));
    tap.free(address(1), ONE, false);
    let (trace, remarks) = ended(tap, recorder);
    assert_eq!(shape(&trace), [("alloc", 0, 100), ("free", 0, 0), ("alloc", 1, 200), ("free", 1, 0)]);
    assert_eq!((remarks.dropped, remarks.lost_frees), (1, 0));
}

#[test]
fn a_mark_that_was_dropped_shifts_nobody() {
    let (mut tap, mut recorder) = begun(1);
    (0..3).for_each(|_| tap.mark());
    recorder.drain(usize::MAX);
    tap.alloc(&request(100), address(1));
    let (trace, _) = ended(tap, recorder);
    let iterations: Vec<u32> = trace.events.iter().map(|event| event.iteration).collect();
    assert_eq!(iterations, [0, 3]);
}

#[test]
fn contexts_have_their_words_and_frees_that_of_who_frees() {
    let (mut tap, recorder) = begun(64);
    let pushed = Pushed {
        phase: Phase::Backward,
        microbatch: Some(2),
        chunk: Some(0),
        module: "recorded.mlp",
        is_dynamic: false,
    };
    context::push(&pushed).unwrap();
    let key = context::here().key;
    tap.alloc(&Request { context: key, ..request(100) }, address(1));
    context::pop().unwrap();
    tap.free(address(1), ONE, false);
    tap.alloc(&Request { context: key, ..request(100) }, address(1));
    tap.alloc(&Request { context: ContextKey(12345), ..request(100) }, address(2));
    let (trace, remarks) = ended(tap, recorder);
    let there = Context { phase: Phase::Backward, microbatch: Some(2), chunk: Some(0), module: 1 };
    let contexts: Vec<Context> = trace.events.iter().map(|event| event.context).collect();
    assert_eq!(contexts, [there, Context::default(), there, Context::default()]);
    assert_eq!((trace.modules[1].as_str(), trace.key(&there)), ("recorded.mlp", key));
    assert_eq!(remarks, Remarks { nameless: 1, ..Remarks::default() });
}

#[test]
fn what_was_refused_is_there_as_if_it_had_been_served() {
    let (mut tap, recorder) = begun(64);
    tap.refused(&request(5 << 30));
    tap.refused(&request(1 << 55));
    tap.alloc(&request(1), address(1));
    let (trace, remarks) = ended(tap, recorder);
    assert_eq!(shape(&trace), [("alloc", 0, 5 << 30), ("free", 0, 0), ("alloc", 1, 1)]);
    assert_eq!(shape(&trace.clone().without_refused()), [("alloc", 1, 1)]);
    assert_eq!(remarks, Remarks { refused: 2, refused_largest: Bytes::new(1 << 55), ..Remarks::default() });
}

#[test]
fn memory_is_full_at_its_bound_and_the_job_goes_on() {
    let (mut tap, mut recorder) = begin(0, Collected::up_to(3), 8);
    for n in 0..5 {
        tap.alloc(&request(n + 1), address(n));
    }
    assert_eq!(recorder.drain(usize::MAX), Drained { records: 4, goes_on: false });
    assert_eq!(recorder.remarks().stopped, Some(Stopped::Events));
    // Nobody takes this, and nobody counts it.
    (0..100).for_each(|_| tap.mark());
    assert_eq!(recorder.remarks().dropped, 0);
    let (sink, stop) = recorder.finish();
    assert!(sink.trace().events.len() == 3 && matches!(stop, Some(Stop::Limit(Stopped::Events))));
}

/// A file of `count` pairs, flushed after every tenth.
fn file(count: u64, len_max: u64) -> (Vec<u8>, Option<Stop>) {
    let mut bytes = Vec::new();
    let (mut tap, mut recorder) = begin(0, Written::up_to(len_max, &mut bytes).unwrap(), 1 << 10);
    for n in 0..count {
        tap.alloc(&request(512 * (n * n % 997)), address(n % 7));
        tap.free(address(n % 7), ONE, false);
        recorder.drain(usize::MAX);
        if n % 10 == 9 {
            recorder.flush();
        }
    }
    let (_, stop) = recorder.finish();
    (bytes, stop)
}

#[test]
fn a_file_says_that_its_limit_stopped_it() {
    let (bytes, stop) = file(2000, 3000);
    assert!(matches!(stop, Some(Stop::Limit(Stopped::Length))), "{stop:?}");
    assert!((3000..3500).contains(&bytes.len()), "{}", bytes.len());
    let recorded = binary::read_recorded(&bytes[..]).unwrap();
    assert_eq!(recorded.remarks, Remarks { stopped: Some(Stopped::Length), ..Remarks::default() });
    assert!(recorded.trace.events.len() < 4000);
    let words = recorded.remarks.sentences();
    assert!(words.len() == 1 && words[0].starts_with("the recording stopped: the file is as long as"), "{words:?}");
}

#[test]
fn a_file_that_is_cut_anywhere_is_read_as_far_as_it_goes() {
    let (bytes, _) = file(30, u64::MAX);
    let whole = binary::read_recorded(&bytes[..]).unwrap();
    assert_eq!((whole.trace.events.len(), whole.remarks), (60, Remarks::default()));
    let mut lens = Vec::new();
    for cut in 0..bytes.len() {
        let Ok(recorded) = binary::read_recorded(&bytes[..cut]) else {
            assert!(lens.is_empty(), "cut at {cut}");
            continue;
        };
        let at = recorded.remarks.cut.unwrap_or_else(|| panic!("cut at {cut}, and nobody sees it"));
        assert!(at <= cut as u64 && recorded.trace.events == whole.trace.events[..recorded.trace.events.len()]);
        assert!(recorded.remarks.sentences()[0].starts_with(&format!("the recording is cut at byte {at}:")));
        lens.push(recorded.trace.events.len());
    }
    lens.dedup();
    assert_eq!(lens, [20, 40, 60]);
    // A byte that was changed is damage, or seems to be a cut; the same trace it never is.
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x40;
        let found = binary::read_recorded(&changed[..]);
        assert!(found.is_err() || found.is_ok_and(|found| found.remarks.cut.is_some()), "byte {at}");
    }
}

#[test]
fn a_file_tells_again_what_it_lacks() {
    let mut bytes = Vec::new();
    let (mut tap, mut recorder) = begin(0, Written::new(&mut bytes).unwrap(), 2);
    for n in 0..5 {
        tap.alloc(&request(n + 1), address(n));
    }
    recorder.drain(usize::MAX);
    recorder.flush();
    recorder.flush();
    tap.refused(&request(77));
    tap.free(address(4), ONE, false);
    recorder.drain(usize::MAX);
    tap.left_out(&request(1 << 30));
    tap.mark();
    recorder.drain(usize::MAX);
    let expected = Remarks {
        dropped: 3,
        unknown: 1,
        refused: 1,
        refused_largest: Bytes::new(77),
        private: 1,
        ..Remarks::default()
    };
    assert_eq!(recorder.remarks(), expected);
    assert!(recorder.finish().1.is_none());
    let recorded = binary::read_recorded(&bytes[..]).unwrap();
    assert_eq!((recorded.trace.events.len(), recorded.remarks), (5, expected));
    assert_eq!(expected.sentences().len(), 4);
}

/// Takes so many bytes and no more, as a full disk does.
struct Full(usize);

impl std::io::Write for Full {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_disk_that_is_full_ends_the_recording_and_nothing_else() {
    let (mut tap, mut recorder) = begin(0, Written::new(Full(100)).unwrap(), 64);
    let mut goes_on = true;
    for n in 0..200 {
        tap.alloc(&request(n * n), address(n));
        goes_on = recorder.drain(usize::MAX).goes_on;
        recorder.flush();
    }
    assert!(!goes_on);
    assert_eq!((recorder.remarks().stopped, recorder.remarks().dropped), (Some(Stopped::File), 0));
    assert!(matches!(recorder.finish().1, Some(Stop::File(_))));
}

#[test]
fn an_event_of_one_iteration_like_the_last_costs_a_byte() {
    let mut bytes = Vec::new();
    let (mut tap, mut recorder) = begin(0, Written::new(&mut bytes).unwrap(), 1 << 10);
    for _ in 0..50 {
        for n in 0..100 {
            tap.alloc(&request(512 * (n * n % 997)), address(n));
            tap.free(address(n), ONE, false);
        }
        tap.mark();
        recorder.drain(usize::MAX);
    }
    assert!(recorder.finish().1.is_none());
    let found = binary::read(&bytes[..]).unwrap().events;
    assert_eq!(found.len(), 50 * 201);
    assert!(bytes.len() < found.len() + 2000, "{} bytes for {} events", bytes.len(), found.len());
}
