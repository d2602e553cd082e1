//! A folder that lost the file which says what is in force is refused by every opener, untouched,
//! and what is whole in it is put in force by hand.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should; it damages files directly"
)]

#[path = "common/auto.rs"]
mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use common::Run;
use tierbed_core::{ErrorKind, OptimizerKind};
use tierbed_io::{Folder, FsFolder};
use tierbed_kernels::Pooling;
use tierbed_train::window::{Backend, Durability};
use tierbed_train::{candidates, put_in_force, AutoEngine, Order, OrderConfig, ShardedEngine};

const BACKENDS: [Backend; 7] = [
    Backend::File,
    Backend::Cold,
    Backend::Lsm,
    Backend::LsmPlain,
    Backend::Memory,
    Backend::HashDb,
    Backend::Mmap,
];

fn run() -> Run {
    Run { budget_bytes: 32 << 20, ..Run::pooled(OptimizerKind::Adagrad) }
}

/// How a store is made.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    By(Backend),
    Forward,
    Shards(Order),
    /// Left the forward order.
    Moved,
}

fn kinds() -> Vec<Kind> {
    let by = BACKENDS.into_iter().map(Kind::By);
    let others = [Kind::Forward, Kind::Shards(Order::Forward), Kind::Shards(Order::Window)];
    by.chain(others).chain([Kind::Moved]).collect()
}

impl Kind {
    fn config(self) -> OrderConfig {
        tierbed_compare::register_stores();
        let run = run();
        match self {
            Self::By(backend) => {
                OrderConfig { backend: Some(backend), ..run.config(Order::Auto, None) }
            }
            Self::Forward => run.config(Order::Forward, None),
            Self::Shards(order) => run.config(order, Some(2)),
            Self::Moved => run.config(Order::Window, None),
        }
    }

    fn pointer(self) -> &'static str {
        match self {
            Self::Shards(_) => "SHARDS",
            Self::Moved => "window/CURRENT",
            Self::By(_) | Self::Forward => "CURRENT",
        }
    }
}

fn folder(path: &Path) -> Option<Arc<dyn Folder>> {
    Some(Arc::new(FsFolder::create(path).unwrap()))
}

/// Makes a store with steps done and a checkpoint; returns its rows.
fn make(kind: Kind, path: &Path) -> Vec<Vec<u32>> {
    let run = run();
    if kind == Kind::Moved {
        make(Kind::Forward, path);
    }
    let mut engine = run.open(folder(path), &kind.config()).unwrap();
    if matches!(kind, Kind::Forward | Kind::Shards(Order::Forward)) {
        run.follow(&mut engine).unwrap();
    }
    for step in 0..6 {
        run.step(&mut engine, step).unwrap();
    }
    run.checkpoint(&mut engine, 6).unwrap();
    run.records(&mut engine).unwrap()
}

fn bytes_of(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() {
            let inner = bytes_of(&entry.path()).into_iter();
            all.extend(inner.map(|(file, bytes)| (format!("{name}/{file}"), bytes)));
        } else if name != "LOCK" {
            all.insert(name, std::fs::read(entry.path()).unwrap_or_default());
        }
    }
    all
}

/// Every way to open a folder.
fn openers() -> Vec<OrderConfig> {
    let run = run();
    let orders = [Order::Auto, Order::Forward, Order::Window];
    let mut all: Vec<_> = orders.map(|order| run.config(order, None)).into();
    all.extend(orders.map(|order| run.config(order, Some(2))));
    let by = |backend| OrderConfig { backend: Some(backend), ..run.config(Order::Auto, None) };
    all.extend(BACKENDS.map(by));
    all
}

fn open_and_use(path: &Path, config: &OrderConfig) -> tierbed_core::Result<()> {
    let run = run();
    let mut engine = run.open(folder(path), config)?;
    run.step(&mut engine, 0)?;
    run.checkpoint(&mut engine, 1)
}

