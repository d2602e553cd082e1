//! Data paths of the store: reads, scans, writes, and the flushes and merges they set off.

#![expect(
    clippy::indexing_slicing,
    reason = "keys are checked against the schema on entry; ranges are this store's"
)]

use std::ops::Range;

use tierbed_core::store::{RowSink, ScanSink};
use tierbed_core::{ErrorKind, Result, RowId, RowKey, RowWrite, TableId};

use crate::cold::flush::{BegunRun, SortedRows};
use crate::cold::image::ImageRanges;
use crate::cold::index::ROW_ALONE_BYTES;
use crate::cold::picker::{group, pick, Candidate, Group};
use crate::cold::read::{self, ReadFrom};
use crate::cold::store::ColdStore;
use crate::cold::table::ColdTable;

/// Part of its bound that the deltas are brought down by when they reach it.
const RELIEF: u64 = 8;
/// Steps towards less space after one flush; what is left waits for the next.
const SPACE_STEPS_MAX: usize = 8;

impl ColdStore {
    /// Reads `keys` (checked) in pieces whose requests fit the memory reserved for them.
    pub(crate) fn read_rows(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        let mut done = 0;
        for piece in keys.chunks(self.options.memory.read_rows_max) {
            let sink = &mut |at: usize, record: Option<&[u8]>| sink(done + at, record);
            let from = ReadFrom {
                tables: &self.tables,
                disk: &mut self.disk,
                stats: &mut self.cold,
                buffer: &self.buffer,
            };
            read::read(from, piece, sink)?;
            done += piece.len();
        }
        Ok(())
    }

    /// Visits the written rows of `table`; returns the number of base pages read.
    pub(crate) fn scan_table(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<u64> {
        let mut image = self.take_image();
        let result = self.scan_images(table, &mut image, sink);
        self.image = image;
        result
    }

    fn scan_images(
        &mut self,
        id: TableId,
        image: &mut [u8],
        sink: &mut ScanSink<'_>,
    ) -> Result<u64> {
        let table = &self.tables[id.0 as usize];
        let waiting = self.buffer.sorted();
        let waiting: Vec<_> = waiting.into_iter().filter(|(key, _)| key.table == id).collect();
        let extent_bytes = table.geometry.extent_bytes();
        let at_once = (image.len() / extent_bytes).max(1);
        let layout = table.geometry.layout;
        let mut checked = 0;
        for first in (0..table.ranges.len()).step_by(at_once) {
            let count = at_once.min(table.ranges.len() - first);
            let is_empty = (first..first + count).all(|range| {
                table.range(range).extent().is_none() && table.index.list(range).is_none()
            });
            let rows = rows_of(table, &waiting, first..first + count);
            if is_empty && rows.is_empty() {
                continue;
            }
            let bytes = &mut image[..count * extent_bytes];
            let ranges: Vec<usize> = (first..first + count).collect();
            let wanted = ImageRanges { ranges: &ranges, overlaid: None };
            table.load(&mut self.disk, wanted, bytes)?;
            for (key, at) in rows {
                let (range, position) = table.geometry.range_of(key.row.0);
                let (page, slot) = table.geometry.place_in_range(position);
                let page = table.image_page(bytes, range - first, page);
                layout.put_record(page, slot, self.buffer.record(*at, layout.record_bytes));
            }
            let first_page = first as u64 * table.geometry.range_pages;
            for (page, bytes) in (first_page..).zip(bytes.chunks_exact(layout.page_bytes)) {
                let range = (page / table.geometry.range_pages) as usize;
                checked +=
                    u64::from(table.range(range).has_page(page % table.geometry.range_pages));
                for slot in 0..layout.rows_per_page {
                    if let Some(record) = layout.record(bytes, slot as usize) {
                        sink(RowId(page * layout.rows_per_page + slot), record)?;
                    }
                }
            }
        }
        Ok(checked)
    }

    /// Takes `rows` (checked) into the write buffer, which becomes runs whenever it is full.
    pub(crate) fn write_rows(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        for row in rows {
            self.put(row)?;
            self.stats.rows_written += 1;
            self.cold.user_bytes_written += row.record.len() as u64;
        }
        Ok(())
    }

    fn put(&mut self, row: &RowWrite<'_>) -> Result<()> {
        if self.buffer.replace(row.key, row.record) {
            return Ok(());
        }
        if !self.buffer.fits(row.record.len()) {
            self.flush()?;
            // Runs that were given up may have filled the buffer again, and with this row.
            if !self.buffer.fits(row.record.len()) {
                self.flush_runs()?;
            }
            if self.buffer.replace(row.key, row.record) {
                return Ok(());
            }
        }
        self.buffer.push(row.key, row.record);
        Ok(())
    }

    /// Turns the write buffer into runs, and keeps the deltas within their bounds.
    ///
    /// # Errors
    /// `NoSpace`, `Corruption`, `Io`: the rows are still in the write buffer, or in runs.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.flush_runs()?;
        match self.relieve() {
            // The rows are safe; what could not be merged is tried again after the next flush.
            Err(error) if error.kind() == ErrorKind::NoSpace => Ok(()),
            result => result,
        }
    }

