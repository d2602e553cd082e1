//! Whatever the disk does, a reopened engine stands at a checkpoint, bit for bit, or says that
//! bytes are damaged. Never at something else.
//!
//! Seeds: four fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use common::{all_records, Job};
use tierbed_core::store::Attachment;
use tierbed_core::{OptimizerKind, Result};
use tierbed_io::Folder;
use tierbed_sim::job::{
    check_failed_calls, check_full_disk, check_lie, check_power_loss, check_repeated_power_loss,
    lie, FailedCalls, SimJob, Told,
};
use tierbed_sim::SimFolder;
use tierbed_train::window::{FeatureLayout, Pooling, WindowConfig, WindowEngine};

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1, 2, 3, 4])
}

/// Steps between checkpoints.
const STRIDE: u64 = 3;

/// A job of an engine.
struct Case {
    job: Job,
    steps: u64,
    oracle: OnceCell<BTreeMap<u64, Vec<u32>>>,
}

impl Case {
    fn new(seed: u64, steps: u64) -> Self {
        let job = Job {
            seed,
            tables: vec![(9, 400), (64, 60)],
            features: vec![(0, Pooling::Sum), (1, Pooling::Mean)],
            batch_size: 4,
            ..Job::pooled(OptimizerKind::ALL[seed as usize % 5], seed)
        };
        Self { job, steps, oracle: OnceCell::new() }
    }

    /// Records after each number of steps, from a run on a healthy disk.
    fn oracle(&self) -> &BTreeMap<u64, Vec<u32>> {
        self.oracle.get_or_init(|| {
            let (mut engine, plan) = self.open(&SimFolder::default()).unwrap();
            let mut after = BTreeMap::from([(0, all_records(&mut engine))]);
            for step in 0..self.steps {
                self.job.step(&mut engine, &plan, step).unwrap();
                after.insert(step + 1, all_records(&mut engine));
            }
            after
        })
    }
}

impl SimJob for Case {
    type Store = (WindowEngine, FeatureLayout);

    fn open(&self, folder: &SimFolder) -> Result<Self::Store> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let config = WindowConfig { io_engine: "inline".into(), ..WindowConfig::new(192 << 10) };
        let mut engine = WindowEngine::open_in(Some(folder), &config)?;
        let plan = self.job.set_up(&mut engine)?;
        Ok((engine, plan))
    }

    fn position(&self, (engine, _): &mut Self::Store) -> Result<u64> {
        let bytes = engine.attachment("position")?;
        Ok(bytes.map_or(0, |bytes| String::from_utf8(bytes).unwrap().parse().unwrap()))
    }

    fn step(&self, (engine, plan): &mut Self::Store, step: u64) -> Result<()> {
        self.job.step(engine, plan, step).map(|_| ())
    }

    fn commit(&self, (engine, _): &mut Self::Store, position: u64) -> Result<()> {
        let text = position.to_string();
        engine.checkpoint("s", &[Attachment { name: "position", bytes: text.as_bytes() }])?;
        Ok(())
    }

    fn verify(&self, (engine, _): &mut Self::Store) -> Result<()> {
        engine.verify().map(|_| ())
    }

    fn is_right(&self, (engine, _): &mut Self::Store, position: u64) -> Result<bool> {
        Ok(all_records(engine) == self.oracle()[&position])
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn next_commit(&self, position: u64) -> u64 {
        position + STRIDE
    }
}

#[test]
fn power_loss_at_any_io_recovers_to_a_checkpoint() {
    for seed in seeds() {
        let io_count = check_power_loss(&Case::new(seed, 12), seed, 1);
        assert!(io_count > 100, "{io_count}");
    }
}

#[test]
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for seed in seeds() {
        check_repeated_power_loss(&Case::new(seed, 30), seed, 12, 150);
    }
}

#[test]
fn failed_calls_poison_the_store_and_lose_no_checkpoint() {
    for seed in seeds() {
        let calls = FailedCalls { count: 12, write_stride: 7, read_stride: 9 };
        let failure_count = check_failed_calls(&Case::new(seed, 12), seed, calls);
        assert!(failure_count > 10, "{failure_count}");
    }
}

#[test]
fn a_full_disk_is_no_space_and_loses_nothing() {
    for seed in seeds() {
        let disk_bytes = (8192..400_000).step_by(24 * 1024);
        let refusals = check_full_disk(&Case::new(seed, 12), seed, disk_bytes);
        assert!(refusals > 3, "{refusals}");
    }
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for seed in seeds().into_iter().flat_map(|seed| (0..24).map(move |at| 100 * seed + at)) {
        let told = check_lie(&Case::new(seed, 12), lie(seed % 4, seed % 90, seed));
        found += u64::from(told != Told::Never);
    }
    assert!(found > 0, "no lie was ever told");
}
