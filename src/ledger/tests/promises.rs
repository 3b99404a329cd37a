//! Guarantees, changed terms, and memory that is asked back.

use super::*;

impl Desk {
    /// A session that answers.
    fn join(&mut self, session: u64, priority: u32) -> SessionId {
        let session = SessionId(session);
        let terms = Terms { answers: true, ..Terms::new(Bytes::mib(1 << 20), priority) };
        self.step(Command::Open { session, terms });
        session
    }

    fn admit(&mut self, session: SessionId, mib: u64, wait_ms: u64) -> Vec<(RequestId, Answer)> {
        self.next += 1;
        let request = RequestId(self.next);
        self.step(Command::Admit { request, session, device: DEVICE, guarantee: Bytes::mib(mib), wait_ms })
    }

    fn admitted(&mut self, session: SessionId, mib: u64) {
        let answers = self.admit(session, mib, 0);
        assert!(matches!(&answers[..], [(_, Answer::Granted(chunks))] if chunks.is_empty()), "{answers:?}");
    }

    fn park(&mut self, session: SessionId, mib: u64) -> Vec<(RequestId, Answer)> {
        self.step(Command::Parked { device: DEVICE, sessions: vec![(session, Some(Bytes::mib(mib)))] })
    }

    fn change(&mut self, session: SessionId, change: Change) {
        self.step(Command::Change { session, change, revision: None });
    }

    /// What was asked of whom since the last time somebody looked.
    fn asked(&mut self) -> Vec<(u64, u64, u64)> {
        let news = std::mem::take(&mut self.news);
        let asked = |effect: &Effect| match *effect {
            Effect::AskBack { session, ask, bytes, .. } => Some((session.0, ask, bytes.get() >> 20)),
            _ => None,
        };
        news.iter().filter_map(asked).collect()
    }

    fn release(&mut self, session: SessionId, chunks: &[ChunkId]) -> Vec<(RequestId, Answer)> {
        self.step(Command::Release { session, chunks: chunks.to_vec() })
    }

    fn answer(&mut self, session: SessionId, ask: u64) -> Vec<(RequestId, Answer)> {
        self.step(Command::Answered { session, device: DEVICE, ask })
    }

    fn tick(&mut self, now_ms: u64) -> Vec<(RequestId, Answer)> {
        self.step(Command::Tick { now_ms })
    }
}

fn is_granted(answers: &[(RequestId, Answer)]) -> bool {
    matches!(answers, [(_, Answer::Granted(_))])
}

fn refusal(answers: Vec<(RequestId, Answer)>) -> Refusal {
    match &answers[..] {
        [(_, Answer::Refused(refusal))] => refusal.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_waits_has_others_asked_for_what_it_lacks_and_gets_what_they_give() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    let held = desk.granted(one, 8);
    desk.park(one, 8);
    assert_eq!(desk.acquire(two, 3, 1_000), [], "it waits");
    assert_eq!(desk.asked(), [(1, 1, 6)]);
    assert_eq!(desk.release(one, &held[..2]), []);
    assert_eq!(desk.asked(), [], "one question at a time");
    assert!(is_granted(&desk.release(one, &held[2..3])), "what it lacked is there, whatever else is said");
    desk.tick(7);
    desk.answer(one, 1);
    let (session, waiting) = (one, Some(Holder::Session(two)));
    let (asked, given, took_ms) = (Bytes::mib(6), Bytes::mib(6), 7);
    assert_eq!(desk.news, [Effect::Gave { session, device: DEVICE, waiting, asked, given, took_ms }]);
}

#[test]
fn nobody_is_asked_where_nobody_waits_or_all_would_not_do() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    desk.granted(one, 8);
    desk.park(one, 4);
    assert!(matches!(desk.refused(two, 1, 0), Refusal::Exhausted { .. }), "it is not to wait");
    assert_eq!(desk.acquire(two, 3, 1_000), []);
    assert_eq!(desk.asked(), [], "4 MiB would not do");
    desk.park(one, 6);
    assert_eq!(desk.asked(), [(1, 1, 6)], "more is idle now");
    // One that does not answer is never asked.
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.join(2, 0));
    desk.granted(one, 8);
    desk.park(one, 16);
    desk.acquire(two, 1, 1_000);
    assert_eq!(desk.asked(), []);
}

