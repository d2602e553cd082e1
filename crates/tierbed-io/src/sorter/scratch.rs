//! Scratch file of sorted runs, each beginning at a page border.
#![expect(clippy::indexing_slicing, reason = "counts are bounded by the buffers they count in")]

use std::sync::Arc;

use crate::{AlignedBuf, Device, Folder, OpenMode, PAGE_BYTES};
use tierbed_core::checksum::crc32c_append;
use tierbed_core::{Error, Result};

/// A sorted run on a device.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) device: Arc<dyn Device>,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    pub(super) crc: u32,
}

/// The runs of one generation, in push order, and their file. Merge passes write the next
/// generation into a second file and drop the first.
#[derive(Debug)]
pub(super) struct Scratch {
    folder: Arc<dyn Folder>,
    name: String,
    generation: u32,
    device: Option<Arc<dyn Device>>,
    end_bytes: u64,
    runs: Vec<Run>,
}

impl Scratch {
    pub(super) fn new(folder: Arc<dyn Folder>, name: String) -> Self {
        Self { folder, name, generation: 0, device: None, end_bytes: 0, runs: Vec::new() }
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns an empty scratch for the runs of the next merge pass.
    pub(super) fn next_generation(&self) -> Self {
        let mut next = Self::new(Arc::clone(&self.folder), self.name.clone());
        next.generation = self.generation + 1;
        next
    }

    fn file_name(&self) -> String {
        format!("{}.{}", self.name, self.generation)
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
    buffer: AlignedBuf,
    used: usize,
    start_bytes: u64,
    len_bytes: u64,
    crc: u32,
}

impl<'a> RunWriter<'a> {
    pub(super) fn new(scratch: &'a mut Scratch, buffer_bytes: usize) -> Result<Self> {
        let device = scratch.device()?;
        let buffer_bytes = (buffer_bytes / PAGE_BYTES).clamp(1, 256) * PAGE_BYTES;
        Ok(Self {
            start_bytes: scratch.end_bytes,
            scratch,
            device,
            buffer: AlignedBuf::new(buffer_bytes),
            used: 0,
            len_bytes: 0,
            crc: 0,
        })
    }

    pub(super) fn push(&mut self, record: &[u8]) -> Result<()> {
        self.crc = crc32c_append(self.crc, record);
        let mut rest = record;
        while !rest.is_empty() {
            if self.used == self.buffer.len() {
                self.flush(self.used)?;
            }
            let room = &mut self.buffer[self.used..];
            let count = room.len().min(rest.len());
            let (now, later) = rest.split_at(count);
            room[..count].copy_from_slice(now);
            self.used += count;
            rest = later;
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<()> {
        // Whole pages only, so that direct I/O takes them; the tail is never read.
        let len_bytes = self.len_bytes + self.used as u64;
        self.flush(self.used.next_multiple_of(PAGE_BYTES))?;
        self.scratch.end_bytes = self.start_bytes + self.len_bytes;
        self.scratch.runs.push(Run {
            device: self.device,
            offset_bytes: self.start_bytes,
            len_bytes,
            crc: self.crc,
        });
        Ok(())
    }

    fn flush(&mut self, count: usize) -> Result<()> {
        assert!(count <= self.buffer.len(), "{count} bytes of {}", self.buffer.len());
        let bytes = &self.buffer[..count];
        self.device.write_at(self.start_bytes + self.len_bytes, bytes)?;
        self.len_bytes += count as u64;
        self.used = 0;
        Ok(())
    }
}

/// Reads one run back, record by record.
#[derive(Debug)]
pub(super) struct RunReader {
    run: Run,
    buffer: AlignedBuf,
    /// Bytes of the buffer that hold unread data: `at..end`.
    at: usize,
    end: usize,
    /// Bytes of the run not yet in the buffer.
    left_bytes: u64,
    record_bytes: usize,
    /// The current record; a copy, because records may straddle refills.
    record: Vec<u8>,
    crc: u32,
}

impl RunReader {
    pub(super) fn new(run: Run, buffer_bytes: usize, record_bytes: usize) -> Self {
        Self {
            left_bytes: run.len_bytes,
            run,
            buffer: AlignedBuf::new(buffer_bytes),
            at: 0,
            end: 0,
            record_bytes,
            record: Vec::with_capacity(record_bytes),
            crc: 0,
        }
    }

    /// Returns the record read by the last [`advance`](Self::advance).
    pub(super) fn record(&self) -> &[u8] {
        &self.record
    }

    /// Reads the next record; `false` at the end of the run.
    pub(super) fn advance(&mut self) -> Result<bool> {
        self.record.clear();
        if self.at == self.end && self.left_bytes == 0 {
            if self.crc != self.run.crc {
                return Err(Error::corruption("sorted run read back changed")
                    .with("path", self.run.device.name())
                    .with("offset_bytes", self.run.offset_bytes)
                    .with("remedy", "check the disk, then run the operation again"));
            }
            return Ok(false);
        }
        while self.record.len() < self.record_bytes {
            if self.at == self.end {
                self.refill()?;
            }
            let ready = &self.buffer[self.at..self.end];
            let count = ready.len().min(self.record_bytes - self.record.len());
            self.record.extend_from_slice(&ready[..count]);
            self.at += count;
        }
        assert_eq!(self.record.len(), self.record_bytes, "bytes of a record");
        self.crc = crc32c_append(self.crc, &self.record);
        Ok(true)
    }

    fn refill(&mut self) -> Result<()> {
        let done_bytes = self.run.len_bytes - self.left_bytes;
        let count = self.left_bytes.min(self.buffer.len() as u64) as usize;
        if count == 0 {
            return Err(Error::corruption("sorted run ends inside a record")
                .with("path", self.run.device.name()));
        }
        // Runs occupy whole pages, so the rounded read stays inside the file.
        let rounded = count.next_multiple_of(PAGE_BYTES).min(self.buffer.len());
        let out = &mut self.buffer[..rounded];
        self.run.device.read_at(self.run.offset_bytes + done_bytes, out)?;
        self.left_bytes -= count as u64;
        (self.at, self.end) = (0, count);
        Ok(())
    }
}
