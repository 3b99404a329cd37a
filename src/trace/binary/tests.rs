//! Binary traces: what is written is read, and whatever is changed, cut or impossible is refused where it is.

use super::*;
use crate::ids::StreamId;
use crate::rng::{Rng, mix};
use crate::trace::{Context, Event, EventKind, Flaw, Phase, Trace, TraceError};
use crate::units::{Bytes, Tick};

fn written(trace: &Trace) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&mut bytes, trace).unwrap();
    bytes
}

fn event(kind: EventKind, id: u64) -> Event {
    let context = Context::default();
    let (tick, bytes, stream) = (Tick(0), Bytes::ZERO, StreamId(0));
    Event { tick, kind, id, bytes, stream, iteration: 0, context, is_dynamic: false, device: 0, thread: 0 }
}

/// A trace with everything in it that a trace can have, much of it again and again.
fn random(rng: &mut Rng, len: usize) -> Trace {
    let names: Vec<String> =
        (0..1 + rng.index(6)).map(|n| if n == 0 { String::new() } else { format!("m{n}.\u{e4},\" ") }).collect();
    let mut trace = Trace { events: Vec::new(), modules: names };
    let edge = |rng: &mut Rng, max: u64| match rng.below(8) {
        0 => max,
        1 => rng.next_u64() % (max / 2),
        _ => rng.below(4),
    };
    let option = |rng: &mut Rng| rng.chance(500).then(|| edge(rng, u64::from(u32::MAX)) as u32);
    let (mut live, mut freed) = (Vec::new(), Vec::new());
    let mut last = event(EventKind::Alloc, 0);
    let mut next = 0_u64;
    while trace.events.len() < len {
        let mut event = last;
        (event.id, event.bytes) = (0, Bytes::ZERO);
        event.tick.0 = event.tick.0.saturating_add(if rng.chance(3) { edge(rng, u64::MAX) } else { rng.below(5) });
        event.kind = EventKind::ALL[rng.index(EventKind::ALL.len())].1;
        match event.kind {
            EventKind::Alloc => {
                event.id = if rng.chance(50) { rng.next_u64() } else { next };
                next = event.id.wrapping_add(1);
                event.bytes = Bytes::new(512 * rng.below(50));
                live.push(event.id);
            }
            EventKind::FreeCompleted if !freed.is_empty() => event.id = freed.swap_remove(rng.index(freed.len())),
            EventKind::Free if !live.is_empty() => {
                event.id = live.swap_remove(rng.index(live.len()));
                freed.push(event.id);
            }
            EventKind::RecordStream if !live.is_empty() => event.id = live[rng.index(live.len())],
            kind if kind.has_id() => continue,
            _ => {}
        }
        if rng.chance(100) {
            event.stream = StreamId(edge(rng, u64::MAX));
            event.iteration = edge(rng, u64::from(u32::MAX - 1)) as u32;
            event.is_dynamic = rng.chance(500);
            (event.device, event.thread) =
                (edge(rng, u64::from(u32::MAX)) as u32, edge(rng, u64::from(u32::MAX)) as u32);
        }
        if rng.chance(300) {
            let module = rng.index(trace.modules.len()) as u32;
            let phase = Phase::ALL[rng.index(Phase::ALL.len())].1;
            event.context = Context { phase, microbatch: option(rng), chunk: option(rng), module };
        }
        trace.events.push(event);
        last = event;
    }
    trace
}

#[test]
fn any_trace_reads_back_as_it_was() {
    let mut rng = Rng::new(7);
    for round in 0..200 {
        let len = 1 + rng.index(if round == 0 { 30_000 } else { 300 });
        let mut trace = random(&mut rng, len);
        // Some of it again, as iterations are.
        if rng.chance(500) {
            let more: Vec<Event> = trace.events.iter().filter(|event| !event.kind.has_id()).copied().collect();
            let tick = trace.events.last().unwrap().tick;
            trace.events.extend(more.into_iter().map(|event| Event { tick, ..event }));
        }
        let again = read(&written(&trace)[..]).unwrap();
        assert_eq!((again.events, again.modules), (trace.events, trace.modules), "round {round}");
    }
}

