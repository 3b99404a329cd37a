//! A hash table keyed by device addresses, as fast as a table look-up can be.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::units::DeviceAddress;

/// From an address to whatever lies there.
pub type AddressMap<V> = HashMap<DeviceAddress, V, BuildHasherDefault<AddressHasher>>;

/// Hashes one address: a multiplication, and a rotation that brings the well-mixed high bits to where the table looks. Addresses are ours, so nobody can
/// choose them to collide.
#[derive(Default, Clone, Copy, Debug)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    #[inline]
    fn write_u64(&mut self, n: u64) {
        // Allocations are aligned to 512 bytes: their low nine bits say nothing.
        self.0 = ((self.0 ^ n) >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}
