//! A remedy of errors that only files of a store raise: none tells to destroy what cannot be made
//! again. `python/tests/remedies` lists all remedies, with the tests that follow them.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/auto.rs"]
mod common;

use std::sync::Arc;

use common::Run;
use tierbed_core::OptimizerKind;
use tierbed_io::{Folder, FsFolder};
use tierbed_train::window::Backend;
use tierbed_train::{drop_checkpoint, kept_checkpoints, Order, OrderConfig};

#[test]
fn a_checkpoint_that_is_being_restored_is_dropped_when_that_is_finished() {
    let run = Run { budget_bytes: 32 << 20, ..Run::pooled(OptimizerKind::Adagrad) };
    let scratch = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let config = OrderConfig { backend: Some(Backend::File), ..run.config(Order::Auto, None) };
    let mut engine = run.open(Some(folder.clone()), &config).unwrap();
    run.step(&mut engine, 0).unwrap();
    engine.single().unwrap().keep_checkpoint("old", &[]).unwrap();
    let old = run.records(&mut engine).unwrap();
    run.step(&mut engine, 1).unwrap();
    run.checkpoint(&mut engine, 2).unwrap();
    drop(engine);
    folder.write_atomic("RESTORE", b"old").unwrap();
    let refused = drop_checkpoint(scratch.path(), "old").unwrap_err();
    assert!(refused.to_string().contains("open the store once"), "{refused}");
    let mut engine = run.open(Some(folder), &config).unwrap();
    assert!(run.records(&mut engine).unwrap() == old);
    drop(engine);
    drop_checkpoint(scratch.path(), "old").unwrap();
    assert!(kept_checkpoints(scratch.path()).unwrap().is_empty());
}
