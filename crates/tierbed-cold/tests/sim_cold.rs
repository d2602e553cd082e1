//! Whatever the disk does, a reopened cold store stands at a commit, bit for bit, or says that
//! bytes are damaged. Never at something else.
//!
//! Seeds: four fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    dead_code,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use common::tiny;
use tierbed_cold::{ColdOptions, ColdStore};
use tierbed_sim::job::{
    check_failed_calls, check_failed_sync, check_full_disk, check_lie, check_power_loss,
    check_repeated_power_loss, check_use_after_full_disk, lie, FailedCalls, SimJob, StoreJob, Told,
};
use tierbed_sim::SimFolder;

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1, 2, 3, 4])
}

/// Sizes differ by seed: from a run every few rows to several steps per run.
fn options(seed: u64) -> ColdOptions {
    let mut options = tiny(2400 + 1500 * (seed % 4) as usize);
    options.delta_share = 0.2 + 0.1 * (seed % 3) as f64;
    options
}

fn job(seed: u64) -> StoreJob<ColdStore> {
    StoreJob::new(seed, [1000, 120], |folder, seed| ColdStore::open(folder, options(seed)))
}

#[test]
fn power_loss_at_any_io_recovers_to_a_commit() {
    for (at, seed) in seeds().into_iter().enumerate() {
        // The first seed at every I/O, the others at every fifth.
        let io_count = check_power_loss(&job(seed), seed, if at == 0 { 1 } else { 5 });
        assert!(io_count > 100, "{io_count}");
    }
}

#[test]
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for seed in seeds() {
        check_repeated_power_loss(&StoreJob { steps: 24, ..job(seed) }, seed, 20, 120);
    }
}

#[test]
fn the_simulated_job_writes_runs_merges_and_compacts() {
    let mut compacted = 0;
    for seed in seeds() {
        let job = job(seed);
        let mut store = job.open(&SimFolder::default()).unwrap();
        for step in 0..job.steps {
            job.step(&mut store, step).unwrap();
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
        let calls = FailedCalls { count: 16, write_stride: 5, read_stride: 9 };
        let failure_count = check_failed_calls(&job(seed), seed, calls);
        assert!(failure_count > 20, "{failure_count}");
    }
}

#[test]
fn a_failed_sync_poisons_the_store() {
    for seed in seeds() {
        check_failed_sync(&job(seed));
    }
}

#[test]
fn a_full_disk_is_no_space_and_loses_nothing() {
    for seed in seeds() {
        let refusals = check_full_disk(&job(seed), seed, (4096..300_000).step_by(8 * 1024));
        assert!(refusals > 3, "{refusals}");
    }
}

#[test]
fn after_a_full_disk_the_same_store_goes_on() {
    for seed in seeds() {
        check_use_after_full_disk(&job(seed), 1000);
    }
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for seed in seeds().into_iter().flat_map(|seed| (0..40).map(move |at| 101 * seed + at)) {
        // All four jobs with every kind of lie.
        let told = check_lie(&job(1 + (seed / 8) % 4), lie(seed % 4, (seed / 4) % 70, seed));
        found += u64::from(told != Told::Never);
    }
    assert!(found > 20, "{found} lies were found");
}
