//! Training along a plan gives the bits of training in memory, whatever the budget, the window
//! and the number of restarts.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use proptest::prelude::*;
use tierbed_kernels::Pooling;

use common::{memory_folder, smallest_config, smallest_with, Job};
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind, TableId};
use tierbed_train::planned::{PlannedConfig, PlannedStats};
use tierbed_train::TableRows;

fn check(job: &Job, window: u32, budget_factor: f64, steps: u64) -> PlannedStats {
    let plan = job.plan(window);
    let mut config = smallest_config(job, &plan);
    config.dram_budget_bytes = (config.dram_budget_bytes as f64 * budget_factor) as u64;
    check_config(job, &plan, &config, steps)
}

fn check_config(
    job: &Job,
    plan: &tierbed_train::planned::EpochPlan,
    config: &PlannedConfig,
    steps: u64,
) -> PlannedStats {
    let features = job.features();
    let mut oracle = job.open_oracle();
    let mut engine = job.open(memory_folder(), plan, config).unwrap();
    for step in 0..steps {
        let expected = job.oracle_step(&mut oracle, &features, step);
        let found = job.step(&mut engine, &features, step).unwrap();
        assert!(found == expected, "output of step {step}");
    }
    let stats = engine.stats();
    assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle), "records differ");
    let report = engine.budget().report();
    assert!(report.peak_bytes <= config.dram_budget_bytes);
    stats
}

#[test]
fn all_optimizers_give_the_same_bits_over_three_epochs() {
    for (seed, optimizer) in OptimizerKind::ALL.into_iter().enumerate() {
        let stats = check(&Job::pooled(optimizer, seed as u64), 3, 1.0, 120);
        assert!(stats.rows_flushed > 1000 && stats.rows_read > 1000, "{stats:?}");
    }
}

#[test]
fn every_window_size_gives_the_same_bits() {
    for window in [1, 2, 5, 13, 20, 39, 40, 512] {
        check(&Job::pooled(OptimizerKind::Adam, u64::from(window)), window, 1.0, 100);
    }
}

