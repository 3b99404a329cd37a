//! Rules one by one; what comes of all of them together is held against PyTorch's own allocator in `tests/replay`.

use super::*;
use crate::rng::Rng;
use crate::trace::ContextKey;

const MIB: u64 = 1 << 20;

fn asked(slot: u32, bytes: u64, stream: u64) -> Asked {
    Asked {
        slot,
        event: slot,
        bytes: Bytes::new(bytes),
        stream: StreamId(stream),
        thread: 0,
        context: ContextKey::UNKNOWN,
        is_dynamic: false,
    }
}

fn model(conf: &str, capacity: Option<u64>) -> CachingAllocator {
    let conf = Conf::parse(conf, Version::NEWEST).unwrap();
    CachingAllocator::new(conf, capacity.map(Bytes::mib), &CostTable::A100)
}

fn give_back(model: &mut CachingAllocator, slot: u32) {
    model.free(slot);
    model.completed(slot);
}

fn reserved(model: &CachingAllocator) -> u64 {
    model.reserved().now.get() / MIB
}

#[test]
fn requests_take_segments_of_2_and_20_mib_and_their_own() {
    let mut model = model("", None);
    for (slot, bytes, expected) in [(0, 1, 2), (1, MIB, 4), (2, MIB + 1, 24), (3, 10 * MIB, 34), (4, 11 * MIB, 46)] {
        // A stream for each, so that none finds what another left.
        model.alloc(&asked(slot, bytes, u64::from(slot))).unwrap();
        assert_eq!(reserved(&model), expected, "after {bytes} bytes");
    }
    assert_eq!(model.calls().malloc, 5);
}

#[test]
fn the_rest_of_a_block_is_split_off_only_where_it_is_worth_it() {
    let mut model = model("", None);
    let first = model.alloc(&asked(0, 20 * MIB, 0)).unwrap();
    give_back(&mut model, 0);
    // 1 MiB too much stays with the block.
    assert_eq!(model.alloc(&asked(0, 19 * MIB, 0)).unwrap(), first);
    model.alloc(&asked(1, 2 * MIB, 0)).unwrap();
    assert_eq!(reserved(&model), 40, "nothing was left of the first segment");
    give_back(&mut model, 0);
    model.alloc(&asked(0, 19 * MIB - 512, 0)).unwrap();
    model.alloc(&asked(2, MIB + 512, 0)).unwrap();
    assert_eq!(reserved(&model), 40);
    model.invariants().unwrap();
}

#[test]
fn a_block_belongs_to_its_stream_and_waits_for_the_others() {
    let mut model = model("", Some(40));
    let first = model.alloc(&asked(0, 20 * MIB, 1)).unwrap();
    model.record_stream(0, StreamId(2));
    model.record_stream(0, StreamId(2));
    model.free(0);
    assert_eq!(model.calls().of(Call::Event), 1);
    // Not completed: a new segment, though the bytes are given back.
    assert_ne!(model.alloc(&asked(1, 20 * MIB, 1)).unwrap(), first);
    model.completed(0);
    // Another stream's request does not find it, and has it given back to the driver instead.
    model.alloc(&asked(2, 20 * MIB, 2)).unwrap();
    assert_eq!((reserved(&model), model.calls().free), (40, 1));
    // What waits is completed rather than to run out of memory.
    model.free(1);
    model.alloc(&asked(3, 20 * MIB, 3)).unwrap();
    model.completed(1);
    assert_eq!(model.alloc(&asked(4, 2 * MIB, 3)), Err(OutOfMemory));
    model.invariants().unwrap();
}

#[test]
fn a_stream_that_uses_a_block_again_and_again_has_one_event() {
    let mut model = model("", None);
    for round in 1..3 {
        model.alloc(&asked(0, 20 * MIB, 1)).unwrap();
        // Its own stream has none.
        for stream in [2, 3, 2, 1, 3] {
            model.record_stream(0, StreamId(stream));
        }
        give_back(&mut model, 0);
        assert_eq!(model.calls().of(Call::Event), 2 * round);
    }
    model.alloc(&asked(0, 20 * MIB, 1)).unwrap();
    give_back(&mut model, 0);
    assert_eq!(model.calls().of(Call::Event), 4, "nobody else used it this time");
}

