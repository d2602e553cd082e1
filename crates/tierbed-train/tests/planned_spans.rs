//! Windows that share a bucket while they are far away change where rows wait, never a value.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use common::{memory_folder, smallest_config, smallest_with, Job};
use tierbed_core::OptimizerKind;
use tierbed_train::planned::{EpochPlan, PlannedConfig, PlannedStats};

fn train(job: &Job, plan: &EpochPlan, config: &PlannedConfig, steps: u64) -> PlannedStats {
    let (features, mut oracle) = (job.features(), job.open_oracle());
    let mut engine = job.open(memory_folder(), plan, config).unwrap();
    for step in 0..steps {
        let expected = job.oracle_step(&mut oracle, &features, step);
        assert!(job.step(&mut engine, &features, step).unwrap() == expected, "step {step}");
    }
    let stats = engine.stats();
    assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle), "records differ");
    assert!(engine.budget().report().peak_bytes <= config.dram_budget_bytes);
    stats
}

#[test]
fn spans_of_any_length_give_the_same_bits() {
    for (seed, (window, span_windows)) in
        [(1, 2), (1, 6), (2, 3), (1, 13), (3, 4)].iter().enumerate()
    {
        let job = Job::pooled(OptimizerKind::ALL[seed], seed as u64);
        let plan = job.plan(*window);
        let stats = train(&job, &plan, &smallest_with(&job, &plan, Some(*span_windows)), 110);
        assert_eq!(stats.span_windows, *span_windows);
        assert!(stats.rows_flushed > 1000 && stats.rows_read > 1000, "{stats:?}");
    }
}

#[test]
fn too_few_windows_have_a_bucket_each() {
    let job = Job::pooled(OptimizerKind::Sgd, 1);
    let plan = job.plan(20);
    assert_eq!(train(&job, &plan, &smallest_with(&job, &plan, Some(1)), 50).span_windows, 0);
}

#[test]
fn with_little_memory_spans_are_chosen_and_chunks_are_longer() {
    let job = Job {
        batches: 150,
        tables: vec![(36, 6000)],
        features: vec![(0, tierbed_kernels::Pooling::Sum)],
        ..Job::pooled(OptimizerKind::RowWiseAdagrad, 4)
    };
    let plan = job.plan(1);
    let mut config = smallest_config(&job, &plan);
    config.dram_budget_bytes += 100_000;
    let chosen = train(&job, &plan, &config, 300);
    assert_eq!(chosen.span_windows, 12);
    let config = PlannedConfig { span_windows: Some(0), ..config };
    let each = train(&job, &plan, &config, 300);
    let rows_per_chunk = |stats: &PlannedStats| stats.rows_flushed / stats.chunks_written;
    let (chosen, each) = (rows_per_chunk(&chosen), rows_per_chunk(&each));
    assert!(chosen > 2 * each, "{chosen} rows per chunk with spans, {each} without");
}

/// From a point on: at every step there may be rows in lists and buckets of spans, and in between.
#[test]
fn scans_and_restarts_find_every_row_at_every_step() {
    // Piece by piece between the batches of a window, and on a thread.
    for (seed, window) in [(4, 3), (1, 1)] {
        let job = Job::pooled(OptimizerKind::Adagrad, seed);
        let plan = job.plan(window);
        // As lists of chunks grow from opening to opening.
        let config = smallest_with(&job, &plan, Some(3));
        let dram_budget_bytes = config.dram_budget_bytes + 40_000;
        let config = PlannedConfig { dram_budget_bytes, ..config };
        let (features, mut oracle, folder) = (job.features(), job.open_oracle(), memory_folder());
        let mut engine = job.open(folder.clone(), &plan, &config).unwrap();
        for step in 0..60 {
            job.oracle_step(&mut oracle, &features, step);
            job.step(&mut engine, &features, step).unwrap();
            if step < 25 {
                // Few rows have come again.
                continue;
            }
            if step % 3 == 1 {
                engine.checkpoint("c", &[]).unwrap();
                engine.verify().unwrap();
                drop(engine);
                // As a store that was made with spans is opened without, and back.
                let span_windows = [Some(3), Some(0), None][step as usize / 3 % 3];
                let config = PlannedConfig { span_windows, ..config.clone() };
                engine = job.open(folder.clone(), &plan, &config).unwrap();
                assert_eq!(engine.stats().span_windows, 3);
            }
            let found = job.records(&mut engine).unwrap();
            assert!(found == job.oracle_records(&mut oracle), "step {step}");
        }
    }
}

#[test]
fn rows_of_spans_move_to_another_plan() {
    let day = Job::pooled(OptimizerKind::Adam, 4);
    let days = [day.clone(), day.on_day(1, 31)];
    let plans = [days[0].plan(1), days[1].plan(1)];
    let config = smallest_with(&day, &plans[0], Some(4));
    let config = PlannedConfig { dram_budget_bytes: 2 * config.dram_budget_bytes, ..config };
    let (folder, mut oracle) = (memory_folder(), day.open_oracle());
    let mut engine = day.open(folder.clone(), &plans[0], &config).unwrap();
    for step in 0..57 {
        day.oracle_step(&mut oracle, &day.features(), step);
        day.step(&mut engine, &day.features(), step).unwrap();
    }
    engine = engine.replan(plans[1].clone(), "day", &[]).unwrap();
    assert_eq!(engine.stats().span_windows, 4);
    assert!(day.records(&mut engine).unwrap() == day.oracle_records(&mut oracle));
    for step in 0..45 {
        let expected = days[1].oracle_step(&mut oracle, &day.features(), step);
        assert!(days[1].step(&mut engine, &day.features(), step).unwrap() == expected);
    }
    let expected = day.oracle_records(&mut oracle);
    assert!(day.records(&mut engine).unwrap() == expected);
    engine.checkpoint("out", &[]).unwrap();
    drop(engine);
    let mut engine = days[1].open(folder, &plans[1], &config).unwrap();
    assert!(day.records(&mut engine).unwrap() == expected);
}