#[test]
fn every_budget_gives_the_same_bits() {
    for factor in [1.0, 1.05, 1.3, 2.0, 8.0] {
        check(&Job::pooled(OptimizerKind::RowWiseAdagrad, 2), 4, factor, 100);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_shape_budget_and_restarts_give_the_same_bits(
        seed in any::<u64>(),
        tables in proptest::collection::vec((1u32..40, 1u64..900), 1..4),
        features in proptest::collection::vec((0usize..4, any::<bool>()), 1..6),
        (optimizer, batches, window) in (0usize..5, 1u64..25, 1u32..12),
        spare in 0u64..200_000,
        span_windows in proptest::option::of(0usize..7),
    ) {
        let pooling = |is_mean| if is_mean { Pooling::Mean } else { Pooling::Sum };
        let features = features.iter().map(|&(at, mean)| (at % tables.len(), pooling(mean)));
        let job = Job {
            batches,
            features: features.collect(),
            tables: tables.clone(),
            ..Job::pooled(OptimizerKind::ALL[optimizer], seed)
        };
        let plan = job.plan(window);
        let config = smallest_with(&job, &plan, span_windows);
        // Lists of chunks that were written with less memory need some more of it.
        let dram_budget_bytes = config.dram_budget_bytes + 20_000 + spare;
        let config = PlannedConfig { dram_budget_bytes, ..config };
        let (features, folder, mut oracle) = (job.features(), memory_folder(), job.open_oracle());
        let mut engine = job.open(folder.clone(), &plan, &config).unwrap();
        for step in 0..3 * batches {
            let expected = job.oracle_step(&mut oracle, &features, step);
            prop_assert!(job.step(&mut engine, &features, step).unwrap() == expected);
            if (step + seed % 7) % 7 == 0 {
                engine.checkpoint("c", &[]).unwrap();
                drop(engine);
                engine = job.open(folder.clone(), &plan, &config).unwrap();
            }
        }
        prop_assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
    }
}

#[test]
fn unpooled_rows_too() {
    for optimizer in OptimizerKind::ALL {
        check(&Job::unpooled(optimizer, 3), 4, 1.0, 60);
    }
}

#[test]
fn every_io_engine_gives_the_same_bits_on_a_real_disk() {
    for io_engine in ["auto", "pread", "inline"] {
        let scratch = tempfile::tempdir().unwrap();
        let job = Job::pooled(OptimizerKind::Adagrad, 4);
        let plan = job.plan(3);
        let config = PlannedConfig { io_engine: io_engine.into(), ..smallest_config(&job, &plan) };
        let config = PlannedConfig { dram_budget_bytes: config.dram_budget_bytes * 2, ..config };
        let features = job.features();
        let mut oracle = job.open_oracle();
        let folder = std::sync::Arc::new(tierbed_io::FsFolder::create(scratch.path()).unwrap());
        let mut engine = job.open(folder, &plan, &config).unwrap();
        for step in 0..90 {
            let expected = job.oracle_step(&mut oracle, &features, step);
            assert!(job.step(&mut engine, &features, step).unwrap() == expected, "{io_engine}");
        }
        assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let job = Job::pooled(OptimizerKind::PartialRowWiseAdam, 6);
    let plan = job.plan(4);
    for isa in tierbed_kernels::Isa::available() {
        let config = PlannedConfig { isa: isa.name().into(), ..smallest_config(&job, &plan) };
        check_config(&job, &plan, &config, 50);
    }
}

#[test]
fn restarts_in_mid_epoch_continue_with_the_same_bits() {
    for (seed, optimizer) in OptimizerKind::ALL.into_iter().enumerate() {
        let job = Job::pooled(optimizer, seed as u64);
        let plan = job.plan(1 + 2 * seed as u32);
        let features = job.features();
        let smallest = smallest_config(&job, &plan);
        let mut oracle = job.open_oracle();
        let folder = memory_folder();
        let mut engine = job.open(folder.clone(), &plan, &smallest).unwrap();
        let mut step = 0;
        for round in 0..12u64 {
            for _ in 0..7 {
                job.oracle_step(&mut oracle, &features, step);
                job.step(&mut engine, &features, step).unwrap();
                step += 1;
            }
            let text = step.to_string();
            let attachments = [Attachment { name: "position", bytes: text.as_bytes() }];
            assert_eq!(engine.checkpoint("round", &attachments).unwrap(), round + 1);
            // Work that no checkpoint holds, then a crash.
            for lost in 0..5 {
                job.step(&mut engine, &features, step + lost).unwrap();
            }
            drop(engine);
            // Another budget each time.
            let dram_budget_bytes = smallest.dram_budget_bytes * (5 + round % 3) / 4;
            let config = PlannedConfig { dram_budget_bytes, ..smallest.clone() };
            engine = job.open(folder.clone(), &plan, &config).unwrap();
            assert_eq!(engine.attachment("position").unwrap().unwrap(), text.as_bytes());
            let position = engine.position();
            assert_eq!(position.epoch * job.batches + position.batch, step);
            engine.verify().unwrap();
        }
        let found = job.records(&mut engine).unwrap();
        assert!(found == job.oracle_records(&mut oracle), "{optimizer:?}");
    }
}

#[test]
fn every_use_is_counted_once() {
    let job = Job { batches: 60, ..Job::pooled(OptimizerKind::Sgd, 8) };
    let plan = job.plan(2);
    let features = job.features();
    let mut engine = job.open(memory_folder(), &plan, &smallest_config(&job, &plan)).unwrap();
    let mut counts: Vec<Vec<u32>> =
        job.tables.iter().map(|&(_, rows)| vec![0; rows as usize]).collect();
    for step in 0..240 {
        job.step(&mut engine, &features, step).unwrap();
        let batch = job.batch(step);
        let bags = batch.bags();
        let mut used = std::collections::BTreeSet::new();
        for (at, feature) in features.features().iter().enumerate() {
            for &id in &bags.indices[features.range(&bags, at)] {
                used.insert((feature.table.0 as usize, id as usize));
            }
        }
        used.into_iter().for_each(|(table, row)| counts[table][row] += 1);
    }
    for (table, counts) in counts.iter().enumerate() {
        let mut found = vec![0; counts.len()];
        let mut seen = 0;
        engine
            .scan(TableId(table as u32), &mut |row, record| {
                assert_eq!(found[row.0 as usize], 0, "a row has one home");
                found[row.0 as usize] = record.last().unwrap().to_bits();
                seen += 1;
                Ok(())
            })
            .unwrap();
        assert!(&found == counts, "table {table}");
        assert_eq!(seen, counts.iter().filter(|count| **count > 0).count());
    }
    let mut all = 0;
    engine
        .scan_all(&mut |table, row, record| {
            let count = counts[table.0 as usize][row.0 as usize];
            assert_eq!(record.last().unwrap().to_bits(), count);
            all += u64::from(count);
            Ok(())
        })
        .unwrap();
    assert_eq!(all, engine.stats().row_update_count);
}

#[test]
fn a_batch_that_was_not_planned_is_refused_and_changes_nothing() {
    let job = Job::pooled(OptimizerKind::Adam, 3);
    let plan = job.plan(4);
    let features = job.features();
    let mut oracle = job.open_oracle();
    let mut engine = job.open(memory_folder(), &plan, &smallest_config(&job, &plan)).unwrap();
    for step in 0..20 {
        let mut swapped = job.batch(step);
        let at = swapped.indices.len() - 1;
        swapped.indices[at] = (swapped.indices[at] + 1) % 90;
        for wrong in [job.batch(step + 1), swapped] {
            let bags = wrong.bags();
            let mut out = vec![0.0; features.output_len(&bags)];
            let error = engine.lookup(&features, &bags, &mut out).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("not the planned one"), "{error}");
            let grads = tierbed_train::planned::Grads { output: &out, weights: None };
            assert_eq!(
                engine.update(&features, &bags, grads, None).unwrap_err().kind(),
                ErrorKind::Invalid
            );
        }
        let expected = job.oracle_step(&mut oracle, &features, step);
        assert!(job.step(&mut engine, &features, step).unwrap() == expected);
    }
    assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
}

#[test]
fn planned_evaluation_reads_and_changes_nothing() {
    let job = Job::pooled(OptimizerKind::Adagrad, 2);
    let plan = job.plan(3);
    let features = job.features();
    let mut oracle = job.open_oracle();
    let mut engine = job.open(memory_folder(), &plan, &smallest_config(&job, &plan)).unwrap();
    for step in 0..80 {
        if step % 3 == 1 {
            let batch = job.batch(step);
            let bags = batch.bags();
            let mut expected = vec![0.0; features.output_len(&bags)];
            let mut found = expected.clone();
            oracle.lookup(&features, &bags, &mut expected).unwrap();
            engine.lookup(&features, &bags, &mut found).unwrap();
            assert!(common::bits(&found) == common::bits(&expected));
            engine.pass(&features, &bags).unwrap();
        } else {
            let expected = job.oracle_step(&mut oracle, &features, step);
            assert!(job.step(&mut engine, &features, step).unwrap() == expected);
        }
    }
    assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
}

#[test]
fn planned_evaluation_at_window_borders_and_restarts_changes_nothing() {
    for (seed, evaluated) in [(2u64, [1u64, 0, 0]), (3, [0, 0, 1]), (4, [1, 0, 1])] {
        // Windows of three batches: the first, the last, or both are evaluated.
        let job = Job::pooled(OptimizerKind::Adam, seed);
        let plan = job.plan(3);
        let features = job.features();
        let mut config = smallest_config(&job, &plan);
        config.dram_budget_bytes += 20_000;
        let (mut oracle, folder) = (job.open_oracle(), memory_folder());
        let mut engine = job.open(folder.clone(), &plan, &config).unwrap();
        for step in 0..90 {
            let is_evaluated = evaluated[(step % job.batches % 3) as usize] == 1;
            if is_evaluated {
                let batch = job.batch(step);
                let bags = batch.bags();
                let mut expected = vec![0.0; features.output_len(&bags)];
                oracle.lookup(&features, &bags, &mut expected).unwrap();
                for _ in 0..2 {
                    let mut found = vec![f32::NAN; expected.len()];
                    engine.lookup(&features, &bags, &mut found).unwrap();
                    assert!(common::bits(&found) == common::bits(&expected), "step {step}");
                }
                if step % 2 == 0 {
                    // Looked at, but not passed: a restart looks at it again.
                    engine.checkpoint("c", &[]).unwrap();
                    drop(engine);
                    engine = job.open(folder.clone(), &plan, &config).unwrap();
                }
                engine.pass(&features, &bags).unwrap();
            } else {
                let expected = job.oracle_step(&mut oracle, &features, step);
                assert!(job.step(&mut engine, &features, step).unwrap() == expected);
            }
            if step % 7 == 3 {
                engine.checkpoint("c", &[]).unwrap();
                drop(engine);
                engine = job.open(folder.clone(), &plan, &config).unwrap();
            }
        }
        // A row that was only looked at has its initial value and no step.
        assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
        let steps = engine.hyper(TableId(0)).unwrap().step;
        assert!(steps < 90 && steps == oracle.hyper(TableId(0)).unwrap().step);
    }
}

#[test]
fn any_rows_can_be_gathered_at_any_time() {
    let job = Job::pooled(OptimizerKind::Adagrad, 9);
    let plan = job.plan(3);
    let features = job.features();
    let mut oracle = job.open_oracle();
    let mut engine = job.open(memory_folder(), &plan, &smallest_config(&job, &plan)).unwrap();
    for step in 0..50 {
        job.oracle_step(&mut oracle, &features, step);
        job.step(&mut engine, &features, step).unwrap();
        let rows: Vec<i64> = (0..40).map(|at| (at * 37 + step as i64 * 11) % 500).collect();
        let (mut expected, mut found) = (vec![0.0; 40 * 36], vec![0.0; 40 * 36]);
        oracle.gather_rows(TableId(1), &rows, &mut expected).unwrap();
        engine.gather_rows(TableId(1), &rows, &mut found).unwrap();
        assert!(common::bits(&found) == common::bits(&expected), "step {step}");
    }
    assert_eq!(
        engine.gather_rows(TableId(1), &[500], &mut [0.0; 36]).unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

#[test]
fn another_plan_or_schema_is_refused() {
    let job = Job::pooled(OptimizerKind::Sgd, 3);
    let plan = job.plan(4);
    let folder = memory_folder();
    let config = PlannedConfig::new(64 << 20);
    let mut engine = job.open(folder.clone(), &plan, &config).unwrap();
    job.step(&mut engine, &job.features(), 0).unwrap();
    engine.checkpoint("c", &[]).unwrap();
    drop(engine);
    let error = job.open(folder.clone(), &job.plan(5), &config).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let other = Job { optimizer: OptimizerKind::Adam, ..job.clone() };
    assert_eq!(other.open(folder.clone(), &plan, &config).unwrap_err().kind(), ErrorKind::Invalid);
    job.open(folder, &plan, &config).unwrap();
}
