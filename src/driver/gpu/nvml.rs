//! What NVIDIA's management library knows and the driver does not say: how much memory nobody holds (asking the driver itself would take a context, and so device memory), and whether a device is gone.
//!
//! nvml.h: `nvmlInit_v2`, `nvmlDeviceGetHandleByUUID`, `nvmlDeviceGetMemoryInfo`.

#![expect(unsafe_code, reason = "calls C functions of a library that is loaded at run time")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};

use libloading::Library;

use super::Cause;
use super::table::Code;
use crate::error::ErrorKind;
use crate::ids::{DeviceId, DeviceUuid};

/// How the library's functions begin.
pub(super) const PREFIX: &str = "nvml";

const LOOK_UP: &str = "nvmlDeviceGetHandleByUUID";
const MEMORY_INFO: &str = "nvmlDeviceGetMemoryInfo";

/// Result codes: numbers of the library's own.
mod code {
    use super::Code;

    pub(super) const INVALID_ARGUMENT: Code = 2;
    pub(super) const NOT_SUPPORTED: Code = 3;
    pub(super) const NO_PERMISSION: Code = 4;
    pub(super) const NOT_FOUND: Code = 6;
    pub(super) const DRIVER_NOT_LOADED: Code = 9;
    pub(super) const TIMEOUT: Code = 10;
    pub(super) const GPU_IS_LOST: Code = 15;
    pub(super) const RESET_REQUIRED: Code = 16;
    pub(super) const VERSION_MISMATCH: Code = 18;
}

/// What a caller can do about an answer.
pub(super) fn kind_of(code: Code) -> ErrorKind {
    match code {
        code::NOT_SUPPORTED | code::NO_PERMISSION => ErrorKind::Unsupported,
        code::NOT_FOUND => ErrorKind::NotFound,
        code::DRIVER_NOT_LOADED | code::TIMEOUT | code::GPU_IS_LOST | code::RESET_REQUIRED => ErrorKind::Unavailable,
        _ => ErrorKind::Broken,
    }
}

fn refused(function: &'static str, code: Code) -> Cause {
    let meaning = match code {
        code::NOT_SUPPORTED => "not supported",
        code::NO_PERMISSION => "not permitted",
        code::NOT_FOUND => "the management library does not know the device",
        code::DRIVER_NOT_LOADED => "the driver is not loaded",
        code::TIMEOUT => "the driver does not answer in time",
        code::GPU_IS_LOST => "a device is gone",
        code::RESET_REQUIRED => "a device needs a reset",
        code::VERSION_MISMATCH => "the driver's parts are of different versions; restart after an update",
        _ => "see nvml.h",
    };
    Cause::Library { function, code, meaning }
}

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// A device, as the library gives it: a pointer that nobody here follows.
type Native = usize;

/// The library, with the devices that were looked up when it was opened.
#[derive(Debug)]
pub(super) struct Nvml {
    device_by_uuid: unsafe extern "C" fn(*const c_char, *mut Native) -> c_int,
    memory_info: unsafe extern "C" fn(Native, *mut MemoryInfo) -> c_int,
    /// Kept, because looking up goes through every GPU of the machine and fails when one of the others is gone.
    devices: BTreeMap<DeviceId, (DeviceUuid, Option<Native>)>,
}

impl Nvml {
    /// The library, if it is there and starts.
    pub(super) fn load(path: &str, uuids: impl Iterator<Item = (DeviceId, DeviceUuid)>) -> Option<Nvml> {
        // SAFETY: loading runs the library's initialisers; it is the vendor's, by the name under which every program of the machine loads it.
        let library = unsafe { Library::new(path) }.ok()?;
        // SAFETY: the signature is the one of nvml.h.
        let init = unsafe { library.get::<unsafe extern "C" fn() -> c_int>("nvmlInit_v2") };
        let init = *init.ok()?;
        // SAFETY: it takes nothing, and the library is loaded.
        if unsafe { init() } != 0 {
            return None;
        }
        // SAFETY: the signature is the one of nvml.h, a pointer being as wide as the number that stands for it here; the library is never unloaded.
        let device_by_uuid = *unsafe { library.get(LOOK_UP) }.ok()?;
        // SAFETY: as above.
        let memory_info = *unsafe { library.get(MEMORY_INFO) }.ok()?;
        std::mem::forget(library);
        let mut nvml = Nvml { device_by_uuid, memory_info, devices: BTreeMap::new() };
        nvml.devices = uuids.map(|(id, uuid)| (id, (uuid, nvml.look_up(uuid).ok()))).collect();
        Some(nvml)
    }

    /// Bytes of the device that nobody holds; none while it cannot be looked up because another device of the machine is gone.
    pub(super) fn free(&self, device: DeviceId) -> Result<Option<u64>, Cause> {
        let (uuid, known) = self.devices[&device];
        let native = match known.map_or_else(|| self.look_up(uuid), Ok) {
            Ok(native) => native,
            Err(code::GPU_IS_LOST) => return Ok(None),
            Err(code) => return Err(refused(LOOK_UP, code)),
        };
        let mut info = MemoryInfo::default();
        // SAFETY: `native` is what the library has given for a device, and `info` is as large as nvmlMemory_t.
        match unsafe { (self.memory_info)(native, &raw mut info) } {
            0 => Ok(Some(info.free)),
            code::GPU_IS_LOST => Err(Cause::Lost { device, reason: "it has fallen off the bus, or does not answer" }),
            code::RESET_REQUIRED => Err(Cause::Lost { device, reason: "it needs a reset" }),
            code => Err(refused(MEMORY_INFO, code)),
        }
    }

    /// Why the device is gone, if the library says so.
    pub(super) fn loss(&self, device: DeviceId) -> Option<Cause> {
        self.free(device).err().filter(|cause| matches!(cause, Cause::Lost { .. }))
    }

    fn look_up(&self, uuid: DeviceUuid) -> Result<Native, Code> {
        // A part of a GPU (MIG) has the other prefix, and is not known by the first.
        let whole = uuid.to_string();
        let part = whole.replacen("GPU-", "MIG-", 1);
        match self.look_up_name(&whole) {
            Err(code::NOT_FOUND | code::INVALID_ARGUMENT) => self.look_up_name(&part),
            outcome => outcome,
        }
    }

    fn look_up_name(&self, name: &str) -> Result<Native, Code> {
        let name = CString::new(name).expect("a uuid in words has no zero byte");
        let mut device = 0;
        // SAFETY: `name` ends with a zero and lives through the call, as does the place for the answer.
        let code = unsafe { (self.device_by_uuid)(name.as_ptr(), &raw mut device) };
        if code == 0 { Ok(device) } else { Err(code) }
    }
}
