//! Queries of a log against a snapshot, as fast as answers come: a closed loop on some threads.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::env::SplitMix64;
use tierbed_core::{Bags, Error, Result, RowId, RowKey, TableId};
use tierbed_io::{EngineOptions, FsFolder};
use tierbed_placement::{read_log, PackedQueries, QueryLog, ReadOptions};
use tierbed_snapshot::index::PackedPages;
use tierbed_snapshot::placement::read_placement;
use tierbed_snapshot::select::{Scratch, Selection};
use tierbed_snapshot::{
    Backend, FeatureLayout, LookupStats, Pooling, SelectOptions, Snapshot, SnapshotOptions,
};

use super::write::weight_of;
use super::Clones;
use crate::meter::{process_cpu_ns, process_read_bytes, thread_cpu_ns, Meter};

/// More than any snapshot needs: what is measured is bounded by its cache.
const DRAM_BUDGET_BYTES: u64 = 1 << 40;
/// Bytes of index and policy per cached row, besides its weights.
const CACHED_ROW_BYTES: u64 = 32;
/// Rows that are put into a cache at once.
const PRELOAD_ROWS: usize = 4096;
/// Rows asked for, per row the cache holds, that fill it nearly where popularity is uneven.
const PRELOADED_ROWS_PER_ROOM: u64 = 3;

/// Which queries are asked.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    /// A packed log of one clone.
    log: PathBuf,
    clones: u32,
    /// How unevenly clones are asked for.
    skew: f64,
    seed: u64,
}

/// How pages are chosen.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Choice {
    /// `one_pass` or `greedy`.
    is_greedy: bool,
    index_limit: Option<u32>,
    is_pipelined: bool,
}

/// What `run` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunJob {
    snapshot: PathBuf,
    asked: Asked,
    choice: Choice,
    /// `direct`, `mmap` or `memory`.
    backend: String,
    threads: usize,
    queue_depth: u32,
    /// Queries of one call.
    batch: usize,
    /// Calls of each thread before it is measured.
    warm_calls: u64,
    /// Calls of each thread that are measured, at most.
    calls: u64,
    /// Longest time for the first.
    warm_seconds_max: f64,
    /// Longest time for the second.
    seconds_max: f64,
    /// Rows the cache holds, as a share of all; of a map, the pages that stay in memory, as a
    /// share of the bytes of all rows, 1 for all of them.
    cache_share: f64,
}

/// What `select` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SelectJob {
    placement: PathBuf,
    asked: Asked,
    choice: Choice,
    batch: usize,
    calls: u64,
}

pub(super) fn read_packed(path: &Path) -> Result<QueryLog> {
    let mut source = PackedQueries::open(path)?;
    read_log(&mut source, &ReadOptions::default(), &mut |_, _| Ok(()))
}

fn selection(choice: Choice) -> Selection {
    if choice.is_greedy {
        Selection::Greedy
    } else {
        Selection::OnePass
    }
}

/// Draws calls of `batch` queries.
struct Calls<'a> {
    log: &'a QueryLog,
    clones: &'a Clones,
    batch: usize,
    rng: SplitMix64,
    indices: Vec<i64>,
    offsets: Vec<i64>,
}

impl<'a> Calls<'a> {
    fn new((log, clones): (&'a QueryLog, &'a Clones), batch: usize, seed: u64) -> Self {
        let rng = SplitMix64::new(seed);
        Self { log, clones, batch, rng, indices: Vec::new(), offsets: Vec::new() }
    }

    fn draw(&mut self) {
        self.indices.clear();
        self.offsets.clear();
        self.offsets.push(0);
        for _ in 0..self.batch {
            let query = self.rng.below(self.log.query_count() as u64) as usize;
            let first = self.clones.draw(&mut self.rng);
            let rows = self.log.query(query).unwrap_or_default();
            self.indices.extend(rows.iter().map(|&row| i64::from(first + row)));
            self.offsets.push(self.indices.len() as i64);
        }
    }
}

