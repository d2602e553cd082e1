//! External merge sort of records in bounded memory.
//!
//! Memory-sized runs are sorted and appended to a scratch file, then merged. Where there are more
//! runs than read buffers, just so many are merged before that the others can be at once.
//! Records compare as bytes by their key; equal keys keep the order in which they were pushed.
//! All have one length, or the class that begins their key tells it, so no length is stored.
//!
//! ```text
//! push ─▶ [ key | payload ] … full? ─▶ sort ─▶ run 0, run 1, … ─▶ merge ─▶ next()
//! ```
//!
//! The disk space of a run is given back while it is merged, where the file system can. What takes
//! the sorted records may grow by as much: both together hold hardly more than once the records.
//!
//! Each run carries a CRC32C in memory, checked when the run has been read to its end. Nothing
//! here outlives the sorter: the scratch files are removed when it is dropped.
//!
//! Source: Knuth, TAOCP 3, §5.4 (external sorting).
#![expect(clippy::indexing_slicing, reason = "`order` says where the records in memory begin")]

mod lengths;
mod merge;
mod scratch;

use std::sync::Arc;

use tierbed_core::{Budget, Error, Reservation, Result};

use crate::{Folder, PAGE_BYTES};
use lengths::Lengths;
pub use lengths::PayloadClasses;
use merge::Merge;
use scratch::{RunWriter, Scratch, WRITE_BYTES_MAX};

/// Least memory a sorter works well with.
pub const MEMORY_BYTES_MIN: u64 = 64 << 10;
/// Least memory a sorter works with at all: below, a merge has too few read buffers.
const MEMORY_BYTES_LEAST: u64 = MEMORY_BYTES_MIN / 2;
/// Share of the memory that is the write buffer while runs are made, at most.
const WRITE_BUFFER_SHARE: u64 = 8;
/// Bytes of a read that is long enough, where the memory reaches for it.
const READ_BYTES_WANTED: usize = 128 << 10;

/// What a sorter sorts, and in how much memory.
#[derive(Debug, Clone)]
pub struct SorterOptions {
    /// Bytes of the key, at least 1; compared as unsigned bytes, most significant first.
    pub key_bytes: usize,
    /// Bytes carried along: of every record, or at most.
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
    lengths: Lengths,
    /// One behind the other.
    records: Vec<u8>,
    /// Records in memory.
    held_count: usize,
    /// Bytes of records and their order in memory, at most.
    held_bytes_max: usize,
    scratch: Scratch,
    memory: Reservation,
    budget: Budget,
    record_count: u64,
}

/// Where a record in memory begins, with the head of its key: sorting reads no other memory where
/// keys are no longer.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// The head's upper and lower half, so that a place takes 12 bytes.
    head: [u32; 2],
    at: u32,
}

