//! Background work: submission of jobs and installation of their results.
//!
//! ```text
//! caller: plan (pure) ─▶ job ─▶ worker: new files ─▶ caller: install the next version
//! ```
//!
//! The caller plans, hands a job over, and goes on reading the old version; at one of its next
//! writes, commits or announcements it installs what the worker made. Invariant: a job is carried
//! out whole or not at all; until the new version is in place, its inputs are live, and until the
//! next commit is in force, the inputs' files stay. An error of the worker is returned by that
//! next call, and poisons the store exactly if it would have on the calling thread.

pub(crate) mod job;
mod thread;

use std::collections::BTreeSet;
use std::sync::Arc;

use tierbed_core::{ErrorKind, Result};
use tierbed_io::PAGE_BYTES;

use crate::compaction::picker::{input_ids, pick_compaction, Pick, PickedMerge, PickerInput};
use crate::compaction::scheduler::{CompactionCost, Decision};
use crate::sst::OpenSst;
use crate::store::LsmStore;
use crate::version::{SstId, SstMeta, VersionEdit};

use job::{carry_out, Done, HotKeys, Job, Made, MergeTask, Merged, Task};
pub(crate) use thread::Worker;
pub use thread::WorkerChoice;

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Nothing is due.
    Idle,
    /// A memtable became an SST.
    Flushed,
    /// An SST went one level down.
    Moved,
    /// SSTs were merged.
    Compacted,
    /// A compaction is due and the scheduler put it off.
    Deferred,
    /// A job was handed to the background thread.
    Started,
    /// The background thread is at work.
    Running,
}

/// A job that the background thread has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnderWay {
    is_flush: bool,
    /// No file of the job has a smaller number.
    pub(crate) first_new: SstId,
    /// Bytes it may write.
    pub(crate) size_bytes: u64,
}

/// What to do next.
enum Next {
    Did(Work),
    Do(Box<Job>),
}

/// Time to merge one byte before any merge was measured: 1 GB/s.
const MERGE_US_PER_BYTE: f64 = 0.001;

impl LsmStore {
    pub(crate) fn work_until_idle(&mut self) -> Result<()> {
        while matches!(self.work_once()?, Work::Flushed | Work::Moved | Work::Compacted) {}
        Ok(())
    }

    pub(crate) fn work_once(&mut self) -> Result<Work> {
        if let Some(work) = self.collect()? {
            return Ok(work);
        }
        if self.under_way.is_some() {
            return Ok(Work::Running);
        }
        match self.next_job()? {
            Next::Did(work) => Ok(work),
            Next::Do(job) => self.start(*job),
        }
    }

    /// Installs what the background thread finished, if it did.
    pub(crate) fn collect(&mut self) -> Result<Option<Work>> {
        let Worker::Thread(background) = &self.worker else { return Ok(None) };
        if self.under_way.is_none() {
            return Ok(None);
        }
        match background.collect()? {
            None => Ok(None),
            Some(done) => self.take_over(done).map(Some),
        }
    }

    // Waits for the background thread and installs what it made.
    fn wait_for_worker(&mut self) -> Result<()> {
        let Worker::Thread(background) = &self.worker else { return Ok(()) };
        if self.under_way.is_none() {
            return Ok(());
        }
        let done = background.wait()?;
        self.take_over(done).map(|_| ())
    }

    fn take_over(&mut self, done: Done) -> Result<Work> {
        // Whatever became of it, no job is under way.
        let begun = self.under_way.take();
        if let (Some(begun), Ok(made)) = (begun, &done.result) {
            // Garbage collection spares files from this number on while the job runs.
            let is_spared = made.ssts().all(|sst| sst.meta.id >= begun.first_new);
            assert!(is_spared, "a job made an SST with a number given before");
        }
        self.install(done)
    }

    fn start(&mut self, job: Job) -> Result<Work> {
        let Worker::Thread(background) = &self.worker else {
            let done = carry_out(job, &self.tools);
            return self.install(done);
        };
        assert!(self.under_way.is_none(), "one job is under way at a time");
        let under_way = UnderWay {
            is_flush: matches!(job.task, Task::Flush(_)),
            first_new: self.tools.peek_id(),
            size_bytes: job.size_bytes(),
        };
        background.give(job)?;
        self.under_way = Some(under_way);
        Ok(Work::Started)
    }

