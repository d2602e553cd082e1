//! The slot index: a hash table from keys to slots, sixteen to a cache line.
//!
//! The hash of a key gives its first line. The key stands there, or behind it where lines are full:
//! the entry farther from its first line has the right of way, so distances are short and even.
//! Each line counts the entries that passed it: a search ends at a line with none. A removal lets
//! an entry that had passed move back into the gap: no tombstones, and the index neither degrades
//! nor grows.
//!
//! ```text
//! entry:  bit 31 .......... 27  26 .................. 0
//!         lines passed + 1      bits of the hash | value      0: empty
//! line:   16 entries; beside the lines a byte per line: entries that passed it
//! ```
//!
//! A search looks at all entries of a line at once and mostly needs one line, a key that is not
//! here included. Source: the counted overflow of F14 (Bronson and Shi, 2019), and Celis, "Robin
//! Hood Hashing" (1986), which FlashEmbedding §3.3.3 uses for its caches, between lines.
#![expect(clippy::indexing_slicing, reason = "lines are reduced to the length of the array")]

/// Entries per 100 places at most.
const LOAD_PERCENT: usize = 85;
/// Entries of a line: 64 bytes.
const LANES: usize = 16;
/// Bit at which an entry holds its distance from its first line, and a distance of one line.
const DISTANCE_AT: u32 = 27;
const STEP: u32 = 1 << DISTANCE_AT;
/// Values there may be.
const VALUES_MAX: u32 = STEP >> 1;
/// The last distance that an entry can tell, and the lines passed to there.
const LAST: u32 = u32::MAX << DISTANCE_AT;
const PASSED_MAX: u32 = LAST / STEP - 1;

/// Entries that are looked at together.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Line([u32; LANES]);

impl Line {
    /// A bit for each entry for which `test` holds. A plain loop of known length: compilers make
    /// comparisons of several entries of it, of iterators they did not.
    #[inline]
    fn lanes(&self, test: impl Fn(u32) -> bool) -> u32 {
        let (mut bits, mut lane) = (0, 0);
        while lane < LANES {
            bits |= u32::from(test(self.0[lane])) << lane;
            lane += 1;
        }
        bits
    }

    /// The first entry for which `test` holds.
    #[inline]
    fn first(&self, test: impl Fn(u32) -> bool) -> Option<usize> {
        let lanes = self.lanes(test);
        (lanes != 0).then(|| lanes.trailing_zeros() as usize % LANES)
    }
}

/// A multiset of small numbers found by hash; the caller compares keys.
#[derive(Debug, Clone, Default)]
pub struct SlotIndex {
    lines: Box<[Line]>,
    /// Of each line: entries of lines before it that stand behind it.
    passed: Box<[u8]>,
    /// Bits of a value; the bits between it and the highest are of the hash.
    value_bits: u32,
    len: usize,
}

impl SlotIndex {
    /// Builds an index with room for `capacity` values below `value_count`, which is at most 2^26.
    ///
    /// # Panics
    /// When there may be more values.
    #[must_use]
    pub fn with_capacity(capacity: usize, value_count: u32) -> Self {
        assert!(value_count <= VALUES_MAX, "values of an index have 26 bits");
        let line_count = Self::line_count(capacity);
        Self {
            lines: vec![Line::default(); line_count].into_boxed_slice(),
            passed: vec![0; line_count].into_boxed_slice(),
            value_bits: u32::BITS - value_count.saturating_sub(1).leading_zeros(),
            len: 0,
        }
    }

    fn line_count(capacity: usize) -> usize {
        (capacity * 100).div_ceil(LOAD_PERCENT * LANES)
    }

    /// Returns the bytes of an index with room for `capacity` values.
    #[must_use]
    pub fn bytes_for(capacity: usize) -> usize {
        Self::line_count(capacity) * (size_of::<Line>() + size_of::<u8>())
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
        self.lines.len() * LANES * LOAD_PERCENT / 100
    }

