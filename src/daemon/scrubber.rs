//! The daemon's side of scrubbing: a helper process for a device, started when it is first needed and again when it has died, that sets new chunks to zero.
//!
//! A process of its own, because clearing takes a context, which costs device memory that the daemon does not spend and brings the driver's threads into a
//! process that starts others; and because a process that hangs in its driver can be killed.
//!
//! Not for: doing it. That is `stitchd scrub`, which [`serve`] is all of.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::this_file_again;
use crate::clock::{Clock as _, SystemClock};
use crate::driver::{Driver, DriverError};
use crate::error::chain;
use crate::ids::{ChunkId, DeviceUuid, StreamId};
use crate::limits;
use crate::memory::{Chunk, Device, Mapping, MemoryError};
use crate::store::{Scrub, ScrubError};
use crate::units::Bytes;
use crate::wire::fd_channel::{ChannelError, FdChannel};
use crate::wire::v1::{ScrubReply, ScrubRequest};

/// How long a helper may take at most to start, which is making a context, or to clear one batch: a hundred times what either should.
const PATIENCE_MAX: Duration = Duration::from_secs(60);
/// And at least, however short a driver's calls may be: a process has to start.
const PATIENCE_MIN: Duration = Duration::from_secs(5);
/// Driver calls that a helper makes before it says something, those that take long.
const CALLS: u32 = 4;
/// After a helper could not be started, or has said nothing in time, so long none is: whoever waits for memory meanwhile is refused at once, and does not wait for one failure after the other.
const PAUSE: Duration = Duration::from_secs(5);
/// How long a helper that was killed may take to end. One that takes longer hangs in its driver.
const DEATH: Duration = Duration::from_secs(1);

/// A device's helper.
#[derive(Debug)]
pub(super) struct Scrubber {
    driver: &'static str,
    device: DeviceUuid,
    /// How long its helper may be silent while it owes an answer.
    patience: Duration,
    post: Mutex<Post>,
}

/// Where there is one helper at most.
#[derive(Debug, Default)]
struct Post {
    helper: Option<Helper>,
    /// The last one, where it was killed and has not ended: its driver does not let it. There is no other before it has, or they would pile up.
    killed: Option<Child>,
    /// Why the last could not be started or did not answer, and a clock that began then.
    failed: Option<(SystemClock, ScrubError)>,
}

#[derive(Debug)]
struct Helper {
    process: Child,
    channel: FdChannel,
}

/// What went wrong with a helper.
struct Trouble {
    why: ScrubError,
    /// It said nothing in time: it hangs, and so would the next.
    is_silence: bool,
}

impl From<ScrubError> for Trouble {
    fn from(why: ScrubError) -> Trouble {
        Trouble { why, is_silence: false }
    }
}

impl Scrubber {
    /// For a device of this driver, whose calls take no longer than `deadline`. The helper is started at once, so that what its context takes is known before memory is promised.
    pub(super) fn start(driver: &'static str, device: DeviceUuid, deadline: Duration) -> Result<Scrubber, ScrubError> {
        let patience = deadline.saturating_mul(CALLS).clamp(PATIENCE_MIN, PATIENCE_MAX);
        let scrubber = Scrubber { driver, device, patience, post: Mutex::default() };
        scrubber.with_helper(|_| Ok(()))?;
        Ok(scrubber)
    }

    fn lock(&self) -> MutexGuard<'_, Post> {
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the helper, which is started if there is none, and ended if that fails.
    fn with_helper(&self, what: impl FnOnce(&Helper) -> Result<(), Trouble>) -> Result<(), ScrubError> {
        let mut post = self.lock();
        if post.helper.is_none() {
            post.start(self.driver, self.device, self.patience)?;
        }
        let outcome = post.helper.as_ref().map_or(Ok(()), what);
        if let Err(trouble) = &outcome {
            post.end();
            // Those who have waited for their turn meanwhile would each wait as long, for one helper after the other.
            if trouble.is_silence {
                post.failed = Some((SystemClock::new(), trouble.why.clone()));
            }
        }
        outcome.map_err(|trouble| trouble.why)
    }
}

