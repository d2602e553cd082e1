//! A kept checkpoint comes back bit for bit, however long training went on, and power loss at any
//! operation of keeping, restoring and dropping leaves whole checkpoints only.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

mod common;

use std::sync::Arc;

use common::{all_records, Job};
use tierbed::{drop_checkpoint, kept_checkpoints, restore_checkpoint};
use tierbed::{Backend, Engine, EngineConfig, FeaturePlan, Pooling};
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind, Result};
use tierbed_io::{Folder, FsFolder, MemoryFolder};
use tierbed_sim::{FaultPlan, SimFolder};

fn job() -> Job {
    Job {
        tables: vec![(9, 400), (64, 60)],
        features: vec![(0, Pooling::Sum), (1, Pooling::Mean)],
        batch_size: 4,
        ..Job::pooled(OptimizerKind::Adagrad, 3)
    }
}

fn open(folder: &Arc<dyn Folder>, backend: Backend) -> Result<(Engine, FeaturePlan)> {
    let budget = if backend == Backend::File { 192 << 10 } else { 16 << 20 };
    let config = EngineConfig { backend, io_engine: "inline".into(), ..EngineConfig::new(budget) };
    let mut engine = Engine::open_in(Some(folder.clone()), &config)?;
    let plan = job().set_up(&mut engine)?;
    Ok((engine, plan))
}

fn train(engine: &mut Engine, plan: &FeaturePlan, steps: std::ops::Range<u64>) -> Result<()> {
    steps.into_iter().try_for_each(|step| job().step(engine, plan, step).map(drop))
}

/// All records after `steps` steps.
fn oracle(steps: u64) -> Vec<u32> {
    let mut engine = Engine::open(None, &common::memory_config()).unwrap();
    let plan = job().set_up(&mut engine).unwrap();
    train(&mut engine, &plan, 0..steps).unwrap();
    all_records(&mut engine)
}

fn names(folder: &Arc<dyn Folder>) -> Vec<String> {
    kept_checkpoints(folder.as_ref()).unwrap().into_iter().map(|kept| kept.name).collect()
}

#[test]
fn every_kept_checkpoint_comes_back_and_training_goes_on_from_it() {
    let log = [Backend::Lsm, Backend::LsmPlain, Backend::Cold, Backend::HashDb];
    for backend in [Backend::File, Backend::Memory, Backend::Mmap].into_iter().chain(log) {
        let scratch = tempfile::tempdir().unwrap();
        let folder: Arc<dyn Folder> = if backend == Backend::Memory {
            Arc::new(MemoryFolder::new())
        } else {
            Arc::new(FsFolder::create(scratch.path()).unwrap())
        };
        let (mut engine, plan) = open(&folder, backend).unwrap();
        for (from, to) in [(0, 5), (5, 9), (9, 14)] {
            train(&mut engine, &plan, from..to).unwrap();
            let text = to.to_string();
            let at = Attachment { name: "step", bytes: text.as_bytes() };
            engine.keep_checkpoint(&format!("step-{to}"), &[at]).unwrap();
            engine.checkpoint("another", &[]).unwrap();
        }
        train(&mut engine, &plan, 14..20).unwrap();
        engine.checkpoint("last", &[]).unwrap();
        let closed = restore_checkpoint(&folder, "step-5").unwrap_err();
        assert_eq!(closed.kind(), ErrorKind::Closed, "an open store is not restored");
        drop(engine);
        assert_eq!(names(&folder), ["step-5", "step-9", "step-14"]);
        for to in [9, 5, 14, 5] {
            restore_checkpoint(&folder, &format!("step-{to}")).unwrap();
            let (mut engine, plan) = open(&folder, backend).unwrap();
            assert_eq!(engine.attachment("step").unwrap().unwrap(), to.to_string().as_bytes());
            engine.verify().unwrap();
            assert!(all_records(&mut engine) == oracle(to), "step {to}, {backend:?}");
            train(&mut engine, &plan, to..to + 8).unwrap();
            engine.checkpoint("further", &[]).unwrap();
            assert!(all_records(&mut engine) == oracle(to + 8), "after step {to}, {backend:?}");
        }
        drop_checkpoint(folder.as_ref(), "step-9").unwrap();
        assert_eq!(names(&folder), ["step-5", "step-14"]);
        let files = folder.list().unwrap();
        assert!(!files.iter().any(|file| file.contains("step-9")), "{files:?}");
        restore_checkpoint(&folder, "step-14").unwrap();
        let (mut engine, _) = open(&folder, backend).unwrap();
        assert!(all_records(&mut engine) == oracle(14));
    }
}

