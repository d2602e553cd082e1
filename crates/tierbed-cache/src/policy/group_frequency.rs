//! How often was a row needed, counting most where it alone was missing?
//!
//! Every use of a row adds `1 / m^a` to its score, `m` the rows that were missing in its group:
//! a group with `m` misses needs `m` rows to become a perfect hit, so each gets a part of the
//! credit. The row of the lowest score leaves; a row comes in when its score is not below that.
//! Scores outlive the stay: they go with the record and come back with it on the next miss.
//! From time to time all scores are halved, so that old favourites leave.
//!
//! Halving touches no row: the unit of credit doubles instead, and on the way to it credits grow,
//! so that of two rows used once in one period the later one has more. A score is 16 bits of a
//! float, eight of exponent, counted in halvings since the beginning, eight of mantissa:
//!
//! ```text
//! bit 15 ....... 8 7 ............ 0
//!     exponent + e   mantissa            e: halvings so far, modulo 256
//! ```
//!
//! A record not read for some 240 halvings may come back with a wrong score: the exponent has
//! gone around.

use tierbed_core::env::SplitMix64;

use super::buckets::Buckets;
use super::credit_rule::{CreditRule, MissWeight, Steps};
use super::slots::{keeps_slots, Slots};
use super::{Arrival, EvictionPolicy, Group};

/// Groups with more misses get the credit of this many.
const MISSES_MAX: usize = 256;
/// Parts of a slot that [`CreditRule::halve_after`] counts.
const TENTHS: u64 = 10;
/// The exponent of 1.0 in an f32, and bits of an f32 mantissa that a score leaves out.
const EXPONENT_OF_ONE: i32 = 127;
const BITS_LEFT_OUT: u32 = 15;
/// Share of a first use in what is missing: no cache could have had the row.
const FIRST_USE_SHARE: f32 = 0.5;
/// The exponent at no misses, its rise per missing row, and where it ends.
const POWER_AT_0: f32 = -1.3;
const POWER_PER_MISS: f32 = 0.6;
const POWER_RANGE: (f32, f32) = (0.4, 1.8);
/// The exponent before anything is known.
const POWER_AT_START: f32 = 1.5;
/// Weight of one group in the running mean of misses.
const MEAN_STEP: f32 = 1.0 / 1024.0;
/// Scores end here; what looks larger is older than the exponent can tell.
const SCORE_MAX: f32 = 65_535.0;
/// Scores below 2^-12 are ranked alike.
const LOWEST_EXPONENT: i32 = EXPONENT_OF_ONE - 12;
/// Ranks per doubling of the score, and doublings that have ranks.
const RANKS_PER_OCTAVE: usize = 32;
const OCTAVES_MAX: f32 = 31.0;

/// Slots by group-weighted frequency.
#[derive(Debug, Clone)]
pub struct GroupFrequency {
    rule: CreditRule,
    /// The score of each row here.
    slots: Slots<u16>,
    ranks: Buckets,
    /// What a use is worth by missing rows, `[MISSES_MAX + 1]`.
    credits: Box<[f32]>,
    /// The exponent that `credits` were made with.
    power: f32,
    /// Rows missing per group, first uses in part, a running mean.
    misses_mean: f32,
    /// First uses in the present group.
    first_uses: u32,
    /// Rows of the whole group per row of it that this policy is told of.
    told_of: f32,
    /// What a use of a row of the present group is worth.
    credit: f32,
    /// Halvings so far; wraps.
    epoch: u8,
    /// Rows asked for since the last halving.
    asked: u64,
    rng: SplitMix64,
}

impl GroupFrequency {
    /// Bytes per slot.
    pub(super) const BYTES_PER_SLOT: usize = Slots::<u16>::BYTES_PER_SLOT;

    /// Builds the policy with a rule for credit.
    #[must_use]
    pub fn new(rule: CreditRule) -> Self {
        let power = match rule.weight {
            MissWeight::Tenths(tenths) => f32::from(tenths) / 10.0,
            MissWeight::ByMisses => POWER_AT_START,
        };
        Self {
            rule,
            slots: Slots::default(),
            ranks: Buckets::default(),
            misses_mean: (power - POWER_AT_0) / POWER_PER_MISS,
            first_uses: 0,
            told_of: 1.0,
            power,
            credits: credits(power),
            credit: 1.0,
            epoch: 0,
            asked: 0,
            rng: SplitMix64::new(0x7469_6572),
        }
    }

    /// Weighs missing rows as `other` does, which has the same rule.
    pub(super) fn weigh_as(&mut self, other: &Self) {
        self.misses_mean = other.misses_mean;
        if self.power != other.power {
            self.power = other.power;
            self.credits.clone_from(&other.credits);
        }
    }

