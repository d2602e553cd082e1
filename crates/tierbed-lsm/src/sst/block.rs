//! SST blocks: checksums, and the search of a row inside.
//!
//! Little-endian; normative text: `docs/reference/formats/lsm.md`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | crc32c of all bytes from 4 to the end of the block |
//! | 4..8 | magic `TBl1` |
//! | 8..16 | SST id |
//! | 16..20 | block number in the SST |
//! | 20..24 | kind: 0 rows, 1 index, 2 filter |
//! | 24..28 | entry count: rows, keys, or filter bytes |
//! | 28..32 | record bytes (rows), else 0 |
//! | 32..40 | first key (rows), else 0 |
//! | 40.. | entries, then zeros |
//!
//! Entries of a rows block: one u32 per row, its key minus the first key, ascending; then the
//! records. Of an index block: u64 keys. Of a filter block: bytes.

#![expect(clippy::indexing_slicing, reason = "blocks to seal have their full length")]

use std::ops::Range;

use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result};

use super::{read_u32, read_u64};
use crate::key::Key;
use crate::version::SstId;

/// Bytes before the entries of a block.
pub(crate) const HEADER_BYTES: usize = 40;
const MAGIC: u32 = u32::from_le_bytes(*b"TBl1");

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockKind {
    /// Records of one table, in key order.
    Rows,
    /// First key of every rows block.
    Index,
    /// A slice of the filter.
    Filter,
}

impl BlockKind {
    fn number(self) -> u32 {
        match self {
            Self::Rows => 0,
            Self::Index => 1,
            Self::Filter => 2,
        }
    }
}

/// Which block it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockName {
    pub(crate) sst: SstId,
    pub(crate) number: u32,
    pub(crate) kind: BlockKind,
}

/// Returns how many records of `record_bytes` fit into a block; 0 when none does.
pub(crate) fn rows_per_block(block_bytes: usize, record_bytes: usize) -> usize {
    block_bytes.saturating_sub(HEADER_BYTES) / (4 + record_bytes)
}

/// Fills in header and checksum of `block`, whose entries are there already.
pub(crate) fn seal_block(block: &mut [u8], name: BlockName, entries: Entries) {
    let header = MAGIC
        .to_le_bytes()
        .into_iter()
        .chain(name.sst.0.to_le_bytes())
        .chain(name.number.to_le_bytes())
        .chain(name.kind.number().to_le_bytes())
        .chain(entries.count.to_le_bytes())
        .chain(entries.record_bytes.to_le_bytes())
        .chain(entries.first_key.to_le_bytes());
    assert!(block.len() >= HEADER_BYTES, "a block has room for its header");
    for (place, byte) in block[4..HEADER_BYTES].iter_mut().zip(header) {
        *place = byte;
    }
    let crc = crc32c(&block[4..]);
    block[..4].copy_from_slice(&crc.to_le_bytes());
}

/// What a block says about its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Entries {
    pub(crate) count: u32,
    pub(crate) record_bytes: u32,
    pub(crate) first_key: u64,
}

fn damaged(what: &'static str, name: BlockName) -> Error {
    Error::corruption(what)
        .with("sst_id", name.sst.0)
        .with("block", name.number)
        .with("remedy", "restore the store's folder from a copy")
}

/// Checks checksum, magic and name of `block` and returns what it says about its entries.
///
/// # Errors
/// `Corruption` for damaged, misdirected and lost writes.
pub(crate) fn check_block(block: &[u8], name: BlockName) -> Result<Entries> {
    let field = |at| read_u32(block, at).ok_or_else(|| damaged("block is too short", name));
    let long = |at| read_u64(block, at).ok_or_else(|| damaged("block is too short", name));
    let expected = field(0)?;
    let found = crc32c(&block[4..]);
    if expected != found {
        return Err(damaged("block checksum mismatch", name)
            .with("expected", format_args!("{expected:08x}"))
            .with("found", format_args!("{found:08x}")));
    }
    if field(4)? != MAGIC {
        return Err(damaged("block has another format", name));
    }
    let is_named = long(8)? == name.sst.0 && field(16)? == name.number;
    if !is_named || field(20)? != name.kind.number() {
        return Err(damaged("block belongs elsewhere: a write was misdirected or lost", name)
            .with("found_sst_id", long(8)?)
            .with("found_block", field(16)?));
    }
    Ok(Entries { count: field(24)?, record_bytes: field(28)?, first_key: long(32)? })
}

