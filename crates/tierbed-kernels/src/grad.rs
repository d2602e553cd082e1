//! Gradients of rows from the gradient of the pooled vectors.
//!
//! The backward of pooling, for rows that occur several times in a batch: the gradient of a row
//! is the sum over its occurrences, added in the order they are given (index order, so that one
//! batch has one result). Per occurrence in a bag of `n` indices with weight `w` and upstream
//! gradient `g`:
//!
//! | pooling | unweighted | weighted |
//! |---|---|---|
//! | sum | `g` | `w * g` |
//! | mean | `g / n` | `(w * g) / n` |
//! | none | `g` of the index | `g` of the index |

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per vector, by slicing")]

use tierbed_core::{Bags, Error, Result};

use crate::accumulate::{add_vectors, by_shape, Begin, Shaped, Source, BLOCK_LANES};
use crate::layout::{index_count, Columns, Pooling};
use crate::simd::{Job, Lanes, LANES};
use crate::Kernels;

/// The gradients of one batch.
#[derive(Debug)]
pub struct Grads<'a> {
    /// Of the output: `[B, output_dim]`, or `[E, D]` without pooling.
    pub output: &'a [f32],
    /// Receives the gradient of the weights, `[E]`, from the rows before the step.
    pub weights: Option<&'a mut [f32]>,
}

impl Grads<'_> {
    /// Checks that the gradient is finite, and so are the weights it is multiplied by, and that
    /// weights whose gradient is wanted are there, one for each of the indices.
    ///
    /// # Errors
    /// `Invalid` otherwise.
    pub fn check(&self, bags: &Bags<'_>) -> Result<()> {
        check_finite(self.output)?;
        self.check_weights(bags)
    }

    /// Checks the weights, as [`check`](Self::check) does: of a step that checks the gradient as it
    /// is added.
    ///
    /// # Errors
    /// `Invalid` otherwise.
    pub fn check_weights(&self, bags: &Bags<'_>) -> Result<()> {
        if bags.weights.is_some_and(|weights| !Kernels::detect().are_finite(weights)) {
            return Err(Error::invalid("weights of ids hold nan or inf; no row was changed"));
        }
        let Some(weights) = &self.weights else { return Ok(()) };
        if bags.weights.is_none() || weights.len() != bags.indices.len() {
            return Err(Error::invalid(
                "the gradient of weights needs weights and one value per index",
            )
            .with("indices", bags.indices.len())
            .with("found", weights.len()));
        }
        Ok(())
    }
}

/// Checks that a gradient holds numbers only: what enters a row stays there.
///
/// # Errors
/// `Invalid` for one that holds nan or inf.
pub fn check_finite(gradient: &[f32]) -> Result<()> {
    if Kernels::detect().are_finite(gradient) {
        return Ok(());
    }
    Err(not_finite())
}

/// Returns the error of a gradient that holds nan or inf, whose step was not made.
#[must_use]
pub fn not_finite() -> Error {
    Error::invalid("gradient of rows holds nan or inf; no row was changed").with(
        "remedy",
        "find where the loss overflows, or skip such steps with \
         set_grad_scaler or on_nonfinite='skip'",
    )
}

/// The sum of `value - value` over `values`: 0 for numbers, nan as soon as one is nan or inf.
///
/// Two instructions for a vector, and no way out of the loop: gradients are numbers nearly always.
struct DifferencesFromItself<'a> {
    values: &'a [f32],
}

impl Job for DifferencesFromItself<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> f32 {
        let (vectors, part) = self.values.as_chunks::<LANES>();
        let (blocks, rest) = vectors.as_chunks::<BLOCK_LANES>();
        let add = |sum: L, values: L| sum.add(values.sub(values));
        // As many sums as a block has vectors, so that none waits for the one before.
        let mut sums = [L::splat(0.0); BLOCK_LANES];
        for block in blocks {
            for (sum, vector) in sums.iter_mut().zip(block) {
                *sum = add(*sum, L::load(vector));
            }
        }
        let sum = rest.iter().fold(L::splat(0.0), |sum, vector| add(sum, L::load(vector)));
        sums.into_iter().fold(add(sum, L::load_part(part)), L::add).reduce_add()
    }
}

