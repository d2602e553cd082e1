//! Which slot has this key? Robin-hood hashing of slots by the hash of their key.
//!
//! Entries stand as near to their home bucket as their elders allow: whoever is farther from
//! home has the right of way, so distances are short and even, and a search ends as soon as it
//! meets an entry nearer to its home than the search is. Removal shifts the followers back:
//! there are no tombstones, the index never degrades and never has to grow.
//!
//! ```text
//! tags:    u16 per bucket: distance from home + 1 (0: empty), 8 bits of the hash
//! values:  u32 per bucket
//! ```
//!
//! Source: Celis, "Robin Hood Hashing" (1986); FlashEmbedding §3.3.3 uses it for its caches.
#![expect(clippy::indexing_slicing, reason = "buckets are reduced to the length of the arrays")]

/// Entries per 100 buckets at most.
const LOAD_PERCENT: usize = 87;
/// One step from home, in a tag.
const STEP: u16 = 1 << 8;
/// The farthest an entry may be from home.
const DISTANCE_MAX: u16 = u8::MAX as u16 - 1;

/// A multiset of `u32` values found by hash; the caller compares keys.
#[derive(Debug, Clone, Default)]
pub struct RobinHoodIndex {
    tags: Box<[u16]>,
    values: Box<[u32]>,
    len: usize,
}

impl RobinHoodIndex {
    /// Builds an index with room for `capacity` values.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let buckets = Self::buckets(capacity);
        Self {
            tags: vec![0; buckets].into_boxed_slice(),
            values: vec![0; buckets].into_boxed_slice(),
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
        Self::buckets(capacity) * (size_of::<u16>() + size_of::<u32>())
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
        self.tags.len().saturating_sub(1) * LOAD_PERCENT / 100
    }

    /// Returns the bytes it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.tags) + size_of_val(&*self.values)
    }

    /// Finds the value of `hash` that `is_it` accepts.
    #[must_use]
    #[inline]
    pub fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        self.position(hash, is_it).map(|at| self.values[at])
    }

    fn position(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<usize> {
        if self.tags.is_empty() {
            return None;
        }
        let mut at = self.home(hash);
        let mut tag = first_tag(hash);
        loop {
            let found = self.tags[at];
            if found == tag && is_it(self.values[at]) {
                return Some(at);
            }
            if found / STEP < tag / STEP || tag / STEP > DISTANCE_MAX {
                return None;
            }
            at = self.next(at);
            tag += STEP;
        }
    }

    /// Adds `value`, for which there must be room, under `hash`. Tells whether it could: some
    /// 250 values of one home are too many.
    #[must_use]
    pub fn insert(&mut self, hash: u64, value: u32) -> bool {
        assert!(self.len < self.tags.len().saturating_sub(1), "robin-hood index is full");
        let (mut at, mut tag, mut value) = (self.home(hash), first_tag(hash), value);
        if !self.has_way(at, tag) {
            return false;
        }
        loop {
            let found = self.tags[at];
            if found == 0 {
                self.tags[at] = tag;
                self.values[at] = value;
                self.len += 1;
                return true;
            }
            if found / STEP < tag / STEP {
                std::mem::swap(&mut self.tags[at], &mut tag);
                std::mem::swap(&mut self.values[at], &mut value);
            }
            at = self.next(at);
            tag += STEP;
        }
    }

    /// Tells whether an insertion from `at` ends before an entry gets too far from home.
    fn has_way(&self, mut at: usize, mut tag: u16) -> bool {
        loop {
            let found = self.tags[at];
            if found == 0 {
                return true;
            }
            if tag / STEP >= DISTANCE_MAX {
                return false;
            }
            tag = tag.min(found) + STEP;
            at = self.next(at);
        }
    }

    /// Removes `value` of `hash`; tells whether it was there.
    pub fn remove(&mut self, hash: u64, value: u32) -> bool {
        let Some(mut at) = self.position(hash, |held| held == value) else { return false };
        loop {
            let next = self.next(at);
            let follower = self.tags[next];
            if follower < 2 * STEP {
                break;
            }
            self.tags[at] = follower - STEP;
            self.values[at] = self.values[next];
            at = next;
        }
        self.tags[at] = 0;
        self.len -= 1;
        true
    }

    /// Forgets all values.
    pub fn clear(&mut self) {
        self.tags.fill(0);
        self.len = 0;
    }

    /// The bucket a hash belongs to: its low half, scaled. Shards are chosen by higher bits.
    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash & 0xFFFF_FFFF) * self.tags.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.tags.len() {
            0
        } else {
            at + 1
        }
    }
}

#[inline]
fn first_tag(hash: u64) -> u16 {
    STEP | ((hash >> 32) & 0xFF) as u16
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tierbed_core::env::{mix64, SplitMix64};

    use super::*;

    /// The oracle is an ordered map; keys repeat, and the index is nearly full all the time.
    #[test]
    fn behaves_like_a_map_at_full_load() {
        let mut index = RobinHoodIndex::with_capacity(1000);
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
        assert!(!index.remove(mix64(9999), 9999));
    }

    /// Hashes that all share a home: the index refuses the one too many and stays whole.
    #[test]
    fn too_many_of_one_home_are_refused_not_lost() {
        let mut index = RobinHoodIndex::with_capacity(1000);
        let stored = (0..400).take_while(|&value| index.insert(7 << 32, value)).count() as u32;
        assert!((200..=254).contains(&stored), "{stored}");
        assert!((0..stored).all(|value| index.find(7 << 32, |held| held == value).is_some()));
        assert!((0..stored).all(|value| index.remove(7 << 32, value)));
        assert!(index.is_empty());
    }

    #[test]
    fn an_index_of_nothing_finds_nothing() {
        let index = RobinHoodIndex::with_capacity(0);
        assert_eq!((index.find(1, |_| true), index.bytes(), index.capacity()), (None, 0, 0));
    }
}
