//! How fast is training along a plan, beside the engine over its file store and all in memory?
//!
//! Generates a skewed trace of 26 features (tables as large as Criteo-Kaggle's, scaled), plans
//! it, and trains the same batches with each system in a process of its own. Prints per system
//! row updates per second, processor time, bytes moved, amplification, checkpoint time and peak
//! memory. Processor time is that of the calling thread within the calls.
//!
//! ```text
//! cargo run --release -p tierbed-train --example forward_trace -- scale=0.02 batches=400
//! ```

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a measuring program that panics has failed, as it should"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::env::{Env, SplitMix64};
use tierbed_core::{Bags, InitSpec, OptimizerKind, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_kernels::{FeatureLayout, Pooling};
use tierbed_train::planned::{
    EpochPlan, Pipeline, PlanBuilder, PlanOptions, PlanShape, PlannedConfig, PlannedEngine,
    PlannedStats,
};
use tierbed_train::window::{Backend, WindowConfig, WindowEngine};

/// Distinct values of the 26 categorical columns of Criteo-Kaggle.
const CARDINALITIES: [u64; 26] = [
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27,
    14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
];

struct Options {
    values: BTreeMap<String, String>,
}

impl Options {
    fn read() -> Self {
        let pairs = std::env::args().skip(1).filter_map(|word| {
            word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()))
        });
        Self { values: pairs.collect() }
    }

    fn get<T: std::str::FromStr>(&self, key: &str, default: T) -> T {
        self.values.get(key).and_then(|value| value.parse().ok()).unwrap_or(default)
    }
}

struct Job {
    schema: Schema,
    batch_size: usize,
    batches: u64,
    epochs: u64,
    budget_bytes: u64,
    window_bytes: u64,
    pipeline: bool,
    /// Windows that share a bucket while they are far; `None` leaves it to the store.
    span_windows: Option<usize>,
    /// Batches between checkpoints; none when 0.
    checkpoint: u64,
    /// Ids are uniform numbers to this power, times the rows of the table.
    skew: f64,
}

impl Job {
    fn new(options: &Options) -> Self {
        let scale: f64 = options.get("scale", 0.02);
        let table = |(at, &rows): (usize, &u64)| TableSchema {
            optimizer: OptimizerKind::RowWiseAdagrad,
            init: InitSpec::Uniform { low: -0.01, high: 0.01 },
            seed: at as u64,
            ..TableSchema::plain(
                format!("c{at}"),
                ((rows as f64 * scale) as u64).max(rows.min(1000)),
                options.get("dim", 36),
            )
        };
        let schema = Schema::new(CARDINALITIES.iter().enumerate().map(table).collect()).unwrap();
        let share: f64 = options.get("share", 0.05);
        let budget_bytes =
            options.get("budget", (schema.table_bytes() as f64 * share) as u64).max(4 << 20);
        Self {
            batch_size: options.get("batch", 2048),
            batches: options.get("batches", 400),
            epochs: options.get("epochs", 2),
            window_bytes: options.get("window", budget_bytes / 12),
            budget_bytes,
            pipeline: options.get("pipeline", 0) == 1,
            span_windows: options.values.get("span").and_then(|value| value.parse().ok()),
            checkpoint: options.get("checkpoint", 0),
            skew: options.get("skew", 8.0),
            schema,
        }
    }

    fn config(&self) -> PlannedConfig {
        PlannedConfig {
            pipeline: if self.pipeline { Pipeline::On } else { Pipeline::Off },
            span_windows: self.span_windows,
            ..PlannedConfig::new(self.budget_bytes)
        }
    }

    /// One id per feature and sample; the skew is that of a power law.
    fn batch(&self, at: u64, indices: &mut Vec<i64>) {
        let mut rng = SplitMix64::new(at.wrapping_mul(0x9E37_79B9) ^ 77);
        indices.clear();
        for table in self.schema.tables() {
            for _ in 0..self.batch_size {
                let share = rng.unit_f64().powf(self.skew);
                let id = (share * table.row_count as f64) as u64;
                indices.push(id.min(table.row_count - 1) as i64);
            }
        }
    }

    fn offsets(&self) -> Vec<i64> {
        (0..=(26 * self.batch_size) as i64).collect()
    }

