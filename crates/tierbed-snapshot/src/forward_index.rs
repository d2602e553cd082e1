//! Forward index: the page on which each row starts, one bit-packed number per row.
//!
//! Entry 0 says the row is not stored, entry `p + 1` that it starts on page `p`. Entries have the
//! fewest bits that hold the page count; those of a table follow each other in row order, each
//! table from a fresh 8-byte word. The words lie in checksummed [`blocks`](crate::blocks).
//!
//! In a delta of few rows only these have entries, which begin with the lower 16 bits of the row;
//! behind those of a table stands where the entries of each 65,536 rows begin.
//!
//! Normative text: docs/reference/formats/snapshot.md.
#![expect(clippy::indexing_slicing, reason = "keys are of the schema that shaped the index")]

use std::cmp::Ordering;
use std::sync::Arc;

use tierbed_core::{Error, Result, RowKey, Schema, TableId};
use tierbed_io::Device;

use crate::bits::{read_bits, BitWriter};
use crate::blocks::{block_count, check_crc, read_blocks};

/// Bits of a row that stand in its entry in a sparse index.
const LOW_BITS: u32 = 16;
/// Bits that say where the entries of a group of rows begin.
const FIRST_BITS: u32 = 32;

/// Where the entries of each table lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IndexShape {
    bits: u32,
    /// First word of each table, then the number of words.
    starts: Vec<u64>,
    /// In a sparse index: what each table has.
    sparse: Vec<SparseTable>,
}

/// A table in a sparse index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SparseTable {
    /// Rows that have entries.
    entry_count: u64,
    /// Groups of rows whose higher bits are the same.
    group_count: u64,
}

impl SparseTable {
    fn of(row_count: u64, entry_count: u64) -> Self {
        Self { entry_count, group_count: row_count.div_ceil(1 << LOW_BITS) }
    }

    fn entry_words(&self, bits: u32) -> u128 {
        (u128::from(self.entry_count) * u128::from(LOW_BITS + bits)).div_ceil(64)
    }

