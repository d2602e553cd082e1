//! Slots for records of one length: an index, three kinds of protection, and the hand of a clock
//! that chooses which rows leave.
//!
//! ```text
//! index: key -> slot            arena: slot * record_words
//! ```
//!
//! A slot is *pinned* while the round that resolved it runs (callers hold its start),
//! *needed* while an announced batch still wants it, and *referenced* when used since the hand
//! last passed. The hand never takes pinned rows, and needed ones for demand only, when nothing
//! else is left; see [`leaving`](super::leaving).

#![expect(clippy::indexing_slicing, reason = "slots are those that the pool gave out")]

use std::collections::VecDeque;

use hashbrown::HashTable;
use tierbed_core::env::mix64;
use tierbed_core::RowKey;
use tierbed_io::WordBuf;

use super::leaving::{EvictionLimit, Hand};
use super::slot::{class_of, pack, Slot, AGAIN, DIRTY, OCCUPIED, REFERENCED};

/// Bytes of bookkeeping per slot, the index apart.
pub(super) const SLOT_META_BYTES: usize = size_of::<Slot>();
/// One slot in so many may be taken from other rows for batches behind the next one.
const WAITING_PART: u64 = 16;
/// Rows asked for per slot between two passes that age what was not used.
const AGE_AFTER: u64 = 100;

/// Slots for records of one length.
#[derive(Debug)]
pub(super) struct RowPool {
    record_words: usize,
    arena: WordBuf,
    slots: Vec<Slot>,
    /// A bit for each slot: it is dirty, and was published as it is.
    published: Vec<u64>,
    index: HashTable<u32>,
    free: Vec<u32>,
    hand: Hand,
    /// Rows asked for since the last ageing.
    asked: u64,
    /// Rows brought for announced batches that were not used yet, nearest first.
    waiting: VecDeque<Waiting>,
}

/// Rows brought for an announced batch.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    batch: u32,
    row_count: u64,
}

impl RowPool {
    /// Builds a pool of `slot_count` records of `record_words`.
    pub(super) fn new(record_words: usize, slot_count: usize) -> Self {
        assert!(slot_count > 0 && u32::try_from(slot_count).is_ok(), "1 to 2^32 - 1 slots");
        Self {
            record_words,
            // Zeroed by the operating system when first touched.
            arena: WordBuf::new(slot_count * record_words),
            slots: vec![Slot::default(); slot_count],
            published: vec![0; slot_count.div_ceil(64)],
            index: HashTable::with_capacity(slot_count),
            free: Vec::new(),
            hand: Hand::default(),
            asked: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Returns the memory a pool takes, index included.
    pub(super) fn memory_bytes(record_words: usize, slot_count: usize) -> usize {
        // hashbrown: a power of two of buckets, at most 7/8 full, 4 + 1 bytes each, and a group.
        let bucket_count = (slot_count * 8 / 7 + 1).next_power_of_two();
        let published_bytes = 8 * slot_count.div_ceil(64);
        slot_count * (4 * record_words + SLOT_META_BYTES + 4)
            + bucket_count * 5
            + 64
            + published_bytes
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
        &self.arena[start..start + self.record_words]
    }

    pub(super) fn record_mut(&mut self, slot: u32) -> &mut [f32] {
        let start = self.start(slot);
        &mut self.arena[start..start + self.record_words]
    }

    /// Finds the slot of `key`.
    pub(super) fn find(&self, key: RowKey) -> Option<u32> {
        let wanted = pack(key);
        let is_it = |slot: &u32| self.slots[*slot as usize].packed() == wanted;
        self.index.find(mix64(wanted), is_it).copied()
    }

    /// Tells whether `slot` is one that has the row of `key`.
    pub(super) fn holds(&self, slot: u32, key: RowKey) -> bool {
        let has_it = |slot: &Slot| slot.has(OCCUPIED) && slot.packed() == pack(key);
        self.slots.get(slot as usize).is_some_and(has_it)
    }

    /// Marks `slot` used in `round` and needed until batch `needed_until`; batches up to
    /// `batch_done` are over.
    pub(super) fn touch(&mut self, slot: u32, round: u32, needed_until: u32, batch_done: u32) {
        self.asked += 1;
        let slot = &mut self.slots[slot as usize];
        debug_assert!(slot.has(OCCUPIED), "an empty slot is used");
        slot.set(REFERENCED);
        slot.pinned_in = round;
        if slot.needed_until <= batch_done {
            slot.clear(AGAIN);
        } else if needed_until > slot.needed_until {
            slot.set(AGAIN);
        }
        slot.needed_until = slot.needed_until.max(needed_until);
    }

    /// Notes how often the record of `slot` was used.
    pub(super) fn note_uses(&mut self, slot: u32) {
        let use_count = self.record(slot)[self.record_words - 1].to_bits();
        self.slots[slot as usize].set_class(class_of(use_count));
    }

    /// Marks `slot` changed: it must be written before it leaves.
    pub(super) fn mark_dirty(&mut self, slot: u32) {
        self.slots[slot as usize].set(DIRTY);
        self.published[slot as usize / 64] &= !(1 << (slot % 64));
    }

    /// Marks `slot`, which is dirty, published as it is now.
    pub(super) fn mark_published(&mut self, slot: u32) {
        self.published[slot as usize / 64] |= 1 << (slot % 64);
    }

    /// Tells whether the dirty `slot` was published as it is.
    pub(super) fn is_published(&self, slot: u32) -> bool {
        self.published[slot as usize / 64] >> (slot % 64) & 1 == 1
    }

    pub(super) fn mark_clean(&mut self, slot: u32) {
        self.slots[slot as usize].clear(DIRTY);
        self.published[slot as usize / 64] &= !(1 << (slot % 64));
    }

    /// Gives `key`, which must not be here, a free slot; `None` when none is free.
    pub(super) fn insert(&mut self, key: RowKey, round: u32, needed_until: u32) -> Option<u32> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.index.len() < self.slots.len() => self.index.len() as u32,
            None => return None,
        };
        self.asked += 1;
        let place = &mut self.slots[slot as usize];
        assert!(!place.has(OCCUPIED), "a free slot is empty");
        *place = Slot::of(key, round, needed_until);
        let slots = &self.slots;
        let hash_of = |slot: &u32| mix64(slots[*slot as usize].packed());
        self.index.insert_unique(mix64(pack(key)), slot, hash_of);
        Some(slot)
    }

