//! A snapshot and its deltas answer as a whole new snapshot does, bit for bit: after training,
//! evictions, ids that come back, tables that grow, and a store that lost its last steps.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use std::sync::Arc;

use common::bits;
use tierbed_core::env::SplitMix64;
use tierbed_core::store::Attachment;
use tierbed_core::{
    Bags, Budget, ErrorKind, InitSpec, OptimizerKind, Result, TableId, TableSchema,
};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_snapshot::delta::apply_delta;
use tierbed_snapshot::PublishedIds;
use tierbed_snapshot::{PageLayout, Report, Snapshot, SnapshotOptions, TableCodecs};
use tierbed_train::window::update::Grads;
use tierbed_train::window::{DeltaBase, FindBy, Published, Translate, SHARED_ROW};
use tierbed_train::window::{Eviction, FeatureLayout, Policy, Pooling, WindowConfig, WindowEngine};

/// Ids are far apart.
const SPREAD: i64 = 0x0012_3456_789a;

fn folder() -> Arc<dyn Folder> {
    Arc::new(MemoryFolder::new())
}

fn table(name: &str, row_count: u64) -> TableSchema {
    TableSchema {
        optimizer: OptimizerKind::RowWiseAdagrad,
        init: InitSpec::Normal { mean: 0.0, std: 0.1 },
        seed: 3,
        ..TableSchema::plain(name, row_count, 18)
    }
}

fn open(at: &Arc<dyn Folder>) -> (WindowEngine, FeatureLayout) {
    let config = WindowConfig { io_engine: "inline".into(), ..WindowConfig::new(3 << 20) };
    let mut engine = WindowEngine::open_in(Some(at.clone()), &config).unwrap();
    let policy = Policy { admit_after: 1, eviction: Eviction::Age { ttl: 3 } };
    let open = engine.add_open_table(table("item", 1), policy).unwrap();
    let dense = engine.add_table(table("user", 5_000)).unwrap();
    let features = [(open, Pooling::Sum), (dense, Pooling::Sum)];
    let plan = FeatureLayout::new(engine.schema(), &features).unwrap();
    (engine, plan)
}

/// Some ids and users of `step`; ids drift, so that old ones are evicted.
fn batch(step: u64) -> (Vec<i64>, Vec<i64>) {
    let mut rng = SplitMix64::new(step);
    let mut ids: Vec<i64> = (0..60).map(|_| (step * 40 + rng.below(300)) as i64 * SPREAD).collect();
    ids.extend((0..60).map(|_| rng.below(5_000) as i64));
    (ids, vec![0, 60, 120])
}

fn train(engine: &mut WindowEngine, plan: &FeatureLayout, steps: std::ops::Range<u64>) {
    for step in steps {
        let (ids, offsets) = batch(step);
        let bags = Bags::new(&ids, &offsets, None, 2).unwrap();
        let mut rows = vec![0; ids.len()];
        engine.translate(plan, &bags, Translate::Train { now: step as u32 }, &mut rows).unwrap();
        let bags = Bags::new(&rows, &offsets, None, 2).unwrap();
        let mut output = vec![0.0; plan.output_len(&bags)];
        engine.lookup(plan, &bags, &mut output).unwrap();
        let grads = Grads { output: &output, weights: None };
        engine.update(plan, &bags, grads).unwrap();
        if step % 5 == 4 {
            engine.evict(TableId(0), step as u32).unwrap();
        }
    }
}

fn options() -> SnapshotOptions {
    SnapshotOptions { dram_budget_bytes: 2 << 20, reader_count: 1, ..SnapshotOptions::default() }
}

fn publish(engine: &mut WindowEngine, base: Option<&Arc<dyn Folder>>) -> (Arc<dyn Folder>, Report) {
    publish_in("f32", engine, base)
}

fn publish_by(
    find_by: FindBy,
    engine: &mut WindowEngine,
    out: &Arc<dyn Folder>,
    base: &Arc<dyn Folder>,
) -> (Arc<dyn Folder>, Result<Report>) {
    let model = [Attachment { name: "model", bytes: b"dense" }];
    let base = DeltaBase { folder: base.clone(), deltas: Vec::new(), find_by };
    let report = engine.publish_delta(out.clone(), base, &model, &mut |_, _| true);
    (out.clone(), report)
}

#[test]
fn a_publish_beside_training_has_the_ids_of_its_step() {
    let (mut engine, plan) = open(&folder());
    train(&mut engine, &plan, 0..12);
    let still = publish(&mut engine, None).0;
    let out = folder();
    let model = [Attachment { name: "model", bytes: b"dense" }];
    let whole = Published::Whole(PageLayout::default());
    engine.begin_publish(out.clone(), whole, &model).unwrap();
    let mut step = 12;
    let rows = loop {
        train(&mut engine, &plan, step..step + 1);
        step += 1;
        if let Some(rows) = engine.copy_published(100, &mut |_, _| true).unwrap() {
            break rows;
        }
    };
    engine.end_publish(Some(&rows.finish(&mut |_, _| true).unwrap()));
    assert!(step > 20, "training evicted ids meanwhile");
    assert!(files(&out) == files(&still), "it mixes steps");
    delta_upon(&mut engine, &out, &[]);
}

