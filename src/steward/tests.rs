//! The ledger and the store together, over drivers that refuse, hang and count.

use super::*;
use crate::clock::ManualClock;
use crate::driver::layers::faulty::Faults;
use crate::driver::layers::limited::{Limiter, Limits};
use crate::driver::layers::{Intercept, Layered, Step};
use crate::driver::sim::{SimDriver, SimOptions};
use crate::driver::{Call, Driver, DriverError, Handle};
use crate::memory::Device;

const DEVICE: DeviceId = DeviceId(0);

fn steward(mib: u64) -> (Arc<SimDriver>, Arc<Steward>) {
    let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(mib)])));
    let device = Device::open(Arc::clone(&sim) as Arc<dyn Driver>, DEVICE).unwrap();
    let steward = Steward::inline(Store::new(vec![device]), Arc::new(ManualClock::default())).unwrap();
    (sim, steward)
}

fn ask(session: SessionId, count: u64) -> Ask {
    let parts = vec![Part { len: Bytes::mib(2), count }];
    Ask { holder: Holder::Session(session), device: DEVICE, parts, plan: None, wait_ms: 0, waited_ms: 0 }
}

#[test]
fn what_is_granted_exists_and_what_ends_is_gone() {
    let (sim, steward) = steward(64);
    let session = steward.open(Terms::new(Bytes::gib(1), 0)).unwrap();
    let Answer::Granted(chunks) = steward.acquire_now(ask(session, 8)).unwrap() else { panic!() };
    assert_eq!(sim.counts().0, 8);
    assert!(steward.descriptor(chunks[0].0).is_ok());
    assert_eq!(steward.end(session, EndReason::Died), Ok(Bytes::mib(16)));
    assert_eq!(sim.counts().0, 0);
    assert_eq!(steward.devices()[0].available(), Bytes::mib(64));
}

/// Asks at each create how far the first request has come.
#[derive(Debug, Default)]
struct Curious {
    steward: std::sync::OnceLock<std::sync::Weak<Steward>>,
    heard: Mutex<Vec<Option<(u64, u64)>>>,
}

impl Intercept for Curious {
    fn around<T>(
        &self,
        step: Step,
        run: impl FnOnce() -> Result<T, DriverError>,
        _handle: impl Fn(&T) -> Option<Handle>,
    ) -> Result<T, DriverError> {
        if step.call() == Call::Create
            && let Some(steward) = self.steward.get().and_then(std::sync::Weak::upgrade)
        {
            self.heard.lock().unwrap().push(steward.progress(RequestId(1)));
        }
        run()
    }
}

#[test]
fn how_far_a_request_has_come_is_told_while_its_chunks_are_made() {
    let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::gib(2)])));
    let curious = Arc::new(Layered::new(sim as Arc<dyn Driver>, Curious::default()));
    let device = Device::open(Arc::clone(&curious) as Arc<dyn Driver>, DEVICE).unwrap();
    let steward = Steward::inline(Store::new(vec![device]), Arc::new(ManualClock::default())).unwrap();
    curious.layer().steward.set(Arc::downgrade(&steward)).unwrap();
    let session = steward.open(Terms::new(Bytes::gib(2), 0)).unwrap();
    assert!(matches!(steward.acquire_now(ask(session, 300)).unwrap(), Answer::Granted(chunks) if chunks.len() == 300));
    let heard = curious.layer().heard.lock().unwrap();
    assert_eq!((heard.len(), heard[0], heard[299]), (300, Some((0, 300)), Some((253, 300))));
    assert_eq!(steward.progress(RequestId(1)), None, "it is answered");
}

#[test]
fn a_chunk_without_a_descriptor_is_none_and_is_not_promised() {
    let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(64)])));
    let faulty = Faults::around(Arc::clone(&sim) as Arc<dyn Driver>);
    let device = Device::open(Arc::clone(&faulty) as Arc<dyn Driver>, DEVICE).unwrap();
    let spawn: Spawn = Box::new(|work| work());
    let steward = Steward::new(Store::new(vec![device]), Arc::new(ManualClock::default()), spawn).unwrap();
    let session = steward.open(Terms::new(Bytes::gib(1), 0)).unwrap();
    faulty.layer().fail_always(&[Call::Export]);
    assert!(matches!(steward.acquire_now(ask(session, 4)).unwrap(), Answer::Refused(_)));
    assert_eq!(sim.counts().0, 0, "none of the four is left");
}