/// The rows of one checked block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    first_key: u64,
    deltas: &'a [u8],
    records: &'a [u8],
    record_bytes: usize,
}

impl<'a> Rows<'a> {
    /// Checks `block` whole: name, checksum, and order of its keys.
    ///
    /// # Errors
    /// `Corruption` when anything is not as a writer leaves it.
    pub(crate) fn check(block: &'a [u8], name: BlockName) -> Result<Self> {
        check_block(block, name)?;
        let rows = Self::trusted(block).ok_or_else(|| damaged("block is malformed", name))?;
        let keys = |at| rows.delta(at);
        let is_ascending = (1..rows.count()).all(|at| keys(at - 1) < keys(at));
        let last = rows.row(rows.count() - 1).map(|(key, _)| key);
        let first = Key::from_stored(rows.first_key);
        let is_one_table =
            first.zip(last).is_some_and(|(first, last)| first.shares_blocks_with(last));
        if !is_ascending || keys(0) != Some(0) || !is_one_table {
            return Err(damaged("block's keys are out of order", name));
        }
        Ok(rows)
    }

    /// Reads a block that was checked before; `None` when it cannot have been.
    pub(crate) fn trusted(block: &'a [u8]) -> Option<Self> {
        let count = read_u32(block, 24)? as usize;
        let record_bytes = read_u32(block, 28)? as usize;
        if count == 0 || record_bytes == 0 {
            return None;
        }
        let records_at = HEADER_BYTES.checked_add(count.checked_mul(4)?)?;
        let end = records_at.checked_add(count.checked_mul(record_bytes)?)?;
        Some(Self {
            first_key: read_u64(block, 32)?,
            deltas: block.get(HEADER_BYTES..records_at)?,
            records: block.get(records_at..end)?,
            record_bytes,
        })
    }

    /// Returns the number of rows, at least 1.
    pub(crate) fn count(&self) -> usize {
        self.deltas.len() / 4
    }

    /// Returns where rows lie, for walks that visit all of them.
    pub(crate) fn places(&self) -> RowPlaces {
        let (first_key, record_bytes) = (self.first_key, self.record_bytes);
        RowPlaces { first_key, count: self.count(), record_bytes }
    }

    fn delta(&self, at: usize) -> Option<u32> {
        read_u32(self.deltas, 4 * at)
    }

    /// Returns key and record of row `at` of the block.
    pub(crate) fn row(&self, at: usize) -> Option<(Key, &'a [u8])> {
        let number = self.first_key.checked_add(u64::from(self.delta(at)?))?;
        let key = Key::from_stored(number)?;
        Some((key, self.records.get(at * self.record_bytes..(at + 1) * self.record_bytes)?))
    }

