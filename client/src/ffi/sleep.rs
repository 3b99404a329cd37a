//! Sleep and wake: memory that goes back to the daemon while its addresses stay.

#![expect(unsafe_code, reason = "exports C symbols")]

use std::ffi::{c_char, c_int};
use std::time::Duration;

use super::{guarded, text};
use crate::tags::{self, Keep};

/// For `stitch_sleep`: contents are kept or not as `stitch_tag_push` said; those of memory without a tag are.
pub const STITCH_KEEP_AS_TAGGED: c_int = -1;
/// Contents are gone.
pub const STITCH_KEEP_NOTHING: c_int = 0;
/// Contents are kept in this process's memory.
pub const STITCH_KEEP_CONTENTS: c_int = 1;

/// What this thread allocates from now on is under `tag`, until `stitch_tag_pop`: it lies apart, and can be put to sleep without the rest. With `keep` not 0 its contents are kept when it sleeps. Tags can be inside each other; the innermost counts. Each has
/// pools of its own, so a process should have few.
///
/// 0, or -1: then `stitch_last_error` says why, and nothing is to be popped.
///
/// # Safety
///
/// `tag` ends in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_tag_push(tag: *const c_char, keep: c_int) -> c_int {
    guarded(-1, || {
        // SAFETY: as the caller says.
        let name = unsafe { text(tag, "a tag") }?.ok_or("a tag has a name")?;
        tags::push(&name, keep != 0).map(|()| 0)
    })
}

/// This thread leaves the tag that it pushed last. Where it is under none nothing changes, and `stitch_last_error` says so.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_tag_pop() {
    guarded((), tags::pop);
}

/// Gives all memory of this process under `tag`, or with NULL all there is, back to the daemon, once the devices have done what is queued. Addresses stay; what is touched before `stitch_wake` is not there, and what is asked for
/// meanwhile is refused. Contents of live allocations are kept in this process's memory, or are gone, as `keep` says (STITCH_KEEP_...). Nobody may use the memory while this runs.
///
/// What sleeps already sleeps on. 0 and in `freed`, unless that is NULL, how many bytes of device memory went back; or -1: then `stitch_last_error` says why, and what was asleep by then is.
///
/// Fails while a graph is captured; without a daemon; and on devices whose memory returns with its addresses only.
///
/// # Safety
///
/// `tag` is NULL, or ends in NUL; `freed` is NULL, or aligned and nobody else's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_sleep(tag: *const c_char, keep: c_int, freed: *mut usize) -> c_int {
    let done = guarded(None, || {
        let keep = match keep {
            STITCH_KEEP_NOTHING => Keep::Nothing,
            STITCH_KEEP_CONTENTS => Keep::Contents,
            _ => Keep::AsTagged,
        };
        // SAFETY: as the caller says.
        tags::sleep(unsafe { text(tag, "a tag") }?.as_deref(), keep).map(Some)
    });
    let Some(bytes) = done else { return -1 };
    if !freed.is_null() {
        // SAFETY: as the caller says.
        unsafe { freed.write(bytes.get() as usize) };
    }
    0
}

/// Gets memory again for what sleeps under `tag`, or with NULL for all that does, and puts it where it was, with the contents that were kept; what was not kept is undefined, and never another process's. Waits its turn for memory that others have, for `wait_ms`
/// milliseconds at most.
///
/// What is awake stays so. 0, or -1: then `stitch_last_error` says why, with who has the memory, and what is not awake by then sleeps on and can be woken later.
///
/// # Safety
///
/// `tag` is NULL, or ends in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_wake(tag: *const c_char, wait_ms: u64) -> c_int {
    guarded(-1, || {
        // SAFETY: as the caller says.
        tags::wake(unsafe { text(tag, "a tag") }?.as_deref(), Duration::from_millis(wait_ms)).map(|_| 0)
    })
}