#[test]
fn names_and_folders_are_checked() {
    let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let (mut engine, _) = open(&folder, Backend::File).unwrap();
    for name in ["", "a/b", "a.b", "\u{e4}", &"x".repeat(65)] {
        assert_eq!(engine.keep_checkpoint(name, &[]).unwrap_err().kind(), ErrorKind::Invalid);
    }
    engine.keep_checkpoint("one", &[]).unwrap();
    let taken = engine.keep_checkpoint("one", &[]).unwrap_err();
    assert!(taken.to_string().contains("already"), "{taken}");
    drop(engine);
    let unknown = restore_checkpoint(&folder, "two").unwrap_err();
    assert!(unknown.to_string().contains("kept: one"), "{unknown}");
    assert!(drop_checkpoint(folder.as_ref(), "two").is_err());
    let mut memory = Engine::open(None, &common::memory_config()).unwrap();
    assert_eq!(memory.keep_checkpoint("x", &[]).unwrap_err().kind(), ErrorKind::Unsupported);
    // A damaged list is said to be damaged.
    let list = folder.read("kept.one.list").unwrap().unwrap();
    let mut damaged = list.clone();
    damaged[60] ^= 1;
    folder.write_durable("kept.one.list", &damaged).unwrap();
    assert_eq!(kept_checkpoints(folder.as_ref()).unwrap_err().kind(), ErrorKind::Corruption);
}

#[test]
fn files_that_are_never_rewritten_are_shared() {
    use std::os::unix::fs::MetadataExt;
    let scratch = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let (mut engine, plan) = open(&folder, Backend::Lsm).unwrap();
    train(&mut engine, &plan, 0..200).unwrap();
    engine.keep_checkpoint("one", &[]).unwrap();
    let link_counts: Vec<(String, u64)> = folder
        .list()
        .unwrap()
        .into_iter()
        .filter(|file| file.starts_with("kept.one.") && !file.ends_with(".list"))
        .map(|file| (file.clone(), scratch.path().join(file).metadata().unwrap().nlink()))
        .collect();
    let is_shared = |file: &str| file.contains(".sst") || file.contains("commit-");
    assert!(link_counts.iter().any(|(file, _)| file.contains("commit-")));
    assert!(link_counts.iter().all(|(file, links)| (*links == 2) == is_shared(file)));
}

/// Keeps, trains on, restores and drops on a faulty disk; returns what was acknowledged last.
fn live(folder: &SimFolder) -> (u32, Result<()>) {
    let mut done = 0;
    let result = (|| {
        let folder: Arc<dyn Folder> = Arc::new(folder.clone());
        let (mut engine, plan) = open(&folder, Backend::File)?;
        train(&mut engine, &plan, 0..3)?;
        engine.keep_checkpoint("three", &[])?;
        done = 1;
        train(&mut engine, &plan, 3..6)?;
        engine.checkpoint("six", &[])?;
        done = 2;
        drop(engine);
        restore_checkpoint(&folder, "three")?;
        done = 3;
        drop_checkpoint(folder.as_ref(), "three")?;
        done = 4;
        Ok(())
    })();
    (done, result)
}

#[test]
fn power_loss_leaves_whole_checkpoints_only() {
    let clean = SimFolder::default();
    live(&clean).1.unwrap();
    let records: Vec<Vec<u32>> = [0, 3, 6].into_iter().map(oracle).collect();
    for point in 0..clean.io_count() {
        let plan = FaultPlan { seed: 7, crash_after_io: Some(point), ..FaultPlan::default() };
        let folder = SimFolder::new(plan);
        let (done, _) = live(&folder);
        let image = if point % 2 == 0 { folder.crash(point) } else { folder.crash_to_synced() };
        let image: Arc<dyn Folder> = Arc::new(image);
        let (mut engine, _) = open(&image, Backend::File).unwrap();
        let found = all_records(&mut engine);
        let step = records.iter().position(|records| *records == found);
        let step = step.unwrap_or_else(|| panic!("io {point}: rows of no checkpoint"));
        let allowed: &[usize] = match done {
            0 => &[0, 1],
            1 => &[1, 2],
            2 => &[2, 1],
            _ => &[1],
        };
        assert!(allowed.contains(&step), "io {point}: step {step} after {done}");
        drop(engine);
        let kept = names(&image);
        assert!(if (1..3).contains(&done) { kept == ["three"] } else { kept.len() <= 1 });
        if kept == ["three"] {
            restore_checkpoint(&image, "three").unwrap();
            let (mut engine, _) = open(&image, Backend::File).unwrap();
            engine.verify().unwrap();
            assert!(all_records(&mut engine) == records[1], "io {point}");
        }
    }
}
