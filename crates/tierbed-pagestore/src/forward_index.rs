//! On which page does this row start? One bit-packed number per row of every table.
//!
//! Entry 0 says the row is not stored, entry `p + 1` that it starts on page `p`. Entries have the
//! fewest bits that hold the page count; those of a table follow each other in row order, each
//! table from a fresh 8-byte word. The file cuts the words into checksummed blocks of 4 KiB:
//!
//! ```text
//! | crc32c | block number | 511 words of 8 bytes |
//! 0        4              8                      4096
//! ```
//!
//! Normative text: docs/formats/snapshot.md.

use std::sync::Arc;

use tierbed_core::checksum::{crc32c, crc32c_append};
use tierbed_core::{Error, Result, RowKey, Schema};
use tierbed_io::{AlignedBuf, Device, PAGE_BYTES};

use crate::page::{le_u32, le_u64};

/// Words of the index in one block.
pub const BLOCK_WORDS: usize = (PAGE_BYTES - BLOCK_HEADER_BYTES) / 8;
/// Bytes before a block's words.
pub const BLOCK_HEADER_BYTES: usize = 8;
/// Blocks written or read at once.
const BLOCKS_AT_ONCE: usize = 16;
/// Memory a writer or the loading of an index needs besides the index.
pub(crate) const BUFFER_BYTES: u64 = (BLOCKS_AT_ONCE * PAGE_BYTES) as u64;

/// Where the entries of each table lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IndexShape {
    bits: u32,
    /// First word of each table, then the number of words.
    starts: Vec<u64>,
}

impl IndexShape {
    /// Lays out the index of `schema` for `page_count` pages.
    ///
    /// # Errors
    /// `Invalid` when the index would not fit the address space.
    pub(crate) fn new(schema: &Schema, page_count: u64) -> Result<Self> {
        let bits = u64::BITS - page_count.leading_zeros();
        let mut starts = vec![0u64];
        let mut end = 0u64;
        for table in schema.tables() {
            let words = (u128::from(table.row_count) * u128::from(bits)).div_ceil(64);
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
        self.starts.last().copied().unwrap_or(0)
    }

    pub(crate) fn word_bytes(&self) -> u64 {
        8 * self.word_count()
    }

    pub(crate) fn block_count(&self) -> u64 {
        self.word_count().div_ceil(BLOCK_WORDS as u64)
    }

    fn bit_at(&self, key: RowKey) -> u64 {
        let start = self.starts.get(key.table.0 as usize).copied().unwrap_or(u64::MAX / 64);
        start * 64 + key.row.0 * u64::from(self.bits)
    }
}

/// Writes entries in key order, block by block.
#[derive(Debug)]
pub(crate) struct IndexWriter {
    shape: IndexShape,
    device: Arc<dyn Device>,
    buffer: AlignedBuf,
    /// Words in the buffer.
    buffered: usize,
    blocks_done: u64,
    /// Bits written so far, the last few of them in `word`.
    bits_done: u64,
    word: u64,
    crc: u32,
}

impl IndexWriter {
    pub(crate) fn new(shape: IndexShape, device: Arc<dyn Device>) -> Self {
        Self {
            shape,
            device,
            buffer: AlignedBuf::new(BUFFER_BYTES as usize),
            buffered: 0,
            blocks_done: 0,
            bits_done: 0,
            word: 0,
            crc: 0,
        }
    }

