//! One window of a plan in memory: its entries, where they go next, and its batches.

#![expect(clippy::indexing_slicing, reason = "parsing checked where columns begin and end")]

use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::Result;
use tierbed_io::AlignedBuf;

use super::columns::{Columns, Firsts, NextUses, RowIds, TableFirsts};
use super::format::{
    damaged, Cursor, WindowMeta, BLOCK_BATCH_BYTES, BLOCK_HEAD_BYTES, BLOCK_MAGIC,
    BLOCK_TABLE_BYTES,
};
use crate::planned::bits::{BitSlice, PAD_BYTES};

/// The entries of one table in a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct TableEntries {
    /// Number of the table's first entry in the window.
    pub(crate) first: u32,
    pub(crate) count: u32,
    number: usize,
    columns: Columns,
    /// Where the columns begin, and the last one ends.
    at: [usize; 5],
}

/// One batch of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) index_count: u32,
    pub(crate) checksum: u32,
    mapping_bit: usize,
}

impl Batch {
    /// Returns the same batch with another checksum.
    pub(crate) fn known_by(self, checksum: u32) -> Self {
        Self { checksum, ..self }
    }

    /// Tells whether so many indices with that checksum are this batch.
    pub(crate) fn is_of(&self, index_count: usize, checksum: u32) -> bool {
        self.index_count as usize == index_count && self.checksum == checksum
    }
}

/// One window of a plan, in memory as on disk.
#[derive(Debug)]
pub(crate) struct PlanWindow {
    pub(super) buf: AlignedBuf,
    len_bytes: usize,
    batch_count: u32,
    notes_at: usize,
    mappings_at: usize,
    tables: Vec<TableEntries>,
    firsts: Arc<Firsts>,
    /// Row ids of all entries, once unpacked.
    rows: Vec<u64>,
}

impl Default for PlanWindow {
    fn default() -> Self {
        Self {
            buf: AlignedBuf::new(0),
            len_bytes: 0,
            batch_count: 0,
            notes_at: 0,
            mappings_at: 0,
            tables: Vec::new(),
            firsts: Arc::default(),
            rows: Vec::new(),
        }
    }
}

/// Which part of a block is in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Entries,
    All,
}

impl Part {
    pub(super) fn len_bytes(self, meta: &WindowMeta) -> usize {
        match self {
            Self::Entries => meta.entries_bytes as usize,
            Self::All => meta.len_bytes as usize,
        }
    }
}

/// The block that the directory describes.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpectedBlock<'a> {
    pub(super) meta: &'a WindowMeta,
    pub(super) number: u32,
    pub(super) part: Part,
    pub(super) table_count: usize,
    pub(super) firsts: &'a Arc<Firsts>,
}

impl PlanWindow {
    /// Takes in the block that lies in `buf`, which must be the one that is expected. After an
    /// error it has no entry and no batch.
    ///
    /// # Errors
    /// `Corruption` when it is another one, or damaged.
    pub(super) fn parse(&mut self, block: ExpectedBlock<'_>) -> Result<()> {
        let result = self.parse_block(block);
        if result.is_err() {
            self.tables.clear();
        }
        result
    }

