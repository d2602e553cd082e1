//! Prometheus metrics of a gateway, shard by shard.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::MetricType;

use super::pool::{Counts, Shard};
use super::Gateway;

/// Looks at all shards when metrics are read.
#[derive(Debug)]
pub(crate) struct GatewayCollector(pub(crate) Arc<Gateway>);

/// A counter: name, help and where it is.
type Counted = (&'static str, &'static str, fn(&Counts) -> &AtomicU64);

const COUNTERS: [Counted; 6] = [
    ("shard_requests", "Questions to a shard", |counts| &counts.asked),
    (
        "shard_hedges",
        "Questions asked again of another server because an answer took long",
        |counts| &counts.hedged,
    ),
    ("shard_retries", "Questions asked again of another server because one failed", |counts| {
        &counts.retried
    }),
    ("shard_failures", "Failures of servers of a shard", |counts| &counts.failed),
    ("shard_lost", "Questions that no server of a shard answered", |counts| &counts.lost),
    (
        "shard_default_rows",
        "Rows for which initial values stood because nobody answered",
        |counts| &counts.default_rows,
    ),
];

/// A gauge: name, help and what it shows.
type Shown = (&'static str, &'static str, fn(&Shard) -> u64);

const GAUGES: [Shown; 3] = [
    ("shard_outstanding", "Questions to a shard that are on their way", |shard| {
        shard.replicas().iter().map(|replica| replica.outstanding()).sum()
    }),
    ("shard_replicas", "Servers of a shard that members name", |shard| {
        shard.replicas().len() as u64
    }),
    ("shard_replicas_live", "Servers of a shard that answer", |shard| {
        shard.replicas().iter().filter(|replica| replica.is_live()).count() as u64
    }),
];

fn whole(number: u64) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(number).unwrap_or(i64::MAX))
}

fn label(shard: &Shard) -> [(&'static str, String); 1] {
    [("shard", shard.number().to_string())]
}

impl Collector for GatewayCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let Self(gateway) = self;
        let shards = &gateway.pool.shards;
        for (name, help, count) in COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for shard in shards {
                let counter = ConstCounter::new(count(&shard.counts).load(Ordering::Relaxed));
                counter.encode(family.encode_family(&label(shard))?)?;
            }
        }
        for (name, help, show) in GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for shard in shards {
                whole(show(shard)).encode(family.encode_family(&label(shard))?)?;
            }
        }
        let tag = gateway.tag();
        let numbers = [
            ("shards_publish", "The publish that all shards have in common", tag.publish),
            ("shards_delta", "Deltas upon that publish", tag.delta),
        ];
        for (name, help, number) in numbers {
            let gauge = whole(number);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}
