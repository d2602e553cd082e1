//! A file of another store is refused, also when that store differs in nothing else.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should; it exchanges files directly"
)]

#[path = "common/auto.rs"]
mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::Run;
use tierbed_core::{Error, ErrorKind, OptimizerKind, Result};
use tierbed_io::{Folder, FsFolder};
use tierbed_train::window::{Backend, Durability};
use tierbed_train::{Order, OrderConfig};

/// All whose files have checksums: `mmap` has none.
const BACKENDS: [Backend; 6] = [
    Backend::File,
    Backend::Cold,
    Backend::Lsm,
    Backend::LsmPlain,
    Backend::Memory,
    Backend::HashDb,
];

fn run() -> Run {
    Run { budget_bytes: 32 << 20, ..Run::pooled(OptimizerKind::Adagrad) }
}

fn configs() -> Vec<OrderConfig> {
    tierbed_compare::register_stores();
    let run = run();
    let auto = run.config(Order::Auto, None);
    let by = |backend| OrderConfig { backend: Some(backend), ..auto.clone() };
    let mut all: Vec<_> = BACKENDS.map(by).into();
    all.push(OrderConfig { durability: Durability::Step, ..by(Backend::Lsm) });
    all.push(run.config(Order::Window, Some(2)));
    all.push(run.config(Order::Forward, None));
    all
}

fn folder(path: &Path) -> Option<Arc<dyn Folder>> {
    Some(Arc::new(FsFolder::create(path).unwrap()))
}

fn make(config: &OrderConfig, path: &Path) {
    let run = run();
    let mut engine = run.open(folder(path), config).unwrap();
    if config.order == Order::Forward {
        run.follow(&mut engine).unwrap();
    }
    for step in 0..6 {
        run.step(&mut engine, step).unwrap();
        if step == 2 || config.durability == Durability::Step {
            run.checkpoint(&mut engine, step + 1).unwrap();
        }
    }
    run.checkpoint(&mut engine, 6).unwrap();
}

fn read(config: &OrderConfig, path: &Path) -> Result<Vec<Vec<u32>>> {
    let run = run();
    let mut engine = run.open(folder(path), config)?;
    if config.order == Order::Forward {
        run.follow(&mut engine)?;
    }
    engine.verify()?;
    run.records(&mut engine)
}

/// The files of a store by kind: names of log-structured files begin with the store's own numbers.
fn files(path: &Path) -> Vec<PathBuf> {
    let names = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = names.filter(|file| !file.ends_with("LOCK")).collect();
    files.sort_by_cached_key(|file| (file.extension().map(ToOwned::to_owned), file.clone()));
    files
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir(to).unwrap();
    for file in files(from) {
        std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

/// Both stores hold the same rows, so that nothing but the store tells their pages apart.
#[test]
fn a_file_of_an_equal_store_is_corruption() {
    for config in configs() {
        let scratch = tempfile::tempdir().unwrap();
        let [one, other, mixed] = ["one", "other", "mixed"].map(|name| scratch.path().join(name));
        make(&config, &one);
        make(&config, &other);
        let rows = read(&config, &one).unwrap();
        assert!(read(&config, &other).unwrap() == rows);
        let (ours, theirs) = (files(&one), files(&other));
        assert_eq!(ours.len(), theirs.len(), "{config:?}");
        let mut exchanged = 0;
        for (our, their) in ours.iter().zip(&theirs) {
            if std::fs::read(our).unwrap() == std::fs::read(their).unwrap() {
                continue;
            }
            exchanged += 1;
            copy(&one, &mixed);
            std::fs::copy(their, mixed.join(our.file_name().unwrap())).unwrap();
            let kind = read(&config, &mixed).map_err(|error: Error| error.kind());
            assert_eq!(kind.map(drop), Err(ErrorKind::Corruption), "{our:?} {config:?}");
        }
        // Checkpoints of the others hold a checksum of all that their files hold.
        let has_pages = config.backend != Some(Backend::Memory) && config.order != Order::Forward;
        assert!(exchanged >= 2 + usize::from(has_pages), "{exchanged} of {ours:?}");
    }
}
