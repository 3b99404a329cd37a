//! The driver of addresses and costs only: no bytes, so eight devices of 141 GB fit a laptop. Every rule of the real drivers holds;
//! each call adds what it would have cost, by a named [`CostTable`].
//!
//! Faults that it injects when asked ([`Faults`]): any memory call fails, at random from a seed, before it changes anything.
//! Faults that it never injects: a call that half happens, a wrong answer, a delay.
//!
//! Not for: contents. Reads, writes and fills answer [`Cause::Unsupported`].

use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use super::books::{Books, ChunkKey};
use super::cost_table::CostTable;
use super::host::{Token, uuid_of};
use super::streams::{Stall, Streams};
use super::{
    Access, Call, Capabilities, Cause, DeviceDescription, DeviceMemory, Driver, DriverError, EventId, Handle,
    check_alignment,
};
use crate::ids::{DeviceId, StreamId};
use crate::limits;
use crate::rng::Rng;
use crate::units::{AddressSpan, Bytes, DeviceAddress, Span};

/// Random failures of memory calls.
#[derive(Clone, Debug)]
pub struct Faults {
    /// Same seed, same failures.
    pub seed: u64,
    /// Of a thousand memory calls so many fail.
    pub per_mille: u64,
}

/// What a [`SimDriver`] simulates.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Bytes of each device.
    pub devices: Vec<Bytes>,
    /// Smallest chunk.
    pub granularity: Bytes,
    /// Whether a chunk can be mapped at two addresses.
    pub alias: bool,
    /// What calls cost.
    pub costs: CostTable,
    /// What fails.
    pub faults: Option<Faults>,
}

impl SimOptions {
    /// Devices of `totals`, the usual granularity, aliases, A100 costs, no faults.
    pub fn with_devices(totals: &[Bytes]) -> SimOptions {
        SimOptions {
            devices: totals.to_vec(),
            granularity: limits::CHUNK_LEN_MIN,
            alias: true,
            costs: CostTable::A100,
            faults: None,
        }
    }
}

/// The simulated driver.
#[derive(Debug)]
pub struct SimDriver {
    options: SimOptions,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    books: Books,
    streams: Streams,
    chunks: HashMap<ChunkKey, SimChunk>,
    /// Exported chunks by the identity of their token.
    exported: HashMap<(u64, u64), ChunkKey>,
    /// Chunks whose descriptors may outlive all else.
    lingering: Vec<(Token, SimChunk)>,
    charged: Vec<Bytes>,
    next_address: u64,
    /// What this call costs, if not what one on the smallest chunk does.
    charge: Option<f64>,
    seconds: f64,
    faults: Option<(Rng, u64, u64)>,
}

#[derive(Debug)]
struct SimChunk {
    device: DeviceId,
    len: Bytes,
    token: Option<Token>,
}

/// Simulated addresses begin here: far from anything a process has, so that a mix-up shows.
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;

impl SimDriver {
    /// The driver that `options` describe.
    pub fn new(options: SimOptions) -> SimDriver {
        let state = State {
            books: Books::new(options.granularity, options.alias, u64::MAX),
            streams: Streams::default(),
            chunks: HashMap::new(),
            exported: HashMap::new(),
            lingering: Vec::new(),
            charged: vec![Bytes::ZERO; options.devices.len()],
            next_address: FIRST_ADDRESS,
            charge: None,
            seconds: 0.0,
            faults: options.faults.as_ref().map(|faults| (Rng::new(faults.seed), faults.per_mille, 0)),
        };
        SimDriver { options, state: Mutex::new(state) }
    }

    /// Keeps `stream` busy until the answer is dropped, as a long kernel would.
    pub fn stall(&self, device: DeviceId, stream: StreamId) -> Stall {
        self.lock().streams.stall(device, stream)
    }

    /// What all calls until now would have cost.
    pub fn modelled_seconds(&self) -> f64 {
        self.lock().seconds
    }

