//! Optimizers against their formulas: in `f32`, to the last bit; in `f64`, closely.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

mod common;

use common::{all_kernels, assert_same_bits, dot_in_order, draw, numbers, Numbers};
use proptest::prelude::*;
use tierbed_core::OptimizerKind;
use tierbed_kernels::{Hyper, Kernels, Prepared};

/// The constants of a step as the formulas name them, rounded to `f32`.
struct Constants {
    lr: f32,
    eps: f32,
    gain1: f32,
    gain2: f32,
    step_size: f32,
    weight_decay: f32,
}

fn constants(hyper: &Hyper) -> Constants {
    let (mut power1, mut power2) = (1.0f64, 1.0f64);
    for _ in 0..hyper.step {
        power1 *= hyper.beta1;
        power2 *= hyper.beta2;
    }
    Constants {
        lr: hyper.lr as f32,
        eps: hyper.eps as f32,
        gain1: (1.0 - hyper.beta1) as f32,
        gain2: (1.0 - hyper.beta2) as f32,
        step_size: (hyper.lr * (1.0 - power2).sqrt() / (1.0 - power1)) as f32,
        weight_decay: hyper.weight_decay as f32,
    }
}

/// One step, one element after the other.
fn step_plainly(kind: OptimizerKind, c: &Constants, record: &mut [f32], grad: &[f32]) {
    let dim = grad.len();
    let (w, state) = record.split_at_mut(dim);
    let decayed = |(&g, &w): (&f32, &f32)| g + c.weight_decay * w;
    let g: Vec<f32> = if c.weight_decay == 0.0 {
        grad.to_vec()
    } else {
        grad.iter().zip(w.iter()).map(decayed).collect()
    };
    let mean_square = dot_in_order(&g, &g) / dim as f32;
    match kind {
        OptimizerKind::Sgd => (0..dim).for_each(|i| w[i] -= c.lr * g[i]),
        OptimizerKind::Adagrad => {
            for i in 0..dim {
                state[i] += g[i] * g[i];
                w[i] -= c.lr * (g[i] / (state[i].sqrt() + c.eps));
            }
        }
        OptimizerKind::RowWiseAdagrad => {
            state[0] += mean_square;
            let rate = c.lr / (state[0].sqrt() + c.eps);
            (0..dim).for_each(|i| w[i] -= rate * g[i]);
        }
        OptimizerKind::Adam => {
            for i in 0..dim {
                state[i] += c.gain1 * (g[i] - state[i]);
                state[dim + i] += c.gain2 * (g[i] * g[i] - state[dim + i]);
                w[i] -= c.step_size * (state[i] / (state[dim + i].sqrt() + c.eps));
            }
        }
        OptimizerKind::PartialRowWiseAdam => {
            state[dim] += c.gain2 * (mean_square - state[dim]);
            let rate = c.step_size / (state[dim].sqrt() + c.eps);
            for i in 0..dim {
                state[i] += c.gain1 * (g[i] - state[i]);
                w[i] -= rate * state[i];
            }
        }
    }
}

fn hyper(weight_decay: f64, step: u64) -> Hyper {
    Hyper { lr: 0.05, eps: 1e-8, beta1: 0.9, beta2: 0.999, weight_decay, step }
}

fn kinds() -> impl Strategy<Value = OptimizerKind> {
    prop::sample::select(OptimizerKind::ALL.to_vec())
}

