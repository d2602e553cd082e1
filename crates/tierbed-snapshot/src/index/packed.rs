//! Pages of each row in the fewest bits: what a served snapshot holds of a placement.
//!
//! Most rows lie on one page. So the first page of every row stands in an array of its own, and a
//! bit says whether a row has more pages. Those of such rows lie behind each other, and a bit marks
//! the last one of each row:
//!
//! ```text
//! row      0    1    2    3
//! heads    4+1  0    7+1  2+1     its first page and one; 0: the row lies nowhere
//! is_more  0    0    1    1       counted by `Ranks`: row 3 is the second that has more
//! others             9 1  5       the other pages, row after row
//! ends               0 1  1       the last page of its row
//! ```
//!
//! Where the other pages of a row begin stands for every 32nd of these rows; ends are counted from
//! there. Pages beyond an index limit ascend, so that one is found by a search however hot the row
//! is: they are not chosen among, but a page that is read for another row may be one of them.
//!
//! A bit per page says whether any row lies on it beyond the limit: on most pages none does, and
//! nothing is searched for these.
//!
//! The index is made from numbers as they come from a file, and nothing larger exists
//! meanwhile.
#![expect(clippy::indexing_slicing, reason = "arrays are as long as the rows and pages they hold")]

mod packer;

use std::ops::Range;

use tierbed_core::Result;

use super::{Lists, PageSet, RowPages};
use crate::bits::read_bits;
use crate::forward_index::bits_of;
use crate::tails::ranks::Ranks;

pub(crate) use packer::PagesPacker;

/// Rows with more pages than one, from one known start to the next.
const SAMPLE_LISTS: u64 = 32;

/// Pages of a row that are looked at one after the other in the time of one search among them.
const WALK_PER_PAGE: u64 = 16;

/// What the size of an index follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedShape {
    /// Rows, whether they lie on a page or not.
    pub row_count: u32,
    /// Pages that rows lie on: all are below.
    pub page_count: u64,
    /// Rows on all pages, each as often as it is there.
    pub seat_count: u64,
}

impl PackedShape {
    /// Returns the most bytes that an index takes in which `present_rows` rows lie on a page.
    #[must_use]
    pub fn bytes(&self, present_rows: u64) -> u64 {
        let (rows, words) = (u64::from(self.row_count), |bits: u64| 8 * bits.div_ceil(64));
        let heads = words(rows * u64::from(self.head_bits()));
        let others = self.seat_count.saturating_sub(present_rows);
        if others == 0 {
            return heads;
        }
        let is_more = words(rows) + Ranks::bytes_of(rows);
        let ends = words(others) + 4 * others.div_ceil(SAMPLE_LISTS);
        let pages = words(others * u64::from(self.page_bits())) + words(self.page_count);
        heads + is_more + ends + pages
    }

    /// Bits of the first page of a row, which is stored one higher.
    fn head_bits(&self) -> u32 {
        bits_of(self.page_count).max(1)
    }

    /// Bits of another page of a row.
    fn page_bits(&self) -> u32 {
        bits_of(self.page_count.saturating_sub(1)).max(1)
    }
}

/// The pages of each row, the most useful first.
#[derive(Debug)]
pub struct PackedPages {
    shape: PackedShape,
    index_limit: Option<u32>,
    heads: Box<[u64]>,
    more: Option<More>,
}

/// The pages of rows that lie on several, but for the first of each row.
#[derive(Debug)]
struct More {
    /// A bit for each row that is one of these.
    is_more: Box<[u64]>,
    ranks: Ranks,
    /// A bit for each page: is it the last one of its row?
    ends: Box<[u64]>,
    /// Where the pages of every 32nd of these rows begin.
    samples: Box<[u32]>,
    pages: Box<[u64]>,
    /// A bit for each page: does a row lie on it beyond its limit?
    has_beyond: Box<[u64]>,
}

impl More {
    /// Returns where the pages of the `rank`-th of these rows begin, and end.
    fn range(&self, rank: u64) -> Range<u64> {
        let from = u64::from(self.samples[(rank / SAMPLE_LISTS) as usize]);
        let start = self.behind_ends(from, rank % SAMPLE_LISTS);
        start..self.behind_ends(start, 1)
    }

    /// Returns the place behind the `count`-th end from `from` on.
    fn behind_ends(&self, from: u64, mut count: u64) -> u64 {
        if count == 0 {
            return from;
        }
        let mut at = (from / 64) as usize;
        let mut word = self.ends[at] & (u64::MAX << (from % 64));
        while u64::from(word.count_ones()) < count {
            count -= u64::from(word.count_ones());
            at += 1;
            word = self.ends[at];
        }
        (1..count).for_each(|_| word &= word - 1);
        64 * at as u64 + u64::from(word.trailing_zeros()) + 1
    }

    fn memory_bytes(&self) -> u64 {
        let words = self.is_more.len() + self.ends.len() + self.pages.len() + self.has_beyond.len();
        let ranks = Ranks::bytes_of(64 * self.is_more.len() as u64);
        8 * words as u64 + 4 * self.samples.len() as u64 + ranks
    }
}

