//! Training through any store, budget, engine, window and restart gives the bits of training in
//! memory.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use common::{all_records, bits, memory_config, small_config, Job};
use tierbed_core::{ErrorKind, OptimizerKind};
use tierbed_train::window::{Backend, Durability, WindowConfig, WindowEngine};

fn configs() -> Vec<WindowConfig> {
    tierbed_compare::register_stores();
    let engine = |name: &str, bytes: u64| WindowConfig {
        io_engine: name.to_owned(),
        ..WindowConfig::new(bytes)
    };
    let tree = |backend| WindowConfig { backend, ..WindowConfig::new(4 << 20) };
    let mut configs = vec![
        small_config(),
        tree(Backend::Lsm),
        tree(Backend::LsmPlain),
        tree(Backend::Cold),
        WindowConfig { backend: Backend::Cold, ..WindowConfig::new(700 << 10) },
        tree(Backend::HashDb),
        tree(Backend::Mmap),
        WindowConfig { durability: Durability::Step, ..tree(Backend::Lsm) },
        engine("pread", 400 << 10),
        engine("inline", 700 << 10),
        engine("auto", 64 << 20),
    ];
    // RocksDB is not on every machine; the tests of `tierbed-compare` say so.
    if tierbed_compare::is_rocksdb_available().is_ok() {
        configs.extend([tree(Backend::RocksDb), tree(Backend::RocksDbUniversal)]);
    }
    configs
}

fn check(job: &Job, config: &WindowConfig, steps: u64) {
    let scratch = tempfile::tempdir().unwrap();
    let mut oracle = WindowEngine::open(None, &memory_config()).unwrap();
    let oracle_plan = job.set_up(&mut oracle).unwrap();
    let mut engine = WindowEngine::open(Some(scratch.path()), config).unwrap();
    let plan = job.set_up(&mut engine).unwrap();
    for step in 0..steps {
        let (expected, expected_weights) = job.step(&mut oracle, &oracle_plan, step).unwrap();
        let (found, found_weights) = job.step(&mut engine, &plan, step).unwrap();
        assert_eq!(bits(&found), bits(&expected), "output of step {step}");
        assert_eq!(bits(&found_weights), bits(&expected_weights), "weights of step {step}");
    }
    assert!(all_records(&mut engine) == all_records(&mut oracle), "records differ");
    assert!(engine.budget().report().peak_bytes <= config.dram_budget_bytes);
}

#[test]
fn all_optimizers_and_budgets_give_the_same_bits() {
    for (seed, optimizer) in OptimizerKind::ALL.into_iter().enumerate() {
        for config in configs() {
            check(&Job::pooled(optimizer, seed as u64), &config, 40);
        }
    }
}

