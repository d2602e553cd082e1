//! Optimizers: a row's gradient in, its weights and state updated in place.
//!
//! One file per optimizer, each with its formula. A step is "fused": decay, state and weights of
//! a record change in one pass, and only records that got a gradient change at all ("lazy").
//! [`Prepared`] holds what is the same for every row of a step, computed once in `f64` and
//! rounded to `f32`.
//!
//! Weight decay is L2: when not 0, `g + weight_decay * w` takes the place of `g`.

mod adagrad;
mod adam;
mod add;
mod partial_row_wise_adam;
mod row;
mod row_wise_adagrad;
mod sgd;
mod step;
mod sums;

use tierbed_core::{Error, OptimizerKind, Result};

use crate::simd::{prefetch, Job, Lanes};
use crate::Kernels;
use row::{Decay, NoDecay, L2};

pub use step::FeatureStep;
pub use sums::{RowSums, SumsNeed};

/// Hyperparameters of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f64,
    /// Added to square roots in denominators.
    pub eps: f64,
    /// Decay of the first moment per step (Adam family).
    pub beta1: f64,
    /// Decay of the second moment per step (Adam family).
    pub beta2: f64,
    /// L2 decay of touched rows; 0 for none.
    pub weight_decay: f64,
    /// Number of this step, from 1, for all rows alike: Adam's bias correction.
    pub step: u64,
}

impl Hyper {
    /// Checks the ranges; `step` is not looked at.
    ///
    /// # Errors
    /// `Invalid` when a value is negative or not finite, or a beta is 1 or more.
    pub fn check(&self) -> Result<()> {
        let Self { lr, eps, beta1, beta2, weight_decay, .. } = *self;
        let is_amount = |value: f64| value.is_finite() && value >= 0.0;
        let is_share = |beta: f64| (0.0..1.0).contains(&beta);
        if [lr, eps, weight_decay].into_iter().all(is_amount) && is_share(beta1) && is_share(beta2)
        {
            return Ok(());
        }
        Err(Error::invalid("hyperparameters must be finite and not negative, betas below 1")
            .with("found", format_args!("{self:?}")))
    }
}

impl Default for Hyper {
    /// Those of `torch.optim.SparseAdam`, before the first step is over.
    fn default() -> Self {
        Self { lr: 0.001, eps: 1e-8, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, step: 1 }
    }
}

/// An optimizer with the constants of one step.
#[derive(Debug, Clone, Copy)]
pub struct Prepared {
    update: AnyUpdate,
    weight_decay: f32,
    kind: OptimizerKind,
}

#[derive(Debug, Clone, Copy)]
enum AnyUpdate {
    Sgd(sgd::Sgd),
    Adagrad(adagrad::Adagrad),
    RowWiseAdagrad(row_wise_adagrad::RowWiseAdagrad),
    Adam(adam::Adam),
    PartialRowWiseAdam(partial_row_wise_adam::PartialRowWiseAdam),
}

impl Prepared {
    /// Computes the constants of a step.
    ///
    /// # Panics
    /// When `hyper.step` is 0 and the optimizer corrects bias.
    #[must_use]
    pub fn new(kind: OptimizerKind, hyper: &Hyper) -> Self {
        let update = match kind {
            OptimizerKind::Sgd => AnyUpdate::Sgd(sgd::Sgd::new(hyper)),
            OptimizerKind::Adagrad => AnyUpdate::Adagrad(adagrad::Adagrad::new(hyper)),
            OptimizerKind::RowWiseAdagrad => {
                AnyUpdate::RowWiseAdagrad(row_wise_adagrad::RowWiseAdagrad::new(hyper))
            }
            OptimizerKind::Adam => AnyUpdate::Adam(adam::Adam::new(hyper)),
            OptimizerKind::PartialRowWiseAdam => {
                AnyUpdate::PartialRowWiseAdam(partial_row_wise_adam::PartialRowWiseAdam::new(hyper))
            }
        };
        Self { update, weight_decay: hyper.weight_decay as f32, kind }
    }

    /// Returns the optimizer.
    #[must_use]
    pub fn kind(&self) -> OptimizerKind {
        self.kind
    }
}

