//! The C border. Every function checks its arguments, catches whatever would unwind, converts, and does nothing else. Nothing is printed, nothing aborts, nothing
//! exits.

#![expect(unsafe_code, reason = "exports C symbols")]

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::time::Duration;

use stitchd::context::{self, Pushed};
use stitchd::error::chain;
use stitchd::ids::StreamId;
use stitchd::pool::Request;
use stitchd::runtime::{ManifestError, NotLive, PrivatePoolId};
use stitchd::session::fork;
use stitchd::trace::Phase;
use stitchd::units::{Bytes, DeviceAddress};

use crate::admission;
use crate::captures;
use crate::process;
use crate::tags;

pub mod blocks;
pub(crate) mod filter;
mod raise;
pub mod share;
pub mod sleep;
pub mod statistics;
pub mod torch;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// The last request of this thread that failed did so for want of memory.
    static LACKED: Cell<bool> = const { Cell::new(false) };
}

static QUIET: Once = Once::new();

/// Allocates `size` bytes on `device`, to be used on `stream` first. The device is the process's own ordinal, as the vendor's library counts in it.
///
/// The address is aligned to 512 bytes. Opens a session with the daemon at the first call; after that most calls take tens of nanoseconds, do not leave the
/// process, and take no lock that another process can hold. May be called from any thread, and not from a signal handler; a signal that comes during a call changes nothing.
///
/// Returns NULL when size is 0, which is no failure, and when it fails: then `stitch_last_error` says why. Where memory has run out it says who holds what: this process, and the daemon's other sessions.
///
/// Without a daemon every call fails, at most once a second after a try to find one. With STITCHD_WITHOUT_DAEMON=private in its environment the process takes memory itself instead, with the same behaviour otherwise, from then on
/// until it ends, and `stitch_last_error` says so once; STITCHD_DRIVER names the driver then. A daemon that goes away leaves the process with what it has; what needs more waits for the next daemon, as long as it would for memory, and fails then.
///
/// In a child of fork (without exec) every call fails, and frees do nothing. What is live when the process ends, however it ends, goes back to the daemon.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    serve(size, device, stream, captures::pool_for(device, stream))
}

/// Serves a request, from a private pool where one is named. Never unwinds.
#[inline]
fn serve(size: usize, device: c_int, stream: *mut c_void, pool: Option<PrivatePoolId>) -> *mut c_void {
    guarded(std::ptr::null_mut(), || {
        if size == 0 {
            return Ok(std::ptr::null_mut());
        }
        LACKED.set(false);
        // A capture's memory is the device's own, whatever tag the thread is under.
        let runtime = if pool.is_some() { process::runtime(device)? } else { tags::runtime(device)? };
        let here = context::here();
        let request = Request {
            bytes: Bytes::new(size as u64),
            stream: StreamId(stream.addr() as u64),
            thread: context::thread(),
            context: here.key,
            is_dynamic: here.is_dynamic,
        };
        let served = match pool {
            None => runtime.alloc(&request),
            Some(pool) => runtime.alloc_private(pool, &request),
        };
        let address = served.map_err(|error| {
            LACKED.set(error.is_lack());
            chain(&error)
        })?;
        Ok(std::ptr::with_exposed_provenance_mut(address.get() as usize))
    })
}

/// Gives back what `stitch_malloc` returned, with the same size and device. `stream` is the one that used it last: where that is not the one it was allocated for, its bytes are not reused before that has passed the free, as if it had been
/// recorded by `stitch_record_stream`. Only a stitched block, of a job without a plan, is for `stream` at once, which must be behind all that was queued on the block's own stream.
///
/// NULL, and anything that is not a live allocation (freed before, of somebody else, not the first byte of one), changes nothing; for the latter `stitch_last_error` says so.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_free(ptr: *mut c_void, size: usize, device: c_int, stream: *mut c_void) {
    let _ = size;
    guarded((), || {
        // In a forked child there is nothing to free: the memory is its parent's.
        if ptr.is_null() || fork::is_child() {
            return Ok(());
        }
        let address = DeviceAddress::new(ptr.expose_provenance() as u64);
        let freed = match process::existing(device) {
            Some(runtime) => runtime.free(address, StreamId(stream.addr() as u64)),
            None => Err(NotLive(address)),
        };
        let freed = freed.or_else(|_| tags::free(device, address, StreamId(stream.addr() as u64)));
        freed.map_err(|error| error.to_string())
    });
}

