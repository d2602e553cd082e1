//! How do threads share a tier? Split by the hash of the key, a lock each.
//!
//! No lock is common to all hits. Groups of rows are handled shard by shard, so that a lookup
//! of many rows takes each lock once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tierbed_core::env::mix64;
use tierbed_core::{Result, RowKey};

use crate::sizing::{RowClass, TierOptions};
use crate::tier::{packed, Insertion, RowTier, TierGroup, TierStats};

/// Bytes a shard should at least have; below, fewer shards.
const SHARD_BYTES_WANTED: u64 = 2 << 20;

/// Most shards: their numbers are kept in a byte per row of a call.
const SHARDS_MAX: u64 = 256;

/// Row tiers side by side behind locks.
#[derive(Debug)]
pub struct ShardedTier {
    shards: Vec<Mutex<RowTier>>,
    knows_groups: bool,
}

impl ShardedTier {
    /// Splits the capacity of `options` into at most `shards_max` tiers.
    ///
    /// # Errors
    /// As [`RowTier::new`].
    pub fn new(options: &TierOptions, shards_max: usize) -> Result<Self> {
        let by_size = options.capacity_bytes / SHARD_BYTES_WANTED;
        let shard_count = (shards_max as u64).min(SHARDS_MAX).min(by_size).max(1);
        let classes = options.classes.iter().map(|class| RowClass {
            // Hashing spreads rows unevenly; a little room keeps the bound from biting.
            row_count: (class.row_count.div_ceil(shard_count) * 5 / 4 + 64).min(class.row_count),
            ..*class
        });
        let shard = TierOptions {
            capacity_bytes: options.capacity_bytes / shard_count,
            classes: classes.collect(),
            policy: options.policy,
        };
        let shards = (0..shard_count).map(|_| Ok(Mutex::new(RowTier::new(&shard)?)));
        let knows_groups = options.policy.knows_groups();
        Ok(Self { shards: shards.collect::<Result<_>>()?, knows_groups })
    }

    /// Looks up `keys` and hands every row found to `found` with its position.
    ///
    /// `found` runs under a shard's lock: it should copy and return.
    pub fn get_many(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        mut found: impl FnMut(usize, &[f32]),
    ) {
        self.arrange(keys, visits, |_| true);
        self.visit(keys, visits, |tier, position, key| {
            if let Some(row) = tier.get(key) {
                found(position, row);
            }
        });
    }

    /// As [`get_many`](Self::get_many), but counts nothing and tells the policies nothing.
    pub fn peek_many(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        mut found: impl FnMut(usize, &[f32]),
    ) {
        self.arrange(keys, visits, |_| true);
        self.visit(keys, visits, |tier, position, key| {
            if let Some(row) = tier.peek(key) {
                found(position, row);
            }
        });
    }

