//! What a driver's calls take on this machine, by size of chunk: the figures from which a ladder follows ([`crate::ladder`]).
//!
//! Used by `stitchd selftest --costs` and, in a process of its own, by a daemon whose ladder is to be measured: mapping takes a context, which a daemon goes without.
//!
//! Not for: what the figures mean. That is the ladder's.

use std::time::Duration;

use super::{Access, Call, Driver, DriverError, Handle};
use crate::clock::{Clock as _, SystemClock};
use crate::error::ErrorKind;
use crate::ids::DeviceId;
use crate::ladder::ChunkCost;
use crate::limits;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};

/// The largest chunk that is timed. Larger ones cost no less for a byte that anybody would notice.
const LEN_MAX: Bytes = Bytes::gib(1);

/// Chunks in the run that is mapped as a whole, where there is no room for more.
const RUN_MIN: u64 = 64;

/// How much time measuring may take.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Rounds over all sizes, at most.
    pub rounds: usize,
    /// Time for them; three rounds are made in any case.
    pub time: Duration,
    /// Chunks in the run that is mapped as a whole.
    pub run: u64,
}

impl Effort {
    /// For people who look.
    pub const THOROUGH: Effort = Effort { rounds: 21, time: Duration::from_secs(20), run: 512 };
    /// For a daemon that starts.
    pub const QUICK: Effort = Effort { rounds: 9, time: Duration::from_millis(500), run: RUN_MIN };
}

/// Rounds that are made however long they take: a median needs them.
const ROUNDS_MIN: usize = 3;

/// What the calls for chunks of one size take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// The size.
    pub len: Bytes,
    /// Rounds that were made.
    pub rounds: usize,
    /// Nanoseconds of each call, the median, in the order in which they come.
    pub calls: Vec<(Call, u64)>,
}

impl Cost {
    /// What a chunk costs from its creation to its end. Setting access and unmapping count, though one call may do a run of chunks: on half of the drivers none
    /// may. Addresses do not: they are reserved for a range, whatever is mapped there; nor does waiting for the device.
    pub fn of_chunk(&self) -> ChunkCost {
        let counts = |call: &Call| call.is_memory() && !matches!(call, Call::Reserve | Call::Unreserve);
        let nanos = self.calls.iter().filter(|(call, _)| counts(call)).map(|(_, nanos)| nanos).sum();
        ChunkCost { len: self.len, nanos }
    }
}

/// One call over a run of chunks against one call for each of them, in nanoseconds, medians.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunCost {
    /// The size of each chunk.
    pub len: Bytes,
    /// How many.
    pub count: u64,
    /// Setting access to all with one call.
    pub set_access_once: u64,
    /// The same with a call for each.
    pub set_access_each: u64,
    /// Unmapping all with one call.
    pub unmap_once: u64,
    /// The same with a call for each.
    pub unmap_each: u64,
}

/// What was measured on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// By size, from small to large.
    pub chunks: Vec<Cost>,
    /// None where the device has too little room.
    pub run: Option<RunCost>,
}

impl Costs {
    /// What chunks cost, from small to large.
    pub fn of_chunks(&self) -> Vec<ChunkCost> {
        self.chunks.iter().map(Cost::of_chunk).collect()
    }
}

/// Measures the calls for chunks of 2 MiB, 4 MiB and so on to 1 GiB, as far as the device's free memory goes. `progress` hears what comes next.
///
/// A round goes over all sizes: what disturbs the machine for a moment disturbs them all alike. Nobody else should use the device: then the figures are of the
/// calls, and not of who waits for whom.
pub fn measure(
    driver: &dyn Driver,
    device: DeviceId,
    effort: Effort,
    progress: &dyn Fn(&str),
) -> Result<Costs, DriverError> {
    let smallest = driver.capabilities(device)?.granularity.max(limits::CHUNK_LEN_MIN);
    // A process's first descriptor, and its last, cost what others do not: 603 and 552 µs on an H200 (580.159), and 25 and 9. A daemon has many, so there is one while others are timed.
    let first = match driver.create(device, smallest) {
        // There is no room for any.
        Err(error) if error.kind() == ErrorKind::Exhausted => {
            return measure_others(driver, device, smallest, effort, progress);
        }
        first => first?,
    };
    let outcome = driver.export(first).and_then(|_first| measure_others(driver, device, smallest, effort, progress));
    let released = driver.release(first);
    outcome.and_then(|costs| released.map(|()| costs))
}

