//! The strategy state by state, as Figure 9 has it, and all of it at random.

use super::*;
use crate::rng::Rng;
use crate::trace::ContextKey;

fn asked(slot: u32, mib: u64) -> Asked {
    Asked {
        slot,
        event: slot,
        bytes: Bytes::mib(mib),
        stream: StreamId::DEFAULT,
        thread: 0,
        context: ContextKey::UNKNOWN,
        is_dynamic: false,
    }
}

fn gmlake(frag_limit: u64, capacity: Option<u64>) -> Gmlake {
    let rules = GmlakeRules::Paper;
    let options = GmlakeOptions { frag_limit: Bytes::mib(frag_limit), rules, ..GmlakeOptions::default() };
    Gmlake::new(options, capacity.map(Bytes::mib), &CostTable::A100)
}

fn by_the_code(frag_limit: u64, capacity: Option<u64>) -> Gmlake {
    let options = GmlakeOptions { frag_limit: Bytes::mib(frag_limit), ..GmlakeOptions::default() };
    assert_eq!(options.rules, GmlakeRules::Code);
    Gmlake::new(options, capacity.map(Bytes::mib), &CostTable::A100)
}

fn on(stream: u64, asked: Asked) -> Asked {
    Asked { stream: StreamId(stream), ..asked }
}

/// Blocks of their own, of which the job keeps none.
fn create(gmlake: &mut Gmlake, sizes: &[u64]) {
    for (slot, mib) in sizes.iter().enumerate() {
        gmlake.alloc(&asked(slot as u32, *mib)).unwrap();
    }
    (0..sizes.len() as u32).for_each(|slot| give_back(gmlake, slot));
}

/// All calls but events.
fn memory_calls(gmlake: &Gmlake) -> u64 {
    gmlake.calls().total() - gmlake.calls().of(Call::Event)
}

fn give_back(gmlake: &mut Gmlake, slot: u32) {
    gmlake.free(slot);
    gmlake.completed(slot);
}

/// Sizes in MiB.
fn census(gmlake: &Gmlake) -> (Vec<u64>, Vec<(u64, usize)>) {
    let (p, s) = gmlake.census();
    (p.iter().map(|len| len.get() >> 20).collect(), s.iter().map(|(len, parts)| (len.get() >> 20, *parts)).collect())
}

#[test]
fn figure_9_is_walked_from_s1_to_s5() {
    let mut gmlake = gmlake(2, Some(100));
    // Three pBlocks.
    for (slot, mib) in [(0, 40), (1, 10), (2, 20)] {
        gmlake.alloc(&asked(slot, mib)).unwrap();
    }
    assert_eq!((gmlake.states().insufficient, census(&gmlake)), (3, (vec![40, 10, 20], vec![])));
    for slot in [0, 1, 2] {
        give_back(&mut gmlake, slot);
    }
    // S1: an exact match is returned as it is.
    gmlake.alloc(&asked(3, 10)).unwrap();
    assert_eq!((gmlake.states().exact, census(&gmlake)), (1, (vec![40, 10, 20], vec![])));
    // S2: the smallest larger pBlock is split, and its halves are stitched for the next time.
    gmlake.alloc(&asked(4, 16)).unwrap();
    assert_eq!((gmlake.states().single, census(&gmlake)), (1, (vec![40, 10, 16, 4], vec![(20, 2)])));
    // S3: several pBlocks are stitched, and the last of them is split first.
    gmlake.alloc(&asked(5, 42)).unwrap();
    assert_eq!(gmlake.states().multiple, 1);
    assert_eq!(census(&gmlake), (vec![40, 10, 16, 2, 2], vec![(20, 3), (4, 2), (42, 2)]));
    // S4: what is idle and new memory together.
    gmlake.alloc(&asked(6, 12)).unwrap();
    assert_eq!(gmlake.states().insufficient, 4);
    assert_eq!(census(&gmlake), (vec![40, 10, 16, 2, 2, 10], vec![(20, 3), (4, 2), (42, 2), (12, 2)]));
    assert_eq!(gmlake.reserved().now, Bytes::mib(80));
    // S5: there is no new memory.
    assert_eq!(gmlake.alloc(&asked(7, 22)), Err(OutOfMemory));
    assert_eq!(gmlake.states().out_of_memory, 1);
    // The tape: the block that was split is whole again when nobody uses a part of it.
    for slot in [4, 5, 6] {
        give_back(&mut gmlake, slot);
    }
    let before = gmlake.calls().total();
    gmlake.alloc(&asked(8, 20)).unwrap();
    assert_eq!((gmlake.states().exact, gmlake.calls().total()), (2, before));
    gmlake.blocks.invariants().unwrap();
}

