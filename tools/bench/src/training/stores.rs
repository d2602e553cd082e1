//! Which stores are measured behind the window engine, and with which options?

use std::sync::Arc;

use tierbed_compare::{
    HashDb, HashDbOptions, MmapOptions, MmapStore, RocksMode, RocksOptions, RocksStore,
};
use tierbed_core::{Budget, Error, Result, Schema, TrainStore};
use tierbed_io::{EngineOptions, FsFolder};
use tierbed_lsm::{LsmOptions, LsmStore, Picker, Scheduling};
use tierbed_store::cold::{ColdOptions, ColdStore};
use tierbed_store::{FileStore, FileStoreOptions};

use super::job::Job;

/// Opens the store of `job.system` in `folder` with `memory_bytes` for its buffers and caches.
///
/// Indexes and filters, 4 bytes a row, come on top, for all alike: RocksDB counts them so, too.
///
/// # Errors
/// `Unsupported` when the system is not to be had on this machine, `Invalid` for its name.
pub(crate) fn open(job: &Job, schema: &Schema, memory_bytes: u64) -> Result<Box<dyn TrainStore>> {
    let path = job.folder.join("rows");
    let rows: u64 = schema.tables().iter().map(|table| table.row_count).sum();
    let account = Budget::new(memory_bytes + 4 * rows + (16 << 20));
    let folder = || FsFolder::create(&path).map(Arc::new);
    let mut store: Box<dyn TrainStore> = match job.system.as_str() {
        "file" => {
            let engine = engine_options(job)?;
            let options = FileStoreOptions { budget: account, engine, disk_quota_bytes: None };
            Box::new(FileStore::open(folder()?, options)?)
        }
        "cold" => {
            // Its own parts take a third of the budget it divides; the rest is the buffer above.
            let options = ColdOptions::new(Budget::new(3 * memory_bytes), engine_options(job)?);
            let options = ColdOptions { budget: account, ..options };
            Box::new(ColdStore::open(folder()?, options)?)
        }
        "hashdb" => {
            let options = HashDbOptions::within(memory_bytes, account);
            let options = HashDbOptions { engine: engine_options(job)?, ..options };
            Box::new(HashDb::open(folder()?, options)?)
        }
        "mmap" => Box::new(MmapStore::open(folder()?, MmapOptions::new(account)?)?),
        name @ ("rocksdb" | "rocksdb_universal") => {
            let is_levelled = name == "rocksdb";
            let mode = if is_levelled { RocksMode::Levelled } else { RocksMode::Universal };
            let options = RocksOptions::within(memory_bytes, mode, account);
            Box::new(RocksStore::open(folder()?, options)?)
        }
        name if name == "plain_lsm" || name.starts_with("recdb") => {
            let options = lsm_options(name, Budget::new(memory_bytes))?;
            let engine = engine_options(job)?;
            let options = LsmOptions { budget: account, engine, ..options };
            Box::new(LsmStore::open(folder()?, options)?)
        }
        other => return Err(Error::invalid("unknown system").with("found", other)),
    };
    for table in schema.tables() {
        store.add_table(table.clone())?;
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
