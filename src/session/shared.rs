//! Shared ranges: memory that one process writes and publishes under a name, and others attach.
//!
//! A [`Draft`] is leased memory at one run of addresses. Once it is published it is a [`SharedRange`], for its publisher as for those who attach it: mapped for reading, or for reading and writing where it was
//! published so. How far "for reading" goes is the driver's to say ([`SharedRange::is_sealed`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::holdings::RangeHold;
use super::source::DaemonSource;
use super::{Session, SessionError, claim, fork, source};
use crate::driver::{Access, Driver as _};
use crate::error::{ErrorKind, chain};
use crate::ids::{DeviceId, RangeId};
use crate::ladder::Shape;
use crate::limits;
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::runtime::{ChunkSource as _, Want};
use crate::units::{AddressSpan, Bytes};
use crate::wire::convert::{self, malformed};
use crate::wire::v1;

/// How a range is published.
#[derive(Clone, Debug, Default)]
pub struct Publishing {
    /// 1 to 128 bytes.
    pub name: String,
    /// How many of its bytes mean something.
    pub content: Bytes,
    /// How long it outlives its last holder.
    pub linger: Duration,
    /// Those who attach it may write it.
    pub is_writable: bool,
    /// 16 to 64 bytes that whoever attaches it must show; empty where it is for sessions of the publisher's tenant.
    pub key: Vec<u8>,
}

/// Which range is attached.
#[derive(Clone, Debug, Default)]
pub struct Attaching {
    /// As it was published.
    pub name: String,
    /// Exactly this one; 0 for the newest.
    pub version: u64,
    /// As it was published.
    pub key: Vec<u8>,
}

/// Why a draft was not published, and the draft, where it can still be used.
#[derive(Debug, thiserror::Error)]
#[error("the range is not published")]
pub struct Unpublished {
    /// As it was; nothing where what became of it is not known.
    pub draft: Option<Box<Draft>>,
    /// Why.
    #[source]
    pub error: SessionError,
}

/// Memory that is to be published. Dropping it gives it back.
#[derive(Debug)]
pub struct Draft {
    /// Dropped first: what is given back is not mapped any more.
    mapping: Option<Mapping>,
    source: DaemonSource,
}

/// A shared range that this process holds, and has mapped. Dropping it unmaps it, and holds it no more.
#[derive(Debug)]
pub struct SharedRange {
    mapping: Option<Mapping>,
    session: Arc<Session>,
    device: DeviceId,
    hold: Arc<RangeHold>,
    version: u64,
    content: Bytes,
    is_writable: bool,
    is_sealed: bool,
}

impl Session {
    /// Memory of at least `len` bytes at one run of addresses of this process's device `ordinal`, to be written and published.
    ///
    /// # Errors
    ///
    /// As of a runtime's growth: there is none, or more is asked for than the session may hold.
    pub fn draft(self: &Arc<Session>, ordinal: u32, len: Bytes) -> Result<Draft, SessionError> {
        let (device, uuid) = self.device_here(ordinal)?;
        let source = DaemonSource::new(Arc::clone(self), device, uuid, None);
        let want = Want { len, shape: Shape::Largest, plan: None, wait: self.wait };
        let chunks = source.lease(want)?;
        if chunks.len() > limits::RELEASE_CHUNKS_MAX {
            let count = chunks.len();
            source.release(chunks);
            let message =
                format!("{len} are {count} chunks, and a shared range has {} at most", limits::RELEASE_CHUNKS_MAX);
            return Err(SessionError::Refused { kind: ErrorKind::Exhausted, message });
        }
        match Mapping::stitch(&chunks) {
            Ok(mapping) => Ok(Draft { mapping: Some(mapping), source }),
            Err(error) => {
                source.release(chunks);
                Err(unmapped(&error))
            }
        }
    }

    /// Holds a shared range, and maps it: for reading, or for writing too where it was published so.
    ///
    /// # Errors
    ///
    /// There is none of this name for this session, or it holds as much as it may; its device is none of this process's.
    pub fn attach(self: &Arc<Session>, wanted: &Attaching) -> Result<SharedRange, SessionError> {
        if fork::is_child() {
            return Err(SessionError::Forked);
        }
        let reply = self.control.attach(v1::AttachRequest {
            name: wanted.name.clone(),
            version: wanted.version,
            key: wanted.key.clone(),
            ..v1::AttachRequest::default()
        })?;
        let mut held = Held::new(self, reply.range)?;
        let (device, chunks) = held.fetch(&reply.ticket)?;
        let access = if held.info.is_writable { Access::ReadWrite } else { Access::Read };
        let mapping = Mapping::stitch_as(&chunks, access).map_err(|error| unmapped(&error))?;
        Ok(held.mapped(device.id(), mapping))
    }
}

fn unmapped(error: &MemoryError) -> SessionError {
    SessionError::Refused { kind: error.kind(), message: format!("cannot map: {}", chain(error)) }
}

/// A range that the session holds at the daemon. Until its descriptors have come it is the daemon's to let go of it, then this side's, unless it is mapped.
struct Held {
    session: Arc<Session>,
    info: v1::SharedRange,
    hold: Arc<RangeHold>,
    is_ours: bool,
    is_mapped: bool,
}

impl Held {
    fn new(session: &Arc<Session>, info: Option<v1::SharedRange>) -> Result<Held, SessionError> {
        let info = info.ok_or_else(|| malformed("range", "missing"))?;
        let hold = session.line.holdings.hold_range(RangeId(info.range_id), session.line.epoch());
        Ok(Held { session: Arc::clone(session), info, hold, is_ours: false, is_mapped: false })
    }

