//! Working memory of page selection: the rows of a call that still need a page, and the pages they
//! may come from.
//!
//! Nothing tells which rows lie on a page before it is read. But the pages of each row are known,
//! so those of the rows of a call, turned round, tell which of *these* rows lie on a page. That is
//! a sorted list of pairs of page and row, and as large as the call needs.
//!
//! ```text
//! rows     7: pages 2 5   9: page 5      pairs   2:7  5:7  5:9     page 5 serves both rows
//! ```
//!
//! Where pairs of all rows would be too many, they are gathered for a *window* of rows at a time:
//! the pages that rows of the window are chosen from, and all rows of the call that lie on these.
#![expect(
    clippy::indexing_slicing,
    reason = "rows are numbered through the order, pairs are cut by a search"
)]

use std::ops::Range;

use crate::index::{PageSet, RowPages};

/// Pairs of page and row that are kept at once, per row of a call.
const PAIRS_PER_ROW: usize = 4;
/// Pairs that are kept at once however few rows are asked for.
const PAIRS_MIN: usize = 256;
/// Pages of the first window on which rows may lie beyond their limit, at most; each window has
/// twice as many as the one before. Rows that lie on very many pages are served by the first pages
/// that are chosen: they are looked for on few pages, and in later windows no more.
const BEYOND_MIN: usize = 16;

/// Memory of a selection, used again by the next.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Count of pages to choose from and row, and position, of each distinct row that lies on a
    /// page: in the order in which rows are gone through.
    order: Vec<(u64, u32)>,
    /// Per row of the order: is it still needed?
    is_needed: Vec<bool>,
    needed_count: u32,
    /// Page in the high half, row of the order in the low half; ascending.
    pairs: Vec<u64>,
    /// Pages that rows of the window are chosen from; and those of them on which other rows may
    /// lie beyond their limit.
    own: PageSet,
    beyond: PageSet,
    /// Rows of the next window at most, and pages of it on which rows may lie beyond their limit.
    window: usize,
    beyond_max: usize,
    /// Rows and positions that the page just chosen serves.
    served: Vec<u32>,
    /// Rows still needed and page (inverted), of the pages that may be read.
    pub(super) candidates: Vec<(u32, std::cmp::Reverse<u32>)>,
}

impl Scratch {
    /// Bytes per row of the largest one-pass call: its order, what is needed and served, pairs and
    /// their pages.
    pub const BYTES_PER_ROW: usize = size_of::<(u64, u32)>()
        + 1
        + 4
        + PAIRS_PER_ROW * (size_of::<u64>() + 2 * PageSet::BYTES_PER_PAGE);

    /// Forgets the last call and marks `rows` as needed. A row asked for twice is needed once, at
    /// its first position; a row that lies on no page is not needed.
    pub(super) fn start(&mut self, index: &impl RowPages, rows: &[u32]) {
        self.order.clear();
        for (position, &row) in (0..).zip(rows) {
            let page_count = index.candidates_of(row).len() as u64;
            if page_count > 0 {
                self.order.push(((page_count << 32) | u64::from(row), position));
            }
        }
        self.order.sort_unstable();
        self.order.dedup_by_key(|&mut (rank, _)| rank);
        self.needed_count = self.order.len() as u32;
        self.is_needed.clear();
        self.is_needed.resize(self.order.len(), true);
        (self.window, self.beyond_max) = (usize::MAX, BEYOND_MIN);
    }

    /// Returns how many distinct rows lie on a page.
    pub(super) fn row_count(&self) -> usize {
        self.order.len()
    }

    /// Returns the row with number `at` of the order.
    pub(super) fn row(&self, at: usize) -> u32 {
        self.order[at].0 as u32
    }

    /// Returns how many rows are still needed.
    pub(super) fn needed_count(&self) -> u32 {
        self.needed_count
    }

    pub(super) fn is_needed(&self, at: usize) -> bool {
        self.is_needed[at]
    }

    /// Returns the most pairs that are kept for a call of `row_count` rows.
    pub(super) fn pairs_max(row_count: usize) -> usize {
        (PAIRS_PER_ROW * row_count).max(PAIRS_MIN)
    }

    /// Gathers the pairs of all rows of the order.
    pub(super) fn gather_all(&mut self, index: &impl RowPages) {
        self.beyond_max = usize::MAX;
        self.gather(index, 0, usize::MAX);
    }