    fn parse_block(&mut self, block: ExpectedBlock<'_>) -> Result<()> {
        let ExpectedBlock { meta, number, part, table_count, firsts } = block;
        self.tables.clear();
        self.rows.clear();
        self.batch_count = 0;
        self.firsts = firsts.clone();
        self.len_bytes = part.len_bytes(meta);
        let too_long = || damaged("window is too long");
        let bytes = self.buf.get(..self.len_bytes).ok_or_else(too_long)?;
        let (entries, batches) =
            bytes.split_at_checked(meta.entries_bytes as usize).ok_or_else(too_long)?;
        if crc32c(entries) != meta.entries_crc32c {
            return Err(damaged("window checksum mismatch").with("window", number));
        }
        if part == Part::All && crc32c(batches) != meta.batches_crc32c {
            return Err(damaged("window checksum mismatch").with("window", number));
        }
        let mut cursor = Cursor(entries);
        let magic: [u8; 4] = cursor.take()?;
        let found = (cursor.u32()?, cursor.u32()?, cursor.u32()? as usize);
        if &magic != BLOCK_MAGIC || found != (number, meta.batch_count, table_count) {
            return Err(damaged("window is another one").with("window", number));
        }
        let mut first = 0u32;
        let mut at = BLOCK_HEAD_BYTES + BLOCK_TABLE_BYTES * table_count;
        for table in 0..table_count {
            let columns = Columns::decode(cursor.take()?);
            if firsts.of(number as usize, table) != Some((first, columns.count)) {
                return Err(damaged("window holds other entries").with("window", number));
            }
            let starts = columns.section_bytes().map(|len| {
                at += len;
                at - len
            });
            let [low, high, windows, differences] = starts;
            self.tables.push(TableEntries {
                first,
                count: columns.count,
                number: table,
                columns,
                at: [low, high, windows, differences, at],
            });
            first =
                first.checked_add(columns.count).ok_or_else(|| damaged("window is too large"))?;
        }
        self.notes_at = entries.len();
        self.mappings_at = self.notes_at + BLOCK_BATCH_BYTES * meta.batch_count as usize;
        let ends_early = at + PAD_BYTES > entries.len()
            || (part == Part::All && self.mappings_at + PAD_BYTES > bytes.len());
        if ends_early {
            return Err(damaged("window ends too early").with("window", number));
        }
        self.batch_count = if part == Part::All { meta.batch_count } else { 0 };
        Ok(())
    }

    pub(crate) fn batch_count(&self) -> u32 {
        self.batch_count
    }

    /// Returns the number of entries of all tables.
    pub(crate) fn entry_count(&self) -> usize {
        self.tables.last().map_or(0, |last| (last.first + last.count) as usize)
    }

    pub(crate) fn tables(&self) -> &[TableEntries] {
        &self.tables
    }

    fn bytes(&self) -> &[u8] {
        &self.buf[..self.len_bytes]
    }

