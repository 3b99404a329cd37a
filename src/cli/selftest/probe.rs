//! The other process of an experiment, from inside: `stitchd probe`. Nobody starts it but `stitchd selftest`, which is at the other end of standard input.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::{fork, helper, open};
use crate::cli::{DONE, Failure, Outcome};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::{Access, Cause, Driver, DriverError, DriverName, Rank};
use crate::error::chain;
use crate::ids::{ChunkId, DeviceId, StreamId};
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::rng::{Rng, mix};
use crate::units::{AddressSpan, Bytes, DeviceAddress, Place as _, Span};
use crate::wire::fd_channel::FdChannel;

#[derive(Debug, Args)]
pub(in crate::cli) struct ProbeArgs {
    /// What to do
    #[arg(value_enum)]
    role: Role,
    /// On which driver
    #[arg(long)]
    driver: DriverName,
    /// On which device
    #[arg(long)]
    device: u32,
    /// With so many bytes
    #[arg(long)]
    len: Bytes,
}

/// What a helper does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Role {
    /// Makes a chunk without a context, and then a context.
    Bare,
    /// Makes a chunk, marks it, passes it on, and lives.
    Hold,
    /// Is given a chunk, maps it, and says what it sees when it is told to look.
    Show,
    /// Makes a chunk, passes it on, and fills it again and again, with another value each time.
    Fill,
    /// The same, with a forked child.
    FillForked,
    /// Unmaps memory while work is queued, on other memory.
    UnmapBeside,
    /// Unmaps memory while work on it is queued.
    UnmapUnder,
    /// Misuses the driver's library.
    Misuse,
    /// Exports a chunk until that is refused.
    Exports,
    /// Has every other device write to a stitched range.
    Peers,
    /// Adds up stitched ranges of all devices with the vendor's library.
    Collectives,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Role::Bare => "bare",
            Role::Hold => "hold",
            Role::Show => "show",
            Role::Fill => "fill",
            Role::FillForked => "fill-forked",
            Role::UnmapBeside => "unmap-beside",
            Role::UnmapUnder => "unmap-under",
            Role::Misuse => "misuse",
            Role::Exports => "exports",
            Role::Peers => "peers",
            Role::Collectives => "collectives",
        }
    }
}

/// What memory is marked with.
pub(super) const MARK: u8 = 0x5c;

/// So much of every granule is marked and looked at: all of it would take the time of a copy.
pub(super) const MARK_LEN: usize = 4096;

/// Work is queued for so long at most: whoever should have killed this process is gone.
const WORK_MAX: Duration = Duration::from_secs(10);

/// Work of one experiment that waits for its end.
const QUEUE: usize = 200;
/// Queueing takes so long at most: where work is done at once there is no queue to be had.
const QUEUE_TIME: Duration = Duration::from_millis(300);

/// Exporting takes so long at most: half a million take some seconds.
const EXPORTS_TIME: Duration = Duration::from_secs(20);

/// Where the marks of a span are.
pub(super) fn marks(span: AddressSpan, granularity: Bytes) -> impl Iterator<Item = DeviceAddress> {
    let at = move |offset| span.start().checked_add(Bytes::new(offset)).expect("it lies in the span");
    (0..span.len().get()).step_by(granularity.get() as usize).map(at)
}

pub(super) fn in_words(error: DriverError) -> String {
    chain(&error)
}

pub(super) fn memory_in_words(error: MemoryError) -> String {
    chain(&error)
}

/// Marks every granule of a span.
pub(super) fn mark(device: &Device, span: AddressSpan) -> Result<(), String> {
    let bytes = [MARK; MARK_LEN];
    marks(span, device.capabilities().granularity)
        .try_for_each(|at| device.driver().write(at, &bytes))
        .map_err(in_words)
}

/// Marks that are whole, and places in which there is anything at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) places: u64,
    pub(super) whole: u64,
    pub(super) dirty: u64,
}

/// Looks at every granule of a span.
pub(super) fn look(device: &Device, span: AddressSpan) -> Result<Seen, String> {
    let mut seen = Seen::default();
    let mut bytes = [0; MARK_LEN];
    for at in marks(span, device.capabilities().granularity) {
        device.driver().read(at, &mut bytes).map_err(in_words)?;
        seen.places += 1;
        seen.whole += u64::from(bytes.iter().all(|byte| *byte == MARK));
        seen.dirty += u64::from(bytes.iter().any(|byte| *byte != 0));
    }
    Ok(seen)
}

