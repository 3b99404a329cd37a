//! The machine: its devices, and the chunks and exports that exist in whatever process.

#![expect(unsafe_code, reason = "asks the kernel who else has a file open, and for locks that go with descriptors")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FlockOperation;

use crate::conf::Conf;
use crate::{Called, Quirk, code};

/// How far apart a new chunk has some of what its memory held before.
const STRETCH: u64 = 2 << 20;

/// A machine, as its directory says.
#[derive(Debug)]
pub struct Machine {
    directory: PathBuf,
    pub(crate) conf: Conf,
}

impl Machine {
    /// The machine of `directory`; `version` is what its library says where the directory says nothing.
    pub fn of(directory: &Path, version: i32) -> Machine {
        let text = std::fs::read_to_string(directory.join("machine.conf")).unwrap_or_default();
        Machine { directory: directory.to_owned(), conf: Conf::of(&text, version) }
    }

    /// What the library says its version is.
    pub fn version(&self) -> i32 {
        self.conf.version
    }

    /// The device is a part of a GPU.
    pub fn is_mig(&self) -> bool {
        self.conf.mig
    }

    /// Devices of the machine, whichever a process may see.
    pub fn device_count(&self) -> usize {
        self.conf.devices.len()
    }

    /// Network cards can read chunks that ask for it; there are FABRIC handles; the devices are shared through MPS.
    pub fn features(&self) -> (bool, bool, bool) {
        (self.conf.rdma, self.conf.fabric, self.conf.mps)
    }

    /// The devices' generation, as in 9.0.
    pub fn generation(&self) -> (i32, i32) {
        (if self.conf.volta { 7 } else { 9 }, 0)
    }

    pub(crate) fn has(&self, quirk: Quirk) -> bool {
        self.conf.quirks.contains(&quirk)
    }

    /// The words of a file that says what happens now.
    fn says(&self, file: &str, word: &str) -> bool {
        let text = std::fs::read_to_string(self.directory.join(file)).unwrap_or_default();
        text.split(',').any(|said| said.trim() == word)
    }

    /// The device is gone.
    pub fn is_lost(&self, device: usize) -> bool {
        self.says("lost", &device.to_string())
    }

    /// The device is there and does nothing until it is reset.
    pub fn needs_reset(&self, device: usize) -> bool {
        self.says("reset", &device.to_string())
    }

    /// Writes down that something has happened, for the test to count.
    pub(crate) fn note(&self, file: &str) {
        use std::io::Write as _;
        let noted = File::options().create(true).append(true).open(self.directory.join(file));
        noted.and_then(|mut file| file.write_all(b"1\n")).expect("the machine's directory can be written to");
    }

    /// The management library starts.
    pub fn has_nvml(&self) -> bool {
        self.conf.nvml
    }

    /// Such calls do not return now, for any device or for this one.
    pub(crate) fn hangs(&self, call: &str, device: Option<usize>) -> bool {
        self.says("hang", call) || device.is_some_and(|device| self.says("hang", &format!("{call}@{device}")))
    }

    /// What was to hang goes on.
    pub(crate) fn is_resumed(&self) -> bool {
        self.directory.join("resume").exists()
    }

