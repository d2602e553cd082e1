//! Pooling of bags into vectors at any place in memory.
//!
//! Pooling whose results do not lie in one matrix: a [`Destination`] says where each vector
//! goes, perhaps into the memory of another rank. A vector is summed in registers from +0,
//! divided there for "mean", and stored once, so that its place need not hold anything before.
//! Source: PGAS §III (one kernel looks up, pools and writes remotely).

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use std::ops::Range;

use tierbed_core::Bags;

use crate::accumulate::{add_vectors, by_shape, Begin, Shaped, Source};
use crate::batch::BLOCK_BAGS;
use crate::feature_layout::FeatureLayout;
use crate::layout::{is_one_hot, BagRange, Pooling, Rows};
use crate::pool::{divide, Plain, Weighted, FAR_ARENA_WORDS, PREFETCH_AHEAD};
use crate::pool_batch::copy_row;
use crate::simd::{fence, prefetch, Job, Lanes, LANES};
use crate::Kernels;

/// Where vectors go.
pub trait Destination {
    /// Returns the place, `[dim]`, of the vector of bag `at` of feature `feature`; without
    /// pooling `at` counts indices.
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32];

    /// Whether places lie far apart in more memory than caches hold, and are not read again soon:
    /// then they are best written past the caches.
    fn is_far(&self) -> bool {
        false
    }

    /// Takes note that this vector, the last one asked for, is written.
    #[inline(always)]
    fn finish(&mut self, _feature: usize, _at: usize) {}
}

/// The feature whose vectors are pooled.
#[derive(Debug, Clone, Copy)]
pub struct PoolFeature<'a> {
    /// Its number, as the destination knows it.
    pub feature: usize,
    /// Its bag bounds, `[B + 1]`; not looked at without pooling.
    pub offsets: &'a [i64],
    /// How its bags become vectors.
    pub pooling: Pooling,
    /// Elements of a vector.
    pub dim: usize,
}

impl FeatureLayout {
    /// Copies the vectors of an output of `bags`, as a lookup left it, to the places `to` says.
    ///
    /// # Panics
    /// When `matrix` is not an output of `bags`.
    pub fn scatter(&self, bags: &Bags<'_>, matrix: &[f32], to: &mut impl Destination) {
        for (at, feature) in self.features().iter().enumerate() {
            if self.is_pooled() {
                for bag in 0..bags.batch_size() {
                    to.vector(at, bag).copy_from_slice(&matrix[feature.columns.range(bag)]);
                    to.finish(at, bag);
                }
            } else {
                let range = self.range(bags, at);
                for (index, row) in range.enumerate() {
                    to.vector(at, index).copy_from_slice(&matrix[feature.columns.range(row)]);
                    to.finish(at, index);
                }
            }
        }
    }
}

impl Kernels {
    /// Pools all bags of one feature into their places, which are overwritten, with zeros for
    /// empty bags. The bits are those of [`pool_add`](Self::pool_add) on zeros and
    /// [`mean_scale`](Self::mean_scale).
    ///
    /// `rows` are `[E]`, those of the feature.
    ///
    /// # Panics
    /// When weights are not `[E]`, a place is not `[dim]`, or a row lies outside `rows.arena`.
    pub fn pool_to(self, rows: Rows<'_>, of: PoolFeature<'_>, to: &mut impl Destination) {
        self.pool_all_to(&[(rows, of)], to);
    }

    /// Pools the bags of all features into their places, as [`pool_to`](Self::pool_to) does one
    /// by one. A few bags of every feature take turns: places of one sample mostly lie side by
    /// side, and are written together. Places that are far are written line by line past the
    /// caches, whatever is beside them, so there each feature has its turn as a whole, and its
    /// next rows are on their way all the time.
    ///
    /// # Panics
    /// As [`pool_to`](Self::pool_to).
    pub fn pool_all_to(self, features: &[(Rows<'_>, PoolFeature<'_>)], to: &mut impl Destination) {
        self.pool_features_to(features, to);
    }

