//! Patterns by which a trainer knows its own bytes: in the first and the last 4 KiB of every allocation and on both sides of every chunk border.
//!
//! Every eight bytes carry the trainer's tag and a value that follows from the allocation and the place in it. So a byte of another allocation, of another
//! place, or of another process shows.

use crate::driver::{Driver, DriverError};
use crate::rng::mix;
use crate::units::{Bytes, DeviceAddress, Place};

/// Bytes of a pattern: a page of most machines, and part of one of others, where more memory is touched than is written.
const STRETCH: u64 = 4096;
const WORD: u64 = 8;

/// Writes and checks the patterns of one trainer.
#[derive(Debug)]
pub(super) struct Patterns {
    /// Not zero, and different in every process.
    tag: u16,
    checked: u64,
    buffer: Vec<u8>,
}

/// Bytes that are not what they should be.
#[derive(Debug, thiserror::Error)]
pub(super) enum PatternError {
    /// Something else than zeros or own bytes lay in memory that was just allocated.
    #[error("{word:#018x} lay at {address} + {offset:#x} before anything was written there: another process's bytes")]
    Foreign {
        /// The allocation.
        address: DeviceAddress,
        /// Where in it.
        offset: u64,
        /// What was there.
        word: u64,
    },
    /// A pattern was overwritten.
    #[error("{found:#018x} instead of {expected:#018x} at {address} + {offset:#x}: somebody wrote there")]
    Broken {
        /// The allocation.
        address: DeviceAddress,
        /// Where in it.
        offset: u64,
        /// What should be there.
        expected: u64,
        /// What is.
        found: u64,
    },
    /// The memory cannot be touched.
    #[error("the memory cannot be used")]
    Driver(#[from] DriverError),
}

/// An allocation, as far as its pattern goes.
#[derive(Clone, Debug)]
pub(super) struct Marked {
    pub(super) address: DeviceAddress,
    /// The how-manieth allocation of the trainer.
    pub(super) number: u64,
    /// Stretches that carry the pattern: offset and length, whole words.
    stretches: Vec<(u64, u64)>,
}

impl Marked {
    /// Where the pattern of an allocation goes.
    pub(super) fn new(address: DeviceAddress, bytes: Bytes, number: u64, borders: &[DeviceAddress]) -> Marked {
        // Rounded up to words: allocations are, to 512 bytes.
        let len = bytes.get().max(1).next_multiple_of(WORD);
        let mut stretches = vec![(0, len.min(STRETCH))];
        let around_borders = borders.iter().filter_map(|border| border.checked_distance(address));
        for border in around_borders {
            let start = border.get().saturating_sub(STRETCH);
            stretches.push((start, (border.get() + STRETCH).min(len) - start));
        }
        if len > STRETCH {
            stretches.push((len - STRETCH, STRETCH));
        }
        Marked { address, number, stretches }
    }

    /// An allocation without a pattern.
    pub(super) fn nowhere(address: DeviceAddress, number: u64) -> Marked {
        Marked { address, number, stretches: Vec::new() }
    }
}

impl Patterns {
    pub(super) fn new(tag: u16) -> Patterns {
        Patterns { tag: tag.max(1), checked: 0, buffer: Vec::new() }
    }

    /// Pages and border regions checked so far.
    pub(super) fn checked(&self) -> u64 {
        self.checked
    }

    fn word(&self, number: u64, offset: u64) -> u64 {
        u64::from(self.tag) << 48 | mix(number << 40 ^ offset) >> 16
    }

    /// Marks an allocation that was just made; whatever lies there must be zero or this trainer's own.
    pub(super) fn write(&mut self, driver: &dyn Driver, marked: &Marked) -> Result<(), PatternError> {
        for (start, len) in &marked.stretches {
            self.buffer.resize(*len as usize, 0);
            let at = marked.address.checked_add(Bytes::new(*start)).expect("it lies in the allocation");
            driver.read(at, &mut self.buffer)?;
            let mut fresh = Vec::with_capacity(self.buffer.len());
            for (offset, word) in (*start..).step_by(WORD as usize).zip(self.buffer.as_chunks::<8>().0) {
                let word = u64::from_le_bytes(*word);
                if word != 0 && word >> 48 != u64::from(self.tag) {
                    return Err(PatternError::Foreign { address: marked.address, offset, word });
                }
                fresh.extend_from_slice(&self.word(marked.number, offset).to_le_bytes());
            }
            driver.write(at, &fresh)?;
        }
        Ok(())
    }

    /// Checks an allocation's pattern.
    pub(super) fn check(&mut self, driver: &dyn Driver, marked: &Marked) -> Result<(), PatternError> {
        for (start, len) in &marked.stretches {
            self.buffer.resize(*len as usize, 0);
            let at = marked.address.checked_add(Bytes::new(*start)).expect("it lies in the allocation");
            driver.read(at, &mut self.buffer)?;
            for (offset, word) in (*start..).step_by(WORD as usize).zip(self.buffer.as_chunks::<8>().0) {
                let (found, expected) = (u64::from_le_bytes(*word), self.word(marked.number, offset));
                if found != expected {
                    return Err(PatternError::Broken { address: marked.address, offset, expected, found });
                }
            }
            self.checked += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::host::{HostDriver, HostOptions};
    use crate::ids::{ChunkId, DeviceId};
    use crate::memory::{Chunk, Device, Mapping};
    use std::sync::Arc;

    fn mapped() -> (Arc<HostDriver>, Mapping) {
        let host = Arc::new(HostDriver::new(HostOptions::with_devices(&[Bytes::mib(64)])));
        let device = Device::open(Arc::clone(&host) as Arc<dyn Driver>, DeviceId(0)).unwrap();
        let chunk = |n| Arc::new(Chunk::create(&device, ChunkId(n), Bytes::mib(2)).unwrap());
        let mapping = Mapping::stitch(&[chunk(1), chunk(2)]).unwrap();
        (host, mapping)
    }

    #[test]
    fn a_pattern_holds_until_somebody_writes_into_it() {
        let (host, mapping) = mapped();
        let start = mapping.span().start();
        let border = mapping.chunks().nth(1).unwrap().0;
        let mut patterns = Patterns::new(7);
        let marked = Marked::new(start, Bytes::mib(4) - Bytes::new(3), 12, &[border]);
        patterns.write(&*host, &marked).unwrap();
        patterns.check(&*host, &marked).unwrap();
        assert_eq!(patterns.checked(), 3);
        // One byte right behind the border.
        host.write(border, &[0xff]).unwrap();
        assert!(matches!(patterns.check(&*host, &marked), Err(PatternError::Broken { .. })));
    }

    #[test]
    fn bytes_of_another_trainer_and_of_another_place_are_told_apart() {
        let (host, mapping) = mapped();
        let start = mapping.span().start();
        let marked = Marked::new(start, Bytes::new(100), 1, &[]);
        Patterns::new(7).write(&*host, &marked).unwrap();
        assert!(matches!(Patterns::new(8).write(&*host, &marked), Err(PatternError::Foreign { .. })));
        let moved = Marked::new(start, Bytes::new(100), 2, &[]);
        assert!(matches!(Patterns::new(7).check(&*host, &moved), Err(PatternError::Broken { .. })));
        Patterns::new(7).write(&*host, &moved).unwrap();
    }
}
