//! Inference: from the body to the answer, within the time the client gives.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{header, HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};

use super::head::Parts;
use super::model::{Kind, Named};
use super::{lookup, predict, INFER};
use crate::answer::Refusal;
use crate::body::Received;
use crate::job::Work;
use crate::routes::work::{answered, received, Ask};
use crate::routes::{Service, Shared};

pub(super) async fn infer(
    State(service): Shared,
    Named(kind): Named,
    request: Request,
) -> Response {
    let start_us = service.clock.now_us();
    let response = inferred(&service, kind, request, start_us).await;
    let response = response.unwrap_or_else(IntoResponse::into_response);
    let us = service.clock.now_us().saturating_sub(start_us);
    service.models.counts(kind).note(&response, us);
    response
}

async fn inferred(
    service: &Arc<Service>,
    kind: Kind,
    request: Request,
    start_us: u64,
) -> Result<Response, Refusal> {
    let headers = request.headers().clone();
    check_encoding(&headers)?;
    let received = received(service, request).await?;
    let parts = Parts::cut(&headers, &received.bytes)?;
    let timeout_us = parts.timeout_us();
    let predictor = service.predictor.clone();
    let Received { bytes, held } = received;
    let body_bytes = bytes.len() as u64;
    drop(bytes);
    let work = match (kind, predictor) {
        (Kind::Predictions, Some(predictor)) => Work::Alone(Box::new(move |service: &Service| {
            predict::answer(service, &*predictor, &parts, held)
        })),
        _ => {
            Work::Lookup(Box::new(move |service: &Service| lookup::prepare(service, &parts, held)))
        }
    };
    let us_max = service.limits.request_ms_max * 1_000;
    let deadline_us = start_us.saturating_add(timeout_us.map_or(us_max, |us| us.min(us_max)));
    let answering = answered(service, Ask { route: INFER, deadline_us, body_bytes }, work);
    let Some(timeout_us) = timeout_us else { return Ok(answering.await) };
    let passed_us = service.clock.now_us().saturating_sub(start_us);
    let left = Duration::from_micros(timeout_us.saturating_sub(passed_us));
    // A client's time is not for the reception of its own body only.
    match tokio::time::timeout(left, answering).await {
        Ok(response) => Ok(response),
        Err(_) => Err(Refusal::late(format!("timeout of {timeout_us} microseconds has passed"))),
    }
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
