//! What a library's answer means: in words, for callers, and whether the device that it was asked about is gone.

use super::table::{Code, code};
use super::{Cause, collectives, nvml};
use crate::error::ErrorKind;

/// A library's answer in words.
pub(super) fn meaning(code: Code) -> &'static str {
    match code {
        code::INVALID_VALUE => "invalid value",
        code::OUT_OF_MEMORY => "out of memory",
        code::NOT_INITIALIZED => "not initialized, or a forked child",
        code::DEINITIALIZED => "shutting down",
        code::STUB_LIBRARY => "a stub library: only the toolkit is installed, not the driver",
        code::DEVICE_UNAVAILABLE => "the device is in use by another process for itself, or lost",
        code::NO_DEVICE => "no device",
        code::INVALID_DEVICE => "no such device",
        code::ALREADY_MAPPED => "already mapped",
        code::ECC_UNCORRECTABLE => "uncorrectable memory error",
        code::OPERATING_SYSTEM => "a system call failed",
        code::INVALID_HANDLE => "invalid handle",
        code::PEER_UNREACHABLE => "another device does not reach the memory",
        code::NOT_READY => "not ready",
        code::ILLEGAL_ADDRESS => "a kernel used an illegal address",
        code::LAUNCH_FAILED => "a kernel failed",
        code::NOT_PERMITTED => "not permitted",
        code::NOT_SUPPORTED => "not supported",
        code::DRIVER_MISMATCH => {
            "the driver's kernel module and library are of different versions; restart after an update"
        }
        code::MPS_CONNECTION_FAILED => {
            "MPS shares the devices and cannot be reached: start it (nvidia-cuda-mps-control -d) as the same user, or unset CUDA_MPS_PIPE_DIRECTORY"
        }
        _ => "see the vendor's list of codes",
    }
}

/// What a caller can do about the answer of a function. The other libraries have numbers of their own.
pub(in crate::driver) fn kind_of(function: &str, code: Code) -> ErrorKind {
    if function.starts_with(nvml::PREFIX) {
        return nvml::kind_of(code);
    }
    if function.starts_with(collectives::PREFIX) {
        return collectives::kind_of(code);
    }
    match code {
        code::OUT_OF_MEMORY => ErrorKind::Exhausted,
        code::NOT_SUPPORTED | code::NOT_PERMITTED => ErrorKind::Unsupported,
        code::INVALID_VALUE | code::INVALID_DEVICE | code::INVALID_HANDLE => ErrorKind::Invalid,
        code::ALREADY_MAPPED => ErrorKind::Conflict,
        code::NOT_INITIALIZED
        | code::DEINITIALIZED
        | code::DEVICE_UNAVAILABLE
        | code::NO_DEVICE
        | code::MPS_CONNECTION_FAILED => ErrorKind::Unavailable,
        _ => ErrorKind::Broken,
    }
}

/// How sure an answer makes that the device, which was there when the driver was opened, is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Loss {
    /// It is, for this reason.
    Sure(&'static str),
    /// It may be: whoever can tell is to be asked.
    Likely,
    /// This answer has other reasons.
    No,
}

/// What a function's answer says about the device. `begins_with_device`: all that was asked was this device, with arguments that it took before; elsewhere a device that is refused
/// may be another one, or something else that the call was given.
pub(super) fn loss(code: Code, begins_with_device: bool) -> Loss {
    match code {
        code::NO_DEVICE => Loss::Sure("the driver has no device any more"),
        code::INVALID_DEVICE if begins_with_device => Loss::Sure("the driver does not know it any more"),
        // Also what a context is refused with while another process has the device for itself: that is no loss, and where it is asked for the management library decides.
        code::DEVICE_UNAVAILABLE if !begins_with_device => Loss::Sure("it has become unavailable"),
        code::ECC_UNCORRECTABLE => Loss::Sure("uncorrectable memory error"),
        code::DEVICE_UNAVAILABLE
        | code::INVALID_DEVICE
        | code::OPERATING_SYSTEM
        | code::ILLEGAL_ADDRESS
        | code::LAUNCH_FAILED
        | code::UNKNOWN => Loss::Likely,
        _ => Loss::No,
    }
}

