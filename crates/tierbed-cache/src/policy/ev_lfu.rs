//! Rows by the hits of their best group; when most rows are of the best kind, part of them
//! leaves at once.
//!
//! A hit raises a row's score to the hits of its group, a miss enters with the hits of its
//! group. The row longest in the lowest score leaves. Rows whose score is that of the largest
//! group cannot rise: after a perfect hit has found too many of them, the oldest are flushed.
//!
//! Source: EVStore §4.3.1; the order within a score and the figures of the flush follow the
//! released code, the 20 % of the text are [`FlushRule::PAPER`].
//! Differs: the largest group seen stands for the fixed 26 rows of the paper; scores end at
//! 1,023.

use crate::keeps_slots;

use super::buckets::{Buckets, RANKS};
use super::slots::Slots;
use super::{order_of_leaving, Arrival, EvictionPolicy, Group};

/// When rows of the highest score are flushed, and how many, in percent of all slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushRule {
    /// Flush when rows of the highest score take this share of the slots.
    pub at_percent: u8,
    /// Rows flushed.
    pub drop_percent: u8,
}

impl FlushRule {
    /// What EVStore's released code does.
    pub const RELEASED: Self = Self { at_percent: 95, drop_percent: 30 };
    /// The example in the paper's text, with a tenth flushed.
    pub const PAPER: Self = Self { at_percent: 20, drop_percent: 10 };
    /// What the released EV-ARC does.
    pub const RELEASED_ARC: Self = Self { at_percent: 95, drop_percent: 10 };

    /// Returns how many of `highest` rows are to be flushed out of `slot_count` slots, when
    /// `known` of them were counted after the last perfect hit.
    pub(super) fn flushed(self, known: usize, highest: usize, slot_count: usize) -> usize {
        if known == 0 || known * 100 < slot_count * usize::from(self.at_percent) {
            return 0;
        }
        (slot_count * usize::from(self.drop_percent) / 100 + 1).min(highest)
    }
}

/// Slots by the score of their best group.
#[derive(Debug, Clone)]
pub struct EvLfu {
    /// Hits of the best group.
    slots: Slots<u16>,
    scores: Buckets,
    rule: FlushRule,
    /// The largest group seen.
    highest: u16,
    /// Rows of the highest score after the last perfect hit.
    known: usize,
    /// Rows still to be flushed.
    flushing: usize,
    group: (u32, u32),
}

impl EvLfu {
    /// Builds the policy with a rule of flushing.
    #[must_use]
    pub fn new(rule: FlushRule) -> Self {
        Self {
            slots: Slots::default(),
            scores: Buckets::default(),
            rule,
            highest: 0,
            known: 0,
            flushing: 0,
            group: (0, 0),
        }
    }

    fn score(&self) -> u16 {
        self.group.1.min(RANKS as u32 - 1) as u16
    }
}

/// Returns the name of the policy with this rule.
pub(super) fn ev_lfu_name(rule: FlushRule) -> &'static str {
    if rule == FlushRule::PAPER {
        "ev_lfu_20"
    } else {
        "ev_lfu"
    }
}

impl EvictionPolicy for EvLfu {
    fn name(&self) -> &'static str {
        ev_lfu_name(self.rule)
    }

    keeps_slots!(u16, 0);

    fn bytes_fixed(&self, _slot_count: usize) -> usize {
        Buckets::BYTES
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        self.group = (group.row_count, group.hit_count);
        let row_count = group.row_count.min(RANKS as u32 - 1) as u16;
        self.highest = self.highest.max(row_count);
    }

    fn end_group(&mut self) {
        if self.group.0 == self.group.1 {
            self.known = self.scores.list(self.highest).len();
        }
    }

    fn touch(&mut self, slot: u32) {
        let (old, new) = (self.slots.state(slot), self.score());
        if new > old {
            self.scores.remove(&mut self.slots.links, slot, old);
            self.scores.push(&mut self.slots.links, slot, new);
            self.slots.set_state(slot, new);
        }
    }

    fn arrive(&mut self, _hash: u64, score: u16, _is_full: bool) -> Arrival {
        let highest = self.scores.list(self.highest).len();
        self.flushing = self.rule.flushed(self.known, highest, self.slots.count());
        if self.flushing > 0 {
            self.known = highest - self.flushing;
        }
        Arrival { flushed: self.flushing as u32, ..Arrival::admitted(score) }
    }

    fn insert(&mut self, slot: u32, _hash: u64, _score: u16) {
        let score = self.score();
        self.slots.set_state(slot, score);
        self.scores.push(&mut self.slots.links, slot, score);
    }

    fn victim(&mut self) -> Option<u32> {
        if self.flushing > 0 {
            return self.scores.list(self.highest).oldest();
        }
        self.scores.oldest_lowest()
    }

    fn evict(&mut self, slot: u32, _hash: u64) -> u16 {
        self.flushing = self.flushing.saturating_sub(1);
        self.remove(slot)
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let score = self.slots.state(slot);
        self.scores.remove(&mut self.slots.links, slot, score);
        0
    }

    fn dump(&self) -> Vec<u32> {
        order_of_leaving(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(policy: &mut EvLfu, row_count: u32, hit_count: u32) {
        policy.begin_group(&Group { hashes: &[], row_count, hit_count });
    }

    #[test]
    fn scores_only_rise_and_equal_scores_leave_in_the_order_of_reaching_them() {
        let mut policy = EvLfu::new(FlushRule::RELEASED);
        policy.add_slab(0, 6);
        begin(&mut policy, 3, 0);
        (0..4).for_each(|slot| policy.insert(slot, 0, 0));
        begin(&mut policy, 3, 2);
        policy.touch(0);
        policy.touch(1);
        policy.insert(4, 0, 0);
        begin(&mut policy, 3, 1);
        policy.touch(1);
        policy.touch(3);
        assert_eq!(policy.dump(), [2, 3, 0, 1, 4]);
        assert_eq!(policy.slots.state(1), 2);
    }

    #[test]
    fn too_many_perfect_rows_are_flushed_oldest_first() {
        let mut policy = EvLfu::new(FlushRule { at_percent: 50, drop_percent: 25 });
        policy.add_slab(0, 8);
        begin(&mut policy, 2, 0);
        (0..8).for_each(|slot| policy.insert(slot, 0, 0));
        begin(&mut policy, 2, 2);
        (0..4).rev().for_each(|slot| policy.touch(slot));
        // Known only after the group: the perfect hit has to be over.
        assert_eq!(policy.arrive(0, 0, true).flushed, 0);
        policy.end_group();
        begin(&mut policy, 2, 0);
        assert_eq!(policy.arrive(0, 0, true).flushed, 3);
        assert_eq!(policy.dump(), [3, 2, 1, 4, 5, 6, 7, 0]);
        for _ in 0..3 {
            let slot = policy.victim().unwrap();
            policy.evict(slot, 0);
        }
        assert_eq!((policy.dump(), policy.known), (vec![4, 5, 6, 7, 0], 1));
    }
}
