//! External merge sort of fixed-size records in bounded memory.
//!
//! Memory-sized runs are sorted and appended to a scratch file, then merged, in several passes when
//! there are more runs than read buffers.
//! Records compare as bytes by their key; equal keys keep the order in which they were pushed.
//!
//! ```text
//! push ─▶ [ key | payload ] … full? ─▶ sort ─▶ run 0, run 1, … ─▶ merge ─▶ next()
//! ```
//!
//! Each run carries a CRC32C in memory, checked when the run has been read to its end. Nothing
//! here outlives the sorter: the scratch files are removed when it is dropped.
//!
//! Source: Knuth, TAOCP 3, §5.4 (external sorting).
#![expect(clippy::indexing_slicing, reason = "`order` numbers the records in memory")]

mod merge;
mod scratch;

use std::sync::Arc;

use tierbed_core::{Budget, Error, Reservation, Result};

use crate::Folder;
use merge::Merge;
use scratch::{RunWriter, Scratch};

/// Least memory a sorter works well with.
pub const MEMORY_BYTES_MIN: u64 = 64 << 10;
/// Least memory a sorter works with at all: below, a merge has too few read buffers.
const MEMORY_BYTES_LEAST: u64 = MEMORY_BYTES_MIN / 2;
/// Share of the memory that is the write buffer while runs are made.
const WRITE_BUFFER_SHARE: u64 = 8;

/// What a sorter sorts, and in how much memory.
#[derive(Debug, Clone)]
pub struct SorterOptions {
    /// Bytes of the key, at least 1; compared as unsigned bytes, most significant first.
    pub key_bytes: usize,
    /// Bytes carried along.
    pub payload_bytes: usize,
    /// Bytes of records, order and buffers together; at least half of [`MEMORY_BYTES_MIN`] and
    /// four records.
    pub memory_bytes: u64,
    /// Names of the scratch files start with this.
    pub scratch_name: String,
}

/// Takes records in any order.
#[derive(Debug)]
pub struct ExternalSorter {
    key_bytes: usize,
    record_bytes: usize,
    records: Vec<u8>,
    order: Vec<u32>,
    records_max: usize,
    scratch: Scratch,
    memory: Reservation,
    record_count: u64,
}

/// One record, in key order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its key, `key_bytes`.
    pub key: &'a [u8],
    /// What was pushed with it, `payload_bytes`.
    pub payload: &'a [u8],
}

/// What a sorter did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SortStats {
    /// Records pushed.
    pub record_count: u64,
    /// Runs written while records came in; 0 when all fitted memory.
    pub run_count: u64,
    /// Passes that merged runs into longer runs before the last merge.
    pub merge_pass_count: u64,
}

impl ExternalSorter {
    /// Returns the memory that sorts well records of `record_bytes`, key and payload.
    #[must_use]
    pub fn memory_bytes_min(record_bytes: usize) -> u64 {
        // A handful of records must fit, or runs would be single records and merges of one.
        MEMORY_BYTES_MIN.max(4 * record_bytes as u64)
    }

    /// Reserves the memory and makes an empty sorter; scratch files go into `folder`.
    ///
    /// # Errors
    /// `Invalid` when the budget does not reach or the options are out of range.
    pub fn new(folder: Arc<dyn Folder>, options: &SorterOptions, budget: &Budget) -> Result<Self> {
        let record_bytes = options.key_bytes + options.payload_bytes;
        let records_max = options.memory_bytes - options.memory_bytes / WRITE_BUFFER_SHARE;
        let records_max = records_max / (record_bytes + size_of::<u32>()) as u64;
        let minimum_bytes = MEMORY_BYTES_LEAST.max(4 * record_bytes as u64);
        if options.key_bytes == 0 || options.memory_bytes < minimum_bytes {
            return Err(Error::invalid("sorter options out of range")
                .with("key_bytes", options.key_bytes)
                .with("record_bytes", record_bytes)
                .with("memory_bytes", options.memory_bytes)
                .with_minimum_bytes(minimum_bytes));
        }
        assert!(records_max > 0, "a sorter has room for a record");
        let memory = budget.reserve("sorter", options.memory_bytes)?;
        Ok(Self {
            key_bytes: options.key_bytes,
            record_bytes,
            records: Vec::new(),
            order: Vec::new(),
            records_max: records_max.min(u64::from(u32::MAX)) as usize,
            scratch: Scratch::new(folder, options.scratch_name.clone()),
            memory,
            record_count: 0,
        })
    }

