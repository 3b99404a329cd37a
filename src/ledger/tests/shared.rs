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
        // The publisher bears the range, eight of its ten; who only holds it has all of its ten to come.
        let (for_others, for_itself) = if first_leaves { (1, 5) } else { (5, 1) };
        assert!(matches!(desk.refused(other, for_others + 1, 0), Refusal::Exhausted { .. }));
        desk.granted(other, for_others);
        desk.granted(stays, for_itself);
    }
}

#[test]
fn who_publishes_and_leaves_the_range_to_others_takes_nothing_from_what_third_ones_are_guaranteed() {
    let mut desk = Desk::new(20);
    let (one, two) = (desk.keep(1, 10), desk.keep(2, 10));
    let other = desk.open(3, 64);
    let chunks = desk.granted(one, 5);
    desk.publish(one, &chunks, 0);
    desk.attach(other);
    desk.leave(one);
    // It is the publisher's guarantee that is used up, as long as it is there.
    desk.granted(two, 5);
    assert!(matches!(desk.refused(one, 1, 0), Refusal::Exhausted { .. }));
    desk.leave(other);
    desk.granted(one, 5);
}

#[test]
fn who_waits_for_a_range_that_goes_by_itself_is_in_no_circle() {
    let mut desk = Desk::new(10);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    let chunks = desk.granted(one, 3);
    desk.publish(one, &chunks, 100);
    desk.die(one);
    desk.granted(two, 2);
    assert_eq!(desk.acquire(two, 1, 10_000), [], "the range goes in a moment");
    let answers = desk.step(Command::Tick { now_ms: 100 });
    assert!(matches!(&answers[..], [(_, Answer::Granted(_))]), "{answers:?}");
}

#[test]
fn nothing_is_published_or_kept_where_nothing_is_to_stay() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 16), desk.open(2, 16));
    let (kept, others) = (desk.granted(one, 1), desk.granted(two, 1));
    desk.publish(one, &kept, 1_000_000);
    desk.step(Command::Evict { session: two });
    let publish = Command::Publish { range: RangeId(2), session: two, chunks: others, linger_ms: 1_000 };
    assert_eq!(desk.ledger.step(publish).unwrap_err(), LedgerError::Refused(Refusal::Evicted));
    desk.step(Command::Drain { device: DEVICE, is_draining: true });
    desk.leave(one);
    assert_eq!(desk.shared().0, 0, "it does not linger on a device that is drained");
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
