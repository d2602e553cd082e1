//! Row reads: write buffer, delta index, base range, the newest first.
//!
//! The rows of a request come in order. Each is looked for in memory; what is left wants a page,
//! of a run or of a base. These pages are sorted by their place in the file, near ones are
//! joined (see [`crate::cold::cost`]), and the requests of all tables are one stream, so that the
//! device's queue drains once per request and not once per table.

#![expect(
    clippy::indexing_slicing,
    reason = "wants and runs hold positions in the keys of their part"
)]

use crate::{verify, PageName, HEADER_BYTES};
use tierbed_core::store::RowSink;
use tierbed_core::{Error, Result, RowKey};

use crate::cold::cost::{cover, PageRun};
use crate::cold::disk::{Disk, FileRuns};
use crate::cold::run::{run_page, DELTA_MAGIC};
use crate::cold::stats::ColdStats;
use crate::cold::table::ColdTable;
use crate::cold::write_buffer::WriteBuffer;

/// Memory of one row of a request: its [`Want`], and a request of its own.
pub(crate) const WANT_BYTES: usize = size_of::<Want>() + size_of::<PageRun>();

/// Marks a slot as one of a run's page.
const IN_RUN: u32 = 1 << 31;

/// A row that is on some page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    page: u32,
    /// Slot in the page, and [`IN_RUN`].
    slot: u32,
    /// Position in the request.
    at: u32,
}

/// What a request wants of one table: rows on pages, by page, and the runs that cover them.
struct TablePart<'a> {
    table: &'a ColdTable,
    keys: &'a [RowKey],
    /// Position of the first key in the request.
    first: usize,
    wants: Vec<Want>,
    runs: Vec<PageRun>,
}

impl TablePart<'_> {
    /// Answers the keys whose rows are in memory or absent; finds the pages that the others want.
    fn locate(&mut self, disk: &Disk, buffer: &WriteBuffer, sink: &mut RowSink<'_>) -> Result<()> {
        let (table, first) = (self.table, self.first);
        self.wants.reserve_exact(self.keys.len());
        table.locate(self.keys, buffer, &mut self.wants, &mut |at, record| {
            sink(first + at, record)
        })?;
        self.wants.sort_unstable_by_key(|want| want.page);
        let pages = self.wants.iter().map(|want| want.page);
        self.runs = cover(pages, disk.gap_pages(table.pages), disk.pages_max(table.pages));
        Ok(())
    }

    // Takes the rows wanted from the pages of run `at`; returns how many pages were wanted.
    fn take(&self, at: usize, pages: &[u8], sink: &mut RowSink<'_>) -> Result<u64> {
        let run = self.runs[at];
        let page_bytes = self.table.geometry.page_bytes();
        assert!(pages.len() == run.count as usize * page_bytes, "the pages of the run");
        let from = self.wants.partition_point(|want| want.page < run.first);
        let wanted = self.wants[from..].iter();
        let mut wanted = wanted.take_while(|want| want.page < run.end()).peekable();
        let mut needed = 0;
        while let Some(page_number) = wanted.peek().map(|want| want.page) {
            needed += 1;
            let page = page_of(pages, page_number - run.first, page_bytes);
            let mut is_checked = false;
            while let Some(want) = wanted.next_if(|want| want.page == page_number) {
                let key = self.keys[want.at as usize];
                if !is_checked {
                    verify(page, self.table.name_of(*want, key.row.0)?, &self.table.file)?;
                    is_checked = true;
                }
                sink(self.first + want.at as usize, self.table.record_in(page, want.slot))?;
            }
        }
        Ok(needed)
    }
}

/// Where rows are read from.
pub(crate) struct ReadFrom<'a> {
    /// All tables, by id.
    pub(crate) tables: &'a [ColdTable],
    pub(crate) disk: &'a mut Disk,
    pub(crate) stats: &'a mut ColdStats,
    pub(crate) buffer: &'a WriteBuffer,
}

