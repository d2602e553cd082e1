//! Bags of row ids per sample and feature (TorchRec's jagged layout), and their pooling mode.

use crate::{Error, Result};

/// The indices of a batch in jagged form: `F` features of `B` samples, feature-major.
///
/// Bag `f * B + b` holds `indices[offsets[f * B + b]..offsets[f * B + b + 1]]`.
/// Duplicates and empty bags are allowed. The layout is that of TorchRec's
/// `KeyedJaggedTensor` and of FBGEMM's table-batched operators.
#[derive(Debug, Clone, Copy)]
pub struct Bags<'a> {
    /// Row ids of all bags, `[E]`, not yet checked against a table's row count.
    pub indices: &'a [i64],
    /// Bag bounds, `[F * B + 1]`, from 0 to `E`, not decreasing.
    pub offsets: &'a [i64],
    /// Weight of each index, `[E]`, when pooling is weighted.
    pub weights: Option<&'a [f32]>,
    /// Number of features `F`, at least 1.
    pub feature_count: usize,
}

impl<'a> Bags<'a> {
    /// Checks the shape and wraps it.
    ///
    /// # Errors
    /// `Invalid` when the offsets are not `F * B + 1` non-decreasing values from 0 to `E`, or
    /// the weights are not `[E]`.
    pub fn new(
        indices: &'a [i64],
        offsets: &'a [i64],
        weights: Option<&'a [f32]>,
        feature_count: usize,
    ) -> Result<Self> {
        if feature_count == 0
            || offsets.is_empty()
            || !(offsets.len() - 1).is_multiple_of(feature_count)
        {
            return Err(Error::invalid("offsets must hold features * samples + 1 values")
                .with("offsets", offsets.len())
                .with("features", feature_count));
        }
        if offsets.first() != Some(&0) {
            return Err(Error::invalid("offsets must start at 0"));
        }
        if offsets.last().copied() != i64::try_from(indices.len()).ok() {
            return Err(Error::invalid("the last offset must be the number of indices")
                .with("last_offset", offsets.last().copied().unwrap_or(0))
                .with("indices", indices.len()));
        }
        if let Some(at) = offsets.windows(2).position(|pair| matches!(pair, [a, b] if a > b)) {
            return Err(Error::invalid("offsets must not decrease").with("bag", at));
        }
        if weights.is_some_and(|weights| weights.len() != indices.len()) {
            return Err(Error::invalid("weights must have one value per index")
                .with("weights", weights.map_or(0, <[f32]>::len))
                .with("indices", indices.len()));
        }
        Ok(Self { indices, offsets, weights, feature_count })
    }

    /// Returns the number of samples `B`.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        (self.offsets.len() - 1) / self.feature_count
    }

    /// Returns where the indices of each feature begin, and where the last ones end.
    pub fn bounds(&self) -> impl Iterator<Item = i64> + 'a {
        self.offsets.iter().step_by(self.batch_size().max(1)).copied()
    }

    /// Returns the `B + 1` offsets of feature `feature`.
    ///
    /// # Panics
    /// When there is no such feature.
    #[must_use]
    #[expect(clippy::indexing_slicing, reason = "a bag of another feature would be pooled")]
    pub fn feature_offsets(&self, feature: usize) -> &'a [i64] {
        assert!(feature < self.feature_count, "feature {feature} of {}", self.feature_count);
        let batch = self.batch_size();
        &self.offsets[feature * batch..(feature + 1) * batch + 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_the_jagged_layout() {
        let bags = Bags::new(&[5, 6, 7], &[0, 1, 1, 3, 3], None, 2).unwrap();
        assert_eq!(bags.batch_size(), 2);
        assert_eq!(bags.bounds().collect::<Vec<_>>(), [0, 1, 3]);
        assert_eq!(bags.feature_offsets(0), &[0, 1, 1]);
        assert_eq!(bags.feature_offsets(1), &[1, 3, 3]);
    }

    #[test]
    fn refuses_bad_shapes() {
        for (indices, offsets, features) in [
            (vec![1i64], vec![0i64, 1, 1], 3),
            (vec![1], vec![1, 1], 1),
            (vec![1, 2], vec![0, 1], 1),
            (vec![1, 2], vec![0, 2, 1, 2, 2], 2),
            (vec![], vec![], 1),
        ] {
            let error = Bags::new(&indices, &offsets, None, features).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Invalid);
        }
        assert!(Bags::new(&[1, 2], &[0, 2], Some(&[1.0]), 1).is_err());
    }
}
