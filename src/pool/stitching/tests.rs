//! One behaviour each, on real bytes: what two blocks share shows as an overwritten pattern. Long random runs are in `tests/model`.

use super::*;
use crate::driver::host::{HostDriver, HostOptions};
use crate::driver::layers::faulty::{Faults, Faulty};
use crate::driver::layers::metered::{Meter, Metered};
use crate::driver::{Call, Driver};
use crate::ids::{ChunkId, DeviceId};

const STREAM: StreamId = StreamId(0);
const OTHER: StreamId = StreamId(9);
/// Everything may be stitched.
const CONFIG: StitchConfig = StitchConfig {
    fragmentation_limit: Bytes::mib(2),
    packed_below: Some(Bytes::ZERO),
    stitch_limit: Bytes::gib(1),
    remembered_max: 4096,
    is_on: true,
};

struct Bench {
    host: Arc<HostDriver>,
    faulty: Arc<Faulty>,
    meter: Arc<Metered>,
    device: Arc<Device>,
    pool: StitchingPool,
    next_chunk: u64,
}

fn mib(n: u64) -> Bytes {
    Bytes::mib(n)
}

impl Bench {
    fn new(alias: bool, config: StitchConfig) -> Bench {
        Bench::over(HostOptions { alias, ..HostOptions::with_devices(&[Bytes::gib(4)]) }, config)
    }

    fn over(options: HostOptions, config: StitchConfig) -> Bench {
        let host = Arc::new(HostDriver::new(options));
        let faulty = Faults::around(Arc::clone(&host) as Arc<dyn Driver>);
        let meter = Meter::around(Arc::clone(&faulty) as Arc<dyn Driver>, Arc::new(crate::clock::SystemClock::new()));
        let device = Device::open(Arc::clone(&meter) as Arc<dyn Driver>, DeviceId(0)).unwrap();
        let pool = StitchingPool::new(Arc::clone(&device), mib(2), config);
        Bench { host, faulty, meter, device, pool, next_chunk: 0 }
    }

    fn grow(&mut self, len: u64) {
        let chunks: Vec<_> = (0..len / 2)
            .map(|_| {
                self.next_chunk += 1;
                Arc::new(Chunk::create(&self.device, ChunkId(self.next_chunk), mib(2)).unwrap())
            })
            .collect();
        self.pool.grow(&chunks, STREAM).unwrap();
        self.checked();
    }

    fn checked(&self) {
        self.pool.invariants().unwrap();
    }

    fn alloc(&mut self, len: u64) -> Option<DeviceAddress> {
        self.alloc_on(len, STREAM)
    }

    fn alloc_on(&mut self, len: u64, stream: StreamId) -> Option<DeviceAddress> {
        let allocation = self.pool.alloc(mib(len), stream);
        self.checked();
        allocation.map(|allocation| allocation.address)
    }

    /// So many blocks of 2 MiB side by side, every other of them idle; says which are live.
    fn comb(&mut self, count: usize) -> Vec<DeviceAddress> {
        let blocks: Vec<_> = (0..count).map(|_| self.alloc(2).unwrap()).collect();
        blocks.iter().step_by(2).for_each(|block| self.free(*block));
        blocks.into_iter().skip(1).step_by(2).collect()
    }

    fn stitch(&mut self, len: u64) -> Stitched {
        let stitched = self.pool.stitch(mib(len), STREAM, Effort::Usual).unwrap();
        self.checked();
        stitched
    }

    fn stitched(&mut self, len: u64) -> DeviceAddress {
        match self.stitch(len) {
            Stitched::Served(allocation) => allocation.address,
            Stitched::Lacks(lacks) => panic!("lacks {lacks}"),
        }
    }

    fn free(&mut self, address: DeviceAddress) {
        assert!(self.pool.free(address, STREAM).is_some(), "it was live");
        self.checked();
    }

    /// Memory calls that `what` makes.
    fn calls(&mut self, what: impl FnOnce(&mut Bench)) -> u64 {
        let before = self.meter.layer().counts();
        what(self);
        self.meter.layer().counts().since(&before).memory_calls()
    }

