//! Whatever the disk does, a reopened engine stands at a checkpoint, bit for bit, or says that
//! bytes are damaged. Never at something else.
//!
//! Seeds: four fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{all_records, Job};
use tierbed::{Engine, EngineConfig, FeaturePlan, Pooling};
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind, Result};
use tierbed_io::Folder;
use tierbed_sim::{Chance, FaultPlan, SimFolder};

fn seeds() -> Vec<u64> {
    let mut seeds = vec![1, 2, 3, 4];
    if let Ok(seed) = std::env::var("TIERBED_SIM_SEED") {
        seeds = vec![seed.parse().expect("TIERBED_SIM_SEED is a number")];
    }
    seeds
}

fn job(seed: u64) -> Job {
    Job {
        seed,
        tables: vec![(9, 400), (64, 60)],
        features: vec![(0, Pooling::Sum), (1, Pooling::Mean)],
        batch_size: 4,
        ..Job::pooled(OptimizerKind::ALL[seed as usize % 5], seed)
    }
}

fn config() -> EngineConfig {
    EngineConfig { io_engine: "inline".into(), ..EngineConfig::new(192 << 10) }
}

fn open(folder: &SimFolder, job: &Job) -> Result<(Engine, FeaturePlan)> {
    let folder: Arc<dyn Folder> = Arc::new(folder.clone());
    let mut engine = Engine::open_in(Some(folder), &config())?;
    let plan = job.set_up(&mut engine)?;
    Ok((engine, plan))
}

/// Steps between checkpoints.
const STRIDE: u64 = 3;

/// Trains up to `steps`, checkpointing as it goes; returns the step of the last checkpoint that
/// was acknowledged, and why it ended.
fn train(folder: &SimFolder, job: &Job, steps: u64) -> (u64, Result<()>) {
    let mut acknowledged = 0;
    let result = (|| {
        let (mut engine, plan) = open(folder, job)?;
        let first = position(&mut engine)?;
        acknowledged = first;
        for step in first..steps {
            job.step(&mut engine, &plan, step)?;
            if (step + 1) % STRIDE == 0 {
                let text = (step + 1).to_string();
                engine
                    .checkpoint("s", &[Attachment { name: "position", bytes: text.as_bytes() }])?;
                acknowledged = step + 1;
            }
        }
        Ok(())
    })();
    (acknowledged, result)
}

fn position(engine: &mut Engine) -> Result<u64> {
    let bytes = engine.attachment("position")?;
    Ok(bytes.map_or(0, |bytes| String::from_utf8(bytes).unwrap().parse().unwrap()))
}

/// Records after each number of steps, from a run on a healthy disk.
fn oracle(job: &Job, steps: u64) -> BTreeMap<u64, Vec<u32>> {
    let (mut engine, plan) = open(&SimFolder::default(), job).unwrap();
    let mut after = BTreeMap::from([(0, all_records(&mut engine))]);
    for step in 0..steps {
        job.step(&mut engine, &plan, step).unwrap();
        after.insert(step + 1, all_records(&mut engine));
    }
    after
}

/// Checks that the folder stands at a checkpoint not older than the acknowledged one, that its
/// bytes are those of the oracle, and that training on from there ends where it should.
fn check_recovery(
    folder: &SimFolder,
    job: &Job,
    acknowledged: u64,
    oracle: &BTreeMap<u64, Vec<u32>>,
) {
    let (mut engine, _) = open(folder, job).unwrap();
    let at = position(&mut engine).unwrap();
    assert!(at == acknowledged || at == acknowledged + STRIDE, "{at} after {acknowledged}");
    engine.verify().unwrap();
    assert!(all_records(&mut engine) == oracle[&at], "records at step {at}");
    drop(engine);
    let last = *oracle.keys().last().unwrap();
    train(folder, job, last).1.unwrap();
    let (mut engine, _) = open(folder, job).unwrap();
    assert!(all_records(&mut engine) == oracle[&position(&mut engine).unwrap()]);
}

