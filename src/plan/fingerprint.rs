//! Which job a plan is for, told by what the job asks for in its first iteration.
//!
//! A process knows it when its first iteration is over, before there is any plan, and finds by it the plan that somebody made of an earlier run ([`crate::session::Session::plan_for`]).
//!
//! Two recordings are of the same job if their first iterations ask for the same sizes in the same order on each of as many streams. So these make another job: another
//! size, order or number of a stream's requests, a request on another stream than before. These do not: how the requests of different streams come between each other, addresses, the raw numbers of streams, threads, ticks, names of modules, when anything is freed,
//! dynamic requests (by their own account, or of modules whose sizes differ between layers or
//! micro-batches of that iteration), requests for nothing, and whatever comes after the first iteration.
//! A first iteration that was cut is another one than the whole.
//!
//! Where two processes of one job do the same (data-parallel ranks) their fingerprints are equal, and their [`Position`]s tell them apart.
//!
//! Threads that race on one stream ask in another order each time, and so does their job each time have another fingerprint: its plan is found by its name alone. Traces by others do not know threads, so they are
//! not told apart here.
//!
//! Not for: proof. Whoever wants to can make two jobs with one fingerprint; a plan is a hint, and serving checks every request.
//!
//! Invariant: equal requests have equal fingerprints, in every process, on every machine and in every version of this build's plan files.

use std::collections::HashMap;
use std::fmt;

use super::DynamicModules;
use crate::ids::StreamId;
use crate::limits;
use crate::rng::mix;
use crate::trace::{Event, EventKind, Trace};
use crate::units::Bytes;

/// A hash of what a job asks for in its first iteration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Fingerprint(pub u64);

/// Where in a job of several processes one of them is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Position {
    rank: u32,
    world_size: u32,
}

/// Whose plan it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Job {
    /// What it does first.
    pub fingerprint: Fingerprint,
    /// Which of its processes; nothing where nobody said.
    pub position: Option<Position>,
}

impl Fingerprint {
    /// That of the job of `trace`: a trace of one device, with its iterations numbered.
    pub fn of(trace: &Trace) -> Fingerprint {
        let dynamic = DynamicModules::within_first_iteration(trace);
        let is_dynamic = |event: &Event| event.is_dynamic || dynamic.contains(&event.context);
        let requests = trace.events.iter().filter(|event| event.kind == EventKind::Alloc && event.iteration == 0);
        Fingerprint::of_requests(requests.filter(|event| !is_dynamic(event)).map(|event| (event.bytes, event.stream)))
    }

    /// That of a job whose first iteration asks for so much on these streams, in this order; without what varies.
    pub fn of_requests(requests: impl IntoIterator<Item = (Bytes, StreamId)>) -> Fingerprint {
        let mut streams: HashMap<StreamId, (u64, u64)> = HashMap::new();
        // No plan has an entry for nothing.
        for (bytes, stream) in requests.into_iter().filter(|(bytes, _)| *bytes != Bytes::ZERO) {
            // The default stream is itself in every run.
            let begin = if stream == StreamId::DEFAULT { 0x8422_2325_cbf2_9ce4 } else { 0xcbf2_9ce4_8422_2325 };
            let (hash, count) = streams.entry(stream).or_insert((begin, 0));
            *hash = with(*hash, bytes.get());
            *count += 1;
        }
        let count = streams.len() as u64;
        let all = streams.into_values().map(|(hash, count)| with(hash, count));
        Fingerprint(with(all.fold(0xcbf2_9ce4_8422_2325, u64::wrapping_add), count))
    }

    /// As people write it: sixteen hexadecimal digits.
    pub fn to_hex(self) -> String {
        format!("{:016x}", self.0)
    }

    /// Reads what [`Fingerprint::to_hex`] wrote.
    pub fn from_hex(text: &str) -> Option<Fingerprint> {
        u64::from_str_radix(text, 16).ok().map(Fingerprint).filter(|fingerprint| fingerprint.to_hex() == text)
    }
}

fn with(hash: u64, number: u64) -> u64 {
    mix(hash ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fingerprint {self}")
    }
}

impl Position {
    /// The process `rank` of `world_size`, counted from 0; `None` where there is no such process.
    pub fn new(rank: u32, world_size: u32) -> Option<Position> {
        (rank < world_size && world_size <= limits::WORLD_SIZE_MAX).then_some(Position { rank, world_size })
    }

    /// Which process, counted from 0.
    pub fn rank(self) -> u32 {
        self.rank
    }