    fn write(&self, address: DeviceAddress, len: u64, value: u8) {
        for at in 0..len {
            self.host.write(address.checked_add(mib(at)).unwrap(), &[value]).unwrap();
        }
    }

    fn reads(&self, address: DeviceAddress, len: u64, value: u8) -> bool {
        (0..len).all(|at| {
            let mut byte = [0];
            self.host.read(address.checked_add(mib(at)).unwrap(), &mut byte).unwrap();
            byte[0] == value
        })
    }
}

#[test]
fn s1_an_idle_block_of_this_size_serves_again_without_a_call() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(8);
    let first = bench.alloc(8).unwrap();
    bench.free(first);
    let calls = bench.calls(|bench| assert_eq!(bench.alloc(8), Some(first)));
    assert_eq!(calls, 0);
    assert_eq!(bench.pool.counts().exact, 2);
}

#[test]
fn s2_a_split_costs_no_call_and_the_old_size_is_matched_again() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(8);
    let calls = bench.calls(|bench| {
        let front = bench.alloc(2).unwrap();
        let back = bench.alloc(6).unwrap();
        bench.free(front);
        bench.free(back);
        assert_eq!(bench.alloc(8), Some(front));
        assert_eq!(bench.alloc(2), None, "all of it is in use");
        bench.free(front);
        assert_eq!(bench.alloc(2), Some(front));
    });
    assert_eq!(calls, 0);
    let counts = bench.pool.counts();
    assert_eq!((counts.split, counts.exact, counts.joined), (1, 3, 0));
}

#[test]
fn the_smallest_larger_block_is_split() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(20);
    bench.grow(8);
    bench.grow(12);
    let small = bench.alloc(8).unwrap();
    bench.free(small);
    assert_eq!(bench.alloc(6), Some(small));
}

#[test]
fn idle_neighbours_serve_together_without_a_call() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(12);
    let blocks: Vec<_> = (0..6).map(|_| bench.alloc(2).unwrap()).collect();
    for block in &blocks[1..5] {
        bench.free(*block);
    }
    let calls = bench.calls(|bench| {
        assert_eq!(bench.alloc(6), Some(blocks[1]));
        assert_eq!(bench.alloc(2), Some(blocks[4]));
        assert_eq!(bench.alloc(2), None);
    });
    assert_eq!(calls, 0);
    assert_eq!(bench.pool.counts().joined, 1);
}

#[test]
fn s3_scattered_blocks_are_stitched_into_one_range_and_kept() {
    for alias in [true, false] {
        let mut bench = Bench::new(alias, CONFIG);
        bench.grow(16);
        let live = bench.comb(8);
        live.iter().for_each(|block| bench.write(*block, 2, 0x11));
        assert_eq!(bench.alloc(6), None, "no three neighbours are idle");
        let range = bench.stitched(6);
        bench.write(range, 6, 0x77);
        assert!(live.iter().all(|block| bench.reads(*block, 2, 0x11)), "stitching touched a live block");
        assert!(bench.reads(range, 6, 0x77));
        bench.free(range);
        let calls = bench.calls(|bench| assert_eq!(bench.alloc(6), Some(range)));
        assert_eq!(calls, 0, "alias {alias}");
        let counts = bench.pool.counts();
        assert_eq!((counts.stitched, counts.stitched_bytes), (1, mib(6)));
    }
}

#[test]
fn a_stitched_block_is_busy_while_any_of_its_parts_is() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(8);
    let blocks: Vec<_> = (0..4).map(|_| bench.alloc(2).unwrap()).collect();
    bench.free(blocks[0]);
    bench.free(blocks[2]);
    let range = bench.stitched(4);
    bench.free(range);
    let part = bench.alloc(2).unwrap();
    assert!([blocks[0], blocks[2]].contains(&part));
    assert_eq!(bench.stitch(4), Stitched::Lacks(mib(2)));
}

