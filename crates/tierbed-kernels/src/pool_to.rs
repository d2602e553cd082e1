//! Here are the rows of a bag; put their vector where it is needed.
//!
//! Pooling whose results do not lie in one matrix: a [`Destination`] says where each vector
//! goes, perhaps into the memory of another rank. A vector is summed in registers from +0,
//! divided there for "mean", and stored once, so that its place need not hold anything before.
//! Source: PGAS §III (one kernel looks up, pools and writes remotely).

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use std::ops::Range;

use tierbed_core::Bags;

use crate::accumulate::{add_vectors, by_shape, Begin, Shaped, Source};
use crate::batch::blocks;
use crate::layout::{BagRange, Pooling, Rows};
use crate::plan::FeaturePlan;
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

impl FeaturePlan {
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
    /// side, and are written together.
    ///
    /// # Panics
    /// As [`pool_to`](Self::pool_to).
    pub fn pool_all_to(self, features: &[(Rows<'_>, PoolFeature<'_>)], to: &mut impl Destination) {
        let is_pooled = |of: &PoolFeature<'_>| of.pooling != Pooling::None;
        for (rows, of) in features {
            assert!(of.dim > 0, "dim must not be 0");
            if !is_pooled(of) {
                gather_to(*rows, *of, to);
            } else if let Some(weights) = rows.weights {
                let index_count = rows.starts.len();
                assert_eq!(weights.len(), index_count, "weights must have one value per index");
            }
        }
        let bag_count = |of: &PoolFeature<'_>| of.offsets.len().saturating_sub(1);
        let of_pooled = || features.iter().filter(|(_, of)| is_pooled(of));
        let dim_max = features.iter().map(|(_, of)| of.dim).max().unwrap_or(0);
        let mut near = vec![0.0; if to.is_far() { dim_max } else { 0 }];
        let most_bags = of_pooled().map(|(_, of)| bag_count(of)).max().unwrap_or(0);
        for block in blocks(most_bags) {
            for (rows, of) in of_pooled() {
                let end = block.end.min(bag_count(of));
                self.pool_bags_to(*rows, (*of, block.start.min(end)..end), &mut near, to);
            }
        }
        if !near.is_empty() {
            fence();
        }
    }

    #[inline(always)]
    fn pool_bags_to(
        self,
        rows: Rows<'_>,
        (of, bags): (PoolFeature<'_>, Range<usize>),
        near: &mut [f32],
        to: &mut impl Destination,
    ) {
        let Rows { arena, starts, weights } = rows;
        let (row_count, is_far) = (starts.len(), arena.len() >= FAR_ARENA_WORDS);
        match (weights, is_far) {
            (Some(weights), true) => {
                let source = Weighted::<PREFETCH_AHEAD> { arena, starts, weights };
                self.run(PoolTo { source, row_count, bags, of, near, to });
            }
            (Some(weights), false) => {
                let source = Weighted::<0> { arena, starts, weights };
                self.run(PoolTo { source, row_count, bags, of, near, to });
            }
            (None, true) => {
                let source = Plain::<PREFETCH_AHEAD> { arena, starts };
                self.run(PoolTo { source, row_count, bags, of, near, to });
            }
            (None, false) => {
                let source = Plain::<0> { arena, starts };
                self.run(PoolTo { source, row_count, bags, of, near, to });
            }
        }
    }
}

fn gather_to(rows: Rows<'_>, of: PoolFeature<'_>, to: &mut impl Destination) {
    let Rows { arena, starts, .. } = rows;
    let is_far = arena.len() >= FAR_ARENA_WORDS;
    for (at, &start) in starts.iter().enumerate() {
        if let (true, Some(&ahead)) = (is_far, starts.get(at + PREFETCH_AHEAD)) {
            prefetch(arena, ahead, of.dim);
        }
        to.vector(of.feature, at).copy_from_slice(&arena[start..][..of.dim]);
        to.finish(of.feature, at);
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

struct PoolTo<'a, S, T> {
    source: S,
    row_count: usize,
    bags: Range<usize>,
    of: PoolFeature<'a>,
    /// Where a vector is summed that is streamed to its place; empty where none is.
    near: &'a mut [f32],
    to: &'a mut T,
}

impl<S: Source, T: Destination> Job for PoolTo<'_, S, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.of.dim;
        by_shape::<L, _>(self, dim);
    }
}

// A bag of one index: its sum and its mean are the row.
#[inline(always)]
fn copy_one<L: Lanes, S: Source, const REST: usize, const TAIL: bool>(
    source: &S,
    at: usize,
    is_far: bool,
    to: &mut [f32],
) {
    let words = source.words();
    if S::PREFETCH_AHEAD > 0 {
        if let Some(ahead) = source.start(at + S::PREFETCH_AHEAD) {
            prefetch(words, ahead, to.len());
        }
    }
    let Some(start) = source.start(at) else { return };
    let row = &words[start..][..to.len()];
    if is_far {
        stream_row::<L>(row, to);
    } else {
        copy_row::<L, REST, TAIL>(row, to);
    }
}

impl<S: Source, T: Destination> Shaped for PoolTo<'_, S, T> {
    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        let offsets = BagRange::whole(self.of.offsets);
        for bag in self.bags {
            let place = self.to.vector(self.of.feature, bag);
            assert_eq!(place.len(), self.of.dim, "a place must be [dim]");
            // An empty bag behind all rows has none: its sum is +0 all the same.
            let rows = offsets.rows_of(bag, self.row_count).unwrap_or(0..0);
            let count = rows.len();
            let is_far = !self.near.is_empty();
            if !S::WEIGHTED && count == 1 {
                copy_one::<L, S, REST, TAIL>(&self.source, rows.start, is_far, place);
            } else {
                let sum = if is_far { &mut self.near[..self.of.dim] } else { &mut *place };
                add_vectors::<L, S, REST, TAIL>(&self.source, rows, Begin::Zero, sum);
                if self.of.pooling == Pooling::Mean && count > 0 {
                    divide::<L>(sum, count as f32);
                }
                if is_far {
                    stream_vector::<L>(&self.near[..self.of.dim], place);
                }
            }
            self.to.finish(self.of.feature, bag);
        }
    }
}
