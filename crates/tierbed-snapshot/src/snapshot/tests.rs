use std::collections::BTreeMap;

use proptest::prelude::*;
use tierbed_core::env::SplitMix64;
use tierbed_core::{
    Bags, ErrorKind, InitSpec, OptimizerKind, RowId, RowStore, TableId, TableSchema,
};
use tierbed_io::{EngineChoice, FsFolder, MemoryFolder, OpenMode};
use tierbed_kernels::layout::{BagRange, Columns, Rows};
use tierbed_kernels::{fill_initial, Pooling};

use super::*;
use crate::manifest::{
    ATTACHMENT_PREFIX, INDEX_NAME, MANIFEST_NAME, PAGES_NAME, PLACES_NAME, TAILS_NAME,
};
use crate::{Backend, FeatureLayout, Report, SnapshotRows, SnapshotWriter};

mod beside;
mod coded;
mod cut;
mod failing;
mod neighbours;
mod overlays;
mod parts;
mod pending;
mod placed;
mod refresh;
mod resident;
mod shared;
mod split;
mod tails;
mod tiers;

type Model = BTreeMap<RowKey, Vec<f32>>;

fn table(name: &str, row_count: u64, dim: u32) -> TableSchema {
    TableSchema {
        optimizer: OptimizerKind::Adam,
        init: InitSpec::Uniform { low: -0.5, high: 0.5 },
        seed: u64::from(dim),
        ..TableSchema::plain(name, row_count, dim)
    }
}

fn schema() -> Schema {
    // Odd dims, a row larger than a page, a table of one row.
    let tables = vec![table("small", 1, 3), table("plain", 4000, 16), table("large", 30, 2100)];
    Schema::new(tables).unwrap()
}

/// Rows in the order in which they are pushed: shuffled, about two thirds of the first ids.
fn some_rows(schema: &Schema, seed: u64) -> Vec<(RowKey, Vec<f32>)> {
    let mut rng = SplitMix64::new(seed);
    let mut rows = Vec::new();
    for (at, table) in schema.tables().iter().enumerate() {
        for row in 0..table.row_count.min(4000) {
            if rng.below(3) > 0 {
                let key = RowKey::new(TableId(at as u32), RowId(row));
                let weights = (0..table.dim).map(|_| rng.unit_f64() as f32 - 0.5).collect();
                rows.push((key, weights));
            }
        }
    }
    for at in (1..rows.len()).rev() {
        rows.swap(at, rng.below(at as u64 + 1) as usize);
    }
    rows
}

fn publish(folder: &Arc<dyn Folder>, schema: &Schema, rows: &[(RowKey, Vec<f32>)]) -> Report {
    let budget = Budget::new(1 << 20);
    let mut writer = SnapshotWriter::create(Arc::clone(folder), schema, &budget).unwrap();
    for (key, weights) in rows {
        writer.push(key.table, key.row, weights).unwrap();
    }
    writer.attach("model", b"dense parameters").unwrap();
    writer.attach("empty", b"").unwrap();
    let report = writer.finish().unwrap();
    assert_eq!(budget.report().used_bytes, 0);
    report
}

fn memory_folder() -> Arc<dyn Folder> {
    Arc::new(MemoryFolder::new())
}

fn options(dram_budget_bytes: u64) -> SnapshotOptions {
    let engine = EngineOptions { choice: EngineChoice::Inline, ..EngineOptions::default() };
    SnapshotOptions { dram_budget_bytes, engine, reader_count: 2, ..SnapshotOptions::default() }
}

/// A small budget, and a large one with pages read from a file or in memory.
fn ways() -> [SnapshotOptions; 3] {
    let ways = [
        (700 << 10, EngineChoice::Auto, Backend::Direct),
        (16 << 20, EngineChoice::Inline, Backend::Direct),
        (16 << 20, EngineChoice::Inline, Backend::Memory),
    ];
    ways.map(|(budget, choice, backend)| {
        let mut options = SnapshotOptions { backend, ..options(budget) };
        options.engine.choice = choice;
        options
    })
}

/// A batch over every table: feature `at` reads table `at % tables`.
struct Batch {
    indices: Vec<i64>,
    offsets: Vec<i64>,
    weights: Vec<f32>,
    features: Vec<(TableId, Pooling)>,
}

