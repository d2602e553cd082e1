//! A matrix as the destination of pooled vectors.

#![expect(
    clippy::indexing_slicing,
    reason = "a place outside is a bug of the caller, as documented"
)]

use tierbed_core::Bags;

use crate::feature_layout::FeatureLayout;
use crate::layout::Columns;
use crate::pool_to::Destination;

/// A matrix of vectors side by side, `[rows, stride]`.
#[derive(Debug)]
pub struct Matrix<'a> {
    words: &'a mut [f32],
    /// Row of the first vector, and columns, of each feature.
    features: Vec<(usize, Columns)>,
}

impl<'a> Matrix<'a> {
    /// Takes `words` as a matrix in which bag `b` of every feature has row `b`; `columns` are
    /// those of each feature.
    #[must_use]
    pub fn new(words: &'a mut [f32], columns: impl Iterator<Item = Columns>) -> Self {
        Self { words, features: columns.map(|columns| (0, columns)).collect() }
    }

    /// Takes `words` as the output of `bags`: [`output_len`](FeatureLayout::output_len) of them.
    #[must_use]
    pub fn output(layout: &FeatureLayout, bags: &Bags<'_>, words: &'a mut [f32]) -> Self {
        let first_row = |at| if layout.is_pooled() { 0 } else { layout.range(bags, at).start };
        let features = layout.features().iter().enumerate();
        let features = features.map(|(at, feature)| (first_row(at), feature.columns)).collect();
        Self { words, features }
    }
}

impl Destination for Matrix<'_> {
    /// # Panics
    /// When the matrix has no such feature or row.
    #[inline]
    fn vector(&mut self, feature: usize, at: usize) -> &mut [f32] {
        let (first_row, columns) = self.features[feature];
        &mut self.words[columns.range(first_row + at)]
    }
}
