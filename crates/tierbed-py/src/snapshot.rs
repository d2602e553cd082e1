//! A published snapshot, for Python.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tierbed_cache::TierBudget;
use tierbed_core::{Error, Result, Schema, TableId};
use tierbed_io::{Device, EngineOptions, FsFolder, PAGE_BYTES};
use tierbed_snapshot::manifest::Manifest;
use tierbed_snapshot::{
    Backend, CachePart, CacheTier, MissMode, NeighbourOptions, RecordOptions, Recorded,
    RefreshOptions, ResidentTable, SharedTiers, Snapshot, SnapshotOptions, TierStackOptions,
};
use tierbed_train::budget_json;

use crate::batch::{run_lookup, run_translate, FeaturePlan, LookupArguments};
use crate::errors::run;
use crate::neighbours::{self, TableNeighbours};
use crate::opened::OpenedSnapshot;
use crate::plain::Plain;
use crate::resident::NativeResident;
use crate::store::make_plan;
use crate::tensors::Tensor;
use crate::tier_budget::NativeTierBudget;

/// A published snapshot, read through a byte-budgeted row cache.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeSnapshot {
    opened: OpenedSnapshot,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GivenOptions {
    dram_budget_bytes: u64,
    io_engine: String,
    queue_depth: u32,
    backend: String,
    reader_count: Option<usize>,
    /// Most bytes of the tiers.
    cache_bytes_max: Option<u64>,
    tiers: Vec<GivenTier>,
    /// The file of neighbours; by default beside the snapshot.
    neighbours: Option<PathBuf>,
    misses: String,
    /// Bytes of the tiers that stay in a shared budget.
    tier_floor_bytes: Option<u64>,
    /// Tables whose approximate answers are followed by a read; an empty list is all of them.
    refresh: Option<Vec<String>>,
}

/// A tier as users give it: `CacheTier` or `NeighbourTier` of Python, or the text of either.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum GivenTier {
    Text(String),
    Rows { codec: String, policy: String, share: f64, admit_after: u8 },
    Neighbours { share: f64, inline: bool },
}

impl GivenTier {
    fn part(&self, open: impl FnOnce() -> Result<Arc<dyn Device>>) -> Result<CachePart> {
        match self {
            Self::Text(text) => CachePart::parse(text, open),
            Self::Rows { codec, policy, share, admit_after } => {
                CacheTier::named(codec, policy, *share, *admit_after).map(CachePart::Rows)
            }
            Self::Neighbours { share, inline } => Ok(CachePart::Neighbours(NeighbourOptions {
                share: *share,
                is_inline: *inline,
                ..NeighbourOptions::of(open()?)
            })),
        }
    }
}

impl GivenOptions {
    fn options(&self, tiers: TierStackOptions) -> Result<SnapshotOptions> {
        let defaults = SnapshotOptions::default();
        let queue_depth = match self.queue_depth {
            0 => defaults.engine.queue_depth,
            asked => asked,
        };
        Ok(SnapshotOptions {
            dram_budget_bytes: self.dram_budget_bytes,
            engine: EngineOptions {
                choice: self.io_engine.parse()?,
                queue_depth,
                buf_bytes: PAGE_BYTES,
            },
            backend: Backend::from_name(&self.backend)?,
            reader_count: self.reader_count.unwrap_or(defaults.reader_count),
            cache_bytes_max: self.cache_bytes_max,
            tiers,
            ..defaults
        })
    }

    /// Returns how the snapshot in `folder` is opened.
    pub(crate) fn of_folder(
        &self,
        folder: &FsFolder,
        name: &str,
        resident: Vec<Arc<ResidentTable>>,
        budget: Option<Arc<TierBudget>>,
    ) -> Result<SnapshotOptions> {
        let shared = budget.map(|budget| SharedTiers {
            budget,
            name: name.to_owned(),
            floor_bytes: self.tier_floor_bytes,
        });
        self.options(self.tiers(folder, resident, shared)?)
    }

    /// Puts together what the tiers are made of.
    fn tiers(
        &self,
        folder: &FsFolder,
        resident: Vec<Arc<ResidentTable>>,
        shared: Option<SharedTiers>,
    ) -> Result<TierStackOptions> {
        let file = self.neighbours.as_deref();
        let parts =
            self.tiers.iter().map(|tier| tier.part(|| NeighbourOptions::open_file(folder, file)));
        let parts = parts.collect::<Result<_>>()?;
        let refresh = match &self.refresh {
            Some(names) => RefreshOptions::of_tables(&Manifest::read(folder)?.schema, names)?,
            None => RefreshOptions::default(),
        };
        let misses = MissMode::from_name(&self.misses)?;
        let tiers = TierStackOptions::of_parts(parts, file.is_some())?;
        Ok(TierStackOptions { resident, misses, refresh, shared, ..tiers })
    }
}

fn open(
    path: &Path,
    name: &str,
    given: &GivenOptions,
    resident: Vec<Arc<ResidentTable>>,
    budget: Option<Arc<TierBudget>>,
) -> Result<Arc<Snapshot>> {
    let folder = FsFolder::open(path)?;
    let options = given.of_folder(&folder, name, resident, budget)?;
    let snapshot = Arc::new(Snapshot::open(Arc::new(folder), &options)?);
    snapshot.refresh_in_background()?;
    snapshot.map_neighbours_in_background()?;
    Ok(snapshot)
}