#[test]
fn those_above_their_guarantee_are_asked_first_then_low_priority_then_who_has_most() {
    let mut desk = Desk::new(64);
    let [within, high, low, lower] = [desk.join(1, 0), desk.join(2, 5), desk.join(3, 0), desk.join(4, 0)];
    let waits = desk.join(5, 0);
    desk.admitted(within, 16);
    for session in [within, high, low, lower] {
        desk.granted(session, 8);
    }
    for (session, mib) in [(within, 16), (high, 8), (low, 6), (lower, 4)] {
        desk.park(session, mib);
    }
    desk.acquire(waits, 16, 1_000);
    assert_eq!(desk.asked(), [(3, 1, 6), (4, 2, 4), (2, 3, 8), (1, 4, 14)]);
}

#[test]
fn one_that_gave_less_is_let_be_until_more_is_idle_or_time_has_passed() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    desk.granted(one, 8);
    desk.park(one, 8);
    desk.acquire(two, 4, 10_000);
    assert_eq!(desk.asked(), [(1, 1, 8)]);
    desk.answer(one, 1);
    desk.park(one, 8);
    assert_eq!(desk.asked(), [], "it had nothing a moment ago");
    desk.park(one, 10);
    assert_eq!(desk.asked(), [(1, 2, 8)]);
    desk.answer(one, 2);
    desk.tick(499);
    desk.park(one, 10);
    assert_eq!(desk.asked(), []);
    desk.tick(500);
    assert_eq!(desk.asked(), [(1, 3, 8)]);
}

#[test]
fn one_that_is_silent_is_told_of_and_waited_for_no_longer() {
    let mut desk = Desk::new(16);
    let (one, other, two) = (desk.join(1, 0), desk.join(3, 0), desk.join(2, 0));
    desk.granted(one, 4);
    let held = desk.granted(other, 4);
    desk.park(one, 8);
    desk.park(other, 4);
    desk.acquire(two, 2, 5_000);
    assert_eq!(desk.asked(), [(1, 1, 4)], "it has most");
    desk.tick(limits::ANSWER_MS_MAX - 1);
    assert_eq!(desk.news, []);
    desk.tick(limits::ANSWER_MS_MAX);
    let (session, asked) = (one, Bytes::mib(4));
    assert_eq!(desk.news[0], Effect::Unanswered { session, device: DEVICE, asked });
    assert_eq!(desk.asked(), [(3, 2, 4)], "somebody else may have it");
    assert!(is_granted(&desk.release(other, &held[..2])));
    // What it says at last is heard, and it may be asked again.
    desk.answer(one, 1);
    assert!(matches!(desk.news[..], [Effect::Gave { given: Bytes::ZERO, .. }]));
}

#[test]
fn a_request_whose_time_is_up_waits_for_the_answers_to_its_own_questions_and_for_no_others() {
    let mut desk = Desk::new(16);
    let (one, two, three) = (desk.join(1, 0), desk.join(2, 0), desk.join(3, 0));
    let held = desk.granted(one, 8);
    desk.park(one, 4);
    desk.acquire(two, 2, 10);
    assert_eq!(desk.asked(), [(1, 1, 4)]);
    assert!(matches!(desk.refused(three, 1, 0), Refusal::Exhausted { ahead: 1, .. }), "it asked nobody");
    assert_eq!(desk.tick(50), []);
    desk.release(one, &held[..1]);
    assert!(matches!(refusal(desk.answer(one, 1)), Refusal::Exhausted { waited_ms: 50, .. }));
}

#[test]
fn what_was_got_by_asking_stays_for_a_while_and_longer_each_time() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    let mut held = desk.granted(one, 8);
    let (mut from, mut to, mut now, mut waits) = (one, two, 0, Vec::new());
    for ask in 1..=8 {
        desk.park(from, 16);
        desk.acquire(to, 8, 60_000);
        let begin = now;
        while desk.asked().is_empty() {
            now += 1;
            desk.tick(now);
        }
        waits.push(now - begin);
        desk.release(from, &held);
        let answers = desk.answer(from, ask);
        assert_eq!(answers, []);
        held = desk.ledger.sessions[&to].leased.iter().copied().collect();
        assert_eq!(held.len(), 8);
        (from, to) = (to, from);
    }
    // Each has its own: every second one is twice as long.
    assert_eq!(waits, [0, 50, 50, 100, 100, 200, 200, 400]);
    // Who is guaranteed it does not wait for that, nor does a higher priority.
    let three = desk.join(3, 1);
    desk.park(from, 16);
    desk.acquire(three, 1, 60_000);
    assert_eq!(desk.asked(), [(from.0, 9, 2)]);
}