fn measure_others(
    driver: &dyn Driver,
    device: DeviceId,
    smallest: Bytes,
    effort: Effort,
    progress: &dyn Fn(&str),
) -> Result<Costs, DriverError> {
    let free = driver.memory(device)?.free;
    let mut sizes: Vec<(Bytes, Times)> = Vec::new();
    let mut len = smallest;
    while len <= free.min(LEN_MAX) {
        sizes.push((len, Times::default()));
        len = len + len;
    }
    if let Some((largest, _)) = sizes.last() {
        progress(&format!("calls for chunks of {smallest} to {largest}"));
        // What a process takes once, with its first use of a device, is no call's: a context, on GPUs.
        measure_chunk(driver, device, smallest, &mut Times::default())?;
    }
    let rounds = rounds(effort, || {
        let measured = |(len, times): &mut (Bytes, Times)| measure_chunk(driver, device, *len, times);
        match sizes.iter_mut().try_for_each(measured) {
            // Somebody has taken what was free; the smaller sizes have their figures.
            Err(error) if error.call == Call::Create && error.kind() == ErrorKind::Exhausted => Ok(()),
            outcome => outcome,
        }
    })?;
    let costs = sizes.into_iter().filter(|(_, times)| !times.calls.is_empty());
    let chunks = costs.map(|(len, times)| Cost { len, rounds, calls: times.medians() }).collect();
    let has_room = |count: &u64| smallest.checked_mul(*count).is_some_and(|bytes| bytes <= free);
    let run = [effort.run, RUN_MIN].into_iter().find(has_room).map(|count| {
        progress(&format!("a run of {count} chunks"));
        run_cost(driver, device, (smallest, count), effort)
    });
    let run = run.transpose()?;
    Ok(Costs { chunks, run })
}

/// Makes rounds until there are enough of them, or no time is left.
fn rounds(effort: Effort, mut round: impl FnMut() -> Result<(), DriverError>) -> Result<usize, DriverError> {
    let clock = SystemClock::new();
    let mut made = 0;
    while made < ROUNDS_MIN || (made < effort.rounds && clock.now() < effort.time) {
        round()?;
        made += 1;
    }
    Ok(made)
}

fn measure_chunk(driver: &dyn Driver, device: DeviceId, len: Bytes, times: &mut Times) -> Result<(), DriverError> {
    let granularity = driver.capabilities(device)?.granularity;
    times.at = 0;
    let handle = times.of(Call::Create, || driver.create(device, len))?;
    let fd = times.of(Call::Export, || driver.export(handle))?;
    let imported = times.of(Call::Import, || driver.import(device, fd, len))?;
    let start = times.of(Call::Reserve, || driver.reserve(device, len, granularity))?;
    let span = span(start, len);
    times.of(Call::Map, || driver.map(start, imported))?;
    times.of(Call::SetAccess, || driver.set_access(span, device, Access::ReadWrite))?;
    times.of(Call::Synchronize, || driver.synchronize(device))?;
    times.of(Call::Unmap, || driver.unmap(span))?;
    times.of(Call::Unreserve, || driver.unreserve(span))?;
    driver.release(imported)?;
    times.of(Call::Release, || driver.release(handle))
}

fn run_cost(
    driver: &dyn Driver,
    device: DeviceId,
    (len, count): (Bytes, u64),
    effort: Effort,
) -> Result<RunCost, DriverError> {
    let whole = Bytes::new(len.get() * count);
    let handles: Vec<Handle> = (0..count).map(|_| driver.create(device, len)).collect::<Result<_, _>>()?;
    let start = driver.reserve(device, whole, len)?;
    let all = span(start, whole);
    let parts: Vec<AddressSpan> = (0..count).map(|at| span(after(start, len.get() * at), len)).collect();
    let each = |call: &dyn Fn(AddressSpan) -> Result<(), DriverError>| parts.iter().try_for_each(|part| call(*part));
    let set = |span| driver.set_access(span, device, Access::ReadWrite);
    let unmap = |span| driver.unmap(span);
    let mut times = Times::default();
    rounds(effort, || {
        times.at = 0;
        for is_once in [true, false] {
            parts.iter().zip(&handles).try_for_each(|(part, handle)| driver.map(part.start(), *handle))?;
            times.of(Call::SetAccess, || if is_once { set(all) } else { each(&set) })?;
            driver.synchronize(device)?;
            times.of(Call::Unmap, || if is_once { unmap(all) } else { each(&unmap) })?;
        }
        Ok(())
    })?;
    driver.unreserve(all)?;
    handles.into_iter().try_for_each(|handle| driver.release(handle))?;
    let nanos: Vec<u64> = times.medians().into_iter().map(|(_, nanos)| nanos).collect();
    let [set_access_once, unmap_once, set_access_each, unmap_each] = nanos[..] else {
        unreachable!("four calls are timed in every round");
    };
    Ok(RunCost { len, count, set_access_once, set_access_each, unmap_once, unmap_each })
}

