//! Was this row here lately? The memory of rows that left, without the rows.
//!
//! A queue of 32-bit fingerprints with an index. Two rows of one fingerprint are taken for the
//! same: at a million ghosts one question in 4,000 is answered wrongly, which costs a hit at
//! most.
#![expect(clippy::indexing_slicing, reason = "positions are reduced to the ring's length")]

use tierbed_core::env::mix64;

use crate::index::RobinHoodIndex;

/// The fingerprint of an entry that was taken out of the middle.
const TAKEN: u32 = 0;

/// Rows that left, oldest to newest, with a note on each.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ghosts<T = ()> {
    ring: Box<[(u32, T)]>,
    /// Position of the oldest entry, and entries from there on, taken ones included.
    first: usize,
    used: usize,
    index: RobinHoodIndex,
}

impl<T: Copy + Default> Ghosts<T> {
    /// Bytes per ghost there is room for: an entry, an eighth of taken ones, and the index.
    pub(crate) const BYTES: usize = size_of::<(u32, T)>() * 9 / 8 + 7;

    /// Changes how many it remembers; the oldest are forgotten.
    pub(crate) fn resize(&mut self, capacity: usize) {
        let mut kept = Self {
            ring: vec![(TAKEN, T::default()); capacity + capacity / 8 + 1].into_boxed_slice(),
            first: 0,
            used: 0,
            index: RobinHoodIndex::with_capacity(capacity),
        };
        let surplus = self.len().saturating_sub(capacity);
        for (fingerprint, note) in self.entries().skip(surplus) {
            kept.append(fingerprint, note);
        }
        *self = kept;
    }

    /// Returns the rows remembered.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns the note on the row of `hash` if it is remembered.
    pub(crate) fn note(&self, hash: u64) -> Option<T> {
        self.at(fingerprint(hash)).map(|at| self.ring[at].1)
    }

    /// Tells whether the row of `hash` is remembered.
    pub(crate) fn contains(&self, hash: u64) -> bool {
        self.note(hash).is_some()
    }

    /// Remembers the row of `hash` as the newest. When there is no room the oldest is forgotten.
    pub(crate) fn push(&mut self, hash: u64, note: T) {
        if self.index.capacity() == 0 {
            return;
        }
        self.take(hash);
        if self.index.len() >= self.index.capacity() {
            self.pop_oldest();
        }
        if self.used == self.ring.len() {
            self.close_ranks();
        }
        self.append(fingerprint(hash), note);
    }

    /// Forgets the row of `hash` and returns its note, if it was remembered.
    pub(crate) fn take(&mut self, hash: u64) -> Option<T> {
        let fingerprint = fingerprint(hash);
        let at = self.at(fingerprint)?;
        let note = self.ring[at].1;
        self.index.remove(mix64(u64::from(fingerprint)), at as u32);
        self.ring[at].0 = TAKEN;
        Some(note)
    }

    /// Returns the note on the oldest row remembered.
    pub(crate) fn oldest(&mut self) -> Option<T> {
        while self.used > 0 && self.ring[self.first].0 == TAKEN {
            self.advance();
        }
        (self.used > 0).then(|| self.ring[self.first].1)
    }

    /// Forgets the oldest row.
    pub(crate) fn pop_oldest(&mut self) {
        if self.oldest().is_some() {
            let fingerprint = self.ring[self.first].0;
            self.index.remove(mix64(u64::from(fingerprint)), self.first as u32);
            self.advance();
        }
    }

    fn advance(&mut self) {
        self.first = (self.first + 1) % self.ring.len();
        self.used -= 1;
    }

    /// Writes the ring anew without what was taken; comes once per eighth of its length.
    fn close_ranks(&mut self) {
        let kept: Vec<(u32, T)> = self.entries().collect();
        self.index.clear();
        (self.first, self.used) = (0, 0);
        for (fingerprint, note) in kept {
            self.append(fingerprint, note);
        }
    }

    fn append(&mut self, fingerprint: u32, note: T) {
        let at = (self.first + self.used) % self.ring.len();
        if self.index.insert(mix64(u64::from(fingerprint)), at as u32) {
            self.ring[at] = (fingerprint, note);
            self.used += 1;
        }
    }

    fn at(&self, fingerprint: u32) -> Option<usize> {
        let same = |at: u32| self.ring[at as usize].0 == fingerprint;
        self.index.find(mix64(u64::from(fingerprint)), same).map(|at| at as usize)
    }

    fn entries(&self) -> impl Iterator<Item = (u32, T)> + '_ {
        (0..self.used)
            .map(|step| self.ring[(self.first + step) % self.ring.len()])
            .filter(|entry| entry.0 != TAKEN)
    }
}

/// 32 bits of a hash, never [`TAKEN`].
fn fingerprint(hash: u64) -> u32 {
    ((hash ^ (hash >> 32)) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tierbed_core::env::SplitMix64;

    use super::*;

    /// The oracle is a queue that is searched from end to end.
    #[test]
    fn remembers_the_newest_and_forgets_what_is_taken() {
        let mut ghosts = Ghosts::<u32>::default();
        ghosts.resize(50);
        let mut queue: VecDeque<(u64, u32)> = VecDeque::new();
        let mut rng = SplitMix64::new(11);
        for step in 0..20_000u32 {
            let row = rng.below(120);
            let known = queue.iter().find(|entry| entry.0 == row).map(|entry| entry.1);
            assert_eq!(ghosts.note(mix64(row)), known);
            match rng.below(3) {
                0 => {
                    assert_eq!(ghosts.take(mix64(row)), known);
                    queue.retain(|entry| entry.0 != row);
                }
                _ => {
                    ghosts.push(mix64(row), step);
                    queue.retain(|entry| entry.0 != row);
                    queue.push_back((row, step));
                    if queue.len() > 50 {
                        queue.pop_front();
                    }
                }
            }
            assert_eq!(ghosts.len(), queue.len());
            assert_eq!(ghosts.oldest(), queue.front().map(|entry| entry.1));
        }
        ghosts.resize(10);
        assert_eq!(ghosts.len(), 10);
        assert!(queue.iter().rev().take(10).all(|entry| ghosts.contains(mix64(entry.0))));
    }
}
