//! How many hits would a model have with so many bytes?
//!
//! Shadows at several shares of the budget, fingerprints without rows, are told of a sample of the
//! model's rows: those whose hash falls into one of `one_in` parts, and as many times fewer slots.
//! So every size is tried at once, whatever the model has at present. Shadows count uses weighed by
//! groups, by the model's own rule where it has one: what a model could hit is a question of its
//! requests, and its policy comes near.
//!
//! Source: miniature caches (Waldspurger et al., "Cache Modeling and Optimization using Miniature
//! Simulations", ATC 2017). Differs: one rule stands for policies that know no groups.

use tierbed_core::env::mix64;

use super::division::{Curve, UNITS};
use crate::policy::{fingerprint, CreditRule, PolicyKind, SampledGroup, Shadow};

/// Sizes that are tried, in sixteenths of the budget; in small ones those of the second list.
const SIXTEENTHS: [u64; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
const FEW_SIXTEENTHS: [u64; 4] = [2, 4, 8, 16];
/// Slots of the largest shadow.
const SLOTS_MIN: u64 = 64;
const SLOTS_MAX: u64 = 16 << 10;
/// What the hits of an epoch are worth in the next.
const DECAY: f64 = 0.6;
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

/// The hits of a model at several sizes.
#[derive(Debug)]
pub(super) struct Demand {
    sizes: Vec<Size>,
    sample: Sample,
    bytes: u64,
    /// Fingerprints of the rows of a group.
    rows: Vec<u32>,
}

#[derive(Debug)]
struct Size {
    shadow: Shadow,
    sixteenths: u64,
    /// Hits of the present epoch.
    hits: u64,
    /// Hits of all epochs, fading.
    standing: f64,
}

impl Demand {
    /// Tries sizes of up to the whole budget; `rows_at` tells how many rows the model has room for
    /// in so many sixteenths of it. All shadows take some `bytes` together, or what the smallest
    /// take.
    pub(super) fn new(policy: PolicyKind, bytes: u64, rows_at: impl Fn(u64) -> u64) -> Self {
        let rule = rule_of(policy);
        let tried = tried(bytes);
        let slot_bytes = Shadow::BYTES_PER_SLOT as u64 * tried.iter().sum::<u64>();
        let slots = (bytes * 16 / slot_bytes).clamp(SLOTS_MIN, SLOTS_MAX);
        let one_in = rows_at(16).div_ceil(slots).max(1);
        let mut held_bytes = Self::bytes_about(0);
        let sizes = tried.iter().map(|&sixteenths| {
            let mut shadow = Shadow::new(rule);
            let slot_count = (rows_at(sixteenths) / one_in).clamp(1, u64::from(u16::MAX));
            shadow.resize(slot_count as u32);
            held_bytes += slot_count * Shadow::BYTES_PER_SLOT as u64;
            Size { shadow, sixteenths, hits: 0, standing: 0.0 }
        });
        let sizes = sizes.collect();
        Self { sizes, sample: Sample { one_in }, bytes: held_bytes, rows: Vec::new() }
    }

    /// Returns about what shadows that may take `bytes` really take.
    pub(super) fn bytes_about(bytes: u64) -> u64 {
        bytes + (tried(bytes).len() * fixed_bytes()) as u64
    }

    /// Returns which rows should be told of.
    pub(super) fn sample(&self) -> Sample {
        self.sample
    }

    /// Returns the bytes of all shadows.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes that the rows of `hashes`, all of the sample, were asked for together with others:
    /// `row_count` in all, of which `miss_count` had to be read.
    pub(super) fn note(&mut self, hashes: &[u64], row_count: u32, miss_count: u32) {
        self.rows.clear();
        self.rows.extend(hashes.iter().map(|&hash| fingerprint(hash)));
        let asked = self.rows.len() as u32;
        // Which rows were missing is not told: as many in the sample as elsewhere.
        let outside = u64::from(row_count.saturating_sub(asked));
        let missing_outside = u64::from(miss_count) * outside / u64::from(row_count.max(1));
        let missing_outside = missing_outside as u32;
        for size in &mut self.sizes {
            let group = SampledGroup { rows: &self.rows, row_count, missing_outside };
            size.hits += u64::from(asked - size.shadow.ask(&group));
        }
    }

    /// Lets the hits so far fade.
    pub(super) fn end_epoch(&mut self) {
        for size in &mut self.sizes {
            size.standing = size.standing * DECAY + std::mem::take(&mut size.hits) as f64;
        }
    }

    /// Returns the hits with 0, 1, ... units of the budget; between sizes that were tried, on a
    /// straight line.
    pub(super) fn curve(&self) -> Curve {
        let mut curve = Curve::default();
        let (mut from, mut hits_from) = (0, 0.0f64);
        for size in &self.sizes {
            let to = size.sixteenths as usize * UNITS / 16;
            // Where more memory seems to cost hits, the sample is at its end.
            let hits_to = hits_from.max(size.standing * self.sample.one_in as f64);
            for unit in from..=to {
                let share = (unit - from) as f64 / (to - from) as f64;
                curve.set(unit, hits_from + share * (hits_to - hits_from));
            }
            (from, hits_from) = (to, hits_to);
        }
        curve
    }
}

/// The sizes that are tried: fewer where what shadows take without a row is too much already.
fn tried(bytes: u64) -> &'static [u64] {
    match (SIXTEENTHS.len() * fixed_bytes()) as u64 > bytes {
        true => &FEW_SIXTEENTHS,
        false => &SIXTEENTHS,
    }
}

/// Bytes of a shadow without slots, and of the tables of its few slabs.
fn fixed_bytes() -> usize {
    Shadow::BYTES_FIXED + 256
}

fn rule_of(policy: PolicyKind) -> CreditRule {
    match policy {
        PolicyKind::GroupFrequency(rule) => rule,
        _ => CreditRule::STEADY,
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::SplitMix64;

    use super::*;

    /// Asks for `asked` rows of `row_count`, drawn evenly, and returns the hits per 1000 at each
    /// sixteenth of a budget that holds `rows_max`.
    fn hits_of(rows_max: u64, row_count: u64, bytes: u64) -> Vec<f64> {
        let mut demand =
            Demand::new(PolicyKind::Lru, bytes, |sixteenths| rows_max * sixteenths / 16);
        let (sample, mut rng) = (demand.sample(), SplitMix64::new(7));
        for round in 0..2 {
            for _ in 0..400_000 {
                let hash = mix64(rng.below(row_count));
                if sample.has(hash) {
                    demand.note(&[hash], 1, 0);
                }
            }
            // What came while the shadows filled fades.
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
    fn shadows_stay_within_their_bytes() {
        for bytes in [1 << 10, 1 << 20, 64 << 20] {
            let demand = Demand::new(PolicyKind::Lru, bytes, |sixteenths| sixteenths << 20);
            let least = Demand::bytes_about(0) + 64 * 4 * Shadow::BYTES_PER_SLOT as u64;
            let most = least.max(Demand::bytes_about(bytes));
            assert!(demand.bytes() <= most, "{bytes}: {}", demand.bytes());
        }
    }
}