#[test]
fn guarantees_together_are_never_more_than_the_budget_and_are_waited_for_in_order() {
    let mut desk = Desk::new(16);
    let (one, two, three) = (desk.join(1, 0), desk.join(2, 0), desk.join(3, 0));
    desk.admitted(one, 10);
    let Refusal::Guarantee { requested, promised, budget, holders, .. } = refusal(desk.admit(two, 8, 0)) else {
        panic!()
    };
    assert_eq!((requested, promised, budget), (Bytes::mib(8), Bytes::mib(10), Bytes::mib(16)));
    assert_eq!(holders, [Holding { session: one, held: Bytes::mib(10) }]);
    assert_eq!(desk.admit(two, 8, 1_000), []);
    assert_eq!(desk.admit(three, 2, 1_000), [], "it came later");
    assert_eq!(desk.ledger.device(DEVICE).unwrap().guaranteed, Bytes::mib(10));
    let answers = desk.admit(one, 4, 0);
    assert_eq!(answers.len(), 3, "less is granted at once, and then the others: {answers:?}");
    assert_eq!(desk.ledger.device(DEVICE).unwrap().guaranteed, Bytes::mib(14));
    let answers = desk.step(Command::End { session: two, reason: EndReason::Died });
    assert_eq!((answers, desk.ledger.device(DEVICE).unwrap().guaranteed), (vec![], Bytes::mib(6)));
    // Above its own limit, or what the device has, nobody is guaranteed anything.
    let four = desk.open(4, 4);
    assert!(matches!(refusal(desk.admit(four, 6, 0)), Refusal::OverLimit { .. }));
    assert!(matches!(refusal(desk.admit(one, 18, 0)), Refusal::OverBudget { .. }));
}

#[test]
fn what_is_guaranteed_and_lent_comes_back_before_anybody_else_is_served() {
    let mut desk = Desk::new(16);
    let (owner, borrower, other) = (desk.join(1, 0), desk.join(2, 9), desk.join(3, 9));
    desk.admitted(owner, 8);
    let held = desk.granted(borrower, 8);
    desk.park(borrower, 0);
    desk.acquire(other, 2, 1_000);
    desk.acquire(owner, 4, 1_000);
    assert_eq!(desk.asked(), []);
    desk.park(borrower, 8);
    assert_eq!(desk.asked(), [(2, 1, 8)], "for the owner, though the other came first and ranks higher");
    let answers = desk.release(borrower, &held[..4]);
    assert!(is_granted(&answers) && desk.ledger.sessions[&owner].leased.len() == 4, "{answers:?}");
}

#[test]
fn a_guarantee_that_is_not_lent_is_there_at_once() {
    let mut desk = Desk::new(16);
    let (owner, other) = (desk.join(1, 0), desk.join(2, 9));
    desk.change(owner, Change { lends: Some(false), ..Change::default() });
    desk.admitted(owner, 8);
    let Refusal::Exhausted { withheld, .. } = desk.refused(other, 5, 0) else { panic!() };
    assert_eq!(withheld, Bytes::mib(8));
    desk.granted(other, 4);
    assert_eq!(desk.ledger.room(other, DEVICE), Some(Bytes::ZERO));
    assert_eq!(desk.ledger.room(owner, DEVICE), Some(Bytes::mib(8)));
    desk.granted(owner, 4);
    // It is not asked for what it is guaranteed, however idle that is.
    desk.park(owner, 8);
    desk.acquire(other, 1, 1_000);
    assert_eq!(desk.asked(), []);
}

