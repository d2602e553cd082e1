//! A whole batch at once against feature after feature, to the last bit, on every instruction set.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{all_kernels, assert_same_bits, draw, Numbers};
use proptest::prelude::*;
use tierbed_core::env::SplitMix64;
use tierbed_core::{OptimizerKind, TableId};
use tierbed_kernels::{
    BagRange, Columns, FeatureRows, FeatureStep, Hyper, Kernels, Occurrence, Places, Pooling,
    Prepared, RowSums, Rows, Upstream,
};

/// Rows of a table.
const ROWS: usize = 9;

/// Features over tables of [`ROWS`] rows in one arena, tables shared or not.
#[derive(Debug)]
struct Batch {
    tables: Vec<Table>,
    features: Vec<Feature>,
    arena: Vec<f32>,
    weights: Option<Vec<f32>>,
    offsets: Vec<i64>,
    numbers: Vec<u32>,
    slots: Option<Vec<u32>>,
    samples: usize,
    stride: usize,
}

#[derive(Debug)]
struct Table {
    dim: usize,
    words: usize,
    first: usize,
    step: Prepared,
}

#[derive(Debug)]
struct Feature {
    table: usize,
    pooling: Pooling,
    first: usize,
}

impl Batch {
    fn new(dims: &[usize], tables: &[usize], is_pooled: bool, seed: u64, numbers: Numbers) -> Self {
        let mut rng = SplitMix64::new(seed);
        let mut words_sum = 1;
        let kinds = OptimizerKind::ALL;
        let table = |(at, &dim): (usize, &usize)| {
            // Neighbours often share the optimizer, with rates of their own.
            let kind = kinds[(seed as usize + at / 2) % kinds.len()];
            let weight_decay = if at % 3 == 1 { 0.1 } else { 0.0 };
            let hyper = Hyper { lr: 0.1 * (at + 1) as f64, weight_decay, ..Hyper::default() };
            let words = dim + kind.state_words(dim) + 1;
            let first = words_sum;
            words_sum += ROWS * words;
            Table { dim, words, first, step: Prepared::new(kind, &hyper) }
        };
        let all: Vec<_> = dims.iter().enumerate().map(table).collect();
        let mut width = 0;
        let feature = |&table: &usize| {
            let table = table % all.len();
            let pooling = match (is_pooled, rng.below(2)) {
                (false, _) => Pooling::None,
                (true, 0) => Pooling::Sum,
                (true, _) => Pooling::Mean,
            };
            let first = if is_pooled { width } else { 0 };
            width = first + all[table].dim;
            Feature { table, pooling, first }
        };
        let features: Vec<_> = tables.iter().map(feature).collect();
        let samples = rng.below(40) as usize;
        let mut offsets = vec![0];
        let is_one_hot = rng.below(3) == 0;
        for _ in 0..features.len() * samples {
            let len = if is_one_hot { 1 } else { [1, 1, 1, 0, 4][rng.below(5) as usize] };
            offsets.push(offsets.last().unwrap() + len);
        }
        let index_count = *offsets.last().unwrap() as usize;
        let slots = (rng.below(2) == 0).then(|| (0..ROWS as u32).rev().collect());
        let weighted = rng.below(3) == 0;
        Self {
            arena: draw(numbers, seed ^ 1, words_sum),
            weights: weighted.then(|| draw(numbers, seed ^ 2, index_count)),
            numbers: (0..index_count).map(|_| rng.below(ROWS as u64) as u32).collect(),
            stride: if is_pooled { width } else { all[0].dim },
            tables: all,
            features,
            offsets,
            slots,
            samples,
        }
    }

    fn range(&self, at: usize) -> std::ops::Range<usize> {
        let offsets = self.offsets(at);
        offsets[0] as usize..*offsets.last().unwrap() as usize
    }

    fn offsets(&self, at: usize) -> &[i64] {
        &self.offsets[at * self.samples..][..=self.samples]
    }

