//! A model's demand curve: hits for every size of its tiers.
//!
//! A sample of the model's rows is counted: those whose hash falls into one of `one_in` parts. A
//! cache that keeps the rows used most has a row that is asked for again if it has room for all
//! rows used more often. So one table of fading counts tells the hits at every size at once,
//! whatever the model has at present and whichever policy it has: what a model could hit is a
//! question of its requests.
//!
//! ```text
//! hash ─▶ set of 8 entries ─▶ uses so far ─▶ rows with more uses: 130 ─▶ a hit from 3 units on
//! entry:  bit 31 ..... 16  15 .......... 0
//!             hash bits    sixteenths of a use, 0: empty
//! ```
//!
//! Source: the sampling of Waldspurger et al., "Efficient MRC Construction with SHARDS" (FAST
//! 2015). Differs: places in the order of use counts instead of recency, because the tiers' own
//! rules count uses; four bytes per row.

#![expect(
    clippy::indexing_slicing,
    reason = "sets are found by scaled hashes, steps by step_of, which is below STEPS"
)]

use tierbed_core::env::mix64;

use super::division::{Curve, UNITS};

/// Entries of a set.
const WAYS: usize = 8;
/// What a use adds to a count, so that counts can fade for some time.
const USE: u16 = 16;
/// Distinct steps of counts: eight per doubling.
const STEPS: usize = 128;
/// Sets of a table.
const SETS_MIN: u64 = 16;
const SETS_MAX: u64 = 8 << 10;
/// Rows counted per row that the whole budget has room for.
const HISTORY: u64 = 2;
/// All counts are halved after so many uses per entry.
const HALVE_AFTER: u64 = 32;
/// What the hits of an epoch are worth in the next.
const DECAY: f64 = 0.8;
/// The golden section of 2^32: its multiples are spread evenly.
const TURN: u32 = 0x9e37_79b9;
/// Draws other rows than the hashes of indexes and shards.
const SALT: u64 = 0x9e6c_63d0_876a_3f35;

/// Which rows of a model are looked at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    one_in: u64,
}

impl Sample {
    /// Tells whether the row of `hash` is in the sample.
    pub(super) fn has(self, hash: u64) -> bool {
        ((mix64(hash ^ SALT) >> 32) * self.one_in) >> 32 == 0
    }
}

/// The hits of a model at every size.
#[derive(Debug)]
pub(super) struct Demand {
    sample: Sample,
    sets: Box<[[u32; WAYS]]>,
    /// Rows by their uses, `[STEPS]`.
    rows: Box<[u32]>,
    /// Rows of the sample that so many units have room for, growing, `[UNITS + 1]`.
    room: Box<[u64]>,
    /// Hits that begin with so many units: of all epochs, fading, and of the present one.
    standing: Box<[f64]>,
    hits: Box<[u32]>,
    /// Uses since counts were halved.
    uses: u64,
    /// A place among rows used alike, in parts of 2^32.
    turn: u32,
}

impl Demand {
    /// Tries sizes of up to the whole budget; `rows_at` tells how many rows the model has room for
    /// in so many units of it. Takes about `bytes`, or what the smallest table takes.
    pub(super) fn new(bytes: u64, rows_at: impl Fn(u64) -> u64) -> Self {
        let set_bytes = (WAYS * size_of::<u32>()) as u64;
        let set_count = (bytes / set_bytes).clamp(SETS_MIN, SETS_MAX);
        let one_in = (HISTORY * rows_at(UNITS as u64)).div_ceil(set_count * WAYS as u64).max(1);
        let room = (0..=UNITS as u64).map(|units| rows_at(units) / one_in);
        Self {
            sample: Sample { one_in },
            sets: vec![[0; WAYS]; set_count as usize].into_boxed_slice(),
            rows: vec![0; STEPS].into_boxed_slice(),
            room: room.collect(),
            standing: vec![0.0; UNITS + 1].into_boxed_slice(),
            hits: vec![0; UNITS + 1].into_boxed_slice(),
            uses: 0,
            turn: 0,
        }
    }

