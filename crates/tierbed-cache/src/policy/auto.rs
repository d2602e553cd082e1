//! Which policy suits this traffic? Seven shadows are told of every group; the rows here are those
//! of the shadow that has done best lately.
//!
//! ```text
//! group ─▶ every shadow: hits, perfect hits ─▶ standing of each, end of epoch: who leads?
//!      └─▶ rows here:  kept     in the leader's shadow
//!                      strays   no longer there: they leave first, and are hits until then
//! ```
//!
//! Shadows hold fingerprints and no rows, but as many slots as there are here, so this policy
//! takes some hundred bytes per row: for rows of a few hundred bytes it is cheaper to replay a
//! log and to choose.

use super::car::TwoClocks;
use super::ev_car::BestGroup;
use super::list::List;
use super::shadow::{fingerprint, index_hash, Shadow};
use super::slots::{SlotMap, Slots};
use super::{Arrival, CreditRule, EvictionPolicy, Group, GroupFrequency, Lru, S3Fifo};
use crate::index::RobinHoodIndex;

/// Groups of an epoch.
const EPOCH_GROUPS: u32 = 500;
/// What a standing keeps from one epoch to the next.
const DECAY: f64 = 0.6;
/// Another shadow leads when its standing is this much better.
const LEAD: f64 = 1.01;
/// A row that is a hit counts as this part of a row of a perfect hit.
const HIT_SHARE: f64 = 1.0 / 8.0;

#[derive(Debug)]
struct Runner {
    shadow: Shadow,
    /// Points of the present epoch.
    points: f64,
    /// Points of all epochs, fading.
    standing: f64,
}

/// Follows the best of its shadows.
#[derive(Debug)]
pub struct Auto {
    runners: Vec<Runner>,
    leader: usize,
    groups: u32,
    /// Whether the row is a stray.
    slots: Slots<bool>,
    fingerprints: SlotMap<u32>,
    index: RobinHoodIndex,
    kept: List,
    strays: List,
    /// Slots of each slab.
    slabs: Vec<u32>,
}

impl Default for Auto {
    fn default() -> Self {
        let by_score = |rule| Shadow::new(Box::new(GroupFrequency::new(rule)), true);
        let shadows = [
            by_score(CreditRule::STEADY),
            by_score(CreditRule::DRIFTING),
            by_score(CreditRule::FAST),
            by_score(CreditRule::STEEP),
            Shadow::new(Box::new(S3Fifo::default()), false),
            Shadow::new(Box::new(TwoClocks::<BestGroup>::default()), false),
            Shadow::new(Box::new(Lru::default()), false),
        ];
        let runners = shadows.map(|shadow| Runner { shadow, points: 0.0, standing: 0.0 });
        Self {
            runners: runners.into(),
            leader: 0,
            groups: 0,
            slots: Slots::default(),
            fingerprints: SlotMap::default(),
            index: RobinHoodIndex::default(),
            kept: List::default(),
            strays: List::default(),
            slabs: Vec::new(),
        }
    }
}

impl Auto {
    /// Moves the row of `slot` to the list it belongs to now.
    fn file(&mut self, slot: u32, is_stray: bool) {
        let was_stray = self.slots.state(slot);
        if was_stray == is_stray {
            return;
        }
        let links = &mut self.slots.links;
        let (from, to) = if is_stray {
            (&mut self.kept, &mut self.strays)
        } else {
            (&mut self.strays, &mut self.kept)
        };
        from.remove(links, slot);
        to.push_newest(links, slot);
        self.slots.set_state(slot, is_stray);
    }

    fn slot_of(&self, row: u32) -> Option<u32> {
        self.index.find(index_hash(row), |slot| self.fingerprints.get(slot) == row)
    }

    fn leader_holds(&self, row: u32) -> bool {
        let hash = u64::from(row) << 32;
        self.runners.get(self.leader).is_some_and(|runner| runner.shadow.holds(hash))
    }

    /// Makes strays of the rows that have left the leader's shadow.
    fn follow(&mut self) {
        let Some(runner) = self.runners.get_mut(self.leader) else { return };
        let left = runner.shadow.take_left();
        for &row in &left {
            if let Some(slot) = self.slot_of(row) {
                let is_stray = !self.leader_holds(row);
                self.file(slot, is_stray);
            }
        }
        if let Some(runner) = self.runners.get_mut(self.leader) {
            runner.shadow.give_back(left);
        }
    }

    /// Compares standings; rows that the new leader does not hold become strays.
    fn end_epoch(&mut self) {
        self.groups = 0;
        for runner in &mut self.runners {
            runner.standing = DECAY * runner.standing + std::mem::take(&mut runner.points);
        }
        let standing = |at: usize| self.runners.get(at).map_or(0.0, |runner| runner.standing);
        let best = (0..self.runners.len()).max_by(|&a, &b| standing(a).total_cmp(&standing(b)));
        let Some(best) = best.filter(|&best| standing(best) > standing(self.leader) * LEAD) else {
            return;
        };
        self.leader = best;
        let held: Vec<u32> = self.dump();
        for slot in held {
            let is_stray = !self.leader_holds(self.fingerprints.get(slot));
            self.file(slot, is_stray);
        }
    }

    fn refit_index(&mut self) {
        self.index =
            RobinHoodIndex::with_capacity(self.slots.count(), self.fingerprints.slots_end());
        for slot in self.dump() {
            let _ = self.index.insert(index_hash(self.fingerprints.get(slot)), slot);
        }
    }
}