#[test]
fn a_lost_pointer_is_refused_by_every_opener_and_put_back_by_repair() {
    for kind in kinds() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path();
        let rows = make(kind, path);
        let pointer = path.join(kind.pointer());
        let told = std::fs::read(&pointer).unwrap();
        for is_dangling in [false, true] {
            std::fs::remove_file(&pointer).unwrap();
            if is_dangling {
                std::os::unix::fs::symlink("nowhere", &pointer).unwrap();
            }
            let before = bytes_of(path);
            for config in openers() {
                let refused = open_and_use(path, &config).unwrap_err();
                let is_told = matches!(refused.kind(), ErrorKind::Corruption | ErrorKind::Invalid)
                    || config.shards.is_some() && refused.kind() == ErrorKind::Unsupported;
                assert!(is_told, "{kind:?}, {config:?}: {refused}");
                assert!(bytes_of(path) == before, "{kind:?}, {config:?}: changed; {refused}");
            }
            let own = open_and_use(path, &kind.config()).unwrap_err();
            assert_eq!(own.kind(), ErrorKind::Corruption, "{kind:?}: {own}");
            assert!(own.to_string().contains("remedy"), "{own}");
            let listed = candidates(path).unwrap();
            assert!(bytes_of(path) == before, "{kind:?}: listing changes nothing");
            let [commit] = &listed[..] else { panic!("{kind:?}: {listed:?}") };
            assert_eq!(commit.damage, None, "{kind:?}");
            assert!(!commit.is_in_force && !commit.is_kept);
            assert_eq!(commit.attachments, ["steps"]);
            let steps: Vec<_> = commit.tables.iter().map(|table| table.steps).collect();
            let expected = if kind == Kind::Moved { 12 } else { 6 };
            assert_eq!(steps, [Some(expected); 5], "{kind:?}");
            let missing = put_in_force(path, commit.number + 9).unwrap_err();
            assert_eq!(missing.kind(), ErrorKind::Invalid, "{missing}");
            put_in_force(path, commit.number).unwrap();
            assert_eq!(std::fs::read(&pointer).unwrap().len(), told.len(), "{kind:?}");
            let listed = candidates(path).unwrap();
            assert!(listed[0].is_in_force, "{kind:?}: {listed:?}");
        }
        let run = run();
        let mut engine = ShardedEngine::open_in(folder(path), &kind.config()).unwrap();
        assert_eq!(run.steps_done(&mut engine).unwrap(), 6);
        if !matches!(kind, Kind::Shards(_)) {
            assert!(run.records(&mut engine).unwrap() == rows, "{kind:?}");
        }
        engine.verify().unwrap();
        let owned = candidates(path).unwrap_err();
        assert_eq!(owned.kind(), ErrorKind::Closed, "{owned}");
        drop(engine);
        let mut engine = run.open(folder(path), &kind.config()).unwrap();
        assert!(engine.engine().last_checkpoint().is_some());
        engine.verify().unwrap();
    }
}

#[test]
fn a_damaged_commit_is_told_and_not_put_in_force() {
    for kind in kinds() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path();
        make(kind, path);
        std::fs::remove_file(path.join(kind.pointer())).unwrap();
        for (name, bytes) in bytes_of(path) {
            // Maps have no checksums. Of a store that moved, what it left behind is garbage.
            let is_outside = kind == Kind::Moved && !name.starts_with("window/");
            if name.ends_with("CURRENT") || name.ends_with(".dense") || is_outside {
                continue;
            }
            let mut damaged = bytes.clone();
            let written: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] != 0).collect();
            // What no commit needs may change.
            let Some(&at) = written.get(written.len() / 2) else { continue };
            damaged[at] ^= 4;
            std::fs::write(path.join(&name), &damaged).unwrap();
            let listed = candidates(path).unwrap();
            if let Some(damage) = &listed[0].damage {
                let number = listed[0].number;
                let refused = put_in_force(path, number).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Corruption, "{kind:?}, {name}: {damage}");
                assert!(!path.join(kind.pointer()).exists());
            }
            assert!(
                listed[0].damage.is_some() || !name.contains("commit-"),
                "{kind:?}: damage of {name} is not told"
            );
            std::fs::write(path.join(&name), &bytes).unwrap();
        }
    }
}

#[test]
fn an_older_commit_may_be_put_in_force() {
    for backend in [Backend::File, Backend::Memory] {
        let (scratch, run) = (tempfile::tempdir().unwrap(), run());
        let (path, config) = (scratch.path(), Kind::By(backend).config());
        let mut engine = run.open(folder(path), &config).unwrap();
        let mut rows = Vec::new();
        let mut first = BTreeMap::new();
        for step in 0..2 {
            run.step(&mut engine, step).unwrap();
            run.checkpoint(&mut engine, step + 1).unwrap();
            rows.push(run.records(&mut engine).unwrap());
            if step == 0 {
                first = bytes_of(path);
            }
        }
        drop(engine);
        // As a copy made at two times leaves it.
        for (name, bytes) in first.iter().filter(|(name, _)| name.starts_with("commit-")) {
            std::fs::write(path.join(name), bytes).unwrap();
        }
        let listed = candidates(path).unwrap();
        let told: Vec<_> =
            listed.iter().map(|commit| (commit.number, commit.is_in_force)).collect();
        assert_eq!(told, [(1, false), (2, true)]);
        assert!(listed.iter().all(|commit| commit.damage.is_none()), "{listed:?}");
        put_in_force(path, 1).unwrap();
        let mut engine = run.open(folder(path), &config).unwrap();
        assert!(run.records(&mut engine).unwrap() == rows[0], "{backend:?}");
        assert_eq!(run.steps_done(&mut engine).unwrap(), 1);
    }
}

