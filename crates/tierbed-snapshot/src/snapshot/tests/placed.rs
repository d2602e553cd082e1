//! Snapshots whose tables share pages by a placement.

use crate::index::PageIndex;
use crate::places::PlacesMemory;
use crate::select::Selection;

use super::*;
use crate::{PlacedTables, SelectOptions};

/// Two placements of different dims, a table apart, and rows larger than a page.
pub(super) fn schema() -> Schema {
    Schema::new(vec![
        table("c0", 300, 16),
        table("wide", 200, 64),
        table("c1", 500, 16),
        table("apart", 100, 8),
        table("c2", 7, 16),
        table("long", 5, 1500),
    ])
    .unwrap()
}

/// Every item on a home page, in an order of chance, and as many replicas as `ratio` says.
pub(super) fn place(
    item_count: u32,
    rows_per_page: usize,
    ratio: f64,
    rng: &mut SplitMix64,
) -> PageIndex {
    let mut order: Vec<u32> = (0..item_count).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, rng.below(at as u64 + 1) as usize);
    }
    let mut pages: Vec<Vec<u32>> = order.chunks(rows_per_page).map(<[u32]>::to_vec).collect();
    for _ in 0..(ratio * f64::from(item_count) / rows_per_page as f64) as usize {
        let mut page: Vec<u32> =
            (0..rows_per_page).map(|_| rng.below(u64::from(item_count)) as u32).collect();
        page.sort_unstable();
        page.dedup();
        pages.push(page);
    }
    PageIndex::new(item_count, pages.iter().map(Vec::as_slice)).unwrap()
}

pub(super) fn placements(seed: u64, ratio: f64) -> Vec<PlacedTables> {
    let mut rng = SplitMix64::new(seed);
    let tables = |ids: &[u32]| ids.iter().map(|&id| TableId(id)).collect();
    vec![
        PlacedTables { tables: tables(&[4, 0, 2]), index: place(807, 59, ratio, &mut rng) },
        PlacedTables { tables: tables(&[1]), index: place(200, 15, ratio, &mut rng) },
    ]
}

pub(super) fn publish_placed(
    folder: &Arc<dyn Folder>,
    placed: Vec<PlacedTables>,
    rows: &[(RowKey, Vec<f32>)],
) -> Report {
    let budget = Budget::new(4 << 20);
    let mut writer =
        SnapshotWriter::create_placed(Arc::clone(folder), &schema(), placed, &budget).unwrap();
    for (key, weights) in rows {
        writer.push(key.table, key.row, weights).unwrap();
    }
    let report = writer.finish().unwrap();
    assert_eq!(budget.report().used_bytes, 0);
    report
}

#[test]
fn placed_tables_answer_as_a_map_however_pages_are_chosen() {
    let rows = some_rows(&schema(), 5);
    let model: Model = rows.iter().cloned().collect();
    for ratio in [0.0, 0.8] {
        let folder = memory_folder();
        let report = publish_placed(&folder, placements(1, ratio), &rows);
        assert_eq!(report.row_count, rows.len() as u64);
        assert_eq!(report.replica_count > 100, ratio > 0.0, "{report:?}");
        for selection in [Selection::OnePass, Selection::Greedy] {
            for (index_limit, is_pipelined) in [(None, true), (Some(1), false), (Some(3), true)] {
                let select = SelectOptions { selection, index_limit, is_pipelined };
                for choice in [EngineChoice::Inline, EngineChoice::Pread, EngineChoice::Auto] {
                    let mut options = SnapshotOptions { select, ..options(900 << 10) };
                    options.engine.choice = choice;
                    let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
                    let stats = check_lookups(&snapshot, &model, 3);
                    assert!(stats.rows_read > 0 && stats.rows_initial > 0);
                    assert_eq!((stats.pages_failed, stats.rows_recovered), (0, 0));
                    assert!(snapshot.budget_report().peak_bytes <= 900 << 10);
                }
            }
        }
        let snapshot = Snapshot::open(Arc::clone(&folder), &options(8 << 20)).unwrap();
        let blocks = (report.index_bytes + report.places_bytes) / 4096;
        assert_eq!(snapshot.verify().unwrap(), report.page_count + blocks);
        assert_eq!(snapshot.inspect().row_count, rows.len() as u64);
    }
}

