//! Killed at any moment, training along a plan reopens at its last checkpoint and goes on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{smallest_config, Job};
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::OptimizerKind;
use tierbed_io::FsFolder;
use tierbed_sim::kill::{run_and_kill, victim, Fate};
use tierbed_train::planned::{PlannedConfig, PlannedEngine};

const EPOCHS: u64 = 6;
/// Not a divisor of the window nor of the epoch: checkpoints fall anywhere.
const STEPS_PER_CHECKPOINT: u64 = 7;
const WINDOW: u32 = 3;
const DELAY_MAX_US: u64 = 90_000;

// Odd seeds do storage work on a thread of its own, and have spans.
fn job(seed: u64) -> Job {
    Job::pooled(OptimizerKind::Adagrad, seed)
}

fn open(folder: &Path, seed: u64) -> (PlannedEngine, u64) {
    let (job, plan) = (job(seed), job(seed).plan(WINDOW));
    // A little more than the least: lists of chunks differ with the moment of the kill.
    let least = smallest_config(&job, &plan);
    let config = PlannedConfig {
        io_engine: "auto".to_owned(),
        dram_budget_bytes: least.dram_budget_bytes + (512 << 10),
        span_windows: (seed % 2 == 1).then_some(3),
        ..least
    };
    let folder = Arc::new(FsFolder::create(folder).unwrap());
    let engine = job.open(folder, &plan, &config).unwrap();
    let position = engine.position();
    let done = position.epoch * job.batches + position.batch;
    (engine, done)
}

fn train(folder: &Path, seed: u64) {
    let (job, features) = (job(seed), job(seed).features());
    let (mut engine, done) = open(folder, seed);
    let step_count = EPOCHS * job.batches;
    for step in done..step_count {
        job.step(&mut engine, &features, step).unwrap();
        if (step + 1) % STEPS_PER_CHECKPOINT == 0 || step + 1 == step_count {
            let bytes = (step + 1).to_le_bytes();
            let steps = Attachment { name: "steps", bytes: &bytes };
            engine.checkpoint("every so often", &[steps]).unwrap();
        }
    }
}

/// The rows of the run in memory, after every step.
fn expected(seed: u64) -> Vec<Vec<u32>> {
    let (job, features) = (job(seed), job(seed).features());
    let mut oracle = job.open_oracle();
    let mut records = vec![job.oracle_records(&mut oracle)];
    for step in 0..EPOCHS * job.batches {
        job.oracle_step(&mut oracle, &features, step);
        records.push(job.oracle_records(&mut oracle));
    }
    records
}

fn check(test: &str, kills_each: u32, seed: u64) {
    if let Some((folder, seed)) = victim() {
        return train(&folder, seed.parse().unwrap());
    }
    let mut rng = SplitMix64::new(seed);
    for job_seed in [4, 5] {
        let expected = expected(job_seed);
        let step_count = expected.len() as u64 - 1;
        let (mut killed, mut between) = (0, 0);
        // A busy machine is slow to start: kills come later until one meets training.
        let mut delay_max_us = DELAY_MAX_US;
        while killed < kills_each || between == 0 {
            delay_max_us += if killed < kills_each { 0 } else { DELAY_MAX_US };
            assert!(killed < 10 * kills_each, "only killed too early or too late");
            // A new run when the last one came to its end.
            let scratch = tempfile::tempdir().unwrap();
            let mut fate = Fate::Killed;
            let mut kills = 0;
            while fate == Fate::Killed && kills < kills_each {
                let delay = Duration::from_micros(rng.below(delay_max_us));
                kills += 1;
                let name = job_seed.to_string();
                fate = run_and_kill(test, scratch.path(), &name, delay).unwrap();
                let done = check_what_is_left(scratch.path(), job_seed, &expected);
                assert!(fate == Fate::Killed || done == step_count, "ended at step {done}");
                killed += u32::from(fate == Fate::Killed);
                between += u32::from(fate == Fate::Killed && (1..step_count).contains(&done));
            }
        }
        println!("job {job_seed}: {killed} kills, {between} between checkpoint and end");
    }
}

fn check_what_is_left(folder: &Path, job_seed: u64, expected: &[Vec<u32>]) -> u64 {
    let (mut engine, done) = open(folder, job_seed);
    let steps = engine.attachment("steps").unwrap();
    let steps = steps.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
    assert_eq!(steps, done, "position and attachment are of one checkpoint");
    let records = job(job_seed).records(&mut engine).unwrap();
    assert!(records == expected[done as usize], "rows differ at step {done}");
    done
}

#[test]
fn a_few_kills_lose_nothing() {
    check("a_few_kills_lose_nothing", 8, 1);
}

/// Long: `make test-long` runs it.
#[test]
#[ignore = "two hundred kills take a minute or two"]
fn two_hundred_kills_lose_nothing() {
    check("two_hundred_kills_lose_nothing", 100, 2);
}
