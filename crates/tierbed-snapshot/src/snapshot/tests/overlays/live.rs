//! Deltas applied while threads look up.

use super::*;

/// Rows that every delta changes, and that carry the number of their generation.
const MARKED: u64 = 40;

fn marked(schema: &Schema, number: u64) -> Vec<(RowKey, Vec<f32>)> {
    let table = schema.table(TableId(1)).unwrap();
    let row = |at| {
        let key = RowKey::new(TableId(1), RowId(at * 7));
        (key, vec![number as f32; table.dim as usize])
    };
    (0..MARKED).map(row).collect()
}

/// Looks up marked rows and others until told to stop; a lookup has rows of one generation, and
/// generations only rise.
fn look(snapshot: &Snapshot, seed: u64, stop: &AtomicBool) -> u64 {
    let plan = FeatureLayout::new(snapshot.schema(), &[(TableId(1), Pooling::None)]).unwrap();
    let (mut rng, mut newest, mut count) = (SplitMix64::new(seed), 0, 0);
    while !stop.load(Ordering::Relaxed) {
        let view = snapshot.view();
        let number = view.number();
        assert!(number >= newest, "generation {number} behind {newest}");
        newest = number;
        for _ in 0..2 {
            let mut ids: Vec<i64> = (0..30).map(|_| 7 * rng.below(MARKED) as i64).collect();
            // Others push them out of the tiers, from one to the next.
            ids.extend((0..rng.below(200)).map(|_| rng.below(4000) as i64));
            let offsets = [0, ids.len() as i64];
            let bags = Bags::new(&ids, &offsets, None, 1).unwrap();
            let mut out = vec![f32::NAN; plan.output_len(&bags)];
            view.lookup(&plan, &bags, &mut out).unwrap();
            for (row, id) in out.chunks(16).zip(&ids).take(30) {
                assert_eq!(row, [number as f32; 16], "row {id} in generation {number}");
            }
            // As threads ask that must not wait.
            let (ids, offsets) = ([ids[0], ids[1]], [0, 2]);
            let bags = Bags::new(&ids, &offsets, None, 1).unwrap();
            let mut out = vec![number as f32; 32];
            view.lookup_resident(&plan, &bags, &mut out).unwrap();
            assert_eq!(out, [number as f32; 32], "rows {ids:?} in generation {number}");
        }
        count += 1;
    }
    count
}

#[test]
fn rows_of_one_answer_are_of_one_generation_and_no_tier_holds_an_old_row() {
    for policy in [
        PolicyKind::Lru,
        PolicyKind::from_name("ev_lfu").unwrap(),
        PolicyKind::from_name("group_frequency").unwrap(),
    ] {
        let mut rng = SplitMix64::new(2);
        let mut chain = Chain::publish(schema(), Codec::F32, Vec::new());
        let rows = marked(&chain.schema, 0);
        let (base, first) = (chain.folder.clone(), chain.delta(&chain.folder.clone(), &rows));
        chain.folder = applied(&base, &first);
        let first = chain.model.clone();
        let tiers = two_tiers(policy);
        let cache_bytes_max = Some(300 << 10);
        let options = SnapshotOptions { tiers, cache_bytes_max, ..options(8 << 20) };
        let snapshot = Snapshot::open(chain.folder.clone(), &options).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let lookers: Vec<_> = (0..3)
                .map(|seed| {
                    scope.spawn({
                        let (snapshot, stop) = (&snapshot, &stop);
                        move || look(snapshot, seed, stop)
                    })
                })
                .collect();
            let mut whole = chain.folder.clone();
            for number in 1..=24 {
                let mut rows: Model = marked(&chain.schema, number).into_iter().collect();
                let others = chain.changes(60, &mut rng).into_iter();
                others.for_each(|(key, row)| {
                    rows.entry(key).or_insert(row);
                });
                let rows: Vec<_> = rows.into_iter().collect();
                // Three upon each other, then one against the snapshot itself.
                let delta = if number % 4 == 0 {
                    whole = chain.folder.clone();
                    let all = chain.all_since(&first, &rows);
                    let base = chain.folder.clone();
                    chain.delta(&base, &all)
                } else {
                    chain.delta(&whole.clone(), &rows)
                };
                whole = applied(&whole, &delta);
                let generation = snapshot.apply(delta).unwrap();
                assert_eq!(generation.number, number);
                check_lookups(&snapshot, &chain.model, number);
            }
            stop.store(true, Ordering::Relaxed);
            for looker in lookers {
                assert!(looker.join().unwrap() > 0);
            }
        });
        assert!(snapshot.stats().generation.rows_replaced > 0, "{policy:?}");
        assert!(snapshot.budget_report().peak_bytes <= 8 << 20);
    }
}

