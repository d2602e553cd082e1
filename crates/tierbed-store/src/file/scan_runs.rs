//! Pages of a scan that lie close together: read at once, some runs ahead of what is visited.
//!
//! While the rows of one window are visited, those of the next ones are on their way. Pages that
//! lie far apart are left to the engine of the store, which has more reads in flight.

#![expect(
    clippy::indexing_slicing,
    reason = "a page names a run of its window and lies in it; buffers are those of the engine"
)]

use std::collections::VecDeque;

use tierbed_core::stats::IoStats;
use tierbed_core::store::ScanSink;
use tierbed_core::{Budget, Error, Reservation, Result};
use tierbed_io::{open_engine, BufId, Completion, DeviceId, EngineOptions, IoEngine, Op, Request};

use super::pages::{Failure, Pipeline, TableFile};
use super::runs::{PAGES_MIN, RUN_BYTES_MAX};
use super::scan::visit_page;
use super::scan_windows::{Limits, PlacedPage, Step, Window};

/// Runs that are read or visited at the same time.
pub(super) const RUNS_AT_ONCE: usize = 8;

/// Reads runs of one table's file.
pub(super) struct RunReader {
    engine: Box<dyn IoEngine>,
    device: DeviceId,
    free_count: usize,
    /// By buffer: what came of its read, until somebody asks.
    landed: Vec<Option<Result<()>>>,
    /// Dropped after the engine, which has the memory.
    _memory: Reservation,
}

impl RunReader {
    /// Builds the reader of `table`; `None` when its pages are few, or so is memory.
    ///
    /// # Errors
    /// Those of the engine.
    pub(super) fn open(
        table: &TableFile,
        engine: &EngineOptions,
        budget: &Budget,
    ) -> Result<Option<Self>> {
        let page_bytes = table.layout.page_bytes;
        // As for other requests, a quarter of what is free suffices.
        let bytes = RUN_BYTES_MAX.min(budget.free_bytes() / 4) as usize / RUNS_AT_ONCE;
        let buf_bytes = bytes - bytes % page_bytes;
        let is_large = table.map.used_slot_count() >= (RUNS_AT_ONCE * PAGES_MIN) as u64;
        if !is_large || buf_bytes < PAGES_MIN * page_bytes {
            return Ok(None);
        }
        let Ok(mut memory) = budget.reserve("page runs", (RUNS_AT_ONCE * buf_bytes) as u64) else {
            return Ok(None);
        };
        let options =
            EngineOptions { choice: engine.choice, queue_depth: RUNS_AT_ONCE as u32, buf_bytes };
        let mut engine = open_engine(&options)?;
        if memory.resize(engine.memory_bytes()).is_err() {
            return Ok(None);
        }
        let device = engine.attach(table.device.clone());
        let landed = (0..RUNS_AT_ONCE).map(|_| None).collect();
        Ok(Some(Self { engine, device, free_count: RUNS_AT_ONCE, landed, _memory: memory }))
    }

    /// Returns what was read.
    pub(super) fn stats(&self) -> IoStats {
        self.engine.stats()
    }

    /// Begins to read the runs of `window`, for which there is room.
    fn begin(&mut self, window: &mut Window, limits: &Limits) {
        for run in &window.runs {
            let Some(buf) = self.engine.acquire() else { panic!("a run finds no free buffer") };
            self.free_count -= 1;
            self.engine.submit(Request {
                device: self.device,
                op: Op::Read,
                offset_bytes: run.start * limits.page_bytes,
                len_bytes: ((run.end - run.start) * limits.page_bytes) as u32,
                buf,
                tag: u64::from(buf.0),
            });
            window.bufs.push(buf);
        }
    }

    /// Hands begun reads to the operating system.
    fn hand_over(&mut self) -> std::result::Result<(), Failure> {
        let mut done = Vec::new();
        self.engine.poll(&mut done).map_err(lost)?;
        self.note(done);
        Ok(())
    }

    /// Waits for the read into `buf`.
    fn wait_for(&mut self, buf: BufId) -> std::result::Result<(), Failure> {
        loop {
            if let Some(result) = self.landed[buf.0 as usize].take() {
                return result.map_err(Failure::from);
            }
            assert!(self.engine.in_flight_count() > 0, "a read that is waited for is in flight");
            let mut done = Vec::new();
            self.engine.wait(&mut done).map_err(lost)?;
            self.note(done);
        }
    }

    fn note(&mut self, done: Vec<Completion>) {
        for completion in done {
            self.landed[completion.buf.0 as usize] = Some(completion.result);
        }
    }

    /// Gives the buffers of `window` back.
    fn end(&mut self, window: &Window) {
        for buf in &window.bufs {
            self.engine.release(*buf);
            self.free_count += 1;
        }
    }
}

// An engine that cannot wait any more may still be writing into its buffers: nothing is certain.
fn lost(error: Error) -> Failure {
    Failure { error, is_poison: true }
}

impl Pipeline<'_> {
    /// As [`scan`](Self::scan), with runs of pages that `reader` reads.
    pub(super) fn scan_runs(
        &mut self,
        at: usize,
        reader: &mut RunReader,
        sink: &mut ScanSink<'_>,
    ) -> std::result::Result<u64, Failure> {
        let layout = self.tables[at].layout;
        let limits = Limits {
            page_count: layout.page_count,
            page_bytes: layout.page_bytes as u64,
            pages_max: (reader.engine.buf_bytes() / layout.page_bytes) as u64,
        };
        let (mut next, mut held, mut ahead) = (0, None, VecDeque::new());
        let mut checked = 0;
        loop {
            while ahead.len() < RUNS_AT_ONCE {
                let position_of = |page| self.tables[at].position_of(page);
                let step = held.take().or_else(|| limits.step(&mut next, position_of));
                match step {
                    Some(Step::Runs(window)) if window.runs.len() > reader.free_count => {
                        held = Some(Step::Runs(window));
                        break;
                    }
                    Some(Step::Runs(mut window)) => {
                        reader.begin(&mut window, &limits);
                        ahead.push_back(Step::Runs(window));
                    }
                    Some(alone @ Step::Alone(_)) => ahead.push_back(alone),
                    None => break,
                }
            }
            reader.hand_over()?;
            checked += match ahead.pop_front() {
                None => return Ok(checked),
                Some(Step::Runs(window)) => self.visit_window(at, &window, reader, sink)?,
                Some(Step::Alone(pages)) => {
                    let mut pages = pages.into_iter();
                    self.scan_pages(at, &mut |_| pages.next(), sink)?
                }
            };
        }
    }

    fn visit_window(
        &mut self,
        at: usize,
        window: &Window,
        reader: &mut RunReader,
        sink: &mut ScanSink<'_>,
    ) -> std::result::Result<u64, Failure> {
        for buf in &window.bufs {
            reader.wait_for(*buf)?;
        }
        let table = &self.tables[at];
        for PlacedPage { page, position, run } in &window.pages {
            let start = (position - window.runs[*run].start) as usize * table.layout.page_bytes;
            let bytes = reader.engine.bytes(window.bufs[*run]);
            self.stats.pages_read += 1;
            visit_page(table, *page, &bytes[start..start + table.layout.page_bytes], sink)?;
        }
        reader.end(window);
        Ok(window.pages.len() as u64)
    }
}
