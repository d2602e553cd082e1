//! Packed columns of a table's entries: rows as a sorted list, next uses by what is expected.
//!
//! Entries are in row order. So row ids are a rising sequence, packed in about
//! `2 + log2(rows / entries)` bits each (Elias-Fano: low bits as they are, high bits as gaps in
//! unary). And an entry's place among the entries of the next window is nearly its place among
//! those of this one, scaled: only the difference is stored.
//! Source: Elias, J. ACM 1974; Fano, MIT 1971.

use tierbed_core::{Error, Result};

use super::format::BLOCK_TABLE_BYTES;
use crate::planned::bits::{packed_bytes, width_of, BitSlice, BitWriter};

/// Shapes of a table's columns in a window block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Columns {
    pub(crate) count: u32,
    /// Bits of the low part of a row, next window, difference, mapping.
    pub(crate) widths: [u8; 4],
    /// Bytes of the high parts of rows.
    pub(crate) high_bytes: u32,
    /// Least difference, in two's complement.
    pub(crate) bias: u32,
}

impl Columns {
    pub(crate) fn encode(&self) -> [u8; BLOCK_TABLE_BYTES] {
        let mut bytes = [0; BLOCK_TABLE_BYTES];
        let words = [self.count, u32::from_le_bytes(self.widths), self.high_bytes, self.bias];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(crate) fn decode(bytes: [u8; BLOCK_TABLE_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        Self {
            count: u32::from_le_bytes([a, b, c, d]),
            widths: [e, f, g, h],
            high_bytes: u32::from_le_bytes([i, j, k, l]),
            bias: u32::from_le_bytes([m, n, o, p]),
        }
    }

    /// Returns the bytes of the low parts, high parts, next windows and differences.
    pub(crate) fn section_bytes(&self) -> [usize; 4] {
        let [low, window, difference, _] = self.widths;
        let packed = |width: u8| packed_bytes(self.count as usize, u32::from(width));
        [packed(low), self.high_bytes as usize, packed(window), packed(difference)]
    }
}

/// Returns the bits of an entry number in a table of `count` entries.
pub(crate) fn mapping_width(count: usize) -> u8 {
    width_of((count as u64).saturating_sub(1)) as u8
}

/// Where the entries of each table begin in each window: first entry of table 0, of table 1, ...,
/// all entries, window after window.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Firsts {
    firsts: Vec<u32>,
    stride: usize,
}

impl Firsts {
    /// Adds up `counts`, `[K * T]`.
    pub(crate) fn new(counts: &[u32], table_count: usize) -> Self {
        assert!(counts.len().is_multiple_of(table_count.max(1)), "a window lacks a table");
        let mut firsts = Vec::with_capacity(counts.len() + counts.len() / table_count.max(1));
        for window in counts.chunks_exact(table_count.max(1)) {
            let mut first = 0u32;
            firsts.push(first);
            for &count in window {
                first = first.saturating_add(count);
                firsts.push(first);
            }
        }
        Self { firsts, stride: table_count + 1 }
    }

    /// Returns first entry and number of entries of `table` in `window`.
    #[inline]
    pub(crate) fn of(&self, window: usize, table: usize) -> Option<(u32, u32)> {
        let at = window.checked_mul(self.stride)? + table;
        let &[first, end] = self.firsts.get(at..)?.first_chunk::<2>()?;
        Some((first, end - first))
    }
}

/// The first entries of one table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableFirsts<'a> {
    pub(crate) firsts: &'a Firsts,
    pub(crate) table: usize,
}

impl TableFirsts<'_> {
    #[inline]
    fn of(self, window: usize) -> Option<(u32, u32)> {
        self.firsts.of(window, self.table)
    }
}

/// The entries of one table in one window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableUses<'a> {
    /// Row of each entry, ascending.
    pub(crate) rows: &'a [u64],
    /// Next use of each: window in the high 32 bits and entry, counted over all tables, in the low
    /// ones.
    pub(crate) next: &'a [u64],
}

/// Guesses places in another window from places in one of `count` entries.
#[derive(Debug, Clone, Copy)]
struct Guess {
    scale: u64,
}

impl Guess {
    fn new(count: u32) -> Self {
        Self { scale: (1 << 32) / u64::from(count.max(1)) }
    }

    /// Returns where entry `at` is expected among `count` entries.
    #[inline]
    fn place(self, at: u32, count: u32) -> u32 {
        // At most 2^32, then 2^16, then 2^48.
        let share = (u64::from(at) * self.scale) >> 16;
        ((share * u64::from(count)) >> 16) as u32
    }
}