    fn rows(&self) -> Vec<FeatureRows<'_>> {
        let rows = |(at, feature): (usize, &Feature)| {
            let Table { dim, words, first, .. } = self.tables[feature.table];
            FeatureRows {
                numbers: &self.numbers[self.range(at)],
                places: Places { first, words, slots: self.slots.as_deref() },
                offsets: self.offsets(at),
                weights: self.weights.as_ref().map(|weights| &weights[self.range(at)]),
                pooling: feature.pooling,
                columns: Columns { stride: self.stride, first: feature.first, dim },
            }
        };
        self.features.iter().enumerate().map(rows).collect()
    }

    fn steps<'a>(&'a self, rows: &[FeatureRows<'a>]) -> Vec<FeatureStep<'a>> {
        let step = |(rows, feature): (&FeatureRows<'a>, &Feature)| FeatureStep {
            rows: *rows,
            table: TableId(feature.table as u32),
            step: &self.tables[feature.table].step,
            number_first: feature.table * ROWS,
            number_count: ROWS,
        };
        rows.iter().zip(&self.features).map(step).collect()
    }

    fn matrix_len(&self) -> usize {
        let is_pooled = self.features.iter().any(|feature| feature.pooling != Pooling::None);
        self.stride * if is_pooled { self.samples } else { self.numbers.len() }
    }

    // Pools by the kernels that take one feature at a time.
    fn pool_by_feature(&self, kernels: Kernels) -> Vec<f32> {
        let mut out = vec![0.0; self.matrix_len()];
        for (at, rows) in self.rows().iter().enumerate() {
            let starts: Vec<_> = rows.numbers.iter().map(|&n| rows.places.start(n)).collect();
            if rows.pooling == Pooling::None {
                let range = self.range(at);
                let out = &mut out[range.start * self.stride..range.end * self.stride];
                kernels.gather_rows(&self.arena, &starts, self.stride, out);
                continue;
            }
            let bags = BagRange::whole(rows.offsets);
            let all = Rows { arena: &self.arena, starts: &starts, weights: rows.weights };
            kernels.pool_add(all, bags, rows.columns, &mut out);
            if rows.pooling == Pooling::Mean {
                kernels.mean_scale(rows.offsets, rows.columns, &mut out);
            }
        }
        out
    }

    // Steps one row after the other; returns the arena and how many there were.
    fn step_by_row(&self, kernels: Kernels, grad: &[f32]) -> (Vec<f32>, usize) {
        let (mut arena, mut count) = (self.arena.clone(), 0);
        for (table_at, table) in self.tables.iter().enumerate() {
            for number in 0..ROWS as u32 {
                let mut sum = vec![0.0; table.dim];
                let mut is_used = false;
                for (at, rows) in self.rows().iter().enumerate() {
                    if self.features[at].table != table_at {
                        continue;
                    }
                    let mut uses = Vec::new();
                    for (bag, bounds) in (0u32..).zip(rows.offsets.windows(2)) {
                        let indices = bounds[0] as u32..bounds[1] as u32;
                        let is_its = |&index: &u32| self.numbers[index as usize] == number;
                        uses.extend(indices.filter(is_its).map(|index| Occurrence { bag, index }));
                    }
                    is_used |= !uses.is_empty();
                    let upstream = Upstream {
                        grad,
                        columns: rows.columns,
                        pooling: rows.pooling,
                        offsets: rows.offsets,
                        weights: self.weights.as_deref(),
                    };
                    kernels.add_grads(&upstream, &uses, &mut sum);
                }
                if is_used {
                    let slots = self.slots.as_deref();
                    let places = Places { first: table.first, words: table.words, slots };
                    let record = &mut arena[places.start(number)..][..table.words];
                    kernels.apply(&table.step, record, &sum);
                    let uses = record.last_mut().unwrap();
                    *uses = f32::from_bits(uses.to_bits().saturating_add(1));
                    count += 1;
                }
            }
        }
        (arena, count)
    }
}

