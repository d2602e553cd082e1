//! Streams of bytes on a device, written and read through a buffer of whole pages.

#![expect(clippy::indexing_slicing, reason = "counts are bounded by the buffers they count in")]

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::checksum::crc32c_append;
use tierbed_core::{Error, Result};

use crate::{AlignedBuf, Device, PAGE_BYTES};

/// Appends bytes to a device.
#[derive(Debug)]
pub struct Appender {
    device: Arc<dyn Device>,
    buf: AlignedBuf,
    filled: usize,
    /// Where the buffer will lie.
    at_bytes: u64,
}

impl Appender {
    /// Begins at `at_bytes` of `device`, through a buffer of `buf_bytes`: whole pages both.
    ///
    /// # Panics
    /// When one is not, or the buffer is empty.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, at_bytes: u64, buf_bytes: usize) -> Self {
        assert!(buf_bytes > 0 && buf_bytes.is_multiple_of(PAGE_BYTES), "{buf_bytes} are no pages");
        Self { device, buf: AlignedBuf::new(buf_bytes), filled: 0, at_bytes }
    }

    /// Returns where the next bytes will lie.
    #[must_use]
    pub fn end_bytes(&self) -> u64 {
        self.at_bytes + self.filled as u64
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// `Io` or `NoSpace`.
    ///
    /// # Panics
    /// Behind a [`flush`](Self::flush) that ended inside a page.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        assert!(self.at_bytes.is_multiple_of(PAGE_BYTES as u64), "a page is begun twice");
        let mut rest = bytes;
        while !rest.is_empty() {
            let room = &mut self.buf[self.filled..];
            let (now, later) = rest.split_at(rest.len().min(room.len()));
            room[..now.len()].copy_from_slice(now);
            self.filled += now.len();
            rest = later;
            if self.filled == self.buf.len() {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Appends zeros up to the end of the page.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn pad(&mut self) -> Result<()> {
        let end = self.end_bytes().next_multiple_of(PAGE_BYTES as u64);
        self.append(&[0; PAGE_BYTES][..(end - self.end_bytes()) as usize])
    }

    /// Writes what is gathered, with zeros behind it up to the end of the page; returns the
    /// device.
    ///
    /// # Errors
    /// `Io` or `NoSpace`.
    pub fn flush(&mut self) -> Result<&Arc<dyn Device>> {
        let padded = self.filled.next_multiple_of(PAGE_BYTES);
        if padded > 0 {
            self.buf[self.filled..padded].fill(0);
            self.device.write_at(self.at_bytes, &self.buf[..padded])?;
        }
        self.at_bytes = self.end_bytes();
        self.filled = 0;
        Ok(&self.device)
    }
}

/// Reads records of one length, one behind the other.
#[derive(Debug)]
pub struct RecordReader {
    device: Arc<dyn Device>,
    bytes: Range<u64>,
    buf: AlignedBuf,
    taken: usize,
    filled: usize,
    /// A copy, because records may straddle the buffer's end.
    record: Vec<u8>,
    record_bytes: usize,
    crc32c: u32,
}

impl RecordReader {
    /// Reads `bytes` of `device`, which begin at a page and whose last page the file has, through
    /// a buffer of `buf_bytes`, whole pages.
    ///
    /// # Panics
    /// When a record or the buffer is empty, or the buffer not whole pages.
    #[must_use]
    pub fn new(
        device: Arc<dyn Device>,
        bytes: Range<u64>,
        buf_bytes: usize,
        record_bytes: usize,
    ) -> Self {
        assert!(buf_bytes > 0 && buf_bytes.is_multiple_of(PAGE_BYTES), "{buf_bytes} are no pages");
        assert!(record_bytes > 0, "records have no bytes");
        Self {
            device,
            bytes,
            buf: AlignedBuf::new(buf_bytes),
            taken: 0,
            filled: 0,
            record: Vec::with_capacity(record_bytes),
            record_bytes,
            crc32c: 0,
        }
    }

    /// Brings the next record; `false` behind the last one.
    ///
    /// # Errors
    /// `Corruption` when the bytes end inside a record, otherwise the device's.
    pub fn advance(&mut self) -> Result<bool> {
        self.record.clear();
        while self.record.len() < self.record_bytes {
            if self.taken == self.filled && !self.read_on()? {
                return match self.record.is_empty() {
                    true => Ok(false),
                    false => Err(Error::corruption("file ends inside a record")
                        .with("path", self.device.name())),
                };
            }
            let rest = &self.buf[self.taken..self.filled];
            let (part, _) = rest.split_at(rest.len().min(self.record_bytes - self.record.len()));
            self.record.extend_from_slice(part);
            self.taken += part.len();
        }
        Ok(true)
    }

    fn read_on(&mut self) -> Result<bool> {
        let now = (self.bytes.end - self.bytes.start).min(self.buf.len() as u64) as usize;
        let pages = &mut self.buf[..now.next_multiple_of(PAGE_BYTES)];
        if now > 0 {
            self.device.read_at(self.bytes.start, pages)?;
        }
        self.crc32c = crc32c_append(self.crc32c, &pages[..now]);
        self.bytes.start += now as u64;
        (self.taken, self.filled) = (0, now);
        Ok(now > 0)
    }

    /// Returns the record that [`advance`](Self::advance) brought; empty before and behind all.
    #[must_use]
    pub fn record(&self) -> &[u8] {
        &self.record
    }

    /// Returns the checksum of what was read: of all bytes, behind the last record.
    #[must_use]
    pub fn crc32c(&self) -> u32 {
        self.crc32c
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Folder, MemoryFolder, OpenMode};

    proptest! {
        #[test]
        fn records_come_back_as_they_were_appended(
            count in 0usize..400,
            record_bytes in 1usize..300,
            from_page in 0u64..3,
            pages in 1usize..4,
        ) {
            let folder = MemoryFolder::new();
            let device = folder.open("stream", OpenMode::Create).unwrap();
            let start = from_page * PAGE_BYTES as u64;
            let mut appender = Appender::new(Arc::clone(&device), start, pages * PAGE_BYTES);
            let record = |at: usize| (0..record_bytes).map(move |byte| (at + 7 * byte) as u8);
            let mut crc = 0;
            for at in 0..count {
                let bytes: Vec<u8> = record(at).collect();
                crc = crc32c_append(crc, &bytes);
                appender.append(&bytes).unwrap();
            }
            let end = appender.end_bytes();
            prop_assert_eq!(end, start + (count * record_bytes) as u64);
            appender.flush().unwrap();
            let mut reader = RecordReader::new(device, start..end, PAGE_BYTES, record_bytes);
            for at in 0..count {
                prop_assert!(reader.advance().unwrap());
                prop_assert!(reader.record().iter().copied().eq(record(at)));
            }
            prop_assert!(!reader.advance().unwrap() && reader.record().is_empty());
            prop_assert_eq!(reader.crc32c(), crc);
        }
    }

    #[test]
    fn a_cut_record_is_damage() {
        let device = MemoryFolder::new().open("stream", OpenMode::Create).unwrap();
        device.set_len(PAGE_BYTES as u64).unwrap();
        let mut reader = RecordReader::new(device, 0..10, PAGE_BYTES, 4);
        assert!(reader.advance().unwrap() && reader.advance().unwrap());
        assert!(reader.advance().is_err());
    }
}
