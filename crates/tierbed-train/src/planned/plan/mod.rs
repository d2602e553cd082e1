//! Epoch plan: when each row is needed next, read once before training.
//!
//! A *plan* cuts the batches of an epoch into *windows*. The distinct rows of a window are its
//! *entries*, numbered table by table in row order. Each entry knows the window
//! that uses its row next and its number there; the last use of an epoch points to the first use
//! in the next one. Each batch has its indices translated to entries, so that training needs no
//! hash table and looks at no id. Normative format: `docs/reference/formats/plan.md`.
//!
//! ```text
//! batches ─▶ PlanBuilder::push ─▶ entries per window ─▶ finish: last use ◀─ next use ─▶ plan file
//!                                (scratch files)         (backwards, table by table)
//! ```

mod builder;
mod columns;
mod copy;
mod format;
mod next_use;
mod reader;
mod scratch;
mod seen;
mod window;
mod writer;

pub use builder::PlanBuilder;
pub use copy::copy_name;
pub use reader::{EpochPlan, PlanStats};
pub(crate) use window::{Batch, PlanWindow, TableEntries};

use serde::Serialize;
use tierbed_core::{Error, Result, Schema, TableId};

/// What a plan is for: its rows and the order of its features.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanShape {
    /// Table of each feature, in the order of a batch's bags.
    pub feature_tables: Vec<TableId>,
    /// Rows of each table, in the schema's order.
    pub row_counts: Vec<u64>,
    /// Bytes of one record of each table.
    pub record_bytes: Vec<u32>,
}

impl PlanShape {
    /// Takes the shape of `schema` and the features that read its tables.
    ///
    /// # Errors
    /// `Invalid` for no features or an unknown table.
    pub fn new(schema: &Schema, feature_tables: &[TableId]) -> Result<Self> {
        if feature_tables.is_empty() {
            return Err(Error::invalid("a plan needs at least one feature"));
        }
        for &table in feature_tables {
            schema.table(table)?;
        }
        let bytes = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        Ok(Self {
            feature_tables: feature_tables.to_vec(),
            row_counts: schema.tables().iter().map(|table| table.row_count).collect(),
            record_bytes: schema.tables().iter().map(|table| bytes(table.record_bytes())).collect(),
        })
    }
}

/// How a plan is made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanOptions {
    /// A window is cut behind the batch with which its distinct rows reach this many bytes of
    /// records. About an eighth of the memory that training may use is right.
    pub window_bytes: u64,
    /// A window has at most this many batches; at least 1.
    pub window_batches_max: u32,
    /// Memory the pre-pass may use for arrays over rows; less memory costs passes, never
    /// another plan.
    pub memory_bytes: u64,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self { window_bytes: 32 << 20, window_batches_max: 1 << 16, memory_bytes: 256 << 20 }
    }
}

impl PlanOptions {
    /// Writes what decides the plan's contents; `memory_bytes` does not.
    fn key(&self, source: &str) -> String {
        format!("bytes={},batches={},source={source}", self.window_bytes, self.window_batches_max)
    }

    /// Takes what decides the contents from the [key](EpochPlan::key) of a plan; `memory_bytes`
    /// stays.
    #[must_use]
    pub fn of_plan(self, key: &str) -> Option<Self> {
        let mut parts = key.splitn(3, ',');
        let window_bytes = parts.next()?.strip_prefix("bytes=")?.parse().ok()?;
        let window_batches_max = parts.next()?.strip_prefix("batches=")?.parse().ok()?;
        Some(Self { window_bytes, window_batches_max, ..self })
    }

    fn check(&self, source: &str) -> Result<()> {
        if self.window_batches_max == 0 || self.window_bytes == 0 {
            return Err(Error::invalid("a window holds at least one batch")
                .with("window_batches_max", self.window_batches_max)
                .with("window_bytes", self.window_bytes));
        }
        if self.key(source).len() > format::KEY_BYTES_MAX {
            return Err(Error::invalid("source fingerprint is too long")
                .with("bytes", source.len())
                .with("allowed", format::KEY_BYTES_MAX - 64));
        }
        Ok(())
    }
}

/// Returns what identifies the batches of a plan with `key`, as given to its builder.
#[must_use]
pub fn source_of(key: &str) -> &str {
    key.split_once(",source=").map_or("", |(_, source)| source)
}

/// Returns the checksum of a batch: its ids and how many each feature has.
pub(crate) fn ids_checksum(bags: &tierbed_core::Bags<'_>) -> u32 {
    use tierbed_core::checksum::{crc32c, crc32c_append};
    let mut crc = crc32c(bytemuck::cast_slice(bags.indices));
    for offset in bags.bounds() {
        crc = crc32c_append(crc, &offset.to_le_bytes());
    }
    crc
}

#[cfg(test)]
mod tests;
