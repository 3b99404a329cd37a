//! What PyTorch's own allocator would have reserved for a command's processes: their recordings, replayed through the model of it.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use super::reports::{Report, Reports};
use crate::cli::trace::read;
use crate::clock::SystemClock;
use crate::limits;
use crate::replay::models::caching::{Conf, Version};
use crate::replay::script::Script;
use crate::replay::{Job, PoolName, Setup, Watch, replay};
use crate::session::locate::recording_path;
use crate::units::Bytes;

/// The name of a recording that is made for the comparison alone, and the most bytes that it takes of the disk, for each process and device.
pub(super) const RECORDING: &str = "{pid}.{device}.stitchtrace";
pub(super) const COMPARED_LEN_MAX: u64 = 64 << 20;

/// What it would have reserved on one device of one process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Compared {
    pub(super) pid: u32,
    pub(super) device: u32,
    pub(super) reserved: Bytes,
    /// The recording ends before the job does.
    pub(super) is_cut: bool,
}

impl Compared {
    /// For a table.
    pub(super) fn shown(&self) -> String {
        format!("{}{}", self.reserved, if self.is_cut { " *" } else { "" })
    }
}

/// The recordings of all processes that have reported: each with what is known of it.
#[derive(Debug)]
pub(super) struct Work {
    name: OsString,
    len_max: u64,
    of: Vec<(u32, u32, Option<Version>)>,
}

impl Work {
    pub(super) fn of(reports: &Reports, directory: &Path, record: Option<&Path>) -> Work {
        let name = record.map_or_else(|| directory.join(RECORDING), Path::to_path_buf).into_os_string();
        let len_max = if record.is_some() { limits::RECORD_FILE_LEN_MAX } else { COMPARED_LEN_MAX };
        let each = |report: &Report| {
            let version = report.torch.as_deref().and_then(|text| text.parse().ok());
            report.devices.iter().map(|of| (report.pid, of.device, version)).collect::<Vec<_>>()
        };
        Work { name, len_max, of: reports.iter().flat_map(each).collect() }
    }

    /// Replays them. One that is not there, or cannot be read, is left out.
    pub(super) fn done(&self) -> Vec<Compared> {
        let one = |(pid, device, version): &(u32, u32, Option<Version>)| {
            compared(&self.name, self.len_max, *version, *pid, *device)
        };
        self.of.iter().filter_map(one).collect()
    }
}

fn compared(name: &OsStr, len_max: u64, version: Option<Version>, pid: u32, device: u32) -> Option<Compared> {
    let path = recording_path(name, pid, device);
    let is_cut = path.metadata().is_ok_and(|about| about.len() >= len_max);
    // What was refused here PyTorch's allocator might have refused, too: it would have reserved for what was served.
    let trace = read(&path).ok()?.trace.without_refused();
    let script = Script::of(&trace, device);
    if script.requests == 0 {
        return None;
    }
    let job = Job { trace: &trace, profile: &trace, script: &script, plan: None, left: None };
    let setup = Setup { conf: Conf::of(version.unwrap_or(Version::NEWEST)), ..Setup::default() };
    let done = replay(PoolName::Caching, job, &setup, Watch::default(), &SystemClock::new(), &|_| ()).ok()?;
    Some(Compared { pid, device, reserved: done.run.peak_reserved, is_cut })
}
