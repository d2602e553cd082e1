//! A lossy table of evicted rows' scores, for scores that no record can keep.
//!
//! Sets of eight entries of 20 bits, found by hash; the lowest of a set makes room. Rows that are
//! forgotten begin anew; one row of 500 that was never here is taken for another.
//!
//! ```text
//! set     8 words of an entry's lower 16 bits, 2 words of the upper four of each
//! entry   bit 19 ..... 8  7 ......... 0
//!             hash bits     code of a ScoreFrame     0: empty
//! ```
#![expect(clippy::indexing_slicing, reason = "set numbers are scaled to the table's length")]

use tierbed_core::env::SplitMix64;

use super::score_frame::ScoreFrame;

/// Entries of a set.
const WAYS: usize = 8;
/// Bits of an entry beyond a word, and entries whose upper bits share one.
const UPPER_BITS: u32 = 4;
const UPPER_MASK: u16 = (1 << UPPER_BITS) - 1;
const SHARING: usize = (u16::BITS / UPPER_BITS) as usize;
const CODE_MASK: u32 = (1 << ScoreFrame::CODE_BITS) - 1;
/// Bits of a tag that are in the lower word of its entry.
const TAG_LOWER_MASK: u32 = (1 << (u16::BITS - ScoreFrame::CODE_BITS)) - 1;
const TAG_BITS: u32 = u16::BITS + UPPER_BITS - ScoreFrame::CODE_BITS;

/// The lower words of entries, and words of what is above.
#[derive(Debug, Clone, Copy, Default)]
struct Set {
    lower: [u16; WAYS],
    upper: [u16; WAYS / SHARING],
}

impl Set {
    #[inline]
    fn entry(&self, way: usize) -> u32 {
        let upper = self.upper[way / SHARING] >> upper_at(way) & UPPER_MASK;
        (u32::from(upper) << u16::BITS) | u32::from(self.lower[way])
    }

    #[inline]
    fn set_entry(&mut self, way: usize, entry: u32) {
        self.lower[way] = entry as u16;
        let upper = &mut self.upper[way / SHARING];
        *upper &= !(UPPER_MASK << upper_at(way));
        *upper |= ((entry >> u16::BITS) as u16) << upper_at(way);
    }

    /// The place of an entry with this tag.
    #[inline]
    fn find(&self, tag: u32) -> Option<usize> {
        // By the part of the tag in the lower words first, of all of them in one comparison.
        let part = (tag & TAG_LOWER_MASK) as u16;
        let (mut alike, mut way) = (0u32, 0);
        while way < WAYS {
            let word = self.lower[way] >> ScoreFrame::CODE_BITS;
            alike |= u32::from(word == part) << (way + 1);
            way += 1;
        }
        while alike != 0 {
            let way = (alike.trailing_zeros() - 1) as usize % WAYS;
            let entry = self.entry(way);
            // A tag may be 0, as that of an empty entry is.
            if entry >> ScoreFrame::CODE_BITS == tag && entry != 0 {
                return Some(way);
            }
            alike &= alike - 1;
        }
        None
    }

    /// The place of the entry of the lowest score, an empty one if there is one; the first of
    /// several.
    #[inline]
    fn lowest(&self, frame: ScoreFrame) -> usize {
        // The way below the score: the least of all is found without a branch.
        let keys: [u16; WAYS] = std::array::from_fn(|way| {
            let entry = self.entry(way);
            // Empty ones first, then by the order of scores: codes wrap around with the unit.
            let order = 1 + u16::from(frame.order((entry & CODE_MASK) as u8));
            (order * u16::from(entry != 0)) * WAYS as u16 + way as u16
        });
        usize::from(keys.into_iter().fold(u16::MAX, u16::min)) % WAYS
    }

    /// Puts an entry in the place of its row, or of the entry of the lowest score.
    fn put(&mut self, entry: u32, frame: ScoreFrame) {
        let way = match self.find(entry >> ScoreFrame::CODE_BITS) {
            Some(way) => way,
            None => self.lowest(frame),
        };
        self.set_entry(way, entry);
    }
}

/// Where the upper bits of an entry are in their word.
#[inline]
fn upper_at(way: usize) -> u32 {
    (way % SHARING) as u32 * UPPER_BITS
}

/// Scores of rows that are not here.
#[derive(Debug, Clone)]
pub(crate) struct ScoreTable {
    sets: Vec<Set>,
    rng: SplitMix64,
}

impl Default for ScoreTable {
    fn default() -> Self {
        Self { sets: Vec::new(), rng: SplitMix64::new(0x7363_6f72) }
    }
}

