//! Group-aware frequency: uses of a row, counted most where it alone was missing.
//!
//! Every use of a row adds `1 / m^a` to its score, `m` the rows that were missing in its group:
//! a group with `m` misses needs `m` rows to become a perfect hit, so each gets a part of the
//! credit. The row of the lowest score leaves; a row comes in when its score is not below that.
//! Scores outlive the stay: they go with the record and come back with it on the next miss.
//! From time to time all scores are halved, so that rows that were popular once are evicted.
//!
//! Halving touches no row: the unit of credit doubles instead, and on the way to it credits grow,
//! so that of two rows used once in one period the later one has more. See [`ScoreUnit`].
//!
//! No slot is in a list: a slot has its score, two bytes, and nothing else. How many slots have
//! which rank is counted, so that the lowest is known, and who that is a sweep over the scores
//! finds, for many at once: see [`Victims`].
//!
//! A new row whose table is known for rows that do not return gets less for its first use, by
//! [`ReturnRates`](super::return_rates::ReturnRates). What it lacks it lacks for good, but only the
//! first uses notice.
//!
//! By some rules rows that come in are tried first: they wait in a queue, out of the competition,
//! until as many others have come. The lowest bit of a score in a slot then marks rows on trial.

#![expect(
    clippy::indexing_slicing,
    reason = "misses are cut to MISSES_MAX, up to which there are credits"
)]

use std::collections::VecDeque;

use tierbed_core::env::SplitMix64;

use super::credit_rule::{CreditRule, MissWeight, ON_TRIAL};
use super::rank_counts::RankCounts;
use super::return_rates::ReturnRates;
use super::score::{ScoreUnit, OCTAVES_MAX, RANKS_PER_OCTAVE};
use super::slots::SlotMap;
use super::victims::{LowScores, Victims};
use super::{order_of_leaving, Arrival, EvictionPolicy, Group, ScoreFrame};

/// Groups with more misses get the credit of this many.
const MISSES_MAX: usize = 256;
/// Parts of a slot that [`CreditRule::halve_after`] counts.
const TENTHS: u64 = 10;
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

/// Slots by group-weighted frequency.
#[derive(Debug, Clone)]
pub struct GroupFrequency {
    rule: CreditRule,
    /// The score of the row in each slot, 0 where there is none.
    scores: SlotMap<u16>,
    unit: ScoreUnit,
    /// Halvings since all scores were refreshed.
    halvings: u8,
    ranks: RankCounts,
    victims: Victims,
    /// What the last sweep looked for: up to these bits of a score.
    low: u16,
    /// Slots of rows on trial, where the rule has one, in the order of their coming.
    trial: VecDeque<u32>,
    /// What a use is worth by missing rows, `[MISSES_MAX + 1]`.
    credits: Box<[f32]>,
    /// The exponent that `credits` were made with.
    power: f32,
    /// Rows missing per group, first uses in part, a running mean.
    misses_mean: f32,
    /// First uses in the present group.
    first_uses: u32,
    /// Rows of the whole group per row of it that is reported to this policy.
    told_of: f32,
    /// What a use of a row of the present group is worth.
    credit: f32,
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
    pub(super) const BYTES_PER_SLOT: usize = size_of::<u16>();
    /// Bytes whatever the slots, without rates of return.
    const BYTES_FIXED: usize = RankCounts::BYTES + (MISSES_MAX + 1) * size_of::<f32>();

    /// Returns the bytes beside those of each slot, without rates of return, by rules whose trials
    /// have at most so many hundredths of the slots.
    pub(super) fn bytes_beside(slot_count: usize, trial_hundredths: u8) -> usize {
        let trial = trial_max(slot_count, trial_hundredths) * size_of::<u32>();
        Self::BYTES_FIXED + Victims::bytes_for(slot_count) + trial
    }

    /// Builds the policy with a rule for credit.
    #[must_use]
    pub fn new(rule: CreditRule) -> Self {
        let knows_returns = rule.weight == MissWeight::ByMisses;
        let returns = knows_returns.then(ReturnRates::default);
        Self { returns, ..Self::without_returns(rule) }
    }

