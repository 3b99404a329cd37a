//! Small snapshots made by hand, one thing in each, and what must come of it.

use super::super::written::{Node, annotation, entry, pickle, segment, snapshot};
use super::*;
use crate::trace::{Cut, Ending, Event, EventKind, Phase};

const BASE: u64 = 0x7f00_0000_0000;
const LIVE: &str = "active_allocated";
const PENDING: &str = "active_pending_free";
const IDLE: &str = "inactive";

/// The same from every protocol.
fn import(node: &Node) -> Imported {
    let [imported, four, five] = [2, 4, 5].map(|protocol| read(&pickle(node, protocol)).unwrap());
    for other in [four, five] {
        assert_eq!(format!("{imported:?}"), format!("{other:?}"));
    }
    imported
}

fn fails(node: &Node) -> String {
    read(&pickle(node, 4)).unwrap_err().to_string()
}

/// A snapshot of one device.
fn record(segments: Vec<Node>, entries: Vec<Node>) -> Node {
    snapshot(segments, vec![entries], Vec::new())
}

/// An entry on the default stream, `offset` KiB behind the base.
fn at(action: &str, offset: u64, size: i64) -> Node {
    entry(action, BASE + (offset << 10), size, 0, 0)
}

/// What happened, with ids.
fn events(imported: &Imported) -> Vec<(&'static str, u64)> {
    let name = |event: &Event| EventKind::ALL.iter().find(|(_, kind)| *kind == event.kind).unwrap().0;
    imported.trace.events.iter().map(|event| (name(event), event.id)).collect()
}

fn notes_begin(imported: &Imported, expected: &[&str]) {
    let is_each = imported.notes.iter().zip(expected).all(|(note, start)| note.starts_with(start));
    assert!(is_each && imported.notes.len() == expected.len(), "{:?}, not {expected:?}", imported.notes);
}

#[test]
fn a_whole_record_comes_out_as_it_is_and_needs_no_note() {
    let segments = vec![segment(0, BASE, 0, 0, &[(1024, 1000, LIVE), (2 << 20, 0, IDLE)])];
    let imported = import(&record(
        segments,
        vec![
            at("segment_alloc", 0, 1024 + (2 << 20)),
            at("alloc", 1, 700),
            at("alloc", 0, 1000),
            at("free_requested", 1, 700),
            at("free_completed", 1, 700),
        ],
    ));
    notes_begin(&imported, &[]);
    assert_eq!(events(&imported), [("alloc", 0), ("alloc", 1), ("free", 0), ("free_completed", 0)]);
    let first = imported.trace.events[0];
    assert_eq!((first.bytes, first.iteration, first.context.phase), (Bytes::new(700), 0, Phase::Other));
    let ticks: Vec<u64> = imported.trace.events.iter().map(|event| event.tick.0).collect();
    assert_eq!(ticks, [0, 1, 2, 3]);
    let reserved: Vec<_> = imported.reserved.iter().map(|point| (point.events, point.bytes.get())).collect();
    assert_eq!(reserved, [(0, 0), (0, 1024 + (2 << 20))]);
}

#[test]
fn blocks_that_are_older_than_the_record_come_first_in_order_of_device_and_address() {
    let segments = vec![
        segment(1, BASE, 0x5000, 0, &[(512, 100, LIVE), (512, 200, PENDING)]),
        segment(0, BASE, 0, 0, &[(1024, 300, LIVE), (1024, 0, IDLE), (1024, 0, IDLE)]),
    ];
    let entries = vec![
        at("alloc", 9, 5),
        entry("free_requested", BASE + 2048, 400, 0x6000, 0),
        at("free_completed", 2, 400),
        at("free_completed", 1, 500),
        at("free_requested", 9, 5),
        at("free_completed", 9, 5),
    ];
    let imported = import(&snapshot(segments, vec![entries, Vec::new()], Vec::new()));
    let expected = [
        ("alloc", 0),
        ("alloc", 1),
        ("free", 1),
        ("alloc", 2),
        ("alloc", 3),
        ("alloc", 4),
        ("free", 4),
        ("alloc", 5),
        ("free", 2),
        ("free_completed", 2),
        ("free_completed", 1),
        ("free", 5),
        ("free_completed", 5),
    ];
    assert_eq!(events(&imported), expected);
    let allocs: Vec<_> = imported.trace.events.iter().filter(|event| event.kind == EventKind::Alloc).collect();
    let sizes: Vec<u64> = allocs.iter().map(|event| event.bytes.get()).collect();
    assert_eq!(sizes, [300, 500, 400, 100, 200, 5]);
    let devices: Vec<u32> = allocs.iter().map(|event| event.device).collect();
    assert_eq!(devices, [0, 0, 0, 1, 1, 0]);
    // Handles become small numbers as they come in the file: entries, then segments.
    let streams: Vec<u64> = allocs.iter().map(|event| event.stream.0).collect();
    assert_eq!(streams, [0, 0, 1, 2, 2, 0]);
    assert!(allocs[..5].iter().all(|event| event.context.phase == Phase::Init));
    assert_eq!(allocs[5].context.phase, Phase::Other);
    notes_begin(
        &imported,
        &[
            "The record does not begin with the job: 5 blocks (1.5 KiB) came before it, 2 of them",
            "The record of device 0 does not have all",
        ],
    );
}

