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
//! A new row whose table is known for rows that do not return gets less for its first use, by
//! [`ReturnRates`](super::return_rates::ReturnRates). What it lacks it lacks for good, but only the
//! first uses notice.
//!
//! By some rules rows that come in are tried first: they wait in a queue, out of the competition,
//! until as many others have come. The lowest bit of a score in a slot then says who is on trial.
//!
//! A record not read for some 240 halvings may come back with a wrong score: the exponent has
//! gone around.

use tierbed_core::env::SplitMix64;

use super::buckets::Buckets;
use super::credit_rule::{CreditRule, MissWeight, Steps};
use super::list::List;
use super::return_rates::ReturnRates;
use super::slots::{keeps_slots, Slots};
use super::{order_of_leaving, Arrival, EvictionPolicy, Group};

/// Groups with more misses get the credit of this many.
const MISSES_MAX: usize = 256;
/// Parts of a slot that [`CreditRule::halve_after`] counts.
const TENTHS: u64 = 10;
/// The exponent of 1.0 in an f32, and bits of an f32 mantissa that a score leaves out.
const EXPONENT_OF_ONE: i32 = 127;
const BITS_LEFT_OUT: u32 = 15;
/// Share of a first use in what is missing: no cache could have had the row.
const FIRST_USE_SHARE: f32 = 0.4;
/// The exponent at no misses, its rise per missing row, and where it ends.
const POWER_AT_0: f32 = -1.3;
const POWER_PER_MISS: f32 = 0.6;
const POWER_RANGE: (f32, f32) = (0.4, 1.8);
/// The exponent before anything is known.
const POWER_AT_START: f32 = 1.5;
/// Weight of one group in the running mean of misses.
const MEAN_STEP: f32 = 1.0 / 1024.0;
/// First uses are worth less in tables of few returns while fewer rows are missing per group than
/// this, and entirely so with one less: where most is there, the others are mostly new rows.
const RETURNS_MATTER_BELOW: f32 = 4.0;
/// Missing rows of a group, besides one, from which on its new rows are weighed entirely. The only
/// missing row of a group would complete it, and is worth its whole credit.
const OTHERS_MISSING: f32 = 2.0;
/// Set in the score of a slot while its row is on trial.
const ON_TRIAL: u16 = 1;
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
    /// Rows on trial, where the rule has one.
    trial: List,
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
    /// How often new rows return, where the rule asks for it.
    returns: Option<ReturnRates>,
    /// How much of that counts in the present group, `0..=1`.
    returns_power: f32,
}

impl GroupFrequency {
    /// Bytes per slot.
    pub(super) const BYTES_PER_SLOT: usize = Slots::<u16>::BYTES_PER_SLOT;
    /// Bytes whatever the slots, without rates of return.
    pub(super) const BYTES_FIXED: usize = Buckets::BYTES + (MISSES_MAX + 1) * size_of::<f32>();

    /// Builds the policy with a rule for credit.
    #[must_use]
    pub fn new(rule: CreditRule) -> Self {
        let knows_returns = rule.weight == MissWeight::ByMisses;
        let returns = knows_returns.then(ReturnRates::default);
        Self { returns, ..Self::without_returns(rule) }
    }

