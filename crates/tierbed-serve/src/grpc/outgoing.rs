//! The answer of a call on its way to the client.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Frame};

use super::calls::Call;
use crate::body::Held;
use crate::metrics::Metrics;
use crate::sending::PART_BYTES;

/// An answer, handed over part by part: what the client has not taken stays here.
#[derive(Debug)]
pub(super) struct Outgoing {
    body: Body,
    part: Bytes,
    has_ended: bool,
    metrics: Arc<Metrics>,
    /// The memory that the answer takes.
    _held: Option<Arc<Held>>,
    _call: Call,
}

impl Outgoing {
    pub(super) fn new(
        body: Body,
        call: Call,
        metrics: &Arc<Metrics>,
        held: Option<Arc<Held>>,
    ) -> Self {
        call.is_answered();
        let metrics = Arc::clone(metrics);
        let has_ended = body.is_end_stream();
        Self { body, part: Bytes::new(), has_ended, metrics, _held: held, _call: call }
    }
}

impl hyper::body::Body for Outgoing {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.part.is_empty() {
            match std::task::ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(part) => {
                        self.metrics.answer_bytes.inc_by(part.len() as u64);
                        self.part = part;
                    }
                    Err(trailers) => {
                        self.has_ended = true;
                        return Poll::Ready(Some(Ok(trailers)));
                    }
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    self.has_ended = true;
                    return Poll::Ready(None);
                }
            }
        }
        let part_bytes = self.part.len().min(PART_BYTES);
        let part = self.part.split_to(part_bytes);
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if !self.has_ended {
            self.metrics.unfinished.inc();
        }
    }
}
