//! Rows by number: for import, export, inspection and tests. Nothing is cached on the way.

use tierbed_core::store::{RowWrite, ScanSink};
use tierbed_core::{Error, Result, RowId, RowKey, RowStore, TableId, TableSchema, TrainStore};
use tierbed_kernels::{init_record, Hyper};

use crate::engine::{RowVisitor, TableRows};
use crate::window::engine::WindowEngine;

/// Rows moved at once.
const CHUNK_ROWS: usize = 512;
/// Words of rows that are written together, unless their number is smaller: 1 MiB.
const WRITE_WORDS: usize = 1 << 18;

/// Rows to write by number.
#[derive(Debug, Clone, Copy)]
pub struct NewRows<'a> {
    /// Weights, `[N, D]`.
    pub weights: &'a [f32],
    /// Optimizer state, `[N, S]`; without it the state starts anew.
    pub state: Option<&'a [f32]>,
    /// How many update steps touched each row, `[N]`; without it 0.
    pub use_counts: Option<&'a [i64]>,
}

impl TableRows for WindowEngine {
    fn shape_of(&self, table: TableId) -> Result<TableSchema> {
        self.schema.table(table).cloned()
    }

    fn visit_rows(
        &mut self,
        table: TableId,
        first: u64,
        count: usize,
        visit: &mut RowVisitor<'_>,
    ) -> Result<()> {
        self.poison.check()?;
        let shape = self.shape_of(table)?;
        check_range(&shape, first, count)?;
        self.visit_chunks(&shape, count, &mut |at| RowKey::new(table, RowId(first + at)), visit)
    }

    #[expect(clippy::indexing_slicing, reason = "positions are those of the list")]
    fn visit_listed(
        &mut self,
        table: TableId,
        rows: &[RowId],
        visit: &mut RowVisitor<'_>,
    ) -> Result<()> {
        self.poison.check()?;
        let shape = self.shape_of(table)?;
        let key = &mut |at: u64| RowKey::new(table, rows[at as usize]);
        self.visit_chunks(&shape, rows.len(), key, visit)
    }

    #[expect(clippy::indexing_slicing, reason = "parts are of as many rows, as asserted")]
    fn write_rows(&mut self, table: TableId, first: u64, rows: NewRows<'_>) -> Result<()> {
        self.poison.check()?;
        let schema = self.schema.clone();
        let shape = schema.table(table)?;
        let (dim, words) = (shape.dim as usize, shape.record_words());
        let state_words = words - dim - 1;
        let NewRows { weights, state, use_counts } = rows;
        let count = weights.len() / dim;
        assert_eq!(weights.len(), count * dim, "whole rows");
        assert!(state.is_none_or(|state| state.len() == count * state_words), "a state per row");
        assert!(use_counts.is_none_or(|counts| counts.len() == count), "a use count per row");
        check_range(shape, first, count)?;
        // So many that a store writes whole pages side by side at once.
        let chunk_rows = (WRITE_WORDS / words).max(CHUNK_ROWS).min(count.max(1));
        let mut records = vec![0.0f32; chunk_rows * words];
        let mut done = 0;
        while done < count {
            let now = chunk_rows.min(count - done);
            for (at, record) in records.chunks_exact_mut(words).take(now).enumerate() {
                let row = done + at;
                if state.is_none() || use_counts.is_none() {
                    init_record(shape, first + row as u64, record);
                }
                record[..dim].copy_from_slice(&weights[row * dim..(row + 1) * dim]);
                if let Some(state) = state {
                    let own = &state[row * state_words..(row + 1) * state_words];
                    record[dim..words - 1].copy_from_slice(own);
                }
                if let Some(counts) = use_counts {
                    record[words - 1] = count_word(counts[row])?;
                }
            }
            self.write_records(table, first + done as u64, &records[..now * words])?;
            done += now;
        }
        Ok(())
    }

    fn set_steps_done(&mut self, table: TableId, steps: u64) -> Result<()> {
        let hyper = self.hyper(table)?;
        self.take_over_run(table, Hyper { step: steps, ..hyper })
    }
}

