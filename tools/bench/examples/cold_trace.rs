//! What does training with a look-ahead window cost, store by store, when the future beyond it is
//! unknown?
//!
//! Trains a generated trace (see `tierbed_lab::trace`) through the engine: every window's rows
//! are announced and brought ahead, then its batches are looked up and stepped. All rows are
//! written before, as after a first epoch. `order=permuted` renames the ids of each table, so that
//! rows used often are no neighbours. Processor time is that of the whole process.
//!
//! ```text
//! cargo run --release -p tierbed-lab --example trace -- trace.bin 0.05
//! cargo run --release -p tierbed-bench --example cold_trace -- trace=trace.bin system=cold
//! ```

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a measuring program that panics has failed, as it should"
)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use rustix::time::{clock_gettime, ClockId};
use tierbed_core::env::{Clock, Env};
use tierbed_core::{Bags, InitSpec, OptimizerKind, Schema, TableId, TableSchema};
use tierbed_lab::trace::TraceReader;
use tierbed_train::window::{
    Backend, FeatureLayout, Pooling, WindowConfig, WindowEngine, WindowStats,
};

const FEATURES: usize = 26;

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
    trace: TraceReader,
    schema: Schema,
    batch: usize,
    window: usize,
    is_permuted: bool,
}

impl Job {
    fn new(options: &Options) -> Self {
        let path: String = options.get("trace", "trace.bin".to_owned());
        let trace = TraceReader::open(PathBuf::from(path).as_path()).unwrap();
        let table = |(at, &row_count): (usize, &u64)| TableSchema {
            optimizer: OptimizerKind::RowWiseAdagrad,
            init: InitSpec::Uniform { low: -0.01, high: 0.01 },
            seed: at as u64,
            ..TableSchema::plain(format!("c{at}"), row_count, options.get("dim", 36))
        };
        let schema = Schema::new(trace.row_counts().iter().enumerate().map(table).collect());
        Self {
            schema: schema.unwrap(),
            batch: options.get("batch", 512),
            window: options.get("window", 512),
            is_permuted: options.get("order", String::new()) == "permuted",
            trace,
        }
    }

    // A large prime times the id, modulo the rows: another order, no id twice.
    fn permute(&self, ids: &mut [i64]) {
        const PRIME: u64 = 2_654_435_761;
        for (ids, table) in ids.chunks_mut(self.batch).zip(self.schema.tables()) {
            for id in ids {
                *id = (*id as u64 * PRIME % table.row_count) as i64;
            }
        }
    }

    fn read(&mut self, first: u64, count: usize) -> Vec<Vec<i64>> {
        (0..count)
            .map(|at| {
                let mut ids = Vec::new();
                let sample = (first + at as u64) * self.batch as u64;
                self.trace.read(sample, self.batch, &mut ids).unwrap();
                if self.is_permuted {
                    self.permute(&mut ids);
                }
                ids
            })
            .collect()
    }

    fn distinct_rows(&self, ids: &[i64]) -> u64 {
        let columns = ids.chunks(self.batch).map(|ids| {
            let mut ids = ids.to_vec();
            ids.sort_unstable();
            ids.chunk_by(|a, b| a == b).count() as u64
        });
        columns.sum()
    }
}

fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Processor and wall time of one kind of work.
#[derive(Default, Clone, Copy)]
struct Spent {
    cpu_ns: u64,
    wall_us: u64,
}

impl Spent {
    fn on<T>(&mut self, clock: &dyn Clock, work: impl FnOnce() -> T) -> T {
        let (cpu, wall) = (cpu_ns(), clock.now_us());
        let result = work();
        self.cpu_ns += cpu_ns() - cpu;
        self.wall_us += clock.now_us() - wall;
        result
    }
}

fn fill(engine: &mut WindowEngine, schema: &Schema) {
    const ROWS: u64 = 4096;
    for (at, table) in schema.tables().iter().enumerate() {
        let words = table.record_words();
        let mut records = vec![0.25f32; ROWS as usize * words];
        records.chunks_mut(words).for_each(|record| record[words - 1] = f32::from_bits(0));
        for first in (0..table.row_count).step_by(ROWS as usize) {
            let count = ROWS.min(table.row_count - first) as usize;
            engine.write_records(TableId(at as u32), first, &records[..count * words]).unwrap();
        }
    }
    engine.checkpoint("filled", &[]).unwrap();
}

fn report(
    name: &str,
    (before, after): (&WindowStats, &WindowStats),
    (ahead, steps): (Spent, Spent),
    (rows, record_bytes): (u64, u64),
) {
    let per = |count: u64| count as f64 / rows as f64;
    let (was, is) = (&before.store.io, &after.store.io);
    let written_back = after.buffer.written_back_count - before.buffer.written_back_count;
    let written = is.write_bytes - was.write_bytes;
    println!(
        "{name}: {:.3} M row updates/s, cpu ns/row: {:.0} ahead + {:.0} steps; per row: {:.0} B in \
         {:.4} reads, {:.0} B written; {:.3} missed, {:.3} written back; write amplification {:.2}",
        rows as f64 / (ahead.wall_us + steps.wall_us) as f64,
        per(ahead.cpu_ns),
        per(steps.cpu_ns),
        per(is.read_bytes - was.read_bytes),
        per(is.read_count - was.read_count),
        per(written),
        per(after.buffer.miss_count - before.buffer.miss_count),
        per(written_back),
        written as f64 / (written_back * record_bytes).max(1) as f64,
    );
}

