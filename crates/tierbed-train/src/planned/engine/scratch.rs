//! Work arrays of one batch, kept from call to call and paid for at opening.

use tierbed_core::{Bags, Schema};
use tierbed_kernels::{RowSums, SumsNeed};

use super::Position;
use crate::batch_token::BatchToken;
use crate::planned::plan::EpochPlan;

/// A batch whose ids were checked and whose entries are unpacked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unpacked {
    pub(crate) position: Position,
    pub(crate) token: BatchToken,
}

/// A batch whose ids were replaced by their rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Translated {
    pub(crate) position: Position,
    /// Of its rows.
    pub(crate) checksum: u32,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Entry of each index, in its table.
    pub(crate) entries: Vec<u32>,
    /// The batch whose entries they are.
    pub(crate) unpacked: Option<Unpacked>,
    /// Rows of the window that ids were translated in, and which window of those begun it is.
    pub(crate) rows: Vec<u64>,
    pub(crate) rows_window: Option<u64>,
    /// The batch translated last.
    pub(crate) translated: Option<Translated>,
    /// Where the indices of each of its features begin, and where the last ones end.
    pub(crate) bounds: Vec<i64>,
    /// Where the row of each index begins.
    pub(crate) starts: Vec<usize>,
    pub(crate) sums: RowSums,
}

/// Sums of a batch take at most this share of the budget, unless one table needs more.
const SUMS_SHARE: u64 = 16;

impl Scratch {
    /// Makes the arrays of an engine with that budget.
    pub(crate) fn new(dram_budget_bytes: u64) -> Self {
        Self { sums: RowSums::new(dram_budget_bytes / SUMS_SHARE), ..Self::default() }
    }

    /// Tells whether `bags` are as many per feature as those unpacked.
    pub(crate) fn has_bounds_of(&self, bags: &Bags<'_>) -> bool {
        bags.indices.len() == self.entries.len() && bags.bounds().eq(self.bounds.iter().copied())
    }

    /// Returns the most bytes the arrays can take along `plan`, in an engine with that budget.
    pub(crate) fn memory_bytes(
        schema: &Schema,
        plan: &EpochPlan,
        entries_max: usize,
        dram_budget_bytes: u64,
    ) -> u64 {
        let index_count = plan.batch_indices_max() as u64;
        // Pages of an index are wide, and are not stepped.
        let stepped = || schema.tables().iter().filter(|table| !table.is_own());
        let sums = RowSums::memory_bytes(SumsNeed {
            index_count,
            dim: stepped().map(|table| table.dim).max().unwrap_or(0) as usize,
            number_count: entries_max as u64,
            table_rows: plan.counts().flatten().copied().max().unwrap_or(0).into(),
            table_count: stepped().count() as u64,
            sum_bytes_max: dram_budget_bytes / SUMS_SHARE,
        });
        // The vectors of entries and starts grow by doubling.
        2 * (4 + 8) * index_count + sums
    }
}
