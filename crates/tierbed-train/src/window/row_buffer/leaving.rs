//! Eviction order of the row buffer: of the rows that no announced batch wants those used least;
//! when there are none, of the others the one that is wanted last.
//!
//! Every slot has a rank, and a hand looks at a part of the ring at a time and takes the highest:
//!
//! ```text
//! rank   0 ............... 63 | 64 ........................... 95
//!        wanted in so many      15 - class of use, and whether it was used
//!        batches from now       since the hand passed
//! ```
//!
//! A row that several announced batches want is wanted soon: only its last use is known. Uses are
//! those that the record counts, so a row that comes back comes with its past. Rows not used for
//! long lose a class now and then, so that old favourites leave.
//!
//! Source: Belady (1966) inside the window; outside it frequency, because order by last use is
//! much worse on click logs, whose popularity lasts. Differs: RecDB §4.2 drops what the window does
//! not want.

#![expect(
    clippy::indexing_slicing,
    reason = "ranks are below their number, parts are within the pool"
)]

use tierbed_core::RowKey;

use super::slot::{Slot, AGAIN, CLASS_MAX, OCCUPIED, REFERENCED};

/// Ranks of rows that announced batches want, and all ranks.
const WANTED_RANKS: u32 = 64;
const RANKS: usize = WANTED_RANKS as usize + 2 * (CLASS_MAX as usize + 1);
/// Slots looked at for every row that leaves.
const SLOTS_PER_VICTIM: usize = 32;

/// Which rows leave first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EvictionOrder {
    /// Next use inside the window, else frequency.
    #[default]
    NextUse,
    /// Not used since the hand passed; for comparison.
    SecondChance,
}

/// What the hand may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EvictionLimit {
    /// Round whose pins hold.
    pub(super) round: u32,
    /// Batches up to here are done: `needed_until` above it protects.
    pub(super) batch_done: u32,
    /// Whether rows of announced batches may go when nothing else is left.
    pub(super) may_take_needed: bool,
    /// Which rows leave first.
    pub(super) order: EvictionOrder,
}

impl EvictionLimit {
    /// Returns how readily a slot is given up, `None` where it is not.
    fn rank(self, slot: &Slot) -> Option<usize> {
        if !slot.has(OCCUPIED) || slot.pinned_in == self.round {
            return None;
        }
        let batches = slot.needed_until.saturating_sub(self.batch_done);
        if batches > 0 {
            let rank = if slot.has(AGAIN) { 0 } else { batches.min(WANTED_RANKS) - 1 };
            return self.may_take_needed.then_some(rank as usize);
        }
        let class = match self.order {
            EvictionOrder::NextUse => slot.class(),
            EvictionOrder::SecondChance => 0,
        };
        debug_assert!(class <= CLASS_MAX, "a class of use above the highest");
        let is_idle = usize::from(!slot.has(REFERENCED));
        Some(WANTED_RANKS as usize + 2 * usize::from(CLASS_MAX - class) + is_idle)
    }
}

/// The hand of the clock: where in the ring of slots the last search ended.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Hand {
    at: usize,
}

impl Hand {
    /// Chooses up to `count` slots to empty, with their keys; forgets nothing. At least one where
    /// one may be taken.
    pub(super) fn pick(
        &mut self,
        slots: &mut [Slot],
        count: usize,
        limit: EvictionLimit,
        victims: &mut Vec<(RowKey, u32)>,
    ) {
        let calm = EvictionLimit { may_take_needed: false, ..limit };
        self.go_around(slots, count, calm, victims);
        if victims.is_empty() && limit.may_take_needed {
            self.go_around(slots, count, limit, victims);
        }
    }

    // Goes on part by part until `count` are chosen, once around at most.
    fn go_around(
        &mut self,
        slots: &mut [Slot],
        count: usize,
        limit: EvictionLimit,
        victims: &mut Vec<(RowKey, u32)>,
    ) {
        let mut left = slots.len();
        while left > 0 && victims.len() < count {
            let wanted = count - victims.len();
            let len = (wanted * SLOTS_PER_VICTIM).min(left).min(slots.len() - self.at);
            let part = &mut slots[self.at..self.at + len];
            take_highest(part, self.at, wanted, |slot| limit.rank(slot), victims);
            self.at = if self.at + len == slots.len() { 0 } else { self.at + len };
            left -= len;
        }
        assert!(victims.len() <= count, "{} rows leave, {count} were wanted", victims.len());
    }
}