impl Batch {
    fn random(schema: &Schema, keys: &[RowKey], batch_size: u64, rng: &mut SplitMix64) -> Self {
        let (mut indices, mut offsets, mut features) = (Vec::new(), vec![0], Vec::new());
        for at in 0..2 * schema.tables().len() {
            let id = TableId((at % schema.tables().len()) as u32);
            features.push((id, [Pooling::Sum, Pooling::Mean][at % 2]));
            let table = schema.table(id).unwrap();
            let known: Vec<_> = keys.iter().filter(|key| key.table == id).collect();
            for _ in 0..batch_size {
                for _ in 0..rng.below(6) {
                    // Stored rows, rows never written, and duplicates.
                    let row = if known.is_empty() || rng.below(4) == 0 {
                        rng.below(table.row_count)
                    } else {
                        known[rng.below(known.len() as u64).min(rng.below(50)) as usize].row.0
                    };
                    indices.push(row as i64);
                }
                offsets.push(indices.len() as i64);
            }
        }
        let weights = indices.iter().map(|_| rng.unit_f64() as f32).collect();
        Self { indices, offsets, weights, features }
    }

    fn bags(&self, weighted: bool) -> Bags<'_> {
        let weights = weighted.then_some(&self.weights[..]);
        Bags::new(&self.indices, &self.offsets, weights, self.features.len()).unwrap()
    }
}

fn row_of(schema: &Schema, model: &Model, key: RowKey) -> Vec<f32> {
    let table = schema.table(key.table).unwrap();
    model.get(&key).cloned().unwrap_or_else(|| {
        let mut row = vec![0.0; table.dim as usize];
        fill_initial(&table.init, table.seed, key.row.0, &mut row);
        row
    })
}

/// Pools from a plain map: the oracle.
fn pooled(schema: &Schema, model: &Model, batch: &Batch, weighted: bool) -> Vec<f32> {
    let bags = batch.bags(weighted);
    let stride: usize =
        batch.features.iter().map(|f| schema.table(f.0).unwrap().dim as usize).sum();
    let mut out = vec![0.0; bags.batch_size() * stride];
    let mut first = 0;
    for (at, (id, pooling)) in batch.features.iter().enumerate() {
        let dim = schema.table(*id).unwrap().dim as usize;
        let offsets = bags.feature_offsets(at);
        let range = offsets[0] as usize..offsets[bags.batch_size()] as usize;
        let keys = bags.indices[range.clone()].iter();
        let keys = keys.map(|&row| RowKey::new(*id, RowId(row as u64)));
        let arena: Vec<f32> = keys.flat_map(|key| row_of(schema, model, key)).collect();
        let starts: Vec<usize> = (0..range.len()).map(|at| at * dim).collect();
        let weights = bags.weights.map(|weights| &weights[range.clone()]);
        let columns = Columns { stride, first, dim };
        let rows = Rows { arena: &arena, starts: &starts, weights };
        Kernels::detect().pool_add(rows, BagRange::whole(offsets), columns, &mut out);
        if *pooling == Pooling::Mean {
            Kernels::detect().mean_scale(offsets, columns, &mut out);
        }
        first += dim;
    }
    out
}

fn check_lookups(snapshot: &Snapshot, model: &Model, seed: u64) -> LookupStats {
    let keys: Vec<RowKey> = model.keys().copied().collect();
    let mut rng = SplitMix64::new(seed);
    let mut total = LookupStats::default();
    for batch_size in [1, 7, 40, 7, 150] {
        let batch = Batch::random(snapshot.schema(), &keys, batch_size, &mut rng);
        let plan = FeatureLayout::new(snapshot.schema(), &batch.features).unwrap();
        for weighted in [false, true] {
            let bags = batch.bags(weighted);
            let mut out = vec![f32::NAN; plan.output_len(&bags)];
            let stats = snapshot.lookup(&plan, &bags, &mut out).unwrap();
            let expected = pooled(snapshot.schema(), model, &batch, weighted);
            assert!(out == expected, "batch of {batch_size}, weighted {weighted}");
            assert_eq!(stats.row_count, stats.rows_cached + stats.rows_read + stats.rows_initial);
            total.add(&stats);
        }
    }
    total
}