    /// Builds the policy for a shadow, which is told of fingerprints: tables are not told apart.
    pub(super) fn without_returns(rule: CreditRule) -> Self {
        let power = match rule.weight {
            MissWeight::Tenths(tenths) => f32::from(tenths) / 10.0,
            MissWeight::ByMisses => POWER_AT_START,
        };
        Self {
            rule,
            slots: Slots::default(),
            ranks: Buckets::default(),
            trial: List::default(),
            misses_mean: (power - POWER_AT_0) / POWER_PER_MISS,
            first_uses: 0,
            told_of: 1.0,
            power,
            credits: credits(power),
            credit: 1.0,
            epoch: 0,
            asked: 0,
            rng: SplitMix64::new(0x7469_6572),
            returns: None,
            returns_power: 0.0,
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
        let links = &self.slots.links;
        let slots: Vec<u32> = self.ranks.iter(links).chain(self.trial.iter(links)).collect();
        self.rule = other.rule;
        self.weigh_as(other);
        let mean = |policy: &Self| policy.ranks.mean() / RANKS_PER_OCTAVE as f32;
        let above = (mean(self) - mean(other)).round().clamp(0.0, OCTAVES_MAX);
        if above > 0.0 && other.ranks.lowest().is_some() {
            self.halve(above as u8);
        }
        (self.ranks, self.trial) = (Buckets::default(), List::default());
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

    /// Returns what this use of a row is worth, its first one when it has no score.
    fn credit_of(&mut self, hash: u64, score: u16) -> f32 {
        if score != 0 {
            return self.credit;
        }
        self.first_uses += 1;
        let Some(returns) = &mut self.returns else { return self.credit };
        returns.note_first(hash);
        if self.returns_power == 0.0 {
            return self.credit;
        }
        self.credit * returns.weight(hash).powf(self.returns_power)
    }

    /// Adds credit. The bits that do not fit are rounded by chance, so that small credits add up on
    /// large scores.
    fn raised(&mut self, score: u16, credit: f32) -> u16 {
        let value = (self.value(score) + credit).min(SCORE_MAX);
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

    /// Lets the row of `slot` compete by its score.
    fn place(&mut self, slot: u32, score: u16) {
        let score = self.off_trial(score);
        self.slots.set_state(slot, score);
        let rank = self.rank_of(score);
        self.ranks.push(&mut self.slots.links, slot, rank);
    }

    /// A score as it is kept of rows that are not on trial.
    fn off_trial(&self, score: u16) -> u16 {
        match self.rule.trial_hundredths {
            0 => score,
            // 0 says "never seen".
            _ => (score & !ON_TRIAL).max(ON_TRIAL + 1),
        }
    }

    fn is_on_trial(&self, score: u16) -> bool {
        self.rule.trial_hundredths > 0 && score & ON_TRIAL != 0
    }

    /// The next to leave when rows are tried: the one that has been on trial for longest, unless it
    /// is worth as much as the lowest of the others; it competes from then on.
    fn settle_trial(&mut self) -> Option<u32> {
        let share = usize::from(self.rule.trial_hundredths);
        let trial_max = (self.slots.count() * share).div_ceil(100);
        while self.trial.len() >= trial_max || self.ranks.lowest().is_none() {
            let Some(slot) = self.trial.oldest() else { break };
            let score = self.slots.state(slot);
            let is_below = self.ranks.lowest().is_none_or(|lowest| self.rank_of(score) < lowest);
            if is_below && self.trial.len() <= trial_max {
                return Some(slot);
            }
            self.trial.remove(&mut self.slots.links, slot);
            self.place(slot, score);
        }
        self.ranks.oldest_lowest()
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

    /// Notes the rows that come back, and how much their rates count in a group of so many misses.
    fn weigh_returns(&mut self, hashes: &[u64], misses: usize) {
        let Some(returns) = &mut self.returns else { return };
        hashes.iter().for_each(|&hash| returns.note_use(hash));
        let by_mean = (RETURNS_MATTER_BELOW - self.misses_mean).clamp(0.0, 1.0);
        let by_group = (misses.saturating_sub(1) as f32 / OTHERS_MISSING).min(1.0);
        let by_rule = f32::from(u8::from(self.rule.weight == MissWeight::ByMisses));
        self.returns_power = by_rule * by_mean * by_group;
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

    fn bytes_fixed(&self, slot_count: usize) -> usize {
        let returns = self.returns.as_ref().map_or(0, |_| ReturnRates::bytes_for(slot_count));
        Self::BYTES_FIXED + returns
    }

    fn slots_changed(&mut self) {
        if let Some(returns) = &mut self.returns {
            returns.resize(self.slots.count());
        }
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        let misses = (group.miss_count() as usize).min(MISSES_MAX);
        self.weigh(misses);
        self.weigh_returns(group.hashes, misses);
        self.told_of = group.row_count as f32 / group.hashes.len().max(1) as f32;
        let growth = self.age(group.hashes.len());
        self.credit = growth * self.credits.get(misses).copied().unwrap_or(1.0);
    }

    fn touch(&mut self, slot: u32) {
        let old = self.slots.state(slot);
        let score = self.raised(old, self.credit);
        if self.is_on_trial(old) {
            self.slots.set_state(slot, score | ON_TRIAL);
            return;
        }
        let score = self.off_trial(score);
        self.slots.set_state(slot, score);
        let (from, to) = (self.rank_of(old), self.rank_of(score));
        // Most uses of rows used often change nothing.
        if from != to || self.rule.steps == Steps::Coarse {
            self.ranks.remove(&mut self.slots.links, slot, from);
            self.ranks.push(&mut self.slots.links, slot, to);
        }
    }

    fn arrive(&mut self, hash: u64, score: u16, is_full: bool) -> Arrival {
        let credit = self.credit_of(hash, score);
        let score = self.raised(score, credit);
        let lowest = self.ranks.lowest().unwrap_or(0);
        let is_tried = self.rule.trial_hundredths > 0;
        let is_admitted = !is_full || is_tried || self.rank_of(score) >= lowest;
        Arrival { is_admitted, ..Arrival::admitted(score) }
    }

    fn insert(&mut self, slot: u32, _hash: u64, score: u16) {
        if self.rule.trial_hundredths == 0 {
            self.place(slot, score);
        } else {
            self.slots.set_state(slot, score | ON_TRIAL);
            self.trial.push_newest(&mut self.slots.links, slot);
        }
    }

    fn rank(&self, score: u16) -> u16 {
        self.rank_of(score)
    }

    fn victim(&mut self) -> Option<u32> {
        match self.rule.trial_hundredths {
            0 => self.ranks.oldest_lowest(),
            _ => self.settle_trial(),
        }
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let score = self.slots.state(slot);
        if self.is_on_trial(score) {
            self.trial.remove(&mut self.slots.links, slot);
        } else {
            let rank = self.rank_of(score);
            self.ranks.remove(&mut self.slots.links, slot, rank);
        }
        score
    }

    fn dump(&self) -> Vec<u32> {
        if self.rule.trial_hundredths > 0 {
            return order_of_leaving(self.clone());
        }
        self.ranks.iter(&self.slots.links).collect()
    }
}

#[cfg(test)]
mod tests;
