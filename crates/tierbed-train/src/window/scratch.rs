//! Work memory of one call, bounded.
//!
//! Work arrays grow with the batch, so they are bounded: calls cut their work into pieces that
//! fit the share, and the share is reserved once, at opening.

use tierbed_core::{Budget, Error, Reservation, Result};
use tierbed_kernels::Occurrence;

use crate::window::row_buffer::Miss;

/// The share of the budget: an eighth, within bounds.
const SHARE: u64 = 8;
const BYTES_MIN: u64 = 64 << 10;
const BYTES_MAX: u64 = 256 << 20;

/// Bytes per index of a lookup piece: start (8), miss (32), key of a miss (16), rounded up.
const LOOKUP_INDEX_BYTES: usize = 64;
/// Bytes per index of an update: use (16) and occurrence (8).
const UPDATE_INDEX_BYTES: usize = 24;
/// Rows whose gradients are summed before they are applied.
const UPDATE_ROWS_MAX: usize = 512;

/// One use of a row in a batch, sorted by row, then by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Use {
    pub(crate) row: u64,
    /// Position among all indices of the batch.
    pub(crate) position: u32,
    pub(crate) bag: u32,
}

/// Work arrays, kept from call to call.
#[derive(Debug)]
pub(crate) struct Scratch {
    pub(crate) starts: Vec<usize>,
    pub(crate) misses: Vec<Miss>,
    pub(crate) uses: Vec<Use>,
    pub(crate) occurrences: Vec<Occurrence>,
    pub(crate) bounds: Vec<usize>,
    pub(crate) sums: Vec<f32>,
    limit_bytes: usize,
    _memory: Reservation,
}

impl Scratch {
    pub(crate) fn new(budget: &Budget) -> Result<Self> {
        let limit_bytes = (budget.limit_bytes() / SHARE).clamp(BYTES_MIN, BYTES_MAX);
        let memory = budget.reserve("batch scratch", limit_bytes)?;
        Ok(Self {
            starts: Vec::new(),
            misses: Vec::new(),
            uses: Vec::new(),
            occurrences: Vec::new(),
            bounds: Vec::new(),
            sums: Vec::new(),
            limit_bytes: limit_bytes as usize,
            _memory: memory,
        })
    }

    /// Returns how many indices a lookup or prefetch may bring at once.
    pub(crate) fn lookup_indices_max(&self) -> usize {
        self.limit_bytes / 4 / LOOKUP_INDEX_BYTES
    }

    /// Returns how many rows of `dim` an update may sum before it applies them.
    pub(crate) fn update_rows_max(&self, dim: usize) -> usize {
        (self.limit_bytes / 4 / (4 * dim + LOOKUP_INDEX_BYTES)).clamp(1, UPDATE_ROWS_MAX)
    }

    /// Checks that one table's `index_count` uses fit.
    ///
    /// # Errors
    /// `Invalid`, naming the smallest budget that would do.
    pub(crate) fn check_update(&self, table: &str, index_count: usize) -> Result<()> {
        let wanted = 2 * UPDATE_INDEX_BYTES * index_count;
        if wanted <= self.limit_bytes {
            return Ok(());
        }
        let minimum = SHARE * wanted as u64;
        Err(Error::invalid("batch too large for the dram budget")
            .with("table", table)
            .with("indices", index_count)
            .with_minimum_bytes(minimum)
            .with(
                "remedy",
                format_args!(
                    "raise dram_budget to at least {minimum} bytes, or make batches smaller"
                ),
            ))
    }
}
