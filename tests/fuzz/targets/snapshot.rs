//! Memory snapshots of PyTorch, which are pickles, and what is made of them.

#[path = "../../../src/trace/import/written.rs"]
mod written;

use stitchd::trace::csv;
use stitchd::trace::import::snapshot;
use written::{Node, annotation, entry, pickle, segment};

use super::trace::{PLANNED_MAX, written as as_csv};

pub(crate) fn read(bytes: &[u8]) {
    let Ok(imported) = snapshot::read(bytes) else { return };
    let trace = &imported.trace;
    assert!(!trace.events.is_empty());
    assert!(trace.events.iter().enumerate().all(|(at, event)| event.tick.0 == at as u64));
    assert!(imported.reserved.iter().all(|point| point.events <= trace.events.len()));
    assert!(imported.reserved.is_sorted_by_key(|point| point.events));
    trace.summary();
    if trace.events.len() <= PLANNED_MAX {
        let again = csv::read(as_csv(trace).as_bytes()).expect("a trace that was made reads again");
        assert_eq!((&again.events, &again.modules), (&trace.events, &trace.modules));
    }
}

const BASE: u64 = 0x7f00_0000_0000;
const BLOCKS: [(i64, i64, &str); 3] =
    [(1024, 1000, "active_allocated"), (2048, 2000, "active_pending_free"), (4096, 0, "inactive")];

/// A job of two devices that has everything a snapshot can have.
fn job() -> Node {
    let segments = vec![
        segment(0, BASE, 0, 0, &BLOCKS),
        segment(0, BASE + (1 << 20), 0x5555, 3, &BLOCKS),
        segment(1, BASE, 0, 0, &BLOCKS),
    ];
    let mut first = vec![entry("segment_alloc", BASE, 7168, 0, 10)];
    for (time, address) in (20..).step_by(10).zip([BASE, BASE + 1024, BASE + 3072, BASE + 3072, BASE + (1 << 20)]) {
        first.push(entry("alloc", address, 1000, 0, time));
        first.push(entry("free_requested", address, 1000, 0, time + 1));
        first.push(entry("free_completed", address, 1000, 0x5555, time + 2));
    }
    first.push(entry("free_completed", BASE + 9000, 64, 0, 80));
    first.push(entry("oom", BASE, 1 << 40, 0, 81));
    first.push(entry("snapshot", 0, 1000, 0, 82));
    first.push(entry("alloc", BASE, 1000, 0, 83));
    let second = vec![
        entry("free_requested", BASE + 5000, 70, 0x7777, 15),
        entry("segment_map", BASE, 2 << 20, 0, 33),
        entry("segment_unmap", BASE + 4096, 1 << 20, 0, 44),
    ];
    let annotations = vec![
        annotation("ProfilerStep#0", "START", 25),
        annotation("ProfilerStep#0", "END", 45),
        annotation("ProfilerStep#1", "START", 46),
    ];
    written::snapshot(segments, vec![first, second], annotations)
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<_> = [2, 4, 5].map(|protocol| pickle(&job(), protocol)).into();
    let bare = Node::List(vec![segment(0, BASE, 0, 0, &BLOCKS), segment(1, BASE, 1, 0, &BLOCKS)]);
    seeds.extend([2, 4].map(|protocol| pickle(&bare, protocol)));
    seeds.push(pickle(&written::snapshot(Vec::new(), vec![vec![entry("alloc", 1, 1, 0, 1)]], Vec::new()), 2));
    seeds.push(b"\x80\x04(NK\x01J\x01\0\0\0M\x01\0\x8a\x01\x05G\0\0\0\0\0\0\0\0\x88\x89t2\x94h\0]h\0a0\x85.".to_vec());
    seeds.push(b"\x80\x02cos\nsystem\n\x8c\x02id\x85R.".to_vec());
    seeds.extend((2..6).map(|count| [&[0x80, 4][..], &b"]}()".repeat(count), b"."].concat()));
    seeds
}
