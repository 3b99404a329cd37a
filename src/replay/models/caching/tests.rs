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

#[test]
fn garbage_is_collected_by_age_where_there_is_a_limit() {
    let conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9";
    let mut model = model(conf, Some(100));
    for slot in 0..3 {
        model.alloc(&asked(slot, 20 * MIB, 0)).unwrap();
    }
    give_back(&mut model, 0);
    give_back(&mut model, 1);
    // 60 are more than 45: the older idle ones go until 45 are left, or all that are old enough.
    model.alloc(&asked(3, 24 * MIB, 0)).unwrap();
    assert!(model.calls().free >= 1, "{:?}", model.calls());
    let mut unlimited = self::model("garbage_collection_threshold:0.5", Some(100));
    for slot in 0..3 {
        unlimited.alloc(&asked(slot, 20 * MIB, 0)).unwrap();
    }
    give_back(&mut unlimited, 0);
    unlimited.alloc(&asked(3, 24 * MIB, 0)).unwrap();
    assert_eq!(unlimited.calls().free, 0, "no fraction, no limit");
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
