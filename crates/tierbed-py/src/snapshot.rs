//! A published snapshot, for Python.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tierbed_cache::TierBudget;
use tierbed_core::{Error, Result, TableId};
use tierbed_io::{EngineOptions, FsFolder, PAGE_BYTES};
use tierbed_snapshot::manifest::Manifest;
use tierbed_snapshot::PublishedIds;
use tierbed_snapshot::{
    Backend, CacheTier, MissMode, NeighbourOptions, RecordOptions, Recorded, RefreshOptions,
    ResidentTable, SharedTiers, Snapshot, SnapshotOptions, TierStackOptions,
};
use tierbed_train::budget_json;

use crate::errors::run;
use crate::neighbours::{self, TableNeighbours};
use crate::opened::OpenedSnapshot;
use crate::resident::NativeResident;
use crate::store::{make_plan, run_lookup, run_translate, to_json, FeaturePlan, LookupArguments};
use crate::tensors::Tensor;
use crate::tier_budget::NativeTierBudget;

/// A published snapshot, read through a byte-budgeted row cache.
#[pyclass(frozen, module = "tierbed._native")]
pub(crate) struct NativeSnapshot {
    opened: OpenedSnapshot,
    ids: PublishedIds,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenOptions {
    dram_budget_bytes: u64,
    #[serde(default = "auto")]
    io_engine: String,
    #[serde(default)]
    queue_depth: u32,
    #[serde(default = "direct")]
    backend: String,
    #[serde(default)]
    reader_count: Option<usize>,
    /// Most bytes of the tiers.
    #[serde(default)]
    cache_bytes_max: Option<u64>,
    /// The tiers, as `CacheTier::parse` reads them, and neighbours, as `NeighbourOptions::parse`.
    #[serde(default = "lru")]
    tiers: Vec<String>,
    /// The file of neighbours; by default beside the snapshot.
    #[serde(default)]
    neighbours: Option<PathBuf>,
    #[serde(default = "read")]
    misses: String,
    /// Bytes of the tiers that stay in a shared budget.
    #[serde(default)]
    tier_floor_bytes: Option<u64>,
    /// Tables whose approximate answers are followed by a read; an empty list is all of them.
    #[serde(default)]
    refresh: Option<Vec<String>>,
}

fn auto() -> String {
    "auto".to_owned()
}

fn direct() -> String {
    "direct".to_owned()
}

fn lru() -> Vec<String> {
    vec!["lru".to_owned()]
}

fn read() -> String {
    "read".to_owned()
}

impl GivenOptions {
    fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json)
            .map_err(|cause| Error::invalid("snapshot options are wrong").with("cause", cause))
    }

    fn options(given: Self, tiers: TierStackOptions) -> Result<SnapshotOptions> {
        let backend = match given.backend.as_str() {
            "direct" => Backend::Direct,
            "mmap" => Backend::Mmap,
            "memory" => Backend::Memory,
            other => {
                return Err(Error::invalid("unknown snapshot backend")
                    .with("found", other)
                    .with("allowed", "direct, mmap, memory"));
            }
        };
        let defaults = SnapshotOptions::default();
        let queue_depth = match given.queue_depth {
            0 => defaults.engine.queue_depth,
            asked => asked,
        };
        Ok(SnapshotOptions {
            dram_budget_bytes: given.dram_budget_bytes,
            engine: EngineOptions {
                choice: given.io_engine.parse()?,
                queue_depth,
                buf_bytes: PAGE_BYTES,
            },
            backend,
            reader_count: given.reader_count.unwrap_or(defaults.reader_count),
            cache_bytes_max: given.cache_bytes_max,
            tiers,
            ..defaults
        })
    }

    /// Puts together what the tiers are made of.
    fn tiers(
        &self,
        folder: &FsFolder,
        resident: Vec<Arc<ResidentTable>>,
        shared: Option<SharedTiers>,
    ) -> Result<TierStackOptions> {
        let mut refresh = RefreshOptions::default();
        if let Some(names) = &self.refresh {
            refresh.tables = table_ids(&Manifest::read(folder)?, names)?;
        }
        let (mut tiers, mut near) = (Vec::new(), None);
        for text in &self.tiers {
            let open = || neighbours::open(folder, self.neighbours.as_deref());
            match NeighbourOptions::parse(text, open)? {
                None => tiers.push(CacheTier::parse(text)?),
                Some(_) if near.is_some() => {
                    return Err(Error::invalid("a cache has neighbours once").with("found", text));
                }
                given => near = given,
            }
        }
        if self.neighbours.is_some() && near.is_none() {
            return Err(Error::invalid("a file of neighbours needs its share of the cache")
                .with("remedy", "add neighbours:second_chance:4 to the tiers"));
        }
        let misses = MissMode::from_name(&self.misses)?;
        Ok(TierStackOptions { tiers, resident, misses, refresh, neighbours: near, shared })
    }
}

