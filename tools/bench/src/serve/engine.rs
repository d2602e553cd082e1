//! The engine alone: the same lookups in this process, one after another.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{json, Value};
use tierbed_core::{Bags, Result, TableId};
use tierbed_io::FsFolder;
use tierbed_snapshot::{FeatureLayout, Pooling, Snapshot, SnapshotOptions};

use super::report::Times;
use super::rows::{Ids, Shape};
use crate::meter::{thread_cpu_ns, Meter};

/// Rows that are brought into memory at once.
const FILL_ROWS: usize = 4_096;

/// What `engine` is told.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EngineJob {
    snapshot: PathBuf,
    shape: Shape,
    dram_budget_bytes: u64,
    /// All rows are brought into memory first.
    #[serde(default)]
    is_filled: bool,
    seed: u64,
    /// Requests before those that count.
    warm_count: u64,
    count: u64,
}

/// Looks up requests as a server would, without one.
pub(super) fn engine(job: &EngineJob) -> Result<Value> {
    job.shape.check()?;
    let options =
        SnapshotOptions { dram_budget_bytes: job.dram_budget_bytes, ..SnapshotOptions::default() };
    let snapshot = Snapshot::open(Arc::new(FsFolder::open(&job.snapshot)?), &options)?;
    if job.is_filled {
        fill(&snapshot, job.shape)?;
    }
    let Shape { id_count: count, dim, .. } = job.shape;
    let layout = FeatureLayout::new(snapshot.schema(), &vec![(TableId(0), Pooling::Sum); count])?;
    let offsets: Vec<i64> = (0..=job.shape.asked() as i64).collect();
    let mut ids = Ids::new(job.shape, job.seed);
    let (mut drawn, mut out) = (Vec::new(), vec![0.0; job.shape.asked() * dim]);
    let meter = Meter::new();
    let (mut times_us, mut pages, mut cpu_ns) = (Vec::new(), 0, 0);
    for number in 0..job.warm_count + job.count {
        ids.draw(&mut drawn);
        let bags = Bags::new(&drawn, &offsets, None, count)?;
        let (start_us, start_ns) = (meter.now_us(), thread_cpu_ns());
        let stats = snapshot.lookup(&layout, &bags, &mut out)?;
        if number >= job.warm_count {
            times_us.push(u32::try_from(meter.now_us() - start_us).unwrap_or(u32::MAX));
            cpu_ns += thread_cpu_ns() - start_ns;
            pages += stats.pages_read;
        }
    }
    let requests = job.count.max(1) as f64;
    Ok(json!({
        "good_us": Times::of(&mut times_us),
        "pages_per_request": pages as f64 / requests,
        "cpu_us_per_request": cpu_ns as f64 / 1e3 / requests,
    }))
}

/// Looks up every row once.
fn fill(snapshot: &Snapshot, shape: Shape) -> Result<()> {
    let layout = FeatureLayout::new(snapshot.schema(), &[(TableId(0), Pooling::Sum)])?;
    let rows: Vec<i64> = (0..shape.row_count as i64).collect();
    for ids in rows.chunks(FILL_ROWS) {
        let offsets: Vec<i64> = (0..=ids.len() as i64).collect();
        let mut out = vec![0.0; ids.len() * shape.dim];
        snapshot.lookup(&layout, &Bags::new(ids, &offsets, None, 1)?, &mut out)?;
    }
    Ok(())
}
