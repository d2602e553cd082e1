//! Plain gradient descent, no state: `w -= lr * g`.
//!
//! Source: `torch.optim.SGD` without momentum.

use super::row::{step_elements, Decay, ElementRule};
use super::{Hyper, Optimizer, RowMut};
use crate::simd::Lanes;

#[derive(Debug, Clone, Copy)]
pub(super) struct Sgd {
    lr: f32,
}

impl Sgd {
    pub(super) fn new(hyper: &Hyper) -> Self {
        Self { lr: hyper.lr as f32 }
    }
}

impl Optimizer for Sgd {
    #[inline(always)]
    fn update<L: Lanes, D: Decay>(&self, row: RowMut<'_>, grad: &[f32], decay: D) {
        step_elements::<L, D, _, 0>(&Rule { lr: L::splat(self.lr) }, row.weights, [], grad, decay);
    }
}

struct Rule<L> {
    lr: L,
}

impl<L: Lanes> ElementRule<L, 0> for Rule<L> {
    #[inline(always)]
    fn step(&self, weight: L, state: [L; 0], grad: L) -> (L, [L; 0]) {
        (weight.sub(self.lr.mul(grad)), state)
    }
}
