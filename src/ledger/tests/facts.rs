//! Ledgers that begin with what others left.

use std::collections::BTreeMap;

use super::{Command, DEVICE, Desk};
use crate::ids::{ChunkId, DeviceId, PlanId, RangeId, RequestId, SessionId};
use crate::ladder::Part;
use crate::ledger::*;
use crate::rng::Rng;
use crate::units::Bytes;

const MIB: u64 = 256;
const OTHER: DeviceId = DeviceId(1);

/// What is known of a ledger by whoever has written down each of its steps: nothing of what waits.
fn facts_of(ledger: &Ledger) -> Facts {
    let session = |(session, known): (&SessionId, &session::Session)| SessionFact {
        session: *session,
        terms: known.terms,
        revision: known.revision,
        is_evicted: known.is_evicted,
        guarantees: known
            .places()
            .map(|(device, place)| (device, place.guarantee))
            .filter(|(_, bytes)| !bytes.is_zero())
            .collect(),
    };
    let chunk = |(chunk, record): (&ChunkId, &Record)| {
        let owner = match record.state {
            State::Idle { used_by: None, .. } => Owner::Nobody,
            State::Idle { used_by: Some(session), .. } | State::Leased { session } => Owner::Session(session),
            State::Reserved { plan } => Owner::Plan(plan),
            State::Shared { range } => Owner::Range(range),
            // What is on its way has gone with the daemon, or is not there yet.
            State::Creating { .. } | State::Claimed { .. } | State::Quarantined { .. } => return None,
        };
        let is_bare = record.is_bare;
        Some(ChunkFact { chunk: *chunk, device: record.device, len: record.len, owner, is_bare })
    };
    let mut chunks: Vec<ChunkFact> = ledger.chunks.iter().filter_map(chunk).collect();
    chunks.sort_by_key(|known| known.chunk);
    Facts {
        sessions: ledger.sessions.iter().map(session).collect(),
        chunks,
        ranges: ledger.range_facts(),
        draining: Vec::new(),
        last_chunk: ledger.next_chunk,
    }
}

fn with_devices() -> Ledger {
    let mut ledger = Ledger::new();
    for device in [DEVICE, OTHER] {
        ledger.step(Command::AddDevice { device, total: Bytes::mib(MIB), chunks_max: 1_000 }).unwrap();
    }
    ledger
}

/// A command that may make sense.
fn random_command(ledger: &Ledger, rng: &mut Rng, next: &mut u64) -> Command {
    let sessions: Vec<SessionId> = ledger.sessions.keys().copied().collect();
    let some = |rng: &mut Rng| if sessions.is_empty() { SessionId(1) } else { sessions[rng.index(sessions.len())] };
    let device = if rng.below(3) == 0 { OTHER } else { DEVICE };
    let range = RangeId(rng.below(*next + 1));
    *next += 1;
    let (request, len) = (RequestId(*next), Bytes::mib(if rng.below(4) == 0 { 32 } else { 2 }));
    let leased = |session: SessionId| {
        let of = ledger.sessions.get(&session).map(|known| known.leased.iter().copied().collect::<Vec<_>>());
        of.unwrap_or_default()
    };
    match rng.below(16) {
        0 | 1 if sessions.len() < 6 => {
            let terms =
                Terms { lends: rng.below(2) == 0, answers: true, ..Terms::new(Bytes::mib(16 << rng.below(4)), 0) };
            Command::Open { session: SessionId(*next), terms }
        }
        2 => Command::End { session: some(rng), reason: EndReason::Died },
        3..=6 => {
            let holder =
                if rng.below(6) == 0 { Holder::Plan(PlanId(rng.below(2))) } else { Holder::Session(some(rng)) };
            let parts = vec![Part { len, count: 1 + rng.below(4) }];
            Command::Acquire { request, holder, device, parts, plan: None, wait_ms: 0, waited_ms: 0 }
        }
        7 | 8 => {
            let session = some(rng);
            let chunks = leased(session).into_iter().filter(|_| rng.below(3) == 0).collect();
            Command::Release { session, chunks }
        }
        9 => {
            let session = some(rng);
            let on = |chunk: &ChunkId| ledger.chunks[chunk].device == device;
            let chunks: Vec<_> = leased(session).into_iter().filter(on).take(2).collect();
            Command::Publish { range: RangeId(*next), session, chunks, linger_ms: rng.below(100) }
        }
        10 => Command::Attach { range: ledger.ranges().first().map_or(range, |known| known.range), session: some(rng) },
        11 => Command::Leave { range: ledger.ranges().first().map_or(range, |known| known.range), session: some(rng) },
        12 => Command::Withdraw { range: ledger.ranges().last().map_or(range, |known| known.range) },
        13 => {
            Command::Admit { request, session: some(rng), device, guarantee: Bytes::mib(8 * rng.below(5)), wait_ms: 0 }
        }
        14 => {
            let limit = Some(Bytes::mib(8 << rng.below(5)));
            Command::Change { session: some(rng), change: Change { limit, ..Change::default() }, revision: None }
        }
        _ => match rng.below(4) {
            0 => Command::Evict { session: some(rng) },
            1 => Command::Warm { device, part: Part { len, count: 2 } },
            2 => Command::Unreserve { plan: PlanId(rng.below(2)) },
            _ => Command::Tick { now_ms: *next * 5 },
        },
    }
}