/// The rule of one optimizer for one row.
trait Optimizer {
    /// Steps `weights` and `state` (`state_words` of its kind) by `grad`, after `decay`.
    ///
    /// Implementations MUST be `#[inline(always)]`.
    fn update<L: Lanes, D: Decay>(&self, row: RowMut<'_>, grad: &[f32], decay: D);
}

/// The parts of a record an optimizer may change.
struct RowMut<'a> {
    weights: &'a mut [f32],
    state: &'a mut [f32],
}

impl Kernels {
    /// Applies one step to one record, in place.
    ///
    /// `record` is weights, state and anything behind them (the use count), which stays as it is;
    /// `grad` is `[dim]`.
    ///
    /// # Panics
    /// When `record` is shorter than weights and state.
    pub fn apply(self, step: &Prepared, record: &mut [f32], grad: &[f32]) {
        assert!(!grad.is_empty(), "dim must not be 0");
        let rows = RowsMut { arena: record, starts: &[0], grads: grad, dim: grad.len() };
        self.apply_any(step, rows);
    }

    /// Applies one step to the records that start at `starts`, in place.
    ///
    /// `starts` is `[U]`, and `grads` `[U, dim]`; a record named twice is stepped twice.
    ///
    /// # Panics
    /// When `grads` is no whole multiple of `starts`, or a record lies outside `arena`.
    pub fn apply_rows(self, step: &Prepared, arena: &mut [f32], starts: &[usize], grads: &[f32]) {
        if starts.is_empty() {
            return;
        }
        let dim = grads.len() / starts.len();
        assert!(dim > 0 && dim * starts.len() == grads.len(), "grads must be [U, dim]");
        self.apply_any(step, RowsMut { arena, starts, grads, dim });
    }

    #[inline(always)]
    fn apply_any(self, step: &Prepared, rows: RowsMut<'_>) {
        match step.update {
            AnyUpdate::Sgd(optimizer) => self.apply_with(optimizer, step, rows),
            AnyUpdate::Adagrad(optimizer) => self.apply_with(optimizer, step, rows),
            AnyUpdate::RowWiseAdagrad(optimizer) => self.apply_with(optimizer, step, rows),
            AnyUpdate::Adam(optimizer) => self.apply_with(optimizer, step, rows),
            AnyUpdate::PartialRowWiseAdam(optimizer) => self.apply_with(optimizer, step, rows),
        }
    }

    #[inline(always)]
    fn apply_with<O: Optimizer>(self, optimizer: O, step: &Prepared, rows: RowsMut<'_>) {
        let state_words = step.kind.state_words(rows.dim);
        if step.weight_decay == 0.0 {
            self.run(Apply { optimizer, decay: NoDecay, rows, state_words });
        } else {
            self.run(Apply { optimizer, decay: L2(step.weight_decay), rows, state_words });
        }
    }
}

/// How many records ahead the processor is asked to fetch.
const PREFETCH_AHEAD: usize = 4;

struct RowsMut<'a> {
    arena: &'a mut [f32],
    starts: &'a [usize],
    grads: &'a [f32],
    dim: usize,
}

struct Apply<'a, O, D> {
    optimizer: O,
    decay: D,
    rows: RowsMut<'a>,
    state_words: usize,
}

impl<O: Optimizer, D: Decay> Job for Apply<'_, O, D> {
    type Output = ();

    #[inline(always)]
    #[expect(clippy::indexing_slicing, reason = "bounds are checked once per record, by slicing")]
    fn run<L: Lanes>(self) {
        let RowsMut { arena, starts, grads, dim } = self.rows;
        let words = dim + self.state_words;
        for (i, &start) in starts.iter().enumerate() {
            let grad = &grads[i * dim..][..dim];
            if let Some(&ahead) = starts.get(i + PREFETCH_AHEAD) {
                prefetch(arena, ahead, words);
            }
            let (weights, state) = arena[start..][..words].split_at_mut(dim);
            self.optimizer.update::<L, D>(RowMut { weights, state }, grad, self.decay);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyperparameters_out_of_range_are_refused() {
        let fine = Hyper::default();
        fine.check().unwrap();
        for bad in [
            Hyper { lr: -0.1, ..fine },
            Hyper { lr: f64::NAN, ..fine },
            Hyper { eps: f64::INFINITY, ..fine },
            Hyper { beta1: 1.0, ..fine },
            Hyper { beta2: -0.5, ..fine },
            Hyper { weight_decay: -1.0, ..fine },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
