//! Does a policy keep the contract? The conformance kit, for every [`EvictionPolicy`].

use std::collections::BTreeSet;

use tierbed_core::env::{mix64, SplitMix64};
use tierbed_core::{Error, Result};

use crate::policy::{EvictionPolicy, SLOT_BITS};

/// Slots of slab `slab` in the check: slabs differ in size.
fn slot_count(slab: u32) -> u32 {
    3 + slab * 5
}

/// What must be true of any policy: the slabs it has and the slots that are occupied.
#[derive(Default)]
struct Model {
    slabs: BTreeSet<u32>,
    occupied: BTreeSet<u32>,
}

impl Model {
    fn empty_slots(&self) -> Vec<u32> {
        let slots = self
            .slabs
            .iter()
            .flat_map(|&slab| (0..slot_count(slab)).map(move |at| (slab << SLOT_BITS) + at));
        slots.filter(|slot| !self.occupied.contains(slot)).collect()
    }
}

/// Runs `step_count` seeded operations against `policy` and a plain set of slots.
///
/// # Errors
/// `Corruption` saying where the policy differed from the set.
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
        let same = listed == model.occupied && listed.len() == dump.len();
        if !same || victim != dump.first().copied() || policy.victim() != victim {
            return Err(Error::corruption("eviction policy differs from the model")
                .with("policy", policy.name())
                .with("step", step)
                .with("expected", format_args!("{:?}", model.occupied))
                .with("found", format_args!("{dump:?}"))
                .with("victim", format_args!("{victim:?}")));
        }
    }
    Ok(())
}

fn change(policy: &mut dyn EvictionPolicy, model: &mut Model, rng: &mut SplitMix64) {
    let hash = |slot: u32| mix64(u64::from(slot));
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
                let leaving: Vec<u32> = model
                    .occupied
                    .iter()
                    .copied()
                    .filter(|slot| slot >> SLOT_BITS == slab)
                    .collect();
                for slot in leaving {
                    policy.remove(slot, hash(slot));
                    model.occupied.remove(&slot);
                }
                policy.drop_slab(slab);
            }
        }
        2..=6 => {
            if let Some(slot) = pick(&model.empty_slots(), rng) {
                policy.insert(slot, hash(slot));
                model.occupied.insert(slot);
            }
        }
        7..=11 => {
            if let Some(slot) = pick(&Vec::from_iter(model.occupied.iter().copied()), rng) {
                policy.touch(slot);
            }
        }
        12 => {
            if let Some(slot) = pick(&Vec::from_iter(model.occupied.iter().copied()), rng) {
                policy.remove(slot, hash(slot));
                model.occupied.remove(&slot);
            }
        }
        _ => {
            if let Some(slot) = policy.victim() {
                policy.remove(slot, hash(slot));
                model.occupied.remove(&slot);
            }
        }
    }
}

fn pick(slots: &[u32], rng: &mut SplitMix64) -> Option<u32> {
    if slots.is_empty() {
        return None;
    }
    slots.get(rng.below(slots.len() as u64) as usize).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyKind;

    #[test]
    fn every_policy_keeps_the_contract() {
        for kind in PolicyKind::ALL {
            for seed in 0..8 {
                check_eviction_policy(kind.build().as_mut(), seed, 2000).unwrap();
            }
        }
    }

    /// A policy that forgets removals: the kit must notice.
    #[derive(Debug, Default)]
    struct Forgetful(Vec<u32>);

    impl EvictionPolicy for Forgetful {
        fn name(&self) -> &'static str {
            "forgetful"
        }
        fn bytes_per_slot(&self) -> usize {
            4
        }
        fn bytes_per_slab(&self) -> usize {
            0
        }
        fn add_slab(&mut self, _slab: u32, _slot_count: u32) {}
        fn drop_slab(&mut self, _slab: u32) {}
        fn insert(&mut self, slot: u32, _hash: u64) {
            self.0.push(slot);
        }
        fn touch(&mut self, _slot: u32) {}
        fn remove(&mut self, _slot: u32, _hash: u64) {}
        fn victim(&mut self) -> Option<u32> {
            self.0.first().copied()
        }
        fn dump(&self) -> Vec<u32> {
            self.0.clone()
        }
    }

    #[test]
    fn the_kit_catches_a_broken_policy() {
        let error = check_eviction_policy(&mut Forgetful::default(), 1, 200).unwrap_err();
        assert!(error.to_string().contains("forgetful"), "{error}");
    }
}
