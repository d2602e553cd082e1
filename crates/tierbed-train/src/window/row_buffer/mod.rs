//! Row buffer: the only copy of a row while it is read or changed.
//!
//! Lookups pool straight from the slots, optimizers step in place, a dirty flag says what must
//! be written before a slot is given away. Rows that announced batches will use are kept
//! (RecDB's embedding-vector buffer); because there is no second copy, a row fetched ahead can
//! never be stale. Source: RecDB §4.2.
//!
//! Work proceeds in *rounds*: rows placed in a round stay where they are until the next one
//! begins, so their starts may be used freely in between.

#![expect(
    clippy::indexing_slicing,
    reason = "trained tables have a pool, and misses are those of a round"
)]

mod leaving;
mod pool;
mod sizing;
mod slot;

use serde::Serialize;
use tierbed_core::store::RowWrite;
use tierbed_core::{Budget, Reservation, Result, RowId, RowKey, Schema, TableId, TrainStore};
use tierbed_kernels::init_record;

use leaving::EvictionLimit;
pub use leaving::EvictionOrder;
use pool::RowPool;

/// Most rows evicted at once: more share pages, but stay away longer than needed.
const EVICT_ROWS_MAX: usize = 4096;
/// Most rows given to the store at once.
const WRITE_ROWS_MAX: usize = 1024;

/// Rows that are looked for together.
pub(crate) const TOGETHER: usize = 16;
/// No slot of a pool.
const NOWHERE: u32 = u32::MAX;

/// A row that got a slot and still waits for its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Miss {
    key: RowKey,
    pool: u32,
    slot: u32,
}

/// Where a row was when it was looked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guess {
    key: RowKey,
    slot: u32,
}

/// How badly a row is wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Want {
    /// A batch is being worked on: announced rows may be sacrificed.
    Now,
    /// Announced batch number `until` will use it: only rows nobody needs may be.
    Ahead {
        /// The batch's number in the announcement.
        until: u32,
    },
}

/// What a buffer did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BufferStats {
    /// Rows found in the buffer, counted per index.
    pub hit_count: u64,
    /// Rows brought from the store or initialised.
    pub miss_count: u64,
    /// Rows given up for others.
    pub evicted_count: u64,
    /// Rows written back.
    pub written_back_count: u64,
    /// Rows in the buffer now.
    pub row_count: u64,
    /// Rows the buffer can hold.
    pub row_capacity: u64,
}

/// The rows in memory. See the module documentation.
#[derive(Debug)]
pub(crate) struct RowBuffer {
    pools: Vec<RowPool>,
    pool_of_table: Vec<u32>,
    round: u32,
    batch_done: u32,
    order: EvictionOrder,
    stats: BufferStats,
    victims: Vec<(RowKey, u32)>,
    memory: Reservation,
}

impl RowBuffer {
    /// Builds a buffer for the tables of `schema` in the free part of `budget`, at most
    /// `bytes_max`.
    ///
    /// # Errors
    /// `Invalid` when not even one row per record length fits, naming the minimum.
    pub(crate) fn new(schema: &Schema, budget: &Budget, bytes_max: u64) -> Result<Self> {
        let free_bytes = budget.free_bytes().min(bytes_max);
        let sizes = sizing::share_out(schema, free_bytes);
        let memory = budget.reserve("row buffer", sizes.memory_bytes)?;
        Ok(Self {
            pools: sizes.pools.iter().map(|size| RowPool::new(size.words, size.slots)).collect(),
            pool_of_table: sizes.pool_of_table,
            round: 0,
            batch_done: 0,
            order: EvictionOrder::default(),
            stats: BufferStats::default(),
            victims: Vec::new(),
            memory,
        })
    }

    /// Returns the memory it takes, bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Lets rows leave in another order.
    pub(crate) fn set_order(&mut self, order: EvictionOrder) {
        self.order = order;
    }

    /// Starts a round: pins of the last one end.
    pub(crate) fn begin_round(&mut self) {
        self.round = self.round.checked_add(1).unwrap_or(1);
    }

    /// Says that announced batches up to `batch` have been used.
    pub(crate) fn set_batch_done(&mut self, batch: u32) {
        self.batch_done = batch;
        self.pools.iter_mut().for_each(|pool| pool.end_waiting(batch));
    }

    /// Forgets all announcements.
    pub(crate) fn forget_needs(&mut self) {
        self.batch_done = 0;
        self.pools.iter_mut().for_each(RowPool::forget_needs);
    }

    /// Finds the slot of `key`, or gives it one and adds it to `misses`; `None` when every slot
    /// is taken by this round, or when it is too early to let another row leave.
    ///
    /// # Errors
    /// Those of writing evicted rows to `store`; the buffer then still holds them, and forgets
    /// `misses`, so nobody can take them for real.
    pub(crate) fn place(
        &mut self,
        key: RowKey,
        want: Want,
        store: &mut dyn TrainStore,
        misses: &mut Vec<Miss>,
    ) -> Result<Option<u32>> {
        self.place_near(Guess { key, slot: NOWHERE }, want, store, misses)
    }

