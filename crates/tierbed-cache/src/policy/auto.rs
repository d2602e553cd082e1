//! Online choice of an eviction rule: several rules run on a sample of the rows, the one that did
//! best lately keeps the rows here.
//!
//! ```text
//! group ─▶ own scores, by the leader's rule: rows kept
//!      └─▶ rows in the sample ─▶ a shadow per rule: hits, perfect hits ─▶ standing, end of epoch:
//!                                                                        choice of the leader
//! ```
//!
//! The rules are those of [`GroupFrequency`]: from one that forgets within a turnover, which is as
//! good as recency, to one that hardly forgets, and from one that counts uses to one that cares for
//! nearly complete groups alone; three try rows first, which suits bursts and rows that come once.
//! They differ in what a use adds, in how scores fade and in which rows compete, not in what a
//! score is. A new leader finds the cache warm: rows in the sample take over the scores it gave
//! them, the others keep theirs, all halved until both are alike.
//!
//! A shadow has at most [`SAMPLE_SLOTS`] slots: in a small cache all rows are in the sample, in a
//! large one a half, a quarter, and so on. Rows outside it are, for all shadows, as they are in the
//! cache; what shadows are judged by is what the rows in the sample would change. That is a part of
//! what all rows would, and depends on which rows were chosen: a new leader's lead is of that part,
//! and more than chance.

#![expect(clippy::indexing_slicing, reason = "the leader is one of the runners")]

use super::shadow::{fingerprint, index_hash, SampledGroup, Shadow};
use super::slots::SlotMap;
use super::{Arrival, CreditRule, EvictionPolicy, Group, GroupFrequency, MissWeight, ScoreFrame};

/// Groups of an epoch.
const EPOCH_GROUPS: u32 = 100;
/// What a standing keeps from one epoch to the next.
const DECAY: f64 = 0.95;
/// Another shadow leads when it is better by this part of the leader's standing, in a cache whose
/// rows are all in the sample; shadows of a half of the rows differ by half as much.
const LEAD: f64 = 0.005;
/// And by so many standard errors of that, which come from the choice of the sample.
const ERRORS: f64 = 3.0;
/// Errors are known from about so many epochs on.
const FREEDOM_MIN: f64 = 4.0;
/// A row that is a hit counts as this part of a row of a perfect hit.
const HIT_SHARE: f64 = 1.0 / 16.0;
/// Most slots of a shadow.
const SAMPLE_SLOTS: usize = 8192;

/// The rules that are tried; the first leads until something is known.
const RULES: [CreditRule; 10] = [
    CreditRule::STEADY,
    CreditRule::STEEP,
    CreditRule::fine(MissWeight::Tenths(15), 2000),
    CreditRule::DRIFTING.with_trial(),
    CreditRule::FAST,
    CreditRule::fine(MissWeight::Tenths(10), 10),
    CreditRule::fine(MissWeight::Tenths(0), 400).with_trial(),
    CreditRule::fine(MissWeight::Tenths(0), 100).with_trial(),
    CreditRule::fine(MissWeight::Tenths(0), 70),
    CreditRule::fine(MissWeight::Tenths(0), 10),
];

#[derive(Debug)]
struct Runner {
    shadow: Shadow,
    /// Points of the present epoch.
    points: f64,
    /// Points of all epochs, fading.
    standing: f64,
    /// Squares of what an epoch's points were above or below the leader's, fading.
    squares: f64,
}

/// Follows the best of its shadows.
#[derive(Debug)]
pub struct Auto {
    own: GroupFrequency,
    runners: Vec<Runner>,
    leader: usize,
    groups: u32,
    /// Epochs that make up standings, by their weights, and by the squares of these.
    weight: f64,
    squared_weight: f64,
    /// A row is in the sample when these bits of its fingerprint are 0.
    sample_mask: u32,
    /// Fingerprint of the row in each slot.
    fingerprints: SlotMap<u32>,
    /// Fingerprints of the present group's rows in the sample.
    sampled: Vec<u32>,
    /// Hashes of those, as shadows look for them.
    hashes: Vec<u64>,
    row_count: u32,
    /// Rows of the present group that were missing, and those of them in the sample.
    missing: u32,
    missing_sampled: u32,
}

