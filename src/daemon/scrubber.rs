//! The daemon's side of scrubbing: a helper process for a device, started when it is first needed and again when it has died, that sets new chunks to zero.
//!
//! A process of its own, because clearing takes a context, which costs device memory that the daemon does not spend and brings the driver's threads into a
//! process that starts others; and because a process that hangs in its driver can be killed.
//!
//! Not for: doing it. That is `stitchd scrub`, which [`serve`] is all of.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::driver::{Driver, DriverError};
use crate::error::chain;
use crate::ids::{ChunkId, DeviceUuid, StreamId};
use crate::limits;
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::store::{Scrub, ScrubError};
use crate::units::Bytes;
use crate::wire::fd_channel::{ChannelError, FdChannel};
use crate::wire::v1::{ScrubReply, ScrubRequest};

/// How long a helper may take to start, which is making a context, or to clear one batch: a hundred times what either should.
const PATIENCE: Duration = Duration::from_secs(60);

/// A device's helper.
#[derive(Debug)]
pub(super) struct Scrubber {
    driver: &'static str,
    device: DeviceUuid,
    helper: Mutex<Option<Helper>>,
}

#[derive(Debug)]
struct Helper {
    process: Child,
    channel: FdChannel,
}

impl Scrubber {
    /// For a device of this driver. The helper is started at once, so that what its context takes is known before memory is promised.
    pub(super) fn start(driver: &'static str, device: DeviceUuid) -> Result<Scrubber, ScrubError> {
        let scrubber = Scrubber { driver, device, helper: Mutex::default() };
        scrubber.with_helper(|_| Ok(()))?;
        Ok(scrubber)
    }

    /// Does something with the helper, which is started if there is none, and ended if that fails.
    fn with_helper(&self, what: impl FnOnce(&Helper) -> Result<(), ScrubError>) -> Result<(), ScrubError> {
        let mut helper = self.helper.lock().unwrap_or_else(PoisonError::into_inner);
        if helper.is_none() {
            *helper = Some(Helper::start(self.driver, self.device)?);
        }
        let outcome = helper.as_ref().map_or(Ok(()), what);
        if outcome.is_err() {
            *helper = None;
        }
        outcome
    }
}

impl Scrub for Scrubber {
    fn scrub(&self, chunks: &[(Arc<OwnedFd>, Bytes)]) -> Result<(), ScrubError> {
        self.with_helper(|helper| {
            chunks.chunks(limits::FDS_PER_MESSAGE_MAX).try_for_each(|batch| {
                let fds: Vec<BorrowedFd<'_>> = batch.iter().map(|(fd, _)| fd.as_fd()).collect();
                let len_bytes = batch.iter().map(|(_, len)| len.get()).collect();
                helper.channel.send(&ScrubRequest { len_bytes }, &fds).map_err(|error| lost(&error))?;
                helper.hear()
            })
        })
    }
}

fn lost(error: &ChannelError) -> ScrubError {
    ScrubError(format!("the process that clears memory does not answer: {}", chain(error)))
}

impl Helper {
    fn start(driver: &'static str, device: DeviceUuid) -> Result<Helper, ScrubError> {
        let (ours, theirs) = FdChannel::pair().map_err(|error| lost(&error))?;
        ours.set_patience(PATIENCE).map_err(|error| lost(&error))?;
        // This very file, also where an update has put another in its place.
        let process = Command::new("/proc/self/exe")
            .arg0("stitchd")
            .args(["scrub", "--driver", driver, "--device", &device.to_string()])
            .stdin(Stdio::from(theirs.into_socket()))
            .stdout(Stdio::null())
            // Ctrl-C in a terminal is for the daemon, which still needs this one.
            .process_group(0)
            .spawn();
        let process =
            process.map_err(|error| ScrubError(format!("cannot start a process that clears memory: {error}")))?;
        let helper = Helper { process, channel: ours };
        helper.hear()?;
        tracing::info!(%device, pid = helper.process.id(), "a process clears new chunks");
        Ok(helper)
    }

    fn hear(&self) -> Result<(), ScrubError> {
        let (reply, _) = self.channel.receive::<ScrubReply>().map_err(|error| lost(&error))?;
        if reply.is_done { Ok(()) } else { Err(ScrubError(reply.error)) }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // It may have ended already; if it hangs in its driver it ends when the driver lets it.
        let _ = self.process.kill();
        let _ = self.process.try_wait();
    }
}

/// Clears what comes over `socket`, until the daemon is gone.
pub fn serve(socket: OwnedFd, driver: Arc<dyn Driver>, device: DeviceUuid) -> Result<(), ScrubError> {
    let channel = FdChannel::over(socket, true);
    let reply = |outcome: &Result<(), ScrubError>| {
        let error = outcome.as_ref().map_or_else(|error| error.0.clone(), |()| String::new());
        channel.send(&ScrubReply { is_done: outcome.is_ok(), error }, &[])
    };
    let opened = Broom::open(driver, device);
    reply(&opened.as_ref().map(drop).map_err(Clone::clone)).map_err(|error| lost(&error))?;
    let broom = opened?;
    loop {
        match channel.receive::<ScrubRequest>() {
            Ok((request, fds)) => reply(&broom.sweep(&request, fds)).map_err(|error| lost(&error))?,
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(lost(&error)),
        }
    }
}

/// What clears: a device with a stream.
struct Broom {
    device: Arc<Device>,
    stream: StreamId,
}

impl Broom {
    fn open(driver: Arc<dyn Driver>, wanted: DeviceUuid) -> Result<Broom, ScrubError> {
        let failed = |error: DriverError| ScrubError(chain(&error));
        let found = driver.devices().into_iter().find(|device| device.uuid == wanted);
        let id = found.ok_or_else(|| ScrubError(format!("there is no device {wanted} in this process")))?.id;
        // Makes the context, too.
        let stream = driver.create_stream(id).map_err(failed)?;
        Ok(Broom { device: Device::open(driver, id).map_err(failed)?, stream })
    }

    /// Sets every byte of the chunks to zero.
    fn sweep(&self, request: &ScrubRequest, fds: Vec<OwnedFd>) -> Result<(), ScrubError> {
        if fds.len() != request.len_bytes.len() || fds.is_empty() {
            return Err(ScrubError(format!("{} descriptors for {} chunks", fds.len(), request.len_bytes.len())));
        }
        let failed = |error: MemoryError| ScrubError(chain(&error));
        let import = |(fd, len): (OwnedFd, &u64)| {
            Chunk::import(&self.device, ChunkId(0), fd, Bytes::new(*len)).map(Arc::new).map_err(failed)
        };
        let chunks = fds.into_iter().zip(&request.len_bytes).map(import).collect::<Result<Vec<_>, _>>()?;
        let mapping = Mapping::stitch(&chunks).map_err(failed)?;
        let (driver, id) = (self.device.driver(), self.device.id());
        let cleared = driver.fill(id, self.stream, mapping.span(), 0).and_then(|()| driver.synchronize(id));
        cleared.map_err(|error| ScrubError(chain(&error)))
    }
}
