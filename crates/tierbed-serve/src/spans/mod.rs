//! Spans of requests, sent to a collector by OTLP. Without the feature `otel` there are none.
//!
//! ```text
//! head ─▶ sampled? ─▶ Steps: times and counts, as it goes ─▶ end ─▶ queue ─▶ thread ─▶ collector
//!           └ no: nothing is noted                                   └ full: dropped, counted
//! ```
//!
//! Spans are made after their request has ended, by a thread of their own, of times that most
//! requests take anyhow. Nobody waits for that thread, and it waits for no request.
//!
//! Source: OpenTelemetry's protocol (OTLP) and semantic conventions, 1.45.

#[cfg(not(feature = "otel"))]
mod off;
#[cfg(feature = "otel")]
mod otel;

use axum::http::Method;

#[cfg(not(feature = "otel"))]
pub(crate) use self::off::{route_of, Spans, Steps};
#[cfg(feature = "otel")]
pub(crate) use self::otel::{route_of, Spans, Steps};
use crate::answer::Refusal;

/// How a request is called: it gives its span a name.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "there are no spans"))]
pub(crate) enum Call<'a> {
    Http {
        method: &'a Method,
        path: &'a str,
        /// The path without what is in it; `None` for one that is unknown.
        route: Option<&'a str>,
    },
    Grpc {
        path: &'a str,
    },
}

/// How a request ended; times are those of the server's clock.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "there are no spans"))]
pub(crate) struct Ending<'a> {
    pub(crate) start_us: u64,
    pub(crate) end_us: u64,
    /// As metrics count it; of a gRPC call, that of the same refusal over HTTP.
    pub(crate) status: u16,
    pub(crate) refusal: Option<&'a Refusal>,
    pub(crate) is_encrypted: bool,
}
