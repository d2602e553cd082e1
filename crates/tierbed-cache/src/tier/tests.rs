use std::collections::HashMap;

use proptest::prelude::*;
use tierbed_core::env::SplitMix64;
use tierbed_core::{RowId, TableId};

use super::*;
use crate::policy::PolicyKind;
use crate::sizing::RowClass;

fn options(capacity_bytes: u64, classes: &[(usize, u64)]) -> TierOptions {
    let class = |&(row_words, row_count)| RowClass { row_words, row_count };
    let classes = classes.iter().map(class).collect();
    TierOptions { capacity_bytes, classes, tables: vec![1 << 24; 8], policy: PolicyKind::Lru }
}

fn key(table: u32, row: u64) -> RowKey {
    RowKey::new(TableId(table), RowId(row))
}

fn rows_of(tier: &RowTier, row_words: usize) -> Vec<u64> {
    tier.dump(row_words).iter().map(|key| key.row.0).collect()
}

#[test]
fn the_least_recently_used_row_leaves() {
    // One slab of 4 KiB: three rows of 1 KiB.
    let mut tier = RowTier::new(&options(6 << 10, &[(256, 1000)])).unwrap();
    for row in 0..3 {
        assert_eq!(tier.insert(key(0, row), &[row as f32; 256]).unwrap(), Insertion::Stored);
    }
    assert_eq!(rows_of(&tier, 256), [0, 1, 2]);
    assert_eq!(tier.get(key(0, 0)), Some(&[0.0; 256][..]));
    assert_eq!(tier.insert(key(0, 1), &[7.0; 256]).unwrap(), Insertion::Replaced);
    assert_eq!(rows_of(&tier, 256), [2, 0, 1]);
    tier.insert(key(0, 9), &[9.0; 256]).unwrap();
    assert_eq!(rows_of(&tier, 256), [0, 1, 9]);
    assert_eq!(tier.get(key(0, 2)), None);
    assert_eq!(tier.get(key(0, 1)), Some(&[7.0; 256][..]));
    let stats = tier.stats();
    assert_eq!((stats.hits, stats.misses, stats.evictions, stats.row_count), (2, 1, 1, 3));
    assert!(tier.remove(key(0, 9)) && !tier.remove(key(0, 9)));
    assert_eq!(rows_of(&tier, 256), [0, 1]);
}

/// A delta stores rows that the snapshot did not.
#[test]
fn more_rows_than_a_tier_was_made_for_come_and_go() {
    for policy in PolicyKind::ALL {
        let options = TierOptions { policy, ..options(1 << 20, &[(8, 500), (16, 200)]) };
        let mut tier = RowTier::new(&options).unwrap();
        for at in 0..6000 {
            let (table, row_words) = if at % 3 == 0 { (1, 16) } else { (0, 8) };
            tier.insert(key(table, at), &vec![at as f32; row_words]).unwrap();
            assert!(tier.stats().row_count <= tier.rows_max());
        }
        let stats = tier.stats();
        assert!(stats.row_count > 0 && stats.evictions > 0, "{policy:?}: {stats:?}");
        check_whole(&tier, 1 << 20);
    }
}

/// Without tables any keys may come, in twice the bytes.
#[test]
fn rows_of_known_tables_have_keys_of_half_the_bytes() {
    let short = options(64 << 10, &[(4, 100_000)]);
    let long = TierOptions { tables: Vec::new(), ..short.clone() };
    let (short_rows, long_rows) = (short.rows_max().unwrap(), long.rows_max().unwrap());
    assert!(short_rows * 100 > long_rows * 105, "{short_rows} and {long_rows} rows");
    let (mut short, mut long) = (RowTier::new(&short).unwrap(), RowTier::new(&long).unwrap());
    for strange in [key(8, 0), key(7, 1 << 24)] {
        assert!(short.insert(strange, &[0.0; 4]).is_err());
        assert_eq!(short.get(strange), None);
        assert!(!short.remove(strange));
        assert_eq!(long.insert(strange, &[3.0; 4]).unwrap(), Insertion::Stored);
        assert_eq!(long.peek(strange), Some(&[3.0; 4][..]));
    }
    assert_eq!(long.dump(4), [key(8, 0), key(7, 1 << 24)]);
    let mut left = Vec::new();
    for row in 0..5000 {
        let tables = [0, 3, 7];
        for table in tables {
            short
                .insert_with(key(table, row), &[row as f32; 4], &mut |key, _| left.push(key))
                .unwrap();
        }
    }
    assert_eq!(left[..3], [key(0, 0), key(3, 0), key(7, 0)]);
}

