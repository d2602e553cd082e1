//! Codecs in which the pages of a snapshot keep rows, table by table.
//!
//! A row is coded once, when it is written, with a scale of its own; readers decode it where it is
//! copied out of its page. Deltas and what is made of them carry codes, so no row is coded twice.
//!
//! A row whose code is that of its initial weights is as good as never written: a whole snapshot
//! does not store it, and answers with the initial weights themselves. So a delta that takes a row
//! back to them gives the answers of a whole snapshot, to the bit.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tierbed_core::{Error, Result, RowId, Schema, TableId, TableSchema};
use tierbed_kernels::{fill_initial, Codec};

use crate::placed::PlacedTables;
use crate::shards::ShardPlan;
use crate::tails::TableHeads;
use crate::writer::SnapshotWriter;

/// The codec of each table; f32 where nothing is said.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<u32, String>", into = "BTreeMap<u32, String>")]
pub struct TableCodecs(BTreeMap<u32, Codec>);

impl TableCodecs {
    /// Takes codecs by their names.
    ///
    /// # Errors
    /// `Invalid` for a codec that no page is written in.
    pub fn named<'a>(tables: impl IntoIterator<Item = (TableId, &'a str)>) -> Result<Self> {
        let mut codecs = BTreeMap::new();
        for (table, name) in tables {
            let Some(codec) = Codec::PER_ROW.into_iter().find(|codec| codec.name() == name) else {
                return Err(Error::invalid("no codec of rows on pages")
                    .with("codec", name)
                    .with("known", Codec::PER_ROW.map(|codec| codec.name()).join(", ")));
            };
            if codec != Codec::F32 {
                codecs.insert(table.0, codec);
            }
        }
        Ok(Self(codecs))
    }

    /// Returns whether all rows are f32.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the codec of `table`.
    #[must_use]
    pub fn of(&self, table: TableId) -> &Codec {
        match self.0.get(&table.0) {
            Some(codec) => codec,
            None => &Codec::F32,
        }
    }

    /// Checks that `schema` has the tables and may have them coded.
    ///
    /// # Errors
    /// `Invalid` for an unknown table, and for the index pages of open vocabularies.
    pub(crate) fn check(&self, schema: &Schema) -> Result<()> {
        for &table in self.0.keys() {
            let table = schema.table(TableId(table))?;
            if table.is_own() {
                return Err(Error::invalid("the index of a vocabulary is never coded")
                    .with("table", &table.name));
            }
        }
        Ok(())
    }
}

impl TryFrom<BTreeMap<u32, String>> for TableCodecs {
    type Error = Error;

    fn try_from(names: BTreeMap<u32, String>) -> Result<Self> {
        Self::named(names.iter().map(|(&table, name)| (TableId(table), name.as_str())))
    }
}

impl From<TableCodecs> for BTreeMap<u32, String> {
    fn from(codecs: TableCodecs) -> Self {
        codecs.0.iter().map(|(&table, codec)| (table, codec.name().to_owned())).collect()
    }
}

/// A place for the code of a row's initial weights.
#[derive(Debug, Default)]
pub struct InitialCode {
    weights: Vec<f32>,
    code: Vec<u8>,
}

impl InitialCode {
    /// Tells whether `code` is that of the initial weights of a row of `table`.
    pub fn is(&mut self, table: &TableSchema, codec: &Codec, row: RowId, code: &[u8]) -> bool {
        self.weights.resize(table.dim as usize, 0.0);
        self.code.resize(codec.code_bytes(self.weights.len()), 0);
        fill_initial(&table.init, table.seed, row.0, &mut self.weights);
        codec.encode(&self.weights, &mut self.code).is_ok() && self.code == code
    }
}

/// The tables of a snapshot and how their rows are kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tables<'a> {
    pub(crate) schema: &'a Schema,
    pub(crate) codecs: &'a TableCodecs,
}

/// How the rows of a snapshot are laid out on pages.
#[derive(Debug, Clone, Default)]
pub struct PageLayout {
    /// Tables that share pages.
    pub placed: Vec<PlacedTables>,
    /// How the rows of each table are kept.
    pub codecs: TableCodecs,
    /// Tables whose rows lie by id behind a head.
    pub heads: TableHeads,
    /// Into which shards rows are divided; `None`: all are in one snapshot.
    pub shards: Option<ShardPlan>,
}

impl PageLayout {
    /// Returns the memory that writing tails needs besides that of all rows, at least: tables are
    /// written one after the other, but bitmaps of all are kept.
    #[must_use]
    pub fn tails_bytes_min(&self, schema: &Schema) -> u64 {
        self.heads.memory_bytes_min(Tables { schema, codecs: &self.codecs })
    }

    /// Returns the memory that tails and shards need besides that of all rows, at least, without
    /// placements of pages.
    #[must_use]
    pub fn more_bytes_min(&self, schema: &Schema) -> u64 {
        let tails_bytes = self.tails_bytes_min(schema);
        let Some(plan) = &self.shards else { return tails_bytes };
        let writer_bytes = SnapshotWriter::bytes_min(schema, &[], self);
        // A bit for each row that was written, and a map, which is sorted in 4 bytes a row.
        let row_counts = schema.tables().iter().map(|table| table.row_count);
        let bits_bytes = row_counts.clone().max().unwrap_or(0).div_ceil(64) * 8;
        let maps_bytes = match plan.placed.is_empty() {
            true => 0,
            false => 6 * row_counts.sum::<u64>() + (64 << 10),
        };
        u64::from(plan.shard_count) * writer_bytes + bits_bytes + maps_bytes
    }

    /// Returns how rows are kept, without where they lie.
    pub(crate) fn without_pages(&self) -> Self {
        Self { codecs: self.codecs.clone(), heads: self.heads.clone(), ..Self::default() }
    }
}

impl From<Vec<PlacedTables>> for PageLayout {
    fn from(placed: Vec<PlacedTables>) -> Self {
        Self { placed, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use tierbed_core::TableSchema;

    use super::*;

    #[test]
    fn codecs_of_a_fixed_range_and_indexes_are_refused() {
        for name in ["evstore8", "product", "int2"] {
            let error = TableCodecs::named([(TableId(0), name)]).unwrap_err();
            assert!(error.to_string().contains("known: f32, f16"), "{error}");
        }
        let tables = ["t", "_ids.b.t"].map(|name| TableSchema::plain(name, 4, 4));
        let schema = Schema::new(tables.to_vec()).unwrap();
        for (table, is_fine) in [(0, true), (1, false), (2, false)] {
            let codecs = TableCodecs::named([(TableId(table), "int8")]).unwrap();
            assert_eq!(codecs.check(&schema).is_ok(), is_fine, "table {table}");
        }
    }

    #[test]
    fn f32_goes_without_saying() {
        let codecs = TableCodecs::named([(TableId(1), "f32"), (TableId(2), "int4")]).unwrap();
        assert_eq!((codecs.of(TableId(1)), codecs.of(TableId(2))), (&Codec::F32, &Codec::Int4));
        let json = serde_json::to_string(&codecs).unwrap();
        assert_eq!(json, r#"{"2":"int4"}"#);
        assert_eq!(serde_json::from_str::<TableCodecs>(&json).unwrap(), codecs);
        assert!(TableCodecs::named([(TableId(1), "f32")]).unwrap().is_plain());
    }
}