#[test]
fn by_the_papers_rule_blocks_below_the_limit_serve_exact_matches_only() {
    let mut gmlake = gmlake(64, None);
    for (slot, mib) in [(0, 40), (1, 40)] {
        gmlake.alloc(&asked(slot, mib)).unwrap();
        give_back(&mut gmlake, slot);
    }
    assert_eq!(gmlake.reserved().now, Bytes::mib(40), "the same block twice");
    gmlake.alloc(&asked(2, 20)).unwrap();
    gmlake.alloc(&asked(3, 60)).unwrap();
    assert_eq!((gmlake.reserved().now, gmlake.states().insufficient), (Bytes::mib(120), 3));
}

#[test]
fn by_the_codes_rules_what_is_split_merges_and_only_large_requests_are_stitched() {
    let mut gmlake = by_the_code(64, None);
    let first = gmlake.alloc(&asked(0, 30)).unwrap();
    give_back(&mut gmlake, 0);
    let calls = memory_calls(&gmlake);
    // Three of ten fit in the block of thirty, whatever the limit is, and thirty fit again.
    let parts: Vec<_> = (0..3).map(|slot| gmlake.alloc(&asked(slot, 10)).unwrap().get() - first.get()).collect();
    assert_eq!(parts, [0, 10 << 20, 20 << 20]);
    [1, 0, 2].into_iter().for_each(|slot| give_back(&mut gmlake, slot));
    assert_eq!(census(&gmlake), (vec![30], vec![]));
    assert_eq!(memory_calls(&gmlake), calls);
    gmlake.alloc(&asked(0, 50)).unwrap();
    gmlake.alloc(&asked(1, 10)).unwrap();
    give_back(&mut gmlake, 0);
    // Sixty are below the limit and get new memory, whatever is idle; seventy are above, and get what is.
    gmlake.alloc(&asked(2, 60)).unwrap();
    assert_eq!((gmlake.reserved().now, gmlake.states().multiple), (Bytes::mib(30 + 50 + 60), 0));
    gmlake.alloc(&asked(3, 70)).unwrap();
    assert_eq!((gmlake.reserved().now, gmlake.states().multiple), (Bytes::mib(30 + 50 + 60), 1));
    assert_eq!(census(&gmlake).1, [(70, 2)]);
    gmlake.blocks.invariants().unwrap();
    // Where even all of them are too little, S4 creates what is asked for, and takes none.
    give_back(&mut gmlake, 3);
    gmlake.alloc(&asked(4, 80)).unwrap();
    assert_eq!(gmlake.reserved().now, Bytes::mib(30 + 50 + 60 + 80));
    gmlake.blocks.invariants().unwrap();
}

#[test]
fn by_the_codes_rules_less_than_ten_mib_create_twenty() {
    let mut gmlake = by_the_code(512, None);
    gmlake.alloc(&asked(0, 4)).unwrap();
    assert_eq!((gmlake.reserved().now, census(&gmlake).0), (Bytes::mib(20), vec![4, 16]));
    gmlake.alloc(&asked(1, 12)).unwrap();
    gmlake.alloc(&asked(2, 10)).unwrap();
    assert_eq!((gmlake.reserved().now, census(&gmlake).0), (Bytes::mib(30), vec![4, 12, 4, 10]));
}

#[test]
fn by_the_codes_rules_the_small_pool_ends_at_one_mib() {
    let mut gmlake = by_the_code(512, None);
    gmlake.alloc(&asked(0, 1)).unwrap();
    assert_eq!((gmlake.reserved().now, gmlake.calls().malloc), (Bytes::mib(2), 1));
    let just_above = Asked { bytes: Bytes::new((1 << 20) + 1), ..asked(1, 1) };
    gmlake.alloc(&just_above).unwrap();
    assert_eq!((gmlake.calls().malloc, census(&gmlake).0), (1, vec![2, 18]));
}

