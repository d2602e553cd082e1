//! Rows that differ from a snapshot, found by comparing, so that none is missed.
//!
//! No list of changes is kept while training: rows and snapshot are read beside each other, in
//! row order, and compared bit by bit, as they are coded. That is right after restarts, evictions,
//! imports and crashes, for any snapshot of the store, at the price of reading both.

#![expect(clippy::indexing_slicing, reason = "a store answers the keys asked for")]

use std::sync::Arc;

use tierbed_core::{Error, Result, RowId, RowKey, RowStore, TableId, TableSchema};
use tierbed_kernels::init_record;
use tierbed_snapshot::delta::holds;
use tierbed_snapshot::{InitialCode, Snapshot, SnapshotRows};

/// Rows compared at once.
const CHUNK_ROWS: usize = 512;

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

/// The rows of a snapshot, to compare others with.
pub(crate) struct Comparer {
    base: Arc<Snapshot>,
    rows: SnapshotRows,
    waiting: Vec<(u32, RowId)>,
    weights: Vec<u8>,
}

impl Comparer {
    pub(crate) fn new(base: Arc<Snapshot>) -> Self {
        let rows = SnapshotRows::coded(Arc::clone(&base));
        Self { base, rows, waiting: Vec::new(), weights: Vec::new() }
    }

    /// Adds a row of `table`, in row order, to those to compare; hands changes to `sink`.
    pub(crate) fn add(
        &mut self,
        table: ComparedTable<'_>,
        stored: StoredRow<'_>,
        sink: &mut ChangeSink<'_>,
    ) -> Result<()> {
        let StoredRow { count, row, weights } = stored;
        assert!(self.waiting.len() < CHUNK_ROWS, "{} rows wait", self.waiting.len());
        if self.waiting.last().is_some_and(|(_, before)| *before >= row) {
            return Err(
                Error::corruption("a store brings its rows out of order").with("row", row.0)
            );
        }
        self.waiting.push((count, row));
        self.weights.extend_from_slice(weights);
        if self.waiting.len() < CHUNK_ROWS {
            return Ok(());
        }
        self.finish(table, sink)
    }

    /// Compares what waits.
    pub(crate) fn finish(
        &mut self,
        table: ComparedTable<'_>,
        sink: &mut ChangeSink<'_>,
    ) -> Result<()> {
        let ComparedTable { id, schema: table } = table;
        let weight_bytes = 4 * table.dim as usize;
        let waiting_bytes = self.waiting.len() * weight_bytes;
        assert_eq!(self.weights.len(), waiting_bytes, "every row that waits has its weights");
        let keys: Vec<RowKey> = self.waiting.iter().map(|(_, row)| RowKey::new(id, *row)).collect();
        let known = keys.partition_point(|key| holds(self.base.schema(), *key));
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

    /// Finds rows that the snapshot has and `store` has not: the snapshot is of a later state
    /// than the one the store was reopened at. They go back to their initial values.
    pub(crate) fn find_lost(
        &mut self,
        table: ComparedTable<'_>,
        store: &mut dyn RowStore,
        sink: &mut ChangeSink<'_>,
    ) -> Result<()> {
        let ComparedTable { id, schema: table } = table;
        assert!(self.waiting.is_empty(), "rows wait to be compared");
        if self.base.schema().table(id).is_err() {
            return Ok(());
        }
        let weight_bytes = 4 * table.dim as usize;
        let (mut keys, mut initial) = (Vec::new(), vec![0.0f32; table.record_words()]);
        let mut find = |keys: &mut Vec<RowKey>| {
            let result = store.read(keys, &mut |at, record| match record {
                Some(_) => Ok(()),
                None => {
                    let row = keys[at].row;
                    init_record(table, row.0, &mut initial);
                    let bytes: &[u8] = bytemuck::cast_slice(&initial);
                    sink(0, row, &bytes[..weight_bytes])
                }
            });
            keys.clear();
            result
        };
        self.rows.scan(id, &mut |row, _| {
            keys.push(RowKey::new(id, row));
            if keys.len() < CHUNK_ROWS {
                return Ok(());
            }
            find(&mut keys)
        })?;
        find(&mut keys)
    }
}