#[test]
fn an_index_takes_what_was_told_before_whatever_its_limit() {
    let folder = memory_folder();
    publish_placed(&folder, placements(2, 0.8), &some_rows(&schema(), 5));
    let held = |index_limit| {
        let select = SelectOptions { index_limit, ..SelectOptions::default() };
        let options = SnapshotOptions { select, ..options(4 << 20) };
        let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
        snapshot.verify().unwrap();
        let told = PlacesMemory::of(snapshot.manifest()).unwrap();
        let report = snapshot.budget_report();
        let placements = snapshot.inspect().placements;
        let held: u64 = placements.iter().map(|held| held.memory_bytes).sum();
        assert_eq!(report.parts["placement_index"].used_bytes, held);
        assert!(held <= told.held_bytes && told.held_bytes < held + 64);
        let seats: u64 = placements.iter().map(|placement| placement.seat_count).sum();
        assert!(held < 3 * seats, "{held} bytes of {seats} seats");
        held
    };
    assert_eq!(held(None), held(Some(1)));
}

#[test]
fn rows_asked_for_one_by_one_give_the_same_snapshot_as_rows_pushed() {
    let schema = Schema::new(vec![table("c0", 300, 16), table("c1", 500, 16)]).unwrap();
    let rows = some_rows(&schema, 6);
    let model: Model = rows.iter().cloned().collect();
    let placed = || {
        let index = place(800, 59, 0.3, &mut SplitMix64::new(4));
        vec![PlacedTables { tables: vec![TableId(0), TableId(1)], index }]
    };
    let (pushed, filled) = (memory_folder(), memory_folder());
    let budget = Budget::new(4 << 20);
    let create = |folder: &Arc<dyn Folder>| {
        SnapshotWriter::create_placed(Arc::clone(folder), &schema, placed(), &budget).unwrap()
    };
    let mut writer = create(&pushed);
    for (key, weights) in &rows {
        writer.push(key.table, key.row, weights).unwrap();
    }
    writer.finish().unwrap();
    let mut writer = create(&filled);
    let mut row_of = |key: RowKey, out: &mut [f32]| {
        let row = model.get(&key);
        out.copy_from_slice(row.map_or(&[0.0; 16][..], Vec::as_slice));
        Ok(row.is_some())
    };
    writer.fill(0, &mut row_of).unwrap();
    assert!(writer.fill(0, &mut row_of).is_err(), "given before");
    assert!(writer.push(rows[0].0.table, rows[0].0.row, &rows[0].1).is_err());
    assert!(writer.fill(1, &mut row_of).is_err(), "no such placement");
    writer.finish().unwrap();
    for name in pushed.list().unwrap() {
        assert_eq!(pushed.read(&name).unwrap(), filled.read(&name).unwrap(), "{name}");
    }
}

