//! Change of the epoch plan: every row moves to its next use along the new one.
//!
//! A store keeps rows in the order of one plan. For another plan (a reshuffled epoch, the next
//! day's data) every row is moved once: its first use along the new plan is found
//! ([`first_use`]), and it joins the list of that window; full lists go to buckets as they do in
//! training. Rows that the plan never uses are *unplanned*: on disk, seen by scans and by the next
//! plan, not by training.
//!
//! ```text
//! checkpoint along A ──(rows in the order of A)──▶ first use along B ─▶ lists ─▶ buckets of B
//!                                                      never ─▶ unplanned rows
//!                                                 then a checkpoint along B comes into force
//! ```
//!
//! Cost: the rows are read twice and written once, all sequentially, within the budget. They are
//! read but once when an array over all rows fits the memory, or they come in their order. Until
//! the new checkpoint is in force the old one stays whole, so the disk holds the rows twice for
//! that time.

mod arrival;
mod first_use;
mod resting;

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Error, ErrorKind, Result, RowId, RowKey, Schema, TableId, TableSchema};
use tierbed_io::{AlignedBuf, Folder};
use tierbed_store::Manifest;

use super::reservations::{Purpose, Reservations};
use super::stored::{self, damaged, Stored};
use super::{check_shape, OpenFolder, PlannedConfig, PlannedEngine, PlannedTables};
use crate::planned::plan::EpochPlan;
use crate::planned::store::size_class::Sink;
use crate::planned::store::unplanned::UnplannedWriter;
use crate::window::changes::Changes;
pub(crate) use arrival::{Arrival, NotArrived};
use first_use::{Cut, FirstUses};
use resting::Resting;

/// Takes the rows of a source: table, row id, whole record.
pub(crate) type RecordSink<'a> = dyn FnMut(TableId, RowId, &[u8]) -> Result<()> + 'a;

/// Hands every row of a checkpoint to a sink: each row once, in any order.
///
/// It may be called twice, and must then bring the same rows in the same order; once where rows
/// come in the order of tables and rows.
pub(crate) type RowSource<'a> = dyn FnMut(&mut RecordSink<'_>) -> Result<()> + 'a;

/// Returns the memory for finding the first uses of `row_count` rows, about `wanted_bytes`.
pub(super) fn answer_bytes(row_count: u64, wanted_bytes: u64) -> u64 {
    Cut::new(row_count, wanted_bytes).memory_bytes
}

/// Returns the tables of `schema` with as many rows as `plan` was made for.
///
/// # Errors
/// `Invalid` when the plan was made for other or smaller tables.
pub(crate) fn grown(schema: &Schema, plan: &EpochPlan) -> Result<Schema> {
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
    Schema::new(tables)
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

/// The rows to move.
pub(super) struct Rows<'a> {
    pub(super) source: &'a mut RowSource<'a>,
    /// They come in the order of tables and rows.
    pub(super) in_order: bool,
}

