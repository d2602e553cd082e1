//! A small map from keys to keys with eviction.
//!
//! Entries stand in a ring in the order in which they came. In a full ring a new entry takes the
//! place under the hand, but an entry that was found since the hand last passed keeps its place
//! once more: second chance, first in, first out.
//!
//! ```text
//! ring    [key | stand-in] [key | stand-in] [key | stand-in] ...     a bit each: found?
//!                           ^ hand
//! bytes = entries * two key numbers + a bit each + index (+ the first number of each table)
//! ```
//!
//! The memory is taken at once. Stand-ins never change, so an entry may be lost at any time and
//! come again: losing one costs a read.
//!
//! Source: EVStore §6 (key-to-key cache of its third layer); Corbató, "A Paging Experiment with
//! the Multics System" (1968).

use tierbed_core::RowKey;

use crate::index::SlotIndex;
use crate::key_numbers::KeyNumbers;
use crate::tier::hash_of;

/// Most entries: their places are values of an index.
const ENTRIES_MAX: u64 = 1 << 26;

/// A key and what stands for it, as numbers.
#[derive(Debug)]
enum Entries {
    Short(Vec<[u32; 2]>),
    Long(Vec<[u64; 2]>),
}

impl Entries {
    fn len(&self) -> usize {
        match self {
            Self::Short(entries) => entries.len(),
            Self::Long(entries) => entries.len(),
        }
    }

    fn get(&self, at: usize) -> Option<[u64; 2]> {
        match self {
            Self::Short(entries) => entries.get(at).map(|entry| entry.map(u64::from)),
            Self::Long(entries) => entries.get(at).copied(),
        }
    }

    /// Puts an entry at `at`, which is at most one behind the last.
    fn put(&mut self, at: usize, [key, stand_in]: [u64; 2]) {
        match self {
            // Short numbers are below 2^32: `KeyNumbers`.
            Self::Short(entries) => put(entries, at, [key as u32, stand_in as u32]),
            Self::Long(entries) => put(entries, at, [key, stand_in]),
        }
    }
}

fn put<T>(entries: &mut Vec<T>, at: usize, entry: T) {
    match entries.get_mut(at) {
        Some(place) => *place = entry,
        None => entries.push(entry),
    }
}

/// What a key cache did and holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeyCacheStats {
    /// Entries held now.
    pub key_count: u64,
    /// Most entries it can hold.
    pub key_count_max: u64,
    /// Entries that left for others.
    pub evictions: u64,
    /// Bytes of entries, marks and index: all that it takes, whether used or not.
    pub used_bytes: u64,
}

/// A map from keys to keys within a byte budget. Not shared between threads.
#[derive(Debug)]
pub struct KeyCache {
    numbers: KeyNumbers,
    entries: Entries,
    /// A bit per entry: it was found since the hand passed.
    marks: Box<[u64]>,
    index: SlotIndex,
    entries_max: usize,
    hand: usize,
    evictions: u64,
    used_bytes: u64,
}

impl KeyCache {
    /// Builds an empty cache of at most `capacity_bytes` for rows of tables with so many rows each;
    /// of none, for any keys. Too few bytes for an entry: it holds nothing.
    #[must_use]
    pub fn new(capacity_bytes: u64, tables: &[u64]) -> Self {
        let all = tables.iter().fold(0u64, |sum, &row_count| sum.saturating_add(row_count));
        let (mut least, mut most) = (0, capacity_bytes.min(ENTRIES_MAX));
        if !tables.is_empty() {
            most = most.min(all);
        }
        while least < most {
            let middle = (least + most).div_ceil(2);
            if bytes_for(middle, tables) <= capacity_bytes {
                least = middle;
            } else {
                most = middle - 1;
            }
        }
        let entries_max = usize::try_from(least).unwrap_or(0);
        let entries = match KeyNumbers::are_short(tables) {
            true => Entries::Short(Vec::with_capacity(entries_max)),
            false => Entries::Long(Vec::with_capacity(entries_max)),
        };
        Self {
            numbers: KeyNumbers::new(tables),
            entries,
            marks: vec![0; entries_max.div_ceil(64)].into_boxed_slice(),
            index: SlotIndex::with_capacity(entries_max, entries_max.max(2) as u32),
            entries_max,
            hand: 0,
            evictions: 0,
            used_bytes: if least > 0 { bytes_for(least, tables) } else { 0 },
        }
    }

