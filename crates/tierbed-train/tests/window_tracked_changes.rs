//! A delta of the rows noted while training makes what one of comparing every row makes, to the
//! bit, and reads in proportion to what changed.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should; it damages files directly"
)]

#[path = "common/changes.rs"]
mod changes;
#[path = "common/window.rs"]
mod common;

use std::path::Path;
use std::sync::Arc;

use changes::{full, is_tracked, publish_by};
use common::Job;
use tierbed_core::{ErrorKind, OptimizerKind, TableId, TableSchema};
use tierbed_io::{Folder, FsFolder, MemoryFolder};
use tierbed_store::kept::restore_checkpoint;
use tierbed_train::check_folder;
use tierbed_train::window::rows::NewRows;
use tierbed_train::window::{
    Backend, DeltaBase, Durability, FeatureLayout, FindBy, WindowConfig, WindowEngine,
};
use tierbed_train::TableRows;

const BACKENDS: [Backend; 7] = [
    Backend::File,
    Backend::Memory,
    Backend::Lsm,
    Backend::LsmPlain,
    Backend::Cold,
    Backend::HashDb,
    Backend::Mmap,
];

fn config(backend: Backend) -> WindowConfig {
    tierbed_compare::register_stores();
    // Less than the rows need, where a backend takes that.
    let budget = if backend == Backend::File { 1 << 20 } else { 16 << 20 };
    WindowConfig { backend, io_engine: "inline".into(), ..WindowConfig::new(budget) }
}

fn open(
    folder: &Arc<dyn Folder>,
    config: &WindowConfig,
    job: &Job,
) -> (WindowEngine, FeatureLayout) {
    let mut engine = WindowEngine::open_in(Some(folder.clone()), config).unwrap();
    let plan = job.set_up(&mut engine).unwrap();
    (engine, plan)
}

fn train(
    job: &Job,
    (engine, plan): &mut (WindowEngine, FeatureLayout),
    steps: std::ops::Range<u64>,
) {
    for step in steps {
        job.step(engine, plan, step).unwrap();
    }
}

#[test]
fn tracked_changes_make_what_compared_changes_make() {
    for (at, optimizer) in (0..).zip(OptimizerKind::ALL) {
        for backend in BACKENDS {
            let scratch = tempfile::tempdir().unwrap();
            let folder: Arc<dyn Folder> = match backend {
                Backend::Memory => Arc::new(MemoryFolder::new()),
                _ => Arc::new(FsFolder::create(scratch.path()).unwrap()),
            };
            check_a_life(&folder, &config(backend), &Job::pooled(optimizer, at));
        }
    }
}

/// Trains, imports, checkpoints, loses steps, goes back to a kept checkpoint.
fn check_a_life(folder: &Arc<dyn Folder>, config: &WindowConfig, job: &Job) {
    let case = format!("{:?}, {:?}", config.backend, job.optimizer);
    let mut open_store = open(folder, config, job);
    train(job, &mut open_store, 0..4);
    let (first, _) = full(&mut open_store.0);
    assert!(is_tracked(&mut open_store.0, &first), "{case}: nothing changed");
    train(job, &mut open_store, 4..7);
    let (_, some) = publish_by(FindBy::Tracked, &mut open_store.0, &first);
    assert!(0 < some.unwrap().row_count, "{case}");
    let rows = NewRows { weights: &[1.5; 9 * 50], state: None, use_counts: None };
    open_store.0.write_rows(TableId(0), 2900, rows).unwrap();
    assert!(is_tracked(&mut open_store.0, &first), "{case}: rows were imported");
    open_store.0.checkpoint("c", &[]).unwrap();
    train(job, &mut open_store, 7..9);
    drop(open_store);

    let mut open_store = open(folder, config, job);
    assert!(is_tracked(&mut open_store.0, &first), "{case}: steps were lost");
    train(job, &mut open_store, 7..10);
    open_store.0.keep_checkpoint("kept", &[]).unwrap();
    let (second, _) = full(&mut open_store.0);
    train(job, &mut open_store, 10..12);
    assert!(is_tracked(&mut open_store.0, &second) && is_tracked(&mut open_store.0, &first));
    open_store.0.checkpoint("later", &[]).unwrap();
    drop(open_store);

    restore_checkpoint(folder, "kept", &check_folder).unwrap();
    let mut open_store = open(folder, config, job);
    assert!(!is_tracked(&mut open_store.0, &second), "{case}: published later than this");
    let (_, refused) = publish_by(FindBy::Tracked, &mut open_store.0, &second);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    train(job, &mut open_store, 20..22);
    assert!(is_tracked(&mut open_store.0, &first), "{case}: another history");
    assert!(!is_tracked(&mut open_store.0, &second), "{case}: another history");
}

