//! The ladder of a daemon that is told to measure: what calls cost on its devices, found out when it starts.
//!
//! By a process of its own, `stitchd selftest`, because mapping takes a context, which costs device memory that the daemon does not spend, and because a
//! process that hangs in its driver can be killed. It has ended before the daemon promises any memory.
//!
//! Not for: the measuring ([`crate::driver::costs`]), nor for what follows from it ([`Ladder::following`]).

use std::os::unix::process::CommandExt as _;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use super::{NodeDevice, this_file_again};
use crate::clock::{Clock as _, SystemClock};
use crate::driver::{Driver, DriverError};
use crate::ladder::{ChunkCost, Ladder};
use crate::units::Bytes;

/// How long measuring a device may take: thirty times what it should, most of which is making a context.
const PATIENCE: Duration = Duration::from_secs(30);

/// One ladder for all devices: a step is there where it is worth it on the slowest, and none is too large for the smallest. Where it cannot be found out the
/// standard one serves as well as on any other day, and the log says so.
pub(super) fn ladder(driver: &dyn Driver, devices: &[NodeDevice]) -> Result<Ladder, DriverError> {
    let mut costs: Vec<ChunkCost> = Vec::new();
    for (at, device) in devices.iter().enumerate() {
        let clock = SystemClock::new();
        let found = match measure(driver.name(), device) {
            Ok(found) => found,
            Err(reason) => {
                tracing::warn!(
                    device = device.id.0,
                    reason,
                    "what calls cost cannot be measured; chunks are of the standard sizes"
                );
                return Ok(Ladder::standard());
            }
        };
        let figures: Vec<String> =
            found.iter().map(|cost| format!("{}: {:.1} us", cost.len, cost.nanos as f64 / 1e3)).collect();
        let took_ms = clock.now().as_millis() as u64;
        tracing::info!(device = device.id.0, took_ms, cost = %figures.join(", "), "measured what a chunk costs by size");
        costs = if at == 0 { found } else { slower(&costs, &found) };
    }
    let mut granularity = Bytes::ZERO;
    for device in devices {
        granularity = granularity.max(driver.capabilities(device.id)?.granularity);
    }
    let smallest = devices.iter().map(|device| device.total).min().unwrap_or(Bytes::ZERO);
    let ladder = Ladder::following(&costs, granularity, smallest);
    tracing::info!(ladder = %ladder.to_toml(), "chunk sizes follow from what calls cost");
    Ok(ladder)
}

/// The sizes that both have, at what the slower takes.
fn slower(one: &[ChunkCost], other: &[ChunkCost]) -> Vec<ChunkCost> {
    let both = one.iter().filter_map(|cost| {
        let there = other.iter().find(|there| there.len == cost.len)?;
        Some(ChunkCost { len: cost.len, nanos: cost.nanos.max(there.nanos) })
    });
    both.collect()
}

fn measure(driver: &'static str, device: &NodeDevice) -> Result<Vec<ChunkCost>, String> {
    let failed = |error: std::io::Error| format!("cannot start a process that measures: {error}");
    let mut process = this_file_again()
        .args(["selftest", "--only-costs", "--json", "--driver", driver, "--device", &device.id.0.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(failed)?;
    // What it prints fits into the pipe: it never waits for somebody who reads.
    let has_ended = ends_in_time(&process);
    if !has_ended {
        // If it hangs in its driver it ends when the driver lets it; the thread that reaps it waits for that.
        let _ = process.kill();
        let reaper = std::thread::Builder::new().name("stitchd-reaper".into());
        if let Err(error) = reaper.spawn(move || process.wait()) {
            tracing::warn!(%error, "nobody waits for the end of the process that measures; it is there as a zombie until this daemon ends");
        }
        return Err(format!("it takes longer than {PATIENCE:?}"));
    }
    let output = process.wait_with_output().map_err(failed)?;
    let shown: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    let costs = shown.as_ref().and_then(|shown| costs_of(shown, &device.uuid.to_string()));
    costs.filter(|costs| !costs.is_empty()).ok_or_else(|| format!("it ended with {}", output.status))
}

/// Waits for the end of a process, and not for ever.
fn ends_in_time(process: &std::process::Child) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let Ok(pidfd) = pidfd_open(Pid::from_child(process), PidfdFlags::empty()) else { return false };
    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    // A signal that comes meanwhile ends the wait: then it counts as too long, and the standard ladder serves.
    poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&patience)).is_ok_and(|ready| ready > 0)
}

/// What `stitchd selftest --json` says of the device.
fn costs_of(shown: &Value, uuid: &str) -> Option<Vec<ChunkCost>> {
    let devices = shown["devices"].as_array()?;
    let device = devices.iter().find(|device| device["uuid"] == uuid)?;
    let cost = |cost: &Value| {
        let (len, nanos) = (cost["chunk_bytes"].as_u64()?, cost["chunk_nanoseconds"].as_u64()?);
        Some(ChunkCost { len: Bytes::new(len), nanos })
    };
    device["costs"].as_array()?.iter().map(cost).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_what_the_selftest_says_of_this_device() {
        let cost = |mib: u64, nanos: u64| serde_json::json!({ "chunk_bytes": mib << 20, "chunk_nanoseconds": nanos });
        let shown = serde_json::json!({ "devices": [
            { "uuid": "other", "costs": [cost(2, 1)] },
            { "uuid": "this", "costs": [cost(2, 30), cost(4, 31)] },
        ]});
        let found = costs_of(&shown, "this").unwrap();
        assert_eq!(found[1], ChunkCost { len: Bytes::mib(4), nanos: 31 });
        assert_eq!((found.len(), costs_of(&shown, "nobody")), (2, None));
        let slow = [ChunkCost { len: Bytes::mib(4), nanos: 40 }, ChunkCost { len: Bytes::mib(8), nanos: 1 }];
        assert_eq!(slower(&found, &slow), [ChunkCost { len: Bytes::mib(4), nanos: 40 }]);
    }
}
