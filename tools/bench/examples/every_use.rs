//! Does every use of every row along a plan see exactly the uses before it?
//!
//! Trains whole epochs of a generated trace and asks the rows themselves. The gradient is -1 in
//! the first column and 0 in the others, the optimizer is SGD with a rate of 1: so the first
//! column counts a row's uses from a start that is the row's own, the second column stays what it
//! was. A plain array in memory says what each lookup must find. A row that is stale, lost, taken
//! for another or stepped twice fails the run. Twice per epoch the store is closed and opened
//! again at a checkpoint; at the end all rows are read once more, with their use counts.
//!
//! ```text
//! cargo run --release -p tierbed-bench --example every_use -- SCALE FOLDER [EPOCHS]
//! cargo run --release -p tierbed-bench --example every_use -- 1 every-use
//! ```
//!
//! Scale 1 is 45.8 M samples: about 6 GB in FOLDER, which is deleted at the end, and 0.5 GB of
//! memory for the array.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a checking program that panics has found something, as it should"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::env::Env;
use tierbed_core::{Bags, InitSpec, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_kernels::{init_record, FeatureLayout, Hyper, Pooling};
use tierbed_lab::trace::{write_trace, TraceOptions, TraceReader};
use tierbed_train::planned::{
    EpochPlan, Grads, PlanBuilder, PlanOptions, PlanShape, PlannedConfig, PlannedEngine,
};

const FEATURES: usize = 26;
const DIM: usize = 4;
/// Samples of a batch, and of one on a trace so small that windows would be of part of a batch.
const BATCH: usize = 2048;
const SMALL_BATCH: usize = 512;
const SMALL_SCALE: f64 = 0.25;
/// Share of the tables' bytes that the store may use: one in so many.
const BUDGET_PART: u64 = 20;
const BUDGET_BYTES_MIN: u64 = 10 << 20;

/// What a row must look like: the column that counts, and one that never changes.
type Row = [f32; 2];

struct Job {
    folder: PathBuf,
    trace: TraceReader,
    schema: Schema,
    features: FeatureLayout,
    offsets: Vec<i64>,
    ids: Vec<i64>,
    batch_len: usize,
    batches: u64,
    budget_bytes: u64,
}

impl Job {
    fn new(folder: &Path, scale: f64) -> Self {
        let path = folder.join("trace");
        write_trace(&TraceOptions { seed: 1, scale }, &path, &mut |_| Ok(())).unwrap();
        let trace = TraceReader::open(&path).unwrap();
        let table = |(at, &row_count): (usize, &u64)| TableSchema {
            init: InitSpec::Uniform { low: -0.5, high: 0.5 },
            seed: at as u64,
            ..TableSchema::plain(format!("c{at}"), row_count, DIM as u32)
        };
        let schema = Schema::new(trace.row_counts().iter().enumerate().map(table).collect());
        let schema = schema.unwrap();
        let features: Vec<_> = (0..FEATURES as u32).map(|at| (TableId(at), Pooling::Sum)).collect();
        let batch_len = if scale < SMALL_SCALE { SMALL_BATCH } else { BATCH };
        Self {
            folder: folder.to_owned(),
            batch_len,
            batches: trace.sample_count() / batch_len as u64,
            budget_bytes: (schema.table_bytes() / BUDGET_PART).max(BUDGET_BYTES_MIN),
            features: FeatureLayout::new(&schema, &features).unwrap(),
            offsets: (0..=(FEATURES * batch_len) as i64).collect(),
            ids: Vec::new(),
            schema,
            trace,
        }
    }

    fn bags(&mut self, batch: u64) -> Bags<'_> {
        let batch_len = self.batch_len;
        self.trace.read(batch * batch_len as u64, batch_len, &mut self.ids).unwrap();
        Bags::new(&self.ids, &self.offsets, None, FEATURES).unwrap()
    }

    fn make_plan(&mut self) {
        let folder = Arc::new(FsFolder::create(self.folder.join("plan")).unwrap());
        let tables: Vec<_> = (0..FEATURES as u32).map(TableId).collect();
        let shape = PlanShape::new(&self.schema, &tables).unwrap();
        let options = PlanOptions {
            window_bytes: self.budget_bytes / 12,
            memory_bytes: 128 << 20,
            ..PlanOptions::default()
        };
        let mut builder = PlanBuilder::new(folder, "plan", shape, "every use", options).unwrap();
        for batch in 0..self.batches {
            builder.push(&self.bags(batch)).unwrap();
        }
        builder.finish().unwrap();
    }

    fn open(&self) -> PlannedEngine {
        let folder = FsFolder::open(self.folder.join("plan")).unwrap();
        let plan = EpochPlan::open(&folder, "plan").unwrap();
        // A store that is full keeps lists of more chunks than a new one expects.
        let config = PlannedConfig::new(self.budget_bytes * 5 / 4);
        let path = self.folder.join("rows");
        let mut engine = PlannedEngine::open(&path, self.schema.clone(), plan, &config).unwrap();
        for table in 0..FEATURES as u32 {
            engine.set_hyper(TableId(table), Hyper { lr: 1.0, ..Hyper::default() }).unwrap();
        }
        engine
    }
}

