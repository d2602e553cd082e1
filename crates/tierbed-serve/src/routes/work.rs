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
use crate::answer::{with_type, Refusal, JSON};
use crate::body::{receive, Held, Received};
use crate::lookup::{lookup, Columns, Source};
use crate::tensors::SAFETENSORS;
use crate::{json, tensors};

/// An answer, and the memory it takes.
struct Made {
    bytes: Vec<u8>,
    body_type: String,
    held: Held,
}

pub(super) async fn answer_lookup(State(service): Shared, request: Request) -> Response {
    let is_binary = match content_type(request.headers()) {
        JSON => false,
        SAFETENSORS => true,
        other => return unknown_type(other).into_response(),
    };
    let looked_up = move |service: &Service, Received { bytes, mut held }: Received| {
        let decoded =
            if is_binary { (tensors::decode(&bytes)?, None) } else { json::decode(&bytes)? };
        drop(bytes);
        let Service { snapshot, ids, features, limits, .. } = service;
        let columns = Columns::check(features, decoded.0, decoded.1, limits)?;
        let answer_bytes_max = columns.answer_bytes(is_binary, limits)?;
        held.resize(answer_bytes_max)?;
        let vectors = lookup(Source { snapshot, ids }, &columns)?;
        let bytes = if is_binary { tensors::encode(&vectors) } else { json::encode(&vectors) }?;
        let body_type = if is_binary { SAFETENSORS } else { JSON }.to_owned();
        Ok(Made { bytes, body_type, held })
    };
    answered(service, "/v1/lookup", request, looked_up).await
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
    let predicted = move |_: &Service, Received { bytes, mut held }: Received| {
        let (answer, body_type) = predictor.predict(&bytes, &body_type)?;
        drop(bytes);
        held.resize(answer.len())?;
        Ok(Made { bytes: answer, body_type, held })
    };
    answered(service, "/v1/predict", request, predicted).await
}

/// Reads the body, finds a place, and works away from the async threads.
async fn answered(
    service: Arc<Service>,
    route: &'static str,
    request: Request,
    work: impl FnOnce(&Service, Received) -> Result<Made, Refusal> + Send + 'static,
) -> Response {
    let received = match receive(&service.limits, &service.buffers, request).await {
        Ok(received) => received,
        Err(refusal) => return refusal.into_response(),
    };
    let body_bytes = received.bytes.len() as u64;
    service.metrics.body_bytes.inc_by(body_bytes);
    let mut response = match Arc::clone(&service.places).try_acquire_owned() {
        Ok(place) => on_blocking_thread(&service, route, place, received, work).await,
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
        working.metrics.waited(route, working.clock.now_us().saturating_sub(queued_us));
        work(&working, received)
    };
    match tokio::task::spawn_blocking(held).await {
        Ok(Ok(Made { bytes, body_type, held })) => {
            let mut response = with_type(StatusCode::OK, &body_type, bytes);
            response.extensions_mut().insert(Arc::new(held));
            response
        }
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
