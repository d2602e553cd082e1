//! Prometheus metrics of a server that follows a channel.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::Why;
use crate::answering::Answering;

/// Bounds of the buckets of a swap: 10 ms to 10 minutes.
const SWAP_BOUNDS_S: [f64; 11] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}

/// What following a channel did.
#[derive(Debug)]
pub(crate) struct FollowMetrics {
    /// Bytes that were pulled.
    pub(crate) bytes: Counter,
    failures: Family<Why, Counter>,
    swaps: Family<Outcome, Counter>,
    swap_seconds: Histogram,
}

impl Default for FollowMetrics {
    fn default() -> Self {
        Self {
            bytes: Counter::default(),
            failures: Family::default(),
            swaps: Family::default(),
            swap_seconds: Histogram::new(SWAP_BOUNDS_S),
        }
    }
}

impl FollowMetrics {
    pub(super) fn register(&self, registry: &mut Registry, answering: &Arc<Answering>) {
        let help = "Bytes of versions that were pulled";
        registry.register("sync_bytes", help, self.bytes.clone());
        let help = "Times that the channel's version could not be reached: answers stayed";
        registry.register("sync_failures", help, self.failures.clone());
        let help = "Changes to another whole snapshot while serving";
        registry.register("swaps", help, self.swaps.clone());
        let help = "Time from opening another whole snapshot to its first answer";
        registry.register("swap_duration_seconds", help, self.swap_seconds.clone());
        registry.register_collector(Box::new(AnsweringCollector(Arc::clone(answering))));
    }

    pub(crate) fn failed(&self, reason: &'static str) {
        self.failures.get_or_create(&Why { reason }).inc();
    }

    pub(crate) fn swapped(&self, seconds: f64) {
        self.swaps.get_or_create(&Outcome { result: "ok" }).inc();
        self.swap_seconds.observe(seconds);
    }

    pub(crate) fn not_swapped(&self) {
        self.swaps.get_or_create(&Outcome { result: "failed" }).inc();
    }
}

/// Says, when asked, what answers and how old it is.
#[derive(Debug)]
struct AnsweringCollector(Arc<Answering>);

impl Collector for AnsweringCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> std::result::Result<(), std::fmt::Error> {
        let seconds = [
            (
                "freshness_seconds",
                "Time since the training step of what answers",
                self.0.freshness_s(),
            ),
            (
                "sync_lag_seconds",
                "Time since the channel was seen to be at the version that answers",
                self.0.lag_s(),
            ),
            (
                "version",
                "The version of the channel that answers",
                self.0.version().map(|version| version as f64),
            ),
        ];
        for (name, help, value) in seconds {
            let Some(value) = value else { continue };
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}
