//! How a publish is to be divided: what was asked for, and the division of each table that follows.

use tierbed_core::{Error, Result, Schema, TableId, TableSchema};

use super::manifest::Division;
use super::row_shards::{check_shard_count, even_bounds, RowShards};

/// How rows are divided where no placement says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DivideBy {
    /// By a fixed shuffle of the ids.
    Hash,
    /// Into ranges of ids of equal size.
    Rows,
}

/// Tables whose rows are divided by a placement.
#[derive(Debug, Clone)]
pub struct PlacedShards {
    /// The tables, in the order in which their rows are numbered through.
    pub tables: Vec<TableId>,
    /// The shard of each of these rows.
    pub shards: RowShards,
}

/// A publish in shards.
#[derive(Debug, Clone)]
pub struct ShardPlan {
    /// How many.
    pub shard_count: u32,
    /// Servers of each shard that are wanted.
    pub replicas: u32,
    /// How rows are divided that no placement has.
    pub by: DivideBy,
    /// Tables divided by placements.
    pub placed: Vec<PlacedShards>,
    /// Other tables of at most so many bytes of f32 rows are on every shard.
    pub everywhere_bytes: u64,
}

impl ShardPlan {
    /// Fails for a plan that is none of `schema`.
    ///
    /// # Errors
    /// `Invalid` for numbers out of range and for placements of other tables, rows or shards;
    /// `Unsupported` for open vocabularies.
    pub(crate) fn check(&self, schema: &Schema) -> Result<()> {
        check_shard_count(self.shard_count)?;
        if self.replicas == 0 {
            return Err(
                Error::invalid("a shard needs at least one server").with("replicas", self.replicas)
            );
        }
        if let Some(table) = schema.tables().iter().find(|table| table.is_own()) {
            return Err(Error::unsupported(
                "tables with open vocabularies are not divided: each shard would need an index of \
                 its own ids",
            )
            .with("table", &table.name)
            .with("remedy", "publish it whole, and serve it by several equal servers"));
        }
        let mut seen = Vec::new();
        for placed in &self.placed {
            let mut rows = 0u64;
            for &table in &placed.tables {
                rows += schema.table(table)?.row_count;
                if seen.contains(&table) {
                    return Err(Error::invalid("table is divided twice")
                        .with("table", &schema.table(table)?.name));
                }
                seen.push(table);
            }
            let found = placed.shards.shards().len() as u64;
            if found != rows || placed.shards.shard_count() != self.shard_count {
                return Err(Error::invalid("shards of the placement are of other rows or shards")
                    .with("rows_placed", found)
                    .with("rows_of_tables", rows)
                    .with("shards_placed", placed.shards.shard_count())
                    .with("shards", self.shard_count)
                    .with("remedy", "place the log of these tables with as many shards"));
            }
        }
        Ok(())
    }

    /// Returns the shards of the rows of `table`, where a placement says them.
    pub(crate) fn shards_of(&self, schema: &Schema, table: TableId) -> Result<Option<&[u16]>> {
        for placed in &self.placed {
            let mut start = 0usize;
            for &other in &placed.tables {
                let rows = schema.table(other)?.row_count as usize;
                if other == table {
                    return Ok(placed.shards.shards().get(start..start + rows));
                }
                start += rows;
            }
        }
        Ok(None)
    }

    /// Returns how `table` is divided, which no placement has.
    pub(crate) fn division_of(&self, table: &TableSchema) -> Division {
        let (rows, shards) = (table.row_count, u64::from(self.shard_count));
        if 4 * u64::from(table.dim) * rows <= self.everywhere_bytes {
            return Division::Everywhere;
        }
        if rows < shards {
            // Too few rows to divide: one shard has them, another one for another table.
            return Division::Whole { shard: crc_of(&table.name) % self.shard_count };
        }
        match self.by {
            DivideBy::Hash => Division::Hash,
            DivideBy::Rows => Division::Rows { bounds: even_bounds(rows, self.shard_count) },
        }
    }
}

fn crc_of(name: &str) -> u32 {
    tierbed_core::checksum::crc32c(name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(by: DivideBy, everywhere_bytes: u64) -> ShardPlan {
        ShardPlan { shard_count: 4, replicas: 1, by, placed: Vec::new(), everywhere_bytes }
    }

    #[test]
    fn small_tables_are_everywhere_and_ranges_are_of_equal_size() {
        let table = TableSchema::plain("t", 10, 2);
        let by_rows = plan(DivideBy::Rows, 79);
        assert_eq!(by_rows.division_of(&table), Division::Rows { bounds: vec![0, 2, 5, 7, 10] });
        assert_eq!(plan(DivideBy::Rows, 80).division_of(&table), Division::Everywhere);
        assert_eq!(plan(DivideBy::Hash, 0).division_of(&table), Division::Hash);
        let few = TableSchema::plain("t", 3, 2);
        assert!(matches!(
            by_rows.division_of(&TableSchema { dim: 999, ..few }),
            Division::Whole { .. }
        ));
    }

    #[test]
    fn what_cannot_be_divided_is_refused() {
        let tables = ["t", "u"].map(|name| TableSchema::plain(name, 3, 2));
        let schema = Schema::new(tables.to_vec()).unwrap();
        let placed = |tables: &[u32], shard_count, shards: &[u16]| PlacedShards {
            tables: tables.iter().map(|&table| TableId(table)).collect(),
            shards: RowShards::new(shard_count, shards.to_vec()).unwrap(),
        };
        let with = |placed| ShardPlan { placed, ..plan(DivideBy::Hash, 0) };
        let fine = with(vec![placed(&[1, 0], 4, &[0, 1, 2, 3, 3, 3])]);
        fine.check(&schema).unwrap();
        assert_eq!(fine.shards_of(&schema, TableId(0)).unwrap(), Some(&[3, 3, 3][..]));
        assert_eq!(fine.shards_of(&schema, TableId(1)).unwrap(), Some(&[0, 1, 2][..]));
        let wrong = [
            with(vec![placed(&[0], 4, &[0, 1])]),
            with(vec![placed(&[0], 3, &[0, 1, 2])]),
            with(vec![placed(&[0], 4, &[0; 3]), placed(&[0], 4, &[0; 3])]),
            with(vec![placed(&[2], 4, &[0; 3])]),
            ShardPlan { replicas: 0, ..plan(DivideBy::Hash, 0) },
            ShardPlan { shard_count: 0, ..plan(DivideBy::Hash, 0) },
        ];
        assert!(wrong.iter().all(|plan| plan.check(&schema).is_err()));
        let open = Schema::new(vec![TableSchema::plain("_ids.b.t", 4, 4)]).unwrap();
        let error = plan(DivideBy::Hash, 0).check(&open).unwrap_err();
        assert_eq!(error.kind(), tierbed_core::ErrorKind::Unsupported);
    }
}
