//! What does a batch cost when its rows are in memory? Nanoseconds per index, part by part.
//!
//! Run with `cargo bench -p tierbed-kernels --bench batch`. 2,048 samples of 26 one-hot features,
//! a quarter of the indices distinct rows, dim 36, row-wise Adagrad; 15 MiB of records. Beside the
//! kernels that take a whole batch, those that take feature after feature. Each number is the best
//! of several rounds.

#![allow(clippy::indexing_slicing, reason = "a bench may panic")]

use std::hint::black_box;

use tierbed_core::env::{Clock, SplitMix64, SystemClock};
use tierbed_core::{OptimizerKind, TableId};
use tierbed_kernels::{
    BagRange, Columns, FeatureRows, FeatureStep, Hyper, Isa, Kernels, Places, Pooling, Prepared,
    RowSums, Rows,
};

const SAMPLES: usize = 2048;
const FEATURES: usize = 26;
const DIM: usize = 36;
const WORDS: usize = DIM + 2;
/// Rows of a feature in memory.
const ROWS: u64 = 4096;
const ROUNDS: usize = 150;

/// A batch, feature after feature, and the matrices it is pooled to and gets gradients from.
struct Batch {
    numbers: Vec<u32>,
    offsets: Vec<i64>,
    arena: Vec<f32>,
    matrix: Vec<f32>,
    sums: RowSums,
}

impl Batch {
    fn new() -> Self {
        let mut rng = SplitMix64::new(1);
        let mut number = |feature: usize| {
            // Features of few rows and of many, the small numbers of each drawn most often.
            let rows = ROWS >> (feature / 2);
            let skewed = rng.unit_f64() * rng.unit_f64();
            (skewed * rows.max(4) as f64) as u32
        };
        let numbers = (0..FEATURES).flat_map(|feature| vec![feature; SAMPLES]);
        let row_count = FEATURES * ROWS as usize;
        Self {
            numbers: numbers.map(&mut number).collect(),
            offsets: (0..=(SAMPLES * FEATURES) as i64).collect(),
            arena: (0..row_count * WORDS).map(|i| (i % 97) as f32 * 0.01).collect(),
            matrix: vec![0.01; SAMPLES * FEATURES * DIM],
            sums: RowSums::new(u64::MAX),
        }
    }

    fn rows(&self) -> Vec<FeatureRows<'_>> {
        let rows = |feature: usize| FeatureRows {
            numbers: &self.numbers[feature * SAMPLES..][..SAMPLES],
            places: Places { first: feature * ROWS as usize * WORDS, words: WORDS, slots: None },
            offsets: &self.offsets[feature * SAMPLES..][..=SAMPLES],
            weights: None,
            pooling: Pooling::Sum,
            columns: Columns { stride: FEATURES * DIM, first: feature * DIM, dim: DIM },
        };
        (0..FEATURES).map(rows).collect()
    }

    fn pool(&mut self, kernels: Kernels) {
        let mut out = std::mem::take(&mut self.matrix);
        kernels.pool_batch(&self.arena, &self.rows(), &mut out);
        self.matrix = out;
    }

    fn pool_by_feature(&mut self, kernels: Kernels) {
        let mut out = std::mem::take(&mut self.matrix);
        out.fill(0.0);
        for rows in self.rows() {
            let starts: Vec<usize> = rows.numbers.iter().map(|&n| rows.places.start(n)).collect();
            let bags = BagRange::whole(rows.offsets);
            let starts = Rows { arena: &self.arena, starts: &starts, weights: None };
            kernels.pool_add(starts, bags, rows.columns, &mut out);
        }
        self.matrix = out;
    }

    fn step(&mut self, kernels: Kernels, step: &Prepared) -> usize {
        let mut arena = std::mem::take(&mut self.arena);
        let mut sums = std::mem::take(&mut self.sums);
        let feature = |(at, rows)| {
            let table = TableId(at as u32);
            let number_count = ROWS as usize;
            FeatureStep { rows, table, step, number_first: at * number_count, number_count }
        };
        let features: Vec<_> = self.rows().into_iter().enumerate().map(feature).collect();
        let stepped = kernels.step_batch(&self.matrix, &features, &mut sums, &mut arena);
        let Some(count) = stepped else { panic!("the gradient of the bench is finite") };
        self.arena = arena;
        self.sums = sums;
        count
    }
}

fn ns_per_index(mut call: impl FnMut()) -> f64 {
    let clock = SystemClock::default();
    let best_us = (0..ROUNDS).map(|_| {
        let start_us = clock.now_us();
        call();
        clock.now_us() - start_us
    });
    best_us.min().unwrap_or(0) as f64 * 1e3 / (SAMPLES * FEATURES) as f64
}

fn main() {
    let mut batch = Batch::new();
    let step = Prepared::new(OptimizerKind::RowWiseAdagrad, &Hyper::default());
    let rows = batch.step(Kernels::detect(), &step);
    println!("ns per index; {} indices, {rows} rows", SAMPLES * FEATURES);
    for kernels in Isa::available().into_iter().filter_map(Kernels::with_isa) {
        println!(
            "{:<8} pool by feature {:6.2}  pool batch {:6.2}  step batch {:6.2}",
            kernels.isa().name(),
            ns_per_index(|| batch.pool_by_feature(kernels)),
            ns_per_index(|| batch.pool(kernels)),
            ns_per_index(|| {
                black_box(batch.step(kernels, &step));
            }),
        );
    }
}
