//! A concurrent tier: sharded by the hash of the key, several shards behind each lock.
//!
//! No lock is common to all hits. Groups of rows are handled shard by shard, so that a lookup
//! of many rows takes each lock once. Shards follow from the bytes, and locks from the cores: so a
//! tier holds the same rows on every machine.

mod parts;
mod sync;

pub use parts::Visits;

use std::num::NonZero;

use parts::{Parts, Visited, PARTS_MAX};
use tierbed_core::{Result, RowKey};

use crate::sizing::{Layout, RowClass, TierOptions};
use crate::tier::{hash_of, warm, RowTier, TierGroup, TierStats, Wave, WAVE_ROWS};

/// Bytes a shard should at least have; below, fewer shards.
const SHARD_BYTES_WANTED: u64 = 2 << 20;

/// Bytes of a shard that its slots have numbers for, whatever the rows.
const SHARD_BYTES_MAX: u64 = 192 << 20;

/// Bytes of a shard of a tier that may be resized, at its largest. It is locked meanwhile; more
/// shards have more tables and edges of their own.
const RESIZABLE_BYTES_WANTED: u64 = 4 << 20;

/// Shards of a tier that may be resized.
const RESIZABLE_SHARDS: std::ops::RangeInclusive<u64> = 2..=64;

/// Locks per core: more than threads that ask at once, so that one is mostly free, and few, so that
/// a group takes each for several rows.
const LOCKS_PER_CORE: usize = 2;