    /// Builds the policy for a shadow, which sees fingerprints only: all tables count as one.
    pub(super) fn without_returns(rule: CreditRule) -> Self {
        let power = match rule.weight {
            MissWeight::Tenths(tenths) => f32::from(tenths) / 10.0,
            MissWeight::ByMisses => POWER_AT_START,
        };
        Self {
            rule,
            scores: SlotMap::default(),
            unit: ScoreUnit::default(),
            halvings: 0,
            ranks: RankCounts::default(),
            victims: Victims::default(),
            low: ScoreUnit::BITS_OF_ONE,
            trial: VecDeque::new(),
            misses_mean: (power - POWER_AT_0) / POWER_PER_MISS,
            first_uses: 0,
            told_of: 1.0,
            power,
            credits: credits(power),
            credit: 1.0,
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
    /// here are halved until they are alike, so that formerly popular rows do not block new ones;
    /// then the rows whose slots have a `score` there take it over.
    pub(super) fn follow(&mut self, other: &Self, score: impl Fn(u32) -> Option<u16>) {
        self.rule = other.rule;
        self.weigh_as(other);
        let mean = |policy: &Self| policy.ranks.mean() / RANKS_PER_OCTAVE as f32;
        let above = (mean(self) - mean(other)).round().clamp(0.0, OCTAVES_MAX);
        if above > 0.0 && other.ranks.lowest().is_some() {
            self.halve(above as u8);
        }
        self.ranks = RankCounts::default();
        self.victims.clear();
        self.trial = VecDeque::with_capacity(self.trial_max());
        let (rule, unit) = (self.rule, self.unit);
        for (first, block) in self.scores.blocks_mut() {
            for (slot, held) in (first..).zip(block).filter(|(_, held)| **held != 0) {
                let known = score(slot).map(|score| unit.converted(score, other.unit));
                *held = rule.off_trial(unit.held(known.unwrap_or(*held)));
                self.ranks.add(unit.rank(*held));
            }
        }
    }

    /// As [`bytes_fixed`](EvictionPolicy::bytes_fixed), by rules whose trials have at most so many
    /// hundredths of the slots.
    pub(super) fn bytes_fixed_with(&self, slot_count: usize, trial_hundredths: u8) -> usize {
        let returns = self.returns.as_ref().map_or(0, |_| ReturnRates::bytes_for(slot_count));
        Self::bytes_beside(slot_count, trial_hundredths) + returns
    }

    /// Returns the slots that have a row.
    pub(super) fn occupied(&self) -> impl Iterator<Item = u32> + '_ {
        let slots = self.scores.blocks().flat_map(|(first, block)| (first..).zip(block));
        slots.filter(|(_, score)| **score != 0).map(|(slot, _)| slot)
    }

    /// Returns the rule.
    #[cfg(test)]
    pub(super) fn rule(&self) -> CreditRule {
        self.rule
    }

    /// Returns the score of the row in `slot`.
    pub(super) fn score(&self, slot: u32) -> u16 {
        self.scores.get(slot)
    }

    /// Returns the slots there are, occupied or not.
    pub(super) fn slot_count(&self) -> usize {
        self.scores.slot_count()
    }

    /// Returns what this use of a row is worth, its first one when it has no score.
    fn credit_of(&mut self, hash: u64, score: u16) -> f32 {
        if score != 0 {
            return self.credit;
        }
        self.first_uses += 1;
        // Noted whether it counts today or not: rates must be known when it does.
        let Some(returns) = &mut self.returns else { return self.credit };
        returns.note_first(hash);
        if self.returns_power == 0.0 {
            return self.credit;
        }
        self.credit * returns.weight(hash).powf(self.returns_power)
    }

    /// Adds credit.
    fn raised(&mut self, score: u16, credit: f32) -> u16 {
        self.unit.raised(score, credit, self.rng.next_u64() as u32)
    }

    fn rank_of(&self, score: u16) -> u16 {
        self.unit.rank(score)
    }

    /// Lets the row of `slot` compete by its score.
    fn place(&mut self, slot: u32, score: u16) {
        let score = self.rule.off_trial(self.unit.held(score));
        self.scores.set(slot, score);
        self.ranks.add(self.rank_of(score));
    }

    fn is_on_trial(&self, score: u16) -> bool {
        self.rule.trial_hundredths > 0 && score & ON_TRIAL != 0
    }

    /// Returns the most rows on trial.
    fn trial_max(&self) -> usize {
        trial_max(self.scores.slot_count(), self.rule.trial_hundredths)
    }

    /// Lets the row that has been on trial for longest compete.
    fn end_trial(&mut self) {
        if let Some(slot) = self.trial.pop_front() {
            self.place(slot, self.scores.get(slot));
        }
    }

    /// The next to leave when rows are tried: the one that has been on trial for longest, unless it
    /// is worth as much as the lowest of the others; it competes from then on.
    fn settle_trial(&mut self) -> Option<u32> {
        let trial_max = self.trial_max();
        // Also when no row competes: a victim is due, and only rows on trial are left.
        while self.trial.len() >= trial_max || self.ranks.is_empty() {
            let Some(&slot) = self.trial.front() else { break };
            let rank = self.rank_of(self.scores.get(slot));
            let is_below = self.ranks.lowest().is_none_or(|lowest| rank < lowest);
            // A queue that is too long, after the pool shrank, is shortened first.
            if is_below && self.trial.len() <= trial_max {
                return Some(slot);
            }
            self.end_trial();
        }
        self.lowest_slot()
    }

    /// A slot of the lowest scores of those that compete.
    fn lowest_slot(&mut self) -> Option<u32> {
        if self.ranks.is_empty() {
            return None;
        }
        let mut low = self.low_scores();
        if let Some(slot) = self.victims.next(&self.scores, low) {
            return Some(slot);
        }
        // The queue is used up. Ranks are counted, so it is known up to which one a whole batch
        // lies: the sweep over all slots then needs no sorting, and pays for many victims.
        let (rank, below) = self.ranks.rank_of_lowest(self.victims.batch());
        low.highest = ScoreUnit::bits_up_to(rank);
        let sure = (below > 0).then(|| ScoreUnit::bits_up_to(rank - 1));
        self.low = low.highest;
        self.victims.sweep(&self.scores, low, sure, below);
        self.victims.next(&self.scores, low)
    }

    /// Tells whether a score is below that of the row that leaves next.
    fn is_below_next(&mut self, score: u16) -> bool {
        let next = self.lowest_slot().map(|slot| self.scores.get(slot));
        next.is_some_and(|next| self.rank_of(score) < self.rank_of(next))
    }

    /// Who was found by the last sweep and still has as low a score.
    fn low_scores(&self) -> LowScores {
        let clear = if self.rule.trial_hundredths > 0 { ON_TRIAL } else { 0 };
        LowScores { unit: u16::from(self.unit.halvings()) << 8, highest: self.low, clear }
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
        // The mean moves with every group; the table of powers is made anew only when it shows.
        if (power - self.power).abs() > 0.05 {
            self.power = power;
            self.credits = credits(power);
        }
    }

    /// Notes the rows that come back, and how much their rates count in a group of so many misses.
    fn weigh_returns(&mut self, hashes: &[u64], misses: usize) {
        let Some(returns) = &mut self.returns else { return };
        hashes.iter().for_each(|&hash| returns.note_use(hash));
        // Rates of return punish new rows, so they fade in where new rows are what is missing.
        let by_mean = (RETURNS_MATTER_BELOW - self.misses_mean).clamp(0.0, 1.0);
        let by_group = (misses.saturating_sub(1) as f32 / OTHERS_MISSING).min(1.0);
        let by_rule = f32::from(u8::from(self.rule.weight == MissWeight::ByMisses));
        self.returns_power = by_rule * by_mean * by_group;
    }

    /// Counts rows asked for. Returns what a credit has grown to since the last halving: up to
    /// twice, so that scores fade evenly.
    fn age(&mut self, row_count: usize) -> f32 {
        let period = u64::from(self.rule.halve_after) * self.scores.slot_count() as u64;
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
        self.unit.halve(times);
        // The bits of all scores mean half as much now; counts by rank move along.
        self.ranks.fall(usize::from(times) * RANKS_PER_OCTAVE);
        self.low = self.low.saturating_sub(u16::from(times) << 8).max(ScoreUnit::bits_up_to(0));
        self.halvings = self.halvings.saturating_add(times);
        // Before an exponent goes around: a score at rest would come back as a large one.
        if self.halvings >= ScoreUnit::REFRESH_AFTER {
            self.halvings = 0;
            let scores = self.scores.blocks_mut().flat_map(|(_, block)| block);
            scores.filter(|score| **score != 0).for_each(|score| *score = self.unit.held(*score));
        }
    }
}

/// Most rows on trial in a pool of `slot_count` slots.
fn trial_max(slot_count: usize, trial_hundredths: u8) -> usize {
    (slot_count * usize::from(trial_hundredths)).div_ceil(100)
}

fn credits(power: f32) -> Box<[f32]> {
    (0..=MISSES_MAX).map(|misses| (misses.max(1) as f32).powf(-power)).collect()
}

/// Returns the name of the policy with this rule.
pub(super) fn group_frequency_name(rule: CreditRule) -> &'static str {
    match rule {
        CreditRule::FOR_EVER => "group_frequency_for_ever",
        CreditRule::DRIFTING => "group_frequency_drifting",
        CreditRule::FAST => "group_frequency_fast",
        CreditRule::STEEP => "group_frequency_steep",
        CreditRule::PLAIN => "frequency",
        _ => "group_frequency",
    }
}

