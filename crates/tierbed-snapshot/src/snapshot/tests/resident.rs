//! Lookups whose rows are in memory: in everything as other lookups, but that they do not wait.

use tierbed_cache::{AdmissionRule, PolicyKind};
use tierbed_kernels::Codec;

use super::overlays::{two_tiers, Chain};
use super::tiers::{plain_table, publish_plain, resident, stack, tier};
use super::*;
use crate::{CacheTier, TierStackOptions};

/// Two snapshots that are asked the same, one of them without waiting where that is possible.
struct Twins {
    waiting: Snapshot,
    resident: Snapshot,
    /// Lookups that needed no page, and others.
    counts: [u64; 2],
}

impl Twins {
    fn open(folder: &Arc<dyn Folder>, options: &SnapshotOptions) -> Self {
        let open = || Snapshot::open(Arc::clone(folder), options).unwrap();
        Self { waiting: open(), resident: open(), counts: [0; 2] }
    }

    /// Asks both for the same, and compares bits and statistics.
    fn ask(&mut self, plan: &FeatureLayout, bags: &Bags<'_>) {
        let mut expected = vec![f32::NAN; plan.output_len(bags)];
        let stats = self.waiting.view().lookup(plan, bags, &mut expected).unwrap();
        let (view, before) = (self.resident.view(), self.resident.stats());
        let mut found = vec![f32::NAN; expected.len()];
        let answered = view.lookup_resident(plan, bags, &mut found).unwrap();
        assert_eq!(answered.is_some(), stats.rows_read == 0, "{stats:?}");
        let answered = answered.unwrap_or_else(|| {
            assert!(found.iter().all(|number| number.is_nan()), "nothing is written");
            let now = self.resident.stats();
            assert_eq!(
                (now.lookup_count, now.cache_misses),
                (before.lookup_count, before.cache_misses)
            );
            view.lookup(plan, bags, &mut found).unwrap()
        });
        self.counts[usize::from(stats.rows_read > 0)] += 1;
        assert_eq!(answered, stats);
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&found) == bits(&expected));
    }

    /// Asks for random bags of few rows, so that many are in memory.
    fn ask_often(&mut self, schema: &Schema, rounds: u64, rng: &mut SplitMix64) {
        for round in 0..rounds {
            let batch = Batch::few(schema, rng);
            let plan = FeatureLayout::new(schema, &batch.features).unwrap();
            self.ask(&plan, &batch.bags(round % 3 == 0));
        }
        compare(&self.waiting, &self.resident);
    }
}

/// Policies were told the same: the same rows are there, and left.
pub(super) fn compare(one: &Snapshot, other: &Snapshot) {
    let [expected, found] = [one, other].map(Snapshot::stats);
    assert_eq!(found.tiers, expected.tiers);
    assert_eq!((found.lookup_count, found.lookups), (expected.lookup_count, expected.lookups));
    let mut visits = tierbed_cache::Visits::default();
    for (table, id) in one.view().schema().tables().iter().zip(0..) {
        for row in 0..table.row_count {
            let key = RowKey::new(TableId(id), RowId(row));
            let held = [one, other].map(|of| of.tiers().holds(key, &mut visits));
            assert_eq!(held[0], held[1], "{key:?}");
        }
    }
}

impl Batch {
    /// A few samples that ask for few rows, most of them asked for often; in a third of all, one
    /// feature is not pooled.
    pub(super) fn few(schema: &Schema, rng: &mut SplitMix64) -> Self {
        let (mut indices, mut offsets, mut features) = (Vec::new(), vec![0], Vec::new());
        let samples = 1 + rng.below(3);
        let is_pooled = rng.below(3) > 0;
        let poolings = [Pooling::Sum, Pooling::Mean];
        for _ in 0..if is_pooled { 1 + rng.below(4) } else { 1 } {
            let id = TableId(rng.below(schema.tables().len() as u64) as u32);
            let row_count = schema.table(id).unwrap().row_count;
            let pooling = if is_pooled { poolings[rng.below(2) as usize] } else { Pooling::None };
            features.push((id, pooling));
            for _ in 0..samples {
                for _ in 0..rng.below(3) {
                    let range = if rng.below(8) == 0 { row_count } else { row_count.min(20) };
                    indices.push(rng.below(range) as i64);
                }
                offsets.push(indices.len() as i64);
            }
        }
        let weights = indices.iter().map(|_| rng.unit_f64() as f32).collect();
        Self { indices, offsets, weights, features }
    }
}

pub(super) fn small_cache(tiers: TierStackOptions) -> SnapshotOptions {
    SnapshotOptions { tiers, cache_bytes_max: Some(400 << 10), ..options(8 << 20) }
}

#[test]
fn what_needs_no_page_is_answered_as_ever_under_every_policy() {
    let (folder, schema) = (memory_folder(), schema());
    publish(&folder, &schema, &some_rows(&schema, 4));
    for (policy, seed) in PolicyKind::ALL.into_iter().zip(1..) {
        let admission = AdmissionRule::SECOND_USE;
        let tiers = vec![
            CacheTier { admission, ..tier(Codec::F32, policy, 1.0) },
            tier(Codec::F16, policy, 2.0),
        ];
        let mut twins = Twins::open(&folder, &small_cache(stack(tiers)));
        twins.ask_often(&schema, 600, &mut SplitMix64::new(seed));
        let [resident, read] = twins.counts;
        assert!(resident > 100 && read > 50, "{policy:?}: {resident} and {read}");
    }
}

