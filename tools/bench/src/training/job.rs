//! What is trained? The trace's tables, the batches, and the memory a system may use.

use std::path::PathBuf;

use serde::Deserialize;
use tierbed_core::{Bags, Error, InitSpec, OptimizerKind, Result, Schema, TableId, TableSchema};
use tierbed_kernels::{FeatureLayout, Pooling};
use tierbed_lab::trace::TraceReader;

/// Columns of a trace.
pub(crate) const FEATURE_COUNT: usize = 26;

/// One system's job; JSON with these names at the Python border.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Which system: see `stores.rs`, or `forward` or `memory`.
    pub system: String,
    /// The trace.
    pub trace: PathBuf,
    /// Timeline of the batches, for all systems but `forward`.
    pub timeline: Option<PathBuf>,
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
    /// Batches of look-ahead of a keyed system; `None` is all of them.
    #[serde(default)]
    pub look_ahead_batches: Option<u64>,
    /// Whether `folder` holds every row already, committed by a keyed system of an earlier job.
    #[serde(default)]
    pub is_loaded: bool,
    /// Whether rows move on a thread of their own, for `forward`.
    #[serde(default)]
    pub is_pipelined: bool,
    /// How bytes move: `auto`, `io_uring`, `pread`, `inline`.
    #[serde(default = "default_io_engine")]
    pub io_engine: String,
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

/// The batches of a trace, over and over: number `n` is batch `n` modulo the trace's.
#[derive(Debug)]
pub(crate) struct Batches {
    trace: TraceReader,
    batch_len: usize,
    batch_count: u64,
    ids: Vec<i64>,
    offsets: Vec<i64>,
}

impl Batches {
    pub(crate) fn open(path: &std::path::Path, batch_len: usize) -> Result<Self> {
        let trace = TraceReader::open(path)?;
        let batch_count = trace.sample_count() / batch_len.max(1) as u64;
        if batch_count == 0 || batch_len == 0 {
            return Err(Error::invalid("the trace holds no whole batch")
                .with("samples", trace.sample_count())
                .with("batch_len", batch_len));
        }
        let offsets = (0..=(FEATURE_COUNT * batch_len) as i64).collect();
        Ok(Self { trace, batch_len, batch_count, ids: Vec::new(), offsets })
    }

    pub(crate) fn trace(&self) -> &TraceReader {
        &self.trace
    }

    /// Batches of an epoch.
    pub(crate) fn batch_count(&self) -> u64 {
        self.batch_count
    }

    pub(crate) fn batch_len(&self) -> usize {
        self.batch_len
    }

    /// Reads batch `number`; [`bags`](Self::bags) gives it.
    pub(crate) fn read(&mut self, number: u64) -> Result<&[i64]> {
        let first = number % self.batch_count * self.batch_len as u64;
        self.trace.read(first, self.batch_len, &mut self.ids)?;
        Ok(&self.ids)
    }

    /// The batch read last.
    pub(crate) fn bags(&self) -> Result<Bags<'_>> {
        Bags::new(&self.ids, &self.offsets, None, FEATURE_COUNT)
    }

    /// Counts the distinct rows of `count` batches, each for itself.
    pub(crate) fn count_rows(&mut self, first: u64, count: u64) -> Result<u64> {
        let mut rows = 0;
        for number in first..first + count {
            self.read(number)?;
            for ids in self.ids.chunks_mut(self.batch_len) {
                ids.sort_unstable();
                rows += ids.chunk_by(|a, b| a == b).count() as u64;
            }
        }
        Ok(rows)
    }
}