    /// Pools features whose rows are kept in any way.
    #[inline(always)]
    pub(crate) fn pool_features_to<R: FeatureBags>(
        self,
        features: &[(R, PoolFeature<'_>)],
        to: &mut impl Destination,
    ) {
        let is_pooled = |of: &PoolFeature<'_>| of.pooling != Pooling::None;
        let dim_max = features.iter().map(|(_, of)| of.dim).max().unwrap_or(0);
        let mut near = vec![0.0; if to.is_far() { dim_max } else { 0 }];
        for (rows, of) in features {
            assert!(of.dim > 0, "dim must not be 0");
            rows.check(of);
            if !is_pooled(of) {
                rows.pool_bags_to(self, FeatureRange { of: *of, bags: 0..0 }, &mut [], to);
            }
        }
        let bag_count = |of: &PoolFeature<'_>| of.offsets.len().saturating_sub(1);
        let of_pooled = || features.iter().filter(|(_, of)| is_pooled(of));
        let most_bags = of_pooled().map(|(_, of)| bag_count(of)).max().unwrap_or(0);
        let block_bags = if near.is_empty() { BLOCK_BAGS } else { most_bags.max(1) };
        for first in (0..most_bags).step_by(block_bags) {
            for (rows, of) in of_pooled() {
                let end = (first + block_bags).min(bag_count(of));
                if first < end {
                    let range = FeatureRange { of: *of, bags: first..end };
                    rows.pool_bags_to(self, range, &mut near, to);
                }
            }
        }
        if !near.is_empty() {
            fence();
        }
    }
}

/// Some bags of a feature.
pub(crate) struct FeatureRange<'a> {
    pub(crate) of: PoolFeature<'a>,
    pub(crate) bags: Range<usize>,
}

/// The rows of a feature, kept in one way or another.
pub(crate) trait FeatureBags: Copy {
    /// Panics unless its parts belong together.
    fn check(&self, of: &PoolFeature<'_>);

    /// Pools some bags of a feature into their places, by way of `near` and past the caches unless
    /// it is empty; without pooling, copies all its rows.
    fn pool_bags_to(
        self,
        kernels: Kernels,
        of: FeatureRange<'_>,
        near: &mut [f32],
        to: &mut impl Destination,
    );
}

impl FeatureBags for Rows<'_> {
    fn check(&self, _of: &PoolFeature<'_>) {
        if let Some(weights) = self.weights {
            let index_count = self.starts.len();
            assert_eq!(weights.len(), index_count, "weights must have one value per index");
        }
    }

    #[inline(always)]
    fn pool_bags_to(
        self,
        kernels: Kernels,
        of: FeatureRange<'_>,
        near: &mut [f32],
        to: &mut impl Destination,
    ) {
        let FeatureRange { of, bags } = of;
        let Rows { arena, starts, weights } = self;
        let (row_count, is_far) = (starts.len(), arena.len() >= FAR_ARENA_WORDS);
        match (weights, is_far) {
            (Some(weights), true) => {
                let rows = Weighted::<PREFETCH_AHEAD> { arena, starts, weights };
                kernels.run(PoolTo { source: Words { rows, row_count }, bags, of, near, to });
            }
            (Some(weights), false) => {
                let rows = Weighted::<0> { arena, starts, weights };
                kernels.run(PoolTo { source: Words { rows, row_count }, bags, of, near, to });
            }
            (None, true) => {
                let rows = Plain::<PREFETCH_AHEAD> { arena, starts };
                kernels.run(PoolTo { source: Words { rows, row_count }, bags, of, near, to });
            }
            (None, false) => {
                let rows = Plain::<0> { arena, starts };
                kernels.run(PoolTo { source: Words { rows, row_count }, bags, of, near, to });
            }
        }
    }
}

/// Rows that can be summed and copied. Everything MUST be `#[inline(always)]`.
pub(crate) trait Pooled {
    /// Whether a row alone is quicker copied than summed.
    const COPIES_ONE: bool = false;
    /// Whether there is a loop for every remainder of `dim` by 64; else `REST` and `TAIL` say
    /// nothing.
    const IS_SHAPED: bool = true;

    /// Returns the number of indices `E`.
    fn index_count(&self) -> usize;

    /// Writes the sum of rows `rows`, from +0 and in order, to `to`, `[dim]`.
    fn sum<L: Lanes, const REST: usize, const TAIL: bool>(
        &self,
        rows: Range<usize>,
        to: &mut [f32],
    );

    /// Writes the sum of row `row` alone to `to`, `[dim]`, past the caches where `is_far`; asked
    /// only when `COPIES_ONE`.
    #[inline(always)]
    fn sum_one<L: Lanes, const REST: usize, const TAIL: bool>(
        &self,
        row: usize,
        _is_far: bool,
        to: &mut [f32],
    ) {
        self.sum::<L, REST, TAIL>(row..row + 1, to);
    }

    /// Writes row `row` to `to`, `[dim]`.
    fn copy<L: Lanes, const REST: usize, const TAIL: bool>(&self, row: usize, to: &mut [f32]);
}

/// Rows that lie in an arena as words.
struct Words<S> {
    rows: S,
    row_count: usize,
}

impl<S: Source> Words<S> {
    /// Returns row `at`, and asks for one further on.
    #[inline(always)]
    fn row(&self, at: usize, dim: usize) -> Option<&[f32]> {
        let words = self.rows.words();
        if S::PREFETCH_AHEAD > 0 {
            if let Some(ahead) = self.rows.start(at + S::PREFETCH_AHEAD) {
                prefetch(words, ahead, dim);
            }
        }
        self.rows.start(at).map(|start| &words[start..][..dim])
    }
}

impl<S: Source> Pooled for Words<S> {
    const COPIES_ONE: bool = !S::WEIGHTED;