    /// Goes on by the rule of `other`. When rows have lower scores there on average, all scores
    /// here are halved until they are alike, so that old favourites do not block new ones; then
    /// the rows whose slots have a `score` there take it over.
    pub(super) fn follow(&mut self, other: &Self, score: impl Fn(u32) -> Option<u16>) {
        self.rule = other.rule;
        self.weigh_as(other);
        let mean = |policy: &Self| policy.ranks.mean() / RANKS_PER_OCTAVE as f32;
        let above = (mean(self) - mean(other)).round().clamp(0.0, OCTAVES_MAX);
        if above > 0.0 && other.ranks.lowest().is_some() {
            self.halve(above as u8);
        }
        let slots = self.dump();
        self.ranks = Buckets::default();
        for slot in slots {
            let known = score(slot).map(|score| self.converted(score, other));
            self.place(slot, known.unwrap_or(self.slots.state(slot)));
        }
    }

    /// A score of `other`, as it is written here.
    fn converted(&self, score: u16, other: &Self) -> u16 {
        if other.value(score) == 0.0 {
            return 0;
        }
        let halvings = u16::from(self.epoch.wrapping_sub(other.epoch));
        score.wrapping_add(halvings << 8).max(1)
    }

    /// Returns the rule.
    #[cfg(test)]
    pub(super) fn rule(&self) -> CreditRule {
        self.rule
    }

    /// Returns the score of the row in `slot`.
    pub(super) fn score(&self, slot: u32) -> u16 {
        self.slots.state(slot)
    }

    /// Returns the slots there are, occupied or not.
    pub(super) fn slot_count(&self) -> usize {
        self.slots.count()
    }

    /// Returns the score as a number of full credits of now.
    fn value(&self, score: u16) -> f32 {
        if score == 0 {
            return 0.0;
        }
        let exponent = ((score >> 8) as u8).wrapping_sub(self.epoch);
        let bits = (u32::from(exponent) << 23) | (u32::from(score & 0xFF) << BITS_LEFT_OUT);
        let value = f32::from_bits(bits);
        // Not a number when the exponent has just gone around.
        if value <= SCORE_MAX {
            value
        } else {
            0.0
        }
    }

    /// Adds the present credit. The bits that do not fit are rounded by chance, so that small
    /// credits add up on large scores.
    fn raised(&mut self, score: u16) -> u16 {
        let value = (self.value(score) + self.credit).min(SCORE_MAX);
        let chance = (self.rng.next_u64() as u32) & ((1 << BITS_LEFT_OUT) - 1);
        let bits = (value.to_bits() + chance).min(SCORE_MAX.to_bits());
        let exponent = ((bits >> 23) as u8).wrapping_add(self.epoch);
        let mantissa = ((bits >> BITS_LEFT_OUT) & 0xFF) as u16;
        // 0 says "never seen".
        ((u16::from(exponent) << 8) | mantissa).max(1)
    }

    fn rank_of(&self, score: u16) -> u16 {
        let bits = self.value(score).to_bits();
        let octave = ((bits >> 23) as i32 - LOWEST_EXPONENT).max(-1);
        if octave < 0 {
            return 0;
        }
        let step = match self.rule.steps {
            Steps::Fine => ((bits >> 18) & 0x1F) as u16,
            Steps::Coarse => 0,
        };
        (octave as u16) * RANKS_PER_OCTAVE as u16 + step
    }

    fn place(&mut self, slot: u32, score: u16) {
        self.slots.set_state(slot, score);
        let rank = self.rank_of(score);
        self.ranks.push(&mut self.slots.links, slot, rank);
    }

    /// Follows the mean of misses with the exponent, in steps.
    fn weigh(&mut self, misses: usize) {
        if self.rule.weight != MissWeight::ByMisses {
            return;
        }
        // First uses are known when a group ends: those of the group before go in here.
        let first_uses = std::mem::take(&mut self.first_uses) as f32 * self.told_of;
        let missing = misses as f32 - FIRST_USE_SHARE * first_uses;
        self.misses_mean += (missing - self.misses_mean) * MEAN_STEP;
        let (low, high) = POWER_RANGE;
        let power = (POWER_AT_0 + POWER_PER_MISS * self.misses_mean).clamp(low, high);
        if (power - self.power).abs() > 0.05 {
            self.power = power;
            self.credits = credits(power);
        }
    }

    /// Counts rows asked for. Returns what a credit has grown to since the last halving: up to
    /// twice, so that scores fade evenly.
    fn age(&mut self, row_count: usize) -> f32 {
        let period = u64::from(self.rule.halve_after) * self.slots.count() as u64;
        if period == 0 {
            return 1.0;
        }
        self.asked += row_count as u64;
        if TENTHS * self.asked >= period {
            self.asked = 0;
            self.halve(1);
        }
        1.0 + (TENTHS * self.asked) as f32 / period as f32
    }

