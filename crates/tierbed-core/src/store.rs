//! The storage traits `RowStore` and `TrainStore`: unique rows in, record bytes out.
//!
//! Code above it knows no pages, files or levels; code below it no features, bags, pooling
//! or what the bytes mean. Absence is an outcome, never a value: a row that was never written
//! is reported as `None`, and the caller fills in its initial value.

use std::fmt;
use std::path::Path;

use crate::schema::ROW_COUNT_MAX;
use crate::stats::StoreStats;
use crate::{Error, Result, RowId, RowKey, Schema, TableId, TableSchema};

/// Takes the rows of one read: position in the request, and the record unless never written.
///
/// Called once per asked row, in any order.
pub type RowSink<'a> = dyn FnMut(usize, Option<&[u8]>) -> Result<()> + 'a;

/// Takes the rows of a scan in row order: row id and record.
pub type ScanSink<'a> = dyn FnMut(RowId, &[u8]) -> Result<()> + 'a;

/// One row to write.
#[derive(Debug, Clone, Copy)]
pub struct RowWrite<'a> {
    /// Which row.
    pub key: RowKey,
    /// Its whole record, `record_bytes` of its table.
    pub record: &'a [u8],
}

/// A store of row records, read by unique rows.
///
/// Contract, checked by the conformance kit:
/// - keys MUST be strictly increasing (unique, in file order) and inside the schema;
/// - a row is `Some` exactly when it was written before, with the bytes last written;
/// - after an error nothing is known about rows the sink has not been given.
pub trait RowStore: Send {
    /// Returns the tables.
    fn schema(&self) -> &Schema;

    /// Reads `keys` and hands each record to `sink`.
    ///
    /// # Errors
    /// `Invalid` for keys out of order or range, `Corruption` for bytes that fail their
    /// checksum, `Io` from the device; errors of the sink pass through.
    fn read(&mut self, keys: &[RowKey], sink: &mut RowSink<'_>) -> Result<()>;

    /// Visits every written row of `table` in row order, in bounded memory.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn scan(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()>;

    /// Returns what was counted so far.
    fn stats(&self) -> StoreStats;
}

/// A store that training writes to.
///
/// Durability: what was written becomes durable with the next [`commit`](Self::commit), all of
/// it or nothing. A crash in between reopens at the last commit.
pub trait TrainStore: RowStore {
    /// Adds a table, or finds the identical one.
    ///
    /// # Errors
    /// `Invalid` when the table differs from the stored one or the budget does not reach.
    fn add_table(&mut self, table: TableSchema) -> Result<TableId>;

    /// Makes `table` `row_count` rows long, new rows absent; durable with the next commit. A
    /// table already as long stays as it is.
    ///
    /// # Errors
    /// `Invalid` when no table may be that long or the budget does not reach (nothing is changed
    /// then), `Unsupported` by a store whose tables have one length for ever.
    fn grow_table(&mut self, table: TableId, row_count: u64) -> Result<()> {
        Err(Error::unsupported("tables of this backend cannot grow")
            .with("table_id", table.0)
            .with("row_count", row_count)
            .with("remedy", "give num_embeddings, or choose the backend `file`"))
    }