impl EvictionPolicy for GroupFrequency {
    fn name(&self) -> &'static str {
        group_frequency_name(self.rule)
    }

    fn bytes_per_slot(&self) -> usize {
        Self::BYTES_PER_SLOT
    }

    fn bytes_per_slab(&self) -> usize {
        SlotMap::<u16>::BYTES_PER_SLAB
    }

    fn bytes_fixed(&self, slot_count: usize) -> usize {
        self.bytes_fixed_with(slot_count, self.rule.trial_hundredths)
    }

    fn add_slab(&mut self, slab: u32, slot_count: u32) {
        self.scores.add_slab(slab, slot_count);
        self.slots_changed();
    }

    fn drop_slab(&mut self, slab: u32) {
        self.scores.drop_slab(slab);
        self.slots_changed();
    }

    fn slots_changed(&mut self) {
        let slot_count = self.scores.slot_count();
        self.victims.resize(slot_count);
        self.trial.reserve_exact(self.trial_max().saturating_sub(self.trial.len()));
        if let Some(returns) = &mut self.returns {
            returns.resize(slot_count);
        }
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        let misses = (group.miss_count() as usize).min(MISSES_MAX);
        self.weigh(misses);
        self.weigh_returns(group.hashes, misses);
        self.told_of = group.row_count as f32 / group.hashes.len().max(1) as f32;
        let growth = self.age(group.hashes.len());
        self.credit = growth * self.credits[misses];
    }

    fn touch(&mut self, slot: u32) {
        let old = self.scores.get(slot);
        let score = self.raised(old, self.credit);
        if self.is_on_trial(old) {
            self.scores.set(slot, score | ON_TRIAL);
            return;
        }
        let score = self.rule.off_trial(score);
        self.scores.set(slot, score);
        let (from, to) = (self.rank_of(old), self.rank_of(score));
        // Most uses of rows used often change nothing.
        if from != to {
            self.ranks.remove(from);
            self.ranks.add(to);
        }
    }

    fn arrive(&mut self, hash: u64, score: u16, is_full: bool) -> Arrival {
        let credit = self.credit_of(hash, score);
        let score = self.raised(score, credit);
        // Where rows are tried, the trial decides; its first score says too little.
        let is_tried = self.rule.trial_hundredths > 0;
        let is_admitted = !is_full || is_tried || !self.is_below_next(score);
        Arrival { is_admitted, ..Arrival::admitted(score) }
    }

    fn insert(&mut self, slot: u32, _hash: u64, score: u16) {
        if self.rule.trial_hundredths == 0 {
            self.place(slot, score);
            return;
        }
        self.scores.set(slot, self.unit.held(score) | ON_TRIAL);
        if self.trial.len() >= self.trial_max() {
            self.end_trial();
        }
        self.trial.push_back(slot);
    }

    fn score_frame(&self) -> ScoreFrame {
        ScoreFrame::around(((self.low >> 8) as u8).wrapping_add(self.unit.halvings()))
    }

    fn victim(&mut self) -> Option<u32> {
        match self.rule.trial_hundredths {
            0 => self.lowest_slot(),
            _ => self.settle_trial(),
        }
    }

    fn remove(&mut self, slot: u32) -> u16 {
        let score = self.scores.get(slot);
        self.scores.set(slot, 0);
        self.victims.forget(slot);
        if !self.is_on_trial(score) {
            self.ranks.remove(self.rank_of(score));
        } else if let Some(at) = self.trial.iter().position(|&tried| tried == slot) {
            self.trial.remove(at);
        }
        score
    }

    fn dump(&self) -> Vec<u32> {
        order_of_leaving(self.clone())
    }
}

#[cfg(test)]
mod tests;
