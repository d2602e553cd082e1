//! Which version does a row have? Rows of tests carry a number in their first word, so that a
//! stale or lost write shows.

use tierbed_core::store::{RowSink, RowWrite};
use tierbed_core::{Error, Result, RowId, RowKey, RowStore, TableId, TableSchema, TrainStore};

/// Bytes of a record behind its version.
const FILL: u8 = 7;

/// The version of each row asked for; `None` where nothing was ever written.
pub type Versions = Vec<Option<u32>>;

/// Names row `row` of table `table`.
#[must_use]
pub fn row(table: u32, row: u64) -> RowKey {
    RowKey::new(TableId(table), RowId(row))
}

/// Describes a table of plain rows: no optimizer state, zero where nothing was written.
#[must_use]
pub fn table(name: &str, dim: u32, row_count: u64) -> TableSchema {
    TableSchema::plain(name, row_count, dim)
}

/// Returns the version in `record`.
///
/// # Errors
/// `Corruption` when the record has no room for one.
pub fn version_of(record: &[u8]) -> Result<u32> {
    let word = record.first_chunk().ok_or_else(|| Error::corruption("record without version"))?;
    Ok(u32::from_le_bytes(*word))
}

/// Reads the versions of `rows`, ascending; `None` for absent rows.
///
/// # Errors
/// Those of the store's read.
pub fn versions<S: RowStore + ?Sized>(store: &mut S, rows: &[RowKey]) -> Result<Versions> {
    versions_by(rows, |sink| store.read(rows, sink))
}

/// Collects the versions that `read` hands to its sink, by position in `rows`.
///
/// # Errors
/// Those of `read`.
pub fn versions_by(
    rows: &[RowKey],
    read: impl FnOnce(&mut RowSink<'_>) -> Result<()>,
) -> Result<Versions> {
    let mut found = vec![None; rows.len()];
    read(&mut |at, record| {
        if let Some(place) = found.get_mut(at) {
            *place = record.map(version_of).transpose()?;
        }
        Ok(())
    })?;
    Ok(found)
}

/// Writes `version` to each of `rows`, ascending.
///
/// # Errors
/// Those of the store's write.
pub fn write_version<S: TrainStore + ?Sized>(
    store: &mut S,
    rows: &[RowKey],
    version: u32,
) -> Result<()> {
    let mut records = Vec::with_capacity(rows.len());
    for row in rows {
        let mut record = version.to_le_bytes().to_vec();
        record.resize(store.schema().table(row.table)?.record_bytes(), FILL);
        records.push(record);
    }
    let pairs = rows.iter().zip(&records);
    let writes: Vec<_> = pairs.map(|(key, record)| RowWrite { key: *key, record }).collect();
    store.write(&writes)
}
