//! Batches that come one after the other, and the numbers of their distinct ids.

#![expect(clippy::indexing_slicing, reason = "positions are those of the run's own ids")]

use tierbed_core::checksum::crc32c;
use tierbed_core::{Bags, Error, Result, TableId};
use tierbed_vocab::mix;

/// Memory of an id of a run: itself, its hash and position, its number, and as it is written.
pub(super) const RUN_BYTES_PER_ID: u64 = 8 + 16 + 8 + 8;

/// A run that is being gathered.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) is_stepped: bool,
    /// Ids of all batches; numbers, once they are numbered.
    ids: Vec<i64>,
    /// Where features begin and the last one ends, counted from the batch's first id, `[N * (F +
    /// 1)]`.
    bounds: Vec<i64>,
    checksums: Vec<u32>,
    order: Vec<(u64, u32)>,
    firsts: Vec<FirstUse>,
    words: Vec<i64>,
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
    pub(super) fn is_empty(&self) -> bool {
        self.checksums.is_empty()
    }

    pub(super) fn id_count(&self) -> usize {
        self.ids.len()
    }

    /// Adds a batch, which training will know by `checksum`.
    pub(super) fn push(&mut self, bags: &Bags<'_>, checksum: u32) {
        self.ids.extend_from_slice(bags.indices);
        self.bounds.extend(bags.bounds());
        self.checksums.push(checksum);
    }

    /// Replaces the ids of `table` by numbers from `first_number` on, in the order in which ids
    /// come first; `sink` gets the hash of each. Features read `tables`, `[F]`. Returns the next
    /// number.
    pub(super) fn number(
        &mut self,
        table: TableId,
        tables: &[TableId],
        first_number: u32,
        sink: &mut dyn FnMut(u64, u32) -> Result<()>,
    ) -> Result<u32> {
        let Self { ids, bounds, order, firsts, .. } = self;
        order.clear();
        let mut first = 0;
        for bounds in bounds.chunks_exact(tables.len() + 1) {
            for (read, range) in tables.iter().zip(bounds.windows(2)) {
                if *read != table {
                    continue;
                }
                let range = first + range[0] as usize..first + range[1] as usize;
                let positions = range.start as u32..;
                order.extend(ids[range].iter().zip(positions).map(|(&id, at)| (mix(id), at)));
            }
            first += bounds[tables.len()] as usize;
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
                ids[*at as usize] = i64::from(number);
            }
            sink(hash, number)?;
            number += 1;
        }
        Ok(number)
    }

    /// Returns the run as words to be written: batches, then ids and numbers.
    pub(super) fn encode(&mut self, feature_count: usize) -> &[i64] {
        let words = &mut self.words;
        words.clear();
        words.push(self.checksums.len() as i64);
        let bounds = self.bounds.chunks_exact(feature_count + 1);
        for (checksum, bounds) in self.checksums.iter().zip(bounds) {
            words.push(i64::from(*checksum));
            words.extend_from_slice(bounds);
        }
        words.extend_from_slice(&self.ids);
        words
    }

    /// Empties it for the next batch.
    pub(super) fn clear(&mut self) {
        self.ids.clear();
        self.bounds.clear();
        self.checksums.clear();
    }
}

impl WrittenRun {
    /// Calls `sink` with the batches of a run that was read as `words`, and their checksums, where
    /// `row_of` knows the row of each number of an open table. Features read `tables`, and those
    /// that `is_open` names have numbers.
    ///
    /// # Errors
    /// `Corruption` when the words are not those that were written, and those of `sink`.
    pub(super) fn each_batch(
        &self,
        words: &mut [i64],
        is_open: &[bool],
        row_of: impl Fn(i64) -> i64,
        sink: &mut dyn FnMut(&Bags<'_>, u32) -> Result<()>,
    ) -> Result<()> {
        if crc32c(bytemuck::cast_slice(words)) != self.crc32c {
            return Err(lost_scratch());
        }
        let feature_count = is_open.len();
        let [batch_count, rest @ ..] = words else { return Err(lost_scratch()) };
        let (heads, mut ids) = rest.split_at_mut(*batch_count as usize * (feature_count + 2));
        for head in heads.chunks_exact(feature_count + 2) {
            let (checksum, offsets) = (head[0] as u32, &head[1..]);
            let (now, later) = ids.split_at_mut(offsets[feature_count] as usize);
            for (range, _) in offsets.windows(2).zip(is_open).filter(|(_, is_open)| **is_open) {
                let numbers = &mut now[range[0] as usize..range[1] as usize];
                numbers.iter_mut().for_each(|number| *number = row_of(*number));
            }
            sink(&Bags { indices: now, offsets, weights: None, feature_count }, checksum)?;
            ids = later;
        }
        Ok(())
    }
}

fn lost_scratch() -> Error {
    Error::corruption("scratch block is not what was written")
        .with("remedy", "try again; the store is as it was")
}
