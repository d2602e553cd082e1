//! A request that has ended, as spans.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::Method;
use opentelemetry::trace::{SpanContext, SpanKind, Status, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, SpanId, TraceFlags};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use tonic::Code;

use super::random_id;
use super::record::{Called, Ended, Failure, Step, Times};
use crate::grpc::INFER;

/// A method or path that is not known.
const OTHER: &str = "_OTHER";

/// Makes the span of a request, and those of its steps.
pub(super) fn spans(ended: Ended) -> Vec<SpanData> {
    let scope = InstrumentationScope::builder("tierbed").with_version(env!("CARGO_PKG_VERSION"));
    let scope = scope.build();
    let step = |times: &Times| SpanData {
        name: name(times.step).into(),
        attributes: if times.step == Step::Lookup { looked_up(&ended) } else { Vec::new() },
        ..span(&ended, times.begin_us..times.end_us, &scope)
    };
    let mut all: Vec<_> = ended.steps.iter().map(step).collect();
    all.push(SpanData {
        span_context: context(&ended, ended.span_id),
        parent_span_id: ended.parent_id,
        parent_span_is_remote: ended.parent_id != SpanId::INVALID,
        span_kind: SpanKind::Server,
        name: called(&ended).into(),
        status: status(&ended),
        attributes: attributes(&ended),
        ..span(&ended, ended.start_us..ended.end_us, &scope)
    });
    all
}

/// Makes a span within that of the request.
fn span(ended: &Ended, us: Range<u64>, scope: &InstrumentationScope) -> SpanData {
    SpanData {
        span_context: context(ended, SpanId::from(random_id())),
        parent_span_id: ended.span_id,
        parent_span_is_remote: false,
        span_kind: SpanKind::Internal,
        name: "".into(),
        start_time: time(ended, us.start),
        end_time: time(ended, us.end),
        attributes: Vec::new(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: scope.clone(),
    }
}

fn context(ended: &Ended, span_id: SpanId) -> SpanContext {
    let state: TraceState = ended.record.state.clone();
    SpanContext::new(ended.trace_id, span_id, TraceFlags::SAMPLED, false, state)
}

fn time(ended: &Ended, us: u64) -> SystemTime {
    let before_us = ended.end_us.saturating_sub(us);
    UNIX_EPOCH + Duration::from_micros(ended.end_unix_us.saturating_sub(before_us))
}

fn name(step: Step) -> &'static str {
    match step {
        Step::Queue => "queue",
        Step::Lookup => "lookup",
        Step::Predict => "predict",
    }
}

fn looked_up(ended: &Ended) -> Vec<KeyValue> {
    let record = &ended.record;
    let number = |key, count: u64| KeyValue::new(key, i64::try_from(count).unwrap_or(i64::MAX));
    vec![
        number("tierbed.batch_requests", record.request_count.load(Relaxed)),
        number("tierbed.rows", record.rows.load(Relaxed)),
        number("tierbed.hits", record.hits.load(Relaxed)),
        number("tierbed.pages_read", record.pages_read.load(Relaxed)),
    ]
}

/// Returns the name of a request's span: of few, whatever clients send.
fn called(ended: &Ended) -> String {
    match &ended.record.call {
        Called::Http { method, route, .. } => {
            let method = known(method).unwrap_or("HTTP");
            route.as_ref().map_or_else(|| method.to_owned(), |route| format!("{method} {route}"))
        }
        Called::Grpc { path } if path != INFER && ended.code == Code::Unimplemented => OTHER.into(),
        Called::Grpc { path } => path.trim_start_matches('/').to_owned(),
    }
}

/// Returns the name of a method, unless a client made it up.
fn known(method: &Method) -> Option<&str> {
    let name = method.as_str();
    let methods = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE"];
    methods.contains(&name).then_some(name)
}

fn attributes(ended: &Ended) -> Vec<KeyValue> {
    let mut all = Vec::with_capacity(10);
    let mut put = |key: &'static str, value: String| all.push(KeyValue::new(key, value));
    if let Some(model) = ended.record.model.get() {
        put("tierbed.model", model.clone());
    }
    if let Some(id) = &ended.request_id {
        put("tierbed.request_id", id.clone());
    }
    match &ended.record.call {
        Called::Http { method, path, route } => {
            put("http.request.method", known(method).unwrap_or(OTHER).to_owned());
            put("url.path", path.clone());
            put("url.scheme", if ended.is_encrypted { "https" } else { "http" }.to_owned());
            if let Some(route) = route {
                put("http.route", route.clone());
            }
            if known(method).is_none() {
                put("http.request.method_original", method.as_str().to_owned());
            }
        }
        Called::Grpc { .. } => {
            put("rpc.system.name", "grpc".to_owned());
            put("rpc.method", called(ended));
            put("rpc.response.status_code", named(ended.code));
        }
    }
    if let Some(Failure { kind, .. }) = ended.failed() {
        put("error.type", (*kind).to_owned());
    }
    if matches!(ended.record.call, Called::Http { .. }) {
        all.push(KeyValue::new("http.response.status_code", i64::from(ended.status)));
    }
    all
}

impl Ended {
    /// Returns why a request failed, where that is the server's failure and not the client's.
    fn failed(&self) -> Option<&Failure> {
        let is_ours = match self.record.call {
            Called::Http { .. } => self.status >= 500,
            Called::Grpc { .. } => matches!(
                self.code,
                Code::Unknown
                    | Code::DeadlineExceeded
                    | Code::Unimplemented
                    | Code::Internal
                    | Code::Unavailable
                    | Code::DataLoss
            ),
        };
        self.failure.as_ref().filter(|_| is_ours)
    }
}

fn status(ended: &Ended) -> Status {
    match ended.failed() {
        Some(failure) => Status::error(failure.message.clone()),
        None => Status::Unset,
    }
}

/// Names a status as the protocol does: `DEADLINE_EXCEEDED`.
fn named(code: Code) -> String {
    let mut name = String::new();
    for c in format!("{code:?}").chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_uppercase());
    }
    name
}
