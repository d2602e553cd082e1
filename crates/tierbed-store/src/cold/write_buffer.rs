//! The write buffer: rows collected until a run is worth writing.
//!
//! An arena of records, an entry per row, a hash index over both; a row written twice is
//! overwritten in place. All three are allocated once, within the capacity reserved for them.

#![expect(
    clippy::indexing_slicing,
    reason = "the index holds positions of entries, entries hold places in the arena"
)]

use hashbrown::HashTable;
use tierbed_core::env::mix64;
use tierbed_core::RowKey;

/// Bytes per entry: the entry, its place in the index (5 bytes in a table at least 7/16 full),
/// its copy in the sorted order of a flush.
const ENTRY_BYTES: usize = 2 * size_of::<Entry>() + 12;
/// One entry per so many bytes of capacity: records of about 150 bytes fill both parts.
const BYTES_PER_ENTRY: usize = 208;
const ENTRIES_MIN: usize = 16;

#[derive(Debug, Clone, Copy)]
struct Entry {
    key: RowKey,
    at: usize,
}

/// Rows that wait for the next run.
#[derive(Debug)]
pub(crate) struct WriteBuffer {
    arena: Vec<u8>,
    arena_bytes_max: usize,
    entries: Vec<Entry>,
    entries_max: usize,
    index: HashTable<u32>,
}

fn hash(key: RowKey) -> u64 {
    mix64(u64::from(key.table.0) << 40 ^ key.row.0)
}

impl WriteBuffer {
    /// Builds an empty buffer that takes `capacity_bytes` of memory when full.
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        let entries_max = Self::rows_max(capacity_bytes);
        let arena_bytes_max = capacity_bytes.saturating_sub(ENTRY_BYTES * entries_max);
        Self {
            arena: Vec::new(),
            arena_bytes_max,
            entries: Vec::new(),
            entries_max,
            index: HashTable::new(),
        }
    }

    /// Returns the capacity a buffer needs to hold at least one record of `record_bytes`.
    pub(crate) fn capacity_for(record_bytes: usize) -> usize {
        // Entries take at most a quarter of a large capacity, or their minimum.
        2 * record_bytes + 2 * ENTRY_BYTES * ENTRIES_MIN
    }

    /// Returns whether a record of `record_bytes` would fit if its row is new.
    pub(crate) fn fits(&self, record_bytes: usize) -> bool {
        self.entries.len() < self.entries_max
            && self.arena.len() + record_bytes <= self.arena_bytes_max
    }

    /// Returns how many new records of `record_bytes` fit.
    pub(crate) fn room(&self, record_bytes: usize) -> usize {
        assert!(record_bytes > 0, "a record has bytes");
        let by_bytes = (self.arena_bytes_max - self.arena.len()) / record_bytes;
        by_bytes.min(self.entries_max - self.entries.len())
    }

    /// Returns how many rows a buffer of `capacity_bytes` holds at most.
    pub(crate) fn rows_max(capacity_bytes: usize) -> usize {
        (capacity_bytes / BYTES_PER_ENTRY).max(ENTRIES_MIN)
    }

    fn find(&self, key: RowKey) -> Option<&Entry> {
        let is_it = |at: &u32| self.entries[*at as usize].key == key;
        let at = self.index.find(hash(key), is_it)?;
        Some(&self.entries[*at as usize])
    }

    /// Returns the record of `key`, `record_bytes` long, if it waits here.
    pub(crate) fn get(&self, key: RowKey, record_bytes: usize) -> Option<&[u8]> {
        if self.entries.is_empty() {
            return None;
        }
        let at = self.find(key)?.at;
        Some(&self.arena[at..at + record_bytes])
    }

    /// Overwrites the record of `key` if it waits here; returns whether it does.
    pub(crate) fn replace(&mut self, key: RowKey, record: &[u8]) -> bool {
        let Some(at) = self.find(key).map(|entry| entry.at) else { return false };
        assert!(at + record.len() <= self.arena.len(), "a row keeps its length");
        self.arena[at..at + record.len()].copy_from_slice(record);
        true
    }

    /// Adds a row that is not here and fits.
    pub(crate) fn push(&mut self, key: RowKey, record: &[u8]) {
        assert!(self.fits(record.len()), "the caller flushed until the record fits");
        debug_assert!(self.find(key).is_none(), "{key:?} waits here already");
        if self.entries.capacity() == 0 {
            self.entries.reserve_exact(self.entries_max);
            self.arena.reserve_exact(self.arena_bytes_max);
            self.index = HashTable::with_capacity(self.entries_max);
        }
        let entries = &self.entries;
        let hash_of = |at: &u32| hash(entries[*at as usize].key);
        self.index.insert_unique(hash(key), entries.len() as u32, hash_of);
        self.entries.push(Entry { key, at: self.arena.len() });
        self.arena.extend_from_slice(record);
    }

    /// Lists the rows in key order, with the places of their records.
    pub(crate) fn sorted(&self) -> Vec<(RowKey, usize)> {
        let mut rows: Vec<_> = self.entries.iter().map(|entry| (entry.key, entry.at)).collect();
        rows.sort_unstable();
        rows
    }

    /// Returns the record at `at`, a place that [`sorted`](Self::sorted) gave.
    pub(crate) fn record(&self, at: usize, record_bytes: usize) -> &[u8] {
        &self.arena[at..at + record_bytes]
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.arena.clear();
        self.entries.clear();
        self.index.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, TableId};

    fn key(row: u64) -> RowKey {
        RowKey::new(TableId(1), RowId(row))
    }

    #[test]
    fn overwrites_in_place_and_lists_in_order() {
        let mut buffer = WriteBuffer::new(10_000);
        buffer.push(key(9), b"old!");
        buffer.push(key(2), b"two.");
        assert!(buffer.replace(key(9), b"new!") && !buffer.replace(key(3), b"none"));
        let found: Vec<_> =
            buffer.sorted().iter().map(|&(key, at)| (key.row.0, buffer.record(at, 4))).collect();
        assert_eq!(found, [(2, &b"two."[..]), (9, &b"new!"[..])]);
        assert_eq!(buffer.get(key(9), 4), Some(&b"new!"[..]));
        buffer.clear();
        assert_eq!(buffer.get(key(9), 4), None);
    }

    #[test]
    fn holds_what_its_capacity_promises() {
        for record_bytes in [4usize, 148, 5000] {
            let mut buffer = WriteBuffer::new(WriteBuffer::capacity_for(record_bytes));
            assert!(buffer.fits(record_bytes));
            let record = vec![1; record_bytes];
            let mut row = 0;
            while buffer.fits(record_bytes) {
                buffer.push(key(row), &record);
                row += 1;
            }
            let held = buffer.arena.capacity()
                + buffer.entries.capacity() * size_of::<Entry>()
                + buffer.index.allocation_size();
            let promised = WriteBuffer::capacity_for(record_bytes);
            assert!(held <= promised, "{held} <= {promised}");
        }
    }
}
