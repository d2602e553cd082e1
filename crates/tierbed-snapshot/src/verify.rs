//! Verification of a snapshot: every page, every index entry, every attachment.

use tierbed_core::checksum::crc32c_append;
use tierbed_core::{Error, ErrorKind, Result, RowKey};
use tierbed_io::{AlignedBuf, OpenMode, PAGE_BYTES};

use crate::blocks::{check_crc, read_blocks};
use crate::manifest::{INDEX_NAME, PLACES_NAME, TAILS_NAME};
use crate::page::PageView;
use crate::places::{places_blocks, PlacementIndex};
use crate::snapshot::Snapshot;

/// Pages read at once: reads do not overlap, so that each must be long.
const VERIFY_PAGES: usize = 256;

impl Snapshot {
    /// Checks every page, every row's place, the index and the attachments, and the pages of deltas
    /// that were applied; returns the number
    /// of pages and index blocks checked.
    ///
    /// # Errors
    /// `Corruption` naming the first thing that is not what was written.
    pub fn verify(&self) -> Result<u64> {
        self.verify_files().map_err(|error| {
            let is_mended = error.context().iter().any(|(name, _)| *name == "remedy");
            match error.kind() {
                ErrorKind::Corruption if !is_mended => {
                    error.with("remedy", "publish the snapshot again")
                }
                _ => error,
            }
        })
    }

    fn verify_files(&self) -> Result<u64> {
        let expected_rows = self.manifest().row_count + self.manifest().replica_count();
        let mut buffer = AlignedBuf::new(VERIFY_PAGES * PAGE_BYTES);
        let (mut crc, mut row_count, mut first) = (0, 0, 0);
        while first < self.manifest().page_count {
            let count = (self.manifest().page_count - first).min(VERIFY_PAGES as u64) as usize;
            let (bytes, _) = buffer.split_at_mut(count * PAGE_BYTES);
            self.pages().read_at(first * PAGE_BYTES as u64, bytes)?;
            for (at, bytes) in bytes.chunks_exact(PAGE_BYTES).enumerate() {
                let page = PageView::parse(bytes, first + at as u64, &self.page_table().shapes)
                    .map_err(|error| error.with("path", &self.page_table().path))?;
                crc = crc32c_append(crc, &page.crc.to_le_bytes());
                row_count += self.verify_rows(&page)?;
            }
            first += count as u64;
        }
        if crc != self.manifest().pages_crc32c || row_count != expected_rows {
            return Err(Error::corruption("page file belongs to another snapshot")
                .with("path", &self.page_table().path)
                .with("expected_rows", expected_rows)
                .with("found_rows", row_count));
        }
        let mut blocks = self.index_bytes() / PAGE_BYTES as u64;
        let tails = self.manifest().tail_shapes()?.block_count();
        self.verify_blocks(INDEX_NAME, blocks - tails, self.manifest().index_crc32c)?;
        if let Some(tailed) = &self.manifest().tailed {
            self.verify_blocks(TAILS_NAME, tails, tailed.tails_crc32c)?;
        }
        if let Some(placed) = &self.manifest().placed {
            let places = places_blocks(self.schema(), placed)?;
            self.verify_blocks(PLACES_NAME, places, placed.places_crc32c)?;
            blocks += places;
        }
        for attachment in &self.manifest().attachments {
            self.manifest().read_attachment(self.folder().as_ref(), &attachment.name)?;
        }
        let mut pages = self.manifest().page_count;
        for overlay in &self.layers().overlays {
            overlay.scan(&mut |_, _| Ok(()))?;
            pages += overlay.manifest.page_count;
        }
        Ok(pages + blocks)
    }

    fn verify_blocks(&self, name: &str, block_count: u64, crc: u32) -> Result<()> {
        let device = self.folder().open(name, OpenMode::ReadOnly)?;
        let found = read_blocks(device.as_ref(), block_count, |_| ())?;
        check_crc(device.as_ref(), crc, found)
    }

    /// Checks that the index leads to each row that starts on `page`; returns their number.
    fn verify_rows(&self, page: &PageView<'_>) -> Result<u64> {
        let table_count = self.schema().tables().len() as u32;
        if let Some(placement) = page.owner.0.checked_sub(table_count) {
            return verify_items(page, self.places().get(placement));
        }
        let table = self.schema().table(page.owner)?;
        for slot in 0..page.row_count {
            let key = RowKey::new(page.owner, page.row(slot));
            let first_page = page.page_id.checked_sub(page.part as u64);
            let is_placed = self.places().starts.is_placed(page.owner);
            if key.row.0 >= table.row_count || is_placed || self.own_page_of(key)? != first_page {
                return Err(disagreement(page, slot).with("table", &table.name));
            }
        }
        Ok(if page.part == 0 { page.row_count as u64 } else { 0 })
    }
}

/// Checks that the index leads to `page` from each of its items; returns their number. That no page
/// lacks an item is seen by the sum over all pages: an index has a place for each.
fn verify_items(page: &PageView<'_>, placement: Option<&PlacementIndex>) -> Result<u64> {
    let bad = |slot| Err(disagreement(page, slot));
    let Some(placement) = placement else { return bad(0) };
    let number = page.page_id.checked_sub(placement.first_page);
    let Some(number) = number.and_then(|number| u32::try_from(number).ok()) else { return bad(0) };
    for slot in 0..page.row_count {
        let item = u32::try_from(page.row(slot).0).unwrap_or(u32::MAX);
        let is_again = slot > 0 && page.row(slot - 1).0 >= page.row(slot).0;
        if is_again || !placement.index.pages_of(item).any(|page| page == number) {
            return bad(slot);
        }
    }
    Ok(page.row_count as u64)
}

fn disagreement(page: &PageView<'_>, slot: usize) -> Error {
    Error::corruption("index and page disagree")
        .with("row", page.row(slot).0)
        .with("page_id", page.page_id)
}
