//! Routes of the address for operators.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{header, HeaderMap, StatusCode, Uri};
use axum::middleware::{from_fn_with_state, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::Router;
use serde_json::json;

use super::life;
use super::stats::Stats;
use super::{events, page, Admin};
use crate::answer::{with_type, Refusal, JSON};
use crate::origin::Origin;
use crate::routes::{about, counted, in_time, Service, Shared};
use crate::tokens::Scope;

/// Where metrics count what has no route.
const OTHER: &str = "other";

pub(super) fn router(admin: &Arc<Admin>) -> Router {
    let service = &admin.service;
    let of_clients = Router::<Arc<Service>>::new()
        .route("/livez", get(about::live))
        .route("/readyz", get(about::ready))
        .route("/metrics", get(about::metrics))
        .with_state(Arc::clone(service));
    Router::new()
        .route("/", get(page::show))
        .route("/stats", get(stats))
        .route("/drain", post(drain))
        .with_state(Arc::clone(admin))
        .merge(of_clients)
        .fallback(unknown)
        .method_not_allowed_fallback(unknown_method)
        .layer(from_fn_with_state(Arc::clone(service), measure))
}

/// Returns a route's name in metrics, and what a client must be allowed to do.
fn route(path: &str) -> (&'static str, Option<Scope>) {
    match path {
        // It has no figures: its script shows a token when it asks for them.
        "/" => ("/", None),
        "/livez" => ("/livez", None),
        "/readyz" => ("/readyz", None),
        "/metrics" => ("/metrics", Some(Scope::Metrics)),
        "/stats" => ("/stats", Some(Scope::Metrics)),
        "/drain" => ("/drain", Some(Scope::Admin)),
        _ => (OTHER, Some(Scope::Metrics)),
    }
}

/// Counts every request, and checks its token.
async fn measure(State(service): Shared, request: Request, next: Next) -> Response {
    let (route, scope) = route(request.uri().path());
    let origin = Origin::new(request.headers());
    let answering = async {
        let answered = match service.authorize(request.headers(), scope) {
            Ok(()) => in_time(&service, None, request, next).await,
            Err(refusal) => Err(refusal),
        };
        answered.unwrap_or_else(IntoResponse::into_response)
    };
    counted(&service, route, &origin, answering).await
}

async fn stats(State(admin): State<Arc<Admin>>, headers: HeaderMap) -> Response {
    if events::are_wanted(&headers) {
        return events::watched(&admin).unwrap_or_else(IntoResponse::into_response);
    }
    match serde_json::to_vec(&Stats::of(&admin)) {
        Ok(stats) => with_type(StatusCode::OK, JSON, stats),
        Err(error) => panic!("statistics are numbers and texts: {error}"),
    }
}

/// Tells balancers to send no more requests. The process goes on until a signal ends it.
async fn drain(State(admin): State<Arc<Admin>>, headers: HeaderMap) -> Result<Response, Refusal> {
    if is_of_another_site(&headers) {
        let message = "a page of another site may not drain the server; ask without Origin";
        return Err(Refusal::new(StatusCode::FORBIDDEN, "invalid", message));
    }
    admin.service.drain();
    let state = life::State::of(&admin.service);
    Ok(with_type(StatusCode::OK, JSON, json!({ "state": state }).to_string()))
}

/// Tells whether a browser sent a request for the page of another site: any page may send one
/// without a token to an address that the browser reaches.
fn is_of_another_site(headers: &HeaderMap) -> bool {
    headers.get(header::ORIGIN).is_some_and(|origin| {
        let origin = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        let origin = origin.as_ref().and_then(Uri::authority).map(|authority| authority.as_str());
        origin.is_none() || origin != host
    })
}

async fn unknown() -> Refusal {
    let message = "no such route; there are GET /, /stats, /metrics, /livez, /readyz, POST /drain";
    Refusal::new(StatusCode::NOT_FOUND, "invalid", message)
}

async fn unknown_method() -> Refusal {
    let message = "this route takes another method: POST for /drain, GET for all else";
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "invalid", message)
}
