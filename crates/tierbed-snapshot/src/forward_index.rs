//! Forward index: the page on which each row starts, one bit-packed number per row.
//!
//! Entry 0 says the row is not stored, entry `p + 1` that it starts on page `p`. Entries have the
//! fewest bits that hold the page count; those of a table follow each other in row order, each
//! table from a fresh 8-byte word. The words lie in checksummed [`blocks`](crate::blocks).
//!
//! Normative text: docs/reference/formats/snapshot.md.
#![expect(clippy::indexing_slicing, reason = "keys are of the schema that shaped the index")]

use std::sync::Arc;

use tierbed_core::{Error, Result, RowKey, Schema, TableId};
use tierbed_io::Device;

use crate::blocks::{block_count, check_crc, read_blocks, BlockWriter};

/// Where the entries of each table lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IndexShape {
    bits: u32,
    /// First word of each table, then the number of words.
    starts: Vec<u64>,
}

impl IndexShape {
    /// Lays out the index of `schema` for `page_count` pages; tables that are left out have no
    /// entries.
    ///
    /// # Errors
    /// `Invalid` when the index would not fit the address space.
    pub(crate) fn without(
        schema: &Schema,
        page_count: u64,
        is_left_out: impl Fn(TableId) -> bool,
    ) -> Result<Self> {
        let bits = u64::BITS - page_count.leading_zeros();
        let mut starts = vec![0u64];
        let mut end = 0u64;
        for (table, at) in schema.tables().iter().zip(0..) {
            let row_count = if is_left_out(TableId(at)) { 0 } else { table.row_count };
            let words = (u128::from(row_count) * u128::from(bits)).div_ceil(64);
            end = u64::try_from(words)
                .ok()
                .and_then(|words| end.checked_add(words))
                .filter(|&end| end < 1 << 56)
                .ok_or_else(|| Error::invalid("forward index too large"))?;
            starts.push(end);
        }
        Ok(Self { bits, starts })
    }

    pub(crate) fn word_count(&self) -> u64 {
        self.starts[self.starts.len() - 1]
    }

    pub(crate) fn word_bytes(&self) -> u64 {
        8 * self.word_count()
    }

    pub(crate) fn block_count(&self) -> u64 {
        block_count(self.word_count())
    }

    /// Returns the first bit of the entry of `key`.
    ///
    /// # Panics
    /// When the key is outside the schema, or its table was left out.
    fn bit_at(&self, key: RowKey) -> u64 {
        let table = key.table.0 as usize;
        assert!(table + 1 < self.starts.len(), "{key:?} is of no table of the index");
        let (start, end) = (self.starts[table] * 64, self.starts[table + 1] * 64);
        let at = start + key.row.0 * u64::from(self.bits);
        assert!(at + u64::from(self.bits) <= end, "{key:?} lies behind its table in the index");
        at
    }
}

/// Writes entries in key order, block by block.
#[derive(Debug)]
pub(crate) struct IndexWriter {
    shape: IndexShape,
    blocks: BlockWriter,
    /// Bits written so far, the last few of them in `word`.
    bits_done: u64,
    word: u64,
}

impl IndexWriter {
    pub(crate) fn new(shape: IndexShape, device: Arc<dyn Device>) -> Self {
        Self { shape, blocks: BlockWriter::new(device), bits_done: 0, word: 0 }
    }

    /// Notes that `key` starts on `page_id`; keys must be increasing.
    ///
    /// # Panics
    /// When a key is not behind the one before.
    pub(crate) fn push(&mut self, key: RowKey, page_id: u64) -> Result<()> {
        let at = self.shape.bit_at(key);
        assert!(at >= self.bits_done, "{key:?} comes behind a larger key");
        self.skip_to(at)?;
        let (value, bits) = (page_id + 1, u64::from(self.shape.bits));
        assert!(value >> bits == 0, "page {page_id} does not fit entries of {bits} bits");
        let offset = at % 64;
        self.word |= value << offset;
        if offset + bits >= 64 {
            let word = self.word;
            self.blocks.put_word(word)?;
            // The rest of the value starts the next word.
            self.word = if offset == 0 { 0 } else { value >> (64 - offset) };
        }
        self.bits_done = at + bits;
        Ok(())
    }

    /// Writes what is left and returns the checksum over the blocks' checksums.
    pub(crate) fn finish(mut self) -> Result<u32> {
        let end = self.shape.word_count() * 64;
        self.skip_to(end)?;
        self.blocks.finish()
    }

    fn skip_to(&mut self, at: u64) -> Result<()> {
        while self.bits_done / 64 < at / 64 {
            let word = std::mem::take(&mut self.word);
            self.blocks.put_word(word)?;
            self.bits_done = (self.bits_done / 64 + 1) * 64;
        }
        self.bits_done = at;
        Ok(())
    }
}

/// The index in memory.
#[derive(Debug)]
pub(crate) struct ForwardIndex {
    shape: IndexShape,
    page_count: u64,
    words: Vec<u64>,
}