/// Sets of a table before and after it changes size.
#[derive(Clone, Copy)]
struct SetCounts {
    from: usize,
    to: usize,
}

impl ScoreTable {
    /// Bytes of a table with room for `entries` scores.
    pub(crate) fn bytes_for(entries: u64) -> u64 {
        entries.div_ceil(WAYS as u64) * size_of::<Set>() as u64
    }

    /// Makes room for about `entries` scores; forgets all.
    pub(crate) fn resize(&mut self, entries: usize) {
        self.sets = vec![Set::default(); entries.div_ceil(WAYS)];
    }

    /// Makes room for about `entries` scores; the highest stay. In place: sets are in the order of
    /// the hashes before and after, so that each is made of sets that are not overwritten yet.
    pub(crate) fn refit(&mut self, entries: usize, frame: ScoreFrame) {
        let (from, to) = (self.sets.len(), entries.div_ceil(WAYS));
        if from == 0 {
            return self.resize(entries);
        }
        if to > from {
            self.sets.reserve_exact(to - from);
            self.sets.resize(to, Set::default());
            // A set grows out of one at or below its own place: from the end on, none is
            // overwritten before it was read. When the table shrinks, it is the other way round.
            (0..to).rev().for_each(|at| self.gather(at, SetCounts { from, to }, frame));
        } else {
            (0..to).for_each(|at| self.gather(at, SetCounts { from, to }, frame));
            self.sets.truncate(to);
            self.sets.shrink_to_fit();
        }
    }

    /// Makes set `at` from the sets that its rows were in before.
    fn gather(&mut self, at: usize, counts: SetCounts, frame: ScoreFrame) {
        let SetCounts { from, to } = counts;
        // A hash is scaled to a number of sets, so set `at` of `to` covers these of `from`.
        let mut set = Set::default();
        for overlapping in at * from / to..=((at + 1) * from - 1) / to {
            let held = self.sets[overlapping];
            let known = (0..WAYS).map(|way| held.entry(way)).filter(|&entry| entry != 0);
            known.for_each(|entry| set.put(entry, frame));
        }
        self.sets[at] = set;
    }

    /// Returns the score of the row of `hash`, 0 when it is not remembered.
    #[inline]
    pub(crate) fn get(&self, hash: u64, frame: ScoreFrame) -> u16 {
        // A table without sets remembers nothing.
        match self.sets.get(self.set_of(hash)) {
            Some(set) => {
                let way = set.find(tag(hash));
                way.map_or(0, |way| frame.score((set.entry(way) & CODE_MASK) as u8))
            }
            None => 0,
        }
    }

    /// Reads where the score of `hash` would be, and returns something of it.
    #[inline]
    pub(crate) fn first_word(&self, hash: u64) -> u16 {
        // A table without sets has nothing to read.
        match self.sets.get(self.set_of(hash)) {
            Some(set) => set.lower[0],
            None => 0,
        }
    }

    /// Remembers `score`; the lowest of the set is forgotten for it.
    #[inline]
    pub(crate) fn put(&mut self, hash: u64, score: u16, frame: ScoreFrame) {
        let at = self.set_of(hash);
        let Some(set) = self.sets.get_mut(at) else { return };
        // Rounded by chance: small credits would otherwise never add up across evictions.
        let code = frame.code(score, self.rng.next_u64() as u32);
        let entry = (tag(hash) << ScoreFrame::CODE_BITS) | u32::from(code);
        // 0 says "empty"; the next code is as good.
        set.put(entry.max(1), frame);
    }

    #[inline]
    fn set_of(&self, hash: u64) -> usize {
        (((hash & 0xFFFF_FFFF) * self.sets.len() as u64) >> 32) as usize
    }
}

#[inline]
fn tag(hash: u64) -> u32 {
    // The other half of the hash than the set's number: rows of one set differ in it.
    (hash >> (64 - TAG_BITS)) as u32
}

#[cfg(test)]
mod tests {
    use tierbed_core::env::mix64;

    use super::*;

    /// A score that is kept exactly.
    fn score(step: u16) -> u16 {
        1024 + 32 * step
    }

    #[test]
    fn the_lowest_of_a_set_is_forgotten_first() {
        let frame = ScoreFrame::around(10);
        let mut table = ScoreTable::default();
        assert_eq!(table.get(5, frame), 0);
        table.resize(8);
        for row in 1..=8 {
            table.put(mix64(row), score(10 + row as u16), frame);
        }
        table.put(mix64(3), score(50), frame);
        table.put(mix64(9), score(5), frame);
        let scores: Vec<u16> = (1..=9).map(|row| table.get(mix64(row), frame)).collect();
        let steps = [12, 50, 14, 15, 16, 17, 18, 5].map(score);
        assert_eq!(scores, [&[0][..], &steps].concat());
    }

