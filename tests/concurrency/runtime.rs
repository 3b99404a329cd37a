//! One runtime and several threads: allocations that others free, frees that come twice, memory that is trimmed while it comes, two plans at once, and
//! figures that are read meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use shuttle::thread;
use stitchd::clock::ManualClock;
use stitchd::driver::cost_table::CostTable;
use stitchd::driver::sim::{SimDriver, SimOptions};
use stitchd::ids::{DeviceId, StreamId};
use stitchd::ladder::Ladder;
use stitchd::memory::{Chunk, Device};
use stitchd::plan::{Entry, Plan};
use stitchd::pool::Request;
use stitchd::runtime::{
    AllocError, ChunkSource, Counter, Counters, PlanInstallError, Runtime, RuntimeConfig, SourceError, Want,
};
use stitchd::session::PrivateSource;
use stitchd::store::Store;
use stitchd::trace::ContextKey;
use stitchd::units::{Bytes, DeviceAddress, Lifetime, PlanOffset};

use crate::in_many_orders;

const DEVICE: DeviceId = DeviceId(0);
const ONE: StreamId = StreamId(1);
const TWO: StreamId = StreamId(2);

/// A source that takes its time, as a daemon does: others may go on before it looks and before its answer is there.
#[derive(Debug)]
struct Slow(PrivateSource);

impl ChunkSource for Slow {
    fn acquire(&self, want: Want) -> Result<Vec<Arc<Chunk>>, SourceError> {
        thread::yield_now();
        let acquired = self.0.acquire(want);
        thread::yield_now();
        acquired
    }

    fn release(&self, chunks: Vec<Arc<Chunk>>) {
        self.0.release(chunks);
    }
}

/// What is live, as its owners know it: put in after the allocation, taken out before the free.
type Books = BTreeMap<u64, u64>;

struct Bench {
    sim: Arc<SimDriver>,
    store: Arc<Store>,
    total: Bytes,
    runtime: Runtime,
    /// Of the test, not of the model: nobody is interrupted while they hold it.
    books: Mutex<Books>,
    /// Served, refused, and the most that was ever live by the books.
    figures: Mutex<(u64, u64, u64)>,
}

impl Bench {
    fn new(mib: u64) -> Arc<Bench> {
        let total = Bytes::mib(mib);
        let options = SimOptions { costs: CostTable::FREE, ..SimOptions::with_devices(&[total]) };
        let sim = Arc::new(SimDriver::new(options));
        let device = Device::open(sim.clone(), DEVICE).unwrap();
        let store = Arc::new(Store::new(vec![Arc::clone(&device)]));
        let source = Arc::new(Slow(PrivateSource::new(Arc::clone(&store), DEVICE, Ladder::standard())));
        let clock = Arc::new(ManualClock::default());
        let runtime = Runtime::new(device, source, clock, RuntimeConfig::default(), Counters::private());
        Arc::new(Bench { sim, store, total, runtime, books: Mutex::default(), figures: Mutex::default() })
    }

    /// Allocates, and looks whether anybody else has these bytes. `None` where there is no memory, which is an answer.
    fn alloc(&self, bytes: u64, stream: StreamId) -> Option<DeviceAddress> {
        let served = self.runtime.alloc(&Request { stream, ..Request::of(Bytes::new(bytes)) });
        let mut figures = self.figures.lock().unwrap();
        let address = match served {
            Ok(address) => address,
            Err(AllocError::OutOfMemory { .. }) => {
                figures.1 += 1;
                return None;
            }
            Err(error) => panic!("{error:?}"),
        };
        let mut books = self.books.lock().unwrap();
        let start = address.get();
        let before = books.range(..start + bytes).next_back();
        assert!(before.is_none_or(|(other, len)| other + len <= start), "{start:#x} is in {books:x?} already");
        books.insert(start, bytes);
        figures.0 += 1;
        figures.2 = figures.2.max(books.values().sum());
        Some(address)
    }