impl Default for Auto {
    fn default() -> Self {
        let runner =
            |rule| Runner { shadow: Shadow::new(rule), points: 0.0, standing: 0.0, squares: 0.0 };
        Self {
            own: GroupFrequency::new(CreditRule::STEADY),
            runners: RULES.map(runner).into(),
            leader: 0,
            groups: 0,
            weight: 0.0,
            squared_weight: 0.0,
            sample_mask: 0,
            fingerprints: SlotMap::default(),
            sampled: Vec::new(),
            hashes: Vec::new(),
            row_count: 0,
            missing: 0,
            missing_sampled: 0,
        }
    }
}

/// Bits of a fingerprint that decide whether its row is in the sample.
fn sample_bits(slot_count: usize) -> u32 {
    slot_count.div_ceil(SAMPLE_SLOTS).next_power_of_two().ilog2()
}

impl Auto {
    /// Compares standings; the rows here follow the new leader.
    fn end_epoch(&mut self) {
        self.groups = 0;
        self.weight = DECAY * self.weight + 1.0;
        self.squared_weight = DECAY * DECAY * self.squared_weight + 1.0;
        // Before any standing moves: an epoch's difference is to the leader of that epoch.
        let leader_points = self.runners[self.leader].points;
        for runner in &mut self.runners {
            let above = runner.points - leader_points;
            runner.squares = DECAY * runner.squares + above * above;
            runner.standing = DECAY * runner.standing + std::mem::take(&mut runner.points);
        }
        if let Some(best) = self.better_than_leader() {
            self.leader = best;
            self.follow();
        }
        self.own.weigh_as(self.runners[self.leader].shadow.policy());
    }

    /// Finds the runner that is certainly better than the leader, the most so.
    ///
    /// A difference of standings is a sum over epochs, and its error follows from how much the
    /// epochs differ. Only the choice of the sample makes it one: where all rows are in it, a
    /// shadow has the hits that its rule would have had.
    fn better_than_leader(&self) -> Option<usize> {
        let leader = &self.runners[self.leader];
        let sampled = 1.0 / f64::from(self.sample_mask + 1);
        // Rows outside the sample are alike for all shadows and dilute what they differ by.
        let least = LEAD * sampled * leader.standing;
        // Epochs, by weight, beyond what the mean of them takes.
        let freedom = self.weight - self.squared_weight / self.weight;
        let surely_above = |runner: &Runner| {
            let above = runner.standing - leader.standing;
            let unlike = (runner.squares - above * above / self.weight).max(0.0);
            // The standard error of a weighted sum. A sample of all rows leaves no doubt, hence the
            // last factor.
            let error = (self.squared_weight * unlike / freedom * (1.0 - sampled)).sqrt();
            match self.sample_mask {
                _ if above <= least => None,
                0 => Some(above),
                _ => (freedom > FREEDOM_MIN).then_some(above - ERRORS * error),
            }
        };
        let above = self.runners.iter().map(|runner| surely_above(runner).unwrap_or(0.0));
        let best = above.enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
        best.filter(|&(_, above)| above > 0.0).map(|(at, _)| at)
    }

    /// Takes rule and scores of the leader over.
    fn follow(&mut self) {
        let leader = &self.runners[self.leader];
        let (fingerprints, mask) = (&self.fingerprints, self.sample_mask);
        self.own.follow(leader.shadow.policy(), |slot| {
            let row = fingerprints.get(slot);
            (row & mask == 0).then(|| leader.shadow.score(row))
        });
    }
}

impl EvictionPolicy for Auto {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn bytes_per_slot(&self) -> usize {
        self.own.bytes_per_slot() + size_of::<u32>()
    }

    fn bytes_per_slab(&self) -> usize {
        self.own.bytes_per_slab() + SlotMap::<u32>::BYTES_PER_SLAB
    }

    fn bytes_fixed(&self, slot_count: usize) -> usize {
        let sampled = slot_count.min(SAMPLE_SLOTS);
        let shadows = RULES.iter().map(|&rule| Shadow::bytes_for(sampled, rule));
        // Any rule may lead.
        let trial = RULES.iter().map(|rule| rule.trial_hundredths).max().unwrap_or(0);
        self.own.bytes_fixed_with(slot_count, trial) + shadows.sum::<usize>()
    }

