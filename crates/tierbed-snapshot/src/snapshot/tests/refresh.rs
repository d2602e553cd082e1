//! Approximate answers that become exact: what is read, when, and what a bad disk does to it.

use tierbed_core::env::{Clock, SystemClock};
use tierbed_kernels::Codec;
use tierbed_sim::{Chance, FaultPlan, SimFolder};

use super::tiers::{ask, coded, plain_table, publish_plain, resident, spoil, tail_codes, ROWS};
use super::*;
use crate::{CacheTier, MissMode, RefreshOptions, RefreshStats, Tail, TierStackOptions};

/// Opens a snapshot whose misses are answered by int4 codes and refreshed.
fn open(
    folder: &Arc<dyn Folder>,
    rows: &[Vec<f32>],
    (misses, waiting_rows_max): (MissMode, usize),
) -> Snapshot {
    let tail = Some(Tail { codec: Codec::Int4, codes: tail_codes(rows) });
    let tiers = TierStackOptions {
        tiers: vec![CacheTier::default()],
        resident: vec![Arc::new(resident(rows, tail))],
        misses,
        refresh: RefreshOptions { tables: vec![TableId(0)], waiting_rows_max },
        ..TierStackOptions::default()
    };
    Snapshot::open(Arc::clone(folder), &SnapshotOptions { tiers, ..options(2 << 20) }).unwrap()
}

fn told(snapshot: &Snapshot) -> RefreshStats {
    snapshot.stats().refreshed.unwrap()
}

#[test]
fn an_approximate_answer_is_exact_next_time() {
    let (folder, rows) = plain_table();
    let asked = [1, 2, 900, 2000];
    for misses in [MissMode::Surrogate, MissMode::Default] {
        let snapshot = open(&folder, &rows, (misses, 100));
        for _ in 0..2 {
            let (found, stats) = ask(&snapshot, &asked);
            assert_eq!((stats.rows_surrogate, stats.rows_read, stats.pages_read), (4, 0, 0));
            for (&row, found) in asked.iter().zip(&found) {
                assert_eq!(*found, coded(&Codec::Int4, &rows[row as usize]));
            }
        }
        snapshot.refresh_now();
        let expected = RefreshStats {
            rows_queued: 8,
            rows_known: 4,
            rows_read: 4,
            pages_read: told(&snapshot).pages_read,
            ..RefreshStats::default()
        };
        assert_eq!(told(&snapshot), expected);
        assert!((3..=4).contains(&expected.pages_read));
        let (found, stats) = ask(&snapshot, &asked);
        assert_eq!((stats.rows_cached, stats.rows_surrogate), (4, 0));
        assert!(asked.iter().zip(&found).all(|(&row, found)| *found == rows[row as usize]));
        snapshot.refresh_now();
        assert_eq!(told(&snapshot), expected, "rows that are here are not asked for");
        // Rows of the head and rows never written need no read.
        ask(&snapshot, &[3, ROWS + 1]);
        assert_eq!(told(&snapshot), expected);
    }
}

#[test]
fn a_full_queue_drops_rows_and_holds_up_nobody() {
    let (folder, rows) = plain_table();
    let snapshot = open(&folder, &rows, (MissMode::Surrogate, 5));
    let asked: Vec<u64> = (0..ROWS).filter(|row| row % 7 != 3).take(300).collect();
    let (_, stats) = ask(&snapshot, &asked);
    assert_eq!(stats.rows_surrogate, 300);
    assert_eq!((told(&snapshot).rows_queued, told(&snapshot).rows_dropped), (5, 295));
    snapshot.refresh_now();
    assert_eq!(told(&snapshot).rows_read, 5);
    assert_eq!(ask(&snapshot, &asked).1.rows_cached, 5);
}

