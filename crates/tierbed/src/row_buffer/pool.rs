//! Slots for records of one length: an index, second-chance eviction, three kinds of protection.
//!
//! ```text
//! index: key -> slot            arena: slot * record_words
//! slot   key | flags | needed_until | pinned_in
//! ```
//!
//! A slot is *pinned* while the round that resolved it runs (its start is in somebody's hands),
//! *needed* while an announced batch still wants it, and *referenced* when used since the hand
//! last passed. The hand takes what is none of these; for demand it may take needed rows when
//! nothing else is left; it never takes pinned ones.

use hashbrown::HashTable;
use tierbed_core::env::mix64;
use tierbed_core::{RowId, RowKey, TableId};

const ROW_BITS: u32 = 40;
const OCCUPIED: u8 = 1;
const DIRTY: u8 = 2;
const REFERENCED: u8 = 4;

/// Bytes of bookkeeping per slot, the index apart.
pub(super) const SLOT_META_BYTES: usize = size_of::<Slot>();

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    // Row in the low 40 bits, table in the next 16, flags in the top 8.
    word: u64,
    needed_until: u32,
    pinned_in: u32,
}

const FLAG_SHIFT: u32 = 56;
const KEY_MASK: u64 = (1 << FLAG_SHIFT) - 1;

fn pack(key: RowKey) -> u64 {
    u64::from(key.table.0) << ROW_BITS | key.row.0
}

fn unpack(word: u64) -> RowKey {
    let key = word & KEY_MASK;
    RowKey::new(TableId((key >> ROW_BITS) as u32), RowId(key & ((1 << ROW_BITS) - 1)))
}

impl Slot {
    fn has(&self, flag: u8) -> bool {
        self.word >> FLAG_SHIFT & u64::from(flag) != 0
    }

    fn set(&mut self, flag: u8) {
        self.word |= u64::from(flag) << FLAG_SHIFT;
    }

    fn clear(&mut self, flag: u8) {
        self.word &= !(u64::from(flag) << FLAG_SHIFT);
    }
}

/// What the hand may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mercy {
    /// Round whose pins hold.
    pub(super) round: u32,
    /// Batches up to here are done: `needed_until` above it protects.
    pub(super) batch_done: u32,
    /// Whether rows of announced batches may go when nothing else is left.
    pub(super) may_take_needed: bool,
}

/// Slots for records of one length.
#[derive(Debug)]
pub(super) struct RowPool {
    record_words: usize,
    arena: Vec<f32>,
    slots: Vec<Slot>,
    index: HashTable<u32>,
    free: Vec<u32>,
    hand: usize,
}

impl RowPool {
    /// Builds a pool of `slot_count` records of `record_words`.
    pub(super) fn new(record_words: usize, slot_count: usize) -> Self {
        assert!(slot_count > 0 && u32::try_from(slot_count).is_ok(), "1 to 2^32 - 1 slots");
        Self {
            record_words,
            // Zeroed by the operating system page by page, when first touched.
            arena: vec![0.0; slot_count * record_words],
            slots: vec![Slot::default(); slot_count],
            index: HashTable::with_capacity(slot_count),
            free: Vec::new(),
            hand: 0,
        }
    }

    /// Returns the memory a pool takes, index included.
    pub(super) fn memory_bytes(record_words: usize, slot_count: usize) -> usize {
        // hashbrown: a power of two of buckets, at most 7/8 full, 4 + 1 bytes each, and a group.
        let bucket_count = (slot_count * 8 / 7 + 1).next_power_of_two();
        slot_count * (4 * record_words + SLOT_META_BYTES + 4) + bucket_count * 5 + 64
    }

    pub(super) fn record_words(&self) -> usize {
        self.record_words
    }

