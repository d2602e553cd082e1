//! Whatever the disk does, a reopened store stands at a checkpoint, bit for bit, or says that
//! bytes are damaged. Never at something else.
//!
//! Seeds: four fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::sync::Arc;

use common::{smallest_with, Job};
use tierbed_core::store::Attachment;
use tierbed_core::{Error, ErrorKind, OptimizerKind, Result};
use tierbed_io::Folder;
use tierbed_kernels::Pooling;
use tierbed_sim::job::{
    check_failed_calls, check_full_disk, check_lie, check_power_loss, check_repeated_power_loss,
    lie, FailedCalls, SimJob, Told,
};
use tierbed_sim::{Chance, FaultPlan, SimFolder};
use tierbed_train::planned::{EpochPlan, PlannedConfig, PlannedEngine};

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1, 2, 3, 4])
}

/// Steps between checkpoints: they fall inside windows and between them.
const STRIDE: u64 = 5;
/// Steps of a run: almost two epochs.
const STEPS: u64 = 25;

/// Half of the seeds have spans of windows, with a storage thread and without.
fn span_windows(seed: u64) -> usize {
    match seed % 4 {
        1 | 2 => 2,
        _ => 0,
    }
}

/// A job with its plan, its budget and the records after each number of steps.
struct Case {
    job: Job,
    plan: EpochPlan,
    config: PlannedConfig,
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
        let config = smallest_with(&job, &plan, Some(span_windows(seed)));
        let config = PlannedConfig { extent_bytes: 4096, ..config };
        let mut engine = job.open_oracle();
        let mut oracle = vec![job.oracle_records(&mut engine)];
        for step in 0..STEPS {
            job.oracle_step(&mut engine, &job.features(), step);
            oracle.push(job.oracle_records(&mut engine));
        }
        // The oracle is that of a healthy disk, which must agree.
        let case = Self { job, plan, config, oracle };
        let trained = case.train(&SimFolder::default(), STEPS);
        trained.result.unwrap();
        assert_eq!(trained.acknowledged, STEPS);
        case
    }
}

impl SimJob for Case {
    type Store = PlannedEngine;

    fn open(&self, folder: &SimFolder) -> Result<PlannedEngine> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        self.job.open(folder, &self.plan, &self.config)
    }

    fn position(&self, engine: &mut PlannedEngine) -> Result<u64> {
        let position = engine.position();
        let at = position.epoch * self.job.batches + position.batch;
        let attached = engine.attachment("position")?;
        let told = attached.map_or(0, |text| String::from_utf8(text).unwrap().parse().unwrap());
        assert_eq!(told, at, "rows and attachments are of the same checkpoint");
        Ok(at)
    }

    fn step(&self, engine: &mut PlannedEngine, step: u64) -> Result<()> {
        self.job.step(engine, &self.job.features(), step).map(|_| ())
    }

    fn commit(&self, engine: &mut PlannedEngine, position: u64) -> Result<()> {
        let text = position.to_string();
        engine.checkpoint("s", &[Attachment { name: "position", bytes: text.as_bytes() }])?;
        Ok(())
    }

    fn verify(&self, engine: &mut PlannedEngine) -> Result<()> {
        engine.verify().map(|_| ())
    }

    fn is_right(&self, engine: &mut PlannedEngine, position: u64) -> Result<bool> {
        Ok(self.job.records(engine)? == self.oracle[position as usize])
    }

    fn steps(&self) -> u64 {
        STEPS
    }

    fn next_commit(&self, position: u64) -> u64 {
        position + STRIDE
    }

    fn tells_of_damage(&self, error: &Error) -> bool {
        common::tells_of_damage(error)
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
        assert_eq!(stats.span_windows, span_windows(seed));
    }
}

#[test]
fn power_loss_at_any_io_recovers_to_a_checkpoint() {
    for seed in seeds() {
        let io_count = check_power_loss(&Case::new(seed), seed, 1);
        assert!(io_count > 100, "{io_count}");
    }
}

#[test]
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for seed in seeds() {
        check_repeated_power_loss(&Case::new(seed), seed, 12, 80);
    }
}

#[test]
fn failed_syncs_and_writes_poison_the_store_and_lose_no_checkpoint() {
    for seed in seeds() {
        let calls = FailedCalls { count: 24, write_stride: 3, read_stride: 3 };
        let failure_count = check_failed_calls(&Case::new(seed), seed, calls);
        assert!(failure_count > 20, "{failure_count}");
    }
}

#[test]
fn after_a_failed_sync_nothing_goes_on() {
    let case = Case::new(1);
    let folder = SimFolder::default();
    let mut engine = case.open(&folder).unwrap();
    folder.set_plan(FaultPlan { sync_error: Chance::Nth(0), ..FaultPlan::default() });
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
                case.commit(&mut engine, step + 1).unwrap();
            }
        }
        assert!(case.job.records(&mut engine).unwrap() == case.oracle[STEPS as usize]);
        drop(engine);
        let mut engine = case.open(&folder).unwrap();
        assert_eq!(case.position(&mut engine).unwrap(), STEPS - 1);
        assert!(case.job.records(&mut engine).unwrap() == case.oracle[STEPS as usize - 1]);
    }
}

#[test]
fn a_full_disk_is_no_space_and_loses_nothing() {
    for seed in seeds() {
        let disk_bytes = (4096..300_000).step_by(12 * 1024);
        let refusals = check_full_disk(&Case::new(seed), seed, disk_bytes);
        assert!(refusals > 3, "{refusals}");
    }
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for base in seeds() {
        let case = Case::new(base);
        for luck in 0..96 {
            let told = check_lie(&case, lie(luck % 4, luck / 4 * 3, 1000 * base + luck));
            found += u64::from(told != Told::Never);
        }
    }
    assert!(found > 10, "lies found: {found}");
}
