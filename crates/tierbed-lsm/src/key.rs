//! Internal keys: the order of row versions in the tree.
//!
//! One number holds hot prefix, table and row, so that the tree is one sorted sequence: first
//! the hot rows of all tables, then the others, table by table.
//!
//! ```text
//! | bit 56 | bits 40..56 | bits 0..40 |
//! | cold   | table id    | row id     |      hot rows have no cold bit and sort first
//! ```

use std::ops::RangeInclusive;

use tierbed_core::schema::{ROW_COUNT_MAX, TABLES_MAX};
use tierbed_core::{RowId, RowKey, TableId};

const ROW_BITS: u32 = 40;
const COLD: u64 = 1 << 56;

const _: () = assert!(ROW_COUNT_MAX == 1 << ROW_BITS && TABLES_MAX == 1 << 16);

/// Place of a row's version in the order of the tree.
///
/// Source: RecDB §4.2 (Key Allocator: "special prefix + original key", the prefix being the
/// lowest in the order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u64);

impl Key {
    /// Smallest key of all.
    pub const MIN: Self = Self(0);
    /// Largest key of all.
    pub const MAX: Self = Self(2 * COLD - 1);

    /// Places `row` among the rows without the hot prefix.
    #[must_use]
    pub fn cold(row: RowKey) -> Self {
        Self(COLD | Self::hot(row).0)
    }

    /// Places `row` among the rows with the hot prefix.
    #[must_use]
    pub fn hot(row: RowKey) -> Self {
        Self(u64::from(row.table.0) << ROW_BITS | row.row.0)
    }

    /// Returns whether the key has the hot prefix.
    #[must_use]
    pub fn is_hot(self) -> bool {
        self.0 & COLD == 0
    }

    /// Returns the row.
    #[must_use]
    pub fn row(self) -> RowKey {
        let table = (self.0 & (COLD - 1)) >> ROW_BITS;
        RowKey::new(TableId(table as u32), RowId(self.0 & ((1 << ROW_BITS) - 1)))
    }

    /// Returns the key's number, as it is stored.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }

    /// Reads a stored number back; `None` when it is no key.
    #[must_use]
    pub fn from_stored(number: u64) -> Option<Self> {
        (number <= Self::MAX.0).then_some(Self(number))
    }

    /// Returns whether both keys have the same prefix and table, so that their records have the
    /// same length and may share a block.
    #[must_use]
    pub fn shares_blocks_with(self, other: Self) -> bool {
        self.0 >> ROW_BITS == other.0 >> ROW_BITS
    }

    /// Returns the possible keys of `table`, with or without the hot prefix.
    #[must_use]
    pub fn range_of(table: TableId, is_hot: bool) -> RangeInclusive<Self> {
        let of = if is_hot { Self::hot } else { Self::cold };
        let row = |row| of(RowKey::new(table, RowId(row)));
        row(0)..=row(ROW_COUNT_MAX - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_rows_of_every_table_stand_before_all_others() {
        let row = |table, row| RowKey::new(TableId(table), RowId(row));
        let keys = [
            Key::hot(row(0, 7)),
            Key::hot(row(3, 1)),
            Key::hot(row(65_535, ROW_COUNT_MAX - 1)),
            Key::cold(row(0, 0)),
            Key::cold(row(0, 8)),
            Key::cold(row(65_535, ROW_COUNT_MAX - 1)),
        ];
        assert!(keys.windows(2).all(|pair| pair[0] < pair[1]));
        for key in keys {
            assert_eq!(Key::from_stored(key.get()), Some(key));
            let again = if key.is_hot() { Key::hot(key.row()) } else { Key::cold(key.row()) };
            assert_eq!(again, key);
        }
        assert_eq!(Key::from_stored(Key::MAX.get() + 1), None);
    }
}
