//! Snapshots whose pages hold coded rows, against a map of what each codec keeps.

use tierbed_kernels::Codec;

use super::placed::{place, schema as placed_schema};
use super::tiers::coded;
use super::*;
use crate::delta::apply_delta;
use crate::{PageLayout, PlacedTables, TableCodecs};

/// Rows of one, two and five pages, by codec.
fn schema() -> Schema {
    let mut tables = super::schema().tables().to_vec();
    tables.push(table("larger", 9, 4096));
    Schema::new(tables).unwrap()
}

fn all_in(codec: &Codec, schema: &Schema) -> TableCodecs {
    let tables = (0..schema.tables().len() as u32).map(|id| (TableId(id), codec.name()));
    TableCodecs::named(tables).unwrap()
}

fn publish_in(
    folder: &Arc<dyn Folder>,
    schema: &Schema,
    layout: PageLayout,
    rows: &[(RowKey, Vec<f32>)],
) -> Report {
    let budget = Budget::new(6 << 20);
    let mut writer =
        SnapshotWriter::create_placed(Arc::clone(folder), schema, layout, &budget).unwrap();
    for (key, weights) in rows {
        writer.push(key.table, key.row, weights).unwrap();
    }
    let report = writer.finish().unwrap();
    assert_eq!(budget.report().used_bytes, 0);
    report
}

fn kept(codec: &Codec, rows: &[(RowKey, Vec<f32>)]) -> Model {
    rows.iter().map(|(key, row)| (*key, coded(codec, row))).collect()
}

fn layout(codecs: TableCodecs) -> PageLayout {
    PageLayout { codecs, ..PageLayout::default() }
}

#[test]
fn rows_are_answered_as_their_codec_keeps_them_and_take_fewer_pages() {
    let schema = schema();
    let rows = some_rows(&schema, 1);
    let plain = publish(&memory_folder(), &schema, &rows);
    for (codec, share) in Codec::PER_ROW.iter().zip([1.0, 0.62, 0.62, 0.37, 0.2, 0.2]) {
        let folder = memory_folder();
        let report = publish_in(&folder, &schema, layout(all_in(codec, &schema)), &rows);
        let codec_name = codec.name();
        assert_eq!(report.row_count, plain.row_count, "{codec_name}");
        let most_bytes = (share * plain.pages_bytes as f64) as u64;
        assert!(report.pages_bytes <= most_bytes, "{codec_name}: {report:?} of {plain:?}");
        let model = kept(codec, &rows);
        for options in ways() {
            let snapshot = Snapshot::open(Arc::clone(&folder), &options).unwrap();
            let stats = check_lookups(&snapshot, &model, 5);
            assert!(stats.rows_read > 0 && stats.rows_initial > 0);
            assert!(snapshot.budget_report().peak_bytes <= options.dram_budget_bytes);
            snapshot.verify().unwrap();
            let summary = snapshot.inspect();
            assert!(summary.tables.iter().all(|table| table.codec == codec_name));
            assert!(summary.fill_ratio <= 1.0, "{codec_name}: {}", summary.fill_ratio);
        }
    }
}

#[test]
fn rows_of_every_size_keep_their_shape() {
    let schema = Schema::new(vec![table("t", 100, 32)]).unwrap();
    let mut rng = SplitMix64::new(9);
    let rows: Vec<_> = (0..100)
        .map(|row| {
            // From a millionth to thousands: any fixed range would lose some of them.
            let size = 10f64.powi((row % 10) as i32 - 6);
            let numbers = (0..32).map(|_| (size * (rng.unit_f64() - 0.5)) as f32).collect();
            (RowKey::new(TableId(0), RowId(row)), numbers)
        })
        .collect();
    for (codec, error) in [(Codec::Bf16, 0.01), (Codec::Int8, 0.01), (Codec::Int4, 0.25)] {
        let folder = memory_folder();
        publish_in(&folder, &schema, layout(all_in(&codec, &schema)), &rows);
        let snapshot = Snapshot::open(folder, &options(8 << 20)).unwrap();
        let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::None)]).unwrap();
        for (key, row) in &rows {
            let mut out = vec![0.0; 32];
            let ids = [key.row.0 as i64];
            let bags = Bags::new(&ids, &[0, 1], None, 1).unwrap();
            snapshot.lookup(&plan, &bags, &mut out).unwrap();
            let square = |numbers: &mut dyn Iterator<Item = f32>| -> f64 {
                numbers.map(|number| f64::from(number) * f64::from(number)).sum()
            };
            let lost = square(&mut out.iter().zip(row).map(|(found, given)| found - given));
            let whole = square(&mut row.iter().copied());
            assert!(lost.sqrt() <= error * whole.sqrt(), "{} row {}", codec.name(), key.row.0);
        }
    }
}

