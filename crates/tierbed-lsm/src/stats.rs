//! Counters of the tree, those behind RecDB's figures.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::version::LEVELS_MAX;

/// Buckets of the read latency histogram; bucket `b` counts calls below `2^b` microseconds.
pub const LATENCY_BUCKETS: usize = 32;
/// Buckets of the block load histogram; bucket `n` counts blocks loaded `n + 1` times, the last
/// one that often or more.
pub const LOAD_BUCKETS: usize = 16;

/// Counters since the store was opened.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LsmStats {
    /// Record bytes given to `write`.
    pub user_bytes_written: u64,
    /// Memtables flushed.
    pub flush_count: u64,
    /// Bytes of the SSTs they became.
    pub flush_bytes: u64,
    /// Commits that were one entry and one sync of the log.
    pub step_commit_count: u64,
    /// Bytes appended to the log.
    pub wal_bytes: u64,
    /// Compactions that merged something.
    pub compaction_count: u64,
    /// SSTs moved down a level without being rewritten.
    pub move_count: u64,
    /// SSTs rewritten in place of their level, without their outdated rows (Algorithm 2).
    pub rewrite_count: u64,
    /// Bytes compactions read.
    pub compaction_read_bytes: u64,
    /// Bytes compactions wrote.
    pub compaction_write_bytes: u64,
    /// Time spent in compactions, microseconds.
    pub compaction_us: u64,
    /// Rows that took part in compactions.
    pub rows_merged: u64,
    /// Outdated rows that compactions removed.
    pub rows_dropped: u64,
    /// Times the scheduler put a compaction off.
    pub deferred_count: u64,
    /// Compactions that could not wait because their level was full.
    pub urgent_count: u64,
    /// Blocks loaded from the device.
    pub block_loads: u64,
    /// Of these, loads of a block already loaded in the same call.
    pub block_reloads: u64,
    /// Of these, with the key sorter: loads for rows under the hot prefix.
    pub hot_block_loads: u64,
    /// Blocks loaded per level, with the key sorter.
    pub level_block_loads: [u64; LEVELS_MAX],
    /// Rows found per level, with the key sorter.
    pub level_rows_found: [u64; LEVELS_MAX],
    /// Blocks found in the cache.
    pub cache_hits: u64,
    /// Block reads that a filter saved.
    pub filter_skips: u64,
    /// Rows found in a memtable.
    pub memtable_hits: u64,
    /// Announcements too large for the budget, from which no hot rows were chosen.
    pub windows_too_large: u64,
    /// Rewrites left out because the budget did not hold their keys.
    pub rewrites_skipped: u64,
    /// Rows whose newest version moved to the hot prefix.
    pub rows_promoted: u64,
    /// Rows whose newest version moved back.
    pub rows_demoted: u64,
    /// Per number of loads within one call: blocks. The input of RecDB Fig. 13.
    pub loads_per_block: [u64; LOAD_BUCKETS],
    /// Read calls by latency.
    pub read_latency: [u64; LATENCY_BUCKETS],
}

impl LsmStats {
    /// Returns the share of merged rows that were outdated and removed. Source: RecDB §5.4.2
    /// (GC efficiency, Fig. 15).
    #[must_use]
    pub fn gc_efficiency(&self) -> f64 {
        ratio(self.rows_dropped, self.rows_merged)
    }

    /// Returns outdated rows removed per byte that compactions read.
    #[must_use]
    pub fn rows_dropped_per_byte(&self) -> f64 {
        ratio(self.rows_dropped, self.compaction_read_bytes)
    }

    /// Returns device bytes written (log, flushes, compactions) per byte given to `write`.
    #[must_use]
    pub fn write_amplification(&self) -> f64 {
        let written = self.wal_bytes + self.flush_bytes + self.compaction_write_bytes;
        ratio(written, self.user_bytes_written)
    }

    /// Returns what other stores do not count, by name.
    pub(crate) fn own(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([
            ("block_loads", self.block_loads),
            ("block_reloads", self.block_reloads),
            ("rows_merged", self.rows_merged),
            ("rows_dropped", self.rows_dropped),
            ("compaction_count", self.compaction_count),
            ("compaction_us", self.compaction_us),
            ("compaction_read_bytes", self.compaction_read_bytes),
            ("compaction_write_bytes", self.compaction_write_bytes),
        ])
    }

    pub(crate) fn count_read_call(&mut self, us: u64) {
        let bucket = (u64::BITS - us.leading_zeros()) as usize;
        if let Some(count) = self.read_latency.get_mut(bucket.min(LATENCY_BUCKETS - 1)) {
            *count += 1;
        }
    }

    pub(crate) fn count_level(&mut self, level: usize, block_loads: u64, rows_found: u64) {
        if let Some(count) = self.level_block_loads.get_mut(level) {
            *count += block_loads;
        }
        if let Some(count) = self.level_rows_found.get_mut(level) {
            *count += rows_found;
        }
    }

    pub(crate) fn count_block_loads(&mut self, loads: u32) {
        let bucket = (loads as usize).clamp(1, LOAD_BUCKETS) - 1;
        if let Some(count) = self.loads_per_block.get_mut(bucket) {
            *count += 1;
        }
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    part as f64 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_and_buckets_are_what_their_names_say() {
        let mut stats = LsmStats {
            user_bytes_written: 100,
            flush_bytes: 110,
            compaction_write_bytes: 190,
            rows_merged: 200,
            rows_dropped: 50,
            ..LsmStats::default()
        };
        assert!((stats.gc_efficiency() - 0.25).abs() < 1e-12);
        assert!((stats.write_amplification() - 3.0).abs() < 1e-12);
        assert!(LsmStats::default().write_amplification().abs() < 1e-12);
        for us in [0, 1, 2, 3, u64::MAX] {
            stats.count_read_call(us);
        }
        assert_eq!(stats.read_latency[..3], [1, 1, 2]);
        assert_eq!(stats.read_latency[LATENCY_BUCKETS - 1], 1);
        stats.count_block_loads(1);
        stats.count_block_loads(99);
        assert_eq!((stats.loads_per_block[0], stats.loads_per_block[LOAD_BUCKETS - 1]), (1, 1));
    }
}
