//! Slab storage: slots of one size in slabs of fixed bytes.
#![expect(
    clippy::indexing_slicing,
    reason = "slots are made here; one outside its slab is a programmer error"
)]

use crate::key_numbers::SHORT_MAX;

/// What a tier keeps of each slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotKind {
    /// Keys have eight bytes, not four.
    pub(crate) has_long_keys: bool,
    /// Ages are compared.
    pub(crate) has_ticks: bool,
}

impl SlotKind {
    /// Bytes of metadata per slot.
    pub(crate) fn bytes(self) -> u64 {
        let words = 1 + u64::from(self.has_long_keys) + u64::from(self.has_ticks);
        words * size_of::<u32>() as u64
    }
}

/// Bytes the allocator may add to the blocks of a slab.
pub(crate) const SLAB_OVERHEAD_BYTES: u64 = 4 * 32;
/// From here on a short key, or the high half of a long one, says that the slot is empty; no packed
/// key reaches it. The bits below are the next empty slot of the pool.
const EMPTY: u32 = SHORT_MAX as u32;

/// Rows of one size with their keys.
#[derive(Debug)]
pub(crate) struct Slab {
    /// The pool it is in.
    pub(crate) pool: usize,
    row_words: usize,
    /// The low halves of keys, and the high ones; none of these where keys are short.
    keys: Box<[u32]>,
    highs: Box<[u32]>,
    /// When each row was last asked for; none in a tier of one pool.
    ticks: Box<[u32]>,
    rows: Box<[f32]>,
}

impl Slab {
    /// Builds a slab of empty slots, each the last of its list.
    pub(crate) fn new(pool: usize, row_words: usize, slot_count: u32, kind: SlotKind) -> Self {
        let slots = slot_count as usize;
        let words = |are_there: bool| if are_there { slots } else { 0 };
        Self {
            pool,
            row_words,
            keys: vec![u32::MAX; slots].into_boxed_slice(),
            highs: vec![u32::MAX; words(kind.has_long_keys)].into_boxed_slice(),
            ticks: vec![0; words(kind.has_ticks)].into_boxed_slice(),
            rows: vec![0.0; slots * row_words].into_boxed_slice(),
        }
    }

    pub(crate) fn slot_count(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn row_words(&self) -> usize {
        self.row_words
    }

    pub(crate) fn row_bytes_total(&self) -> u64 {
        size_of_val(&*self.rows) as u64
    }

    pub(crate) fn metadata_bytes(&self) -> u64 {
        let words = self.keys.len() + self.highs.len() + self.ticks.len();
        (words * size_of::<u32>()) as u64 + SLAB_OVERHEAD_BYTES
    }

    /// Returns the key in a slot, or none when it is empty.
    pub(crate) fn key(&self, at: usize) -> Option<u64> {
        let (low, high) = (self.keys[at], self.highs.get(at).copied());
        let key = (u64::from(high.unwrap_or(0)) << 32) | u64::from(low);
        (high.unwrap_or(low) < EMPTY).then_some(key)
    }

    /// Tells whether a slot holds `key`; none behind the end does.
    #[inline]
    pub(crate) fn has(&self, at: usize, key: u64) -> bool {
        self.keys.get(at) == Some(&(key as u32))
            && self.highs.get(at).is_none_or(|&h| h == (key >> 32) as u32)
    }

    pub(crate) fn set_key(&mut self, at: usize, key: u64) {
        self.keys[at] = key as u32;
        if let Some(high) = self.highs.get_mut(at) {
            *high = (key >> 32) as u32;
        }
    }

    /// Returns the slot after this empty one.
    pub(crate) fn next_free(&self, at: usize) -> u32 {
        match self.keys[at] {
            u32::MAX => u32::MAX,
            key => key & !EMPTY,
        }
    }

    /// Empties a slot, in front of `next_free`: another slot, or `u32::MAX`.
    pub(crate) fn set_free(&mut self, at: usize, next_free: u32) {
        self.set_key(at, u64::MAX);
        self.keys[at] = EMPTY | next_free;
    }

    pub(crate) fn tick(&self, at: usize) -> u32 {
        // Tiers whose rows never grow old keep no ticks.
        match self.ticks.get(at) {
            Some(tick) => *tick,
            None => 0,
        }
    }

    #[inline]
    pub(crate) fn set_tick(&mut self, at: usize, tick: u32) {
        if let Some(held) = self.ticks.get_mut(at) {
            *held = tick;
        }
    }

    pub(crate) fn row(&self, at: usize) -> &[f32] {
        &self.rows[at * self.row_words..(at + 1) * self.row_words]
    }

    pub(crate) fn set_row(&mut self, at: usize, row: &[f32]) {
        self.rows[at * self.row_words..(at + 1) * self.row_words].copy_from_slice(row);
    }
}