    fn add_slab(&mut self, slab: u32, slot_count: u32) {
        self.own.add_slab(slab, slot_count);
        self.fingerprints.add_slab(slab, slot_count);
        self.slots_changed();
    }

    fn drop_slab(&mut self, slab: u32) {
        self.own.drop_slab(slab);
        self.fingerprints.drop_slab(slab);
        self.slots_changed();
    }

    fn slots_changed(&mut self) {
        let slot_count = self.own.slot_count();
        let bits = sample_bits(slot_count);
        let mask = (1 << bits) - 1;
        if mask != self.sample_mask {
            self.sample_mask = mask;
            // Other rows are in the sample now: what a shadow holds is not what its rule would.
            for (runner, rule) in self.runners.iter_mut().zip(RULES) {
                runner.shadow = Shadow::new(rule);
            }
        }
        for runner in &mut self.runners {
            runner.shadow.resize((slot_count >> bits) as u32);
        }
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        self.own.begin_group(group);
        self.row_count = group.row_count;
        (self.missing, self.missing_sampled) = (group.miss_count(), 0);
        self.sampled.clear();
        let mask = self.sample_mask;
        let rows = group.hashes.iter().map(|&hash| fingerprint(hash));
        self.sampled.extend(rows.filter(|row| row & mask == 0));
    }

    fn end_group(&mut self) {
        self.own.end_group();
        self.groups += 1;
        let outside = self.row_count.saturating_sub(self.sampled.len() as u32);
        let missing_outside = self.missing.saturating_sub(self.missing_sampled).min(outside);
        self.hashes.clear();
        self.hashes.extend(self.sampled.iter().map(|&row| index_hash(row)));
        let group = SampledGroup {
            rows: &self.sampled,
            hashes: &self.hashes,
            row_count: self.row_count,
            missing_outside,
        };
        let words = self.runners.iter().map(|runner| runner.shadow.first_words(&self.hashes));
        std::hint::black_box(words.fold(0, |all, word| all ^ word));
        let sampled = f64::from(self.row_count - outside.min(self.row_count));
        // A group without a sampled row is the same for all shadows: it would only add noise.
        for runner in self.runners.iter_mut().filter(|_| !group.rows.is_empty()) {
            let missing = runner.shadow.ask(&group);
            let is_perfect = missing + missing_outside == 0;
            let perfect = if is_perfect { f64::from(self.row_count) } else { 0.0 };
            runner.points += perfect + HIT_SHARE * (sampled - f64::from(missing));
        }
        if self.groups >= EPOCH_GROUPS {
            self.end_epoch();
        }
    }

    fn touch(&mut self, slot: u32) {
        self.own.touch(slot);
    }

    fn arrive(&mut self, hash: u64, score: u16, is_full: bool) -> Arrival {
        self.missing_sampled += u32::from(fingerprint(hash) & self.sample_mask == 0);
        self.own.arrive(hash, score, is_full)
    }

    fn insert(&mut self, slot: u32, hash: u64, score: u16) {
        self.fingerprints.set(slot, fingerprint(hash));
        self.own.insert(slot, hash, score);
    }

    fn score_frame(&self) -> ScoreFrame {
        self.own.score_frame()
    }

    fn victim(&mut self) -> Option<u32> {
        self.own.victim()
    }

    fn remove(&mut self, slot: u32) -> u16 {
        self.own.remove(slot)
    }

