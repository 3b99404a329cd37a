//! Descriptors that tokio watches.

#![expect(unsafe_code, reason = "tokio asks for a promise about the descriptor that an OwnedFd keeps by its type")]

use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Lets tokio watch a descriptor. Must be called inside a tokio runtime.
pub(super) fn watch(fd: OwnedFd, interest: Interest) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: what is asked for is that the descriptor stays open and the same until the AsyncFd goes. An OwnedFd is exactly that: it gives the same
    // number each time and closes it when it is dropped, which only the AsyncFd does from here on.
    let watched = unsafe { AsyncFd::register_with_interest(fd, interest) };
    Ok(watched?)
}
