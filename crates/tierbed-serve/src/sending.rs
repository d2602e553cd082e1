//! The answer on its way to the client.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body as AxumBody, Bytes};
use hyper::body::{Body, Frame, SizeHint};

use crate::body::Held;
use crate::metrics::Metrics;
use crate::wire::Pulse;

/// Bytes handed over at once: what the socket has not taken stays here and is seen to stay.
pub(crate) const PART_BYTES: usize = 256 << 10;

/// Marks a response whose body comes over time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Streamed;

/// An answer, handed over part by part. Tells the pulse when it is gone.
#[derive(Debug)]
pub(crate) struct Sending {
    rest: Bytes,
    /// What comes later of an answer that is not whole.
    stream: Option<AxumBody>,
    /// Nothing is sent of the answer to a HEAD request.
    is_sent: bool,
    pulse: Arc<Pulse>,
    metrics: Arc<Metrics>,
    /// The memory that the answer takes.
    _held: Option<Held>,
}

impl Sending {
    pub(crate) fn new(
        bytes: Bytes,
        is_sent: bool,
        pulse: &Arc<Pulse>,
        metrics: &Arc<Metrics>,
        held: Option<Held>,
    ) -> Self {
        pulse.begin_answer();
        let (pulse, metrics) = (Arc::clone(pulse), Arc::clone(metrics));
        Self { rest: bytes, stream: None, is_sent, pulse, metrics, _held: held }
    }

    /// Sends a body as it comes. A client has its time for each part.
    pub(crate) fn streamed(
        body: AxumBody,
        is_sent: bool,
        pulse: &Arc<Pulse>,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let mut sending = Self::new(Bytes::new(), is_sent, pulse, metrics, None);
        sending.stream = Some(body);
        sending
    }
}

impl Body for Sending {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(stream) = &mut self.stream {
            let part = std::task::ready!(Pin::new(stream).poll_frame(cx));
            self.pulse.begin_answer();
            // Streams of ours do not fail.
            return Poll::Ready(part.and_then(Result::ok).map(Ok));
        }
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let part_bytes = self.rest.len().min(PART_BYTES);
        let part = self.rest.split_to(part_bytes);
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_none() && self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        if self.stream.is_some() {
            return SizeHint::default();
        }
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.is_sent && !self.rest.is_empty() {
            self.metrics.unfinished.inc();
        }
        self.pulse.end_answer();
    }
}