/// A move of all rows: from where, and what the checkpoint behind it says.
struct Move<'a> {
    rows: Rows<'a>,
    stored: Stored,
    /// Memory the source takes.
    source_bytes: u64,
    /// Disk space that the source takes outside of the folder.
    outside_bytes: u64,
    name: &'a str,
    attachments: &'a [Attachment<'a>],
    changes: Changes,
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
        plan: EpochPlan,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> Result<Self> {
        let grown = Arc::new(grown(&self.schema, &plan)?);
        self.checkpoint(name, attachments)?;
        let old = self.pipeline.plan.clone();
        let changes = std::mem::take(&mut self.changes);
        let (site, _, config) = self.into_site();
        let manifest: Manifest = site.log.manifest().cloned().ok_or_else(|| {
            Error::new(ErrorKind::Closed, "the store has no checkpoint to move from")
        })?;
        check_shape(&manifest.schema, &old)?;
        let stored = stored::read_stored(&site.log, &manifest.schema, &old, &config)?;
        let budget_bytes = config.dram_budget_bytes;
        let mut rows = Resting::open(&site.folder, &manifest, &old, &stored, budget_bytes)?;
        let source_bytes = rows.memory_bytes() + stored.chunk_bytes();
        let source = &mut |sink: &mut RecordSink<'_>| rows.visit(sink);
        let stored = stored.moving();
        let moving = Move {
            rows: Rows { source, in_order: false },
            stored,
            source_bytes,
            outside_bytes: 0,
            name,
            attachments,
            changes,
        };
        Self::move_rows(site, PlannedTables { schema: grown, plan }, &config, moving)
            .map_err(NotArrived::into_error)
    }

    /// Returns the [identity](EpochPlan::identity) of the plan that the last checkpoint in `folder`
    /// was made along; `None` when there is none.
    ///
    /// # Errors
    /// `Closed` when another process owns the folder, `Corruption` for damaged files.
    pub fn plan_in_force(folder: Arc<dyn Folder>) -> Result<Option<u64>> {
        stored::plan_identity(&OpenFolder::open(folder)?.log)
    }

    // Moves the rows, puts them in force, and opens the store anew with all of its memory.
    fn move_rows(
        site: OpenFolder,
        tables: PlannedTables,
        config: &PlannedConfig,
        moving: Move<'_>,
    ) -> std::result::Result<Self, NotArrived> {
        let Move { mut rows, stored, source_bytes, outside_bytes, name, attachments, changes } =
            moving;
        assert!(stored.is_moving(), "rows would be moved onto themselves");
        let row_count = tables.schema.tables().iter().map(|table| table.row_count).sum();
        let purpose = Purpose::Moving { source_bytes, row_count };
        let disk_quota_bytes = config.disk_quota_bytes;
        let disk_quota_bytes = disk_quota_bytes.map(|quota| quota.saturating_sub(outside_bytes));
        let narrowed = PlannedConfig { disk_quota_bytes, ..config.clone() };
        let room = Reservations::reserve(&*site.folder, &tables, &narrowed, &stored, purpose)
            .map_err(NotArrived::AsBefore)?;
        let cut = Cut::new(row_count, room.answer_bytes);
        let mut engine =
            Self::assemble(site, tables, &narrowed, &stored, room).map_err(NotArrived::AsBefore)?;
        engine.changes = changes;
        let moved = engine
            .distribute(cut, &mut rows)
            .and_then(|()| engine.checkpoint(name, attachments).map(|_| ()));
        if let Err(error) = moved {
            return Err(engine.give_up_move(error));
        }
        let (plan, changes) = (engine.pipeline.plan.clone(), std::mem::take(&mut engine.changes));
        let (site, schema, _) = engine.into_site();
        let opened = Self::open_at(site, schema, plan, config).map_err(NotArrived::InDoubt)?;
        Ok(Self { changes, ..opened })
    }

    #[expect(clippy::indexing_slicing, reason = "every size class has a writer")]
    fn distribute(&mut self, cut: Cut, rows: &mut Rows<'_>) -> Result<()> {
        let plan = self.pipeline.plan.clone();
        let found = FirstUses::find(&self.folder, &self.schema, &plan, cut, rows);
        let mut first_uses = found.map_err(blame_the_store)?;
        let mover = self.pipeline.mover()?;
        let buf_bytes = mover.disk.buf_bytes().min(self.extent_bytes);
        let classes = mover.classes.iter();
        let mut writers: Vec<_> =
            classes.map(|class| UnplannedWriter::new(4 * class.words(), buf_bytes)).collect();
        let longest = mover.classes.iter().map(|class| 4 * class.words()).max().unwrap_or(0);
        // Records come at any address; slots hold words.
        let mut aligned = AlignedBuf::new(longest);
        let mut row_count = 0u64;
        (rows.source)(&mut |table, row, record| {
            let first = first_uses.take(table, row).map_err(blame_the_store)?;
            let shape = self.schema.table(table)?;
            let place = aligned.get_mut(..record.len());
            let place =
                place.filter(|place| place.len() == shape.record_bytes()).ok_or_else(|| {
                    damaged("brings a record of another length than its table's")
                        .with("table", &shape.name)
                        .with("expected", shape.record_bytes())
                        .with("found", record.len())
                })?;
            place.copy_from_slice(record);
            let at = self.pipeline.home(table.0 as usize).class;
            let mover = self.pipeline.mover()?;
            match first {
                Some(first) => mover.distribute(at, first, place)?,
                None => {
                    let mut sink = Sink { disk: &mut mover.disk, extents: &mut mover.extents };
                    writers[at].add(RowKey::new(table, row), place, &mut sink)?;
                }
            }
            row_count += 1;
            match row_count.is_multiple_of(MEMORY_CHECK_ROWS) {
                true => self.pay_for_chunks(),
                false => Ok(()),
            }
        })?;
        let mover = self.pipeline.mover()?;
        for (class, writer) in mover.classes.iter_mut().zip(writers) {
            let mut sink = Sink { disk: &mut mover.disk, extents: &mut mover.extents };
            class.set_unplanned(writer.finish(&mut sink)?);
        }
        self.pay_for_chunks()
    }

    // Lets go of the disk that the move took; what cannot be given back is used again later.
    // A poisoned engine keeps it: the new checkpoint may be in force, and its rows lie there.
    fn give_up_move(mut self, error: Error) -> NotArrived {
        if self.poison.check().is_err() {
            return NotArrived::InDoubt(error);
        }
        if let Ok(mover) = self.pipeline.mover() {
            let _ = mover.disk.finish_writes();
            let _ = mover.disk.device().set_len(mover.extents.committed_bytes());
        }
        NotArrived::AsBefore(error)
    }
}
