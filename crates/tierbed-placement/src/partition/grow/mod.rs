//! Who belongs together most? Pages grown one by one, then refined in pairs.
//!
//! Bisection decides about halves of a table first, long before pages. Growth begins with pages:
//! the one that saves most reads, then the next best, each on what is still to be saved
//! ([`residual`]). Rows that no page wants are bisected; then pairs of pages exchange rows
//! ([`pairs`]).
//!
//! ```text
//! log ─▶ blocks (bisected) ─▶ grow pages ─▶ fill them with the rest ─▶ refine pairs ─▶ placement
//!                             └────────── each block on its own, in parallel ─────────┘
//! ```
//!
//! What always holds: blocks do not know each other and ties go by row, so threads do not change
//! the result.
//!
//! Differs from MaxEmbed §5: pages are built bottom up; the log should be the miss stream of the
//! cache that will stand in front, because other rows are never read.

pub(crate) mod block;
pub(crate) mod page;
pub(crate) mod pairs;
pub(crate) mod pins;
pub(crate) mod residual;
pub(crate) mod seeds;

use tierbed_core::{Error, Result};

use super::{BisectionOptions, Placement, QueryLog};

pub(crate) use block::{run_blocks, Block};

/// How to grow pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrowthOptions {
    /// How blocks and left-over rows are bisected; its pages, seed and threads hold for all.
    pub bisection: BisectionOptions,
    /// Rows of a block at most. Larger blocks read fewer pages and take longer.
    pub block_rows: u32,
}

impl GrowthOptions {
    /// The defaults for pages of `rows_per_page`: blocks of 2^18 rows.
    #[must_use]
    pub fn new(rows_per_page: u32) -> Self {
        Self { bisection: BisectionOptions::new(rows_per_page), block_rows: 1 << 18 }
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.bisection.check()?;
        if self.block_rows < self.bisection.rows_per_page {
            return Err(Error::invalid("a block must have room for one page at least")
                .with("block_rows", self.block_rows)
                .with("rows_per_page", self.bisection.rows_per_page));
        }
        Ok(())
    }
}

/// Grows pages for the rows of `log`; rows never asked for come last.
///
/// # Errors
///
/// `Invalid` for options out of range, `Unsupported` for 2^31 rows or more.
pub fn grow(log: QueryLog, options: &GrowthOptions) -> Result<Placement> {
    crate::replicate::by_marginal_gain(log, options, 0.0)
}
