//! Work arrays of one batch, kept from call to call and paid for at opening.

use tierbed_core::Schema;
use tierbed_kernels::Occurrence;

use crate::plan::Plan;

/// Rows whose gradients are summed before they are applied.
pub(crate) const UPDATE_ROWS_MAX: usize = 512;
/// Bytes per index: start, its row's number, occurrence, bounds, start of its row.
const INDEX_BYTES: u64 = 8 + 4 + 8 + 8 + 8;

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// First word of the record of each index (lookup), or of each distinct row (update).
    pub(crate) starts: Vec<usize>,
    /// Per entry of a table the number of its row in the batch, or none.
    pub(crate) row_of_entry: Vec<u32>,
    /// Entries met in the batch, in order of first appearance.
    pub(crate) entries: Vec<u32>,
    /// Number of the row of each index of a table.
    pub(crate) row_of_index: Vec<u32>,
    pub(crate) occurrences: Vec<Occurrence>,
    pub(crate) bounds: Vec<usize>,
    pub(crate) sums: Vec<f32>,
}

impl Scratch {
    /// Returns the most bytes the arrays can take along `plan`.
    pub(crate) fn memory_bytes(schema: &Schema, plan: &Plan, entries_max: usize) -> u64 {
        let indices = plan.batch_indices_max() as u64;
        let features = &plan.shape().feature_tables;
        let shared = |table: usize| {
            features.iter().filter(|feature| feature.0 as usize == table).count() > 1
        };
        // Tables that several features read are summed whole.
        let sum_bytes = schema.tables().iter().enumerate().map(|(at, table)| {
            let rows = if shared(at) { indices } else { indices.min(UPDATE_ROWS_MAX as u64) };
            4 * u64::from(table.dim) * rows
        });
        // Vectors grow by doubling.
        2 * (INDEX_BYTES * (indices + 1) + sum_bytes.max().unwrap_or(0)) + 8 * entries_max as u64
    }
}