#[test]
fn a_store_with_a_checkpoint_of_every_step_compares_when_it_is_reopened() {
    let scratch = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let config = WindowConfig { durability: Durability::Step, ..config(Backend::Lsm) };
    let job = Job::pooled(OptimizerKind::Adagrad, 3);
    let mut open_store = open(&folder, &config, &job);
    train(&job, &mut open_store, 0..2);
    let (base, _) = full(&mut open_store.0);
    train(&job, &mut open_store, 2..4);
    assert!(is_tracked(&mut open_store.0, &base));
    open_store.0.checkpoint("step", &[]).unwrap();
    drop(open_store);
    let mut open_store = open(&folder, &config, &job);
    assert!(!is_tracked(&mut open_store.0, &base));
    let reason = open_store.0.stats().changes.reason;
    assert_eq!(reason, None, "the last one was told to compare");
}

/// The file of the attachment.
fn attachment(folder: &Path) -> std::path::PathBuf {
    let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.to_str().unwrap().ends_with("._changes")).unwrap()
}

#[test]
fn every_flipped_bit_of_the_attachment_is_noticed_and_costs_a_comparison() {
    let scratch = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(scratch.path()).unwrap());
    let config = config(Backend::File);
    let job = Job::pooled(OptimizerKind::Sgd, 5);
    let mut open_store = open(&folder, &config, &job);
    train(&job, &mut open_store, 0..3);
    let (base, _) = full(&mut open_store.0);
    train(&job, &mut open_store, 3..4);
    open_store.0.checkpoint("c", &[]).unwrap();
    drop(open_store);
    let path = attachment(scratch.path());
    let bytes = std::fs::read(&path).unwrap();
    for bit in 0..8 * bytes.len() {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, flipped).unwrap();
        let (mut engine, _) = open(&folder, &config, &job);
        assert_eq!(engine.stats().changes.base_count, 0, "bit {bit}");
        assert_eq!(engine.verify().unwrap_err().kind(), ErrorKind::Corruption, "bit {bit}");
    }
    let (mut engine, plan) = open(&folder, &config, &job);
    let (_, published) = publish_by(FindBy::Auto, &mut engine, &base);
    published.unwrap();
    let stats = engine.stats().changes;
    assert_eq!((stats.deltas_tracked, stats.deltas_compared), (0, 1));
    assert!(stats.reason.unwrap().contains("damaged"));
    // The next checkpoint has a whole list again.
    let (base, _) = full(&mut engine);
    engine.checkpoint("d", &[]).unwrap();
    drop((engine, plan));
    let mut open_store = open(&folder, &config, &job);
    open_store.0.verify().unwrap();
    train(&job, &mut open_store, 4..6);
    assert!(is_tracked(&mut open_store.0, &base));
}