fn span(start: DeviceAddress, len: Bytes) -> AddressSpan {
    Span::new(start, len).expect("a reserved span fits")
}

fn after(start: DeviceAddress, bytes: u64) -> DeviceAddress {
    start.checked_add(Bytes::new(bytes)).expect("a reserved span fits")
}

/// Times the calls of rounds that make the same ones in the same order.
#[derive(Default)]
struct Times {
    calls: Vec<(Call, Vec<u64>)>,
    at: usize,
}

impl Times {
    fn of<T>(&mut self, call: Call, run: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
        let clock = SystemClock::new();
        let outcome = run()?;
        let took = u64::try_from(clock.now().as_nanos()).unwrap_or(u64::MAX);
        if self.at == self.calls.len() {
            self.calls.push((call, Vec::new()));
        }
        self.calls[self.at].1.push(took);
        self.at += 1;
        Ok(outcome)
    }

    fn medians(self) -> Vec<(Call, u64)> {
        let median = |(call, mut nanos): (Call, Vec<u64>)| {
            nanos.sort_unstable();
            (call, nanos[nanos.len() / 2])
        };
        self.calls.into_iter().map(median).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::driver::host::{HostDriver, HostOptions};
    use crate::driver::layers::{Intercept, Layered, Step};

    /// Makes each call take so long that what else runs on this machine is little beside 64 of them.
    #[derive(Debug)]
    struct Slow;

    impl Intercept for Slow {
        fn around<T>(
            &self,
            step: Step,
            run: impl FnOnce() -> Result<T, DriverError>,
            _handle: impl Fn(&T) -> Option<Handle>,
        ) -> Result<T, DriverError> {
            const LATENCY: Duration = Duration::from_micros(500);
            let clock = SystemClock::new();
            while step.call() == Call::SetAccess && clock.now() < LATENCY {
                std::hint::spin_loop();
            }
            run()
        }
    }

    #[test]
    fn sizes_go_as_far_as_the_memory_and_nothing_is_left_behind() {
        let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::mib(70), Bytes::mib(300)])));
        let driver = Layered::new(Arc::clone(&host) as Arc<dyn Driver>, Slow);
        let quiet = |_: &str| ();
        let sizes = |costs: &Costs| costs.chunks.iter().map(|cost| cost.len.get() >> 20).collect::<Vec<_>>();
        let small = measure(&driver, DeviceId(0), Effort::QUICK, &quiet).unwrap();
        assert_eq!((sizes(&small), small.run), (vec![2, 4, 8, 16, 32, 64], None));
        let large = measure(&driver, DeviceId(1), Effort::QUICK, &quiet).unwrap();
        assert_eq!(sizes(&large), [2, 4, 8, 16, 32, 64, 128, 256]);
        let run = large.run.unwrap();
        assert_eq!((run.len, run.count), (Bytes::mib(2), RUN_MIN));
        // Sixty-four calls are no quicker than one.
        assert!(run.set_access_each > run.set_access_once && run.set_access_once > 0, "{run:?}");
        assert!(large.chunks.iter().all(|cost| (ROUNDS_MIN..=Effort::QUICK.rounds).contains(&cost.rounds)));
        assert_eq!(host.counts(), (0, 0, 0));
    }

    #[test]
    fn a_chunk_costs_what_is_called_for_it_alone() {
        let calls = vec![(Call::Create, 1), (Call::Reserve, 10), (Call::Map, 100), (Call::Synchronize, 1000)];
        let cost = Cost { len: Bytes::mib(2), rounds: 3, calls };
        assert_eq!(cost.of_chunk(), ChunkCost { len: Bytes::mib(2), nanos: 101 });
    }
}
