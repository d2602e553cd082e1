//! Weighted sums of many vectors, kept in registers.
//!
//! Columns are taken in blocks of 64: the block's sums stay in registers while all vectors of the
//! range pass by, in order. So each element's additions happen in the order of the range, exactly
//! as in `for i in range { for c in columns { sum[c] += x[i][c] } }`, whatever the width.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per vector, by slicing")]

use std::ops::Range;

use crate::simd::{prefetch, Lanes, LANES};

/// Registers of one block.
pub(crate) const BLOCK_LANES: usize = 4;
/// Columns of one block.
pub(crate) const BLOCK: usize = BLOCK_LANES * LANES;

/// Vectors to add: where each one is, and what is done to it before it is added.
pub(crate) trait Source {
    /// Whether each vector is multiplied by its weight.
    const WEIGHTED: bool = false;
    /// Whether each vector is divided by a count, after weighting.
    const MEAN: bool = false;
    /// How many vectors ahead to prefetch; 0 for not at all.
    const PREFETCH_AHEAD: usize = 0;

    /// Returns the memory the vectors lie in.
    fn words(&self) -> &[f32];
    /// Returns the first word of vector `i`, or `None` behind the last one.
    fn start(&self, i: usize) -> Option<usize>;
    /// Returns the weight of vector `i`; asked only when `WEIGHTED`.
    #[inline(always)]
    fn weight(&self, i: usize) -> f32 {
        unreachable!("vector {i} has no weight")
    }
    /// Returns the count of vector `i`; asked only when `MEAN`.
    #[inline(always)]
    fn count(&self, i: usize) -> f32 {
        unreachable!("vector {i} has no count")
    }
}

/// A loop nest that adds vectors of `dim` elements, compiled per remainder of `dim` by 64.
pub(crate) trait Shaped {
    /// What it returns.
    type Output;

    /// Runs with `REST` whole vectors behind the last block, and then a part if `TAIL`.
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) -> Self::Output;
}

/// Runs `nest` in the shape of `dim`.
#[inline(always)]
pub(crate) fn by_shape<L: Lanes, N: Shaped>(nest: N, dim: usize) -> N::Output {
    match (dim % BLOCK / LANES, !dim.is_multiple_of(LANES)) {
        (0, false) => nest.run_shaped::<L, 0, false>(),
        (0, true) => nest.run_shaped::<L, 0, true>(),
        (1, false) => nest.run_shaped::<L, 1, false>(),
        (1, true) => nest.run_shaped::<L, 1, true>(),
        (2, false) => nest.run_shaped::<L, 2, false>(),
        (2, true) => nest.run_shaped::<L, 2, true>(),
        (_, false) => nest.run_shaped::<L, 3, false>(),
        (_, true) => nest.run_shaped::<L, 3, true>(),
    }
}

/// What a sum begins with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    /// What is there already.
    There,
    /// +0, whatever is there.
    Zero,
}

/// Adds vectors `range` of `source` into `sum`, in order.
#[inline(always)]
pub(crate) fn add_vectors<L: Lanes, S: Source, const REST: usize, const TAIL: bool>(
    source: &S,
    range: Range<usize>,
    begin: Begin,
    sum: &mut [f32],
) {
    let mut blocks = sum.chunks_exact_mut(BLOCK);
    let mut at = 0;
    for block in &mut blocks {
        add_block::<L, S, BLOCK_LANES, false>(source, range.clone(), at, begin, block);
        at += BLOCK;
    }
    if REST > 0 || TAIL {
        add_block::<L, S, REST, TAIL>(source, range, at, begin, blocks.into_remainder());
    }
}

/// Adds columns `at..` of the vectors into `sum`: `FULL` registers, and then a part if `TAIL`.
#[inline(always)]
fn add_block<L: Lanes, S: Source, const FULL: usize, const TAIL: bool>(
    source: &S,
    range: Range<usize>,
    at: usize,
    begin: Begin,
    sum: &mut [f32],
) {
    let width = sum.len();
    let (sum_full, sum_part) = sum.as_chunks_mut::<LANES>();
    let sum_full = &mut sum_full[..FULL];
    let mut full = [L::splat(0.0); FULL];
    let mut part = L::splat(0.0);
    if begin == Begin::There {
        for (lanes, from) in full.iter_mut().zip(&*sum_full) {
            *lanes = L::load(from);
        }
        if TAIL {
            part = L::load_part(sum_part);
        }
    }
    let words = source.words();
    for i in range {
        let Some(start) = source.start(i) else { break };
        if S::PREFETCH_AHEAD > 0 {
            if let Some(ahead) = source.start(i + S::PREFETCH_AHEAD) {
                prefetch(words, ahead + at, width);
            }
        }
        let vector = &words[start + at..][..width];
        let (vector_full, vector_part) = vector.as_chunks::<LANES>();
        let vector_full = &vector_full[..FULL];
        let weight = if S::WEIGHTED { L::splat(source.weight(i)) } else { L::splat(1.0) };
        let count = if S::MEAN { L::splat(source.count(i)) } else { L::splat(1.0) };
        for (lanes, from) in full.iter_mut().zip(vector_full) {
            *lanes = lanes.add(scale::<L, S>(L::load(from), weight, count));
        }
        if TAIL {
            part = part.add(scale::<L, S>(L::load_part(vector_part), weight, count));
        }
    }
    for (lanes, to) in full.iter().zip(sum_full) {
        lanes.store(to);
    }
    if TAIL {
        part.store_part(sum_part);
    }
}

/// Returns `weight * vector / count`, without what `S` does not ask for.
#[inline(always)]
fn scale<L: Lanes, S: Source>(vector: L, weight: L, count: L) -> L {
    let vector = if S::WEIGHTED { weight.mul(vector) } else { vector };
    if S::MEAN {
        vector.div(count)
    } else {
        vector
    }
}