/// Publishes in full, changes one row of a hundred, publishes a delta.
fn check_pages(dim: u32, row_count: u64, changed: &[std::ops::Range<u64>]) {
    let config = WindowConfig { io_engine: "inline".into(), ..WindowConfig::new(8 << 20) };
    let mut engine = WindowEngine::open_in(Some(Arc::new(MemoryFolder::new())), &config).unwrap();
    let table = engine.add_table(TableSchema::plain("wide", row_count, dim)).unwrap();
    let write = |engine: &mut WindowEngine, rows: std::ops::Range<u64>, value: f32| {
        let weights = vec![value; (rows.end - rows.start) as usize * dim as usize];
        let new = NewRows { weights: &weights, state: None, use_counts: None };
        engine.write_rows(table, rows.start, new).unwrap();
    };
    write(&mut engine, 0..row_count, 1.0);
    engine.checkpoint("c", &[]).unwrap();
    let pages_before = engine.stats().store.pages_read;
    let (base, whole) = full(&mut engine);
    let full_pages = engine.stats().store.pages_read - pages_before;
    for rows in changed {
        write(&mut engine, rows.clone(), 2.0);
    }
    let pages_before = engine.stats().store.pages_read;
    let (_, report) = publish_by(FindBy::Tracked, &mut engine, &base);
    let report = report.unwrap();
    let stats = engine.stats();
    assert_eq!(stats.changes.base_pages_read, 0, "noted rows are not compared");
    let delta_pages = stats.store.pages_read - pages_before;
    let changed_rows: u64 = changed.iter().map(|rows| rows.end - rows.start).sum();
    assert_eq!((report.row_count, changed_rows * 100), (changed_rows, row_count));
    assert!(delta_pages * 20 <= full_pages, "{delta_pages} pages read, {full_pages} in full");
    let written = |report: &tierbed_snapshot::Report| report.pages_bytes + report.index_bytes;
    assert!(written(&report) * 20 <= written(&whole), "{report:?} {whole:?}");
}

#[test]
fn publishing_one_percent_reads_pages_in_proportion() {
    // Scattered rows, each with a page of its own; then the newest of many small rows.
    let scattered: Vec<_> = (0..3000).step_by(100).map(|row| row..row + 1).collect();
    check_pages(900, 3000, &scattered);
    check_pages(32, 60_000, std::slice::from_ref(&(50_000..50_600)));
}

#[test]
fn a_delta_of_noted_rows_needs_the_manifest_of_its_base_and_no_page() {
    let config = config(Backend::File);
    let job = Job::pooled(OptimizerKind::Adagrad, 7);
    let mut open_store = open(&(Arc::new(MemoryFolder::new()) as Arc<dyn Folder>), &config, &job);
    train(&job, &mut open_store, 0..4);
    let (base, _) = full(&mut open_store.0);
    train(&job, &mut open_store, 4..6);
    let bare: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let name = tierbed_snapshot::manifest::MANIFEST_NAME;
    bare.write_durable(name, &base.read(name).unwrap().unwrap()).unwrap();
    let (tracked, report) = publish_by(FindBy::Tracked, &mut open_store.0, &bare);
    report.unwrap();
    let (compared, report) = publish_by(FindBy::Compared, &mut open_store.0, &base);
    report.unwrap();
    changes::check_tracked(&base, &tracked, &compared);
    let (_, refused) = publish_by(FindBy::Compared, &mut open_store.0, &bare);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Corruption, "rows lie on pages");
    // Deltas upon it are read no further.
    train(&job, &mut open_store, 6..8);
    let upon = |deltas: &[&Arc<dyn Folder>]| DeltaBase {
        folder: bare.clone(),
        deltas: deltas.iter().map(|delta| Arc::clone(delta)).collect(),
        find_by: FindBy::Tracked,
    };
    let publish = |engine: &mut WindowEngine, base: DeltaBase| {
        let out: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        engine.publish_delta(out.clone(), base, &[], &mut |_, _| true).map(|_| out)
    };
    let next = publish(&mut open_store.0, upon(&[&tracked])).unwrap();
    let wrong = publish(&mut open_store.0, upon(&[&next])).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Invalid, "it is upon the delta before");
    publish(&mut open_store.0, upon(&[&tracked, &next])).unwrap();
}
