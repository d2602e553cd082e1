//! States of a connection and their deadlines.
//!
//! ```text
//! Fresh ──first byte──▶ Head ──whole head──▶ Work ──answer made──▶ Answer ──taken──▶ Idle
//!                         ▲                                                            │
//!                         └───────────────────── first byte of the next ◀──────────────┘
//! ```
//!
//! The socket, the service and the answer's body move it; all of them are polled by the
//! connection's task.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::options::Limits;

/// After `stop`, an idle connection is kept this long: a request may be on its way.
const STOP_IDLE: Duration = Duration::from_millis(250);
/// After `stop`, a connection that owes its first byte or the rest of a head is kept this long.
pub(crate) const STOP_HEAD: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No byte has come yet.
    Fresh,
    /// A request's first bytes have come.
    Head,
    /// The head is whole: the body is read, the answer made.
    Work,
    /// The client takes the answer.
    Answer,
    /// The answer is taken.
    Idle,
}

/// What the parts of a connection tell each other.
#[derive(Debug)]
pub(crate) struct Pulse {
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
struct State {
    phase: Phase,
    since: Instant,
    /// The socket takes no more bytes now.
    is_write_blocked: bool,
    /// The client has sent all it will ever send.
    has_ended: bool,
    /// A body was announced, and not all of it was read.
    has_unread_body: bool,
}

impl Pulse {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                phase: Phase::Fresh,
                since: Instant::now(),
                is_write_blocked: false,
                has_ended: false,
                has_unread_body: false,
            }),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.lock().phase
    }

    /// The head is whole.
    pub(crate) fn begin_request(&self, has_body: bool) {
        let mut state = self.lock();
        (state.phase, state.since, state.has_unread_body) = (Phase::Work, Instant::now(), has_body);
    }

    /// The whole body has been read.
    pub(crate) fn body_is_read(&self) {
        self.lock().has_unread_body = false;
    }

    /// The answer is made.
    pub(crate) fn begin_answer(&self) {
        let mut state = self.lock();
        (state.phase, state.since) = (Phase::Answer, Instant::now());
    }

    /// The answer is in the socket, or its client has left.
    pub(crate) fn end_answer(&self) {
        let mut state = self.lock();
        (state.phase, state.since) = (Phase::Idle, Instant::now());
    }

    /// Returns when the client's time is over; `None` while the server works.
    pub(crate) fn deadline(&self, limits: &Limits, stop: Option<Instant>) -> Option<Instant> {
        let State { phase, since, is_write_blocked, .. } = *self.lock();
        let (ms_max, stop_after) = match phase {
            Phase::Work => return None,
            Phase::Answer => (limits.answer_ms_max, None),
            Phase::Idle if is_write_blocked => (limits.answer_ms_max, None),
            Phase::Idle => (limits.idle_ms_max, Some(STOP_IDLE)),
            Phase::Fresh => (limits.idle_ms_max, Some(STOP_HEAD)),
            Phase::Head => (limits.head_ms_max, Some(STOP_HEAD)),
        };
        let deadline = since + Duration::from_millis(ms_max);
        let stopped = stop.zip(stop_after).map(|(stop, after)| stop + after);
        Some(stopped.map_or(deadline, |stopped| stopped.min(deadline)))
    }

    /// Tells whether closing at once could lose an answer that the client has not read: while
    /// bytes of the client lie unread, closing resets the connection.
    pub(crate) fn must_linger(&self) -> bool {
        let state = self.lock();
        let is_between = matches!(state.phase, Phase::Fresh | Phase::Idle);
        !state.has_ended && (!is_between || state.has_unread_body)
    }

    fn heard(&self, byte_count: usize) {
        let mut state = self.lock();
        if byte_count == 0 {
            state.has_ended = true;
        } else if matches!(state.phase, Phase::Fresh | Phase::Idle) {
            (state.phase, state.since) = (Phase::Head, Instant::now());
        }
    }

    // The state is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A socket, encrypted or not, that tells what it hears.
#[derive(Debug)]
pub(crate) struct Wire<S> {
    pub(crate) stream: S,
    pub(crate) pulse: Arc<Pulse>,
}

impl<S> Wire<S> {
    fn told<T>(&self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.pulse.lock().is_write_blocked = written.is_pending();
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Poll::Ready(Ok(())) = read {
            self.pulse.heard(buf.filled().len() - before);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.told(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // What is encrypted may wait here for the socket.
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.told(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.told(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
