//! The C functions that CUDA and HIP have in common but for their names. Each hands its arguments on and its answer back.

#![expect(unsafe_code, reason = "C functions take pointers")]

use std::ffi::{c_int, c_uint};

/// `CUmemAllocationProp`, `hipMemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NativeProperties {
    /// 1: pinned.
    pub kind: c_uint,
    /// 1: a POSIX descriptor.
    pub handle_types: c_uint,
    /// 1: of a device.
    pub location: c_uint,
    /// Its ordinal.
    pub device: c_int,
    /// Not looked at.
    pub win32_metadata: usize,
    /// Not looked at.
    pub compression: u8,
    /// 1: network cards are to read it.
    pub rdma: u8,
    /// Not looked at.
    pub rest: [u8; 6],
}

/// `CUmemAccessDesc`, `hipMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NativeAccess {
    /// 1: of a device.
    pub location: c_uint,
    /// Its ordinal.
    pub device: c_int,
    /// 1 to read, 3 to write too.
    pub flags: c_uint,
}

/// Puts a value where the caller of a C function wants it.
#[expect(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "the C functions call it, and their callers vouch for their places"
)]
pub fn put<T>(place: *mut T) -> impl FnOnce(T) {
    // SAFETY: the caller of the C function gives a place of this type (the vendor's contract).
    move |value| unsafe { place.write(value) }
}

/// Exports C functions over the process's driver, which the function `$driver` gives: what each does, and its name.
#[macro_export]
macro_rules! symbols {
    ($driver:ident: $($what:ident = $name:ident),* $(,)?) => {
        $($crate::symbol!($driver, $what, $name);)*
    };
}

/// The same of the library for collectives, whose names are every vendor's.
#[macro_export]
macro_rules! collectives {
    ($driver:ident) => {
        $crate::symbols!($driver:
            collectives_version = ncclGetVersion,
            collectives_init = ncclCommInitAll,
            collectives_destroy = ncclCommDestroy,
            group_start = ncclGroupStart,
            group_end = ncclGroupEnd,
            all_reduce = ncclAllReduce,
        );
    };
}

