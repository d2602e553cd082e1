//! Scratch file of sorted runs, each beginning at a page border.
#![expect(clippy::indexing_slicing, reason = "counts are bounded by the buffers they count in")]

use std::ops::Range;
use std::sync::Arc;

use super::lengths::Lengths;
use crate::{AlignedBuf, Appender, Device, Folder, OpenMode, PAGE_BYTES};
use tierbed_core::checksum::crc32c_append;
use tierbed_core::{Error, Result};

/// Bytes of the longest write: larger ones gain nothing.
pub(super) const WRITE_BYTES_MAX: usize = 1 << 20;
/// A run gives its disk space back in about so many pieces, none longer than the greatest.
const FREED_PIECES: u64 = 32;
const FREED_BYTES_MAX: u64 = 1 << 20;

/// A sorted run on a device.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) device: Arc<dyn Device>,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    pub(super) crc: u32,
}

/// The runs in push order, and their file. What is merged before the last merge is appended to
/// the same file, whose space is given back where runs were read.
#[derive(Debug)]
pub(super) struct Scratch {
    folder: Arc<dyn Folder>,
    name: String,
    device: Option<Arc<dyn Device>>,
    end_bytes: u64,
    runs: Vec<Run>,
}

impl Scratch {
    pub(super) fn new(folder: Arc<dyn Folder>, name: String) -> Self {
        Self { folder, name, device: None, end_bytes: 0, runs: Vec::new() }
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the bytes written so far.
    pub(super) fn written_bytes(&self) -> u64 {
        self.end_bytes
    }

    /// Takes runs out; the space of each is given back as it is read.
    pub(super) fn take_runs(&mut self, range: Range<usize>) -> Vec<Run> {
        self.runs.drain(range).collect()
    }

    fn file_name(&self) -> String {
        format!("{}.0", self.name)
    }

    fn device(&mut self) -> Result<Arc<dyn Device>> {
        if let Some(device) = &self.device {
            return Ok(Arc::clone(device));
        }
        let device = self.folder.open(&self.file_name(), OpenMode::Create)?;
        device.set_len(0)?;
        self.device = Some(Arc::clone(&device));
        Ok(device)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.device.take().is_some() {
            // Best effort: a scratch file left behind holds nothing anyone needs.
            let _ = self.folder.remove(&self.file_name());
        }
    }
}

/// Appends one run.
pub(super) struct RunWriter<'a> {
    scratch: &'a mut Scratch,
    device: Arc<dyn Device>,
    appender: Appender,
    crc: u32,
}

impl<'a> RunWriter<'a> {
    pub(super) fn new(scratch: &'a mut Scratch, buffer_bytes: usize) -> Result<Self> {
        let device = scratch.device()?;
        let buffer_bytes = buffer_bytes.min(WRITE_BYTES_MAX) / PAGE_BYTES * PAGE_BYTES;
        let buffer_bytes = buffer_bytes.max(PAGE_BYTES);
        let appender = Appender::new(Arc::clone(&device), scratch.end_bytes, buffer_bytes);
        Ok(Self { scratch, device, appender, crc: 0 })
    }

    pub(super) fn push(&mut self, record: &[u8]) -> Result<()> {
        self.crc = crc32c_append(self.crc, record);
        self.appender.append(record)
    }

    /// Ends the run, which comes after all others.
    pub(super) fn finish(self) -> Result<()> {
        let at = self.scratch.runs.len();
        self.finish_at(at)
    }

    /// Ends the run, which gets the number `at` in push order.
    pub(super) fn finish_at(mut self, at: usize) -> Result<()> {
        let (offset_bytes, end) = (self.scratch.end_bytes, self.appender.end_bytes());
        // Whole pages only, so that direct I/O takes them; the tail is never read.
        self.appender.flush()?;
        self.scratch.end_bytes = end.next_multiple_of(PAGE_BYTES as u64);
        let (device, len_bytes) = (self.device, end - offset_bytes);
        self.scratch.runs.insert(at, Run { device, offset_bytes, len_bytes, crc: self.crc });
        Ok(())
    }
}

