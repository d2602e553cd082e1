//! Any rows, at any time: stream everything once and pick.
//!
//! The store has no index from row to place, so access that was not planned reads all extents
//! front to back and joins them with the plan, which knows the row of every entry. That is one
//! sequential pass whatever the number of rows asked for. Few rows are [found](super::find)
//! for less.

use tierbed_core::{Error, Result, RowId, TableId, TableSchema};
use tierbed_kernels::init_record;

use super::dump::DUMP_BUF_BYTES;
use super::gather::{Gather, GATHER_BYTES_MAX};
use super::PlannedEngine;
use crate::engine::{RowVisitor, TableRows};
use crate::planned::plan::PlanWindow;
use crate::planned::store::lists::split_rows;
use crate::planned::store::size_class::{check_chunk, open_chunk, read_chunk};
use crate::planned::store::unplanned::open_unplanned;
use crate::planned::store::window_rows::Spot;
use crate::window::rows::{check_range, NewRows};

/// Takes the rows of a scan over all tables: table, row id, whole record.
pub type AnySink<'a> = dyn FnMut(TableId, RowId, &[f32]) -> Result<()> + 'a;

impl PlannedEngine {
    /// Visits every row of `table` that was ever used, once, in no particular order: row id and
    /// whole record.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, `Corruption` for damaged chunks, otherwise the device's
    /// and those of `sink`.
    pub fn scan(
        &mut self,
        table: TableId,
        sink: &mut dyn FnMut(RowId, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.schema.table(table)?;
        let class = self.pipeline.home(table.0 as usize).class;
        self.walk(Some(class), &mut |found, row, record| match found == table {
            true => sink(row, record),
            false => Ok(()),
        })
    }

    /// Visits every row of every table that was ever used, once, in no particular order: one
    /// pass over everything.
    ///
    /// # Errors
    /// As [`scan`](Self::scan).
    pub fn scan_all(&mut self, sink: &mut AnySink<'_>) -> Result<()> {
        self.walk(None, sink)
    }

    // Visits the rows of one size class, or of all.
    fn walk(&mut self, only: Option<usize>, sink: &mut AnySink<'_>) -> Result<()> {
        self.begin_scan()?;
        self.counters.unplanned.scan_count += 1;
        let is_wanted = |class: usize| only.is_none_or(|only| only == class);
        let plan = self.pipeline.plan.clone();
        let (window, mut loaded) = (&mut self.scan_window, None);
        let homes = self.pipeline.homes.clone();
        let mut visit = |spot: Spot, record: &[f32]| {
            if !homes.get(spot.table).is_some_and(|home| is_wanted(home.class)) {
                return Ok(());
            }
            if loaded != Some(spot.known_as.window) {
                plan.load_entries(spot.known_as.window as usize, window)?;
                loaded = Some(spot.known_as.window);
            }
            let (table, row) = row_of(window, spot.known_as.entry)?;
            sink(table, row, record)
        };
        self.pipeline.visit_current(&mut visit)?;
        let mover = self.pipeline.mover()?;
        mover.visit_back(&mut visit)?;
        for number in 0..plan.window_count() {
            let mut is_loaded = false;
            for (_, class) in mover.classes.iter().enumerate().filter(|(at, _)| is_wanted(*at)) {
                let chunks = class.bucket(number).map_or(&[][..], |bucket| &bucket.chunks);
                if chunks.is_empty() && class.lists().count(number) == 0 {
                    continue;
                }
                if !is_loaded {
                    plan.load_entries(number, window)?;
                    is_loaded = true;
                }
                for (entry, record) in class.lists().iter(number) {
                    let (table, row) = row_of(window, entry)?;
                    sink(table, row, record)?;
                }
                for chunk in chunks {
                    let bytes = read_chunk(&**mover.disk.device(), chunk, &mut self.scan_buf)?;
                    for (entry, record) in open_chunk(chunk, bytes, class.stored_bytes())? {
                        let (table, row) = row_of(window, entry)?;
                        sink(table, row, bytemuck::cast_slice(record))?;
                    }
                }
            }
        }
        self.walk_spans(only, sink)?;
        self.walk_unplanned(only, sink)
    }

    // Rows that wait in the lists and buckets of spans.
    fn walk_spans(&mut self, only: Option<usize>, sink: &mut AnySink<'_>) -> Result<()> {
        let plan = self.pipeline.plan.clone();
        let spare_bytes = match self.pipeline.span_windows() {
            0 => return Ok(()),
            _ => (self.budget.free_bytes() / 2).min(GATHER_BYTES_MAX),
        };
        let _memory = self.budget.reserve("rows of spans", spare_bytes)?;
        // No dump is being written.
        let memory_bytes = DUMP_BUF_BYTES + spare_bytes as usize;
        let window = &mut self.scan_window;
        let mover = self.pipeline.mover()?;
        let spans = mover.splitter.spans();
        let classes = mover.classes.iter().enumerate();
        for (at, class) in classes.filter(|(at, _)| only.is_none_or(|only| only == *at)) {
            for list in spans.window_count()..spans.list_count() {
                let mut rows = Gather::new(&plan, spans, list, class.words(), memory_bytes);
                rows.add(class.lists().iter(list), window, sink)?;
                let staged = mover.splitter.rows_of(at, list);
                rows.add(split_rows(staged, 1 + class.words()), window, sink)?;
                for chunk in class.bucket(list).map_or(&[][..], |bucket| &bucket.chunks) {
                    let bytes = read_chunk(&**mover.disk.device(), chunk, &mut self.scan_buf)?;
                    let chunk_rows = check_chunk(chunk, bytes, class.stored_bytes())?;
                    let chunk_rows = bytemuck::cast_slice(chunk_rows);
                    rows.add(split_rows(chunk_rows, 1 + class.words()), window, sink)?;
                }
                rows.hand_on(window, sink)?;
            }
        }
        Ok(())
    }

    // Rows that the plan does not use.
    fn walk_unplanned(&mut self, only: Option<usize>, sink: &mut AnySink<'_>) -> Result<()> {
        let mover = self.pipeline.mover()?;
        let classes = mover.classes.iter().enumerate();
        for (_, class) in classes.filter(|(at, _)| only.is_none_or(|only| only == *at)) {
            for chunk in &class.unplanned().chunks {
                let bytes = read_chunk(&**mover.disk.device(), chunk, &mut self.scan_buf)?;
                for (table, row, record) in open_unplanned(chunk, bytes, 4 * class.words())? {
                    sink(table, row, bytemuck::cast_slice(record))?;
                }
            }
        }
        Ok(())
    }

    /// Lets all rows be where they can be read.
    pub(super) fn begin_scan(&mut self) -> Result<()> {
        self.check_whole()?;
        self.bring_back()?;
        let settled = self.settle_for_reading();
        self.poison.on_any(settled)
    }

    fn settle_for_reading(&mut self) -> Result<()> {
        let mover = self.pipeline.mover()?;
        mover.settle()?;
        mover.disk.finish_writes()
    }
}

impl TableRows for PlannedEngine {
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
        let shape = self.shape_of(table)?;
        check_range(&shape, first, count)?;
        let mut record = vec![0.0; shape.record_words()];
        for (at, row) in (0..count).zip(first..) {
            init_record(&shape, row, &mut record);
            visit(at, &record);
        }
        let rows = (0..count).map(|at| RowId(first + at as u64));
        self.visit_used_of(table, rows, &mut |row, record| {
            let at = row.0.wrapping_sub(first);
            if at < count as u64 {
                visit(at as usize, record);
            }
            Ok(())
        })
    }

