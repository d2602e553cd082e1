//! A budget that is too small names one that works, at once and to the end of the run.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use std::sync::Arc;

use common::Job;
use tierbed_core::{Error, ErrorKind, OptimizerKind, Result, TableId};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_snapshot::{HeadSize, PageLayout, TableHeads};
use tierbed_train::window::{Backend, Durability, Pooling, WindowConfig, WindowEngine};

/// Large batches over a table that does not fit, so stores below grow all the time.
fn job(dim: u32, row_count: u64) -> Job {
    Job {
        tables: vec![(dim, row_count)],
        features: vec![(0, Pooling::Sum)],
        batch_size: 500,
        is_weighted: false,
        ..Job::pooled(OptimizerKind::Adagrad, 5)
    }
}

/// Trains, with checkpoints, publishes, and opens the store again.
fn run(job: &Job, config: &WindowConfig, steps: u64) -> Result<()> {
    run_as(PageLayout::default(), job, config, steps)
}

fn run_as(layout: PageLayout, job: &Job, config: &WindowConfig, steps: u64) -> Result<()> {
    let store: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let mut engine = WindowEngine::open_in(Some(Arc::clone(&store)), config)?;
    let plan = job.set_up(&mut engine)?;
    for step in 0..steps {
        job.step(&mut engine, &plan, step)?;
        if step % 25 == 24 {
            engine.checkpoint("c", &[])?;
        }
    }
    engine.publish(Arc::new(MemoryFolder::new()), layout, &[], &mut |_, _| true)?;
    drop(engine);
    let mut engine = WindowEngine::open_in(Some(store), config)?;
    let plan = job.set_up(&mut engine)?;
    job.step(&mut engine, &plan, steps).map(|_| ())
}

fn minimum_bytes(error: &Error) -> u64 {
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let context = error.context();
    let named = context.iter().find(|(name, _)| *name == "minimum_bytes");
    named.unwrap_or_else(|| panic!("names no minimum: {error}")).1.parse().unwrap()
}

/// Returns `config` with a budget that opens a new store, whose tables are not known yet.
fn opening(config: WindowConfig) -> WindowConfig {
    let open = |config: &WindowConfig| {
        WindowEngine::open_in(Some(Arc::new(MemoryFolder::new())), config).map(|_| ())
    };
    let Err(error) = open(&config) else { return config };
    let config = WindowConfig { dram_budget_bytes: minimum_bytes(&error), ..config };
    open(&config).unwrap();
    config
}

fn check_named_minimums(backend: Backend, durability: Durability) {
    tierbed_compare::register_stores();
    for (dim, row_count, steps) in [(16, 60_000, 60), (1, 100_000, 60), (300, 4_000, 30)] {
        let job = job(dim, row_count);
        for budget_bytes in [256 << 10, 1 << 20, 3 << 20] {
            let config = WindowConfig { backend, durability, ..WindowConfig::new(budget_bytes) };
            let config = opening(config);
            let budget_bytes = config.dram_budget_bytes;
            let Err(error) = run(&job, &config, steps) else { continue };
            let minimum = minimum_bytes(&error);
            assert!(minimum > budget_bytes, "{error}");
            let config = WindowConfig { dram_budget_bytes: minimum, ..config };
            if let Err(second) = run(&job, &config, steps) {
                panic!(
                    "{} of dim {dim}: {budget_bytes} bytes end in {error}, the named ones in \
                     {second}",
                    backend.name()
                );
            }
        }
    }
}

/// A publish asks for more where a table has a tail, and names that too.
#[test]
fn the_minimum_named_by_a_publish_with_tails_works() {
    tierbed_compare::register_stores();
    let heads = TableHeads::new([(TableId(0), HeadSize::Share(0.05))]);
    let layout = PageLayout { heads, ..PageLayout::default() };
    for (dim, row_count, steps) in [(16, 600_000, 30), (300, 4_000, 30)] {
        let job = job(dim, row_count);
        for backend in [Backend::Memory, Backend::Lsm] {
            let mut config = opening(WindowConfig { backend, ..WindowConfig::new(256 << 10) });
            // Training names what it needs first.
            for _ in 0..2 {
                let Err(error) = run_as(layout.clone(), &job, &config, steps) else { break };
                assert!(minimum_bytes(&error) > config.dram_budget_bytes, "{error}");
                config.dram_budget_bytes = minimum_bytes(&error);
            }
            let named = run_as(layout.clone(), &job, &config, steps);
            assert!(named.is_ok(), "{} of dim {dim}: {named:?}", backend.name());
        }
    }
}

#[test]
fn the_minimum_named_by_a_tree_works() {
    check_named_minimums(Backend::Lsm, Durability::Checkpoint);
    check_named_minimums(Backend::LsmPlain, Durability::Checkpoint);
}

#[test]
fn the_minimum_named_by_a_tree_with_a_log_works() {
    check_named_minimums(Backend::Lsm, Durability::Step);
}

#[test]
fn the_minimum_named_by_a_store_in_memory_works() {
    check_named_minimums(Backend::Memory, Durability::Checkpoint);
}

/// What a large table could come to need leaves nothing; a buffer must be left all the same.
#[test]
fn a_large_table_of_few_rows_leaves_a_row_buffer() {
    let job = job(16, 50_000_000);
    let config = WindowConfig { backend: Backend::Memory, ..WindowConfig::new(8 << 20) };
    let mut engine = WindowEngine::open(None, &config).unwrap();
    let plan = job.set_up(&mut engine).unwrap();
    job.step(&mut engine, &plan, 0).unwrap();
    let capacity = engine.stats().buffer.row_capacity;
    assert!(capacity > 1000, "room for {capacity} rows only");
}

#[test]
fn the_minimum_named_by_stores_of_fixed_memory_works() {
    check_named_minimums(Backend::File, Durability::Checkpoint);
    check_named_minimums(Backend::Cold, Durability::Checkpoint);
    check_named_minimums(Backend::HashDb, Durability::Checkpoint);
}
