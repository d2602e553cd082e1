//! Rows by number: for import, export, inspection and tests. Nothing is cached on the way.

use tierbed_core::store::{RowWrite, ScanSink};
use tierbed_core::{Error, Result, RowId, RowKey, TableId, TableSchema};
use tierbed_kernels::{init_record, Hyper};

use crate::window::engine::Engine;

/// Rows moved at once.
const CHUNK_ROWS: usize = 512;

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

impl WindowEngine {
    /// Visits rows `first..first + count` of `table` in order, as whole records of words: the
    /// newest value of rows in memory, on disk, or initial.
    ///
    /// # Errors
    /// `Invalid` when rows are out of range, otherwise the store's.
    pub fn visit_rows(
        &mut self,
        table: TableId,
        first: u64,
        count: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.poison.check()?;
        let schema = self.schema.clone();
        let shape = schema.table(table)?;
        check_range(shape, first, count)?;
        let mut records = vec![0.0f32; CHUNK_ROWS.min(count.max(1)) * shape.record_words()];
        let mut keys = Vec::with_capacity(CHUNK_ROWS.min(count));
        let mut done = 0;
        while done < count {
            let now = CHUNK_ROWS.min(count - done);
            keys.clear();
            let rows = (0..now as u64).map(|at| first + done as u64 + at);
            keys.extend(rows.map(|row| RowKey::new(table, RowId(row))));
            self.copy_records(shape, &keys, &mut records)?;
            for (at, record) in records.chunks_exact(shape.record_words()).take(now).enumerate() {
                visit(done + at, record);
            }
            done += now;
        }
        Ok(())
    }

    /// Copies the weights of `rows` (any order, duplicates allowed) into `out`, `[N, D]`.
    ///
    /// # Errors
    /// As [`visit_rows`](Self::visit_rows).
    pub fn gather_rows(&mut self, table: TableId, rows: &[i64], out: &mut [f32]) -> Result<()> {
        self.poison.check()?;
        let schema = self.schema.clone();
        let shape = schema.table(table)?;
        let dim = shape.dim as usize;
        if out.len() != rows.len() * dim {
            return Err(Error::invalid("output must hold one row per id")
                .with("rows", rows.len())
                .with("dim", dim)
                .with("found_values", out.len()));
        }
        let mut records = vec![0.0f32; CHUNK_ROWS * shape.record_words()];
        for (ids, out) in rows.chunks(CHUNK_ROWS).zip(out.chunks_mut(CHUNK_ROWS * dim)) {
            let mut keys = Vec::with_capacity(ids.len());
            for &id in ids {
                let row =
                    u64::try_from(id).map_err(|_| tierbed_core::store::out_of_range(shape, id))?;
                check_range(shape, row, 1)?;
                keys.push(RowKey::new(table, RowId(row)));
            }
            let mut sorted = keys.clone();
            sorted.sort_unstable();
            sorted.dedup();
            self.copy_records(shape, &sorted, &mut records)?;
            for (key, out) in keys.iter().zip(out.chunks_exact_mut(dim)) {
                let at = sorted.binary_search(key).unwrap_or(0) * shape.record_words();
                out.copy_from_slice(records.get(at..at + dim).unwrap_or(&[]));
            }
        }
        Ok(())
    }

    /// Overwrites rows from `first` on: `records` are whole records, one after the other.
    ///
    /// # Errors
    /// As [`visit_rows`](Self::visit_rows).
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

    /// Overwrites rows from `first` on.
    ///
    /// # Errors
    /// As [`visit_rows`](Self::visit_rows); `Invalid` for a use count that is none.
    ///
    /// # Panics
    /// When the parts of `rows` are not of as many rows.
    pub fn write_rows(&mut self, table: TableId, first: u64, rows: NewRows<'_>) -> Result<()> {
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
        let mut records = vec![0.0f32; CHUNK_ROWS.min(count.max(1)) * words];
        let mut done = 0;
        while done < count {
            let now = CHUNK_ROWS.min(count - done);
            for (at, record) in records.chunks_exact_mut(words).take(now).enumerate() {
                let row = done + at;
                init_record(shape, first + row as u64, record);
                let uses = use_counts.and_then(|counts| counts.get(row));
                let uses = uses.map(|&uses| count_word(uses)).transpose()?;
                let state =
                    state.and_then(|all| all.get(row * state_words..(row + 1) * state_words));
                let weights = weights.get(row * dim..(row + 1) * dim);
                let parts =
                    [(0, weights), (dim, state), (words - 1, uses.as_ref().map(|w| &w[..]))];
                for (from, part) in parts {
                    let Some(part) = part else { continue };
                    if let Some(place) = record.get_mut(from..from + part.len()) {
                        place.copy_from_slice(part);
                    }
                }
            }
            let filled = records.get(..now * words).unwrap_or(&[]);
            self.write_records(table, first + done as u64, filled)?;
            done += now;
        }
        Ok(())
    }

    /// Visits every written row of `table` in row order, as row id and record bytes.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, otherwise the store's and those of `sink`.
    pub fn scan_rows(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        if let Some(buffer) = &mut self.buffer {
            buffer.flush(self.store.as_mut())?;
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
        if let Some(run) = self.tables.get_mut(table.0 as usize) {
            run.hyper.step = hyper.step;
        }
        Ok(())
    }

    // Copies the records of `keys` (increasing, one table) to `out`.
    fn copy_records(
        &mut self,
        shape: &TableSchema,
        keys: &[RowKey],
        out: &mut [f32],
    ) -> Result<()> {
        let words = shape.record_words();
        let mut absent = Vec::new();
        for (at, (key, out)) in keys.iter().zip(out.chunks_exact_mut(words)).enumerate() {
            match self.buffer.as_ref().and_then(|buffer| buffer.peek(*key)) {
                Some(record) => out.copy_from_slice(record),
                None => absent.push((at, *key)),
            }
        }
        let wanted: Vec<RowKey> = absent.iter().map(|(_, key)| *key).collect();
        self.store.read(&wanted, &mut |position, record| {
            let Some(&(at, key)) = absent.get(position) else { return Ok(()) };
            let Some(place) = out.get_mut(at * words..(at + 1) * words) else { return Ok(()) };
            match record {
                Some(bytes) => bytemuck::cast_slice_mut(place).copy_from_slice(bytes),
                None => init_record(shape, key.row.0, place),
            }
            Ok(())
        })
    }
}

/// Returns the last word of a record that was used so often.
fn count_word(uses: i64) -> Result<[f32; 1]> {
    let uses = u32::try_from(uses);
    let uses = uses.map_err(|_| Error::invalid("a use count is below 2^32, and not negative"))?;
    Ok([f32::from_bits(uses)])
}

fn check_range(table: &TableSchema, first: u64, count: usize) -> Result<()> {
    match first.checked_add(count as u64) {
        Some(end) if end <= table.row_count => Ok(()),
        _ => Err(tierbed_core::store::out_of_range(
            table,
            format_args!("{first}..{}", first.saturating_add(count as u64)),
        )),
    }
}
