//! The ledger against a second one that is three lists ([`reference`]), which follows its effects by the rules ([`follow`]). After every step both say the same about everything, and nobody waits who could be
//! served, whose time is up, or who waits for himself.

mod checks;
mod errors;
mod follow;
mod reference;

use std::collections::BTreeMap;

use stitchd::ids::{ChunkId, DeviceId, PlanId, RangeId, RequestId, SessionId};
use stitchd::ladder::Part;
use stitchd::ledger::{Change, Command, EndReason, Holder, Shortage, Terms};
use stitchd::rng::Rng;
use stitchd::units::Bytes;

use self::reference::{Chunk, Is, World};
use crate::At;

const SEEDS: [u64; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const STEPS: u64 = 250_000;
/// Steps after which a new, empty world begins.
const EPISODE: u64 = 2_500;

const UNIT: Bytes = Bytes::mib(2);

// === Random

struct Random {
    rng: Rng,
    world: World,
    /// Of a thousand creates so many are refused as if others had come first.
    refused_per_mille: u64,
}

impl Random {
    fn new(seed: u64) -> Random {
        let mut rng = Rng::new(seed);
        let devices = 1 + rng.index(3);
        let totals: Vec<_> = (0..devices).map(|_| Bytes::mib(2 * (4 + rng.below(10)))).collect();
        let chunks_max = if rng.chance(500) { 1_000 } else { 2 + rng.below(10) };
        Random { rng, world: World::new(&totals, chunks_max), refused_per_mille: 0 }
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.rng.index(from.len())])
    }

    fn some_session(&mut self) -> SessionId {
        let sessions: Vec<_> = self.world.sessions.iter().map(|session| session.id).collect();
        let known = self.pick(&sessions).filter(|_| !self.rng.chance(20));
        known.unwrap_or(SessionId(1 + self.rng.below(self.world.last_session + 2)))
    }

    fn some_device(&mut self) -> DeviceId {
        let devices = self.world.devices.len() as u64 + u64::from(self.rng.chance(10));
        DeviceId(self.rng.below(devices) as u32)
    }

    fn some_chunk(&mut self) -> ChunkId {
        ChunkId(1 + self.rng.below(self.world.last_chunk + 2))
    }

    fn some_plan(&mut self) -> PlanId {
        PlanId(1 + self.rng.below(3))
    }

    fn some_parts(&mut self) -> Vec<Part> {
        let mut lens = vec![Bytes::mib(2), Bytes::mib(4), Bytes::mib(8)];
        let sizes = if self.rng.chance(300) { 1 + self.rng.index(3) } else { 1 };
        let mut parts = Vec::new();
        for _ in 0..sizes {
            let is_small = parts.is_empty() && self.rng.chance(600);
            let len = lens.swap_remove(if is_small { 0 } else { self.rng.index(lens.len()) });
            let most = if self.rng.chance(100) { 9 } else { 3 };
            parts.push(Part { len, count: 1 + self.rng.below(most) });
        }
        if self.rng.chance(10) {
            match self.rng.below(4) {
                0 => parts.clear(),
                1 => parts[0].count = 0,
                2 => parts[0].len = Bytes::mib(1),
                _ => parts.push(parts[0]),
            }
        }
        parts
    }

    fn acquire(&mut self) {
        let holder =
            if self.rng.chance(120) { Holder::Plan(self.some_plan()) } else { Holder::Session(self.some_session()) };
        let plan = self.rng.chance(300).then(|| self.some_plan());
        let wait_ms = [0, 0, 10, 100, 1_000][self.rng.index(5)];
        let (device, parts) = (self.some_device(), self.some_parts());
        self.world.acquire(holder, device, parts, plan, wait_ms);
    }

    fn release(&mut self) {
        let session = self.some_session();
        let mut chunks = self.world.leased(session);
        while !chunks.is_empty() && self.rng.chance(500) {
            chunks.swap_remove(self.rng.index(chunks.len()));
        }
        if self.rng.chance(50) {
            chunks.push(self.some_chunk());
        }
        if self.rng.chance(20) && !chunks.is_empty() {
            chunks.push(chunks[0]);
        }
        self.world.step(Command::Release { session, chunks });
    }

    fn admit(&mut self) {
        let (session, device) = (self.some_session(), self.some_device());
        let guarantee = Bytes::mib(2 * self.rng.below(9));
        let wait_ms = [0, 10, 100, 1_000][self.rng.index(4)];
        self.world.last_request += 1;
        let request = RequestId(self.world.last_request);
        self.world.step(Command::Admit { request, session, device, guarantee, wait_ms });
    }

    /// One that was asked gives some of what it has, and mostly says so.
    fn answer(&mut self) {
        let open: Vec<_> = self.world.asked.iter().map(|(place, asked)| (*place, *asked)).collect();
        let Some(((device, session), asked)) = self.pick(&open) else { return };
        let mut chunks = self.world.leased(session);
        chunks.retain(|chunk| self.world.chunk(*chunk).unwrap().device == device);
        chunks.truncate(self.rng.index(chunks.len() + 1));
        self.world.step(Command::Release { session, chunks });
        let ask = if self.rng.chance(50) { asked.ask + 1 } else { asked.ask };
        if self.rng.chance(800) {
            self.world.step(Command::Answered { session, device, ask });
        }
    }

    fn act(&mut self) {
        let (session, device) = (self.some_session(), self.some_device());
        let some = Bytes::mib(2 * self.rng.below(12));
        self.world.step(match self.rng.below(20) {
            0..8 => {
                let revision = self.world.session(session).map_or(0, |session| session.revision);
                let revision = [None, Some(revision), Some(revision + 1)][self.rng.index(3)];
                let limit = self.rng.chance(500).then(|| some + some);
                let priority = self.rng.chance(300).then(|| self.rng.below(3) as u32);
                let lends = self.rng.chance(300).then(|| self.rng.chance(500));
                Command::Change { session, change: Change { limit, priority, lends }, revision }
            }
            8..9 => Command::Evict { session },
            9..11 => Command::Drain { device, is_draining: self.rng.chance(300) },
            11..14 => Command::Trim { device, session: self.rng.chance(500).then_some(session), bytes: some },
            14..17 => Command::TrimIdle { device, bytes: some },
            _ => Command::Drain { device, is_draining: false },
        });
    }

    /// Memory is shared, by those who may and by others.
    fn share(&mut self) {
        let session = self.some_session();
        let ranges: Vec<_> = self.world.ranges.iter().map(|range| range.id).collect();
        let known = self.pick(&ranges).filter(|_| !self.rng.chance(30));
        let range = known.unwrap_or(RangeId(self.world.last_range + self.rng.below(2)));
        let command = match self.rng.below(10) {
            0..4 => {
                let mut chunks = self.world.leased(session);
                while !chunks.is_empty() && self.rng.chance(500) {
                    chunks.swap_remove(self.rng.index(chunks.len()));
                }
                if self.rng.chance(850) && !chunks.is_empty() {
                    let device = self.world.chunk(chunks[0]).unwrap().device;
                    chunks.retain(|chunk| self.world.chunk(*chunk).unwrap().device == device);
                }
                if self.rng.chance(20) {
                    chunks.push(self.some_chunk());
                }
                self.world.last_range += u64::from(!self.rng.chance(20));
                let linger_ms = [0, 50, 1_000][self.rng.index(3)];
                Command::Publish { range: RangeId(self.world.last_range), session, chunks, linger_ms }
            }
            4..7 => Command::Attach { range, session },
            7..9 => Command::Leave { range, session },
            _ => Command::Withdraw { range },
        };
        self.world.step(command);
    }

    fn park(&mut self) {
        let device = self.some_device();
        let sessions: Vec<_> = self.world.sessions.iter().map(|session| session.id).collect();
        let parked = |session| (session, self.rng.chance(900).then(|| Bytes::mib(2 * self.rng.below(10))));
        let sessions = sessions.into_iter().map(parked).collect();
        self.world.step(Command::Parked { device, sessions });
    }

    fn driver_works(&mut self) {
        let work = self.world.work();
        let quarantined = |chunk: &&Chunk| chunk.is == Is::Quarantined;
        let quarantined: Vec<_> = self.world.chunks.iter().filter(quarantined).map(|chunk| chunk.id).collect();
        if self.rng.chance(20)
            && let Some(chunk) = self.pick(&quarantined)
        {
            // The driver has taken it back after all.
            return self.world.step(Command::Destroyed { chunk });
        }
        let Some(chunk) = self.pick(&work) else { return };
        let Chunk { device, len, is, .. } = *self.world.chunk(chunk).unwrap();
        if is == Is::Destroying {
            if quarantined.len() < 2 && self.rng.chance(10) {
                return self.world.fail(chunk);
            }
            self.world.carry_out(chunk);
            if self.rng.chance(50) {
                // Somebody still maps it.
                self.world.device_mut(device).foreign += len;
            }
        } else if self.rng.chance(20) {
            self.world.fail(chunk);
        } else if self.rng.chance(self.refused_per_mille) {
            let why = if self.rng.chance(100) { Shortage::Chunks } else { Shortage::Memory };
            self.world.step(Command::CreateFailed { chunk, why });
        } else {
            self.world.carry_out(chunk);
        }
    }

    fn others_come_and_go(&mut self) {
        let device = DeviceId(self.rng.below(self.world.devices.len() as u64) as u32);
        let free = self.world.device(device).total - self.world.existing(device);
        let most = free.get() / UNIT.get();
        self.refused_per_mille = [0, 0, 0, 800][self.rng.index(4)];
        let foreign = if self.rng.chance(500) { 0 } else { self.rng.below(most / 2 + 1) };
        self.world.device_mut(device).foreign = Bytes::mib(2 * foreign);
    }

    fn nonsense(&mut self) {
        let chunk = self.some_chunk();
        let command = match self.rng.below(7) {
            0 => Command::Created { chunk },
            1 => Command::Destroyed { chunk },
            2 => Command::AddDevice { device: DeviceId(0), total: Bytes::mib(2), chunks_max: 1 },
            3 => Command::Open { session: self.some_session(), terms: Terms::new(Bytes::mib(2), 0) },
            4 => Command::Observe { device: DeviceId(9), free: Bytes::ZERO },
            5 => Command::Cancel { request: RequestId(1_000_000) },
            _ => {
                let request = self.world.requests.first().map_or(RequestId(2_000_000), |request| request.id);
                let holder = Holder::Session(self.some_session());
                let parts = vec![Part { len: UNIT, count: 1 }];
                Command::Acquire { request, holder, device: DeviceId(9), parts, plan: None, wait_ms: 0, waited_ms: 0 }
            }
        };
        // An answer that somebody asked for would be true, and the reference's driver would not know it.
        let is_work = self.world.work().contains(&chunk);
        let is_new = matches!(&command, Command::Open { session, .. } if self.world.session(*session).is_none());
        if !is_work && !is_new {
            self.world.step(command);
        }
    }

    fn step(&mut self) {
        match self.rng.below(1000) {
            0..170 => self.acquire(),
            170..200 => self.share(),
            200..220 => self.admit(),
            220..250 => self.answer(),
            250..265 => self.act(),
            265..290 => self.park(),
            290..390 => self.release(),
            390..700 => self.driver_works(),
            700..740 => {
                let now_ms = self.world.now_ms + self.rng.below(60);
                self.world.step(Command::Tick { now_ms });
            }
            740..790 => {
                let device = DeviceId(self.rng.below(self.world.devices.len() as u64) as u32);
                self.world.observe(device);
            }
            790..850 => self.others_come_and_go(),
            850..890 => {
                if self.world.sessions.len() < 6 {
                    let limit = Bytes::mib(2 * (2 + self.rng.below(24)));
                    let priority = self.rng.below(3) as u32 / 2;
                    match self.rng.below(3) {
                        0 => drop(self.world.open(limit, priority)),
                        1 => self.world.join(limit, priority, true),
                        _ => self.world.join(limit, priority, false),
                    }
                }
            }
            890..900 => {
                let session = self.some_session();
                let is_attached = self.rng.below(2) == 0;
                self.world.step(if is_attached { Command::Reattach { session } } else { Command::Detach { session } });
            }
            900..925 => {
                let session = self.some_session();
                let reason = if self.rng.chance(500) { EndReason::Died } else { EndReason::Closed };
                self.world.step(Command::End { session, reason });
            }
            925..945 => {
                let requests: Vec<_> = self.world.requests.iter().map(|request| request.id).collect();
                if let Some(request) = self.pick(&requests) {
                    self.world.step(Command::Cancel { request });
                }
            }
            945..965 => {
                let plan = self.some_plan();
                self.world.step(Command::Unreserve { plan });
            }
            965..980 => {
                let part = Part { len: Bytes::mib(2 << self.rng.below(3)), count: self.rng.below(4) };
                let device = self.some_device();
                self.world.step(Command::Warm { device, part });
            }
            980..998 => self.nonsense(),
            998 => {
                if self.rng.chance(300) {
                    self.world.step(Command::Close);
                }
            }
            _ => {
                let device = self.some_device();
                if self.rng.chance(300) {
                    self.world.step(Command::Lose { device });
                }
            }
        }
    }
}

