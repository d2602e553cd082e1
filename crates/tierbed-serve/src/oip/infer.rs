//! Inference: from the body to the answer, within the time the client gives.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Request as HttpRequest, State};
use axum::response::Response;
use tokio::time::Instant;

use super::head::Parts;
use super::model::{Kind, Named};
use super::request::{Encoded, Hurry};
use super::{lookup, predict, INFER};
use crate::answer::Refusal;
use crate::body::{Arriving, Coming, Held, Received};
use crate::coding::{Coding, Pack};
use crate::generation::Serving;
use crate::job::{Made, Work};
use crate::origin::Origin;
use crate::routes::work::{self, made, pulse_of, received, told, Ask};
use crate::routes::{Deadline, Service, Shared};
use crate::spans::Steps;
use crate::timed::until;

pub(super) async fn infer(
    State(service): Shared,
    Named(kind): Named,
    Extension(deadline): Extension<Deadline>,
    Extension(origin): Extension<Arc<Origin>>,
    request: HttpRequest,
) -> Response {
    let (head, body) = request.into_parts();
    let arriving = Arriving { headers: &head.headers, body, pulse: pulse_of(&head) };
    let begun = Begun { kind, deadline, origin: &origin };
    let mut body_bytes = 0;
    let made = inferred(&service, begun, arriving, &mut body_bytes).await;
    told(made, body_bytes)
}

/// A request whose body has not been read.
pub(crate) struct Begun<'a> {
    pub(crate) kind: Kind,
    pub(crate) deadline: Deadline,
    pub(crate) origin: &'a Origin,
}

/// Answers a request; tells how long its body is, once that is known. The model's statistics count
/// it.
///
/// # Errors
/// Those of [`received`] and of [`answer`].
pub(crate) async fn inferred(
    service: &Service,
    begun: Begun<'_>,
    arriving: Arriving<'_, impl Coming>,
    body_bytes: &mut u64,
) -> Result<Made, Refusal> {
    let Begun { kind, deadline, origin } = begun;
    let start_us = service.clock.now_us();
    let made = async {
        let headers = arriving.headers;
        let pack = Coding::wanted(headers).map(Pack::Body);
        let Received { bytes, held } = received(service, arriving).await?;
        *body_bytes = bytes.len() as u64;
        let parts = Parts::cut(headers, &bytes)?;
        let (hurry, generation) = parts.search(origin);
        let generation = generation.as_deref();
        drop(bytes);
        let body_bytes = *body_bytes;
        let (route, steps) = (INFER, &origin.steps);
        let asked =
            Asked { route, kind, start_us, deadline, hurry, generation, body_bytes, pack, steps };
        answer(service, asked, Encoded::Json(parts), held).await
    };
    let made = made.await;
    let us = service.clock.now_us().saturating_sub(start_us);
    service.models.counts(kind).note(made.as_ref().ok().map(|made| &made.phases), us);
    made
}

/// A request for inference whose body has arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) route: &'static str,
    pub(crate) kind: Kind,
    pub(crate) start_us: u64,
    pub(crate) deadline: Deadline,
    /// What the client wants, from the request's start.
    pub(crate) hurry: Hurry,
    /// The generation that it wants; `None`: the newest.
    pub(crate) generation: Option<&'a str>,
    pub(crate) body_bytes: u64,
    pub(crate) pack: Option<Pack>,
    pub(crate) steps: &'a Steps,
}

/// Answers a request, which is decoded where it is worked on.
///
/// # Errors
/// 400 for what is not served or too much, 500 when it fails, 503 when there is no room, 504 when
/// the client's time is over.
pub(crate) async fn answer(
    service: &Service,
    asked: Asked<'_>,
    encoded: Encoded,
    held: Held,
) -> Result<Made, Refusal> {
    let Asked { route, kind, start_us, deadline: Deadline(latest_us), .. } = asked;
    let Asked {
        hurry: Hurry { timeout_us, priority }, body_bytes, generation, pack, steps, ..
    } = asked;
    steps.of_model(service.models.name(kind));
    let own_us = timeout_us.map_or(latest_us, |us| start_us.saturating_add(us));
    let deadline_us = own_us.min(latest_us);
    let ask = Ask { route, deadline_us, priority, body_bytes, generation, pack, steps };
    let answering = async move {
        if kind == Kind::Predictions && service.generations.predicts() {
            let prepare = move |serving: &Serving<'_>, held: Held| {
                predict::prepare(serving, encoded.request()?, held)
            };
            made(service, ask, held, work::Asked { prepare, work: Work::Prediction }).await
        } else {
            let prepare =
                move |serving: &Serving<'_>, held: Held| lookup::prepare(serving, &encoded, held);
            made(service, ask, held, work::Asked { prepare, work: Work::Lookup }).await
        }
    };
    let Some(timeout_us) = timeout_us else { return answering.await };
    // The body's reception was within the client's time, too.
    let left = Duration::from_micros(own_us.saturating_sub(service.clock.now_us()));
    let late = || Refusal::late(format!("timeout of {timeout_us} microseconds has passed"));
    until(Instant::now() + left, answering).await.ok_or_else(late)?
}
