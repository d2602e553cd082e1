//! Merge of a range with its delta rows, copy on write.
//!
//! Nothing that is read is changed, so a merge that fails, or a crash in it, leaves the table as
//! it was. What a range's runs held is outdated afterwards: the range's version is newer.

use tierbed_core::Result;
use tierbed_trainstore::seal;

use crate::cost::{consecutive, PageRun};
use crate::disk::Disk;
use crate::image::ReadBytes;
use crate::table::{ColdTable, HomeRange};

/// Bytes a merge moved, and rows it brought home.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Merged {
    pub(crate) read_bytes: ReadBytes,
    pub(crate) write_bytes: u64,
    pub(crate) row_count: u64,
}

impl ColdTable {
    /// Estimates the bytes that merging `range` moves.
    pub(crate) fn merge_cost(&self, range: usize) -> u64 {
        let page_bytes = self.geometry.page_bytes() as u64;
        let home_pages = u64::from(self.range(range).pages.count_ones());
        let outdated = self.index.outdated_count(range) as u64;
        let pages = home_pages.max(outdated.div_ceil(self.geometry.layout.rows_per_page));
        // The home is read and written; delta rows come from pages that hold others too.
        (home_pages + pages) * page_bytes + outdated * 2 * self.record_bytes() as u64
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
        let version = self.take_version()?;
        let overlaid: Vec<u64> = ranges.iter().map(|range| self.overlaid_pages(*range)).collect();
        let read_bytes = self.load(disk, (ranges, &overlaid), image)?;
        let mut merged = Merged { read_bytes, ..Merged::default() };
        let mut homes = Vec::with_capacity(ranges.len());
        let result = self.write_homes(disk, ranges, version, (image, &mut homes));
        let result = result.and_then(|()| disk.finish_writes());
        if let Err(error) = result {
            // Writes still in flight must not meet the extent's next owner.
            let _ = disk.finish_writes();
            homes.iter().filter_map(HomeRange::extent).for_each(|at| self.extents.release(at));
            return Err(error.with("file", &self.file));
        }
        for (range, home) in ranges.iter().copied().zip(homes) {
            merged.write_bytes +=
                u64::from(home.pages.count_ones()) * self.geometry.page_bytes() as u64;
            self.set_home(range, home);
            let Some(list) = self.index.take(range) else { continue };
            merged.row_count += list.len() as u64;
            list.iter().for_each(|(_, loc)| self.kill(loc));
        }
        Ok(merged)
    }

    fn write_homes(
        &mut self,
        disk: &mut Disk,
        ranges: &[usize],
        version: u32,
        (image, homes): (&mut [u8], &mut Vec<HomeRange>),
    ) -> Result<()> {
        for (at, range) in ranges.iter().copied().enumerate() {
            let mut pages = self.range(range).pages;
            for (position, _) in self.index.list(range).into_iter().flat_map(|list| list.iter()) {
                pages |= 1 << self.geometry.place_in_range(position).0;
            }
            let extent = self.take_extent()?;
            homes.push(HomeRange::new(extent, version, pages));
            let held = |page: &u64| pages >> page & 1 == 1;
            for page in (0..self.geometry.range_pages).filter(held) {
                let name = self.home_name(range, page, version);
                if let Some(bytes) = self.image_page(image, at, page) {
                    seal(bytes, name);
                }
            }
            let numbers = (0..self.geometry.range_pages).filter(held).map(|page| page as u32);
            for piece in consecutive(numbers, disk.pages_max(self.pages)) {
                self.write_piece(disk, extent, (at, piece), image)?;
            }
        }
        Ok(())
    }

    fn write_piece(
        &self,
        disk: &mut Disk,
        extent: u32,
        (at, piece): (usize, PageRun),
        image: &[u8],
    ) -> Result<()> {
        let page_bytes = self.geometry.page_bytes();
        let from = at * self.geometry.extent_bytes() + piece.first as usize * page_bytes;
        let len_bytes = piece.count as usize * page_bytes;
        let buf = disk.write_buf()?;
        let bytes = image.get(from..from + len_bytes).unwrap_or(&[]);
        if let Some(place) = disk.bytes_mut(buf).get_mut(..len_bytes) {
            place.copy_from_slice(bytes);
        }
        let first = self.geometry.first_page(extent) + piece.first;
        disk.write(self.pages, PageRun { first, ..piece }, buf);
        Ok(())
    }
}
