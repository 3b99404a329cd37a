//! One behaviour each; random and exhaustive command lists are in `tests/model`.

mod facts;
mod promises;
mod shared;

use std::collections::VecDeque;

use super::*;
use crate::error::ErrorKind;

const DEVICE: DeviceId = DeviceId(0);

/// A ledger with one device of `mib` MiB, and an executor that answers every effect at once.
struct Desk {
    ledger: Ledger,
    next: u64,
    created: Vec<ChunkId>,
    destroyed: Vec<ChunkId>,
    /// Bytes that the driver will create before it refuses.
    driver_has: Bytes,
    /// What was asked of whom, and what else was told.
    news: Vec<Effect>,
}

/// What became of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Answer {
    Granted(Vec<ChunkId>),
    Refused(Refusal),
}

impl Desk {
    fn new(mib: u64) -> Desk {
        let mut ledger = Ledger::new();
        ledger.step(Command::AddDevice { device: DEVICE, total: Bytes::mib(mib), chunks_max: 1_000 }).unwrap();
        Desk { ledger, next: 0, created: Vec::new(), destroyed: Vec::new(), driver_has: Bytes::MAX, news: Vec::new() }
    }

    fn open(&mut self, session: u64, limit_mib: u64) -> SessionId {
        let session = SessionId(session);
        self.step(Command::Open { session, terms: Terms::new(Bytes::mib(limit_mib), 0) });
        session
    }

    /// Steps, and carries out what follows until nothing follows.
    fn step(&mut self, command: Command) -> Vec<(RequestId, Answer)> {
        let mut answers = Vec::new();
        let mut commands = VecDeque::from([command]);
        while let Some(command) = commands.pop_front() {
            let effects = self.ledger.step(command).unwrap();
            self.ledger.invariants().unwrap();
            for effect in effects {
                match effect {
                    Effect::Create { chunk, len, .. } => {
                        if let Some(left) = self.driver_has.checked_sub(len) {
                            self.driver_has = left;
                            self.created.push(chunk);
                            commands.push_back(Command::Created { chunk });
                        } else {
                            commands.push_back(Command::CreateFailed { chunk, why: Shortage::Memory });
                        }
                    }
                    Effect::Destroy { chunk } => {
                        self.destroyed.push(chunk);
                        commands.push_back(Command::Destroyed { chunk });
                    }
                    Effect::Grant { request, chunks, .. } => {
                        answers.push((request, Answer::Granted(chunks.into_iter().map(|(chunk, _)| chunk).collect())));
                    }
                    Effect::Refuse { request, refusal, .. } => answers.push((request, Answer::Refused(refusal))),
                    Effect::AskBack { .. }
                    | Effect::Gave { .. }
                    | Effect::Unanswered { .. }
                    | Effect::EndBorrower { .. }
                    | Effect::Registered { .. }
                    | Effect::RangeGone { .. } => self.news.push(effect),
                }
            }
        }
        answers
    }

    fn acquire(&mut self, session: SessionId, chunks: u64, wait_ms: u64) -> Vec<(RequestId, Answer)> {
        self.acquire_for(Holder::Session(session), chunks, None, wait_ms)
    }

    fn acquire_for(
        &mut self,
        holder: Holder,
        chunks: u64,
        plan: Option<PlanId>,
        wait_ms: u64,
    ) -> Vec<(RequestId, Answer)> {
        self.next += 1;
        let parts = vec![Part { len: Bytes::mib(2), count: chunks }];
        self.step(Command::Acquire {
            request: RequestId(self.next),
            holder,
            device: DEVICE,
            parts,
            plan,
            wait_ms,
            waited_ms: 0,
        })
    }

    fn granted(&mut self, session: SessionId, chunks: u64) -> Vec<ChunkId> {
        match self.acquire(session, chunks, 0).pop() {
            Some((_, Answer::Granted(chunks))) => chunks,
            other => panic!("not granted: {other:?}"),
        }
    }

    fn refused(&mut self, session: SessionId, chunks: u64, wait_ms: u64) -> Refusal {
        match self.acquire(session, chunks, wait_ms).pop() {
            Some((_, Answer::Refused(refusal))) => refusal,
            other => panic!("not refused: {other:?}"),
        }
    }

