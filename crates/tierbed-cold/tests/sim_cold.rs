//! Whatever the disk does, a reopened cold store stands at a commit, bit for bit, or says that
//! bytes are damaged. Never at something else.
//!
//! Seeds: four fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    unreachable_pub,
    dead_code,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{row, table, tiny, versions, write_version};
use tierbed_cold::{ColdOptions, ColdStore};
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, Result, RowKey, RowStore, TableId, TrainStore};
use tierbed_io::Folder;
use tierbed_sim::{Chance, FaultPlan, SimFolder};

fn seeds() -> Vec<u64> {
    let mut seeds = vec![1, 2, 3, 4];
    if let Ok(seed) = std::env::var("TIERBED_SIM_SEED") {
        seeds = vec![seed.parse().expect("TIERBED_SIM_SEED is a number")];
    }
    seeds
}

/// Sizes differ by seed: from a run every few rows to several steps per run.
fn options(seed: u64) -> ColdOptions {
    let mut options = tiny(2400 + 1500 * (seed % 4) as usize);
    options.delta_share = 0.2 + 0.1 * (seed % 3) as f64;
    options
}

fn open(folder: &SimFolder, seed: u64) -> Result<ColdStore> {
    let folder: Arc<dyn Folder> = Arc::new(folder.clone());
    let mut store = ColdStore::open(folder, options(seed))?;
    store.add_table(table("a", 8, 1000))?;
    store.add_table(table("b", 40, 120))?;
    Ok(store)
}

/// Steps between commits, and in all.
const STRIDE: u64 = 3;
const STEPS: u64 = 12;

fn window(seed: u64, step: u64) -> Vec<RowKey> {
    let mut rng = SplitMix64::new(seed ^ (step << 20));
    let mut rows = Vec::new();
    for _ in 0..30 {
        // Every other step another part of the table is popular.
        let near = step / 6 * 40 + rng.below(20);
        let far = rng.below(1000);
        rows.push(row(0, if rng.below(2) == 0 { near } else { far }));
        rows.push(row(1, rng.below(120)));
    }
    rows
}

fn position(store: &mut ColdStore) -> Result<u64> {
    let bytes = store.attachment("position")?;
    Ok(bytes.map_or(0, |bytes| String::from_utf8(bytes).unwrap().parse().unwrap()))
}

