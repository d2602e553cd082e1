//! The planned engine: lookup and update along an epoch plan.
//!
//! The same two rivers as the window engine, with its semantics and its bits: [`lookup`] pools
//! rows in index order, [`update`] sums the gradients of a row in index order and steps it once
//! per batch. What differs is the way to a row: position in the plan, entry, place.
//!
//! Batches come in the order of the plan, epoch after epoch. A batch whose ids are not the
//! planned ones is refused before anything changes.

mod checkpoint;
mod device;
mod dump;
mod find;
mod gather;
mod lookup;
mod options;
mod pieces;
mod planned;
mod quota;
mod replan;
mod reservations;
mod scan;
mod scratch;
pub(super) mod stored;
mod translate;
mod update;

use std::path::Path;
use std::sync::Arc;

use roaring::RoaringTreemap;
use serde::{Deserialize, Serialize};
use tierbed_core::stats::IoStats;
use tierbed_core::{
    Bags, Budget, Error, Poison, Reservation, Result, Schema, TableId, TableSchema,
};
use tierbed_io::{AlignedBuf, Folder, FolderLock, FsFolder};
use tierbed_kernels::{FeatureLayout, Hyper, Kernels};
use tierbed_store::CommitLog;

#[doc(hidden)]
use crate::hypers::Hypers;
use crate::planned::plan::{ids_checksum, Batch, EpochPlan, PlanWindow};
use crate::planned::store::extents::Extents;
use crate::planned::store::pipeline::WindowPipeline;
use crate::planned::store::row_mover::{RowMover, RowMoverParts};
use crate::planned::store::size_class::SizeClass;
use crate::planned::store::sizing::ClassSize;
use crate::planned::store::split::Splitter;
use crate::planned::store::storage_thread::StorageThread;
use crate::planned::store::window_rows::WindowRows;
use crate::window::changes::{Changes, Room};
use device::Device;
pub use find::UnplannedReads;
pub use options::{Pipeline, PlannedConfig};
pub use pieces::Piece;
pub(crate) use planned::stored_plan;
pub(crate) use quota::folder_bytes;
pub(crate) use replan::{grown, Arrival, NotArrived, RecordSink};
use reservations::{Purpose, Reservations};
pub use scan::AnySink;
use scratch::Scratch;

/// The file of extents.
pub(crate) const EXTENTS_FILE: &str = "forward.rows";
/// What the commit log knows this store by.
pub const BACKEND: &str = "forward";

/// Where training stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Position {
    /// Epochs done.
    pub epoch: u64,
    /// Batches of this epoch done: the number of the next batch.
    pub batch: u64,
}

/// What was counted since opening.
#[derive(Debug, Clone, Serialize)]
pub struct PlannedStats {
    /// Batches stepped.
    pub step_count: u64,
    /// Rows stepped: distinct rows per batch, summed.
    pub row_update_count: u64,
    /// Ids compared with the plan: once per step, where the update has the token of its lookup.
    pub ids_checked: u64,
    /// Windows begun.
    pub window_count: u64,
    /// Windows that share a bucket while they are far away; 0 when none do.
    pub span_windows: usize,
    /// Rows appended to buckets.
    pub rows_flushed: u64,
    /// Chunks they were written in.
    pub chunks_written: u64,
    /// Rows brought from disk.
    pub rows_read: u64,
    /// Rows made by the counter-based generator.
    pub rows_initialised: u64,
    /// Bytes of rows in memory: two windows, and what waits in lists.
    pub arena_bytes: u64,
    /// Bytes of the extents in use or quarantined.
    pub used_disk_bytes: u64,
    /// Of them, bytes that only the last checkpoint needs: the next one frees them.
    pub quarantined_bytes: u64,
    /// Bytes of the file of extents: the most that were ever used.
    pub file_bytes: u64,
    /// Checkpoints made.
    pub checkpoint_count: u64,
    /// Bytes written for dumps of checkpoints.
    pub dump_bytes: u64,
    /// How often training waited for storage: for a window that was not ready, or a device that
    /// had no buffer left. What one wait takes, the caller's clock shows.
    pub wait_count: u64,
    /// What the I/O engine did; dumps are not in it.
    pub io: IoStats,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counters {
    step_count: u64,
    row_update_count: u64,
    ids_checked: u64,
    window_count: u64,
    checkpoint_count: u64,
    dump_bytes: u64,
    unplanned: UnplannedReads,
}

/// Training along a plan. Calls need `&mut`: one at a time, in the plan's order.
#[derive(Debug)]
pub struct PlannedEngine {
    /// Dropped first: it knows the memory of the windows.
    device: Device,
    pipeline: WindowPipeline,
    schema: Arc<Schema>,
    hypers: Hypers,
    kernels: Kernels,
    scratch: Scratch,
    /// Windows begun and batches done in the current one.
    epoch: u64,
    batch_in_window: u32,
    batch_in_epoch: u64,
    log: CommitLog,
    folder: Arc<dyn Folder>,
    config: PlannedConfig,
    extent_bytes: usize,
    budget: Budget,
    counters: Counters,
    scan_buf: AlignedBuf,
    scan_window: PlanWindow,
    chunk_memory: Reservation,
    _memory: Vec<Reservation>,
    poison: Poison,
    lock: FolderLock,
    /// Rows changed since publishes, which checkpoints keep.
    pub(crate) changes: Changes,
    /// The window whose rows were noted last, counted from opening.
    noted_window: Option<u64>,
    /// Some pieces of the batch are stepped, and others are not.
    is_in_pieces: bool,
    /// The plan knows its batches by ids, not by rows.
    has_open_tables: bool,
    /// Of each table, the first row whose id training has not come to.
    next_rows: Vec<u64>,
}

/// A folder that this process owns.
struct OpenFolder {
    folder: Arc<dyn Folder>,
    lock: FolderLock,
    log: CommitLog,
}

impl OpenFolder {
    fn open(folder: Arc<dyn Folder>) -> Result<Self> {
        let lock = folder.lock()?;
        let log = CommitLog::open(folder.clone(), BACKEND)?;
        Ok(Self { folder, lock, log })
    }

