//! Choice between partitioners by a trial on held-out queries.
//!
//! Growth follows the log closely. Where rows that were asked for together will not be again, it
//! learns what does not come back, and halves would have been the better guess, refined in pairs or
//! as they are. So every [`Way`] is tried on parts of the table ([`trial`](crate::trial)); the best
//! one then takes the whole log. A table of several blocks is never bisected twice: each block
//! tries all ways for itself ([`guard`](crate::partition::grow::guard)).
//!
//! Growth learns from the rows that are *likely to miss*. A row that the cache holds now and then
//! misses in few queries, too few to learn its co-access, so rows that miss often enough keep
//! all their queries.

use std::path::Path;

use tierbed_core::{Error, Result};

use crate::partition::{bisect_resumable, BisectionOptions, GrowthOptions, Way};
use crate::progress::{BuildContext, Progress};
use crate::replicate::{by_connectivity, by_marginal_gain_in, BlockRules};
use crate::resume::{checksum_of, halves, ResumeFile};
use crate::trial::try_on_parts;
pub use crate::trial::TrialReads;
use crate::QueryLog;
use crate::ReplicaBudget;
use tierbed_snapshot::Placement;

/// A row that misses in this share of its queries is grown by all of them.
const MISS_SHARE_MIN: f64 = 0.1;

/// Place of a build, from 0 to 1, where the trial is over.
const TRIED: f64 = 0.2;

/// Levels of a bisection that are told of apart, about.
const LEVELS: u64 = 64;

/// Placements, and why they are these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// By ratio: the placement, built from the whole log.
    pub placements: Vec<Placement>,
    /// What the trial read, in the parts that were tried. In a table of several blocks each chose
    /// for itself, and this is about all of them together.
    pub reads: TrialReads,
}

/// Places rows with replicas by each of `ratios`, in the way that reads fewest pages of held-out
/// queries; `options.way` does not matter.
///
/// `log` is the build log, `misses` what of it missed the cache that will stand in front (the log
/// itself without a cache), one query for one query. Grown and refined pages follow the misses,
/// bisected ones the log. Costs all builds of some parts of the table, without replicas, and one of
/// them of all.
///
/// # Errors
///
/// `Invalid` for a bad ratio, options out of range or logs of different tables; `Unsupported` as
/// for [`by_marginal_gain`](crate::replicate::by_marginal_gain).
pub fn choose(
    log: &QueryLog,
    misses: &QueryLog,
    options: &GrowthOptions,
    ratios: &[f64],
) -> Result<Choice> {
    choose_in(log, misses, options, ratios, &BuildContext::alone(&Progress::silent()))
}

/// Does what [`choose`] does, tells how far it is, and goes on where an earlier run was.
///
/// # Errors
///
/// As [`choose`]; those of kept files, and what stops the build.
pub(crate) fn choose_in(
    log: &QueryLog,
    misses: &QueryLog,
    options: &GrowthOptions,
    ratios: &[f64],
    context: &BuildContext<'_, '_>,
) -> Result<Choice> {
    if (log.row_count(), log.query_count()) != (misses.row_count(), misses.query_count()) {
        return Err(Error::invalid("misses must be of the log, one query for one query")
            .with("rows_of_log", log.row_count())
            .with("rows_of_misses", misses.row_count())
            .with("queries_of_log", log.query_count())
            .with("queries_of_misses", misses.query_count()));
    }
    options.check()?;
    if is_large(log, options) {
        let likely = likely_misses(log, misses)?;
        let rules = BlockRules { options, is_guarded: true };
        let (placements, reads) = by_marginal_gain_in(likely, rules, ratios, context)?;
        return Ok(Choice { placements, reads });
    }
    let trial = context.between(0.0..TRIED);
    let file = trial_file(log, misses, options, context.resume_dir);
    let numbers = file.get_or_make(|| Ok(try_on_parts(log, misses, options, &trial)?.encode()))?;
    let numbers = <&[u32; 6]>::try_from(numbers.as_slice()).map_err(|_| file.damaged())?;
    let reads = TrialReads::decode(numbers);
    let rest = context.between(TRIED..1.0);
    let placements = match reads.way() {
        Way::Bisected => bisected(log, options, ratios, &rest)?,
        way => {
            let options = GrowthOptions { way, ..options.clone() };
            let likely = likely_misses(log, misses)?;
            let rules = BlockRules { options: &options, is_guarded: false };
            by_marginal_gain_in(likely, rules, ratios, &rest)?.0
        }
    };
    Ok(Choice { placements, reads })
}

/// Returns whether a table is grown in several blocks, each with a trial of its own.
fn is_large(log: &QueryLog, options: &GrowthOptions) -> bool {
    let seen = || log.frequencies().iter().filter(|&&count| count > 0).count();
    log.pin_count() > options.block_pins as usize
        || (log.row_count() > options.block_rows && seen() > options.block_rows as usize)
}

fn trial_file(
    log: &QueryLog,
    misses: &QueryLog,
    options: &GrowthOptions,
    folder: Option<&Path>,
) -> ResumeFile {
    let BisectionOptions { rows_per_page, iteration_count, seed, .. } = options.bisection;
    let mut identity = vec![rows_per_page, iteration_count];
    identity.extend(halves(seed));
    identity.extend([options.block_rows, options.block_pins]);
    if folder.is_some() {
        identity.extend([log, misses].map(|log| checksum_of(log.as_parts().1)));
    }
    ResumeFile::new(folder.map(|folder| folder.join("trial")), identity)
}

