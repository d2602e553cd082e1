//! S3-FIFO, three first-in-first-out queues: a small probationary one, a main one, ghosts.
//!
//! New rows enter the small queue. Those asked for twice there move on to the main queue, the
//! others leave and are remembered; a row that comes back while remembered enters the main queue
//! at once. The main queue gives a second chance per use, three at most.
//!
//! Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).

use crate::keeps_slots;

use super::ghosts::Ghosts;
use super::list::List;
use super::slots::Slots;
use super::{order_of_leaving, EvictionPolicy, Group};

/// The small queue's share of the slots, 1/10 (the paper's).
const SMALL_SHARE: usize = 10;
/// Uses counted per row.
const USES_MAX: u16 = 3;
/// Set in a slot's state while it is in the main queue.
const IN_MAIN: u16 = 1 << 7;

/// Small queue, main queue, and the ghosts of the small one.
#[derive(Debug, Clone, Default)]
pub struct S3Fifo {
    /// Uses since the row entered its queue, and [`IN_MAIN`].
    slots: Slots<u16>,
    small: List,
    main: List,
    ghosts: Ghosts,
}

impl S3Fifo {
    fn small_len_wanted(&self) -> usize {
        (self.slots.count() / SMALL_SHARE).max(1)
    }

    /// The oldest of the small queue if it leaves; otherwise it has moved to the main queue.
    fn settle_small(&mut self) -> Option<u32> {
        let slot = self.small.oldest()?;
        if self.slots.state(slot) < 2 {
            return Some(slot);
        }
        self.small.remove(&mut self.slots.links, slot);
        self.main.push_newest(&mut self.slots.links, slot);
        self.slots.set_state(slot, IN_MAIN);
        None
    }

    /// The oldest of the main queue if it leaves; otherwise it has used up a chance.
    fn settle_main(&mut self) -> Option<u32> {
        let slot = self.main.oldest()?;
        if self.slots.state(slot) == IN_MAIN {
            return Some(slot);
        }
        self.slots.set_state(slot, self.slots.state(slot) - 1);
        self.main.refresh(&mut self.slots.links, slot);
        None
    }
}

impl EvictionPolicy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3_fifo"
    }

    // As many ghosts as the main queue has slots.
    keeps_slots!(u16, (Ghosts::<()>::BYTES * (SMALL_SHARE - 1)).div_ceil(SMALL_SHARE));

    fn slots_changed(&mut self) {
        self.ghosts.resize(self.slots.count().saturating_sub(self.small_len_wanted()));
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        // Where most rows are hits, they are not asked for among ghosts.
        if 2 * group.miss_count() > group.row_count {
            self.ghosts.warm(group.hashes);
        }
    }

    fn touch(&mut self, slot: u32) {
        let state = self.slots.state(slot);
        if state & !IN_MAIN < USES_MAX {
            self.slots.set_state(slot, state + 1);
        }
    }

    fn insert(&mut self, slot: u32, hash: u64, _score: u16) {
        if self.ghosts.take(hash).is_some() {
            self.slots.set_state(slot, IN_MAIN);
            self.main.push_newest(&mut self.slots.links, slot);
        } else {
            self.slots.set_state(slot, 0);
            self.small.push_newest(&mut self.slots.links, slot);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        while !self.small.is_empty() || !self.main.is_empty() {
            let from_small = self.small.len() >= self.small_len_wanted() || self.main.is_empty();
            let settled = if from_small { self.settle_small() } else { self.settle_main() };
            if settled.is_some() {
                return settled;
            }
        }
        None
    }

    fn evict(&mut self, slot: u32, hash: u64) -> u16 {
        if self.slots.state(slot) & IN_MAIN == 0 {
            self.ghosts.push(0, hash, ());
        }
        self.remove(slot)
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let is_main = self.slots.state(slot) & IN_MAIN != 0;
        let queue = if is_main { &mut self.main } else { &mut self.small };
        queue.remove(&mut self.slots.links, slot);
        0
    }

    fn dump(&self) -> Vec<u32> {
        order_of_leaving(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(policy: &S3Fifo) -> (Vec<u32>, Vec<u32>) {
        let list = |list: &List| list.iter(&policy.slots.links).collect();
        (list(&policy.small), list(&policy.main))
    }

    #[test]
    fn rows_used_twice_on_trial_stay_and_ghosts_return_to_the_main_queue() {
        let mut policy = S3Fifo::default();
        policy.add_slab(0, 10);
        for slot in 0..10 {
            policy.insert(slot, u64::from(slot) << 32, 0);
        }
        policy.touch(0);
        policy.touch(0);
        policy.touch(1);
        // Row 0 was used twice and moves on; row 1, used once, leaves and is remembered.
        assert_eq!(policy.victim(), Some(1));
        assert_eq!(queues(&policy), ((1..10).collect(), vec![0]));
        policy.evict(1, 1 << 32);
        policy.insert(1, 1 << 32, 0);
        assert_eq!(queues(&policy), ((2..10).collect(), vec![0, 1]));
        assert_eq!(policy.dump(), [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]);
    }

    #[test]
    fn the_main_queue_gives_a_second_chance_per_use() {
        let mut policy = S3Fifo::default();
        policy.add_slab(0, 20);
        for slot in 0..4 {
            policy.insert(slot, u64::from(slot) << 32, 0);
            policy.touch(slot);
            policy.touch(slot);
        }
        policy.insert(4, 4 << 32, 0);
        while queues(&policy).1.len() < 3 {
            policy.settle_small();
        }
        policy.touch(0);
        // The small queue is below its share: the main queue gives, and row 0 has a chance.
        assert_eq!(queues(&policy), (vec![3, 4], vec![0, 1, 2]));
        policy.remove(3);
        assert_eq!(policy.victim(), Some(1));
        assert_eq!(queues(&policy), (vec![4], vec![1, 2, 0]));
    }
}
