//! Few rows, at any time: the plan tells where they wait.
//!
//! A row waits for the window that uses it next. That window is found in the plan, whose entries
//! are in row order, from the current window on. So only the lists and buckets are read that rows
//! wait in, not all there are. Many rows wait nearly everywhere: then everything is read once
//! ([`scan`](super::scan)).
//!
//! ```text
//! rows ─▶ in a window's memory? ─▶ next window that uses them ─▶ its list and bucket
//!                                  none ─▶ unplanned rows
//! ```

#![expect(
    clippy::indexing_slicing,
    reason = "rows and size classes are numbered as they are found"
)]

use tierbed_core::{Result, RowId, RowKey, TableId};

use super::scan::AnySink;
use super::PlannedEngine;
use crate::planned::plan::PlanWindow;
use crate::planned::store::extents::Bucket;
use crate::planned::store::lists::split_rows;
use crate::planned::store::row_mover::RowMover;
use crate::planned::store::size_class::{open_chunk, read_chunk};
use crate::planned::store::unplanned::open_unplanned;
use crate::planned::store::window_rows::{Place, Spot};

/// Reading less than this part of all that is stored is worth finding out what to read.
const STORED_PART: u64 = 2;

/// How rows that the plan does not bring now were read.
#[derive(Debug, Clone, Copy, Default)]
pub struct UnplannedReads {
    /// By one pass over everything.
    pub scan_count: u64,
    /// By finding them.
    pub search_count: u64,
}

/// A row that is not in a window's memory.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    key: RowKey,
    /// The window that uses it next.
    waits_for: Option<Place>,
}

/// Where a row may wait; ordered by what is read together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    class: usize,
    list: u32,
    entry: u32,
    /// Among the wanted rows.
    nth: usize,
}

impl PlannedEngine {
    /// Visits those of `rows`, which ascend, that were ever used: few of them where they wait,
    /// more by one pass over everything. Other rows may be visited, too, and a row may be
    /// visited twice.
    ///
    /// # Errors
    /// As [`scan`](Self::scan).
    pub(crate) fn visit_used(&mut self, rows: &[RowKey], sink: &mut AnySink<'_>) -> Result<()> {
        match self.search(rows, sink)? {
            true => Ok(()),
            false => self.scan_all(sink),
        }
    }

    /// As [`visit_used`](Self::visit_used), for rows of one table; a pass leaves other record
    /// lengths out.
    ///
    /// # Errors
    /// As [`scan`](Self::scan).
    pub(super) fn visit_used_of(
        &mut self,
        table: TableId,
        rows: impl ExactSizeIterator<Item = RowId>,
        sink: &mut dyn FnMut(RowId, &[f32]) -> Result<()>,
    ) -> Result<()> {
        if rows.len() <= self.search_rows_max() {
            let rows: Vec<RowKey> = rows.map(|row| RowKey::new(table, row)).collect();
            if self.search(&rows, &mut |_, row, record| sink(row, record))? {
                return Ok(());
            }
        }
        self.scan(table, sink)
    }

    // Visits rows where they wait; false when a pass over everything is as good.
    fn search(&mut self, rows: &[RowKey], sink: &mut AnySink<'_>) -> Result<bool> {
        debug_assert!(rows.is_sorted_by(|a, b| a < b), "rows to find ascend");
        let is_found = rows.len() <= self.search_rows_max() && self.visit_found(rows, sink)?;
        self.counters.unplanned.search_count += u64::from(is_found);
        Ok(is_found)
    }

    /// Returns how many rows are worth a search at most: that many may each wait in another window.
    /// They have a quarter of the memory that is free.
    pub(crate) fn search_rows_max(&self) -> usize {
        let row_bytes = 2 * size_of::<Waiting>() + size_of::<Wanted>() + size_of::<RowKey>();
        let rows_max = self.budget.free_bytes() / 4 / row_bytes as u64;
        self.pipeline.plan.window_count().min(rows_max as usize)
    }

