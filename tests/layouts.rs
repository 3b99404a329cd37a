//! Our own types and constants of the GPU drivers against those of two packages that others generated from the vendors' headers. The compiler holds them: a difference does
//! not build.
//!
//! Only types and constants are used of them: their functions would have to be linked, and their enums are undefined behaviour for a code that they do not know.

use std::mem::{align_of, offset_of, size_of};

use cuda_driver_sys as cuda;
use hip_sys::hiprt as hip;
use stitchd::driver::gpu::table;

macro_rules! same_layout {
    ($ours:ty, $theirs:ty { $($field:ident = $their_field:ident),* $(,)? }) => {
        assert!(size_of::<$ours>() == size_of::<$theirs>());
        assert!(align_of::<$ours>() == align_of::<$theirs>());
        $(assert!(offset_of!($ours, $field) == offset_of!($theirs, $their_field));)*
    };
}

const _: () = {
    same_layout!(table::Location, cuda::CUmemLocation { kind = type_, id = id });
    same_layout!(table::Location, hip::hipMemLocation { kind = type_, id = id });
    same_layout!(table::AccessDescription, cuda::CUmemAccessDesc { location = location, flags = flags });
    same_layout!(table::AccessDescription, hip::hipMemAccessDesc { location = location, flags = flags });
    same_layout!(table::Properties, cuda::CUmemAllocationProp {
        kind = type_,
        handle_types = requestedHandleTypes,
        location = location,
        win32_metadata = win32HandleMetaData,
        compression = reserved, // CUDA 10.2 has one number for all of allocFlags.
    });
    same_layout!(table::Properties, hip::hipMemAllocationProp {
        kind = type_,
        handle_types = requestedHandleType,
        location = location,
        win32_metadata = win32HandleMetaData,
        compression = allocFlags,
    });
    type Flags = hip::hipMemAllocationProp__bindgen_ty_1;
    let flags = offset_of!(hip::hipMemAllocationProp, allocFlags);
    assert!(offset_of!(table::Properties, rdma) == flags + offset_of!(Flags, gpuDirectRDMACapable));
    assert!(offset_of!(table::Properties, usage) == flags + offset_of!(Flags, usage));
};

#[test]
fn constants_are_those_of_the_vendors() {
    use cuda::{CUmemAccess_flags as Access, CUmemAllocationHandleType as HandleType};
    let ours = [
        table::LOCATION_DEVICE,
        table::ALLOCATION_PINNED,
        table::HANDLE_POSIX_FD,
        table::ACCESS_NONE,
        table::ACCESS_READ,
        table::ACCESS_READ_WRITE,
        table::GRANULARITY_MINIMUM,
        table::EVENT_DISABLE_TIMING,
        table::STREAM_NON_BLOCKING,
    ];
    let of_cuda = [
        cuda::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32,
        cuda::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32,
        HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u32,
        Access::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32,
        Access::CU_MEM_ACCESS_FLAGS_PROT_READ as u32,
        Access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32,
        cuda::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32,
        cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32,
        cuda::CUstream_flags::CU_STREAM_NON_BLOCKING as u32,
    ];
    let of_hip = [
        hip::hipMemLocationType::hipMemLocationTypeDevice as u32,
        hip::hipMemAllocationType::hipMemAllocationTypePinned as u32,
        hip::hipMemAllocationHandleType::hipMemHandleTypePosixFileDescriptor as u32,
        hip::hipMemAccessFlags::hipMemAccessFlagsProtNone as u32,
        hip::hipMemAccessFlags::hipMemAccessFlagsProtRead as u32,
        hip::hipMemAccessFlags::hipMemAccessFlagsProtReadWrite as u32,
        hip::hipMemAllocationGranularity_flags::hipMemAllocationGranularityMinimum as u32,
        hip::hipEventDisableTiming,
        hip::hipStreamNonBlocking,
    ];
    assert_eq!((ours, ours), (of_cuda, of_hip));
    use cuda::CUdevice_attribute_enum as Attribute;
    assert_eq!(
        table::cuda_attribute::VIRTUAL_MEMORY,
        Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as i32
    );
    assert_eq!(
        table::cuda_attribute::POSIX_FD,
        Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as i32
    );
    assert_eq!(
        [table::cuda_attribute::GENERATION_MAJOR, table::cuda_attribute::GENERATION_MINOR],
        [
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as i32,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as i32
        ]
    );
    assert_eq!(
        table::hip_attribute::VIRTUAL_MEMORY,
        hip::hipDeviceAttribute_t::hipDeviceAttributeVirtualMemoryManagementSupported as i32
    );
}

#[test]
fn codes_are_those_of_the_vendors() {
    use cuda::cudaError_enum as Cuda;
    use hip::hipError_t as Hip;
    use table::code;
    let codes = [
        (code::OK, Cuda::CUDA_SUCCESS, Hip::hipSuccess),
        (code::INVALID_VALUE, Cuda::CUDA_ERROR_INVALID_VALUE, Hip::hipErrorInvalidValue),
        (code::OUT_OF_MEMORY, Cuda::CUDA_ERROR_OUT_OF_MEMORY, Hip::hipErrorOutOfMemory),
        (code::NOT_INITIALIZED, Cuda::CUDA_ERROR_NOT_INITIALIZED, Hip::hipErrorNotInitialized),
        (code::DEINITIALIZED, Cuda::CUDA_ERROR_DEINITIALIZED, Hip::hipErrorDeinitialized),
        (code::NO_DEVICE, Cuda::CUDA_ERROR_NO_DEVICE, Hip::hipErrorNoDevice),
        (code::INVALID_DEVICE, Cuda::CUDA_ERROR_INVALID_DEVICE, Hip::hipErrorInvalidDevice),
        (code::ALREADY_MAPPED, Cuda::CUDA_ERROR_ALREADY_MAPPED, Hip::hipErrorAlreadyMapped),
        (code::ECC_UNCORRECTABLE, Cuda::CUDA_ERROR_ECC_UNCORRECTABLE, Hip::hipErrorECCNotCorrectable),
        (code::OPERATING_SYSTEM, Cuda::CUDA_ERROR_OPERATING_SYSTEM, Hip::hipErrorOperatingSystem),
        (code::INVALID_HANDLE, Cuda::CUDA_ERROR_INVALID_HANDLE, Hip::hipErrorInvalidHandle),
        (code::NOT_READY, Cuda::CUDA_ERROR_NOT_READY, Hip::hipErrorNotReady),
        (code::ILLEGAL_ADDRESS, Cuda::CUDA_ERROR_ILLEGAL_ADDRESS, Hip::hipErrorIllegalAddress),
        (code::LAUNCH_FAILED, Cuda::CUDA_ERROR_LAUNCH_FAILED, Hip::hipErrorLaunchFailure),
        (code::NOT_SUPPORTED, Cuda::CUDA_ERROR_NOT_SUPPORTED, Hip::hipErrorNotSupported),
        (code::UNKNOWN, Cuda::CUDA_ERROR_UNKNOWN, Hip::hipErrorUnknown),
    ];
    for (ours, cuda, hip) in codes {
        assert_eq!((ours, ours), (cuda as i32, hip as i32));
    }
    // These are CUDA's alone.
    assert_eq!(code::NOT_PERMITTED, Cuda::CUDA_ERROR_NOT_PERMITTED as i32);
    assert_eq!(code::DRIVER_MISMATCH, Cuda::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as i32);
}