#[test]
fn a_list_of_segments_and_a_snapshot_without_history_give_what_is_live() {
    let segments = || vec![segment(0, BASE, 0, 0, &[(1024, 300, LIVE), (512, 0, IDLE)])];
    for node in [Node::List(segments()), record(segments(), Vec::new()), snapshot(segments(), Vec::new(), Vec::new())] {
        let imported = import(&node);
        assert_eq!(events(&imported), [("alloc", 0)]);
        notes_begin(&imported, &["There is no history, only what is live at the end: 1 block (300 B)"]);
        assert_eq!(imported.reserved.iter().map(|point| point.bytes.get()).collect::<Vec<_>>(), [1536]);
        assert_eq!(imported.settings.is_some(), !matches!(node, Node::List(_)));
    }
}

#[test]
fn snapshots_of_the_first_versions_have_no_addresses_of_blocks_and_no_times() {
    let block = |size, state| Node::Dict(vec![("size", Node::Int(size)), ("state", Node::text(state))]);
    let segment = Node::Dict(vec![
        ("device", Node::Int(0)),
        ("address", Node::Large(BASE)),
        ("total_size", Node::Int(3072)),
        ("stream", Node::Int(0)),
        ("blocks", Node::List(vec![block(2048, IDLE), block(1024, LIVE)])),
    ]);
    let alloc = Node::Dict(vec![
        ("action", Node::text("alloc")),
        ("addr", Node::Large(BASE + 2048)),
        ("size", Node::Int(1024)),
        ("stream", Node::Int(0)),
    ]);
    let node = Node::Dict(vec![
        ("segments", Node::List(vec![segment])),
        ("device_traces", Node::List(vec![Node::List(vec![alloc])])),
    ]);
    let imported = import(&node);
    notes_begin(&imported, &[]);
    assert_eq!(events(&imported), [("alloc", 0)]);
    assert_eq!(imported.settings, None);
}

#[test]
fn gaps_in_the_record_are_closed_and_counted() {
    let segments = || vec![segment(0, BASE, 0, 0, &[(1024, 30, LIVE), (1024, 9, LIVE)])];
    let imported = import(&record(
        segments(),
        vec![
            at("alloc", 0, 10),
            at("alloc", 0, 20),
            at("free_requested", 0, 20),
            at("alloc", 0, 30),
            at("alloc", 1, 7),
            at("free_completed", 1, 7),
            at("free_completed", 1, 7),
            at("free_requested", 1, 8),
            at("free_requested", 1, 8),
            at("free_completed", 1, 8),
        ],
    ));
    let expected = [
        ("alloc", 0),
        ("free", 0),
        ("free_completed", 0),
        ("alloc", 1),
        ("free", 1),
        ("free_completed", 1),
        ("alloc", 2),
        ("alloc", 3),
        ("free", 3),
        ("free_completed", 3),
        ("alloc", 4),
        ("free", 4),
        ("free_completed", 4),
        ("alloc", 5),
    ];
    assert_eq!(events(&imported), expected);
    notes_begin(
        &imported,
        &[
            "2 blocks without an entry for the end",
            "2 blocks without an entry for the allocation",
            "2 entries left out that would free what is free already",
        ],
    );
}