    pub(super) fn slot_count(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn row_count(&self) -> usize {
        self.index.len()
    }

    pub(super) fn arena(&self) -> &[f32] {
        &self.arena
    }

    pub(super) fn arena_mut(&mut self) -> &mut [f32] {
        &mut self.arena
    }

    /// Returns the first word of `slot`'s record.
    pub(super) fn start(&self, slot: u32) -> usize {
        slot as usize * self.record_words
    }

    pub(super) fn record(&self, slot: u32) -> &[f32] {
        let start = self.start(slot);
        self.arena.get(start..start + self.record_words).unwrap_or(&[])
    }

    pub(super) fn record_mut(&mut self, slot: u32) -> &mut [f32] {
        let start = self.start(slot);
        self.arena.get_mut(start..start + self.record_words).unwrap_or(&mut [])
    }

    /// Finds the slot of `key`.
    pub(super) fn find(&self, key: RowKey) -> Option<u32> {
        let wanted = pack(key);
        let is_it = |slot: &u32| {
            self.slots.get(*slot as usize).is_some_and(|slot| slot.word & KEY_MASK == wanted)
        };
        self.index.find(mix64(wanted), is_it).copied()
    }

    /// Marks `slot` used in `round` and needed until batch `needed_until`.
    pub(super) fn touch(&mut self, slot: u32, round: u32, needed_until: u32) {
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.set(REFERENCED);
            slot.pinned_in = round;
            slot.needed_until = slot.needed_until.max(needed_until);
        }
    }