    /// What a call says where a system call failed that takes a descriptor.
    pub(crate) fn refusal(&self, error: &std::io::Error) -> i32 {
        match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) if self.has(Quirk::FdPerHandle) => code::OUT_OF_MEMORY,
            _ => code::OPERATING_SYSTEM,
        }
    }

    /// One process at a time counts or creates.
    fn lock(&self) -> Called<File> {
        let lock = File::options().create(true).append(true).open(self.directory.join("lock"));
        let lock = lock.map_err(|error| self.refusal(&error))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|_| code::OPERATING_SYSTEM)?;
        Ok(lock)
    }

    /// Calls `look` for every chunk whose name begins so. One is open at a time: they may be as many as a process can open.
    fn each_chunk(&self, prefix: &str, mut look: impl FnMut(&File, &Path)) -> Called<()> {
        let entries = std::fs::read_dir(&self.directory).map_err(|error| self.refusal(&error))?;
        for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
            match File::options().read(true).write(true).open(entry.path()) {
                Ok(file) => look(&file, &entry.path()),
                // Another look has removed it.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(self.refusal(&error)),
            }
        }
        Ok(())
    }

    /// Bytes of a device that nobody holds.
    pub(crate) fn free(&self, device: usize) -> Called<u64> {
        let _lock = self.lock()?;
        self.free_locked(device)
    }

    fn free_locked(&self, device: usize) -> Called<u64> {
        let mut used = 0;
        self.each_chunk(&format!("chunk-{device}-"), |file, path| {
            if is_held_elsewhere(file.as_fd()) {
                used += file.metadata().map_or(0, |metadata| metadata.len());
            } else {
                let _ = std::fs::remove_file(path);
            }
        })?;
        self.note_used(device, used)?;
        Ok(self.conf.devices[device].saturating_sub(used))
    }

    /// Bytes that chunks of a device had at the last look, and those that were created since: what has gone since is still in it.
    fn used_at_most(&self, device: usize) -> u64 {
        let text = std::fs::read_to_string(self.directory.join(format!("used-{device}"))).unwrap_or_default();
        text.parse().unwrap_or(0)
    }

    fn note_used(&self, device: usize, used: u64) -> Called<()> {
        let written = std::fs::write(self.directory.join(format!("used-{device}")), used.to_string());
        written.map_err(|error| self.refusal(&error))
    }

    /// A new chunk, as the open file that keeps its bytes. What it was asked for beside them stands in its name.
    pub(crate) fn create(&self, device: usize, len: u64, rdma: bool) -> Called<OwnedFd> {
        // With the process's number a name that no other chunk has, but for those of a dead process with the same.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let _lock = self.lock()?;
        // A look at every chunk takes long where there are many.
        let used = self.used_at_most(device);
        if used.saturating_add(len) > self.conf.devices[device] && len > self.free_locked(device)? {
            return Err(code::OUT_OF_MEMORY);
        }
        let suffix = if rdma { "-rdma" } else { "" };
        let file = loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("chunk-{device}-{}.{number}{suffix}", std::process::id());
            match File::options().create_new(true).read(true).write(true).open(self.directory.join(name)) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                opened => break opened.map_err(|error| self.refusal(&error))?,
            }
        };
        file.set_len(len).map_err(|_| code::OPERATING_SYSTEM)?;
        self.note_used(device, self.used_at_most(device).saturating_add(len))?;
        if self.conf.dirty {
            for at in (0..len).step_by(STRETCH as usize) {
                file.write_all_at(&[0xa5; 64], at).map_err(|_| code::OPERATING_SYSTEM)?;
            }
        }
        Ok(file.into())
    }

    /// Another open file of the same chunk, which lives and dies by itself.
    pub(crate) fn reopen(&self, file: BorrowedFd<'_>) -> Called<File> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        File::options().read(true).write(true).open(path).map_err(|error| self.refusal(&error))
    }

    /// A new export. Its place in the machine's table is a lock of one byte behind the chunk's end, which the kernel takes back with the last copy of the descriptor.
    pub(crate) fn export(&self, file: BorrowedFd<'_>) -> Called<OwnedFd> {
        let export = self.reopen(file)?;
        if self.conf.export_slots == 0 {
            return Ok(export.into());
        }
        let _lock = self.lock()?;
        let mut free: Vec<usize> = (0..self.conf.export_slots).collect();
        self.each_chunk("chunk-", |chunk, _| free.retain(|slot| !is_locked(chunk, *slot)))?;
        let slot = *free.first().ok_or(code::OUT_OF_MEMORY)?;
        if lock_of_slot(&export, slot, libc::F_OFD_SETLK).is_some() { Ok(export.into()) } else { Err(code::UNKNOWN) }
    }

    /// The device of the chunk behind a descriptor, if it is one of this machine's.
    pub(crate) fn device_of(&self, fd: BorrowedFd<'_>) -> Called<usize> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let path = std::fs::read_link(link).map_err(|_| code::OPERATING_SYSTEM)?;
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let device = name.strip_prefix("chunk-").and_then(|rest| rest.split('-').next()?.parse().ok());
        let is_here = path.parent().is_some_and(|parent| parent == self.directory);
        device.filter(|device| is_here && *device < self.conf.devices.len()).ok_or(code::INVALID_VALUE)
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

/// Takes, or asks for, the lock of one export's place on an open file (fcntl(2), open file description locks).
fn lock_of_slot(file: &File, slot: usize, command: libc::c_int) -> Option<libc::flock> {
    /// Behind every chunk.
    const SLOTS: libc::off_t = 1 << 50;
    // SAFETY: the structure is numbers only, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = SLOTS + slot as libc::off_t;
    lock.l_len = 1;
    // SAFETY: both commands take a pointer to such a structure, which lives through the call; the file is open.
    let taken = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    (taken == 0).then_some(lock)
}

fn is_locked(file: &File, slot: usize) -> bool {
    lock_of_slot(file, slot, libc::F_OFD_GETLK).is_none_or(|lock| lock.l_type != libc::F_UNLCK as libc::c_short)
}
