//! How much memory nobody holds, from NVIDIA's management library: asking the driver itself would take a context, and so device memory.
//!
//! nvml.h: `nvmlInit_v2`, `nvmlDeviceGetHandleByUUID`, `nvmlDeviceGetMemoryInfo`.

#![expect(unsafe_code, reason = "calls C functions of a library that is loaded at run time")]

use std::ffi::{CString, c_char, c_int, c_void};

use libloading::Library;

use super::table::Code;
use crate::ids::DeviceUuid;

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// The library.
#[derive(Debug)]
pub(super) struct Nvml {
    device_by_uuid: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    memory_info: unsafe extern "C" fn(*mut c_void, *mut MemoryInfo) -> c_int,
}

impl Nvml {
    /// The library, if it is there and starts.
    pub(super) fn load(path: &str) -> Option<Nvml> {
        // SAFETY: loading runs the library's initialisers; it is the vendor's, by the name under which every program of the machine loads it.
        let library = unsafe { Library::new(path) }.ok()?;
        // SAFETY: the signature is the one of nvml.h.
        let init = unsafe { library.get::<unsafe extern "C" fn() -> c_int>("nvmlInit_v2") };
        let init = *init.ok()?;
        // SAFETY: it takes nothing, and the library is loaded.
        if unsafe { init() } != 0 {
            return None;
        }
        // SAFETY: the signature is the one of nvml.h; the library is never unloaded.
        let device_by_uuid = *unsafe { library.get("nvmlDeviceGetHandleByUUID") }.ok()?;
        // SAFETY: as above.
        let memory_info = *unsafe { library.get("nvmlDeviceGetMemoryInfo") }.ok()?;
        std::mem::forget(library);
        Some(Nvml { device_by_uuid, memory_info })
    }

    /// Bytes of the device that nobody holds.
    pub(super) fn free(&self, uuid: DeviceUuid) -> Result<u64, Code> {
        // A part of a GPU (MIG) has the other prefix.
        let whole = uuid.to_string();
        let part = whole.replacen("GPU-", "MIG-", 1);
        self.free_of(&whole).or_else(|_| self.free_of(&part))
    }

    fn free_of(&self, uuid: &str) -> Result<u64, Code> {
        let name = CString::new(uuid).expect("a uuid in words has no zero byte");
        let mut device = std::ptr::null_mut();
        // SAFETY: `name` ends with a zero and lives through the call, as does the place for the answer.
        let code = unsafe { (self.device_by_uuid)(name.as_ptr(), &raw mut device) };
        if code != 0 {
            return Err(code);
        }
        let mut info = MemoryInfo::default();
        // SAFETY: `device` is what the library has just given, and `info` is as large as nvmlMemory_t.
        match unsafe { (self.memory_info)(device, &raw mut info) } {
            0 => Ok(info.free),
            code => Err(code),
        }
    }
}
