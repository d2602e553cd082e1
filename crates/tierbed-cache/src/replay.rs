//! Replay of a log through one cache of row numbers without rows.
//!
//! The policies are those of the tiers and see groups, hits and misses in the same order, and so
//! is what they remember of rows that left. What differs is the index: replayed rows are numbered
//! densely, so it is an array.

#![expect(
    clippy::indexing_slicing,
    reason = "slots are those of the policy, rows are checked when a group is asked for"
)]

use std::sync::Arc;

use tierbed_core::env::mix64;
use tierbed_core::{Error, Result, RowId, RowKey, TableId};

use crate::admission::{AdmissionBitmap, AdmissionRule};
use crate::policy::{EvictionPolicy, Group, PolicyKind, ScoreTable, SLABS_MAX, SLOT_BITS};
use crate::sizing::scores_for;
use crate::tier::packed;

/// No slot: the row is not cached. No row: the slot is empty.
const NONE: u32 = u32::MAX;

/// What groups of rows did to a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    /// Groups asked for.
    pub groups: u64,
    /// Groups of which every row was a hit.
    pub perfect_hits: u64,
    /// Rows asked for.
    pub rows: u64,
    /// Rows that were hits.
    pub hits: u64,
}

impl ReplayCounts {
    /// Counts a group.
    pub fn note(&mut self, row_count: usize, hit_count: usize) {
        self.groups += 1;
        self.perfect_hits += u64::from(hit_count == row_count);
        self.rows += row_count as u64;
        self.hits += hit_count as u64;
    }

    /// Returns what was counted after `before` was.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            groups: self.groups - before.groups,
            perfect_hits: self.perfect_hits - before.perfect_hits,
            rows: self.rows - before.rows,
            hits: self.hits - before.hits,
        }
    }
}

/// A cache of at most `capacity_rows` of rows numbered `0..row_count`, without their bytes.
#[derive(Debug)]
pub struct ReplayCache {
    policy: Box<dyn EvictionPolicy>,
    /// Slot of each row, `[row_count]`.
    slots: Vec<u32>,
    /// Row of each slot, `[capacity_rows]`.
    rows: Vec<u32>,
    /// Table of each row, `[row_count]`; empty: all are of one.
    tables: Arc<[u16]>,
    /// Scores of rows that left, as many as a tier of this capacity remembers.
    scores: ScoreTable,
    /// Empty slots.
    free: Vec<u32>,
    counts: ReplayCounts,
    hashes: Vec<u64>,
    admission: Option<AdmissionBitmap>,
}

impl ReplayCache {
    /// Builds an empty cache.
    ///
    /// # Errors
    /// `Invalid` when there are no rows or more than 2^32 - 2, or no room, or room for more than
    /// 16 million.
    pub fn new(kind: PolicyKind, row_count: usize, capacity_rows: usize) -> Result<Self> {
        if row_count == 0 || row_count >= NONE as usize {
            return Err(Error::invalid("a replay needs 1 to 2^32 - 2 rows").with("rows", row_count));
        }
        if capacity_rows == 0 {
            return Err(Error::invalid("a cache of no rows cannot be replayed"));
        }
        let capacity_rows = capacity_rows.min(row_count);
        let capacity_max = (SLABS_MAX as usize) << SLOT_BITS;
        if capacity_rows > capacity_max {
            return Err(Error::invalid("policies number the slots of a cache with 24 bits")
                .with("capacity_rows", capacity_rows)
                .with("capacity_rows_max", capacity_max)
                .with("remedy", "replay a part of the log, or a smaller share"));
        }
        let mut policy = kind.build();
        for (slab, first) in (0..capacity_rows).step_by(1 << SLOT_BITS).enumerate() {
            let slot_count = (capacity_rows - first).min(1 << SLOT_BITS);
            policy.add_slab(slab as u32, slot_count as u32);
        }
        let mut scores = ScoreTable::default();
        if kind.remembers_scores() {
            scores.resize((scores_for(capacity_rows as u64) as usize).min(row_count));
        }
        Ok(Self {
            policy,
            slots: vec![NONE; row_count],
            rows: vec![NONE; capacity_rows],
            tables: Arc::default(),
            scores,
            // All slabs but the last are full: slots are numbered without gaps.
            free: (0..capacity_rows as u32).rev().collect(),
            counts: ReplayCounts::default(),
            hashes: Vec::new(),
            admission: None,
        })
    }

    /// Says of which table each row is, `[row_count]`: policies may tell tables apart.
    ///
    /// # Errors
    /// `Invalid` when there are not as many as rows.
    pub fn with_tables(mut self, tables: impl Into<Arc<[u16]>>) -> Result<Self> {
        let tables = tables.into();
        if tables.len() != self.slots.len() {
            return Err(Error::invalid("a replay needs a table for each row")
                .with("rows", self.slots.len())
                .with("tables", tables.len()));
        }
        self.tables = tables;
        Ok(self)
    }

    /// Lets only rows in that `rule` admits.
    ///
    /// # Errors
    /// `Invalid` when the rule has no sense.
    pub fn with_admission(mut self, rule: AdmissionRule) -> Result<Self> {
        self.admission = AdmissionBitmap::new(rule, self.slots.len() as u64)?;
        Ok(self)
    }

