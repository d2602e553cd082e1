//! Least frequently used: uses counted while the row is cached, the oldest of the lowest count is
//! evicted. Counts end at 1,023.

use tierbed_cache::keeps_slots;
use tierbed_cache::policy::buckets::{Buckets, RANKS};
use tierbed_cache::policy::slots::Slots;
use tierbed_cache::policy::EvictionPolicy;

/// The slots by count.
#[derive(Debug, Clone, Default)]
pub struct Lfu {
    /// How often the row was asked for.
    slots: Slots<u16>,
    counts: Buckets,
}

impl Lfu {
    fn rank(&mut self, slot: u32, count: u16) {
        self.slots.set_state(slot, count);
        self.counts.push(&mut self.slots.links, slot, count);
    }
}

impl EvictionPolicy for Lfu {
    fn name(&self) -> &'static str {
        "lfu"
    }

    keeps_slots!(u16, 0);

    fn bytes_fixed(&self, _slot_count: usize) -> usize {
        Buckets::BYTES
    }

    fn touch(&mut self, slot: u32) {
        let count = self.slots.state(slot);
        self.remove(slot);
        self.rank(slot, (count + 1).min(RANKS as u16 - 1));
    }

    fn insert(&mut self, slot: u32, _hash: u64, _score: u16) {
        self.rank(slot, 1);
    }

    fn victim(&mut self) -> Option<u32> {
        self.counts.oldest_lowest()
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let count = self.slots.state(slot);
        self.counts.remove(&mut self.slots.links, slot, count);
        0
    }

    fn dump(&self) -> Vec<u32> {
        self.counts.iter(&self.slots.links).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_lowest_count_leaves() {
        let mut lfu = Lfu::default();
        lfu.add_slab(0, 4);
        (0..4).for_each(|slot| lfu.insert(slot, 0, 0));
        for slot in [3, 0, 3, 2] {
            lfu.touch(slot);
        }
        assert_eq!(lfu.dump(), [1, 0, 2, 3]);
        lfu.remove(1);
        lfu.insert(1, 0, 0);
        assert_eq!(lfu.dump(), [1, 0, 2, 3]);
        (0..2000).for_each(|_| lfu.touch(1));
        assert_eq!((lfu.slots.state(1), lfu.victim()), (1023, Some(0)));
    }
}