#[test]
fn by_the_codes_rules_a_larger_block_goes_before_a_stitched_one_that_fits() {
    let mut gmlake = by_the_code(16, None);
    create(&mut gmlake, &[20, 16]);
    gmlake.alloc(&asked(0, 36)).unwrap();
    gmlake.alloc(&asked(1, 50)).unwrap();
    [0, 1].into_iter().for_each(|slot| give_back(&mut gmlake, slot));
    assert_eq!(census(&gmlake), (vec![20, 16, 50], vec![(36, 2)]));
    gmlake.alloc(&asked(2, 36)).unwrap();
    assert_eq!((gmlake.states().single, census(&gmlake).0), (1, vec![20, 16, 36, 14]));
    // Where no block is large enough a stitched one serves with its first bytes, and lends the rest to others.
    gmlake.alloc(&asked(3, 30)).unwrap();
    assert_eq!((gmlake.states().single, census(&gmlake).0), (2, vec![20, 10, 6, 36, 14]));
    gmlake.alloc(&asked(4, 6)).unwrap();
    assert_eq!((gmlake.states().exact, gmlake.reserved().now), (1, Bytes::mib(86)));
    give_back(&mut gmlake, 3);
    // One whose bytes are not all free serves nobody.
    gmlake.alloc(&asked(5, 22)).unwrap();
    assert_eq!(gmlake.states().multiple, 2);
    gmlake.blocks.invariants().unwrap();
}

#[test]
fn by_the_codes_rules_a_stitched_block_serves_no_less_than_a_tenth_of_it() {
    for (mib, reserved) in [(11, 130 + 12), (13, 130)] {
        let mut gmlake = by_the_code(16, None);
        create(&mut gmlake, &[10; 13]);
        gmlake.alloc(&asked(0, 130)).unwrap();
        give_back(&mut gmlake, 0);
        gmlake.alloc(&asked(1, mib)).unwrap();
        assert_eq!(gmlake.reserved().now, Bytes::mib(reserved), "{mib}");
    }
}

#[test]
fn by_the_codes_rules_neighbours_merge_where_a_stitched_block_shows_them() {
    let mut gmlake = by_the_code(16, None);
    create(&mut gmlake, &[30, 20]);
    gmlake.alloc(&asked(0, 10)).unwrap();
    gmlake.alloc(&asked(1, 36)).unwrap();
    assert_eq!(census(&gmlake), (vec![30, 10, 6, 4], vec![(36, 2)]));
    [0, 1].into_iter().for_each(|slot| give_back(&mut gmlake, slot));
    assert_eq!(census(&gmlake), (vec![30, 20], vec![(36, 2)]));
    // It finds its chunks in the middle of the block that they are a part of now.
    gmlake.alloc(&asked(2, 36)).unwrap();
    assert_eq!((gmlake.states().exact, census(&gmlake).0), (1, vec![30, 10, 6, 4]));
    gmlake.blocks.invariants().unwrap();
}

#[test]
fn by_the_codes_rules_all_stitches_that_serve_nobody_go_above_the_limit() {
    let options =
        GmlakeOptions { frag_limit: Bytes::mib(16), stitched_max: Bytes::mib(30), ..GmlakeOptions::default() };
    let mut gmlake = Gmlake::new(options, None, &CostTable::A100);
    create(&mut gmlake, &[10, 10, 10]);
    gmlake.alloc(&asked(0, 20)).unwrap();
    give_back(&mut gmlake, 0);
    // A chunk of it is in use; another of the same size is made, and is the only one then.
    gmlake.alloc(&asked(1, 10)).unwrap();
    gmlake.alloc(&asked(2, 10)).unwrap();
    give_back(&mut gmlake, 1);
    gmlake.alloc(&asked(3, 20)).unwrap();
    assert_eq!((gmlake.states().multiple, gmlake.states().stitches_freed), (2, 1));
    assert_eq!((census(&gmlake).1, gmlake.calls().of(Call::Unmap)), (vec![(20, 2)], 1));
    gmlake.blocks.invariants().unwrap();
}

