//! Snapshots whose tables have heads and tails, against a map and against those without.

use tierbed_kernels::Codec;

use super::placed::{place, schema as placed_schema};
use super::tiers::coded;
use super::*;
use crate::delta::apply_delta;
use crate::{
    import_tables, HeadSize, PageLayout, PlacedTables, PlainTable, TableCodecs, TableHeads,
};

/// Rows in the order in which they are pushed: table by table.
fn by_table(mut rows: Vec<(RowKey, Vec<f32>)>) -> Vec<(RowKey, Vec<f32>)> {
    rows.sort_by_key(|(key, _)| key.table);
    rows
}

fn heads(sizes: &[(u32, HeadSize)]) -> TableHeads {
    TableHeads::new(sizes.iter().map(|&(table, size)| (TableId(table), size)))
}

/// The same head for every table.
fn all_have(size: HeadSize, schema: &Schema) -> PageLayout {
    let tables = (0..schema.tables().len() as u32).map(|id| (TableId(id), size));
    PageLayout { heads: TableHeads::new(tables), ..PageLayout::default() }
}

fn publish_as(
    folder: &Arc<dyn Folder>,
    schema: &Schema,
    layout: PageLayout,
    rows: &[(RowKey, Vec<f32>)],
) -> Report {
    let budget = Budget::new(6 << 20);
    let writer = SnapshotWriter::create_placed(Arc::clone(folder), schema, layout, &budget);
    let mut writer = writer.unwrap();
    for at in 0..schema.tables().len() as u32 {
        let count = rows.iter().filter(|(key, _)| key.table.0 == at).count();
        writer.expect_rows(TableId(at), count as u64).unwrap();
    }
    for (key, weights) in rows {
        writer.push(key.table, key.row, weights).unwrap();
    }
    let report = writer.finish().unwrap();
    assert_eq!(budget.report().used_bytes, 0);
    assert!(!folder.list().unwrap().iter().any(|name| name.starts_with("scratch")));
    report
}

fn blocks(report: &Report) -> u64 {
    (report.index_bytes + report.places_bytes) / 4096
}

#[test]
fn heads_of_every_size_give_the_rows_of_a_map_in_fewer_bytes_of_index() {
    let schema = schema();
    let rows = by_table(some_rows(&schema, 1));
    let plain = publish(&memory_folder(), &schema, &rows);
    let model: Model = rows.iter().cloned().collect();
    let sizes = [HeadSize::Rows(0), HeadSize::Rows(13), HeadSize::Share(0.1), HeadSize::Share(1.0)];
    for size in sizes {
        let folder = memory_folder();
        let report = publish_as(&folder, &schema, all_have(size, &schema), &rows);
        assert_eq!(report.row_count, plain.row_count);
        // A page of the head may be partly full, and one of the tail.
        let tables = schema.tables().len() as u64;
        assert!(report.page_count <= plain.page_count + tables, "{report:?} of {plain:?}");
        for options in ways() {
            let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
            assert_eq!(snapshot.verify().unwrap(), report.page_count + blocks(&report));
            let stats = check_lookups(&snapshot, &model, 5);
            assert!(stats.rows_read > 0 && stats.rows_initial > 0);
            assert!(snapshot.budget_report().peak_bytes <= options.dram_budget_bytes);
            for (table, stored) in snapshot.inspect().tables.iter().zip(&snapshot.manifest().tables)
            {
                let rows = size.of(stored.row_count).min(stored.row_count);
                assert_eq!(table.head_rows, Some(rows), "{}", table.name);
            }
        }
    }
}

#[test]
fn an_index_too_large_for_a_budget_is_published_smaller() {
    let schema = Schema::new(vec![table("t", 400_000, 2)]).unwrap();
    let key = |row| RowKey::new(TableId(0), RowId(row));
    let rows: Vec<_> = (0..400_000).map(|row| (key(row), vec![row as f32; 2])).collect();
    let refused = |folder: &Arc<dyn Folder>| {
        let opened = Snapshot::open(Arc::clone(folder), &options(64 << 10));
        opened.expect_err("64 KiB are too few")
    };
    let plain = memory_folder();
    publish_as(&plain, &schema, PageLayout::default(), &rows);
    let error = refused(&plain);
    assert!(error.to_string().contains("or publish with head_rows"), "{error}");
    let small = memory_folder();
    publish_as(&small, &schema, all_have(HeadSize::Rows(0), &schema), &rows);
    let again = refused(&small);
    assert!(!again.to_string().contains("head_rows"), "{again}");
    let least = again.minimum_bytes().unwrap();
    assert!(least + 400_000 < error.minimum_bytes().unwrap(), "{error} and {again}");
    let snapshot = Snapshot::open(small, &options(least)).unwrap();
    check_lookups(&snapshot, &rows.into_iter().collect(), 5);
}

