//! Statistics of a trace: uses per row, rows per batch.

use serde::Serialize;

use super::TraceOptions;

/// Samples of the batches whose distinct rows are counted.
pub const STATS_BATCH_LEN: usize = 2048;

/// What was counted of one column.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ColumnStats {
    /// Distinct rows.
    pub row_count: u64,
    /// Rows used once.
    pub once_count: u64,
    /// Rows used at least ten times.
    pub ten_times_count: u64,
    /// Distinct rows of every whole batch of [`STATS_BATCH_LEN`] samples, summed.
    pub batch_rows: u64,
}

/// What was counted of a trace.
#[derive(Debug, Clone, Serialize)]
pub struct TraceStats {
    /// What was asked for.
    pub options: TraceOptions,
    /// Samples.
    pub sample_count: u64,
    /// Counts of C1..C26.
    pub columns: Vec<ColumnStats>,
}

impl TraceStats {
    pub(crate) fn new(options: &TraceOptions) -> Self {
        let columns = vec![ColumnStats::default(); super::shape::COLUMNS.len()];
        Self { options: *options, sample_count: options.sample_count(), columns }
    }

    /// Adds the columns up.
    #[must_use]
    pub fn total(&self) -> ColumnStats {
        self.columns.iter().fold(ColumnStats::default(), |sum, column| ColumnStats {
            row_count: sum.row_count + column.row_count,
            once_count: sum.once_count + column.once_count,
            ten_times_count: sum.ten_times_count + column.ten_times_count,
            batch_rows: sum.batch_rows + column.batch_rows,
        })
    }

    /// Returns the distinct rows of a batch of [`STATS_BATCH_LEN`] samples on average; 0 when
    /// the trace has no whole batch.
    #[must_use]
    pub fn rows_per_batch(&self) -> f64 {
        let batch_count = self.sample_count / STATS_BATCH_LEN as u64;
        self.total().batch_rows as f64 / batch_count.max(1) as f64
    }

    pub(crate) fn count(&mut self, at: usize, column: &[u32], row_count: u32) {
        let mut uses = vec![0u32; row_count as usize];
        // Number of the last batch with the row.
        let mut seen = vec![0u32; row_count as usize];
        let mut batch_rows = 0;
        let (batches, rest) = column.as_chunks::<STATS_BATCH_LEN>();
        for (batch, rows) in batches.iter().enumerate() {
            for &row in rows {
                if let (Some(uses), Some(seen)) =
                    (uses.get_mut(row as usize), seen.get_mut(row as usize))
                {
                    *uses += 1;
                    batch_rows += u64::from(*seen != batch as u32 + 1);
                    *seen = batch as u32 + 1;
                }
            }
        }
        for &row in rest {
            if let Some(uses) = uses.get_mut(row as usize) {
                *uses += 1;
            }
        }
        if let Some(stats) = self.columns.get_mut(at) {
            stats.row_count = u64::from(row_count);
            stats.once_count = uses.iter().filter(|uses| **uses == 1).count() as u64;
            stats.ten_times_count = uses.iter().filter(|uses| **uses >= 10).count() as u64;
            stats.batch_rows = batch_rows;
        }
    }
}