    fn tables(&self) -> Vec<TableId> {
        (0..26).map(TableId).collect()
    }

    fn features(&self) -> FeatureLayout {
        let features: Vec<_> =
            self.tables().into_iter().map(|table| (table, Pooling::Sum)).collect();
        FeatureLayout::new(&self.schema, &features).unwrap()
    }

    fn make_plan(&self, folder: &Path, memory_bytes: u64) {
        let folder = Arc::new(FsFolder::create(folder).unwrap());
        let shape = PlanShape::new(&self.schema, &self.tables()).unwrap();
        let options =
            PlanOptions { window_bytes: self.window_bytes, memory_bytes, ..PlanOptions::default() };
        let clock = Env::real(0).clock;
        let mut builder =
            PlanBuilder::new(folder.clone(), "plan", shape, "trace", options).unwrap();
        let (mut indices, offsets) = (Vec::new(), self.offsets());
        let (mut cpu_ns, mut wall_us) = (0, 0);
        for at in 0..self.batches {
            self.batch(at, &mut indices);
            let (cpu, wall) = (thread_cpu_ns(), clock.now_us());
            builder.push(&Bags::new(&indices, &offsets, None, 26).unwrap()).unwrap();
            cpu_ns += thread_cpu_ns() - cpu;
            wall_us += clock.now_us() - wall;
        }
        let (cpu, wall) = (thread_cpu_ns(), clock.now_us());
        builder.finish().unwrap();
        cpu_ns += thread_cpu_ns() - cpu;
        wall_us += clock.now_us() - wall;
        let stats = EpochPlan::open(&*folder, "plan").unwrap().stats();
        let samples = self.batches * self.batch_size as u64;
        println!(
            "plan: {} windows, {} entries, {:.1} B/sample, {:.0} ns cpu/sample, {:.2} s, \
             peak {} MiB",
            stats.window_count,
            stats.entry_count,
            stats.file_bytes as f64 / samples as f64,
            cpu_ns as f64 / samples as f64,
            wall_us as f64 / 1e6,
            peak_kib() / 1024,
        );
    }
}

/// What a run is measured with.
#[derive(Default)]
struct Meter {
    cpu_ns: u64,
    steps_us: Vec<u64>,
}

impl Meter {
    fn step(&mut self, clock: &dyn tierbed_core::env::Clock, work: impl FnOnce()) {
        let cpu = thread_cpu_ns();
        let wall = clock.now_us();
        work();
        self.steps_us.push(clock.now_us() - wall);
        self.cpu_ns += thread_cpu_ns() - cpu;
    }

    fn report(mut self, system: &str, epoch: u64, rows: u64) {
        let total_us: u64 = self.steps_us.iter().sum();
        self.steps_us.sort_unstable();
        let at = |share: f64| {
            let last = self.steps_us.len() - 1;
            self.steps_us[(last as f64 * share) as usize]
        };
        println!(
            "{system} epoch {epoch}: {:.2} M row updates/s, {:.0} ns cpu/row update, \
             step us p50 {} p99 {} p99.9 {} max {}, load {}",
            rows as f64 / total_us as f64,
            self.cpu_ns as f64 / rows as f64,
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0),
            load(),
        );
    }
}

fn report_epoch(job: &Job, (before, now): (&PlannedStats, &PlannedStats), rows: u64) {
    let record_bytes = job.schema.tables()[0].record_bytes() as f64;
    let flushed = (now.rows_flushed - before.rows_flushed) as f64 * record_bytes;
    let written = (now.io.write_bytes - before.io.write_bytes) as f64;
    println!(
        "  {:.1} B read + {:.1} B written per row update, write amplification {:.3}, \
         {:.1} rows/chunk, spans of {}, initialised {}, waited {} times",
        (now.io.read_bytes - before.io.read_bytes) as f64 / rows as f64,
        written / rows as f64,
        written / flushed.max(1.0),
        (now.rows_flushed - before.rows_flushed) as f64
            / (now.chunks_written - before.chunks_written).max(1) as f64,
        now.span_windows,
        now.rows_initialised - before.rows_initialised,
        now.wait_count - before.wait_count,
    );
    let live_bytes = now.rows_initialised as f64 * record_bytes;
    println!(
        "  extents per byte of used rows: {:.3} ever used, {:.3} in use, {:.3} quarantined; \
         {} checkpoints",
        now.file_bytes as f64 / live_bytes,
        (now.used_disk_bytes - now.quarantined_bytes) as f64 / live_bytes,
        now.quarantined_bytes as f64 / live_bytes,
        now.checkpoint_count,
    );
}