/// One of them.
#[doc(hidden)]
#[macro_export]
macro_rules! symbol {
    ($driver:ident, init, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(_flags: std::ffi::c_uint) -> std::ffi::c_int {
            $crate::answer($driver().start(), |()| ())
        }
    };
    ($driver:ident, version, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(version: *mut std::ffi::c_int) -> std::ffi::c_int {
            $crate::answer(Ok($driver().machine().version()), $crate::put(version))
        }
    };
    ($driver:ident, device_count, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(count: *mut std::ffi::c_int) -> std::ffi::c_int {
            $crate::answer($driver().device_count(), $crate::put(count))
        }
    };
    ($driver:ident, device_get, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(device: *mut std::ffi::c_int, ordinal: std::ffi::c_int) -> std::ffi::c_int {
            $crate::answer($driver().device(ordinal).map(|_| ordinal), $crate::put(device))
        }
    };
    ($driver:ident, device_name, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            name: *mut std::ffi::c_char,
            len: std::ffi::c_int,
            device: std::ffi::c_int,
        ) -> std::ffi::c_int {
            let text = b"stand-in\0";
            if len < text.len() as std::ffi::c_int {
                return $crate::code::INVALID_VALUE;
            }
            // SAFETY: the caller has room for `len` characters, which is at least as many.
            $crate::answer($driver().device(device), |_| unsafe {
                text.as_ptr().cast::<std::ffi::c_char>().copy_to(name, text.len())
            })
        }
    };
    ($driver:ident, device_total, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(bytes: *mut usize, device: std::ffi::c_int) -> std::ffi::c_int {
            $crate::answer($driver().device(device).map(|bytes| bytes as usize), $crate::put(bytes))
        }
    };
    ($driver:ident, can_access_peer, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            can: *mut std::ffi::c_int,
            device: std::ffi::c_int,
            peer: std::ffi::c_int,
        ) -> std::ffi::c_int {
            $crate::answer($driver().can_access_peer(device, peer).map(std::ffi::c_int::from), $crate::put(can))
        }
    };
    ($driver:ident, granularity, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            granularity: *mut usize,
            prop: *const $crate::NativeProperties,
            _option: std::ffi::c_uint,
        ) -> std::ffi::c_int {
            // SAFETY: the caller gives properties of the vendor's layout.
            let device = unsafe { prop.read() }.device;
            $crate::answer($driver().granularity(device).map(|bytes| bytes as usize), $crate::put(granularity))
        }
    };
    ($driver:ident, create, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            handle: *mut u64,
            size: usize,
            prop: *const $crate::NativeProperties,
            _flags: u64,
        ) -> std::ffi::c_int {
            // SAFETY: the caller gives properties of the vendor's layout.
            let prop = unsafe { prop.read() };
            let $crate::NativeProperties { kind, handle_types, location, device, rdma, .. } = prop;
            let wanted = $crate::Properties { kind, handle_types, location, device, rdma: rdma != 0 };
            $crate::answer($driver().create(size as u64, &wanted), $crate::put(handle))
        }
    };
    ($driver:ident, release, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(handle: u64) -> std::ffi::c_int {
            $crate::answer($driver().release(handle), |()| ())
        }
    };
    ($driver:ident, export, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            fd: *mut std::ffi::c_int,
            handle: u64,
            kind: std::ffi::c_uint,
            flags: u64,
        ) -> std::ffi::c_int {
            $crate::answer(
                $driver().export(handle, kind, flags).map(|fd| std::os::fd::IntoRawFd::into_raw_fd(fd)),
                $crate::put(fd),
            )
        }
    };
    ($driver:ident, reserve, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            address: *mut u64,
            size: usize,
            alignment: usize,
            _hint: u64,
            flags: u64,
        ) -> std::ffi::c_int {
            $crate::answer($driver().reserve(size as u64, alignment as u64, flags), $crate::put(address))
        }
    };
    ($driver:ident, unreserve, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(address: u64, size: usize) -> std::ffi::c_int {
            $crate::answer($driver().unreserve(address, size as u64), |()| ())
        }
    };
    ($driver:ident, map, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            address: u64,
            size: usize,
            offset: usize,
            handle: u64,
            flags: u64,
        ) -> std::ffi::c_int {
            $crate::answer($driver().map(address, size as u64, offset as u64, handle, flags), |()| ())
        }
    };
    ($driver:ident, unmap, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(address: u64, size: usize) -> std::ffi::c_int {
            $crate::answer($driver().unmap(address, size as u64), |()| ())
        }
    };
    ($driver:ident, set_access, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            address: u64,
            size: usize,
            who: *const $crate::NativeAccess,
            count: usize,
        ) -> std::ffi::c_int {
            // SAFETY: the caller gives so many descriptions of the vendor's layout.
            let who = unsafe { std::slice::from_raw_parts(who, count) };
            let who: Vec<_> = who.iter().map(|who| (who.location, who.device, who.flags)).collect();
            $crate::answer($driver().set_access(address, size as u64, &who), |()| ())
        }
    };
    ($driver:ident, synchronize, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> std::ffi::c_int {
            $crate::answer($driver().synchronize(), |()| ())
        }
    };
    ($driver:ident, stream_create, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(stream: *mut u64, _flags: std::ffi::c_uint) -> std::ffi::c_int {
            $crate::answer($driver().stream_create(), $crate::put(stream))
        }
    };
    ($driver:ident, stream_destroy, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(stream: u64) -> std::ffi::c_int {
            $crate::answer($driver().stream_destroy(stream), |()| ())
        }
    };
    ($driver:ident, stream_wait, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(stream: u64, event: u64, _flags: std::ffi::c_uint) -> std::ffi::c_int {
            $crate::answer($driver().stream_wait(stream, event), |()| ())
        }
    };
    ($driver:ident, event_create, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(event: *mut u64, _flags: std::ffi::c_uint) -> std::ffi::c_int {
            $crate::answer($driver().event_create(), $crate::put(event))
        }
    };
    ($driver:ident, event_record, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(event: u64, stream: u64) -> std::ffi::c_int {
            $crate::answer($driver().event_record(event, stream), |()| ())
        }
    };
    ($driver:ident, event_query, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(event: u64) -> std::ffi::c_int {
            $crate::answer($driver().event_query(event), |()| ())
        }
    };
    ($driver:ident, event_destroy, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(event: u64) -> std::ffi::c_int {
            $crate::answer($driver().event_destroy(event), |()| ())
        }
    };
    ($driver:ident, copy_to_host, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(into: *mut std::ffi::c_void, from: u64, len: usize) -> std::ffi::c_int {
            // SAFETY: the caller has room for `len` bytes.
            let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
            $crate::answer($driver().copy_to_host(into, from), |()| ())
        }
    };
    ($driver:ident, copy_to_device, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(to: u64, from: *const std::ffi::c_void, len: usize) -> std::ffi::c_int {
            // SAFETY: the caller has `len` bytes there.
            let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
            $crate::answer($driver().copy_to_device(to, from), |()| ())
        }
    };
    ($driver:ident, host_alloc, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            at: *mut *mut std::ffi::c_void,
            len: usize,
            _flags: std::ffi::c_uint,
        ) -> std::ffi::c_int {
            let given = $driver().host_alloc(len).map(std::ptr::with_exposed_provenance_mut);
            $crate::answer(given, $crate::put(at))
        }
    };
    ($driver:ident, host_free, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(at: *mut std::ffi::c_void) -> std::ffi::c_int {
            $crate::answer($driver().host_free(at.addr()), |()| ())
        }
    };
    ($driver:ident, fill, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(start: u64, value: u8, len: usize, stream: u64) -> std::ffi::c_int {
            $crate::answer($driver().fill(start, value, len as u64, stream), |()| ())
        }
    };
    ($driver:ident, stall, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(device: std::ffi::c_int, stream: u64, stall: *mut u64) -> std::ffi::c_int {
            $crate::answer($driver().stall(device, stream), $crate::put(stall))
        }
    };
    ($driver:ident, resume, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(stall: u64) -> std::ffi::c_int {
            $crate::answer($driver().resume(stall), |()| ())
        }
    };
    ($driver:ident, collectives_version, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(version: *mut std::ffi::c_int) -> std::ffi::c_int {
            $crate::answer(Ok($crate::COLLECTIVES_VERSION), $crate::put(version))
        }
    };
    ($driver:ident, collectives_init, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            communicators: *mut u64,
            count: std::ffi::c_int,
            devices: *const std::ffi::c_int,
        ) -> std::ffi::c_int {
            // SAFETY: the caller gives so many devices.
            let devices = unsafe { std::slice::from_raw_parts(devices, count as usize) };
            $crate::answer($driver().communicators(devices), |made: Vec<u64>| {
                // SAFETY: the caller has room for as many communicators.
                unsafe { communicators.copy_from(made.as_ptr(), made.len()) }
            })
        }
    };
    ($driver:ident, collectives_destroy, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(communicator: u64) -> std::ffi::c_int {
            $crate::answer($driver().end_communicator(communicator), |()| ())
        }
    };
    ($driver:ident, group_start, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> std::ffi::c_int {
            $crate::answer($driver().group_start(), |()| ())
        }
    };
    ($driver:ident, group_end, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> std::ffi::c_int {
            $crate::answer($driver().group_end(), |()| ())
        }
    };
    ($driver:ident, all_reduce, $name:ident) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            from: u64,
            to: u64,
            count: usize,
            kind: std::ffi::c_int,
            operation: std::ffi::c_int,
            communicator: u64,
            stream: u64,
        ) -> std::ffi::c_int {
            let wanted = $crate::AllReduce { from, to, len: count as u64, stream };
            $crate::answer($driver().all_reduce(communicator, wanted, (kind, operation)), |()| ())
        }
    };
}
