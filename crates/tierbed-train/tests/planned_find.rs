//! Rows that the plan does not bring now are the same, found where they wait or by a scan.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use common::{memory_folder, smallest_with, Job};
use tierbed_core::env::SplitMix64;
use tierbed_core::{OptimizerKind, RowId, TableId};
use tierbed_kernels::Pooling;
use tierbed_train::planned::{EpochPlan, Pipeline, PlannedConfig, PlannedEngine, UnplannedReads};
use tierbed_train::window::WindowEngine;
use tierbed_train::TableRows;

/// Rows of each size class, few of them used: 80 windows of one batch.
fn sparse_job(optimizer: OptimizerKind, seed: u64) -> Job {
    Job {
        batches: 80,
        tables: vec![(9, 4000), (36, 3000), (9, 40)],
        features: vec![(0, Pooling::Sum), (1, Pooling::Mean), (2, Pooling::Sum)],
        ..Job::pooled(optimizer, seed)
    }
}

fn listed(engine: &mut impl TableRows, table: usize, rows: &[RowId]) -> Vec<Vec<u32>> {
    let mut records = vec![Vec::new(); rows.len()];
    engine
        .visit_listed(TableId(table as u32), rows, &mut |at, record| {
            records[at] = record.iter().map(|word| word.to_bits()).collect();
        })
        .unwrap();
    records
}

/// Compares some rows of each table: the rows of coming and past batches, and any others.
fn check(job: &Job, engine: &mut PlannedEngine, oracle: &mut WindowEngine, rng: &mut SplitMix64) {
    for (table, &(_, row_count)) in job.tables.iter().enumerate() {
        let mut rows: Vec<RowId> =
            (0..1 + rng.below(3)).map(|_| RowId(rng.below(row_count))).collect();
        let feature = job.features.iter().position(|(of, _)| *of == table).unwrap();
        let batch = job.batch(rng.below(job.batches));
        let bags = batch.bags();
        let used = &bags.indices[job.features().range(&bags, feature)];
        rows.extend(used.iter().take(2).map(|&id| RowId(id as u64)));
        rows.sort_unstable();
        rows.dedup();
        let found = listed(engine, table, &rows);
        assert!(found == listed(oracle, table, &rows), "rows {rows:?} of table {table}");
        // The same rows by a range.
        let first = rows[0].0;
        let mut of_range = Vec::new();
        let visit = &mut |_: usize, record: &[f32]| {
            of_range = record.iter().map(|word| word.to_bits()).collect();
        };
        engine.visit_rows(TableId(table as u32), first, 1, visit).unwrap();
        assert!(of_range == found[0], "row {first} of table {table}");
    }
}

/// 80 windows.
fn plan_of(job: &Job) -> EpochPlan {
    job.plan(job.batches.div_ceil(80) as u32)
}

fn config_of(job: &Job, spans: Option<usize>, pipeline: Pipeline, spare: u64) -> PlannedConfig {
    let config = smallest_with(job, &plan_of(job), spans);
    PlannedConfig { dram_budget_bytes: config.dram_budget_bytes + spare, pipeline, ..config }
}

fn train(
    job: &Job,
    config: &PlannedConfig,
    steps: u64,
    mut checked: impl FnMut(u64) -> bool,
) -> UnplannedReads {
    let (features, mut oracle) = (job.features(), job.open_oracle());
    let mut engine = job.open(memory_folder(), &plan_of(job), config).unwrap();
    let mut rng = SplitMix64::new(job.seed);
    for step in 0..steps {
        job.oracle_step(&mut oracle, &features, step);
        job.step(&mut engine, &features, step).unwrap();
        if checked(step) {
            check(job, &mut engine, &mut oracle, &mut rng);
        }
    }
    assert!(engine.budget().report().peak_bytes <= config.dram_budget_bytes);
    engine.unplanned_reads()
}

