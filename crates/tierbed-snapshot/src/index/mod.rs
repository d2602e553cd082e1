//! Page index: the pages of each row, and the rows of each page.
//!
//! Page selection asks for the pages of a row: [`RowPages`]. Two indexes answer. A [`PageIndex`] is
//! what placements are built, compared and written with: plain [`Lists`], the *forward index* from
//! rows to pages, and the *inverted index* back. [`PackedPages`] is what a served snapshot holds:
//! the forward index alone, in the fewest bits. Which rows of a query lie on a page follows from
//! the pages of these rows.
//!
//! ```text
//! row  ─▶ forward  ─▶ pages of the row, the most useful first; chosen among up to the index limit
//! page ─▶ inverted ─▶ all rows of the page
//! ```
//!
//! An *index limit* bounds the pages that are chosen among for a row. All its pages stay known, so
//! that a row is still found when a page beyond its limit is read for another one.
//!
//! Source: MaxEmbed §6.1 (both indexes, index shrinking).

mod lists;
mod packed;
mod page_set;

use tierbed_core::Result;

pub use lists::Lists;
pub(crate) use packed::PagesPacker;
pub use packed::{PackedPages, PackedShape, Pages};
pub use page_set::PageSet;

/// What page selection asks of an index.
pub trait RowPages {
    /// Returns all pages of `row`, the most useful first; none when it lies nowhere.
    fn all_pages_of(&self, row: u32) -> impl ExactSizeIterator<Item = u32>;

    /// Returns how many of them, the first ones, are chosen among.
    fn index_limit(&self) -> usize;

    /// Tells whether a row may lie on `page` beyond its limit.
    fn may_be_beyond(&self, _page: u32) -> bool {
        true
    }

    /// Adds to `found` those of `pages` on which `row` lies beyond the limit.
    fn find_beyond(&self, row: u32, pages: &PageSet, found: &mut Vec<u32>) {
        let beyond = self.all_pages_of(row).skip(self.index_limit());
        found.extend(beyond.filter(|&page| pages.holds(page)));
    }

    /// Returns the pages of `row` that are chosen among.
    fn candidates_of(&self, row: u32) -> impl ExactSizeIterator<Item = u32> {
        self.all_pages_of(row).take(self.index_limit())
    }
}

/// The forward and the inverted index of one placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageIndex {
    forward: Lists,
    inverted: Lists,
    index_limit: Option<u32>,
}

impl RowPages for PageIndex {
    fn all_pages_of(&self, row: u32) -> impl ExactSizeIterator<Item = u32> {
        self.forward.get(row).iter().copied()
    }

    fn index_limit(&self) -> usize {
        self.index_limit.map_or(usize::MAX, |limit| limit as usize)
    }
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
        Self { inverted: forward.inverted(page_count), forward, index_limit: None }
    }

    /// Returns the pages of `row` that are chosen among, the most useful first; empty when it lies
    /// nowhere.
    #[must_use]
    pub fn pages_of(&self, row: u32) -> &[u32] {
        let pages = self.forward.get(row);
        let (chosen_among, _) = pages.split_at(pages.len().min(self.index_limit()));
        chosen_among
    }

    /// Returns all rows of `page`, ascending.
    #[must_use]
    pub fn rows_of(&self, page: u32) -> &[u32] {
        self.inverted.get(page)
    }

    /// Returns the forward index: all pages of each row.
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

    /// Returns the most bytes that a served snapshot holds of it: [`PackedPages`].
    #[must_use]
    pub fn served_bytes(&self) -> u64 {
        let shape = PackedShape {
            row_count: self.forward.list_count(),
            page_count: u64::from(self.inverted.list_count()),
            seat_count: u64::from(self.forward.item_count()),
        };
        shape.bytes(self.forward.iter().filter(|pages| !pages.is_empty()).count() as u64)
    }

    /// Returns how many pages have a number: the highest one and those before.
    #[must_use]
    pub fn page_count(&self) -> u32 {
        self.inverted.list_count()
    }

    /// Chooses among at most the first `index_limit` pages of each row; `None` among all.
    ///
    /// Source: MaxEmbed §6.1, index shrinking.
    ///
    /// Differs: the limit bounds what is looked at, as in the published code. What it would save
    /// is little where other pages take few bits.
    #[must_use]
    pub fn limited(self, index_limit: Option<u32>) -> Self {
        Self { index_limit, ..self }
    }

    /// Tells whether pages of a row are left out of the choice.
    pub(crate) fn is_limited(&self) -> bool {
        self.forward.iter().any(|pages| pages.len() > self.index_limit())
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
        assert_eq!(index.page_count(), 4);
    }

    #[test]
    fn the_limit_bounds_the_choice_and_leaves_all_pages_known() {
        let limited = index().limited(Some(1));
        assert_eq!(limited.pages_of(1), [0]);
        assert_eq!(limited.candidates_of(1).collect::<Vec<_>>(), [0]);
        assert_eq!(limited.all_pages_of(1).collect::<Vec<_>>(), [0, 2, 3]);
        assert_eq!(limited.rows_of(3), [1, 3]);
        assert!(limited.is_limited() && !index().is_limited());
        assert!(!index().limited(Some(3)).is_limited());
        assert_eq!(index().limited(None), index());
    }

    #[test]
    fn what_is_served_takes_the_bytes_that_are_told_before() {
        let (index, packed) = (index(), PackedPages::of(index().forward(), 4, None).unwrap());
        assert_eq!(packed.memory_bytes(), index.served_bytes());
        assert!(packed.is_present(1) && !packed.is_present(4) && !packed.is_present(9));
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
