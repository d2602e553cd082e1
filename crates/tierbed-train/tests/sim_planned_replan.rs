//! While rows move to another plan the disk may do what it likes: a reopened store stands at a
//! checkpoint along the old plan or the new one, bit for bit, or says that bytes are damaged.
//!
//! Seeds: two fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::sync::Arc;

use common::{smallest_with, Job};
use tierbed_core::{Error, ErrorKind, OptimizerKind, Result};
use tierbed_io::Folder;
use tierbed_kernels::Pooling;
use tierbed_sim::job::{
    check_failed_calls, check_full_disk, check_lie, check_power_loss, check_recovery, lie,
    FailedCalls, SimJob, Told,
};
use tierbed_sim::SimFolder;
use tierbed_train::planned::{EpochPlan, PlannedConfig, PlannedEngine};

/// Steps of the first day: one epoch and the middle of a window of the next.
const STEPS_OLD: u64 = 17;
/// Steps of the second day.
const STEPS_NEW: u64 = 9;

fn seeds() -> Vec<u64> {
    tierbed_sim::job::seeds(&[1, 2])
}

struct Case {
    days: [Job; 2],
    plans: [EpochPlan; 2],
    config: PlannedConfig,
    /// Records after each number of steps, of both days.
    oracle: Vec<Vec<u32>>,
}

impl Case {
    fn new(seed: u64) -> Self {
        let day = Job {
            tables: vec![(9, 6000), (64, 60)],
            features: vec![(0, Pooling::Sum), (1, Pooling::Mean)],
            batch_size: 8,
            batches: 14,
            ..Job::pooled(OptimizerKind::ALL[seed as usize % 5], seed)
        };
        let days = [day.clone(), day.on_day(1, 11)];
        let plans = [days[0].plan(1 + seed as u32 % 3), days[1].plan(2)];
        // Odd seeds have spans of windows in both plans.
        let span_windows = if seed % 2 == 1 { 2 } else { 0 };
        let configs = plans.iter().map(|plan| smallest_with(&day, plan, Some(span_windows)));
        let config = configs.max_by_key(|config| config.dram_budget_bytes).unwrap();
        let dram_budget_bytes = config.dram_budget_bytes + 16_000;
        let config = PlannedConfig { extent_bytes: 4096, dram_budget_bytes, ..config };
        let mut engine = day.open_oracle();
        let mut oracle = vec![day.oracle_records(&mut engine)];
        for (day, steps) in days.iter().zip([STEPS_OLD, STEPS_NEW]) {
            for step in 0..steps {
                day.oracle_step(&mut engine, &day.features(), step);
                oracle.push(day.oracle_records(&mut engine));
            }
        }
        let case = Self { days, plans, config, oracle };
        case.train(&SimFolder::default(), case.steps()).result.unwrap();
        case
    }
}

impl Case {
    fn replan(&self, moving: &mut Moving) -> Result<()> {
        let engine = moving.engine.take().unwrap();
        moving.engine = Some(engine.replan(self.plans[1].clone(), "day", &[])?);
        moving.day = 1;
        Ok(())
    }
}

/// An engine that moves to the second plan when its day comes.
struct Moving {
    /// `None` while it moves, and when that failed.
    engine: Option<PlannedEngine>,
    day: usize,
}

impl Moving {
    fn engine(&mut self) -> &mut PlannedEngine {
        self.engine.as_mut().unwrap()
    }
}

impl SimJob for Case {
    type Store = Moving;

    /// Opens the store along the plan of its last checkpoint.
    fn open(&self, folder: &SimFolder) -> Result<Moving> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let identity = PlannedEngine::plan_in_force(folder.clone())?;
        let day = usize::from(identity == Some(self.plans[1].identity()));
        let engine = self.days[day].open(folder, &self.plans[day], &self.config)?;
        Ok(Moving { engine: Some(engine), day })
    }

    fn position(&self, moving: &mut Moving) -> Result<u64> {
        let position = moving.engine().position();
        let steps = position.epoch * self.days[moving.day].batches + position.batch;
        Ok(steps + moving.day as u64 * STEPS_OLD)
    }

    fn step(&self, moving: &mut Moving, step: u64) -> Result<()> {
        if step >= STEPS_OLD && moving.day == 0 {
            // The first day was committed along its own plan.
            self.replan(moving)?;
        }
        let day = &self.days[moving.day];
        let step = step - moving.day as u64 * STEPS_OLD;
        day.step(moving.engine(), &day.features(), step).map(|_| ())
    }

    fn commit(&self, moving: &mut Moving, position: u64) -> Result<()> {
        if position > STEPS_OLD {
            return moving.engine().checkpoint("end", &[]).map(|_| ());
        }
        self.replan(moving)
    }

    fn verify(&self, moving: &mut Moving) -> Result<()> {
        moving.engine().verify().map(|_| ())
    }

    fn is_right(&self, moving: &mut Moving, position: u64) -> Result<bool> {
        Ok(self.days[0].records(moving.engine())? == self.oracle[position as usize])
    }

    fn steps(&self) -> u64 {
        STEPS_OLD + STEPS_NEW
    }

    /// The end of the first day is committed along the second plan.
    fn next_commit(&self, position: u64) -> u64 {
        if position < STEPS_OLD {
            STEPS_OLD
        } else {
            STEPS_OLD + STEPS_NEW
        }
    }

    fn tells_of_damage(&self, error: &Error) -> bool {
        common::tells_of_damage(error)
    }

    fn check_folder(&self, folder: &SimFolder) {
        let mut names = Folder::list(folder).unwrap().into_iter();
        assert!(!names.any(|name| name.starts_with("replan")), "scratch stays behind");
    }
}

#[test]
fn power_loss_at_any_io_leaves_one_plan_in_force() {
    for seed in seeds() {
        let io_count = check_power_loss(&Case::new(seed), seed, 1);
        assert!(io_count > 100, "{io_count}");
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
fn a_full_disk_is_no_space_and_the_old_plan_goes_on() {
    for seed in seeds() {
        let disk_bytes = (4096..800_000).step_by(12 * 1024);
        let refusals = check_full_disk(&Case::new(seed), seed, disk_bytes);
        assert!(refusals > 5, "{refusals}");
    }
}

#[test]
fn a_quota_that_holds_the_rows_once_refuses_the_move() {
    let case = Case::new(2);
    let folder = SimFolder::default();
    let mut moving = case.open(&folder).unwrap();
    for step in 0..STEPS_OLD {
        case.step(&mut moving, step).unwrap();
    }
    let mut engine = moving.engine.unwrap();
    let file_bytes = engine.stats().file_bytes;
    assert!(file_bytes > 0);
    engine.checkpoint("c", &[]).unwrap();
    drop(engine);
    let config = PlannedConfig { disk_quota_bytes: Some(file_bytes), ..case.config.clone() };
    let opened: Arc<dyn Folder> = Arc::new(folder.clone());
    let engine = case.days[0].open(opened.clone(), &case.plans[0], &config).unwrap();
    let error = engine.replan(case.plans[1].clone(), "x", &[]).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    // What the move took is given back.
    let len = opened.open("forward.rows", tierbed_io::OpenMode::ReadOnly).unwrap().len_bytes();
    assert!(len.unwrap() <= file_bytes);
    check_recovery(&case, &folder, STEPS_OLD, "quota");
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
