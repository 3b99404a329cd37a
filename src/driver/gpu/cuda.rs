//! What CUDA calls things (CUDA driver API, cuda.h 12.9 and 13.5).

use super::Vendor;
use super::table::{CurrentNames, Names, cuda_attribute};

/// CUDA.
pub(super) const CUDA: Vendor = Vendor {
    name: "cuda",
    // Never `libcuda.so`: where the toolkit is installed that is a stub which only links (its calls answer 34).
    libraries: &["libcuda.so.1"],
    remedy: "install NVIDIA's driver, or in a container give it the driver's libraries (nvidia-container-toolkit)",
    names: Names {
        init: "cuInit",
        version: "cuDriverGetVersion",
        device_count: "cuDeviceGetCount",
        device_get: "cuDeviceGet",
        device_name: "cuDeviceGetName",
        device_uuid: &["cuDeviceGetUuid_v2", "cuDeviceGetUuid"],
        device_total: "cuDeviceTotalMem_v2",
        device_attribute: "cuDeviceGetAttribute",
        can_access_peer: "cuDeviceCanAccessPeer",
        granularity: "cuMemGetAllocationGranularity",
        create: "cuMemCreate",
        release: "cuMemRelease",
        export: "cuMemExportToShareableHandle",
        import: "cuMemImportFromShareableHandle",
        reserve: "cuMemAddressReserve",
        unreserve: "cuMemAddressFree",
        map: "cuMemMap",
        unmap: "cuMemUnmap",
        set_access: "cuMemSetAccess",
        current: CurrentNames::Context {
            retain: "cuDevicePrimaryCtxRetain",
            release: "cuDevicePrimaryCtxRelease_v2",
            get: "cuCtxGetCurrent",
            set: "cuCtxSetCurrent",
        },
        synchronize: "cuCtxSynchronize",
        stream_create: "cuStreamCreate",
        stream_destroy: "cuStreamDestroy_v2",
        stream_wait: "cuStreamWaitEvent",
        event_create: "cuEventCreate",
        event_record: "cuEventRecord",
        event_query: "cuEventQuery",
        event_destroy: "cuEventDestroy_v2",
        copy_to_host: "cuMemcpyDtoH_v2",
        copy_to_device: "cuMemcpyHtoD_v2",
        fill: "cuMemsetD8Async",
        // cuMemGetInfo takes a context.
        memory_info: None,
    },
    vmm_attribute: cuda_attribute::VIRTUAL_MEMORY,
    fd_attribute: Some(cuda_attribute::POSIX_FD),
    rdma_attribute: Some(cuda_attribute::RDMA),
    fabric_attribute: Some(cuda_attribute::FABRIC),
    mps_attribute: Some(cuda_attribute::MPS),
    generation_attributes: Some([cuda_attribute::GENERATION_MAJOR, cuda_attribute::GENERATION_MINOR]),
    version_min: 11_020,
    imports_by_number_from: 0,
    nvml: Some("libnvidia-ml.so.1"),
    collectives: "libnccl.so.2",
    takes_runs: true,
    map_may_lie: false,
    memory_stays_with_addresses: false,
    fds_per_chunk: 0,
    // A table of the kernel module, one for all devices; when it is full that answers "out of memory".
    exports_max: Some(crate::limits::EXPORTS_MAX),
};
