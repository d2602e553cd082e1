//! Lookups whose callers do not wait for pages: in everything else as other lookups.

use std::time::Duration;

use tierbed_cache::{AdmissionRule, PolicyKind};
use tierbed_kernels::Codec;
use tierbed_sim::{Chance, FaultPlan, SimFolder};

use super::failing::publish_three_pages;
use super::overlays::{two_tiers, Chain};
use super::placed::{placements, publish_placed, schema as placed_schema};
use super::resident::{compare, small_cache};
use super::tiers::{publish_plain, stack, tier};
use super::*;
use crate::{Begun, CacheTier, LookupStats, MissMode, PendingLookup, TierStackOptions};

/// How lookups went on that were begun.
#[derive(Debug, Default)]
struct Counts {
    done: u64,
    pending: u64,
    left: u64,
}

impl Counts {
    /// Looks up without waiting where that is possible.
    fn ask(
        &mut self,
        snapshot: &Arc<Snapshot>,
        plan: &FeatureLayout,
        bags: &Bags<'_>,
        out: &mut [f32],
    ) -> Result<LookupStats> {
        let view = snapshot.shared_view();
        match view.begin_lookup(plan, bags, out)? {
            Begun::Done(stats) => {
                self.done += 1;
                Ok(stats)
            }
            Begun::Pending(pending) => {
                self.pending += 1;
                drop(view);
                landed(pending).finish(plan, bags, out)
            }
            Begun::Left => {
                self.left += 1;
                view.lookup(plan, bags, out)
            }
        }
    }

    /// Asks both for the same many times, one of them without waiting, and compares all.
    fn ask_often(&mut self, waiting: &Snapshot, pending: &Arc<Snapshot>, rounds: u64, seed: u64) {
        let (schema, mut rng) = (waiting.view().schema().clone(), SplitMix64::new(seed));
        for round in 0..rounds {
            let batch = Batch::few(&schema, &mut rng);
            let plan = FeatureLayout::new(&schema, &batch.features).unwrap();
            let bags = batch.bags(round % 3 == 0);
            let mut expected = vec![f32::NAN; plan.output_len(&bags)];
            let stats = waiting.view().lookup(&plan, &bags, &mut expected).unwrap();
            let mut found = vec![f32::NAN; expected.len()];
            assert_eq!(self.ask(pending, &plan, &bags, &mut found).unwrap(), stats);
            let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(&expected), "round {round}");
        }
        compare(waiting, pending);
    }
}

/// Waits until all pages have come.
fn landed(mut pending: PendingLookup) -> PendingLookup {
    let has_landed = (0..500_000).any(|_| {
        let has_landed = pending.land();
        if !has_landed {
            std::thread::sleep(Duration::from_micros(20));
        }
        has_landed
    });
    assert!(has_landed, "no page comes");
    pending
}

fn with_ring(options: SnapshotOptions) -> SnapshotOptions {
    let engine = EngineOptions { choice: EngineChoice::Auto, ..options.engine };
    SnapshotOptions { engine, reader_count: 16, dram_budget_bytes: 64 << 20, ..options }
}

/// Whether the kernel lets this process have a ring; says so where it does not.
fn has_ring() -> bool {
    let engine = EngineOptions { choice: EngineChoice::Uring, ..EngineOptions::default() };
    let opened = tierbed_io::open_engine(&engine).map(drop);
    opened.inspect_err(|error| eprintln!("lookups do not read asynchronously: {error}")).is_ok()
}

fn on_disk() -> (tempfile::TempDir, Arc<dyn Folder>) {
    let temporary = tempfile::tempdir().unwrap();
    let folder = FsFolder::create(temporary.path().join("s")).unwrap();
    (temporary, Arc::new(folder))
}

/// A snapshot of 4,000 rows without a cache.
struct Plain {
    _temporary: tempfile::TempDir,
    rows: Vec<Vec<f32>>,
    snapshot: Arc<Snapshot>,
}

impl Plain {
    fn open() -> Self {
        let (temporary, folder) = on_disk();
        let rows = publish_plain(&folder, 4000);
        let options = SnapshotOptions { cache_bytes_max: Some(0), ..with_ring(options(16 << 20)) };
        let snapshot = Arc::new(Snapshot::open(folder, &options).unwrap());
        Self { _temporary: temporary, rows, snapshot }
    }
}