/// All rows as they must be, table after table.
struct Expected {
    firsts: Vec<usize>,
    rows: Vec<Row>,
}

impl Expected {
    fn new(schema: &Schema) -> Self {
        let (mut firsts, mut rows) = (Vec::new(), Vec::new());
        for table in schema.tables() {
            firsts.push(rows.len());
            let mut record = vec![0.0; table.record_words()];
            rows.extend((0..table.row_count).map(|row| {
                init_record(table, row, &mut record);
                [record[0], record[1]]
            }));
        }
        Self { firsts, rows }
    }

    fn is(&self, table: usize, row: usize, found: &[f32]) -> bool {
        let expected = self.rows[self.firsts[table] + row];
        expected.map(f32::to_bits) == [found[0].to_bits(), found[1].to_bits()]
    }
}

// Trains an epoch; returns the uses checked and rows stepped.
fn train(job: &mut Job, expected: &mut Expected) -> (u64, u64) {
    let width = FEATURES * DIM;
    let (features, mut out) = (job.features.clone(), vec![0.0; job.batch_len * width]);
    let grad: Vec<f32> = (0..out.len()).map(|at| if at % DIM == 0 { -1.0 } else { 0.0 }).collect();
    let mut engine = job.open();
    let (mut checked, mut stepped) = (0, 0);
    for batch in 0..job.batches {
        if batch == job.batches / 2 {
            engine.checkpoint("half", &[]).unwrap();
            stepped += engine.stats().row_update_count;
            drop(engine);
            engine = job.open();
        }
        let bags = job.bags(batch);
        engine.lookup(&features, &bags, &mut out).unwrap();
        engine.update(&features, &bags, Grads { output: &grad, weights: None }, None).unwrap();
        for (table, ids) in job.ids.chunks(job.batch_len).enumerate() {
            for (sample, &id) in ids.iter().enumerate() {
                let found = &out[sample * width + table * DIM..][..2];
                assert!(
                    expected.is(table, id as usize, found),
                    "batch {batch}, sample {sample}, table {table}, row {id}: {found:?}"
                );
            }
            checked += ids.len() as u64;
            let mut ids = ids.to_vec();
            ids.sort_unstable();
            for uses in ids.chunk_by(|a, b| a == b) {
                expected.rows[expected.firsts[table] + uses[0] as usize][0] += uses.len() as f32;
            }
        }
    }
    engine.checkpoint("end", &[]).unwrap();
    (checked, stepped + engine.stats().row_update_count)
}

// Reads all rows that were ever used; returns them, and the steps they count.
fn check_all(job: &Job, expected: &Expected) -> (u64, u64) {
    let (mut row_count, mut use_count) = (0, 0);
    let mut engine = job.open();
    engine
        .scan_all(&mut |table, row, record| {
            let (table, row) = (table.0 as usize, row.0 as usize);
            assert!(expected.is(table, row, record), "at the end: table {table}, row {row}");
            use_count += u64::from(record.last().unwrap().to_bits());
            row_count += 1;
            Ok(())
        })
        .unwrap();
    (row_count, use_count)
}

fn main() {
    let mut words = std::env::args().skip(1);
    let scale: f64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(0.01);
    let folder = PathBuf::from(words.next().unwrap_or_else(|| "every-use".to_owned()));
    let epochs: u64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(1);
    let clock = Env::real(0).clock;
    std::fs::create_dir(&folder).expect("FOLDER must not be there yet");
    let mut job = Job::new(&folder, scale);
    println!(
        "{} samples, {} rows, {} MiB of tables, budget {} MiB; trace after {} s",
        job.trace.sample_count(),
        job.schema.tables().iter().map(|table| table.row_count).sum::<u64>(),
        job.schema.table_bytes() >> 20,
        (job.budget_bytes * 5 / 4) >> 20,
        clock.now_us() / 1_000_000,
    );
    job.make_plan();
    println!("plan after {} s", clock.now_us() / 1_000_000);
    let mut expected = Expected::new(&job.schema);
    let mut stepped = 0;
    for epoch in 1..=epochs {
        let (checked, rows) = train(&mut job, &mut expected);
        stepped += rows;
        println!(
            "epoch {epoch}: {checked} uses checked, {rows} row updates, no error; {} s",
            clock.now_us() / 1_000_000
        );
    }
    let (row_count, use_count) = check_all(&job, &expected);
    println!("reopened: {row_count} rows as they must be, {use_count} of {stepped} row updates");
    assert_eq!(use_count, stepped, "row updates counted by the rows");
    std::fs::remove_dir_all(&folder).unwrap();
}
