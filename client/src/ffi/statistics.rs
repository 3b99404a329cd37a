//! Statistics and snapshots for C: PyTorch's names and shapes, as text.

#![expect(unsafe_code, reason = "exports C symbols")]

use std::ffi::{CStr, c_char, c_int};
use std::fmt::{Display, Write as _};

use stitchd::runtime::{Block, BlockState, Counter, MemoryStatistics, PrivatePoolId, Runtime, Segment, SegmentPool};
use stitchd::units::Bytes;

use super::guarded;
use crate::process;

/// The statistics of a device as one JSON object, flat, under the names of `torch.cuda.memory_stats` and with their meanings: `"allocated_bytes.all.current"`, `"reserved_bytes.all.peak"`, `"num_ooms"` and so on. All nine figures are there of
/// `.all`, `.small_pool` and `.large_pool`, with `.current`, `.peak`, `.allocated` and `.freed`; one pool serves all sizes, so everything is large. An allocation that was freed and waits for other streams
/// is active and not allocated, but for the peaks, which are those of `active` for both. The peaks of `allocation` and `active` are the most that this function has told: a count at every allocation would cost more than it says.
/// So is what is said of `inactive_split`, with all that came and went there.
///
/// Writes at most `capacity` bytes to `text`, a NUL at the end among them, and returns how many the whole text has without its NUL: one that is cut is asked for again with more room. `text` may be NULL where capacity is 0.
/// A device that nothing was allocated on has an empty object. What is under tags is counted with the rest; its peaks are added to the others', whenever they were.
///
/// # Safety
///
/// `text` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_memory_stats(device: c_int, text: *mut c_char, capacity: usize) -> usize {
    guarded(0, || {
        let figures = statistics_of(device).unwrap_or_default();
        let written = object_of(figures.iter());
        // SAFETY: as the caller says.
        unsafe { put(&written, text, capacity) };
        Ok(written.len())
    })
}

/// How much memory this process may have on a device, as `cudaMemGetInfo` says it of the device: `total` is the most that it may hold there (the daemon's budget, the session's limit or the process's own, whichever is least), `unused` what it
/// could get beside what it holds now. What the process holds and does not use is not in `unused`. Sets the device up if that is not done yet, and asks the daemon: a round trip.
///
/// Returns 0, or -1 when it fails: then nothing is written, and `stitch_last_error` says why.
///
/// # Safety
///
/// Both pointers have room for their number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_memory_info(device: c_int, unused: *mut usize, total: *mut usize) -> c_int {
    guarded(-1, || {
        if unused.is_null() || total.is_null() {
            return Err("NULL has no room for a number".to_owned());
        }
        let room = process::room(device)?;
        // SAFETY: not NULL, and as the caller says.
        unsafe { unused.write(room.free.get() as usize) };
        // SAFETY: as above.
        unsafe { total.write(room.most.get() as usize) };
        Ok(0)
    })
}

/// What the runtime of a device counts as one JSON object: the names and meanings that `stitchd sessions --json` has under `counters`, of this device alone. Among them what served requests (`requests_planned` and so on), `deviations_` from the
/// plan by kind, `peak_live_bytes` and `peak_held_bytes`. What is under tags is added, peaks as high as they were whenever that was; `iterations` and what is said of admissions are of the memory without a tag.
///
/// `text` and the result are as for `stitch_memory_stats`.
///
/// # Safety
///
/// `text` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_counters(device: c_int, text: *mut c_char, capacity: usize) -> usize {
    guarded(0, || {
        let written = counters_of(&process::of_device(device));
        // SAFETY: as the caller says.
        unsafe { put(&written, text, capacity) };
        Ok(written.len())
    })
}

fn counters_of(runtimes: &[&Runtime]) -> String {
    let value = |counter: Counter| {
        let each = runtimes.iter().map(|runtime| runtime.counters().get(counter));
        each.fold(0, |one, other| counter.both(one, other))
    };
    let counters: &[_] = if runtimes.is_empty() { &[] } else { Counter::ALL };
    object_of(counters.iter().map(|(name, counter)| (*name, value(*counter))))
}

/// Those of all runtimes of a device, if there is one.
fn statistics_of(device: c_int) -> Option<MemoryStatistics> {
    let each = process::of_device(device).into_iter().map(Runtime::memory_statistics);
    each.reduce(|one, other| one.and(&other))
}

/// Figures by their names as a flat JSON object.
fn object_of<N: Display, V: Display>(figures: impl Iterator<Item = (N, V)>) -> String {
    let figures: Vec<String> = figures.map(|(name, value)| format!("\"{name}\":{value}")).collect();
    format!("{{{}}}", figures.join(","))
}

/// One of the statistics of a device by its name, as in `stitch_memory_stats`: -1 where there is no such name, and 0 where nothing was allocated yet.
///
/// # Safety
///
/// `name` ends in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_memory_stat(device: c_int, name: *const c_char) -> i64 {
    guarded(-1, || {
        if name.is_null() {
            return Err("NULL is no name of a figure".to_owned());
        }
        // SAFETY: it is not NULL, and ends in NUL, as the caller says.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let Some(figures) = statistics_of(device) else { return Ok(0) };
        let value = figures.get(&name);
        // It is somebody else's text.
        value.ok_or_else(|| format!("there is no figure '{}'", stitchd::error::excerpt(&name, 80)))
    })
}