    /// Returns the bytes it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.lines) + size_of_val(&*self.passed)
    }

    /// Reads where searches for `hashes` will begin, all at once: a group of searches then waits
    /// for memory once instead of row by row.
    #[inline]
    pub fn warm(&self, hashes: &[u64]) {
        let words = hashes.iter().map(|&hash| self.first_word(hash));
        std::hint::black_box(words.fold(0, |all, word| all ^ word));
    }

    /// Reads where a search for `hash` will begin, and returns something of it.
    #[inline]
    pub(crate) fn first_word(&self, hash: u64) -> u32 {
        // An index without lines, of a tier without slots, has nothing to read.
        match self.lines.get(self.first_line(hash)) {
            Some(line) => line.0[0],
            None => 0,
        }
    }

    /// Finds the value of `hash` that `is_it` accepts.
    #[must_use]
    #[inline]
    pub fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let values = (1 << self.value_bits) - 1;
        let (mut at, mut wanted) = (self.first_line(hash), self.entry(hash, 0));
        for _ in 0..=PASSED_MAX {
            let line = self.lines.get(at)?;
            let mut alike = line.lanes(|found| (found ^ wanted) & !values == 0);
            while alike != 0 {
                let value = line.0[alike.trailing_zeros() as usize % LANES] & values;
                if is_it(value) {
                    return Some(value);
                }
                alike &= alike - 1;
            }
            if self.passed[at] == 0 {
                return None;
            }
            at = self.after(at);
            wanted = wanted.wrapping_add(STEP);
        }
        None
    }

    /// Adds `value`, for which there must be room, under `hash`. Tells whether it could: some
    /// 250 values of one first line are too many.
    ///
    /// # Panics
    /// When the index is full.
    #[must_use]
    pub fn insert(&mut self, hash: u64, value: u32) -> bool {
        assert!(self.len < self.lines.len() * LANES, "slot index is full");
        debug_assert!(value >> self.value_bits == 0, "value {value} is out of range");
        let (first, entry) = (self.first_line(hash), self.entry(hash, value));
        if let Some(lane) = self.lines[first].first(|found| found == 0) {
            self.lines[first].0[lane] = entry;
        } else if !self.insert_behind(first, entry) {
            return false;
        }
        self.len += 1;
        true
    }

    /// Adds an entry whose first line is full; returns whether it could.
    fn insert_behind(&mut self, first: usize, mut entry: u32) -> bool {
        let Some(end) = self.first_gap(first) else { return false };
        let mut at = first;
        while at != end {
            self.passed[at] += 1;
            // An entry nearer to its first line moves on.
            let own = distance(entry);
            if let Some(lane) = self.lines[at].first(|held| distance(held) < own) {
                std::mem::swap(&mut self.lines[at].0[lane], &mut entry);
            }
            at = self.after(at);
            entry += STEP;
        }
        if let Some(lane) = self.lines[end].first(|found| found == 0) {
            self.lines[end].0[lane] = entry;
        }
        true
    }

    /// The line behind `first` that is not full, if an entry may pass all lines before it.
    fn first_gap(&self, first: usize) -> Option<usize> {
        let (mut at, mut own) = (first, STEP);
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            if line.lanes(|found| found == 0) != 0 {
                return Some(at);
            }
            let nearer = line.first(|held| distance(held) < own);
            own = nearer.map_or(own, |lane| distance(line.0[lane]));
            if own == LAST || self.passed[at] == u8::MAX {
                return None;
            }
            at = self.after(at);
            own += STEP;
        }
        None
    }

    /// Removes `value` of `hash`; tells whether it was there.
    pub fn remove(&mut self, hash: u64, value: u32) -> bool {
        if self.lines.is_empty() {
            return false;
        }
        let (first, mut wanted) = (self.first_line(hash), self.entry(hash, value));
        let mut at = first;
        for _ in 0..=PASSED_MAX {
            let line = &mut self.lines[at];
            if let Some(lane) = line.first(|found| found == wanted) {
                line.0[lane] = 0;
                self.for_passed(first, at, |count| count - 1);
                self.len -= 1;
                self.fill(at, lane);
                return true;
            }
            if self.passed[at] == 0 {
                return false;
            }
            at = self.after(at);
            wanted = wanted.wrapping_add(STEP);
        }
        false
    }

    /// Lets an entry that passed line `gap` move back into its empty place `lane`, then another
    /// into the place of that, and so on.
    fn fill(&mut self, mut gap: usize, mut lane: usize) {
        let (mut at, mut steps) = (gap, 0);
        while self.passed[at] > 0 && steps < PASSED_MAX {
            at = self.after(at);
            steps += 1;
            let has_passed = |found: u32| distance(found) > steps * STEP;
            if let Some(from) = self.lines[at].first(has_passed) {
                let entry = std::mem::take(&mut self.lines[at].0[from]);
                self.lines[gap].0[lane] = entry - steps * STEP;
                self.for_passed(gap, at, |count| count - 1);
                (gap, lane, steps) = (at, from, 0);
            }
        }
    }

    /// Forgets all values.
    pub fn clear(&mut self) {
        self.lines.fill(Line::default());
        self.passed.fill(0);
        self.len = 0;
    }

    /// Changes the counts of the lines from `first` to before `end`.
    #[inline]
    fn for_passed(&mut self, first: usize, end: usize, change: impl Fn(u8) -> u8) {
        let mut at = first;
        while at != end {
            self.passed[at] = change(self.passed[at]);
            at = self.after(at);
        }
    }

    /// The line behind `at`; behind the last is the first.
    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.lines.len() {
            0
        } else {
            at + 1
        }
    }

    /// The line a hash belongs to: its low half, scaled. Shards are chosen by higher bits.
    #[inline]
    fn first_line(&self, hash: u64) -> usize {
        (((hash & 0xFFFF_FFFF) * self.lines.len() as u64) >> 32) as usize
    }

    /// The entry of `value` under `hash`, on its first line.
    #[inline]
    fn entry(&self, hash: u64, value: u32) -> u32 {
        let bits = ((hash >> 32) as u32) << self.value_bits;
        STEP | (bits & (STEP - 1)) | value
    }
}

