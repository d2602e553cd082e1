//! Slots bucketed by rank: a list of slots per rank, and a bit per list that is not empty.
#![expect(clippy::indexing_slicing, reason = "ranks are reduced to the number of lists")]

use super::list::{Links, List};
use super::rank_ring::RankRing;
pub use super::rank_ring::RANKS;

/// Slots by rank, within a rank in the order of their coming.
#[derive(Debug, Clone)]
pub struct Buckets {
    /// By the places of their ranks.
    lists: Box<[List]>,
    ring: RankRing,
}

impl Default for Buckets {
    fn default() -> Self {
        let lists = vec![List::default(); RANKS].into_boxed_slice();
        Self { lists, ring: RankRing::default() }
    }
}

impl Buckets {
    /// Bytes whatever the slots.
    pub const BYTES: usize = RANKS * size_of::<List>() + RANKS / 8;

    /// Returns the slots of `rank`.
    pub fn list(&self, rank: u16) -> &List {
        &self.lists[self.ring.place(rank)]
    }

    /// Adds `slot` as the newest of `rank`.
    pub fn push(&mut self, links: &mut Links, slot: u32, rank: u16) {
        let place = self.ring.place(rank);
        self.lists[place].push_newest(links, slot);
        self.ring.set_filled(place, true);
    }

    /// Takes `slot` of `rank` out.
    pub fn remove(&mut self, links: &mut Links, slot: u32, rank: u16) {
        let place = self.ring.place(rank);
        self.lists[place].remove(links, slot);
        if self.lists[place].is_empty() {
            self.ring.set_filled(place, false);
        }
    }

    /// Returns the lowest rank that has a slot.
    pub fn lowest(&self) -> Option<u16> {
        self.ring.lowest()
    }

    /// Returns the oldest slot of the lowest rank.
    pub fn oldest_lowest(&self) -> Option<u32> {
        self.list(self.lowest()?).oldest()
    }

    /// Lists the slots from the lowest rank on, within a rank the oldest first.
    pub fn iter<'a>(&'a self, links: &'a Links) -> impl Iterator<Item = u32> + 'a {
        (0..RANKS as u16).flat_map(move |rank| self.list(rank).iter(links))
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    /// The oracle is a rank per slot, in the order of coming.
    #[test]
    fn finds_the_lowest_like_a_sorted_list() {
        let (mut buckets, mut links) = (Buckets::default(), Links::default());
        links.add_slab(0, 100);
        let mut ranks: Vec<(u16, u32)> = Vec::new();
        let mut rng = SplitMix64::new(9);
        for _ in 0..5000 {
            let slot = rng.below(100) as u32;
            if let Some(at) = ranks.iter().position(|entry| entry.1 == slot) {
                let (rank, _) = ranks.remove(at);
                buckets.remove(&mut links, slot, rank);
            } else {
                let rank = rng.below(RANKS as u64) as u16;
                buckets.push(&mut links, slot, rank);
                ranks.push((rank, slot));
            }
            let mut sorted = ranks.clone();
            sorted.sort_by_key(|entry| entry.0);
            assert_eq!(buckets.lowest(), sorted.first().map(|entry| entry.0));
            let slots: Vec<u32> = buckets.iter(&links).collect();
            assert_eq!(slots, sorted.iter().map(|entry| entry.1).collect::<Vec<_>>());
        }
    }
}
