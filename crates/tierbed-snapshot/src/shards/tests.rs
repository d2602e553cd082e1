use std::path::Path;
use std::sync::Arc;

use tierbed_core::env::SplitMix64;
use tierbed_core::{
    Bags, Budget, ErrorKind, InitSpec, Result, RowId, Schema, TableId, TableSchema,
};
use tierbed_io::{Folder, FsFolder};
use tierbed_kernels::{FeatureLayout, Pooling};

use super::*;
use crate::codecs::{PageLayout, TableCodecs};
use crate::index::PageIndex;
use crate::placed::PlacedTables;
use crate::snapshot::{Snapshot, SnapshotOptions};
use crate::tails::{HeadSize, TableHeads};
use crate::writer::Report;

const DIM: usize = 8;
const SHARDS: u32 = 3;

/// A table with random initial values, one without, and a small one.
fn schema() -> Schema {
    let table = |name: &str, rows, init| TableSchema {
        init,
        seed: 7,
        ..TableSchema::plain(name, rows, DIM as u32)
    };
    let uniform = InitSpec::Uniform { low: -1.0, high: 1.0 };
    let constant = InitSpec::Constant { value: 0.5 };
    let tables =
        [table("user", 700, uniform), table("item", 500, constant), table("day", 7, uniform)];
    Schema::new(tables.to_vec()).unwrap()
}

/// Returns a row as it was trained; `None` for one row of three, which never was.
fn trained(table: TableId, row: u64) -> Option<[f32; DIM]> {
    let value = |at: usize| (1000 * u64::from(table.0) + row) as f32 + at as f32 / 8.0;
    (row % 3 != 1).then(|| std::array::from_fn(value))
}

fn plan(by: DivideBy, placed: bool) -> ShardPlan {
    let mut random = SplitMix64::new(5);
    let shards = (0..1200).map(|_| random.below(u64::from(SHARDS)) as u16).collect();
    let placed = placed.then(|| PlacedShards {
        tables: vec![TableId(1), TableId(0)],
        shards: RowShards::new(SHARDS, shards).unwrap(),
    });
    let placed = placed.into_iter().collect();
    ShardPlan { shard_count: SHARDS, replicas: 2, by, placed, everywhere_bytes: 300 }
}

/// Rows of both large tables on pages of 9, and some of them twice.
fn pages() -> PlacedTables {
    let mut random = SplitMix64::new(9);
    let mut items: Vec<u32> = (0..1200).collect();
    for at in (1..items.len()).rev() {
        items.swap(at, random.below(at as u64 + 1) as usize);
    }
    let replicas: Vec<&[u32]> = items[3..300].chunks(9).collect();
    let index = PageIndex::new(1200, items.chunks(9).chain(replicas)).unwrap();
    PlacedTables { tables: vec![TableId(1), TableId(0)], index }
}

fn write(path: &Path, layout: PageLayout, budget: &Budget) -> Result<Report> {
    let schema = schema();
    let mut writer =
        PublishWriter::create(Arc::new(FsFolder::create(path)?), &schema, layout, budget)?;
    for (id, table) in (0..).map(TableId).zip(schema.tables()) {
        let rows = || (0..table.row_count).rev().filter_map(|row| Some((row, trained(id, row)?)));
        writer.expect_rows(id, rows().count() as u64)?;
        for (row, weights) in rows() {
            writer.push(id, RowId(row), &weights)?;
        }
    }
    writer.attach("dense", b"weights")?;
    writer.finish()
}

fn read(snapshot: &Snapshot, table: TableId, rows: &[i64]) -> Vec<f32> {
    let plan = FeatureLayout::new(snapshot.schema(), &[(table, Pooling::None)]).unwrap();
    let offsets = [0, rows.len() as i64];
    let bags = Bags::new(rows, &offsets, None, 1).unwrap();
    let mut out = vec![0.0; rows.len() * DIM];
    snapshot.lookup(&plan, &bags, &mut out).unwrap();
    out
}

fn open(path: &Path) -> Snapshot {
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::open(path).unwrap());
    Snapshot::open(folder, &SnapshotOptions::default()).unwrap()
}

/// Compares the rows of all shards with those of one snapshot; `apart` is what may lie between.
fn check(layout: &PageLayout, apart: f32) -> Report {
    let folder = tempfile::tempdir().unwrap();
    let (whole, divided) = (folder.path().join("whole"), folder.path().join("shards"));
    let one = PageLayout { shards: None, ..layout.clone() };
    write(&whole, one, &Budget::unlimited()).unwrap();
    let report = write(&divided, layout.clone(), &Budget::unlimited()).unwrap();
    let map = ShardMap::open(&divided).unwrap();
    let whole = open(&whole);
    let shards: Vec<Snapshot> =
        map.shards().iter().map(|shard| open(&divided.join(&shard.folder))).collect();
    for (shard, snapshot) in (0..).zip(&shards) {
        snapshot.verify().unwrap();
        let bytes = snapshot.attachment(SHARD_ATTACHMENT).unwrap().unwrap();
        let of: ShardOf = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(of, ShardOf { publish: map.publish(), shard, shard_count: SHARDS });
        assert_eq!(snapshot.attachment("dense").unwrap().as_deref(), Some(&b"weights"[..]));
    }
    for (id, table) in (0..).map(TableId).zip(schema().tables()) {
        let ids: Vec<i64> = (0..table.row_count as i64).collect();
        let expected = read(&whole, id, &ids);
        let mut found = Vec::new();
        map.locate(id, &ids, &mut found).unwrap();
        for (row, located) in found.iter().enumerate() {
            let shard = located.shard.unwrap_or(row as u32 % SHARDS) as usize;
            let got = read(&shards[shard], id, &[located.row as i64]);
            let wanted = &expected[row * DIM..(row + 1) * DIM];
            let is_near = got.iter().zip(wanted).all(|(a, b)| (a - b).abs() <= apart);
            assert!(is_near, "{} {row} in shard {shard}: {got:?}, not {wanted:?}", table.name);
        }
    }
    report
}

