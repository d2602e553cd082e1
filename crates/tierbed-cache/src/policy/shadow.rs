//! What would another policy hold? A cache of fingerprints, without rows.

use super::list::NONE;
use super::score_table::ScoreTable;
use super::slots::SlotMap;
use super::{EvictionPolicy, Group, SLOT_BITS};
use crate::index::RobinHoodIndex;

/// Scores remembered per slot, of rows outside.
const SCORES_PER_SLOT: usize = 8;

/// A policy with slots of its own, told of every group.
#[derive(Debug)]
pub(super) struct Shadow {
    policy: Box<dyn EvictionPolicy>,
    /// Fingerprint of the row in each slot.
    fingerprints: SlotMap<u32>,
    index: RobinHoodIndex,
    /// The first empty slot; the fingerprint of an empty slot is the next one.
    free: u32,
    scores: ScoreTable,
    /// Scores remembered per slot, of rows outside.
    scores_per_slot: usize,
    /// Fingerprints of the rows that left during the last group.
    left: Vec<u32>,
    asked: Vec<u64>,
}

impl Shadow {
    /// A policy without rows; `remembers_scores` of rows that left.
    pub(super) fn new(policy: Box<dyn EvictionPolicy>, remembers_scores: bool) -> Self {
        Self {
            policy,
            scores_per_slot: if remembers_scores { SCORES_PER_SLOT } else { 0 },
            fingerprints: SlotMap::default(),
            index: RobinHoodIndex::default(),
            free: NONE,
            scores: ScoreTable::default(),
            left: Vec::new(),
            asked: Vec::new(),
        }
    }

    pub(super) fn bytes_per_slot(&self) -> usize {
        // Fingerprint, index and scores.
        self.policy.bytes_per_slot() + 4 + 5 + self.scores_per_slot * ScoreTable::ENTRY_BYTES
    }

    pub(super) fn bytes_per_slab(&self) -> usize {
        self.policy.bytes_per_slab() + SlotMap::<u32>::BYTES_PER_SLAB
    }

    pub(super) fn bytes_fixed(&self) -> usize {
        self.policy.bytes_fixed()
    }

    /// Tells whether the shadow holds the row of `hash`.
    pub(super) fn holds(&self, hash: u64) -> bool {
        self.slot_of(hash).is_some()
    }

    /// Hands out the fingerprints of the rows that left during the last group, of which some
    /// may have come back. [`give_back`](Self::give_back) returns the memory.
    pub(super) fn take_left(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.left)
    }

    pub(super) fn give_back(&mut self, left: Vec<u32>) {
        self.left = left;
    }

    /// Asks for a group; returns its hits.
    pub(super) fn ask(&mut self, hashes: &[u64]) -> usize {
        self.left.clear();
        // Here a row is known by 32 bits of its hash, in ghosts and scores as in the index.
        let mut asked = std::mem::take(&mut self.asked);
        asked.clear();
        asked.extend(hashes.iter().map(|&hash| index_hash(fingerprint(hash))));
        self.index.warm(&asked);
        let hit_count = hashes.iter().filter(|&&hash| self.holds(hash)).count();
        let row_count = hashes.len() as u32;
        self.policy.begin_group(&Group { hashes: &asked, row_count, hit_count: hit_count as u32 });
        for &hash in hashes {
            match self.slot_of(hash) {
                Some(slot) => self.policy.touch(slot),
                None => self.take_in(fingerprint(hash)),
            }
        }
        self.policy.end_group();
        self.asked = asked;
        hit_count
    }

    fn take_in(&mut self, row: u32) {
        let hash = index_hash(row);
        let known = self.scores.get(hash);
        let arrival = self.policy.arrive(hash, known, self.free == NONE);
        if !arrival.is_admitted {
            self.remember(hash, arrival.score);
            return;
        }
        for _ in 0..arrival.flushed {
            self.evict_one();
        }
        if self.free == NONE {
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
        let held = self.fingerprints.get(slot);
        let score = self.policy.evict(slot, index_hash(held));
        self.remember(index_hash(held), score);
        self.index.remove(index_hash(held), slot);
        self.set_free(slot);
        self.left.push(held);
    }

    fn remember(&mut self, hash: u64, score: u16) {
        if score != 0 {
            self.scores.put(hash, score, |score| self.policy.rank(score));
        }
    }

    fn slot_of(&self, hash: u64) -> Option<u32> {
        let wanted = fingerprint(hash);
        self.index.find(index_hash(wanted), |slot| self.fingerprints.get(slot) == wanted)
    }

    /// Adds the slots of a slab, empty.
    pub(super) fn add_slab(&mut self, slab: u32, slot_count: u32) {
        self.policy.add_slab(slab, slot_count);
        self.fingerprints.add_slab(slab, slot_count);
        let first = slab << SLOT_BITS;
        (first..first + slot_count).rev().for_each(|slot| self.set_free(slot));
        self.resize();
    }

    /// Drops a slab, with the rows the shadow has in it.
    pub(super) fn drop_slab(&mut self, slab: u32, slot_count: u32) {
        let first = slab << SLOT_BITS;
        for slot in first..first + slot_count {
            let held = self.fingerprints.get(slot);
            if self.index.remove(index_hash(held), slot) {
                self.policy.remove(slot);
            }
        }
        let mut slot = std::mem::replace(&mut self.free, NONE);
        while slot != NONE {
            let next = self.fingerprints.get(slot);
            if !(first..first + slot_count).contains(&slot) {
                self.set_free(slot);
            }
            slot = next;
        }
        self.policy.drop_slab(slab);
        self.fingerprints.drop_slab(slab);
        self.resize();
    }

    fn resize(&mut self) {
        let slot_count = self.fingerprints.slot_count();
        let mut index = RobinHoodIndex::with_capacity(slot_count, self.fingerprints.slots_end());
        for slot in self.policy.dump() {
            // A row that finds no place in the index is as good as gone: it is never a hit.
            let _ = index.insert(index_hash(self.fingerprints.get(slot)), slot);
        }
        self.index = index;
        self.scores.resize(slot_count * self.scores_per_slot);
    }
}

/// 32 bits of a hash.
pub(super) fn fingerprint(hash: u64) -> u32 {
    (hash >> 32) as u32
}

/// A hash of a fingerprint, for indexes.
pub(super) fn index_hash(fingerprint: u32) -> u64 {
    tierbed_core::env::mix64(u64::from(fingerprint))
}
