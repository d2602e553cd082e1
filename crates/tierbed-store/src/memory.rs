//! The `memory` store: every written row in plain memory. The oracle of every test.
//!
//! Deliberately the simplest thing that can be right: chunks of records, a presence bit each.
//! With a folder it keeps commits as whole dumps, so small models can checkpoint too.

#![expect(
    clippy::indexing_slicing,
    reason = "rows and tables are checked against the schema on entry; chunks cover all rows"
)]

use std::path::Path;
use std::sync::Arc;

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::stats::{IoStats, StoreStats};
use tierbed_core::store::{check_keys, Attachment, CommitInfo, RowSink, ScanSink};
use tierbed_core::{
    Budget, Error, Poison, Reservation, Result, RowId, RowKey, RowStore, RowWrite, Schema, TableId,
    TableSchema, TrainStore,
};
use tierbed_io::{Appender, Folder, FolderLock, OpenMode};

use crate::commit::{CommitLog, Manifest, TableMeta};
use crate::file::check_records;

/// Rows allocated at once: a table of few written rows stays small, a full one has few boxes.
const CHUNK_ROWS: u64 = 256;
/// Bytes written at once: whole blocks, few calls.
const DUMP_CHUNK_BYTES: usize = 64 * 1024;

#[derive(Debug)]
struct Chunk {
    is_present: [bool; CHUNK_ROWS as usize],
    records: Vec<u8>,
}

#[derive(Debug)]
struct Table {
    record_bytes: usize,
    chunks: Vec<Option<Box<Chunk>>>,
    memory: Reservation,
}

impl Table {
    fn new(schema: &TableSchema, budget: &Budget) -> Result<Self> {
        let chunk_count = usize::try_from(schema.row_count.div_ceil(CHUNK_ROWS)).map_err(|_| {
            Error::invalid("table too large for memory").with("table", &schema.name)
        })?;
        let memory = budget.reserve("memory store", 8 * chunk_count as u64)?;
        let chunks = std::iter::repeat_with(|| None).take(chunk_count).collect();
        Ok(Self { record_bytes: schema.record_bytes(), chunks, memory })
    }

    fn grow(&mut self, row_count: u64) -> Result<()> {
        let chunk_count = usize::try_from(row_count.div_ceil(CHUNK_ROWS))
            .map_err(|_| Error::invalid("table too large for memory").with("rows", row_count))?;
        if chunk_count > self.chunks.len() {
            let more = 8 * (chunk_count - self.chunks.len()) as u64;
            self.memory.resize(self.memory.bytes() + more)?;
            self.chunks.resize_with(chunk_count, || None);
        }
        Ok(())
    }

    fn chunk_bytes(record_bytes: usize) -> u64 {
        (CHUNK_ROWS as usize * record_bytes + size_of::<Chunk>()) as u64
    }

    // What the chunks that are not there yet would cost.
    fn growth_bytes_max(&self) -> u64 {
        let absent = self.chunks.iter().filter(|chunk| chunk.is_none()).count();
        absent as u64 * Self::chunk_bytes(self.record_bytes)
    }

    fn locate(row: RowId) -> (usize, usize) {
        ((row.0 / CHUNK_ROWS) as usize, (row.0 % CHUNK_ROWS) as usize)
    }

    fn get(&self, row: RowId) -> Option<&[u8]> {
        let (chunk, slot) = Self::locate(row);
        let chunk = self.chunks[chunk].as_ref()?;
        chunk.is_present[slot]
            .then(|| &chunk.records[slot * self.record_bytes..(slot + 1) * self.record_bytes])
    }

    fn put(&mut self, row: RowId, record: &[u8]) -> Result<()> {
        let (chunk, slot) = Self::locate(row);
        let record_bytes = self.record_bytes;
        let chunk = match &mut self.chunks[chunk] {
            Some(chunk) => chunk,
            empty => {
                let bytes = CHUNK_ROWS as usize * record_bytes;
                self.memory.resize(self.memory.bytes() + Self::chunk_bytes(record_bytes))?;
                empty.insert(Box::new(Chunk {
                    is_present: [false; CHUNK_ROWS as usize],
                    records: vec![0; bytes],
                }))
            }
        };
        chunk.is_present[slot] = true;
        chunk.records[slot * record_bytes..(slot + 1) * record_bytes].copy_from_slice(record);
        Ok(())
    }

    fn rows(&self) -> impl Iterator<Item = (RowId, &[u8])> {
        let row_of = |chunk: usize, slot: u64| RowId(chunk as u64 * CHUNK_ROWS + slot);
        self.chunks
            .iter()
            .enumerate()
            .filter(|(_, chunk)| chunk.is_some())
            .flat_map(move |(chunk, _)| (0..CHUNK_ROWS).map(move |slot| row_of(chunk, slot)))
            .filter_map(|row| self.get(row).map(|record| (row, record)))
    }
}

