//! What is trained? The trace's tables, and the memory a system may use.

use std::path::PathBuf;

use serde::Deserialize;
use tierbed_core::{InitSpec, OptimizerKind, Result, Schema, TableId, TableSchema};
use tierbed_kernels::{FeatureLayout, Hyper, Pooling};

use super::batches::FEATURE_COUNT;

/// One system's job; JSON with these names at the Python border.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Which system: see `stores.rs`, or `forward` or `memory`.
    pub system: String,
    /// The trace.
    pub trace: PathBuf,
    /// Folder of the plan, for `forward`.
    pub plan: Option<PathBuf>,
    /// Scratch folder of the system, new or empty.
    pub folder: PathBuf,
    /// Elements of a row.
    pub dim: u32,
    /// Samples of a batch.
    pub batch_len: usize,
    /// All the memory the system may use for rows; ignored by `memory`.
    pub dram_budget_bytes: u64,
    /// Most batches announced to the window engine, for stores.
    #[serde(default)]
    pub look_ahead_batches: usize,
    /// Threads; of two, `forward` has one that moves rows.
    #[serde(default = "one_thread")]
    pub threads: u32,
    /// How bytes move: `auto`, `io_uring`, `pread`, `inline`.
    #[serde(default = "default_io_engine")]
    pub io_engine: String,
}

fn one_thread() -> u32 {
    1
}

fn default_io_engine() -> String {
    "auto".to_owned()
}

/// The tables of a trace.
pub(crate) fn schema_of(row_counts: &[u64; FEATURE_COUNT], dim: u32) -> Result<Schema> {
    let table = |(at, &row_count): (usize, &u64)| TableSchema {
        optimizer: OptimizerKind::RowWiseAdagrad,
        init: InitSpec::Uniform { low: -0.01, high: 0.01 },
        seed: at as u64,
        ..TableSchema::plain(format!("c{}", at + 1), row_count, dim)
    };
    Schema::new(row_counts.iter().enumerate().map(table).collect())
}

/// One feature per table, summed.
pub(crate) fn features_of(schema: &Schema) -> Result<FeatureLayout> {
    let features: Vec<_> =
        (0..FEATURE_COUNT as u32).map(|table| (TableId(table), Pooling::Sum)).collect();
    FeatureLayout::new(schema, &features)
}

/// What all systems step with.
pub(crate) fn hyper() -> Hyper {
    Hyper { lr: 0.01, ..Hyper::default() }
}
