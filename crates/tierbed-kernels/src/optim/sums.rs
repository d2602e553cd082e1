//! What is the sum of the gradients of each row, when rows are known by number?
//!
//! Gradients are passed in the order of the samples, in blocks, and each is added to the sum of its
//! row. A table's rows get their sums in the order of their first use, so the sums of a batch lie
//! together, in a nearer cache than the rows; and whether a row is new costs no branch, since sums
//! that are not in use are +0. As many tables are worked on at once as have their sums in that
//! cache: features of one sample lie on one page. Additions happen as in
//! `Kernels::sum_grads_grouped`: onto +0, in index order, features of one table after each other.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per use, by slicing")]

use std::ops::Range;

use super::FeatureStep;
use crate::accumulate::{by_shape, Shaped};
use crate::batch::{blocks, FeatureRows, BLOCK_BAGS, INDICES_AHEAD};
use crate::layout::Pooling;
use crate::simd::{prefetch, Job, Lanes, LANES, LINE_BYTES};
use crate::Kernels;

/// Sums of tables worked on at once: no more than this unless one table has more. Most of it is
/// room for rows that are used more than once.
const SUM_BYTES: usize = 2 << 20;

/// Work arrays of [`Kernels::step_batch`], kept from batch to batch.
#[derive(Debug, Default)]
pub struct RowSums {
    /// Of each row of all tables: 0, or 1 + its place among the rows of its table; all 0 between
    /// batches.
    places: Vec<u32>,
    /// Rows of the tables under work, in the order of their first use.
    rows: Vec<u32>,
    /// Their sums, each padded to whole vectors; all +0 between batches.
    words: Vec<f32>,
    /// Where the first sum begins: on the border of a cache line.
    first: usize,
}

/// The part of [`RowSums`] that one table has.
#[derive(Debug, Clone)]
pub(super) struct Region {
    /// Where its rows and their sums lie; one place more than it can have rows, where the number
    /// of a row that is not new is put.
    places: Range<usize>,
    stride: usize,
    row_count: usize,
}

impl RowSums {
    /// Returns the most bytes that batches can take which have at most `index_count` indices, of
    /// `table_count` tables with rows of at most `dim` weights; rows are numbered below
    /// `number_count`, those of one table below `row_count`.
    #[must_use]
    pub fn memory_bytes(
        (index_count, table_count): (u64, u64),
        dim: usize,
        (number_count, row_count): (u64, u64),
    ) -> u64 {
        let place_bytes = 4 * (1 + dim.next_multiple_of(LANES) as u64);
        let table_bytes = place_bytes * (1 + index_count.min(row_count));
        let all_bytes = place_bytes * (index_count + table_count);
        // Regions are cut for the longest rows.
        4 * number_count + all_bytes.min(table_bytes.max(SUM_BYTES as u64)) + LINE_BYTES as u64
    }

    /// Knows rows numbered below `number_count` from now on.
    pub(super) fn know(&mut self, number_count: usize) {
        grow(&mut self.places, number_count);
    }

    /// Makes room for tables of one dim, given the most rows each can have; as many of the first
    /// ones as fit get a region, one at least.
    pub(super) fn make_room(
        &mut self,
        dim: usize,
        row_counts: impl Iterator<Item = usize>,
    ) -> Vec<Region> {
        let stride = dim.next_multiple_of(LANES);
        let places_max = SUM_BYTES / (4 * (1 + stride));
        let mut regions: Vec<Region> = Vec::new();
        let mut end = 0;
        for row_count in row_counts {
            let places = end..end + 1 + row_count;
            if places.end > places_max && !regions.is_empty() {
                break;
            }
            end = places.end;
            regions.push(Region { places, stride, row_count: 0 });
        }
        grow(&mut self.rows, end);
        grow(&mut self.words, end * stride + LANES);
        // A vector that lies in two lines costs twice.
        self.first = self.words.as_ptr().align_offset(LINE_BYTES).min(LANES);
        regions
    }

    /// Returns the rows of a table in the order of their first use.
    pub(super) fn rows(&self, region: &Region) -> &[u32] {
        &self.rows[region.places.clone()][..region.row_count]
    }

    /// Returns the sums of [`Self::rows`], each padded to whole vectors.
    pub(super) fn sums(&self, region: &Region) -> &[f32] {
        let first = self.first + region.places.start * region.stride;
        &self.words[first..][..region.row_count * region.stride]
    }

    /// Forgets the rows of a table whose numbers begin at `number_first`, and clears their sums.
    pub(super) fn forget(&mut self, region: &Region, number_first: usize) {
        let places = &mut self.places[number_first..];
        for &row in &self.rows[region.places.clone()][..region.row_count] {
            places[row as usize] = 0;
        }
        let first = self.first + region.places.start * region.stride;
        self.words[first..][..region.row_count * region.stride].fill(0.0);
    }
}

impl Region {
    /// Words from sum to sum.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}

// Exactly as long as needed: a budget was told so.
fn grow<T: Copy + Default>(values: &mut Vec<T>, len: usize) {
    if values.len() < len {
        values.reserve_exact(len - values.len());
        values.resize(len, T::default());
    }
}

impl Kernels {
    /// Adds the gradients of features to the sums of their rows, each feature with the region of
    /// its table: features of different tables, and of one dim.
    pub(super) fn add_features(
        self,
        grad: &[f32],
        features: &[FeatureStep<'_>],
        regions: &mut [Region],
        sums: &mut RowSums,
    ) {
        let is_plain = |feature: &FeatureStep<'_>| {
            feature.rows.pooling == Pooling::Sum && feature.rows.weights.is_none()
        };
        let features: Vec<_> =
            features.iter().map(|feature| (*feature, feature.rows.is_one_hot())).collect();
        if features.iter().all(|(feature, _)| is_plain(feature)) {
            self.run(AddFeatures::<false> { grad, features: &features, regions, sums });
        } else {
            self.run(AddFeatures::<true> { grad, features: &features, regions, sums });
        }
    }
}

/// Features, each with whether all its bags have one index. With `SCALED`, gradients have weights
/// or counts, or belong to indices.
struct AddFeatures<'a, const SCALED: bool> {
    grad: &'a [f32],
    features: &'a [(FeatureStep<'a>, bool)],
    regions: &'a mut [Region],
    sums: &'a mut RowSums,
}

