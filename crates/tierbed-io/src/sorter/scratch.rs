//! Scratch file of sorted runs, each beginning at a page border.

use std::sync::Arc;

use crate::{Appender, Device, Folder, OpenMode, RecordReader, PAGE_BYTES};
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
    appender: Appender,
    crc: u32,
}

impl<'a> RunWriter<'a> {
    pub(super) fn new(scratch: &'a mut Scratch, buffer_bytes: usize) -> Result<Self> {
        let device = scratch.device()?;
        let buffer_bytes = (buffer_bytes / PAGE_BYTES).clamp(1, 256) * PAGE_BYTES;
        let appender = Appender::new(Arc::clone(&device), scratch.end_bytes, buffer_bytes);
        Ok(Self { scratch, device, appender, crc: 0 })
    }

    pub(super) fn push(&mut self, record: &[u8]) -> Result<()> {
        self.crc = crc32c_append(self.crc, record);
        self.appender.append(record)
    }

    pub(super) fn finish(mut self) -> Result<()> {
        let (offset_bytes, end) = (self.scratch.end_bytes, self.appender.end_bytes());
        // Whole pages only, so that direct I/O takes them; the tail is never read.
        self.appender.flush()?;
        self.scratch.end_bytes = end.next_multiple_of(PAGE_BYTES as u64);
        let (device, len_bytes) = (self.device, end - offset_bytes);
        self.scratch.runs.push(Run { device, offset_bytes, len_bytes, crc: self.crc });
        Ok(())
    }
}

/// Reads one run back, record by record.
#[derive(Debug)]
pub(super) struct RunReader {
    run: Run,
    records: RecordReader,
}

impl RunReader {
    pub(super) fn new(run: Run, buffer_bytes: usize, record_bytes: usize) -> Self {
        let bytes = run.offset_bytes..run.offset_bytes + run.len_bytes;
        let device = Arc::clone(&run.device);
        Self { run, records: RecordReader::new(device, bytes, buffer_bytes, record_bytes) }
    }

    /// Returns the record read by the last [`advance`](Self::advance).
    pub(super) fn record(&self) -> &[u8] {
        self.records.record()
    }

    /// Reads the next record; `false` at the end of the run.
    pub(super) fn advance(&mut self) -> Result<bool> {
        let is_there = self.records.advance()?;
        if !is_there && self.records.crc32c() != self.run.crc {
            return Err(Error::corruption("sorted run read back changed")
                .with("path", self.run.device.name())
                .with("offset_bytes", self.run.offset_bytes)
                .with("remedy", "check the disk, then run the operation again"));
        }
        Ok(is_there)
    }
}
