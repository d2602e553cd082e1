//! A cache tier of rows: lookup, admission, eviction.
//!
//! Rows of several sizes share one budget of slabs. Each size is a *pool* with its own policy;
//! slabs move between pools: a pool without a slab takes one from the pool that holds most, and
//! a pool whose rows leave much younger than another's takes that one's oldest (the tail ages
//! even out). Invariant: a slot is occupied exactly when its key is in the index and the slot in
//! its pool's policy.
//!
//! Source: the slab rebalancing by tail age of CacheLib (Berg et al., OSDI 2020).

mod group;
mod resize;
mod search;

pub(crate) use group::warm;
pub use group::TierGroup;
use search::NOWHERE;
pub(crate) use search::{Wave, WAVE_ROWS};

use tierbed_core::env::mix64;
use tierbed_core::{Error, Result, RowKey};

use crate::index::SlotIndex;
use crate::key_numbers::KeyNumbers;
use crate::policy::{EvictionPolicy, ScoreTable, SLOT_BITS};
use crate::sizing::{Layout, TierOptions};
use crate::slab::Slab;

/// No slot: end of a free list.
const NONE: u32 = u32::MAX;
/// A pool takes another's slab when that one's tail is this many times older.
const TAIL_AGE_RATIO: u32 = 2;

/// A cache of rows within a byte budget. Not shared between threads; see
/// [`ShardedTier`](crate::ShardedTier).
#[derive(Debug)]
pub struct RowTier {
    layout: Layout,
    keys: KeyNumbers,
    index: SlotIndex,
    slabs: Vec<Option<Slab>>,
    pools: Vec<Pool>,
    /// Scores of rows that left, where the policy wants them.
    scores: ScoreTable,
    hashes: Vec<u64>,
    /// Counts accesses; wraps.
    tick: u32,
    fixed_bytes: u64,
    counters: Counters,
}

#[derive(Debug)]
struct Pool {
    row_words: usize,
    slots_per_slab: u32,
    slabs: Vec<u32>,
    free: u32,
    policy: Box<dyn EvictionPolicy>,
    evictions_since_balance: u32,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counters {
    hits: u64,
    misses: u64,
    insertions: u64,
    evictions: u64,
    slab_moves: u64,
}

/// What became of an inserted row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Insertion {
    /// It is in the tier now.
    Stored,
    /// It was there; its words were overwritten.
    Replaced,
    /// It stays outside: the policy does not admit it, or the budget holds no slab at all.
    Bypassed,
}

/// What a tier did and holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Rows asked for and found.
    pub hits: u64,
    /// Rows asked for and not found.
    pub misses: u64,
    /// Rows stored that were not there.
    pub insertions: u64,
    /// Rows that left to make room.
    pub evictions: u64,
    /// Slabs that changed their pool.
    pub slab_moves: u64,
    /// Rows held now.
    pub row_count: u64,
    /// Bytes of slots, occupied or not.
    pub data_bytes: u64,
    /// Bytes of index, keys, links and tables.
    pub metadata_bytes: u64,
    /// The budget: never less than data and metadata together.
    pub capacity_bytes: u64,
}

impl TierStats {
    /// Adds the counts of `other`: the statistics of two tiers side by side.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            insertions: self.insertions + other.insertions,
            evictions: self.evictions + other.evictions,
            slab_moves: self.slab_moves + other.slab_moves,
            row_count: self.row_count + other.row_count,
            data_bytes: self.data_bytes + other.data_bytes,
            metadata_bytes: self.metadata_bytes + other.metadata_bytes,
            capacity_bytes: self.capacity_bytes + other.capacity_bytes,
        }
    }
}

/// The hash of a key, for the index and for policies.
#[inline]
pub(crate) fn hash_of(key: RowKey) -> u64 {
    mix64(packed(key))
}

/// Packs a key: 16 bits of table, 40 of row. Both bounds are the schema's.
pub(crate) fn packed(key: RowKey) -> u64 {
    (u64::from(key.table.0) << 40) | key.row.0
}

/// The key that was [`packed`].
pub(crate) fn unpacked(key: u64) -> RowKey {
    let table = tierbed_core::TableId((key >> 40) as u32);
    RowKey::new(table, tierbed_core::RowId(key & ((1 << 40) - 1)))
}

