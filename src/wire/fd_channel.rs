//! Packets with descriptors: one protobuf message a packet over a `SOCK_SEQPACKET` Unix socket, with up to 253 descriptors beside it.
//!
//! A packet arrives whole or is an error: a message longer than the limit, more descriptors than there is room for, bytes that are no message. Descriptors
//! of a packet that is an error are closed. Every descriptor is close-on-exec from the moment it exists in this process.
//!
//! Not for: what the messages mean, and which may come when.

use std::cell::RefCell;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use prost::Message;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::clock::{Clock as _, SystemClock};
use crate::error::ErrorKind;
use crate::limits;

/// Why a packet did not go or come.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// The other side is gone.
    #[error("the other side closed the connection")]
    Closed,
    /// Nothing came, or could be sent, in time.
    #[error("no answer in time")]
    TimedOut,
    /// Nothing is there yet (on a socket that does not block).
    #[error("nothing there yet")]
    WouldBlock,
    /// A message is longer than any should be.
    #[error("a message is longer than {max} bytes", max = limits::CHUNK_MESSAGE_LEN_MAX)]
    TooLong,
    /// Descriptors that came could not be opened here.
    #[error("this process may not have as many open files as memory was sent to it: raise its limit (ulimit -n)")]
    DescriptorsLost,
    /// More descriptors than a packet can carry.
    #[error("{0} descriptors are more than a message can carry, {max}", max = limits::FDS_PER_MESSAGE_MAX)]
    TooManyDescriptors(usize),
    /// The bytes are no message.
    #[error("a message cannot be understood: {0}")]
    Garbage(String),
    /// Nobody listens there.
    #[error("cannot connect")]
    Connect(#[source] Errno),
    /// The operating system refused.
    #[error("the socket failed")]
    System(#[source] Errno),
}

impl ChannelError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ChannelError::Closed | ChannelError::TimedOut | ChannelError::Connect(_) | ChannelError::WouldBlock => {
                ErrorKind::Unavailable
            }
            ChannelError::TooLong | ChannelError::TooManyDescriptors(_) | ChannelError::Garbage(_) => {
                ErrorKind::Invalid
            }
            ChannelError::DescriptorsLost
            | ChannelError::System(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::TOOMANYREFS) => {
                ErrorKind::Exhausted
            }
            ChannelError::System(_) => ErrorKind::Broken,
        }
    }

    fn of(errno: Errno, blocks: bool) -> ChannelError {
        match errno {
            Errno::AGAIN if blocks => ChannelError::TimedOut,
            Errno::AGAIN => ChannelError::WouldBlock,
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => ChannelError::Closed,
            other => ChannelError::System(other),
        }
    }
}

