//! One behaviour each; random runs with moves, trims and failing drivers are in `tests/model`.

use super::*;
use crate::driver::sim::{SimDriver, SimOptions};
use crate::ids::{ChunkId, DeviceId};

const GRANULE: u64 = 2 << 20;
const ONE: StreamId = StreamId(0);
const OTHER: StreamId = StreamId(7);

struct Bench {
    device: Arc<Device>,
    pool: PackedPool,
    next: u64,
}

impl Bench {
    fn new() -> Bench {
        let device =
            Device::open(Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(4)]))), DeviceId(0)).unwrap();
        Bench { pool: PackedPool::new(Arc::clone(&device), Bytes::new(GRANULE)), device, next: 0 }
    }

    fn chunks(&mut self, count: u64) -> Vec<Arc<Chunk>> {
        let ids = self.next..self.next + count;
        self.next += count;
        ids.map(|id| Arc::new(Chunk::create(&self.device, ChunkId(id), Bytes::new(GRANULE)).unwrap())).collect()
    }

    /// Serves a request, growing by what it lacks; says where it is and by how many chunks the pool grew.
    fn ask(&mut self, bytes: u64, stream: StreamId) -> (DeviceAddress, u64) {
        let bytes = Bytes::new(bytes);
        let lacks = match self.pool.alloc(bytes, stream) {
            Some(address) => return (address, 0),
            None => self.pool.lacks(bytes, stream, Prefer::FewChunks).unwrap().get() / GRANULE,
        };
        let chunks = self.chunks(lacks);
        self.pool.grow(&chunks, bytes, stream).unwrap();
        self.pool.invariants().unwrap();
        (self.pool.alloc(bytes, stream).expect("it grew by what was lacking"), lacks)
    }

    fn free(&mut self, address: DeviceAddress) {
        self.pool.free(address).unwrap();
        self.pool.invariants().unwrap();
    }
}

#[test]
fn requests_lie_side_by_side_and_chunks_matter_at_the_end_alone() {
    let mut bench = Bench::new();
    let (first, chunks) = bench.ask(3 << 20, ONE);
    assert_eq!(chunks, 2);
    let (second, chunks) = bench.ask((5 << 20) - 100, ONE);
    assert_eq!((second, chunks), (first.checked_add(Bytes::mib(3)).unwrap(), 2));
    assert_eq!(bench.ask(512, ONE).1, 1);
    assert_eq!((bench.pool.held(), bench.pool.free_bytes()), (Bytes::mib(10), Bytes::mib(2) - Bytes::new(512)));
    assert_eq!(bench.pool.len_of(second), Some(Bytes::mib(5)));
    assert_eq!(bench.pool.chunks_at(second).len(), 3);
    assert_eq!(bench.pool.free(first), Some(Bytes::mib(3)));
    assert_eq!(bench.pool.free(first), None);
}

#[test]
fn the_shortest_stretch_with_room_serves() {
    let mut bench = Bench::new();
    let at: Vec<DeviceAddress> = [6, 1, 4, 1, 5].map(|mib| bench.ask(mib << 20, ONE).0).into();
    [at[0], at[2]].into_iter().for_each(|address| bench.free(address));
    assert_eq!(bench.ask(3 << 20, ONE), (at[2], 0));
    assert_eq!(bench.ask(3 << 20, ONE), (at[0], 0));
}

#[test]
fn streams_do_not_share_a_range() {
    let mut bench = Bench::new();
    let (first, _) = bench.ask(2 << 20, ONE);
    bench.free(first);
    assert_eq!(bench.ask(2 << 20, OTHER).1, 1);
    assert_eq!(bench.ask(2 << 20, ONE), (first, 0));
}