/// Trains up to `steps`; each step reads its rows and writes them with the step's number.
/// Returns the step of the last acknowledged commit, and why it ended.
fn train(folder: &SimFolder, seed: u64, steps: u64) -> (u64, Result<()>) {
    let mut acknowledged = 0;
    let result = (|| {
        let mut store = open(folder, seed)?;
        let first = position(&mut store)?;
        acknowledged = first;
        for step in first..steps {
            let mut rows = window(seed, step);
            rows.sort_unstable();
            rows.dedup();
            versions(&mut store, &rows)?;
            write_version(&mut store, &rows, step as u32 + 1)?;
            if (step + 1) % STRIDE == 0 {
                let text = (step + 1).to_string();
                let position = Attachment { name: "position", bytes: text.as_bytes() };
                store.commit("s", &[position])?;
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

fn all_versions(store: &mut ColdStore) -> Result<BTreeMap<RowKey, u32>> {
    let mut found = BTreeMap::new();
    for id in [TableId(0), TableId(1)] {
        store.scan(id, &mut |row, record| {
            let version = u32::from_le_bytes(record[..4].try_into().unwrap());
            found.insert(RowKey::new(id, row), version);
            Ok(())
        })?;
    }
    // What a scan finds, a read finds.
    let rows: Vec<_> = found.keys().copied().collect();
    let read = versions(store, &rows)?;
    assert!(read.into_iter().eq(found.values().map(|version| Some(*version))));
    Ok(found)
}

fn check_recovery(folder: &SimFolder, seed: u64, acknowledged: u64) {
    let mut store = open(folder, seed).unwrap();
    let at = position(&mut store).unwrap();
    assert!(at == acknowledged || at == acknowledged + STRIDE, "{at} after {acknowledged}");
    store.verify().unwrap();
    assert_eq!(all_versions(&mut store).unwrap(), oracle(seed, at), "rows at step {at}");
    drop(store);
    train(folder, seed, STEPS).1.unwrap();
    let mut store = open(folder, seed).unwrap();
    let at = position(&mut store).unwrap();
    assert_eq!(all_versions(&mut store).unwrap(), oracle(seed, at));
}

#[test]
fn power_loss_at_any_io_recovers_to_a_commit() {
    for seed in seeds() {
        let healthy = SimFolder::default();
        train(&healthy, seed, STEPS).1.unwrap();
        let io_count = healthy.io_count();
        assert!(io_count > 100, "{io_count}");
        let mut rng = SplitMix64::new(seed);
        // The first seed at every I/O, the others at every fifth.
        let stride = if seeds().first() == Some(&seed) { 1 } else { 5 };
        for point in (0..io_count).step_by(stride) {
            let plan = FaultPlan { seed, crash_after_io: Some(point), ..FaultPlan::default() };
            let folder = SimFolder::new(plan);
            let (acknowledged, result) = train(&folder, seed, STEPS);
            // Power that fails while garbage is removed changes nothing any more.
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
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for seed in seeds() {
        let mut rng = SplitMix64::new(seed ^ 99);
        let mut folder = SimFolder::default();
        let mut acknowledged = 0;
        for _ in 0..20 {
            let crash_after_io = Some(rng.below(120));
            folder.set_plan(FaultPlan { seed, crash_after_io, ..FaultPlan::default() });
            acknowledged = train(&folder, seed, 2 * STEPS).0.max(acknowledged);
            folder = folder.crash(rng.next_u64());
        }
        let mut store = open(&folder, seed).unwrap();
        assert!(position(&mut store).unwrap() >= acknowledged);
        drop(store);
        train(&folder, seed, 2 * STEPS).1.unwrap();
        let mut store = open(&folder, seed).unwrap();
        assert_eq!(all_versions(&mut store).unwrap(), oracle(seed, 2 * STEPS));
    }
}

#[test]
fn the_simulated_job_writes_runs_merges_and_compacts() {
    let mut compacted = 0;
    for seed in seeds() {
        let folder = SimFolder::default();
        let mut store = open(&folder, seed).unwrap();
        for step in 0..STEPS {
            let mut rows = window(seed, step);
            rows.sort_unstable();
            rows.dedup();
            versions(&mut store, &rows).unwrap();
            write_version(&mut store, &rows, step as u32 + 1).unwrap();
        }
        let stats = store.cold_stats();
        assert!(stats.run_count > 5 && stats.ranges_merged > 5, "{stats:?}");
        compacted += stats.runs_compacted;
    }
    assert!(compacted > 0);
}

#[test]
fn failed_writes_and_syncs_lose_no_commit() {
    for seed in seeds() {
        for nth in 0..16 {
            for plan in [
                FaultPlan { seed, sync_error: Chance::Nth(nth), ..FaultPlan::default() },
                FaultPlan { seed, folder_sync_error: Chance::Nth(nth), ..FaultPlan::default() },
                FaultPlan { seed, write_error: Chance::Nth(5 * nth), ..FaultPlan::default() },
                FaultPlan { seed, read_error: Chance::Nth(9 * nth), ..FaultPlan::default() },
            ] {
                let folder = SimFolder::new(plan);
                let (acknowledged, result) = train(&folder, seed, STEPS);
                if result.is_ok() {
                    continue;
                }
                let image = folder.crash(seed ^ nth);
                check_recovery(&image, seed, acknowledged);
            }
        }
    }
}

#[test]
fn a_failed_sync_poisons_the_store() {
    for seed in seeds() {
        let folder = SimFolder::default();
        let mut store = open(&folder, seed).unwrap();
        write_version(&mut store, &[row(0, 1)], 1).unwrap();
        let plan = FaultPlan { seed, sync_error: Chance::Nth(0), ..FaultPlan::default() };
        folder.set_plan(plan);
        assert_eq!(store.commit("s", &[]).unwrap_err().kind(), ErrorKind::Io);
        let error = write_version(&mut store, &[row(0, 1)], 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Poisoned);
    }
}

#[test]
fn a_full_disk_is_no_space_and_loses_nothing() {
    for seed in seeds() {
        let mut refusals = 0;
        for enospc_after_bytes in (4096..300_000).step_by(8 * 1024) {
            let plan = FaultPlan {
                seed,
                enospc_after_bytes: Some(enospc_after_bytes),
                ..FaultPlan::default()
            };
            let folder = SimFolder::new(plan);
            let (acknowledged, result) = train(&folder, seed, STEPS);
            let Err(error) = result else { continue };
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            refusals += 1;
            // Space is freed, the process starts again.
            folder.set_plan(FaultPlan::default());
            check_recovery(&folder, seed, acknowledged);
        }
        assert!(refusals > 3, "{refusals}");
    }
}

#[test]
fn after_a_full_disk_the_same_store_goes_on() {
    for seed in seeds() {
        let folder = SimFolder::default();
        let mut store = open(&folder, seed).unwrap();
        let rows: Vec<_> = (0..300).map(|at| row(0, at)).collect();
        write_version(&mut store, &rows, 1).unwrap();
        store.commit("one", &[]).unwrap();
        let plan = FaultPlan { seed, enospc_after_bytes: Some(1), ..FaultPlan::default() };
        folder.set_plan(plan);
        let more: Vec<_> = (0..1000).map(|at| row(0, at)).collect();
        let mut refused = None;
        for version in 2..60 {
            refused = write_version(&mut store, &more, version).err();
            if refused.is_some() {
                break;
            }
        }
        assert_eq!(refused.expect("no space").kind(), ErrorKind::NoSpace);
        assert_eq!(store.commit("two", &[]).unwrap_err().kind(), ErrorKind::NoSpace);
        folder.set_plan(FaultPlan::default());
        write_version(&mut store, &rows, 100).unwrap();
        store.commit("three", &[]).unwrap();
        store.verify().unwrap();
        drop(store);
        let mut store = open(&folder, seed).unwrap();
        assert_eq!(versions(&mut store, &rows).unwrap(), vec![Some(100); 300]);
    }
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for seed in seeds().into_iter().flat_map(|seed| (0..40).map(move |at| 101 * seed + at)) {
        let lie = Chance::Nth((seed / 4) % 70);
        let plan = match seed % 4 {
            0 => FaultPlan { seed, lost_write: lie, ..FaultPlan::default() },
            1 => FaultPlan { seed, misdirected_write: lie, ..FaultPlan::default() },
            2 => FaultPlan { seed, torn_write: lie, ..FaultPlan::default() },
            _ => FaultPlan { seed, read_bit_flip: lie, ..FaultPlan::default() },
        };
        // All four jobs with every kind of lie.
        let job = 1 + (seed / 8) % 4;
        let folder = SimFolder::new(plan);
        let result = train(&folder, job, STEPS).1;
        folder.set_plan(FaultPlan::default());
        let outcome = result.and_then(|()| {
            let mut store = open(&folder, job)?;
            let at = position(&mut store)?;
            store.verify()?;
            let rows = all_versions(&mut store)?;
            assert_eq!(rows, oracle(job, at), "silent damage, seed {seed}");
            Ok(())
        });
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Corruption, "seed {seed}: {error}");
            found += 1;
        }
    }
    assert!(found > 20, "{found} lies were found");
}