    /// Looks for up to [`TOGETHER`] rows at once, so that misses of the processor's caches overlap;
    /// returns where each was.
    pub(crate) fn guess(&self, keys: impl Iterator<Item = RowKey>) -> [Guess; TOGETHER] {
        let nothing = Guess { key: RowKey::new(TableId(0), RowId(0)), slot: NOWHERE };
        let mut guesses = [nothing; TOGETHER];
        for (guess, key) in guesses.iter_mut().zip(keys) {
            let pool = &self.pools[self.pool_of_table[key.table.0 as usize] as usize];
            *guess = Guess { key, slot: pool.find(key).unwrap_or(NOWHERE) };
        }
        guesses
    }

    /// As [`place`](Self::place) of a row that was [looked for](Self::guess): others that were
    /// placed since may have taken its slot.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    pub(crate) fn place_near(
        &mut self,
        guess: Guess,
        want: Want,
        store: &mut dyn TrainStore,
        misses: &mut Vec<Miss>,
    ) -> Result<Option<u32>> {
        let key = guess.key;
        let pool_at = self.pool_of_table[key.table.0 as usize];
        let pool = &mut self.pools[pool_at as usize];
        let needed_until = match want {
            Want::Now => 0,
            Want::Ahead { until } => until,
        };
        let found = match pool.holds(guess.slot, key) {
            true => Some(guess.slot),
            false => pool.find(key),
        };
        if let Some(slot) = found {
            pool.touch(slot, self.round, needed_until, self.batch_done);
            self.stats.hit_count += 1;
            return Ok(Some(slot));
        }
        let mut slot = pool.insert(key, self.round, needed_until);
        if slot.is_none() {
            if needed_until > 0 && pool.is_too_early(needed_until, self.batch_done) {
                return Ok(None);
            }
            let evicted = self.evict(pool_at, matches!(want, Want::Now), store);
            evicted.inspect_err(|_| self.forget(misses))?;
            slot = self.pools[pool_at as usize].insert(key, self.round, needed_until);
        }
        if let Some(slot) = slot {
            self.stats.miss_count += 1;
            if needed_until > 0 {
                self.pools[pool_at as usize].note_waiting(needed_until);
            }
            misses.push(Miss { key, pool: pool_at, slot });
        }
        Ok(slot)
    }

    fn evict(
        &mut self,
        pool_at: u32,
        may_take_needed: bool,
        store: &mut dyn TrainStore,
    ) -> Result<()> {
        let pool = &mut self.pools[pool_at as usize];
        let (round, batch_done, order) = (self.round, self.batch_done, self.order);
        let limit = EvictionLimit { round, batch_done, may_take_needed, order };
        let count = (pool.slot_count() / 16).clamp(1, EVICT_ROWS_MAX);
        self.victims.clear();
        pool.pick_victims(count, limit, &mut self.victims);
        self.victims.sort_unstable();
        for some in self.victims.chunks(WRITE_ROWS_MAX) {
            self.stats.written_back_count += write_back(pool, some, store)?;
            some.iter().for_each(|(_, slot)| pool.mark_clean(*slot));
        }
        self.stats.evicted_count += self.victims.len() as u64;
        for (_, slot) in &self.victims {
            debug_assert!(!pool.is_dirty(*slot), "a row leaves that was not written");
            pool.remove(*slot);
        }
        Ok(())
    }

    /// Brings the records of `misses`, in file order, from `store` or their initial values;
    /// empties `misses`.
    ///
    /// # Errors
    /// The store's; rows not filled are forgotten, so nobody can take them for real.
    pub(crate) fn fill(
        &mut self,
        misses: &mut Vec<Miss>,
        schema: &Schema,
        store: &mut dyn TrainStore,
    ) -> Result<()> {
        misses.sort_unstable();
        let keys: Vec<RowKey> = misses.iter().map(|miss| miss.key).collect();
        let pools = &mut self.pools;
        let result = store.read(&keys, &mut |at, record| {
            let miss = misses[at];
            let pool = &mut pools[miss.pool as usize];
            debug_assert_eq!(pool.find(miss.key), Some(miss.slot), "a miss lost its slot");
            let place = pool.record_mut(miss.slot);
            match record {
                Some(bytes) => bytemuck::cast_slice_mut(place).copy_from_slice(bytes),
                None => init_record(schema.table(miss.key.table)?, miss.key.row.0, place),
            }
            pool.note_uses(miss.slot);
            Ok(())
        });
        result.inspect_err(|_| self.forget(misses))?;
        misses.clear();
        Ok(())
    }

    // Forgets rows that were placed and never filled.
    fn forget(&mut self, misses: &mut Vec<Miss>) {
        for miss in misses.drain(..) {
            self.pools[miss.pool as usize].remove(miss.slot);
        }
    }

    /// Writes every dirty row to `store`, in file order per record length.
    ///
    /// # Errors
    /// The store's; rows not written stay dirty.
    pub(crate) fn flush(&mut self, store: &mut dyn TrainStore) -> Result<()> {
        for pool in &mut self.pools {
            let mut dirty: Vec<_> = pool.dirty_slots().collect();
            dirty.sort_unstable();
            for some in dirty.chunks(WRITE_ROWS_MAX) {
                self.stats.written_back_count += write_back(pool, some, store)?;
                some.iter().for_each(|(_, slot)| pool.mark_clean(*slot));
            }
        }
        Ok(())
    }

    /// Lists the rows that neither the store nor the last publish has as they are here.
    pub(crate) fn unpublished_keys(&self) -> impl Iterator<Item = RowKey> + '_ {
        self.pools.iter().flat_map(|pool| {
            let dirty = pool.dirty_slots().filter(|(_, slot)| !pool.is_published(*slot));
            dirty.map(|(key, _)| key)
        })
    }

    /// Hands the rows to `publish` that the store has not as they are here. They are noted; until
    /// they change again, that is known.
    ///
    /// # Errors
    /// Those of `publish`.
    pub(crate) fn publish_dirty(
        &mut self,
        publish: &mut dyn FnMut(RowKey, &[f32]) -> Result<()>,
    ) -> Result<()> {
        for pool in &mut self.pools {
            let dirty: Vec<_> = pool.dirty_slots().collect();
            for (key, slot) in dirty {
                publish(key, pool.record(slot))?;
                pool.mark_published(slot);
            }
        }
        Ok(())
    }

    /// Returns the arena of table `table`'s records, and the words of one.
    pub(crate) fn arena(&self, table: u32) -> (&[f32], usize) {
        let pool = self.pool_for(table);
        (pool.arena(), pool.record_words())
    }

    /// Returns the arena of table `table`'s records for changing them.
    pub(crate) fn arena_mut(&mut self, table: u32) -> &mut [f32] {
        self.pools[self.pool_of_table[table as usize] as usize].arena_mut()
    }

    /// Returns the record of `key` if it is in memory. Changes nothing, counts nothing.
    pub(crate) fn peek(&self, key: RowKey) -> Option<&[f32]> {
        let pool = self.pool(key.table.0)?;
        pool.find(key).map(|slot| pool.record(slot))
    }

    /// Returns the record of `key` for changing it, if it is in memory, and marks it dirty.
    pub(crate) fn peek_mut(&mut self, key: RowKey) -> Option<&mut [f32]> {
        let at = self.pool_of_table.get(key.table.0 as usize).copied()?;
        let pool = self.pools.get_mut(at as usize)?;
        let slot = pool.find(key)?;
        pool.mark_dirty(slot);
        Some(pool.record_mut(slot))
    }

    /// Marks the record that starts at `start` in table `table`'s arena dirty and counts a use.
    pub(crate) fn finish_step(&mut self, table: u32, start: usize) {
        let pool = &mut self.pools[self.pool_of_table[table as usize] as usize];
        debug_assert!(start.is_multiple_of(pool.record_words()), "no record starts at {start}");
        let slot = (start / pool.record_words()) as u32;
        pool.mark_dirty(slot);
        let record = pool.record_mut(slot);
        let count = &mut record[record.len() - 1];
        *count = f32::from_bits(count.to_bits().saturating_add(1));
        pool.note_uses(slot);
    }

    /// Returns how many rows of table `table`'s record length the buffer can hold.
    pub(crate) fn row_capacity(&self, table: u32) -> usize {
        self.pool_for(table).slot_count()
    }

    pub(crate) fn stats(&self) -> BufferStats {
        BufferStats {
            row_count: self.pools.iter().map(|pool| pool.row_count() as u64).sum(),
            row_capacity: self.pools.iter().map(|pool| pool.slot_count() as u64).sum(),
            ..self.stats
        }
    }

    // Tables that are trained have a pool.
    fn pool_for(&self, table: u32) -> &RowPool {
        &self.pools[self.pool_of_table[table as usize] as usize]
    }

    // The house's own tables have none.
    fn pool(&self, table: u32) -> Option<&RowPool> {
        let at = self.pool_of_table.get(table as usize).copied()?;
        self.pools.get(at as usize)
    }
}

// Writes the dirty ones of `slots`, which are in key order; returns how many there were.
fn write_back(pool: &RowPool, slots: &[(RowKey, u32)], store: &mut dyn TrainStore) -> Result<u64> {
    let dirty: Vec<_> = slots.iter().filter(|(_, slot)| pool.is_dirty(*slot)).collect();
    let rows: Vec<RowWrite<'_>> = dirty
        .iter()
        .map(|(key, slot)| RowWrite { key: *key, record: bytemuck::cast_slice(pool.record(*slot)) })
        .collect();
    if !rows.is_empty() {
        store.write_back(&rows, &|at| pool.is_published(dirty[at].1))?;
    }
    Ok(rows.len() as u64)
}
