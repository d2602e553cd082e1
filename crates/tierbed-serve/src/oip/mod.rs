//! Open Inference Protocol, version 2: what clients of Triton and KServe speak.
//!
//! ```text
//! JSON and binary tensors ─▶ request ─▶ columns ─▶ queries ─▶ looked up ─▶ outputs
//! message of gRPC ─▶ [grpc] ──┘ └────▶ samples ─▶ looked up ─▶ model ────────┘
//! ```
//!
//! A snapshot is two models: `NAME.rows` answers lookups, `NAME` predictions where the snapshot
//! has a model. The forms are written down in docs/reference/oip.md. Unknown parameters are
//! ignored, as Triton does; unknown inputs and outputs are refused.

pub(crate) mod about;
pub(crate) mod config;
mod data;
pub(crate) mod head;
pub(crate) mod infer;
pub(crate) mod inputs;
pub(crate) mod lookup;
pub(crate) mod model;
pub(crate) mod outputs;
mod predict;
pub(crate) mod request;
mod rows;
pub(crate) mod stats;

use std::sync::Arc;

use axum::body::Body;
use axum::http::{header, HeaderValue};
use axum::response::Response;
use axum::routing::{get, post};
use axum::Router;

pub(crate) use self::model::Models;

use crate::answer::{Refusal, JSON};
use crate::routes::Service;

/// The version of a snapshot's models: a server has one snapshot.
pub(crate) const VERSION: &str = "1";

/// The label of inference in metrics.
pub(crate) const INFER: &str = "/v2/infer";
/// The label of all that describes.
const ABOUT: &str = "/v2";

pub(crate) fn router() -> Router<Arc<Service>> {
    let router = Router::new()
        .route("/v2", get(about::server))
        .route("/v2/health/live", get(about::live))
        .route("/v2/health/ready", get(about::ready))
        .route("/v2/models/stats", get(stats::of_all))
        .route("/v2/repository/index", post(about::index))
        .route("/v2/repository/models/{model}/load", post(about::no_control))
        .route("/v2/repository/models/{model}/unload", post(about::no_control));
    let of_model = [
        ("", get(about::model)),
        ("/ready", get(about::model_ready)),
        ("/config", get(config::model)),
        ("/stats", get(stats::of_model)),
        ("/infer", post(infer::infer)),
    ];
    of_model.into_iter().fold(router, |router, (end, handler)| {
        router
            .route(&format!("/v2/models/{{model}}{end}"), handler.clone())
            .route(&format!("/v2/models/{{model}}/versions/{{version}}{end}"), handler)
    })
}

/// Names a route of the protocol for metrics, without the model's name.
pub(crate) fn route_name(path: &str) -> Option<&'static str> {
    let rest = path.strip_prefix(ABOUT)?;
    match rest {
        "" => Some(ABOUT),
        _ if !rest.starts_with('/') => None,
        _ if rest.ends_with("/infer") => Some(INFER),
        _ => Some(ABOUT),
    }
}

/// Tells whether a route's label is one of the protocol's.
pub(crate) fn is_ours(route: &str) -> bool {
    matches!(route, ABOUT | INFER)
}

/// Words a refusal as the protocol does: `{"error": message}`.
pub(crate) fn worded(mut response: Response) -> Response {
    let Some(refusal) = response.extensions().get::<Refusal>() else { return response };
    let body = serde_json::json!({ "error": refusal.message() }).to_string();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    *response.body_mut() = Body::from(body);
    response
}