#[test]
fn after_waiting_for_streams_the_pool_is_not_searched_again() {
    let mut model = model("", Some(40));
    for slot in [0, 1] {
        model.alloc(&asked(slot, 10 * MIB, 0)).unwrap();
    }
    model.alloc(&asked(2, 20 * MIB, 0)).unwrap();
    give_back(&mut model, 2);
    model.alloc(&asked(3, 5 * MIB, 0)).unwrap();
    // Its segment has another tenant, so the wait frees 15 MiB that fit and gives nothing back.
    model.alloc(&asked(4, 12 * MIB, 0)).unwrap();
    model.record_stream(4, StreamId(1));
    model.free(4);
    assert_eq!(model.alloc(&asked(5, 12 * MIB, 0)), Err(OutOfMemory));
    assert!(model.alloc(&asked(6, 12 * MIB, 0)).is_ok(), "the next try finds them");
}

#[test]
fn blocks_over_the_split_size_are_never_split_nor_given_to_small_requests() {
    let mut model = model("max_split_size_mb:32", Some(100));
    model.alloc(&asked(0, 64 * MIB, 0)).unwrap();
    give_back(&mut model, 0);
    model.alloc(&asked(1, 16 * MIB, 0)).unwrap();
    assert_eq!(reserved(&model), 80);
    // 64 is 20 or more above 44: too much for it. It is given back for it, and nothing else is.
    model.alloc(&asked(2, 44 * MIB, 0)).unwrap();
    assert_eq!((reserved(&model), model.calls().free), (60, 1));
    give_back(&mut model, 2);
    let before = model.calls().malloc;
    model.alloc(&asked(3, 34 * MIB, 0)).unwrap();
    assert_eq!(model.calls().malloc, before, "10 above 34 is near enough");
    model.invariants().unwrap();
}

/// 0.5 of nine tenths of 100 MiB: above 45 MiB garbage is collected, and 90 are the limit.
const GARBAGE: &str = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9";

#[test]
fn garbage_is_collected_by_age_where_there_is_a_limit() {
    let mut model = model(GARBAGE, Some(100));
    let first = model.alloc(&asked(0, 20 * MIB, 0)).unwrap();
    for (slot, mib) in [(1, 20), (2, 10)] {
        model.alloc(&asked(slot, mib * MIB, 0)).unwrap();
    }
    give_back(&mut model, 0);
    give_back(&mut model, 1);
    // The fourth search finds the first block, which is freed again: at the fifth it is one old, the other two, and their mean is 1.5.
    assert_eq!(model.alloc(&asked(0, 20 * MIB, 0)).unwrap(), first);
    give_back(&mut model, 0);
    // 50 are 5 more than 45: the older one is enough.
    model.alloc(&asked(3, 24 * MIB, 0)).unwrap();
    assert_eq!((reserved(&model), model.calls().free, model.calls().malloc), (54, 1, 4));
    assert_eq!(model.alloc(&asked(4, 20 * MIB, 0)).unwrap(), first, "the younger one is still there");
    model.invariants().unwrap();
}

#[test]
fn garbage_of_one_age_goes_together() {
    let mut model = model(GARBAGE, Some(100));
    for slot in 0..3 {
        model.alloc(&asked(slot, 20 * MIB, 0)).unwrap();
    }
    give_back(&mut model, 0);
    give_back(&mut model, 1);
    // 60 are 15 more than 45. One would do, and both are as old as the mean.
    model.alloc(&asked(3, 24 * MIB, 0)).unwrap();
    assert_eq!((reserved(&model), model.calls().free), (44, 2));
    let mut unlimited = self::model("garbage_collection_threshold:0.5", Some(100));
    for slot in 0..3 {
        unlimited.alloc(&asked(slot, 20 * MIB, 0)).unwrap();
    }
    give_back(&mut unlimited, 0);
    unlimited.alloc(&asked(3, 24 * MIB, 0)).unwrap();
    assert_eq!((reserved(&unlimited), unlimited.calls().free), (84, 0), "no fraction, no limit");
}

