//! One client of gRPC: calls beside each other over one connection of HTTP/2.

use std::convert::Infallible;
use std::future::{poll_fn, Future};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::calls::Calls;
use super::gathered::Gathered;
use super::outgoing::Outgoing;
use super::{call, is_finite, status, INFER};
use crate::answer::Refusal;
use crate::body::Held;
use crate::connection::{caught, routed, Callee};
use crate::sending::PART_BYTES;

/// Calls of one connection at once; a client's others wait.
const CALLS_MAX: u32 = 256;
/// Most bytes of a call's head.
const HEAD_BYTES_MAX: u32 = 32 << 10;
/// Bytes that a client may send ahead of what is read, in one call or in all together.
const WINDOW_BYTES: u32 = 256 << 10;
/// After a silence of this long the client is asked whether it is there, and has as long to answer.
const PING: Duration = Duration::from_secs(30);

/// Answers the calls of one connection until it ends.
pub(crate) async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    callee: Callee,
) {
    let service = Arc::clone(&callee.service);
    let calls = Arc::new(Calls::new());
    let answering = {
        let calls = Arc::clone(&calls);
        service_fn(move |request| answer(callee.clone(), Arc::clone(&calls), request))
    };
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(CALLS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_send_buf_size(PART_BYTES)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING);
    let sender = Gathered::new(stream);
    let io = TokioIo::new(sender.share());
    let mut connection = pin!(builder.serve_connection(io, answering));
    let mut stopping = service.stopping.clone();
    let mut is_stopping = pin!(async move {
        // An error means that the server was dropped: as good a reason to stop.
        let _ = stopping.wait_for(|&stop| stop).await;
    });
    let (mut stop, mut timer) = (None, pin!(tokio::time::sleep(Duration::ZERO)));
    let cut_off = poll_fn(|cx| {
        if stop.is_none() && is_stopping.as_mut().poll(cx).is_ready() {
            stop = Some(Instant::now());
            connection.as_mut().graceful_shutdown();
        }
        let ended = connection.as_mut().poll(cx);
        let sent = sender.poll_send(cx);
        // A client that leaves, or whose bytes are not HTTP/2, ends its connection only.
        if ended.is_ready() || matches!(sent, Poll::Ready(Err(_))) {
            return Poll::Ready(false);
        }
        let Some(deadline) = calls.deadline(&service.limits, stop, cx) else {
            return Poll::Pending;
        };
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        timer.as_mut().poll(cx).map(|()| calls.owe_answers())
    });
    if cut_off.await {
        service.metrics.connection_cut("answer");
        service.log.cut_off("answer");
    }
}

/// Answers one call.
async fn answer(
    callee: Callee,
    calls: Arc<Calls>,
    request: Request<Incoming>,
) -> Result<Response<Outgoing>, Infallible> {
    let call = calls.begin(is_finite(request.uri().path()));
    let metrics = Arc::clone(&callee.service.metrics);
    let is_infer = request.method() == Method::POST && request.uri().path() == INFER;
    let mut response = if is_infer {
        let inferring = pin!(call::infer(&callee.service, request));
        caught(&callee.service, inferring).await.unwrap_or_else(status::told)
    } else {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(calls);
        routed(callee, request, status::told).await
    };
    let held = response.extensions_mut().remove::<Arc<Held>>();
    response.extensions_mut().remove::<Refusal>();
    Ok(response.map(|body| Outgoing::new(body, call, &metrics, held)))
}