    /// Gathers the pairs of a window: rows of the order from `first` on, as many as `pairs_max`
    /// pairs allow, at least one. Returns where these rows end.
    pub(super) fn gather(
        &mut self,
        index: &impl RowPages,
        first: usize,
        pairs_max: usize,
    ) -> usize {
        loop {
            let end = self.row_count().min(first.saturating_add(self.window));
            let end = self.gather_candidates(index, first..end, pairs_max);
            if self.gather_others(index, first..end, pairs_max) {
                self.window = usize::MAX;
                if self.beyond.pages().len() >= self.beyond_max / 2 {
                    self.beyond_max = self.beyond_max.saturating_mul(2);
                }
                return end;
            }
            self.window = (end - first) / 2;
        }
    }

    /// Keeps pairs of the pages that `rows` are chosen from; returns where the rows end that fit.
    fn gather_candidates(
        &mut self,
        index: &impl RowPages,
        rows: Range<usize>,
        pairs_max: usize,
    ) -> usize {
        self.pairs.clear();
        let (mut end, mut beyond_count) = (rows.start, 0);
        for at in rows {
            if self.is_needed[at] {
                let pages = index.candidates_of(self.row(at));
                let is_full = self.pairs.len() + pages.len() > pairs_max;
                if !self.pairs.is_empty() && (is_full || beyond_count >= self.beyond_max) {
                    break;
                }
                for page in pages {
                    beyond_count += usize::from(index.may_be_beyond(page));
                    self.pairs.push((u64::from(page) << 32) | at as u64);
                }
            }
            end = at + 1;
        }
        self.pairs.sort_unstable();
        end
    }

    /// Keeps pairs of all other rows that lie on these pages; `false` when they are too many, and
    /// fewer rows would do.
    fn gather_others(
        &mut self,
        index: &impl RowPages,
        rows: Range<usize>,
        pairs_max: usize,
    ) -> bool {
        let own_count = self.pairs.len();
        self.own.assign(self.pairs.iter().map(|&pair| (pair >> 32) as u32));
        let own = self.own.pages().iter().copied();
        self.beyond.assign(own.filter(|&page| index.may_be_beyond(page)));
        let has_beyond = !self.beyond.pages().is_empty();
        let mut found = std::mem::take(&mut self.served);
        for at in (rows.start..self.order.len()).filter(|&at| self.is_needed[at]) {
            let (row, page_count) = (self.row(at), (self.order[at].0 >> 32) as usize);
            found.clear();
            if at >= rows.end {
                found.extend(index.candidates_of(row).filter(|&page| self.own.holds(page)));
            }
            if has_beyond && page_count >= index.index_limit() {
                index.find_beyond(row, &self.beyond, &mut found);
            }
            self.pairs.extend(found.iter().map(|&page| (u64::from(page) << 32) | at as u64));
            if self.pairs.len() > pairs_max && rows.len() > 1 {
                self.served = found;
                return false;
            }
        }
        self.served = found;
        if self.pairs.len() > own_count {
            self.pairs.sort_unstable();
        }
        true
    }

    /// Returns the pages of the pairs, each once, ascending.
    pub(super) fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.pairs.chunk_by(|a, b| a >> 32 == b >> 32).map(|pairs| (pairs[0] >> 32) as u32)
    }

    /// Counts how many rows of a page are still needed.
    pub(super) fn count_needed(&self, page: u32) -> u32 {
        self.rows_of(page).filter(|&at| self.is_needed[at]).count() as u32
    }

    /// Marks the rows of a page as needed no more and returns their positions, by row.
    pub(super) fn serve(&mut self, page: u32) -> &[u32] {
        let mut served = std::mem::take(&mut self.served);
        served.clear();
        served.extend(self.rows_of(page).filter(|&at| self.is_needed[at]).map(|at| at as u32));
        served.iter().for_each(|&at| self.is_needed[at as usize] = false);
        assert!(served.len() <= self.needed_count as usize, "a row is served once");
        self.needed_count -= served.len() as u32;
        served.sort_unstable_by_key(|&at| self.order[at as usize].0 as u32);
        served.iter_mut().for_each(|at| *at = self.order[*at as usize].1);
        self.served = served;
        &self.served
    }

    /// Returns the rows of the order that lie on a page.
    fn rows_of(&self, page: u32) -> impl Iterator<Item = usize> + '_ {
        let page = u64::from(page);
        let first = self.pairs.partition_point(|&pair| pair >> 32 < page);
        let pairs = self.pairs[first..].iter().take_while(move |&&pair| pair >> 32 == page);
        pairs.map(|&pair| pair as u32 as usize)
    }
}
