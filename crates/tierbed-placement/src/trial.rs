//! Which way of making pages reads less of queries it has not seen? A trial on parts of the table.
//!
//! The build log's last tenth judges what its first nine tenths teach. Building everything twice
//! would double the work, so the table is bisected into parts and a few of them are tried: rows of
//! a part keep their neighbours, and a part is a table of its own to every method.
//!
//! ```text
//! rows      [ part ][ tried ][ part ][ part ][ tried ][ part ]
//! queries   [ ............. both are built ........... │ judged ]      later: queries of users
//! ```

use tierbed_core::Result;

use crate::choose::likely_misses;
use crate::hypergraph::Hypergraph;
use crate::partition::{bisect, grow, parallel, rows_of_parts, GrowthOptions};
use crate::quality::connectivity_sum;
use crate::work::Watched;
use crate::QueryLog;

/// The share of the build log, its latest part, that judges.
pub(crate) const JUDGING_SHARE: f64 = 0.1;

/// Parts that a table is cut into at least, when it is large enough.
const PART_COUNT_MIN: u32 = 8;

/// Rows of a part at least: fewer say little about growth, which wants to choose among many.
const PART_ROWS_MIN: u32 = 1 << 12;

/// Rows of a part at most.
const PART_ROWS_MAX: u32 = 1 << 16;

/// Parts that are tried.
const TRIED_COUNT: usize = 2;

/// Pages that the judging queries read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TrialReads {
    pub(crate) grown: u64,
    pub(crate) bisected: u64,
}

impl TrialReads {
    /// Returns whether growth won, which it does with equal reads.
    pub(crate) fn is_grown(self) -> bool {
        self.grown <= self.bisected
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        let (grown, bisected) = (self.grown + other.grown, self.bisected + other.bisected);
        Self { grown, bisected }
    }
}

/// Grows and bisects some parts of the table without replicas, and counts what later queries read.
///
/// # Errors
///
/// `Invalid` for options out of range, `Unsupported` as for [`grow`]; what stops the build.
pub(crate) fn try_on_parts(
    log: &QueryLog,
    misses: &QueryLog,
    options: &GrowthOptions,
    watched: &Watched<'_, '_>,
) -> Result<TrialReads> {
    let all = log.query_count();
    let early = 0..log.count_of_share(1.0 - JUDGING_SHARE)?;
    let parts = tried_parts(log.slice(early.clone()), options)?;
    let stage = watched.stage(0.2..1.0, 2 * parts.len() as u64);
    let of_part = |rows: Vec<u32>| -> Result<TrialReads> {
        let judges = misses.of_rows(&rows, early.end..all);
        let early_log = log.of_rows(&rows, early.clone());
        let likely = likely_misses(&early_log, &misses.of_rows(&rows, early.clone()))?;
        let options =
            GrowthOptions { bisection: options.bisection.on_one_thread(), ..options.clone() };
        watched.work.check()?;
        let grown = grow(likely, &options)?;
        stage.advance(1);
        watched.work.check()?;
        let bisected = bisect(early_log, &options.bisection, &mut |_| ())?;
        stage.advance(1);
        Ok(TrialReads {
            grown: connectivity_sum(&grown, &judges),
            bisected: connectivity_sum(&bisected, &judges),
        })
    };
    let mut sum = TrialReads::default();
    for reads in parallel(parts, options.bisection.thread_count, of_part) {
        sum = sum.plus(reads?);
    }
    Ok(sum)
}

/// Returns the rows of each part that is tried; parts lie evenly among all.
fn tried_parts(log: QueryLog, options: &GrowthOptions) -> Result<Vec<Vec<u32>>> {
    let graph = Hypergraph::from_log(log)?;
    let page = options.bisection.rows_per_page;
    let rows = (graph.rows.len() as u32 / PART_COUNT_MIN).clamp(PART_ROWS_MIN, PART_ROWS_MAX);
    Ok(rows_of_parts(graph, &options.bisection, rows.max(page), |part_count| {
        let step = (part_count / TRIED_COUNT).max(1);
        (step / 2..part_count).step_by(step).take(TRIED_COUNT).collect()
    }))
}
