//! The key prefix under which a row's newest version lives.
//!
//! A row moves when it is *written*: a row that has become hot is written with the hot prefix,
//! one that has cooled down without it. From that write on the allocator's *hot keys* say where the
//! newest version is; a version under the other prefix is superseded, whatever its place in the
//! tree: reads never look for it and compactions drop it. So no read is stale and no old version
//! stays for ever.
//!
//! Source: RecDB §4.2 (Key Allocator). Differs: the published system keeps two sets without
//! saying what becomes of the old version; here hot keys are exact, survive a restart with the
//! commit, and superseded versions are removed.

use std::collections::BTreeSet;

use tierbed_core::{Budget, Reservation, Result, RowKey};

use crate::key::Key;

/// Bytes one row costs: 32 in an ordered set, half full, and 8 in each list of hot keys that a
/// flush and a merge under way hold.
const ENTRY_BYTES: u64 = 32 + 2 * 8;

/// Keys of a row before and after a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WriteKeys {
    /// Where the new version lives.
    pub(crate) key: Key,
    /// Where the old one lives, if it was written before.
    pub(crate) old: Key,
}

/// Rows that should be hot, and rows whose newest version is under the hot prefix already.
#[derive(Debug)]
pub(crate) struct KeyAllocator {
    hot: BTreeSet<RowKey>,
    hot_keys: BTreeSet<Key>,
    memory: Reservation,
}

impl KeyAllocator {
    /// Builds an allocator whose rows in `hot_keys` live under the hot prefix.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold them.
    pub(crate) fn new(hot_keys: Vec<Key>, budget: &Budget) -> Result<Self> {
        let memory = budget.reserve("hot rows", 0)?;
        // Until the next window is known, rows stay where they are.
        let hot = hot_keys.iter().map(|key| key.row()).collect();
        let mut allocator = Self { hot, hot_keys: hot_keys.into_iter().collect(), memory };
        allocator.reserve(0)?;
        Ok(allocator)
    }

    fn reserve(&mut self, more: usize) -> Result<()> {
        let count = self.hot.len() + self.hot_keys.len() + more;
        self.memory.resize(ENTRY_BYTES * count as u64)
    }

    /// Returns the rows that should be hot.
    pub(crate) fn hot(&self) -> &BTreeSet<RowKey> {
        &self.hot
    }

    /// Replaces the rows that should be hot.
    ///
    /// # Errors
    /// `Invalid` when the budget does not hold them and leave room for others; the old ones stay.
    pub(crate) fn set_hot(&mut self, hot: BTreeSet<RowKey>) -> Result<()> {
        let count = 2 * hot.len() + self.hot_keys.len();
        self.memory.resize_optional(ENTRY_BYTES * count as u64)?;
        self.hot = hot;
        Ok(())
    }

    /// Returns where the newest version of `row` lives.
    pub(crate) fn newest_key(&self, row: RowKey) -> Key {
        let hot = Key::hot(row);
        if self.hot_keys.contains(&hot) {
            hot
        } else {
            Key::cold(row)
        }
    }

    /// Returns where the next version of `row` goes, and where the one before lives.
    pub(crate) fn write_keys(&self, row: RowKey) -> WriteKeys {
        let key = if self.hot.contains(&row) { Key::hot(row) } else { Key::cold(row) };
        WriteKeys { key, old: self.newest_key(row) }
    }

    /// Remembers that the newest version of a row was written under `key`.
    pub(crate) fn wrote(&mut self, key: Key) {
        if key.is_hot() {
            self.hot_keys.insert(key);
        } else if !self.hot_keys.is_empty() {
            self.hot_keys.remove(&Key::hot(key.row()));
        }
    }

    /// Returns whether a version under `key` is superseded by one under the other prefix.
    pub(crate) fn is_superseded(&self, key: Key) -> bool {
        key.is_hot() != self.hot_keys.contains(&Key::hot(key.row()))
    }

    /// Returns the rows that live under the hot prefix, ascending.
    pub(crate) fn hot_keys(&self) -> Vec<Key> {
        self.hot_keys.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tierbed_core::{RowId, TableId};

    fn row(row: u64) -> RowKey {
        RowKey::new(TableId(3), RowId(row))
    }

    #[test]
    fn a_row_moves_when_it_is_written_and_its_old_version_is_superseded() {
        let mut allocator = KeyAllocator::new(vec![], &Budget::unlimited()).unwrap();
        let (hot, cold) = (Key::hot(row(5)), Key::cold(row(5)));
        allocator.wrote(cold);
        allocator.set_hot([row(5)].into()).unwrap();
        assert_eq!(allocator.newest_key(row(5)), cold, "not written since it became hot");
        assert_eq!(allocator.write_keys(row(5)), WriteKeys { key: hot, old: cold });
        allocator.wrote(hot);
        assert_eq!(allocator.newest_key(row(5)), hot);
        assert!(allocator.is_superseded(cold) && !allocator.is_superseded(hot));
        allocator.set_hot([].into()).unwrap();
        assert_eq!(allocator.newest_key(row(5)), hot, "cooled down, not written yet");
        assert_eq!(allocator.write_keys(row(5)), WriteKeys { key: cold, old: hot });
        allocator.wrote(cold);
        assert!(allocator.is_superseded(hot) && !allocator.is_superseded(cold));
        assert!(allocator.hot_keys().is_empty());
    }

    #[test]
    fn hot_keys_come_back_after_a_restart_and_stay_until_the_next_window() {
        let keys = vec![Key::hot(row(1)), Key::hot(row(2))];
        let allocator = KeyAllocator::new(keys.clone(), &Budget::unlimited()).unwrap();
        assert_eq!(allocator.newest_key(row(1)), Key::hot(row(1)));
        assert_eq!(allocator.write_keys(row(1)).key, Key::hot(row(1)));
        assert_eq!(allocator.newest_key(row(3)), Key::cold(row(3)));
        assert_eq!(allocator.hot_keys(), keys);
        assert!(KeyAllocator::new(keys, &Budget::new(10)).is_err());
    }
}
