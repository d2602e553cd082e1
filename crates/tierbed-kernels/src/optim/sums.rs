//! Gradient sums per row of a batch whose rows are given by number.
//!
//! Gradients are passed in the order of the samples, and each is added to the sum of its row.
//! Rows get their sums in the order of their first use, so all sums of a batch lie together, in a
//! nearer cache than the rows; and whether a row is new costs no branch, since sums that are not in
//! use are +0. Additions happen as in `Kernels::sum_grads_grouped`: onto +0, in index order,
//! features of one table after each other.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per use, by slicing")]

use std::ops::Range;

use tierbed_core::TableId;

use super::FeatureStep;
use crate::pool_batch::distinct;
use crate::simd::{prefetch, LANES, LINE_BYTES};

/// Work arrays of [`Kernels::step_batch`](crate::Kernels::step_batch), kept from batch to batch.
#[derive(Debug, Default)]
pub struct RowSums {
    /// Of each row of all tables: 0, or 1 + the vector that its sum begins with; all 0 between
    /// batches.
    places: Vec<u32>,
    /// Rows that have sums, table by table, each in the order of their first use.
    used: Vec<Used>,
    tables: Vec<TableSums>,
    /// Sums, each padded to whole vectors; all +0 between batches.
    words: Vec<f32>,
    /// Where the first sum begins: on the border of a cache line.
    first: usize,
    /// Vectors of sums in use, those of the last batch that were too many, and how many may be.
    vector_count: usize,
    last_count: usize,
    vector_max: usize,
}

/// A row that has a sum.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Used {
    pub(super) number: u32,
    /// The vector that its sum begins with.
    vector: u32,
}

/// The rows of a table among those that have sums.
#[derive(Debug, Clone, Copy)]
pub(super) struct TableSums {
    table: TableId,
    first: usize,
    count: usize,
}

/// What batches can need of [`RowSums`].
#[derive(Debug, Clone, Copy)]
pub struct SumsNeed {
    /// Most indices of a batch.
    pub index_count: u64,
    /// Most weights of a row.
    pub dim: usize,
    /// Rows of all tables are numbered below this.
    pub number_count: u64,
    /// Most rows of one table.
    pub table_rows: u64,
    /// Tables.
    pub table_count: u64,
    /// As for [`RowSums::new`].
    pub sum_bytes_max: u64,
}

impl RowSums {
    /// Keeps at most `sum_bytes_max` of sums, but as many as one table needs. A batch with more is
    /// stepped table by table, and its gradient is passed twice.
    #[must_use]
    pub fn new(sum_bytes_max: u64) -> Self {
        let vector_max = sum_bytes_max / VECTOR_BYTES;
        Self { vector_max: usize::try_from(vector_max).unwrap_or(usize::MAX), ..Self::default() }
    }

    /// Returns the most bytes that batches can take which `need` describes.
    #[must_use]
    pub fn memory_bytes(need: SumsNeed) -> u64 {
        let SumsNeed { index_count, dim, number_count, table_rows, sum_bytes_max, .. } = need;
        let row_bytes = 4 * dim.next_multiple_of(LANES) as u64;
        let of_table = row_bytes * index_count.min(table_rows);
        let of_all = row_bytes * index_count.min(number_count);
        let sum_bytes = of_all.min(sum_bytes_max.max(of_table));
        // One more row of each table, where the number of a row that is not new is put.
        let used = index_count.min(number_count) + need.table_count;
        4 * number_count + size_of::<Used>() as u64 * used + sum_bytes + LINE_BYTES as u64
    }

    /// Knows rows numbered below `number_count` from now on.
    pub(super) fn know(&mut self, number_count: usize) {
        renew(&mut self.places, number_count);
    }

