//! The store: what it is made of, how it is opened, and the waist's traits.

use std::path::Path;
use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::stats::StoreStats;
use tierbed_core::store::{check_keys, Attachment, CommitInfo, RowSink, ScanSink};
use tierbed_core::{
    check_disk_quota, Budget, Error, ErrorKind, Poison, Reservation, Result, RowKey, RowStore,
    RowWrite, Schema, TableId, TableSchema, TrainStore,
};
use tierbed_io::{open_engine, EngineOptions, Folder, FolderLock, IoEngine, PAGE_BYTES};
use tierbed_store::{check_records, CommitFailure, CommitLog, Manifest, TableMeta};

use super::bucket::{pages_of, Bucket, BucketId};
use super::cache::{row_bytes, RowCache};
use super::files::BucketFiles;
use super::index::{self, Place, ReadIndex, TableIndex, BUCKET_PAGES_MAX};
use super::merge::MERGE_BUCKETS;
use super::scan::scan_bytes;
use super::traffic::{read_buckets, Wanted};
use crate::attached_bytes;

/// What a [`HashDb`] is opened with.
#[derive(Debug, Clone)]
pub struct HashDbOptions {
    /// Account for everything the store allocates.
    pub budget: Budget,
    /// How buckets are read; the buffer size follows the bucket size.
    pub engine: EngineOptions,
    /// Most bytes the store may occupy on disk.
    pub disk_quota_bytes: Option<u64>,
    /// Most bytes of the first level; buckets grow until it fits.
    pub index_bytes_max: u64,
    /// Bytes of the caches.
    pub cache_bytes: u64,
    /// Outdated share of a file that makes it worth merging, 0 to 1.
    pub outdated_ratio_max: f64,
    /// Bytes of an append file.
    pub file_bytes: u64,
}

impl HashDbOptions {
    /// Divides `memory_bytes`: what scans take, an eighth for the index at most, and three
    /// quarters of the rest for the caches.
    #[must_use]
    pub fn within(memory_bytes: u64, budget: Budget) -> Self {
        let cache_bytes = memory_bytes.saturating_sub(scan_bytes(0)) / 4 * 3;
        Self {
            budget,
            engine: EngineOptions::default(),
            disk_quota_bytes: None,
            index_bytes_max: memory_bytes / 8,
            // Too little for both is refused on opening, with the least that is enough.
            cache_bytes: cache_bytes.max(memory_bytes / 4),
            outdated_ratio_max: 0.5,
            file_bytes: 64 << 20,
        }
    }
}

/// Bytes appended at a time.
const APPEND_BYTES: usize = 256 << 10;
/// Row records in hash buckets. See the module documentation.
pub struct HashDb {
    // Dropped first: the engine may still own buffers of the devices in `files`.
    pub(super) engine: Box<dyn IoEngine>,
    pub(super) files: BucketFiles,
    pub(super) tables: Vec<TableIndex>,
    pub(super) cache: RowCache,
    pub(super) schema: Schema,
    pub(super) log: CommitLog,
    folder: Arc<dyn Folder>,
    pub(super) options: HashDbOptions,
    /// Disk space of kept checkpoints.
    pub(super) kept_bytes: u64,
    pub(super) stats: StoreStats,
    poison: Poison,
    _memory: [Reservation; 4],
    _lock: FolderLock,
}

impl HashDb {
    /// Opens the store in `folder` at its last commit, or starts a new one in an empty folder.
    ///
    /// # Errors
    /// `Closed` when another process owns it, `Invalid` when the folder holds something else or
    /// the budget is too small, `Corruption` when files are missing, short or damaged.
    pub fn open(folder: Arc<dyn Folder>, options: HashDbOptions) -> Result<Self> {
        if !(0.05..=1.0).contains(&options.outdated_ratio_max) {
            return Err(Error::invalid("outdated_ratio_max must be 0.05 to 1"));
        }
        let lock = folder.lock()?;
        let log = CommitLog::open(folder.clone(), "hashdb")?;
        let buf_bytes = 2 * PAGE_BYTES;
        let mut engine = open_engine(&EngineOptions { buf_bytes, ..options.engine.clone() })?;
        let budget = &options.budget;
        let memory = [
            budget.reserve("io buffers", engine.memory_bytes())?,
            budget.reserve("append buffer", (APPEND_BYTES + MERGE_BUCKETS * 64) as u64)?,
            budget.reserve("hash caches", options.cache_bytes)?,
            // Kept from the start: a store that opens can be scanned and published.
            budget.reserve("scan buffers", scan_bytes(options.cache_bytes))?,
        ];
        let mut files = BucketFiles::new(folder.clone(), options.file_bytes, APPEND_BYTES);
        let schema = log.manifest().map(|manifest| manifest.schema.clone()).unwrap_or_default();
        let (committed, tables) = read_index(folder.as_ref(), &log, &schema, budget)?;
        files.recover(&committed, engine.as_mut())?;
        tables.iter().flat_map(|table| table.buckets(0, 0)).for_each(|(_, at)| files.note_live(at));
        Ok(Self {
            engine,
            files,
            tables,
            cache: RowCache::new(options.cache_bytes),
            schema,
            log,
            folder,
            options,
            kept_bytes: 0,
            stats: StoreStats::default(),
            poison: Poison::default(),
            _memory: memory,
            _lock: lock,
        })
    }

