//! Statistics: plain counters, cheap to bump, copied out whole.

use std::collections::BTreeMap;

use serde::Serialize;

/// What an I/O engine did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct IoStats {
    /// Engine in use: `io_uring`, `pread_pool`, `inline`.
    pub engine: &'static str,
    /// Why it is not the one asked for first; empty when it is.
    pub fallback_reason: String,
    /// Reads completed.
    pub read_count: u64,
    /// Writes completed.
    pub write_count: u64,
    /// Bytes read from devices.
    pub read_bytes: u64,
    /// Bytes written to devices.
    pub write_bytes: u64,
    /// System calls made to submit or wait.
    pub submit_count: u64,
}

impl IoStats {
    /// Adds what the engine `before` this one did.
    #[must_use]
    pub fn behind(self, before: &Self) -> Self {
        Self {
            read_count: self.read_count + before.read_count,
            write_count: self.write_count + before.write_count,
            read_bytes: self.read_bytes + before.read_bytes,
            write_bytes: self.write_bytes + before.write_bytes,
            submit_count: self.submit_count + before.submit_count,
            ..self
        }
    }
}

/// What a row store did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// Rows asked for.
    pub rows_read: u64,
    /// Rows asked for and never written before: answered without a read.
    pub rows_absent: u64,
    /// Rows written.
    pub rows_written: u64,
    /// Pages read from the device.
    pub pages_read: u64,
    /// Pages written to the device.
    pub pages_written: u64,
    /// Commits made.
    pub commit_count: u64,
    /// Bytes the store occupies on disk.
    pub disk_bytes: u64,
    /// What the engine below did.
    pub io: IoStats,
    /// What only stores of its kind count, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub own: BTreeMap<&'static str, u64>,
}