    #[test]
    fn scores_outlive_a_change_of_size() {
        let frame = ScoreFrame::around(10);
        let mut table = ScoreTable::default();
        table.resize(8000);
        let score = |row: u64| score((row / 8) as u16);
        (1..=1000).for_each(|row| table.put(mix64(row), score(row), frame));
        let known = |table: &ScoreTable, from| {
            (from..=1000).filter(|&row| table.get(mix64(row), frame) == score(row)).count()
        };
        for entries in [9000, 5000, 7777] {
            table.refit(entries, frame);
            assert!(known(&table, 1) >= 960, "{entries}: {}", known(&table, 1));
        }
        // With less room the highest stay.
        table.refit(800, frame);
        assert!(known(&table, 600) >= 350, "{}", known(&table, 600));
        table.refit(0, frame);
        table.refit(80, frame);
        assert_eq!(known(&table, 1), 0);
    }

    /// In place is as good as beside: every set is made of whole old ones.
    #[test]
    fn a_change_of_size_reads_what_it_has_not_overwritten() {
        let frame = ScoreFrame::around(10);
        for (from, to) in [(100, 101), (100, 99), (64, 1000), (1000, 64), (7, 7), (1, 30), (30, 1)]
        {
            let mut table = ScoreTable::default();
            table.resize(from * WAYS);
            let rows = 0..6 * from as u64;
            rows.clone().for_each(|row| table.put(mix64(row), score((row % 20) as u16), frame));
            let old = table.clone();
            table.refit(to * WAYS, frame);
            assert_eq!(table.sets.len(), to);
            for (at, set) in table.sets.iter().enumerate() {
                let mut expected = Set::default();
                for held in &old.sets[at * from / to..=((at + 1) * from - 1) / to] {
                    let known = (0..WAYS).map(|way| held.entry(way)).filter(|&entry| entry != 0);
                    known.for_each(|entry| expected.put(entry, frame));
                }
                assert!((0..WAYS).all(|way| set.entry(way) == expected.entry(way)), "{from}, {to}");
            }
        }
    }

    #[test]
    fn few_rows_that_were_never_here_are_taken_for_others() {
        let frame = ScoreFrame::around(127);
        let mut table = ScoreTable::default();
        table.resize(8000);
        (0..20_000).for_each(|row| table.put(mix64(row), 127 << 8, frame));
        let strangers = (1 << 30)..(1 << 30) + 100_000;
        let taken = strangers.filter(|&row| table.get(mix64(row), frame) != 0).count();
        assert!((100..300).contains(&taken), "{taken} of 100,000");
    }

    /// The oracle looks at one entry after the other.
    #[test]
    fn all_entries_of_a_set_at_once_are_as_good_as_one_by_one() {
        let mut rng = SplitMix64::new(4);
        for round in 0..5000 {
            let frame = ScoreFrame::around(rng.next_u64() as u8);
            let mut set = Set::default();
            // Few tags, so that they meet, and some entries that stay empty.
            let draw = |rng: &mut SplitMix64| (rng.below(6) as u32 * 0x1F3) % (1 << TAG_BITS);
            for way in (0..WAYS).filter(|way| way % 7 != round % 7) {
                let code = rng.below(200) as u32;
                set.set_entry(way, (draw(&mut rng) << ScoreFrame::CODE_BITS) | code);
            }
            let tag = draw(&mut rng);
            let mut ways = 0..WAYS;
            let is_it = |way: &usize| {
                set.entry(*way) >> ScoreFrame::CODE_BITS == tag && set.entry(*way) != 0
            };
            assert_eq!(set.find(tag), ways.find(is_it));
            let order = |way: &usize| match set.entry(*way) {
                0 => 0,
                entry => 1 + u16::from(frame.order((entry & CODE_MASK) as u8)),
            };
            assert_eq!(Some(set.lowest(frame)), (0..WAYS).min_by_key(order));
        }
    }

    #[test]
    fn bytes_are_those_it_says() {
        for entries in [0, 1, 7, 8, 5000] {
            let mut table = ScoreTable::default();
            table.resize(entries);
            assert_eq!(size_of_val(&*table.sets) as u64, ScoreTable::bytes_for(entries as u64));
        }
    }
}