/// The gradient of the output of one feature.
#[derive(Debug, Clone, Copy)]
pub struct Upstream<'a> {
    /// Gradient of the pooled output `[B, stride]`; of the gathered rows `[E, stride]` when
    /// pooling is "none".
    pub grad: &'a [f32],
    /// Where the feature's vectors lie in `grad`.
    pub columns: Columns,
    /// How the feature was pooled.
    pub pooling: Pooling,
    /// Bag bounds of the feature, `[B + 1]`; read for "mean" only.
    pub offsets: &'a [i64],
    /// Weight per index, `[E]`, addressed by [`Occurrence::index`]; not read for "none".
    pub weights: Option<&'a [f32]>,
}

/// One use of a row in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occurrence {
    /// Bag of the feature, from 0: the row of [`Upstream::grad`] and position in
    /// [`Upstream::offsets`].
    pub bag: u32,
    /// Position in [`Upstream::weights`], and for "none" the row of [`Upstream::grad`].
    pub index: u32,
}

/// The occurrences of `U` rows, one row after the other.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    /// All occurrences, in index order within each row.
    pub occurrences: &'a [Occurrence],
    /// Row `u` has `occurrences[bounds[u]..bounds[u + 1]]`; `[U + 1]`, not decreasing.
    pub bounds: &'a [usize],
}

impl Kernels {
    /// Tells whether no value is nan or inf.
    pub(crate) fn are_finite(self, values: &[f32]) -> bool {
        self.run(DifferencesFromItself { values }) == 0.0
    }

    /// Adds the gradient of one row over its `occurrences`, in order, to what is in `sum`.
    ///
    /// A row that several features share is summed by one call per feature, in feature order:
    /// the first by [`sum_grads_grouped`](Self::sum_grads_grouped), the others by this.
    ///
    /// # Panics
    /// As [`sum_grads_grouped`](Self::sum_grads_grouped).
    pub fn add_grads(self, upstream: &Upstream<'_>, occurrences: &[Occurrence], sum: &mut [f32]) {
        let groups = Groups { occurrences, bounds: &[0, occurrences.len()] };
        self.accumulate_grads(upstream, groups, Begin::There, sum);
    }

    /// Sums the gradients of `U` rows into `sums`, `[U, dim]`, overwritten, each over its
    /// occurrences in order, with +0 when there are none.
    ///
    /// # Panics
    /// When `sums` is not `[U, dim]`, or an occurrence lies outside what `upstream` holds.
    pub fn sum_grads_grouped(self, upstream: &Upstream<'_>, groups: Groups<'_>, sums: &mut [f32]) {
        self.accumulate_grads(upstream, groups, Begin::Zero, sums);
    }

    #[inline(always)]
    fn accumulate_grads(
        self,
        upstream: &Upstream<'_>,
        groups: Groups<'_>,
        begin: Begin,
        sums: &mut [f32],
    ) {
        upstream.columns.check();
        let dim = upstream.columns.dim;
        let row_count = groups.bounds.len().saturating_sub(1);
        assert_eq!(sums.len(), row_count * dim, "sums must be [U, dim]");
        let Groups { occurrences, bounds } = groups;
        match (upstream.pooling, upstream.weights) {
            (Pooling::None, _) => {
                let source = PerIndex { upstream, occurrences };
                self.run(AddGrads { source, bounds, dim, begin, sums });
            }
            (Pooling::Sum, None) => {
                let source = PerBag::<false> { upstream, weights: &[], occurrences };
                self.run(AddGrads { source, bounds, dim, begin, sums });
            }
            (Pooling::Mean, None) => {
                let source = PerBag::<true> { upstream, weights: &[], occurrences };
                self.run(AddGrads { source, bounds, dim, begin, sums });
            }
            (Pooling::Sum, Some(weights)) => {
                let source = Weighted(PerBag::<false> { upstream, weights, occurrences });
                self.run(AddGrads { source, bounds, dim, begin, sums });
            }
            (Pooling::Mean, Some(weights)) => {
                let source = Weighted(PerBag::<true> { upstream, weights, occurrences });
                self.run(AddGrads { source, bounds, dim, begin, sums });
            }
        }
    }
}