    /// Asks for a group of rows, each named once. Returns the hits.
    ///
    /// # Errors
    /// `Invalid` when a row is out of range.
    pub fn ask(&mut self, group: &[u32]) -> Result<u32> {
        let mut hit_count = 0;
        for &row in group {
            let slot = self.slots.get(row as usize).copied().ok_or_else(|| {
                Error::invalid("row out of range").with("row", row).with("rows", self.slots.len())
            })?;
            hit_count += u32::from(slot != NONE);
        }
        self.hashes.clear();
        let tables = &self.tables;
        self.hashes.extend(group.iter().map(|&row| hash_of(row, tables)));
        let row_count = group.len() as u32;
        self.policy.begin_group(&Group { hashes: &self.hashes, row_count, hit_count });
        for &row in group {
            self.ask_one(row);
        }
        self.policy.end_group();
        self.counts.note(group.len(), hit_count as usize);
        Ok(hit_count)
    }

    /// Tells whether `row` is cached; changes nothing.
    #[must_use]
    pub fn contains(&self, row: u32) -> bool {
        self.slots.get(row as usize).is_some_and(|&slot| slot != NONE)
    }

    /// Returns what was counted so far.
    #[must_use]
    pub fn counts(&self) -> ReplayCounts {
        self.counts
    }

    fn ask_one(&mut self, row: u32) {
        let Some(&place) = self.slots.get(row as usize) else { return };
        let is_worth = self.admission.as_mut().is_none_or(|bitmap| bitmap.note(u64::from(row)));
        // A row of this group may have left since the hits were counted.
        if place != NONE {
            self.policy.touch(place);
            return;
        }
        if !is_worth {
            return;
        }
        let hash = hash_of(row, &self.tables);
        let is_full = self.free.is_empty();
        let score = self.scores.get(hash, self.policy.score_frame());
        let arrival = self.policy.arrive(hash, score, is_full);
        if !arrival.is_admitted {
            self.remember(hash, arrival.score);
            return;
        }
        for _ in 0..arrival.flushed {
            self.evict_one();
        }
        if self.free.is_empty() {
            self.evict_one();
        }
        if let Some(slot) = self.free.pop() {
            self.policy.insert(slot, hash, arrival.score);
            self.place(slot, row);
        }
    }

    /// Evicts the victim; its slot is free then.
    fn evict_one(&mut self) {
        let Some(slot) = self.policy.victim() else { return };
        let row = self.rows[slot as usize];
        let hash = hash_of(row, &self.tables);
        let score = self.policy.evict(slot, hash);
        self.remember(hash, score);
        self.slots[row as usize] = NONE;
        self.free.push(slot);
    }

    fn remember(&mut self, hash: u64, score: u16) {
        self.scores.put(hash, score, self.policy.score_frame());
    }

    fn place(&mut self, slot: u32, row: u32) {
        self.rows[slot as usize] = row;
        self.slots[row as usize] = slot;
    }
}

/// The hash of a row, as of its key in a tier.
fn hash_of(row: u32, tables: &[u16]) -> u64 {
    // Without a list of tables all rows are of one.
    let table = if tables.is_empty() { 0 } else { tables[row as usize] };
    mix64(packed(RowKey::new(TableId(u32::from(table)), RowId(u64::from(row)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(kind: PolicyKind, capacity_rows: usize, groups: &[&[u32]]) -> ReplayCounts {
        let mut cache = ReplayCache::new(kind, 10, capacity_rows).unwrap();
        for group in groups {
            cache.ask(group).unwrap();
        }
        cache.counts()
    }

    #[test]
    fn counts_hits_of_rows_and_of_whole_groups() {
        let groups: [&[u32]; 4] = [&[1, 2], &[1, 3], &[1, 3], &[2, 3]];
        let expected = ReplayCounts { groups: 4, perfect_hits: 1, rows: 8, hits: 4 };
        assert_eq!(counts(PolicyKind::Lru, 2, &groups), expected);
        let all_fit = ReplayCounts { groups: 4, perfect_hits: 2, rows: 8, hits: 5 };
        assert_eq!(counts(PolicyKind::Lru, 10, &groups), all_fit);
    }

    #[test]
    fn every_policy_hits_everything_that_fits() {
        for kind in PolicyKind::ALL {
            let groups: Vec<&[u32]> = vec![&[0, 1, 2, 3, 4]; 20];
            let counts = counts(kind, 10, &groups);
            assert_eq!((counts.perfect_hits, counts.hits), (19, 95), "{kind:?}");
        }
    }

    #[test]
    fn a_row_used_once_does_not_enter_past_the_bitmap() {
        let cache = ReplayCache::new(PolicyKind::Lru, 10, 2).unwrap();
        let mut cache = cache.with_admission(AdmissionRule::SECOND_USE).unwrap();
        for row in [1, 1, 2, 3, 1] {
            cache.ask(&[row]).unwrap();
        }
        assert_eq!(cache.counts().hits, 1);
        assert!(cache.contains(1) && !cache.contains(2));
    }

    #[test]
    fn wrong_calls_are_refused() {
        assert!(ReplayCache::new(PolicyKind::Lru, 0, 1).is_err());
        assert!(ReplayCache::new(PolicyKind::Lru, 10, 0).is_err());
        assert!(ReplayCache::new(PolicyKind::Lru, 20_000_000, 17_000_000).is_err());
        let mut cache = ReplayCache::new(PolicyKind::Lru, 10, 2).unwrap();
        assert!(cache.ask(&[3, 10]).is_err());
        assert!(ReplayCache::new(PolicyKind::Lru, 10, 2).unwrap().with_tables(vec![0]).is_err());
        assert_eq!(cache.counts(), ReplayCounts::default());
    }
}