#[test]
fn lookups_equal_the_pooling_of_a_map_for_every_backend_and_budget() {
    let temporary = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(temporary.path().join("s")).unwrap());
    let schema = schema();
    let rows = some_rows(&schema, 1);
    let report = publish(&folder, &schema, &rows);
    assert_eq!(report.row_count, rows.len() as u64);
    let model: Model = rows.into_iter().collect();
    for backend in [Backend::Direct, Backend::Mmap, Backend::Memory] {
        for budget in [700 << 10, 3 << 20, 64 << 20] {
            for choice in [EngineChoice::Inline, EngineChoice::Pread, EngineChoice::Auto] {
                let mut options = SnapshotOptions { backend, ..options(budget) };
                options.engine.choice = choice;
                let snapshot = match Snapshot::open(Arc::clone(&folder), &options) {
                    Ok(snapshot) => snapshot,
                    // Copying the pages takes more than the smallest budget.
                    Err(error) if backend == Backend::Memory && budget == 700 << 10 => {
                        assert!(error.to_string().contains("too small"), "{error}");
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                };
                let stats = check_lookups(&snapshot, &model, budget);
                assert!(stats.rows_read > 0 && stats.rows_initial > 0);
                assert!(budget < 3 << 20 || stats.rows_cached > 0);
                assert!(
                    budget > 700 << 10 || stats.chunk_count > 8,
                    "small budgets work in chunks"
                );
                assert!(snapshot.budget_report().peak_bytes <= budget);
                assert_eq!(
                    snapshot.verify().unwrap(),
                    report.page_count + report.index_bytes / 4096
                );
            }
        }
    }
}

#[test]
fn an_unfinished_writer_leaves_nothing_behind() {
    let folder = memory_folder();
    let mut writer =
        SnapshotWriter::create(Arc::clone(&folder), &schema(), &Budget::new(1 << 20)).unwrap();
    writer.push(TableId(1), RowId(5), &[1.0; 16]).unwrap();
    writer.attach("model", b"x").unwrap();
    drop(writer);
    assert!(folder.list().unwrap().is_empty());
    publish(&folder, &schema(), &some_rows(&schema(), 4));
}

#[test]
fn a_page_is_read_once_per_call_and_hits_cost_no_read() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("plain", 4000, 16)]).unwrap();
    let rows: Vec<_> =
        (0..590).map(|row| (RowKey::new(TableId(0), RowId(row)), vec![row as f32; 16])).collect();
    assert_eq!(publish(&folder, &schema, &rows).page_count, 10);
    let snapshot = Snapshot::open(folder, &options(8 << 20)).unwrap();
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::None)]).unwrap();
    let indices: Vec<i64> = (0..590).chain(0..590).collect();
    let offsets = [0, indices.len() as i64];
    let bags = Bags::new(&indices, &offsets, None, 1).unwrap();
    let mut out = vec![0.0; plan.output_len(&bags)];
    let cold = snapshot.lookup(&plan, &bags, &mut out).unwrap();
    assert_eq!((cold.row_count, cold.rows_read, cold.pages_read), (590, 590, 10));
    assert!(out.chunks(16).zip(&indices).all(|(row, &id)| row == [id as f32; 16]));
    let warm = snapshot.lookup(&plan, &bags, &mut out).unwrap();
    assert_eq!((warm.rows_cached, warm.rows_read, warm.pages_read), (590, 0, 0));
    let stats = snapshot.stats();
    assert_eq!((stats.lookup_count, stats.lookups.pages_read, stats.io.read_count), (2, 10, 10));
}

#[test]
fn threads_share_a_snapshot() {
    let folder = memory_folder();
    let schema = schema();
    let rows = some_rows(&schema, 2);
    publish(&folder, &schema, &rows);
    let model: Model = rows.into_iter().collect();
    let snapshot = Snapshot::open(folder, &options(2 << 20)).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (snapshot, model) = (&snapshot, &model);
            scope.spawn(move || check_lookups(snapshot, model, seed));
        }
    });
    assert_eq!(snapshot.stats().lookup_count, 4 * 10);
}

