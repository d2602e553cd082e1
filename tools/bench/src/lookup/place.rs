//! The earlier part of a log is placed, the later part is kept to be asked.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_cache::PolicyKind;
use tierbed_core::{Error, Result};
use tierbed_placement::partition::BisectionOptions;
use tierbed_placement::{
    build_each, index_by_use, miss_stream, read_log, write_packed, BuildInput, CacheInFront,
    Method, Placement, QueryLog, ReadOptions, TextQueries,
};
use tierbed_snapshot::placement::write_placement;

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
    /// Where the earlier ones go, if somebody asks for them.
    #[serde(default)]
    earlier: Option<PathBuf>,
    seed: u64,
    threads: usize,
}

/// One placement to build.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// Name of a [`Method`]; `shp` before `maxembed` saves bisecting twice, and neighbours that
    /// differ by their ratio alone are built together.
    method: String,
    ratio: f64,
    /// Rows of the cache in front that `grown` is built for, as a share of all.
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
    if let Some(path) = &job.earlier {
        write_packed(&earlier, path)?;
    }
    let meter = Meter::new();
    let mut homes = None;
    let mut built = Vec::new();
    let alike = |one: &Wanted, other: &Wanted| {
        one.method == other.method && one.cache_share == other.cache_share
    };
    for wanted in job.methods.chunk_by(alike) {
        let started_us = meter.now_us();
        let placements = build_alike(job, wanted, &earlier, &mut homes)?;
        let build_s = (meter.now_us() - started_us) as f64 / 1e6;
        for (wanted, placement) in wanted.iter().zip(&placements) {
            let index = index_by_use(placement, &earlier)?;
            write_placement(placement, &index, &wanted.out)?;
            built.push(json!({
                "method": wanted.method,
                "ratio": wanted.ratio,
                "cache_share": wanted.cache_share,
                "replica_count": placement.replica_count(),
                "build_s": build_s,
            }));
        }
    }
    Ok(json!({
        "row_count": log.row_count(),
        "earlier_queries": earlier.query_count(),
        "later_queries": later.query_count(),
        "placements": built,
    }))
}

/// Builds placements that differ by their ratio; `homes` keeps the bisected pages for the next.
fn build_alike(
    job: &PlaceJob,
    wanted: &[Wanted],
    earlier: &QueryLog,
    homes: &mut Option<Placement>,
) -> Result<Vec<Placement>> {
    let Some(first) = wanted.first() else { return Ok(Vec::new()) };
    let method = Method::from_name(&first.method)?;
    let ratios: Vec<f64> = wanted.iter().map(|wanted| wanted.ratio).collect();
    let mut options = BisectionOptions::new(job.rows_per_page);
    (options.seed, options.thread_count) = (job.seed, job.threads);
    if method == Method::Grown {
        let cache = CacheInFront { share: first.cache_share, policy: PolicyKind::Lru };
        let misses = miss_stream(earlier, earlier, cache, 1)?.log;
        let input = BuildInput { misses: Some(&misses), ..BuildInput::of(earlier) };
        return build_each(input, method, &options, &ratios, &mut |_| Ok(()));
    }
    let input = BuildInput { homes: homes.as_ref(), ..BuildInput::of(earlier) };
    let placements = build_each(input, method, &options, &ratios, &mut |_| Ok(()))?;
    if method == Method::Bisected {
        *homes = placements.first().cloned();
    }
    Ok(placements)
}