#[test]
fn stitching_says_how_much_is_missing() {
    let mut bench = Bench::new(true, CONFIG);
    assert_eq!(bench.stitch(6), Stitched::Lacks(mib(6)));
    bench.grow(4);
    assert_eq!(bench.stitch(10), Stitched::Lacks(mib(6)));
    bench.grow(6);
    bench.stitched(10);
}

#[test]
fn blocks_below_the_fragmentation_limit_are_not_stitched() {
    let config = StitchConfig { fragmentation_limit: mib(4), ..CONFIG };
    let mut bench = Bench::new(true, config);
    bench.grow(12);
    bench.comb(6);
    assert_eq!(bench.stitch(6), Stitched::Lacks(mib(6)));
    let last = bench.pool.stitch(mib(6), STREAM, Effort::Last).unwrap();
    assert!(matches!(last, Stitched::Served(_)), "unless there is no other way");
    bench.checked();
}

#[test]
fn what_is_asked_for_beside_idle_blocks_can_be_stitched_itself() {
    let config = StitchConfig { fragmentation_limit: mib(8), ..CONFIG };
    let mut bench = Bench::new(true, config);
    bench.grow(8);
    assert_eq!(bench.stitch(10), Stitched::Lacks(mib(8)));
    bench.grow(8);
    bench.stitched(10);
}

#[test]
fn the_least_recently_used_stitched_block_goes_at_the_limit() {
    let config = StitchConfig { stitch_limit: mib(10), ..CONFIG };
    let mut bench = Bench::new(true, config);
    bench.grow(16);
    bench.comb(8);
    let four = bench.stitched(4);
    bench.free(four);
    let six = bench.stitched(6);
    bench.free(six);
    assert_eq!(bench.alloc(4), Some(four));
    bench.free(four);
    // Ten are in use; eight more only fit when both go, six first.
    bench.stitched(8);
    assert_eq!(bench.pool.counts().evicted, 2);
}

#[test]
fn while_nothing_may_be_unmapped_stitched_blocks_stay_above_the_limit_and_no_chunk_moves() {
    for alias in [true, false] {
        let config = StitchConfig { stitch_limit: mib(10), ..CONFIG };
        let mut bench = Bench::new(alias, config);
        bench.grow(16);
        let live = bench.comb(8);
        bench.pool.keep_mapped(true);
        let unmapped = |bench: &Bench| bench.meter.layer().counts().of(Call::Unmap).calls;
        let before = unmapped(&bench);
        for len in [4, 6, 8] {
            match bench.stitch(len) {
                Stitched::Served(block) => bench.free(block.address),
                Stitched::Lacks(lacks) => assert!(!alias && lacks == mib(len), "{lacks}"),
            }
        }
        assert_eq!((unmapped(&bench), bench.pool.counts().evicted), (before, 0));
        bench.pool.keep_mapped(false);
        bench.free(live[0]);
        bench.stitched(10);
        assert_eq!(bench.pool.counts().evicted, if alias { 3 } else { 0 });
    }
}

/// Found by `tests/model`: the parts were merged, and the stitched block then listed its chunks in an order that it does not show them in.
#[test]
fn a_cut_does_not_heal_while_a_stitched_block_shows_its_sides_in_another_order() {
    let mut bench = Bench::new(true, StitchConfig { remembered_max: 2, ..CONFIG });
    bench.grow(6);
    bench.grow(2);
    let (front, other) = (bench.alloc(2).unwrap(), bench.alloc(2).unwrap());
    let rest = bench.alloc(4).unwrap();
    for block in [front, other, rest] {
        bench.free(block);
    }
    // The largest first: the rest comes before the front.
    let all = bench.stitched(8);
    bench.write(all, 8, 0x55);
    bench.free(all);
    // One request too many to be remembered: the split is forgotten.
    assert_eq!(bench.alloc(10), None);
    assert_eq!(bench.alloc(8), Some(all));
    assert!(bench.reads(rest, 4, 0x55) && bench.reads(front, 2, 0x55));
}

