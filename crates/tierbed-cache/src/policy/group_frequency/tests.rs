//! Scores, credits and who comes in, by hand.

use tierbed_core::env::mix64;

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
        assert!((policy.unit.value(arrival.score) - 1.0 / 16.0).abs() < 1e-3);
        policy.insert(slot, 0, arrival.score);
    }
    // Three perfect hits of row 2, one of row 1: a full credit each.
    for slot in [2, 2, 1, 2] {
        begin(&mut policy, 1, 1);
        policy.touch(slot);
    }
    assert_eq!(policy.dump(), [0, 3, 1, 2]);
    assert!((policy.unit.value(policy.scores.get(2)) - 3.0625).abs() < 0.02);
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
    assert_eq!(policy.unit.value(policy.scores.get(0)), 3.0);
    let kept = policy.scores.get(0);
    assert_eq!(policy.evict(0, 0), kept);
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
    assert_eq!(policy.unit.halvings(), 2);
    // Eight credits of 1.25, a quarter of the way to the next halving, halved twice.
    assert_eq!((policy.unit.value(outside), policy.unit.value(policy.scores.get(0))), (2.5, 2.5));
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
        assert!(policy.unit.value(score) <= 50.1);
    }
    assert!(policy.unit.value(score) < 1e-6);
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

/// Rows never seen before count four tenths.
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
    assert_eq!(policy.unit.halvings(), 1);
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
    let score = other.scores.get(0);
    assert_eq!(other.unit.value(score), 3.0);
    own.follow(&other, |slot| (slot == 1).then_some(score));
    // The others were halved to about what rows have there, and leave in their order.
    let values = [0, 1, 2].map(|slot| own.unit.value(own.scores.get(slot)));
    assert_eq!(values, [2.0, 3.0, 2.0]);
    assert_eq!((own.dump(), own.power), (vec![0, 2, 1], 2.0));
}

#[test]
fn credits_add_up_on_large_scores() {
    let mut policy = policy(10, 0, 1);
    policy.insert(0, 0, 0);
    (0..20_000).for_each(|_| policy.touch(0));
    let value = policy.unit.value(policy.scores.get(0));
    assert!((18_000.0..22_000.0).contains(&value), "{value}");
}

/// Two tables, of which one's new rows never come back: their first use is worth less, but not
/// where the row alone was missing, nor where most of every group is.
#[test]
fn first_uses_are_weighed_by_the_returns_of_their_table() {
    let hash = |table: u64, row: u64| mix64((table << 40) | row);
    let shares_with = |missing_mostly: u32, missing_now: u32| {
        let mut policy = GroupFrequency::new(CreditRule::STEADY);
        policy.add_slab(0, 4096);
        let ask = |policy: &mut GroupFrequency, hash: u64, score: u16| {
            let hit_count = 26 - missing_mostly;
            policy.begin_group(&Group { hashes: &[hash], row_count: 26, hit_count });
            policy.arrive(hash, score, true);
            policy.end_group();
        };
        for row in 0..20_000 {
            ask(&mut policy, hash(0, row), 0);
            ask(&mut policy, hash(0, row), 1);
            ask(&mut policy, hash(1, row), 0);
            // Rows known for long.
            (0..8).for_each(|at| ask(&mut policy, hash(2, at), 1));
        }
        begin(&mut policy, 26, 26 - missing_now);
        [0, 1].map(|table| policy.credit_of(hash(table, 1 << 20), 0) / policy.credit)
    };
    let [returning, others] = shares_with(3, 3);
    assert_eq!(returning, 1.0);
    assert!(others < 0.5, "{others}");
    assert_eq!(shares_with(3, 1), [1.0, 1.0]);
    assert_eq!(shares_with(20, 3), [1.0, 1.0]);
}

/// Slots 0 to 3 have rows used four times; then rows come in one by one.
fn tried(trial_hundredths: u8, slot_count: u32) -> GroupFrequency {
    let rule = CreditRule::fine(MissWeight::Tenths(0), 0);
    let mut policy = GroupFrequency::new(CreditRule { trial_hundredths, ..rule });
    policy.add_slab(0, slot_count);
    for slot in 0..4 {
        policy.insert(slot, 0, 0);
        (0..4).for_each(|_| policy.touch(slot));
    }
    policy
}

#[test]
fn a_row_is_tried_until_as_many_others_have_come() {
    // Two of six slots are for trials.
    let mut policy = tried(30, 6);
    for slot in [4, 5] {
        let arrival = policy.arrive(0, 0, false);
        policy.insert(slot, 0, arrival.score);
    }
    // The rows used often came in by a trial, too, and have passed it.
    assert_eq!(policy.victim(), Some(4));
    for slot in [4, 5, 4, 5] {
        let arrival = policy.arrive(0, 0, true);
        assert!(arrival.is_admitted);
        assert_eq!(policy.victim(), Some(slot));
        policy.evict(slot, 0);
        policy.insert(slot, 0, arrival.score);
    }
    // Used often while on trial: it stays, and the lowest of all leaves.
    (0..8).for_each(|_| policy.touch(4));
    policy.touch(0);
    assert_eq!(policy.victim(), Some(1));
    assert_eq!(policy.dump()[..2], [1, 2]);
}

#[test]
fn rules_with_and_without_a_trial_follow_each_other() {
    let mut policy = tried(50, 8);
    (4..8).for_each(|slot| policy.insert(slot, 0, 256));
    let with_trial = policy.clone();
    let without = tried(0, 8);
    for other in [&without, &with_trial, &without] {
        policy.follow(other, |_| None);
        let mut slots = policy.dump();
        slots.sort_unstable();
        assert_eq!(slots, [0, 1, 2, 3, 4, 5, 6, 7]);
        policy.touch(5);
        assert_eq!(policy.dump().first().copied(), policy.victim());
    }
}

#[test]
fn rules_with_a_trial_keep_the_contract() {
    for (seed, trial_hundredths) in [(1, 5), (2, 40), (3, 100)] {
        let rule = CreditRule { trial_hundredths, ..CreditRule::DRIFTING };
        let mut policy = GroupFrequency::new(rule);
        crate::policy::conformance::check_eviction_policy(&mut policy, seed, 1500).unwrap();
    }
}

/// Rows that rest while nobody leaves: the exponent must not go around under them.
#[test]
fn a_row_that_rests_for_long_is_still_the_lowest() {
    let mut policy = policy(10, 10, 4);
    for slot in 0..3 {
        policy.insert(slot, 0, 256);
    }
    for halving in 0..1000 {
        begin(&mut policy, 4, 4);
        policy.touch(1);
        policy.touch(2);
        if halving % 100 == 99 {
            assert_eq!(policy.victim(), Some(0));
            assert!(policy.unit.value(policy.scores.get(0)) < 1e-3);
        }
    }
    policy.touch(0);
    assert_eq!(policy.dump().len(), 3);
}
