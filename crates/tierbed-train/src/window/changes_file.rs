//! The attachment that holds the sets of changed rows: see `docs/reference/formats/store.md`.

use std::collections::BTreeMap;

use roaring::RoaringTreemap;
use tierbed_core::checksum::crc32c;
use tierbed_core::{Error, Result, Schema, TableId};

/// The attachment; names that start with `_` are the house's own.
pub(crate) const CHANGES: &str = "_changes";
const FORMAT: u32 = 1;
/// Bytes of what a snapshot is known by.
const IDENTITY_BYTES: usize = 24;

/// Rows by table.
pub(crate) type Rows = BTreeMap<u32, RoaringTreemap>;

/// Rows written after one publish and before the next.
#[derive(Debug)]
pub(crate) struct ChangeSet {
    /// What was published before.
    pub(crate) since: String,
    rows: Rows,
    /// Of the rows, as they are written.
    bytes: u64,
}

impl ChangeSet {
    pub(crate) fn new(since: String, rows: Rows) -> Self {
        let mut set = Self { since, rows, bytes: 0 };
        set.measure();
        set
    }

    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }

    pub(crate) fn into_rows(self) -> Rows {
        self.rows
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes further rows. Costs a look at every part of the set: bring many at a time.
    pub(crate) fn join(&mut self, more: Rows) {
        for (table, rows) in more {
            *self.rows.entry(table).or_default() |= rows;
        }
        self.measure();
    }

    fn measure(&mut self) {
        self.bytes = self.rows.values().map(|rows| rows.serialized_size() as u64).sum();
    }
}

/// Returns the bytes of `sets`.
pub(crate) fn encode(sets: &[ChangeSet]) -> Vec<u8> {
    let mut bytes = FORMAT.to_le_bytes().to_vec();
    for set in sets {
        assert_eq!(set.since.len(), IDENTITY_BYTES, "identity of a snapshot");
        bytes.extend_from_slice(set.since.as_bytes());
        bytes.extend_from_slice(&(set.rows.len() as u32).to_le_bytes());
        for (table, rows) in &set.rows {
            bytes.extend_from_slice(&table.to_le_bytes());
            bytes.extend_from_slice(&(rows.serialized_size() as u64).to_le_bytes());
            let written = rows.serialize_into(&mut bytes);
            assert!(written.is_ok(), "a vector takes what is written to it");
        }
    }
    let crc = crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes
}

/// Reads the sets of a store of `schema`.
///
/// # Errors
/// `Corruption` when they are not what was written.
pub(crate) fn decode(bytes: &[u8], schema: &Schema) -> Result<Vec<ChangeSet>> {
    let (mut rest, crc) = bytes.split_last_chunk().ok_or_else(damaged)?;
    if crc32c(rest) != u32::from_le_bytes(*crc) {
        return Err(damaged());
    }
    let format = u32::from_le_bytes(take(&mut rest)?);
    if format != FORMAT {
        return Err(damaged().with("format", format));
    }
    let mut sets = Vec::new();
    while !rest.is_empty() {
        sets.push(read_set(&mut rest, schema)?);
    }
    Ok(sets)
}

fn read_set(rest: &mut &[u8], schema: &Schema) -> Result<ChangeSet> {
    let since = take::<IDENTITY_BYTES>(rest)?;
    let since = String::from_utf8(since.to_vec()).map_err(|_| damaged())?;
    let table_count = u32::from_le_bytes(take(rest)?);
    let mut rows = Rows::new();
    for _ in 0..table_count {
        let table = u32::from_le_bytes(take(rest)?);
        let bytes = u64::from_le_bytes(take(rest)?);
        let parts = usize::try_from(bytes).ok().and_then(|bytes| rest.split_at_checked(bytes));
        let (own, after) = parts.ok_or_else(damaged)?;
        let read = RoaringTreemap::deserialize_from(own);
        let read = read.map_err(|cause| damaged().with("cause", cause))?;
        let row_count = schema.table(TableId(table)).map_err(|_| damaged())?.row_count;
        if read.max().is_some_and(|last| last >= row_count) {
            return Err(damaged().with("table_id", table));
        }
        rows.insert(table, read);
        *rest = after;
    }
    Ok(ChangeSet::new(since, rows))
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    let (first, after) = rest.split_first_chunk().ok_or_else(damaged)?;
    *rest = after;
    Ok(*first)
}

fn damaged() -> Error {
    Error::corruption("the engine's attachment is damaged").with("name", CHANGES)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics has failed")]
mod tests {
    use tierbed_core::{ErrorKind, TableSchema};

    use super::*;

    fn schema(row_count: u64) -> Schema {
        Schema::new(vec![TableSchema::plain("a", 10, 4), TableSchema::plain("b", row_count, 4)])
            .unwrap()
    }

    fn sets() -> Vec<ChangeSet> {
        let rows = |rows: &[u64]| rows.iter().copied().collect::<RoaringTreemap>();
        let since = |byte: char| byte.to_string().repeat(IDENTITY_BYTES);
        let first = Rows::from([(0, rows(&[1, 9])), (1, rows(&[0, 70_000, 5 << 32]))]);
        vec![ChangeSet::new(since('a'), first), ChangeSet::new(since('b'), Rows::new())]
    }

    #[test]
    fn sets_come_back() {
        let read = decode(&encode(&sets()), &schema(6 << 32)).unwrap();
        for (read, written) in read.iter().zip(sets()) {
            assert_eq!((&read.since, &read.rows), (&written.since, &written.rows));
        }
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let (bytes, schema) = (encode(&sets()), schema(6 << 32));
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let error = decode(&flipped, &schema).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption, "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len], &schema).is_err(), "cut to {len}");
        }
    }

    #[test]
    fn rows_outside_their_tables_are_damage() {
        assert!(decode(&encode(&sets()), &schema(5 << 32)).is_err());
        assert!(decode(&encode(&sets()), &Schema::default()).is_err());
    }

    #[test]
    fn random_bytes_never_panic() {
        let mut random = tierbed_core::env::SplitMix64::new(7);
        for _ in 0..2000 {
            let mut bytes = encode(&sets());
            bytes.truncate(bytes.len() - 4);
            for _ in 0..1 + random.below(4) {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] = random.below(256) as u8;
            }
            let crc = crc32c(&bytes).to_le_bytes();
            bytes.extend_from_slice(&crc);
            let _ = decode(&bytes, &schema(6 << 32));
        }
    }
}