    /// Returns the most that a table that may take `bytes` really takes.
    pub(super) fn bytes_about(bytes: u64) -> u64 {
        let words = STEPS + 5 * (UNITS + 1);
        let set_bytes = WAYS * size_of::<u32>();
        bytes.max(SETS_MIN * set_bytes as u64) + (words * size_of::<u32>()) as u64
    }

    /// Returns which rows are to be reported.
    pub(super) fn sample(&self) -> Sample {
        self.sample
    }

    /// Returns the bytes it takes.
    pub(super) fn bytes(&self) -> u64 {
        Self::bytes_about(size_of_val(&*self.sets) as u64)
    }

    /// Notes that the rows of `hashes`, all of the sample, were asked for.
    pub(super) fn note(&mut self, hashes: &[u64]) {
        for &hash in hashes {
            let uses = self.count(hash);
            if uses > 0 {
                let position = self.position(uses);
                let units = self.room.partition_point(|&room| room <= position);
                // Beyond the last place: no size of the budget has room for this row.
                if let Some(hits) = self.hits.get_mut(units) {
                    *hits += 1;
                }
            }
        }
        self.uses += hashes.len() as u64;
        if self.uses > HALVE_AFTER * (self.sets.len() * WAYS) as u64 {
            self.uses = 0;
            self.halve();
        }
    }

    /// Counts a use; returns the count before. The lowest of a set makes room.
    fn count(&mut self, hash: u64) -> u16 {
        let at = ((hash & 0xFFFF_FFFF) * self.sets.len() as u64) >> 32;
        let tag = (hash >> 48) as u32;
        let set = &mut self.sets[at as usize];
        let is_it = |entry: &&mut u32| **entry >> 16 == tag && **entry as u16 > 0;
        let (uses, before) = match set.iter_mut().find(is_it) {
            Some(entry) => {
                let before = *entry as u16;
                *entry = (tag << 16) | u32::from(before.saturating_add(USE));
                (before, before)
            }
            None => {
                let lowest = set.iter_mut().min_by_key(|entry| **entry as u16);
                let Some(entry) = lowest else { panic!("a set has {WAYS} entries") };
                let lowest = *entry as u16;
                *entry = (tag << 16) | u32::from(USE);
                (0, lowest)
            }
        };
        self.step_mut(before, |count| count.saturating_sub(u32::from(before > 0)));
        self.step_mut(uses.saturating_add(USE), |count| count + 1);
        uses
    }

    /// The rows of the sample that are before one with this count, now that it has one more use. Of
    /// those used as often any may be before it: the places among them are taken in turn.
    fn position(&mut self, uses: u16) -> u64 {
        self.turn = self.turn.wrapping_add(TURN);
        let step = step_of(uses);
        let above: u32 = self.rows[step + 1..].iter().sum();
        // The row itself is above by now, if it is on another step.
        let is_above = step_of(uses.saturating_add(USE)) > step;
        let alike = u64::from(self.rows[step]) + u64::from(is_above);
        let among = (alike * u64::from(self.turn)) >> u32::BITS;
        u64::from(above.saturating_sub(u32::from(is_above))) + among
    }

    fn step_mut(&mut self, uses: u16, change: impl Fn(u32) -> u32) {
        let count = &mut self.rows[step_of(uses)];
        *count = change(*count);
    }

    /// Halves all counts.
    fn halve(&mut self) {
        self.rows.fill(0);
        for entry in self.sets.iter_mut().flatten() {
            let uses = *entry as u16 / 2;
            *entry = (*entry >> 16 << 16) | u32::from(uses);
            if let Some(count) = self.rows.get_mut(step_of(uses)).filter(|_| uses > 0) {
                *count += 1;
            }
        }
    }

    /// Lets the hits so far fade.
    pub(super) fn end_epoch(&mut self) {
        for (standing, hits) in self.standing.iter_mut().zip(&mut self.hits) {
            *standing = *standing * DECAY + f64::from(std::mem::take(hits));
        }
    }

    /// Returns the hits with 0, 1, ... units of the budget.
    pub(super) fn curve(&self) -> Curve {
        let weight = self.sample.one_in as f64;
        let (mut curve, mut hits) = (Curve::sampled(weight), 0.0);
        for (units, begun) in self.standing.iter().enumerate() {
            hits += begun * weight;
            curve.set(units, hits);
        }
        curve
    }
}