    /// Turns the write buffer into runs: all are written before any is made known, so that the
    /// device is waited for once.
    pub(crate) fn flush_runs(&mut self) -> Result<()> {
        self.make_index_room()?;
        let rows = self.buffer.sorted();
        let mut begun = Vec::new();
        let mut result = Ok(());
        for same_table in rows.chunk_by(|a, b| a.0.table == b.0.table) {
            let at = same_table[0].0.table.0 as usize;
            match self.begin_run(at, same_table) {
                Ok(run) => begun.push((at, run, same_table)),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        // Writes still in flight must not meet an extent's next owner.
        let result = result.and(self.disk.finish_writes());
        for (at, run, same_table) in begun {
            let table = &mut self.tables[at];
            if result.is_err() {
                table.give_up_run(&run);
                continue;
            }
            self.cold.run_bytes += table.finish_run(run, same_table);
            self.cold.run_count += 1;
        }
        result?;
        self.buffer.clear();
        Ok(())
    }

    fn begin_run(&mut self, at: usize, rows: SortedRows<'_>) -> Result<BegunRun> {
        assert!(rows.iter().all(|row| row.0.table.0 as usize == at), "rows of one table");
        let table = &self.tables[at];
        self.check_quota(table.growth_bytes(table.run_bytes_max(rows.len())))?;
        self.tables[at].begin_run(&mut self.disk, rows, &self.buffer)
    }

    // Merges until the index surely holds what is in the write buffer.
    fn make_index_room(&mut self) -> Result<()> {
        let wanted = (self.buffer.len() * ROW_ALONE_BYTES) as u64;
        while self.index_memory_bytes() + wanted > self.index_bytes_max() {
            let rows_bytes = self.live_bytes() / RELIEF;
            if self.merge_best(rows_bytes, u64::MAX)? == 0 {
                break;
            }
            self.cold.urgent_count += 1;
        }
        Ok(())
    }

    fn live_bytes(&self) -> u64 {
        self.tables.iter().map(ColdTable::live_bytes).sum()
    }

    /// Returns the bytes that deltas may take: a share of the bases, and a little to begin with.
    fn delta_bytes_max(&self) -> u64 {
        let bases: u64 = self.tables.iter().map(ColdTable::base_bytes).sum();
        let by_share = (bases as f64 * self.options.delta_share) as u64;
        by_share.max(4 * self.options.memory.write_buffer_bytes as u64)
    }

    // Live rows may take two thirds of what deltas may take; the rest is for outdated ones.
    fn live_bytes_max(&self) -> u64 {
        self.delta_bytes_max() / 3 * 2
    }

    fn relieve(&mut self) -> Result<()> {
        while self.live_bytes() > self.live_bytes_max() {
            if self.merge_best(self.live_bytes_max() / RELIEF, u64::MAX)? == 0 {
                break;
            }
            self.cold.urgent_count += 1;
        }
        for _ in 0..SPACE_STEPS_MAX {
            // Every table has an extent that is only begun.
            let begun: u64 = self.tables.iter().map(ColdTable::extent_bytes).sum();
            let bytes: u64 = self.tables.iter().map(ColdTable::delta_bytes).sum();
            if bytes <= self.delta_bytes_max() + begun {
                break;
            }
            // Runs of few rows are mostly padding: those rows move into their bases.
            if !self.compact_run()? && self.merge_best(bytes / RELIEF, u64::MAX)? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Merges what the picker picks; returns the bytes moved.
    fn merge_best(&mut self, freed_bytes: u64, cost_bytes_max: u64) -> Result<u64> {
        let tables = &self.tables;
        let candidates = tables.iter().flat_map(|table| {
            let all = 0..table.ranges.len();
            let outdated = all.filter(|range| table.index.list(*range).is_some());
            outdated.map(|range| candidate(table, range))
        });
        let picks = pick(candidates, freed_bytes, cost_bytes_max);
        let image_bytes = self.image_bytes;
        let ranges_max =
            |id: u32| (image_bytes / tables[id as usize].geometry.extent_bytes()).max(1);
        let groups = group(&picks, ranges_max);
        let mut image = self.take_image();
        let began_us = self.options.clock.now_us();
        let result = groups
            .iter()
            .try_fold(0, |moved, group| Ok(moved + self.merge_group(group, &mut image)?));
        self.image = image;
        let us = self.options.clock.now_us() - began_us;
        self.cold.merge_us += us;
        if let Ok(moved) = &result {
            self.scheduler.observe_merge(*moved, us);
        }
        result
    }

    fn merge_group(&mut self, group: &Group, image: &mut [u8]) -> Result<u64> {
        let (at, count) = (group.table as usize, group.ranges.len());
        let image_bytes = count * self.tables[at].geometry.extent_bytes();
        self.check_quota(self.tables[at].growth_bytes(image_bytes as u64))?;
        let image = &mut image[..image_bytes];
        let merged = self.tables[at].merge(&mut self.disk, &group.ranges, image)?;
        self.cold.ranges_merged += count as u64;
        self.cold.rows_merged += merged.row_count;
        self.cold.merge_read_bytes += merged.read_bytes;
        self.cold.merge_write_bytes += merged.write_bytes;
        Ok(merged.read_bytes + merged.write_bytes)
    }

    /// Merges while the buffered batches outlast it, when the deltas are half full.
    pub(crate) fn merge_ahead(&mut self, accesses_buffered: u64) -> Result<()> {
        let excess = self.live_bytes().saturating_sub(self.live_bytes_max() / 2);
        if excess == 0 {
            return Ok(());
        }
        let byte_us = self.disk.cost.estimate().1;
        let allowed = self.scheduler.bytes_allowed(accesses_buffered, byte_us);
        let least = self.tables.iter().map(ColdTable::extent_bytes).max().unwrap_or(0);
        if allowed < 2 * least {
            self.cold.deferred_count += 1;
            return Ok(());
        }
        let relief = excess.min(self.live_bytes_max() / RELIEF);
        match self.merge_best(relief, allowed) {
            Err(error) if error.kind() == ErrorKind::NoSpace => Ok(()),
            result => result.map(drop),
        }
    }

    // Takes the rows of the emptiest run back into the write buffer; `false` when none is empty
    // enough.
    fn compact_run(&mut self) -> Result<bool> {
        let emptiest = self.tables.iter().enumerate().filter_map(|(at, table)| {
            let (version, dead_bytes) = table.emptiest_run()?;
            Some((at, version, dead_bytes))
        });
        let Some((at, version, _)) = emptiest.max_by_key(|run| run.2) else { return Ok(false) };
        let table = &self.tables[at];
        let rows = table.live_rows_of(&mut self.disk, version)?;
        let record_bytes = table.record_bytes();
        let mut rest = rows.as_slice();
        while !rest.is_empty() {
            let room = self.buffer.room(record_bytes);
            if room == 0 {
                self.flush_runs()?;
                continue;
            }
            let (now, later) = rest.split_at(room.min(rest.len()));
            let table = &mut self.tables[at];
            let buffer = &mut self.buffer;
            table.read_live(&mut self.disk, now, &mut |key, record| {
                // What waits in the buffer is newer.
                if buffer.get(key, record_bytes).is_none() {
                    buffer.push(key, record);
                }
            })?;
            table.forget(now);
            self.cold.rows_compacted += now.len() as u64;
            rest = later;
        }
        self.cold.runs_compacted += 1;
        Ok(true)
    }
}

// The waiting rows of `ranges`.
fn rows_of<'a>(
    table: &ColdTable,
    waiting: &'a [(RowKey, usize)],
    ranges: Range<usize>,
) -> &'a [(RowKey, usize)] {
    let per_range = table.geometry.rows_per_range();
    let before = |end: usize| waiting.partition_point(|row| row.0.row.0 < end as u64 * per_range);
    &waiting[before(ranges.start)..before(ranges.end)]
}

fn candidate(table: &ColdTable, range: usize) -> Candidate {
    let outdated = table.index.outdated_count(range) as u32;
    Candidate {
        table: table.id,
        range: range as u32,
        outdated,
        cost_bytes: table.merge_cost(range),
        freed_bytes: u64::from(outdated) * table.record_bytes() as u64,
    }
}
