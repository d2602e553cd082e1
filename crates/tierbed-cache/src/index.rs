//! Which slot has this key? Robin-hood hashing of slots by the hash of their key.
//!
//! Entries stand as near to their home bucket as their elders allow: whoever is farther from
//! home has the right of way, so distances are short and even, and a search ends as soon as it
//! meets an entry nearer to its home than the search is. Removal shifts the followers back:
//! there are no tombstones, the index never degrades and never has to grow.
//!
//! An entry is one word, so that a search that ends at home looks at one cache line:
//!
//! ```text
//! bit 31 ......... 26  25 .................. 0
//!     distance + 1     bits of the hash | value      0: empty; as many bits as the values need
//! ```
//!
//! Source: Celis, "Robin Hood Hashing" (1986); FlashEmbedding §3.3.3 uses it for its caches.
#![expect(clippy::indexing_slicing, reason = "buckets are reduced to the length of the arrays")]

/// Entries per 100 buckets at most.
const LOAD_PERCENT: usize = 87;
/// Where the distance is in an entry; one step from home.
const DISTANCE_AT: u32 = 26;
const STEP: u32 = 1 << DISTANCE_AT;
/// Values there may be.
const VALUES_MAX: u32 = STEP;
/// The last distance that an entry can tell.
const LAST: u32 = u32::MAX << DISTANCE_AT;

/// A multiset of small numbers found by hash; the caller compares keys.
#[derive(Debug, Clone, Default)]
pub struct RobinHoodIndex {
    entries: Box<[u32]>,
    /// Bits of a value; the bits between it and the distance are of the hash.
    value_bits: u32,
    /// The farthest that an entry has ever been from home.
    farthest: u32,
    len: usize,
}

impl RobinHoodIndex {
    /// Builds an index with room for `capacity` values below `value_count`, which is at most 2^26.
    ///
    /// # Panics
    /// When there may be more values.
    #[must_use]
    pub fn with_capacity(capacity: usize, value_count: u32) -> Self {
        assert!(value_count <= VALUES_MAX, "values of an index have 26 bits");
        Self {
            entries: vec![0; Self::buckets(capacity)].into_boxed_slice(),
            value_bits: u32::BITS - value_count.saturating_sub(1).leading_zeros(),
            farthest: 0,
            len: 0,
        }
    }

    fn buckets(capacity: usize) -> usize {
        if capacity == 0 {
            0
        } else {
            // One bucket more, so that a search always meets an empty one.
            (capacity * 100).div_ceil(LOAD_PERCENT) + 1
        }
    }

    /// Returns the bytes of an index with room for `capacity` values.
    #[must_use]
    pub fn bytes_for(capacity: usize) -> usize {
        Self::buckets(capacity) * size_of::<u32>()
    }