/// Row records in memory. See the module documentation.
pub struct MemoryStore {
    tables: Vec<Table>,
    schema: Schema,
    budget: Budget,
    stats: StoreStats,
    disk: Option<Disk>,
    poison: Poison,
}

struct Disk {
    folder: Arc<dyn Folder>,
    log: CommitLog,
    _lock: FolderLock,
}

impl MemoryStore {
    /// Builds a store that keeps nothing on disk.
    #[must_use]
    pub fn new(budget: Budget) -> Self {
        Self {
            tables: Vec::new(),
            schema: Schema::default(),
            budget,
            stats: StoreStats::default(),
            disk: None,
            poison: Poison::default(),
        }
    }

    /// Opens a store whose commits are dumps in `folder`, at its last commit.
    ///
    /// # Errors
    /// As [`FileStore::open`](crate::FileStore::open).
    pub fn open(folder: Arc<dyn Folder>, budget: Budget) -> Result<Self> {
        let lock = folder.lock()?;
        let log = CommitLog::open(folder.clone(), "memory")?;
        let mut store = Self::new(budget);
        if let Some(manifest) = log.manifest() {
            // Twice: half of the budget is for what is above the store.
            let rows_bytes: u64 = manifest.schema.tables().iter().map(rows_bytes).sum();
            store.budget.name_at_least(2 * rows_bytes);
            for (schema, meta) in manifest.table_files()? {
                let mut table = Table::new(schema, &store.budget)?;
                read_dump(folder.as_ref(), meta, schema, &mut table)?;
                store.schema.add(schema.clone())?;
                store.tables.push(table);
            }
        }
        store.disk = Some(Disk { folder, log, _lock: lock });
        Ok(store)
    }
}

impl RowStore for MemoryStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, keys.iter().copied())?;
        self.stats.rows_read += keys.len() as u64;
        for (at, key) in keys.iter().enumerate() {
            let record = self.tables[key.table.0 as usize].get(key.row);
            self.stats.rows_absent += u64::from(record.is_none());
            sink(at, record)?;
        }
        Ok(())
    }

    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        self.poison.check()?;
        self.schema.table(table)?;
        self.tables[table.0 as usize].rows().try_for_each(|(row, record)| sink(row, record))
    }

    fn stats(&self) -> StoreStats {
        let io = IoStats { engine: "memory", ..IoStats::default() };
        StoreStats { io, ..self.stats.clone() }
    }
}

// Memory of a table whose rows are all stored.
fn rows_bytes(schema: &TableSchema) -> u64 {
    schema.row_count.div_ceil(CHUNK_ROWS) * (8 + Table::chunk_bytes(schema.record_bytes()))
}

impl TrainStore for MemoryStore {
    fn growth_bytes_max(&self) -> u64 {
        self.tables.iter().map(Table::growth_bytes_max).sum()
    }

    fn add_table(&mut self, table: TableSchema) -> Result<TableId> {
        self.poison.check()?;
        let mut schema = self.schema.clone();
        let id = schema.add(table.clone())?;
        if id.0 as usize == self.tables.len() {
            self.tables.push(Table::new(&table, &self.budget)?);
            self.schema = schema;
        }
        Ok(id)
    }

    fn grow_table(&mut self, table: TableId, row_count: u64) -> Result<()> {
        self.poison.check()?;
        let mut schema = self.schema.clone();
        schema.grow(table, row_count)?;
        self.tables[table.0 as usize].grow(row_count)?;
        self.schema = schema;
        Ok(())
    }

    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()> {
        self.poison.check()?;
        check_keys(&self.schema, rows.iter().map(|row| row.key))?;
        check_records(&self.schema, rows)?;
        self.stats.rows_written += rows.len() as u64;
        for row in rows {
            self.tables[row.key.table.0 as usize].put(row.key.row, row.record)?;
        }
        Ok(())
    }

    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()> {
        self.poison.check()?;
        let Some(disk) = &mut self.disk else {
            return Err(Error::unsupported(
                "this memory store has no folder to keep a checkpoint in",
            )
            .with("remedy", "open it with a path"));
        };
        assert_eq!(self.tables.len(), self.schema.tables().len(), "every table is dumped");
        let number = disk.log.next_number();
        let mut metas = Vec::new();
        for (table, schema) in self.tables.iter().zip(self.schema.tables()) {
            let file = CommitLog::file_name(number, &format!("{}.dump", schema.name));
            metas.push(write_dump(disk.folder.as_ref(), file, table)?);
        }
        let manifest = Manifest { tables: metas, ..disk.log.next_manifest(name, &self.schema) };
        disk.log
            .put_in_force(manifest, attachments)
            .map_err(|failure| failure.into_error(&mut self.poison))?;
        self.stats.commit_count += 1;
        Ok(())
    }

