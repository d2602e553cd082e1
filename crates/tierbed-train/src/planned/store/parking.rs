//! Where do rows wait that the plan never uses? Parked: on disk, named by table and row.
//!
//! A row in a bucket is named by its entry in the window it waits for. A row that the plan does
//! not use waits for no window, so it carries its own name: table and row id. Parked rows are
//! read by scans and by the next plan, never by training.

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result, RowId, TableId};
use tierbed_io::{AlignedBuf, PAGE_BYTES};

use super::extents::{Bucket, Chunk};
use super::size_class::{open_rows, Sink};

/// Bytes before each parked record: table (u32) and row (u64).
pub(crate) const PARKED_HEAD_BYTES: usize = 12;
/// Bytes gathered before a chunk of parked rows is written.
const STAGE_BYTES: usize = 64 << 10;

/// Gathers parked rows of one record length and writes them in chunks.
#[derive(Debug)]
pub(crate) struct Parking {
    stage: AlignedBuf,
    stored_bytes: usize,
    row_count: usize,
    bucket: Bucket,
}

impl Parking {
    /// Returns the bytes gathered for records of `record_bytes`, at most `buf_bytes` unless one
    /// row needs more.
    pub(crate) fn memory_bytes(record_bytes: usize, buf_bytes: usize) -> usize {
        let row_bytes = (PARKED_HEAD_BYTES + record_bytes).next_multiple_of(PAGE_BYTES);
        STAGE_BYTES.min(buf_bytes / PAGE_BYTES * PAGE_BYTES).max(row_bytes)
    }

    pub(crate) fn new(record_bytes: usize, buf_bytes: usize) -> Self {
        Self {
            stage: AlignedBuf::new(Self::memory_bytes(record_bytes, buf_bytes)),
            stored_bytes: PARKED_HEAD_BYTES + record_bytes,
            row_count: 0,
            bucket: Bucket::default(),
        }
    }

    /// Adds a row, whose record has the length of all others.
    ///
    /// # Errors
    /// Those of the device, `NoSpace` on a full disk or quota.
    pub(crate) fn add(
        &mut self,
        (table, row): (TableId, RowId),
        record: &[u8],
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        if (self.row_count + 1) * self.stored_bytes > self.stage.len() {
            self.flush(sink)?;
        }
        let start = self.row_count * self.stored_bytes;
        let place = self.stage.get_mut(start..start + self.stored_bytes).unwrap_or(&mut []);
        let name = table.0.to_le_bytes().into_iter().chain(row.0.to_le_bytes());
        for (place, byte) in place.iter_mut().zip(name.chain(record.iter().copied())) {
            *place = byte;
        }
        self.row_count += 1;
        Ok(())
    }

    fn flush(&mut self, sink: &mut Sink<'_>) -> Result<()> {
        let rows_bytes = self.row_count * self.stored_bytes;
        let len_bytes = rows_bytes.next_multiple_of(PAGE_BYTES);
        let page_count = (len_bytes / PAGE_BYTES) as u32;
        let (page, _) = sink.extents.place(&self.bucket, page_count, page_count)?;
        sink.disk.take_space(sink.extents);
        let buf = sink.disk.write_buf()?;
        let bytes = sink.disk.bytes_mut(buf).get_mut(..len_bytes);
        let (Some(bytes), Some(rows)) = (bytes, self.stage.get(..rows_bytes)) else {
            return Err(Error::corruption("a chunk is longer than a buffer"));
        };
        let (place, rest) = bytes.split_at_mut(rows_bytes);
        place.copy_from_slice(rows);
        rest.fill(0);
        let row_count = self.row_count as u32;
        let chunk = Chunk { page, page_count, row_count, crc32c: crc32c(bytes) };
        sink.disk.write(buf, chunk.offset_bytes(), chunk.len_bytes());
        self.bucket.chunks.push(chunk);
        self.bucket.row_count += self.row_count;
        self.row_count = 0;
        Ok(())
    }

    /// Writes what is gathered; returns the chunks of all parked rows.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub(crate) fn finish(mut self, sink: &mut Sink<'_>) -> Result<Bucket> {
        if self.row_count > 0 {
            self.flush(sink)?;
        }
        Ok(self.bucket)
    }
}

/// Checks the bytes of a chunk of parked rows and splits them into names and records of
/// `record_bytes`.
///
/// # Errors
/// `Corruption` when they are not what was written.
pub(crate) fn open_parked<'a>(
    chunk: &Chunk,
    bytes: &'a [u8],
    record_bytes: usize,
) -> Result<impl Iterator<Item = (TableId, RowId, &'a [u8])>> {
    let rows = open_rows(chunk, bytes, PARKED_HEAD_BYTES + record_bytes)?;
    Ok(rows.filter_map(|row| {
        let (table, rest) = row.split_first_chunk::<4>()?;
        let (row, record) = rest.split_first_chunk::<8>()?;
        Some((TableId(u32::from_le_bytes(*table)), RowId(u64::from_le_bytes(*row)), record))
    }))
}
