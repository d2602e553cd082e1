//! The store: its parts, how it is opened, and the storage traits.

use std::path::Path;
use std::sync::Arc;

use crate::{check_records, page_owner, CommitLog, TableMeta};
use tierbed_core::stats::StoreStats;
use tierbed_core::store::{check_keys, Ahead, Attachment, CommitInfo, RowSink, ScanSink};
use tierbed_core::{
    check_disk_quota, Error, Poison, Reservation, Result, RowKey, RowStore, RowWrite, Schema,
    TableId, TableSchema, TrainStore,
};
use tierbed_io::{Folder, FolderLock, OpenMode};

use crate::cold::disk::{Disk, PageFile};
use crate::cold::geometry::Geometry;
use crate::cold::image::OVERLAY_BYTES;
use crate::cold::options::ColdOptions;
use crate::cold::picker;
use crate::cold::read::WANT_BYTES;
use crate::cold::scheduler::Scheduler;
use crate::cold::stats::ColdStats;
use crate::cold::table::{ColdTable, TableParts};
use crate::cold::table_file::{self, StoredTable};
use crate::cold::write_buffer::WriteBuffer;

/// Largest extents merged together: as many as the write buffer holds, within these bounds. A
/// merge waits for the device three times, for bases, delta rows and writes, however many it takes.
const IMAGE_RANGES_MIN: usize = 4;
const IMAGE_RANGES_MAX: usize = 16;
/// Memory per row while a run is written, opened or compacted: id, encoded key, place.
const RUN_ROW_BYTES: usize = 48;

/// Row records in base ranges and delta runs. See the crate's page.
pub struct ColdStore {
    // Dropped first: the engine may still own buffers of the devices in `tables`.
    pub(crate) disk: Disk,
    pub(crate) tables: Vec<ColdTable>,
    pub(crate) buffer: WriteBuffer,
    pub(crate) image: Vec<u8>,
    pub(crate) image_bytes: usize,
    pub(crate) schema: Schema,
    pub(crate) log: CommitLog,
    pub(crate) folder: Arc<dyn Folder>,
    pub(crate) options: ColdOptions,
    /// Disk space of kept checkpoints.
    pub(crate) kept_bytes: u64,
    pub(crate) scheduler: Scheduler,
    pub(crate) stats: StoreStats,
    pub(crate) cold: ColdStats,
    pub(crate) poison: Poison,
    memory: Memory,
    _lock: FolderLock,
}

/// What is reserved as long as the store is open.
struct Memory {
    io: Reservation,
    write_buffer: Reservation,
    index: Reservation,
    runs: Reservation,
    image: Reservation,
    _requests: Reservation,
}

impl Memory {
    fn reserve(options: &ColdOptions) -> Result<Self> {
        let (budget, memory) = (&options.budget, &options.memory);
        let rows_max = WriteBuffer::rows_max(memory.write_buffer_bytes);
        let requests = memory.read_rows_max * WANT_BYTES + picker::MEMORY_BYTES;
        Ok(Self {
            io: budget.reserve("io buffers", 0)?,
            write_buffer: budget.reserve("write buffer", memory.write_buffer_bytes as u64)?,
            index: budget.reserve("delta index", index_bytes(options) as u64)?,
            runs: budget.reserve("run keys", (rows_max * RUN_ROW_BYTES) as u64)?,
            image: budget.reserve("merge image", 0)?,
            _requests: budget.reserve("read requests", requests as u64)?,
        })
    }
}

// At least what the rows of two write buffers can need when each starts a list of its own.
fn index_bytes(options: &ColdOptions) -> usize {
    let rows_max = WriteBuffer::rows_max(options.memory.write_buffer_bytes);
    options.memory.delta_index_bytes.max(2 * rows_max * crate::cold::index::ROW_ALONE_BYTES)
}

