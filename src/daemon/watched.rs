//! Descriptors that tokio watches.

#![expect(unsafe_code, reason = "tokio asks for a promise about the descriptor that an OwnedFd keeps by its type")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// What gives the same descriptor each time, and keeps it open as long as it lives.
pub(super) trait Owned: AsRawFd {}

impl Owned for OwnedFd {}
impl Owned for Arc<OwnedFd> {}

/// Lets tokio watch a descriptor. Must be called inside a tokio runtime.
pub(super) fn watch<T: Owned>(fd: T, interest: Interest) -> std::io::Result<AsyncFd<T>> {
    // SAFETY: what is asked for is that the descriptor stays open and the same until the AsyncFd goes. An OwnedFd is exactly that, and so is a part of one: it gives the same
    // number each time and closes it when the last part is dropped, of which the AsyncFd has one until it goes.
    let watched = unsafe { AsyncFd::register_with_interest(fd, interest) };
    Ok(watched?)
}
