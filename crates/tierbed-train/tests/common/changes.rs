//! Deltas made in both ways of finding what changed.

use std::sync::Arc;

use tierbed_core::Result;
use tierbed_io::{Folder, MemoryFolder};
use tierbed_snapshot::{PageLayout, Report};
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

/// Publishes a delta against `base` in both ways, which must give the same files; returns whether
/// the rows that were noted reached back to it.
pub(crate) fn is_tracked(engine: &mut WindowEngine, base: &Arc<dyn Folder>) -> bool {
    let tracked = engine.stats().changes.deltas_tracked;
    let (found, report) = publish_by(FindBy::Auto, engine, base);
    report.unwrap();
    let is_tracked = engine.stats().changes.deltas_tracked > tracked;
    let (compared, report) = publish_by(FindBy::Compared, engine, base);
    report.unwrap();
    assert!(files(&found) == files(&compared), "changes were missed or added");
    is_tracked
}