    // Doubles the buckets until the table's index fits what is left for indexes.
    fn plan_table(&self, table: &TableSchema) -> Result<TableIndex> {
        let used: u64 = self.tables.iter().map(|index| index.buckets_total() * 16).sum();
        let left = self.options.index_bytes_max.saturating_sub(used);
        let mut bucket_pages = pages_of(1, table.record_bytes()).next_power_of_two() as u32;
        // A table takes at most half of what is left, so that later ones find room too.
        while 16 * index::bucket_count(table, bucket_pages) > left / 2 {
            let is_one_bucket = index::bucket_count(table, bucket_pages) <= 1;
            if is_one_bucket || 2 * bucket_pages as usize > BUCKET_PAGES_MAX / 4 {
                break;
            }
            bucket_pages *= 2;
        }
        TableIndex::new(table, bucket_pages, &self.options.budget)
    }

    pub(super) fn table(&self, id: u32) -> Result<&TableIndex> {
        self.tables.get(id as usize).ok_or_else(|| Error::invalid("no such table"))
    }

    pub(super) fn bucket_of(&self, key: RowKey) -> Result<BucketId> {
        let bucket = self.table(key.table.0)?.bucket_of(key.row.0);
        Ok(BucketId { table: key.table.0, bucket, store: self.log.store() })
    }

    fn read_rows(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.cache.tick();
        let mut misses: Vec<(BucketId, usize)> = Vec::new();
        for (at, key) in keys.iter().enumerate() {
            if let Some(record) = self.cache.get(*key) {
                sink(at, Some(record))?;
            } else {
                misses.push((self.bucket_of(*key)?, at));
            }
        }
        misses.sort_unstable();
        let mut wanted = Vec::new();
        for (number, group) in misses.chunk_by(|a, b| a.0 == b.0).enumerate() {
            let Some((id, _)) = group.first() else { continue };
            let place = self.table(id.table)?.place(id.bucket);
            if place == Place::NONE {
                self.stats.rows_absent += group.len() as u64;
                group.iter().try_for_each(|(_, at)| sink(*at, None))?;
            } else {
                wanted.push(Wanted { id: *id, place, tag: number });
            }
        }
        wanted.sort_unstable_by_key(|bucket| bucket.place);
        let groups: Vec<_> = misses.chunk_by(|a, b| a.0 == b.0).collect();
        let Self { engine, files, tables, cache, stats, .. } = self;
        let pages = read_buckets(&wanted, files, engine.as_mut(), &mut |asked, bytes| {
            let record_bytes =
                tables.get(asked.id.table as usize).map_or(0, |table| table.record_bytes);
            let bucket = Bucket::check(bytes, asked.id, record_bytes)?;
            for (_, at) in groups.get(asked.tag).copied().unwrap_or(&[]) {
                let Some(key) = keys.get(*at) else { continue };
                let record = bucket.get(key.row.0);
                stats.rows_absent += u64::from(record.is_none());
                if let Some(record) = record.filter(|_| cache.has_room(record_bytes)) {
                    cache.put(*key, record, false);
                }
                sink(*at, record)?;
            }
            Ok(())
        })?;
        self.stats.pages_read += pages;
        self.stats.rows_read += keys.len() as u64;
        Ok(())
    }

    fn write_rows(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.cache.tick();
        for row in rows {
            if !self.cache.holds(row.key) && !self.cache.has_room(row.record.len()) {
                self.make_room(row.record.len())?;
                if !self.cache.has_room(row.record.len()) {
                    return Err(Error::invalid("a row does not fit into the caches")
                        .with("row_bytes", row_bytes(row.record.len()))
                        .with("cache_bytes", self.options.cache_bytes)
                        .with("remedy", "raise dram_budget"));
                }
            }
            self.cache.put(row.key, row.record, true);
            self.stats.rows_written += 1;
        }
        Ok(())
    }