pub(in crate::cli) fn run(args: &ProbeArgs) -> Outcome {
    // A selftest that gives a question up, and ends, takes its helpers along, whatever they hang in.
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)) {
        tracing::warn!(%error, "this process may outlive the selftest");
    }
    crate::cli::serve::raise_descriptor_limit();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input").map_err(Failure::Other)?;
    let channel = FdChannel::over(socket, true);
    let driver = open(args.driver, args.device + 1)?;
    let played = play(args, &channel, driver);
    if let Err(error) = &played {
        // If nobody listens any more, nobody cares.
        let _ = helper::say(&channel, &json!({ "error": error }), &[]);
    }
    // Whoever started this process ends it, or has ended.
    let _ = channel.receive::<String>();
    DONE
}

fn play(args: &ProbeArgs, channel: &FdChannel, driver: Arc<dyn Driver>) -> Result<(), String> {
    let id = DeviceId(args.device);
    let device = Device::open(Arc::clone(&driver), id).map_err(in_words)?;
    let stage = Stage { channel, driver, device, len: args.len };
    match args.role {
        Role::Bare => stage.bare(),
        Role::Hold => stage.hold(),
        Role::Show => stage.show(),
        Role::Fill => stage.fill(false),
        Role::FillForked => stage.fill(true),
        Role::UnmapBeside => stage.unmap(true),
        Role::UnmapUnder => stage.unmap(false),
        Role::Misuse => stage.misuse(),
        Role::Exports => stage.exports(),
        Role::Peers => stage.peers(),
        Role::Collectives => stage.collectives(),
    }
}

/// What a rank gives at a place of its range: bytes that no other rank and no other place has, so that what is read elsewhere in its stead has another sum.
fn given(rank: usize, place: usize) -> [u8; MARK_LEN] {
    let mut rng = Rng::new(mix((rank as u64) << 32 | place as u64));
    let mut bytes = [0; MARK_LEN];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
    bytes
}

/// The sum of what so many ranks give at a place, byte by byte.
fn sum_of(ranks: usize, place: usize) -> [u8; MARK_LEN] {
    let mut sums = [0_u8; MARK_LEN];
    for rank in 0..ranks {
        sums.iter_mut().zip(given(rank, place)).for_each(|(sum, byte)| *sum = sum.wrapping_add(byte));
    }
    sums
}

/// A device's part in an all-reduce, with its ranges.
struct Part {
    device: DeviceId,
    stream: StreamId,
    from: Mapping,
    to: Mapping,
}

impl Part {
    fn rank(&self) -> Rank {
        let Part { device, stream, from, to } = self;
        Rank { device: *device, stream: *stream, from: from.span().start(), to: to.span().start() }
    }
}

/// What came of an all-reduce.
struct Reduced {
    version: i32,
    took: Duration,
    /// Places of all ranks, and those whose sum is not right.
    places: u64,
    wrong: u64,
}

/// What every role has.
struct Stage<'a> {
    channel: &'a FdChannel,
    driver: Arc<dyn Driver>,
    device: Arc<Device>,
    len: Bytes,
}

