//! What it costs that other threads free what one has allocated, as the autograd threads of a job do: while one thread allocates a batch by its plan, others free the batch before.
//!
//! The floor is the same threads, each taking a lock of the standard library around a look-up as often as the subject allocates or frees: whatever lock there is, they meet at it.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has nothing to say")]

#[path = "support/event.rs"]
mod made;
#[path = "support/runtime.rs"]
mod subject;
mod support;

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};

use made::event;
use stitchd::ids::StreamId;
use stitchd::plan::Plan;
use stitchd::pool::{AddressMap, Request};
use stitchd::trace::{EventKind, Trace};
use stitchd::units::{Bytes, DeviceAddress};
use support::{Compared, compare, timed};

/// Allocations of a batch.
const BATCH: usize = 16_384;
const ROUNDS: usize = 51;

fn bytes_of(at: usize) -> Bytes {
    Bytes::mib(1 + at as u64 % 4)
}

/// Three iterations of two batches each: one is allocated, then the batch before is freed.
fn plan() -> Plan {
    let mut events = Vec::new();
    let mut push = |kind, batch: usize, at: usize, bytes, iteration| {
        events.push(event(events.len(), kind, (batch * BATCH + at) as u64, bytes, iteration));
    };
    for batch in 0..6 {
        let iteration = batch as u32 / 2;
        (0..BATCH).for_each(|at| push(EventKind::Alloc, batch, at, bytes_of(at), iteration));
        if batch > 0 {
            (0..BATCH).for_each(|at| push(EventKind::Free, batch - 1, at, Bytes::ZERO, iteration));
        }
    }
    Plan::from_trace(&Trace { events, modules: vec![String::new()] }, 1).unwrap()
}

/// One thread does its part of a round, `others` theirs, and the time until all have done it counts.
fn rounds<R>(
    others: usize,
    own: impl Fn(usize) + Sync,
    theirs: impl Fn(usize, usize) + Sync,
    with: impl FnOnce(&mut dyn FnMut() -> (std::time::Duration, u64)) -> R,
) -> R {
    let (begin, end) = (Barrier::new(others + 1), Barrier::new(others + 1));
    let (is_over, number) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..others {
            let (begin, end, is_over, number, theirs) = (&begin, &end, &is_over, &number, &theirs);
            scope.spawn(move || {
                loop {
                    begin.wait();
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    theirs(number.load(Ordering::Relaxed) as usize, thread);
                    end.wait();
                }
            });
        }
        let done = with(&mut || {
            begin.wait();
            let time = timed(|| {
                own(number.load(Ordering::Relaxed) as usize);
                end.wait();
            });
            number.fetch_add(1, Ordering::Relaxed);
            (time, BATCH as u64)
        });
        is_over.store(true, Ordering::Relaxed);
        begin.wait();
        done
    })
}

fn measure(name: String, others: usize) -> Compared {
    let runtime = subject::runtime();
    runtime.install_plan(&plan()).unwrap();
    let batches = [(); 2].map(|()| (0..BATCH).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let fill = |batch: usize| {
        for (at, place) in batches[batch % 2].iter().enumerate() {
            let address = runtime.alloc(&Request::of(bytes_of(at))).unwrap();
            place.store(address.get(), Ordering::Relaxed);
        }
    };
    let alloc = |batch: usize| {
        if batch.is_multiple_of(2) {
            runtime.mark_iteration();
        }
        fill(batch);
    };
    let free = |batch: usize, thread: usize| {
        for place in batches[(batch + 1) % 2].iter().skip(thread).step_by(others) {
            runtime.free(DeviceAddress::new(place.load(Ordering::Relaxed)), StreamId::DEFAULT).unwrap();
        }
    };
    // The first iteration, which is the plan's prologue.
    fill(0);
    fill(1);
    (0..others).for_each(|thread| free(1, thread));
    let table: AddressMap<usize> = (0..2 * BATCH).map(|at| (DeviceAddress::new(512 * at as u64), at)).collect();
    let table = Mutex::new(table);
    let look_up = |from: usize, step: usize| {
        for at in (from..BATCH).step_by(step) {
            black_box(table.lock().unwrap()[&DeviceAddress::new(512 * at as u64)]);
        }
    };
    let compared = rounds(others, alloc, free, |subject| {
        rounds(
            others,
            |_| look_up(0, 1),
            |_, thread| look_up(thread, others),
            |floor| compare(name, ROUNDS, subject, floor),
        )
    });
    let served = runtime.stats().served;
    assert_eq!(served.pool, 0, "all is served from the plan, or this measures something else");
    compared
}

fn main() {
    let labels = [1, 2, 8].map(|others| (format!("pair, freed by {others} other threads"), others));
    let wanted = labels.into_iter().filter(|(label, _)| support::is_wanted(label));
    let compared: Vec<Compared> = wanted.map(|(label, others)| measure(label, others)).collect();
    support::print(("ns", 1.0), &compared);
}