#[test]
fn by_the_codes_rules_idle_memory_of_every_kind_goes_before_memory_runs_out() {
    // Too small, or another stream's.
    for second in [asked(1, 120), on(7, asked(1, 100))] {
        let mut gmlake = by_the_code(512, Some(150));
        create(&mut gmlake, &[100]);
        gmlake.alloc(&second).unwrap();
        assert_eq!(gmlake.reserved().now, second.bytes);
        // Chunks were created until there was no room, and given back, and then those of the idle block.
        let calls = gmlake.calls();
        assert_eq!((calls.of(Call::Release), calls.of(Call::Unmap), calls.of(Call::Unreserve)), (25 + 50, 1, 1));
        assert_eq!(calls.of(Call::Create), 50 + 25 + second.bytes.get() / CHUNK.get());
    }
    // Of the small pool for the other, and the other way round.
    let small = Asked { bytes: Bytes::new(100), ..asked(0, 1) };
    for (first, second, reserved) in [(small, asked(1, 22), 22), (asked(1, 22), small, 2)] {
        let mut gmlake = by_the_code(512, Some(23));
        gmlake.alloc(&first).unwrap();
        give_back(&mut gmlake, first.slot);
        gmlake.alloc(&second).unwrap();
        assert_eq!(gmlake.reserved().now, Bytes::mib(reserved));
    }
    // Of one that is split nothing goes; what a stream had not let go of yet does.
    let mut gmlake = by_the_code(512, Some(60));
    create(&mut gmlake, &[30]);
    gmlake.alloc(&asked(0, 10)).unwrap();
    assert_eq!(gmlake.alloc(&asked(1, 40)), Err(OutOfMemory));
    assert_eq!((gmlake.states().out_of_memory, gmlake.reserved().now), (1, Bytes::mib(30)));
    gmlake.free(0);
    gmlake.alloc(&asked(1, 40)).unwrap();
    gmlake.completed(0);
    assert_eq!((gmlake.reserved().now, census(&gmlake).0), (Bytes::mib(40), vec![40]));
}

#[test]
fn by_the_codes_rules_what_gives_memory_back_takes_the_stitches_that_show_it_along() {
    let mut gmlake = by_the_code(16, Some(40));
    create(&mut gmlake, &[10, 10, 10]);
    gmlake.alloc(&asked(0, 30)).unwrap();
    give_back(&mut gmlake, 0);
    // It serves with chunks of two blocks; the third goes to another stream under it.
    gmlake.alloc(&asked(1, 12)).unwrap();
    gmlake.alloc(&on(1, asked(2, 20))).unwrap();
    assert_eq!(census(&gmlake), (vec![2, 8, 10, 20], vec![(30, 2)]));
    gmlake.blocks.invariants().unwrap();
    give_back(&mut gmlake, 1);
    assert_eq!(census(&gmlake), (vec![10, 10, 20], vec![]));
    // An idle one goes with its blocks.
    gmlake.alloc(&asked(3, 20)).unwrap();
    give_back(&mut gmlake, 3);
    gmlake.alloc(&on(1, asked(4, 20))).unwrap();
    assert_eq!(census(&gmlake), (vec![20, 20], vec![]));
    gmlake.blocks.invariants().unwrap();
}

#[test]
fn by_the_codes_rules_a_free_records_an_event_or_one_on_each_other_stream() {
    let small = Asked { bytes: Bytes::new(100), ..asked(0, 1) };
    for (asked, rules, expected) in [
        (small, GmlakeRules::Code, [1, 1, 2]),
        (asked(0, 4), GmlakeRules::Code, [1, 1, 2]),
        (asked(0, 4), GmlakeRules::Paper, [0, 0, 2]),
    ] {
        let options = GmlakeOptions { rules, ..GmlakeOptions::default() };
        let mut gmlake = Gmlake::new(options, None, &CostTable::A100);
        for (streams, expected) in [&[][..], &[0, 0], &[1, 0, 2, 1]].into_iter().zip(expected) {
            let before = gmlake.calls().of(Call::Event);
            gmlake.alloc(&asked).unwrap();
            streams.iter().for_each(|stream| gmlake.record_stream(0, StreamId(*stream)));
            give_back(&mut gmlake, 0);
            assert_eq!(gmlake.calls().of(Call::Event) - before, expected, "{asked:?} {rules:?} {streams:?}");
        }
    }
}

#[test]
fn beyond_the_limit_the_stitches_used_longest_ago_go() {
    let rules = GmlakeRules::Paper;
    let options = GmlakeOptions { frag_limit: CHUNK, stitches_max: 2, rules, ..GmlakeOptions::default() };
    let mut gmlake = Gmlake::new(options, None, &CostTable::A100);
    gmlake.alloc(&asked(0, 64)).unwrap();
    give_back(&mut gmlake, 0);
    for mib in [2, 4, 8, 16] {
        gmlake.alloc(&asked(0, mib)).unwrap();
        give_back(&mut gmlake, 0);
    }
    let (p, s) = census(&gmlake);
    assert_eq!((p.iter().sum::<u64>(), s.len()), (64, 2));
    assert!(gmlake.states().stitches_freed > 0);
    gmlake.blocks.invariants().unwrap();
}

