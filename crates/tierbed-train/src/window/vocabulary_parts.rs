//! Open tables whose rows are divided over ranks: one rank keeps the index, others hold rows.
//!
//! The rank of the index gives rows to ids and tells the others which. A table of theirs grows as
//! it is told, and rows that were freed start again where they are held.

use tierbed_core::store::RowWrite;
use tierbed_core::{Error, Result, RowId, RowKey, Schema, TableId, TrainStore};
use tierbed_kernels::init_record;
use tierbed_vocab::{Evicted, IdEntry};

use crate::window::engine::WindowEngine;
use crate::window::vocabularies::WithIndex;

/// Rows that are written at once.
const WRITE_ROWS: usize = 1024;

impl WindowEngine {
    /// Makes room for `row_count` rows of open table `table`, which another rank gives to ids.
    ///
    /// # Errors
    /// `Invalid` when the table is not open, or the budget does not reach; otherwise the store's,
    /// and the engine is poisoned.
    pub fn grow_open_table(&mut self, table: TableId, row_count: u64) -> Result<()> {
        self.poison.check()?;
        let have = self.schema.table(table)?.row_count;
        if self.vocabulary(table).is_none() {
            return Err(Error::invalid("only tables of open vocabulary grow")
                .with("table", &self.schema.table(table)?.name));
        }
        if row_count <= have {
            return Ok(());
        }
        self.release_buffer()?;
        let result = self.store.grow_table(table, row_count.max(2 * have));
        self.poison.on_any(result)?;
        self.refresh_schema();
        Ok(())
    }

    /// Gives `rows` of open table `table` their initial values, without optimizer state.
    ///
    /// # Errors
    /// `Invalid` for an unknown table or a row that it has not; otherwise the store's, and the
    /// engine is poisoned.
    pub fn reset_rows(&mut self, table: TableId, rows: &[u64]) -> Result<()> {
        self.poison.check()?;
        let row_count = self.schema.table(table)?.row_count;
        if let Some(row) = rows.iter().find(|&&row| row >= row_count) {
            return Err(Error::invalid("no such row").with("row", row).with("rows", row_count));
        }
        // What is dirty in the buffer must not be written over the initial values later.
        self.release_buffer()?;
        let mut sorted = rows.to_vec();
        sorted.sort_unstable();
        let schema = self.schema.clone();
        let result = write_initial(&mut self.store, &schema, table, &sorted);
        self.poison.on_any(result)
    }

    /// As [`evict`](Self::evict), of a table whose rows other ranks hold too: returns the freed
    /// rows, and only those that `holds` names start again here.
    ///
    /// # Errors
    /// As [`evict`](Self::evict).
    pub fn evict_rows(
        &mut self,
        table: TableId,
        now: u32,
        holds: &dyn Fn(u64) -> bool,
    ) -> Result<(Evicted, Vec<u64>)> {
        let mut freed = Vec::new();
        let schema = self.schema.clone();
        let evicted = self.evict_with(table, now, &mut |store, rows| {
            freed.extend_from_slice(rows);
            let held: Vec<u64> = rows.iter().copied().filter(|&row| holds(row)).collect();
            write_initial(store, &schema, table, &held)
        })?;
        Ok((evicted, freed))
    }
}

/// What of an index is copied next.
#[derive(Debug, Clone, Copy)]
pub enum IndexPart<'a> {
    /// The index is begun, which has given rows below this one.
    NextRow(u64),
    /// Some ids.
    Entries(&'a [IdEntry]),
    /// Some rows that are free.
    Free(&'a [u64]),
    /// There is no more.
    End,
}

impl WindowEngine {
    /// Visits all ids of open table `table`, also those that wait for a row, in hash order.
    ///
    /// # Errors
    /// `Invalid` when the table is not open, otherwise the store's and the visitor's.
    pub fn visit_entries(
        &mut self,
        table: TableId,
        visit: &mut dyn FnMut(IdEntry) -> Result<()>,
    ) -> Result<()> {
        let WithIndex { index, pages, store } = self.with_index(table)?;
        index.visit_entries(pages, store, visit)
    }

    /// Visits the free rows of open table `table`; the last one is given first.
    ///
    /// # Errors
    /// As [`visit_entries`](Self::visit_entries).
    pub fn visit_free_rows(
        &mut self,
        table: TableId,
        visit: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let WithIndex { index, pages, store } = self.with_index(table)?;
        index.visit_free(pages, store, visit)
    }

    /// Takes over the next part of a copy of an index, into open table `table`.
    ///
    /// # Errors
    /// `Invalid` when the table has ids already or the budget does not reach, `Corruption` for a
    /// copy of no index; otherwise the store's. The engine is poisoned then.
    pub fn copy_index(&mut self, table: TableId, part: IndexPart<'_>) -> Result<()> {
        if let IndexPart::Entries(entries) = part {
            self.make_id_room(table, entries.len() as u64)?;
        }
        let WithIndex { index, pages, store } = self.with_index(table)?;
        let result = match part {
            IndexPart::NextRow(row) => index.begin_copy(row),
            IndexPart::Entries(entries) => index.copy_entries(pages, store, entries),
            IndexPart::Free(rows) => index.copy_free(pages, store, rows),
            IndexPart::End => index.finish_copy(),
        };
        let result = match part {
            // Nothing has happened yet.
            IndexPart::NextRow(_) => result,
            _ => self.poison.on_any(result),
        };
        // Splits and free rows may have lengthened hidden tables.
        self.refresh_schema();
        result
    }
}

/// Writes the initial values of `rows`, which increase.
///
/// # Errors
/// The store's.
pub(super) fn write_initial(
    store: &mut dyn TrainStore,
    schema: &Schema,
    table: TableId,
    rows: &[u64],
) -> Result<()> {
    let shape = schema.table(table)?;
    let words = shape.record_words();
    let mut records: Vec<f32> = Vec::new();
    for some in rows.chunks(WRITE_ROWS) {
        records.clear();
        records.resize(some.len() * words, 0.0);
        for (&row, record) in some.iter().zip(records.chunks_exact_mut(words)) {
            init_record(shape, row, record);
        }
        let writes: Vec<RowWrite<'_>> = some
            .iter()
            .zip(records.chunks_exact(words))
            .map(|(&row, record)| RowWrite {
                key: RowKey::new(table, RowId(row)),
                record: bytemuck::cast_slice(record),
            })
            .collect();
        store.write(&writes)?;
    }
    Ok(())
}

impl WindowEngine {
    /// Sets `count` new rows of open table `table` aside; returns the first one. See
    /// [`give_rows`](Self::give_rows).
    ///
    /// # Errors
    /// `Invalid` when the table is not open.
    pub(crate) fn set_rows_aside(&mut self, table: TableId, count: u64) -> Result<u64> {
        Ok(self.with_index(table)?.index.set_rows_aside(count))
    }

    /// Gives new ids of open table `table` rows that were set aside: (hash, row) of each, by rising
    /// hashes.
    ///
    /// # Errors
    /// `Invalid` when the table is not open or the budget does not reach; otherwise the store's,
    /// and the engine is poisoned.
    pub(crate) fn give_rows(
        &mut self,
        table: TableId,
        given: &[(u64, u64)],
        now: u32,
    ) -> Result<()> {
        self.make_id_room(table, given.len() as u64)?;
        let WithIndex { index, pages, store } = self.with_index(table)?;
        let result = index.give(pages, store, given, now);
        self.poison.on_any(result)?;
        // Splits may have lengthened the index.
        self.refresh_schema();
        Ok(())
    }
}