/// Packs the columns of one table's entries behind `bytes`.
///
/// # Errors
/// `Corruption` for a next use that is none.
///
/// # Panics
/// When rows and next uses are not equally many.
pub(crate) fn encode_columns(
    uses: TableUses<'_>,
    firsts: TableFirsts<'_>,
    bytes: &mut Vec<u8>,
) -> Result<Columns> {
    let TableUses { rows, next } = uses;
    assert_eq!(rows.len(), next.len(), "every row has a next use");
    debug_assert!(rows.is_sorted_by(|a, b| a < b), "rows ascend");
    let count = rows.len() as u32;
    let guess = Guess::new(count);
    let mut differences = Vec::with_capacity(rows.len());
    let (mut windows, mut least, mut most) = (0, 0i32, 0i32);
    for (at, &next) in (0u32..).zip(next) {
        let window = next >> 32;
        let (first, next_count) = firsts
            .of(window as usize)
            .ok_or_else(|| Error::corruption("an entry's next use is in no window"))?;
        // Popularity lasts from window to window, so an entry's neighbours come along: its place is
        // nearly its old one, scaled, and the difference has few bits.
        let place = (next as u32).wrapping_sub(first);
        let difference = place.wrapping_sub(guess.place(at, next_count)) as i32;
        windows |= window;
        (least, most) = (least.min(difference), most.max(difference));
        differences.push(difference);
    }
    // Low bits of the mean gap: then the high parts rise by about one per row, and their gaps take
    // two bits each in unary.
    let last = rows.last().copied().unwrap_or(0);
    let low = width_of(last / u64::from(count.max(1)));
    let window_width = width_of(windows);
    let difference_width = width_of(u64::from(most.wrapping_sub(least) as u32));
    let mut writer = BitWriter::new(bytes);
    let mask = (1u64 << low) - 1;
    rows.iter().for_each(|row| writer.push(row & mask, low));
    writer.finish();
    let high_bytes = encode_high(rows, low, bytes);
    let mut writer = BitWriter::new(bytes);
    next.iter().for_each(|next| writer.push(next >> 32, window_width));
    writer.finish();
    let mut writer = BitWriter::new(bytes);
    for difference in &differences {
        writer.push(u64::from(difference.wrapping_sub(least) as u32), difference_width);
    }
    writer.finish();
    Ok(Columns {
        count,
        widths: [low as u8, window_width as u8, difference_width as u8, mapping_width(rows.len())],
        high_bytes,
        bias: least as u32,
    })
}

// Bit `(row >> low) + at` is set for the row of entry `at`: adding `at` keeps rows with one high
// part apart. Whole words, so that a reader finds the next set bit by counting zeros.
fn encode_high(rows: &[u64], low: u32, bytes: &mut Vec<u8>) -> u32 {
    let start = bytes.len();
    let bits = rows.last().map_or(0, |last| (last >> low) as usize + rows.len());
    let (mut word, mut base) = (0u64, 0u64);
    for (at, row) in (0u64..).zip(rows) {
        let bit = (row >> low) + at;
        while bit >= base + 64 {
            bytes.extend(word.to_le_bytes());
            word = 0;
            base += 64;
        }
        word |= 1 << (bit - base);
    }
    if bits > 0 {
        bytes.extend(word.to_le_bytes());
    }
    (bytes.len() - start) as u32
}

/// The row ids of a table's entries, ascending.
#[derive(Debug, Clone)]
pub(crate) struct RowIds<'a> {
    low: BitSlice<'a>,
    low_width: u32,
    high: &'a [[u8; 8]],
    word: u64,
    /// Bits before the word being read.
    base: u64,
    at: u64,
    count: u64,
}

impl<'a> RowIds<'a> {
    pub(crate) fn new(low: BitSlice<'a>, high: &'a [u8], columns: &Columns) -> Self {
        Self {
            low,
            low_width: u32::from(columns.widths[0]).min(u64::BITS - 1),
            high: high.as_chunks::<8>().0,
            word: 0,
            base: 0u64.wrapping_sub(64),
            at: 0,
            count: u64::from(columns.count),
        }
    }

    /// Returns the place of `row` among the entries, and passes over those before it: what is found
    /// next must not be smaller.
    pub(crate) fn find(&mut self, row: u64) -> Option<u64> {
        self.pass_words_below(row >> self.low_width);
        loop {
            let mut ahead = self.clone();
            let next = ahead.next()?;
            if next >= row {
                return (next == row).then_some(self.at);
            }
            *self = ahead;
        }
    }

    // Passes over words all of whose rows have smaller high parts: as many zeros are before a row's
    // bit as its high part says, so a word is passed by counting its bits.
    fn pass_words_below(&mut self, high: u64) {
        loop {
            let after = self.at + u64::from(self.word.count_ones());
            if self.base.wrapping_add(64).wrapping_sub(after) >= high {
                return;
            }
            let Some((word, rest)) = self.high.split_first() else { return };
            self.high = rest;
            self.word = u64::from_le_bytes(*word);
            self.base = self.base.wrapping_add(64);
            self.at = after;
        }
    }
}

impl Iterator for RowIds<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        if self.at == self.count {
            return None;
        }
        while self.word == 0 {
            let (word, rest) = self.high.split_first()?;
            self.high = rest;
            self.word = u64::from_le_bytes(*word);
            self.base = self.base.wrapping_add(64);
        }
        let bit = self.base + u64::from(self.word.trailing_zeros());
        self.word &= self.word - 1;
        let high = bit.wrapping_sub(self.at) << self.low_width;
        let low = self.low.get(self.at as usize)?;
        self.at += 1;
        Some(high | low)
    }
}

