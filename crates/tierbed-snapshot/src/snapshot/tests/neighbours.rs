//! Rows that left the tiers, answered by their neighbours: exactly these while they are cached, and
//! the rows themselves otherwise.

use tierbed_cache::{PolicyKind, TierBudget};
use tierbed_core::env::{Clock, SystemClock};
use tierbed_io::{Device, MemoryDevice};
use tierbed_kernels::Codec;

use super::tiers::{ask, coded, plain_table, DIM, ROWS};
use super::*;
use crate::{
    CacheTier, MissMode, NeighbourFile, NeighbourOptions, NeighbourStats, SharedTiers,
    TierStackOptions,
};

const CACHE_BYTES: u64 = 40 << 10;

/// The neighbour of every row: a popular one; the last rows have none.
fn neighbour_of(row: u64) -> Option<u64> {
    (row < ROWS - 100).then_some(row % 20)
}

fn file_of(neighbour: impl Fn(u64) -> Option<u64>) -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new("near"));
    let schema = Schema::new(vec![table("plain", ROWS + 10, DIM as u32)]).unwrap();
    let near = |key: RowKey| neighbour(key.row.0).map(|row| RowKey::new(TableId(0), RowId(row)));
    NeighbourFile::write(&device, &schema, |_| true, &near).unwrap();
    device
}

fn tiers_of(file: Arc<dyn Device>) -> TierStackOptions {
    let tier = |codec, share| CacheTier {
        codec,
        policy: PolicyKind::from_name("ev_lfu").unwrap(),
        share,
        ..CacheTier::default()
    };
    TierStackOptions {
        tiers: vec![tier(Codec::F32, 48.0), tier(Codec::Int8, 48.0)],
        misses: MissMode::Surrogate,
        neighbours: Some(NeighbourOptions::of(file)),
        ..TierStackOptions::default()
    }
}

fn open(folder: &Arc<dyn Folder>, tiers: TierStackOptions) -> Snapshot {
    let cache_bytes_max = Some(CACHE_BYTES);
    let options = SnapshotOptions { tiers, cache_bytes_max, ..options(2 << 20) };
    Snapshot::open(Arc::clone(folder), &options).unwrap()
}

fn told(snapshot: &Snapshot) -> NeighbourStats {
    snapshot.stats().neighbours.unwrap()
}

/// Asks for rows, popular ones often, and checks every answer; returns the counts of all lookups.
fn ask_many(snapshot: &Snapshot, rows: &[Vec<f32>], rounds: u64) -> LookupStats {
    let mut rng = SplitMix64::new(17);
    let mut total = LookupStats::default();
    for _ in 0..rounds {
        let mut asked: Vec<u64> = (0..4).map(|_| rng.below(20)).collect();
        asked.extend((0..8).map(|_| rng.below(ROWS).min(rng.below(ROWS))));
        asked.sort_unstable();
        asked.dedup();
        let (found, stats) = ask(snapshot, &asked);
        let mut surrogates = 0;
        for (&row, found) in asked.iter().zip(&found) {
            let own = &rows[row as usize];
            if found == own || *found == coded(&Codec::Int8, own) {
                continue;
            }
            let near = &rows[neighbour_of(row).unwrap() as usize];
            assert!(found == near || *found == coded(&Codec::Int8, near), "row {row}");
            surrogates += 1;
        }
        assert_eq!(stats.rows_surrogate, surrogates);
        total.add(&stats);
    }
    total
}

#[test]
fn rows_that_left_are_answered_by_their_neighbours() {
    let (folder, rows) = plain_table();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let mut tiers = tiers_of(file_of(neighbour_of));
        tiers.neighbours.as_mut().unwrap().is_inline = true;
        let snapshot = open(&folder, tiers);
        let total = ask_many(&snapshot, &rows, 3000);
        let stats = told(&snapshot);
        assert_eq!(stats.rows_answered, total.rows_surrogate);
        assert!(stats.rows_answered > 500, "{stats:?}");
        assert!(stats.rows_known >= stats.rows_answered && stats.rows_asked > stats.rows_known);
        assert_eq!(stats.rows_asked, total.rows_surrogate + total.rows_read);
        let dealt_with = stats.rows_mapped + stats.rows_alone + stats.rows_again;
        assert_eq!((stats.rows_queued, stats.rows_failed), (dealt_with, 0));
        assert!(stats.rows_alone > 0 && stats.rows_again > 0 && stats.evictions > 0, "{stats:?}");
        // Every byte of keys, marks and index within the share, and all within the cache.
        assert!(stats.used_bytes <= stats.capacity_bytes);
        assert_eq!(stats.capacity_bytes, CACHE_BYTES * 4 / 100);
        assert_eq!(stats.key_count, stats.key_count_max);
        let held = snapshot.stats();
        assert!(held.cache_used_bytes <= CACHE_BYTES);
        assert!(held.cache_used_bytes > held.tiers.iter().map(|t| t.data_bytes).sum::<u64>());
        seen.push((total, stats));
    }
    assert_eq!(seen[0], seen[1], "inline, counts repeat");
}

