//! One optimizer step for the rows of a batch, each row once, in place.
//!
//! First the gradients of all rows are summed ([`super::sums`]), and are seen to be numbers. Then,
//! table after table, rows are stepped in the order of their first use, fetched ahead.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use tierbed_core::TableId;

use super::add::Added;
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
    /// rows were stepped; `None` when a gradient is nan or inf: no record was changed then.
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
    ) -> Option<usize> {
        let Some(batch_size) = features.first().map(|feature| feature.rows.bag_count()) else {
            return Some(0);
        };
        for FeatureStep { rows, .. } in features {
            rows.check();
            assert_eq!(rows.bag_count(), batch_size, "features must have one bag per sample");
            assert!(rows.columns.dim < rows.places.words, "a record ends with its use count");
        }
        let numbers_end = |one: &FeatureStep<'_>| one.number_first + one.number_count;
        sums.know(features.iter().map(numbers_end).max().unwrap_or(0));
        // Gradients of empty bags are added to no row.
        let adds_all = features.iter().all(|feature| feature.rows.is_one_hot());
        if !adds_all && !self.are_finite(grad) {
            return None;
        }
        let all: Vec<_> = features.iter().collect();
        if sums.may_have_room() {
            match self.sum(grad, &all, sums) {
                Added::Numbers => return Some(self.step_tables(&all, sums, arena)),
                Added::NotFinite => {
                    sums.clear(&all);
                    return None;
                }
                Added::NoRoom => sums.clear(&all),
            }
        }
        if adds_all && !self.are_finite(grad) {
            return None;
        }
        let mut row_count = 0;
        let mut vector_count = 0;
        for table in distinct(features.iter().map(|feature| feature.table)) {
            let of_table: Vec<_> = features.iter().filter(|one| one.table == table).collect();
            let added = self.sum(grad, &of_table, sums);
            assert_eq!(added, Added::Numbers, "there is room for the sums of each table");
            vector_count += sums.vector_count();
            row_count += self.step_tables(&of_table, sums, arena);
        }
        sums.note_vectors(vector_count);
        Some(row_count)
    }

    fn sum(self, grad: &[f32], features: &[&FeatureStep<'_>], sums: &mut RowSums) -> Added {
        sums.begin(features);
        let mut all = Added::Numbers;
        for dim in distinct(features.iter().map(|feature| feature.rows.columns.dim)) {
            let is_of_dim = |one: &&&FeatureStep<'_>| one.rows.columns.dim == dim;
            let of_dim: Vec<_> = features.iter().filter(is_of_dim).copied().collect();
            match self.add_features(grad, &of_dim, sums) {
                Added::Numbers => {}
                Added::NotFinite => all = Added::NotFinite,
                Added::NoRoom => return Added::NoRoom,
            }
        }
        all
    }

    // Returns how many rows were stepped.
    fn step_tables(
        self,
        features: &[&FeatureStep<'_>],
        sums: &mut RowSums,
        arena: &mut [f32],
    ) -> usize {
        for table in distinct(features.iter().map(|feature| feature.table)) {
            if let Some(first) = features.iter().find(|feature| feature.table == table) {
                self.step_table(first, sums, arena);
            }
        }
        sums.end()
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
        let rows = sums.rows(feature.table);
        for at in rows.clone() {
            if at + ROWS_AHEAD < rows.end {
                let soon = sums.used(at + ROWS_AHEAD);
                prefetch(arena, places.start(soon.number), places.words);
                sums.prefetch(soon, columns.dim);
            }
            let row = sums.used(at);
            let record = &mut arena[places.start(row.number)..][..places.words];
            let (weights, rest) = record.split_at_mut(columns.dim);
            let [state @ .., use_count] = rest else { continue };
            *use_count = f32::from_bits(use_count.to_bits().saturating_add(1));
            let sum = sums.sum(row, columns.dim);
            let row_mut = RowMut { weights, state };
            self.optimizer.update::<L, D>(row_mut, &sum[..columns.dim], self.decay);
            // While it is near.
            sum.fill(0.0);
            sums.forget(feature.number_first + row.number as usize);
        }
    }
}
