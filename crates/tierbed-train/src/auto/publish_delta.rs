//! Snapshots and deltas of an engine that hands out its rows in no order. Of a delta: those noted
//! as they come; all rows are sorted, then compared.

#![expect(clippy::indexing_slicing, reason = "records are of the length that the schema says")]

use std::path::Path;
use std::sync::Arc;

use tierbed_core::store::Attachment;
use tierbed_core::{Budget, Result, RowId, RowKey, Schema, TableId};
use tierbed_io::sorter::{
    ExternalSorter, PayloadClasses, SortedRecords, SorterOptions, MEMORY_BYTES_MIN,
};
use tierbed_io::{Folder, FsFolder};
use tierbed_kernels::init_record;
use tierbed_snapshot::{PageLayout, Report};

use crate::auto::noting::NotingEngine;
use crate::planned::AnySink;
use crate::sort_keys::SortKeys;
use crate::unsorted::{publish_unsorted, Publication};
use crate::window::changes::{DeltaCount, Since};
use crate::window::changes_file::Rows;
use crate::window::comparer::{ComparedTable, Comparer, StoredRow};
use crate::window::publish::PublishProgress;
use crate::window::publish_delta::OpenBase;
use crate::window::DeltaBase;

/// Where a snapshot or a delta is written to, and in which memory.
pub(crate) struct PublishTarget<'a> {
    pub(crate) path: &'a Path,
    pub(crate) memory: Budget,
}

/// Rows to publish from, and which of them changed.
pub(crate) trait ChangedRows {
    /// Returns the tables of a snapshot.
    ///
    /// # Errors
    /// `Corruption` when one is missing.
    fn rows_schema(&self) -> Result<Schema>;

    /// Returns what a snapshot has attached besides the caller's.
    ///
    /// # Errors
    /// The store's.
    fn own_attachments(&mut self) -> Result<Vec<(String, Vec<u8>)>>;

    /// As [`NotingEngine::noted_since`].
    ///
    /// # Errors
    /// The same.
    fn changed_since(&mut self, identities: &[String]) -> Result<Since<Rows>>;