    /// Halves all scores so many times.
    fn halve(&mut self, times: u8) {
        self.epoch = self.epoch.wrapping_add(times);
        self.ranks.fall(&mut self.slots.links, usize::from(times) * RANKS_PER_OCTAVE);
    }
}

fn credits(power: f32) -> Box<[f32]> {
    (0..=MISSES_MAX).map(|misses| (misses.max(1) as f32).powf(-power)).collect()
}

impl EvictionPolicy for GroupFrequency {
    fn name(&self) -> &'static str {
        match self.rule {
            CreditRule::FOR_EVER => "group-frequency-for-ever",
            CreditRule::DRIFTING => "group-frequency-drifting",
            CreditRule::FAST => "group-frequency-fast",
            CreditRule::STEEP => "group-frequency-steep",
            CreditRule::PLAIN => "frequency",
            _ => "group-frequency",
        }
    }

    keeps_slots!(u16, 0);

    fn bytes_fixed(&self, _slot_count: usize) -> usize {
        Buckets::BYTES + size_of_val(&*self.credits)
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        let misses = (group.miss_count() as usize).min(MISSES_MAX);
        self.weigh(misses);
        self.told_of = group.row_count as f32 / group.hashes.len().max(1) as f32;
        let growth = self.age(group.hashes.len());
        self.credit = growth * self.credits.get(misses).copied().unwrap_or(1.0);
    }

    fn touch(&mut self, slot: u32) {
        let old = self.slots.state(slot);
        let score = self.raised(old);
        self.slots.set_state(slot, score);
        let (from, to) = (self.rank_of(old), self.rank_of(score));
        // Most uses of rows used often change nothing.
        if from != to || self.rule.steps == Steps::Coarse {
            self.ranks.remove(&mut self.slots.links, slot, from);
            self.ranks.push(&mut self.slots.links, slot, to);
        }
    }

    fn arrive(&mut self, _hash: u64, score: u16, is_full: bool) -> Arrival {
        self.first_uses += u32::from(score == 0);
        let score = self.raised(score);
        let lowest = self.ranks.lowest().unwrap_or(0);
        let is_admitted = !is_full || self.rank_of(score) >= lowest;
        Arrival { is_admitted, ..Arrival::admitted(score) }
    }

    fn insert(&mut self, slot: u32, _hash: u64, score: u16) {
        self.place(slot, score);
    }

    fn rank(&self, score: u16) -> u16 {
        self.rank_of(score)
    }

    fn victim(&mut self) -> Option<u32> {
        self.ranks.oldest_lowest()
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let score = self.slots.state(slot);
        let rank = self.rank_of(score);
        self.ranks.remove(&mut self.slots.links, slot, rank);
        score
    }

    fn dump(&self) -> Vec<u32> {
        self.ranks.iter(&self.slots.links).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(exponent_tenths: u8, halve_after: u16, slot_count: u32) -> GroupFrequency {
        let weight = MissWeight::Tenths(exponent_tenths);
        let mut policy = GroupFrequency::new(CreditRule::fine(weight, halve_after));
        policy.add_slab(0, slot_count);
        policy
    }

    fn begin(policy: &mut GroupFrequency, row_count: u32, hit_count: u32) {
        let hashes = vec![0; row_count as usize];
        policy.begin_group(&Group { hashes: &hashes, row_count, hit_count });
    }

    #[test]
    fn credit_falls_with_the_rows_that_were_missing() {
        let mut policy = policy(20, 0, 4);
        begin(&mut policy, 4, 0);
        for slot in 0..4 {
            let arrival = policy.arrive(0, 0, false);
            assert!((policy.value(arrival.score) - 1.0 / 16.0).abs() < 1e-3);
            policy.insert(slot, 0, arrival.score);
        }
        // Three perfect hits of row 2, one of row 1: a full credit each.
        for slot in [2, 2, 1, 2] {
            begin(&mut policy, 1, 1);
            policy.touch(slot);
        }
        assert_eq!(policy.dump(), [0, 3, 1, 2]);
        assert!((policy.value(policy.slots.state(2)) - 3.0625).abs() < 0.02);
    }

    #[test]
    fn a_row_comes_in_when_its_remembered_score_is_high_enough() {
        let mut policy = policy(10, 0, 1);
        begin(&mut policy, 1, 1);
        policy.insert(0, 0, 0);
        (0..3).for_each(|_| policy.touch(0));
        let mut score = 0;
        for expected in [false, false, true] {
            let arrival = policy.arrive(1, score, true);
            assert_eq!(arrival.is_admitted, expected);
            score = arrival.score;
        }
        assert_eq!(policy.value(policy.slots.state(0)), 3.0);
        assert_eq!(policy.evict(0, 0), policy.slots.state(0));
    }

    #[test]
    fn halving_lets_scores_of_any_place_fall_alike() {
        let mut policy = policy(10, 20, 2);
        begin(&mut policy, 1, 1);
        policy.insert(0, 0, 0);
        (0..8).for_each(|_| policy.touch(0));
        let outside = policy.evict(0, 0);
        policy.insert(0, 0, outside);
        for _ in 0..2 {
            begin(&mut policy, 4, 4);
        }
        assert_eq!(policy.epoch, 2);
        // Eight credits of 1.25, a quarter of the way to the next halving, halved twice.
        assert_eq!((policy.value(outside), policy.value(policy.slots.state(0))), (2.5, 2.5));
        assert_eq!(policy.dump(), [0]);
        assert_eq!(policy.remove(0), outside);
    }

    /// The exponent goes around: long after, an old score counts for nothing.
    #[test]
    fn scores_fade_over_two_hundred_halvings() {
        let mut policy = policy(10, 10, 1);
        policy.insert(0, 0, 0);
        (0..100).for_each(|_| policy.touch(0));
        let score = policy.remove(0);
        for _ in 0..200 {
            begin(&mut policy, 1, 0);
            assert!(policy.value(score) <= 50.1);
        }
        assert!(policy.value(score) < 1e-6);
    }

    #[test]
    fn the_weight_follows_the_misses_of_the_log() {
        let mut policy = GroupFrequency::new(CreditRule::STEADY);
        policy.add_slab(0, 4);
        for (missing, power) in [(1, 0.4), (4, 1.1), (20, 1.8)] {
            (0..8000).for_each(|_| begin(&mut policy, 26, 26 - missing));
            assert!((policy.power - power).abs() < 0.06, "{} {power}", policy.power);
            assert!((policy.credits[2] - 2f32.powf(-policy.power)).abs() < 1e-6);
        }
    }

    /// Rows never seen before count half.
    #[test]
    fn the_weight_does_not_follow_first_uses_alone() {
        let power_with = |score: u16| {
            let mut policy = GroupFrequency::new(CreditRule::STEADY);
            policy.add_slab(0, 4);
            for _ in 0..8000 {
                begin(&mut policy, 26, 22);
                for hash in 0..4 {
                    policy.arrive(hash, score, true);
                }
            }
            policy.power
        };
        assert!((power_with(1) - 1.1).abs() < 0.06, "{}", power_with(1));
        assert!((power_with(0) - 0.4).abs() < 0.06, "{}", power_with(0));
    }

    #[test]
    fn credits_grow_until_they_are_halved() {
        let mut policy = policy(10, 80, 1);
        policy.insert(0, 0, 0);
        let grown: Vec<f32> = (0..8)
            .map(|_| {
                begin(&mut policy, 1, 1);
                policy.credit
            })
            .collect();
        assert_eq!(grown, [1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875, 1.0]);
        assert_eq!(policy.epoch, 1);
    }

    /// With coarse steps rows of one doubling leave by recency.
    #[test]
    fn coarse_steps_leave_the_order_to_recency() {
        let mut policy = GroupFrequency::new(CreditRule::coarse(0));
        policy.add_slab(0, 3);
        (0..3).for_each(|slot| policy.insert(slot, 0, 0));
        for slot in [0, 0, 1, 1, 1, 2, 2, 0] {
            begin(&mut policy, 1, 1);
            policy.touch(slot);
        }
        assert_eq!(policy.dump(), [1, 2, 0]);
    }

    #[test]
    fn scores_of_another_policy_are_read_in_its_own_time() {
        let (mut own, mut other) = (policy(10, 0, 3), policy(20, 10, 1));
        for slot in 0..3 {
            own.insert(slot, 0, 0);
            (0..64).for_each(|_| own.touch(slot));
        }
        other.insert(0, 0, 0);
        (0..6).for_each(|_| other.touch(0));
        begin(&mut other, 1, 1);
        let score = other.slots.state(0);
        assert_eq!(other.value(score), 3.0);
        own.follow(&other, |slot| (slot == 1).then_some(score));
        // The others were halved to about what rows have there, and leave in their order.
        let values = [0, 1, 2].map(|slot| own.value(own.slots.state(slot)));
        assert_eq!(values, [2.0, 3.0, 2.0]);
        assert_eq!((own.dump(), own.power), (vec![0, 2, 1], 2.0));
    }

    #[test]
    fn credits_add_up_on_large_scores() {
        let mut policy = policy(10, 0, 1);
        policy.insert(0, 0, 0);
        (0..20_000).for_each(|_| policy.touch(0));
        let value = policy.value(policy.slots.state(0));
        assert!((18_000.0..22_000.0).contains(&value), "{value}");
    }
}
