//! What does the server tell Prometheus?

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{text, DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tierbed_core::{Error, Result};
use tierbed_pagestore::{Snapshot, SnapshotStats};

/// Bounds of the latency buckets in seconds: 100 us to 10 s.
const LATENCY_BOUNDS_S: [f64; 16] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    route: &'static str,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    route: &'static str,
}

/// The counters of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    seconds: Family<Route, Histogram, fn() -> Histogram>,
}

fn latency() -> Histogram {
    Histogram::new(LATENCY_BOUNDS_S)
}

impl Metrics {
    pub(crate) fn new(snapshot: Arc<Snapshot>) -> Self {
        let mut registry = Registry::with_prefix("tierbed");
        let requests = Family::<Answered, Counter>::default();
        registry.register("requests", "Requests answered, by route and status", requests.clone());
        let seconds = Family::new_with_constructor(latency as fn() -> Histogram);
        registry.register("request_seconds", "Time to answer, by route", seconds.clone());
        registry.register_collector(Box::new(SnapshotCollector { snapshot }));
        Self { registry, requests, seconds }
    }

    pub(crate) fn count(&self, route: &'static str, status: u16, us: u64) {
        self.requests.get_or_create(&Answered { route, status }).inc();
        self.seconds.get_or_create(&Route { route }).observe(us as f64 / 1e6);
    }

    /// Encodes all metrics as OpenMetrics text.
    ///
    /// # Errors
    /// `Invalid` when the encoder refuses.
    pub(crate) fn encode(&self) -> Result<String> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry)
            .map_err(|cause| Error::invalid("cannot encode metrics").with("cause", cause))?;
        Ok(out)
    }
}

/// Reads the snapshot's own counters when asked.
#[derive(Debug)]
struct SnapshotCollector {
    snapshot: Arc<Snapshot>,
}

impl Collector for SnapshotCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> std::result::Result<(), std::fmt::Error> {
        let stats = self.snapshot.stats();
        let counters = counters(&stats);
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(
                name,
                help,
                None,
                counter.metric_type(),
            )?)?;
        }
        let budget = self.snapshot.budget_report();
        let gauges = [
            ("cache_rows", "Rows in the row cache", stats.cache_rows),
            ("cache_used_bytes", "Bytes of the row cache in use", stats.cache_used_bytes),
            ("dram_used_bytes", "Bytes of the budget reserved", budget.used_bytes),
            ("dram_budget_bytes", "The DRAM budget", budget.limit_bytes),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

/// What is counted since the snapshot was opened: name, help and value.
fn counters(stats: &SnapshotStats) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
    let refreshed = stats.refreshed.clone().unwrap_or_default();
    let neighbours = stats.neighbours.clone().unwrap_or_default();
    [
        ("lookups", "Lookups answered", stats.lookup_count),
        ("indices", "Indices looked up", stats.lookups.index_count),
        ("rows", "Rows fetched for lookups", stats.lookups.row_count),
        ("rows_initial", "Rows never written, computed", stats.lookups.rows_initial),
        ("cache_hits", "Rows found in the row cache", stats.cache_hits),
        ("cache_misses", "Rows not found in the row cache", stats.cache_misses),
        ("cache_evictions", "Rows that left the row cache", stats.cache_evictions),
        ("rows_resident", "Rows that are always in memory", stats.lookups.rows_resident),
        (
            "rows_surrogate",
            "Rows answered by a coarse code or another row",
            stats.lookups.rows_surrogate,
        ),
        (
            "rows_default",
            "Rows answered by the default row of their table",
            stats.lookups.rows_default,
        ),
        (
            "rows_refreshed",
            "Rows read because they were answered approximately",
            refreshed.rows_read,
        ),
        (
            "rows_refresh_dropped",
            "Rows answered approximately that found no room to wait for a read",
            refreshed.rows_dropped,
        ),
        (
            "rows_refresh_failed",
            "Rows answered approximately that could not be read",
            refreshed.rows_failed,
        ),
        (
            "neighbours_answered",
            "Rows in no tier that their neighbour answered for",
            neighbours.rows_answered,
        ),
        (
            "neighbours_dropped",
            "Rows that left the tiers and found no room to wait for their neighbour",
            neighbours.rows_dropped,
        ),
        (
            "neighbours_failed",
            "Rows that left the tiers and whose neighbour could not be read",
            neighbours.rows_failed,
        ),
        ("pages_read", "Pages read for lookups", stats.lookups.pages_read),
        ("read_bytes", "Bytes read from the device", stats.io.read_bytes),
    ]
    .into_iter()
}