impl Post {
    fn start(&mut self, driver: &'static str, device: DeviceUuid, patience: Duration) -> Result<(), ScrubError> {
        if let Some((since, why)) = &self.failed
            && since.now() < PAUSE
        {
            return Err(why.clone());
        }
        let started = self.try_start(driver, device, patience);
        self.failed = started.as_ref().err().map(|why| (SystemClock::new(), why.clone()));
        started
    }

    fn try_start(&mut self, driver: &'static str, device: DeviceUuid, patience: Duration) -> Result<(), ScrubError> {
        if let Some(killed) = &mut self.killed {
            if let Ok(None) = killed.try_wait() {
                let text = format!("the process that clears memory (pid {}) was killed and does not end", killed.id());
                return Err(ScrubError(text));
            }
            self.killed = None;
        }
        let helper = self.helper.insert(Helper::start(driver, device, patience)?);
        let heard = helper.hear();
        match &heard {
            Ok(()) => tracing::info!(%device, pid = helper.process.id(), "a process clears new chunks"),
            Err(_) => self.end(),
        }
        heard.map_err(|trouble| trouble.why)
    }

    /// Ends the helper, if there is one, and waits a moment for it to be gone.
    fn end(&mut self) {
        const LOOK: Duration = Duration::from_millis(5);
        let Some(Helper { mut process, channel }) = self.helper.take() else { return };
        drop(channel);
        // It may have ended already.
        let _ = process.kill();
        let since_then = SystemClock::new();
        while let Ok(None) = process.try_wait() {
            if since_then.now() >= DEATH {
                self.killed = Some(process);
                return;
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        self.end();
    }
}

impl Scrub for Scrubber {
    fn scrub(&self, chunks: &[(Arc<OwnedFd>, Bytes)]) -> Result<(), ScrubError> {
        self.with_helper(|helper| {
            chunks.chunks(limits::FDS_PER_MESSAGE_MAX).try_for_each(|batch| {
                let fds: Vec<BorrowedFd<'_>> = batch.iter().map(|(fd, _)| fd.as_fd()).collect();
                let len_bytes = batch.iter().map(|(_, len)| len.get()).collect();
                helper.channel.send(&ScrubRequest { len_bytes }, &fds).map_err(|error| unheard(&error))?;
                helper.hear()
            })
        })
    }
}

fn lost(error: &ChannelError) -> ScrubError {
    ScrubError(format!("the process that clears memory does not answer: {}", chain(error)))
}

/// The same, of a helper that may be there.
fn unheard(error: &ChannelError) -> Trouble {
    Trouble { why: lost(error), is_silence: *error == ChannelError::TimedOut }
}

impl Helper {
    /// One that has not said yet whether it can.
    fn start(driver: &'static str, device: DeviceUuid, patience: Duration) -> Result<Helper, ScrubError> {
        let (ours, theirs) = FdChannel::pair().map_err(|error| lost(&error))?;
        ours.set_patience(patience).map_err(|error| lost(&error))?;
        let process = this_file_again()
            .args(["scrub", "--driver", driver, "--device", &device.to_string()])
            .stdin(Stdio::from(theirs.into_socket()))
            .stdout(Stdio::null())
            // Ctrl-C in a terminal is for the daemon, which still needs this one.
            .process_group(0)
            .spawn();
        let process =
            process.map_err(|error| ScrubError(format!("cannot start a process that clears memory: {error}")))?;
        Ok(Helper { process, channel: ours })
    }

    fn hear(&self) -> Result<(), Trouble> {
        let (reply, _) = self.channel.receive::<ScrubReply>().map_err(|error| unheard(&error))?;
        if reply.is_done { Ok(()) } else { Err(ScrubError(reply.error).into()) }
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
        drop((mapping, chunks));
        cleared.map_err(|error| ScrubError(chain(&error)))?;
        // What this process cannot let go of would not come back from whoever gets it; it does when another process takes this one's place.
        let kept = self.device.quarantine();
        if kept.count == 0 { Ok(()) } else { Err(ScrubError(format!("{} stay mapped in this process", kept.bytes))) }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::driver::Call;
    use crate::driver::host::{HostDriver, HostOptions};
    use crate::driver::layers::faulty::Faults;

    fn scrubber(patience: Duration) -> Scrubber {
        Scrubber { driver: "none", device: DeviceUuid([7; 16]), patience, post: Mutex::default() }
    }

    #[test]
    fn a_helper_that_says_nothing_is_waited_for_once_and_whoever_waited_for_it_is_refused_at_once() {
        let scrubber = scrubber(Duration::from_millis(50));
        // It starts, says that it can, and hangs with the first batch.
        let (channel, _silent) = FdChannel::pair().unwrap();
        channel.set_patience(scrubber.patience).unwrap();
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        scrubber.lock().helper = Some(Helper { process, channel });
        let (_pipe, fd) = rustix::pipe::pipe().unwrap();
        let chunks = [(Arc::new(fd), Bytes::mib(2))];
        let why = scrubber.scrub(&chunks).unwrap_err();
        assert!(why.0.contains("no answer in time"), "{why}");
        assert!(scrubber.lock().helper.is_none() && scrubber.lock().killed.is_none(), "it was ended");
        assert_eq!(scrubber.with_helper(|_| panic!("none is started")), Err(why));
    }

    #[test]
    fn a_helper_that_does_not_start_leaves_no_process_and_is_not_started_again_at_once() {
        // What is started is this test's own file, which knows no such arguments and ends.
        let scrubber = scrubber(PATIENCE_MAX);
        let why = scrubber.with_helper(|_| panic!("there is none")).unwrap_err();
        assert!(why.0.contains("does not answer"), "{why}");
        assert!(scrubber.lock().helper.is_none() && scrubber.lock().killed.is_none(), "it was waited for");
        let noted = ScrubError("as noted".into());
        scrubber.lock().failed = Some((SystemClock::new(), noted.clone()));
        assert_eq!(scrubber.with_helper(|_| panic!("there is none")), Err(noted));
    }

    #[test]
    fn a_helper_that_cannot_let_go_of_a_chunk_says_so() {
        let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::mib(8)])));
        let faulty = Faults::around(Arc::clone(&host) as Arc<dyn Driver>);
        let broom = Broom::open(Arc::clone(&faulty) as Arc<dyn Driver>, host.devices()[0].uuid).unwrap();
        let handle = host.create(broom.device.id(), Bytes::mib(2)).unwrap();
        let sweep = || {
            let request = ScrubRequest { len_bytes: vec![Bytes::mib(2).get()] };
            broom.sweep(&request, vec![host.export(handle).unwrap()])
        };
        assert_eq!(sweep(), Ok(()));
        faulty.layer().fail_always(&[Call::Unmap]);
        assert!(sweep().unwrap_err().0.contains("stay mapped"));
    }

    #[test]
    fn there_is_no_other_helper_before_the_one_that_was_killed_has_ended() {
        let scrubber = scrubber(PATIENCE_MAX);
        scrubber.lock().killed = Some(Command::new("sleep").arg("600").spawn().unwrap());
        let why = scrubber.with_helper(|_| Ok(())).unwrap_err();
        assert!(why.0.contains("does not end"), "{why}");
        let mut post = scrubber.lock();
        let killed = post.killed.as_mut().unwrap();
        killed.kill().unwrap();
        killed.wait().unwrap();
        post.failed = None;
        drop(post);
        let why = scrubber.with_helper(|_| Ok(())).unwrap_err();
        assert!(why.0.contains("does not answer"), "another was started: {why}");
    }
}