    fn column(&self, table: &TableEntries, at: usize, width: u8) -> BitSlice<'_> {
        BitSlice::new(self.bytes(), 8 * at, u32::from(width)).first(table.count as usize)
    }

    /// Returns the rows of `table`, entry after entry, ascending.
    pub(crate) fn rows(&self, table: &TableEntries) -> RowIds<'_> {
        let [low_at, high_at, windows_at, ..] = table.at;
        let low = self.column(table, low_at, table.columns.widths[0]);
        let high = &self.bytes()[high_at..windows_at];
        RowIds::new(low, high, &table.columns)
    }

    /// Finds `rows` of table `at`, which ascend: the entry of each, `None` for those that the
    /// window does not use.
    pub(crate) fn entries_of<R: Iterator<Item = u64>>(
        &self,
        at: usize,
        rows: R,
    ) -> impl Iterator<Item = Option<u32>> + use<'_, R> {
        let table = self.tables[at];
        let mut ids = self.rows(&table);
        rows.map(move |row| Some(table.first + ids.find(row)? as u32))
    }

    /// Returns the next uses of `table`'s entries.
    pub(crate) fn next_uses(&self, table: &TableEntries) -> NextUses<'_> {
        let [_, _, windows_at, differences_at, _] = table.at;
        let [_, window, difference, _] = table.columns.widths;
        let windows = self.column(table, windows_at, window);
        let differences = self.column(table, differences_at, difference);
        let firsts = TableFirsts { firsts: &self.firsts, table: table.number };
        NextUses::new(windows, differences, firsts, &table.columns)
    }

    /// Unpacks the row ids of all entries, for [`row_of`](Self::row_of).
    ///
    /// # Errors
    /// `Corruption` when they end too early.
    pub(crate) fn unpack_rows(&mut self) -> Result<()> {
        let mut rows = std::mem::take(&mut self.rows);
        let unpacked = self.unpack_rows_into(&mut rows);
        self.rows = rows;
        unpacked
    }

    /// Writes the row ids of all entries to `rows`.
    ///
    /// # Errors
    /// As [`unpack_rows`](Self::unpack_rows).
    pub(crate) fn unpack_rows_into(&self, rows: &mut Vec<u64>) -> Result<()> {
        rows.clear();
        rows.reserve_exact(self.entry_count());
        self.tables.iter().for_each(|table| rows.extend(self.rows(table)));
        match rows.len() == self.entry_count() {
            true => Ok(()),
            false => Err(damaged("window ends too early")),
        }
    }

    /// Returns table and row of an entry, when rows are unpacked.
    pub(crate) fn row_of(&self, entry: u32) -> Option<(usize, u64)> {
        // Tables follow each other: the last that begins at or before the entry has it.
        let after = self.tables.partition_point(|table| table.first <= entry);
        Some((after.checked_sub(1)?, *self.rows.get(entry as usize)?))
    }

    /// Returns what is known of batch `at` of this window.
    pub(crate) fn batch(&self, at: u32) -> Option<Batch> {
        if at >= self.batch_count {
            return None;
        }
        let note = self.bytes().get(self.notes_at + BLOCK_BATCH_BYTES * at as usize..)?;
        let mut cursor = Cursor(note);
        let (index_count, checksum) = (cursor.u32().ok()?, cursor.u32().ok()?);
        let mapping_bit = 8 * (self.mappings_at + cursor.u32().ok()? as usize);
        Some(Batch { index_count, checksum, mapping_bit })
    }

    /// Returns the entries, in its table, of the next `count` indices of `batch`, which belong to
    /// table `table`; moves on by as many.
    pub(crate) fn mapping(&self, batch: &mut Batch, table: usize, count: usize) -> BitSlice<'_> {
        debug_assert!(batch.mapping_bit >= 8 * self.mappings_at, "a batch of another window");
        let width = u32::from(self.tables[table].columns.widths[3]);
        let slice = BitSlice::new(self.bytes(), batch.mapping_bit, width);
        batch.mapping_bit += count * width as usize;
        slice
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn random_blocks_never_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..600),
            table_count in 0usize..5,
            entries_share in 0usize..=100,
            batch_count in 0u32..40,
        ) {
            // With right checksums and head, so that what follows is reached.
            if bytes.len() >= BLOCK_HEAD_BYTES {
                bytes[..4].copy_from_slice(BLOCK_MAGIC);
                bytes[4..8].fill(0);
                bytes[8..12].copy_from_slice(&batch_count.to_le_bytes());
                bytes[12..16].copy_from_slice(&(table_count as u32).to_le_bytes());
                // Counts and lengths that may fit.
                for table in bytes[16..].chunks_exact_mut(BLOCK_TABLE_BYTES).take(table_count) {
                    table[1..4].fill(0);
                    table[9..12].fill(0);
                }
            }
            let entries = bytes.len() * entries_share / 100;
            let meta = WindowMeta {
                offset_bytes: 0,
                len_bytes: bytes.len() as u32,
                entries_bytes: entries as u32,
                batch_count,
                entries_crc32c: crc32c(&bytes[..entries]),
                batches_crc32c: crc32c(&bytes[entries..]),
            };
            let mut window = PlanWindow { buf: AlignedBuf::new(4096), ..PlanWindow::default() };
            window.buf[..bytes.len()].copy_from_slice(&bytes);
            let count = |table| {
                let count = bytes.get(16 + BLOCK_TABLE_BYTES * table..)?.first_chunk::<4>()?;
                Some(u32::from_le_bytes(*count))
            };
            let counts: Vec<u32> = (0..table_count).map(|at| count(at).unwrap_or(0)).collect();
            let firsts = Arc::new(Firsts::new(&counts, table_count));
            for part in [Part::Entries, Part::All] {
                let meta = &meta;
                let block = ExpectedBlock { meta, number: 0, part, table_count, firsts: &firsts };
                if window.parse(block).is_err() {
                    continue;
                }
                for table in window.tables().to_vec() {
                    let _ = window.rows(&table).take(2000).count();
                    let _ = window.next_uses(&table).get(table.count as usize / 2);
                }
                if window.entry_count() < 10_000 {
                    let _ = window.unpack_rows();
                    let _ = window.row_of(3);
                }
                for at in 0..window.batch_count().min(9) {
                    let batch = &mut window.batch(at).filter(|_| table_count > 0);
                    if let Some(batch) = batch {
                        let _ = window.mapping(batch, 0, 3).get(2);
                    }
                }
            }
        }
    }
}
