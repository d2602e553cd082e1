//! Properties of every placement method, and comparisons between them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test may panic"
)]

use std::collections::HashSet;

use tierbed_core::env::SplitMix64;
use tierbed_placement::partition::{
    bisect, by_frequency, grow, random, BisectionOptions, GrowthOptions,
};
use tierbed_placement::replicate::{
    before_partition, by_connectivity, by_marginal_gain, finer_and_filled,
};
use tierbed_placement::{count_page_reads, index_by_use, Placement, QueryLog, ReplicaBudget};
use tierbed_snapshot::select::Selection;

const ROWS_PER_PAGE: u32 = 8;

/// Circles of rows strewn over a table, some rows in two of them, and strangers in every query.
fn planted(circle_count: u64, query_count: u32, seed: u64) -> QueryLog {
    let mut rng = SplitMix64::new(seed);
    let row_count = circle_count as u32 * 6;
    let mut order: Vec<u32> = (0..row_count).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, rng.below(at as u64 + 1) as usize);
    }
    let mut builder = QueryLog::builder(row_count + 5);
    for _ in 0..query_count {
        // Popular circles come first; a circle shares two rows with the next one.
        let circle = rng.below(circle_count).min(rng.below(circle_count)) as usize;
        let mut rows: Vec<u32> =
            (0..4).map(|_| order[(circle * 6 + rng.below(8) as usize) % order.len()]).collect();
        rows.push(order[rng.below(order.len() as u64) as usize]);
        builder.push(&rows).unwrap();
    }
    builder.finish()
}

fn bisected(log: &QueryLog) -> Placement {
    let options = BisectionOptions::new(ROWS_PER_PAGE);
    bisect(log.clone(), &options).unwrap()
}

fn growth() -> GrowthOptions {
    GrowthOptions::new(ROWS_PER_PAGE)
}

fn reads(placement: &Placement, build: &QueryLog, later: &QueryLog) -> u64 {
    let index = index_by_use(placement, build).unwrap().limited(Some(10));
    count_page_reads(&index, later, Selection::OnePass, 1).unwrap().page_count()
}

#[test]
fn every_answer_keeps_the_budget_to_the_row() {
    // The builder checks homes, capacity and rows twice on a page.
    for (circles, queries) in [(1, 3), (2, 40), (7, 300), (30, 900)] {
        let log = planted(circles, queries, circles);
        let homes = bisected(&log);
        for ratio in [0.0, 0.05, 0.1, 0.33, 0.8, 1.7] {
            let budget = ReplicaBudget::of_ratio(ratio, log.row_count(), ROWS_PER_PAGE).unwrap();
            let bisection = BisectionOptions::new(ROWS_PER_PAGE);
            for (what, placement) in [
                ("by connectivity", by_connectivity(&homes, &log, ratio)),
                ("by marginal gain", by_marginal_gain(log.clone(), &growth(), ratio)),
                ("before partition", before_partition(&log, &bisection, ratio)),
                ("finer and filled", finer_and_filled(&log, &bisection, ratio)),
            ] {
                let placement = placement.unwrap();
                let told = format!("{what}, {circles} circles, ratio {ratio}");
                assert_eq!(placement.row_count(), log.row_count(), "{told}");
                assert!(placement.replica_count() <= budget.replica_count, "{told}");
                let pages = u64::from(placement.page_count());
                assert!(pages <= budget.total_page_count, "{told}: {pages} pages");
            }
        }
    }
}

#[test]
fn marginal_gain_builds_no_page_twice() {
    let log = planted(40, 3000, 4);
    let placement = by_marginal_gain(log, &growth(), 0.8).unwrap();
    let pages: Vec<Vec<u32>> = placement
        .pages()
        .map(|page| {
            let mut page = page.to_vec();
            page.sort_unstable();
            page
        })
        .collect();
    assert!(placement.page_count() > placement.home_page_count());
    assert_eq!(pages.iter().collect::<HashSet<_>>().len(), pages.len());
}

#[test]
fn threads_change_no_placement() {
    let log = planted(60, 3000, 5);
    for block_rows in [64, 1 << 18] {
        for ratio in [0.0, 0.4] {
            let place = |thread_count: usize| {
                let mut options = GrowthOptions { block_rows, ..growth() };
                options.bisection.thread_count = thread_count;
                by_marginal_gain(log.clone(), &options, ratio).unwrap()
            };
            let one = place(1);
            assert_eq!(one, place(2), "blocks of {block_rows}, ratio {ratio}");
            assert_eq!(one, place(7), "blocks of {block_rows}, ratio {ratio}");
        }
    }
}

#[test]
fn what_looks_at_pairs_reads_less_than_what_does_not() {
    let log = planted(60, 4000, 6);
    let (build, later) = log.split_by_share(0.8).unwrap();
    let at_random = random(log.row_count(), ROWS_PER_PAGE, 1).unwrap();
    let frequent = by_frequency(&build, ROWS_PER_PAGE).unwrap();
    let halves = bisected(&build);
    let grown = grow(build.clone(), &growth()).unwrap();
    let reads = [&at_random, &frequent, &halves, &grown].map(|p| reads(p, &build, &later));
    assert!(reads.windows(2).all(|pair| pair[1] < pair[0]), "{reads:?}");
}

#[test]
fn more_replicas_read_less_and_marginal_gain_least() {
    let log = planted(60, 4000, 7);
    let (build, later) = log.split_by_share(0.8).unwrap();
    let homes = bisected(&build);
    let connected = by_connectivity(&homes, &build, 0.8).unwrap();
    let mut last = reads(&homes, &build, &later);
    for ratio in [0.1, 0.2, 0.4, 0.8] {
        let budget = ReplicaBudget::of_ratio(ratio, log.row_count(), ROWS_PER_PAGE).unwrap();
        let published = connected.with_replicas_at_most(budget);
        let alone = by_connectivity(&homes, &build, ratio).unwrap();
        assert!(published == alone, "one run serves all ratios, {ratio} too");
        let of_published = reads(&published, &build, &later);
        assert!(of_published <= last, "ratio {ratio}: {of_published} after {last}");
        last = of_published;
        let ours = by_marginal_gain(build.clone(), &growth(), ratio).unwrap();
        let of_ours = reads(&ours, &build, &later);
        assert!(of_ours < of_published, "ratio {ratio}: {of_ours} against {of_published}");
    }
}

#[test]
fn rows_that_are_never_asked_for_with_others_come_last() {
    let mut builder = QueryLog::builder(20);
    for query in [&[3, 4, 5][..], &[3, 4], &[9], &[9], &[11]] {
        builder.push(query).unwrap();
    }
    let placement = grow(builder.finish(), &GrowthOptions::new(4)).unwrap();
    let order: Vec<u32> = placement.pages().flatten().copied().collect();
    assert_eq!(placement.page_count(), 5);
    let mut first: Vec<u32> = order[..3].to_vec();
    first.sort_unstable();
    assert_eq!(first, [3, 4, 5]);
    assert_eq!(order[3..7], [9, 11, 19, 18]);
}

#[test]
fn an_empty_log_gives_full_pages() {
    let log = QueryLog::builder(10).finish();
    for ratio in [0.0, 0.5] {
        let placement = by_marginal_gain(log.clone(), &GrowthOptions::new(4), ratio).unwrap();
        assert_eq!((placement.page_count(), placement.replica_count()), (3, 0));
    }
    let nobody = QueryLog::builder(0).finish();
    assert_eq!(grow(nobody.clone(), &growth()).unwrap().page_count(), 0);
    assert_eq!(bisected(&nobody).page_count(), 0);
}
