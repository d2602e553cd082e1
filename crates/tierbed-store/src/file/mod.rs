//! The `file` store: one direct-addressed record per row, pages on disk, nothing cached.
//!
//! A row's place is arithmetic: page `row / rows_per_page`, slot `row % rows_per_page`. No
//! index, no garbage collection; in memory only two bytes per page ([`page_map`]). Rows never
//! written occupy nothing. Commits are atomic through two slots per page
//! (`docs/explanation/decisions/0001-shadow-pages.md`).

#[cfg(any(test, fuzzing))]
#[path = "../../../../tools/fuzz/entries/store_file.rs"]
pub(crate) mod fuzz;
mod layout;
mod map_file;
mod page_map;
mod pages;
mod runs;
mod scan;
mod scan_runs;
mod scan_windows;
mod segments;
mod write_runs;

use std::path::Path;
use std::sync::Arc;

use tierbed_core::stats::{IoStats, StoreStats};
use tierbed_core::store::{check_keys, Attachment, CommitInfo, RowSink, ScanSink};
use tierbed_core::{
    check_disk_quota, Budget, Error, Poison, Reservation, Result, RowKey, RowStore, RowWrite,
    Schema, TableId, TableSchema, TrainStore,
};
use tierbed_io::{open_engine, EngineOptions, Folder, FolderLock, IoEngine, OpenMode, PAGE_BYTES};

use crate::commit::{CommitFailure, CommitLog, Manifest, TableMeta};
pub use layout::page_owner;
pub(crate) use layout::{
    page_layout, seal, verify, PageLayout, PageName, HEADER_BYTES, ROWS_MAGIC,
};
use page_map::PageMap;
use pages::{Failure, Pipeline, TableFile};
use runs::{ROWS_MIN, RUN_BYTES_MAX};
use scan_runs::RunReader;
use segments::Segments;

/// What a [`FileStore`] is opened with.
#[derive(Debug, Clone)]
pub struct FileStoreOptions {
    /// Account for page maps and I/O buffers.
    pub budget: Budget,
    /// How bytes move; the buffer size grows by itself with the largest page.
    pub engine: EngineOptions,
    /// Most bytes the store may occupy on disk, attachments and page maps included.
    pub disk_quota_bytes: Option<u64>,
}

/// Row records in files of pages. See the module documentation.
pub struct FileStore {
    // Dropped first: the engine may still own buffers of the devices in `tables`.
    engine: Box<dyn IoEngine>,
    tables: Vec<TableFile>,
    schema: Schema,
    log: CommitLog,
    folder: Arc<dyn Folder>,
    options: FileStoreOptions,
    /// Disk space of kept checkpoints.
    kept_bytes: u64,
    engine_memory: Reservation,
    _commit_memory: Reservation,
    stats: StoreStats,
    /// What engines before this one did, and reads of several pages.
    io_before: IoStats,
    poison: Poison,
    _lock: FolderLock,
}

impl FileStore {
    /// Opens the store in `folder` at its last commit, or starts a new one in an empty folder.
    ///
    /// # Errors
    /// `Closed` when another process owns it, `Invalid` when the folder holds something else or
    /// the budget is too small, `Corruption` when files are missing, short or damaged.
    pub fn open(folder: Arc<dyn Folder>, options: FileStoreOptions) -> Result<Self> {
        let lock = folder.lock()?;
        let log = CommitLog::open(folder.clone(), "file")?;
        let engine = open_engine(&options.engine)?;
        let engine_memory = options.budget.reserve("io buffers", engine.memory_bytes())?;
        let commit_memory =
            options.budget.reserve("commit buffer", map_file::CHUNK_BYTES as u64)?;
        let mut store = Self {
            engine,
            tables: Vec::new(),
            schema: Schema::default(),
            log,
            folder,
            options,
            kept_bytes: 0,
            engine_memory,
            _commit_memory: commit_memory,
            stats: StoreStats::default(),
            io_before: IoStats::default(),
            poison: Poison::default(),
            _lock: lock,
        };
        if let Some(manifest) = store.log.manifest().cloned() {
            for (table, meta) in manifest.table_files()? {
                store.open_table(table.clone(), Some(meta))?;
            }
        }
        Ok(store)
    }