    /// Notes that a row was brought for announced batch `batch`; batches come in order.
    pub(super) fn note_waiting(&mut self, batch: u32) {
        match self.waiting.back_mut().filter(|last| last.batch == batch) {
            Some(last) => last.row_count += 1,
            None => self.waiting.push_back(Waiting { batch, row_count: 1 }),
        }
    }

    /// Forgets the rows that waited for batches up to `batch_done`, which were used.
    pub(super) fn end_waiting(&mut self, batch_done: u32) {
        while self.waiting.front().is_some_and(|first| first.batch <= batch_done) {
            self.waiting.pop_front();
        }
    }

    /// Tells whether no row may leave for one of announced batch `batch`: it is not the next one
    /// behind `batch_done`, and rows that wait for their batches have their share of the slots.
    pub(super) fn is_too_early(&self, batch: u32, batch_done: u32) -> bool {
        let waiting: u64 = self.waiting.iter().map(|batch| batch.row_count).sum();
        batch > batch_done + 1 && waiting >= (self.slots.len() as u64).div_ceil(WAITING_PART)
    }

    /// Forgets `slot`; its record must have been written if it was dirty.
    pub(super) fn remove(&mut self, slot: u32) {
        let place = &mut self.slots[slot as usize];
        let packed = place.packed();
        *place = Slot::default();
        let Ok(entry) = self.index.find_entry(mix64(packed), |other| *other == slot) else {
            panic!("slot {slot} is emptied and has no row")
        };
        entry.remove();
        self.free.push(slot);
        debug_assert!(self.index.len() + self.free.len() <= self.slots.len(), "slots are lost");
    }

    /// Chooses up to `count` slots to empty, with their keys; forgets nothing.
    pub(super) fn pick_victims(
        &mut self,
        count: usize,
        limit: EvictionLimit,
        victims: &mut Vec<(RowKey, u32)>,
    ) {
        if self.asked >= AGE_AFTER * self.slots.len() as u64 {
            self.age();
        }
        self.hand.pick(&mut self.slots, count, limit, victims);
    }

    // Rows that were not used lately count for less.
    fn age(&mut self) {
        self.asked = 0;
        for slot in self.slots.iter_mut().filter(|slot| !slot.has(REFERENCED)) {
            slot.set_class(slot.class().saturating_sub(1));
        }
    }

    /// Returns whether `slot` must be written before it leaves.
    pub(super) fn is_dirty(&self, slot: u32) -> bool {
        self.slots[slot as usize].has(DIRTY)
    }

