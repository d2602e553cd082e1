//! Who does the background work? This file alone carries out plans.
//!
//! Source: RecDB §4.3, Algorithm 2 (compaction with delete file picker). Invariant: a plan is
//! carried out whole or not at all; until the new version is in place, its inputs are live, and
//! until the next commit is in force, the inputs' files stay.

use std::collections::BTreeSet;
use std::sync::Arc;

use tierbed_core::{Budget, Error, ErrorKind, Reservation, Result};
use tierbed_io::PAGE_BYTES;

use crate::compaction::merge::Merge;
use crate::compaction::plan::{input_ids, plan_compaction, MergePlan, PickerInput, Plan};
use crate::compaction::scheduler::{CompactionCost, Decision};
use crate::key::Key;
use crate::sst::{OpenSst, RunCursor, SstWriter};
use crate::store::LsmStore;
use crate::version::{SstId, SstMeta, VersionEdit};

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
}

/// What a merge made.
#[derive(Default)]
struct Merged {
    outputs: Vec<OpenSst>,
    visited_rows: u64,
    dropped_rows: u64,
    /// Keys written that the SST to rewrite may hold.
    keys: Vec<Key>,
    /// What `keys` costs.
    memory: Option<Reservation>,
}

impl Merged {
    fn remember(&mut self, key: Key, budget: &Budget) -> Result<()> {
        if self.keys.len() == self.keys.capacity() {
            let wanted = (2 * self.keys.len()).max(1024);
            // The old vector lives until its keys are copied.
            let bytes = 8 * (wanted + self.keys.len()) as u64;
            self.memory = None;
            self.memory = Some(budget.reserve("compaction buffers", bytes)?);
            self.keys.reserve_exact(wanted - self.keys.len());
        }
        self.keys.push(key);
        Ok(())
    }

    fn metas(&self) -> Vec<SstMeta> {
        self.outputs.iter().map(|sst| sst.meta).collect()
    }
}

/// Time to merge one byte before any merge was measured: 1 GB/s.
const MERGE_US_PER_BYTE: f64 = 0.001;

impl LsmStore {
    pub(crate) fn work_until_idle(&mut self) -> Result<()> {
        while !matches!(self.work_once()?, Work::Idle | Work::Deferred) {}
        Ok(())
    }

    pub(crate) fn work_once(&mut self) -> Result<Work> {
        if !self.sealed.is_empty() {
            self.flush_oldest()?;
            return Ok(Work::Flushed);
        }
        self.compact_once()
    }

    /// Compacts until level 0 takes another SST.
    pub(crate) fn make_room_on_level_0(&mut self) -> Result<()> {
        while self.version.level(0).len() >= self.options.shape.l0_stop {
            self.compact_once()?;
        }
        Ok(())
    }

    fn merge_us_per_byte(&self) -> f64 {
        if self.lsm.compaction_read_bytes == 0 || self.lsm.compaction_us == 0 {
            return MERGE_US_PER_BYTE;
        }
        self.lsm.compaction_us as f64 / self.lsm.compaction_read_bytes as f64
    }

    fn compact_once(&mut self) -> Result<Work> {
        let merge_us_per_byte = self.merge_us_per_byte();
        let input = PickerInput {
            picker: self.options.picker,
            outdated: self.monitor.counts(),
            merge_us_per_byte,
        };
        let plan = match plan_compaction(&self.version, &self.options.shape, &input) {
            Plan::Idle => return Ok(Work::Idle),
            Plan::Move { sst, input_level } => {
                let removed = BTreeSet::from([sst.id]);
                let edit = VersionEdit { removed, added: vec![(input_level + 1, sst)] };
                self.version = self.version.edited(&edit)?;
                self.lsm.move_count += 1;
                return Ok(Work::Moved);
            }
            Plan::Merge(plan) => plan,
        };
        let is_urgent = plan.is_urgent;
        let cost = CompactionCost {
            size_bytes: plan.size_bytes(),
            merge_us_per_byte,
            input_level: plan.input_level,
            is_urgent,
        };
        match self.scheduler.decide(self.options.clock.now_us(), &cost) {
            Decision::Defer => {
                self.lsm.deferred_count += 1;
                return Ok(Work::Deferred);
            }
            Decision::RunUrgently => self.lsm.urgent_count += 1,
            Decision::Run => {}
        }
        match self.check_quota(plan.size_bytes()) {
            // Without room for the outputs the inputs stay as they are; reads go on.
            Err(error) if error.kind() == ErrorKind::NoSpace && !is_urgent => {
                self.lsm.deferred_count += 1;
                return Ok(Work::Deferred);
            }
            result => result?,
        }
        self.run_merge(&plan)?;
        Ok(Work::Compacted)
    }

