//! Bags of a feature whose rows are given by number.
//!
//! A whole batch is worked on sample by sample, or in blocks of few: outputs and gradients are
//! passed once, from front to back, and only rows are jumped to. Which row an index
//! uses is a small number, such as an entry of a window; its place in the arena follows by
//! arithmetic, by way of a list of slots where rows have no fixed place.

#![expect(clippy::indexing_slicing, reason = "bounds are checked once per bag, by slicing")]

use std::ops::Range;

use crate::accumulate::Source;
use crate::layout::{is_one_hot, Columns, Pooling};

/// Samples of a block, in which numbers and offsets of a feature are read. One by one, those of all
/// features would be read in turns, and these lie apart by powers of two, so that they drive each
/// other from the nearest cache.
pub(crate) const BLOCK_BAGS: usize = 16;
/// How many indices of a feature ahead the processor is asked to fetch rows.
pub(crate) const INDICES_AHEAD: usize = 16;

/// Where numbered rows lie in an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places<'a> {
    /// First word of the record in slot 0.
    pub first: usize,
    /// Words of a record, which is the distance from slot to slot.
    pub words: usize,
    /// Slot of each number; `None` where the number is the slot.
    pub slots: Option<&'a [u32]>,
}

impl Places<'_> {
    /// Returns the first word of the record of row `number`.
    ///
    /// # Panics
    /// When there are slots, and none for the number.
    #[inline(always)]
    #[must_use]
    pub fn start(self, number: u32) -> usize {
        let slot = self.slots.map_or(number, |slots| slots[number as usize]);
        self.first + slot as usize * self.words
    }
}

/// The rows that one feature of a batch uses.
#[derive(Debug, Clone, Copy)]
pub struct FeatureRows<'a> {
    /// Number of the row of each index of the feature, `[E]`.
    pub numbers: &'a [u32],
    /// Where the rows lie.
    pub places: Places<'a>,
    /// Bag bounds of the feature, `[B + 1]`, from the batch's position of its first index on.
    pub offsets: &'a [i64],
    /// Weight of each index of the feature, `[E]`, when pooling is weighted.
    pub weights: Option<&'a [f32]>,
    /// How bags become vectors.
    pub pooling: Pooling,
    /// Where the vectors lie in the matrix.
    pub columns: Columns,
}

impl FeatureRows<'_> {
    /// Panics unless numbers, weights and offsets belong together.
    pub(crate) fn check(&self) {
        self.columns.check();
        let ends = (self.offsets.first(), self.offsets.last());
        let (Some(first), Some(last)) = ends else { panic!("a feature needs offsets") };
        assert_eq!(last - first, self.numbers.len() as i64, "numbers must be those of the bags");
        if let Some(weights) = self.weights {
            assert_eq!(weights.len(), self.numbers.len(), "weights must have one value per index");
        }
        assert!(self.columns.dim <= self.places.words, "a record holds at least its weights");
    }

    /// Returns the number of bags `B`.
    pub(crate) fn bag_count(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Returns whether every bag has one index.
    pub(crate) fn is_one_hot(&self) -> bool {
        is_one_hot(self.offsets)
    }

    /// Returns whether pooling copies the row of each bag's one index.
    pub(crate) fn is_copied(&self) -> bool {
        self.pooling != Pooling::None && self.weights.is_none() && self.is_one_hot()
    }

    /// Returns the batch's position of the feature's first index.
    #[inline(always)]
    pub(crate) fn first_index(&self) -> usize {
        self.offsets.first().map_or(0, |&first| first as usize)
    }

    /// Returns which vector of the matrix index `index` of bag `bag` belongs to.
    #[inline(always)]
    pub(crate) fn vector(&self, bag: usize, index: usize) -> usize {
        match self.pooling {
            Pooling::None => self.first_index() + index,
            _ => bag,
        }
    }

    /// Returns which of the feature's indices are in bag `bag`.
    #[inline(always)]
    pub(crate) fn indices(&self, bag: usize) -> Range<usize> {
        let [start, end] = [self.offsets[bag], self.offsets[bag + 1]];
        let first = self.offsets[0];
        (start - first) as usize..(end - first) as usize
    }
}

/// Rows of a feature as they are added up.
pub(crate) struct RowsOf<'a, const WEIGHTED: bool> {
    pub(crate) arena: &'a [f32],
    pub(crate) rows: &'a FeatureRows<'a>,
}

impl<const WEIGHTED: bool> Source for RowsOf<'_, WEIGHTED> {
    const WEIGHTED: bool = WEIGHTED;

    #[inline(always)]
    fn words(&self) -> &[f32] {
        self.arena
    }

    #[inline(always)]
    fn start(&self, i: usize) -> Option<usize> {
        Some(self.rows.places.start(self.rows.numbers[i]))
    }

    #[inline(always)]
    fn weight(&self, i: usize) -> f32 {
        self.rows.weights.map_or(1.0, |weights| weights[i])
    }
}
