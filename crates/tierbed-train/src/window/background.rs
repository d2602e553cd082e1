//! A publish while training goes on: copy on write.
//!
//! It begins between two steps: what the row buffer has changed is copied, and the other rows of
//! that moment are frozen. They are copied some at a time, between further steps. A write to a row
//! that was not copied yet copies its old record first. When all are copied they are sorted and
//! written, for which the engine is not needed.
//!
//! ```text
//! begin_publish ─▶ copy_published, until none are left ─▶ finish ─▶ end_publish
//!                    ▲
//!                    └─ write of a row not copied yet: its old record comes first
//! ```
//!
//! What steps change in the row buffer needs no copy: the store has the frozen row until it is
//! written.

use std::sync::Arc;

use roaring::RoaringTreemap;
use tierbed_core::store::{Attachment, RowWrite};
use tierbed_core::{Error, Reservation, Result, RowId, RowKey, Schema, TableId, TrainStore};
use tierbed_snapshot::Report;

use crate::unsorted::{show, UnsortedRows};
use crate::window::changes_file::Rows;
use crate::window::comparer::{ComparedTable, StoredRow};
use crate::window::noted::read_noted;
use crate::window::publish::PublishProgress;

/// A publish that was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// What was written.
    pub report: Report,
    /// Whether it is a delta.
    pub is_delta: bool,
}

/// The rows of a store as they were when a publish began.
pub struct FrozenRows {
    schema: Arc<Schema>,
    /// Those not copied yet, by table.
    pending: Rows,
    total: u64,
    is_delta: bool,
    rows: UnsortedRows,
    /// Why a row could not be copied before it was written.
    failed: Option<Error>,
    attachments: Vec<(String, Vec<u8>)>,
    _memory: [Reservation; 2],
}

/// What is frozen, and where it goes.
pub(crate) struct Freezing {
    pub(crate) schema: Arc<Schema>,
    /// In a delta: the rows noted since its base, by table; otherwise all rows.
    pub(crate) noted: Option<Rows>,
    pub(crate) rows: UnsortedRows,
    pub(crate) memory: [Reservation; 2],
}

impl FrozenRows {
    pub(crate) fn new(freezing: Freezing) -> Self {
        let Freezing { schema, noted, rows, memory } = freezing;
        let is_delta = noted.is_some();
        let mut pending = noted.unwrap_or_else(|| all_rows(&schema));
        pending.retain(|&table, rows| !rows.is_empty() && is_published(&schema, table));
        let total = pending.values().map(RoaringTreemap::len).sum();
        let (failed, attachments) = (None, Vec::new());
        Self { schema, pending, total, is_delta, rows, failed, attachments, _memory: memory }
    }

