//! Frames of a connection on their way to the socket, gathered until there are no more for now.
//!
//! The machinery of HTTP/2 flushes behind each frame of data: an answer would be two writes, of
//! which the second has only its trailers, and would wake its client twice. Gathered, an answer is
//! one write, and so are answers that are made at the same time.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{ready, Context, Poll};

use prost::bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that are gathered before the socket must take them: four frames of the usual size.
const GATHERED_BYTES_MAX: usize = 64 << 10;

/// A socket that keeps what is written until it is told to send.
#[derive(Debug)]
pub(super) struct Gathered<S>(Arc<Mutex<State<S>>>);

#[derive(Debug)]
struct State<S> {
    stream: S,
    unsent: BytesMut,
}

impl<S> Gathered<S> {
    pub(super) fn new(stream: S) -> Self {
        Self(Arc::new(Mutex::new(State { stream, unsent: BytesMut::new() })))
    }

    /// Returns the same socket, for who reads and writes; the caller sends.
    pub(super) fn share(&self) -> Self {
        Self(Arc::clone(&self.0))
    }

    // The state is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, State<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: AsyncWrite + Unpin> Gathered<S> {
    /// Sends what was written.
    pub(super) fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.lock().poll_send(cx)
    }
}

impl<S: AsyncWrite + Unpin> State<S> {
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.unsent.is_empty() {
            return Poll::Ready(Ok(()));
        }
        while !self.unsent.is_empty() {
            let sent = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.unsent))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unsent.advance(sent);
        }
        // An idle connection keeps no more memory than usual answers need.
        if self.unsent.capacity() > GATHERED_BYTES_MAX {
            self.unsent = BytesMut::new();
        }
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Makes room for more: who writes much waits for the socket.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.unsent.len() < GATHERED_BYTES_MAX {
            return Poll::Ready(Ok(()));
        }
        self.poll_send(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathered<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.lock().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathered<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.lock();
        ready!(state.poll_room(cx))?;
        state.unsent.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.lock();
        ready!(state.poll_room(cx))?;
        for part in parts {
            state.unsent.extend_from_slice(part);
        }
        Poll::Ready(Ok(parts.iter().map(|part| part.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Leaves it to who sends.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.lock();
        ready!(state.poll_send(cx))?;
        Pin::new(&mut state.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// A socket with room for some bytes.
    #[derive(Debug, Default)]
    struct Narrow {
        room: usize,
        taken: Vec<u8>,
        write_count: usize,
    }

    impl AsyncWrite for Narrow {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.write_count += 1;
            let count = bytes.len().min(self.room);
            if count == 0 {
                return Poll::Pending;
            }
            self.room -= count;
            self.taken.extend_from_slice(&bytes[..count]);
            Poll::Ready(Ok(count))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn what_is_written_is_sent_in_one_write_and_waits_where_it_does_not_fit() {
        let mut cx = Context::from_waker(Waker::noop());
        let sender = Gathered::new(Narrow { room: 6, ..Narrow::default() });
        let mut writer = sender.share();
        let parts = [IoSlice::new(b"one "), IoSlice::new(b"two ")];
        let written = Pin::new(&mut writer).poll_write_vectored(&mut cx, &parts);
        assert!(matches!(written, Poll::Ready(Ok(8))));
        assert!(Pin::new(&mut writer).poll_flush(&mut cx).is_ready());
        assert!(matches!(Pin::new(&mut writer).poll_write(&mut cx, b"three"), Poll::Ready(Ok(5))));
        assert_eq!(sender.lock().stream.write_count, 0);
        assert!(sender.poll_send(&mut cx).is_pending());
        assert_eq!(sender.lock().stream.taken, b"one tw");
        assert!(Pin::new(&mut writer).poll_shutdown(&mut cx).is_pending(), "bytes are left");
        sender.lock().stream.room = 100;
        sender.lock().stream.write_count = 0;
        assert!(Pin::new(&mut writer).poll_shutdown(&mut cx).is_ready());
        assert_eq!(sender.lock().stream.taken, b"one two three");
        assert!(sender.poll_send(&mut cx).is_ready());
        assert_eq!(sender.lock().stream.write_count, 1);
    }

    #[test]
    fn who_writes_much_waits_for_the_socket() {
        let mut cx = Context::from_waker(Waker::noop());
        let sender = Gathered::new(Narrow::default());
        let mut writer = sender.share();
        let bytes = vec![7; GATHERED_BYTES_MAX];
        assert!(Pin::new(&mut writer).poll_write(&mut cx, &bytes).is_ready());
        assert!(Pin::new(&mut writer).poll_write(&mut cx, b"more").is_pending());
        sender.lock().stream.room = usize::MAX;
        assert!(Pin::new(&mut writer).poll_write(&mut cx, b"more").is_ready());
        assert_eq!(sender.lock().stream.taken, bytes);
        assert!(sender.poll_send(&mut cx).is_ready());
        assert_eq!(sender.lock().stream.taken.len(), bytes.len() + 4);
    }
}
