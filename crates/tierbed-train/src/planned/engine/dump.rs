//! The rows that were in memory, one after the other in a file of their own.

use tierbed_core::checksum::crc32c_append;
use tierbed_core::Result;
use tierbed_io::{Appender, Folder, OpenMode, RecordReader, PAGE_BYTES};
use tierbed_store::TableMeta;

use super::quota::DiskQuota;
use super::stored::damaged;

/// Bytes gathered before a dump is written on.
pub(super) const DUMP_BUF_BYTES: usize = 64 << 10;
/// Window and entry before each record of a dump.
const DUMP_HEAD_BYTES: usize = 8;

/// Writes the rows of a dump in whole blocks.
pub(super) struct DumpWriter<'a> {
    quota: &'a mut DiskQuota,
    out: Appender,
    meta: TableMeta,
}

impl<'a> DumpWriter<'a> {
    pub(super) fn create(
        folder: &dyn Folder,
        file: String,
        quota: &'a mut DiskQuota,
    ) -> Result<Self> {
        let device = folder.open(&file, OpenMode::Create)?;
        device.set_len(0)?;
        let meta = TableMeta { file, ..TableMeta::default() };
        Ok(Self { quota, out: Appender::new(device, 0, DUMP_BUF_BYTES), meta })
    }

    /// Adds a row that waits for `entry` of `window`.
    pub(super) fn add(&mut self, window: u32, entry: u32, record: &[f32]) -> Result<()> {
        let record: &[u8] = bytemuck::cast_slice(record);
        self.quota.take((DUMP_HEAD_BYTES + record.len()) as u64)?;
        self.meta.entry_count += 1;
        for part in [&window.to_le_bytes(), &entry.to_le_bytes(), record] {
            self.meta.crc32c = crc32c_append(self.meta.crc32c, part);
            self.out.append(part)?;
        }
        Ok(())
    }

    /// Makes the dump durable; returns what the manifest says of it, and its bytes.
    pub(super) fn finish(mut self) -> Result<(TableMeta, u64)> {
        let row_bytes = self.out.end_bytes();
        let len_bytes = row_bytes.next_multiple_of(PAGE_BYTES as u64);
        self.quota.take(len_bytes - row_bytes)?;
        self.out.flush()?.sync()?;
        Ok((self.meta, len_bytes))
    }
}

/// Takes the rows of a dump: window, entry, record.
pub(super) type DumpSink<'a> = dyn FnMut(u32, u32, &[u8]) -> Result<()> + 'a;

/// Hands every row of a dump on and checks the checksum at the end.
///
/// # Errors
/// `Corruption` when the dump is not what was written, otherwise those of `sink`.
pub(super) fn read_dump(
    folder: &dyn Folder,
    meta: &TableMeta,
    record_bytes: usize,
    sink: &mut DumpSink<'_>,
) -> Result<()> {
    let mut dump = DumpReader::open(folder, meta, record_bytes, DUMP_BUF_BYTES)?;
    while dump.advance()? {
        if let Some((window, entry, record)) = dump.row() {
            sink(window, entry, record)?;
        }
    }
    Ok(())
}

/// Reads the rows of a dump one after the other.
pub(super) struct DumpReader {
    rows: RecordReader,
    meta: TableMeta,
}

impl DumpReader {
    /// Opens the dump of records of some bytes, to be read through a buffer of some whole pages;
    /// [`advance`](Self::advance) brings the first row.
    ///
    /// # Errors
    /// `Corruption` when the file is missing or too short.
    pub(super) fn open(
        folder: &dyn Folder,
        meta: &TableMeta,
        record_bytes: usize,
        buf_bytes: usize,
    ) -> Result<Self> {
        let device = folder
            .open(&meta.file, OpenMode::ReadOnly)
            .map_err(|error| damaged("has lost its dump").with("cause", error))?;
        let row_bytes = DUMP_HEAD_BYTES + record_bytes;
        let len_bytes = meta.entry_count.checked_mul(row_bytes as u64);
        let len_bytes = len_bytes.filter(|&len| device.len_bytes().is_ok_and(|found| len <= found));
        let len_bytes = len_bytes.ok_or_else(|| damaged("has a dump that is too short"))?;
        let rows = RecordReader::new(device, 0..len_bytes, buf_bytes, row_bytes);
        Ok(Self { rows, meta: meta.clone() })
    }

    /// Brings the next row; `false` behind the last one, when the checksum was right.
    ///
    /// # Errors
    /// `Corruption` when the dump is not what was written.
    pub(super) fn advance(&mut self) -> Result<bool> {
        let is_there = self.rows.advance()?;
        if !is_there && self.rows.crc32c() != self.meta.crc32c {
            return Err(damaged("has a dump with a wrong checksum").with("file", &self.meta.file));
        }
        Ok(is_there)
    }

    /// Returns the row that [`advance`](Self::advance) brought: window, entry, record.
    pub(super) fn row(&self) -> Option<(u32, u32, &[u8])> {
        let (window, rest) = self.rows.record().split_first_chunk::<4>()?;
        let (entry, record) = rest.split_first_chunk::<4>()?;
        Some((u32::from_le_bytes(*window), u32::from_le_bytes(*entry), record))
    }
}
