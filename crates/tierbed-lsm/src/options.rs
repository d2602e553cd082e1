//! Options of the tree.

use std::sync::Arc;

use tierbed_core::env::{Clock, SystemClock};
use tierbed_core::{Budget, Error, Result};
use tierbed_io::{EngineOptions, PAGE_BYTES};

use crate::compaction::picker::{Picker, TreeShape};
use crate::compaction::scheduler::Scheduling;
use crate::lookahead::hot_rows::HotRule;
use crate::worker::WorkerChoice;

/// What a commit does with rows that are still in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// It flushes them. No log; made for a commit now and then.
    #[default]
    Commit,
    /// It syncs the log they were written to. Every row is written once more; made for a commit
    /// every step.
    Step,
}

/// How the memory is divided. Indexes, filters and hot rows take what they need of the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Bytes of one memtable, its index included.
    pub memtable_bytes: usize,
    /// Memtables that may wait to be flushed, beside the active one: at least 1.
    pub sealed_memtables_max: usize,
    /// Bytes of the block cache; 0 for none.
    pub block_cache_bytes: usize,
    /// Reads the outdated-row monitor remembers until the row is written; 0 turns it off.
    pub monitored_reads_max: usize,
}

/// How SSTs are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SstOptions {
    /// Bytes of a block, a multiple of 4,096; grows with the longest record.
    pub block_bytes: usize,
    /// Rows of about this many bytes make one SST of level 1 or deeper.
    pub sst_bytes: u64,
    /// Bits per row of the filters; 0 for none.
    pub filter_bits_per_row: u32,
    /// Bytes moved at once by flushes, merges and scans.
    pub chunk_bytes: usize,
}

/// What an [`LsmStore`](crate::LsmStore) is opened with.
#[derive(Debug, Clone)]
pub struct LsmOptions {
    /// Account for everything the store allocates.
    pub budget: Budget,
    /// How blocks are read; the buffer size follows the block size.
    pub engine: EngineOptions,
    /// Time, for the scheduler and the latency histogram.
    pub clock: Arc<dyn Clock>,
    /// What a commit does.
    pub durability: Durability,
    /// Most bytes the store may occupy on disk.
    pub disk_quota_bytes: Option<u64>,
    /// How the memory is divided.
    pub memory: MemoryOptions,
    /// How SSTs are made.
    pub sst: SstOptions,
    /// When levels are due.
    pub shape: TreeShape,
    /// RecDB's hot row identifier and key allocator: `None` turns both off.
    pub hot_rule: Option<HotRule>,
    /// RecDB's key sorter.
    pub sorts_requests: bool,
    /// RecDB's compaction picker, or the plain one.
    pub picker: Picker,
    /// RecDB's compaction scheduler, or another.
    pub scheduling: Scheduling,
    /// Where flushes and compactions run.
    pub worker: WorkerChoice,
    /// Whether `write`, `observe` and `commit` begin flushes and compactions by themselves;
    /// otherwise [`step`](crate::LsmStore::step) does, and `write` only where memory forces it.
    pub works_on_write: bool,
}

impl LsmOptions {
    /// RecDB with all its parts, within `budget`: half of the free bytes for write buffers, an
    /// eighth for the block cache, a sixteenth for the outdated-row monitor.
    #[must_use]
    pub fn recdb(budget: Budget) -> Self {
        const MEMTABLE_BYTES_MAX: u64 = 256 << 20;
        let free_bytes = budget.free_bytes();
        let memtable_bytes = (free_bytes / 4).min(MEMTABLE_BYTES_MAX) as usize;
        let shape = TreeShape {
            l0_trigger: 4,
            l0_stop: 12,
            level1_bytes: 4 * memtable_bytes as u64,
            level_ratio: 10,
        };
        Self {
            engine: EngineOptions::default(),
            clock: Arc::new(SystemClock::default()),
            durability: Durability::default(),
            disk_quota_bytes: None,
            memory: MemoryOptions {
                memtable_bytes,
                sealed_memtables_max: 1,
                block_cache_bytes: memtable_bytes / 2,
                monitored_reads_max: memtable_bytes / 128,
            },
            sst: SstOptions {
                block_bytes: PAGE_BYTES,
                sst_bytes: (memtable_bytes as u64).clamp(64 << 10, 64 << 20),
                filter_bits_per_row: 10,
                chunk_bytes: (memtable_bytes / 64).clamp(PAGE_BYTES, 256 << 10),
            },
            shape,
            hot_rule: Some(HotRule::default()),
            sorts_requests: true,
            picker: Picker::MostOutdated,
            scheduling: Scheduling::LookAhead,
            worker: WorkerChoice::default(),
            works_on_write: true,
            budget,
        }
    }

    /// The plain tree, without any of RecDB's parts: the baseline.
    #[must_use]
    pub fn plain(budget: Budget) -> Self {
        let mut options = Self::recdb(budget);
        options.memory.monitored_reads_max = 0;
        Self {
            hot_rule: None,
            sorts_requests: false,
            picker: Picker::Largest,
            scheduling: Scheduling::Levelled,
            ..options
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn check(&self) -> Result<()> {
        let sst = &self.sst;
        let checks = [
            (self.memory.memtable_bytes >= 1024, "memtable_bytes at least 1024"),
            (self.memory.memtable_bytes <= 1 << 40, "memtable_bytes at most 2^40"),
            (self.memory.sealed_memtables_max >= 1, "sealed_memtables_max at least 1"),
            (
                sst.block_bytes.is_multiple_of(PAGE_BYTES) && sst.block_bytes > 0,
                "block_bytes a multiple of 4096",
            ),
            (sst.block_bytes <= 1 << 20, "block_bytes at most 2^20"),
            (sst.chunk_bytes <= 1 << 26, "chunk_bytes at most 2^26"),
            (sst.sst_bytes <= 1 << 40, "sst_bytes at most 2^40"),
            (sst.filter_bits_per_row <= 64, "filter_bits_per_row at most 64"),
            (self.shape.l0_trigger >= 1, "l0_trigger at least 1"),
            (self.shape.l0_stop >= self.shape.l0_trigger, "l0_stop at least l0_trigger"),
            (self.shape.level_ratio >= 2, "level_ratio at least 2"),
            (self.shape.level1_bytes > 0, "level1_bytes above 0"),
        ];
        for (is_fine, expected) in checks {
            if !is_fine {
                return Err(Error::invalid("LSM option out of range").with("expected", expected));
            }
        }
        self.hot_rule.map_or(Ok(()), |rule| rule.check())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_in_range_for_every_budget_that_can_work() {
        for bytes in [256 << 10, 1 << 20, 1 << 30, u64::MAX] {
            LsmOptions::recdb(Budget::new(bytes)).check().unwrap();
            LsmOptions::plain(Budget::new(bytes)).check().unwrap();
        }
        let mut options = LsmOptions::recdb(Budget::new(1 << 20));
        options.sst.block_bytes = 5000;
        assert!(options.check().unwrap_err().to_string().contains("block_bytes"));
        assert!(LsmOptions::recdb(Budget::new(1000)).check().is_err());
    }
}
