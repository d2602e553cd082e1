//! Element-wise optimizer rules applied to a whole row.

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
    let grad = &grad[..dim];
    if dim < LANES {
        return step_part(rule, weights, state, grad, decay);
    }
    let mut row = Elements { weights, state };
    // What is behind the last whole vector is stepped with elements before it: a vector that ends
    // with the row. Elements do not depend on each other, so both of their steps are the same.
    let last = dim - LANES;
    let tail = (!dim.is_multiple_of(LANES)).then(|| row.step(rule, grad, decay, last));
    for vector in 0..dim / LANES {
        let next = row.step(rule, grad, decay, vector * LANES);
        row.store(vector * LANES, next.0, next.1);
    }
    if let Some(next) = tail {
        row.store(last, next.0, next.1);
    }
}

/// Weights and state of a row.
struct Elements<'a, const S: usize> {
    weights: &'a mut [f32],
    state: [&'a mut [f32]; S],
}

impl<const S: usize> Elements<'_, S> {
    /// Returns elements `at..at + 16` after their step.
    #[inline(always)]
    fn step<L: Lanes, D: Decay, R: ElementRule<L, S>>(
        &self,
        rule: &R,
        grad: &[f32],
        decay: D,
        at: usize,
    ) -> (L, [L; S]) {
        let old = load::<L>(self.weights, at);
        let mut lanes = [old; S];
        for (lanes, words) in lanes.iter_mut().zip(&self.state) {
            *lanes = load(words, at);
        }
        rule.step(old, lanes, decay.decay(load(grad, at), old))
    }

    #[inline(always)]
    fn store<L: Lanes>(&mut self, at: usize, weights: L, state: [L; S]) {
        store(weights, self.weights, at);
        for (lanes, words) in state.into_iter().zip(&mut self.state) {
            store(lanes, words, at);
        }
    }
}

#[inline(always)]
fn load<L: Lanes>(words: &[f32], at: usize) -> L {
    match words[at..].first_chunk() {
        Some(words) => L::load(words),
        None => panic!("a vector of a row ends with it"),
    }
}

#[inline(always)]
fn store<L: Lanes>(lanes: L, words: &mut [f32], at: usize) {
    match words[at..].first_chunk_mut() {
        Some(words) => lanes.store(words),
        None => panic!("a vector of a row ends with it"),
    }
}

/// Steps a row shorter than a vector.
#[inline(always)]
fn step_part<L: Lanes, D: Decay, R: ElementRule<L, S>, const S: usize>(
    rule: &R,
    weights: &mut [f32],
    state: [&mut [f32]; S],
    grad: &[f32],
    decay: D,
) {
    let dim = weights.len();
    let old = L::load_part(weights);
    let mut lanes = [old; S];
    for (lanes, words) in lanes.iter_mut().zip(&state) {
        *lanes = L::load_part(&words[..dim]);
    }
    let (new, lanes) = rule.step(old, lanes, decay.decay(L::load_part(grad), old));
    new.store_part(weights);
    for (lanes, words) in lanes.iter().zip(state) {
        lanes.store_part(&mut words[..dim]);
    }
}

/// Returns the mean of the squared decayed gradient, summed in the order of `Kernels::dot`
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
