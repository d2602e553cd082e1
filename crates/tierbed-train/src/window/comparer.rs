//! Rows of a training store beside those of a snapshot, compared bit by bit, as they are coded.

#![expect(clippy::indexing_slicing, reason = "a snapshot answers the keys asked for")]

use std::ops::Range;
use std::sync::Arc;

use tierbed_core::{Error, Result, RowId, RowKey, RowStore, TableId, TableSchema};
use tierbed_io::PAGE_BYTES;
use tierbed_kernels::init_record;
use tierbed_snapshot::delta::holds;
use tierbed_snapshot::{InitialCode, Snapshot, SnapshotRows};

/// Rows compared at once.
pub(crate) const CHUNK_ROWS: usize = 512;

/// Takes a row that changed: use count, row, weights as bytes.
pub(crate) type ChangeSink<'a> = dyn FnMut(u32, RowId, &[u8]) -> Result<()> + 'a;

/// The table whose rows are compared.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ComparedTable<'a> {
    pub(crate) id: TableId,
    pub(crate) schema: &'a TableSchema,
}

/// A row of the training store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredRow<'a> {
    pub(crate) count: u32,
    pub(crate) row: RowId,
    pub(crate) weights: &'a [u8],
}

impl<'a> StoredRow<'a> {
    /// Finds weights and use count in a record.
    ///
    /// # Errors
    /// `Corruption` when it is too short.
    pub(crate) fn of(table: ComparedTable<'_>, row: RowId, record: &'a [u8]) -> Result<Self> {
        let weight_bytes = 4 * table.schema.dim as usize;
        let parts = record.split_at_checked(weight_bytes).zip(record.last_chunk());
        let ((weights, _), count) = parts.ok_or_else(|| {
            Error::corruption("a stored record is shorter than its weights and use count")
                .with("table", &table.schema.name)
                .with("row", row.0)
        })?;
        Ok(Self { count: u32::from_le_bytes(*count), row, weights })
    }
}

/// The rows of a snapshot, to compare others with.
pub(crate) struct Comparer {
    base: Arc<Snapshot>,
    rows: SnapshotRows,
    waiting: Vec<(u32, RowId)>,
    weights: Vec<u8>,
    /// Rows of the table that are still to come, or are not stored.
    left: Range<u64>,
}

impl Comparer {
    pub(crate) fn new(base: Arc<Snapshot>) -> Self {
        let rows = SnapshotRows::coded(Arc::clone(&base));
        Self { base, rows, waiting: Vec::new(), weights: Vec::new(), left: 0..0 }
    }

    /// Begins a table.
    pub(crate) fn begin_table(&mut self, table: &TableSchema) {
        assert!(self.waiting.is_empty(), "rows of the table before wait");
        self.left = 0..table.row_count;
    }

    /// Adds the next row that the store has of `table`; hands changes to `sink`, and rows before it
    /// that the store has not.
    pub(crate) fn add(
        &mut self,
        table: ComparedTable<'_>,
        stored: StoredRow<'_>,
        sink: &mut ChangeSink<'_>,
    ) -> Result<()> {
        loop {
            match self.left.next() {
                Some(row) if row < stored.row.0 => self.absent(table, RowId(row), sink)?,
                Some(row) if row == stored.row.0 => return self.add_stored(table, stored, sink),
                _ => {
                    return Err(Error::corruption("a store brings its rows out of order")
                        .with("row", stored.row.0))
                }
            }
        }
    }

    /// Ends a table whose rows were all added.
    pub(crate) fn end_table(
        &mut self,
        table: ComparedTable<'_>,
        sink: &mut ChangeSink<'_>,
    ) -> Result<()> {
        while let Some(row) = self.left.next() {
            self.absent(table, RowId(row), sink)?;
        }
        self.finish(table, sink)
    }

    /// Returns how many pages of the snapshot and of its index were read.
    pub(crate) fn pages_read(&self) -> u64 {
        self.rows.stats().pages_read + self.base.inspect().index_bytes / PAGE_BYTES as u64
    }

    fn add_stored(
        &mut self,
        table: ComparedTable<'_>,
        stored: StoredRow<'_>,
        sink: &mut ChangeSink<'_>,
    ) -> Result<()> {
        let StoredRow { count, row, weights } = stored;
        assert!(self.waiting.len() < CHUNK_ROWS, "{} rows wait", self.waiting.len());
        self.waiting.push((count, row));
        self.weights.extend_from_slice(weights);
        if self.waiting.len() < CHUNK_ROWS {
            return Ok(());
        }
        self.finish(table, sink)
    }

    // Compares what waits.
    fn finish(&mut self, table: ComparedTable<'_>, sink: &mut ChangeSink<'_>) -> Result<()> {
        let ComparedTable { id, schema: table } = table;
        let weight_bytes = 4 * table.dim as usize;
        let waiting_bytes = self.waiting.len() * weight_bytes;
        assert_eq!(self.weights.len(), waiting_bytes, "every row that waits has its weights");
        let keys: Vec<RowKey> = self.waiting.iter().map(|(_, row)| RowKey::new(id, *row)).collect();
        let known = keys.partition_point(|key| holds(self.rows.schema(), *key));
        let mut is_changed = vec![true; keys.len()];
        let codec = self.base.manifest().codecs.of(id);
        let mut initial = InitialCode::default();
        let mut code = vec![0; codec.code_bytes(table.dim as usize)];
        let mut numbers = vec![0.0f32; table.dim as usize];
        let weights = &self.weights;
        let mut compare = |at: usize, stored: Option<&[u8]>| {
            let now = &weights[at * weight_bytes..(at + 1) * weight_bytes];
            bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(now);
            let row = keys[at].row;
            let coded = codec.encode(&numbers, &mut code);
            coded.map_err(|error| error.with("table", &table.name).with("row", row.0))?;
            is_changed[at] = match stored {
                Some(before) => before[..code.len()] != code,
                None => !initial.is(table, codec, row, &code),
            };
            Ok(())
        };
        self.rows.read(&keys[..known], &mut compare)?;
        for at in known..keys.len() {
            compare(at, None)?;
        }
        for (at, &(count, row)) in self.waiting.iter().enumerate() {
            if is_changed[at] {
                sink(count, row, &self.weights[at * weight_bytes..(at + 1) * weight_bytes])?;
            }
        }
        self.waiting.clear();
        self.weights.clear();
        Ok(())
    }

    // Takes a row that the store has not. Where the snapshot has it, that is of a later state than
    // the one the store was reopened at, and the row goes back to its initial value.
    fn absent(
        &mut self,
        table: ComparedTable<'_>,
        row: RowId,
        sink: &mut ChangeSink<'_>,
    ) -> Result<()> {
        let key = RowKey::new(table.id, row);
        if !holds(self.rows.schema(), key) || !self.base.holds_row(key)? {
            return Ok(());
        }
        let mut initial = vec![0.0f32; table.schema.record_words()];
        init_record(table.schema, row.0, &mut initial);
        let (weights, _) = initial.split_at(table.schema.dim as usize);
        let weights = bytemuck::cast_slice(weights);
        self.add_stored(table, StoredRow { count: 0, row, weights }, sink)
    }
}
