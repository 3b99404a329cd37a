//! What the library itself answers to misuse, past the books that never let one through: its codes are in no header, and the stand-in is held to them.
//!
//! Not for: any process that has work to do. What is done here may end it, and leaves behind what only its end gives back.

use std::os::fd::AsFd as _;

use super::answer::meaning;
use super::device::Gpu;
use super::table::{Called, Location, Properties};
use super::{Cause, DeviceId, GpuDriver, RETAIN};

/// A device that no machine has.
const NO_DEVICE: i32 = 10_000;

/// Addresses of two granules, and a chunk of one.
struct Bench<'a> {
    driver: &'a GpuDriver,
    gpu: &'a Gpu,
    granule: usize,
    base: u64,
    chunk: u64,
    tell: &'a mut dyn FnMut(&'static str, String),
}

impl GpuDriver {
    /// Misuses the device in every way that is known not to end a process, and then in those of which it is not known. Says of each what the library answers, when it has.
    pub(super) fn misuse_library(
        &self,
        device: DeviceId,
        tell: &mut dyn FnMut(&'static str, String),
    ) -> Result<(), Cause> {
        let gpu = self.gpu(device)?;
        let granule = gpu.granularity.get() as usize;
        let context = self.context(&mut self.lock(), device)?;
        self.table.set_current(context).map_err(self.answered(device, RETAIN))?;
        let names = &self.vendor.names;
        let base = self.table.reserve(2 * granule, granule).map_err(self.answered(device, names.reserve))?;
        let chunk =
            self.table.create(granule, &gpu.modest_properties()).map_err(self.answered(device, names.create))?;
        Bench { driver: self, gpu, granule, base, chunk, tell }.misuse().map_err(self.answered(device, names.map))
    }
}

impl Bench<'_> {
    fn say<T>(&mut self, misuse: &'static str, answer: Called<T>) {
        let words = answer.map_or_else(|code| format!("{code} ({})", meaning(code)), |_| "done".to_owned());
        (self.tell)(misuse, words);
    }

    fn misuse(&mut self) -> Called<()> {
        let (table, granule, base, chunk) = (&self.driver.table, self.granule, self.base, self.chunk);
        let (whole, half) = (2 * granule, granule / 2);
        let properties = self.gpu.modest_properties();
        let nowhere = Properties { location: Location { id: NO_DEVICE, ..properties.location }, ..properties };
        self.say("create_of_no_bytes", table.create(0, &properties));
        self.say("create_of_half_a_granule", table.create(half, &properties));
        self.say("create_for_a_device_that_is_not_there", table.create(granule, &nowhere));
        self.say("reserve_of_half_a_granule", table.reserve(half, granule));
        if let Ok(null) = std::fs::File::open("/dev/null") {
            let by_pointer = self.driver.version < self.driver.vendor.imports_by_number_from;
            self.say("import_of_dev_null", table.import(null.as_fd(), by_pointer));
        }
        self.say("map_past_the_reservation", table.map(base + whole as u64, granule, chunk));
        self.say("map_of_half_a_chunk", table.map(base, half, chunk));
        table.map(base, granule, chunk)?;
        self.say("map_over_a_mapping", table.map(base, granule, chunk));
        self.say("set_access_over_a_hole", self.set_access(whole));
        self.say("unmap_of_half_a_mapping", table.unmap(base, half));
        self.say("unmap_over_a_hole", table.unmap(base, whole));
        // It may be unmapped by now.
        let _ = table.map(base, granule, chunk);
        self.say("unreserve_of_what_is_mapped", table.unreserve(base, whole));
        // As far as it is mapped still: some of these may have been done.
        let _ = table.unmap(base, granule);
        self.say("set_access_of_what_is_not_mapped", self.set_access(granule));
        table.release(chunk)?;
        self.say("release_twice", table.release(chunk));
        // Ends the process on some versions of HIP.
        self.say("unmap_of_what_is_not_mapped", table.unmap(base, granule));
        Ok(())
    }

    fn set_access(&self, len: usize) -> Called<()> {
        let location = Location { kind: super::table::LOCATION_DEVICE, id: self.gpu.native };
        let who = super::AccessDescription { location, flags: super::table::ACCESS_READ_WRITE };
        self.driver.table.set_access(self.base, len, &[who])
    }
}