/// Gradients of bags, as they are or divided by the bag's count.
struct PerBag<'a, const MEAN: bool> {
    upstream: &'a Upstream<'a>,
    weights: &'a [f32],
    occurrences: &'a [Occurrence],
}

impl<const MEAN: bool> Source for PerBag<'_, MEAN> {
    const MEAN: bool = MEAN;

    #[inline(always)]
    fn words(&self) -> &[f32] {
        self.upstream.grad
    }

    #[inline(always)]
    fn start(&self, i: usize) -> Option<usize> {
        let occurrence = self.occurrences.get(i)?;
        Some(self.upstream.columns.start(occurrence.bag as usize))
    }

    #[inline(always)]
    fn weight(&self, i: usize) -> f32 {
        self.weights[self.occurrences[i].index as usize]
    }

    #[inline(always)]
    fn count(&self, i: usize) -> f32 {
        index_count(self.upstream.offsets, self.occurrences[i].bag as usize) as f32
    }
}

/// Gradients of bags times the weights of the indices.
struct Weighted<S>(S);

impl<S: Source> Source for Weighted<S> {
    const WEIGHTED: bool = true;
    const MEAN: bool = S::MEAN;
    const PREFETCH_AHEAD: usize = S::PREFETCH_AHEAD;

    #[inline(always)]
    fn words(&self) -> &[f32] {
        self.0.words()
    }

    #[inline(always)]
    fn start(&self, i: usize) -> Option<usize> {
        self.0.start(i)
    }

    #[inline(always)]
    fn weight(&self, i: usize) -> f32 {
        self.0.weight(i)
    }

    #[inline(always)]
    fn count(&self, i: usize) -> f32 {
        self.0.count(i)
    }
}

/// Gradients of indices.
struct PerIndex<'a> {
    upstream: &'a Upstream<'a>,
    occurrences: &'a [Occurrence],
}

impl Source for PerIndex<'_> {
    #[inline(always)]
    fn words(&self) -> &[f32] {
        self.upstream.grad
    }

    #[inline(always)]
    fn start(&self, i: usize) -> Option<usize> {
        let occurrence = self.occurrences.get(i)?;
        Some(self.upstream.columns.start(occurrence.index as usize))
    }
}

struct AddGrads<'a, S> {
    source: S,
    bounds: &'a [usize],
    dim: usize,
    begin: Begin,
    sums: &'a mut [f32],
}

impl<S: Source> Job for AddGrads<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let dim = self.dim;
        by_shape::<L, _>(self, dim);
    }
}

impl<S: Source> Shaped for AddGrads<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run_shaped<L: Lanes, const REST: usize, const TAIL: bool>(self) {
        // By position, as cutting `sums` into chunks would begin with a division per call.
        for (u, bounds) in self.bounds.windows(2).enumerate() {
            let sum = &mut self.sums[u * self.dim..][..self.dim];
            add_vectors::<L, S, REST, TAIL>(&self.source, bounds[0]..bounds[1], self.begin, sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accumulate::BLOCK;
    use crate::Isa;

    #[test]
    fn one_value_that_is_no_number_is_found_wherever_it_is() {
        let edges = [0.0, -0.0, f32::MIN_POSITIVE, 1e-45, -1e-45, f32::MAX, f32::MIN];
        let wrongs = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for len in [0, 1, LANES, BLOCK - 1, BLOCK, 3 * BLOCK + LANES + 1, 5 * BLOCK - 1] {
            let mut values: Vec<f32> = edges.iter().copied().cycle().take(len).collect();
            for isa in Isa::available() {
                let kernels = Kernels::with_isa(isa).unwrap();
                assert!(kernels.are_finite(&values), "{len} values");
                for (at, wrong) in (0..len).flat_map(|at| wrongs.map(|wrong| (at, wrong))) {
                    let kept = std::mem::replace(&mut values[at], wrong);
                    assert!(!kernels.are_finite(&values), "{wrong} at {at} of {len}");
                    values[at] = kept;
                }
            }
        }
    }
}
