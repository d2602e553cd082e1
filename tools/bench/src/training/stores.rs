//! Which stores are measured behind the look-ahead buffer, and with which options?

use std::sync::Arc;

use serde_json::{Map, Value};
use tierbed_compare::{
    HashDb, HashDbOptions, MmapOptions, MmapStore, RocksMode, RocksOptions, RocksStore,
};
use tierbed_core::{Budget, Error, Result, Schema, TrainStore};
use tierbed_io::{EngineOptions, FsFolder};
use tierbed_lsm::{LsmOptions, LsmStore, Picker, Scheduling};
use tierbed_store::cold::{ColdOptions, ColdStore};
use tierbed_store::{FileStore, FileStoreOptions};

use super::job::Job;

/// An open store, and what it counts beyond the common counters.
pub(crate) enum AnyStore {
    Lsm(Box<LsmStore>),
    Rocks(Box<RocksStore>),
    Cold(Box<ColdStore>),
    Other(Box<dyn TrainStore>),
}

impl AnyStore {
    pub(crate) fn get(&mut self) -> &mut dyn TrainStore {
        match self {
            Self::Lsm(store) => store.as_mut(),
            Self::Rocks(store) => store.as_mut(),
            Self::Cold(store) => store.as_mut(),
            Self::Other(store) => store.as_mut(),
        }
    }

    /// Returns the store's own counters, flat.
    pub(crate) fn extra(&self) -> Value {
        match self {
            Self::Lsm(store) => lsm_counters(store),
            Self::Rocks(store) => rocks_counters(store),
            Self::Cold(store) => cold_counters(store),
            Self::Other(_) => Value::Object(Map::new()),
        }
    }
}

fn lsm_counters(store: &LsmStore) -> Value {
    let stats = store.lsm_stats();
    let mut counters = Map::new();
    let mut put = |name: &str, value: u64| {
        counters.insert(name.to_owned(), Value::from(value));
    };
    put("block_loads", stats.block_loads);
    put("block_reloads", stats.block_reloads);
    put("rows_merged", stats.rows_merged);
    put("rows_dropped", stats.rows_dropped);
    put("compaction_count", stats.compaction_count);
    put("compaction_us", stats.compaction_us);
    put("compaction_read_bytes", stats.compaction_read_bytes);
    put("compaction_write_bytes", stats.compaction_write_bytes);
    put("hot_rows", store.hot_row_count() as u64);
    Value::Object(counters)
}

fn cold_counters(store: &ColdStore) -> Value {
    let stats = store.cold_stats();
    let mut counters = Map::new();
    for (name, value) in [
        ("pages_wanted", stats.pages_wanted),
        ("pages_read", stats.pages_read),
        ("page_requests", stats.request_count),
        ("sweeps", stats.sweep_count),
        ("runs_written", stats.run_count),
        ("ranges_merged", stats.ranges_merged),
        ("urgent_merges", stats.urgent_count),
        ("deferred_merges", stats.deferred_count),
        ("runs_compacted", stats.runs_compacted),
        ("merge_us", stats.merge_us),
        ("compaction_read_bytes", stats.merge_read_bytes),
        ("compaction_write_bytes", stats.merge_write_bytes),
    ] {
        counters.insert(name.to_owned(), Value::from(value));
    }
    Value::Object(counters)
}

fn rocks_counters(store: &RocksStore) -> Value {
    let mut counters = Map::new();
    for (name, ticker) in [
        ("block_loads", "rocksdb.block.cache.data.miss"),
        ("compaction_read_bytes", "rocksdb.compact.read.bytes"),
        ("compaction_write_bytes", "rocksdb.compact.write.bytes"),
        ("flush_bytes", "rocksdb.flush.write.bytes"),
        ("stall_us", "rocksdb.stall.micros"),
    ] {
        counters.insert(name.to_owned(), store.ticker(ticker).into());
    }
    counters.insert("uncounted_bytes".to_owned(), store.uncounted_bytes().into());
    Value::Object(counters)
}

/// Opens the store of `job.system` in `folder` with `memory_bytes` for its buffers and caches.
///
/// Indexes and filters, 4 bytes a row, come on top, for all alike: RocksDB counts them so, too.
///
/// # Errors
/// `Unsupported` when the system is not to be had on this machine, `Invalid` for its name.
pub(crate) fn open(job: &Job, schema: &Schema, memory_bytes: u64) -> Result<AnyStore> {
    let path = job.folder.join("rows");
    let rows: u64 = schema.tables().iter().map(|table| table.row_count).sum();
    let account = Budget::new(memory_bytes + 4 * rows + (16 << 20));
    let folder = || FsFolder::create(&path).map(Arc::new);
    let mut store = match job.system.as_str() {
        "file" => {
            let engine = engine_options(job)?;
            let options = FileStoreOptions { budget: account, engine, disk_quota_bytes: None };
            AnyStore::Other(Box::new(FileStore::open(folder()?, options)?))
        }
        "cold" => {
            // Its own parts take a third of the budget it divides; the rest is the buffer above.
            let options = ColdOptions::new(Budget::new(3 * memory_bytes), engine_options(job)?);
            let options = ColdOptions { budget: account, ..options };
            AnyStore::Cold(Box::new(ColdStore::open(folder()?, options)?))
        }
        "hashdb" => {
            let options = HashDbOptions::within(memory_bytes, account);
            let options = HashDbOptions { engine: engine_options(job)?, ..options };
            AnyStore::Other(Box::new(HashDb::open(folder()?, options)?))
        }
        "mmap" => {
            AnyStore::Other(Box::new(MmapStore::open(folder()?, MmapOptions::new(account)?)?))
        }
        name @ ("rocksdb" | "rocksdb_universal") => {
            let is_levelled = name == "rocksdb";
            let mode = if is_levelled { RocksMode::Levelled } else { RocksMode::Universal };
            let options = RocksOptions::within(memory_bytes, mode, account);
            AnyStore::Rocks(Box::new(RocksStore::open(folder()?, options)?))
        }
        name if name == "plain_lsm" || name.starts_with("recdb") => {
            let options = lsm_options(name, Budget::new(memory_bytes))?;
            let engine = engine_options(job)?;
            let options = LsmOptions { budget: account, engine, ..options };
            AnyStore::Lsm(Box::new(LsmStore::open(folder()?, options)?))
        }
        other => return Err(Error::invalid("unknown system").with("found", other)),
    };
    for table in schema.tables() {
        store.get().add_table(table.clone())?;
    }
    Ok(store)
}

fn engine_options(job: &Job) -> Result<EngineOptions> {
    Ok(EngineOptions { choice: job.io_engine.parse()?, queue_depth: 64, ..Default::default() })
}

/// RecDB, with one of its parts taken out where the name says so, or the plain tree.
fn lsm_options(name: &str, budget: Budget) -> Result<LsmOptions> {
    let plain = LsmOptions::plain(budget.clone());
    let mut options = LsmOptions::recdb(budget);
    match name {
        "plain_lsm" => return Ok(plain),
        "recdb" => {}
        "recdb_without_hot_rows" => options.hot_rule = None,
        "recdb_without_sorter" => options.sorts_requests = false,
        "recdb_without_picker" => {
            options.picker = Picker::Largest;
            options.memory.monitored_reads_max = 0;
        }
        "recdb_without_scheduler" => options.scheduling = Scheduling::Levelled,
        other => return Err(Error::invalid("unknown system").with("found", other)),
    }
    Ok(options)
}
