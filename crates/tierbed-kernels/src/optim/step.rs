//! One optimizer step for the rows of a batch, each row once, in place.
//!
//! Table after table: the gradients of its rows are summed ([`super::sums`]), then its rows are
//! stepped in the order of their first use, fetched ahead.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use tierbed_core::TableId;

use super::sums::RowSums;
use super::{AnyUpdate, Decay, NoDecay, Optimizer, Prepared, RowMut, L2};
use crate::batch::FeatureRows;
use crate::pool_batch::distinct;
use crate::simd::{prefetch, Job, Lanes};
use crate::Kernels;

/// How many rows ahead the processor is asked to fetch.
const ROWS_AHEAD: usize = 8;

/// One feature of a batch and the step of its table.
#[derive(Debug, Clone, Copy)]
pub struct FeatureStep<'a> {
    /// The rows, and where the gradients of their vectors lie.
    pub rows: FeatureRows<'a>,
    /// The table; features of one table are summed one after the other.
    pub table: TableId,
    /// The step of the table, the same for all its features.
    pub step: &'a Prepared,
    /// What is added to the table's row numbers so that they differ from those of other tables.
    pub number_first: usize,
    /// Row numbers of the table are below this.
    pub number_count: usize,
}

impl Kernels {
    /// Sums the gradients of each row over all its uses and applies one step to its record, in
    /// place: weights, state, and one more use in the last word of the record. Returns how many
    /// rows were stepped.
    ///
    /// `grad` is `[B, stride]`, or `[E, stride]` for features without pooling.
    ///
    /// # Panics
    /// When parts of a feature do not belong together, features differ in their number of bags,
    /// or a row, number or vector lies outside what there is.
    pub fn step_batch(
        self,
        grad: &[f32],
        features: &[FeatureStep<'_>],
        sums: &mut RowSums,
        arena: &mut [f32],
    ) -> usize {
        let Some(batch_size) = features.first().map(|feature| feature.rows.bag_count()) else {
            return 0;
        };
        for FeatureStep { rows, .. } in features {
            rows.check();
            assert_eq!(rows.bag_count(), batch_size, "features must have one bag per sample");
            assert!(rows.columns.dim < rows.places.words, "a record ends with its use count");
        }
        let numbers_end = |one: &FeatureStep<'_>| one.number_first + one.number_count;
        sums.know(features.iter().map(numbers_end).max().unwrap_or(0));
        let mut row_count = 0;
        for table in distinct(features.iter().map(|feature| feature.table)) {
            let of_table = || features.iter().filter(|feature| feature.table == table);
            let index_count = of_table().map(|feature| feature.rows.numbers.len()).sum();
            let Some(first) = of_table().next() else { continue };
            sums.begin(first.rows.columns.dim, index_count, first.number_count);
            for feature in of_table() {
                self.add_feature(grad, feature, sums);
            }
            row_count += sums.rows().len();
            self.step_table(first, sums, arena);
        }
        row_count
    }

    // `feature` is any feature of the table: its rows lie where those of the others lie.
    fn step_table(self, feature: &FeatureStep<'_>, sums: &mut RowSums, arena: &mut [f32]) {
        let table = Table { feature, sums, arena };
        match feature.step.update {
            AnyUpdate::Sgd(optimizer) => self.step_with(optimizer, table),
            AnyUpdate::Adagrad(optimizer) => self.step_with(optimizer, table),
            AnyUpdate::RowWiseAdagrad(optimizer) => self.step_with(optimizer, table),
            AnyUpdate::Adam(optimizer) => self.step_with(optimizer, table),
            AnyUpdate::PartialRowWiseAdam(optimizer) => self.step_with(optimizer, table),
        }
    }

    #[inline(always)]
    fn step_with<O: Optimizer>(self, optimizer: O, table: Table<'_>) {
        let weight_decay = table.feature.step.weight_decay;
        if weight_decay == 0.0 {
            self.run(StepTable { optimizer, decay: NoDecay, table });
        } else {
            self.run(StepTable { optimizer, decay: L2(weight_decay), table });
        }
    }
}

/// The rows of a table, with their sums.
struct Table<'a> {
    feature: &'a FeatureStep<'a>,
    sums: &'a mut RowSums,
    arena: &'a mut [f32],
}

struct StepTable<'a, O, D> {
    optimizer: O,
    decay: D,
    table: Table<'a>,
}

impl<O: Optimizer, D: Decay> Job for StepTable<'_, O, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Table { feature, sums, arena } = self.table;
        let FeatureRows { places, columns, .. } = feature.rows;
        for at in 0..sums.rows().len() {
            if let Some(&soon) = sums.rows().get(at + ROWS_AHEAD) {
                prefetch(arena, places.start(soon), places.words);
            }
            let number = sums.rows()[at];
            let record = &mut arena[places.start(number)..][..places.words];
            let (weights, rest) = record.split_at_mut(columns.dim);
            let [state @ .., use_count] = rest else { continue };
            *use_count = f32::from_bits(use_count.to_bits().saturating_add(1));
            let sum = &sums.sum(at)[..columns.dim];
            self.optimizer.update::<L, D>(RowMut { weights, state }, sum, self.decay);
        }
        sums.forget(feature.number_first);
    }
}
