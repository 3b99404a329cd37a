//! The other process of an experiment, as the one that experiments sees it: started, heard, told, killed, and seen to be gone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;

use super::probe::Role;
use crate::clock::{Clock as _, SystemClock};
use crate::daemon::this_file_again;
use crate::driver::DriverName;
use crate::error::chain;
use crate::ids::DeviceId;
use crate::units::Bytes;
use crate::wire::fd_channel::FdChannel;

/// How long a helper may take for a step: most of it is making a context.
const PATIENCE: Duration = Duration::from_secs(30);

/// A process that somebody waits for, and that nobody else can be mistaken for.
#[derive(Debug)]
pub(super) struct Watched(OwnedFd);

impl Watched {
    pub(super) fn of(pid: i32) -> Result<Watched, String> {
        let pid = Pid::from_raw(pid).ok_or("no process has that number")?;
        pidfd_open(pid, PidfdFlags::empty()).map(Watched).map_err(|error| format!("watching a process: {error}"))
    }

    pub(super) fn kill(&self) {
        // It may have ended.
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }

    fn has_ended(&self) -> Result<bool, String> {
        is_ready(&self.0, PollFlags::IN)
    }

    /// Waits for its end; how long that took.
    pub(super) fn wait(&self) -> Result<Duration, String> {
        let clock = SystemClock::new();
        loop {
            let left = PATIENCE.checked_sub(clock.now()).ok_or("a process that was killed does not end")?;
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&left)) {
                Ok(ready) if ready > 0 => return Ok(clock.now()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(format!("waiting for a process: {error}")),
            }
        }
    }
}

fn is_ready(fd: impl AsFd, what: PollFlags) -> Result<bool, String> {
    let mut fds = [PollFd::new(&fd, what)];
    let ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    ready.map(|ready| ready > 0).map_err(|error| format!("looking at a process: {error}"))
}

/// A helper. It ends with this.
#[derive(Debug)]
pub(super) struct Helper {
    process: Child,
    pidfd: Watched,
    channel: FdChannel,
}

impl Helper {
    /// Starts one that plays `role` with `len` bytes.
    pub(super) fn start(driver: DriverName, device: DeviceId, role: Role, len: Bytes) -> Result<Helper, String> {
        let (ours, theirs) = FdChannel::pair().map_err(|error| chain(&error))?;
        ours.set_patience(PATIENCE).map_err(|error| chain(&error))?;
        let process = this_file_again()
            .args(["probe", role.name(), "--driver", driver.as_str(), "--device", &device.0.to_string()])
            .args(["--len", &len.get().to_string()])
            .stdin(Stdio::from(theirs.into_socket()))
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| format!("starting another process: {error}"))?;
        let pidfd = Watched::of(process.id() as i32)?;
        Ok(Helper { process, pidfd, channel: ours })
    }

    /// What it says next.
    pub(super) fn hear(&self) -> Result<(Value, Vec<OwnedFd>), String> {
        let (text, fds) =
            self.channel.receive::<String>().map_err(|error| format!("the other process: {}", chain(&error)))?;
        let said: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        match said["error"].as_str() {
            Some(error) => Err(format!("in the other process: {error}")),
            None => Ok((said, fds)),
        }
    }

    /// Gives it descriptors, which says to go on.
    pub(super) fn tell(&self, fds: &[BorrowedFd<'_>]) -> Result<(), String> {
        self.channel.send(&"go on".to_owned(), fds).map_err(|error| chain(&error))
    }

    /// Kills it, and waits until it is gone with all that its process had open; how long it took until its socket ended, if it did before that, and until it was gone.
    pub(super) fn kill_and_watch(&mut self) -> Result<(Option<Duration>, Duration), String> {
        const STEP: Duration = Duration::from_micros(20);
        let clock = SystemClock::new();
        self.pidfd.kill();
        let mut socket_ended = None;
        loop {
            let now = clock.now();
            // In this order: a process that is gone has no socket. A hang-up is told without being asked for.
            let is_gone = self.pidfd.has_ended()?;
            if socket_ended.is_none() && is_ready(&self.channel, PollFlags::empty())? {
                socket_ended = Some(now);
            }
            if is_gone {
                let _ = self.process.wait();
                return Ok((socket_ended, now));
            }
            if now > PATIENCE {
                return Err("a process that was killed does not end".to_owned());
            }
            std::thread::sleep(STEP);
        }
    }

    /// Kills it, and waits until it is gone with all that its process had open; how long that took.
    pub(super) fn kill(&mut self) -> Result<Duration, String> {
        self.pidfd.kill();
        let took = self.pidfd.wait();
        let _ = self.process.wait();
        took
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.pidfd.kill();
        let _ = self.process.wait();
    }
}

/// The helper's own end.
pub(super) fn say(channel: &FdChannel<impl AsFd>, what: &Value, fds: &[BorrowedFd<'_>]) -> Result<(), String> {
    channel.send(&what.to_string(), fds).map_err(|error| chain(&error))
}
