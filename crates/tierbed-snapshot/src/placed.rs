//! Tables that share pages by a placement, and the numbering of their rows.
//!
//! A placement puts rows that are asked for together on one page, of whatever table they are, as
//! long as their rows are of one size. Its rows are numbered through: those of its first table,
//! then those of the next. Such a number is an *item*; pages and indexes of a placement speak of
//! items.
//!
//! ```text
//! table   c3 (4 rows)   c7 (3 rows)          a page of both    | items 1 4 6 | weights … |
//! item    0  1  2  3    4  5  6                                  c3:1 c7:0 c7:2
//! ```

use std::path::Path;

use crate::codecs::TableCodecs;
use crate::index::PageIndex;
use crate::placement::read_placement;
use tierbed_core::{Error, Result, RowId, RowKey, Schema, TableId};

use crate::page::PageShape;
use tierbed_kernels::Codec;

/// Tables of a snapshot to be written that share pages, and where their rows sit.
#[derive(Debug, Clone)]
pub struct PlacedTables {
    /// The tables, in the order in which their rows are numbered through.
    pub tables: Vec<TableId>,
    /// The pages of each item; the most useful page of an item first.
    pub index: PageIndex,
}

impl PlacedTables {
    /// Reads the placement of `tables` from a file that `tierbed place` wrote.
    ///
    /// # Errors
    /// `Io` and `Corruption` as [`read_placement`].
    pub fn read(tables: Vec<TableId>, path: &Path) -> Result<Self> {
        let (_, index) = read_placement(path)?;
        Ok(Self { tables, index })
    }

    /// Checks that the placement is one of these tables of `schema`; returns their numbering.
    pub(crate) fn check(&self, schema: &Schema, codecs: &TableCodecs) -> Result<Numbering> {
        let tables: Vec<u32> = self.tables.iter().map(|table| table.0).collect();
        let numbering = Numbering::new(schema, &tables)?;
        let placed = self.index.forward().list_count();
        if placed != numbering.item_count {
            return Err(Error::invalid("placement is of another number of rows than its tables")
                .with("rows_placed", placed)
                .with("rows_of_tables", numbering.item_count)
                .with("remedy", "place the log of these tables, in this order"));
        }
        let fullest = self.index.inverted().iter().map(<[u32]>::len).max().unwrap_or(0);
        let rows_per_page = numbering.shape(codecs)?.rows_per_page;
        if fullest > rows_per_page {
            return Err(Error::invalid("placement has more rows on a page than a page holds")
                .with("rows_on_page", fullest)
                .with("rows_per_page", rows_per_page)
                .with("remedy", "place again with at most that many rows per page"));
        }
        Ok(numbering)
    }
}

/// How the rows of some tables of one dim are numbered through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Numbering {
    /// First item of each table, ascending, and the table.
    tables: Vec<(u32, TableId)>,
    /// Rows of all tables.
    pub(crate) item_count: u32,
    /// Elements of a row.
    pub(crate) dim: u32,
}

impl Numbering {
    /// Numbers the rows of `tables` of `schema`.
    ///
    /// # Errors
    /// `Invalid` for no table, an unknown or repeated one, several dims, and 2^32 rows or more.
    pub(crate) fn new(schema: &Schema, tables: &[u32]) -> Result<Self> {
        let mut starts = Vec::with_capacity(tables.len());
        let mut end = 0u64;
        let mut dim = None;
        for &id in tables {
            let table = schema.table(TableId(id))?;
            if *dim.get_or_insert(table.dim) != table.dim {
                return Err(Error::invalid("tables that share pages need the same dim")
                    .with("table", &table.name)
                    .with("dim", table.dim));
            }
            if starts.iter().any(|&(_, known)| known == TableId(id)) {
                return Err(Error::invalid("table is placed twice").with("table", &table.name));
            }
            starts.push((u32::try_from(end).unwrap_or(u32::MAX), TableId(id)));
            end = end.saturating_add(table.row_count);
        }
        let item_count = u32::try_from(end).ok().filter(|&count| count < u32::MAX);
        let Some(item_count) = item_count else {
            return Err(Error::invalid("tables that share pages have fewer than 2^32 - 1 rows")
                .with("rows", end)
                .with("remedy", "place them in several groups"));
        };
        let Some(dim) = dim else {
            return Err(Error::invalid("a placement needs a table"));
        };
        Ok(Self { tables: starts, item_count, dim })
    }