    /// Of how many.
    pub fn world_size(self) -> u32 {
        self.world_size
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::modules;
    use crate::trace::Context;
    use crate::units::Tick;

    /// Two iterations: sizes with streams, and what is freed when; each request is freed `late` requests after it.
    fn job(first: &[(u64, u64)], late: usize) -> Trace {
        let mut trace = Trace { events: Vec::new(), modules: vec![String::new()] };
        let mut tick = 0;
        for iteration in 0..2 {
            for at in 0..first.len() + late {
                let request = first.get(at).map(|request| (EventKind::Alloc, at, request.0, request.1));
                let free = at.checked_sub(late).map(|at| (EventKind::Free, at, 0, first[at].1));
                for (kind, id, bytes, stream) in request.into_iter().chain(free) {
                    tick += 1 + late as u64;
                    trace.events.push(Event {
                        tick: Tick(tick),
                        kind,
                        id: (u64::from(iteration) << 32) + id as u64,
                        bytes: Bytes::new(bytes),
                        stream: StreamId(stream),
                        iteration,
                        context: Context::default(),
                        is_dynamic: false,
                        device: 0,
                        thread: 0,
                    });
                }
            }
        }
        trace
    }

    #[test]
    fn the_same_job_recorded_again_has_the_same_one() {
        let requests = [(512, 0), (1024, 0), (4096, 7), (512, 0), (100, 7), (9000, 9)];
        let one = Fingerprint::of(&job(&requests, 1));
        // Later frees and ticks, other threads, devices and names of allocations.
        let mut again = job(&requests, 3);
        for (at, event) in again.events.iter_mut().enumerate() {
            (event.thread, event.device, event.id) = (at as u32, 3, event.id + 1000);
        }
        assert_eq!(Fingerprint::of(&again), one);
        // Streams are what the driver calls them, and another run has others.
        let renamed = requests.map(|(bytes, stream)| (bytes, if stream == 0 { 0 } else { 0x7f00 + stream }));
        assert_eq!(Fingerprint::of(&job(&renamed, 1)), one);
        // What varies, what is nothing, and what comes later.
        let mut more = job(&requests, 1);
        let varying = Event { is_dynamic: true, id: 77, bytes: Bytes::new(3), stream: StreamId(55), ..more.events[0] };
        more.events.insert(0, Event { is_dynamic: false, bytes: Bytes::ZERO, id: 78, ..varying });
        more.events.insert(0, varying);
        more.events.pop();
        more.events.push(Event { iteration: 1, id: 79, ..requests_of(&more)[3] });
        assert_eq!(Fingerprint::of(&more), one);
    }

    fn requests_of(trace: &Trace) -> Vec<Event> {
        trace.events.iter().filter(|event| event.kind == EventKind::Alloc).copied().collect()
    }

    #[test]
    fn another_size_order_number_or_stream_is_another_job() {
        let requests = [(512, 0), (1024, 0), (4096, 7), (512, 0), (100, 7), (300, 7), (9000, 9)];
        type Requests = Vec<(u64, u64)>;
        let mut seen = vec![Fingerprint::of(&job(&requests, 1))];
        let mut others: Vec<Requests> = Vec::new();
        for at in 0..requests.len() {
            let changed = |change: &dyn Fn(&mut Requests)| {
                let mut other = requests.to_vec();
                change(&mut other);
                other
            };
            others.push(changed(&|other| other[at].0 += 1));
            others.push(changed(&|other| other[at].1 = if other[at].1 == 0 { 9 } else { 0 }));
            others.push(changed(&|other| other.truncate(at)));
            // Before the next one of its stream it is in the same place anywhere.
            others.push(changed(&|other| other.insert(at, (77, requests[at].1))));
            if at > 0 {
                let swapped = changed(&|other| other.swap(at - 1, at));
                let is_of_one_stream = requests[at - 1].1 == requests[at].1;
                if is_of_one_stream {
                    others.push(swapped);
                } else {
                    assert_eq!(Fingerprint::of(&job(&swapped, 1)), seen[0], "streams do not wait for each other");
                }
            }
        }
        for other in others {
            let fingerprint = Fingerprint::of(&job(&other, 1));
            assert!(!seen.contains(&fingerprint), "{other:?}");
            seen.push(fingerprint);
        }
    }

    /// Routing is another in every run.
    #[test]
    fn sizes_of_experts_are_left_out() {
        let of = |tokens| Fingerprint::of(&modules::tests::trace(&modules::tests::experts(0, tokens)));
        assert_eq!(of([7, 8, 9, 3]), of([2, 5, 1, 6]));
        // Where all get as many, as in a dense model, they tell jobs apart.
        assert_ne!(of([7; 4]), of([8; 4]));
    }

    /// Plans that are stored are found by it: a change is a new version of plan files.
    #[test]
    fn it_is_the_same_in_every_version() {
        let none = Fingerprint::of_requests([]);
        let some = Fingerprint::of_requests([(512, 3), (1, 3), (70_000, 9)].map(|(n, s)| (Bytes::new(n), StreamId(s))));
        assert_eq!((none.to_hex(), some.to_hex()), ("f52a15e9a9b5e89b".to_owned(), "6fa57ff91b9fc899".to_owned()));
    }

    #[test]
    fn it_is_written_in_one_way_and_a_position_is_one_of_its_world() {
        assert_eq!(Fingerprint::from_hex(&Fingerprint(0x12ab).to_hex()), Some(Fingerprint(0x12ab)));
        for text in ["12ab", "+0000000000012ab", "00000000000012AB", ""] {
            assert_eq!(Fingerprint::from_hex(text), None, "{text}");
        }
        assert_eq!(Position::new(1, 2).map(|position| (position.rank(), position.world_size())), Some((1, 2)));
        assert_eq!(Position::new(7, 8).unwrap().to_string(), "rank 7 of 8");
        for (rank, world_size) in [(0, 0), (2, 2), (0, limits::WORLD_SIZE_MAX + 1)] {
            assert_eq!(Position::new(rank, world_size), None);
        }
    }
}