/// The next uses of a table's entries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NextUses<'a> {
    windows: BitSlice<'a>,
    differences: BitSlice<'a>,
    firsts: TableFirsts<'a>,
    guess: Guess,
    bias: u32,
}

impl<'a> NextUses<'a> {
    pub(crate) fn new(
        windows: BitSlice<'a>,
        differences: BitSlice<'a>,
        firsts: TableFirsts<'a>,
        columns: &Columns,
    ) -> Self {
        let guess = Guess::new(columns.count);
        Self { windows, differences, firsts, guess, bias: columns.bias }
    }

    /// Returns window and entry of the next use of the table's entry `at`; `None` past the end,
    /// or for a window that is none.
    #[inline(always)]
    pub(crate) fn get(&self, at: usize) -> Option<(usize, u32)> {
        let window = self.windows.get(at)? as usize;
        let (first, count) = self.firsts.of(window)?;
        let difference = (self.differences.get(at)? as u32).wrapping_add(self.bias);
        let place = self.guess.place(at as u32, count).wrapping_add(difference);
        Some((window, first.wrapping_add(place)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planned::bits::PAD_BYTES;
    use proptest::prelude::*;

    fn ends_of(columns: &Columns) -> [usize; 4] {
        let mut at = 0;
        columns.section_bytes().map(|len| {
            at += len;
            at
        })
    }

    fn row_ids(columns: Columns, bytes: &[u8]) -> RowIds<'_> {
        let [low_end, high_end, ..] = ends_of(&columns);
        let low = BitSlice::new(bytes, 0, columns.widths[0].into());
        RowIds::new(low, bytes.get(low_end..high_end).unwrap_or(&[]), &columns)
    }

    fn read(
        columns: Columns,
        bytes: &[u8],
        firsts: TableFirsts<'_>,
    ) -> (Vec<u64>, Vec<Option<(usize, u32)>>) {
        let columns = Columns::decode(columns.encode());
        let ends = ends_of(&columns);
        let slice =
            |at: usize, width: usize| BitSlice::new(bytes, 8 * at, columns.widths[width].into());
        let rows = row_ids(columns, bytes);
        let next = NextUses::new(slice(ends[1], 1), slice(ends[2], 2), firsts, &columns);
        let count = (columns.count as usize).min(1000);
        (rows.take(1000).collect(), (0..count).map(|at| next.get(at)).collect())
    }

    proptest! {
        #[test]
        fn columns_come_back(
            rows in proptest::collection::btree_set(0u64..1 << 45, 0..60),
            uses in proptest::collection::vec((0usize..3, any::<u32>()), 60),
            counts in proptest::collection::vec(1u32..1 << 31, 3),
            before in 0u32..1000,
        ) {
            // Table 1 of two.
            let firsts: Vec<u32> = counts.iter().flat_map(|&count| [before, count]).collect();
            let firsts = Firsts::new(&firsts, 2);
            let rows: Vec<u64> = rows.into_iter().collect();
            let uses: Vec<(usize, u32)> = uses
                .iter()
                .take(rows.len())
                .map(|&(window, at)| (window, before + at % counts[window]))
                .collect();
            let next: Vec<u64> =
                uses.iter().map(|&(window, at)| (window as u64) << 32 | u64::from(at)).collect();
            let mut bytes = Vec::new();
            let firsts = TableFirsts { firsts: &firsts, table: 1 };
            let uses_of_rows = TableUses { rows: &rows, next: &next };
            let columns = encode_columns(uses_of_rows, firsts, &mut bytes).unwrap();
            prop_assert_eq!(bytes.len(), columns.section_bytes().iter().sum::<usize>());
            bytes.extend([0xFF; PAD_BYTES]);
            let (found_rows, found_uses) = read(columns, &bytes, firsts);
            prop_assert_eq!(&found_rows, &rows);
            let mut ids = row_ids(columns, &bytes);
            for wanted in (0u64..70).chain(rows.iter().flat_map(|&row| [row, row + 1])) {
                let ids = if wanted < 70 { &mut row_ids(columns, &bytes) } else { &mut ids };
                let place = rows.binary_search(&wanted).ok().map(|place| place as u64);
                prop_assert_eq!(ids.find(wanted), place, "row {}", wanted);
            }
            prop_assert_eq!(found_uses, uses.into_iter().map(Some).collect::<Vec<_>>());
        }

        #[test]
        fn random_bytes_never_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            head in any::<[u8; BLOCK_TABLE_BYTES]>(),
            mut counts in proptest::collection::vec(any::<u32>(), 0..6),
            table in 0usize..4,
        ) {
            let mut columns = Columns::decode(head);
            columns.high_bytes %= 400;
            columns.count %= 5000;
            counts.truncate(counts.len() / 2 * 2);
            let firsts = &Firsts::new(&counts, 2);
            let _ = read(columns, &bytes, TableFirsts { firsts, table });
            let mut ids = row_ids(columns, &bytes);
            let _ = (0..70).map(|row| ids.find(row << 40 | row)).max();
        }
    }
}
