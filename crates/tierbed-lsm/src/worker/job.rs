//! Background jobs: flushes and compactions.
//!
//! A job holds everything it needs: the memtable or the SSTs, which never change, and the hot keys
//! of hot rows as they were when it was planned. So it runs beside reads and writes, on any
//! thread, and changes nothing but new files. Rows that move meanwhile were written again, so what
//! the job keeps or drops of them is outdated either way.
//!
//! Source: RecDB §4.3, Algorithm 2 (compaction with delete file picker).

use std::sync::Arc;

use tierbed_core::{Error, ErrorKind, Reservation, Result};

use crate::compaction::merge::Merge;
use crate::compaction::picker::PickedMerge;
use crate::key::Key;
use crate::memtable::Memtable;
use crate::sst::{OpenSst, RunCursor, SstTools, SstWriter};
use crate::version::{SstId, SstMeta};

/// Rows between two looks at whether the store is being closed.
const ROWS_PER_LOOK: u64 = 1024;

/// One piece of background work.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) task: Task,
    /// Under which prefix rows lived when the job was planned.
    pub(crate) hot_keys: HotKeys,
    /// Bytes of the blocks to write.
    pub(crate) block_bytes: usize,
}

/// What to do.
#[derive(Debug)]
pub(crate) enum Task {
    /// Turn a memtable into an SST.
    Flush(Arc<Memtable>),
    /// Merge SSTs.
    Merge(MergeTask),
}

/// A merge with its inputs opened.
#[derive(Debug)]
pub(crate) struct MergeTask {
    pub(crate) picked: PickedMerge,
    pub(crate) inputs: Vec<Arc<OpenSst>>,
    pub(crate) overlapping: Vec<Arc<OpenSst>>,
    pub(crate) rewrite: Option<Arc<OpenSst>>,
}

impl Job {
    /// Returns the bytes the job reads, about as many as it writes at most.
    pub(crate) fn size_bytes(&self) -> u64 {
        match &self.task {
            Task::Flush(memtable) => memtable.record_bytes() as u64,
            Task::Merge(merge) => merge.picked.size_bytes(),
        }
    }
}

/// A job that was carried out, or could not be; then nothing is left of it.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) job: Job,
    pub(crate) result: Result<Made>,
}

/// What a job made.
#[derive(Debug)]
pub(crate) struct Made {
    /// From the memtable, or from the merge of two levels.
    pub(crate) merged: Merged,
    /// From the SST that was freed of outdated rows, where there was memory for it.
    pub(crate) rewritten: Option<Merged>,
    /// Time it took, microseconds.
    pub(crate) took_us: u64,
}

impl Made {
    /// Returns the SSTs made.
    pub(crate) fn ssts(&self) -> impl Iterator<Item = &OpenSst> {
        self.merged.outputs.iter().chain(self.rewritten.iter().flat_map(|merged| &merged.outputs))
    }
}

/// The rows under the hot prefix at one moment, ascending.
#[derive(Debug)]
pub(crate) struct HotKeys {
    pub(crate) hot: Vec<Key>,
}

impl HotKeys {
    fn is_superseded(&self, key: Key) -> bool {
        let is_newest_hot = self.hot.binary_search(&Key::hot(key.row())).is_ok();
        key.is_hot() != is_newest_hot
    }
}

/// SSTs written, and what was counted on the way.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    pub(crate) outputs: Vec<OpenSst>,
    pub(crate) visited_rows: u64,
    pub(crate) dropped_rows: u64,
    /// Keys written that the SST to rewrite may hold; `None` when there was no memory for them.
    keys: Option<Vec<Key>>,
    /// What `keys` costs.
    memory: Option<Reservation>,
}

impl Merged {
    // Without memory for all keys they are forgotten: the rewrite they are for saves space and
    // reads, nothing else.
    fn remember(&mut self, key: Key) {
        let (Some(keys), Some(memory)) = (&mut self.keys, &mut self.memory) else { return };
        if keys.len() == keys.capacity() {
            let wanted = (2 * keys.len()).max(1024);
            // The old vector lives until its keys are copied.
            let bytes = 8 * (wanted + keys.len()) as u64;
            if memory.resize_optional(bytes).is_err() {
                (self.keys, self.memory) = (None, None);
                return;
            }
            keys.reserve_exact(wanted - keys.len());
        }
        keys.push(key);
    }

    /// Returns what is known of the SSTs.
    pub(crate) fn metas(&self) -> Vec<SstMeta> {
        self.outputs.iter().map(|sst| sst.meta).collect()
    }

    /// Returns the bytes of the SSTs.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.outputs.iter().map(|sst| sst.meta.size_bytes()).sum()
    }
}