    fn free(&self, address: DeviceAddress, stream: StreamId) {
        self.books.lock().unwrap().remove(&address.get()).expect("who frees has it");
        self.runtime.free(address, stream).unwrap();
    }

    /// Nobody has anything: so say all figures, and when the runtime ends everything is given back.
    fn end(self: Arc<Bench>) {
        let Ok(bench) = Arc::try_unwrap(self) else { panic!("everybody else has ended") };
        let Bench { sim, store, total, runtime, books, figures } = bench;
        assert_eq!(books.into_inner().unwrap(), Books::new());
        let (served, refused, peak) = figures.into_inner().unwrap();
        runtime.synchronize().unwrap();
        let stats = runtime.stats();
        assert_eq!((stats.live, stats.live_allocations, stats.failures), (Bytes::ZERO, 0, refused));
        assert_eq!(stats.served.planned + stats.served.pool, served);
        // The books learn of an allocation after it was made and of a free before.
        assert!(stats.peak_live >= Bytes::new(peak), "{stats:?}, {peak}");
        assert!(stats.peak_live <= Bytes::new(2 * total.get()) && stats.held <= total, "{stats:?}");
        runtime.trim(Bytes::MAX);
        drop(runtime);
        assert_eq!(store.counts(), (0, 0));
        assert_eq!(sim.counts(), (0, 0, 0));
    }
}

#[test]
fn what_one_thread_allocates_another_frees_while_a_third_allocates() {
    in_many_orders(|| {
        let bench = Bench::new(8);
        let (send, receive) = shuttle::sync::mpsc::channel();
        let maker = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || {
                for bytes in [3 << 20, 1000, 2 << 20, 700_000] {
                    if let Some(address) = bench.alloc(bytes, ONE) {
                        send.send(address).unwrap();
                    }
                }
            })
        };
        let taker = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || {
                while let Ok(address) = receive.recv() {
                    bench.free(address, ONE);
                }
            })
        };
        for bytes in [4 << 20, 1000, 2 << 20] {
            if let Some(address) = bench.alloc(bytes, TWO) {
                bench.free(address, TWO);
            }
        }
        maker.join().unwrap();
        taker.join().unwrap();
        bench.end();
    });
}

#[test]
fn memory_that_is_trimmed_while_it_comes_is_given_back_once_or_used() {
    in_many_orders(|| {
        let bench = Bench::new(8);
        let other = Arc::clone(&bench);
        let trims = thread::spawn(move || {
            for _ in 0..12 {
                other.runtime.trim(Bytes::MAX);
            }
        });
        for bytes in [2 << 20, 4 << 20, 1000] {
            if let Some(address) = bench.alloc(bytes, ONE) {
                bench.free(address, ONE);
            }
        }
        trims.join().unwrap();
        // What the trims gave back is not held by the store any more, and what they did not is still the runtime's.
        assert_eq!(bench.store.counts().0 * (2 << 20), bench.runtime.stats().held.get());
        bench.end();
    });
}

#[test]
fn of_two_frees_of_one_allocation_one_is_told_that_it_is_not_live() {
    in_many_orders(|| {
        let bench = Bench::new(8);
        let address = bench.alloc(3 << 20, ONE).unwrap();
        bench.books.lock().unwrap().clear();
        // Its event is not there for as long as this is, so that a free that knows of the other stream waits.
        let busy = bench.sim.stall(DEVICE, TWO);
        let record = {
            let bench = Arc::clone(&bench);
            // Comes before, between or behind the frees.
            thread::spawn(move || bench.runtime.record_stream(address, TWO))
        };
        let other = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || bench.runtime.free(address, ONE).is_ok())
        };
        let here = bench.runtime.free(address, ONE).is_ok();
        record.join().unwrap();
        assert_eq!(u32::from(here) + u32::from(other.join().unwrap()), 1);
        drop(busy);
        bench.end();
    });
}

