//! A snapshot of cloned tables: every weight of a row follows from its number.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::{Budget, Result, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_pagestore::{PlacedTables, SnapshotWriter};
use tierbed_placement::read_placement;

use super::Clones;
use crate::meter::Meter;

/// Name of the table.
pub(super) const TABLE: &str = "rows";
/// Weights are whole numbers below this, so that sums of them are exact.
const WEIGHT_BOUND: u64 = 4096;

/// What `write` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WriteJob {
    /// File of the placement of one clone.
    placement: PathBuf,
    /// New folder of the snapshot.
    out: PathBuf,
    dim: u32,
    clones: u32,
}

/// Returns the value of every weight of a row.
pub(super) fn weight_of(row: u64) -> f32 {
    (row % WEIGHT_BOUND) as f32
}

pub(super) fn write(job: &WriteJob) -> Result<Value> {
    let meter = Meter::new();
    let started_us = meter.now_us();
    let (placement, index) = read_placement(&job.placement)?;
    let clones = Clones::new(placement.row_count(), job.clones, 0.0)?;
    let table = TableSchema::plain(TABLE, u64::from(clones.row_count()), job.dim);
    let placed = PlacedTables { tables: vec![TableId(0)], index: clones.index(&index)? };
    let schema = Schema::new(vec![table])?;
    let folder = Arc::new(FsFolder::create(&job.out)?);
    let budget = Budget::unlimited();
    let mut writer = SnapshotWriter::create_placed(folder, &schema, vec![placed], &budget)?;
    writer.fill(0, &mut |key, row| {
        row.fill(weight_of(key.row.0));
        Ok(true)
    })?;
    let report = writer.finish()?;
    Ok(json!({
        "row_count": report.row_count,
        "replica_count": report.replica_count,
        "page_count": report.page_count,
        "pages_bytes": report.pages_bytes,
        "places_bytes": report.places_bytes,
        "write_s": (meter.now_us() - started_us) as f64 / 1e6,
    }))
}