#[test]
fn beyond_so_many_bytes_the_stitches_used_longest_ago_go_too() {
    let (frag_limit, rules, stitched_max) = (CHUNK, GmlakeRules::Paper, Bytes::mib(80));
    let options = GmlakeOptions { frag_limit, rules, stitched_max, ..GmlakeOptions::default() };
    let mut gmlake = Gmlake::new(options, None, &CostTable::A100);
    gmlake.alloc(&asked(0, 64)).unwrap();
    give_back(&mut gmlake, 0);
    // 64 over 2 and 62, and then 62 over 4 and 58: the second is one too many.
    for (mib, expected) in [(2, vec![(64, 2)]), (4, vec![(62, 2)])] {
        gmlake.alloc(&asked(0, mib)).unwrap();
        give_back(&mut gmlake, 0);
        assert_eq!(census(&gmlake).1, expected);
    }
    assert_eq!(gmlake.states().stitches_freed, 1);
    gmlake.blocks.invariants().unwrap();
}

#[test]
fn more_than_any_device_has_is_out_of_memory() {
    let mut gmlake = gmlake(2, None);
    gmlake.alloc(&Asked { bytes: Bytes::new((1 << 62) - 1), ..asked(0, 2) }).unwrap();
    assert_eq!(gmlake.alloc(&Asked { bytes: Bytes::new(1 << 62), ..asked(1, 2) }), Err(OutOfMemory));
    assert_eq!(gmlake.alloc(&Asked { bytes: Bytes::new(1), ..asked(2, 2) }), Err(OutOfMemory));
}

#[test]
fn small_requests_are_the_caching_allocators() {
    let mut gmlake = gmlake(2, Some(24));
    gmlake.alloc(&Asked { bytes: Bytes::new(100), ..asked(0, 2) }).unwrap();
    assert_eq!(gmlake.reserved().now, Bytes::mib(2));
    gmlake.alloc(&asked(1, 20)).unwrap();
    assert_eq!(gmlake.reserved().now, Bytes::mib(22));
    // 1.5 MiB take a segment of 20, and there is no room for one beside the block.
    assert!(gmlake.alloc(&Asked { bytes: Bytes::new(3 << 19), ..asked(2, 2) }).is_err());
    give_back(&mut gmlake, 0);
    assert_eq!(gmlake.calls().malloc, 1);
}

#[test]
fn names_of_blocks_that_are_gone_are_used_again() {
    let mut gmlake = by_the_code(16, Some(60));
    for _ in 0..100 {
        create(&mut gmlake, &[20, 10, 12]);
        create(&mut gmlake, &[42]);
        create(&mut gmlake, &[60]);
    }
    assert!(gmlake.blocks.names() <= 8, "{}", gmlake.blocks.names());
}

#[test]
fn whatever_is_asked_blocks_stay_whole() {
    let mut rng = Rng::new(7);
    use GmlakeRules::{Code, Paper};
    let unlimited = [(2, Paper), (16, Paper), (2, Code), (16, Code)].map(|(limit, rules)| (limit, rules, None));
    for (frag_limit, rules, capacity) in unlimited.into_iter().chain([(2, Code, Some(700)), (16, Code, Some(700))]) {
        let frag_limit = Bytes::mib(frag_limit);
        let options = GmlakeOptions { frag_limit, rules, stitches_max: 20, stitched_max: Bytes::mib(500) };
        let mut gmlake = Gmlake::new(options, capacity.map(Bytes::mib), &CostTable::A100);
        let mut live: Vec<u32> = Vec::new();
        let mut ends: Vec<(u64, u64)> = vec![(0, 0); 64];
        for _ in 0..2_000 {
            let slot = rng.index(64) as u32;
            match live.iter().position(|one| *one == slot) {
                Some(at) => {
                    live.swap_remove(at);
                    give_back(&mut gmlake, slot);
                }
                None => {
                    let mib = 2 + 2 * rng.index(30) as u64;
                    let Ok(address) = gmlake.alloc(&on(rng.index(2) as u64, asked(slot, mib))) else { continue };
                    let address = address.get();
                    ends[slot as usize] = (address, address + (mib << 20));
                    let clashes = live.iter().map(|one| ends[*one as usize]);
                    let mut clashes = clashes.filter(|(start, end)| *start < address + (mib << 20) && address < *end);
                    assert_eq!(clashes.next(), None);
                    live.push(slot);
                }
            }
            gmlake.blocks.invariants().unwrap();
        }
        assert_eq!(gmlake.states().out_of_memory > 0, capacity.is_some());
        let (p, _) = gmlake.census();
        assert_eq!(p.into_iter().sum::<Bytes>(), gmlake.reserved().now);
    }
}
