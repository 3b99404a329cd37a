//! The C symbols of libcuda.so.1 and libnvidia-ml.so.1 over the stand-in. What the vendors have in common is standin-core's.

#![expect(unsafe_code, reason = "C functions take pointers")]
#![expect(clippy::missing_safety_doc, reason = "the contract of each is the vendor's: cuda.h, nvml.h")]
#![expect(missing_docs, reason = "the vendor's names, documented by the vendor")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use standin_core::{Called, Habits, Process, answer, code, driver_beside, put};

fn driver() -> &'static Process {
    static DRIVER: OnceLock<Process> = OnceLock::new();
    DRIVER.get_or_init(|| driver_beside(cuInit as *const () as usize, HABITS))
}

const UUID: &[u8; 13] = b"standin-cuda-";
const HABITS: Habits =
    Habits { version: 13_000, has_contexts: true, uuid: UUID, visible_devices: "CUDA_VISIBLE_DEVICES" };

/// Of the GPU that a device is a part of, where it is one.
const WHOLE_UUID: &[u8; 13] = b"standin-whole";

/// How many such parts a GPU has.
const PARTS: u64 = 7;

standin_core::symbols!(driver:
    init = cuInit,
    version = cuDriverGetVersion,
    device_count = cuDeviceGetCount,
    device_get = cuDeviceGet,
    device_name = cuDeviceGetName,
    device_total = cuDeviceTotalMem_v2,
    can_access_peer = cuDeviceCanAccessPeer,
    granularity = cuMemGetAllocationGranularity,
    create = cuMemCreate,
    release = cuMemRelease,
    export = cuMemExportToShareableHandle,
    reserve = cuMemAddressReserve,
    unreserve = cuMemAddressFree,
    map = cuMemMap,
    unmap = cuMemUnmap,
    set_access = cuMemSetAccess,
    synchronize = cuCtxSynchronize,
    stream_create = cuStreamCreate,
    stream_destroy = cuStreamDestroy_v2,
    stream_wait = cuStreamWaitEvent,
    event_create = cuEventCreate,
    event_record = cuEventRecord,
    event_query = cuEventQuery,
    event_destroy = cuEventDestroy_v2,
    copy_to_host = cuMemcpyDtoH_v2,
    copy_to_device = cuMemcpyHtoD_v2,
    fill = cuMemsetD8Async,
    host_alloc = cuMemHostAlloc,
    host_free = cuMemFreeHost,
    stall = standin_stall,
    resume = standin_resume,
);
standin_core::collectives!(driver);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    answer(driver().uuid(UUID, device), put(uuid))
}

/// The older function, which knows of no parts: it says whose part the device is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> c_int {
    let prefix = if driver().machine().is_mig() { WHOLE_UUID } else { UUID };
    answer(driver().uuid(prefix, device), put(uuid))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    let (rdma, fabric, mps) = driver().machine().features();
    let generation = driver().machine().generation();
    let said = match attribute {
        75 => generation.0,
        76 => generation.1,
        102 | 103 => 1,
        110 => c_int::from(rdma),
        128 => c_int::from(fabric),
        133 => c_int::from(mps),
        _ => 0,
    };
    answer(driver().device(device).map(|_| said), put(value))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut u64,
    os_handle: *const c_void,
    kind: c_uint,
) -> c_int {
    let fd = os_handle.addr();
    let Some(fd) = c_int::try_from(fd).ok().filter(|fd| *fd >= 0) else { return code::INVALID_VALUE };
    // SAFETY: the caller keeps the descriptor open through the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    answer(driver().import(fd, kind), put(handle))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> c_int {
    answer(driver().retain(device), put(context))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    answer(driver().let_go(device), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut u64) -> c_int {
    answer(driver().current(), put(context))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: u64) -> c_int {
    answer(driver().set_current(context), |()| ())
}

/// The management library has codes of its own.
fn nvml<T>(outcome: Called<T>) -> Called<T> {
    outcome.map_err(|code| match code {
        code::NOT_INITIALIZED => 1,
        code::INVALID_DEVICE => NOT_FOUND,
        code::DEVICE_UNAVAILABLE => GPU_IS_LOST,
        _ => 999,
    })
}

const NOT_FOUND: i32 = 6;
const DRIVER_NOT_LOADED: i32 = 9;
const GPU_IS_LOST: i32 = 15;
const RESET_REQUIRED: i32 = 16;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInit_v2() -> c_int {
    if !driver().machine().has_nvml() {
        return DRIVER_NOT_LOADED;
    }
    answer(nvml(driver().init()), |()| ())
}

/// Bits of a device's handle: its number on the machine plus one, and whether the GPU is meant that it is a part of.
const WHOLE: usize = 1 << 16;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut *mut c_void) -> c_int {
    // SAFETY: the caller gives a C string.
    let wanted = unsafe { CStr::from_ptr(uuid) }.to_string_lossy().replace('-', "").to_ascii_lowercase();
    let is_mig = driver().machine().is_mig();
    let named = |kind: &str, prefix, device| {
        let uuid: [u8; 16] = driver().name_of(prefix, device)?;
        Ok::<bool, i32>(wanted == format!("{kind}{}", uuid.map(|byte| format!("{byte:02x}")).concat()))
    };
    let find = || {
        // It looks at every GPU on the way, and fails where one of them is gone (nvml.h).
        for device in 0..driver().machine().device_count() {
            if named(if is_mig { "mig" } else { "gpu" }, UUID, device)? {
                return Ok(device + 1);
            }
            if is_mig && named("gpu", WHOLE_UUID, device)? {
                return Ok(device + 1 + WHOLE);
            }
        }
        Err(code::INVALID_DEVICE)
    };
    answer(nvml(find()).map(std::ptr::without_provenance_mut), put(device))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: *mut c_void, info: *mut [u64; 3]) -> c_int {
    let (device, parts) = (device.addr() % WHOLE - 1, if device.addr() > WHOLE { PARTS } else { 1 });
    if driver().machine().needs_reset(device) {
        return RESET_REQUIRED;
    }
    let both = driver().bytes_of(device).and_then(|total| Ok((total, driver().free_of(device)?)));
    answer(nvml(both).map(|(total, free)| [total * parts, free * parts, (total - free) * parts]), put(info))
}