    // False when reading everything costs little more.
    fn visit_found(&mut self, rows: &[RowKey], sink: &mut AnySink<'_>) -> Result<bool> {
        self.begin_scan()?;
        let mut left = self.visit_in_current(rows, sink)?;
        self.visit_in_back(&mut left, sink)?;
        let mut wanted: Vec<Wanted> =
            left.iter().map(|&key| Wanted { key, waits_for: None }).collect();
        self.find_places(&mut wanted)?;
        let waiting = self.waiting(&wanted);
        let mover = self.pipeline.mover()?;
        let has_unplanned = |class: usize| {
            let mut unused = wanted.iter().filter(|row| row.waits_for.is_none());
            unused.any(|row| mover.homes[row.key.table.0 as usize].class == class)
        };
        let unplanned: Vec<usize> = (0..mover.classes.len())
            .filter(|&class| !mover.classes[class].unplanned().chunks.is_empty())
            .filter(|&class| has_unplanned(class))
            .collect();
        let lists = || waiting.chunk_by(|a, b| (a.class, a.list) == (b.class, b.list));
        let found_pages: u64 = lists().map(|of_list| pages_of(bucket_of(mover, of_list[0]))).sum();
        let aside_pages: u64 =
            unplanned.iter().map(|&class| pages_of(mover.classes[class].unplanned())).sum();
        let stored_pages: u64 = mover.buckets().map(pages_of).sum();
        if STORED_PART * (found_pages + aside_pages) > stored_pages {
            return Ok(false);
        }
        for of_list in lists() {
            self.visit_list(of_list, &wanted, sink)?;
        }
        for class in unplanned {
            self.visit_unplanned(class, &wanted, sink)?;
        }
        Ok(true)
    }

    // Returns the rows that the current window does not have.
    fn visit_in_current(&mut self, rows: &[RowKey], sink: &mut AnySink<'_>) -> Result<Vec<RowKey>> {
        let current = &self.pipeline.current;
        current.check_here();
        let mut left = Vec::with_capacity(rows.len());
        for of_table in rows.chunk_by(|a, b| a.table == b.table) {
            let ids = of_table.iter().map(|key| key.row.0);
            let entries = current.plan.entries_of(table_of(of_table), ids);
            for (&key, entry) in of_table.iter().zip(entries) {
                match entry {
                    Some(entry) => sink(key.table, key.row, current.record(entry))?,
                    None => left.push(key),
                }
            }
        }
        Ok(left)
    }

    // Rows of the window that has ended and have not left, or of the one that comes.
    fn visit_in_back(&mut self, rows: &mut Vec<RowKey>, sink: &mut AnySink<'_>) -> Result<()> {
        let back = &self.pipeline.mover()?.back;
        if back.plan.tables().is_empty() {
            // No window has ended since opening.
            return Ok(());
        }
        let mut entries: Vec<(u32, RowKey)> = Vec::new();
        for of_table in rows.chunk_by(|a, b| a.table == b.table) {
            let ids = of_table.iter().map(|key| key.row.0);
            let found = back.plan.entries_of(table_of(of_table), ids);
            entries.extend(found.zip(of_table).filter_map(|(entry, &key)| Some((entry?, key))));
        }
        if entries.is_empty() {
            return Ok(());
        }
        // Ascending, as rows and tables are.
        let mut here = Vec::with_capacity(entries.len());
        let mut visit = |spot: Spot, record: &[f32]| {
            let nth = entries.binary_search_by_key(&spot.known_as.entry, |(entry, _)| *entry);
            let Ok(nth) = nth else { return Ok(()) };
            let key = entries[nth].1;
            here.push(key);
            sink(key.table, key.row, record)
        };
        self.pipeline.mover()?.visit_back(&mut visit)?;
        here.sort_unstable();
        rows.retain(|key| here.binary_search(key).is_err());
        Ok(())
    }

    // Notes for each row the window that uses it next, seen from the current one.
    fn find_places(&mut self, wanted: &mut [Wanted]) -> Result<()> {
        let plan = self.pipeline.plan.clone();
        let (current, window_count) = (self.pipeline.current.number, plan.window_count());
        let mut left: Vec<usize> = (0..wanted.len()).collect();
        for distance in 1..window_count {
            if left.is_empty() {
                break;
            }
            let number = (current + distance) % window_count;
            plan.load_packed_entries(number, &mut self.scan_window)?;
            find_in(&self.scan_window, number, &left, wanted);
            left.retain(|&nth| wanted[nth].waits_for.is_none());
        }
        Ok(())
    }

