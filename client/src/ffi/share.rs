//! Shared ranges: memory that one process writes and publishes, and others attach.

#![expect(unsafe_code, reason = "exports C symbols")]

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use stitchd::session::shared::{Attaching, Publishing};
use stitchd::units::Bytes;

use super::{guarded, text};
use crate::shares::{self, Place};

/// A range of `stitch_share_create`, `stitch_share_publish` or `stitch_share_attach`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct stitch_shared {
    /// Where it begins, until `stitch_share_close`.
    pub address: *mut c_void,
    /// Its bytes: whole chunks.
    pub size: usize,
    /// Bytes that its publisher says mean something; 0 before it is published.
    pub content: usize,
    /// A range that is published later has a larger number; 0 before it is published.
    pub version: u64,
    /// The ordinal of its device in this process.
    pub device: c_int,
    /// Not 0 where this process may write it.
    pub writable: c_int,
    /// Not 0 where the driver lets nobody write it any more, in whatever process. Where it is 0 and `writable` is too, nobody is to write it, and each process keeps to that by itself: CUDA and HIP let whoever imports memory choose.
    pub sealed: c_int,
}

impl From<Place> for stitch_shared {
    fn from(place: Place) -> stitch_shared {
        stitch_shared {
            address: std::ptr::with_exposed_provenance_mut(place.span.start().get() as usize),
            size: place.span.len().get() as usize,
            content: place.content.get() as usize,
            version: place.version,
            device: place.device.0 as c_int,
            writable: c_int::from(place.is_writable),
            sealed: c_int::from(place.is_sealed),
        }
    }
}

/// Memory of at least `size` bytes on `device` at one run of addresses, to be written and then published. It counts against the limit of this process's session. Needs a daemon.
///
/// 0 and the range in `range`, or -1: then `stitch_last_error` says why.
///
/// # Safety
///
/// `range` is aligned for a `stitch_shared`, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_share_create(size: usize, device: c_int, range: *mut stitch_shared) -> c_int {
    let made = guarded(None, || shares::create(Bytes::new(size as u64), device).map(Some));
    // SAFETY: as the caller says.
    unsafe { put(made, range) }
}

/// Publishes the range of `stitch_share_create` that begins at `address`, under a name of 1 to 128 bytes, with `content` bytes that mean something. A range that this tenant has published under the name makes way: who holds it
/// keeps it. Work that this process has queued is waited for; from then on the range is read where it lies, or, where `writable` is not 0, written by whoever attaches it.
///
/// It outlives its last holder by `linger_ms` milliseconds, as far as the daemon's `linger_max` goes, unless memory that somebody is guaranteed is short. `key` is NULL where sessions of this tenant may attach it, or has
/// 16 to 64 bytes that whoever attaches it must show.
///
/// 0 and what `range` was changed to, or -1: then `stitch_last_error` says why, and the range is as it was, if it is there still (`stitch_share_close` says that).
///
/// # Safety
///
/// `name` ends in NUL; `key` is NULL or has `key_size` bytes; `range` is aligned for a `stitch_shared`, and nobody else uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_share_publish(
    address: *const c_void,
    name: *const c_char,
    content: usize,
    linger_ms: u64,
    writable: c_int,
    key: *const c_void,
    key_size: usize,
    range: *mut stitch_shared,
) -> c_int {
    let made = guarded(None, || {
        let how = Publishing {
            // SAFETY: as the caller says.
            name: unsafe { name_of(name) }?,
            content: Bytes::new(content as u64),
            linger: Duration::from_millis(linger_ms),
            is_writable: writable != 0,
            // SAFETY: as the caller says.
            key: unsafe { bytes(key, key_size) },
        };
        shares::publish(address.expose_provenance(), &how).map(Some)
    });
    // SAFETY: as the caller says.
    unsafe { put(made, range) }
}

/// Holds the shared range of this name, and maps it here: for reading, and for writing too where it was published so. With a `version` of 0 it is the newest, else exactly that one. It counts against the limit of this process's
/// session, as often as the session holds it only once.
///
/// 0 and the range in `range`, or -1: then `stitch_last_error` says why. What is not there, what is another tenant's and what has another key are one answer.
///
/// # Safety
///
/// As of `stitch_share_publish`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_share_attach(
    name: *const c_char,
    version: u64,
    key: *const c_void,
    key_size: usize,
    range: *mut stitch_shared,
) -> c_int {
    let made = guarded(None, || {
        // SAFETY: as the caller says.
        let wanted = Attaching { name: unsafe { name_of(name) }?, version, key: unsafe { bytes(key, key_size) } };
        shares::attach(&wanted).map(Some)
    });
    // SAFETY: as the caller says.
    unsafe { put(made, range) }
}

/// Unmaps the range that begins at `address`, once its device has done what is queued: a range that was not published is given back, one that was is held no more by this process. The addresses mean nothing any more.
///
/// 0, or -1 where no range of this process begins there.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_share_close(address: *const c_void) -> c_int {
    guarded(-1, || shares::close(address.expose_provenance()).map(|()| 0))
}

/// Writes what was made, if anything was.
///
/// # Safety
///
/// `range` is aligned for a `stitch_shared`, and nobody else uses it meanwhile.
unsafe fn put(made: Option<Place>, range: *mut stitch_shared) -> c_int {
    let Some(made) = made else { return -1 };
    // SAFETY: as the caller says.
    unsafe { range.write(made.into()) };
    0
}

/// # Safety
///
/// `name` is NULL, or ends in NUL.
unsafe fn name_of(name: *const c_char) -> Result<String, String> {
    // SAFETY: as the caller says.
    let name = unsafe { text(name, "the name of a shared range") }?;
    name.ok_or_else(|| "a shared range has a name".to_owned())
}

/// # Safety
///
/// `key` is NULL, or has `size` bytes.
unsafe fn bytes(key: *const c_void, size: usize) -> Vec<u8> {
    if key.is_null() {
        return Vec::new();
    }
    // SAFETY: as the caller says; they are copied.
    unsafe { std::slice::from_raw_parts(key.cast::<u8>(), size) }.to_vec()
}
