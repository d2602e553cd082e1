//! Folders as a whole, for Python: kept checkpoints of a store, deltas of a snapshot, snapshots
//! of plain tables.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use tierbed_core::{Budget, Error, Result, TableId};
use tierbed_io::{Folder, FsFolder};
use tierbed_snapshot::delta::apply_delta as apply;
use tierbed_snapshot::{
    import_tables as import, HeadSize, PageLayout, PlacedTables, PlainTable, Report, Snapshot,
    SnapshotOptions, TableCodecs, TableHeads,
};
use tierbed_train::window::{DeltaBase, FindBy};
use tierbed_train::Candidate;

use crate::errors::run;
use crate::plain::Plain;
use crate::tensors::Tensor;

/// Adds the functions of this file to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(kept_checkpoints, module)?)?;
    module.add_function(wrap_pyfunction!(drop_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(restore_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(commits, module)?)?;
    module.add_function(wrap_pyfunction!(put_commit_in_force, module)?)?;
    module.add_function(wrap_pyfunction!(apply_delta, module)?)?;
    module.add_function(wrap_pyfunction!(import_tables, module)?)
}

/// Lists the kept checkpoints of the store at `path`: number, name, bytes.
#[pyfunction]
fn kept_checkpoints(py: Python<'_>, path: PathBuf) -> PyResult<Vec<(u64, String, u64)>> {
    run(py, || {
        let kept = tierbed_train::kept_checkpoints(&path)?;
        Ok(kept.into_iter().map(|kept| (kept.number, kept.name.clone(), kept.bytes())).collect())
    })
}

/// Forgets a kept checkpoint of the store at `path`, which must be closed.
#[pyfunction]
fn drop_checkpoint(py: Python<'_>, path: PathBuf, name: &str) -> PyResult<()> {
    run(py, || tierbed_train::drop_checkpoint(&path, name))
}

/// Makes a kept checkpoint the last one of the store at `path`, which must be closed.
#[pyfunction]
fn restore_checkpoint(py: Python<'_>, path: PathBuf, name: &str) -> PyResult<()> {
    run(py, || tierbed_train::restore_checkpoint(&path, name))
}

/// Checks every commit and kept checkpoint that lies in the store at `path`; returns what each
/// would give back.
#[pyfunction]
fn commits(py: Python<'_>, path: PathBuf) -> PyResult<Plain<Vec<Candidate>>> {
    run(py, || tierbed_train::candidates(&path).map(Plain))
}

/// Puts a commit of the store at `path` in force, after checking it; returns it.
#[pyfunction]
fn put_commit_in_force(py: Python<'_>, path: PathBuf, number: u64) -> PyResult<Plain<Candidate>> {
    run(py, || tierbed_train::put_in_force(&path, number).map(Plain))
}

/// Writes the snapshot that `delta` makes of `base` to `out`; returns a report.
#[pyfunction]
fn apply_delta(
    py: Python<'_>,
    base: PathBuf,
    delta: PathBuf,
    out: PathBuf,
    dram_budget_bytes: u64,
) -> PyResult<Plain<Report>> {
    run(py, || {
        // A third each for what is read, and for sorting and writing.
        let options = SnapshotOptions {
            dram_budget_bytes: dram_budget_bytes / 3,
            reader_count: 1,
            ..SnapshotOptions::default()
        };
        let base = Arc::new(Snapshot::open(Arc::new(FsFolder::open(base)?), &options)?);
        let delta = Arc::new(Snapshot::open_any(Arc::new(FsFolder::open(delta)?), &options)?);
        let out: Arc<dyn Folder> = Arc::new(FsFolder::create(out)?);
        apply(&base, &delta, &out, &Budget::new(dram_budget_bytes / 3)).map(Plain)
    })
}

/// Writes a snapshot of the matrices `tables` to `out`; returns a report.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "as in Python")]
fn import_tables(
    py: Python<'_>,
    tables: Vec<(String, Bound<'_, PyAny>)>,
    placements: Vec<(Vec<u32>, PathBuf)>,
    codecs: Vec<(u32, String)>,
    heads: Vec<(u32, String)>,
    out: PathBuf,
    dram_budget_bytes: u64,
) -> PyResult<Plain<Report>> {
    let mut given = Vec::with_capacity(tables.len());
    for (name, weights) in &tables {
        let dim: u32 = weights.getattr("shape")?.get_item(1)?.extract()?;
        given.push((name.clone(), dim, Tensor::<f32>::import(weights, "weights")?));
    }
    let plain: Vec<PlainTable<'_>> = given
        .iter()
        .map(|(name, dim, weights)| PlainTable { name, dim: *dim, weights: weights.view() })
        .collect();
    run(py, || {
        let out: Arc<dyn Folder> = Arc::new(FsFolder::create(out)?);
        let layout = read_layout(&placements, &codecs, &heads)?;
        import(out, &plain, layout, &Budget::new(dram_budget_bytes)).map(Plain)
    })
}

/// Reads the placement of each group of tables; the others, and they, are kept in `codecs`. Tables
/// of `heads` have a tail, behind a head of so many rows or `%` of them.
pub(crate) fn read_layout(
    placements: &[(Vec<u32>, PathBuf)],
    codecs: &[(u32, String)],
    heads: &[(u32, String)],
) -> Result<PageLayout> {
    let read = |(tables, path): &(Vec<u32>, PathBuf)| {
        PlacedTables::read(tables.iter().map(|&id| TableId(id)).collect(), path)
    };
    let placed = placements.iter().map(read).collect::<Result<_>>()?;
    let codecs = codecs.iter().map(|(table, name)| (TableId(*table), name.as_str()));
    let sizes = heads.iter().map(|(table, size)| Ok((TableId(*table), HeadSize::parse(size)?)));
    let heads = TableHeads::new(sizes.collect::<Result<Vec<_>>>()?);
    Ok(PageLayout { placed, codecs: TableCodecs::named(codecs)?, heads, shards: None })
}

/// Checks that nothing is said of how a delta lies on pages: it has no placement and no tail, and
/// the codecs of its base.
pub(crate) fn check_delta_layout(layout: &PageLayout, names_codecs: bool) -> Result<()> {
    if !layout.placed.is_empty() {
        return Err(Error::unsupported("a delta cannot have placements")
            .with("remedy", "publish in full, with the placement"));
    }
    if names_codecs {
        return Err(Error::unsupported("a delta keeps rows in the codecs of its base")
            .with("remedy", "leave the codec out, or publish in full"));
    }
    if layout.shards.is_some() {
        return Err(Error::unsupported("a delta is not divided into shards")
            .with("remedy", "publish in full, with --shards"));
    }
    if !layout.heads.is_empty() {
        return Err(Error::unsupported("a delta has no tails")
            .with("remedy", "leave head_rows out, or publish in full"));
    }
    Ok(())
}

/// Opens what a delta is made against: a snapshot, then deltas that lie upon it.
pub(crate) fn open_base(folders: &[PathBuf], find_by: FindBy) -> Result<DeltaBase> {
    let mut opened = folders
        .iter()
        .map(|path| FsFolder::open(path).map(|folder| Arc::new(folder) as Arc<dyn Folder>));
    let folder = opened
        .next()
        .unwrap_or_else(|| Err(Error::invalid("a delta is made against at least a snapshot")))?;
    Ok(DeltaBase { folder, deltas: opened.collect::<Result<_>>()?, find_by })
}