    /// Lists the dirty slots with their keys.
    pub(super) fn dirty_slots(&self) -> impl Iterator<Item = (RowKey, u32)> + '_ {
        let is_dirty = |slot: &Slot| slot.has(OCCUPIED) && slot.has(DIRTY);
        self.slots
            .iter()
            .enumerate()
            .filter(move |(_, slot)| is_dirty(slot))
            .map(|(at, slot)| (slot.key(), at as u32))
    }

    /// Forgets which batches need which rows.
    pub(super) fn forget_needs(&mut self) {
        self.waiting.clear();
        for slot in &mut self.slots {
            if slot.needed_until != 0 {
                slot.needed_until = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::{RowId, TableId};

    use super::super::leaving::EvictionOrder;
    use super::*;

    fn key(row: u64) -> RowKey {
        RowKey::new(TableId(3), RowId(row))
    }

    fn fill(pool: &mut RowPool, count: u64) {
        for row in 0..count {
            pool.insert(key(row), 1, 0).unwrap();
        }
    }

    fn victims(pool: &mut RowPool, count: usize, limit: EvictionLimit) -> Vec<u64> {
        let mut victims = Vec::new();
        pool.pick_victims(count, limit, &mut victims);
        victims.iter().map(|(key, _)| key.row.0).collect()
    }

    const CALM: EvictionLimit = EvictionLimit {
        round: 9,
        batch_done: 0,
        may_take_needed: false,
        order: EvictionOrder::NextUse,
    };

    #[test]
    fn finds_what_it_holds_and_reuses_slots() {
        let mut pool = RowPool::new(2, 4);
        fill(&mut pool, 4);
        assert_eq!(pool.insert(key(9), 1, 0), None);
        let slot = pool.find(key(2)).unwrap();
        assert!(pool.holds(slot, key(2)) && !pool.holds(slot, key(1)) && !pool.holds(9, key(2)));
        pool.remove(slot);
        assert!(!pool.holds(slot, key(2)));
        assert_eq!(pool.find(key(2)), None);
        assert_eq!(pool.insert(key(9), 1, 0), Some(slot));
        assert_eq!((pool.find(key(9)), pool.row_count()), (Some(slot), 4));
    }

    #[test]
    fn the_hand_gives_second_chances() {
        let mut pool = RowPool::new(2, 4);
        fill(&mut pool, 4);
        assert_eq!(victims(&mut pool, 2, CALM), [0, 1]);
        (0..2).for_each(|slot| pool.remove(slot));
        let slot = pool.find(key(2)).unwrap();
        pool.touch(slot, 1, 0, 0);
        assert_eq!(victims(&mut pool, 1, EvictionLimit { round: 10, ..CALM }), [3]);
    }

    #[test]
    fn pinned_rows_stay_and_needed_rows_go_last() {
        let mut pool = RowPool::new(2, 4);
        fill(&mut pool, 4);
        for (row, round, needed) in [(0, 9, 0), (1, 1, 5), (2, 1, 5), (3, 9, 0)] {
            let slot = pool.find(key(row)).unwrap();
            pool.touch(slot, round, needed, 0);
        }
        assert_eq!(victims(&mut pool, 4, CALM), [0u64; 0]);
        let desperate = EvictionLimit { may_take_needed: true, ..CALM };
        assert_eq!(victims(&mut pool, 4, desperate), [1, 2]);
        let later = EvictionLimit { round: 10, batch_done: 5, ..CALM };
        assert_eq!(victims(&mut pool, 4, later).len(), 4);
    }

    /// Record 0 was used nine times, the others once: it stays until it was not used for long.
    #[test]
    fn rows_used_often_stay_until_they_are_old() {
        let mut pool = RowPool::new(1, 4);
        fill(&mut pool, 4);
        for slot in 0..4 {
            pool.record_mut(slot)[0] = f32::from_bits(if slot == 0 { 9 } else { 1 });
            pool.note_uses(slot);
        }
        assert_eq!(victims(&mut pool, 3, CALM), [1, 2, 3]);
        for slot in 1..4 {
            pool.record_mut(slot)[0] = f32::from_bits(8);
            pool.note_uses(slot);
        }
        for _ in 0..2 * AGE_AFTER {
            (1..4).for_each(|slot| pool.touch(slot, 1, 0, 0));
            (1..4).for_each(|slot| pool.touch(slot, 1, 0, 0));
            victims(&mut pool, 0, CALM);
        }
        assert_eq!(victims(&mut pool, 1, CALM), [0]);
    }

    #[test]
    fn rows_of_several_announced_batches_are_wanted_soon() {
        let mut pool = RowPool::new(2, 3);
        fill(&mut pool, 3);
        for (slot, until) in [(0, 9), (1, 8), (2, 1), (2, 20)] {
            pool.touch(slot, 1, until, 0);
        }
        let desperate = EvictionLimit { may_take_needed: true, ..CALM };
        assert_eq!(victims(&mut pool, 1, desperate), [0]);
        pool.touch(2, 1, 21, 20);
        let later = EvictionLimit { batch_done: 20, ..desperate };
        assert!(!pool.slots[2].has(AGAIN));
        assert_eq!(victims(&mut pool, 3, later), [0, 1]);
    }

    #[test]
    fn rows_that_wait_for_later_batches_take_a_share() {
        // Of 32 slots two are the share.
        let mut pool = RowPool::new(2, 32);
        pool.note_waiting(5);
        assert!(!pool.is_too_early(6, 4));
        pool.note_waiting(6);
        assert!(pool.is_too_early(6, 4) && pool.is_too_early(7, 4));
        assert!(!pool.is_too_early(5, 4), "the next batch always comes");
        pool.end_waiting(5);
        assert!(!pool.is_too_early(7, 5), "the row of batch 5 waits no longer");
        pool.note_waiting(7);
        assert!(pool.is_too_early(8, 5));
        pool.forget_needs();
        assert!(!pool.is_too_early(8, 5));
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
