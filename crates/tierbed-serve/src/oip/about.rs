//! Health, metadata and the repository's index.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use super::config::{inputs, outputs, Tensor};
use super::model::Named;
use super::VERSION;
use crate::answer::{with_type, Refusal, JSON};
use crate::routes::Shared;

pub(crate) const EXTENSIONS: [&str; 5] =
    ["binary_tensor_data", "parameters", "statistics", "model_configuration", "model_repository"];

pub(super) fn told(value: &serde_json::Value) -> Response {
    with_type(StatusCode::OK, JSON, value.to_string())
}

pub(super) async fn server() -> Response {
    told(&json!({
        "name": "tierbed",
        "version": env!("CARGO_PKG_VERSION"),
        "extensions": EXTENSIONS,
    }))
}

/// Clients of KServe read `live`, its server's text says `ready`: both are there.
fn health(is_ready: bool) -> Response {
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({ "live": true, "ready": is_ready }).to_string();
    with_type(status, JSON, body)
}

pub(super) async fn live(State(service): Shared) -> Response {
    let is_ready = service.is_ready();
    with_type(StatusCode::OK, JSON, json!({ "live": true, "ready": is_ready }).to_string())
}

pub(super) async fn ready(State(service): Shared) -> Response {
    health(service.is_ready())
}

pub(super) async fn model(State(service): Shared, Named(kind): Named) -> Response {
    let shown = |tensors: Vec<Tensor>| -> Vec<_> {
        let shown = tensors.into_iter().map(|Tensor { name, datatype, shape, .. }| {
            json!({ "name": name, "datatype": datatype, "shape": shape })
        });
        shown.collect()
    };
    told(&json!({
        "name": service.models.name(kind),
        "versions": [VERSION],
        "platform": "tierbed",
        "inputs": shown(inputs(&service, kind)),
        "outputs": shown(outputs(&service, kind)),
    }))
}

pub(super) async fn model_ready(State(service): Shared, Named(kind): Named) -> Response {
    let is_ready = service.is_ready();
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({ "name": service.models.name(kind), "ready": is_ready });
    with_type(status, JSON, body.to_string())
}

pub(super) async fn index(State(service): Shared) -> Response {
    let models: Vec<_> = service
        .kinds()
        .map(|kind| {
            let name = service.models.name(kind);
            json!({ "name": name, "version": VERSION, "state": "READY", "reason": "" })
        })
        .collect();
    told(&json!(models))
}

pub(super) async fn no_control() -> Refusal {
    let message = "explicit model load / unload is not allowed: the server has one snapshot";
    Refusal::new(StatusCode::BAD_REQUEST, "invalid", message)
}