    /// Bytes of a device that chunks take.
    pub fn charged(&self, device: DeviceId) -> Bytes {
        self.lock().charged.get(device.0 as usize).copied().unwrap_or(Bytes::ZERO)
    }

    /// Chunks, mappings and reservations that there are.
    pub fn counts(&self) -> (usize, usize, usize) {
        let state = self.lock();
        (state.books.chunk_count(), state.books.mapping_count(), state.books.reservation_count())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no step of this driver panics while it holds the lock")
    }

    fn total(&self, device: DeviceId) -> Result<Bytes, Cause> {
        let count = self.options.devices.len();
        self.options.devices.get(device.0 as usize).copied().ok_or(Cause::NoDevice { device, count })
    }

    /// One step: counts its cost, perhaps lets it fail, then takes it.
    fn step<T>(&self, call: Call, take: impl FnOnce(&mut State) -> Result<T, Cause>) -> Result<T, DriverError> {
        let mut state = self.lock();
        state.charge = None;
        let outcome = match state.injected(call) {
            Some(cause) => Err(cause),
            None => take(&mut state),
        };
        let charge = state.charge.take();
        state.seconds += charge.unwrap_or_else(|| self.options.costs.seconds(call, self.options.granularity));
        outcome.map_err(|cause| DriverError::new(call, cause))
    }
}

impl State {
    /// The call is about chunks of these sizes.
    fn charge(&mut self, costs: &CostTable, call: Call, lens: impl Iterator<Item = Bytes>) {
        self.charge = Some(lens.map(|len| costs.seconds(call, len)).sum());
    }

    fn injected(&mut self, call: Call) -> Option<Cause> {
        let (rng, per_mille, count) = self.faults.as_mut().filter(|_| call.is_memory())?;
        if !rng.chance(*per_mille) {
            return None;
        }
        *count += 1;
        Some(Cause::Injected(*count))
    }

    fn drop_chunks(&mut self, gone: &[ChunkKey]) {
        for key in gone {
            let mut chunk = self.chunks.remove(key).expect("every chunk of the books is here");
            let probe = chunk.token.take().and_then(|token| {
                if let Ok(identity) = Token::identity(token.fd()) {
                    self.exported.remove(&identity);
                }
                token.into_probe()
            });
            match probe {
                Some(probe) => self.lingering.push((probe, chunk)),
                None => self.charged[chunk.device.0 as usize] -= chunk.len,
            }
        }
        self.sweep();
    }

    /// A chunk that only its descriptors kept has a handle again.
    fn revive(&mut self, lingering: usize, identity: (u64, u64)) -> Handle {
        let (probe, chunk) = self.lingering.swap_remove(lingering);
        let (handle, key) = self.books.add_chunk(chunk.len);
        self.chunks.insert(key, SimChunk { token: Some(probe), ..chunk });
        self.exported.insert(identity, key);
        handle
    }

    fn sweep(&mut self) {
        let (held, returned): (Vec<_>, Vec<_>) =
            self.lingering.drain(..).partition(|(probe, _)| probe.is_held_elsewhere());
        self.lingering = held;
        for (_, chunk) in returned {
            self.charged[chunk.device.0 as usize] -= chunk.len;
        }
    }
}

impl Driver for SimDriver {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn devices(&self) -> Vec<DeviceDescription> {
        let describe = |(ordinal, total): (usize, &Bytes)| DeviceDescription {
            id: DeviceId(ordinal as u32),
            uuid: uuid_of(*b"stitchd-sim--", ordinal),
            model: "simulated device".into(),
            total: *total,
        };
        self.options.devices.iter().enumerate().map(describe).collect()
    }

