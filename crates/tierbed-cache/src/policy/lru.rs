//! Least recently used.

use crate::keeps_slots;

use super::list::List;
use super::slots::Slots;
use super::EvictionPolicy;

/// One list, oldest to newest. A touch moves a slot to the newest end.
#[derive(Debug, Clone, Default)]
pub struct Lru {
    slots: Slots<()>,
    list: List,
}

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    keeps_slots!((), 0);

    fn touch(&mut self, slot: u32) {
        self.list.refresh(&mut self.slots.links, slot);
    }

    fn insert(&mut self, slot: u32, _hash: u64, _score: u16) {
        self.list.push_newest(&mut self.slots.links, slot);
    }

    fn victim(&mut self) -> Option<u32> {
        self.list.oldest()
    }

    fn remove(&mut self, slot: u32) -> u16 {
        self.list.remove(&mut self.slots.links, slot);
        0
    }

    fn dump(&self) -> Vec<u32> {
        self.list.iter(&self.slots.links).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::SLOT_BITS;

    fn filled() -> Lru {
        let mut lru = Lru::default();
        lru.add_slab(0, 4);
        lru.add_slab(2, 4);
        for slot in [0, 1, 2 << SLOT_BITS, 3] {
            lru.insert(slot, 0, 0);
        }
        lru
    }

    #[test]
    fn leaves_in_the_order_of_last_use() {
        let mut lru = filled();
        assert_eq!(lru.dump(), [0, 1, 8192, 3]);
        lru.touch(0);
        assert_eq!(lru.dump(), [1, 8192, 3, 0]);
        lru.touch(8192);
        assert_eq!(lru.dump(), [1, 3, 0, 8192]);
        lru.touch(8192);
        assert_eq!(lru.dump(), [1, 3, 0, 8192]);
        assert_eq!(lru.victim(), Some(1));
    }

    #[test]
    fn removal_closes_the_list_at_both_ends_and_inside() {
        let mut lru = filled();
        lru.remove(1);
        assert_eq!(lru.dump(), [0, 8192, 3]);
        lru.remove(0);
        lru.remove(3);
        assert_eq!(lru.dump(), [8192]);
        lru.remove(8192);
        assert_eq!((lru.dump(), lru.victim()), (vec![], None));
        lru.insert(1, 0, 0);
        assert_eq!(lru.dump(), [1]);
    }
}
