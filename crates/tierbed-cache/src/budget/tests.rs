use tierbed_core::env::SplitMix64;
use tierbed_core::{ErrorKind, RowId, TableId};

use super::*;
use crate::policy::PolicyKind;
use crate::shard::Visits;
use crate::sizing::RowClass;
use crate::tier::TierGroup;

const WORDS: usize = 64;

fn member(name: &str, policy: PolicyKind, floor_bytes: u64) -> MemberOptions {
    let classes = vec![RowClass { row_words: WORDS, row_count: 1 << 20 }];
    let tier = TierOptions { capacity_bytes: 0, classes, tables: Vec::new(), policy };
    MemberOptions {
        name: name.to_owned(),
        floor_bytes: Some(floor_bytes),
        tiers: vec![(tier, 1.0)],
        fixed_bytes: 0,
    }
}

/// Asks a model for a group of rows as serving does; returns the hits.
fn ask(model: &Membership, rows: &[u64]) -> u64 {
    let tier = model.tiers().next().unwrap();
    let mut visits = Visits::default();
    let keys: Vec<RowKey> = rows.iter().map(|&r| RowKey::new(TableId(0), RowId(r))).collect();
    let words: Vec<[f32; WORDS]> = rows.iter().map(|&row| [row as f32; WORDS]).collect();
    let (mut hit_count, mut slots) = (0, vec![u32::MAX; keys.len()]);
    tier.peek_many(&keys, &mut visits, |at, slot, row| {
        assert_eq!(row, words[at]);
        slots[at] = slot;
        hit_count += 1;
    });
    let group = TierGroup {
        keys: &keys,
        row_words: &vec![WORDS; keys.len()],
        slots: &slots,
        row_count: keys.len() as u32,
        hit_count: hit_count as u32,
    };
    tier.settle(&group, &mut visits, |at| Some(&words[at][..]), |_, _| ()).unwrap();
    model.note(keys.iter().copied(), hit_count);
    hit_count
}

