//! Prometheus metrics of the snapshot.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use tierbed_snapshot::manifest::MANIFEST_NAME;
use tierbed_snapshot::{Snapshot, SnapshotStats};

use crate::answering::Answering;

/// Reads the snapshot's own counters when asked.
#[derive(Debug)]
pub(super) struct SnapshotCollector {
    answering: Arc<Answering>,
    name: String,
}

impl SnapshotCollector {
    pub(super) fn new(answering: Arc<Answering>, name: String) -> Self {
        Self { answering, name }
    }
}

/// Returns when the last file of what answers was written, as its folder says; `None` for folders
/// in memory, and those that are gone.
pub(crate) fn written_s(snapshot: &Snapshot) -> Option<f64> {
    let manifest = snapshot.view().folder().file_path(MANIFEST_NAME)?;
    let written = manifest.metadata().ok()?.modified().ok()?;
    Some(written.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
}

impl Collector for SnapshotCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> std::result::Result<(), std::fmt::Error> {
        let snapshot = self.answering.snapshot();
        let stats = snapshot.stats();
        let identity = snapshot.identity().map_err(|_| std::fmt::Error)?;
        let about = Info::new(vec![("name", self.name.clone()), ("identity", identity)]);
        let (help, kind) = ("What is served", about.metric_type());
        about.encode(encoder.encode_descriptor("snapshot", help, None, kind)?)?;
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
        let budget = snapshot.budget_report();
        let gauges = [
            ("cache_rows", "Rows in the row cache", stats.cache_rows),
            ("cache_used_bytes", "Bytes of the row cache in use", stats.cache_used_bytes),
            ("dram_used_bytes", "Bytes of the budget reserved", budget.used_bytes),
            ("dram_budget_bytes", "The DRAM budget", budget.limit_bytes),
            ("generation", "Deltas applied since the snapshot was opened", stats.generation.number),
            ("deltas", "Deltas upon the snapshot", stats.generation.delta_count),
            ("delta_rows", "Rows of these deltas", stats.generation.delta_rows),
            ("delta_memory_bytes", "Memory for these deltas", stats.generation.delta_memory_bytes),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        if let Some(written_s) = written_s(&snapshot) {
            let gauge = ConstGauge::new(written_s);
            let help = "When the snapshot, or its newest delta, was written, as its folder says";
            let name = "snapshot_written_timestamp_seconds";
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

/// A counter: name, help and value.
type Counted = (&'static str, &'static str, u64);

/// What is counted since the snapshot was opened.
fn counters(stats: &SnapshotStats) -> impl Iterator<Item = Counted> {
    of_lookups(stats).into_iter().chain(of_background(stats))
}

fn of_lookups(stats: &SnapshotStats) -> [Counted; 15] {
    let lookups = &stats.lookups;
    [
        ("lookups", "Lookups answered", stats.lookup_count),
        ("indices", "Indices looked up", lookups.index_count),
        ("rows", "Rows fetched for lookups", lookups.row_count),
        ("rows_read", "Rows read from pages for lookups", lookups.rows_read),
        ("rows_initial", "Rows never written, computed", lookups.rows_initial),
        ("cache_hits", "Rows found in the row cache", stats.cache_hits),
        ("cache_misses", "Rows not found in the row cache", stats.cache_misses),
        ("cache_evictions", "Rows that left the row cache", stats.cache_evictions),
        ("rows_resident", "Rows that are always in memory", lookups.rows_resident),
        ("rows_surrogate", "Rows answered by a coarse code or another row", lookups.rows_surrogate),
        ("rows_default", "Rows answered by the default row of their table", lookups.rows_default),
        ("pages_read", "Pages read for lookups", lookups.pages_read),
        (
            "pages_failed",
            "Pages that could not be read or failed their checks, of lookups answered all the same",
            lookups.pages_failed,
        ),
        (
            "rows_recovered",
            "Rows of failed pages that replicas on other pages gave",
            lookups.rows_recovered,
        ),
        ("read_bytes", "Bytes read from the device", stats.io.read_bytes),
    ]
}

fn of_background(stats: &SnapshotStats) -> [Counted; 7] {
    let refreshed = stats.refreshed.clone().unwrap_or_default();
    let neighbours = stats.neighbours.clone().unwrap_or_default();
    [
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
        (
            "delta_rows_replaced",
            "Rows of the cache that deltas gave new weights in place",
            stats.generation.rows_replaced,
        ),
    ]
}
