//! What `/stats` tells: one look at everything, as JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use tierbed_snapshot::SnapshotStats;

use super::answers::{Outcomes, QUANTILE_ERROR_RATIO};
use super::life::State;
use super::window::{Recent, Sample};
use super::Admin;
use crate::admission::Found;
use crate::faults::Reason;
use crate::metrics::process::resident_bytes;
use crate::metrics::snapshot::written_s;
use crate::oip::model::Kind;
use crate::routes::Service;

/// A server at one time.
#[derive(Debug, Serialize)]
pub(super) struct Stats {
    state: State,
    version: &'static str,
    model: String,
    snapshot: String,
    uptime_s: f64,
    generation: Answering,
    requests: Requests,
    /// The last ten seconds; absent in the first moments.
    recent: Option<Recent>,
    /// Quantiles are above the exact ones by at most this share.
    quantile_error_ratio: f64,
    queue: Queue,
    connections: Connections,
    /// What rows are answered from, the fastest first.
    tiers: Vec<Tier>,
    pages: Pages,
    memory: Memory,
    /// Failures that `/health` tells of.
    faults: Vec<Reason>,
}

/// What requests are answered from.
#[derive(Debug, Serialize)]
struct Answering {
    number: u64,
    identity: String,
    /// Seconds since it began to answer.
    active_s: f64,
    /// When it was written, in seconds since 1970, as its folder says.
    written_timestamp_s: Option<f64>,
    deltas: u64,
    delta_rows: u64,
    deltas_applied: u64,
    deltas_refused: u64,
    deltas_waiting: i64,
}

/// Lookups and predictions since the start.
#[derive(Debug, Serialize)]
struct Requests {
    #[serde(flatten)]
    outcomes: Outcomes,
    /// Of requests and connections, by what there was no room or time for.
    refused_by_reason: BTreeMap<&'static str, u64>,
}

#[derive(Debug, Serialize)]
struct Queue {
    requests: u64,
    /// As predicted for a request that came now.
    wait_us: u64,
    in_flight: usize,
    in_flight_max: usize,
}

#[derive(Debug, Serialize)]
struct Connections {
    open: i64,
    open_max: usize,
}