#[test]
fn rows_of_every_codec_and_those_of_deltas_are_answered_as_ever() {
    for (codec, seed) in [(Codec::F32, 1), (Codec::Int8, 2), (Codec::Int4, 3), (Codec::F16, 4)] {
        let mut rng = SplitMix64::new(seed);
        let mut chain = Chain::publish(schema(), codec, Vec::new());
        let options = small_cache(two_tiers(PolicyKind::Lru));
        let mut twins = Twins::open(&chain.folder, &options);
        let first = chain.model.clone();
        for _ in 0..3 {
            twins.ask_often(&schema(), 200, &mut rng);
            let rows = chain.changes(60, &mut rng);
            let base = chain.folder.clone();
            let all = chain.all_since(&first, &rows);
            let delta = chain.delta(&base, &all);
            for snapshot in [&twins.waiting, &twins.resident] {
                snapshot.apply(delta.clone()).unwrap();
            }
        }
        twins.ask_often(&schema(), 200, &mut rng);
        assert!(twins.counts.iter().all(|count| *count > 50), "{:?}", twins.counts);
    }
}

#[test]
fn rows_that_a_delta_is_about_to_change_are_not_answered_from_tiers() {
    let mut chain = Chain::publish(schema(), Codec::F32, Vec::new());
    let snapshot = Snapshot::open(chain.folder.clone(), &options(8 << 20)).unwrap();
    let mut keys = chain.model.keys().filter(|key| key.table == TableId(1)).copied();
    let [key, other] = [keys.next().unwrap(), keys.next_back().unwrap()];
    let before = chain.model[&key].clone();
    let plan = FeatureLayout::new(snapshot.schema(), &[(key.table, Pooling::None)]).unwrap();
    let ask = |key: RowKey| {
        let (ids, offsets) = ([key.row.0 as i64], [0, 1]);
        let bags = Bags::new(&ids, &offsets, None, 1).unwrap();
        let mut out = vec![f32::NAN; 16];
        let view = snapshot.view();
        let is_resident = view.lookup_resident(&plan, &bags, &mut out).unwrap().is_some();
        if !is_resident {
            view.lookup(&plan, &bags, &mut out).unwrap();
        }
        (is_resident, out)
    };
    let _ = (ask(key), ask(other));
    let delta = chain.delta(&chain.folder.clone(), &[(key, vec![7.0; 16])]);
    let manifest = Manifest::read(delta.as_ref()).unwrap();
    let coming = Arc::new(snapshot.open_overlay(delta, manifest, 1).unwrap());
    let now = Layers::clone(&snapshot.layers());
    let announced = Layers { pending: vec![coming], ..now.clone() };
    let work = || {
        assert_eq!(ask(key), (false, before.clone()), "it is in a tier and about to change");
        assert!(ask(other).0, "the other is not");
        Ok::<_, std::convert::Infallible>(())
    };
    let Ok(()) = snapshot.leases().swap(announced, work, now);
    assert_eq!(ask(key), (true, before), "it was not changed after all");
}

#[test]
fn rows_that_are_always_in_memory_need_no_page() {
    let (folder, rows) = plain_table();
    let resident = vec![Arc::new(resident(&rows, None))];
    let tiers =
        TierStackOptions { resident, ..stack(vec![tier(Codec::F32, PolicyKind::Lru, 1.0)]) };
    let mut twins = Twins::open(&folder, &small_cache(tiers));
    let schema = twins.waiting.schema().clone();
    twins.ask_often(&schema, 300, &mut SplitMix64::new(8));
    assert!(twins.resident.stats().lookups.rows_resident > 100);
}

#[test]
fn a_reader_or_a_lock_that_another_has_is_not_waited_for() {
    let folder = memory_folder();
    publish_plain(&folder, 100);
    let snapshot = Snapshot::open(folder, &options(8 << 20)).unwrap();
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)]).unwrap();
    let (ids, offsets) = ([3, 4], [0, 2]);
    let bags = Bags::new(&ids, &offsets, None, 1).unwrap();
    let mut out = [0.0; 16];
    let mut is_answered = || {
        let view = snapshot.view();
        view.lookup_resident(&plan, &bags, &mut out).unwrap().is_some()
    };
    assert!(!is_answered(), "nothing has been read");
    snapshot.lookup(&plan, &bags, &mut [0.0; 16]).unwrap();
    assert!(is_answered());
    let guards: Vec<_> = std::iter::from_fn(|| snapshot.try_take_reader_for(2)).collect();
    assert!(!guards.is_empty() && !is_answered(), "all readers are away");
    drop(guards);
    assert!(is_answered());
    let mut refused = vec![0.0; 15];
    assert!(snapshot.view().lookup_resident(&plan, &bags, &mut refused).is_err());
}
