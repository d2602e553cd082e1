use super::*;
use crate::policy::PolicyKind;
use tierbed_core::{RowId, TableId};

fn key(row: u64) -> RowKey {
    RowKey::new(TableId(3), RowId(row))
}

#[test]
fn threads_find_only_what_was_stored() {
    let classes = vec![RowClass { row_words: 8, row_count: 1 << 20 }];
    let options = TierOptions {
        capacity_bytes: 16 << 20,
        classes,
        tables: Vec::new(),
        policy: PolicyKind::default(),
    };
    let tier = ShardedTier::new(&options, 8).unwrap();
    assert_eq!(tier.shard_count, 8);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let tier = &tier;
            scope.spawn(move || {
                let mut visits = Visits::default();
                for round in 0..50 {
                    let keys: Vec<_> =
                        (0..500).map(|at| key((round * 377 + thread * 11 + at) % 4000)).collect();
                    let rows: Vec<_> = keys.iter().map(|key| [key.row.0 as f32; 8]).collect();
                    tier.get_many(&keys, &mut visits, |at, _, row| assert_eq!(row, rows[at]));
                    tier.insert_many(&keys, &mut visits, |at| Some(&rows[at][..])).unwrap();
                }
            });
        }
    });
    let stats = tier.stats();
    assert_eq!(stats.hits + stats.misses, 4 * 50 * 500);
    assert_eq!((stats.row_count, stats.evictions), (4000, 0));
    assert!(stats.data_bytes + stats.metadata_bytes <= options.capacity_bytes);
}

#[test]
fn a_lock_that_another_has_is_not_waited_for() {
    let options = TierOptions {
        capacity_bytes: 16 << 20,
        classes: vec![RowClass { row_words: 2, row_count: 1 << 20 }],
        tables: Vec::new(),
        policy: PolicyKind::Lru,
    };
    let tier = ShardedTier::new(&options, 8).unwrap();
    let keys: Vec<_> = (0..100).map(key).collect();
    let (mut visits, mut own) = (Visits::default(), Visits::default());
    tier.insert_many(&keys, &mut visits, |_| Some(&[1.0, 2.0])).unwrap();
    let mut found = 0;
    tier.arrange(&keys[..1], &mut visits, |_| true);
    for (_held, _) in tier.shards.by_lock(&visits) {
        assert!(!tier.try_peek_many(&keys, &mut own, |_, _, _| found += 1));
    }
    assert!(found < 100, "the row behind the lock that is held");
    found = 0;
    assert!(tier.try_peek_many(&keys, &mut own, |_, _, _| found += 1));
    assert_eq!((found, tier.stats().hits), (100, 0));
}

#[test]
fn rows_that_were_peeked_at_are_used_as_those_that_were_got() {
    let options = TierOptions {
        capacity_bytes: 600 << 10,
        classes: vec![RowClass { row_words: 512, row_count: 1 << 20 }],
        tables: Vec::new(),
        policy: PolicyKind::Lru,
    };
    let [got, peeked] = [(); 2].map(|()| ShardedTier::new(&options, 1).unwrap());
    let mut visits = Visits::default();
    for round in 0..2000 {
        let asked = [key(round * 7 % 300), key(round * round % 50), key(round % 11)];
        let mut hits = [Vec::new(), Vec::new()];
        got.get_many(&asked, &mut visits, |at, _, _| hits[0].push(asked[at]));
        let mut slots = Vec::new();
        let is_whole = peeked.try_peek_many(&asked, &mut visits, |at, slot, _| {
            hits[1].push(asked[at]);
            slots.push(slot);
        });
        assert!(is_whole && hits[0] == hits[1], "round {round}");
        peeked.use_again(&hits[1], &slots, &mut visits);
        for tier in [&got, &peeked] {
            tier.insert_many(&asked, &mut visits, |_| Some(&[0.5; 512])).unwrap();
        }
    }
    assert_eq!(got.stats().hits, peeked.stats().hits);
    assert!(got.stats().evictions > 500);
}

#[test]
fn a_small_budget_is_one_shard() {
    let classes = vec![RowClass { row_words: 8, row_count: 100 }];
    let options = TierOptions {
        capacity_bytes: 1 << 20,
        classes,
        tables: vec![100; 4],
        policy: PolicyKind::Lru,
    };
    assert_eq!(ShardedTier::new(&options, 8).unwrap().shard_count, 1);
}
