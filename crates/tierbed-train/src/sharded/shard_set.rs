//! Several engines side by side: tables, opening, what each may use.

use std::sync::Arc;

use tierbed_core::{Error, Poison, Result, TableId};
use tierbed_io::{Folder, FolderLock};
use tierbed_kernels::{FeatureLayout, Hyper};
use tierbed_store::shards::{read_file, shard_of_name, ShardsFile};
use tierbed_store::CommitLog;

use super::another_number;
use super::coordinator::{CommitCoordinator, Participant};
use super::folder::ShardFolder;
use super::part::Parts;
use super::split::Split;
use super::train::FoundBatch;
use crate::auto::engine::AutoEngine;
use crate::auto::options::{OnMismatch, Order, OrderConfig};
use crate::engine::TrainEngine;

/// A store of several shards.
pub(crate) struct ShardSet {
    pub(super) config: OrderConfig,
    pub(super) shard_count: usize,
    pub(super) site: Option<OpenFolder>,
    pub(super) split: Split,
    /// Hyperparameters that no engine has yet, by table.
    pub(super) hypers: Vec<Option<Hyper>>,
    /// One engine per shard; none until it is clear which tables there are.
    pub(super) engines: Vec<AutoEngine>,
    /// How the plan seen last is divided.
    parts: Option<Arc<Parts>>,
    /// How the batches of the plan that is being made are divided.
    pub(super) planning: Option<Arc<Parts>>,
    /// The batch that was looked up to be trained on.
    pub(super) found: Option<FoundBatch>,
    /// Batches that a shard has announced beyond those that fitted all.
    pub(super) ahead: Vec<usize>,
    pub(super) poison: Poison,
}

/// A folder that this process owns.
pub(super) struct OpenFolder {
    folder: Arc<dyn Folder>,
    pub(super) coordinator: Arc<CommitCoordinator>,
    _lock: FolderLock,
}

impl ShardSet {
    /// Opens the shards in `folder`, or in memory.
    ///
    /// # Errors
    /// As [`AutoEngine::open`]; `Unsupported` for what several shards cannot do.
    pub(super) fn open(
        folder: Option<Arc<dyn Folder>>,
        shard_count: usize,
        config: &OrderConfig,
    ) -> Result<Self> {
        check_options(config)?;
        let mut stored = None;
        let site = match folder {
            Some(folder) => {
                let lock = folder.lock()?;
                let file = read_file(&*folder)?;
                if file.is_none() {
                    check_new(&*folder, shard_count)?;
                }
                // Before the first commit tables and shards may still be others.
                stored = file.filter(|file| !file.is_new());
                let found = stored.as_ref().map_or(shard_count, ShardsFile::shard_count);
                if found != shard_count {
                    // Committed by another process since the folder was looked at.
                    return Err(another_number(found, shard_count));
                }
                sweep(&*folder, shard_count)?;
                let coordinator =
                    Arc::new(CommitCoordinator::new(Arc::clone(&folder), stored.clone()));
                Some(OpenFolder { folder, coordinator, _lock: lock })
            }
            None => None,
        };
        let mut many = Self {
            config: config.clone(),
            shard_count,
            site,
            split: Split::default(),
            hypers: Vec::new(),
            engines: Vec::new(),
            parts: None,
            planning: None,
            found: None,
            ahead: vec![0; shard_count],
            poison: Poison::default(),
        };
        if let Some(ShardsFile { schema, shard_of, .. }) = stored {
            many.hypers = vec![None; schema.tables().len()];
            many.split = Split { schema, shard_of };
            many.open_engines()?;
        }
        Ok(many)
    }

    /// Returns how many shards there are.
    pub(super) fn shard_count(&self) -> usize {
        self.shard_count
    }

    /// Opens the engines when nothing did so before: the tables there are now are divided.
    pub(super) fn decide(&mut self) -> Result<()> {
        self.poison.check()?;
        if self.engines.is_empty() {
            self.split = Split::balanced(self.split.schema.clone(), self.shard_count)?;
            self.open_engines()?;
        }
        Ok(())
    }