    // Of a store that another engine committed last.
    fn changing(folder: Arc<dyn Folder>) -> Result<Self> {
        let lock = folder.lock()?;
        let log = CommitLog::open_any(folder.clone(), BACKEND)?;
        Ok(Self { folder, lock, log })
    }
}

/// The tables of a store, and the plan that it follows.
pub(super) struct PlannedTables {
    schema: Arc<Schema>,
    plan: EpochPlan,
}

impl PlannedEngine {
    /// Opens the store at `path` at its last checkpoint, or starts one in a new or empty folder,
    /// to be trained along `plan`.
    ///
    /// # Errors
    /// `Closed` when another process owns the folder; `Invalid` for a budget too small (naming
    /// the minimum), or another plan or schema than the store's; `Corruption` for damaged files.
    pub fn open(
        path: &Path,
        schema: Schema,
        plan: EpochPlan,
        config: &PlannedConfig,
    ) -> Result<Self> {
        Self::open_in(Arc::new(FsFolder::create(path)?), schema, plan, config)
    }

    /// Opens the store in `folder`; see [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_in(
        folder: Arc<dyn Folder>,
        schema: Schema,
        plan: EpochPlan,
        config: &PlannedConfig,
    ) -> Result<Self> {
        check_shape(&schema, &plan)?;
        Self::open_at(OpenFolder::open(folder)?, Arc::new(schema), plan, config)
    }

    fn open_at(
        site: OpenFolder,
        schema: Arc<Schema>,
        plan: EpochPlan,
        config: &PlannedConfig,
    ) -> Result<Self> {
        let stored = stored::read_stored(&site.log, &schema, &plan, config)?;
        let purpose = Purpose::Training;
        let tables = PlannedTables { schema, plan };
        let room = Reservations::reserve(&*site.folder, &tables, config, &stored, purpose)?;
        let mut engine = Self::assemble(site, tables, config, &stored, room)?;
        engine.pipeline.resume(stored.window)?;
        engine.restore_rows()?;
        engine.pipeline.start()?;
        let number = engine.pipeline.current.number;
        assert_eq!(number, stored.window, "training goes on in another window");
        Ok(engine)
    }