/// The step of a count.
fn step_of(uses: u16) -> usize {
    let octave = u16::BITS - uses.leading_zeros();
    match octave.checked_sub(4) {
        None | Some(0) => usize::from(uses),
        Some(shift) => 8 * shift as usize + usize::from(uses >> shift),
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    /// Asks for `asked` rows of `row_count`, drawn evenly, and returns the hits per 1000 at each
    /// sixteenth of a budget that holds `rows_max`.
    fn hits_of(rows_max: u64, row_count: u64, bytes: u64) -> Vec<f64> {
        let mut demand = Demand::new(bytes, |units| rows_max * units / UNITS as u64);
        let (sample, mut rng) = (demand.sample(), SplitMix64::new(7));
        for round in 0..2 {
            for _ in 0..400_000 {
                let hash = mix64(rng.below(row_count));
                if sample.has(hash) {
                    demand.note(&[hash]);
                }
            }
            // What came while counts began fades.
            demand.end_epoch();
            if round == 0 {
                (0..40).for_each(|_| demand.end_epoch());
            }
        }
        let curve = demand.curve();
        (0..=16).map(|at| curve.at(at * UNITS / 16) / 400.0).collect()
    }

    /// Of rows asked for evenly a cache has the hits of its share of the rows.
    #[test]
    fn a_sample_tells_the_hits_of_every_size() {
        for bytes in [64 << 10, 4 << 20] {
            let hits = hits_of(10_000, 20_000, bytes);
            assert_eq!(hits[0], 0.0);
            for (at, hits) in hits.iter().enumerate() {
                let expected = 1000.0 * at as f64 / 32.0;
                assert!((hits - expected).abs() < 40.0, "{at}: {hits} for {expected}");
            }
        }
    }

    #[test]
    fn more_than_all_rows_brings_no_more_hits() {
        let hits = hits_of(40_000, 10_000, 1 << 20);
        assert!(hits[4] > 930.0, "{hits:?}");
        assert!((hits[16] - hits[6]).abs() < 20.0, "{hits:?}");
    }

    #[test]
    fn tables_stay_within_their_bytes() {
        for bytes in [100, 1 << 10, 1 << 20, 64 << 20] {
            let demand = Demand::new(bytes, |units| units << 20);
            assert!(demand.bytes() <= Demand::bytes_about(bytes), "{bytes}: {}", demand.bytes());
        }
    }

    /// The oracle keeps the counts of all rows and sorts them.
    #[test]
    fn hits_begin_where_there_is_room_for_all_rows_used_more() {
        let mut demand = Demand::new(1 << 20, |units| units * 20);
        let (mut rng, mut uses) = (SplitMix64::new(11), vec![0u32; 1000]);
        let mut expected = [0.0; UNITS + 1];
        for _ in 0..20_000 {
            let bound = 1 + rng.below(1000);
            let row = rng.below(bound) as usize;
            demand.note(&[mix64(row as u64)]);
            if uses[row] > 0 {
                let more = uses.iter().filter(|&&other| other > uses[row]).count();
                let alike = uses.iter().filter(|&&other| other == uses[row]).count();
                for (units, expected) in expected.iter_mut().enumerate() {
                    let share = (20.0 * units as f64 - more as f64) / alike as f64;
                    *expected += share.clamp(0.0, 1.0);
                }
            }
            uses[row] += 1;
        }
        demand.end_epoch();
        let curve = demand.curve();
        for (units, expected) in expected.iter().enumerate() {
            let found = curve.at(units);
            assert!((found - expected).abs() <= 400.0, "{units}: {found} for {expected}");
        }
    }

    #[test]
    fn steps_grow_with_counts() {
        let steps: Vec<usize> = (0..=u16::MAX).map(step_of).collect();
        assert!(steps.windows(2).all(|two| two[0] == two[1] || two[0] + 1 == two[1]));
        assert!(steps[usize::from(u16::MAX)] < STEPS);
    }
}
