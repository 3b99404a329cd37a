//! A device as the library knows it: who it is, and what it can do.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::table::{self, Code, Location, Properties, Table};
use super::{Bytes, DeviceDescription, DeviceId, DeviceUuid, Vendor};
use crate::limits;

/// A device. What is known of it is asked once, when the driver is opened.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) native: i32,
    pub(super) description: DeviceDescription,
    pub(super) granularity: Bytes,
    properties: Properties,
    /// Chunks ask for FABRIC handles beside descriptors, until the library refuses one for it.
    fabric: AtomicBool,
    pub(super) mps: bool,
    pub(super) maps_when_quiet: bool,
    /// Who may use its memory: itself, and the devices that reach it.
    reachable_from: Vec<i32>,
    /// Those of them that are gone since.
    gone: Mutex<BTreeSet<i32>>,
    turn: Mutex<()>,
}

impl Gpu {
    /// One call for the device's chunks at a time. Taken before the driver's lock, never under it.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What new chunks are asked for with.
    pub(super) fn properties(&self) -> Properties {
        let fabric = if self.has_fabric() { table::HANDLE_FABRIC } else { 0 };
        Properties { handle_types: table::HANDLE_POSIX_FD | fabric, ..self.properties }
    }

    /// The same without what this process may not have: descriptors alone.
    pub(super) fn modest_properties(&self) -> Properties {
        Properties { handle_types: table::HANDLE_POSIX_FD, ..self.properties }
    }

    /// Chunks are made so that they can be passed to other nodes, as far as is known.
    pub(super) fn has_fabric(&self) -> bool {
        self.fabric.load(Ordering::Relaxed)
    }

    /// A create was refused, perhaps because it asked for what this process may not have: whether it should be tried without. That is found out once.
    pub(super) fn gives_up_fabric(&self, code: Code) -> bool {
        let may_be = matches!(code, table::code::NOT_PERMITTED | table::code::NOT_SUPPORTED);
        may_be && self.fabric.swap(false, Ordering::Relaxed)
    }

    /// The other devices that reach its memory.
    pub(super) fn peers(&self) -> Vec<i32> {
        let gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        let is_there = |peer: &i32| *peer != self.native && !gone.contains(peer);
        self.reachable_from.iter().copied().filter(is_there).collect()
    }

    /// One of them is gone: whether that is news.
    pub(super) fn forget_peer(&self, peer: i32) -> bool {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner).insert(peer)
    }

    /// The device, or nothing where it cannot do what the driver needs.
    pub(super) fn open(
        vendor: &'static Vendor,
        table: &Table,
        id: DeviceId,
        native: i32,
        natives: &[i32],
    ) -> Result<Option<Gpu>, (&'static str, Code)> {
        let names = &vendor.names;
        let has =
            |attribute: i32| table.device_attribute(attribute, native).map_err(|code| (names.device_attribute, code));
        let can_share = vendor.fd_attribute.map_or(Ok(1), has)?;
        if has(vendor.vmm_attribute)? == 0 || can_share == 0 {
            return Ok(None);
        }
        // A library that is older than the attribute refuses the question: then there is no such thing.
        let also_has = |attribute: Option<i32>| {
            attribute.is_some_and(|attribute| table.device_attribute(attribute, native).is_ok_and(|value| value != 0))
        };
        let said = |attribute: i32| table.device_attribute(attribute, native).ok();
        let generation = vendor.generation_attributes.and_then(|[major, minor]| Some([said(major)?, said(minor)?]));
        let properties = Properties {
            kind: table::ALLOCATION_PINNED,
            handle_types: table::HANDLE_POSIX_FD,
            location: Location { kind: table::LOCATION_DEVICE, id: native },
            win32_metadata: 0,
            // Compressible memory may not be mappable on every device: never for chunks that are shared.
            compression: 0,
            // Must be asked for when the chunk is made; where the device cannot, asking for it fails.
            rdma: u8::from(also_has(vendor.rdma_attribute)),
            usage: 0,
            reserved: [0; 4],
        };
        let granularity = table.granularity(&properties).map_err(|code| (names.granularity, code))?;
        let total = table.device_total(native).map_err(|code| (names.device_total, code))?;
        let reaches = |peer: &i32| *peer == native || table.can_access_peer(*peer, native).unwrap_or(false);
        Ok(Some(Gpu {
            native,
            description: DeviceDescription {
                id,
                // Of a part of a GPU (MIG) this is the part's: the newer of CUDA's functions is the first that is looked for.
                uuid: DeviceUuid(table.device_uuid(native).map_err(|code| (names.device_uuid[0], code))?),
                model: table.device_name(native).map_err(|code| (names.device_name, code))?,
                total: Bytes::new(total as u64),
            },
            // Some HIP versions say 4 KiB, and are slow or wrong below 2 MiB. Addresses are reserved in whole pages of the host, which may be 64 KiB (aarch64).
            granularity: limits::granularity_for(Bytes::new(granularity as u64), limits::page_size()),
            properties,
            fabric: AtomicBool::new(also_has(vendor.fabric_attribute)),
            mps: also_has(vendor.mps_attribute),
            // Volta is from 7.0 on, and Turing from 7.5.
            maps_when_quiet: matches!(generation, Some([7, 0..5])),
            reachable_from: natives.iter().copied().filter(reaches).collect(),
            gone: Mutex::default(),
            turn: Mutex::new(()),
        }))
    }
}
