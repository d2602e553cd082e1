//! Routes: the handler of each request, and the thread on which it runs.

pub(crate) mod about;
pub(crate) mod hot;
pub(crate) mod work;

use std::any::Any;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::middleware::{from_fn_with_state, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::Router;
use tierbed_core::env::Clock;
use tierbed_snapshot::Snapshot;
use tokio::sync::{watch, Semaphore};
use tokio::time::Instant;

use crate::admin::life::{Life, State as LifeState};
use crate::answer::Refusal;
use crate::answering::Answering;
use crate::body::Buffers;
use crate::executor::Executor;
use crate::faults::Faults;
use crate::gateway::Gateway;
use crate::generation::Generations;
use crate::log::{Log, Told};
use crate::metrics::{Metrics, LEFT};
use crate::oip::{self, Models};
use crate::options::Limits;
use crate::origin::Origin;
use crate::spans::{route_of, Call, Ending, Spans};
use crate::timed::until;
use crate::tls::Tls;
use crate::tokens::{Scope, Tokens};

/// What every request sees.
#[derive(Debug)]
pub(crate) struct Service {
    /// Tells servers of one process apart.
    pub(crate) number: u64,
    pub(crate) answering: Arc<Answering>,
    /// Who has the rows, where this server has none of its own.
    pub(crate) gateway: Option<Arc<Gateway>>,
    pub(crate) snapshot_name: String,
    pub(crate) identity: String,
    pub(crate) generations: Generations,
    /// What the Open Inference Protocol calls this server's models.
    pub(crate) models: Models,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) log: Arc<Log>,
    pub(crate) spans: Spans,
    pub(crate) faults: Faults,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) start_us: u64,
    pub(crate) life: Life,
    pub(crate) limits: Limits,
    /// Who may ask; everybody when there is none.
    pub(crate) tokens: Option<Tokens>,
    pub(crate) tls: Option<Tls>,
    /// Whether addresses that others can reach need clients that are known.
    pub(crate) requires_auth: bool,
    pub(crate) stopping: watch::Receiver<bool>,
    /// Told to go away: balancers shall send no more requests.
    pub(crate) draining: watch::Sender<bool>,
    /// Requests whose bodies have arrived that may wait or be worked on at once.
    pub(crate) places: Arc<Semaphore>,
    pub(crate) place_count: usize,
    /// Memory for bodies and answers.
    pub(crate) buffers: Buffers,
    /// Where requests wait, and are worked on.
    pub(crate) executor: Arc<Executor>,
}

pub(crate) type Shared = State<Arc<Service>>;

impl Service {
    /// Returns what answers now.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.answering.snapshot()
    }

    /// Tells whether balancers shall send requests.
    pub(crate) fn is_ready(&self) -> bool {
        LifeState::of(self) == LifeState::Ready
    }

    /// Requests are taken from now on.
    pub(crate) fn begin(&self) {
        self.life.begin();
        self.metrics.ready.set(i64::from(self.is_ready()));
    }

    /// Tells balancers to send no more requests; everything is still answered.
    pub(crate) fn drain(&self) {
        if !self.draining.send_replace(true) {
            self.metrics.ready.set(0);
            self.log.draining();
            self.spans.flush();
        }
    }

    /// Checks that a request may do what `scope` says; without one anybody may.
    ///
    /// # Errors
    /// 401 without a token that is known, 403 for one that may do something else.
    pub(crate) fn authorize(
        &self,
        headers: &HeaderMap,
        scope: Option<Scope>,
    ) -> Result<(), Refusal> {
        match (&self.tokens, scope) {
            (Some(tokens), Some(scope)) => tokens.check(headers, scope),
            _ => Ok(()),
        }
    }

    /// Returns how many requests wait or are worked on.
    pub(crate) fn places_taken(&self) -> usize {
        self.place_count.saturating_sub(self.places.available_permits())
    }

    /// Turns a panic of ours or of the model into an answer, and tells of it.
    pub(crate) fn panicked(&self, panic: &(dyn Any + Send)) -> Refusal {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("a panic without a message");
        self.log.panicked(text);
        let message = format!("the request ended in a panic, please report it: {text}");
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "panic", message)
    }

    /// Counts an answer, and logs it where it reports a failure.
    fn note(&self, told: Told<'_>, refusal: Option<&Refusal>) {
        self.metrics.count(told.route, told.status, told.us);
        if told.us > self.log.slow_us {
            self.metrics.slow.inc();
        }
        if let Some(refusal) = refusal {
            if let Some(reason) = refusal.reason() {
                self.metrics.refused(reason);
                self.log.refused(reason, told.origin);
            } else if told.status == StatusCode::INTERNAL_SERVER_ERROR.as_u16() {
                self.metrics.failed(refusal.kind());
                self.faults.note(refusal.kind(), refusal.message());
                self.log.failed(told, refusal);
            } else if matches!(told.status, 401 | 403) {
                self.log.unauthorized(told, refusal);
            }
        }
        self.log.answered(told);
    }
}

