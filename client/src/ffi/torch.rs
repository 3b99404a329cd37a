//! What PyTorch's pluggable allocator calls. Not for anybody else: plain C has the functions of the module above, which never unwind.
//!
//! Invariant: what unwinds is PyTorch's own exception, raised by its own function, and by the time it does nothing of the library is in a middle state: no lock is held and no Rust code catches it.

#![expect(unsafe_code, reason = "exports C symbols, and calls what the process's PyTorch exports")]

use std::ffi::{CStr, CString, c_int, c_void};

use stitchd::error::chain;
use stitchd::runtime::{PrivatePoolId, Runtime};
use stitchd::session::fork;
use stitchd::units::Bytes;

use super::blocks::stitch_block_of;
use super::filter::Filter;
use super::raise;
use super::{LACKED, guarded, serve, stitch_free, stitch_last_error, stitch_record_stream};
use crate::captures;
use crate::process;

/// How the text begins by which training programs know that memory has run out, whoever made the device.
const OUT_OF_MEMORY: &str = "CUDA out of memory.";
/// And where that is not why: a smaller batch would not help.
const NO_MEMORY: &str = "CUDA memory cannot be had.";

/// `stitch_malloc` for PyTorch, whose callers do not look for NULL: never NULL for a size above 0. When it fails it raises PyTorch's own error, a C++ exception. Where memory has run out Python sees a `torch.OutOfMemoryError`, with a text that begins
/// with "CUDA out of memory." (by which training programs know that a smaller batch may help) and goes on with what `stitch_last_error` says; what fails otherwise, as there is no daemon, is a `RuntimeError` that begins with "CUDA memory cannot be had.".
///
/// Between `stitch_torch_begin_allocate_to_pool` and its end it allocates in a pool's own memory, as `stitch_malloc` does, too.
///
/// NULL is returned for a size of 0, and in a process without PyTorch (libc10.so), where there is nothing to raise; then `stitch_last_error` says why.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn stitch_torch_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    // Outside of every catch: a filter of PyTorch's may raise, too.
    let pool = captures::pool_for(device, stream);
    let ptr = serve(size, device, stream, pool);
    if ptr.is_null() && size > 0 {
        raise_out_of_memory();
    }
    ptr
}

/// A pool for what a captured graph replays, or one that a program made: PyTorch's MempoolId_t, which has these two numbers and is passed the same way.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct stitch_torch_pool_id {
    /// The first number.
    pub first: u64,
    /// The second.
    pub second: u64,
}

impl From<stitch_torch_pool_id> for PrivatePoolId {
    fn from(id: stitch_torch_pool_id) -> PrivatePoolId {
        PrivatePoolId(id.first, id.second)
    }
}

/// For `set_init_fn`: PyTorch begins to use so many devices. Opens nothing: the session with the daemon begins at the first allocation, so a process that allocates nothing has none.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_torch_init(device_count: c_int) {
    let _ = device_count;
    guarded((), || {
        fork::watch();
        Ok(())
    });
}

/// For `set_reset_fn`, which `torch.cuda.empty_cache()` calls: waits for what is queued on the devices, and gives all idle memory back to the daemon. Nothing happens while a pool is open (`stitch_torch_begin_allocate_to_pool`):
/// waiting would break a capture.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_torch_reset() {
    guarded((), || {
        let mut failed = Ok(());
        process::each(|runtime| {
            if let Err(error) = give_idle_back(runtime) {
                failed = Err(error);
            }
        });
        failed
    });
}

/// Waits for the device, and gives all idle memory back to the daemon, whether the wait has failed or not; nothing while a graph is captured.
fn give_idle_back(runtime: &Runtime) -> Result<(), String> {
    if process::is_capturing() {
        return Ok(());
    }
    let waited = runtime.synchronize();
    runtime.trim(Bytes::LARGEST);
    waited.map_err(|error| chain(&error))
}