#[test]
fn below_the_waist_it_is_a_row_store() {
    let folder = memory_folder();
    let schema = schema();
    let rows = some_rows(&schema, 3);
    publish(&folder, &schema, &rows);
    let model: Model = rows.into_iter().collect();
    let snapshot = Arc::new(Snapshot::open(folder, &options(700 << 10)).unwrap());
    let mut store = SnapshotRows::new(snapshot);
    let record = |weights: &[f32]| {
        let mut record = bytemuck::cast_slice::<f32, u8>(weights).to_vec();
        record.extend_from_slice(&[0; 4]);
        record
    };
    for at in 0..3 {
        let id = TableId(at);
        let row_count = schema.table(id).unwrap().row_count;
        let keys: Vec<_> = (0..row_count).map(|row| RowKey::new(id, RowId(row))).collect();
        let mut seen = 0;
        store
            .read(&keys, &mut |at, found| {
                seen += 1;
                assert_eq!(found.map(<[u8]>::to_vec), model.get(&keys[at]).map(|row| record(row)));
                Ok(())
            })
            .unwrap();
        assert_eq!(seen, keys.len());
        let mut expected = model.iter().filter(|(key, _)| key.table == id);
        store
            .scan(id, &mut |row, found| {
                let (key, weights) = expected.next().unwrap();
                assert_eq!((row, found.to_vec()), (key.row, record(weights)));
                Ok(())
            })
            .unwrap();
        assert!(expected.next().is_none());
    }
    assert!(store.read(&[RowKey::new(TableId(0), RowId(1))], &mut |_, _| Ok(())).is_err());
    assert!(store.stats().pages_read > 0 && store.stats().disk_bytes > 0);
}

#[test]
fn bad_calls_are_refused_before_anything_is_written() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("a", 10, 4), table("b", 5, 8)]).unwrap();
    publish(&folder, &schema, &[]);
    let snapshot = Snapshot::open(folder, &options(1 << 20)).unwrap();
    let sums = [(TableId(0), Pooling::Sum), (TableId(1), Pooling::Sum)];
    let plan = FeatureLayout::new(snapshot.schema(), &sums).unwrap();
    let mut out = vec![7.0; 12];
    for id in [5, -1, i64::MAX] {
        let (indices, offsets) = ([9, id], [0, 1, 2]);
        let bags = Bags::new(&indices, &offsets, None, 2).unwrap();
        let error = snapshot.lookup(&plan, &bags, &mut out).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("table: b") && text.contains("num_embeddings: 5"), "{text}");
        assert!(text.contains(&format!("row: {id}")), "{text}");
        assert_eq!((error.kind(), out[0]), (ErrorKind::Invalid, 7.0));
    }
    let bags = Bags::new(&[1], &[0, 1], None, 1).unwrap();
    assert!(snapshot.lookup(&plan, &bags, &mut out).is_err());
    let bags = Bags::new(&[1], &[0, 1, 1], None, 2).unwrap();
    assert!(snapshot.lookup(&plan, &bags, &mut out[1..]).is_err());
    for features in [
        vec![],
        vec![(TableId(2), Pooling::Sum)],
        vec![(TableId(0), Pooling::None), (TableId(0), Pooling::Sum)],
        vec![(TableId(0), Pooling::None), (TableId(1), Pooling::None)],
    ] {
        assert!(FeatureLayout::new(snapshot.schema(), &features).is_err(), "{features:?}");
    }
}

#[test]
fn the_minimum_that_an_error_names_is_enough() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("a", 3_000_000, 16)]).unwrap();
    let rows: Vec<_> =
        (0..5000).map(|row| (RowKey::new(TableId(0), RowId(row)), vec![1.0; 16])).collect();
    publish(&folder, &schema, &rows);
    for choice in [EngineChoice::Inline, EngineChoice::Pread] {
        let mut options = options(1000);
        options.engine.choice = choice;
        let error = Snapshot::open(Arc::clone(&folder), &options).unwrap_err();
        let context = error.context().iter().find(|(key, _)| *key == "minimum_bytes").unwrap();
        options.dram_budget_bytes = context.1.parse().unwrap();
        Snapshot::open(Arc::clone(&folder), &options).unwrap();
        options.dram_budget_bytes -= 1;
        assert!(Snapshot::open(Arc::clone(&folder), &options).is_err());
    }
}

#[test]
fn publishing_needs_little_memory_however_many_rows() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("a", 200_000, 1)]).unwrap();
    let budget = Budget::new(260 << 10);
    let mut writer = SnapshotWriter::create(Arc::clone(&folder), &schema, &budget).unwrap();
    for at in 0..100_000u64 {
        let row = at * 77_777 % 200_000;
        if row % 2 == 1 {
            writer.push(TableId(0), RowId(row), &[row as f32]).unwrap();
        }
    }
    let report = writer.finish().unwrap();
    assert!(report.sort_run_count > 4, "{report:?}");
    assert_eq!(folder.list().unwrap(), ["rows.index", "rows.pages", "snapshot.json"]);
    let snapshot = Snapshot::open(folder, &options(4 << 20)).unwrap();
    snapshot.verify().unwrap();
    assert_eq!(snapshot.inspect().row_count, report.row_count);
}

