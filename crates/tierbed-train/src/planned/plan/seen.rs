//! Set of the rows that a window uses: a bit per row, or a map where bits do not fit the memory.
//!
//! Bits give the rows in ascending order without sorting, and the number of a row among them by
//! counting bits: `rank` of its word plus the bits before it.

#![expect(
    clippy::indexing_slicing,
    reason = "ids were checked to be rows of the table, and were noted"
)]

use hashbrown::HashMap;

/// Rows per word of bits.
const WORD_ROWS: u64 = 64;

/// The distinct rows of one table in the window being gathered.
#[derive(Debug)]
pub(crate) struct Seen {
    rows: Rows,
    count: usize,
}

#[derive(Debug)]
enum Rows {
    Bits(Bits),
    /// For tables whose bits do not fit the memory; the value is the row's number.
    Map(HashMap<u64, u32>),
}

#[derive(Debug)]
struct Bits {
    words: Vec<u64>,
    /// Rows before each word, once they are numbered.
    ranks: Vec<u32>,
    /// A bit per word that is not zero.
    filled: Vec<u64>,
}

impl Bits {
    fn new(row_count: u64) -> Self {
        let word_count = row_count.div_ceil(WORD_ROWS) as usize;
        Self {
            words: vec![0; word_count],
            ranks: vec![0; word_count],
            filled: vec![0; word_count.div_ceil(64)],
        }
    }

    fn grow(&mut self, row_count: u64) {
        let word_count = row_count.div_ceil(WORD_ROWS) as usize;
        if word_count > self.words.len() {
            self.words.resize(word_count, 0);
            self.ranks.resize(word_count, 0);
            self.filled.resize(word_count.div_ceil(64), 0);
        }
    }

    #[inline]
    fn note(&mut self, row: u64) -> usize {
        let at = (row / WORD_ROWS) as usize;
        let word = &mut self.words[at];
        let (before, bit) = (*word, 1u64 << (row % WORD_ROWS));
        *word = before | bit;
        if before == 0 {
            self.filled[at / 64] |= 1 << (at % 64);
        }
        usize::from(before & bit == 0)
    }

    fn number(&mut self, rows: &mut Vec<u64>) {
        let mut rank = 0u32;
        for (block, &filled) in self.filled.iter().enumerate() {
            for bit in ones(filled) {
                let at = block * 64 + bit as usize;
                let word = self.words[at];
                self.ranks[at] = rank;
                rank += word.count_ones();
                rows.extend(ones(word).map(|bit| at as u64 * WORD_ROWS + bit));
            }
        }
    }

    #[inline]
    fn number_of(&self, row: u64) -> u32 {
        let at = (row / WORD_ROWS) as usize;
        let before = (1u64 << (row % WORD_ROWS)) - 1;
        debug_assert!(self.words[at] & (before + 1) != 0, "row {row} was never noted");
        self.ranks[at] + (self.words[at] & before).count_ones()
    }

    fn clear(&mut self) {
        for (block, filled) in self.filled.iter_mut().enumerate() {
            for bit in ones(*filled) {
                self.words[block * 64 + bit as usize] = 0;
            }
            *filled = 0;
        }
    }
}

// The positions of the ones of a word, ascending.
fn ones(mut word: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let at = word.trailing_zeros();
        word &= word.wrapping_sub(1);
        (at < u64::BITS).then_some(u64::from(at))
    })
}

impl Seen {
    /// Returns the memory of bits for `row_count` rows.
    fn bits_bytes(row_count: u64) -> u64 {
        let words = row_count.div_ceil(WORD_ROWS);
        12 * words + 8 * words.div_ceil(64)
    }

    /// Returns what [`of_tables`](Self::of_tables) leaves of `memory_bytes`.
    pub(crate) fn left_bytes(row_counts: &[u64], memory_bytes: u64) -> u64 {
        let mut bytes: Vec<u64> = row_counts.iter().map(|&rows| Self::bits_bytes(rows)).collect();
        bytes.sort_unstable();
        bytes
            .into_iter()
            .fold((memory_bytes, true), |(left, fits), bytes| match fits {
                true if bytes <= left => (left - bytes, true),
                _ => (left, false),
            })
            .0
    }