#[test]
fn tables_that_share_pages_share_a_codec_and_more_rows_a_page() {
    let schema = placed_schema();
    let rows = some_rows(&schema, 5);
    let placed = |rows_per_page: [usize; 2]| {
        let mut rng = SplitMix64::new(1);
        let [narrow, wide] = rows_per_page;
        let tables = |ids: &[u32]| ids.iter().map(|&id| TableId(id)).collect();
        vec![
            PlacedTables { tables: tables(&[4, 0, 2]), index: place(807, narrow, 0.8, &mut rng) },
            PlacedTables { tables: tables(&[1]), index: place(200, wide, 0.8, &mut rng) },
        ]
    };
    let plain = publish_in(&memory_folder(), &schema, placed([59, 15]).into(), &rows);
    let codecs = all_in(&Codec::Int8, &schema);
    let folder = memory_folder();
    let layout = PageLayout { placed: placed([169, 56]), codecs, ..PageLayout::default() };
    let report = publish_in(&folder, &schema, layout, &rows);
    assert!(3 * report.page_count <= plain.page_count + 9, "{report:?} of {plain:?}");
    let snapshot = Snapshot::open(Arc::clone(&folder), &options(8 << 20)).unwrap();
    check_lookups(&snapshot, &kept(&Codec::Int8, &rows), 3);
    let blocks = (report.index_bytes + report.places_bytes) / 4096;
    assert_eq!(snapshot.verify().unwrap(), report.page_count + blocks);
    // One codec more than their pages have.
    let two = TableCodecs::named([(TableId(0), "int8"), (TableId(2), "int4")]).unwrap();
    let layout = PageLayout { placed: placed([59, 15]), codecs: two, ..PageLayout::default() };
    let budget = Budget::unlimited();
    let error = SnapshotWriter::create_placed(memory_folder(), &schema, layout, &budget);
    assert!(error.unwrap_err().to_string().contains("same codec"));
}

#[test]
fn a_delta_carries_codes_and_takes_rows_back_to_their_first_weights() {
    let schema = schema();
    let rows = some_rows(&schema, 2);
    for codec in Codec::PER_ROW {
        let codecs = all_in(&codec, &schema);
        let (base, delta, out) = (memory_folder(), memory_folder(), memory_folder());
        publish_in(&base, &schema, layout(codecs.clone()), &rows);
        let base = Arc::new(Snapshot::open(base, &options(8 << 20)).unwrap());
        let mut model = kept(&codec, &rows);
        let budget = Budget::new(8 << 20);
        let layout = layout(codecs.clone());
        let mut writer =
            SnapshotWriter::create_placed(Arc::clone(&delta), &schema, layout, &budget).unwrap();
        writer.set_base(&base).unwrap();
        for (at, (key, row)) in rows.iter().enumerate().filter(|(at, _)| at % 7 == 0) {
            let initial = row_of(&schema, &Model::new(), *key);
            let now = if at % 2 == 0 { row.iter().map(|x| 3.0 * x).collect() } else { initial };
            writer.push(key.table, key.row, &now).unwrap();
            match at % 2 == 0 || codec == Codec::F32 {
                true => model.insert(*key, coded(&codec, &now)),
                false => model.remove(key),
            };
        }
        writer.finish().unwrap();
        let delta = Arc::new(Snapshot::open_any(delta, &options(8 << 20)).unwrap());
        let report = apply_delta(&base, &delta, &out, &budget).unwrap();
        assert_eq!(report.row_count, model.len() as u64, "{}", codec.name());
        let applied = Snapshot::open(out, &options(8 << 20)).unwrap();
        applied.verify().unwrap();
        assert_eq!(applied.manifest().codecs, codecs);
        check_lookups(&applied, &model, 11);
    }
}

#[test]
fn a_delta_in_another_codec_is_refused() {
    let schema = schema();
    let rows = some_rows(&schema, 2);
    let (base, delta) = (memory_folder(), memory_folder());
    publish_in(&base, &schema, layout(all_in(&Codec::Int8, &schema)), &rows);
    let base = Arc::new(Snapshot::open(base, &options(8 << 20)).unwrap());
    let budget = Budget::new(8 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(&delta), &schema, &budget).unwrap();
    writer.set_base(&base).unwrap();
    writer.finish().unwrap();
    let delta = Arc::new(Snapshot::open_any(delta, &options(8 << 20)).unwrap());
    let error = apply_delta(&base, &delta, &memory_folder(), &budget).unwrap_err();
    assert!(error.to_string().contains("another codec"), "{error}");
}

#[test]
fn every_flipped_bit_of_coded_pages_is_noticed() {
    let schema = schema();
    let rows = some_rows(&schema, 3);
    let folder = memory_folder();
    publish_in(&folder, &schema, layout(all_in(&Codec::Int4, &schema)), &rows);
    let device = folder.open(PAGES_NAME, OpenMode::ReadWrite).unwrap();
    let bits = 8 * device.len_bytes().unwrap();
    let mut rng = SplitMix64::new(4);
    for _ in 0..500 {
        let bit = rng.below(bits);
        let mut byte = [0];
        device.read_at(bit / 8, &mut byte).unwrap();
        device.write_at(bit / 8, &[byte[0] ^ (1 << (bit % 8))]).unwrap();
        let snapshot = Snapshot::open(Arc::clone(&folder), &options(8 << 20)).unwrap();
        let error = snapshot.verify().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "bit {bit}");
        device.write_at(bit / 8, &byte).unwrap();
    }
    Snapshot::open(folder, &options(8 << 20)).unwrap().verify().unwrap();
}

#[test]
fn numbers_that_a_codec_cannot_keep_are_refused_by_row() {
    let schema = Schema::new(vec![table("t", 10, 4)]).unwrap();
    for (codec, number) in [("int8", f32::NAN), ("int4", f32::INFINITY), ("f16", 1e6)] {
        let codecs = TableCodecs::named([(TableId(0), codec)]).unwrap();
        let folder = memory_folder();
        let budget = Budget::unlimited();
        let mut writer =
            SnapshotWriter::create_placed(Arc::clone(&folder), &schema, layout(codecs), &budget)
                .unwrap();
        let error = writer.push(TableId(0), RowId(7), &[0.0, number, 0.0, 1.0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("row: 7"), "{error}");
        drop(writer);
        assert!(folder.list().unwrap().is_empty());
    }
}
