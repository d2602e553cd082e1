//! One client: its requests one after another, each with its time.

use std::convert::Infallible;
use std::future::{poll_fn, Future};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::pin::{pin, Pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{header, HeaderValue, Method, Request, Response};
use axum::response::IntoResponse;
use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{service_fn, Service as _};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::gauge::Gauge;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::again::Again;
use crate::answer::{Refusal, JSON, RETRY_AFTER_S};
use crate::routes::hot::{Going, Hot, Outgoing};
use crate::routes::Service;
use crate::sending::Sending;
use crate::wire::{Phase, Pulse, Wire};

/// Most bytes of a request's head, and of what is read or written ahead.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// How long a client that was answered early may go on sending before it is cut off.
const LINGER: Duration = Duration::from_secs(1);

/// What all connections share.
#[derive(Debug, Clone)]
pub(crate) struct Callee {
    pub(crate) router: Router,
    pub(crate) service: Arc<Service>,
    pub(crate) protocol: Protocol,
}

/// What clients of a door speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http,
    Grpc,
    /// HTTP with routes of its own.
    Admin,
}

/// How a connection came to its end.
enum End {
    /// By the client, or after the last answer.
    Done,
    /// Its bytes were not HTTP, or the socket failed.
    Broken,
    /// The client took too long.
    TimedOut(Phase),
}

/// Answers the requests of one connection until it ends.
pub(crate) async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin + 'static, callee: Callee) {
    let pulse = Arc::new(Pulse::new());
    let io = TokioIo::new(Wire { stream, pulse: Arc::clone(&pulse) });
    let answering = {
        let (callee, pulse) = (callee.clone(), Arc::clone(&pulse));
        service_fn(move |request| boxed(answer(callee.clone(), Arc::clone(&pulse), request)))
    };
    let mut builder = http1::Builder::new();
    // Times are kept here, for every phase; see `Pulse::deadline`.
    builder.header_read_timeout(None).max_buf_size(HEAD_BYTES_MAX);
    let mut connection = builder.serve_connection(io, answering);
    let limits = &callee.service.limits;
    let mut stopping = callee.service.stopping.clone();
    let mut is_stopping = pin!(async move {
        // An error means that the server was dropped: as good a reason to stop.
        let _ = stopping.wait_for(|&stop| stop).await;
    });
    let (mut stop, mut timer) = (None, pin!(tokio::time::sleep(Duration::ZERO)));
    let again = Again::new();
    let end = poll_fn(|cx| {
        if stop.is_none() && is_stopping.as_mut().poll(cx).is_ready() {
            stop = Some(Instant::now());
        }
        // To its end, which sends what is left of the last answer.
        if let Poll::Ready(ended) = again.poll(Pin::new(&mut connection), cx) {
            return Poll::Ready(if ended.is_ok() { End::Done } else { End::Broken });
        }
        loop {
            let Some(deadline) = pulse.deadline(limits, stop) else { return Poll::Pending };
            // A deadline that moves on, as with every request, is looked at when the timer goes.
            if deadline < timer.deadline() || timer.is_elapsed() {
                timer.as_mut().reset(deadline);
            }
            std::task::ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(End::TimedOut(pulse.phase()));
            }
        }
    });
    let end = end.await;
    let stream = connection.into_parts().io.into_inner().stream;
    close(stream, &end, &pulse, &callee.service).await;
}

/// Counts an open connection, and down when it ends, however it ends.
pub(crate) struct Closing<'a>(&'a Gauge);