#[test]
fn bytes_of_another_stream_are_used_only_after_it_has_passed() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(8);
    let block = bench.alloc(8).unwrap();
    bench.free(block);
    assert_eq!(bench.alloc_on(8, OTHER), None);
    assert_eq!(bench.pool.unpassed_streams(OTHER), [STREAM]);
    let moment = bench.pool.moment();
    bench.pool.note_passed(STREAM, moment - 1);
    assert_eq!(bench.alloc_on(8, OTHER), None, "it was freed after that");
    bench.pool.note_passed(STREAM, moment);
    assert_eq!(bench.alloc_on(8, OTHER), Some(block));
    assert_eq!(bench.pool.unpassed_streams(OTHER), []);
}

#[test]
fn idle_chunks_leave_the_pool_oldest_first_and_whole() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(16);
    let blocks: Vec<_> = (0..4).map(|_| bench.alloc(4).unwrap()).collect();
    bench.write(blocks[1], 4, 0x33);
    for at in [3, 0, 2] {
        bench.free(blocks[at]);
    }
    let gone = bench.pool.trim(mib(6));
    bench.checked();
    assert_eq!(gone.len(), 3);
    assert_eq!(bench.pool.held(), mib(10));
    drop(gone);
    assert_eq!(bench.host.counts().0, 5);
    assert!(bench.reads(blocks[1], 4, 0x33));
    bench.free(blocks[1]);
    assert_eq!(bench.pool.trim(Bytes::MAX).len(), 5);
    bench.checked();
    assert_eq!(bench.host.counts(), (0, 0, 0));
}

/// Where memory stays with its addresses, the middle one of three blocks of a range cannot be unmapped when all should leave.
fn with_a_block_that_did_not_leave() -> Bench {
    let options = HostOptions { memory_stays_with_addresses: true, ..HostOptions::with_devices(&[Bytes::gib(4)]) };
    let mut bench = Bench::over(options, CONFIG);
    bench.grow(12);
    let blocks: Vec<_> = (0..3).map(|_| bench.alloc(4).unwrap()).collect();
    blocks.into_iter().for_each(|block| bench.free(block));
    // Each is waited for and unmapped.
    bench.faulty.layer().fail_nth(3);
    assert_eq!(bench.pool.trim(Bytes::MAX).len(), 0, "whoever got the others would get no memory with them");
    assert_eq!(bench.faulty.layer().injected(), 1);
    bench.checked();
    let usage = bench.pool.usage();
    assert_eq!((usage.held, usage.stitchable), (mib(12), mib(4)));
    bench
}

#[test]
fn chunks_whose_memory_stays_with_their_addresses_leave_with_the_last_of_their_range() {
    let mut bench = with_a_block_that_did_not_leave();
    let block = bench.alloc(4).unwrap();
    assert_eq!(bench.pool.trim(Bytes::MAX).len(), 0, "the range serves");
    bench.free(block);
    let gone = bench.pool.trim(mib(2));
    bench.checked();
    assert_eq!((gone.len(), bench.pool.held()), (6, Bytes::ZERO));
    drop(gone);
    assert_eq!(bench.host.counts(), (0, 0, 0));
}

#[test]
fn chunks_that_wait_for_the_end_of_their_range_are_there_at_the_end_of_the_pool() {
    let mut bench = with_a_block_that_did_not_leave();
    let gone = bench.pool.take_all();
    bench.checked();
    assert_eq!((gone.len(), bench.pool.held()), (6, Bytes::ZERO));
    drop(gone);
    assert_eq!(bench.host.counts(), (0, 0, 0));
}

