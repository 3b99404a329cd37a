//! No allocator at all: cudaMalloc and cudaFree for every request, as PyTorch does with its cache turned off.
//!
//! The driver gives whole pages of 2 MiB to large requests and packs small ones into shared pages, at 512 bytes; it never fragments in this model, and pays with a call for
//! everything.

use crate::driver::cost_table::CostTable;
use crate::ids::StreamId;
use crate::replay::allocator::{Allocator, OutOfMemory, Reserved};
use crate::replay::calls::{CallSum, Calls};
use crate::replay::script::Asked;
use crate::units::{Bytes, DeviceAddress};

/// Every request is the driver's.
#[derive(Clone, Debug)]
pub struct Native {
    capacity: Option<Bytes>,
    calls: Calls,
    reserved: Reserved,
    /// Bytes of small requests that are live, rounded.
    small: Bytes,
    held: Vec<Bytes>,
    next_address: u64,
}

const PAGE: Bytes = Bytes::mib(2);
/// Requests up to this share a page with others.
const SMALL: Bytes = Bytes::mib(1);
const UNIT: Bytes = Bytes::new(512);
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;

impl Native {
    /// On a device that has `capacity` bytes for it, or any number.
    pub fn new(capacity: Option<Bytes>, costs: &CostTable) -> Native {
        Native {
            capacity,
            calls: Calls::new(costs),
            reserved: Reserved::default(),
            small: Bytes::ZERO,
            held: Vec::new(),
            next_address: FIRST_ADDRESS,
        }
    }

    /// Bytes of whole pages that small requests of `bytes` take together.
    fn pages(bytes: Bytes) -> Option<Bytes> {
        bytes.round_up(PAGE)
    }
}

impl Allocator for Native {
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        let is_small = asked.bytes <= SMALL;
        let len = asked.bytes.round_up(if is_small { UNIT } else { PAGE }).ok_or(OutOfMemory)?;
        let more = if is_small {
            let before = Native::pages(self.small).ok_or(OutOfMemory)?;
            self.small.checked_add(len).and_then(Native::pages).ok_or(OutOfMemory)? - before
        } else {
            len
        };
        if !self.reserved.has_room(more, self.capacity) {
            return Err(OutOfMemory);
        }
        if is_small {
            self.small += len;
        }
        self.reserved.grow(more);
        self.calls.malloc(len);
        let slot = asked.slot as usize;
        if slot >= self.held.len() {
            self.held.resize(slot + 1, Bytes::ZERO);
        }
        self.held[slot] = len;
        let address = DeviceAddress::new(self.next_address);
        self.next_address = self.next_address.saturating_add(len.get());
        Ok(address)
    }

    fn free(&mut self, slot: u32) {
        // cudaFree waits for whatever uses the bytes.
        let Some(len) = self.held.get_mut(slot as usize).map(std::mem::take).filter(|len| *len > Bytes::ZERO) else {
            return;
        };
        self.calls.free(len);
        if len > SMALL {
            self.reserved.shrink(len);
            return;
        }
        let pages = |bytes| Native::pages(bytes).expect("it was reserved, so it can be rounded");
        self.reserved.shrink(pages(self.small) - pages(self.small - len));
        self.small -= len;
    }

    fn completed(&mut self, _slot: u32) {}

    fn record_stream(&mut self, _slot: u32, _stream: StreamId) {}

    fn reserved(&self) -> Reserved {
        self.reserved
    }

    fn calls(&self) -> CallSum {
        self.calls.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::ContextKey;

    #[test]
    fn more_than_any_device_has_is_out_of_memory() {
        let mut native = Native::new(None, &CostTable::A100);
        let asked = |slot, bytes| Asked {
            slot,
            event: 0,
            bytes: Bytes::new(bytes),
            stream: StreamId::DEFAULT,
            thread: 0,
            context: ContextKey::UNKNOWN,
            is_dynamic: false,
        };
        native.alloc(&asked(0, (1 << 62) - 1)).unwrap();
        assert_eq!(native.alloc(&asked(1, 1 << 62)), Err(OutOfMemory));
        assert_eq!(native.alloc(&asked(2, 1)), Err(OutOfMemory));
        native.free(0);
        assert_eq!(native.reserved().now, Bytes::ZERO);
    }

    #[test]
    fn small_requests_share_pages_and_large_ones_have_their_own() {
        let mut native = Native::new(Some(Bytes::mib(6)), &CostTable::A100);
        let asked = |slot, bytes| Asked {
            slot,
            event: 0,
            bytes: Bytes::new(bytes),
            stream: StreamId::DEFAULT,
            thread: 0,
            context: ContextKey::UNKNOWN,
            is_dynamic: false,
        };
        native.alloc(&asked(0, 100)).unwrap();
        native.alloc(&asked(1, 1 << 20)).unwrap();
        assert_eq!(native.reserved().now, Bytes::mib(2));
        native.alloc(&asked(2, (1 << 20) + 1)).unwrap();
        native.alloc(&asked(3, 1 << 20)).unwrap();
        assert_eq!(native.reserved().now, Bytes::mib(6), "100 bytes are too many for one page");
        assert_eq!(native.alloc(&asked(4, 2 << 20)), Err(OutOfMemory));
        for slot in [0, 1, 2, 3] {
            native.free(slot);
        }
        assert_eq!(native.reserved(), Reserved { now: Bytes::ZERO, peak: Bytes::mib(6) });
        assert_eq!((native.calls().malloc, native.calls().free), (4, 4));
    }
}
