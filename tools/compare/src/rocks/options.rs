//! How is RocksDB tuned? As those who train through it do.
//!
//! | option | here | source |
//! |---|---|---|
//! | memory | 84 % memtables, 16 % block cache | RecDB §5.1.4 (856 and 168 MB of 1 GB) |
//! | direct I/O, no log, no compression | yes | FBGEMM's SSD tables |
//! | checksums | off | FBGEMM (`kNoChecksum`, `verify_checksums = false`) |
//! | filters | 10 bits per row, none on the last level | usual; FBGEMM (16 bits) |
//! | memtable filters | whole key, 5 % of the memtable | FBGEMM |
//! | index and filters | beside the block cache | faster than in it, as FBGEMM has them |
//! | compaction | dynamic levels, or universal with 400 % | RocksDB's advice; FBGEMM |

use tierbed_core::{Budget, Error, Result};

/// How RocksDB orders its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RocksMode {
    /// Levels of disjoint files, dynamic level sizes: reads look into few files.
    Levelled,
    /// Universal compaction up to 400 % space amplification, as FBGEMM: writes cost less.
    Universal,
}

/// What a [`RocksStore`](crate::RocksStore) is opened with.
#[derive(Debug, Clone)]
pub struct RocksOptions {
    /// Account for memtables, block cache and read buffers.
    pub budget: Budget,
    /// Order of the files.
    pub mode: RocksMode,
    /// Most bytes the store may occupy on disk.
    pub disk_quota_bytes: Option<u64>,
    /// Bytes of one memtable.
    pub memtable_bytes: usize,
    /// Memtables, the active one included.
    pub memtables_max: i32,
    /// Bytes of the block cache.
    pub block_cache_bytes: usize,
    /// Records of one round of reads.
    pub read_buffer_bytes: usize,
    /// Threads that read at a time: RocksDB's reads block, so they are the queue depth.
    pub read_threads: usize,
    /// Threads of flushes and compactions.
    pub background_jobs: i32,
    /// Past the system's page cache.
    pub is_direct: bool,
    /// Write and check block checksums (CRC32C).
    pub has_checksums: bool,
    /// Keep index and filters in the block cache, so that they count. Otherwise they take a byte
    /// or two per row **outside** the budget (`uncounted_bytes` of its statistics).
    pub caches_index_and_filters: bool,
    /// Bits per row of the filters.
    pub filter_bits_per_row: u32,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Bytes of an SST.
    pub sst_bytes: u64,
    /// Bytes of level 1, levelled mode.
    pub level1_bytes: u64,
    /// SSTs on level 0 that start a compaction.
    pub l0_trigger: i32,
}

/// Least memory these options work with.
const MEMORY_BYTES_MIN: u64 = 1 << 20;
const MEMTABLES: u64 = 4;

impl RocksOptions {
    /// Divides `memory_bytes` as RecDB does; they will be taken from `budget`.
    #[must_use]
    pub fn within(memory_bytes: u64, mode: RocksMode, budget: Budget) -> Self {
        let memory_bytes = memory_bytes.max(MEMORY_BYTES_MIN);
        let read_buffer_bytes = (memory_bytes / 32).clamp(64 << 10, 4 << 20);
        let rest_bytes = memory_bytes - read_buffer_bytes;
        let block_cache_bytes = rest_bytes / 100 * 16;
        let memtable_bytes = (rest_bytes - block_cache_bytes) / MEMTABLES;
        Self {
            budget,
            mode,
            disk_quota_bytes: None,
            memtable_bytes: memtable_bytes as usize,
            memtables_max: MEMTABLES as i32,
            block_cache_bytes: block_cache_bytes as usize,
            read_buffer_bytes: read_buffer_bytes as usize,
            read_threads: 16,
            background_jobs: 2,
            is_direct: true,
            has_checksums: false,
            caches_index_and_filters: false,
            filter_bits_per_row: 10,
            block_bytes: 4096,
            sst_bytes: 32 << 20,
            level1_bytes: (4 * memtable_bytes).max(128 << 20),
            l0_trigger: 4,
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn check(&self) -> Result<()> {
        let checks = [
            (self.memtable_bytes >= 64 << 10, "memtable_bytes at least 65536"),
            (self.memtables_max >= 2, "memtables_max at least 2"),
            (self.read_buffer_bytes >= 64 << 10, "read_buffer_bytes at least 65536"),
            ((1..=64).contains(&self.read_threads), "read_threads 1 to 64"),
            ((1..=64).contains(&self.background_jobs), "background_jobs 1 to 64"),
            (self.filter_bits_per_row <= 64, "filter_bits_per_row at most 64"),
            ((1024..=1 << 20).contains(&self.block_bytes), "block_bytes 1024 to 1048576"),
            (self.sst_bytes >= 1 << 16, "sst_bytes at least 65536"),
            (self.l0_trigger >= 1, "l0_trigger at least 1"),
        ];
        match checks.into_iter().find(|(is_fine, _)| !is_fine) {
            Some((_, expected)) => {
                Err(Error::invalid("RocksDB option out of range").with("expected", expected))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_divided_as_in_the_paper() {
        let options = RocksOptions::within(1 << 30, RocksMode::Levelled, Budget::unlimited());
        options.check().unwrap();
        let memtables = options.memtables_max as usize * options.memtable_bytes;
        let share = memtables as f64 / (memtables + options.block_cache_bytes) as f64;
        assert!((share - 0.84).abs() < 0.001, "{share}");
        let all = memtables + options.block_cache_bytes + options.read_buffer_bytes;
        assert!(all <= 1 << 30 && all > (1 << 30) - 1024, "{all}");
        RocksOptions::within(0, RocksMode::Universal, Budget::unlimited()).check().unwrap();
    }
}
