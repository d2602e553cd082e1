//! Ids of open tables: they are compared with the plan, which says what rows they have.
//!
//! A plan of open tables is made of rows and knows its batches by their ids. So a batch of ids is
//! compared, and its rows are read from the window, without an index. Lookup and update then get
//! rows, and compare these with what was read last.
//!
//! Ids have rows before they are trained, since the plan was made before. Rows are given in the
//! order of training, so one number for each table says which of them training has come to.

#![expect(clippy::indexing_slicing, reason = "the batch is the planned one, whose rows are there")]

use tierbed_core::{Bags, Error, Result, TableId};
use tierbed_kernels::FeatureLayout;

use super::scratch::Translated;
use super::PlannedEngine;
use crate::planned::plan::{ids_checksum, Batch};

impl PlannedEngine {
    /// Writes to `rows`, `[E]`, the row of every id of `bags`, if they are the next batch of the
    /// plan; tells whether they are.
    ///
    /// # Errors
    /// `Invalid` for shapes out of range, otherwise the disk's.
    pub fn translate(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        rows: &mut [i64],
    ) -> Result<bool> {
        if rows.len() != bags.indices.len() {
            return Err(Error::invalid("translation needs one row per index")
                .with("indices", bags.indices.len())
                .with("rows", rows.len()));
        }
        let batch = self.enter_batch(plan, bags, plan.output_len(bags))?;
        self.counters.ids_checked += bags.indices.len() as u64;
        if !batch.is_of(bags.indices.len(), ids_checksum(bags)) {
            return Ok(false);
        }
        self.unpack_entries(plan, bags, batch)?;
        let window = &self.pipeline.current.plan;
        if self.scratch.rows_window != Some(self.counters.window_count) {
            self.scratch.rows_window = None;
            window.unpack_rows_into(&mut self.scratch.rows)?;
            self.scratch.rows_window = Some(self.counters.window_count);
        }
        for (at, feature) in plan.features().iter().enumerate() {
            let range = plan.range(bags, at);
            let table = &window.tables()[feature.table.0 as usize];
            let found = &self.scratch.rows[table.first as usize..][..table.count as usize];
            let entries = &self.scratch.entries[range.clone()];
            for (row, &entry) in rows[range].iter_mut().zip(entries) {
                *row = found[entry as usize] as i64;
            }
        }
        let checksum = ids_checksum(&Bags { indices: rows, ..*bags });
        self.scratch.translated = Some(Translated { position: self.position(), checksum });
        Ok(true)
    }

    /// Takes `rows`, `[E]`, for those of the ids of `bags`, where they are the next batch of the
    /// plan and have these rows there.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn confirm(
        &mut self,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        rows: &[i64],
    ) -> Result<()> {
        let tables = plan.features().iter().map(|feature| feature.table);
        if !self.has_batches() || !tables.eq(self.planned_tables().iter().copied()) {
            return Ok(());
        }
        let mut planned = vec![0; rows.len()];
        if self.translate(plan, bags, &mut planned)? && planned != rows {
            self.scratch.translated = None;
        }
        Ok(())
    }

    /// Counts the ids of the batch that was translated last among those that training has come to.
    pub(crate) fn note_reached(&mut self, plan: &FeatureLayout, bags: &Bags<'_>, rows: &[i64]) {
        for (at, feature) in plan.features().iter().enumerate() {
            let next = &mut self.next_rows[feature.table.0 as usize];
            let rows = rows[plan.range(bags, at)].iter();
            *next = rows.fold(*next, |next, &row| next.max(row as u64 + 1));
        }
    }

    /// Returns the first row of `table` whose id training has not come to yet.
    ///
    /// # Panics
    /// When there is no such table.
    pub(crate) fn next_row(&self, table: TableId) -> u64 {
        self.next_rows[table.0 as usize]
    }

    /// Returns the checksum that the rows of `batch`, the next one, must have; `None` where its
    /// ids were not translated yet.
    pub(super) fn rows_checksum(&self, batch: Batch) -> Option<u32> {
        if !self.has_open_tables {
            return Some(batch.checksum);
        }
        let position = self.position();
        let translated = self.scratch.translated.filter(|found| found.position == position);
        translated.map(|found| found.checksum)
    }

    /// Says that `bags` are not the next batch of the plan.
    ///
    /// # Errors
    /// Those of finding that one.
    pub(crate) fn other_batch(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) -> Result<Error> {
        let batch = self.enter_batch(plan, bags, plan.output_len(bags))?;
        Ok(self.not_planned(batch, bags))
    }
}
