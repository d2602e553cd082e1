//! Replication by filling: smaller home pages whose free seats go to co-accessed rows.
//!
//! Source: MaxEmbed §5.2 (FPR, its second strawman).

use tierbed_core::Result;

use super::connectivity::{Neighbours, SAMPLE_MIN};
use crate::incidence::Incidence;
use crate::partition::{bisect_evenly, BisectionOptions};
use crate::QueryLog;
use crate::ReplicaBudget;
use tierbed_snapshot::Placement;

/// Bisects into as many home pages as `ratio` allows pages, all about equally full, and fills
/// each with the rows most often asked for together with its own.
///
/// # Errors
///
/// `Invalid` for a bad ratio or options out of range, `Unsupported` for too many rows.
pub fn finer_and_filled(
    log: &QueryLog,
    options: &BisectionOptions,
    ratio: f64,
) -> Result<Placement> {
    let budget = ReplicaBudget::of_ratio(ratio, log.row_count(), options.rows_per_page)?;
    let homes = bisect_evenly(log.clone(), options, budget.total_page_count)?;
    let incidence = Incidence::sampled(log, SAMPLE_MIN, |_| true)?;
    let mut neighbours = Neighbours::new(&homes);
    let mut builder = Placement::builder(log.row_count(), options.rows_per_page)?;
    let mut left = budget.replica_count as usize;
    for page in homes.pages() {
        neighbours.count(page, log, &incidence);
        let room = options.rows_per_page as usize - page.len();
        let replicas = neighbours.most_frequent(room.min(left));
        left -= replicas.len();
        builder.push_home_page(page, &replicas)?;
    }
    builder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_goes_to_the_most_frequent_neighbours() {
        // Circles of four rows on pages of six: room for half a circle more on each.
        let queries = [&[0, 1, 2, 3][..], &[4, 5, 6, 7], &[3, 4], &[8, 9, 10, 11]].repeat(4);
        let log = QueryLog::from_queries(12, queries).expect("in range");
        let placement = finer_and_filled(&log, &BisectionOptions::new(6), 0.5).expect("fits");
        assert_eq!((placement.page_count(), placement.home_page_count()), (3, 3));
        let page_of = |row: usize| placement.page(placement.home_pages()[row]).expect("a page");
        assert!(page_of(3).contains(&4) && page_of(4).contains(&3));
        assert!(placement.replica_count() <= 6);
    }
}
