//! Whatever the disk does, a reopened store stands at a checkpoint, bit for bit, or says that
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

use std::sync::Arc;

use common::{smallest_config, Job};
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind, Result};
use tierbed_forward::{ForwardConfig, ForwardEngine, Plan};
use tierbed_io::Folder;
use tierbed_kernels::Pooling;
use tierbed_sim::{Chance, FaultPlan, SimFolder};

fn seeds() -> Vec<u64> {
    let mut seeds = vec![1, 2, 3, 4];
    if let Ok(seed) = std::env::var("TIERBED_SIM_SEED") {
        seeds = vec![seed.parse().expect("TIERBED_SIM_SEED is a number")];
    }
    seeds
}

/// Steps between checkpoints: they fall inside windows and between them.
const STRIDE: u64 = 5;
/// Steps of a run: almost two epochs.
const STEPS: u64 = 25;

/// A job with its plan, its budget and the records after each number of steps.
struct Case {
    job: Job,
    plan: Plan,
    config: ForwardConfig,
    oracle: Vec<Vec<u32>>,
}

impl Case {
    fn new(seed: u64) -> Self {
        let job = Job {
            tables: vec![(9, 400), (64, 60)],
            features: vec![(0, Pooling::Sum), (1, Pooling::Mean)],
            batch_size: 8,
            batches: 14,
            ..Job::pooled(OptimizerKind::ALL[seed as usize % 5], seed)
        };
        let plan = job.plan(1 + seed as u32 % 3);
        // Where storage work has a thread of its own (odd seeds), the caller writes only when that
        // thread rests, so the order of I/O is the same in every run.
        let config = ForwardConfig { extent_bytes: 4096, ..smallest_config(&job, &plan) };
        let mut engine = job.open_oracle();
        let mut oracle = vec![job.oracle_records(&mut engine)];
        for step in 0..STEPS {
            job.oracle_step(&mut engine, &job.features(), step);
            oracle.push(job.oracle_records(&mut engine));
        }
        // The oracle is that of a healthy disk, which must agree.
        let case = Self { job, plan, config, oracle };
        let (acknowledged, result) = case.train(&SimFolder::default());
        result.unwrap();
        assert_eq!(acknowledged, STEPS);
        case
    }

    fn open(&self, folder: &SimFolder) -> Result<ForwardEngine> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        self.job.open(folder, &self.plan, &self.config)
    }

    fn position(&self, engine: &ForwardEngine) -> u64 {
        let position = engine.position();
        position.epoch * self.job.batches + position.batch
    }

    /// Trains to the end, checkpointing as it goes; returns the step of the last checkpoint that
    /// was acknowledged, and why it ended.
    fn train(&self, folder: &SimFolder) -> (u64, Result<()>) {
        let mut acknowledged = 0;
        let result = (|| {
            let features = self.job.features();
            let mut engine = self.open(folder)?;
            let first = self.position(&engine);
            acknowledged = first;
            for step in first..STEPS {
                self.job.step(&mut engine, &features, step)?;
                if (step + 1) % STRIDE == 0 {
                    let text = (step + 1).to_string();
                    engine.checkpoint(
                        "s",
                        &[Attachment { name: "position", bytes: text.as_bytes() }],
                    )?;
                    acknowledged = step + 1;
                }
            }
            Ok(())
        })();
        (acknowledged, result)
    }

    /// Checks that the folder stands at a checkpoint not older than the acknowledged one, that
    /// its bytes are those of the oracle, and that training on from there ends where it should.
    fn check_recovery(&self, folder: &SimFolder, acknowledged: u64) {
        let mut engine = self.open(folder).unwrap();
        let at = self.position(&engine);
        assert!(at == acknowledged || at == acknowledged + STRIDE, "{at} after {acknowledged}");
        let attached = engine.attachment("position").unwrap();
        assert_eq!(
            attached.map_or(0, |text| String::from_utf8(text).unwrap().parse().unwrap()),
            at
        );
        engine.verify().unwrap();
        let records = self.job.records(&mut engine).unwrap();
        assert!(records == self.oracle[at as usize], "records at step {at}");
        drop(engine);
        self.train(folder).1.unwrap();
        let mut engine = self.open(folder).unwrap();
        assert!(self.job.records(&mut engine).unwrap() == self.oracle[STEPS as usize]);
    }
}

#[test]
fn these_jobs_really_use_the_disk() {
    for seed in seeds() {
        let case = Case::new(seed);
        let mut engine = case.open(&SimFolder::default()).unwrap();
        for step in 0..STEPS {
            case.job.step(&mut engine, &case.job.features(), step).unwrap();
        }
        let stats = engine.stats();
        assert!(stats.rows_flushed > 0 && stats.rows_read > 0, "{stats:?}");
    }
}

#[test]
fn power_loss_at_any_io_recovers_to_a_checkpoint() {
    for seed in seeds() {
        let case = Case::new(seed);
        let healthy = SimFolder::default();
        case.train(&healthy).1.unwrap();
        let io_count = healthy.io_count();
        assert!(io_count > 100, "{io_count}");
        let mut rng = SplitMix64::new(seed);
        for point in 0..io_count {
            let plan = FaultPlan { seed, crash_after_io: Some(point), ..FaultPlan::default() };
            let folder = SimFolder::new(plan);
            let (acknowledged, result) = case.train(&folder);
            // Power that fails while old commits are tidied away changes nothing any more.
            assert!(folder.is_crashed(), "io {point}");
            assert!(result.is_err() || acknowledged == STEPS, "io {point}");
            let image = if point % 2 == 0 {
                folder.crash(rng.next_u64())
            } else {
                folder.crash_to_synced()
            };
            case.check_recovery(&image, acknowledged);
        }
    }
}

