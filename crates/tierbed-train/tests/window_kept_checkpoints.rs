//! A kept checkpoint comes back bit for bit, however long training went on, and power loss at any
//! operation of keeping, restoring and dropping leaves whole checkpoints only.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should; it damages files directly"
)]

#[path = "common/window.rs"]
mod common;

use std::sync::Arc;

use common::{all_records, Job};
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind, Result};
use tierbed_io::{Folder, FsFolder, MemoryFolder, OpenMode};
use tierbed_sim::{FaultPlan, SimFolder};
use tierbed_store::kept::{
    self, disk_bytes as disk_bytes_of_kept, drop_checkpoint, kept_checkpoints,
};
use tierbed_train::check_folder;
use tierbed_train::window::{Backend, FeatureLayout, Pooling, WindowConfig, WindowEngine};

fn restore_checkpoint(folder: &Arc<dyn Folder>, name: &str) -> Result<()> {
    kept::restore_checkpoint(folder, name, &check_folder)
}

fn job() -> Job {
    Job {
        tables: vec![(9, 400), (64, 60)],
        features: vec![(0, Pooling::Sum), (1, Pooling::Mean)],
        batch_size: 4,
        ..Job::pooled(OptimizerKind::Adagrad, 3)
    }
}

fn open(folder: &Arc<dyn Folder>, backend: Backend) -> Result<(WindowEngine, FeatureLayout)> {
    open_within(folder, backend, None)
}

fn open_within(
    folder: &Arc<dyn Folder>,
    backend: Backend,
    disk_quota_bytes: Option<u64>,
) -> Result<(WindowEngine, FeatureLayout)> {
    tierbed_compare::register_stores();
    let budget = if backend == Backend::File { 192 << 10 } else { 16 << 20 };
    let config = WindowConfig { backend, io_engine: "inline".into(), ..WindowConfig::new(budget) };
    let config = WindowConfig { disk_quota_bytes, ..config };
    let mut engine = WindowEngine::open_in(Some(folder.clone()), &config)?;
    let plan = job().set_up(&mut engine)?;
    Ok((engine, plan))
}

fn train(
    engine: &mut WindowEngine,
    plan: &FeatureLayout,
    steps: std::ops::Range<u64>,
) -> Result<()> {
    steps.into_iter().try_for_each(|step| job().step(engine, plan, step).map(drop))
}