/// Reads `keys` (checked, in order) of any table.
///
/// # Errors
/// `Corruption`, `Io`; those of `sink` pass through.
pub(crate) fn read(from: ReadFrom<'_>, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
    let ReadFrom { tables, disk, stats, buffer } = from;
    assert!(keys.is_sorted_by(|a, b| a < b), "keys ascend, each once");
    let mut absent = 0;
    let sink = &mut |at: usize, record: Option<&[u8]>| {
        absent += u64::from(record.is_none());
        sink(at, record)
    };
    let (mut parts, mut first) = (Vec::new(), 0);
    for same_table in keys.chunk_by(|a, b| a.table == b.table) {
        let table = &tables[same_table[0].table.0 as usize];
        let mut part =
            TablePart { table, keys: same_table, first, wants: Vec::new(), runs: Vec::new() };
        part.locate(disk, buffer, sink)?;
        parts.push(part);
        first += same_table.len();
    }
    let files: Vec<FileRuns<'_>> =
        parts.iter().map(|part| FileRuns { file: part.table.pages, runs: &part.runs }).collect();
    let mut needed = 0;
    disk.read(&files, &mut |part, at, pages| {
        needed += parts[part].take(at, pages, sink)?;
        Ok(())
    })?;
    stats.rows_absent += absent;
    stats.count_read(needed, files.iter().flat_map(|file| file.runs));
    Ok(())
}

impl ColdTable {
    /// Finds the pages of `keys`, all of this table; what is in memory or absent goes to `sink`.
    fn locate(
        &self,
        keys: &[RowKey],
        buffer: &WriteBuffer,
        wants: &mut Vec<Want>,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        for (at, key) in keys.iter().enumerate() {
            if let Some(record) = buffer.get(*key, self.record_bytes()) {
                sink(at, Some(record))?;
                continue;
            }
            let (range, position) = self.geometry.range_of(key.row.0);
            if let Some(loc) = self.index.get(range, position) {
                let (page, slot) = self.geometry.delta_place(loc);
                wants.push(Want { page, slot: slot | IN_RUN, at: at as u32 });
                continue;
            }
            let (page, slot) = self.geometry.place_in_range(position);
            let base = self.range(range);
            match base.extent().filter(|_| base.has_page(page)) {
                Some(extent) => {
                    let page = self.geometry.first_page(extent) + page as u32;
                    wants.push(Want { page, slot: slot as u32, at: at as u32 });
                }
                None => sink(at, None)?,
            }
        }
        Ok(())
    }

    fn name_of(&self, want: Want, row: u64) -> Result<PageName> {
        if want.slot & IN_RUN != 0 {
            return self.run_name(want.page);
        }
        let (range, position) = self.geometry.range_of(row);
        let page = self.geometry.place_in_range(position).0;
        Ok(self.base_name(range, page, self.range(range).version))
    }

    /// Names the record page `page` of whatever run it belongs to.
    pub(crate) fn run_name(&self, page: u32) -> Result<PageName> {
        let version = self.version_of_page(page).ok_or_else(|| {
            Error::corruption("delta row lies on a page of no run")
                .with("file", &self.file)
                .with("page", page)
        })?;
        Ok(run_page(DELTA_MAGIC, self.owner, page, version))
    }

    fn record_in<'a>(&self, page: &'a [u8], slot: u32) -> Option<&'a [u8]> {
        match slot & IN_RUN {
            0 => self.geometry.layout.record(page, slot as usize),
            _ => Some(self.delta_record(page, slot & !IN_RUN)),
        }
    }

    /// Returns the record in `slot` of a record page of a run.
    pub(crate) fn delta_record<'a>(&self, page: &'a [u8], slot: u32) -> &'a [u8] {
        assert!(slot < self.geometry.delta_slots, "slot inside the page");
        let at = HEADER_BYTES + slot as usize * self.record_bytes();
        &page[at..at + self.record_bytes()]
    }
}

/// Returns page `at` of some pages read together.
pub(crate) fn page_of(pages: &[u8], at: u32, page_bytes: usize) -> &[u8] {
    let from = at as usize * page_bytes;
    &pages[from..from + page_bytes]
}
