//! Tests of bisection: every row gets a seat, always the same, and a better one than by chance.

use std::path::Path;

use tierbed_core::env::SplitMix64;
use tierbed_core::ErrorKind;

use super::*;
use crate::partition::random;

/// Circles of `size` rows; a query asks for rows of one circle, at times for a stranger.
fn planted(circle_count: u32, size: u32, query_count: u32) -> QueryLog {
    let mut rng = SplitMix64::new(5);
    let row_count = circle_count * size;
    let mut builder = QueryLog::builder(row_count + 7);
    for _ in 0..query_count {
        let circle = rng.below(u64::from(circle_count)) as u32;
        let mut rows: Vec<u32> = (0..5)
            // Circles are strewn over the table.
            .map(|_| rng.below(u64::from(size)) as u32 * circle_count + circle)
            .collect();
        if rng.below(4) == 0 {
            rows.push(rng.below(u64::from(row_count)) as u32);
        }
        builder.push(&rows).expect("in range");
    }
    builder.finish()
}

/// Sums the home pages of all queries.
fn connectivity(placement: &Placement, log: &QueryLog) -> usize {
    let mut sum = 0;
    for query in log.iter() {
        let mut pages: Vec<u32> =
            query.iter().map(|&row| placement.home_pages()[row as usize]).collect();
        pages.sort_unstable();
        pages.dedup();
        sum += pages.len();
    }
    sum
}

fn options(rows_per_page: u32) -> BisectionOptions {
    BisectionOptions::new(rows_per_page)
}

#[test]
fn every_size_of_table_and_page_gives_full_pages_but_the_last() {
    for row_count in 1..40u32 {
        let queries: Vec<[u32; 2]> =
            (0..row_count).map(|row| [row, (row * 7 + 1) % row_count]).collect();
        // A third of the rows is never asked for.
        let log = QueryLog::from_queries(row_count + row_count / 3, queries).expect("in range");
        for rows_per_page in 1..10 {
            let placement = bisect(log.clone(), &options(rows_per_page))
                .expect("the builder checks homes and capacity");
            let lengths: Vec<usize> = placement.pages().map(<[u32]>::len).collect();
            let (last, others) = lengths.split_last().expect("a page");
            assert!(others.iter().all(|&len| len == rows_per_page as usize), "{lengths:?}");
            assert!(*last <= rows_per_page as usize);
            assert_eq!(placement.page_count(), log.row_count().div_ceil(rows_per_page));
        }
    }
}

#[test]
fn even_pages_differ_by_one_row_at_most() {
    let log = planted(6, 10, 400);
    for page_count in 9..40 {
        let placement = bisect_evenly(log.clone(), &options(8), page_count).expect("fits");
        assert!(u64::from(placement.page_count()) <= page_count);
        let seen_pages = placement.page_count() - 1;
        let lengths: Vec<usize> =
            placement.pages().take(seen_pages as usize).map(<[u32]>::len).collect();
        let (min, max) = (lengths.iter().min().expect("one"), lengths.iter().max().expect("one"));
        assert!(max - min <= 1, "{lengths:?}");
    }
    assert!(bisect_evenly(log, &options(8), 8).is_err());
}

#[test]
fn planted_circles_are_found() {
    let log = planted(40, 8, 4000);
    let bisected = bisect(log.clone(), &options(8)).expect("fits");
    let at_random = random(log.row_count(), 8, 3).expect("fits");
    let (found, chance) = (connectivity(&bisected, &log), connectivity(&at_random, &log));
    assert!(found * 5 < chance * 3, "{found} pages against {chance} by chance");
}

#[test]
fn circles_that_share_no_row_come_apart_whole() {
    // By chance many circles begin half here, half there: all their rows gain the same by changing
    // sides, and when all do, nothing has changed.
    for size in [2u32, 4, 8] {
        let circle_count = 240 / size;
        let queries: Vec<Vec<u32>> = (0..2 * circle_count)
            .map(|at| (0..size).map(|row| row * circle_count + at % circle_count).collect())
            .collect();
        let log = QueryLog::from_queries(240, &queries).expect("in range");
        let placement = bisect(log.clone(), &options(8)).expect("fits");
        let pages = connectivity(&placement, &log);
        assert!(5 * pages <= 6 * queries.len(), "{pages} pages, {} circles", queries.len());
    }
}

#[test]
fn rows_never_asked_for_come_last_highest_first() {
    let log = planted(4, 8, 200);
    let placement = bisect(log, &options(8)).expect("fits");
    let last: Vec<u32> = placement.pages().last().expect("a page").to_vec();
    assert_eq!(last, [38, 37, 36, 35, 34, 33, 32]);
}

