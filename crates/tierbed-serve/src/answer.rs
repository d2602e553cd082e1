//! What goes back when something is wrong? A status and `{"kind": ..., "message": ...}`.

use axum::http::{header, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tierbed_core::{Error, ErrorKind};

pub(crate) const JSON: &str = "application/json";

/// A request that was refused or failed.
#[derive(Debug)]
pub(crate) struct Refusal {
    status: StatusCode,
    kind: &'static str,
    message: String,
}

#[derive(Serialize)]
struct Body<'a> {
    kind: &'a str,
    message: &'a str,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into() }
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
        Self::new(status, error.kind().name(), error.to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = Body { kind: self.kind, message: &self.message };
        // Two strings always encode.
        let bytes = serde_json::to_vec(&body).unwrap_or_default();
        with_type(self.status, JSON, bytes)
    }
}

/// Builds a response of `bytes` under a content type.
pub(crate) fn with_type(status: StatusCode, content_type: &str, bytes: Vec<u8>) -> Response {
    let mut response = (status, bytes).into_response();
    if let Ok(value) = HeaderValue::from_str(content_type) {
        response.headers_mut().insert(header::CONTENT_TYPE, value);
    }
    response
}
