//! Waiting with an end. A timer is set only for what is not there at once: most bodies have come
//! with their heads, and most answers are made without a wait.

use std::future::{poll_fn, Future};
use std::pin::pin;
use std::task::Poll;

use tokio::time::{timeout_at, Instant};

/// Waits until `end`; returns `None` when that has come first.
pub(crate) async fn until<T>(end: Instant, waited_for: impl Future<Output = T>) -> Option<T> {
    let mut waited_for = pin!(waited_for);
    match poll_fn(|cx| Poll::Ready(waited_for.as_mut().poll(cx))).await {
        Poll::Ready(output) => Some(output),
        Poll::Pending => timeout_at(end, waited_for).await.ok(),
    }
}
