//! A dense array in a mapped file: what most people try first.
//!
//! A row's place is arithmetic, the system's page cache decides what stays in memory. That cache
//! is **not** in the budget: only a cgroup bounds it, and training then waits for page faults one
//! at a time, 4 KiB each, whatever is announced. A failed read of the disk ends the process
//! (`SIGBUS`), as with every map.
//!
//! A commit is `msync` of every map and the common protocol. Between commits undo pages lead back
//! (see [`undo`]): a killed process loses nothing committed; a power loss is noticed and refused.

mod table;
mod undo;

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tierbed_core::stats::{IoStats, StoreStats};
use tierbed_core::store::{check_keys, Attachment, CommitInfo, RowSink, ScanSink};
use tierbed_core::{
    check_disk_quota, Budget, Error, Poison, Reservation, Result, RowKey, RowStore, RowWrite,
    Schema, TableId, TableSchema, TrainStore,
};
use tierbed_io::{Folder, FolderLock, PAGE_BYTES};
use tierbed_store::{check_records, CommitFailure, CommitLog, Manifest, TableMeta};

use crate::attached_bytes;
use table::DenseTable;
use undo::Undo;

/// What an [`MmapStore`] is opened with.
#[derive(Debug, Clone)]
pub struct MmapOptions {
    /// Account for bit maps and the undo buffer; the mapped pages are not in it.
    pub budget: Budget,
    /// Most bytes the store may occupy on disk.
    pub disk_quota_bytes: Option<u64>,
    /// Names this start of the machine; another one means that power was lost.
    pub boot_id: String,
}

impl MmapOptions {
    /// Options of a store on this machine.
    ///
    /// # Errors
    /// `Io` when the system does not tell its boot id.
    pub fn new(budget: Budget) -> Result<Self> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_err(|cause| Error::os("cannot read the machine's boot id", cause))?;
        Ok(Self { budget, disk_quota_bytes: None, boot_id: boot_id.trim().to_owned() })
    }
}

/// Pages saved at a time.
const UNDO_PAGES: usize = 64;

/// Row records in mapped files. See the module documentation.
pub struct MmapStore {
    tables: Vec<DenseTable>,
    schema: Schema,
    log: CommitLog,
    folder: Arc<dyn Folder>,
    /// `None` in a folder that is only looked at.
    path: Option<PathBuf>,
    options: MmapOptions,
    /// Disk space of kept checkpoints.
    kept_bytes: u64,
    /// `None` as long as nothing changed since the last commit.
    undo: Option<Undo>,
    stats: StoreStats,
    poison: Poison,
    _memory: Reservation,
    _lock: FolderLock,
}

impl MmapStore {
    /// Opens the store in `folder` at its last commit, or starts a new one in an empty folder.
    ///
    /// # Errors
    /// `Unsupported` for a folder without a path, `Closed` when another process owns it,
    /// `Invalid` when it holds something else, `Corruption` when files of the commit are missing
    /// or cut, or when the machine stopped between two commits.
    pub fn open(folder: Arc<dyn Folder>, options: MmapOptions) -> Result<Self> {
        let path = folder.path().map(Path::to_owned);
        if path.is_none() && !folder.is_view() {
            return Err(Error::unsupported("a mapped store needs a folder on a file system"));
        }
        let lock = folder.lock()?;
        let log = CommitLog::open(folder.clone(), "mmap")?;
        let buffer_bytes = 2 * UNDO_PAGES * (PAGE_BYTES + 32);
        let memory = options.budget.reserve("undo buffer", buffer_bytes as u64)?;
        let mut store = Self {
            tables: Vec::new(),
            schema: Schema::default(),
            log,
            folder,
            path,
            options,
            kept_bytes: 0,
            undo: None,
            stats: StoreStats::default(),
            poison: Poison::default(),
            _memory: memory,
            _lock: lock,
        };
        store.recover()?;
        Ok(store)
    }

