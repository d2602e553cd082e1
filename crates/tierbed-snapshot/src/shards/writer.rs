//! Writer of a publish in shards: each row goes to the snapshot of its shard.
//!
//! All snapshots are written at once, from one pass over the rows, each in a part of the memory.
//! `shards.json` is written last: before it there are no shards, after it there are all.
//!
//! ```text
//! push ─▶ shard and row ─▶ writer of that shard        attachments ─▶ every writer
//! finish ─▶ rows never written ─▶ snapshots ─▶ maps ─▶ shards.json
//! ```
//!
//! Rows are numbered anew in a shard, and an initial value is a function of the number. So where
//! initial values are random, rows that were never written are written into the shards of a divided
//! table; where they are a constant nothing is.
#![expect(clippy::indexing_slicing, reason = "shards and tables are those of the writers")]

use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::env::mix64;
use tierbed_core::schema::InitSpec;
use tierbed_core::{Budget, Error, Reservation, Result, RowId, Schema, TableId, TableSchema};
use tierbed_io::{Folder, FolderLock, FsFolder, OpenMode};
use tierbed_kernels::fill_initial;

use super::manifest::{
    DividedTable, Division, ShardInfo, ShardsManifest, PUBLISH_END, SHARDS_NAME,
};
use super::map::ShardMap;
use super::pages::divide_pages;
use super::plan::ShardPlan;
use super::row_map::{RowMap, RowMapShape};
use crate::codecs::PageLayout;
use crate::manifest::served_schema;
use crate::placed::PlacedTables;
use crate::writer::{Report, SnapshotWriter};

/// Attachment of each shard's snapshot: which shard of which publish it is.
pub const SHARD_ATTACHMENT: &str = "shard";
/// A writer of a shard sorts in no more than this.
const WRITER_BYTES_MAX: u64 = 64 << 20;

/// What the attachment [`SHARD_ATTACHMENT`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct ShardOf {
    /// Number of the publish.
    pub publish: u64,
    /// Number of the shard.
    pub shard: u32,
    /// How many there are.
    pub shard_count: u32,
}

/// Writes the snapshots of all shards.
#[derive(Debug)]
pub struct ShardsWriter {
    folder: Arc<dyn Folder>,
    path: PathBuf,
    schema: Schema,
    map: ShardMap,
    maps: Vec<String>,
    writers: Vec<SnapshotWriter>,
    /// The table whose rows come now.
    open: Option<OpenTable>,
    /// Of the row that is being pushed.
    weights: Vec<f32>,
    /// By table: all its rows came.
    is_complete: Vec<bool>,
    initial_rows: u64,
    /// Of everything that was written.
    publish: u64,
    is_finished: bool,
    budget: Budget,
    _memory: Vec<Reservation>,
    _lock: FolderLock,
}

/// A table whose rows come now, and which of them did where that matters.
#[derive(Debug)]
struct OpenTable {
    table: TableId,
    written: Option<Written>,
}

#[derive(Debug)]
struct Written {
    bits: Vec<u64>,
    _memory: Reservation,
}

impl ShardsWriter {
    /// Starts the shards of `plan` in `folder`, which must be empty and of a file system. Rows lie
    /// on pages as `layout` says, of which each shard gets its part.
    ///
    /// # Errors
    /// As [`SnapshotWriter::create_placed`]; those of the plan.
    pub(crate) fn create(
        folder: Arc<dyn Folder>,
        schema: &Schema,
        layout: PageLayout,
        plan: &ShardPlan,
        budget: &Budget,
    ) -> Result<Self> {
        let schema = served_schema(schema)?;
        plan.check(&schema)?;
        let path = folder
            .path()
            .map(PathBuf::from)
            .ok_or_else(|| Error::unsupported("shards are written to a folder of a file system"))?;
        let lock = folder.lock()?;
        check_empty(&path)?;
        let manifest = write_maps(folder.as_ref(), &schema, plan, budget)?;
        let maps = manifest.tables.iter().filter_map(|table| match &table.divided {
            Division::Placed { file, .. } => Some(file.clone()),
            _ => None,
        });
        let maps = maps.collect();
        let map = ShardMap::of(manifest, folder.as_ref(), budget)?;
        let mut made = Self {
            publish: mix64(u64::from(plan.shard_count)),
            is_complete: vec![false; schema.tables().len()],
            folder,
            path,
            schema,
            map,
            maps,
            writers: Vec::new(),
            open: None,
            weights: Vec::new(),
            initial_rows: 0,
            is_finished: false,
            budget: budget.clone(),
            _memory: Vec::new(),
            _lock: lock,
        };
        made.open_writers(&layout)?;
        made.mix_in(format!("{:?} {:?}", made.map.tables(), layout.codecs).as_bytes());
        Ok(made)
    }