#[test]
fn queries_of_one_batch_share_the_pages_they_read() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("wide", 200, 64)]).unwrap();
    let index = place(200, 15, 0.5, &mut SplitMix64::new(8));
    let placed = vec![PlacedTables { tables: vec![TableId(0)], index }];
    let mut writer =
        SnapshotWriter::create_placed(Arc::clone(&folder), &schema, placed, &Budget::unlimited())
            .unwrap();
    writer
        .fill(0, &mut |_, out| {
            out.fill(1.0);
            Ok(true)
        })
        .unwrap();
    writer.finish().unwrap();
    let options = SnapshotOptions { cache_bytes_max: Some(0), ..options(4 << 20) };
    let snapshot = Snapshot::open(folder, &options).unwrap();
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)]).unwrap();
    let mut rng = SplitMix64::new(1);
    let indices: Vec<i64> = (0..320).map(|_| rng.below(200) as i64).collect();
    let pages = |bag: usize| -> u64 {
        let calls = indices.chunks(bag * 10).map(|indices| {
            let offsets: Vec<i64> = (0..=bag as i64).map(|at| at * 10).collect();
            let mut out = vec![0.0; 64 * bag];
            let bags = Bags::new(indices, &offsets, None, 1).unwrap();
            let read = snapshot.lookup(&plan, &bags, &mut out).unwrap().pages_read;
            assert!(out.iter().all(|&sum| sum == 10.0), "in request order, with duplicates");
            read
        });
        calls.sum()
    };
    let (alone, together) = (pages(1), pages(32));
    assert!(together <= 14 && alone > 10 * together, "{together} pages together, {alone} alone");
}

#[test]
fn what_is_no_placement_of_the_tables_is_refused() {
    let refused = |placed: Vec<PlacedTables>, told: &str| {
        let budget = Budget::unlimited();
        let error = SnapshotWriter::create_placed(memory_folder(), &schema(), placed, &budget)
            .map(drop)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(told), "{error}");
    };
    let one = |tables: &[u32], items: u32, per_page: usize| PlacedTables {
        tables: tables.iter().map(|&id| TableId(id)).collect(),
        index: place(items, per_page, 0.0, &mut SplitMix64::new(1)),
    };
    refused(vec![one(&[0], 299, 59)], "another number of rows");
    refused(vec![one(&[0], 300, 60)], "more rows on a page");
    refused(vec![one(&[0, 1], 500, 15)], "same dim");
    refused(vec![one(&[0], 300, 59), one(&[0], 300, 59)], "two placements");
    refused(vec![one(&[5], 5, 1)], "larger than a page");
    let seatless = PlacedTables {
        tables: vec![TableId(4)],
        index: PageIndex::new(7, [&[0, 1, 2, 3, 4, 5][..]]).unwrap(),
    };
    let budget = Budget::unlimited();
    let mut writer =
        SnapshotWriter::create_placed(memory_folder(), &schema(), vec![seatless], &budget).unwrap();
    writer.push(TableId(4), RowId(5), &[0.0; 16]).unwrap();
    let error = writer.push(TableId(4), RowId(6), &[0.0; 16]).unwrap_err();
    assert!(error.to_string().contains("no page"), "{error}");
    let error = writer.push(TableId(4), RowId(5), &[0.0; 16]).unwrap_err();
    assert!(error.to_string().contains("pushed twice"), "{error}");
}

#[test]
fn every_flipped_bit_of_a_placed_snapshot_is_noticed() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("a", 10, 2)]).unwrap();
    let pages: [&[u32]; 2] = [&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], &[1, 2]];
    let placed =
        vec![PlacedTables { tables: vec![TableId(0)], index: PageIndex::new(10, pages).unwrap() }];
    let mut writer =
        SnapshotWriter::create_placed(Arc::clone(&folder), &schema, placed, &Budget::unlimited())
            .unwrap();
    writer.push(TableId(0), RowId(1), &[0.5; 2]).unwrap();
    assert_eq!(writer.finish().unwrap().page_count, 2, "nobody else came");
    let check = || Snapshot::open(Arc::clone(&folder), &options(400 << 10))?.verify();
    assert_eq!(check().unwrap(), 3);
    for name in [PLACES_NAME, MANIFEST_NAME, PAGES_NAME] {
        let device = folder.open(name, OpenMode::ReadWrite).unwrap();
        let bytes = folder.read(name).unwrap().unwrap();
        for (at, &byte) in bytes.iter().enumerate().step_by(3) {
            device.write_at(at as u64, &[byte ^ (1 << (at % 8))]).unwrap();
            assert!(check().is_err(), "{name}: byte {at}");
            device.write_at(at as u64, &[byte]).unwrap();
        }
    }
    assert_eq!(check().unwrap(), 3);
}
