//! Deltas made in both ways of finding what changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use tierbed_core::{Budget, Result, RowKey, RowStore, TableId};
use tierbed_io::{Folder, MemoryFolder};
use tierbed_kernels::init_record;
use tierbed_snapshot::delta::apply_delta;
use tierbed_snapshot::{PageLayout, Report, Snapshot, SnapshotOptions, SnapshotRows};
use tierbed_train::window::{DeltaBase, FindBy, WindowEngine};

type Published = (Arc<dyn Folder>, Report);

/// Publishes in full.
pub(crate) fn full(engine: &mut WindowEngine) -> Published {
    let out: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let layout = PageLayout::default();
    let report = engine.publish(out.clone(), layout, &[], &mut |_, _| true).unwrap();
    (out, report)
}

/// Publishes a delta against `base`.
pub(crate) fn publish_by(
    find_by: FindBy,
    engine: &mut WindowEngine,
    base: &Arc<dyn Folder>,
) -> (Arc<dyn Folder>, Result<Report>) {
    let out: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
    let base = DeltaBase { folder: base.clone(), deltas: Vec::new(), find_by };
    let report = engine.publish_delta(out.clone(), base, &[], &mut |_, _| true);
    (out, report)
}

/// Every file of a folder.
fn files(folder: &Arc<dyn Folder>) -> Vec<(String, Vec<u8>)> {
    let names = folder.list().unwrap().into_iter();
    names.map(|name| (name.clone(), folder.read(&name).unwrap().unwrap())).collect()
}

/// The rows that a snapshot or a delta stores, as they are coded.
fn stored(snapshot: &Arc<Snapshot>) -> BTreeMap<RowKey, Vec<u8>> {
    let mut rows = BTreeMap::new();
    for table in (0..snapshot.schema().tables().len() as u32).map(TableId) {
        let mut stored = SnapshotRows::coded(Arc::clone(snapshot));
        stored
            .scan(table, &mut |row, record| {
                rows.insert(RowKey::new(table, row), record.to_vec());
                Ok(())
            })
            .unwrap();
    }
    rows
}

/// Fails unless the delta of noted rows has all that comparing found, and makes the same of `base`.
pub(crate) fn check_tracked(
    base: &Arc<dyn Folder>,
    tracked: &Arc<dyn Folder>,
    compared: &Arc<dyn Folder>,
) {
    let options = SnapshotOptions {
        dram_budget_bytes: 8 << 20,
        reader_count: 1,
        ..SnapshotOptions::default()
    };
    let open = |folder: &Arc<dyn Folder>| {
        Arc::new(Snapshot::open_any(Arc::clone(folder), &options).unwrap())
    };
    let [base, tracked, compared] = [base, tracked, compared].map(open);
    let (noted, changed) = (stored(&tracked), stored(&compared));
    for (key, row) in &changed {
        assert_eq!(noted.get(key), Some(row), "{key:?} changed and was missed");
    }
    let made = |delta: &Arc<Snapshot>| {
        let out: Arc<dyn Folder> = Arc::new(MemoryFolder::new());
        apply_delta(&base, delta, &out, &Budget::new(8 << 20)).unwrap();
        let next = open(&out);
        let mut rows = stored(&next);
        // Whether a row with its initial weights is stored makes no difference.
        rows.retain(|key, record| {
            let table = next.schema().table(key.table).unwrap();
            let mut initial = vec![0.0f32; table.record_words()];
            init_record(table, key.row.0, &mut initial);
            let weights: &[u8] = bytemuck::cast_slice(&initial[..table.dim as usize]);
            record[..weights.len().min(record.len())] != *weights
        });
        rows
    };
    assert!(made(&tracked) == made(&compared), "both deltas make the same rows");
}

/// Publishes a delta against `base` in both ways, which must make the same of it; returns whether
/// the rows that were noted reached back to it.
pub(crate) fn is_tracked(engine: &mut WindowEngine, base: &Arc<dyn Folder>) -> bool {
    let before = engine.stats().changes;
    let (found, report) = publish_by(FindBy::Auto, engine, base);
    report.unwrap();
    let after = engine.stats().changes;
    let is_tracked = after.deltas_tracked > before.deltas_tracked;
    assert_eq!(after.base_pages_read == before.base_pages_read, is_tracked);
    let (compared, report) = publish_by(FindBy::Compared, engine, base);
    report.unwrap();
    match is_tracked {
        true => check_tracked(base, &found, &compared),
        false => assert!(files(&found) == files(&compared), "changes were missed or added"),
    }
    is_tracked
}
