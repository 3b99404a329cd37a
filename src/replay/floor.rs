//! What no allocator can do without: a lock, and a look at a table by address for each operation. Beside the replay's own books that is the floor that measured times are compared with.
//!
//! Not for: memory. Its addresses are made up.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};

use super::allocator::{Allocator, OutOfMemory, Reserved};
use super::calls::CallSum;
use super::script::Asked;
use crate::ids::StreamId;
use crate::limits;
use crate::pool::AddressMap;
use crate::units::DeviceAddress;

/// Such a table and its lock.
#[derive(Debug)]
pub struct Floor {
    table: Mutex<(AddressMap<u32>, u64)>,
    addresses: Vec<DeviceAddress>,
}

impl Floor {
    /// For so many allocations at one time.
    pub fn new(slots: u32) -> Floor {
        let address = |slot: u32| DeviceAddress::new((u64::from(slot) + 1) * limits::ALLOCATION_ALIGNMENT.get());
        let addresses: Vec<DeviceAddress> = (0..slots).map(address).collect();
        let table = addresses.iter().copied().zip(0..).collect();
        Floor { table: Mutex::new((table, 0)), addresses }
    }

    fn look(&self, slot: u32) -> DeviceAddress {
        let address = self.addresses[slot as usize];
        let mut guard = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let (table, sum) = &mut *guard;
        *sum += u64::from(black_box(table[&address]));
        address
    }
}

impl Allocator for Floor {
    fn alloc(&mut self, asked: &Asked) -> Result<DeviceAddress, OutOfMemory> {
        Ok(self.look(asked.slot))
    }

    fn free(&mut self, slot: u32) {
        self.look(slot);
    }

    fn completed(&mut self, _slot: u32) {}

    fn record_stream(&mut self, _slot: u32, _stream: StreamId) {}

    fn reserved(&self) -> Reserved {
        Reserved::default()
    }

    fn calls(&self) -> CallSum {
        CallSum::default()
    }
}