/// Does now what the first allocation would: opens the session with the daemon and reads the plan that STITCHD_PLAN names, and sets `device` up unless that is negative. For whoever has to know before the job begins whether there is a
/// daemon, and may go another way.
///
/// Returns 0, or -1 when it fails: then `stitch_last_error` says why. It may be called again; what is there already stays.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_open(device: c_int) -> c_int {
    guarded(-1, || process::open(device).map(|()| 0))
}

/// Whose memory this process has: the name of the driver of its daemon, or of its own without one; empty as long as there is no session. Memory of the driver `host` is the machine's and not a GPU's.
///
/// Never NULL, and good for ever.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_driver() -> *const c_char {
    static NAME: std::sync::OnceLock<CString> = std::sync::OnceLock::new();
    let name = guarded(None, || Ok(process::driver_name()));
    name.map_or(c"".as_ptr(), |name| NAME.get_or_init(|| CString::new(name).unwrap_or_default()).as_ptr())
}

/// `stream` uses the allocation at `ptr`, too: once it is freed its bytes are not reused before `stream` has passed the free. To be called before the free, by whoever queues work on a stream other than the one it
/// was allocated for.
///
/// NULL, and anything that is not a live allocation of this process, changes nothing and is no failure.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_record_stream(ptr: *const c_void, stream: *mut c_void) {
    guarded((), || {
        if !ptr.is_null() {
            let address = DeviceAddress::new(ptr.expose_provenance() as u64);
            process::each(|runtime| runtime.record_stream(address, StreamId(stream.addr() as u64)));
        }
        Ok(())
    });
}

/// Phases of an iteration, for `stitch_context_push`: before the first step.
pub const STITCH_PHASE_INIT: c_int = 0;
/// Forward pass.
pub const STITCH_PHASE_FORWARD: c_int = 1;
/// Backward pass.
pub const STITCH_PHASE_BACKWARD: c_int = 2;
/// Forward pass made again for the backward pass.
pub const STITCH_PHASE_RECOMPUTE: c_int = 3;
/// Optimizer step.
pub const STITCH_PHASE_OPTIMIZER: c_int = 4;
/// Anything else.
pub const STITCH_PHASE_OTHER: c_int = 5;

/// This thread goes into a part of its job, until `stitch_context_pop`: what it allocates from now on is from there, for plans and recordings. Contexts lie inside each other, and the innermost counts
/// alone: what it leaves open is not taken from those around it. Every thread has its own.
///
/// `phase` is one of `STITCH_PHASE_`, and any other number is `STITCH_PHASE_OTHER`. `microbatch` and `chunk` (of the model, in a virtual pipeline) count from 0; -1 is none. `module` is a name in UTF-8,
/// which is copied, or NULL for none. `dynamic` is not 0 where the sizes of what is asked for vary from iteration to iteration: no plan has that.
///
/// Takes tens of nanoseconds where the thread was in the same context before, and may be called before the first allocation. More than 256 contexts inside each other count as the innermost of these, and
/// `stitch_last_error` says so; each needs its pop all the same.
///
/// # Safety
///
/// `module` is NULL, or ends in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_context_push(
    phase: c_int,
    microbatch: c_int,
    chunk: c_int,
    module: *const c_char,
    dynamic: c_int,
) {
    guarded((), || {
        // A child allocates nothing, and somebody may have had its locks when it was forked.
        if fork::is_child() {
            return Ok(());
        }
        // SAFETY: it is not NULL, so the caller says that it ends in NUL; it is not kept.
        let module = if module.is_null() { c"" } else { unsafe { CStr::from_ptr(module) } };
        let module = module.to_string_lossy();
        let phase = usize::try_from(phase).ok().and_then(|phase| Phase::ALL.get(phase));
        let pushed = Pushed {
            phase: phase.map_or(Phase::Other, |(_, phase)| *phase),
            microbatch: u32::try_from(microbatch).ok(),
            chunk: u32::try_from(chunk).ok(),
            module: &module,
            is_dynamic: dynamic != 0,
        };
        context::push(&pushed).map_err(|error| error.to_string())
    });
}

/// This thread leaves the context that it pushed last. Where none is left nothing changes, and `stitch_last_error` says so.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_context_pop() {
    guarded((), || {
        if fork::is_child() {
            return Ok(());
        }
        context::pop().map_err(|error| error.to_string())
    });
}

