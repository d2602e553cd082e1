//! Change of the epoch plan: every row moves to its next use along the new one.
//!
//! A store keeps rows in the order of one plan. For another plan (a reshuffled epoch, the next
//! day's data), or for rows of another store, every row is moved once: its first use along the
//! new plan is found ([`first_use`]), and it joins the list of that window; full lists go to
//! buckets as they do in training. Rows that the plan never uses are *parked*: on disk, seen by
//! scans and by the next plan, not by training.
//!
//! ```text
//! checkpoint along A ──(rows in the order of A)──▶ first use along B ─▶ lists ─▶ buckets of B
//! or any RowSource                                     never ─▶ parked rows
//!                                                 then a checkpoint along B comes into force
//! ```
//!
//! Cost: the rows are read twice (once when an array over all rows fits the memory) and written
//! once, all sequentially, within the budget. Until the new checkpoint is in force the old one
//! stays whole, so the disk holds the rows twice for that time.

mod export;
mod first_use;
mod parts;
mod resting;

use std::path::Path;
use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Error, ErrorKind, Result, RowId, Schema, TableId, TableSchema};
use tierbed_io::{AlignedBuf, Folder, FsFolder};
use tierbed_kernels::Hyper;
use tierbed_store::Manifest;

use super::reservations::{Purpose, Reservations};
use super::stored::{self, damaged, Stored};
use super::{check_shape, OpenFolder, PlannedConfig, PlannedEngine};
use crate::planned::plan::Plan;
use crate::planned::store::parking::Parking;
use crate::planned::store::size_class::Sink;
use first_use::{Cut, FirstUses};
use resting::Resting;

/// Takes the rows of a source: table, row id, whole record.
pub type RecordSink<'a> = dyn FnMut(TableId, RowId, &[u8]) -> Result<()> + 'a;

/// Hands every row of a source to a sink: each row once, in any order.
///
/// It may be called twice, and must then bring the same rows in the same order.
pub type RowSource<'a> = dyn FnMut(&mut RecordSink<'_>) -> Result<()> + 'a;

/// Rows from elsewhere, and what goes with them.
pub struct Import<'a> {
    /// The rows. Those it does not bring get their initial values when they are first used.
    pub rows: &'a mut RowSource<'a>,
    /// Hyperparameters per table, `step` being the steps done; empty for a fresh start.
    pub hypers: &'a [Hyper],
    /// Name of the first checkpoint.
    pub name: &'a str,
    /// Its attachments.
    pub attachments: &'a [Attachment<'a>],
}

/// Returns the memory for finding the first uses of `row_count` rows, about `wanted_bytes`.
pub(super) fn answer_bytes(row_count: u64, wanted_bytes: u64) -> u64 {
    Cut::new(row_count, wanted_bytes).memory_bytes
}

// The tables of `schema` with as many rows as `plan` was made for.
fn grown(schema: &Schema, plan: &Plan) -> Result<Arc<Schema>> {
    let mut tables = schema.tables().to_vec();
    let (row_counts, records) = (&plan.shape().row_counts, &plan.shape().record_bytes);
    let has_shrunk = |(table, &rows): (&TableSchema, &u64)| rows < table.row_count;
    let record_bytes = tables.iter().map(|table| table.record_bytes() as u64);
    let is_other = !record_bytes.eq(records.iter().map(|&bytes| u64::from(bytes)))
        || tables.iter().zip(row_counts).any(has_shrunk);
    if is_other {
        return Err(Error::invalid("plan was made for other or smaller tables")
            .with("tables", tables.len())
            .with("planned_tables", row_counts.len())
            .with("remedy", "make a plan for these tables, grown or not"));
    }
    for (table, &rows) in tables.iter_mut().zip(row_counts) {
        table.row_count = rows;
    }
    Schema::new(tables).map(Arc::new)
}

// A row that a checkpoint brings twice, or that no table has, is damage, not a wrong call: a dump
// is read before its checksum is known.
fn blame_the_store(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Invalid => damaged("brings rows that cannot be").with("cause", error),
        _ => error,
    }
}

/// Rows between two looks at the memory of the chunk lists.
const MEMORY_CHECK_ROWS: u64 = 1 << 14;

/// A move of all rows: from where, and what the checkpoint behind it says.
struct Move<'a> {
    source: &'a mut RowSource<'a>,
    stored: Stored,
    /// Memory the source takes.
    source_bytes: u64,
    name: &'a str,
    attachments: &'a [Attachment<'a>],
}

