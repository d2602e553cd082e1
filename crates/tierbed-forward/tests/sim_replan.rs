//! While rows move to another plan the disk may do what it likes: a reopened store stands at a
//! checkpoint along the old plan or the new one, bit for bit, or says that bytes are damaged.
//!
//! Seeds: two fixed ones, and `TIERBED_SIM_SEED` when set (`cargo x sim --seed N`).

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
use tierbed_core::{ErrorKind, OptimizerKind, Result};
use tierbed_forward::{ForwardConfig, ForwardEngine, Plan};
use tierbed_io::Folder;
use tierbed_kernels::Pooling;
use tierbed_sim::{Chance, FaultPlan, SimFolder};

/// Steps of the first day: one epoch and the middle of a window of the next.
const STEPS_OLD: u64 = 17;
/// Steps of the second day.
const STEPS_NEW: u64 = 9;

fn seeds() -> Vec<u64> {
    match std::env::var("TIERBED_SIM_SEED") {
        Ok(seed) => vec![seed.parse().expect("TIERBED_SIM_SEED is a number")],
        Err(_) => vec![1, 2],
    }
}

struct Case {
    days: [Job; 2],
    plans: [Plan; 2],
    config: ForwardConfig,
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
        let configs = plans.iter().map(|plan| smallest_config(&day, plan));
        let config = configs.max_by_key(|config| config.dram_budget_bytes).unwrap();
        let dram_budget_bytes = config.dram_budget_bytes + 16_000;
        let config = ForwardConfig { extent_bytes: 4096, dram_budget_bytes, ..config };
        let mut engine = day.open_oracle();
        let mut oracle = vec![day.oracle_records(&mut engine)];
        for (day, steps) in days.iter().zip([STEPS_OLD, STEPS_NEW]) {
            for step in 0..steps {
                day.oracle_step(&mut engine, &day.features(), step);
                oracle.push(day.oracle_records(&mut engine));
            }
        }
        let case = Self { days, plans, config, oracle };
        case.train(&SimFolder::default()).unwrap();
        case
    }

    /// Opens the store along the plan of its last checkpoint; returns the steps done.
    fn open(&self, folder: &SimFolder) -> Result<(ForwardEngine, u64)> {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let identity = ForwardEngine::plan_in_force(folder.clone())?;
        let day = usize::from(identity == Some(self.plans[1].identity()));
        let engine = self.days[day].open(folder, &self.plans[day], &self.config)?;
        let position = engine.position();
        let steps = position.epoch * self.days[day].batches + position.batch;
        Ok((engine, steps + day as u64 * STEPS_OLD))
    }

    /// Trains the steps that are missing, moving to the second plan when its day comes.
    fn train(&self, folder: &SimFolder) -> Result<()> {
        let (mut engine, mut done) = self.open(folder)?;
        if done <= STEPS_OLD && engine.plan().identity() == self.plans[0].identity() {
            let features = self.days[0].features();
            while done < STEPS_OLD {
                self.days[0].step(&mut engine, &features, done)?;
                done += 1;
            }
            engine = engine.replan(self.plans[1].clone(), "day", &[])?;
        }
        let features = self.days[1].features();
        while done < STEPS_OLD + STEPS_NEW {
            self.days[1].step(&mut engine, &features, done - STEPS_OLD)?;
            done += 1;
        }
        engine.checkpoint("end", &[])?;
        Ok(())
    }

    fn check_recovery(&self, folder: &SimFolder) {
        let (mut engine, done) = self.open(folder).unwrap();
        assert!([0, STEPS_OLD, STEPS_OLD + STEPS_NEW].contains(&done), "{done}");
        engine.verify().unwrap();
        let records = self.days[0].records(&mut engine).unwrap();
        assert!(records == self.oracle[done as usize], "records after {done} steps");
        drop(engine);
        self.train(folder).unwrap();
        let (mut engine, done) = self.open(folder).unwrap();
        assert!(self.days[0].records(&mut engine).unwrap() == self.oracle[done as usize]);
        let mut names = Folder::list(folder).unwrap().into_iter();
        assert!(!names.any(|name| name.starts_with("replan")), "scratch stays behind");
    }
}

