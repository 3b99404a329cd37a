//! Shared ranges.

use super::*;

const RANGE: RangeId = RangeId(1);

impl Desk {
    fn publish(&mut self, session: SessionId, chunks: &[ChunkId], linger_ms: u64) {
        self.step(Command::Publish { range: RANGE, session, chunks: chunks.to_vec(), linger_ms });
    }

    fn attach(&mut self, session: SessionId) {
        self.step(Command::Attach { range: RANGE, session });
    }

    fn leave(&mut self, session: SessionId) {
        self.step(Command::Leave { range: RANGE, session });
    }

    fn die(&mut self, session: SessionId) {
        self.step(Command::End { session, reason: EndReason::Died });
    }

    /// Shared bytes of the device in MiB, and what can be had of it.
    fn shared(&self) -> (u64, u64) {
        let view = self.ledger.device(DEVICE).unwrap();
        (view.bytes.shared.get() >> 20, view.available().get() >> 20)
    }

    fn held(&self, session: SessionId) -> u64 {
        self.ledger.session(session).unwrap().held_bytes().get() >> 20
    }

    /// A session that keeps what it is guaranteed.
    fn keep(&mut self, session: u64, mib: u64) -> SessionId {
        let session = SessionId(session);
        let terms = Terms { lends: false, answers: true, ..Terms::new(Bytes::mib(64), 0) };
        self.step(Command::Open { session, terms });
        self.next += 1;
        let request = RequestId(self.next);
        let guarantee = Bytes::mib(mib);
        let admit = Command::Admit { request, session, device: DEVICE, guarantee, wait_ms: 0 };
        assert!(matches!(&self.step(admit)[..], [(_, Answer::Granted(_))]));
        session
    }
}

#[test]
fn a_range_counts_once_for_the_device_and_for_each_holder_and_is_never_leased_again() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 16), desk.open(2, 8));
    let chunks = desk.granted(one, 3);
    desk.publish(one, &chunks, 0);
    desk.attach(two);
    assert_eq!((desk.shared(), desk.held(one), desk.held(two), desk.leased()), ((6, 10), 6, 6, 0));
    // It is not the session's to release, and counts against its limit.
    let release = Command::Release { session: one, chunks: chunks[..1].to_vec() };
    assert_eq!(desk.ledger.step(release).unwrap_err(), LedgerError::NotHeld { session: one, chunk: chunks[0] });
    assert!(matches!(desk.refused(two, 2, 0), Refusal::OverLimit { .. }));
    desk.granted(two, 1);
    desk.die(one);
    assert_eq!((desk.shared(), desk.destroyed.len()), ((6, 8), 0));
    desk.leave(two);
    assert_eq!((desk.shared(), desk.held(two)), ((0, 14), 2));
    assert!(chunks.iter().all(|chunk| desk.destroyed.contains(chunk)));
    assert!(matches!(desk.news[..], [Effect::RangeGone { range: RANGE }]));
}

#[test]
fn a_range_that_nobody_holds_lasts_for_its_time_from_the_last_who_left() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 16), desk.open(2, 16));
    let chunks = desk.granted(one, 2);
    desk.publish(one, &chunks, 100);
    desk.step(Command::Tick { now_ms: 500 });
    desk.die(one);
    desk.step(Command::Tick { now_ms: 599 });
    desk.attach(two);
    desk.attach(two);
    desk.step(Command::Tick { now_ms: 700 });
    desk.leave(two);
    desk.step(Command::Tick { now_ms: 5_000 });
    assert_eq!(desk.shared().0, 4, "it is held once still");
    desk.leave(two);
    assert_eq!(desk.ledger.range(RANGE).unwrap().left_ms, Some(100));
    desk.step(Command::Tick { now_ms: 5_100 });
    assert_eq!(desk.shared(), (0, 16));
    let attach = Command::Attach { range: RANGE, session: two };
    assert_eq!(desk.ledger.step(attach).unwrap_err(), LedgerError::NoRange(RANGE));
}

#[test]
fn what_a_session_is_guaranteed_is_there_whoever_of_the_holders_leaves_first() {
    for first_leaves in [true, false] {
        let mut desk = Desk::new(20);
        let (one, two) = (desk.keep(1, 10), desk.keep(2, 10));
        let other = desk.open(3, 64);
        let chunks = desk.granted(one, 4);
        desk.publish(one, &chunks, 1_000);
        desk.attach(two);
        // Of twenty eight are shared, and both are kept what they have not: two, and ten.
        assert!(matches!(desk.refused(other, 1, 0), Refusal::Exhausted { .. }));
        let (leaver, stays) = if first_leaves { (one, two) } else { (two, one) };
        desk.die(leaver);
        // Who stays bears the range, eight of its ten: two are kept for it, and ten are for the others.
        assert!(matches!(desk.refused(other, 6, 0), Refusal::Exhausted { .. }));
        desk.granted(other, 5);
        desk.granted(stays, 1);
    }
}

#[test]
fn a_range_that_nobody_holds_makes_way_for_what_somebody_is_guaranteed_and_for_nobody_else() {
    let mut desk = Desk::new(16);
    let one = desk.keep(1, 12);
    let two = desk.open(2, 64);
    let three = desk.open(3, 64);
    let chunks = desk.granted(three, 2);
    desk.publish(three, &chunks, 1_000_000);
    desk.die(three);
    assert_eq!(desk.shared().0, 4);
    assert!(matches!(desk.refused(two, 1, 0), Refusal::Exhausted { .. }), "it is kept from whoever has no guarantee");
    assert_eq!(desk.shared().0, 4);
    // The budget falls by what others take, and the guarantee is short of what nobody holds.
    desk.step(Command::Observe { device: DEVICE, free: Bytes::mib(10) });
    let got = desk.granted(one, 6);
    assert_eq!((got.len(), desk.shared().0), (6, 0));
}

#[test]
fn a_range_that_is_withdrawn_is_for_nobody_new_and_goes_with_its_last_holder() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 16), desk.open(2, 16));
    let chunks = desk.granted(one, 2);
    desk.publish(one, &chunks, 1_000);
    desk.step(Command::Withdraw { range: RANGE });
    let attach = Command::Attach { range: RANGE, session: two };
    assert_eq!(desk.ledger.step(attach).unwrap_err(), LedgerError::NoRange(RANGE));
    assert_eq!(desk.shared().0, 4);
    desk.leave(one);
    assert_eq!(desk.shared(), (0, 16), "it does not linger");
}

#[test]
fn what_nobody_holds_of_a_lost_device_goes_at_once() {
    let mut desk = Desk::new(16);
    let one = desk.open(1, 16);
    let chunks = desk.granted(one, 2);
    desk.publish(one, &chunks, 1_000_000);
    desk.die(one);
    desk.step(Command::Lose { device: DEVICE });
    assert_eq!(desk.shared().0, 0);
}