#[test]
fn a_book_that_is_full_is_begun_anew_on_both_sides() {
    let len = book::LINES_MAX as u64 * 5 / 2;
    let sized = |id| Event { tick: Tick(id), bytes: Bytes::new(id % 100_000), ..event(EventKind::Alloc, id) };
    let trace = Trace { events: (0..len).map(sized).collect(), modules: vec![String::new()] };
    assert_eq!(read(&written(&trace)[..]).unwrap().events, trace.events);
}

#[test]
fn a_repeated_iteration_costs_a_byte_an_event() {
    let mut trace = Trace { events: Vec::new(), modules: vec![String::new()] };
    for iteration in 0..10 {
        for n in 0..1000 {
            let id = iteration * 1000 + n;
            let bytes = Bytes::new(mix(n) % (1 << 30));
            trace.events.push(Event {
                tick: Tick(2 * id),
                iteration: iteration as u32,
                bytes,
                ..event(EventKind::Alloc, id)
            });
            trace.events.push(Event {
                tick: Tick(2 * id + 1),
                iteration: iteration as u32,
                ..event(EventKind::Free, id)
            });
        }
    }
    let len = written(&trace).len();
    assert!(len < 20_000 + 10_000, "{len} bytes");
}

#[test]
fn no_changed_byte_and_no_cut_goes_unseen() {
    let bytes = written(&random(&mut Rng::new(9), 120));
    for at in 0..bytes.len() {
        assert!(read(&bytes[..at]).is_err(), "cut at {at}");
        for bit in [1, 0x80] {
            let mut changed = bytes.clone();
            changed[at] ^= bit;
            assert!(read(&changed[..]).is_err(), "byte {at} of {}", bytes.len());
        }
    }
    let longer = [&bytes[..], &[0]].concat();
    let Err(TraceError::Block { at, flaw: Flaw::Trailing, .. }) = read(&longer[..]) else { panic!("it goes on") };
    assert_eq!(at, bytes.len() as u64);
}

/// A file with these blocks, rightly sealed.
fn file(blocks: &[(u8, &[u8])]) -> Vec<u8> {
    let mut file = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    for (block, (kind, bytes)) in blocks.iter().enumerate() {
        file.push(*kind);
        file.extend((bytes.len() as u32).to_le_bytes());
        file.extend_from_slice(bytes);
        file.extend(checksum(block as u64, *kind, bytes).to_le_bytes());
    }
    file
}

