//! The model: a plain map, and rows given in order of appearance.

use std::collections::HashMap;

use super::*;
use crate::mix;
use crate::policy::Eviction;
use proptest::prelude::*;
use tierbed_core::RowStore;
use tierbed_store::MemoryStore;

fn open_table(name: &str) -> TableSchema {
    TableSchema::plain(name, 4, 2)
}

struct Bench {
    pages: PageCache,
    store: MemoryStore,
    vocabulary: Vocabulary,
    scratch: Scratch,
}

impl Bench {
    fn new(policy: Policy, page_bytes: u64) -> Self {
        let budget = Budget::unlimited();
        let mut store = MemoryStore::new(budget.clone());
        let table = store.add_table(open_table("item")).unwrap();
        let mut pages = PageCache::new(&budget, page_bytes).unwrap();
        let vocabulary =
            Vocabulary::create(&mut pages, &mut store, table, policy, &budget).unwrap();
        Self { pages, store, vocabulary, scratch: Scratch::default() }
    }

    fn sorted(&mut self, ids: &[i64]) -> u64 {
        self.scratch.clear();
        ids.iter().zip(0..).for_each(|(&id, position)| self.scratch.push(id, position));
        self.scratch.sort()
    }

    fn rows(&self, ids: &[i64]) -> Vec<u64> {
        let mut rows = vec![u64::MAX; ids.len()];
        self.scratch.for_each(|position, row| rows[position as usize] = row);
        rows
    }

    fn train(&mut self, ids: &[i64], now: u32) -> Vec<u64> {
        let id_count = self.sorted(ids);
        self.grow(id_count);
        let Self { pages, store, vocabulary, scratch } = self;
        vocabulary.train(pages, store, scratch, now).unwrap();
        self.rows(ids)
    }

    fn find(&mut self, ids: &[i64]) -> Vec<u64> {
        self.sorted(ids);
        let Self { pages, store, vocabulary, scratch } = self;
        vocabulary.find(pages, store, scratch).unwrap();
        self.rows(ids)
    }

    fn evict(&mut self, now: u32) -> (Evicted, Vec<u64>) {
        let mut freed = Vec::new();
        let mut sink = |_: &mut dyn TrainStore, rows: &[u64]| {
            assert!(rows.is_sorted());
            freed.extend_from_slice(rows);
            Ok(())
        };
        let Self { pages, store, vocabulary, .. } = self;
        let evicted = vocabulary.evict(pages, store, now, &mut sink).unwrap();
        (evicted, freed)
    }

    fn copy(&mut self, policy: Policy, page_bytes: u64) -> Self {
        let mut copy = Self::new(policy, page_bytes);
        let Self { pages, store, vocabulary, .. } = self;
        let (mut entries, mut free) = (Vec::new(), Vec::new());
        let mut keep = |entry| {
            entries.push(entry);
            Ok(())
        };
        vocabulary.visit_entries(pages, store, &mut keep).unwrap();
        let mut keep = |row| {
            free.push(row);
            Ok(())
        };
        vocabulary.visit_free(pages, store, &mut keep).unwrap();
        copy.vocabulary.begin_copy(vocabulary.state().next_row).unwrap();
        for some in entries.chunks(100) {
            copy.grow(some.len() as u64);
            copy.vocabulary.copy_entries(&mut copy.pages, &mut copy.store, some).unwrap();
        }
        copy.grow(0);
        copy.vocabulary.copy_free(&mut copy.pages, &mut copy.store, &free).unwrap();
        copy.vocabulary.finish_copy().unwrap();
        assert!(copy.vocabulary.begin_copy(7).is_err() || entries.is_empty());
        copy
    }

    fn grow(&mut self, id_count: u64) {
        if let Some(growth) = self.vocabulary.growth(self.store.schema(), id_count).unwrap() {
            self.vocabulary.grow(&mut self.store, growth).unwrap();
        }
    }

    fn all(&mut self) -> HashMap<i64, u64> {
        let mut all = HashMap::new();
        let mut visit = |id, row| {
            assert!(all.insert(id, row).is_none());
            Ok(())
        };
        self.vocabulary.scan(&mut self.pages, &mut self.store, &mut visit).unwrap();
        all
    }
}

/// The naive vocabulary; evicted rows are reused in the order the real one frees them.
#[derive(Default)]
struct Model {
    ids: HashMap<i64, (Option<u64>, f32, u32)>,
    free: Vec<u64>,
    next_row: u64,
}

