//! Replication by connectivity: copies of rows whose queries need many pages.
//!
//! A query that needs p home pages has connectivity p. A row scores `sum(p - 1)` over its
//! queries. Each of the best rows becomes the base of one replica page, which it shares with the
//! rows most often asked for together with it, those of its home page excepted:
//!
//! ```text
//! score      40  31  30 ...          one base per page, best first
//! page       [base, most frequent neighbours of the base ...]
//! ```
//!
//! Source: MaxEmbed §5.3. As in its code, the number of replica pages is `r * row_count` over the
//! rows of a page, rounded up; of a base with more than 10,000 queries an even sample is read; and
//! pages may repeat each other. Differs: ties go by row, so the result is always the same; a base
//! without neighbours elsewhere gets no page, because that page could not save a read.
#![expect(clippy::indexing_slicing, reason = "rows of the log are below the row count")]

use std::cmp::Reverse;

use tierbed_core::{Error, Result};

use crate::incidence::Incidence;
use crate::QueryLog;
use crate::ReplicaBudget;
use tierbed_snapshot::{Placement, PlacementBuilder};

/// From this many queries on, a base's neighbours are counted in a sample.
pub(super) const SAMPLE_MIN: u32 = 10_000;

/// Adds replica pages to `homes`, best base first, as far as `ratio` allows.
///
/// [`Placement::with_replicas_at_most`] cuts the result down to any lower ratio.
///
/// # Errors
///
/// `Invalid` for a bad ratio or a log of another table.
pub fn by_connectivity(homes: &Placement, log: &QueryLog, ratio: f64) -> Result<Placement> {
    let scores = connectivity_scores(homes, log)?;
    let budget = ReplicaBudget::of_ratio(ratio, homes.row_count(), homes.rows_per_page())?;
    let bases = best_bases(&scores, budget.page_count as usize);
    let pages = connectivity_pages(homes, log, &bases)?;
    with_connectivity_pages(homes, pages.iter().map(Vec::as_slice), ratio)
}

/// Returns for each of `bases` the replica page it would have, itself first; a page of one row
/// where no neighbour lives elsewhere. Any part of the bases gives these pages of all.
///
/// # Errors
///
/// `Invalid` for a log of another table, `Unsupported` for 2^32 queries or more.
pub fn connectivity_pages(
    homes: &Placement,
    log: &QueryLog,
    bases: &[u32],
) -> Result<Vec<Vec<u32>>> {
    log.check_rows_of(homes)?;
    let row_count = homes.row_count();
    if let Some(base) = bases.iter().find(|&&base| base >= row_count) {
        return Err(Error::invalid("base of a replica page is beyond the table")
            .with("row", base)
            .with("row_count", row_count));
    }
    let mut is_base = vec![false; row_count as usize];
    bases.iter().for_each(|&base| is_base[base as usize] = true);
    let wanted = |row: u32| is_base[row as usize];
    let incidence = Incidence::sampled(log, SAMPLE_MIN, wanted)?;
    let mut neighbours = Neighbours::new(homes);
    let page_of = |&base: &u32| {
        neighbours.count(&[base], log, &incidence);
        let mut page = vec![base];
        page.extend(neighbours.most_frequent(homes.rows_per_page() as usize - 1));
        page
    };
    Ok(bases.iter().map(page_of).collect())
}

/// Adds `pages`, best base first, to `homes` as far as `ratio` allows.
///
/// # Errors
///
/// `Invalid` for a bad ratio and for pages that are none of this table.
pub fn with_connectivity_pages<'a>(
    homes: &Placement,
    pages: impl IntoIterator<Item = &'a [u32]>,
    ratio: f64,
) -> Result<Placement> {
    let budget = ReplicaBudget::of_ratio(ratio, homes.row_count(), homes.rows_per_page())?;
    let mut builder = PlacementBuilder::from_homes(homes)?;
    let mut left = budget.replica_count as usize;
    for page in pages.into_iter().take(budget.page_count as usize) {
        let room = (homes.rows_per_page() as usize).min(left);
        if page.len() > 1 && room > 0 {
            let (page, _) = page.split_at(room.min(page.len()));
            left -= page.len();
            builder.push_replica_page(page)?;
        }
    }
    builder.finish()
}

/// Sums, for every row, the further home pages its queries need, `[row_count]`. Scores of parts of
/// a log add up to those of the log.
///
/// # Errors
///
/// `Invalid` for a log of another table.
pub fn connectivity_scores(homes: &Placement, log: &QueryLog) -> Result<Vec<u64>> {
    log.check_rows_of(homes)?;
    let home_pages = homes.home_pages();
    let mut scores = vec![0u64; home_pages.len()];
    let mut pages = Vec::new();
    for query in log.iter() {
        pages.clear();
        pages.extend(query.iter().map(|&row| home_pages[row as usize]));
        pages.sort_unstable();
        pages.dedup();
        for &row in query {
            scores[row as usize] += pages.len() as u64 - 1;
        }
    }
    Ok(scores)
}

