//! What is in a table, in row order? A hash knows no order, but its ranges do.

use tierbed_core::store::ScanSink;
use tierbed_core::{Result, RowId, RowKey, TableId};

use super::bucket::{Bucket, BucketId};
use super::index::{Place, RANGE_BYTES};
use super::store::HashDb;
use super::traffic::{read_buckets, Wanted};

/// Bytes that a scan takes beside `cache_bytes` of caches: one range, twice, and the keys of
/// changed rows, each of which takes far more than eight times as much in the cache.
pub(super) fn scan_bytes(cache_bytes: u64) -> u64 {
    2 * RANGE_BYTES as u64 + cache_bytes / 8
}

impl HashDb {
    // One range of buckets at a time, changed rows of the cache over it.
    pub(super) fn scan_table(&mut self, table: TableId, sink: &mut ScanSink<'_>) -> Result<()> {
        let store = self.log.store();
        let index = self.table(table.0)?;
        let (per_range, rows_per_range) = (index.buckets_per_range, index.rows_per_range);
        let record_bytes = index.record_bytes;
        let row_count = self.schema.table(table)?.row_count;
        let mut dirty: Vec<RowKey> = self.cache.dirty_rows();
        dirty.retain(|key| key.table == table);
        dirty.sort_unstable();
        assert!(record_bytes <= RANGE_BYTES, "a record is longer than a range of buckets");
        let mut dirty = dirty.into_iter().peekable();
        for range in 0..row_count.div_ceil(rows_per_range) {
            let first = range * per_range;
            let index = self.table(table.0)?;
            let buckets = (first..first + per_range).filter_map(|bucket| {
                let place = index.place(bucket);
                let id = BucketId { table: table.0, bucket, store };
                (place != Place::NONE).then_some(Wanted { id, place, tag: 0 })
            });
            let mut wanted: Vec<_> = buckets.collect();
            wanted.sort_unstable_by_key(|bucket| bucket.place);
            let mut rows: Vec<(u64, Option<usize>)> = Vec::new();
            let mut records: Vec<u8> = Vec::new();
            let Self { engine, files, cache, .. } = &mut *self;
            let pages = read_buckets(&wanted, files, engine.as_mut(), &mut |asked, bytes| {
                for (row, record) in Bucket::check(bytes, asked.id, record_bytes)?.iter() {
                    rows.push((row, Some(records.len())));
                    records.extend_from_slice(record);
                }
                Ok(())
            })?;
            while let Some(key) = dirty.next_if(|key| key.row.0 / rows_per_range == range) {
                rows.push((key.row.0, None));
            }
            // Of equal rows the changed one (None) comes first and stays.
            rows.sort_unstable();
            rows.dedup_by_key(|row| row.0);
            for (row, at) in rows {
                let key = RowKey::new(table, RowId(row));
                let stored = at.and_then(|at| records.get(at..at + record_bytes));
                if let Some(record) = stored.or_else(|| cache.peek(key)) {
                    sink(key.row, record)?;
                }
            }
            self.stats.pages_read += pages;
        }
        Ok(())
    }
}