pub(crate) fn router(service: &Arc<Service>) -> Router {
    Router::new()
        .route("/", get(about::describe))
        .route("/health", get(about::health))
        .route("/livez", get(about::live))
        .route("/readyz", get(about::ready))
        .route("/metrics", get(about::metrics))
        .route(work::LOOKUP, post(work::answer_lookup))
        .route("/v1/predict", post(work::answer_predict))
        .merge(oip::router())
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        .layer(from_fn_with_state(Arc::clone(service), measure))
        .with_state(Arc::clone(service))
}

/// Bytes of a request's body, as the handler read it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyBytes(pub(crate) u64);

/// When a request must be answered, in microseconds of the server's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(pub(crate) u64);

/// The time in which a proxy expects the answer, in milliseconds; 0 is no time.
const EXPECTED_MS: HeaderName = HeaderName::from_static("x-envoy-expected-rq-timeout-ms");

/// Returns the time in which a proxy expects the answer, in microseconds.
///
/// # Errors
/// 400 for a header that is no number.
fn expected_us(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let parsed = headers.get(EXPECTED_MS).map(|value| {
        let ms = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
        ms.ok_or_else(|| {
            let message = format!("{EXPECTED_MS} must be milliseconds, found {value:?}");
            Refusal::new(StatusCode::BAD_REQUEST, "invalid", message)
        })
    });
    let ms = parsed.transpose()?;
    Ok(ms.map(|ms| ms.saturating_mul(1_000)).filter(|us| *us > 0))
}

/// When a request must be answered, and how long that is from now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Time {
    pub(crate) deadline: Deadline,
    left: Duration,
    end: Instant,
}