    fn capabilities(&self, device: DeviceId) -> Result<Capabilities, DriverError> {
        self.step(Call::Query, |_| self.total(device))?;
        Ok(Capabilities {
            granularity: self.options.granularity,
            alias: self.options.alias,
            contents: false,
            clears_memory: true,
            enforces_read_only: false,
            checks_imports: true,
            fds_per_chunk: 0,
            mappings_max: u64::MAX,
            memory_stays_with_addresses: false,
            copies_wait: false,
            rdma: false,
            fabric: false,
            mps: false,
            maps_when_quiet: false,
        })
    }

    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, DriverError> {
        self.step(Call::Query, |state| {
            let total = self.total(device)?;
            state.sweep();
            Ok(DeviceMemory { total, free: total.saturating_sub(state.charged[device.0 as usize]), is_live: true })
        })
    }

    fn create(&self, device: DeviceId, len: Bytes) -> Result<Handle, DriverError> {
        self.step(Call::Create, |state| {
            state.charge(&self.options.costs, Call::Create, [len].into_iter());
            let total = self.total(device)?;
            state.books.check_len("chunk size", len)?;
            state.sweep();
            let available = total.saturating_sub(state.charged[device.0 as usize]);
            if len > available {
                return Err(Cause::Exhausted { device, requested: len, available, total });
            }
            let (handle, chunk) = state.books.add_chunk(len);
            state.chunks.insert(chunk, SimChunk { device, len, token: None });
            state.charged[device.0 as usize] += len;
            Ok(handle)
        })
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        self.step(Call::Release, |state| {
            let (_, len) = state.books.chunk(handle)?;
            state.charge(&self.options.costs, Call::Release, [len].into_iter());
            let gone = state.books.release(handle)?;
            state.drop_chunks(gone.as_slice());
            Ok(())
        })
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        self.step(Call::Export, |state| {
            let (key, len) = state.books.chunk(handle)?;
            state.charge(&self.options.costs, Call::Export, [len].into_iter());
            let chunk = state.chunks.get_mut(&key).expect("every chunk of the books is here");
            let token = match chunk.token.take() {
                Some(token) => token,
                None => Token::new()?,
            };
            let fd = token.duplicate();
            state.exported.insert(Token::identity(token.fd())?, key);
            chunk.token = Some(token);
            fd
        })
    }

    fn import(&self, device: DeviceId, fd: OwnedFd, len: Bytes) -> Result<Handle, DriverError> {
        self.step(Call::Import, |state| {
            state.charge(&self.options.costs, Call::Import, [len].into_iter());
            self.total(device)?;
            state.books.check_len("chunk size", len)?;
            let not_a_chunk = |found: String| Cause::NotAChunk { expected: len, found };
            let identity = Token::identity(fd.as_fd())?;
            let known = state.exported.get(&identity).copied();
            let lingers = state.lingering.iter().position(|(probe, _)| Token::identity(probe.fd()) == Ok(identity));
            let found = match (known, lingers) {
                (Some(key), _) => state.chunks[&key].len,
                (None, Some(at)) => state.lingering[at].1.len,
                (None, None) => return Err(not_a_chunk("no chunk of this simulation".into())),
            };
            if found != len {
                return Err(not_a_chunk(format!("it has {} bytes", found.get())));
            }
            Ok(match (known, lingers) {
                (Some(key), _) => state.books.add_handle(key),
                (None, at) => state.revive(at.expect("looked up above"), identity),
            })
        })
    }

    fn native_handle(&self, _handle: Handle) -> Result<u64, DriverError> {
        Err(DriverError::new(Call::Query, Cause::Unsupported { driver: "sim" }))
    }

    fn reserve(&self, device: DeviceId, len: Bytes, alignment: Bytes) -> Result<DeviceAddress, DriverError> {
        self.step(Call::Reserve, |state| {
            self.total(device)?;
            state.books.check_len("reservation size", len)?;
            check_alignment(alignment, self.options.granularity)?;
            let exhausted =
                Cause::TooMany { what: "addresses", limit: u64::MAX - FIRST_ADDRESS, remedy: "end the simulation" };
            let start = state.next_address.checked_next_multiple_of(alignment.get()).ok_or(exhausted.clone())?;
            let end = Span::new(DeviceAddress::new(start), len).ok_or(exhausted)?.end();
            // A gap behind each reservation, so that running over its end cannot hit the next one.
            state.next_address = end.get().saturating_add(self.options.granularity.get());
            state.books.reserve(DeviceAddress::new(start), len);
            Ok(DeviceAddress::new(start))
        })
    }

