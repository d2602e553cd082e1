//! Low inter-reference recency set (LIRS): rows whose last two uses were close stay.
//!
//! A stack orders rows by last use, down to the oldest *close* row (LIR). Rows that are not close
//! (HIR) are in a short queue, from whose end rows leave; such a row that is asked for while it is
//! in the stack becomes close, and the oldest close row is not any more. Rows that left stay in
//! the stack as ghosts.
//!
//! Source: Jiang and Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement
//! Policy" (SIGMETRICS 2002).
//! Differs: at most as many ghosts as slots, ordered by their last use.

use tierbed_cache::policy::ghosts::Ghosts;
use tierbed_cache::policy::list::{Links, List, Node};
use tierbed_cache::policy::slots::{SlotMap, SlotState, Slots};
use tierbed_cache::policy::{order_of_leaving, Arrival, EvictionPolicy};

/// One slot of this many is for rows that are not close.
const QUEUE_SHARE: usize = 50;

/// What is known of a row here.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    is_close: bool,
    is_in_stack: bool,
}

impl SlotState for State {
    fn to_bits(self) -> u16 {
        u16::from(self.is_close) | (u16::from(self.is_in_stack) << 1)
    }

    fn from_bits(bits: u16) -> Self {
        Self { is_close: bits & 1 != 0, is_in_stack: bits & 2 != 0 }
    }
}

/// Stack, queue and ghosts.
#[derive(Debug, Clone, Default)]
pub struct Lirs {
    /// The links are those of the stack.
    slots: Slots<State>,
    /// Time of each row's last use, in rows asked for; wraps.
    used_at: SlotMap<u32>,
    stack: List,
    queue_links: Links,
    queue: List,
    close_count: usize,
    /// Rows that left from the stack, with the time of their last use.
    ghosts: Ghosts<u32>,
    clock: u32,
    /// Whether the row about to come in is a ghost of the stack.
    is_ghost: bool,
}

impl Lirs {
    fn close_max(&self) -> usize {
        let queue = (self.slots.count() / QUEUE_SHARE).max(2);
        self.slots.count().saturating_sub(queue).max(1)
    }

    fn mark(&mut self, slot: u32, change: impl FnOnce(&mut State)) {
        let mut state = self.slots.state(slot);
        change(&mut state);
        self.slots.set_state(slot, state);
    }

    /// Puts a row on top of the stack.
    fn stack_up(&mut self, slot: u32) {
        if self.slots.state(slot).is_in_stack {
            self.stack.refresh(&mut self.slots.links, slot);
        } else {
            self.stack.push_newest(&mut self.slots.links, slot);
        }
        self.clock = self.clock.wrapping_add(1);
        self.used_at.set(slot, self.clock);
        self.mark(slot, |state| state.is_in_stack = true);
    }

    fn unstack(&mut self, slot: u32) {
        self.stack.remove(&mut self.slots.links, slot);
        self.mark(slot, |state| state.is_in_stack = false);
    }

    /// Takes rows that are not close off the bottom, and ghosts older than the bottom.
    fn prune(&mut self) {
        while let Some(bottom) = self.stack.oldest() {
            if self.slots.state(bottom).is_close {
                let used_at = self.used_at.get(bottom);
                let is_older = |ghost: u32| used_at.wrapping_sub(ghost) < u32::MAX / 2;
                while self.ghosts.oldest(0).is_some_and(is_older) {
                    self.ghosts.pop_oldest(0);
                }
                return;
            }
            self.unstack(bottom);
        }
    }

    /// Makes a row of the stack close; the oldest close one is not when there are too many.
    fn make_close(&mut self, slot: u32) {
        self.mark(slot, |state| state.is_close = true);
        self.close_count += 1;
        self.prune();
        if self.close_count > self.close_max() {
            if let Some(bottom) = self.stack.oldest() {
                self.unstack(bottom);
                self.mark(bottom, |state| state.is_close = false);
                self.close_count -= 1;
                self.queue.push_newest(&mut self.queue_links, bottom);
            }
        }
        self.prune();
    }
}