#[test]
fn no_budget_holds_nothing_and_a_strange_size_is_refused() {
    let mut tier = RowTier::new(&options(1000, &[(16, 1000)])).unwrap();
    assert_eq!(tier.insert(key(0, 0), &[1.0; 16]).unwrap(), Insertion::Bypassed);
    assert_eq!(tier.get(key(0, 0)), None);
    assert_eq!(tier.stats().data_bytes + tier.stats().metadata_bytes, 0);
    assert!(tier.insert(key(0, 0), &[1.0; 17]).is_err());
    assert!(RowTier::new(&options(1 << 20, &[(20_000, 10)])).is_err());
    assert!(RowTier::new(&options(1 << 20, &[(0, 10)])).is_err());
}

#[test]
fn everything_fits_when_the_budget_does() {
    // 2000 rows of 64 + 16 bytes payload; slots need 4 * 20 + 20 bytes each.
    let mut tier = RowTier::new(&options(400 << 10, &[(20, 2000)])).unwrap();
    for row in 0..2000 {
        tier.insert(key(1, row), &[row as f32; 20]).unwrap();
    }
    assert!((0..2000).all(|row| tier.get(key(1, row)) == Some(&[row as f32; 20][..])));
    assert_eq!(tier.stats().evictions, 0);
}

/// A first phase of small rows took every slab; when only large rows are asked for, the slabs
/// have to follow, or the tier would serve from one slab for ever.
#[test]
fn slabs_follow_the_rows_that_are_asked_for() {
    let mut tier = RowTier::new(&options(1 << 20, &[(4, 1 << 20), (64, 1 << 20)])).unwrap();
    for row in 0..30_000 {
        tier.insert(key(0, row), &[0.0; 4]).unwrap();
    }
    assert!(tier.dump(64).is_empty());
    for round in 0..20 {
        for row in 0..1500 {
            if tier.get(key(1, row)).is_none() {
                tier.insert(key(1, row), &[round as f32; 64]).unwrap();
            }
        }
    }
    let large = tier.dump(64).len();
    assert!(large == 1500, "{large} of 1500 large rows are held");
    assert!(tier.stats().slab_moves > 10);
}

#[test]
fn the_index_never_grows_over_long_runs() {
    let mut options = options(200 << 10, &[(4, 1 << 30)]);
    options.tables = vec![1 << 30];
    let mut tier = RowTier::new(&options).unwrap();
    let before = tier.index.bytes();
    let mut rng = SplitMix64::new(3);
    for _ in 0..200_000 {
        tier.insert(key(0, rng.below(1 << 30)), &[1.0; 4]).unwrap();
    }
    assert_eq!(tier.index.bytes(), before);
    assert_eq!(tier.index.len() as u64, tier.stats().row_count);
    assert!(tier.stats().data_bytes + tier.stats().metadata_bytes <= 200 << 10);
}

/// Walks everything: slots, free lists, index and policies must tell the same story.
fn check_whole(tier: &RowTier, capacity_bytes: u64) {
    let stats = tier.stats();
    assert!(stats.data_bytes + stats.metadata_bytes <= stats.capacity_bytes);
    assert!(stats.capacity_bytes <= capacity_bytes);
    let mut live = 0;
    for (at, pool) in tier.pools.iter().enumerate() {
        let occupied = pool.policy.dump();
        live += occupied.len() as u64;
        assert!(occupied.iter().all(|&slot| tier.find(tier.key_of(slot).unwrap()) == Some(slot)));
        let mut free = 0;
        let mut slot = pool.free;
        while slot != NONE {
            let slab = tier.slabs[(slot >> SLOT_BITS) as usize].as_ref().unwrap();
            assert_eq!((slab.pool, slab.key(super::at(slot))), (at, None));
            slot = slab.next_free(super::at(slot));
            free += 1;
        }
        let slots = pool.slabs.len() * pool.slots_per_slab as usize;
        assert_eq!(slots, occupied.len() + free, "slots of pool {at}");
    }
    assert_eq!(live, stats.row_count);
}