#[test]
fn a_guarantee_that_is_not_lent_is_answered_when_it_is_there_and_kept_meanwhile() {
    let mut desk = Desk::new(16);
    let (other, owner) = (desk.join(2, 0), desk.join(1, 0));
    let held = desk.granted(other, 6);
    desk.park(other, 0);
    desk.change(owner, Change { lends: Some(false), ..Change::default() });
    assert_eq!(desk.admit(owner, 8, 100), []);
    assert!(matches!(desk.refused(other, 1, 0), Refusal::Exhausted { .. }), "what is left is kept");
    // In vain: nobody is kept anything for it any more.
    assert!(matches!(refusal(desk.tick(100)), Refusal::Guarantee { .. }));
    desk.granted(other, 1);
    assert_eq!(desk.admit(owner, 8, 100), []);
    let answers = desk.release(other, &held[..3]);
    assert!(matches!(&answers[..], [(_, Answer::Granted(chunks))] if chunks.is_empty()), "{answers:?}");
}

#[test]
fn what_becomes_of_borrowers_who_stay_is_what_the_policy_says() {
    for overstay in [Overstay::Refuse, Overstay::Wait, Overstay::End] {
        let mut desk = Desk::new(16);
        desk.ledger.set_overstay(overstay);
        let (owner, small, large) = (desk.join(1, 0), desk.join(2, 0), desk.join(3, 0));
        desk.admitted(owner, 8);
        desk.granted(small, 2);
        desk.granted(large, 6);
        desk.park(small, 0);
        desk.park(large, 0);
        assert!(matches!(desk.refused(owner, 2, 0), Refusal::Exhausted { .. }), "who does not wait asks nobody");
        assert_eq!(desk.acquire(owner, 2, 100), []);
        let answers = desk.tick(100);
        match overstay {
            Overstay::Refuse => assert!(matches!(refusal(answers), Refusal::Exhausted { .. })),
            Overstay::Wait => {
                assert_eq!((answers, desk.tick(1_000_000)), (vec![], vec![]));
                assert!(matches!(refusal(desk.tick(limits::WAIT_MS_MAX)), Refusal::Exhausted { .. }));
            }
            Overstay::End => {
                assert_eq!((answers, desk.tick(2 * limits::ANSWER_MS_MAX - 1), desk.news.len()), (vec![], vec![], 0));
                assert_eq!(desk.tick(2 * limits::ANSWER_MS_MAX), []);
                let ended = Effect::EndBorrower { session: large, device: DEVICE, waiting: owner };
                assert_eq!(std::mem::take(&mut desk.news), [ended]);
                assert!(matches!(desk.refused(large, 1, 0), Refusal::Evicted));
                assert!(is_granted(&desk.step(Command::End { session: large, reason: EndReason::Died })));
            }
        }
    }
}

#[test]
fn borrowers_are_asked_before_any_of_them_is_ended_and_one_that_cannot_be_is_passed_over() {
    let mut desk = Desk::new(16);
    desk.ledger.set_overstay(Overstay::End);
    let (owner, first, second) = (desk.join(1, 0), desk.join(2, 0), desk.join(3, 0));
    desk.admitted(owner, 12);
    let held = desk.granted(first, 5);
    desk.granted(second, 3);
    desk.park(first, 4);
    desk.park(second, 0);
    assert_eq!(desk.acquire(owner, 5, 100), []);
    assert_eq!(desk.asked(), [], "4 MiB would not do");
    desk.tick(100);
    assert_eq!(desk.asked(), [(2, 1, 4)], "before anybody is ended they are taken");
    desk.release(first, &held[..2]);
    desk.answer(first, 1);
    desk.tick(2_000);
    let ended = |session| Effect::EndBorrower { session, device: DEVICE, waiting: owner };
    assert_eq!(desk.news.last(), Some(&ended(first)), "it has most: {:?}", desk.news);
    assert!(desk.ledger.session(first).unwrap().is_evicted);
    // It turns out that it does not end.
    desk.step(Command::Spare { session: first });
    assert!(!desk.ledger.session(first).unwrap().is_evicted, "it goes on as before");
    assert!(matches!(refusal(desk.tick(12_000)), Refusal::Exhausted { .. }));
    desk.acquire(owner, 4, 100);
    desk.tick(12_200);
    desk.tick(14_000);
    assert_eq!(desk.news.last(), Some(&ended(second)));
}

#[test]
fn a_limit_that_falls_while_a_guarantee_is_waited_for_is_kept() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    desk.admitted(one, 12);
    assert_eq!(desk.admit(two, 8, 1_000), []);
    let change = Change { limit: Some(Bytes::mib(6)), ..Change::default() };
    let answers = desk.step(Command::Change { session: two, change, revision: None });
    assert!(matches!(refusal(answers), Refusal::OverLimit { .. }));
    desk.step(Command::End { session: one, reason: EndReason::Closed });
    assert_eq!(desk.ledger.device(DEVICE).unwrap().guaranteed, Bytes::ZERO);
}