/// Carries a command out, to the end of what follows. What makes no sense is refused.
fn carry_out(ledger: &mut Ledger, command: Command) {
    let Ok(effects) = ledger.step(command) else { return };
    for effect in effects {
        match effect {
            Effect::Create { chunk, .. } => carry_out(ledger, Command::Created { chunk }),
            Effect::Destroy { chunk } => carry_out(ledger, Command::Destroyed { chunk }),
            Effect::AskBack { session, device, ask, .. } => {
                carry_out(ledger, Command::Answered { session, device, ask })
            }
            _ => {}
        }
    }
}

#[test]
fn a_ledger_begins_where_another_has_ended_and_goes_on_from_there() {
    let (mut with_ranges, mut above_limit) = (0, 0);
    for seed in 0..40 {
        let (mut rng, mut next) = (Rng::new(seed), 0);
        let mut ledger = with_devices();
        for step in 0..300 {
            let command = random_command(&ledger, &mut rng, &mut next);
            carry_out(&mut ledger, command);
            if step % 7 > 0 {
                continue;
            }
            let facts = facts_of(&ledger);
            let mut again = with_devices();
            again.begin_with(&facts).unwrap();
            again.invariants().unwrap_or_else(|wrong| panic!("seed {seed}, step {step}: {wrong}"));
            assert_eq!(facts_of(&again), facts, "seed {seed}, step {step}");
            with_ranges += usize::from(!facts.ranges.is_empty());
            let is_above = |view: &SessionView| view.held_bytes() > view.terms.limit;
            above_limit += again.sessions().iter().filter(|view| is_above(view)).count();
            // All chunks are there that were, and nobody is told otherwise.
            let bytes = |ledger: &Ledger| {
                let of = ledger.devices().into_iter().map(|view| (view.device, view.bytes.promised()));
                of.collect::<BTreeMap<_, _>>()
            };
            assert_eq!(bytes(&again), bytes(&ledger), "seed {seed}, step {step}");
            assert_eq!(again.reserved(), ledger.reserved());
            let who = |ledger: &Ledger| {
                let known = ledger.ranges().into_iter();
                known.map(|range| (range.range, range.chunks, range.holders, range.is_withdrawn)).collect::<Vec<_>>()
            };
            assert_eq!(who(&again), who(&ledger));
            // It goes on: a chunk that is made has a number that none had, and in the end nothing is left.
            carry_out(&mut again, Command::Open { session: SessionId(u64::MAX), terms: Terms::new(Bytes::mib(64), 0) });
            let effects = again.step(Command::Warm { device: DEVICE, part: Part { len: Bytes::mib(4), count: 1 } });
            for effect in effects.unwrap() {
                let Effect::Create { chunk, .. } = effect else { continue };
                assert!(chunk.0 > facts.last_chunk, "{chunk} was given before");
                carry_out(&mut again, Command::Created { chunk });
            }
            for view in again.sessions() {
                carry_out(&mut again, Command::End { session: view.session, reason: EndReason::Closed });
            }
            for plan in 0..2 {
                carry_out(&mut again, Command::Unreserve { plan: PlanId(plan) });
            }
            carry_out(&mut again, Command::Tick { now_ms: u64::MAX });
            for device in [DEVICE, OTHER] {
                carry_out(&mut again, Command::TrimIdle { device, bytes: Bytes::MAX });
            }
            again.invariants().unwrap();
            assert!(again.devices().iter().all(|view| view.bytes.promised().is_zero()), "seed {seed}, step {step}");
        }
    }
    assert!(with_ranges > 100 && above_limit > 20, "{with_ranges} with ranges, {above_limit} above a limit");
}