/// Every answer is the row or its code, whatever the disk does.
#[test]
fn a_page_that_fails_its_checks_is_counted_and_never_a_value() {
    let (folder, rows) = plain_table();
    let snapshot = open(&folder, &rows, (MissMode::Surrogate, 1000));
    let asked: Vec<u64> = (0..ROWS).filter(|row| row % 7 != 3).take(200).collect();
    spoil(&folder, 1);
    ask(&snapshot, &asked);
    snapshot.refresh_now();
    let stats = told(&snapshot);
    assert!(stats.rows_failed > 30 && stats.rows_read > 100, "{stats:?}");
    assert_eq!(stats.rows_failed + stats.rows_read, 200);
    assert!(stats.error.is_some_and(|error| error.contains("page_id: 1")));
    let (found, counts) = ask(&snapshot, &asked);
    assert_eq!((counts.rows_surrogate, counts.rows_cached), (stats.rows_failed, stats.rows_read));
    for (&row, found) in asked.iter().zip(&found) {
        let stored = &rows[row as usize];
        assert!(found == stored || *found == coded(&Codec::Int4, stored), "row {row}");
    }
    // The disk is well again.
    spoil(&folder, 1);
    snapshot.refresh_now();
    let (found, _) = ask(&snapshot, &asked);
    assert!(asked.iter().zip(&found).all(|(&row, found)| *found == rows[row as usize]));
}

#[test]
fn reads_that_fail_are_counted_and_no_lookup_fails() {
    for seed in 0..8 {
        let sim = SimFolder::new(FaultPlan { seed, ..FaultPlan::default() });
        let folder: Arc<dyn Folder> = Arc::new(sim.clone());
        let rows = publish_plain(&folder, ROWS);
        let snapshot = open(&folder, &rows, (MissMode::Default, 40));
        sim.set_plan(FaultPlan {
            seed,
            read_error: Chance::Probability(0.2),
            read_bit_flip: Chance::Probability(0.2),
            ..FaultPlan::default()
        });
        let mut rng = SplitMix64::new(seed);
        for _ in 0..60 {
            let mut asked: Vec<u64> = (0..30).map(|_| rng.below(ROWS)).collect();
            asked.sort_unstable();
            asked.dedup();
            let (found, _) = ask(&snapshot, &asked);
            for (&row, found) in asked.iter().zip(&found) {
                let stored = &rows[row as usize];
                let codes = [coded(&Codec::Int4, stored), coded(&Codec::Gauss4, stored)];
                assert!(found == stored || codes.contains(found), "seed {seed}: row {row}");
            }
            snapshot.refresh_now();
        }
        let stats = told(&snapshot);
        assert!(stats.rows_failed > 0 && stats.rows_read > 0, "seed {seed}: {stats:?}");
        assert_eq!(stats.rows_queued, stats.rows_known + stats.rows_read + stats.rows_failed);
        assert!(stats.error.is_some());
    }
}

#[test]
fn a_thread_refreshes_until_the_snapshot_is_dropped() {
    let (folder, rows) = plain_table();
    let snapshot = Arc::new(open(&folder, &rows, (MissMode::Surrogate, 100)));
    snapshot.refresh_in_background().unwrap();
    snapshot.refresh_in_background().unwrap();
    ask(&snapshot, &[1, 2, 5]);
    let clock = SystemClock::default();
    let until_us = clock.now_us() + 20_000_000;
    while told(&snapshot).rows_read < 3 {
        assert!(clock.now_us() < until_us, "{:?}", told(&snapshot));
        std::thread::yield_now();
    }
    assert_eq!(ask(&snapshot, &[1, 2, 5]).1.rows_cached, 3);
    ask(&snapshot, &(10..90).collect::<Vec<_>>());
    drop(snapshot);
}

#[test]
fn what_cannot_be_refreshed_is_refused() {
    let (folder, _) = plain_table();
    let refresh =
        |table, waiting_rows_max| RefreshOptions { tables: vec![TableId(table)], waiting_rows_max };
    for (misses, refresh, tiers) in [
        (MissMode::Read, refresh(0, 1), 1),
        (MissMode::Default, refresh(7, 1), 1),
        (MissMode::Default, refresh(0, 0), 1),
        (MissMode::Default, refresh(0, 1), 0),
    ] {
        let tiers = TierStackOptions {
            tiers: vec![CacheTier::default(); tiers],
            misses,
            refresh,
            ..TierStackOptions::default()
        };
        let options = SnapshotOptions { tiers, ..options(2 << 20) };
        let error = Snapshot::open(Arc::clone(&folder), &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    let snapshot = Snapshot::open(folder, &options(2 << 20)).unwrap();
    snapshot.refresh_now();
    assert_eq!(snapshot.refresh_stats(), None);
}
