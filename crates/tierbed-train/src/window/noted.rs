//! Rows that were noted, read for a delta: all of them, whatever they were in its base.
//!
//! Rows are read in row order, many at a time, so that a store has many pages in flight.

#![expect(clippy::indexing_slicing, reason = "a store answers the keys asked for")]

use tierbed_core::{Result, RowKey, RowStore};
use tierbed_kernels::init_record;

use crate::window::comparer::{ChangeSink, ComparedTable, StoredRow};

/// Rows read at once: their keys take 128 KiB.
pub(crate) const NOTED_ROWS: usize = 8192;

/// Reads `keys` of `table`, which increase, and hands the rows to `sink` in any order. A row that
/// the store has not is one with its initial weights: that is what it goes back to.
///
/// # Errors
/// The store's and those of `sink`.
pub(crate) fn read_noted(
    store: &mut dyn RowStore,
    table: ComparedTable<'_>,
    keys: &[RowKey],
    sink: &mut ChangeSink<'_>,
) -> Result<()> {
    let mut initial = Vec::new();
    store.read(keys, &mut |at, record| {
        let row = keys[at].row;
        if let Some(record) = record {
            let StoredRow { count, weights, .. } = StoredRow::of(table, row, record)?;
            return sink(count, row, weights);
        }
        initial.resize(table.schema.record_words(), 0.0f32);
        init_record(table.schema, row.0, &mut initial);
        sink(0, row, bytemuck::cast_slice(&initial[..table.schema.dim as usize]))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use std::collections::BTreeMap;

    use roaring::RoaringTreemap;
    use tierbed_core::{Budget, RowId, RowWrite, TableId, TableSchema, TrainStore};
    use tierbed_store::MemoryStore;

    use super::*;

    #[test]
    fn every_noted_row_comes_once_and_absent_ones_as_they_began() {
        let row_count = 3_000;
        let schema = TableSchema::plain("t", row_count, 4);
        let mut store = MemoryStore::new(Budget::new(64 << 20));
        let id = store.add_table(schema.clone()).unwrap();
        let mut record = vec![0.0f32; schema.record_words()];
        for row in (0..row_count).step_by(3) {
            record.fill(row as f32);
            let record = bytemuck::cast_slice(&record);
            store.write(&[RowWrite { key: RowKey::new(id, RowId(row)), record }]).unwrap();
        }
        let noted: RoaringTreemap = (0..row_count).filter(|row| row % 5 != 4).collect();
        let mut found = BTreeMap::new();
        let table = ComparedTable { id: TableId(0), schema: &schema };
        let sink = &mut |_, row: RowId, weights: &[u8]| {
            let twice = found.insert(row.0, bytemuck::pod_collect_to_vec::<u8, f32>(weights));
            assert!(twice.is_none(), "{row:?} comes twice");
            Ok(())
        };
        let keys: Vec<RowKey> = noted.iter().map(|row| RowKey::new(id, RowId(row))).collect();
        read_noted(&mut store, table, &keys, sink).unwrap();
        assert!(found.keys().copied().eq(&noted));
        for (row, weights) in found {
            init_record(&schema, row, &mut record);
            let wanted = if row % 3 == 0 { vec![row as f32; 4] } else { record[..4].to_vec() };
            assert_eq!(weights, wanted, "row {row}");
        }
    }
}