#[test]
fn shards_have_the_rows_of_one_snapshot_to_the_bit() {
    for by in [DivideBy::Hash, DivideBy::Rows] {
        for placed in [false, true] {
            let layout = PageLayout { shards: Some(plan(by, placed)), ..PageLayout::default() };
            let report = check(&layout, 0.0);
            // Of the table with random initial values, those that were never trained.
            assert_eq!((report.shard_count, report.initial_rows), (SHARDS, 233));
            assert_eq!(report.row_count, 700 + 333 + 5 * u64::from(SHARDS));
        }
    }
}

#[test]
fn pages_heads_and_codecs_go_on_within_a_shard() {
    let shards = Some(plan(DivideBy::Hash, true));
    let placed =
        PageLayout { placed: vec![pages()], shards: shards.clone(), ..PageLayout::default() };
    let report = check(&placed, 0.0);
    assert!(report.replica_count > 100, "{report:?}");
    // Each shard has a third of each page: its pages are put together again.
    assert!(report.fill_ratio > 0.4 * 9.0 / 127.0, "{report:?}");
    let by_hash = PageLayout {
        placed: vec![pages()],
        shards: Some(plan(DivideBy::Hash, false)),
        ..PageLayout::default()
    };
    check(&by_hash, 0.0);
    let heads = [
        (TableId(0), HeadSize::parse("5%").unwrap()),
        (TableId(1), HeadSize::parse("20").unwrap()),
    ];
    let heads = PageLayout {
        heads: TableHeads::new(heads.to_vec()),
        shards: shards.clone(),
        ..PageLayout::default()
    };
    check(&heads, 0.0);
    let codecs = TableCodecs::named([(TableId(0), "int8"), (TableId(1), "int8")]).unwrap();
    // Only rows that were never trained are rounded, between -1 and 1.
    check(&PageLayout { codecs, shards, ..PageLayout::default() }, 1.0 / 127.0);
}

#[test]
fn equal_publishes_have_equal_numbers_and_others_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let layout =
        || PageLayout { shards: Some(plan(DivideBy::Rows, true)), ..PageLayout::default() };
    let publish = |name: &str, change: bool| {
        let path = folder.path().join(name);
        let target = Arc::new(FsFolder::create(&path).unwrap());
        let budget = Budget::unlimited();
        let mut writer = PublishWriter::create(target, &schema(), layout(), &budget).unwrap();
        let weights = if change { [0.5; DIM] } else { [0.25; DIM] };
        writer.push(TableId(1), RowId(3), &weights).unwrap();
        writer.finish().unwrap();
        ShardMap::open(&path).unwrap().publish()
    };
    assert_eq!(publish("a", false), publish("b", false));
    assert_ne!(publish("c", true), publish("d", false));
}

#[test]
fn an_unfinished_publish_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let layout =
        || PageLayout { shards: Some(plan(DivideBy::Rows, true)), ..PageLayout::default() };
    let target: Arc<dyn Folder> = Arc::new(FsFolder::create(folder.path()).unwrap());
    let budget = Budget::unlimited();
    let create = || PublishWriter::create(Arc::clone(&target), &schema(), layout(), &budget);
    let mut writer = create().unwrap();
    writer.push(TableId(0), RowId(3), &[1.0; DIM]).unwrap();
    writer.push(TableId(1), RowId(3), &[1.0; DIM]).unwrap();
    assert!(folder.path().join("shard.0").is_dir());
    let error = writer.push(TableId(0), RowId(4), &[1.0; DIM]).unwrap_err();
    assert!(error.to_string().contains("come together"), "{error}");
    drop(writer);
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert!(left.iter().all(|entry| entry.as_ref().unwrap().file_name() == "LOCK"), "{left:?}");
    assert_eq!(ShardMap::open(folder.path()).unwrap_err().kind(), ErrorKind::Invalid);
    create().unwrap().finish().unwrap();
    let error = create().unwrap_err();
    assert!(error.to_string().contains("empty folder"), "{error}");
    let error = Snapshot::open(Arc::clone(&target), &SnapshotOptions::default()).unwrap_err();
    assert!(error.to_string().contains("holds shards"), "{error}");
}

#[test]
fn the_least_memory_suffices_and_is_needed_for_each_shard() {
    let folder = tempfile::tempdir().unwrap();
    let layout = PageLayout { shards: Some(plan(DivideBy::Hash, true)), ..PageLayout::default() };
    let least = layout.more_bytes_min(&schema());
    write(&folder.path().join("a"), layout.clone(), &Budget::new(least)).unwrap();
    let few = Budget::new(least / 2);
    let error = write(&folder.path().join("b"), layout, &few).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}