/// Most locks of a tier: what tiers hold and evict does not depend on it.
fn lock_count() -> usize {
    LOCKS_PER_CORE * std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Row tiers side by side behind locks.
#[derive(Debug)]
pub struct ShardedTier {
    shards: Parts<RowTier>,
    shard_count: u64,
    /// What each shard is laid out for.
    shard: TierOptions,
}

impl ShardedTier {
    /// Splits the capacity of `options` into at most `shards_max` tiers, more when those would be
    /// too large.
    ///
    /// # Errors
    /// As [`RowTier::new`].
    pub fn new(options: &TierOptions, shards_max: usize) -> Result<Self> {
        Self::with_capacity(options, shards_max, options.capacity_bytes)
    }

    /// As [`new`](Self::new); holds at most `capacity_bytes` until it is resized, up to those of
    /// `options`.
    ///
    /// # Errors
    /// As [`RowTier::new`].
    pub fn with_capacity(
        options: &TierOptions,
        shards_max: usize,
        capacity_bytes: u64,
    ) -> Result<Self> {
        let by_size = options.capacity_bytes / SHARD_BYTES_WANTED;
        let needed = options.capacity_bytes / SHARD_BYTES_MAX;
        let shard_count = (shards_max as u64).min(by_size).max(needed);
        Self::cut(options, shard_count, capacity_bytes)
    }

    /// Splits a tier that is given its bytes later, up to the capacity of `options`.
    ///
    /// # Errors
    /// As [`RowTier::new`].
    pub(crate) fn resizable(options: &TierOptions) -> Result<Self> {
        let by_size = options.capacity_bytes / RESIZABLE_BYTES_WANTED;
        let needed = options.capacity_bytes / SHARD_BYTES_MAX;
        let shard_count = by_size.clamp(*RESIZABLE_SHARDS.start(), *RESIZABLE_SHARDS.end());
        Self::cut(options, shard_count.max(needed), 0)
    }

    fn cut(options: &TierOptions, shard_count: u64, capacity_bytes: u64) -> Result<Self> {
        let shard_count = shard_count.clamp(1, PARTS_MAX as u64);
        let classes = options.classes.iter().map(|class| RowClass {
            // Hashing spreads rows unevenly; a little room keeps the bound from biting.
            row_count: (class.row_count.div_ceil(shard_count) * 5 / 4 + 64).min(class.row_count),
            ..*class
        });
        let shard = TierOptions {
            capacity_bytes: options.capacity_bytes / shard_count,
            classes: classes.collect(),
            tables: options.tables.clone(),
            policy: options.policy,
        };
        let capacity_bytes = capacity_bytes / shard_count;
        let shards = (0..shard_count).map(|_| RowTier::with_capacity(&shard, capacity_bytes));
        let shards = shards.collect::<Result<Vec<_>>>()?;
        Ok(Self { shards: Parts::new(shards, lock_count()), shard_count, shard })
    }

    /// Holds at most `capacity_bytes` from now on, shard by shard, up to those it was made for; see
    /// [`RowTier`].
    pub fn resize(&self, capacity_bytes: u64) {
        self.shards.for_each(|shard| shard.resize(capacity_bytes / self.shard_count));
    }

    /// Returns the most rows that `capacity_bytes` would hold.
    pub(crate) fn rows_with(&self, capacity_bytes: u64) -> u64 {
        let layout = Layout::with_capacity(&self.shard, capacity_bytes / self.shard_count);
        layout.map_or(0, |layout| layout.rows_max * self.shard_count)
    }

    /// Looks up `keys` and hands every row found to `found` with its position and slot.
    ///
    /// `found` runs under a lock: it should copy and return.
    pub fn get_many(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        mut found: impl FnMut(usize, u32, &[f32]),
    ) {
        self.search(keys, visits, |tier, position, slot| {
            if let Some(row) = tier.use_found(slot) {
                found(position, slot, row);
            }
        });
    }

    /// As [`get_many`](Self::get_many), but counts nothing and tells the policies nothing.
    pub fn peek_many(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        mut found: impl FnMut(usize, u32, &[f32]),
    ) {
        self.search(keys, visits, |tier, position, slot| {
            if let Some(row) = tier.row_in(slot) {
                found(position, slot, row);
            }
        });
    }

    /// As [`peek_many`](Self::peek_many), but waits for no lock; `false` when another thread has
    /// one all the while: not all rows were looked for then.
    pub fn try_peek_many(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        mut found: impl FnMut(usize, u32, &[f32]),
    ) -> bool {
        self.arrange(keys, visits, |_| true);
        let mut wave = Wave::new();
        self.shards.visit_free(visits, |tiers, visited| {
            look(&mut wave, tiers, visited, keys, |tier, position, slot| {
                if let Some(row) = tier.row_in(slot) {
                    found(position, slot, row);
                }
            });
        })
    }

    /// Tells the policies of rows that [`try_peek_many`](Self::try_peek_many) found in `slots`,
    /// what [`get_many`](Self::get_many) tells when it finds them. Rows that left since are passed
    /// over.
    ///
    /// # Panics
    /// When there are not as many slots as keys.
    pub fn use_again(&self, keys: &[RowKey], slots: &[u32], visits: &mut Visits) {
        assert_eq!(keys.len(), slots.len(), "every row was found in a slot");
        self.arrange(keys, visits, |_| true);
        for (mut tiers, visited) in self.shards.by_lock(visits) {
            for (tier, positions) in visited.by_part(&mut tiers) {
                let of = |&at: &u32| Some((*keys.get(at as usize)?, *slots.get(at as usize)?));
                positions.iter().filter_map(of).for_each(|(key, slot)| tier.use_again(slot, key));
            }
        }
    }

    /// Tells the policies of a group that was asked for, and offers them the rows that are not
    /// here: `row_of` gives the row of a position, or none to leave it out. Rows that leave for
    /// others, and those that do not come in, go to `left`.
    ///
    /// `row_of` and `left` run under a lock: they should copy and return.
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
        for (mut tiers, visited) in self.shards.by_lock(visits) {
            let rows = visited.positions.iter().map(|&at| (visited.part_of(at), at));
            warm(&tiers, group, rows);
            for (tier, positions) in visited.by_part(&mut tiers) {
                tier.settle(group, positions, &mut row_of, &mut left)?;
            }
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
        for (mut tiers, visited) in self.shards.by_lock(visits) {
            for (tier, positions) in visited.by_part(&mut tiers) {
                for &position in positions {
                    let position = position as usize;
                    if let (Some(key), Some(row)) = (keys.get(position), row_of(position)) {
                        tier.insert(*key, row)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Replaces rows that are here, whatever their policy thinks of them: `row_of` gives the row of
    /// a position; one without a row leaves. Returns how many were replaced.
    ///
    /// # Panics
    /// When a row has another size than the one that is here.
    pub fn replace_many<'a>(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        row_of: impl Fn(usize) -> Option<&'a [f32]>,
    ) -> u64 {
        let mut replaced = 0;
        self.arrange(keys, visits, |_| true);
        for (mut tiers, visited) in self.shards.by_lock(visits) {
            for (tier, positions) in visited.by_part(&mut tiers) {
                for &position in positions {
                    let Some(key) = keys.get(position as usize) else {
                        panic!("position {position} of {} keys", keys.len());
                    };
                    match row_of(position as usize) {
                        Some(row) => replaced += u64::from(tier.replace(*key, row)),
                        None => {
                            tier.remove(*key);
                        }
                    }
                }
            }
        }
        replaced
    }

    /// Returns the most rows that all shards can hold together; 0: the budget is too small.
    #[must_use]
    pub fn rows_max(&self) -> u64 {
        let mut rows = 0;
        self.shards.for_each(|shard| rows += shard.rows_max());
        rows
    }

    /// Lists about `count` rows that would leave last, of each shard its part.
    #[must_use]
    pub fn hottest(&self, count: usize) -> Vec<RowKey> {
        let of_each = (count as u64).div_ceil(self.shard_count) as usize;
        let mut keys = Vec::new();
        self.shards.for_each(|shard| keys.extend(shard.hottest(of_each)));
        keys
    }

    /// Returns the statistics of all shards together.
    #[must_use]
    pub fn stats(&self) -> TierStats {
        let mut sum = TierStats::default();
        self.shards.for_each(|shard| sum = sum.plus(&shard.stats()));
        sum
    }

    /// Looks for all `keys` and calls `visit` with the slot of each, or `NOWHERE`, under its lock.
    fn search(
        &self,
        keys: &[RowKey],
        visits: &mut Visits,
        mut visit: impl FnMut(&mut RowTier, usize, u32),
    ) {
        self.arrange(keys, visits, |_| true);
        let mut wave = Wave::new();
        for (mut tiers, visited) in self.shards.by_lock(visits) {
            look(&mut wave, &mut tiers, visited, keys, &mut visit);
        }
    }

    /// Puts the positions of the keys that take part into the order of their shards.
    fn arrange(&self, keys: &[RowKey], visits: &mut Visits, takes_part: impl Fn(usize) -> bool) {
        let hashes = keys.iter().map(|key| hash_of(*key));
        self.shards.arrange(hashes, visits, takes_part);
    }
}

/// Looks for the keys of one lock, and calls `visit` with the slot of each, or `NOWHERE`.
#[inline]
fn look(
    wave: &mut Wave,
    tiers: &mut [RowTier],
    visited: Visited<'_>,
    keys: &[RowKey],
    mut visit: impl FnMut(&mut RowTier, usize, u32),
) {
    for positions in visited.positions.chunks(WAVE_ROWS) {
        let of = |&at: &u32| Some((visited.part_of(at), *keys.get(at as usize)?));
        let slots = wave.find(tiers, positions.iter().filter_map(of));
        for (&position, &slot) in positions.iter().zip(slots) {
            if let Some(tier) = tiers.get_mut(visited.part_of(position)) {
                visit(tier, position as usize, slot);
            }
        }
    }
}

#[cfg(test)]
mod tests;