    pub(super) fn disk_bytes(&self) -> u64 {
        self.files.disk_bytes() + self.log.attachment_bytes()
    }

    fn put_in_force(
        &mut self,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        self.write_dirty().map_err(failure)?;
        // A failed sync leaves open which buckets reached the disk; asking again proves nothing.
        // Source: Rebello et al., "Can applications recover from fsync failures?", ATC'20.
        self.files.sync().map_err(CommitFailure::Poisoned)?;
        let number = self.log.next_number();
        let list = self.files.list();
        let bytes = index::encode_index(&list, &self.tables);
        let file = CommitLog::file_name(number, "index");
        self.folder.write_durable(&file, &bytes).map_err(|error| {
            let _ = self.folder.remove(&file);
            CommitFailure::of(error)
        })?;
        let store_file = TableMeta {
            file,
            crc32c: crc32c(&bytes),
            entry_count: list.len() as u64,
            ..TableMeta::default()
        };
        let manifest =
            Manifest { store_file: Some(store_file), ..self.log.next_manifest(name, &self.schema) };
        self.log.put_in_force(manifest, attachments)?;
        self.files.committed();
        Ok(())
    }
}

// A damaged bucket met by a merge undoes the commit; it says nothing about later syncs.
fn failure(error: Error) -> CommitFailure {
    match error.kind() {
        ErrorKind::Corruption => CommitFailure::Undone(error),
        _ => CommitFailure::of(error),
    }
}

fn read_index(
    folder: &dyn Folder,
    log: &CommitLog,
    schema: &Schema,
    budget: &Budget,
) -> Result<ReadIndex> {
    let Some(manifest) = log.manifest() else { return Ok((Vec::new(), Vec::new())) };
    let Some(meta) = &manifest.store_file else { return Err(index::damaged()) };
    let bytes =
        folder.read(&meta.file)?.ok_or_else(|| index::damaged().with("file", &meta.file))?;
    if crc32c(&bytes) != meta.crc32c {
        return Err(index::damaged().with("file", &meta.file));
    }
    index::decode_index(&bytes, schema.tables(), budget)
}

impl RowStore for HashDb {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, keys.iter().copied())?;
        self.read_rows(keys, sink)
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        self.scan_table(table, sink)
    }

    fn stats(&self) -> StoreStats {
        // Buckets are appended past the engine; they count.
        let mut io = self.engine.stats();
        io.write_bytes += self.files.pages_written * PAGE_BYTES as u64;
        StoreStats {
            pages_written: self.files.pages_written,
            disk_bytes: self.disk_bytes(),
            io,
            ..self.stats.clone()
        }
    }
}

impl TrainStore for HashDb {
    fn set_kept_bytes(&mut self, bytes: u64) {
        self.kept_bytes = bytes;
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        let mut schema = self.schema.clone();
        let id = schema.add(table.clone())?;
        if id.0 as usize == self.tables.len() {
            self.tables.push(self.plan_table(&table)?);
            self.schema = schema;
        }
        Ok(id)
    }

    fn grow_table(&mut self, table: TableId, row_count: u64) -> Result<()> {
        self.poison.check()?;
        let mut schema = self.schema.clone();
        schema.grow(table, row_count)?;
        if let Some(index) = self.tables.get_mut(table.0 as usize) {
            index.grow(schema.table(table)?)?;
        }
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
        let wanted =
            self.files.disk_bytes() + self.kept_bytes + attached_bytes(&self.log, attachments);
        check_disk_quota(self.options.disk_quota_bytes, wanted)?;
        self.put_in_force(name, attachments)
            .map_err(|failure| failure.into_error(&mut self.poison))?;
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
        let (store, mut pages) = (self.log.store(), 0);
        for at in 0..self.tables.len() {
            let Self { engine, files, tables, .. } = &mut *self;
            let Some(table) = tables.get(at) else { continue };
            let buckets = table.buckets(at as u32, store);
            let wanted: Vec<_> = buckets.map(|(id, place)| Wanted { id, place, tag: 0 }).collect();
            pages += read_buckets(&wanted, files, engine.as_mut(), &mut |asked, bytes| {
                Bucket::check(bytes, asked.id, table.record_bytes).map(drop)
            })?;
        }
        Ok(pages)
    }

    fn path(&self) -> Option<&Path> {
        self.folder.path()
    }
}