#[test]
fn publishing_refuses_what_would_not_be_a_snapshot() {
    let schema = Schema::new(vec![table("a", 10, 2)]).unwrap();
    let budget = Budget::unlimited();
    let create =
        |folder: &Arc<dyn Folder>| SnapshotWriter::create(Arc::clone(folder), &schema, &budget);
    let folder = memory_folder();
    folder.write_atomic("precious", b"x").unwrap();
    assert!(create(&folder).unwrap_err().to_string().contains("empty folder"));
    let folder = memory_folder();
    let mut writer = create(&folder).unwrap();
    assert_eq!(create(&folder).unwrap_err().kind(), ErrorKind::Closed);
    assert!(writer.push(TableId(0), RowId(10), &[0.0; 2]).is_err());
    assert!(writer.push(TableId(0), RowId(1), &[0.0; 3]).is_err());
    assert!(writer.push(TableId(1), RowId(1), &[0.0; 2]).is_err());
    assert!(writer.attach("../x", b"").is_err());
    writer.attach("x", b"").unwrap();
    assert!(writer.attach("x", b"").is_err());
    writer.push(TableId(0), RowId(1), &[0.0; 2]).unwrap();
    writer.push(TableId(0), RowId(1), &[0.0; 2]).unwrap();
    assert!(writer.finish().unwrap_err().to_string().contains("pushed twice"));
    assert!(folder.list().unwrap().is_empty());
    let error = SnapshotWriter::create(folder, &schema, &Budget::new(1000)).unwrap_err();
    assert!(error.to_string().contains("at least"), "{error}");
}

#[test]
fn half_a_snapshot_is_not_one() {
    let folder = memory_folder();
    let error = Snapshot::open(Arc::clone(&folder), &options(1 << 20)).unwrap_err();
    assert!(error.to_string().contains("not a snapshot"), "{error}");
    let schema = Schema::new(vec![table("a", 10, 2)]).unwrap();
    publish(&folder, &schema, &[(RowKey::new(TableId(0), RowId(1)), vec![0.0; 2])]);
    let manifest = folder.read(MANIFEST_NAME).unwrap().unwrap();
    folder.remove(MANIFEST_NAME).unwrap();
    let error = Snapshot::open(Arc::clone(&folder), &options(1 << 20)).unwrap_err();
    assert!(error.to_string().contains("interrupted"), "{error}");
    folder.write_atomic(MANIFEST_NAME, &manifest).unwrap();
    Snapshot::open(Arc::clone(&folder), &options(1 << 20)).unwrap();
    for name in [PAGES_NAME, INDEX_NAME] {
        let bytes = folder.read(name).unwrap().unwrap();
        for end in [0, 100, 4095] {
            folder.write_atomic(name, &bytes[..end]).unwrap();
            let error = Snapshot::open(Arc::clone(&folder), &options(1 << 20)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption);
        }
        folder.remove(name).unwrap();
        assert!(Snapshot::open(Arc::clone(&folder), &options(1 << 20)).is_err());
        folder.write_atomic(name, &bytes).unwrap();
    }
}

/// Every single bit of every file of a small snapshot.
#[test]
fn every_flipped_bit_is_noticed() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("a", 10, 2)]).unwrap();
    publish(&folder, &schema, &[(RowKey::new(TableId(0), RowId(1)), vec![0.5; 2])]);
    let check = || Snapshot::open(Arc::clone(&folder), &options(200 << 10))?.verify();
    check().unwrap();
    for name in folder.list().unwrap() {
        let device = folder.open(&name, OpenMode::ReadWrite).unwrap();
        let bytes = folder.read(&name).unwrap().unwrap();
        for (at, &byte) in bytes.iter().enumerate() {
            // All bits of the first bytes; of the long zero tails, one bit a byte is plenty.
            let bits = if at < 600 { 0..8 } else { at % 8..at % 8 + 1 };
            for bit in bits {
                device.write_at(at as u64, &[byte ^ (1 << bit)]).unwrap();
                assert!(check().is_err(), "{name}: bit {bit} of byte {at}");
            }
            device.write_at(at as u64, &[byte]).unwrap();
        }
    }
    assert_eq!(check().unwrap(), 2);
}

