//! Chunks of one process: made, let go of, passed on.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::process::{Process, Properties, State};
use crate::{Called, code};

/// A chunk, as one handle has it.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) file: File,
    /// Where its bytes are.
    pub(crate) home: usize,
    /// Where the library believes that they are: HIP's import asks the thread's current device and not the descriptor.
    pub(crate) device: usize,
    pub(crate) len: u64,
}

impl Process {
    /// A chunk.
    pub fn create(&self, len: u64, wanted: &Properties) -> Called<u64> {
        let device = self.seen(wanted.device)?;
        let mut state = self.begin("create", Some(device))?;
        let asks_for_fabric = wanted.handle_types == 9;
        let is_known = wanted.kind == 1 && (wanted.handle_types == 1 || asks_for_fabric) && wanted.location == 1;
        if !is_known || len == 0 || !len.is_multiple_of(self.machine().conf.granularity_of(device)) {
            return Err(code::INVALID_VALUE);
        }
        if wanted.rdma && !self.machine().conf.rdma {
            return Err(code::NOT_SUPPORTED);
        }
        if asks_for_fabric && !self.machine().conf.fabric {
            return Err(code::NOT_SUPPORTED);
        }
        if asks_for_fabric && !self.machine().conf.imex {
            self.machine().note("fabric-refused");
            return Err(code::NOT_PERMITTED);
        }
        if asks_for_fabric {
            self.machine().note("fabric-made");
        }
        let file = File::from(self.machine().create(device, len, wanted.rdma)?);
        self.keep(&mut state, file, (device, device), len)
    }

    fn keep(&self, state: &mut State, file: File, (home, device): (usize, usize), len: u64) -> Called<u64> {
        // Not the numbers that a caller would guess: they look like pointers.
        let handle = 0x7a00_0000_0000 | state.next() << 8;
        state.handles.insert(handle, Arc::new(Chunk { file, home, device, len }));
        Ok(handle)
    }

    /// The chunk behind a handle, or what the vendor says of one that is none.
    pub(crate) fn chunk<'a>(&self, state: &'a State, handle: u64) -> Called<&'a Arc<Chunk>> {
        let wrong = if self.has_contexts() { code::INVALID_VALUE } else { code::INVALID_HANDLE };
        state.handles.get(&handle).ok_or(wrong)
    }

    /// Lets go of a handle.
    pub fn release(&self, handle: u64) -> Called<()> {
        let mut state = self.begin("release", None)?;
        self.check(self.chunk(&state, handle)?.home)?;
        state.handles.remove(&handle);
        Ok(())
    }

    /// A new descriptor.
    pub fn export(&self, handle: u64, kind: u32, flags: u64) -> Called<OwnedFd> {
        let state = self.begin("export", None)?;
        let chunk = self.chunk(&state, handle)?;
        self.check(chunk.home)?;
        if kind != 1 || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        self.machine().export(chunk.file.as_fd())
    }

    /// A handle of what a descriptor is; the descriptor stays the caller's.
    pub fn import(&self, fd: BorrowedFd<'_>, kind: u32) -> Called<u64> {
        let mut state = self.begin("import", None)?;
        if kind != 1 {
            return Err(code::INVALID_VALUE);
        }
        // What CUDA's says of a descriptor that is no chunk's.
        let in_its_words =
            |answer| if self.has_contexts() && answer == code::INVALID_VALUE { code::UNKNOWN } else { answer };
        let home = self.machine().device_of(fd).map_err(in_its_words)?;
        self.check(home)?;
        if !self.sees(home) {
            return Err(code::INVALID_DEVICE);
        }
        let device = if self.has_contexts() { home } else { self.current_device() };
        // Not a copy of the descriptor: whoever has an import has no export open.
        let file = self.machine().reopen(fd)?;
        let len = file.metadata().map_err(|_| code::OPERATING_SYSTEM)?.len();
        self.keep(&mut state, file, (home, device), len)
    }
}
