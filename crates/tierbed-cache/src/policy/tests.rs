//! Every policy keeps the contract, and the kit notices one that does not.

use super::conformance::check_eviction_policy;
use super::*;

#[test]
fn every_policy_keeps_the_contract() {
    for kind in PolicyKind::ALL {
        for seed in 0..8 {
            check_eviction_policy(kind.build().as_mut(), seed, 1500).unwrap();
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
    fn touch(&mut self, _slot: u32) {}
    fn insert(&mut self, slot: u32, _hash: u64, _score: u16) {
        self.0.push(slot);
    }
    fn victim(&mut self) -> Option<u32> {
        self.0.first().copied()
    }
    fn remove(&mut self, _slot: u32) -> u16 {
        0
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
