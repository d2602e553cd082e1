//! Page growth: pages grown from seeds by weighted co-access, then refined in pairs.
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
//! Where growth learns too much of a log, pages are bisected, and refined or left so ([`Way`]).
//!
//! A log of a few hundred thousand rows is one block. Larger ones are many, so that memory is that
//! of the bisected log and of one block per thread ([`blocks`]).
//!
//! What always holds: blocks do not know each other and ties go by row, so threads do not change
//! the result.
//!
//! Differs from MaxEmbed §5: pages are built bottom up; the log should be the miss stream of the
//! cache that will stand in front, because other rows are never read.

pub(crate) mod block;
pub(crate) mod blocks;
pub(crate) mod guard;
pub(crate) mod page;
pub(crate) mod pairs;
pub(crate) mod pins;
pub(crate) mod residual;
pub(crate) mod seeds;

use tierbed_core::{Error, Result};

use super::{BisectionOptions, Placement, QueryLog};

pub(crate) use block::{Block, UNITS_PER_ROW};
pub(crate) use blocks::Blocks;
pub(crate) use guard::{bisected_pages, try_on_part};

/// How home pages are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Grown from seeds, the rows that no page wants bisected; then refined in pairs.
    Grown,
    /// Bisected, then refined in pairs.
    Refined,
    /// Bisected.
    Bisected,
}

/// How to grow pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrowthOptions {
    /// How blocks and left-over rows are bisected; its pages, seed and threads hold for all.
    pub bisection: BisectionOptions,
    /// Rows of a block at most. Larger blocks read fewer pages and take longer.
    pub block_rows: u32,
    /// Pins of a block that are looked at. A block with more is divided down to 2^12 rows, then a
    /// fair sample of its queries is taken. A thread needs about 30 bytes for each.
    pub block_pins: u32,
    /// How home pages are made, where no trial says so.
    pub way: Way,
}

impl GrowthOptions {
    /// The defaults for pages of `rows_per_page`: grown, in blocks of 2^18 rows and 2^25 pins.
    #[must_use]
    pub fn new(rows_per_page: u32) -> Self {
        let bisection = BisectionOptions::new(rows_per_page);
        Self { bisection, block_rows: 1 << 18, block_pins: 1 << 25, way: Way::Grown }
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.bisection.check()?;
        if self.block_rows < self.bisection.rows_per_page {
            return Err(Error::invalid("a block must have room for one page at least")
                .with("block_rows", self.block_rows)
                .with("rows_per_page", self.bisection.rows_per_page));
        }
        if self.block_pins == 0 {
            return Err(Error::invalid("a block must have room for one pin at least"));
        }
        Ok(())
    }
}

/// Cuts an order into pages that are full but the last one.
fn pages_of_order(order: &[u32], rows_per_page: u32) -> Vec<Vec<u32>> {
    order.chunks(rows_per_page as usize).map(<[u32]>::to_vec).collect()
}

/// Grows pages for the rows of `log`; rows never asked for come last.
///
/// # Errors
///
/// `Invalid` for options out of range, `Unsupported` for 2^31 rows or more.
pub fn grow(log: QueryLog, options: &GrowthOptions) -> Result<Placement> {
    crate::replicate::by_marginal_gain(log, options, 0.0)
}