    fn visit_listed(
        &mut self,
        table: TableId,
        rows: &[RowId],
        visit: &mut RowVisitor<'_>,
    ) -> Result<()> {
        let shape = self.shape_of(table)?;
        let mut record = vec![0.0; shape.record_words()];
        for (at, row) in rows.iter().enumerate() {
            init_record(&shape, row.0, &mut record);
            visit(at, &record);
        }
        self.visit_used_of(table, rows.iter().copied(), &mut |row, record| {
            if let Ok(at) = rows.binary_search(&row) {
                visit(at, record);
            }
            Ok(())
        })
    }

    fn write_rows(&mut self, _table: TableId, _first: u64, _rows: NewRows<'_>) -> Result<()> {
        Err(Error::invalid("rows in forward order are not written by number")
            .with("remedy", "open the store with order=\"window\""))
    }

    fn set_steps_done(&mut self, _table: TableId, _steps: u64) -> Result<()> {
        Err(Error::invalid("steps along a plan are those of its checkpoint")
            .with("remedy", "open the store with order=\"window\""))
    }
}

/// Finds table and row of an entry of a window whose entries are loaded.
pub(super) fn row_of(plan: &PlanWindow, entry: u32) -> Result<(TableId, RowId)> {
    let (table, row) = plan
        .row_of(entry)
        .ok_or_else(|| Error::corruption("a row waits for an entry that the plan does not have"))?;
    Ok((TableId(table as u32), RowId(row)))
}