impl<'a> Closing<'a> {
    pub(crate) fn new(open: &'a Gauge) -> Self {
        open.inc();
        Self(open)
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Tells why, where the client should know, and closes.
async fn close(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    end: &End,
    pulse: &Pulse,
    service: &Service,
) {
    let reason = match end {
        End::Done => None,
        End::Broken if pulse.phase() == Phase::Head => Some("not_http"),
        // A client that has left is counted with its request.
        End::Broken => None,
        End::TimedOut(Phase::Head) => Some("head"),
        End::TimedOut(Phase::Answer) => Some("answer"),
        End::TimedOut(Phase::Fresh | Phase::Idle | Phase::Work) => None,
    };
    if let Some(reason) = reason {
        service.metrics.connection_cut(reason);
        service.log.cut_off(reason);
    }
    if let End::TimedOut(Phase::Answer) = end {
        return;
    }
    let must_linger = pulse.must_linger();
    let leaving = async {
        if let End::TimedOut(Phase::Head) = end {
            let ms_max = service.limits.head_ms_max;
            let message = format!("head of the request did not arrive within {ms_max} ms");
            say(&mut stream, "408 Request Timeout", "io", &message).await;
        }
        leave(&mut stream, must_linger).await;
    };
    // Whoever takes or sends longer than that is cut off.
    let _ = tokio::time::timeout(LINGER, leaving).await;
}

/// Answers a connection that there is no room for, or that speaks something else.
pub(crate) async fn turn_away(mut stream: TcpStream, status: &str, kind: &str, message: &str) {
    let leaving = async {
        say(&mut stream, status, kind, message).await;
        leave(&mut stream, true).await;
    };
    let _ = tokio::time::timeout(LINGER, leaving).await;
}

/// Writes an answer without HTTP's machinery.
async fn say(stream: &mut (impl AsyncWrite + Unpin), status: &str, kind: &str, message: &str) {
    let body = serde_json::json!({ "kind": kind, "message": message }).to_string();
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {JSON}\r\nretry-after: {RETRY_AFTER_S}\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    // A client that has gone does not miss it.
    let _ = stream.write_all(answer.as_bytes()).await;
}

/// Ends the answers, and reads on where told to: closing over unread bytes resets the connection,
/// and the client may lose the answer it was given.
async fn leave(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), reads_on: bool) {
    // A socket that failed has nobody to tell.
    if stream.shutdown().await.is_err() || !reads_on {
        return;
    }
    let mut bytes = [0; 4096];
    while matches!(stream.read(&mut bytes).await, Ok(1..)) {}
}

type Answering = Pin<Box<dyn Future<Output = Result<Response<Sending>, Infallible>> + Send>>;

fn boxed(
    answer: impl Future<Output = Result<Response<Sending>, Infallible>> + Send + 'static,
) -> Answering {
    Box::pin(answer)
}

/// Lets a request's handler answer it; a panic is told as `told` does.
pub(crate) async fn routed(
    Callee { router, service, .. }: Callee,
    request: Request<Body>,
    told: impl Fn(Refusal) -> Response<Body>,
) -> Response<Body> {
    let routed = pin!(TowerToHyperService::new(router).call(request));
    match caught(&service, routed).await {
        Ok(Ok(response)) => response,
        Err(refusal) => told(refusal),
    }
}

/// Waits for an answer.
///
/// # Errors
/// The refusal that tells of a panic: it ends the request, not the other answers of the process.
pub(crate) async fn caught<F: Future>(
    service: &Service,
    mut answering: Pin<&mut F>,
) -> Result<F::Output, Refusal> {
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| answering.as_mut().poll(cx))) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(service.panicked(&*panic))),
    })
    .await
}

/// Answers one request.
async fn answer(
    callee: Callee,
    pulse: Arc<Pulse>,
    request: Request<Incoming>,
) -> Result<Response<Sending>, Infallible> {
    let is_sent = request.method() != Method::HEAD;
    pulse.begin_request(!request.body().is_end_stream());
    let service = Arc::clone(&callee.service);
    let Outgoing { mut head, body } = match Hot::of(&callee, &request) {
        Some(hot) => {
            let answering = pin!(hot.answer(&service, request, &pulse));
            match caught(&service, answering).await {
                Ok(outgoing) => outgoing,
                Err(refusal) => Outgoing::of(refusal.into_response()).await,
            }
        }
        None => {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(Arc::clone(&pulse));
            Outgoing::of(routed(callee, request, IntoResponse::into_response).await).await
        }
    };
    if *service.stopping.borrow() {
        head.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let metrics = &service.metrics;
    let sending = match body {
        Going::Stream(body) => Sending::streamed(body, is_sent, &pulse, metrics),
        Going::Whole { bytes, held } => {
            metrics.answer_bytes.inc_by(bytes.len() as u64);
            Sending::new(bytes, is_sent, &pulse, metrics, held)
        }
    };
    Ok(head.map(|()| sending))
}