    fn dump(&self) -> Vec<u32> {
        self.own.dump()
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::{mix64, SplitMix64};

    use super::*;
    use crate::{PolicyKind, ReplayCache};

    /// Asks for rows that are all missing and come in while there is room.
    fn ask(auto: &mut Auto, rows: &[u64], next_slot: &mut u32) {
        let hashes: Vec<u64> = rows.iter().map(|&row| mix64(row)).collect();
        auto.begin_group(&Group { hashes: &hashes, row_count: rows.len() as u32, hit_count: 0 });
        for &hash in &hashes {
            let arrival = auto.arrive(hash, 0, false);
            auto.insert(*next_slot, hash, arrival.score);
            *next_slot += 1;
        }
        auto.end_group();
    }

    #[test]
    fn a_small_cache_is_all_sample_and_a_large_one_in_part() {
        for (slot_count, sampled_in) in [(8192, 1), (8193, 2), (16_384, 2), (60_000, 8)] {
            let mut auto = Auto::default();
            for (slab, first) in (0..slot_count).step_by(4096).enumerate() {
                auto.add_slab(slab as u32, (slot_count - first).min(4096) as u32);
            }
            let mut next_slot = 0;
            (0..2000).for_each(|group| ask(&mut auto, &[2 * group, 2 * group + 1], &mut next_slot));
            for runner in &auto.runners {
                let held = (0..4000).filter(|&row| runner.shadow.holds(fingerprint(mix64(row))));
                let share = held.count() as f64 * f64::from(sampled_in) / 4000.0;
                assert!((share - 1.0).abs() < 0.2, "{slot_count} {share}");
            }
        }
    }

    /// A sample's shadows differ by less, and by chance: a rule leads when it is ahead by more than
    /// that, and by half as much where the sample has a half of the rows.
    #[test]
    fn a_rule_leads_when_it_is_ahead_by_more_than_chance() {
        let leads_after = |slot_count: u32, above: &dyn Fn(u32) -> f64| {
            let mut auto = Auto::default();
            for (slab, first) in (0..slot_count).step_by(4096).enumerate() {
                auto.add_slab(slab as u32, (slot_count - first).min(4096));
            }
            for epoch in 0..60 {
                for (at, runner) in auto.runners.iter_mut().enumerate() {
                    runner.points = 1000.0 + if at == 4 { above(epoch) } else { 0.0 };
                }
                auto.end_epoch();
            }
            auto.leader == 4
        };
        assert!(leads_after(8192, &|_| 6.0) && !leads_after(8192, &|_| 4.0));
        assert!(leads_after(16_384, &|_| 4.0) && !leads_after(16_384, &|_| 2.0));
        // As much on average, but sometimes a lot and sometimes the contrary.
        let by_chance = |epoch: u32| if epoch.is_multiple_of(3) { 130.0 } else { -55.0 };
        assert!(!leads_after(16_384, &by_chance));
        assert!(leads_after(8192, &by_chance));
    }

    /// The new leader has seen row 0 used often, the cache's own scores say the contrary.
    #[test]
    fn a_new_leader_finds_its_scores_in_the_cache() {
        let mut auto = Auto::default();
        auto.add_slab(0, 3);
        let mut next_slot = 0;
        ask(&mut auto, &[0, 1, 2], &mut next_slot);
        (0..18).for_each(|at| auto.touch(1 + at % 2));
        assert_eq!(auto.dump(), [0, 1, 2]);
        let rows = [0, 0, 2].map(|row| fingerprint(mix64(row)));
        for row in rows {
            let (rows, hashes) = ([row], [index_hash(row)]);
            let group =
                SampledGroup { rows: &rows, hashes: &hashes, row_count: 1, missing_outside: 0 };
            auto.runners[3].shadow.ask(&group);
        }
        auto.leader = 3;
        auto.follow();
        assert_eq!(auto.dump(), [1, 2, 0]);
        assert_eq!(auto.own.rule(), RULES[3]);
    }

    /// First a stable favourite set with much noise, then a set that moves on: no fixed policy
    /// is best for both, and the leader must change.
    #[test]
    fn follows_what_does_best() {
        let mut cache = ReplayCache::new(PolicyKind::Auto, 40_000, 100).unwrap();
        let mut rng = SplitMix64::new(3);
        let mut drift = 0;
        let mut hits = [0, 0];
        for group in 0..24_000u32 {
            let favourite = rng.below(90) as u32;
            let row = if group < 12_000 {
                // Every second row is noise: recency would be flooded.
                if group % 2 == 0 {
                    favourite
                } else {
                    1000 + rng.below(39_000) as u32
                }
            } else {
                drift += 1;
                1000 + (drift / 4 + rng.below(60) as u32) % 39_000
            };
            let hit = cache.ask(&[row]).unwrap();
            if group % 12_000 >= 6_000 {
                hits[(group / 12_000) as usize] += hit;
            }
        }
        assert!(hits[0] > 2700, "{hits:?} of 3000 favourites");
        assert!(hits[1] > 4400, "{hits:?} of 6000, a quarter of them new");
    }
}
