//! Shadow caches: fingerprints, without rows, of a sample of the rows, under another rule.
//!
//! Rows are in the sample by their hash, all of a row's uses or none, and slots are fewer in the
//! same proportion: such a cache has the hits of the whole one. Of a group's rows outside the
//! sample the shadow knows how many were missing in the cache itself.
//!
//! Source: Waldspurger et al., "Efficient MRC Construction with SHARDS" (FAST 2015).

#![expect(
    clippy::indexing_slicing,
    reason = "there is a slot, or none, for every row of the group"
)]

use super::list::NONE;
use super::score_table::ScoreTable;
use super::slots::SlotMap;
use super::{CreditRule, EvictionPolicy, Group, GroupFrequency, SLOT_BITS};
use crate::index::SlotIndex;

/// Scores remembered per slot, of rows outside.
const SCORES_PER_SLOT: usize = 4;

/// The rows of a group that are in the sample, and what is known of the others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampledGroup<'a> {
    /// Fingerprints of the rows in the sample, each once.
    pub(crate) rows: &'a [u32],
    /// Their [`index_hash`]es.
    pub(crate) hashes: &'a [u64],
    /// Rows of the whole group.
    pub(crate) row_count: u32,
    /// Rows outside the sample that were missing in the cache itself.
    pub(crate) missing_outside: u32,
}

/// A rule with slots of its own, which every group is reported to.
#[derive(Debug)]
pub(crate) struct Shadow {
    policy: GroupFrequency,
    /// Fingerprint of the row in each slot.
    fingerprints: SlotMap<u32>,
    index: SlotIndex,
    /// The first empty slot; the fingerprint of an empty slot is the next one.
    free: u32,
    /// Slots there are, and slots that may be used.
    slot_count: u32,
    limit: u32,
    scores: ScoreTable,
    slots: Vec<u32>,
}

impl Shadow {
    /// Returns the bytes of a shadow of `slot_count` slots.
    pub(crate) fn bytes_for(slot_count: usize, rule: CreditRule) -> usize {
        slot_count * (GroupFrequency::BYTES_PER_SLOT + size_of::<u32>())
            + SlotIndex::bytes_for(slot_count)
            + ScoreTable::bytes_for((slot_count * SCORES_PER_SLOT) as u64) as usize
            + GroupFrequency::bytes_beside(slot_count, rule.trial_hundredths)
    }

    /// A rule without rows or slots.
    pub(crate) fn new(rule: CreditRule) -> Self {
        Self {
            policy: GroupFrequency::without_returns(rule),
            fingerprints: SlotMap::default(),
            index: SlotIndex::default(),
            free: NONE,
            slot_count: 0,
            limit: 0,
            scores: ScoreTable::default(),
            slots: Vec::new(),
        }
    }

    /// Returns the rule with what it has learnt.
    pub(super) fn policy(&self) -> &GroupFrequency {
        &self.policy
    }

    /// Returns the score of a row, 0 when nothing is known of it.
    pub(super) fn score(&self, row: u32) -> u16 {
        let hash = index_hash(row);
        match self.index.find(hash, |slot| self.fingerprints.get(slot) == row) {
            Some(slot) => self.policy.score(slot),
            None => self.scores.get(hash, self.policy.score_frame()),
        }
    }

    /// Tells whether the shadow holds a row.
    #[cfg(test)]
    pub(super) fn holds(&self, row: u32) -> bool {
        self.index.find(index_hash(row), |slot| self.fingerprints.get(slot) == row).is_some()
    }

    /// Uses `slot_count` slots from now on; rows that have no slot any more leave.
    pub(crate) fn resize(&mut self, slot_count: u32) {
        self.limit = slot_count;
        if slot_count > self.slot_count {
            self.grow(slot_count);
        }
        while self.index.len() > slot_count as usize {
            self.evict_one();
        }
    }

