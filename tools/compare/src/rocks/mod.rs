//! RocksDB as a training store: what most would take first, and RecDB's and FBGEMM's ground.
//!
//! Key: table and row as 8 big-endian bytes, so that file order is row order; value: the record.
//! Reads are RocksDB's sorted `MultiGet` on several threads, writes one batch per call without a
//! log. A commit flushes the memtables and takes a RocksDB checkpoint (`generation`).

mod generation;
mod options;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use tierbed_core::checksum::crc32c;
use tierbed_core::stats::{IoStats, StoreStats};
use tierbed_core::store::{check_keys, Attachment, CommitInfo, RowSink, ScanSink};
use tierbed_core::{
    check_disk_quota, Error, Poison, Reservation, Result, RowId, RowKey, RowStore, RowWrite,
    Schema, TableId, TableSchema, TrainStore,
};
use tierbed_io::{Folder, FolderLock};
use tierbed_store::{check_records, CommitFailure, CommitLog, Manifest, TableMeta};

use crate::ffi::rocksdb::{check_available, Db, Found};
use crate::{attached_bytes, packed};
pub use options::{RocksMode, RocksOptions};

/// Keys of one `MultiGet`.
const CHUNK_ROWS: usize = 128;

/// Says why RocksDB cannot be used here; `Ok` when it can.
///
/// # Errors
/// `Unsupported` when the library is missing or too old, with the remedy.
pub fn is_rocksdb_available() -> Result<()> {
    check_available()
}

/// Row records in RocksDB. See the module documentation.
pub struct RocksStore {
    db: Db,
    schema: Schema,
    log: CommitLog,
    folder: Arc<dyn Folder>,
    path: PathBuf,
    options: RocksOptions,
    stats: StoreStats,
    record_bytes_max: usize,
    poison: Poison,
    _memory: [Reservation; 3],
    _lock: FolderLock,
}

impl RocksStore {
    /// Opens the store in `folder` at its last commit, or starts a new one in an empty folder.
    ///
    /// # Errors
    /// `Unsupported` when RocksDB's library is missing or the folder has no path, `Closed` when
    /// another process owns it, `Invalid` when the folder holds something else or the budget is
    /// too small, `Corruption` when files of the commit are missing or cut.
    pub fn open(folder: Arc<dyn Folder>, options: RocksOptions) -> Result<Self> {
        check_available()?;
        options.check()?;
        let Some(path) = folder.path().map(Path::to_owned) else {
            return Err(Error::unsupported("RocksDB needs a folder on a file system"));
        };
        let lock = folder.lock()?;
        let log = CommitLog::open(folder.clone(), "rocksdb")?;
        let memtables = options.memtables_max as u64 * options.memtable_bytes as u64;
        let memory = [
            options.budget.reserve("rocksdb memtables", memtables)?,
            options.budget.reserve("rocksdb block cache", options.block_cache_bytes as u64)?,
            options.budget.reserve("rocksdb read buffers", options.read_buffer_bytes as u64)?,
        ];
        let committed = log.info().map(|info| info.number);
        generation::remove_others(&path, committed, false)?;
        if let Some(manifest) = log.manifest() {
            let files = read_list(folder.as_ref(), manifest)?;
            generation::restore(&path, manifest.number, &files)?;
        }
        let schema = log.manifest().map(|manifest| manifest.schema.clone()).unwrap_or_default();
        Ok(Self {
            db: Db::open(&generation::live_path(&path), &options)?,
            record_bytes_max: schema
                .tables()
                .iter()
                .map(TableSchema::record_bytes)
                .max()
                .unwrap_or(0),
            schema,
            log,
            folder,
            path,
            options,
            stats: StoreStats::default(),
            poison: Poison::default(),
            _memory: memory,
            _lock: lock,
        })
    }

    fn disk_bytes(&self) -> u64 {
        generation::disk_bytes(&self.path) + self.log.attachment_bytes()
    }

    // One sorted MultiGet per chunk, several at a time.
    fn read_round(&self, keys: &[[u8; 8]]) -> Result<Vec<Found>> {
        let chunks: Vec<_> = keys.chunks(CHUNK_ROWS).collect();
        let thread_count = self.options.read_threads.min(chunks.len());
        if thread_count <= 1 {
            return chunks.into_iter().map(|chunk| self.db.multi_get(chunk)).collect();
        }
        let next = AtomicUsize::new(0);
        let work = || {
            let mut found = Vec::new();
            while let Some((at, chunk)) = {
                let at = next.fetch_add(1, Ordering::Relaxed);
                chunks.get(at).map(|chunk| (at, chunk))
            } {
                found.push((at, self.db.multi_get(chunk)));
            }
            found
        };
        let found = std::thread::scope(|scope| {
            let threads: Result<Vec<_>> = (0..thread_count)
                .map(|_| {
                    let builder = std::thread::Builder::new().name("tierbed-rocks".to_owned());
                    builder
                        .spawn_scoped(scope, work)
                        .map_err(|cause| Error::os("cannot start a thread", cause))
                })
                .collect();
            let mut found = Vec::with_capacity(chunks.len());
            for thread in threads? {
                let part = thread.join();
                found.extend(part.map_err(|_| Error::invalid("a reading thread panicked"))?);
            }
            Ok::<_, Error>(found)
        });
        let mut found = found?;
        found.sort_unstable_by_key(|(at, _)| *at);
        found.into_iter().map(|(_, part)| part).collect()
    }