proptest! {
    /// Never over budget, never a wrong row, a hit only for what was inserted last.
    #[test]
    fn behaves_like_a_map_that_forgets(
        capacity_bytes in 0u64..60_000,
        seed: u64,
        dims in proptest::collection::vec(1usize..600, 1..4),
    ) {
        let classes: Vec<_> = dims.iter().map(|&dim| (dim, 400u64)).collect();
        let mut tier = RowTier::new(&options(capacity_bytes, &classes)).unwrap();
        let mut map: HashMap<RowKey, Vec<f32>> = HashMap::new();
        let mut rng = SplitMix64::new(seed);
        for step in 0..1500u32 {
            // The mix of tables drifts, so that slabs have a reason to move.
            let table = if rng.below(4) == 0 { rng.below(dims.len() as u64) as usize }
                else { (step / 500) as usize % dims.len() };
            let key = key(table as u32, rng.below(400));
            match rng.below(8) {
                0..=2 => {
                    if let Some(row) = tier.get(key) {
                        prop_assert_eq!(Some(row), map.get(&key).map(Vec::as_slice));
                    }
                }
                3..=6 => {
                    let row = vec![step as f32; dims[table]];
                    if tier.insert(key, &row).unwrap() != Insertion::Bypassed {
                        prop_assert!(tier.contains(key));
                    }
                    map.insert(key, row);
                }
                _ => {
                    tier.remove(key);
                    prop_assert!(!tier.contains(key));
                    map.remove(&key);
                }
            }
            if step % 100 == 0 {
                check_whole(&tier, capacity_bytes);
            }
        }
        check_whole(&tier, capacity_bytes);
    }
}

/// Tells a tier of `keys`, of which some were found in `slots`, and offers the others their `rows`.
fn settle(tier: &mut RowTier, keys: &[RowKey], slots: &[u32], rows: &[&[f32]]) {
    let found = slots.iter().filter(|slot| **slot != NOWHERE);
    let hit_count = found.clone().count() as u32;
    if !tier.layout.policy.knows_groups() {
        found.for_each(|slot| assert!(tier.use_found(*slot).is_some()));
    }
    let row_words: Vec<usize> = rows.iter().map(|row| row.len()).collect();
    let row_count = keys.len() as u32;
    let group = TierGroup { keys, row_words: &row_words, slots, row_count, hit_count };
    let positions: Vec<u32> = (0..row_count).collect();
    tier.settle(&group, &positions, &mut |at| Some(rows[at]), &mut |_, _| ()).unwrap();
}

/// Tells a tier of groups as serving does; returns the hits.
fn ask_group(tier: &mut RowTier, group: &[u64]) -> u64 {
    let keys: Vec<RowKey> = group.iter().map(|&row| key((row % 5) as u32, row)).collect();
    let slots: Vec<u32> = keys.iter().map(|key| tier.find(*key).unwrap_or(NOWHERE)).collect();
    let rows: Vec<[f32; 4]> = group.iter().map(|&row| [row as f32; 4]).collect();
    let rows: Vec<&[f32]> = rows.iter().map(|row| &row[..]).collect();
    settle(tier, &keys, &slots, &rows);
    slots.iter().filter(|slot| **slot != NOWHERE).count() as u64
}

/// Wherever a row is said to have been: the tier does the same.
#[test]
fn where_a_row_was_found_is_only_a_hint() {
    let kind = PolicyKind::from_name("group_frequency").unwrap();
    let options = TierOptions { policy: kind, ..options(16 << 10, &[(4, 1000)]) };
    let build = || RowTier::new(&options).unwrap();
    let (mut told, mut misled) = (build(), build());
    let mut rng = SplitMix64::new(7);
    for _ in 0..4000 {
        let (first, step) = (rng.below(600), 1 + rng.below(80));
        let keys: Vec<RowKey> = (0..5).map(|at| key(0, first + at * step)).collect();
        let rows: Vec<[f32; 4]> = keys.iter().map(|key| [key.row.0 as f32; 4]).collect();
        let rows: Vec<&[f32]> = rows.iter().map(|row| &row[..]).collect();
        let slots: Vec<u32> = keys.iter().map(|key| told.find(*key).unwrap_or(NOWHERE)).collect();
        // Others' slots, empty ones, some behind their slab or in none; nothing of the last row.
        let wrong = |slot: &u32| match *slot {
            NOWHERE => NOWHERE,
            slot => [slot ^ 1, slot, 0, (1 << SLOT_BITS) - 1, 1 << 23][rng.below(5) as usize],
        };
        let wrong: Vec<u32> = slots.iter().take(4).map(wrong).collect();
        let hit_count = slots.iter().filter(|slot| **slot != NOWHERE).count() as u32;
        for (tier, slots) in [(&mut told, &slots), (&mut misled, &wrong)] {
            let group =
                TierGroup { keys: &keys, row_words: &[4; 5], slots, row_count: 5, hit_count };
            let offered = &mut |at: usize| Some(rows[at]);
            tier.settle(&group, &[0, 1, 2, 3, 4], offered, &mut |_, _| ()).unwrap();
        }
        assert_eq!(told.stats(), misled.stats());
    }
    assert!(told.stats().evictions > 1000 && told.stats().hits > 1000);
    assert_eq!(told.dump(4), misled.dump(4));
}

