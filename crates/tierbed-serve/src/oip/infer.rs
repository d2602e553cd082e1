//! Inference: from the body to the answer, within the time the client gives.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request as HttpRequest, State};
use axum::http::{header, HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};

use super::head::Parts;
use super::model::{Kind, Named};
use super::request::Request;
use super::{lookup, predict, INFER};
use crate::answer::Refusal;
use crate::body::{Held, Received};
use crate::job::{Made, Work};
use crate::routes::work::{made, received, Ask};
use crate::routes::{BodyBytes, Service, Shared};

pub(super) async fn infer(
    State(service): Shared,
    Named(kind): Named,
    request: HttpRequest,
) -> Response {
    let start_us = service.clock.now_us();
    let mut body_bytes = 0;
    let made = inferred(&service, kind, request, &mut body_bytes).await;
    let us = service.clock.now_us().saturating_sub(start_us);
    service.models.counts(kind).note(made.as_ref().ok().map(|made| &made.phases), us);
    let mut response = made.map_or_else(IntoResponse::into_response, IntoResponse::into_response);
    response.extensions_mut().insert(BodyBytes(body_bytes));
    response
}

async fn inferred(
    service: &Arc<Service>,
    kind: Kind,
    request: HttpRequest,
    body_bytes: &mut u64,
) -> Result<Made, Refusal> {
    let start_us = service.clock.now_us();
    let headers = request.headers().clone();
    check_encoding(&headers)?;
    let Received { bytes, held } = received(service, request).await?;
    *body_bytes = bytes.len() as u64;
    let parts = Parts::cut(&headers, &bytes)?;
    let timeout_us = parts.timeout_us();
    drop(bytes);
    let asked = Asked { route: INFER, kind, start_us, timeout_us, body_bytes: *body_bytes };
    answer(service, asked, move || parts.request(), held).await
}

/// A request for inference whose body has arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) route: &'static str,
    pub(crate) kind: Kind,
    pub(crate) start_us: u64,
    /// The client's own time, from the request's start.
    pub(crate) timeout_us: Option<u64>,
    pub(crate) body_bytes: u64,
}

/// Answers a request, which is decoded where it is worked on.
///
/// # Errors
/// 400 for what is not served or too much, 500 when it fails, 503 when there is no room, 504 when
/// the client's time is over.
pub(crate) async fn answer(
    service: &Service,
    Asked { route, kind, start_us, timeout_us, body_bytes }: Asked,
    decode: impl FnOnce() -> tierbed_core::Result<Request> + Send + 'static,
    held: Held,
) -> Result<Made, Refusal> {
    let work = match (kind, service.predictor.clone()) {
        (Kind::Predictions, Some(predictor)) => Work::Alone(Box::new(move |service: &Service| {
            predict::answer(service, &*predictor, decode, held)
        })),
        _ => Work::Lookup(Box::new(move |service: &Service| {
            lookup::prepare(service, decode()?, held)
        })),
    };
    let us_max = service.limits.request_ms_max * 1_000;
    let deadline_us = start_us.saturating_add(timeout_us.map_or(us_max, |us| us.min(us_max)));
    let answering = made(service, Ask { route, deadline_us, body_bytes }, work);
    let Some(timeout_us) = timeout_us else { return answering.await };
    let late = || Refusal::late(format!("timeout of {timeout_us} microseconds has passed"));
    let passed_us = service.clock.now_us().saturating_sub(start_us);
    // A client's time is not for the reception of its own body only.
    let left = timeout_us.checked_sub(passed_us).filter(|left| *left > 0).ok_or_else(late)?;
    let in_time = tokio::time::timeout(Duration::from_micros(left), answering);
    in_time.await.unwrap_or_else(|_| Err(late()))
}

fn check_encoding(headers: &HeaderMap) -> Result<(), Refusal> {
    match headers.get(header::CONTENT_ENCODING) {
        Some(found) if found != "identity" => {
            let message =
                format!("content encoding {found:?} is not taken; send the body as it is");
            Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid", message))
        }
        _ => Ok(()),
    }
}