/// `stitch_free` for whoever caches itself and frees what he wants to be rid of, as PyTorch does with the segments of a pool: as `cudaFree`, it waits for the device. Then what is idle goes back to the daemon. While a graph is captured it does not wait,
/// and the memory stays with the process.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_torch_free_segment(ptr: *mut c_void, size: usize, device: c_int, stream: *mut c_void) {
    stitch_free(ptr, size, device, stream);
    guarded((), || process::of_device(device).into_iter().try_for_each(give_idle_back));
}

/// For `set_memory_fraction_fn`: the process holds at most this part of all memory of the device from now on, also where it has not used it yet. Above that, requests that need more fail, after all that is idle was tried.
/// What it holds already it keeps. 1 is no limit; what is not between 0 and 1 changes nothing, and `stitch_last_error` says so.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_torch_memory_fraction(fraction: f64, device: c_int) {
    guarded((), || process::set_fraction(device, fraction));
}

/// For `set_base_alloc_fn`: where the allocation begins that has the byte at `ptr`, and its bytes to `size` unless that is NULL. NULL, and 0, where there is none.
///
/// # Safety
///
/// `size` is NULL, or has room for its number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_torch_base_alloc(ptr: *mut c_void, size: *mut usize) -> *mut c_void {
    let block = stitch_block_of(ptr);
    // SAFETY: as the caller says; it is nobody else's while this runs.
    if let Some(size) = unsafe { size.as_mut() } {
        *size = block.size;
    }
    block.address
}

/// For `set_record_stream_fn`: `stitch_record_stream`.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    stitch_record_stream(ptr, stream);
}

/// For `set_begin_allocate_to_pool`: a capture begins, or a program uses a pool of its own. What is allocated from now on, on streams that `filter` accepts in the thread that asks, comes from memory that serves this pool alone. It stays
/// at its addresses, and what is freed in it is reused in it only, until the pool is released.
///
/// `filter` is a `std::function<bool(cudaStream_t)>` of libstdc++, by value as C++ passes it, which is a pointer; NULL accepts every stream. It is copied. From `stitch_malloc` it is called without a way to raise;
/// from `stitch_torch_malloc` what it raises is passed on.
///
/// While any pool is open nothing of the process waits for the device or asks about events, as a capture would break: frees that wait for other streams (`stitch_record_stream`, and frees on another stream than the allocation's) wait until the last pool is ended.
///
/// # Safety
///
/// `filter` is NULL or such an object, which lives until this returns; what it refers to lives until the pool is ended.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn stitch_torch_begin_allocate_to_pool(
    device: c_int,
    pool: stitch_torch_pool_id,
    filter: *const c_void,
) {
    // SAFETY: as the caller says.
    let filter = unsafe { Filter::copy_of(filter) };
    guarded((), || captures::begin(device, pool.into(), filter));
}

/// For `set_end_allocate_to_pool_fn`: what is allocated from now on goes where it went before. A pool that is not open changes nothing, and `stitch_last_error` says so.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_torch_end_allocate_to_pool(device: c_int, pool: stitch_torch_pool_id) {
    guarded((), || captures::end(device, pool.into()));
}

/// For `set_release_pool`: the graph is gone. Once a pool has been released as often as it was begun, and nothing in it is live any more, its memory goes back to the daemon.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_torch_release_pool(device: c_int, pool: stitch_torch_pool_id) {
    guarded((), || captures::release(device, pool.into()));
}

/// Does not come back where PyTorch is.
#[cold]
fn raise_out_of_memory() {
    // SAFETY: never NULL, ends in NUL, and nobody on this thread fails before it is copied.
    let why = unsafe { CStr::from_ptr(stitch_last_error()) };
    let is_lack = LACKED.get();
    let begin = if is_lack { OUT_OF_MEMORY } else { NO_MEMORY };
    let text = CString::new(format!("{begin} stitchd: {}", why.to_string_lossy())).unwrap_or_default();
    raise::no_memory(&text, is_lack);
}