    fn read_rows(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        let fitting = self.options.read_buffer_bytes / (self.record_bytes_max + 64);
        let round_rows = fitting.clamp(CHUNK_ROWS, 4 * CHUNK_ROWS * self.options.read_threads);
        let mut names = Vec::with_capacity(round_rows.min(keys.len()));
        let mut at = 0;
        for round in keys.chunks(round_rows) {
            names.clear();
            names.extend(round.iter().map(|key| name_of(*key)));
            let read = self.read_round(&names);
            let found = self.poison.on_any(read)?;
            for (key, record) in round.iter().zip(found.iter().flat_map(Found::records)) {
                self.stats.rows_absent += u64::from(record.is_none());
                if let Some(record) = record {
                    check_length(&self.schema, *key, record)?;
                }
                sink(at, record)?;
                at += 1;
            }
        }
        self.stats.rows_read += keys.len() as u64;
        Ok(())
    }

    fn put_in_force(
        &mut self,
        name: &str,
        attachments: &[Attachment<'_>],
    ) -> std::result::Result<(), CommitFailure> {
        self.db.flush().map_err(CommitFailure::Poisoned)?;
        let number = self.log.next_number();
        let folder = generation::checkpoint_path(&self.path, number);
        let listed = self.db.checkpoint(&folder).and_then(|()| generation::sync_and_list(&folder));
        let files = listed.map_err(CommitFailure::Poisoned)?;
        let list = generation::encode(&files);
        let file = CommitLog::file_name(number, "rocks");
        let written = self.folder.write_durable(&file, list.as_bytes());
        written.map_err(CommitFailure::of)?;
        let store_file = TableMeta {
            file,
            crc32c: crc32c(list.as_bytes()),
            entry_count: files.len() as u64,
            ..TableMeta::default()
        };
        let manifest =
            Manifest { store_file: Some(store_file), ..self.log.next_manifest(name, &self.schema) };
        self.log.put_in_force(manifest, attachments)
    }
}

fn read_list(folder: &dyn Folder, manifest: &Manifest) -> Result<Vec<generation::ListedFile>> {
    let Some(meta) = &manifest.store_file else {
        return Err(Error::corruption("manifest names no list of RocksDB's files"));
    };
    let bytes = folder.read(&meta.file)?.ok_or_else(|| {
        Error::corruption("file of the commit in force is missing").with("file", &meta.file)
    })?;
    if crc32c(&bytes) != meta.crc32c {
        return Err(Error::corruption("checksum mismatch").with("file", &meta.file));
    }
    generation::decode(&bytes)
}

fn name_of(key: RowKey) -> [u8; 8] {
    packed(key).swap_bytes().to_le_bytes()
}

fn row_of(name: &[u8], table: TableId) -> Result<Option<RowId>> {
    let name: [u8; 8] =
        name.try_into().map_err(|_| Error::corruption("RocksDB holds a foreign key"))?;
    let packed = u64::from_le_bytes(name).swap_bytes();
    Ok((packed >> 40 == u64::from(table.0)).then_some(RowId(packed & ((1 << 40) - 1))))
}

fn check_length(schema: &Schema, key: RowKey, record: &[u8]) -> Result<()> {
    let expected = schema.table(key.table)?.record_bytes();
    if record.len() == expected {
        return Ok(());
    }
    Err(Error::corruption("stored record has the wrong length")
        .with("table_id", key.table.0)
        .with("row", key.row.0)
        .with("expected", expected)
        .with("found", record.len()))
}

// Lines of RocksDB's statistics: `rocksdb.bytes.read COUNT : 17`.
fn ticker_of(statistics: &str, name: &str) -> u64 {
    let line = statistics.lines().find(|line| line.split(' ').next() == Some(name));
    line.and_then(|line| line.rsplit(' ').next()).and_then(|count| count.parse().ok()).unwrap_or(0)
}

impl RowStore for RocksStore {
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
        let expected = self.schema.table(table)?;
        let (record_bytes, row_count) = (expected.record_bytes(), expected.row_count);
        self.db.scan(name_of(RowKey::new(table, RowId(0))), &mut |name, record| {
            let Some(row) = row_of(name, table)? else { return Ok(false) };
            if record.len() != record_bytes || row.0 >= row_count {
                return Err(Error::corruption("RocksDB holds a foreign record")
                    .with("table_id", table.0)
                    .with("row", row.0));
            }
            sink(row, record).map(|()| true)
        })
    }