impl PlannedEngine {
    /// Goes on along `plan` from here on, whichever rows it uses: for a reshuffled epoch, or the
    /// next day's data. To be called between two batches, at the end of an epoch or not. Tables
    /// grow to the rows that `plan` was made for.
    ///
    /// First makes a checkpoint `name` with `attachments` along the old plan, then moves the
    /// rows, then makes the same checkpoint along the new one. Values, use counts and optimizer
    /// steps stay; [`position`](Self::position) starts again at batch 0 of epoch 0.
    ///
    /// # Errors
    /// `Invalid` for a plan of other or smaller tables or a budget too small, `NoSpace` when the
    /// disk does not hold the rows twice, otherwise as [`checkpoint`](Self::checkpoint). The store
    /// then stands at the checkpoint along the old plan: reopen it with that one. After a crash, or
    /// `Io` while the checkpoint came into force, it may be the new one;
    /// [`plan_in_force`](Self::plan_in_force) tells.
    pub fn replan(
        mut self,
        plan: Plan,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> Result<Self> {
        let grown = grown(&self.schema, &plan)?;
        self.checkpoint(name, attachments)?;
        let old = self.pipeline.plan.clone();
        let (site, _, config) = self.into_site();
        Self::move_along(site, (grown, &config), (&old, plan), (name, attachments))
    }

    /// Opens the store in `folder`, last trained along `old`, to go on along `new` from its last
    /// checkpoint on, whose name and attachments are kept; see [`replan`](Self::replan). A store
    /// that has moved already, or that has no checkpoint, is just opened. `schema` is that of
    /// `new`: its tables may have more rows than the stored ones.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`replan`](Self::replan).
    pub fn open_replanned_in(
        folder: Arc<dyn Folder>,
        schema: Schema,
        (old, new): (&Plan, Plan),
        config: &PlannedConfig,
    ) -> Result<Self> {
        check_shape(&schema, &new)?;
        let site = OpenFolder::open(folder)?;
        if stored::plan_identity(&site.log)?.is_none_or(|identity| identity == new.identity()) {
            return Self::open_at(site, Arc::new(schema), new, config);
        }
        let stored =
            site.log.manifest().map(|manifest| grown(&manifest.schema, &new)).transpose()?;
        if stored.as_ref().is_some_and(|stored| **stored != schema) {
            return Err(Error::invalid("store holds other tables")
                .with("remedy", "open it with the tables it was made with, grown or not"));
        }
        let names = site.log.manifest().into_iter().flat_map(|manifest| &manifest.attachments);
        let names = names.map(|meta| meta.name.clone()).filter(|name| !name.starts_with('_'));
        let mut kept = Vec::new();
        for name in names {
            kept.push((site.log.attachment(&name)?.unwrap_or_default(), name));
        }
        let attachments: Vec<_> =
            kept.iter().map(|(bytes, name)| Attachment { name, bytes }).collect();
        let name = site.log.info().map_or_else(String::new, |info| info.name.clone());
        let schema = Arc::new(schema);
        Self::move_along(site, (schema, config), (old, new), (&name, &attachments))
    }

    /// Opens the store at `path`; see [`open_replanned_in`](Self::open_replanned_in).
    ///
    /// # Errors
    /// As [`open_replanned_in`](Self::open_replanned_in).
    pub fn open_replanned(
        path: &Path,
        schema: Schema,
        plans: (&Plan, Plan),
        config: &PlannedConfig,
    ) -> Result<Self> {
        Self::open_replanned_in(Arc::new(FsFolder::create(path)?), schema, plans, config)
    }

    /// Starts a store in an empty `folder` with the rows of `import`, to be trained along `plan`
    /// from batch 0 of epoch 0 on, and makes its first checkpoint.
    ///
    /// # Errors
    /// `Invalid` when there is a store already, or for rows or records out of range or brought
    /// twice; `NoSpace` and `Io` from the folder, those of the source. There is no store then.
    pub fn import_in(
        folder: Arc<dyn Folder>,
        schema: Schema,
        plan: Plan,
        config: &PlannedConfig,
        import: Import<'_>,
    ) -> Result<Self> {
        check_shape(&schema, &plan)?;
        let site = OpenFolder::open(folder)?;
        if site.log.manifest().is_some() {
            return Err(Error::invalid("folder holds a store already")
                .with("remedy", "name a new or empty folder"));
        }
        let Import { rows, hypers, name, attachments } = import;
        if !hypers.is_empty() && hypers.len() != schema.tables().len() {
            return Err(Error::invalid("an import needs hyperparameters of every table, or none")
                .with("tables", schema.tables().len())
                .with("found", hypers.len()));
        }
        for hyper in hypers {
            hyper.check()?;
        }
        let stored = Stored::imported(hypers);
        let moving = Move { source: rows, stored, source_bytes: 0, name, attachments };
        Self::move_rows(site, Arc::new(schema), plan, config, moving)
    }

    /// Starts a store at `path`; see [`import_in`](Self::import_in).
    ///
    /// # Errors
    /// As [`import_in`](Self::import_in).
    pub fn import(
        path: &Path,
        schema: Schema,
        plan: Plan,
        config: &PlannedConfig,
        import: Import<'_>,
    ) -> Result<Self> {
        Self::import_in(Arc::new(FsFolder::create(path)?), schema, plan, config, import)
    }

    /// Returns the [identity](Plan::identity) of the plan that the last checkpoint in `folder`
    /// was made along; `None` when there is none.
    ///
    /// # Errors
    /// `Closed` when another process owns the folder, `Corruption` for damaged files.
    pub fn plan_in_force(folder: Arc<dyn Folder>) -> Result<Option<u64>> {
        stored::plan_identity(&OpenFolder::open(folder)?.log)
    }

    fn move_along(
        site: OpenFolder,
        (schema, config): (Arc<Schema>, &PlannedConfig),
        (old, new): (&Plan, Plan),
        (name, attachments): (&str, &[Attachment<'_>]),
    ) -> Result<Self> {
        let manifest: Manifest = site.log.manifest().cloned().ok_or_else(|| {
            Error::new(ErrorKind::Closed, "the store has no checkpoint to move from")
        })?;
        check_shape(&manifest.schema, old)?;
        let stored = stored::read_stored(&site.log, &manifest.schema, old, config)?;
        let sizes = (&manifest.schema, config.dram_budget_bytes);
        let mut rows = Resting::open(&site.folder, sizes, (&manifest, old, &stored))?;
        let source_bytes = rows.memory_bytes() + stored.chunk_bytes();
        let source = &mut |sink: &mut RecordSink<'_>| rows.visit(sink);
        let stored = stored.moving();
        let moving = Move { source, stored, source_bytes, name, attachments };
        Self::move_rows(site, schema, new, config, moving)
    }

    // Moves the rows, puts them in force, and opens the store anew with all of its memory.
    fn move_rows(
        site: OpenFolder,
        schema: Arc<Schema>,
        plan: Plan,
        config: &PlannedConfig,
        moving: Move<'_>,
    ) -> Result<Self> {
        let Move { source, stored, source_bytes, name, attachments } = moving;
        let rows = schema.tables().iter().map(|table| table.row_count).sum();
        let purpose = Purpose::Moving { source_bytes, row_count: rows };
        let room =
            Reservations::reserve(&*site.folder, (&schema, &plan), config, &stored, purpose)?;
        let cut = Cut::new(rows, room.answer_bytes);
        let blame = if stored.has_rows() { blame_the_store } else { std::convert::identity };
        let mut engine = Self::assemble(site, (schema, plan), config, &stored, room)?;
        let moved = engine
            .distribute(cut, source, blame)
            .and_then(|()| engine.checkpoint(name, attachments).map(|_| ()));
        if let Err(error) = moved {
            engine.give_up_move();
            return Err(error);
        }
        let plan = engine.pipeline.plan.clone();
        let (site, schema, config) = engine.into_site();
        Self::open_at(site, schema, plan, &config)
    }

    fn distribute(
        &mut self,
        cut: Cut,
        source: &mut RowSource<'_>,
        blame: fn(Error) -> Error,
    ) -> Result<()> {
        let plan = self.pipeline.plan.clone();
        let tables = (&self.schema, &plan);
        let found = FirstUses::find(&self.folder, tables, cut, source);
        let mut first_uses = found.map_err(blame)?;
        let mover = self.pipeline.mover()?;
        let buf_bytes = mover.disk.buf_bytes().min(self.extent_bytes);
        let classes = mover.classes.iter();
        let mut parkings: Vec<_> =
            classes.map(|class| Parking::new(4 * class.words(), buf_bytes)).collect();
        let longest = mover.classes.iter().map(|class| 4 * class.words()).max().unwrap_or(0);
        // Records come at any address; slots hold words.
        let mut aligned = AlignedBuf::new(longest);
        let mut row_count = 0u64;
        source(&mut |table, row, record| {
            let first = first_uses.take(table, row).map_err(blame)?;
            let shape = self.schema.table(table)?;
            let place = aligned.get_mut(..record.len());
            let place =
                place.filter(|place| place.len() == shape.record_bytes()).ok_or_else(|| {
                    Error::invalid("a record has another length than its table's")
                        .with("table", &shape.name)
                        .with("expected", shape.record_bytes())
                        .with("found", record.len())
                })?;
            place.copy_from_slice(record);
            let at = self.pipeline.home(table.0 as usize).class;
            let mover = self.pipeline.mover()?;
            match (first, parkings.get_mut(at)) {
                (Some(first), _) => mover.distribute(at, first, place)?,
                (None, Some(parking)) => {
                    let mut sink = Sink { disk: &mut mover.disk, extents: &mut mover.extents };
                    parking.add((table, row), place, &mut sink)?;
                }
                (None, None) => {}
            }
            row_count += 1;
            match row_count.is_multiple_of(MEMORY_CHECK_ROWS) {
                true => self.pay_for_chunks(),
                false => Ok(()),
            }
        })?;
        let mover = self.pipeline.mover()?;
        for (class, parking) in mover.classes.iter_mut().zip(parkings) {
            let mut sink = Sink { disk: &mut mover.disk, extents: &mut mover.extents };
            class.set_parked(parking.finish(&mut sink)?);
        }
        self.pay_for_chunks()
    }

    // Lets go of the disk that the move took; what cannot be given back is used again later.
    fn give_up_move(&mut self) {
        if let Ok(mover) = self.pipeline.mover() {
            let _ = mover.disk.finish_writes();
            let _ = mover.disk.device().set_len(mover.extents.committed_bytes());
        }
    }
}