impl NativeSnapshot {
    pub(crate) fn of(opened: OpenedSnapshot) -> Self {
        Self { opened }
    }

    /// Returns the snapshot, shared; lookups run side by side.
    pub(crate) fn shared(&self) -> Result<Arc<Snapshot>> {
        self.opened.shared()
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Snapshot) -> Result<T> + Send,
    ) -> PyResult<T> {
        run(py, || work(self.shared()?.as_ref()))
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenRecording {
    groups: Vec<GivenGroup>,
    sample: f64,
    seed: u64,
    file_bytes: usize,
    bytes_max: u64,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenGroup {
    tables: Vec<u32>,
    folder: PathBuf,
}

#[pymethods]
impl NativeSnapshot {
    /// Records queries of groups of tables, each into a folder of its own.
    fn record(&self, py: Python<'_>, options: Plain<GivenRecording>) -> PyResult<()> {
        let snapshot = self.shared();
        run(py, || {
            let Plain(GivenRecording { groups, sample, seed, file_bytes, bytes_max }) = options;
            let groups = groups.into_iter().map(|group| {
                let tables = group.tables.into_iter().map(TableId).collect();
                Ok(Recorded { tables, folder: Arc::new(FsFolder::create(group.folder)?) })
            });
            let options = RecordOptions { sample, seed, file_bytes, bytes_max };
            snapshot?.record(groups.collect::<Result<Vec<_>>>()?, &options)
        })
    }

    #[new]
    #[pyo3(signature = (path, options, resident, tier_budget))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        options: Plain<GivenOptions>,
        resident: Vec<PyRef<'_, NativeResident>>,
        tier_budget: Option<PyRef<'_, NativeTierBudget>>,
    ) -> PyResult<Self> {
        let resident: Vec<_> = resident.iter().map(|table| table.table()).collect();
        let budgets = tier_budget.map(|budget| budget.budgets());
        let opened = run(py, || {
            // A forked child opens it again, perhaps in another working directory.
            let name = path.display().to_string();
            let path = std::path::absolute(&path)
                .map_err(|cause| Error::os("cannot name folder", cause))?;
            let opened = OpenedSnapshot::new(move || {
                let budget = budgets.as_ref().map(|budgets| budgets.here()).transpose()?;
                open(&path, &name, &options.0, resident.clone(), budget)
            })?;
            opened.shared()?.view().ids()?;
            Ok(opened)
        })?;
        Ok(Self { opened })
    }

    fn schema(&self, py: Python<'_>) -> PyResult<Plain<Schema>> {
        self.with(py, |snapshot| Ok(Plain(snapshot.schema().clone())))
    }

    fn plan(
        &self,
        py: Python<'_>,
        tables: Vec<u32>,
        poolings: Vec<String>,
    ) -> PyResult<FeaturePlan> {
        self.with(py, |snapshot| make_plan(snapshot.schema(), &tables, &poolings))
    }

    #[pyo3(signature = (plan, indices, offsets, weights, out))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn lookup(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        run_lookup(plan, &LookupArguments { indices, offsets, weights, out }, |plan, bags, out| {
            self.shared()?.lookup(plan, bags, out).map(drop)
        })
    }

    #[pyo3(signature = (plan, indices, offsets, now, out))]
    #[expect(clippy::too_many_arguments, reason = "one argument per tensor, as in Python")]
    fn translate(
        &self,
        plan: &Bound<'_, FeaturePlan>,
        indices: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        now: Option<u32>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        // A snapshot never trains, whatever the time is.
        let _ = now;
        run_translate(plan, indices, offsets, out, |plan, bags, rows| {
            let snapshot = self.shared()?;
            let view = snapshot.view();
            view.ids()?.translate(&view, plan, bags, rows)
        })
    }

    fn attachment<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let bytes = self.with(py, |snapshot| snapshot.attachment(name))?;
        Ok(bytes.map(|bytes| PyBytes::new(py, &bytes)))
    }

    fn attachment_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |snapshot| Ok(snapshot.attachment_names()))
    }

    /// What tells this snapshot from every other.
    fn identity(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, Snapshot::identity)
    }

    fn verify(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, Snapshot::verify)
    }

    /// Writes the neighbours of tables, `[row_count, 2]` each, to a file; returns where.
    fn write_neighbours(
        &self,
        py: Python<'_>,
        path: Option<PathBuf>,
        tables: Vec<(u32, Bound<'_, PyAny>)>,
    ) -> PyResult<PathBuf> {
        let tables = tables
            .iter()
            .map(|(table, near)| Ok((TableId(*table), Tensor::<i64>::import(near, "neighbours")?)));
        let tables = tables.collect::<PyResult<Vec<_>>>()?;
        let given =
            tables.iter().map(|(table, near)| TableNeighbours { table: *table, near: near.view() });
        let given: Vec<_> = given.collect();
        self.with(py, |snapshot| {
            neighbours::write(snapshot.folder().as_ref(), snapshot.schema(), path, &given)
        })
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Plain<serde_json::Value>> {
        self.with(py, |snapshot| {
            Ok(Plain(serde_json::json!({
                "snapshot": snapshot.stats(),
                "contents": snapshot.inspect(),
                "disk_bytes": snapshot.disk_bytes(),
                "budget": budget_json(&[snapshot.budget_report()]),
            })))
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        run(py, || {
            self.opened.close();
            Ok(())
        })
    }
}
