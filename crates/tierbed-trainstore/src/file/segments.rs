//! File offsets of both slots of a page in a file that grew.
//!
//! A file is a row of segments, one at first and one more each time it grows. A segment holds
//! the first homes of its pages, then the second ones, so no page ever moves:
//!
//! ```text
//! pages 0..4, grown to 10:   | plane 0: 0..4 | plane 1: 0..4 | plane 0: 4..10 | plane 1: 4..10 |
//! ```

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
        let (_, before) = self.ends.split_last().unwrap_or((&0, &[]));
        before.to_vec()
    }

    /// Adds a segment up to `page_count`.
    pub(super) fn grow(&mut self, page_count: u64) {
        self.ends.push(page_count);
    }

    /// Returns the place, in pages, of page `page`'s home in `plane`.
    pub(super) fn home(&self, page: u64, plane: u64) -> u64 {
        let at = self.ends.partition_point(|end| *end <= page);
        let end = self.ends.get(at).copied().unwrap_or(page + 1);
        let start = at.checked_sub(1).and_then(|before| self.ends.get(before)).copied();
        let start = start.unwrap_or(0);
        2 * start + plane * (end - start) + (page - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_never_grew_is_two_planes() {
        let segments = Segments::new(&[], 10).unwrap();
        assert_eq!((segments.home(3, 0), segments.home(3, 1)), (3, 13));
        assert!(segments.grown_at().is_empty());
    }

    #[test]
    fn homes_never_move_and_never_meet() {
        let mut segments = Segments::new(&[], 4).unwrap();
        let before: Vec<u64> =
            (0..4).flat_map(|page| [0, 1].map(|p| segments.home(page, p))).collect();
        segments.grow(10);
        segments.grow(11);
        let mut homes: Vec<u64> =
            (0..11).flat_map(|page| [0, 1].map(|plane| segments.home(page, plane))).collect();
        assert_eq!(homes[..8], before);
        homes.sort_unstable();
        assert_eq!(homes, (0..22).collect::<Vec<u64>>());
        assert_eq!(Segments::new(&segments.grown_at(), 11).unwrap(), segments);
    }

    #[test]
    fn lengths_that_do_not_increase_are_corruption() {
        assert!(Segments::new(&[4, 4], 10).is_err());
        assert!(Segments::new(&[0], 10).is_err());
        assert!(Segments::new(&[10], 10).is_err());
    }
}
