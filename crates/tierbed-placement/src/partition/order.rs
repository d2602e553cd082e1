//! Baseline partitioners that look at no pair of rows: row order and frequency.

use tierbed_core::env::SplitMix64;
use tierbed_core::Result;

use super::{Placement, QueryLog};

/// Places rows on pages at random.
///
/// # Errors
///
/// `Invalid` when a page has no room for a row.
pub fn random(row_count: u32, rows_per_page: u32, seed: u64) -> Result<Placement> {
    let mut order: Vec<u32> = (0..row_count).collect();
    shuffle(&mut order, &mut SplitMix64::new(seed));
    Placement::from_order(&order, rows_per_page)
}

/// Places rows by falling frequency, equal ones by number; rows never asked for come last.
///
/// # Errors
///
/// `Invalid` when a page has no room for a row.
pub fn by_frequency(log: &QueryLog, rows_per_page: u32) -> Result<Placement> {
    let frequencies = log.frequencies();
    let mut order: Vec<u32> = (0..log.row_count()).collect();
    order.sort_by_key(|&row| std::cmp::Reverse(frequencies.get(row as usize).copied()));
    Placement::from_order(&order, rows_per_page)
}

/// Shuffles `items` (Fisher and Yates).
pub(crate) fn shuffle<T>(items: &mut [T], rng: &mut SplitMix64) {
    for at in (1..items.len()).rev() {
        items.swap(at, rng.below(at as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_rows_come_first_and_unseen_rows_last() {
        let log = QueryLog::from_queries(6, [&[4, 2][..], &[4], &[4, 2, 1]]).expect("in range");
        let placement = by_frequency(&log, 2).expect("room");
        let pages: Vec<&[u32]> = placement.pages().collect();
        assert_eq!(pages, [[4, 2], [1, 0], [3, 5]]);
    }

    #[test]
    fn a_random_placement_repeats_with_its_seed() {
        let placement = random(100, 8, 1).expect("room");
        assert_eq!(placement, random(100, 8, 1).expect("room"));
        assert_ne!(placement, random(100, 8, 2).expect("room"));
        assert_eq!((placement.page_count(), placement.replica_count()), (13, 0));
    }
}