    fn leased(&self) -> u64 {
        self.ledger.device(DEVICE).unwrap().bytes.leased.get() >> 20
    }
}

#[test]
fn released_chunks_come_back_to_the_session_that_had_them() {
    let mut desk = Desk::new(64);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    let first = desk.granted(one, 4);
    desk.step(Command::Release { session: one, chunks: first.clone() });
    let other = desk.granted(two, 4);
    assert!(first.iter().all(|chunk| !other.contains(chunk)), "two was given what one could have mapped");
    assert_eq!(desk.granted(one, 4), first);
    assert!(desk.destroyed.is_empty());
}

#[test]
fn a_session_exchanges_what_it_has_returned() {
    let mut desk = Desk::new(64);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    let acquire = |desk: &mut Desk, holder, mib, count| {
        desk.next += 1;
        let parts = vec![Part { len: Bytes::mib(mib), count }];
        let (request, holder) = (RequestId(desk.next), Holder::Session(holder));
        let answers = desk.step(Command::Acquire {
            request,
            holder,
            device: DEVICE,
            parts,
            plan: None,
            wait_ms: 0,
            waited_ms: 0,
        });
        match answers.into_iter().next() {
            Some((_, Answer::Granted(chunks))) => chunks,
            other => panic!("not granted: {other:?}"),
        }
    };
    let large = acquire(&mut desk, one, 8, 3);
    desk.step(Command::Release { session: one, chunks: large.clone() });
    acquire(&mut desk, two, 2, 4);
    assert!(desk.destroyed.is_empty(), "{:?} are another session's", desk.destroyed);
    acquire(&mut desk, one, 2, 5);
    assert_eq!(desk.destroyed.len(), 2, "10 MiB take the place of two chunks");
    acquire(&mut desk, one, 2, 3);
    assert_eq!(desk.destroyed.len(), 2, "which were of 16 MiB");
    let left: Vec<_> = large.into_iter().filter(|chunk| !desk.destroyed.contains(chunk)).collect();
    assert_eq!(acquire(&mut desk, one, 8, 1), left);
}

#[test]
fn idle_chunks_of_others_are_destroyed_to_make_room_never_handed_on() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    let first = desk.granted(one, 8);
    desk.step(Command::Release { session: one, chunks: first.clone() });
    let other = desk.granted(two, 6);
    assert_eq!(desk.destroyed.len(), 6);
    assert!(other.iter().all(|chunk| !first.contains(chunk)));
    assert_eq!(desk.leased(), 12);
}

#[test]
fn a_dead_sessions_chunks_are_destroyed_and_their_bytes_granted_once() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    let left = desk.granted(one, 8);
    let waiting = desk.acquire(two, 8, 1000);
    assert_eq!(waiting, []);
    let answers = desk.step(Command::End { session: one, reason: EndReason::Died });
    assert!(matches!(&answers[..], [(_, Answer::Granted(chunks))] if chunks.iter().all(|chunk| !left.contains(chunk))));
    assert_eq!(desk.ledger.returned(), ReturnedBytes { death: Bytes::mib(16), ..ReturnedBytes::default() });
    assert!(desk.ledger.step(Command::End { session: one, reason: EndReason::Died }).is_err());
}

#[test]
fn limits_and_budgets_are_refused_with_their_numbers() {
    let mut desk = Desk::new(16);
    let one = desk.open(1, 8);
    desk.granted(one, 3);
    let refusal = desk.refused(one, 2, 1000);
    assert_eq!(refusal, Refusal::OverLimit { requested: Bytes::mib(4), held: Bytes::mib(6), limit: Bytes::mib(8) });
    assert_eq!(refusal.kind(), ErrorKind::OverLimit);
    let two = desk.open(2, 64);
    assert!(matches!(desk.refused(two, 9, 1000), Refusal::OverBudget { .. }));
    let Refusal::Exhausted { requested, available, budget, holders, .. } = desk.refused(two, 8, 0) else { panic!() };
    assert_eq!((requested, available, budget), (Bytes::mib(16), Bytes::mib(10), Bytes::mib(16)));
    assert_eq!(holders, [Holding { session: one, held: Bytes::mib(6) }]);
}

