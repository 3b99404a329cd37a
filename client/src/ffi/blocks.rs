//! Questions about live allocations, by any address in them.

#![expect(unsafe_code, reason = "exports C symbols")]

use std::ffi::{c_int, c_void};

use stitchd::pool::Found;
use stitchd::runtime::{Candidate, Runtime};
use stitchd::units::{Bytes, DeviceAddress};

use super::{guarded, put_all};
use crate::process;

/// A live allocation, and what is free beside it in its range of addresses.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct stitch_block {
    /// Where it begins; NULL for none.
    pub address: *mut c_void,
    /// Bytes that it occupies, which may be some more than were asked for.
    pub size: usize,
    /// Free bytes right before it.
    pub before: usize,
    /// Free bytes right behind it.
    pub after: usize,
}

/// Free bytes on both sides of an allocation.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct stitch_free_bytes {
    /// Right before it.
    pub before: usize,
    /// Right behind it.
    pub after: usize,
}

const NONE: stitch_block = stitch_block { address: std::ptr::null_mut(), size: 0, before: 0, after: 0 };

impl From<Found> for stitch_block {
    fn from(found: Found) -> stitch_block {
        stitch_block {
            address: std::ptr::with_exposed_provenance_mut(found.span.start().get() as usize),
            size: found.span.len().get() as usize,
            before: found.before.get() as usize,
            after: found.after.get() as usize,
        }
    }
}

/// The live allocation that has the byte at `ptr`, wherever in it that is. Its address is NULL where none of this process has it, which is no failure.
///
/// Goes over the allocations that lie side by side before `ptr`, or over all of the pool where stitched
/// ones lie between. In the static pool of a plan the time grows with what the plan has in the 2 MiB
/// around `ptr`, and the first question of a process goes over the plan once.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_block_of(ptr: *const c_void) -> stitch_block {
    guarded(NONE, || Ok(find(ptr).map_or(NONE, stitch_block::from)))
}

/// The bytes that are free right before and right behind the allocation that has the byte at `ptr`: by so much it could grow if it were alone, and so much would be contiguous with it once it is freed. What is free may be for another
/// stream, or planned for somebody. A stitched block's addresses are its own, and nothing is free beside it. 0 and 0 where there is no such allocation.
///
/// Takes as long as `stitch_block_of`; what is free is found in steps as many as the logarithm of the number of free pieces, or one step for each idle block or empty 2 MiB beside it.
#[unsafe(no_mangle)]
pub extern "C" fn stitch_adjacent_free_bytes(ptr: *const c_void) -> stitch_free_bytes {
    let stitch_block { before, after, .. } = stitch_block_of(ptr);
    stitch_free_bytes { before, after }
}

/// Live allocations of a device, ranked by what would be contiguous without them, their own bytes and what is free beside them: first those that would make room for `bytes`, the least room first, then the others, the most
/// room first. For whoever can give memory up and chooses what.
///
/// Writes up to `capacity` of them to `candidates`, which may be NULL where capacity is 0, and returns how many there are. Takes time proportional to all blocks, and other threads wait for it.
///
/// # Safety
///
/// `candidates` is aligned for a `stitch_block` and has room for `capacity` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stitch_release_candidates(
    bytes: usize,
    device: c_int,
    candidates: *mut stitch_block,
    capacity: usize,
) -> usize {
    guarded(0, || {
        let wanted = Bytes::new(bytes as u64);
        let of_each = process::of_device(device).into_iter().map(|runtime| runtime.release_candidates(wanted));
        let mut ranked: Vec<Candidate> = of_each.flatten().collect();
        Candidate::rank(&mut ranked, wanted);
        let written = ranked.iter().map(|candidate| candidate.found.into());
        // SAFETY: as the caller says.
        unsafe { put_all(written, candidates, capacity) };
        Ok(ranked.len())
    })
}

/// The allocation of whichever device has the address: no two devices of a process have the same.
pub(super) fn find(ptr: *const c_void) -> Option<Found> {
    if ptr.is_null() {
        return None;
    }
    let address = DeviceAddress::new(ptr.expose_provenance() as u64);
    let mut found = None;
    process::each(|runtime: &Runtime| found = found.or_else(|| runtime.block_of(address)));
    found
}