#[test]
fn a_store_that_left_its_plan_is_opened_with_its_backend_only() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path();
    let rows = make(Kind::Moved, path);
    let before = bytes_of(path);
    for config in openers() {
        let opened = ShardedEngine::open_in(folder(path), &config);
        let is_own = config.backend.is_none_or(|backend| backend == Backend::File)
            && config.shards.is_none();
        match opened {
            Ok(mut engine) => {
                assert!(is_own, "{config:?}");
                assert!(run().records(&mut engine).unwrap() == rows, "{config:?}");
            }
            Err(error) => {
                assert!(!is_own, "{config:?}: {error}");
                assert_eq!(error.kind(), ErrorKind::Invalid, "{config:?}: {error}");
            }
        }
    }
    let inside = |bytes: BTreeMap<String, Vec<u8>>| {
        bytes.into_iter().filter(|(name, _)| name.starts_with("window/")).collect::<Vec<_>>()
    };
    assert!(inside(bytes_of(path)) == inside(before));
}

#[test]
fn a_folder_that_was_opened_and_never_committed_is_new() {
    let run = run();
    for first in openers() {
        for second in openers() {
            let scratch = tempfile::tempdir().unwrap();
            if ShardedEngine::open_in(folder(scratch.path()), &first).is_err() {
                continue;
            }
            let is_possible = {
                let other = tempfile::tempdir().unwrap();
                ShardedEngine::open_in(folder(other.path()), &second).is_ok()
            };
            if is_possible {
                run.open(folder(scratch.path()), &second).unwrap();
            }
        }
    }
    let scratch = tempfile::tempdir().unwrap();
    drop(AutoEngine::open(Some(scratch.path()), &run.config(Order::Auto, None)).unwrap());
    assert_eq!(candidates(scratch.path()).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn a_log_that_was_cut_is_told_with_the_steps_that_are_lost() {
    let run = Run { tables: vec![(4, 200)], features: vec![(0, Pooling::Sum)], ..run() };
    let config = OrderConfig {
        backend: Some(Backend::Lsm),
        durability: Durability::Step,
        ..run.config(Order::Auto, None)
    };
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path();
    let mut engine = run.open(folder(path), &config).unwrap();
    let mut rows = Vec::new();
    for step in 0..6 {
        run.step(&mut engine, step).unwrap();
        run.checkpoint(&mut engine, step + 1).unwrap();
        rows.push(run.records(&mut engine).unwrap());
    }
    drop(engine);
    let logs: Vec<_> = bytes_of(path).into_keys().filter(|name| name.ends_with(".wal")).collect();
    let [log] = &logs[..] else { panic!("{logs:?}") };
    let whole = std::fs::read(path.join(log)).unwrap();
    let mut lost_counts = std::collections::BTreeSet::new();
    for cut in (0..whole.len()).step_by(whole.len() / 23) {
        for is_zeroed in [false, true] {
            let mut short = whole[..cut].to_vec();
            if is_zeroed {
                short.resize(whole.len(), 0);
            }
            std::fs::write(path.join(log), &short).unwrap();
            let refused = run.open(folder(path), &config).err().unwrap();
            assert_eq!(refused.kind(), ErrorKind::Corruption, "cut at {cut}: {refused}");
            assert_eq!(std::fs::read(path.join(log)).unwrap(), short, "nothing was cut off");
            let listed = candidates(path).unwrap();
            let told = refused.context().iter().find(|(name, _)| *name == "steps_lost");
            if listed[0].damage.is_some() {
                // The full commit needs these bytes.
                assert!(cut < whole.len() / 3, "cut at {cut}: {listed:?}");
                continue;
            }
            lost_counts.insert(told.unwrap().1.parse::<u64>().unwrap());
            assert!(!listed[0].is_in_force && listed[0].damage.is_none(), "{listed:?}");
            assert!(refused.to_string().contains(&format!("last_step: {}", listed[0].last_number)));
        }
    }
    assert!(lost_counts.len() > 3, "{lost_counts:?}");
    std::fs::write(path.join(log), &whole[..whole.len() / 4 * 3]).unwrap();
    let accepted = put_in_force(path, candidates(path).unwrap()[0].number).unwrap();
    let mut engine = run.open(folder(path), &config).unwrap();
    let steps = run.steps_done(&mut engine).unwrap();
    assert_eq!(accepted.last_number, steps);
    assert!(run.records(&mut engine).unwrap() == rows[steps as usize - 1]);
    run.step(&mut engine, steps).unwrap();
    run.checkpoint(&mut engine, steps + 1).unwrap();
    drop(engine);
    let mut engine = run.open(folder(path), &config).unwrap();
    assert!(run.records(&mut engine).unwrap() == rows[steps as usize]);
}
