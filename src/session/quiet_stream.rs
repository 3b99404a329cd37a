//! A connection to the daemon that raises no signal. Writing to a socket whose other end is gone raises SIGPIPE, which ends every program that has not said otherwise; programs in C have not, and are not to
//! die because a daemon was stopped.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// The stream, whose writes ask for no signal.
#[derive(Debug)]
pub(super) struct QuietStream(pub(super) UnixStream);

impl QuietStream {
    fn poll_send(
        &self,
        cx: &mut Context<'_>,
        mut send: impl FnMut() -> rustix::io::Result<usize>,
    ) -> Poll<Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match self.0.try_io(Interest::WRITABLE, || send().map_err(Error::from)) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                sent => return Poll::Ready(sent),
            }
        }
    }
}

impl AsyncRead for QuietStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl AsyncWrite for QuietStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        self.poll_send(cx, || send(&self.0, bytes, SendFlags::NOSIGNAL))
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<Result<usize>> {
        self.poll_send(cx, || sendmsg(&self.0, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        // A socket keeps nothing back.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