#[test]
fn a_hundred_swaps_take_no_more_memory() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = |name: &str| -> Arc<dyn Folder> {
        Arc::new(FsFolder::create(temporary.path().join(name)).unwrap())
    };
    let copy = |from: &Arc<dyn Folder>, name: &str| {
        let to = folder(name);
        for file in from.list().unwrap() {
            to.write_atomic(&file, &from.read(&file).unwrap().unwrap()).unwrap();
        }
        to
    };
    let mut rng = SplitMix64::new(6);
    let mut chain = Chain::publish(schema(), Codec::F32, Vec::new());
    let base = copy(&chain.folder, "base");
    let snapshot = Snapshot::open(base.clone(), &options(4 << 20)).unwrap();
    let mut seen: Option<(u64, u64)> = None;
    let mut held = Vec::new();
    for number in 0..100 {
        check_lookups(&snapshot, &chain.model, number);
        chain.model = some_rows(&chain.schema, 1).into_iter().collect();
        let rows = chain.changes(200, &mut rng);
        let rows: Vec<_> = rows.into_iter().take(100).collect();
        let delta = copy(&chain.delta(&base, &rows), &format!("d{number}"));
        snapshot.apply(delta).unwrap();
        let used = snapshot.budget_report().used_bytes - snapshot.generation().delta_memory_bytes;
        let files = own_files(temporary.path());
        held.push(files);
        if number == 10 {
            seen = Some((used, files));
        }
        if let Some((first_used, first_files)) = seen {
            assert!(used <= first_used, "{used} bytes of {first_used} after {number}");
            assert!(files <= first_files, "{held:?} files");
        }
    }
    assert_eq!(snapshot.generation().number, 100);
    check_lookups(&snapshot, &chain.model, 1);
}

/// Files below `path` that this process has open.
fn own_files(path: &std::path::Path) -> u64 {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = links.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|target| target.starts_with(path)).count() as u64
}

#[test]
fn the_cache_gives_what_a_delta_needs() {
    let mut rng = SplitMix64::new(6);
    let mut chain = Chain::publish(schema(), Codec::F32, Vec::new());
    let rows = chain.changes(4000, &mut rng);
    let base = chain.folder.clone();
    let delta = chain.delta(&base, &rows);
    let snapshot = Snapshot::open(base.clone(), &options(2 << 20)).unwrap();
    check_lookups(&snapshot, &Model::from_iter(some_rows(&chain.schema, 1)), 1);
    let cache_bytes = || snapshot.budget_report().parts["row_cache"].used_bytes;
    let before = cache_bytes();
    snapshot.apply(delta.clone()).unwrap();
    assert!(cache_bytes() < before, "{before:?}");
    assert!(snapshot.budget_report().peak_bytes <= 2 << 20);
    check_lookups(&snapshot, &chain.model, 1);
    let options = SnapshotOptions { cache_bytes_max: Some(0), ..options(700 << 10) };
    let snapshot = Snapshot::open(base, &options).unwrap();
    let bytes = snapshot.budget_report().limit_bytes - snapshot.budget_report().used_bytes;
    let taken = snapshot.budget().reserve("test", bytes).unwrap();
    let error = snapshot.apply(delta.clone()).unwrap_err();
    assert!(error.to_string().contains("dram budget too small"), "{error}");
    drop(taken);
    snapshot.apply(delta).unwrap();
}