    fn open_table(&mut self, table: TableSchema, committed: Option<&TableMeta>) -> Result<TableId> {
        let layout = page_layout(&table);
        let map_bytes = PageMap::memory_bytes(layout.page_count);
        let map_memory = self.options.budget.reserve("page maps", map_bytes)?;
        self.grow_buffers(layout.page_bytes)?;
        let file = format!("{}.rows", table.name);
        let file_bytes = 2 * layout.page_count * layout.page_bytes as u64;
        let grown_at = committed.map_or(&[][..], |meta| &meta.grown_at);
        let segments = Segments::new(grown_at, layout.page_count)
            .map_err(|error| error.with("table", &table.name))?;
        let (device, map) = if let Some(meta) = committed {
            let device = self.folder.open(&file, OpenMode::ReadWrite).map_err(|error| {
                Error::corruption("table file cannot be opened")
                    .with("file", &file)
                    .with("cause", error)
            })?;
            let found = device.len_bytes()?;
            if found < file_bytes || meta.entry_count != layout.page_count {
                return Err(Error::corruption("table file has another length than committed")
                    .with("file", &file)
                    .with("expected", file_bytes)
                    .with("found", found)
                    .with("remedy", "restore the store's folder from a copy"));
            }
            if found > file_bytes {
                // The table grew after this commit; what it grew by is not part of it.
                device.set_len(file_bytes)?;
            }
            let map = map_file::read_map(
                self.folder.as_ref(),
                &meta.file,
                layout.page_count,
                meta.crc32c,
            )?;
            (device, map)
        } else {
            // Left-overs of a table that no commit knows are worth nothing.
            let device = self.folder.open(&file, OpenMode::Create)?;
            device.set_len(0)?;
            device.set_len(file_bytes)?;
            (device, PageMap::new(layout.page_count)?)
        };
        let device_id = self.engine.attach(device.clone());
        let id = self.schema.add(table)?;
        assert_eq!(id.0 as usize, self.tables.len(), "the schema numbers tables as they are held");
        self.tables.push(TableFile {
            owner: page_owner(self.log.store(), id),
            file,
            layout,
            device,
            device_id,
            map,
            segments,
            map_memory,
        });
        Ok(id)
    }

    // Buffers hold whole pages; a table of longer rows needs longer buffers.
    fn grow_buffers(&mut self, page_bytes: usize) -> Result<()> {
        if page_bytes <= self.engine.buf_bytes() {
            return Ok(());
        }
        assert!(page_bytes.is_multiple_of(PAGE_BYTES), "pages are whole blocks");
        let options = EngineOptions { buf_bytes: page_bytes, ..self.options.engine.clone() };
        let mut engine = open_engine(&options)?;
        self.engine_memory.resize(engine.memory_bytes())?;
        for table in &mut self.tables {
            table.device_id = engine.attach(table.device.clone());
        }
        self.io_before = self.io_stats();
        self.engine = engine;
        self.options.engine = options;
        Ok(())
    }

    fn io_stats(&self) -> IoStats {
        self.engine.stats().behind(&self.io_before)
    }

    fn disk_bytes(&self) -> u64 {
        let rows: u64 = self.tables.iter().map(TableFile::disk_bytes).sum();
        let maps: u64 =
            self.tables.iter().map(|table| PageMap::memory_bytes(table.map.page_count())).sum();
        rows + maps + self.log.attachment_bytes()
    }

    fn pipeline(&mut self) -> Pipeline<'_> {
        let quota_left_bytes = self
            .options
            .disk_quota_bytes
            .map_or(u64::MAX, |quota| quota.saturating_sub(self.disk_bytes() + self.kept_bytes));
        Pipeline {
            engine: self.engine.as_mut(),
            tables: &mut self.tables,
            stats: &mut self.stats,
            io: &mut self.io_before,
            run_bytes: 0,
            quota_left_bytes,
        }
    }

    // Memory to read or write pages together: of requests of many rows, where a quarter of what is
    // free suffices.
    fn run_memory(&self, row_count: usize) -> Option<Reservation> {
        let budget = &self.options.budget;
        let bytes = RUN_BYTES_MAX.min(budget.free_bytes() / 4);
        let bytes = bytes - bytes % PAGE_BYTES as u64;
        let is_wanted = row_count >= ROWS_MIN && bytes > 0;
        if is_wanted {
            budget.reserve("page runs", bytes).ok()
        } else {
            None
        }
    }

    // Visits the written rows of table `at` in row order; returns how many pages were read.
    fn scan_table(&mut self, at: usize, sink: &mut ScanSink<'_>) -> Result<u64> {
        let Some(table) = self.tables.get(at) else { panic!("the schema has table {at}") };
        let (engine, budget) = (&self.options.engine, &self.options.budget);
        let mut runs = RunReader::open(table, engine, budget)?;
        let result = self.pipeline().scan(at, runs.as_mut(), sink);
        if let Some(runs) = runs {
            self.io_before = runs.stats().behind(&self.io_before);
        }
        self.settle(result)
    }

    fn settle<T>(&mut self, result: std::result::Result<T, Failure>) -> Result<T> {
        result.map_err(|failure| {
            if failure.is_poison {
                self.poison.note(&failure.error);
            }
            failure.error
        })
    }

    // Rows first, then maps, then attachments and manifest, then the switch.
    fn put_in_force(
        &mut self,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        // A failed sync leaves open which writes reached the disk; asking again proves nothing.
        // Source: Rebello et al., "Can applications recover from fsync failures?", ATC'20.
        for table in self.tables.iter().filter(|table| table.map.is_dirty()) {
            let synced = table.device.sync().map_err(|error| error.with("file", &table.file));
            synced.map_err(CommitFailure::Poisoned)?;
        }
        let number = self.log.next_number();
        let manifest = Manifest {
            tables: self.write_maps(number).map_err(CommitFailure::of)?,
            ..self.log.next_manifest(name, &self.schema)
        };
        self.log.put_in_force(manifest, attachments)
    }

    fn write_maps(&self, number: u64) -> Result<Vec<TableMeta>> {
        assert_eq!(self.tables.len(), self.schema.tables().len(), "every table has a file");
        let mut metas = Vec::with_capacity(self.tables.len());
        for (table, schema) in self.tables.iter().zip(self.schema.tables()) {
            let file = CommitLog::file_name(number, &format!("{}.pages", schema.name));
            let crc32c = map_file::write_map(self.folder.as_ref(), &file, &table.map)?;
            let (entry_count, grown_at) = (table.map.page_count(), table.segments.grown_at());
            metas.push(TableMeta { file, crc32c, entry_count, grown_at });
        }
        Ok(metas)
    }

    fn check_commit_quota(&self, attachments: &[Attachment<'_>]) -> Result<()> {
        let new_bytes: u64 =
            attachments.iter().map(|attachment| attachment.bytes.len() as u64).sum();
        // Old and new attachments exist side by side until the commit is in force.
        let wanted = self.disk_bytes() + self.kept_bytes + new_bytes;
        check_disk_quota(self.options.disk_quota_bytes, wanted)
    }
}