#[test]
fn what_is_wrong_is_named_with_block_and_byte() {
    // One allocation of 5 bytes: a new line, an allocation in the context as before and with the id as foretold.
    let alloc: &[u8] = &[1, SAME_CONTEXT | SAME_ID, 5];
    let named = |name: &[u8]| [&[2, name.len() as u8], name].concat();
    assert_eq!(read(&file(&[(EVENTS, alloc), (END, &[1, 0])])[..]).unwrap().events.len(), 1);
    let mut other = file(&[(END, &[0, 0])]);
    other[6] = 9;
    let swapped = file(&[(EVENTS, alloc), (EVENTS, &[0])]);
    let cases = [
        (b"tick,event".to_vec(), "block 0, byte 0 of the trace: this is not a binary trace"),
        (b"STTR".to_vec(), "block 0, byte 0 of the trace: the file ends here"),
        (other, "block 0, byte 6 of the trace: the trace is of version 9, and this build reads versions 1 and 2"),
        (swapped[..8].to_vec(), "block 0, byte 8 of the trace: the file ends here"),
        (file(&[(EVENTS, alloc)]), "block 1, byte 20 of the trace: the file ends here"),
        (file(&[(7, alloc)]), "block 0, byte 13 of the trace: there is no block of kind 7"),
        (
            [&file(&[])[..], &[1, 255, 255, 255, 255]].concat(),
            "block 0, byte 8 of the trace: a block of 4294967295 bytes",
        ),
        ([&file(&[])[..], &[1, 255, 255, 0, 0, 9]].concat(), "block 0, byte 14 of the trace: the file ends here"),
        (file(&[(EVENTS, &[0])]), "block 0, byte 13 of the trace: nothing is foretold here"),
        (file(&[(EVENTS, alloc), (EVENTS, &[4])]), "block 1, byte 25 of the trace: the book has no such line"),
        (file(&[(EVENTS, &[1, 7])]), "block 0, byte 13 of the trace: there is no such kind of event"),
        (file(&[(EVENTS, &[1, 0, 7, 0])]), "block 0, byte 13 of the trace: there is no such phase"),
        (file(&[(EVENTS, &[1, RARE | SAME_CONTEXT, 0x80, 0])]), "block 0, byte 13 of the trace: the flags of an event"),
        (file(&[(EVENTS, &[1, SAME_CONTEXT | SAME_ID, 0x85, 0])]), "block 0, byte 13 of the trace: a number is longer"),
        (file(&[(EVENTS, &[0x80; 11])]), "block 0, byte 13 of the trace: a number is longer than any"),
        (file(&[(EVENTS, &alloc[..2])]), "block 0, byte 13 of the trace: the block ends inside an event"),
        (
            file(&[(EVENTS, alloc), (EVENTS, &[1, SAME_CONTEXT | 1, 2])]),
            "block 1, byte 25 of the trace: 18446744073709551615 was never",
        ),
        (
            file(&[(EVENTS, &[alloc, &[1, 1, MODULE, 0, 3]].concat())]),
            "block 0, byte 16 of the trace: there is no such module",
        ),
        (file(&[(EVENTS, &[2, 200, 200, 1])]), "block 0, byte 13 of the trace: the block ends"),
        (file(&[(EVENTS, &[2, 200, 200, 200, 1])]), "block 0, byte 13 of the trace: the name of a module is too long"),
        (file(&[(EVENTS, &[2, 1, 0xff])]), "block 0, byte 13 of the trace: the name of a module is not UTF-8"),
        (
            file(&[(EVENTS, &[&named(b"a")[..], &named(b"a")].concat())]),
            "block 0, byte 16 of the trace: the name of a module is there twice",
        ),
        (file(&[(EVENTS, &named(b""))]), "block 0, byte 13 of the trace: the name of a module is there twice"),
        (
            file(&[(EVENTS, alloc), (END, &[2, 0])]),
            "block 1, byte 25 of the trace: the trace has 1 events, and its end counts 2",
        ),
        (file(&[(EVENTS, alloc), (END, &[1, 1])]), "block 1, byte 25 of the trace: the trace has 0 modules"),
        (file(&[(EVENTS, alloc), (END, &[1, 0, 0])]), "block 1, byte 25 of the trace: the end has more"),
        (file(&[(END, &[0, 0])]), "there is no event in it"),
    ];
    for (bytes, expected) in cases {
        let error = crate::error::chain(&read(&bytes[..]).unwrap_err());
        assert!(error.starts_with(expected), "{bytes:?} gives {error:?}, not {expected:?}");
    }
}

#[test]
fn a_writer_refuses_what_no_reader_takes() {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let alloc = event(EventKind::Alloc, 0);
    let in_module = |module| Event { context: Context { module, ..Context::default() }, ..alloc };
    let cases = [
        (
            vec![Event { tick: Tick(2), ..alloc }, Event { tick: Tick(1), ..alloc }],
            names(&[""]),
            "event 1: tick 1 comes after",
        ),
        (vec![in_module(1)], names(&[""]), "event 0 is in module 1 of 1"),
        (vec![in_module(2)], names(&["", "a", "a"]), "there are two modules called 'a'"),
        (vec![alloc], names(&["", "a", ""]), "there are two modules called ''"),
        (vec![alloc], vec![String::new(), "x".repeat(70_000)], "the name of a module has 70000 bytes"),
    ];
    for (events, modules, expected) in cases {
        let error = write(Vec::new(), &Trace { events, modules }).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error:?}, not {expected:?}");
    }
}
