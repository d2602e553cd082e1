//! Eviction candidates by score: a sweep over all slots finds the next so many at once.
//!
//! Scores lie one after the other, two bytes each, so a sweep is a plain loop that looks at many
//! of them together; what it finds waits in a short queue. What was used meanwhile is passed over
//! when its turn comes. Of the highest rank that is looked for there may be more slots than are
//! wanted: those are taken from the hand on, which stays where the last of them was, so that of
//! scores alike the slots leave in turn, about in the order of their coming.
//!
//! ```text
//! scores   5 9 3 7 | 2 8 3 9 | 3 3 ...      four wanted: all below 3, and of 3 from the hand on
//!                    hand                   2 3 3 3
//! ```

#![expect(clippy::indexing_slicing, reason = "the hand is cut to the block's length")]

use super::slots::SlotMap;
use super::SLOT_BITS;

/// One of so many slots is found by a sweep.
const SLOTS_PER_VICTIM: usize = 128;
/// Scores that are looked at together.
const LANES: usize = 32;
/// Scores of a part of these, which one comparison of the processor covers.
const PART_LANES: usize = 8;
/// Bits of a slot number, of an entry's turn, and of what it is ordered by.
const SLOT_MASK: u64 = (1 << 24) - 1;
const TURN_AT: u32 = 24;
const ORDER_AT: u32 = 48;

/// Who may leave: a test of scores that a loop can make of many at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct LowScores {
    /// Taken off a score, which is then ordered.
    pub(super) unit: u16,
    /// The highest that may leave.
    pub(super) highest: u16,
    /// Bits that are clear in a score that may leave.
    pub(super) clear: u16,
}

impl LowScores {
    /// Tells whether the row of a slot of this score may leave; no score: it has none.
    #[inline]
    fn has(self, score: u16) -> bool {
        (score != 0) & (score & self.clear == 0) & (score.wrapping_sub(self.unit) <= self.highest)
    }

    /// Tells whether any may leave; a sum, not a search: compilers look at many scores together.
    #[inline]
    fn has_any(self, scores: &[u16]) -> bool {
        scores.iter().map(|&score| u16::from(self.has(score))).sum::<u16>() != 0
    }
}

/// The next slots to leave.
#[derive(Debug, Clone, Default)]
pub(super) struct Victims {
    /// Slots, and above them what they are ordered by; the last leaves first.
    queue: Vec<u64>,
    /// The next sweep begins at this slot.
    hand: u32,
    /// Most slots a sweep finds.
    batch: usize,
}

impl Victims {
    /// Bytes for a pool of `slot_count` slots.
    pub(super) fn bytes_for(slot_count: usize) -> usize {
        slot_count.div_ceil(SLOTS_PER_VICTIM) * size_of::<u64>()
    }

    /// Makes room for a pool of `slot_count` slots, and clears the queue of victims.
    pub(super) fn resize(&mut self, slot_count: usize) {
        self.batch = slot_count.div_ceil(SLOTS_PER_VICTIM);
        self.queue = Vec::with_capacity(self.batch);
    }

    /// Clears the queue of victims.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    /// Returns how many slots a sweep should find.
    pub(super) fn batch(&self) -> usize {
        self.batch
    }

    /// Returns the next slot that was found and may still leave.
    #[inline]
    pub(super) fn next(&mut self, scores: &SlotMap<u16>, low: LowScores) -> Option<u32> {
        while let Some(&found) = self.queue.last() {
            let slot = (found & SLOT_MASK) as u32;
            if low.has(scores.get(slot)) {
                return Some(slot);
            }
            self.queue.pop();
        }
        None
    }

    /// Notes that the row of `slot` left.
    #[inline]
    pub(super) fn forget(&mut self, slot: u32) {
        if self.queue.last().is_some_and(|&found| found & SLOT_MASK == u64::from(slot)) {
            self.queue.pop();
        }
    }

    /// Finds the slots whose rows may be evicted. `surely` of them, fewer than a batch, are below
    /// `sure`; of the others the first from the hand on fill the batch.
    pub(super) fn sweep(
        &mut self,
        scores: &SlotMap<u16>,
        low: LowScores,
        sure: Option<u16>,
        surely: usize,
    ) {
        self.queue.clear();
        let mut sweep = Sweep { low, sure, others: self.batch.saturating_sub(surely), ended: None };
        let hand_slab = self.hand >> SLOT_BITS << SLOT_BITS;
        let hand_at = (self.hand - hand_slab) as usize;
        // The slab of the hand comes first from there on, and last up to there.
        let from_hand = scores.blocks().filter(|(first, _)| *first >= hand_slab);
        let to_hand = scores.blocks().filter(|(first, _)| *first <= hand_slab);
        for (first, block) in from_hand {
            let start = if first == hand_slab { hand_at.min(block.len()) } else { 0 };
            let part = &block[start..];
            sweep.collect(first + start as u32, part, &mut self.queue);
        }
        for (first, block) in to_hand {
            let end = if first == hand_slab { hand_at.min(block.len()) } else { block.len() };
            let part = &block[..end];
            sweep.collect(first, part, &mut self.queue);
        }
        self.hand = sweep.ended.unwrap_or(self.hand);
        self.queue.sort_unstable_by(|a, b| b.cmp(a));
    }
}

/// A sweep under way.
struct Sweep {
    low: LowScores,
    /// The highest score that is found wherever it is, if any is.
    sure: Option<u16>,
    /// Other slots that are still wanted.
    others: usize,
    /// Where the last of them was found.
    ended: Option<u32>,
}