#[test]
fn every_effect_of_random_commands_keeps_the_rules_and_every_request_ends_once() {
    for seed in crate::times(SEEDS) {
        let at = At::new("ledger", seed);
        let (mut granted, mut refused) = (0, BTreeMap::new());
        for episode in 0..STEPS / EPISODE {
            let mut random = Random::new(seed * 1_000_003 + episode);
            for step in 0..EPISODE {
                at.step.set(episode * EPISODE + step);
                random.step();
            }
            random.world.finish();
            assert_eq!(
                random.world.answered.len() as u64,
                random.world.granted + random.world.refused.values().sum::<u64>()
            );
            granted += random.world.granted;
            for (why, count) in random.world.refused {
                *refused.entry(why).or_insert(0) += count;
            }
        }
        let reasons = [
            "cancelled",
            "chunks",
            "closed",
            "deadlock",
            "draining",
            "driver",
            "evicted",
            "exhausted",
            "guarantee",
            "lost",
            "over budget",
            "over limit",
            "overdue",
        ];
        assert_eq!(refused.keys().copied().collect::<Vec<_>>(), reasons, "not every way to end was taken");
        assert!(granted > STEPS / 50, "only {granted} requests were granted");
    }
}

// === Exhaustive

type Operation = (&'static str, fn(&mut World));

/// What happens on a device of three chunks, between two sessions.
const OPERATIONS: [Operation; 9] = [
    ("one asks for 1", |world| world.acquire_units(current(world, 0), 1)),
    ("one asks for 2", |world| world.acquire_units(current(world, 0), 2)),
    ("two asks for 2", |world| world.acquire_units(current(world, 1), 2)),
    ("one releases its first", |world| release_first(world, 0)),
    ("two releases its first", |world| release_first(world, 1)),
    ("one dies, and another one starts", |world| {
        let session = current(world, 0);
        world.step(Command::End { session, reason: EndReason::Died });
        world.open(Bytes::mib(6), 0);
    }),
    ("the driver carries its oldest work out", |world| {
        if let Some(chunk) = world.work().first() {
            world.carry_out(*chunk);
        }
    }),
    ("the driver is broken", |world| {
        if let Some(chunk) = world.work().first() {
            world.fail(*chunk);
        }
    }),
    ("time passes", |world| world.step(Command::Tick { now_ms: world.now_ms + 1_000 })),
];

/// Session two is the first one opened; session one is whoever was opened last.
fn current(world: &World, which: usize) -> SessionId {
    if which == 1 { world.sessions[0].id } else { world.sessions.last().unwrap().id }
}

fn release_first(world: &mut World, which: usize) {
    let session = current(world, which);
    if let Some(chunk) = world.leased(session).first() {
        world.step(Command::Release { session, chunks: vec![*chunk] });
    }
}

/// A list of operations, by its number; printed if it fails.
struct List(u64);

impl List {
    const LEN: u32 = 6;
    const COUNT: u64 = (OPERATIONS.len() as u64).pow(List::LEN);

    fn operations(&self) -> impl Iterator<Item = Operation> {
        let base = OPERATIONS.len() as u64;
        let number = self.0;
        (0..List::LEN).map(move |place| OPERATIONS[(number / base.pow(place) % base) as usize])
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let names: Vec<_> = self.operations().map(|(name, _)| name).collect();
            eprintln!("list {} failed: {}", self.0, names.join("; "));
        }
    }
}

#[test]
fn every_list_of_six_operations_on_three_chunks_keeps_the_rules() {
    for number in 0..List::COUNT {
        let list = List(number);
        let mut world = World::new(&[Bytes::mib(6)], if number % 2 == 0 { 3 } else { 2 });
        world.open(Bytes::mib(6), 0);
        world.open(Bytes::mib(6), 0);
        for (_, operation) in list.operations() {
            operation(&mut world);
        }
        world.finish();
    }
}
