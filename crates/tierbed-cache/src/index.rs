//! The slot index: a hash table from keys to slots, sixteen to a cache line.
//!
//! The hash of a key gives two lines, its first anywhere and its second a few lines behind that.
//! The key stands in the one that was emptier when it came, or, where both were full, behind the
//! second. Each line counts the keys that stand elsewhere for want of room: a search that finds a
//! count of 0 at one of its two lines ends there. A key stays where it is: a removal empties its
//! place.
//!
//! ```text
//! entry:  bit 31   30 .................. 0
//!             1    bits of the hash | value      all 0: empty
//! line:   16 entries; beside the lines a byte per line: keys of it that found no room
//! ```
//!
//! A search looks at both lines at once, and hardly any needs more, for a key that is not here
//! included. So no branch depends on where a key stands: guesses of processors that go wrong, and
//! the wait for them, were most of what a search by the order of lines cost.
//!
//! Source: Azar et al., "Balanced Allocations" (1994): of two places take the emptier. The count is
//! that of F14 (Bronson and Shi, 2019).
#![expect(clippy::indexing_slicing, reason = "lines are reduced to the length of the array")]

/// Entries per 100 places at most.
const LOAD_PERCENT: usize = 85;
/// Entries of a line: 64 bytes.
const LANES: usize = 16;
/// Set in an entry that is not empty.
const FILLED: u32 = 1 << 31;
/// Values there may be.
const VALUES_MAX: u32 = 1 << 26;
/// The second line of a key is at most so many behind its first: far enough that lines between
/// even out, near enough to share a page of memory or two.
const SECOND_WITHIN: u64 = 128;

/// Entries that are looked at together.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Line([u32; LANES]);

impl Line {
    /// A bit for each entry for which `test` holds, that of the first is bit 1. A plain loop of
    /// known length: compilers make comparisons of several entries of it, of iterators they did
    /// not. With bit 0 for the first, which needs no shift, they left it and three others out:
    /// twice the instructions.
    #[inline]
    fn lanes(&self, test: impl Fn(u32) -> bool) -> u32 {
        let (mut bits, mut lane) = (0, 0);
        while lane < LANES {
            bits |= u32::from(test(self.0[lane])) << (lane + 1);
            lane += 1;
        }
        bits
    }

    /// The lanes of entries that are as `wanted` in all bits of `mask`. A function of its own:
    /// where two of them were in one, compilers mixed their comparisons up, to twice the
    /// instructions.
    #[inline(never)]
    fn alike(&self, wanted: u32, mask: u32) -> u32 {
        self.lanes(|found| (found ^ wanted) & mask == 0)
    }

    /// How many more entries are empty here than in `other`.
    #[inline]
    fn emptier_by(&self, other: &Self) -> i32 {
        let (mut by, mut lane) = (0, 0);
        while lane < LANES {
            by += i32::from(self.0[lane] == 0) - i32::from(other.0[lane] == 0);
            lane += 1;
        }
        by
    }
}

/// The first of some lanes of one line or two, of which there is one.
#[inline]
fn first_lane(lanes: u64) -> usize {
    (lanes.trailing_zeros() - 1) as usize % (2 * LANES)
}