    /// Returns what stands for `key`, if that is here; then the entry keeps its place for longer.
    pub fn get(&mut self, key: RowKey) -> Option<RowKey> {
        let at = self.find(key)?;
        self.set_mark(at, true);
        let [_, stand_in] = self.entries.get(at)?;
        Some(self.numbers.key(stand_in))
    }

    /// Tells whether there is an entry of `key`; changes nothing.
    #[must_use]
    pub fn contains(&self, key: RowKey) -> bool {
        self.find(key).is_some()
    }

    /// Puts an entry; the oldest that was not found lately may leave for it. Tells whether it is
    /// here now, which one of `key` that was here before is too: that keeps its place, and stands
    /// for the new key. Keys that no table has stay outside.
    pub fn insert(&mut self, key: RowKey, stand_in: RowKey) -> bool {
        let numbers = (self.numbers.number(key), self.numbers.number(stand_in));
        let (Some(number), Some(stand_in)) = numbers else { return false };
        if let Some(at) = self.find(key) {
            self.entries.put(at, [number, stand_in]);
            return true;
        }
        if self.entries_max == 0 {
            return false;
        }
        let is_full = self.entries.len() == self.entries_max;
        let at = if is_full { self.victim() } else { self.entries.len() };
        // An index holds a few more than it has room for: the new entry first, which may fail.
        if !self.index.insert(hash_of(key), at as u32) {
            return false;
        }
        if is_full {
            if let Some([victim, _]) = self.entries.get(at) {
                self.index.remove(hash_of(self.numbers.key(victim)), at as u32);
            }
            self.evictions += 1;
            self.hand = self.after(at);
        }
        self.entries.put(at, [number, stand_in]);
        true
    }

    /// Returns what it did and holds.
    #[must_use]
    pub fn stats(&self) -> KeyCacheStats {
        KeyCacheStats {
            key_count: self.entries.len() as u64,
            key_count_max: self.entries_max as u64,
            evictions: self.evictions,
            used_bytes: self.used_bytes,
        }
    }

    /// Lists the entries in the order in which the hand comes to them, each with whether it will
    /// be passed over once; for tests.
    #[must_use]
    pub fn dump(&self) -> Vec<(RowKey, RowKey, bool)> {
        let count = self.entries.len();
        let order = (0..count).map(|step| (self.hand + step) % count);
        let entry = |at: usize| {
            let [key, stand_in] = self.entries.get(at)?;
            Some((self.numbers.key(key), self.numbers.key(stand_in), self.mark(at)))
        };
        order.filter_map(entry).collect()
    }

    /// The place of the entry that leaves next; those that the hand passes lose their marks.
    fn victim(&mut self) -> usize {
        while self.mark(self.hand) {
            self.set_mark(self.hand, false);
            self.hand = self.after(self.hand);
        }
        self.hand
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 < self.entries_max {
            at + 1
        } else {
            0
        }
    }

    fn find(&self, key: RowKey) -> Option<usize> {
        let number = self.numbers.number(key)?;
        let is_it = |at: u32| self.entries.get(at as usize).is_some_and(|[held, _]| held == number);
        self.index.find(hash_of(key), is_it).map(|at| at as usize)
    }

    fn mark(&self, at: usize) -> bool {
        self.marks.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    fn set_mark(&mut self, at: usize, is_set: bool) {
        if let Some(word) = self.marks.get_mut(at / 64) {
            *word = *word & !(1 << (at % 64)) | u64::from(is_set) << (at % 64);
        }
    }
}

/// Bytes of a cache of so many entries.
fn bytes_for(entries: u64, tables: &[u64]) -> u64 {
    let number_bytes =
        if KeyNumbers::are_short(tables) { size_of::<u32>() } else { size_of::<u64>() };
    let index_bytes = SlotIndex::bytes_for(usize::try_from(entries).unwrap_or(usize::MAX / 100));
    entries * 2 * number_bytes as u64
        + entries.div_ceil(64) * size_of::<u64>() as u64
        + index_bytes as u64
        + KeyNumbers::bytes_for(tables)
}

#[cfg(test)]
mod tests;
