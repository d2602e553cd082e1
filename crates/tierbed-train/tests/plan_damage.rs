//! A plan that is damaged or missing is a state that opens: rows come out, and the batches of the
//! plan make it again. Training then goes on with the bits of an undisturbed run.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/auto.rs"]
mod common;

use std::sync::Arc;

use common::Run;
use tierbed_core::{ErrorKind, OptimizerKind};
use tierbed_io::{Folder, FsFolder, MemoryFolder};
use tierbed_train::{Answer, OnMismatch, Order, OrderConfig, PlanRequest, ShardedEngine};

/// Where the checkpoint of these tests is: in the middle of an epoch, or between two.
const PLACES: [u64; 2] = [17, 24];

fn shared(folder: &MemoryFolder) -> Option<Arc<dyn Folder>> {
    Some(Arc::new(folder.clone()))
}

fn copy(folder: &MemoryFolder) -> MemoryFolder {
    let copy = MemoryFolder::new();
    for name in folder.list().unwrap() {
        copy.write_durable(&name, &folder.read(&name).unwrap().unwrap()).unwrap();
    }
    copy
}

/// The files of the plan that end so.
fn files(folder: &MemoryFolder, ending: &str) -> Vec<String> {
    let names = folder.list().unwrap().into_iter();
    names.filter(|name| name.contains("order-") && name.ends_with(ending)).collect()
}

/// A store trained up to batch `steps`, where its checkpoint is, and the bits of its rows.
fn trained(run: &Run, shards: u32, steps: u64) -> (MemoryFolder, Vec<Vec<u32>>) {
    let folder = MemoryFolder::new();
    let mut engine = run.open(shared(&folder), &config(run, shards, Order::Auto)).unwrap();
    run.follow(&mut engine).unwrap();
    for step in 0..steps {
        run.step(&mut engine, step).unwrap();
    }
    run.checkpoint(&mut engine, steps).unwrap();
    let records = run.records(&mut engine).unwrap();
    (folder, records)
}

fn config(run: &Run, shards: u32, order: Order) -> OrderConfig {
    run.config(order, (shards > 1).then_some(shards))
}

/// Rows are there; the plan is made again; the rest of the training has the bits of memory.
fn check(run: &Run, folder: &MemoryFolder, (shards, steps): (u32, u64), rows: &[Vec<u32>]) {
    let mut engine = run.open(shared(folder), &config(run, shards, Order::Forward)).unwrap();
    assert!(run.records(&mut engine).unwrap() == rows, "rows without the plan");
    train_on(run, &mut engine, steps);
    assert_eq!(files(folder, ".plan").len(), shards as usize, "{:?}", folder.list());
    assert_eq!(files(folder, ".plan.ids").len(), shards as usize);
    engine.verify().unwrap();
}

fn train_on(run: &Run, engine: &mut ShardedEngine, steps: u64) {
    let mut oracle = run.oracle();
    for step in 0..steps {
        run.step(&mut oracle, step).unwrap();
    }
    run.follow(engine).unwrap();
    assert_eq!(engine.engine().position(), Some((steps / run.batches, steps % run.batches)));
    for step in steps..steps + 15 {
        let output = run.step(engine, step).unwrap();
        assert!(output == run.step(&mut oracle, step).unwrap(), "step {step}");
    }
    run.checkpoint(engine, steps + 15).unwrap();
    assert!(run.records(engine).unwrap() == run.records(&mut oracle).unwrap());
}

fn write(folder: &MemoryFolder, name: &str, bytes: &[u8]) {
    folder.remove(name).unwrap();
    folder.write_durable(name, bytes).unwrap();
}