    fn words(&self, bits: u32) -> u128 {
        let firsts = u128::from(self.group_count) * u128::from(FIRST_BITS);
        self.entry_words(bits) + firsts.div_ceil(64)
    }
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
        let bits = bits_of(page_count);
        let tables = schema.tables().iter().zip(0..).map(|(table, at)| {
            let row_count = if is_left_out(TableId(at)) { 0 } else { table.row_count };
            (u128::from(row_count) * u128::from(bits)).div_ceil(64)
        });
        Ok(Self { bits, starts: starts_of(tables)?, sparse: Vec::new() })
    }

    /// Lays out the sparse index of a delta that stores so many rows of each table of `schema`.
    ///
    /// # Errors
    /// As [`without`](Self::without).
    pub(crate) fn sparse(
        schema: &Schema,
        page_count: u64,
        entry_counts: impl Iterator<Item = u64>,
    ) -> Result<Self> {
        let bits = bits_of(page_count);
        let tables = schema.tables().iter().zip(entry_counts);
        let sparse: Vec<_> =
            tables.map(|(table, count)| SparseTable::of(table.row_count, count)).collect();
        assert_eq!(sparse.len(), schema.tables().len(), "every table has a number of entries");
        Ok(Self { bits, starts: starts_of(sparse.iter().map(|table| table.words(bits)))?, sparse })
    }

    /// Tells whether every place in a table's entries fits the numbers that name it.
    pub(crate) fn can_be_sparse(
        mut entry_counts: impl Iterator<Item = u64>,
        page_count: u64,
    ) -> bool {
        let fits = |count| count <= u64::from(u32::MAX);
        entry_counts.all(fits) && bits_of(page_count) + LOW_BITS <= u64::BITS
    }

    pub(crate) fn word_count(&self) -> u64 {
        self.starts[self.starts.len() - 1]
    }

    pub(crate) fn word_bytes(&self) -> u64 {
        8 * self.word_count()
    }

    /// Tells whether only rows that are stored have entries.
    pub(crate) fn is_sparse(&self) -> bool {
        !self.sparse.is_empty()
    }

    pub(crate) fn block_count(&self) -> u64 {
        block_count(self.word_count())
    }

    // Returns the first bit of a table's entries, and of where those of its groups begin.
    fn sparse_bits(&self, table: usize) -> SparseBits {
        let start = self.starts[table];
        let entry_words = self.sparse[table].entry_words(self.bits) as u64;
        SparseBits { entries: 64 * start, firsts: 64 * (start + entry_words) }
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

/// Where the parts of a table lie in a sparse index.
struct SparseBits {
    entries: u64,
    firsts: u64,
}

/// Returns the fewest bits that hold every number up to `largest`.
pub(crate) fn bits_of(largest: u64) -> u32 {
    u64::BITS - largest.leading_zeros()
}

// Returns the first word of each table, then the number of words.
fn starts_of(words: impl Iterator<Item = u128>) -> Result<Vec<u64>> {
    let (mut starts, mut end) = (vec![0u64], 0u64);
    for words in words {
        end = u64::try_from(words)
            .ok()
            .and_then(|words| end.checked_add(words))
            .filter(|&end| end < 1 << 56)
            .ok_or_else(|| Error::invalid("forward index too large"))?;
        starts.push(end);
    }
    Ok(starts)
}

/// Writes entries in key order, block by block.
#[derive(Debug)]
pub(crate) struct IndexWriter {
    shape: IndexShape,
    out: BitWriter,
    /// In a sparse index: the table whose entries come, how many came, and where those of its
    /// groups begin.
    table: usize,
    entry_count: u64,
    firsts: Vec<u32>,
}

impl IndexWriter {
    pub(crate) fn new(shape: IndexShape, device: Arc<dyn Device>) -> Self {
        let (out, firsts) = (BitWriter::new(device), Vec::new());
        Self { shape, out, table: 0, entry_count: 0, firsts }
    }

    /// Notes that `key` starts on `page_id`; keys must be increasing.
    ///
    /// # Panics
    /// When a key is not behind the one before.
    pub(crate) fn push(&mut self, key: RowKey, page_id: u64) -> Result<()> {
        let (value, bits) = (page_id + 1, self.shape.bits);
        assert!(value >> bits == 0, "page {page_id} does not fit entries of {bits} bits");
        if !self.shape.is_sparse() {
            let at = self.shape.bit_at(key);
            assert!(at >= self.out.bits_done(), "{key:?} comes behind a larger key");
            return self.out.put(at, value, bits);
        }
        while self.table < key.table.0 as usize {
            self.end_table()?;
        }
        let group = (key.row.0 >> LOW_BITS) as usize;
        assert!(self.firsts.len() <= group + 1, "{key:?} comes behind a larger key");
        self.firsts.resize(group + 1, self.entry_count as u32);
        let bits = LOW_BITS + bits;
        let at = self.shape.sparse_bits(self.table).entries + self.entry_count * u64::from(bits);
        self.entry_count += 1;
        self.out.put(at, (value << LOW_BITS) | low_of(key), bits)
    }

    // Ends a table of a sparse index.
    fn end_table(&mut self) -> Result<()> {
        let SparseTable { entry_count, group_count } = self.shape.sparse[self.table];
        assert_eq!(self.entry_count, entry_count, "entries of table {}", self.table);
        let mut firsts = std::mem::take(&mut self.firsts);
        firsts.resize(group_count as usize, entry_count as u32);
        let mut at = self.shape.sparse_bits(self.table).firsts;
        for first in firsts {
            self.out.put(at, u64::from(first), FIRST_BITS)?;
            at += u64::from(FIRST_BITS);
        }
        self.table += 1;
        self.entry_count = 0;
        Ok(())
    }

    /// Writes what is left and returns the checksum over the blocks' checksums.
    pub(crate) fn finish(mut self) -> Result<u32> {
        while self.table < self.shape.sparse.len() {
            self.end_table()?;
        }
        let end = self.shape.word_count() * 64;
        self.out.finish(end)
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
        let value = match self.shape.sparse.get(key.table.0 as usize) {
            None => self.read(self.shape.bit_at(key), bits),
            Some(table) => self.find(key, *table)?,
        };
        if value > self.page_count {
            return Err(Error::corruption("forward index names a page that does not exist")
                .with("table_id", key.table.0)
                .with("row", key.row.0)
                .with("page_id", value - 1)
                .with("pages", self.page_count));
        }
        Ok(value.checked_sub(1))
    }

    // Returns the entry of `key` in a sparse index without its row, 0 when there is none.
    fn find(&self, key: RowKey, table: SparseTable) -> Result<u64> {
        let at = self.shape.sparse_bits(key.table.0 as usize);
        let bits = LOW_BITS + self.shape.bits;
        let first_of = |group: u64| match group < table.group_count {
            true => self.read(at.firsts + group * u64::from(FIRST_BITS), FIRST_BITS),
            false => table.entry_count,
        };
        let group = key.row.0 >> LOW_BITS;
        let (mut first, mut end) = (first_of(group), first_of(group + 1));
        if first > end || end > table.entry_count {
            return Err(Error::corruption("forward index names entries that do not exist")
                .with("table_id", key.table.0)
                .with("row", key.row.0));
        }
        while first < end {
            let middle = first.midpoint(end);
            let entry = self.read(at.entries + middle * u64::from(bits), bits);
            match (entry & (u64::MAX >> (64 - LOW_BITS))).cmp(&low_of(key)) {
                Ordering::Less => first = middle + 1,
                Ordering::Equal => return Ok(entry >> LOW_BITS),
                Ordering::Greater => end = middle,
            }
        }
        Ok(0)
    }

    fn read(&self, at: u64, bits: u32) -> u64 {
        read_bits(&self.words, at, bits)
    }
}

fn low_of(key: RowKey) -> u64 {
    key.row.0 & (u64::MAX >> (64 - LOW_BITS))
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
        let of_table = |at: u32| rows.iter().filter(|(key, _)| key.table.0 == at).count() as u64;
        let counts = (0..row_counts.len() as u32).map(of_table);
        let sparse = IndexShape::sparse(&schema(row_counts), page_count, counts).unwrap();
        let (dense, sparse) = (write(shape, page_count, rows), write(sparse, page_count, rows));
        for (at, &row_count) in (0..).zip(row_counts) {
            for row in (0..row_count.min(3000)).chain(row_count.saturating_sub(9)..row_count) {
                let key = RowKey::new(TableId(at), RowId(row));
                assert_eq!(dense.get(key).unwrap(), sparse.get(key).unwrap(), "{key:?}");
            }
        }
        dense
    }

    fn write(shape: IndexShape, page_count: u64, rows: &[(RowKey, u64)]) -> ForwardIndex {
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

    #[test]
    fn few_rows_of_many_need_few_words() {
        let (schema, pages) = (schema(&[10_000_000, 9]), 400_000);
        let whole = IndexShape::without(&schema, pages, |_| false).unwrap();
        let few = IndexShape::sparse(&schema, 4000, [100_000, 0].into_iter()).unwrap();
        assert!(few.word_count() * 60 < whole.word_count(), "{few:?} {whole:?}");
        assert!(!IndexShape::can_be_sparse([9, 1 << 32].into_iter(), 5));
        assert!(!IndexShape::can_be_sparse([9].into_iter(), 1 << 48));
    }

    #[test]
    fn any_words_are_entries_or_an_error() {
        let shape = IndexShape::sparse(&schema(&[300_000]), 100, [9].into_iter()).unwrap();
        let mut random = tierbed_core::env::SplitMix64::new(5);
        for _ in 0..2000 {
            let words = (0..shape.word_count()).map(|_| random.below(u64::MAX)).collect();
            let index = ForwardIndex { shape: shape.clone(), page_count: 100, words };
            for row in [0, 1 << 16, 299_999] {
                let _ = index.get(RowKey::new(TableId(0), RowId(row)));
            }
        }
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
