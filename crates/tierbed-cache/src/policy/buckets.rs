//! Which slot has the lowest rank? A list of slots per rank, and a bit per list that is not
//! empty.
#![expect(clippy::indexing_slicing, reason = "ranks are reduced to the number of lists")]

use super::list::{Links, List};

/// Ranks there are: `0..RANKS`; what is higher counts as the highest.
pub(crate) const RANKS: usize = 1024;

/// Slots by rank, within a rank in the order of their coming.
#[derive(Debug, Clone)]
pub(crate) struct Buckets {
    lists: Box<[List]>,
    filled: [u64; RANKS / 64],
}

impl Default for Buckets {
    fn default() -> Self {
        Self { lists: vec![List::default(); RANKS].into_boxed_slice(), filled: [0; RANKS / 64] }
    }
}

impl Buckets {
    /// Bytes whatever the slots.
    pub(crate) const BYTES: usize = RANKS * size_of::<List>() + RANKS / 8;

    /// Returns the slots of `rank`.
    pub(crate) fn list(&self, rank: u16) -> &List {
        &self.lists[at(rank)]
    }

    /// Adds `slot` as the newest of `rank`.
    pub(crate) fn push(&mut self, links: &mut Links, slot: u32, rank: u16) {
        let at = at(rank);
        self.lists[at].push_newest(links, slot);
        self.filled[at / 64] |= 1 << (at % 64);
    }

    /// Takes `slot` of `rank` out.
    pub(crate) fn remove(&mut self, links: &mut Links, slot: u32, rank: u16) {
        let at = at(rank);
        self.lists[at].remove(links, slot);
        if self.lists[at].is_empty() {
            self.filled[at / 64] &= !(1 << (at % 64));
        }
    }

    /// Lowers every rank by `by`; what would fall below 0 stays there, the lower ones first.
    pub(crate) fn fall(&mut self, links: &mut Links, by: usize) {
        let mut lowest = List::default();
        for list in self.lists.iter_mut().take(by + 1) {
            lowest.append(links, std::mem::take(list));
        }
        self.lists.rotate_left(by.min(RANKS));
        self.lists[0] = lowest;
        self.filled = [0; RANKS / 64];
        for (at, _) in self.lists.iter().enumerate().filter(|(_, list)| !list.is_empty()) {
            self.filled[at / 64] |= 1 << (at % 64);
        }
    }

    /// Returns the lowest rank that has a slot.
    pub(crate) fn lowest(&self) -> Option<u16> {
        let word = self.filled.iter().position(|&word| word != 0)?;
        Some((word * 64) as u16 + self.filled[word].trailing_zeros() as u16)
    }

    /// Returns the oldest slot of the lowest rank.
    pub(crate) fn oldest_lowest(&self) -> Option<u32> {
        self.list(self.lowest()?).oldest()
    }

    /// Lists the slots from the lowest rank on, within a rank the oldest first.
    pub(crate) fn iter<'a>(&'a self, links: &'a Links) -> impl Iterator<Item = u32> + 'a {
        self.lists.iter().flat_map(move |list| list.iter(links))
    }
}

fn at(rank: u16) -> usize {
    usize::from(rank).min(RANKS - 1)
}
