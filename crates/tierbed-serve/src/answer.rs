//! Error answers: a status and `{"kind": ..., "message": ...}`.

use axum::body::Bytes;
use axum::http::{header, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tierbed_core::{Error, ErrorKind};

use crate::metrics::LEFT;

pub(crate) const JSON: &str = "application/json";

/// Seconds after which a client that was refused may ask again.
pub(crate) const RETRY_AFTER_S: &str = "1";

/// What an error names that tells of a shard that does not answer, and the reason of its refusal.
pub(crate) const LOST_SHARD: &str = "shard";

/// A request that was refused or failed.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// What the error knew of the thing that failed.
    context: Vec<(&'static str, String)>,
    /// What there was no room or time for; only of requests answered with 503 and 504,
    /// and of bombs.
    reason: Option<&'static str>,
}

#[derive(Serialize)]
struct Body<'a> {
    kind: &'a str,
    message: &'a str,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), context: Vec::new(), reason: None }
    }

    /// There is no room: for `reason`.
    pub(crate) fn busy(reason: &'static str, message: impl Into<String>) -> Self {
        let refusal = Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message);
        Self { reason: Some(reason), ..refusal }
    }

    /// The client took too long.
    pub(crate) fn slow(message: impl Into<String>) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "io", message)
    }

    /// The generation that is asked for does not answer.
    pub(crate) fn no_generation(identity: &str) -> Self {
        let message = format!(
            "the generation does not answer, or no longer (generation: {identity:?}, remedy: ask \
             for one that the server lists, or raise generation-grace)"
        );
        Self::new(StatusCode::PRECONDITION_FAILED, "invalid", message)
    }

    /// The request's time is over.
    pub(crate) fn late(message: impl Into<String>) -> Self {
        let refusal = Self::new(StatusCode::GATEWAY_TIMEOUT, "io", message);
        Self { reason: Some("deadline"), ..refusal }
    }

    /// The client left while it sent its body; this answer is not read.
    pub(crate) fn left() -> Self {
        let status = StatusCode::from_u16(LEFT).unwrap_or(StatusCode::BAD_REQUEST);
        Self::new(status, "io", "the body broke off")
    }

    /// The body is larger than `allowed`.
    pub(crate) fn body_too_large(found: impl std::fmt::Display, allowed: usize) -> Self {
        let message = format!(
            "body is larger than the server accepts (found: {found}, body_bytes_max: {allowed}, \
             remedy: send several smaller requests)"
        );
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid", message)
    }

    /// The body is larger than `allowed` once it is inflated.
    pub(crate) fn inflated(allowed: usize) -> Self {
        let refusal = Self::body_too_large("more when decompressed", allowed);
        Self { reason: Some("decompressed"), ..refusal }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) fn kind(&self) -> &'static str {
        self.kind
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn reason(&self) -> Option<&'static str> {
        self.reason
    }

    /// Returns what the error knew under `key`.
    pub(crate) fn value(&self, key: &str) -> Option<&str> {
        let found = self.context.iter().find(|(known, _)| *known == key);
        found.map(|(_, value)| value.as_str())
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            ErrorKind::Closed => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let refusal = Self::new(status, error.kind().name(), error.to_string());
        let is_lost = error.kind() == ErrorKind::Closed
            && error.context().iter().any(|(key, _)| *key == LOST_SHARD);
        let reason = is_lost.then_some(LOST_SHARD);
        Self { context: error.context().to_vec(), reason, ..refusal }
    }
}

impl IntoResponse for Refusal {
    /// The response carries the refusal, for the metrics.
    fn into_response(self) -> Response {
        let body = Body { kind: self.kind, message: &self.message };
        // Two strings always encode.
        let bytes = serde_json::to_vec(&body).unwrap_or_default();
        let mut response = with_type(self.status, JSON, bytes);
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            let after = HeaderValue::from_static(RETRY_AFTER_S);
            response.headers_mut().insert(header::RETRY_AFTER, after);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// Builds a response of `bytes` under a content type.
pub(crate) fn with_type(
    status: StatusCode,
    content_type: &str,
    bytes: impl Into<Bytes>,
) -> Response {
    let mut response = (status, bytes.into()).into_response();
    if let Ok(value) = HeaderValue::from_str(content_type) {
        response.headers_mut().insert(header::CONTENT_TYPE, value);
    }
    response
}
