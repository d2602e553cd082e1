//! What is published is what was trained, to the bit, most used rows first.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that panics has failed, as it should"
)]

#[path = "common/window.rs"]
mod common;

use std::path::Path;
use std::sync::Arc;

use common::{bits, small_config, Job};
use tierbed_core::store::Attachment;
use tierbed_core::{ErrorKind, OptimizerKind, TableId};
use tierbed_io::{Folder, FsFolder};
use tierbed_kernels::Codec;
use tierbed_snapshot::page::PageShape;
use tierbed_snapshot::{PageIndex, PageLayout, PlacedTables, Snapshot, SnapshotOptions};
use tierbed_train::window::{DeltaBase, FindBy};
use tierbed_train::window::{WindowConfig, WindowEngine};

fn trained(
    config: &WindowConfig,
) -> (tempfile::TempDir, WindowEngine, Job, tierbed_train::window::FeatureLayout) {
    let scratch = tempfile::tempdir().unwrap();
    let job = Job::pooled(OptimizerKind::RowWiseAdagrad, 6);
    let mut engine = WindowEngine::open(Some(scratch.path()), config).unwrap();
    let plan = job.set_up(&mut engine).unwrap();
    for step in 0..30 {
        job.step(&mut engine, &plan, step).unwrap();
    }
    (scratch, engine, job, plan)
}

#[test]
fn a_snapshot_answers_as_the_engine_does() {
    for config in [WindowConfig::new(640 << 10), WindowConfig::new(64 << 20)] {
        let (scratch, mut engine, job, plan) = trained(&config);
        let target = scratch.path().join("snapshot");
        let mut calls = Vec::new();
        let attachment = Attachment { name: "model", bytes: b"dense" };
        let report = engine
            .publish(create(&target), PageLayout::default(), &[attachment], &mut |done, total| {
                calls.push((done, total));
                true
            })
            .unwrap();
        assert!(report.row_count > 1000, "{report:?}");
        assert!(calls.windows(2).all(|pair| pair[0].0 <= pair[1].0));
        assert_eq!(calls.last().map(|(done, total)| done == total), Some(true));
        assert!(engine.budget().report().peak_bytes <= config.dram_budget_bytes);

        let folder = Arc::new(FsFolder::open(&target).unwrap());
        let snapshot = Snapshot::open(folder, &snapshot_options(16 << 20)).unwrap();
        snapshot.verify().unwrap();
        assert_eq!(snapshot.attachment("model").unwrap().as_deref(), Some(&b"dense"[..]));
        for step in 0..60 {
            let batch = job.batch(step);
            let bags = batch.bags();
            let mut expected = vec![0.0; plan.output_rows(&bags) * plan.output_dim()];
            engine.lookup(&plan, &bags, &mut expected).unwrap();
            let mut found = vec![f32::NAN; expected.len()];
            snapshot.lookup(&plan, &bags, &mut found).unwrap();
            assert_eq!(bits(&found), bits(&expected), "step {step}");
        }
        // Training goes on as if nothing had happened.
        job.step(&mut engine, &plan, 30).unwrap();
    }
}

#[test]
fn a_placement_decides_who_shares_a_page_and_changes_no_bit() {
    let (scratch, mut engine, job, plan) = trained(&WindowConfig::new(64 << 20));
    let schema = engine.schema().clone();
    let place = |(at, table): (u32, &tierbed_core::TableSchema)| {
        let rows_per_page = PageShape::new(table, &Codec::F32).rows_per_page;
        let rows: Vec<u32> = (0..table.row_count as u32).rev().collect();
        let replicas = &rows[..rows_per_page.min(rows.len())];
        let index = PageIndex::new(rows.len() as u32, rows.chunks(rows_per_page).chain([replicas]));
        PlacedTables { tables: vec![TableId(at)], index: index.unwrap() }
    };
    let placed: Vec<_> = (0..).zip(schema.tables()).map(place).collect();
    let target = scratch.path().join("placed");
    let report = engine.publish(create(&target), placed.into(), &[], &mut |_, _| true).unwrap();
    assert!(report.replica_count > 0 && report.places_bytes > 0, "{report:?}");
    let folder = Arc::new(FsFolder::open(&target).unwrap());
    let snapshot = Snapshot::open(folder, &snapshot_options(16 << 20)).unwrap();
    snapshot.verify().unwrap();
    for step in 0..20 {
        let batch = job.batch(step);
        let bags = batch.bags();
        let mut expected = vec![0.0; plan.output_rows(&bags) * plan.output_dim()];
        engine.lookup(&plan, &bags, &mut expected).unwrap();
        let mut found = vec![f32::NAN; expected.len()];
        snapshot.lookup(&plan, &bags, &mut found).unwrap();
        assert_eq!(bits(&found), bits(&expected), "step {step}");
    }
    drop(snapshot);
    let delta = create(&scratch.path().join("delta"));
    let base = DeltaBase { folder: create(&target), deltas: Vec::new(), find_by: FindBy::Auto };
    let error = engine.publish_delta(delta, base, &[], &mut |_, _| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

#[test]
fn a_folder_in_use_is_refused_and_a_stopped_publish_leaves_nothing() {
    let (scratch, mut engine, ..) = trained(&small_config_for_publish());
    let target = scratch.path().join("snapshot");
    let error =
        engine.publish(create(&target), PageLayout::default(), &[], &mut |_, _| false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(Snapshot::open(Arc::new(FsFolder::open(&target).unwrap()), &snapshot_options(1 << 20))
        .is_err());
    engine.publish(create(&target), PageLayout::default(), &[], &mut |_, _| true).unwrap();
    let error =
        engine.publish(create(&target), PageLayout::default(), &[], &mut |_, _| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

fn create(path: &Path) -> Arc<dyn Folder> {
    Arc::new(FsFolder::create(path).unwrap())
}

fn small_config_for_publish() -> WindowConfig {
    WindowConfig { dram_budget_bytes: 640 << 10, ..small_config() }
}

fn snapshot_options(dram_budget_bytes: u64) -> SnapshotOptions {
    SnapshotOptions { dram_budget_bytes, ..SnapshotOptions::default() }
}
