//! What HIP calls things, and where it differs (HIP 6.3 to 7.14, ROCm's clr).

use super::Vendor;
use super::table::{CurrentNames, Names, hip_attribute};

/// HIP.
///
/// What some versions do wrong and nothing here can help:
///
/// * hipMemCreate of 2024 compares the size with the *host's* memory: a chunk is refused, as if the device had too little, where the host has less than that.
/// * Before rocm-systems pull 6982 (June 2026) a map or unmap beside work on the null stream could deadlock. The daemon's deadline says so; a client waits.
/// * On gfx12 a translation may be stale for 1 to 2 ms after a map (rocm-systems issue 11693, open): what is used at once after growing may read what was there before.
pub(super) const HIP: Vendor = Vendor {
    name: "hip",
    libraries: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"],
    remedy: "install ROCm 6 or newer, or in a container give it /dev/kfd, /dev/dri and ROCm's libraries",
    names: Names {
        init: "hipInit",
        version: "hipRuntimeGetVersion",
        device_count: "hipGetDeviceCount",
        device_get: "hipDeviceGet",
        device_name: "hipDeviceGetName",
        device_uuid: &["hipDeviceGetUuid"],
        device_total: "hipDeviceTotalMem",
        device_attribute: "hipDeviceGetAttribute",
        can_access_peer: "hipDeviceCanAccessPeer",
        granularity: "hipMemGetAllocationGranularity",
        create: "hipMemCreate",
        release: "hipMemRelease",
        export: "hipMemExportToShareableHandle",
        import: "hipMemImportFromShareableHandle",
        reserve: "hipMemAddressReserve",
        unreserve: "hipMemAddressFree",
        map: "hipMemMap",
        unmap: "hipMemUnmap",
        set_access: "hipMemSetAccess",
        current: CurrentNames::Device { get: "hipGetDevice", set: "hipSetDevice" },
        synchronize: "hipDeviceSynchronize",
        stream_create: "hipStreamCreateWithFlags",
        stream_destroy: "hipStreamDestroy",
        stream_wait: "hipStreamWaitEvent",
        event_create: "hipEventCreateWithFlags",
        event_record: "hipEventRecord",
        event_query: "hipEventQuery",
        event_destroy: "hipEventDestroy",
        copy_to_host: "hipMemcpyDtoH",
        copy_to_device: "hipMemcpyHtoD",
        fill: "hipMemsetD8Async",
        host_alloc: "hipHostMalloc",
        host_free: "hipHostFree",
        memory_info: Some("hipMemGetInfo"),
    },
    vmm_attribute: hip_attribute::VIRTUAL_MEMORY,
    // There is none: hipMemExportToShareableHandle says whether it can.
    fd_attribute: None,
    rdma_attribute: None,
    fabric_attribute: None,
    mps_attribute: None,
    generation_attributes: None,
    version_min: 60_000_000,
    imports_by_number_from: 70_100_000,
    // One call over several mappings makes a later hipMemAddressFree fail (ROCR issue 285).
    takes_runs: false,
    // HIP of 2024 logs a map that failed and answers 0.
    map_may_lie: true,
    // ROCm before rocm-systems pull 4363 (March 2026) keeps what was mapped for as long as the addresses are reserved. No version number is known to have it: so for all.
    memory_stays_with_addresses: true,
    // ROCm 7.14 holds a dma-buf descriptor for every hipMemCreate (rocm-systems issue 10604).
    fds_per_chunk: 1,
    exports_max: None,
    nvml: None,
    collectives: "librccl.so.1",
};
