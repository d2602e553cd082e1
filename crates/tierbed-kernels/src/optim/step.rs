//! Here are the gradients of a batch, step each of its rows once, in place.
//!
//! Some tables at a time: the gradients of their rows are summed ([`super::sums`]), then the rows
//! are stepped in the order of their first use, fetched ahead.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use tierbed_core::TableId;

use super::sums::{Region, RowSums};
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
        let is_shared = |one: &FeatureStep<'_>| {
            features.iter().filter(|other| other.table == one.table).count() > 1
        };
        let (shared, alone): (Vec<_>, Vec<_>) = features.iter().copied().partition(is_shared);
        let mut row_count = 0;
        for table in distinct(shared.iter().map(|feature| feature.table)) {
            let of_table = shared.iter().copied().filter(|feature| feature.table == table);
            row_count += self.step_shared(grad, &of_table.collect::<Vec<_>>(), sums, arena);
        }
        for dim in distinct(alone.iter().map(|feature| feature.rows.columns.dim)) {
            let of_dim = alone.iter().copied().filter(|one| one.rows.columns.dim == dim);
            row_count += self.step_alone(grad, &of_dim.collect::<Vec<_>>(), sums, arena);
        }
        row_count
    }

    // Features of one table, one after the other: so are their gradients added.
    fn step_shared(
        self,
        grad: &[f32],
        features: &[FeatureStep<'_>],
        sums: &mut RowSums,
        arena: &mut [f32],
    ) -> usize {
        let Some(first) = features.first() else { return 0 };
        let index_count = features.iter().map(|feature| feature.rows.numbers.len()).sum::<usize>();
        let rows_max = index_count.min(first.number_count);
        let mut regions = sums.make_room(first.rows.columns.dim, std::iter::once(rows_max));
        for feature in features {
            self.add_features(grad, &[*feature], &mut regions, sums);
        }
        self.step_tables(&features[..1], &regions, sums, arena)
    }

    // Features of one dim, each of a table of its own: as many at once as there is room for.
    fn step_alone(
        self,
        grad: &[f32],
        mut features: &[FeatureStep<'_>],
        sums: &mut RowSums,
        arena: &mut [f32],
    ) -> usize {
        let mut row_count = 0;
        while let Some(first) = features.first() {
            let rows_max = |one: &FeatureStep<'_>| one.rows.numbers.len().min(one.number_count);
            let mut regions = sums.make_room(first.rows.columns.dim, features.iter().map(rows_max));
            let (now, later) = features.split_at(regions.len());
            self.add_features(grad, now, &mut regions, sums);
            row_count += self.step_tables(now, &regions, sums, arena);
            features = later;
        }
        row_count
    }

    // Steps the rows of tables, each by one of its features: all of them have rows in one place.
    fn step_tables(
        self,
        features: &[FeatureStep<'_>],
        regions: &[Region],
        sums: &mut RowSums,
        arena: &mut [f32],
    ) -> usize {
        let mut row_count = 0;
        for (feature, region) in features.iter().zip(regions) {
            let numbers = sums.rows(region);
            row_count += numbers.len();
            let sums_of = Sums { numbers, words: sums.sums(region), stride: region.stride() };
            self.step_table(feature, sums_of, arena);
            sums.forget(region, feature.number_first);
        }
        row_count
    }

    fn step_table(self, feature: &FeatureStep<'_>, sums: Sums<'_>, arena: &mut [f32]) {
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

/// The sums of a table's rows, each padded to `stride` words.
struct Sums<'a> {
    numbers: &'a [u32],
    words: &'a [f32],
    stride: usize,
}

/// The rows of a table, with their sums.
struct Table<'a> {
    feature: &'a FeatureStep<'a>,
    sums: Sums<'a>,
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
        let Table { feature, sums: Sums { numbers, words, stride }, arena } = self.table;
        let FeatureRows { places, columns, .. } = feature.rows;
        for (at, (&number, sum)) in numbers.iter().zip(words.chunks_exact(stride)).enumerate() {
            if let Some(&soon) = numbers.get(at + ROWS_AHEAD) {
                prefetch(arena, places.start(soon), places.words);
            }
            let record = &mut arena[places.start(number)..][..places.words];
            let (weights, rest) = record.split_at_mut(columns.dim);
            let [state @ .., use_count] = rest else { continue };
            *use_count = f32::from_bits(use_count.to_bits().saturating_add(1));
            let row = RowMut { weights, state };
            self.optimizer.update::<L, D>(row, &sum[..columns.dim], self.decay);
        }
    }
}