    /// Makes room for the rows of the tables of `features`.
    pub(super) fn begin(&mut self, features: &[&FeatureStep<'_>]) {
        assert_eq!(self.vector_count, 0, "sums of another batch are in use");
        self.tables.clear();
        let (mut used_count, mut vector_count) = (0, 0);
        let mut table_max = 0;
        for table in distinct(features.iter().map(|one| one.table)) {
            let of_table = features.iter().filter(|one| one.table == table);
            let index_count: usize = of_table.clone().map(|one| one.rows.numbers.len()).sum();
            let Some(feature) = of_table.clone().next() else { continue };
            let row_max = index_count.min(feature.number_count);
            self.tables.push(TableSums { table, first: used_count, count: 0 });
            used_count += row_max + 1;
            let of_table = row_max * vectors_of(feature);
            vector_count += of_table;
            table_max = of_table.max(table_max);
        }
        let vector_count = vector_count.min(self.vector_max.max(table_max));
        renew(&mut self.used, used_count);
        renew(&mut self.words, vector_count * LANES + LANES);
        // A vector that lies in two lines costs twice.
        self.first = self.words.as_ptr().align_offset(LINE_BYTES).min(LANES);
    }

    /// Returns the rows of `table` that have sums, in the order of their first use.
    pub(super) fn rows(&self, table: TableId) -> Range<usize> {
        let found = self.tables.iter().find(|one| one.table == table);
        found.map_or(0..0, |one| one.first..one.first + one.count)
    }

    /// Returns row `at` of [`Self::rows`].
    #[inline(always)]
    pub(super) fn used(&self, at: usize) -> Used {
        self.used[at]
    }

    /// Returns the sum of a row of `dim` weights, padded with zeros.
    #[inline(always)]
    pub(super) fn sum(&mut self, row: Used, dim: usize) -> &mut [f32] {
        let len = dim.next_multiple_of(LANES);
        &mut self.words[self.first + row.vector as usize * LANES..][..len]
    }

    /// Asks the processor to bring the sum of a row of `dim` weights near.
    #[inline(always)]
    pub(super) fn prefetch(&self, row: Used, dim: usize) {
        prefetch(&self.words, self.first + row.vector as usize * LANES, dim);
    }

    /// Forgets that row `number` has a sum, which is +0 again.
    #[inline(always)]
    pub(super) fn forget(&mut self, number: usize) {
        self.places[number] = 0;
    }

    /// Tells whether a batch like the last one that was too large may have room. An eighth is to
    /// spare: a block wants room for its rows before it is known which of them have sums already.
    pub(super) fn may_have_room(&self) -> bool {
        self.last_count + self.last_count / 8 <= self.vector_max
    }

    /// Takes note of how many vectors the sums of a batch take.
    pub(super) fn note_vectors(&mut self, count: usize) {
        self.last_count = count;
    }

    /// Returns the vectors of sums in use.
    pub(super) fn vector_count(&self) -> usize {
        self.vector_count
    }

    /// Ends a batch whose rows are all forgotten. Returns how many there were.
    pub(super) fn end(&mut self) -> usize {
        self.vector_count = 0;
        self.tables.drain(..).map(|table| table.count).sum()
    }

    /// Forgets all rows and clears their sums.
    pub(super) fn clear(&mut self, features: &[&FeatureStep<'_>]) {
        for feature in features {
            for at in self.rows(feature.table) {
                self.places[feature.number_first + self.used[at].number as usize] = 0;
            }
        }
        self.words[self.first..][..self.vector_count * LANES].fill(0.0);
        self.end();
    }

    /// Returns where the table of `feature` stands in the order of tables.
    pub(super) fn table_at(&self, feature: &FeatureStep<'_>) -> usize {
        let at = self.tables.iter().position(|one| one.table == feature.table);
        at.unwrap_or_else(|| panic!("{:?} is no table of the batch", feature.table))
    }

    /// Opens the sums of a feature for `index_count` indices, if there is room for as many rows.
    #[inline(always)]
    pub(super) fn open(
        &mut self,
        feature: &FeatureStep<'_>,
        table_at: usize,
        index_count: usize,
    ) -> Option<OpenSums<'_>> {
        let TableSums { first, count, .. } = &mut self.tables[table_at];
        let words = &mut self.words[self.first..];
        let vectors = vectors_of(feature);
        let row_max = index_count.min(feature.number_count - *count);
        if (self.vector_count + row_max * vectors) * LANES > words.len() {
            return None;
        }
        Some(OpenSums {
            places: &mut self.places[feature.number_first..],
            used: &mut self.used[*first..],
            words,
            vectors,
            row_count: *count,
            vector_count: self.vector_count,
            ends: (count, &mut self.vector_count),
        })
    }
}

// Makes `values` exactly `len` long, if they are fewer: that much was reserved. They are 0, so that
// memory is touched only where it is used.
fn renew<T: Copy + Default>(values: &mut Vec<T>, len: usize) {
    if values.len() < len {
        // Both are never there at once.
        *values = Vec::new();
        *values = vec![T::default(); len];
    }
}

const VECTOR_BYTES: u64 = 4 * LANES as u64;

/// Returns the vectors of a sum.
#[inline(always)]
fn vectors_of(feature: &FeatureStep<'_>) -> usize {
    feature.rows.columns.dim.div_ceil(LANES)
}

/// The sums of the rows of one feature, as long as some of its gradients are added.
pub(super) struct OpenSums<'a> {
    places: &'a mut [u32],
    used: &'a mut [Used],
    words: &'a mut [f32],
    vectors: usize,
    row_count: usize,
    vector_count: usize,
    /// Where both counts are kept.
    ends: (&'a mut usize, &'a mut usize),
}

impl OpenSums<'_> {
    /// Asks the processor to bring what is known of row `number` near.
    #[inline(always)]
    pub(super) fn prefetch(&self, number: u32) {
        prefetch(self.places, number as usize, 1);
    }

    /// Returns the vector that the sum of row `number` begins with; it is +0 if the row is new.
    #[inline(always)]
    pub(super) fn find(&mut self, number: u32) -> u32 {
        let place = &mut self.places[number as usize];
        self.used[self.row_count] = Used { number, vector: self.vector_count as u32 };
        // Arithmetic, since a branch would often be guessed wrong.
        let is_new = u32::from(*place == 0);
        *place += is_new * (self.vector_count as u32 + 1);
        self.row_count += is_new as usize;
        self.vector_count += is_new as usize * self.vectors;
        *place - 1
    }

    /// Returns the sum that begins with `vector`.
    #[inline(always)]
    pub(super) fn sum(&mut self, vector: u32) -> &mut [f32] {
        &mut self.words[vector as usize * LANES..][..self.vectors * LANES]
    }

    /// Asks the processor to bring the sum that begins with `vector` near.
    #[inline(always)]
    pub(super) fn prefetch_sum(&self, vector: u32) {
        prefetch(self.words, vector as usize * LANES, self.vectors * LANES);
    }

    /// Keeps what was added.
    #[inline(always)]
    pub(super) fn close(self) {
        *self.ends.0 = self.row_count;
        *self.ends.1 = self.vector_count;
    }
}