/// Every file of a folder.
fn files(folder: &Arc<dyn Folder>) -> Vec<(String, Vec<u8>)> {
    let names = folder.list().unwrap().into_iter();
    names.map(|name| (name.clone(), folder.read(&name).unwrap().unwrap())).collect()
}

/// Publishes both tables in `codec`; a delta in both ways of finding what changed. Returns that of
/// the rows noted, and the report of the one of rows compared.
fn publish_in(
    codec: &str,
    engine: &mut WindowEngine,
    base: Option<&Arc<dyn Folder>>,
) -> (Arc<dyn Folder>, Report) {
    let tables = ["item", "user"].map(|name| (engine.schema().id_of(name).unwrap(), codec));
    let layout =
        PageLayout { codecs: TableCodecs::named(tables).unwrap(), ..PageLayout::default() };
    let out = folder();
    let model = [Attachment { name: "model", bytes: b"dense" }];
    let report = match base {
        None => engine.publish(out.clone(), layout, &model, &mut |_, _| true),
        Some(base) => {
            let compared = publish_by(FindBy::Compared, engine, &folder(), base);
            let found = publish_by(FindBy::Auto, engine, &out, base);
            let made = [&compared.0, &out].map(|delta| answers(&apply(base, delta).unwrap()));
            assert!(made[0] == made[1], "{codec}: changes were missed or added");
            let row_counts = [&compared.1, &found.1].map(|made| made.as_ref().unwrap().row_count);
            assert!(row_counts[0] <= row_counts[1], "{codec}: {row_counts:?}");
            assert_eq!(row_counts[0] == 0, row_counts[1] == 0, "{codec}: {row_counts:?}");
            compared.1
        }
    };
    let budget = engine.budget().report();
    assert!(budget.peak_bytes <= budget.limit_bytes);
    (out, report.unwrap())
}

/// Publishes what changed since the last of the deltas upon a snapshot.
fn delta_upon(
    engine: &mut WindowEngine,
    base: &Arc<dyn Folder>,
    deltas: &[Arc<dyn Folder>],
) -> Arc<dyn Folder> {
    let out = folder();
    let model = [Attachment { name: "model", bytes: b"dense" }];
    let (folder, deltas) = (base.clone(), deltas.to_vec());
    let base = DeltaBase { folder, deltas, find_by: FindBy::Tracked };
    engine.publish_delta(out.clone(), base, &model, &mut |_, _| true).unwrap();
    out
}

/// Every file of a folder but the manifest, which names what a delta is upon.
fn rows_of(folder: &Arc<dyn Folder>) -> Vec<(String, Vec<u8>)> {
    let mut files = files(folder);
    files.retain(|(name, _)| name != "snapshot.json");
    files
}

fn apply(base: &Arc<dyn Folder>, delta: &Arc<dyn Folder>) -> Result<Arc<dyn Folder>> {
    let out = folder();
    let base = Arc::new(Snapshot::open(base.clone(), &options())?);
    let delta = Arc::new(Snapshot::open_any(delta.clone(), &options())?);
    apply_delta(&base, &delta, &out, &Budget::new(1 << 20))?;
    Ok(out)
}

/// What a snapshot answers: every row of both tables, the rows of many ids, the attachments.
fn answers(at: &Arc<dyn Folder>) -> (Vec<u32>, Vec<i64>, Vec<u8>) {
    let snapshot = Snapshot::open(at.clone(), &options()).unwrap();
    snapshot.verify().unwrap();
    let mut all = Vec::new();
    for name in ["item", "user"] {
        let table = snapshot.schema().id_of(name).unwrap();
        let plan = FeatureLayout::new(snapshot.schema(), &[(table, Pooling::None)]).unwrap();
        let rows: Vec<i64> =
            (0..snapshot.schema().table(table).unwrap().row_count as i64).collect();
        for rows in rows.chunks(500) {
            let offsets: Vec<i64> = (0..=rows.len() as i64).collect();
            let bags = Bags::new(rows, &offsets, None, 1).unwrap();
            let mut out = vec![0.0; plan.output_len(&bags)];
            snapshot.lookup(&plan, &bags, &mut out).unwrap();
            all.extend(bits(&out));
        }
    }
    let ids = PublishedIds::open(&snapshot.view()).unwrap();
    let table = snapshot.schema().id_of("item").unwrap();
    let plan = FeatureLayout::new(snapshot.schema(), &[(table, Pooling::Sum)]).unwrap();
    let raw: Vec<i64> = (0..3_000).map(|id| id * SPREAD).collect();
    let bags = Bags::new(&raw, &[0, 3_000], None, 1).unwrap();
    let mut rows = vec![0; raw.len()];
    ids.translate(&snapshot.view(), &plan, &bags, &mut rows).unwrap();
    (all, rows, snapshot.attachment("model").unwrap().unwrap())
}