thread_local! {
    /// Room for a packet: made once in a thread, for it is 64 KiB that a new one would have to be given zeroed pages for.
    static PACKET: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A connection, over a socket that it owns or borrows.
#[derive(Debug)]
pub struct FdChannel<S = OwnedFd> {
    socket: S,
    blocks: bool,
}

impl FdChannel {
    /// Connects to the socket at `path`; every later send and receive takes at most `patience`.
    pub fn connect(path: &Path, patience: Duration) -> Result<FdChannel, ChannelError> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(ChannelError::System)?;
        let channel = FdChannel::over(socket, true).with_patience(patience)?;
        let address = SocketAddrUnix::new(path).map_err(ChannelError::Connect)?;
        rustix::net::connect(&channel.socket, &address).map_err(|errno| match errno {
            // As many wait there already as may, and none is served.
            Errno::AGAIN => ChannelError::TimedOut,
            errno => ChannelError::Connect(errno),
        })?;
        Ok(channel)
    }

    /// Two ends of a new connection, both blocking.
    pub fn pair() -> Result<(FdChannel, FdChannel), ChannelError> {
        let (one, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(ChannelError::System)?;
        Ok((FdChannel::over(one, true), FdChannel::over(other, true)))
    }
}

impl FdChannel {
    /// The socket.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }
}

impl<S: AsFd> FdChannel<S> {
    /// A connection over a socket that is there. `blocks` says whether calls on it wait.
    pub fn over(socket: S, blocks: bool) -> FdChannel<S> {
        FdChannel { socket, blocks }
    }

    /// The same, whose sends and receives take so long at most.
    pub fn with_patience(self, patience: Duration) -> Result<FdChannel<S>, ChannelError> {
        self.set_patience_of_both(patience)?;
        Ok(self)
    }

    /// Changes how long sends and receives may take.
    pub fn set_patience_of_both(&self, patience: Duration) -> Result<(), ChannelError> {
        let set = |timeout| set_socket_timeout(&self.socket, timeout, Some(patience)).map_err(ChannelError::System);
        [Timeout::Recv, Timeout::Send].into_iter().try_for_each(set)
    }

    /// Changes how long receives may take.
    pub fn set_patience(&self, patience: Duration) -> Result<(), ChannelError> {
        // Zero would mean for ever.
        let patience = patience.max(Duration::from_millis(1));
        set_socket_timeout(&self.socket, Timeout::Recv, Some(patience)).map_err(ChannelError::System)
    }

    /// A signal came while the socket was waited for, and the kernel's count of how long begins anew: a job with a timer would wait for ever.
    fn check_patience(&self, since_start: &SystemClock, which: Timeout) -> Result<(), ChannelError> {
        let patience = socket_timeout(&self.socket, which).map_err(ChannelError::System)?;
        if patience.is_some_and(|patience| since_start.now() >= patience) {
            Err(ChannelError::TimedOut)
        } else {
            Ok(())
        }
    }

    /// Sends one message with descriptors. They stay the caller's; the other side gets copies.
    pub fn send(&self, message: &impl Message, fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        if fds.len() > limits::FDS_PER_MESSAGE_MAX {
            return Err(ChannelError::TooManyDescriptors(fds.len()));
        }
        let bytes = message.encode_to_vec();
        if bytes.len() > limits::CHUNK_MESSAGE_LEN_MAX {
            return Err(ChannelError::TooLong);
        }
        self.send_bytes(&bytes, fds)
    }

    /// Sends any bytes as a packet: what a peer that breaks the rules would do.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(limits::FDS_PER_MESSAGE_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ChannelError::TooManyDescriptors(fds.len()));
        }
        let clock = SystemClock::new();
        loop {
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
                // A packet goes whole or not at all.
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => self.check_patience(&clock, Timeout::Send)?,
                Err(errno) => return Err(ChannelError::of(errno, self.blocks)),
            }
        }
    }

    /// Receives one message with its descriptors. Where this process may not have so many open files the kernel drops some of them, and the message comes with the rest: what it says of
    /// those that are missing is true still, and somebody must answer for it.
    pub fn receive<M: Message + Default>(&self) -> Result<(M, Vec<OwnedFd>), ChannelError> {
        self.receive_some().map(|(message, fds, _)| (message, fds))
    }

    /// The same, and whether descriptors of it were dropped.
    pub fn receive_some<M: Message + Default>(&self) -> Result<(M, Vec<OwnedFd>, bool), ChannelError> {
        self.receive_message(self.blocks)
    }

    /// The same without waiting, whatever the socket does: [`ChannelError::WouldBlock`] where nothing is there.
    pub fn receive_now<M: Message + Default>(&self) -> Result<(M, Vec<OwnedFd>), ChannelError> {
        self.receive_message(false).map(|(message, fds, _)| (message, fds))
    }

    fn receive_message<M: Message + Default>(&self, waits: bool) -> Result<(M, Vec<OwnedFd>, bool), ChannelError> {
        let receive = |bytes: &mut Vec<u8>| {
            // One byte more than allowed shows a message that is too long.
            bytes.resize(limits::CHUNK_MESSAGE_LEN_MAX + 1, 0);
            let (len, fds, is_cut) = self.receive_bytes(bytes, waits)?;
            let message = M::decode(&bytes[..len]).map_err(|error| ChannelError::Garbage(error.to_string()))?;
            Ok((message, fds, is_cut))
        };
        // At the very end of a thread, which may allocate and free there, its room is gone.
        PACKET.try_with(|bytes| receive(&mut bytes.borrow_mut())).unwrap_or_else(|_| receive(&mut Vec::new()))
    }

    fn receive_bytes(&self, bytes: &mut [u8], waits: bool) -> Result<(usize, Vec<OwnedFd>, bool), ChannelError> {
        let flags = if waits { RecvFlags::CMSG_CLOEXEC } else { RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(limits::FDS_PER_MESSAGE_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let clock = SystemClock::new();
        let received = loop {
            let mut parts = [IoSliceMut::new(bytes)];
            match rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags) {
                Ok(received) => break received,
                Err(Errno::INTR) => self.check_patience(&clock, Timeout::Recv)?,
                Err(errno) => return Err(ChannelError::of(errno, waits)),
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        // From here on an early return closes what came.
        if received.flags.contains(ReturnFlags::TRUNC) || received.bytes > limits::CHUNK_MESSAGE_LEN_MAX {
            return Err(ChannelError::TooLong);
        }
        if received.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        Ok((received.bytes, fds, received.flags.contains(ReturnFlags::CTRUNC)))
    }
}

impl<S: AsFd> AsFd for FdChannel<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::v1::{Ack, Batch, ChunkInfo};

    fn received(channel: &FdChannel) -> Result<u64, ChannelError> {
        channel.receive::<Ack>().map(|(ack, _)| ack.request)
    }

    fn pipes(count: usize) -> Vec<(OwnedFd, OwnedFd)> {
        (0..count).map(|_| rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()).collect()
    }

    #[test]
    fn a_descriptor_that_was_passed_is_the_same_file_and_closes_on_exec() {
        let (here, there) = FdChannel::pair().unwrap();
        let (read, write) = pipes(1).pop().unwrap();
        here.send(&Ack { request: 7 }, &[write.as_fd()]).unwrap();
        drop(write);
        let (message, fds) = there.receive::<Ack>().unwrap();
        assert_eq!((message.request, fds.len()), (7, 1));
        assert!(rustix::io::fcntl_getfd(&fds[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        rustix::io::write(&fds[0], b"hello").unwrap();
        let mut bytes = [0; 8];
        assert_eq!(rustix::io::read(&read, &mut bytes), Ok(5));
    }

    #[test]
    fn a_full_batch_arrives_in_order_and_none_is_lost() {
        let (here, there) = FdChannel::pair().unwrap();
        let pipes = pipes(limits::FDS_PER_MESSAGE_MAX);
        let fds: Vec<_> = pipes.iter().map(|(_, write)| write.as_fd()).collect();
        let chunks = (0..fds.len() as u64).map(|n| ChunkInfo { chunk_id: u64::MAX - n, len_bytes: 1 << 40 }).collect();
        here.send(&Batch { request: u64::MAX, chunks, is_last: true }, &fds).unwrap();
        let (batch, received) = there.receive::<Batch>().unwrap();
        assert_eq!((batch.chunks.len(), received.len()), (253, 253));
        for (at, fd) in received.iter().enumerate() {
            rustix::io::write(fd, &[at as u8]).unwrap();
            let mut byte = [0];
            rustix::io::read(&pipes[at].0, &mut byte).unwrap();
            assert_eq!(byte[0], at as u8);
        }
        let mut one_more = fds.clone();
        one_more.push(fds[0]);
        assert_eq!(here.send(&Ack::default(), &one_more), Err(ChannelError::TooManyDescriptors(254)));
    }

    #[test]
    fn a_packet_that_is_wrong_is_an_error_and_its_descriptors_are_closed() {
        let (here, there) = FdChannel::pair().unwrap();
        let (read, write) = pipes(1).pop().unwrap();
        here.send_bytes(&[0xff; 10], &[write.as_fd()]).unwrap();
        assert!(matches!(received(&there), Err(ChannelError::Garbage(_))));
        here.send_bytes(&vec![0; limits::CHUNK_MESSAGE_LEN_MAX + 1], &[write.as_fd()]).unwrap();
        assert_eq!(received(&there), Err(ChannelError::TooLong));
        here.send_bytes(&vec![0; 3 * limits::CHUNK_MESSAGE_LEN_MAX], &[]).unwrap();
        assert_eq!(received(&there), Err(ChannelError::TooLong));
        // With every copy of the writing end closed, the reading end is at its end.
        drop(write);
        rustix::io::ioctl_fionbio(&read, true).unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0_u8; 8]), Ok(0));
        // The connection itself is still good.
        here.send(&Ack { request: 1 }, &[]).unwrap();
        assert_eq!(received(&there), Ok(1));
    }

    #[test]
    fn silence_is_a_time_out_and_a_closed_end_is_told() {
        let (here, there) = FdChannel::pair().unwrap();
        there.set_patience(Duration::from_millis(10)).unwrap();
        assert_eq!(received(&there), Err(ChannelError::TimedOut));
        drop(here);
        assert_eq!(received(&there), Err(ChannelError::Closed));
        assert_eq!(there.send(&Ack { request: 1 }, &[]), Err(ChannelError::Closed));
    }

    #[test]
    fn nobody_there_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let missing = FdChannel::connect(&dir.path().join("none"), Duration::from_secs(5));
        assert!(matches!(missing, Err(ChannelError::Connect(Errno::NOENT))));
    }
}