#[test]
fn unpooled_rows_too() {
    for optimizer in OptimizerKind::ALL {
        check(&Job::unpooled(optimizer, 3), &small_config(), 40);
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    for isa in tierbed_kernels::Isa::available() {
        let config = WindowConfig { isa: isa.name().to_owned(), ..small_config() };
        check(&Job::pooled(OptimizerKind::Adam, 4), &config, 20);
    }
}

#[test]
fn the_small_budget_really_evicts() {
    let scratch = tempfile::tempdir().unwrap();
    let mut engine = WindowEngine::open(Some(scratch.path()), &small_config()).unwrap();
    let job = Job::pooled(OptimizerKind::Adam, 1);
    let plan = job.set_up(&mut engine).unwrap();
    for step in 0..40 {
        job.step(&mut engine, &plan, step).unwrap();
    }
    let stats = engine.stats();
    assert!(stats.buffer.evicted_count > 1000, "{stats:?}");
    assert!(stats.store.pages_read > 100, "{stats:?}");
}

#[test]
fn look_ahead_changes_no_bit_and_saves_page_reads() {
    let job = Job {
        tables: vec![(64, 20_000)],
        features: vec![(0, tierbed_train::window::Pooling::Sum)],
        ..Job::pooled(OptimizerKind::Sgd, 5)
    };
    let mut pages_read = Vec::new();
    let mut records = Vec::new();
    for window in [0u64, 4, 16] {
        let scratch = tempfile::tempdir().unwrap();
        let mut engine =
            WindowEngine::open(Some(scratch.path()), &WindowConfig::new(900 << 10)).unwrap();
        let plan = job.set_up(&mut engine).unwrap();
        // Every page written: a row never written would need no read.
        let words = job.table(0).record_words();
        engine.write_records(tierbed_core::TableId(0), 0, &vec![0.25; 20_000 * words]).unwrap();
        let pages_before = engine.stats().store.pages_read;
        let mut announced = 0;
        for step in 0..96 {
            if window > 0 && step >= announced {
                let batches: Vec<_> = (step..step + window).map(|step| job.batch(step)).collect();
                let bags: Vec<_> = batches.iter().map(|batch| batch.bags()).collect();
                announced = step + engine.prefetch(&plan, &bags).unwrap() as u64;
            }
            job.step(&mut engine, &plan, step).unwrap();
        }
        engine.end_lookahead();
        pages_read.push(engine.stats().store.pages_read - pages_before);
        records.push(all_records(&mut engine));
    }
    assert!(records.windows(2).all(|pair| pair[0] == pair[1]));
    assert!(10 * pages_read[2] < 9 * pages_read[0], "{pages_read:?}");
}

/// Popular rows stay in the buffer, whatever could be brought for batches to come.
#[test]
fn a_window_larger_than_the_buffer_reads_hardly_more_rows() {
    let job = Job {
        tables: vec![(64, 20_000)],
        features: vec![(0, tierbed_train::window::Pooling::Sum)],
        ..Job::pooled(OptimizerKind::Sgd, 5)
    };
    let rows_read = [0u64, 64].map(|window| {
        let scratch = tempfile::tempdir().unwrap();
        let mut engine = WindowEngine::open(Some(scratch.path()), &small_config()).unwrap();
        let plan = job.set_up(&mut engine).unwrap();
        let mut announced = 0;
        for step in 0..400 {
            if window > 0 && step >= announced {
                let batches: Vec<_> = (step..step + window).map(|step| job.batch(step)).collect();
                let bags: Vec<_> = batches.iter().map(|batch| batch.bags()).collect();
                announced = step + engine.prefetch(&plan, &bags).unwrap() as u64;
            }
            job.step(&mut engine, &plan, step).unwrap();
        }
        engine.stats().buffer.miss_count
    });
    assert!(100 * rows_read[1] <= 103 * rows_read[0], "{rows_read:?}");
}

#[test]
fn a_window_larger_than_the_buffer_shortens_itself() {
    let scratch = tempfile::tempdir().unwrap();
    let mut engine = WindowEngine::open(Some(scratch.path()), &small_config()).unwrap();
    let job = Job::pooled(OptimizerKind::Adam, 7);
    let plan = job.set_up(&mut engine).unwrap();
    let batches: Vec<_> = (0..200).map(|step| job.batch(step)).collect();
    let bags: Vec<_> = batches.iter().map(|batch| batch.bags()).collect();
    let fitted = engine.prefetch(&plan, &bags).unwrap();
    assert!(fitted < 200, "{fitted}");
    job.step(&mut engine, &plan, 0).unwrap();
}

#[test]
fn checkpoint_and_reopen_continue_with_the_same_bits() {
    for optimizer in OptimizerKind::ALL {
        let job = Job::pooled(optimizer, 2);
        let mut oracle = WindowEngine::open(None, &memory_config()).unwrap();
        let oracle_plan = job.set_up(&mut oracle).unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let open = || {
            let mut engine = WindowEngine::open(Some(scratch.path()), &small_config()).unwrap();
            let plan = job.set_up(&mut engine).unwrap();
            (engine, plan)
        };
        let (mut engine, mut plan) = open();
        let mut step = 0;
        for round in 0..6u64 {
            for _ in 0..7 {
                job.step(&mut oracle, &oracle_plan, step).unwrap();
                job.step(&mut engine, &plan, step).unwrap();
                step += 1;
            }
            let position = step.to_string();
            let attachments =
                [tierbed_core::store::Attachment { name: "position", bytes: position.as_bytes() }];
            assert_eq!(engine.checkpoint("round", &attachments).unwrap(), round + 1);
            // Work that no checkpoint holds, then a crash.
            for lost in 0..3 {
                job.step(&mut engine, &plan, 1000 + lost).unwrap();
            }
            drop(engine);
            (engine, plan) = open();
            let position = engine.attachment("position").unwrap().unwrap();
            assert_eq!(position, step.to_string().into_bytes());
        }
        engine.verify().unwrap();
        assert!(all_records(&mut engine) == all_records(&mut oracle), "{optimizer:?}");
    }
}

#[test]
fn bad_ids_and_shapes_change_nothing() {
    let mut engine = WindowEngine::open(None, &memory_config()).unwrap();
    let job = Job::pooled(OptimizerKind::Sgd, 1);
    let plan = job.set_up(&mut engine).unwrap();
    job.step(&mut engine, &plan, 0).unwrap();
    let before = all_records(&mut engine);
    for bad in [-1, 3000, i64::MAX] {
        let mut batch = job.batch(1);
        batch.indices[0] = bad;
        let mut out = vec![0.0; job.batch_size * plan.output_dim()];
        let error = engine.lookup(&plan, &batch.bags(), &mut out).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("t0") && error.to_string().contains("3000"), "{error}");
        let grads = tierbed_train::window::update::Grads { output: &out, weights: None };
        assert_eq!(
            engine.update(&plan, &batch.bags(), grads).unwrap_err().kind(),
            ErrorKind::Invalid
        );
    }
    let batch = job.batch(1);
    assert!(engine.lookup(&plan, &batch.bags(), &mut [0.0; 3]).is_err());
    assert!(all_records(&mut engine) == before);
}

#[test]
fn a_budget_too_small_names_the_minimum_that_then_works() {
    let scratch = tempfile::tempdir().unwrap();
    let job = Job::pooled(OptimizerKind::Adam, 1);
    let mut budget = 1000;
    let mut refusals = 0;
    let mut engine = loop {
        let result = WindowEngine::open(Some(scratch.path()), &WindowConfig::new(budget)).and_then(
            |mut engine| {
                let plan = job.set_up(&mut engine)?;
                job.step(&mut engine, &plan, 0)?;
                Ok(engine)
            },
        );
        match result {
            Ok(engine) => break engine,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
                let minimum = error.context().iter().find(|(key, _)| *key == "minimum_bytes");
                let minimum: u64 = minimum.unwrap().1.parse().unwrap();
                assert!(minimum > budget, "{error}");
                budget = minimum;
                refusals += 1;
                assert!(refusals < 20, "{error}");
            }
        }
    };
    let plan = job.set_up(&mut engine).unwrap();
    job.step(&mut engine, &plan, 1).unwrap();
    assert!(budget < 1 << 20, "minimum {budget}");
}