    fn commit_number(&self) -> u64 {
        self.log.info().map_or(0, |info| info.number)
    }

    fn recover(&mut self) -> Result<()> {
        let commit = self.commit_number();
        let is_needed = undo::is_needed(self.folder.as_ref(), &self.options.boot_id, commit)?;
        let manifest = self.log.manifest().cloned();
        let committed = manifest.iter().flat_map(|manifest| manifest.schema.tables());
        for table in committed {
            self.schema.add(table.clone())?;
            let dense = DenseTable::open(&*self.folder, table, true, &self.options.budget)?;
            self.tables.push(dense);
        }
        if is_needed {
            self.apply_undo(commit)?;
        }
        let metas = manifest.iter().flat_map(|manifest| &manifest.tables);
        for (table, meta) in self.tables.iter_mut().zip(metas) {
            table.count_present(meta.entry_count)?;
        }
        undo::forget(self.folder.as_ref())
    }

    // Puts every saved page back, then makes that durable before the undo file is forgotten.
    fn apply_undo(&mut self, commit: u64) -> Result<()> {
        let missing = || Error::corruption("undo file is missing").with("file", undo::PAGES);
        let path = self.folder.file_path(undo::PAGES).ok_or_else(missing)?;
        let file = File::open(&path).map_err(|cause| missing().with("cause", cause))?;
        let mut entries = BufReader::with_capacity(UNDO_PAGES * PAGE_BYTES, file);
        while let Some(saved) = undo::read_entry(&mut entries)? {
            // Pages of tables that no commit knows are worth nothing.
            let table = self.tables.get_mut(saved.table as usize);
            if let (Some(table), true) = (table, saved.commit == commit) {
                table.restore_page(saved.page as usize, &saved.bytes)?;
            }
        }
        self.tables.iter().try_for_each(DenseTable::sync)
    }

    // Allocates and saves what a write will touch; nothing has changed when this fails.
    fn prepare(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        let commit = self.commit_number();
        let undo = match &mut self.undo {
            Some(undo) => undo,
            none => {
                let looked_at = || Error::unsupported("a folder that is only looked at stays so");
                let undo = Undo::start(self.path.as_deref().ok_or_else(looked_at)?)?;
                undo::note_boot(self.folder.as_ref(), &self.options.boot_id, commit)?;
                none.insert(undo)
            }
        };
        let mut waiting: Vec<(usize, usize)> = Vec::with_capacity(UNDO_PAGES);
        for row in rows {
            let at = row.key.table.0 as usize;
            let Some(table) = self.tables.get_mut(at) else { continue };
            for page in table.pages_of(row.key.row) {
                if table.is_saved(page) || waiting.contains(&(at, page)) {
                    continue;
                }
                table.allocate(page)?;
                undo.push(row.key.table.0, page as u64, commit, table.page(page));
                waiting.push((at, page));
            }
            if waiting.len() >= UNDO_PAGES {
                flush_undo(undo, &mut self.tables, &mut waiting)?;
            }
        }
        flush_undo(undo, &mut self.tables, &mut waiting)
    }

    fn disk_bytes(&self) -> u64 {
        let tables: u64 = self.tables.iter().map(DenseTable::disk_bytes).sum();
        let undo = self.undo.as_ref().map_or(0, Undo::len_bytes);
        tables + undo + self.log.attachment_bytes()
    }