#[test]
fn a_waiting_request_times_out_with_who_holds_what() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    desk.granted(one, 8);
    assert_eq!(desk.acquire(two, 1, 500), []);
    assert_eq!(desk.step(Command::Tick { now_ms: 499 }), []);
    let waits: Vec<_> = desk.ledger.requests().iter().map(|request| (request.is_waiting, request.age_ms)).collect();
    assert_eq!(waits, [(true, 499)]);
    let answers = desk.step(Command::Tick { now_ms: 500 });
    let [(_, Answer::Refused(refusal))] = &answers[..] else { panic!("{answers:?}") };
    assert!(matches!(refusal, Refusal::Exhausted { waited_ms: 500, .. }), "{refusal}");
    assert_eq!(desk.ledger.request_count(), 0);
}

#[test]
fn what_a_request_has_waited_for_a_ledger_before_this_one_counts_wherever_that_is_told() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    desk.granted(one, 8);
    let (request, parts) = (RequestId(90), vec![Part { len: Bytes::mib(2), count: 1 }]);
    let holder = Holder::Session(two);
    let acquire = Command::Acquire { request, holder, device: DEVICE, parts, plan: None, wait_ms: 500, waited_ms: 64 };
    assert_eq!(desk.step(acquire), []);
    assert_eq!(desk.step(Command::Tick { now_ms: 499 }), []);
    assert_eq!(desk.ledger.requests()[0].age_ms, 563);
    // How long it still waits is another matter.
    let answers = desk.step(Command::Tick { now_ms: 500 });
    let [(_, Answer::Refused(refusal))] = &answers[..] else { panic!("{answers:?}") };
    assert!(matches!(refusal, Refusal::Exhausted { waited_ms: 564, .. }), "{refusal}");
}

#[test]
fn a_job_that_grows_is_served_before_one_that_starts_and_otherwise_the_older() {
    let mut desk = Desk::new(16);
    let (one, two, three) = (desk.open(1, 64), desk.open(2, 64), desk.open(3, 64));
    let held = desk.granted(one, 8);
    assert_eq!(desk.acquire(two, 2, 1000), []);
    assert_eq!(desk.acquire(three, 1, 1000), []);
    // One chunk free: three could be served, but two came first.
    assert_eq!(desk.step(Command::Release { session: one, chunks: held[..1].to_vec() }), []);
    // One grows before both.
    let answers = desk.acquire(one, 1, 1000);
    assert_eq!(answers.len(), 1);
    let answers = desk.step(Command::Release { session: one, chunks: held[1..4].to_vec() });
    let order: Vec<_> = answers.iter().map(|(request, _)| request.0).collect();
    assert_eq!(order, [2, 3]);
}

#[test]
fn when_all_holders_wait_the_youngest_is_refused_at_once() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    desk.granted(one, 4);
    desk.granted(two, 4);
    assert_eq!(desk.acquire(one, 1, 10_000), []);
    let answers = desk.acquire(two, 1, 10_000);
    let [(request, Answer::Refused(Refusal::Deadlock { cycle, .. }))] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(*request, RequestId(desk.next));
    assert_eq!(cycle.len(), 2);
    // The other one still waits, and is served by a release.
    assert_eq!(desk.ledger.request_count(), 1);
    let answers = desk.step(Command::End { session: two, reason: EndReason::Closed });
    assert!(matches!(answers[..], [(_, Answer::Granted(_))]));
}

#[test]
fn the_only_holder_that_asks_for_more_than_is_left_is_refused_at_once() {
    let mut desk = Desk::new(16);
    let one = desk.open(1, 64);
    desk.granted(one, 8);
    assert!(matches!(desk.refused(one, 1, 60_000), Refusal::Deadlock { .. }));
}