#[test]
fn threads_change_nothing_and_seeds_do() {
    let log = planted(60, 8, 6000);
    let place = |seed: u64, thread_count: usize| {
        let options = BisectionOptions { seed, thread_count, ..options(8) };
        bisect(log.clone(), &options).expect("fits")
    };
    let one = place(1, 1);
    for thread_count in [2, 3, 8, 100] {
        assert_eq!(one, place(1, thread_count), "{thread_count} threads");
    }
    assert_ne!(one, place(2, 1));
}

#[test]
fn levels_are_reported_to_the_end() {
    let mut reports = Vec::new();
    let mut report = |level| {
        reports.push(level);
        Ok(())
    };
    bisect_resumable(planted(40, 8, 400), &options(8), None, &mut report).expect("fits");
    let levels: Vec<u32> = reports.iter().map(|report| report.levels_done).collect();
    assert_eq!(levels, [1, 2, 3, 4, 5, 6]);
    assert!(reports.iter().all(|report| report.level_count == 6));
    assert!(reports.windows(2).all(|pair| pair[1].pin_count <= pair[0].pin_count));
}

#[test]
fn options_out_of_range_are_refused() {
    let log = planted(2, 4, 10);
    let no_room = bisect(log.clone(), &options(0));
    assert!(no_room.is_err());
    let no_thread = BisectionOptions { thread_count: 0, ..options(4) };
    assert!(bisect(log, &no_thread).is_err());
}

/// Bisects with a state file and fails at the report of `level`, as a crash would.
fn interrupt(log: &QueryLog, options: &BisectionOptions, state: &Path, level: u32) {
    let stopped = std::panic::catch_unwind(|| {
        bisect_resumable(log.clone(), options, Some(state), &mut |report| {
            assert!(report.levels_done < level, "power cut");
            Ok(())
        })
    });
    assert!(stopped.is_err());
}

#[test]
fn an_interrupted_bisection_goes_on_to_the_same_result() {
    let log = planted(60, 8, 3000);
    let options = options(8);
    let whole = bisect(log.clone(), &options).expect("fits");
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    for level in [2, 3, 6] {
        interrupt(&log, &options, &state, level);
        assert!(state.exists());
    }
    let resumed = || bisect_resumable(log.clone(), &options, Some(&state), &mut |_| Ok(()));
    assert_eq!(resumed().expect("fits"), whole);
    assert_eq!(resumed().expect("all levels are kept"), whole);
}

#[test]
fn a_state_of_something_else_is_refused() {
    let log = planted(60, 8, 3000);
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    interrupt(&log, &options(8), &state, 3);
    let resume = |log: &QueryLog, options: &BisectionOptions| {
        let result = bisect_resumable(log.clone(), options, Some(&state), &mut |_| Ok(()));
        result.expect_err("not its state").kind()
    };
    let other_seed = BisectionOptions { seed: 9, ..options(8) };
    assert_eq!(resume(&log, &other_seed), ErrorKind::Invalid);
    assert_eq!(resume(&planted(60, 8, 3001), &options(8)), ErrorKind::Invalid);
    let bytes = std::fs::read(&state).expect("written");
    for at in [0, 9, 14, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        replace(&state, &damaged);
        assert_eq!(resume(&log, &options(8)), ErrorKind::Corruption, "byte {at}");
    }
    for len in [0, 7, 12, 20, bytes.len() - 4] {
        replace(&state, &bytes[..len]);
        assert_eq!(resume(&log, &options(8)), ErrorKind::Corruption, "{len} bytes");
    }
}

#[test]
fn a_state_of_other_rows_is_refused_though_its_checksum_is_right() {
    let log = planted(60, 8, 3000);
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    interrupt(&log, &options(8), &state, 3);
    let mut bytes = std::fs::read(&state).expect("written");
    // The last row of the order becomes one that no query asks for.
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&(60 * 8 + 6u32).to_le_bytes());
    let checksum = tierbed_core::checksum::crc32c(&bytes[12..]);
    bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
    replace(&state, &bytes);
    let result = bisect_resumable(log, &options(8), Some(&state), &mut |_| Ok(()));
    assert_eq!(result.expect_err("other rows").kind(), ErrorKind::Corruption);
}

fn replace(path: &Path, bytes: &[u8]) {
    use std::io::Write;
    let mut file = std::fs::File::create(path).expect("a file");
    file.write_all(bytes).expect("space");
}
