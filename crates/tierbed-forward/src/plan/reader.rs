//! A finished plan, read window by window.

use std::sync::Arc;

use serde::Serialize;
use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode, PAGE_BYTES};

use super::format::{
    damaged, Cursor, Directory, Header, BLOCK_BATCH_BYTES, BLOCK_HEAD_BYTES, BLOCK_MAGIC,
    BLOCK_TABLE_BYTES,
};
use super::{PlanBuilder, PlanOptions, PlanShape};
use crate::bits::{packed_bytes, BitSlice, PAD_BYTES};

/// An open plan.
#[derive(Debug, Clone)]
pub struct Plan {
    device: Arc<dyn Device>,
    header: Header,
    directory: Arc<Directory>,
}

/// What a plan holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PlanStats {
    /// Windows.
    pub window_count: u32,
    /// Batches.
    pub batch_count: u64,
    /// Indices of all batches, duplicates counted.
    pub index_count: u64,
    /// Distinct rows per window, summed.
    pub entry_count: u64,
    /// Bytes of the plan file.
    pub file_bytes: u64,
}

impl Plan {
    /// Opens the plan `name` in `folder`.
    ///
    /// # Errors
    /// `Invalid` when there is no finished plan, `Corruption` when it is damaged.
    pub fn open(folder: &dyn Folder, name: &str) -> Result<Self> {
        let device = folder.open(name, OpenMode::ReadOnly)?;
        Self::read(device)?.ok_or_else(|| {
            Error::invalid("plan was never finished")
                .with("plan", name)
                .with("remedy", "make it again")
        })
    }

    /// Opens the plan `name` if it was made from `source` with `options` for `shape`; `None` when
    /// there is none, or one of another origin: make it then.
    ///
    /// # Errors
    /// `Corruption` when it is damaged, otherwise the folder's.
    pub fn open_for(
        folder: &dyn Folder,
        name: &str,
        shape: &PlanShape,
        source: &str,
        options: &PlanOptions,
    ) -> Result<Option<Self>> {
        if !PlanBuilder::exists(folder, name)? {
            return Ok(None);
        }
        let plan = Self::read(folder.open(name, OpenMode::ReadOnly)?)?;
        let is_same = |plan: &Self| plan.header.key == options.key(source) && plan.shape() == shape;
        Ok(plan.filter(is_same))
    }

    fn read(device: Arc<dyn Device>) -> Result<Option<Self>> {
        let file_bytes = device.len_bytes()?;
        if file_bytes < PAGE_BYTES as u64 {
            return Ok(None);
        }
        let mut page = AlignedBuf::new(PAGE_BYTES);
        device.read_at(0, &mut page)?;
        let Some(header) = Header::decode(&page)? else { return Ok(None) };
        let end = header.directory_offset_bytes.checked_add(header.directory_bytes);
        if end.is_none_or(|end| end > file_bytes)
            || header.directory_bytes != Directory::expected_bytes(&header)
        {
            return Err(damaged("is shorter than its header says"));
        }
        let mut bytes = vec![0; header.directory_bytes as usize];
        device.read_at(header.directory_offset_bytes, &mut bytes)?;
        let directory = Arc::new(Directory::decode(&header, &bytes)?);
        Ok(Some(Self { device, header, directory }))
    }

    /// Returns the tables and features it is for.
    #[must_use]
    pub fn shape(&self) -> &PlanShape {
        &self.directory.shape
    }

    /// Returns what it holds.
    #[must_use]
    pub fn stats(&self) -> PlanStats {
        let entry_count = self.directory.counts.iter().map(|&count| u64::from(count)).sum();
        PlanStats {
            window_count: self.header.window_count,
            batch_count: self.header.batch_count,
            index_count: self.header.index_count,
            entry_count,
            file_bytes: self.header.directory_offset_bytes + self.header.directory_bytes,
        }
    }

