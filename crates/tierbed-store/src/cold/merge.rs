//! Merge of a range with its delta rows, copy on write.
//!
//! Nothing that is read is changed, so a merge that fails, or a crash in it, leaves the table as
//! it was. What a range's runs held is outdated afterwards: the range's version is newer.

#![expect(clippy::indexing_slicing, reason = "pieces are cut from the ranges that the image holds")]

use crate::seal;
use tierbed_core::Result;

use crate::cold::cost::{consecutive, PageRun};
use crate::cold::disk::Disk;
use crate::cold::image::{ImageRanges, ReadBytes};
use crate::cold::table::{BaseRange, ColdTable};

/// Bytes a merge moved, and delta rows it moved into their bases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Merged {
    pub(crate) read_bytes: ReadBytes,
    pub(crate) write_bytes: u64,
    pub(crate) row_count: u64,
}

/// New bases on their way to disk.
struct Rewriting<'a> {
    ranges: &'a [usize],
    /// Their bytes, a range after the other.
    image: &'a mut [u8],
    version: u32,
    /// Those of the first ranges that have an extent already.
    bases: Vec<BaseRange>,
}

impl ColdTable {
    /// Estimates the bytes that merging `range` moves.
    pub(crate) fn merge_cost(&self, range: usize) -> u64 {
        let page_bytes = self.geometry.page_bytes() as u64;
        let base_pages = u64::from(self.range(range).pages.count_ones());
        let outdated = self.index.outdated_count(range) as u64;
        let pages = base_pages.max(outdated.div_ceil(self.geometry.layout.rows_per_page));
        // The base is read and written; delta rows come from pages that hold others too.
        (base_pages + pages) * page_bytes + outdated * 2 * self.record_bytes() as u64
    }

    /// Merges `ranges` (ascending); `image` holds their bytes for a while.
    ///
    /// # Errors
    /// `NoSpace`, `Corruption`, `Io`: the table is as before.
    pub(crate) fn merge(
        &mut self,
        disk: &mut Disk,
        ranges: &[usize],
        image: &mut [u8],
    ) -> Result<Merged> {
        assert!(ranges.is_sorted_by(|a, b| a < b), "each range is merged once");
        let version = self.take_version()?;
        let overlaid: Vec<u64> = ranges.iter().map(|range| self.overlaid_pages(*range)).collect();
        let read_bytes =
            self.load(disk, ImageRanges { ranges, overlaid: Some(&overlaid) }, image)?;
        let mut merged = Merged { read_bytes, ..Merged::default() };
        let mut writing = Rewriting { ranges, image, version, bases: Vec::new() };
        let result = self.write_bases(disk, &mut writing);
        let bases = writing.bases;
        if let Err(error) = result.and_then(|()| disk.finish_writes()) {
            // Writes still in flight must not meet the extent's next owner.
            let _ = disk.finish_writes();
            bases.iter().filter_map(BaseRange::extent).for_each(|at| self.extents.release(at));
            return Err(error.with("file", &self.file));
        }
        assert!(bases.len() == ranges.len(), "every range has its new base");
        for (range, base) in ranges.iter().copied().zip(bases) {
            merged.write_bytes +=
                u64::from(base.pages.count_ones()) * self.geometry.page_bytes() as u64;
            self.set_base(range, base);
            let Some(list) = self.index.take(range) else { continue };
            merged.row_count += list.len() as u64;
            list.iter().for_each(|(_, loc)| self.kill(loc));
        }
        Ok(merged)
    }

    fn write_bases(&mut self, disk: &mut Disk, writing: &mut Rewriting<'_>) -> Result<()> {
        let version = writing.version;
        for (at, range) in writing.ranges.iter().copied().enumerate() {
            let mut pages = self.range(range).pages;
            for (position, _) in self.index.list(range).into_iter().flat_map(|list| list.iter()) {
                pages |= 1 << self.geometry.place_in_range(position).0;
            }
            let extent = self.take_extent()?;
            writing.bases.push(BaseRange::new(extent, version, pages));
            let held = |page: &u64| pages >> page & 1 == 1;
            for page in (0..self.geometry.range_pages).filter(held) {
                let name = self.base_name(range, page, version);
                seal(self.image_page(writing.image, at, page), name);
            }
            let numbers = (0..self.geometry.range_pages).filter(held).map(|page| page as u32);
            let extent_bytes = self.geometry.extent_bytes();
            let base = &writing.image[at * extent_bytes..(at + 1) * extent_bytes];
            for piece in consecutive(numbers, disk.pages_max(self.pages)) {
                self.write_piece(disk, extent, piece, base)?;
            }
        }
        Ok(())
    }

    // Writes the pages `piece` of `base`, a range's bytes, to the same pages of `extent`.
    fn write_piece(&self, disk: &mut Disk, extent: u32, piece: PageRun, base: &[u8]) -> Result<()> {
        let page_bytes = self.geometry.page_bytes();
        let from = piece.first as usize * page_bytes;
        let len_bytes = piece.count as usize * page_bytes;
        let buf = disk.write_buf()?;
        disk.bytes_mut(buf)[..len_bytes].copy_from_slice(&base[from..from + len_bytes]);
        let first = self.geometry.first_page(extent) + piece.first;
        disk.write(self.pages, PageRun { first, ..piece }, buf);
        Ok(())
    }
}