#[test]
fn an_index_has_a_bit_for_each_row_and_entries_of_its_head() {
    let schema = Schema::new(vec![table("t", 400_000, 16)]).unwrap();
    let key = |row| RowKey::new(TableId(0), RowId(row));
    let rows: Vec<_> = (0..400_000).map(|row| (key(row), vec![row as f32; 16])).collect();
    let plain = publish_as(&memory_folder(), &schema, PageLayout::default(), &rows);
    let index_bytes = |rows: &[(RowKey, Vec<f32>)], size| {
        publish_as(&memory_folder(), &schema, all_have(size, &schema), rows).index_bytes
    };
    assert_eq!(index_bytes(&rows, HeadSize::Rows(0)), 0, "nothing is to be said");
    // 9 bits for each row of the head, whose pages are a twentieth of all.
    let bits = |blocks: u64| blocks * 8 * 4096;
    let twentieth = index_bytes(&rows, HeadSize::Share(0.05));
    assert!(8 * twentieth <= 400_000 + 20_000 * 9 + bits(2), "{twentieth}");
    assert!(100 * twentieth <= 15 * plain.index_bytes, "{twentieth} of {}", plain.index_bytes);
    let half: Vec<_> = rows.iter().step_by(2).cloned().collect();
    let of_half = index_bytes(&half, HeadSize::Rows(0));
    assert!(8 * of_half <= 400_000 + bits(2), "{of_half}");
}

#[test]
fn tables_with_and_without_tails_and_placed_ones_lie_beside_each_other() {
    let schema = placed_schema();
    let rows = by_table(some_rows(&schema, 5));
    let mut rng = SplitMix64::new(1);
    let tables = [4, 0].map(TableId).to_vec();
    let items = tables.iter().map(|&id| schema.table(id).unwrap().row_count).sum::<u64>();
    let placed = vec![PlacedTables { tables, index: place(items as u32, 59, 0.8, &mut rng) }];
    let heads = heads(&[(1, HeadSize::Rows(20)), (3, HeadSize::Rows(0))]);
    let folder = memory_folder();
    let layout = PageLayout { placed, heads, ..PageLayout::default() };
    let report = publish_as(&folder, &schema, layout, &rows);
    let snapshot = Snapshot::open(folder, &options(8 << 20)).unwrap();
    assert_eq!(snapshot.verify().unwrap(), report.page_count + blocks(&report));
    check_lookups(&snapshot, &rows.into_iter().collect(), 3);
    let has_tail: Vec<bool> =
        snapshot.inspect().tables.iter().map(|table| table.head_rows.is_some()).collect();
    assert_eq!(has_tail[..4], [false, true, false, true]);
}

#[test]
fn a_tail_is_sorted_in_little_memory() {
    let schema = Schema::new(vec![table("a", 200_000, 1)]).unwrap();
    let folder = memory_folder();
    let layout = all_have(HeadSize::Rows(100), &schema);
    let least = layout.tails_bytes_min(&schema);
    let budget = Budget::new(SnapshotWriter::MEMORY_BYTES_MIN + least);
    let mut writer =
        SnapshotWriter::create_placed(Arc::clone(&folder), &schema, layout, &budget).unwrap();
    let rows = (0..100_000u64).map(|at| at * 77_777 % 200_000).filter(|row| row % 2 == 1);
    for row in rows {
        writer.push(TableId(0), RowId(row), &[row as f32]).unwrap();
    }
    let report = writer.finish().unwrap();
    assert!(report.sort_run_count > 4, "{report:?}");
    let names = ["rows.index", "rows.pages", "rows.tails", "snapshot.json"];
    assert_eq!(folder.list().unwrap(), names);
    let snapshot = Snapshot::open(folder, &options(4 << 20)).unwrap();
    snapshot.verify().unwrap();
    let mut first_pages = Vec::new();
    for row in (0..200_000).map(RowId) {
        first_pages.extend(snapshot.own_page_of(RowKey::new(TableId(0), row)).unwrap());
    }
    let tail_page = snapshot.tails().tail_page(RowKey::new(TableId(0), RowId(0))).unwrap();
    first_pages.retain(|&page| page >= tail_page);
    assert!(first_pages.is_sorted() && first_pages.len() as u64 == report.row_count - 100);
}

