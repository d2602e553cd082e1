//! What a sampled request does: noted by the threads that work for it, read when it has ended.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use axum::http::{HeaderMap, Method};
use opentelemetry::trace::TraceState;
use opentelemetry::{SpanId, TraceId};
use tierbed_core::env::Clock;
use tierbed_snapshot::LookupStats;
use tonic::Code;

use super::super::{Call, Ending};
use crate::grpc::status::code;
use crate::metrics::LEFT;
use crate::origin::Origin;

/// What a request does, one step behind the other; each is a span within that of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It waits for a thread.
    Queue,
    Lookup,
    /// The model scores its samples.
    Predict,
}

/// The steps, in order.
pub(super) const STEPS: [Step; 3] = [Step::Queue, Step::Lookup, Step::Predict];
/// A time that is not known.
const NONE: u64 = u64::MAX;

/// Notes of a request, of which there are none where it is not sampled.
#[derive(Debug, Clone, Default)]
pub(crate) struct Steps(Option<Arc<Record>>);

/// See the module documentation. A request that was answered late may still be worked on: what is
/// noted then is nobody's.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) call: Called,
    pub(super) state: TraceState,
    pub(super) model: OnceLock<String>,
    steps: [Bounds; STEPS.len()],
    /// Requests that were looked up together.
    pub(super) request_count: AtomicU64,
    pub(super) rows: AtomicU64,
    pub(super) hits: AtomicU64,
    pub(super) pages_read: AtomicU64,
}

/// As [`Call`].
#[derive(Debug)]
pub(super) enum Called {
    Http { method: Method, path: String, route: Option<String> },
    Grpc { path: String },
}

#[derive(Debug)]
struct Bounds {
    begin_us: AtomicU64,
    end_us: AtomicU64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { begin_us: AtomicU64::new(NONE), end_us: AtomicU64::new(NONE) }
    }
}

impl Bounds {
    /// Ends what has begun, if it has not ended.
    fn close(&self, now_us: u64) {
        if self.begin_us.load(Relaxed) != NONE && self.end_us.load(Relaxed) == NONE {
            self.end_us.store(now_us, Relaxed);
        }
    }
}

impl Record {
    pub(super) fn new(call: Call<'_>, headers: &HeaderMap) -> Self {
        let call = match call {
            Call::Http { method, path, route } => Called::Http {
                method: method.clone(),
                path: path.to_owned(),
                route: route.map(str::to_owned),
            },
            Call::Grpc { path } => Called::Grpc { path: path.to_owned() },
        };
        Self {
            call,
            state: state(headers),
            model: OnceLock::new(),
            steps: Default::default(),
            request_count: AtomicU64::new(0),
            rows: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            pages_read: AtomicU64::new(0),
        }
    }

    fn bounds(&self, step: Step) -> &Bounds {
        let [queue, lookup, predict] = &self.steps;
        match step {
            Step::Queue => queue,
            Step::Lookup => lookup,
            Step::Predict => predict,
        }
    }

    /// Returns when a step began and ended; one under way ends with its request.
    fn times(&self, step: Step, ending: &Ending<'_>) -> Option<Times> {
        let bounds = self.bounds(step);
        let begin_us = bounds.begin_us.load(Relaxed);
        let within = |us: u64| us.clamp(ending.start_us, ending.end_us);
        (begin_us != NONE).then(|| Times {
            step,
            begin_us: within(begin_us),
            end_us: within(bounds.end_us.load(Relaxed).max(begin_us)),
        })
    }
}

/// Returns what callers keep with a trace; nothing where that is malformed.
fn state(headers: &HeaderMap) -> TraceState {
    let parts: Option<Vec<&str>> =
        headers.get_all("tracestate").iter().map(|value| value.to_str().ok()).collect();
    parts.and_then(|parts| parts.join(",").parse().ok()).unwrap_or_default()
}

impl Steps {
    pub(super) fn of(record: Record) -> Self {
        Self(Some(Arc::new(record)))
    }

    /// Notes the model that is asked.
    pub(crate) fn of_model(&self, name: &str) {
        if let Some(record) = &self.0 {
            record.model.get_or_init(|| name.to_owned());
        }
    }

