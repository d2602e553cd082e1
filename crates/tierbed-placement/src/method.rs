//! Placement methods by name, and their options.
//!
//! | name | homes | replicas |
//! |---|---|---|
//! | `random`, `by_frequency` | in that order | none |
//! | `shp` | bisected | none |
//! | `shp_published` | bisected as MaxEmbed's programs do | none |
//! | `rpp` | bisected with twins of frequent rows | where twins land |
//! | `fpr` | bisected finer | neighbours in the free seats |
//! | `maxembed` | bisected | by connectivity, on pages of their own |
//! | `maxembed_published` | as `shp_published` | by connectivity, on pages of their own |
//! | `grown` | grown | by marginal gain; guarded |
//!
//! Growth learns more of a log than bisection, and on some logs what it learns does not last. The
//! *guard* builds all ways for parts of the table from the first nine tenths of the log and lets
//! the last tenth decide ([`choose`](crate::choose)).
//!
//! Bisection here is stronger than what was published
//! ([`ExchangeRule`](crate::partition::ExchangeRule)); comparisons want both.

use std::path::Path;

use tierbed_core::{Error, Result};

use crate::choose::{by_connectivity_each, choose_in};
use crate::partition::{bisect_resumable, by_frequency, random, BisectionOptions, GrowthOptions};
use crate::progress::{BuildContext, BuildReport, Progress, Report};
use crate::replicate::{before_partition, finer_and_filled};
use crate::{Placement, QueryLog};

/// How rows get their pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// [`random`].
    Random,
    /// [`by_frequency`].
    ByFrequency,
    /// [`bisect`](crate::partition::bisect) as [published](BisectionOptions::as_published).
    BisectedAsPublished,
    /// [`bisect`](crate::partition::bisect).
    Bisected,
    /// [`before_partition`].
    TwinsBefore,
    /// [`finer_and_filled`].
    FinerFilled,
    /// As [`Self::BisectedAsPublished`], then
    /// [`by_connectivity`](crate::replicate::by_connectivity).
    ByConnectivityAsPublished,
    /// [`bisect`](crate::partition::bisect), then
    /// [`by_connectivity`](crate::replicate::by_connectivity).
    ByConnectivity,
    /// [`by_marginal_gain`](crate::replicate::by_marginal_gain), or as [`Self::ByConnectivity`]
    /// where bisected pages are read less often by the last queries: [`choose`](crate::choose).
    Grown,
}

impl Method {
    /// Every method, the simplest first.
    pub const ALL: [Self; 9] = [
        Self::Random,
        Self::ByFrequency,
        Self::BisectedAsPublished,
        Self::Bisected,
        Self::TwinsBefore,
        Self::FinerFilled,
        Self::ByConnectivityAsPublished,
        Self::ByConnectivity,
        Self::Grown,
    ];

    /// Returns the name, as in options and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::ByFrequency => "by_frequency",
            Self::BisectedAsPublished => "shp_published",
            Self::Bisected => "shp",
            Self::TwinsBefore => "rpp",
            Self::FinerFilled => "fpr",
            Self::ByConnectivityAsPublished => "maxembed_published",
            Self::ByConnectivity => "maxembed",
            Self::Grown => "grown",
        }
    }

    /// Returns the method of `name`. The name before 0.1, `ours`, is `grown`.
    ///
    /// # Errors
    /// `Invalid` naming the methods there are.
    pub fn from_name(name: &str) -> Result<Self> {
        let name = if name == "ours" { "grown" } else { name };
        Self::ALL.into_iter().find(|method| method.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|method| method.name()).collect();
            Error::invalid("unknown placement method")
                .with("method", name)
                .with("remedy", format_args!("use one of {}", names.join(", ")))
        })
    }

    /// Tells whether the method makes replicas at all.
    #[must_use]
    pub fn replicates(self) -> bool {
        !matches!(
            self,
            Self::Random | Self::ByFrequency | Self::BisectedAsPublished | Self::Bisected
        )
    }

    /// Tells whether pages are bisected as published.
    fn is_published(self) -> bool {
        matches!(self, Self::BisectedAsPublished | Self::ByConnectivityAsPublished)
    }
}