#[test]
fn few_rows_are_found_at_every_step_without_a_scan() {
    // In windows of several batches the rows of a span are split piece by piece.
    let cases = [(0, 80), (4, 80), (9, 80), (9, 400)];
    for (seed, (span_windows, batches)) in cases.into_iter().enumerate() {
        let job = Job { batches, ..sparse_job(OptimizerKind::ALL[seed + 1], seed as u64) };
        let config = config_of(&job, Some(span_windows), Pipeline::Off, 60_000);
        let reads = train(&job, &config, batches * 5 / 2, |_| true);
        // Where everything is in a handful of lists, reading it is as good.
        assert!(reads.search_count > 4 * reads.scan_count, "{reads:?}, spans of {span_windows}");
    }
}

/// Also of a chunk that is between a span and its windows: rows so short that a page has more of
/// them than move at once.
#[test]
fn every_row_is_found_at_every_step() {
    let job = Job {
        batches: 160,
        tables: vec![(1, 6000)],
        features: vec![(0, Pooling::Sum)],
        batch_size: 60,
        ..Job::pooled(OptimizerKind::Sgd, 4)
    };
    let plan = job.plan(8);
    let config = smallest_with(&job, &plan, Some(4));
    let dram_budget_bytes = config.dram_budget_bytes + 30_000;
    let config = PlannedConfig { dram_budget_bytes, ..config };
    let (features, mut oracle) = (job.features(), job.open_oracle());
    let mut engine = job.open(memory_folder(), &plan, &config).unwrap();
    let rows: Vec<RowId> = (0..6000).map(RowId).collect();
    for step in 0..320 {
        job.oracle_step(&mut oracle, &features, step);
        job.step(&mut engine, &features, step).unwrap();
        if step < 160 {
            continue;
        }
        let expected = listed(&mut oracle, 0, &rows);
        assert!(listed(&mut engine, 0, &rows) == expected, "step {step}: by a scan");
        let some = rows.chunks(4).zip(expected.chunks(4)).skip(step as usize % 8).step_by(8);
        for (rows, expected) in some {
            assert!(listed(&mut engine, 0, rows) == expected, "step {step}: {rows:?}");
        }
    }
    let reads = engine.unplanned_reads();
    assert!(reads.search_count > 1000, "{reads:?}");
}

#[test]
fn rows_are_found_while_a_thread_moves_others() {
    let job = sparse_job(OptimizerKind::Adagrad, 7);
    let config = config_of(&job, Some(4), Pipeline::On, 200_000);
    assert!(train(&job, &config, 200, |step| step % 3 == 1).search_count > 100);
}

#[test]
fn more_rows_than_windows_are_found_by_a_scan() {
    let job = Job { batches: 3, ..sparse_job(OptimizerKind::Sgd, 3) };
    let config = config_of(&job, Some(0), Pipeline::Off, 60_000);
    let reads = train(&job, &config, 30, |_| true);
    assert!(reads.scan_count > 30, "{reads:?}");
}

#[test]
fn rows_that_another_plan_used_are_found_aside() {
    let job = sparse_job(OptimizerKind::Adam, 5);
    let days = [job.clone(), job.on_day(1, 90)];
    let config = config_of(&job, Some(0), Pipeline::Off, 200_000);
    let (folder, features, mut oracle) = (memory_folder(), job.features(), job.open_oracle());
    let mut engine = job.open(folder.clone(), &days[0].plan(1), &config).unwrap();
    for step in 0..100 {
        job.oracle_step(&mut oracle, &features, step);
        job.step(&mut engine, &features, step).unwrap();
    }
    let plan = days[1].plan(1);
    let mut engine = engine.replan(plan.clone(), "day", &[]).unwrap();
    let mut rng = SplitMix64::new(1);
    for step in 0..100 {
        // Rows of the first day, some of which no later batch uses.
        check(&job, &mut engine, &mut oracle, &mut rng);
        days[1].oracle_step(&mut oracle, &features, step);
        days[1].step(&mut engine, &features, step).unwrap();
        if step == 50 {
            engine.checkpoint("half", &[]).unwrap();
            drop(engine);
            engine = days[1].open(folder.clone(), &plan, &config).unwrap();
        }
    }
    assert!(engine.unplanned_reads().search_count > 50, "{:?}", engine.unplanned_reads());
}