/// Peaks of a device are counted anew from now on, as by `torch.cuda.reset_peak_memory_stats`. So are those that the daemon shows for this process.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_reset_peak_memory_stats(device: c_int) {
    guarded((), || {
        process::of_device(device).into_iter().for_each(Runtime::reset_peaks);
        Ok(())
    });
}

/// What was `allocated` and `freed` so far, and what was counted, is counted anew from now on, as by `torch.cuda.reset_accumulated_memory_stats`.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_reset_accumulated_memory_stats(device: c_int) {
    guarded((), || {
        process::of_device(device).into_iter().for_each(Runtime::reset_accumulated);
        Ok(())
    });
}

/// All memory of a device that this process holds, and what lies where in it, as a JSON list of segments with the keys of `torch.cuda.memory_snapshot()`, by address. Segments are contiguous and mapped.
///
/// Beside PyTorch's keys each has `pool`: `planned`, `pool`, `private`, or `stitched`, and `is_stitched`. One that is stitched is a live allocation at addresses of its own; its memory is that of other segments, whose blocks are
/// `inactive` with `"shown": true`. So the sizes of all others together are what is reserved, and active blocks are counted once.
///
/// `text` and the result are as for `stitch_memory_stats`. What other threads do between two calls may make it longer. Takes time proportional to all blocks, and other threads wait for it.
///
/// # Safety
///
/// `text` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_memory_snapshot(device: c_int, text: *mut c_char, capacity: usize) -> usize {
    guarded(0, || {
        let mut segments: Vec<Segment> = process::of_device(device).into_iter().flat_map(Runtime::segments).collect();
        segments.sort_by_key(|segment| segment.span.start());
        let segments: Vec<String> = segments.iter().map(|segment| segment_of(device, segment)).collect();
        let written = format!("[{}]", segments.join(","));
        // SAFETY: as the caller says.
        unsafe { put(&written, text, capacity) };
        Ok(written.len())
    })
}

fn segment_of(device: c_int, segment: &Segment) -> String {
    let (pool, id) = match segment.pool {
        SegmentPool::Planned => ("planned", PrivatePoolId(0, 0)),
        SegmentPool::Pool => ("pool", PrivatePoolId(0, 0)),
        SegmentPool::Stitched => ("stitched", PrivatePoolId(0, 0)),
        SegmentPool::Private(id) => ("private", id),
    };
    let sum = |counts: fn(&Block) -> bool, of: fn(&Block) -> Bytes| {
        segment.blocks.iter().filter(|block| counts(block)).map(of).sum::<Bytes>().get()
    };
    let is_live = |block: &Block| block.state == BlockState::Live;
    let is_active = |block: &Block| matches!(block.state, BlockState::Live | BlockState::Waiting);
    let mut text = String::new();
    // Infallible: writing to a String.
    let _ = write!(
        text,
        "{{\"device\":{device},\"address\":{},\"total_size\":{},\"allocated_size\":{},\"active_size\":{},\
         \"requested_size\":{},\"stream\":{},\"segment_type\":\"large\",\"segment_pool_id\":[{},{}],\
         \"is_expandable\":false,\"frames\":[],\"pool\":\"{pool}\",\"is_stitched\":{},\"blocks\":[{}]}}",
        segment.span.start().get(),
        segment.span.len().get(),
        sum(is_live, |block| block.span.len()),
        sum(is_active, |block| block.span.len()),
        sum(is_active, |block| block.requested),
        segment.stream.0,
        id.0,
        id.1,
        segment.is_stitched,
        segment.blocks.iter().map(block_of).collect::<Vec<_>>().join(","),
    );
    text
}

fn block_of(block: &Block) -> String {
    let (state, more) = match block.state {
        BlockState::Live => ("active_allocated", ""),
        BlockState::Waiting => ("active_pending_free", ""),
        BlockState::Free => ("inactive", ""),
        BlockState::Shown => ("inactive", ",\"shown\":true"),
    };
    let (address, size, requested) = (block.span.start().get(), block.span.len().get(), block.requested.get());
    format!(
        "{{\"address\":{address},\"size\":{size},\"requested_size\":{requested},\"state\":\"{state}\",\"frames\":[]{more}}}"
    )
}

/// Writes a text for C, cut where there is no room for it.
///
/// # Safety
///
/// `place` has room for `capacity` bytes.
unsafe fn put(text: &str, place: *mut c_char, capacity: usize) {
    let Some(room) = capacity.checked_sub(1).filter(|_| !place.is_null()) else { return };
    let count = text.len().min(room);
    // SAFETY: both have so many bytes, and the text is ours.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast::<u8>(), count) };
    // SAFETY: it lies in the room, behind what was written.
    let end = unsafe { place.add(count) };
    // SAFETY: the place is the caller's, and nobody else's while this runs.
    unsafe { end.write(0) };
}