/// Reads one run back, record by record, and gives back the disk space of what it read.
#[derive(Debug)]
pub(super) struct RunReader {
    run: Run,
    buf: AlignedBuf,
    /// Bytes of the run not read yet.
    unread: Range<u64>,
    taken: usize,
    filled: usize,
    /// Where the current record lies in the buffer; empty: in `straddling`.
    record: Range<usize>,
    /// A record that lies in two buffers.
    straddling: Vec<u8>,
    crc: u32,
    /// Where the space begins that was not given back yet.
    kept_from: u64,
}

impl RunReader {
    /// Reads through a buffer of `buffer_bytes`, whole pages, records of at most `record_bytes`.
    pub(super) fn new(run: Run, buffer_bytes: usize, record_bytes: usize) -> Self {
        let pages_bytes = run.len_bytes.next_multiple_of(PAGE_BYTES as u64);
        let buffer_bytes = (buffer_bytes as u64).min(pages_bytes).max(PAGE_BYTES as u64);
        Self {
            buf: AlignedBuf::new(buffer_bytes as usize),
            unread: run.offset_bytes..run.offset_bytes + run.len_bytes,
            taken: 0,
            filled: 0,
            record: 0..0,
            straddling: Vec::with_capacity(record_bytes),
            crc: 0,
            kept_from: run.offset_bytes,
            run,
        }
    }

    /// Returns the record read by the last [`advance`](Self::advance).
    pub(super) fn record(&self) -> &[u8] {
        match self.record.is_empty() {
            true => &self.straddling,
            false => &self.buf[self.record.clone()],
        }
    }

    /// Reads the next record; `false` at the end of the run.
    pub(super) fn advance(&mut self, lengths: &Lengths) -> Result<bool> {
        let rest = &self.buf[self.taken..self.filled];
        if rest.len() >= lengths.key_bytes {
            let record_bytes = lengths.of(rest).ok_or_else(|| self.changed())?;
            if rest.len() >= record_bytes {
                self.record = self.taken..self.taken + record_bytes;
                self.taken += record_bytes;
                return Ok(true);
            }
        }
        self.advance_across(lengths)
    }

    // The next record begins in this buffer and ends in another, or there is none.
    fn advance_across(&mut self, lengths: &Lengths) -> Result<bool> {
        self.record = 0..0;
        self.straddling.clear();
        let mut wanted = lengths.key_bytes;
        while self.straddling.len() < wanted {
            if self.taken == self.filled && !self.read_on()? {
                self.free();
                return match self.straddling.is_empty() && self.crc == self.run.crc {
                    true => Ok(false),
                    false => Err(self.changed()),
                };
            }
            let rest = &self.buf[self.taken..self.filled];
            let part = rest.len().min(wanted - self.straddling.len());
            self.straddling.extend_from_slice(&rest[..part]);
            self.taken += part;
            if self.straddling.len() == lengths.key_bytes && wanted == lengths.key_bytes {
                wanted = lengths.of(&self.straddling).ok_or_else(|| self.changed())?;
            }
        }
        Ok(true)
    }

    fn read_on(&mut self) -> Result<bool> {
        let now = (self.unread.end - self.unread.start).min(self.buf.len() as u64) as usize;
        let pages = &mut self.buf[..now.next_multiple_of(PAGE_BYTES)];
        if now > 0 {
            self.run.device.read_at(self.unread.start, pages)?;
        }
        self.crc = crc32c_append(self.crc, &pages[..now]);
        self.unread.start += now as u64;
        (self.taken, self.filled) = (0, now);
        let piece_bytes = (self.run.len_bytes / FREED_PIECES).min(FREED_BYTES_MAX);
        if self.unread.start >= self.kept_from + piece_bytes {
            self.free();
        }
        Ok(now > 0)
    }

    // Gives back the space of what was read.
    fn free(&mut self) {
        let end = self.unread.start.next_multiple_of(PAGE_BYTES as u64);
        if end > self.kept_from {
            self.run.device.discard(self.kept_from, end - self.kept_from);
        }
        self.kept_from = end;
    }

    fn changed(&self) -> Error {
        Error::corruption("sorted run read back changed")
            .with("path", self.run.device.name())
            .with("offset_bytes", self.run.offset_bytes)
            .with("remedy", "check the disk, then run the operation again")
    }
}
