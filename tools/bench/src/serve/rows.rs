//! Rows that follow from their numbers, and requests for them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::env::{mix64, SplitMix64};
use tierbed_core::{Budget, Error, Result, RowId, Schema, TableId, TableSchema};
use tierbed_io::FsFolder;
use tierbed_snapshot::{Snapshot, SnapshotOptions, SnapshotWriter};

/// Name of the table.
pub(super) const TABLE: &str = "rows";
/// Spreads popular rows over the table; odd, so that no two ranks meet in a table of 2^n rows.
const SPREAD: u64 = 2_654_435_761;
/// Other numbers than those of weights choose the rows that versions change.
const CHANGES: u64 = 0xC4A6_5E5D;

/// What is asked for.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shape {
    pub(super) row_count: u64,
    pub(super) dim: usize,
    /// Ids of a sample.
    pub(super) id_count: usize,
    /// Samples of a request.
    #[serde(default = "one")]
    pub(super) sample_count: usize,
    /// How unevenly rows are asked for: 0 is evenly.
    pub(super) skew: f64,
    /// Share of the rows that every version of them changes; the others stay as they were.
    #[serde(default)]
    pub(super) changed_share: f64,
}

fn one() -> usize {
    1
}

impl Shape {
    /// Returns the ids of a request.
    pub(super) fn asked(&self) -> usize {
        self.id_count * self.sample_count
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { row_count, dim, skew, changed_share, .. } = *self;
        let is_good = row_count > 0 && row_count < 1 << 32 && dim > 0 && self.asked() > 0;
        if is_good && (0.0..=4.0).contains(&skew) && (0.0..=1.0).contains(&changed_share) {
            return Ok(());
        }
        Err(Error::invalid("requests must be for some ids of some rows")
            .with("found", format_args!("{self:?}")))
    }

    /// Returns the bytes of a row, as every server must answer them.
    pub(super) fn put_row(&self, row: u64, out: &mut Vec<u8>) {
        self.put_version(row, 0, out);
    }

    /// Returns the bytes of a row in a later version of the rows; version 0 is the first.
    pub(super) fn put_version(&self, row: u64, version: u32, out: &mut Vec<u8>) {
        let version = if self.is_changed(row) { version } else { 0 };
        for column in 0..self.dim {
            out.extend_from_slice(&weight(row, version, column).to_le_bytes());
        }
    }

    /// Whether versions change a row.
    fn is_changed(&self, row: u64) -> bool {
        let place = mix64(row ^ CHANGES) >> 11;
        (place as f64) < self.changed_share * (1_u64 << 53) as f64
    }
}

/// Returns one weight: a whole number that `f32` has exactly.
pub(super) fn weight(row: u64, version: u32, column: usize) -> f32 {
    let version = if version == 0 { 0 } else { mix64(u64::from(version)) };
    (mix64((((column as u64) << 32) | row) ^ version) >> 40) as f32
}

/// Draws the ids of requests.
#[derive(Debug)]
pub(super) struct Ids {
    shape: Shape,
    numbers: SplitMix64,
}

impl Ids {
    pub(super) fn new(shape: Shape, seed: u64) -> Self {
        Self { shape, numbers: SplitMix64::new(seed) }
    }

    pub(super) fn draw(&mut self, out: &mut Vec<i64>) {
        out.clear();
        for _ in 0..self.shape.asked() {
            out.push(self.id());
        }
    }

    /// Draws one id of a continuous power law.
    fn id(&mut self) -> i64 {
        let Shape { row_count, skew, .. } = self.shape;
        let unit = self.numbers.unit_f64();
        let end = row_count as f64 + 1.0;
        let rank = if (skew - 1.0).abs() < 1e-9 {
            end.powf(unit)
        } else {
            let power = 1.0 - skew;
            (end.powf(power) * unit + (1.0 - unit)).powf(power.recip())
        };
        let rank = (rank as u64).clamp(1, row_count) - 1;
        (rank * SPREAD % row_count) as i64
    }
}

/// What `write` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WriteJob {
    /// New folder of the snapshot.
    out: PathBuf,
    shape: Shape,
}

/// Writes a snapshot whose features all read one table.
pub(super) fn write(job: &WriteJob) -> Result<Value> {
    job.shape.check()?;
    let mut writer = writer(&job.out, job.shape)?;
    push(&mut writer, job.shape, 0..job.shape.row_count, 0)?;
    finish(writer, job.shape)
}

/// What `delta` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeltaJob {
    /// New folder of the delta.
    out: PathBuf,
    /// Folder of the snapshot.
    snapshot: PathBuf,
    shape: Shape,
    /// At least 1.
    version: u32,
}

/// Writes what a version changed of a snapshot.
pub(super) fn delta(job: &DeltaJob) -> Result<Value> {
    let shape = job.shape;
    shape.check()?;
    let options = SnapshotOptions::default();
    let base = Snapshot::open(Arc::new(FsFolder::open(&job.snapshot)?), &options)?;
    let mut writer = writer(&job.out, shape)?;
    writer.set_base(&base)?;
    let changed = (0..shape.row_count).filter(|row| shape.is_changed(*row));
    push(&mut writer, shape, changed, job.version)?;
    finish(writer, shape)
}

fn writer(out: &Path, shape: Shape) -> Result<SnapshotWriter> {
    let dim = u32::try_from(shape.dim)
        .map_err(|cause| Error::invalid("rows are too long").with("cause", cause))?;
    let schema = Schema::new(vec![TableSchema::plain(TABLE, shape.row_count, dim)])?;
    SnapshotWriter::create(Arc::new(FsFolder::create(out)?), &schema, &Budget::unlimited())
}

fn push(
    writer: &mut SnapshotWriter,
    shape: Shape,
    rows: impl Iterator<Item = u64>,
    version: u32,
) -> Result<()> {
    let mut weights = vec![0.0; shape.dim];
    for row in rows {
        for (column, out) in weights.iter_mut().enumerate() {
            *out = weight(row, version, column);
        }
        writer.push(TableId(0), RowId(row), &weights)?;
    }
    Ok(())
}

fn finish(mut writer: SnapshotWriter, shape: Shape) -> Result<Value> {
    attach_serving(&mut writer, shape)?;
    let report = writer.finish()?;
    Ok(json!({ "row_count": report.row_count, "pages_bytes": report.pages_bytes }))
}

/// Attaches the features, which all read one table.
pub(super) fn attach_serving(writer: &mut SnapshotWriter, shape: Shape) -> Result<()> {
    let features: Vec<_> = (0..shape.id_count)
        .map(|at| json!({ "name": format!("C{at}"), "table": TABLE, "pooling": "sum" }))
        .collect();
    let serving = json!({ "features": features }).to_string();
    writer.attach("serving.json", serving.as_bytes())
}
