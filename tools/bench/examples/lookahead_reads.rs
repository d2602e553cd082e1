//! How many rows does training read per batch, by who leaves the row buffer?
//!
//! ```console
//! $ cargo run --release -p tierbed-bench --example lookahead_reads -- LOG [BATCH]
//! ```
//! Trains along LOG (samples in Criteo's layout, or one query per line) in batches of 128 queries
//! over a store in memory, with buffers of several shares of the log's rows and windows of several
//! shares of the buffer. Every run has the same rows in the end, to the last bit. `belady` is the
//! least that any order could read: it knows the whole log. Counts are exact and repeat anywhere.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a program for measuring"
)]

use std::path::Path;

use tierbed_bench::samples::SampleQueries;
use tierbed_core::{Bags, Budget, OptimizerKind, TableSchema};
use tierbed_lab::bounds::{farthest_next_use, Requests};
use tierbed_placement::{read_log, QuerySource, ReadOptions, TextQueries};
use tierbed_store::MemoryStore;
use tierbed_train::window::update::Grads;
use tierbed_train::window::{EvictionOrder, FeatureLayout, Pooling, WindowConfig, WindowEngine};

const DIM: u32 = 32;
/// Budgets looked at for a buffer of so many rows.
const BUDGETS_BYTES: (u64, u64) = (1 << 20, 1 << 30);
/// Rows of the buffer, as shares of the rows of the log.
const CAPACITIES: [f64; 3] = [0.05, 0.1, 0.2];
/// Rows named by the window, per row of the buffer.
const WINDOWS: [f64; 4] = [0.0, 0.25, 1.0, 4.0];

/// Batches of different rows.
struct Log {
    offsets: Vec<u64>,
    rows: Vec<u32>,
    row_count: usize,
}

impl Log {
    fn read(path: &Path, batch_queries: usize) -> Self {
        let mut source: Box<dyn QuerySource> = if SampleQueries::is_layout_of(path).unwrap() {
            Box::new(SampleQueries::open(path).unwrap())
        } else {
            Box::new(TextQueries::open(path).unwrap())
        };
        let log = read_log(source.as_mut(), &ReadOptions::default(), &mut |_, _| Ok(())).unwrap();
        let row_count = log.row_count() as usize;
        let (bounds, rows) = log.into_parts();
        let (mut offsets, mut unique) = (vec![0], Vec::new());
        for queries in bounds.windows(batch_queries + 1).step_by(batch_queries) {
            let mut batch = rows[queries[0] as usize..queries[batch_queries] as usize].to_vec();
            batch.sort_unstable();
            batch.dedup();
            unique.extend(batch);
            offsets.push(unique.len() as u64);
        }
        Self { offsets, rows: unique, row_count }
    }

    fn batch_count(&self) -> usize {
        self.offsets.len() - 1
    }

    fn batch(&self, number: usize) -> Vec<i64> {
        let range = self.offsets[number] as usize..self.offsets[number + 1] as usize;
        self.rows[range].iter().map(|&row| i64::from(row)).collect()
    }
}

/// An engine whose buffer has about `row_capacity` rows.
fn engine(
    log: &Log,
    row_capacity: usize,
    eviction: EvictionOrder,
) -> (WindowEngine, FeatureLayout) {
    let open = |dram_budget_bytes: u64| {
        let store = MemoryStore::new(Budget::new(1 << 40));
        let config = WindowConfig { eviction, ..WindowConfig::new(dram_budget_bytes) };
        let mut engine = WindowEngine::over(Box::new(store), &config).unwrap();
        let optimizer = OptimizerKind::RowWiseAdagrad;
        let table =
            TableSchema { optimizer, ..TableSchema::plain("rows", log.row_count as u64, DIM) };
        let id = engine.add_table(table).unwrap();
        let plan = FeatureLayout::new(engine.schema(), &[(id, Pooling::Sum)]).unwrap();
        let bags = Bags::new(&[0], &[0, 1], None, 1).unwrap();
        engine.prefetch(&plan, &[bags]).unwrap();
        engine.end_lookahead();
        (engine, plan)
    };
    let (mut low, mut high) = BUDGETS_BYTES;
    while high - low > 4 << 10 {
        let middle = (low + high) / 2;
        if open(middle).0.stats().buffer.row_capacity < row_capacity as u64 {
            low = middle;
        } else {
            high = middle;
        }
    }
    open(high)
}

/// Rows read per batch, and the sum of all outputs' bits.
fn train(log: &Log, capacity: usize, window: usize, order: EvictionOrder) -> (f64, u64) {
    let (mut engine, plan) = engine(log, capacity, order);
    let mut out = vec![0.0; DIM as usize];
    let (mut announced, mut bits) = (0, 0u64);
    for number in 0..log.batch_count() {
        if window > 0 && announced <= number + window / 2 {
            let first = announced.max(number);
            let ids: Vec<Vec<i64>> =
                (first..(number + window).min(log.batch_count())).map(|at| log.batch(at)).collect();
            let ends: Vec<[i64; 2]> = ids.iter().map(|ids| [0, ids.len() as i64]).collect();
            let bags: Vec<Bags<'_>> = ids
                .iter()
                .zip(&ends)
                .map(|(ids, end)| Bags::new(ids, end, None, 1).unwrap())
                .collect();
            announced = first + engine.prefetch(&plan, &bags).unwrap();
        }
        let ids = log.batch(number);
        let end = [0, ids.len() as i64];
        let bags = Bags::new(&ids, &end, None, 1).unwrap();
        engine.lookup(&plan, &bags, &mut out).unwrap();
        bits = out.iter().fold(bits, |sum, value| sum.wrapping_add(u64::from(value.to_bits())));
        let grad: Vec<f32> = out.iter().map(|value| value * 0.01 + 0.1).collect();
        engine.update(&plan, &bags, Grads { output: &grad, weights: None }).unwrap();
    }
    (engine.stats().buffer.miss_count as f64 / log.batch_count() as f64, bits)
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("a query log");
    let batch_queries = arguments.next().map_or(128, |number| number.parse().unwrap());
    let log = Log::read(Path::new(&path), batch_queries);
    let batch_rows = log.rows.len() / log.batch_count();
    let requests = Requests::new(&log.offsets, &log.rows, log.row_count).unwrap();
    println!("capacity_rows,window_batches,second_chance,next_use,belady");
    for share in CAPACITIES {
        let wanted = (share * log.row_count as f64) as usize;
        let (engine, _) = engine(&log, wanted, EvictionOrder::NextUse);
        let capacity = engine.stats().buffer.row_capacity as usize;
        let counts = farthest_next_use(&requests, capacity);
        let least = (counts.rows - counts.hits) as f64 / log.batch_count() as f64;
        for window in WINDOWS {
            let window = (window * capacity as f64 / batch_rows as f64).round() as usize;
            let (second_chance, bits) = train(&log, capacity, window, EvictionOrder::SecondChance);
            let (next_use, same_bits) = train(&log, capacity, window, EvictionOrder::NextUse);
            assert_eq!(bits, same_bits, "the order of leaving changed the outputs");
            println!("{capacity},{window},{second_chance:.1},{next_use:.1},{least:.1}");
        }
    }
}