#[test]
fn one_that_holds_more_than_it_may_is_asked_again_until_it_does_not() {
    let mut desk = Desk::new(16);
    let one = desk.join(1, 0);
    let held = desk.granted(one, 4);
    desk.park(one, 0);
    desk.change(one, Change { limit: Some(Bytes::mib(4)), ..Change::default() });
    assert_eq!(desk.asked(), [], "it has nothing idle");
    desk.park(one, 6);
    desk.tick(20);
    assert_eq!(desk.asked(), [(1, 1, 4)]);
    desk.release(one, &held[..2]);
    desk.answer(one, 1);
    desk.tick(1_000);
    assert_eq!(desk.asked(), []);
}

#[test]
fn whoever_runs_the_daemon_gets_what_is_idle_though_it_is_guaranteed() {
    let mut desk = Desk::new(16);
    let one = desk.join(1, 0);
    desk.change(one, Change { lends: Some(false), ..Change::default() });
    desk.admitted(one, 16);
    let held = desk.granted(one, 4);
    desk.park(one, 8);
    desk.step(Command::Drain { device: DEVICE, is_draining: true });
    assert_eq!(desk.asked(), [(1, 1, 8)]);
    desk.answer(one, 1);
    desk.release(one, &held);
    assert_eq!(desk.ledger.device(DEVICE).unwrap().chunks, 0, "nothing of a device that is drained is kept");
}

#[test]
fn terms_change_at_once_or_when_enough_has_come_back_and_only_if_nobody_else_has() {
    let mut desk = Desk::new(16);
    let one = desk.join(1, 0);
    let held = desk.granted(one, 6);
    desk.park(one, 8);
    desk.change(one, Change { limit: Some(Bytes::mib(6)), ..Change::default() });
    assert_eq!(desk.asked(), [(1, 1, 6)], "what it holds above it");
    assert!(matches!(desk.refused(one, 1, 0), Refusal::OverLimit { .. }));
    desk.release(one, &held[..4]);
    desk.answer(one, 1);
    desk.granted(one, 1);
    assert!(matches!(desk.refused(one, 1, 0), Refusal::OverLimit { .. }));
    let view = desk.ledger.session(one).unwrap();
    assert_eq!((view.revision, view.terms.limit), (1, Bytes::mib(6)));
    let change = Change { priority: Some(3), ..Change::default() };
    let stale = desk.ledger.step(Command::Change { session: one, change, revision: Some(0) });
    assert_eq!(stale.unwrap_err(), LedgerError::Stale { session: one, revision: 1, meant: 0 });
    desk.step(Command::Change { session: one, change, revision: Some(1) });
    assert_eq!(desk.ledger.session(one).unwrap().terms.priority, 3);
    desk.admitted(one, 6);
    let change = Change { limit: Some(Bytes::mib(4)), ..Change::default() };
    let broken = desk.ledger.step(Command::Change { session: one, change, revision: None });
    assert!(matches!(broken, Err(LedgerError::BelowGuarantee { .. })), "{broken:?}");
}

#[test]
fn a_higher_limit_or_priority_is_felt_by_who_waits() {
    let mut desk = Desk::new(8);
    let (one, two, three) = (desk.join(1, 0), desk.join(2, 0), desk.join(3, 0));
    let held = desk.granted(one, 4);
    desk.acquire(two, 1, 1_000);
    desk.acquire(three, 1, 1_000);
    desk.change(three, Change { priority: Some(1), ..Change::default() });
    desk.release(one, &held[..1]);
    assert_eq!(desk.ledger.sessions[&three].leased.len(), 1, "it came later and ranks higher now");
    desk.change(two, Change { limit: Some(Bytes::ZERO), ..Change::default() });
    assert_eq!(desk.ledger.request_count(), 0, "it could never be served");
}