    // The lists that rows may wait in, those of a size class together.
    fn waiting(&self, wanted: &[Wanted]) -> Vec<Waiting> {
        let mut waiting = Vec::with_capacity(2 * wanted.len());
        for (nth, row) in wanted.iter().enumerate() {
            let Some(place) = row.waits_for else { continue };
            let class = self.pipeline.home(row.key.table.0 as usize).class;
            let lists = self.pipeline.spans().lists_for(place);
            waiting.extend(lists.map(|at| Waiting { class, list: at.list, entry: at.entry, nth }));
        }
        waiting.sort_unstable();
        waiting
    }

    // Visits rows that wait in one list, wherever it is.
    fn visit_list(
        &mut self,
        of_list: &[Waiting],
        wanted: &[Wanted],
        sink: &mut AnySink<'_>,
    ) -> Result<()> {
        let Waiting { class: at, list, .. } = of_list[0];
        let mut visit = |entry: u32, record: &[f32]| match of_list
            .binary_search_by_key(&entry, |row| row.entry)
        {
            Ok(found) => {
                let key = wanted[of_list[found].nth].key;
                sink(key.table, key.row, record)
            }
            Err(_) => Ok(()),
        };
        let mover = self.pipeline.mover()?;
        let class = &mover.classes[at];
        for (entry, record) in class.lists().iter(list as usize) {
            visit(entry, record)?;
        }
        let staged = mover.splitter.rows_of(at, list as usize);
        for (entry, record) in split_rows(staged, 1 + class.words()) {
            visit(entry, record)?;
        }
        for chunk in &bucket_of(mover, of_list[0]).chunks {
            let bytes = read_chunk(&**mover.disk.device(), chunk, &mut self.scan_buf)?;
            for (entry, record) in open_chunk(chunk, bytes, class.stored_bytes())? {
                visit(entry, bytemuck::cast_slice(record))?;
            }
        }
        Ok(())
    }

    // Visits rows of a size class that no window uses.
    fn visit_unplanned(
        &mut self,
        class: usize,
        wanted: &[Wanted],
        sink: &mut AnySink<'_>,
    ) -> Result<()> {
        let mover = self.pipeline.mover()?;
        let class = &mover.classes[class];
        for chunk in &class.unplanned().chunks {
            let bytes = read_chunk(&**mover.disk.device(), chunk, &mut self.scan_buf)?;
            for (table, row, record) in open_unplanned(chunk, bytes, 4 * class.words())? {
                let key = RowKey::new(table, row);
                if wanted.binary_search_by_key(&key, |row| row.key).is_ok() {
                    sink(table, row, bytemuck::cast_slice(record))?;
                }
            }
        }
        Ok(())
    }
}

// Notes the place of those rows numbered `left` that `window` uses.
fn find_in(window: &PlanWindow, number: usize, left: &[usize], wanted: &mut [Wanted]) {
    let table = |nth: usize| wanted[nth].key.table;
    let mut places = Vec::with_capacity(left.len());
    for of_table in left.chunk_by(|&a, &b| table(a) == table(b)) {
        let ids = of_table.iter().map(|&nth| wanted[nth].key.row.0);
        places.extend(window.entries_of(table(of_table[0]).0 as usize, ids));
    }
    for (&nth, entry) in left.iter().zip(places) {
        wanted[nth].waits_for = entry.map(|entry| Place { window: number as u32, entry });
    }
}

fn table_of(rows: &[RowKey]) -> usize {
    let TableId(table) = rows[0].table;
    table as usize
}

fn bucket_of(mover: &RowMover, of: Waiting) -> &Bucket {
    &mover.classes[of.class].buckets()[of.list as usize]
}

fn pages_of(bucket: &Bucket) -> u64 {
    bucket.chunks.iter().map(|chunk| u64::from(chunk.page_count)).sum()
}
