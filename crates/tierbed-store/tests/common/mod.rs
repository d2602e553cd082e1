//! Tiny cold stores that flush, merge and compact all the time.

use std::sync::Arc;

use tierbed_core::env::ManualClock;
use tierbed_core::Budget;
use tierbed_io::{EngineChoice, EngineOptions};
use tierbed_store::cold::{ColdOptions, MemoryOptions};

/// Options of a store whose write buffer takes `write_buffer_bytes`.
pub fn tiny(write_buffer_bytes: usize) -> ColdOptions {
    let engine =
        EngineOptions { choice: EngineChoice::Inline, queue_depth: 4, buf_bytes: 2 * 4096 };
    ColdOptions {
        clock: Arc::new(ManualClock::default()),
        disk_quota_bytes: None,
        delta_share: 0.15,
        memory: MemoryOptions {
            write_buffer_bytes,
            delta_index_bytes: 2048,
            extent_bytes: 3 * 4096,
            read_rows_max: 50,
        },
        ..ColdOptions::new(Budget::new(8 << 20), engine)
    }
}
