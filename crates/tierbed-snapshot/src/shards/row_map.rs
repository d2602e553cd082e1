//! Which shard has a row, and which of its rows it is there: a wavelet matrix.
//!
//! The number of a shard has `bits` bits. A level has one of them for each row, the highest bits
//! first; rows are sorted by it, stably, before the next level. So a row goes to a place of the
//! next level by counting bits, and its last place is behind those of its shard before it:
//!
//! ```text
//! shards of rows   2 0 3 1 0 2      level 0 (high bits)   1 0 1 0 0 1
//! sorted by them   0 1 0 2 3 2      level 1 (low bits)    0 1 0 0 1 0
//! sorted again     0 0 2 2 1 3      row 5: shard 2, the second of those there: row 1
//! ```
//!
//! Words of all levels lie behind each other in checked blocks. Counts are made when it is loaded:
//! together 1.04 bits for each bit of a shard's number, 0.39 bytes a row for 8 shards.
//! Source: Claude and Navarro, "The Wavelet Matrix" (2012).
#![expect(clippy::indexing_slicing, reason = "levels and places are those of the map")]

use std::sync::Arc;

use tierbed_core::{Error, Result};
use tierbed_io::Device;

use crate::blocks::{block_count, check_crc, read_blocks, BlockWriter};
use crate::tails::ranks::Ranks;

/// How large a map is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowMapShape {
    pub(crate) row_count: u64,
    pub(crate) shard_count: u32,
}

impl RowMapShape {
    fn levels(self) -> u32 {
        u32::BITS - (self.shard_count - 1).leading_zeros()
    }

    fn level_words(self) -> u64 {
        self.row_count.div_ceil(64)
    }

    fn word_count(self) -> u64 {
        self.level_words() * u64::from(self.levels())
    }

    /// Returns the bytes of the file.
    pub(crate) fn file_bytes(self) -> u64 {
        block_count(self.word_count()) * tierbed_io::PAGE_BYTES as u64
    }

    /// Returns the bytes of the map in memory, counts included.
    pub(crate) fn memory_bytes(self) -> u64 {
        let level_bytes = 8 * self.level_words() + Ranks::bytes_of(self.row_count) + 8;
        level_bytes * u64::from(self.levels()) + 16 * u64::from(self.shard_count)
    }
}

/// The map of one table.
#[derive(Debug)]
pub(crate) struct RowMap {
    shape: RowMapShape,
    words: Vec<u64>,
    levels: Vec<Level>,
    /// By shard: its first place behind the last level, and how many rows it has.
    spans: Vec<Span>,
}

#[derive(Debug)]
struct Level {
    ranks: Ranks,
    /// Rows whose bit is not set: they come first.
    zeros: u64,
}

#[derive(Debug, Clone, Copy)]
struct Span {
    start: u64,
    row_count: u64,
}

impl RowMap {
    /// Writes the map of rows whose shards are `shards`, `[row_count]`; returns the checksum over
    /// the blocks' checksums. Takes as much memory again as `shards`.
    pub(crate) fn write(
        device: Arc<dyn Device>,
        shape: RowMapShape,
        mut shards: Vec<u16>,
    ) -> Result<u32> {
        assert_eq!(shards.len() as u64, shape.row_count, "shards of all rows");
        assert!(shards.iter().all(|&shard| u32::from(shard) < shape.shard_count), "shards");
        let mut blocks = BlockWriter::new(Arc::clone(&device));
        let mut sorted = Vec::with_capacity(shards.len());
        for bit in (0..shape.levels()).rev() {
            for chunk in shards.chunks(64) {
                let word = chunk
                    .iter()
                    .rev()
                    .fold(0u64, |word, shard| (word << 1) | u64::from(shard >> bit & 1));
                blocks.put_word(word)?;
            }
            sorted.clear();
            sorted.extend(shards.iter().filter(|&shard| shard >> bit & 1 == 0));
            sorted.extend(shards.iter().filter(|&shard| shard >> bit & 1 == 1));
            std::mem::swap(&mut shards, &mut sorted);
        }
        let crc = blocks.finish()?;
        device.sync()?;
        Ok(crc)
    }