#[test]
fn damage_anywhere_in_the_plan_is_mended_by_its_batches() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    for (shards, steps) in [(1, PLACES[0]), (1, PLACES[1]), (2, PLACES[0])] {
        let (whole, rows) = trained(&run, shards, steps);
        let name = &files(&whole, ".plan")[0];
        let bytes = whole.read(name).unwrap().unwrap();
        // Header, key, entries and batches of each window, directory.
        let pages = bytes.len() / 4096;
        let at = (0..pages).map(|page| 4096 * page + (page * 761) % 4096);
        let at = [0, 9, 20, 130].into_iter().chain(at).chain([bytes.len() - 1]);
        for at in at.step_by(if shards == 1 { 1 } else { 5 }) {
            let folder = copy(&whole);
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            write(&folder, name, &damaged);
            check(&run, &folder, (shards, steps), &rows);
        }
    }
}

#[test]
fn a_plan_that_is_missing_cut_or_another_is_made_again() {
    let run = Run::pooled(OptimizerKind::RowWiseAdagrad);
    for (shards, steps) in [(1, PLACES[0]), (1, PLACES[1]), (3, PLACES[0])] {
        let (whole, rows) = trained(&run, shards, steps);
        let other = trained(&Run { batches: 5, ..Run::pooled(OptimizerKind::Sgd) }, shards, 3).0;
        for name in files(&whole, ".plan") {
            let bytes = whole.read(&name).unwrap().unwrap();
            for len in [0, 100, 4096, bytes.len() / 2, bytes.len() - 1] {
                let folder = copy(&whole);
                write(&folder, &name, &bytes[..len]);
                check(&run, &folder, (shards, steps), &rows);
            }
            let folder = copy(&whole);
            folder.remove(&name).unwrap();
            check(&run, &folder, (shards, steps), &rows);
            let folder = copy(&whole);
            write(&folder, &name, &other.read(&name).unwrap().unwrap());
            check(&run, &folder, (shards, steps), &rows);
        }
    }
}

#[test]
fn a_plan_damaged_together_with_the_copy_of_its_rows_is_made_again() {
    let run = Run::pooled(OptimizerKind::Adam);
    for steps in PLACES {
        let (folder, rows) = trained(&run, 1, steps);
        for name in files(&folder, ".plan").iter().chain(&files(&folder, ".plan.ids")) {
            folder.remove(name).unwrap();
        }
        let mut engine = run.open(shared(&folder), &config(&run, 1, Order::Auto)).unwrap();
        assert_eq!(run.steps_done(&mut engine).unwrap(), steps);
        let error = run.records(&mut engine).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption);
        assert!(error.to_string().contains("lookahead"), "{error}");
        // What follows changes nothing: the store opens so as often as it likes.
        assert_eq!(run.step(&mut engine, steps).unwrap_err().kind(), ErrorKind::Corruption);
        assert!(engine.verify().is_err());
        drop(engine);
        let mut engine = run.open(shared(&folder), &config(&run, 1, Order::Auto)).unwrap();
        run.follow(&mut engine).unwrap();
        assert!(run.records(&mut engine).unwrap() == rows);
        train_on(&run, &mut engine, steps);
    }
}

#[test]
fn a_damaged_copy_is_made_again_and_verify_finds_damage() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let (whole, rows) = trained(&run, 1, PLACES[0]);
    let name = &files(&whole, ".plan.ids")[0];
    let bytes = whole.read(name).unwrap().unwrap();
    for damaged in [None, Some(&bytes[..100]), Some(&bytes[..bytes.len() / 2])] {
        let folder = copy(&whole);
        match damaged {
            Some(bytes) => write(&folder, name, bytes),
            None => folder.remove(name).unwrap(),
        }
        let mut engine = run.open(shared(&folder), &config(&run, 1, Order::Auto)).unwrap();
        run.follow(&mut engine).unwrap();
        drop(engine);
        assert_eq!(folder.read(name).unwrap().unwrap(), bytes);
        check(&run, &folder, (1, PLACES[0]), &rows);
    }
    let plan = &files(&whole, ".plan")[0];
    let mut damaged = whole.read(plan).unwrap().unwrap();
    damaged.iter_mut().skip(4096).take(4096).for_each(|byte| *byte ^= 1);
    write(&whole, plan, &damaged);
    let mut engine = run.open(shared(&whole), &config(&run, 1, Order::Auto)).unwrap();
    let error = engine.verify().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption);
    assert!(error.to_string().contains(plan), "names the file: {error}");
}

