//! Stretches of the words of batches, and the numbers of their distinct ids.
//!
//! A batch is its checksum, its bounds, and its ids. Runs may begin and end anywhere in it, so that
//! none is longer than memory allows.

#![expect(clippy::indexing_slicing, reason = "positions are those of the run's own words")]

use tierbed_core::Result;
use tierbed_vocab::mix;

/// Memory of a word of a run: itself, its hash and position, its number.
pub(super) const RUN_BYTES_PER_WORD: u64 = 8 + 16 + 8;

/// A run that is being gathered.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) is_stepped: bool,
    /// Words of batches; numbers replace ids, once they are numbered.
    words: Vec<i64>,
    pieces: Vec<Piece>,
    order: Vec<(u64, u32)>,
    firsts: Vec<FirstUse>,
}

/// Words of one kind: ids of an open table, or others.
#[derive(Debug, Clone, Copy)]
struct Piece {
    table: Option<u32>,
    len: usize,
}

/// One distinct id: position of its first use, and where its uses begin in the order of hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct FirstUse {
    position: u32,
    order_at: u32,
}

/// What is known of a run that was written.
#[derive(Debug, Clone, Copy)]
pub(super) struct WrittenRun {
    pub(super) at_bytes: u64,
    pub(super) word_count: usize,
    pub(super) crc32c: u32,
    /// Its distinct ids of all tables.
    pub(super) number_count: u32,
    pub(super) is_stepped: bool,
}

impl Run {
    pub(super) fn words(&self) -> &[i64] {
        &self.words
    }

    /// Adds words: ids of open table `table`, or others.
    pub(super) fn push(&mut self, table: Option<u32>, words: &[i64]) {
        self.words.extend_from_slice(words);
        self.pieces.push(Piece { table, len: words.len() });
    }

    /// Replaces the ids of `table` by numbers from `first_number` on, in the order in which ids
    /// come first; `sink` gets the hash of each. Returns the next number.
    pub(super) fn number(
        &mut self,
        table: u32,
        first_number: u32,
        sink: &mut dyn FnMut(u64, u32) -> Result<()>,
    ) -> Result<u32> {
        let Self { words, pieces, order, firsts, .. } = self;
        order.clear();
        let mut first = 0;
        for piece in pieces.iter() {
            let range = first..first + piece.len;
            first = range.end;
            if piece.table == Some(table) {
                let positions = range.start as u32..;
                order.extend(words[range].iter().zip(positions).map(|(&id, at)| (mix(id), at)));
            }
        }
        order.sort_unstable();
        firsts.clear();
        let mut order_at = 0;
        for same in order.chunk_by(|a, b| a.0 == b.0) {
            firsts.push(FirstUse { position: same[0].1, order_at });
            order_at += same.len() as u32;
        }
        firsts.sort_unstable();
        let mut number = first_number;
        for first in firsts.iter() {
            let uses = &order[first.order_at as usize..];
            let hash = uses[0].0;
            for (_, at) in uses.iter().take_while(|(other, _)| *other == hash) {
                words[*at as usize] = i64::from(number);
            }
            sink(hash, number)?;
            number += 1;
        }
        Ok(number)
    }

    /// Empties it for the next words.
    pub(super) fn clear(&mut self) {
        self.words.clear();
        self.pieces.clear();
    }
}