#[test]
fn power_loss_at_any_io_leaves_one_plan_in_force() {
    for seed in seeds() {
        let case = Case::new(seed);
        let healthy = SimFolder::default();
        case.train(&healthy).unwrap();
        let io_count = healthy.io_count();
        assert!(io_count > 100, "{io_count}");
        let mut rng = SplitMix64::new(seed);
        for point in 0..io_count {
            let plan = FaultPlan { seed, crash_after_io: Some(point), ..FaultPlan::default() };
            let folder = SimFolder::new(plan);
            let _ = case.train(&folder);
            assert!(folder.is_crashed(), "io {point}");
            let image = match point % 2 {
                0 => folder.crash(rng.next_u64()),
                _ => folder.crash_to_synced(),
            };
            case.check_recovery(&image);
        }
    }
}

#[test]
fn failed_syncs_writes_and_reads_lose_nothing() {
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
                if case.train(&folder).is_ok() {
                    continue;
                }
                failures += 1;
                case.check_recovery(&folder.crash(seed ^ nth));
            }
        }
        assert!(failures > 20, "{failures}");
    }
}

#[test]
fn a_full_disk_is_no_space_and_the_old_plan_goes_on() {
    for seed in seeds() {
        let case = Case::new(seed);
        let mut refusals = 0;
        for enospc_after_bytes in (4096..800_000).step_by(12 * 1024) {
            let plan = FaultPlan {
                seed,
                enospc_after_bytes: Some(enospc_after_bytes),
                ..FaultPlan::default()
            };
            let folder = SimFolder::new(plan);
            let Err(error) = case.train(&folder) else { continue };
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            refusals += 1;
            folder.set_plan(FaultPlan::default());
            case.check_recovery(&folder);
        }
        assert!(refusals > 5, "{refusals}");
    }
}

#[test]
fn a_quota_that_holds_the_rows_once_refuses_the_move() {
    let case = Case::new(2);
    let folder = SimFolder::default();
    let (mut engine, _) = case.open(&folder).unwrap();
    for step in 0..STEPS_OLD {
        case.days[0].step(&mut engine, &case.days[0].features(), step).unwrap();
    }
    let file_bytes = engine.stats().file_bytes;
    assert!(file_bytes > 0);
    engine.checkpoint("c", &[]).unwrap();
    drop(engine);
    let config = ForwardConfig { disk_quota_bytes: Some(file_bytes), ..case.config.clone() };
    let opened: Arc<dyn Folder> = Arc::new(folder.clone());
    let engine = case.days[0].open(opened.clone(), &case.plans[0], &config).unwrap();
    let error = engine.replan(case.plans[1].clone(), "x", &[]).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    // What the move took is given back.
    let len = opened.open("forward.rows", tierbed_io::OpenMode::ReadOnly).unwrap().len_bytes();
    assert!(len.unwrap() <= file_bytes);
    case.check_recovery(&folder);
}

#[test]
fn lies_of_the_disk_are_corruption_never_other_values() {
    let mut found = 0;
    for base in seeds() {
        let case = Case::new(base);
        for luck in 0..96 {
            let seed = 1000 * base + luck;
            let lie = Chance::Nth(luck / 4 * 4);
            let plan = match luck % 4 {
                0 => FaultPlan { seed, lost_write: lie, ..FaultPlan::default() },
                1 => FaultPlan { seed, misdirected_write: lie, ..FaultPlan::default() },
                2 => FaultPlan { seed, torn_write: lie, ..FaultPlan::default() },
                _ => FaultPlan { seed, read_bit_flip: lie, ..FaultPlan::default() },
            };
            let folder = SimFolder::new(plan);
            let result = case.train(&folder);
            folder.set_plan(FaultPlan::default());
            let outcome = result.and_then(|()| {
                let (mut engine, done) = case.open(&folder)?;
                engine.verify()?;
                let records = case.days[0].records(&mut engine)?;
                assert!(records == case.oracle[done as usize], "silent damage, seed {seed}");
                Ok(())
            });
            if let Err(error) = outcome {
                let is_told =
                    error.kind() == ErrorKind::Corruption || error.message().starts_with("CURRENT");
                assert!(is_told, "seed {seed}: {error}");
                found += 1;
            }
        }
    }
    assert!(found > 10, "lies found: {found}");
}
