//! Batches of samples in memory.
//!
//! ```text
//! label   [B]        f32   0 or 1
//! dense   [B, N]     f32   sample-major, log1p(max(x, 0)); missing is 0
//! values  [F * B]    i64   feature-major: id of feature f of sample b at f * B + b
//! offsets [F * B + 1] i64  bag bounds; one id per bag, so 0, 1, 2, ..., F * B
//! ```
//! The sparse half is the jagged layout of [`tierbed_core::Bags`].

use tierbed_core::{Bags, Result};

/// How many columns a sample has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Dense features `N`; may be 0.
    pub dense_count: usize,
    /// Categorical features `F`, each with exactly one id per sample; at least 1.
    pub feature_count: usize,
}

/// A batch of samples as flat arrays. Reused from batch to batch: filling it overwrites it.
#[derive(Debug, Clone)]
pub struct SampleBatch {
    shape: BatchShape,
    /// Labels, `[B]`, 0 or 1.
    pub label: Vec<f32>,
    /// Dense features, `[B, N]`.
    pub dense: Vec<f32>,
    /// Row ids, `[F * B]`, feature-major.
    pub values: Vec<i64>,
    offsets: Vec<i64>,
}

impl SampleBatch {
    /// Builds an empty batch (`B` = 0).
    #[must_use]
    pub fn new(shape: BatchShape) -> Self {
        assert!(shape.feature_count > 0, "a batch needs a categorical feature");
        Self { shape, label: Vec::new(), dense: Vec::new(), values: Vec::new(), offsets: vec![0] }
    }

    /// Returns the shape.
    #[must_use]
    pub fn shape(&self) -> BatchShape {
        self.shape
    }

    /// Returns the number of samples `B`.
    #[must_use]
    pub fn len(&self) -> usize {
        self.label.len()
    }

    /// Tells whether the batch holds no sample.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.label.is_empty()
    }

    /// Makes room for exactly `sample_count` samples; the contents are then unspecified.
    pub fn resize(&mut self, sample_count: usize) {
        let id_count = sample_count * self.shape.feature_count;
        self.label.resize(sample_count, 0.0);
        self.dense.resize(sample_count * self.shape.dense_count, 0.0);
        self.values.resize(id_count, 0);
        if self.offsets.len() != id_count + 1 {
            self.offsets.clear();
            self.offsets.extend(0..=id_count as i64);
        }
    }

    /// Returns the bag bounds, `[F * B + 1]`.
    #[must_use]
    pub fn offsets(&self) -> &[i64] {
        &self.offsets
    }

    /// Returns the sparse half as bags.
    ///
    /// # Errors
    /// `Invalid` when the caller changed the length of `values`.
    pub fn bags(&self) -> Result<Bags<'_>> {
        Bags::new(&self.values, &self.offsets, None, self.shape.feature_count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resizes_to_one_id_per_bag() {
        let mut batch = SampleBatch::new(BatchShape { dense_count: 2, feature_count: 3 });
        for sample_count in [4, 0, 2] {
            batch.resize(sample_count);
            assert_eq!(batch.len(), sample_count);
            assert_eq!(batch.is_empty(), sample_count == 0);
            assert_eq!(batch.dense.len(), 2 * sample_count);
            let bags = batch.bags().unwrap();
            assert_eq!(bags.batch_size(), sample_count);
            assert_eq!(bags.indices.len(), 3 * sample_count);
        }
    }
}
