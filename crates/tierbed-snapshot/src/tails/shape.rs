//! Layout of the index of tails, as the manifest gives it.

use tierbed_core::{Error, Result, TableId};

use super::ranks::Ranks;
use crate::blocks::block_count;
use crate::codecs::Tables;
use crate::forward_index::bits_of;
use crate::manifest::{TableContents, TailInfo};
use crate::page::PageShape;

/// Where the parts of each table lie.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TailShapes {
    /// In id order.
    pub(crate) tables: Vec<TailShape>,
    pub(crate) word_count: u64,
}

/// A table that has a tail: its rows, its pages and its part of the index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TailShape {
    pub(crate) table: TableId,
    /// Rows that the table has.
    pub(crate) row_count: u64,
    pub(crate) stored_rows: u64,
    pub(crate) head_rows: u64,
    pub(crate) first_page: u64,
    pub(crate) rows_per_page: u64,
    pub(crate) parts_per_row: u64,
    /// First word of a bit for each row.
    pub(crate) present_start: u64,
    /// First word of a bit for each stored row.
    pub(crate) heads_start: u64,
    /// First word of the entries of the head.
    pub(crate) entries_start: u64,
}

impl TailShapes {
    /// Lays out the index of `tails`; `contents` are those of all tables.
    ///
    /// # Errors
    /// `Corruption` when they are not in id order, of no table, or have other pages than their rows
    /// need; `Invalid` when the index would not fit the address space.
    pub(crate) fn new(
        tables: Tables<'_>,
        contents: &[TableContents],
        tails: &[TailInfo],
    ) -> Result<Self> {
        let (mut shapes, mut end) = (Vec::with_capacity(tails.len()), 0);
        let mut previous = None;
        for tail in tails {
            let shape = TailShape::new(tables, contents, *tail, end)?;
            if previous >= Some(shape.table) {
                return Err(bad("tables with tails are not in order", *tail));
            }
            previous = Some(shape.table);
            let words = shape.entries_start + entry_words(&shape);
            end = Some(words).filter(|&words| words < 1 << 56).ok_or_else(too_large)?;
            shapes.push(shape);
        }
        Ok(Self { tables: shapes, word_count: end })
    }

    pub(crate) fn block_count(&self) -> u64 {
        block_count(self.word_count)
    }

    /// Returns the bytes of the index in memory, and of the counts beside it.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let counts = self.tables.iter().map(|shape| {
            let present = if shape.has_present() { shape.row_count } else { 0 };
            let heads = if shape.has_heads() { shape.stored_rows } else { 0 };
            Ranks::bytes_of(present) + Ranks::bytes_of(heads)
        });
        8 * self.word_count + counts.sum::<u64>()
    }
}

impl TailShape {
    fn new(
        tables: Tables<'_>,
        contents: &[TableContents],
        tail: TailInfo,
        start: u64,
    ) -> Result<Self> {
        let table = TableId(tail.table);
        let schema = tables
            .schema
            .table(table)
            .map_err(|error| bad("manifest has a tail of no table", tail).with("cause", error))?;
        let Some(contents) = contents.get(tail.table as usize) else {
            return Err(bad("manifest has a tail of no table", tail));
        };
        let page = PageShape::new(schema, tables.codecs.of(table));
        let mut shape = Self {
            table,
            row_count: schema.row_count,
            stored_rows: contents.row_count,
            head_rows: tail.head_rows,
            first_page: tail.first_page,
            rows_per_page: page.rows_per_page as u64,
            parts_per_row: page.parts_per_row as u64,
            present_start: start,
            heads_start: start,
            entries_start: start,
        };
        if shape.stored_rows > shape.row_count || shape.head_rows > shape.stored_rows {
            return Err(bad("manifest has a head of more rows than are stored", tail));
        }
        // Every row takes a bit or a part of a page: these numbers stay far below 2^64.
        if contents.page_count > u64::MAX >> 16 || shape.row_count >= 1 << 62 {
            return Err(too_large());
        }
        let page_count = u128::from(shape.group_count(shape.head_rows))
            + u128::from(shape.group_count(shape.stored_rows - shape.head_rows));
        if page_count * u128::from(shape.parts_per_row) != u128::from(contents.page_count) {
            return Err(bad("manifest has other pages of a tail than its rows need", tail));
        }
        if shape.has_present() {
            shape.heads_start += shape.row_count.div_ceil(64);
        }
        shape.entries_start = shape.heads_start;
        if shape.has_heads() {
            shape.entries_start += shape.stored_rows.div_ceil(64);
        }
        Ok(shape)
    }

    /// Tells whether a bit for each row says whether it is stored.
    pub(crate) fn has_present(&self) -> bool {
        (1..self.row_count).contains(&self.stored_rows)
    }

    /// Tells whether a bit for each stored row says whether it is of the head.
    pub(crate) fn has_heads(&self) -> bool {
        (1..self.stored_rows).contains(&self.head_rows)
    }

    /// Returns the bits of an entry: it is the number of a page of the head, or of as many as a row
    /// needs.
    pub(crate) fn entry_bits(&self) -> u32 {
        bits_of(self.group_count(self.head_rows).saturating_sub(1))
    }

    /// Returns how often `row_count` rows need a page, or as many as a row needs.
    pub(crate) fn group_count(&self, row_count: u64) -> u64 {
        row_count.div_ceil(self.rows_per_page)
    }

    /// Returns the pages that are full of the first `row_count` rows.
    pub(crate) fn pages_before(&self, row_count: u64) -> u64 {
        row_count / self.rows_per_page * self.parts_per_row
    }

    pub(crate) fn head_pages(&self) -> u64 {
        self.group_count(self.head_rows) * self.parts_per_row
    }

    /// Returns the first page of the tail.
    pub(crate) fn tail_page(&self) -> u64 {
        self.first_page + self.head_pages()
    }
}

fn entry_words(shape: &TailShape) -> u64 {
    let bits = u128::from(shape.head_rows) * u128::from(shape.entry_bits());
    u64::try_from(bits.div_ceil(64)).unwrap_or(u64::MAX >> 4)
}

fn bad(what: &'static str, tail: TailInfo) -> Error {
    Error::corruption(what).with("table_id", tail.table)
}

fn too_large() -> Error {
    Error::invalid("index of tails too large")
}