impl Model {
    fn train(&mut self, policy: &Policy, ids: &[i64], now: u32) -> Vec<u64> {
        let mut seen = Vec::new();
        for &id in ids {
            if seen.contains(&id) {
                continue;
            }
            seen.push(id);
            let entry = self.ids.entry(id).or_insert((None, 0.0, 0));
            if entry.0.is_none() || policy.eviction != Eviction::Never {
                (entry.1, entry.2) = (entry.1 + 1.0, now);
            }
            if entry.0.is_none() && entry.1 >= policy.admit_after as f32 {
                entry.0 = Some(self.free.pop().unwrap_or_else(|| {
                    self.next_row += 1;
                    self.next_row
                }));
            }
        }
        ids.iter().map(|id| self.ids[id].0.unwrap_or(SHARED_ROW)).collect()
    }

    fn evict(&mut self, policy: &Policy, now: u32) {
        let mut gone: Vec<(u64, Option<u64>, i64)> = Vec::new();
        for (&id, entry) in &mut self.ids {
            if policy.eviction.judge(&mut entry.1, entry.2, now) {
                gone.push((mix(id), entry.0, id));
            }
        }
        gone.sort_unstable();
        for (_, row, id) in gone {
            self.ids.remove(&id);
            self.free.extend(row);
        }
    }
}

#[test]
fn a_copy_that_cannot_be_is_damage() {
    let entry = |id, row| IdEntry { id, row, count: 1.0, seen: 0 };
    let copied = |next_row, entries: &[IdEntry], free: &[u64]| {
        let mut bench = Bench::new(Policy::default(), 0);
        bench.vocabulary.begin_copy(next_row)?;
        bench.grow(8);
        let Bench { pages, store, vocabulary, .. } = &mut bench;
        vocabulary.copy_entries(pages, store, entries)?;
        vocabulary.copy_free(pages, store, free)?;
        vocabulary.finish_copy()
    };
    assert!(copied(4, &[entry(5, Some(1)), entry(6, Some(3)), entry(7, None)], &[2]).is_ok());
    for (next_row, entries, free) in [
        (0, vec![], vec![]),
        (2, vec![], vec![]),
        (2, vec![entry(5, Some(2))], vec![]),
        (2, vec![entry(5, Some(1))], vec![1]),
        (2, vec![], vec![2]),
        (3, vec![entry(5, Some(1)), entry(5, Some(2))], vec![]),
    ] {
        let error = copied(next_row, &entries, &free).unwrap_err();
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption, "{next_row} {entries:?}");
    }
}

fn policies() -> impl Strategy<Value = Policy> {
    let eviction = prop_oneof![
        Just(Eviction::Never),
        Just(Eviction::Age { ttl: 2 }),
        Just(Eviction::Count { threshold: 1.5, decay_rate: 0.7 }),
        Just(Eviction::CountAndAge { threshold: 2.5, decay_rate: 0.9, ttl: 1 }),
    ];
    (1..4u32, eviction).prop_map(|(admit_after, eviction)| Policy { admit_after, eviction })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn equals_a_plain_map_whatever_the_memory(
        policy in policies(),
        seed: u64,
        page_bytes in prop_oneof![Just(0u64), Just(200_000)],
        span in prop_oneof![Just(40u64), Just(6_000)],
    ) {
        let mut rng = tierbed_core::env::SplitMix64::new(seed);
        let mut bench = Bench::new(policy, page_bytes);
        let mut model = Model::default();
        for now in 0..14 {
            let count = rng.below(900) as usize;
            let ids: Vec<i64> = (0..count)
                .map(|_| match rng.below(50) {
                    0 => i64::MIN,
                    1 => i64::MAX,
                    2 => -1,
                    _ => (rng.below(span) as i64 - 20).wrapping_mul(0x1234_5678_9abc_def1),
                })
                .collect();
            prop_assert_eq!(bench.train(&ids, now), model.train(&policy, &ids, now));
            // Looking changes nothing.
            let found = bench.find(&ids);
            let expected: Vec<u64> =
                ids.iter().map(|id| model.ids[id].0.unwrap_or(SHARED_ROW)).collect();
            prop_assert_eq!(found, expected);
            if rng.below(3) == 0 {
                let (evicted, _) = bench.evict(now);
                let before = model.ids.len() as u64;
                model.evict(&policy, now);
                let gone = before - model.ids.len() as u64;
                prop_assert_eq!(evicted.id_count + evicted.waiting_count, gone);
            }
        }
        let with_row = model.ids.iter().filter_map(|(&id, entry)| Some((id, entry.0?)));
        let expected: HashMap<i64, u64> = with_row.collect();
        prop_assert_eq!(bench.all(), expected.clone());
        let state = bench.vocabulary.state();
        prop_assert_eq!(state.id_count, expected.len() as u64);
        prop_assert_eq!(state.waiting_count, (model.ids.len() - expected.len()) as u64);
        prop_assert_eq!(state.id_count + state.free_count, state.next_row - 1);
        // A copy goes on as the original does.
        let mut copy = bench.copy(policy, 0);
        prop_assert_eq!(copy.all(), expected);
        prop_assert_eq!(copy.vocabulary.state(), bench.vocabulary.state());
        for now in 14..17 {
            let ids: Vec<i64> = (0..300).map(|_| rng.below(span) as i64).collect();
            prop_assert_eq!(copy.train(&ids, now), bench.train(&ids, now));
            // Freed rows come bucket by bucket, and a copy has other buckets.
            let (mut of_copy, mut of_bench) = (copy.evict(now), bench.evict(now));
            of_copy.1.sort_unstable();
            of_bench.1.sort_unstable();
            prop_assert_eq!(of_copy, of_bench);
        }
    }
}

