//! Sizes of the heads of tables whose other rows lie by id.

use std::collections::BTreeMap;

use tierbed_core::{Error, Result, Schema, TableId};

use super::writer::MemoryBytes;
use crate::codecs::Tables;
use crate::page::PageShape;

/// How many rows of a table have entries in its index: those that come first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeadSize {
    /// So many.
    Rows(u64),
    /// So many of each row stored, 0 to 1.
    Share(f64),
}

impl HeadSize {
    /// Parses a number of rows, or a share as `5%`.
    ///
    /// # Errors
    /// `Invalid` for another text, and a share above all rows.
    pub fn parse(text: &str) -> Result<Self> {
        let share = |percent: &str| {
            let percent: f64 = percent.trim().parse().ok()?;
            (0.0..=100.0).contains(&percent).then_some(Self::Share(percent / 100.0))
        };
        let size = match text.trim().strip_suffix('%') {
            Some(percent) => share(percent),
            None => text.trim().parse().ok().map(Self::Rows),
        };
        size.ok_or_else(|| {
            Error::invalid("head_rows is a number of rows, or a share of them")
                .with("found", text)
                .with("remedy", "give a number from 0 on, or 0% to 100%")
        })
    }

    /// Returns the rows of the head when a table stores `stored_rows`.
    #[must_use]
    pub fn of(self, stored_rows: u64) -> u64 {
        match self {
            Self::Rows(rows) => rows,
            Self::Share(share) => (share * stored_rows as f64).ceil() as u64,
        }
    }
}

/// The tables that have a tail, and the sizes of their heads.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TableHeads(BTreeMap<u32, HeadSize>);

impl TableHeads {
    /// Takes sizes by table.
    #[must_use]
    pub fn new(tables: impl IntoIterator<Item = (TableId, HeadSize)>) -> Self {
        Self(tables.into_iter().map(|(table, size)| (table.0, size)).collect())
    }

    /// Returns whether no table has a tail.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns each table and the size of its head, in id order.
    pub fn iter(&self) -> impl Iterator<Item = (TableId, HeadSize)> + '_ {
        self.0.iter().map(|(&table, &size)| (TableId(table), size))
    }

    /// Returns the least memory that tails of `tables` need to be written: tables are written one
    /// after the other, but bitmaps of all are kept.
    pub(crate) fn memory_bytes_min(&self, tables: Tables<'_>) -> u64 {
        let kept = self.parts(tables).map(|part| part.kept).sum::<u64>();
        kept + self.sorter_bytes_min(tables)
    }

    /// Returns what of it is for sorting.
    pub(crate) fn sorter_bytes_min(&self, tables: Tables<'_>) -> u64 {
        self.parts(tables).map(|part| part.sorter).max().unwrap_or(0)
    }

    fn parts<'a>(&'a self, tables: Tables<'a>) -> impl Iterator<Item = MemoryBytes> + 'a {
        let known =
            self.iter().filter_map(move |(id, _)| Some((id, tables.schema.table(id).ok()?)));
        known.map(move |(id, table)| {
            let code_bytes = PageShape::new(table, tables.codecs.of(id)).row_bytes;
            MemoryBytes::of(table.row_count, code_bytes)
        })
    }

    /// Checks that `schema` has the tables, with pages of their own.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, one that shares pages, and the index of a vocabulary.
    pub(crate) fn check(&self, schema: &Schema, is_placed: impl Fn(TableId) -> bool) -> Result<()> {
        for (table, _) in self.iter() {
            let name = &schema.table(table)?.name;
            if is_placed(table) {
                return Err(Error::invalid("a table that shares pages by a placement has no tail")
                    .with("table", name)
                    .with("remedy", "leave it out of the placement, or out of head_rows"));
            }
            if schema.table(table)?.is_own() {
                return Err(Error::invalid("the index of a vocabulary has no tail")
                    .with("table", name)
                    .with("remedy", "leave it out of head_rows"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::TableSchema;

    use super::*;

    #[test]
    fn sizes_are_rows_or_shares() {
        assert_eq!(HeadSize::parse("1000").unwrap().of(10), 1000);
        assert_eq!(HeadSize::parse(" 5 % ").unwrap().of(1001), 51);
        assert_eq!(HeadSize::parse("0.5%").unwrap().of(1000), 5);
        assert_eq!(HeadSize::parse("0").unwrap(), HeadSize::Rows(0));
        for text in ["", "%", "-1", "101%", "NaN%", "5.5", "many"] {
            let error = HeadSize::parse(text).unwrap_err().to_string();
            assert!(error.contains("0% to 100%"), "{error}");
        }
    }

    #[test]
    fn only_tables_with_pages_of_their_own_have_tails() {
        let tables = ["a", "b", "_ids.b.t"].map(|name| TableSchema::plain(name, 4, 4));
        let schema = Schema::new(tables.to_vec()).unwrap();
        for (table, is_fine) in [(0, true), (1, false), (2, false), (3, false)] {
            let heads = TableHeads::new([(TableId(table), HeadSize::Rows(1))]);
            assert_eq!(heads.check(&schema, |table| table.0 == 1).is_ok(), is_fine, "{table}");
        }
    }
}