    fn next_job(&mut self) -> Result<Next> {
        let has_room = self.version.level(0).len() < self.options.shape.l0_stop;
        match self.sealed.front().cloned() {
            Some(memtable) if has_room => {
                self.check_quota(memtable.record_bytes() as u64)?;
                Ok(Next::Do(Box::new(self.job(Task::Flush(memtable)))))
            }
            _ => self.next_compaction(),
        }
    }

    fn job(&self, task: Task) -> Job {
        // The allocator has reserved what these lists cost.
        let hot_keys = HotKeys { hot: self.allocator.hot_keys() };
        Job { task, hot_keys, block_bytes: self.block_bytes }
    }

    /// Turns the oldest sealed memtable into an SST before it returns. When the background thread
    /// is at something else, the caller does it: writes never wait for a merge, unless level 0
    /// is full.
    pub(crate) fn flush_oldest(&mut self) -> Result<()> {
        if self.under_way.is_some_and(|job| job.is_flush) {
            return self.wait_for_worker();
        }
        while self.version.level(0).len() >= self.options.shape.l0_stop {
            if self.under_way.is_none() {
                if let Next::Do(job) = self.next_compaction()? {
                    self.start(*job)?;
                }
            }
            self.wait_for_worker()?;
        }
        let Some(memtable) = self.sealed.front().cloned() else { return Ok(()) };
        self.check_quota(memtable.record_bytes() as u64)?;
        let job = self.job(Task::Flush(memtable));
        let done = carry_out(job, &self.tools);
        self.install(done).map(|_| ())
    }

    fn merge_us_per_byte(&self) -> f64 {
        if self.lsm.compaction_read_bytes == 0 || self.lsm.compaction_us == 0 {
            return MERGE_US_PER_BYTE;
        }
        self.lsm.compaction_us as f64 / self.lsm.compaction_read_bytes as f64
    }

    fn next_compaction(&mut self) -> Result<Next> {
        let merge_us_per_byte = self.merge_us_per_byte();
        let input = PickerInput {
            picker: self.options.picker,
            outdated: self.monitor.counts(),
            merge_us_per_byte,
        };
        let picked = match pick_compaction(&self.version, &self.options.shape, &input) {
            Pick::Idle => return Ok(Next::Did(Work::Idle)),
            Pick::Move { sst, input_level } => {
                let removed = BTreeSet::from([sst.id]);
                let edit = VersionEdit { removed, added: vec![(input_level + 1, sst)] };
                self.version = self.version.edited(&edit)?;
                self.lsm.move_count += 1;
                return Ok(Next::Did(Work::Moved));
            }
            Pick::Merge(picked) => picked,
        };
        let is_urgent = picked.is_urgent;
        let cost = CompactionCost {
            size_bytes: picked.size_bytes(),
            merge_us_per_byte,
            input_level: picked.input_level,
            is_urgent,
        };
        match self.scheduler.decide(self.options.clock.now_us(), &cost) {
            Decision::Defer => {
                self.lsm.deferred_count += 1;
                return Ok(Next::Did(Work::Deferred));
            }
            Decision::RunUrgently => self.lsm.urgent_count += 1,
            Decision::Run => {}
        }
        match self.check_quota(picked.size_bytes()) {
            // Without room for the outputs the inputs stay as they are; reads go on.
            Err(error) if error.kind() == ErrorKind::NoSpace && !is_urgent => {
                self.lsm.deferred_count += 1;
                return Ok(Next::Did(Work::Deferred));
            }
            result => result?,
        }
        let rewrite = picked.rewrite.map(|(_, sst)| sst);
        let task = MergeTask {
            inputs: self.open_ssts(&picked.inputs),
            overlapping: self.open_ssts(&picked.overlapping),
            rewrite: self.open_ssts(rewrite.as_slice()).pop(),
            picked,
        };
        Ok(Next::Do(Box::new(self.job(Task::Merge(task)))))
    }

    fn open_ssts(&self, metas: &[SstMeta]) -> Vec<Arc<OpenSst>> {
        metas.iter().map(|meta| self.open_sst(meta.id)).collect()
    }