impl EvictionPolicy for Auto {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn bytes_per_slot(&self) -> usize {
        let shadows: usize = self.runners.iter().map(|r| r.shadow.bytes_per_slot()).sum();
        // A fingerprint and a place in the index.
        Slots::<bool>::BYTES_PER_SLOT + 4 + 5 + shadows
    }

    fn bytes_per_slab(&self) -> usize {
        let shadows: usize = self.runners.iter().map(|r| r.shadow.bytes_per_slab()).sum();
        Slots::<bool>::BYTES_PER_SLAB + SlotMap::<u32>::BYTES_PER_SLAB + 4 + shadows
    }

    fn bytes_fixed(&self) -> usize {
        self.runners.iter().map(|runner| runner.shadow.bytes_fixed()).sum()
    }

    fn add_slab(&mut self, slab: u32, slot_count: u32) {
        self.slots.add_slab(slab, slot_count);
        self.fingerprints.add_slab(slab, slot_count);
        self.slabs.resize(self.slabs.len().max(slab as usize + 1), 0);
        if let Some(slots) = self.slabs.get_mut(slab as usize) {
            *slots = slot_count;
        }
        self.runners.iter_mut().for_each(|runner| runner.shadow.add_slab(slab, slot_count));
        self.refit_index();
    }

    fn drop_slab(&mut self, slab: u32) {
        let slot_count = self.slabs.get(slab as usize).copied().unwrap_or(0);
        self.runners.iter_mut().for_each(|runner| runner.shadow.drop_slab(slab, slot_count));
        self.slots.drop_slab(slab);
        self.fingerprints.drop_slab(slab);
        self.refit_index();
        for slot in self.dump() {
            let is_stray = !self.leader_holds(self.fingerprints.get(slot));
            self.file(slot, is_stray);
        }
    }

    fn begin_group(&mut self, group: &Group<'_>) {
        let row_count = group.hashes.len();
        for runner in &mut self.runners {
            let hit_count = runner.shadow.ask(group.hashes);
            let perfect = if hit_count == row_count { row_count as f64 } else { 0.0 };
            runner.points += perfect + HIT_SHARE * hit_count as f64;
        }
        self.follow();
        self.groups += 1;
        if self.groups >= EPOCH_GROUPS {
            self.end_epoch();
        }
    }

    fn touch(&mut self, slot: u32) {
        let is_stray = !self.leader_holds(self.fingerprints.get(slot));
        self.file(slot, is_stray);
        let links = &mut self.slots.links;
        let list = if is_stray { &mut self.strays } else { &mut self.kept };
        list.refresh(links, slot);
    }

    fn arrive(&mut self, hash: u64, score: u16, _is_full: bool) -> Arrival {
        // Without slots the shadows hold nothing: the first row brings the first ones.
        let is_admitted = self.slots.count() == 0 || self.leader_holds(fingerprint(hash));
        Arrival { is_admitted, ..Arrival::admitted(score) }
    }

    fn insert(&mut self, slot: u32, hash: u64, _score: u16) {
        let row = fingerprint(hash);
        self.fingerprints.set(slot, row);
        let _ = self.index.insert(index_hash(row), slot);
        let is_stray = !self.leader_holds(row);
        self.slots.set_state(slot, is_stray);
        let list = if is_stray { &mut self.strays } else { &mut self.kept };
        list.push_newest(&mut self.slots.links, slot);
    }

    fn victim(&mut self) -> Option<u32> {
        self.strays.oldest().or(self.kept.oldest())
    }

    fn remove(&mut self, slot: u32) -> u16 {
        self.index.remove(index_hash(self.fingerprints.get(slot)), slot);
        let is_stray = self.slots.state(slot);
        let links = &mut self.slots.links;
        let list = if is_stray { &mut self.strays } else { &mut self.kept };
        list.remove(links, slot);
        0
    }

    fn dump(&self) -> Vec<u32> {
        let links = &self.slots.links;
        self.strays.iter(links).chain(self.kept.iter(links)).collect()
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::mix64;

    use super::*;
    use crate::{PolicyKind, ReplayCache};

    fn ask(auto: &mut Auto, rows: &[u64]) {
        let hashes: Vec<u64> = rows.iter().map(|&row| mix64(row)).collect();
        let row_count = rows.len() as u32;
        auto.begin_group(&Group { hashes: &hashes, row_count, hit_count: 0 });
    }

    #[test]
    fn rows_the_leader_gives_up_become_strays_and_leave_first() {
        let mut auto = Auto { leader: 6, ..Auto::default() };
        auto.add_slab(0, 3);
        ask(&mut auto, &[0, 1, 2]);
        for slot in 0..3 {
            assert!(auto.arrive(mix64(u64::from(slot)), 0, false).is_admitted);
            auto.insert(slot, mix64(u64::from(slot)), 0);
        }
        // The shadow of LRU gives row 0 up for row 3.
        ask(&mut auto, &[1, 3]);
        auto.touch(1);
        assert_eq!(auto.dump(), [0, 2, 1]);
        assert_eq!((auto.strays.len(), auto.victim()), (1, Some(0)));
        // Row 0 is asked for before it left: no stray any more, row 2 is one now.
        ask(&mut auto, &[0]);
        auto.touch(0);
        assert_eq!(auto.dump(), [2, 1, 0]);
        assert!(!auto.arrive(mix64(9), 0, true).is_admitted);
    }

    /// First a stable favourite set with much noise, then a set that moves on: no fixed policy
    /// is best for both, and the leader must change.
    #[test]
    fn follows_what_does_best() {
        let mut cache = ReplayCache::new(PolicyKind::Auto, 40_000, 100).unwrap();
        let mut rng = tierbed_core::env::SplitMix64::new(3);
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
