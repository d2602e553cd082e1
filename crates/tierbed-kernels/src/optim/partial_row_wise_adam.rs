//! Partial row-wise Adam: a first moment `m` per weight, one second moment `v` per row:
//!
//! ```text
//! m += (1 - beta1) * (g - m)          v += (1 - beta2) * (mean(g * g) - v)
//! w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) / (sqrt(v) + eps) * m
//! ```
//!
//! Source: FBGEMM `PARTIAL_ROWWISE_ADAM`. Differs: bias correction and `eps` as in our Adam
//! (`torch.optim.SparseAdam`), and decay is L2, because one family should have one meaning.
//! State: all `m`, then `v`.

use super::adam::Rates;
use super::row::{mean_square, step_elements, Decay, ElementRule};
use super::{Hyper, Optimizer, RowMut};
use crate::simd::Lanes;

#[derive(Debug, Clone, Copy)]
pub(super) struct PartialRowWiseAdam {
    rates: Rates,
}

impl PartialRowWiseAdam {
    pub(super) fn new(hyper: &Hyper) -> Self {
        Self { rates: Rates::new(hyper) }
    }
}

impl Optimizer for PartialRowWiseAdam {
    #[inline(always)]
    fn update<L: Lanes, D: Decay>(&self, row: RowMut<'_>, grad: &[f32], decay: D) {
        let [first @ .., second] = row.state else { return };
        let Rates { gain1, gain2, step_size, eps } = self.rates;
        *second += gain2 * (mean_square::<L, D>(row.weights, grad, decay) - *second);
        let rule =
            Rule { gain1: L::splat(gain1), rate: L::splat(step_size / (second.sqrt() + eps)) };
        step_elements::<L, D, _, 1>(&rule, row.weights, [first], grad, decay);
    }
}

struct Rule<L> {
    gain1: L,
    rate: L,
}

impl<L: Lanes> ElementRule<L, 1> for Rule<L> {
    #[inline(always)]
    fn step(&self, weight: L, [first]: [L; 1], grad: L) -> (L, [L; 1]) {
        let first = first.add(self.gain1.mul(grad.sub(first)));
        (weight.sub(self.rate.mul(first)), [first])
    }
}