    fn open_writers(&mut self, layout: &PageLayout) -> Result<()> {
        let shard_count = self.map.shard_count();
        let schemas: Vec<Schema> =
            (0..shard_count).map(|shard| self.schema_of(shard)).collect::<Result<_>>()?;
        let mut placed: Vec<Vec<PlacedTables>> = schemas.iter().map(|_| Vec::new()).collect();
        for tables in &layout.placed {
            // Refused before it is divided.
            tables.check(&self.schema, &layout.codecs)?;
            let divided = divide_pages(tables, &self.schema, &schemas, &self.map)?;
            for (of_shard, tables) in placed.iter_mut().zip(divided) {
                of_shard.push(tables);
            }
        }
        let least: Vec<u64> = schemas
            .iter()
            .zip(&placed)
            .map(|(schema, placed)| SnapshotWriter::bytes_min(schema, placed, layout))
            .collect();
        // Half is left to those who bring the rows.
        let share = (self.budget.free_bytes() / 2).saturating_sub(least.iter().sum())
            / u64::from(shard_count);
        for (((shard, schema), placed), least) in
            (0..shard_count).zip(schemas).zip(placed).zip(least)
        {
            let bytes = least + share.min(WRITER_BYTES_MAX);
            self._memory.push(self.budget.reserve("publish", bytes)?);
            let folder = Arc::new(FsFolder::create(self.path.join(folder_of(shard)))?);
            let layout = PageLayout { placed, ..layout.without_pages() };
            let memory = Budget::new(bytes);
            self.writers.push(SnapshotWriter::create_placed(folder, &schema, layout, &memory)?);
        }
        Ok(())
    }

    /// Returns the schema of a shard: its rows, numbered from 0.
    fn schema_of(&self, shard: u32) -> Result<Schema> {
        let tables = (0..).map(TableId).zip(self.schema.tables()).map(|(id, table)| {
            let row_count = self.map.rows_of(id, shard)?.max(1);
            let init = match self.needs_initial_rows(id, table) {
                // All its rows are written.
                true => InitSpec::Constant { value: 0.0 },
                false => table.init,
            };
            Ok(TableSchema { row_count, init, ..table.clone() })
        });
        Schema::new(tables.collect::<Result<_>>()?)
    }

    /// Tells whether rows of the table that were never written must be written all the same.
    fn needs_initial_rows(&self, id: TableId, table: &TableSchema) -> bool {
        let is_divided = !matches!(
            self.map.tables()[id.0 as usize].divided,
            Division::Whole { .. } | Division::Everywhere
        );
        is_divided && !matches!(table.init, InitSpec::Constant { .. })
    }

    /// As [`SnapshotWriter::expect_rows`], of all shards together.
    ///
    /// # Errors
    /// As there.
    pub fn expect_rows(&mut self, table: TableId, stored_rows: u64) -> Result<()> {
        let schema = self.schema.table(table)?;
        let is_full = self.needs_initial_rows(table, schema);
        let row_count = u128::from(schema.row_count);
        for shard in 0..self.map.shard_count() {
            let own = self.map.rows_of(table, shard)?;
            let rows = match is_full {
                true => own,
                false => (u128::from(stored_rows) * u128::from(own) / row_count) as u64,
            };
            self.writers[shard as usize].expect_rows(table, rows)?;
        }
        Ok(())
    }

    /// Returns the bytes of a row of `table` as float32.
    pub(crate) fn weight_bytes(&self, table: TableId) -> Result<usize> {
        Ok(4 * self.schema.table(table)?.dim as usize)
    }

