//! The open window engine: schema, buffer, kernels, counters. A step that failed half-way ends it.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use tierbed_core::stats::StoreStats;
use tierbed_core::{Budget, Poison, Result, RowStore, Schema, TableId, TableSchema, TrainStore};
use tierbed_io::{Folder, FsFolder};
use tierbed_kernels::{Hyper, Kernels};
use tierbed_store::kept::finish_restore;

use crate::folders::check_folder;
use crate::hypers::Hypers;
use crate::window::backends::{buffer_bytes_max, kept_bytes_max, least_bytes, open_store};
use crate::window::changes::ChangeStats;
use crate::window::options::{Backend, Durability, WindowConfig};
use crate::window::row_buffer::{BufferStats, EvictionOrder, RowBuffer};
use crate::window::scratch::Scratch;
use crate::window::tracked::TrackedStore;
use crate::window::vocabularies::{name_of_open_table, Vocabularies, VocabularyStats};

/// The engine over one store. Calls need `&mut`: one at a time, in a fixed order, so that equal
/// calls give equal bits.
pub struct WindowEngine {
    pub(crate) store: TrackedStore,
    /// The store's schema, at hand while the store is busy.
    pub(crate) schema: Arc<Schema>,
    pub(crate) buffer: Option<RowBuffer>,
    pub(crate) scratch: Scratch,
    pub(crate) kernels: Kernels,
    pub(crate) budget: Budget,
    pub(crate) hypers: Hypers,
    pub(crate) ahead: crate::window::prefetch::Announced,
    pub(crate) step_count: u64,
    pub(crate) vocabularies: Vocabularies,
    /// Where checkpoints are kept; `None` where they cannot be.
    pub(crate) folder: Option<Arc<dyn Folder>>,
    /// Most bytes of that folder.
    pub(crate) disk_quota_bytes: Option<u64>,
    buffer_bytes_max: u64,
    /// Left to a publish of frozen rows, once there was one.
    pub(crate) publish_bytes: u64,
    /// Whether the store's memory is counted in `budget`.
    has_store_in_budget: bool,
    backend: Backend,
    eviction: EvictionOrder,
    pub(crate) poison: Poison,
}

/// One part in so many of the budget that stays free before a batch, below a store that grows.
const SPARE_SHARE: u64 = 16;
/// One part in so many of the budget that a row buffer keeps, however the store grows.
const BUFFER_SHARE_MIN: u64 = 32;
const NOT_BUILT: &str = "the row buffer is built before rows are brought";

/// Everything that was counted.
#[derive(Debug, Clone, Serialize)]
pub struct WindowStats {
    /// Update steps since the engine was opened.
    pub step_count: u64,
    /// What the store did.
    pub store: StoreStats,
    /// What the row buffer did.
    pub buffer: BufferStats,
    /// What open vocabularies hold and read.
    pub vocabularies: VocabularyStats,
    /// What is known of changed rows.
    pub changes: ChangeStats,
    /// Instruction set of the kernels.
    pub isa: &'static str,
}

impl WindowEngine {
    /// Opens the store at `path` at its last checkpoint, or starts one in a new or empty folder.
    ///
    /// A `memory` store may do without a path; it then cannot checkpoint.
    ///
    /// # Errors
    /// `Closed` when another process owns the folder, `Invalid` for a budget too small (naming
    /// the minimum) or a folder that holds something else, `Corruption` for damaged files.
    pub fn open(path: Option<&Path>, config: &WindowConfig) -> Result<Self> {
        let folder: Option<Arc<dyn Folder>> = match path {
            Some(path) => Some(Arc::new(FsFolder::create(path)?)),
            None => None,
        };
        Self::open_in(folder, config)
    }

