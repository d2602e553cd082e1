//! Page-granular reads and read-modify-writes of rows.
//!
//! Rows of a request come in file order, so the rows of one page are neighbours: each page is
//! read once and written once per request. As many pages are in flight as the engine has
//! buffers. Of a request of many rows, pages that lie close together are one [run](super::runs).
//! A request ends only when none is in flight, also after an error.

#![expect(
    clippy::indexing_slicing,
    reason = "a job names a table of the store and rows of its request; keys are checked on entry"
)]

use std::ops::Range;

use tierbed_core::stats::{IoStats, StoreStats};
use tierbed_core::store::RowSink;
use tierbed_core::{Error, ErrorKind, Result, RowKey, RowWrite};
use tierbed_io::{AlignedBuf, BufId, Completion, Device, DeviceId, IoEngine, Op, Request};

use super::layout::{seal, verify, PageLayout, PageName, ROWS_MAGIC};
use super::page_map::{PageMap, PageWord};
use super::runs::{Divided, PlacedJob, Run};
use super::segments::Segments;

/// One table's file and page map.
#[derive(Debug)]
pub(super) struct TableFile {
    pub(super) owner: u32,
    pub(super) file: String,
    pub(super) layout: PageLayout,
    pub(super) device: std::sync::Arc<dyn Device>,
    pub(super) device_id: DeviceId,
    pub(super) map: PageMap,
    pub(super) segments: Segments,
    pub(super) map_memory: tierbed_core::Reservation,
}

impl TableFile {
    /// Returns what page `page` is called, written as `word` says.
    pub(super) fn name_of(&self, page: u64, word: PageWord) -> PageName {
        let generation = u32::from(word.generation());
        PageName { magic: ROWS_MAGIC, owner: self.owner, page, generation }
    }

    /// Returns where page `page` lies in the file, in pages, if it was ever written.
    pub(super) fn position_of(&self, page: u64) -> Option<u64> {
        let word = self.map.get(page);
        word.is_written().then(|| self.segments.position(page, word.slot()))
    }

    /// Returns the request that moves page `page`, as `word` says, and buffer `buf`.
    pub(super) fn request(&self, op: Op, page: u64, word: PageWord, buf: BufId) -> Request {
        assert!(page < self.layout.page_count, "page {page} of {}", self.layout.page_count);
        let position = self.segments.position(page, word.slot());
        Request {
            device: self.device_id,
            op,
            offset_bytes: position * self.layout.page_bytes as u64,
            len_bytes: self.layout.page_bytes as u32,
            buf,
            tag: u64::from(buf.0),
        }
    }

    /// Makes room for the pages of `layout`, which differs in their number only.
    pub(super) fn grow(&mut self, layout: PageLayout) -> Result<()> {
        if layout.page_count > self.layout.page_count {
            self.map_memory.resize(PageMap::memory_bytes(layout.page_count))?;
            self.device.set_len(2 * layout.page_count * layout.page_bytes as u64)?;
            self.map.grow(layout.page_count)?;
            self.segments.grow(layout.page_count);
            self.layout = layout;
            assert_eq!(self.map.page_count(), self.layout.page_count, "every page has a word");
        }
        Ok(())
    }

    /// Returns the bytes of the page slots in use.
    pub(super) fn disk_bytes(&self) -> u64 {
        self.map.used_slot_count() * self.layout.page_bytes as u64
    }
}

/// The rows of a request that live on one page.
#[derive(Debug, Clone)]
pub(super) struct PageJob {
    pub(super) table: usize,
    pub(super) page: u64,
    pub(super) rows: Range<usize>,
}

/// A failed request.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// The current slot of a page may be damaged: nothing may be read or written any more.
    pub(super) is_poison: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, is_poison: false }
    }
}

/// One request in progress over the engine.
pub(super) struct Pipeline<'a> {
    pub(super) engine: &'a mut dyn IoEngine,
    pub(super) tables: &'a mut [TableFile],
    pub(super) stats: &'a mut StoreStats,
    /// Of reads and writes past the engine.
    pub(super) io: &'a mut IoStats,
    /// Most bytes of a run; 0: every page is read by itself.
    pub(super) run_bytes: u64,
    /// Bytes of page slots that may still be taken into use.
    pub(super) quota_left_bytes: u64,
}

