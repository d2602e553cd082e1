//! Scans: all written rows of a table in row order, page by page or in runs of pages.

#![expect(
    clippy::indexing_slicing,
    reason = "the table is one of the store; the engine gives back the buffers it was asked for"
)]

use tierbed_core::store::ScanSink;
use tierbed_core::{Result, RowId};
use tierbed_io::Op;

use super::layout::verify;
use super::pages::{Failure, Flight, Pipeline, TableFile};
use super::scan_runs::RunReader;

impl Pipeline<'_> {
    /// Visits the written rows of table `at` in row order; returns how many pages they lie on.
    /// Reads runs of pages where there is a reader of these.
    pub(super) fn scan(
        &mut self,
        at: usize,
        runs: Option<&mut RunReader>,
        sink: &mut ScanSink<'_>,
    ) -> std::result::Result<u64, Failure> {
        if let Some(runs) = runs {
            return self.scan_runs(at, runs, sink);
        }
        let mut pages = 0..self.tables[at].layout.page_count;
        let mut next_page =
            |table: &TableFile| pages.find(|page| table.map.get(*page).is_written());
        self.scan_pages(at, &mut next_page, sink)
    }

    /// Visits the rows of the written pages that `next_page` gives, as many pages at once as there
    /// are buffers; returns their number.
    pub(super) fn scan_pages(
        &mut self,
        at: usize,
        next_page: &mut dyn FnMut(&TableFile) -> Option<u64>,
        sink: &mut ScanSink<'_>,
    ) -> std::result::Result<u64, Failure> {
        let mut checked = 0;
        let mut next = next_page(&self.tables[at]);
        while next.is_some() {
            let mut flight = Flight::default();
            let mut order = Vec::new();
            while let Some(page) = next {
                let Some(buf) = self.engine.acquire() else { break };
                let table = &self.tables[at];
                self.engine.submit(table.request(Op::Read, page, table.map.get(page), buf));
                order.push((page, buf));
                next = next_page(table);
            }
            assert!(!order.is_empty(), "page {next:?} of a scan finds no free buffer");
            while flight.land(self.engine)? {
                for completion in std::mem::take(&mut flight.landed) {
                    flight.check(completion.result);
                }
            }
            for (page, buf) in order {
                if flight.failure.is_none() {
                    let table = &self.tables[at];
                    let bytes = &self.engine.bytes(buf)[..table.layout.page_bytes];
                    self.stats.pages_read += 1;
                    flight.check(visit_page(table, page, bytes, sink));
                    checked += 1;
                }
                self.engine.release(buf);
            }
            flight.finish()?;
        }
        Ok(checked)
    }
}

/// Checks `bytes` of page `page` and hands its rows to `sink`.
pub(super) fn visit_page(
    table: &TableFile,
    page: u64,
    bytes: &[u8],
    sink: &mut ScanSink<'_>,
) -> Result<()> {
    verify(bytes, table.name_of(page, table.map.get(page)), &table.file)?;
    for slot in 0..table.layout.rows_per_page {
        if let Some(record) = table.layout.record(bytes, slot as usize) {
            sink(RowId(page * table.layout.rows_per_page + slot), record)?;
        }
    }
    Ok(())
}
