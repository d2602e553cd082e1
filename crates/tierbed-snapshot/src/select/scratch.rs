//! Working memory of page selection: the rows of a call that still need a page.
//!
//! A small hash table from row to its first position in the call, with open addressing. It is as
//! large as the call needs, so that clearing it costs what the call asked for and not what the
//! largest call before it did.
#![expect(
    clippy::indexing_slicing,
    reason = "slots are reduced by the mask, positions are those of the call"
)]

use crate::index::PageIndex;

/// Slots of the table per row: half of them stay empty, so that a search ends soon.
const SLOTS_PER_ROW: usize = 2;
/// A slot without a row. No row has this number and position at once.
const EMPTY: u64 = u64::MAX;

/// Memory of a selection, used again by the next.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Row in the high half, position in the low half.
    slots: Vec<u64>,
    /// Slots in use by this call less one: a power of two less one.
    mask: usize,
    /// Per position: is the row still needed?
    is_needed: Vec<bool>,
    needed_count: u32,
    /// Positions that the page just chosen serves.
    served: Vec<u32>,
    /// Number of pages and row, and position, of the rows to be gone through.
    pub(super) order: Vec<(u64, u32)>,
    /// Rows still needed and page (inverted), of the pages that may be read.
    pub(super) candidates: Vec<(u32, std::cmp::Reverse<u32>)>,
}

impl Scratch {
    /// Bytes per row of the largest one-pass call: slots up to the next power of two, what is
    /// needed and served, and the order.
    pub const BYTES_PER_ROW: usize = 2 * SLOTS_PER_ROW * 8 + 1 + 4 + size_of::<(u64, u32)>();

    /// Forgets the last call and marks `rows` as needed. A row asked for twice is needed once, at
    /// its first position; a row that lies on no page is not needed.
    pub(super) fn start(&mut self, index: &PageIndex, rows: &[u32]) {
        let slot_count = (SLOTS_PER_ROW * rows.len()).next_power_of_two().max(2);
        self.slots.clear();
        self.slots.resize(slot_count, EMPTY);
        self.mask = slot_count - 1;
        self.is_needed.clear();
        self.is_needed.resize(rows.len(), false);
        self.needed_count = 0;
        for (position, &row) in (0..).zip(rows) {
            if !index.pages_of(row).is_empty() && self.insert(row, position) {
                self.set_needed(position, true);
                self.needed_count += 1;
            }
        }
    }

    /// Returns how many rows are still needed.
    pub(super) fn needed_count(&self) -> u32 {
        self.needed_count
    }

    pub(super) fn is_needed(&self, position: u32) -> bool {
        self.is_needed[position as usize]
    }

    /// Counts how many rows of a page are still needed.
    pub(super) fn count_needed(&self, rows: &[u32]) -> u32 {
        rows.iter().filter(|&&row| self.find(row).is_some_and(|at| self.is_needed(at))).count()
            as u32
    }

    /// Marks the rows of a page as needed no more and returns their positions.
    pub(super) fn serve(&mut self, rows: &[u32]) -> &[u32] {
        self.served.clear();
        for &row in rows {
            let position = self.find(row).filter(|&position| self.is_needed(position));
            if let Some(position) = position {
                self.set_needed(position, false);
                self.served.push(position);
            }
        }
        assert!(self.served.len() <= self.needed_count as usize, "a row is served once");
        self.needed_count -= self.served.len() as u32;
        &self.served
    }

    fn set_needed(&mut self, position: u32, is_needed: bool) {
        self.is_needed[position as usize] = is_needed;
    }

    /// Adds a row; `false` when it is there.
    fn insert(&mut self, row: u32, position: u32) -> bool {
        let mut at = self.home_of(row);
        loop {
            let slot = &mut self.slots[at];
            if *slot == EMPTY {
                *slot = (u64::from(row) << 32) | u64::from(position);
                return true;
            }
            if (*slot >> 32) as u32 == row {
                return false;
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Returns the position of a row.
    fn find(&self, row: u32) -> Option<u32> {
        let mut at = self.home_of(row);
        loop {
            let slot = self.slots[at];
            if slot == EMPTY {
                return None;
            }
            if (slot >> 32) as u32 == row {
                return Some(slot as u32);
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Spreads rows by the high half of a multiplication (Fibonacci hashing).
    fn home_of(&self, row: u32) -> usize {
        let product = u64::from(row).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (product >> 32) as usize & self.mask
    }
}