    // Puts the version with what a job made in place.
    fn install(&mut self, done: Done) -> Result<Work> {
        let made = done.result?;
        let new_count = made.ssts().count();
        if let Err(error) = self.count_metadata(self.version.ssts().count() + new_count) {
            for sst in made.ssts() {
                let _ = self.tools.folder.remove(&sst.meta.id.file_name());
            }
            return Err(error);
        }
        match done.job.task {
            Task::Flush(memtable) => {
                let oldest = self.sealed.front();
                let is_oldest = oldest.is_some_and(|oldest| Arc::ptr_eq(oldest, &memtable));
                assert!(is_oldest, "memtables become SSTs in the order in which they were sealed");
                self.install_flush(made).map(|()| Work::Flushed)
            }
            Task::Merge(merge) => self.install_merge(&merge.picked, made).map(|()| Work::Compacted),
        }
    }

    fn install_flush(&mut self, made: Made) -> Result<()> {
        let metas = made.merged.metas();
        if !metas.is_empty() {
            let bytes = made.merged.size_bytes();
            self.lsm.flush_count += 1;
            self.lsm.flush_bytes += bytes;
            self.stats.pages_written += bytes / PAGE_BYTES as u64;
            let added = metas.into_iter().map(|sst| (0, sst)).collect();
            let edit = VersionEdit { added, ..VersionEdit::default() };
            self.install_edit(&edit, made.merged.outputs)?;
        }
        self.sealed.pop_front();
        self.forget_flushed_segments();
        Ok(())
    }

    fn install_merge(&mut self, picked: &PickedMerge, made: Made) -> Result<()> {
        let merged = made.merged;
        let inputs = input_ids(picked);
        let output_level = picked.input_level + 1;
        let mut edit = VersionEdit { removed: inputs.iter().copied().collect(), added: vec![] };
        edit.added.extend(merged.metas().into_iter().map(|sst| (output_level, sst)));
        self.monitor.replace(&inputs, &merged.metas(), merged.dropped_rows);
        self.count_merge(&merged);
        let mut outputs = merged.outputs;
        let is_picked = picked.rewrite.is_some();
        assert!(is_picked || made.rewritten.is_none(), "an SST was rewritten that was not picked");
        self.lsm.rewrites_skipped += u64::from(is_picked && made.rewritten.is_none());
        if let (Some((level, sst)), Some(rewritten)) = (&picked.rewrite, made.rewritten) {
            edit.removed.insert(sst.id);
            edit.added.extend(rewritten.metas().into_iter().map(|sst| (*level, sst)));
            self.monitor.replace(&[sst.id], &rewritten.metas(), rewritten.dropped_rows);
            self.count_merge(&rewritten);
            self.lsm.rewrite_count += 1;
            outputs.extend(rewritten.outputs);
        }
        self.lsm.compaction_read_bytes += picked.size_bytes();
        self.lsm.compaction_count += 1;
        self.lsm.compaction_us += made.took_us;
        self.install_edit(&edit, outputs)
    }

    fn count_merge(&mut self, merged: &Merged) {
        let written = merged.size_bytes();
        self.lsm.compaction_write_bytes += written;
        self.lsm.rows_merged += merged.visited_rows;
        self.lsm.rows_dropped += merged.dropped_rows;
        self.stats.pages_written += written / PAGE_BYTES as u64;
    }

    // Puts the version after `edit` in place; `opened` are its new SSTs.
    fn install_edit(&mut self, edit: &VersionEdit, opened: Vec<OpenSst>) -> Result<()> {
        self.version = self.version.edited(edit)?;
        for sst in opened {
            self.attach(Arc::new(sst));
        }
        for id in &edit.removed {
            let (sst, device) = (self.ssts.remove(id), self.device_ids.remove(id));
            let (Some(sst), Some(device)) = (sst, device) else {
                panic!("the live SST {} is not open", id.0)
            };
            self.cache.remove_sst(*id, sst.meta.rows_blocks);
            self.engine.detach(device);
            if !self.committed.ssts.contains_key(id) {
                let _ = self.tools.folder.remove(&id.file_name());
            }
        }
        Ok(())
    }
}