/// A use count that is no harmless number when it is taken for one: it must come out untouched.
const USE_COUNT: u32 = 0x7F80_0001;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn steps_equal_the_formulas(
        (kind, dim, shift) in (kinds(), 1usize..=130, 0usize..5),
        numbers in numbers(),
        weight_decay in prop_oneof![Just(0.0), Just(0.01)],
        seed: u64,
    ) {
        let words = dim + kind.state_words(dim);
        let mut before = draw(numbers, seed, shift + words + 1);
        if numbers == Numbers::Tame {
            // Accumulators of squares are not negative.
            before[shift + dim..].iter_mut().for_each(|word| *word = word.abs());
        }
        before[shift + words] = f32::from_bits(USE_COUNT);
        let mut expected = before.clone();
        for step in 1..=3 {
            let constants = constants(&hyper(weight_decay, step));
            let grad = draw(numbers, seed ^ step, dim);
            step_plainly(kind, &constants, &mut expected[shift..][..words], &grad);
        }
        for kernels in all_kernels() {
            let mut arena = before.clone();
            for step in 1..=3 {
                let prepared = Prepared::new(kind, &hyper(weight_decay, step));
                kernels.apply(&prepared, &mut arena[shift..], &draw(numbers, seed ^ step, dim));
            }
            prop_assert_eq!(arena[shift + words].to_bits(), USE_COUNT);
            let what = format!("{} {kind:?}", kernels.isa().name());
            assert_same_bits(&arena[..shift + words], &expected[..shift + words], &what);
        }
    }

    #[test]
    fn rows_at_once_equal_row_by_row(kind in kinds(), dim in 1usize..=70, seed: u64) {
        let record_words = dim + kind.state_words(dim) + 1;
        let starts: Vec<usize> = [5, 0, 3, 9].iter().map(|row| row * record_words).collect();
        let before: Vec<f32> =
            draw(Numbers::Tame, seed, 10 * record_words).iter().map(|x| x.abs()).collect();
        let grads = draw(Numbers::Tame, seed ^ 1, starts.len() * dim);
        let step = Prepared::new(kind, &hyper(0.0, 2));
        let mut expected = before.clone();
        for (&start, grad) in starts.iter().zip(grads.chunks(dim)) {
            let kernels = Kernels::with_isa(tierbed_kernels::Isa::Scalar).unwrap();
            kernels.apply(&step, &mut expected[start..][..record_words], grad);
        }
        for kernels in all_kernels() {
            let mut arena = before.clone();
            kernels.apply_rows(&step, &mut arena, &starts, &grads);
            assert_same_bits(&arena, &expected, kernels.isa().name());
            kernels.apply_rows(&step, &mut arena, &[], &[]);
            assert_same_bits(&arena, &expected, kernels.isa().name());
        }
    }
}

/// Adam's textbook form in `f64`: corrected moments, `eps` beside the corrected root scaled alike.
#[test]
fn adam_follows_the_textbook() {
    let grads = [0.5, -0.25, 1.5, 0.125, -2.0];
    let (mut w, mut m, mut v) = (1.0f64, 0.0f64, 0.0f64);
    let mut record = [1.0f32, 0.0, 0.0];
    for (step, &g) in (1u64..).zip(&grads) {
        let hyper = hyper(0.0, step);
        m = hyper.beta1 * m + (1.0 - hyper.beta1) * g;
        v = hyper.beta2 * v + (1.0 - hyper.beta2) * g * g;
        let m_hat = m / (1.0 - hyper.beta1.powi(step as i32));
        let v_hat = v / (1.0 - hyper.beta2.powi(step as i32));
        w -= hyper.lr * m_hat / (v_hat.sqrt() + hyper.eps);
        let step = Prepared::new(OptimizerKind::Adam, &hyper);
        Kernels::detect().apply(&step, &mut record, &[g as f32]);
        assert!((f64::from(record[0]) - w).abs() < 1e-5, "{} {w}", record[0]);
    }
}

/// `sum((w - target)^2) / 2` gets small under every optimizer: signs and scales are right.
#[test]
fn every_optimizer_descends() {
    let dim = 19;
    let target = draw(Numbers::Tame, 3, dim);
    for kind in OptimizerKind::ALL {
        for kernels in all_kernels() {
            let mut record = vec![0.0; dim + kind.state_words(dim) + 1];
            for step in 1..=400 {
                let prepared = Prepared::new(kind, &Hyper { lr: 0.1, ..hyper(0.0, step) });
                let grad: Vec<f32> = (0..dim).map(|i| record[i] - target[i]).collect();
                kernels.apply(&prepared, &mut record, &grad);
            }
            let loss: f32 = (0..dim).map(|i| (record[i] - target[i]).powi(2)).sum();
            assert!(loss < 0.05, "{kind:?}: {loss}");
        }
    }
}

#[test]
#[should_panic(expected = "steps are counted from 1")]
fn step_0_has_no_bias_correction() {
    let _ = Prepared::new(OptimizerKind::Adam, &hyper(0.0, 0));
}