impl WindowEngine {
    // Visits `count` rows, whose keys increase, in chunks.
    fn visit_chunks(
        &mut self,
        shape: &TableSchema,
        count: usize,
        key: &mut dyn FnMut(u64) -> RowKey,
        visit: &mut RowVisitor<'_>,
    ) -> Result<()> {
        let chunk_rows = CHUNK_ROWS.min(count.max(1));
        let mut records = vec![0.0f32; chunk_rows * shape.record_words()];
        for done in (0..count).step_by(chunk_rows) {
            let now = chunk_rows.min(count - done);
            let keys: Vec<RowKey> = (done as u64..(done + now) as u64).map(&mut *key).collect();
            self.copy_records(shape, &keys, &mut records)?;
            for (at, record) in records.chunks_exact(shape.record_words()).take(now).enumerate() {
                visit(done + at, record);
            }
        }
        Ok(())
    }

    /// Overwrites rows from `first` on: `records` are whole records, one after the other.
    ///
    /// # Errors
    /// As [`write_rows`](TableRows::write_rows).
    pub fn write_records(&mut self, table: TableId, first: u64, records: &[f32]) -> Result<()> {
        self.poison.check()?;
        let schema = self.schema.clone();
        let shape = schema.table(table)?;
        let words = shape.record_words();
        assert!(records.len().is_multiple_of(words), "whole records");
        check_range(shape, first, records.len() / words)?;
        let mut on_disk = Vec::new();
        for (row, record) in (first..).zip(records.chunks_exact(words)) {
            let key = RowKey::new(table, RowId(row));
            match self.buffer.as_mut().and_then(|buffer| buffer.peek_mut(key)) {
                Some(place) => place.copy_from_slice(record),
                None => on_disk.push(RowWrite { key, record: bytemuck::cast_slice(record) }),
            }
        }
        self.store.write(&on_disk)
    }

    /// Visits every written row of `table` in row order, as row id and record bytes.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, otherwise the store's and those of `sink`.
    pub fn scan_rows(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        if let Some(buffer) = &mut self.buffer {
            buffer.flush(&mut self.store)?;
        }
        self.store.scan(table, sink)
    }

    /// Takes over whole records from another engine; keys strictly increasing. For a new engine:
    /// rows already in memory are not looked at.
    ///
    /// # Errors
    /// The store's.
    pub fn take_over_rows(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.poison.check()?;
        self.release_buffer()?;
        self.store.write(rows)
    }

    /// Takes over the hyperparameters of `table` and the steps it did, from another engine.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or values that are negative or not finite.
    pub fn take_over_run(&mut self, table: TableId, hyper: Hyper) -> Result<()> {
        self.set_hyper(table, hyper)?;
        self.hypers.of_mut(table).step = hyper.step;
        Ok(())
    }

    // Copies the records of `keys` (increasing, one table) to `out`.
    #[expect(clippy::indexing_slicing, reason = "a store answers the keys asked for")]
    fn copy_records(
        &mut self,
        shape: &TableSchema,
        keys: &[RowKey],
        out: &mut [f32],
    ) -> Result<()> {
        let words = shape.record_words();
        assert!(out.len() >= keys.len() * words, "{} rows in {} words", keys.len(), out.len());
        let mut absent = Vec::new();
        for (at, (key, out)) in keys.iter().zip(out.chunks_exact_mut(words)).enumerate() {
            match self.buffer.as_ref().and_then(|buffer| buffer.peek(*key)) {
                Some(record) => out.copy_from_slice(record),
                None => absent.push((at, *key)),
            }
        }
        let wanted: Vec<RowKey> = absent.iter().map(|(_, key)| *key).collect();
        self.store.read(&wanted, &mut |position, record| {
            let (at, key) = absent[position];
            let place = &mut out[at * words..(at + 1) * words];
            match record {
                Some(bytes) => bytemuck::cast_slice_mut(place).copy_from_slice(bytes),
                None => init_record(shape, key.row.0, place),
            }
            Ok(())
        })
    }
}

/// Returns the last word of a record that was used so often.
fn count_word(uses: i64) -> Result<f32> {
    let uses = u32::try_from(uses);
    let uses = uses.map_err(|_| Error::invalid("a use count is below 2^32, and not negative"))?;
    Ok(f32::from_bits(uses))
}

pub(crate) fn check_range(table: &TableSchema, first: u64, count: usize) -> Result<()> {
    match first.checked_add(count as u64) {
        Some(end) if end <= table.row_count => Ok(()),
        _ => Err(tierbed_core::store::out_of_range(
            table,
            format_args!("{first}..{}", first.saturating_add(count as u64)),
        )),
    }
}