impl Time {
    /// Of a request that has come: that of the server, or the proxy's or the client's where these
    /// are less.
    ///
    /// # Errors
    /// 400 for a time that is none.
    pub(crate) fn of(
        service: &Service,
        own_us: Option<u64>,
        headers: &HeaderMap,
    ) -> Result<Self, Refusal> {
        let expected_us = expected_us(headers)?;
        let longest_us = service.limits.request_ms_max * 1_000;
        let time_us = [own_us, expected_us].into_iter().flatten().fold(longest_us, u64::min);
        let deadline = Deadline(service.clock.now_us().saturating_add(time_us));
        let left = Duration::from_micros(time_us);
        Ok(Self { deadline, left, end: Instant::now() + left })
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// 504 when the time is over.
    pub(crate) async fn wait<T>(self, answering: impl Future<Output = T>) -> Result<T, Refusal> {
        let Self { left, end, .. } = self;
        let late = || Refusal::late(format!("request took longer than {left:?}"));
        until(end, answering).await.ok_or_else(late)
    }
}

/// Answers a request within its time.
///
/// # Errors
/// Those of [`Time`].
pub(crate) async fn in_time(
    service: &Service,
    own_us: Option<u64>,
    mut request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    let time = Time::of(service, own_us, request.headers())?;
    request.extensions_mut().insert(time.deadline);
    time.wait(next.run(request)).await
}

/// Counts every request, and ends those that take too long to answer.
async fn measure(State(service): Shared, mut request: Request, next: Next) -> Response {
    let route = route_name(request.uri().path());
    let (method, path) = (request.method(), request.uri().path());
    let call = Call::Http { method, path, route: route_of(&request) };
    let origin = Arc::new(service.spans.origin(request.headers(), call));
    request.extensions_mut().insert(Arc::clone(&origin));
    let is_oip = oip::is_ours(route);
    let scope = scope_of(request.uri().path());
    let answering = async {
        let answered = match service.authorize(request.headers(), scope) {
            Ok(()) => in_time(&service, None, request, next).await,
            Err(refusal) => Err(refusal),
        };
        let response = answered.unwrap_or_else(IntoResponse::into_response);
        if is_oip {
            oip::worded(response)
        } else {
            response
        }
    };
    counted(&service, route, &origin, answering).await
}

/// Counts a request by its answer, which is told what the request is. A refusal has its own status,
/// however its protocol tells it.
pub(crate) async fn counted(
    service: &Service,
    route: &'static str,
    origin: &Origin,
    answering: impl Future<Output = Response>,
) -> Response {
    let counting = Counting::begin(service, route, origin);
    let mut response = answering.await;
    let body_bytes = response.extensions().get().map_or(0, |BodyBytes(bytes)| *bytes);
    let refusal: Option<&Refusal> = response.extensions().get();
    let status = refusal.map_or(response.status(), Refusal::status).as_u16();
    let us = counting.end(status, refusal);
    service.note(Told { route, status, us, body_bytes, origin }, refusal);
    origin.tell(response.headers_mut());
    response
}

/// Counts a request whose client leaves: it is no longer polled.
struct Counting<'a> {
    service: &'a Service,
    route: &'static str,
    origin: &'a Origin,
    start_us: u64,
    is_over: bool,
}

impl<'a> Counting<'a> {
    fn begin(service: &'a Service, route: &'static str, origin: &'a Origin) -> Self {
        Self { service, route, origin, start_us: service.clock.now_us(), is_over: false }
    }

    /// Ends, when there is an answer to be counted; returns how long that took.
    fn end(mut self, status: u16, refusal: Option<&Refusal>) -> u64 {
        self.is_over = true;
        self.ended(status, refusal)
    }

    fn ended(&self, status: u16, refusal: Option<&Refusal>) -> u64 {
        let Self { service, start_us, .. } = *self;
        let (end_us, is_encrypted) = (service.clock.now_us(), service.tls.is_some());
        let ending = Ending { start_us, end_us, status, refusal, is_encrypted };
        service.spans.ended(self.origin, ending);
        end_us.saturating_sub(start_us)
    }
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.ended(LEFT, None);
            self.service.metrics.count(self.route, LEFT, 0);
        }
    }
}

/// Names a route for metrics: unknown paths share one name, so that they cannot fill memory.
fn route_name(path: &str) -> &'static str {
    let known = ["/", "/health", "/livez", "/readyz", "/metrics", "/v1/lookup", "/v1/predict"];
    let known = known.into_iter().find(|route| *route == path);
    known.or_else(|| oip::route_name(path)).unwrap_or("other")
}

/// Returns what a client must be allowed to do for a path; nothing to ask whether the server lives.
pub(crate) fn scope_of(path: &str) -> Option<Scope> {
    match path {
        "/livez" | "/readyz" | "/v2/health/live" | "/v2/health/ready" => None,
        "/health" | "/metrics" => Some(Scope::Metrics),
        _ => Some(Scope::Infer),
    }
}

async fn unknown_route() -> Refusal {
    Refusal::new(StatusCode::NOT_FOUND, "invalid", "no such route; GET / lists them")
}

async fn unknown_method() -> Refusal {
    Refusal::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid",
        "this route takes another method; GET / lists them",
    )
}
