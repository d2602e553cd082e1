//! Rows that differ from a snapshot.
//!
//! Rows that were noted since the snapshot was published are read, with those of the snapshot, and
//! compared bit by bit, as they are coded. Where the notes do not reach back to it, all rows are
//! read beside each other, in row order. That is right after restarts, evictions, imports and
//! crashes, for any snapshot of the store, at the price of reading both. Both ways give the same
//! delta.

#![expect(clippy::indexing_slicing, reason = "a store answers the keys asked for")]

use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Error, Result, RowId, RowKey, RowStore};
use tierbed_io::Folder;
use tierbed_snapshot::delta::{check_plain, check_successor, APPLIED};
use tierbed_snapshot::{PageLayout, Report, Snapshot, SnapshotOptions};

use crate::window::changes::FindBy;
use crate::window::comparer::{ChangeSink, ComparedTable, Comparer, StoredRow, CHUNK_ROWS};
use crate::window::engine::WindowEngine;
use crate::window::publish::{PublishProgress, Target};

/// What a delta is made against.
pub struct DeltaBase {
    /// Where the snapshot lies.
    pub folder: Arc<dyn Folder>,
    /// How the rows that changed since are found.
    pub find_by: FindBy,
}

/// The snapshot that a delta is made against, open.
pub(crate) struct OpenBase {
    snapshot: Arc<Snapshot>,
    find_by: FindBy,
}

impl OpenBase {
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot)
    }
}

/// The rows that a delta is made of.
pub(crate) struct Against {
    comparer: Comparer,
    /// The first of the sets of changes since the snapshot; `None`: all rows are compared.
    first_set: Option<usize>,
}

/// Takes the number of a row that was looked at.
pub(crate) type SeenSink<'a> = dyn FnMut(RowId) -> Result<()> + 'a;

impl WindowEngine {
    /// Publishes to `folder` what changed since the snapshot in `base`, which may be any snapshot
    /// of this store; see [`publish`](Self::publish) and `tierbed_snapshot::delta`. Rows are coded
    /// as those of the snapshot; tables that are new since are f32.
    ///
    /// Reads the snapshot in a quarter of the memory: its index, and pages of rows that changed.
    ///
    /// # Errors
    /// `Invalid` when `base` is of other tables or a delta itself, or changes since are to be known
    /// and are not; otherwise as [`publish`](Self::publish).
    pub fn publish_delta(
        &mut self,
        folder: Arc<dyn Folder>,
        base: DeltaBase,
        attachments: &[Attachment<'_>],
        progress: &mut PublishProgress<'_>,
    ) -> Result<Report> {
        self.poison.check()?;
        self.release_buffer()?;
        let dram_budget_bytes = self.budget.free_bytes() / 4;
        let _memory = self.budget.reserve("base snapshot", dram_budget_bytes)?;
        let options =
            SnapshotOptions { dram_budget_bytes, reader_count: 1, ..SnapshotOptions::default() };
        let snapshot = Arc::new(Snapshot::open(base.folder, &options)?);
        check_successor(snapshot.schema(), &self.schema)?;
        check_plain(&snapshot)?;
        let codecs = snapshot.manifest().codecs.clone();
        let layout = PageLayout { placed: Vec::new(), codecs };
        let base = OpenBase { snapshot, find_by: base.find_by };
        self.publish_to(folder, Target { layout, base: Some(base) }, attachments, progress)
    }

    /// Decides how the changes since `base` are found. Nothing may be written to the store from
    /// here on until they are.
    pub(crate) fn against(&mut self, base: OpenBase) -> Result<Against> {
        let OpenBase { snapshot, find_by } = base;
        let first_set = match find_by {
            FindBy::Compared => None,
            FindBy::Auto | FindBy::Tracked => self.first_set(&snapshot)?,
        };
        let why = self.store.changes.why_unknown();
        if find_by == FindBy::Tracked && first_set.is_none() {
            return Err(Error::invalid("rows changed since this snapshot are not known")
                .with("cause", why)
                .with("remedy", "publish with changes=\"auto\", which compares all rows"));
        }
        let is_fallback = find_by == FindBy::Auto && first_set.is_none();
        self.store.changes.set_reason(is_fallback.then_some(why));
        Ok(Against { comparer: Comparer::new(snapshot), first_set })
    }

    // A snapshot is known by itself, or by the delta that was applied to make it.
    fn first_set(&self, base: &Snapshot) -> Result<Option<usize>> {
        let changes = &self.store.changes;
        if let Some(first) = changes.since(&base.identity()?) {
            return Ok(Some(first));
        }
        let applied = base.attachment(APPLIED)?;
        let applied = applied.as_deref().and_then(|bytes| std::str::from_utf8(bytes).ok());
        Ok(applied.and_then(|identity| changes.since(identity)))
    }

    /// Hands the rows of `table` that differ from the snapshot to `sink`, and the numbers of those
    /// it looks at to `seen`.
    pub(crate) fn visit_changes(
        &mut self,
        table: ComparedTable<'_>,
        against: &mut Against,
        sink: &mut ChangeSink<'_>,
        seen: &mut SeenSink<'_>,
    ) -> Result<()> {
        let Against { comparer, first_set } = against;
        let Some(first) = *first_set else {
            self.store.scan(table.id, &mut |row, record| {
                comparer.add_next(table, StoredRow::of(table, row, record)?, sink)?;
                seen(row)
            })?;
            return comparer.end_table(table, sink);
        };
        let noted = self.store.changes.rows(first, table.id);
        let mut rows = noted.iter().map(|row| RowKey::new(table.id, RowId(row)));
        let mut chunk = Chunk::new(table.schema.record_bytes());
        loop {
            let keys: Vec<RowKey> = rows.by_ref().take(CHUNK_ROWS).collect();
            if keys.is_empty() {
                return comparer.finish(table, sink);
            }
            chunk.read(&mut self.store, &keys)?;
            for (key, record) in keys.iter().zip(chunk.records()) {
                match record {
                    Some(record) => {
                        comparer.add(table, StoredRow::of(table, key.row, record)?, sink)?;
                    }
                    None => comparer.absent(table, key.row, sink)?,
                }
                seen(key.row)?;
            }
        }
    }

    /// Counts a delta that was published.
    pub(crate) fn count_delta(&mut self, against: &Against) {
        let pages_read = against.comparer.pages_read();
        self.store.changes.count_delta(against.first_set.is_some(), pages_read);
    }
}

/// Rows that were read at once, in the order in which they were asked for.
struct Chunk {
    record_bytes: usize,
    records: Vec<u8>,
    is_stored: [bool; CHUNK_ROWS],
}

impl Chunk {
    fn new(record_bytes: usize) -> Self {
        let records = vec![0; CHUNK_ROWS * record_bytes];
        Self { record_bytes, records, is_stored: [false; CHUNK_ROWS] }
    }

    fn read(&mut self, store: &mut dyn RowStore, keys: &[RowKey]) -> Result<()> {
        let Self { record_bytes, records, is_stored } = self;
        is_stored.fill(false);
        store.read(keys, &mut |at, record| {
            let Some(record) = record else { return Ok(()) };
            is_stored[at] = true;
            records[at * *record_bytes..(at + 1) * *record_bytes].copy_from_slice(record);
            Ok(())
        })
    }

    /// Returns the records; `None` for rows that the store has not.
    fn records(&self) -> impl Iterator<Item = Option<&[u8]>> {
        let records = self.records.chunks_exact(self.record_bytes).zip(self.is_stored);
        records.map(|(record, is_stored)| is_stored.then_some(record))
    }
}
