//! Adaptive replacement whose list of rows used often is ordered by the hits of their best
//! group, and flushed.
//!
//! Source: EVStore §4.3.2: the list of rows used more than once is that of
//! [`EvLfu`](super::EvLfu); flushed rows go to the old end of the list of rows used once.

use crate::keeps_slots;

use super::balance::{Balance, Incoming, FREQUENT, RECENT};
use super::buckets::{Buckets, RANKS};
use super::ev_lfu::FlushRule;
use super::list::List;
use super::slots::{SlotState, Slots};
use super::{order_of_leaving, Arrival, EvictionPolicy, Group};

/// Hits of a row's best group, and whether it was used more than once.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    score: u16,
    is_often: bool,
}

impl SlotState for State {
    fn to_bits(self) -> u16 {
        (self.score << 1) | u16::from(self.is_often)
    }

    fn from_bits(bits: u16) -> Self {
        Self { score: bits >> 1, is_often: bits & 1 != 0 }
    }
}

/// A list of rows used once, and rows used often by score.
#[derive(Debug, Clone)]
pub struct EvArc {
    slots: Slots<State>,
    once: List,
    often: Buckets,
    often_len: usize,
    balance: Balance,
    rule: FlushRule,
    /// The largest group seen, and rows of that score after the last perfect hit.
    highest: u16,
    known: usize,
    group: (u32, u32),
}

impl EvArc {
    /// Builds the policy with a rule of flushing.
    #[must_use]
    pub fn new(rule: FlushRule) -> Self {
        Self {
            slots: Slots::default(),
            once: List::default(),
            often: Buckets::default(),
            often_len: 0,
            balance: Balance::default(),
            rule,
            highest: 0,
            known: 0,
            group: (0, 0),
        }
    }

    fn score(&self) -> u16 {
        self.group.1.min(RANKS as u32 - 1) as u16
    }

    /// Adds a row to those used often; flushes before when most of them are of the best kind.
    fn push_often(&mut self, slot: u32, score: u16) {
        let highest = self.often.list(self.highest).len();
        let flushed = self.rule.flushed(self.known, highest, self.slots.count());
        for _ in 0..flushed {
            if let Some(oldest) = self.often.list(self.highest).oldest() {
                self.take(oldest);
                let score = self.slots.state(oldest).score;
                self.slots.set_state(oldest, State { score, is_often: false });
                self.once.push_oldest(&mut self.slots.links, oldest);
            }
        }
        if flushed > 0 {
            self.known = highest - flushed;
        }
        self.slots.set_state(slot, State { score, is_often: true });
        self.often.push(&mut self.slots.links, slot, score);
        self.often_len += 1;
    }

    /// Takes a row out of its list.
    fn take(&mut self, slot: u32) {
        let State { score, is_often } = self.slots.state(slot);
        if is_often {
            self.often.remove(&mut self.slots.links, slot, score);
            self.often_len -= 1;
        } else {
            self.once.remove(&mut self.slots.links, slot);
        }
    }
}

impl EvictionPolicy for EvArc {
    fn name(&self) -> &'static str {
        "ev_arc"
    }

    keeps_slots!(State, Balance::BYTES);

    fn bytes_fixed(&self, _slot_count: usize) -> usize {
        Buckets::BYTES
    }

    fn slots_changed(&mut self) {
        self.balance.resize(self.slots.count());
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        self.group = (group.row_count, group.hit_count);
        self.highest = self.highest.max(group.row_count.min(RANKS as u32 - 1) as u16);
    }

    fn end_group(&mut self) {
        if self.group.0 == self.group.1 {
            self.known = self.often.list(self.highest).len();
        }
    }

    fn touch(&mut self, slot: u32) {
        let State { score, is_often } = self.slots.state(slot);
        let new = score.max(self.score());
        if !is_often || new > score {
            self.take(slot);
            self.push_often(slot, new);
        }
    }

    fn arrive(&mut self, hash: u64, score: u16, _is_full: bool) -> Arrival {
        self.balance.identify(hash);
        self.balance.adapt(self.slots.count());
        Arrival::admitted(score)
    }

    fn insert(&mut self, slot: u32, hash: u64, _score: u16) {
        let score = self.score();
        if self.balance.welcome(hash) {
            self.push_often(slot, score);
        } else {
            self.slots.set_state(slot, State { score, is_often: false });
            self.once.push_newest(&mut self.slots.links, slot);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let (len, target) = (self.once.len(), self.balance.target as usize);
        let is_level = self.balance.incoming == Incoming::Frequent && len == target;
        let lowest = self.often.oldest_lowest();
        if len > target || is_level || lowest.is_none() {
            return self.once.oldest().or(lowest);
        }
        lowest
    }

    fn evict(&mut self, slot: u32, hash: u64) -> u16 {
        let is_often = self.slots.state(slot).is_often;
        self.take(slot);
        let slot_count = self.slots.count();
        let balance = &mut self.balance;
        balance.bury(hash, is_often);
        while balance.lens().0 > slot_count.saturating_sub(self.once.len()) {
            balance.ghosts.pop_oldest(RECENT);
        }
        while balance.lens().1 > slot_count.saturating_sub(self.often_len) {
            balance.ghosts.pop_oldest(FREQUENT);
        }
        0
    }

    fn remove(&mut self, slot: u32) -> u16 {
        self.take(slot);
        0
    }

    fn dump(&self) -> Vec<u32> {
        order_of_leaving(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(policy: &mut EvArc, row_count: u32, hit_count: u32) {
        policy.begin_group(&Group { hashes: &[], row_count, hit_count });
    }

    #[test]
    fn rows_used_often_leave_by_their_best_group() {
        let mut policy = EvArc::new(FlushRule::RELEASED_ARC);
        policy.add_slab(0, 4);
        begin(&mut policy, 3, 0);
        (0..4).for_each(|slot| policy.insert(slot, u64::from(slot) << 40, 0));
        for (slot, hits) in [(0, 2), (1, 1), (2, 3), (0, 1)] {
            begin(&mut policy, 3, hits);
            policy.touch(slot);
        }
        assert_eq!(policy.once.iter(&policy.slots.links).collect::<Vec<_>>(), [3]);
        assert_eq!(policy.dump(), [3, 1, 0, 2]);
        // Row 1 leaves, and comes back as a ghost of the rows used often.
        begin(&mut policy, 3, 0);
        policy.evict(3, 3 << 40);
        policy.evict(1, 1 << 40);
        policy.arrive(1 << 40, 0, false);
        policy.insert(1, 1 << 40, 0);
        assert_eq!(policy.dump(), [1, 0, 2]);
        assert_eq!(policy.often_len, 3);
    }

    #[test]
    fn flushed_rows_go_to_the_old_end_of_those_used_once() {
        let mut policy = EvArc::new(FlushRule { at_percent: 50, drop_percent: 25 });
        policy.add_slab(0, 4);
        begin(&mut policy, 1, 0);
        (0..4).for_each(|slot| policy.insert(slot, u64::from(slot) << 40, 0));
        begin(&mut policy, 1, 1);
        policy.touch(0);
        policy.touch(1);
        policy.end_group();
        begin(&mut policy, 1, 1);
        policy.touch(2);
        assert_eq!(policy.once.iter(&policy.slots.links).collect::<Vec<_>>(), [1, 0, 3]);
        assert_eq!(policy.often_len, 1);
    }
}
