//! A store outlives its plan: whatever order comes next, the bits are those of memory.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use common::{memory_folder, smallest_config, Job};
use proptest::prelude::*;
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind};
use tierbed_train::planned::{EpochPlan, PlannedConfig, PlannedEngine};

/// The smallest budget in which each of the plans opens and a store without rows moves from each
/// to the next; whoever needs more names how much.
fn config_for(job: &Job, plans: &[&EpochPlan]) -> PlannedConfig {
    let configs = plans.iter().map(|plan| smallest_config(job, plan));
    let mut config = configs.max_by_key(|config| config.dram_budget_bytes).unwrap();
    // With the budget grows what the rows come from, so a move may name more than once.
    for _ in 0..20 {
        let first = job.open(memory_folder(), plans[0], &config).unwrap();
        let moved = plans[1..]
            .iter()
            .try_fold(first, |engine, plan| engine.replan((*plan).clone(), "next", &[]));
        let Err(error) = moved else { return config };
        let minimum = error.context().iter().find(|(key, _)| *key == "minimum_bytes");
        let minimum = minimum.unwrap_or_else(|| panic!("{error}")).1.parse().unwrap();
        assert!(minimum > config.dram_budget_bytes, "{error}");
        config.dram_budget_bytes = minimum;
    }
    panic!("the minimum named by the error does not do");
}

/// Trains each day for some steps, one plan after the other, beside memory.
fn check_days(job: &Job, days: &[(u64, u64, u32, u64)], spare_bytes: u64) {
    let days: Vec<_> = days
        .iter()
        .map(|&(day, batches, window, steps)| {
            let today = job.on_day(day, batches);
            let plan = today.plan(window);
            (today, plan, steps)
        })
        .collect();
    let plans: Vec<_> = days.iter().map(|(_, plan, _)| plan).collect();
    let mut config = config_for(job, &plans);
    config.dram_budget_bytes += spare_bytes;
    let (features, folder, mut oracle) = (job.features(), memory_folder(), job.open_oracle());
    let mut engine = job.open(folder.clone(), plans[0], &config).unwrap();
    for (at, (today, plan, steps)) in days.iter().enumerate() {
        if at > 0 {
            let text = at.to_string();
            let attachments = [Attachment { name: "day", bytes: text.as_bytes() }];
            engine = engine.replan(plan.clone(), "next", &attachments).unwrap();
            assert_eq!(engine.attachment("day").unwrap().unwrap(), text.as_bytes());
            assert_eq!((engine.position().epoch, engine.position().batch), (0, 0));
            assert_eq!(
                folder.list().unwrap().iter().filter(|f| f.starts_with("replan")).count(),
                0
            );
            engine.verify().unwrap();
            assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
        }
        for step in 0..*steps {
            let expected = today.oracle_step(&mut oracle, &features, step);
            let found = today.step(&mut engine, &features, step).unwrap();
            assert!(found == expected, "step {step} of day {at}");
        }
        let report = engine.budget().report();
        assert!(report.peak_bytes <= config.dram_budget_bytes);
    }
    assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
    engine.checkpoint("end", &[]).unwrap();
    let mut rows = std::collections::BTreeSet::new();
    engine
        .scan_all(&mut |table, row, _| {
            assert!(rows.insert((table, row)), "a row has two homes");
            Ok(())
        })
        .unwrap();
    drop(engine);
    let (today, plan, _) = days.last().unwrap();
    config.dram_budget_bytes += 20_000;
    let mut engine = today.open(folder, plan, &config).unwrap();
    assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
}

#[test]
fn day_after_day_gives_the_bits_of_memory() {
    for (seed, optimizer) in OptimizerKind::ALL.into_iter().enumerate() {
        let job = Job::pooled(optimizer, seed as u64);
        // Whole epochs, the middle of a window, no step at all, and back to the first day.
        let days = [(0, 30, 3, 30), (1, 20, 4, 47), (2, 25, 1, 0), (3, 9, 2, 9), (0, 30, 3, 31)];
        check_days(&job, &days, 1000 * seed as u64);
    }
}

#[test]
fn a_reshuffled_epoch_is_another_plan() {
    check_days(&Job::unpooled(OptimizerKind::Adam, 5), &[(0, 30, 4, 60), (7, 30, 5, 60)], 0);
    check_days(&Job::unpooled(OptimizerKind::Adam, 5), &[(0, 30, 40, 60), (7, 30, 1, 60)], 1 << 20);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_days_give_the_bits_of_memory(
        seed in any::<u64>(),
        tables in proptest::collection::vec((1u32..40, 1u64..900), 1..4),
        features in proptest::collection::vec(0usize..4, 1..5),
        optimizer in 0usize..5,
        days in proptest::collection::vec((0u64..4, 1u64..20, 1u32..9, 0u64..40), 2..5),
        spare in 0u64..100_000,
    ) {
        let pooling = tierbed_kernels::Pooling::Sum;
        let job = Job {
            features: features.iter().map(|at| (at % tables.len(), pooling)).collect(),
            tables: tables.clone(),
            ..Job::pooled(OptimizerKind::ALL[optimizer], seed)
        };
        // Lists of chunks that were written with less memory need some more of it.
        check_days(&job, &days, 20_000 + spare);
    }
}

