//! Lookups and predictions: what may wait for a disk or a model.
//!
//! ```text
//! head ─▶ type known? ─▶ body, within its limits ─▶ place ─▶ executor ─▶ answer
//!                                                     └─▶ all rows in memory ─▶ answer
//! ```
//!
//! A place is taken when the whole body is there: a client that sends slowly holds memory for the
//! bytes it sent, and no place.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Extension, Request, State};
use axum::http::request::Parts;
use axum::http::{header, HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use tokio::sync::{oneshot, OwnedSemaphorePermit};

use super::{BodyBytes, Deadline, Service, Shared};
use crate::admission::{Priority, Verdict};
use crate::answer::{Refusal, JSON};
use crate::body::{receive, Arriving, Coming, Held, Received};
use crate::coding::{Coding, Pack};
use crate::executor::{Executor, Offer, Ticket};
use crate::generation::Serving;
use crate::inline::{self, Tried};
use crate::job::{Checked, Done, Job, Made, Stage, Waits, Work};
use crate::lookup;
use crate::oip::model::Kind;
use crate::origin::Origin;
use crate::predict::bodies;
use crate::spans::Steps;
use crate::tensors::SAFETENSORS;
use crate::wire::Pulse;

/// The route of lookups of our own form.
pub(crate) const LOOKUP: &str = "/v1/lookup";

pub(super) async fn answer_lookup(
    State(service): Shared,
    Extension(deadline): Extension<Deadline>,
    Extension(origin): Extension<Arc<Origin>>,
    request: Request,
) -> Response {
    let (head, body) = request.into_parts();
    let arriving = Arriving { headers: &head.headers, body, pulse: pulse_of(&head) };
    let (asking, mut body_bytes) = (Asking { deadline, origin: &origin }, 0);
    let made = lookup(&service, asking, arriving, &mut body_bytes).await;
    told(made, body_bytes)
}

/// Whose request under `/v1` it is, and when it must be answered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asking<'a> {
    pub(super) deadline: Deadline,
    pub(super) origin: &'a Origin,
}

impl<'a> Asking<'a> {
    /// Returns what is asked under `route`, once the body has arrived.
    fn asks(self, route: &'static str, body_bytes: u64, pack: Option<Pack>) -> Ask<'a> {
        let Self { deadline: Deadline(deadline_us), origin: Origin { steps, .. } } = self;
        let (priority, generation) = (Priority::default(), None);
        Ask { route, deadline_us, priority, body_bytes, generation, pack, steps }
    }
}

/// Answers a lookup under `/v1`; tells how long its body is, once that is known.
///
/// # Errors
/// Those of [`opened`] and of [`made`].
pub(super) async fn lookup(
    service: &Service,
    asking: Asking<'_>,
    arriving: Arriving<'_, impl Coming>,
    body_bytes: &mut u64,
) -> Result<Made, Refusal> {
    let Opened { is_binary, pack, bytes, held } = opened(service, arriving, body_bytes).await?;
    let prepare = move |serving: &Serving<'_>, held: Held| {
        lookup::prepare(serving.source(), &serving.limits, &bytes, held, is_binary)
    };
    let ask = asking.asks(LOOKUP, *body_bytes, pack);
    ask.steps.of_model(service.models.name(Kind::Rows));
    made(service, ask, held, Asked { prepare, work: Work::Lookup }).await
}

pub(super) async fn answer_predict(
    State(service): Shared,
    Extension(deadline): Extension<Deadline>,
    Extension(origin): Extension<Arc<Origin>>,
    request: Request,
) -> Response {
    if !service.generations.predicts() {
        let message = "this server has no model; only lookups are answered";
        return Refusal::new(StatusCode::NOT_IMPLEMENTED, "unsupported", message).into_response();
    }
    let (head, body) = request.into_parts();
    let arriving = Arriving { headers: &head.headers, body, pulse: pulse_of(&head) };
    let (asking, mut body_bytes) = (Asking { deadline, origin: &origin }, 0);
    let made = predict(&service, asking, arriving, &mut body_bytes).await;
    told(made, body_bytes)
}

async fn predict(
    service: &Service,
    asking: Asking<'_>,
    arriving: Arriving<'_, impl Coming>,
    body_bytes: &mut u64,
) -> Result<Made, Refusal> {
    let Opened { is_binary, pack, bytes, held } = opened(service, arriving, body_bytes).await?;
    let prepare =
        move |serving: &Serving<'_>, held: Held| bodies::prepare(serving, &bytes, held, is_binary);
    let ask = asking.asks("/v1/predict", *body_bytes, pack);
    ask.steps.of_model(service.models.name(Kind::Predictions));
    made(service, ask, held, Asked { prepare, work: Work::Prediction }).await
}

/// A request of `/v1` whose body has arrived.
struct Opened {
    is_binary: bool,
    pack: Option<Pack>,
    bytes: Bytes,
    held: Held,
}

/// Reads a request of `/v1`; tells how long its body is.
///
/// # Errors
/// 415 for an unknown type; those of [`received`].
async fn opened(
    service: &Service,
    arriving: Arriving<'_, impl Coming>,
    body_bytes: &mut u64,
) -> Result<Opened, Refusal> {
    let is_binary = is_binary(arriving.headers)?;
    let pack = Coding::wanted(arriving.headers).map(Pack::Body);
    let Received { bytes, held } = received(service, arriving).await?;
    *body_bytes = bytes.len() as u64;
    Ok(Opened { is_binary, pack, bytes, held })
}

/// Returns the pulse of a request's connection.
pub(crate) fn pulse_of(head: &Parts) -> Option<&Pulse> {
    head.extensions.get::<Arc<Pulse>>().map(|pulse| &**pulse)
}