#[test]
fn a_snapshot_and_its_deltas_are_the_whole_snapshot() {
    let changes = ["f32", "f16", "int8", "int4"].map(deltas_are_the_whole_snapshot);
    assert!(changes.iter().all(|coded| *coded <= changes[0]), "a code stays the same for longer");
}

/// Returns how many rows all deltas have.
fn deltas_are_the_whole_snapshot(codec: &str) -> u64 {
    let (mut engine, plan) = open(&folder());
    train(&mut engine, &plan, 0..20);
    let (mut base, _) = publish_in(codec, &mut engine, None);
    let mut changed = 0;
    let before = answers(&base);
    let (first_base, mut upon) = (base.clone(), Vec::new());
    for (first, last) in [(20, 22), (22, 48), (48, 48), (48, 70)] {
        train(&mut engine, &plan, first..last);
        let (full, whole) = publish_in(codec, &mut engine, None);
        let (delta, changes) = publish_in(codec, &mut engine, Some(&base));
        changed += changes.row_count;
        upon.push(delta_upon(&mut engine, &first_base, &upon));
        assert!(
            rows_of(upon.last().unwrap()) == rows_of(&delta),
            "{codec}: upon deltas it is the same as upon what they make"
        );
        assert!(changes.row_count < whole.row_count, "{changes:?} {whole:?}");
        assert_eq!(changes.row_count == 0, first == last, "{changes:?}");
        let applied = apply(&base, &delta).unwrap();
        assert!(answers(&applied) == answers(&full), "{codec}, steps {first}..{last}");
        // Equal inputs give equal snapshots, so the next delta fits wherever it is applied.
        let again = Snapshot::open(apply(&base, &delta).unwrap(), &options()).unwrap();
        let applied_snapshot = Snapshot::open(applied.clone(), &options()).unwrap();
        assert_eq!(applied_snapshot.identity().unwrap(), again.identity().unwrap());
        base = applied;
    }
    // A snapshot that a delta was applied to is known by that delta.
    let stats = engine.stats().changes;
    assert_eq!((stats.deltas_tracked, stats.deltas_compared, &stats.reason), (8, 4, &None));
    let mut whole = first_base;
    for delta in &upon {
        // Each is upon the one before, and upon nothing else.
        whole = apply(&whole, delta).unwrap();
    }
    assert!(answers(&whole) == answers(&base), "{codec}");
    let alone = apply(&base, &upon[1]).unwrap_err();
    assert_eq!(alone.kind(), ErrorKind::Invalid);
    // Ids that were served at first and were evicted since have the shared row.
    let after = answers(&base);
    let evicted = before
        .1
        .iter()
        .zip(&after.1)
        .filter(|(old, new)| **old != SHARED_ROW as i64 && **new == SHARED_ROW as i64);
    assert!(evicted.count() > 50);
    changed
}

#[test]
fn a_delta_fits_one_snapshot_only() {
    let (mut engine, plan) = open(&folder());
    train(&mut engine, &plan, 0..5);
    let (base, _) = publish(&mut engine, None);
    train(&mut engine, &plan, 5..10);
    let (other, _) = publish(&mut engine, None);
    let (delta, _) = publish(&mut engine, Some(&base));
    assert_eq!(apply(&other, &delta).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(apply(&base, &other).unwrap_err().kind(), ErrorKind::Invalid, "no delta at all");
    let alone = Snapshot::open(delta.clone(), &options()).unwrap_err();
    assert!(alone.to_string().contains("delta"), "{alone}");
    // A delta of a delta is refused, as is one of another model's snapshot.
    let (_, refused) = publish_by(FindBy::Auto, &mut engine, &folder(), &delta);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    let mut stranger = WindowEngine::open_in(None, &common::memory_config()).unwrap();
    stranger.add_table(table("somebody", 10)).unwrap();
    let (_, refused) = publish_by(FindBy::Auto, &mut stranger, &folder(), &base);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn a_store_that_lost_its_last_steps_takes_back_what_it_published_of_them() {
    let at = folder();
    let (mut engine, plan) = open(&at);
    train(&mut engine, &plan, 0..4);
    engine.checkpoint("early", &[]).unwrap();
    train(&mut engine, &plan, 4..9);
    let (base, _) = publish_in("int8", &mut engine, None);
    drop(engine);
    let (mut engine, plan) = open(&at);
    train(&mut engine, &plan, 30..33);
    let (full, _) = publish_in("int8", &mut engine, None);
    let (delta, _) = publish_in("int8", &mut engine, Some(&base));
    assert!(answers(&apply(&base, &delta).unwrap()) == answers(&full));
    let stats = engine.stats().changes;
    assert_eq!((stats.deltas_tracked, stats.deltas_compared), (0, 2), "{stats:?}");
    assert!(stats.reason.is_some());
}
