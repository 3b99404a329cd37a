//! The machine: its devices, and the chunks that exist in whatever process.

#![expect(unsafe_code, reason = "asks the kernel who else has a file open")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::{Called, code};

/// The size of which every chunk is a multiple.
pub(crate) const GRANULARITY: u64 = 2 << 20;

/// Known misbehaviours of real libraries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quirk {
    /// Unmapping several mappings with one call makes freeing their addresses fail (ROCR issue 285).
    UnmapRunBreaksFree,
    /// Setting the access of several mappings with one call fails (ROCm issues 2516, 2667).
    AccessRunFails,
    /// The alignment of a reservation is ignored (HIP of 2024).
    IgnoresAlignment,
    /// A map that fails says that it is done, and unmapping what is not mapped ends the process (HIP of 2024).
    MapLies,
    /// Every handle holds a descriptor, and where none is left memory is said to have run out (ROCm 7.14, rocm-systems issue 10604).
    FdPerHandle,
}

impl Quirk {
    const ALL: [(&'static str, Quirk); 5] = [
        ("unmap_run_breaks_free", Quirk::UnmapRunBreaksFree),
        ("access_run_fails", Quirk::AccessRunFails),
        ("ignores_alignment", Quirk::IgnoresAlignment),
        ("map_lies", Quirk::MapLies),
        ("fd_per_handle", Quirk::FdPerHandle),
    ];
}

/// A machine, as its directory says.
#[derive(Debug)]
pub struct Machine {
    directory: PathBuf,
    pub(crate) devices: Vec<u64>,
    version: i32,
    pub(crate) latency_us: u64,
    pub(crate) fail: u64,
    pub(crate) context_bytes: u64,
    quirks: Vec<Quirk>,
}

impl Machine {
    /// The machine of `directory`; `version` is what its library says where the directory says nothing.
    pub fn of(directory: &Path, version: i32) -> Machine {
        let text = std::fs::read_to_string(directory.join("machine.conf")).unwrap_or_default();
        let value = |key: &str| {
            let lines = text.lines().filter_map(|line| line.split_once('='));
            lines
                .map(|(name, value)| (name.trim(), value.trim()))
                .find(|(name, _)| *name == key)
                .map(|(_, value)| value)
        };
        let number = |key: &str| value(key).map(|value| value.parse().expect("machine.conf: a number"));
        let list = |key: &str| value(key).unwrap_or_default().split(',').map(str::trim).filter(|word| !word.is_empty());
        let quirk = |word: &str| Quirk::ALL.iter().find(|(name, _)| *name == word).expect("machine.conf: a quirk").1;
        let devices: Vec<u64> = list("devices").map(|bytes| bytes.parse().expect("machine.conf: bytes")).collect();
        Machine {
            directory: directory.to_owned(),
            devices: if devices.is_empty() { vec![1 << 30] } else { devices },
            version: number("version").map_or(version, |version| version as i32),
            latency_us: number("latency_us").unwrap_or(0),
            fail: number("fail").unwrap_or(0),
            context_bytes: number("context_bytes").unwrap_or(0),
            quirks: list("quirks").map(quirk).collect(),
        }
    }

    /// What the library says its version is.
    pub fn version(&self) -> i32 {
        self.version
    }

    pub(crate) fn has(&self, quirk: Quirk) -> bool {
        self.quirks.contains(&quirk)
    }

    /// One process at a time counts or creates.
    fn lock(&self) -> Called<File> {
        let lock = File::options().create(true).append(true).open(self.directory.join("lock"));
        let lock = lock.map_err(|_| code::OPERATING_SYSTEM)?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|_| code::OPERATING_SYSTEM)?;
        Ok(lock)
    }

    /// Bytes of a device that nobody holds.
    pub(crate) fn free(&self, device: usize) -> Called<u64> {
        let _lock = self.lock()?;
        self.free_locked(device)
    }

    fn free_locked(&self, device: usize) -> Called<u64> {
        let prefix = format!("chunk-{device}-");
        let mut used = 0;
        for entry in std::fs::read_dir(&self.directory).map_err(|_| code::OPERATING_SYSTEM)?.flatten() {
            if !entry.file_name().to_string_lossy().starts_with(&prefix) {
                continue;
            }
            // Another look may have removed it.
            let Ok(file) = File::options().read(true).write(true).open(entry.path()) else { continue };
            if is_held_elsewhere(file.as_fd()) {
                used += file.metadata().map_or(0, |metadata| metadata.len());
            } else {
                let _ = std::fs::remove_file(entry.path());
            }
        }
        Ok(self.devices[device].saturating_sub(used))
    }

    /// A new chunk, as the open file that keeps its bytes.
    pub(crate) fn create(&self, device: usize, len: u64) -> Called<OwnedFd> {
        let _lock = self.lock()?;
        if len > self.free_locked(device)? {
            return Err(code::OUT_OF_MEMORY);
        }
        let taken = |number: &u64| !self.chunk_path(device, *number).exists();
        let number = (0..).find(taken).expect("there is always a next number");
        let file = File::options().create_new(true).read(true).write(true).open(self.chunk_path(device, number));
        let file = file.map_err(|error| match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) if self.has(Quirk::FdPerHandle) => code::OUT_OF_MEMORY,
            _ => code::OPERATING_SYSTEM,
        })?;
        file.set_len(len).map_err(|_| code::OPERATING_SYSTEM)?;
        Ok(file.into())
    }

    fn chunk_path(&self, device: usize, number: u64) -> PathBuf {
        self.directory.join(format!("chunk-{device}-{number}"))
    }

    /// The device of the chunk behind a descriptor, if it is one of this machine's.
    pub(crate) fn device_of(&self, fd: BorrowedFd<'_>) -> Called<usize> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let path = std::fs::read_link(link).map_err(|_| code::OPERATING_SYSTEM)?;
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let device = name.strip_prefix("chunk-").and_then(|rest| rest.split('-').next()?.parse().ok());
        let is_here = path.parent().is_some_and(|parent| parent == self.directory);
        device.filter(|device| is_here && *device < self.devices.len()).ok_or(code::INVALID_VALUE)
    }
}

/// True when another open file description of the file exists, in whatever process or on its way to one (fcntl(2), F_SETLEASE).
fn is_held_elsewhere(file: BorrowedFd<'_>) -> bool {
    let lease = |kind: libc::c_int| {
        // SAFETY: fcntl with F_SETLEASE takes an int and touches no memory of ours; the file is open while borrowed.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) }
    };
    if lease(libc::F_WRLCK) == 0 {
        lease(libc::F_UNLCK);
        return false;
    }
    let error = std::io::Error::last_os_error();
    assert_eq!(
        error.raw_os_error(),
        Some(libc::EAGAIN),
        "the file system of the machine's directory has no leases: {error}"
    );
    true
}
