//! The newest rows of some ranges, in memory: base pages with their deltas applied.
//!
//! Merges, scans and `verify` look at tables this way: one sequential read per base, one sorted
//! read of the delta rows.

#![expect(
    clippy::indexing_slicing,
    reason = "an image is as long as its ranges; runs and rows are those that were asked for"
)]

use crate::verify;
use tierbed_core::Result;

use crate::cold::cost::{cover, PageRun};
use crate::cold::disk::{Disk, FileRuns};
use crate::cold::read::page_of;
use crate::cold::table::{BaseRange, ColdTable};

/// Memory per delta row while an image is made: place, range and position; and a request.
pub(crate) const OVERLAY_BYTES: usize = size_of::<OverlayRow>() + size_of::<PageRun>();

/// Bytes that were read to make an image.
pub(crate) type ReadBytes = u64;

/// The ranges that an image holds.
#[derive(Clone, Copy)]
pub(crate) struct ImageRanges<'a> {
    /// Range numbers, ascending.
    pub(crate) ranges: &'a [usize],
    /// Of each range a bit per page whose base is not read; none when all bases are.
    pub(crate) overlaid: Option<&'a [u64]>,
}

impl ImageRanges<'_> {
    /// Returns whether the image needs page `page` of `base`, the range at position `at`.
    fn needs(&self, at: usize, page: u64, base: BaseRange) -> bool {
        let is_overlaid = self.overlaid.is_some_and(|overlaid| overlaid[at] >> page & 1 == 1);
        base.has_page(page) && !is_overlaid
    }
}

/// A delta row of an image.
struct OverlayRow {
    /// Place in the delta pages.
    loc: u32,
    /// Position of its range in the image.
    range: u32,
    /// Position in its range.
    position: u16,
}

impl ColdTable {
    /// Fills `image` (a range's bytes per range) with the bases of `wanted` and their delta rows.
    /// Pages are not sealed; those without rows are zeros.
    ///
    /// # Errors
    /// `Corruption`, `Io`.
    pub(crate) fn load(
        &self,
        disk: &mut Disk,
        wanted: ImageRanges<'_>,
        image: &mut [u8],
    ) -> Result<ReadBytes> {
        let ranges = wanted.ranges;
        assert!(
            image.len() == ranges.len() * self.geometry.extent_bytes(),
            "an image has an extent's bytes per range"
        );
        let is_of_ranges = |overlaid: &[u64]| overlaid.len() == ranges.len();
        assert!(wanted.overlaid.is_none_or(is_of_ranges), "a word of pages per range");
        image.fill(0);
        Ok(self.load_bases(disk, wanted, image)? + self.load_deltas(disk, ranges, image)?)
    }

    fn load_bases(
        &self,
        disk: &mut Disk,
        wanted: ImageRanges<'_>,
        image: &mut [u8],
    ) -> Result<ReadBytes> {
        let page_bytes = self.geometry.page_bytes();
        // Which position in the image and which first page of its extent each run belongs to.
        let (mut runs, mut owners) = (Vec::new(), Vec::new());
        for (place, range) in wanted.ranges.iter().enumerate() {
            let base = self.range(*range);
            let Some(extent) = base.extent() else { continue };
            let first_page = self.geometry.first_page(extent);
            let pages = (0..self.geometry.range_pages)
                .filter(|page| wanted.needs(place, *page, base))
                .map(|page| first_page + page as u32);
            runs.extend(cover(pages, disk.gap_pages(self.pages), disk.pages_max(self.pages)));
            owners.resize(runs.len(), (place, first_page));
        }
        let file = FileRuns { file: self.pages, runs: &runs };
        disk.read(&[file], &mut |_, at, bytes| {
            let (run, (place, first_page)) = (runs[at], owners[at]);
            let range = wanted.ranges[place];
            let base = self.range(range);
            for number in run.first..run.end() {
                let page = u64::from(number - first_page);
                // Pages may be read only because they lie between others.
                if !wanted.needs(place, page, base) {
                    continue;
                }
                let bytes = page_of(bytes, number - run.first, page_bytes);
                verify(bytes, self.base_name(range, page, base.version), &self.file)?;
                self.image_page(image, place, page).copy_from_slice(bytes);
            }
            Ok(())
        })?;
        Ok(bytes_of(&runs, page_bytes))
    }

    /// Returns a bit per page of `range` whose rows all have deltas: its base need not be read.
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
        let mut rows: Vec<OverlayRow> = Vec::new();
        for (range, number) in (0..).zip(ranges) {
            let list = self.index.list(*number);
            rows.extend(list.into_iter().flat_map(|list| {
                list.iter().map(move |(position, loc)| OverlayRow { loc, range, position })
            }));
        }
        rows.sort_unstable_by_key(|row| (row.loc, row.range, row.position));
        let slots = self.geometry.delta_slots;
        let pages = rows.iter().map(|row| row.loc / slots);
        let runs = cover(pages, disk.gap_pages(self.pages), disk.pages_max(self.pages));
        let page_bytes = self.geometry.page_bytes();
        let file = FileRuns { file: self.pages, runs: &runs };
        disk.read(&[file], &mut |_, at, bytes| {
            let run = runs[at];
            let from = rows.partition_point(|row| row.loc / slots < run.first);
            let mut checked = None;
            for &OverlayRow { loc, range, position } in &rows[from..] {
                let (number, slot) = self.geometry.delta_place(loc);
                if number >= run.end() {
                    break;
                }
                let bytes = page_of(bytes, number - run.first, page_bytes);
                if checked != Some(number) {
                    verify(bytes, self.run_name(number)?, &self.file)?;
                    checked = Some(number);
                }
                let (page, base_slot) = self.geometry.place_in_range(position);
                let place = self.image_page(image, range as usize, page);
                let record = self.delta_record(bytes, slot);
                self.geometry.layout.put_record(place, base_slot, record);
            }
            Ok(())
        })?;
        Ok(bytes_of(&runs, page_bytes))
    }

    /// Returns page `page` of the range at `at` in an image.
    pub(crate) fn image_page<'a>(&self, image: &'a mut [u8], at: usize, page: u64) -> &'a mut [u8] {
        let from = at * self.geometry.extent_bytes() + page as usize * self.geometry.page_bytes();
        &mut image[from..from + self.geometry.page_bytes()]
    }
}

fn bytes_of(runs: &[PageRun], page_bytes: usize) -> u64 {
    runs.iter().map(|run| u64::from(run.count) * page_bytes as u64).sum()
}
