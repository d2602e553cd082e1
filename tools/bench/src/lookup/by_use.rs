//! A snapshot of cloned tables without a placement: most used rows first, or by id behind a head.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::{Budget, Result, RowId, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_snapshot::{HeadSize, PageLayout, SnapshotWriter, TableHeads};

use super::drive::read_packed;
use super::write::{weight_of, TABLE};
use super::Clones;
use crate::meter::Meter;

/// What `write_by_use` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ByUseJob {
    /// A packed log of one clone: its uses are counted.
    log: PathBuf,
    /// New folder of the snapshot.
    out: PathBuf,
    dim: u32,
    clones: u32,
    /// How unevenly clones are asked for.
    skew: f64,
    /// Rows of the head, or `%` of all; `None`: every row has an entry in the index.
    head_rows: Option<String>,
}

pub(super) fn write(job: &ByUseJob) -> Result<Value> {
    let meter = Meter::new();
    let started_us = meter.now_us();
    let log = read_packed(&job.log)?;
    let clones = Clones::new(log.row_count(), job.clones, job.skew)?;
    let mut uses = vec![0u32; log.row_count() as usize];
    for at in 0..log.query_count() {
        for &row in log.query(at).unwrap_or_default() {
            if let Some(uses) = uses.get_mut(row as usize) {
                *uses += 1;
            }
        }
    }
    let schema =
        Schema::new(vec![TableSchema::plain(TABLE, u64::from(clones.row_count()), job.dim)])?;
    let size = job.head_rows.as_deref().map(HeadSize::parse).transpose()?;
    let heads = TableHeads::new(size.map(|size| (TableId(0), size)));
    let layout = PageLayout { heads, ..PageLayout::default() };
    let folder = Arc::new(FsFolder::create(&job.out)?);
    let budget = Budget::unlimited();
    let mut writer = SnapshotWriter::create_placed(folder, &schema, layout, &budget)?;
    let mut weights = vec![0.0; job.dim as usize];
    for row in clones.rows_by_use(&uses) {
        weights.fill(weight_of(u64::from(row)));
        writer.push(TableId(0), RowId(u64::from(row)), &weights)?;
    }
    let report = writer.finish()?;
    Ok(json!({
        "row_count": report.row_count,
        "page_count": report.page_count,
        "pages_bytes": report.pages_bytes,
        "index_bytes": report.index_bytes,
        "write_s": (meter.now_us() - started_us) as f64 / 1e6,
    }))
}
