//! Adagrad, one accumulator `s` per weight: `s += g * g`, `w -= lr * (g / (sqrt(s) + eps))`.
//!
//! Source: Duchi, Hazan, Singer, JMLR 2011, as `torch.optim.Adagrad` computes it (`lr_decay` 0).

use super::row::{step_elements, Decay, ElementRule};
use super::{Hyper, Optimizer, RowMut};
use crate::simd::Lanes;

#[derive(Debug, Clone, Copy)]
pub(super) struct Adagrad {
    lr: f32,
    eps: f32,
}

impl Adagrad {
    pub(super) fn new(hyper: &Hyper) -> Self {
        Self { lr: hyper.lr as f32, eps: hyper.eps as f32 }
    }
}

impl Optimizer for Adagrad {
    #[inline(always)]
    fn update<L: Lanes, D: Decay>(&self, row: RowMut<'_>, grad: &[f32], decay: D) {
        let rule = Rule { lr: L::splat(self.lr), eps: L::splat(self.eps) };
        step_elements::<L, D, _, 1>(&rule, row.weights, [row.state], grad, decay);
    }
}

struct Rule<L> {
    lr: L,
    eps: L,
}

impl<L: Lanes> ElementRule<L, 1> for Rule<L> {
    #[inline(always)]
    fn step(&self, weight: L, [sum]: [L; 1], grad: L) -> (L, [L; 1]) {
        let sum = sum.add(grad.mul(grad));
        let step = grad.div(sum.sqrt().add(self.eps));
        (weight.sub(self.lr.mul(step)), [sum])
    }
}
