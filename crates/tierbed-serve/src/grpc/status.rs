//! Refusals as gRPC tells them, and the time that a client gives.

use axum::body::Body;
use axum::http::{header, HeaderMap, StatusCode};
use axum::response::Response;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use crate::answer::{Refusal, LOST_SHARD};

/// Most characters of a message: it is sent as a header, and clients take few bytes of these.
const MESSAGE_CHARS_MAX: usize = 1_000;
/// What tells a client that was refused that it may ask again.
pub(crate) const RETRY_AFTER: &str = "grpc-retry-pushback-ms";
/// Milliseconds after which a client that was refused may ask again.
const RETRY_AFTER_MS: &str = "1000";

/// Returns the status of a refusal.
pub(crate) fn code(refusal: &Refusal) -> Code {
    match (refusal.status(), refusal.reason(), refusal.kind()) {
        (StatusCode::NOT_FOUND, ..) => Code::NotFound,
        (StatusCode::PRECONDITION_FAILED, ..) => Code::FailedPrecondition,
        (StatusCode::UNAUTHORIZED, ..) => Code::Unauthenticated,
        (StatusCode::FORBIDDEN, ..) => Code::PermissionDenied,
        (StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT, ..) => Code::DeadlineExceeded,
        (StatusCode::PAYLOAD_TOO_LARGE, ..) => Code::ResourceExhausted,
        (StatusCode::NOT_IMPLEMENTED | StatusCode::UNSUPPORTED_MEDIA_TYPE, ..) => {
            Code::Unimplemented
        }
        (StatusCode::SERVICE_UNAVAILABLE, Some("stopping" | LOST_SHARD) | None, _) => {
            Code::Unavailable
        }
        // Of clients that were told "unavailable" many would ask again at once.
        (StatusCode::SERVICE_UNAVAILABLE, ..) => Code::ResourceExhausted,
        (StatusCode::INTERNAL_SERVER_ERROR, _, "corruption") => Code::DataLoss,
        (StatusCode::INTERNAL_SERVER_ERROR, ..) => Code::Internal,
        _ => Code::InvalidArgument,
    }
}

/// Tells a refusal. The response carries it, for the metrics.
pub(super) fn told(refusal: Refusal) -> Response {
    let code = code(&refusal);
    let message: String = refusal.message().chars().take(MESSAGE_CHARS_MAX).collect();
    let mut status = Status::new(code, message);
    if code == Code::Unimplemented {
        let known = MetadataValue::from_static("identity,gzip,deflate");
        status.metadata_mut().insert("grpc-accept-encoding", known);
    }
    let is_full = refusal.status() == StatusCode::SERVICE_UNAVAILABLE;
    if code == Code::ResourceExhausted && is_full {
        let after = MetadataValue::from_static(RETRY_AFTER_MS);
        status.metadata_mut().insert(RETRY_AFTER, after);
    }
    let mut response = status.into_http::<Body>();
    response.extensions_mut().insert(refusal);
    response
}

/// Makes what ends a call that is refused behind its head.
pub(super) fn trailers(refusal: Refusal) -> HeaderMap {
    let mut trailers = told(refusal).into_parts().0.headers;
    trailers.remove(header::CONTENT_TYPE);
    trailers
}

pub(super) fn unknown_method() -> Refusal {
    let message = "no such method; server reflection lists them";
    Refusal::new(StatusCode::NOT_IMPLEMENTED, "unsupported", message)
}

/// Returns the time that a client gives, in microseconds.
///
/// # Errors
/// 400 for a time that is not of the protocol's form.
pub(super) fn timeout_us(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let parsed = headers.get("grpc-timeout").map(|value| {
        value.to_str().ok().and_then(parsed_us).ok_or_else(|| {
            let message =
                format!("grpc-timeout must be up to 8 digits and a unit, found {value:?}");
            Refusal::new(StatusCode::BAD_REQUEST, "invalid", message)
        })
    });
    parsed.transpose()
}

fn parsed_us(text: &str) -> Option<u64> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = digits.len() <= 8 && digits.bytes().all(|digit| digit.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    match unit {
        "H" => Some(number * 3_600_000_000),
        "M" => Some(number * 60_000_000),
        "S" => Some(number * 1_000_000),
        "m" => Some(number * 1_000),
        "u" => Some(number),
        "n" => Some(number / 1_000),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_client_is_told_whether_to_come_back_here() {
        let stopping = Refusal::busy("stopping", "the server stops");
        let full = Refusal::busy("predicted_wait", "too long");
        let late = Refusal::late("over");
        for (refusal, code, comes_back) in [
            (stopping, Code::Unavailable, false),
            (full, Code::ResourceExhausted, true),
            (late, Code::DeadlineExceeded, false),
            (Refusal::body_too_large(2, 1), Code::ResourceExhausted, false),
        ] {
            let response = told(refusal);
            let field = |name: &str| response.headers().get(name);
            assert_eq!(field("grpc-status").unwrap(), &(code as i32).to_string());
            assert_eq!(field("grpc-retry-pushback-ms").is_some(), comes_back, "{code}");
        }
    }

    #[test]
    fn times_are_of_the_form_of_the_protocol() {
        let known =
            [("1S", 1_000_000), ("250m", 250_000), ("99999999n", 99_999), ("2M", 120_000_000)];
        for (text, us) in known {
            assert_eq!(parsed_us(text), Some(us), "{text}");
        }
        for bad in ["", "S", "1", "1s", "-1S", "+1S", "123456789S", "1.5S", "1 S", "1\u{b5}"] {
            assert_eq!(parsed_us(bad), None, "{bad}");
        }
    }
}
