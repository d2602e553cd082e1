//! Pages that a request overwrites whole and that lie side by side: written at once.
//!
//! An import, or a checkpoint that is loaded, gives whole pages one behind the other. A disk does
//! so many writes a second, however small they are, so a write of its own for each page is what
//! bounds them. A page of which only some rows change is left: it is read first.
//!
//! Every page keeps a slot, a generation and a checksum of its own, so that a write that stops in
//! the middle leaves pages that are whole, and others that no commit knows.

#![expect(
    clippy::indexing_slicing,
    reason = "jobs name tables of the store and rows of their request; keys are checked on entry"
)]

use tierbed_core::{ErrorKind, RowWrite};
use tierbed_io::AlignedBuf;

use super::layout::seal;
use super::page_map::PageWord;
use super::pages::{job_at, Failure, PageJob, Pipeline};
use super::runs::PAGES_MIN;

/// Whole pages whose next slots lie side by side.
#[derive(Debug)]
struct WriteRun {
    jobs: Vec<PageJob>,
    /// Of the first page in the file, in pages.
    position: u64,
}

/// The pages of a request.
#[derive(Debug, Default)]
pub(super) struct DividedWrite {
    runs: Vec<WriteRun>,
    /// Pages of which some rows stay, or that lie alone.
    pub(super) left: Vec<PageJob>,
}

impl DividedWrite {
    fn push(&mut self, job: PageJob, position: u64, pages_max: usize) {
        let is_next = |run: &&mut WriteRun| {
            let is_of_table = run.jobs.last().is_some_and(|last| last.table == job.table);
            let end = run.position + run.jobs.len() as u64;
            is_of_table && end == position && run.jobs.len() < pages_max
        };
        match self.runs.last_mut().filter(is_next) {
            Some(run) => run.jobs.push(job),
            None => self.runs.push(WriteRun { jobs: vec![job], position }),
        }
    }

    fn leave_short_runs(&mut self) {
        let is_long = |run: &mut WriteRun| run.jobs.len() >= PAGES_MIN;
        let short: Vec<_> = self.runs.extract_if(.., |run| !is_long(run)).collect();
        self.left.extend(short.into_iter().flat_map(|run| run.jobs));
        self.left.sort_unstable_by_key(|job| job.rows.start);
    }
}

impl Pipeline<'_> {
    /// Writes the runs of a request; returns the pages that are left.
    pub(super) fn write_runs(
        &mut self,
        rows: &[RowWrite<'_>],
    ) -> std::result::Result<Vec<PageJob>, Failure> {
        let mut divided = self.divide_writes(rows);
        divided.leave_short_runs();
        if !divided.runs.is_empty() {
            let mut buffer = AlignedBuf::new(self.run_bytes as usize);
            for run in &divided.runs {
                self.write_run(run, &mut buffer, rows)?;
            }
        }
        Ok(divided.left)
    }

    fn divide_writes(&self, rows: &[RowWrite<'_>]) -> DividedWrite {
        let mut divided = DividedWrite::default();
        let mut next = 0;
        while let Some(job) = job_at(self.tables, next, rows.len(), |at| rows[at].key) {
            next = job.rows.end;
            let table = &self.tables[job.table];
            let word = table.map.get(job.page);
            let is_whole = job.rows.len() as u64 == table.layout.rows_per_page;
            if is_whole || !word.is_written() {
                let position = table.segments.position(job.page, word.next_write().slot());
                let pages_max = self.run_bytes as usize / table.layout.page_bytes;
                divided.push(job, position, pages_max);
            } else {
                divided.left.push(job);
            }
        }
        divided
    }

    fn write_run(
        &mut self,
        run: &WriteRun,
        buffer: &mut AlignedBuf,
        rows: &[RowWrite<'_>],
    ) -> std::result::Result<(), Failure> {
        let Some(first) = run.jobs.first() else { panic!("a run has no page") };
        for job in &run.jobs {
            self.take_quota(job)?;
        }
        let table = &mut self.tables[first.table];
        let page_bytes = table.layout.page_bytes;
        let bytes = &mut buffer[..run.jobs.len() * page_bytes];
        bytes.fill(0);
        let words: Vec<PageWord> = run.jobs.iter().map(|job| table.map.get(job.page)).collect();
        for ((job, word), page) in
            run.jobs.iter().zip(&words).zip(bytes.chunks_exact_mut(page_bytes))
        {
            for row in &rows[job.rows.clone()] {
                table.layout.put_record(page, table.layout.locate(row.key.row.0).1, row.record);
            }
            seal(page, table.name_of(job.page, word.next_write()));
        }
        let written = table.device.write_at(run.position * page_bytes as u64, bytes);
        self.io.write_count += 1;
        self.io.write_bytes += bytes.len() as u64;
        self.io.submit_count += 1;
        written.map_err(|error| {
            // A fresh slot holds nothing yet; one rewritten in place has rows to lose.
            let is_moved = words.iter().any(|word| word.is_moved());
            let is_poison = is_moved || error.kind() != ErrorKind::NoSpace;
            Failure { error, is_poison }
        })?;
        for (job, word) in run.jobs.iter().zip(&words) {
            table.map.set(job.page, word.next_write());
        }
        self.stats.pages_written += run.jobs.len() as u64;
        Ok(())
    }
}