#[test]
fn a_damaged_page_fails_the_lookup_and_the_next_one_still_works() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("plain", 4000, 16)]).unwrap();
    let rows: Vec<_> =
        (0..590).map(|row| (RowKey::new(TableId(0), RowId(row)), vec![row as f32; 16])).collect();
    publish(&folder, &schema, &rows);
    let device = folder.open(PAGES_NAME, OpenMode::ReadWrite).unwrap();
    device.write_at(3 * 4096 + 999, &[77]).unwrap();
    let snapshot =
        Snapshot::open(folder, &SnapshotOptions { reader_count: 1, ..options(1 << 20) }).unwrap();
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)]).unwrap();
    let lookup = |indices: &[i64]| {
        let offsets = [0, indices.len() as i64];
        let mut out = vec![0.0; 16];
        let bags = Bags::new(indices, &offsets, None, 1)?;
        snapshot.lookup(&plan, &bags, &mut out).map(|_| out[0])
    };
    for _ in 0..3 {
        let error = lookup(&(0..590).collect::<Vec<_>>()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption);
        assert!(error.to_string().contains("page_id: 3"), "{error}");
        assert_eq!(lookup(&[1, 589]).unwrap(), 590.0);
    }
    assert!(snapshot.verify().is_err());
}

#[test]
fn attachments_come_back() {
    let folder = memory_folder();
    let schema = Schema::new(vec![table("a", 10, 2)]).unwrap();
    publish(&folder, &schema, &[]);
    let snapshot = Snapshot::open(Arc::clone(&folder), &options(1 << 20)).unwrap();
    assert_eq!(snapshot.attachment_names(), ["empty", "model"]);
    assert_eq!(snapshot.attachment("model").unwrap().unwrap(), b"dense parameters");
    assert_eq!(snapshot.attachment("empty").unwrap().unwrap(), b"");
    assert_eq!(snapshot.attachment("other").unwrap(), None);
    folder.write_atomic("att.model", b"dense parameterz").unwrap();
    assert_eq!(snapshot.attachment("model").unwrap_err().kind(), ErrorKind::Corruption);
    assert!(snapshot.verify().is_err());
}

/// The format document is normative: its numbers are those of the code.
#[test]
fn the_format_document_has_the_constants_of_the_code() {
    let document = include_str!("../../../../docs/reference/formats/snapshot.md");
    for line in [
        format!("`{} {} <", crate::manifest::TEXT.magic, crate::manifest::SNAPSHOT_VERSION),
        format!(
            "| 4..6 | magic `{}`",
            std::str::from_utf8(&crate::page::PAGE_MAGIC.to_le_bytes()).unwrap()
        ),
        format!("| 6..8 | page version, {} |", crate::page::PAGE_VERSION),
        format!("| 16..{} | page id |", crate::page::HEADER_BYTES),
        format!("| 8..4096 | {} words", crate::blocks::BLOCK_WORDS),
        format!("`{MANIFEST_NAME}`"),
        format!("`{PAGES_NAME}`"),
        format!("`{INDEX_NAME}`"),
        format!("`{PLACES_NAME}`"),
        format!("`{TAILS_NAME}`"),
        format!("`{ATTACHMENT_PREFIX}<name>`"),
        format!(
            "{} bytes when the table has at least 2^{} rows",
            8,
            crate::page::WIDE_ROW_COUNT.ilog2()
        ),
    ] {
        assert!(document.contains(&line), "docs/reference/formats/snapshot.md lacks: {line}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn whatever_is_pushed_is_looked_up(
        seed: u64,
        dims in proptest::collection::vec(1u32..1200, 1..4),
        budget in 300u64 << 10..6 << 20,
    ) {
        let tables = dims.iter().enumerate().map(|(at, &dim)| table(&format!("t{at}"), 200, dim));
        let schema = Schema::new(tables.collect()).unwrap();
        let folder = memory_folder();
        let rows = some_rows(&schema, seed);
        publish(&folder, &schema, &rows);
        let model: Model = rows.into_iter().collect();
        let snapshot = Snapshot::open(folder, &options(budget)).unwrap();
        snapshot.verify().unwrap();
        check_lookups(&snapshot, &model, seed);
    }
}