#[test]
fn without_its_batches_a_damaged_plan_is_left_or_refused() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let steps = PLACES[0];
    let (whole, rows) = trained(&run, 1, steps);
    let name = &files(&whole, ".plan")[0];
    let remove = || {
        let folder = copy(&whole);
        folder.remove(name).unwrap();
        folder
    };
    // Any batch is trained on by window then; nothing is done to what the rows are.
    let temporary = tempfile::tempdir().unwrap();
    let folder = FsFolder::open(temporary.path()).unwrap();
    for name in remove().list().unwrap() {
        folder.write_durable(&name, &whole.read(&name).unwrap().unwrap()).unwrap();
    }
    let path = Some(temporary.path());
    let mut engine = ShardedEngine::open(path, &config(&run, 1, Order::Auto)).unwrap();
    let mut oracle = run.oracle();
    for step in 0..steps {
        run.step(&mut oracle, step).unwrap();
    }
    for step in steps..steps + 10 {
        let output = run.step(&mut engine, step * 7).unwrap();
        assert!(output == run.step(&mut oracle, step * 7).unwrap(), "step {step}");
    }
    assert_eq!(engine.engine().position(), None);
    assert!(run.records(&mut engine).unwrap() == run.records(&mut oracle).unwrap());
    drop(engine);
    // With `error` they are refused, and rows can still be read.
    let config =
        OrderConfig { on_mismatch: Some(OnMismatch::Error), ..config(&run, 1, Order::Auto) };
    let folder = remove();
    let mut engine = run.open(shared(&folder), &config).unwrap();
    let error = run.step(&mut engine, steps).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("made again"), "{error}");
    // Other batches under the same name do not become the plan.
    let (plan, liar) =
        (run.plan(&engine), Run { samples: 7, ..Run::pooled(OptimizerKind::Adagrad) });
    let request = PlanRequest { source: "epoch".to_owned(), window_batches_max: 3 };
    assert_eq!(engine.writable().unwrap().follow(&plan, &request).unwrap(), Answer::PlanNeeded);
    engine.writable().unwrap().start_plan(&plan, &request).unwrap();
    for step in 0..run.batches {
        engine.writable().unwrap().push_planned(&liar.batch(step).bags(), true).unwrap();
    }
    let error = engine.writable().unwrap().finish_plan().unwrap_err();
    assert!(error.to_string().contains("not those"), "{error}");
    assert!(run.records(&mut engine).unwrap() == rows);
    train_on(&run, &mut engine, steps);
}

#[test]
fn damage_that_training_meets_is_mended_after_reopening() {
    let run = Run::pooled(OptimizerKind::Adagrad);
    let (folder, rows) = trained(&run, 1, PLACES[0]);
    let name = &files(&folder, ".plan")[0];
    let config = config(&run, 1, Order::Forward);
    let mut engine = run.open(shared(&folder), &config).unwrap();
    run.follow(&mut engine).unwrap();
    // All of its windows, while it is in use.
    let mut bytes = folder.read(name).unwrap().unwrap();
    bytes.iter_mut().skip(4096).for_each(|byte| *byte ^= 1);
    folder.open(name, tierbed_io::OpenMode::Create).unwrap().write_at(0, &bytes).unwrap();
    let met = (PLACES[0]..).find_map(|step| run.step(&mut engine, step).err()).unwrap();
    assert_eq!(met.kind(), ErrorKind::Corruption, "{met}");
    assert!(met.to_string().contains(name) && met.to_string().contains("made again"), "{met}");
    drop(engine);
    check(&run, &folder, (1, PLACES[0]), &rows);
}
