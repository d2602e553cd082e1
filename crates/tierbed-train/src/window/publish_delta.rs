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
use tierbed_core::{Error, Result, RowId, RowKey, RowStore, Schema};
use tierbed_io::Folder;
use tierbed_snapshot::delta::{applied_to_make, check_plain, check_successor};
use tierbed_snapshot::{PageLayout, Report, Snapshot, SnapshotOptions, SnapshotRows};

use crate::window::changes::{DeltaCount, Since};
use crate::window::comparer::{
    ChangeSink, ComparedTable, Comparer, LookedAt, StoredRow, CHUNK_ROWS,
};
use crate::window::engine::WindowEngine;
use crate::window::publish::{PublishProgress, Target};

/// What a delta is made against.
pub struct DeltaBase {
    /// Where the snapshot lies.
    pub folder: Arc<dyn Folder>,
    /// Deltas that lie upon it, oldest first: the new one is made against the last of them.
    pub deltas: Vec<Arc<dyn Folder>>,
    /// How the rows that changed since are found.
    pub find_by: FindBy,
}

/// How a delta finds the rows that changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FindBy {
    /// By those noted while training, where they reach back to the base; else by comparing.
    #[default]
    Auto,
    /// By those noted while training; refused where they do not reach back to the base.
    Tracked,
    /// By comparing all rows with the base.
    Compared,
}

impl FindBy {
    /// Reads a name: `auto`, `tracked` or `compared`.
    ///
    /// # Errors
    /// `Invalid` for another one.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "tracked" => Ok(Self::Tracked),
            "compared" => Ok(Self::Compared),
            _ => Err(Error::invalid("no such way to find changes")
                .with("changes", name)
                .with("allowed", "auto, tracked, compared")),
        }
    }

    /// Decides, given what is known of changed rows.
    ///
    /// # Errors
    /// `Invalid` when they are to be known and are not; otherwise those of `since`.
    pub(crate) fn decide<T>(self, since: impl FnOnce() -> Result<Since<T>>) -> Result<Found<T>> {
        if self == Self::Compared {
            return Ok(Found { noted: None, reason: None });
        }
        match since()? {
            Since::Known(noted) => Ok(Found { noted: Some(noted), reason: None }),
            Since::Unknown(why) if self == Self::Auto => {
                Ok(Found { noted: None, reason: Some(why) })
            }
            Since::Unknown(why) => {
                Err(Error::invalid("rows changed since this snapshot are not known")
                    .with("cause", why)
                    .with("remedy", "publish with changes=\"auto\", which compares all rows"))
            }
        }
    }
}

/// How a delta finds the rows that changed.
pub(crate) struct Found<T> {
    /// Those noted; `None`: all rows are compared.
    pub(crate) noted: Option<T>,
    /// Why all are, unless it was told to.
    pub(crate) reason: Option<&'static str>,
}

/// The snapshot that a delta is made against, open, with the deltas upon it.
pub(crate) struct OpenBase {
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) find_by: FindBy,
}

impl OpenBase {
    /// Opens the base of a delta of a store of `schema`.
    ///
    /// # Errors
    /// `Invalid` when it is of other tables or a delta itself, or its deltas do not follow each
    /// other, otherwise those of opening them.
    pub(crate) fn open(base: DeltaBase, schema: &Schema, dram_budget_bytes: u64) -> Result<Self> {
        let options =
            SnapshotOptions { dram_budget_bytes, reader_count: 1, ..SnapshotOptions::default() };
        let snapshot = Arc::new(Snapshot::open(base.folder, &options)?);
        check_plain(&snapshot)?;
        for delta in base.deltas {
            snapshot.apply(delta)?;
        }
        check_successor(SnapshotRows::new(Arc::clone(&snapshot)).schema(), schema)?;
        Ok(Self { snapshot, find_by: base.find_by })
    }

    /// Returns how rows of the delta lie on pages.
    pub(crate) fn layout(&self) -> PageLayout {
        let codecs = self.snapshot.manifest().codecs.clone();
        PageLayout { placed: Vec::new(), codecs }
    }

    /// Returns what the snapshot is known by: the newest delta upon it, or itself and the delta
    /// that was applied to make it.
    pub(crate) fn identities(&self) -> Result<Vec<String>> {
        let generation = self.snapshot.generation();
        if generation.delta_count > 0 {
            return Ok(vec![generation.identity]);
        }
        let mut identities = vec![self.snapshot.identity()?];
        identities.extend(applied_to_make(&self.snapshot)?);
        Ok(identities)
    }
}

/// The rows that a delta is made of.
pub(crate) struct Against {
    comparer: Comparer,
    /// With the first of the sets of changes since the snapshot.
    found: Found<usize>,
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
        let base = OpenBase::open(base, &self.schema, dram_budget_bytes)?;
        let layout = base.layout();
        self.publish_to(folder, Target { layout, base: Some(base) }, attachments, progress)
    }

    /// Decides how the changes since `base` are found. Nothing may be written to the store from
    /// here on until they are.
    pub(crate) fn against(&mut self, base: OpenBase) -> Result<Against> {
        let identities = base.identities()?;
        let found = base.find_by.decide(|| Ok(self.store.changes.since(&identities)))?;
        Ok(Against { comparer: Comparer::new(base.snapshot), found })
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
        let Against { comparer, found } = against;
        let noted = found.noted.map(|first| self.store.changes.rows(first, table.id));
        comparer.begin_table(LookedAt::of(table.schema, noted.clone()));
        let Some(noted) = noted else {
            self.store.scan(table.id, &mut |row, record| {
                comparer.add(table, StoredRow::of(table, row, record)?, sink)?;
                seen(row)
            })?;
            return comparer.end_table(table, sink);
        };
        let mut rows = noted.into_iter().map(|row| RowKey::new(table.id, RowId(row)));
        let mut chunk = Chunk::new(table.schema.record_bytes());
        loop {
            let keys: Vec<RowKey> = rows.by_ref().take(CHUNK_ROWS).collect();
            if keys.is_empty() {
                return comparer.end_table(table, sink);
            }
            chunk.read(&mut self.store, &keys)?;
            for (key, record) in keys.iter().zip(chunk.records()) {
                if let Some(record) = record {
                    comparer.add(table, StoredRow::of(table, key.row, record)?, sink)?;
                }
                seen(key.row)?;
            }
        }
    }

    /// Counts a delta that was published.
    pub(crate) fn count_delta(&mut self, against: &Against) {
        self.store.changes.count_delta(DeltaCount {
            is_tracked: against.found.noted.is_some(),
            reason: against.found.reason,
            base_pages_read: against.comparer.pages_read(),
        });
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
