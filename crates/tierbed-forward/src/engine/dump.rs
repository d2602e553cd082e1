//! The rows that were in memory, one after the other in a file of their own.

use std::sync::Arc;

use tierbed_core::checksum::crc32c_append;
use tierbed_core::Result;
use tierbed_io::{AlignedBuf, Device, Folder, OpenMode, PAGE_BYTES};
use tierbed_trainstore::TableMeta;

use super::stored::damaged;

/// Bytes gathered before a dump is written on.
pub(super) const DUMP_BUF_BYTES: usize = 64 << 10;
/// Window and entry before each record of a dump.
const DUMP_HEAD_BYTES: usize = 8;

/// Writes the rows of a dump in whole blocks.
pub(super) struct DumpWriter {
    device: Arc<dyn Device>,
    buf: AlignedBuf,
    filled: usize,
    at_bytes: u64,
    pub(super) meta: TableMeta,
}

impl DumpWriter {
    pub(super) fn create(folder: &dyn Folder, file: String) -> Result<Self> {
        let device = folder.open(&file, OpenMode::Create)?;
        device.set_len(0)?;
        let meta = TableMeta { file, crc32c: 0, entry_count: 0 };
        Ok(Self { device, buf: AlignedBuf::new(DUMP_BUF_BYTES), filled: 0, at_bytes: 0, meta })
    }

    /// Adds a row that waits for `entry` of `window`.
    pub(super) fn add(&mut self, window: u32, entry: u32, record: &[f32]) -> Result<()> {
        self.meta.entry_count += 1;
        self.append(&window.to_le_bytes())?;
        self.append(&entry.to_le_bytes())?;
        self.append(bytemuck::cast_slice(record))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(DUMP_BUF_BYTES - self.filled));
            if let Some(place) = self.buf.get_mut(self.filled..self.filled + now.len()) {
                place.copy_from_slice(now);
            }
            self.filled += now.len();
            rest = later;
            if self.filled == DUMP_BUF_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let Some(bytes) = self.buf.get(..self.filled) else { return Ok(()) };
        self.meta.crc32c = crc32c_append(self.meta.crc32c, bytes);
        let padded = self.filled.next_multiple_of(PAGE_BYTES);
        if let Some(bytes) = self.buf.get_mut(..padded) {
            bytes.iter_mut().skip(self.filled).for_each(|byte| *byte = 0);
            self.device.write_at(self.at_bytes, bytes)?;
        }
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
    let damaged = |what: &str| damaged(what).with("file", &meta.file);
    let device = folder
        .open(&meta.file, OpenMode::ReadOnly)
        .map_err(|error| damaged("has lost its dump").with("cause", error))?;
    let row_bytes = DUMP_HEAD_BYTES + record_bytes;
    let len_bytes = meta.entry_count.checked_mul(row_bytes as u64);
    let len_bytes = len_bytes.filter(|&len| device.len_bytes().is_ok_and(|found| len <= found));
    let len_bytes = len_bytes.ok_or_else(|| damaged("has a dump that is too short"))?;
    let mut buf = AlignedBuf::new(DUMP_BUF_BYTES);
    let (mut at, mut crc, mut row) = (0u64, 0, Vec::with_capacity(row_bytes));
    while at < len_bytes {
        let now = (len_bytes - at).min(DUMP_BUF_BYTES as u64) as usize;
        let padded = now.next_multiple_of(PAGE_BYTES);
        device.read_at(at, buf.get_mut(..padded).unwrap_or(&mut []))?;
        at += now as u64;
        let mut rest = buf.get(..now).unwrap_or(&[]);
        crc = crc32c_append(crc, rest);
        while !rest.is_empty() {
            let (part, later) = rest.split_at(rest.len().min(row_bytes - row.len()));
            row.extend_from_slice(part);
            rest = later;
            if row.len() < row_bytes {
                break;
            }
            let words: &[u8] = &row;
            if let Some((head, record)) = words.split_first_chunk::<DUMP_HEAD_BYTES>() {
                let [a, b, c, d, e, f, g, h] = *head;
                sink(u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]), record)?;
            }
            row.clear();
        }
    }
    if crc != meta.crc32c {
        return Err(damaged("has a dump with a wrong checksum"));
    }
    Ok(())
}
