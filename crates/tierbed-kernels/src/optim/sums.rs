//! Gradient sums per row of a table whose rows are given by number.
//!
//! Gradients are passed in the order of the samples, and each is added to the sum of its row.
//! Rows get their sums in the order of their first use, so all sums of a table's rows in a batch
//! lie together, in a nearer cache than the rows; and whether a row is new costs no branch, since
//! sums that are not in use are +0. Additions happen as in `Kernels::sum_grads_grouped`: onto +0,
//! in index order, features of one table after each other.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per use, by slicing")]

use super::FeatureStep;
use crate::accumulate::{by_shape, Shaped};
use crate::batch::{FeatureRows, INDICES_AHEAD};
use crate::layout::Pooling;
use crate::simd::{prefetch, Job, Lanes, LANES, LINE_BYTES};
use crate::Kernels;

/// How many samples ahead the processor is asked to fetch gradients.
const BAGS_AHEAD: usize = 16;

/// Work arrays of [`Kernels::step_batch`], kept from batch to batch.
#[derive(Debug, Default)]
pub struct RowSums {
    /// Of each row of all tables: 0, or 1 + its place in `rows`; all 0 between tables.
    places: Vec<u32>,
    /// Rows of the table under work, in the order of their first use.
    rows: Vec<u32>,
    row_count: usize,
    /// Sums of `rows`, each padded to whole vectors; all +0 between tables.
    words: Vec<f32>,
    /// Where the first sum begins: on the border of a cache line.
    first: usize,
    stride: usize,
}

impl RowSums {
    /// Returns the most bytes that batches can take which have at most `index_count` indices of
    /// one table, with rows of at most `dim` weights numbered below `number_count`, of which at
    /// most `row_count` are of one table.
    #[must_use]
    pub fn memory_bytes(index_count: u64, dim: usize, number_count: u64, row_count: u64) -> u64 {
        let sum_bytes = 4 * dim.next_multiple_of(LANES) as u64;
        let sum_count = 1 + index_count.min(row_count);
        4 * number_count + sum_count * (4 + sum_bytes) + LINE_BYTES as u64
    }

    // Makes room for the rows of a table that is used by `index_count` indices and has no more
    // than `row_max` rows.
    pub(super) fn begin(&mut self, dim: usize, index_count: usize, row_max: usize) {
        self.stride = dim.next_multiple_of(LANES);
        // One more, where the number of a row that is not new is put.
        let sum_count = 1 + index_count.min(row_max);
        grow(&mut self.rows, sum_count);
        grow(&mut self.words, sum_count * self.stride + LANES);
        // A vector that lies in two lines costs twice.
        self.first = self.words.as_ptr().align_offset(LINE_BYTES).min(LANES);
    }

    /// Knows rows numbered below `number_count` from now on.
    pub(super) fn know(&mut self, number_count: usize) {
        grow(&mut self.places, number_count);
    }

    /// Returns the rows of the table in the order of their first use.
    pub(super) fn rows(&self) -> &[u32] {
        &self.rows[..self.row_count]
    }

    /// Returns the sum of row `at` of [`Self::rows`].
    #[inline(always)]
    pub(super) fn sum(&self, at: usize) -> &[f32] {
        &self.words[self.first + at * self.stride..][..self.stride]
    }

    /// Forgets the rows of a table whose numbers begin at `number_first`, and clears their sums.
    pub(super) fn forget(&mut self, number_first: usize) {
        let places = &mut self.places[number_first..];
        for &row in &self.rows[..self.row_count] {
            places[row as usize] = 0;
        }
        self.words[self.first..][..self.row_count * self.stride].fill(0.0);
        self.row_count = 0;
    }
}

// Exactly as long as needed: that much was reserved.
fn grow<T: Copy + Default>(values: &mut Vec<T>, len: usize) {
    if values.len() < len {
        values.reserve_exact(len - values.len());
        values.resize(len, T::default());
    }
}

impl Kernels {
    /// Adds the gradients of one feature to the sums of its rows.
    pub(super) fn add_feature(self, grad: &[f32], feature: &FeatureStep<'_>, sums: &mut RowSums) {
        let is_plain = feature.rows.pooling == Pooling::Sum && feature.rows.weights.is_none();
        if is_plain {
            self.run(AddFeature::<false> { grad, feature, sums });
        } else {
            self.run(AddFeature::<true> { grad, feature, sums });
        }
    }
}

/// With `SCALED`, gradients have weights or counts, or belong to indices.
struct AddFeature<'a, const SCALED: bool> {
    grad: &'a [f32],
    feature: &'a FeatureStep<'a>,
    sums: &'a mut RowSums,
}

impl<const SCALED: bool> Job for AddFeature<'_, SCALED> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.feature.rows.columns.dim;
        by_shape::<L, _>(self, dim);
    }
}

impl<const SCALED: bool> Shaped for AddFeature<'_, SCALED> {
    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        let Self { grad, feature, sums } = self;
        // Copied, so that nothing written below can change it.
        let FeatureStep { rows, number_first, .. } = *feature;
        let mut adder = Adder {
            places: &mut sums.places[number_first..],
            known: &mut sums.rows,
            row_count: sums.row_count,
            words: &mut sums.words[sums.first..],
            dim: rows.columns.dim,
        };
        if SCALED || !rows.is_one_hot() {
            adder.add_bags::<L, REST, TAIL, SCALED>(&rows, grad);
        } else {
            adder.add_one_hot::<L, REST, TAIL>(&rows, grad);
        }
        sums.row_count = adder.row_count;
    }
}

