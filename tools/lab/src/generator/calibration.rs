//! Calibration of the generated log against the real one.
//!
//! Measures what the fit was made on, and the AUC of a logistic regression trained on the first
//! part and tested on the last. `cargo run --release -p tierbed-lab --example calibrate` prints
//! it for a generator or for a real log; a test holds the generator to it.

#![expect(clippy::indexing_slicing, reason = "slots are hashes reduced to the number of weights")]

use std::collections::HashMap;

use tierbed_core::Result;

use super::shape::FEATURE_COUNT;
use tierbed_data::SampleBatch;

/// Weights of the logistic regression, hashed: collisions are rare for what is learnable.
const WEIGHT_COUNT: usize = 1 << 22;
const BATCH_LEN: usize = 1 << 10;

/// What a log looks like, measured.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Calibration {
    /// Share of clicks.
    pub click_share: f64,
    /// Present tokens of a sample, on average.
    pub tokens_per_sample: f64,
    /// Share of accesses on the most accessed 1 % of the ids seen.
    pub top_1_percent_share: f64,
    /// Share of accesses on the most accessed 10 % of the ids seen.
    pub top_10_percent_share: f64,
    /// Share of the ids seen that were seen once.
    pub seen_once_share: f64,
    /// Distinct ids per feature, missing left out.
    pub distinct_counts: [u64; FEATURE_COUNT],
    /// Share of a feature's accesses on its most accessed id, missing left out.
    pub top_shares: [f64; FEATURE_COUNT],
    /// Share of samples whose id 0 stands for missing.
    pub missing_shares: [f64; FEATURE_COUNT],
    /// Test AUC of a logistic regression, one pass over the first 4/5, tested on the rest.
    pub logistic_auc: f64,
}

/// Measures `sample_count` samples. `fill(first, count, batch)` gives samples from `first` on, in
/// order; `has_missing[f]` tells whether id 0 of feature `f` stands for missing. Holds the count
/// of every id: for samples up to a few million.
///
/// # Errors
/// Those of `fill`.
pub fn measure(
    sample_count: usize,
    has_missing: [bool; FEATURE_COUNT],
    fill: &mut dyn FnMut(u64, usize, &mut SampleBatch) -> Result<()>,
) -> Result<Calibration> {
    let mut counts: Vec<HashMap<i64, u64>> = vec![HashMap::new(); FEATURE_COUNT];
    let mut regression = Regression::new();
    let mut scores = Vec::new();
    let mut click_count = 0.0;
    let train_count = sample_count / 5 * 4;
    let mut batch = SampleBatch::new(super::Generator::shape());
    let mut first = 0;
    while first < sample_count {
        let bound = if first < train_count { train_count } else { sample_count };
        fill(first as u64, BATCH_LEN.min(bound - first), &mut batch)?;
        for (counts, ids) in counts.iter_mut().zip(batch.values.chunks_exact(batch.len().max(1))) {
            for id in ids {
                *counts.entry(*id).or_default() += 1;
            }
        }
        for (at, label) in batch.label.iter().enumerate() {
            click_count += f64::from(*label);
            let score = regression.score(&batch, at);
            if first < train_count {
                regression.learn(*label - sigmoid(score));
            } else {
                scores.push((score, *label > 0.5));
            }
        }
        first += batch.len().max(1);
    }
    let mut result = summarise(&mut counts, has_missing, sample_count as f64);
    result.click_share = click_count / sample_count as f64;
    result.logistic_auc = auc(&mut scores);
    Ok(result)
}

fn summarise(
    counts: &mut [HashMap<i64, u64>],
    has_missing: [bool; FEATURE_COUNT],
    sample_count: f64,
) -> Calibration {
    let mut result = Calibration::default();
    let mut all = Vec::new();
    let columns = result.distinct_counts.iter_mut().zip(&mut result.top_shares);
    let columns = columns.zip(&mut result.missing_shares).zip(has_missing);
    for (counts, (((distinct, top_share), missing_share), has_missing)) in
        counts.iter_mut().zip(columns)
    {
        if has_missing {
            *missing_share = counts.remove(&0).unwrap_or(0) as f64 / sample_count;
        }
        let total: u64 = counts.values().sum();
        *distinct = counts.len() as u64;
        *top_share = counts.values().max().copied().unwrap_or(0) as f64 / total.max(1) as f64;
        all.extend(counts.values().copied());
    }
    all.sort_unstable_by(|a, b| b.cmp(a));
    let total: u64 = all.iter().sum();
    let share = |ids: usize| all.iter().take(ids).sum::<u64>() as f64 / total.max(1) as f64;
    result.tokens_per_sample = total as f64 / sample_count;
    result.top_1_percent_share = share(all.len() / 100);
    result.top_10_percent_share = share(all.len() / 10);
    let once = all.iter().filter(|count| **count == 1).count();
    result.seen_once_share = once as f64 / all.len().max(1) as f64;
    result
}

/// Logistic regression on hashed ids and dense features, Adagrad, one sample at a time.
struct Regression {
    weights: Vec<f32>,
    squares: Vec<f32>,
    /// Slot and input of the sample last scored.
    inputs: Vec<(usize, f32)>,
}

impl Regression {
    fn new() -> Self {
        Self {
            weights: vec![0.0; WEIGHT_COUNT],
            squares: vec![1e-2; WEIGHT_COUNT],
            inputs: Vec::new(),
        }
    }

    fn score(&mut self, batch: &SampleBatch, at: usize) -> f32 {
        self.inputs.clear();
        let column = batch.values.iter().skip(at).step_by(batch.len());
        for (feature, id) in (1u64..).zip(column) {
            let hash = tierbed_core::env::mix64((feature << 40) ^ *id as u64);
            self.inputs.push((hash as usize % WEIGHT_COUNT, 1.0));
        }
        let dense_count = batch.shape().dense_count;
        let dense = batch.dense.iter().skip(at * dense_count).take(dense_count);
        for (feature, value) in dense.enumerate() {
            // Each integer also as a class of its own: the effect of a missing one is not linear.
            let class = (value * 3.0) as usize;
            let hash = tierbed_core::env::mix64(((feature as u64) << 20) ^ class as u64);
            self.inputs.push((hash as usize % WEIGHT_COUNT, 1.0));
        }
        self.inputs.iter().map(|(slot, input)| self.weights[*slot] * input).sum()
    }

    fn learn(&mut self, error: f32) {
        for (slot, input) in &self.inputs {
            let gradient = error * input;
            self.squares[*slot] += gradient * gradient;
            self.weights[*slot] += 0.03 * gradient / self.squares[*slot].sqrt();
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the chance that a click scores above a non-click; ties count half.
fn auc(scores: &mut [(f32, bool)]) -> f64 {
    scores.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut below, mut pairs) = (0.0, 0.0);
    let (mut clicks, mut others) = (0.0, 0.0);
    for group in scores.chunk_by(|a, b| a.0 == b.0) {
        let group_clicks = group.iter().filter(|(_, is_click)| *is_click).count() as f64;
        let group_others = group.len() as f64 - group_clicks;
        pairs += group_clicks * (below + group_others / 2.0);
        below += group_others;
        clicks += group_clicks;
        others += group_others;
    }
    if clicks * others == 0.0 {
        0.5
    } else {
        pairs / (clicks * others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auc_counts_pairs_and_halves_ties() {
        let mut scores = [(0.1, false), (0.4, true), (0.4, false), (0.9, true)];
        assert!((auc(&mut scores) - 3.5 / 4.0).abs() < 1e-12);
        assert!((auc(&mut [(1.0, true)]) - 0.5).abs() < 1e-12);
    }
}