/// A row that is not in the tier yet.
struct NewRow<'a> {
    /// Of its key.
    hash: u64,
    /// Of its key.
    number: u64,
    /// The pool of rows of its size.
    pool_at: usize,
    row: &'a [f32],
}

impl RowTier {
    /// Builds an empty tier; memory is taken as rows arrive, except the index's.
    ///
    /// # Errors
    /// `Invalid` when a class has rows of no words or larger than a slab.
    pub fn new(options: &TierOptions) -> Result<Self> {
        Self::with_capacity(options, options.capacity_bytes)
    }

    /// Builds an empty tier of `capacity_bytes` that may be resized up to those of `options`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn with_capacity(options: &TierOptions, capacity_bytes: u64) -> Result<Self> {
        let layout = Layout::with_capacity(options, capacity_bytes)?;
        let index =
            SlotIndex::with_capacity(layout.rows_max as usize, layout.slab_count << SLOT_BITS);
        let pools = layout.classes.iter().map(|class| Pool {
            row_words: class.row_words,
            slots_per_slab: class.slots_per_slab,
            slabs: Vec::with_capacity(layout.slab_count as usize),
            free: NONE,
            policy: options.policy.build(),
            evictions_since_balance: 0,
        });
        let pools: Vec<Pool> = pools.collect();
        let score_count = layout.score_count(layout.rows_max);
        let mut scores = ScoreTable::default();
        scores.resize(usize::try_from(score_count).unwrap_or(usize::MAX));
        let fixed_bytes = layout.fixed_bytes(index.bytes());
        Ok(Self {
            keys: KeyNumbers::new(&options.tables),
            scores,
            hashes: Vec::new(),
            slabs: Vec::with_capacity(layout.slab_count as usize),
            index,
            pools,
            tick: 0,
            fixed_bytes,
            counters: Counters::default(),
            layout,
        })
    }

    /// Returns the row of `key` if it is here, `[row_words]`, and counts the hit or miss.
    pub fn get(&mut self, key: RowKey) -> Option<&[f32]> {
        self.use_found(self.find(key).unwrap_or(NOWHERE))
    }

    /// Returns the row of `key` if it is here, `[row_words]`; counts nothing and tells the
    /// policy nothing.
    #[must_use]
    pub fn peek(&self, key: RowKey) -> Option<&[f32]> {
        self.row_in(self.find(key)?)
    }

    /// Tells whether `key` is here; counts nothing.
    #[must_use]
    pub fn contains(&self, key: RowKey) -> bool {
        self.find(key).is_some()
    }

    /// Stores a copy of `row` `[row_words]`; another row may leave for it.
    ///
    /// # Errors
    /// `Invalid` when no class has rows of this size, or no table has this row.
    pub fn insert(&mut self, key: RowKey, row: &[f32]) -> Result<Insertion> {
        self.insert_with(key, row, &mut |_, _| ())
    }

    /// Stores a copy of `row` `[row_words]`, and hands every row that leaves for it to `left`.
    ///
    /// # Errors
    /// As [`insert`](Self::insert).
    pub fn insert_with(
        &mut self,
        key: RowKey,
        row: &[f32],
        left: &mut dyn FnMut(RowKey, &[f32]),
    ) -> Result<Insertion> {
        let hash = hash_of(key);
        let (number, pool_at) = self.place_for(key, row)?;
        self.tick = self.tick.wrapping_add(1);
        if let Some(slot) = self.find_number(hash, number) {
            if self.slab_mut(slot).row_words() == row.len() {
                let tick = self.tick;
                let slab = self.slab_mut(slot);
                slab.set_row(at(slot), row);
                slab.set_tick(at(slot), tick);
                self.pool_mut(pool_at).policy.touch(slot);
                return Ok(Insertion::Replaced);
            }
            self.vacate(slot);
        }
        Ok(self.take_in(NewRow { hash, number, pool_at, row }, left))
    }

    /// Returns the number of a key, and the pool of its row.
    fn place_for(&self, key: RowKey, row: &[f32]) -> Result<(u64, usize)> {
        let number = self.keys.number(key).ok_or_else(|| {
            Error::invalid("no table of the cache has this row")
                .with("table", key.table.0)
                .with("row", key.row.0)
        })?;
        let pool_at = self.pools.binary_search_by_key(&row.len(), |pool| pool.row_words);
        pool_at.map(|pool_at| (number, pool_at)).map_err(|_| {
            Error::invalid("no cache class has rows of this size").with("row_words", row.len())
        })
    }

    /// Stores a row that is not here, if the policy admits it.
    fn take_in(&mut self, new: NewRow<'_>, left: &mut dyn FnMut(RowKey, &[f32])) -> Insertion {
        let NewRow { hash, number, pool_at, row } = new;
        let is_full = self.is_full(pool_at);
        // Deltas bring rows beyond those that the tier was made for: slots are left, the index is
        // full.
        let is_beyond = !is_full && self.index.len() as u64 >= self.layout.rows_max;
        let frame = self.pool_mut(pool_at).policy.score_frame();
        let score = self.scores.get(hash, frame);
        let arrival = self.pool_mut(pool_at).policy.arrive(hash, score, is_full || is_beyond);
        if !arrival.is_admitted {
            self.remember(pool_at, hash, arrival.score);
            return Insertion::Bypassed;
        }
        for _ in 0..arrival.flushed {
            self.evict_one(pool_at, left);
        }
        if is_beyond {
            self.evict_one(pool_at, left);
            if self.index.len() as u64 >= self.layout.rows_max {
                return Insertion::Bypassed;
            }
        }
        let Some(slot) = self.free_slot(pool_at, left) else { return Insertion::Bypassed };
        if !self.index.insert(hash, slot) {
            return Insertion::Bypassed;
        }
        let tick = self.tick;
        let slab = self.slab_mut(slot);
        let next_free = slab.next_free(at(slot));
        slab.set_key(at(slot), number);
        slab.set_tick(at(slot), tick);
        slab.set_row(at(slot), row);
        let pool = self.pool_mut(pool_at);
        pool.free = next_free;
        pool.policy.insert(slot, hash, arrival.score);
        self.counters.insertions += 1;
        Insertion::Stored
    }

    /// Overwrites the row of `key` if it is here; tells the policy nothing. Returns whether it was.
    ///
    /// # Panics
    /// When `row` has another size.
    pub fn replace(&mut self, key: RowKey, row: &[f32]) -> bool {
        let Some(slot) = self.find(key) else { return false };
        let slab = self.slab_mut(slot);
        assert_eq!(slab.row_words(), row.len(), "words of a row that is replaced");
        slab.set_row(at(slot), row);
        true
    }

    /// Forgets `key`; tells whether it was here.
    pub fn remove(&mut self, key: RowKey) -> bool {
        let found = self.find(key);
        if let Some(slot) = found {
            self.vacate(slot);
        }
        found.is_some()
    }

    /// Returns the most rows that can be here at once; 0: the budget holds not even a slab.
    #[must_use]
    pub fn rows_max(&self) -> u64 {
        self.layout.rows_max
    }

    /// Returns what was counted so far and what is held now.
    #[must_use]
    pub fn stats(&self) -> TierStats {
        let mut stats = TierStats {
            hits: self.counters.hits,
            misses: self.counters.misses,
            insertions: self.counters.insertions,
            evictions: self.counters.evictions,
            slab_moves: self.counters.slab_moves,
            row_count: self.index.len() as u64,
            metadata_bytes: self.fixed_bytes,
            ..TierStats::default()
        };
        for slab in self.slabs.iter().flatten() {
            let Some(pool) = self.pools.get(slab.pool) else { panic!("a slab is of a pool") };
            let policy_bytes = pool.policy.bytes_per_slot();
            stats.data_bytes += slab.row_bytes_total();
            stats.metadata_bytes +=
                slab.metadata_bytes() + (slab.slot_count() * policy_bytes) as u64;
        }
        stats.capacity_bytes =
            self.fixed_bytes + u64::from(self.layout.slab_count) * self.layout.slab_bytes;
        stats
    }

    /// Lists the rows of `row_words` words in the order in which they would leave, for tests.
    #[must_use]
    pub fn dump(&self, row_words: usize) -> Vec<RowKey> {
        let pool = self.pools.iter().find(|pool| pool.row_words == row_words);
        let slots = pool.map_or_else(Vec::new, |pool| pool.policy.dump());
        slots.iter().filter_map(|&slot| self.key_of(slot)).collect()
    }

    /// Lists at most about `count` rows, of each size its part: those that would leave last first.
    pub(crate) fn hottest(&self, count: usize) -> Vec<RowKey> {
        let row_count = self.index.len().max(1);
        let mut keys = Vec::new();
        for pool in &self.pools {
            let slots = pool.policy.dump();
            let part = slots.len().saturating_mul(count).div_ceil(row_count);
            keys.extend(slots.iter().rev().take(part).filter_map(|&slot| self.key_of(slot)));
        }
        keys
    }

    /// Finds an empty slot of `pool_at`, making one if need be. It stays first of the free list.
    fn free_slot(&mut self, pool_at: usize, left: &mut dyn FnMut(RowKey, &[f32])) -> Option<u32> {
        if self.pool_mut(pool_at).free == NONE && !self.grow(pool_at) {
            self.balance(pool_at);
            if self.pool_mut(pool_at).free == NONE {
                self.evict_one(pool_at, left);
            }
        }
        let free = self.pool_mut(pool_at).free;
        (free != NONE).then_some(free)
    }

    /// Evicts the victim of a pool, if it holds a row.
    fn evict_one(&mut self, pool_at: usize, left: &mut dyn FnMut(RowKey, &[f32])) {
        let Some(victim) = self.pool_mut(pool_at).policy.victim() else { return };
        let Some(key) = self.key_of(victim) else { return };
        self.counters.evictions += 1;
        let hash = hash_of(key);
        let score = self.pool_mut(pool_at).policy.evict(victim, hash);
        self.remember(pool_at, hash, score);
        left(key, self.slab_mut(victim).row(at(victim)));
        self.empty(victim);
    }

    /// Keeps the score of a row that is not here.
    fn remember(&mut self, pool_at: usize, hash: u64, score: u16) {
        if let Some(pool) = self.pools.get(pool_at) {
            self.scores.put(hash, score, pool.policy.score_frame());
        }
    }

    /// Tells whether a row would have to leave for another of this pool.
    fn is_full(&mut self, pool_at: usize) -> bool {
        let can_grow = self.slabs.len() < self.layout.slab_count as usize;
        self.pool_mut(pool_at).free == NONE && !can_grow
    }

    /// Gives the pool a slab that no pool has yet.
    fn grow(&mut self, pool_at: usize) -> bool {
        if self.slabs.len() >= self.layout.slab_count as usize {
            return false;
        }
        let slab = self.slabs.len() as u32;
        self.slabs.push(None);
        self.attach(slab, pool_at);
        true
    }

    /// Moves a slab to `pool_at` when it has none, or when its rows leave too young.
    fn balance(&mut self, pool_at: usize) {
        let pool = self.pool_mut(pool_at);
        pool.evictions_since_balance += 1;
        if pool.slabs.is_empty() {
            let most =
                (0..self.pools.len()).max_by_key(|&at| self.pools.get(at).map(|p| p.slabs.len()));
            let slab = most.and_then(|at| self.pools.get(at)?.slabs.last().copied());
            if let Some(slab) = slab {
                self.move_slab(slab, pool_at);
            }
            return;
        }
        // Once per slab's worth of evictions: a slab just taken gets used before the next.
        if pool.evictions_since_balance < pool.slots_per_slab {
            return;
        }
        pool.evictions_since_balance = 0;
        let own_age = self.tail(pool_at).map_or(0, |(_, age)| age);
        let mut oldest = None;
        for other in (0..self.pools.len()).filter(|&other| other != pool_at) {
            if self.pool_mut(other).slabs.len() < 2 {
                continue;
            }
            // A pool whose slots are all empty gives first.
            let (slot, age) = match self.tail(other) {
                Some(tail) => tail,
                None => (self.pool_mut(other).free, u32::MAX),
            };
            if slot != NONE && oldest.is_none_or(|(_, oldest_age)| age > oldest_age) {
                oldest = Some((slot, age));
            }
        }
        if let Some((slot, age)) = oldest {
            if age / TAIL_AGE_RATIO > own_age {
                self.move_slab(slot >> SLOT_BITS, pool_at);
            }
        }
    }

    /// The next victim of a pool, and how many accesses ago it was used.
    fn tail(&mut self, pool_at: usize) -> Option<(u32, u32)> {
        let slot = self.pool_mut(pool_at).policy.victim()?;
        let last_used = self.slab_mut(slot).tick(at(slot));
        Some((slot, self.tick.wrapping_sub(last_used)))
    }

    fn move_slab(&mut self, slab: u32, to: usize) {
        let first = slab << SLOT_BITS;
        let slot_count = self.slab_mut(first).slot_count() as u32;
        for slot in first..first + slot_count {
            if self.key_of(slot).is_some() {
                self.counters.evictions += 1;
                self.vacate(slot);
            }
        }
        let from = self.slab_mut(first).pool;
        self.unlink_free(from, slab);
        let pool = self.pool_mut(from);
        pool.slabs.retain(|&held| held != slab);
        pool.policy.drop_slab(slab);
        self.counters.slab_moves += 1;
        self.attach(slab, to);
    }

    /// Takes the slots of `slab` out of the free list of its pool.
    fn unlink_free(&mut self, pool_at: usize, slab: u32) {
        let mut kept = NONE;
        let mut slot = self.pool_mut(pool_at).free;
        while slot != NONE {
            let next = self.slab_mut(slot).next_free(at(slot));
            if slot >> SLOT_BITS != slab {
                self.slab_mut(slot).set_free(at(slot), kept);
                kept = slot;
            }
            slot = next;
        }
        self.pool_mut(pool_at).free = kept;
    }

    /// Makes `slab` a slab of empty slots of `pool_at`.
    fn attach(&mut self, slab: u32, pool_at: usize) {
        let kind = self.layout.slot_kind;
        let pool = self.pool_mut(pool_at);
        let mut fresh = Slab::new(pool_at, pool.row_words, pool.slots_per_slab, kind);
        pool.policy.add_slab(slab, pool.slots_per_slab);
        pool.slabs.push(slab);
        for slot in (0..fresh.slot_count()).rev() {
            fresh.set_free(slot, pool.free);
            pool.free = (slab << SLOT_BITS) | slot as u32;
        }
        if let Some(place) = self.slabs.get_mut(slab as usize) {
            *place = Some(fresh);
        }
    }

    /// Takes the row of an occupied slot out for another reason than its rank.
    fn vacate(&mut self, slot: u32) {
        let pool_at = self.slab_mut(slot).pool;
        self.pool_mut(pool_at).policy.remove(slot);
        self.empty(slot);
    }

    /// Empties a slot that its policy gave up, and puts it first in the free list.
    fn empty(&mut self, slot: u32) {
        if let Some(key) = self.key_of(slot) {
            self.index.remove(hash_of(key), slot);
        }
        let pool_at = self.slab_mut(slot).pool;
        let pool = self.pool_mut(pool_at);
        let next_free = std::mem::replace(&mut pool.free, slot);
        let slab = self.slab_mut(slot);
        slab.set_free(at(slot), next_free);
    }

    fn key_of(&self, slot: u32) -> Option<RowKey> {
        self.slab(slot)?.key(at(slot)).map(|number| self.keys.key(number))
    }

    #[inline]
    fn slab(&self, slot: u32) -> Option<&Slab> {
        self.slabs.get((slot >> SLOT_BITS) as usize)?.as_ref()
    }

    fn slab_mut(&mut self, slot: u32) -> &mut Slab {
        let slab = self.slabs.get_mut((slot >> SLOT_BITS) as usize).and_then(Option::as_mut);
        match slab {
            Some(slab) => slab,
            None => panic!("slot {slot} is in no slab"),
        }
    }

    fn pool_mut(&mut self, pool_at: usize) -> &mut Pool {
        match self.pools.get_mut(pool_at) {
            Some(pool) => pool,
            None => panic!("no pool {pool_at}"),
        }
    }
}

/// Position of a slot in its slab.
fn at(slot: u32) -> usize {
    (slot & ((1 << SLOT_BITS) - 1)) as usize
}

#[cfg(test)]
mod tests;
