//! Geometry of a table's file: pages, ranges and extents.
//!
//! ```text
//! rows     0 .. r-1 | r .. 2r-1 | ...        r rows per page: `page_layout` of the file store
//! pages    0          1           ...
//! ranges   g pages each: the unit that is merged; a base range fills one extent
//! file     extents of g pages; each holds a base range, or pieces of delta runs
//! place    of a delta row: physical page * delta slots per page + slot, 32 bits
//! ```

use crate::{page_layout, PageLayout, HEADER_BYTES};
use tierbed_core::{Error, Result, TableSchema};

/// Pages of a range at most: presence of pages is one 64-bit word per range.
pub(crate) const RANGE_PAGES_MAX: u64 = 64;

/// Pages of a range of a small table.
const RANGE_PAGES_MIN: u64 = 8;

/// How a table's rows, pages, ranges and extents relate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) layout: PageLayout,
    /// Pages of a range and of an extent.
    pub(crate) range_pages: u64,
    /// Records of a delta page.
    pub(crate) delta_slots: u32,
}

impl Geometry {
    /// Computes the geometry of `table` with extents of at most `extent_bytes`, at least a page.
    pub(crate) fn new(table: &TableSchema, extent_bytes: usize) -> Self {
        let layout = page_layout(table);
        let by_bytes = (extent_bytes / layout.page_bytes).max(1) as u64;
        // Small tables have small ranges, but not too small: a table may grow, its ranges may not.
        let by_rows = layout.page_count.max(RANGE_PAGES_MIN);
        Self::with_range_pages(table, by_bytes.min(by_rows).min(RANGE_PAGES_MAX))
    }

    /// Rebuilds the geometry that a stored table has.
    pub(crate) fn with_range_pages(table: &TableSchema, range_pages: u64) -> Self {
        let layout = page_layout(table);
        let delta_slots = ((layout.page_bytes - HEADER_BYTES) / layout.record_bytes) as u32;
        Self { layout, range_pages, delta_slots }
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.layout.page_bytes
    }

    pub(crate) fn extent_bytes(&self) -> usize {
        self.range_pages as usize * self.layout.page_bytes
    }

    pub(crate) fn rows_per_range(&self) -> u64 {
        self.range_pages * self.layout.rows_per_page
    }

    pub(crate) fn range_count(&self) -> u64 {
        self.layout.page_count.div_ceil(self.range_pages)
    }

    /// Returns the range of `row` and the row's position in it.
    pub(crate) fn range_of(&self, row: u64) -> (usize, u16) {
        let per_range = self.rows_per_range();
        assert!(per_range <= 1 << 16, "a position in a range has 16 bits");
        // A page holds at most 505 rows (a 4 KiB page of 8-byte records), a range 64 pages.
        ((row / per_range) as usize, (row % per_range) as u16)
    }

    /// Returns the page within its range, and the slot, of the row at position `at`.
    pub(crate) fn place_in_range(&self, at: u16) -> (u64, usize) {
        self.layout.locate(u64::from(at))
    }

    /// Returns the extent of physical page `page`.
    pub(crate) fn extent_of(&self, page: u32) -> u32 {
        page / self.range_pages as u32
    }

    /// Returns the first physical page of `extent`.
    pub(crate) fn first_page(&self, extent: u32) -> u32 {
        extent * self.range_pages as u32
    }

    /// Returns the physical page and slot of a delta row.
    pub(crate) fn delta_place(&self, loc: u32) -> (u32, u32) {
        (loc / self.delta_slots, loc % self.delta_slots)
    }

    /// Returns how many extents a file may have: places of delta rows are 32-bit numbers.
    pub(crate) fn extents_max(&self) -> u32 {
        let slots_per_extent = self.range_pages * u64::from(self.delta_slots);
        u32::try_from((1 << 32) / slots_per_extent).unwrap_or(u32::MAX)
    }

    /// Checks numbers that came from disk.
    ///
    /// # Errors
    /// `Corruption`.
    pub(crate) fn check(&self) -> Result<()> {
        if (1..=RANGE_PAGES_MAX).contains(&self.range_pages) && self.delta_slots > 0 {
            return Ok(());
        }
        Err(Error::corruption("a range has an impossible size").with("pages", self.range_pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(dim: u32, row_count: u64) -> TableSchema {
        TableSchema::plain("t", row_count, dim)
    }

    #[test]
    fn rows_and_positions_name_each_other() {
        for dim in [1, 9, 36, 1100, 4096] {
            let geometry = Geometry::new(&table(dim, 1_000_000), 256 << 10);
            geometry.check().unwrap();
            assert!(geometry.rows_per_range() <= 1 << 16, "dim {dim}");
            for row in [0, 1, 4095, 123_456, 999_999] {
                let (range, at) = geometry.range_of(row);
                assert_eq!(
                    range as u64 * geometry.rows_per_range() + u64::from(at),
                    row,
                    "dim {dim}"
                );
                assert!((range as u64) < geometry.range_count());
                assert!(geometry.place_in_range(at).0 < geometry.range_pages);
            }
        }
    }

    #[test]
    fn small_tables_have_small_extents() {
        let geometry = Geometry::new(&table(36, 20), 256 << 10);
        assert_eq!((geometry.range_pages, geometry.range_count()), (RANGE_PAGES_MIN, 1));
    }
}
