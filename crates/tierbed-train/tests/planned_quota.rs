//! The disk quota is for the folder: extents, two checkpoints side by side, the plan, and kept
//! checkpoints.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::sync::Arc;

use common::{memory_folder, smallest_config, Job};
use tierbed_core::{ErrorKind, OptimizerKind, Result};
use tierbed_io::{listed_bytes, Folder};
use tierbed_train::planned::{PlannedConfig, PlannedEngine};

const WINDOW: u32 = 3;
const STEPS_PER_CHECKPOINT: u64 = 7;
/// What lies beside the store, as its plan does.
const PLAN_BYTES: usize = 30_000;
/// A file of a kept checkpoint.
const KEPT_BYTES: usize = 20_000;

struct Case {
    job: Job,
    config: PlannedConfig,
    folder: Arc<dyn Folder>,
}

impl Case {
    fn new(seed: u64, disk_quota_bytes: Option<u64>) -> Self {
        let job = Job::pooled(OptimizerKind::Adagrad, seed);
        let config = smallest_config(&job, &job.plan(WINDOW));
        // Lists of chunks are longer when a full disk stops them anywhere.
        let dram_budget_bytes = config.dram_budget_bytes + (256 << 10);
        let config = PlannedConfig { disk_quota_bytes, dram_budget_bytes, ..config };
        let folder = memory_folder();
        folder.write_durable("order-0.plan", &vec![1; PLAN_BYTES]).unwrap();
        Self { job, config, folder }
    }

    fn folder_bytes(&self) -> u64 {
        listed_bytes(&*self.folder, |_| true).unwrap()
    }

    fn open(&self) -> PlannedEngine {
        let plan = self.job.plan(WINDOW);
        self.job.open(self.folder.clone(), &plan, &self.config).unwrap()
    }

    /// Trains to the end of the second epoch; returns the most bytes of the folder and the step
    /// of the last checkpoint.
    fn train(&self, most: &mut u64, saved: &mut Option<u64>) -> Result<()> {
        drop(self.open());
        self.folder.write_durable("kept.a.rows.kept", &vec![1; KEPT_BYTES]).unwrap();
        let (features, mut engine) = (self.job.features(), self.open());
        for step in 0..2 * self.job.batches {
            let stepped = self.job.step(&mut engine, &features, step);
            *most = self.folder_bytes().max(*most);
            stepped?;
            if (step + 1) % STEPS_PER_CHECKPOINT == 0 {
                let bytes = (step + 1).to_le_bytes();
                let steps = tierbed_core::store::Attachment { name: "steps", bytes: &bytes };
                let made = engine.checkpoint("c", &[steps]);
                *most = self.folder_bytes().max(*most);
                made?;
                *saved = Some(step + 1);
            }
        }
        Ok(())
    }
}

/// The small files that switch from one checkpoint to the next are not foreseen to the byte.
const SLACK_BYTES: u64 = 4096;

#[test]
fn a_folder_stays_within_its_quota_and_keeps_its_last_checkpoint() {
    for seed in 0..4 {
        let (mut most, mut saved) = (0, None);
        Case::new(seed, None).train(&mut most, &mut saved).unwrap();
        let (mut ended, mut stopped) = (0, 0);
        // Two checkpoints lie side by side when one replaces the other.
        for share in 2..=10 {
            let quota = most * share / 4;
            let case = Case::new(seed, Some(quota));
            let (mut used, mut saved) = (0, None);
            match case.train(&mut used, &mut saved) {
                Ok(()) => ended += 1,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                    stopped += 1;
                }
            }
            assert!(
                used <= quota.max((PLAN_BYTES + KEPT_BYTES) as u64) + SLACK_BYTES,
                "{used} of {quota}"
            );
            let steps = case.open().attachment("steps").unwrap();
            let steps = steps.map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
            assert_eq!(steps, saved, "the last checkpoint is in force");
        }
        assert!(ended >= 1 && stopped >= 4, "{ended} ended, {stopped} stopped");
    }
}
