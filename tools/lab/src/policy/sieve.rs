//! SIEVE: a hand over rows in the order of their arrival, which never move.
//!
//! The hand goes from the oldest to the newest and around. It passes rows asked for since it
//! last came by, and evicts the first other one; it stays where it was, so that new rows are
//! soon under it.
//!
//! Source: Zhang et al., "SIEVE is Simpler than LRU" (NSDI 2024).

use tierbed_cache::keeps_slots;
use tierbed_cache::policy::list::List;
use tierbed_cache::policy::slots::Slots;
use tierbed_cache::policy::{order_of_leaving, EvictionPolicy};

/// The rows by arrival, and the hand.
#[derive(Debug, Clone, Default)]
pub struct Sieve {
    /// Whether the row was asked for since the hand passed.
    slots: Slots<bool>,
    arrived: List,
    hand: Option<u32>,
}

impl EvictionPolicy for Sieve {
    fn name(&self) -> &'static str {
        "sieve"
    }

    keeps_slots!(bool, 0);

    fn touch(&mut self, slot: u32) {
        self.slots.set_state(slot, true);
    }

    fn insert(&mut self, slot: u32, _hash: u64, _score: u16) {
        self.slots.set_state(slot, false);
        self.arrived.push_newest(&mut self.slots.links, slot);
    }

    fn victim(&mut self) -> Option<u32> {
        loop {
            let slot = self.hand.or(self.arrived.oldest())?;
            if !self.slots.state(slot) {
                self.hand = Some(slot);
                return Some(slot);
            }
            self.slots.set_state(slot, false);
            self.hand = List::newer(&self.slots.links, slot);
        }
    }

    fn remove(&mut self, slot: u32) -> u16 {
        if self.hand == Some(slot) {
            self.hand = List::newer(&self.slots.links, slot);
        }
        self.arrived.remove(&mut self.slots.links, slot);
        0
    }

    fn dump(&self) -> Vec<u32> {
        order_of_leaving(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hand_stays_and_rows_do_not_move() {
        let mut sieve = Sieve::default();
        sieve.add_slab(0, 5);
        (0..4).for_each(|slot| sieve.insert(slot, 0, 0));
        sieve.touch(0);
        assert_eq!(sieve.victim(), Some(1));
        sieve.evict(1, 0);
        sieve.insert(4, 0, 0);
        assert_eq!(sieve.arrived.iter(&sieve.slots.links).collect::<Vec<_>>(), [0, 2, 3, 4]);
        // Row 0 is older than the hand: it waits for the next round.
        assert_eq!(sieve.dump(), [2, 3, 4, 0]);
    }
}
