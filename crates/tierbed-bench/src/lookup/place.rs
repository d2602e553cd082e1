//! The earlier part of a log is placed, the later part is kept to be asked.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_cache::PolicyKind;
use tierbed_core::{Error, Result};
use tierbed_placement::partition::{bisect, random, BisectionOptions, GrowthOptions};
use tierbed_placement::replicate::{by_connectivity, by_marginal_gain};
use tierbed_placement::{
    index_by_use, miss_stream, read_log, write_packed, write_placement, CacheInFront, Placement,
    QueryLog, ReadOptions, TextQueries,
};

use crate::meter::Meter;

/// What `place` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlaceJob {
    /// A log of one query per line.
    log: PathBuf,
    /// Share of the queries, the earlier ones, that placements are built from.
    split: f64,
    /// Queries read at most.
    query_count_max: Option<u64>,
    rows_per_page: u32,
    /// What is built.
    methods: Vec<Wanted>,
    /// Where the later queries go, as a packed log.
    later: PathBuf,
    seed: u64,
    threads: usize,
}

/// One placement to build.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// `random`, `shp`, `maxembed` or `ours`.
    method: String,
    ratio: f64,
    /// Rows of the cache in front that `ours` is built for, as a share of all.
    cache_share: f64,
    /// The file.
    out: PathBuf,
}

pub(super) fn place(job: &PlaceJob) -> Result<Value> {
    let options = ReadOptions { query_count_max: job.query_count_max, ..ReadOptions::default() };
    let log = read_log(&mut TextQueries::open(&job.log)?, &options, &mut |_, _| Ok(()))?;
    let (earlier, later) = log.split_by_share(job.split)?;
    if earlier.query_count() == 0 || later.query_count() == 0 {
        return Err(Error::invalid("log has too few queries to split")
            .with("queries", log.query_count())
            .with("split", job.split));
    }
    write_packed(&later, &job.later)?;
    let meter = Meter::new();
    let mut homes = None;
    let mut built = Vec::new();
    for wanted in &job.methods {
        let started_us = meter.now_us();
        let placement = build(job, wanted, &earlier, &mut homes)?;
        let index = index_by_use(&placement, &earlier)?;
        write_placement(&placement, &index, &wanted.out)?;
        built.push(json!({
            "method": wanted.method,
            "ratio": wanted.ratio,
            "replica_count": placement.replica_count(),
            "build_s": (meter.now_us() - started_us) as f64 / 1e6,
        }));
    }
    Ok(json!({
        "row_count": log.row_count(),
        "earlier_queries": earlier.query_count(),
        "later_queries": later.query_count(),
        "placements": built,
    }))
}

/// Builds one placement; `homes` keeps the bisected pages for the next.
fn build(
    job: &PlaceJob,
    wanted: &Wanted,
    earlier: &QueryLog,
    homes: &mut Option<Placement>,
) -> Result<Placement> {
    let mut bisection = BisectionOptions::new(job.rows_per_page);
    (bisection.seed, bisection.thread_count) = (job.seed, job.threads);
    match wanted.method.as_str() {
        "random" => return random(earlier.row_count(), job.rows_per_page, job.seed),
        "ours" => {
            let cache = CacheInFront { share: wanted.cache_share, policy: PolicyKind::Lru };
            let misses = miss_stream(earlier, earlier, cache, 1)?.log;
            let options = GrowthOptions { bisection, ..GrowthOptions::new(job.rows_per_page) };
            return by_marginal_gain(misses, &options, wanted.ratio);
        }
        "shp" | "maxembed" => {}
        other => {
            return Err(Error::invalid("unknown method")
                .with("found", other)
                .with("allowed", "random, shp, maxembed, ours"));
        }
    }
    let bisected = match homes.take() {
        Some(bisected) => bisected,
        None => bisect(earlier.clone(), &bisection, &mut |_| ())?,
    };
    let placement = if wanted.method == "shp" {
        bisected.clone()
    } else {
        by_connectivity(&bisected, earlier, wanted.ratio)?
    };
    *homes = Some(bisected);
    Ok(placement)
}
