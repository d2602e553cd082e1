use std::collections::{BTreeMap, VecDeque};

use tierbed_core::env::SplitMix64;
use tierbed_core::{RowId, TableId};

use super::*;

fn key(table: u32, row: u64) -> RowKey {
    RowKey::new(TableId(table), RowId(row))
}

/// A cache of exactly `entries` entries of two tables.
fn cache_of(entries: u64) -> KeyCache {
    let tables = [1000, 500];
    let cache = KeyCache::new(bytes_for(entries, &tables), &tables);
    assert_eq!(cache.stats().key_count_max, entries);
    cache
}

fn rows(cache: &KeyCache) -> Vec<(u64, bool)> {
    cache.dump().iter().map(|(key, _, is_marked)| (key.row.0, *is_marked)).collect()
}

#[test]
fn the_hand_passes_entries_that_were_found() {
    let mut cache = cache_of(4);
    for row in 0..4 {
        assert!(cache.insert(key(0, row), key(1, 10 + row)));
    }
    assert_eq!(cache.get(key(0, 0)), Some(key(1, 10)));
    assert_eq!(cache.get(key(0, 2)), Some(key(1, 12)));
    assert_eq!(rows(&cache), [(0, true), (1, false), (2, true), (3, false)]);
    // Row 0 keeps its place, row 1 leaves: the hand is at row 2 then.
    assert!(cache.insert(key(0, 4), key(0, 9)));
    assert_eq!(rows(&cache), [(2, true), (3, false), (0, false), (4, false)]);
    assert!(cache.insert(key(0, 5), key(0, 9)));
    assert_eq!(rows(&cache), [(0, false), (4, false), (2, false), (5, false)]);
    assert_eq!((cache.get(key(0, 1)), cache.get(key(0, 3))), (None, None));
    assert_eq!(cache.stats().evictions, 2);
}

#[test]
fn all_entries_found_leave_in_their_order() {
    let mut cache = cache_of(3);
    (0..3).for_each(|row| assert!(cache.insert(key(1, row), key(0, row))));
    (0..3).for_each(|row| assert_eq!(cache.get(key(1, row)), Some(key(0, row))));
    assert!(cache.insert(key(1, 7), key(0, 7)));
    assert_eq!(rows(&cache), [(1, false), (2, false), (7, false)]);
}

#[test]
fn an_entry_that_is_here_keeps_its_place() {
    let mut cache = cache_of(2);
    assert!(cache.insert(key(0, 1), key(0, 5)) && cache.insert(key(0, 2), key(0, 5)));
    assert!(cache.insert(key(0, 1), key(0, 6)));
    assert_eq!(cache.dump(), [(key(0, 1), key(0, 6), false), (key(0, 2), key(0, 5), false)]);
    assert!(cache.contains(key(0, 1)) && !cache.contains(key(1, 1)));
    assert_eq!(rows(&cache)[0], (1, false), "to be asked about is not to be found");
}

#[test]
fn keys_of_no_table_stay_outside() {
    let mut cache = cache_of(2);
    for (key, stand_in) in [(key(0, 1000), key(0, 1)), (key(0, 1), key(2, 0))] {
        assert!(!cache.insert(key, stand_in));
        assert_eq!(cache.get(key), None);
    }
    assert_eq!(cache.stats().key_count, 0);
}

/// Second chance over a queue, the slow and plain way.
#[derive(Default)]
struct Plain {
    queue: VecDeque<(RowKey, bool)>,
    stand_ins: BTreeMap<RowKey, RowKey>,
}

impl Plain {
    fn get(&mut self, key: RowKey) -> Option<RowKey> {
        let found = self.stand_ins.get(&key).copied()?;
        self.queue.iter_mut().filter(|(held, _)| *held == key).for_each(|(_, mark)| *mark = true);
        Some(found)
    }

    fn insert(&mut self, key: RowKey, stand_in: RowKey, entries_max: usize) {
        if self.stand_ins.insert(key, stand_in).is_some() {
            return;
        }
        while self.queue.len() == entries_max {
            match self.queue.pop_front().unwrap() {
                (passed, true) => self.queue.push_back((passed, false)),
                (victim, false) => drop(self.stand_ins.remove(&victim)),
            }
        }
        self.queue.push_back((key, false));
    }
}

#[test]
fn it_is_a_queue_with_second_chance() {
    for (entries, tables) in [(1, vec![3000, 3000]), (7, vec![]), (100, vec![3000, 3000])] {
        let mut cache = KeyCache::new(bytes_for(entries, &tables), &tables);
        assert_eq!(cache.stats().key_count_max, entries);
        let (mut plain, mut rng) = (Plain::default(), SplitMix64::new(entries));
        let mut found = 0;
        for _ in 0..20_000 {
            let asked = key(rng.below(2) as u32, rng.below(3 * entries));
            if rng.below(2) == 0 {
                let expected = plain.get(asked);
                found += u64::from(expected.is_some());
                assert_eq!(cache.get(asked), expected);
            } else {
                let stand_in = key(rng.below(2) as u32, rng.below(3000));
                assert!(cache.insert(asked, stand_in));
                plain.insert(asked, stand_in, entries as usize);
            }
        }
        let expected: Vec<_> =
            plain.queue.iter().map(|(key, mark)| (*key, plain.stand_ins[key], *mark)).collect();
        assert_eq!(cache.dump(), expected);
        assert!(found > 1000, "{found}");
    }
}

/// What is counted is what is allocated, and never more than allowed.
#[test]
fn bytes_are_counted_and_bounded() {
    for tables in [vec![1 << 20, 5, 1 << 16], vec![1 << 33], vec![]] {
        for capacity_bytes in [0, 1, 100, 4096, 41_203, 1 << 20] {
            let cache = KeyCache::new(capacity_bytes, &tables);
            let entry_bytes = match &cache.entries {
                Entries::Short(entries) => 8 * entries.capacity(),
                Entries::Long(entries) => 16 * entries.capacity(),
            };
            let numbers_bytes = KeyNumbers::bytes_for(&tables);
            let held = entry_bytes + size_of_val(&*cache.marks) + cache.index.bytes();
            let stats = cache.stats();
            assert!(stats.used_bytes <= capacity_bytes);
            if stats.key_count_max > 0 {
                assert_eq!(stats.used_bytes, held as u64 + numbers_bytes);
            }
            let next = stats.key_count_max + 1;
            assert!(bytes_for(next, &tables) > capacity_bytes, "room for another");
        }
    }
    // No more entries than there are rows.
    assert_eq!(KeyCache::new(1 << 20, &[10, 5]).stats().key_count_max, 15);
}
