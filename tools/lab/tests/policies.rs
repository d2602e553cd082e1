//! Policies to compare with keep the contract, stay within bytes and do what a replay does.

use tierbed_cache::{PolicyKind, ReplayCache, RowClass, RowTier, TierOptions};
use tierbed_core::env::SplitMix64;
use tierbed_core::{RowId, RowKey, TableId};
use tierbed_lab::policy::check_eviction_policy;
use tierbed_lab::register_policies;

/// The kinds of this crate.
fn kinds() -> Vec<PolicyKind> {
    register_policies();
    register_policies();
    let all = PolicyKind::registered();
    let others: Vec<_> = all.into_iter().filter(|kind| !PolicyKind::ALL.contains(kind)).collect();
    assert_eq!(others.len(), 7, "each is registered once");
    others
}

#[test]
fn every_policy_is_found_by_its_name() {
    for kind in kinds() {
        assert_eq!(kind.build().name(), kind.name(), "a policy says what it is");
        assert_eq!(PolicyKind::from_name(kind.name()).unwrap(), kind);
        assert!(!kind.knows_groups() && !kind.remembers_scores());
    }
    assert_eq!(PolicyKind::from_name("W-TinyLFU").unwrap().name(), "w_tiny_lfu");
}

#[test]
fn every_policy_keeps_the_contract() {
    for kind in kinds() {
        for seed in 0..8 {
            check_eviction_policy(kind.build().as_mut(), seed, 1500).unwrap();
        }
    }
}

#[test]
fn every_policy_hits_everything_that_fits() {
    for kind in kinds() {
        let mut cache = ReplayCache::new(kind, 10, 10).unwrap();
        (0..20).for_each(|_| assert!(cache.ask(&[0, 1, 2, 3, 4]).is_ok()));
        let counts = cache.counts();
        assert_eq!((counts.perfect_hits, counts.hits), (19, 95), "{kind:?}");
    }
}

#[test]
fn every_policy_keeps_few_bytes_per_row() {
    for kind in kinds() {
        // LIRS: the orders of stack and queue, and times of rows and ghosts.
        let most = if kind.name() == "lirs" { 34 } else { 16 };
        let policy = kind.build();
        assert!(policy.bytes_per_slot() <= most, "{}: {}", kind.name(), policy.bytes_per_slot());
    }
}

/// Same policy, same rows: a tier has the hits of the replay, within its bytes, and never a wrong
/// row.
#[test]
fn tiers_have_the_hits_of_a_replay() {
    const ROWS: u64 = 20_000;
    for kind in kinds() {
        let classes = vec![RowClass { row_words: 4, row_count: ROWS }];
        let capacity_bytes = (256 << 10) + kind.build().bytes_fixed(ROWS as usize) as u64;
        let options = TierOptions { capacity_bytes, classes, tables: vec![ROWS], policy: kind };
        let mut tier = RowTier::new(&options).unwrap();
        let capacity_rows = options.rows_max().unwrap() as usize;
        let mut replay = ReplayCache::new(kind, ROWS as usize, capacity_rows).unwrap();
        let mut rng = SplitMix64::new(5);
        for _ in 0..24_000 {
            let row = (ROWS as f64 * rng.unit_f64().powi(3)) as u64;
            let key = RowKey::new(TableId(0), RowId(row));
            replay.ask(&[row as u32]).unwrap();
            match tier.get(key) {
                Some(found) => assert_eq!(found, [row as f32; 4], "{kind:?}"),
                None => drop(tier.insert(key, &[row as f32; 4]).unwrap()),
            }
            let stats = tier.stats();
            assert!(stats.data_bytes + stats.metadata_bytes <= options.capacity_bytes);
        }
        let (hits, replayed) = (tier.stats().hits, replay.counts().hits);
        assert!(hits.abs_diff(replayed) <= replayed / 50, "{kind:?}: {hits}, replay {replayed}");
    }
}
