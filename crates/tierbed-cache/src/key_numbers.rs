//! Four-byte numbers of keys: the rows of all tables numbered through.
//!
//! Where the rows of all tables are few enough, table 1 goes on where table 0 ends, and a number is
//! all that a cache keeps of a key. Otherwise, or when the tables are not known, the
//! number is the key itself in eight bytes.

#![expect(
    clippy::indexing_slicing,
    reason = "the first table begins at number 0, so every number is behind the start of one"
)]

use tierbed_core::RowKey;

use crate::tier::{packed, unpacked};

/// Numbers of four bytes are below; the others say that a slot is empty.
pub(crate) const SHORT_MAX: u64 = 0xFE00_0000;

/// From keys to numbers and back.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyNumbers {
    /// The first number of each table, and the end of the last, `[tables + 1]`; empty: numbers are
    /// long.
    firsts: Box<[u32]>,
}

impl KeyNumbers {
    /// Numbers the rows of tables with so many rows each; of none, any keys.
    pub(crate) fn new(tables: &[u64]) -> Self {
        if !Self::are_short(tables) {
            return Self::default();
        }
        let mut end = 0;
        let mut firsts = vec![0];
        for &row_count in tables {
            end += row_count;
            firsts.push(end as u32);
        }
        Self { firsts: firsts.into_boxed_slice() }
    }

    /// Tells whether the numbers of these tables have four bytes.
    pub(crate) fn are_short(tables: &[u64]) -> bool {
        let all = tables.iter().fold(0u64, |sum, &row_count| sum.saturating_add(row_count));
        !tables.is_empty() && all <= SHORT_MAX
    }

    /// Returns the bytes that it takes for these tables.
    pub(crate) fn bytes_for(tables: &[u64]) -> u64 {
        match Self::are_short(tables) {
            true => ((tables.len() + 1) * size_of::<u32>()) as u64,
            false => 0,
        }
    }

    /// Returns the number of a key; none for a row that its table does not have.
    #[inline]
    pub(crate) fn number(&self, key: RowKey) -> Option<u64> {
        if self.firsts.is_empty() {
            return Some(packed(key));
        }
        let table = key.table.0 as usize;
        let (&first, &end) = (self.firsts.get(table)?, self.firsts.get(table + 1)?);
        let number = u64::from(first).saturating_add(key.row.0);
        (number < u64::from(end)).then_some(number)
    }

    /// Returns the key of a number.
    #[inline]
    pub(crate) fn key(&self, number: u64) -> RowKey {
        if self.firsts.is_empty() {
            return unpacked(number);
        }
        let behind = self.firsts.partition_point(|&first| u64::from(first) <= number);
        let table = behind - 1;
        let row = number - u64::from(self.firsts[table]);
        RowKey::new(tierbed_core::TableId(table as u32), tierbed_core::RowId(row))
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::{RowId, TableId};

    use super::*;

    #[test]
    fn numbers_go_through_all_tables_and_back() {
        let numbers = KeyNumbers::new(&[3, 0, 5, SHORT_MAX - 8]);
        let key = |table, row| RowKey::new(TableId(table), RowId(row));
        let wanted = [(key(0, 0), 0), (key(0, 2), 2), (key(2, 0), 3), (key(2, 4), 7)];
        for (key, number) in wanted.into_iter().chain([(key(3, SHORT_MAX - 9), SHORT_MAX - 1)]) {
            assert_eq!(numbers.number(key), Some(number));
            assert_eq!(numbers.key(number), key);
        }
        for absent in [key(0, 3), key(1, 0), key(3, SHORT_MAX - 8), key(4, 0), key(2, u64::MAX)] {
            assert_eq!(numbers.number(absent), None);
        }
        assert_eq!(KeyNumbers::bytes_for(&[3, 0, 5, SHORT_MAX - 8]), 20);
    }

    #[test]
    fn too_many_rows_or_unknown_tables_keep_whole_keys() {
        for tables in [&[SHORT_MAX, 1][..], &[u64::MAX, u64::MAX], &[]] {
            assert_eq!((KeyNumbers::are_short(tables), KeyNumbers::bytes_for(tables)), (false, 0));
            let key = RowKey::new(TableId(1), RowId(1 << 39));
            let numbers = KeyNumbers::new(tables);
            assert_eq!(numbers.number(key).map(|number| numbers.key(number)), Some(key));
        }
    }
}
