//! The click model of generated samples.
//!
//! The log-odds of a click are a sum of hashed effects of the frequent tokens, of the integers'
//! deviations, and of products of hidden two-dimensional vectors of a few pairs of features. The
//! first two are what a logistic regression finds, the third is for models that multiply.
//! The click itself is a coin with that probability, which is the noise.

#![expect(clippy::indexing_slicing, reason = "interactions name two of the 26 columns")]

use tierbed_core::env::mix64;

use super::integers::Integers;
use super::shape::{CLICK_SHARE, EFFECT_RANK_MAX, FEATURES, FEATURE_COUNT, INTERACTIONS};
use super::{Draw, Generator, MISSING};

/// Samples the bias is fitted on.
const BIAS_SAMPLE_COUNT: u64 = 1 << 14;
/// Multiplies all effects: places the AUC of a logistic regression
/// (`docs/reference/generator.md`).
const EFFECT_SCALE: f64 = 0.85;

/// The planted signal of one seed.
#[derive(Debug, Clone)]
pub(super) struct Signal {
    seeds: [u64; FEATURE_COUNT],
    weights: [f64; FEATURE_COUNT],
    bias: f64,
}

impl Signal {
    /// Builds the signal of `seed`, without bias.
    pub(super) fn new(seed: u64) -> Self {
        let mut seeds = [0; FEATURE_COUNT];
        let mut weights = [0.0; FEATURE_COUNT];
        for (at, slot) in seeds.iter_mut().enumerate() {
            *slot = mix64(seed ^ mix64(0x6566_6665_6374 + at as u64));
        }
        for feature in &FEATURES {
            if let Some(weight) = weights.get_mut(feature.at) {
                *weight = feature.effect;
            }
        }
        Self { seeds, weights, bias: 0.0 }
    }

    /// Returns the probability of a click.
    pub(super) fn click_probability(&self, draw: &Draw, integers: &Integers) -> f64 {
        sigmoid(self.bias + self.log_odds(draw, integers))
    }

    fn log_odds(&self, draw: &Draw, integers: &Integers) -> f64 {
        let mut hashes = [0; FEATURE_COUNT];
        let mut sum = integers.effect(&draw.levels);
        let tokens = draw.tokens.iter().zip(&draw.ranks);
        let features = self.seeds.iter().zip(&self.weights).zip(&mut hashes);
        for ((token, rank), ((seed, weight), hash)) in tokens.zip(features) {
            // A token that drift made popular has its rank, not its index, in the head.
            if *token == MISSING || (*token).min(*rank) < EFFECT_RANK_MAX {
                *hash = mix64(seed ^ u64::from(*token));
                sum += weight * normal(*hash);
            }
        }
        for (left, right, weight) in INTERACTIONS {
            let (left, right) = (hashes[left], hashes[right]);
            if left != 0 && right != 0 {
                sum += weight * product(mix64(left), mix64(right));
            }
        }
        EFFECT_SCALE * sum
    }
}

/// Returns the generator's signal with the bias that gives the published share of clicks.
pub(super) fn with_bias(generator: &Generator) -> Signal {
    let mut signal = generator.signal.clone();
    let odds: Vec<f64> = (0..BIAS_SAMPLE_COUNT)
        .map(|number| signal.log_odds(&generator.draw(number), &generator.integers))
        .collect();
    let (mut low, mut high) = (-20.0, 20.0);
    for _ in 0..50 {
        signal.bias = (low + high) / 2.0;
        let clicks: f64 = odds.iter().map(|odds| sigmoid(odds + signal.bias)).sum();
        if clicks < CLICK_SHARE * odds.len() as f64 {
            low = signal.bias;
        } else {
            high = signal.bias;
        }
    }
    signal
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

/// Turns 64 random bits into a value of mean 0 and variance 1, close to normal: the sum of four
/// uniform ones has variance 1/3.
fn normal(hash: u64) -> f64 {
    let sum = (hash & 0xffff) + ((hash >> 16) & 0xffff) + ((hash >> 32) & 0xffff) + (hash >> 48);
    (sum as f64 / 65_536.0 - 2.0) * 1.732_050_807_568_877_2
}

/// Returns the inner product of two hidden vectors of two dimensions, variance 1.
fn product(left: u64, right: u64) -> f64 {
    let part = |hash: u64, at: u32| {
        let sum = ((hash >> (32 * at)) & 0xffff) + ((hash >> (32 * at + 16)) & 0xffff);
        // The sum of two uniform values has variance 1/6.
        (sum as f64 / 65_536.0 - 1.0) * 2.449_489_742_783_178
    };
    (part(left, 0) * part(right, 0) + part(left, 1) * part(right, 1))
        * core::f64::consts::FRAC_1_SQRT_2
}
