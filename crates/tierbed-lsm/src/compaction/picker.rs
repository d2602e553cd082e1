//! Compaction picker. Pure: reads metadata, touches no file.
//!
//! Levels as usual: level 0 is due by the number of its SSTs, deeper ones by their bytes; the
//! most overdue goes first. Which SST of a deeper level goes is the picker's choice:
//!
//! ```text
//! Largest       the largest SST (what RocksDB does)                      RecDB §2.2
//! MostOutdated  the highest compaction score, and with every level-0     RecDB §4.3, Eq. 1,
//!               merge one SST of level 2 or deeper is freed of what      Algorithms 1 and 2
//!               that merge made outdated
//! ```

use super::outdated::outdated_rows;
use super::outdated::OutdatedCounts;
use crate::version::{SstId, SstMeta, Version, LEVELS_MAX};

/// Who chooses the SST of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Picker {
    /// The largest SST.
    Largest,
    /// The SST with most outdated rows per time to merge it. Source: RecDB Eq. 1.
    #[default]
    MostOutdated,
}

/// When a level is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeShape {
    /// SSTs on level 0 that make it due.
    pub l0_trigger: usize,
    /// SSTs on level 0 that make it urgent: no flush before it is merged. A deeper level is
    /// urgent when it holds as many times what it should.
    pub l0_stop: usize,
    /// Bytes level 1 should have at most.
    pub level1_bytes: u64,
    /// How many times more each deeper level may have.
    pub level_ratio: u64,
}

impl TreeShape {
    fn target_bytes(&self, level: usize) -> u64 {
        let deeper = u32::try_from(level.saturating_sub(1)).unwrap_or(u32::MAX);
        self.level1_bytes.saturating_mul(self.level_ratio.saturating_pow(deeper))
    }
}

/// What a picker knows beside the version.
#[derive(Debug, Clone, Copy)]
pub struct PickerInput<'a> {
    /// Which picker.
    pub picker: Picker,
    /// Outdated rows known per SST.
    pub outdated: &'a OutdatedCounts,
    /// Measured time to merge one byte: RecDB's `V_merge`.
    pub merge_us_per_byte: f64,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pick {
    /// No level is due.
    Idle,
    /// Hang one SST a level deeper, where it meets no other.
    Move {
        /// The SST.
        sst: SstMeta,
        /// Its level until now.
        input_level: usize,
    },
    /// Merge.
    Merge(PickedMerge),
}

/// A merge of SSTs of one level into the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PickedMerge {
    /// Level the merge empties; the next one takes the rows.
    pub input_level: usize,
    /// SSTs of that level; of level 0 oldest first.
    pub inputs: Vec<SstMeta>,
    /// SSTs of the next level that overlap them, in key order.
    pub overlapping: Vec<SstMeta>,
    /// SST to free of rows that this merge makes outdated, with its level. RecDB's F_delete.
    pub rewrite: Option<(usize, SstMeta)>,
    /// Whether it must not wait: the level holds `l0_stop / l0_trigger` times what it should.
    pub is_urgent: bool,
}

impl PickedMerge {
    /// Returns the bytes to read: the sum in RecDB Eq. 1b and 2b.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        let rewrite = self.rewrite.as_ref().map(|(_, sst)| sst);
        self.inputs.iter().chain(&self.overlapping).chain(rewrite).map(SstMeta::size_bytes).sum()
    }
}

/// Chooses what to do next.
#[must_use]
pub fn pick_compaction(version: &Version, shape: &TreeShape, input: &PickerInput<'_>) -> Pick {
    assert!(shape.l0_trigger > 0 && shape.l0_stop >= shape.l0_trigger, "{shape:?}");
    assert!(shape.level1_bytes > 0 && shape.level_ratio > 0, "{shape:?}");
    let l0_count = version.level(0).len();
    // Before any other level: until level 0 is merged, no memtable can be flushed and writes wait.
    if l0_count >= shape.l0_stop {
        return pick_level0(version, input, true);
    }
    // Deeper levels are urgent by the same ratio, so that one rule says how far a level may fall
    // behind.
    let urgent_due = shape.l0_stop as f64 / shape.l0_trigger as f64;
    let due = |level: usize| -> f64 {
        if level == 0 {
            return l0_count as f64 / shape.l0_trigger as f64;
        }
        version.level_bytes(level) as f64 / shape.target_bytes(level) as f64
    };
    // The deepest level has nowhere to go.
    let levels = (0..LEVELS_MAX - 1).map(|level| (due(level), level));
    // Of two levels that are equally overdue, the shallower one slows every read more.
    let most = levels.rev().max_by(|one, other| one.0.total_cmp(&other.0));
    match most {
        Some((due, 0)) if due >= 1.0 => pick_level0(version, input, false),
        Some((due, level)) if due >= 1.0 => pick_deeper(version, level, due >= urgent_due, input),
        _ => Pick::Idle,
    }
}