/// Whether the answer to a call that names a device and others which reach its memory may be about one of the others: that it is gone, or does not reach it.
pub(super) fn may_be_of_a_peer(code: Code) -> bool {
    is_surely_of_a_peer(code) || loss(code, false) != Loss::No
}

/// Whether it is, where the same call without that other device was carried out.
pub(super) fn is_surely_of_a_peer(code: Code) -> bool {
    let is_loss = [true, false].into_iter().any(|begins| matches!(loss(code, begins), Loss::Sure(_)));
    is_loss || matches!(code, code::PEER_UNREACHABLE | code::NOT_SUPPORTED)
}

/// A device that is asked who it is, and answers this, is lost: nothing that others may have taken for themselves was asked for.
pub(super) fn is_lost_at_open(code: Code) -> bool {
    matches!(code, code::DEVICE_UNAVAILABLE | code::NO_DEVICE | code::INVALID_DEVICE | code::ECC_UNCORRECTABLE)
}

/// The cause that names descriptors, if this process is near its limit of them. What a library says then is no help: "a system call failed", or "out of memory" where each chunk
/// holds a descriptor (rocm-systems issue 10604).
pub(super) fn too_many_files() -> Option<Cause> {
    let limit = open_files_at_limit()?;
    Some(Cause::TooMany {
        what: "open files of this process",
        limit,
        remedy: "raise the limit of open files (LimitNOFILE, or `ulimit -n`), or use larger chunks",
    })
}

/// The limit on open files, if this process is near it.
fn open_files_at_limit() -> Option<u64> {
    /// What a library may have opened and closed again when it failed.
    const NEAR: u64 = 4;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current?;
    let is_near = match std::fs::read_dir("/proc/self/fd") {
        Ok(open) => open.count() as u64 + NEAR >= limit,
        // Looking takes one itself.
        Err(error) => error.raw_os_error() == Some(libc::EMFILE),
    };
    is_near.then_some(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mps_that_cannot_be_reached_is_said_to_be_that() {
        assert!(meaning(805).contains("nvidia-cuda-mps-control"), "{}", meaning(805));
        assert_eq!(kind_of("cuInit", 805), ErrorKind::Unavailable);
    }

    #[test]
    fn only_what_is_known_to_be_a_loss_is_one() {
        let sure = |code, begins| matches!(loss(code, begins), Loss::Sure(_));
        for code in [code::NO_DEVICE, code::ECC_UNCORRECTABLE] {
            assert!(sure(code, true) && sure(code, false), "{code}");
        }
        assert!(sure(code::DEVICE_UNAVAILABLE, false));
        assert_eq!(loss(code::DEVICE_UNAVAILABLE, true), Loss::Likely, "a device in exclusive use is there");
        assert!(sure(code::INVALID_DEVICE, true));
        assert_eq!(loss(code::INVALID_DEVICE, false), Loss::Likely, "a peer that is refused is another device");
        for code in [code::LAUNCH_FAILED, code::ILLEGAL_ADDRESS, code::UNKNOWN, code::OPERATING_SYSTEM] {
            assert_eq!(loss(code, false), Loss::Likely, "{code}: the process's fault as often as not");
        }
        for code in [code::OUT_OF_MEMORY, code::INVALID_VALUE, code::NOT_INITIALIZED, code::NOT_SUPPORTED, 12_345] {
            assert_eq!((loss(code, true), loss(code, false)), (Loss::No, Loss::No), "{code}");
        }
    }

    #[test]
    fn want_of_memory_is_never_a_peer_that_is_gone() {
        for code in [code::OUT_OF_MEMORY, code::INVALID_VALUE, code::NOT_INITIALIZED, code::NOT_PERMITTED] {
            assert!(!may_be_of_a_peer(code), "{code}");
        }
        for code in [code::DEVICE_UNAVAILABLE, code::NO_DEVICE, code::INVALID_DEVICE, code::PEER_UNREACHABLE] {
            assert!(may_be_of_a_peer(code) && is_surely_of_a_peer(code), "{code}");
        }
        // It may have failed for another reason, and the next time it may not.
        assert!(may_be_of_a_peer(code::UNKNOWN) && !is_surely_of_a_peer(code::UNKNOWN));
    }
}