#[test]
fn who_throws_at_once_gives_nothing_back_first() {
    for (conf, expected, left, calls) in
        [("", Ok(()), 30, (2, 1)), ("throw_on_cudamalloc_oom:True", Err(OutOfMemory), 20, (1, 0))]
    {
        let mut model = model(conf, Some(40));
        model.alloc(&asked(0, 20 * MIB, 0)).unwrap();
        give_back(&mut model, 0);
        assert_eq!(model.alloc(&asked(1, 30 * MIB, 0)).map(drop), expected, "{conf}");
        assert_eq!((reserved(&model), (model.calls().malloc, model.calls().free)), (left, calls), "{conf}");
    }
}

#[test]
fn large_segments_are_as_large_as_asked_for() {
    let mut plain = model("large_segment_size_mb:40", None);
    for (slot, bytes, stream, expected) in
        [(0, 2 * MIB, 0, 40), (1, 10 * MIB - 512, 0, 40), (2, 10 * MIB, 1, 50), (3, MIB, 1, 52), (4, 3 * MIB, 1, 92)]
    {
        plain.alloc(&asked(slot, bytes, stream)).unwrap();
        assert_eq!(reserved(&plain), expected, "after {bytes} bytes");
    }
    let mut expandable = model("large_segment_size_mb:40,expandable_segments:True", Some(200));
    for (slot, expected) in [(0, (40, 1)), (1, (80, 2)), (2, (120, 3))] {
        expandable.alloc(&asked(slot, 30 * MIB, 0)).unwrap();
        assert_eq!((reserved(&expandable), expandable.calls().of(Call::Create)), expected);
    }
    expandable.alloc(&asked(3, 30 * MIB, 0)).unwrap();
    assert_eq!(reserved(&expandable), 120, "four times thirty");
}

#[test]
fn more_than_any_device_has_is_out_of_memory() {
    for conf in ["", "expandable_segments:True", "large_segment_size_mb:4398046511104,expandable_segments:True"] {
        let mut model = model(conf, None);
        assert!(model.alloc(&asked(0, 1 << 61, 0)).is_ok(), "{conf}");
        for slot in 1..6 {
            assert_eq!(model.alloc(&asked(slot, 1 << 62, u64::from(slot))), Err(OutOfMemory), "{conf}");
        }
        model.invariants().unwrap();
    }
}

#[test]
fn a_fraction_is_a_limit_on_what_is_reserved() {
    let mut model = model("per_process_memory_fraction:0.5", Some(80));
    model.alloc(&asked(0, 40 * MIB, 0)).unwrap();
    assert_eq!(model.alloc(&asked(1, 2 * MIB, 0)), Err(OutOfMemory));
}

#[test]
fn an_expandable_segment_grows_in_place_by_whole_pages() {
    let mut model = model("expandable_segments:True", Some(200));
    let first = model.alloc(&asked(0, 30 * MIB, 0)).unwrap();
    assert_eq!(reserved(&model), 40);
    let second = model.alloc(&asked(1, 30 * MIB, 0)).unwrap();
    assert_eq!((reserved(&model), second.get() - first.get()), (60, 30 * MIB));
    assert_eq!((model.calls().of(Call::Create), model.calls().of(Call::SetAccess)), (3, 2));
    // The two together, where a plain allocator would have two holes.
    give_back(&mut model, 0);
    give_back(&mut model, 1);
    assert_eq!(model.alloc(&asked(2, 60 * MIB, 0)).unwrap(), first);
    assert_eq!(reserved(&model), 60);
    model.invariants().unwrap();
}

