//! What are the newest rows of some ranges? Homes with their deltas laid over them, in memory.
//!
//! Merges, scans and `verify` look at tables this way: one sequential read per home, one sorted
//! read of the delta rows.

use tierbed_core::Result;
use tierbed_trainstore::verify;

use crate::cost::{cover, PageRun};
use crate::disk::Disk;
use crate::read::page_of;
use crate::table::ColdTable;

/// Memory per delta row while an image is made: place, range and position; and a request.
pub(crate) const OVERLAY_BYTES: usize = size_of::<(u32, u32, u16)>() + size_of::<PageRun>();

/// Bytes that were read to make an image.
pub(crate) type ReadBytes = u64;

impl ColdTable {
    /// Fills `image` (a range's bytes per range) with the homes of ranges `first..first + count`
    /// and their delta rows. Pages are not sealed; those without rows are zeros.
    ///
    /// # Errors
    /// `Corruption`, `Io`.
    pub(crate) fn load(
        &self,
        disk: &mut Disk,
        (first, count): (usize, usize),
        image: &mut [u8],
    ) -> Result<ReadBytes> {
        image.fill(0);
        Ok(self.load_homes(disk, (first, count), image)?
            + self.load_deltas(disk, (first, count), image)?)
    }

    fn load_homes(
        &self,
        disk: &mut Disk,
        (first, count): (usize, usize),
        image: &mut [u8],
    ) -> Result<ReadBytes> {
        let page_bytes = self.geometry.page_bytes();
        let (mut runs, mut owners) = (Vec::new(), Vec::new());
        for range in first..first + count {
            let home = self.range(range);
            let Some(extent) = home.extent() else { continue };
            let at = self.geometry.first_page(extent);
            let pages = (0..self.geometry.range_pages).filter(|page| home.has_page(*page));
            let pages = pages.map(|page| at + page as u32);
            runs.extend(cover(pages, disk.gap_pages(self.pages), disk.pages_max(self.pages)));
            owners.resize(runs.len(), range);
        }
        disk.read(self.pages, &runs, &mut |at, bytes| {
            let (Some(run), Some(range)) = (runs.get(at), owners.get(at)) else { return Ok(()) };
            let home = self.range(*range);
            let first_page = home.extent().map_or(0, |extent| self.geometry.first_page(extent));
            for number in run.first..run.end() {
                let page = u64::from(number - first_page);
                if !home.has_page(page) {
                    continue;
                }
                let bytes = page_of(bytes, number - run.first, page_bytes);
                verify(bytes, self.home_name(*range, page, home.version), &self.file)?;
                if let Some(place) = self.image_page(image, range - first, page) {
                    place.copy_from_slice(bytes);
                }
            }
            Ok(())
        })?;
        Ok(bytes_of(&runs, page_bytes))
    }

    fn load_deltas(
        &self,
        disk: &mut Disk,
        (first, count): (usize, usize),
        image: &mut [u8],
    ) -> Result<ReadBytes> {
        let mut rows: Vec<(u32, u32, u16)> = Vec::new();
        for at in 0..count {
            let list = self.index.list(first + at);
            rows.extend(list.into_iter().flat_map(|list| {
                list.iter().map(move |(position, loc)| (loc, at as u32, position))
            }));
        }
        rows.sort_unstable();
        let slots = self.geometry.delta_slots;
        let pages = rows.iter().map(|row| row.0 / slots);
        let runs = cover(pages, disk.gap_pages(self.pages), disk.pages_max(self.pages));
        let page_bytes = self.geometry.page_bytes();
        disk.read(self.pages, &runs, &mut |at, bytes| {
            let Some(run) = runs.get(at) else { return Ok(()) };
            let from = rows.partition_point(|row| row.0 / slots < run.first);
            let mut checked = None;
            for &(loc, range, position) in rows.get(from..).unwrap_or(&[]) {
                let (number, slot) = self.geometry.delta_place(loc);
                if number >= run.end() {
                    break;
                }
                let bytes = page_of(bytes, number - run.first, page_bytes);
                if checked != Some(number) {
                    verify(bytes, self.run_name(number)?, &self.file)?;
                    checked = Some(number);
                }
                let (page, home_slot) = self.geometry.place_in_range(position);
                let place = self.image_page(image, range as usize, page);
                if let (Some(place), Some(record)) = (place, self.delta_record(bytes, slot)) {
                    self.geometry.layout.put_record(place, home_slot, record);
                }
            }
            Ok(())
        })?;
        Ok(bytes_of(&runs, page_bytes))
    }

    /// Returns page `page` of the range at `at` in an image.
    pub(crate) fn image_page<'a>(
        &self,
        image: &'a mut [u8],
        at: usize,
        page: u64,
    ) -> Option<&'a mut [u8]> {
        let from = at * self.geometry.extent_bytes() + page as usize * self.geometry.page_bytes();
        image.get_mut(from..from + self.geometry.page_bytes())
    }
}

fn bytes_of(runs: &[PageRun], page_bytes: usize) -> u64 {
    runs.iter().map(|run| u64::from(run.count) * page_bytes as u64).sum()
}