impl Pipeline<'_> {
    /// Reads `keys` (checked by the caller) and hands them to `sink`.
    pub(super) fn read(
        &mut self,
        keys: &[RowKey],
        sink: &mut RowSink<'_>,
    ) -> std::result::Result<(), Failure> {
        if self.run_bytes == 0 {
            let mut next = 0;
            return self.read_pages(keys, sink, &mut |layouts: &[TableFile]| {
                let job = job_at(layouts, next, keys.len(), |at| keys[at])?;
                next = job.rows.end;
                Some(job)
            });
        }
        let Divided { runs, left } = self.divide(keys);
        let mut buffer = AlignedBuf::new(if runs.is_empty() { 0 } else { self.run_bytes as usize });
        for run in runs {
            self.read_run(&run, &mut buffer, keys, sink)?;
        }
        let mut left = left.into_iter();
        self.read_pages(keys, sink, &mut |_| left.next())
    }

    /// Divides the pages of `keys` into runs and others, those never written among the others.
    fn divide(&self, keys: &[RowKey]) -> Divided {
        let (mut placed, mut absent) = (Vec::new(), Vec::new());
        let mut next = 0;
        while let Some(job) = job_at(self.tables, next, keys.len(), |at| keys[at]) {
            next = job.rows.end;
            let table = &self.tables[job.table];
            match table.position_of(job.page) {
                Some(position) => {
                    let page_bytes = table.layout.page_bytes as u64;
                    placed.push(PlacedJob { job, position, page_bytes });
                }
                None => absent.push(job),
            }
        }
        let mut divided = Divided::of(placed, self.run_bytes);
        divided.left.extend(absent);
        divided
    }

    fn read_run(
        &mut self,
        run: &Run,
        buffer: &mut AlignedBuf,
        keys: &[RowKey],
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let span = run.span();
        let Some(first) = run.jobs.first() else { panic!("a run has no page") };
        let table = &self.tables[first.job.table];
        let bytes = &mut buffer[..((span.end - span.start) * first.page_bytes) as usize];
        table.device.read_at(span.start * first.page_bytes, bytes)?;
        self.io.read_count += 1;
        self.io.read_bytes += bytes.len() as u64;
        self.io.submit_count += 1;
        for PlacedJob { job, position, .. } in &run.jobs {
            let start = (position - span.start) as usize * table.layout.page_bytes;
            let page = &bytes[start..start + table.layout.page_bytes];
            hand_out(table, Page { job, bytes: page }, self.stats, keys, sink)?;
        }
        Ok(())
    }

    /// Reads the pages that `next_job` gives, as many at once as there are buffers.
    fn read_pages(
        &mut self,
        keys: &[RowKey],
        sink: &mut RowSink<'_>,
        next_job: &mut dyn FnMut(&[TableFile]) -> Option<PageJob>,
    ) -> std::result::Result<(), Failure> {
        let mut flight = Flight::default();
        let mut next = next_job(self.tables);
        loop {
            while flight.failure.is_none() {
                let Some(job) = next.take() else { break };
                let table = &self.tables[job.table];
                let word = table.map.get(job.page);
                if word.is_written() {
                    let Some(buf) = self.engine.acquire() else {
                        next = Some(job);
                        break;
                    };
                    self.engine.submit(table.request(Op::Read, job.page, word, buf));
                    flight.launch(buf, job);
                } else {
                    self.stats.rows_absent += job.rows.len() as u64;
                    let mut absent = job.rows;
                    flight.check(absent.try_for_each(|at| sink(at, None)));
                }
                next = next_job(self.tables);
            }
            if !flight.land(self.engine)? {
                let is_done = next.is_none() || flight.failure.is_some();
                assert!(is_done, "a page of {} rows was not read", keys.len());
                return flight.finish();
            }
            for completion in std::mem::take(&mut flight.landed) {
                let result = self.deliver(&mut flight, &completion, keys, sink);
                flight.check(completion.result.and(result));
                self.engine.release(completion.buf);
            }
        }
    }

    fn deliver(
        &mut self,
        flight: &mut Flight,
        completion: &Completion,
        keys: &[RowKey],
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let job = flight.take(completion.buf);
        if completion.result.is_err() || flight.failure.is_some() {
            return Ok(());
        }
        let table = &self.tables[job.table];
        let bytes = &self.engine.bytes(completion.buf)[..table.layout.page_bytes];
        hand_out(table, Page { job: &job, bytes }, self.stats, keys, sink)
    }

    /// Writes `rows` (checked by the caller): reads each page, changes it, writes it. Whole pages
    /// that lie side by side are written at once, where there is memory for that.
    pub(super) fn write(&mut self, rows: &[RowWrite<'_>]) -> std::result::Result<(), Failure> {
        if self.run_bytes == 0 {
            let mut next = 0;
            return self.write_pages(rows, &mut |tables: &[TableFile]| {
                let job = job_at(tables, next, rows.len(), |at| rows[at].key)?;
                next = job.rows.end;
                Some(job)
            });
        }
        let mut left = self.write_runs(rows)?.into_iter();
        self.write_pages(rows, &mut |_| left.next())
    }

    /// Writes the pages that `next_job` gives, as many at once as there are buffers.
    fn write_pages(
        &mut self,
        rows: &[RowWrite<'_>],
        next_job: &mut dyn FnMut(&[TableFile]) -> Option<PageJob>,
    ) -> std::result::Result<(), Failure> {
        let mut flight = Flight::default();
        let mut next = next_job(self.tables);
        loop {
            while flight.failure.is_none() {
                let Some(job) = next.take() else { break };
                let Some(buf) = self.engine.acquire() else {
                    next = Some(job);
                    break;
                };
                let result = self.launch_write(&job, buf, rows);
                if result.is_err() {
                    self.engine.release(buf);
                } else {
                    flight.launch(buf, job);
                }
                flight.check(result);
                next = next_job(self.tables);
            }
            if !flight.land(self.engine)? {
                let is_done = next.is_none() || flight.failure.is_some();
                assert!(is_done, "a page of {} rows was not written", rows.len());
                return flight.finish();
            }
            for completion in std::mem::take(&mut flight.landed) {
                self.advance_write(&mut flight, completion, rows);
            }
        }
    }

    // A page never written, or wholly overwritten, needs no read.
    fn launch_write(&mut self, job: &PageJob, buf: BufId, rows: &[RowWrite<'_>]) -> Result<()> {
        self.take_quota(job)?;
        let table = &self.tables[job.table];
        let word = table.map.get(job.page);
        if word.is_written() && (job.rows.len() as u64) < table.layout.rows_per_page {
            self.engine.submit(table.request(Op::Read, job.page, word, buf));
            return Ok(());
        }
        self.engine.bytes_mut(buf)[..table.layout.page_bytes].fill(0);
        self.submit_changed(job, buf, rows);
        Ok(())
    }

    /// Takes a page's next slot from the quota, where it is a new one.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(super) fn take_quota(&mut self, job: &PageJob) -> Result<()> {
        let table = &self.tables[job.table];
        let word = table.map.get(job.page);
        let new_slots = word.next_write().used_slot_count() - word.used_slot_count();
        let new_bytes = new_slots * table.layout.page_bytes as u64;
        if new_bytes > self.quota_left_bytes {
            return Err(Error::new(ErrorKind::NoSpace, "disk quota reached")
                .with("file", &table.file)
                .with("remedy", "raise disk_quota and reopen the store at its last checkpoint"));
        }
        self.quota_left_bytes -= new_bytes;
        Ok(())
    }

    fn submit_changed(&mut self, job: &PageJob, buf: BufId, rows: &[RowWrite<'_>]) {
        let table = &self.tables[job.table];
        let next_word = table.map.get(job.page).next_write();
        let page = &mut self.engine.bytes_mut(buf)[..table.layout.page_bytes];
        for row in &rows[job.rows.clone()] {
            table.layout.put_record(page, table.layout.locate(row.key.row.0).1, row.record);
        }
        seal(page, table.name_of(job.page, next_word));
        self.engine.submit(table.request(Op::Write, job.page, next_word, buf));
    }

    fn advance_write(
        &mut self,
        flight: &mut Flight,
        completion: Completion,
        rows: &[RowWrite<'_>],
    ) {
        let buf = completion.buf;
        let job = flight.take(buf);
        let table = &mut self.tables[job.table];
        let word = table.map.get(job.page);
        match (completion.op, completion.result) {
            (Op::Read, Ok(())) if flight.failure.is_none() => {
                self.stats.pages_read += 1;
                let page = &self.engine.bytes(buf)[..table.layout.page_bytes];
                match verify(page, table.name_of(job.page, word), &table.file) {
                    Ok(()) => {
                        self.submit_changed(&job, buf, rows);
                        flight.launch(buf, job);
                        return;
                    }
                    Err(error) => flight.check(Err(error)),
                }
            }
            (Op::Write, Ok(())) => {
                self.stats.pages_written += 1;
                table.map.set(job.page, word.next_write());
            }
            (Op::Write, Err(error)) => {
                // A fresh slot holds nothing yet; one rewritten in place has rows to lose.
                let is_poison = word.is_moved() || error.kind() != ErrorKind::NoSpace;
                flight.fail(Failure { error, is_poison });
            }
            (Op::Read, result) => flight.check(result),
        }
        self.engine.release(buf);
    }
}

/// A page that was read, and what is wanted of it.
struct Page<'a> {
    job: &'a PageJob,
    bytes: &'a [u8],
}

// Checks a page and hands its rows of the request to `sink`.
fn hand_out(
    table: &TableFile,
    page: Page<'_>,
    stats: &mut StoreStats,
    keys: &[RowKey],
    sink: &mut RowSink<'_>,
) -> Result<()> {
    let Page { job, bytes } = page;
    stats.pages_read += 1;
    verify(bytes, table.name_of(job.page, table.map.get(job.page)), &table.file)?;
    for at in job.rows.clone() {
        let record = table.layout.record(bytes, table.layout.locate(keys[at].row.0).1);
        stats.rows_absent += u64::from(record.is_none());
        sink(at, record)?;
    }
    Ok(())
}

/// Returns the rows of a request of `count`, from `start` on, that share a page.
pub(super) fn job_at(
    tables: &[TableFile],
    start: usize,
    count: usize,
    key_at: impl Fn(usize) -> RowKey,
) -> Option<PageJob> {
    if start == count {
        return None;
    }
    let first = key_at(start);
    let layout = tables[first.table.0 as usize].layout;
    let page = layout.locate(first.row.0).0;
    let is_here = |key: RowKey| key.table == first.table && layout.locate(key.row.0).0 == page;
    let mut end = start + 1;
    while end < count && is_here(key_at(end)) {
        end += 1;
    }
    Some(PageJob { table: first.table.0 as usize, page, rows: start..end })
}

/// Requests in flight, by buffer, and the first failure.
#[derive(Default)]
pub(super) struct Flight {
    jobs: Vec<Option<PageJob>>,
    pub(super) landed: Vec<Completion>,
    pub(super) failure: Option<Failure>,
}

impl Flight {
    fn launch(&mut self, buf: BufId, job: PageJob) {
        let at = buf.0 as usize;
        if self.jobs.len() <= at {
            self.jobs.resize(at + 1, None);
        }
        assert!(self.jobs[at].is_none(), "a buffer carries one request at a time");
        self.jobs[at] = Some(job);
    }

    fn take(&mut self, buf: BufId) -> PageJob {
        let Some(job) = self.jobs[buf.0 as usize].take() else {
            panic!("a completion belongs to a request in flight")
        };
        job
    }

    /// Waits for completions; `false` when no request is in flight.
    pub(super) fn land(&mut self, engine: &mut dyn IoEngine) -> std::result::Result<bool, Failure> {
        if engine.in_flight_count() == 0 {
            return Ok(false);
        }
        // An engine that cannot wait any more may still be writing: nothing is certain.
        engine.wait(&mut self.landed).map_err(|error| Failure { error, is_poison: true })?;
        Ok(true)
    }

    /// Keeps the first failure.
    pub(super) fn check(&mut self, result: Result<()>) {
        if let Err(error) = result {
            self.fail(Failure::from(error));
        }
    }

    fn fail(&mut self, failure: Failure) {
        match &mut self.failure {
            None => self.failure = Some(failure),
            Some(first) => first.is_poison |= failure.is_poison,
        }
    }

    /// Returns the first failure.
    pub(super) fn finish(self) -> std::result::Result<(), Failure> {
        self.failure.map_or(Ok(()), Err)
    }
}