#[test]
fn idle_chunks_leave_and_their_place_is_filled_again() {
    let mut bench = Bench::new();
    let at: Vec<DeviceAddress> = [2, 10, 2].map(|mib| bench.ask(mib << 20, ONE).0).into();
    bench.free(at[1]);
    assert_eq!(bench.pool.usage().idle_chunks, Bytes::mib(10));
    let taken = bench.pool.trim(Bytes::mib(5));
    bench.pool.invariants().unwrap();
    assert_eq!((taken.len(), bench.pool.held()), (3, Bytes::mib(8)));
    // Four of the ten are left, so six lack; at the end it would be ten.
    assert_eq!(bench.pool.lacks(Bytes::mib(10), ONE, Prefer::FewChunks), Some(Bytes::mib(6)));
    bench.pool.grow(&taken, Bytes::mib(10), ONE).unwrap();
    bench.pool.invariants().unwrap();
    assert_eq!(bench.ask(10 << 20, ONE), (at[1], 0));
}

#[test]
fn idle_chunks_move_to_where_the_range_grows() {
    let mut bench = Bench::new();
    let at: Vec<DeviceAddress> = [4, 2, 4, 2, 3].map(|mib| bench.ask(mib << 20, ONE).0).into();
    [at[0], at[2]].into_iter().for_each(|address| bench.free(address));
    // One byte more than fits anywhere: the end lacks five mebibytes beside the one that is free there.
    let lacks = bench.pool.lacks(Bytes::mib(6), ONE, Prefer::FewNew(0)).unwrap();
    assert_eq!(lacks, Bytes::mib(6));
    assert_eq!(bench.pool.grow_by_moving(Vec::new(), Bytes::mib(6), ONE).unwrap(), 3);
    bench.pool.invariants().unwrap();
    assert!(bench.pool.alloc(Bytes::mib(6), ONE).is_some());
    assert_eq!(bench.pool.held(), Bytes::mib(16));
}

#[test]
fn where_memory_is_scarce_the_place_is_one_that_idle_chunks_can_move_to() {
    let mut bench = Bench::new();
    let at: Vec<DeviceAddress> = [6, 2, 6, 2].map(|mib| bench.ask(mib << 20, ONE).0).into();
    bench.free(at[2]);
    // The middle one of three leaves; in its place one chunk would do for all three, and nothing idle could come there but what is beside.
    drop(bench.pool.take_out(0, 5, 1).unwrap());
    assert_eq!(bench.pool.lacks(Bytes::mib(6), ONE, Prefer::FewChunks), Some(Bytes::mib(2)));
    assert_eq!(bench.pool.lacks(Bytes::mib(6), ONE, Prefer::FewNew(0)), Some(Bytes::mib(2)));
    assert_eq!(bench.pool.lacks(Bytes::mib(4), ONE, Prefer::FewChunks), Some(Bytes::mib(2)));
    // At the end it takes two, and two can move.
    assert_eq!(bench.pool.lacks(Bytes::mib(4), ONE, Prefer::FewNew(0)), Some(Bytes::mib(4)));
    assert_eq!(bench.pool.grow_by_moving(Vec::new(), Bytes::mib(4), ONE).unwrap(), 2);
    assert!(bench.pool.alloc(Bytes::mib(4), ONE).is_some());
    assert_eq!(bench.pool.held(), Bytes::mib(14));
    bench.pool.invariants().unwrap();
}

#[test]
fn whatever_happens_in_between_chunks_find_a_place() {
    let mut bench = Bench::new();
    // Two threads lacked the same; the first has taken what the second saw.
    let chunks = bench.chunks(2);
    bench.pool.grow(&chunks, Bytes::mib(4), ONE).unwrap();
    let more = bench.chunks(5);
    bench.pool.grow(&more, Bytes::mib(4), ONE).unwrap();
    bench.pool.invariants().unwrap();
    assert_eq!(
        bench.pool.usage(),
        PackedUse {
            held: Bytes::mib(14),
            live: Bytes::ZERO,
            largest_contiguous: Bytes::mib(14),
            idle_chunks: Bytes::mib(14)
        }
    );
    assert_eq!(bench.pool.take_all().len(), 7);
    assert_eq!((bench.pool.held(), bench.device.mapped().0), (Bytes::ZERO, 0));
}
