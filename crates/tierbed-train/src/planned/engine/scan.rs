//! Any rows, at any time: stream everything once and pick.
//!
//! The store has no index from row to place, so access that was not planned reads all extents
//! front to back and joins them with the plan, which knows the row of every entry. That is one
//! sequential pass whatever the number of rows asked for.

use tierbed_core::store::out_of_range;
use tierbed_core::{Error, Result, RowId, TableId};
use tierbed_kernels::init_record;

use super::dump::DUMP_BUF_BYTES;
use super::gather::{Gather, GATHER_BYTES_MAX};
use super::PlannedEngine;
use crate::planned::plan::WindowPlan;
use crate::planned::store::lists::split_rows;
use crate::planned::store::parking::open_parked;
use crate::planned::store::shelf::{check_chunk, open_chunk};
use crate::planned::store::window::Spot;

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
        let shelf = self.river.home(table.0 as usize).map(|home| home.shelf);
        self.walk(shelf, &mut |found, row, record| match found == table {
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

    // Visits the rows of one shelf, or of all.
    fn walk(&mut self, only: Option<usize>, sink: &mut AnySink<'_>) -> Result<()> {
        self.poison.check()?;
        let settled = self.settle_for_reading();
        self.poison.on_any(settled)?;
        let is_wanted = |shelf: usize| only.is_none_or(|only| only == shelf);
        let plan = self.river.plan.clone();
        let (window, mut loaded) = (&mut self.scan_window, None);
        let homes = self.river.homes.clone();
        let mut visit = |spot: Spot, record: &[f32]| {
            if !homes.get(spot.table).is_some_and(|home| is_wanted(home.shelf)) {
                return Ok(());
            }
            if loaded != Some(spot.known_as.window) {
                plan.load_entries(spot.known_as.window as usize, window)?;
                loaded = Some(spot.known_as.window);
            }
            let (table, row) = row_of(window, spot.known_as.entry)?;
            sink(table, row, record)
        };
        self.river.visit_current(&mut visit)?;
        let ferry = self.river.ferry()?;
        ferry.visit_live(&mut visit)?;
        for number in 0..plan.window_count() {
            let mut is_loaded = false;
            for (_, shelf) in ferry.shelves.iter().enumerate().filter(|(at, _)| is_wanted(*at)) {
                let chunks = shelf.bucket(number).map_or(&[][..], |bucket| &bucket.chunks);
                if chunks.is_empty() && shelf.lists().count(number) == 0 {
                    continue;
                }
                if !is_loaded {
                    plan.load_entries(number, window)?;
                    is_loaded = true;
                }
                for (entry, record) in shelf.lists().iter(number) {
                    let (table, row) = row_of(window, entry)?;
                    sink(table, row, record)?;
                }
                for chunk in chunks {
                    let bytes = self.scan_buf.get_mut(..chunk.len_bytes());
                    let bytes = bytes.ok_or_else(|| Error::corruption("a chunk is too long"))?;
                    ferry.disk.device().read_at(chunk.offset_bytes(), bytes)?;
                    for (entry, record) in open_chunk(chunk, bytes, shelf.stored_bytes())? {
                        let (table, row) = row_of(window, entry)?;
                        sink(table, row, bytemuck::cast_slice(record))?;
                    }
                }
            }
        }
        self.walk_spans(only, sink)?;
        self.walk_parked(only, sink)
    }

    // Rows that wait in the lists and buckets of spans.
    fn walk_spans(&mut self, only: Option<usize>, sink: &mut AnySink<'_>) -> Result<()> {
        let plan = self.river.plan.clone();
        let spare_bytes = match self.river.span_windows() {
            0 => return Ok(()),
            _ => (self.budget.free_bytes() / 2).min(GATHER_BYTES_MAX),
        };
        let _memory = self.budget.reserve("rows of spans", spare_bytes)?;
        // No dump is being written.
        let memory_bytes = DUMP_BUF_BYTES + spare_bytes as usize;
        let window = &mut self.scan_window;
        let ferry = self.river.ferry()?;
        let spans = ferry.splitter.spans();
        let shelves = ferry.shelves.iter().enumerate();
        for (at, shelf) in shelves.filter(|(at, _)| only.is_none_or(|only| only == *at)) {
            for list in spans.window_count()..spans.list_count() {
                let memory = (shelf.words(), memory_bytes);
                let mut rows = Gather::new((&plan, spans), list, memory);
                rows.add(shelf.lists().iter(list), window, sink)?;
                let hand = ferry.splitter.rows_of(at, list);
                rows.add(split_rows(hand, 1 + shelf.words()), window, sink)?;
                for chunk in shelf.bucket(list).map_or(&[][..], |bucket| &bucket.chunks) {
                    let bytes = self.scan_buf.get_mut(..chunk.len_bytes());
                    let bytes = bytes.ok_or_else(|| Error::corruption("a chunk is too long"))?;
                    ferry.disk.device().read_at(chunk.offset_bytes(), bytes)?;
                    let chunk_rows = check_chunk(chunk, bytes, shelf.stored_bytes())?;
                    let chunk_rows = bytemuck::cast_slice(chunk_rows);
                    rows.add(split_rows(chunk_rows, 1 + shelf.words()), window, sink)?;
                }
                rows.hand_on(window, sink)?;
            }
        }
        Ok(())
    }

    // Rows that the plan does not use.
    fn walk_parked(&mut self, only: Option<usize>, sink: &mut AnySink<'_>) -> Result<()> {
        let ferry = self.river.ferry()?;
        let shelves = ferry.shelves.iter().enumerate();
        for (_, shelf) in shelves.filter(|(at, _)| only.is_none_or(|only| only == *at)) {
            for chunk in &shelf.parked().chunks {
                let bytes = self.scan_buf.get_mut(..chunk.len_bytes());
                let bytes = bytes.ok_or_else(|| Error::corruption("a chunk is too long"))?;
                ferry.disk.device().read_at(chunk.offset_bytes(), bytes)?;
                for (table, row, record) in open_parked(chunk, bytes, 4 * shelf.words())? {
                    sink(table, row, bytemuck::cast_slice(record))?;
                }
            }
        }
        Ok(())
    }

    fn settle_for_reading(&mut self) -> Result<()> {
        let ferry = self.river.ferry()?;
        ferry.settle()?;
        ferry.disk.finish_writes()
    }

    /// Visits rows `first..first + count` of `table` in order, as whole records of words: the
    /// newest value of rows ever used, else the initial one. Reads everything once per piece of
    /// rows that fits the unreserved memory.
    ///
    /// # Errors
    /// `Invalid` when rows are out of range, otherwise as [`scan`](Self::scan).
    pub fn visit_rows(
        &mut self,
        table: TableId,
        first: u64,
        count: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let schema = self.schema.clone();
        let shape = schema.table(table)?;
        let end = first.checked_add(count as u64).filter(|&end| end <= shape.row_count);
        if end.is_none() {
            let range = format_args!("{first}..{}", first.saturating_add(count as u64)).to_string();
            return Err(out_of_range(shape, range));
        }
        let words = shape.record_words();
        let free_rows = self.budget.free_bytes() / 2 / shape.record_bytes() as u64;
        let piece_rows = (free_rows.max(1) as usize).min(count.max(1));
        let bytes = (piece_rows * shape.record_bytes()) as u64;
        let _memory = self.budget.reserve("visit buffer", bytes)?;
        let mut records = vec![0.0f32; piece_rows * words];
        for done in (0..count).step_by(piece_rows) {
            let piece_first = first + done as u64;
            let now = piece_rows.min(count - done);
            for (row, record) in (piece_first..).zip(records.chunks_exact_mut(words).take(now)) {
                init_record(shape, row, record);
            }
            self.scan(table, &mut |row, record| {
                let nth = row.0.wrapping_sub(piece_first);
                if nth < now as u64 {
                    let start = nth as usize * words;
                    if let Some(place) = records.get_mut(start..start + words) {
                        place.copy_from_slice(record);
                    }
                }
                Ok(())
            })?;
            for (at, record) in records.chunks_exact(words).take(now).enumerate() {
                visit(done + at, record);
            }
        }
        Ok(())
    }

    /// Copies the weights of `rows` (any order, duplicates allowed) into `out`, `[N, D]`, in one
    /// pass over everything.
    ///
    /// # Errors
    /// As [`visit_rows`](Self::visit_rows).
    pub fn gather_rows(&mut self, table: TableId, rows: &[i64], out: &mut [f32]) -> Result<()> {
        let schema = self.schema.clone();
        let shape = schema.table(table)?;
        let dim = shape.dim as usize;
        if out.len() != rows.len() * dim {
            return Err(Error::invalid("output must hold one row per id")
                .with("rows", rows.len())
                .with("dim", dim)
                .with("found_values", out.len()));
        }
        let mut wanted = Vec::with_capacity(rows.len());
        for (at, &row) in rows.iter().enumerate() {
            let known = u64::try_from(row).ok().filter(|&row| row < shape.row_count);
            wanted.push((known.ok_or_else(|| out_of_range(shape, row))?, at));
        }
        wanted.sort_unstable();
        let mut fresh = vec![0.0; shape.record_words()];
        for &(row, at) in &wanted {
            init_record(shape, row, &mut fresh);
            let weights = fresh.get(..dim).unwrap_or(&[]);
            if let Some(place) = out.get_mut(at * dim..(at + 1) * dim) {
                place.copy_from_slice(weights);
            }
        }
        self.scan(table, &mut |row, record| {
            let first = wanted.partition_point(|&(known, _)| known < row.0);
            let places = wanted.get(first..).unwrap_or(&[]).iter();
            for &(_, at) in places.take_while(|(known, _)| *known == row.0) {
                if let Some(place) = out.get_mut(at * dim..(at + 1) * dim) {
                    place.copy_from_slice(record.get(..dim).unwrap_or(&[]));
                }
            }
            Ok(())
        })
    }
}

/// Finds table and row of an entry of a window whose entries are loaded.
pub(super) fn row_of(plan: &WindowPlan, entry: u32) -> Result<(TableId, RowId)> {
    let (table, row) = plan
        .row_of(entry)
        .ok_or_else(|| Error::corruption("a row waits for an entry that the plan does not have"))?;
    Ok((TableId(table as u32), RowId(row)))
}