    fn last_commit(&self) -> Option<&CommitInfo> {
        self.disk.as_ref()?.log.info()
    }

    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        self.disk.as_ref().map_or(Ok(None), |disk| disk.log.attachment(name))
    }

    fn attachment_names(&self) -> Result<Vec<String>> {
        Ok(self.disk.as_ref().map(|disk| disk.log.attachment_names()).unwrap_or_default())
    }

    fn verify(&mut self) -> Result<u64> {
        self.poison.check()?;
        self.disk.as_ref().map_or(Ok(()), |disk| disk.log.verify())?;
        Ok(0)
    }

    fn path(&self) -> Option<&Path> {
        self.disk.as_ref()?.folder.path()
    }
}

// A dump is a stream of (row id u64, record), cut into whole blocks; the manifest holds count
// and checksum. Normative: docs/reference/formats/store.md.
fn write_dump(folder: &dyn Folder, file: String, table: &Table) -> Result<TableMeta> {
    let device = folder.open(&file, OpenMode::Create)?;
    device.set_len(0)?;
    let mut dump = Appender::new(device, 0, DUMP_CHUNK_BYTES);
    let (mut crc, mut entry_count) = (0, 0);
    for (row, record) in table.rows() {
        entry_count += 1;
        let id = row.0.to_le_bytes();
        for part in [&id[..], record] {
            crc = crc32c_append(crc, part);
            dump.append(part)?;
        }
    }
    dump.flush()?.sync()?;
    Ok(TableMeta { file, crc32c: crc, entry_count, ..TableMeta::default() })
}

fn read_dump(
    folder: &dyn Folder,
    meta: &TableMeta,
    schema: &TableSchema,
    table: &mut Table,
) -> Result<()> {
    let damaged = |what: &str| Error::corruption(format!("dump {what}")).with("file", &meta.file);
    let bytes = folder.read(&meta.file)?.ok_or_else(|| damaged("is missing"))?;
    let entry_bytes = 8 + schema.record_bytes();
    let wanted = usize::try_from(meta.entry_count)
        .ok()
        .and_then(|count| count.checked_mul(entry_bytes))
        .and_then(|len| bytes.get(..len))
        .ok_or_else(|| damaged("is shorter than committed"))?;
    if crc32c(wanted) != meta.crc32c {
        return Err(damaged("checksum mismatch"));
    }
    for entry in wanted.chunks_exact(entry_bytes) {
        let Some((id, record)) = entry.split_first_chunk::<8>() else {
            panic!("an entry begins with its row id")
        };
        let row = u64::from_le_bytes(*id);
        if row >= schema.row_count {
            return Err(damaged("names a row outside the table").with("row", row));
        }
        table.put(RowId(row), record)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::conformance::check_row_store;
    use tierbed_core::ErrorKind;
    use tierbed_io::MemoryFolder;

    #[test]
    fn keeps_the_waists_promise() {
        for seed in 0..8 {
            let folder: Arc<dyn Folder> = Arc::new(MemoryFolder::default());
            let open = || -> Result<Box<dyn TrainStore>> {
                Ok(Box::new(MemoryStore::open(folder.clone(), Budget::unlimited())?))
            };
            let store = open().unwrap();
            check_row_store(
                store,
                Some(&mut |old, _| {
                    drop(old);
                    open()
                }),
                seed,
                200,
            )
            .unwrap();
        }
    }

    #[test]
    fn counts_against_the_budget() {
        let budget = Budget::new(100_000);
        let mut store = MemoryStore::new(budget.clone());
        let table = TableSchema {
            optimizer: tierbed_core::OptimizerKind::Sgd,
            init: tierbed_core::InitSpec::Constant { value: 0.0 },
            ..TableSchema::plain("t", 100_000, 16)
        };
        let id = store.add_table(table).unwrap();
        let record = vec![1u8; 68];
        let mut result = Ok(());
        for row in (0..100_000).step_by(256) {
            let key = RowKey::new(id, RowId(row));
            result = store.write(&[RowWrite { key, record: &record }]);
            if result.is_err() {
                break;
            }
        }
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Invalid);
        assert!(budget.report().peak_bytes <= 100_000);
    }

    #[test]
    fn without_a_folder_a_checkpoint_is_refused() {
        let mut store = MemoryStore::new(Budget::unlimited());
        assert_eq!(store.commit("x", &[]).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