    /// Imports its chunks on the device of this process that has them.
    fn fetch(&mut self, ticket: &[u8]) -> Result<(Arc<Device>, Vec<Arc<Chunk>>), SessionError> {
        let uuid = convert::device_uuid("range.device_uuid", &self.info.device_uuid)?;
        let here = self.session.driver.devices();
        let local = here.iter().find(|device| device.uuid == uuid).ok_or_else(|| {
            let message = format!("the range lies on device {uuid}, which this process does not see");
            SessionError::Refused { kind: ErrorKind::NotFound, message }
        })?;
        let device = Device::open(self.session.driver(), local.id)?;
        let ticket = convert::token("ticket", ticket)?;
        let fetched = claim::fetch(self.session.line.chunk_socket(), ticket, self.session.patience)?;
        self.is_ours = true;
        let chunks = source::import(&device, fetched)?;
        Ok((device, chunks))
    }

    fn mapped(&mut self, device: DeviceId, mapping: Mapping) -> SharedRange {
        (self.is_ours, self.is_mapped) = (false, true);
        SharedRange {
            mapping: Some(mapping),
            session: Arc::clone(&self.session),
            device,
            hold: Arc::clone(&self.hold),
            version: self.info.version,
            content: Bytes::new(self.info.content_bytes),
            is_writable: self.info.is_writable,
            is_sealed: self.info.is_sealed,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The daemon that has said so lets go of it where nobody fetches it; the next one knows of a hold only what it is told.
        let is_told_since = self.hold.epoch != self.session.line.epoch();
        if self.is_ours || !self.is_mapped && is_told_since {
            self.session.detach(&self.hold);
        }
    }
}

impl Session {
    /// Holds a range no more. A daemon that is away hears it when the session is there again, by not being told of it.
    fn detach(&self, hold: &Arc<RangeHold>) {
        if fork::is_child() || !hold.is_known.swap(false, Ordering::Relaxed) || !self.line.is_attached() {
            return;
        }
        let range = hold.range;
        if let Err(error) = self.control.detach(hold) {
            tracing::debug!(%range, error = %chain(&error), "a shared range could not be let go of; it is when this process ends");
        }
    }
}

impl Draft {
    fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("it is there until it is published or dropped")
    }

    /// Its addresses.
    pub fn span(&self) -> AddressSpan {
        self.mapping().span()
    }

    /// This process's ordinal of its device.
    pub fn device(&self) -> DeviceId {
        self.source.device().id()
    }

    /// Publishes it: from here on it is read where it lies, or, where it is published as writable, written by whoever attaches it. Nothing that this process has queued may still write it: its device is waited for.
    pub fn publish(mut self, how: &Publishing) -> Result<SharedRange, Unpublished> {
        let session = Arc::clone(self.source.session());
        let mut mapping = self.mapping.take().expect("it is there until it is published or dropped");
        // Not mapped while it is sealed: nobody could promise that it is not written.
        let chunks = match mapping.take_all() {
            Ok(chunks) => chunks,
            Err(error) => {
                self.mapping = Some(mapping);
                return Err(Unpublished { draft: Some(Box::new(self)), error: unmapped(&error) });
            }
        };
        let names = self.source.names_of(&chunks).unwrap_or_default();
        let reply = session.control.publish(v1::PublishRequest {
            name: how.name.clone(),
            chunk_ids: names.iter().map(|name| name.0).collect(),
            content_bytes: how.content.get(),
            linger_ms: u64::try_from(how.linger.as_millis()).unwrap_or(u64::MAX),
            is_writable: how.is_writable,
            key: how.key.clone(),
            ..v1::PublishRequest::default()
        });
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => {
                // What the daemon has said no to is as before. Where it is not known what it has done, or it cannot be mapped as before, nobody wants it any more.
                let is_said = matches!(&error, SessionError::Refused { kind, .. } if !matches!(kind, ErrorKind::Unavailable | ErrorKind::Broken));
                if is_said && mapping.put(mapping.span().start(), &chunks).is_ok() {
                    self.mapping = Some(mapping);
                    return Err(Unpublished { draft: Some(Box::new(self)), error });
                }
                drop(mapping);
                self.source.release(chunks);
                return Err(Unpublished { draft: None, error });
            }
        };
        // They are the range's now: its own come anew, as they come to everybody.
        self.source.forget(&chunks);
        drop(chunks);
        let lost = |error| Unpublished { draft: None, error };
        let mut held = Held::new(&session, reply.range).map_err(lost)?;
        let (device, chunks) = held.fetch(&reply.ticket).map_err(lost)?;
        let access = if how.is_writable { Access::ReadWrite } else { Access::Read };
        mapping.put_as(mapping.span().start(), &chunks, access).map_err(|error| lost(unmapped(&error)))?;
        Ok(held.mapped(device.id(), mapping))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        let chunks: Vec<_> = mapping.chunks().map(|(_, chunk)| Arc::clone(chunk)).collect();
        drop(mapping);
        self.source.release(chunks);
    }
}

impl SharedRange {
    /// Its addresses: the first [`SharedRange::content`] bytes of them mean something.
    pub fn span(&self) -> AddressSpan {
        self.mapping.as_ref().expect("it is there until it is dropped").span()
    }

    /// This process's ordinal of its device.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Bytes that mean something.
    pub fn content(&self) -> Bytes {
        self.content
    }

    /// A later one of the same name has a larger number.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whoever attaches it may write it.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// The driver lets nobody write it. Where it is neither this nor writable nobody is to write it, and each process keeps to that by itself.
    pub fn is_sealed(&self) -> bool {
        self.is_sealed
    }
}

impl Drop for SharedRange {
    fn drop(&mut self) {
        if fork::is_child() {
            // The mapping is the parent's.
            std::mem::forget(self.mapping.take());
            return;
        }
        drop(self.mapping.take());
        self.session.detach(&self.hold);
    }
}
