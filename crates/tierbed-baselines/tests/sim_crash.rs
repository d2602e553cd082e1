//! Whatever the disk does, a reopened hash store stands at a commit, or says that bytes are
//! damaged. (The other baselines need a real file system; they are killed in `conformance.rs`.)
//!
//! Seeds: a fixed one, or `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{hash_options, row, table, versions, write_version};
use tierbed_baselines::{HashDb, HashDbOptions};
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, Result, RowKey, RowStore, TableId, TrainStore};
use tierbed_io::{EngineChoice, Folder};
use tierbed_sim::{Chance, FaultPlan, SimFolder};

fn seeds() -> Vec<u64> {
    match std::env::var("TIERBED_SIM_SEED") {
        Ok(seed) => vec![seed.parse().expect("TIERBED_SIM_SEED is a number")],
        Err(_) => vec![1],
    }
}

fn open(folder: &SimFolder) -> Result<HashDb> {
    let folder: Arc<dyn Folder> = Arc::new(folder.clone());
    // Files of a few buckets, a cache of a few rows: it flushes and compacts all the time.
    let options =
        HashDbOptions { file_bytes: 24 << 10, ..hash_options(8 << 10, EngineChoice::Inline) };
    let mut store = HashDb::open(folder, options)?;
    store.add_table(table("a", 8, 300))?;
    store.add_table(table("b", 40, 60))?;
    Ok(store)
}

/// Steps between commits, and in all.
const STRIDE: u64 = 3;
const STEPS: u64 = 12;

fn window(seed: u64, step: u64) -> Vec<RowKey> {
    let mut rng = SplitMix64::new(seed ^ (step << 20));
    let mut rows: Vec<_> =
        (0..25).flat_map(|_| [row(0, rng.below(300)), row(1, rng.below(60))]).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

fn position(store: &mut HashDb) -> Result<u64> {
    let bytes = store.attachment("position")?;
    Ok(bytes.map_or(0, |bytes| String::from_utf8(bytes).unwrap().parse().unwrap()))
}

/// Trains up to `steps`; returns the step of the last acknowledged commit, and why it ended.
fn train(folder: &SimFolder, seed: u64, steps: u64) -> (u64, Result<()>) {
    let mut acknowledged = 0;
    let result = (|| {
        let mut store = open(folder)?;
        let first = position(&mut store)?;
        acknowledged = first;
        for step in first..steps {
            let rows = window(seed, step);
            versions(&mut store, &rows)?;
            write_version(&mut store, &rows, step as u32 + 1)?;
            if (step + 1) % STRIDE == 0 {
                let text = (step + 1).to_string();
                store.commit("s", &[Attachment { name: "position", bytes: text.as_bytes() }])?;
                acknowledged = step + 1;
            }
        }
        Ok(())
    })();
    (acknowledged, result)
}

/// The version of every row after `step` steps.
fn oracle(seed: u64, step: u64) -> BTreeMap<RowKey, u32> {
    let rows = |step| window(seed, step).into_iter().map(move |row| (row, step as u32 + 1));
    (0..step).flat_map(rows).collect()
}

fn all_versions(store: &mut HashDb) -> Result<BTreeMap<RowKey, u32>> {
    let mut found = BTreeMap::new();
    for id in [TableId(0), TableId(1)] {
        store.scan(id, &mut |row, record| {
            let version = u32::from_le_bytes(record[..4].try_into().unwrap());
            found.insert(RowKey::new(id, row), version);
            Ok(())
        })?;
    }
    Ok(found)
}

fn check_recovery(folder: &SimFolder, seed: u64, acknowledged: u64) {
    let mut store = open(folder).unwrap();
    let at = position(&mut store).unwrap();
    assert!(at == acknowledged || at == acknowledged + STRIDE, "{at} after {acknowledged}");
    store.verify().unwrap();
    assert_eq!(all_versions(&mut store).unwrap(), oracle(seed, at), "rows at step {at}");
    drop(store);
    train(folder, seed, STEPS).1.unwrap();
    let mut store = open(folder).unwrap();
    assert_eq!(all_versions(&mut store).unwrap(), oracle(seed, STEPS));
}

#[test]
fn power_loss_at_any_io_recovers_to_a_commit() {
    for seed in seeds() {
        let healthy = SimFolder::default();
        train(&healthy, seed, STEPS).1.unwrap();
        let io_count = healthy.io_count();
        assert!(io_count > 60, "{io_count}");
        let mut rng = SplitMix64::new(seed);
        for point in 0..io_count {
            let plan = FaultPlan { seed, crash_after_io: Some(point), ..FaultPlan::default() };
            let folder = SimFolder::new(plan);
            let (acknowledged, result) = train(&folder, seed, STEPS);
            assert!(folder.is_crashed(), "io {point}");
            assert!(result.is_err() || acknowledged == STEPS, "io {point}");
            let image = match point % 2 {
                0 => folder.crash(rng.next_u64()),
                _ => folder.crash_to_synced(),
            };
            check_recovery(&image, seed, acknowledged);
        }
    }
}

#[test]
fn failed_writes_and_syncs_lose_no_commit() {
    for seed in seeds() {
        for nth in 0..12 {
            for at in 0..3 {
                let chance = |kind| if kind == at { Chance::Nth(nth) } else { Chance::Never };
                let folder = SimFolder::new(FaultPlan {
                    seed,
                    write_error: chance(0),
                    sync_error: chance(1),
                    folder_sync_error: chance(2),
                    ..FaultPlan::default()
                });
                let (acknowledged, _) = train(&folder, seed, STEPS);
                let image = folder.crash_to_synced();
                image.set_plan(FaultPlan::default());
                check_recovery(&image, seed, acknowledged);
            }
        }
    }
}

#[test]
fn a_full_disk_stops_training_and_loses_no_commit() {
    for seed in seeds() {
        for kib in (16..200).step_by(8) {
            let plan =
                FaultPlan { seed, enospc_after_bytes: Some(kib << 10), ..FaultPlan::default() };
            let folder = SimFolder::new(plan);
            let (acknowledged, result) = train(&folder, seed, STEPS);
            if let Err(error) = result {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{kib} KiB: {error}");
            }
            folder.set_plan(FaultPlan::default());
            check_recovery(&folder, seed, acknowledged);
        }
    }
}

#[test]
fn lies_of_the_disk_are_found_or_harmless() {
    let mut found_count = 0;
    for seed in seeds() {
        for nth in 0..25 {
            for lie in 0..4 {
                let chance = |kind| if kind == lie { Chance::Nth(nth) } else { Chance::Never };
                let folder = SimFolder::new(FaultPlan {
                    seed,
                    torn_write: chance(0),
                    lost_write: chance(1),
                    misdirected_write: chance(2),
                    read_bit_flip: chance(3),
                    ..FaultPlan::default()
                });
                let (_, trained) = train(&folder, seed, STEPS);
                folder.set_plan(FaultPlan::default());
                let reopened = open(&folder).and_then(|mut store| {
                    store.verify()?;
                    let at = position(&mut store)?;
                    Ok((at, all_versions(&mut store)?))
                });
                match reopened {
                    Ok((at, rows)) => assert_eq!(rows, oracle(seed, at), "lie {lie}, {nth}"),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Corruption, "{error}"),
                }
                if let Err(error) = trained {
                    assert_eq!(error.kind(), ErrorKind::Corruption, "lie {lie}, {nth}: {error}");
                    found_count += 1;
                }
            }
        }
    }
    assert!(found_count > 5, "{found_count}");
}