/// Returns the ids of tables by name, or all.
fn table_ids(manifest: &Manifest, names: &[String]) -> Result<Vec<TableId>> {
    let tables = manifest.schema.tables();
    if names.is_empty() {
        return Ok((0..tables.len() as u32).map(TableId).collect());
    }
    let found = names.iter().map(|name| {
        let at = tables.iter().position(|table| table.name == *name);
        at.map(|at| TableId(at as u32))
            .ok_or_else(|| Error::invalid("no such table to refresh").with("table", name))
    });
    found.collect()
}

fn open(
    path: &Path,
    name: &str,
    options_json: &str,
    resident: Vec<Arc<ResidentTable>>,
    budget: Option<Arc<TierBudget>>,
) -> Result<Arc<Snapshot>> {
    let given = GivenOptions::parse(options_json)?;
    let shared = budget.map(|budget| SharedTiers {
        budget,
        name: name.to_owned(),
        floor_bytes: given.tier_floor_bytes,
    });
    let folder = FsFolder::open(path)?;
    let tiers = given.tiers(&folder, resident, shared)?;
    let options = GivenOptions::options(given, tiers)?;
    let snapshot = Arc::new(Snapshot::open(Arc::new(folder), &options)?);
    snapshot.refresh_in_background()?;
    snapshot.map_neighbours_in_background()?;
    Ok(snapshot)
}

impl NativeSnapshot {
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
    fn record(&self, py: Python<'_>, options_json: &str) -> PyResult<()> {
        let snapshot = self.shared();
        run(py, || {
            let given: GivenRecording = serde_json::from_str(options_json).map_err(|cause| {
                Error::invalid("recording options are wrong").with("cause", cause)
            })?;
            let GivenRecording { groups, sample, seed, file_bytes, bytes_max } = given;
            let groups = groups.into_iter().map(|group| {
                let tables = group.tables.into_iter().map(TableId).collect();
                Ok(Recorded { tables, folder: Arc::new(FsFolder::create(group.folder)?) })
            });
            let options = RecordOptions { sample, seed, file_bytes, bytes_max };
            snapshot?.record(groups.collect::<Result<Vec<_>>>()?, &options)
        })
    }

    #[new]
    #[pyo3(signature = (path, options_json, resident, tier_budget))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        options_json: &str,
        resident: Vec<PyRef<'_, NativeResident>>,
        tier_budget: Option<PyRef<'_, NativeTierBudget>>,
    ) -> PyResult<Self> {
        let resident: Vec<_> = resident.iter().map(|table| table.table()).collect();
        let budgets = tier_budget.map(|budget| budget.budgets());
        let options_json = options_json.to_owned();
        let (opened, ids) = run(py, || {
            // A forked child opens it again, perhaps in another working directory.
            let name = path.display().to_string();
            let path = std::path::absolute(&path)
                .map_err(|cause| Error::os("cannot name folder", cause))?;
            let opened = OpenedSnapshot::new(move || {
                let budget = budgets.as_ref().map(|budgets| budgets.here()).transpose()?;
                open(&path, &name, &options_json, resident.clone(), budget)
            })?;
            let ids = PublishedIds::open(opened.shared()?.as_ref())?;
            Ok((opened, ids))
        })?;
        Ok(Self { opened, ids })
    }

    fn schema_json(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |snapshot| to_json(snapshot.schema()))
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
            self.ids.translate(self.shared()?.as_ref(), plan, bags, rows)
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
        self.with(py, |snapshot| {
            Ok(snapshot.attachment_names().into_iter().map(str::to_owned).collect())
        })
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

    fn stats_json(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |snapshot| {
            to_json(&serde_json::json!({
                "snapshot": snapshot.stats(),
                "contents": snapshot.inspect(),
                "disk_bytes": snapshot.disk_bytes(),
                "budget": budget_json(&[snapshot.budget_report()]),
            }))
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        run(py, || {
            self.opened.close();
            Ok(())
        })
    }
}
