//! gRPC: the Open Inference Protocol, health and reflection on an address of their own.
//!
//! ```text
//! connection ─▶ call ─▶ message, within its limits ─▶ [oip] request ─▶ executor ─▶ reply, trailers
//!                └─▶ router ─▶ all methods but `ModelInfer`
//! ```
//!
//! Calls have the limits, places, log and metrics of HTTP requests. Where a limit or a failure ends
//! a call, its status is that of the same refusal over HTTP; see docs/reference/oip.md.

mod about;
mod call;
mod calls;
pub(crate) mod connection;
mod gathered;
mod health;
pub(crate) mod message;
mod messages;
mod outgoing;
pub(crate) mod reply;
mod shards;
pub(crate) mod status;
mod stream;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderName;
use axum::middleware::{from_fn_with_state, Next};
use axum::response::Response;
use axum::routing::post;
use axum::Router;
use tonic_reflection::server::Builder;

pub(crate) use self::health::Health;
use crate::origin::Origin;
use crate::routes::{counted, in_time, Service, Shared};
use crate::spans::Call;
use crate::tokens::Scope;

/// The messages of `proto/inference.proto`.
#[allow(clippy::all, dead_code, missing_docs, unreachable_pub, reason = "generated")]
pub(crate) mod pb {
    include!(concat!(env!("OUT_DIR"), "/inference.rs"));
}

/// The messages of `proto/shard.proto`.
#[allow(clippy::all, dead_code, missing_docs, unreachable_pub, reason = "generated")]
pub(crate) mod shard_pb {
    include!(concat!(env!("OUT_DIR"), "/tierbed.shard.v1.rs"));
}

/// What reflection tells of the protocol.
const DESCRIPTION: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inference.bin"));

/// The service, as clients and metrics name it.
const INFERENCE: &str = "/inference.GRPCInferenceService";
pub(crate) const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
/// A request of a call of many; the call itself counts as one of the service.
const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";
/// What gateways ask besides lookups.
pub(crate) const SHARDS: &str = "/tierbed.shard.v1.Shards";
const HEALTH: &str = "/grpc.health.v1.Health";
const REFLECTION: &str = "/grpc.reflection";
/// How a call's messages are coded.
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
/// Largest message that asks for health or reflection.
const QUESTION_BYTES_MAX: usize = 64 << 10;

pub(crate) fn router(service: &Arc<Service>, health: &Health) -> Router {
    let description = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTION)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (Ok(v1), Ok(v1alpha)) = (description().build_v1(), description().build_v1alpha()) else {
        panic!("the description of the messages cannot be read");
    };
    let v1 = v1.max_decoding_message_size(QUESTION_BYTES_MAX);
    let v1alpha = v1alpha.max_decoding_message_size(QUESTION_BYTES_MAX);
    Router::new()
        .route(STREAM, post(stream::answer))
        .route(&format!("{INFERENCE}/{{method}}"), post(call::answer))
        .route(&format!("{SHARDS}/{{method}}"), post(shards::answer))
        .with_state(Arc::clone(service))
        .route_service(&format!("{HEALTH}/{{method}}"), health.server())
        .route_service("/grpc.reflection.v1.ServerReflection/{method}", v1)
        .route_service("/grpc.reflection.v1alpha.ServerReflection/{method}", v1alpha)
        .fallback(unknown_method)
        .layer(from_fn_with_state(Arc::clone(service), measure))
}

async fn unknown_method() -> Response {
    status::told(status::unknown_method())
}

/// Names a route for metrics: unknown paths share one name, so that they cannot fill memory.
fn route_name(path: &str) -> &'static str {
    if path == INFER {
        return INFER;
    }
    let known = [INFERENCE, SHARDS, HEALTH, REFLECTION];
    known.into_iter().find(|route| path.starts_with(route)).unwrap_or("other")
}

/// Returns what a client must be allowed to do for a path; nothing to ask whether the server lives.
pub(crate) fn scope_of(path: &str) -> Option<Scope> {
    let is_health = path.starts_with(HEALTH)
        || path
            .strip_prefix(INFERENCE)
            .is_some_and(|end| matches!(end, "/ServerLive" | "/ServerReady"));
    (!is_health).then_some(Scope::Infer)
}

/// Tells whether a call ends with its only answer; others last as long as their client wants.
fn is_finite(path: &str) -> bool {
    !path.starts_with(REFLECTION) && !path.ends_with("/Watch") && path != STREAM
}

/// Counts every call, and ends those that take too long to answer.
async fn measure(State(service): Shared, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let route = route_name(path);
    let origin = Arc::new(match path {
        // Its messages are requests, each with spans of its own.
        STREAM => Origin::new(request.headers()),
        _ => service.spans.origin(request.headers(), Call::Grpc { path }),
    });
    request.extensions_mut().insert(Arc::clone(&origin));
    let answering = async {
        service.authorize(request.headers(), scope_of(request.uri().path()))?;
        let own_us = status::timeout_us(request.headers())?;
        in_time(&service, own_us, request, next).await
    };
    let answering = async { answering.await.unwrap_or_else(status::told) };
    counted(&service, route, &origin, answering).await
}
