//! Pooling of one bag's rows into one vector, the last step of a lookup.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per row, by slicing")]

use crate::accumulate::{add_vectors, by_shape, Begin, Shaped, Source};
use crate::layout::{index_count, BagRange, Columns, Rows};
use crate::simd::{prefetch, Job, Lanes, LANES};
use crate::Kernels;

/// How many rows ahead of the sum the processor is asked to fetch, from arenas that no cache holds.
pub(crate) const PREFETCH_AHEAD: usize = 8;
/// From this size on an arena is taken to be outside the nearest cache: 256 KiB.
pub(crate) const FAR_ARENA_WORDS: usize = 1 << 16;

impl Kernels {
    /// Adds the rows of each bag into its vector: `out[bag] += weight * row`, in index order.
    ///
    /// `rows` are `[E]` indices, those of the run `bags`; `out` is `[B, stride]`, to which the
    /// sums are added where `columns` says: the caller zeroes it first. Several calls on
    /// consecutive runs leave the bits of one call. Without weights, rows are added as they are.
    ///
    /// # Panics
    /// When weights are not `[E]`, or a row or vector lies outside `rows.arena` or `out`.
    pub fn pool_add(self, rows: Rows<'_>, bags: BagRange<'_>, columns: Columns, out: &mut [f32]) {
        columns.check();
        let Rows { arena, starts, weights } = rows;
        let is_far = arena.len() >= FAR_ARENA_WORDS;
        if let Some(weights) = weights {
            assert_eq!(weights.len(), starts.len(), "weights must have one value per index");
            if is_far {
                let source = Weighted::<PREFETCH_AHEAD> { arena, starts, weights };
                self.run(PoolAdd { source, row_count: starts.len(), bags, columns, out });
            } else {
                let source = Weighted::<0> { arena, starts, weights };
                self.run(PoolAdd { source, row_count: starts.len(), bags, columns, out });
            }
        } else if is_far {
            let source = Plain::<PREFETCH_AHEAD> { arena, starts };
            self.run(PoolAdd { source, row_count: starts.len(), bags, columns, out });
        } else {
            let source = Plain::<0> { arena, starts };
            self.run(PoolAdd { source, row_count: starts.len(), bags, columns, out });
        }
    }

    /// Divides each bag's vector by its number of indices; vectors of empty bags stay as they are.
    ///
    /// `offsets` is `[B + 1]`; `out` is `[B, stride]`, changed in place where `columns` says.
    ///
    /// # Panics
    /// When a vector lies outside `out`.
    pub fn mean_scale(self, offsets: &[i64], columns: Columns, out: &mut [f32]) {
        columns.check();
        self.run(MeanScale { offsets, columns, out });
    }

    /// Copies the weights of each row to `out`, `[E, dim]`: pooling "none". Weights of indices do
    /// not apply.
    ///
    /// # Panics
    /// When `out` is not `[E, dim]` or a row lies outside `arena`.
    pub fn gather_rows(self, arena: &[f32], starts: &[usize], dim: usize, out: &mut [f32]) {
        assert!(dim > 0, "dim must not be 0");
        assert_eq!(out.len(), starts.len() * dim, "out must be [E, dim]");
        let is_far = arena.len() >= FAR_ARENA_WORDS;
        for (i, (&start, to)) in starts.iter().zip(out.chunks_exact_mut(dim)).enumerate() {
            if let (true, Some(&ahead)) = (is_far, starts.get(i + PREFETCH_AHEAD)) {
                prefetch(arena, ahead, dim);
            }
            to.copy_from_slice(&arena[start..][..dim]);
        }
    }
}

/// Rows as they are.
pub(crate) struct Plain<'a, const AHEAD: usize> {
    pub(crate) arena: &'a [f32],
    pub(crate) starts: &'a [usize],
}

impl<const AHEAD: usize> Source for Plain<'_, AHEAD> {
    const PREFETCH_AHEAD: usize = AHEAD;

    #[inline(always)]
    fn words(&self) -> &[f32] {
        self.arena
    }

    #[inline(always)]
    fn start(&self, i: usize) -> Option<usize> {
        self.starts.get(i).copied()
    }
}

/// Rows times weights.
pub(crate) struct Weighted<'a, const AHEAD: usize> {
    pub(crate) arena: &'a [f32],
    pub(crate) starts: &'a [usize],
    pub(crate) weights: &'a [f32],
}

impl<const AHEAD: usize> Source for Weighted<'_, AHEAD> {
    const WEIGHTED: bool = true;
    const PREFETCH_AHEAD: usize = AHEAD;

    #[inline(always)]
    fn words(&self) -> &[f32] {
        self.arena
    }

    #[inline(always)]
    fn start(&self, i: usize) -> Option<usize> {
        self.starts.get(i).copied()
    }

    #[inline(always)]
    fn weight(&self, i: usize) -> f32 {
        self.weights[i]
    }
}

struct PoolAdd<'a, S> {
    source: S,
    row_count: usize,
    bags: BagRange<'a>,
    columns: Columns,
    out: &'a mut [f32],
}

impl<S: Source> Job for PoolAdd<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.columns.dim;
        by_shape::<L, _>(self, dim);
    }
}

impl<S: Source> Shaped for PoolAdd<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        for bag in self.bags.first_bag()..self.bags.bag_count() {
            let Some(rows) = self.bags.rows_of(bag, self.row_count) else { break };
            if !rows.is_empty() {
                let sum = &mut self.out[self.columns.range(bag)];
                add_vectors::<L, S, REST, TAIL>(&self.source, rows, Begin::There, sum);
            }
        }
    }
}

struct MeanScale<'a> {
    offsets: &'a [i64],
    columns: Columns,
    out: &'a mut [f32],
}

impl Job for MeanScale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for bag in 0..self.offsets.len().saturating_sub(1) {
            let count = index_count(self.offsets, bag);
            if count <= 0 {
                continue;
            }
            divide::<L>(&mut self.out[self.columns.range(bag)], count as f32);
        }
    }
}

/// Divides each element of `vector`.
#[inline(always)]
pub(crate) fn divide<L: Lanes>(vector: &mut [f32], divisor: f32) {
    let divisor = L::splat(divisor);
    let (full, part) = vector.as_chunks_mut::<LANES>();
    for lanes in full {
        L::load(lanes).div(divisor).store(lanes);
    }
    L::load_part(part).div(divisor).store_part(part);
}