/// The arrays of [`RowSums`], as long as one feature is added.
struct Adder<'a> {
    places: &'a mut [u32],
    known: &'a mut [u32],
    row_count: usize,
    words: &'a mut [f32],
    dim: usize,
}

impl Adder<'_> {
    /// Adds the gradients of bags of one index each.
    #[inline(always)]
    fn add_one_hot<L: Lanes, const REST: usize, const TAIL: bool>(
        &mut self,
        rows: &FeatureRows<'_>,
        grad: &[f32],
    ) {
        let FeatureRows { numbers, columns, .. } = *rows;
        let soon = numbers.iter().skip(INDICES_AHEAD).chain(std::iter::repeat(&0));
        let mut start = columns.first;
        for (&number, &soon) in numbers.iter().zip(soon) {
            prefetch(grad, start + BAGS_AHEAD * columns.stride, columns.dim);
            prefetch(self.places, soon as usize, 1);
            let vector = &grad[start..][..columns.dim];
            add::<L, REST, TAIL, false>(self.sum_of(number), vector, OneScale::ONE);
            start += columns.stride;
        }
    }

    #[inline(always)]
    fn add_bags<L: Lanes, const REST: usize, const TAIL: bool, const SCALED: bool>(
        &mut self,
        rows: &FeatureRows<'_>,
        grad: &[f32],
    ) {
        let FeatureRows { numbers, columns, .. } = *rows;
        for bag in 0..rows.bag_count() {
            prefetch(grad, columns.start(bag + BAGS_AHEAD), columns.dim);
            let indices = rows.indices(bag);
            let scale = Scale::of(rows, indices.len());
            for index in indices {
                if let Some(&soon) = numbers.get(index + INDICES_AHEAD) {
                    prefetch(self.places, soon as usize, 1);
                }
                let vector = if SCALED { rows.vector(bag, index) } else { bag };
                let vector = &grad[columns.range(vector)];
                let sum = self.sum_of(numbers[index]);
                add::<L, REST, TAIL, SCALED>(sum, vector, scale.at(index));
            }
        }
    }

    /// Returns the sum of row `number`, +0 if the row is new.
    #[inline(always)]
    fn sum_of(&mut self, number: u32) -> &mut [f32] {
        let place = &mut self.places[number as usize];
        self.known[self.row_count] = number;
        // Arithmetic, since a branch would often be guessed wrong.
        let is_new = u32::from(*place == 0);
        self.row_count += is_new as usize;
        *place += is_new * self.row_count as u32;
        let stride = self.dim.next_multiple_of(LANES);
        &mut self.words[(*place as usize - 1) * stride..][..stride]
    }
}

/// What is done to the gradients of one bag before they are added.
#[derive(Clone, Copy)]
struct Scale<'a> {
    weights: Option<&'a [f32]>,
    count: Option<f32>,
}

/// Weight of an index and count of its bag, where they apply.
#[derive(Clone, Copy)]
struct OneScale {
    weight: Option<f32>,
    count: Option<f32>,
}

impl OneScale {
    /// Leaves a gradient as it is.
    const ONE: Self = Self { weight: None, count: None };
}

impl<'a> Scale<'a> {
    #[inline(always)]
    fn of(rows: &FeatureRows<'a>, count: usize) -> Self {
        let is_pooled = rows.pooling != Pooling::None;
        Self {
            weights: rows.weights.filter(|_| is_pooled),
            count: (rows.pooling == Pooling::Mean).then_some(count as f32),
        }
    }

    #[inline(always)]
    fn at(self, index: usize) -> OneScale {
        OneScale { weight: self.weights.map(|weights| weights[index]), count: self.count }
    }
}

/// Adds the scaled gradient to `sum`.
#[inline(always)]
fn add<L: Lanes, const REST: usize, const TAIL: bool, const SCALED: bool>(
    sum: &mut [f32],
    grad: &[f32],
    scale: OneScale,
) {
    let (sums, _) = sum.as_chunks_mut::<LANES>();
    let (full, part) = grad.as_chunks::<LANES>();
    let (blocks, rest) = sums.split_at_mut(full.len() - REST);
    let (blocks_grad, rest_grad) = full.split_at(full.len() - REST);
    for (sum, grad) in blocks.iter_mut().zip(blocks_grad) {
        add_lanes::<L, SCALED>(sum, L::load(grad), scale);
    }
    let (rest, last) = rest.split_at_mut(REST);
    for (sum, grad) in rest.iter_mut().zip(&rest_grad[..REST]) {
        add_lanes::<L, SCALED>(sum, L::load(grad), scale);
    }
    if let (true, Some(sum)) = (TAIL, last.first_mut()) {
        add_lanes::<L, SCALED>(sum, L::load_part(part), scale);
    }
}

// No closures: one that is not inlined has no vector instructions.
#[inline(always)]
fn add_lanes<L: Lanes, const SCALED: bool>(sum: &mut [f32; LANES], mut grad: L, scale: OneScale) {
    if let (true, Some(weight)) = (SCALED, scale.weight) {
        grad = L::splat(weight).mul(grad);
    }
    if let (true, Some(count)) = (SCALED, scale.count) {
        grad = grad.div(L::splat(count));
    }
    L::load(sum).add(grad).store(sum);
}