fn open(job: &RunJob) -> Result<Snapshot> {
    let backend = match job.backend.as_str() {
        "direct" => Backend::Direct,
        "mmap" => Backend::Mmap,
        "memory" => Backend::Memory,
        other => {
            return Err(Error::invalid("unknown backend")
                .with("found", other)
                .with("allowed", "direct, mmap, memory"));
        }
    };
    let folder = Arc::new(FsFolder::open(&job.snapshot)?);
    let manifest = tierbed_snapshot::manifest::Manifest::read(folder.as_ref())?;
    let tables = manifest.schema.tables().iter();
    let row_bytes: u64 =
        tables.map(|table| table.row_count * (4 * u64::from(table.dim) + CACHED_ROW_BYTES)).sum();
    let cache_bytes = (row_bytes as f64 * job.cache_share) as u64;
    let is_mapped = backend == Backend::Mmap;
    let options = SnapshotOptions {
        dram_budget_bytes: DRAM_BUDGET_BYTES,
        engine: EngineOptions { queue_depth: job.queue_depth, ..EngineOptions::default() },
        backend,
        reader_count: job.threads,
        select: SelectOptions {
            selection: selection(job.choice),
            index_limit: job.choice.index_limit,
            is_pipelined: job.choice.is_pipelined,
        },
        // Both have the same memory: rows in one case, pages in the other.
        cache_bytes_max: Some(if is_mapped { 0 } else { cache_bytes }),
        mapped_bytes_max: (is_mapped && job.cache_share < 1.0).then_some(cache_bytes),
        ..SnapshotOptions::default()
    };
    Snapshot::open(folder, &options)
}

/// What one thread saw.
#[derive(Default)]
struct Seen {
    stats: LookupStats,
    waits_us: Vec<u64>,
}

pub(super) fn run(job: &RunJob) -> Result<Value> {
    let log = read_packed(&job.asked.log)?;
    if log.query_count() == 0 || job.threads == 0 || job.batch == 0 || job.calls == 0 {
        return Err(Error::invalid("a run needs queries, threads, a batch and calls"));
    }
    let clones = Clones::new(log.row_count(), job.asked.clones, job.asked.skew)?;
    let snapshot = open(job)?;
    let calls_of = |round: u64| Calls::new((&log, &clones), job.batch, job.asked.seed + round);
    let all = |calls: u64, seconds_max: f64, round: u64| -> Result<Vec<Seen>> {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..job.threads as u64)
                .map(|thread| {
                    let (snapshot, calls_of) = (&snapshot, calls_of(1000 * thread + round));
                    scope.spawn(move || ask(snapshot, calls_of, calls, seconds_max))
                })
                .collect();
            workers.into_iter().map(join).collect()
        })
    };
    preload(&snapshot, calls_of(999))?;
    all(job.warm_calls, job.warm_seconds_max, 0)?;
    let meter = Meter::new();
    let (started_us, cpu_before_ns) = (meter.now_us(), process_cpu_ns());
    let read_before_bytes = process_read_bytes();
    let seen = all(job.calls, job.seconds_max, 500)?;
    let seconds = (meter.now_us() - started_us) as f64 / 1e6;
    let cpu_ns = process_cpu_ns() - cpu_before_ns;
    let dim = snapshot.schema().table(TableId(0))?.dim;
    let mut told = report(&seen, job, (seconds, cpu_ns), dim, &snapshot);
    let read_bytes = process_read_bytes().saturating_sub(read_before_bytes);
    let queries = told.get("queries").and_then(Value::as_f64).unwrap_or(1.0);
    if let Some(told) = told.as_object_mut() {
        let kib = read_bytes as f64 / 1024.0 / queries;
        told.insert("device_kib_per_query".to_owned(), json!(kib));
    }
    Ok(told)
}

/// Fills the cache as queries would that were asked before, without reading: weights follow from
/// row numbers.
fn preload(snapshot: &Snapshot, mut calls: Calls<'_>) -> Result<()> {
    let tiers = snapshot.stats().tiers;
    let room = tiers.first().map_or(0, |tier| tier.row_count_max);
    let dim = snapshot.schema().table(TableId(0))?.dim as usize;
    let (mut keys, mut rows) = (Vec::new(), Vec::new());
    let mut asked = 0;
    while asked < room * PRELOADED_ROWS_PER_ROOM {
        keys.clear();
        rows.clear();
        while keys.len() < PRELOAD_ROWS {
            calls.draw();
            for &row in &calls.indices {
                keys.push(RowKey::new(TableId(0), RowId(row as u64)));
                rows.resize(rows.len() + dim, weight_of(row as u64));
            }
        }
        snapshot.preload(&keys, &rows)?;
        asked += keys.len() as u64;
        // Full for a while: what came first has gone.
        if snapshot.stats().cache_evictions > room / 4 {
            return Ok(());
        }
    }
    Ok(())
}

