//! Which question is this, and which thread answers it?

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{header, HeaderMap, StatusCode};
use axum::middleware::{from_fn_with_state, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde_json::json;
use tierbed::PublishedIds;
use tierbed_core::env::Clock;
use tierbed_pagestore::Snapshot;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::answer::{with_type, Refusal, JSON};
use crate::features::{pooling_name, Feature};
use crate::lookup::{lookup, Source};
use crate::metrics::Metrics;
use crate::server::Predictor;
use crate::tensors::SAFETENSORS;
use crate::{json, tensors};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What every request sees.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) ids: PublishedIds,
    pub(crate) snapshot_name: String,
    pub(crate) features: Vec<Feature>,
    pub(crate) predictor: Option<Arc<dyn Predictor>>,
    pub(crate) metrics: Metrics,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) start_us: u64,
    pub(crate) indices_max: usize,
    pub(crate) body_bytes_max: usize,
    pub(crate) request_ms_max: u64,
    /// Requests with a body that may be worked on at once.
    pub(crate) places: Arc<Semaphore>,
}

/// A place among the requests worked on; given back when the work ends, even if nobody waits
/// for the answer any more.
#[derive(Debug, Clone)]
struct Place(#[expect(dead_code, reason = "held, not read")] Arc<OwnedSemaphorePermit>);

type Shared = State<Arc<Service>>;

pub(crate) fn router(service: &Arc<Service>) -> Router {
    Router::new()
        .route("/", get(describe))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/lookup", post(answer_lookup))
        .route("/v1/predict", post(answer_predict))
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        .layer(DefaultBodyLimit::max(service.body_bytes_max))
        .layer(from_fn_with_state(Arc::clone(service), measure))
        .with_state(Arc::clone(service))
}

/// Counts every request, and ends those that take too long to arrive or to answer.
async fn measure(State(service): Shared, mut request: Request, next: Next) -> Response {
    let start_us = service.clock.now_us();
    let route = route_name(request.uri().path());
    if matches!(route, "/v1/lookup" | "/v1/predict") {
        let Ok(permit) = Arc::clone(&service.places).try_acquire_owned() else {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            service.metrics.count(route, status.as_u16(), 0);
            let message = "too many requests at once; try again later";
            return Refusal::new(status, "busy", message).into_response();
        };
        request.extensions_mut().insert(Place(Arc::new(permit)));
    }
    let limit = Duration::from_millis(service.request_ms_max);
    let response = match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            Refusal::new(StatusCode::REQUEST_TIMEOUT, "io", "request took too long").into_response()
        }
    };
    let us = service.clock.now_us() - start_us;
    service.metrics.count(route, response.status().as_u16(), us);
    response
}

/// Names a route for metrics: unknown paths share one name, so that they cannot fill memory.
fn route_name(path: &str) -> &'static str {
    ["/", "/health", "/metrics", "/v1/lookup", "/v1/predict"]
        .into_iter()
        .find(|route| *route == path)
        .unwrap_or("other")
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

async fn describe(State(service): Shared) -> Response {
    let features: Vec<_> = service
        .features
        .iter()
        .map(|feature| {
            json!({
                "name": feature.name,
                "table": feature.table_name,
                "pooling": pooling_name(feature.pooling),
                "dim": feature.dim,
            })
        })
        .collect();
    let mut routes = vec!["GET /", "GET /health", "GET /metrics", "POST /v1/lookup"];
    if service.predictor.is_some() {
        routes.push("POST /v1/predict");
    }
    let body = json!({
        "name": "tierbed",
        "version": env!("CARGO_PKG_VERSION"),
        "snapshot": service.snapshot_name,
        "routes": routes,
        "features": features,
    });
    with_type(StatusCode::OK, JSON, body.to_string().into_bytes())
}

async fn health(State(service): Shared) -> Response {
    let manifest = service.snapshot.manifest();
    let uptime_us = service.clock.now_us().saturating_sub(service.start_us);
    let body = json!({
        "status": "ok",
        "snapshot": service.snapshot_name,
        "tables": manifest.tables.len(),
        "rows": manifest.row_count,
        "uptime_s": uptime_us as f64 / 1e6,
    });
    with_type(StatusCode::OK, JSON, body.to_string().into_bytes())
}

async fn metrics(State(service): Shared) -> Response {
    match service.metrics.encode() {
        Ok(text) => with_type(StatusCode::OK, OPEN_METRICS, text.into_bytes()),
        Err(error) => Refusal::from(error).into_response(),
    }
}

async fn answer_lookup(
    State(service): Shared,
    Extension(place): Extension<Place>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let is_binary = match content_type(&headers) {
        JSON => false,
        SAFETENSORS => true,
        other => return unknown_type(other).into_response(),
    };
    let body = match whole_body(body) {
        Ok(body) => body,
        Err(refusal) => return refusal.into_response(),
    };
    on_blocking_thread(place, move || {
        let (columns, pooling) =
            if is_binary { (tensors::decode(&body)?, None) } else { json::decode(&body)? };
        drop(body);
        let Service { snapshot, ids, features, indices_max, .. } = &*service;
        let vectors = lookup(Source { snapshot, ids }, features, &columns, pooling, *indices_max)?;
        Ok(if is_binary {
            (tensors::encode(&vectors)?, SAFETENSORS.to_owned())
        } else {
            (json::encode(&vectors)?, JSON.to_owned())
        })
    })
    .await
}

async fn answer_predict(
    State(service): Shared,
    Extension(place): Extension<Place>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let Some(predictor) = service.predictor.clone() else {
        let message = "this server has no model; only lookups are answered";
        return Refusal::new(StatusCode::NOT_IMPLEMENTED, "unsupported", message).into_response();
    };
    let body_type = match content_type(&headers) {
        known @ (JSON | SAFETENSORS) => known.to_owned(),
        other => return unknown_type(other).into_response(),
    };
    match whole_body(body) {
        Ok(body) => on_blocking_thread(place, move || predictor.predict(&body, &body_type)).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Runs what may wait for a disk or a model away from the async threads.
async fn on_blocking_thread(
    place: Place,
    work: impl FnOnce() -> tierbed_core::Result<(Vec<u8>, String)> + Send + 'static,
) -> Response {
    let held = move || {
        let _place = place;
        work()
    };
    match tokio::task::spawn_blocking(held).await {
        Ok(Ok((bytes, body_type))) => with_type(StatusCode::OK, &body_type, bytes),
        Ok(Err(error)) => Refusal::from(error).into_response(),
        Err(_) => Refusal::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "io",
            "the request ended in a panic; see the server's log",
        )
        .into_response(),
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

fn whole_body(body: Result<Bytes, BytesRejection>) -> Result<Bytes, Refusal> {
    body.map_err(|rejection| {
        let message = if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            "body is larger than the server's limit; send several smaller requests".to_owned()
        } else {
            rejection.body_text()
        };
        Refusal::new(rejection.status(), "invalid", message)
    })
}
