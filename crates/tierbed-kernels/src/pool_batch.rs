//! Pooling of a whole batch from rows in memory.
//!
//! The same additions as `Kernels::pool_add` onto zeroed vectors, sample after sample: sums begin
//! at +0 in registers, so nothing is zeroed before and nothing is read back.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per bag, by slicing")]

use crate::accumulate::{add_vectors, by_shape, Begin, Shaped};
use crate::batch::{FeatureRows, RowsOf, BLOCK_BAGS, INDICES_AHEAD};
use crate::layout::Pooling;
use crate::pool::divide;
use crate::simd::{prefetch, Job, Lanes, LANES};
use crate::Kernels;

impl Kernels {
    /// Pools the rows of every feature into `out`, `[B, stride]`, overwriting the columns of the
    /// features; vectors of empty bags become +0. Rows of features without pooling are copied to
    /// `[E, stride]`; weights do not apply to them.
    ///
    /// # Panics
    /// When parts of a feature do not belong together, features differ in their number of bags,
    /// or a row or vector lies outside `arena` or `out`.
    pub fn pool_batch(self, arena: &[f32], features: &[FeatureRows<'_>], out: &mut [f32]) {
        let Some(batch_size) = features.first().map(FeatureRows::bag_count) else { return };
        for rows in features {
            rows.check();
            assert_eq!(rows.bag_count(), batch_size, "features must have one bag per sample");
        }
        for dim in distinct(features.iter().map(|rows| rows.columns.dim)) {
            self.run(PoolBatch { arena, features, dim, out });
        }
    }
}

/// Returns the values in order of their first appearance.
pub(crate) fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}

/// The features of one dim.
struct PoolBatch<'a> {
    arena: &'a [f32],
    features: &'a [FeatureRows<'a>],
    dim: usize,
    out: &'a mut [f32],
}

impl Job for PoolBatch<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.dim;
        by_shape::<L, _>(self, dim);
    }
}

impl Shaped for PoolBatch<'_> {
    type Output = ();

    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        let Self { arena, features, dim, out } = self;
        // Copied, so that nothing written to `out` can change them.
        let of_dim = || features.iter().filter(|rows| rows.columns.dim == dim).copied();
        let copied: Vec<_> = of_dim().filter(FeatureRows::is_copied).collect();
        let summed: Vec<_> = of_dim().filter(|rows| !rows.is_copied()).collect();
        let batch_size = features.first().map_or(0, FeatureRows::bag_count);
        let mut copies = Copies::new(&copied, batch_size);
        for bag in 0..batch_size {
            copies.copy_rows::<L, REST, TAIL>(arena, bag, out);
            for rows in &summed {
                pool_bag::<L, REST, TAIL>(arena, rows, bag, out);
            }
        }
    }
}

/// Where the rows of some samples lie that features copy: sample by sample, so that what is
/// written lies side by side.
///
/// Numbers are read by blocks of a feature all the same. Those of all features lie apart by powers
/// of two, so that in turns they would drive each other from the nearest cache.
struct Copies<'a> {
    features: &'a [FeatureRows<'a>],
    batch_size: usize,
    /// First words of the rows of two blocks, `[2 * BLOCK_BAGS, F]`.
    starts: Vec<usize>,
}

impl<'a> Copies<'a> {
    fn new(features: &'a [FeatureRows<'a>], batch_size: usize) -> Self {
        let starts = vec![0; 2 * BLOCK_BAGS * features.len()];
        let mut copies = Self { features, batch_size, starts };
        copies.find(0);
        copies
    }

    /// Finds the rows of the block of samples that begins with `first`, if there is one.
    #[inline(always)]
    fn find(&mut self, first: usize) {
        let end = (first + BLOCK_BAGS).min(self.batch_size);
        let count = self.features.len();
        for (at, rows) in self.features.iter().enumerate() {
            let places = rows.places;
            for bag in first..end {
                self.starts[bag % (2 * BLOCK_BAGS) * count + at] = places.start(rows.numbers[bag]);
            }
        }
    }

    // Bags of one index each: the sum is the row.
    #[inline(always)]
    fn copy_rows<L: Lanes, const REST: usize, const TAIL: bool>(
        &mut self,
        arena: &[f32],
        bag: usize,
        out: &mut [f32],
    ) {
        if bag.is_multiple_of(BLOCK_BAGS) {
            self.find(bag + BLOCK_BAGS);
        }
        let count = self.features.len();
        let of = |bag: usize| &self.starts[bag % (2 * BLOCK_BAGS) * count..][..count];
        for ((rows, &start), &soon) in self.features.iter().zip(of(bag)).zip(of(bag + 1)) {
            let columns = rows.columns;
            prefetch(arena, soon, columns.dim);
            let row = &arena[start..][..columns.dim];
            copy_row::<L, REST, TAIL>(row, &mut out[columns.range(bag)]);
        }
    }
}

/// Adds a row to +0, which only changes -0.
#[inline(always)]
pub(crate) fn copy_row<L: Lanes, const REST: usize, const TAIL: bool>(
    from: &[f32],
    to: &mut [f32],
) {
    let zero = L::splat(0.0);
    let (from_full, from_part) = from.as_chunks::<LANES>();
    let (to_full, _) = to.as_chunks_mut::<LANES>();
    let (from_blocks, from_rest) = from_full.split_at(from_full.len() - REST);
    let (to_blocks, to_rest) = to_full.split_at_mut(from_full.len() - REST);
    for (from, to) in from_blocks.iter().zip(to_blocks) {
        zero.add(L::load(from)).store(to);
    }
    for (from, to) in from_rest[..REST].iter().zip(&mut to_rest[..REST]) {
        zero.add(L::load(from)).store(to);
    }
    if !TAIL {
        return;
    }
    // A whole vector that ends with the row is written faster than a part of one.
    if let (Some(from), Some(to)) = (from.last_chunk(), to.last_chunk_mut()) {
        return zero.add(L::load(from)).store(to);
    }
    zero.add(L::load_part(from_part)).store_part(to);
}

#[inline(always)]
fn pool_bag<L: Lanes, const REST: usize, const TAIL: bool>(
    arena: &[f32],
    rows: &FeatureRows<'_>,
    bag: usize,
    out: &mut [f32],
) {
    let indices = rows.indices(bag);
    for at in indices.clone() {
        if let Some(&soon) = rows.numbers.get(at + INDICES_AHEAD) {
            prefetch(arena, rows.places.start(soon), rows.columns.dim);
        }
    }
    if rows.pooling == Pooling::None {
        return copy_rows(arena, rows, indices, out);
    }
    let sum = &mut out[rows.columns.range(bag)];
    let count = indices.len();
    if rows.weights.is_some() {
        let source = RowsOf::<true> { arena, rows };
        add_vectors::<L, _, REST, TAIL>(&source, indices, Begin::Zero, sum);
    } else {
        let source = RowsOf::<false> { arena, rows };
        add_vectors::<L, _, REST, TAIL>(&source, indices, Begin::Zero, sum);
    }
    if rows.pooling == Pooling::Mean && count > 0 {
        divide::<L>(sum, count as f32);
    }
}

#[inline(always)]
fn copy_rows(
    arena: &[f32],
    rows: &FeatureRows<'_>,
    indices: std::ops::Range<usize>,
    out: &mut [f32],
) {
    for at in indices {
        let from = rows.places.start(rows.numbers[at]);
        let to = &mut out[rows.columns.range(rows.vector(0, at))];
        to.copy_from_slice(&arena[from..][..rows.columns.dim]);
    }
}
