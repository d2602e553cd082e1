//! Power fails at any I/O of any shard: a reopened store stands at one checkpoint of all of them.
//!
//! Shards write at the same time, so a seed does not repeat the order of their I/Os; every order
//! must recover.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/auto.rs"]
mod common;

use std::sync::Arc;

use common::Run;
use tierbed_core::{Error, OptimizerKind, Result};
use tierbed_io::Folder;
use tierbed_sim::job::{
    check_failed_calls, check_power_loss, check_repeated_power_loss, FailedCalls, SimJob,
};
use tierbed_sim::SimFolder;
use tierbed_train::{Order, ShardedEngine};

const STRIDE: u64 = 4;
const STEPS: u64 = 12;

struct Case {
    run: Run,
    order: Order,
    /// Records after each number of steps.
    oracle: Vec<Vec<Vec<u32>>>,
}

impl Case {
    fn new(order: Order) -> Self {
        let run = Run {
            tables: vec![(9, 400), (36, 60), (1, 97)],
            features: Run::unpooled().features[..3]
                .iter()
                .map(|(t, _)| (*t, tierbed_kernels::Pooling::Sum))
                .collect(),
            samples: 8,
            batches: 7,
            budget_bytes: 3 << 20,
            ..Run::pooled(OptimizerKind::Adagrad)
        };
        let mut engine = run.oracle();
        let mut oracle = vec![run.records(&mut engine).unwrap()];
        for step in 0..STEPS {
            run.step(&mut engine, step).unwrap();
            oracle.push(run.records(&mut engine).unwrap());
        }
        Self { run, order, oracle }
    }
}

impl SimJob for Case {
    type Store = ShardedEngine;

    fn open(&self, folder: &SimFolder) -> Result<ShardedEngine> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let mut engine = self.run.open(Some(folder), &self.run.config(self.order, Some(2)))?;
        if self.order == Order::Forward {
            self.run.follow(&mut engine)?;
        }
        Ok(engine)
    }

    fn position(&self, engine: &mut ShardedEngine) -> Result<u64> {
        let told = self.run.steps_done(engine)?;
        if let Some((epoch, batch)) = engine.engine().position() {
            assert_eq!(told, epoch * self.run.batches + batch, "shards and attachments agree");
        }
        Ok(told)
    }

    fn step(&self, engine: &mut ShardedEngine, step: u64) -> Result<()> {
        self.run.step(engine, step).map(drop)
    }

    fn commit(&self, engine: &mut ShardedEngine, position: u64) -> Result<()> {
        self.run.checkpoint(engine, position)
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

    fn is_repeatable(&self) -> bool {
        false
    }

    fn tells_of_damage(&self, error: &Error) -> bool {
        error.kind() == tierbed_core::ErrorKind::Corruption
    }
}

#[test]
fn power_loss_at_any_io_of_any_shard_recovers_to_one_checkpoint() {
    for (order, stride) in [(Order::Forward, 5), (Order::Window, 3)] {
        let io_count = check_power_loss(&Case::new(order), 1, stride);
        assert!(io_count > 50, "{io_count}");
    }
}

#[test]
fn repeated_power_loss_and_resume_reaches_the_same_end() {
    for order in [Order::Forward, Order::Window] {
        check_repeated_power_loss(&Case::new(order), 2, 8, 60);
    }
}

#[test]
fn a_failed_call_of_one_shard_loses_no_checkpoint_of_any() {
    for order in [Order::Forward, Order::Window] {
        let calls = FailedCalls { count: 8, write_stride: 3, read_stride: 3 };
        let failure_count = check_failed_calls(&Case::new(order), 3, calls);
        assert!(failure_count > 5, "{failure_count}");
    }
}