impl ForwardIndex {
    /// Reads and checks the index; `crc` is the checksum over the blocks' checksums.
    pub(crate) fn load(
        shape: IndexShape,
        page_count: u64,
        device: &dyn Device,
        crc: u32,
    ) -> Result<Self> {
        let word_count = usize::try_from(shape.word_count())
            .map_err(|_| Error::invalid("forward index does not fit the address space"))?;
        let mut index = Self { shape, page_count, words: Vec::with_capacity(word_count) };
        let found = read_blocks(device, index.shape.block_count(), |words| {
            let left = word_count - index.words.len();
            index.words.extend(words.take(left));
        })?;
        check_crc(device, crc, found)?;
        assert_eq!(index.words.len(), word_count, "words of the blocks that were read");
        Ok(index)
    }

    /// Returns the first page of `key`; `None` when the row is not stored. The key must be
    /// inside the schema.
    pub(crate) fn get(&self, key: RowKey) -> Result<Option<u64>> {
        let bits = self.shape.bits;
        if bits == 0 {
            return Ok(None);
        }
        let at = self.shape.bit_at(key);
        let (word, offset) = ((at / 64) as usize, (at % 64) as u32);
        let low = self.words[word] >> offset;
        let high = match offset {
            0 => 0,
            offset if offset + bits <= 64 => 0,
            offset => self.words[word + 1] << (64 - offset),
        };
        let value = (low | high) & (u64::MAX >> (64 - bits));
        if value > self.page_count {
            return Err(Error::corruption("forward index names a page that does not exist")
                .with("table_id", key.table.0)
                .with("row", key.row.0)
                .with("page_id", value - 1)
                .with("pages", self.page_count));
        }
        Ok(value.checked_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tierbed_core::{RowId, TableSchema};
    use tierbed_io::{MemoryDevice, PAGE_BYTES};

    use super::*;

    fn schema(row_counts: &[u64]) -> Schema {
        let table =
            |(at, &row_count): (usize, &u64)| TableSchema::plain(format!("t{at}"), row_count, 1);
        Schema::new(row_counts.iter().enumerate().map(table).collect()).unwrap()
    }

    fn round_trip(row_counts: &[u64], page_count: u64, rows: &[(RowKey, u64)]) -> ForwardIndex {
        let shape = IndexShape::without(&schema(row_counts), page_count, |_| false).unwrap();
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new("rows.index"));
        let mut writer = IndexWriter::new(shape.clone(), Arc::clone(&device));
        for (key, page) in rows {
            writer.push(*key, *page).unwrap();
        }
        let crc = writer.finish().unwrap();
        assert_eq!(device.len_bytes().unwrap(), shape.block_count() * PAGE_BYTES as u64);
        assert!(
            ForwardIndex::load(shape.clone(), page_count, device.as_ref(), crc ^ 1).is_err()
                || shape.block_count() == 0
        );
        ForwardIndex::load(shape, page_count, device.as_ref(), crc).unwrap()
    }

    #[test]
    fn entries_are_as_narrow_as_the_page_count_allows() {
        for (page_count, bits) in [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (1 << 20, 21)] {
            let shape = IndexShape::without(&schema(&[10]), page_count, |_| false).unwrap();
            assert_eq!(shape.bits, bits);
        }
    }

    #[test]
    fn long_gaps_and_many_blocks() {
        let key = |table, row| RowKey::new(TableId(table), RowId(row));
        let rows = [(key(0, 0), 0), (key(0, 399_999), 999_999), (key(2, 7), 5), (key(2, 8), 6)];
        let index = round_trip(&[400_000, 100_000, 9], 1_000_000, &rows);
        for (key, page) in rows {
            assert_eq!(index.get(key).unwrap(), Some(page));
        }
        assert_eq!(index.get(key(1, 50)).unwrap(), None);
        assert_eq!(index.get(key(0, 1)).unwrap(), None);
        assert_eq!(round_trip(&[5], 0, &[]).get(key(0, 3)).unwrap(), None);
    }

    proptest! {
        #[test]
        fn every_entry_comes_back(
            page_count in 1u64..5000,
            present in proptest::collection::vec(proptest::option::of(any::<u64>()), 1..3000),
        ) {
            let half = present.len() as u64 / 2;
            let counts = [half.max(1), present.len() as u64 - half];
            let key = |at: u64| if at < half { RowKey::new(TableId(0), RowId(at)) }
                else { RowKey::new(TableId(1), RowId(at - half)) };
            let rows: Vec<_> = present.iter().enumerate()
                .filter_map(|(at, page)| Some((key(at as u64), (*page)? % page_count))).collect();
            let index = round_trip(&counts, page_count, &rows);
            for (at, page) in present.iter().enumerate() {
                let expected = page.map(|page| page % page_count);
                prop_assert_eq!(index.get(key(at as u64)).unwrap(), expected);
            }
        }
    }
}
