//! Prometheus metrics of the server.
//!
//! A request is counted once, with the status it was answered with; 499 is a client that left
//! before. Times are of requests that were worked on: one that found no room took none.

mod follow;
mod plain;
pub(crate) mod process;
pub(crate) mod snapshot;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::{header, HeaderMap, HeaderValue};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{text, DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tierbed_core::{Error, Result};
use tokio::sync::Semaphore;

use self::follow::FollowMetrics;
use self::process::ProcessCollector;
use self::snapshot::SnapshotCollector;
use crate::admin::answers::Answers;
use crate::admission::Found;
use crate::answer::LOST_SHARD;
use crate::answering::Answering;
use crate::body::Buffers;
use crate::executor::Executor;
use crate::gateway::{Gateway, GatewayCollector};
use crate::spans::Spans;

/// The status of a request whose client left before the answer.
pub(crate) const LEFT: u16 = 499;
/// The status of a request that found no room.
const BUSY: u16 = 503;

/// What there may be no room or time for.
const REASONS: [&str; 9] = [
    LOST_SHARD,
    "places",
    "predicted_wait",
    "deadline",
    "buffers",
    "connections",
    "decompressed",
    "stopping",
    "watchers",
];

/// Bounds of the latency buckets in seconds: 100 us to 10 s.
const LATENCY_BOUNDS_S: [f64; 16] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];

/// Bounds of the buckets of requests in a batch.
const BATCH_BOUNDS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    route: &'static str,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    route: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failure {
    kind: &'static str,
}

type Latency = Family<Route, Histogram, fn() -> Histogram>;

/// A text format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Prometheus' own, which everything that reads metrics understands.
    Plain,
    OpenMetrics,
}

impl Format {
    /// Returns the format that a client asks for.
    pub(crate) fn wanted(headers: &HeaderMap) -> Self {
        let mut accepted = headers.get_all(header::ACCEPT).iter();
        let names = |value: &HeaderValue| {
            value.to_str().is_ok_and(|text| text.contains("application/openmetrics-text"))
        };
        if accepted.any(names) {
            Self::OpenMetrics
        } else {
            Self::Plain
        }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The counters of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    seconds: Latency,
    queue_seconds: Latency,
    refused: Family<Why, Counter>,
    failures: Family<Failure, Counter>,
    cut: Family<Why, Counter>,
    handshakes_failed: Family<Why, Counter>,
    pub(crate) tls_refused: Counter,
    pub(crate) batch_requests: Histogram,
    pub(crate) inline: Counter,
    pub(crate) async_requests: Counter,
    pub(crate) unfinished: Counter,
    pub(crate) ready: Gauge,
    pub(crate) slow: Counter,
    pub(crate) deltas_applied: Counter,
    pub(crate) deltas_refused: Counter,
    pub(crate) deltas_waiting: Gauge,
    pub(crate) follow: FollowMetrics,
    pub(crate) body_bytes: Counter,
    pub(crate) answer_bytes: Counter,
    pub(crate) connections_open: Gauge,
    /// For the statistics of the last seconds.
    pub(crate) answers: Answers,
}

/// What a server is, and what of it is asked when metrics are read.
pub(crate) struct Served<'a> {
    pub(crate) answering: Arc<Answering>,
    pub(crate) name: String,
    pub(crate) places: Arc<Semaphore>,
    pub(crate) place_count: usize,
    pub(crate) buffers: Buffers,
    pub(crate) executor: Arc<Executor>,
    /// Lines that found no room.
    pub(crate) log_dropped: Counter,
    pub(crate) spans: &'a Spans,
    pub(crate) gateway: Option<&'a Arc<Gateway>>,
}

fn latency() -> Histogram {
    Histogram::new(LATENCY_BOUNDS_S)
}

impl Metrics {
    pub(crate) fn new(served: Served<'_>) -> Self {
        let mut all = Registry::default();
        all.register_collector(Box::new(ProcessCollector));
        let registry = all.sub_registry_with_prefix("tierbed");
        let metrics = Self {
            registry: Registry::default(),
            requests: Family::default(),
            seconds: Family::new_with_constructor(latency as fn() -> Histogram),
            queue_seconds: Family::new_with_constructor(latency as fn() -> Histogram),
            refused: Family::default(),
            failures: Family::default(),
            cut: Family::default(),
            handshakes_failed: Family::default(),
            tls_refused: Counter::default(),
            batch_requests: Histogram::new(BATCH_BOUNDS),
            inline: Counter::default(),
            async_requests: Counter::default(),
            unfinished: Counter::default(),
            ready: Gauge::default(),
            slow: Counter::default(),
            deltas_applied: Counter::default(),
            deltas_refused: Counter::default(),
            deltas_waiting: Gauge::default(),
            follow: FollowMetrics::default(),
            body_bytes: Counter::default(),
            answer_bytes: Counter::default(),
            connections_open: Gauge::default(),
            answers: Answers::new(),
        };
        metrics.register(registry);
        let Served { answering, name, places, place_count, buffers, executor, .. } = served;
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The server's version", build);
        metrics.follow.register(registry, &answering);
        let help = "Requests that left the queue without work: the client left, or time was over";
        registry.register("requests_dropped", help, executor.dropped.clone());
        let help = "Lines of the log that nobody took in time";
        registry.register("log_lines_dropped", help, served.log_dropped);
        served.spans.register(registry);
        if let Some(gateway) = served.gateway {
            registry.register_collector(Box::new(GatewayCollector(Arc::clone(gateway))));
        }
        registry.register_collector(Box::new(SnapshotCollector::new(answering, name)));
        registry.register_collector(Box::new(RoomCollector {
            places,
            place_count,
            buffers,
            executor,
        }));
        Self { registry: all, ..metrics }
    }

