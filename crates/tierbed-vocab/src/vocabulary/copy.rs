//! Copies of an index: all that it knows, in an order of its own, whatever its pages are.
//!
//! A copy gives the same rows to the same ids from then on: it has the rows that are free in the
//! order in which they are given again.

use tierbed_core::{Error, Result, TrainStore};

use super::{State, Vocabulary, SHARED_ROW};
use crate::bucket::{mix, unmix, Bucket, Entry};
use crate::pages::PageCache;

/// What an index knows of an id.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IdEntry {
    /// The id.
    pub id: i64,
    /// Its row; `None` while it waits for one.
    pub row: Option<u64>,
    /// Steps it appeared in, as evictions made them decay.
    pub count: f32,
    /// When it was trained last, in the unit of the policy's `ttl`.
    pub seen: u32,
}

impl Vocabulary {
    /// Visits all ids, also those that wait for a row, in the order of their hashes.
    ///
    /// # Errors
    /// As [`find`](Self::find), and the visitor's.
    pub fn visit_entries(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        visit: &mut dyn FnMut(IdEntry) -> Result<()>,
    ) -> Result<()> {
        let mut slot = 0;
        loop {
            let keys = self.bring_next(pages, store, &mut slot)?;
            if keys.is_empty() {
                return Ok(());
            }
            for key in keys {
                for entry in Bucket::parse(pages.page(store, key)?)?.entries() {
                    let row = entry.row.map(|row| self.checked_row(row)).transpose()?;
                    let Entry { hash, count, seen, .. } = entry;
                    visit(IdEntry { id: unmix(hash), row, count, seen })?;
                }
            }
        }
    }

    /// Visits the rows that are free; the last one is given first.
    ///
    /// # Errors
    /// As [`find`](Self::find), and the visitor's.
    pub fn visit_free(
        &self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        visit: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        for at in 0..self.state.free_count {
            visit(self.checked_row(self.free.entry(pages, store, at)?)?)?;
        }
        Ok(())
    }

    /// Begins to take over a copy, of an index that has given rows below `next_row`.
    ///
    /// # Errors
    /// `Invalid` when this index knows ids already, `Corruption` for a row that cannot be.
    pub fn begin_copy(&mut self, next_row: u64) -> Result<()> {
        let state = &mut self.state;
        let is_new = state.next_row == SHARED_ROW + 1 && state.id_count + state.waiting_count == 0;
        if !is_new {
            return Err(Error::invalid("the table has ids already")
                .with("table", &state.table)
                .with("ids", state.id_count)
                .with("remedy", "load into a new store"));
        }
        if next_row == SHARED_ROW {
            return Err(
                Error::corruption("copy of an index has no shared row").with("table", &state.table)
            );
        }
        state.next_row = next_row;
        Ok(())
    }

    /// Takes over some ids; the caller has made [room](Self::growth) for as many.
    ///
    /// # Errors
    /// `Corruption` for an id that is there, or a row that was never given; otherwise the store's.
    pub fn copy_entries(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        entries: &[IdEntry],
    ) -> Result<()> {
        for entry in entries {
            let row = entry.row.map(|row| self.checked_row(row)).transpose()?;
            let hash = mix(entry.id);
            pages.bring(store, &[self.page_of(hash)])?;
            let copied = Entry { hash, row, count: entry.count, seen: entry.seen };
            if !self.place(pages, store, &copied)? {
                return Err(Error::corruption("copy of an index has an id twice")
                    .with("table", &self.state.table)
                    .with("id", entry.id));
            }
            self.state.id_count += u64::from(row.is_some());
            self.state.waiting_count += u64::from(row.is_none());
        }
        Ok(())
    }

    /// Takes over rows that are free, in the order of [`visit_free`](Self::visit_free).
    ///
    /// # Errors
    /// `Corruption` for a row that was never given, otherwise the store's.
    pub fn copy_free(
        &mut self,
        pages: &mut PageCache,
        store: &mut dyn TrainStore,
        rows: &[u64],
    ) -> Result<()> {
        for &row in rows {
            let row = self.checked_row(row)?;
            self.free.push(pages, store, &mut self.state.free_count, row)?;
        }
        Ok(())
    }

    /// Ends what [`begin_copy`](Self::begin_copy) began.
    ///
    /// # Errors
    /// `Corruption` when rows are missing, or some are both free and in use.
    pub fn finish_copy(&self) -> Result<()> {
        let State { next_row, id_count, free_count, .. } = &self.state;
        if id_count + free_count == next_row - 1 {
            return Ok(());
        }
        Err(Error::corruption("copy of an index has other rows than it gave")
            .with("table", &self.state.table)
            .with("rows", next_row)
            .with("ids", id_count)
            .with("free", free_count))
    }
}
