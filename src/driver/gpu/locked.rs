//! Memory of this process that the library has locked where it is: a device copies to and from it without the processor in between.

#![expect(unsafe_code, reason = "looks at memory that a C library gave")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::table::{Called, Table, code};
use crate::driver::HostMemory;

/// So many bytes of it, until this goes.
#[derive(Debug)]
pub(super) struct Locked {
    table: Arc<Table>,
    /// The context or device that it was made for: giving it back is a call for that.
    current: u64,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is this value's alone, as a Vec's is its own; the library's calls may be made from any thread.
unsafe impl Send for Locked {}
// SAFETY: as above; nobody writes through a shared reference.
unsafe impl Sync for Locked {}

impl Locked {
    /// For a thread that has made `current` its own.
    pub(super) fn new(table: &Arc<Table>, current: u64, len: usize) -> Called<Locked> {
        let at = NonNull::new(table.host_alloc(len)?.cast()).ok_or(code::OUT_OF_MEMORY)?;
        Ok(Locked { table: Arc::clone(table), current, at, len })
    }
}

impl HostMemory for Locked {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the library gave so many bytes, which are its caller's until they are given back; what is in them came from outside of this program, and is some bytes.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has a reference.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    fn is_locked(&self) -> bool {
        true
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let before = self.table.current();
        // At the end of a process the library may be gone already; then so is the memory.
        let _ = self.table.set_current(self.current);
        let _ = self.table.host_free(self.at.as_ptr().cast::<c_void>());
        if let Ok(before) = before {
            let _ = self.table.set_current(before);
        }
    }
}
