//! Inference: from the body to the answer, within the time the client gives.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Request as HttpRequest, State};
use axum::response::{IntoResponse, Response};

use super::head::Parts;
use super::model::{Kind, Named};
use super::request::{Hurry, Request};
use super::{lookup, predict, INFER};
use crate::answer::Refusal;
use crate::body::{Held, Received};
use crate::coding::{Coding, Pack};
use crate::generation::Serving;
use crate::job::{Made, Work};
use crate::origin::Origin;
use crate::routes::work::{self, made, received, Ask};
use crate::routes::{BodyBytes, Deadline, Service, Shared};

pub(super) async fn infer(
    State(service): Shared,
    Named(kind): Named,
    Extension(deadline): Extension<Deadline>,
    Extension(origin): Extension<Arc<Origin>>,
    request: HttpRequest,
) -> Response {
    let start_us = service.clock.now_us();
    let mut body_bytes = 0;
    let begun = Begun { kind, start_us, deadline, origin: &origin };
    let made = inferred(&service, begun, request, &mut body_bytes).await;
    let us = service.clock.now_us().saturating_sub(start_us);
    service.models.counts(kind).note(made.as_ref().ok().map(|made| &made.phases), us);
    let mut response = made.map_or_else(IntoResponse::into_response, IntoResponse::into_response);
    response.extensions_mut().insert(BodyBytes(body_bytes));
    response
}

/// A request whose body has not been read.
struct Begun<'a> {
    kind: Kind,
    start_us: u64,
    deadline: Deadline,
    origin: &'a Origin,
}

async fn inferred(
    service: &Arc<Service>,
    begun: Begun<'_>,
    request: HttpRequest,
    body_bytes: &mut u64,
) -> Result<Made, Refusal> {
    let Begun { kind, start_us, deadline, origin } = begun;
    let headers = request.headers().clone();
    let pack = Coding::wanted(&headers).map(Pack::Body);
    let Received { bytes, held } = received(service, request).await?;
    *body_bytes = bytes.len() as u64;
    let parts = Parts::cut(&headers, &bytes)?;
    let hurry = parts.search(origin);
    drop(bytes);
    let body_bytes = *body_bytes;
    let asked = Asked { route: INFER, kind, start_us, deadline, hurry, body_bytes, pack };
    answer(service, asked, move || parts.request(), held).await
}

/// A request for inference whose body has arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) route: &'static str,
    pub(crate) kind: Kind,
    pub(crate) start_us: u64,
    pub(crate) deadline: Deadline,
    /// What the client wants, from the request's start.
    pub(crate) hurry: Hurry,
    pub(crate) body_bytes: u64,
    pub(crate) pack: Option<Pack>,
}

/// Answers a request, which is decoded where it is worked on.
///
/// # Errors
/// 400 for what is not served or too much, 500 when it fails, 503 when there is no room, 504 when
/// the client's time is over.
pub(crate) async fn answer(
    service: &Service,
    asked: Asked,
    decode: impl Fn() -> tierbed_core::Result<Request> + Send + 'static,
    held: Held,
) -> Result<Made, Refusal> {
    let Asked { route, kind, start_us, deadline: Deadline(latest_us), hurry, body_bytes, pack } =
        asked;
    let Hurry { timeout_us, priority } = hurry;
    let own_us = timeout_us.map_or(latest_us, |us| start_us.saturating_add(us));
    let ask = Ask { route, deadline_us: own_us.min(latest_us), priority, body_bytes, pack };
    let answering = async move {
        if kind == Kind::Predictions && service.generations.predicts() {
            let prepare =
                move |serving: &Serving<'_>, held: Held| predict::prepare(serving, decode()?, held);
            made(service, ask, held, work::Asked { prepare, work: Work::Prediction }).await
        } else {
            let prepare =
                move |serving: &Serving<'_>, held: Held| lookup::prepare(serving, decode()?, held);
            made(service, ask, held, work::Asked { prepare, work: Work::Lookup }).await
        }
    };
    let Some(timeout_us) = timeout_us else { return answering.await };
    // The body's reception was within the client's time, too.
    let left = Duration::from_micros(own_us.saturating_sub(service.clock.now_us()));
    let late = |_| Refusal::late(format!("timeout of {timeout_us} microseconds has passed"));
    tokio::time::timeout(left, answering).await.map_err(late)?
}
