//! Verification and decoding of a delta run's pages.

#![expect(
    clippy::indexing_slicing,
    reason = "pieces are read in the order and number in which they were asked for"
)]

use crate::{verify, HEADER_BYTES};
use tierbed_core::{Result, RowId, RowKey, TableId};

use crate::cold::cost::{consecutive, cover, PageRun};
use crate::cold::disk::{Disk, FileRuns};
use crate::cold::read::page_of;
use crate::cold::run::{decode_keys, run_page, Run, DELTA_MAGIC, KEYS_MAGIC};
use crate::cold::table::ColdTable;

/// Takes a page: its position among all that are read, its number, its bytes.
type PageSink<'a> = dyn FnMut(usize, u32, &[u8]) -> Result<()> + 'a;

impl ColdTable {
    /// Reads the rows whose records `run` holds, ascending.
    ///
    /// # Errors
    /// `Corruption`, `Io`.
    pub(crate) fn read_keys(&self, disk: &mut Disk, run: &Run) -> Result<Vec<u64>> {
        let payload_bytes = self.payload_bytes();
        let count = run.key_page_count(payload_bytes);
        let pieces = consecutive(run.pages().take(count), disk.pages_max(self.pages));
        let mut keys = vec![0; count * payload_bytes];
        self.read_pieces(disk, &pieces, &mut |position, number, page| {
            verify(page, run_page(KEYS_MAGIC, self.owner, number, run.version), &self.file)?;
            let from = position * payload_bytes;
            keys[from..from + payload_bytes].copy_from_slice(&page[HEADER_BYTES..]);
            Ok(())
        })?;
        keys.truncate(run.key_bytes as usize);
        decode_keys(&keys, run.row_count, self.row_count)
            .map_err(|error| error.with("file", &self.file).with("run", run.version))
    }

    /// Lists the rows whose newest version is in run `version`, with their places.
    ///
    /// # Errors
    /// `Corruption`, `Io`.
    pub(crate) fn live_rows_of(&self, disk: &mut Disk, version: u32) -> Result<Vec<(RowKey, u32)>> {
        let rows = self.read_keys(disk, &self.runs[&version])?;
        let live = rows.into_iter().filter_map(|row| {
            let (range, position) = self.geometry.range_of(row);
            let loc = self.index.get(range, position)?;
            let page = self.geometry.delta_place(loc).0;
            let key = RowKey::new(TableId(self.id), RowId(row));
            (self.version_of_page(page) == Some(version)).then_some((key, loc))
        });
        let mut live: Vec<_> = live.collect();
        live.sort_unstable_by_key(|(_, loc)| *loc);
        Ok(live)
    }

    /// Reads the records of those of `rows` (by place, ascending) that are still the newest.
    ///
    /// # Errors
    /// `Corruption`, `Io`.
    pub(crate) fn read_live(
        &self,
        disk: &mut Disk,
        rows: &[(RowKey, u32)],
        visit: &mut dyn FnMut(RowKey, &[u8]),
    ) -> Result<()> {
        let pages = rows.iter().map(|(_, loc)| self.geometry.delta_place(*loc).0);
        let pieces = cover(pages, disk.gap_pages(self.pages), disk.pages_max(self.pages));
        self.read_pieces(disk, &pieces, &mut |_, number, page| {
            let place = |row: &(RowKey, u32)| self.geometry.delta_place(row.1);
            let first = rows.partition_point(|row| place(row).0 < number);
            let rows = rows[first..].iter();
            let mut is_checked = false;
            for row in rows.take_while(|row| place(row).0 == number) {
                let (range, position) = self.geometry.range_of(row.0.row.0);
                if self.index.get(range, position) != Some(row.1) {
                    continue;
                }
                if !is_checked {
                    verify(page, self.run_name(number)?, &self.file)?;
                    is_checked = true;
                }
                visit(row.0, self.delta_record(page, place(row).1));
            }
            Ok(())
        })
    }

    /// Makes the index forget `rows`, where it still has them at these places: their newest
    /// version waits in the write buffer.
    pub(crate) fn forget(&mut self, rows: &[(RowKey, u32)]) {
        let geometry = self.geometry;
        for &(key, loc) in rows {
            let (range, position) = geometry.range_of(key.row.0);
            if self.index.remove(range, position, loc) {
                self.kill(loc);
            }
        }
    }

    /// Checks every page of every run that still belongs to it; returns their number.
    ///
    /// # Errors
    /// `Corruption`, `Io`.
    pub(crate) fn verify_runs(&self, disk: &mut Disk) -> Result<u64> {
        let mut checked = 0;
        for run in self.runs.values() {
            let key_pages = run.key_page_count(self.payload_bytes());
            let pieces = consecutive(run.pages(), disk.pages_max(self.pages));
            self.read_pieces(disk, &pieces, &mut |position, number, page| {
                // A piece whose rows are all outdated may belong to another run by now.
                if self.version_of_page(number) != Some(run.version) {
                    return Ok(());
                }
                let magic = if position < key_pages { KEYS_MAGIC } else { DELTA_MAGIC };
                checked += 1;
                verify(page, run_page(magic, self.owner, number, run.version), &self.file)
            })?;
        }
        Ok(checked)
    }

    fn read_pieces(
        &self,
        disk: &mut Disk,
        pieces: &[PageRun],
        visit: &mut PageSink<'_>,
    ) -> Result<()> {
        let mut positions = Vec::with_capacity(pieces.len());
        let mut before = 0;
        for piece in pieces {
            positions.push(before);
            before += piece.count as usize;
        }
        let file = FileRuns { file: self.pages, runs: pieces };
        disk.read(&[file], &mut |_, at, bytes| {
            let (piece, position) = (pieces[at], positions[at]);
            for (at, number) in (piece.first..piece.end()).enumerate() {
                let page = page_of(bytes, at as u32, self.geometry.page_bytes());
                visit(position + at, number, page)?;
            }
            Ok(())
        })
    }
}