fn batches() -> impl Strategy<Value = Batch> {
    let dims = prop::collection::vec(prop_oneof![1usize..70, 128usize..131], 1..4);
    let tables = prop::collection::vec(0usize..4, 1..6);
    (dims, tables, any::<bool>(), any::<u64>(), common::numbers()).prop_map(
        |(mut dims, tables, is_pooled, seed, numbers)| {
            if !is_pooled {
                let dim = dims[0];
                dims.fill(dim);
            }
            Batch::new(&dims, &tables, is_pooled, seed, numbers)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn pooling_a_batch_equals_pooling_its_features(batch in batches()) {
        for kernels in all_kernels() {
            let expected = batch.pool_by_feature(kernels);
            // What was there before must not matter.
            let mut out = vec![f32::NAN; expected.len()];
            kernels.pool_batch(&batch.arena, &batch.rows(), &mut out);
            assert_same_bits(&out, &expected, kernels.isa().name());
        }
    }

    #[test]
    fn stepping_a_batch_equals_stepping_its_rows(batch in batches(), seed: u64) {
        let grad = draw(Numbers::Tame, seed, batch.matrix_len());
        for kernels in all_kernels() {
            let (expected, row_count) = batch.step_by_row(kernels, &grad);
            // Room for all sums, for some, for those of one table.
            for sum_bytes_max in [u64::MAX, seed % 4096, 0] {
                let mut sums = RowSums::new(sum_bytes_max);
                let rows = batch.rows();
                let features = batch.steps(&rows);
                let mut arena = batch.arena.clone();
                // Twice, so that work arrays of the first time are met by the second.
                for _ in 0..2 {
                    arena.copy_from_slice(&batch.arena);
                    let found = kernels.step_batch(&grad, &features, &mut sums, &mut arena);
                    prop_assert_eq!(found, Some(row_count));
                    assert_same_bits(&arena, &expected, kernels.isa().name());
                }
            }
        }
    }

    #[test]
    fn a_gradient_that_is_no_number_changes_nothing(batch in batches(), seed: u64) {
        let grad = draw(Numbers::Tame, seed, batch.matrix_len());
        prop_assume!(!grad.is_empty());
        let at = seed as usize % grad.len();
        let wrongs = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let mut wrong = grad.clone();
        wrong[at] = wrongs[seed as usize % wrongs.len()];
        for kernels in all_kernels() {
            let (expected, row_count) = batch.step_by_row(kernels, &grad);
            for sum_bytes_max in [u64::MAX, seed % 4096, 0] {
                let mut sums = RowSums::new(sum_bytes_max);
                let rows = batch.rows();
                let features = batch.steps(&rows);
                let mut arena = batch.arena.clone();
                let found = kernels.step_batch(&wrong, &features, &mut sums, &mut arena);
                prop_assert_eq!(found, None);
                assert_same_bits(&arena, &batch.arena, kernels.isa().name());
                // What was added before it was seen is forgotten.
                let found = kernels.step_batch(&grad, &features, &mut sums, &mut arena);
                prop_assert_eq!(found, Some(row_count));
                assert_same_bits(&arena, &expected, kernels.isa().name());
            }
        }
    }
}

#[test]
fn a_negative_zero_becomes_positive_as_it_does_when_added() {
    let arena = [-0.0, 5.0];
    let rows = FeatureRows {
        numbers: &[0],
        places: Places { first: 0, words: 2, slots: None },
        offsets: &[0, 1, 1],
        weights: None,
        pooling: Pooling::Sum,
        columns: Columns::whole(1),
    };
    for kernels in all_kernels() {
        let mut out = [7.0; 2];
        kernels.pool_batch(&arena, &[rows], &mut out);
        assert_eq!(out.map(f32::to_bits), [0, 0]);
        let mut out = [7.0];
        let rows = FeatureRows { pooling: Pooling::None, ..rows };
        kernels.pool_batch(&arena, &[rows], &mut out);
        assert_eq!(out[0].to_bits(), (-0.0f32).to_bits());
    }
}
