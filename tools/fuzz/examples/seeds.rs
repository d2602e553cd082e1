//! Writes the seeds of every fuzz target: pieces of files that the stores themselves wrote.
//!
//! `cargo run --manifest-path tools/fuzz/Cargo.toml --example seeds`, from the repository's
//! root. The same code gives the same seeds.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use tierbed_core::env::{ManualClock, SplitMix64};
use tierbed_core::store::{Attachment, RowWrite};
use tierbed_core::{
    Bags, Budget, InitSpec, OptimizerKind, RowId, RowKey, RowStore, Schema, TableId, TableSchema,
    TrainStore,
};
use tierbed_lab::trace::{write_trace, TraceOptions};
use tierbed_train::planned::{PlanBuilder, PlanOptions, PlanShape};
use tierbed_io::{EngineChoice, EngineOptions, Folder, MemoryFolder};
use tierbed_kernels::{Codec, ProductQuantizer};
use tierbed_remote::{Head, Location, Pull, Push, Want};
use tierbed_lsm::{Durability, LsmOptions, LsmStore, WorkerChoice};
use tierbed_snapshot::index::PageIndex;
use tierbed_snapshot::manifest::{INDEX_NAME, MANIFEST_NAME, PAGES_NAME, PLACES_NAME, TAILS_NAME};
use tierbed_snapshot::{HeadSize, PageLayout, PlacedTables, SnapshotWriter, TableHeads};
use tierbed_store::cold::{ColdOptions, ColdStore, MemoryOptions};
use tierbed_store::{FileStore, FileStoreOptions, MemoryStore};
use tierbed_vocab::{bucket_table, PageCache, Policy, Scratch, Vocabulary, PAGE_BYTES};

type Outcome = Result<(), Box<dyn Error>>;

const SEEDS: &str = "tools/fuzz/seeds";
const BLOCK_BYTES: usize = 4096;

fn put(target: &str, name: &str, bytes: &[u8]) -> Outcome {
    let folder = Path::new(SEEDS).join(target);
    fs::create_dir_all(&folder)?;
    Ok(fs::write(folder.join(name), bytes)?)
}

fn table(name: &str, dim: u32, row_count: u64) -> TableSchema {
    TableSchema::plain(name, row_count, dim)
}

fn engine() -> EngineOptions {
    EngineOptions { choice: EngineChoice::Inline, queue_depth: 2, buf_bytes: BLOCK_BYTES }
}

fn write(store: &mut dyn TrainStore, rows: impl Iterator<Item = u64>) -> Outcome {
    let record_bytes = store.schema().table(TableId(0))?.record_bytes();
    let keys: Vec<_> = rows.map(|row| RowKey::new(TableId(0), RowId(row))).collect();
    let records: Vec<_> = keys.iter().map(|key| vec![key.row.0 as u8; record_bytes]).collect();
    let writes: Vec<_> =
        keys.iter().zip(&records).map(|(key, record)| RowWrite { key: *key, record }).collect();
    Ok(store.write(&writes)?)
}

/// Some file of `folder` whose name ends in `ending`.
fn file(folder: &MemoryFolder, ending: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let names = folder.list()?;
    let name = names.iter().find(|name| name.ends_with(ending)).ok_or(ending.to_owned())?;
    Ok(folder.read(name)?.unwrap_or_default())
}

fn lsm() -> Outcome {
    let folder = Arc::new(MemoryFolder::default());
    let mut options = LsmOptions::recdb(Budget::new(4 << 20));
    options.engine = engine();
    options.clock = Arc::new(ManualClock::default());
    options.durability = Durability::Step;
    options.worker = WorkerChoice::Inline;
    options.memory.memtable_bytes = 8 << 10;
    let mut store = LsmStore::open(folder.clone(), options)?;
    store.add_table(table("t", 1, 1000))?;
    write(&mut store, (0..400).map(|at| at * 2))?;
    store.commit("full", &[])?;
    for step in 0..2 {
        write(&mut store, (0..5).map(|at| at + step))?;
        store.commit("step", &[Attachment { name: "position", bytes: &[step as u8] }])?;
    }
    put("lsm_rows", "rows", &file(&folder, ".sst")?[..BLOCK_BYTES])?;
    put("lsm_version", "version", &file(&folder, ".version")?)?;
    put("lsm_log", "log", &file(&folder, ".wal")?)
}