/// All records after `steps` steps.
fn oracle(steps: u64) -> Vec<u32> {
    let mut engine = WindowEngine::open(None, &common::memory_config()).unwrap();
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

fn disk_bytes(folder: &Arc<dyn Folder>) -> u64 {
    let open = |name: &String| folder.open(name, OpenMode::ReadOnly).unwrap();
    folder.list().unwrap().iter().map(|name| open(name).allocated_bytes().unwrap()).sum()
}

#[test]
fn kept_checkpoints_count_against_the_disk_quota() {
    // Maps of pages, manifests and logs are not foreseen to the byte.
    const SLACK_BYTES: u64 = 64 << 10;
    for backend in [Backend::File, Backend::Cold, Backend::Lsm] {
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let (mut engine, plan) = open(&folder, backend).unwrap();
        train(&mut engine, &plan, 0..40).unwrap();
        engine.keep_checkpoint("a", &[]).unwrap();
        drop(engine);
        let kept_bytes = disk_bytes_of_kept(folder.as_ref()).unwrap();
        assert!(kept_bytes > 50_000, "{kept_bytes} bytes kept, {backend:?}");

        let quota = disk_bytes(&folder) + kept_bytes / 2;
        let (mut engine, plan) = open_within(&folder, backend, Some(quota)).unwrap();
        let error = engine.keep_checkpoint("b", &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        assert!(error.to_string().contains("drop a checkpoint"), "{error}");
        assert_eq!(names(&folder), ["a"], "nothing is kept by half");
        engine.drop_checkpoint("a").unwrap();
        engine.keep_checkpoint("b", &[]).unwrap();
        for step in 40..120 {
            let result = train(&mut engine, &plan, step..step + 1)
                .and_then(|()| engine.checkpoint("c", &[]).map(drop));
            let used = disk_bytes(&folder);
            assert!(used <= quota + SLACK_BYTES, "{used} of {quota} at step {step}, {backend:?}");
            if let Err(error) = result {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                break;
            }
        }
        drop(engine);
        let (mut engine, _) = open(&folder, backend).unwrap();
        engine.verify().unwrap();
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
    // Both ways of its remedy.
    engine.keep_checkpoint("other", &[]).unwrap();
    engine.drop_checkpoint("one").unwrap();
    engine.keep_checkpoint("one", &[]).unwrap();
    engine.drop_checkpoint("other").unwrap();
    drop(engine);
    let unknown = restore_checkpoint(&folder, "two").unwrap_err();
    assert!(unknown.to_string().contains("kept: one"), "{unknown}");
    assert!(drop_checkpoint(folder.as_ref(), "two").is_err());
    let mut memory = WindowEngine::open(None, &common::memory_config()).unwrap();
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

/// A store at step 9 that keeps step 5.
fn with_kept(folder: &Arc<dyn Folder>, backend: Backend) {
    let (mut engine, plan) = open(folder, backend).unwrap();
    train(&mut engine, &plan, 0..5).unwrap();
    engine.keep_checkpoint("old", &[Attachment { name: "mine", bytes: b"abc" }]).unwrap();
    train(&mut engine, &plan, 5..9).unwrap();
    engine.checkpoint("new", &[]).unwrap();
}

fn copied(from: &std::path::Path) -> (tempfile::TempDir, Arc<dyn Folder>) {
    let scratch = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), scratch.path().join(entry.file_name())).unwrap();
    }
    let folder = Arc::new(FsFolder::open(scratch.path()).unwrap());
    (scratch, folder)
}

/// Removes, flips a bit of, or cuts a file.
fn damage(path: &std::path::Path, how: u32) -> bool {
    let mut bytes = std::fs::read(path).unwrap();
    match how {
        0 => std::fs::remove_file(path).unwrap(),
        1 => {
            // In the middle of what is written, not in a hole.
            let written: Vec<usize> = bytes
                .iter()
                .enumerate()
                .filter(|(_, byte)| **byte != 0)
                .map(|(at, _)| at)
                .collect();
            let Some(&at) = written.get(written.len() / 2) else { return false };
            bytes[at] ^= 4;
            std::fs::write(path, &bytes).unwrap();
        }
        _ => {
            if bytes.is_empty() {
                return false;
            }
            bytes.truncate(bytes.len() - 1);
            std::fs::write(path, &bytes).unwrap();
        }
    }
    true
}

const ALL: [Backend; 7] = [
    Backend::File,
    Backend::Cold,
    Backend::Lsm,
    Backend::LsmPlain,
    Backend::Memory,
    Backend::HashDb,
    Backend::Mmap,
];

#[test]
fn going_back_to_a_damaged_checkpoint_leaves_the_last_one_as_it_is() {
    for backend in ALL {
        let scratch = tempfile::tempdir().unwrap();
        let original: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
        with_kept(&original, backend);
        let kept = original.list().unwrap().into_iter().filter(|file| file.starts_with("kept."));
        let kept: Vec<String> = kept.collect();
        assert!(kept.len() > 3, "{kept:?}");
        for (file, how) in kept.iter().flat_map(|file| (0..3).map(move |how| (file, how))) {
            let (copy, folder) = copied(scratch.path());
            if !damage(&copy.path().join(file), how) {
                continue;
            }
            let told = format!("{backend:?}, {file}, damage {how}");
            let refused = restore_checkpoint(&folder, "old").unwrap_err();
            if how == 0 && file.ends_with(".list") {
                assert_eq!(refused.kind(), ErrorKind::Invalid, "{told}: {refused}");
            } else {
                assert_eq!(refused.kind(), ErrorKind::Corruption, "{told}: {refused}");
                assert!(refused.to_string().contains("checkpoint: old"), "{told}: {refused}");
            }
            let (mut engine, _) = open(&folder, backend)
                .unwrap_or_else(|error| panic!("{told}: the last checkpoint is gone: {error}"));
            assert!(all_records(&mut engine) == oracle(9), "{told}");
            let verified = engine.verify();
            if how == 0 && file.ends_with(".list") {
                verified.unwrap();
            } else {
                assert_eq!(verified.unwrap_err().kind(), ErrorKind::Corruption, "{told}");
            }
            drop(engine);
            assert!(!folder.list().unwrap().iter().any(|file| file.ends_with(".staged")), "{told}");
            if how == 0 && file.ends_with(".list") {
                continue;
            }
            // The remedy: the damaged one is dropped, and nothing else goes.
            drop_checkpoint(folder.as_ref(), "old").unwrap();
            let (mut engine, _) = open(&folder, backend).unwrap();
            assert!(all_records(&mut engine) == oracle(9), "{told}");
            engine.verify().unwrap();
        }
    }
}

#[test]
fn checkpoints_kept_without_checksums_are_checked_before_anything_goes() {
    use tierbed_core::checksum::crc32c;
    for backend in [Backend::File, Backend::Cold, Backend::Lsm, Backend::Memory, Backend::HashDb] {
        let scratch = tempfile::tempdir().unwrap();
        let original: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
        with_kept(&original, backend);
        // As an earlier version wrote the list.
        let list = String::from_utf8(original.read("kept.old.list").unwrap().unwrap()).unwrap();
        let (_, body) = list.split_once('\n').unwrap();
        let mut body: serde_json::Value = serde_json::from_str(body).unwrap();
        for file in body["files"].as_array_mut().unwrap() {
            file.as_object_mut().unwrap().remove("crc32c");
        }
        let body = body.to_string();
        let list = format!("tierbed-kept 1 {:08x}\n{body}", crc32c(body.as_bytes()));
        original.write_durable("kept.old.list", list.as_bytes()).unwrap();
        for file in original.list().unwrap().iter().filter(|file| file.ends_with(".kept")) {
            let (copy, folder) = copied(scratch.path());
            assert!(damage(&copy.path().join(file), 1));
            let refused = restore_checkpoint(&folder, "old").unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Corruption, "{backend:?}, {file}: {refused}");
            assert!(refused.to_string().contains("checkpoint: old"), "{refused}");
            let (mut engine, _) = open(&folder, backend).unwrap();
            assert!(all_records(&mut engine) == oracle(9), "{backend:?}, {file}");
        }
        restore_checkpoint(&original, "old").unwrap();
        let (mut engine, _) = open(&original, backend).unwrap();
        assert!(all_records(&mut engine) == oracle(5), "{backend:?}");
    }
}

#[test]
fn a_restore_begun_by_an_earlier_version_is_finished() {
    let scratch = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
    with_kept(&folder, Backend::File);
    folder.write_atomic("RESTORE", b"old").unwrap();
    folder.remove("CURRENT").unwrap();
    folder.remove("t0.rows").unwrap();
    let (mut engine, _) = open(&folder, Backend::File).unwrap();
    assert!(all_records(&mut engine) == oracle(5));
    engine.verify().unwrap();
    assert_eq!(folder.read("RESTORE").unwrap(), None);
}