impl RowStore for FileStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, keys.iter().copied())?;
        self.stats.rows_read += keys.len() as u64;
        let memory = self.run_memory(keys.len());
        let mut pipeline = self.pipeline();
        pipeline.run_bytes = memory.as_ref().map_or(0, Reservation::bytes);
        let result = pipeline.read(keys, sink);
        self.settle(result)
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        self.scan_table(table.0 as usize, sink).map(drop)
    }

    fn stats(&self) -> StoreStats {
        StoreStats { disk_bytes: self.disk_bytes(), io: self.io_stats(), ..self.stats.clone() }
    }
}

impl TrainStore for FileStore {
    fn set_kept_bytes(&mut self, bytes: u64) {
        self.kept_bytes = bytes;
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        let id = self.schema.clone().add(table.clone())?;
        if (id.0 as usize) < self.tables.len() {
            return Ok(id);
        }
        self.open_table(table, None)
    }

    fn grow_table(&mut self, table: TableId, row_count: u64) -> Result<()> {
        self.poison.check()?;
        let mut schema = self.schema.clone();
        schema.grow(table, row_count)?;
        let Some(file) = self.tables.get_mut(table.0 as usize) else {
            panic!("every table of the schema has a file")
        };
        file.grow(page_layout(schema.table(table)?))?;
        self.schema = schema;
        Ok(())
    }

    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, rows.iter().map(|row| row.key))?;
        check_records(&self.schema, rows)?;
        self.stats.rows_written += rows.len() as u64;
        let memory = self.run_memory(rows.len());
        let mut pipeline = self.pipeline();
        pipeline.run_bytes = memory.as_ref().map_or(0, Reservation::bytes);
        let result = pipeline.write(rows);
        self.settle(result)
    }

    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        self.poison.check()?;
        self.check_commit_quota(attachments)?;
        self.put_in_force(name, attachments)
            .map_err(|failure| failure.into_error(&mut self.poison))?;
        for table in &mut self.tables {
            table.map.commit();
        }
        self.stats.commit_count += 1;
        Ok(())
    }

    fn last_commit(&self) -> Option<&CommitInfo> {
        self.log.info()
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        self.log.attachment(name)
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        Ok(self.log.attachment_names())
    }

    fn verify(&mut self) -> Result<u64> {
        self.poison.check()?;
        self.log.verify()?;
        let mut checked = 0;
        for at in 0..self.tables.len() {
            checked += self.scan_table(at, &mut |_, _| Ok(()))?;
        }
        Ok(checked)
    }

    fn path(&self) -> Option<&Path> {
        self.folder.path()
    }
}

/// Checks that every record has the length of its table's records.
///
/// # Errors
/// `Invalid`, naming the table.
pub fn check_records(schema: &Schema, rows: &[RowWrite<'_>]) -> Result<()> {
    for row in rows {
        let table = schema.table(row.key.table)?;
        if row.record.len() != table.record_bytes() {
            return Err(Error::invalid("record has the wrong length")
                .with("table", &table.name)
                .with("expected", table.record_bytes())
                .with("found", row.record.len()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