/// Bisects once; replicas by a lower ratio are the first of those by the highest.
fn bisected(
    log: &QueryLog,
    options: &GrowthOptions,
    ratios: &[f64],
    context: &BuildContext<'_, '_>,
) -> Result<Vec<Placement>> {
    let stage = context.stage(0.0..1.0, LEVELS);
    let levels = context.resume_dir.map(|folder| folder.join("levels"));
    let homes = bisect_resumable(
        log.clone(),
        &options.bisection,
        levels.as_deref(),
        &mut stage.listener(),
    )?;
    by_connectivity_each(&homes, log, ratios)
}

/// Adds replicas by connectivity to `homes`, by each of `ratios`, in one run.
///
/// # Errors
///
/// As [`by_connectivity`].
pub(crate) fn by_connectivity_each(
    homes: &Placement,
    log: &QueryLog,
    ratios: &[f64],
) -> Result<Vec<Placement>> {
    let budget_of =
        |&ratio: &f64| ReplicaBudget::of_ratio(ratio, homes.row_count(), homes.rows_per_page());
    let budgets = ratios.iter().map(budget_of).collect::<Result<Vec<_>>>()?;
    let most = ratios.iter().copied().fold(0.0, f64::max);
    let placement = by_connectivity(homes, log, most)?;
    Ok(budgets.iter().map(|&budget| placement.with_replicas_at_most(budget)).collect())
}

/// Returns the queries of `log` with the rows that missed, and with those that miss often.
#[expect(clippy::indexing_slicing, reason = "rows of both logs are below their row count")]
pub(crate) fn likely_misses(log: &QueryLog, misses: &QueryLog) -> Result<QueryLog> {
    if log == misses {
        return Ok(log.clone());
    }
    let (asked, missed) = (log.frequencies(), misses.frequencies());
    let often =
        |(&asked, &missed): (&u32, &u32)| f64::from(missed) >= MISS_SHARE_MIN * f64::from(asked);
    let is_likely: Vec<bool> = asked.iter().zip(&missed).map(often).collect();
    // By row: the query, from 1, that it missed in last.
    let mut missed_in = vec![0u64; is_likely.len()];
    let mut builder = QueryLog::builder(log.row_count());
    let mut rows = Vec::new();
    for ((at, asked), missed) in (1..).zip(log.iter()).zip(misses.iter()) {
        missed.iter().for_each(|&row| missed_in[row as usize] = at);
        let wanted = |row: &u32| is_likely[*row as usize] || missed_in[*row as usize] == at;
        rows.clear();
        rows.extend(asked.iter().copied().filter(wanted));
        builder.push(&rows)?;
    }
    Ok(builder.finish())
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;
    use crate::replicate::by_marginal_gain;

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
    fn the_placements_are_those_that_won() {
        let options = GrowthOptions::new(8);
        for has_circles in [true, false] {
            let log = log(has_circles);
            let choice = choose(&log, &log, &options, &[0.1, 0.0]).expect("ratios");
            let progress = Progress::silent();
            let expected = match choice.reads.way() {
                Way::Bisected => {
                    bisected(&log, &options, &[0.1, 0.0], &BuildContext::alone(&progress))
                }
                way => {
                    let options = GrowthOptions { way, ..options.clone() };
                    let one = |ratio| by_marginal_gain(log.clone(), &options, ratio);
                    [0.1, 0.0].into_iter().map(one).collect()
                }
            };
            assert_eq!(choice.placements, expected.expect("ratios"));
        }
    }

    #[test]
    fn growth_wins_where_circles_come_back() {
        let log = log(true);
        let choice = choose(&log, &log, &GrowthOptions::new(8), &[0.1]).expect("a ratio");
        assert_eq!(choice.reads.way(), Way::Grown, "{:?}", choice.reads);
        assert!(choice.reads.grown > 0, "the trial judged");
    }

    #[test]
    fn rows_that_miss_often_keep_all_their_queries() {
        let queries = [&[0, 1, 2][..], &[0, 1], &[0, 2], &[0, 1]].repeat(5);
        let log = QueryLog::from_queries(3, &queries).expect("in range");
        // Row 0 misses once in 20 queries, row 1 in 5 of 15, row 2 always.
        let misses: Vec<Vec<u32>> = (0..20)
            .map(|at| match at % 4 {
                0 if at == 0 => vec![0, 1, 2],
                0 => vec![1, 2],
                2 => vec![2],
                _ => vec![],
            })
            .collect();
        let misses = QueryLog::from_queries(3, &misses).expect("in range");
        let likely = likely_misses(&log, &misses).expect("few rows");
        assert_eq!(likely.query(0), Some(&[0, 1, 2][..]));
        assert_eq!(likely.query(1), Some(&[1][..]));
        assert_eq!(likely.query(2), Some(&[2][..]));
        assert_eq!(likely.query(4), Some(&[1, 2][..]));
        assert_eq!(likely_misses(&log, &log).expect("few rows"), log);
    }

    #[test]
    fn logs_of_different_tables_or_queries_are_refused() {
        let (log, options) = (log(true), GrowthOptions::new(8));
        for other in [QueryLog::from_queries(3, [[1, 2]]), QueryLog::from_queries(400, [[1, 2]])] {
            assert!(choose(&log, &other.expect("in range"), &options, &[0.1]).is_err());
        }
    }
}
