//! The conformance kit of eviction policies, for every [`EvictionPolicy`].
//!
//! The tests of `tierbed-cache` compile this file, too, for the policies of the product.

use std::collections::{BTreeMap, BTreeSet};

use tierbed_core::env::{mix64, SplitMix64};
use tierbed_core::{Error, Result};

use super::{EvictionPolicy, Group, SLOT_BITS};

/// Rows there are; more than slots, so that rows leave and come back.
const ROW_COUNT: u64 = 100;
/// Most rows of a group.
const GROUP_ROWS_MAX: u64 = 6;

/// Slots of slab `slab` in the check: slabs differ in size.
fn slot_count(slab: u32) -> u32 {
    3 + slab * 5
}

/// What must be true of any policy: the slabs it has and which slot holds which row.
#[derive(Default)]
struct Model {
    slabs: BTreeSet<u32>,
    rows: BTreeMap<u32, u64>,
    scores: BTreeMap<u64, u16>,
}

impl Model {
    fn empty_slot(&self) -> Option<u32> {
        let mut slots = self
            .slabs
            .iter()
            .flat_map(|&slab| (0..slot_count(slab)).map(move |at| (slab << SLOT_BITS) + at));
        slots.find(|slot| !self.rows.contains_key(slot))
    }

    fn slot_of(&self, row: u64) -> Option<u32> {
        self.rows.iter().find(|(_, &held)| held == row).map(|(&slot, _)| slot)
    }

    fn evict_one(&mut self, policy: &mut dyn EvictionPolicy) {
        let Some(slot) = policy.victim() else { return };
        if let Some(row) = self.rows.remove(&slot) {
            self.scores.insert(row, policy.evict(slot, mix64(row)));
        }
    }

    fn remove(&mut self, policy: &mut dyn EvictionPolicy, slot: u32) {
        if let Some(row) = self.rows.remove(&slot) {
            self.scores.insert(row, policy.remove(slot));
        }
    }
}

/// Runs `step_count` seeded operations against `policy` and a plain map of slots to rows.
///
/// # Errors
/// `Corruption` saying where the policy differed from the map.
pub fn check_eviction_policy(
    policy: &mut dyn EvictionPolicy,
    seed: u64,
    step_count: usize,
) -> Result<()> {
    let mut rng = SplitMix64::new(seed);
    let mut model = Model::default();
    for step in 0..step_count {
        change(policy, &mut model, &mut rng);
        let victim = policy.victim();
        let dump = policy.dump();
        let listed: BTreeSet<u32> = dump.iter().copied().collect();
        let same = listed.iter().eq(model.rows.keys()) && listed.len() == dump.len();
        if !same || victim != dump.first().copied() || policy.victim() != victim {
            return Err(Error::corruption("eviction policy differs from the model")
                .with("policy", policy.name())
                .with("step", step)
                .with("expected", format_args!("{:?}", model.rows))
                .with("found", format_args!("{dump:?}"))
                .with("victim", format_args!("{victim:?}")));
        }
    }
    Ok(())
}

fn change(policy: &mut dyn EvictionPolicy, model: &mut Model, rng: &mut SplitMix64) {
    match rng.below(16) {
        0 => {
            let slab = rng.below(5) as u32;
            if model.slabs.insert(slab) {
                policy.add_slab(slab, slot_count(slab));
            }
        }
        1 => {
            let slab = rng.below(5) as u32;
            if model.slabs.remove(&slab) {
                let held = model.rows.keys().copied().filter(|slot| slot >> SLOT_BITS == slab);
                for slot in Vec::from_iter(held) {
                    model.remove(policy, slot);
                }
                policy.drop_slab(slab);
            }
        }
        2 => {
            let at = rng.below(model.rows.len().max(1) as u64) as usize;
            if let Some(&slot) = model.rows.keys().nth(at) {
                model.remove(policy, slot);
            }
        }
        3 => model.evict_one(policy),
        _ => ask_group(policy, model, rng),
    }
}

/// Asks for a few rows, low numbers more often than high ones.
fn ask_group(policy: &mut dyn EvictionPolicy, model: &mut Model, rng: &mut SplitMix64) {
    let row_count = 1 + rng.below(GROUP_ROWS_MAX);
    let rows = (0..row_count).map(|_| {
        let bound = 1 + rng.below(ROW_COUNT);
        rng.below(bound)
    });
    let rows = Vec::from_iter(BTreeSet::from_iter(rows));
    let hashes: Vec<u64> = rows.iter().map(|&row| mix64(row)).collect();
    let hit_count = rows.iter().filter(|&&row| model.slot_of(row).is_some()).count() as u32;
    policy.begin_group(&Group { hashes: &hashes, row_count: rows.len() as u32, hit_count });
    for row in rows {
        if let Some(slot) = model.slot_of(row) {
            policy.touch(slot);
        } else {
            come_in(policy, model, row);
        }
    }
    policy.end_group();
}

fn come_in(policy: &mut dyn EvictionPolicy, model: &mut Model, row: u64) {
    // A row that never left has no score yet.
    let score = match model.scores.get(&row) {
        Some(score) => *score,
        None => 0,
    };
    let arrival = policy.arrive(mix64(row), score, model.empty_slot().is_none());
    model.scores.insert(row, arrival.score);
    if !arrival.is_admitted {
        return;
    }
    for _ in 0..arrival.flushed {
        model.evict_one(policy);
    }
    if model.empty_slot().is_none() {
        model.evict_one(policy);
    }
    if let Some(slot) = model.empty_slot() {
        policy.insert(slot, mix64(row), arrival.score);
        model.rows.insert(slot, row);
    }
}
