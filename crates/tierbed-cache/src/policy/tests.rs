//! Every policy keeps the contract, and the kit notices one that does not.

use std::collections::{BTreeMap, BTreeSet};

use tierbed_core::env::SplitMix64;

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

/// Asks `policy` for groups of skewed rows through a plain map, and returns a digest of all rows
/// that left, in their order, and of the scores they left with.
fn digest_of_evictions(policy: &mut dyn EvictionPolicy) -> u64 {
    const SLOTS: u32 = 1000;
    policy.add_slab(0, SLOTS);
    let (mut rng, mut digest) = (SplitMix64::new(7), 0u64);
    let (mut slots, mut rows) = (BTreeMap::new(), vec![None; SLOTS as usize]);
    let mut scores: BTreeMap<u64, u16> = BTreeMap::new();
    let mut free: Vec<u32> = (0..SLOTS).collect();
    for _ in 0..4000 {
        let draw = |_| {
            let below = 1 + rng.below(100);
            rng.below(below) * rng.below(below)
        };
        let group: BTreeSet<u64> = (0..20).map(draw).collect();
        let hashes: Vec<u64> = group.iter().map(|&row| mix64(row)).collect();
        let hit_count = group.iter().filter(|row| slots.contains_key(*row)).count() as u32;
        policy.begin_group(&Group { hashes: &hashes, row_count: hashes.len() as u32, hit_count });
        for row in group {
            if let Some(&slot) = slots.get(&row) {
                policy.touch(slot);
                continue;
            }
            let is_full = free.is_empty();
            let known = scores.get(&row).copied().unwrap_or(0);
            let arrival = policy.arrive(mix64(row), known, is_full);
            scores.insert(row, arrival.score);
            for _ in 0..arrival.flushed.max(u32::from(is_full && arrival.is_admitted)) {
                let victim = policy.victim().unwrap();
                let left: u64 = rows[victim as usize].take().unwrap();
                let score = policy.evict(victim, mix64(left));
                digest = mix64(digest ^ mix64(left) ^ u64::from(score));
                scores.insert(left, score);
                slots.remove(&left);
                free.push(victim);
            }
            if arrival.is_admitted {
                let slot = free.pop().unwrap();
                (rows[slot as usize], _) = (Some(row), slots.insert(row, slot));
                policy.insert(slot, mix64(row), arrival.score);
            }
        }
        policy.end_group();
    }
    digest
}

/// Digests of the code as it was before any of it was made faster. Policies whose credits are
/// powers are left out: the last bit of those is up to the machine's library.
const EVICTIONS: [(&str, u64); 7] = [
    ("lru", 10_709_978_860_506_029_273),
    ("s3_fifo", 7_936_238_350_406_648_243),
    ("ev_arc", 6_690_358_225_468_736_454),
    ("ev_car", 14_346_865_328_103_537_749),
    ("ev_lfu", 7_348_544_670_644_986_060),
    ("ev_lfu_20", 4_052_656_474_767_191_950),
    ("frequency", 18_010_017_282_930_719_310),
];

#[test]
fn the_same_rows_leave_in_the_same_order_as_ever() {
    for (name, expected) in EVICTIONS {
        let mut policy = PolicyKind::from_name(name).unwrap().build();
        assert_eq!(digest_of_evictions(policy.as_mut()), expected, "{name}");
    }
}
