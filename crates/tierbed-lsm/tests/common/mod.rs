//! Tiny trees that flush and compact all the time.

use std::sync::Arc;

use tierbed_core::env::ManualClock;
use tierbed_core::store::Ahead;
use tierbed_core::{Budget, Result, RowKey, TrainStore};
use tierbed_io::{EngineChoice, EngineOptions};
use tierbed_lsm::{
    Durability, LsmOptions, LsmStore, MemoryOptions, Picker, Scheduling, SstOptions, TreeShape,
    WorkerChoice,
};
use tierbed_sim::rows::versions_by;

/// Options of a tree whose memtables hold `memtable_bytes`; all of RecDB's parts are on.
pub fn tiny(memtable_bytes: usize) -> LsmOptions {
    LsmOptions {
        engine: EngineOptions { choice: EngineChoice::Inline, queue_depth: 4, buf_bytes: 4096 },
        clock: Arc::new(ManualClock::default()),
        durability: Durability::Commit,
        disk_quota_bytes: None,
        memory: MemoryOptions {
            memtable_bytes,
            sealed_memtables_max: 1,
            block_cache_bytes: 4 * 4096,
            monitored_reads_max: 4096,
        },
        sst: SstOptions {
            block_bytes: 4096,
            sst_bytes: 16 * 1024,
            filter_bits_per_row: 10,
            chunk_bytes: 8192,
        },
        shape: TreeShape { l0_trigger: 2, l0_stop: 4, level1_bytes: 48 * 1024, level_ratio: 2 },
        scheduling: Scheduling::Levelled,
        worker: WorkerChoice::Inline,
        ..LsmOptions::recdb(Budget::new(8 << 20))
    }
}

/// The same tree without RecDB's parts.
pub fn tiny_plain(memtable_bytes: usize) -> LsmOptions {
    LsmOptions {
        hot_rule: None,
        sorts_requests: false,
        picker: Picker::Largest,
        ..tiny(memtable_bytes)
    }
}

/// Reads the versions of rows as a look-ahead window asks for them.
pub fn versions(store: &mut LsmStore, rows: &[RowKey]) -> Result<Vec<Option<u32>>> {
    versions_by(rows, |sink| store.read_requests(rows, sink))
}

/// Announces batches whose accesses are `accesses`, as the engine does.
pub fn announce(store: &mut LsmStore, accesses: &[RowKey], sample_count: u64) -> Result<()> {
    store.observe(&Ahead {
        batches_buffered: 1,
        accesses_buffered: accesses.len() as u64,
        sample_count,
        access_count: accesses.len() as u64,
        visit_accesses: &|visit| accesses.iter().for_each(|row| visit(*row)),
    })
}
