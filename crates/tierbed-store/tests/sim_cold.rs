//! Crash simulation: whatever the disk does, a reopened cold store stands at a commit, bit for bit,
//! or says that bytes are damaged. Never at something else.
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
use tierbed_sim::job::{check_power_loss, SimJob, StoreJob};
use tierbed_sim::SimFolder;
use tierbed_store::cold::{ColdOptions, ColdStore};

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

tierbed_sim::store_simulations!(seeds: seeds, job: job, pressure_rows: 1000);

#[test]
fn power_loss_at_any_io_recovers_to_a_commit() {
    for (at, seed) in seeds().into_iter().enumerate() {
        // The first seed at every I/O, the others at every fifth.
        let io_count = check_power_loss(&job(seed), seed, if at == 0 { 1 } else { 5 });
        assert!(io_count > 100, "{io_count}");
    }
}

#[test]
fn the_simulated_job_writes_runs_merges_and_compacts() {
    let mut compacted = 0;
    let seeds = seeds();
    for &seed in &seeds {
        let job = job(seed);
        let mut store = job.open(&SimFolder::default()).unwrap();
        for step in 0..job.steps {
            job.step(&mut store, step).unwrap();
        }
        let stats = store.cold_stats();
        assert!(stats.run_count > 5 && stats.ranges_merged > 5, "{stats:?}");
        compacted += stats.runs_compacted;
    }
    // Not every seed has runs to compact, so one that is given alone may have none.
    assert!(compacted > 0 || seeds.len() == 1);
}
