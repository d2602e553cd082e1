//! Move of all rows from the planned to the window engine.
//!
//! One pass reads everything and sorts it outside memory, then rows are written in file order.
//! The engine has a folder inside the store's: its first checkpoint puts it in force, and until
//! then a crash reopens at the last checkpoint along the plan. Nothing is changed in place.

#![expect(clippy::indexing_slicing, reason = "records are of the length that the schema says")]

use std::path::Path;
use std::sync::{Arc, LazyLock};

use crate::planned::PlannedEngine;
use crate::window::changes::Room;
use crate::window::{Backend, WindowEngine};
use tierbed_core::store::RowWrite;
use tierbed_core::{Error, Result, RowId, RowKey, Schema, TableId};
use tierbed_io::sorter::{ExternalSorter, SortedRecords, SorterOptions, MEMORY_BYTES_MIN};
use tierbed_io::{Folder, FsFolder};
use tierbed_store::CommitLog;

use crate::auto::engine::{AutoEngine, State};
use crate::auto::follow::PLAN_PREFIX;
use crate::auto::ids::IDS_PREFIX;
use crate::auto::options::OrderConfig;
use crate::auto::planned::Planned;
use crate::auto::tables::Tables;
use crate::auto::windowed::Windowed;

/// Where the rows are after a move, in the store's folder.
pub(crate) const WINDOW_FOLDER: &str = "window";
/// Sort key: table, then row, most significant byte first.
const KEY_BYTES: usize = 4 + 8;
/// Rows written at once.
const CHUNK_ROWS: usize = 4096;

pub(crate) static NO_TABLES: LazyLock<Schema> = LazyLock::new(Schema::default);

/// Tells whether the rows of the store in `folder` have moved, and a checkpoint says so.
///
/// # Errors
/// `Corruption` when rows lie inside and nothing says which commit is in force.
pub(crate) fn has_moved(folder: &dyn Folder) -> Result<bool> {
    let Some(inside) = folder.path().map(|path| path.join(WINDOW_FOLDER)) else {
        return Ok(false);
    };
    if !inside.is_dir() {
        return Ok(false);
    }
    let inside = FsFolder::open(inside)?;
    if inside.read(CommitLog::CURRENT)?.is_some() {
        return Ok(CommitLog::stored_backend(&inside)?.is_some());
    }
    // What is left of a move that was cut short is worth nothing: the plan's commit has all.
    let has_plan = CommitLog::stored_backend(folder)?.is_some();
    if has_plan && CommitLog::found_numbers(&inside)?.is_empty() {
        return Ok(false);
    }
    CommitLog::check_new(&inside).map_err(|error| error.with("folder", WINDOW_FOLDER))?;
    Ok(false)
}

/// Opens the engine inside, and removes what the plan left behind.
pub(crate) fn open_moved(
    folder: &Arc<dyn Folder>,
    path: &Path,
    config: &OrderConfig,
) -> Result<State> {
    let inside = path.join(WINDOW_FOLDER);
    let stored = CommitLog::stored_backend(&FsFolder::open(&inside)?)?;
    let stored = stored.as_deref().map_or(Ok(Backend::File), Backend::from_name)?;
    let backend = config.backend.unwrap_or(stored);
    let engine = WindowEngine::open(Some(&inside), &config.engine(backend))?;
    let is_left_over = |name: &&String| {
        name.as_str() == "CURRENT"
            || name.starts_with("commit-")
            || name.starts_with(PLAN_PREFIX)
            || name.starts_with(IDS_PREFIX)
            || name.ends_with(".rows")
    };
    for name in folder.list()?.iter().filter(is_left_over) {
        // Left-overs cost space, not correctness.
        let _ = folder.remove(name);
    }
    Ok(State::Windowed(Box::new(Windowed::opened(engine))))
}

impl AutoEngine {
    /// Moves every row to the engine that needs no plan, because of `why`.
    ///
    /// # Errors
    /// Before the plan is left: those of reading, and nothing changed. Behind it the store must
    /// be reopened.
    pub(crate) fn move_to_window(&mut self, why: &str) -> Result<()> {
        self.end_joined()?;
        let folder = self.folder()?;
        let Some(planned) = self.planned_mut() else { return Ok(()) };
        let (sorted, row_count) = sort_all(planned, &folder)?;
        let (tables, changes) = (planned.tables(), std::mem::take(&mut planned.engine.changes));
        let ids = (0..tables.schema.tables().len() as u32).map(TableId);
        let next_rows = ids.map(|table| planned.engine.next_row(table)).collect::<Vec<_>>();
        // From here on there is no way back but the last checkpoint.
        self.state = State::Lost(why.to_owned());
        let moved = self.open_inside(&folder, &tables, &next_rows, sorted);
        // Its files stay until the rows are in force without a plan.
        self.ids = None;
        match moved {
            Ok(mut windowed) => {
                // Rows came as they were: none of them changed by the move.
                let room = Room::of(&windowed.engine.budget);
                windowed.engine.store.changes = changes.moved_to(room);
                self.state = State::Windowed(Box::new(windowed));
                self.notes.reason = Some(why.to_owned());
                self.notes.fallback_count += 1;
                self.notes.rows_moved += row_count;
                Ok(())
            }
            Err(error) => {
                self.state = State::lost(&error);
                Err(error)
            }
        }
    }