fn open(options: &Options, job: &Job) -> (WindowEngine, PathBuf) {
    let system: String = options.get("system", "cold".to_owned());
    let share: f64 = options.get("share", 0.05);
    let table_bytes = job.schema.table_bytes();
    let budget = options.get("budget", (table_bytes as f64 * share) as u64);
    let folder = PathBuf::from(options.get("folder", format!("cold-trace-{system}")));
    let backend = Backend::from_name(&system).unwrap();
    let config = WindowConfig { backend, ..WindowConfig::new(budget) };
    let mut engine = WindowEngine::open(Some(&folder), &config).unwrap();
    job.schema.tables().iter().for_each(|table| {
        engine.add_table(table.clone()).unwrap();
    });
    fill(&mut engine, &job.schema);
    println!(
        "{system}: {} rows, {} MiB of tables, budget {} MiB, batches of {}, window {}, permuted {}",
        job.schema.tables().iter().map(|table| table.row_count).sum::<u64>(),
        table_bytes >> 20,
        budget >> 20,
        job.batch,
        job.window,
        job.is_permuted,
    );
    (engine, folder)
}

/// What some batches took.
#[derive(Default)]
struct Slice {
    ahead: Spent,
    steps: Spent,
    rows: u64,
    windows: u64,
    disk_bytes_max: u64,
}

/// Announces and trains batches `next..end`; `reach` is the window that fitted so far.
fn train(
    job: &mut Job,
    engine: &mut WindowEngine,
    plan: &FeatureLayout,
    (mut next, end): (u64, u64),
    reach: &mut usize,
) -> Slice {
    let offsets: Vec<i64> = (0..=(FEATURES * job.batch) as i64).collect();
    let clock = Env::real(0).clock;
    let mut out = vec![0.0; job.batch * plan.output_dim()];
    let grad = vec![0.01; out.len()];
    let mut slice = Slice::default();
    while next < end {
        let wanted = (*reach).min((end - next) as usize);
        let batches = job.read(next, wanted);
        let bags: Vec<_> =
            batches.iter().map(|ids| Bags::new(ids, &offsets, None, FEATURES).unwrap()).collect();
        let fitted = slice.ahead.on(&*clock, || engine.prefetch(plan, &bags).unwrap()).max(1);
        // As `tierbed.lookahead` does: what did not fit is not announced for nothing again.
        *reach = if fitted < wanted { fitted } else { job.window.min(2 * *reach) };
        slice.windows += 1;
        slice.rows += batches[..fitted].iter().map(|ids| job.distinct_rows(ids)).sum::<u64>();
        slice.steps.on(&*clock, || {
            for bags in &bags[..fitted] {
                engine.lookup(plan, bags, &mut out).unwrap();
                let grads = tierbed_train::window::update::Grads { output: &grad, weights: None };
                engine.update(plan, bags, grads).unwrap();
            }
        });
        next += fitted as u64;
        slice.disk_bytes_max = slice.disk_bytes_max.max(engine.stats().store.disk_bytes);
    }
    slice
}

fn main() {
    let options = Options::read();
    let mut job = Job::new(&options);
    let (mut engine, folder) = open(&options, &job);
    let features: Vec<_> = (0..FEATURES as u32).map(|at| (TableId(at), Pooling::Sum)).collect();
    let plan = FeatureLayout::new(&job.schema, &features).unwrap();
    let clock = Env::real(0).clock;
    let record_bytes = job.schema.tables()[0].record_bytes() as u64;
    let all = job.trace.sample_count() / job.batch as u64;
    let slices: u64 = options.get("slices", 6);
    let slice = options.get("slice", all / slices).min(all / slices);
    let mut reach = job.window;
    for at in 0..slices {
        let before = engine.stats();
        let batches = (at * slice, (at + 1) * slice);
        let done = train(&mut job, &mut engine, &plan, batches, &mut reach);
        let name = format!("  slice {at} ({slice} batches in {} windows)", done.windows);
        let spent = (done.ahead, done.steps);
        report(&name, (&before, &engine.stats()), spent, (done.rows, record_bytes));
        let mut commit = Spent::default();
        let io = engine.stats().store.io.write_bytes;
        commit.on(&*clock, || engine.checkpoint("slice", &[]).unwrap());
        println!(
            "    checkpoint {:.2} s, {} MiB written; space at most {:.3} of the tables",
            commit.wall_us as f64 / 1e6,
            (engine.stats().store.io.write_bytes - io) >> 20,
            done.disk_bytes_max as f64 / job.schema.table_bytes() as f64,
        );
    }
    for (part, used) in engine.budget().report().parts {
        println!("  {part}: {} KiB", used.peak_bytes >> 10);
    }
    drop(engine);
    std::fs::remove_dir_all(&folder).unwrap();
}