    fn open_engines(&mut self) -> Result<()> {
        let table_count = self.split.schema.tables().len();
        assert!(self.engines.is_empty(), "shards are opened twice");
        assert_eq!(self.hypers.len(), table_count, "every table has what was set before");
        assert_eq!(self.split.shard_of.len(), table_count, "every table has a shard");
        if let Some(site) = &self.site {
            site.coordinator.begin(self.proposed(), self.shard_count)?;
            // A store of one shard that never had a commit; `SHARDS` speaks for the folder now.
            site.folder.remove(CommitLog::CURRENT)?;
        }
        let mut engines = Vec::with_capacity(self.shard_count);
        for (shard, size) in self.sizes().into_iter().enumerate() {
            let mut engine = AutoEngine::open_in(self.folder_of(shard)?, &size.config())
                .map_err(|error| size.name_least(error))?;
            let hypers = self.hypers.iter().zip(&self.split.shard_of);
            let own = hypers.filter(|(_, of)| **of as usize == shard).map(|(hyper, _)| *hyper);
            for ((id, table), hyper) in self.split.tables_of(shard).zip(own) {
                let (_, expected) = self.split.place(id)?;
                if engine.add_table(table.clone())? != expected {
                    return Err(Error::corruption("a shard has its tables in another order")
                        .with("shard", shard)
                        .with("table", &table.name));
                }
                if let Some(hyper) = hyper {
                    engine.set_hyper(expected, hyper)?;
                }
            }
            engines.push(engine);
        }
        self.engines = engines;
        Ok(())
    }

    fn folder_of(&self, shard: usize) -> Result<Option<Arc<dyn Folder>>> {
        let Some(site) = &self.site else { return Ok(None) };
        let coordinator = Arc::clone(&site.coordinator);
        let folder = ShardFolder::new(Arc::clone(&site.folder), coordinator, shard);
        let stored = CommitLog::stored_backend(&folder)?;
        let is_planned = stored.as_deref() == Some(crate::planned::BACKEND);
        if is_planned && self.config.order == Order::Window {
            return Err(Error::unsupported(
                "rows of several shards do not leave the forward order",
            )
            .with("remedy", "open the store with order=\"auto\""));
        }
        Ok(Some(Arc::new(folder)))
    }

    /// Returns what each shard may use; what is kept aside for the whole store is not divided.
    pub(super) fn sizes(&self) -> Vec<ShardSize> {
        let memory = self.split.memory_shares(self.shard_count);
        let bytes = self.split.byte_shares(self.shard_count);
        let shares = (0..).zip(memory.into_iter().zip(bytes));
        let size = |(shard, (memory_share, byte_share))| ShardSize {
            shard,
            memory_share,
            byte_share,
            whole: self.config.clone(),
        };
        shares.map(size).collect()
    }

    /// Seats all shards for a vote on what they are about to commit; none in memory.
    pub(super) fn participants(&self) -> Vec<Option<Participant>> {
        let Some(site) = &self.site else {
            return std::iter::repeat_with(|| None).take(self.shard_count).collect();
        };
        site.coordinator.sit(self.proposed(), self.shard_count).into_iter().map(Some).collect()
    }

    fn proposed(&self) -> ShardsFile {
        let Split { schema, shard_of } = self.split.clone();
        ShardsFile { schema, shard_of, currents: Vec::new() }
    }

    /// Returns the engine that has `table`, and the table's number there.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, otherwise those of opening the engines.
    pub(super) fn engine_of(&mut self, table: TableId) -> Result<(&mut AutoEngine, TableId)> {
        self.decide()?;
        let (shard, own) = self.split.place(table)?;
        let engine = self.engines.get_mut(shard);
        Ok((engine.ok_or_else(|| Error::invalid("no such shard").with("shard", shard))?, own))
    }

    /// Returns how the features of `plan` are divided.
    ///
    /// # Errors
    /// `Invalid` for a plan over other tables.
    pub(super) fn parts(&mut self, plan: &FeatureLayout) -> Result<Arc<Parts>> {
        match &self.parts {
            Some(parts) if parts.whole == *plan => Ok(Arc::clone(parts)),
            _ => {
                let parts = Arc::new(Parts::new(&self.split, plan)?);
                self.parts = Some(Arc::clone(&parts));
                Ok(parts)
            }
        }
    }
}