impl<const SCALED: bool> Job for AddFeatures<'_, SCALED> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.features.first().map_or(0, |(feature, _)| feature.rows.columns.dim);
        by_shape::<L, _>(self, dim);
    }
}

impl<const SCALED: bool> Shaped for AddFeatures<'_, SCALED> {
    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        let Self { grad, features, regions, sums } = self;
        let RowSums { places, rows: known, words, first } = sums;
        let batch_size = features.first().map_or(0, |(feature, _)| feature.rows.bag_count());
        for block in blocks(batch_size) {
            for ((feature, is_one_hot), region) in features.iter().zip(&mut *regions) {
                // Copied, so that nothing written below can change it.
                let rows = feature.rows;
                let words = &mut words[*first..][region.places.start * region.stride..];
                let mut adder = Adder {
                    places: &mut places[feature.number_first..],
                    known: &mut known[region.places.clone()],
                    words: &mut words[..region.places.len() * region.stride],
                    row_count: region.row_count,
                    stride: region.stride,
                };
                if SCALED || !is_one_hot {
                    adder.add_bags::<L, REST, TAIL, SCALED>(&rows, grad, block.clone());
                } else {
                    adder.add_one_hot::<L, REST, TAIL>(&rows, grad, block.clone());
                }
                region.row_count = adder.row_count;
            }
        }
    }
}

/// The part of [`RowSums`] that one table has, as slices.
struct Adder<'a> {
    places: &'a mut [u32],
    known: &'a mut [u32],
    words: &'a mut [f32],
    row_count: usize,
    stride: usize,
}

impl Adder<'_> {
    /// Adds the gradients of bags of one index each.
    #[inline(always)]
    fn add_one_hot<L: Lanes, const REST: usize, const TAIL: bool>(
        &mut self,
        rows: &FeatureRows<'_>,
        grad: &[f32],
        block: Range<usize>,
    ) {
        let FeatureRows { numbers, columns, .. } = *rows;
        let mut starts = [0; BLOCK_BAGS];
        // The sums are found first, so that they come near while others are found.
        for (start, &number) in starts.iter_mut().zip(&numbers[block.clone()]) {
            *start = self.sum_of(number);
            prefetch(self.words, *start, self.stride);
        }
        for (bag, &start) in block.zip(&starts) {
            // The block after this one lies on pages no processor looks at by itself.
            prefetch(grad, columns.start(bag + BLOCK_BAGS), columns.dim);
            if let Some(&soon) = numbers.get(bag + INDICES_AHEAD) {
                prefetch(self.places, soon as usize, 1);
            }
            let sum = &mut self.words[start..][..self.stride];
            add::<L, REST, TAIL, false>(sum, &grad[columns.range(bag)], (None, None));
        }
    }

    #[inline(always)]
    fn add_bags<L: Lanes, const REST: usize, const TAIL: bool, const SCALED: bool>(
        &mut self,
        rows: &FeatureRows<'_>,
        grad: &[f32],
        block: Range<usize>,
    ) {
        let FeatureRows { numbers, columns, .. } = *rows;
        for bag in block {
            prefetch(grad, columns.start(bag + BLOCK_BAGS), columns.dim);
            let indices = rows.indices(bag);
            let scale = Scale::of(rows, indices.len());
            for index in indices {
                if let Some(&soon) = numbers.get(index + INDICES_AHEAD) {
                    prefetch(self.places, soon as usize, 1);
                }
                let vector = if SCALED { rows.vector(bag, index) } else { bag };
                let start = self.sum_of(numbers[index]);
                let sum = &mut self.words[start..][..self.stride];
                add::<L, REST, TAIL, SCALED>(sum, &grad[columns.range(vector)], scale.at(index));
            }
        }
    }

    /// Returns where the sum of row `number` begins; it is +0 if the row is new.
    #[inline(always)]
    fn sum_of(&mut self, number: u32) -> usize {
        let place = &mut self.places[number as usize];
        self.known[self.row_count] = number;
        // Arithmetic, since a branch would often be guessed wrong.
        let is_new = u32::from(*place == 0);
        self.row_count += is_new as usize;
        *place += is_new * self.row_count as u32;
        (*place as usize - 1) * self.stride
    }
}

/// What is done to the gradients of one bag before they are added.
#[derive(Clone, Copy)]
struct Scale<'a> {
    weights: Option<&'a [f32]>,
    count: Option<f32>,
}

/// Weight of an index and count of its bag, where they apply.
type OneScale = (Option<f32>, Option<f32>);

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
        (self.weights.map(|weights| weights[index]), self.count)
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
fn add_lanes<L: Lanes, const SCALED: bool>(
    sum: &mut [f32; LANES],
    mut grad: L,
    (weight, count): OneScale,
) {
    if let (true, Some(weight)) = (SCALED, weight) {
        grad = L::splat(weight).mul(grad);
    }
    if let (true, Some(count)) = (SCALED, count) {
        grad = grad.div(L::splat(count));
    }
    L::load(sum).add(grad).store(sum);
}
