//! Entries of the fuzz targets, compiled into the crate: any bytes given to its decoders.
//!
//! Each takes arbitrary bytes and decodes them as opening a store would, behind the checksums.
//! Damage is an error, which is fine; anything else that goes wrong is a bug. The pages of bases
//! and runs have the header of `tierbed-store`, whose targets cover it.

use std::sync::Arc;

use tierbed_core::{Budget, Error, Result, TableSchema, TrainStore};
use tierbed_io::{EngineChoice, EngineOptions, MemoryFolder};

use crate::cold::geometry::Geometry;
use crate::cold::run::{decode_keys, encode_keys};
use crate::cold::table::{ColdTable, TableParts};
use crate::cold::table_file;
use crate::cold::{ColdOptions, ColdStore};

/// Rows of the table, of dim 8; the seeds are written for it.
const ROW_COUNT: u64 = 1000;

fn schema() -> TableSchema {
    TableSchema::plain("t", ROW_COUNT, 8)
}

/// Keys of a run: how many, then the keys.
pub fn keys(bytes: &[u8]) {
    let Some((count, bytes)) = bytes.split_first() else { return };
    let count = u32::from(*count);
    let Ok(rows) = decode_keys(bytes, count, ROW_COUNT) else { return };
    assert_eq!(rows.len(), count as usize);
    assert!(rows.is_sorted_by(|a, b| a < b) && rows.iter().all(|row| *row < ROW_COUNT));
    let again = encode_keys(rows.iter().copied());
    assert!(decode_keys(&again, count, ROW_COUNT).is_ok_and(|again| again == rows));
}

/// A table without rows, in an empty store.
fn empty_table(geometry: Geometry) -> Result<ColdTable> {
    let engine = EngineOptions { choice: EngineChoice::Inline, queue_depth: 2, buf_bytes: 4096 };
    let budget = Budget::new(64 << 20);
    let options = ColdOptions::new(budget.clone(), engine);
    let mut store = ColdStore::open(Arc::new(MemoryFolder::default()), options)?;
    store.add_table(schema())?;
    let made = store.tables.pop().ok_or_else(|| Error::invalid("no table"))?;
    let ColdTable { id, owner, file, device, pages, .. } = made;
    let memory = budget.reserve("tables", ColdTable::memory_bytes(&geometry))?;
    let parts = TableParts { id, owner, file, geometry, device, pages, memory };
    Ok(ColdTable::new(&schema(), parts))
}

/// The table file of a commit: two bytes of length, the file behind its magic and version, then
/// the keys of its runs.
pub fn table(bytes: &[u8]) {
    let Some((len, rest)) = bytes.split_first_chunk::<2>() else { return };
    let (file, mut keys) = rest.split_at(rest.len().min(u16::from_le_bytes(*len).into()));
    let file = [table_file::head().as_slice(), file].concat();
    let Ok(stored) = table_file::decode(&file, &schema()) else { return };
    let Ok(mut table) = empty_table(stored.geometry) else { return };
    let mut runs = table.restore(stored);
    runs.sort_unstable_by_key(|run| run.version);
    for run in runs {
        let (now, later) = keys.split_at(keys.len().min(run.key_bytes as usize));
        keys = later;
        let Ok(rows) = decode_keys(now, run.row_count, ROW_COUNT) else { return };
        table.index_run(run, rows.into_iter());
    }
    table.finish_restoring();
    assert!(table.index.row_count() <= ROW_COUNT, "every row has one newest place");
    let again = table_file::decode(&table_file::encode(&table), &schema());
    assert!(again.is_ok(), "what was opened can be committed");
}

#[cfg(test)]
mod tests {
    use tierbed_sim::fuzz::replay_seeds;

    #[test]
    fn seeds_of_every_target_pass() {
        replay_seeds("cold_table", super::table);
        replay_seeds("cold_keys", super::keys);
    }
}