#[test]
fn a_delta_applied_leaves_a_tail_in_order() {
    let schema = schema();
    let rows = by_table(some_rows(&schema, 2));
    for codec in [Codec::F32, Codec::Int8] {
        let ids = (0..schema.tables().len() as u32).map(|id| (TableId(id), codec.name()));
        let codecs = TableCodecs::named(ids).unwrap();
        let plain = PageLayout { codecs: codecs.clone(), ..PageLayout::default() };
        let layout = PageLayout { codecs, ..all_have(HeadSize::Share(0.1), &schema) };
        let (base, delta, out) = (memory_folder(), memory_folder(), memory_folder());
        publish_as(&base, &schema, layout, &rows);
        let base = Arc::new(Snapshot::open(base, &options(8 << 20)).unwrap());
        let mut model: Model = rows.iter().map(|(key, row)| (*key, coded(&codec, row))).collect();
        let budget = Budget::new(8 << 20);
        let writer = SnapshotWriter::create_placed(Arc::clone(&delta), &schema, plain, &budget);
        let mut writer = writer.unwrap();
        writer.set_base(&base).unwrap();
        // Rows of head and tail change, some to their initial weights, and new ones come.
        for at in 0..schema.tables().len() as u32 {
            let row_count = schema.table(TableId(at)).unwrap().row_count as usize;
            for row in (0..row_count).step_by(3).rev() {
                let key = RowKey::new(TableId(at), RowId(row as u64));
                let initial = row_of(&schema, &Model::new(), key);
                let now: Vec<f32> = match row % 2 {
                    0 => initial.iter().map(|x| 3.0 * x).collect(),
                    _ => initial,
                };
                writer.push(key.table, key.row, &now).unwrap();
                match row % 2 == 0 || codec == Codec::F32 {
                    true => model.insert(key, coded(&codec, &now)),
                    false => model.remove(&key),
                };
            }
        }
        writer.finish().unwrap();
        let opened = Arc::new(Snapshot::open_any(Arc::clone(&delta), &options(8 << 20)).unwrap());
        let report = apply_delta(&base, &opened, &out, &budget).unwrap();
        assert_eq!(report.row_count, model.len() as u64);
        let applied = Snapshot::open(out, &options(8 << 20)).unwrap();
        applied.verify().unwrap();
        assert!(applied.inspect().tables.iter().all(|table| table.head_rows.is_some()));
        check_lookups(&applied, &model, 11);
        base.apply(delta).unwrap();
        base.verify().unwrap();
        check_lookups(&base, &model, 12);
    }
}

#[test]
fn matrices_without_a_head_have_no_index_and_the_same_pages() {
    let weights: Vec<f32> = (0..3000 * 8).map(|at| at as f32).collect();
    let tables = [PlainTable { name: "t", dim: 8, weights: &weights }];
    let schema = Schema::new(vec![TableSchema::plain("t", 3000, 8)]).unwrap();
    let (plain, tailed) = (memory_folder(), memory_folder());
    let budget = Budget::new(1 << 20);
    import_tables(Arc::clone(&plain), &tables, Vec::new(), &budget).unwrap();
    let layout = all_have(HeadSize::Rows(0), &schema);
    let report = import_tables(Arc::clone(&tailed), &tables, layout, &budget).unwrap();
    assert_eq!((report.index_bytes, report.sort_run_count), (0, 0));
    assert_eq!(plain.read(PAGES_NAME).unwrap(), tailed.read(PAGES_NAME).unwrap());
    Snapshot::open(tailed, &options(1 << 20)).unwrap().verify().unwrap();
}

#[test]
fn what_has_no_tail_is_refused() {
    let schema = Schema::new(vec![table("a", 100, 4), table("b", 100, 4)]).unwrap();
    let create = |layout: PageLayout| {
        SnapshotWriter::create_placed(memory_folder(), &schema, layout, &Budget::unlimited())
    };
    let mut rng = SplitMix64::new(1);
    let placed =
        vec![PlacedTables { tables: vec![TableId(0)], index: place(100, 9, 0.8, &mut rng) }];
    let layout = PageLayout { placed, ..all_have(HeadSize::Rows(3), &schema) };
    assert!(create(layout).unwrap_err().to_string().contains("has no tail"));
    let mut writer = create(all_have(HeadSize::Rows(1), &schema)).unwrap();
    let base = memory_folder();
    publish(&base, &schema, &[]);
    let base = Snapshot::open(base, &options(1 << 20)).unwrap();
    assert!(writer.set_base(&base).unwrap_err().to_string().contains("a delta has no tails"));
    for row in [7, 3, 5] {
        writer.push(TableId(0), RowId(row), &[0.0; 4]).unwrap();
    }
    for row in [7, 3] {
        let error = writer.push(TableId(0), RowId(row), &[0.0; 4]).unwrap_err();
        assert!(error.to_string().contains("pushed twice"), "{error}");
    }
    writer.push(TableId(1), RowId(7), &[0.0; 4]).unwrap();
    let error = writer.push(TableId(0), RowId(9), &[0.0; 4]).unwrap_err();
    assert!(error.to_string().contains("one after the other"), "{error}");
    writer.finish().unwrap();
}