    /// Writes whole records; keys strictly increasing.
    ///
    /// # Errors
    /// `NoSpace` when disk or quota is full (some of the rows may have been written),
    /// otherwise as [`read`](RowStore::read).
    fn write(&mut self, rows: &[RowWrite<'_>]) -> Result<()>;

    /// Writes as [`write`](Self::write). Who tracks which rows change knows already of those rows
    /// at whose places `is_known` says so.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    fn write_back(
        &mut self,
        rows: &[RowWrite<'_>],
        is_known: &dyn Fn(usize) -> bool,
    ) -> Result<()> {
        let _ = is_known;
        self.write(rows)
    }

    /// Makes every write so far durable, atomically together with `attachments`
    /// (named blobs such as dense parameters), as commit `name`.
    ///
    /// # Errors
    /// `NoSpace` and `Io` leave the previous commit in force; a failed sync poisons the store.
    fn commit(&mut self, name: &str, attachments: &[Attachment<'_>]) -> Result<()>;

    /// Returns the last commit, if there is one.
    fn last_commit(&self) -> Option<&CommitInfo>;

    /// Reads attachment `name` of the last commit; `None` when it has none of that name.
    ///
    /// # Errors
    /// `Corruption` when the blob fails its checksum, `Io` from the device.
    fn attachment(&mut self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Returns the names of the attachments of the last commit.
    ///
    /// # Errors
    /// `Unsupported` by a store that does not know them.
    fn attachment_names(&self) -> Result<Vec<String>>;

    /// Checks every stored byte that has a checksum; returns the number of pages checked.
    ///
    /// # Errors
    /// `Corruption` naming the first bad page.
    fn verify(&mut self) -> Result<u64>;

    /// Returns how many bytes of memory more than now the store may come to need, at most, until
    /// every row of its tables is stored. 0 for a store that takes all it needs when it is opened.
    fn growth_bytes_max(&self) -> u64 {
        0
    }

    /// Sets the bytes of the disk quota that kept checkpoints in the store's folder take. Does
    /// nothing in a store that takes no quota.
    fn set_kept_bytes(&mut self, _bytes: u64) {}

    /// Returns the store's folder, if it has one.
    fn path(&self) -> Option<&Path>;

    /// Receives the batches that were just announced and brought into the buffer above.
    ///
    /// A store may reorganise itself now, while training goes on with what is buffered; what is
    /// read and written stays the same bytes. Does nothing unless a store overrides it.
    ///
    /// # Errors
    /// `NoSpace` and `Invalid` (budget) leave every row readable, otherwise as
    /// [`read`](RowStore::read).
    fn observe(&mut self, _ahead: &Ahead<'_>) -> Result<()> {
        Ok(())
    }
}

/// Gives the row of every access of some batches, duplicates included, in any order.
pub type VisitAccesses<'a> = dyn Fn(&mut dyn FnMut(RowKey)) + 'a;

/// What is known of the batches ahead. Source: RecDB §4.2 (look-ahead), §4.4 (Eq. 2a).
#[derive(Clone, Copy)]
pub struct Ahead<'a> {
    /// Announced batches that were not used yet, the new ones included: what training can go on
    /// with while the store is busy.
    pub batches_buffered: u32,
    /// Accesses of these batches, duplicates counted.
    pub accesses_buffered: u64,
    /// Samples of the batches announced just now.
    pub sample_count: u64,
    /// Accesses of the batches announced just now, duplicates counted.
    pub access_count: u64,
    /// Visits these accesses; runs only when a store asks for them.
    pub visit_accesses: &'a VisitAccesses<'a>,
}

/// A row and how often the announced batches use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowUses {
    /// The row.
    pub key: RowKey,
    /// Accesses, at least 1.
    pub access_count: u32,
}

impl Ahead<'_> {
    /// Returns the unique rows of the batches announced just now, ascending, with their counts.
    ///
    /// Takes `access_count` keys of memory for a moment, which the caller reserves, and sorts them.
    #[must_use]
    pub fn unique_rows(&self) -> Vec<RowUses> {
        // One number per access sorts in half the time of a pair; schemas keep rows below 2^40.
        const ROW_BITS: u32 = ROW_COUNT_MAX.ilog2();
        let mut keys = Vec::with_capacity(usize::try_from(self.access_count).unwrap_or(0));
        (self.visit_accesses)(&mut |key| {
            keys.push(u64::from(key.table.0) << ROW_BITS | key.row.0);
        });
        keys.sort_unstable();
        let uses = |same: &[u64]| {
            let access_count = u32::try_from(same.len()).unwrap_or(u32::MAX);
            let number = *same.first()?;
            let (table, row) = (TableId((number >> ROW_BITS) as u32), number % ROW_COUNT_MAX);
            Some(RowUses { key: RowKey::new(table, RowId(row)), access_count })
        };
        keys.chunk_by(|a, b| a == b).filter_map(uses).collect()
    }
}

impl fmt::Debug for Ahead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ahead")
            .field("batches_buffered", &self.batches_buffered)
            .field("accesses_buffered", &self.accesses_buffered)
            .field("sample_count", &self.sample_count)
            .field("access_count", &self.access_count)
            .finish_non_exhaustive()
    }
}

/// A named blob that is committed together with the rows.
#[derive(Debug, Clone, Copy)]
pub struct Attachment<'a> {
    /// Name, unique in a commit: letters, digits, `_`, `-`, `.`.
    pub name: &'a str,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// What is known about a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommitInfo {
    /// Its number, from 1, growing.
    pub number: u64,
    /// Its name, as given.
    pub name: String,
}

/// Checks that `keys` are strictly increasing and inside `schema`: the waist's precondition.
///
/// # Errors
/// `Invalid`, naming the first offending position.
pub fn check_keys(schema: &Schema, keys: impl Iterator<Item = RowKey>) -> Result<()> {
    let mut previous: Option<RowKey> = None;
    for (at, key) in keys.enumerate() {
        if previous.is_some_and(|previous| previous >= key) {
            return Err(Error::invalid("row keys must be strictly increasing").with("position", at));
        }
        let table = schema.table(key.table)?;
        if key.row.0 >= table.row_count {
            return Err(out_of_range(table, key.row.0));
        }
        previous = Some(key);
    }
    Ok(())
}

/// Builds the error for a row id outside its table.
#[must_use]
pub fn out_of_range(table: &TableSchema, row: impl std::fmt::Display) -> Error {
    Error::invalid("row id out of range")
        .with("table", &table.name)
        .with("row", row)
        .with("num_embeddings", table.row_count)
        .with("remedy", "check the ids, or make num_embeddings larger")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_rows_are_sorted_and_counted() {
        let accesses = [(1, 5), (0, 9), (1, 5), (0, 2), (1, 5)];
        let visit = |visit: &mut dyn FnMut(RowKey)| {
            accesses
                .iter()
                .for_each(|&(table, row)| visit(RowKey::new(TableId(table), RowId(row))));
        };
        let ahead = Ahead {
            batches_buffered: 1,
            accesses_buffered: 5,
            sample_count: 5,
            access_count: 5,
            visit_accesses: &visit,
        };
        let uses = |row: &RowUses| (row.key.table.0, row.key.row.0, row.access_count);
        let found: Vec<_> = ahead.unique_rows().iter().map(uses).collect();
        assert_eq!(found, [(0, 2, 1), (0, 9, 1), (1, 5, 3)]);
    }
}