#[test]
fn facts_that_cannot_all_be_true_are_refused_by_name() {
    let (one, chunk, range) = (SessionId(1), ChunkId(1), RangeId(1));
    let session = SessionFact {
        session: one,
        terms: Terms::new(Bytes::mib(64), 0),
        revision: 0,
        is_evicted: false,
        guarantees: Vec::new(),
    };
    let of = |owner| ChunkFact { chunk, device: DEVICE, len: Bytes::mib(2), owner, is_bare: false };
    let shared = RangeFact {
        range,
        chunks: vec![chunk],
        holders: vec![(one, 1)],
        publisher: one,
        linger_ms: 5,
        is_withdrawn: false,
    };
    let good = Facts {
        sessions: vec![session.clone()],
        chunks: vec![of(Owner::Range(range))],
        ranges: vec![shared.clone()],
        draining: Vec::new(),
        last_chunk: 1,
    };
    with_devices().begin_with(&good).unwrap();
    let nowhere = ChunkFact { device: DeviceId(9), ..of(Owner::Nobody) };
    let cases = [
        (Facts { sessions: vec![session.clone(), session], ..Facts::default() }, "a session that cannot be"),
        (Facts { chunks: vec![of(Owner::Nobody), of(Owner::Nobody)], ..Facts::default() }, "chunk 1 is there twice"),
        (Facts { chunks: vec![of(Owner::Session(one))], ..Facts::default() }, "chunk 1 is said to be session 1's"),
        (Facts { chunks: vec![nowhere], ..Facts::default() }, "a session that cannot be"),
        (Facts { ranges: Vec::new(), ..good.clone() }, "chunk 1 is said to be a shared range's"),
        (Facts { sessions: Vec::new(), ..good.clone() }, "range 1 is said to be session 1's"),
        (Facts { chunks: vec![of(Owner::Nobody)], ..good.clone() }, "range 1 has chunks that are not its own"),
        (
            Facts { ranges: vec![RangeFact { chunks: vec![chunk, chunk], ..shared }], ..good.clone() },
            "range 1 has chunks that are not its own",
        ),
    ];
    for (facts, expected) in cases {
        let error = with_devices().begin_with(&facts).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let mut desk = Desk::new(64);
    desk.open(1, 64);
    assert_eq!(desk.ledger.begin_with(&Facts::default()), Err(FactsError::Begun));
}

#[test]
fn what_a_session_registers_is_its_own_within_its_limit_and_the_device_and_goes_back_to_the_driver() {
    let mut ledger = with_devices();
    let one = SessionId(1);
    ledger.step(Command::Observe { device: DEVICE, free: Bytes::mib(MIB - 20) }).unwrap();
    ledger.step(Command::Open { session: one, terms: Terms::new(Bytes::mib(24), 0) }).unwrap();
    let register = |ledger: &mut Ledger, mib| {
        ledger.step(Command::Register { session: one, device: DEVICE, len: Bytes::mib(mib) })
    };
    let effects = register(&mut ledger, 20).unwrap();
    let [Effect::Registered { session, chunk, len }] = effects[..] else { panic!("{effects:?}") };
    assert_eq!((session, len), (one, Bytes::mib(20)));
    // What seemed to be others' is its own: that is all that has changed.
    let view = ledger.device(DEVICE).unwrap();
    assert_eq!((view.foreign, view.bytes.leased, view.available()), (Bytes::ZERO, len, Bytes::mib(MIB - 20)));
    assert!(matches!(register(&mut ledger, 6), Err(LedgerError::Refused(Refusal::OverLimit { .. }))));
    assert_eq!(register(&mut ledger, 0), Err(LedgerError::Parts));
    ledger.step(Command::Open { session: SessionId(2), terms: Terms::new(Bytes::gib(9), 0) }).unwrap();
    let too_much = Command::Register { session: SessionId(2), device: DEVICE, len: Bytes::mib(MIB - 19) };
    assert!(matches!(ledger.step(too_much), Err(LedgerError::Refused(Refusal::OverBudget { .. }))));
    let nobody = Command::Register { session: SessionId(3), device: DEVICE, len: Bytes::mib(2) };
    assert_eq!(ledger.step(nobody), Err(LedgerError::NoSession(SessionId(3))));
    ledger.invariants().unwrap();
    let known: Vec<ChunkFact> = ledger.known_chunks().collect();
    let owner = Owner::Session(one);
    assert_eq!(known, [ChunkFact { chunk, device: DEVICE, len, owner, is_bare: true }]);
    let effects = ledger.step(Command::Release { session: one, chunks: vec![chunk] }).unwrap();
    assert_eq!(effects, [Effect::Destroy { chunk }], "it can be handed to nobody, its own session neither");
    ledger.invariants().unwrap();
}

#[test]
fn what_is_there_beyond_a_total_is_held_until_it_goes_and_nothing_is_promised_until_then() {
    let (one, two, len) = (SessionId(1), SessionId(2), Bytes::mib(64));
    let session = SessionFact {
        session: one,
        terms: Terms::new(Bytes::gib(1), 0),
        revision: 0,
        is_evicted: false,
        guarantees: Vec::new(),
    };
    let of = |number, owner| ChunkFact { chunk: ChunkId(number), device: DEVICE, len, owner, is_bare: false };
    let leased = (1..=4).map(|number| of(number, Owner::Session(one)));
    let chunks = leased.chain([of(5, Owner::Plan(PlanId(9))), of(6, Owner::Nobody)]).collect();
    let facts = Facts { sessions: vec![session], chunks, last_chunk: 6, ..Facts::default() };
    let mut ledger = with_devices();
    ledger.begin_with(&facts).unwrap();
    let mut step = |command: Command| {
        let effects = ledger.step(command).unwrap();
        ledger.invariants().unwrap();
        (effects, ledger.device(DEVICE).unwrap())
    };
    let destroys = |chunk| vec![Effect::Destroy { chunk: ChunkId(chunk) }];
    let figures = |view: &AccountView| (view.total, view.budget, view.foreign, view.available());
    // Whatever the driver says is free: nobody else has any of it.
    for free in [Bytes::ZERO, Bytes::mib(MIB)] {
        let (_, view) = step(Command::Observe { device: DEVICE, free });
        assert_eq!(figures(&view), (Bytes::mib(MIB), Bytes::mib(MIB), Bytes::ZERO, Bytes::ZERO));
        assert_eq!((view.bytes.leased, view.bytes.idle), (Bytes::mib(MIB), len));
    }
    // What lies idle goes first, and is not leased again.
    assert_eq!(step(Command::Tick { now_ms: 1 }).0, destroys(6));
    step(Command::Destroyed { chunk: ChunkId(6) });
    step(Command::Open { session: two, terms: Terms::new(Bytes::gib(1), 0) });
    let ask = |request| Command::Acquire {
        request: RequestId(request),
        holder: Holder::Session(two),
        device: DEVICE,
        parts: vec![Part { len, count: 1 }],
        plan: None,
        wait_ms: 0,
        waited_ms: 0,
    };
    let (effects, _) = step(ask(1));
    let [Effect::Refuse { refusal: Refusal::Exhausted { available, budget, .. }, .. }] = effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((available, budget), (Bytes::ZERO, Bytes::mib(MIB)));
    // So does what comes back, as long as there is too much: it does not lie idle here.
    let (effects, _) = step(Command::Release { session: one, chunks: vec![ChunkId(1), ChunkId(2)] });
    assert_eq!(effects, destroys(1));
    let (_, view) = step(Command::Destroyed { chunk: ChunkId(1) });
    assert_eq!((view.bytes.promised(), view.bytes.idle, view.available()), (Bytes::mib(MIB), len, len));
    // From here on it is a device like any other.
    assert_eq!(step(ask(2)).0, destroys(2));
    let (effects, view) = step(Command::Destroyed { chunk: ChunkId(2) });
    assert!(matches!(effects[..], [Effect::Create { .. }]), "{effects:?}");
    assert_eq!(figures(&view), (Bytes::mib(MIB), Bytes::mib(MIB), Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn chunks_beyond_how_many_there_may_be_are_allowed_until_they_go() {
    let of = |number| ChunkFact {
        chunk: ChunkId(number),
        device: DEVICE,
        len: Bytes::mib(2),
        owner: Owner::Nobody,
        is_bare: false,
    };
    let facts = Facts { chunks: (1..=4).map(of).collect(), last_chunk: 4, ..Facts::default() };
    let mut ledger = Ledger::new();
    ledger.step(Command::AddDevice { device: DEVICE, total: Bytes::mib(MIB), chunks_max: 2 }).unwrap();
    ledger.begin_with(&facts).unwrap();
    let most = |ledger: &Ledger| ledger.device(DEVICE).unwrap().chunks_max;
    assert_eq!(most(&ledger), 4);
    for (left, expected) in [(3, 3), (2, 2), (1, 2), (0, 2)] {
        ledger.step(Command::TrimIdle { device: DEVICE, bytes: Bytes::mib(2) }).unwrap();
        ledger.step(Command::Destroyed { chunk: ChunkId(4 - left) }).unwrap();
        ledger.invariants().unwrap();
        assert_eq!(most(&ledger), expected, "{left} are left");
    }
}

#[test]
fn a_session_that_is_there_again_may_ask() {
    let mut ledger = with_devices();
    let session = SessionId(1);
    ledger.step(Command::Open { session, terms: Terms::new(Bytes::mib(24), 0) }).unwrap();
    ledger.step(Command::Detach { session }).unwrap();
    let ask = |request| Command::Acquire {
        request: RequestId(request),
        holder: Holder::Session(session),
        device: DEVICE,
        parts: vec![Part { len: Bytes::mib(2), count: 1 }],
        plan: None,
        wait_ms: 0,
        waited_ms: 0,
    };
    assert_eq!(ledger.step(ask(1)), Err(LedgerError::Detached(session)));
    ledger.step(Command::Reattach { session }).unwrap();
    assert!(matches!(ledger.step(ask(1)).unwrap()[..], [Effect::Create { .. }]));
    assert_eq!(ledger.step(Command::Reattach { session: SessionId(2) }), Err(LedgerError::NoSession(SessionId(2))));
}