/// What one shard may use of what the store may.
pub(super) struct ShardSize {
    shard: usize,
    memory_share: f64,
    byte_share: f64,
    whole: OrderConfig,
}

impl ShardSize {
    fn config(&self) -> OrderConfig {
        let quota = |bytes: u64| (bytes as f64 * self.byte_share) as u64;
        OrderConfig {
            dram_budget_bytes: (self.whole.forward_bytes() as f64 * self.memory_share) as u64,
            disk_quota_bytes: self.whole.disk_quota_bytes.map(quota),
            on_mismatch: Some(OnMismatch::Error),
            ..self.whole.clone()
        }
    }

    /// Turns the least memory of the shard, where `error` names it, into that of the store.
    pub(super) fn name_least(&self, error: Error) -> Error {
        let Some(own_bytes) = error.minimum_bytes() else {
            return error.with("shard", self.shard);
        };
        let least_bytes = (own_bytes as f64 / self.memory_share).ceil() as u64 + 1;
        let least_bytes = self.whole.least_bytes(least_bytes);
        Error::new(error.kind(), error.message())
            .with("shard", self.shard)
            .with_minimum_bytes(least_bytes)
            .with("dram_budget_bytes", self.whole.dram_budget_bytes)
            .with("remedy", format_args!("raise dram_budget to at least {least_bytes} bytes"))
    }
}

// Refuses what is no store, or one that has lost the file which says what is in force.
fn check_new(folder: &dyn Folder, asked: usize) -> Result<()> {
    match folder.read(CommitLog::CURRENT)? {
        None => CommitLog::check_new(folder),
        // Opened by one shard, and never committed.
        Some(current) if CommitLog::names_none(&current)? => {
            match folder.list()?.into_iter().find(|name| name != CommitLog::CURRENT) {
                None => Ok(()),
                Some(name) => Err(Error::invalid("folder holds other files and no store")
                    .with("found", name)
                    .with("remedy", "name a new or empty folder")),
            }
        }
        // Committed by another process since the folder was looked at.
        Some(_) => Err(another_number(1, asked)),
    }
}

// Leaves nothing of a store that was never committed with more shards.
fn sweep(folder: &dyn Folder, shard_count: usize) -> Result<()> {
    for name in folder.list()? {
        if shard_of_name(&name).is_some_and(|shard| shard >= shard_count) {
            folder.remove(&name)?;
        }
    }
    Ok(())
}

fn check_options(config: &OrderConfig) -> Result<()> {
    if matches!(config.on_mismatch, Some(OnMismatch::Fallback | OnMismatch::FallbackCold)) {
        return Err(Error::unsupported("rows of several shards do not leave the forward order")
            .with("remedy", "open the store with on_mismatch=\"error\", or with one shard"));
    }
    if config.durability == crate::window::Durability::Step {
        return Err(Error::unsupported("several shards have no log of every step")
            .with("remedy", "open the store with durability=\"checkpoint\", or with one shard"));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use tierbed_core::{ErrorKind, TableSchema};
    use tierbed_io::MemoryFolder;

    use super::*;
    use crate::sharded::ShardedEngine;

    /// Once files of the shards beyond the number read before were removed.
    #[test]
    fn a_store_that_another_process_began_meanwhile_keeps_its_files() {
        let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        let config = OrderConfig { shards: Some(3), ..OrderConfig::new(64 << 20) };
        let mut store = ShardedEngine::open_in(Some(Arc::clone(&folder)), &config).unwrap();
        for name in ["a", "b", "c"] {
            store.add_table(TableSchema::plain(name, 100, 4)).unwrap();
        }
        store.writable().unwrap().checkpoint("one", &[]).unwrap();
        drop(store);
        let files = folder.list().unwrap();
        let error = ShardSet::open(Some(Arc::clone(&folder)), 2, &config).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("another number of shards"), "{error}");
        assert_eq!(folder.list().unwrap(), files);
    }
}
