//! File offsets of both slots of a page in a file that grew.
//!
//! A file is a sequence of segments, one at first and one more each time it grows. A segment
//! holds slots A of its pages, then slots B, so no page ever moves:
//!
//! ```text
//! pages 0..4, grown to 10:   | A: 0..4 | B: 0..4 | A: 4..10 | B: 4..10 |
//! ```

#![expect(
    clippy::indexing_slicing,
    reason = "the last segment ends at the page count, so every page is in one"
)]

use tierbed_core::{Error, Result};

/// The page numbers at which segments end, increasing; the last one is the page count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segments {
    ends: Vec<u64>,
}

impl Segments {
    /// Builds the segments of a file of `page_count` pages that grew at `grown_at` pages.
    ///
    /// # Errors
    /// `Corruption` when the numbers do not increase.
    pub(super) fn new(grown_at: &[u64], page_count: u64) -> Result<Self> {
        let mut ends = grown_at.to_vec();
        ends.push(page_count);
        let starts = std::iter::once(&0).chain(&ends);
        if starts.zip(&ends).any(|(start, end)| start >= end) {
            return Err(Error::corruption("a grown file's lengths do not increase")
                .with("grown_at", format_args!("{grown_at:?}"))
                .with("page_count", page_count));
        }
        Ok(Self { ends })
    }

    /// Returns the page counts before each growth, as a commit stores them.
    pub(super) fn grown_at(&self) -> Vec<u64> {
        self.ends[..self.ends.len() - 1].to_vec()
    }

    /// Adds a segment up to `page_count`.
    pub(super) fn grow(&mut self, page_count: u64) {
        assert!(self.ends.last() < Some(&page_count), "a file only grows");
        self.ends.push(page_count);
    }

    /// Returns the position in the file, in pages, of `slot` (0 or 1) of page `page`.
    pub(super) fn position(&self, page: u64, slot: u64) -> u64 {
        let at = self.ends.partition_point(|end| *end <= page);
        let end = self.ends[at];
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        2 * start + slot * (end - start) + (page - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_never_grew_has_all_slots_a_then_all_slots_b() {
        let segments = Segments::new(&[], 10).unwrap();
        assert_eq!((segments.position(3, 0), segments.position(3, 1)), (3, 13));
        assert!(segments.grown_at().is_empty());
    }

    #[test]
    fn slots_never_move_and_never_overlap() {
        let mut segments = Segments::new(&[], 4).unwrap();
        let before: Vec<u64> =
            (0..4).flat_map(|page| [0, 1].map(|slot| segments.position(page, slot))).collect();
        segments.grow(10);
        segments.grow(11);
        let mut positions: Vec<u64> =
            (0..11).flat_map(|page| [0, 1].map(|slot| segments.position(page, slot))).collect();
        assert_eq!(positions[..8], before);
        positions.sort_unstable();
        assert_eq!(positions, (0..22).collect::<Vec<u64>>());
        assert_eq!(Segments::new(&segments.grown_at(), 11).unwrap(), segments);
    }

    #[test]
    fn lengths_that_do_not_increase_are_corruption() {
        assert!(Segments::new(&[4, 4], 10).is_err());
        assert!(Segments::new(&[0], 10).is_err());
        assert!(Segments::new(&[10], 10).is_err());
    }
}
