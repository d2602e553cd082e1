//! The answer on its way to the client.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::body::Held;
use crate::metrics::Metrics;
use crate::wire::Pulse;

/// Bytes handed over at once: what the socket has not taken stays here and is seen to stay.
pub(crate) const PART_BYTES: usize = 256 << 10;

/// A whole answer, handed over part by part. Tells the pulse when it is gone.
#[derive(Debug)]
pub(crate) struct Sending {
    rest: Bytes,
    /// Nothing is sent of the answer to a HEAD request.
    is_sent: bool,
    pulse: Arc<Pulse>,
    metrics: Arc<Metrics>,
    /// The memory that the answer takes.
    _held: Option<Arc<Held>>,
}

impl Sending {
    pub(crate) fn new(
        bytes: Bytes,
        is_sent: bool,
        pulse: &Arc<Pulse>,
        metrics: &Arc<Metrics>,
        held: Option<Arc<Held>>,
    ) -> Self {
        pulse.begin_answer();
        let (pulse, metrics) = (Arc::clone(pulse), Arc::clone(metrics));
        Self { rest: bytes, is_sent, pulse, metrics, _held: held }
    }
}

impl Body for Sending {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let part_bytes = self.rest.len().min(PART_BYTES);
        let part = self.rest.split_to(part_bytes);
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
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