    fn open_inside(
        &mut self,
        folder: &Arc<dyn Folder>,
        tables: &Tables,
        next_rows: &[u64],
        sorted: SortedRecords,
    ) -> Result<Windowed> {
        let past = CommitLog::open(Arc::clone(folder), crate::planned::BACKEND)?;
        let inside = self.window_folder()?;
        let leftovers = FsFolder::create(&inside)?;
        for name in leftovers.list()? {
            // It says that nothing is in force, as long as anything lies there.
            if name != CommitLog::CURRENT {
                leftovers.remove(&name)?;
            }
        }
        let backend = self.config.on_mismatch().backend().unwrap_or(Backend::File);
        let mut engine = WindowEngine::open(Some(&inside), &self.config.engine(backend))?;
        for (expected, table, hyper) in tables.iter().filter(|(_, table, _)| !table.is_own()) {
            let id = self.add_again(&mut engine, expected, table)?;
            engine.take_over_run(id, hyper)?;
        }
        if let Some(ids) = &mut self.ids {
            ids.copy_to(&mut engine, &|table| next_rows[table.0 as usize])?;
        }
        write_sorted(&mut engine, &tables.schema, sorted)?;
        let past = past.manifest().is_some().then_some(past);
        Ok(Windowed { past, ..Windowed::opened(engine) })
    }
}

// Reads everything once and sorts it by table and row.
fn sort_all(planned: &mut Planned, folder: &Arc<dyn Folder>) -> Result<(SortedRecords, u64)> {
    planned.unplanned.clear();
    let Planned { engine, aside, .. } = planned;
    // Pages of an index are not along the plan.
    let tables = engine.schema().tables().iter().filter(|table| !table.is_own());
    let record_bytes = tables.map(|table| table.record_bytes()).max();
    let options = SorterOptions {
        key_bytes: KEY_BYTES,
        payload_bytes: record_bytes.ok_or_else(|| Error::invalid("the store has no table"))?,
        memory_bytes: aside.free_bytes().max(MEMORY_BYTES_MIN),
        scratch_name: format!("{PLAN_PREFIX}moving"),
    };
    let mut sorter = ExternalSorter::new(Arc::clone(folder), &options, aside)?;
    let mut row_count = 0;
    let mut payload = vec![0; options.payload_bytes];
    let pushed = push_rows(engine, &mut sorter, &mut payload, &mut row_count);
    pushed.and_then(|()| Ok((sorter.finish()?, row_count)))
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn push_rows(
    engine: &mut PlannedEngine,
    sorter: &mut ExternalSorter,
    payload: &mut [u8],
    row_count: &mut u64,
) -> Result<()> {
    engine.scan_all(&mut |table, row, record| {
        let mut key = [0; KEY_BYTES];
        let bytes = table.0.to_be_bytes().into_iter().chain(row.0.to_be_bytes());
        key.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        let record: &[u8] = bytemuck::cast_slice(record);
        payload[..record.len()].copy_from_slice(record);
        *row_count += 1;
        sorter.push(&key, payload)
    })
}

fn write_sorted(
    engine: &mut WindowEngine,
    schema: &Schema,
    mut sorted: SortedRecords,
) -> Result<()> {
    let (mut keys, mut bytes, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        let next = sorted.next()?;
        if let Some(record) = next {
            let key = key_of(record.key)?;
            let record_bytes = schema.table(key.table)?.record_bytes();
            keys.push(key);
            bytes.extend_from_slice(&record.payload[..record_bytes]);
            ends.push(bytes.len());
        }
        if keys.len() == CHUNK_ROWS || next.is_none() {
            assert_eq!(keys.len(), ends.len(), "every row to write has a record");
            let starts = std::iter::once(&0).chain(&ends);
            let parts = keys.iter().zip(starts.zip(&ends));
            let rows: Vec<RowWrite<'_>> = parts
                .map(|(&key, (&start, &end))| RowWrite { key, record: &bytes[start..end] })
                .collect();
            engine.take_over_rows(&rows)?;
            keys.clear();
            bytes.clear();
            ends.clear();
        }
        if next.is_none() {
            return Ok(());
        }
    }
}

#[expect(clippy::big_endian_bytes, reason = "keys compare as bytes")]
fn key_of(key: &[u8]) -> Result<RowKey> {
    let table = key.first_chunk().map(|bytes| TableId(u32::from_be_bytes(*bytes)));
    let row = key.last_chunk().map(|bytes| RowId(u64::from_be_bytes(*bytes)));
    let short = || Error::corruption("sorted record has a short key");
    Ok(RowKey::new(table.ok_or_else(short)?, row.ok_or_else(short)?))
}