/// What to build from.
#[derive(Debug, Clone, Copy)]
pub struct BuildInput<'a> {
    /// The queries, whole.
    pub log: &'a QueryLog,
    /// What of them misses the cache that will stand in front, one query for one query; without a
    /// cache, None. Growth follows the misses, bisection and its replicas the log.
    pub misses: Option<&'a QueryLog>,
    /// Homes made before by the same options, for methods that keep them: saves bisecting again
    /// for each of several ratios.
    pub homes: Option<&'a Placement>,
    /// A folder for what is done, so that a build that was stopped goes on there; without one it
    /// starts anew. Its files are of no use once the placement is safe.
    pub resume_dir: Option<&'a Path>,
}

impl<'a> BuildInput<'a> {
    /// Returns what builds from a log alone.
    #[must_use]
    pub fn of(log: &'a QueryLog) -> Self {
        Self { log, misses: None, homes: None, resume_dir: None }
    }
}

/// Places the rows of a log.
///
/// `report` is called now and then, by any thread of the build; an error stops it.
///
/// # Errors
/// `Invalid` for options out of range and replicas of a method that makes none; those of kept
/// files; what `report` returns.
pub fn build(
    input: BuildInput<'_>,
    method: Method,
    options: &BisectionOptions,
    ratio: f64,
    report: Report<'_>,
) -> Result<Placement> {
    let mut placements = build_each(input, method, options, &[ratio], report)?;
    placements.pop().ok_or_else(|| Error::invalid("no ratio"))
}

