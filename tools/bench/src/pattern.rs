//! The access pattern: skewed ids, one update per lookup, a checkpoint now and then.

use std::path::Path;

use serde_json::{json, Value};
use tierbed_core::env::{mix64, Clock, SplitMix64, SystemClock};
use tierbed_core::{Bags, Error, InitSpec, OptimizerKind, Result, TableId, TableSchema};
use tierbed_train::window::update::Grads;
use tierbed_train::window::{Backend, FeatureLayout, Hyper, Pooling, WindowConfig, WindowEngine};

/// Steps between two checkpoints.
const CHECKPOINT_STEPS: u64 = 100;

/// What to run; see the program's `--help`.
#[derive(Debug)]
pub(crate) struct PatternOptions {
    pub(crate) budget_bytes: u64,
    pub(crate) backend: String,
    pub(crate) io_engine: String,
    pub(crate) tables: u32,
    pub(crate) rows: u64,
    pub(crate) dim: u32,
    pub(crate) batch_size: usize,
    pub(crate) steps: u64,
    pub(crate) window: u64,
    pub(crate) seed: u64,
}

/// One batch of ids.
struct Batch {
    indices: Vec<i64>,
    offsets: Vec<i64>,
}

impl Batch {
    fn bags(&self, features: usize) -> Result<Bags<'_>> {
        Bags::new(&self.indices, &self.offsets, None, features)
    }
}

impl PatternOptions {
    fn config(&self) -> Result<WindowConfig> {
        let backend = match self.backend.as_str() {
            "file" => Backend::File,
            "memory" => Backend::Memory,
            "cold" => Backend::Cold,
            "lsm" => Backend::Lsm,
            "lsm_plain" => Backend::LsmPlain,
            "hashdb" => Backend::HashDb,
            "mmap" => Backend::Mmap,
            "rocksdb" => Backend::RocksDb,
            "rocksdb_universal" => Backend::RocksDbUniversal,
            other => return Err(Error::invalid("unknown backend").with("found", other)),
        };
        let io_engine = self.io_engine.clone();
        Ok(WindowConfig { backend, io_engine, ..WindowConfig::new(self.budget_bytes) })
    }

    fn table(&self, at: u32) -> TableSchema {
        TableSchema {
            optimizer: OptimizerKind::RowWiseAdagrad,
            init: InitSpec::Uniform { low: -0.01, high: 0.01 },
            seed: self.seed + u64::from(at),
            ..TableSchema::plain(format!("table{at}"), self.rows, self.dim)
        }
    }

    // One id per feature and sample. Half of the draws fall on about the square root of the
    // rows, the rest is spread log-uniformly: heavy head, long tail, no neighbours in id order.
    fn batch(&self, step: u64) -> Batch {
        let mut rng = SplitMix64::new(mix64(self.seed ^ mix64(step)));
        let index_count = self.tables as usize * self.batch_size;
        let indices = (0..index_count)
            .map(|_| {
                let rank = (self.rows as f64).powf(rng.unit_f64()) as u64 - 1;
                (mix64(rank) % self.rows) as i64
            })
            .collect();
        Batch { indices, offsets: (0..=index_count as i64).collect() }
    }
}

/// Runs the pattern in `path` and reports counts, times and memory.
pub(crate) fn run(path: &Path, options: &PatternOptions) -> Result<Value> {
    let clock = SystemClock::default();
    let mut engine = WindowEngine::open(Some(path), &options.config()?)?;
    let mut features = Vec::new();
    for at in 0..options.tables {
        let id = engine.add_table(options.table(at))?;
        engine.set_hyper(id, Hyper { lr: 0.05, ..Hyper::default() })?;
        features.push((TableId(id.0), Pooling::Sum));
    }
    let plan = FeatureLayout::new(engine.schema(), &features)?;
    let mut output = vec![0.0f32; options.batch_size * plan.output_dim()];
    let mut times = Times::default();
    let mut announced = 0;
    for step in 0..options.steps {
        if options.window > 0 && step >= announced {
            let start = clock.now_us();
            announced = step + announce(&mut engine, &plan, options, step)?;
            times.prefetch_us += clock.now_us() - start;
        }
        let batch = options.batch(step);
        let bags = batch.bags(features.len())?;
        let start = clock.now_us();
        engine.lookup(&plan, &bags, &mut output)?;
        times.lookup_us += clock.now_us() - start;
        output.iter_mut().for_each(|value| *value = *value * 0.1 + 0.01);
        let start = clock.now_us();
        engine.update(&plan, &bags, Grads { output: &output, weights: None })?;
        times.update_us += clock.now_us() - start;
        if (step + 1) % CHECKPOINT_STEPS == 0 {
            let start = clock.now_us();
            engine.checkpoint("pattern", &[])?;
            times.checkpoint_us += clock.now_us() - start;
        }
    }
    Ok(report(&engine, options, &times))
}

// Returns how many batches from `step` on were announced; at least one, so that a window too
// large for the buffer does not ask again at once.
fn announce(
    engine: &mut WindowEngine,
    plan: &FeatureLayout,
    options: &PatternOptions,
    step: u64,
) -> Result<u64> {
    let last = (step + options.window).min(options.steps);
    let batches: Vec<Batch> = (step..last).map(|step| options.batch(step)).collect();
    let features = plan.features().len();
    let bags = batches.iter().map(|batch| batch.bags(features)).collect::<Result<Vec<_>>>()?;
    Ok((engine.prefetch(plan, &bags)? as u64).max(1))
}

#[derive(Debug, Default)]
struct Times {
    prefetch_us: u64,
    lookup_us: u64,
    update_us: u64,
    checkpoint_us: u64,
}

fn report(engine: &WindowEngine, options: &PatternOptions, times: &Times) -> Value {
    let stats = engine.stats();
    let budget = engine.budget().report();
    let index_count = options.steps * u64::from(options.tables) * options.batch_size as u64;
    let engine_us = times.prefetch_us + times.lookup_us + times.update_us;
    json!({
        "steps": options.steps,
        "indices": index_count,
        "indices_per_s": index_count as f64 / (engine_us.max(1) as f64 / 1e6),
        "table_bytes": engine.schema().table_bytes(),
        "dram_budget_bytes": budget.limit_bytes,
        "dram_peak_bytes": budget.peak_bytes,
        "resident_peak_bytes": resident_peak_bytes(),
        "prefetch_us": times.prefetch_us,
        "lookup_us": times.lookup_us,
        "update_us": times.update_us,
        "checkpoint_us": times.checkpoint_us,
        "store": stats.store,
        "buffer": stats.buffer,
        "isa": stats.isa,
    })
}

/// Returns the largest resident set of this process so far, from the kernel.
fn resident_peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
