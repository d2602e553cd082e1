//! Traces: row ids of an epoch of Criteo-Kaggle's size.
//!
//! The [`generator`](crate::generator) makes samples that a model can learn from. A *trace* is
//! ids alone, for stores: at scale 1 it has the size of the published log (45.8 M samples,
//! 26 tables, 33.8 M distinct rows) and its counts (28.9 M rows used once, 5 M more often,
//! 0.95 M at least ten times), which decide what a store has to do.
//!
//! Tokens of a column follow a two-parameter Pitman-Yor process ([`growth`]); columns that are
//! functions of others are processes over the other column's tokens ([`shape`]). Ids are dense
//! by first appearance. A trace of a smaller scale is the beginning of the larger one. Columns
//! are made one after another, so memory is bounded by one column and the counts of its rows:
//! about 6 bytes a sample, 270 MB at scale 1. The file's format: `docs/reference/formats/trace.md`.
//!
//! Source: Pitman, Yor, "The two-parameter Poisson-Dirichlet distribution" (Ann. Probab. 1997);
//! chains as in Teh, "A hierarchical Bayesian language model" (ACL 2006).

mod columns;
mod file;
mod growth;
mod shape;
mod stats;

use std::path::Path;

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result};

use columns::Columns;
pub(crate) use file::mend;
pub use file::TraceReader;
pub use stats::{ColumnStats, TraceStats, STATS_BATCH_LEN};

/// Samples of the published log.
pub const CRITEO_SAMPLES: u64 = 45_840_617;

/// What to generate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TraceOptions {
    /// Another seed, another trace.
    pub seed: u64,
    /// Share of the samples of the published log, above 0, at most 1.
    pub scale: f64,
}

impl TraceOptions {
    /// Returns how many samples the trace has.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        (libm::round(CRITEO_SAMPLES as f64 * self.scale) as u64).clamp(1, CRITEO_SAMPLES)
    }

    fn check(&self) -> Result<()> {
        if !(self.scale > 0.0 && self.scale <= 1.0) {
            return Err(Error::invalid("trace scale must be above 0 and at most 1")
                .with("found", self.scale));
        }
        Ok(())
    }
}

/// Writes the trace of `options` to the new file `path` and returns what was counted.
///
/// Calls `progress` with the columns done; its error stops the work. About 40 ns and 2 bytes
/// per id.
///
/// # Errors
/// `Invalid` for a scale outside (0, 1], `NoSpace` and `Io` from the disk.
pub fn write_trace(
    options: &TraceOptions,
    path: &Path,
    progress: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<TraceStats> {
    options.check()?;
    let mut stats = TraceStats::new(options);
    let mut writer = file::TraceWriter::create(path, options)?;
    let mut done_count = 0;
    Columns::new(options).for_each(&mut |at, column, row_count| {
        stats.count(at, column, row_count);
        writer.write(at, column, row_count)?;
        done_count += 1;
        progress(done_count)
    })?;
    writer.finish()?;
    Ok(stats)
}

#[cfg(test)]
mod tests;
