//! Adaptive replacement (ARC): rows used once and rows used more often share the slots, and ghosts
//! of both say which of the two lists should have been longer.
//!
//! Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003).

use tierbed_cache::keeps_slots;
use tierbed_cache::policy::balance::{Balance, Incoming, FREQUENT, RECENT};
use tierbed_cache::policy::list::List;
use tierbed_cache::policy::slots::Slots;
use tierbed_cache::policy::{order_of_leaving, Arrival, EvictionPolicy};

/// The lists `T1` (used once) and `T2` with the ghosts `B1` and `B2` of the paper.
#[derive(Debug, Clone, Default)]
pub struct Arc {
    /// Whether the row is in the list of rows used more than once.
    slots: Slots<bool>,
    once: List,
    often: List,
    balance: Balance,
}

impl Arc {
    fn is_once_full(&self) -> bool {
        self.balance.incoming == Incoming::New && self.once.len() >= self.slots.count()
    }
}

impl EvictionPolicy for Arc {
    fn name(&self) -> &'static str {
        "arc"
    }

    keeps_slots!(bool, Balance::BYTES);

    fn slots_changed(&mut self) {
        self.balance.resize(self.slots.count());
    }

    fn arrive(&mut self, hash: u64, score: u16, _is_full: bool) -> Arrival {
        self.balance.identify(hash);
        self.balance.adapt(self.slots.count());
        Arrival::admitted(score)
    }

    fn touch(&mut self, slot: u32) {
        if self.slots.state(slot) {
            self.often.refresh(&mut self.slots.links, slot);
        } else {
            self.once.remove(&mut self.slots.links, slot);
            self.often.push_newest(&mut self.slots.links, slot);
            self.slots.set_state(slot, true);
        }
    }

    fn insert(&mut self, slot: u32, hash: u64, _score: u16) {
        let was_ghost = self.balance.welcome(hash);
        self.slots.set_state(slot, was_ghost);
        let list = if was_ghost { &mut self.often } else { &mut self.once };
        list.push_newest(&mut self.slots.links, slot);
    }

    fn victim(&mut self) -> Option<u32> {
        let (len, target) = (self.once.len(), self.balance.target as usize);
        let is_level = self.balance.incoming == Incoming::Frequent && len == target;
        let from_once = len > target || is_level || self.is_once_full();
        let first = if from_once { self.once.oldest() } else { self.often.oldest() };
        first.or(self.once.oldest()).or(self.often.oldest())
    }

    fn evict(&mut self, slot: u32, hash: u64) -> u16 {
        let slot_count = self.slots.count();
        let balance = &mut self.balance;
        let ghosts_fit = self.once.len() < slot_count;
        if balance.incoming == Incoming::New {
            let (recent, frequent) = balance.lens();
            if self.once.len() + recent >= slot_count {
                balance.ghosts.pop_oldest(RECENT);
            } else if self.once.len() + self.often.len() + recent + frequent >= 2 * slot_count {
                balance.ghosts.pop_oldest(FREQUENT);
            }
        }
        let is_often = self.slots.state(slot);
        if is_often || ghosts_fit {
            balance.bury(hash, is_often);
        }
        self.remove(slot)
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let list = if self.slots.state(slot) { &mut self.often } else { &mut self.once };
        list.remove(&mut self.slots.links, slot);
        0
    }

    fn dump(&self) -> Vec<u32> {
        order_of_leaving(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::mix64;

    use super::*;

    /// Asks for a row by number; its slot is found by the test.
    fn ask(arc: &mut Arc, rows: &mut [Option<u64>], row: u64) {
        if let Some(slot) = rows.iter().position(|&held| held == Some(row)) {
            arc.touch(slot as u32);
            return;
        }
        arc.arrive(mix64(row), 0, true);
        let empty = rows.iter().position(Option::is_none);
        let slot = empty.unwrap_or_else(|| {
            let slot = arc.victim().unwrap() as usize;
            arc.evict(slot as u32, mix64(rows[slot].unwrap()));
            slot
        });
        arc.insert(slot as u32, mix64(row), 0);
        rows[slot] = Some(row);
    }

    #[test]
    fn a_ghost_of_rows_used_once_makes_that_list_longer() {
        let (mut arc, mut rows) = (Arc::default(), vec![None; 4]);
        arc.add_slab(0, 4);
        for row in [0, 1, 0, 2, 3, 4] {
            ask(&mut arc, &mut rows, row);
        }
        // Row 1 left; 0 is in the list of rows used often.
        let held = |list: &List, arc: &Arc, rows: &[Option<u64>]| -> Vec<u64> {
            list.iter(&arc.slots.links).map(|slot| rows[slot as usize].unwrap()).collect()
        };
        assert_eq!(held(&arc.once, &arc, &rows), [2, 3, 4]);
        assert_eq!(held(&arc.often, &arc, &rows), [0]);
        assert_eq!((arc.balance.lens(), arc.balance.target), ((1, 0), 0.0));
        ask(&mut arc, &mut rows, 1);
        assert_eq!(arc.balance.target, 1.0);
        assert_eq!(held(&arc.once, &arc, &rows), [3, 4]);
        assert_eq!(held(&arc.often, &arc, &rows), [0, 1]);
        assert_eq!(arc.balance.ghosts.list_of(mix64(2)), Some(RECENT));
    }
}
