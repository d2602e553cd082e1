//! Slot of the row buffer in sixteen bytes: its row, which batches want it, how often it was used.
//!
//! ```text
//! word   63 .. 60  59     58          57     56        55 ...... 0
//!        class     again  referenced  dirty  occupied  table, row
//! needed_until u32 | pinned_in u32
//! ```

use tierbed_core::{RowId, RowKey, TableId};

/// The slot has a row.
pub(super) const OCCUPIED: u8 = 1;
/// The row must be written before it leaves.
pub(super) const DIRTY: u8 = 2;
/// The row was used since the hand passed.
pub(super) const REFERENCED: u8 = 4;
/// Several announced batches want the row.
pub(super) const AGAIN: u8 = 8;

const ROW_BITS: u32 = 40;
const FLAG_SHIFT: u32 = 56;
const KEY_MASK: u64 = (1 << FLAG_SHIFT) - 1;
const CLASS_SHIFT: u32 = 60;
/// Classes of use there are: `0..=CLASS_MAX`.
pub(super) const CLASS_MAX: u8 = 15;

/// One slot.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Slot {
    word: u64,
    /// The last announced batch that wants the row.
    pub(super) needed_until: u32,
    /// The last round that placed the row.
    pub(super) pinned_in: u32,
}

impl Slot {
    /// A slot that has the row of `key`, used now.
    pub(super) fn of(key: RowKey, round: u32, needed_until: u32) -> Self {
        let mut slot = Self { word: pack(key), needed_until, pinned_in: round };
        slot.set(OCCUPIED | REFERENCED);
        slot
    }

    /// Returns the row's key, as [`pack`]ed.
    pub(super) fn packed(&self) -> u64 {
        self.word & KEY_MASK
    }

    /// Returns the row's key.
    pub(super) fn key(&self) -> RowKey {
        let key = self.packed();
        RowKey::new(TableId((key >> ROW_BITS) as u32), RowId(key & ((1 << ROW_BITS) - 1)))
    }

    /// Tells whether one of `flags` is set.
    pub(super) fn has(&self, flags: u8) -> bool {
        self.word >> FLAG_SHIFT & u64::from(flags) != 0
    }

    /// Sets `flags`.
    pub(super) fn set(&mut self, flags: u8) {
        self.word |= u64::from(flags) << FLAG_SHIFT;
    }

    /// Clears `flags`.
    pub(super) fn clear(&mut self, flags: u8) {
        self.word &= !(u64::from(flags) << FLAG_SHIFT);
    }

    /// Returns the row's class of use.
    pub(super) fn class(&self) -> u8 {
        (self.word >> CLASS_SHIFT) as u8
    }

    /// Overwrites the class of use, at most [`CLASS_MAX`].
    pub(super) fn set_class(&mut self, class: u8) {
        let class = u64::from(class.min(CLASS_MAX));
        self.word = self.word & !(u64::from(CLASS_MAX) << CLASS_SHIFT) | class << CLASS_SHIFT;
    }
}

/// Packs a key: 16 bits of table, 40 of row. Both bounds are the schema's.
pub(super) fn pack(key: RowKey) -> u64 {
    debug_assert!(key.row.0 >> ROW_BITS == 0 && key.table.0 >> 16 == 0, "{key:?}");
    u64::from(key.table.0) << ROW_BITS | key.row.0
}

/// Returns the class of rows used `use_count` times: the count up to 3, then two classes per
/// doubling; from 192 on all are alike.
pub(super) fn class_of(use_count: u32) -> u8 {
    let octave = use_count.checked_ilog2().unwrap_or(0);
    if octave < 2 {
        return use_count as u8;
    }
    let half = (use_count >> (octave - 1)) & 1;
    (2 * octave + half).min(u32::from(CLASS_MAX)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_packing_beside_flags_and_class() {
        let widest = RowKey::new(TableId(65_535), RowId((1 << 40) - 1));
        let mut slot = Slot::of(widest, 7, 9);
        slot.set(DIRTY | AGAIN);
        slot.set_class(200);
        assert_eq!((slot.key(), slot.class()), (widest, CLASS_MAX));
        slot.set_class(3);
        slot.clear(AGAIN);
        assert_eq!((slot.key(), slot.class()), (widest, 3));
        assert!(slot.has(OCCUPIED) && slot.has(DIRTY) && slot.has(REFERENCED) && !slot.has(AGAIN));
    }

    #[test]
    fn classes_grow_with_the_uses() {
        let classes: Vec<u8> =
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 191, 192, u32::MAX].map(class_of).into();
        assert_eq!(classes, [0, 1, 2, 3, 4, 4, 5, 5, 6, 7, 8, 14, 15, 15]);
    }
}