    fn register(&self, registry: &mut Registry) {
        let help = "Requests by route and status; 499 is a client that left before the answer";
        registry.register("requests", help, self.requests.clone());
        registry.register("request_seconds", "Time to answer, by route", self.seconds.clone());
        let help = "Time from the body's end to a thread that works on it, by route";
        registry.register("queue_seconds", help, self.queue_seconds.clone());
        let help = "Requests that were answered together, by their number";
        registry.register("batch_requests", help, self.batch_requests.clone());
        let help = "Requests that needed no page, answered by the thread that received them";
        registry.register("inline_requests", help, self.inline.clone());
        let help = "Requests whose rows came while the thread that received them did others";
        registry.register("async_requests", help, self.async_requests.clone());
        let help = "1 while balancers shall send requests";
        registry.register("ready", help, self.ready.clone());
        let help = "Requests and connections that found no room or time, by what there was none of";
        registry.register("requests_refused", help, self.refused.clone());
        let help = "Requests that failed by the server's fault, by kind: corruption, io, panic";
        registry.register("request_failures", help, self.failures.clone());
        let help = "Connections closed because the client was too slow, or its bytes not HTTP";
        registry.register("connections_cut", help, self.cut.clone());
        let help = "Handshakes of TLS that came to nothing, by what failed";
        registry.register("handshakes_failed", help, self.handshakes_failed.clone());
        let help = "Changes of the files of TLS that could not be used: those before stayed";
        registry.register("tls_changes_refused", help, self.tls_refused.clone());
        let help = "Answers that the client did not take to the end";
        registry.register("answers_unfinished", help, self.unfinished.clone());
        let help = "Requests that took longer than slow_ms";
        registry.register("requests_slow", help, self.slow.clone());
        let help = "Deltas that the server answers from since they came, or did";
        registry.register("deltas_applied", help, self.deltas_applied.clone());
        let help = "Deltas that could not be applied: answers stayed as they were";
        registry.register("deltas_refused", help, self.deltas_refused.clone());
        let help = "Whole deltas that wait for the one that they were made against";
        registry.register("deltas_waiting", help, self.deltas_waiting.clone());
        registry.register("body_bytes", "Bytes of bodies received", self.body_bytes.clone());
        registry.register("answer_bytes", "Bytes of answers made", self.answer_bytes.clone());
        let help = "Connections open now";
        registry.register("connections_open", help, self.connections_open.clone());
    }

    /// Counts a request that was answered, or whose client left.
    pub(crate) fn count(&self, route: &'static str, status: u16, us: u64) {
        self.answers.count(route, status, us);
        self.requests.get_or_create(&Answered { route, status }).inc();
        if !matches!(status, BUSY | LEFT) {
            self.seconds.get_or_create(&Route { route }).observe(us as f64 / 1e6);
        }
    }

    pub(crate) fn waited(&self, route: &'static str, us: u64) {
        self.queue_seconds.get_or_create(&Route { route }).observe(us as f64 / 1e6);
    }

    pub(crate) fn refused(&self, reason: &'static str) {
        debug_assert!(REASONS.contains(&reason), "{reason} is not listed");
        self.refused.get_or_create(&Why { reason }).inc();
    }

    /// Returns how many found no room or time, by reason; without reasons of none.
    pub(crate) fn refused_by_reason(&self) -> BTreeMap<&'static str, u64> {
        let count = |reason| Some((reason, self.refused.get(&Why { reason })?.get()));
        REASONS.into_iter().filter_map(count).collect()
    }

    pub(crate) fn failed(&self, kind: &'static str) {
        self.failures.get_or_create(&Failure { kind }).inc();
    }

    pub(crate) fn connection_cut(&self, reason: &'static str) {
        self.cut.get_or_create(&Why { reason }).inc();
    }

    pub(crate) fn handshake_failed(&self, reason: &'static str) {
        self.handshakes_failed.get_or_create(&Why { reason }).inc();
    }

    /// Encodes all metrics.
    ///
    /// # Errors
    /// `Invalid` when the encoder refuses.
    pub(crate) fn encode(&self, format: Format) -> Result<String> {
        let mut out = String::new();
        let encoded = text::encode(&mut out, &self.registry).and_then(|()| match format {
            Format::OpenMetrics => Ok(out),
            Format::Plain => plain::plain(&out),
        });
        encoded.map_err(|cause| Error::invalid("cannot encode metrics").with("cause", cause))
    }
}

/// Counts, when asked, what is taken of the server's room.
#[derive(Debug)]
struct RoomCollector {
    places: Arc<Semaphore>,
    place_count: usize,
    buffers: Buffers,
    executor: Arc<Executor>,
}

impl Collector for RoomCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> std::result::Result<(), std::fmt::Error> {
        let in_flight = self.place_count.saturating_sub(self.places.available_permits());
        let Found { request_count, wait_us } = self.executor.queue();
        let wait = ConstGauge::new(wait_us as f64 / 1e6);
        let help = "Time that a request would wait for a thread, if it came now";
        let kind = wait.metric_type();
        wait.encode(encoder.encode_descriptor("queue_wait_seconds", help, None, kind)?)?;
        let gauges = [
            ("queue_requests", "Lookups and predictions that wait for a thread", request_count),
            ("requests_in_flight", "Lookups and predictions worked on or queued", in_flight as u64),
            (
                "buffered_bytes",
                "Bytes of bodies and answers beyond the first 64 KiB of each",
                self.buffers.used_bytes(),
            ),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}