fn pick_level0(version: &Version, input: &PickerInput<'_>, is_urgent: bool) -> Pick {
    // All of it: the SSTs overlap, and one left behind would hold older versions above newer ones.
    let inputs = version.level(0).to_vec();
    if inputs.is_empty() {
        return Pick::Idle;
    }
    let overlapping = version.overlapping(1, &inputs);
    let rewrite = match input.picker {
        Picker::Largest => None,
        Picker::MostOutdated => pick_rewrite(version, input),
    };
    Pick::Merge(PickedMerge { input_level: 0, inputs, overlapping, rewrite, is_urgent })
}

fn pick_deeper(version: &Version, level: usize, is_urgent: bool, input: &PickerInput<'_>) -> Pick {
    let ssts = version.level(level).iter();
    // `max_by` takes the last of equals; reversed, that is the first in key order.
    let picked = match input.picker {
        // A large SST frees most of its level per SST that it meets below.
        Picker::Largest => ssts.rev().max_by_key(|sst| sst.size_bytes()),
        Picker::MostOutdated => ssts.rev().max_by(|one, other| {
            let score = |sst: &SstMeta| {
                compaction_score(sst, &version.overlapping(level + 1, &[*sst]), input)
            };
            score(one).total_cmp(&score(other)).then(one.size_bytes().cmp(&other.size_bytes()))
        }),
    };
    let Some(sst) = picked.copied() else { return Pick::Idle };
    let overlapping = version.overlapping(level + 1, &[sst]);
    // Nothing to merge with, so nothing to read or write: it only hangs lower.
    if overlapping.is_empty() {
        return Pick::Move { sst, input_level: level };
    }
    let inputs = vec![sst];
    Pick::Merge(PickedMerge { input_level: level, inputs, overlapping, rewrite: None, is_urgent })
}

/// Outdated rows of `sst` per time to merge it with `others`.
///
/// Source: RecDB Eq. 1: `C_score(fid) = outdated_num(fid) / T_merge(fid)` with
/// `T_merge(fid) = V_merge x sum of size(k) over comp_files(fid)`.
///
/// # Panics
/// When a merge takes no time: all scores would be infinite, and any SST the best.
#[must_use]
pub fn compaction_score(sst: &SstMeta, others: &[SstMeta], input: &PickerInput<'_>) -> f64 {
    assert!(input.merge_us_per_byte > 0.0, "{} us per byte", input.merge_us_per_byte);
    let outdated = outdated_rows(input.outdated, sst.id);
    let bytes = sst.size_bytes() + others.iter().map(SstMeta::size_bytes).sum::<u64>();
    outdated as f64 / (input.merge_us_per_byte * bytes.max(1) as f64)
}

/// Chooses the SST of level 2 or deeper that a level-0 merge frees of outdated rows.
///
/// Source: RecDB Algorithm 1. Differs: an SST without known outdated rows is never chosen (with
/// the published `score <= C_score` one is, when all scores are 0, and is rewritten for nothing),
/// nor one that the merge's keys do not reach; `comp_files` is the SST alone, because Algorithm 2
/// writes it back to its own level.
#[must_use]
pub fn pick_rewrite(version: &Version, input: &PickerInput<'_>) -> Option<(usize, SstMeta)> {
    // The merge knows only its own keys to be newer, so an SST beyond them cannot be freed by it.
    let first = version.level(0).iter().map(|sst| sst.first).min()?;
    let last = version.level(0).iter().map(|sst| sst.last).max()?;
    let candidates = version.ssts().filter(|(level, sst)| {
        *level >= 2
            && outdated_rows(input.outdated, sst.id) > 0
            && sst.first <= last
            && first <= sst.last
    });
    let score = |sst: &SstMeta| compaction_score(sst, &[], input);
    candidates
        .max_by(|(_, one), (_, other)| score(one).total_cmp(&score(other)))
        .map(|(level, sst)| (level, *sst))
}

/// Returns the ids of a merge's inputs, all of which it replaces.
pub(crate) fn input_ids(merge: &PickedMerge) -> Vec<SstId> {
    merge.inputs.iter().chain(&merge.overlapping).map(|sst| sst.id).collect()
}

#[cfg(test)]
mod tests;
