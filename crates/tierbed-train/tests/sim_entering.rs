//! While rows come to a plan the disk may do what it likes: a reopened store stands at a
//! checkpoint by window or along the plan, bit for bit, or says that bytes are damaged.
//!
//! Seeds: two fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/auto.rs"]
mod common;

use std::sync::Arc;

use common::Run;
use tierbed_core::{Error, ErrorKind, OptimizerKind, Result};
use tierbed_io::Folder;
use tierbed_kernels::Pooling;
use tierbed_sim::job::{
    check_failed_calls, check_full_disk, check_lie, check_power_loss, check_repeated_power_loss,
    lie, FailedCalls, SimJob, Told,
};
use tierbed_sim::SimFolder;
use tierbed_train::{OnMismatch, Order, OrderConfig, ShardedEngine};

/// Steps by window, one epoch, and in all.
const STEPS_OLD: u64 = 8;
const STEPS: u64 = 19;
const STRIDE: u64 = 4;

struct Case {
    run: Run,
    shards: Option<u32>,
    /// Records after each number of steps.
    oracle: Vec<Vec<Vec<u32>>>,
}

impl Case {
    fn new(seed: u64) -> Self {
        Self::of_shards(seed, None)
    }

    fn of_shards(seed: u64, shards: Option<u32>) -> Self {
        let run = Run {
            // With the first seed an array over all rows finds first uses, with the other parts.
            tables: vec![(9, 2500), (36, 60), (1, if seed % 2 == 1 { 97 } else { 30_000 })],
            features: vec![(0, Pooling::Sum), (1, Pooling::Mean), (2, Pooling::Sum)],
            samples: 8,
            batches: STEPS_OLD,
            budget_bytes: match shards {
                Some(_) => 6 << 20,
                None if seed % 2 == 1 => 4 << 20,
                None => 1_200_000,
            },
            ..Run::pooled(OptimizerKind::ALL[seed as usize % OptimizerKind::ALL.len()])
        };
        let mut engine = run.oracle();
        let mut oracle = vec![run.records(&mut engine).unwrap()];
        for step in 0..STEPS {
            run.step(&mut engine, step).unwrap();
            oracle.push(run.records(&mut engine).unwrap());
        }
        let case = Self { run, shards, oracle };
        let folder = SimFolder::default();
        case.train(&folder, case.steps()).result.unwrap();
        let names = Folder::list(&folder).unwrap();
        assert!(names.iter().any(|name| name.ends_with("forward.rows")), "{names:?}");
        case
    }
}

impl SimJob for Case {
    type Store = ShardedEngine;

    fn open(&self, folder: &SimFolder) -> Result<ShardedEngine> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        if self.shards.is_some() {
            return self.run.open(Some(folder), &self.run.config(Order::Auto, self.shards));
        }
        // Steps by window are allowed, and a plan that is refused is an error.
        let on_mismatch = Some(OnMismatch::Fallback);
        let config = OrderConfig { on_mismatch, ..self.run.config(Order::Forward, None) };
        self.run.open(Some(folder), &config)
    }

    fn position(&self, engine: &mut ShardedEngine) -> Result<u64> {
        let told = self.run.steps_done(engine)?;
        if let Some((epoch, batch)) = engine.engine().position() {
            assert_eq!(told, STEPS_OLD + epoch * self.run.batches + batch);
        }
        Ok(told)
    }

    fn step(&self, engine: &mut ShardedEngine, step: u64) -> Result<()> {
        if step >= STEPS_OLD && engine.engine().position().is_none() {
            self.run.follow(engine)?;
        }
        self.run.step(engine, step).map(drop)
    }

    fn commit(&self, engine: &mut ShardedEngine, position: u64) -> Result<()> {
        self.run.checkpoint(engine, position)?;
        match position {
            STEPS_OLD => self.run.follow(engine),
            _ => Ok(()),
        }
    }

    fn verify(&self, engine: &mut ShardedEngine) -> Result<()> {
        engine.verify().map(drop)
    }

    fn is_right(&self, engine: &mut ShardedEngine, position: u64) -> Result<bool> {
        Ok(self.run.records(engine)? == self.oracle[position as usize])
    }

    fn steps(&self) -> u64 {
        STEPS
    }

    fn next_commit(&self, position: u64) -> u64 {
        position + STRIDE
    }

    // Shards write at the same time.
    fn is_repeatable(&self) -> bool {
        self.shards.is_none()
    }

    fn tells_of_damage(&self, error: &Error) -> bool {
        // A plan that was just made, and `CURRENT` of another version, are other damage.
        let is_other = |begin: &str| error.message().starts_with(begin);
        error.kind() == ErrorKind::Corruption
            || is_other("CURRENT")
            || is_other("plan was never finished")
    }

    fn check_folder(&self, folder: &SimFolder) {
        let names = Folder::list(folder).unwrap();
        assert!(!names.iter().any(|name| name.starts_with("replan")), "scratch stays: {names:?}");
        for shard in ["", "shard0.", "shard1."] {
            let has = |name: &str| names.contains(&format!("{shard}{name}"));
            let is_window = (0..3).any(|table| has(&format!("t{table}.rows")));
            assert!(!(has("forward.rows") && is_window), "rows are there twice: {names:?}");
        }
    }
}

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1, 2])
}

#[test]
fn power_loss_at_any_io_leaves_one_order_in_force() {
    for seed in seeds() {
        let io_count = check_power_loss(&Case::new(seed), seed, 1);
        assert!(io_count > 100, "{io_count}");
    }
}

#[test]
fn power_loss_at_any_io_of_any_shard_leaves_one_order_in_force_for_all() {
    for seed in seeds() {
        let io_count = check_power_loss(&Case::of_shards(seed, Some(2)), seed, 5);
        assert!(io_count > 100, "{io_count}");
        check_repeated_power_loss(&Case::of_shards(seed, Some(2)), seed, 8, 60);
    }
}

#[test]
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for seed in seeds() {
        check_repeated_power_loss(&Case::new(seed), seed, 8, 60);
    }
}

#[test]
fn failed_syncs_writes_and_reads_lose_nothing() {
    for seed in seeds() {
        let calls = FailedCalls { count: 24, write_stride: 3, read_stride: 3 };
        let failure_count = check_failed_calls(&Case::new(seed), seed, calls);
        assert!(failure_count > 20, "{failure_count}");
    }
}

#[test]
fn a_full_disk_is_no_space_and_the_rows_are_where_they_were() {
    for seed in seeds() {
        let disk_bytes = (4096..900_000).step_by(12 * 1024);
        let refusals = check_full_disk(&Case::new(seed), seed, disk_bytes);
        assert!(refusals > 5, "{refusals}");
    }
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for base in seeds() {
        let case = Case::new(base);
        for luck in 0..96 {
            let told = check_lie(&case, lie(luck % 4, luck / 4 * 4, 1000 * base + luck));
            found += u64::from(told != Told::Never);
        }
    }
    assert!(found > 10, "lies found: {found}");
}