    fn run_merge(&mut self, plan: &MergePlan) -> Result<()> {
        let started_us = self.options.clock.now_us();
        let first_new = self.next_sst;
        let (merged, rewritten) = match self.write_merge(plan) {
            Ok(made) => made,
            Err(error) => {
                for id in first_new..self.next_sst {
                    let _ = self.tools.folder.remove(&SstId(id).file_name());
                }
                return Err(error);
            }
        };
        let inputs = input_ids(plan);
        let output_level = plan.input_level + 1;
        let mut edit = VersionEdit { removed: inputs.iter().copied().collect(), added: vec![] };
        edit.added.extend(merged.metas().into_iter().map(|sst| (output_level, sst)));
        self.monitor.replace(&inputs, &merged.metas(), merged.dropped_rows);
        self.count_merge(&merged);
        let mut outputs = merged.outputs;
        if let (Some((level, sst)), Some(rewritten)) = (&plan.rewrite, rewritten) {
            edit.removed.insert(sst.id);
            edit.added.extend(rewritten.metas().into_iter().map(|sst| (*level, sst)));
            self.monitor.replace(&[sst.id], &rewritten.metas(), rewritten.dropped_rows);
            self.count_merge(&rewritten);
            self.lsm.compaction_read_bytes += sst.size_bytes();
            self.lsm.rewrite_count += 1;
            outputs.extend(rewritten.outputs);
        }
        let read: u64 = plan.inputs.iter().chain(&plan.overlapping).map(SstMeta::size_bytes).sum();
        self.lsm.compaction_read_bytes += read;
        self.lsm.compaction_count += 1;
        self.install(&edit, outputs)?;
        self.lsm.compaction_us += self.options.clock.now_us().saturating_sub(started_us);
        Ok(())
    }

    fn count_merge(&mut self, merged: &Merged) {
        let written: u64 = merged.outputs.iter().map(|sst| sst.meta.size_bytes()).sum();
        self.lsm.compaction_write_bytes += written;
        self.lsm.rows_merged += merged.visited_rows;
        self.lsm.rows_dropped += merged.dropped_rows;
        self.stats.pages_written += written / PAGE_BYTES as u64;
    }

    fn open_ssts(&self, metas: &[SstMeta]) -> Result<Vec<Arc<OpenSst>>> {
        let open = |meta: &SstMeta| {
            let sst = self.ssts.get(&meta.id).cloned();
            sst.ok_or_else(|| Error::corruption("live SST is not open").with("sst_id", meta.id.0))
        };
        metas.iter().map(open).collect()
    }

    fn write_merge(&mut self, plan: &MergePlan) -> Result<(Merged, Option<Merged>)> {
        let chunk_bytes = self.options.sst.chunk_bytes;
        let all = (Key::MIN, Key::MAX);
        let mut runs = Vec::new();
        let inputs = self.open_ssts(&plan.inputs)?;
        if plan.input_level == 0 {
            runs.extend(inputs.into_iter().rev().map(|sst| vec![sst]));
        } else {
            runs.push(inputs);
        }
        runs.push(self.open_ssts(&plan.overlapping)?);
        let cursors: Result<Vec<_>> =
            runs.into_iter().map(|run| RunCursor::new(run, all, chunk_bytes)).collect();
        let rewrite = plan.rewrite.map(|(_, sst)| sst);
        let mut merged = self.write_runs(Merge::new(cursors?), rewrite.as_ref(), None)?;
        let Some(sst) = rewrite else { return Ok((merged, None)) };
        let cursor = RunCursor::new(self.open_ssts(&[sst])?, all, chunk_bytes)?;
        let newer = std::mem::take(&mut merged.keys);
        let rewritten = self.write_runs(Merge::new(vec![cursor]), None, Some(&newer))?;
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
        let mut left_out = 0;
        while let Some((key, record)) = merge.row() {
            let is_newer_elsewhere = newer.is_some_and(|keys| keys.binary_search(&key).is_ok());
            if is_newer_elsewhere || self.allocator.is_superseded(key) {
                left_out += 1;
                merge.advance()?;
                continue;
            }
            if remember_for.is_some_and(|sst| sst.first <= key && key <= sst.last) {
                merged.remember(key, &self.options.budget)?;
            }
            let mut open = match writer.take() {
                Some(open) => open,
                None => {
                    let id = SstId(self.next_sst);
                    self.next_sst += 1;
                    SstWriter::create(&self.tools, id, self.block_bytes)?
                }
            };
            open.push(key, record)?;
            merge.advance()?;
            if open.data_bytes() >= self.options.sst.sst_bytes {
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

    /// Puts the version after `edit` in place; `opened` are its new SSTs.
    pub(crate) fn install(&mut self, edit: &VersionEdit, opened: Vec<OpenSst>) -> Result<()> {
        self.version = self.version.edited(edit)?;
        for sst in opened {
            self.attach(Arc::new(sst));
        }
        for id in &edit.removed {
            if let Some(sst) = self.ssts.remove(id) {
                self.cache.remove_sst(*id, sst.meta.rows_blocks);
            }
            if let Some(device) = self.device_ids.remove(id) {
                self.engine.detach(device);
            }
            if !self.committed.ssts.contains_key(id) {
                let _ = self.tools.folder.remove(&id.file_name());
            }
        }
        Ok(())
    }
}
