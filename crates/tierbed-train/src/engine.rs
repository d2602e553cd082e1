//! The seam of the training engine: what every engine, and every decorator of one, answers.
//!
//! Two engines implement it, one that reads rows by number and one that trains along a plan. Two
//! decorators implement it again: the automatic choice between these two, and several shards that
//! work as one. A call that concerns rows of one table is answered by [`TableRows`], which only
//! the two engines implement; a decorator says which engine has the table.

use std::path::Path;

use serde_json::Value;
use tierbed_core::store::{out_of_range, Attachment, CommitInfo};
use tierbed_core::{Bags, Error, Result, RowId, Schema, TableId, TableSchema};
use tierbed_kernels::{FeatureLayout, Grads, Hyper};
use tierbed_snapshot::{PageLayout, Report};

use crate::auto::{Answer, PlanRequest};
use crate::batch_token::BatchToken;
use crate::planned::AnySink;
use crate::window::publish::PublishProgress;
use crate::window::rows::NewRows;
use crate::window::vocabularies::VocabularyStats;
use crate::window::DeltaBase;

/// Takes rows by number: position among the rows asked for, whole record of words.
pub type RowVisitor<'a> = dyn FnMut(usize, &[f32]) + 'a;

/// What rows of a table are wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// They are read.
    Read,
    /// They are overwritten. Along a plan that is what an unplanned batch is: rows move to the
    /// window engine if they may.
    Write,
    /// Steps of another run are taken over.
    Resume,
}

/// The engine that has a table, and the table's number there.
pub struct OwnRows<'a> {
    /// The engine.
    pub engine: &'a mut dyn TableRows,
    /// The table's number in it.
    pub table: TableId,
}

/// Training on one store. Calls need `&mut`: one at a time, in a fixed order, so that equal calls
/// give equal bits.
pub trait TrainEngine: Send {
    /// Returns the tables.
    fn schema(&self) -> &Schema;

    /// Adds a table, or finds the identical one. Tables added behind the first call that needs
    /// rows go to the last of several shards.
    ///
    /// # Errors
    /// `Invalid` when the stored table of that name differs, the budget is too small, or rows
    /// are planned and the table is new.
    fn add_table(&mut self, table: TableSchema) -> Result<TableId>;

    /// Sets the hyperparameters of `table` from the next step on; `hyper.step` is ignored.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or values that are negative or not finite.
    fn set_hyper(&mut self, table: TableId, hyper: Hyper) -> Result<()>;

    /// Returns how many steps `table` did; the next one is one more.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    fn steps_done(&mut self, table: TableId) -> Result<u64>;

    /// Pools the rows of `bags` into `out`, overwritten: `[B, output_dim]`, or `[E, D]` without
    /// pooling. With `is_training` a step on the same batch will follow, so the batch must be
    /// the planned one if there is a plan; without, any batch may be asked. Returns the token for
    /// the step, where there is a plan.
    ///
    /// # Errors
    /// `Invalid` for shapes or ids out of range, or a batch to train on that is not the planned
    /// one: nothing changed then. `Poisoned` when the thread of a shard panicked. Otherwise the
    /// store's.
    fn lookup(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
        is_training: bool,
    ) -> Result<Option<BatchToken>>;

    /// Makes sure that `bags` may be stepped next: along a plan they are its next batch, whose
    /// rows are in memory then. Returns the token for the step, where there is a plan.
    ///
    /// # Errors
    /// `Invalid` for another batch: nothing changed then. Otherwise the disk's.
    fn expect(&mut self, _plan: &FeatureLayout, _bags: &Bags<'_>) -> Result<Option<BatchToken>> {
        Ok(None)
    }

    /// Applies one optimizer step for `bags`; in forward order they are the next batch of the
    /// plan, and the batch after it is the next one then. With the token of the batch's lookup
    /// no id is looked at again; a token of another batch, or of another engine, counts for none.
    /// With several shards any error behind the checks of the batch poisons the store: others
    /// have made the step.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup). An error of the disk poisons the engine: reopen it at the
    /// last checkpoint.
    fn update(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        grads: Grads<'_>,
        found: Option<BatchToken>,
    ) -> Result<()>;