    /// Returns what tells this plan from any other: the checksums of its directory and its key.
    #[must_use]
    pub fn identity(&self) -> u64 {
        let key = crc32c(self.header.key.as_bytes());
        u64::from(self.header.directory_crc32c) << 32 | u64::from(key)
    }

    pub(crate) fn window_count(&self) -> usize {
        self.directory.windows.len()
    }

    pub(crate) fn block_bytes_max(&self) -> usize {
        (self.header.block_bytes_max as usize).next_multiple_of(PAGE_BYTES)
    }

    pub(crate) fn batch_indices_max(&self) -> usize {
        self.header.batch_indices_max as usize
    }

    pub(crate) fn directory_bytes(&self) -> u64 {
        self.header.directory_bytes
    }

    /// Returns the entries of each table, window after window.
    pub(crate) fn counts(&self) -> impl Iterator<Item = &[u32]> {
        self.directory.counts.chunks_exact(self.shape().row_counts.len().max(1))
    }

    /// Reads window `number` into `window`, reusing its memory.
    ///
    /// # Errors
    /// `Corruption` when the block is not what was written there.
    pub(crate) fn load(&self, number: usize, window: &mut WindowPlan) -> Result<()> {
        let meta = self
            .directory
            .windows
            .get(number)
            .ok_or_else(|| damaged("has no such window").with("window", number))?;
        if window.buf.len() < self.block_bytes_max() {
            window.buf = AlignedBuf::new(self.block_bytes_max());
        }
        let padded = (meta.len_bytes as usize).next_multiple_of(PAGE_BYTES);
        let buf = window.buf.get_mut(..padded).ok_or_else(|| damaged("window is too long"))?;
        self.device.read_at(meta.offset_bytes, buf)?;
        window.parse(meta.len_bytes as usize, number as u32, self.shape().row_counts.len())?;
        if window.batch_count != meta.batch_count {
            return Err(damaged("window holds another number of batches"));
        }
        Ok(())
    }

    /// Checks every window; returns how many there are.
    ///
    /// # Errors
    /// `Corruption`, naming the first bad window.
    pub fn verify(&self) -> Result<u64> {
        let mut window = WindowPlan::default();
        for number in 0..self.window_count() {
            self.load(number, &mut window).map_err(|error| error.with("at_window", number))?;
        }
        Ok(self.window_count() as u64)
    }
}

/// The entries of one table in a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct TableEntries {
    /// Number of the table's first entry in the window.
    pub(crate) first: u32,
    pub(crate) count: u32,
    widths: [u32; 4],
    rows_at: usize,
    windows_at: usize,
    entries_at: usize,
}

/// One batch of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) index_count: u32,
    pub(crate) checksum: u32,
    mapping_bit: usize,
}

/// One window of a plan, in memory as on disk.
#[derive(Debug)]
pub(crate) struct WindowPlan {
    buf: AlignedBuf,
    len_bytes: usize,
    batch_count: u32,
    notes_at: usize,
    mappings_at: usize,
    tables: Vec<TableEntries>,
}

impl Default for WindowPlan {
    fn default() -> Self {
        Self {
            buf: AlignedBuf::new(0),
            len_bytes: 0,
            batch_count: 0,
            notes_at: 0,
            mappings_at: 0,
            tables: Vec::new(),
        }
    }
}