    // Puts the parts together; no row is in memory yet.
    fn assemble(
        site: OpenFolder,
        tables: PlannedTables,
        config: &PlannedConfig,
        stored: &stored::Stored,
        room: Reservations,
    ) -> Result<Self> {
        let PlannedTables { schema, plan } = tables;
        let Reservations { sizes, disk, budget, chunk_memory, has_thread, memory, .. } = room;
        let extent_bytes = stored.extent_bytes(
            sizes.extent_bytes.min(config.extent_bytes).max(sizes.stored_pages_bytes),
        );
        let mut extents = Extents::new(extent_bytes, config.disk_quota_bytes, stored.chunks());
        if config.disk_quota_bytes.is_some() {
            extents.set_other_bytes(quota::other_bytes(&*site.folder)?);
        }
        let spans = &sizes.spans;
        let buckets = stored.buckets(sizes.classes.len(), spans.list_count())?;
        let class = |(size, (buckets, unplanned)): (&ClassSize, _)| {
            let mut class = SizeClass::new(size.words, size.blocks, buckets, Arc::clone(spans));
            class.set_unplanned(unplanned);
            class
        };
        let window = || WindowRows::new(sizes.words_max, sizes.entries_max);
        let (back, current) = (window(), window());
        let device = Device::open(config.device.as_ref(), [&back, &current])?;
        let mover = RowMover::new(RowMoverParts {
            plan,
            schema: schema.clone(),
            homes: sizes.homes.clone(),
            classes: sizes.classes.iter().zip(buckets).map(class).collect(),
            disk,
            extents,
            back,
            splitter: Splitter::new(Arc::clone(spans), sizes.staging_bytes()),
        });
        let hypers = stored.hypers(&schema);
        let has_open_tables = schema.tables().iter().any(TableSchema::is_own);
        assert_eq!(hypers.len(), schema.tables().len(), "every table has its steps");
        let storage = has_thread.then(StorageThread::start).transpose()?;
        Ok(Self {
            device,
            pipeline: WindowPipeline::new(Box::new(mover), current, storage),
            hypers,
            scratch: Scratch::new(config.dram_budget_bytes),
            kernels: Kernels::named(&config.isa)?,
            next_rows: stored.next_rows(&schema)?,
            schema,
            epoch: stored.position.epoch,
            batch_in_window: stored.batch_in_window,
            batch_in_epoch: stored.position.batch,
            log: site.log,
            folder: site.folder,
            config: config.clone(),
            extent_bytes,
            budget,
            counters: Counters::default(),
            scan_buf: AlignedBuf::new(sizes.buf_bytes),
            scan_window: PlanWindow::default(),
            chunk_memory,
            _memory: memory,
            poison: Poison::default(),
            lock: site.lock,
            changes: Changes::default(),
            noted_window: None,
            is_in_pieces: false,
            has_open_tables,
        })
    }

    // Gives all memory back and keeps the folder.
    fn into_site(self) -> (OpenFolder, Arc<Schema>, PlannedConfig) {
        let Self { folder, lock, log, schema, config, .. } = self;
        (OpenFolder { folder, lock, log }, schema, config)
    }

    /// Returns the tables.
    #[must_use]
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Returns the plan.
    #[must_use]
    pub fn plan(&self) -> &EpochPlan {
        &self.pipeline.plan
    }

    /// Returns where training stands: which batch comes next.
    #[must_use]
    pub fn position(&self) -> Position {
        let batch_count = self.pipeline.plan.stats().batch_count;
        if self.batch_in_epoch == batch_count {
            return Position { epoch: self.epoch + 1, batch: 0 };
        }
        Position { epoch: self.epoch, batch: self.batch_in_epoch }
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

    /// Returns the hyperparameters of every table.
    pub(crate) fn hypers(&self) -> &Hypers {
        &self.hypers
    }

    /// Returns the account of the engine's memory.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns what was counted since opening; with `pipeline`, what the storage thread counted
    /// as of the last change of window.
    #[must_use]
    pub fn stats(&self) -> PlannedStats {
        let Counters { step_count, row_update_count, ids_checked, window_count, .. } =
            self.counters;
        let tally = self.pipeline.tally();
        PlannedStats {
            step_count,
            row_update_count,
            ids_checked,
            window_count,
            span_windows: self.pipeline.span_windows(),
            rows_flushed: tally.rows.rows_flushed,
            chunks_written: tally.rows.chunks_written,
            rows_read: tally.rows.rows_read,
            rows_initialised: tally.rows.rows_initialised,
            arena_bytes: tally.arena_bytes,
            used_disk_bytes: tally.used_extents * self.extent_bytes as u64,
            quarantined_bytes: tally.quarantined_extents * self.extent_bytes as u64,
            file_bytes: tally.file_bytes,
            checkpoint_count: self.counters.checkpoint_count,
            dump_bytes: self.counters.dump_bytes,
            wait_count: self.pipeline.wait_count(),
            io: tally.io,
        }
    }

    /// Returns how often rows were read that the plan did not bring.
    #[must_use]
    pub fn unplanned_reads(&self) -> UnplannedReads {
        self.counters.unplanned
    }

    /// Passes the next batch without a step, as for a planned evaluation: its rows were there to
    /// be looked up and stay as they are.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn pass(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<()> {
        self.find_batch(plan, bags, plan.output_len(bags))?;
        self.finish_batch()
    }

