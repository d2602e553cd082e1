//! The rows that were in memory, one after the other in a file of their own.

#![expect(
    clippy::indexing_slicing,
    reason = "what is filled lies within the buffer, which is whole pages"
)]

use std::sync::Arc;

use tierbed_core::checksum::crc32c_append;
use tierbed_core::Result;
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode, PAGE_BYTES};
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
    device: Arc<dyn Device>,
    buf: AlignedBuf,
    filled: usize,
    at_bytes: u64,
    pub(super) meta: TableMeta,
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
        let buf = AlignedBuf::new(DUMP_BUF_BYTES);
        Ok(Self { quota, device, buf, filled: 0, at_bytes: 0, meta })
    }

    /// Adds a row that waits for `entry` of `window`.
    pub(super) fn add(&mut self, window: u32, entry: u32, record: &[f32]) -> Result<()> {
        self.meta.entry_count += 1;
        self.append(&window.to_le_bytes())?;
        self.append(&entry.to_le_bytes())?;
        self.append(bytemuck::cast_slice(record))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        assert!(self.filled < DUMP_BUF_BYTES, "a full buffer was not written");
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(DUMP_BUF_BYTES - self.filled));
            self.buf[self.filled..self.filled + now.len()].copy_from_slice(now);
            self.filled += now.len();
            rest = later;
            if self.filled == DUMP_BUF_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.meta.crc32c = crc32c_append(self.meta.crc32c, &self.buf[..self.filled]);
        assert!(
            self.at_bytes.is_multiple_of(DUMP_BUF_BYTES as u64),
            "a dump goes on behind its end"
        );
        let padded = self.filled.next_multiple_of(PAGE_BYTES);
        self.quota.take(padded as u64)?;
        self.buf[self.filled..padded].fill(0);
        self.device.write_at(self.at_bytes, &self.buf[..padded])?;
        self.at_bytes += padded as u64;
        self.filled = 0;
        Ok(())
    }

    /// Makes the dump durable; returns what the manifest says of it, and its bytes.
    pub(super) fn finish(mut self) -> Result<(TableMeta, u64)> {
        if self.filled > 0 {
            self.flush()?;
        }
        self.device.sync()?;
        Ok((self.meta, self.at_bytes))
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
    device: Arc<dyn Device>,
    meta: TableMeta,
    row_bytes: usize,
    len_bytes: u64,
    at_bytes: u64,
    crc32c: u32,
    buf: AlignedBuf,
    taken: usize,
    filled: usize,
    row: Vec<u8>,
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
        let damaged = |what: &str| damaged(what).with("file", &meta.file);
        let device = folder
            .open(&meta.file, OpenMode::ReadOnly)
            .map_err(|error| damaged("has lost its dump").with("cause", error))?;
        let row_bytes = DUMP_HEAD_BYTES + record_bytes;
        let len_bytes = meta.entry_count.checked_mul(row_bytes as u64);
        let len_bytes = len_bytes.filter(|&len| device.len_bytes().is_ok_and(|found| len <= found));
        let len_bytes = len_bytes.ok_or_else(|| damaged("has a dump that is too short"))?;
        Ok(Self {
            device,
            meta: meta.clone(),
            row_bytes,
            len_bytes,
            at_bytes: 0,
            crc32c: 0,
            buf: AlignedBuf::new(buf_bytes),
            taken: 0,
            filled: 0,
            row: Vec::with_capacity(row_bytes),
        })
    }

    /// Brings the next row; `false` behind the last one, when the checksum was right.
    ///
    /// # Errors
    /// `Corruption` when the dump is not what was written.
    pub(super) fn advance(&mut self) -> Result<bool> {
        self.row.clear();
        while self.row.len() < self.row_bytes {
            if self.taken == self.filled && !self.read_on()? {
                return Ok(false);
            }
            let rest = &self.buf[self.taken..self.filled];
            let (part, _) = rest.split_at(rest.len().min(self.row_bytes - self.row.len()));
            self.row.extend_from_slice(part);
            self.taken += part.len();
        }
        Ok(true)
    }

    fn read_on(&mut self) -> Result<bool> {
        assert_eq!(self.taken, self.filled, "bytes of a dump are passed over");
        assert!(self.at_bytes <= self.len_bytes, "a dump is read behind its end");
        let now = (self.len_bytes - self.at_bytes).min(self.buf.len() as u64) as usize;
        if now == 0 {
            return match self.crc32c == self.meta.crc32c {
                true => Ok(false),
                false => {
                    Err(damaged("has a dump with a wrong checksum").with("file", &self.meta.file))
                }
            };
        }
        let padded = now.next_multiple_of(PAGE_BYTES);
        self.device.read_at(self.at_bytes, &mut self.buf[..padded])?;
        self.at_bytes += now as u64;
        self.crc32c = crc32c_append(self.crc32c, &self.buf[..now]);
        (self.taken, self.filled) = (0, now);
        Ok(true)
    }

    /// Returns the row that [`advance`](Self::advance) brought: window, entry, record.
    pub(super) fn row(&self) -> Option<(u32, u32, &[u8])> {
        let (window, rest) = self.row.split_first_chunk::<4>()?;
        let (entry, record) = rest.split_first_chunk::<4>()?;
        Some((u32::from_le_bytes(*window), u32::from_le_bytes(*entry), record))
    }
}