/// A place that rows are answered from.
#[derive(Debug, Serialize)]
struct Tier {
    name: String,
    /// Rows answered from it since the start.
    rows: u64,
    /// Its share of the rows of the last ten seconds; absent without any.
    recent_ratio: Option<f64>,
    /// Rows that it holds, where they are counted.
    rows_held: Option<u64>,
    rows_held_max: Option<u64>,
    /// Bytes that it may use.
    capacity_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Pages {
    read: u64,
    failed: u64,
    read_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Memory {
    /// Of the process; absent where the system does not tell.
    process_bytes: Option<u64>,
    budget_bytes: u64,
    used_bytes: u64,
    /// Of the budget, by part.
    parts_bytes: BTreeMap<&'static str, u64>,
    /// Of bodies and answers, beside the budget.
    buffered_bytes: u64,
    buffered_bytes_max: usize,
}

impl Stats {
    /// Looks at everything. Costs some tens of microseconds, and no request waits for it.
    pub(super) fn of(admin: &Admin) -> Self {
        let service = &*admin.service;
        let snapshot = service.snapshot();
        let stats = snapshot.stats();
        let now = Sample::of(service, &stats);
        let recent = admin.window().recent(&now);
        let Found { request_count, wait_us } = service.executor.queue();
        let since_s = |us: u64| now.at_us.saturating_sub(us) as f64 / 1e6;
        Self {
            state: State::of(service),
            version: env!("CARGO_PKG_VERSION"),
            model: service.models.name(Kind::Predictions).to_owned(),
            snapshot: service.snapshot_name.clone(),
            uptime_s: since_s(service.start_us),
            generation: answering(service, &stats, since_s(service.life.activated_us())),
            requests: Requests {
                outcomes: now.outcomes,
                refused_by_reason: service.metrics.refused_by_reason(),
            },
            quantile_error_ratio: QUANTILE_ERROR_RATIO,
            queue: Queue {
                requests: request_count,
                wait_us,
                in_flight: service.places_taken(),
                in_flight_max: service.place_count,
            },
            connections: Connections {
                open: service.metrics.connections_open.get(),
                open_max: service.limits.connections_max,
            },
            tiers: tiers(&stats, recent.as_ref()),
            recent,
            pages: Pages {
                read: stats.lookups.pages_read,
                failed: stats.lookups.pages_failed,
                read_bytes: stats.io.read_bytes,
            },
            memory: memory(service),
            faults: service.faults.recent(&snapshot),
        }
    }
}

fn answering(service: &Service, stats: &SnapshotStats, active_s: f64) -> Answering {
    let (now, metrics) = (&stats.generation, &service.metrics);
    Answering {
        number: now.number,
        identity: now.identity.clone(),
        active_s,
        written_timestamp_s: written_s(&service.snapshot()),
        deltas: now.delta_count,
        delta_rows: now.delta_rows,
        deltas_applied: metrics.deltas_applied.get(),
        deltas_refused: metrics.deltas_refused.get(),
        deltas_waiting: metrics.deltas_waiting.get(),
    }
}

fn memory(service: &Service) -> Memory {
    let budget = service.snapshot().budget_report();
    let parts = budget.parts.iter().filter(|(_, part)| part.used_bytes > 0);
    Memory {
        process_bytes: resident_bytes(),
        budget_bytes: budget.limit_bytes,
        used_bytes: budget.used_bytes,
        parts_bytes: parts.map(|(name, part)| (*name, part.used_bytes)).collect(),
        buffered_bytes: service.buffers.used_bytes(),
        buffered_bytes_max: service.limits.buffer_bytes_max,
    }
}

/// Returns the rows that each place answered, in the order of [`tiers`]; together all rows.
pub(super) fn rows_by_tier(stats: &SnapshotStats) -> impl Iterator<Item = u64> + '_ {
    let lookups = &stats.lookups;
    let cached = stats.tiers.iter().map(|tier| tier.hits);
    let behind =
        [lookups.rows_surrogate, lookups.rows_default, lookups.rows_initial, lookups.rows_read];
    std::iter::once(lookups.rows_resident).chain(cached).chain(behind)
}

/// Returns what rows are answered from, without places that answered none and hold nothing.
fn tiers(stats: &SnapshotStats, recent: Option<&Recent>) -> Vec<Tier> {
    let place = |name: &str| Tier {
        name: name.to_owned(),
        rows: 0,
        recent_ratio: None,
        rows_held: None,
        rows_held_max: None,
        capacity_bytes: None,
    };
    let held = Some(stats.resident_bytes);
    let resident = Tier { capacity_bytes: held, ..place("resident rows") };
    let cached = stats.tiers.iter().map(|tier| Tier {
        rows_held: Some(tier.row_count),
        rows_held_max: Some(tier.row_count_max),
        capacity_bytes: Some(tier.capacity_bytes),
        ..place(&format!("cache {}, {}", tier.codec, tier.policy))
    });
    let behind = ["surrogates", "default rows", "initial values", "storage"].map(place);
    let places = std::iter::once(resident).chain(cached).chain(behind);
    let recent_rows = recent.map_or(&[][..], |recent| recent.rows_by_tier.as_slice());
    let total: u64 = recent_rows.iter().sum();
    let mut tiers = Vec::new();
    for (at, (tier, rows)) in places.zip(rows_by_tier(stats)).enumerate() {
        let is_used = rows > 0 || tier.capacity_bytes.is_some_and(|bytes| bytes > 0);
        if is_used || tier.name == "storage" {
            let ratio = recent_rows.get(at).filter(|_| total > 0);
            let recent_ratio = ratio.map(|recent| *recent as f64 / total as f64);
            tiers.push(Tier { rows, recent_ratio, ..tier });
        }
    }
    tiers
}
