//! A snapshot of cloned tables: every weight of a row follows from its number, or the rows of one
//! clone are given.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::{Budget, Error, Result, Schema, TableId, TableSchema};
use tierbed_io::{Folder, FsFolder};
use tierbed_snapshot::placement::read_placement;
use tierbed_snapshot::{PlacedTables, SnapshotWriter};

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
    /// The rows of one clone, `[row_count, dim]` little-endian f32 without a header.
    #[serde(default)]
    rows: Option<PathBuf>,
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
    let given = job.rows.as_deref().map(|path| read_rows(path, job, placement.row_count()));
    let given = given.transpose()?;
    let dim = job.dim as usize;
    writer.fill(0, &mut |key, row| {
        match &given {
            None => row.fill(weight_of(key.row.0)),
            Some(given) => {
                let start = (key.row.0 % u64::from(placement.row_count())) as usize * dim;
                row.copy_from_slice(given.get(start..start + dim).unwrap_or_default());
            }
        }
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

/// Reads the rows of one clone.
fn read_rows(path: &Path, job: &WriteJob, row_count: u32) -> Result<Vec<f32>> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    let bytes = FsFolder::open(folder)?.read(&name.unwrap_or_default())?.unwrap_or_default();
    let expected = u64::from(row_count) * u64::from(job.dim) * size_of::<f32>() as u64;
    if bytes.len() as u64 != expected {
        return Err(Error::invalid("rows of a clone have the wrong length")
            .with("path", path.display())
            .with("found_bytes", bytes.len())
            .with("expected_bytes", expected));
    }
    let words = bytes.chunks_exact(size_of::<f32>());
    Ok(words.map(|word| word.try_into().map_or(0.0, f32::from_le_bytes)).collect())
}