/// An iteration of the job ends on `device`, or with -1 on every device that the process has allocated on: what is asked for from now on is of the next. Frees of what is still live may come in any later one.
///
/// May be called from any thread; one call for each iteration, whichever thread makes it. A device on which nothing was allocated yet has no iterations, and nothing changes. Of a number that no device
/// has `stitch_last_error` says so.
///
/// Where STITCHD_ADMIT says how long, this waits until what the next iteration needs at its peak is guaranteed: what its plan has, or what the last iteration held. One that is not admitted in time begins all the same; `stitch_last_error`
/// says why, and `iterations_refused` of `stitch_counters` counts it. Each that follows one waits half as long, until one is admitted. A process on several devices marks all at once: two that mark theirs one by one may wait for each other.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_iteration_mark(device: c_int) {
    guarded((), || process::mark_iteration(device));
}

/// Has this process guaranteed `size` bytes of a device, in place of what it is guaranteed: what it holds up to there comes when it asks. 0 gives the guarantee up. Waits up to `wait_ms` milliseconds for the guarantees of others to
/// end. Sets the device up if that is not done yet.
///
/// Where STITCHD_ADMIT has iterations wait for their peaks, this is the least that stays guaranteed between them; what one is admitted with stays until it ends.
///
/// 0, or -1: then `stitch_last_error` says why, with who is guaranteed what, and nothing has changed. More than its tenant may have is refused; so is all where there is no daemon.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_guarantee(device: c_int, size: usize, wait_ms: u64) -> c_int {
    guarded(-1, || admission::guarantee(device, Bytes::new(size as u64), Duration::from_millis(wait_ms)).map(|()| 0))
}

/// A part of an allocation that lies in one chunk of physical memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct stitch_piece {
    /// Where it is visible.
    pub address: *mut c_void,
    /// Its bytes.
    pub size: usize,
    /// Where it begins in the chunk, in bytes.
    pub offset: usize,
    /// The chunk, as the driver calls it (CUmemGenericAllocationHandle, hipMemGenericAllocationHandle_t). Good as long as the allocation lives; whoever needs it
    /// longer exports or retains it.
    pub handle: u64,
}

/// What an allocation of `stitch_malloc` is made of, in the order of addresses, to the end of its block, which is whole chunks for large ones: for libraries that register memory with network cards, or open it in other
/// processes, and would see the first chunk only.
///
/// What a live allocation is made of does not change, whatever else this process allocates, frees, stitches or trims: a registration holds until the
/// allocation is freed. The next one may have the same address and other chunks: it is asked for, and registered, anew. cuIpcGetMemHandle fails for memory
/// that is mapped (VMM), and so for this; the pieces are what can be passed on.
///
/// Writes up to `capacity` pieces to `pieces`, which may be NULL where capacity is 0, and returns how many there are; 0 when it fails: then
/// `stitch_last_error` says why.
///
/// # Safety
///
/// `pieces` is aligned for a `stitch_piece` and has room for `capacity` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_range_manifest(
    ptr: *const c_void,
    device: c_int,
    pieces: *mut stitch_piece,
    capacity: usize,
) -> usize {
    guarded(0, || {
        let address = DeviceAddress::new(ptr.expose_provenance() as u64);
        let runtimes = if ptr.is_null() { Vec::new() } else { process::of_device(device) };
        let is_here = |found: &Result<_, ManifestError>| !matches!(found, Err(ManifestError::NotLive(_)));
        let manifest = runtimes.into_iter().map(|runtime| runtime.manifest(address)).find(is_here);
        let manifest = manifest.unwrap_or_else(|| Err(NotLive(address).into())).map_err(|error| chain(&error))?;
        let written = manifest.iter().map(|piece| stitch_piece {
            address: std::ptr::with_exposed_provenance_mut(piece.span.start().get() as usize),
            size: piece.span.len().get() as usize,
            offset: piece.offset.get() as usize,
            handle: piece.handle,
        });
        // SAFETY: as the caller says.
        unsafe { put_all(written, pieces, capacity) };
        Ok(manifest.len())
    })
}

/// Writes as many as there is room for, to nowhere if that is NULL.
///
/// # Safety
///
/// `place` is NULL, or aligned and has room for `capacity` of them, and nobody else uses it meanwhile.
unsafe fn put_all<T>(written: impl Iterator<Item = T>, place: *mut T, capacity: usize) {
    for (at, one) in written.enumerate().take(if place.is_null() { 0 } else { capacity }) {
        // SAFETY: `at` is below `capacity`, for which the caller has room.
        let place = unsafe { place.add(at) };
        // SAFETY: the place is the caller's, and nobody else's while this runs.
        unsafe { place.write(one) };
    }
}