impl PackedPages {
    /// Packs lists of pages, which are below `page_count`; at most the first `index_limit` of a row
    /// are chosen among, `None`: all.
    ///
    /// Source: MaxEmbed §6.1, index shrinking.
    ///
    /// Differs: other pages of a row stay known, in few bits each, because a row is found on any
    /// page that is read for another row. There is no inverted index that would tell it.
    ///
    /// # Errors
    /// `Corruption` when a page is not.
    pub fn of(lists: &Lists, page_count: u64, index_limit: Option<u32>) -> Result<Self> {
        let seat_count = u64::from(lists.item_count());
        let shape = PackedShape { row_count: lists.list_count(), page_count, seat_count };
        let mut packer = PagesPacker::new(shape, index_limit)?;
        lists.starts().iter().chain(lists.items()).try_for_each(|&number| packer.push(number))?;
        packer.finish()
    }

    /// Returns all pages of `row`, the most useful first as far as its index limit; none when it
    /// lies nowhere, or there is no such row.
    #[must_use]
    pub fn pages_of(&self, row: u32) -> Pages<'_> {
        let head = if row < self.shape.row_count { self.head(row) } else { 0 };
        let mut pages = Pages { index: self, head, others: 0..0 };
        if let Some(more) = &self.more {
            let (word, bit) = (row / 64, row % 64);
            if head > 0 && more.is_more[word as usize] >> bit & 1 == 1 {
                let rank = more.ranks.get(&more.is_more, u64::from(row)).rank;
                pages.others = more.range(rank);
            }
        }
        pages
    }

    /// Tells whether `row` lies on a page.
    #[must_use]
    pub fn is_present(&self, row: u32) -> bool {
        row < self.shape.row_count && self.head(row) > 0
    }

    /// Returns the bytes held.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        8 * self.heads.len() as u64 + self.more.as_ref().map_or(0, More::memory_bytes)
    }

    /// Returns how many other pages of a row are chosen among; the first page is none of these.
    fn others_limit(&self) -> u64 {
        self.index_limit().max(1) as u64 - 1
    }

    /// Returns the first page of a row and one, or 0.
    fn head(&self, row: u32) -> u64 {
        let bits = self.shape.head_bits();
        read_bits(&self.heads, u64::from(row) * u64::from(bits), bits)
    }

    #[inline]
    fn other(&self, at: u64) -> u32 {
        let Some(more) = &self.more else { unreachable!("no row has more pages") };
        let bits = self.shape.page_bits();
        read_bits(&more.pages, at * u64::from(bits), bits) as u32
    }
}

impl RowPages for PackedPages {
    fn all_pages_of(&self, row: u32) -> impl ExactSizeIterator<Item = u32> {
        self.pages_of(row)
    }

    fn index_limit(&self) -> usize {
        self.index_limit.map_or(usize::MAX, |limit| limit as usize)
    }

    fn may_be_beyond(&self, page: u32) -> bool {
        let Some(more) = &self.more else { return false };
        more.has_beyond[(page / 64) as usize] >> (page % 64) & 1 == 1
    }

    fn find_beyond(&self, row: u32, pages: &PageSet, found: &mut Vec<u32>) {
        let Range { start, end } = self.pages_of(row).others;
        let first = end.min(start.saturating_add(self.others_limit()));
        if end - first <= WALK_PER_PAGE * pages.pages().len() as u64 {
            let beyond = (first..end).map(|at| self.other(at));
            found.extend(beyond.filter(|&page| pages.holds(page)));
        } else {
            self.search_beyond(first..end, pages.pages(), found);
        }
    }
}

impl PackedPages {
    /// Adds to `found` those of `pages` that are among the ascending pages at `others`.
    fn search_beyond(&self, others: Range<u64>, pages: &[u32], found: &mut Vec<u32>) {
        let Range { start: mut at, end } = others;
        for &page in pages {
            let mut step = 1;
            while at + step < end && self.other(at + step) < page {
                step *= 2;
            }
            let mut behind = end.min(at + step + 1);
            while at < behind {
                let middle = at.midpoint(behind);
                if self.other(middle) < page {
                    at = middle + 1;
                } else {
                    behind = middle;
                }
            }
            if at >= end {
                break;
            }
            if self.other(at) == page {
                found.push(page);
            }
        }
    }
}

/// The pages of a row, the most useful first.
#[derive(Debug, Clone)]
pub struct Pages<'a> {
    index: &'a PackedPages,
    /// The first page and one; 0 when it was given, or there is none.
    head: u64,
    others: Range<u64>,
}

impl Iterator for Pages<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        if let Some(page) = std::mem::take(&mut self.head).checked_sub(1) {
            return Some(page as u32);
        }
        self.others.next().map(|at| self.index.other(at))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let count = usize::from(self.head > 0) + (self.others.end - self.others.start) as usize;
        (count, Some(count))
    }
}

impl ExactSizeIterator for Pages<'_> {}

#[cfg(test)]
mod tests;