    /// Skips the next batch of the plan without a step: it was only looked at. Nothing happens
    /// without a plan.
    ///
    /// # Errors
    /// `Invalid` when it is not the planned one.
    fn skip(&mut self, _plan: &FeatureLayout, _bags: &Bags<'_>) -> Result<()> {
        Ok(())
    }

    /// Skips batches of the plan, without a step and without looking at them, up to batch
    /// `batch` of this epoch, or of the next one when that batch is done.
    ///
    /// # Errors
    /// `Invalid` for a batch that the plan does not have, otherwise the disk's.
    fn skip_to(&mut self, _batch: u64) -> Result<()> {
        Ok(())
    }

    /// Returns epochs and batches of the epoch done; `None` when no plan is followed.
    fn position(&self) -> Option<(u64, u64)> {
        None
    }

    /// Brings the rows of `batches`, nearest first; returns how many of them fit. Along a plan
    /// these are batches to look up only, copied aside in one pass over everything. With several
    /// shards the batches that did not fit must be the first ones announced next.
    ///
    /// # Errors
    /// `Invalid` for ids out of range, otherwise the store's.
    fn prefetch(&mut self, plan: &FeatureLayout, batches: &[Bags<'_>]) -> Result<usize>;

    /// Forgets what was announced.
    fn end_lookahead(&mut self);

    /// Returns the engine that has `table`, to reach its rows by number.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, otherwise those of opening the engine.
    fn rows_of(&mut self, table: TableId, access: Access) -> Result<OwnRows<'_>>;

    /// Visits every row of every table that was ever written, once: table, row, whole record. In
    /// row order by window, in no order along a plan; one pass over everything.
    ///
    /// # Errors
    /// The store's and those of `sink`.
    fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()>;

    /// Makes everything up to the last finished batch durable, with `attachments`, as `name`;
    /// returns the checkpoint's number. It comes into force for all shards at once; with several
    /// any error poisons the store.
    ///
    /// # Errors
    /// `NoSpace` leaves the last checkpoint in force and training may go on; after `Io` the
    /// store is poisoned: reopen it at the last checkpoint.
    fn checkpoint(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<u64>;

    /// Returns number and name of the last checkpoint.
    fn last_checkpoint(&self) -> Option<&CommitInfo>;

    /// Reads an attachment of the last checkpoint.
    ///
    /// # Errors
    /// `Corruption` when it fails its checksum, `Io` from the device.
    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Returns the names of the caller's attachments of the last checkpoint.
    ///
    /// # Errors
    /// `Unsupported` by a store that does not know them.
    fn attachment_names(&self) -> Result<Vec<String>>;

    /// Checks every checksum of the store and of what it keeps; returns the number of pages (or
    /// chunks) checked.
    ///
    /// # Errors
    /// `Corruption`, naming the first bad place.
    fn verify(&mut self) -> Result<u64>;

    /// Publishes the newest version of every written row to `path`, a new or empty folder,
    /// together with `attachments`, on pages as `layout` says.
    ///
    /// # Errors
    /// As [`WindowEngine::publish`](crate::window::WindowEngine::publish).
    fn publish_placed(
        &mut self,
        path: &Path,
        layout: PageLayout,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report>;

    /// Publishes to `path` what differs from a snapshot of this store, as `base` says.
    ///
    /// # Errors
    /// As [`WindowEngine::publish_delta`](crate::window::WindowEngine::publish_delta).
    fn publish_delta(
        &mut self,
        path: &Path,
        base: DeltaBase,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report>;

    /// Returns everything that was counted, as JSON: `order`, `steps`, `isa`, `disk_bytes`,
    /// `store`, `buffer`, `budget`. With several shards, the order of the first, sums of what
    /// was counted, and under `shards` what each has counted.
    ///
    /// # Errors
    /// The store's, when nothing was opened yet.
    fn stats(&mut self) -> Result<Value>;

    /// Returns what open vocabularies hold and read; none along a plan, or with several shards.
    fn vocabularies(&self) -> VocabularyStats {
        VocabularyStats::default()
    }
}

/// An engine that can be told the order of the batches.
pub trait PlanFollower: TrainEngine {
    /// Follows the plan of `request` if there is one and it may be followed.
    ///
    /// # Errors
    /// In order `forward` what is refused is `Invalid`; otherwise the folder's errors.
    fn follow(&mut self, features: &FeatureLayout, request: &PlanRequest) -> Result<Answer>;

    /// Starts making the plan of `request`; push all its batches, then finish.
    ///
    /// # Errors
    /// `Invalid` when the order is decided already, or a shard has no table of these features;
    /// otherwise the folder's.
    fn start_plan(&mut self, features: &FeatureLayout, request: &PlanRequest) -> Result<()>;

    /// Adds the next batch to the plan. One that is looked up and not stepped gives no rows to
    /// ids of open tables.
    ///
    /// # Errors
    /// `Invalid` for ids or shapes out of range, otherwise those of the scratch files.
    fn push_planned(&mut self, bags: &Bags<'_>, is_stepped: bool) -> Result<()>;

    /// Finishes the plan; it is durable then.
    ///
    /// # Errors
    /// `Invalid` for no batches, or for others than those of the plan that is made again;
    /// otherwise the folder's.
    fn finish_plan(&mut self) -> Result<()>;

    /// Notes why the forward order is not followed.
    fn note_reason(&mut self, reason: &str);
}

/// Rows of one table, by number: for import, export, inspection and tests.
pub trait TableRows {
    /// Returns the shape of `table`.
    ///
    /// # Errors
    /// `Invalid` for an unknown table.
    fn shape_of(&self, table: TableId) -> Result<TableSchema>;

    /// Visits rows `first..first + count` of `table`, as whole records of words: the newest
    /// value of rows in memory, on disk, or initial. By window in order, once; along a plan in
    /// one pass over everything, in which a row is visited again when it was used: the last visit
    /// counts.
    ///
    /// # Errors
    /// `Invalid` when rows are out of range, otherwise the store's.
    fn visit_rows(
        &mut self,
        table: TableId,
        first: u64,
        count: usize,
        visit: &mut RowVisitor<'_>,
    ) -> Result<()>;

    /// Visits `rows`, which increase and are rows of `table`, as
    /// [`visit_rows`](Self::visit_rows) does.
    ///
    /// # Errors
    /// The store's.
    fn visit_listed(
        &mut self,
        table: TableId,
        rows: &[RowId],
        visit: &mut RowVisitor<'_>,
    ) -> Result<()>;

    /// Copies the weights of `rows` (any order, duplicates allowed) into `out`, `[N, D]`.
    ///
    /// # Errors
    /// As [`visit_rows`](Self::visit_rows).
    #[expect(clippy::indexing_slicing, reason = "an engine visits listed rows, as whole records")]
    fn gather_rows(&mut self, table: TableId, rows: &[i64], out: &mut [f32]) -> Result<()> {
        let shape = self.shape_of(table)?;
        let dim = shape.dim as usize;
        if out.len() != rows.len() * dim {
            return Err(Error::invalid("output must hold one row per id")
                .with("rows", rows.len())
                .with("dim", dim)
                .with("found_values", out.len()));
        }
        let mut wanted = Vec::with_capacity(rows.len());
        for (place, &row) in out.chunks_exact_mut(dim).zip(rows) {
            let known = u64::try_from(row).ok().filter(|&row| row < shape.row_count);
            wanted.push((RowId(known.ok_or_else(|| out_of_range(&shape, row))?), place));
        }
        wanted.sort_unstable_by_key(|(row, _)| *row);
        let mut listed: Vec<RowId> = wanted.iter().map(|(row, _)| *row).collect();
        listed.dedup();
        let mut places: Vec<_> = wanted.chunk_by_mut(|a, b| a.0 == b.0).collect();
        assert_eq!(places.len(), listed.len(), "each listed row has its places");
        self.visit_listed(table, &listed, &mut |nth, record| {
            places[nth].iter_mut().for_each(|(_, place)| place.copy_from_slice(&record[..dim]));
        })
    }

    /// Overwrites rows from `first` on.
    ///
    /// # Errors
    /// As [`visit_rows`](Self::visit_rows); `Invalid` for a use count that is none, or along a
    /// plan that may not be left.
    ///
    /// # Panics
    /// When the parts of `rows` are not of as many rows.
    fn write_rows(&mut self, table: TableId, first: u64, rows: NewRows<'_>) -> Result<()>;

    /// Lets `table` have done `steps` steps, as of a run that goes on with rows written by number.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, or along a plan.
    fn set_steps_done(&mut self, table: TableId, steps: u64) -> Result<()>;
}