/// Four rows below `row_count`, each once.
fn draw(rng: &mut SplitMix64, row_count: u64) -> Vec<u64> {
    let mut rows: Vec<u64> = (0..4).map(|_| rng.below(row_count)).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

fn check(budget: &TierBudget) {
    let stats = budget.stats();
    assert!(stats.used_bytes <= stats.limit_bytes, "{stats:?}");
    let capacity: u64 = stats.members.iter().map(|member| member.capacity_bytes).sum();
    assert!(capacity <= stats.limit_bytes, "{stats:?}");
    let is_all_given = capacity + UNITS as u64 > stats.limit_bytes;
    assert!(is_all_given || stats.members.is_empty(), "nothing is held back: {stats:?}");
    for member in &stats.members {
        assert!(member.used_bytes <= member.capacity_bytes, "{member:?}");
        assert!(member.capacity_bytes >= member.floor_bytes, "{member:?}");
    }
}

fn capacities(budget: &TierBudget) -> Vec<u64> {
    budget.stats().members.iter().map(|member| member.capacity_bytes).collect()
}

/// Models of all policies come, ask and go; nobody ever has too much, and all is given back.
#[test]
fn models_that_come_and_go_never_take_more_than_the_budget() {
    for (seed, policy) in (1..).zip(PolicyKind::ALL) {
        let fixed_bytes = policy.build().bytes_fixed(1 << 14) as u64;
        let limit_bytes = (6 << 20) + 64 * fixed_bytes;
        let budget = TierBudget::with_epoch(limit_bytes, 50).unwrap();
        let mut rng = SplitMix64::new(seed);
        let mut models: Vec<(Membership, u64)> = Vec::new();
        for _ in 0..100 {
            match rng.below(12) {
                0 if models.len() < 4 => {
                    let floor_bytes = limit_bytes / (6 + rng.below(10));
                    let joined = budget.join(member("model", policy, floor_bytes));
                    models.push((joined.unwrap(), 100 + rng.below(40_000)));
                }
                1 if !models.is_empty() => {
                    let at = rng.below(models.len() as u64) as usize;
                    models.swap_remove(at);
                }
                _ => {
                    for (model, row_count) in &models {
                        for _ in 0..10 {
                            ask(model, &draw(&mut rng, *row_count));
                        }
                    }
                }
            }
            check(&budget);
        }
        models.clear();
        assert_eq!((budget.stats().used_bytes, budget.stats().members.len()), (0, 0));
    }
}

#[test]
fn threads_never_take_more_than_the_budget() {
    let budget = TierBudget::with_epoch(4 << 20, 100).unwrap();
    let policy = PolicyKind::from_name("group_frequency").unwrap();
    let models: Vec<Membership> =
        (0..3).map(|_| budget.join(member("model", policy, 600 << 10)).unwrap()).collect();
    std::thread::scope(|scope| {
        for (at, model) in models.iter().enumerate() {
            for thread in 0..2 {
                scope.spawn(move || {
                    let mut rng = SplitMix64::new(100 * at as u64 + thread);
                    for round in 0..3000 {
                        // Who needs much changes over time.
                        let is_greedy = (round / 1000) as usize == at;
                        let row_count = if is_greedy { 30_000 } else { 500 };
                        ask(model, &draw(&mut rng, row_count));
                    }
                });
            }
        }
        for _ in 0..200 {
            check(&budget);
        }
    });
    check(&budget);
    let stats = budget.stats();
    assert!(stats.division_count > 1, "{stats:?}");
    assert!(stats.members.iter().all(|m| m.rows_asked >= 2 * 3000 && m.rows_hit > 0));
}

#[test]
fn memory_follows_demand_and_comes_back_when_a_model_closes() {
    for name in ["lru", "group_frequency", "ev_lfu", "s3_fifo"] {
        let policy = PolicyKind::from_name(name).unwrap();
        let budget = TierBudget::with_epoch(4 << 20, 250).unwrap();
        let first = budget.join(member("first", policy, 512 << 10)).unwrap();
        let alone = capacities(&budget)[0];
        assert!(alone > 7 << 19, "one model has all: {alone}");
        let second = budget.join(member("second", policy, 512 << 10)).unwrap();
        let mut rng = SplitMix64::new(3);
        // 300 rows fit a floor; 11,000 rows of 256 bytes take nearly all of the budget, once they
        // have been asked for.
        let mut run = |few: &Membership, many: &Membership| {
            for _ in 0..10_000 {
                ask(few, &draw(&mut rng, 300));
                ask(many, &draw(&mut rng, 11_000));
            }
            check(&budget);
        };
        run(&first, &second);
        let held = capacities(&budget);
        assert!(held[1] > 2 * held[0], "{name}: {held:?}");
        run(&second, &first);
        let held = capacities(&budget);
        assert!(held[0] > 2 * held[1], "{name}, after the shift: {held:?}");
        drop(first);
        assert_eq!(capacities(&budget), [alone], "{name}: what was given back is used");
        drop(second);
        assert_eq!(budget.stats().used_bytes, 0);
    }
}

#[test]
fn wrong_budgets_and_floors_are_refused() {
    let refused = |budget: &Arc<TierBudget>, floor_bytes| {
        let error = budget.join(member("model", PolicyKind::Lru, floor_bytes)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        error.to_string()
    };
    assert!(TierBudget::new(0).is_err());
    assert!(TierBudget::with_epoch(1 << 20, 0).is_err());
    let budget = TierBudget::new(8 << 20).unwrap();
    assert!(refused(&budget, 100).contains("minimum_bytes"));
    assert!(refused(&budget, 9 << 20).contains("limit_bytes: 8388608"));
    let first = budget.join(member("first", PolicyKind::Lru, 5 << 20)).unwrap();
    assert!(refused(&budget, 4 << 20).contains("close a model"));
    assert_eq!(budget.stats().members.len(), 1);
    drop(first);
    assert!(budget.join(member("second", PolicyKind::Lru, 4 << 20)).is_ok());
    let strange = MemberOptions {
        tiers: vec![(
            TierOptions {
                capacity_bytes: 0,
                classes: vec![RowClass { row_words: 0, row_count: 1 }],
                tables: Vec::new(),
                policy: PolicyKind::Lru,
            },
            1.0,
        )],
        ..member("strange", PolicyKind::Lru, 4 << 20)
    };
    assert_eq!(budget.join(strange).unwrap_err().kind(), ErrorKind::Invalid);
}