/// Returns the `count` rows of the highest scores, best first, equal ones by row.
#[must_use]
pub fn best_bases(scores: &[u64], count: usize) -> Vec<u32> {
    let mut keys: Vec<(Reverse<u64>, u32)> = scores
        .iter()
        .enumerate()
        .filter(|(_, &score)| score > 0)
        .map(|(row, &score)| (Reverse(score), row as u32))
        .collect();
    if count < keys.len() {
        keys.select_nth_unstable(count);
        keys.truncate(count);
    }
    keys.sort_unstable();
    keys.into_iter().map(|(_, row)| row).collect()
}

/// Counts rows that are asked for together with a row and have their home page elsewhere.
pub(super) struct Neighbours<'a> {
    home_pages: &'a [u32],
    counts: Vec<u32>,
    /// Rows with a count, to be counted out again.
    touched: Vec<u32>,
}

impl<'a> Neighbours<'a> {
    pub(super) fn new(homes: &'a Placement) -> Self {
        let home_pages = homes.home_pages();
        Self { home_pages, counts: vec![0; home_pages.len()], touched: Vec::new() }
    }

    /// Counts over the queries of `rows`, which share one home page.
    pub(super) fn count(&mut self, rows: &[u32], log: &QueryLog, incidence: &Incidence) {
        for row in self.touched.drain(..) {
            self.counts[row as usize] = 0;
        }
        let Some(&first) = rows.first() else { return };
        let home = self.home_pages[first as usize];
        for &query in rows.iter().flat_map(|&row| incidence.queries(row)) {
            for &other in log.rows_of(query as usize) {
                let count = &mut self.counts[other as usize];
                if self.home_pages[other as usize] != home {
                    if *count == 0 {
                        self.touched.push(other);
                    }
                    *count += 1;
                }
            }
        }
    }

    /// Returns the `count` rows counted most, most frequent first, equal ones by row.
    pub(super) fn most_frequent(&mut self, count: usize) -> Vec<u32> {
        let counts = &self.counts;
        let key = |row: &u32| (Reverse(counts[*row as usize]), *row);
        let mut rows = self.touched.clone();
        if count < rows.len() {
            rows.select_nth_unstable_by_key(count, key);
            rows.truncate(count);
        }
        rows.sort_unstable_by_key(key);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two pages of three; row 1 is asked for with 3 and 4, elsewhere.
    fn example() -> (Placement, QueryLog) {
        let homes = Placement::from_order(&[0, 1, 2, 3, 4, 5], 3).expect("room");
        let queries = [&[0, 1][..], &[1, 3, 4], &[1, 3], &[1, 4, 3], &[2, 5]];
        (homes, QueryLog::from_queries(6, queries).expect("in range"))
    }

    #[test]
    fn scores_are_those_of_the_paper() {
        let (homes, log) = example();
        let scores = connectivity_scores(&homes, &log).expect("its table");
        assert_eq!(scores, [0, 3, 1, 3, 2, 1]);
        assert_eq!(best_bases(&scores, 4), [1, 3, 4, 2]);
    }

    #[test]
    fn parts_of_the_log_and_of_the_bases_give_what_the_whole_gives() {
        let (homes, log) = example();
        let (one, two) = log.split_by_share(0.5).expect("a share");
        let sums = [&one, &two].map(|part| connectivity_scores(&homes, part).expect("its table"));
        let sum: Vec<u64> = sums[0].iter().zip(&sums[1]).map(|(a, b)| a + b).collect();
        assert_eq!(sum, connectivity_scores(&homes, &log).expect("its table"));
        let bases = best_bases(&sum, 2);
        let pages: Vec<Vec<u32>> = bases
            .chunks(1)
            .flat_map(|part| connectivity_pages(&homes, &log, part).expect("its table"))
            .collect();
        let pages = pages.iter().map(Vec::as_slice);
        let together = with_connectivity_pages(&homes, pages, 1.0).expect("a ratio");
        assert_eq!(together, by_connectivity(&homes, &log, 1.0).expect("a ratio"));
    }

    #[test]
    fn a_base_sits_with_its_most_frequent_neighbours_from_elsewhere() {
        let (homes, log) = example();
        let placement = by_connectivity(&homes, &log, 1.0).expect("a ratio");
        let pages: Vec<&[u32]> = placement.pages().collect();
        assert_eq!(pages, [&[0, 1, 2][..], &[3, 4, 5], &[1, 3, 4], &[3, 1]]);
    }

    #[test]
    fn the_budget_holds_to_the_row() {
        let (homes, log) = example();
        for (ratio, replica_count) in [(0.0, 0), (0.34, 2), (0.5, 3), (0.84, 5)] {
            let placement = by_connectivity(&homes, &log, ratio).expect("a ratio");
            assert_eq!(placement.replica_count(), replica_count, "ratio {ratio}");
        }
        assert!(by_connectivity(&homes, &log, -0.1).is_err());
        assert!(by_connectivity(&homes, &log, f64::NAN).is_err());
        let other = QueryLog::from_queries(7, [[6]]).expect("in range");
        assert!(by_connectivity(&homes, &other, 0.1).is_err());
    }
}