impl ColdStore {
    /// Opens the store in `folder` at its last commit, or starts a new one in an empty folder.
    ///
    /// # Errors
    /// `Closed` when another process owns it, `Invalid` when the folder holds something else,
    /// options are out of range or the budget is too small, `Corruption` when files are missing,
    /// short or damaged.
    pub fn open(folder: Arc<dyn Folder>, options: ColdOptions) -> Result<Self> {
        options.check()?;
        let lock = folder.lock()?;
        let log = CommitLog::open(folder.clone(), "cold")?;
        let mut memory = Memory::reserve(&options)?;
        let disk = Disk::new(options.engine.clone(), options.clock.clone())?;
        memory.io.resize(disk.memory_bytes())?;
        let mut store = Self {
            disk,
            tables: Vec::new(),
            buffer: WriteBuffer::new(options.memory.write_buffer_bytes),
            image: Vec::new(),
            image_bytes: 0,
            schema: Schema::default(),
            log,
            folder,
            scheduler: Scheduler::default(),
            stats: StoreStats::default(),
            cold: ColdStats::default(),
            poison: Poison::default(),
            memory,
            options,
            kept_bytes: 0,
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
        let mut schema = self.schema.clone();
        let id = schema.add(table.clone())?;
        let stored = match committed {
            Some(meta) => Some(self.read_table_file(&table, meta)?),
            None => None,
        };
        let geometry = stored.as_ref().map_or_else(
            || Geometry::new(&table, self.options.memory.extent_bytes),
            |stored| stored.geometry,
        );
        let map_bytes = ColdTable::memory_bytes(&geometry);
        let memory = self.options.budget.reserve("range maps", map_bytes)?;
        self.make_room_for(&geometry)?;
        let file = format!("{}.rows", table.name);
        let device = match &stored {
            Some(stored) => self.open_file(&file, stored)?,
            None => {
                // Left-overs of a table that no commit knows are worth nothing.
                let device = self.folder.open(&file, OpenMode::Create)?;
                device.set_len(0)?;
                device
            }
        };
        let pages = PageFile {
            device: self.disk.attach(device.clone()),
            page_bytes: geometry.page_bytes(),
        };
        let owner = page_owner(self.log.store(), id);
        let parts = TableParts { id: id.0, owner, file, geometry, device, pages, memory };
        let mut cold = ColdTable::new(&table, parts);
        if self.options.disk_quota_bytes.is_some() {
            // Space ahead of use would lie beyond the quota.
            cold.grow_extents = 1;
        }
        if let Some(stored) = stored {
            self.restore(&mut cold, stored)?;
        }
        self.schema = schema;
        self.tables.push(cold);
        Ok(id)
    }

    fn open_file(&self, file: &str, stored: &StoredTable) -> Result<Arc<dyn tierbed_io::Device>> {
        let device = self.folder.open(file, OpenMode::ReadWrite).map_err(|error| {
            Error::corruption("table file cannot be opened").with("file", file).with("cause", error)
        })?;
        let wanted = u64::from(stored.file_extents) * stored.geometry.extent_bytes() as u64;
        let found = device.len_bytes()?;
        if found < wanted {
            return Err(Error::corruption("table file is shorter than committed")
                .with("file", file)
                .with("expected", wanted)
                .with("found", found)
                .with("remedy", "restore the store's folder from a copy"));
        }
        Ok(device)
    }

    fn read_table_file(&self, table: &TableSchema, meta: &TableMeta) -> Result<StoredTable> {
        let bytes = self.folder.read(&meta.file)?.ok_or_else(|| {
            Error::corruption("file of the commit in force is missing").with("file", &meta.file)
        })?;
        let found = tierbed_core::checksum::crc32c(&bytes);
        if found != meta.crc32c {
            return Err(Error::corruption("table file of a commit has another checksum")
                .with("file", &meta.file)
                .with("expected", format_args!("{:08x}", meta.crc32c))
                .with("found", format_args!("{found:08x}"))
                .with("remedy", "restore the store's folder from a copy"));
        }
        table_file::decode(&bytes, table).map_err(|error| error.with("file", &meta.file))
    }

    // Bases and extents from the commit, places of delta rows from the keys of the runs.
    fn restore(&mut self, table: &mut ColdTable, stored: StoredTable) -> Result<()> {
        let rows_max = stored.runs.iter().map(|run| run.row_count as usize).max().unwrap_or(0);
        let wanted = (rows_max * RUN_ROW_BYTES) as u64;
        self.memory.runs.resize(self.memory.runs.bytes().max(wanted))?;
        let mut runs = table.restore(stored);
        runs.sort_unstable_by_key(|run| run.version);
        for run in runs {
            let rows = table.read_keys(&mut self.disk, &run)?;
            let held = self.index_memory_bytes() + table.index.memory_bytes();
            let worst = held + rows.len() as u64 * crate::cold::index::ROW_ALONE_BYTES as u64;
            if worst > self.memory.index.bytes() {
                // Written with a larger budget; the next flush merges until it fits.
                self.memory.index.resize(worst)?;
            }
            table.index_run(run, rows.into_iter());
        }
        table.finish_restoring();
        Ok(())
    }

    // Buffers hold whole pages, an image whole ranges, the write buffer whole records.
    fn make_room_for(&mut self, geometry: &Geometry) -> Result<()> {
        if geometry.page_bytes() > self.disk.buf_bytes() {
            self.disk.grow(geometry.page_bytes())?;
            self.memory.io.resize(self.disk.memory_bytes())?;
            for table in &mut self.tables {
                table.pages.device = self.disk.attach(table.device.clone());
            }
        }
        let capacity = WriteBuffer::capacity_for(geometry.layout.record_bytes);
        if capacity > self.options.memory.write_buffer_bytes {
            self.flush_runs()?;
            self.memory.write_buffer.resize(capacity as u64)?;
            let rows_max = WriteBuffer::rows_max(capacity);
            let wanted = (rows_max * RUN_ROW_BYTES) as u64;
            self.memory.runs.resize(self.memory.runs.bytes().max(wanted))?;
            self.options.memory.write_buffer_bytes = capacity;
            let wanted = index_bytes(&self.options) as u64;
            self.memory.index.resize(self.memory.index.bytes().max(wanted))?;
            self.buffer = WriteBuffer::new(capacity);
        }
        let memory = &self.options.memory;
        let ranges_max = memory.write_buffer_bytes / memory.extent_bytes;
        let most = ranges_max.clamp(IMAGE_RANGES_MIN, IMAGE_RANGES_MAX) * memory.extent_bytes;
        let ranges = (most / geometry.extent_bytes()).max(1);
        let image_bytes = ranges * geometry.extent_bytes();
        let rows = ranges as u64 * geometry.rows_per_range();
        let wanted = image_bytes as u64 + rows * OVERLAY_BYTES as u64;
        // The write buffer, and with it the image, follow the budget.
        let budget = &self.options.budget;
        budget.name_at_least(2 * (budget.limit_bytes() - budget.free_bytes() + wanted));
        self.memory.image.resize(self.memory.image.bytes().max(wanted))?;
        self.image_bytes = self.image_bytes.max(image_bytes);
        Ok(())
    }

    pub(crate) fn index_memory_bytes(&self) -> u64 {
        self.tables.iter().map(|table| table.index.memory_bytes()).sum()
    }

    pub(crate) fn index_bytes_max(&self) -> u64 {
        self.memory.index.bytes()
    }

    /// Takes the memory that images are made in.
    pub(crate) fn take_image(&mut self) -> Vec<u8> {
        let mut image = std::mem::take(&mut self.image);
        image.resize(self.image_bytes, 0);
        image
    }

    /// Returns what the store did, and how large its parts are.
    #[must_use]
    pub fn cold_stats(&self) -> ColdStats {
        let (request_us, byte_us) = self.disk.cost.estimate();
        ColdStats {
            delta_rows: self.tables.iter().map(|table| table.index.row_count()).sum(),
            base_bytes: self.tables.iter().map(ColdTable::base_bytes).sum(),
            delta_bytes: self.tables.iter().map(ColdTable::delta_bytes).sum(),
            request_us,
            byte_us,
            ..self.cold.clone()
        }
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        let tables: u64 = self.tables.iter().map(ColdTable::disk_bytes).sum();
        tables + self.log.attachment_bytes()
    }

    pub(crate) fn check_quota(&self, more_bytes: u64) -> Result<()> {
        let wanted = self.disk_bytes() + self.kept_bytes + more_bytes;
        check_disk_quota(self.options.disk_quota_bytes, wanted)
    }
}

impl RowStore for ColdStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, keys.iter().copied())?;
        self.stats.rows_read += keys.len() as u64;
        let result = self.read_rows(keys, sink);
        self.poison.on_doubt(result)
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        let result = self.scan_table(table, sink).map(drop);
        self.poison.on_doubt(result)
    }

    fn stats(&self) -> StoreStats {
        let page = tierbed_io::PAGE_BYTES as u64;
        let io = self.disk.stats();
        StoreStats {
            rows_absent: self.cold.rows_absent,
            pages_read: io.read_bytes / page,
            pages_written: io.write_bytes / page,
            disk_bytes: self.disk_bytes(),
            io,
            own: self.cold.own(),
            ..self.stats.clone()
        }
    }
}

impl TrainStore for ColdStore {
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
        let Some(cold) = self.tables.get_mut(table.0 as usize) else {
            panic!("every table of the schema is open")
        };
        cold.grow(schema.table(table)?)?;
        self.schema = schema;
        Ok(())
    }

    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, rows.iter().map(|row| row.key))?;
        check_records(&self.schema, rows)?;
        let result = self.write_rows(rows);
        self.poison.on_doubt(result)
    }

    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        self.poison.check()?;
        self.commit_all(name, attachments)
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
            checked += self.scan_table(TableId(at as u32), &mut |_, _| Ok(()))?;
        }
        for table in &self.tables {
            checked += table.verify_runs(&mut self.disk)?;
        }
        Ok(checked)
    }

    fn path(&self) -> Option<&Path> {
        self.folder.path()
    }

    fn observe(&mut self, ahead: &Ahead<'_>) -> Result<()> {
        self.poison.check()?;
        self.scheduler.observe(self.options.clock.now_us(), ahead);
        let result = self.merge_ahead(ahead.accesses_buffered);
        self.poison.on_doubt(result)
    }
}
