//! Which slot has the lowest rank? A list of slots per rank, and a bit per list that is not
//! empty.
#![expect(clippy::indexing_slicing, reason = "ranks are reduced to the number of lists")]

use super::list::{Links, List};

/// Ranks there are: `0..RANKS`; what is higher counts as the highest.
pub(crate) const RANKS: usize = 1024;

/// Slots by rank, within a rank in the order of their coming.
#[derive(Debug, Clone)]
pub(crate) struct Buckets {
    /// A ring; the list of rank 0 is the `base`-th.
    lists: Box<[List]>,
    base: usize,
    filled: [u64; RANKS / 64],
}

impl Default for Buckets {
    fn default() -> Self {
        let lists = vec![List::default(); RANKS].into_boxed_slice();
        Self { lists, base: 0, filled: [0; RANKS / 64] }
    }
}

impl Buckets {
    /// Bytes whatever the slots.
    pub(crate) const BYTES: usize = RANKS * size_of::<List>() + RANKS / 8;

    /// Returns the slots of `rank`.
    pub(crate) fn list(&self, rank: u16) -> &List {
        &self.lists[self.at(rank)]
    }

    /// Adds `slot` as the newest of `rank`.
    pub(crate) fn push(&mut self, links: &mut Links, slot: u32, rank: u16) {
        let at = self.at(rank);
        self.lists[at].push_newest(links, slot);
        self.filled[at / 64] |= 1 << (at % 64);
    }

    /// Takes `slot` of `rank` out.
    pub(crate) fn remove(&mut self, links: &mut Links, slot: u32, rank: u16) {
        let at = self.at(rank);
        self.lists[at].remove(links, slot);
        if self.lists[at].is_empty() {
            self.filled[at / 64] &= !(1 << (at % 64));
        }
    }

    /// Lowers every rank by `by`; what would fall below 0 stays there, the lower ones first.
    pub(crate) fn fall(&mut self, links: &mut Links, by: usize) {
        let mut lowest = List::default();
        for rank in 0..=by.min(RANKS - 1) {
            let at = (self.base + rank) % RANKS;
            lowest.append(links, std::mem::take(&mut self.lists[at]));
            self.filled[at / 64] &= !(1 << (at % 64));
        }
        self.base = (self.base + by) % RANKS;
        if !lowest.is_empty() {
            self.filled[self.base / 64] |= 1 << (self.base % 64);
        }
        self.lists[self.base] = lowest;
    }

    /// Returns the lowest rank that has a slot.
    pub(crate) fn lowest(&self) -> Option<u16> {
        let (first, bit) = (self.base / 64, self.base % 64);
        let words = RANKS / 64;
        // From rank 0 to the end of its word, the other words, and that word's beginning.
        let of_word = |step: usize| {
            let word = self.filled[(first + step) % words];
            match step {
                0 => word >> bit << bit,
                step if step == words => word & !(u64::MAX << bit),
                _ => word,
            }
        };
        let step = (0..=words).find(|&step| of_word(step) != 0)?;
        let at = (first + step) % words * 64 + of_word(step).trailing_zeros() as usize;
        Some(((at + RANKS - self.base) % RANKS) as u16)
    }

    /// Returns the mean rank; 0 without slots.
    pub(crate) fn mean(&self) -> f32 {
        let (mut sum, mut len) = (0, 0);
        for rank in 0..RANKS {
            let here = self.list(rank as u16).len();
            sum += rank * here;
            len += here;
        }
        sum as f32 / len.max(1) as f32
    }

    /// Returns the oldest slot of the lowest rank.
    pub(crate) fn oldest_lowest(&self) -> Option<u32> {
        self.list(self.lowest()?).oldest()
    }

    /// Lists the slots from the lowest rank on, within a rank the oldest first.
    pub(crate) fn iter<'a>(&'a self, links: &'a Links) -> impl Iterator<Item = u32> + 'a {
        (0..RANKS as u16).flat_map(move |rank| self.list(rank).iter(links))
    }

    fn at(&self, rank: u16) -> usize {
        (self.base + usize::from(rank).min(RANKS - 1)) % RANKS
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    /// The oracle is a rank per slot, in the order of coming.
    #[test]
    fn falls_and_finds_the_lowest_like_a_sorted_list() {
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
            if rng.below(20) == 0 {
                let by = rng.below(200) as usize;
                ranks.sort_by_key(|entry| entry.0);
                ranks.iter_mut().for_each(|entry| entry.0 = entry.0.saturating_sub(by as u16));
                buckets.fall(&mut links, by);
            }
            let mut sorted = ranks.clone();
            sorted.sort_by_key(|entry| entry.0);
            assert_eq!(buckets.lowest(), sorted.first().map(|entry| entry.0));
            let slots: Vec<u32> = buckets.iter(&links).collect();
            assert_eq!(slots, sorted.iter().map(|entry| entry.1).collect::<Vec<_>>());
        }
    }
}