    /// Tells the policies of a group that was asked for, and offers them the rows that are not
    /// here: `row_of` gives the row of a position, or none to leave it out. Rows that leave for
    /// others, and those that do not come in, go to `left`.
    ///
    /// `row_of` and `left` run under a shard's lock: they should copy and return.
    ///
    /// # Errors
    /// As [`RowTier::insert`].
    pub fn settle<'a>(
        &self,
        group: &TierGroup<'_>,
        visits: &mut Visits,
        mut row_of: impl FnMut(usize) -> Option<&'a [f32]>,
        mut left: impl FnMut(RowKey, &[f32]),
    ) -> Result<()> {
        self.arrange(group.keys, visits, |_| true);
        let (mut keys, mut row_words) = (Vec::new(), Vec::new());
        for (shard, positions) in self.shards.iter().zip(visits.by_shard()) {
            if positions.is_empty() {
                continue;
            }
            keys.clear();
            row_words.clear();
            for &position in positions {
                keys.extend(group.keys.get(position as usize));
                row_words.extend(group.row_words.get(position as usize));
            }
            let mut tier = lock(shard);
            tier.begin_group(&TierGroup { keys: &keys, row_words: &row_words, ..*group });
            for (key, &position) in keys.iter().zip(positions) {
                // Policies without groups heard of hits from `get_many`.
                let is_here =
                    if self.knows_groups { tier.get(*key).is_some() } else { tier.contains(*key) };
                if !is_here {
                    if let Some(row) = row_of(position as usize) {
                        if tier.insert_with(*key, row, &mut left)? == Insertion::Bypassed {
                            left(*key, row);
                        }
                    }
                }
            }
            tier.end_group();
        }
        Ok(())
    }

    /// Stores copies of rows: `row_of` gives the row of a position, or none to leave it out.
    ///
    /// # Errors
    /// As [`RowTier::insert`].
    pub fn insert_many<'a>(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        row_of: impl Fn(usize) -> Option<&'a [f32]>,
    ) -> Result<()> {
        self.arrange(keys, visits, |position| row_of(position).is_some());
        for (shard, positions) in self.shards.iter().zip(visits.by_shard()) {
            if positions.is_empty() {
                continue;
            }
            let mut tier = lock(shard);
            for &position in positions {
                let position = position as usize;
                if let (Some(key), Some(row)) = (keys.get(position), row_of(position)) {
                    tier.insert(*key, row)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the most rows that all shards can hold together; 0: the budget is too small.
    #[must_use]
    pub fn rows_max(&self) -> u64 {
        self.shards.iter().map(|shard| lock(shard).rows_max()).sum()
    }

    /// Returns the statistics of all shards together.
    #[must_use]
    pub fn stats(&self) -> TierStats {
        self.shards.iter().fold(TierStats::default(), |sum, shard| sum.plus(&lock(shard).stats()))
    }

    // Visits the positions that were arranged, each shard's under its lock.
    fn visit(
        &self,
        keys: &[RowKey],
        visits: &Visits,
        mut visit: impl FnMut(&mut RowTier, usize, RowKey),
    ) {
        for (shard, positions) in self.shards.iter().zip(visits.by_shard()) {
            if positions.is_empty() {
                continue;
            }
            let mut tier = lock(shard);
            for &position in positions {
                if let Some(key) = keys.get(position as usize) {
                    visit(&mut tier, position as usize, *key);
                }
            }
        }
    }

    /// Puts the positions of the keys that take part into the order of their shards.
    fn arrange(&self, keys: &[RowKey], visits: &mut Visits, takes_part: impl Fn(usize) -> bool) {
        let shard_count = self.shards.len() as u64;
        // Other bits than those the shard's index looks at.
        let home = |key: &RowKey| {
            let bits = (mix64(packed(*key)) >> 40) & 0xFFFF;
            ((bits * shard_count) >> 16) as u8
        };
        visits.homes.clear();
        visits.homes.extend(keys.iter().map(home));
        visits.arrange(self.shards.len(), takes_part);
    }
}

/// Which positions of a call belong to which shard. The caller keeps it, so that calls allocate
/// nothing.
#[derive(Debug, Default)]
pub struct Visits {
    /// Shard of each position.
    homes: Vec<u8>,
    /// Positions, shard by shard.
    positions: Vec<u32>,
    /// Where each shard's positions end.
    ends: Vec<u32>,
}

impl Visits {
    /// Bytes per key of the largest call.
    pub const BYTES_PER_KEY: usize = size_of::<u8>() + size_of::<u32>();

    /// Has room for calls of `key_count` keys.
    #[must_use]
    pub fn with_capacity(key_count: usize) -> Self {
        Self {
            homes: Vec::with_capacity(key_count),
            positions: Vec::with_capacity(key_count),
            ends: Vec::with_capacity(SHARDS_MAX as usize),
        }
    }

    /// Sorts the positions that take part by shard, each shard's ascending: a counting sort.
    fn arrange(&mut self, shard_count: usize, takes_part: impl Fn(usize) -> bool) {
        self.ends.clear();
        self.ends.resize(shard_count, 0);
        let mut taking_part = 0;
        for (_, &home) in self.homes.iter().enumerate().filter(|(at, _)| takes_part(*at)) {
            if let Some(count) = self.ends.get_mut(usize::from(home)) {
                *count += 1;
            }
            taking_part += 1;
        }
        let mut start = 0;
        for end in &mut self.ends {
            start += std::mem::replace(end, start);
        }
        self.positions.clear();
        self.positions.resize(taking_part, 0);
        for (at, &home) in self.homes.iter().enumerate().filter(|(at, _)| takes_part(*at)) {
            let Some(next) = self.ends.get_mut(usize::from(home)) else { continue };
            if let Some(place) = self.positions.get_mut(*next as usize) {
                *place = at as u32;
            }
            *next += 1;
        }
    }

    fn by_shard(&self) -> impl Iterator<Item = &[u32]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let positions = self.positions.get(start..end as usize).unwrap_or_default();
            start = end as usize;
            positions
        })
    }
}

// A panic inside a tier is a programmer error that ends the lookup; a tier holds only copies
// that were whole when they were stored, so later lookups may go on.
fn lock(shard: &Mutex<RowTier>) -> MutexGuard<'_, RowTier> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyKind;
    use tierbed_core::{RowId, TableId};

    fn key(row: u64) -> RowKey {
        RowKey::new(TableId(3), RowId(row))
    }

    #[test]
    fn threads_find_only_what_was_stored() {
        let classes = vec![RowClass { row_words: 8, row_count: 1 << 20 }];
        let options =
            TierOptions { capacity_bytes: 16 << 20, classes, policy: PolicyKind::default() };
        let tier = ShardedTier::new(&options, 8).unwrap();
        assert_eq!(tier.shards.len(), 8);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let tier = &tier;
                scope.spawn(move || {
                    let mut visits = Visits::default();
                    for round in 0..50 {
                        let keys: Vec<_> = (0..500)
                            .map(|at| key((round * 377 + thread * 11 + at) % 4000))
                            .collect();
                        let rows: Vec<_> = keys.iter().map(|key| [key.row.0 as f32; 8]).collect();
                        tier.get_many(&keys, &mut visits, |at, row| assert_eq!(row, rows[at]));
                        tier.insert_many(&keys, &mut visits, |at| Some(&rows[at][..])).unwrap();
                    }
                });
            }
        });
        let stats = tier.stats();
        assert_eq!(stats.hits + stats.misses, 4 * 50 * 500);
        assert_eq!((stats.row_count, stats.evictions), (4000, 0));
        assert!(stats.data_bytes + stats.metadata_bytes <= options.capacity_bytes);
    }

    #[test]
    fn a_small_budget_is_one_shard() {
        let classes = vec![RowClass { row_words: 8, row_count: 100 }];
        let options = TierOptions { capacity_bytes: 1 << 20, classes, policy: PolicyKind::Lru };
        assert_eq!(ShardedTier::new(&options, 8).unwrap().shards.len(), 1);
    }
}