#[test]
fn without_any_completion_a_free_is_all() {
    let imported = import(&record(
        vec![segment(0, BASE, 0, 0, &[(1024, 30, LIVE)])],
        vec![at("alloc", 0, 10), at("free_requested", 0, 10), at("alloc", 0, 30)],
    ));
    assert_eq!(events(&imported), [("alloc", 0), ("free", 0), ("alloc", 1)]);
    notes_begin(&imported, &[]);
}

#[test]
fn a_trace_and_a_file_that_differ_at_the_end_are_told_apart() {
    let imported = import(&record(vec![segment(0, BASE, 0, 0, &[(1024, 30, LIVE)])], vec![at("alloc", 0, 31)]));
    notes_begin(&imported, &["On device 0 31 B are live at the end of the trace, and 30 B in the file."]);
}

#[test]
fn private_pools_are_left_out_and_counted() {
    let segments = vec![
        segment(0, BASE, 0, 0, &[(1024, 30, LIVE)]),
        segment(0, BASE + 1024, 0, 7, &[(1024, 40, LIVE), (1024, 0, IDLE)]),
    ];
    let mut in_pool = at("alloc", 100, 50);
    if let Node::Dict(entries) = &mut in_pool {
        entries.push(("pool_id", Node::Tuple(vec![Node::Int(0), Node::Int(3)])));
    }
    let entries =
        vec![at("segment_alloc", 1, 2048), at("alloc", 0, 30), at("alloc", 1, 40), at("alloc", 2, 41), in_pool];
    let imported = import(&record(segments, entries));
    assert_eq!(events(&imported), [("alloc", 0)]);
    notes_begin(
        &imported,
        &["Private pools of graphs or of the job are left out: 4 entries, 1 block live at the end, 2.0 KiB"],
    );
    assert_eq!(imported.reserved.iter().map(|point| point.bytes.get()).collect::<Vec<_>>(), [1024]);
    // Where nothing else is there, that is why nothing is.
    let nothing = fails(&record(
        vec![segment(0, BASE + 1024, 0, 7, &[(1024, 40, LIVE), (1024, 0, IDLE)])],
        vec![at("segment_alloc", 1, 2048), at("alloc", 1, 40)],
    ));
    assert!(nothing.contains("Private pools of graphs or of the job are left out: 2 entries"), "{nothing}");
}

#[test]
fn entries_that_are_no_allocations_are_named_or_passed_by() {
    let oom = Node::Dict(vec![
        ("action", Node::text("oom")),
        ("device_free", Node::Int(5)),
        ("size", Node::Int(2 << 30)),
        ("stream", Node::Int(0)),
        ("time_us", Node::Int(4)),
    ]);
    let mut padding = at("alloc", 0, 10);
    if let Node::Dict(entries) = &mut padding {
        entries.push(("internal_metadata", Node::text("mallocWithAddress")));
    }
    let entries = vec![
        padding,
        at("alloc", 0, 10),
        oom.clone(),
        oom,
        at("snapshot", 0, 10),
        at("annotate", 0, 10),
        at("teleport", 0, 10),
    ];
    let imported = import(&record(vec![segment(0, BASE, 0, 0, &[(1024, 10, LIVE)])], entries));
    assert_eq!(events(&imported), [("alloc", 0), ("alloc", 1), ("free", 1), ("alloc", 2), ("free", 2)]);
    // What was refused counts as what the job needs, and not as what it has.
    let summary = imported.trace.summary();
    assert_eq!((summary.peak_live.get(), summary.persistent.get()), ((2 << 30) + 10, 10));
    assert_eq!(imported.ending, Ending { refused: Some(Bytes::gib(2)), is_cut: false });
    let cut = Cut { iteration: 0, events: 3, requests: 2, live: Bytes::new(10) };
    assert_eq!(imported.cut(), Some(cut), "the second time it ran out");
    notes_begin(
        &imported,
        &[
            "Memory ran out: 2 requests refused, of 2.00 GiB with 5 B of the device free, 2.00 GiB with 5 B of the device free; in the trace as if served",
            "1 entry left out that PyTorch makes for itself",
            "1 entry left out of kinds that are not known, such as \"teleport\"",
        ],
    );
}