fn plan() -> Plan {
    let entry = Entry {
        bytes: Bytes::mib(3),
        offset: PlanOffset::new(0),
        lane: stitchd::plan::Lane::on(ONE),
        context: ContextKey::UNKNOWN,
        lifetime: Lifetime::new(0, 1),
        again: None,
    };
    Plan { pool_len: Bytes::mib(3), entries: vec![entry], ..Plan::default() }
}

#[test]
fn of_two_plans_at_once_one_is_installed_and_the_others_memory_goes_back() {
    in_many_orders(|| {
        let bench = Bench::new(16);
        let install = |bench: &Bench| match bench.runtime.install_plan(&plan()) {
            Ok(()) => 1,
            Err(PlanInstallError::Installed) => 0,
            Err(error) => panic!("{error:?}"),
        };
        let other = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || install(&bench))
        };
        let works = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || {
                let address = bench.alloc(3 << 20, ONE).unwrap();
                bench.free(address, ONE);
            })
        };
        let here = install(&bench);
        assert_eq!(here + other.join().unwrap(), 1);
        works.join().unwrap();
        let held = bench.runtime.stats().held.get();
        assert_eq!(bench.store.counts().0 * (2 << 20), held);
        bench.end();
    });
}

#[test]
fn a_plan_that_comes_while_others_allocate_and_free_moves_nothing_that_is_live() {
    in_many_orders(|| {
        let bench = Bench::new(16);
        // Idle from here on, and what the plan's pool is made of.
        let before = bench.alloc(4 << 20, ONE).unwrap();
        bench.free(before, ONE);
        let plans = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || {
                for _ in 0..2 {
                    let offer = bench.runtime.prepare(&plan(), Bytes::ZERO).unwrap();
                    bench.runtime.offer(Some(offer));
                    bench.runtime.mark_iteration();
                }
            })
        };
        let works = {
            let bench = Arc::clone(&bench);
            thread::spawn(move || {
                let address = bench.alloc(3 << 20, ONE).unwrap();
                bench.free(address, ONE);
                bench.runtime.trim(Bytes::mib(2));
            })
        };
        let here = bench.alloc(3 << 20, ONE).unwrap();
        let small = bench.alloc(1 << 20, TWO).unwrap();
        bench.free(here, ONE);
        works.join().unwrap();
        plans.join().unwrap();
        bench.free(small, TWO);
        bench.runtime.invariants().unwrap();
        let held = bench.runtime.stats().held.get();
        assert_eq!(bench.store.counts().0 * (2 << 20), held);
        bench.end();
    });
}

#[test]
fn figures_are_whole_and_never_go_back_while_two_threads_write_them() {
    in_many_orders(|| {
        let bench = Bench::new(4);
        // Nobody else gets anything until this goes.
        let all = bench.alloc(3 << 20, ONE).unwrap();
        let writer = |stream| {
            let bench = Arc::clone(&bench);
            thread::spawn(move || {
                for bytes in [3 << 20, 3000] {
                    if let Some(address) = bench.alloc(bytes, stream) {
                        bench.free(address, stream);
                    }
                }
            })
        };
        let writers = [writer(ONE), writer(TWO)];
        let counters = *bench.runtime.counters();
        let grows = [
            Counter::RequestsPool,
            Counter::RequestsSmall,
            Counter::BytesPool,
            Counter::BytesSmall,
            Counter::PeakLiveBytes,
            Counter::PeakHeldBytes,
            Counter::Failures,
        ];
        let mut last = [0; 7];
        for round in 0..6 {
            if round == 3 {
                bench.free(all, ONE);
            }
            for (last, counter) in last.iter_mut().zip(grows) {
                let now = counters.get(counter);
                assert!(now >= *last, "{counter:?} was {last} and is {now}");
                *last = now;
            }
            // Never below nothing: that would be a very large number.
            let live = counters.get(Counter::LiveBytes);
            assert!(live <= 2 * (3 << 20), "{live}");
        }
        for writer in writers {
            writer.join().unwrap();
        }
        bench.end();
    });
}