    /// Waits for a thread from now on.
    pub(crate) fn waits(&self, now_us: u64) {
        if let Some(record) = &self.0 {
            record.bounds(Step::Queue).begin_us.store(now_us, Relaxed);
        }
    }

    /// Begins the lookup of so many requests together.
    pub(crate) fn looks_up(&self, now_us: u64, request_count: usize) {
        if let Some(record) = &self.0 {
            record.request_count.store(request_count as u64, Relaxed);
            record.bounds(Step::Lookup).begin_us.store(now_us, Relaxed);
        }
    }

    /// Adds what a lookup found; where requests are looked up together, it is that of all.
    pub(crate) fn found(&self, stats: &LookupStats) {
        if let Some(record) = &self.0 {
            record.rows.fetch_add(stats.row_count, Relaxed);
            record.hits.fetch_add(stats.rows_cached + stats.rows_resident, Relaxed);
            record.pages_read.fetch_add(stats.pages_read, Relaxed);
        }
    }

    /// All rows are there: the model begins.
    pub(crate) fn scores(&self, clock: &dyn Clock) {
        if let Some(record) = &self.0 {
            let now_us = clock.now_us();
            record.bounds(Step::Lookup).end_us.store(now_us, Relaxed);
            record.bounds(Step::Predict).begin_us.store(now_us, Relaxed);
        }
    }

    /// Ends the steps that have begun.
    pub(crate) fn close(&self, now_us: u64) {
        if let Some(record) = &self.0 {
            record.steps.iter().for_each(|bounds| bounds.close(now_us));
        }
    }
}

/// When a step of a request was, within the request's own time.
#[derive(Debug)]
pub(super) struct Times {
    pub(super) step: Step,
    pub(super) begin_us: u64,
    pub(super) end_us: u64,
}

/// Why a request has no answer.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) kind: &'static str,
    pub(super) message: String,
}

/// A request that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) record: Arc<Record>,
    pub(super) trace_id: TraceId,
    pub(super) span_id: SpanId,
    /// Invalid where the trace begins here.
    pub(super) parent_id: SpanId,
    pub(super) request_id: Option<String>,
    pub(super) start_us: u64,
    pub(super) end_us: u64,
    /// The end, in microseconds since 1970.
    pub(super) end_unix_us: u64,
    pub(super) steps: Vec<Times>,
    pub(super) status: u16,
    /// The status of a gRPC call.
    pub(super) code: Code,
    pub(super) failure: Option<Failure>,
    pub(super) is_encrypted: bool,
}

impl Ended {
    /// Returns what is known of a request now; `None` where it is not sampled.
    pub(super) fn new(origin: &Origin, ending: Ending<'_>, end_unix_us: u64) -> Option<Self> {
        let (Some(record), Some(trace)) = (&origin.steps.0, &origin.trace) else { return None };
        let Ending { start_us, end_us, status, refusal, is_encrypted } = ending;
        let code = match refusal {
            Some(refusal) => code(refusal),
            None if status == LEFT => Code::Cancelled,
            None => Code::Ok,
        };
        let failure = refusal.map(|refusal| Failure {
            kind: refusal.reason().unwrap_or(refusal.kind()),
            message: refusal.message().to_owned(),
        });
        Some(Self {
            record: Arc::clone(record),
            // Digits were looked at when they came.
            trace_id: TraceId::from_hex(trace.trace_id()).unwrap_or(TraceId::INVALID),
            span_id: SpanId::from_hex(trace.span_id()).unwrap_or(SpanId::INVALID),
            parent_id: SpanId::from(trace.parent_id),
            request_id: origin.named().request_id.map(str::to_owned),
            start_us,
            end_us,
            end_unix_us,
            steps: STEPS.into_iter().filter_map(|step| record.times(step, &ending)).collect(),
            status,
            code,
            failure,
            is_encrypted,
        })
    }

    /// Returns how many spans it has.
    pub(super) fn span_count(&self) -> usize {
        1 + self.steps.len()
    }
}