/// Distance of an entry from its first line plus one.
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
        let mut index = SlotIndex::with_capacity(1000, 1500);
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
        map.keys().for_each(|&key| assert!(index.remove(mix64(key.into()), key)));
        assert!(index.is_empty() && index.passed.iter().all(|&count| count == 0));
    }

    /// Rows come and go for long: lines are passed as rarely as at the beginning.
    #[test]
    fn searches_stay_short_however_long_rows_come_and_go() {
        let passed = |index: &SlotIndex| index.passed.iter().filter(|&&count| count > 0).count();
        let mut index = SlotIndex::with_capacity(10_000, 10_000);
        (0..10_000).for_each(|value| assert!(index.insert(mix64(u64::from(value)), value)));
        let at_first = passed(&index);
        for row in 10_000..500_000u64 {
            let value = (row % 10_000) as u32;
            assert!(index.remove(mix64(row - 10_000), value));
            assert!(index.insert(mix64(row), value));
        }
        let line_count = index.lines.len();
        assert!(at_first < line_count / 2, "{at_first} of {line_count}");
        assert!(passed(&index) < line_count / 2, "{} of {line_count}", passed(&index));
    }

    /// Hashes that all share a line: the index refuses the one too many and stays whole.
    #[test]
    fn too_many_of_one_line_are_refused_not_lost() {
        let mut index = SlotIndex::with_capacity(1000, 1000);
        let stored = (0..1000).take_while(|&value| index.insert(7 << 32, value)).count() as u32;
        assert!((250..=300).contains(&stored), "{stored}");
        assert!((0..stored).all(|value| index.find(7 << 32, |held| held == value).is_some()));
        assert!((0..stored).all(|value| index.remove(7 << 32, value)));
        assert!(index.is_empty());
    }

    #[test]
    fn an_index_of_nothing_finds_nothing() {
        let index = SlotIndex::with_capacity(0, 1);
        assert_eq!((index.find(1, |_| true), index.bytes(), index.capacity()), (None, 0, 0));
    }
}