#[test]
fn a_hundred_thousand_ids_take_less_than_half_a_byte_each_in_memory() {
    let mut bench = Bench::new(Policy::default(), 400_000);
    let ids: Vec<i64> =
        (0..100_000).map(|id: i64| id.wrapping_mul(-7_046_029_254_386_353_131)).collect();
    for (batch, ids) in ids.chunks(4096).enumerate() {
        let first = 1 + 4096 * batch as u64;
        let expected: Vec<u64> = (first..first + ids.len() as u64).collect();
        assert_eq!(bench.train(ids, 0), expected);
    }
    let memory_bytes = bench.vocabulary.memory.bytes();
    assert!(memory_bytes <= 40_000, "{memory_bytes}");
    let buckets = u64::from(bench.vocabulary.directory.bucket_count());
    assert!(100_000 / buckets > 80, "{buckets} pages");
    assert_eq!(bench.all().len(), 100_000);
}

#[test]
fn comes_back_from_pages_state_and_directory() {
    let policy = Policy { admit_after: 2, eviction: Eviction::Age { ttl: 3 } };
    let mut bench = Bench::new(policy, 0);
    let ids: Vec<i64> = (0..2_000).collect();
    for now in 0..3 {
        bench.train(&ids[..1_000 + 500 * now as usize], now);
    }
    bench.pages.flush(&mut bench.store).unwrap();
    let expected = bench.find(&ids);
    let (state, bytes) = (bench.vocabulary.state().clone(), bench.vocabulary.directory_bytes());
    let budget = Budget::unlimited();
    let open = |state: State| Vocabulary::open(bench.store.schema(), state, &bytes, &budget);
    bench.vocabulary = open(state.clone()).unwrap();
    bench.pages = PageCache::new(&budget, 0).unwrap();
    for wrong in [
        State { next_row: 0, ..state.clone() },
        State { free_count: u64::MAX, ..state.clone() },
        State { table: "other".into(), ..state.clone() },
        State { next_row: 1 << 39, ..state },
    ] {
        let error = Vocabulary::open(bench.store.schema(), wrong, &bytes, &budget).unwrap_err();
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Corruption);
    }
    assert_eq!(bench.find(&ids), expected);
}

#[test]
fn rows_that_are_set_aside_go_to_whom_they_are_given() {
    let mut bench = Bench::new(Policy::default(), 0);
    let old: Vec<i64> = (0..3000).collect();
    bench.train(&old, 0);
    let mut given: Vec<(u64, u64)> =
        (3000..9000).map(|id: i64| (mix(id), 9001 - (id as u64 - 3000))).collect();
    given.sort_unstable();
    bench.grow(6000);
    assert_eq!(bench.vocabulary.set_rows_aside(6001), 3001);
    let Bench { pages, store, vocabulary, .. } = &mut bench;
    vocabulary.give(pages, store, &given, 7).unwrap();
    // The last one, 3001, is still to be given.
    vocabulary.give(pages, store, &[(mix(-1), 3001)], 7).unwrap();
    let wrong = vocabulary.give(pages, store, &[(mix(-2), 9002)], 7).unwrap_err();
    assert_eq!(wrong.kind(), tierbed_core::ErrorKind::Corruption);
    let (new, expected): (Vec<i64>, Vec<u64>) =
        (3000..9000).map(|id| (id, 9001 - (id as u64 - 3000))).unzip();
    assert_eq!(bench.find(&new), expected);
    assert_eq!(bench.find(&[-1, 5, -2]), [3001, 6, SHARED_ROW]);
    let state = bench.vocabulary.state();
    assert_eq!((state.id_count, state.next_row), (9001, 9002));
    // Ids get further rows behind them.
    assert_eq!(bench.train(&[-2], 8), [9002]);
}

#[test]
#[should_panic(expected = "an id got two rows")]
fn no_id_is_given_a_second_row() {
    let mut bench = Bench::new(Policy::default(), 0);
    bench.train(&[4], 0);
    bench.grow(1);
    bench.vocabulary.set_rows_aside(1);
    let Bench { pages, store, vocabulary, .. } = &mut bench;
    let _ = vocabulary.give(pages, store, &[(mix(4), 2)], 0);
}
