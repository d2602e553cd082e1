//! Memory layout of rows, bags and pooled vectors.

use std::ops::Range;

/// How the rows of a bag become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// Their sum; 0 for an empty bag.
    Sum,
    /// Their sum divided by the number of indices of the bag; 0 for an empty bag.
    Mean,
    /// Not at all: each index keeps its row.
    None,
}

/// Rows of one table, in index order, somewhere in an arena.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Records of any number of tables, `[words]`.
    pub arena: &'a [f32],
    /// First word of the record of each index, `[E]`; duplicates allowed.
    pub starts: &'a [usize],
    /// Weight of each index, `[E]`, when pooling is weighted.
    pub weights: Option<&'a [f32]>,
}

/// Where the vectors of one feature lie in a matrix of `[B, stride]` (row-major).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// Elements from one row of the matrix to the next.
    pub stride: usize,
    /// First column of the feature.
    pub first: usize,
    /// Columns of the feature: the dim of its table.
    pub dim: usize,
}

impl Columns {
    /// Names a matrix that holds one feature and nothing else, `[B, dim]`.
    #[must_use]
    pub fn whole(dim: usize) -> Self {
        Self { stride: dim, first: 0, dim }
    }

    /// Returns the first element of the feature's vector in row `row` of the matrix.
    #[inline(always)]
    #[must_use]
    pub fn start(self, row: usize) -> usize {
        row * self.stride + self.first
    }

    /// Returns the elements of the feature's vector in row `row` of the matrix.
    #[inline(always)]
    #[must_use]
    pub fn range(self, row: usize) -> Range<usize> {
        let start = self.start(row);
        start..start + self.dim
    }

    /// Panics unless `dim` columns from `first` on fit in `stride`.
    pub(crate) fn check(self) {
        assert!(self.dim > 0, "dim must not be 0");
        assert!(self.first + self.dim <= self.stride, "columns must lie inside a row");
    }
}

/// A run of consecutive indices of one feature, and the bags they belong to.
///
/// A call covers `[first_index, first_index + E)`, where `E` is the number of rows it is given:
/// a feature may be pooled in several calls, as its rows arrive, with the bits of one call.
#[derive(Debug, Clone, Copy)]
pub struct BagRange<'a> {
    /// Bag bounds of the feature, `[B + 1]`, not decreasing.
    pub offsets: &'a [i64],
    /// Position, on the scale of `offsets`, of the first row given.
    pub first_index: usize,
}

impl<'a> BagRange<'a> {
    /// Covers all indices of a feature with these offsets.
    #[must_use]
    pub fn whole(offsets: &'a [i64]) -> Self {
        Self { offsets, first_index: offsets.first().map_or(0, |&first| position(first)) }
    }

    /// Returns the number of bags `B`.
    pub(crate) fn bag_count(self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Returns the first bag that ends behind `first_index`, or `B`.
    pub(crate) fn first_bag(self) -> usize {
        ends(self.offsets).partition_point(|&end| position(end) <= self.first_index)
    }

    /// Returns which of the `row_count` given rows belong to `bag`, or `None` when that bag, and
    /// so every later one, starts behind them.
    #[inline(always)]
    pub(crate) fn rows_of(self, bag: usize, row_count: usize) -> Option<Range<usize>> {
        let [start, end] = *self.offsets.get(bag..)?.first_chunk()?;
        let start = position(start).saturating_sub(self.first_index);
        let end = position(end).saturating_sub(self.first_index).min(row_count);
        (start < row_count).then_some(start..end)
    }
}

/// Returns whether every bag of these bounds has one index.
#[inline(always)]
pub(crate) fn is_one_hot(offsets: &[i64]) -> bool {
    offsets.iter().zip(ends(offsets)).all(|(start, end)| end - start == 1)
}

/// Returns the end of every bag; there is none without offsets.
#[inline(always)]
fn ends(offsets: &[i64]) -> &[i64] {
    match offsets {
        [_, ends @ ..] => ends,
        [] => &[],
    }
}

/// Returns the number of indices of `bag`.
#[inline(always)]
pub(crate) fn index_count(offsets: &[i64], bag: usize) -> i64 {
    match offsets.get(bag..).and_then(<[i64]>::first_chunk) {
        Some([start, end]) => end - start,
        None => panic!("bag {bag} has no offsets"),
    }
}

/// Returns an offset as a position; a negative one, which no checked bag has, is past every end.
#[inline(always)]
fn position(offset: i64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_of_the_indices_finds_its_bags() {
        let offsets = [10, 12, 12, 15, 16];
        let piece = BagRange { offsets: &offsets, first_index: 11 };
        assert_eq!(piece.first_bag(), 0);
        let rows: Vec<_> = (0..4).map(|bag| piece.rows_of(bag, 3)).collect();
        assert_eq!(rows, [Some(0..1), Some(1..1), Some(1..3), None]);
        assert_eq!(BagRange { offsets: &offsets, first_index: 12 }.first_bag(), 2);
        assert_eq!(BagRange { offsets: &offsets, first_index: 16 }.first_bag(), 4);
        assert_eq!(BagRange::whole(&offsets).first_index, 10);
        assert_eq!(BagRange { offsets: &[], first_index: 0 }.bag_count(), 0);
    }
}
