//! Rows that the plan never uses: on disk, named by table and row.
//!
//! A row in a bucket is named by its entry in the window it waits for. A row that the plan does
//! not use waits for no window, so it carries its own name: table and row id. Unplanned rows are
//! read by scans and by the next plan, never by training.

use tierbed_core::checksum::crc32c;
use tierbed_core::{Result, RowId, RowKey, TableId};
use tierbed_io::{AlignedBuf, PAGE_BYTES};

use super::extents::{Bucket, Chunk};
use super::size_class::{open_rows, Sink};

/// Bytes before each unplanned record: table (u32) and row (u64).
pub(crate) const UNPLANNED_HEAD_BYTES: usize = 12;
/// Bytes gathered before a chunk of unplanned rows is written.
const STAGE_BYTES: usize = 64 << 10;

/// Gathers unplanned rows of one record length and writes them in chunks.
#[derive(Debug)]
pub(crate) struct UnplannedWriter {
    stage: AlignedBuf,
    stored_bytes: usize,
    row_count: usize,
    bucket: Bucket,
}

impl UnplannedWriter {
    /// Returns the bytes gathered for records of `record_bytes`, at most `buf_bytes` unless one
    /// row needs more.
    pub(crate) fn memory_bytes(record_bytes: usize, buf_bytes: usize) -> usize {
        let row_bytes = (UNPLANNED_HEAD_BYTES + record_bytes).next_multiple_of(PAGE_BYTES);
        STAGE_BYTES.min(buf_bytes / PAGE_BYTES * PAGE_BYTES).max(row_bytes)
    }

    pub(crate) fn new(record_bytes: usize, buf_bytes: usize) -> Self {
        Self {
            stage: AlignedBuf::new(Self::memory_bytes(record_bytes, buf_bytes)),
            stored_bytes: UNPLANNED_HEAD_BYTES + record_bytes,
            row_count: 0,
            bucket: Bucket::default(),
        }
    }

    /// Adds a row.
    ///
    /// # Errors
    /// Those of the device, `NoSpace` on a full disk or quota.
    ///
    /// # Panics
    /// When its record has another length than all others.
    #[expect(clippy::indexing_slicing, reason = "a flush made room for one row at least")]
    pub(crate) fn add(&mut self, key: RowKey, record: &[u8], sink: &mut Sink<'_>) -> Result<()> {
        let record_bytes = self.stored_bytes - UNPLANNED_HEAD_BYTES;
        assert_eq!(record.len(), record_bytes, "a record of another size class");
        if (self.row_count + 1) * self.stored_bytes > self.stage.len() {
            self.flush(sink)?;
        }
        let start = self.row_count * self.stored_bytes;
        let place = &mut self.stage[start..start + self.stored_bytes];
        let (name, rest) = place.split_at_mut(UNPLANNED_HEAD_BYTES);
        let (table, row) = name.split_at_mut(size_of::<u32>());
        table.copy_from_slice(&key.table.0.to_le_bytes());
        row.copy_from_slice(&key.row.0.to_le_bytes());
        rest.copy_from_slice(record);
        self.row_count += 1;
        Ok(())
    }

    #[expect(clippy::indexing_slicing, reason = "rows are gathered up to what a buffer holds")]
    fn flush(&mut self, sink: &mut Sink<'_>) -> Result<()> {
        assert!(self.row_count > 0, "a chunk has at least one row");
        let rows_bytes = self.row_count * self.stored_bytes;
        let len_bytes = rows_bytes.next_multiple_of(PAGE_BYTES);
        let page_count = (len_bytes / PAGE_BYTES) as u32;
        let (page, _) = sink.extents.place(&self.bucket, page_count, page_count)?;
        sink.disk.take_space(sink.extents);
        let buf = sink.disk.write_buf()?;
        let bytes = &mut sink.disk.bytes_mut(buf)[..len_bytes];
        let (place, rest) = bytes.split_at_mut(rows_bytes);
        place.copy_from_slice(&self.stage[..rows_bytes]);
        rest.fill(0);
        let row_count = self.row_count as u32;
        let chunk = Chunk { page, page_count, row_count, crc32c: crc32c(bytes) };
        sink.disk.write(buf, chunk.offset_bytes(), chunk.len_bytes());
        self.bucket.push(chunk);
        self.row_count = 0;
        Ok(())
    }

    /// Writes what is gathered; returns the chunks of all unplanned rows.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub(crate) fn finish(mut self, sink: &mut Sink<'_>) -> Result<Bucket> {
        if self.row_count > 0 {
            self.flush(sink)?;
        }
        assert_eq!(self.row_count, 0, "gathered rows were not written");
        Ok(self.bucket)
    }
}

/// Checks the bytes of a chunk of unplanned rows and splits them into names and records of
/// `record_bytes`.
///
/// # Errors
/// `Corruption` when they are not what was written.
pub(crate) fn open_unplanned<'a>(
    chunk: &Chunk,
    bytes: &'a [u8],
    record_bytes: usize,
) -> Result<impl Iterator<Item = (TableId, RowId, &'a [u8])>> {
    let rows = open_rows(chunk, bytes, UNPLANNED_HEAD_BYTES + record_bytes)?;
    Ok(rows.filter_map(|row| {
        let (table, rest) = row.split_first_chunk::<4>()?;
        let (row, record) = rest.split_first_chunk::<8>()?;
        Some((TableId(u32::from_le_bytes(*table)), RowId(u64::from_le_bytes(*row)), record))
    }))
}
