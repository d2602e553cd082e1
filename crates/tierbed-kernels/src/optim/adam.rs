//! Lazy Adam: first moment `m` and second moment `v` per weight, of touched rows only:
//!
//! ```text
//! m += (1 - beta1) * (g - m)          v += (1 - beta2) * (g * g - v)
//! w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * (m / (sqrt(v) + eps))
//! ```
//!
//! Source: Kingma, Ba, ICLR 2015, as `torch.optim.SparseAdam` computes it: `t` is the step of the
//! table, not of the row, and moments of untouched rows do not decay. State: all `m`, then all `v`.

use super::row::{step_elements, Decay, ElementRule};
use super::{Hyper, Optimizer, RowMut};
use crate::simd::Lanes;

#[derive(Debug, Clone, Copy)]
pub(super) struct Adam {
    rates: Rates,
}

/// The constants of the Adam family.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    /// `1 - beta1`.
    pub(super) gain1: f32,
    /// `1 - beta2`.
    pub(super) gain2: f32,
    /// `lr * sqrt(1 - beta2^t) / (1 - beta1^t)`.
    pub(super) step_size: f32,
    pub(super) eps: f32,
}

impl Rates {
    /// Computes them in `f64`; the powers by `libm`, which gives every machine the same bits.
    pub(super) fn new(hyper: &Hyper) -> Self {
        assert!(hyper.step > 0, "steps are counted from 1");
        let step = hyper.step as f64;
        let correction1 = 1.0 - libm::pow(hyper.beta1, step);
        let correction2 = 1.0 - libm::pow(hyper.beta2, step);
        Self {
            gain1: (1.0 - hyper.beta1) as f32,
            gain2: (1.0 - hyper.beta2) as f32,
            step_size: (hyper.lr * correction2.sqrt() / correction1) as f32,
            eps: hyper.eps as f32,
        }
    }
}

impl Adam {
    pub(super) fn new(hyper: &Hyper) -> Self {
        Self { rates: Rates::new(hyper) }
    }
}

impl Optimizer for Adam {
    #[inline(always)]
    fn update<L: Lanes, D: Decay>(&self, row: RowMut<'_>, grad: &[f32], decay: D) {
        let rule = Rule {
            gain1: L::splat(self.rates.gain1),
            gain2: L::splat(self.rates.gain2),
            step_size: L::splat(self.rates.step_size),
            eps: L::splat(self.rates.eps),
        };
        let (first, second) = row.state.split_at_mut(row.weights.len());
        step_elements::<L, D, _, 2>(&rule, row.weights, [first, second], grad, decay);
    }
}

struct Rule<L> {
    gain1: L,
    gain2: L,
    step_size: L,
    eps: L,
}

impl<L: Lanes> ElementRule<L, 2> for Rule<L> {
    #[inline(always)]
    fn step(&self, weight: L, [first, second]: [L; 2], grad: L) -> (L, [L; 2]) {
        let first = first.add(self.gain1.mul(grad.sub(first)));
        let second = second.add(self.gain2.mul(grad.mul(grad).sub(second)));
        let step = first.div(second.sqrt().add(self.eps));
        (weight.sub(self.step_size.mul(step)), [first, second])
    }
}
