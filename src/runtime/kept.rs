//! Contents of device memory that are kept in the memory of the process: locked where the driver locks some, which is several times as fast, else as it is.

use std::collections::BTreeSet;

use super::SleepError;
use crate::driver::{Driver, DriverError, HostMemory};
use crate::ids::DeviceId;
use crate::units::{AddressSpan, Bytes};

/// Small contents lie side by side in buffers of this size: to lock some is a call of its own, of a hundred microseconds and more.
const BUFFER_LEN: u64 = 256 << 20;

/// What lay where.
#[derive(Debug, Default)]
pub(super) struct Kept(Vec<Buffer>);

#[derive(Debug)]
struct Buffer {
    memory: Box<dyn HostMemory>,
    /// One behind the other.
    spans: Vec<AddressSpan>,
}

impl Kept {
    /// Reads what lies in some spans.
    ///
    /// # Errors
    ///
    /// The process has no memory for it, or the driver does not read.
    pub(super) fn of(driver: &dyn Driver, device: DeviceId, spans: Vec<AddressSpan>) -> Result<Kept, SleepError> {
        let mut buffers = Vec::new();
        let mut may_lock = true;
        for spans in side_by_side(spans) {
            let len = len_of(&spans).get() as usize;
            let locked = if may_lock { driver.host_memory(device, len) } else { None };
            // One that was refused once is refused again.
            may_lock = locked.is_some();
            let memory = locked.map_or_else(|| pageable(len), Ok)?;
            let mut buffer = Buffer { memory, spans };
            let mut rest = buffer.memory.bytes_mut();
            for span in &buffer.spans {
                let (here, behind) = rest.split_at_mut(span.len().get() as usize);
                driver.read(span.start(), here)?;
                rest = behind;
            }
            buffers.push(buffer);
        }
        Ok(Kept(buffers))
    }

    /// Writes what lay in these spans back.
    ///
    /// # Errors
    ///
    /// The driver's; some of it may have been written.
    pub(super) fn put_back(&self, driver: &dyn Driver, wanted: &BTreeSet<AddressSpan>) -> Result<(), DriverError> {
        for Buffer { memory, spans } in &self.0 {
            let mut rest = memory.bytes();
            for span in spans {
                let (here, behind) = rest.split_at(span.len().get() as usize);
                if wanted.contains(span) {
                    driver.write(span.start(), here)?;
                }
                rest = behind;
            }
        }
        Ok(())
    }

    /// Bytes of it.
    pub(super) fn len(&self) -> Bytes {
        self.0.iter().map(|buffer| len_of(&buffer.spans)).sum()
    }

    /// Bytes of what is locked.
    pub(super) fn locked(&self) -> Bytes {
        self.0.iter().filter(|buffer| buffer.memory.is_locked()).map(|buffer| len_of(&buffer.spans)).sum()
    }
}

fn len_of(spans: &[AddressSpan]) -> Bytes {
    spans.iter().map(|span| span.len()).sum()
}

/// Spans in groups of at most a buffer's length, each of one at least.
fn side_by_side(spans: Vec<AddressSpan>) -> Vec<Vec<AddressSpan>> {
    let mut groups: Vec<Vec<AddressSpan>> = Vec::new();
    let mut len = u64::MAX;
    for span in spans {
        let with_it = len.saturating_add(span.len().get());
        match groups.last_mut() {
            Some(group) if with_it <= BUFFER_LEN => {
                group.push(span);
                len = with_it;
            }
            _ => {
                len = span.len().get();
                groups.push(vec![span]);
            }
        }
    }
    groups
}

fn pageable(len: usize) -> Result<Box<dyn HostMemory>, SleepError> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| SleepError::Host(Bytes::new(len as u64)))?;
    bytes.resize(len, 0);
    Ok(Box::new(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{DeviceAddress, Span};

    #[test]
    fn small_contents_share_a_buffer_and_large_ones_have_their_own() {
        let mut at = 4096;
        let mut span = |mib: u64| {
            let span = Span::new(DeviceAddress::new(at), Bytes::mib(mib)).unwrap();
            at += mib << 20;
            span
        };
        let spans = [1, 200, 55, 1, 300, 2].map(&mut span).to_vec();
        let groups = side_by_side(spans.clone());
        assert_eq!(groups.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1, 1, 1]);
        assert_eq!(groups.concat(), spans);
        assert_eq!(side_by_side(Vec::new()), Vec::<Vec<_>>::new());
    }
}