#[test]
fn a_create_that_the_driver_refuses_lowers_the_budget_and_gives_everything_back() {
    let mut desk = Desk::new(64);
    desk.driver_has = Bytes::mib(10);
    let one = desk.open(1, 64);
    let Refusal::Exhausted { available, budget, .. } = desk.refused(one, 8, 0) else { panic!() };
    assert_eq!((available, budget), (Bytes::mib(10), Bytes::mib(10)));
    assert_eq!(desk.leased(), 0);
    assert_eq!(desk.granted(one, 5).len(), 5);
    desk.driver_has = Bytes::mib(54);
    desk.step(Command::Observe { device: DEVICE, free: Bytes::mib(54) });
    assert_eq!(desk.granted(one, 20).len(), 20);
}

#[test]
fn what_others_hold_is_not_promised() {
    let mut desk = Desk::new(64);
    desk.step(Command::Observe { device: DEVICE, free: Bytes::mib(20) });
    let one = desk.open(1, 64);
    assert!(matches!(desk.refused(one, 11, 0), Refusal::Exhausted { .. }));
    desk.granted(one, 10);
    let view = desk.ledger.device(DEVICE).unwrap();
    assert_eq!((view.foreign, view.budget), (Bytes::mib(44), Bytes::mib(20)));
}

#[test]
fn a_chunk_that_cannot_be_destroyed_stays_in_quarantine_until_it_can() {
    let mut ledger = Ledger::new();
    ledger.step(Command::AddDevice { device: DEVICE, total: Bytes::mib(4), chunks_max: 1_000 }).unwrap();
    let session = SessionId(1);
    ledger.step(Command::Open { session, terms: Terms::new(Bytes::mib(4), 0) }).unwrap();
    let parts = vec![Part { len: Bytes::mib(2), count: 1 }];
    let acquire = |request| Command::Acquire {
        request: RequestId(request),
        holder: Holder::Session(session),
        device: DEVICE,
        parts: parts.clone(),
        plan: None,
        wait_ms: 0,
        waited_ms: 0,
    };
    let effects = ledger.step(acquire(1)).unwrap();
    let [Effect::Create { chunk, .. }] = effects[..] else { panic!("{effects:?}") };
    ledger.step(Command::Created { chunk }).unwrap();
    ledger.step(Command::End { session, reason: EndReason::Died }).unwrap();
    ledger.step(Command::DestroyFailed { chunk }).unwrap();
    ledger.invariants().unwrap();
    assert_eq!(ledger.step(Command::DestroyFailed { chunk }), Err(LedgerError::Unasked(chunk)));
    let view = ledger.device(DEVICE).unwrap();
    assert_eq!((view.bytes.quarantined, view.quarantined_chunks, view.available()), (Bytes::mib(2), 1, Bytes::mib(2)));
    ledger.step(Command::Destroyed { chunk }).unwrap();
    ledger.invariants().unwrap();
    assert_eq!(ledger.step(Command::Destroyed { chunk }), Err(LedgerError::Unasked(chunk)));
    let view = ledger.device(DEVICE).unwrap();
    assert_eq!((view.bytes.quarantined, view.quarantined_chunks, view.available()), (Bytes::ZERO, 0, Bytes::mib(4)));
}

#[test]
fn reserved_chunks_go_to_the_job_of_their_plan_only() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    let plan = PlanId(7);
    let reserved = desk.acquire_for(Holder::Plan(plan), 6, None, 0);
    let [(_, Answer::Granted(reserved))] = &reserved[..] else { panic!("{reserved:?}") };
    let refusal = desk.refused(two, 3, 0).to_string();
    assert!(refusal.ends_with("held by plans whose jobs are to come (12.0 MiB)"), "{refusal}");
    let job = desk.acquire_for(Holder::Session(one), 6, Some(plan), 0);
    let [(_, Answer::Granted(job))] = &job[..] else { panic!("{job:?}") };
    assert_eq!(job, reserved);
    assert_eq!(desk.ledger.reserved(), []);
    assert_eq!(desk.ledger.step(Command::Unreserve { plan }), Err(LedgerError::NoPlan(plan)));
}