    /// Reads and checks the map; `crc` is the checksum over the blocks' checksums.
    ///
    /// # Errors
    /// `Corruption` for other bytes than were written, naming file and block; `Io`.
    pub(crate) fn load(shape: RowMapShape, device: &dyn Device, crc: u32) -> Result<Self> {
        let (expected, found) = (shape.file_bytes(), device.len_bytes()?);
        if expected != found {
            return Err(damaged("shard map has another length than its rows need", device)
                .with("expected", expected)
                .with("found", found));
        }
        let word_count = usize::try_from(shape.word_count())
            .map_err(|_| Error::invalid("shard map does not fit the address space"))?;
        let mut words = Vec::with_capacity(word_count);
        let found = read_blocks(device, block_count(shape.word_count()), |of_block| {
            let left = word_count - words.len();
            words.extend(of_block.take(left));
        })?;
        check_crc(device, crc, found)?;
        assert_eq!(words.len(), word_count, "words of the blocks that were read");
        let mut levels = Vec::with_capacity(shape.levels() as usize);
        for (level, of_level) in words.chunks(shape.level_words().max(1) as usize).enumerate() {
            let ones: u64 = of_level.iter().map(|word| u64::from(word.count_ones())).sum();
            let start = level * shape.level_words() as usize;
            let ranks = Ranks::new(&words, start, shape.row_count, ones).ok_or_else(|| {
                damaged("shard map has bits behind its last row", device).with("level", level)
            })?;
            levels.push(Level { ranks, zeros: shape.row_count - ones });
        }
        let mut map = Self { shape, words, levels, spans: Vec::new() };
        map.spans = (0..shape.shard_count).map(|shard| map.span_of(shard)).collect();
        let known: u64 = map.spans.iter().map(|span| span.row_count).sum();
        if known != shape.row_count {
            return Err(damaged("shard map names a shard that does not exist", device)
                .with("shards", shape.shard_count)
                .with("rows", shape.row_count - known));
        }
        Ok(map)
    }

    /// Returns the shard of `row`, and its row there.
    pub(crate) fn locate(&self, row: u64) -> (u32, u64) {
        let (mut at, mut shard) = (row, 0usize);
        for level in &self.levels {
            let bit = level.ranks.get(&self.words, at);
            shard = shard << 1 | usize::from(bit.is_set);
            at = if bit.is_set { level.zeros + bit.rank } else { at - bit.rank };
        }
        (shard as u32, at - self.spans[shard].start)
    }

    /// Returns how many rows `shard` has.
    pub(crate) fn rows_of(&self, shard: u32) -> u64 {
        self.spans[shard as usize].row_count
    }

    /// Returns the row that is row `row` of `shard`; it has so many.
    pub(crate) fn global_of(&self, shard: u32, row: u64) -> u64 {
        let span = self.spans[shard as usize];
        assert!(row < span.row_count, "row {row} of {} of shard {shard}", span.row_count);
        let mut at = span.start + row;
        for level in self.levels.iter().rev() {
            let is_set = at >= level.zeros;
            let number = if is_set { at - level.zeros } else { at };
            at = self.select(level, is_set, number);
        }
        at
    }

