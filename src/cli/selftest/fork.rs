//! A forked child that does nothing but live: what a data loader is to a trainer that is killed.
//!
//! Only a fork has what its parent's driver has open; a program that is started has not. The child touches nothing of what it was given.

#![expect(unsafe_code, reason = "forks, and ends the child without the parent's clean-up")]

use std::os::fd::BorrowedFd;

/// Forks a child that lives until `socket` ends or somebody ends it, and says its number; none where it cannot be had.
pub(super) fn idle_child(socket: BorrowedFd<'_>) -> Option<i32> {
    // SAFETY: the child calls `read` and `_exit` only, which are allowed between a fork of a process with threads and the end: no lock, no memory of the
    // heap, nothing of the driver's.
    let pid = unsafe { libc::fork() };
    if pid != 0 {
        return (pid > 0).then_some(pid);
    }
    let mut byte = [0_u8];
    // Nobody writes there while the child lives; an end, or an error, is the end.
    while rustix::io::read(socket, &mut byte) == Err(rustix::io::Errno::INTR) {}
    // SAFETY: it ends the child at once, without anything that the parent has registered for its end.
    unsafe { libc::_exit(0) }
}