#[test]
fn an_unreserved_plan_frees_its_chunks_for_everybody() {
    let mut desk = Desk::new(16);
    let one = desk.open(1, 64);
    desk.acquire_for(Holder::Plan(PlanId(7)), 8, None, 0);
    desk.step(Command::Unreserve { plan: PlanId(7) });
    assert_eq!(desk.granted(one, 8).len(), 8);
    assert!(desk.destroyed.is_empty(), "nobody had imported them");
}

#[test]
fn a_release_of_what_is_not_held_changes_nothing() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    let mine = desk.granted(one, 2);
    let error = |session, chunks: &[ChunkId], desk: &mut Desk| {
        let error = desk.ledger.step(Command::Release { session, chunks: chunks.to_vec() }).unwrap_err();
        desk.ledger.invariants().unwrap();
        error
    };
    assert_eq!(error(two, &mine, &mut desk), LedgerError::NotHeld { session: two, chunk: mine[0] });
    assert_eq!(error(one, &[mine[0], mine[0]], &mut desk), LedgerError::NotHeld { session: one, chunk: mine[0] });
    assert_eq!(
        error(one, &[mine[0], ChunkId(99)], &mut desk),
        LedgerError::NotHeld { session: one, chunk: ChunkId(99) }
    );
    assert_eq!(desk.leased(), 4);
}

#[test]
fn a_detached_session_keeps_what_it_has_and_asks_for_nothing() {
    let mut desk = Desk::new(16);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    desk.granted(one, 4);
    desk.granted(two, 2);
    assert_eq!(desk.acquire(one, 3, 1000), []);
    let answers = desk.step(Command::Detach { session: one });
    assert!(matches!(answers[..], [(_, Answer::Refused(Refusal::Cancelled))]));
    assert_eq!(desk.leased(), 12);
    let parts = vec![Part { len: Bytes::mib(2), count: 1 }];
    let again = Command::Acquire {
        request: RequestId(99),
        holder: Holder::Session(one),
        device: DEVICE,
        parts,
        plan: None,
        wait_ms: 0,
        waited_ms: 0,
    };
    assert_eq!(desk.ledger.step(again), Err(LedgerError::Detached(one)));
}

#[test]
fn warm_chunks_are_created_only_in_room_that_nobody_needs() {
    let mut desk = Desk::new(16);
    let one = desk.open(1, 64);
    desk.granted(one, 6);
    let warm = |count| Command::Warm { device: DEVICE, part: Part { len: Bytes::mib(2), count } };
    desk.step(warm(1));
    assert_eq!(desk.created.len(), 7);
    desk.step(warm(1));
    assert_eq!(desk.created.len(), 7, "one lies there already");
    desk.step(warm(100));
    assert_eq!(desk.created.len(), 8, "there is room for eight");
    assert_eq!(desk.granted(one, 2).len(), 2);
    assert_eq!(desk.created.len(), 8, "what was warm is what was granted");
}

#[test]
fn whoever_stood_behind_an_overdue_request_is_served_by_the_same_tick() {
    let mut desk = Desk::new(8);
    let (one, two, three) = (desk.open(1, 64), desk.open(2, 64), desk.open(3, 64));
    desk.granted(one, 2);
    assert_eq!(desk.acquire(two, 3, 500), []);
    assert_eq!(desk.acquire(three, 1, 10_000), []);
    let answers = desk.step(Command::Tick { now_ms: 500 });
    let [(overdue, Answer::Refused(Refusal::Exhausted { .. })), (next, Answer::Granted(_))] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!((*overdue, *next), (RequestId(2), RequestId(3)));
}

