//! Checkpoints that are kept along a plan come back, whatever became of the store.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should; it damages files directly"
)]

#[path = "common/auto.rs"]
mod common;

use std::path::Path;
use std::sync::Arc;

use common::Run;
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind};
use tierbed_io::FsFolder;
use tierbed_train::{drop_checkpoint, kept_checkpoints, restore_checkpoint, Order, ShardedEngine};

/// Steps at which a checkpoint is kept: in the first epoch and in the second one.
const KEPT: [(&str, u64); 2] = [("five", 5), ("fifteen", 15)];
const LAST: u64 = 20;

fn run() -> Run {
    Run { budget_bytes: 32 << 20, ..Run::pooled(OptimizerKind::Adagrad) }
}

fn open(path: &Path, order: Order) -> ShardedEngine {
    let run = run();
    let folder = Arc::new(FsFolder::create(path).unwrap());
    let mut engine = run.open(Some(folder), &run.config(order, None)).unwrap();
    if order == Order::Forward {
        run.follow(&mut engine).unwrap();
    }
    engine
}

fn keep(engine: &mut ShardedEngine, name: &str, steps: u64) {
    let bytes = steps.to_le_bytes();
    let attachment = Attachment { name: "steps", bytes: &bytes };
    engine.single().unwrap().keep_checkpoint(name, &[attachment]).unwrap();
}

/// What a store in memory holds after so many steps.
fn oracle(steps: u64) -> Vec<Vec<u32>> {
    let run = run();
    let mut engine = run.oracle();
    for step in 0..steps {
        run.step(&mut engine, step).unwrap();
    }
    run.records(&mut engine).unwrap()
}

fn make(path: &Path) {
    let (run, mut engine) = (run(), open(path, Order::Forward));
    for step in 0..LAST {
        if let Some((name, steps)) = KEPT.iter().find(|(_, steps)| *steps == step) {
            keep(&mut engine, name, *steps);
        }
        run.step(&mut engine, step).unwrap();
    }
    run.checkpoint(&mut engine, LAST).unwrap();
}

fn names(path: &Path) -> Vec<String> {
    kept_checkpoints(path).unwrap().into_iter().map(|kept| kept.name).collect()
}

#[test]
fn training_goes_on_from_a_checkpoint_kept_along_a_plan() {
    let (run, scratch) = (run(), tempfile::tempdir().unwrap());
    make(scratch.path());
    let last = oracle(LAST);
    for (name, steps) in [KEPT[1], KEPT[0], KEPT[1]] {
        restore_checkpoint(scratch.path(), name).unwrap();
        let mut engine = open(scratch.path(), Order::Forward);
        assert_eq!(run.steps_done(&mut engine).unwrap(), steps);
        assert!(run.records(&mut engine).unwrap() == oracle(steps), "{name}");
        engine.verify().unwrap();
        for step in steps..LAST {
            run.step(&mut engine, step).unwrap();
        }
        assert!(run.records(&mut engine).unwrap() == last, "{name}");
        run.checkpoint(&mut engine, LAST).unwrap();
    }
    assert_eq!(names(scratch.path()), ["five", "fifteen"]);
    let mut engine = open(scratch.path(), Order::Forward);
    let taken = engine.single().unwrap().keep_checkpoint("five", &[]).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::Invalid);
    engine.single().unwrap().drop_checkpoint("five").unwrap();
    drop(engine);
    drop_checkpoint(scratch.path(), "fifteen").unwrap();
    assert!(names(scratch.path()).is_empty());
    assert!(run.records(&mut open(scratch.path(), Order::Forward)).unwrap() == last);
}

#[test]
fn a_damaged_file_of_one_kept_along_a_plan_leaves_the_last_checkpoint() {
    let scratch = tempfile::tempdir().unwrap();
    make(scratch.path());
    let (run, last) = (run(), oracle(LAST));
    let files: Vec<_> =
        std::fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let of_one = |path: &&std::path::PathBuf| {
        path.file_name().unwrap().to_str().unwrap().starts_with("kept.five.")
    };
    let kept: Vec<_> = files.iter().filter(of_one).collect();
    assert!(kept.iter().any(|file| file.to_str().unwrap().ends_with(".plan.kept")), "{kept:?}");
    for file in kept {
        let whole = std::fs::read(file).unwrap();
        if whole.is_empty() {
            continue;
        }
        let mut bytes = whole.clone();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        // Another file: checkpoints in force share theirs with those that are kept.
        std::fs::remove_file(file).unwrap();
        std::fs::write(file, &bytes).unwrap();
        let refused = restore_checkpoint(scratch.path(), "five").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Corruption, "{file:?}: {refused}");
        let mut engine = open(scratch.path(), Order::Forward);
        assert!(run.records(&mut engine).unwrap() == last, "{file:?}");
        assert!(engine.verify().is_err(), "{file:?}");
        drop(engine);
        std::fs::write(file, &whole).unwrap();
    }
    restore_checkpoint(scratch.path(), "five").unwrap();
}

#[test]
fn a_store_that_left_its_plan_goes_back_to_it() {
    let (run, scratch) = (run(), tempfile::tempdir().unwrap());
    make(scratch.path());
    let mut engine = open(scratch.path(), Order::Window);
    run.step(&mut engine, LAST).unwrap();
    keep(&mut engine, "later", LAST + 1);
    let later = run.records(&mut engine).unwrap();
    let taken = engine.single().unwrap().keep_checkpoint("five", &[]).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::Invalid);
    engine.verify().unwrap();
    drop(engine);
    assert_eq!(names(scratch.path()), ["five", "fifteen", "later"]);
    let refused = restore_checkpoint(scratch.path(), "five").unwrap_err();
    assert!(refused.to_string().contains("kept: later"), "{refused}");
    assert!(run.records(&mut open(scratch.path(), Order::Auto)).unwrap() == later);
    drop_checkpoint(scratch.path(), "later").unwrap();
    open(scratch.path(), Order::Auto).single().unwrap().drop_checkpoint("fifteen").unwrap();
    restore_checkpoint(scratch.path(), "five").unwrap();
    let mut engine = open(scratch.path(), Order::Forward);
    assert!(run.records(&mut engine).unwrap() == oracle(5));
    for step in 5..LAST {
        run.step(&mut engine, step).unwrap();
    }
    assert!(run.records(&mut engine).unwrap() == oracle(LAST));
    assert_eq!(names(scratch.path()), ["five"]);
}
