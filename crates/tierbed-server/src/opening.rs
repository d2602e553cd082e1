//! Opening of the snapshot as the options say.

use std::path::Path;
use std::sync::Arc;

use tierbed_core::{Error, Result, Schema, TableId};
use tierbed_io::{EngineOptions, Folder, FsFolder, PAGE_BYTES};
use tierbed_snapshot::manifest::Manifest;
use tierbed_snapshot::{
    Backend, CachePart, MissMode, NeighbourOptions, RecordOptions, Recorded, RefreshOptions,
    Snapshot, SnapshotOptions, TierStackOptions,
};

use crate::options::{Reading, Recording};
use crate::resident;
use crate::values::words;

/// Bytes that a recorder collects before it writes a file.
const RECORDED_FILE_BYTES: usize = 1 << 20;

/// Opens the snapshot in the folder at `path`.
///
/// # Errors
/// `Invalid` for a folder without a snapshot, a budget that is too small and options that do not
/// fit each other; `Corruption` for bytes that are not those written.
pub(crate) fn open(path: &Path, reading: &Reading) -> Result<Arc<Snapshot>> {
    let folder = FsFolder::open(path)?;
    let options = options(&folder, reading)?;
    let snapshot = Arc::new(Snapshot::open(Arc::new(folder), &options)?);
    snapshot.refresh_in_background()?;
    snapshot.map_neighbours_in_background()?;
    snapshot.view().ids()?;
    Ok(snapshot)
}

/// Returns how the snapshot in `folder` is opened.
///
/// # Errors
/// `Invalid` for options that do not fit it.
pub(crate) fn options(folder: &FsFolder, reading: &Reading) -> Result<SnapshotOptions> {
    Ok(SnapshotOptions {
        dram_budget_bytes: reading.dram_budget.0,
        engine: EngineOptions {
            choice: reading.io_engine.parse()?,
            buf_bytes: PAGE_BYTES,
            ..SnapshotOptions::default().engine
        },
        backend: Backend::from_name(&reading.backend)?,
        tiers: tiers(folder, reading)?,
        ..SnapshotOptions::default()
    })
}

fn tiers(folder: &FsFolder, reading: &Reading) -> Result<TierStackOptions> {
    let file = reading.neighbours.as_deref();
    let parts = words(&reading.cache);
    let parts = parts
        .iter()
        .map(|part| CachePart::parse(part, || NeighbourOptions::open_file(folder, file)));
    let tiers = TierStackOptions::of_parts(parts.collect::<Result<_>>()?, file.is_some())?;
    let manifest = Manifest::read(folder)?;
    let resident = match &reading.resident {
        Some(plan) => resident::read(plan, &manifest)?,
        None => Vec::new(),
    };
    let misses = MissMode::from_name(&reading.misses)?;
    let refresh = match words(&reading.refresh).as_slice() {
        [] => RefreshOptions::default(),
        [all] if all == "all" => RefreshOptions::of_tables(&manifest.schema, &[])?,
        names => RefreshOptions::of_tables(&manifest.schema, names)?,
    };
    Ok(TierStackOptions { resident, misses, refresh, ..tiers })
}

/// Records what is looked up from now on, where that is wanted.
///
/// # Errors
/// `Invalid` for tables that there are not, `Io` for a folder that cannot be made.
pub(crate) fn record(snapshot: &Snapshot, recording: &Recording) -> Result<()> {
    let Some(into) = &recording.record else { return Ok(()) };
    let schema = snapshot.schema();
    let mut groups: Vec<Vec<String>> =
        recording.record_tables.iter().map(|group| words(group)).collect();
    if groups.is_empty() {
        groups = schema.tables().iter().map(|table| vec![table.name.clone()]).collect();
    }
    let recorded = groups.iter().map(|names| {
        let tables = names.iter().map(|name| table_id(schema, name)).collect::<Result<Vec<_>>>()?;
        let folder = FsFolder::create(into.join(names.join("+")))
            .map_err(|error| error.with("remedy", "name a folder that the server may write"))?;
        Ok(Recorded { tables, folder: Arc::new(folder) as Arc<dyn Folder> })
    });
    let options = RecordOptions {
        sample: recording.record_sample,
        file_bytes: RECORDED_FILE_BYTES,
        bytes_max: recording.record_max.0,
        ..RecordOptions::default()
    };
    snapshot.record(recorded.collect::<Result<Vec<_>>>()?, &options)
}

fn table_id(schema: &Schema, name: &str) -> Result<TableId> {
    let mut tables = (0..).map(TableId).zip(schema.tables());
    tables.find(|(_, table)| table.name == name).map(|(id, _)| id).ok_or_else(|| {
        Error::invalid("no such table to record")
            .with("table", name)
            .with("remedy", "name tables that the snapshot has")
    })
}