    /// Opens the store in `folder`; see [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_in(folder: Option<Arc<dyn Folder>>, config: &WindowConfig) -> Result<Self> {
        // RocksDB keeps its files in a folder of its own.
        let keeps = folder.clone().filter(|_| !config.backend.is_rocksdb());
        if let Some(folder) = &folder {
            finish_restore(folder, &check_folder)?;
        }
        let budget = Budget::new(config.dram_budget_bytes);
        budget.name_at_least(least_bytes(config));
        let scratch = Scratch::new(&budget)?;
        let store = open_store(folder, config, &budget)?;
        let mut engine = Self::assemble(store, budget, scratch, config)?;
        engine.folder = keeps;
        engine.disk_quota_bytes = config.disk_quota_bytes;
        engine.leave_space_to_kept()?;
        Ok(engine)
    }

    /// Opens the engine over a store of the caller's, which keeps its own account of memory and
    /// grows beside `config.dram_budget_bytes`; `config.backend` is not looked at.
    ///
    /// # Errors
    /// `Invalid` for a budget too small, `Corruption` when the engine's attachment is damaged.
    pub fn over(store: Box<dyn TrainStore>, config: &WindowConfig) -> Result<Self> {
        let budget = Budget::new(config.dram_budget_bytes);
        let scratch = Scratch::new(&budget)?;
        let config = WindowConfig { backend: Backend::File, ..config.clone() };
        let mut engine = Self::assemble(store, budget, scratch, &config)?;
        engine.has_store_in_budget = false;
        Ok(engine)
    }

    fn assemble(
        store: Box<dyn TrainStore>,
        budget: Budget,
        scratch: Scratch,
        config: &WindowConfig,
    ) -> Result<Self> {
        let is_kept = config.durability == Durability::Checkpoint;
        let store = TrackedStore::open(store, is_kept, &budget)?;
        let mut engine = Self {
            schema: Arc::new(store.schema().clone()),
            store,
            buffer: None,
            scratch,
            kernels: Kernels::named(&config.isa)?,
            budget,
            hypers: Hypers::default(),
            ahead: crate::window::prefetch::Announced::default(),
            step_count: 0,
            buffer_bytes_max: buffer_bytes_max(config),
            publish_bytes: 0,
            has_store_in_budget: true,
            backend: config.backend,
            eviction: config.eviction,
            vocabularies: Vocabularies::new(config),
            folder: None,
            disk_quota_bytes: None,
            poison: Poison::default(),
        };
        engine.restore_runs()?;
        engine.restore_vocabularies()?;
        Ok(engine)
    }

    /// Adds a table, or finds the identical one.
    ///
    /// # Errors
    /// `Invalid` when the stored table of that name differs, or the budget is too small.
    pub fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        if table.is_own() || self.vocabularies.find(&table.name).is_some() {
            return Err(name_of_open_table(&table.name));
        }
        if self.schema.id_of(&table.name).is_some() {
            return self.store.add_table(table);
        }
        self.release_buffer()?;
        let id = self.store.add_table(table)?;
        self.refresh_schema();
        Ok(id)
    }

    /// Takes over the store's tables after some were added or made longer.
    pub(crate) fn refresh_schema(&mut self) {
        self.schema = Arc::new(self.store.schema().clone());
        self.hypers.grow(self.schema.tables().len());
    }

    /// Returns the tables.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Sets the hyperparameters of `table` from the next step on; `hyper.step` is ignored, the
    /// engine counts steps itself.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or values that are negative or not finite.
    pub fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        self.hypers.set(&self.schema, table, hyper)
    }

    /// Returns the hyperparameters of `table`; `step` is the number of steps done.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    pub fn hyper(&self, table: TableId) -> Result<Hyper> {
        self.hypers.get(&self.schema, table)
    }

    /// Returns which store is below.
    pub(crate) fn backend(&self) -> Backend {
        self.backend
    }

    /// Returns the account of the engine's memory.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns everything that was counted.
    #[must_use]
    pub fn stats(&self) -> WindowStats {
        WindowStats {
            step_count: self.step_count,
            store: self.store.stats(),
            buffer: self.buffer.as_ref().map(RowBuffer::stats).unwrap_or_default(),
            vocabularies: self.vocabularies.stats(),
            changes: self.store.changes.stats(),
            isa: self.kernels.isa().name(),
        }
    }

    /// Returns how many more bytes of the engine's budget the store below may come to need.
    pub(crate) fn growth_bytes_max(&self) -> u64 {
        if self.has_store_in_budget {
            self.store.growth_bytes_max()
        } else {
            0
        }
    }

    /// Builds the row buffer if it is not there, from all memory that is free; see [`built`].
    pub(crate) fn ensure_buffer(&mut self) -> Result<()> {
        if self.buffer.is_none() {
            let growth_bytes = self.growth_bytes_max();
            self.name_least_to_publish(0);
            let free_bytes = self.budget.free_bytes();
            let kept_bytes = growth_bytes.min(kept_bytes_max(self.backend, &self.budget));
            // A publish that is under way has its own.
            let publish_bytes = if self.store.frozen.is_none() { self.publish_bytes } else { 0 };
            let kept_bytes = kept_bytes + publish_bytes;
            let bytes_max = self.buffer_bytes_max.min(free_bytes.saturating_sub(kept_bytes));
            let mut buffer = RowBuffer::new(&self.schema, &self.budget, bytes_max)?;
            let used = self.ahead.batch_done();
            assert_eq!(used, 0, "batches ahead have their rows in a buffer that is gone");
            buffer.set_order(self.eviction);
            self.buffer = Some(buffer);
        }
        Ok(())
    }

    /// Halves the row buffer when the store below has grown so far that little memory is left;
    /// called before a batch is looked at, so nothing of the buffer is in use.
    pub(crate) fn make_room(&mut self) -> Result<()> {
        let Some(buffer) = &self.buffer else { return Ok(()) };
        let bytes = buffer.memory_bytes();
        let limit_bytes = self.budget.limit_bytes();
        let growth_bytes = self.growth_bytes_max();
        let is_short = self.budget.free_bytes() < growth_bytes.min(limit_bytes / SPARE_SHARE);
        if !is_short || bytes < limit_bytes / BUFFER_SHARE_MIN {
            return Ok(());
        }
        self.buffer_bytes_max = bytes / 2;
        self.release_buffer()
    }

    /// Makes errors name a budget that has room for `more_bytes` beside what is in use.
    pub(crate) fn name_least(&self, more_bytes: u64) {
        let used_bytes = self.budget.limit_bytes() - self.budget.free_bytes();
        // Of a larger budget the parts take more, a tree up to half of it.
        let factor = if self.growth_bytes_max() > 0 { 2.0 } else { 8.0 / 7.0 };
        self.budget.name_at_least(((used_bytes + more_bytes) as f64 * factor) as u64);
    }

    /// Writes what is dirty and gives the buffer's memory back.
    pub(crate) fn release_buffer(&mut self) -> Result<()> {
        if let Some(buffer) = &mut self.buffer {
            buffer.flush(&mut self.store)?;
        }
        self.buffer = None;
        self.ahead = crate::window::prefetch::Announced::default();
        Ok(())
    }
}

/// Returns the row buffer, which [`WindowEngine::ensure_buffer`] has built.
pub(crate) fn built(buffer: &Option<RowBuffer>) -> &RowBuffer {
    let Some(buffer) = buffer else { panic!("{NOT_BUILT}") };
    buffer
}

/// Returns the row buffer, which [`WindowEngine::ensure_buffer`] has built, to change it.
pub(crate) fn built_mut(buffer: &mut Option<RowBuffer>) -> &mut RowBuffer {
    let Some(buffer) = buffer else { panic!("{NOT_BUILT}") };
    buffer
}