    fn grow(&mut self, slot_count: u32) {
        let mut added = slot_count - self.slot_count;
        let mut slab = self.fingerprints.slots_end() >> SLOT_BITS;
        while added > 0 {
            let here = added.min(1 << SLOT_BITS);
            self.policy.add_slab(slab, here);
            self.fingerprints.add_slab(slab, here);
            let first = slab << SLOT_BITS;
            (first..first + here).rev().for_each(|slot| self.set_free(slot));
            added -= here;
            slab += 1;
        }
        self.slot_count = slot_count;
        let count = slot_count as usize;
        let mut index = SlotIndex::with_capacity(count, self.fingerprints.slots_end());
        for slot in self.policy.occupied() {
            // A row that finds no place in the index is as good as gone: it is never a hit.
            let _ = index.insert(index_hash(self.fingerprints.get(slot)), slot);
        }
        self.index = index;
        self.scores.resize(count * SCORES_PER_SLOT);
    }

    /// Reads where it will look for the rows of `hashes`, and returns something of it: all shadows
    /// read ahead, then each is asked, so that they wait for memory once and not one by one.
    pub(crate) fn first_words(&self, hashes: &[u64]) -> u32 {
        let words = hashes
            .iter()
            .map(|&hash| self.index.first_word(hash) ^ u32::from(self.scores.first_word(hash)));
        words.fold(0, |all, word| all ^ word)
    }

    /// Asks for a group; returns how many of its rows in the sample were missing.
    pub(crate) fn ask(&mut self, group: &SampledGroup<'_>) -> u32 {
        self.slots.clear();
        for (&row, &hash) in group.rows.iter().zip(group.hashes) {
            let slot = self.index.find(hash, |slot| self.fingerprints.get(slot) == row);
            self.slots.push(slot.unwrap_or(NONE));
        }
        let missing = self.slots.iter().filter(|&&slot| slot == NONE).count() as u32;
        let hit_count = group.row_count.saturating_sub(missing + group.missing_outside);
        let told = Group { hashes: group.hashes, row_count: group.row_count, hit_count };
        self.policy.begin_group(&told);
        for (at, &row) in group.rows.iter().enumerate() {
            let slot = self.slots[at];
            // A row of this group may have left for another of it.
            if slot != NONE && self.fingerprints.get(slot) == row {
                self.policy.touch(slot);
            } else {
                self.take_in(row, group.hashes[at]);
            }
        }
        self.policy.end_group();
        missing
    }

    fn take_in(&mut self, row: u32, hash: u64) {
        let known = self.scores.get(hash, self.policy.score_frame());
        let is_full = self.free == NONE || self.index.len() >= self.limit as usize;
        let arrival = self.policy.arrive(hash, known, is_full);
        if !arrival.is_admitted {
            self.remember(hash, arrival.score);
            return;
        }
        if is_full {
            self.evict_one();
        }
        let slot = self.free;
        if slot != NONE && self.index.insert(hash, slot) {
            self.free = self.fingerprints.get(slot);
            self.fingerprints.set(slot, row);
            self.policy.insert(slot, hash, arrival.score);
        }
    }

    fn set_free(&mut self, slot: u32) {
        self.fingerprints.set(slot, self.free);
        self.free = slot;
    }

    fn evict_one(&mut self) {
        let Some(slot) = self.policy.victim() else { return };
        let hash = index_hash(self.fingerprints.get(slot));
        let score = self.policy.evict(slot, hash);
        self.remember(hash, score);
        self.index.remove(hash, slot);
        self.set_free(slot);
    }

    fn remember(&mut self, hash: u64, score: u16) {
        if score != 0 {
            self.scores.put(hash, score, self.policy.score_frame());
        }
    }
}

/// 32 bits of a hash.
pub(crate) fn fingerprint(hash: u64) -> u32 {
    (hash >> 32) as u32
}

/// A hash of a fingerprint, for indexes.
pub(crate) fn index_hash(fingerprint: u32) -> u64 {
    tierbed_core::env::mix64(u64::from(fingerprint))
}
