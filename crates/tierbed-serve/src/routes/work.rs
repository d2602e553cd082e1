//! Lookups and predictions: what may wait for a disk or a model.
//!
//! ```text
//! head ─▶ type known? ─▶ body, within its limits ─▶ place ─▶ blocking thread ─▶ answer
//! ```
//!
//! A place is taken when the whole body is there: a client that sends slowly holds memory for the
//! bytes it sent, and no place.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{header, HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use tokio::sync::OwnedSemaphorePermit;

use super::{BodyBytes, Service, Shared};
use crate::answer::{Refusal, JSON};
use crate::body::{receive, Received};
use crate::job::{Body, Made, Phases, Prepared};
use crate::lookup;
use crate::tensors::SAFETENSORS;

pub(super) async fn answer_lookup(State(service): Shared, request: Request) -> Response {
    let is_binary = match content_type(request.headers()) {
        JSON => false,
        SAFETENSORS => true,
        other => return unknown_type(other).into_response(),
    };
    let received = match received(&service, request).await {
        Ok(received) => received,
        Err(refusal) => return refusal.into_response(),
    };
    let work = move |service: &Service, Received { bytes, held }: Received| {
        let prepare =
            move || lookup::prepare(service.source(), &service.limits, &bytes, held, is_binary);
        looked_up(service, prepare)
    };
    answered(&service, "/v1/lookup", received, work).await
}

pub(super) async fn answer_predict(State(service): Shared, request: Request) -> Response {
    let Some(predictor) = service.predictor.clone() else {
        let message = "this server has no model; only lookups are answered";
        return Refusal::new(StatusCode::NOT_IMPLEMENTED, "unsupported", message).into_response();
    };
    let body_type = match content_type(request.headers()) {
        known @ (JSON | SAFETENSORS) => known.to_owned(),
        other => return unknown_type(other).into_response(),
    };
    let received = match received(&service, request).await {
        Ok(received) => received,
        Err(refusal) => return refusal.into_response(),
    };
    let predicted = move |_: &Service, Received { bytes, mut held }: Received| {
        let (answer, body_type) = predictor.predict(&bytes, &body_type)?;
        drop(bytes);
        held.resize(answer.len())?;
        let body = Body { bytes: answer.into(), body_type: body_type.into(), header_bytes: None };
        Ok(Made { body, held, phases: Phases::default() })
    };
    answered(&service, "/v1/predict", received, predicted).await
}

/// Prepares a request, looks its queries up, and makes its answer.
pub(crate) fn looked_up(
    service: &Service,
    prepare: impl FnOnce() -> Result<Prepared, Refusal>,
) -> Result<Made, Refusal> {
    let start_us = service.clock.now_us();
    let Prepared { mut queries, held, sample_count, encode } = prepare()?;
    let read_us = service.clock.now_us();
    for query in &mut queries {
        query.look_up(service.source())?;
    }
    let answered_us = service.clock.now_us();
    let body = encode(queries)?;
    let phases = Phases {
        input_us: read_us.saturating_sub(start_us),
        infer_us: answered_us.saturating_sub(read_us),
        output_us: service.clock.now_us().saturating_sub(answered_us),
        sample_count,
        ..Phases::default()
    };
    Ok(Made { body, held, phases })
}

/// Reads a request's body and counts its bytes.
///
/// # Errors
/// Those of [`receive`].
pub(crate) async fn received(service: &Service, request: Request) -> Result<Received, Refusal> {
    let received = receive(&service.limits, &service.buffers, request).await?;
    service.metrics.body_bytes.inc_by(received.bytes.len() as u64);
    Ok(received)
}

/// Finds a place, and works away from the async threads.
pub(crate) async fn answered(
    service: &Arc<Service>,
    route: &'static str,
    received: Received,
    work: impl FnOnce(&Service, Received) -> Result<Made, Refusal> + Send + 'static,
) -> Response {
    let body_bytes = received.bytes.len() as u64;
    let mut response = match Arc::clone(&service.places).try_acquire_owned() {
        Ok(place) => on_blocking_thread(service, route, place, received, work).await,
        Err(_) => {
            Refusal::busy("places", "too many requests at once; try again later").into_response()
        }
    };
    response.extensions_mut().insert(BodyBytes(body_bytes));
    response
}

/// Runs `work` on a blocking thread. The permit is released when the work ends, even if the client
/// has left.
async fn on_blocking_thread(
    service: &Arc<Service>,
    route: &'static str,
    place: OwnedSemaphorePermit,
    received: Received,
    work: impl FnOnce(&Service, Received) -> Result<Made, Refusal> + Send + 'static,
) -> Response {
    let queued_us = service.clock.now_us();
    let working = Arc::clone(service);
    let held = move || {
        let _place = place;
        let queue_us = working.clock.now_us().saturating_sub(queued_us);
        working.metrics.waited(route, queue_us);
        work(&working, received).map(|made| made.after(queue_us))
    };
    match tokio::task::spawn_blocking(held).await {
        Ok(Ok(made)) => made.into_response(),
        Ok(Err(refusal)) => refusal.into_response(),
        Err(ended) => match ended.try_into_panic() {
            Ok(panic) => service.panicked(&*panic).into_response(),
            // Only a runtime that shuts down drops work that was not begun.
            Err(_) => Refusal::busy("stopping", "the server stops").into_response(),
        },
    }
}

/// Returns the content type without parameters; JSON when none is given.
fn content_type(headers: &HeaderMap) -> &str {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return JSON };
    let value = value.to_str().unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim()
}

fn unknown_type(found: &str) -> Refusal {
    let message = format!("content type must be {JSON} or {SAFETENSORS}, found {found:?}");
    Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid", message)
}