    /// Adds a record.
    ///
    /// # Errors
    /// `Io` and `NoSpace` from the scratch file.
    ///
    /// # Panics
    /// When `key` or `payload` have another size than the options say.
    pub fn push(&mut self, key: &[u8], payload: &[u8]) -> Result<()> {
        assert_eq!(key.len(), self.key_bytes, "key size");
        assert_eq!(key.len() + payload.len(), self.record_bytes, "record size");
        if self.order.len() >= self.records_max {
            self.spill()?;
        }
        if self.records.capacity() == self.records.len() {
            self.grow();
        }
        self.order.push(self.order.len() as u32);
        self.records.extend_from_slice(key);
        self.records.extend_from_slice(payload);
        self.record_count += 1;
        Ok(())
    }

    /// Sorts what is left and returns the records in key order.
    ///
    /// # Errors
    /// `Io` and `NoSpace` from the scratch files, `Corruption` when a run reads back changed.
    pub fn finish(mut self) -> Result<SortedRecords> {
        let mut stats = SortStats { record_count: self.record_count, ..SortStats::default() };
        let source = if self.scratch.runs().is_empty() {
            self.sort();
            Source::Memory { records: self.records, order: self.order, at: 0 }
        } else {
            self.spill()?;
            (self.records, self.order) = (Vec::new(), Vec::new());
            stats.run_count = self.scratch.runs().len() as u64;
            let memory_bytes = usize::try_from(self.memory.bytes()).unwrap_or(usize::MAX);
            while self.scratch.runs().len() > merge::fan_in(memory_bytes, self.record_bytes) {
                merge::merge_pass(
                    &mut self.scratch,
                    self.key_bytes,
                    self.record_bytes,
                    memory_bytes,
                )?;
                stats.merge_pass_count += 1;
            }
            let runs = self.scratch.runs();
            Source::Runs(Merge::open(runs, self.key_bytes, self.record_bytes, memory_bytes)?)
        };
        Ok(SortedRecords {
            source,
            key_bytes: self.key_bytes,
            record_bytes: self.record_bytes,
            stats,
            _scratch: self.scratch,
            _memory: self.memory,
        })
    }

    /// Makes room by doubling up to the bound, so that small sorts stay small.
    fn grow(&mut self) {
        let count = (2 * self.order.len()).clamp(1024, self.records_max.max(1024));
        let count = count.min(self.records_max);
        self.records.reserve_exact((count - self.order.len()) * self.record_bytes);
        self.order.reserve_exact(count - self.order.len());
    }

    fn sort(&mut self) {
        let (records, key_bytes, record_bytes) = (&self.records, self.key_bytes, self.record_bytes);
        let key = |at: u32| {
            let start = at as usize * record_bytes;
            &records[start..start + key_bytes]
        };
        // Ties by position: the sort is stable without the memory of a stable sort.
        self.order.sort_unstable_by(|a, b| key(*a).cmp(key(*b)).then(a.cmp(b)));
    }

    fn spill(&mut self) -> Result<()> {
        if self.order.is_empty() {
            return Ok(());
        }
        assert_eq!(
            self.records.len(),
            self.order.len() * self.record_bytes,
            "bytes of the records in memory"
        );
        self.sort();
        let buffer_bytes = self.memory.bytes() / WRITE_BUFFER_SHARE;
        let mut run = RunWriter::new(&mut self.scratch, buffer_bytes as usize)?;
        for at in &self.order {
            let start = *at as usize * self.record_bytes;
            run.push(&self.records[start..start + self.record_bytes])?;
        }
        run.finish()?;
        self.records.clear();
        self.order.clear();
        Ok(())
    }
}

/// Hands out the records in key order.
#[derive(Debug)]
pub struct SortedRecords {
    source: Source,
    key_bytes: usize,
    record_bytes: usize,
    stats: SortStats,
    _scratch: Scratch,
    _memory: Reservation,
}

#[derive(Debug)]
enum Source {
    Memory { records: Vec<u8>, order: Vec<u32>, at: usize },
    Runs(Merge),
}

impl SortedRecords {
    /// Returns the next record; `None` after the last.
    ///
    /// # Errors
    /// `Io` from the scratch file, `Corruption` when a run reads back changed.
    #[expect(clippy::should_implement_trait, reason = "records borrow the buffer")]
    pub fn next(&mut self) -> Result<Option<Record<'_>>> {
        let record = match &mut self.source {
            Source::Runs(merge) => merge.next()?,
            Source::Memory { records, order, at } => {
                let start = order.get(*at).map(|at| *at as usize * self.record_bytes);
                *at += 1;
                start.map(|start| &records[start..start + self.record_bytes])
            }
        };
        Ok(record.map(|record| {
            let (key, payload) = record.split_at(self.key_bytes);
            Record { key, payload }
        }))
    }

    /// Returns what was done so far.
    #[must_use]
    pub fn stats(&self) -> SortStats {
        self.stats
    }
}

#[cfg(test)]
mod tests;
