//! Day after day through a cold store, inside each day along a plan: the bits of memory.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/planned.rs"]
mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{memory_folder, smallest_config, Job};
use tierbed_core::{Budget, ErrorKind, OptimizerKind, RowKey, RowStore, TableId, TrainStore};
use tierbed_io::{EngineChoice, EngineOptions, Folder};
use tierbed_kernels::Hyper;
use tierbed_store::cold::{ColdOptions, ColdStore};
use tierbed_train::planned::{PlannedConfig, PlannedEngine};
use tierbed_train::TableRows;

fn open_store(job: &Job, folder: Arc<dyn Folder>) -> ColdStore {
    let engine =
        EngineOptions { choice: EngineChoice::Inline, queue_depth: 4, ..EngineOptions::default() };
    let options = ColdOptions::new(Budget::new(4 << 20), engine);
    let mut store = ColdStore::open(folder, options).unwrap();
    for at in 0..job.tables.len() {
        store.add_table(job.table(at)).unwrap();
    }
    store
}

/// Every row that was ever stepped, as the store has it and as memory has it.
fn check_rows(job: &Job, store: &mut ColdStore, oracle: &mut tierbed_train::window::WindowEngine) {
    for (at, (_, count)) in job.tables.iter().enumerate() {
        let id = TableId(at as u32);
        let mut stored = BTreeMap::new();
        store
            .scan(id, &mut |row, record| {
                stored.insert(row.0 as usize, record.to_vec());
                Ok(())
            })
            .unwrap();
        let mut stepped = BTreeMap::new();
        let mut visit = |row: usize, record: &[f32]| {
            if record.last().unwrap().to_bits() > 0 {
                stepped.insert(row, bytemuck::cast_slice::<f32, u8>(record).to_vec());
            }
        };
        oracle.visit_rows(id, 0, *count as usize, &mut visit).unwrap();
        assert!(stored == stepped, "rows of table {at}");
    }
}

#[test]
fn days_of_forward_order_over_a_cold_store_give_the_bits_of_memory() {
    for (seed, optimizer) in OptimizerKind::ALL.into_iter().enumerate() {
        let job = Job::pooled(optimizer, seed as u64);
        let (features, mut oracle) = (job.features(), job.open_oracle());
        let rows = memory_folder();
        let mut hypers: Vec<Hyper> =
            (0..job.tables.len()).map(|at| Hyper { step: 0, ..job.hyper(at) }).collect();
        for (day, batches, steps) in [(0, 20, 20), (1, 25, 25), (2, 9, 9), (0, 12, 12)] {
            // Another process every day.
            let mut store = open_store(&job, rows.clone());
            let today = job.on_day(day, batches);
            let plan = today.plan(3);
            let config = smallest_config(&today, &plan);
            let dram_budget_bytes = config.dram_budget_bytes * 5 / 4 + 8192;
            let config = PlannedConfig { dram_budget_bytes, ..config };
            let mut engine =
                PlannedEngine::begin_day(memory_folder(), &mut store, plan, &config, &hypers)
                    .unwrap();
            for step in 0..steps {
                let expected = today.oracle_step(&mut oracle, &features, step);
                assert!(today.step(&mut engine, &features, step).unwrap() == expected);
            }
            hypers =
                (0..job.tables.len()).map(|at| engine.hyper(TableId(at as u32)).unwrap()).collect();
            assert!(engine.end_day(&mut store, 10_000).unwrap() > 100);
            store.commit("day", &[]).unwrap();
            check_rows(&job, &mut store, &mut oracle);
        }
    }
}

#[test]
fn a_day_that_never_ends_changes_nothing() {
    let job = Job::pooled(OptimizerKind::Adam, 1);
    let (features, folder) = (job.features(), memory_folder());
    let mut store = open_store(&job, folder);
    let plan = job.plan(3);
    let config = PlannedConfig::new(16 << 20);
    let mut engine =
        PlannedEngine::begin_day(memory_folder(), &mut store, plan, &config, &[]).unwrap();
    (0..5).for_each(|step| drop(job.step(&mut engine, &features, step).unwrap()));
    drop(engine);
    let mut found = 0;
    store
        .scan(TableId(0), &mut |_, _| {
            found += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(found, 0);
}

#[test]
fn a_budget_without_room_for_a_bit_per_row_is_refused() {
    let job = Job { tables: vec![(4, 1 << 22); 6], ..Job::pooled(OptimizerKind::Sgd, 1) };
    let mut store = open_store(&job, memory_folder());
    let plan = job.plan(3);
    let config = PlannedConfig::new(1 << 20);
    let refused = PlannedEngine::begin_day(memory_folder(), &mut store, plan, &config, &[]);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    let key = RowKey::new(TableId(0), tierbed_core::RowId(0));
    store.read(&[key], &mut |_, _| Ok(())).unwrap();
}
