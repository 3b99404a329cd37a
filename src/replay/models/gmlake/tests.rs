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
        context: ContextKey::UNKNOWN,
        is_dynamic: false,
    }
}

fn gmlake(frag_limit: u64, capacity: Option<u64>) -> Gmlake {
    let rules = GmlakeRules::Paper;
    let options = GmlakeOptions { frag_limit: Bytes::mib(frag_limit), rules, ..GmlakeOptions::default() };
    Gmlake::new(options, capacity.map(Bytes::mib), &CostTable::A100)
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
    let options = GmlakeOptions { frag_limit: Bytes::mib(64), ..GmlakeOptions::default() };
    let mut gmlake = Gmlake::new(options, None, &CostTable::A100);
    let first = gmlake.alloc(&asked(0, 30)).unwrap();
    give_back(&mut gmlake, 0);
    let calls = gmlake.calls().total();
    // Three of ten fit in the block of thirty, whatever the limit is, and thirty fit again.
    let parts: Vec<_> = (0..3).map(|slot| gmlake.alloc(&asked(slot, 10)).unwrap().get() - first.get()).collect();
    assert_eq!(parts, [0, 10 << 20, 20 << 20]);
    [1, 0, 2].into_iter().for_each(|slot| give_back(&mut gmlake, slot));
    assert_eq!(census(&gmlake), (vec![30], vec![]));
    assert_eq!(gmlake.calls().total(), calls);
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
fn whatever_is_asked_blocks_stay_whole() {
    let mut rng = Rng::new(7);
    use GmlakeRules::{Code, Paper};
    for (frag_limit, rules) in [(2, Paper), (16, Paper), (2, Code), (16, Code)] {
        let frag_limit = Bytes::mib(frag_limit);
        let options = GmlakeOptions { frag_limit, rules, stitches_max: 20, stitched_max: Bytes::mib(500) };
        let mut gmlake = Gmlake::new(options, None, &CostTable::A100);
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
                    let address = gmlake.alloc(&asked(slot, mib)).unwrap().get();
                    ends[slot as usize] = (address, address + (mib << 20));
                    let clashes = live.iter().map(|one| ends[*one as usize]);
                    let mut clashes = clashes.filter(|(start, end)| *start < address + (mib << 20) && address < *end);
                    assert_eq!(clashes.next(), None);
                    live.push(slot);
                }
            }
            gmlake.blocks.invariants().unwrap();
        }
        let (p, _) = gmlake.census();
        assert_eq!(p.into_iter().sum::<Bytes>(), gmlake.reserved().now);
    }
}
