//! A snapshot opened in the memory of another one, which it takes the place of.

use super::overlays::answers;
use super::*;

fn published(seed: u64) -> Arc<dyn Folder> {
    let (folder, schema) = (memory_folder(), schema());
    publish(&folder, &schema, &some_rows(&schema, seed));
    folder
}

#[test]
fn one_budget_holds_both_and_what_is_left_has_all_of_it() {
    let limit_bytes = 4 << 20;
    let mut served = Snapshot::open(published(0), &options(limit_bytes)).unwrap();
    let cache_bytes = |snapshot: &Snapshot| snapshot.budget_report().parts["row_cache"].used_bytes;
    let mut used = None;
    for seed in 1..=30 {
        answers(&served);
        let folder = published(seed);
        let next = served.open_beside(folder.clone(), &options(limit_bytes), 0.1).unwrap();
        let alone = answers(&Snapshot::open(folder, &options(limit_bytes)).unwrap());
        assert!(answers(&next) == alone && answers(&served) != alone);
        let held = next.stats().cache_used_bytes + served.stats().cache_used_bytes;
        assert!(held <= cache_bytes(&served), "{held}");
        drop(served);
        next.grow_cache().unwrap();
        assert!(answers(&next) == alone);
        let report = next.budget_report();
        assert!(report.peak_bytes <= limit_bytes, "{report:?}");
        // What is free at the end belongs to the rows.
        assert_eq!(report.used_bytes, limit_bytes);
        // Indexes differ a little, as the rows do that are stored.
        let same: u64 = *used.get_or_insert(cache_bytes(&next));
        assert!(same.abs_diff(cache_bytes(&next)) < 16 << 10, "after {seed} snapshots");
        served = next;
    }
}

#[test]
fn where_both_do_not_fit_the_error_says_so_and_the_first_keeps_its_cache() {
    let folder = published(1);
    let mut pages = options(0);
    pages.backend = Backend::Memory;
    let minimum = Snapshot::open(folder.clone(), &pages).unwrap_err().minimum_bytes().unwrap();
    let options = SnapshotOptions { dram_budget_bytes: minimum + (200 << 10), ..pages };
    let served = Snapshot::open(folder, &options).unwrap();
    let used = |snapshot: &Snapshot| {
        let parts = snapshot.budget_report().parts.into_iter();
        parts.map(|(name, part)| (name, part.used_bytes)).collect::<Vec<_>>()
    };
    let before = (used(&served), answers(&served));
    let error = served.open_beside(published(2), &options, 0.1).unwrap_err();
    assert!(error.to_string().contains("open the snapshot with a larger dram_budget"), "{error}");
    assert_eq!(used(&served), before.0);
    assert!(answers(&served) == before.1);
}

#[test]
fn what_is_asked_for_most_is_in_the_new_cache_before_it_answers() {
    let served = Snapshot::open(published(0), &options(4 << 20)).unwrap();
    let plan = FeatureLayout::new(served.schema(), &[(TableId(1), Pooling::None)]).unwrap();
    // Initial values are computed, and in no tier.
    let is_stored = |row: &u64| served.holds_row(RowKey::new(TableId(1), RowId(*row))).unwrap();
    let ids: Vec<i64> = (0..400).filter(is_stored).take(40).map(|row| row as i64).collect();
    let offsets = [0, ids.len() as i64];
    let bags = Bags::new(&ids, &offsets, None, 1).unwrap();
    let ask = |snapshot: &Snapshot| {
        let mut out = vec![f32::NAN; plan.output_len(&bags)];
        let stats = snapshot.lookup(&plan, &bags, &mut out).unwrap();
        (stats.pages_read, out)
    };
    assert!(ask(&served).0 > 0);
    let next = served.open_beside(published(1), &options(4 << 20), 0.2).unwrap();
    assert_eq!(next.warm_from(&served, &|| false).unwrap(), 0);
    assert!(next.warm_from(&served, &|| true).unwrap() > 0);
    let alone = Snapshot::open(published(1), &options(4 << 20)).unwrap();
    let (pages_read, rows) = ask(&next);
    assert_eq!(pages_read, 0);
    assert!(rows == ask(&alone).1);
}