impl WindowPlan {
    fn parse(&mut self, len_bytes: usize, number: u32, table_count: usize) -> Result<()> {
        self.tables.clear();
        self.batch_count = 0;
        self.len_bytes = len_bytes;
        let bytes = self.buf.get(..len_bytes).ok_or_else(|| damaged("window is too long"))?;
        let mut cursor = Cursor(bytes);
        let crc = cursor.u32()?;
        if crc != crc32c(cursor.0) || &cursor.take()? != BLOCK_MAGIC {
            return Err(damaged("window checksum mismatch").with("window", number));
        }
        let found = (cursor.u32()?, cursor.u32()? as usize);
        let batch_count = cursor.u32()?;
        if found != (number, len_bytes) || cursor.u32()? as usize != table_count {
            return Err(damaged("window is another one").with("window", number));
        }
        let (mut first, mut at) = (0u32, 0usize);
        self.notes_at = BLOCK_HEAD_BYTES + BLOCK_TABLE_BYTES * table_count;
        let sections_at = self.notes_at + BLOCK_BATCH_BYTES * batch_count as usize;
        for _ in 0..table_count {
            let count = cursor.u32()?;
            let [row, window, entry, mapping] = cursor.take::<4>()?.map(u32::from);
            let widths = [row, window, entry, mapping];
            let (rows_at, columns) = (sections_at + at, count as usize);
            let windows_at = rows_at + packed_bytes(columns, row);
            let entries_at = windows_at + packed_bytes(columns, window);
            at = entries_at + packed_bytes(columns, entry) - sections_at;
            self.tables.push(TableEntries {
                first,
                count,
                widths,
                rows_at,
                windows_at,
                entries_at,
            });
            first = first.checked_add(count).ok_or_else(|| damaged("window is too large"))?;
        }
        self.mappings_at = sections_at + at;
        if self.mappings_at + PAD_BYTES > len_bytes {
            return Err(damaged("window ends too early").with("window", number));
        }
        self.batch_count = batch_count;
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
        self.buf.get(..self.len_bytes).unwrap_or(&[])
    }

    /// Returns the rows of `table`, entry after entry.
    pub(crate) fn rows(&self, table: &TableEntries) -> BitSlice<'_> {
        BitSlice::new(self.bytes(), 8 * table.rows_at, table.widths[0])
    }

    /// Returns the window and the entry of the next use of each of `table`'s entries.
    pub(crate) fn next_uses(&self, table: &TableEntries) -> (BitSlice<'_>, BitSlice<'_>) {
        let [_, window, entry, _] = table.widths;
        (
            BitSlice::new(self.bytes(), 8 * table.windows_at, window),
            BitSlice::new(self.bytes(), 8 * table.entries_at, entry),
        )
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
        let width = self.tables.get(table).map_or(0, |table| table.widths[3]);
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
            mut bytes in proptest::collection::vec(any::<u8>(), 0..400),
            tables in 0usize..5,
        ) {
            // With a right checksum, so that what follows is reached.
            if bytes.len() >= 24 {
                let len = bytes.len() as u32;
                bytes[4..8].copy_from_slice(BLOCK_MAGIC);
                bytes[8..12].fill(0);
                bytes[12..16].copy_from_slice(&len.to_le_bytes());
                bytes[18..20].fill(0);
                bytes[20..24].copy_from_slice(&(tables as u32).to_le_bytes());
                let crc = crc32c(&bytes[4..]);
                bytes[..4].copy_from_slice(&crc.to_le_bytes());
            }
            let mut window = WindowPlan { buf: AlignedBuf::new(4096), ..WindowPlan::default() };
            window.buf[..bytes.len()].copy_from_slice(&bytes);
            if window.parse(bytes.len(), 0, tables).is_ok() {
                for table in window.tables().to_vec() {
                    let _ = window.rows(&table).get(table.count as usize);
                    let _ = window.next_uses(&table).0.get(1);
                }
                for at in 0..window.batch_count().min(9) {
                    let mut batch = window.batch(at);
                    if let Some(batch) = &mut batch {
                        let _ = window.mapping(batch, 0, 3).get(2);
                    }
                }
            }
        }

        #[test]
        fn random_headers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Header::decode(&bytes);
            let header = Header {
                window_count: 2,
                table_count: 1,
                feature_count: 1,
                directory_crc32c: crc32c(&bytes),
                ..Header::default()
            };
            let _ = Directory::decode(&header, &bytes);
        }
    }
}