    #[inline(always)]
    fn index_count(&self) -> usize {
        self.row_count
    }

    #[inline(always)]
    fn sum<L: Lanes, const REST: usize, const TAIL: bool>(
        &self,
        rows: Range<usize>,
        to: &mut [f32],
    ) {
        add_vectors::<L, S, REST, TAIL>(&self.rows, rows, Begin::Zero, to);
    }

    #[inline(always)]
    fn sum_one<L: Lanes, const REST: usize, const TAIL: bool>(
        &self,
        row: usize,
        is_far: bool,
        to: &mut [f32],
    ) {
        let Some(row) = self.row(row, to.len()) else { return };
        if is_far {
            stream_row::<L>(row, to);
        } else {
            copy_row::<L, REST, TAIL>(row, to);
        }
    }

    #[inline(always)]
    fn copy<L: Lanes, const REST: usize, const TAIL: bool>(&self, row: usize, to: &mut [f32]) {
        if let Some(row) = self.row(row, to.len()) {
            to.copy_from_slice(row);
        }
    }
}

// Writes a vector past the caches, but for what does not fill a register.
#[inline(always)]
fn stream_vector<L: Lanes>(from: &[f32], to: &mut [f32]) {
    let (from_full, from_part) = from.as_chunks::<LANES>();
    let (to_full, to_part) = to.as_chunks_mut::<LANES>();
    for (from, to) in from_full.iter().zip(to_full) {
        L::load(from).stream(to);
    }
    to_part.copy_from_slice(from_part);
}

// As `copy_row`, past the caches.
#[inline(always)]
fn stream_row<L: Lanes>(from: &[f32], to: &mut [f32]) {
    let zero = L::splat(0.0);
    let (from_full, from_part) = from.as_chunks::<LANES>();
    let (to_full, to_part) = to.as_chunks_mut::<LANES>();
    for (from, to) in from_full.iter().zip(to_full) {
        zero.add(L::load(from)).stream(to);
    }
    for (from, to) in from_part.iter().zip(to_part) {
        *to = 0.0 + from;
    }
}

/// Some bags of a feature on their way to their places.
pub(crate) struct PoolTo<'a, P, T> {
    pub(crate) source: P,
    pub(crate) bags: Range<usize>,
    pub(crate) of: PoolFeature<'a>,
    /// Where a vector is summed that is streamed to its place; empty where none is.
    pub(crate) near: &'a mut [f32],
    pub(crate) to: &'a mut T,
}

impl<P: Pooled, T: Destination> Job for PoolTo<'_, P, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.of.dim;
        if P::IS_SHAPED {
            by_shape::<L, _>(self, dim);
        } else {
            self.run_shaped::<L, 0, false>();
        }
    }
}

impl<P: Pooled, T: Destination> Shaped for PoolTo<'_, P, T> {
    type Output = ();

    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        let PoolFeature { feature, offsets, pooling, dim } = self.of;
        if pooling == Pooling::None {
            for at in 0..self.source.index_count() {
                self.source.copy::<L, REST, TAIL>(at, self.to.vector(feature, at));
                self.to.finish(feature, at);
            }
            return;
        }
        let is_far = !self.near.is_empty();
        let bounds = &offsets[self.bags.start..=self.bags.end];
        let offsets = BagRange::whole(offsets);
        if P::COPIES_ONE && is_one_hot(bounds) {
            // Few instructions between two rows: the processor then looks for several at a time.
            let first = bounds[0] as usize - offsets.first_index;
            if first + self.bags.len() <= self.source.index_count() {
                for (row, bag) in (first..).zip(self.bags) {
                    let place = self.to.vector(feature, bag);
                    assert_eq!(place.len(), dim, "a place must be [dim]");
                    self.source.sum_one::<L, REST, TAIL>(row, is_far, place);
                    self.to.finish(feature, bag);
                }
                return;
            }
        }
        for bag in self.bags {
            let place = self.to.vector(feature, bag);
            assert_eq!(place.len(), dim, "a place must be [dim]");
            // An empty bag behind all rows has none: its sum is +0 all the same.
            let rows = offsets.rows_of(bag, self.source.index_count()).unwrap_or(0..0);
            let count = rows.len();
            if P::COPIES_ONE && count == 1 {
                self.source.sum_one::<L, REST, TAIL>(rows.start, is_far, place);
                self.to.finish(feature, bag);
                continue;
            }
            let sum = if is_far { &mut self.near[..dim] } else { &mut *place };
            self.source.sum::<L, REST, TAIL>(rows, sum);
            if pooling == Pooling::Mean && count > 0 {
                divide::<L>(sum, count as f32);
            }
            if is_far {
                stream_vector::<L>(&self.near[..dim], place);
            }
            self.to.finish(feature, bag);
        }
    }
}
