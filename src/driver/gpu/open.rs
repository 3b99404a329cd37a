//! Opening a driver for GPUs: the library, its version, its devices. What cannot be used is an error that says what to do, and a device that cannot is left out.

use std::collections::{BTreeMap, HashMap};
#[cfg(feature = "testing")]
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::answer::{is_lost_at_open, meaning};
use super::nvml::Nvml;
use super::table::{Called, LoadError, Table, code};
use super::{Books, DeviceDescription, DeviceId, Gpu, GpuDriver, GpuKind, MAPPINGS_MAX, State, Vendor};
use crate::limits;

/// Why a GPU driver cannot be used on this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// There is no library.
    #[error("there is no {driver} driver on this machine ({reason}); {remedy}")]
    Missing {
        /// Which driver.
        driver: &'static str,
        /// What the loader says.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The library is older than what is needed.
    #[error("the {driver} driver is too old ({what}); {remedy}")]
    TooOld {
        /// Which driver.
        driver: &'static str,
        /// How that shows.
        what: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The library does not start.
    #[error("the {driver} driver does not start: {call} answers {code} ({meaning})")]
    Start {
        /// Which driver.
        driver: &'static str,
        /// The function.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// In words.
        meaning: &'static str,
    },
    /// The library does not come back.
    #[error(
        "the {driver} driver has not started within {limit:?}: some device of this machine does not answer; look for it in `dmesg` and with the vendor's tool (nvidia-smi, rocm-smi), reset it or leave it out (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES), and start this again"
    )]
    Overdue {
        /// Which driver.
        driver: String,
        /// How long it had.
        limit: Duration,
    },
    /// It could not be tried.
    #[error("the {driver} driver cannot be opened: {reason}")]
    Unopened {
        /// Which driver.
        driver: String,
        /// Why.
        reason: String,
    },
}

impl OpenError {
    /// There is nothing that could be opened, rather than something that cannot be: no library, or one that has no device, as in a container without any and where only a toolkit's empty library is.
    pub fn is_no_gpu(&self) -> bool {
        match self {
            OpenError::Missing { .. } => true,
            OpenError::Start { code, .. } => [code::NO_DEVICE, code::STUB_LIBRARY].contains(code),
            OpenError::TooOld { .. } | OpenError::Overdue { .. } | OpenError::Unopened { .. } => false,
        }
    }
}

/// Adds a device, unless another has its uuid, by which processes tell devices apart: a chunk of one would be taken for one of the other. Boards without a number of their own
/// may all answer zeros.
fn add(devices: &mut BTreeMap<DeviceId, Gpu>, gpu: Gpu) {
    let DeviceDescription { id, uuid, .. } = gpu.description;
    match devices.values().find(|other| other.description.uuid == uuid) {
        Some(other) => tracing::warn!(
            device = id.0,
            other = other.description.id.0,
            %uuid,
            "two devices have one uuid; the second is left alone, for other processes could not tell them apart"
        ),
        None => drop(devices.insert(id, gpu)),
    }
}

impl GpuDriver {
    /// Opens the vendor's library.
    pub fn open(kind: GpuKind) -> Result<GpuDriver, OpenError> {
        let vendor = kind.vendor();
        GpuDriver::over(vendor, vendor.libraries, vendor.nvml, vendor.collectives)
    }

    /// Opens the library at `path`, which stands for all of the vendor's.
    #[cfg(feature = "testing")]
    pub fn open_library(kind: GpuKind, path: &Path) -> Result<GpuDriver, OpenError> {
        let vendor = kind.vendor();
        let path = path.to_string_lossy();
        GpuDriver::over(vendor, &[&path], vendor.nvml.map(|_| &*path), &path)
    }

    fn over(
        vendor: &'static Vendor,
        libraries: &[&str],
        nvml: Option<&str>,
        collectives: &str,
    ) -> Result<GpuDriver, OpenError> {
        let (driver, remedy) = (vendor.name, vendor.remedy);
        let table = Table::load(libraries, &vendor.names).map_err(|error| match error {
            LoadError::Missing { reason } => OpenError::Missing { driver, reason, remedy },
            LoadError::TooOld { .. } => OpenError::TooOld { driver, what: error.to_string(), remedy },
        })?;
        let start = |call: &'static str| move |code| OpenError::Start { driver, call, code, meaning: meaning(code) };
        table.init().map_err(start(vendor.names.init))?;
        let version = table.version().map_err(start(vendor.names.version))?;
        if version < vendor.version_min {
            let what = format!("version {version}, and {} is needed", vendor.version_min);
            return Err(OpenError::TooOld { driver, what, remedy });
        }
        let count = table.device_count().map_err(start(vendor.names.device_count))?;
        let found: Vec<(i32, Called<i32>)> = (0..count).map(|at| (at, table.device(at))).collect();
        let natives: Vec<i32> = found.iter().filter_map(|(_, native)| native.ok()).collect();
        let mut devices = BTreeMap::new();
        for (at, native) in found {
            let id = DeviceId(at as u32);
            let opened = match native {
                Ok(native) => Gpu::open(vendor, &table, id, native, &natives),
                Err(code) => Err((vendor.names.device_get, code)),
            };
            // What is left out leaves a gap: the others keep the numbers by which the process's other libraries know them.
            match opened {
                Ok(Some(gpu)) => add(&mut devices, gpu),
                Ok(None) => tracing::warn!(device = at, "the device has no virtual memory calls, and is left alone"),
                Err((call, code)) if is_lost_at_open(code) => {
                    tracing::warn!(device = at, call, code, "the device is lost, and is left alone");
                }
                Err((call, code)) => return Err(start(call)(code)),
            }
        }
        // One for all: the books are.
        let granularity = devices.values().map(|gpu| gpu.granularity).max().unwrap_or(limits::CHUNK_LEN_MIN);
        devices.values_mut().for_each(|gpu| gpu.granularity = granularity);
        let state = State {
            books: Books::new(granularity, true, MAPPINGS_MAX),
            handles: HashMap::new(),
            homes: BTreeMap::new(),
            created: HashMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            contexts: HashMap::new(),
        };
        let nvml = nvml.and_then(|path| Nvml::load(path, devices.iter().map(|(id, gpu)| (*id, gpu.description.uuid))));
        let collectives = collectives.to_owned();
        let table = Arc::new(table);
        Ok(GpuDriver { vendor, table, nvml, collectives, version, devices, state: Mutex::new(state) })
    }
}