#[test]
fn the_range_of_an_expandable_segment_is_the_devices_or_what_is_asked_for() {
    // How many ranges three requests take: on a device of any size, and on one of 200 MiB, of which half holds two of them.
    for (reserve, ranges) in [(None, [1, 1]), (Some("0.5"), [1, 2]), (Some("1000000"), [1, 1]), (Some("0.05G"), [3, 3])]
    {
        for (capacity, ranges) in [None, Some(200)].into_iter().zip(ranges) {
            let conf = reserve.map_or_else(String::new, |reserve| format!(",expandable_segments_reserve:{reserve}"));
            let mut model = model(&format!("expandable_segments:True{conf}"), capacity);
            for slot in 0..3 {
                model.alloc(&asked(slot, 40 * MIB, 0)).unwrap();
            }
            assert_eq!((model.calls().of(Call::Reserve), reserved(&model)), (ranges, 120), "{conf} {capacity:?}");
            model.invariants().unwrap();
        }
    }
    // One allocation lies in one range.
    let mut model = model("expandable_segments:True,expandable_segments_reserve:0.05G", None);
    assert!(model.alloc(&asked(0, 70 * MIB, 0)).is_err());
    assert_eq!(reserved(&model), 0);
}

#[test]
fn under_pressure_an_expandable_segment_gives_up_whole_pages_that_are_free() {
    let mut model = model("expandable_segments:True", Some(100));
    model.alloc(&asked(0, 10 * MIB, 0)).unwrap();
    model.alloc(&asked(1, 70 * MIB, 0)).unwrap();
    give_back(&mut model, 1);
    // Another stream has a segment of its own; 3 pages inside the free block go to it.
    model.alloc(&asked(2, 60 * MIB, 1)).unwrap();
    assert_eq!((reserved(&model), model.calls().of(Call::Unmap)), (80, 3));
    give_back(&mut model, 0);
    give_back(&mut model, 2);
    assert_eq!(model.alloc(&asked(3, 120 * MIB, 2)), Err(OutOfMemory));
    assert_eq!(reserved(&model), 0, "nothing was in use: all ranges are empty");
    model.invariants().unwrap();
}

#[test]
fn whatever_is_asked_blocks_do_not_overlap_and_their_books_are_right() {
    for (seed, conf) in [
        "",
        "expandable_segments:True",
        "max_split_size_mb:32",
        "expandable_segments:True,max_split_size_mb:32",
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
        "roundup_power2_divisions:4",
    ]
    .into_iter()
    .enumerate()
    {
        let mut rng = Rng::new(seed as u64);
        let mut model = model(conf, Some(512));
        let mut live: Vec<(u32, u64, u64)> = Vec::new();
        let mut pending: Vec<u32> = Vec::new();
        for _ in 0..3_000 {
            let slot = rng.index(64) as u32;
            let at = live.iter().position(|(held, ..)| *held == slot);
            match at {
                Some(at) => {
                    live.swap_remove(at);
                    if rng.chance(300) {
                        model.record_stream(slot, StreamId(9));
                        model.free(slot);
                        pending.push(slot);
                    } else {
                        give_back(&mut model, slot);
                    }
                }
                None if pending.contains(&slot) => {
                    pending.retain(|one| *one != slot);
                    model.completed(slot);
                }
                None => {
                    let bytes = if rng.chance(500) { 1 + rng.index(1 << 20) } else { 1 + rng.index(40 << 20) } as u64;
                    if let Ok(address) = model.alloc(&asked(slot, bytes, rng.index(2) as u64)) {
                        let (start, end) = (address.get(), address.get() + bytes);
                        assert!(live.iter().all(|(_, other, last)| *last <= start || end <= *other), "{conf}");
                        live.push((slot, start, end));
                    }
                }
            }
            model.invariants().unwrap_or_else(|wrong| panic!("{conf}: {wrong}"));
            assert!(model.reserved().now <= Bytes::mib(512));
        }
    }
}
