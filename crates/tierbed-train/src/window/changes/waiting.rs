//! Rows noted and not yet in a set: one bit each, joined to the set many at a time.
//!
//! A write brings few of the rows of a set. To find the place of each by itself costs far more than
//! to set a bit. Tables whose bits would not fit have their rows in a list, which is sorted.

use std::collections::BTreeMap;

use roaring::{RoaringBitmap, RoaringTreemap};
use tierbed_core::{RowId, RowKey, RowWrite, TableId};

use super::super::changes_file::Rows;

/// Most rows that wait.
const ROWS_MAX: u64 = 1 << 20;
/// Most rows in the list.
const LISTED_MAX: u64 = 1 << 15;
/// One part in so many of the memory is for the list.
const LIST_SHARE: u64 = 8;
/// Bytes that a set may grow by with a row: the first of its 65,536 that joins.
const JOINED_BYTES: u64 = 12;
/// Words that become a bitmap at once: they are of rows with the same upper 32 bits.
const PIECE_WORDS: usize = 1 << 16;

/// Memory that rows have until they join a set, and the set then.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WaitingRoom {
    /// Of what waits; 0: a list of one row.
    pub(super) waiting_bytes: u64,
    /// What sets may grow by.
    pub(super) set_bytes: u64,
}

/// Rows that wait, each once or several times.
#[derive(Debug)]
pub(super) struct WaitingRows {
    /// By table, bit `row`.
    bits: BTreeMap<u32, Vec<u64>>,
    words: usize,
    words_max: usize,
    /// Rows whose bits do not fit.
    listed: Vec<RowKey>,
    listed_max: usize,
    /// Bits that are set.
    fresh: usize,
    fresh_max: usize,
}

impl Default for WaitingRows {
    fn default() -> Self {
        Self::within(WaitingRoom::default())
    }
}

impl WaitingRows {
    pub(super) fn within(room: WaitingRoom) -> Self {
        let WaitingRoom { waiting_bytes, set_bytes } = room;
        let key_bytes = size_of::<RowKey>() as u64;
        let listed_max = (waiting_bytes / LIST_SHARE / key_bytes).clamp(1, LISTED_MAX);
        let words_max = waiting_bytes.saturating_sub(listed_max * key_bytes) / 8;
        Self {
            bits: BTreeMap::new(),
            words: 0,
            words_max: usize::try_from(words_max).unwrap_or(usize::MAX),
            listed: Vec::with_capacity(listed_max as usize),
            listed_max: listed_max as usize,
            fresh: 0,
            fresh_max: (set_bytes / JOINED_BYTES).clamp(1, ROWS_MAX) as usize,
        }
    }

    /// Returns how many rows may come before those that wait are taken.
    pub(super) fn room(&self) -> usize {
        (self.listed_max - self.listed.len()).min(self.fresh_max - self.fresh)
    }

    /// Takes rows in order, for which there is room.
    pub(super) fn note(&mut self, rows: &[RowWrite<'_>]) {
        assert!(rows.len() <= self.room(), "{} rows, room for {}", rows.len(), self.room());
        for same in rows.chunk_by(|a, b| a.key.table == b.key.table) {
            let Some(last) = same.last() else { continue };
            self.reach(last.key);
            let words = self.bits.entry(last.key.table.0).or_default();
            for row in same {
                let RowId(number) = row.key.row;
                let bit = 1 << (number % 64);
                match words.get_mut((number / 64) as usize) {
                    Some(word) => {
                        self.fresh += usize::from(*word & bit == 0);
                        *word |= bit;
                    }
                    None => self.listed.push(row.key),
                }
            }
        }
    }

    // Makes room for the bit of `key`, if there is any.
    fn reach(&mut self, key: RowKey) {
        let words = self.bits.entry(key.table.0).or_default();
        let (Ok(at), had) = (usize::try_from(key.row.0 / 64), words.len()) else { return };
        if at < had {
            return;
        }
        // Rows come in any order, and tables grow: each move makes room for some more.
        let (least, most) = (at + 1 - had, self.words_max - self.words);
        if least <= most {
            let more = least.max(had / 8).min(most);
            words.reserve_exact(more);
            words.resize(had + more, 0);
            self.words += more;
        }
    }

    /// Takes all rows; none waits then.
    pub(super) fn take(&mut self) -> Rows {
        let mut taken = Rows::new();
        if self.fresh > 0 {
            taken = self.bits.iter().map(|(&table, words)| (table, rows_of(0, words))).collect();
            self.bits.values_mut().for_each(|words| words.fill(0));
            self.fresh = 0;
        }
        self.listed.sort_unstable();
        for same in self.listed.chunk_by(|a, b| a.table == b.table) {
            let Some(first) = same.first() else { continue };
            let rows = same.iter().map(|key| key.row.0).collect::<RoaringTreemap>();
            *taken.entry(first.table.0).or_default() |= rows;
        }
        self.listed.clear();
        taken.retain(|_, rows| !rows.is_empty());
        taken
    }

    /// Returns the tables that had rows.
    pub(super) fn tables(&self) -> impl Iterator<Item = TableId> + '_ {
        self.bits.keys().map(|&table| TableId(table))
    }