#[test]
fn an_evicted_session_gets_nothing_more_and_is_asked_for_what_is_idle() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    desk.admitted(one, 8);
    let held = desk.granted(one, 4);
    desk.granted(two, 4);
    desk.park(one, 4);
    desk.park(two, 0);
    desk.acquire(one, 4, 1_000);
    assert_eq!(refusal(desk.step(Command::Evict { session: one })), Refusal::Evicted);
    assert_eq!(desk.asked(), [(1, 1, 4)]);
    assert_eq!(desk.refused(one, 1, 0), Refusal::Evicted);
    assert_eq!(refusal(desk.admit(one, 2, 0)), Refusal::Evicted);
    desk.release(one, &held);
    desk.granted(two, 4);
    assert_eq!(desk.ledger.device(DEVICE).unwrap().guaranteed, Bytes::ZERO);
}

#[test]
fn a_device_that_is_drained_has_nothing_to_promise_until_it_is_again() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    desk.granted(one, 8);
    desk.park(one, 6);
    desk.acquire(two, 4, 1_000);
    let refused = refusal(desk.step(Command::Drain { device: DEVICE, is_draining: true }));
    assert_eq!((refused, desk.asked()), (Refusal::Draining { device: DEVICE }, vec![(1, 1, 6)]));
    assert_eq!(desk.refused(one, 1, 1_000), Refusal::Draining { device: DEVICE });
    let view = desk.ledger.device(DEVICE).unwrap();
    assert_eq!((view.available(), view.is_draining), (Bytes::ZERO, true));
    desk.step(Command::Drain { device: DEVICE, is_draining: false });
    assert!(matches!(desk.refused(one, 1, 0), Refusal::Exhausted { .. }));
}

#[test]
fn who_waits_for_each_other_on_two_devices_is_told_so() {
    let mut desk = Desk::new(4);
    let other = DeviceId(1);
    desk.step(Command::AddDevice { device: other, total: Bytes::mib(4), chunks_max: 9 });
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    let want = |desk: &mut Desk, session, device, wait_ms| {
        desk.next += 1;
        let (request, holder) = (RequestId(desk.next), Holder::Session(session));
        let parts = vec![Part { len: Bytes::mib(2), count: 2 }];
        desk.step(Command::Acquire { request, holder, device, parts, plan: None, wait_ms, waited_ms: 0 })
    };
    assert!(is_granted(&want(&mut desk, one, DEVICE, 0)));
    assert!(is_granted(&want(&mut desk, two, other, 0)));
    desk.step(Command::Parked { device: DEVICE, sessions: vec![(one, Some(Bytes::ZERO))] });
    desk.step(Command::Parked { device: other, sessions: vec![(two, Some(Bytes::ZERO))] });
    assert_eq!(want(&mut desk, one, other, 10_000), [], "the other may go on");
    let Refusal::Deadlock { device, cycle } = refusal(want(&mut desk, two, DEVICE, 10_000)) else { panic!() };
    assert_eq!((device, cycle[0].session), (DEVICE, one));
    assert_eq!(desk.ledger.request_count(), 1, "the one that asked first waits on");
}

#[test]
fn a_session_that_goes_leaves_no_question_behind() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.join(1, 0), desk.join(2, 0));
    desk.granted(one, 8);
    desk.park(one, 8);
    desk.acquire(two, 4, 10);
    assert_eq!(desk.asked(), [(1, 1, 8)]);
    desk.tick(11);
    let answers = desk.step(Command::Detach { session: one });
    assert!(matches!(refusal(answers), Refusal::Exhausted { .. }), "nobody waits for one that cannot answer");
    assert_eq!(desk.ledger.device(DEVICE).unwrap().asked, 0);
}

#[test]
fn of_those_who_wait_for_each_other_whoever_is_guaranteed_it_is_not_refused() {
    let mut desk = Desk::new(16);
    let (owner, borrower) = (desk.open(1, 64), desk.open(2, 64));
    desk.admitted(owner, 12);
    desk.granted(owner, 2);
    let lent = desk.granted(borrower, 6);
    assert_eq!(desk.acquire(borrower, 1, 10_000), []);
    let borrowing = RequestId(desk.next);
    // The owner's request is the younger one, and it is the borrower's that goes.
    let answers = desk.acquire(owner, 2, 10_000);
    let [(request, Answer::Refused(Refusal::Deadlock { .. }))] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(*request, borrowing);
    let answers = desk.step(Command::Release { session: borrower, chunks: lent[..2].to_vec() });
    assert!(matches!(answers[..], [(_, Answer::Granted(_))]), "{answers:?}");
}