/// A multiset of small numbers found by hash; the caller compares keys.
#[derive(Debug, Clone, Default)]
pub struct SlotIndex {
    lines: Box<[Line]>,
    /// Of each line: entries that have it as one of their two and stand in neither.
    elsewhere: Box<[u8]>,
    /// Most lines behind the second one that an entry was ever put.
    reach: usize,
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
            elsewhere: vec![0; line_count].into_boxed_slice(),
            reach: 0,
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
        size_of_val(&*self.lines) + size_of_val(&*self.elsewhere)
    }

    /// Reads where searches for `hashes` will begin, all at once: a group of searches then waits
    /// for memory once instead of row by row.
    #[inline]
    pub fn warm(&self, hashes: &[u64]) {
        let words = hashes.iter().map(|&hash| self.first_word(hash));
        std::hint::black_box(words.fold(0, |all, word| all ^ word));
    }

    /// Reads where a search for `hash` will look, and returns something of it.
    #[inline]
    pub(crate) fn first_word(&self, hash: u64) -> u32 {
        // An index without lines, of a tier without slots, has nothing to read.
        if self.lines.is_empty() {
            return 0;
        }
        let [first, second] = self.lines_of(hash);
        self.lines[first].0[0] ^ self.lines[second].0[0]
    }

    /// Finds the value of `hash` that `is_it` accepts.
    #[must_use]
    #[inline]
    pub fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        if self.lines.is_empty() {
            return None;
        }
        let (values, wanted) = ((1 << self.value_bits) - 1, self.entry(hash, 0));
        let alike = |at: usize| self.lines[at].alike(wanted, !values);
        let accepted = |lines: [usize; 2], mut places: u64| {
            while places != 0 {
                // Of both lines in one loop, the line taken from an array: nobody can guess it.
                let place = first_lane(places);
                let value = self.lines[lines[place / LANES]].0[place % LANES] & values;
                if is_it(value) {
                    return Some(value);
                }
                places &= places - 1;
            }
            None
        };
        let [first, second] = self.lines_of(hash);
        let places = u64::from(alike(first)) | (u64::from(alike(second)) << LANES);
        let found = accepted([first, second], places);
        if found.is_some() || !self.may_be_elsewhere(first, second) {
            return found;
        }
        self.behind(second).find_map(|at| accepted([at; 2], alike(at).into()))
    }

    /// Adds `value`, for which there must be room, under `hash`. Tells whether it could: some
    /// 280 values of the same two lines are too many.
    ///
    /// # Panics
    /// When the index is full.
    #[must_use]
    pub fn insert(&mut self, hash: u64, value: u32) -> bool {
        assert!(self.len < self.lines.len() * LANES, "slot index is full");
        debug_assert!(value >> self.value_bits == 0, "value {value} is out of range");
        let ([first, second], entry) = (self.lines_of(hash), self.entry(hash, value));
        let is_second_emptier = self.lines[second].emptier_by(&self.lines[first]) > 0;
        // Taken from an array, not by a branch: nobody can guess which is emptier.
        let at = [first, second][usize::from(is_second_emptier)];
        let empty = self.lines[at].lanes(|found| found == 0);
        if empty != 0 {
            self.lines[at].0[first_lane(empty.into())] = entry;
        } else if !self.insert_behind([first, second], entry) {
            return false;
        }
        self.len += 1;
        true
    }

    /// Adds an entry whose lines are full; returns whether it could.
    #[cold]
    fn insert_behind(&mut self, [first, second]: [usize; 2], entry: u32) -> bool {
        if self.elsewhere[first].max(self.elsewhere[second]) == u8::MAX {
            return false;
        }
        let mut at = second;
        for steps in 1..self.lines.len() {
            at = self.after(at);
            let empty = self.lines[at].lanes(|found| found == 0);
            if empty != 0 {
                self.lines[at].0[first_lane(empty.into())] = entry;
                self.reach = self.reach.max(steps);
                self.elsewhere[first] += 1;
                self.elsewhere[second] += u8::from(first != second);
                return true;
            }
        }
        false
    }

    /// Removes `value` of `hash`; tells whether it was there.
    pub fn remove(&mut self, hash: u64, value: u32) -> bool {
        if self.lines.is_empty() {
            return false;
        }
        let ([first, second], wanted) = (self.lines_of(hash), self.entry(hash, value));
        let of = |at: usize| self.lines[at].lanes(|found| found == wanted);
        let (in_first, in_second) = (of(first), of(second));
        let is_removed = if in_first | in_second != 0 {
            let place = first_lane(u64::from(in_first) | (u64::from(in_second) << LANES));
            self.lines[[first, second][place / LANES]].0[place % LANES] = 0;
            true
        } else {
            self.may_be_elsewhere(first, second) && self.remove_behind([first, second], wanted)
        };
        self.len -= usize::from(is_removed);
        is_removed
    }

    /// Removes an entry that stands in neither of its lines; tells whether it was there.
    #[cold]
    fn remove_behind(&mut self, [first, second]: [usize; 2], wanted: u32) -> bool {
        let lanes_of = |at: usize| (at, self.lines[at].lanes(|found| found == wanted));
        let Some((at, found)) = self.behind(second).map(lanes_of).find(|(_, found)| *found != 0)
        else {
            return false;
        };
        self.lines[at].0[first_lane(found.into())] = 0;
        self.elsewhere[first] -= 1;
        self.elsewhere[second] -= u8::from(first != second);
        true
    }

    /// Tells whether an entry of these two lines may stand in neither.
    #[inline]
    fn may_be_elsewhere(&self, first: usize, second: usize) -> bool {
        (self.elsewhere[first] > 0) & (self.elsewhere[second] > 0)
    }

    /// The lines behind `second` where there may be entries that found no room before.
    fn behind(&self, second: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(Some(self.after(second)), |&at| Some(self.after(at))).take(self.reach)
    }

    /// Forgets all values.
    pub fn clear(&mut self) {
        self.lines.fill(Line::default());
        self.elsewhere.fill(0);
        self.reach = 0;
        self.len = 0;
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

    /// The two lines of a hash, by its low half: that is scaled to a line, and what is left of it
    /// to a distance. Shards are chosen by higher bits.
    #[inline]
    fn lines_of(&self, hash: u64) -> [usize; 2] {
        let scaled = (hash & 0xFFFF_FFFF) * self.lines.len() as u64;
        let first = (scaled >> 32) as usize;
        let distance = ((scaled & 0xFFFF_FFFF) * SECOND_WITHIN) >> 32;
        let mut second = first + 1 + distance as usize;
        if second >= self.lines.len() {
            // Of few lines it may go around several times.
            second %= self.lines.len();
        }
        [first, second]
    }

    /// The entry of `value` under `hash`.
    #[inline]
    fn entry(&self, hash: u64, value: u32) -> u32 {
        FILLED | ((hash >> 32) as u32) << self.value_bits | value
    }
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
        assert!(index.is_empty() && index.elsewhere.iter().all(|&count| count == 0));
    }

    /// Rows come and go for long: few are elsewhere than in their two lines, and near.
    #[test]
    fn searches_stay_short_however_long_rows_come_and_go() {
        let mut index = SlotIndex::with_capacity(10_000, 10_000);
        (0..10_000).for_each(|value| assert!(index.insert(mix64(u64::from(value)), value)));
        for row in 10_000..500_000u64 {
            let value = (row % 10_000) as u32;
            assert!(index.remove(mix64(row - 10_000), value));
            assert!(index.insert(mix64(row), value));
        }
        let line_count = index.lines.len();
        let away = index.elsewhere.iter().filter(|&&count| count > 0).count();
        assert!(away < line_count / 5, "{away} of {line_count}");
        assert!(index.reach < 16, "{}", index.reach);
    }

    /// Hashes that all share their lines: the index refuses the one too many and stays whole.
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
