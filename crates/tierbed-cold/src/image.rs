//! The newest rows of some ranges, in memory: base pages with their deltas applied.
//!
//! Merges, scans and `verify` look at tables this way: one sequential read per home, one sorted
//! read of the delta rows.

use tierbed_core::Result;
use tierbed_trainstore::verify;

use crate::cost::{cover, PageRun};
use crate::disk::Disk;
use crate::read::page_of;
use crate::table::{ColdTable, HomeRange};

/// Memory per delta row while an image is made: place, range and position; and a request.
pub(crate) const OVERLAY_BYTES: usize = size_of::<(u32, u32, u16)>() + size_of::<PageRun>();

/// Bytes that were read to make an image.
pub(crate) type ReadBytes = u64;

impl ColdTable {
    /// Fills `image` (a range's bytes per range) with the homes of `ranges` (ascending) and their
    /// delta rows. Pages are not sealed; those without rows are zeros. Of the range at the same
    /// place, `unneeded` has a bit per page whose home is not to be read.
    ///
    /// # Errors
    /// `Corruption`, `Io`.
    pub(crate) fn load(
        &self,
        disk: &mut Disk,
        (ranges, unneeded): (&[usize], &[u64]),
        image: &mut [u8],
    ) -> Result<ReadBytes> {
        image.fill(0);
        Ok(self.load_homes(disk, (ranges, unneeded), image)?
            + self.load_deltas(disk, ranges, image)?)
    }

    fn load_homes(
        &self,
        disk: &mut Disk,
        (ranges, unneeded): (&[usize], &[u64]),
        image: &mut [u8],
    ) -> Result<ReadBytes> {
        let page_bytes = self.geometry.page_bytes();
        let is_needed = |place: usize, page: u64, home: HomeRange| {
            let unneeded = unneeded.get(place).copied().unwrap_or(0);
            home.has_page(page) && unneeded >> page & 1 == 0
        };
        let (mut runs, mut owners) = (Vec::new(), Vec::new());
        for (place, range) in ranges.iter().enumerate() {
            let home = self.range(*range);
            let Some(extent) = home.extent() else { continue };
            let at = self.geometry.first_page(extent);
            let pages = (0..self.geometry.range_pages).filter(|page| is_needed(place, *page, home));
            let pages = pages.map(|page| at + page as u32);
            runs.extend(cover(pages, disk.gap_pages(self.pages), disk.pages_max(self.pages)));
            owners.resize(runs.len(), (place, *range));
        }
        disk.read(&[(self.pages, &runs)], &mut |_, at, bytes| {
            let (Some(run), Some((place, range))) = (runs.get(at), owners.get(at)) else {
                return Ok(());
            };
            let home = self.range(*range);
            let first_page = home.extent().map_or(0, |extent| self.geometry.first_page(extent));
            for number in run.first..run.end() {
                let page = u64::from(number - first_page);
                // Pages may be read only because they lie between others.
                if !is_needed(*place, page, home) {
                    continue;
                }
                let bytes = page_of(bytes, number - run.first, page_bytes);
                verify(bytes, self.home_name(*range, page, home.version), &self.file)?;
                if let Some(page) = self.image_page(image, *place, page) {
                    page.copy_from_slice(bytes);
                }
            }
            Ok(())
        })?;
        Ok(bytes_of(&runs, page_bytes))
    }

    /// Returns a bit per page of `range` whose rows all have deltas: nobody needs its home.
    pub(crate) fn overlaid_pages(&self, range: usize) -> u64 {
        let per_page = self.geometry.layout.rows_per_page;
        let rows = self.index.list(range).into_iter().flat_map(|list| list.iter());
        let (mut overlaid, mut current, mut count) = (0, u64::MAX, 0);
        for (position, _) in rows {
            let page = self.geometry.place_in_range(position).0;
            count = if page == current { count + 1 } else { 1 };
            current = page;
            if count == per_page {
                overlaid |= 1 << page;
            }
        }
        overlaid
    }

    fn load_deltas(
        &self,
        disk: &mut Disk,
        ranges: &[usize],
        image: &mut [u8],
    ) -> Result<ReadBytes> {
        let mut rows: Vec<(u32, u32, u16)> = Vec::new();
        for (at, range) in ranges.iter().enumerate() {
            let list = self.index.list(*range);
            rows.extend(list.into_iter().flat_map(|list| {
                list.iter().map(move |(position, loc)| (loc, at as u32, position))
            }));
        }
        rows.sort_unstable();
        let slots = self.geometry.delta_slots;
        let pages = rows.iter().map(|row| row.0 / slots);
        let runs = cover(pages, disk.gap_pages(self.pages), disk.pages_max(self.pages));
        let page_bytes = self.geometry.page_bytes();
        disk.read(&[(self.pages, &runs)], &mut |_, at, bytes| {
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