/// Reads a request's body and counts its bytes.
///
/// # Errors
/// Those of [`receive`].
pub(crate) async fn received(
    service: &Service,
    arriving: Arriving<'_, impl Coming>,
) -> Result<Received, Refusal> {
    let received = receive(&service.limits, &service.buffers, arriving).await?;
    service.metrics.body_bytes.inc_by(received.bytes.len() as u64);
    Ok(received)
}

/// A request whose body has arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) route: &'static str,
    /// Those that must be answered first are worked on first.
    pub(crate) deadline_us: u64,
    pub(crate) priority: Priority,
    pub(crate) body_bytes: u64,
    /// The generation that it wants; `None`: the newest.
    pub(crate) generation: Option<&'a str>,
    pub(crate) pack: Option<Pack>,
    pub(crate) steps: &'a Steps,
}

/// A request in the queue. Dropped before its answer came, it leaves the queue.
struct Waiting<'a> {
    executor: &'a Executor,
    ticket: Option<Ticket>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.executor.forget(ticket);
        }
    }
}

/// Answers a request over HTTP.
pub(crate) fn told(made: Result<Made, Refusal>, body_bytes: u64) -> Response {
    let mut response = made.map_or_else(IntoResponse::into_response, IntoResponse::into_response);
    response.extensions_mut().insert(BodyBytes(body_bytes));
    response
}

/// What is asked for.
pub(crate) struct Asked<P, F> {
    /// Decodes the body.
    pub(crate) prepare: F,
    /// Which kind of work it is.
    pub(crate) work: fn(Waits<P>) -> Work,
}

/// Answers: at once where that needs no wait, or none but for pages. Else waits, where that is
/// allowed, until the executor's threads have done the work; the place is given back when it ends,
/// even if the client has left. `held` is the memory of the body.
///
/// # Errors
/// 503 when there is no room, 504 when the request's time is over; those of the work.
pub(crate) async fn made<P: Checked + 'static, F>(
    service: &Service,
    ask: Ask<'_>,
    held: Held,
    asked: Asked<P, F>,
) -> Result<Made, Refusal>
where
    F: Fn(&Serving<'_>, Held) -> Result<P, Refusal> + Send + 'static,
{
    let Asked { prepare, work } = asked;
    let room = Room::take(service)?;
    let stage = if inline::may_try(&service.limits, &ask) {
        match inline::answer(service, &ask, room.request_count, held, &prepare) {
            Tried::Left(stage) => stage,
            Tried::Pending(pending) => {
                service.metrics.waited(ask.route, 0);
                let made = pending.answer(ask.steps).await;
                service.metrics.async_requests.inc_by(u64::from(made.is_ok()));
                return made;
            }
            Tried::Answered(made) => {
                service.metrics.waited(ask.route, 0);
                service.metrics.inline.inc_by(u64::from(made.is_ok()));
                return made;
            }
        }
    } else {
        Stage::Received(held)
    };
    queued(service, ask, room, work(Waits::new(stage, prepare))).await
}

/// A place of a request.
struct Room {
    place: OwnedSemaphorePermit,
    /// Other requests that wait or are worked on.
    request_count: usize,
}

impl Room {
    /// # Errors
    /// 503 when there is none.
    fn take(service: &Service) -> Result<Self, Refusal> {
        let request_count = service.places_taken();
        match Arc::clone(&service.places).try_acquire_owned() {
            Ok(place) => Ok(Self { place, request_count }),
            Err(_) => Err(refused(Verdict::Full)),
        }
    }
}

async fn queued(service: &Service, ask: Ask<'_>, room: Room, work: Work) -> Result<Made, Refusal> {
    let Ask { route, deadline_us, priority, body_bytes, generation, pack, steps } = ask;
    let Room { place, request_count } = room;
    let (answer, made) = oneshot::channel();
    let (done, queued_us) = (Done { place, answer }, service.clock.now_us());
    steps.waits(queued_us);
    let (work, steps) = (work.packed(pack), steps.clone());
    let generation = generation.map(Arc::from);
    let job = Job { route, queued_us, body_bytes, deadline_us, generation, work, steps, done };
    let offer = Offer { deadline_us, priority, request_count };
    let ticket = service.executor.push(offer, job).map_err(refused)?;
    let mut waiting = Waiting { executor: &service.executor, ticket: Some(ticket) };
    let made = made.await;
    waiting.ticket = None;
    // Only a server that stops drops work that was not begun.
    made.unwrap_or_else(|_| Err(Refusal::busy("stopping", "the server stops")))
}

pub(crate) fn refused(verdict: Verdict) -> Refusal {
    match verdict {
        Verdict::Full => Refusal::busy("places", "too many requests at once; try again later"),
        Verdict::Slow => {
            Refusal::busy("predicted_wait", "the request would wait too long; try again later")
        }
        Verdict::Late => Refusal::late("the request's time is over"),
        Verdict::Admitted => panic!("an admitted request is not refused"),
    }
}

/// Tells whether a body is safetensors; JSON when the head does not say.
///
/// # Errors
/// 415 for another type.
fn is_binary(headers: &HeaderMap) -> Result<bool, Refusal> {
    match content_type(headers) {
        JSON => Ok(false),
        SAFETENSORS => Ok(true),
        found => {
            let message = format!("content type must be {JSON} or {SAFETENSORS}, found {found:?}");
            Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid", message))
        }
    }
}

/// Returns the content type without parameters; JSON when none is given.
fn content_type(headers: &HeaderMap) -> &str {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return JSON };
    let value = value.to_str().unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim()
}