    /// Adds what goes along with the rows.
    pub(crate) fn with_attachments(
        mut self,
        ids: Vec<(String, Vec<u8>)>,
        attachments: &[Attachment<'_>],
    ) -> Self {
        self.attachments = ids;
        let given = attachments.iter().map(|one| (one.name.to_owned(), one.bytes.to_vec()));
        self.attachments.extend(given);
        self
    }

    pub(crate) fn is_copied(&self) -> bool {
        self.failed.is_none() && self.pending.is_empty()
    }

    /// Copies a row that the store has not as it is in the row buffer.
    ///
    /// # Errors
    /// Those of the folder.
    pub(crate) fn copy_dirty(&mut self, key: RowKey, record: &[f32]) -> Result<()> {
        let RowKey { table: id, row } = key;
        // Rows that the base has as they are, and were not written since, are not of a delta.
        if !self.pending.get_mut(&id.0).is_some_and(|rows| rows.remove(row.0)) {
            return Ok(());
        }
        let table = ComparedTable { id, schema: self.schema.table(id)? };
        let stored = StoredRow::of(table, row, bytemuck::cast_slice(record))?;
        self.rows.push(id, row, stored.count, stored.weights)
    }

    /// Copies those of `rows` that were not copied yet, which are about to be written. What fails
    /// ends the publish, not the step; see [`copy`](Self::copy).
    pub(crate) fn copy_before(&mut self, store: &mut dyn TrainStore, rows: &[RowWrite<'_>]) {
        for same in rows.chunk_by(|a, b| a.key.table == b.key.table) {
            let [first, ..] = same else { panic!("a group without rows") };
            let table = first.key.table;
            let is_pending = |key: &RowKey| {
                self.pending.get_mut(&table.0).is_some_and(|rows| rows.remove(key.row.0))
            };
            let keys: Vec<RowKey> = same.iter().map(|row| row.key).filter(is_pending).collect();
            if let Err(error) = self.copy_rows(store, table, &keys) {
                self.failed = Some(error);
                self.pending.clear();
            }
        }
    }

    /// Copies the next rows, at most `row_count`, and tells `progress`, where copying is a half.
    ///
    /// # Errors
    /// Those of the store and of the folder, also of a row that was to be copied before a step;
    /// `Closed` when `progress` stops it.
    pub(crate) fn copy(
        &mut self,
        store: &mut dyn TrainStore,
        row_count: usize,
        progress: &mut PublishProgress<'_>,
    ) -> Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.pending.retain(|_, rows| !rows.is_empty());
        self.copy_next(store, row_count)?;
        self.pending.retain(|_, rows| !rows.is_empty());
        let pending: u64 = self.pending.values().map(RoaringTreemap::len).sum();
        show(progress, (self.total - pending) / 2, self.total)
    }

    fn copy_next(&mut self, store: &mut dyn TrainStore, row_count: usize) -> Result<()> {
        let Some((&table, rows)) = self.pending.iter_mut().next() else { return Ok(()) };
        let table = TableId(table);
        let keys = rows.iter().take(row_count).map(|row| RowKey::new(table, RowId(row)));
        let keys: Vec<RowKey> = keys.collect();
        if let Some(last) = keys.last() {
            rows.remove_range(..=last.row.0);
        }
        self.copy_rows(store, table, &keys)
    }

    fn copy_rows(
        &mut self,
        store: &mut dyn TrainStore,
        table: TableId,
        keys: &[RowKey],
    ) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let Self { schema, rows, is_delta, .. } = self;
        let table = ComparedTable { id: table, schema: schema.table(table)? };
        let mut push = |count, row, weights: &[u8]| rows.push(table.id, row, count, weights);
        if *is_delta {
            return read_noted(store, table, keys, &mut push);
        }
        store.read(keys, &mut |at, record| {
            let Some(record) = record else { return Ok(()) };
            let Some(key) = keys.get(at) else { panic!("a row that was not asked for") };
            let StoredRow { count, weights, .. } = StoredRow::of(table, key.row, record)?;
            push(count, key.row, weights)
        })
    }

    /// Writes the snapshot, once all rows are copied.
    ///
    /// # Errors
    /// As [`WindowEngine::publish`](crate::window::WindowEngine::publish).
    pub fn finish(self, progress: &mut PublishProgress<'_>) -> Result<Finished> {
        assert!(self.is_copied(), "rows were not copied");
        let attachments: Vec<Attachment<'_>> =
            self.attachments.iter().map(|(name, bytes)| Attachment { name, bytes }).collect();
        let (copied, total) = (self.rows.pushed(), self.total);
        let report = self.rows.finish(&attachments, &mut |written| match written == copied {
            true => show(progress, total, total),
            false => show(progress, (total + written) / 2, total),
        })?;
        Ok(Finished { report, is_delta: self.is_delta })
    }
}

fn all_rows(schema: &Schema) -> Rows {
    let mut all = Rows::new();
    for (at, table) in (0..).zip(schema.tables()) {
        // Runs of rows: a few bytes for each 65,536.
        let mut rows = RoaringTreemap::new();
        rows.insert_range(0..table.row_count);
        all.insert(at, rows);
    }
    all
}

// Free rows of vocabularies are the trainer's own.
fn is_published(schema: &Schema, table: u32) -> bool {
    let table = schema.table(TableId(table));
    table.is_ok_and(|table| !tierbed_vocab::is_free_table(&table.name))
}