impl Stage<'_> {
    fn say(&self, what: &Value) -> Result<(), String> {
        helper::say(self.channel, what, &[])
    }

    /// Waits until this process is told to go on; what came with it.
    fn wait(&self) -> Result<Vec<OwnedFd>, String> {
        self.channel.receive::<String>().map(|(_, fds)| fds).map_err(|error| chain(&error))
    }

    fn free(&self) -> Result<u64, String> {
        Ok(self.device.driver().memory(self.device.id()).map_err(in_words)?.free.get())
    }

    fn chunk(&self) -> Result<Arc<Chunk>, String> {
        Chunk::create(&self.device, ChunkId(0), self.len).map(Arc::new).map_err(memory_in_words)
    }

    fn bare(&self) -> Result<(), String> {
        let before = self.free()?;
        let chunk = self.chunk()?;
        let export = chunk.export().map_err(memory_in_words)?;
        let with_chunk = self.free()?;
        let driver = self.device.driver();
        let stream = driver.create_stream(self.device.id()).map_err(in_words)?;
        let with_context = self.free()?;
        driver.destroy_stream(stream).map_err(in_words)?;
        self.say(&json!({ "before": before, "with_chunk": with_chunk, "with_context": with_context }))?;
        drop(export);
        self.wait().map(drop)
    }

    fn hold(&self) -> Result<(), String> {
        let chunk = self.chunk()?;
        let export = chunk.export().map_err(memory_in_words)?;
        let mapping = Mapping::stitch(&[Arc::clone(&chunk)]).map_err(memory_in_words)?;
        mark(&self.device, mapping.span())?;
        helper::say(self.channel, &json!({}), &[export.as_fd()])?;
        self.wait().map(drop)
    }

    fn show(&self) -> Result<(), String> {
        let fd = self.wait()?.pop().ok_or("no descriptor came")?;
        let chunk = Chunk::import(&self.device, ChunkId(0), fd, self.len).map(Arc::new).map_err(memory_in_words)?;
        let mapping = Mapping::stitch(&[chunk]).map_err(memory_in_words)?;
        self.say(&json!({}))?;
        self.wait()?;
        let seen = look(&self.device, mapping.span())?;
        self.say(&json!({ "is_there": seen.whole == seen.places }))?;
        self.wait().map(drop)
    }

    fn fill(&self, with_child: bool) -> Result<(), String> {
        let (driver, id) = (self.device.driver(), self.device.id());
        let chunk = self.chunk()?;
        // Kept, as a daemon keeps one of each chunk.
        let export = chunk.export().map_err(memory_in_words)?;
        let mapping = Mapping::stitch(&[chunk]).map_err(memory_in_words)?;
        let stream = driver.create_stream(id).map_err(in_words)?;
        let child = match with_child {
            true => Some(fork::idle_child(std::io::stdin().as_fd()).ok_or("this process cannot be forked")?),
            false => None,
        };
        let fill = |value| driver.fill(id, stream, mapping.span(), value).map_err(in_words);
        fill(0)?;
        helper::say(self.channel, &json!({ "child": child }), &[export.as_fd()])?;
        let clock = SystemClock::new();
        let mut value = 0_u8;
        while clock.now() < WORK_MAX {
            value = value.wrapping_add(1);
            fill(value)?;
        }
        Ok(())
    }

    /// Queues work and unmaps at once: other memory, or what the work is on. A process of its own, because the second may cost it its context.
    fn unmap(&self, is_beside: bool) -> Result<(), String> {
        let (driver, id) = (self.device.driver(), self.device.id());
        let half = Bytes::new(self.len.get() / 2);
        let map = || {
            let handle = driver.create(id, half)?;
            let start = driver.reserve(id, half, self.device.capabilities().granularity)?;
            driver.map(start, handle)?;
            let span = Span::new(start, half).expect("a reserved span fits");
            driver.set_access(span, id, Access::ReadWrite).map(|()| span)
        };
        let (used, other) = (map().map_err(in_words)?, map().map_err(in_words)?);
        let stream = driver.create_stream(id).map_err(in_words)?;
        let first = Span::new(used.start(), self.device.capabilities().granularity).expect("it lies in the span");
        driver.fill(id, stream, first, 1).and_then(|()| driver.synchronize(id)).map_err(in_words)?;
        let clock = SystemClock::new();
        for _ in 0..QUEUE {
            driver.fill(id, stream, used, MARK).map_err(in_words)?;
            if clock.now() > QUEUE_TIME {
                break;
            }
        }
        let event = driver.record_event(id, stream).map_err(in_words)?;
        let was_over = driver.query_event(event).map_err(in_words)?;
        let begun = clock.now();
        let unmapped = driver.unmap(if is_beside { other } else { used });
        let unmap_took = clock.now() - begun;
        let is_over = driver.query_event(event);
        // The rest may be what a process sees whose context is lost.
        let settled = driver.synchronize(id);
        let queue_took = clock.now() - begun;
        let words = |outcome: Result<(), DriverError>| outcome.err().map(in_words);
        self.say(&json!({
            "was_over": was_over,
            "is_over": is_over.as_ref().ok(),
            "unmap_us": unmap_took.as_micros() as u64,
            "queue_us": queue_took.as_micros() as u64,
            "unmap_error": words(unmapped),
            "work_error": words(is_over.map(drop).and(settled)),
        }))
    }

    /// Says what is answered misuse by misuse: the next may end this process.
    fn misuse(&self) -> Result<(), String> {
        let mut unheard = None;
        let mut tell = |misuse: &'static str, answer: String| {
            let said = self.say(&json!({ "misuse": misuse, "answer": answer }));
            unheard = unheard.take().or(said.err());
        };
        self.device.driver().misuse(self.device.id(), &mut tell).map_err(in_words)?;
        unheard.map_or(Ok(()), Err)?;
        self.say(&json!({}))?;
        self.wait().map(drop)
    }

    /// Exports are finite on a machine. They end with this process.
    fn exports(&self) -> Result<(), String> {
        let chunk = self.chunk()?;
        let clock = SystemClock::new();
        let mut held = Vec::new();
        let mut refused = None;
        while refused.is_none() && clock.now() < EXPORTS_TIME {
            match chunk.export() {
                Ok(export) => held.push(export),
                Err(error) => refused = Some(error),
            }
        }
        let is_table = |error: &MemoryError| matches!(error.cause(), Some(Cause::TooMany { what, .. }) if what.starts_with("exports"));
        self.say(&json!({
            "exports": held.len(),
            "is_full": refused.as_ref().is_some_and(is_table),
            "refused": refused.as_ref().map(|error| chain(error)),
        }))?;
        drop(held);
        self.wait().map(drop)
    }

    /// What each other device of the machine does to a range of two chunks of this one.
    fn peers(&self) -> Result<(), String> {
        let (driver, id) = (self.device.driver(), self.device.id());
        let mapping = self.stitched(&self.device, 2)?;
        let mut told = serde_json::Map::new();
        for peer in driver.devices().into_iter().filter(|peer| peer.id != id) {
            let clock = SystemClock::new();
            let written = driver
                .create_stream(peer.id)
                .and_then(|stream| driver.fill(peer.id, stream, mapping.span(), MARK))
                .and_then(|()| driver.synchronize(peer.id));
            let took = clock.now();
            let said = match written.map_err(in_words).and_then(|()| look(&self.device, mapping.span())) {
                Ok(seen) => json!({ "is_there": seen.whole == seen.places, "us": took.as_micros() as u64 }),
                Err(error) => json!({ "error": error }),
            };
            told.insert(peer.id.0.to_string(), said);
        }
        self.say(&json!({ "peers": told }))
    }

    /// All devices add up ranges of one chunk, into others, and then ranges of two. What fails already with one is no answer: libraries connect their ranks with the first collective, and what they
    /// lack for that (shared memory, a way to a peer) they do not lack because of stitching.
    fn collectives(&self) -> Result<(), String> {
        let parts = self.parts(1)?;
        let ranks = parts.len();
        let Reduced { version, took, places, wrong } =
            self.all_reduce(&parts).map_err(|error| format!("of whole chunks: {}", in_words(error)))?;
        if wrong > 0 {
            return Err(format!("of whole chunks {wrong} of {places} places are wrong"));
        }
        drop(parts);
        let parts = self.parts(2)?;
        // Now: what comes next may end this process, and that is an answer.
        let whole_ms = took.as_millis() as u64;
        self.say(&json!({ "ranks": ranks, "library_version": version, "of_whole_chunks_ms": whole_ms }))?;
        let said = match self.all_reduce(&parts) {
            Ok(Reduced { took, wrong, .. }) => json!({ "ms": took.as_millis() as u64, "wrong_places": wrong }),
            Err(error) => json!({ "refused": in_words(error) }),
        };
        self.say(&said)
    }

    /// Where ranks give and get: at the same offsets on every device.
    fn places(&self, span: AddressSpan) -> impl Iterator<Item = (usize, DeviceAddress)> {
        marks(span, self.device.capabilities().granularity).enumerate()
    }

    /// Every device's part, in ranges of so many chunks, with what it gives. What it gets is zero until it gets something: sums that an earlier experiment left behind there are none of this one's.
    fn parts(&self, chunks: u64) -> Result<Vec<Part>, String> {
        let driver = self.device.driver();
        let mut parts = Vec::new();
        for (number, description) in driver.devices().into_iter().enumerate() {
            let id = description.id;
            let device = Device::open(Arc::clone(&self.driver), id).map_err(in_words)?;
            let (from, to) = (self.stitched(&device, chunks)?, self.stitched(&device, chunks)?);
            let stream = driver.create_stream(id).map_err(in_words)?;
            driver.fill(id, stream, to.span(), 0).map_err(in_words)?;
            for (place, at) in self.places(from.span()) {
                driver.write(at, &given(number, place)).map_err(in_words)?;
            }
            driver.synchronize(id).map_err(in_words)?;
            parts.push(Part { device: id, stream, from, to });
        }
        Ok(parts)
    }

    fn all_reduce(&self, parts: &[Part]) -> Result<Reduced, DriverError> {
        let driver = self.device.driver();
        let ranks: Vec<Rank> = parts.iter().map(Part::rank).collect();
        let clock = SystemClock::new();
        let version = driver.all_reduce(&ranks, self.len)?;
        let took = clock.now();
        let (mut places, mut wrong) = (0, 0);
        let mut bytes = [0; MARK_LEN];
        for part in parts {
            for (place, at) in self.places(part.to.span()) {
                driver.read(at, &mut bytes)?;
                places += 1;
                wrong += u64::from(bytes != sum_of(ranks.len(), place));
            }
        }
        Ok(Reduced { version, took, places, wrong })
    }

    /// A range of so many chunks.
    fn stitched(&self, device: &Arc<Device>, chunks: u64) -> Result<Mapping, String> {
        let len = Bytes::new(self.len.get() / chunks);
        let chunk = |_| Chunk::create(device, ChunkId(0), len).map(Arc::new).map_err(memory_in_words);
        Mapping::stitch(&(0..chunks).map(chunk).collect::<Result<Vec<_>, _>>()?).map_err(memory_in_words)
    }
}
