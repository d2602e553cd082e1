//! A part of a batch: the bags of some samples, or of some features.

#![expect(clippy::indexing_slicing, reason = "offsets of checked bags lie within their indices")]

use std::ops::Range;

use tierbed_core::{Bags, Result};

/// Bags copied out of a batch, counted from 0.
#[derive(Debug)]
pub(crate) struct PartBags {
    indices: Vec<i64>,
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
    feature_count: usize,
}

impl PartBags {
    fn new(bags: &Bags<'_>, feature_count: usize) -> Self {
        let weights = bags.weights.map(|_| Vec::new());
        Self { indices: Vec::new(), offsets: vec![0], weights, feature_count }
    }

    /// Copies `samples` of all features.
    pub(crate) fn of_samples(bags: &Bags<'_>, samples: Range<usize>) -> Self {
        let mut part = Self::new(bags, bags.feature_count);
        for feature in 0..bags.feature_count {
            let offsets = bags.feature_offsets(feature);
            part.push(bags, &offsets[samples.start..=samples.end]);
        }
        part
    }

    /// Copies all samples of `features`, in the order given.
    pub(crate) fn of_features(bags: &Bags<'_>, features: &[usize]) -> Self {
        let mut part = Self::new(bags, features.len());
        part.offsets.reserve(features.len() * bags.batch_size());
        for &feature in features {
            part.push(bags, bags.feature_offsets(feature));
        }
        part
    }

    // Bags that lie one behind the other, by their bounds.
    fn push(&mut self, bags: &Bags<'_>, bounds: &[i64]) {
        let (first, last) = (bounds[0], bounds[bounds.len() - 1]);
        let moved_by = self.indices.len() as i64 - first;
        self.offsets.extend(bounds.iter().skip(1).map(|&bound| bound + moved_by));
        let range = first as usize..last as usize;
        if let (Some(into), Some(all)) = (&mut self.weights, bags.weights) {
            into.extend(&all[range.clone()]);
        }
        self.indices.extend(&bags.indices[range]);
        let end = self.offsets.last().copied();
        assert_eq!(end, Some(self.indices.len() as i64), "bags end where their indices do");
        let weight_count = self.weights.as_ref().map(Vec::len);
        assert!(weight_count.is_none_or(|count| count == self.indices.len()), "a weight per index");
    }

    /// Returns the bags.
    ///
    /// # Errors
    /// None for a part of checked bags.
    pub(crate) fn bags(&self) -> Result<Bags<'_>> {
        Bags::new(&self.indices, &self.offsets, self.weights.as_deref(), self.feature_count)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use super::*;

    #[test]
    fn parts_keep_the_order_of_indices() {
        // Two samples, three features: [5], [6, 7] | [], [8] | [9], [].
        let weights = [0.5, 0.6, 0.7, 0.8, 0.9];
        let (indices, offsets) = ([5, 6, 7, 8, 9], [0, 1, 3, 3, 4, 5, 5]);
        let bags = Bags::new(&indices, &offsets, Some(&weights), 3).unwrap();
        let of_features = PartBags::of_features(&bags, &[2, 0]);
        let part = of_features.bags().unwrap();
        assert_eq!((part.indices, part.offsets), (&[9, 5, 6, 7][..], &[0, 1, 1, 2, 4][..]));
        assert_eq!(part.weights, Some(&[0.9, 0.5, 0.6, 0.7][..]));
        let of_samples = PartBags::of_samples(&bags, 1..2);
        let part = of_samples.bags().unwrap();
        assert_eq!((part.indices, part.offsets), (&[6, 7, 8][..], &[0, 2, 3, 3][..]));
        assert_eq!(part.weights, Some(&[0.6, 0.7, 0.8][..]));
    }
}
