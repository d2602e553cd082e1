//! Crash simulation: whatever the disk does, a reopened tree stands at a commit, bit for bit, or
//! says that bytes are damaged. Never at something else.
//!
//! Seeds: four fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    unreachable_pub,
    dead_code,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::collections::BTreeMap;

use common::{announce, tiny, versions};
use tierbed_core::{ErrorKind, TrainStore};
use tierbed_lsm::{Durability, HotRule, LsmOptions, LsmStore, WorkerChoice};
use tierbed_sim::job::{check_failed_calls, check_power_loss, FailedCalls, SimJob, StoreJob};
use tierbed_sim::rows::{row, write_version};
use tierbed_sim::{Chance, FaultPlan, SimFolder};

/// Seeds from here on run flushes and compactions on a thread of their own. What happens then is
/// no longer a matter of the seed alone, what must hold is.
const BESIDE: u64 = 1000;

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1, 2, 3, 4])
}

/// Odd seeds flush at a commit, even ones sync a log; every fourth leaves sealed memtables waiting
/// at a commit. See [`BESIDE`].
fn options(seed: u64) -> LsmOptions {
    let durability = if seed % 2 == 1 { Durability::Commit } else { Durability::Step };
    let rule = HotRule { frequency_min: 0.03, frequency_keep: 0.02, hot_ratio: 0.2 };
    let mut options = LsmOptions { durability, hot_rule: Some(rule), ..tiny(3000) };
    options.shape.level1_bytes = 16 * 1024;
    options.works_on_write = !seed.is_multiple_of(4);
    if seed >= BESIDE {
        options.worker = WorkerChoice::Thread;
        options.memory.sealed_memtables_max = 2;
    }
    options
}

fn job(seed: u64) -> StoreJob<LsmStore> {
    StoreJob {
        steps: 18,
        announce: |store, rows| announce(store, rows, 30),
        read: versions,
        is_repeatable: seed < BESIDE,
        ..StoreJob::new(seed, [300, 60], |folder, seed| LsmStore::open(folder, options(seed)))
    }
}

tierbed_sim::store_simulations!(seeds: seeds, job: job, pressure_rows: 100);

#[test]
fn power_loss_at_any_io_recovers_to_a_commit() {
    for seed in seeds() {
        let io_count = check_power_loss(&job(seed), seed, 1);
        assert!(io_count > 100, "{io_count}");
    }
}

#[test]
fn the_simulated_job_flushes_compacts_rewrites_and_moves_rows() {
    for seed in seeds() {
        let job = job(seed);
        let mut store = job.open(&SimFolder::default()).unwrap();
        for step in 0..job.steps {
            job.step(&mut store, step).unwrap();
        }
        let stats = store.lsm_stats();
        assert!(stats.flush_count > 5 && stats.compaction_count > 3, "{stats:?}");
        assert!(stats.rows_dropped > 0 && stats.rows_promoted > 0, "{stats:?}");
        assert!(stats.rows_demoted > 0, "{stats:?}");
    }
}

#[test]
fn power_loss_while_the_background_thread_works_recovers_to_a_commit() {
    for seed in [BESIDE + 1, BESIDE + 2] {
        check_power_loss(&job(seed), seed, 3);
    }
}

#[test]
fn failures_of_the_background_thread_surface_and_lose_no_commit() {
    let mut surfaced = 0;
    for seed in [BESIDE + 1, BESIDE + 2] {
        let calls = FailedCalls { count: 12, write_stride: 5, read_stride: 9 };
        surfaced += check_failed_calls(&job(seed), seed, calls);
    }
    assert!(surfaced > 30, "{surfaced}");
}

/// The failed sync is the background thread's: the write that started it succeeded, a later call
/// says what happened, and from then on the store refuses.
#[test]
fn an_io_error_in_the_background_poisons_the_store_at_a_later_call() {
    let job = job(BESIDE + 1);
    let folder = SimFolder::default();
    let mut store = job.open(&folder).unwrap();
    store.commit("empty", &[]).unwrap();
    let sync_error = Chance::Probability(1.0);
    folder.set_plan(FaultPlan { seed: job.seed, sync_error, ..FaultPlan::default() });
    let rows: Vec<_> = (0..60).map(|at| row(0, at)).collect();
    let error = (1..1000).find_map(|step| write_version(&mut store, &rows, step).err());
    assert_eq!(error.unwrap().kind(), ErrorKind::Io);
    assert_eq!(write_version(&mut store, &rows, 7).unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(versions(&mut store, &rows).unwrap_err().kind(), ErrorKind::Poisoned);
    drop(store);
    folder.set_plan(FaultPlan::default());
    let mut store = job.open(&folder.crash_to_synced()).unwrap();
    assert_eq!(versions(&mut store, &rows[..1]).unwrap(), [None]);
}

#[test]
fn a_store_may_be_dropped_while_the_background_thread_works() {
    let job = StoreJob { announce: |_, _| Ok(()), ..job(BESIDE + 1) };
    for round in 0..20 {
        let folder = SimFolder::default();
        let mut store = job.open(&folder).unwrap();
        for step in 0..round {
            job.step(&mut store, step).unwrap();
        }
        drop(store);
        // The lock is free again, and nothing was committed.
        let mut store = job.open(&folder).unwrap();
        assert_eq!(job.all_versions(&mut store).unwrap(), BTreeMap::new());
    }
}
