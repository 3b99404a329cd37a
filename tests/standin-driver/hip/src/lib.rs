//! The C symbols of libamdhip64.so.7 over the stand-in. What the vendors have in common is standin-core's.

#![expect(unsafe_code, reason = "C functions take pointers")]
#![expect(clippy::missing_safety_doc, reason = "the contract of each is the vendor's: hip_runtime_api.h")]
#![expect(missing_docs, reason = "the vendor's names, documented by the vendor")]

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use standin_core::{Habits, Process, answer, code, driver_beside, put};

fn driver() -> &'static Process {
    static DRIVER: OnceLock<Process> = OnceLock::new();
    DRIVER.get_or_init(|| driver_beside(hipInit as *const () as usize, HABITS))
}

const UUID: &[u8; 13] = b"standin-hip--";
const HABITS: Habits =
    Habits { version: 70_200_000, has_contexts: false, uuid: UUID, visible_devices: "HIP_VISIBLE_DEVICES" };

standin_core::symbols!(driver:
    init = hipInit,
    version = hipRuntimeGetVersion,
    device_count = hipGetDeviceCount,
    device_get = hipDeviceGet,
    device_name = hipDeviceGetName,
    device_total = hipDeviceTotalMem,
    can_access_peer = hipDeviceCanAccessPeer,
    granularity = hipMemGetAllocationGranularity,
    create = hipMemCreate,
    release = hipMemRelease,
    export = hipMemExportToShareableHandle,
    reserve = hipMemAddressReserve,
    unreserve = hipMemAddressFree,
    map = hipMemMap,
    unmap = hipMemUnmap,
    set_access = hipMemSetAccess,
    synchronize = hipDeviceSynchronize,
    stream_create = hipStreamCreateWithFlags,
    stream_destroy = hipStreamDestroy,
    stream_wait = hipStreamWaitEvent,
    event_create = hipEventCreateWithFlags,
    event_record = hipEventRecord,
    event_query = hipEventQuery,
    event_destroy = hipEventDestroy,
    copy_to_host = hipMemcpyDtoH,
    copy_to_device = hipMemcpyHtoD,
    fill = hipMemsetD8Async,
    host_alloc = hipHostMalloc,
    host_free = hipHostFree,
    stall = standin_stall,
    resume = standin_resume,
);
standin_core::collectives!(driver);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> c_int {
    answer(driver().uuid(UUID, device), put(uuid))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    answer(driver().device(device).map(|_| c_int::from(attribute == 89)), put(value))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemImportFromShareableHandle(
    handle: *mut u64,
    os_handle: *const c_void,
    kind: c_uint,
) -> c_int {
    let fd = if driver().machine().version() >= 70_100_000 {
        os_handle.addr()
    } else if os_handle.addr() < 4096 {
        // The library would crash.
        return code::OPERATING_SYSTEM;
    } else {
        // SAFETY: a pointer to the number, as this version wants it.
        unsafe { os_handle.cast::<c_int>().read() as usize }
    };
    let Some(fd) = c_int::try_from(fd).ok().filter(|fd| *fd >= 0) else { return code::INVALID_VALUE };
    // SAFETY: the caller keeps the descriptor open through the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    answer(driver().import(fd, kind), put(handle))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevice(device: *mut c_int) -> c_int {
    // A thread that has chosen none has the first.
    answer(driver().current().map(|current| current.saturating_sub(1) as c_int), put(device))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipSetDevice(device: c_int) -> c_int {
    answer(driver().device(device).and_then(|_| driver().set_current(device as u64 + 1)), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> c_int {
    let device = driver().current().map(|current| current.saturating_sub(1) as c_int);
    let both = device.and_then(|device| Ok((driver().free(device)?, driver().device(device)?)));
    answer(both, |(left, all)| {
        put(free)(left as usize);
        put(total)(all as usize);
    })
}
