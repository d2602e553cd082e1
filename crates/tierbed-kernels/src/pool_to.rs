//! Here are the rows of a bag; put their vector where it is needed.
//!
//! Pooling whose results do not lie in one matrix: a [`Destination`] says where each vector
//! goes, perhaps into the memory of another rank. A vector is summed in registers from +0,
//! divided there for "mean", and stored once, so that its place need not hold anything before.
//! Source: PGAS §III (one kernel looks up, pools and writes remotely).

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use tierbed_core::Bags;

use crate::accumulate::{add_vectors, by_shape, Begin, Shaped, Source};
use crate::layout::{BagRange, Pooling, Rows};
use crate::plan::FeaturePlan;
use crate::pool::{divide, Plain, Weighted, FAR_ARENA_WORDS, PREFETCH_AHEAD};
use crate::pool_batch::copy_row;
use crate::simd::{prefetch, Job, Lanes};
use crate::Kernels;

/// Where vectors go.
pub trait Destination {
    /// Returns the place, `[dim]`, of the vector of bag `at` of feature `feature`; without
    /// pooling `at` counts indices.
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32];
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
                }
            } else {
                let range = self.range(bags, at);
                for (index, row) in range.enumerate() {
                    to.vector(at, index).copy_from_slice(&matrix[feature.columns.range(row)]);
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
        assert!(of.dim > 0, "dim must not be 0");
        let Rows { arena, starts, weights } = rows;
        let is_far = arena.len() >= FAR_ARENA_WORDS;
        if of.pooling == Pooling::None {
            return gather_to(arena, starts, is_far, of, to);
        }
        let row_count = starts.len();
        if let Some(weights) = weights {
            assert_eq!(weights.len(), starts.len(), "weights must have one value per index");
            if is_far {
                let source = Weighted::<PREFETCH_AHEAD> { arena, starts, weights };
                self.run(PoolTo { source, row_count, of, to });
            } else {
                let source = Weighted::<0> { arena, starts, weights };
                self.run(PoolTo { source, row_count, of, to });
            }
        } else if is_far {
            let source = Plain::<PREFETCH_AHEAD> { arena, starts };
            self.run(PoolTo { source, row_count, of, to });
        } else {
            let source = Plain::<0> { arena, starts };
            self.run(PoolTo { source, row_count, of, to });
        }
    }
}

fn gather_to(
    arena: &[f32],
    starts: &[usize],
    is_far: bool,
    of: PoolFeature<'_>,
    to: &mut impl Destination,
) {
    for (at, &start) in starts.iter().enumerate() {
        if let (true, Some(&ahead)) = (is_far, starts.get(at + PREFETCH_AHEAD)) {
            prefetch(arena, ahead, of.dim);
        }
        to.vector(of.feature, at).copy_from_slice(&arena[start..][..of.dim]);
    }
}

struct PoolTo<'a, S, T> {
    source: S,
    row_count: usize,
    of: PoolFeature<'a>,
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
    to: &mut [f32],
) {
    let words = source.words();
    if S::PREFETCH_AHEAD > 0 {
        if let Some(ahead) = source.start(at + S::PREFETCH_AHEAD) {
            prefetch(words, ahead, to.len());
        }
    }
    if let Some(start) = source.start(at) {
        copy_row::<L, REST, TAIL>(&words[start..][..to.len()], to);
    }
}

impl<S: Source, T: Destination> Shaped for PoolTo<'_, S, T> {
    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        let bags = BagRange::whole(self.of.offsets);
        for bag in 0..bags.bag_count() {
            let place = self.to.vector(self.of.feature, bag);
            assert_eq!(place.len(), self.of.dim, "a place must be [dim]");
            // An empty bag behind all rows has none: its sum is +0 all the same.
            let rows = bags.rows_of(bag, self.row_count).unwrap_or(0..0);
            let count = rows.len();
            if !S::WEIGHTED && count == 1 {
                copy_one::<L, S, REST, TAIL>(&self.source, rows.start, place);
                continue;
            }
            add_vectors::<L, S, REST, TAIL>(&self.source, rows, Begin::Zero, place);
            if self.of.pooling == Pooling::Mean && count > 0 {
                divide::<L>(place, count as f32);
            }
        }
    }
}
