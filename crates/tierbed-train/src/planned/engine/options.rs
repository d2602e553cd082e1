//! Options of the planned engine.

use std::sync::Arc;

use crate::planned::device::DeviceWindows;

/// Whether storage work is done on a thread of its own while the caller computes.
///
/// The values are the same. With a thread it costs a second processor part of the time; without,
/// every batch does its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pipeline {
    /// In the caller's thread.
    Off,
    /// On a thread, whose stack counts as memory.
    On,
    /// On a thread if the memory holds its stack, too.
    IfItFits,
}

/// Options of a [`PlannedEngine`](crate::planned::PlannedEngine).
#[derive(Debug, Clone)]
pub struct PlannedConfig {
    /// All the memory the engine may use.
    pub dram_budget_bytes: u64,
    /// Largest extent, unless a record is longer. Many small buckets get smaller ones, so that
    /// half-filled extents cost little disk. Read when the store is made.
    pub extent_bytes: usize,
    /// Who does the storage work.
    pub pipeline: Pipeline,
    /// Windows that share a bucket while they are far away: `None` chooses by memory, as few as
    /// have a page of it each; 0 is a bucket per window. A store keeps those its rows wait in
    /// until it moves to another plan.
    pub span_windows: Option<usize>,
    /// How bytes move: `auto`, `io_uring`, `pread`, `inline`.
    pub io_engine: String,
    /// Most bytes of the folder: extents, checkpoints, the plan and its copy.
    pub disk_quota_bytes: Option<u64>,
    /// Instruction set of the kernels: `auto`, `scalar`, `avx2`, `avx512`. All give the same bits.
    pub isa: String,
    /// Memory of a device that windows may be trained in.
    pub device: Option<Arc<dyn DeviceWindows>>,
}

impl Default for PlannedConfig {
    fn default() -> Self {
        Self {
            dram_budget_bytes: 256 << 20,
            extent_bytes: 256 << 10,
            pipeline: Pipeline::Off,
            span_windows: None,
            io_engine: "auto".to_owned(),
            disk_quota_bytes: None,
            isa: "auto".to_owned(),
            device: None,
        }
    }
}

impl PlannedConfig {
    /// Returns the options of a store with `dram_budget_bytes` and defaults otherwise.
    #[must_use]
    pub fn new(dram_budget_bytes: u64) -> Self {
        Self { dram_budget_bytes, ..Self::default() }
    }
}