/// Same policies, same groups, same memory of rows that left: a tier has the hits of the replay.
#[test]
fn groups_have_the_hits_of_a_replay() {
    for kind in PolicyKind::ALL {
        // As much for rows whatever the policy keeps for itself: the shadows of `auto` are large.
        let capacity_bytes = (256 << 10) + kind.build().bytes_fixed(20_000) as u64;
        let mut options = options(capacity_bytes, &[(4, 20_000)]);
        options.policy = kind;
        let mut tier = RowTier::new(&options).unwrap();
        let capacity_rows = tier.layout.rows_max as usize;
        assert!(capacity_rows > 0, "{kind:?} leaves room");
        let replay = crate::ReplayCache::new(kind, 20_000, capacity_rows).unwrap();
        let mut replay =
            replay.with_tables((0..20_000).map(|row| row % 5).collect::<Vec<_>>()).unwrap();
        let mut rng = SplitMix64::new(5);
        let (mut hits, mut replayed) = (0, 0);
        for _ in 0..4000 {
            let skewed = |rng: &mut SplitMix64| {
                let share = rng.unit_f64();
                (20_000.0 * share * share * share) as u64
            };
            let mut group: Vec<u64> = (0..6).map(|_| skewed(&mut rng)).collect();
            group.sort_unstable();
            group.dedup();
            let rows: Vec<u32> = group.iter().map(|&row| row as u32).collect();
            hits += ask_group(&mut tier, &group);
            replayed += u64::from(replay.ask(&rows).unwrap());
            let stats = tier.stats();
            assert!(stats.data_bytes + stats.metadata_bytes <= options.capacity_bytes);
        }
        // Pools grow slab by slab, and some policies adapt to their size; `auto` also changes its
        // rule by what its shadows do meanwhile, a little earlier or later.
        let allowed = replayed / if matches!(kind, PolicyKind::Auto) { 100 } else { 200 };
        assert!(hits.abs_diff(replayed) <= allowed, "{kind:?}: {hits}, replay {replayed}");
    }
}

#[test]
fn rows_that_leave_are_handed_over() {
    // One slab of 4 KiB: three rows of 1 KiB.
    let mut tier = RowTier::new(&options(6 << 10, &[(256, 1000)])).unwrap();
    let mut left = Vec::new();
    for row in 0..5 {
        let mut hand = |key: RowKey, row: &[f32]| left.push((key.row.0, row[255]));
        tier.insert_with(key(0, row), &[row as f32; 256], &mut hand).unwrap();
    }
    assert_eq!(left, [(0, 0.0), (1, 1.0)]);
    assert_eq!(tier.peek(key(0, 4)), Some(&[4.0; 256][..]));
    assert_eq!(tier.stats().hits + tier.stats().misses, 0);
}