    /// As [`SnapshotWriter::push`], with a row's id over all shards. Rows of a table come together.
    ///
    /// # Errors
    /// As there; `Invalid` when rows of other tables came in between.
    pub fn push(&mut self, table: TableId, row: RowId, weights: &[f32]) -> Result<()> {
        if self.open.as_ref().is_none_or(|open| open.table != table) {
            self.close_table()?;
            self.open_table(table)?;
        }
        let bytes: &[u8] = bytemuck::cast_slice(weights);
        let key = mix64(u64::from(table.0) << 40 ^ row.0);
        self.publish = mix64(self.publish ^ key ^ u64::from(crc32c(bytes)));
        self.write(table, row, weights)?;
        if let Some(OpenTable { written: Some(written), .. }) = &mut self.open {
            written.bits[(row.0 / 64) as usize] |= 1 << (row.0 % 64);
        }
        Ok(())
    }

    /// As [`push`](Self::push), of little-endian float32 at any address.
    pub(crate) fn push_bytes(&mut self, table: TableId, row: RowId, bytes: &[u8]) -> Result<()> {
        let mut weights = std::mem::take(&mut self.weights);
        weights.clear();
        weights.extend(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)));
        let pushed = self.push(table, row, &weights);
        self.weights = weights;
        pushed
    }

    fn write(&mut self, table: TableId, row: RowId, weights: &[f32]) -> Result<()> {
        let located = self.map.locate_row(table, row.0)?;
        let row = RowId(located.row);
        match located.shard {
            Some(shard) => self.writers[shard as usize].push(table, row, weights),
            None => self.writers.iter_mut().try_for_each(|writer| writer.push(table, row, weights)),
        }
    }

    fn open_table(&mut self, table: TableId) -> Result<()> {
        let schema = self.schema.table(table)?;
        if self.is_complete[table.0 as usize] {
            return Err(Error::invalid("rows of a table come together").with("table", &schema.name));
        }
        let written = match self.needs_initial_rows(table, schema) {
            false => None,
            true => {
                let words = schema.row_count.div_ceil(64);
                let memory = self.budget.reserve("rows written", 8 * words)?;
                Some(Written { bits: vec![0; words as usize], _memory: memory })
            }
        };
        self.open = Some(OpenTable { table, written });
        Ok(())
    }

    /// Ends the rows of a table: those never written follow, where they are needed.
    fn close_table(&mut self) -> Result<()> {
        let Some(OpenTable { table, written }) = self.open.take() else { return Ok(()) };
        self.is_complete[table.0 as usize] = true;
        let Some(Written { bits, .. }) = &written else { return Ok(()) };
        let TableSchema { init, seed, row_count, dim, .. } = *self.schema.table(table)?;
        let mut weights = vec![0.0; dim as usize];
        for row in (0..row_count).filter(|row| bits[(row / 64) as usize] >> (row % 64) & 1 == 0) {
            fill_initial(&init, seed, row, &mut weights);
            self.write(table, RowId(row), &weights)?;
            self.initial_rows += 1;
        }
        Ok(())
    }

    /// As [`SnapshotWriter::attach`], to every shard.
    ///
    /// # Errors
    /// As there; `Invalid` for the name of what says which shard it is.
    pub fn attach(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if name == SHARD_ATTACHMENT {
            return Err(Error::invalid("attachment exists").with("name", name));
        }
        self.mix_in(name.as_bytes());
        self.mix_in(bytes);
        self.writers.iter_mut().try_for_each(|writer| writer.attach(name, bytes))
    }

    fn mix_in(&mut self, bytes: &[u8]) {
        let crc = crc32c_append(crc32c(bytes), &(bytes.len() as u64).to_le_bytes());
        self.publish = mix64(self.publish ^ u64::from(crc));
    }

    /// Completes all shards; returns what was written, over all of them.
    ///
    /// # Errors
    /// As [`SnapshotWriter::finish`]; there are no shards then.
    pub fn finish(mut self) -> Result<Report> {
        self.close_table()?;
        for table in (0..self.schema.tables().len() as u32).map(TableId) {
            if !self.is_complete[table.0 as usize] {
                self.open_table(table)?;
                self.close_table()?;
            }
        }
        let publish = self.publish % PUBLISH_END;
        let shard_count = self.map.shard_count();
        let mut sum: Option<Report> = None;
        let mut shards = Vec::with_capacity(self.writers.len());
        for (shard, mut writer) in (0..).zip(std::mem::take(&mut self.writers)) {
            let of = ShardOf { publish, shard, shard_count };
            let text = serde_json::to_vec(&of)
                .map_err(|cause| Error::invalid("cannot encode the shard").with("cause", cause))?;
            writer.attach(SHARD_ATTACHMENT, &text)?;
            let report = writer.finish()?;
            let folder = folder_of(shard);
            let file_bytes = bytes_of(&self.path.join(&folder))?;
            shards.push(ShardInfo { folder, identity: report.identity.clone(), file_bytes });
            sum = Some(match sum {
                None => report,
                Some(sum) => sum.and(&report),
            });
        }
        let manifest = ShardsManifest { publish, shards, ..self.map.manifest().clone() };
        self.folder.sync()?;
        self.folder.write_atomic(SHARDS_NAME, &manifest.encode()?)?;
        self.is_finished = true;
        let mut report = sum.ok_or_else(|| Error::invalid("no shards"))?;
        (report.shard_count, report.initial_rows) = (shard_count, self.initial_rows);
        report.identity = manifest.identity()?;
        Ok(report)
    }
}

