//! Rows that tiers have, or that are always in memory: taken while waiting for locks, or at once.
//!
//! A lookup that must not wait looks first, and tells the policies when it has found all its rows:
//! one that has to be repeated elsewhere leaves nothing behind.
#![expect(
    clippy::indexing_slicing,
    reason = "positions are those of the scratch, tiers those of the stack"
)]

use std::sync::atomic::Ordering;

use super::TierStack;
use crate::layers::Layers;
use crate::scratch::{Filled, Scratch};

/// Rows that a tier was asked for, and those it had.
struct Asked {
    row_count: u64,
    hit_count: u64,
}

impl TierStack {
    /// Fills the rows of the scratch that a tier or the resident rows have; not those of deltas
    /// that come or go.
    pub(crate) fn answer(&self, scratch: &mut Scratch, layers: &Layers) {
        for at in 0..self.tiers.len() {
            let Some(asked) = self.ask(at, scratch, layers, true) else {
                panic!("tier {at} was not waited for");
            };
            self.count(at, asked);
        }
        self.fill_resident(scratch, layers);
    }

    /// As [`answer`](Self::answer), but waits for no lock, and neither counts anything nor tells
    /// the policies; `false` when a lock is held by another.
    pub(crate) fn try_answer(&self, scratch: &mut Scratch, layers: &Layers) -> bool {
        let is_whole =
            (0..self.tiers.len()).all(|at| self.ask(at, scratch, layers, false).is_some());
        if is_whole {
            self.fill_resident(scratch, layers);
        }
        is_whole
    }

    /// Counts the rows that [`try_answer`](Self::try_answer) found, and tells the policies what
    /// [`answer`](Self::answer) tells them. Waits while another looks into a tier.
    pub(crate) fn note_answer(&self, scratch: &mut Scratch) {
        let mut row_count = scratch.keys.len() as u64;
        for (number, tier) in (1..).zip(&self.tiers) {
            let Scratch { keys, tier_of, slot_of, visits, work, .. } = &mut *scratch;
            work.begin();
            for (at, _) in tier_of.iter().enumerate().filter(|(_, of)| **of == number) {
                work.keys.push(keys[at]);
                work.slots.push(slot_of[at]);
            }
            let hit_count = work.keys.len() as u64;
            self.count(usize::from(number) - 1, Asked { row_count, hit_count });
            // The next is asked for what this one lacks.
            row_count -= hit_count;
            if hit_count > 0 {
                tier.use_again(&work.keys, &work.slots, visits);
            }
        }
    }

    fn count(&self, at: usize, Asked { row_count, hit_count }: Asked) {
        let (hits, misses) = &self.counts[at];
        hits.fetch_add(hit_count, Ordering::Relaxed);
        misses.fetch_add(row_count - hit_count, Ordering::Relaxed);
    }

    /// Asks a tier for the rows that are not filled yet; `None` when it had to be waited for.
    fn ask(
        &self,
        tier: usize,
        scratch: &mut Scratch,
        layers: &Layers,
        may_wait: bool,
    ) -> Option<Asked> {
        let number = tier as u8 + 1;
        let (is_first, tier) = (tier == 0, &self.tiers[tier]);
        let Scratch { keys, words, row_starts, filled, visits, tier_of, slot_of, work, .. } =
            &mut *scratch;
        assert_eq!(keys.len(), filled.len(), "every unique row has a state");
        work.begin();
        // A later tier is asked for all rows still missing in one call, so that each of its
        // locks is taken once; the first tier is asked for all rows, without a copy.
        if !is_first {
            let left = (0..).zip(keys.iter().zip(filled.iter()));
            for (at, (key, _)) in left.filter(|(_, (_, state))| **state == Filled::No) {
                work.keys.push(*key);
                work.row_words.push(at);
            }
        }
        let (asked, places) = (if is_first { &*keys } else { &work.keys }, &work.row_words);
        let mut hit_count = 0;
        let take = |found: usize, slot: u32, code: &[f32]| {
            let at = if is_first { found } else { places[found] };
            if layers.is_pending(keys[at]) {
                return;
            }
            tier.decode(code, words.row_mut(row_starts[at], self.dim(keys[at])));
            (filled[at], tier_of[at], slot_of[at]) = (Filled::Cached, number, slot);
            hit_count += 1;
        };
        if may_wait {
            tier.find(asked, visits, take);
        } else if !tier.try_find(asked, visits, take) {
            return None;
        }
        Some(Asked { row_count: asked.len() as u64, hit_count })
    }

    fn fill_resident(&self, scratch: &mut Scratch, layers: &Layers) {
        for at in 0..scratch.keys.len() {
            if scratch.filled[at] != Filled::No {
                continue;
            }
            let key = scratch.keys[at];
            if !self.resident.has(key.table) || layers.is_changed(key) {
                continue;
            }
            let place = scratch.row_mut(at, 0, self.dim(key));
            if self.resident.head(self.kernels, key, place) {
                scratch.mark(at, Filled::Resident);
            }
        }
    }
}