    /// Returns the codec of the tables, which have one.
    pub(crate) fn codec<'a>(&self, codecs: &'a TableCodecs) -> Result<&'a Codec> {
        let [(_, first), others @ ..] = &self.tables[..] else { panic!("a placement has a table") };
        let codec = codecs.of(*first);
        if others.iter().any(|(_, table)| codecs.of(*table) != codec) {
            return Err(Error::invalid("tables that share pages need the same codec")
                .with("codec", codec.name()));
        }
        Ok(codec)
    }

    /// Returns how the pages are cut.
    ///
    /// # Errors
    /// `Invalid` for several codecs and rows larger than a page.
    pub(crate) fn shape(&self, codecs: &TableCodecs) -> Result<PageShape> {
        let shape = PageShape::shared(self.dim, self.codec(codecs)?);
        if shape.parts_per_row > 1 {
            return Err(Error::invalid("rows larger than a page cannot share pages")
                .with("dim", self.dim)
                .with("remedy", "leave the table out of the placement"));
        }
        Ok(shape)
    }

    /// Returns the row of `item`; `None` when there is no such item.
    pub(crate) fn key_of(&self, item: u32) -> Option<RowKey> {
        let after = self.tables.partition_point(|&(start, _)| start <= item);
        let &(start, table) = self.tables.get(after.checked_sub(1)?)?;
        (item < self.item_count).then(|| RowKey::new(table, RowId(u64::from(item - start))))
    }

    /// Returns each table and its first item.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (TableId, u32)> + '_ {
        self.tables.iter().map(|&(start, table)| (table, start))
    }
}

/// Where items of each table of a snapshot begin.
#[derive(Debug, Clone, Default)]
pub(crate) struct Starts {
    /// By table: placement and first item.
    of_table: Vec<Option<(u32, u32)>>,
}

impl Starts {
    /// Notes the tables of each of `numberings`.
    ///
    /// # Panics
    /// When two of them have the same table.
    #[expect(clippy::indexing_slicing, reason = "the list is as long as its tables need")]
    pub(crate) fn new<'a>(numberings: impl IntoIterator<Item = &'a Numbering>) -> Self {
        let mut of_table = Vec::new();
        for (placement, numbering) in (0..).zip(numberings) {
            for (table, start) in numbering.tables() {
                let at = table.0 as usize;
                if of_table.len() <= at {
                    of_table.resize(at + 1, None);
                }
                let known = of_table[at].replace((placement, start));
                assert!(known.is_none(), "{table:?} is in two placements");
            }
        }
        Self { of_table }
    }

    /// Returns placement and item of a row of the schema; `None` when its table is not placed.
    pub(crate) fn find(&self, key: RowKey) -> Option<(u32, u32)> {
        let (placement, start) = (*self.of_table.get(key.table.0 as usize)?)?;
        let item = u64::from(start) + key.row.0;
        assert!(item < u64::from(u32::MAX), "{key:?} is beyond its placement");
        Some((placement, item as u32))
    }

    pub(crate) fn is_placed(&self, table: TableId) -> bool {
        self.of_table.get(table.0 as usize).is_some_and(Option::is_some)
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::TableSchema;

    use super::*;

    fn schema(tables: &[(u64, u32)]) -> Schema {
        let table = |(at, &(row_count, dim)): (usize, &(u64, u32))| {
            TableSchema::plain(format!("t{at}"), row_count, dim)
        };
        Schema::new(tables.iter().enumerate().map(table).collect()).unwrap()
    }

    #[test]
    fn every_row_has_a_number_and_every_number_a_row() {
        let schema = schema(&[(4, 8), (1, 2), (3, 8)]);
        let numbering = Numbering::new(&schema, &[2, 0]).unwrap();
        let starts = Starts::new([&numbering]);
        assert_eq!(numbering.item_count, 7);
        for item in 0..7 {
            let key = numbering.key_of(item).unwrap();
            assert_eq!(starts.find(key), Some((0, item)));
        }
        assert_eq!(numbering.key_of(7), None);
        assert_eq!(numbering.key_of(3), Some(RowKey::new(TableId(0), RowId(0))));
        assert!(starts.find(RowKey::new(TableId(1), RowId(0))).is_none());
        assert!(starts.is_placed(TableId(2)) && !starts.is_placed(TableId(9)));
    }

    #[test]
    fn tables_that_cannot_share_pages_are_refused() {
        let schema = schema(&[(4, 8), (1, 2), (1 << 32, 8), (5, 3000)]);
        for tables in [&[][..], &[0, 1], &[0, 0], &[2], &[3], &[9]] {
            let found = Numbering::new(&schema, tables);
            assert!(found.and_then(|found| found.shape(&TableCodecs::default())).is_err());
        }
        let coded = TableCodecs::named([(TableId(3), "int8"), (TableId(0), "int4")]).unwrap();
        assert!(Numbering::new(&schema, &[3]).unwrap().shape(&coded).is_ok(), "it fits a page now");
        let one = Schema::new(vec![schema.tables()[0].clone(), TableSchema::plain("u", 3, 8)]);
        let error = Numbering::new(&one.unwrap(), &[0, 1]).unwrap().shape(&coded).unwrap_err();
        assert!(error.to_string().contains("same codec"), "{error}");
    }
}