fn file_store() -> Outcome {
    let folder = Arc::new(MemoryFolder::default());
    let options =
        FileStoreOptions { budget: Budget::new(4 << 20), engine: engine(), disk_quota_bytes: None };
    let mut store = FileStore::open(folder.clone(), options)?;
    store.add_table(table("t", 8, 2000))?;
    write(&mut store, (0..50).map(|at| at * 3))?;
    store.commit("one", &[Attachment { name: "note", bytes: b"hello" }])?;
    let manifest = file(&folder, ".manifest")?;
    let body = manifest.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    put("store_commit", "current", &[&[0], file(&folder, "CURRENT")?.as_slice()].concat())?;
    put("store_commit", "manifest", &[&[1], &manifest[body..]].concat())?;
    put("store_map", "map", &file(&folder, ".pages")?[BLOCK_BYTES..BLOCK_BYTES + 64])?;
    let rows = file(&folder, ".rows")?;
    let page = rows.chunks(BLOCK_BYTES).find(|page| page.iter().any(|byte| *byte != 0));
    put("store_page", "page", page.unwrap_or_default())
}

fn forward() -> Outcome {
    let folder = Arc::new(MemoryFolder::default());
    let shape = PlanShape {
        feature_tables: vec![TableId(0), TableId(1)],
        row_counts: vec![100, 7],
        record_bytes: vec![40, 8],
    };
    let mut rng = SplitMix64::new(1);
    let mut builder =
        PlanBuilder::new(folder.clone(), "p.plan", shape, "seeds", PlanOptions::default())?;
    for _ in 0..6 {
        let indices: Vec<i64> = (0..8).map(|_| rng.below(7) as i64).collect();
        builder.push(&Bags::new(&indices, &[0, 2, 4, 6, 8], None, 2)?)?;
    }
    builder.finish()?;
    let plan = file(&folder, "p.plan")?;
    put("forward_plan", "plan", &plan)?;
    // Bytes 64..68 say how long the longest block is; once that much was allocated unseen.
    let long = [&plan[..64], &[0xFF; 4], &plan[68..]].concat();
    put("forward_plan", "block-longer-than-the-file", &long)?;
    let lists = [0u32, 1, 2, 5, 1, 30, 77, 9, 2, 12, 78, 1, u32::MAX, 1, 20, 1, 3, 79];
    put("forward_chunks", "lists", &lists.map(u32::to_le_bytes).concat())
}

fn snapshot() -> Outcome {
    let folder = Arc::new(MemoryFolder::default());
    let schema = Schema::new(vec![table("narrow", 8, 3000), table("long", 3000, 40)])?;
    let mut writer = SnapshotWriter::create(folder.clone(), &schema, &Budget::unlimited())?;
    for row in (0..3000).step_by(40) {
        writer.push(TableId(0), RowId(row), &[row as f32; 8])?;
    }
    for row in 0..3 {
        writer.push(TableId(1), RowId(row), &[1.0; 3000])?;
    }
    writer.attach("note", b"hello")?;
    writer.finish()?;
    let read = |name: &str| -> Result<Vec<u8>, Box<dyn Error>> {
        Ok(folder.read(name)?.unwrap_or_default())
    };
    let pages = read(PAGES_NAME)?;
    put("snapshot_page", "narrow", &pages[..BLOCK_BYTES])?;
    put("snapshot_page", "long", &pages[pages.len() - BLOCK_BYTES..])?;
    let manifest = read(MANIFEST_NAME)?;
    let body = manifest.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    put("snapshot_manifest", "manifest", &manifest)?;
    put("snapshot_manifest", "body", &manifest[body..])?;
    let page_count = (pages.len() / BLOCK_BYTES) as u16;
    let index = [&page_count.to_le_bytes(), &read(INDEX_NAME)?[..256]].concat();
    put("snapshot_index", "index", &index)?;
    places()?;
    tails()
}