/// What a row takes beside its data, everything counted, in a full tier of rows of 36 bytes.
#[test]
fn metadata_stays_within_its_bytes_per_row() {
    for kind in PolicyKind::ALL {
        let mut options = options(8 << 20, &[(9, 1 << 20)]);
        options.policy = kind;
        let mut tier = RowTier::new(&options).unwrap();
        let group = |first: u64| (first..first + 8).map(|row| key(0, row)).collect::<Vec<_>>();
        for first in (0..200_000).step_by(8) {
            settle(&mut tier, &group(first), &[], &[&[1.0; 9][..]; 8]);
        }
        let (stats, policy) = (tier.stats(), kind.build());
        let policy_bytes = policy.bytes_per_slot() as f64;
        // Tables for all rows, up to 12 KB, and up to 1 MB of `auto`, weigh little in larger
        // tiers; what grows with the slots counts.
        let fixed_bytes = 2 * policy.bytes_fixed(1 << 20) - policy.bytes_fixed(1 << 21);
        let varying = stats.metadata_bytes - fixed_bytes as u64;
        let bytes = varying as f64 / tier.layout.rows_max as f64;
        println!("{:26} policy {policy_bytes:3}, all {bytes:.1} bytes per row", policy.name());
        assert!(policy_bytes <= 16.0, "{}: {policy_bytes}", policy.name());
        // The key, 4.8 of the index, the slab and its places in tables (most with shadows), and
        // 15/8 remembered scores of 2.5 bytes.
        let others = if kind.remembers_scores() { 14.2 } else { 11.0 };
        assert!(bytes <= policy_bytes + others, "{}: {bytes}", policy.name());
        let is_scored = matches!(kind, PolicyKind::GroupFrequency(_));
        assert!(!is_scored || bytes <= 16.0, "{}: {bytes}", policy.name());
    }
}

/// A tier that grows and shrinks is always whole, within its bytes of the moment, and never has a
/// wrong row.
#[test]
fn a_tier_of_every_policy_is_whole_after_every_change_of_size() {
    for kind in PolicyKind::ALL {
        let fixed = kind.build().bytes_fixed(1 << 14) as u64;
        let mut options = options((512 << 10) + 2 * fixed, &[(4, 9000), (20, 3000)]);
        options.policy = kind;
        let mut tier = RowTier::with_capacity(&options, 0).unwrap();
        let mut rng = SplitMix64::new(9);
        let mut held = 0;
        for step in 0..16u64 {
            let capacity_bytes = rng.below(options.capacity_bytes + 1);
            tier.resize(capacity_bytes);
            check_whole(&tier, capacity_bytes);
            for _ in 0..300 {
                let (table, row) = (rng.below(2) as u32, rng.below(9000).min(rng.below(3000)));
                let row_words = [4, 20][table as usize];
                let keys = [key(table, row)];
                let words = vec![(row * 2 + u64::from(table)) as f32; row_words];
                let slot = tier.find(keys[0]).unwrap_or(NOWHERE);
                if let Some(found) = tier.row_in(slot) {
                    assert_eq!(found, words, "{kind:?}");
                }
                settle(&mut tier, &keys, &[slot], &[&words]);
            }
            check_whole(&tier, capacity_bytes);
            held += tier.stats().row_count;
            assert!(step < 8 || held > 0, "{kind:?} holds nothing");
        }
    }
}

/// Who is used most stays when there is less room, and room given back is used again.
#[test]
fn the_rows_used_most_stay_in_a_smaller_tier() {
    let kind = PolicyKind::from_name("group_frequency").unwrap();
    let mut options = options(256 << 10, &[(4, 20_000)]);
    options.policy = kind;
    let mut tier = RowTier::new(&options).unwrap();
    for round in 0..40u64 {
        for first in (0..400).step_by(4) {
            ask_group(&mut tier, &[first, first + 1, first + 2, first + 3]);
        }
        // Rows that come once.
        for first in (0..400).step_by(4) {
            let first = 1000 + round * 400 + first;
            ask_group(&mut tier, &[first, first + 1, first + 2, first + 3]);
        }
    }
    let before = tier.stats();
    tier.resize(96 << 10);
    let after = tier.stats();
    assert!(after.row_count < before.row_count / 2, "{} rows", after.row_count);
    assert!(after.data_bytes + after.metadata_bytes <= 96 << 10);
    let kept = (0..400).filter(|&row| tier.contains(key((row % 5) as u32, row))).count();
    assert!(kept >= 396, "{kept} of 400 rows used often stay");
    tier.resize(256 << 10);
    for row in 20_000..40_000 {
        tier.insert(key(0, row), &[0.0; 4]).unwrap();
    }
    assert!(tier.stats().row_count > before.row_count / 2);
    check_whole(&tier, 256 << 10);
}

/// A class of few small rows comes first, but the only slab may go to another class: the index has
/// room for its rows.
#[test]
fn the_index_has_room_for_the_rows_of_any_class() {
    let mut tier = RowTier::new(&options(9 << 10, &[(3, 1), (16, 4000)])).unwrap();
    for row in 0..500 {
        tier.insert(key(0, row), &[row as f32; 16]).unwrap();
    }
    assert!(tier.stats().row_count > 30);
    check_whole(&tier, 9 << 10);
}