impl EvictionPolicy for Lirs {
    fn name(&self) -> &'static str {
        "lirs"
    }

    fn bytes_per_slot(&self) -> usize {
        Slots::<State>::BYTES_PER_SLOT + size_of::<u32>() + size_of::<Node>() + Ghosts::<u32>::BYTES
    }

    fn bytes_per_slab(&self) -> usize {
        Slots::<State>::BYTES_PER_SLAB + SlotMap::<u32>::BYTES_PER_SLAB + Links::BYTES_PER_SLAB
    }

    fn add_slab(&mut self, slab: u32, slot_count: u32) {
        self.queue_links.add_slab(slab, slot_count);
        self.used_at.add_slab(slab, slot_count);
        self.slots.add_slab(slab, slot_count);
        self.ghosts.resize(self.slots.count());
    }

    fn drop_slab(&mut self, slab: u32) {
        self.queue_links.drop_slab(slab);
        self.used_at.drop_slab(slab);
        self.slots.drop_slab(slab);
        self.ghosts.resize(self.slots.count());
    }

    fn touch(&mut self, slot: u32) {
        let State { is_close, is_in_stack } = self.slots.state(slot);
        self.stack_up(slot);
        if is_close {
            self.prune();
        } else if is_in_stack {
            self.queue.remove(&mut self.queue_links, slot);
            self.make_close(slot);
        } else {
            self.queue.refresh(&mut self.queue_links, slot);
        }
    }

    fn arrive(&mut self, hash: u64, score: u16, _is_full: bool) -> Arrival {
        self.is_ghost = self.ghosts.list_of(hash).is_some();
        Arrival::admitted(score)
    }

    fn insert(&mut self, slot: u32, hash: u64, _score: u16) {
        let was_ghost = self.ghosts.take(hash).is_some() || std::mem::take(&mut self.is_ghost);
        self.slots.set_state(slot, State::default());
        self.stack_up(slot);
        let has_room = self.queue.is_empty() && self.close_count < self.close_max();
        if was_ghost || has_room {
            self.make_close(slot);
        } else {
            self.queue.push_newest(&mut self.queue_links, slot);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        self.queue.oldest().or(self.stack.oldest())
    }

    fn evict(&mut self, slot: u32, hash: u64) -> u16 {
        let State { is_close, is_in_stack } = self.slots.state(slot);
        self.remove(slot);
        if is_in_stack && !is_close {
            self.ghosts.push(0, hash, self.used_at.get(slot));
        }
        0
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let State { is_close, is_in_stack } = self.slots.state(slot);
        if is_close {
            self.close_count -= 1;
        } else {
            self.queue.remove(&mut self.queue_links, slot);
        }
        if is_in_stack {
            self.unstack(slot);
        }
        self.prune();
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
    fn a_row_that_comes_back_from_the_stack_becomes_close() {
        let mut lirs = Lirs::default();
        lirs.add_slab(0, 5);
        // Three close rows and two places in the queue.
        (0..5).for_each(|slot| lirs.insert(slot, u64::from(slot) << 40, 0));
        let list = |list: &List, links: &Links| list.iter(links).collect::<Vec<_>>();
        assert_eq!(list(&lirs.stack, &lirs.slots.links), [0, 1, 2, 3, 4]);
        assert_eq!(list(&lirs.queue, &lirs.queue_links), [3, 4]);
        lirs.touch(3);
        // Row 0, the oldest close one, went to the queue.
        assert_eq!(list(&lirs.stack, &lirs.slots.links), [1, 2, 4, 3]);
        assert_eq!(list(&lirs.queue, &lirs.queue_links), [4, 0]);
        assert_eq!(lirs.victim(), Some(4));
        lirs.evict(4, 4 << 40);
        lirs.arrive(4 << 40, 0, true);
        lirs.insert(4, 4 << 40, 0);
        assert_eq!(list(&lirs.queue, &lirs.queue_links), [0, 1]);
        assert_eq!(lirs.dump(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn ghosts_older_than_every_close_row_are_forgotten() {
        let mut lirs = Lirs::default();
        lirs.add_slab(0, 4);
        (0..4).for_each(|slot| lirs.insert(slot, u64::from(slot) << 40, 0));
        let victim = lirs.victim().unwrap();
        lirs.evict(victim, u64::from(victim) << 40);
        assert_eq!((victim, lirs.ghosts.len(0)), (2, 1));
        lirs.touch(0);
        lirs.touch(1);
        assert_eq!(lirs.ghosts.len(0), 0);
    }
}
