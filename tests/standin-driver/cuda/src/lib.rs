//! The C symbols of libcuda.so.1 and libnvidia-ml.so.1 over the stand-in. Each function hands its arguments on and its answer back.

#![expect(unsafe_code, reason = "C functions take pointers")]
#![expect(clippy::missing_safety_doc, reason = "the contract of each is the vendor's: cuda.h, nvml.h")]
#![expect(missing_docs, reason = "the vendor's names, documented by the vendor")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd as _};
use std::sync::OnceLock;

use standin_core::{Process, Properties, answer, code, driver_beside};

fn driver() -> &'static Process {
    static DRIVER: OnceLock<Process> = OnceLock::new();
    DRIVER.get_or_init(|| driver_beside(cuInit as *const () as usize, 13_000, true))
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Prop {
    kind: c_uint,
    handle_types: c_uint,
    location: c_uint,
    device: c_int,
    rest: [u64; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDesc {
    location: c_uint,
    device: c_int,
    flags: c_uint,
}

const UUID: &[u8; 13] = b"standin-cuda-";

/// Puts a value where the caller wants it.
fn put<T>(place: *mut T) -> impl FnOnce(T) {
    // SAFETY: the caller of the C function gives a place of this type (the vendor's contract).
    move |value| unsafe { place.write(value) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(_flags: c_uint) -> c_int {
    answer(driver().init(), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    answer(Ok(driver().machine().version()), put(version))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    answer(driver().device_count(), put(count))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    answer(driver().device(ordinal).map(|_| ordinal), put(device))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int {
    let text = b"stand-in\0";
    if len < text.len() as c_int {
        return code::INVALID_VALUE;
    }
    // SAFETY: the caller has room for `len` characters, which is at least as many.
    answer(driver().device(device), |_| unsafe { text.as_ptr().cast::<c_char>().copy_to(name, text.len()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    let name = |_| {
        let mut uuid = [0; 16];
        uuid[..13].copy_from_slice(UUID);
        uuid[13..].copy_from_slice(format!("{device:03}").as_bytes());
        uuid
    };
    answer(driver().device(device).map(name), put(uuid))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    answer(driver().device(device).map(|bytes| bytes as usize), put(bytes))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    answer(driver().device(device).map(|_| c_int::from(attribute == 102 || attribute == 103)), put(value))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> c_int {
    answer(driver().device(device).and(driver().device(peer)).map(|_| 1), put(can))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    _prop: *const Prop,
    _option: c_uint,
) -> c_int {
    answer(driver().init().map(|()| 2 << 20), put(granularity))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(handle: *mut u64, size: usize, prop: *const Prop, _flags: u64) -> c_int {
    // SAFETY: the caller gives properties of the vendor's layout.
    let prop = unsafe { prop.read() };
    let Prop { kind, handle_types, location, device, .. } = prop;
    answer(driver().create(size as u64, &Properties { kind, handle_types, location, device }), put(handle))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRelease(handle: u64) -> c_int {
    answer(driver().release(handle), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(fd: *mut c_int, handle: u64, kind: c_uint, flags: u64) -> c_int {
    answer(driver().export(handle, kind, flags).map(|fd| fd.into_raw_fd()), put(fd))
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
pub unsafe extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    size: usize,
    alignment: usize,
    _hint: u64,
    flags: u64,
) -> c_int {
    answer(driver().reserve(size as u64, alignment as u64, flags), put(address))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressFree(address: u64, size: usize) -> c_int {
    answer(driver().unreserve(address, size as u64), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) -> c_int {
    answer(driver().map(address, size as u64, offset as u64, handle, flags), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemUnmap(address: u64, size: usize) -> c_int {
    answer(driver().unmap(address, size as u64), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(address: u64, size: usize, who: *const AccessDesc, count: usize) -> c_int {
    // SAFETY: the caller gives so many descriptions of the vendor's layout.
    let who = unsafe { std::slice::from_raw_parts(who, count) };
    let who: Vec<_> = who.iter().map(|who| (who.location, who.device, who.flags)).collect();
    answer(driver().set_access(address, size as u64, &who), |()| ())
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> c_int {
    answer(driver().synchronize(), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut u64, _flags: c_uint) -> c_int {
    answer(driver().stream_create(), put(stream))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: u64) -> c_int {
    answer(driver().stream_destroy(stream), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> c_int {
    answer(driver().event_use(event, Some(stream)), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut u64, _flags: c_uint) -> c_int {
    answer(driver().event_create(), put(event))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: u64, stream: u64) -> c_int {
    answer(driver().event_use(event, Some(stream)), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: u64) -> c_int {
    answer(driver().event_use(event, None), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: u64) -> c_int {
    answer(driver().event_destroy(event), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(into: *mut c_void, from: u64, len: usize) -> c_int {
    // SAFETY: the caller has room for `len` bytes.
    let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
    answer(driver().copy_to_host(into, from), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) -> c_int {
    // SAFETY: the caller has `len` bytes there.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
    answer(driver().copy_to_device(to, from), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(start: u64, value: u8, len: usize, _stream: u64) -> c_int {
    answer(driver().fill(start, value, len as u64), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInit_v2() -> c_int {
    answer(driver().init(), |()| ())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut *mut c_void) -> c_int {
    // SAFETY: the caller gives a C string.
    let wanted = unsafe { CStr::from_ptr(uuid) }.to_string_lossy().replace('-', "").to_ascii_lowercase();
    let is_it = |ordinal: &c_int| {
        let bytes = UUID.iter().copied().chain(format!("{ordinal:03}").into_bytes());
        wanted.ends_with(&bytes.map(|byte| format!("{byte:02x}")).collect::<String>())
    };
    let found = driver().device_count().and_then(|count| (0..count).find(is_it).ok_or(code::INVALID_DEVICE));
    answer(found.map(|ordinal| std::ptr::without_provenance_mut(ordinal as usize + 1)), put(device))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: *mut c_void, info: *mut [u64; 3]) -> c_int {
    let ordinal = device.addr() as c_int - 1;
    let both = driver().device(ordinal).and_then(|total| Ok((total, driver().free(ordinal)?)));
    answer(both.map(|(total, free)| [total, free, total - free]), put(info))
}