    /// Marks `slot` changed: it must be written before it leaves.
    pub(super) fn mark_dirty(&mut self, slot: u32) {
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.set(DIRTY);
        }
    }

    pub(super) fn mark_clean(&mut self, slot: u32) {
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.clear(DIRTY);
        }
    }

    /// Gives `key`, which must not be here, a free slot; `None` when none is free.
    pub(super) fn insert(&mut self, key: RowKey, round: u32, needed_until: u32) -> Option<u32> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.index.len() < self.slots.len() => self.index.len() as u32,
            None => return None,
        };
        let word = pack(key);
        if let Some(place) = self.slots.get_mut(slot as usize) {
            assert!(!place.has(OCCUPIED), "a free slot is empty");
            *place = Slot { word, needed_until, pinned_in: round };
            place.set(OCCUPIED | REFERENCED);
        }
        let slots = &self.slots;
        let hash_of =
            |slot: &u32| mix64(slots.get(*slot as usize).map_or(0, |slot| slot.word & KEY_MASK));
        self.index.insert_unique(mix64(word), slot, hash_of);
        Some(slot)
    }

    /// Forgets `slot`; its record must have been written if it was dirty.
    pub(super) fn remove(&mut self, slot: u32) {
        let Some(place) = self.slots.get_mut(slot as usize) else { return };
        let word = place.word & KEY_MASK;
        *place = Slot::default();
        if let Ok(entry) = self.index.find_entry(mix64(word), |other| *other == slot) {
            entry.remove();
            self.free.push(slot);
        }
    }

    /// Chooses up to `count` slots to empty, with their keys; forgets nothing.
    pub(super) fn pick_victims(
        &mut self,
        count: usize,
        mercy: Mercy,
        victims: &mut Vec<(RowKey, u32)>,
    ) {
        self.sweep(count, mercy, false, victims);
        if victims.is_empty() && mercy.may_take_needed {
            self.sweep(count, mercy, true, victims);
        }
    }

    // Two laps of the hand: the first may only take second chances away.
    fn sweep(
        &mut self,
        count: usize,
        mercy: Mercy,
        is_desperate: bool,
        victims: &mut Vec<(RowKey, u32)>,
    ) {
        for _ in 0..2 * self.slots.len() {
            if victims.len() >= count {
                return;
            }
            let at = self.hand;
            self.hand = if at + 1 == self.slots.len() { 0 } else { at + 1 };
            let Some(slot) = self.slots.get_mut(at) else { return };
            let is_needed = slot.needed_until > mercy.batch_done && !is_desperate;
            if !slot.has(OCCUPIED) || slot.pinned_in == mercy.round || is_needed {
                continue;
            }
            if slot.has(REFERENCED) && !is_desperate {
                slot.clear(REFERENCED);
                continue;
            }
            // A second lap of the hand must not take the same slot twice.
            slot.pinned_in = mercy.round;
            victims.push((unpack(slot.word), at as u32));
        }
    }

    /// Returns whether `slot` must be written before it leaves.
    pub(super) fn is_dirty(&self, slot: u32) -> bool {
        self.slots.get(slot as usize).is_some_and(|slot| slot.has(DIRTY))
    }

    /// Lists the dirty slots with their keys.
    pub(super) fn dirty_slots(&self) -> impl Iterator<Item = (RowKey, u32)> + '_ {
        let is_dirty = |slot: &Slot| slot.has(OCCUPIED) && slot.has(DIRTY);
        self.slots
            .iter()
            .enumerate()
            .filter(move |(_, slot)| is_dirty(slot))
            .map(|(at, slot)| (unpack(slot.word), at as u32))
    }

    /// Forgets which batches need which rows.
    pub(super) fn forget_needs(&mut self) {
        for slot in &mut self.slots {
            if slot.needed_until != 0 {
                slot.needed_until = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(row: u64) -> RowKey {
        RowKey::new(TableId(3), RowId(row))
    }

    fn fill(pool: &mut RowPool, count: u64) {
        for row in 0..count {
            pool.insert(key(row), 1, 0).unwrap();
        }
    }

    fn victims(pool: &mut RowPool, count: usize, mercy: Mercy) -> Vec<u64> {
        let mut victims = Vec::new();
        pool.pick_victims(count, mercy, &mut victims);
        victims.iter().map(|(key, _)| key.row.0).collect()
    }

    const CALM: Mercy = Mercy { round: 9, batch_done: 0, may_take_needed: false };

    #[test]
    fn keys_survive_packing() {
        let widest = RowKey::new(TableId(65_535), RowId((1 << 40) - 1));
        assert_eq!(unpack(pack(widest)), widest);
    }

    #[test]
    fn finds_what_it_holds_and_reuses_slots() {
        let mut pool = RowPool::new(2, 4);
        fill(&mut pool, 4);
        assert_eq!(pool.insert(key(9), 1, 0), None);
        let slot = pool.find(key(2)).unwrap();
        pool.remove(slot);
        assert_eq!(pool.find(key(2)), None);
        assert_eq!(pool.insert(key(9), 1, 0), Some(slot));
        assert_eq!((pool.find(key(9)), pool.row_count()), (Some(slot), 4));
    }

    #[test]
    fn the_hand_gives_second_chances() {
        let mut pool = RowPool::new(2, 4);
        fill(&mut pool, 4);
        assert_eq!(victims(&mut pool, 2, CALM), [0, 1]);
        let slot = pool.find(key(2)).unwrap();
        pool.touch(slot, 1, 0);
        assert_eq!(victims(&mut pool, 1, Mercy { round: 10, ..CALM }), [3]);
    }

    #[test]
    fn pinned_rows_stay_and_needed_rows_go_last() {
        let mut pool = RowPool::new(2, 4);
        fill(&mut pool, 4);
        for (row, round, needed) in [(0, 9, 0), (1, 1, 5), (2, 1, 5), (3, 9, 0)] {
            let slot = pool.find(key(row)).unwrap();
            pool.touch(slot, round, needed);
        }
        assert_eq!(victims(&mut pool, 4, CALM), [0u64; 0]);
        let desperate = Mercy { may_take_needed: true, ..CALM };
        assert_eq!(victims(&mut pool, 4, desperate), [1, 2]);
        let later = Mercy { round: 10, batch_done: 5, may_take_needed: false };
        assert_eq!(victims(&mut pool, 4, later).len(), 4);
    }

    #[test]
    fn no_slot_is_picked_twice() {
        let mut pool = RowPool::new(2, 8);
        fill(&mut pool, 8);
        let mut picked = victims(&mut pool, 100, CALM);
        picked.sort_unstable();
        assert_eq!(picked, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn the_memory_estimate_covers_the_allocations() {
        for (words, slots) in [(1, 1), (17, 1000), (73, 14_336), (4, 14_337)] {
            let pool = RowPool::new(words, slots);
            let real = pool.arena.len() * 4
                + pool.slots.len() * SLOT_META_BYTES
                + pool.index.allocation_size();
            let said = RowPool::memory_bytes(words, slots);
            assert!(real <= said, "{real} <= {said}");
        }
    }
}
