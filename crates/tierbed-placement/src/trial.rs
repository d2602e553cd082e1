//! Trial of several ways to make pages, on parts of the table and held-out queries.
//!
//! The build log's last tenth judges what its first nine tenths teach. Building everything twice
//! would double the work, so the table is bisected into parts and a few of them are tried: rows of
//! a part keep their neighbours, and a part is a table of its own to every method.
//!
//! ```text
//! rows      [ part ][ tried ][ part ][ part ][ tried ][ part ]
//! queries   [ ............. all are built ............ │ judged ]      later: queries of users
//! ```

use tierbed_core::Result;

use crate::choose::likely_misses;
use crate::hypergraph::Hypergraph;
use crate::partition::{bisect, grow, parallel, rows_of_parts, GrowthOptions, Way};
use crate::progress::BuildContext;
use crate::quality::connectivity_sum;
use crate::resume::{halves, whole};
use crate::{Placement, QueryLog};

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

/// Pages that the judging queries read of pages made in each [`Way`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrialReads {
    /// Of grown and refined pages.
    pub grown: u64,
    /// Of bisected and refined pages.
    pub refined: u64,
    /// Of bisected pages.
    pub bisected: u64,
}

impl TrialReads {
    /// Returns the way that won: of equal reads the first of [`Way`].
    #[must_use]
    pub fn way(self) -> Way {
        if self.grown <= self.refined.min(self.bisected) {
            Way::Grown
        } else if self.refined <= self.bisected {
            Way::Refined
        } else {
            Way::Bisected
        }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            grown: self.grown + other.grown,
            refined: self.refined + other.refined,
            bisected: self.bisected + other.bisected,
        }
    }

    /// Returns the reads as numbers of a kept file.
    pub(crate) fn encode(self) -> Vec<u32> {
        [self.grown, self.refined, self.bisected].map(halves).concat()
    }

    /// Returns the reads that six numbers say.
    pub(crate) fn decode(numbers: &[u32; 6]) -> Self {
        let [grown_low, grown_high, refined_low, refined_high, low, high] = *numbers;
        Self {
            grown: whole([grown_low, grown_high]),
            refined: whole([refined_low, refined_high]),
            bisected: whole([low, high]),
        }
    }
}

/// Makes pages of some parts of the table in every way, without replicas, and counts what later
/// queries read.
///
/// # Errors
///
/// `Invalid` for options out of range, `Unsupported` as for [`grow`]; what stops the build.
pub(crate) fn try_on_parts(
    log: &QueryLog,
    misses: &QueryLog,
    options: &GrowthOptions,
    context: &BuildContext<'_, '_>,
) -> Result<TrialReads> {
    let all = log.query_count();
    let early = 0..log.count_of_share(1.0 - JUDGING_SHARE)?;
    let parts = tried_parts(log.slice(early.clone()), options)?;
    let stage = context.stage(0.2..1.0, 3 * parts.len() as u64);
    let of_part = |rows: Vec<u32>| -> Result<TrialReads> {
        let judges = misses.of_rows(&rows, early.end..all);
        let early_log = log.of_rows(&rows, early.clone());
        let likely = likely_misses(&early_log, &misses.of_rows(&rows, early.clone()))?;
        let options =
            GrowthOptions { bisection: options.bisection.on_one_thread(), ..options.clone() };
        let judged = |made: Result<Placement>| -> Result<u64> {
            stage.advance(1);
            context.progress.check()?;
            Ok(connectivity_sum(&made?, &judges))
        };
        context.progress.check()?;
        let by = |way: Way| GrowthOptions { way, ..options.clone() };
        Ok(TrialReads {
            grown: judged(grow(likely.clone(), &by(Way::Grown)))?,
            refined: judged(grow(likely, &by(Way::Refined)))?,
            bisected: judged(bisect(early_log, &options.bisection))?,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fewest_reads_win_and_of_equals_the_first_way() {
        let way = |grown, refined, bisected| TrialReads { grown, refined, bisected }.way();
        assert_eq!([way(1, 2, 3), way(2, 2, 2)], [Way::Grown; 2]);
        assert_eq!([way(3, 1, 2), way(3, 2, 2)], [Way::Refined; 2]);
        assert_eq!([way(3, 3, 2), way(2, 3, 1)], [Way::Bisected; 2]);
    }

    #[test]
    fn reads_are_kept_whole() {
        let reads = TrialReads { grown: 1 << 40 | 5, refined: 7, bisected: u64::MAX };
        let numbers = reads.encode().try_into().expect("three of two halves");
        assert_eq!(TrialReads::decode(&numbers), reads);
    }
}