#[test]
fn a_circle_that_a_grant_closes_is_broken_by_it() {
    let mut ledger = Ledger::new();
    ledger.step(Command::AddDevice { device: DEVICE, total: Bytes::mib(4), chunks_max: 1_000 }).unwrap();
    let session = SessionId(1);
    ledger.step(Command::Open { session, terms: Terms::new(Bytes::mib(64), 0) }).unwrap();
    let mut acquire = |request, count| {
        let parts = vec![Part { len: Bytes::mib(2), count }];
        let holder = Holder::Session(session);
        let request = RequestId(request);
        ledger
            .step(Command::Acquire {
                request,
                holder,
                device: DEVICE,
                parts,
                plan: None,
                wait_ms: 60_000,
                waited_ms: 0,
            })
            .unwrap()
    };
    let effects = acquire(1, 1);
    let [Effect::Create { chunk, .. }] = effects[..] else { panic!("{effects:?}") };
    assert_eq!(acquire(2, 2), []);
    let effects = ledger.step(Command::Created { chunk }).unwrap();
    let [Effect::Grant { .. }, Effect::Refuse { request, refusal: Refusal::Deadlock { .. }, .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(*request, RequestId(2));
}

#[test]
fn a_ledger_that_is_closed_refuses_who_waits_and_who_asks_and_takes_back_what_is_held() {
    let mut desk = Desk::new(8);
    let (one, two) = (desk.open(1, 64), desk.open(2, 64));
    let held = desk.granted(one, 3);
    assert_eq!((desk.acquire(two, 2, 1000), desk.acquire(two, 3, 1000)), (vec![], vec![]));
    let answers = desk.step(Command::Close);
    let is_closed = |answer: &(RequestId, Answer)| answer.1 == Answer::Refused(Refusal::Closed);
    assert!(answers.len() == 2 && answers.iter().all(is_closed), "{answers:?}");
    assert!(is_closed(&desk.acquire(two, 1, 1000)[0]), "although there is room");
    assert_eq!(desk.ledger.device(DEVICE).unwrap().available(), Bytes::ZERO);
    assert_eq!(desk.step(Command::Release { session: one, chunks: held }), []);
    assert_eq!(desk.leased(), 0);
}

#[test]
fn a_session_that_goes_is_granted_nothing_on_the_way() {
    for goes in
        [Command::Detach { session: SessionId(2) }, Command::End { session: SessionId(2), reason: EndReason::Died }]
    {
        let mut desk = Desk::new(8);
        let (one, two) = (desk.open(1, 64), desk.open(2, 64));
        desk.granted(one, 2);
        assert_eq!(desk.acquire(two, 3, 1000), []);
        assert_eq!(desk.acquire(two, 1, 1000), []);
        let answers = desk.step(goes);
        let is_given_up = |answer: &(RequestId, Answer)| answer.1 == Answer::Refused(Refusal::Cancelled);
        assert!(answers.len() == 2 && answers.iter().all(is_given_up), "{answers:?}");
        assert_eq!(desk.created.len(), 2);
    }
}

#[test]
fn chunks_that_were_set_aside_when_their_plan_was_unreserved_are_not_reserved_again() {
    let mut desk = Desk::new(16);
    let one = desk.open(1, 64);
    let plan = PlanId(7);
    desk.acquire_for(Holder::Plan(plan), 2, None, 0);
    let parts = vec![Part { len: Bytes::mib(2), count: 3 }];
    let holder = Holder::Session(one);
    let request = RequestId(99);
    let acquire =
        Command::Acquire { request, holder, device: DEVICE, parts, plan: Some(plan), wait_ms: 0, waited_ms: 0 };
    let effects = desk.ledger.step(acquire).unwrap();
    let [Effect::Create { chunk, .. }] = effects[..] else { panic!("{effects:?}") };
    desk.ledger.step(Command::Unreserve { plan }).unwrap();
    desk.ledger.step(Command::CreateFailed { chunk, why: Shortage::Nothing }).unwrap();
    desk.ledger.invariants().unwrap();
    assert_eq!(desk.ledger.reserved(), []);
    assert_eq!(desk.ledger.device(DEVICE).unwrap().bytes.idle, Bytes::mib(4));
    assert_eq!(desk.ledger.step(Command::Unreserve { plan }), Err(LedgerError::NoPlan(plan)));
}

#[test]
fn chunks_that_a_failed_request_leaves_idle_are_given_to_whoever_waits() {
    let mut ledger = Ledger::new();
    ledger.step(Command::AddDevice { device: DEVICE, total: Bytes::mib(4), chunks_max: 1_000 }).unwrap();
    for session in [SessionId(1), SessionId(2)] {
        ledger.step(Command::Open { session, terms: Terms::new(Bytes::mib(64), 0) }).unwrap();
    }
    let mut acquire = |request, count| {
        let parts = vec![Part { len: Bytes::mib(2), count }];
        let holder = Holder::Session(SessionId(request));
        let request = RequestId(request);
        ledger
            .step(Command::Acquire {
                request,
                holder,
                device: DEVICE,
                parts,
                plan: None,
                wait_ms: 60_000,
                waited_ms: 0,
            })
            .unwrap()
    };
    let effects = acquire(1, 2);
    let [Effect::Create { chunk: first, .. }, Effect::Create { chunk: second, .. }] = effects[..] else { panic!() };
    assert_eq!(acquire(2, 2), []);
    assert_eq!(ledger.step(Command::CreateFailed { chunk: first, why: Shortage::Nothing }), Ok(vec![]));
    let effects = ledger.step(Command::Created { chunk: second }).unwrap();
    let [Effect::Refuse { request, refusal: Refusal::Driver { .. }, .. }, Effect::Create { .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(*request, RequestId(1));
}

#[test]
fn a_create_that_is_short_of_descriptors_leaves_the_budget_alone_and_says_what_to_raise() {
    let mut desk = Desk::new(16);
    let one = desk.open(1, 64);
    let parts = vec![Part { len: Bytes::mib(2), count: 3 }];
    let (holder, request) = (Holder::Session(one), RequestId(99));
    let acquire =
        Command::Acquire { request, holder, device: DEVICE, parts, plan: None, wait_ms: 60_000, waited_ms: 0 };
    let effects = desk.ledger.step(acquire).unwrap();
    let chunks = effects.iter().map(|effect| match effect {
        Effect::Create { chunk, .. } => *chunk,
        other => panic!("{other:?}"),
    });
    let chunks: Vec<_> = chunks.collect();
    desk.ledger.step(Command::Created { chunk: chunks[0] }).unwrap();
    desk.ledger.step(Command::CreateFailed { chunk: chunks[1], why: Shortage::Chunks }).unwrap();
    let effects = desk.ledger.step(Command::CreateFailed { chunk: chunks[2], why: Shortage::Chunks }).unwrap();
    let [Effect::Refuse { refusal, .. }] = &effects[..] else { panic!("{effects:?}") };
    assert!(matches!(refusal, Refusal::Chunks { requested: 3, available: 1, .. }), "{refusal}");
    assert!(refusal.to_string().contains("LimitNOFILE"));
    let view = desk.ledger.device(DEVICE).unwrap();
    assert_eq!((view.available(), view.bytes.idle), (Bytes::mib(16), Bytes::mib(2)));
    desk.ledger.invariants().unwrap();
}

#[test]
fn what_can_be_had_is_no_more_than_as_many_chunks_as_there_may_be_have() {
    let mut ledger = Ledger::new();
    ledger.step(Command::AddDevice { device: DEVICE, total: Bytes::mib(64), chunks_max: 4 }).unwrap();
    ledger.set_chunk_len_max(Bytes::mib(8));
    let mut desk = Desk { ledger, ..Desk::new(64) };
    let one = desk.open(1, 64);
    let figures = |desk: &Desk| {
        let (view, room) = (desk.ledger.device(DEVICE).unwrap(), desk.ledger.room(one, DEVICE).unwrap());
        assert_eq!(view.available(), room, "nothing is kept for others");
        (view.chunks, room.get() >> 20)
    };
    assert_eq!(figures(&desk), (0, 32));
    let first = desk.granted(one, 1);
    assert_eq!(figures(&desk), (1, 24));
    desk.granted(one, 3);
    assert_eq!(figures(&desk), (4, 0), "56 MiB are nobody's, and there is no chunk to have them in");
    let refusal = desk.refused(one, 1, 0);
    assert!(matches!(refusal, Refusal::Chunks { requested: 1, available: 0, limit: 4, .. }), "{refusal}");
    // One that lies idle makes way for another.
    desk.step(Command::Release { session: one, chunks: first });
    assert_eq!(figures(&desk), (4, 8));
    desk.ledger.set_chunk_len_max(Bytes::gib(1));
    assert_eq!(figures(&desk), (4, 58), "of large ones the bytes run out first");
}