/// Tiers of one row after another: what the neighbour answers, and what it leaves alone.
#[test]
fn a_neighbour_answers_from_a_tier_only_and_brings_nothing_in() {
    let (folder, rows) = plain_table();
    let mut tiers = tiers_of(file_of(|row| Some(if row == 9 { 8 } else { 3 })));
    tiers.tiers = vec![CacheTier { share: 96.0, ..CacheTier::default() }];
    let snapshot = open(&folder, tiers);
    let room = snapshot.stats().tiers[0].row_count_max;
    // Rows 5 and 9 come, and leave; row 3 is used all the time.
    ask(&snapshot, &[5, 9]);
    for row in 100..100 + 2 * room {
        ask(&snapshot, &[3, row]);
    }
    assert_eq!(told(&snapshot).rows_mapped, 0, "nobody reads the file yet");
    snapshot.map_neighbours_now();
    let before = told(&snapshot);
    assert!(before.rows_mapped > room && before.key_count == before.key_count_max, "{before:?}");
    let known: Vec<u64> = (100..100 + room).rev().collect();
    let mut answered = 0;
    for row in known {
        let (found, stats) = ask(&snapshot, &[row]);
        if stats.rows_surrogate == 1 {
            assert_eq!((&found[0], stats.rows_read, stats.pages_read), (&rows[3], 0, 0));
            // Not inserted: the next answer is the same.
            assert_eq!(ask(&snapshot, &[row]).1.rows_surrogate, 1);
            answered += 1;
        } else {
            assert_eq!(found[0], rows[row as usize]);
        }
    }
    assert!(answered > 0 && answered <= before.key_count, "{answered}");
}

/// Without its neighbour in a tier, a row is read, though who that is is known.
#[test]
fn a_neighbour_that_is_in_no_tier_is_not_read() {
    let (folder, rows) = plain_table();
    let mut tiers = tiers_of(file_of(|row| (row < 100).then_some(ROWS - 1)));
    tiers.tiers = vec![CacheTier { share: 96.0, ..CacheTier::default() }];
    let snapshot = open(&folder, tiers);
    let room = snapshot.stats().tiers[0].row_count_max;
    for row in 0..room + 40 {
        ask(&snapshot, &[row]);
    }
    snapshot.map_neighbours_now();
    let (found, stats) = ask(&snapshot, &[30]);
    assert_eq!((&found[0], stats.rows_read, stats.rows_surrogate), (&rows[30], 1, 0));
    let told = told(&snapshot);
    assert_eq!((told.rows_known, told.rows_answered), (1, 0), "{told:?}");
}

/// Damage costs neighbours, never an answer.
#[test]
fn a_damaged_file_of_neighbours_is_told_and_answers_stay_exact() {
    let (folder, rows) = plain_table();
    let file = file_of(neighbour_of);
    let mut tiers = tiers_of(Arc::clone(&file));
    tiers.neighbours.as_mut().unwrap().is_inline = true;
    let snapshot = open(&folder, tiers);
    for page in 1..file.len_bytes().unwrap() / PAGE_BYTES as u64 {
        file.write_at(page * PAGE_BYTES as u64 + 50, &[77]).unwrap();
    }
    let total = ask_many(&snapshot, &rows, 1000);
    let stats = told(&snapshot);
    assert_eq!((total.rows_surrogate, stats.key_count, stats.rows_mapped), (0, 0, 0));
    assert!(stats.rows_failed > 100 && stats.rows_failed == stats.rows_queued);
    let error = stats.error.unwrap();
    assert!(error.contains("near") && error.contains("write the neighbours again"), "{error}");
}

#[test]
fn a_full_queue_drops_rows_and_holds_up_nobody() {
    let (folder, rows) = plain_table();
    let mut tiers = tiers_of(file_of(neighbour_of));
    tiers.neighbours.as_mut().unwrap().waiting_batches_max = 2;
    let snapshot = open(&folder, tiers);
    assert_eq!(ask_many(&snapshot, &rows, 500).rows_surrogate, 0);
    let stats = told(&snapshot);
    assert!((stats.rows_queued, stats.rows_mapped) == (100, 0) && stats.rows_dropped >= 500);
    assert_eq!(stats.rows_dropped % 50, 0);
    snapshot.map_neighbours_now();
    let stats = told(&snapshot);
    assert_eq!(stats.rows_mapped + stats.rows_again + stats.rows_alone, stats.rows_queued);
}

#[test]
fn threads_map_rows_until_the_snapshot_is_dropped() {
    let (folder, rows) = plain_table();
    let snapshot = open(&folder, tiers_of(file_of(neighbour_of)));
    snapshot.map_neighbours_in_background().unwrap();
    let clock = SystemClock::default();
    let until_us = clock.now_us() + 20_000_000;
    while told(&snapshot).rows_answered < 20 {
        assert!(clock.now_us() < until_us, "{:?}", told(&snapshot));
        ask_many(&snapshot, &rows, 200);
    }
    drop(snapshot);
}

#[test]
fn neighbours_that_make_no_sense_are_refused() {
    let (folder, _) = plain_table();
    let given = || tiers_of(file_of(neighbour_of));
    let changes: [fn(&mut TierStackOptions); 7] = [
        |tiers| tiers.misses = MissMode::Read,
        |tiers| tiers.misses = MissMode::Default,
        |tiers| tiers.tiers.clear(),
        |tiers| tiers.neighbours.as_mut().unwrap().share = 0.0,
        |tiers| tiers.neighbours.as_mut().unwrap().waiting_batches_max = 0,
        |tiers| {
            let file = Arc::new(MemoryDevice::new("other"));
            tiers.neighbours.as_mut().unwrap().file = file;
        },
        |tiers| {
            let budget = TierBudget::new(1 << 20).unwrap();
            let name = "shared".to_owned();
            tiers.shared = Some(SharedTiers { budget, name, floor_bytes: None });
        },
    ];
    for (at, change) in changes.iter().enumerate() {
        let mut tiers = given();
        change(&mut tiers);
        let cache_bytes_max = tiers.shared.is_none().then_some(CACHE_BYTES);
        let options = SnapshotOptions { tiers, cache_bytes_max, ..options(2 << 20) };
        let error = Snapshot::open(Arc::clone(&folder), &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{at}: {error}");
    }
}