#[test]
fn power_loss_at_any_io_recovers_to_a_checkpoint() {
    for seed in seeds() {
        let job = job(seed);
        let oracle = oracle(&job, 12);
        let healthy = SimFolder::default();
        train(&healthy, &job, 12).1.unwrap();
        let io_count = healthy.io_count();
        assert!(io_count > 100, "{io_count}");
        let mut rng = SplitMix64::new(seed);
        for point in 0..io_count {
            let plan = FaultPlan { seed, crash_after_io: Some(point), ..FaultPlan::default() };
            let folder = SimFolder::new(plan);
            let (acknowledged, result) = train(&folder, &job, 12);
            // Power that fails while old commits are tidied away changes nothing any more.
            assert!(folder.is_crashed(), "io {point}");
            assert!(result.is_err() || acknowledged == 12, "io {point}");
            let image = if point % 2 == 0 {
                folder.crash(rng.next_u64())
            } else {
                folder.crash_to_synced()
            };
            check_recovery(&image, &job, acknowledged, &oracle);
        }
    }
}

#[test]
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for seed in seeds() {
        let job = job(seed);
        let oracle = oracle(&job, 30);
        let mut rng = SplitMix64::new(seed ^ 99);
        let mut folder = SimFolder::default();
        let mut acknowledged = 0;
        for _ in 0..12 {
            let crash_after_io = Some(rng.below(150));
            folder.set_plan(FaultPlan { seed, crash_after_io, ..FaultPlan::default() });
            acknowledged = train(&folder, &job, 30).0.max(acknowledged);
            folder = folder.crash(rng.next_u64());
        }
        let (mut engine, _) = open(&folder, &job).unwrap();
        assert!(position(&mut engine).unwrap() >= acknowledged);
        drop(engine);
        train(&folder, &job, 30).1.unwrap();
        let (mut engine, _) = open(&folder, &job).unwrap();
        assert!(all_records(&mut engine) == oracle[&30]);
    }
}

#[test]
fn failed_syncs_poison_the_store_and_lose_no_checkpoint() {
    for seed in seeds() {
        let job = job(seed);
        let oracle = oracle(&job, 12);
        for nth in 0..12 {
            for plan in [
                FaultPlan { seed, sync_error: Chance::Nth(nth), ..FaultPlan::default() },
                FaultPlan { seed, folder_sync_error: Chance::Nth(nth), ..FaultPlan::default() },
                FaultPlan { seed, write_error: Chance::Nth(7 * nth), ..FaultPlan::default() },
            ] {
                let folder = SimFolder::new(plan);
                let (acknowledged, result) = train(&folder, &job, 12);
                if result.is_ok() {
                    continue;
                }
                let image = folder.crash(seed ^ nth);
                check_recovery(&image, &job, acknowledged, &oracle);
            }
        }
    }
}

#[test]
fn a_full_disk_is_no_space_and_loses_nothing() {
    for seed in seeds() {
        let job = job(seed);
        let oracle = oracle(&job, 12);
        let mut refusals = 0;
        for enospc_after_bytes in (8192..400_000).step_by(24 * 1024) {
            let plan = FaultPlan {
                seed,
                enospc_after_bytes: Some(enospc_after_bytes),
                ..FaultPlan::default()
            };
            let folder = SimFolder::new(plan);
            let (acknowledged, result) = train(&folder, &job, 12);
            let Err(error) = result else { continue };
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            refusals += 1;
            // Space is freed, the process starts again.
            folder.set_plan(FaultPlan::default());
            check_recovery(&folder, &job, acknowledged, &oracle);
        }
        assert!(refusals > 3, "{refusals}");
    }
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for seed in seeds().into_iter().flat_map(|seed| (0..24).map(move |at| 100 * seed + at)) {
        let job = job(seed);
        let oracle = oracle(&job, 12);
        let lie = Chance::Nth(seed % 90);
        let plan = match seed % 4 {
            0 => FaultPlan { seed, lost_write: lie, ..FaultPlan::default() },
            1 => FaultPlan { seed, misdirected_write: lie, ..FaultPlan::default() },
            2 => FaultPlan { seed, torn_write: lie, ..FaultPlan::default() },
            _ => FaultPlan { seed, read_bit_flip: lie, ..FaultPlan::default() },
        };
        let folder = SimFolder::new(plan);
        let result = train(&folder, &job, 12).1;
        folder.set_plan(FaultPlan::default());
        let outcome = result.and_then(|()| {
            let (mut engine, _) = open(&folder, &job)?;
            let at = position(&mut engine)?;
            engine.verify()?;
            assert!(all_records(&mut engine) == oracle[&at], "silent damage, seed {seed}");
            Ok(())
        });
        if let Err(error) = outcome {
            assert_eq!(error.kind(), ErrorKind::Corruption, "seed {seed}: {error}");
            found += 1;
        }
    }
    assert!(found > 0, "no lie was ever told");
}
