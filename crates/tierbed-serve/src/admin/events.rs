//! Server-Sent Events of the statistics: one a second, made once for all who watch.
//!
//! Whoever reads too slowly misses events and gets the newest; whoever takes none for
//! `answer_ms_max` is cut off, as with every answer.
//!
//! Source: HTML Living Standard, section 9.2.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{header, HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use hyper::body::Frame;
use tokio::sync::{mpsc, watch, OwnedSemaphorePermit};

use super::stats::Stats;
use super::window::Sample;
use super::Admin;
use crate::answer::{with_type, Refusal};
use crate::sending::Streamed;

/// Time between two samples, and between two events.
const PAUSE: Duration = Duration::from_secs(1);

const EVENTS: &str = "text/event-stream";

/// Takes samples and tells those who watch, until the server stops.
pub(super) async fn tell(admin: Arc<Admin>, events: watch::Sender<Bytes>) {
    let mut stopping = admin.service.stopping.clone();
    loop {
        let stats = admin.service.snapshot().stats();
        let sample = Sample::of(&admin.service, &stats);
        admin.window().push(sample);
        if admin.watchers.available_permits() < super::WATCHERS_MAX {
            events.send_replace(event(&admin));
        }
        let is_over = tokio::time::timeout(PAUSE, stopping.wait_for(|&stop| stop)).await.is_ok();
        if is_over {
            break;
        }
    }
}

/// Returns the statistics as an event: JSON has no line breaks, so it is one line of data.
fn event(admin: &Admin) -> Bytes {
    let event = serde_json::to_string(&Stats::of(admin)).map(|json| format!("data: {json}\n\n"));
    match event {
        Ok(event) => event.into(),
        Err(error) => panic!("statistics are numbers and texts: {error}"),
    }
}

/// Tells whether a client asks for events.
pub(super) fn are_wanted(headers: &HeaderMap) -> bool {
    let mut accepted = headers.get_all(header::ACCEPT).iter();
    accepted.any(|value| value.to_str().is_ok_and(|text| text.contains(EVENTS)))
}

/// Answers with events, the first at once.
///
/// # Errors
/// 503 where enough watch already.
pub(super) fn watched(admin: &Arc<Admin>) -> Result<Response, Refusal> {
    let Ok(permit) = Arc::clone(&admin.watchers).try_acquire_owned() else {
        return Err(Refusal::busy("watchers", "too many watch the statistics; close some pages"));
    };
    let (to, events) = mpsc::channel(1);
    tokio::spawn(forward(admin.newest.clone(), event(admin), to, permit));
    let mut response = with_type(StatusCode::OK, EVENTS, Bytes::new());
    *response.body_mut() = Body::new(Events(events));
    let headers = response.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response.extensions_mut().insert(Streamed);
    Ok(response)
}

/// Hands events to a client until it leaves or the server stops.
async fn forward(
    mut newest: watch::Receiver<Bytes>,
    first: Bytes,
    to: mpsc::Sender<Bytes>,
    _permit: OwnedSemaphorePermit,
) {
    newest.mark_unchanged();
    let mut event = first;
    // Either fails when its other end has gone.
    while to.send(event).await.is_ok() && newest.changed().await.is_ok() {
        event = newest.borrow_and_update().clone();
    }
}

/// Events as a body.
struct Events(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|event| event.map(|bytes| Ok(Frame::data(bytes))))
    }
}