/// Three home pages of ten rows, and a page that repeats the first five.
fn places() -> Outcome {
    let folder = Arc::new(MemoryFolder::default());
    let schema = Schema::new(vec![table("narrow", 8, 30)])?;
    let rows: Vec<u32> = (0..30).collect();
    let pages = rows.chunks(10).chain([&rows[..5]]);
    let placed = PlacedTables { tables: vec![TableId(0)], index: PageIndex::new(30, pages)? };
    let budget = Budget::unlimited();
    let mut writer = SnapshotWriter::create_placed(folder.clone(), &schema, vec![placed], &budget)?;
    writer.fill(0, &mut |key, out| {
        out.fill(key.row.0 as f32);
        Ok(true)
    })?;
    writer.finish()?;
    let places = folder.read(PLACES_NAME)?.unwrap_or_default();
    put("snapshot_places", "places", &[&[4, 35, 0], &places[..280]].concat())
}

/// 750 rows of which 300 are of the head, and three long ones of which two are.
fn tails() -> Outcome {
    let folder = Arc::new(MemoryFolder::default());
    let schema = Schema::new(vec![table("narrow", 8, 3000), table("long", 3000, 40)])?;
    let sizes = [(TableId(0), HeadSize::Rows(300)), (TableId(1), HeadSize::Rows(2))];
    let layout = PageLayout { heads: TableHeads::new(sizes), ..PageLayout::default() };
    let budget = Budget::unlimited();
    let mut writer = SnapshotWriter::create_placed(folder.clone(), &schema, layout, &budget)?;
    for row in (0..3000u32).step_by(4).rev() {
        writer.push(TableId(0), RowId(row.into()), &[row as f32; 8])?;
    }
    for row in [7, 9, 2] {
        writer.push(TableId(1), RowId(row), &[1.0; 3000])?;
    }
    writer.finish()?;
    let tails = folder.read(TAILS_NAME)?.unwrap_or_default();
    let sizes = [750u16.to_le_bytes(), 300u16.to_le_bytes(), [3, 2]].concat();
    put("snapshot_tails", "tails", &[sizes, tails[..592].to_vec()].concat())?;
    let manifest = folder.read(MANIFEST_NAME)?.unwrap_or_default();
    let body = manifest.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    put("snapshot_manifest", "tailed-body", &manifest[body..])
}

fn with_length(first: &[u8], rest: &[u8]) -> Vec<u8> {
    [&(first.len() as u16).to_le_bytes(), first, rest].concat()
}

fn cold() -> Outcome {
    let folder = Arc::new(MemoryFolder::default());
    let memory = MemoryOptions {
        write_buffer_bytes: 2400,
        delta_index_bytes: 2048,
        extent_bytes: 3 * BLOCK_BYTES,
        read_rows_max: 50,
    };
    let options = ColdOptions {
        clock: Arc::new(ManualClock::default()),
        delta_share: 0.3,
        memory,
        ..ColdOptions::new(Budget::new(8 << 20), engine())
    };
    let mut store = ColdStore::open(folder.clone(), options)?;
    store.add_table(table("t", 8, 1000))?;
    for step in 0..8 {
        write(&mut store, (0..30).map(|at| at * 30 + step))?;
    }
    store.commit("one", &[])?;
    // Behind magic and version; in every run, rows differ by 30.
    let file = &file(&folder, ".cold")?[12..];
    let keys = [[0].as_slice(), &[29; 29]].concat();
    put("cold_table", "table", &with_length(file, &keys.repeat(8)))?;
    put("cold_keys", "keys", &[[30].as_slice(), &keys].concat())
}

fn vocabulary() -> Outcome {
    let budget = Budget::new(8 << 20);
    let mut store = MemoryStore::new(budget.clone());
    let id = store.add_table(table("t", 8, 1000))?;
    let mut cache = PageCache::new(&budget, 64 << 10)?;
    let mut vocabulary =
        Vocabulary::create(&mut cache, &mut store, id, Policy::default(), &budget)?;
    let mut scratch = Scratch::default();
    (0..400u32).for_each(|at| scratch.push(i64::from(at) * 7919, at));
    scratch.sort();
    vocabulary.train(&mut cache, &mut store, &mut scratch, 0)?;
    cache.flush(&mut store)?;
    let buckets = store.schema().id_of(&bucket_table("t").name).ok_or("no pages")?;
    let mut pages = Vec::new();
    store.scan(buckets, &mut |_, record| {
        pages.extend_from_slice(record);
        Ok(())
    })?;
    put("vocab_directory", "directory", &vocabulary.directory_bytes())?;
    let few = &pages[..pages.len().min(2 * PAGE_BYTES)];
    put("vocab_pages", "pages", &with_length(&vocabulary.directory_bytes(), few))
}