    /// Returns the rows of `table` that wait.
    pub(super) fn rows(&self, table: TableId) -> RoaringTreemap {
        let listed = self.listed.iter().filter(|key| key.table == table);
        let mut rows: RoaringTreemap = listed.map(|key| key.row.0).collect();
        if let Some(words) = self.bits.get(&table.0).filter(|_| self.fresh > 0) {
            rows |= rows_of(0, words);
        }
        rows
    }
}

// Returns the numbers of the bits that are set; the first bit is that of row `first`, a multiple of
// the rows of a piece.
fn rows_of(first: u64, words: &[u64]) -> RoaringTreemap {
    let mut rows = RoaringTreemap::new();
    let firsts = (first..).step_by(PIECE_WORDS * u64::BITS as usize);
    for (first, piece) in firsts.zip(words.chunks(PIECE_WORDS)) {
        // Words are little-endian, as all that is kept: bit `row` is the same of bytes.
        let piece = RoaringBitmap::from_lsb0_bytes(first as u32, bytemuck::cast_slice(piece));
        if !piece.is_empty() {
            rows |= RoaringTreemap::from_bitmaps([((first >> 32) as u32, piece)]);
        }
    }
    rows
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a test that panics has failed, as it should")]
mod tests {
    use std::collections::BTreeSet;

    use tierbed_core::env::SplitMix64;

    use super::*;

    fn note(waiting: &mut WaitingRows, keys: &BTreeSet<RowKey>) {
        let rows = keys.iter().map(|&key| RowWrite { key, record: &[] });
        waiting.note(&rows.collect::<Vec<_>>());
    }

    /// Notes rows of three tables, of `row_count` rows each, until there is no room.
    fn check(room: WaitingRoom, row_count: u64) -> WaitingRows {
        let (mut waiting, mut rng) = (WaitingRows::within(room), SplitMix64::new(3));
        for _ in 0..3 {
            let mut wanted = BTreeMap::<u32, BTreeSet<u64>>::new();
            for _ in 0..200 {
                let count = waiting.room().min(50);
                let keys = (0..count).map(|_| {
                    RowKey::new(TableId(rng.below(3) as u32), RowId(rng.below(row_count)))
                });
                let keys: BTreeSet<RowKey> = keys.collect();
                note(&mut waiting, &keys);
                for key in keys {
                    wanted.entry(key.table.0).or_default().insert(key.row.0);
                }
            }
            for (&table, rows) in &wanted {
                assert!(waiting.rows(TableId(table)).iter().eq(rows.iter().copied()));
                assert!(waiting.tables().any(|known| known.0 == table));
            }
            let taken = waiting.take();
            assert!(taken.keys().eq(wanted.keys()));
            assert!(taken
                .iter()
                .all(|(table, rows)| rows.iter().eq(wanted[table].iter().copied())));
            assert!(waiting.take().is_empty() && waiting.rows(TableId(0)).is_empty());
        }
        assert!(waiting.words <= waiting.words_max);
        waiting
    }

    #[test]
    fn rows_come_once_whether_they_have_bits_or_are_listed() {
        let room = WaitingRoom { waiting_bytes: 1 << 20, set_bytes: 1 << 20 };
        assert!(check(room, 1 << 20).words > 3 << 13);
        // More rows than bits, and numbers of more than 32 bits.
        let little = WaitingRoom { waiting_bytes: 16 << 10, ..room };
        check(little, 200_000);
        check(little, 5 << 32);
    }

    #[test]
    fn there_is_room_for_a_row_in_no_memory() {
        let waiting = check(WaitingRoom::default(), 1000);
        assert_eq!((waiting.room(), waiting.words), (1, 0));
    }

    #[test]
    fn bits_keep_their_numbers_beyond_a_piece_and_beyond_32_bits() {
        let piece_rows = 64 * PIECE_WORDS as u64;
        let mut words = vec![0u64; PIECE_WORDS + 1];
        (words[0], words[PIECE_WORDS]) = (1 << 5, 1 << 63);
        assert!(rows_of(0, &words).iter().eq([5, piece_rows + 63]));
        let first = (1 << 32) - piece_rows;
        assert!(rows_of(first, &words).iter().eq([first + 5, (1 << 32) + 63]));
    }
}