    /// Returns the record of `key`, if the block has it. Cost: one binary search.
    pub(crate) fn find(&self, key: Key) -> Option<&'a [u8]> {
        let at = self.lower_bound(key);
        self.row(at).filter(|(found, _)| *found == key).map(|(_, record)| record)
    }

    /// Returns the place of the first row not before `key`.
    pub(crate) fn lower_bound(&self, key: Key) -> usize {
        let Some(wanted) = key.get().checked_sub(self.first_key) else { return 0 };
        let (mut low, mut high) = (0, self.count());
        while low < high {
            let middle = low.midpoint(high);
            if self.delta(middle).is_some_and(|delta| u64::from(delta) < wanted) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// Where in a checked block its rows lie, without borrowing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RowPlaces {
    first_key: u64,
    count: usize,
    record_bytes: usize,
}

impl RowPlaces {
    /// Returns key and place of the record of row `at` of `block`; `None` past the last row.
    pub(crate) fn row(&self, block: &[u8], at: usize) -> Option<(Key, Range<usize>)> {
        if at >= self.count {
            return None;
        }
        let delta = read_u32(block, HEADER_BYTES + 4 * at)?;
        let key = Key::from_stored(self.first_key.checked_add(u64::from(delta))?)?;
        let record_at = HEADER_BYTES + 4 * self.count + self.record_bytes * at;
        Some((key, record_at..record_at + self.record_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tierbed_core::{ErrorKind, RowId, RowKey, TableId};

    const NAME: BlockName = BlockName { sst: SstId(7), number: 3, kind: BlockKind::Rows };

    fn key(row: u64) -> Key {
        Key::cold(RowKey::new(TableId(2), RowId(row)))
    }

    fn block(rows: &[u64]) -> Vec<u8> {
        let mut block = vec![0u8; 512];
        for (at, row) in rows.iter().enumerate() {
            let delta = (row - rows[0]) as u32;
            block[40 + 4 * at..44 + 4 * at].copy_from_slice(&delta.to_le_bytes());
            let record_at = 40 + 4 * rows.len() + 8 * at;
            block[record_at..record_at + 8].copy_from_slice(&row.to_le_bytes());
        }
        let first_key = key(rows[0]).get();
        let entries = Entries { count: rows.len() as u32, record_bytes: 8, first_key };
        seal_block(&mut block, NAME, entries);
        block
    }

    #[test]
    fn finds_its_rows_and_no_others() {
        let bytes = block(&[5, 6, 90]);
        let rows = Rows::check(&bytes, NAME).unwrap();
        for row in [5u64, 6, 90] {
            assert_eq!(rows.find(key(row)), Some(&row.to_le_bytes()[..]));
        }
        for (at, row) in [5u64, 6, 90].into_iter().enumerate() {
            let (found, place) = rows.places().row(&bytes, at).unwrap();
            assert_eq!((found, &bytes[place]), (key(row), &row.to_le_bytes()[..]));
        }
        assert_eq!(rows.places().row(&bytes, 3), None);
        for row in [0, 4, 7, 89, 91] {
            assert_eq!(rows.find(key(row)), None);
        }
        assert_eq!(rows.find(Key::hot(key(5).row())), None);
    }

    #[test]
    fn a_block_of_another_place_or_kind_is_corruption() {
        let bytes = block(&[1, 2]);
        let others = [
            BlockName { sst: SstId(8), ..NAME },
            BlockName { number: 4, ..NAME },
            BlockName { kind: BlockKind::Index, ..NAME },
        ];
        for name in others {
            assert_eq!(check_block(&bytes, name).unwrap_err().kind(), ErrorKind::Corruption);
        }
        let zeros = vec![0u8; 512];
        assert_eq!(Rows::check(&zeros, NAME).unwrap_err().kind(), ErrorKind::Corruption);
        let unordered = block(&[9, 12, 11]);
        assert_eq!(Rows::check(&unordered, NAME).unwrap_err().kind(), ErrorKind::Corruption);
    }

    proptest! {
        #[test]
        fn every_flipped_bit_is_noticed(bit in 0usize..512 * 8) {
            let mut bytes = block(&[1, 5, 9]);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(
                Rows::check(&bytes, NAME).unwrap_err().kind(),
                ErrorKind::Corruption
            );
        }

        #[test]
        fn random_bytes_never_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            count in 0u32..20,
            record_bytes in 0u32..20,
        ) {
            let _ = Rows::check(&bytes, NAME);
            let _ = Rows::trusted(&bytes);
            // With a right checksum the fields themselves must hold.
            if bytes.len() >= 44 {
                let first_key = read_u64(&bytes, 32).unwrap_or(0);
                seal_block(&mut bytes, NAME, Entries { count, record_bytes, first_key });
                if let Ok(rows) = Rows::check(&bytes, NAME) {
                    prop_assert!(rows.find(Key::MAX).is_none() || rows.count() > 0);
                }
            }
        }
    }
}
