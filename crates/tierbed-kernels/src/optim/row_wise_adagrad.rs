//! Row-wise Adagrad, one `s` per row: `s += mean(g * g)`, `w -= (lr / (sqrt(s) + eps)) * g`.
//!
//! Source: FBGEMM `EXACT_ROWWISE_ADAGRAD`, the usual optimizer of recommender tables: the state
//! costs one word per row. The mean is `sum / dim`, the sum in the order of `Kernels::dot`.

use super::row::{mean_square, step_elements, Decay, ElementRule};
use super::{Hyper, Optimizer, RowMut};
use crate::simd::Lanes;

#[derive(Debug, Clone, Copy)]
pub(super) struct RowWiseAdagrad {
    lr: f32,
    eps: f32,
}

impl RowWiseAdagrad {
    pub(super) fn new(hyper: &Hyper) -> Self {
        Self { lr: hyper.lr as f32, eps: hyper.eps as f32 }
    }
}

impl Optimizer for RowWiseAdagrad {
    #[inline(always)]
    fn update<L: Lanes, D: Decay>(&self, row: RowMut<'_>, grad: &[f32], decay: D) {
        let [sum, ..] = row.state else { return };
        *sum += mean_square::<L, D>(row.weights, grad, decay);
        let rule = Rule { rate: L::splat(self.lr / (sum.sqrt() + self.eps)) };
        step_elements::<L, D, _, 0>(&rule, row.weights, [], grad, decay);
    }
}

struct Rule<L> {
    rate: L,
}

impl<L: Lanes> ElementRule<L, 0> for Rule<L> {
    #[inline(always)]
    fn step(&self, weight: L, state: [L; 0], grad: L) -> (L, [L; 0]) {
        (weight.sub(self.rate.mul(grad)), state)
    }
}
