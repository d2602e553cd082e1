//! Whatever the disk does, a reopened hash store stands at a commit, or says that bytes are
//! damaged. (The other baselines need a real file system; they are killed in `conformance.rs`.)
//!
//! Seeds: a fixed one, or `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use common::hash_options;
use tierbed_compare::{HashDb, HashDbOptions};
use tierbed_core::env::SplitMix64;
use tierbed_core::RowKey;
use tierbed_io::EngineChoice;
use tierbed_sim::job::{
    check_failed_calls, check_full_disk, check_lie, check_power_loss, check_recovery, lie,
    FailedCalls, SimJob, StoreJob, Told, Trained,
};
use tierbed_sim::rows::row;
use tierbed_sim::{Chance, FaultPlan, SimFolder};

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1])
}

fn window(seed: u64, step: u64, row_counts: [u64; 2]) -> Vec<RowKey> {
    let mut rng = SplitMix64::new(seed ^ (step << 20));
    (0..25)
        .flat_map(|_| [row(0, rng.below(row_counts[0])), row(1, rng.below(row_counts[1]))])
        .collect()
}

fn job(seed: u64) -> StoreJob<HashDb> {
    let open = |folder, _| {
        // Files of a few buckets, a cache of a few rows: it flushes and compacts all the time.
        let options =
            HashDbOptions { file_bytes: 24 << 10, ..hash_options(8 << 10, EngineChoice::Inline) };
        HashDb::open(folder, options)
    };
    StoreJob { window, ..StoreJob::new(seed, [300, 60], open) }
}

#[test]
fn power_loss_at_any_io_recovers_to_a_commit() {
    for seed in seeds() {
        let io_count = check_power_loss(&job(seed), seed, 1);
        assert!(io_count > 60, "{io_count}");
    }
}

#[test]
fn failed_calls_lose_no_commit() {
    for seed in seeds() {
        let calls = FailedCalls { count: 12, write_stride: 1, read_stride: 1 };
        let failure_count = check_failed_calls(&job(seed), seed, calls);
        assert!(failure_count > 12, "{failure_count}");
    }
}

/// Also where training did not notice: what it acknowledged is there after a loss of all that was
/// not synced.
#[test]
fn failed_writes_and_syncs_lose_no_commit() {
    for seed in seeds() {
        let job = job(seed);
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
                let Trained { acknowledged, .. } = job.train(&folder, job.steps);
                let what = format!("kind {at}, call {nth}");
                check_recovery(&job, &folder.crash_to_synced(), acknowledged, &what);
            }
        }
    }
}

#[test]
fn a_full_disk_stops_training_and_loses_no_commit() {
    for seed in seeds() {
        let refusals = check_full_disk(&job(seed), seed, (16 << 10..200 << 10).step_by(8 << 10));
        assert!(refusals > 3, "{refusals}");
    }
}

#[test]
fn lies_of_the_disk_are_found_or_harmless() {
    let mut found = 0;
    for seed in seeds() {
        for nth in 0..25 {
            for kind in 0..4 {
                let told = check_lie(&job(seed), lie(kind, nth, seed));
                found += u64::from(told == Told::Training);
            }
        }
    }
    assert!(found > 5, "{found} lies were found in training");
}
