//! Killed while all rows move to the engine that needs no plan, a store reopens at its last
//! checkpoint, along the plan or behind it, with every row as it was.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

use std::path::Path;
use std::time::Duration;

use tierbed_core::env::{Env, SplitMix64};
use tierbed_core::store::Attachment;
use tierbed_core::{Bags, InitSpec, OptimizerKind, Result, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_kernels::{FeatureLayout, Pooling};
use tierbed_sim::kill::{run_and_kill, victim, Fate};
use tierbed_store::CommitLog;
use tierbed_train::window::update::Grads;
use tierbed_train::{
    Access, Answer, AutoEngine, Order, OrderConfig, PlanFollower, PlanRequest, TrainEngine,
};

const ROW_COUNT: u64 = 20_000;
const DIM: u32 = 16;
const BATCH_ROWS: usize = 2000;
/// Batches of the plan; an epoch is trained along it, then as many go on without.
const BATCHES: u64 = 8;
const BUDGET_BYTES: u64 = 4 << 20;

fn table() -> TableSchema {
    TableSchema {
        name: "t".into(),
        row_count: ROW_COUNT,
        dim: DIM,
        optimizer: OptimizerKind::Adagrad,
        state_init: 0.1,
        init: InitSpec::Uniform { low: -0.5, high: 0.5 },
        seed: 1,
    }
}

fn config(order: Order) -> OrderConfig {
    OrderConfig { order, ..OrderConfig::new(BUDGET_BYTES) }
}

/// The ids of batch `step`, one bag each.
fn batch(step: u64) -> (Vec<i64>, Vec<i64>) {
    let mut rng = SplitMix64::new(step);
    let indices = (0..BATCH_ROWS).map(|_| rng.below(ROW_COUNT) as i64).collect();
    (indices, (0..=BATCH_ROWS as i64).collect())
}

fn features(engine: &AutoEngine) -> Result<FeatureLayout> {
    FeatureLayout::new(engine.schema(), &[(TableId(0), Pooling::Sum)])
}

fn open(folder: Option<&Path>, order: Order) -> AutoEngine {
    let mut engine = AutoEngine::open(folder, &config(order)).unwrap();
    engine.add_table(table()).unwrap();
    engine
}

fn steps_done(engine: &mut AutoEngine) -> u64 {
    let steps = engine.attachment("steps").unwrap();
    steps.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
}

fn train(engine: &mut AutoEngine, steps: std::ops::Range<u64>) {
    let features = features(engine).unwrap();
    for step in steps {
        let (indices, offsets) = batch(step);
        let bags = Bags::new(&indices, &offsets, None, 1).unwrap();
        let mut output = vec![0.0; BATCH_ROWS * DIM as usize];
        engine.lookup(&features, &bags, &mut output, true).unwrap();
        // A gradient that depends on the output: any difference spreads.
        let grad: Vec<f32> = output.iter().map(|value| value * 0.3 + 0.01).collect();
        engine.update(&features, &bags, Grads { output: &grad, weights: None }, None).unwrap();
    }
}

fn checkpoint(engine: &mut AutoEngine, steps: u64) {
    let bytes = steps.to_le_bytes();
    engine.checkpoint("c", &[Attachment { name: "steps", bytes: &bytes }]).unwrap();
}

fn records(engine: &mut AutoEngine) -> Vec<Vec<u32>> {
    let mut records = vec![Vec::new(); ROW_COUNT as usize];
    // Along a plan a row may be visited twice; the last visit counts.
    let mut visit = |at: usize, record: &[f32]| {
        records[at] = record.iter().map(|word| word.to_bits()).collect();
    };
    let own = engine.rows_of(TableId(0), Access::Read).unwrap();
    own.engine.visit_rows(own.table, 0, ROW_COUNT as usize, &mut visit).unwrap();
    records
}

/// Trains an epoch along a plan and makes a checkpoint.
fn train_along_a_plan(folder: &Path) {
    let mut engine = open(Some(folder), Order::Forward);
    let features = features(&engine).unwrap();
    let request = PlanRequest { source: "batches".into(), window_batches_max: 2 };
    assert_eq!(engine.follow(&features, &request).unwrap(), Answer::PlanNeeded);
    engine.start_plan(&features, &request).unwrap();
    for step in 0..BATCHES {
        let (indices, offsets) = batch(step);
        engine.push_planned(&Bags::new(&indices, &offsets, None, 1).unwrap(), true).unwrap();
    }
    engine.finish_plan().unwrap();
    assert!(matches!(engine.follow(&features, &request).unwrap(), Answer::Following { .. }));
    train(&mut engine, 0..BATCHES);
    checkpoint(&mut engine, BATCHES);
}

/// Leaves the plan, trains on, makes a checkpoint: what the victim does.
fn leave_the_plan(folder: &Path) {
    let mut engine = open(Some(folder), Order::Window);
    train(&mut engine, BATCHES..2 * BATCHES);
    checkpoint(&mut engine, 2 * BATCHES);
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn check(test: &str, kill_count: u32, seed: u64) {
    if let Some((folder, _)) = victim() {
        return leave_the_plan(&folder);
    }
    let planned = tempfile::tempdir().unwrap();
    train_along_a_plan(planned.path());
    // The oracle never had a plan, nor a disk.
    let memory = OrderConfig {
        backend: Some(tierbed_train::window::Backend::Memory),
        ..config(Order::Auto)
    };
    let memory = OrderConfig { dram_budget_bytes: 64 << 20, ..memory };
    let mut oracle = AutoEngine::open(None, &memory).unwrap();
    oracle.add_table(table()).unwrap();
    let expected = [0..BATCHES, BATCHES..2 * BATCHES].map(|steps| {
        train(&mut oracle, steps);
        records(&mut oracle)
    });
    // How long a victim takes on this machine.
    let (clock, scratch) = (Env::real(0).clock, tempfile::tempdir().unwrap());
    copy(planned.path(), scratch.path());
    let started_us = clock.now_us();
    let whole = run_and_kill(test, scratch.path(), "", Duration::from_secs(100)).unwrap();
    assert_eq!(whole, Fate::Finished);
    let whole_us = clock.now_us() - started_us;

    let mut rng = SplitMix64::new(seed);
    let (mut killed, mut moving) = (0, 0);
    while killed < kill_count {
        let scratch = tempfile::tempdir().unwrap();
        copy(planned.path(), scratch.path());
        let delay = Duration::from_micros(rng.below(whole_us));
        let fate = run_and_kill(test, scratch.path(), "", delay).unwrap();
        killed += u32::from(fate == Fate::Killed);
        let inside = scratch.path().join("window");
        let is_in_force = inside.is_dir()
            && CommitLog::stored_backend(&FsFolder::open(&inside).unwrap()).unwrap().is_some();
        moving += u32::from(inside.is_dir() && !is_in_force);
        // The plan is left for good only by a checkpoint behind it.
        let mut engine = open(Some(scratch.path()), Order::Auto);
        let done = steps_done(&mut engine);
        assert!([BATCHES, 2 * BATCHES].contains(&done), "{done}");
        assert!(fate == Fate::Killed || done == 2 * BATCHES, "ended at step {done}");
        engine.verify().unwrap();
        let at = usize::from(done > BATCHES);
        assert!(records(&mut engine) == expected[at], "rows differ at step {done}");
        drop(engine);
        if done == BATCHES {
            leave_the_plan(scratch.path());
            let mut engine = open(Some(scratch.path()), Order::Auto);
            assert!(records(&mut engine) == expected[1], "rows differ at the end");
        }
    }
    println!("{killed} kills, {moving} while rows moved");
    assert!(moving > 0, "only killed too early or too late");
}

#[test]
fn a_few_kills_while_rows_move_lose_nothing() {
    check("a_few_kills_while_rows_move_lose_nothing", 6, 1);
}

/// Long: `make test-long` runs it.
#[test]
#[ignore = "a hundred kills take a minute or two"]
fn a_hundred_kills_while_rows_move_lose_nothing() {
    check("a_hundred_kills_while_rows_move_lose_nothing", 100, 2);
}