#[test]
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for seed in seeds() {
        let case = Case::new(seed);
        let mut rng = SplitMix64::new(seed ^ 99);
        let mut folder = SimFolder::default();
        let mut acknowledged = 0;
        for _ in 0..12 {
            let crash_after_io = Some(rng.below(80));
            folder.set_plan(FaultPlan { seed, crash_after_io, ..FaultPlan::default() });
            acknowledged = case.train(&folder).0.max(acknowledged);
            folder = folder.crash(rng.next_u64());
        }
        assert!(case.position(&case.open(&folder).unwrap()) >= acknowledged);
        case.train(&folder).1.unwrap();
        let mut engine = case.open(&folder).unwrap();
        assert!(case.job.records(&mut engine).unwrap() == case.oracle[STEPS as usize]);
    }
}

#[test]
fn failed_syncs_and_writes_poison_the_store_and_lose_no_checkpoint() {
    for seed in seeds() {
        let case = Case::new(seed);
        let mut failures = 0;
        for nth in 0..24 {
            for plan in [
                FaultPlan { seed, sync_error: Chance::Nth(nth), ..FaultPlan::default() },
                FaultPlan { seed, folder_sync_error: Chance::Nth(nth), ..FaultPlan::default() },
                FaultPlan { seed, write_error: Chance::Nth(3 * nth), ..FaultPlan::default() },
                FaultPlan { seed, read_error: Chance::Nth(3 * nth), ..FaultPlan::default() },
            ] {
                let folder = SimFolder::new(plan);
                let (acknowledged, result) = case.train(&folder);
                if result.is_ok() {
                    continue;
                }
                failures += 1;
                case.check_recovery(&folder.crash(seed ^ nth), acknowledged);
            }
        }
        assert!(failures > 20, "{failures}");
    }
}

#[test]
fn after_a_failed_sync_nothing_goes_on() {
    let case = Case::new(1);
    let folder = SimFolder::new(FaultPlan { sync_error: Chance::Nth(0), ..FaultPlan::default() });
    let mut engine = case.open(&folder).unwrap();
    for step in 0..6 {
        case.job.step(&mut engine, &case.job.features(), step).unwrap();
    }
    assert_eq!(engine.checkpoint("s", &[]).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(engine.checkpoint("s", &[]).unwrap_err().kind(), ErrorKind::Poisoned);
    let error = case.job.step(&mut engine, &case.job.features(), 6).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned);
}

#[test]
fn a_checkpoint_that_found_no_space_may_be_tried_again() {
    for seed in seeds() {
        let case = Case::new(seed);
        let folder = SimFolder::default();
        let mut engine = case.open(&folder).unwrap();
        for step in 0..STEPS {
            case.job.step(&mut engine, &case.job.features(), step).unwrap();
            // The disk fills up while the storage thread rests.
            engine.verify().unwrap();
            folder.set_plan(FaultPlan { enospc_after_bytes: Some(0), ..FaultPlan::default() });
            assert_eq!(engine.checkpoint("full", &[]).unwrap_err().kind(), ErrorKind::NoSpace);
            folder.set_plan(FaultPlan::default());
            if step % 4 == 3 {
                engine.checkpoint("free", &[]).unwrap();
            }
        }
        assert!(case.job.records(&mut engine).unwrap() == case.oracle[STEPS as usize]);
        drop(engine);
        let mut engine = case.open(&folder).unwrap();
        assert_eq!(case.position(&engine), STEPS - 1);
        assert!(case.job.records(&mut engine).unwrap() == case.oracle[STEPS as usize - 1]);
    }
}

#[test]
fn a_full_disk_is_no_space_and_loses_nothing() {
    for seed in seeds() {
        let case = Case::new(seed);
        let mut refusals = 0;
        for enospc_after_bytes in (4096..300_000).step_by(12 * 1024) {
            let plan = FaultPlan {
                seed,
                enospc_after_bytes: Some(enospc_after_bytes),
                ..FaultPlan::default()
            };
            let folder = SimFolder::new(plan);
            let (acknowledged, result) = case.train(&folder);
            let Err(error) = result else { continue };
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            refusals += 1;
            // Space is freed, the process starts again.
            folder.set_plan(FaultPlan::default());
            case.check_recovery(&folder, acknowledged);
        }
        assert!(refusals > 3, "{refusals}");
    }
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for base in seeds() {
        let case = Case::new(base);
        for luck in 0..96 {
            let seed = 1000 * base + luck;
            let lie = Chance::Nth(luck / 4 * 3);
            let plan = match luck % 4 {
                0 => FaultPlan { seed, lost_write: lie, ..FaultPlan::default() },
                1 => FaultPlan { seed, misdirected_write: lie, ..FaultPlan::default() },
                2 => FaultPlan { seed, torn_write: lie, ..FaultPlan::default() },
                _ => FaultPlan { seed, read_bit_flip: lie, ..FaultPlan::default() },
            };
            let folder = SimFolder::new(plan);
            let result = case.train(&folder).1;
            folder.set_plan(FaultPlan::default());
            let outcome = result.and_then(|()| {
                let mut engine = case.open(&folder)?;
                let at = case.position(&engine);
                engine.verify()?;
                let records = case.job.records(&mut engine)?;
                assert!(records == case.oracle[at as usize], "silent damage, seed {seed}");
                Ok(())
            });
            if let Err(error) = outcome {
                // A CURRENT that was never written looks like that of another program.
                let is_told =
                    error.kind() == ErrorKind::Corruption || error.message().starts_with("CURRENT");
                assert!(is_told, "seed {seed}: {error}");
                found += 1;
            }
        }
    }
    assert!(found > 10, "lies found: {found}");
}
