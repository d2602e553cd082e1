//! Store below the window engine, and its share of the memory.
//!
//! One budget counts everything. A store that divides memory among parts of its own is told half
//! of it; the row buffer then takes what it may of the rest.

use std::sync::Arc;

use tierbed_core::{Budget, Error, Result, TrainStore};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_lsm::{LsmOptions, LsmStore};
use tierbed_store::cold::{ColdOptions, ColdStore};
use tierbed_store::registry::{open_registered, OpenOptions};
use tierbed_store::{FileStore, FileStoreOptions, MemoryStore};

use crate::window::options::{Backend, Durability, WindowConfig};

/// Returns the most bytes the row buffer may take: stores that grow with what they are given
/// need room of their own beside it.
pub(crate) fn buffer_bytes_max(config: &WindowConfig) -> u64 {
    let budget_bytes = config.dram_budget_bytes;
    match config.backend {
        Backend::File
        | Backend::Cold
        | Backend::Mmap
        | Backend::RocksDb
        | Backend::RocksDbUniversal => u64::MAX,
        Backend::Memory => budget_bytes / 2,
        Backend::Lsm | Backend::LsmPlain => budget_bytes / 4,
        Backend::HashDb => budget_bytes / 8 * 3,
    }
}

/// Returns the most that the row buffer leaves to a store that grows. Rows in memory mostly come
/// to be stored; of what a tree may need it mostly needs a part.
pub(crate) fn kept_bytes_max(backend: Backend, budget: &Budget) -> u64 {
    match backend {
        Backend::Memory => budget.free_bytes() / 8 * 7,
        _ => budget.limit_bytes() / 4,
    }
}

/// Returns the smallest budget that errors name, for stores that share it out among parts: the
/// part that fails first does not know what those after it need.
pub(crate) fn least_bytes(config: &WindowConfig) -> u64 {
    match (config.backend, config.durability) {
        (Backend::Lsm | Backend::LsmPlain, Durability::Checkpoint) => 4 << 20,
        (Backend::Lsm | Backend::LsmPlain, Durability::Step) => 8 << 20,
        (Backend::HashDb, _) => 8 << 20,
        (Backend::Cold, _) => 1 << 20,
        (Backend::File | Backend::Mmap, _) => 256 << 10,
        _ => 0,
    }
}

/// Opens the configured store in `folder`.
///
/// # Errors
/// `Invalid` without a folder (but for `memory`), otherwise as the store's own.
pub(crate) fn open_store(
    folder: Option<Arc<dyn Folder>>,
    config: &WindowConfig,
    budget: &Budget,
) -> Result<Box<dyn TrainStore>> {
    let Some(folder) = folder.or_else(|| {
        let needs_none = config.backend == Backend::Memory;
        needs_none.then(|| Arc::new(MemoryFolder::new()) as Arc<dyn Folder>)
    }) else {
        return Err(Error::invalid("a store on disk needs a path"));
    };
    let is_tree = matches!(config.backend, Backend::Lsm | Backend::LsmPlain);
    if config.durability == Durability::Step && !is_tree {
        return Err(Error::invalid("only a tree has a log of every step")
            .with("durability", "step")
            .with("remedy", "open it with backend lsm, or with durability checkpoint"));
    }
    let half_bytes = config.dram_budget_bytes / 2;
    let disk_quota_bytes = config.disk_quota_bytes;
    Ok(match config.backend {
        Backend::File => {
            let engine = config.io_options()?;
            let options = FileStoreOptions { budget: budget.clone(), engine, disk_quota_bytes };
            Box::new(FileStore::open(folder, options)?)
        }
        Backend::Memory => Box::new(MemoryStore::open(folder, budget.clone())?),
        Backend::Lsm | Backend::LsmPlain => {
            // The tree divides half of the budget among its parts; they count in the whole one.
            let half = Budget::new(half_bytes);
            let preset = match config.backend {
                Backend::Lsm => LsmOptions::recdb(half),
                _ => LsmOptions::plain(half),
            };
            let engine = config.io_options()?;
            let durability = match config.durability {
                Durability::Checkpoint => tierbed_lsm::Durability::Commit,
                Durability::Step => tierbed_lsm::Durability::Step,
            };
            let budget = budget.clone();
            let options = LsmOptions { budget, engine, disk_quota_bytes, durability, ..preset };
            Box::new(LsmStore::open(folder, options)?)
        }
        Backend::Cold => {
            let preset = ColdOptions::new(budget.clone(), config.io_options()?);
            Box::new(ColdStore::open(folder, ColdOptions { disk_quota_bytes, ..preset })?)
        }
        Backend::HashDb | Backend::Mmap | Backend::RocksDb | Backend::RocksDbUniversal => {
            let engine = config.io_options()?;
            let options = OpenOptions {
                budget: budget.clone(),
                memory_bytes: half_bytes,
                engine,
                disk_quota_bytes,
            };
            open_registered(config.backend.name(), folder, options)?
        }
    })
}
