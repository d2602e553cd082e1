//! Clock (second chance): FIFO, but a row asked for since the hand last passed stays.
//!
//! Source: Corbató, "A Paging Experiment with the Multics System" (1968).

use tierbed_cache::keeps_slots;
use tierbed_cache::policy::list::List;
use tierbed_cache::policy::slots::Slots;
use tierbed_cache::policy::{order_of_leaving, EvictionPolicy};

/// The ring of slots; its oldest is under the hand.
#[derive(Debug, Clone, Default)]
pub struct Clock {
    /// Whether the row was asked for since the hand passed.
    slots: Slots<bool>,
    ring: List,
}

impl EvictionPolicy for Clock {
    fn name(&self) -> &'static str {
        "clock"
    }

    keeps_slots!(bool, 0);

    fn touch(&mut self, slot: u32) {
        self.slots.set_state(slot, true);
    }

    fn insert(&mut self, slot: u32, _hash: u64, _score: u16) {
        self.slots.set_state(slot, false);
        self.ring.push_newest(&mut self.slots.links, slot);
    }

    fn victim(&mut self) -> Option<u32> {
        loop {
            let slot = self.ring.oldest()?;
            if !self.slots.state(slot) {
                return Some(slot);
            }
            self.slots.set_state(slot, false);
            self.ring.refresh(&mut self.slots.links, slot);
        }
    }

    fn remove(&mut self, slot: u32) -> u16 {
        self.ring.remove(&mut self.slots.links, slot);
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
    fn the_hand_passes_rows_that_were_asked_for() {
        let mut clock = Clock::default();
        clock.add_slab(0, 4);
        (0..4).for_each(|slot| clock.insert(slot, 0, 0));
        clock.touch(0);
        clock.touch(2);
        assert_eq!(clock.dump(), [1, 3, 0, 2]);
        assert_eq!(clock.victim(), Some(1));
        assert_eq!(clock.ring.iter(&clock.slots.links).collect::<Vec<_>>(), [1, 2, 3, 0]);
    }
}