    /// As [`NotingEngine::scan_noted`].
    ///
    /// # Errors
    /// The same.
    fn scan_changed(&mut self, rows: &Rows, sink: &mut AnySink<'_>) -> Result<()>;

    /// As [`TrainEngine::scan_all`](crate::engine::TrainEngine::scan_all).
    ///
    /// # Errors
    /// The same.
    fn scan_rows(&mut self, sink: &mut AnySink<'_>) -> Result<()>;

    /// As [`NotingEngine::note_published`].
    ///
    /// # Errors
    /// The same.
    fn note(&mut self, identity: &str) -> Result<()>;

    /// As [`NotingEngine::count_delta`].
    ///
    /// # Errors
    /// The same.
    fn count(&mut self, delta: DeltaCount) -> Result<()>;
}

impl<E: NotingEngine> ChangedRows for E {
    fn rows_schema(&self) -> Result<Schema> {
        Ok(self.schema().clone())
    }

    fn own_attachments(&mut self) -> Result<Vec<(String, Vec<u8>)>> {
        Ok(Vec::new())
    }

    fn changed_since(&mut self, identities: &[String]) -> Result<Since<Rows>> {
        self.noted_since(identities)
    }

    fn scan_changed(&mut self, rows: &Rows, sink: &mut AnySink<'_>) -> Result<()> {
        self.scan_noted(rows, sink)
    }

    fn scan_rows(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        self.scan_all(sink)
    }

    fn note(&mut self, identity: &str) -> Result<()> {
        self.note_published(identity)
    }

    fn count(&mut self, delta: DeltaCount) -> Result<()> {
        self.count_delta(delta)
    }
}

/// Publishes every row, on pages as `layout` says.
///
/// # Errors
/// Those of publishing and of the engine.
pub(crate) fn publish_all(
    engine: &mut dyn ChangedRows,
    target: PublishTarget<'_>,
    layout: PageLayout,
    attachments: &[Attachment<'_>],
    progress: &mut PublishProgress<'_>,
) -> Result<Report> {
    let PublishTarget { path, memory } = target;
    let folder = Arc::new(FsFolder::create(path)?);
    let (own, schema) = (engine.own_attachments()?, engine.rows_schema()?);
    let publication = Publication { schema, folder, memory, layout, base: None, own: &own };
    let scan = &mut |sink: &mut AnySink<'_>| engine.scan_rows(sink);
    let report = publish_unsorted(publication, attachments, progress, scan)?;
    engine.note(&report.identity)?;
    Ok(report)
}

/// Publishes what changed since `base`.
///
/// # Errors
/// `Invalid` when `base` is of other tables or a delta itself, or changes since are to be known
/// and are not; otherwise those of publishing and of the engine.
pub(crate) fn publish_changes(
    engine: &mut dyn ChangedRows,
    target: PublishTarget<'_>,
    base: DeltaBase,
    attachments: &[Attachment<'_>],
    progress: &mut PublishProgress<'_>,
) -> Result<Report> {
    let PublishTarget { path, memory } = target;
    let own = engine.own_attachments()?;
    let schema = engine.rows_schema()?;
    let base = OpenBase::open(base, &schema)?;
    let found = base.find(|identities| engine.changed_since(identities))?;
    let folder: Arc<dyn Folder> = Arc::new(FsFolder::create(path)?);
    let publication = Publication {
        schema: schema.clone(),
        folder: Arc::clone(&folder),
        memory: memory.clone(),
        layout: base.layout(),
        base: Some(&base.chain),
        own: &own,
    };
    let (report, count) = if let Some(noted) = &found.noted {
        let report = publish_unsorted(publication, attachments, progress, &mut |sink| {
            visit_noted(engine, noted, sink)
        })?;
        (report, DeltaCount::NOTED)
    } else {
        let base_bytes = memory.free_bytes() / 4;
        let _memory = memory.reserve("base snapshot", base_bytes)?;
        let mut comparer = base.open_rows(base_bytes)?;
        let report = publish_unsorted(publication, attachments, progress, &mut |sink| {
            let mut sorted = RowSorter::new(&schema, &folder, &memory)?;
            engine.scan_rows(&mut |table, row, record| sorted.push(table, row, record))?;
            compare(&mut comparer, &schema, sorted.finish()?, sink)
        })?;
        (report, DeltaCount::compared(found.reason, comparer.pages_read()))
    };
    engine.count(count)?;
    engine.note(&report.identity)?;
    Ok(report)
}

// Hands the noted rows to `sink`, those that the engine leaves out with their initial values.
fn visit_noted(engine: &mut dyn ChangedRows, noted: &Rows, sink: &mut AnySink<'_>) -> Result<()> {
    let schema = engine.rows_schema()?;
    let mut visited = Rows::new();
    engine.scan_changed(noted, &mut |table, row, record| {
        visited.entry(table.0).or_default().insert(row.0);
        sink(table, row, record)
    })?;
    let mut record = Vec::new();
    for (&table, noted) in noted {
        let shape = schema.table(TableId(table))?;
        let visited = visited.entry(table).or_default();
        for row in noted - &*visited {
            record.resize(shape.record_words(), 0.0);
            init_record(shape, row, &mut record);
            sink(TableId(table), RowId(row), &record)?;
        }
    }
    Ok(())
}

/// Sorts weights and use counts of rows by table and row.
struct RowSorter {
    sorter: ExternalSorter,
    keys: SortKeys,
    dims: Vec<usize>,
    payload: Vec<u8>,
}

/// Rows by table and row.
struct SortedRows {
    sorted: SortedRecords,
    keys: SortKeys,
}

impl RowSorter {
    fn new(schema: &Schema, folder: &Arc<dyn Folder>, memory: &Budget) -> Result<Self> {
        let dims: Vec<usize> = schema.tables().iter().map(|table| table.dim as usize).collect();
        let keys = SortKeys::by_id(schema);
        let payload_bytes: Vec<usize> = dims.iter().map(|dim| 4 * (dim + 1)).collect();
        let options = SorterOptions {
            key_bytes: keys.key_bytes(),
            payload_bytes: payload_bytes.iter().copied().max().unwrap_or(0),
            memory_bytes: (memory.free_bytes() / 2).max(MEMORY_BYTES_MIN),
            scratch_name: "scratch.order".to_owned(),
        };
        let classes = PayloadClasses { class_bytes: keys.table_bytes(), payload_bytes };
        let sorter = ExternalSorter::of_classes(Arc::clone(folder), &options, &classes, memory)?;
        Ok(Self { sorter, keys, dims, payload: Vec::new() })
    }

    fn push(&mut self, table: TableId, row: RowId, record: &[f32]) -> Result<()> {
        let dim = self.dims[table.0 as usize];
        self.payload.clear();
        self.payload.extend_from_slice(bytemuck::cast_slice(&record[..dim]));
        self.payload.extend_from_slice(&record[record.len() - 1].to_le_bytes());
        let key = self.keys.encode(RowKey::new(table, row), None);
        self.sorter.push(key.bytes(), &self.payload)
    }

    fn finish(self) -> Result<SortedRows> {
        Ok(SortedRows { sorted: self.sorter.finish()?, keys: self.keys })
    }
}

// Hands the sorted rows that differ from the base to `sink`.
fn compare(
    comparer: &mut Comparer,
    schema: &Schema,
    mut sorted: SortedRows,
    sink: &mut AnySink<'_>,
) -> Result<()> {
    let mut next = Next::of(&mut sorted)?;
    for (id, table) in (0..).map(TableId).zip(schema.tables()) {
        comparer.begin_table(table);
        let table = ComparedTable { id, schema: table };
        let mut record: Vec<f32> = Vec::new();
        let mut hand_on = |count: u32, row: RowId, weights: &[u8]| {
            record.clear();
            record.extend(weights.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)));
            record.push(f32::from_bits(count));
            sink(id, row, &record)
        };
        while let Some(Next { key, payload }) = next.take_if(|next| next.key.table == id) {
            comparer.add(table, StoredRow::of(table, key.row, &payload)?, &mut hand_on)?;
            next = Next::of(&mut sorted)?;
        }
        comparer.end_table(table, &mut hand_on)?;
    }
    assert!(next.is_none(), "a row of no table was sorted");
    Ok(())
}

/// The next of the sorted rows.
struct Next {
    key: RowKey,
    payload: Vec<u8>,
}

impl Next {
    fn of(rows: &mut SortedRows) -> Result<Option<Self>> {
        let Some(record) = rows.sorted.next()? else { return Ok(None) };
        let key = rows.keys.decode(record.key);
        Ok(Some(Self { key, payload: record.payload.to_vec() }))
    }
}