/// Places the rows of a log with replicas by each of `ratios`, in their order; home pages are
/// made once where the method makes the same for all.
///
/// `report` is called now and then, by any thread of the build; an error stops it.
///
/// # Errors
/// As [`build`].
pub fn build_each(
    input: BuildInput<'_>,
    method: Method,
    options: &BisectionOptions,
    ratios: &[f64],
    report: Report<'_>,
) -> Result<Vec<Placement>> {
    if let Some(ratio) = ratios.iter().find(|&&ratio| ratio > 0.0 && !method.replicates()) {
        return Err(Error::invalid("this method makes no replicas")
            .with("method", method.name())
            .with("ratio", ratio)
            .with("remedy", "use ratio 0, or another method"));
    }
    let BuildInput { log, misses, homes, resume_dir } = input;
    let options = &if method.is_published() { options.as_published() } else { options.clone() };
    let levels = resume_dir.map(|folder| folder.join("levels"));
    let bisected = |report: Report<'_>| {
        bisect_resumable(log.clone(), options, levels.as_deref(), &mut |level| {
            report(BuildReport { done: level.levels_done.into(), total: level.level_count.into() })
        })
    };
    let without_replicas = match method {
        Method::Random => random(log.row_count(), options.rows_per_page, options.seed)?,
        Method::ByFrequency => by_frequency(log, options.rows_per_page)?,
        Method::BisectedAsPublished | Method::Bisected => bisected(report)?,
        Method::TwinsBefore => {
            return ratios.iter().map(|&ratio| before_partition(log, options, ratio)).collect()
        }
        Method::FinerFilled => {
            return ratios.iter().map(|&ratio| finer_and_filled(log, options, ratio)).collect()
        }
        Method::ByConnectivityAsPublished | Method::ByConnectivity => {
            return match homes {
                Some(homes) => by_connectivity_each(homes, log, ratios),
                None => by_connectivity_each(&bisected(report)?, log, ratios),
            }
        }
        Method::Grown => {
            let options = GrowthOptions {
                bisection: options.clone(),
                ..GrowthOptions::new(options.rows_per_page)
            };
            let progress = Progress::new(report);
            let context = BuildContext { resume_dir, ..BuildContext::alone(&progress) };
            let misses = misses.unwrap_or(log);
            return Ok(choose_in(log, misses, &options, ratios, &context)?.placements);
        }
    };
    Ok(vec![without_replicas; ratios.len()])
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;
    use crate::partition::Way;
    use crate::{choose, connectivity_sum, count_page_reads};
    use tierbed_snapshot::index::PageIndex;
    use tierbed_snapshot::select::Selection;

    /// Circles of four rows, 25 apart, of which two to four are asked for together.
    fn log() -> QueryLog {
        let mut rng = SplitMix64::new(1);
        let mut draw = |bound| rng.below(bound) as u32;
        let queries = (0..600).map(|_| {
            let circle = draw(25);
            let friends = 2 + draw(3);
            let first = draw(4);
            (0..friends).map(|friend| circle + 25 * ((first + friend) % 4)).collect::<Vec<_>>()
        });
        QueryLog::from_queries(110, queries).unwrap()
    }

    fn pages_read(placement: &Placement, log: &QueryLog) -> u64 {
        let index = PageIndex::new(placement.row_count(), placement.pages()).unwrap();
        count_page_reads(&index, log, Selection::OnePass, 1).unwrap().page_count()
    }

    #[test]
    fn every_method_keeps_its_promises() {
        let log = log();
        let options = BisectionOptions::new(4);
        for method in Method::ALL {
            for ratio in if method.replicates() { vec![0.0, 0.1, 0.5] } else { vec![0.0] } {
                let input = BuildInput::of(&log);
                let placement = build(input, method, &options, ratio, &mut |_| Ok(())).unwrap();
                let name = method.name();
                assert!(placement.replica_count() as f64 <= ratio * 110.0, "{name} {ratio}");
                assert_eq!(placement.row_count(), 110, "{name}");
                let read = pages_read(&placement, &log);
                assert!(read <= connectivity_sum(&placement, &log), "{name} {ratio}");
            }
            assert_eq!(Method::from_name(method.name()).unwrap(), method);
        }
    }

    #[test]
    fn several_ratios_at_once_are_those_of_one_by_one() {
        let (log, options) = (log(), BisectionOptions::new(4));
        let input = BuildInput::of(&log);
        let ratios = [0.8, 0.0, 0.1, 0.33];
        for method in Method::ALL.into_iter().filter(|method| method.replicates()) {
            let together = build_each(input, method, &options, &ratios, &mut |_| Ok(())).unwrap();
            let alone = ratios.map(|ratio| build(input, method, &options, ratio, &mut |_| Ok(())));
            let alone = alone.map(Result::unwrap);
            assert_eq!(together, alone, "{}", method.name());
        }
    }

    #[test]
    fn bisection_reads_less_than_chance() {
        let log = log();
        let options = BisectionOptions::new(4);
        let input = BuildInput::of(&log);
        let read = |method| {
            let placement = build(input, method, &options, 0.0, &mut |_| Ok(())).unwrap();
            pages_read(&placement, &log)
        };
        let (found, random) = (read(Method::Bisected), read(Method::Random));
        assert!(found < random, "{found} of {random}");
    }

    #[test]
    fn grown_is_what_the_guard_chose() {
        let (log, options) = (log(), BisectionOptions::new(4));
        let input = BuildInput::of(&log);
        let ours = build(input, Method::Grown, &options, 0.1, &mut |_| Ok(())).unwrap();
        let choice = choose(&log, &log, &GrowthOptions::new(4), &[0.1]).unwrap();
        // Bisection alone cannot tell these circles apart.
        assert_ne!(choice.reads.way(), Way::Bisected);
        assert_eq!([ours], choice.placements[..]);
    }

    #[test]
    fn homes_given_are_kept_and_give_the_same() {
        let log = log();
        let options = BisectionOptions::new(3);
        let input = BuildInput::of(&log);
        let mut levels = 0;
        let mut report = |_| {
            levels += 1;
            Ok(())
        };
        let homes = build(input, Method::Bisected, &options, 0.0, &mut report).unwrap();
        assert!(levels > 3);
        let again = BuildInput { homes: Some(&homes), ..input };
        let fast = build(again, Method::ByConnectivity, &options, 0.3, &mut |_| Ok(())).unwrap();
        let slow = build(input, Method::ByConnectivity, &options, 0.3, &mut |_| Ok(())).unwrap();
        assert_eq!(fast, slow);
        assert_eq!(fast.home_pages(), homes.home_pages());
    }

    #[test]
    fn what_cannot_be_built_is_refused() {
        let log = log();
        let input = BuildInput::of(&log);
        let options = BisectionOptions::new(4);
        assert!(build(input, Method::Bisected, &options, 0.1, &mut |_| Ok(())).is_err());
        let none = BisectionOptions::new(0);
        for method in Method::ALL {
            assert!(
                build(input, method, &none, 0.0, &mut |_| Ok(())).is_err(),
                "{}",
                method.name()
            );
        }
        let told = Method::from_name("metis").unwrap_err().to_string();
        assert!(told.contains("maxembed"), "{told}");
    }
}