    fn stats(&self) -> StoreStats {
        let statistics = self.db.statistics();
        let count = |name: &str| ticker_of(&statistics, name);
        let blocks = count("rocksdb.block.cache.data.miss");
        let io = IoStats {
            engine: "rocksdb",
            read_count: blocks,
            read_bytes: blocks * self.options.block_bytes as u64
                + count("rocksdb.compact.read.bytes"),
            write_bytes: count("rocksdb.flush.write.bytes") + count("rocksdb.compact.write.bytes"),
            ..IoStats::default()
        };
        StoreStats {
            pages_read: io.read_bytes / 4096,
            pages_written: io.write_bytes / 4096,
            disk_bytes: self.disk_bytes(),
            io,
            // Indexes and filters are held outside the budget.
            own: BTreeMap::from([
                ("block_loads", blocks),
                ("uncounted_bytes", self.db.property(c"rocksdb.estimate-table-readers-mem")),
            ]),
            ..self.stats.clone()
        }
    }
}

impl TrainStore for RocksStore {
    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        self.record_bytes_max = self.record_bytes_max.max(table.record_bytes());
        self.schema.add(table)
    }

    fn grow_table(&mut self, table: TableId, row_count: u64) -> Result<()> {
        self.poison.check()?;
        self.schema.grow(table, row_count)
    }

    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, rows.iter().map(|row| row.key))?;
        check_records(&self.schema, rows)?;
        if self.options.disk_quota_bytes.is_some() {
            let memtables = self.db.property(c"rocksdb.cur-size-all-mem-tables");
            let new: usize = rows.iter().map(|row| row.record.len()).sum();
            let wanted = self.disk_bytes() + memtables + new as u64;
            check_disk_quota(self.options.disk_quota_bytes, wanted)?;
        }
        let written = self.db.write(rows.iter().map(|row| (name_of(row.key), row.record)));
        self.poison.on_any(written)?;
        self.stats.rows_written += rows.len() as u64;
        Ok(())
    }

    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        self.poison.check()?;
        let quota = self.options.disk_quota_bytes;
        if quota.is_some() {
            let files = generation::disk_bytes(&self.path);
            check_disk_quota(quota, files + attached_bytes(&self.log, attachments))?;
        }
        match self.put_in_force(name, attachments) {
            Ok(()) => {}
            Err(CommitFailure::Undone(error)) => {
                // The next try makes the same folder.
                let number = self.log.info().map(|info| info.number);
                let _ = generation::remove_others(&self.path, number, true);
                return Err(error);
            }
            Err(CommitFailure::Poisoned(error)) => return self.poison.on_any(Err(error)),
        }
        // Older checkpoints are garbage; failing to remove them costs space, not correctness.
        let number = self.log.info().map(|info| info.number);
        let _ = generation::remove_others(&self.path, number, true);
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
        for table in 0..self.schema.tables().len() as u32 {
            self.scan(TableId(table), &mut |_, _| Ok(()))?;
        }
        Ok(self.db.property(c"rocksdb.total-sst-files-size") / self.options.block_bytes as u64)
    }

    fn path(&self) -> Option<&Path> {
        self.folder.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_order_as_keys_and_are_read_back() {
        let keys = [(0, 5), (0, 300), (1, 0), (1, 1 << 39), (7, 2)];
        let names = keys.map(|(table, row)| name_of(RowKey::new(TableId(table), RowId(row))));
        assert!(names.windows(2).all(|pair| pair[0] < pair[1]));
        for (name, (table, row)) in names.iter().zip(keys) {
            assert_eq!(row_of(name, TableId(table)).unwrap(), Some(RowId(row)));
            assert_eq!(row_of(name, TableId(table + 1)).unwrap(), None);
        }
        assert!(row_of(b"short", TableId(0)).is_err());
    }

    #[test]
    fn counters_are_found_by_name() {
        let text = "rocksdb.bytes.read COUNT : 17\nrocksdb.bytes COUNT : 3\nrocksdb.x P50 : 1.5\n";
        assert_eq!(ticker_of(text, "rocksdb.bytes"), 3);
        assert_eq!(ticker_of(text, "rocksdb.bytes.read"), 17);
        assert_eq!(ticker_of(text, "rocksdb.none"), 0);
    }
}