fn run_forward(job: &Job, folder: &Path) {
    let plan = EpochPlan::open(&FsFolder::open(folder.join("plan")).unwrap(), "plan").unwrap();
    let config = job.config();
    let store = folder.join("forward");
    let mut engine = PlannedEngine::open(&store, job.schema.clone(), plan, &config).unwrap();
    let (features, offsets, clock) = (job.features(), job.offsets(), Env::real(0).clock);
    let (mut indices, mut out, grad) =
        (Vec::new(), vec![], vec![0.01; job.batch_size * features.output_dim()]);
    for epoch in 0..job.epochs {
        let (mut meter, before) = (Meter::default(), engine.stats());
        for at in 0..job.batches {
            job.batch(at, &mut indices);
            let bags = Bags::new(&indices, &offsets, None, 26).unwrap();
            out.resize(features.output_len(&bags), 0.0);
            meter.step(&*clock, || {
                engine.lookup(&features, &bags, &mut out).unwrap();
                let output = &grad[..out.len()];
                let grads = tierbed_train::planned::Grads { output, weights: None };
                engine.update(&features, &bags, grads, None).unwrap();
            });
            if job.checkpoint > 0 && (at + 1) % job.checkpoint == 0 {
                engine.checkpoint("between", &[]).unwrap();
            }
        }
        let now = engine.stats();
        let rows = now.row_update_count - before.row_update_count;
        meter.report("forward", epoch + 1, rows);
        report_epoch(job, (&before, &now), rows);
    }
    let before_us = clock.now_us();
    engine.checkpoint("end", &[]).unwrap();
    let stats = engine.stats();
    let live_bytes = stats.rows_initialised * job.schema.tables()[0].record_bytes() as u64;
    println!(
        "  checkpoint {:.3} s ({} MiB dumped), space amplification {:.3}, peak {} MiB, \
         budget {} MiB",
        (clock.now_us() - before_us) as f64 / 1e6,
        (stats.dump_bytes / stats.checkpoint_count) >> 20,
        (stats.file_bytes + stats.dump_bytes / stats.checkpoint_count) as f64 / live_bytes as f64,
        peak_kib() / 1024,
        job.budget_bytes >> 20,
    );
    let expected = stats.row_update_count;
    for (part, used) in engine.budget().report().parts {
        println!("  {part}: {} KiB", used.peak_bytes >> 10);
    }
    drop(engine);
    count_uses(job, folder, expected);
}

// Moves the rows of every batch and computes nothing: what the storage alone costs.
fn run_storage(job: &Job, folder: &Path) {
    let plan = EpochPlan::open(&FsFolder::open(folder.join("plan")).unwrap(), "plan").unwrap();
    let config = job.config();
    let store = folder.join("storage");
    let mut engine = PlannedEngine::open(&store, job.schema.clone(), plan, &config).unwrap();
    let (features, offsets, clock) = (job.features(), job.offsets(), Env::real(0).clock);
    let mut indices = Vec::new();
    for epoch in 0..job.epochs {
        let (mut meter, mut rows) = (Meter::default(), 0);
        for at in 0..job.batches {
            job.batch(at, &mut indices);
            let bags = Bags::new(&indices, &offsets, None, 26).unwrap();
            meter.step(&*clock, || engine.pass(&features, &bags).unwrap());
            rows += distinct_rows(job, &mut indices);
        }
        meter.report("storage alone", epoch + 1, rows);
    }
}

fn distinct_rows(job: &Job, indices: &mut [i64]) -> u64 {
    let features = indices.chunks_mut(job.batch_size);
    features
        .map(|ids| {
            ids.sort_unstable();
            ids.chunk_by(|a, b| a == b).count() as u64
        })
        .sum()
}