impl Place {
    fn head(self) -> u64 {
        u64::from(self.head[0]) << 32 | u64::from(self.head[1])
    }
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
    /// Bytes written to the scratch file.
    pub spilled_bytes: u64,
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
        let payload_bytes = vec![options.payload_bytes];
        Self::of_classes(folder, options, &PayloadClasses { class_bytes: 0, payload_bytes }, budget)
    }

    /// As [`new`](Self::new), of records whose payloads have the lengths of their `classes`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_classes(
        folder: Arc<dyn Folder>,
        options: &SorterOptions,
        classes: &PayloadClasses,
        budget: &Budget,
    ) -> Result<Self> {
        let lengths = Lengths::new(options.key_bytes, classes)?;
        let record_bytes = lengths.longest_bytes;
        let minimum_bytes = MEMORY_BYTES_LEAST.max(4 * record_bytes as u64);
        if options.key_bytes == 0 || options.memory_bytes < minimum_bytes {
            return Err(Error::invalid("sorter options out of range")
                .with("key_bytes", options.key_bytes)
                .with("record_bytes", record_bytes)
                .with("memory_bytes", options.memory_bytes)
                .with_minimum_bytes(minimum_bytes));
        }
        let memory = budget.reserve("sorter", options.memory_bytes)?;
        let held_bytes_max = options.memory_bytes - write_bytes(options.memory_bytes) as u64;
        let held_bytes_max = held_bytes_max.min(u64::from(u32::MAX)) as usize;
        assert!(held_bytes_max > record_bytes + size_of::<Place>(), "a sorter has room");
        Ok(Self {
            lengths,
            records: Vec::new(),
            held_count: 0,
            held_bytes_max,
            scratch: Scratch::new(folder, options.scratch_name.clone()),
            memory,
            budget: budget.clone(),
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
        let record_bytes = key.len() + payload.len();
        assert_eq!(key.len(), self.lengths.key_bytes, "key size");
        assert_eq!(Some(record_bytes), self.lengths.of(key), "record size");
        let order_bytes = (self.held_count + 1) * size_of::<Place>();
        if self.records.len() + record_bytes + order_bytes > self.held_bytes_max {
            self.spill()?;
        }
        if self.records.capacity() - self.records.len() < record_bytes {
            self.grow();
        }
        self.records.extend_from_slice(key);
        self.records.extend_from_slice(payload);
        self.held_count += 1;
        self.record_count += 1;
        Ok(())
    }

    /// Sorts what is left and returns the records in key order.
    ///
    /// # Errors
    /// `Io` and `NoSpace` from the scratch files, `Corruption` when a run reads back changed.
    pub fn finish(self) -> Result<SortedRecords> {
        self.finish_with(0)
    }

    /// As [`finish`](Self::finish), with up to `more_bytes` more of the budget where many runs are
    /// merged faster in more memory.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn finish_with(mut self, more_bytes: u64) -> Result<SortedRecords> {
        let mut stats = SortStats { record_count: self.record_count, ..SortStats::default() };
        let source = if self.scratch.runs().is_empty() {
            let order = self.order();
            Source::Memory { records: self.records, order, at: 0 }
        } else {
            self.spill()?;
            self.records = Vec::new();
            stats.run_count = self.scratch.runs().len() as u64;
            let wanted_bytes = merge::memory_bytes(
                self.scratch.runs().len(),
                self.lengths.longest_bytes,
                READ_BYTES_WANTED,
            );
            let more_bytes = more_bytes.min(self.budget.free_bytes());
            let memory_bytes = wanted_bytes.min(self.memory.bytes().saturating_add(more_bytes));
            if memory_bytes > self.memory.bytes() {
                // Others may have taken it meanwhile: then reads are shorter.
                let _ = self.memory.resize(memory_bytes);
            }
            let memory_bytes = usize::try_from(self.memory.bytes()).unwrap_or(usize::MAX);
            stats.merge_pass_count = merge::reduce(&mut self.scratch, &self.lengths, memory_bytes)?;
            stats.spilled_bytes = self.scratch.written_bytes();
            Source::Runs(Merge::open(self.scratch.runs(), &self.lengths, memory_bytes)?)
        };
        Ok(SortedRecords {
            source,
            lengths: self.lengths,
            stats,
            _scratch: self.scratch,
            _memory: self.memory,
        })
    }

    /// Makes room by doubling up to the bound, so that small sorts stay small.
    fn grow(&mut self) {
        let least = 1024 * self.lengths.longest_bytes;
        let wanted = (2 * self.records.len()).max(least).min(self.held_bytes_max);
        self.records.reserve_exact(wanted - self.records.len());
    }

    /// Returns where the records in memory begin, in the order of their keys.
    fn order(&mut self) -> Vec<Place> {
        let order_bytes = self.held_count * size_of::<Place>();
        self.records.shrink_to(self.held_bytes_max - order_bytes);
        let (records, lengths) = (&self.records, &self.lengths);
        let mut order = Vec::with_capacity(self.held_count);
        let mut at = 0;
        while at < records.len() {
            let record = &records[at..];
            let head = lengths.head(record);
            order.push(Place { head: [(head >> 32) as u32, head as u32], at: at as u32 });
            at += length_of(lengths, record);
        }
        assert_eq!(order.len(), self.held_count, "records in memory");
        let rest = |place: &Place| lengths.rest(&records[place.at as usize..]);
        // Ties by position: the sort is stable without the memory of a stable sort.
        if lengths.has_rest() {
            order.sort_unstable_by(|a, b| {
                let by_head = a.head().cmp(&b.head());
                by_head.then_with(|| rest(a).cmp(rest(b))).then(a.at.cmp(&b.at))
            });
        } else {
            order.sort_unstable_by_key(|place| (place.head(), place.at));
        }
        order
    }

    fn spill(&mut self) -> Result<()> {
        if self.held_count == 0 {
            return Ok(());
        }
        let order = self.order();
        let mut run = RunWriter::new(&mut self.scratch, write_bytes(self.memory.bytes()))?;
        for place in &order {
            let record = &self.records[place.at as usize..];
            run.push(&record[..length_of(&self.lengths, record)])?;
        }
        run.finish()?;
        self.records.clear();
        self.held_count = 0;
        Ok(())
    }
}

/// Returns the bytes of the write buffer while runs are made in `memory_bytes`.
fn write_bytes(memory_bytes: u64) -> usize {
    let share = (memory_bytes / WRITE_BUFFER_SHARE).min(WRITE_BYTES_MAX as u64) as usize;
    share.max(PAGE_BYTES)
}

/// Returns the bytes of the record in memory that `record` begins with.
fn length_of(lengths: &Lengths, record: &[u8]) -> usize {
    let Some(record_bytes) = lengths.of(record) else { panic!("a record of no class was pushed") };
    record_bytes
}

/// Hands out the records in key order.
#[derive(Debug)]
pub struct SortedRecords {
    source: Source,
    lengths: Lengths,
    stats: SortStats,
    _scratch: Scratch,
    _memory: Reservation,
}

#[derive(Debug)]
enum Source {
    Memory { records: Vec<u8>, order: Vec<Place>, at: usize },
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
                let record = order.get(*at).map(|place| &records[place.at as usize..]);
                *at += 1;
                record.map(|record| &record[..length_of(&self.lengths, record)])
            }
        };
        Ok(record.map(|record| {
            let (key, payload) = record.split_at(self.lengths.key_bytes);
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