impl Drop for ShardsWriter {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        // Best effort: without shards.json the folder holds no shards anyway.
        self.writers.clear();
        for map in &self.maps {
            let _ = self.folder.remove(map);
        }
        for shard in 0..self.map.shard_count() {
            let _ = std::fs::remove_dir_all(self.path.join(folder_of(shard)));
        }
    }
}

/// Returns the folder of a shard.
fn folder_of(shard: u32) -> String {
    format!("shard.{shard}")
}

fn bytes_of(path: &std::path::Path) -> Result<u64> {
    tierbed_io::folder::listed_bytes(&FsFolder::open(path)?, |_| true)
}

/// Fails for a folder that holds anything but its lock.
fn check_empty(path: &std::path::Path) -> Result<()> {
    let failed = |cause| Error::os("cannot list folder", cause).with("path", path.display());
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if name != tierbed_io::folder::LOCK_NAME {
            return Err(Error::invalid("a snapshot must be written into an empty folder")
                .with("path", path.display())
                .with("found", name.display())
                .with("remedy", "choose a new or empty folder"));
        }
    }
    Ok(())
}

/// Writes the maps of tables that placements divide; returns what will be in `shards.json`, as yet
/// without the identities of the snapshots.
fn write_maps(
    folder: &dyn Folder,
    schema: &Schema,
    plan: &ShardPlan,
    budget: &Budget,
) -> Result<ShardsManifest> {
    let mut tables = Vec::with_capacity(schema.tables().len());
    for (id, table) in (0..).map(TableId).zip(schema.tables()) {
        let divided = match plan.shards_of(schema, id)? {
            None => plan.division_of(table),
            Some(shards) => {
                let shape =
                    RowMapShape { row_count: table.row_count, shard_count: plan.shard_count };
                // The shards twice, while they are sorted.
                let _memory = budget.reserve("shard map", 4 * table.row_count)?;
                let file = format!("{}.rowmap", table.name);
                let device = folder.open(&file, OpenMode::Create)?;
                let crc32c = RowMap::write(device, shape, shards.to_vec())?;
                Division::Placed { file, crc32c }
            }
        };
        let (name, row_count, dim) = (table.name.clone(), table.row_count, table.dim);
        tables.push(DividedTable { name, row_count, dim, divided });
    }
    let shard =
        |shard| ShardInfo { folder: folder_of(shard), identity: String::new(), file_bytes: 0 };
    let shards = (0..plan.shard_count).map(shard).collect();
    Ok(ShardsManifest { publish: 0, replicas: plan.replicas, shards, tables })
}
