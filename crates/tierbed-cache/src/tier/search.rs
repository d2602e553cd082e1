//! Batched search for the slots of rows.
//!
//! The index names a slot or two whose rows have such a hash, and the key in the slot decides. A
//! slot in which a row was found before is looked at first: mostly the row is still there.

#![expect(clippy::indexing_slicing, reason = "every row is of one of the tiers")]

use std::hint::black_box;

use tierbed_core::RowKey;

use super::{at, hash_of, RowTier};
use crate::policy::SLOT_BITS;

/// Rows that are looked for together.
pub(crate) const WAVE_ROWS: usize = 16;

/// No slot: the row was not found.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// A search for several rows at once.
#[derive(Debug)]
pub(crate) struct Wave {
    hashes: [u64; WAVE_ROWS],
    slots: [u32; WAVE_ROWS],
}

impl Wave {
    pub(crate) fn new() -> Self {
        Self { hashes: [0; WAVE_ROWS], slots: [NOWHERE; WAVE_ROWS] }
    }

    /// Returns the slots of `rows`, at most [`WAVE_ROWS`] of them, each in one of `tiers`;
    /// [`NOWHERE`]: not here.
    ///
    /// All read their lines of the index, then all their keys: so a wave waits for memory twice,
    /// not every row.
    #[inline]
    pub(crate) fn find(
        &mut self,
        tiers: &[RowTier],
        rows: impl Iterator<Item = (usize, RowKey)> + Clone,
    ) -> &[u32] {
        let mut first_words = 0;
        for ((tier, key), hash) in rows.clone().zip(&mut self.hashes) {
            *hash = hash_of(key);
            first_words ^= tiers[tier].index.first_word(*hash);
        }
        black_box(first_words);
        for (((tier, key), hash), slot) in rows.zip(&self.hashes).zip(&mut self.slots) {
            let found = tiers[tier].find_hashed(*hash, key);
            *slot = found.unwrap_or(NOWHERE);
        }
        &self.slots
    }
}

impl RowTier {
    pub(super) fn find(&self, key: RowKey) -> Option<u32> {
        self.find_hashed(hash_of(key), key)
    }

    #[inline]
    pub(super) fn find_hashed(&self, hash: u64, key: RowKey) -> Option<u32> {
        self.find_number(hash, self.keys.number(key)?)
    }

    #[inline]
    pub(super) fn find_number(&self, hash: u64, number: u64) -> Option<u32> {
        self.index.find(hash, |slot| self.holds(slot, number))
    }

    /// Finds a row that was in slot `hint` before, or [`NOWHERE`].
    #[inline]
    pub(super) fn find_again(&self, hint: u32, hash: u64, key: RowKey) -> Option<u32> {
        let number = self.keys.number(key)?;
        if self.holds(hint, number) {
            return Some(hint);
        }
        self.find_number(hash, number)
    }

    #[inline]
    fn holds(&self, slot: u32, number: u64) -> bool {
        self.slab(slot).is_some_and(|slab| slab.has(at(slot), number))
    }

    /// Returns the row that was just found in `slot`, if it was; counts the hit or miss.
    #[inline]
    pub(crate) fn use_found(&mut self, slot: u32) -> Option<&[f32]> {
        if slot == NOWHERE {
            self.counters.misses += 1;
            return None;
        }
        self.counters.hits += 1;
        self.tick = self.tick.wrapping_add(1);
        let tick = self.tick;
        let slab = self.slabs.get_mut((slot >> SLOT_BITS) as usize)?.as_mut()?;
        slab.set_tick(at(slot), tick);
        let pool = self.pools.get_mut(slab.pool)?;
        pool.policy.touch(slot);
        Some(slab.row(at(slot)))
    }

    /// Uses a row that was found in slot `hint` a moment ago, if it is still here.
    pub(crate) fn use_again(&mut self, hint: u32, key: RowKey) {
        if let Some(slot) = self.find_again(hint, hash_of(key), key) {
            self.use_found(slot);
        }
    }

    /// Returns the row that was just found in `slot`.
    #[inline]
    pub(crate) fn row_in(&self, slot: u32) -> Option<&[f32]> {
        Some(self.slab(slot)?.row(at(slot)))
    }
}
