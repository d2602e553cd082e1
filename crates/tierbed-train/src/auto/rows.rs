//! Rows by number, and batches announced, in either order.

use crate::planned::AnySink;
use crate::window::rows::NewRows;
use tierbed_core::{Bags, Error, Result, TableId};
use tierbed_kernels::FeaturePlan;

use crate::auto::engine::{lost, AutoEngine};
use crate::auto::options::OnMismatch;

impl AutoEngine {
    /// Visits rows `first..first + count` of `table` in order, as whole records of words: the
    /// newest value of rows in memory, on disk, or initial. Along a plan that is one pass over
    /// everything, in which a row that was used is visited twice: the last visit counts.
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
        if let Some(planned) = self.planned_mut() {
            return planned.visit_rows(table, first, count, visit);
        }
        match self.windowed_mut()? {
            Some(windowed) => windowed.engine.visit_rows(table, first, count, visit),
            None => Err(lost("no engine")),
        }
    }

    /// Visits every row of every table that was ever written, once: table, row, whole record. In
    /// row order by window, in no order along a plan; one pass over everything.
    ///
    /// # Errors
    /// The store's and those of `sink`.
    pub fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        if let Some(planned) = self.planned_mut() {
            planned.scan_count += 1;
            return planned.engine.scan_all(sink);
        }
        let Some(windowed) = self.windowed_mut()? else { return Err(lost("no engine")) };
        let mut record = Vec::new();
        for table in (0..windowed.engine.schema().tables().len() as u32).map(TableId) {
            windowed.engine.scan_rows(table, &mut |row, bytes| {
                record.clear();
                record.extend(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)));
                sink(table, row, &record)
            })?;
        }
        Ok(())
    }

    /// Copies the weights of `rows` (any order, duplicates allowed) into `out`, `[N, D]`.
    ///
    /// # Errors
    /// As [`visit_rows`](Self::visit_rows).
    pub fn gather_rows(&mut self, table: TableId, rows: &[i64], out: &mut [f32]) -> Result<()> {
        if let Some(planned) = self.planned_mut() {
            planned.scan_count += 1;
            return planned.engine.gather_rows(table, rows, out);
        }
        match self.windowed_mut()? {
            Some(windowed) => windowed.engine.gather_rows(table, rows, out),
            None => Err(lost("no engine")),
        }
    }

    /// Overwrites rows from `first` on. Along a plan that is what a batch not planned is.
    ///
    /// # Errors
    /// As [`visit_rows`](Self::visit_rows); `Invalid` along a plan that may not be left.
    pub fn write_rows(&mut self, table: TableId, first: u64, rows: NewRows<'_>) -> Result<()> {
        if self.planned_mut().is_some() {
            if self.config.on_mismatch() == OnMismatch::Error {
                return Err(Error::invalid("rows in forward order are not written by number")
                    .with("remedy", "write them before training, or open with order=\"window\""));
            }
            self.move_to_window("rows were written by number")?;
        }
        match self.windowed_mut()? {
            Some(windowed) => {
                windowed.is_untouched = false;
                windowed.engine.write_rows(table, first, rows)
            }
            None => Err(lost("no engine")),
        }
    }

    /// Brings the rows of `batches`, nearest first; returns how many of them fit. Along a plan
    /// these are batches to look up only, copied aside in one pass over everything.
    ///
    /// # Errors
    /// `Invalid` for ids out of range, otherwise the store's.
    pub fn prefetch(&mut self, plan: &FeaturePlan, batches: &[Bags<'_>]) -> Result<usize> {
        if let Some(planned) = self.planned_mut() {
            // Those before were used: the group starts with free memory.
            planned.unplanned.clear();
            return planned.bring(plan, batches);
        }
        match self.windowed_mut()? {
            Some(windowed) => windowed.engine.prefetch(plan, batches),
            None => Err(lost("no engine")),
        }
    }

    /// Forgets what was announced.
    pub fn end_lookahead(&mut self) {
        if let Some(planned) = self.planned_mut() {
            planned.unplanned.clear();
        }
        if let crate::auto::engine::State::Windowed(windowed) = &mut self.state {
            windowed.engine.end_lookahead();
        }
    }
}
