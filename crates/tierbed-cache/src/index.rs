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
/// Entries looked at together.
const LANES: usize = 8;
/// Entries behind the last bucket: as far as an entry can be from home, and a look from there.
const TAIL: usize = (LAST >> DISTANCE_AT) as usize + LANES;

/// A multiset of small numbers found by hash; the caller compares keys.
#[derive(Debug, Clone, Default)]
pub struct RobinHoodIndex {
    /// Buckets, and behind them room for entries whose home is one of the last.
    entries: Box<[u32]>,
    bucket_count: usize,
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
        let bucket_count = Self::buckets(capacity);
        let tail = if bucket_count == 0 { 0 } else { TAIL };
        Self {
            entries: vec![0; bucket_count + tail].into_boxed_slice(),
            bucket_count,
            value_bits: u32::BITS - value_count.saturating_sub(1).leading_zeros(),
            farthest: 0,
            len: 0,
        }
    }

    fn buckets(capacity: usize) -> usize {
        (capacity * 100).div_ceil(LOAD_PERCENT)
    }

    /// Returns the bytes of an index with room for `capacity` values.
    #[must_use]
    pub fn bytes_for(capacity: usize) -> usize {
        let tail = if capacity == 0 { 0 } else { TAIL };
        (Self::buckets(capacity) + tail) * size_of::<u32>()
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
        self.bucket_count * LOAD_PERCENT / 100
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
        let (mut at, mut wanted) = (self.home(hash), self.first_entry(hash));
        loop {
            let farther = |lane: u32| wanted.wrapping_add(lane * STEP);
            let mut alike = self.lanes(at, |lane, found| (found ^ farther(lane)) <= values);
            // Nothing is farther than the last distance: there the bound is above all entries.
            let bound = |lane: u32| distance(farther(lane)).wrapping_sub(1);
            let mut poorer = self.lanes(at, |lane, found| found <= bound(lane));
            // Behind an entry nearer to its home than the search there is nothing of this hash.
            poorer |= 1 << LANES;
            alike &= (1 << poorer.trailing_zeros()) - 1;
            while alike != 0 {
                let place = at + alike.trailing_zeros() as usize;
                let value = self.entries[place] & values;
                if is_it(value) {
                    return Some((place, value));
                }
                alike &= alike - 1;
            }
            if poorer != 1 << LANES || distance(wanted) >= LAST - LANES as u32 * STEP {
                return None;
            }
            at += LANES;
            wanted += LANES as u32 * STEP;
        }
    }

    /// A bit for each of the entries from `at` on for which `test` holds; `test` is told how far
    /// behind `at` the entry is.
    #[inline]
    fn lanes(&self, at: usize, test: impl Fn(u32, u32) -> bool) -> u32 {
        let some = &self.entries[at..at + LANES];
        (0..).zip(some).fold(0, |bits, (lane, &found)| bits | u32::from(test(lane, found)) << lane)
    }

    /// The first entry from `at` on that is below `bound`.
    #[inline]
    fn first_below(&self, mut at: usize, bound: u32) -> usize {
        loop {
            let below = self.lanes(at, |_, found| found < bound);
            if below != 0 {
                return at + below.trailing_zeros() as usize;
            }
            at += LANES;
        }
    }

    /// Adds `value`, for which there must be room, under `hash`. Tells whether it could: some
    /// 60 values of one home are too many.
    ///
    /// # Panics
    /// When the index is full.
    #[must_use]
    pub fn insert(&mut self, hash: u64, value: u32) -> bool {
        assert!(self.len < self.bucket_count, "robin-hood index is full");
        debug_assert!(value >> self.value_bits == 0, "value {value} is out of range");
        let (mut at, mut entry) = (self.home(hash), self.first_entry(hash) | value);
        while self.entries[at] >= distance(entry) {
            if distance(entry) == LAST {
                return false;
            }
            at += 1;
            entry += STEP;
        }
        // All entries from here to the next empty bucket move by one.
        let end = self.first_below(at, 1);
        let moving = &mut self.entries[at..=end];
        let is_last = |entry: &u32| distance(*entry) == LAST;
        if self.farthest >= LAST - STEP && moving.iter().any(is_last) {
            return false;
        }
        let mut farthest = distance(entry);
        for place in (1..moving.len()).rev() {
            moving[place] = moving[place - 1] + STEP;
            farthest = farthest.max(distance(moving[place]));
        }
        moving[0] = entry;
        self.farthest = self.farthest.max(farthest);
        self.len += 1;
        true
    }

    /// Removes `value` of `hash`; tells whether it was there.
    pub fn remove(&mut self, hash: u64, value: u32) -> bool {
        let Some((at, _)) = self.position(hash, |held| held == value) else { return false };
        // Those behind it that are not at home move back.
        let end = self.first_below(at + 1, 2 * STEP);
        let moving = &mut self.entries[at..end];
        for place in 1..moving.len() {
            moving[place - 1] = moving[place] - STEP;
        }
        self.entries[end - 1] = 0;
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
        (((hash & 0xFFFF_FFFF) * self.bucket_count as u64) >> 32) as usize
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