    // Checks that `bags` are the next batch of the plan and makes its window the current one.
    // Nothing changes when they are not.
    // `matrix_len` is the length of the output or gradient.
    fn find_batch(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        matrix_len: usize,
    ) -> Result<Batch> {
        let batch = self.enter_batch(plan, bags, matrix_len)?;
        self.counters.ids_checked += bags.indices.len() as u64;
        let of_rows = self.rows_checksum(batch).map(|checksum| batch.known_by(checksum));
        if of_rows.is_some_and(|batch| batch.is_of(bags.indices.len(), ids_checksum(bags))) {
            return Ok(batch);
        }
        plan.check_ids(&self.schema, bags)?;
        Err(self.not_planned(of_rows.unwrap_or(batch), bags))
    }

    // Makes the window of the next batch the current one.
    fn enter_batch(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        matrix_len: usize,
    ) -> Result<Batch> {
        self.check_shape(plan, bags, matrix_len)?;
        self.check_has_batches()?;
        self.enter_window()?;
        let batch = self.pipeline.current.plan.batch(self.batch_in_window);
        batch.ok_or_else(|| Error::corruption("plan window holds no batch"))
    }

    fn not_planned(&self, batch: Batch, bags: &Bags<'_>) -> Error {
        let position = self.position();
        Error::invalid("batch is not the planned one")
            .with("epoch", position.epoch)
            .with("batch", position.batch)
            .with("planned_indices", batch.index_count)
            .with("indices", bags.indices.len())
            .with("planned_checksum", format_args!("{:08x}", batch.checksum))
            .with("checksum", format_args!("{:08x}", ids_checksum(bags)))
            .with("remedy", "feed the batches in the plan's order, or make a new plan")
    }

    fn check_shape(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        matrix_len: usize,
    ) -> Result<()> {
        self.check_whole()?;
        plan.check_shape(bags, matrix_len)?;
        let planned = &self.pipeline.plan.shape().feature_tables;
        if !plan.features().iter().map(|feature| feature.table).eq(planned.iter().copied()) {
            return Err(Error::invalid("features read other tables than those of the plan"));
        }
        Ok(())
    }

    // Begins the next window when the current one is done.
    fn enter_window(&mut self) -> Result<()> {
        if self.batch_in_window < self.pipeline.current.plan.batch_count() {
            return Ok(());
        }
        // Whose rows are in memory is not part of what a batch may change.
        let result = self.pipeline.advance(self.device.windows());
        self.counters.row_update_count += self.poison.on_any(result)?;
        self.count_window()
    }

    fn count_window(&mut self) -> Result<()> {
        self.counters.window_count += 1;
        self.batch_in_window = 0;
        if self.pipeline.current.number == 0 {
            self.epoch += 1;
            self.batch_in_epoch = 0;
        }
        let result = self.pay_for_chunks();
        self.poison.on_any(result)
    }

    fn pay_for_chunks(&mut self) -> Result<()> {
        let bytes = self.pipeline.chunk_bytes();
        self.chunk_memory.resize(bytes)
    }

    /// Begins to note changed rows anew: what has `identity` holds every row as it is now.
    pub(crate) fn note_published(&mut self, identity: &str, room: Room<'_>) {
        self.changes.published(identity, room);
        self.noted_window = None;
    }

    // Notes the rows of the current window with its first step: all that its steps may change.
    fn note_window(&mut self) -> Result<()> {
        let window = self.counters.window_count;
        if !self.changes.is_noting() || self.noted_window == Some(window) {
            return Ok(());
        }
        let current = &self.pipeline.current.plan;
        for (at, entries) in (0..).zip(current.tables()) {
            let rows = RoaringTreemap::from_sorted_iter(current.rows(entries));
            let rows = rows.map_err(|_| Error::corruption("plan window has rows out of order"))?;
            self.changes.note_rows(TableId(at), rows);
        }
        self.noted_window = Some(window);
        Ok(())
    }

    fn finish_batch(&mut self) -> Result<()> {
        let batch_count = self.pipeline.current.plan.batch_count();
        assert!(self.batch_in_window < batch_count, "a window of {batch_count} batches is over");
        self.batch_in_window += 1;
        self.batch_in_epoch += 1;
        let result = self.pipeline.pump();
        self.poison.on_any(result)
    }
}

fn check_shape(schema: &Schema, plan: &EpochPlan) -> Result<()> {
    let shape = plan.shape();
    let rows = |table: &TableSchema| table.row_count;
    let is_same = schema.tables().iter().map(rows).eq(shape.row_counts.iter().copied());
    if !is_same {
        return Err(Error::invalid("plan was made for other tables")
            .with("tables", schema.tables().len())
            .with("planned_tables", shape.row_counts.len())
            .with("remedy", "make a plan for these tables"));
    }
    Ok(())
}