/// Every single bit of every file of a small snapshot.
#[test]
fn every_flipped_bit_is_noticed() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("a", 300, 200)]).unwrap();
    let rows: Vec<_> = (0..20)
        .map(|row| (RowKey::new(TableId(0), RowId(row * 77 % 300)), vec![0.5; 200]))
        .collect();
    publish_as(&folder, &schema, all_have(HeadSize::Rows(12), &schema), &rows);
    let check = || Snapshot::open(Arc::clone(&folder), &options(200 << 10))?.verify();
    check().unwrap();
    for name in [TAILS_NAME, MANIFEST_NAME] {
        let device = folder.open(name, OpenMode::ReadWrite).unwrap();
        let bytes = folder.read(name).unwrap().unwrap();
        for (at, &byte) in bytes.iter().enumerate() {
            for bit in 0..8 {
                device.write_at(at as u64, &[byte ^ (1 << bit)]).unwrap();
                assert!(check().is_err(), "{name}: bit {bit} of byte {at}");
            }
            device.write_at(at as u64, &[byte]).unwrap();
        }
        for end in [0, 100, bytes.len() - 1] {
            folder.write_atomic(name, &bytes[..end]).unwrap();
            assert!(check().is_err(), "{name}: {end} bytes");
        }
        folder.remove(name).unwrap();
        assert!(check().is_err(), "no {name}");
        folder.write_atomic(name, &bytes).unwrap();
    }
    check().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn whatever_is_pushed_is_looked_up(
        seed: u64,
        tables in proptest::collection::vec((1u32..1200, 1u64..700, 0u32..4), 1..4),
        shares in proptest::collection::vec(proptest::option::of(0.0f64..1.2), 4),
        codec in 0usize..6,
        budget in 400u64 << 10..6 << 20,
    ) {
        let of_dim = |(at, &(dim, row_count, _)): (usize, &(u32, u64, u32))| {
            table(&format!("t{at}"), row_count, dim)
        };
        let schema = Schema::new(tables.iter().enumerate().map(of_dim).collect()).unwrap();
        let codec = Codec::PER_ROW[codec].clone();
        let ids = (0..tables.len() as u32).map(|id| (TableId(id), codec.name()));
        let sizes = (0..tables.len() as u32).map(TableId).zip(&shares).filter_map(|(id, share)| {
            share.map(|share| (id, HeadSize::Share(share)))
        });
        let layout = PageLayout {
            codecs: TableCodecs::named(ids).unwrap(),
            heads: TableHeads::new(sizes),
            ..PageLayout::default()
        };
        // From no row of a table to all of them.
        let mut rng = SplitMix64::new(seed);
        let mut rows = some_rows(&schema, seed);
        for (at, &(_, row_count, density)) in tables.iter().enumerate() {
            let id = TableId(at as u32);
            if density == 0 {
                rows.retain(|(key, _)| key.table != id);
            } else if density == 3 {
                let missing = (0..row_count).map(|row| RowKey::new(id, RowId(row)));
                let known: Vec<RowKey> = rows.iter().map(|(key, _)| *key).collect();
                let dim = schema.table(id).unwrap().dim;
                let missing: Vec<_> = missing.filter(|key| !known.contains(key)).collect();
                let mut weights = || (0..dim).map(|_| rng.unit_f64() as f32).collect();
                rows.extend(missing.into_iter().map(|key| (key, weights())));
            }
        }
        let rows = by_table(rows);
        let folder = memory_folder();
        let report = publish_as(&folder, &schema, layout, &rows);
        let snapshot = Snapshot::open(folder, &options(budget)).unwrap();
        prop_assert_eq!(snapshot.verify().unwrap(), report.page_count + blocks(&report));
        let model: Model = rows.iter().map(|(key, row)| (*key, coded(&codec, row))).collect();
        check_lookups(&snapshot, &model, seed);
    }
}
