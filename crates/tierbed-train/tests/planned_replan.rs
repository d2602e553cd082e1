//! A store outlives its plan: whatever order comes next, the bits are those of memory.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::sync::Arc;

use common::{memory_folder, smallest_config, Job};
use proptest::prelude::*;
use tierbed_core::store::Attachment;
use tierbed_core::{Error, ErrorKind, OptimizerKind, Result, RowId, TableId};
use tierbed_io::Folder;
use tierbed_train::planned::{Import, Plan, PlannedConfig, PlannedEngine, RecordSink};
use tierbed_train::TableRows;

/// The smallest budget in which each of the plans opens and a store without rows moves from each
/// to the next; whoever needs more names how much.
fn config_for(job: &Job, plans: &[&Plan]) -> PlannedConfig {
    let configs = plans.iter().map(|plan| smallest_config(job, plan));
    let mut config = configs.max_by_key(|config| config.dram_budget_bytes).unwrap();
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
fn a_store_opens_with_the_next_plan_at_once() {
    let job = Job::pooled(OptimizerKind::Adagrad, 4);
    let tomorrow = job.on_day(1, 20);
    let (old, new) = (job.plan(3), tomorrow.plan(4));
    let config = config_for(&job, &[&old, &new]);
    let (features, folder, mut oracle) = (job.features(), memory_folder(), job.open_oracle());
    let open = || {
        PlannedEngine::open_replanned_in(folder.clone(), job.schema(), (&old, new.clone()), &config)
    };
    let identity = || PlannedEngine::plan_in_force(folder.clone()).unwrap();
    assert_eq!(identity(), None);
    let mut engine = job.open(folder.clone(), &old, &config).unwrap();
    for step in 0..33 {
        job.oracle_step(&mut oracle, &features, step);
        job.step(&mut engine, &features, step).unwrap();
    }
    engine.checkpoint("model", &[Attachment { name: "dense", bytes: b"weights" }]).unwrap();
    drop(engine);
    assert_eq!(identity(), Some(old.identity()));
    let mut engine = open().unwrap();
    assert_eq!(engine.last_checkpoint().unwrap().name, "model");
    assert_eq!(engine.last_checkpoint().unwrap().number, 2);
    assert_eq!(engine.attachment("dense").unwrap().unwrap(), b"weights");
    for step in 0..50 {
        let expected = tomorrow.oracle_step(&mut oracle, &features, step);
        assert!(tomorrow.step(&mut engine, &features, step).unwrap() == expected);
    }
    engine.checkpoint("model", &[]).unwrap();
    drop(engine);
    assert_eq!(identity(), Some(new.identity()));
    // Moved already: it is just opened.
    let engine = open().unwrap();
    assert_eq!((engine.position().epoch, engine.position().batch), (2, 10));
}

#[test]
fn tables_grow_with_the_next_plan() {
    for at_opening in [false, true] {
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
        let mut engine = if at_opening {
            engine.checkpoint("c", &[]).unwrap();
            drop(engine);
            let (schema, plans) = (tomorrow.schema(), (&old, new.clone()));
            PlannedEngine::open_replanned_in(folder.clone(), schema, plans, &config).unwrap()
        } else {
            engine.replan(new.clone(), "c", &[]).unwrap()
        };
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

/// All rows of the oracle that were stepped at least once.
fn used_rows(
    job: &Job,
    oracle: &mut tierbed_train::window::WindowEngine,
) -> Vec<(TableId, RowId, Vec<u8>)> {
    let mut rows = Vec::new();
    for (at, (_, count)) in job.tables.iter().enumerate() {
        let mut visit = |row: usize, record: &[f32]| {
            if record.last().unwrap().to_bits() > 0 {
                let bytes = bytemuck::cast_slice(record).to_vec();
                rows.push((TableId(at as u32), RowId(row as u64), bytes));
            }
        };
        oracle.visit_rows(TableId(at as u32), 0, *count as usize, &mut visit).unwrap();
    }
    rows
}

fn import(
    job: &Job,
    folder: Arc<dyn Folder>,
    (plan, config): (&Plan, &PlannedConfig),
    rows: &mut dyn FnMut(&mut RecordSink<'_>) -> Result<()>,
    steps: u64,
) -> Result<PlannedEngine> {
    let tables = 0..job.tables.len();
    let hypers: Vec<_> =
        tables.map(|at| tierbed_kernels::Hyper { step: steps, ..job.hyper(at) }).collect();
    let import = Import { rows, hypers: &hypers, name: "imported", attachments: &[] };
    PlannedEngine::import_in(folder, job.schema(), plan.clone(), config, import)
}

#[test]
fn rows_of_any_source_are_taken_in() {
    for spare_bytes in [0, 30_000, 8 << 20] {
        let job = Job { tables: vec![(9, 50_000); 6], ..Job::pooled(OptimizerKind::Adam, 8) };
        let plan = job.plan(3);
        let mut config = smallest_config(&job, &plan);
        config.dram_budget_bytes += spare_bytes;
        let (features, mut oracle) = (job.features(), job.open_oracle());
        // Trained elsewhere, on another day, so that some rows are known and some are not.
        let before = job.on_day(5, 13);
        (0..13).for_each(|step| drop(before.oracle_step(&mut oracle, &features, step)));
        let mut rows = used_rows(&job, &mut oracle);
        rows.reverse();
        let mut visits = 0;
        let source = &mut |sink: &mut RecordSink<'_>| {
            visits += 1;
            rows.iter().try_for_each(|(table, row, record)| sink(*table, *row, record))
        };
        let folder = memory_folder();
        let mut engine = import(&job, folder.clone(), (&plan, &config), source, 13).unwrap();
        assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
        for step in 0..60 {
            let expected = job.oracle_step(&mut oracle, &features, step);
            assert!(job.step(&mut engine, &features, step).unwrap() == expected, "step {step}");
        }
        assert!(job.records(&mut engine).unwrap() == job.oracle_records(&mut oracle));
        assert_eq!(visits, if spare_bytes < 1 << 20 { 2 } else { 1 }, "{spare_bytes}");
        drop(engine);
        let again = import(&job, folder, (&plan, &config), &mut |_| Ok(()), 0).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn an_export_has_every_used_row_in_order_and_makes_the_same_store_again() {
    let job = Job::pooled(OptimizerKind::Adam, 6);
    let tomorrow = job.on_day(1, 20);
    let (old, new) = (job.plan(3), tomorrow.plan(4));
    let mut config = config_for(&job, &[&old, &new]);
    config.dram_budget_bytes += 100_000;
    let (features, folder, mut oracle) = (job.features(), memory_folder(), job.open_oracle());
    let mut engine = job.open(folder.clone(), &old, &config).unwrap();
    for step in 0..33 {
        job.oracle_step(&mut oracle, &features, step);
        job.step(&mut engine, &features, step).unwrap();
    }
    // Parked rows too.
    let mut engine = engine.replan(new.clone(), "moved", &[]).unwrap();
    for step in 0..7 {
        tomorrow.oracle_step(&mut oracle, &features, step);
        tomorrow.step(&mut engine, &features, step).unwrap();
    }
    let export = |sink: &mut RecordSink<'_>| {
        PlannedEngine::export_in(folder.clone(), &job.schema(), &new, &config, sink)
    };
    assert_eq!(export(&mut |_, _, _| Ok(())).unwrap_err().kind(), ErrorKind::Closed);
    engine.checkpoint("c", &[]).unwrap();
    drop(engine);
    let mut rows = Vec::new();
    let mut take = |table: TableId, row: RowId, record: &[u8]| {
        rows.push((table, row, record.to_vec()));
        Ok(())
    };
    export(&mut take).unwrap();
    // Each table has records of its own length, so the order is that of all tables.
    assert!(rows.is_sorted_by_key(|(table, row, _)| (*table, *row)));
    // Rows of the window that is trained on are there before their first step.
    rows.retain(|(_, _, record)| record.last_chunk() != Some(&[0u8; 4]));
    assert!(rows == used_rows(&job, &mut oracle));
    // The source of an import may be the store itself.
    let mut again =
        import(&job, memory_folder(), (&old, &config), &mut |sink| export(sink), 40).unwrap();
    assert!(job.records(&mut again).unwrap() == job.oracle_records(&mut oracle));
    assert_eq!(again.hyper(TableId(0)).unwrap().step, 40);
    let stopped = export(&mut |_, _, _| Err(Error::invalid("enough"))).unwrap_err();
    assert!(stopped.to_string().contains("enough"));
    assert!(!folder.list().unwrap().iter().any(|name| name.starts_with("replan")));
}

#[test]
fn a_bad_source_is_refused_and_leaves_no_store() {
    let job = Job::pooled(OptimizerKind::Sgd, 3);
    let plan = job.plan(3);
    let record = |at: usize| vec![0u8; job.schema().tables()[at].record_bytes()];
    type Rows = Vec<(u32, u64, Vec<u8>)>;
    let cases: [(&str, Rows); 5] = [
        ("out of range", vec![(1, 500, record(1))]),
        ("unknown table", vec![(9, 0, record(1))]),
        ("twice", vec![(1, 7, record(1)), (0, 7, record(0)), (1, 7, record(1))]),
        ("another length", vec![(1, 7, record(0))]),
        ("stopped", vec![]),
    ];
    for (spare_bytes, (what, rows)) in
        [0u64, 1 << 20].into_iter().flat_map(|spare| cases.iter().map(move |case| (spare, case)))
    {
        let mut config = smallest_config(&job, &plan);
        config.dram_budget_bytes += spare_bytes;
        let source = &mut |sink: &mut RecordSink<'_>| {
            for (table, row, record) in rows {
                sink(TableId(*table), RowId(*row), record)?;
            }
            match *what {
                "stopped" => Err(Error::invalid("stopped")),
                _ => Ok(()),
            }
        };
        let folder = memory_folder();
        let error = import(&job, folder.clone(), (&plan, &config), source, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{what}: {error}");
        assert_eq!(PlannedEngine::plan_in_force(folder.clone()).unwrap(), None);
        // A new attempt starts clean.
        let engine = import(&job, folder, (&plan, &config), &mut |_| Ok(()), 0).unwrap();
        assert_eq!(engine.last_checkpoint().unwrap().number, 1);
    }
}

#[test]
fn a_source_that_changes_its_mind_is_refused() {
    let job = Job { tables: vec![(9, 100_000); 6], ..Job::pooled(OptimizerKind::Sgd, 3) };
    let plan = job.plan(3);
    let record = vec![0u8; job.schema().tables()[0].record_bytes()];
    let mut visit = 0;
    let source = &mut |sink: &mut RecordSink<'_>| {
        visit += 1;
        (0..visit * 10).try_for_each(|row| sink(TableId(0), RowId(row), &record))
    };
    let config = smallest_config(&job, &plan);
    let error = import(&job, memory_folder(), (&plan, &config), source, 0).err().unwrap();
    assert!(error.to_string().contains("second time"), "{error}");
}

#[test]
fn a_plan_of_other_tables_is_refused() {
    let job = Job::pooled(OptimizerKind::Sgd, 3);
    let plan = job.plan(3);
    let other = Job { tables: vec![(9, 2001); 6], ..job.clone() };
    let engine = job.open(memory_folder(), &plan, &PlannedConfig::new(64 << 20)).unwrap();
    assert_eq!(engine.replan(other.plan(3), "x", &[]).unwrap_err().kind(), ErrorKind::Invalid);
}