#[test]
fn descriptors_that_run_out_leave_the_budget_alone_and_are_what_the_refusal_speaks_of() {
    let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(64)])));
    let limits = Limits { handles: 2, ..Limits::default() };
    let limited = Limiter::around(Arc::clone(&sim) as Arc<dyn Driver>, limits);
    let device = Device::open(limited as Arc<dyn Driver>, DEVICE).unwrap();
    let steward = Steward::inline(Store::new(vec![device]), Arc::new(ManualClock::default())).unwrap();
    let session = steward.open(Terms::new(Bytes::gib(1), 0)).unwrap();
    let Answer::Refused(refusal) = steward.acquire_now(ask(session, 4)).unwrap() else { panic!("granted") };
    assert!(matches!(refusal, Refusal::Chunks { requested: 4, available: 2, .. }), "{refusal}");
    assert_eq!(steward.devices()[0].available(), Bytes::mib(64));
    assert!(matches!(steward.acquire_now(ask(session, 2)), Ok(Answer::Granted(_))));
}

#[test]
fn what_the_driver_does_not_take_back_is_asked_for_again_and_counts_until_then() {
    let sim = Arc::new(SimDriver::new(SimOptions::with_devices(&[Bytes::mib(16)])));
    let faulty = Faults::around(Arc::clone(&sim) as Arc<dyn Driver>);
    let device = Device::open(Arc::clone(&faulty) as Arc<dyn Driver>, DEVICE).unwrap();
    let clock = Arc::new(ManualClock::default());
    let steward = Steward::inline(Store::new(vec![device]), Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    let one = steward.open(Terms::new(Bytes::gib(1), 0)).unwrap();
    assert!(matches!(steward.acquire_now(ask(one, 6)), Ok(Answer::Granted(_))));
    faulty.layer().fail_always(&[Call::Release]);
    steward.end(one, EndReason::Died).unwrap();
    let quarantined = || steward.devices()[0].bytes.quarantined;
    steward.tick();
    assert_eq!(quarantined(), Bytes::mib(12));
    faulty.layer().fail_always(&[]);
    let two = steward.open(Terms::new(Bytes::gib(1), 0)).unwrap();
    assert!(matches!(steward.acquire_now(ask(two, 3)), Ok(Answer::Refused(_))), "they are not there yet");
    clock.advance(std::time::Duration::from_millis(RETRY_MS - 1));
    steward.tick();
    assert_eq!(quarantined(), Bytes::mib(12), "it was asked a moment ago");
    clock.advance(std::time::Duration::from_millis(1));
    steward.tick();
    assert_eq!((quarantined(), sim.counts().0), (Bytes::ZERO, 0));
    assert!(matches!(steward.acquire_now(ask(two, 8)), Ok(Answer::Granted(_))));
}

#[test]
fn memory_that_somebody_still_holds_is_foreign_until_it_returns() {
    let (_sim, steward) = steward(16);
    let one = steward.open(Terms::new(Bytes::gib(1), 0)).unwrap();
    let Answer::Granted(chunks) = steward.acquire_now(ask(one, 8)).unwrap() else { panic!() };
    let kept = steward.descriptor(chunks[0].0).unwrap();
    steward.end(one, EndReason::Died).unwrap();
    let two = steward.open(Terms::new(Bytes::gib(1), 0)).unwrap();
    let Answer::Refused(refusal) = steward.acquire_now(ask(two, 8)).unwrap() else { panic!("granted twice") };
    assert!(matches!(refusal, Refusal::Exhausted { available, .. } if available == Bytes::mib(14)), "{refusal}");
    steward.tick();
    assert_eq!(steward.devices()[0].foreign, Bytes::mib(2));
    drop(kept);
    steward.tick();
    assert!(matches!(steward.acquire_now(ask(two, 8)), Ok(Answer::Granted(_))));
}
