//! The memtable: rows written since the last flush.
//!
//! An arena of records beside an ordered index. A row written twice is overwritten in place, so
//! a memtable holds one version per key. Both parts count against the capacity, which the store
//! has reserved as `write buffers` before the first row.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use crate::key::Key;
use crate::wal::SegmentId;

/// Bytes one index entry may cost: key and place in a B-tree whose leaves are half full.
const ENTRY_BYTES: usize = 40;

#[derive(Debug, Clone, Copy)]
struct Place {
    at: usize,
    len_bytes: u32,
}

impl Place {
    fn range(self) -> Range<usize> {
        self.at..self.at + self.len_bytes as usize
    }
}

/// Rows in memory, newest versions of all.
#[derive(Debug)]
pub(crate) struct Memtable {
    arena: Vec<u8>,
    index: BTreeMap<Key, Place>,
    capacity_bytes: usize,
    /// Log segments that hold the same rows, oldest first.
    pub(crate) segments: Vec<SegmentId>,
}

impl Memtable {
    /// Builds an empty memtable that holds at most `capacity_bytes`, index included.
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        let index = BTreeMap::new();
        Self { arena: Vec::new(), index, capacity_bytes, segments: Vec::new() }
    }

    /// Returns whether `row_count` more rows of `record_bytes` in all would fit.
    pub(crate) fn fits(&self, row_count: usize, record_bytes: usize) -> bool {
        let held = self.arena.len() + ENTRY_BYTES * self.index.len();
        held + record_bytes + ENTRY_BYTES * row_count <= self.capacity_bytes
    }

    /// Remembers `record` as the newest version of `key`.
    ///
    /// # Panics
    /// When it does not fit: the reservation does not cover it.
    #[expect(clippy::indexing_slicing, reason = "the index holds places of the arena")]
    pub(crate) fn insert(&mut self, key: Key, record: &[u8]) {
        if let Some(place) = self.index.get(&key) {
            let old = &mut self.arena[place.range()];
            if old.len() == record.len() {
                old.copy_from_slice(record);
                return;
            }
        }
        assert!(self.fits(1, record.len()), "a memtable of {} bytes is full", self.capacity_bytes);
        if self.arena.capacity() == 0 {
            // Allocated once and whole: the reservation covers it, growing would copy.
            self.arena.reserve_exact(self.capacity_bytes);
        }
        let place = Place { at: self.arena.len(), len_bytes: record.len() as u32 };
        self.arena.extend_from_slice(record);
        self.index.insert(key, place);
    }

    /// Returns the newest version of `key`, if it is here.
    pub(crate) fn get(&self, key: Key) -> Option<&[u8]> {
        Some(self.record(*self.index.get(&key)?))
    }

    #[expect(clippy::indexing_slicing, reason = "the index holds places of the arena")]
    fn record(&self, place: Place) -> &[u8] {
        &self.arena[place.range()]
    }

    /// Returns the rows of a range, in key order.
    pub(crate) fn range(
        &self,
        range: RangeInclusive<Key>,
    ) -> impl Iterator<Item = (Key, &[u8])> + '_ {
        self.index.range(range).map(|(key, place)| (*key, self.record(*place)))
    }

    /// Returns the number of rows.
    pub(crate) fn row_count(&self) -> usize {
        self.index.len()
    }

    /// Returns the bytes of the records.
    pub(crate) fn record_bytes(&self) -> usize {
        self.arena.len()
    }

    /// Returns whether nothing was written.
    pub(crate) fn is_empty(&self) -> bool {
        self.index.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, RowKey, TableId};

    fn key(row: u64) -> Key {
        Key::cold(RowKey::new(TableId(0), RowId(row)))
    }

    #[test]
    fn overwrites_in_place_and_lists_in_order() {
        let mut memtable = Memtable::new(1000);
        memtable.insert(key(9), b"old!");
        memtable.insert(key(2), b"two.");
        memtable.insert(key(9), b"new!");
        assert_eq!(memtable.get(key(9)), Some(&b"new!"[..]));
        assert_eq!(memtable.get(key(3)), None);
        let rows: Vec<_> = memtable.range(Key::MIN..=Key::MAX).collect();
        assert_eq!(rows, [(key(2), &b"two."[..]), (key(9), &b"new!"[..])]);
        assert_eq!(memtable.arena.len(), 8);
    }

    #[test]
    fn says_when_it_is_full_counting_its_index() {
        let mut memtable = Memtable::new(3 * (ENTRY_BYTES + 4));
        for row in 0..3 {
            assert!(memtable.fits(1, 4), "row {row}");
            memtable.insert(key(row), b"full");
        }
        assert!(!memtable.fits(1, 4));
    }
}