impl Sweep {
    /// Adds the slots of a block whose rows may leave, the first of which is `first`.
    fn collect(&mut self, first: u32, block: &[u16], queue: &mut Vec<u64>) {
        for (at, chunk) in block.chunks(LANES).enumerate() {
            if self.ended.is_some() && self.sure.is_none() {
                return;
            }
            if !self.low.has_any(chunk) {
                continue;
            }
            let first = first + (at * LANES) as u32;
            // Mostly it is one slot: the others of its part are looked at one by one, not all.
            for (at, part) in chunk.chunks(PART_LANES).enumerate() {
                if self.low.has_any(part) {
                    self.collect_part(first + (at * PART_LANES) as u32, part, queue);
                }
            }
        }
    }

    /// Adds what may leave of a few slots, the first of which is `first`.
    fn collect_part(&mut self, first: u32, part: &[u16], queue: &mut Vec<u64>) {
        for (slot, &score) in (first..).zip(part) {
            if self.low.has(score) {
                self.found(slot, score, queue);
            }
        }
    }

    fn found(&mut self, slot: u32, score: u16, queue: &mut Vec<u64>) {
        let order = score.wrapping_sub(self.low.unit);
        if self.sure.is_none_or(|sure| order > sure) {
            if self.others == 0 {
                return;
            }
            self.others -= 1;
            if self.others == 0 {
                self.ended = Some(slot + 1);
                self.low.highest = self.sure.unwrap_or(0);
            }
        }
        let turn = queue.len() as u64;
        queue.push((u64::from(order) << ORDER_AT) | (turn << TURN_AT) | u64::from(slot));
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    const SLOTS: u32 = 300;

    fn scores(rng: &mut SplitMix64, below: u64) -> SlotMap<u16> {
        let mut scores = SlotMap::default();
        for slab in [0, 2, 3] {
            scores.add_slab(slab, SLOTS / 3);
            let first = slab << SLOT_BITS;
            (first..first + SLOTS / 3).for_each(|slot| scores.set(slot, rng.below(below) as u16));
        }
        scores
    }

    fn low(highest: u16) -> LowScores {
        LowScores { unit: 0, highest, clear: 0 }
    }

    /// Takes out what a sweep found.
    fn taken(victims: &mut Victims, scores: &mut SlotMap<u16>, low: LowScores) -> Vec<u32> {
        let next = std::iter::from_fn(|| {
            let slot = victims.next(scores, low)?;
            scores.set(slot, 0);
            victims.forget(slot);
            Some(slot)
        });
        next.collect()
    }

    /// The oracle looks at every score: all up to the sure one, the rest from the hand on.
    #[test]
    fn finds_what_is_surely_low_and_fills_up_from_the_hand() {
        let mut rng = SplitMix64::new(3);
        let mut victims = Victims::default();
        victims.resize(SLOTS_PER_VICTIM * 40);
        for round in 0..200 {
            let mut scores = scores(&mut rng, 300);
            let slots: Vec<(u32, u16)> = scores
                .blocks()
                .flat_map(|(first, block)| (first..).zip(block.iter().copied()))
                .filter(|(_, score)| (1..=60).contains(score))
                .collect();
            let sure = (round % 4 > 0).then_some(20);
            let is_sure = |score: u16| sure.is_some_and(|sure| score <= sure);
            let surely = slots.iter().filter(|(_, score)| is_sure(*score)).count();
            let hand = victims.hand;
            victims.sweep(&scores, low(60), sure, surely);
            let (sure, others): (Vec<_>, Vec<_>) =
                slots.into_iter().partition(|(_, score)| is_sure(*score));
            let (behind, before): (Vec<_>, Vec<_>) =
                others.into_iter().partition(|(slot, _)| *slot >= hand);
            let others = behind.into_iter().chain(before).take(40 - surely);
            let mut expected: Vec<u32> = sure.into_iter().chain(others).map(|at| at.0).collect();
            let held = scores.clone();
            let mut found = taken(&mut victims, &mut scores, low(60));
            assert!(found.is_sorted_by_key(|&slot| held.get(slot)), "round {round}");
            expected.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, expected, "round {round}");
        }
    }

    #[test]
    fn equal_scores_leave_in_turn_and_used_ones_stay() {
        let mut scores = SlotMap::default();
        scores.add_slab(0, 256);
        (0..256).for_each(|slot| scores.set(slot, 7));
        let mut victims = Victims::default();
        victims.resize(4 * SLOTS_PER_VICTIM);
        let mut left = Vec::new();
        for round in 0..128 {
            victims.sweep(&scores, low(7), None, 0);
            // The second of four is used once more.
            scores.set(round * 4 % 256 + 1, 9);
            let found = taken(&mut victims, &mut scores, low(7));
            found.iter().for_each(|&slot| scores.set(slot, 7));
            left.extend(found);
            scores.set(round * 4 % 256 + 1, 7);
        }
        let expected: Vec<u32> = (0..512).map(|at| at % 256).filter(|at| at % 4 != 1).collect();
        assert_eq!(left, expected);
    }

    #[test]
    fn bytes_are_those_it_says() {
        for slot_count in [0, 1, 64, 65, 4096, 100_000] {
            let mut victims = Victims::default();
            victims.resize(slot_count);
            let bytes = victims.queue.capacity() * size_of::<u64>();
            assert_eq!(bytes, Victims::bytes_for(slot_count));
        }
    }
}