    fn unreserve(&self, span: AddressSpan) -> Result<(), DriverError> {
        self.step(Call::Unreserve, |state| {
            state.books.check_unreserve(span)?;
            state.books.unreserve(span);
            Ok(())
        })
    }

    fn map(&self, at: DeviceAddress, handle: Handle) -> Result<(), DriverError> {
        self.step(Call::Map, |state| {
            let (span, chunk) = state.books.check_map(at, handle)?;
            state.charge(&self.options.costs, Call::Map, [span.len()].into_iter());
            state.books.map(span, chunk);
            Ok(())
        })
    }

    fn unmap(&self, span: AddressSpan) -> Result<(), DriverError> {
        self.step(Call::Unmap, |state| {
            let mapped = state.books.check_covered(span)?;
            state.charge(&self.options.costs, Call::Unmap, mapped.iter().map(|part| part.len()));
            let gone = state.books.unmap(&mapped);
            state.drop_chunks(&gone);
            Ok(())
        })
    }

    fn set_access(&self, span: AddressSpan, device: DeviceId, access: Access) -> Result<(), DriverError> {
        self.step(Call::SetAccess, |state| {
            self.total(device)?;
            let mapped = state.books.check_covered(span)?;
            state.charge(&self.options.costs, Call::SetAccess, mapped.iter().map(|part| part.len()));
            state.books.set_access(&mapped, access);
            Ok(())
        })
    }

    fn read(&self, _from: DeviceAddress, _into: &mut [u8]) -> Result<(), DriverError> {
        Err(DriverError::new(Call::Copy, Cause::Unsupported { driver: "sim" }))
    }

    fn write(&self, _to: DeviceAddress, _from: &[u8]) -> Result<(), DriverError> {
        Err(DriverError::new(Call::Copy, Cause::Unsupported { driver: "sim" }))
    }

    fn fill(&self, _device: DeviceId, _stream: StreamId, _span: AddressSpan, _value: u8) -> Result<(), DriverError> {
        Err(DriverError::new(Call::Copy, Cause::Unsupported { driver: "sim" }))
    }

    fn create_stream(&self, device: DeviceId) -> Result<StreamId, DriverError> {
        self.step(Call::Event, |state| {
            self.total(device)?;
            Ok(state.streams.create(device))
        })
    }

    fn destroy_stream(&self, stream: StreamId) -> Result<(), DriverError> {
        self.step(Call::Event, |state| state.streams.destroy(stream))
    }

    fn record_event(&self, device: DeviceId, stream: StreamId) -> Result<EventId, DriverError> {
        self.step(Call::Event, |state| {
            self.total(device)?;
            Ok(state.streams.record(device, stream))
        })
    }

    fn query_event(&self, event: EventId) -> Result<bool, DriverError> {
        self.step(Call::Event, |state| {
            state.streams.pump(|_, _| ());
            state.streams.query(event)
        })
    }

    fn wait_event(&self, device: DeviceId, stream: StreamId, event: EventId) -> Result<(), DriverError> {
        self.step(Call::Event, |state| state.streams.wait(device, stream, event))
    }

    fn destroy_event(&self, event: EventId) -> Result<(), DriverError> {
        self.step(Call::Event, |state| state.streams.forget(event))
    }

    fn synchronize(&self, device: DeviceId) -> Result<(), DriverError> {
        loop {
            let idle = self.step(Call::Synchronize, |state| {
                self.total(device)?;
                state.streams.pump(|_, _| ());
                Ok(state.streams.is_idle(device))
            })?;
            if idle {
                return Ok(());
            }
            // Something stalls, as a kernel that still runs would.
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
