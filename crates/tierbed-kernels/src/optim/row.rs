//! How does an optimizer's rule for one element become a pass over a row?

#![expect(clippy::indexing_slicing, reason = "lengths are checked once per row, by slicing")]

use crate::simd::{Lanes, LANES};

/// What happens to a gradient before the optimizer sees it.
pub(super) trait Decay: Copy {
    /// Returns the decayed gradient of `weight`.
    fn decay<L: Lanes>(self, grad: L, weight: L) -> L;
}

/// Nothing.
#[derive(Clone, Copy)]
pub(super) struct NoDecay;

impl Decay for NoDecay {
    #[inline(always)]
    fn decay<L: Lanes>(self, grad: L, _weight: L) -> L {
        grad
    }
}

/// `grad + weight_decay * weight`.
#[derive(Clone, Copy)]
pub(super) struct L2(pub(super) f32);

impl Decay for L2 {
    #[inline(always)]
    fn decay<L: Lanes>(self, grad: L, weight: L) -> L {
        grad.add(L::splat(self.0).mul(weight))
    }
}

/// One element's step, with `S` state words beside each weight.
pub(super) trait ElementRule<L: Lanes, const S: usize> {
    /// Returns the next weight and state. MUST be `#[inline(always)]`.
    fn step(&self, weight: L, state: [L; S], grad: L) -> (L, [L; S]);
}

/// Steps all elements of a row; `weights`, each of `state` and `grad` are `[dim]`.
#[inline(always)]
pub(super) fn step_elements<L: Lanes, D: Decay, R: ElementRule<L, S>, const S: usize>(
    rule: &R,
    weights: &mut [f32],
    state: [&mut [f32]; S],
    grad: &[f32],
    decay: D,
) {
    let dim = weights.len();
    let (weights_full, weights_part) = weights.as_chunks_mut::<LANES>();
    let (grad_full, grad_part) = grad[..dim].as_chunks::<LANES>();
    let mut state = state.map(|words| words[..dim].as_chunks_mut::<LANES>());
    for (i, (weight, grad)) in weights_full.iter_mut().zip(grad_full).enumerate() {
        let old = L::load(weight);
        let mut lanes = [old; S];
        for (lanes, (full, _)) in lanes.iter_mut().zip(&state) {
            *lanes = L::load(&full[i]);
        }
        let (new, lanes) = rule.step(old, lanes, decay.decay(L::load(grad), old));
        new.store(weight);
        for (lanes, (full, _)) in lanes.iter().zip(&mut state) {
            lanes.store(&mut full[i]);
        }
    }
    if weights_part.is_empty() {
        return;
    }
    let old = L::load_part(weights_part);
    let mut lanes = [old; S];
    for (lanes, (_, part)) in lanes.iter_mut().zip(&state) {
        *lanes = L::load_part(part);
    }
    let (new, lanes) = rule.step(old, lanes, decay.decay(L::load_part(grad_part), old));
    new.store_part(weights_part);
    for (lanes, (_, part)) in lanes.iter().zip(&mut state) {
        lanes.store_part(part);
    }
}

/// Returns the mean of the squared decayed gradient, summed in the order of `Kernels::sum_squares`
/// and divided by `dim`.
#[inline(always)]
pub(super) fn mean_square<L: Lanes, D: Decay>(weights: &[f32], grad: &[f32], decay: D) -> f32 {
    let (weights_full, weights_part) = weights.as_chunks::<LANES>();
    let (grad_full, grad_part) = grad.as_chunks::<LANES>();
    let mut sum = L::splat(0.0);
    for (weight, grad) in weights_full.iter().zip(grad_full) {
        let grad = decay.decay(L::load(grad), L::load(weight));
        sum = sum.add(grad.mul(grad));
    }
    let grad = decay.decay(L::load_part(grad_part), L::load_part(weights_part));
    sum.add(grad.mul(grad)).reduce_add() / weights.len() as f32
}
