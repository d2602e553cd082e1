//! A snapshot below the waist: unique rows in, records out.
//!
//! Reads go to the pages, past the row cache. A record is the row's weights, or its code as it
//! lies on its page, and a use count of 0: snapshots keep neither optimizer state nor counts.

use std::sync::Arc;

use tierbed_core::stats::StoreStats;
use tierbed_core::store::{check_keys, RowSink, ScanSink};
use tierbed_core::{Result, RowId, RowKey, RowStore, Schema, TableId};

use crate::layers::LayersLease;
use crate::reader::Reader;
use crate::scratch::Filled;
use crate::snapshot::{Place, Snapshot};

/// Rows looked at per step of a scan, stored or not.
const SCAN_ROWS: u64 = 1 << 14;

/// The rows of a snapshot as a [`RowStore`].
#[derive(Debug)]
pub struct SnapshotRows {
    snapshot: Arc<Snapshot>,
    /// What answered when this was made.
    layers: LayersLease,
    keeps_codes: bool,
    stats: StoreStats,
}

impl SnapshotRows {
    /// Reads `snapshot` row by row, as it is now: deltas that are applied wait until this is
    /// dropped.
    #[must_use]
    pub fn new(snapshot: Arc<Snapshot>) -> Self {
        let layers = snapshot.layers();
        Self { snapshot, layers, keeps_codes: false, stats: StoreStats::default() }
    }

    /// As [`new`](Self::new), with codes in place of weights. Of an f32 table that is the same.
    #[must_use]
    pub fn coded(snapshot: Arc<Snapshot>) -> Self {
        Self { keeps_codes: true, ..Self::new(snapshot) }
    }

    /// Words that a row takes in a scratch.
    fn words(&self, key: RowKey) -> usize {
        if self.keeps_codes {
            self.snapshot.code_words(key, &self.layers)
        } else {
            self.snapshot.dim(key, &self.layers)
        }
    }

    /// Hands the rows of the scratch to `sink`; positions count from `first`.
    #[expect(clippy::indexing_slicing, reason = "every unique row of a scratch has a state")]
    fn hand_out(&mut self, reader: &Reader, first: usize, sink: &mut RowSink<'_>) -> Result<()> {
        let scratch = &reader.scratch;
        let mut record = Vec::new();
        for (at, key) in scratch.keys.iter().enumerate() {
            self.stats.rows_read += 1;
            if scratch.filled[at] == Filled::Initial {
                self.stats.rows_absent += 1;
                sink(first + at, None)?;
                continue;
            }
            record.clear();
            let bytes: &[u8] = bytemuck::cast_slice(scratch.row(at, self.words(*key)));
            let row_bytes = match self.keeps_codes {
                true => self.snapshot.shape(*key, &self.layers).row_bytes,
                false => bytes.len(),
            };
            record.extend_from_slice(&bytes[..row_bytes]);
            record.extend_from_slice(&0u32.to_le_bytes());
            sink(first + at, Some(&record))?;
        }
        Ok(())
    }
}

impl RowStore for SnapshotRows {
    fn schema(&self) -> &Schema {
        &self.layers.schema
    }

    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        let snapshot = Arc::clone(&self.snapshot);
        check_keys(&self.layers.schema, keys.iter().copied())?;
        let mut guard = snapshot.take_reader();
        let reader = guard.get();
        let mut first = 0;
        while first < keys.len() {
            let (_, rest) = keys.split_at(first);
            reader.scratch.start(rest.len());
            reader.scratch.keeps_codes = self.keeps_codes;
            let fitting =
                rest.iter().take_while(|key| reader.scratch.add(**key, self.words(**key)));
            let count = fitting.count();
            assert!(count > 0, "a row does not fit an empty scratch");
            self.stats.pages_read += snapshot.fetch(reader, &self.layers, false)?.pages_read;
            self.hand_out(reader, first, sink)?;
            first += count;
        }
        Ok(())
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        let snapshot = Arc::clone(&self.snapshot);
        let row_count = self.layers.schema.table(table)?.row_count;
        let mut keys = Vec::new();
        for first in (0..row_count).step_by(SCAN_ROWS as usize) {
            keys.clear();
            for row in first..row_count.min(first + SCAN_ROWS) {
                let key = RowKey::new(table, RowId(row));
                if snapshot.place_of(key, &self.layers)? != Place::Nowhere {
                    keys.push(key);
                }
            }
            let rows = &keys;
            self.read(rows, &mut |at, record| match (rows.get(at), record) {
                (Some(key), Some(record)) => sink(key.row, record),
                (key, _) => panic!("row {at} of a scan, {key:?}, was stored and is absent"),
            })?;
        }
        Ok(())
    }

    fn stats(&self) -> StoreStats {
        let io = self.snapshot.stats().io;
        StoreStats { disk_bytes: self.snapshot.disk_bytes(), io, ..self.stats.clone() }
    }
}