#[test]
fn a_store_opens_with_the_plan_in_force() {
    let job = Job::pooled(OptimizerKind::Adagrad, 4);
    let tomorrow = job.on_day(1, 20);
    let (old, new) = (job.plan(3), tomorrow.plan(4));
    let config = config_for(&job, &[&old, &new]);
    let (features, folder, mut oracle) = (job.features(), memory_folder(), job.open_oracle());
    let identity = || PlannedEngine::plan_in_force(folder.clone()).unwrap();
    assert_eq!(identity(), None);
    let mut engine = job.open(folder.clone(), &old, &config).unwrap();
    for step in 0..33 {
        job.oracle_step(&mut oracle, &features, step);
        job.step(&mut engine, &features, step).unwrap();
    }
    engine.checkpoint("model", &[]).unwrap();
    drop(engine);
    assert_eq!(identity(), Some(old.identity()));
    let engine = job.open(folder.clone(), &old, &config).unwrap();
    let attachments = [Attachment { name: "dense", bytes: b"weights" }];
    let mut engine = engine.replan(new.clone(), "model", &attachments).unwrap();
    assert_eq!(engine.last_checkpoint().unwrap().name, "model");
    assert_eq!(engine.attachment("dense").unwrap().unwrap(), b"weights");
    for step in 0..50 {
        let expected = tomorrow.oracle_step(&mut oracle, &features, step);
        assert!(tomorrow.step(&mut engine, &features, step).unwrap() == expected);
    }
    engine.checkpoint("model", &[]).unwrap();
    drop(engine);
    assert_eq!(identity(), Some(new.identity()));
    let engine = tomorrow.open(folder.clone(), &new, &config).unwrap();
    assert_eq!((engine.position().epoch, engine.position().batch), (2, 10));
}

#[test]
fn tables_grow_with_the_next_plan() {
    for reopens in [false, true] {
        let job = Job::pooled(OptimizerKind::RowWiseAdagrad, 4);
        let mut tomorrow = job.on_day(1, 20);
        tomorrow.tables[0].1 += 700;
        tomorrow.tables[4].1 += 1;
        let (old, new) = (job.plan(3), tomorrow.plan(4));
        let mut config = smallest_config(&tomorrow, &new);
        config.dram_budget_bytes += 40_000;
        // Memory starts with the larger tables: rows not used yet have their initial values.
        let (features, folder) = (job.features(), memory_folder());
        let mut oracle = tomorrow.open_oracle();
        let mut engine = job.open(folder.clone(), &old, &config).unwrap();
        for step in 0..33 {
            job.oracle_step(&mut oracle, &features, step);
            job.step(&mut engine, &features, step).unwrap();
        }
        if reopens {
            engine.checkpoint("c", &[]).unwrap();
            drop(engine);
            engine = job.open(folder.clone(), &old, &config).unwrap();
        }
        let mut engine = engine.replan(new.clone(), "c", &[]).unwrap();
        assert_eq!(engine.schema(), &tomorrow.schema());
        for step in 0..40 {
            let expected = tomorrow.oracle_step(&mut oracle, &features, step);
            assert!(tomorrow.step(&mut engine, &features, step).unwrap() == expected);
        }
        assert!(tomorrow.records(&mut engine).unwrap() == tomorrow.oracle_records(&mut oracle));
        // Back is refused: tables do not shrink.
        let error = engine.replan(old.clone(), "c", &[]).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn many_rows_move_in_little_memory() {
    for spare_bytes in [0, 30_000, 8 << 20] {
        let job = Job { tables: vec![(9, 50_000); 6], ..Job::pooled(OptimizerKind::Adam, 8) };
        check_days(&job, &[(5, 13, 3, 13), (0, 30, 3, 60)], spare_bytes);
    }
}

#[test]
fn a_plan_of_other_tables_is_refused() {
    let job = Job::pooled(OptimizerKind::Sgd, 3);
    let plan = job.plan(3);
    let other = Job { tables: vec![(9, 2001); 6], ..job.clone() };
    let engine = job.open(memory_folder(), &plan, &PlannedConfig::new(64 << 20)).unwrap();
    assert_eq!(engine.replan(other.plan(3), "x", &[]).unwrap_err().kind(), ErrorKind::Invalid);
}