    /// Notes that `key` starts on `page_id`; keys must be increasing.
    pub(crate) fn push(&mut self, key: RowKey, page_id: u64) -> Result<()> {
        let at = self.shape.bit_at(key);
        self.skip_to(at)?;
        let (value, bits) = (page_id + 1, u64::from(self.shape.bits));
        let offset = at % 64;
        self.word |= value << offset;
        if offset + bits >= 64 {
            let word = self.word;
            self.put_word(word)?;
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
        if !self.buffered.is_multiple_of(BLOCK_WORDS) {
            // The last block is padded with zeros.
            let missing = BLOCK_WORDS - self.buffered % BLOCK_WORDS;
            for _ in 0..missing {
                self.put_word(0)?;
            }
        }
        self.flush()?;
        Ok(self.crc)
    }

    fn skip_to(&mut self, at: u64) -> Result<()> {
        while self.bits_done / 64 < at / 64 {
            let word = std::mem::take(&mut self.word);
            self.put_word(word)?;
            self.bits_done = (self.bits_done / 64 + 1) * 64;
        }
        self.bits_done = at;
        Ok(())
    }

    fn put_word(&mut self, word: u64) -> Result<()> {
        if self.buffered == BLOCKS_AT_ONCE * BLOCK_WORDS {
            self.flush()?;
        }
        let (block, at) = (self.buffered / BLOCK_WORDS, self.buffered % BLOCK_WORDS);
        let start = block * PAGE_BYTES + BLOCK_HEADER_BYTES + 8 * at;
        if let Some(place) = self.buffer.get_mut(start..start + 8) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        self.buffered += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let block_count = self.buffered / BLOCK_WORDS;
        let first = self.blocks_done;
        let used = self.buffer.get_mut(..block_count * PAGE_BYTES).unwrap_or_default();
        for (at, block) in used.chunks_exact_mut(PAGE_BYTES).enumerate() {
            let (header, _) = block.split_at_mut(BLOCK_HEADER_BYTES);
            header
                .get_mut(4..)
                .unwrap_or_default()
                .copy_from_slice(&(block_number(first, at)).to_le_bytes());
            let crc = crc32c(block.get(4..).unwrap_or_default());
            self.crc = crc32c_append(self.crc, &crc.to_le_bytes());
            block.get_mut(..4).unwrap_or_default().copy_from_slice(&crc.to_le_bytes());
        }
        self.device.write_at(first * PAGE_BYTES as u64, used)?;
        used.fill(0);
        self.blocks_done += block_count as u64;
        self.buffered = 0;
        Ok(())
    }
}

/// Blocks are numbered modulo 2^32.
fn block_number(first: u64, at: usize) -> u32 {
    (first + at as u64) as u32
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
        if found != crc {
            return Err(Error::corruption("forward index belongs to another snapshot")
                .with("path", device.name())
                .with("expected", format_args!("{crc:#010x}"))
                .with("found", format_args!("{found:#010x}")));
        }
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
        let low = self.words.get(word).copied().unwrap_or(0) >> offset;
        let high = match offset {
            0 => 0,
            offset if offset + bits <= 64 => 0,
            offset => self.words.get(word + 1).copied().unwrap_or(0) << (64 - offset),
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

/// Reads `block_count` blocks, checks each, hands its words over and returns the checksum over
/// the checksums.
pub(crate) fn read_blocks(
    device: &dyn Device,
    block_count: u64,
    mut take: impl FnMut(&mut dyn Iterator<Item = u64>),
) -> Result<u32> {
    let mut buffer = AlignedBuf::new(BUFFER_BYTES as usize);
    let mut crc = 0;
    let mut first = 0;
    while first < block_count {
        let count = (block_count - first).min(BLOCKS_AT_ONCE as u64) as usize;
        let blocks = buffer.get_mut(..count * PAGE_BYTES).unwrap_or_default();
        device.read_at(first * PAGE_BYTES as u64, blocks)?;
        for (at, block) in blocks.chunks_exact(PAGE_BYTES).enumerate() {
            let (stored, computed) = (le_u32(block, 0), crc32c(block.get(4..).unwrap_or_default()));
            if stored != computed || le_u32(block, 4) != block_number(first, at) {
                return Err(Error::corruption("forward index block fails its checksum")
                    .with("path", device.name())
                    .with("block", first + at as u64)
                    .with("expected", format_args!("{stored:#010x}"))
                    .with("found", format_args!("{computed:#010x}"))
                    .with("remedy", "publish the snapshot again"));
            }
            crc = crc32c_append(crc, &stored.to_le_bytes());
            let words = block.get(BLOCK_HEADER_BYTES..).unwrap_or_default();
            take(&mut words.chunks_exact(8).map(|word| le_u64(word, 0)));
        }
        first += count as u64;
    }
    Ok(crc)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tierbed_core::{InitSpec, OptimizerKind, RowId, TableId, TableSchema};
    use tierbed_io::MemoryDevice;

    use super::*;

    fn schema(row_counts: &[u64]) -> Schema {
        let table = |(at, &row_count): (usize, &u64)| TableSchema {
            name: format!("t{at}"),
            row_count,
            dim: 1,
            optimizer: OptimizerKind::Sgd,
            state_init: 0.0,
            init: InitSpec::Constant { value: 0.0 },
            seed: 0,
        };
        Schema::new(row_counts.iter().enumerate().map(table).collect()).unwrap()
    }

    fn round_trip(row_counts: &[u64], page_count: u64, rows: &[(RowKey, u64)]) -> ForwardIndex {
        let shape = IndexShape::new(&schema(row_counts), page_count).unwrap();
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
            assert_eq!(IndexShape::new(&schema(&[10]), page_count).unwrap().bits, bits);
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