// Chooses up to `count` of `part`, which begins at slot `first`: those of the highest ranks, and of
// the lowest rank chosen the first ones. Second chances of the others are used up.
fn take_highest(
    part: &mut [Slot],
    first: usize,
    count: usize,
    rank: impl Fn(&Slot) -> Option<usize>,
    victims: &mut Vec<(RowKey, u32)>,
) {
    let mut counts = [0usize; RANKS];
    for rank in part.iter().filter_map(&rank) {
        counts[rank] += 1;
    }
    // Ranks above `least` leave, and `of_least` of that rank.
    let (mut least, mut of_least) = (RANKS, count);
    while least > 0 {
        least -= 1;
        let here = counts[least];
        if here >= of_least || least == 0 {
            break;
        }
        of_least -= here;
    }
    for (at, slot) in (first as u32..).zip(part) {
        let Some(rank) = rank(slot) else { continue };
        if rank > least || (rank == least && of_least > 0) {
            of_least -= usize::from(rank == least);
            victims.push((slot.key(), at));
        } else {
            slot.clear(REFERENCED);
        }
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;
    use tierbed_core::{RowId, TableId};

    use super::*;

    const CALM: EvictionLimit = EvictionLimit {
        round: 9,
        batch_done: 4,
        may_take_needed: false,
        order: EvictionOrder::NextUse,
    };
    const DESPERATE: EvictionLimit = EvictionLimit { may_take_needed: true, ..CALM };

    /// Slots of rows by class of use, none referenced, needed or pinned.
    fn slots(classes: &[u8]) -> Vec<Slot> {
        let slot = |(row, &class): (u64, &u8)| {
            let mut slot = Slot::of(RowKey::new(TableId(3), RowId(row)), 1, 0);
            slot.clear(REFERENCED);
            slot.set_class(class);
            slot
        };
        (0..).zip(classes).map(slot).collect()
    }

    fn pick(slots: &mut [Slot], count: usize, limit: EvictionLimit) -> Vec<u64> {
        let mut victims = Vec::new();
        Hand::default().pick(slots, count, limit, &mut victims);
        victims.iter().map(|(key, _)| key.row.0).collect()
    }

    #[test]
    fn the_least_used_leave_and_idle_ones_first() {
        let mut slots = slots(&[5, 1, 3, 1, 0, 1]);
        slots[1].set(REFERENCED);
        assert_eq!(pick(&mut slots, 3, CALM), [3, 4, 5]);
        assert!(!slots[1].has(REFERENCED));
        let by_hand = EvictionLimit { order: EvictionOrder::SecondChance, ..CALM };
        slots[0].set(REFERENCED);
        assert_eq!(pick(&mut slots, 2, by_hand), [1, 2]);
    }

    #[test]
    fn wanted_rows_go_last_and_the_farthest_first() {
        let mut slots = slots(&[0; 6]);
        for (slot, until) in slots.iter_mut().zip([5, 9, 7, 9, 0, 300]) {
            slot.needed_until = until;
        }
        slots[3].set(AGAIN);
        slots[4].pinned_in = CALM.round;
        assert_eq!(pick(&mut slots, 6, CALM), [0; 0]);
        assert_eq!(pick(&mut slots, 1, DESPERATE), [5]);
        assert_eq!(pick(&mut slots, 3, DESPERATE), [1, 2, 5]);
        // One row that nobody wants keeps all others safe.
        slots[0].needed_until = 4;
        assert_eq!(pick(&mut slots, 6, DESPERATE), [0]);
    }

    /// The oracle sorts all slots by rank; one part of the ring holds them all.
    #[test]
    fn takes_what_sorting_would_take() {
        let mut rng = SplitMix64::new(17);
        for _ in 0..200 {
            let mut slots = slots(&[0; 64].map(|_: u8| rng.below(16) as u8));
            for slot in &mut slots {
                slot.needed_until = rng.below(9) as u32;
                slot.pinned_in = 8 + rng.below(3) as u32;
                if rng.below(2) == 0 {
                    slot.set(REFERENCED);
                }
            }
            let count = 2 + rng.below(60) as usize;
            let takes = |slot: &&Slot| CALM.rank(slot).is_some();
            let mut ranks: Vec<usize> =
                slots.iter().filter(takes).filter_map(|slot| CALM.rank(slot)).collect();
            ranks.sort_unstable_by(|a, b| b.cmp(a));
            ranks.truncate(count);
            let before = slots.clone();
            let picked = pick(&mut slots, count, CALM);
            let mut taken: Vec<usize> =
                picked.iter().filter_map(|&row| CALM.rank(&before[row as usize])).collect();
            taken.sort_unstable_by(|a, b| b.cmp(a));
            assert_eq!(taken, ranks);
            let rows: std::collections::BTreeSet<_> = picked.iter().collect();
            assert_eq!(rows.len(), picked.len());
        }
    }
}