#[test]
fn steps_of_the_profiler_are_iterations() {
    let alloc = |offset: u64, time| entry("alloc", BASE + offset, 10, 0, time);
    let entries = vec![alloc(0, 5), alloc(1, 10), alloc(2, 19), alloc(3, 20), alloc(4, 45), alloc(5, 99)];
    let annotations = vec![
        annotation("ProfilerStep#3", "START", 20),
        annotation("Optimizer.step#AdamW.step", "START", 21),
        annotation("ProfilerStep#2", "END", 19),
        annotation("ProfilerStep#2", "START", 10),
        annotation("ProfilerStep#4", "START", 30),
        annotation("ProfilerStep#5", "START", 40),
    ];
    let segments = vec![segment(0, BASE, 0, 0, &[(1, 10, LIVE); 6])];
    let imported = import(&snapshot(segments, vec![entries], annotations));
    notes_begin(&imported, &["1 annotation left out that no step of a profiler begins with, such as "]);
    assert!(imported.notes[0].contains("Optimizer.step#AdamW.step"), "{:?}", imported.notes);
    let seen: Vec<_> = imported
        .trace
        .events
        .iter()
        .map(|event| (event.kind == EventKind::Mark, event.iteration, event.context.phase))
        .collect();
    let expected = [
        (false, 0, Phase::Init),
        (false, 0, Phase::Other),
        (false, 0, Phase::Other),
        (true, 0, Phase::Other),
        (false, 1, Phase::Other),
        (true, 1, Phase::Other),
        (true, 2, Phase::Other),
        (false, 3, Phase::Other),
        (false, 3, Phase::Other),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn records_of_devices_are_put_together_by_time() {
    let segments = vec![segment(0, BASE, 0, 0, &[(512, 1, LIVE); 3]), segment(1, BASE, 0, 0, &[(512, 1, LIVE); 2])];
    let alloc = |offset: u64, time| entry("alloc", BASE + 512 * offset, 1, 0, time);
    // The second entry is stamped before the first: the order of the file counts.
    let records = vec![vec![alloc(0, 10), alloc(1, 5), alloc(2, 30)], vec![alloc(0, 10), alloc(1, 20)]];
    let imported = import(&snapshot(segments, records, Vec::new()));
    let devices: Vec<u32> = imported.trace.events.iter().map(|event| event.device).collect();
    assert_eq!(devices, [0, 0, 1, 1, 0]);
    notes_begin(&imported, &[]);
}

#[test]
fn the_reserved_curve_follows_segments_and_is_left_out_where_it_cannot_be_right() {
    let segments = || vec![segment(0, BASE, 0, 0, &[(4096, 10, LIVE)])];
    let imported = import(&record(
        segments(),
        vec![at("segment_map", 8, 2048), at("alloc", 0, 10), at("segment_unmap", 8, 2048), at("segment_free", 9, 512)],
    ));
    let reserved: Vec<_> = imported.reserved.iter().map(|point| (point.events, point.bytes.get())).collect();
    assert_eq!(reserved, [(0, 4608), (0, 6656), (1, 4608), (1, 4096)]);

    let more_than_there_is = vec![at("alloc", 0, 10), at("segment_alloc", 0, 5000)];
    let below_zero = vec![at("alloc", 0, 10), at("segment_free", 0, 9000), at("segment_alloc", 0, 9000)];
    let outside = vec![at("alloc", 0, 10), at("alloc", 64, 10), at("free_requested", 64, 10)];
    for (entries, is_told) in [(more_than_there_is, false), (outside, false), (below_zero, false)] {
        let imported = import(&record(segments(), entries));
        assert_eq!(!imported.reserved.is_empty(), is_told, "{:?}", imported.reserved);
        notes_begin(&imported, &["The record of device 0 does not have all of its segments"]);
    }
}

#[test]
fn a_record_as_long_as_a_limit_is_named() {
    let pair = |n: u64| [at("alloc", n, 10), at("free_requested", n, 10)];
    let imported =
        import(&record(vec![segment(0, BASE, 0, 0, &[(4 << 20, 0, IDLE)])], (0..500).flat_map(pair).collect()));
    notes_begin(&imported, &["The record of device 0 has exactly 1000 entries, which looks like its limit"]);
}

#[test]
fn settings_are_read() {
    let imported = import(&record(vec![segment(0, BASE, 0, 0, &[(1024, 10, LIVE)])], Vec::new()));
    let expected = AllocatorSettings {
        text: "expandable_segments:True,large_segment_size_mb:40,colour:red".into(),
        expandable_segments: true,
        max_split_len: None,
        garbage_collection_threshold: Some(0.8),
        roundup_divisions: vec![(1, 0), (2, 0), (256, 4)],
    };
    assert_eq!(imported.settings, Some(expected));
}

#[test]
fn what_is_wrong_is_named_with_its_place() {
    let with = |entry: Node| record(vec![segment(0, BASE, 0, 0, &[(1024, 10, LIVE)])], vec![at("alloc", 0, 10), entry]);
    let without = |key: &str| {
        let Node::Dict(mut entries) = at("alloc", 1, 10) else { panic!("an entry is a dictionary") };
        entries.retain(|(name, _)| *name != key);
        with(Node::Dict(entries))
    };
    let bare = |key: &'static str, value: Node| Node::Dict(vec![("segments", Node::List(Vec::new())), (key, value)]);
    let huge = i64::MAX;
    let cases = [
        (Node::None, "the snapshot: None stands here, not a dictionary"),
        (Node::Dict(vec![]), "the snapshot: 'segments' is missing"),
        (Node::List(vec![Node::Int(5)]), "segments[0]: 5 stands here, not a dictionary"),
        (Node::Dict(vec![("segments", Node::Bool(true))]), "segments: True stands here, not a list"),
        (bare("device_traces", Node::text("x")), "device_traces: \"x\" stands here, not a list"),
        (bare("device_traces", Node::List(vec![Node::None])), "device_traces[0]: None stands here"),
        (bare("external_annotations", Node::List(vec![Node::Float(1.5)])), "external_annotations[0]: 1.5 stands"),
        (without("size"), "device_traces[0][1]: 'size' is missing"),
        (without("addr"), "device_traces[0][1]: 'addr' is missing"),
        (without("action"), "device_traces[0][1]: 'action' is missing"),
        (without("stream"), "device_traces[0][1]: 'stream' is missing"),
        (with(at("alloc", 1, -5)), "device_traces[0][1]: 'size' is -5, not a number of bytes"),
        (with(at("alloc", 1, huge)), "the snapshot: no machine could have this many bytes"),
        (record(vec![segment(-1, BASE, 0, 0, &[])], vec![]), "segments[0]: 'device' is -1, not a whole number"),
        (record(vec![segment(1 << 32, BASE, 0, 0, &[])], vec![]), "segments[0]: 'device' is 4294967296, not a device"),
        (
            record(vec![segment(0, BASE, 0, 0, &[(1024, 10, LIVE), (512, 1, "asleep")])], vec![]),
            "segments[0].blocks[1]: 'state' is \"asleep\", not a state of a block",
        ),
        (record(vec![segment(0, BASE, 0, 0, &[(1024, 0, IDLE)])], vec![]), "there is no event in it"),
    ];
    for (node, expected) in cases {
        let error = fails(&node);
        assert!(error.starts_with(expected), "{error:?}, not {expected:?}");
    }
    let twice = with(entry("segment_alloc", BASE, huge, 0, 0));
    let Node::Dict(mut keys) = twice else { panic!("a snapshot is a dictionary") };
    keys[1].1 = Node::List(vec![Node::List(vec![entry("segment_alloc", BASE, huge, 0, 0); 2])]);
    assert_eq!(fails(&Node::Dict(keys)), "device_traces[0][1]: no machine could have this many bytes");
}

#[test]
fn an_entry_that_is_mentioned_twice_is_refused() {
    let bytes = pickle(&Node::List(vec![segment(0, BASE, 0, 0, &[(1024, 10, LIVE)])]), 4);
    // The list as it is written, then its first item again: number 1, behind the list's own.
    let again = [&bytes[..bytes.len() - 1], b"h\x01a."].concat();
    let again: Vec<u8> = again.iter().copied().take(2).chain(again.iter().copied().skip(11)).collect();
    assert_eq!(read(&again).unwrap_err().to_string(), "segments[1]: the same object as at an earlier place");
}