fn trace() -> Outcome {
    let path = std::env::temp_dir().join(format!("tierbed-seed-{}.trace", std::process::id()));
    write_trace(&TraceOptions { seed: 1, scale: 1e-7 }, &path, &mut |_| Ok(()))?;
    let bytes = fs::read(&path)?;
    fs::remove_file(&path)?;
    put("trace", "trace", &[&bytes[..456], &bytes[BLOCK_BYTES..BLOCK_BYTES + 64]].concat())
}

/// Three coded rows of each codec, of 18 numbers; for the product codec its codebooks before.
fn codecs() -> Outcome {
    const DIM: usize = 18;
    let mut rng = SplitMix64::new(9);
    let mut row = |len: usize| (0..len).map(|_| rng.unit_f64() as f32 - 0.5).collect::<Vec<f32>>();
    let books = row(256 * DIM);
    let product = ProductQuantizer::new(DIM, 3, books.clone())?;
    let mut codecs = Codec::FIXED.to_vec();
    codecs.push(Codec::Product(Arc::new(product)));
    for (number, codec) in codecs.iter().enumerate() {
        // Which codec, the dim less one, the parts less one.
        let mut bytes = vec![number as u8, DIM as u8 - 1, 2];
        if number == Codec::FIXED.len() {
            bytes.extend(books.iter().flat_map(|value| value.to_le_bytes()));
        }
        for _ in 0..3 {
            let mut code = vec![0; codec.code_bytes(DIM)];
            codec.encode(&row(DIM), &mut code)?;
            bytes.extend(code);
        }
        put("codec_codes", codec.name(), &bytes)?;
    }
    Ok(())
}

/// A version and a delta on it, and the marks of a download that its caller ends.
fn remote() -> Outcome {
    let place = std::env::temp_dir().join(format!("tierbed-seed-{}", std::process::id()));
    let published = place.join("published");
    fs::create_dir_all(&published)?;
    fs::write(published.join("snapshot.json"), b"manifest")?;
    fs::write(published.join("rows.pages"), [7; 3000])?;
    let at = place.join("ads");
    let location = Location::open(at.to_str().ok_or("a path without a name")?)?;
    let push = Push { part_bytes: 1024, ..Push::new(&published, "one", "stable", 1) };
    location.push(&push, &mut |_, _| Ok(()))?;
    let delta = Push { identity: "two", base: Some("one"), ..push };
    location.push(&delta, &mut |_, _| Ok(()))?;
    let head = Head::decode(&fs::read(at.join("HEAD.stable.json"))?)?;
    put("remote_head", "head", &Head { writer: "seeds".into(), ..head }.encode()?)?;
    let parts = fs::read(at.join("v/000002/parts.json"))?;
    let body = parts.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    put("remote_parts", "parts", &parts)?;
    put("remote_parts", "body", &parts[body..])?;
    let local = place.join("local");
    let how = Pull { thread_count: 1, ..Pull::default() };
    let ended = location.pull(&Want::Channel("stable".into()), &local, &how, &mut |done, _| {
        let is_enough = done > 2000;
        if is_enough { Err(tierbed_core::Error::invalid("enough")) } else { Ok(()) }
    });
    assert!(ended.is_err(), "the download was to be ended");
    // The header and the first two marks; more may have come before the end was heard.
    put("remote_marks", "marks", &fs::read(local.join("000001.incoming/parts.done"))?[..64])?;
    Ok(fs::remove_dir_all(&place)?)
}

fn main() -> Outcome {
    remote()?;
    codecs()?;
    lsm()?;
    cold()?;
    vocabulary()?;
    trace()?;
    file_store()?;
    forward()?;
    snapshot()
}
