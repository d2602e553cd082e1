//! Replication before partitioning: frequent rows are doubled, and the partitioner places both.
//!
//! Source: MaxEmbed §5.1 (RPP, its first strawman).

use std::cmp::Reverse;

use tierbed_core::{Error, Result};

use crate::partition::{bisect, BisectionOptions};
use crate::QueryLog;
use crate::ReplicaBudget;
use tierbed_snapshot::Placement;

/// Gives the most frequent `ratio` of rows a twin in every query, then bisects.
///
/// A twin that lands on its row's own page saves nothing; its seat stays empty.
///
/// # Errors
///
/// `Invalid` for a bad ratio or options out of range, `Unsupported` for too many rows.
pub fn before_partition(
    log: &QueryLog,
    options: &BisectionOptions,
    ratio: f64,
) -> Result<Placement> {
    let row_count = log.row_count();
    let budget = ReplicaBudget::of_ratio(ratio, row_count, options.rows_per_page)?;
    let twin_count = budget.replica_count.min(u64::from(row_count)) as u32;
    let with_twins = row_count
        .checked_add(twin_count)
        .ok_or_else(|| Error::unsupported("a table and its replicas have at most 2^32 rows"))?;
    let frequencies = log.frequencies();
    let mut by_frequency: Vec<u32> = (0..row_count).collect();
    by_frequency.sort_by_key(|&row| Reverse(frequencies.get(row as usize).copied()));
    by_frequency.truncate(twin_count as usize);
    let mut twin_of = vec![None; row_count as usize];
    for (twin, &row) in (row_count..with_twins).zip(&by_frequency) {
        if let Some(slot) = twin_of.get_mut(row as usize) {
            *slot = Some(twin);
        }
    }
    let mut builder = QueryLog::builder(with_twins);
    let mut doubled = Vec::new();
    for query in log.iter() {
        doubled.clear();
        for &row in query {
            doubled.push(row);
            doubled.extend(twin_of.get(row as usize).copied().flatten());
        }
        builder.push(&doubled)?;
    }
    let seats = bisect(builder.finish(), options)?;
    without_twins(&seats, row_count, &by_frequency)
}

/// Turns twins on pages of `seats` into replicas of the rows they double.
fn without_twins(seats: &Placement, row_count: u32, doubled: &[u32]) -> Result<Placement> {
    let mut builder = Placement::builder(row_count, seats.rows_per_page())?;
    let mut pages_of_twins = Vec::new();
    for page in seats.pages() {
        let (homes, twins): (Vec<u32>, Vec<u32>) = page.iter().partition(|&&row| row < row_count);
        let rows = twins.iter().filter_map(|&twin| doubled.get((twin - row_count) as usize));
        let replicas: Vec<u32> = rows.copied().filter(|row| !homes.contains(row)).collect();
        if homes.is_empty() {
            pages_of_twins.push(replicas);
        } else {
            builder.push_home_page(&homes, &replicas)?;
        }
    }
    for page in &pages_of_twins {
        builder.push_replica_page(page)?;
    }
    builder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_with_two_circles_sits_in_both() {
        // Row 0 is asked for with 1 and 2, and with 3 and 4.
        let queries = [[0, 1, 2], [0, 3, 4]].repeat(5);
        let log = QueryLog::from_queries(5, queries).expect("in range");
        let options = BisectionOptions::new(3);
        let placement = before_partition(&log, &options, 0.2).expect("fits");
        let pages: Vec<Vec<u32>> = placement
            .pages()
            .map(|page| {
                let mut page = page.to_vec();
                page.sort_unstable();
                page
            })
            .collect();
        assert_eq!(placement.replica_count(), 1);
        assert!(pages.contains(&vec![0, 1, 2]) && pages.contains(&vec![0, 3, 4]), "{pages:?}");
    }

    #[test]
    fn without_replicas_it_is_a_bisection() {
        let log = QueryLog::from_queries(9, [[0, 4], [1, 8], [2, 3]]).expect("in range");
        let options = BisectionOptions::new(2);
        let bisected = bisect(log.clone(), &options).expect("fits");
        assert_eq!(before_partition(&log, &options, 0.0).expect("fits"), bisected);
    }
}
