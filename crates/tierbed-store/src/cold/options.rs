//! Options of the cold store: one budget, shared out among its parts.

use std::sync::Arc;

use tierbed_core::env::{Clock, Env};
use tierbed_core::{Budget, Error, Result};
use tierbed_io::{EngineOptions, PAGE_BYTES};

/// Share of the bases that deltas may occupy when nothing else is asked for: write amplification
/// 1.7 on ids by first appearance, 3.9 on permuted ones. Source: training.md 2.2.
pub const DELTA_SHARE_DEFAULT: f64 = 0.15;

/// Largest extent: a merge reads and writes so much in sequence.
const EXTENT_BYTES_MAX: usize = 256 << 10;
const EXTENT_BYTES_MIN: usize = 4 * PAGE_BYTES;
/// Largest I/O buffer: beyond it sequential reads gain nothing.
const BUF_BYTES_MAX: usize = 64 << 10;

/// How the budget is divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Rows that wait for the next run.
    pub write_buffer_bytes: usize,
    /// Places of delta rows; when it is full, ranges are merged.
    pub delta_index_bytes: usize,
    /// Bytes of an extent, and of a base range, of new tables.
    pub extent_bytes: usize,
    /// Rows of a read that are looked for at once.
    pub read_rows_max: usize,
}

/// What a [`ColdStore`](crate::cold::ColdStore) is opened with.
#[derive(Debug, Clone)]
pub struct ColdOptions {
    /// Account for everything the store holds in memory.
    pub budget: Budget,
    /// How bytes move; the buffer size grows by itself with the largest page.
    pub engine: EngineOptions,
    /// Time, for costs and the merge scheduler.
    pub clock: Arc<dyn Clock>,
    /// Most bytes the store may occupy on disk.
    pub disk_quota_bytes: Option<u64>,
    /// Bytes of delta runs per byte of bases that are aimed at, above 0, at most 1.
    pub delta_share: f64,
    /// How the budget is divided.
    pub memory: MemoryOptions,
}

impl ColdOptions {
    /// Divides the limit of `budget`: a sixteenth for the write buffer, an eighth for the places
    /// of delta rows, a thirty-second for I/O buffers, a sixty-fourth for requests; most of the
    /// rest is left to the row buffer above.
    #[must_use]
    pub fn new(budget: Budget, engine: EngineOptions) -> Self {
        let limit = budget.limit_bytes().min(1 << 40) as usize;
        let by_depth = limit / 32 / engine.queue_depth.max(1) as usize;
        let buf_bytes = power_below(by_depth).clamp(engine.buf_bytes, BUF_BYTES_MAX);
        Self {
            engine: EngineOptions { buf_bytes, ..engine },
            clock: Env::real(0).clock,
            disk_quota_bytes: None,
            delta_share: DELTA_SHARE_DEFAULT,
            memory: MemoryOptions {
                write_buffer_bytes: (limit / 16).clamp(16 << 10, 256 << 20),
                delta_index_bytes: (limit / 8).max(8 << 10),
                extent_bytes: power_below(limit / 256).clamp(EXTENT_BYTES_MIN, EXTENT_BYTES_MAX),
                read_rows_max: (limit / 64 / crate::cold::read::WANT_BYTES).clamp(256, 1 << 20),
            },
            budget,
        }
    }

    /// Checks ranges.
    ///
    /// # Errors
    /// `Invalid`, naming the option.
    pub(crate) fn check(&self) -> Result<()> {
        if !(self.delta_share > 0.0 && self.delta_share <= 1.0) {
            return Err(Error::invalid("delta_share must be above 0 and at most 1")
                .with("delta_share", self.delta_share));
        }
        if self.memory.read_rows_max == 0 || self.memory.extent_bytes < PAGE_BYTES {
            return Err(Error::invalid("a cold store needs rows to read and extents of a page")
                .with("read_rows_max", self.memory.read_rows_max)
                .with("extent_bytes", self.memory.extent_bytes));
        }
        Ok(())
    }
}

fn power_below(bytes: usize) -> usize {
    1 << bytes.max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stay_a_fraction_of_the_budget() {
        for limit in [4u64 << 20, 256 << 20, 8 << 30] {
            let engine = EngineOptions { queue_depth: 64, ..EngineOptions::default() };
            let options = ColdOptions::new(Budget::new(limit), engine);
            options.check().unwrap();
            let io = 64 * options.engine.buf_bytes as u64;
            let parts = io
                + options.memory.write_buffer_bytes as u64
                + options.memory.delta_index_bytes as u64;
            assert!(parts <= limit / 3, "{parts} of {limit}");
        }
    }

    #[test]
    fn shares_out_of_range_are_refused() {
        let options = ColdOptions::new(Budget::new(1 << 20), EngineOptions::default());
        for delta_share in [0.0, -1.0, 1.5, f64::NAN] {
            assert!(ColdOptions { delta_share, ..options.clone() }.check().is_err());
        }
    }
}