#[test]
fn asynchronous_lookups_are_answered_as_ever_under_every_policy() {
    let (_temporary, folder) = on_disk();
    let schema = schema();
    publish(&folder, &schema, &some_rows(&schema, 4));
    for (policy, seed) in PolicyKind::ALL.into_iter().zip(1..) {
        let admission = AdmissionRule::SECOND_USE;
        let tiers = vec![
            CacheTier { admission, ..tier(Codec::F32, policy, 1.0) },
            tier(Codec::F16, policy, 2.0),
        ];
        let options = with_ring(small_cache(stack(tiers)));
        let open = || Snapshot::open(Arc::clone(&folder), &options).unwrap();
        let mut counts = Counts::default();
        counts.ask_often(&open(), &Arc::new(open()), 300, seed);
        if has_ring() {
            assert!(counts.pending > 10 && counts.done > 10, "{policy:?}: {counts:?}");
        }
    }
}

#[test]
fn placed_rows_and_those_of_deltas_are_answered_as_ever() {
    let (_temporary, folder) = on_disk();
    let rows = some_rows(&placed_schema(), 3);
    publish_placed(&folder, placements(5, 0.5), &rows);
    let options = with_ring(small_cache(two_tiers(PolicyKind::Lru)));
    let open = |folder: &Arc<dyn Folder>| Snapshot::open(Arc::clone(folder), &options).unwrap();
    let mut counts = Counts::default();
    counts.ask_often(&open(&folder), &Arc::new(open(&folder)), 300, 6);
    assert!(counts.pending > 20 || !has_ring(), "{counts:?}");

    for (codec, seed) in [(Codec::F32, 1), (Codec::Int8, 2)] {
        let mut rng = SplitMix64::new(seed);
        let mut chain = Chain::publish(schema(), codec, Vec::new());
        let (waiting, pending) = (open(&chain.folder), Arc::new(open(&chain.folder)));
        let first = chain.model.clone();
        for round in 0..3 {
            Counts::default().ask_often(&waiting, &pending, 150, seed + round);
            let rows = chain.changes(60, &mut rng);
            let all = chain.all_since(&first, &rows);
            let delta = chain.delta(&chain.folder.clone(), &all);
            for snapshot in [&waiting, &*pending] {
                snapshot.apply(delta.clone()).unwrap();
            }
        }
        Counts::default().ask_often(&waiting, &pending, 150, seed + 9);
    }
}

#[test]
fn pages_of_callers_who_left_come_for_nobody() {
    let Plain { snapshot, rows, _temporary } = Plain::open();
    let dim = rows[0].len();
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::None)]).unwrap();
    let check = |ids: &[i64], out: &[f32]| {
        assert!(out.chunks(dim).zip(ids).all(|(row, &id)| row == rows[id as usize]));
    };
    let mut rng = SplitMix64::new(7);
    let mut kept = Vec::new();
    for round in 0..2000 {
        let ids: Vec<i64> = (0..3).map(|_| rng.below(4000) as i64).collect();
        let bags = Bags::new(&ids, &[0, 3], None, 1).unwrap();
        let mut out = vec![0.0; 3 * dim];
        let begun = snapshot.shared_view().begin_lookup(&plan, &bags, &mut out).unwrap();
        match begun {
            // Some leave at once, some later, and one in three gets its answer.
            Begun::Pending(pending) if round % 3 > 0 => kept.push(pending),
            Begun::Pending(pending) => {
                landed(pending).finish(&plan, &bags, &mut out).unwrap();
                check(&ids, &out);
            }
            Begun::Done(_) => check(&ids, &out),
            // All readers are away, or on their way.
            Begun::Left => kept.clear(),
        }
    }
    drop(kept);
    let stats = snapshot.stats();
    assert!(stats.reader_count <= 16 + 32, "{}", stats.reader_count);
    assert_eq!(stats.reader_error, None);
}

