//! Does growth win on this log? A trial on held-out queries, and the better of two ways.
//!
//! Growth follows the log closely. Where rows that were asked for together will not be again, it
//! learns what does not come back, and halves would have been the better guess. So both ways are
//! tried on the earlier nine tenths of the build log, and judged by the pages that the last tenth
//! would read; the better way then takes the whole log.
//!
//! ```text
//! build log  [ ......... both are built ......... │ judged ]      later: held-out queries of users
//! ```

use tierbed_core::{Error, Result};

use crate::partition::{bisect, GrowthOptions};
use crate::placement::Placement;
use crate::quality::{count_page_reads, index_by_use};
use crate::replicate::{by_connectivity, by_marginal_gain};
use crate::select::Selection;
use crate::QueryLog;

/// The share of the build log, its latest part, that judges.
const JUDGING_SHARE: f64 = 0.1;

/// Pages of a row that the trial's index keeps, as MaxEmbed's code does.
const INDEX_LIMIT: u32 = 10;

/// A placement, and why it is this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The placement, built from the whole log.
    pub placement: Placement,
    /// Pages that the judging queries read of grown pages with replicas by marginal gain.
    pub grown_reads: u64,
    /// Pages they read of bisected pages with replicas by connectivity.
    pub bisected_reads: u64,
}

impl Choice {
    /// Returns whether growth won, which it does with equal reads.
    #[must_use]
    pub fn is_grown(&self) -> bool {
        self.grown_reads <= self.bisected_reads
    }
}

/// Places rows with replicas by `ratio` in the way that reads fewer pages of held-out queries.
///
/// `log` is the build log, `misses` what of it missed the cache that will stand in front (the log
/// itself without a cache), one query for one query. Grown pages follow the misses, bisected ones
/// the log. Costs both builds on nine tenths and one of them on all.
///
/// # Errors
///
/// `Invalid` for a bad ratio, options out of range or logs of different tables; `Unsupported` as
/// for [`by_marginal_gain`].
pub fn choose(
    log: &QueryLog,
    misses: &QueryLog,
    options: &GrowthOptions,
    ratio: f64,
) -> Result<Choice> {
    if log.row_count() != misses.row_count() {
        return Err(Error::invalid("log and misses are of different tables")
            .with("rows_of_log", log.row_count())
            .with("rows_of_misses", misses.row_count()));
    }
    let (early_log, _) = log.split_by_share(1.0 - JUDGING_SHARE)?;
    let (early_misses, judges) = misses.split_by_share(1.0 - JUDGING_SHARE)?;
    let grown = by_marginal_gain(early_misses.clone(), options, ratio)?;
    let bisected = bisected(&early_log, options, ratio)?;
    let reads = |placement: &Placement| -> Result<u64> {
        let index = index_by_use(placement, &early_misses)?.limited(Some(INDEX_LIMIT));
        let threads = options.bisection.thread_count;
        Ok(count_page_reads(&index, &judges, Selection::OnePass, threads)?.page_count())
    };
    let mut choice =
        Choice { grown_reads: reads(&grown)?, bisected_reads: reads(&bisected)?, placement: grown };
    choice.placement = if choice.is_grown() {
        by_marginal_gain(misses.clone(), options, ratio)?
    } else {
        self::bisected(log, options, ratio)?
    };
    Ok(choice)
}

fn bisected(log: &QueryLog, options: &GrowthOptions, ratio: f64) -> Result<Placement> {
    let homes = bisect(log.clone(), &options.bisection, &mut |_| ())?;
    by_connectivity(&homes, log, ratio)
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    /// Queries of four rows: of a circle of eight, or, without circles, of all rows.
    fn log(has_circles: bool) -> QueryLog {
        let mut rng = SplitMix64::new(3);
        let queries: Vec<[u32; 4]> = (0..1500)
            .map(|_| {
                let circle = rng.below(50) as u32;
                [0; 4].map(|_| match has_circles {
                    true => circle + 50 * rng.below(8) as u32,
                    false => rng.below(400) as u32,
                })
            })
            .collect();
        QueryLog::from_queries(400, queries).expect("in range")
    }

    #[test]
    fn the_placement_is_the_one_that_won() {
        let options = GrowthOptions::new(8);
        for has_circles in [true, false] {
            let log = log(has_circles);
            let choice = choose(&log, &log, &options, 0.1).expect("a ratio");
            let expected = if choice.is_grown() {
                by_marginal_gain(log, &options, 0.1)
            } else {
                bisected(&log, &options, 0.1)
            };
            assert_eq!(choice.placement, expected.expect("a ratio"));
        }
    }

    #[test]
    fn growth_wins_where_circles_come_back() {
        let log = log(true);
        let choice = choose(&log, &log, &GrowthOptions::new(8), 0.1).expect("a ratio");
        assert!(choice.is_grown(), "{} {}", choice.grown_reads, choice.bisected_reads);
        assert!(choice.grown_reads < choice.bisected_reads);
    }

    #[test]
    fn logs_of_different_tables_are_refused() {
        let other = QueryLog::from_queries(3, [[1, 2]]).expect("in range");
        assert!(choose(&log(true), &other, &GrowthOptions::new(8), 0.1).is_err());
    }
}
