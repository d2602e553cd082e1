//! Health, description and metrics of the server.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::Shared;
use crate::answer::{with_type, Refusal, JSON};
use crate::features::pooling_name;
use crate::metrics::Format;

pub(super) async fn describe(State(service): Shared) -> Response {
    let newest = service.newest();
    let features = newest.features.iter();
    let features: Vec<_> = features
        .map(|feature| {
            json!({
                "name": feature.name,
                "table": feature.table_name,
                "pooling": pooling_name(feature.pooling),
                "dim": feature.dim,
            })
        })
        .collect();
    let mut routes = vec![
        "GET /",
        "GET /health",
        "GET /livez",
        "GET /readyz",
        "GET /metrics",
        "POST /v1/lookup",
    ];
    if service.generations.predicts() {
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

/// The status is 200 also while degraded: most answers are still right, and a process that is
/// restarted for it would find the same pages.
pub(super) async fn health(State(service): Shared) -> Response {
    let snapshot = service.snapshot();
    let manifest = snapshot.manifest();
    let generation = snapshot.generation();
    let uptime_us = service.clock.now_us().saturating_sub(service.start_us);
    let reasons = service.faults.recent(&snapshot);
    let body = json!({
        "status": if reasons.is_empty() { "ok" } else { "degraded" },
        "reasons": reasons,
        "snapshot": service.snapshot_name,
        "identity": generation.identity,
        "generation": generation.number,
        "version": service.answering.version(),
        "freshness_s": service.answering.freshness_s(),
        "sync_lag_s": service.answering.lag_s(),
        "tables": manifest.tables.len(),
        "rows": manifest.row_count,
        "uptime_s": uptime_us as f64 / 1e6,
    });
    with_type(StatusCode::OK, JSON, body.to_string().into_bytes())
}

pub(crate) async fn live() -> Response {
    with_type(StatusCode::OK, JSON, json!({ "live": true }).to_string())
}

pub(crate) async fn ready(State(service): Shared) -> Response {
    let is_ready = service.is_ready();
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    with_type(status, JSON, json!({ "ready": is_ready }).to_string())
}

pub(crate) async fn metrics(State(service): Shared, headers: HeaderMap) -> Response {
    let format = Format::wanted(&headers);
    match service.metrics.encode(format) {
        Ok(text) => with_type(StatusCode::OK, format.content_type(), text.into_bytes()),
        Err(error) => Refusal::from(error).into_response(),
    }
}