    /// Makes one per table: bits for the smallest tables as far as `memory_bytes` reach.
    pub(crate) fn of_tables(row_counts: &[u64], memory_bytes: u64) -> Vec<Self> {
        let mut by_size: Vec<(u64, usize)> = row_counts.iter().copied().zip(0..).collect();
        by_size.sort_unstable();
        let (mut left, mut has_bits) = (memory_bytes, vec![false; by_size.len()]);
        for (row_count, at) in by_size {
            let bytes = Self::bits_bytes(row_count);
            if bytes > left {
                break;
            }
            left -= bytes;
            has_bits[at] = true;
        }
        let rows = |(&row_count, has_bits)| match has_bits {
            true => Rows::Bits(Bits::new(row_count)),
            false => Rows::Map(HashMap::new()),
        };
        let tables = row_counts.iter().zip(has_bits).map(rows);
        tables.map(|rows| Self { rows, count: 0 }).collect()
    }

    /// Makes the table as long as `row_count` rows. Bits give way to a map where they do not fit
    /// `left_bytes`, of which they take what they need.
    pub(crate) fn grow(&mut self, row_count: u64, left_bytes: &mut u64) {
        let Rows::Bits(bits) = &mut self.rows else { return };
        let have_bytes = Self::bits_bytes(WORD_ROWS * bits.words.len() as u64);
        let more_bytes = Self::bits_bytes(row_count).saturating_sub(have_bytes);
        if more_bytes <= *left_bytes {
            *left_bytes -= more_bytes;
            bits.grow(row_count);
            return;
        }
        *left_bytes += have_bytes;
        let mut rows = Vec::with_capacity(self.count);
        bits.number(&mut rows);
        self.rows = Rows::Map(rows.into_iter().zip(0..).collect());
    }

    /// Notes the rows `ids`, which are inside the table.
    pub(crate) fn note(&mut self, ids: &[i64]) {
        self.count += match &mut self.rows {
            Rows::Bits(bits) => ids.iter().map(|&id| bits.note(id as u64)).sum(),
            Rows::Map(rows) => {
                let before = rows.len();
                rows.extend(ids.iter().map(|&id| (id as u64, 0)));
                rows.len() - before
            }
        };
    }

    /// Returns the number of distinct rows noted.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Numbers the rows in ascending order and appends them to `rows`.
    pub(crate) fn number(&mut self, rows: &mut Vec<u64>) {
        let before = rows.len();
        match &mut self.rows {
            Rows::Bits(bits) => bits.number(rows),
            Rows::Map(numbers) => {
                rows.extend(numbers.keys());
                let sorted = &mut rows[before..];
                sorted.sort_unstable();
                for (number, row) in (0u32..).zip(sorted) {
                    numbers.insert(*row, number);
                }
            }
        }
        assert_eq!(rows.len() - before, self.count, "every distinct row has a number");
    }

    /// Calls `sink` with the number of each of `ids`, all noted and numbered.
    pub(crate) fn numbers(&self, ids: &[i64], mut sink: impl FnMut(u32)) {
        match &self.rows {
            Rows::Bits(bits) => ids.iter().for_each(|&id| sink(bits.number_of(id as u64))),
            Rows::Map(rows) => {
                ids.iter().for_each(|id| sink(rows[&(*id as u64)]));
            }
        }
    }

    /// Forgets all rows.
    pub(crate) fn clear(&mut self) {
        self.count = 0;
        match &mut self.rows {
            Rows::Bits(bits) => bits.clear(),
            Rows::Map(rows) => rows.clear(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn bits_and_map_number_as_a_sorted_set(
            rows in 1u64..9000,
            windows in proptest::collection::vec(
                proptest::collection::vec(any::<u32>(), 0..80),
                1..5,
            ),
        ) {
            // Those that grow in the middle of a window are bits, or become a map there.
            for (memory, begins_with, mut left_bytes) in
                [(0, rows, 0), (u64::MAX, rows, 0), (u64::MAX, 1, u64::MAX), (u64::MAX, 1, 0)]
            {
                let mut seen = Seen::of_tables(&[begins_with], memory).remove(0);
                for window in &windows {
                    let ids: Vec<i64> =
                        window.iter().map(|&id| (u64::from(id) % rows) as i64).collect();
                    let (before, behind) = ids.split_at(ids.len() / 2);
                    let longest = before.iter().max().map_or(begins_with, |&id| id as u64 + 1);
                    seen.grow(longest, &mut left_bytes);
                    seen.note(before);
                    seen.grow(rows, &mut left_bytes);
                    seen.note(behind);
                    let model: BTreeSet<u64> = ids.iter().map(|&id| id as u64).collect();
                    prop_assert_eq!(seen.count(), model.len());
                    let mut numbered = Vec::new();
                    seen.number(&mut numbered);
                    prop_assert_eq!(&numbered, &model.into_iter().collect::<Vec<_>>());
                    let mut found = Vec::new();
                    seen.numbers(&ids, |number| found.push(numbered[number as usize] as i64));
                    prop_assert_eq!(found, ids);
                    seen.clear();
                }
            }
        }
    }
}
