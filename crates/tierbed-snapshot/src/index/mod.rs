//! Page index: the pages of each row, and the rows of each page.
//!
//! Page selection asks both: the *forward index* names the pages of a row, the *inverted index* the
//! rows of a page. Both are plain [`Lists`] in DRAM. An *index limit* keeps only the first pages of
//! each row in the forward index; the inverted index keeps every row, so that a row whose page was
//! left out is still found when that page is read for another one.
//!
//! ```text
//! row  ─▶ forward  ─▶ pages of the row, the most useful first, at most the index limit
//! page ─▶ inverted ─▶ all rows of the page
//! ```
//!
//! Source: MaxEmbed §6.1 (both indexes, index shrinking).

mod lists;

use tierbed_core::Result;

pub use lists::Lists;

/// The forward and the inverted index of one placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageIndex {
    forward: Lists,
    inverted: Lists,
}

impl PageIndex {
    /// Indexes `pages`, each the rows on it; rows from `row_count` on are left out. The pages of a
    /// row are in page order.
    ///
    /// # Errors
    /// `Invalid` when the pages have 2^32 places or more.
    pub fn new<'a>(row_count: u32, pages: impl IntoIterator<Item = &'a [u32]>) -> Result<Self> {
        let forward = Lists::gather(pages)?.inverted(row_count);
        Ok(Self::from_forward(forward))
    }

    /// Indexes rows whose pages are given, each row's most useful page first.
    #[must_use]
    pub fn from_forward(forward: Lists) -> Self {
        let page_count = forward.items().iter().max().map_or(0, |&page| page + 1);
        Self { inverted: forward.inverted(page_count), forward }
    }

    /// Returns the pages of `row`, the most useful first; empty when it lies nowhere.
    #[must_use]
    pub fn pages_of(&self, row: u32) -> &[u32] {
        self.forward.get(row)
    }

    /// Returns all rows of `page`, ascending.
    #[must_use]
    pub fn rows_of(&self, page: u32) -> &[u32] {
        self.inverted.get(page)
    }

    /// Returns the forward index: the pages of each row.
    #[must_use]
    pub fn forward(&self) -> &Lists {
        &self.forward
    }

    /// Returns the inverted index: the rows of each page.
    #[must_use]
    pub fn inverted(&self) -> &Lists {
        &self.inverted
    }

    /// Returns the bytes of both indexes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.forward.memory_bytes() + self.inverted.memory_bytes()
    }

    /// Keeps at most the first `index_limit` pages of each row; `None` keeps all.
    ///
    /// Source: MaxEmbed §6.1, index shrinking.
    ///
    /// Differs: the published code keeps the whole index and stops looking after ten pages; here
    /// the index is smaller, because that is what the limit is for.
    #[must_use]
    pub fn limited(mut self, index_limit: Option<u32>) -> Self {
        if let Some(limit) = index_limit {
            self.forward = self.forward.limited(limit);
        }
        self
    }

    /// Orders the pages of each row by how often they served it, most often first; equals stay
    /// as they were.
    ///
    /// # Panics
    /// When `served` counted for an index with another number of items.
    #[must_use]
    #[expect(clippy::indexing_slicing, reason = "there is a count for each item")]
    pub fn ordered_by(mut self, served: &Served) -> Self {
        let (counts, item_count) = (&served.counts, self.forward.item_count() as usize);
        assert_eq!(counts.len(), item_count, "counts of another index");
        self.forward.sort_by_rank(|_, place| u64::from(u32::MAX - counts[place]));
        self
    }
}

/// How often each page of each row served that row, over some queries.
#[derive(Debug, Clone)]
pub struct Served {
    /// A count for each item of the forward index it was made for.
    counts: Vec<u32>,
}

impl Served {
    /// Starts with nothing served; belongs to `index` as it is now.
    #[must_use]
    pub fn new(index: &PageIndex) -> Self {
        Self { counts: vec![0; index.forward.item_count() as usize] }
    }

    /// Notes that `page` was read for `row`; nothing happens when it is not among the row's pages.
    ///
    /// # Panics
    /// When `index` has more items than the one that was counted for.
    #[expect(clippy::indexing_slicing, reason = "there is a count for each item")]
    pub fn add(&mut self, index: &PageIndex, row: u32, page: u32) {
        let at = index.pages_of(row).iter().position(|&of_row| of_row == page);
        let Some(at) = at else { return };
        let count = &mut self.counts[index.forward.range(row).start + at];
        *count = count.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> PageIndex {
        PageIndex::new(5, [&[0, 1][..], &[2, 3], &[1, 2], &[3, 1, 9]]).unwrap()
    }

    #[test]
    fn both_directions_agree() {
        let index = index();
        assert_eq!(index.pages_of(1), [0, 2, 3]);
        assert_eq!(index.pages_of(4), [0; 0], "a row that lies nowhere");
        assert_eq!(index.rows_of(3), [1, 3], "a row outside is left out");
        assert_eq!(index.rows_of(7), [0; 0]);
        assert_eq!(index.memory_bytes(), 4 * (6 + 8) + 4 * (5 + 8));
    }

    #[test]
    fn the_limit_shrinks_the_forward_index_and_leaves_the_inverted_one() {
        let limited = index().limited(Some(1));
        assert_eq!(limited.pages_of(1), [0]);
        assert_eq!(limited.rows_of(3), [1, 3]);
        assert_eq!(index().memory_bytes() - limited.memory_bytes(), 4 * 4);
        assert_eq!(index().limited(None), index());
    }

    #[test]
    fn the_page_that_served_most_comes_first_and_survives_the_limit() {
        let index = index();
        let mut served = Served::new(&index);
        for (row, page) in [(1, 3), (1, 3), (1, 2), (3, 3), (4, 0), (0, 3)] {
            served.add(&index, row, page);
        }
        let ordered = index.ordered_by(&served);
        assert_eq!(ordered.pages_of(1), [3, 2, 0]);
        assert_eq!(ordered.pages_of(2), [1, 2], "never served: as before");
        assert_eq!(ordered.limited(Some(1)).pages_of(3), [3]);
    }
}
