//! Which rows wait in memory? The second level: recently used rows, and often used ones.
//!
//! AIBox gives its buckets an LRU cache that spills into an LFU cache. Here both are one map: the
//! half that was used last is the LRU part and stays; of the rest the least often used leave.
//! When the cache is full, every changed row is written (RecDB §5.3.1) and a quarter leaves.

use std::collections::HashMap;

use tierbed_core::RowKey;

struct Entry {
    record: Box<[u8]>,
    used_at: u64,
    use_count: u32,
    is_dirty: bool,
}

/// Rows in memory, by key, within a number of bytes.
pub(crate) struct RowCache {
    rows: HashMap<RowKey, Entry>,
    used_bytes: u64,
    limit_bytes: u64,
    now: u64,
}

/// Bytes a row of `record_bytes` takes: record, allocator, and a map that may be half full.
pub(crate) fn row_bytes(record_bytes: usize) -> u64 {
    let entry = size_of::<RowKey>() + size_of::<Entry>() + 1;
    (record_bytes.next_multiple_of(16) + 16 + 2 * entry) as u64
}

impl RowCache {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        Self { rows: HashMap::new(), used_bytes: 0, limit_bytes, now: 0 }
    }

    /// Returns whether a record of `record_bytes` still fits.
    pub(crate) fn has_room(&self, record_bytes: usize) -> bool {
        self.used_bytes + row_bytes(record_bytes) <= self.limit_bytes
    }

    /// Starts the next moment: uses of one call are equally recent.
    pub(crate) fn tick(&mut self) {
        self.now += 1;
    }

    pub(crate) fn get(&mut self, key: RowKey) -> Option<&[u8]> {
        let entry = self.rows.get_mut(&key)?;
        entry.used_at = self.now;
        entry.use_count = entry.use_count.saturating_add(1);
        Some(&entry.record)
    }

    /// Returns a row's record without counting a use.
    pub(crate) fn peek(&self, key: RowKey) -> Option<&[u8]> {
        self.rows.get(&key).map(|entry| &*entry.record)
    }

    /// Puts a row in or overwrites it; `is_dirty`: the disk has it not.
    pub(crate) fn put(&mut self, key: RowKey, record: &[u8], is_dirty: bool) {
        if let Some(entry) = self.rows.get_mut(&key) {
            entry.record.copy_from_slice(record);
            entry.used_at = self.now;
            entry.use_count = entry.use_count.saturating_add(1);
            entry.is_dirty |= is_dirty;
            return;
        }
        self.used_bytes += row_bytes(record.len());
        let entry = Entry { record: record.into(), used_at: self.now, use_count: 1, is_dirty };
        self.rows.insert(key, entry);
    }

    pub(crate) fn holds(&self, key: RowKey) -> bool {
        self.rows.contains_key(&key)
    }

    /// Returns the changed rows, in any order.
    pub(crate) fn dirty_rows(&self) -> Vec<RowKey> {
        self.rows.iter().filter(|(_, entry)| entry.is_dirty).map(|(key, _)| *key).collect()
    }

    /// Notes that rows are on disk as they are here.
    pub(crate) fn set_clean(&mut self, keys: &[RowKey]) {
        for key in keys {
            if let Some(entry) = self.rows.get_mut(key) {
                entry.is_dirty = false;
            }
        }
    }

    /// Drops about a quarter of the rows: never changed ones, and none of the half used last.
    /// Returns whether any went.
    pub(crate) fn evict_quarter(&mut self) -> bool {
        let mut clean: Vec<(u64, u32, RowKey)> = self
            .rows
            .iter()
            .filter(|(_, entry)| !entry.is_dirty)
            .map(|(key, entry)| (entry.used_at, entry.use_count, *key))
            .collect();
        let leaving = (self.rows.len() / 4).max(1).min(clean.len());
        clean.sort_unstable();
        let older = (clean.len() / 2).max(leaving);
        clean.truncate(older);
        clean.sort_unstable_by_key(|(used_at, use_count, key)| (*use_count, *used_at, *key));
        for (_, _, key) in clean.into_iter().take(leaving) {
            if let Some(entry) = self.rows.remove(&key) {
                self.used_bytes -= row_bytes(entry.record.len());
            }
        }
        leaving > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, TableId};

    fn key(row: u64) -> RowKey {
        RowKey::new(TableId(0), RowId(row))
    }

    #[test]
    fn recent_and_frequent_rows_stay_and_changed_ones_always() {
        let mut cache = RowCache::new(u64::MAX);
        for row in 0..100 {
            cache.tick();
            cache.put(key(row), &[0; 8], row == 1);
        }
        for _ in 0..3 {
            cache.get(key(0));
        }
        // Rows 0..50 are the older half; 0 is used often, 1 is changed.
        for row in 50..100 {
            cache.tick();
            cache.get(key(row));
        }
        assert!(cache.evict_quarter());
        assert_eq!(cache.rows.len(), 75);
        assert!(cache.holds(key(0)) && cache.holds(key(1)));
        assert!((50..100).all(|row| cache.holds(key(row))));
        assert_eq!(cache.used_bytes, 75 * row_bytes(8));
    }

    #[test]
    fn a_full_cache_says_so() {
        let mut cache = RowCache::new(2 * row_bytes(8));
        cache.put(key(0), &[0; 8], false);
        assert!(cache.has_room(8));
        cache.put(key(1), &[0; 8], false);
        assert!(!cache.has_room(8));
    }
}
