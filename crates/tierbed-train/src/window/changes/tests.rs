//! Sets of changed rows, and the memory they have.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]

use tierbed_core::env::SplitMix64;
use tierbed_core::{RowId, RowKey};

use super::*;

fn write(changes: &mut Changes, rows: std::ops::Range<u64>) {
    let key = |row| RowKey::new(TableId(1), RowId(row));
    let rows: Vec<_> = rows.map(|row| RowWrite { key: key(row), record: &[] }).collect();
    changes.note(&rows);
}

fn rows_since(changes: &mut Changes, identity: &str) -> Option<Vec<u64>> {
    match changes.rows_since(&[identity.to_owned()]) {
        Since::Known(rows) => {
            Some(rows.get(&1).into_iter().flat_map(RoaringTreemap::iter).collect())
        }
        Since::Unknown(_) => None,
    }
}

#[test]
fn a_delta_against_any_publish_has_all_rows_since() {
    let (mut changes, budget) = (Changes::default(), Budget::new(1 << 20));
    write(&mut changes, 0..9);
    assert_eq!(changes.stats(), ChangeStats::default(), "nothing was published");
    changes.published("a", Room::of(&budget));
    write(&mut changes, 3..5);
    changes.published("b", Room::of(&budget));
    write(&mut changes, 4..7);
    assert_eq!(rows_since(&mut changes, "a").unwrap(), [3, 4, 5, 6]);
    assert_eq!(rows_since(&mut changes, "b").unwrap(), [4, 5, 6]);
    assert_eq!(rows_since(&mut changes, "c"), None);
    assert!(changes.rows(0, TableId(0)).is_empty());
}

#[test]
fn the_oldest_and_the_newest_publishes_stay_known() {
    let (mut changes, budget) = (Changes::default(), Budget::new(1 << 20));
    for at in 0..20 {
        changes.published(&format!("p{at}"), Room::of(&budget));
        write(&mut changes, at..at + 1);
    }
    assert_eq!(changes.stats().base_count, SETS_MAX as u64);
    let all: Vec<u64> = (0..20).collect();
    assert_eq!(rows_since(&mut changes, "p0").unwrap(), all);
    for at in 13..20 {
        assert_eq!(rows_since(&mut changes, &format!("p{at}")).unwrap(), all[at..]);
    }
    assert!((1..13).all(|at| rows_since(&mut changes, &format!("p{at}")).is_none()));
}

#[test]
fn sets_stay_in_their_share_of_the_budget() {
    let (mut changes, budget) = (Changes::default(), Budget::new(64 << 10));
    changes.published("a", Room::of(&budget));
    changes.published("b", Room::of(&budget));
    assert_eq!(budget.free_bytes(), (64 << 10) - (2 << 10) - (1 << 10), "sets, rows that wait");
    // Every other row: a list of them has two bytes for each.
    for row in (0..8192).step_by(2) {
        write(&mut changes, row..row + 1);
    }
    assert!(rows_since(&mut changes, "b").is_none());
    assert_eq!((changes.stats().sets_dropped, changes.why_unknown()), (2, DROPPED));
    // A budget without room notes nothing.
    let full = budget.reserve("training", budget.free_bytes() - 100).unwrap();
    let mut changes = Changes::default();
    changes.published("a", Room::of(&budget));
    assert!(rows_since(&mut changes, "a").is_none() && changes.stats().sets_dropped == 1);
    drop(full);
}

#[test]
fn rows_are_known_whether_they_wait_or_not() {
    for limit_bytes in [1 << 20, 64 << 20] {
        let (mut changes, budget) = (Changes::default(), Budget::new(limit_bytes));
        changes.published("a", Room::of(&budget));
        let (mut wanted, mut rng) = (BTreeSet::new(), SplitMix64::new(limit_bytes));
        for write in 0..300 {
            let mut rows: Vec<u64> = (0..1 + rng.below(40)).map(|_| rng.below(1500)).collect();
            rows.sort_unstable();
            rows.dedup();
            let key = |row: &u64| RowKey::new(TableId(1), RowId(*row));
            let writes: Vec<_> =
                rows.iter().map(|row| RowWrite { key: key(row), record: &[] }).collect();
            changes.note(&writes);
            wanted.extend(rows);
            assert_eq!(changes.stats().row_count, wanted.len() as u64, "write {write}");
            if write % 7 == 0 {
                assert!(changes.rows(0, TableId(1)).iter().eq(wanted.iter().copied()));
            }
        }
        assert!(rows_since(&mut changes, "a").unwrap().iter().eq(&wanted));
        assert!(changes.rows(0, TableId(1)).iter().eq(wanted.iter().copied()));
        let kept = changes.moved_to(Room::of(&budget)).rows_since(&["a".to_owned()]);
        let Since::Known(kept) = kept else { panic!("a move forgets nothing") };
        assert!(kept[&1].iter().eq(wanted));
    }
}