    /// Returns the place of the `number`-th bit of a level that is, or is not, set.
    fn select(&self, level: &Level, is_set: bool, number: u64) -> u64 {
        let (mut low, mut high) = (0, self.shape.row_count);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            let ones = level.ranks.get(&self.words, middle).rank;
            let before = if is_set { ones } else { middle - ones };
            if before <= number {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Finds where the rows of a shard lie behind the last level.
    fn span_of(&self, shard: u32) -> Span {
        let (mut low, mut high) = (0, self.shape.row_count);
        for (level, bit) in self.levels.iter().zip((0..self.levels.len()).rev()) {
            let ones = |at: u64| match at.checked_sub(1) {
                None => 0,
                Some(last) => {
                    let bit = level.ranks.get(&self.words, last);
                    bit.rank + u64::from(bit.is_set)
                }
            };
            (low, high) = match shard >> bit & 1 {
                0 => (low - ones(low), high - ones(high)),
                _ => (level.zeros + ones(low), level.zeros + ones(high)),
            };
        }
        Span { start: low, row_count: high - low }
    }
}

fn damaged(what: &str, device: &dyn Device) -> Error {
    Error::corruption(what).with("path", device.name()).with("remedy", "publish the snapshot again")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tierbed_core::env::SplitMix64;
    use tierbed_core::ErrorKind;
    use tierbed_io::MemoryDevice;

    use super::*;

    fn written(shard_count: u32, shards: &[u16]) -> (RowMapShape, Arc<dyn Device>, u32) {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new("map"));
        let shape = RowMapShape { row_count: shards.len() as u64, shard_count };
        let crc = RowMap::write(Arc::clone(&device), shape, shards.to_vec()).unwrap();
        (shape, device, crc)
    }

    #[test]
    fn rows_are_where_the_drawing_says() {
        let (shape, device, crc) = written(4, &[2, 0, 3, 1, 0, 2]);
        let map = RowMap::load(shape, device.as_ref(), crc).unwrap();
        let found: Vec<_> = (0..6).map(|row| map.locate(row)).collect();
        assert_eq!(found, [(2, 0), (0, 0), (3, 0), (1, 0), (0, 1), (2, 1)]);
        assert_eq!(map.global_of(2, 1), 5);
    }

    #[test]
    fn a_shard_number_costs_its_bits_and_little_more() {
        let bytes_per_row = |shard_count| {
            let shape = RowMapShape { row_count: 1 << 30, shard_count };
            shape.memory_bytes() as f64 / shape.row_count as f64
        };
        assert!(bytes_per_row(8) < 0.3907, "{}", bytes_per_row(8));
        assert!(bytes_per_row(64) < 0.7813, "{}", bytes_per_row(64));
        assert!(bytes_per_row(1) < 1e-6);
    }

    #[test]
    fn a_shard_that_does_not_exist_is_corruption() {
        let (shape, device, crc) = written(8, &[1, 7, 2]);
        let fewer = RowMapShape { shard_count: 7, ..shape };
        let error = RowMap::load(fewer, device.as_ref(), crc).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption);
        assert!(error.to_string().contains("rows: 1"), "{error}");
        let longer = RowMapShape { row_count: 40_000, ..shape };
        let error = RowMap::load(longer, device.as_ref(), crc).unwrap_err();
        assert!(error.to_string().contains("another length"), "{error}");
        let shorter = RowMapShape { row_count: 2, ..shape };
        let error = RowMap::load(shorter, device.as_ref(), crc).unwrap_err();
        assert!(error.to_string().contains("path: map"), "{error}");
    }

    proptest! {
        #[test]
        fn rows_are_where_a_loop_counts_them(
            seed: u64, row_count in 0usize..3000, shard_count in 1u32..70,
        ) {
            let mut random = SplitMix64::new(seed);
            let shards: Vec<u16> =
                (0..row_count).map(|_| random.below(u64::from(shard_count)) as u16).collect();
            let (shape, device, crc) = written(shard_count, &shards);
            prop_assert_eq!(device.len_bytes().unwrap(), shape.file_bytes());
            let map = RowMap::load(shape, device.as_ref(), crc).unwrap();
            let mut counts = vec![0u64; shard_count as usize];
            for (row, &shard) in (0u64..).zip(&shards) {
                let count = &mut counts[shard as usize];
                prop_assert_eq!(map.locate(row), (u32::from(shard), *count));
                prop_assert_eq!(map.global_of(u32::from(shard), *count), row);
                *count += 1;
            }
            let found: Vec<u64> = (0..shard_count).map(|shard| map.rows_of(shard)).collect();
            prop_assert_eq!(found, counts);
        }

        #[test]
        fn any_words_are_a_map_or_corruption(
            seed: u64, row_count in 1u64..300, shard_count in 1u32..9,
        ) {
            let mut random = SplitMix64::new(seed);
            let shape = RowMapShape { row_count, shard_count };
            let device: Arc<dyn Device> = Arc::new(MemoryDevice::new("map"));
            let mut blocks = BlockWriter::new(Arc::clone(&device));
            let rest = u64::MAX >> (64 - ((row_count - 1) % 64 + 1));
            for word in 1..=shape.word_count() {
                let is_last = word % shape.level_words() == 0;
                let mask = if is_last && seed % 8 > 0 { rest } else { u64::MAX };
                blocks.put_word(random.next_u64() & mask).unwrap();
            }
            let crc = blocks.finish().unwrap();
            match RowMap::load(shape, device.as_ref(), crc) {
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corruption),
                Ok(map) => for row in 0..row_count {
                    let (shard, own) = map.locate(row);
                    prop_assert!(shard < shard_count && own < map.rows_of(shard));
                    prop_assert_eq!(map.global_of(shard, own), row);
                },
            }
        }
    }
}
