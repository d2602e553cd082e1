//! Pages that cannot be read: what of a lookup survives, and what is said about the rest.

use crate::index::PageIndex;
use tierbed_sim::{Chance, FaultPlan, SimFolder};

use super::*;
use crate::{LookupStats, PlacedTables, SelectOptions};

/// Rows 0..15 on page 0, 15..30 on page 1; page 2 repeats the first ten. Row `r` is full of `r`.
pub(super) fn publish_three_pages(folder: &Arc<dyn Folder>) {
    let first: Vec<u32> = (0..15).collect();
    let second: Vec<u32> = (15..30).collect();
    let index = PageIndex::new(30, [&first[..], &second, &first[..10]]).unwrap();
    let schema = Schema::new(vec![table("wide", 30, 64)]).unwrap();
    let placed = vec![PlacedTables { tables: vec![TableId(0)], index }];
    let budget = Budget::new(1 << 20);
    let mut writer =
        SnapshotWriter::create_placed(Arc::clone(folder), &schema, placed, &budget).unwrap();
    writer
        .fill(0, &mut |key, out| {
            out.fill(key.row.0 as f32);
            Ok(true)
        })
        .unwrap();
    writer.finish().unwrap();
}

fn open(folder: &Arc<dyn Folder>, is_pipelined: bool) -> Snapshot {
    let select = SelectOptions { is_pipelined, ..SelectOptions::default() };
    let options = SnapshotOptions { select, cache_bytes_max: Some(0), ..options(1 << 20) };
    Snapshot::open(Arc::clone(folder), &options).unwrap()
}

/// Looks rows up and checks them.
fn lookup(snapshot: &Snapshot, indices: &[i64]) -> Result<LookupStats> {
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::None)]).unwrap();
    let offsets = [0, indices.len() as i64];
    let mut out = vec![0.0; 64 * indices.len()];
    let bags = Bags::new(indices, &offsets, None, 1)?;
    let stats = snapshot.lookup(&plan, &bags, &mut out)?;
    assert!(out.chunks(64).zip(indices).all(|(row, &id)| row == [id as f32; 64]));
    Ok(stats)
}

#[test]
fn a_bad_page_is_named_and_a_replica_elsewhere_answers() {
    let folder = memory_folder();
    publish_three_pages(&folder);
    let device = folder.open(PAGES_NAME, OpenMode::ReadWrite).unwrap();
    device.write_at(999, &[77]).unwrap();
    for is_pipelined in [true, false] {
        let snapshot = open(&folder, is_pipelined);
        let stats = lookup(&snapshot, &[3, 20, 7, 3]).unwrap();
        assert_eq!((stats.pages_read, stats.pages_failed, stats.rows_recovered), (3, 1, 2));
        assert_eq!(lookup(&snapshot, &[20, 25]).unwrap().pages_failed, 0);
        for _ in 0..2 {
            let error = lookup(&snapshot, &[3, 12]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption);
            let text = error.to_string();
            assert!(text.contains("page_id: 0") && text.contains(PAGES_NAME), "{text}");
            assert_eq!(lookup(&snapshot, &[9]).unwrap().rows_recovered, 1, "the next call works");
        }
        assert_eq!(snapshot.stats().lookups.pages_failed, 3);
    }
}

#[test]
fn a_read_that_fails_is_named_and_a_replica_elsewhere_answers() {
    let sim = SimFolder::new(FaultPlan::default());
    let folder: Arc<dyn Folder> = Arc::new(sim.clone());
    publish_three_pages(&folder);
    // The first page that a lookup reads gives EIO, once.
    let fail_next = || {
        sim.set_plan(FaultPlan { read_error: Chance::Nth(0), ..FaultPlan::default() });
    };
    for is_pipelined in [true, false] {
        let snapshot = open(&folder, is_pipelined);
        fail_next();
        let stats = lookup(&snapshot, &[3, 7, 3]).unwrap();
        assert_eq!((stats.pages_read, stats.pages_failed, stats.rows_recovered), (2, 1, 2));
        // Rows 12 and 20 have no replica.
        for (row, page) in [(12, "page_id: 0"), (20, "page_id: 1")] {
            fail_next();
            let error = lookup(&snapshot, &[row]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            let text = error.to_string();
            assert!(text.contains(page) && text.contains(PAGES_NAME), "{text}");
            assert_eq!(lookup(&snapshot, &[row]).unwrap().pages_failed, 0, "the disk is well");
        }
        assert_eq!(snapshot.stats().lookups.pages_failed, 1, "calls that failed count nothing");
    }
}

/// Several parts of a batch fly at once: each finds the replicas of its rows, and after a failure
/// nothing of the batch is left for the next call.
#[test]
fn batches_in_parts_outlive_bad_pages() {
    let temporary = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(temporary.path().join("s")).unwrap());
    publish_three_pages(&folder);
    folder.open(PAGES_NAME, OpenMode::ReadWrite).unwrap().write_at(999, &[77]).unwrap();
    for choice in [EngineChoice::Inline, EngineChoice::Pread, EngineChoice::Auto] {
        // A tier that holds nothing: every part reads what it is asked for.
        let mut options = SnapshotOptions { cache_bytes_max: Some(1), ..options(32 << 20) };
        options.engine.choice = choice;
        let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
        let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)]).unwrap();
        let offsets: Vec<i64> = (0..=1600).collect();
        let mut out = vec![0.0; 64 * 1600];
        let mut ask = |rows: &[i64]| {
            let indices: Vec<i64> = rows.iter().copied().cycle().take(1600).collect();
            let bags = Bags::new(&indices, &offsets, None, 1).unwrap();
            let stats = snapshot.lookup(&plan, &bags, &mut out)?;
            assert!(out.chunks(64).zip(&indices).all(|(row, &id)| row == [id as f32; 64]));
            Ok::<_, tierbed_core::Error>(stats)
        };
        for _ in 0..2 {
            let stats = ask(&[3, 20, 7]).unwrap();
            assert_eq!((stats.chunk_count, stats.pages_failed, stats.rows_recovered), (3, 3, 6));
            assert_eq!(stats.pages_read, 9);
            let error = ask(&[20, 12, 3]).unwrap_err();
            assert!(error.to_string().contains("page_id: 0"), "{error}");
        }
        assert_eq!(ask(&[20, 25]).unwrap().pages_read, 3);
    }
}