/// Every driver call of stitching fails once; afterwards the pool is sound, nothing is lost, and the next try works.
#[test]
fn stitching_that_fails_at_any_call_loses_nothing() {
    for alias in [true, false] {
        for n in 1.. {
            let mut bench = Bench::new(alias, CONFIG);
            bench.grow(16);
            let live = bench.comb(8);
            bench.faulty.layer().fail_nth(n);
            let outcome = bench.pool.stitch(mib(6), STREAM, Effort::Usual);
            let is_over = bench.faulty.layer().injected() == 0;
            bench.faulty.layer().fail_nth(0);
            bench.checked();
            let orphans = bench.pool.orphans().len() as u64;
            if outcome.is_err() {
                assert_eq!(bench.pool.held(), mib(16 - 2 * orphans), "call {n}, alias {alias}");
                bench.stitched(6);
            }
            live.into_iter().for_each(|block| bench.free(block));
            if is_over {
                assert!(n > 5, "only {n} calls were tried");
                break;
            }
        }
    }
}

/// One iteration of a job with several layers whose requests are alike.
fn iterate(bench: &mut Bench, stream: StreamId) -> Vec<DeviceAddress> {
    let mut kept = Vec::new();
    let mut served = Vec::new();
    for layer in 0..6 {
        for len in [4, 10, 2, 2 + layer % 2 * 4] {
            let address = bench.alloc_on(len, stream).unwrap();
            served.push(address);
            if len == 10 {
                kept.push(address);
            } else {
                bench.pool.free(address, stream).unwrap();
            }
        }
    }
    for address in kept.into_iter().rev() {
        bench.pool.free(address, stream).unwrap();
    }
    bench.checked();
    served
}

#[test]
fn a_job_that_repeats_itself_is_served_as_last_time_and_without_a_search() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(128);
    let mut last = Vec::new();
    for _ in 0..4 {
        last = iterate(&mut bench, STREAM);
    }
    let searched = bench.pool.counts().searched;
    assert_eq!(iterate(&mut bench, STREAM), last);
    assert_eq!(bench.pool.counts().searched, searched);
}

#[test]
fn what_served_last_time_does_not_serve_another_stream_before_the_first_has_passed() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(128);
    iterate(&mut bench, STREAM);
    let first = bench.alloc(4).unwrap();
    bench.free(first);
    let other = bench.alloc_on(4, OTHER).unwrap();
    assert_ne!(first, other, "the block of the last iteration may still be in use");
    assert!(bench.pool.free(other, OTHER).is_some());
    bench.pool.note_passed(STREAM, bench.pool.moment());
    iterate(&mut bench, OTHER);
}

#[test]
fn a_card_that_a_split_gave_to_another_block_is_not_taken_for_the_first() {
    let mut bench = Bench::new(true, CONFIG);
    for len in [2, 8, 16] {
        bench.grow(len);
    }
    let once = |bench: &mut Bench, len: u64| {
        let address = bench.alloc(len).unwrap();
        bench.free(address);
        address
    };
    once(&mut bench, 2);
    once(&mut bench, 16);
    let (older, front) = (bench.alloc(8).unwrap(), bench.alloc(8).unwrap());
    bench.free(older);
    bench.free(front);
    once(&mut bench, 2);
    // The state is the one in which the block of 16 MiB served; its front, of 8 now, has its card.
    assert_eq!(once(&mut bench, 8), older);
}

#[test]
fn sizes_that_are_never_asked_for_again_are_not_remembered_beyond_a_bound() {
    let mut bench = Bench::new(true, CONFIG);
    bench.grow(2048);
    let mut most = 0;
    for len in (100..=1900).rev().step_by(2) {
        let address = bench.pool.alloc(mib(len), STREAM).expect("all of it is idle").address;
        assert!(bench.pool.free(address, STREAM).is_some());
        most = most.max(bench.pool.shown_parts);
    }
    bench.checked();
    // One cut adds a part to each SBlock that shows the block.
    let one_cut = bench.pool.sblocks.len();
    assert!(most <= cut::SHOWN_PARTS_MAX + one_cut, "{most} parts are remembered");
    assert!(most >= cut::SHOWN_PARTS_MAX, "the bound was not reached: {most} parts");
    assert!(bench.alloc(2048).is_some(), "what was forgotten is still one range");
}