/// A copy of a caller's text, which is `what`; none for NULL.
///
/// # Safety
///
/// `text` is NULL, or ends in NUL.
unsafe fn text(text: *const c_char, what: &str) -> Result<Option<String>, String> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it is not NULL, so the caller says that it ends in NUL; it is copied.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(|text| Some(text.to_owned())).map_err(|_| format!("{what} is UTF-8"))
}

/// Why the last call of this thread failed, as text in UTF-8; empty if none has failed yet.
///
/// Never NULL. Good until this thread's next failure.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_last_error() -> *const c_char {
    // At the very end of a thread there is no last error any more.
    LAST_ERROR.try_with(|error| error.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs one call of the border: an error or a panic becomes `failed` and this thread's last error.
fn guarded<T>(failed: T, call: impl FnOnce() -> Result<T, String>) -> T {
    QUIET.call_once(keep_panics_quiet);
    let was_inside = INSIDE.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(call));
    INSIDE.set(was_inside);
    match outcome {
        Ok(Ok(value)) => value,
        Ok(Err(why)) => {
            note(&why);
            failed
        }
        Err(panic) => {
            let text =
                panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
            note(&format!("this is a bug in stitchd: {}", text.unwrap_or("a panic without words")));
            failed
        }
    }
}

/// Sets this thread's last error.
pub(crate) fn note(why: &str) {
    // A NUL inside would end the text for C.
    let text = CString::new(why.replace('\0', " ")).unwrap_or_default();
    // At the very end of a thread there is nobody who could ask.
    let _ = LAST_ERROR.try_with(|error| error.replace(text));
}

/// Panics inside the border are told by [`stitch_last_error`], and those of this library's own threads by what they do not do any more; neither on standard error, which is the job's. The hook is this
/// library's own: it has its own copy of the standard library.
fn keep_panics_quiet() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !INSIDE.get() && !is_own_thread() {
            usual(panic);
        }
    }));
}

/// Whether this thread was begun by the library, which names each of its own so.
fn is_own_thread() -> bool {
    std::thread::current().name().is_some_and(|name| name.starts_with("stitchd-"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last_error() -> String {
        // SAFETY: the border never gives NULL, and the text ends in NUL.
        unsafe { CStr::from_ptr(stitch_last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn nothing_and_nonsense_are_answered_quietly() {
        assert!(stitch_malloc(0, 0, std::ptr::null_mut()).is_null());
        assert_eq!(last_error(), "");
        stitch_free(std::ptr::null_mut(), 0, 0, std::ptr::null_mut());
        stitch_free(std::ptr::without_provenance_mut(4096), 1, -1, std::ptr::null_mut());
        // SAFETY: there is no room, and it is said so.
        assert_eq!(unsafe { stitch_range_manifest(std::ptr::without_provenance(4096), 0, std::ptr::null_mut(), 9) }, 0);
        assert!(last_error().contains("not a live allocation"), "{}", last_error());
        assert!(stitch_malloc(1, -1, std::ptr::null_mut()).is_null());
        assert!(last_error().contains("device -1"), "{}", last_error());
        assert!(stitch_malloc(1, 1000, std::ptr::null_mut()).is_null());
    }

    #[test]
    fn threads_of_the_library_panic_quietly_and_those_of_the_job_as_they_did() {
        let (tell, told) = std::sync::mpsc::channel();
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |_| {
            let thread = std::thread::current();
            if let Some(name @ ("stitchd-control" | "stitchd-open" | "a thread of the job")) = thread.name() {
                tell.send(name.to_owned()).unwrap();
            }
        }));
        keep_panics_quiet();
        for name in ["stitchd-control", "stitchd-open", "a thread of the job"] {
            let thread = std::thread::Builder::new().name(name.into()).spawn(|| panic!("on purpose")).unwrap();
            thread.join().unwrap_err();
        }
        std::panic::set_hook(usual);
        assert_eq!(told.try_iter().collect::<Vec<_>>(), ["a thread of the job"]);
    }

    #[test]
    fn a_panic_becomes_an_error_text() {
        let answer = guarded(7, || -> Result<i32, String> { panic!("out of \0 luck") });
        assert_eq!(answer, 7);
        assert_eq!(last_error(), "this is a bug in stitchd: out of   luck");
    }
}
