//! Rollback and quarantine: every driver call of a multi-step action fails once.

use std::sync::Arc;

use super::*;
use crate::driver::layers::faulty::{Faults, Faulty};
use crate::driver::sim::{SimDriver, SimOptions};
use crate::driver::{Call, Driver};
use crate::ids::{ChunkId, DeviceId};
use crate::units::{Place as _, Span};

fn faulty_device() -> (Arc<SimDriver>, Arc<Faulty>, Arc<Device>) {
    let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(1)])));
    let faulty = Faults::around(Arc::clone(&sim) as Arc<dyn Driver>);
    let device = Device::open(Arc::clone(&faulty) as Arc<dyn Driver>, DeviceId(0)).unwrap();
    (sim, faulty, device)
}

fn chunks(device: &Arc<Device>, count: u64) -> Vec<Arc<Chunk>> {
    (1..=count).map(|n| Arc::new(Chunk::create(device, ChunkId(n), Bytes::mib(2 * n)).unwrap())).collect()
}

#[test]
fn stitching_that_fails_at_any_call_leaves_nothing_behind() {
    let (sim, faulty, device) = faulty_device();
    let chunks = chunks(&device, 4);
    let before = sim.counts();
    let mut failures = 0;
    for n in 1.. {
        faulty.layer().fail_nth(n);
        let stitched = Mapping::stitch(&chunks);
        faulty.layer().fail_nth(0);
        match stitched {
            Err(error) => {
                failures += 1;
                assert_eq!(error.kind(), ErrorKind::Broken);
                assert_eq!(sim.counts(), before, "after failure at call {n}");
            }
            Ok(mapping) => {
                assert_eq!(mapping.span().len(), Bytes::mib(20));
                break;
            }
        }
    }
    // reserve, four maps, one set-access
    assert_eq!(failures, 6);
    assert_eq!(sim.counts(), before);
    assert_eq!(device.quarantine(), Quarantine::default());
}

#[test]
fn taken_chunks_are_unmapped_and_the_rest_stays() {
    let (sim, faulty, device) = faulty_device();
    let mut mapping = Mapping::stitch(&chunks(&device, 4)).unwrap();
    let start = mapping.span().start();
    let at = |mib| start.checked_add(Bytes::mib(mib)).unwrap();
    let (second, last) = (at(2), at(12));
    let run = Span::new(second, Bytes::mib(10)).unwrap();
    faulty.layer().fail_nth(1);
    mapping.take(run).unwrap_err();
    assert!(mapping.chunk(second).is_some());
    let taken = mapping.take(run).unwrap();
    assert_eq!(taken.iter().map(|chunk| chunk.len()).collect::<Vec<_>>(), [Bytes::mib(4), Bytes::mib(6)]);
    assert!(mapping.chunk(second).is_none() && mapping.chunk(last).is_some());
    assert_eq!(sim.counts(), (4, 2, 1));
    // A hole takes chunks of other lengths.
    let other = Arc::new(Chunk::create(&device, ChunkId(9), Bytes::mib(8)).unwrap());
    mapping.put(second, std::slice::from_ref(&other)).unwrap();
    let inside = Span::new(at(5), Bytes::mib(7)).unwrap();
    assert_eq!(mapping.chunks_in(inside).map(|(start, _)| start).collect::<Vec<_>>(), [second]);
    let taken_again = mapping.take(Span::new(second, other.len()).unwrap()).unwrap();
    drop((other, taken_again));
    drop(taken);
    assert_eq!(sim.counts(), (2, 2, 1));
    drop(mapping);
    assert_eq!(sim.counts(), (0, 0, 0));
}

#[test]
fn what_cannot_be_unmapped_is_quarantined_with_its_chunks() {
    let (sim, faulty, device) = faulty_device();
    let chunks = chunks(&device, 2);
    let mapping = Mapping::stitch(&chunks).unwrap();
    assert!(!chunks.iter().any(|chunk| chunk.is_stuck()));
    faulty.layer().fail_always(&[Call::Unmap]);
    drop(mapping);
    faulty.layer().fail_always(&[]);
    assert!(chunks.iter().all(|chunk| chunk.is_stuck()), "nobody else may get them");
    // The run of 6 MiB, and its addresses.
    assert_eq!(device.quarantine(), Quarantine { count: 2, bytes: Bytes::mib(12) });
    assert_eq!(sim.counts(), (2, 2, 1));
}

#[test]
fn a_chunk_that_cannot_be_released_is_quarantined_once() {
    let (sim, faulty, device) = faulty_device();
    let chunk = Chunk::create(&device, ChunkId(1), Bytes::mib(2)).unwrap();
    faulty.layer().fail_always(&[Call::Release]);
    let (chunk, _) = chunk.release().unwrap_err();
    assert_eq!(device.quarantine(), Quarantine::default(), "it may be tried again");
    drop(chunk);
    faulty.layer().fail_always(&[]);
    assert_eq!(device.quarantine(), Quarantine { count: 1, bytes: Bytes::mib(2) });
    assert_eq!(sim.counts(), (1, 0, 0));
    Chunk::create(&device, ChunkId(1), Bytes::mib(2)).unwrap().release().unwrap();
    assert_eq!(sim.counts(), (1, 0, 0));
}

#[test]
fn no_chunks_are_not_a_range() {
    assert_eq!(Mapping::stitch(&[]).unwrap_err(), MemoryError::Unstitchable(Bytes::ZERO));
}

#[test]
fn mappings_and_addresses_are_counted_and_end() {
    let (_sim, faulty, device) = faulty_device();
    let held = chunks(&device, 3);
    let mut mapping = Mapping::stitch(&held).unwrap();
    assert_eq!(device.mapped(), (3, Bytes::mib(12)));
    faulty.layer().fail_nth(3);
    Mapping::stitch(&held).unwrap_err();
    assert_eq!(device.mapped(), (3, Bytes::mib(12)));
    mapping.take(Span::new(mapping.span().start(), Bytes::mib(6)).unwrap()).unwrap();
    assert_eq!(device.mapped(), (1, Bytes::mib(12)));
    drop(mapping);
    assert_eq!(device.mapped(), (0, Bytes::ZERO));
    let half = crate::limits::ADDRESS_BYTES_MAX.get() / 2;
    let _first = Reservation::new(&device, Bytes::new(half)).unwrap();
    let second = Reservation::new(&device, Bytes::new(half)).unwrap();
    let error = Reservation::new(&device, Bytes::mib(2)).unwrap_err();
    assert!(crate::error::chain(&error).contains("addresses"), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    drop(second);
    Reservation::new(&device, Bytes::mib(2)).unwrap();
}
