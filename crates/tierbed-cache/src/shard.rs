//! How do threads share a tier? Split by the hash of the key, a lock each.
//!
//! No lock is common to all hits. Groups of rows are handled shard by shard, so that a lookup
//! of many rows takes each lock once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tierbed_core::env::mix64;
use tierbed_core::{Result, RowKey};

use crate::sizing::{RowClass, TierOptions};
use crate::tier::{packed, RowTier, TierStats};

/// Bytes a shard should at least have; below, fewer shards.
const SHARD_BYTES_WANTED: u64 = 2 << 20;

/// Most shards: their numbers are kept in a byte per row of a call.
const SHARDS_MAX: u64 = 256;

/// Row tiers side by side behind locks.
#[derive(Debug)]
pub struct ShardedTier {
    shards: Vec<Mutex<RowTier>>,
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
        Ok(Self { shards: shards.collect::<Result<_>>()? })
    }

    /// Looks up `keys` and hands every row found to `found` with its position.
    ///
    /// `found` runs under a shard's lock: it should copy and return.
    pub fn get_many(&self, keys: &[RowKey], mut found: impl FnMut(usize, &[f32])) {
        let homes = self.homes(keys);
        for (shard_at, shard) in self.shards.iter().enumerate() {
            let mut tier = lock(shard);
            for (position, (key, home)) in keys.iter().zip(&homes).enumerate() {
                if usize::from(*home) == shard_at {
                    if let Some(row) = tier.get(*key) {
                        found(position, row);
                    }
                }
            }
        }
    }

    /// Stores copies of rows: `row_of` gives the row of a position, or none to leave it out.
    ///
    /// # Errors
    /// As [`RowTier::insert`].
    pub fn insert_many<'a>(
        &self,
        keys: &[RowKey],
        row_of: impl Fn(usize) -> Option<&'a [f32]>,
    ) -> Result<()> {
        let homes = self.homes(keys);
        for (shard_at, shard) in self.shards.iter().enumerate() {
            let mut tier = lock(shard);
            for (position, (key, home)) in keys.iter().zip(&homes).enumerate() {
                if usize::from(*home) == shard_at {
                    if let Some(row) = row_of(position) {
                        tier.insert(*key, row)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the statistics of all shards together.
    #[must_use]
    pub fn stats(&self) -> TierStats {
        self.shards.iter().fold(TierStats::default(), |sum, shard| sum.plus(&lock(shard).stats()))
    }

    /// Returns the shard of each key, a byte per key.
    fn homes(&self, keys: &[RowKey]) -> Vec<u8> {
        // Other bits than those the shard's index looks at.
        let home = |key: &RowKey| {
            let bits = (mix64(packed(*key)) >> 40) & 0xFFFF;
            ((bits * self.shards.len() as u64) >> 16) as u8
        };
        keys.iter().map(home).collect()
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
                    for round in 0..50 {
                        let keys: Vec<_> = (0..500)
                            .map(|at| key((round * 377 + thread * 11 + at) % 4000))
                            .collect();
                        let rows: Vec<_> = keys.iter().map(|key| [key.row.0 as f32; 8]).collect();
                        tier.get_many(&keys, |at, row| assert_eq!(row, rows[at]));
                        tier.insert_many(&keys, |at| Some(&rows[at][..])).unwrap();
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
