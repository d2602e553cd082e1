//! Killed at any moment, each backend reopens at its last checkpoint, bit for bit, and goes on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use std::path::Path;
use std::time::Duration;

use common::{all_records, memory_config, Job};
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::OptimizerKind;
use tierbed_sim::kill::{run_and_kill, victim, Fate};
use tierbed_train::window::{Backend, Durability, FeatureLayout, WindowConfig, WindowEngine};

const STEPS: u64 = 240;
const STEPS_PER_CHECKPOINT: u64 = 5;
const DELAY_MAX_US: u64 = 90_000;
const NAMES: [&str; 6] = ["file", "cold", "lsm", "lsm_step", "hashdb", "mmap"];

fn config(name: &str) -> WindowConfig {
    tierbed_compare::register_stores();
    let with = |backend| WindowConfig { backend, ..WindowConfig::new(4 << 20) };
    match name {
        "file" => WindowConfig::new(400 << 10),
        "cold" => WindowConfig { backend: Backend::Cold, ..WindowConfig::new(700 << 10) },
        "lsm" => with(Backend::Lsm),
        "lsm_step" => WindowConfig { durability: Durability::Step, ..with(Backend::Lsm) },
        "hashdb" => with(Backend::HashDb),
        "mmap" => with(Backend::Mmap),
        _ => panic!("no backend is called {name}"),
    }
}

fn job() -> Job {
    Job::pooled(OptimizerKind::Adam, 11)
}

fn open(folder: &Path, name: &str) -> (WindowEngine, FeatureLayout, u64) {
    let mut engine = WindowEngine::open(Some(folder), &config(name)).unwrap();
    let plan = job().set_up(&mut engine).unwrap();
    let done = engine.attachment("steps").unwrap();
    let done = done.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
    (engine, plan, done)
}

fn train(folder: &Path, name: &str) {
    let (mut engine, plan, done) = open(folder, name);
    for step in done..STEPS {
        job().step(&mut engine, &plan, step).unwrap();
        if (step + 1) % STEPS_PER_CHECKPOINT == 0 {
            let bytes = (step + 1).to_le_bytes();
            let steps = Attachment { name: "steps", bytes: &bytes };
            engine.checkpoint("every so often", &[steps]).unwrap();
        }
    }
}

/// The rows of the run in memory, at every checkpoint.
fn expected() -> Vec<Vec<u32>> {
    let mut oracle = WindowEngine::open(None, &memory_config()).unwrap();
    let plan = job().set_up(&mut oracle).unwrap();
    let mut records = vec![all_records(&mut oracle)];
    for step in 0..STEPS {
        job().step(&mut oracle, &plan, step).unwrap();
        if (step + 1) % STEPS_PER_CHECKPOINT == 0 {
            records.push(all_records(&mut oracle));
        }
    }
    records
}

fn check(test: &str, kills_each: u32, seed: u64) {
    if let Some((folder, name)) = victim() {
        return train(&folder, &name);
    }
    let expected = expected();
    let mut rng = SplitMix64::new(seed);
    for name in NAMES {
        let (mut killed, mut between) = (0, 0);
        // On a busy machine a victim needs longer for its first checkpoint.
        let mut reach_us = DELAY_MAX_US;
        while killed < kills_each || between == 0 {
            // A new run when the last one came to its end.
            let scratch = tempfile::tempdir().unwrap();
            let mut fate = Fate::Killed;
            while fate == Fate::Killed && (killed < kills_each || between == 0) {
                let delay = Duration::from_micros(rng.below(reach_us));
                fate = run_and_kill(test, scratch.path(), name, delay).unwrap();
                let (mut engine, _, done) = open(scratch.path(), name);
                let at = (done / STEPS_PER_CHECKPOINT) as usize;
                assert!(all_records(&mut engine) == expected[at], "{name} differs at step {done}");
                assert!(fate == Fate::Killed || done == STEPS, "{name} ended at step {done}");
                if fate == Fate::Killed {
                    killed += 1;
                    between += u32::from((1..STEPS).contains(&done));
                    if done == 0 {
                        reach_us = (2 * reach_us).min(32 * DELAY_MAX_US);
                    }
                }
                assert!(killed < 20 * kills_each, "{name} was only killed too early or too late");
            }
        }
        println!("{name}: {killed} kills, {between} between the first checkpoint and the end");
    }
}

#[test]
fn a_few_kills_lose_nothing() {
    check("a_few_kills_lose_nothing", 5, 1);
}

/// Long: `make test-long` runs it.
#[test]
#[ignore = "two hundred kills take a minute or two"]
fn two_hundred_kills_lose_nothing() {
    check("two_hundred_kills_lose_nothing", 34, 2);
}
