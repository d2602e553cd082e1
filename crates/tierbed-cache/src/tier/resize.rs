//! Growing and shrinking a tier while it is in use.
//!
//! By slabs. The last slab leaves: first as many rows as the other slabs of its pool have no room
//! for, in the policy's order; then its other rows move to slots that are free now. Index and
//! scores are made anew for the slabs there are. The old index goes before the new one comes: keys
//! are in the slabs. Scores change places where they are. So nothing is there twice.

use super::{at, hash_of, RowTier, NONE};
use crate::index::SlotIndex;
use crate::policy::SLOT_BITS;

impl RowTier {
    /// Holds at most `capacity_bytes` from now on. Rows leave where there is no room for them;
    /// more room fills as rows arrive.
    pub(crate) fn resize(&mut self, capacity_bytes: u64) {
        let Some(pool) = self.pools.first() else { return };
        let mut layout = self.layout.clone();
        layout.fit(capacity_bytes, pool.policy.as_ref());
        if layout.slab_count == self.layout.slab_count {
            return;
        }
        while self.slabs.len() > layout.slab_count as usize {
            self.release_last_slab();
        }
        self.layout = layout;
        if self.slabs.is_empty() {
            self.forget_slabs();
        }
        self.rebuild_index();
        let score_count = self.layout.score_count(self.layout.rows_max);
        if let Some(pool) = self.pools.first() {
            let score_count = usize::try_from(score_count).unwrap_or(usize::MAX);
            self.scores.refit(score_count, pool.policy.score_frame());
        }
        let slab_count = self.layout.slab_count as usize;
        self.slabs.reserve_exact(slab_count - self.slabs.len());
        for pool in &mut self.pools {
            pool.slabs.reserve_exact(slab_count - pool.slabs.len());
        }
        self.fixed_bytes = self.layout.fixed_bytes(self.index.bytes());
    }

    /// Drops the tables of slabs, in which there are none.
    fn forget_slabs(&mut self) {
        self.slabs = Vec::new();
        for pool in &mut self.pools {
            (pool.slabs, pool.policy) = (Vec::new(), self.layout.policy.build());
        }
    }

    /// Gives up the slab with the highest number.
    fn release_last_slab(&mut self) {
        let Some(slab) = self.slabs.len().checked_sub(1) else { return };
        let slab = slab as u32;
        let first = slab << SLOT_BITS;
        let (pool_at, slot_count) = (self.slab_mut(first).pool, self.slab_mut(first).slot_count());
        let pool = self.pool_mut(pool_at);
        let slots_elsewhere = (pool.slabs.len() - 1) * pool.slots_per_slab as usize;
        let row_count = slots_elsewhere + slot_count - self.free_count(pool_at);
        for _ in slots_elsewhere..row_count {
            self.evict_one(pool_at, &mut |_, _| ());
        }
        self.unlink_free(pool_at, slab);
        for slot in first..first + slot_count as u32 {
            self.relocate(pool_at, slot);
        }
        let pool = self.pool_mut(pool_at);
        pool.slabs.retain(|&held| held != slab);
        pool.policy.drop_slab(slab);
        self.slabs.pop();
    }

    fn free_count(&mut self, pool_at: usize) -> usize {
        let (mut count, mut slot) = (0, self.pool_mut(pool_at).free);
        while slot != NONE {
            count += 1;
            slot = self.slab_mut(slot).next_free(at(slot));
        }
        count
    }

    /// Moves the row of `from`, if there is one, to a free slot of its pool; the index is made
    /// anew later.
    fn relocate(&mut self, pool_at: usize, from: u32) {
        let Some(key) = self.key_of(from) else { return };
        let Some(number) = self.keys.number(key) else { return };
        let score = self.pool_mut(pool_at).policy.remove(from);
        let to = self.pool_mut(pool_at).free;
        if to == NONE {
            self.counters.evictions += 1;
            self.remember(pool_at, hash_of(key), score);
            return;
        }
        let (tick, row) = (self.slab_mut(from).tick(at(from)), self.slab_mut(from).row(at(from)));
        let row = row.to_vec();
        let slab = self.slab_mut(to);
        let next_free = slab.next_free(at(to));
        slab.set_key(at(to), number);
        slab.set_tick(at(to), tick);
        slab.set_row(at(to), &row);
        let pool = self.pool_mut(pool_at);
        pool.free = next_free;
        pool.policy.insert(to, hash_of(key), score);
    }

    fn rebuild_index(&mut self) {
        self.index = SlotIndex::default();
        self.index = SlotIndex::with_capacity(
            self.layout.rows_max as usize,
            self.layout.slab_count << SLOT_BITS,
        );
        for slab in 0..self.slabs.len() as u32 {
            let first = slab << SLOT_BITS;
            for slot in first..first + self.slab_mut(first).slot_count() as u32 {
                let Some(key) = self.key_of(slot) else { continue };
                if !self.index.insert(hash_of(key), slot) {
                    self.counters.evictions += 1;
                    self.vacate(slot);
                }
            }
        }
    }
}
