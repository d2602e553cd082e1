//! Counts of slots per rank, without knowing which slots.
#![expect(clippy::indexing_slicing, reason = "places of ranks are within the ring")]

use super::rank_ring::{RankRing, RANKS};

/// Slots per rank.
#[derive(Debug, Clone)]
pub(crate) struct RankCounts {
    /// By the places of the ranks.
    counts: Box<[u32; RANKS]>,
    ring: RankRing,
    /// Slots of all ranks.
    len: usize,
}

impl Default for RankCounts {
    fn default() -> Self {
        Self { counts: Box::new([0; RANKS]), ring: RankRing::default(), len: 0 }
    }
}

impl RankCounts {
    /// Bytes whatever the slots.
    pub(crate) const BYTES: usize = RANKS * size_of::<u32>() + RANKS / 8;

    /// Counts a slot of `rank`.
    #[inline]
    pub(crate) fn add(&mut self, rank: u16) {
        let place = self.ring.place(rank);
        self.counts[place] += 1;
        self.len += 1;
        self.ring.set_filled(place, true);
    }

    /// Counts a slot of `rank` no longer.
    #[inline]
    pub(crate) fn remove(&mut self, rank: u16) {
        let place = self.ring.place(rank);
        self.counts[place] -= 1;
        self.len -= 1;
        if self.counts[place] == 0 {
            self.ring.set_filled(place, false);
        }
    }

    /// Lowers every rank by `by`; what would fall below 0 stays there.
    pub(crate) fn fall(&mut self, by: usize) {
        let mut lowest = 0;
        for rank in 0..=by.min(RANKS - 1) {
            let place = self.ring.place(rank as u16);
            lowest += std::mem::take(&mut self.counts[place]);
            self.ring.set_filled(place, false);
        }
        self.ring.fall(by);
        let place = self.ring.place(0);
        self.counts[place] = lowest;
        self.ring.set_filled(place, lowest > 0);
    }

    /// Tells whether no slot is counted, without a search for the lowest.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the lowest rank that has a slot.
    #[inline]
    pub(crate) fn lowest(&self) -> Option<u16> {
        self.ring.lowest()
    }

    /// Returns the lowest rank such that `wanted` slots have it or a lower one, the highest rank
    /// where fewer slots are counted; and how many have a lower one.
    pub(crate) fn rank_of_lowest(&self, wanted: usize) -> (u16, usize) {
        let mut below = 0;
        for rank in self.lowest().unwrap_or(0)..RANKS as u16 - 1 {
            let here = self.counts[self.ring.place(rank)] as usize;
            if below + here >= wanted {
                return (rank, below);
            }
            below += here;
        }
        (RANKS as u16 - 1, below)
    }

    /// Returns the mean rank; 0 without slots.
    pub(crate) fn mean(&self) -> f32 {
        let (mut sum, mut len) = (0, 0);
        for rank in 0..RANKS as u16 {
            let here = u64::from(self.counts[self.ring.place(rank)]);
            sum += u64::from(rank) * here;
            len += here;
        }
        sum as f32 / len.max(1) as f32
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    /// The oracle is a sorted list of ranks.
    #[test]
    fn counts_like_a_sorted_list() {
        let mut counts = RankCounts::default();
        let mut ranks: Vec<u16> = Vec::new();
        let mut rng = SplitMix64::new(9);
        for _ in 0..5000 {
            if ranks.len() > 80 || (!ranks.is_empty() && rng.below(3) == 0) {
                let rank = ranks.swap_remove(rng.below(ranks.len() as u64) as usize);
                counts.remove(rank);
            } else {
                let rank = rng.below(RANKS as u64) as u16;
                counts.add(rank);
                ranks.push(rank);
            }
            if rng.below(20) == 0 {
                let by = rng.below(200) as u16;
                ranks.iter_mut().for_each(|rank| *rank = rank.saturating_sub(by));
                counts.fall(usize::from(by));
            }
            ranks.sort_unstable();
            assert_eq!(counts.is_empty(), ranks.is_empty());
            assert_eq!(counts.lowest(), ranks.first().copied());
            let wanted = 1 + rng.below(90) as usize;
            let expected = ranks.get(wanted - 1).copied().unwrap_or(RANKS as u16 - 1);
            let below = ranks.iter().filter(|&&rank| rank < expected).count();
            assert_eq!(counts.rank_of_lowest(wanted), (expected, below));
            let sum: f32 = ranks.iter().map(|&rank| f32::from(rank)).sum();
            assert!((counts.mean() - sum / ranks.len().max(1) as f32).abs() < 0.01);
        }
    }
}
