//! Tiny cold stores that flush, merge and compact all the time.

use std::sync::Arc;

use tierbed_cold::{ColdOptions, ColdStore, MemoryOptions};
use tierbed_core::env::ManualClock;
use tierbed_core::store::RowWrite;
use tierbed_core::{
    Budget, InitSpec, OptimizerKind, Result, RowId, RowKey, RowStore, TableId, TableSchema,
    TrainStore,
};
use tierbed_io::{EngineChoice, EngineOptions};

/// Options of a store whose write buffer takes `write_buffer_bytes`.
pub fn tiny(write_buffer_bytes: usize) -> ColdOptions {
    let engine =
        EngineOptions { choice: EngineChoice::Inline, queue_depth: 4, buf_bytes: 2 * 4096 };
    ColdOptions {
        clock: Arc::new(ManualClock::default()),
        disk_quota_bytes: None,
        delta_share: 0.15,
        memory: MemoryOptions {
            write_buffer_bytes,
            delta_index_bytes: 2048,
            extent_bytes: 3 * 4096,
            read_rows_max: 50,
        },
        ..ColdOptions::new(Budget::new(8 << 20), engine)
    }
}

pub fn table(name: &str, dim: u32, row_count: u64) -> TableSchema {
    TableSchema {
        name: name.into(),
        row_count,
        dim,
        optimizer: OptimizerKind::Sgd,
        state_init: 0.0,
        init: InitSpec::Constant { value: 0.0 },
        seed: 0,
    }
}

/// Reads rows and returns the first word of each record, which tests use as a version number.
pub fn versions(store: &mut ColdStore, rows: &[RowKey]) -> Result<Vec<Option<u32>>> {
    let mut found = vec![None; rows.len()];
    store.read(rows, &mut |at, record| {
        found[at] = record.map(|record| u32::from_le_bytes(record[..4].try_into().unwrap()));
        Ok(())
    })?;
    Ok(found)
}

/// Writes `version` as the first word of each row; `rows` ascending.
pub fn write_version(store: &mut ColdStore, rows: &[RowKey], version: u32) -> Result<()> {
    let mut records = Vec::new();
    for row in rows {
        let mut record = vec![0; store.schema().table(row.table)?.record_bytes()];
        record[..4].copy_from_slice(&version.to_le_bytes());
        records.push(record);
    }
    let writes: Vec<_> =
        rows.iter().zip(&records).map(|(key, record)| RowWrite { key: *key, record }).collect();
    store.write(&writes)
}

pub fn row(table: u32, row: u64) -> RowKey {
    RowKey::new(TableId(table), RowId(row))
}
