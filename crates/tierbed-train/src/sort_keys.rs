//! Keys by which rows are sorted outside memory, in as few bytes as the schema allows.

#![expect(clippy::indexing_slicing, reason = "keys are of the length that the schema says")]

use tierbed_core::{RowId, RowKey, Schema, TableId};

/// Bytes of a table's number, a use count and a row's number, at most.
const KEY_BYTES_MAX: usize = 4 + COUNT_BYTES + 8;
const COUNT_BYTES: usize = 4;

/// How keys are made: table, use count inverted where there is one, row; most significant byte
/// first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SortKeys {
    table_bytes: usize,
    count_bytes: usize,
    row_bytes: usize,
}

/// A key.
pub(crate) struct SortKey {
    bytes: [u8; KEY_BYTES_MAX],
    len: usize,
}

impl SortKey {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl SortKeys {
    /// Makes keys of table, use count and row: the order of pages.
    pub(crate) fn of_publish(schema: &Schema) -> Self {
        Self { count_bytes: COUNT_BYTES, ..Self::by_id(schema) }
    }

    /// Makes keys of table and row.
    pub(crate) fn by_id(schema: &Schema) -> Self {
        let tables = schema.tables();
        let row_count = tables.iter().map(|table| table.row_count).max().unwrap_or(0);
        Self {
            table_bytes: bytes_below(tables.len() as u64),
            count_bytes: 0,
            row_bytes: bytes_below(row_count).max(1),
        }
    }

    /// Returns the bytes of a key.
    pub(crate) fn key_bytes(self) -> usize {
        self.table_bytes + self.count_bytes + self.row_bytes
    }

    /// Returns the bytes of the table's number, which begins a key.
    pub(crate) fn table_bytes(self) -> usize {
        self.table_bytes
    }

    /// Makes the key of a row, used so often where keys have a use count.
    pub(crate) fn encode(self, key: RowKey, count: Option<u32>) -> SortKey {
        assert_eq!(count.is_some(), self.count_bytes > 0, "a use count");
        let mut bytes = [0; KEY_BYTES_MAX];
        let mut len = 0;
        let inverted = u32::MAX - count.unwrap_or(0);
        for (number, size) in [
            (u64::from(key.table.0), self.table_bytes),
            (u64::from(inverted), self.count_bytes),
            (key.row.0, self.row_bytes),
        ] {
            let lowest = number.to_le_bytes();
            for (place, byte) in bytes[len..len + size].iter_mut().zip(lowest[..size].iter().rev())
            {
                *place = *byte;
            }
            len += size;
        }
        SortKey { bytes, len }
    }

    /// Returns the row that `key` is of.
    pub(crate) fn decode(self, key: &[u8]) -> RowKey {
        assert_eq!(key.len(), self.key_bytes(), "bytes of a sort key");
        let number =
            |bytes: &[u8]| bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte));
        let table = number(&key[..self.table_bytes]) as u32;
        let row = number(&key[key.len() - self.row_bytes..]);
        RowKey::new(TableId(table), RowId(row))
    }
}

/// Returns the bytes that hold every number below `end`.
fn bytes_below(end: u64) -> usize {
    let bits = u64::BITS - end.saturating_sub(1).leading_zeros();
    bits.div_ceil(8) as usize
}

#[cfg(test)]
mod tests {
    use tierbed_core::TableSchema;

    use super::*;

    fn schema(row_counts: &[u64]) -> Schema {
        let tables = row_counts.iter().zip(0..);
        let tables = tables.map(|(&rows, at)| TableSchema::plain(format!("t{at}"), rows, 4));
        Schema::new(tables.collect()).unwrap()
    }

    #[test]
    fn keys_are_short_and_in_the_order_of_pages() {
        for (row_counts, key_bytes) in [
            (&[200][..], 5),
            (&[256, 257], 7),
            (&[1, 1], 6),
            (&[161_000_000], 8),
            (&[1 << 33; 300], 11),
        ] {
            let keys = SortKeys::of_publish(&schema(row_counts));
            assert_eq!(keys.key_bytes(), key_bytes, "{row_counts:?}");
            let mut before: Option<Vec<u8>> = None;
            for (table, &rows) in (0..).zip(row_counts) {
                for count in [u32::MAX, 300, 1, 0] {
                    for row in [0, rows / 2, rows - 1] {
                        let key = RowKey::new(TableId(table), RowId(row));
                        let made = keys.encode(key, Some(count));
                        assert_eq!(keys.decode(made.bytes()), key);
                        let bytes = made.bytes().to_vec();
                        assert!(before.is_none_or(|before| before <= bytes), "{key:?} {count}");
                        before = Some(bytes);
                    }
                }
            }
        }
    }
}