/// Carries `job` out. After an error its files are gone again.
pub(crate) fn carry_out(job: Job, tools: &SstTools) -> Done {
    let started_us = tools.clock.now_us();
    let mut work = Running { job: &job, tools, files: Vec::new() };
    let made = match &job.task {
        Task::Flush(memtable) => work.flush(memtable),
        Task::Merge(merge) => work.merge(merge),
    };
    if made.is_err() {
        for id in work.files {
            let _ = tools.folder.remove(&id.file_name());
        }
    }
    let took_us = tools.clock.now_us().saturating_sub(started_us);
    let result = made.map(|(merged, rewritten)| Made { merged, rewritten, took_us });
    Done { job, result }
}

/// A job while it runs.
struct Running<'a> {
    job: &'a Job,
    tools: &'a SstTools,
    /// SSTs begun.
    files: Vec<SstId>,
}

impl<'a> Running<'a> {
    fn begin_sst(&mut self) -> Result<SstWriter<'a>> {
        let id = self.tools.next_id();
        self.files.push(id);
        SstWriter::create(self.tools, id, self.job.block_bytes)
    }

    // Rows that moved to the other prefix since are left out; no SST when that leaves nothing.
    fn flush(&mut self, memtable: &Memtable) -> Result<(Merged, Option<Merged>)> {
        let mut merged = Merged::default();
        let hot_keys = &self.job.hot_keys;
        let rows = memtable.range(Key::MIN..=Key::MAX);
        let mut writer: Option<SstWriter<'_>> = None;
        for (key, record) in rows.filter(|(key, _)| !hot_keys.is_superseded(*key)) {
            let mut open = match writer.take() {
                Some(open) => open,
                None => self.begin_sst()?,
            };
            open.push(key, record)?;
            writer = Some(open);
        }
        if let Some(open) = writer {
            merged.outputs.push(open.finish()?);
        }
        Ok((merged, None))
    }

    fn merge(&mut self, task: &MergeTask) -> Result<(Merged, Option<Merged>)> {
        let chunk_bytes = self.tools.chunk_bytes;
        let all = Key::MIN..=Key::MAX;
        let mut runs = Vec::new();
        if task.picked.input_level == 0 {
            runs.extend(task.inputs.iter().rev().map(|sst| vec![Arc::clone(sst)]));
        } else {
            runs.push(task.inputs.clone());
        }
        runs.push(task.overlapping.clone());
        let cursors: Result<Vec<_>> =
            runs.into_iter().map(|run| RunCursor::new(run, &all, chunk_bytes)).collect();
        let rewrite = task.rewrite.as_ref().map(|sst| sst.meta);
        let mut merged = self.write_runs(Merge::new(cursors?), rewrite.as_ref(), None)?;
        let Some(sst) = &task.rewrite else { return Ok((merged, None)) };
        let cursor = RunCursor::new(vec![Arc::clone(sst)], &all, chunk_bytes)?;
        let Some(newer) = merged.keys.take() else { return Ok((merged, None)) };
        let rewritten = self.write_runs(Merge::new(vec![cursor]), None, Some(&newer))?;
        merged.memory = None;
        Ok((merged, Some(rewritten)))
    }

    // Writes what is left of `merge`: neither superseded nor in `newer` (ascending). Remembers
    // the keys that `remember_for` may hold.
    fn write_runs(
        &mut self,
        mut merge: Merge,
        remember_for: Option<&SstMeta>,
        newer: Option<&[Key]>,
    ) -> Result<Merged> {
        let mut merged = Merged::default();
        let mut writer: Option<SstWriter<'_>> = None;
        let (mut left_out, mut row_count) = (0, 0u64);
        while let Some((key, record)) = merge.row() {
            row_count += 1;
            if row_count.is_multiple_of(ROWS_PER_LOOK) && self.tools.is_closing() {
                return Err(Error::new(ErrorKind::Closed, "store is being closed"));
            }
            let is_newer_elsewhere = newer.is_some_and(|keys| keys.binary_search(&key).is_ok());
            if is_newer_elsewhere || self.job.hot_keys.is_superseded(key) {
                left_out += 1;
                merge.advance()?;
                continue;
            }
            if remember_for.is_some_and(|sst| sst.first <= key && key <= sst.last) {
                merged.remember(key);
            }
            let mut open = match writer.take() {
                Some(open) => open,
                None => self.begin_sst()?,
            };
            open.push(key, record)?;
            merge.advance()?;
            if open.data_bytes() >= self.tools.sst_bytes {
                merged.outputs.push(open.finish()?);
            } else {
                writer = Some(open);
            }
        }
        if let Some(open) = writer {
            merged.outputs.push(open.finish()?);
        }
        merged.visited_rows = merge.visited_rows;
        merged.dropped_rows = merge.skipped_rows + left_out;
        Ok(merged)
    }
}