#[test]
fn what_would_have_to_wait_is_left_and_nothing_has_heard_of_it() {
    let Plain { snapshot, rows, _temporary } = Plain::open();
    let dim = rows[0].len();
    let before = snapshot.stats();
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)]).unwrap();
    let begin = |ids: &[i64]| {
        let offsets = [0, ids.len() as i64];
        let bags = Bags::new(ids, &offsets, None, 1).unwrap();
        let mut out = vec![f32::NAN; dim];
        let begun = snapshot.shared_view().begin_lookup(&plan, &bags, &mut out).unwrap();
        if matches!(begun, Begun::Left) {
            assert!(out.iter().all(|number| number.is_nan()), "nothing is written");
        }
        begun
    };
    // More pages than such a reader has in flight, and more rows than it has room for.
    let far: Vec<i64> = (0..40).map(|at| at * 100).collect();
    assert!(matches!(begin(&far), Begun::Left));
    assert!(matches!(begin(&(0..4000).collect::<Vec<_>>()), Begun::Left));
    let now = snapshot.stats();
    assert_eq!((now.lookup_count, now.cache_misses), (before.lookup_count, before.cache_misses));
    // All pending readers are away.
    let pending: Vec<_> = (0..100)
        .map_while(|_| match begin(&[1, 900]) {
            Begun::Pending(pending) => Some(pending),
            Begun::Done(_) | Begun::Left => None,
        })
        .collect();
    assert!(pending.len() < 100);
    drop(pending);

    let lent = snapshot.view();
    let bags = Bags::new(&[5], &[0, 1], None, 1).unwrap();
    let begun = lent.begin_lookup(&plan, &bags, &mut vec![0.0; dim]).unwrap();
    assert!(matches!(begun, Begun::Left), "a lent snapshot may be gone before its pages come");
    assert!(snapshot.shared_view().begin_lookup(&plan, &bags, &mut vec![0.0; dim - 1]).is_err());
}

#[test]
fn misses_that_are_not_read_are_left() {
    let (_temporary, folder) = on_disk();
    publish_plain(&folder, 100);
    let tiers = TierStackOptions {
        misses: MissMode::Default,
        ..stack(vec![tier(Codec::F32, PolicyKind::Lru, 1.0)])
    };
    let options = with_ring(small_cache(tiers));
    let snapshot = Arc::new(Snapshot::open(folder, &options).unwrap());
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)]).unwrap();
    let bags = Bags::new(&[5], &[0, 1], None, 1).unwrap();
    let mut out = vec![0.0; plan.output_len(&bags)];
    let begun = snapshot.shared_view().begin_lookup(&plan, &bags, &mut out).unwrap();
    assert!(matches!(begun, Begun::Left), "{begun:?}");
}

#[test]
fn a_page_that_fails_fails_its_lookup_or_another_answers() {
    let ask = |snapshot: &Arc<Snapshot>, row: i64| {
        let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::None)]).unwrap();
        let bags = Bags::new(std::slice::from_ref(&row), &[0, 1], None, 1).unwrap();
        let mut out = vec![0.0; 64];
        let stats = Counts::default().ask(snapshot, &plan, &bags, &mut out)?;
        assert_eq!(out, [row as f32; 64]);
        Ok::<_, tierbed_core::Error>(stats)
    };
    let options = SnapshotOptions { cache_bytes_max: Some(0), ..with_ring(options(8 << 20)) };
    let sim = SimFolder::new(FaultPlan::default());
    let folder: Arc<dyn Folder> = Arc::new(sim.clone());
    publish_three_pages(&folder);
    let snapshot = Arc::new(Snapshot::open(folder, &options).unwrap());
    let fail_next =
        || sim.set_plan(FaultPlan { read_error: Chance::Nth(0), ..FaultPlan::default() });
    fail_next();
    let stats = ask(&snapshot, 3).unwrap();
    assert_eq!((stats.pages_failed, stats.rows_recovered), (1, 1), "page 2 has it, too");
    fail_next();
    assert_eq!(ask(&snapshot, 20).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(ask(&snapshot, 20).unwrap().pages_failed, 0, "the disk is well");

    let (_temporary, folder) = on_disk();
    publish_three_pages(&folder);
    let pages = folder.open(PAGES_NAME, OpenMode::ReadWrite).unwrap();
    pages.write_at(100, b"x").unwrap();
    let snapshot = Arc::new(Snapshot::open(folder, &options).unwrap());
    assert_eq!(ask(&snapshot, 3).unwrap().rows_recovered, 1);
    let error = ask(&snapshot, 12).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption);
    assert!(error.to_string().contains("page_id: 0"), "{error}");
    assert_eq!(ask(&snapshot, 20).unwrap().pages_failed, 0, "the next call works");
}