    /// Returns the values held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tells whether no value is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the values there is room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.entries.len().saturating_sub(1) * LOAD_PERCENT / 100
    }

    /// Returns the bytes it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.entries)
    }

    /// Reads where searches for `hashes` will begin, all at once: a group of searches then waits
    /// for memory once instead of row by row.
    #[inline]
    pub fn warm(&self, hashes: &[u64]) {
        let homes = hashes.iter().filter_map(|&hash| self.entries.get(self.home(hash)));
        std::hint::black_box(homes.fold(0, |all, &entry| all ^ entry));
    }

    /// Finds the value of `hash` that `is_it` accepts.
    #[must_use]
    #[inline]
    pub fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        self.position(hash, is_it).map(|(_, value)| value)
    }

    /// Where the value is, and the value.
    #[inline]
    fn position(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<(usize, u32)> {
        if self.entries.is_empty() {
            return None;
        }
        let values = (1 << self.value_bits) - 1;
        let mut at = self.home(hash);
        let mut wanted = self.first_entry(hash);
        loop {
            let found = self.entries[at];
            if (found ^ wanted) <= values && is_it(found & values) {
                return Some((at, found & values));
            }
            if found < distance(wanted) || distance(wanted) == LAST {
                return None;
            }
            at = self.next(at);
            wanted += STEP;
        }
    }

    /// Adds `value`, for which there must be room, under `hash`. Tells whether it could: some
    /// 60 values of one home are too many.
    #[must_use]
    pub fn insert(&mut self, hash: u64, value: u32) -> bool {
        assert!(self.len < self.entries.len().saturating_sub(1), "robin-hood index is full");
        debug_assert!(value >> self.value_bits == 0, "value {value} is out of range");
        let (mut at, mut entry) = (self.home(hash), self.first_entry(hash) | value);
        // An insertion moves every entry by one bucket at most.
        if self.farthest == LAST && !self.has_way(at, entry) {
            return false;
        }
        loop {
            let found = self.entries[at];
            if found < distance(entry) {
                self.entries[at] = entry;
                self.farthest = self.farthest.max(distance(entry));
                if found == 0 {
                    self.len += 1;
                    return true;
                }
                entry = found;
            }
            at = self.next(at);
            entry += STEP;
        }
    }

    /// Tells whether an insertion from `at` ends before an entry gets too far from home.
    fn has_way(&self, mut at: usize, mut entry: u32) -> bool {
        loop {
            let found = self.entries[at];
            if found == 0 {
                return true;
            }
            let poorer = distance(entry).min(distance(found));
            if poorer == LAST {
                return false;
            }
            entry = poorer + STEP;
            at = self.next(at);
        }
    }

    /// Removes `value` of `hash`; tells whether it was there.
    pub fn remove(&mut self, hash: u64, value: u32) -> bool {
        let Some((mut at, _)) = self.position(hash, |held| held == value) else { return false };
        loop {
            let next = self.next(at);
            let follower = self.entries[next];
            if follower < 2 * STEP {
                break;
            }
            self.entries[at] = follower - STEP;
            at = next;
        }
        self.entries[at] = 0;
        self.len -= 1;
        true
    }

    /// Forgets all values.
    pub fn clear(&mut self) {
        self.entries.fill(0);
        (self.farthest, self.len) = (0, 0);
    }

    /// The bucket a hash belongs to: its low half, scaled. Shards are chosen by higher bits.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash & 0xFFFF_FFFF) * self.entries.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() {
            0
        } else {
            at + 1
        }
    }

    /// What an entry of `hash` says at home, without its value.
    #[inline]
    fn first_entry(&self, hash: u64) -> u32 {
        let bits = ((hash >> 32) as u32) << self.value_bits;
        STEP | (bits & (STEP - 1))
    }
}

/// The distance of an entry, where it stands.
#[inline]
fn distance(entry: u32) -> u32 {
    entry & LAST
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tierbed_core::env::{mix64, SplitMix64};

    use super::*;

    /// The oracle is an ordered map; keys repeat, and the index is nearly full all the time.
    #[test]
    fn behaves_like_a_map_at_full_load() {
        let mut index = RobinHoodIndex::with_capacity(1000, 1500);
        let mut map: BTreeMap<u32, ()> = BTreeMap::new();
        let mut rng = SplitMix64::new(5);
        for _ in 0..60_000 {
            let key = rng.below(1500) as u32;
            let hash = mix64(u64::from(key));
            assert_eq!(index.find(hash, |held| held == key).is_some(), map.contains_key(&key));
            if map.contains_key(&key) {
                if rng.below(4) == 0 {
                    assert!(index.remove(hash, key));
                    map.remove(&key);
                }
            } else if map.len() < 1000 {
                assert!(index.insert(hash, key));
                map.insert(key, ());
            }
        }
        assert_eq!(index.len(), map.len());
        assert!(map.keys().all(|&key| index.find(mix64(key.into()), |held| held == key).is_some()));
        assert!(!index.remove(mix64(999), 1499));
    }

    /// Hashes that all share a home: the index refuses the one too many and stays whole.
    #[test]
    fn too_many_of_one_home_are_refused_not_lost() {
        let mut index = RobinHoodIndex::with_capacity(1000, 400);
        let stored = (0..400).take_while(|&value| index.insert(7 << 32, value)).count() as u32;
        assert!((50..=63).contains(&stored), "{stored}");
        assert!((0..stored).all(|value| index.find(7 << 32, |held| held == value).is_some()));
        assert!((0..stored).all(|value| index.remove(7 << 32, value)));
        assert!(index.is_empty());
    }

    #[test]
    fn an_index_of_nothing_finds_nothing() {
        let index = RobinHoodIndex::with_capacity(0, 1);
        assert_eq!((index.find(1, |_| true), index.bytes(), index.capacity()), (None, 0, 0));
    }
}