fn report(
    seen: &[Seen],
    job: &RunJob,
    (seconds, cpu_ns): (f64, u64),
    dim: u32,
    snapshot: &Snapshot,
) -> Value {
    let sum = |field: fn(&LookupStats) -> u64| -> u64 {
        seen.iter().map(|seen| field(&seen.stats)).sum()
    };
    let mut waits: Vec<u64> = seen.iter().flat_map(|seen| seen.waits_us.iter().copied()).collect();
    waits.sort_unstable();
    let at = |share: f64| {
        let place = (waits.len() as f64 * share) as usize;
        waits.get(place.min(waits.len().saturating_sub(1))).copied().unwrap_or(0)
    };
    let queries = (waits.len() * job.batch) as u64;
    let (pages, rows) = (sum(|stats| stats.pages_read), sum(|stats| stats.rows_read));
    let held = snapshot.inspect().placements;
    json!({
        "queries": queries,
        "rows_asked": sum(|stats| stats.row_count),
        "rows_cached": sum(|stats| stats.rows_cached),
        "rows_read": rows,
        "pages_read": pages,
        "pages_per_query": pages as f64 / queries as f64,
        "useful_rows_per_page": rows as f64 / pages.max(1) as f64,
        "seconds": seconds,
        "queries_per_s": queries as f64 / seconds,
        "pages_per_s": pages as f64 / seconds,
        "effective_mb_per_s": rows as f64 * 4.0 * f64::from(dim) / seconds / 1e6,
        "latency_us_p50": at(0.5),
        "latency_us_p99": at(0.99),
        "cpu_us_per_query": cpu_ns as f64 / 1e3 / queries as f64,
        "placement_index_bytes": held.iter().map(|held| held.memory_bytes).sum::<u64>(),
        "cache_bytes": snapshot.stats().cache_capacity_bytes,
        "queue_depth": snapshot.stats().queue_depth,
        "io_engine": snapshot.stats().io.engine,
    })
}

/// Asks `count` calls of a snapshot, fewer where time is up, and checks what comes back: weights
/// follow from row numbers.
fn ask(snapshot: &Snapshot, mut calls: Calls<'_>, count: u64, seconds_max: f64) -> Result<Seen> {
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)])?;
    let meter = Meter::new();
    let ends_us = meter.now_us().saturating_add((seconds_max * 1e6) as u64);
    let mut seen = Seen::default();
    let mut out = vec![0.0; calls.batch * plan.output_dim()];
    for _ in 0..count {
        calls.draw();
        let bags = Bags::new(&calls.indices, &calls.offsets, None, 1)?;
        let started_us = meter.now_us();
        let stats = snapshot.lookup(&plan, &bags, &mut out)?;
        let ended_us = meter.now_us();
        seen.waits_us.push(ended_us - started_us);
        add(&mut seen.stats, &stats);
        check(&bags, plan.output_dim(), &out)?;
        if ended_us >= ends_us {
            break;
        }
    }
    Ok(seen)
}

fn add(sum: &mut LookupStats, stats: &LookupStats) {
    sum.row_count += stats.row_count;
    sum.rows_cached += stats.rows_cached;
    sum.rows_read += stats.rows_read;
    sum.pages_read += stats.pages_read;
}

fn check(bags: &Bags<'_>, dim: usize, out: &[f32]) -> Result<()> {
    for (bounds, vector) in bags.offsets.windows(2).zip(out.chunks(dim)) {
        let [from, to] = *bounds else { continue };
        let rows = bags.indices.get(from as usize..to as usize).unwrap_or_default();
        let expected: f32 = rows.iter().map(|&row| weight_of(row as u64)).sum();
        if vector.first() != Some(&expected) || vector.last() != Some(&expected) {
            return Err(Error::corruption("lookup gave other rows than those asked for")
                .with("expected", expected)
                .with("found", format_args!("{:?}", vector.first())));
        }
    }
    Ok(())
}

pub(super) fn select(job: &SelectJob) -> Result<Value> {
    let log = read_packed(&job.asked.log)?;
    let clones = Clones::new(log.row_count(), job.asked.clones, job.asked.skew)?;
    let (_, index) = read_placement(&job.placement)?;
    let index = clones.index(&index)?;
    let (limit, page_count) = (job.choice.index_limit, u64::from(index.page_count()));
    let index = PackedPages::of(index.forward(), page_count, limit)?;
    let mut calls = Calls::new((&log, &clones), job.batch, job.asked.seed);
    let (mut scratch, mut rows) = (Scratch::default(), Vec::new());
    let (mut pages, mut cpu_ns) = (0u64, 0);
    for _ in 0..job.calls {
        calls.draw();
        rows.clear();
        rows.extend(calls.indices.iter().map(|&row| row as u32));
        let before_ns = thread_cpu_ns();
        let selected = selection(job.choice).select(&index, &rows, &mut scratch, |_, _| ());
        cpu_ns += thread_cpu_ns() - before_ns;
        pages += u64::from(selected.page_count);
    }
    let queries = job.calls * job.batch as u64;
    Ok(json!({
        "pages_per_query": pages as f64 / queries as f64,
        "cpu_us_per_query": cpu_ns as f64 / 1e3 / queries as f64,
    }))
}

/// Waits for a worker; its panic goes on here.
pub(crate) fn join<T>(worker: std::thread::ScopedJoinHandle<'_, T>) -> T {
    worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