// Reopens the store and adds up what every row says of itself: no step stale, lost or doubled.
fn count_uses(job: &Job, folder: &Path, expected: u64) {
    let plan = EpochPlan::open(&FsFolder::open(folder.join("plan")).unwrap(), "plan").unwrap();
    let config = PlannedConfig::new(job.budget_bytes * 5 / 4);
    let store = folder.join("forward");
    let mut engine = PlannedEngine::open(&store, job.schema.clone(), plan, &config).unwrap();
    let (mut uses, mut rows) = (0, 0);
    let clock = Env::real(0).clock;
    let before_us = clock.now_us();
    engine
        .scan_all(&mut |_, _, record| {
            uses += u64::from(record.last().unwrap().to_bits());
            rows += 1;
            Ok(())
        })
        .unwrap();
    println!(
        "  reopened: {rows} rows with {uses} uses, {expected} expected; scan {:.2} s",
        (clock.now_us() - before_us) as f64 / 1e6
    );
    assert_eq!(uses, expected, "uses counted by the rows");
}

fn run_engine(job: &Job, folder: &Path, system: &str) {
    let backend = if system == "memory" { Backend::Memory } else { Backend::File };
    // Rows in the row buffer and in the memory store: nothing is ever written back.
    let budget = if system == "memory" {
        4 * job.schema.table_bytes() + (1 << 30)
    } else {
        job.budget_bytes
    };
    let config = WindowConfig { backend, ..WindowConfig::new(budget) };
    let store = folder.join(system);
    let mut engine = WindowEngine::open(Some(&store), &config).unwrap();
    for table in job.schema.tables() {
        engine.add_table(table.clone()).unwrap();
    }
    let (features, offsets, clock) = (job.features(), job.offsets(), Env::real(0).clock);
    let (mut indices, mut out, grad) =
        (Vec::new(), vec![], vec![0.01; job.batch_size * features.output_dim()]);
    let batches = job.batches.min(if system == "file" { 1000 } else { u64::MAX });
    for epoch in 0..job.epochs {
        let (mut meter, before) = (Meter::default(), engine.stats());
        let mut rows = 0;
        for at in 0..batches {
            job.batch(at, &mut indices);
            let bags = Bags::new(&indices, &offsets, None, 26).unwrap();
            out.resize(features.output_len(&bags), 0.0);
            meter.step(&*clock, || {
                engine.lookup(&features, &bags, &mut out).unwrap();
                let output = &grad[..out.len()];
                let grads = tierbed_train::window::update::Grads { output, weights: None };
                engine.update(&features, &bags, grads).unwrap();
            });
            rows += distinct_rows(job, &mut indices);
        }
        meter.report(system, epoch + 1, rows);
        let (now, then) = (engine.stats().store.io, before.store.io);
        println!(
            "  {:.1} B read + {:.1} B written per row update, peak {} MiB",
            (now.read_bytes - then.read_bytes) as f64 / rows as f64,
            (now.write_bytes - then.write_bytes) as f64 / rows as f64,
            peak_kib() / 1024,
        );
    }
}

fn thread_cpu_ns() -> u64 {
    // The kernel brings the figure up to date when it schedules.
    std::thread::yield_now();
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

fn peak_kib() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap();
    text.split_whitespace().next().unwrap().to_owned()
}

fn main() {
    let options = Options::read();
    let job = Job::new(&options);
    let folder = PathBuf::from(options.get("folder", "forward-trace".to_owned()));
    let system: String = options.get("system", "all".to_owned());
    match system.as_str() {
        "plan" => job.make_plan(&folder.join("plan"), options.get("plan_memory", 256 << 20)),
        "forward" => run_forward(&job, &folder),
        "storage" => run_storage(&job, &folder),
        "file" | "memory" => run_engine(&job, &folder, &system),
        _ => {
            println!(
                "{} rows, {} MiB of tables, {} batches of {}, budget {} MiB, load {}",
                job.schema.tables().iter().map(|table| table.row_count).sum::<u64>(),
                job.schema.table_bytes() >> 20,
                job.batches,
                job.batch_size,
                job.budget_bytes >> 20,
                load(),
            );
            for system in ["plan", "forward", "storage", "memory", "file"] {
                let status = std::process::Command::new(std::env::current_exe().unwrap())
                    .args(std::env::args().skip(1))
                    .arg(format!("system={system}"))
                    .status()
                    .unwrap();
                assert!(status.success(), "{system} failed");
            }
            fs::remove_dir_all(&folder).unwrap();
        }
    }
}