    // What a write may add: pieces of tables, and undo pages.
    fn growth_bytes(&self, rows: &[RowWrite<'_>]) -> u64 {
        let mut bytes = 0;
        for row in rows {
            let Some(table) = self.tables.get(row.key.table.0 as usize) else { continue };
            let pages: Vec<_> = table.pages_of(row.key.row).collect();
            let unsaved = pages.iter().filter(|page| !table.is_saved(**page)).count();
            bytes += table.new_bytes(&pages) + (unsaved * PAGE_BYTES) as u64;
        }
        bytes
    }

    fn put_in_force(
        &mut self,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        // A failed sync leaves open which pages reached the disk; asking again proves nothing.
        // Source: Rebello et al., "Can applications recover from fsync failures?", ATC'20.
        self.tables.iter().try_for_each(DenseTable::sync).map_err(CommitFailure::Poisoned)?;
        let meta = |(table, schema): (&DenseTable, &TableSchema)| TableMeta {
            file: table::file_name(schema),
            crc32c: 0,
            entry_count: table.present_rows,
            grown_at: Vec::new(),
        };
        let manifest = Manifest {
            tables: self.tables.iter().zip(self.schema.tables()).map(meta).collect(),
            ..self.log.next_manifest(name, &self.schema)
        };
        self.log.put_in_force(manifest, attachments)
    }
}

fn flush_undo(
    undo: &mut Undo,
    tables: &mut [DenseTable],
    waiting: &mut Vec<(usize, usize)>,
) -> Result<()> {
    undo.flush()?;
    for (table, page) in waiting.drain(..) {
        if let Some(table) = tables.get_mut(table) {
            table.set_saved(page);
        }
    }
    Ok(())
}

impl RowStore for MmapStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, keys.iter().copied())?;
        self.stats.rows_read += keys.len() as u64;
        for (at, key) in keys.iter().enumerate() {
            let record = self.tables.get(key.table.0 as usize).and_then(|table| table.get(key.row));
            self.stats.rows_absent += u64::from(record.is_none());
            sink(at, record)?;
        }
        Ok(())
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        let mut rows = self.tables.get(table.0 as usize).into_iter().flat_map(DenseTable::rows);
        rows.try_for_each(|(row, record)| sink(row, record))
    }

    fn stats(&self) -> StoreStats {
        // The system moves the pages; it alone knows how many.
        let io = IoStats { engine: "mmap", ..IoStats::default() };
        StoreStats { io, disk_bytes: self.disk_bytes(), ..self.stats.clone() }
    }
}

impl TrainStore for MmapStore {
    fn set_kept_bytes(&mut self, bytes: u64) {
        self.kept_bytes = bytes;
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        let mut schema = self.schema.clone();
        let id = schema.add(table.clone())?;
        if id.0 as usize == self.tables.len() {
            let dense = DenseTable::open(&*self.folder, &table, false, &self.options.budget)?;
            self.tables.push(dense);
            self.schema = schema;
        }
        Ok(id)
    }

    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, rows.iter().map(|row| row.key))?;
        check_records(&self.schema, rows)?;
        let quota = self.options.disk_quota_bytes;
        if quota.is_some() {
            let wanted = self.disk_bytes() + self.kept_bytes + self.growth_bytes(rows);
            check_disk_quota(quota, wanted)?;
        }
        self.prepare(rows)?;
        for row in rows {
            if let Some(table) = self.tables.get_mut(row.key.table.0 as usize) {
                table.put(row.key.row, row.record);
            }
        }
        self.stats.rows_written += rows.len() as u64;
        Ok(())
    }

    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        self.poison.check()?;
        let quota = self.options.disk_quota_bytes;
        let wanted = self.disk_bytes() + self.kept_bytes;
        check_disk_quota(quota, wanted + attached_bytes(&self.log, attachments))?;
        self.put_in_force(name, attachments)
            .map_err(|failure| failure.into_error(&mut self.poison))?;
        self.stats.commit_count += 1;
        self.tables.iter_mut().for_each(DenseTable::forget_saved);
        self.undo = None;
        // A note of an older commit counts for nothing; failing to remove it costs space only.
        let _ = undo::forget(self.folder.as_ref());
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
        let mut pages = 0;
        for table in &mut self.tables {
            table.count_present(table.present_rows)?;
            pages += table.page_count();
        }
        Ok(pages)
    }

    fn path(&self) -> Option<&Path> {
        self.folder.path()
    }
}
