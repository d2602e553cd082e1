//! Least recently used: a doubly linked list threaded through the slots.
#![expect(
    clippy::indexing_slicing,
    reason = "slots are made by the tier; one outside its slab is a programmer error"
)]

use super::{EvictionPolicy, SLOT_BITS};

/// No slot: the list's ends.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
}

/// The list, oldest to newest. A touch moves a slot to the newest end.
#[derive(Debug)]
pub struct Lru {
    /// Links of each slab of this pool, by slab number.
    slabs: Vec<Option<Box<[Link]>>>,
    oldest: u32,
    newest: u32,
}

impl Default for Lru {
    fn default() -> Self {
        Self { slabs: Vec::new(), oldest: NONE, newest: NONE }
    }
}

impl Lru {
    fn link_mut(&mut self, slot: u32) -> &mut Link {
        let slab = self.slabs[(slot >> SLOT_BITS) as usize].as_mut();
        match slab {
            Some(links) => &mut links[(slot & ((1 << SLOT_BITS) - 1)) as usize],
            None => panic!("slot {slot} is in no slab of this pool"),
        }
    }

    fn unlink(&mut self, slot: u32) {
        let Link { older, newer } = *self.link_mut(slot);
        match older {
            NONE => self.oldest = newer,
            older => self.link_mut(older).newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.link_mut(newer).older = older,
        }
    }

    fn push_newest(&mut self, slot: u32) {
        *self.link_mut(slot) = Link { older: self.newest, newer: NONE };
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.link_mut(newest).newer = slot,
        }
        self.newest = slot;
    }
}

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn bytes_per_slot(&self) -> usize {
        size_of::<Link>()
    }

    fn bytes_per_slab(&self) -> usize {
        size_of::<Option<Box<[Link]>>>()
    }

    fn add_slab(&mut self, slab: u32, slot_count: u32) {
        let slab = slab as usize;
        if self.slabs.len() <= slab {
            self.slabs.reserve_exact(slab + 1 - self.slabs.len());
            self.slabs.resize_with(slab + 1, || None);
        }
        let empty = Link { older: NONE, newer: NONE };
        self.slabs[slab] = Some(vec![empty; slot_count as usize].into_boxed_slice());
    }

    fn drop_slab(&mut self, slab: u32) {
        self.slabs[slab as usize] = None;
    }

    fn insert(&mut self, slot: u32, _hash: u64) {
        self.push_newest(slot);
    }

    fn touch(&mut self, slot: u32) {
        if self.newest != slot {
            self.unlink(slot);
            self.push_newest(slot);
        }
    }

    fn remove(&mut self, slot: u32, _hash: u64) {
        self.unlink(slot);
    }

    fn victim(&mut self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    fn dump(&self) -> Vec<u32> {
        let mut slots = Vec::new();
        let mut slot = self.oldest;
        while slot != NONE {
            slots.push(slot);
            let links = self.slabs[(slot >> SLOT_BITS) as usize].as_ref();
            slot =
                links.map_or(NONE, |links| links[(slot & ((1 << SLOT_BITS) - 1)) as usize].newer);
        }
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> Lru {
        let mut lru = Lru::default();
        lru.add_slab(0, 4);
        lru.add_slab(2, 4);
        for slot in [0, 1, 2 << SLOT_BITS, 3] {
            lru.insert(slot, 0);
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
        lru.remove(1, 0);
        assert_eq!(lru.dump(), [0, 8192, 3]);
        lru.remove(0, 0);
        lru.remove(3, 0);
        assert_eq!(lru.dump(), [8192]);
        lru.remove(8192, 0);
        assert_eq!((lru.dump(), lru.victim()), (vec![], None));
        lru.insert(2, 0);
        assert_eq!(lru.dump(), [2]);
    }
}
